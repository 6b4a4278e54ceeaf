"""FSDP2 around expert-parallel layers, against one process."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from checks import raised
from rank_checks import Checks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import moe_ext
from moe_ext import distributed as md
from moe_ext.nn import ModuleExperts

D, E = 8, 6
# Float64: sums of fewer than a thousand terms of about 1, in another order.
TIGHT = {"rtol": 1e-11, "atol": 1e-13}
FOUR = Checks()


def one_expert(index):
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return nn.Linear(D, D)


class Block(nn.Module):
    def __init__(self, ep_group, apart):
        super().__init__()
        self.inp = nn.Linear(D, D)
        experts = None
        if apart:
            experts = ModuleExperts.build(one_expert, E, ep_group=ep_group)
        self.moe = moe_ext.MoELayer(D, 5, E, 2, bias=True, ep_group=ep_group, experts=experts)

    def forward(self, x):
        return x + self.moe(self.inp(x))


class Model(nn.Module):
    """Stacked experts, and experts that are modules; odd numbers of rows."""

    def __init__(self, ep_group=None, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(ep_group, apart) for apart in (False, True))
        self.out = nn.Linear(D, 3)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5 + rank, D, dtype=torch.float64, generator=generator)


def loss_of(model, rank, step=0):
    return model(batch(rank, step)).square().mean()


def one_process(steps=1, ranks=4):
    """The model with gradients of the mean over ranks and steps of the local losses."""
    model = Model()
    moe_ext.nn.set_loss_scale(model, 1 / (ranks * steps))
    for step in range(steps):
        for rank in range(ranks):
            (loss_of(model, rank, step) / (ranks * steps)).backward()
    return model


@functools.cache
def mesh_of(ep):
    return md.MoEMesh(dp=dist.get_world_size() // ep, ep=ep)


def whole(name, tensor, model):
    """The tensor of all experts, and its name in one process."""
    name = md.placement.logical_names(model).get(name, name)
    place = md.placements(model).get(name)
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if place is None or place.dim is None or place.num_parts == 1:
        return name, tensor
    found = [torch.empty_like(tensor) for _ in range(place.num_parts)]
    dist.all_gather(found, tensor.contiguous(), group=place.group)
    return name, torch.cat(found)


def assert_gradients(model, want):
    wanted = {name: p.grad for name, p in want.named_parameters()}
    for name, parameter in model.named_parameters():
        full_name, grad = whole(name, parameter.grad, model)
        torch.testing.assert_close(grad, wanted[full_name], **TIGHT)


def by_hand(model, mesh, **options):
    """The recipe: experts over the ranks that hold the same ones, the rest over all ranks."""
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh.replica_mesh, **options)
        fully_shard(block, mesh=mesh.world_mesh, **options)
    return fully_shard(model, mesh=mesh.world_mesh, **options)


def experts_whole(model, mesh):
    """Experts left as they are: `sync_gradients` averages them."""
    experts = {parameter for _, parameter, _, _ in md.expert_parameters(model)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh.world_mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh.world_mesh, ignored_params=experts)


def hybrid(model, mesh):
    """Dense parameters sharded over pairs of ranks, with copies."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh.replica_mesh)
    return fully_shard(model, mesh=grid)


WRAPS = {"by hand": by_hand, "experts whole": experts_whole, "hybrid": hybrid}


def torch_clip(model, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def norms_of(norm):
    found = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(found, norm)
    return found


@FOUR(*[(name, ep) for name in WRAPS for ep in (1, 2)])
def gradients_and_norms(name, ep):
    mesh, want = mesh_of(ep), one_process()
    model = WRAPS[name](Model(mesh.ep_group), mesh)
    loss_of(model, dist.get_rank()).backward()
    if name == "experts whole":
        if ep > 1:
            raised(
                RuntimeError, "expected sync_gradients to have run", md.clip_grad_norm_, model, 1
            )
        md.sync_gradients(model)
    assert_gradients(model, want)
    largest = md.clip_grad_norm_(model, math.inf, math.inf)
    torch.testing.assert_close(largest, max(grad.abs().max() for grad in grads_of(want)), **TIGHT)
    # And torch's own, which trainers call; without shared experts it does not take two meshes.
    for max_norm, clip in ((0.01, md.clip_grad_norm_), (0.005, torch_clip))[:ep]:
        norm = clip(model, max_norm)
        torch.testing.assert_close(norm, torch_clip(want, max_norm), **TIGHT)
        assert all(torch.equal(other, norm) for other in norms_of(norm))
        assert_gradients(model, want)


@FOUR()
def sums_that_are_still_to_be_made():
    model = nn.Linear(4, 4, bias=False)
    mesh = DeviceMesh("cpu", range(4))
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh))
    model.weight.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    # Sixteen elements of 4 each.
    assert md.clip_grad_norm_(model, 8.0) == 16
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


def grads_of(model):
    return [parameter.grad for parameter in model.parameters()]


@functools.cache
def own_groups():
    """Expert-parallel groups that no MoEMesh made: ranks 0 and 2, 1 and 3."""
    made = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return made[dist.get_rank() % 2]


def all_alike(model, mesh):
    return fully_shard(model, mesh=mesh)


def experts_in_part(model, mesh):
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh)
    return fully_shard(model)


@FOUR(("same ranks",), ("dp alone",), ("no copies",), ("own groups",), ("own diagonal",))
def wrong_meshes_are_refused(name):
    mesh, rank = mesh_of(2), dist.get_rank()
    everyone, alone = mesh.world_mesh, init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))
    if name == "same ranks":
        model = all_alike(Model(mesh.ep_group), everyone)
    elif name == "dp alone":
        model = all_alike(Model(mesh.ep_group), mesh.replica_mesh)
    elif name == "no copies":
        model = experts_in_part(Model(mesh.ep_group), alone["b"])
    elif name == "own groups":
        model = all_alike(Model(own_groups()), everyone)
    else:
        # Neighbours 0 and 3 of different groups, with different parts.
        diagonal = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))["b"]
        model = experts_in_part(Model(own_groups()), diagonal)
        text = "experts that the ranks of a mesh hold to be equal on every rank"
        raised(ValueError, text, loss_of, model, rank)
        return
    text = "fully_shard: expected the mesh of blocks.* to have .*, got ranks .*mesh.replica_mesh"
    raised(ValueError, text, loss_of, model, rank)


@FOUR()
def right_meshes_of_own_groups_pass():
    group = own_groups()
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    model = experts_in_part(Model(group), replicas)
    want = one_process()
    loss_of(model, dist.get_rank()).backward()
    assert_gradients(model, want)
    norm = md.clip_grad_norm_(model, 1.0)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(grads_of(want)), **TIGHT)


@pytest.mark.parametrize("name", FOUR)
def test_over_four_ranks(name):
    FOUR.assert_passed(4, name)
