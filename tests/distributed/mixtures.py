"""Random mixtures of what tools and layers offer, each against one process in float64.

`composition.py` runs them: its process has the tools imported.
"""

import contextlib
import itertools
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint
from trainers import as_torchrun

import moe_ext
from moe_ext import distributed as md

RANKS, STEPS, MAX_NORM = 4, 2, 0.05
CELLS = list(itertools.product(["plain loop", "DDP", "FSDP2", "Accelerate"], [2, 4], [False, True]))
# Where logits of a chosen and another expert are as close, float32 may choose otherwise.
TIE = 1e-4


@dataclass
class Mixture:
    """One draw: each entry of what a seed stands for."""

    seed: int

    def __post_init__(self) -> None:
        # Every sixteen have all of these.
        self.tool, self.ep, self.recompute = CELLS[self.seed % len(CELLS)]
        draw = random.Random(self.seed)
        self.dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        self.passes = draw.choice([1, 2, 3])
        self.norm_type = draw.choice([2.0, 2.0, float("inf")])
        # By sign and size Adam would show what float32 rounds.
        exact = self.dtype == torch.float64
        self.adam = exact and draw.random() < 0.5
        self.top_k = draw.choice([1, 2, 3])
        self.router = draw.choice(["softmax", "sigmoid", "cosine"])
        self.shared = draw.choice([0, 4])
        self.losses = {"balance": moe_ext.nn.Balance(coef=draw.choice([0.0, 0.1]), z_coef=0.1)}
        drop = draw.choice(["position", "score"]) if exact else "position"
        overflow = draw.choice(["drop", "drop", "reroute"]) if exact else "drop"
        limit = moe_ext.nn.Capacity(draw.choice([0.8, 1.3]), drop=drop, overflow=overflow)
        self.capacity = draw.choice([None, limit])
        self.frozen = draw.choice(["none", "none", "first.experts", "router"])
        self.to_none = draw.random() < 0.5
        # Options of DistributedDataParallel, and a branch that some ranks take in a step.
        draw = random.Random(self.seed + len(CELLS))
        self.options = {
            "gradient_as_bucket_view": draw.random() < 0.5,
            "bucket_cap_mb": draw.choice([None, 0.0002, 0.001]),
            "broadcast_buffers": draw.random() < 0.5,
            "find_unused_parameters": True,
        }
        self.hook = draw.random() < 0.5
        self.has_branch = self.tool == "DDP"
        if self.has_branch:
            self.norm_type = draw.choice([2.0, 1.0, float("inf")])
            frozen = ["none", "first.experts", "second.experts.down", "router", "inp"]
            self.frozen = draw.choice(frozen)

    def model(self, ep_group, dtype):
        """On this rank, or with all experts in one process."""
        torch.manual_seed(self.seed)
        model = Model(self, ep_group).to(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.frozen not in name)
        return model

    def optimizer(self, model):
        """Of the parameters that are trained."""
        trained = [p for p in model.parameters() if p.requires_grad]
        # A large eps: what a gradient of 1e-17 becomes must not depend on its sign.
        if self.adam:
            return torch.optim.AdamW(trained, 0.01, eps=1e-5)
        return torch.optim.SGD(trained, lr=0.3, momentum=0.5)

    def batches(self, step):
        """Uneven ones, `[pass][rank]`."""
        generator = torch.Generator().manual_seed(self.seed * STEPS + step)
        return [
            [
                torch.randn(5 + 3 * rank, 6, dtype=torch.float64, generator=generator)
                for rank in range(RANKS)
            ]
            for _ in range(self.passes)
        ]

    def branches(self, step):
        """For each rank, True if it takes the branch in the passes of a step."""
        draw = random.Random(self.seed * STEPS + step)
        takes = self.has_branch and draw.random() < 0.5
        return [takes and draw.random() < 0.7 for _ in range(RANKS)]


class Model(nn.Module):
    """Two mixtures of experts between dense layers."""

    def __init__(self, mixture, ep_group):
        super().__init__()
        self.recompute = mixture.recompute
        self.inp, self.norm, self.out = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.branch = nn.Linear(8, 3) if mixture.has_branch else None
        for name, activation in (("first", "swiglu"), ("second", "gelu")):
            router = mixture.router
            if router == "cosine":
                router = moe_ext.nn.CosineRouter(8, 8, mixture.top_k, proj_dim=8)
            layer = moe_ext.MoELayer(
                8,
                6,
                8,
                mixture.top_k,
                router=router,
                activation=activation,
                capacity=mixture.capacity,
                shared_expert=mixture.shared,
                ep_group=ep_group,
                **mixture.losses,
            )
            self.add_module(name, layer)

    def forward(self, x, branch=False):
        """The outputs of tokens x, by the branch too or not."""
        h = self.inp(x)
        for layer in (self.first, self.second):
            normed = self.norm(h)
            run = checkpoint(layer, normed, use_reentrant=False) if self.recompute else None
            h = h + (layer(normed) if run is None else run)
        return self.out(h) + self.branch(h) if branch else self.out(h)


def one_process(seed):
    """The weights, and the norms of all steps, and the least distance to another choice."""
    mixture = Mixture(seed)
    model = mixture.model(None, torch.float64)
    optimizer, norms, gaps = mixture.optimizer(model), [], []

    def look(_module, _inputs, output):
        ordered = output.logits.detach().sort(-1, descending=True).values
        gaps.append(float((ordered[:, mixture.top_k - 1] - ordered[:, mixture.top_k]).min()))

    for layer in (model.first, model.second):
        layer.router.register_forward_hook(look)
    share = mixture.passes * RANKS
    moe_ext.nn.set_loss_scale(model, 1 / share)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=mixture.to_none)
        for ranks in mixture.batches(step):
            for x, branch in zip(ranks, mixture.branches(step), strict=True):
                (model(x, branch).square().mean() / share).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, mixture.norm_type))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms, min(gaps)


def train(mixture, mesh):
    """The same on this rank, by the mixture's tool."""
    model = mixture.model(mesh.ep_group, mixture.dtype)
    moe_ext.nn.set_loss_scale(model, 1 / mixture.passes)
    if mixture.tool == "FSDP2":
        # Temperatures, which FSDP2 does not take.
        scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}
        for module in (model.first, model.second, model):
            md.fully_shard(module, mesh, ignored_params=scalars)
    optimizer, norms = mixture.optimizer(model), []
    accelerator, run = None, model
    if mixture.tool == "DDP":
        run = md.data_parallel(model, **mixture.options)
        if mixture.hook:
            run.register_comm_hook(None, allreduce_hook)
    elif mixture.tool == "Accelerate":
        as_torchrun()
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=mixture.passes)
        run, optimizer = accelerator.prepare(moe_ext.parallelize(model), optimizer)
    for step in range(STEPS):
        branch = mixture.branches(step)[dist.get_rank()]
        for number, ranks in enumerate(mixture.batches(step)):
            x, is_last = ranks[dist.get_rank()].to(mixture.dtype), number == mixture.passes - 1
            if accelerator is not None:
                with accelerator.accumulate(run):
                    accelerator.backward(run(x).square().mean())
                continue
            if mixture.tool == "FSDP2":
                model.set_requires_gradient_sync(is_last)
            waits = mixture.tool == "DDP" and not is_last
            with run.no_sync() if waits else contextlib.nullcontext():
                (run(x, branch).square().mean() / mixture.passes).backward()
        if accelerator is not None:
            clip, what = accelerator.clip_grad_norm_, run.parameters()
        else:
            if mixture.tool != "DDP":
                md.sync_gradients(model)
            clip, what = md.clip_grad_norm_, model
        norms.append(clip(what, MAX_NORM, norm_type=mixture.norm_type))
        optimizer.step()
        optimizer.zero_grad(set_to_none=mixture.to_none)
    return model, norms


def compare(mixture, mesh, wanted):
    """AssertionError with what differs from one process."""
    weights, wanted_norms, gap = wanted
    if mixture.dtype == torch.float32 and gap < TIE:
        return
    model, norms = train(mixture, mesh)
    exact = mixture.dtype == torch.float64
    # float64: some thousand roundings of 1e-16, and Adam divides by gradients down to 1e-4 of the
    # norm. float32: gradients within some hundred roundings of 6e-8, of which clipping leaves 0.05
    # for a step of 0.3, and the weights' own.
    close = {"rtol": 1e-8, "atol": 1e-9} if exact else {"rtol": 2e-4, "atol": 2e-6}
    for norm, wanted in zip(norms, wanted_norms, strict=True):
        found = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.testing.assert_close(found.double(), wanted, **close)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(
            whole.double(), weights[name], msg=lambda text, name=name: f"{name}: {text}", **close
        )


def run_rank(wanted):
    """Text of the first mixture that differs, or None; `wanted`: what one process has, by seed."""
    meshes = {ep: md.MoEMesh(dp=RANKS // ep, ep=ep) for ep in (2, 4)}
    for seed, right in wanted.items():
        mixture = Mixture(seed)
        try:
            compare(mixture, meshes[mixture.ep], right)
        except Exception as error:
            return f"{vars(mixture)}: {error}"
    return None
