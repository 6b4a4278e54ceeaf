"""A call of ring attention: its arguments, their checks, and the agreement of the ranks on them.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims, P ranks of the group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._checks import check_choice, check_integer, check_numbers
from moe_ext.attention.auto import choose, hosts_of
from moe_ext.attention.block import BlockOptions, Keys, accumulation_dtype
from moe_ext.attention.checks import (
    Require,
    check_attn_mask,
    check_latents,
    check_per_head,
    check_tensors,
    draw_seed,
    message_device,
    requires,
    scale_of,
    wants_grad,
)
from moe_ext.attention.layouts import Grid, Layout, check_layout, make_layout, split_group
from moe_ext.attention.masks import (
    Mask,
    Offsets,
    PrefixLen,
    check_cu_seqlens,
    check_end,
    check_window,
    make_mask,
    on_device,
    prefixes_of_rows,
    rows_of_offsets,
)
from moe_ext.attention.schemes import SCHEME_NAMES, SCHEMES
from moe_ext.attention.schemes.base import Call, Workload
from moe_ext.attention.sharding import check_lengths
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import known_hosts
from moe_ext.comm.groups import group_ranks, group_size
from moe_ext.comm.streams import has_streams
from moe_ext.dispatch.wire import ROW_WIRES

OPERATION = "ring_attention"
# Allowed values of options, by name.
_CHOICES: dict[str, Collection[object]] = {
    "scheme": SCHEME_NAMES,
    "precision": ("exact", "fast"),
    "kv_grad_dtype": (None, torch.float32, torch.bfloat16),
    "wire": ROW_WIRES,
}


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the compiled operator; see `ring_attention`.

    The operator has no `up_k` and `up_v`. With them, k is `[B, 1, L, C]` and v `[B, 1, L, R]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens: Offsets | None = None
    prefix_len: PrefixLen | None = None
    attn_mask: Tensor | None = None
    up_k: Tensor | None = None
    up_v: Tensor | None = None

    def check(self, require: Require) -> None:
        """ValueError unless dtypes, devices and shapes match."""
        if self.up is None:
            check_tensors(self.q, self.k, self.v, self.key_mask, require)
        else:
            check_latents(self.q, self.k, self.v, *self.up, self.key_mask, require)
        check_per_head("alibi_slopes", self.alibi_slopes, self.q, require)
        check_per_head("sinks", self.sinks, self.q, require)
        check_attn_mask(self.attn_mask, self.q, require)
        self.check_slopes(require)

    @property
    def up(self) -> tuple[Tensor, Tensor] | None:
        """The up-projections of latents, or None."""
        return None if self.up_k is None or self.up_v is None else (self.up_k, self.up_v)

    def check_slopes(self, require: Require) -> None:
        """ValueError for slopes that require a gradient, because they would not get one."""
        wants = wants_grad(self.alibi_slopes)
        require(not wants, "alibi_slopes", "without gradient", "a tensor that requires one")


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one or several calls, as the user passed them; see `ring_attention`.

    `group` holds all ranks, and `mesh` their arrangement in rows if the user passed a 2-D mesh.
    `told` has options "name=value" of the calling module, which the ranks compare as well. Error
    messages begin with `operation`.
    """

    group: ProcessGroup | None
    mesh: Grid | None = None
    layout: str | Layout = "zigzag"
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    scheme: str = "ring"
    precision: str = "exact"
    kv_grad_dtype: torch.dtype | None = None
    wire: str | None = None
    told: tuple[str, ...] = ()
    operation: str = OPERATION

    @staticmethod
    def of(
        group: ProcessGroup | DeviceMesh | None, operation: str, **options: Any
    ) -> AttentionOptions:
        """The options for a group or mesh that a user passed.

        TypeError with the name `operation` if this rank does not belong to the group.
        """
        return AttentionOptions(*split_group(group, operation), **options)

    @property
    def require(self) -> Require:
        """Function that raises a ValueError with the name of the operation, see `requires`."""
        return requires(self.operation)

    def check(self, seed: int | None = None) -> None:
        """ValueError or TypeError for options that are invalid whatever the tensors are."""
        require = self.require
        annotations = {each.name: each.type for each in fields(self)}
        check_numbers(self.operation, annotations, vars(self))
        self.check_learned()
        check_layout(self.layout, require)
        for name, allowed in _CHOICES.items():
            check_choice(self.operation, name, getattr(self, name), allowed)
        if self.wire is not None and self.scheme != "auto":
            refused = SCHEMES[self.scheme].in_place_refusal(["wire"], group_size(self.group))
            self._require_served(refused)
        if self.scale is not None:
            require(math.isfinite(self.scale), "scale", "finite", self.scale)
        if self.softcap is not None:
            fits = 0 <= self.softcap < math.inf
            require(fits, "softcap", "0 (none) or more", self.softcap)
        require(0 <= self.dropout_p < 1, "dropout_p", "in [0, 1)", self.dropout_p)
        if seed is not None:
            check_integer(self.operation, "seed", seed)
            require(-(1 << 63) <= seed < 1 << 63, "seed", "a 64-bit integer", seed)
        check_window(self.window, self.operation)

    def check_learned(self) -> None:
        """ValueError for options that require a gradient, because they would not get one."""
        for name in ("scale", "softcap", "dropout_p"):
            value = getattr(self, name)
            wants = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
            rule = "without gradient" + " (multiply q by a learned one)" * (name == "scale")
            self.require(not wants, name, rule, "a tensor that requires one")

    def check_scheme(self, inputs: Inputs) -> None:
        """ValueError for a scheme or wire that does not serve the group, tensors or mask."""
        rounds = self.wire is None or inputs.q.dtype != torch.float64
        self.require(rounds, "wire", "None for float64", repr(self.wire))
        if self.scheme != "auto":
            scheme, num_ranks = SCHEMES[self.scheme], group_size(self.group)
            given = {"attn_mask": inputs.attn_mask, "latent": inputs.up}
            names = [name for name, value in given.items() if value is not None]
            refused = scheme.refusal(inputs.q.shape[1], num_ranks, self.mesh)
            self._require_served(refused or scheme.in_place_refusal(names, num_ranks))

    def mask(self, inputs: Inputs) -> Mask:
        """The part of the mask that follows from positions."""
        op, batch = self.operation, inputs.q.shape[0]
        offsets = check_cu_seqlens(inputs.cu_seqlens, op)
        return make_mask(op, self.is_causal, self.window, offsets, inputs.prefix_len, batch)

    def _require_served(self, refused: str | None) -> None:
        if refused is not None:
            raise ValueError(f"{self.operation}: expected {refused}")


def rows_in_line(inputs: Inputs, options: AttentionOptions) -> tuple[Inputs, AttentionOptions]:
    """Turn a batch whose rows have different documents into one sequence of all rows.

    If all rows have the same documents, a single row of offsets replaces those of all rows.
    ValueError unless `cu_seqlens` has a row for each row of q.
    """
    rows = rows_of_offsets(inputs.cu_seqlens, options.operation)
    if rows is None:
        return inputs, options
    require = options.require
    inputs.check(require)
    batch = inputs.q.shape[0]
    require(len(rows) == batch, "cu_seqlens", f"a row of offsets, or {batch} as q has", len(rows))
    lens = prefixes_of_rows(inputs.prefix_len, rows, options.operation)
    if len(set(rows)) == 1:
        return inputs._replace(cu_seqlens=rows[0], prefix_len=lens), options
    rule = "None with other documents in each row (it can hold them itself)"
    require(inputs.attn_mask is None, "attn_mask", rule, "a tensor")
    seq_len = rows[0][-1]
    made = make_layout(options.layout, seq_len, group_size(options.group), cu_seqlens=rows)
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in inputs[:3])
    key_mask = None if inputs.key_mask is None else inputs.key_mask.reshape(1, -1)
    offsets = [i * seq_len + offset for i, row in enumerate(rows) for offset in row[:-1]]
    flat = None if lens is None else tuple(itertools.chain.from_iterable(lens))
    offsets.append(batch * seq_len)
    line = inputs._replace(
        q=q, k=k, v=v, key_mask=key_mask, cu_seqlens=tuple(offsets), prefix_len=flat
    )
    return line, replace(options, layout=_repeated(made, batch))


@functools.lru_cache(maxsize=64)
def _repeated(layout: Layout, times: int) -> Layout:
    """The layout of `times` concatenated sequences, each of which is divided as by `layout`."""
    starts = [i * layout.seq_len for i in range(times)]
    shards = tuple(
        tuple(range(at + p.start, at + p.stop, p.step) for at in starts for p in shard)
        for shard in layout.shards
    )
    return Layout(f"{layout.name} of {times} rows", times * layout.seq_len, shards)


def agree_on_call(
    inputs: Inputs, options: AttentionOptions, seed: int | None = None, drawn: int | None = None
) -> Call:
    """Check a call on every rank, and compare its arguments over the ranks.

    NOTE: device-to-host sync, for the single message in which the ranks compare.

    Args:
        inputs: tensors of this rank.
        options: options of the call.
        seed: seed of the dropout that the user passed, or None.
        drawn: seed that this rank has already drawn if the user passed none.

    Raises:
        ValueError: on every rank, if an argument is invalid on any rank, or differs between ranks.
        RankFailureError: a rank died or did not answer.
    """
    device, repeats = message_device(*inputs), inputs.attn_mask is not None
    with Agreement(options.operation, options.group, device, repeats=repeats) as agreement:
        options.check(seed)
        inputs.check(options.require)
        options.check_scheme(inputs)
        mask = options.mask(inputs)
        # The last offset is S. The lengths of all shards follow from S, as they do from the
        # columns of an attn_mask.
        agreement.repeats |= mask.cu_seqlens is not None
        facts = _facts(inputs, options, mask, seed) if group_size(options.group) > 1 else {}
        own_seed = seed if seed is not None else drawn
        own_seed = draw_seed(options.dropout_p) if own_seed is None else own_seed
        rows = agreement.compare(facts, values=(inputs.q.shape[2], own_seed))
    return call_of(inputs, options, mask, [row[0] for row in rows], rows[0][1])


def _facts(
    inputs: Inputs, options: AttentionOptions, mask: Mask, seed: int | None
) -> dict[str, object]:
    """Name to value of facts that have to be equal on every rank."""
    q, k, v, key_mask, alibi_slopes, sinks, _, _, attn_mask, *up = inputs
    facts: dict[str, object] = {}
    if options.told:
        facts["options of the module"] = dict(option.split("=", 1) for option in options.told)
    facts |= {
        "the dtype of q": q.dtype,
        "B of q": q.shape[0],
        "H of q": q.shape[1],
        "D of q": q.shape[3],
        "Hkv of k": k.shape[1],
        "Dv of v": v.shape[3],
        "layout": options.layout,
        "is_causal": mask.is_causal,
        "window[0]": mask.left,
        "window[1]": mask.right,
        "cu_seqlens": mask.cu_seqlens,
        "prefix_len": mask.prefix_lens,
        "scheme": options.scheme,
        "precision": options.precision,
        "wire": options.wire,
        "mesh": options.mesh and options.mesh.rows,
        "scale": scale_of(options.scale, q.shape[3]),
        "softcap": options.softcap or 0.0,
        "dropout_p": options.dropout_p,
        "giving seed": int(seed is not None),
        "giving key_mask": int(key_mask is not None),
        "alibi_slopes": _told_numbers(alibi_slopes),
        "sinks": _told_numbers(sinks),
        "giving bfloat16 for kv_grad_dtype": int(options.kv_grad_dtype == torch.bfloat16),
        "S of attn_mask (0: none)": 0 if attn_mask is None else attn_mask.shape[3],
        "shapes of the up-projections": str([None if x is None else list(x.shape) for x in up]),
        "requiring a gradient": wants_grad(q, k, v, sinks, attn_mask, *up),
    }
    return facts if seed is None else {**facts, "seed": seed}


def _told_numbers(x: Tensor | None) -> str:
    """Text of a row for the comparison.

    The text holds the values, but only their number on a device with streams, where reading the
    values would synchronise.
    """
    if x is None:
        return "None"
    return f"{len(x)} numbers" if has_streams(x.device) else str(tuple(x.tolist()))


def call_of(
    inputs: Inputs, options: AttentionOptions, mask: Mask, lengths: list[int], seed: int
) -> Call:
    """The call, once the lengths of all shards and the common seed are known."""
    q, group, seq_len = inputs.q, options.group, sum(lengths)
    check_end(mask.cu_seqlens, seq_len, options.operation)
    if inputs.attn_mask is not None:
        columns, rule = inputs.attn_mask.shape[3], f"the {seq_len} keys of all ranks"
        options.require(columns == seq_len, "S of attn_mask", rule, columns)
    layout = make_layout(options.layout, seq_len, len(lengths), cu_seqlens=mask.cu_seqlens)
    check_lengths(layout, lengths, options.operation, group)
    half = options.kv_grad_dtype == torch.bfloat16
    known = None if group is None else known_hosts(group_ranks(group))
    work = Workload(
        q.shape[1],
        replace(Keys(inputs.k, inputs.v, inputs.key_mask).form, wire=options.wire),
        torch.bfloat16 if half else accumulation_dtype(q.dtype),
        layout,
        mask,
        hosts_of(len(lengths), known, options.mesh),
        inputs.attn_mask is not None,
        None if inputs.up is None else (*inputs.up[0].shape[:2], inputs.up[1].shape[1]),
    )
    if options.scheme == "auto":
        choice = choose(work, options.mesh)
        scheme, grid = SCHEMES[choice.scheme], choice.grid
    else:
        scheme = SCHEMES[options.scheme]
        grid = scheme.rows(work.hosts, options.mesh)
    block = BlockOptions(
        scale_of(options.scale, q.shape[3]),
        mask,
        options.softcap or 0.0,
        options.dropout_p,
        seed,
        precision=options.precision,
    )
    offsets = None if mask.cu_seqlens is None else on_device(mask.cu_seqlens, q.device)
    prefix_ends = None if mask.prefix_lens is None else on_device(mask.prefix_lens, q.device)
    if prefix_ends is not None and offsets is not None:
        prefix_ends = prefix_ends + offsets[:-1]
    return Call(group, work, scheme, grid, block, offsets, prefix_ends, inputs.alibi_slopes)
