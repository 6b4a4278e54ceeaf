"""Every way to clip by a norm, with every way to train experts over ranks, against one process.

    python tests/distributed/clipping_matrix.py        all cells; writes docs/parallelism.md

A cell trains two steps on four ranks, in float64; with a scaler the gradients of the second one
overflow for one expert. Norms and weights are those of one process, or every rank raises. So for
functions of torch that meet experts, see functions_of_torch.py. Prints JSON: cell to outcome.
"""

import functools
import itertools
import json
import re
import sys
import traceback
import warnings

import functions_of_torch
import torch
from composition import PAGE, TOLERANCE, batches, with_text
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from trainers import LEARNING_RATE, MAX_NORM, Model, as_torchrun

import moe_ext
from moe_ext import distributed as md
from moe_ext import testing
from moe_ext.distributed.dtensor import local_part

RANKS, STEPS, SCALE = 4, 2, 8.0
# Name to sizes of the mesh; tensor-parallel layers have tp=2 besides.
PLACEMENTS = {
    "EP": {"dp": 1, "ep": 4},
    "EP x DP": {"dp": 2, "ep": 2},
    "etp": {"dp": 4, "ep": 2, "etp": 2},
}
# Seconds of all cells.
TIMEOUT = 1800.0
# Steps of SGD show by what a gradient is scaled, but DTensors have no fused ones.
OPTIMIZERS = {
    "loop": functools.partial(torch.optim.SGD, lr=LEARNING_RATE, foreach=False),
    "foreach": functools.partial(torch.optim.SGD, lr=LEARNING_RATE, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
}
SCALERS = {
    "no scaler": None,
    "torch's scaler": torch.amp.GradScaler,
    "moe_ext's scaler": md.GradScaler,
}
# Name to what prepares a model for training, and what follows its backward pass; as to clip.
TOOLS, CLIPS = {}, {}


def into(table, name):
    """Register a function in a table, under the name that docs/parallelism.md gives it."""
    return functools.partial(table.setdefault, name)


def experts_of(model):
    """The modules that hold experts."""
    return [layer.experts for layer in model.layers]


def do_nothing(model):
    """What follows a backward pass in which all gradients were reduced."""


@into(TOOLS, "plain loop, `sync_gradients`")
def plain_loop(model, mesh):
    return model, md.sync_gradients


@into(TOOLS, "`DDP(parallelize(model))`")
def data_parallel(model, mesh):
    return DistributedDataParallel(moe_ext.parallelize(model)), do_nothing


@into(TOOLS, "`replicate(..., ignored_modules=)`")
def replicated(model, mesh):
    moe_ext.parallelize(model)
    return replicate(model, ignored_modules=experts_of(model)), do_nothing


@into(TOOLS, "`moe_ext.distributed.fully_shard`")
def fully_shard(model, mesh):
    for module in (*model.layers, model):
        md.fully_shard(module, mesh)
    return model, do_nothing


@into(TOOLS, "torch's `fully_shard(..., ignored_params=)`, `sync_gradients`")
def torch_fully_shard(model, mesh):
    from torch.distributed import fsdp

    ignored = {p for experts in experts_of(model) for p in experts.parameters()}
    fsdp.fully_shard(model, mesh=mesh.world_mesh, ignored_params=ignored)
    return model, md.sync_gradients


@into(TOOLS, "`parallelize(model)`, then torch's `fully_shard(..., ignored_params=)`")
def parallelized_torch_fully_shard(model, mesh):
    return torch_fully_shard(moe_ext.parallelize(model), mesh)[0], do_nothing


def divide_layers(model, mesh):
    """Tensor-parallel layers before and behind the experts."""
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    plan = {"inp": ColwiseParallel(**whole), "out": RowwiseParallel(**whole)}
    parallelize_module(model, mesh.data_mesh["tp"], plan)


@into(TOOLS, "tensor-parallel layers, `sync_gradients`")
def tensor_parallel(model, mesh):
    divide_layers(model, mesh)
    return model, md.sync_gradients


@into(TOOLS, "tensor-parallel layers, `moe_ext.distributed.fully_shard`")
def tensor_parallel_fully_shard(model, mesh):
    divide_layers(model, mesh)
    return fully_shard(model, mesh)


def clip_in_two(model, foreach):
    """The norm by one function of torch, whole, and the scaling by another."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=foreach)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm, foreach=foreach)
    return norm


def clip_by_torch(model, foreach):
    """Both by one function."""
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=foreach)


CLIPS |= {
    "torch's `clip_grad_norm_`": functools.partial(clip_by_torch, foreach=None),
    "the same, `foreach=False`": functools.partial(clip_by_torch, foreach=False),
    "`get_total_norm`, `clip_grads_with_norm_`": functools.partial(clip_in_two, foreach=None),
    "the same two, `foreach=False`, with `norm.full_tensor()` between them": functools.partial(
        clip_in_two, foreach=False
    ),
    "`moe_ext.distributed.clip_grad_norm_(model)`": lambda model: md.clip_grad_norm_(
        model, MAX_NORM
    ),
    "the same, `(model.parameters())`": lambda model: md.clip_grad_norm_(
        model.parameters(), MAX_NORM
    ),
}


def _accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    as_torchrun()
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


@into(CLIPS, "`Accelerator.clip_grad_norm_`")
def clip_by_accelerate(model):
    return _accelerator().clip_grad_norm_(model.parameters(), MAX_NORM)


@into(CLIPS, "`Trainer`")
def clip_by_trainer(model):
    from transformers import Trainer, TrainingArguments

    class Clips(Trainer):
        def __init__(self):
            self.args = TrainingArguments("unused", use_cpu=True, max_grad_norm=MAX_NORM)
            self.accelerator, self._mixed_mesh_grads = _accelerator(), None

    return Clips()._clip_grad_norm(model)


CELLS = list(itertools.product(TOOLS, PLACEMENTS, CLIPS, OPTIMIZERS, SCALERS))
# Each way to train with each way to clip; the rest takes turns, and so do Accelerate and Trainer,
# which calls it.
FEW = [
    (
        tool,
        list(PLACEMENTS)[(a + b) % 3],
        clip,
        list(OPTIMIZERS)[(a + 2 * b) % 3],
        list(SCALERS)[(a // 3 + b // 3) % 3],
    )
    for (a, tool), (b, clip) in itertools.product(enumerate(TOOLS), enumerate(CLIPS))
    if clip not in ("`Accelerator.clip_grad_norm_`", "`Trainer`") or (a + b) % 2
]


@functools.cache
def one_process(bias, name, steps):
    """Norms and weights by an optimizer, of a model whose experts have biases, or not."""
    model = Model(bias=bias, num_layers=1)
    optimizer = OPTIMIZERS[name](model.parameters(), weight_decay=0.0)
    norms = []
    for batch in batches(0, 1)[:steps]:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        assert norms[-1] > 2 * MAX_NORM, "every step has to be clipped"
        optimizer.step()
    return norms, model.state_dict()


def run_cell(cell, mesh):
    """Train on this rank; what differs from one process, or None."""
    tool, placement, clip, optimizer, scaler = cell
    bias = placement != "etp"  # the shards of an expert have none
    model = Model(mesh.ep_group, bias=bias, num_layers=1)
    wrapped, after_backward = TOOLS[tool](model, mesh)
    groups = moe_ext.optim.param_groups(model)
    stepping = OPTIMIZERS[optimizer]([{**group, "weight_decay": 0.0} for group in groups])
    make = SCALERS[scaler]
    scaling = None if make is None else make("cpu", init_scale=SCALE)
    if scaling is not None:
        moe_ext.nn.set_loss_scale(model, SCALE)
    norms, found = [], []
    for number, batch in enumerate(batches(mesh.data_rank, mesh.data_size)[:STEPS]):
        overflows = scaling is not None and number == STEPS - 1
        stepping.zero_grad()
        loss = wrapped(**batch)["loss"]
        if scaling is None:
            loss.backward()
            after_backward(model)
            norms.append(CLIPS[clip](model))
            stepping.step()
            continue
        scaling.scale(loss).backward()
        after_backward(model)
        if overflows and mesh.ep_rank == 0:
            local_part(model.layers[0].experts.down_proj.grad).fill_(float("inf"))
        scaling.unscale_(stepping)
        norm = CLIPS[clip](model)
        norms += [] if overflows else [norm]
        scaling.step(stepping)
        scaling.update()
        wanted_scale = SCALE / 2 if overflows else SCALE
        if scaling.get_scale() != wanted_scale:
            found.append(f"the scale is {scaling.get_scale()}, right is {wanted_scale}")
    wanted_norms, weights = one_process(bias, optimizer, len(norms))
    for norm, wanted in zip(norms, wanted_norms, strict=True):
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not abs(float(whole) - float(wanted)) < TOLERANCE:
            found.append(f"the norm is {float(whole)}, right is {float(wanted)}")
    for name, tensor in md.full_state_dict(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        difference = float((whole - weights[name]).abs().max())
        if not difference < TOLERANCE:
            found.append(f"{name} differs by {difference}")
    return "; ".join(found[:3]) or None


def run_rank(rank, cells, wanted):
    """Outcomes on this rank: "equal", "wrong: ..." or "refused: ..."."""
    warnings.simplefilter("ignore")
    found, meshes = {}, {}
    for cell in cells:
        sizes = PLACEMENTS[cell[1]]
        if cell[0].startswith("tensor-parallel"):
            sizes = {**sizes, "dp": 2, "tp": 2}
        key = tuple(sizes.items())
        try:
            if key not in meshes:
                meshes[key] = md.MoEMesh(**sizes)
            wrong = run_cell(cell, meshes[key])
            found[cell] = "equal" if wrong is None else f"wrong: {wrong}"
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            where = traceback.extract_tb(error.__traceback__)[1].line
            found[cell] = f"refused: {type(error).__name__}: {text} [{where}]"
        # A rank that raises alone would leave the others waiting.
        found[cell] = functions_of_torch.agreed(found[cell])
    return found | functions_of_torch.run(wanted)


def outcomes(cells, *, few):
    """Cell, and (name, mesh) of a function of torch, to the outcome of all ranks."""
    wanted = functions_of_torch.of_one_process(few=few)
    found = testing.spawn_ranks(run_rank, RANKS, cells, wanted, timeout=TIMEOUT)
    return {
        key: next((one[key] for one in found if one[key].startswith("wrong")), found[0][key])
        for key in found[0]
    }


MIXTURE, MESHES, NO_ETP = "mixed torch.Tensor and DTensor", "must have the same mesh", "etp=1"
BY_TORCH = [clip for clip in CLIPS if "moe_ext" not in clip][:4]


def expected(cell):
    """Pattern of the text that refuses a cell, or None for one that is equal to one process.

    torch's functions take no mixture of DTensors with plain tensors, or of several meshes; but a
    norm made in a loop and gathered is right, and scales both.
    """
    tool, placement, clip, _, scaler = cell
    is_fsdp = "fully_shard" in tool
    if placement == "etp" and "moe_ext.distributed.fully_shard" in tool:
        return NO_ETP
    if scaler == "torch's scaler" and not is_fsdp:
        return MIXTURE
    if clip not in BY_TORCH:
        return None
    by_loop = "foreach=False" in clip
    if is_fsdp or (by_loop and tool.startswith("tensor-parallel")):
        return MESHES
    return None if by_loop and clip == BY_TORCH[3] else MIXTURE


def pattern_of(key):
    """Pattern of the outcome of a cell, or of a function of torch on a mesh."""
    if key[0] in functions_of_torch.FUNCTIONS:
        return functions_of_torch.pattern_of(key)
    pattern = expected(key)
    return "^equal$" if pattern is None else f"^refused.*{pattern}"


def table():
    """What the page shows: a row for each way to train."""
    header = ["", *CLIPS, "torch's `GradScaler`", "etp"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for tool in TOOLS:
        words = [expected((tool, "EP", clip, "loop", "no scaler")) for clip in CLIPS]
        ours = next(clip for clip in CLIPS if "moe_ext" in clip)
        words.append(expected((tool, "EP", ours, "loop", "torch's scaler")))
        words.append(expected((tool, "etp", ours, "loop", "no scaler")))
        shown = ["equal" if word is None else "refused" for word in words]
        lines.append(f"| {tool} | {' | '.join(shown)} |")
    return "\n".join(lines)


def with_tables(page):
    """The page with both tables between their marks."""
    page = with_text(page, "clipping", table())
    return with_text(page, "functions", functions_of_torch.table())


def main():
    testing.PRELOADED += ["torch._dynamo", "transformers.trainer", "accelerate"]
    found = outcomes(CELLS, few=False)
    print(json.dumps({" / ".join(key): text for key, text in found.items()}, indent=1))
    patterns = {key: pattern_of(key) for key in found}
    wrong = [key for key, text in found.items() if not re.search(patterns[key], text)]
    if wrong:
        sys.exit(f"not as the page says: {[' / '.join(key) for key in wrong]}")
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
