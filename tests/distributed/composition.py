"""Every combination of tool, placement of experts and memory against training in one process.

    python tests/distributed/composition.py        all cells; writes docs/parallelism.md

Then random mixtures of what the tools and layers offer (mixtures.py).

A cell trains two steps on one number of ranks, saves, and goes on for two steps on another number.
Prints JSON: cell to outcome.
"""

import functools
import itertools
import json
import os
import pickle
import tempfile
import traceback
import warnings
from pathlib import Path

import mixtures
import torch
import torch.distributed as dist
from pairwise import FULL
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
# Key of the mixtures' outcome on a rank, in the form of (cell, half).
MIXED = (("mixtures",), None)
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
    # A second on each rank: but in a full run, the half on four goes on without it.
    compiles = memory == "compile" and (FULL or size == 2)
    model = Model(ep_group, recompute=memory == "recompute all")
    steps = slice(0, STEPS // 2) if half == 0 else slice(STEPS // 2, STEPS)
    job = Job(
        model,
        mesh,
        batches(dist.get_rank(), size)[steps],
        compiles,
        (lambda *_: None) if half == 0 else functools.partial(md.checkpoint.load, path),
        functools.partial(md.checkpoint.save, path) if half == 0 else (lambda *_: None),
        str(path),
        half == 1,
    )
    TRAINERS[trainer](job)
    assert (counters["stats"]["unique_graphs"] > 0) == compiles
    if half == 0:
        return
    for name, parameter in model.named_parameters():
        held = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        difference = float((held - want[name]).abs().max())
        assert difference < TOLERANCE, f"{name} differs by {difference}"


def run_rank(rank, tasks, folder, wanted):
    """Outcome of every half of a cell on this rank: None or a traceback; ends with a failure."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    (want, mixed), found, meshes = pickle.loads(wanted), {}, {}
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
                return found
    if dist.get_world_size() == mixtures.RANKS:
        found[MIXED] = mixtures.run_rank(mixed)
    return found


def outcomes(cells, seeds):
    """Cell to outcome: "equal", or the text of what was raised; expects the tools in PRELOADED."""
    # Once for all ranks; as bytes, since a process takes few tensors as arguments.
    mixed = {seed: mixtures.one_process(seed) for seed in seeds}
    wanted, outcome = pickle.dumps((one_process(), mixed)), {}
    with tempfile.TemporaryDirectory() as folder:
        # Two ranks load what four have saved, and the other way round.
        for ranks, halves in ((2, (0,)), (4, (0, 1)), (2, (1,))):
            going = [cell for cell in cells if outcome.get(cell, "equal") == "equal"]
            tasks = [
                (cell, half)
                for half, cell in itertools.product(halves, going)
                if PLACEMENTS[cell[1]][half][0] == ranks
            ]
            found = testing.spawn_ranks(run_rank, ranks, tasks, folder, wanted, timeout=1800.0)
            for task in [*tasks, *([MIXED] if ranks == mixtures.RANKS else [])]:
                texts = [one.get(task, "not run, after another failure") for one in found]
                # What a rank saw itself, before what others saw of it.
                wrongs = sorted(filter(None, texts), key=lambda text: "RankFailureError" in text)
                outcome[task[0]] = next(iter(wrongs), "equal")
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


def with_text(page, name, text):
    """The page with a text between the marks of this name."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, after = page.index(begin) + len(begin), page.index(end)
    return page[:before] + text + page[after:]


def with_table(page):
    """The page with the table between its marks."""
    return with_text(page, "table", table())


def main():
    # Tools take seconds to import: ranks are forked from a process that has done it.
    testing.PRELOADED += ["torch._dynamo", "transformers.trainer", "lightning.pytorch"]
    found = outcomes(CELLS, range(ALL_MIXTURES))
    print(json.dumps({" / ".join(key): text for key, text in found.items()}, indent=1))
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
