"""The interface of the schemes: a call that the ranks agreed on, and the traffic that it causes.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims, P ranks of the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention.block import Block, BlockOptions, Keys, KeysForm, accumulation_dtype
from moe_ext.attention.layouts import Grid, Layout, even_grid
from moe_ext.attention.masks import Mask, needed_keys
from moe_ext.comm.groups import group_rank
from moe_ext.ops.attention import document_ids

# Time of a byte between hosts relative to a byte inside a host: 400 GB/s against 50 GB/s.
ABROAD_FACTOR = 8
# Arguments that schemes which exchange heads refuse, with the reason for error messages.
_IN_PLACE = {
    "attn_mask": "where queries leave the rank that has their rows",
    "wire": "which sends queries and outputs as well",
    "latent": "which exchanges heads, where a latent has none",
}


@dataclass(frozen=True)
class Workload:
    """Sizes, mask and layout of an attention, the same on every rank.

    Attributes:
        heads: H, number of heads.
        form: sizes and dtype of the keys.
        grad_dtype: dtype in which the gradients of keys and values travel.
        layout: which rank holds which positions.
        mask: which keys each query sees.
        hosts: for each rank the number of its host. Messages inside a host count as faster.
        has_attn_mask: True if the call has an `attn_mask`.
        up: (H, N, Dv) for latents, whose `form` has one head of C and R elements; else None.
    """

    heads: int
    form: KeysForm
    grad_dtype: torch.dtype
    layout: Layout
    mask: Mask
    hosts: tuple[int, ...]
    has_attn_mask: bool = False
    up: tuple[int, int, int] | None = None

    @property
    def in_place(self) -> tuple[str, ...]:
        """Names of this call's arguments that only schemes without an exchange of heads support."""
        found = {
            "attn_mask": self.has_attn_mask,
            "wire": self.form.wire is not None,
            "latent": self.up is not None,
        }
        return tuple(name for name, given in found.items() if given)

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv of the keys and values in blocks; those of latents are projected up."""
        if self.up is None:
            return self.form.dim, self.form.v_dim
        return self.up[1] + self.form.v_dim, self.up[2]

    @property
    def needs(self) -> tuple[tuple[bool, ...], ...]:
        """`[r][c]` is True if any query of rank r sees any key of rank c."""
        return needed_keys(self.layout.shards, self.mask, self.layout.seq_len)

    def grad_bytes(self, length: int) -> int:
        """Bytes of a message with the gradients of the keys and values of `length` positions."""
        return self.form.num_elements(length) * self.grad_dtype.itemsize


@dataclass(frozen=True)
class Call:
    """A call that the ranks have agreed on, without the tensors of its autograd graph.

    Attributes:
        group: the ranks; None is this process alone.
        work: sizes, mask and layout.
        scheme: scheme that brings queries and keys together.
        grid: arrangement of the ranks in rows, for the scheme.
        options: options of every block.
        offsets: cu_seqlens of the mask on the device, or None.
        prefix_ends: `[B or 1, documents]` on the device, past the last position of each prefix, or
            None.
        alibi_slopes: `[H]` or None.
        attn_mask: `[B or 1, H or 1, L, S]` or None. Set during a pass only.
        grad_mask: sum of the gradient of `attn_mask`, of its shape. Set during a backward pass that
            needs it.
        up: up-projections `[H, N, C]` of latents to keys and `[H, Dv, C]` to values, or None.
        grad_up: sums of the gradients of `up`, float32 (float64). Set during a backward pass.
    """

    group: ProcessGroup | None
    work: Workload
    scheme: Scheme
    grid: Grid
    options: BlockOptions
    offsets: Tensor | None = None
    prefix_ends: Tensor | None = None
    alibi_slopes: Tensor | None = None
    attn_mask: Tensor | None = None
    grad_mask: Tensor | None = None
    up: tuple[Tensor, Tensor] | None = None
    grad_up: tuple[Tensor, Tensor] | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return group_rank(self.group)

    @property
    def exact(self) -> Call:
        """The same call without library kernels, which do not support a gradient of the lse."""
        return replace(self, options=replace(self.options, precision="exact"))

    def block(self, q: Tensor, source: int, keys: Keys, *, place: int | None = None) -> Block:
        """The block of this rank's queries and the keys of shard `source`.

        `place` is the number of the queries' shard, by default this rank.
        """
        keys = self._expanded(keys)
        place, layout = self.rank if place is None else place, self.work.layout
        q_positions, k_positions = (layout.positions(i, q.device) for i in (place, source))
        q_documents = k_documents = in_prefix = None
        if self.offsets is not None:
            q_documents = document_ids(q_positions, self.offsets)
            k_documents = document_ids(k_positions, self.offsets)
        if self.prefix_ends is not None and self.work.mask.has_prefix(layout.shards[source]):
            ends = self.prefix_ends
            in_prefix = k_positions < (ends if k_documents is None else ends[:, k_documents])
        bias = self.attn_mask
        if bias is not None:
            bias = bias.index_select(3, k_positions)
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill_(~bias, -torch.inf)
        return Block(
            q,
            keys.k,
            keys.v,
            q_positions,
            k_positions,
            q_documents,
            k_documents,
            keys.key_mask,
            in_prefix,
            self.alibi_slopes,
            bias,
            self.grad_mask,
            layout.shards[place],
            layout.shards[source],
        )

    def _expanded(self, keys: Keys) -> Keys:
        """Project latents up to the keys and values of all heads. Other keys are unchanged."""
        if self.up is None:
            return keys
        up_k, up_v = self.up
        nope, rope = keys.k @ up_k.mT, keys.v.expand(-1, len(up_k), -1, -1)
        return Keys(torch.cat([nope, rope], 3), keys.k @ up_v.mT, keys.key_mask)

    def contracted(self, keys: Keys, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the keys and values that travel, from those of a block.

        For latents, the gradients of a block are also added to those of the up-projections.
        """
        if self.up is None:
            return grad_k, grad_v
        up_k, up_v = (weight.to(grad_k.dtype) for weight in self.up)
        latent, split = keys.k.to(grad_k.dtype), up_k.shape[1]
        nope, rope = grad_k[..., :split], grad_k[..., split:]
        assert self.grad_up is not None
        for total, grad in zip(self.grad_up, (nope, grad_v), strict=True):
            total += (grad.mT @ latent).sum(0)
        return (nope @ up_k + grad_v @ up_v).sum(1, keepdim=True), rope.sum(1, keepdim=True)


class Scheme(ABC):
    """A way to bring the queries and keys of all ranks together.

    A new scheme is a file in this folder and a line in the registry of `schemes/__init__.py`.
    """

    name: str
    # Largest number of bytes, as in `SchemeTraffic.held`, with which "auto" takes the scheme.
    most_held_bytes: int | None = None
    # True if only keys and values travel. Queries then stay with their rows of an attn_mask.
    leaves_heads = True

    def refusal(self, heads: int, num_ranks: int, mesh: Grid | None) -> str | None:
        """Reason why the ranks cannot share the heads, "<arg> to be ...", or None if they can.

        `mesh` is the arrangement of the ranks in rows that the user passed, or None.
        """
        return None

    def in_place_refusal(self, names: Sequence[str], num_ranks: int) -> str | None:
        """Reason why arguments of `Workload.in_place` are refused, "<arg> to be ...", or None."""
        if self.leaves_heads or num_ranks == 1 or not names:
            return None
        return (
            f"{names[0]} to be None for scheme {self.name!r}, {_IN_PLACE[names[0]]} "
            "(take 'ring', 'double_ring' or 'all_gather'), got one"
        )

    def rows(self, hosts: Sequence[int], mesh: Grid | None) -> Grid:
        """The arrangement of the ranks in rows for this scheme, the same on every rank.

        Args:
            hosts: for each rank the number of its host.
            mesh: the rows that the user passed, or None.

        Raises:
            ValueError: the ranks cannot be arranged: "<arg> to be <rule>, got <value>".
        """
        return even_grid(len(hosts), len(hosts))

    def candidates(self, hosts: Sequence[int], mesh: Grid | None) -> list[Grid]:
        """All arrangements of the ranks in rows that "auto" compares."""
        return [self.rows(hosts, mesh)]

    @abstractmethod
    def traffic(self, work: Workload, grid: Grid) -> SchemeTraffic:
        """Bytes that each rank sends and holds with the rows of `grid`, by formulas."""

    @abstractmethod
    def forward(self, q: Tensor, own: Keys, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, packed keys to save for the backward pass instead of `own`, or None).

        `out` and `lse` are float32 (float64).
        """

    @abstractmethod
    def backward(self, saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Gradients:
        """(dq, dk, dv), float32 (float64) like grad_out, lse and delta."""


Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Saved:
    """The inputs of a backward pass that the forward pass saved.

    Attributes:
        call: as in the forward pass.
        q: `[B, H, L, D]`.
        own: this rank's keys; None if `kept` was saved instead.
        kept: packed keys that `Scheme.forward` returned, or None.
    """

    call: Call
    q: Tensor
    own: Keys | None
    kept: Tensor | None


def empty_sums(q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Initial (out, lse) before the first block, in the dtype of sums."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v_dim), dtype=dtype)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


class Pass:
    """Messages of each rank in one pass, forward or backward.

    Attributes:
        hosts: see `Workload`.
        sent: for each rank the bytes that it sends.
        abroad: for each rank the bytes that it sends to other hosts.
        awaited: for each rank the bytes whose exchange overlaps with no computation. Bytes to
            other hosts count `ABROAD_FACTOR` times.
        beside: for each rank the bytes of hops that overlap with blocks, weighted like `awaited`.
        rounds: number of exchanges that a rank waits for, one after the other.
    """

    def __init__(self, hosts: tuple[int, ...]) -> None:
        self.hosts, self.rounds = hosts, 0
        self.sent, self.abroad, self.awaited, self.beside = ([0] * len(hosts) for _ in range(4))

    def add(self, sender: int, receiver: int, num_bytes: int, *, hop: bool) -> None:
        """Count one message. A `hop` of a ring is posted before a block and awaited after it."""
        goes_abroad = self.hosts[sender] != self.hosts[receiver]
        self.sent[sender] += num_bytes
        self.abroad[sender] += num_bytes * goes_abroad
        weights = self.beside if hop else self.awaited
        weights[sender] += num_bytes * (ABROAD_FACTOR if goes_abroad else 1)


@dataclass(frozen=True)
class SchemeTraffic:
    """Bytes that one scheme sends and holds.

    Attributes:
        forward: messages of the forward pass.
        backward: messages of the backward pass.
        held: bytes of keys, values, exchanged queries and all their gradients that a rank holds at
            once in addition to its own shards.
        excess: work of the rank with most heads beyond the mean, as a fraction of the mean.
    """

    forward: Pass
    backward: Pass
    held: int
    excess: float = 0.0
