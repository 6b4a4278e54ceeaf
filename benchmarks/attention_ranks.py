"""Measurements of contenders by ranks: time, bytes, memory, error to float64, tiles computed.

Shape suffixes: L positions of this rank, M keys of another one.
"""

import contextlib
import ctypes
import functools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from _harness import PRODUCT_FLOP, keep_memory, products
from attention_peers import CONTENDERS, Case, Contender, sharded
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_ext import attention
from moe_ext.testing import spawn_ranks

M_MMAP_THRESHOLD = -3
PROC = Path("/proc/self")
PRODUCTS = "products"
PRODUCTS_AT_A_TIME = 16
TIMEOUT = 280.0


@dataclass
class Cost:
    """Costs of a contender on one rank; squares by tensor (out, dq, dk, dv)."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    sent: int = 0
    peak: int = 0
    squared_error: list[float] = field(default_factory=list)
    squared_norm: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A contender by its name, and what it works on."""

    name: str
    case: Case


def number(file: str, key: str) -> int:
    """The number after `key:` in a file of /proc/self; 0 where there is none."""
    try:
        lines = (PROC / file).read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(found[0]) if found else 0


def measured_once(contender: Contender, rank: int, reference: list[Tensor] | None) -> Cost:
    """Peak memory, bytes sent and errors of one pass."""
    cost = Cost()
    dist.barrier()
    if contender.first_rank_alone and rank > 0:
        return cost
    with contextlib.suppress(OSError):
        (PROC / "clear_refs").write_text("5")  # the high-water mark becomes what is resident now
    resident, written = number("status", "VmRSS"), number("io", "wchar")
    found = contender.run()
    # Gloo writes its messages to sockets, and nothing else is written meanwhile.
    cost.sent = number("io", "wchar") - written
    cost.peak = (number("status", "VmHWM") - resident) * 1024
    for part, whole in zip(found, reference or [], strict=False):
        exact = whole.index_select(2, contender.positions_L)
        part = part if contender.dim == 2 else part.transpose(1, 2)
        cost.squared_error.append(float((part.double() - exact).square().sum()))
        cost.squared_norm.append(float(exact.square().sum()))
    return cost


def costs_here(
    rank: int, jobs: dict[str, Job], repeats: int, few: Sequence[str], path: str | None
) -> dict[str, Cost]:
    """Costs of every job on this rank, timed in turn: A B C A B C ...

    Args:
        rank: of this process.
        jobs: by their labels.
        repeats: how often each is timed.
        few: labels that are timed once.
        path: of the float64 results.
    """
    # Freed tensors go back to the system at once, so that each high-water mark is its own.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    reference = None if path is None else torch.load(path, mmap=True)
    made, found = {}, {}
    for label, job in jobs.items():
        make = CONTENDERS[job.name]
        tiny = replace(job.case, seq_len=32 * dist.get_world_size(), cu_seqlens=None)
        if job.case.cu_seqlens is not None:
            tiny = replace(tiny, cu_seqlens=(0, tiny.seq_len))
        make(tiny).run()  # libraries and connections set themselves up
        made[label] = make(job.case)
    for label, contender in made.items():
        found[label] = measured_once(contender, rank, reference)
    keep_memory(touched=0)
    for turn in range(repeats):
        for label, contender in made.items():
            if turn and label in few:
                continue
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            if rank == 0 or not contender.first_rank_alone:
                contender.run()
            found[label].cpu.append(time.process_time() - cpu)
            found[label].wall.append(time.perf_counter() - wall)
        time_products(found, jobs)
    return found


def time_products(found: dict[str, Cost], jobs: dict[str, Job]) -> None:
    """Square products on all ranks at once, in each dtype of the jobs: the rate of the machine."""
    for dtype in sorted({str(job.case.dtype).removeprefix("torch.") for job in jobs.values()}):
        run = products()[dtype]
        dist.barrier()
        cpu = time.process_time()
        for _ in range(PRODUCTS_AT_A_TIME):
            run()
        cost = found.setdefault(f"{PRODUCTS} {dtype}", Cost())
        cost.cpu.append(time.process_time() - cpu)


@dataclass(frozen=True)
class Found:
    """Costs of a contender over all ranks: sums of CPU seconds, the largest of all else.

    `errors` are relative, of out, dq, dk and dv; empty where there was nothing to compare with.
    """

    cpu: float
    wall: float
    sent: int
    peak: int
    errors: list[float]


def median(rows: Sequence[Sequence[float]], of_ranks: str) -> float:
    """Over the repeats, of the sum or the largest over the ranks; 0 without a repeat."""
    merge = sum if of_ranks == "sum" else max
    values = sorted(merge(turn) for turn in zip(*rows, strict=True))
    return values[len(values) // 2] if values else 0.0


def over_ranks(costs: Sequence[Cost]) -> Found:
    """The costs of one contender."""
    with_error = [cost for cost in costs if cost.squared_error]
    errors = [
        (sum(e) / sum(n)) ** 0.5
        for e, n in zip(
            zip(*(c.squared_error for c in with_error), strict=True),
            zip(*(c.squared_norm for c in with_error), strict=True),
            strict=True,
        )
    ]
    return Found(
        median([cost.cpu for cost in costs], "sum"),
        median([cost.wall or [0.0] * len(cost.cpu) for cost in costs], "max"),
        max(cost.sent for cost in costs),
        max(cost.peak for cost in costs),
        errors,
    )


def measure(
    num_ranks: int,
    jobs: dict[str, Job],
    *,
    repeats: int = 0,
    few: Sequence[str] = (),
    reference: list[Tensor] | None = None,
) -> dict[str, Found]:
    """Every job on `num_ranks` processes of one thread each, by label.

    Where there are repeats, "products float32" (or of another dtype of the jobs) holds the CPU of
    `PRODUCTS_AT_A_TIME` products on each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = None
        if reference is not None:
            path = str(Path(folder) / "reference.pt")
            torch.save(reference, path)
        arguments = (jobs, repeats, tuple(few), path)
        ranks = spawn_ranks(
            costs_here, num_ranks, *arguments, timeout=TIMEOUT, group_timeout=TIMEOUT
        )
    return {label: over_ranks([costs[label] for costs in ranks]) for label in ranks[0]}


def floor_seconds(found: dict[str, Found], dtype: torch.dtype, num_ranks: int, flop: int) -> float:
    """CPU seconds that so many operations would take at the rate of the products."""
    name = str(dtype).removeprefix("torch.")
    done = PRODUCTS_AT_A_TIME * num_ranks * PRODUCT_FLOP
    return found[f"{PRODUCTS} {name}"].cpu * flop / done


def score_products(_rank: int, case: Case, layout: str) -> list[tuple[int, int]]:
    """(queries, keys) of every product of scores that this rank's forward pass runs."""
    where, inputs, _ = sharded(case, layout)
    run = functools.partial(attention.ring_attention, *inputs[:3], is_causal=True, **where)
    with torch.no_grad():
        run()  # ranks that meet read numbers
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            run()
    # Products pass torch's dispatcher by: what is recorded of the two of a tile are looks at their
    # five matrices, the scores first and last.
    shapes = [e.input_shapes[0] for e in seen.events() if e.name == "aten::resolve_conj"]
    return [tuple(shape) for shape in shapes[::5]]


def needed_tiles(case: Case, num_ranks: int, layout: str, tile: tuple[int, int]) -> int:
    """Tiles of rows x columns, in the order of the shards, where some query sees some key."""
    made = attention.make_layout(layout, case.seq_len, num_ranks, cu_seqlens=case.cu_seqlens)
    offsets_N = torch.tensor(case.cu_seqlens or (0, case.seq_len))
    ids = [made.positions(rank) for rank in range(num_ranks)]
    documents = [torch.bucketize(ids_L, offsets_N, right=True) for ids_L in ids]
    count = 0
    for ids_L, documents_L in zip(ids, documents, strict=True):
        for ids_M, documents_M in zip(ids, documents, strict=True):
            seen_LM = ids_M[None] <= ids_L[:, None]
            seen_LM &= documents_M[None] == documents_L[:, None]
            rows = [part.any(0) for part in seen_LM.split(tile[0])]
            count += sum(int(bool(part.any())) for row in rows for part in row.split(tile[1]))
    return count
