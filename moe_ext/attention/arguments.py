"""What has to hold of the arguments of an attention, on each rank and between the ranks.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims, P ranks of the group.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention._block import BlockOptions
from moe_ext.attention._options import Options
from moe_ext.attention.layouts import LAYOUTS, Layout
from moe_ext.attention.masks import Mask
from moe_ext.attention.schemes import SCHEME_NAMES
from moe_ext.distributed.collectives import check_equal_over_ranks, share
from moe_ext.distributed.failures import RankFailureError
from moe_ext.distributed.groups import group_ranks

OPERATION = "ring_attention"
PRECISIONS = ("exact", "fast")
# Words of `collect_facts`: a rank without facts has to send as many.
NUM_FACTS = 25
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


Require = Callable[[bool, str, str, object], None]


def requires(operation: str) -> Require:
    """A function (condition, argument, rule, value) that raises ValueError unless it holds."""

    def require(condition: bool, argument: str, rule: str, value: object) -> None:
        if not condition:
            raise ValueError(f"{operation}: expected {argument} to be {rule}, got {value}")

    return require


require = requires(OPERATION)


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    per_head: dict[str, Tensor | None],
    require: Require = require,
) -> None:
    """ValueError unless dtypes, devices and shapes go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.dtype in _DTYPES, name, "float32, bfloat16, float16 or float64", x.dtype)
        require(x.dim() == 4, name, "of shape [B, H, L, D]", list(x.shape))
        require(x.dtype == q.dtype, name, f"{q.dtype} like q", x.dtype)
        require(x.device == q.device, name, f"on {q.device} like q", x.device)
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    rule = f"[{batch}, Hkv, {length}, {dim}] to go with q"
    require(k.shape == (batch, kv_heads, length, dim), "k", rule, list(k.shape))
    rule = f"[{batch}, {kv_heads}, {length}, Dv] to go with k"
    require(v.shape[:3] == k.shape[:3], "v", rule, list(v.shape))
    multiple = heads % kv_heads == 0 if kv_heads else heads == 0
    require(multiple, "heads of q", f"a multiple of the {kv_heads} heads of k", heads)
    if key_mask is not None:
        fits = key_mask.shape == (batch, length) and key_mask.dtype == torch.bool
        found = f"{key_mask.dtype} {list(key_mask.shape)}"
        require(fits, "key_mask", f"bool [{batch}, {length}], this rank's keys", found)
    if key_mask is not None:
        require(key_mask.device == q.device, "key_mask", f"on {q.device} like q", key_mask.device)
    for name, values in per_head.items():
        if values is not None:
            require(values.shape == (heads,), name, f"[{heads}]", list(values.shape))
            require(values.dtype in _DTYPES, name, "floating point", values.dtype)
            require(values.device == q.device, name, f"on {q.device} like q", values.device)
    check_slopes(per_head.get("alibi_slopes"))


def check_slopes(slopes: Tensor | None) -> None:
    """ValueError for slopes that would wait for their gradient in vain."""
    wants = slopes is not None and slopes.requires_grad and torch.is_grad_enabled()
    require(not wants, "alibi_slopes", "without gradient", "a tensor that requires one")


def check_numbers(
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seed: int | None,
    require: Require = require,
) -> None:
    """ValueError for a number out of its range."""
    if scale is not None:
        require(math.isfinite(scale), "scale", "finite", scale)
    if softcap is not None:
        require(0 <= softcap < math.inf, "softcap", "0 (none) or more", softcap)
    require(0 <= dropout_p < 1, "dropout_p", "in [0, 1)", dropout_p)
    if seed is not None:
        require(-(1 << 63) <= seed < 1 << 63, "seed", "a 64-bit integer", seed)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


class Facts:
    """What ranks have to agree on, as integers to send and as values to print."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.words: list[int] = []
        self._shown: list[tuple[str, tuple[object, ...] | str]] = []

    def integer(self, name: str, value: int) -> None:
        """A whole number."""
        self.words.append(int(value))
        self._shown.append((name, "integer"))

    def number(self, name: str, value: float) -> None:
        """A float, compared bit by bit."""
        self.words.append(_bits(value))
        self._shown.append((name, "number"))

    def choice(self, name: str, value: object, choices: Sequence[object]) -> None:
        """One of a fixed list."""
        self.words.append(list(choices).index(value))
        self._shown.append((name, tuple(choices)))

    def checksum(self, name: str, value: object) -> None:
        """Anything that prints alike on every rank."""
        self.words.append(zlib.crc32(repr(value).encode()))
        self._shown.append((f"{name} (checksum)", "integer"))

    def tensors(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The dtype, and all sizes but the number of positions."""
        self.choice("the dtype of q", q.dtype, _DTYPES)
        for name, value in zip("BHD", (q.shape[0], q.shape[1], q.shape[3]), strict=True):
            self.integer(f"{name} of q", value)
        self.integer("Hkv of k", k.shape[1])
        self.integer("Dv of v", v.shape[3])

    def places(self, layout: str | Layout, mask: Mask) -> None:
        """Who holds which positions, and which keys are seen by them."""
        name = "a Layout" if isinstance(layout, Layout) else layout
        self.choice("layout", name, (*LAYOUTS, "a Layout"))
        self.checksum("layout", layout)
        self.choice("is_causal", mask.is_causal, (False, True))
        self.integer("window[0]", mask.left)
        self.integer("window[1]", mask.right)
        self.checksum("cu_seqlens", mask.cu_seqlens)

    def agree(
        self,
        length: int,
        seed: int,
        seed_is_given: bool,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> tuple[list[int], int]:
        """(lengths of all shards, the seed of all ranks), once every rank holds the same facts.

        ValueError on every rank otherwise, naming the first fact that differs and its values.
        """
        if group is None:
            return [length], seed
        words = [0, *self.words, length, seed]
        rows = share(words, group, device, operation=self.operation)
        refused = [str(r) for r, row in zip(group_ranks(group), rows, strict=True) if row[0]]
        if refused:
            raise ValueError(
                f"{self.operation}: expected tensors that go together on every rank, got others on "
                f"rank {', '.join(refused)}"
            )
        rows = [row[1:] for row in rows]
        for i, (name, kind) in enumerate(self._shown):
            column: list[object] = [row[i] for row in rows]
            if kind == "number":
                column = [_number(row[i]) for row in rows]
            elif isinstance(kind, tuple):
                column = [kind[row[i]] for row in rows]
            check_equal_over_ranks(name, column, group, self.operation)
        if seed_is_given:
            check_equal_over_ranks("seed", [row[-1] for row in rows], group, self.operation)
        return [row[-2] for row in rows], rows[0][-1]


def tell_refusal(
    operation: str, num_facts: int, group: ProcessGroup | None, device: torch.device
) -> None:
    """Take part in `Facts.agree` without facts, so that no other rank waits for this one."""
    if group is not None:
        with contextlib.suppress(RankFailureError):
            share([1] + [0] * (num_facts + 2), group, device, operation=operation)


def collect_facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    block: BlockOptions,
    flags: list[bool],
    wants_grad: bool,
) -> Facts:
    """Of one call; all but lengths and seed."""
    facts = Facts(OPERATION)
    facts.tensors(q, k, v)
    facts.places(options.layout, block.mask)
    grid = options.grid
    facts.choice("scheme", options.scheme, SCHEME_NAMES)
    facts.choice("precision", options.precision, PRECISIONS)
    facts.integer("rows of the mesh", 0 if grid is None else grid.shape[0])
    facts.checksum("mesh", grid)
    facts.number("scale", block.scale)
    facts.number("softcap", block.softcap)
    facts.number("dropout_p", block.dropout_p)
    for name, flag in zip(
        ("seed", "key_mask", "alibi_slopes", "sinks", "bfloat16 for kv_grad_dtype"),
        flags,
        strict=True,
    ):
        facts.integer(f"giving {name}", flag)
    # A rank without a backward pass would leave the others waiting in theirs.
    facts.integer("requiring a gradient", wants_grad)
    assert len(facts.words) == NUM_FACTS
    return facts
