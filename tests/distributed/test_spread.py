"""`parallelize(model, mesh)` of layers that hold all experts."""

import copy

import pytest
import torch
import torch.distributed as dist
from parallel_models import TIGHT, E, Model, batches, loss_of, mesh
from rank_checks import Checks, full, shared_folder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext import distributed as md
from moe_ext.distributed.dtensor import is_dtensor

check = Checks()


class Shardable(nn.Sequential):
    """Layers without biases, which etp can cut too, and with options of the way of rows."""

    def __init__(self, ep_group=None, **options):
        torch.manual_seed(3)
        options = {"ep_group": ep_group, "dtype": torch.float64, **options}
        layers = [moe_ext.MoELayer(6, 4, E, 2, **options) for _ in range(2)]
        super().__init__(nn.Linear(6, 6, dtype=torch.float64), *layers)

    def forward(self, x, branch=False):
        return super().forward(x)


def whole(model):
    """The state on every rank; torch 2.11 has no `full_tensor()` of gates and ups with etp."""
    with md.whole_state_dicts(keep=True):
        return model.state_dict()


def assert_equal(one, other):
    state = whole(other)
    for name, value in whole(one).items():
        assert torch.equal(value, state[name]), name


def assert_trains_as_one_process(make, group, spread):
    """Clipped steps under DDP, one of them after a checkpoint was read into a second model."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alone, model, made = make(None), spread(make(None)), make(group)
    for one in (model, made):
        assert [n for n, p in one.named_parameters() if is_dtensor(p)] == [
            n for n, p in made.named_parameters() if is_dtensor(p)
        ]
    for (name, p), q in zip(model.named_parameters(), made.named_parameters(), strict=True):
        placed = [(t.placements, t.device_mesh) for t in (p, q[1]) if is_dtensor(t)]
        assert placed[:1] == placed[1:], name
    assert_equal(model, made)
    assert repr(model) == repr(made)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (alone, model)]
    for step in range(2):
        if step == 1:
            with shared_folder() as folder:
                md.checkpoint.save(folder, model, optimizers[1])
                model = spread(make(None))
                optimizers[1] = torch.optim.AdamW(model.parameters(), 0.1)
                md.checkpoint.load(folder, model, optimizers[1])
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        for optimizer in optimizers:
            optimizer.zero_grad()
        moe_ext.nn.set_loss_scale(alone, 1.0 / world)
        for x in batches(2)[step]:
            (loss_of(alone, x) / world).backward()
        loss_of(ddp, batches(2)[step][rank]).backward()
        norms = [md.clip_grad_norm_(m, 0.05) for m in (alone, model)]
        torch.testing.assert_close(*norms, **TIGHT)
        for optimizer in optimizers:
            optimizer.step()
    state = whole(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-9, msg=name)
    model.load_state_dict(state)
    again = spread(make(None))
    again.load_state_dict(model.state_dict())
    assert_equal(again, model)


@check()
def layers_are_as_those_made_with_the_group():
    for ep in (1, 4):
        grid = mesh(ep)
        assert_trains_as_one_process(
            Model, grid.ep_group, lambda model, grid=grid: moe_ext.parallelize(model, grid)
        )


@check()
def a_mesh_of_torch_serves():
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))

    def spread(model):
        # A second call, for a module around the model, changes nothing.
        return moe_ext.parallelize(moe_ext.parallelize(model, made), made)

    assert_trains_as_one_process(Shardable, mesh(2).ep_group, spread)


@check()
def shards_of_experts_and_options_of_the_way():
    grid = md.MoEMesh(dp=4, ep=2, etp=2)
    spread = lambda model: moe_ext.parallelize(model, grid)  # noqa: E731
    assert_trains_as_one_process(Shardable, grid.ep_group, spread)
    way = moe_ext.nn.Dispatch("dedup", overlap=2)
    assert_trains_as_one_process(
        lambda group: Shardable(group, dispatcher=way),
        mesh(2).ep_group,
        lambda model: moe_ext.parallelize(model, mesh(2)),
    )


@check()
def a_layer_that_ran_alone_and_one_on_the_meta_device():
    grid, x = mesh(2), torch.ones(3, 6, dtype=torch.float64)
    model = Shardable(dispatcher=moe_ext.nn.Dispatch("alltoall", rebalance="exact"))
    want = model(x).detach()
    moe_ext.parallelize(model, grid)
    torch.testing.assert_close(model(x), want, **TIGHT)
    assert "moved_bytes" in model[1].metrics
    with torch.device("meta"):
        empty = Shardable()
    moe_ext.parallelize(empty, grid).to_empty(device="cpu")
    torch.manual_seed(5)
    for layer in empty:
        layer.reset_parameters()
    torch.manual_seed(5)
    for layer in model:
        layer.reset_parameters()
    for p, q in zip(empty.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(p), full(q))


@check()
def adapters_of_peft_train_on_dense_layers_alone():
    peft = pytest.importorskip("peft")

    def adapted(model, **targets):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, init_lora_weights=False, **targets)
        return peft.get_peft_model(model, config)

    grid, world = mesh(2), dist.get_world_size()
    whole, model = (adapted(Shardable(), target_modules=["0"]) for _ in range(2))
    ddp = DistributedDataParallel(moe_ext.parallelize(model, grid))
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (whole, model)]
    for xs in batches(2):
        moe_ext.nn.set_loss_scale(whole, 1.0 / world)
        for x in xs:
            (whole(x).square().mean() / world).backward()
        ddp(xs[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, wanted = map(peft.get_peft_model_state_dict, (model, whole))
    assert found.keys() == wanted.keys() and len(found) == 2
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name, **TIGHT)
    # Nobody would cut those of experts.
    on_experts = {"target_modules": [], "target_parameters": ["1.experts.down_proj"]}
    text = "expected experts to be GroupedExperts .* got ParamWrapper"
    refused(adapted(Shardable(), **on_experts), text, grid)
    late = adapted(moe_ext.parallelize(Shardable(), grid), **on_experts)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        late(batches()[0][0])


class Facade(nn.Module):
    """Experts of a class of its own."""

    num_experts = E

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(E, 6, 6))

    def forward(self, rows, offsets):
        return rows


def refused(model, text, given, error=ValueError):
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    values = copy.deepcopy(model.state_dict())
    shown = repr(model)
    with pytest.raises(error, match=text):
        moe_ext.parallelize(model, given)
    assert repr(model) == shown
    after = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    assert after == before
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), full(values[name]))


@check()
def everything_else_is_refused_on_every_rank_and_nothing_changed():
    grid, is_last = mesh(2), dist.get_rank() == 3
    model = Shardable()
    refused(model, "expected mesh to be of type MoEMesh or DeviceMesh", grid.ep_group, TypeError)
    optimizer = torch.optim.SGD(model.parameters() if is_last else model[0].parameters(), 0.1)
    refused(model, "that nothing else holds .* on rank 3", grid)
    del optimizer
    if is_last:
        model[2].experts.down_proj.grad = torch.zeros_like(model[2].experts.down_proj)
    refused(model, "expected 2.experts.down_proj to have no gradient when its", grid)
    model.zero_grad()
    if is_last:
        hook = model[1].experts.down_proj.register_hook(lambda grad: grad)
    refused(model, "expected 1.experts.down_proj to have no hooks when its experts", grid)
    if is_last:
        hook.remove()
        with torch.no_grad():
            model[1].experts.down_proj[-1, -1, -1] += 1
    refused(model, r"the values of experts \(seed every rank alike\)", grid)
    for experts in (moe_ext.nn.ModuleExperts([nn.Linear(6, 6) for _ in range(E)]), Facade()):
        layer = moe_ext.MoELayer(6, 4, E, 2, experts=experts)
        refused(
            layer, f"expected experts to be GroupedExperts .* got {type(experts).__name__}", grid
        )
    more = moe_ext.MoELayer(6, 4, E, 2)
    more.experts.register_buffer("scale", torch.ones(E))
    refused(more, "expected parameters and buffers to be among .* got scale", grid)
    own = moe_ext.MoELayer(6, 4, E, 2, dispatcher=md.LocalDispatcher(E))
    refused(own, "expected dispatcher to be a name where experts .* got LocalDispatcher", grid)
    refused(moe_ext.MoELayer(6, 4, 3, 2), "num_experts to be a multiple of the group size 2", grid)
    bare = moe_ext.nn.GroupedExperts(E, 6, 4)
    refused(nn.ModuleList([own.router, bare]), "to be those of a MoELayer .* got 1.gate_up", grid)
    refused(nn.Linear(6, 6), "to be those of a MoELayer .* got a model without", grid)
    # After the ranks have agreed: without LOCAL_WORLD_SIZE there are no nodes.
    nodes = Shardable(dispatcher="hierarchical")
    refused(nodes, "expected node_size, or else LOCAL_WORLD_SIZE, to divide", grid)
    shards = md.MoEMesh(dp=4, ep=2, etp=2)
    refused(
        moe_ext.MoELayer(6, 4, E, 2, bias=True), "expected bias and post_norm to be off", shards
    )
    narrow = moe_ext.MoELayer(6, 3, E, 2)
    refused(narrow, "ffn_dim to be a multiple of etp=2", shards)
    spread = moe_ext.parallelize(Shardable(), mesh(4))
    refused(spread, r"of mesh.ep_group, ranks \[\d, \d\], got 1 over ranks \[0, 1, 2, 3\]", grid)
    # And then it goes on.
    moe_ext.parallelize(nn.ModuleList([moe_ext.MoELayer(6, 4, E, 2)]), grid)


test_over_ranks = check.test(4)


def test_one_process():
    model = Shardable()
    assert moe_ext.parallelize(model, md.MoEMesh()) is model
    assert not any(is_dtensor(p) for p in model.parameters())
