"""Seconds in which the planner finds a plan."""

import time

from _harness import Table, processor

from moe_ext.planner import plan

MODEL, CLUSTER, BATCH = "mixtral-8x7b", "h100", 2048
NUM_RANKS = (16, 64, 2048)
# Tokens of experts: all alike, and by Zipf's law, where moving experts is searched too.
LOADS = {"even": 0.0, "uneven": 1.0}
TURNS = 3


def tables() -> list[Table]:
    """The table, a row for each job."""
    rows = []
    for num_ranks in NUM_RANKS:
        for name, load in LOADS.items():
            seconds, cpu = [], []
            for _ in range(TURNS):
                start, used = time.perf_counter(), time.process_time()
                found = plan(MODEL, CLUSTER, num_ranks=num_ranks, global_batch=BATCH, load=load)
                seconds.append(time.perf_counter() - start)
                cpu.append(time.process_time() - used)
            times = f"{min(seconds):.2f}", f"{min(cpu):.2f}"
            rows.append((f"{num_ranks}", name, *times, f"{found.num_points}"))
    note = (
        f"`plan({MODEL!r}, {CLUSTER!r}, global_batch={BATCH})`, the least of {TURNS} turns: its "
        "seconds, those of the CPU, and the placements whose time was computed. "
        f"Measured on {processor()}."
    )
    header = ("ranks", "load of experts", "seconds", "CPU seconds", "placements")
    return [Table("Planner: search", note, header, rows)]
