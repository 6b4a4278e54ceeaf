import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import ModuleExperts
from moe_ext.testing import spawn_ranks

D, E = 4, 4


class Expert(nn.Module):
    """An expert that no stacked weight could hold: its depth depends on its index."""

    recomputes = False

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(100 + index)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)) for _ in range(1 + index % 2))
        )
        self.double()
        self.num_rows = []

    def forward(self, x):
        self.num_rows.append(x.shape[0])
        if self.recomputes:
            return torch.sin(checkpoint(self.layers, x, use_reentrant=False))
        return torch.sin(self.layers(x))


def make_layer(ep_group=None):
    experts = ModuleExperts.build(Expert, E, ep_group=ep_group)
    torch.manual_seed(0)  # making an expert seeds too
    return moe_ext.MoELayer(
        D, 1, E, 2, experts=experts, ep_group=ep_group, dtype=torch.float64, balance=0.1
    )


def test_equals_each_module_on_its_rows():
    torch.manual_seed(0)
    experts = ModuleExperts(Expert(i) for i in range(E))
    offsets = torch.tensor([1, 3, 3, 8, 10])  # a row before the first expert, one after the last
    x = torch.randn(11, D, dtype=torch.float64, requires_grad=True)
    y = experts(x, offsets)
    want = torch.zeros_like(x)
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        want[begin:end] = experts[e](x[begin:end])
    torch.testing.assert_close(y, want)
    y.square().sum().backward()
    assert not x.grad[0].any() and not x.grad[10].any()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == (not name.startswith("1."))


def test_every_expert_runs_when_all_tokens_choose_one():
    layer = make_layer()
    with torch.no_grad():
        layer.router.weight.zero_()  # ties go to experts 0 and 1
    layer(torch.randn(6, D, dtype=torch.float64)).sum().backward()
    assert [expert.num_rows for expert in layer.experts] == [[6], [6], [0], [0]]
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())


def test_names_copies_and_reset():
    experts = ModuleExperts(nn.Linear(D, D) for _ in range(3))
    assert list(experts.state_dict())[:2] == ["0.weight", "0.bias"]
    assert experts.num_experts == experts.num_local_experts == 3
    assert experts.ep_group is None
    before = copy.deepcopy(experts)
    experts.reset_parameters()
    assert not torch.equal(before[0].weight, experts[0].weight)
    assert [name for name, *_ in moe_ext.distributed.expert_parameters(nn.Sequential(experts))][
        :1
    ] == ["0.0.weight"]


class Flat(nn.Module):
    def forward(self, x):
        return x.flatten()


class Pair(nn.Module):
    def forward(self, x):
        return x, None


def test_errors():
    with pytest.raises(ValueError, match=r"ModuleExperts: expected experts to hold at least one"):
        ModuleExperts([])
    with pytest.raises(TypeError, match=r"expected experts to be modules, got 3 at 1"):
        ModuleExperts([nn.Identity(), 3])
    with pytest.raises(TypeError, match=r"expected ep_group to be None or a ProcessGroup"):
        ModuleExperts([nn.Identity()], ep_group=2)
    x, offsets = torch.randn(2, D), torch.tensor([0, 2])
    with pytest.raises(
        ValueError, match=r"expected expert_offsets to be of shape \(2,\), got \(3,"
    ):
        ModuleExperts([Flat()])(x, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"expected expert 0 to return 2 rows, got shape \(8,\)"):
        ModuleExperts([Flat()])(x, offsets)
    with pytest.raises(TypeError, match=r"expected expert 0 to return a tensor, got tuple"):
        ModuleExperts([Pair()])(x, offsets)


def batches():
    """The second rank has no tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, D, dtype=torch.float64, generator=generator) for n in (5, 0)]


def rank_gradients(rank, recomputes):
    """Gradients after the mean over ranks, under the names of one process."""
    Expert.recomputes = recomputes
    layer = make_layer(dist.group.WORLD)
    assert layer.experts.first_expert == 2 * rank
    assert len(layer.experts) == 2
    layer(batches()[rank]).square().sum().backward()
    moe_ext.distributed.sync_gradients(layer)
    found = {}
    for name, parameter in layer.named_parameters():
        kind, local, *rest = name.split(".")
        if kind == "experts":
            name = ".".join([kind, str(int(local) + 2 * rank), *rest])
        found[name] = local_part(parameter.grad).numpy()
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_two_ranks_one_of_them_without_tokens(recomputes):
    layer = make_layer()
    layer.loss_scale = 0.5
    (layer(batches()[0]).square().sum() / 2).backward()
    want = {name: p.grad for name, p in layer.named_parameters()}
    found = {}
    for gradients in spawn_ranks(rank_gradients, 2, recomputes):
        found.update(gradients)
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(torch.from_numpy(gradient), want[name])
