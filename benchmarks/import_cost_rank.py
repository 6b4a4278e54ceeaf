"""Effect of an import on 2,000 tensors without experts, in this process.

``import_cost_rank.py MODULE``: prints JSON, what runs to its milliseconds of CPU before and after.
"""

import importlib
import json
import statistics
import sys
import time

import torch
from torch import nn

NUM_TENSORS, RUNS = 2000, 50


def measured() -> dict[str, float]:
    """Median CPU milliseconds of what runs, on new tensors."""
    parameters = [nn.Parameter(torch.randn(16)) for _ in range(NUM_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn(16)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    runs = {
        "`clip_grad_norm_`": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "fused AdamW": optimizer.step,
    }
    found = {}
    for name, run in runs.items():
        times = []
        for _ in range(RUNS):
            start = time.thread_time()
            run()
            times.append(1e3 * (time.thread_time() - start))
        found[name] = statistics.median(times[RUNS // 10 :])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured()
    before = measured()
    importlib.import_module(sys.argv[1])
    after = measured()
    print(json.dumps({name: (before[name], after[name]) for name in before}))
