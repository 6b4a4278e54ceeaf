"""Experts whose replicas are fewer ranks than those of the step: what they tell, and their link."""

import functools

import pytest
import torch
import torch.distributed as dist
from hook_models import not_taken
from rank_checks import Checks, full
from torch import nn

import moe_ext
from moe_ext import distributed as md
from moe_ext.comm.link import _links
from moe_ext.compression import CompressionState, Link, Policy, compress_gradients
from moe_ext.compression.cost_model import CostModel
from moe_ext.distributed.dtensor import local_part
from moe_ext.distributed.replicas import replica_group
from moe_ext.testing import spawn_ranks

CPU = torch.device("cpu")
CHECKS = Checks()


@functools.cache
def experts_mesh():
    return md.MoEMesh(dp=2, ep=2)


class Two(nn.Module):
    """Two layers of experts and a head."""

    def __init__(self, ep_group):
        super().__init__()
        torch.manual_seed(3)
        self.first = moe_ext.MoELayer(16, 128, 8, 2, ep_group=ep_group)
        self.second = moe_ext.MoELayer(16, 128, 8, 2, ep_group=ep_group)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.second(x + self.first(x)))


def backward(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model.zero_grad()
    model(torch.randn(6, 16, generator=generator)).square().sum().backward()


def forget(model, names):
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.grad = None


FIRST = ("first.experts.gate_up_proj", "first.experts.down_proj")
ALL = (*FIRST, "second.experts.gate_up_proj", "second.experts.down_proj")


@CHECKS(*[(codec, n) for codec in ("none", "int8", "auto") for n in (1, 2, 4)])
def experts_of_one_rank_without_gradients(codec, count):
    """As many messages, of one length, whatever the replicas of the other experts have."""
    mesh = experts_mesh()
    model = Two(mesh.ep_group)
    state = CompressionState(model=model, policy=Policy(codec, dense_below=1))
    for step in range(2):
        backward(model, step)
        if mesh.ep_rank == 1 and step == 1:
            forget(model, ALL[:count])
        local = {n: p.grad for n, p in model.named_parameters()}
        local = {n: None if g is None else g.clone() for n, g in local.items()}
        assert compress_gradients(model, state)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (local[name] is None), name
            if name in ALL and codec == "none" and local[name] is not None:
                want = local_part(local[name]).clone()
                dist.all_reduce(want, group=replica_group(mesh.ep_group, CPU))
                found = local_part(parameter.grad)
                torch.testing.assert_close(found, want / 2, rtol=1e-5, atol=1e-7)
    assert state.step == 2


@CHECKS(("raise",), ("propagate",))
def a_nan_beside_experts_without_gradients(nonfinite):
    """Its name is right, though the ranks have other buckets."""
    mesh = experts_mesh()
    model = Two(mesh.ep_group)
    policy = Policy("int8", dense_below=1)
    state = CompressionState(model=model, policy=policy, nonfinite=nonfinite)
    backward(model, 0)
    if mesh.ep_rank == 0:
        forget(model, FIRST)
    if dist.get_rank() == 3:
        local_part(model.second.experts.down_proj.grad)[0, 0, 0] = float("nan")
    not_taken(model, state, r"second.experts.down_proj on rank 3$")
    assert state.step == 0 and not any(r.any() for r in state.residuals().values())


@CHECKS()
def an_error_that_replicas_of_other_experts_do_not_see():
    """It ends the step on every rank, and the next one may go on."""
    mesh = experts_mesh()
    model = Two(mesh.ep_group)
    wrong = Policy("int8", expert="int4" if dist.get_rank() == 3 else "int8", dense_below=1)
    state = CompressionState(model=model, policy=wrong)
    backward(model, 0)
    message = (
        "expected the codecs to be equal on every rank, got .* on rank 1, .* on rank 3"
        if mesh.ep_rank == 1
        else r"got an error on ranks \[1, 3\], which say what it is"
    )
    with pytest.raises(ValueError, match=message):
        compress_gradients(model, state)
    assert state.step == 0
    state.options.policy = Policy("int8", dense_below=1)
    backward(model, 1)
    assert compress_gradients(model, state) and state.step == 1


@CHECKS()
def experts_are_priced_with_their_own_link():
    """Replicas of an expert on a slow link, those of the other one on a fast one."""
    mesh = experts_mesh()
    model = Two(mesh.ep_group)
    own = replica_group(mesh.ep_group, CPU)
    slow, fast = Link.of_rate(1e6), Link.of_rate(1e13, latency=1e-7)
    _links[own] = slow if mesh.ep_rank == 0 else fast
    given = CostModel(link=fast)
    state = CompressionState(model=model, codec="auto", cost_model=given)
    for step in range(2):
        backward(model, step)
        compress_gradients(model, state)
    (priced,) = state._costs._others.values()
    assert priced.link == _links[own] and priced.num_ranks == 2
    assert {state.parameters.names_of([model.get_parameter(n)])[0][0] for n in ALL} == set(ALL)
    assert not any("experts" in label for label in given.buckets)
    # What is clear needs no trial beside plain all-reduce.
    seconds = {
        codec.name: priced.predict(codec, 8192)
        for codec in next(iter(priced.buckets.values())).codecs
    }
    best = min(seconds, key=seconds.get)
    assert (best == "int4") == (mesh.ep_rank == 0), seconds
    table = state.explain()
    assert f"ranks {mesh.ep_rank}, {mesh.ep_rank + 2}, which hold the same experts:" in table
    tables = [None] * 2
    dist.all_gather_object(tables, priced.explain(), group=own)
    assert tables[0] == tables[1]


def rank_elastic(rank, of_means, of_sums):
    """Results for means and for sums, from the states and the weights of each."""
    mesh = md.MoEMesh(dp=dist.get_world_size() // 2, ep=2)
    return [elastic(mesh, *of_means, average=True), elastic(mesh, *of_sums, average=False)]


def elastic(mesh, states, weights, *, average):
    """A step with experts over two ranks; what each expert's replicas are owed."""
    size = dist.get_world_size()
    model = Two(mesh.ep_group)
    state = CompressionState(
        model=model, policy=Policy("none", expert="int8", dense_below=1), average=average
    )
    replicas = replica_group(mesh.ep_group, CPU)

    def owed():
        found = {}
        for name, residual in state.residuals().items():
            total = residual.double()
            if replicas is not None:
                dist.all_reduce(total, group=replicas)
            found[name] = total / (size // 2) if average else total
        return found

    found = {"ep_rank": mesh.ep_rank}
    if states is not None:
        model.load_state_dict(weights)
        state.load_state_dict(states)
        found["loaded"] = owed()
    backward(model, 0)
    compress_gradients(model, state)
    found["state"] = state.state_dict()
    found["weights"] = {name: full(p.detach()) for name, p in model.named_parameters()}
    state.regroup()
    found["owed"] = owed()
    return found


def test_resuming_with_another_number_of_replicas():
    """Two replicas of every expert, then one, then three; of means and of sums."""
    found = spawn_ranks(rank_elastic, 4, (None, None), (None, None))
    for size in (2, 6):
        ends = list(zip(*found, strict=True))
        carried = [([one["state"] for one in end], end[0]["weights"]) for end in ends]
        found = spawn_ranks(rank_elastic, size, *carried)
        for before, after in zip(ends, zip(*found, strict=True), strict=True):
            owed = {one["ep_rank"]: one["owed"] for one in before}
            for one in after:
                want = owed[one["ep_rank"]]
                assert set(one["loaded"]) == set(want)
                for name, found_owed in one["loaded"].items():
                    torch.testing.assert_close(found_owed, want[name], rtol=1e-5, atol=1e-7)


# A message that one rank waits for in vain must not take a minute.
test_experts = CHECKS.test(4, timeout=90, group_timeout=20)
