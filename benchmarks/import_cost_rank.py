"""Costs of 2,000 tensors without experts in a process that has imported a module.

``import_cost_rank.py MODULE``, '' for none, prints JSON for each line that comes: what runs to its
costs.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

NUM_TENSORS = 2000

Contender = Callable[[], object]
Cost = tuple[float, ...]


def cost_of(run: Contender) -> Cost:
    """Milliseconds of a run, those of the CPU in all threads of the process, and in this one."""
    clocks = time.perf_counter, time.process_time, time.thread_time
    before = [clock() for clock in clocks]
    run()
    return tuple(1e3 * (clock() - start) for clock, start in zip(clocks, before, strict=True))


def calls_of(run: Contender) -> float:
    """Functions of Python and C that this thread enters in a run."""
    number = 0

    def count(_frame: object, event: str, _given: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return number - 1  # less the call that ends the count


def contenders() -> dict[str, Contender]:
    """Steps that a loop of training takes."""
    parameters = [nn.Parameter(torch.randn(16)) for _ in range(NUM_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn(16)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return {
        "`clip_grad_norm_`": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "fused AdamW": optimizer.step,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1]:
        importlib.import_module(sys.argv[1])
    runs = contenders()
    for _ in sys.stdin:
        found = {name: [*cost_of(run), calls_of(run)] for name, run in runs.items()}
        print(json.dumps(found), flush=True)
