"""FSDP2 around expert-parallel layers, against one process."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_checks import Checks, of_ranks, raised
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import distributed as md
from moe_ext.distributed import fsdp_state
from moe_ext.nn import ModuleExperts
from moe_ext.testing import spawn_ranks

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


def one_process():
    """The model with gradients of the mean over ranks of the local losses."""
    model = Model()
    for parameter, grad in zip(model.parameters(), gradients(), strict=True):
        parameter.grad = grad.clone()
    return model


@functools.cache
def gradients():
    """Gradients that one process has."""
    model = Model()
    moe_ext.nn.set_loss_scale(model, 1 / 4)
    for rank in range(4):
        (loss_of(model, rank) / 4).backward()
    return grads_of(model)


@functools.cache
def mesh_of(ep):
    return md.MoEMesh(dp=dist.get_world_size() // ep, ep=ep)


def whole(name, tensor, model):
    """The tensor of all experts, and its name in one process."""
    place = md.placements(model).get(name)
    name = md.placement.logical_names(model).get(name, name)
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if place is None or place.dim is not None:
        return name, tensor
    return name, tensor.chunk(place.num_parts)[place.part]


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


def experts_whole(model, mesh, **options):
    """Experts left as they are: `sync_gradients` averages them."""
    experts = {parameter for _, parameter, _, _ in md.expert_parameters(model)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh.world_mesh, ignored_params=experts, **options)
    return fully_shard(model, mesh=mesh.world_mesh, ignored_params=experts, **options)


def experts_averaged(model, mesh, **options):
    """Experts left as they are: `parallelize` has them averaged in the backward pass."""
    return experts_whole(moe_ext.parallelize(model), mesh, **options)


def hybrid(model, mesh):
    """Dense parameters sharded over pairs of ranks, with copies."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh.replica_mesh)
    return fully_shard(model, mesh=grid)


def by_library(model, mesh, **options):
    for block in model.blocks:
        md.fully_shard(block, mesh, **options)
    return md.fully_shard(model, mesh, **options)


WRAPS = {
    "by library": by_library,
    "by hand": by_hand,
    "experts whole": experts_whole,
    "experts averaged": experts_averaged,
    "hybrid": hybrid,
}


@FOUR(("by library", 1), *[(name, 2) for name in WRAPS])
def gradients_and_norms(name, ep):
    mesh, want = mesh_of(ep), one_process()
    model = WRAPS[name](Model(mesh.ep_group), mesh)
    md.broadcast_experts(model)
    loss_of(model, dist.get_rank()).backward()
    if name == "experts whole":
        text = "expected sync_gradients to have run"
        raised(RuntimeError, text, md.clip_grad_norm_, model, 1)
        md.sync_gradients(model)
    assert_gradients(model, want)
    largest = md.clip_grad_norm_(model, math.inf, math.inf)
    torch.testing.assert_close(largest, max(grad.abs().max() for grad in grads_of(want)), **TIGHT)
    norm = md.clip_grad_norm_(model, 0.01)
    wanted = nn.utils.clip_grad_norm_(want.parameters(), 0.01)
    torch.testing.assert_close(norm, wanted, **TIGHT)
    assert all(torch.equal(other, norm) for other in of_ranks(norm))
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
    if name in ("dp alone", "no copies"):
        if name == "dp alone":
            model = all_alike(Model(mesh.ep_group), mesh.replica_mesh)
        else:
            model = experts_in_part(Model(mesh.ep_group), alone["b"])
        text = "fully_shard: expected the mesh of .* to have .*, got ranks .*mesh.replica_mesh"
        raised(ValueError, text, loss_of, model, rank)
        return
    # torch wants the meshes of experts and of their copies to be dimensions of one.
    diagonal = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))["b"]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        if name == "same ranks":
            all_alike(Model(mesh.ep_group), everyone)
        elif name == "own groups":
            all_alike(Model(own_groups()), everyone)
        else:
            # Neighbours 0 and 3 of different groups, with different parts.
            experts_in_part(Model(own_groups()), diagonal)


@FOUR()
def undivided_experts_are_refused():
    """Before anything is sharded; a mesh of torch needs groups, which are made once."""
    mesh, model = mesh_of(2), Model(None)
    text = r"fully_shard: expected experts to be divided .*experts.*ep=2; call moe_ext.parallelize"
    raised(ValueError, text, md.fully_shard, model, mesh)
    text = r"fully_shard: expected mesh to be a MoEMesh, got .*from_device_mesh"
    raised(TypeError, text, md.fully_shard, model, mesh.device_mesh)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@FOUR(("sharded",), ("left whole",), ("averaged",))
def divisors_of_gradients(name):
    """torchtitan has FSDP2 divide by 1; our layers have divided by the ranks that share experts."""
    mesh, rank = mesh_of(2), dist.get_rank()
    wrap = {"sharded": by_library, "left whole": experts_whole, "averaged": experts_averaged}[name]
    model = wrap(Model(mesh.ep_group), mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    found = "2 times" if name == "sharded" else "1 times"
    text = f"set_gradient_divide_factor .*, got {found} it for .*experts.* and 4 times for .*"
    raised(ValueError, text, loss_of, model, rank)
    if name == "sharded":
        model, want = wrap(Model(mesh.ep_group), mesh), one_process()
        experts = {m for block in model.blocks for m in block.moe.experts.modules()}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5 if module in experts else 1.0)
        loss_of(model, rank).backward()
        for parameter in want.parameters():
            parameter.grad *= 4
        assert_gradients(model, want)


@FOUR()
def norms_by_names_of_meshes():
    """As torchtitan clips: parameters whose mesh names "ep" are apart; each mesh has names."""
    mesh, want = mesh_of(2), one_process()
    model = by_library(Model(mesh.ep_group), mesh)
    loss_of(model, dist.get_rank()).backward()
    grads = {True: [], False: []}
    for parameter in model.parameters():
        grads["ep" in parameter.device_mesh.mesh_dim_names].append(parameter.grad)
    assert all(grads.values())
    squares = [nn.utils.get_total_norm(found).full_tensor() ** 2 for found in grads.values()]
    found = nn.utils.get_total_norm([p.grad for p in want.parameters()])
    torch.testing.assert_close(sum(squares).sqrt(), found, **TIGHT)


def optimizer_of(model):
    # Not in a loop, whose every operation torch places on its own. A large eps: what a gradient of
    # 1e-17 becomes must not depend on its sign.
    groups = moe_ext.optim.param_groups(model)
    return torch.optim.AdamW(groups, lr=0.1, eps=1e-3, fused=True)


def train(model, optimizer, steps, ranks, micro_batches=1):
    """Steps over the batches of these ranks; of several in one process."""
    moe_ext.nn.set_loss_scale(model, 1 / (len(ranks) * micro_batches))
    is_sharded = isinstance(model, FSDPModule)
    for step in steps:
        for micro in range(micro_batches):
            if is_sharded:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            for rank in ranks:
                loss = loss_of(model, rank, step * micro_batches + micro)
                (loss / (len(ranks) * micro_batches)).backward()
        if any(is_whole(parameter) for parameter in model.parameters()):
            md.sync_gradients(model)
        md.clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()


@FOUR()
def accumulation_of_what_is_left_whole():
    """Copies of experts are averaged in the pass in which FSDP2 reduces the rest."""
    mesh, rank, want = mesh_of(2), dist.get_rank(), Model()
    moe_ext.nn.set_loss_scale(want, 1 / 4)
    for step in range(2):
        for other in range(4):
            (loss_of(want, other, step) / 4).backward()
    model = experts_averaged(Model(mesh.ep_group), mesh)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        loss_of(model, rank, step).backward()
        found = of_ranks(model.blocks[0].moe.experts.down_proj.grad)
        assert torch.equal(found[rank], found[(rank + 2) % 4]) == (step == 1)
    assert_gradients(model, want)


@FOUR(("root",), ("blocks",), ("around",))
def what_is_left_whole_is_averaged(wrapped):
    """FSDP2 around the root alone, blocks alone, and a model that another one holds."""
    mesh, rank, want = mesh_of(2), dist.get_rank(), one_process()
    model = Model(mesh.ep_group)
    ignored = {parameter for _, parameter, _, _ in md.expert_parameters(model)}
    ignored |= {parameter for parameter in model.parameters() if parameter.dim() == 1}
    if wrapped != "around":
        moe_ext.parallelize(model)
    for block in model.blocks if wrapped != "root" else ():
        fully_shard(block, mesh=mesh.world_mesh, ignored_params=ignored)
    if wrapped != "blocks":
        fully_shard(model, mesh=mesh.world_mesh, ignored_params=ignored)
    run = moe_ext.parallelize(nn.Sequential(model)) if wrapped == "around" else model
    loss_of(run, rank).backward()
    assert_gradients(model, want)


def is_whole(parameter):
    """Whether FSDP2 does not divide a parameter, or an expert."""
    meshes = [parameter.device_mesh.mesh_dim_names] if isinstance(parameter, DTensor) else []
    return meshes in ([], [("ep",)])


def assert_parameters(model, want):
    wanted = dict(want.named_parameters())
    for name, parameter in model.named_parameters():
        full_name, value = whole(name, parameter.detach(), model)
        torch.testing.assert_close(value, wanted[full_name].detach(), **TIGHT)


def checkpointed(model):
    for block in model.blocks:
        forward = block.moe.forward
        block.moe.forward = functools.partial(checkpoint, forward, use_reentrant=False)


def budgeted(model):
    """The stacked experts run several times in a pass."""
    model.blocks[0].moe.row_budget = moe_ext.nn.RowBudget(4)


# test_axes.py has neither, with weights that are kept between the passes.
CHANGES = {
    "checkpointing": checkpointed,
    "row budget": budgeted,
    "reshard": lambda model: None,
}


@functools.cache
def trained_by_one_process(**options):
    """Model and optimizer after two steps."""
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2), range(4), **options)
    return model, optimizer


@FOUR(("checkpointing", 2), ("row budget", 1), ("row budget", 2), ("reshard", 1))
def training(name, ep):
    """Two steps of two micro-batches each."""
    model = Model(mesh_of(ep).ep_group)
    CHANGES[name](model)
    if name == "row budget":
        experts_whole(model, mesh_of(ep))
    else:
        by_library(model, mesh_of(ep), reshard_after_forward=name == "reshard")
    train(model, optimizer_of(model), range(2), [dist.get_rank()], micro_batches=2)
    assert_parameters(model, trained_by_one_process(micro_batches=2)[0])


BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)


@functools.cache
def bf16_gradients():
    """Means over ranks, in float32, of what one process computes in bfloat16 for each rank."""
    total = {}
    for rank in range(4):
        model = Model().bfloat16()
        model(batch(rank).bfloat16()).float().square().mean().backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad.float() / 4
    return total


@FOUR((1,), (2,), (3,))
def bfloat16(num_wrapped):
    """Everything wrapped with the policy, by the library or by hand; or all but the experts."""
    mesh, model = mesh_of(2), Model(mesh_of(2).ep_group).float()
    x = batch(dist.get_rank()).float()
    if num_wrapped == 3:
        experts_whole(model, mesh, mp_policy=BF16)
        raised(TypeError, "of the experts, got torch.bfloat16; .*wrap the experts too", model, x)
        return
    (by_library, by_hand)[num_wrapped - 1](model, mesh, mp_policy=BF16)
    model(x).float().square().mean().backward()
    wanted = bf16_gradients()
    for name, parameter in model.named_parameters():
        full_name, grad = whole(name, parameter.grad, model)
        error = (grad - wanted[full_name]).norm() / wanted[full_name].norm()
        assert grad.dtype == torch.float32
        # The same roundings, and sums of float32. Of experts the gradients of two ranks are rounded
        # to 8 bits apart there and together here; they may cancel to half of their size.
        assert error < (4 * 2.0**-9 if "experts" in name else 1e-6), full_name


def padding_of(experts, num_ranks):
    """Share of their messages that is padding."""
    entries = fsdp_state.managed_parameters(experts)
    numel = sum(entry.param.numel() for entry in entries)
    return sum(entry.shard_numel for entry in entries) * num_ranks / numel - 1


@FOUR((6, 1), (6, 2), (20, 1))
def experts_are_hardly_padded(num_experts, ep):
    mesh = mesh_of(ep)
    sizes = {"model_dim": 8, "ffn_dim": 12, "num_experts": num_experts}
    layer = moe_ext.MoELayer(**sizes, top_k=2, ep_group=mesh.ep_group)
    md.fully_shard(layer.experts, mesh)
    replicas = 4 // ep
    assert padding_of(layer.experts, replicas) < 0.01
    plain = moe_ext.nn.GroupedExperts(num_experts // ep, 8, 12)
    fully_shard(plain, mesh=mesh.replica_mesh)
    padded = -(num_experts // ep) % replicas / (num_experts // ep)
    assert padding_of(plain, replicas) == pytest.approx(padded)
    assert ep == 2 or num_experts != 6 or padded == pytest.approx(1 / 3)


@FOUR()
def few_experts_are_sharded_along_their_second_dimension():
    mesh = mesh_of(2)
    layer = moe_ext.MoELayer(D, 5, 2, ep_group=mesh.ep_group).double()
    md.fully_shard(layer, mesh)
    placements = {name: p.placements for name, p in layer.experts.named_parameters()}
    along = (Shard(1), Shard(0))
    assert placements == {"gate_up_proj": along, "down_proj": along}
    state = md.full_state_dict(layer)
    alone = moe_ext.MoELayer(D, 5, 2).double()
    alone.load_state_dict(state)
    nn.init.zeros_(layer.experts.down_proj)
    set_model_state_dict(layer, state, options=StateDictOptions(full_state_dict=True))
    layer(batch(dist.get_rank())).square().mean().backward()
    moe_ext.nn.set_loss_scale(alone, 0.25)
    for rank in range(4):
        (alone(batch(rank)).square().mean() / 4).backward()
    assert_gradients(layer, alone)


@FOUR()
def what_the_library_does_not_wrap():
    mesh = mesh_of(2)
    raised(
        ValueError,
        "over mesh.ep_group, got 'ep' over another",
        by_library,
        Model(own_groups()),
        mesh,
    )
    model = Model(mesh.ep_group)
    budgeted(model)
    by_library(model, mesh)
    text = r"leave the experts whole \(ignored_params\) with row_budget, got"
    raised(ValueError, text, loss_of, model, dist.get_rank())


test_over_four_ranks = FOUR.test(4)


def wholes(model, optimizer):
    state = md.checkpoint.TrainingState(model, optimizer).state_dict()
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def first_moments(model, optimizer):
    """Those of the stacked experts and of what is beside them, by torch's own function."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: values for name, values in state.items() if name.startswith("blocks.0.")}


def save_on_four(rank, folder):
    mesh = md.MoEMesh(dp=2, ep=2)
    model = by_library(Model(mesh.ep_group), mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer, [0], [rank])
    md.checkpoint.save(folder / "ours", model, optimizer)
    state = {"model": model.blocks[0].state_dict(), "moments": first_moments(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "torch")
    return wholes(model, optimizer)


def load_and_go_on(rank, folder, dp, ep):
    mesh = None if dp * ep == 1 else md.MoEMesh(dp=dp, ep=ep)
    model = Model(None if mesh is None else mesh.ep_group, seed=rank)
    if mesh is not None:
        by_library(model, mesh)
    optimizer = optimizer_of(model)
    state = {"model": model.blocks[0].state_dict()}
    dcp.load(state, checkpoint_id=folder / "torch", no_dist=mesh is None)
    model.blocks[0].load_state_dict(state["model"])
    loaded = {n: t for n, t in wholes(model, ()).items() if n.startswith("model.blocks.0")}
    md.checkpoint.load(folder / "ours", model, optimizer)
    found = wholes(model, optimizer)
    assert {name: found[name] for name in loaded}.keys() == loaded.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in loaded.items())
    moments = first_moments(model, optimizer)
    loaded = {n: {k: torch.zeros_like(v) for k, v in m.items()} for n, m in moments.items()}
    dcp.load({"moments": loaded}, checkpoint_id=folder / "torch", no_dist=mesh is None)
    for name, key in ((name, key) for name, values in moments.items() for key in values):
        mine, saved = (
            state[name][key].full_tensor()
            if isinstance(moments[name][key], DTensor)
            else state[name][key]
            for state in (moments, loaded)
        )
        assert torch.equal(mine, saved), (name, key)
        assert key == "step" or mine.shape == found[f"model.{name}"].shape
    # The batches of four ranks.
    share = 4 // (dp * ep)
    train(model, optimizer, [1], range(rank * share, (rank + 1) * share))
    return found, wholes(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, spawn_ranks(save_on_four, 4, folder)


def load_and_go_on_each(rank, folder, meshes):
    return [load_and_go_on(rank, folder, dp, ep) for dp, ep in meshes]


@pytest.mark.parametrize(
    ("num_ranks", "meshes"), [(1, [(1, 1)]), (2, [(1, 2)]), (4, [(4, 1), (2, 2)])]
)
def test_another_number_of_ranks_goes_on(saved, num_ranks, meshes):
    """Experts, with names of their own or stacked, their moments, and the rest of the model."""
    folder, told = saved
    if num_ranks == 1:
        ranks = [load_and_go_on_each(0, folder, meshes)]
    else:
        ranks = spawn_ranks(load_and_go_on_each, num_ranks, folder, meshes)
    at_save = {name: tensor for rank in told for name, tensor in rank.items()}
    expected = wholes(*trained_by_one_process())
    assert expected.keys() == at_save.keys()
    for found in zip(*ranks, strict=True):
        for rank in [*told, *(before for before, _ in found)]:
            assert [n for n, tensor in rank.items() if not torch.equal(tensor, at_save[n])] == []
        assert {name for before, _ in found for name in before} == at_save.keys()
        for name, tensor in (pair for _, after in found for pair in after.items()):
            torch.testing.assert_close(tensor, expected[name], **TIGHT)
