"""Checkpoints of jobs of one shape that jobs of another shape load."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_checks import full
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

import moe_ext
from moe_ext import distributed as md
from moe_ext.attention import SequenceParallelMLP
from moe_ext.distributed import training_state
from moe_ext.distributed.dtensor import divided_as, gathered, is_dtensor, local_part
from moe_ext.nn import ModuleExperts
from moe_ext.optim import (
    LAMB,
    Adafactor,
    Muon,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
    param_groups,
)
from moe_ext.testing import spawn_ranks

# Two of three ranks have experts of one rank of the two that saved, one has those of both.
E, D = 6, 8
ONE_BIT = {
    "OneBitAdam": functools.partial(OneBitAdam, freeze_step=2),
    "OneBitLamb": functools.partial(OneBitLamb, freeze_step=2),
    "ZeroOneAdam": functools.partial(ZeroOneAdam, var_freeze_step=2),
}
OPTIMIZERS = ("AdamW", "LAMB", "OneBitAdam")


class Expert(nn.Linear):
    """With a state that no optimizer knows, as that of a BatchNorm."""

    def __init__(self, index):
        super().__init__(D, D)
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("index", torch.tensor(index))


def add_state(layer, seed=0):
    """A buffer with a number for each expert, beside those that are stacked."""
    place = md.placement.placement_of(layer.experts)
    layer.experts.register_buffer("seen", torch.tensor(list(place.held)) / 8 + seed)
    return layer


class Model(nn.Module):
    """Stacked experts, experts that are modules, and a dense layer."""

    def __init__(self, ep_group, seed=5):
        super().__init__()
        torch.manual_seed(seed)
        modules = ModuleExperts.build(Expert, E, ep_group=ep_group)
        self.stacked = moe_ext.MoELayer(D, 5, E, 2, bias=True, ep_group=ep_group)
        self.apart = moe_ext.MoELayer(D, 5, E, 2, experts=modules, ep_group=ep_group)
        self.head = nn.Linear(D, 300)
        add_state(self.stacked, seed)

    def forward(self, x):
        return self.head(self.apart(x + self.stacked(x)))


def split(model, group):
    """The columns of an MLP over the same ranks."""
    model.mlp = SequenceParallelMLP(D, 24, group=group, activation="swiglu")
    return model


def make(kind, mesh, seed=5):
    ep_group = None if mesh is None else mesh.ep_group
    model = Model(ep_group, seed)
    if kind in ONE_BIT:
        groups = param_groups(model, process_groups=mesh is not None)
        return model, ONE_BIT[kind](groups, lr=1e-2)
    split(model, ep_group)
    if kind == "AdamW":
        return model, torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    return model, LAMB(param_groups(model), lr=1e-2)


def take_steps(model, optimizer, steps, mesh):
    """Gradients of the whole model's parameters: of ranks with copies each its own, or the sum."""
    replicas = range(1 if mesh is None else mesh.dp_size)
    if mesh is not None and type(optimizer).__name__ in ONE_BIT:
        replicas = [mesh.dp_rank]
    places = md.placements(model)
    names = md.placement.logical_names(model)

    def random(name, step, shape):
        keys = [f"{names.get(name, name)}.{step}.{replica}" for replica in replicas]
        seeds = [sum(map(ord, key)) * 7919 for key in keys]
        return sum(torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds)

    for step in range(steps):
        for name, parameter in model.named_parameters():
            if name in places and places[name].dim is None:  # each rank's own expert
                own = random(name, step, local_part(parameter.detach()).shape)
                parameter.grad = places[name].whole(own)
            else:
                parameter.grad = divided_as(random(name, step, parameter.shape), parameter)
        optimizer.step()


def wholes(model, optimizer):
    """Every tensor of the training state as one process would hold it."""
    state = md.checkpoint.TrainingState(model, optimizer).state_dict()
    return {n: t.full_tensor() if is_dtensor(t) else t.clone() for n, t in state.items()}


def torch_optimizers(layer):
    return [
        torch.optim.AdamW(layer.parameters(), lr=1e-2),
        LAMB(param_groups(layer), lr=1e-2),
        Adafactor(param_groups(layer), lr=1e-2),
        Muon(param_groups(layer, muon=True), lr=1e-2),
    ]


def one_bit_optimizers(layer, mesh):
    groups = [param_groups(layer, process_groups=mesh is not None) for _ in ONE_BIT]
    return [make(own, lr=1e-2) for make, own in zip(ONE_BIT.values(), groups, strict=True)]


def moments(state):
    """Name and key to the whole tensor, of what `get_optimizer_state_dict` returns."""
    return {
        f"{name}.{key}": value.full_tensor() if is_dtensor(value) else value.clone()
        for name, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def check_torch_state_dicts(layer, optimizer, mesh):
    """The state dicts of torch, whole and in parts, and into others of other values."""
    wanted = moments(get_optimizer_state_dict(layer, optimizer))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, state = get_state_dict(layer, optimizer, options=options)
    if dist.get_rank() == 0:
        assert model_state["experts.down_proj"].shape == (E, D, 5)
        assert_same(moments(state), wanted)
    with pytest.raises(TypeError, match="torch.save: expected whole tensors"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    everything = get_optimizer_state_dict(
        layer, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    assert_same(moments(everything), wanted)
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ):
        other = add_state(moe_ext.MoELayer(D, 5, E, 2, bias=True, ep_group=mesh.ep_group))
        twin = next(o for o in torch_optimizers(other) if type(o) is type(optimizer))
        sends = not options.broadcast_from_rank0 or dist.get_rank() == 0
        whole = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(other, whole if sends else {}, options=options)
        given = copy.deepcopy(everything) if sends else {}
        set_optimizer_state_dict(other, twin, given, options=options)
        for mine, parameter in zip(other.parameters(), layer.parameters(), strict=True):
            assert torch.equal(mine, parameter)
            assert twin.state[mine].keys() == optimizer.state[parameter].keys()
            for key, value in optimizer.state[parameter].items():
                loaded = twin.state[mine][key]
                assert is_dtensor(loaded) == is_dtensor(value)
                assert torch.equal(*map(torch.as_tensor, map(full, (loaded, value))))
    # Whole tensors, by number.
    twin = next(o for o in torch_optimizers(layer) if type(o) is type(optimizer))
    names = {parameter: name for name, parameter in layer.named_parameters()}
    ordered = [names[p] for group in twin.param_groups for p in group["params"]]
    by_number = {i: copy.deepcopy(everything["state"][name]) for i, name in enumerate(ordered)}
    with md.whole_state_dicts(twin):
        twin.load_state_dict({**twin.state_dict(), "state": by_number})
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    twin.step()
    for parameter in layer.experts.parameters():
        for key, value in optimizer.state[parameter].items():
            assert twin.state[parameter][key].shape == value.shape


def check_every_kind_of_part(model, mesh, folder):
    """Stacked experts, experts that are modules, and columns: whole, in files, and taken back."""
    state, whole = model.state_dict(), md.full_state_dict(model)
    alone = split(Model(None), None)
    assert {n: t.shape for n, t in whole.items()} == {
        n: t.shape for n, t in alone.state_dict().items()
    }
    alone.load_state_dict(whole)
    assert [int(whole[f"apart.experts.{i}.index"]) for i in range(E)] == list(range(E))
    parts = ("stacked.experts.down_proj", "apart.experts.0.weight", "mlp.gate_up_proj.weight")
    parts += ("apart.experts.0.mean", "apart.experts.0.index")
    for name in parts:
        with pytest.raises(TypeError, match="torch.save: expected whole tensors"):
            torch.save({name: state[name].cpu()}, io.BytesIO())
    dcp.save(state, checkpoint_id=folder / "every kind")
    own = [*model.named_parameters(), *model.named_buffers()]
    mine = {name: tensor.detach().clone() for name, tensor in own}
    saved = {name: tensor.clone() for name, tensor in whole.items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=folder / "every kind")
    with pytest.raises(ValueError, match="take moe_ext.distributed.full_state_dict"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for given in (whole, loaded, mine, alone.state_dict()):
        other = split(Model(mesh.ep_group, seed=8), mesh.ep_group)
        other.load_state_dict(given)
        assert_same(
            {name: t.detach() for name, t in other.named_parameters()}
            | dict(other.named_buffers()),
            mine,
        )
        assert_same(whole, saved)
    check_buffers_of_nobody_knows_which_part(model, mesh)
    # Experts that are modules: those of this rank by their global number, not the first ones.
    held = range(E // 2 * mesh.ep_rank, E // 2 * (mesh.ep_rank + 1))
    for local, index in enumerate(held):
        assert torch.equal(
            local_part(mine[f"apart.experts.{local}.bias"]), whole[f"apart.experts.{index}.bias"]
        )


def check_buffers_of_nobody_knows_which_part(model, mesh):
    """No rank's is lost; as a whole they are refused, until somebody says what they are."""
    model = copy.deepcopy(model)
    experts = model.stacked.experts
    experts.register_buffer("count", torch.tensor(dist.get_rank()))
    shown = model.state_dict()["stacked.experts.count"]
    assert gathered(shown).tolist() == [r + dist.get_rank() // 2 * 2 for r in range(2)]
    model.load_state_dict(model.state_dict())
    assert experts.count == dist.get_rank()
    text = "expected stacked.experts.count to be stacked over the experts of this rank, or declared"
    with pytest.raises(ValueError, match=f"full_state_dict: {text}"):
        md.full_state_dict(model)
    with pytest.raises(ValueError, match=f"checkpoint: {text}"):
        md.checkpoint.TrainingState(model).state_dict()
    with pytest.raises(ValueError, match=f"state_dict: {text}"), md.whole_state_dicts():
        model.state_dict()
    md.declare_placement(experts, md.Placement.of_experts(E, None, dim=None), ["count"])
    assert md.full_state_dict(model)["stacked.experts.count"] == dist.get_rank()


def check_state_dicts_for_tools(model, optimizer, mesh):
    """Plain tensors of the whole on the rank that keeps them, and nothing on the others."""
    want, first = md.full_state_dict(model), dist.get_rank() == 0
    with md.whole_state_dicts(optimizer):
        state, moments_ = model.state_dict(), optimizer.state_dict()
        # What speaks of the whole by itself does as before.
        assert_same(md.full_state_dict(model), want)
        md.checkpoint.TrainingState(model, optimizer).state_dict()
    with md.whole_state_dicts(optimizer, keep=True):
        everywhere, all_moments = model.state_dict(), optimizer.state_dict()
    assert_same(everywhere, want)
    with torch.inference_mode(), md.whole_state_dicts(optimizer, keep=True):
        assert_same(model.state_dict(), want)
        assert_same(md.full_state_dict(model), want)
    for found in (state, moments_["state"]):
        torch.save(found, io.BytesIO())
    assert is_dtensor(model.state_dict()["stacked.experts.down_proj"])
    if first:
        assert_same(state, want)
    else:
        assert state.keys() == want.keys()
        with pytest.raises(ValueError, match="got the empty ones that whole_state_dicts gives"):
            model.load_state_dict(state)
        text = "got the empty ones that whole_state_dicts gives"
        with md.whole_state_dicts(optimizer), pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(moments_)
    with pytest.raises(TypeError, match="expected optimizers to be"), md.whole_state_dicts(True):
        pass
    # One inside the other, as a tool may do.
    with md.whole_state_dicts(optimizer, keep=True), md.whole_state_dicts(optimizer, keep=True):
        again = optimizer.state_dict()
    for number, values in all_moments["state"].items():
        assert_same(again["state"][number], values)
    before = wholes(model, optimizer)
    other, twin = make("AdamW", mesh, seed=3)
    zero = torch.zeros((), requires_grad=True)  # as means of several models are
    floats = {name: x + zero for name, x in everywhere.items() if x.is_floating_point()}
    other.load_state_dict({**everywhere, **floats})
    with md.whole_state_dicts(optimizer, twin):
        twin.load_state_dict(copy.deepcopy(all_moments))
        optimizer.load_state_dict(copy.deepcopy(all_moments))
    assert_same(wholes(other, twin), before)
    assert_same(wholes(model, optimizer), before)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def save_all(rank, folder):
    """Ranks 0 to 3: two copies of two parts each."""
    mesh = md.MoEMesh(dp=2, ep=2)
    found = {}
    for kind in OPTIMIZERS:
        model, optimizer = make(kind, mesh)
        take_steps(model, optimizer, 4, mesh)
        before = copy.deepcopy(optimizer.state_dict())
        extra = {"scheduler": {"last": 7}}
        # As after an evaluation.
        with torch.inference_mode():
            md.checkpoint.save(folder / kind, model, optimizer, extra=extra)
        (mine, form), (others, wanted_form) = map(tree_flatten, (optimizer.state_dict(), before))
        assert form == wanted_form
        for one, other in zip(mine, others, strict=True):
            is_tensor = isinstance(one, torch.Tensor)
            assert torch.equal(*map(local_part, (one, other))) if is_tensor else one == other
        found[kind] = wholes(model, optimizer)
        if kind in ONE_BIT:
            with md.whole_state_dicts():
                whole = optimizer.state_dict()
            torch.save(whole, io.BytesIO())
            if rank == 0:
                names = [n for group in whole["param_groups"] for n in group["param_names"]]
                index = names.index("stacked.experts.down_proj")
                want = found[kind]["optimizer.owed.stacked.experts.down_proj"]
                assert torch.equal(whole["state"][index]["owed"], want)
        if kind == "AdamW":
            check_every_kind_of_part(model, mesh, folder)
            check_state_dicts_for_tools(model, optimizer, mesh)
    layer = make("OneBitAdam", mesh, seed=9)[0].stacked
    for optimizer in torch_optimizers(layer):
        take_steps(layer, optimizer, 3, mesh)
        state = get_optimizer_state_dict(layer, optimizer)
        dcp.save(state, checkpoint_id=folder / type(optimizer).__name__ / "alone")
        check_torch_state_dicts(layer, optimizer, mesh)
        found[f"{type(optimizer).__name__} alone"] = moments(state)
    layer = make("OneBitAdam", mesh, seed=9)[0].stacked
    for optimizer in one_bit_optimizers(layer, mesh):
        take_steps(layer, optimizer, 4, mesh)
        path = folder / type(optimizer).__name__ / "alone"
        state = {"optim": get_optimizer_state_dict(layer, optimizer)}
        dcp.save({"model": get_model_state_dict(layer), **state}, checkpoint_id=path)
        dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=f"{path} plain")
        found[f"{type(optimizer).__name__} alone"] = moments(state["optim"])
    layer = model.stacked
    dcp.save({"model": layer.state_dict()}, checkpoint_id=folder / "alone")
    everything = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
    assert everything["experts.down_proj"].shape == (E, D, 5)
    other = make("OneBitAdam", mesh, seed=7)[0].stacked
    mine = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for state in (layer.state_dict(), everything, mine):
        other.load_state_dict(state)
        for mine, parameter in zip(other.parameters(), layer.parameters(), strict=True):
            assert torch.equal(mine, parameter)
        other.reset_parameters()
    return found


def load_all(rank, folder, ep):
    mesh = None if ep == 1 else md.MoEMesh(dp=1, ep=ep)
    found = {}
    for kind in OPTIMIZERS:
        model, optimizer = make(kind, mesh, seed=rank)
        extra = {"scheduler": {"last": 0}}
        with torch.inference_mode():
            md.checkpoint.load(folder / kind, model, optimizer, extra=extra)
        assert extra == {"scheduler": {"last": 7}}
        found[kind] = wholes(model, optimizer)
        # The optimizer goes on from there.
        take_steps(model, optimizer, 1, mesh)
    layer = make("OneBitAdam", mesh, seed=rank)[0].stacked
    for optimizer in torch_optimizers(layer):
        kind = type(optimizer).__name__
        state = get_optimizer_state_dict(layer, optimizer)
        dcp.load(state, checkpoint_id=folder / kind / "alone", no_dist=ep == 1)
        set_optimizer_state_dict(layer, optimizer, state)
        found[f"{kind} alone"] = moments(get_optimizer_state_dict(layer, optimizer))
    take_steps(layer, torch.optim.SGD(layer.parameters(), 0.0), 1, mesh)
    for optimizer, other in zip(
        one_bit_optimizers(layer, mesh), one_bit_optimizers(layer, mesh), strict=True
    ):
        path = folder / type(optimizer).__name__ / "alone"
        # The model first: ranks compare it in the step by which torch makes a state to load into.
        state = {"model": get_model_state_dict(layer)}
        dcp.load(state, checkpoint_id=path, no_dist=ep == 1)
        set_model_state_dict(layer, state["model"])
        # It makes none where there are gradients.
        state = {"optim": get_optimizer_state_dict(layer, optimizer)}
        assert not state["optim"]["state"]
        dcp.load(state, checkpoint_id=path, no_dist=ep == 1)
        with pytest.raises(ValueError, match="to have moments, got none; .* call zero_grad first"):
            set_optimizer_state_dict(layer, optimizer, state["optim"])
        layer.zero_grad()
        state = {"optim": get_optimizer_state_dict(layer, optimizer)}
        dcp.load(state, checkpoint_id=path, no_dist=ep == 1)
        set_optimizer_state_dict(layer, optimizer, state["optim"])
        loaded = moments(get_optimizer_state_dict(layer, optimizer))
        assert optimizer.steps_taken == 4
        # With the state dicts of the optimizer by itself, which are empty before a step.
        take_steps(layer, other, 1, mesh)
        state = {"optim": other.state_dict()}
        dcp.load(state, checkpoint_id=f"{path} plain", no_dist=ep == 1)
        other.load_state_dict(state["optim"])
        assert_same(moments(get_optimizer_state_dict(layer, other)), loaded)
        found[f"{type(optimizer).__name__} alone"] = loaded
        take_steps(layer, optimizer, 1, mesh)
    state = {"model": layer.state_dict()}
    dcp.load(state, checkpoint_id=folder / "alone", no_dist=ep == 1)
    layer.load_state_dict(state["model"])
    found["alone"] = {
        name: whole.full_tensor() if is_dtensor(whole) else whole.clone()
        for name, whole in layer.state_dict().items()
    }
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks = spawn_ranks(save_all, 4, folder)
    return folder, {kind: merged([rank[kind] for rank in ranks]) for kind in ranks[0]}


def merged(ranks):
    """What all ranks told, each of whom told the same where it told anything."""
    found = {}
    for told in ranks:
        for name, tensor in told.items():
            assert name not in found or torch.equal(found[name], tensor), name
            found[name] = tensor
    return found


@pytest.mark.parametrize("ep", [1, 3])
def test_experts_and_moments_are_those_that_were_saved(saved, ep):
    folder, want = saved
    ranks = [load_all(0, folder, 1)] if ep == 1 else spawn_ranks(load_all, ep, folder, ep)
    for kind in OPTIMIZERS:
        found = merged([rank[kind] for rank in ranks])
        assert found.keys() == want[kind].keys()
        for name, tensor in want[kind].items():
            if ".owed." in name:
                # The mean of as many equal shares as there are ranks.
                torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0)
            else:
                assert torch.equal(found[name], tensor), (kind, name)
    for kind in [kind for kind in want if kind.endswith(" alone")]:
        found = merged([rank[kind] for rank in ranks])
        assert found.keys() == want[kind].keys()
        for name, tensor in want[kind].items():
            # The mean of equal shares, as above.
            rtol = 1e-6 if name.endswith(".owed") else 0
            torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=0)
    for name, tensor in merged([rank["alone"] for rank in ranks]).items():
        assert torch.equal(tensor, want["OneBitAdam"][f"model.stacked.{name}"])


def test_what_is_saved_is_whole(saved):
    _, want = saved
    state = want["AdamW"]
    assert state["model.stacked.experts.down_proj"].shape == (E, D, 5)
    assert state["optimizer.exp_avg.stacked.experts.down_proj"].shape == (E, D, 5)
    assert f"optimizer.exp_avg_sq.apart.experts.{E - 1}.weight" in state
    assert [int(state[f"model.apart.experts.{i}.index"]) for i in range(E)] == list(range(E))
    assert state["model.mlp.gate_up_proj.weight"].shape == (2, 24, D)
    for kind in ONE_BIT:
        assert want[f"{kind} alone"]["experts.down_proj.owed"].any()
        assert want[f"{kind} alone"]["experts.down_proj.exp_avg"].shape == (E, D, 5)
    owed = want["OneBitAdam"]["optimizer.owed.stacked.experts.down_proj"]
    assert owed.shape == (E, D, 5) and owed.any()


def test_refusals(tmp_path):
    model = nn.Linear(2, 2)
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    other.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    other.step()
    with pytest.raises(ValueError, match="expected optimizers to hold parameters of the model"):
        md.checkpoint.save(tmp_path / "a", model, other)
    md.checkpoint.save(tmp_path / "b", model)
    with pytest.raises(ValueError, match=r"expected a checkpoint with 2\.bias, got one without"):
        md.checkpoint.load(tmp_path / "b", nn.Sequential(nn.ReLU(), nn.ReLU(), model))


def recomputed(model):
    model[0].experts = checkpoint_wrapper(model[0].experts)
    model[1] = checkpoint_wrapper(model[1])
    return model


def compiled_in_part(model):
    model[0].experts = compiled(checkpoint_wrapper(model[0].experts))
    model[1] = checkpoint_wrapper(compiled(model[1]))
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("way", [recomputed, compiled, compiled_in_part])
@pytest.mark.parametrize("earlier", [False, True])
def test_what_is_wrapped_has_the_names_of_the_model(tmp_path, monkeypatch, way, earlier):
    """Checkpoints of `earlier` versions have names as `torch.compile` changes them."""

    def trained(wrap):
        model = nn.Sequential(moe_ext.MoELayer(4, 3, 2), nn.Linear(4, 4))
        model = way(model) if wrap else model
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    for wrap in (True, False):
        saved = trained(wrap)
        with monkeypatch.context() as patch:
            if earlier:
                patch.setattr(training_state, "_WRAPPERS", training_state._WRAPPERS[:1])
            md.checkpoint.save(tmp_path / str(wrap), *saved)
        for other in trained(True), trained(False):
            md.checkpoint.load(tmp_path / str(wrap), *other)
            pairs = zip(saved[0].parameters(), other[0].parameters(), strict=True)
            for mine, found in pairs:
                assert torch.equal(mine, found)
                moments = saved[1].state[mine]["exp_avg"], other[1].state[found]["exp_avg"]
                assert torch.equal(*moments)


def test_a_compiled_ddp_has_the_names_of_the_model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        saved, other = nn.Linear(4, 4), nn.Linear(4, 4)
        md.checkpoint.save(tmp_path / "saved", compiled(DistributedDataParallel(saved)))
    finally:
        dist.destroy_process_group()
    md.checkpoint.load(tmp_path / "saved", other)
    assert torch.equal(saved.weight, other.weight)


def load_recomputed_experts(rank, folder):
    """Of experts that are modules each, the names count those of all ranks."""

    def model(seed, wrap):
        torch.manual_seed(seed + rank)
        experts = ModuleExperts.build(Expert, E, ep_group=dist.group.WORLD)
        layer = moe_ext.MoELayer(D, 3, E, experts=experts, ep_group=dist.group.WORLD)
        if wrap is not None:
            layer.experts = wrap(layer.experts)
        return nn.Sequential(layer)

    saved = model(0, checkpoint_wrapper)
    md.checkpoint.save(folder, saved)
    mine = dict(saved[0].experts.state_dict())
    for seed, wrap in ((7, None), (11, checkpoint_wrapper), (13, compiled)):
        other = model(seed, wrap)
        md.checkpoint.load(folder, other)
        for name, value in other[0].experts.state_dict().items():
            assert torch.equal(value, mine[name.removeprefix("_orig_mod.")]), name
    refuse_on_every_rank(rank, folder)
    return True


def refuse_on_every_rank(rank, folder):
    """What is wrong on one rank alone, as a pipeline stage that has changed."""
    stage = nn.ModuleDict({f"stage {rank}": nn.Linear(2, 2)})
    md.checkpoint.save(folder, stage)
    before = stage[f"stage {rank}"].weight.detach().clone()
    stage[f"stage {rank}"].weight.data.zero_()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameters of the model, got one .* on rank 1"):
        md.checkpoint.save(folder, stage, [other] * rank)
    if rank == 1:
        stage["new"] = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"with new\.bias, got one without it on rank 1"):
        md.checkpoint.load(folder, stage)
    assert not stage[f"stage {rank}"].weight.any()
    with pytest.raises(FileNotFoundError, match=r"a whole checkpoint, got .*\.metadata on rank 1"):
        md.checkpoint.load(f"{folder}{'/elsewhere' * rank}", stage)
    if rank == 1:
        del stage["new"]
    md.checkpoint.load(folder, stage)
    assert torch.equal(stage[f"stage {rank}"].weight, before)


def test_recomputed_experts_have_the_names_of_all(tmp_path):
    assert spawn_ranks(load_recomputed_experts, 2, str(tmp_path)) == [True, True]
