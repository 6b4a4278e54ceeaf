"""The hook of DDP, the loop and FSDP2: what is applied and what is owed, bit for bit.

The gradients of the model are its inputs, so that no product decides about a bit.
"""

import copy

import torch
import torch.distributed as dist
from golden.cases import case, fill, gradient, integers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_ext import compression as mc

STEPS = 4


class Weighted(nn.Module):
    """Sums its parameters times given numbers, which thus are the gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 48)
        self.second = nn.Linear(33, 70)
        self.norm = nn.LayerNorm(1500)
        fill(self)

    def forward(self, weights):
        return sum((p * w).sum() for p, w in zip(self.parameters(), weights, strict=True))


def weights_of(model, step):
    """Gradients of this rank for a step."""
    return [
        gradient((name, step, dist.get_rank()), *p.shape) for name, p in model.named_parameters()
    ]


CODECS = {
    **{
        name: {"codec": name, "density": 0.05}
        for name in (
            "none", "bf16", "fp16", "int8", "int4", "fp8", "onebit", "topk", "threshold",
            "block_sparse",
        )
    },
    "momentum": {"codec": mc.TopK(0.05, momentum=0.9)},
    "momentum_threshold": {"codec": mc.Threshold(0.05, momentum=0.5)},
    "by_parameter": {"codec": mc.TopK(0.05, "parameter", value_codec="int8")},
    "split": {"codec": mc.TopK(0.05, algorithm="split")},
    "at_random": {"codec": mc.Quantize("int4", 64, stochastic=True), "seed": 3},
    "forgets": {"codec": mc.Quantize("int8", feedback=False)},
    "ramp": {"codec": "topk", "density": 0.02, "warmup": mc.Warmup(1, 2)},
    "sum": {"codec": "int8", "average": False},
    "roles": {"policy": mc.Policy("int4", by_name={"*second*": "topk"}, norm="bf16", density=0.1)},
}  # fmt: skip


def outcome(model, state, run):
    """Gradients of some steps, what is owed between them, and what a flush adds."""
    found = {}
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = None
        run(step)
        found[f"mean_{step}"] = [p.grad.clone() for p in model.parameters()]
        found[f"owed_{step}"] = state.state_dict()
    mc.flush(model, state)
    found["flushed"] = [p.grad.clone() for p in model.parameters()]
    found["end"] = state.state_dict()
    return found


def by_hook(**options):
    model = Weighted()
    state = mc.CompressionState(model=model, **options)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.012)
    parallel.register_comm_hook(state, mc.compress_hook)
    return outcome(model, state, lambda step: parallel(weights_of(model, step)).backward())


def by_loop(**options):
    model = Weighted()
    state = mc.CompressionState(model=model, **options)

    def run(step):
        for p, grad in zip(model.parameters(), weights_of(model, step), strict=True):
            p.grad = grad
        assert mc.compress_gradients(model, state)

    return outcome(model, state, run)


@case(*[(name,) for name in CODECS], exact=True, ranks=(2,))
def ddp_hook(name):
    return by_hook(**CODECS[name])


@case(*[(name,) for name in CODECS], exact=True, ranks=(2,))
def loop(name):
    return by_loop(**CODECS[name])


@case(("int8",), ("topk",), ("split",), ("onebit",), exact=True, ranks=(3,))
def loop_of_three(name):
    return by_loop(**CODECS[name])


@case(("hook",), ("loop",), ranks=(2,))
def powersgd(way):
    return (by_hook if way == "hook" else by_loop)(codec="powersgd")


@case(("hook",), ("loop",), ranks=(2,))
def clipped(way):
    return (by_hook if way == "hook" else by_loop)(codec="int8", clip_norm=1.0, local_clip_norm=2.0)


@case(("hook",), ("loop",), exact=True, ranks=(2,))
def refused_step(way):
    """A step with a NaN on one rank, between others, leaves what is owed as it was."""
    model = Weighted()
    state = mc.CompressionState(model=model, codec="int4", nonfinite="propagate")
    parallel = None
    if way == "hook":
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.012)
        parallel.register_comm_hook(state, mc.compress_hook)
    found = {}
    for step in range(STEPS):
        grads = weights_of(model, step)
        if step == 2 and dist.get_rank() == 1:
            grads[0][3, 5] = torch.nan
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = None if parallel else grad
        if parallel:
            parallel(grads).backward()
        else:
            mc.compress_gradients(model, state)
        found[f"finite_{step}"] = state.was_finite
        found[f"owed_{step}"] = state.state_dict()
    return found


@case(exact=True, ranks=(2,))
def resumed():
    """The loop from a saved state goes on with the same bits, also merged to all ranks' states."""
    model = Weighted()
    state = mc.CompressionState(model=model, codec="topk", density=0.05)

    def run(step, state):
        for p, grad in zip(model.parameters(), weights_of(model, step), strict=True):
            p.grad = grad
        mc.compress_gradients(model, state)
        return [p.grad.clone() for p in model.parameters()]

    run(0, state)
    run(1, state)
    saved = copy.deepcopy(state.state_dict())
    states = [None, None]
    dist.all_gather_object(states, saved)
    found = {"went_on": run(2, state)}
    for name, given in (("own", saved), ("all", states)):
        other = mc.CompressionState(model=model, codec="topk", density=0.05)
        other.load_state_dict(given)
        found[name] = run(2, other), other.state_dict()
    return found


@case(exact=True, ranks=(2, 3))
def embedding_rows():
    model = nn.Sequential(nn.Embedding(120, 12, sparse=True), nn.Linear(12, 100))
    state = mc.CompressionState(model=model, codec="int8")
    found = {}
    for step in range(2):
        rows = integers(("row", step, dist.get_rank()), 120, 1, 30)
        values = gradient(("value", step, dist.get_rank()), 30, 12)
        model[0].weight.grad = torch.sparse_coo_tensor(rows, values, (120, 12))
        for name, p in model[1].named_parameters():
            p.grad = gradient((name, step, dist.get_rank()), *p.shape)
        mc.compress_gradients(model, state)
        found[f"step_{step}"] = [p.grad.clone() for p in model.parameters()]
    found["end"] = state.state_dict()
    return found


FSDP = {
    "plain": {},
    "weights": {"zero_quantized_weights": True},
    "int4": {"zero_quantized_gradients": True},
    "int8_feedback": {
        "zero_quantized_gradients": True, "gradient_format": "int8", "error_feedback": True,
    },
    "sign_feedback": {
        "zero_quantized_gradients": True, "gradient_format": "sign", "error_feedback": True,
    },
    "at_random": {"zero_quantized_gradients": True, "stochastic": True, "seed": 4},
    "both": {
        "zero_quantized_weights": True, "weight_format": "fp8", "zero_quantized_gradients": True,
        "error_feedback": True, "block": 64,
    },
}  # fmt: skip


def fsdp_outcome(mesh, **options):
    model = Weighted()
    fully_shard(model, mesh=mesh)
    compression = mc.zero_plus_plus(model, **options) if options else None
    found = {}
    for step in range(STEPS):
        model.zero_grad()
        shapes = [(name, p.shape) for name, p in model.named_parameters()]
        grads = [gradient((name, step, dist.get_rank()), *shape) for name, shape in shapes]
        model(grads).backward()
        found[f"grad_{step}"] = [p.grad.to_local().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.125 * p.grad
    model.unshard()
    found["gathered"] = [p.detach().clone() for p in model.parameters()]
    model.reshard()
    if compression is not None:
        found["owed"] = compression.state_dict(sharded=False)["residuals"]
        compression.flush()
        found["flushed"] = [p.grad.to_local().clone() for p in model.parameters()]
    return found


@case(*[(name,) for name in FSDP], exact=True, ranks=(2,))
def fsdp(name):
    return fsdp_outcome(init_device_mesh("cpu", (2,)), **FSDP[name])


@case(("int8",), ("topk",), exact=True, ranks=(2,))
def fsdp_nodes(codec):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "shards"))
    return fsdp_outcome(
        mesh["shards"], node_group=mesh["nodes"].get_group(), node_codec=codec, density=0.05,
        error_feedback=True,
    )  # fmt: skip
