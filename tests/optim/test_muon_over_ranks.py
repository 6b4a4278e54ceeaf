"""Muon of shards and columns, and optimizers of experts over ranks, beside one process."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import as_parameter, drawn_parameters, placed
from rank_checks import Checks, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import moe_ext
from moe_ext import distributed as md
from moe_ext import optim
from moe_ext.attention import SequenceParallelMLP
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import ModuleExperts

# Both sides take the same steps in float64; sums of products in another order differ by roundings,
# which five polynomials of slope 3.4 enlarge at most by 3.4^5 = 470.
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
EXACT = {"lr": 0.05, "ns_dtype": torch.float64, "adjust_lr_fn": "match_rms_adamw"}
SHAPES = [(5, 3), (4, 6), (6, 5, 4), (2, 8, 3), (1, 6)]
CHECKS = Checks()
parameters = functools.partial(drawn_parameters, SHAPES, torch.float64)


def take_steps(optimizer, params, steps=2):
    generator = torch.Generator().manual_seed(50)
    for _ in range(steps):
        for p in params:
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = as_parameter(grad, p)
        optimizer.step()


@CHECKS(("float64",), ("bfloat16",))
def shards_take_the_steps_of_whole_tensors(dtype):
    """Matrices that are gathered are those of one process; in bfloat16, the default, to the bit."""
    options, whole = EXACT | {"ns_dtype": dtype}, parameters()
    take_steps(optim.Muon(whole, **options), whole)
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    of_stacks = [
        (line, lambda p: [Shard(0)]),
        (grid, lambda p: [Replicate(), Shard(0)]),
        (grid, lambda p: [Shard(0), Shard(p.dim() - 1)]),
    ]
    for mesh, place in (
        *(of_stacks if dtype == "float64" else ()),
        (line, lambda p: [Shard(p.dim() - 2)]),
        (line, lambda p: [Shard(p.dim() - 1)]),
        (grid, lambda p: [Replicate(), Shard(p.dim() - 1)]),
        (grid, lambda p: [Shard(p.dim() - 2), Shard(p.dim() - 2)]),
    ):
        params = placed(mesh, place, parameters())
        optimizer = optim.Muon(params, **options)
        take_steps(optimizer, params)
        for p, q in zip(params, whole, strict=True):
            near = TIGHT if dtype == "float64" else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(p.full_tensor(), q.detach(), **near)
            assert optimizer.state[p]["momentum_buffer"].placements == p.placements


@CHECKS()
def whole_experts_on_a_rank_need_no_message():
    for dim in (0, 1):
        mesh = init_device_mesh("cpu", (4,))
        params = placed(mesh, lambda p, dim=dim: [Shard(dim)], parameters()[2:4])
        optimizer = optim.Muon(params, **EXACT)
        for p in params:
            p.grad = as_parameter(torch.ones(p.shape, dtype=torch.float64), p)
        with torch.profiler.profile() as profile:
            optimizer.step()
        names = {event.name for event in profile.events()}
        assert any("c10d" in name for name in names) == (dim == 1), names


class Model(nn.Module):
    def __init__(self, ep_group=None, columns=None, *, apart=False, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.apart = nn.Identity()
        if apart:  # an expert is a module of its own
            modules = ModuleExperts.build(lambda _: nn.Linear(8, 8), 4, ep_group=ep_group)
            self.apart = moe_ext.MoELayer(8, 6, 4, 2, experts=modules, ep_group=ep_group)
        self.embedding = nn.Embedding(7, 8)
        self.moe = moe_ext.MoELayer(8, 6, 4, 2, bias=bias, ep_group=ep_group)
        self.mlp = SequenceParallelMLP(8, 12, group=columns, activation="swiglu")
        self.out = nn.Linear(8, 3)
        self.double()

    def forward(self, ids):
        return self.out(self.mlp(self.moe(self.apart(self.embedding(ids)))))


MAKERS = {
    "LAMB": functools.partial(optim.LAMB, lr=0.05),
    "LARS": functools.partial(optim.LARS, lr=0.1, trust_coefficient=0.1, weight_decay=0.1),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.05, weight_decay=0.1),
}


def muon(model, **options):
    return optim.Muon(optim.param_groups(model, muon=True), **(EXACT | options))


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(70 + step)
        # Every rank has the whole batch: the mean over ranks is the gradient of one process.
        model(torch.randint(7, (8,))).square().mean().backward()
        md.sync_gradients(model)
        md.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(name, model):
    return muon(model) if name == "Muon" else MAKERS[name](optim.param_groups(model))


@functools.cache
def trained_alone(name="Muon", **options):
    whole = Model(**options)
    train(whole, optimizer_of(name, whole), range(2))
    return whole


@CHECKS(("Muon",), *((name,) for name in MAKERS))
def fsdp_trains_as_one_process(name):
    model = Model()
    for block in (model.moe, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(1))
    resumed = optimizer_of(name, model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, resumed, range(1, 2))
    wanted = dict(trained_alone(name).named_parameters())
    for path, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), wanted[path], **TIGHT)


@CHECKS(
    *(("Muon", *sizes) for sizes in ((2, 1), (4, 1), (1, 2), (2, 2))),
    *((name, *sizes) for name in MAKERS for sizes in ((2, 1), (2, 2))),
)
def experts_over_ranks_train_as_in_one_process(name, ep, etp):
    """Experts of a rank, shards of them, and such as are a module each; a state goes on."""
    mesh = md.MoEMesh(dp=4 if etp > 1 else 4 // ep, ep=ep, etp=etp)
    options = {"apart": etp == 1, "bias": etp == 1}
    model = Model(mesh.ep_group, **options)
    model.load_state_dict(Model(**options).state_dict())
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(1))
    resumed = optimizer_of(name, model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, resumed, range(1, 2))
    wanted = trained_alone(name, **options).state_dict()
    for path, value in md.full_state_dict(model).items():
        torch.testing.assert_close(value, wanted[path], msg=lambda m, p=path: f"{p} {m}", **TIGHT)


@CHECKS()
def columns_over_ranks_take_the_steps_of_the_whole():
    """Gate and up apart or as one matrix, as the group says, for any number of ranks."""
    ranks = dist.group.WORLD
    for fused in (1, 2):
        whole, model = Model().mlp, Model(columns=ranks).mlp
        model.load_state_dict(whole.state_dict())
        places = md.placements(model)
        optimizers = [
            optim.Muon(
                [
                    {"params": [m.gate_up_proj.weight], "fused": fused},
                    {"params": [m.down_proj.weight]},
                ],
                **EXACT,
            )
            for m in (whole, model)
        ]
        for step in range(2):
            for name in places:
                p = whole.get_parameter(name)
                generator = torch.Generator().manual_seed(step + len(name))
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                part = places[name].part_of(p.grad).contiguous()
                model.get_parameter(name).grad = places[name].whole(part)
            for optimizer in optimizers:
                optimizer.step()
        for name in places:
            want = whole.get_parameter(name).detach()
            torch.testing.assert_close(full(model.get_parameter(name)).detach(), want, **TIGHT)


@CHECKS()
def groups_keep_the_kernels_of_torch():
    """DTensors of a mesh in groups of their own: a mixture is refused by fused and foreach."""
    models = [Model(md.MoEMesh(dp=2, ep=2).ep_group, dist.group.WORLD) for _ in range(3)]
    kernels = ({"fused": True}, {"foreach": True}, {"fused": False, "foreach": False})
    for model, options in zip(models, kernels, strict=True):
        groups = optim.param_groups(model)
        names = [name for group in groups for name, _ in group["params"]]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        mixture = torch.optim.AdamW(model.parameters(), **options)
        if any(options.values()):
            with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                mixture.step()
            model.load_state_dict(models[2].state_dict())
        optimizer = torch.optim.AdamW(groups, lr=0.1, **options)
        optimizer.step()
        assert len({getattr(p, "device_mesh", None) for p in model.parameters()}) == 3
    for model in models[:2]:
        for p, q in zip(model.parameters(), models[2].parameters(), strict=True):
            torch.testing.assert_close(local_part(p), local_part(q), **TIGHT)


test_over_four_ranks = CHECKS.test(4)
