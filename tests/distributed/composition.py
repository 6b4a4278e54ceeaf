"""Every combination of tool, placement of experts and memory against training in one process.

    python tests/distributed/composition.py        all cells; writes docs/parallelism.md
    python tests/distributed/composition.py --few  one for each tool, for every change

Then random mixtures of what the tools and layers offer (mixtures.py).

A cell trains two steps on one number of ranks, saves, and goes on for two steps on another number.
Prints JSON: cell to outcome.
"""

import functools
import itertools
import json
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import mixtures
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from trainers import LEARNING_RATE, MAX_NORM, TRAINERS, Job, Model

from moe_ext import distributed as md
from moe_ext import testing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
# Name to (ranks, ranks that share the experts) of the first two steps and of the last two.
PLACEMENTS = {"no EP": ((2, 1), (4, 1)), "EP": ((2, 2), (4, 4)), "EP x DP": ((4, 2), (2, 2))}
MEMORY = ("none", "recompute all", "compile")
CELLS = list(itertools.product(TRAINERS, PLACEMENTS, MEMORY))
# One for each tool: placements and memory take turns.
FEW = [
    (tool, ("EP x DP", "EP")[index % 2], MEMORY[index % 3]) for index, tool in enumerate(TRAINERS)
]
STEPS, ROWS = 4, 8
FEW_MIXTURES, ALL_MIXTURES = len(mixtures.CELLS), 200
# What is refused: a pattern of the text.
REFUSED: dict[tuple[str, str, str], str] = {}
# float64: some thousand roundings of 1e-16, and Adam divides by gradients down to 1e-4 of the norm.
TOLERANCE = 1e-10


def batches(rank, size):
    """Batches of a rank; over all ranks they are the same rows for any number of these."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        y = torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)
        found.append({"x": x.chunk(size)[rank], "labels": y.chunk(size)[rank]})
    return found


def one_process():
    """The weights after all steps."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in batches(0, 1):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > 2 * MAX_NORM, "every step has to be clipped"
        optimizer.step()
    return model.state_dict()


def run_cell(cell, half, mesh, folder, want):
    """One half of a cell on this rank; an error says what differs."""
    trainer, placement, memory = cell
    size = dist.get_world_size()
    path = Path(folder) / "-".join(cell).replace(" ", "_")
    torch._dynamo.reset()
    counters.clear()
    ep_group = mesh.ep_group if PLACEMENTS[placement][half][1] > 1 else None
    model = Model(ep_group, recompute=memory == "recompute all")
    steps = slice(0, STEPS // 2) if half == 0 else slice(STEPS // 2, STEPS)
    job = Job(
        model,
        mesh,
        batches(dist.get_rank(), size)[steps],
        memory == "compile",
        (lambda *_: None) if half == 0 else functools.partial(md.checkpoint.load, path),
        functools.partial(md.checkpoint.save, path) if half == 0 else (lambda *_: None),
        str(path),
        half == 1,
    )
    TRAINERS[trainer](job)
    assert memory != "compile" or counters["stats"]["unique_graphs"] > 0
    if half == 0:
        return
    for name, parameter in model.named_parameters():
        held = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        difference = float((held - want[name]).abs().max())
        assert difference < TOLERANCE, f"{name} differs by {difference}"


def run_rank(rank, tasks, folder, want):
    """Outcome of every half of a cell on this rank: None or a traceback; ends with a failure."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    found, meshes = {}, {}
    for cell, half in tasks:
        ranks, ep = PLACEMENTS[cell[1]][half]
        if ep not in meshes:
            meshes[ep] = md.MoEMesh(dp=ranks // ep, ep=ep)
        try:
            run_cell(cell, half, meshes[ep], folder, want)
            found[cell, half] = None
        except Exception as error:
            found[cell, half] = f"{error}\n{traceback.format_exc()}"
            if cell not in REFUSED:
                break
    return found


def run(cells):
    """Cell to outcome: "equal", or the text of what was raised."""
    want, outcome = one_process(), {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, half in ((2, 0), (4, 0), (4, 1), (2, 1)):
            tasks = [(cell, half) for cell in cells if PLACEMENTS[cell[1]][half][0] == ranks]
            tasks = [task for task in tasks if outcome.get(task[0], "equal") == "equal"]
            found = testing.spawn_ranks(run_rank, ranks, tasks, folder, want, timeout=900.0)
            for task in tasks:
                texts = [one.get(task, "not run, after another failure") for one in found]
                # What a rank saw itself, before what others saw of it.
                wrongs = sorted(filter(None, texts), key=lambda text: "RankFailureError" in text)
                wrong = next(iter(wrongs), None)
                outcome[task[0]] = wrong or "equal"
    return outcome


def table():
    """Table of the page: a row for each tool, a column for each placement."""
    lines = [f"| trainer | {' | '.join(PLACEMENTS)} |", "|---|" + "---|" * len(PLACEMENTS)]
    for trainer in TRAINERS:
        cells = []
        for placement in PLACEMENTS:
            refused = [memory for memory in MEMORY if (trainer, placement, memory) in REFUSED]
            cells.append("equal" + "".join(f"; {memory}: refused" for memory in refused))
        lines.append(f"| {trainer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page):
    """The page with the table between its marks."""
    begin, end = "<!-- table -->\n", "\n<!-- end of table -->"
    before, after = page.index(begin) + len(begin), page.index(end)
    return page[:before] + table() + page[after:]


def outcomes(*, few):
    """Cell to outcome, and that of the mixtures; expects the tools in PRELOADED."""
    outcome = {" / ".join(cell): text for cell, text in run(FEW if few else CELLS).items()}
    seeds = range(FEW_MIXTURES if few else ALL_MIXTURES)
    # Once for all ranks; as bytes, since a process takes few tensors as arguments.
    wanted = pickle.dumps({seed: mixtures.one_process(seed) for seed in seeds})
    texts = testing.spawn_ranks(mixtures.run_rank, mixtures.RANKS, wanted, timeout=1800.0)
    wrong = sorted(filter(None, texts), key=lambda text: "RankFailureError" in text)
    outcome["mixtures"] = next(iter(wrong), "equal")
    return outcome


def main():
    few = "--few" in sys.argv
    # Tools take seconds to import: ranks are forked from a process that has done it.
    testing.PRELOADED += ["torch._dynamo", "transformers.trainer", "lightning.pytorch"]
    print(json.dumps(outcomes(few=few), indent=1))
    if not few:
        PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
