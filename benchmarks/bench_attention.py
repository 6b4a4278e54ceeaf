"""Attention over a sequence that ranks share, beside PyTorch's ring and another library's.

Shape suffixes: S whole sequence, L positions of a rank, H heads, D head dim, P ranks.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import attention_error
import torch
from _harness import Table
from attention_peers import (
    FLOP_BOTH,
    FLOP_FORWARD,
    ONE_PROCESS,
    OTHER_LIBRARY,
    OURS,
    TORCH_RING,
    Case,
    absences,
    present,
    whole_reference,
)
from attention_ranks import Found, Job, floor_seconds, measure, needed_tiles, score_products

from moe_ext.attention import Mask, make_layout
from moe_ext.testing import spawn_ranks

CHART = Path(__file__).resolve().parent.parent / "docs" / "images" / "attention.png"
REPEATS = 3
CASE = Case()
RANKS = (2, 4)
SPEED = (OURS, "ours, fast", "ours, Ulysses", TORCH_RING)
FORWARD = ("ours, forward", OTHER_LIBRARY)

# Shards of 512 positions and 32 heads, whatever P.
SHARD = Case(seq_len=512, heads=32, dtype=torch.bfloat16)
SHARD_RANKS = (2, 4, 8)
WIRE = (
    OURS,
    "ours, fast",
    "ours, bf16 dK and dV",
    "ours, all-gather",
    "ours, Ulysses",
    TORCH_RING,
    f"{TORCH_RING}, all-gather",
)

PACKED_RANKS = 4
PACKED = {
    "one document": OURS,
    "packed, zigzag": OURS,
    "packed, contiguous": "ours, contiguous",
    "packed, per document": "ours, per document",
    "packed, cost balanced": "ours, cost balanced",
}

BALANCE_RANKS = (2, 3, 4, 8)
LARGE_LENGTHS = (4099, 8191, 65537, 262143)

Speed = dict[tuple[int, torch.dtype, str], Found]


def short(dtype: torch.dtype) -> str:
    """For the tables."""
    return str(dtype).removeprefix("torch.")


def dash(value: float, text: str) -> str:
    """Text, or a dash where nothing was measured."""
    return text if value else "-"


def speeds() -> tuple[Speed, dict[tuple[int, torch.dtype], dict[str, Found]]]:
    """Costs by ranks, dtype and contender; and whole runs, which hold the products too."""
    reference = whole_reference(CASE)
    found: Speed = {}
    runs = {}
    for num_ranks, dtype in itertools.product(RANKS, (torch.float32, torch.bfloat16)):
        # P does not matter to one process, and the other library refuses bfloat16 on CPU.
        names = [*SPEED, *([ONE_PROCESS] if num_ranks == RANKS[0] else [])]
        names += FORWARD if dtype == torch.float32 else []
        jobs = {name: Job(name, replace(CASE, dtype=dtype)) for name in present(names)}
        costs = measure(num_ranks, jobs, repeats=REPEATS, few=(OTHER_LIBRARY,), reference=reference)
        runs[num_ranks, dtype] = costs
        found |= {(num_ranks, dtype, name): costs[name] for name in jobs}
    return found, runs


def speed_row(
    key: tuple[int, torch.dtype, str], found: Speed, run: dict[str, Found]
) -> tuple[str, ...]:
    """A line of the first table."""
    num_ranks, dtype, name = key
    cost, peer = found[key], found.get((num_ranks, dtype, TORCH_RING))
    forward = name in FORWARD
    flop = (FLOP_FORWARD if forward else FLOP_BOTH) * CASE.area * CASE.heads * CASE.dim
    floor = floor_seconds(run, dtype, num_ranks, flop)
    versus = "-" if peer is None or forward else f"{cost.cpu / peer.cpu:.2f}"
    return (
        str(num_ranks),
        short(dtype),
        name,
        f"{1e3 * cost.cpu:.0f}",
        versus,
        f"{cost.cpu / floor:.2f}",
        f"{1e3 * cost.wall:.0f}",
        f"{cost.sent / 1e6:.1f}",
        dash(cost.peak, f"{cost.peak / 1e6:.1f}"),
        f"{max(cost.errors):.1e}",
    )


def speed_table(found: Speed, runs: dict[tuple[int, torch.dtype], dict[str, Found]]) -> Table:
    """Time, traffic, memory and error of one size."""
    note = (
        f"Causal, S={CASE.seq_len} H={CASE.heads} D={CASE.dim}, forward and backward unless it "
        "says forward, P ranks of one thread each over Gloo on one machine, contenders in turn. "
        "*CPU* is that of all ranks together; *CPU / products* is over the time that 14 (forward: "
        "4) operations for each pair under the mask, head and dimension take at the rate of a "
        "square product measured in the same run. *wall* is that of the slowest rank, on a machine "
        "with fewer cores than P where that is so. *sent* and *peak*, of the fullest rank in a "
        "pass of its own, are what it writes to sockets and how far its resident memory rises. "
        "*error* is the largest of the relative errors of out, dq, dk and dv against float64. "
        "`torch's ring` is the template behind `context_parallel`, driven with PyTorch's CPU "
        "kernel (the public function has no causal attention on CPU), with zigzag shards and the "
        "all-to-all exchange. Of `ring-attention-pytorch` 0.5.20 the forward pass alone: its dK "
        f"and dV are wrong.{absences((*SPEED, *FORWARD))}\n\n"
        f"![CPU time, bytes, memory and error](images/{CHART.name})"
    )
    header = (
        "P",
        "dtype",
        "contender",
        "CPU ms",
        "CPU / torch's ring",
        "CPU / products",
        "wall ms",
        "sent MB",
        "peak MB",
        "error",
    )
    rows = [speed_row(key, found, runs[key[:2]]) for key in found]
    return Table("Attention over ranks", note, header, rows)


def shard_costs() -> dict[tuple[str, int], Found]:
    """Bytes and memory by contender and number of ranks, shards of one size."""
    found = {}
    for num_ranks in SHARD_RANKS:
        case = replace(SHARD, seq_len=SHARD.seq_len * num_ranks)
        jobs = {name: Job(name, case) for name in present(WIRE)}
        costs = measure(num_ranks, jobs)
        found |= {(name, num_ranks): costs[name] for name in jobs}
    return {key: found[key] for key in sorted(found, key=lambda key: WIRE.index(key[0]))}


def shards_sent(found: Found) -> float:
    """Bytes in units of the keys and values of one rank."""
    return found.sent / (2 * SHARD.seq_len * SHARD.heads * SHARD.dim * SHARD.dtype.itemsize)


def formula(name: str, num_ranks: int) -> str:
    """Shards of K and V that a ring sends: forward, backward, and dK and dV, in bfloat16's size."""
    if name in (OURS, "ours, fast"):
        return str(4 * (num_ranks - 1))
    if name == "ours, bf16 dK and dV":
        return str(3 * (num_ranks - 1))
    # Gradients in float32 go P hops, the last of them home.
    return str(2 * (num_ranks - 1) + 2 * num_ranks) if name.startswith(TORCH_RING) else "-"


def shard_table(found: dict[tuple[str, int], Found]) -> Table:
    """Bytes and memory while S and P grow together."""
    note = (
        f"Forward and backward, bfloat16, causal, zigzag, H={SHARD.heads} D={SHARD.dim}, "
        f"S = {SHARD.seq_len} P: a rank holds as much whatever P. *K+V shards* are the bytes that "
        "the fullest rank sends over those of its own keys and values, *formula* what the hops "
        "add up to. *peak* is the rise of resident memory, *over P = 2* its growth: 1 is O(S / P). "
        "`torch's ring, all-gather` is the exchange that PyTorch uses by default."
        f"{absences(WIRE)}"
    )
    header = ("contender", "P", "peak MB", "over P = 2", "K+V shards", "formula")
    rows = []
    for (name, num_ranks), cost in found.items():
        first = found[name, SHARD_RANKS[0]].peak
        grown = dash(first, f"{cost.peak / max(first, 1):.3f}")
        peak = dash(cost.peak, f"{cost.peak / 1e6:.1f}")
        sent = f"{shards_sent(cost):.2f}"
        rows.append((name, str(num_ranks), peak, grown, sent, formula(name, num_ranks)))
    return Table("Bytes and memory of attention over ranks", note, header, rows)


def document_offsets(seq_len: int, documents: int = 16) -> tuple[int, ...]:
    """Random documents of mean length `seq_len / documents`."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(seq_len - 1, generator=generator)[: documents - 1] + 1
    return (0, *cuts.sort().values.tolist(), seq_len)


def tile_cells(case: Case, layout: str, tile: tuple[int, int]) -> tuple[str, str, str]:
    """Tiles computed, over those with any pair to compute, pairs computed over the mask's.

    Dashes where no product of the forward pass goes through PyTorch's dispatcher.
    """
    shapes = products_of(case, layout)
    if not shapes:
        return "-", "-", "-"
    needed = needed_tiles(case, PACKED_RANKS, layout, tile) * case.heads
    pairs = sum(rows * columns for rows, columns in shapes) / (case.area * case.heads)
    return str(len(shapes)), f"{len(shapes) / needed:.3f}", f"{pairs:.2f}"


def products_of(case: Case, layout: str) -> list[tuple[int, int]]:
    """(queries, keys) of every product of scores of all ranks."""
    ranks = spawn_ranks(score_products, PACKED_RANKS, case, layout)
    return [shape for rank in ranks for shape in rank]


def packed_table() -> Table:
    """Packed documents beside one document as long as all of them."""
    packed = replace(CASE, cu_seqlens=document_offsets(CASE.seq_len))
    cases = {label: CASE if label == "one document" else packed for label in PACKED}
    jobs = {label: Job(name, cases[label]) for label, name in PACKED.items()}
    found = measure(PACKED_RANKS, jobs, repeats=REPEATS)
    # No mask cuts the tiles in the middle of one document: the largest are whole.
    whole = products_of(CASE, "zigzag") or [(1, 1)]
    tile = max(rows for rows, _ in whole), max(columns for _, columns in whole)
    rows = []
    for label, case in cases.items():
        layout = label.removeprefix("packed, ").replace(" ", "_")
        layout = "zigzag" if label == "one document" else layout
        made = make_layout(layout, case.seq_len, PACKED_RANKS, cu_seqlens=case.cu_seqlens)
        areas = made.areas(case.mask)
        rows.append(
            (
                label,
                f"{1e3 * found[label].cpu:.0f}",
                f"{found[label].cpu / found['one document'].cpu:.2f}",
                f"{case.area / CASE.area:.3f}",
                f"{1e3 * found[label].wall:.0f}",
                f"{found[label].sent / 1e6:.1f}",
                f"{max(areas) * len(areas) / sum(areas):.3f}",
                *tile_cells(case, layout, tile),
            )
        )
    note = (
        f"S={CASE.seq_len} H={CASE.heads} D={CASE.dim}, float32, P={PACKED_RANKS}, forward and "
        "backward, 16 documents of random length in one sequence beside one document. *area* is "
        "that of the mask over that of the causal mask, *balance* the largest over the mean of "
        "the ranks' areas. *tiles* are the products of scores that the forward pass runs, counted "
        f"by PyTorch's profiler; *over needed* is over those of their grid ({tile[0]} queries by "
        f"{tile[1]} keys, in the order of the shards) that hold any pair to compute, *pairs / "
        "mask* what is computed in them over what the mask leaves."
    )
    header = (
        "what",
        "CPU ms",
        "CPU / one document",
        "area",
        "wall ms",
        "sent MB",
        "balance",
        "tiles",
        "over needed",
        "pairs / mask",
    )
    return Table("Packed documents over ranks", note, header, rows)


def balance_table() -> Table:
    """Table of how even the areas of the causal mask are, over many lengths."""
    rows = []
    for num_ranks in BALANCE_RANKS:
        lengths = [*range(2 * num_ranks, 1000), *LARGE_LENGTHS]
        worst, rounded = (0.0, 0), 0.0
        above = 0
        for seq_len in lengths:
            areas = make_layout("zigzag", seq_len, num_ranks).areas(Mask(is_causal=True))
            mean = sum(areas) / num_ranks
            worst = max(worst, (max(areas) / mean, seq_len))
            rounded = max(rounded, max(areas) / -(-sum(areas) // num_ranks))
            above += max(areas) > 1.01 * mean
        even = make_layout("contiguous", 4099, num_ranks).areas(Mask(is_causal=True))
        rows.append(
            (
                str(num_ranks),
                f"{lengths[0]} to {lengths[-1]}",
                f"{worst[0]:.4f} (S={worst[1]})",
                f"{above} of {len(lengths)}",
                f"{rounded:.4f}",
                f"{max(even) * num_ranks / sum(even):.3f}",
            )
        )
    note = (
        "Area of the causal mask on the fullest rank over the mean, zigzag, for every S from 2 P "
        "to 999 and four odd ones up to 262143. *over 1.01* counts lengths; they are short, where "
        "the mean is no whole number of pairs: *over the mean rounded up* is the largest over the "
        "mean as a whole number. *contiguous* is the plain split at S=4099, which PyTorch's "
        "`context_parallel` falls back to, without a word, where S is no multiple of 2 P."
    )
    header = ("P", "S", "largest over mean", "over 1.01", "over the mean rounded up", "contiguous")
    return Table("Balance of zigzag shards", note, header, rows)


def chart(
    found: Speed,
    shards: dict[tuple[str, int], Found],
    errors: dict[tuple[str, int], list[float]],
) -> None:
    """Draws CPU time, bytes, memory and error; a contender has one colour and marker in all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    look = {
        # The larger, hollow markers show lines that another one covers.
        name: {"color": f"C{i}", "marker": "osD^vPX"[i], "markersize": 11 - i, "fillstyle": "none"}
        for i, name in enumerate(WIRE)
    }
    times, sent, peaks, error = figure.subplots(2, 2).flat
    groups = sorted({key[:2] for key in found}, key=str)
    names = [name for name in SPEED if any(key[2] == name for key in found)]
    for i, name in enumerate(names):
        heights = [found[(*group, name)].cpu if (*group, name) in found else 0 for group in groups]
        places = [g + i / (len(names) + 1) for g in range(len(groups))]
        times.bar(places, heights, width=1 / (len(names) + 1), color=look[name]["color"])
    ticks = [f"P={p} {short(dtype)}" for p, dtype in groups]
    times.set_xticks([g + 0.3 for g in range(len(groups))], ticks)
    times.set(ylabel="CPU seconds, of all ranks", xlabel="ranks P and dtype")
    times.set(title="Time of forward and backward pass")
    for name in dict.fromkeys(name for name, _ in shards):
        costs = [shards[name, p] for p in SHARD_RANKS]
        sent.plot(SHARD_RANKS, [shards_sent(c) for c in costs], label=name, **look[name])
        peaks.plot(SHARD_RANKS, [c.peak / 1e6 for c in costs], **look[name])
    sent.set(ylabel="times the size of its K and V", title="Bytes that a rank sends")
    peaks.set(ylabel="MB", title="Peak memory of a rank, S / P fixed")
    for name in dict.fromkeys(name for name, p in errors if p > 1):
        values = [max(errors[name, p]) for p in attention_error.RANKS]
        error.plot(attention_error.RANKS, [1e3 * v for v in values], **look[name])
    error.set(ylabel="thousandths of the norm")
    error.set(title="Largest error of results and gradients, bfloat16")
    for axes in (times, sent, peaks, error):
        axes.set(ylim=(0, None))
    for axes, ranks in ((sent, SHARD_RANKS), (peaks, SHARD_RANKS), (error, attention_error.RANKS)):
        axes.set(xlabel="ranks P", xticks=ranks)
    figure.legend(loc="outside upper center", ncols=len(look))
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=100)


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md; the chart is drawn too."""
    found, runs = speeds()
    shards = shard_costs()
    errors = attention_error.errors()
    chart(found, shards, errors)
    return [
        speed_table(found, runs),
        shard_table(shards),
        packed_table(),
        balance_table(),
        attention_error.table(errors),
    ]
