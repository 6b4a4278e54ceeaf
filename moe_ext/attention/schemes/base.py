"""The interface of the schemes: a call that the ranks agreed on, and the traffic that it makes.

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

# A byte between hosts takes as long as so many inside one: 50 GB/s beside 400 GB/s.
ABROAD_FACTOR = 8
# Arguments that schemes refuse where heads change places.
_IN_PLACE = {
    "attn_mask": "where queries leave the rank that has their rows",
    "wire": "which sends queries and outputs as well",
    "latent": "which exchanges heads, where a latent has none",
}


@dataclass(frozen=True)
class Workload:
    """Sizes, mask and layout of an attention, the same on every rank.

    Attributes:
        heads: H, heads.
        form: of the keys.
        grad_dtype: of their gradients on the wire.
        layout: who holds which positions.
        mask: who sees which keys.
        hosts: for each rank the number of its host; exchanges inside one are taken to be faster.
        has_attn_mask: each rank has rows of a mask of all pairs.
        up: (H, N, Dv) of latents, whose `form` has one head of C and R elements; else None.
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
        """Arguments that only go with schemes that leave heads in their places."""
        found = {
            "attn_mask": self.has_attn_mask,
            "wire": self.form.wire is not None,
            "latent": self.up is not None,
        }
        return tuple(name for name, given in found.items() if given)

    @property
    def dims(self) -> tuple[int, int]:
        """D and Dv of the keys and values that blocks see."""
        if self.up is None:
            return self.form.dim, self.form.v_dim
        return self.up[1] + self.form.v_dim, self.up[2]

    @property
    def needs(self) -> tuple[tuple[bool, ...], ...]:
        """`[r][c]`: some query of rank r sees some key of rank c."""
        return needed_keys(self.layout.shards, self.mask, self.layout.seq_len)

    def grad_bytes(self, length: int) -> int:
        """Bytes of the gradients of the keys of `length` positions, underway."""
        return self.form.num_elements(length) * self.grad_dtype.itemsize


@dataclass(frozen=True)
class Call:
    """An attention as the ranks agreed on it: all of it that is not a tensor of its graph.

    Attributes:
        group: the ranks; None is this process alone.
        work: sizes, mask and layout.
        scheme: how queries and keys come together.
        grid: the ranks in the rows that the scheme works with.
        options: of every block.
        offsets: cu_seqlens of the mask on the device, or None.
        prefix_ends: `[B or 1, documents]` on the device, past the last position of each prefix, or
            None.
        alibi_slopes: `[H]` or None.
        attn_mask: `[B or 1, H or 1, L, S]` or None, while a pass runs.
        grad_mask: of its shape, for its gradient, where a backward pass takes it.
        up: `[H, N, C]` and `[H, Dv, C]` that make keys and values of latents, or None.
        grad_up: of their shapes, float32 (float64), for their gradients.
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
        """Without library blocks, which have no gradient of a log-sum-exp."""
        return replace(self, options=replace(self.options, precision="exact"))

    def block(self, q: Tensor, source: int, keys: Keys, *, place: int | None = None) -> Block:
        """This rank's queries against the keys of rank `source`.

        `place` is the shard of the queries, where shards are not those of the ranks.
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
        """Keys and values of all heads, of latents; others as they are."""
        if self.up is None:
            return keys
        up_k, up_v = self.up
        nope, rope = keys.k @ up_k.mT, keys.v.expand(-1, len(up_k), -1, -1)
        return Keys(torch.cat([nope, rope], 3), keys.k @ up_v.mT, keys.key_mask)

    def contracted(self, keys: Keys, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of what travels, of those of a block; adds up those of the up-projections."""
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

    A new one is a file beside this and a line in the registry of `schemes/__init__.py`.
    """

    name: str
    # "auto" leaves the scheme out where a rank would hold more bytes than this.
    most_held_bytes: int | None = None
    # Queries stay where their rows of an attn_mask are, and keys travel alone.
    leaves_heads = True

    def refusal(self, heads: int, num_ranks: int, mesh: Grid | None) -> str | None:
        """Why ranks, in the rows of a mesh or None, cannot share heads: "<arg> to be ..."."""
        return None

    def in_place_refusal(self, names: Sequence[str], num_ranks: int) -> str | None:
        """Why such arguments (see `Workload.in_place`) cannot be served: "<arg> to be ..."."""
        if self.leaves_heads or num_ranks == 1 or not names:
            return None
        return (
            f"{names[0]} to be None for scheme {self.name!r}, {_IN_PLACE[names[0]]} "
            "(take 'ring', 'double_ring' or 'all_gather'), got one"
        )

    def rows(self, hosts: Sequence[int], mesh: Grid | None) -> Grid:
        """The ranks in the rows that the scheme works with; the same on every rank.

        Args:
            hosts: for each rank the number of its host.
            mesh: the rows that the user gave, or None.

        Raises:
            ValueError: there are no such rows: "<arg> to be <rule>, got <value>".
        """
        return even_grid(len(hosts), len(hosts))

    def candidates(self, hosts: Sequence[int], mesh: Grid | None) -> list[Grid]:
        """Every arrangement in rows that "auto" may take."""
        return [self.rows(hosts, mesh)]

    @abstractmethod
    def traffic(self, work: Workload, grid: Grid) -> SchemeTraffic:
        """Bytes that each rank sends and holds with these rows, by formulas."""

    @abstractmethod
    def forward(self, q: Tensor, own: Keys, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, packed keys to keep in the place of our own or None).

        `out` and `lse` are float32 (float64).
        """

    @abstractmethod
    def backward(self, saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Gradients:
        """(dq, dk, dv); gradients, lse and delta are float32 (float64)."""


Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Saved:
    """The tensors that a backward pass starts from.

    Attributes:
        call: as in the forward pass.
        q: `[B, H, L, D]`.
        own: this rank's keys; None where `kept` stands for them.
        kept: keys that the forward pass asked to keep, packed.
    """

    call: Call
    q: Tensor
    own: Keys | None
    kept: Tensor | None


def empty_sums(q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries that have seen no keys yet, in the dtype of sums."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v_dim), dtype=dtype)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


class Pass:
    """Messages of each rank in one direction; at first none.

    Attributes:
        hosts: see `Workload`.
        sent: bytes by rank.
        abroad: those of them that go to another host.
        awaited: bytes by rank that nothing is computed beside; those abroad `ABROAD_FACTOR` times.
        beside: the same of hops that run beside blocks.
        rounds: exchanges that one rank waits for, one after the other.
    """

    def __init__(self, hosts: tuple[int, ...]) -> None:
        self.hosts, self.rounds = hosts, 0
        self.sent, self.abroad, self.awaited, self.beside = ([0] * len(hosts) for _ in range(4))

    def add(self, sender: int, receiver: int, num_bytes: int, *, hop: bool) -> None:
        """One message; `hop`: of a ring, posted before a block and awaited behind it."""
        goes_abroad = self.hosts[sender] != self.hosts[receiver]
        self.sent[sender] += num_bytes
        self.abroad[sender] += num_bytes * goes_abroad
        weights = self.beside if hop else self.awaited
        weights[sender] += num_bytes * (ABROAD_FACTOR if goes_abroad else 1)


@dataclass(frozen=True)
class SchemeTraffic:
    """Bytes that one scheme sends and holds.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass.
        held: bytes of keys, values and their gradients, and of exchanged queries and theirs, that a
            rank holds at once beside its own shards.
        excess: what the rank with most heads computes beyond the mean, as a share of the mean.
    """

    forward: Pass
    backward: Pass
    held: int
    excess: float = 0.0
