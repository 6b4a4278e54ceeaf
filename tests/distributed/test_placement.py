import copy
import functools
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch import nn
from torch.distributed.tensor import DTensor

import moe_ext
from moe_ext import _runtime_library
from moe_ext import distributed as md
from moe_ext.attention import SequenceParallelMLP
from moe_ext.distributed.dtensor import local_part, part_in_graph
from moe_ext.nn import GroupedExperts, ModuleExperts
from moe_ext.testing import spawn_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
E = 8
CHECKS = Checks()


class Slopes(nn.Module):
    """Experts of a user's own: one stacked parameter, and one that is not."""

    def __init__(self, num_local, dim):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(num_local, dim))
        self.temperature = nn.Parameter(torch.ones(3 * num_local + 1))

    def forward(self, rows, offsets):
        expert = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(rows)), right=True)
        slope = self.slope[expert.clamp(max=len(self.slope) - 1)]
        return rows * slope * self.temperature.mean()


class OwnGroup(Slopes):
    """As a layer over ranks wants them: with its group and the number of all experts."""

    def __init__(self, group, num_experts, dim):
        super().__init__(num_experts // dist.get_world_size(group), dim)
        self.ep_group, self.num_experts = group, num_experts


def test_a_layer_of_one_rank_holds_all_experts():
    model = nn.Sequential(moe_ext.MoELayer(4, 6, E, bias=True), nn.Linear(4, 4))
    found = md.placements(model)
    assert list(found) == [name for name, _ in model.named_parameters() if "experts" in name]
    for name, placement in found.items():
        assert (placement.axis, placement.dim, placement.num_parts) == ("ep", 0, 1)
        assert (placement.held, placement.size, placement.group) == (range(E), E, None)
        shape = model.get_parameter(name).shape
        assert placement.logical_shape(shape) == shape


def test_experts_of_any_class_are_declared_by_their_layer():
    layer = moe_ext.MoELayer(4, 6, E, experts=Slopes(E, 4))
    found = md.placements(layer)
    assert found["experts.slope"].dim == 0 and found["experts.temperature"].dim is None
    groups = md.expert_param_groups(layer)
    assert [len(group["params"]) for group in groups] == [1, 2]


def test_an_attribute_or_a_class_name_declares_nothing():
    class TextExperts(nn.Linear):
        ep_group, num_experts, num_local_experts = None, E, E

    model = nn.Sequential(TextExperts(4, E))
    assert md.placements(model) == {} and list(md.expert_parameters(model)) == []
    assert moe_ext.compression.parameter_roles(model)["0.weight"] == "other"
    md.declare_placement(model[0], md.Placement.of_experts(E, None), ["weight"])
    assert list(md.placements(model)) == ["0.weight"]
    md.declare_placement(model[0], md.Placement.of_experts(E, None))
    assert list(md.placements(model)) == ["0.weight", "0.bias"]
    assert moe_ext.compression.parameter_roles(model)["0.weight"] == "expert"


def test_the_innermost_declaration_decides():
    inner, outer = nn.Linear(2, 4), nn.Sequential()
    outer.append(inner)
    md.declare_placement(outer, md.Placement.of_experts(4, None))
    md.declare_placement(inner, md.Placement("tp", None, range(2), 2, dim=1), ["weight"])
    found = md.placements(nn.ModuleDict({"net": outer}))
    assert {name: placement.axis for name, placement in found.items()} == {
        "net.0.weight": "tp",
        "net.0.bias": "ep",
    }


def changed(change):
    model = nn.Sequential(moe_ext.MoELayer(4, 6, E))
    return model, change(model) or model


def assigned(model):
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def added(model):
    model[0].experts.register_parameter("scale", nn.Parameter(torch.ones(E)))


CHANGES = {
    "deepcopy": copy.deepcopy,
    "to": lambda model: model.to(torch.float64),
    "meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "assign": assigned,
    "frozen": lambda model: model.requires_grad_(False),
    "wrapped": lambda model: nn.ModuleDict({"module": model}),
    "added": added,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_declared_stays(name):
    _, model = changed(CHANGES[name])
    found = md.placements(model)
    assert set(found) == {n for n, _ in model.named_parameters() if "experts" in n}
    assert all(placement.held == range(E) for placement in found.values())


def test_a_copy_declares_by_itself():
    model = nn.Sequential(GroupedExperts(E, 4, 6))
    twin = copy.deepcopy(model)
    md.declare_placement(twin[0], md.Placement("tp", None, range(4), 4))
    assert {p.axis for p in md.placements(model).values()} == {"ep"}
    assert {p.axis for p in md.placements(twin).values()} == {"tp"}


@CHECKS()
def experts_over_ranks():
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    local = E // ranks
    modules = ModuleExperts.build(lambda index: nn.Linear(4, 4), E, ep_group=group)
    kinds = [
        moe_ext.MoELayer(4, 6, E, ep_group=group),
        moe_ext.MoELayer(4, 6, E, ep_group=group, experts=OwnGroup(group, E, 4)),
        moe_ext.MoELayer(4, 6, E, ep_group=group, experts=modules),
    ]
    found = [md.placements(layer) for layer in (copy.deepcopy(kinds[0]), kinds[1], kinds[2])]
    for place in (found[0]["experts.down_proj"], found[1]["experts.slope"]):
        assert place.held == range(rank * local, (rank + 1) * local)
        assert (place.size, place.dim, place.part, place.num_parts) == (E, 0, rank, ranks)
        assert place.group is group
        assert place.logical_shape((local, 6, 4)) == (E, 6, 4)
    assert found[1]["experts.temperature"].dim is None
    for index in range(local):
        place = found[2][f"experts.{index}.weight"]
        expert = rank * local + index
        assert (place.held, place.one_expert) == (range(expert, expert + 1), True)


@CHECKS()
def a_layer_with_a_group_is_copied_but_not_pickled():
    layer = moe_ext.MoELayer(4, 6, E, ep_group=dist.group.WORLD)
    text = "pickle: expected a module without a process group, got one of the ranks"
    wrapped = md.data_parallel(copy.deepcopy(layer))
    for part in (layer, layer.experts, md.placements(layer)["experts.down_proj"], wrapped):
        with pytest.raises(TypeError, match=text):
            pickle.dumps(part)
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    for mine, parameter in zip(average.module.parameters(), layer.parameters(), strict=True):
        assert torch.equal(mine, parameter)
    place = md.placements(pickle.loads(pickle.dumps(moe_ext.MoELayer(4, 6, E))))
    assert place["experts.down_proj"].held == range(E)


@CHECKS()
def columns_over_ranks():
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for activation in ("gelu", "swiglu"):
        mlp = SequenceParallelMLP(4, 8, group=group, activation=activation)
        up = "gate_up_proj" if activation == "swiglu" else "up_proj"
        found = md.placements(mlp)
        assert set(found) == {f"{up}.weight", f"{up}.bias", "down_proj.weight"}
        part = 8 // ranks
        for name, place in found.items():
            assert (place.axis, place.held) == ("tp", range(rank * part, (rank + 1) * part))
            assert (place.size, place.dim) == (8, int(name == "down_proj.weight"))
            assert place.blocks == (2 if name.startswith("gate_up") else 1)
            assert place.grad_reduction == "sum"
        rows = 16 if activation == "swiglu" else 8
        assert mlp.get_parameter(f"{up}.weight").shape == (rows, 4)
        assert mlp.down_proj.weight.shape == (4, 8)
        assert local_part(mlp.down_proj.weight).shape == (4, part)


@CHECKS()
def gradients_of_parts_are_laid_out_as_those_of_torch():
    mesh = md.MoEMesh(ep=2, etp=2)
    layer = moe_ext.MoELayer(4, 8, 4, ep_group=mesh.ep_group, dtype=torch.float64)
    for parameter in (layer.experts.gate_up_proj, layer.experts.down_proj):
        local = parameter.detach().to_local()
        laid_out = torch.randn_like(local)
        for grad in (laid_out, laid_out.mT.contiguous().mT, local.new_ones(()).expand_as(local)):
            found = []
            for part in (parameter.to_local(), *parts_in_graphs(parameter)):
                parameter.grad = None
                part.backward(grad)
                found.append(parameter.grad)
            theirs = found[0]
            for ours in found[1:]:
                assert type(ours) is DTensor
                assert ours._spec == theirs._spec
                assert (ours.shape, ours.stride()) == (parameter.shape, parameter.stride())
                assert ours.to_local().stride() == local.stride()
                assert torch.equal(ours.to_local(), theirs.to_local())
        parameter.grad = None
        for part in parts_in_graphs(parameter):
            (first,) = torch.autograd.grad(part.pow(3).sum(), parameter, create_graph=True)
            (second,) = torch.autograd.grad(first.to_local().sum(), parameter)
            torch.testing.assert_close(second.to_local(), 6 * local)
            assert part.data_ptr() == local.data_ptr()
        # Two parts in one graph, and a hook that calculates with what it is given.
        seen = []
        hook = parameter.register_hook(functools.partial(see_and_double, seen))
        parts = 2 * parts_in_graphs(parameter)
        sum((place + 1) * part.sum() for place, part in enumerate(parts)).backward()
        hook.remove()
        total = sum(range(1, len(parts) + 1))
        assert torch.equal(parameter.grad.to_local(), torch.full_like(local, 2 * total))
        torch.testing.assert_close(seen[0], local.new_tensor(total * parameter.numel() ** 0.5))


@CHECKS()
def parameters_are_converted_while_a_graph_lives():
    for runtime in dict.fromkeys([None, _runtime_library.load()]):
        layer = moe_ext.MoELayer(4, 8, 4, ep_group=md.MoEMesh(ep=4).ep_group)
        part = part_in_graph(layer.experts.gate_up_proj, runtime)
        part.sum().backward(retain_graph=True)
        layer.double()  # refuses a parameter that a node holds beside that of its gradient
        weight = layer.experts.gate_up_proj
        assert (weight.dtype, weight.grad.dtype) == (torch.float64, torch.float64)
        assert part.requires_grad


@CHECKS()
def parameters_may_be_results_of_operators():
    layer = moe_ext.MoELayer(4, 8, 4, ep_group=md.MoEMesh(ep=4).ep_group)
    weight, x = layer.experts.gate_up_proj, torch.randn(6, 4)
    layer(x).sum().backward()
    plain, weight.grad = weight.grad.to_local(), None
    given = {"experts.gate_up_proj": weight * 1.0}
    torch.func.functional_call(layer, given, (x,)).sum().backward()
    assert torch.equal(weight.grad.to_local(), plain)


@CHECKS()
def gradients_of_two_parts_share_no_memory():
    runtime = _runtime_library.load()
    if runtime is None:
        return
    layer = moe_ext.MoELayer(4, 8, 4, ep_group=md.MoEMesh(ep=4).ep_group)
    one = layer.experts.gate_up_proj
    other = torch.nn.Parameter(one.detach().clone())
    factor = torch.randn_like(one.to_local().detach())
    for num_before in range(2):
        parts = [part_in_graph(parameter, runtime) for parameter in (one, other)]
        ((parts[0] + parts[1]) * factor).sum().backward()  # one tensor is the gradient of both
        for parameter in (one, other):
            assert torch.equal(parameter.grad.to_local(), (num_before + 1) * factor)
    one.grad.mul_(0)
    assert torch.equal(other.grad.to_local(), 2 * factor)


def see_and_double(seen, grad):
    seen.append(grad.norm().full_tensor())
    return 2 * grad


def parts_in_graphs(parameter):
    """A rank's part, by each node that gives it."""
    runtimes = dict.fromkeys([None, _runtime_library.load()])
    return [part_in_graph(parameter, runtime) for runtime in runtimes]


def rows_of_page():
    """The lines of the table that says how parameters lie over ranks."""
    mesh, etp = md.MoEMesh(dp=2, ep=2), md.MoEMesh(dp=4, ep=2, etp=2)
    whole = moe_ext.MoELayer(8, 16, 4, ep_group=mesh.ep_group)
    modules = {
        "`MoELayer`": whole,
        "`MoELayer` with etp": moe_ext.MoELayer(8, 16, 4, ep_group=etp.ep_group),
        "`MoELayer` under `distributed.fully_shard`": md.fully_shard(
            moe_ext.MoELayer(8, 16, 4, ep_group=mesh.ep_group), mesh
        ),
        "`ModuleExperts`": ModuleExperts.build(
            lambda _: nn.Linear(8, 8, bias=False), 4, ep_group=mesh.ep_group
        ),
        "`SequenceParallelMLP`": SequenceParallelMLP(8, 16, group=mesh.ep_group, bias=False),
    }
    rows = []
    for title, module in modules.items():
        for name, p in module.named_parameters():
            cells, local = ["none", "plain tensor"], local_part(p.detach())
            if isinstance(p, DTensor):
                names = p.device_mesh.mesh_dim_names
                cells = [", ".join(names), ", ".join(map(str, p.placements))]
            shapes = [str(list(p.shape)), str(list(local.shape))]
            rows.append(f"| {' | '.join([title, f'`{name}`', *cells, *shapes])} |")
    return rows


def rows_on_rank(_rank):
    return rows_of_page()


@CHECKS()
def parameters_lie_as_the_page_says():
    """`PYTHONPATH=tests python tests/distributed/test_placement.py` prints the table."""
    text = PAGE.read_text()
    table = text[text.index("<!-- placements -->") : text.index("<!-- end of placements -->")]
    assert table.splitlines()[3:] == rows_of_page()


test_over_four_ranks = CHECKS.test(4)


if __name__ == "__main__":
    print("\n".join(spawn_ranks(rows_on_rank, 4)[0]))
