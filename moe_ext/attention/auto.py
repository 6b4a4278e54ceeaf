"""Choice of a scheme by the bytes that each scheme would send, with the reason.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, D and Dv head dims,
    P ranks of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext._checks import check_choice
from moe_ext.attention.block import KeysForm, accumulation_dtype
from moe_ext.attention.checks import requires
from moe_ext.attention.layouts import Grid, Layout, even_grid, make_layout
from moe_ext.attention.masks import PrefixLen, check_cu_seqlens, check_end, make_mask
from moe_ext.attention.schemes import SCHEMES
from moe_ext.attention.schemes.base import Scheme, Workload
from moe_ext.comm.rates import CostTable
from moe_ext.dispatch.wire import ROW_WIRES

_OP = "choose_scheme"


@dataclass(frozen=True)
class Candidate:
    """A scheme and its cost. Each number is the maximum over ranks.

    Attributes:
        scheme: name for `ring_attention`.
        shape: (rows, ranks of a row), as the shape of a 2-D mesh.
        forward_bytes: bytes that a rank sends in the forward pass.
        backward_bytes: bytes that a rank sends in the backward pass.
        abroad_bytes: bytes that a rank sends to other hosts in both passes.
        rounds: number of exchanges in both passes that follow one another.
        held_bytes: bytes of keys, values, exchanged queries and all their gradients that a rank
            holds in addition to its own shards.
        cost: the number that the choice compares, in bytes inside a host.
        refused: reason why the scheme is not considered, None if it is.
    """

    scheme: str
    shape: tuple[int, int]
    forward_bytes: int = 0
    backward_bytes: int = 0
    abroad_bytes: int = 0
    rounds: int = 0
    held_bytes: int = 0
    cost: int = 0
    refused: str | None = None


@dataclass(frozen=True)
class SchemeChoice:
    """The scheme with the least cost, and all candidates. Its text is a table.

    Attributes:
        scheme: name for `ring_attention`.
        grid: arrangement of the group's ranks in rows, for the scheme.
        reason: reason for the choice, one line.
        candidates: all candidates, the cheapest first and refused ones last.
    """

    scheme: str
    grid: Grid
    reason: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        header = ("scheme", "rows x ranks", "forward", "backward", "to other hosts", "rounds")
        table: list[tuple[str, ...]] = [(*header, "held", "cost")]
        for c in self.candidates:
            shape = f"{c.shape[0]} x {c.shape[1]}"
            amounts = (c.forward_bytes, c.backward_bytes, c.abroad_bytes)
            cells = [*map(_amount, amounts), str(c.rounds), *map(_amount, (c.held_bytes, c.cost))]
            if c.refused is not None and c.held_bytes == 0:
                cells = ["-"] * len(cells)
            table.append((c.scheme, shape, *cells))
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [self.reason]
        for row, note in zip(table, ["", *(c.refused for c in self.candidates)], strict=True):
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:], note or ""]).rstrip())
        return "\n".join(lines)


def _amount(num_bytes: int) -> str:
    """Text of a number of bytes, with three digits and a unit."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            break
    return f"{size:.3g} {unit}"


@dataclass(frozen=True)
class Prices:
    """Costs of a round and of products, in bytes on a link inside a host.

    Attributes:
        round_bytes: bytes that a link carries while a message starts.
        flops_per_byte: operations of products that run while a link carries a byte.
    """

    # The default is the bytes that a link of 12 GB/s carries in the 5 us in which a message starts.
    round_bytes: int = 1 << 16
    # The default is the operations that an accelerator runs while such a link carries a byte.
    flops_per_byte: int = 2000

    @classmethod
    def of(cls, costs: CostTable | None, dtype: torch.dtype) -> Prices:
        """Prices from the rates of the link "node" in a table; without a table the defaults."""
        if costs is None:
            return cls()
        if "node" not in costs.links:
            raise ValueError(
                f"{_OP}: expected costs to have a link named 'node', got {sorted(costs.links)}"
            )
        link = costs.links["node"]
        wide = dtype in (torch.float32, torch.float64)
        seconds = costs.product_seconds(1.0, "float32" if wide else "bfloat16")
        rate = link.exchange_bandwidth
        return cls(round(link.latency * rate), max(1, round(1 / (seconds * rate))))


def _judged(
    scheme: Scheme, work: Workload, grid: Grid, flops: tuple[list[int], list[int]], prices: Prices
) -> Candidate:
    """The candidate for a scheme with a grid."""
    refused = scheme.refusal(work.heads, len(work.hosts), grid)
    refused = refused or scheme.in_place_refusal(work.in_place, len(work.hosts))
    if refused is not None:
        return Candidate(scheme.name, grid.shape, refused=f"expects {refused}")
    traffic = scheme.traffic(work, grid)
    passes = (traffic.forward, traffic.backward)
    costs = [0] * len(work.hosts)
    for one, products in zip(passes, flops, strict=True):
        for rank in range(len(costs)):
            beside = max(0, one.beside[rank] - products[rank] // prices.flops_per_byte)
            costs[rank] += one.awaited[rank] + beside + prices.round_bytes * one.rounds
            costs[rank] += int(traffic.excess * products[rank]) // prices.flops_per_byte
    most = scheme.most_held_bytes
    if most is not None and traffic.held > most:
        refused = f"holds more than {_amount(most)}, and more with every rank"
    abroad = [sum(both) for both in zip(*(one.abroad for one in passes), strict=True)]
    return Candidate(
        scheme.name,
        grid.shape,
        forward_bytes=max(traffic.forward.sent),
        backward_bytes=max(traffic.backward.sent),
        abroad_bytes=max(abroad),
        rounds=traffic.forward.rounds + traffic.backward.rounds,
        held_bytes=traffic.held,
        cost=max(costs),
        refused=refused,
    )


@functools.lru_cache(maxsize=64)
def choose(work: Workload, mesh: Grid | None, prices: Prices = Prices()) -> SchemeChoice:
    """The cheapest scheme, computed from values that every rank knows.

    The cost of a rank is the number of bytes that it sends, where bytes to other hosts count
    `ABROAD_FACTOR` times, plus `round_bytes` for each round. Hops of a ring overlap with products
    of blocks, so only the bytes that the products do not hide count. If some ranks get more heads
    than others, their additional products count as bytes. The cost of a scheme is that of its
    costliest rank; among equals the simplest scheme is taken.
    """
    areas = work.layout.areas(work.mask)
    each = 2 * work.form.batch * work.heads * sum(work.dims)
    flops = [area * each for area in areas], [area * each * 5 // 2 for area in areas]
    ways = [(s, grid) for s in SCHEMES.values() for grid in s.candidates(work.hosts, mesh)]
    judged = [_judged(scheme, work, grid, flops, prices) for scheme, grid in ways]
    order = sorted(range(len(ways)), key=lambda i: (judged[i].refused is not None, judged[i].cost))
    best = order[0]
    candidates = tuple(judged[i] for i in order)
    return SchemeChoice(judged[best].scheme, ways[best][1], _reason(candidates), candidates)


def _reason(candidates: Sequence[Candidate]) -> str:
    """Text of the reason why the first candidate is taken."""
    best, *others = (c for c in candidates if c.refused is None)
    name = _titled(best)
    if not others:
        return f"{name}: no other scheme can serve"
    other = others[0]
    if other.cost == best.cost:
        return f"{name}: as cheap as {_titled(other)}, and simpler"
    return f"{name}: costs {_amount(best.cost)}, the next, {_titled(other)}, {_amount(other.cost)}"


def _titled(candidate: Candidate) -> str:
    if min(candidate.shape) > 1 or candidate.scheme in ("hybrid", "double_ring"):
        return f"{candidate.scheme} {candidate.shape[0]} x {candidate.shape[1]}"
    return candidate.scheme


def choose_scheme(
    *,
    batch: int,
    heads: int,
    seq_len: int,
    dim: int,
    num_ranks: int,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str | Layout = "zigzag",
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    prefix_len: PrefixLen | None = None,
    has_key_mask: bool = False,
    has_attn_mask: bool = False,
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
    hosts: Sequence[int] | None = None,
    mesh_shape: tuple[int, int] | None = None,
    costs: CostTable | None = None,
) -> SchemeChoice:
    """The scheme that `ring_attention(..., scheme="auto")` takes for given sizes, in one process.

    The cost of a rank is the number of bytes that it sends in both passes, plus 64 KiB for each
    round of exchange. Bytes to other hosts count 8 times. Hops of a ring overlap with the products
    of blocks: 2000 operations hide one byte. All-gather is refused if a rank would hold more than
    64 MiB.

    Args:
        batch: B, number of sequences.
        heads: H, number of heads.
        seq_len: S, number of positions of the whole sequence.
        dim: D, elements of a head.
        num_ranks: P, number of ranks of the group.
        kv_heads: Hkv, None for H.
        v_dim: Dv, None for D.
        dtype: dtype of queries, keys and values.
        layout: see `make_layout`.
        is_causal: see `ring_attention`.
        window: see `ring_attention`.
        cu_seqlens: see `ring_attention`.
        prefix_len: see `ring_attention`.
        has_key_mask: True if a `key_mask` travels with the keys.
        has_attn_mask: True if there is an `attn_mask`. Schemes that move queries to other ranks are
            refused then.
        kv_grad_dtype: see `ring_attention`.
        wire: see `ring_attention`.
        hosts: for each rank the number of its host; None for one host.
        mesh_shape: (rows, ranks of a row) of a 2-D mesh, whose rows then count as hosts.
        costs: measured rates of products and of a link named "node", inside a host, to replace
            64 KiB and 2000 operations. `ring_attention` always uses these two defaults.

    Returns:
        The choice. `print` it for a table of all candidates.

    Raises:
        ValueError: sizes that do not match, or costs without a link named "node".
    """
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    require = requires(_OP)
    for name, size in {**sizes, "num_ranks": num_ranks, "seq_len": seq_len}.items():
        require(size >= (0 if name == "seq_len" else 1), name, "positive", size)
    require(heads % kv_heads == 0, "heads", f"a multiple of the {kv_heads} kv_heads", heads)
    if hosts is not None:
        found = f"{len(hosts)} numbers"
        require(len(hosts) == num_ranks, "hosts", f"of {num_ranks} ranks", found)
    if mesh_shape is not None and mesh_shape[0] * mesh_shape[1] != num_ranks:
        raise ValueError(
            f"{_OP}: expected mesh_shape to hold {num_ranks} ranks, got {tuple(mesh_shape)}"
        )
    offsets = check_cu_seqlens(cu_seqlens, _OP)
    check_end(offsets, seq_len, _OP)
    made = make_layout(layout, seq_len, num_ranks, cu_seqlens=offsets)
    check_choice(_OP, "wire", wire, ROW_WIRES)
    v_dim = dim if v_dim is None else v_dim
    form = KeysForm(batch, kv_heads, dim, v_dim, dtype, has_key_mask, wire)
    grads = torch.bfloat16 if kv_grad_dtype == torch.bfloat16 else accumulation_dtype(dtype)
    mask = make_mask(_OP, is_causal, window, offsets, prefix_len, batch)
    grid = None if mesh_shape is None else even_grid(num_ranks, mesh_shape[1])
    on_hosts = hosts_of(num_ranks, hosts, grid)
    work = Workload(heads, form, grads, made, mask, on_hosts, has_attn_mask)
    return choose(work, grid, Prices.of(costs, dtype))


def hosts_of(num_ranks: int, hosts: Sequence[int] | None, grid: Grid | None) -> tuple[int, ...]:
    """For each rank the number of its host.

    The rows of a grid count as hosts. Without a grid and known hosts, all ranks share one host.
    """
    if grid is not None:
        return tuple(grid.place(rank)[0] for rank in range(num_ranks))
    return (0,) * num_ranks if hosts is None else tuple(hosts)
