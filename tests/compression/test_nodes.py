"""Dense inside a node, compressed between nodes: four ranks on two nodes."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from hook_models import (
    Ledger,
    Net,
    Words,
    assert_mean_of_short_gradients,
    batch,
    bytes_of_words,
    conserving_steps,
    dies_in_the_backward_pass,
    gradients_of,
    local_gradients,
    loop_step,
    looped,
    loss_of,
    momentum_is_that_of_sgd,
    not_taken,
    nothing_changes,
    reference,
    same_on_all_ranks,
    summed,
    words_backward,
    wrapped,
)
from rank_checks import Checks, assert_same_bits
from torch import nn

from moe_ext import distributed as md
from moe_ext.comm.link import Link, _links
from moe_ext.compression import (
    CompressionState,
    CostModel,
    OneBit,
    Policy,
    Quantize,
    TopK,
    codec_of,
    compress_gradients,
    flush,
    shard_numel,
)
from moe_ext.distributed import count_traffic
from moe_ext.testing import spawn_ranks

CHECKS = Checks()
# Other formats and scopes are those of the codecs, which know of no nodes.
SPLITTABLE = ("fp8", "random", "onebit", "nothing", "topk", "parameter", "split", "threshold")


def owed_of(state):
    return {name: r.clone() for name, r in state.residuals().items()}


@CHECKS(*[(name,) for name in SPLITTABLE])
def applied_and_owed_are_the_sum_of_the_gradients(name):
    """While buckets are rebuilt, so that shards come to other ranks."""
    *_, (_, state) = conserving_steps(name, node_size=2)
    # One rank of a node owes for an element.
    for residual in state.residuals().values():
        alone = (residual != 0).int()
        dist.all_reduce(alone)
        assert alone.max() <= 2


@CHECKS(("int8",), ("topk",))
def the_sum_and_gradients_of_16_bits(codec):
    for dtype, average in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        assert_mean_of_short_gradients(codec, dtype, average, density=0.2, node_size=2)


@CHECKS(("none",), ("bf16",), ("fp16",))
def plain_all_reduces_are_the_mean(codec):
    ours, state = wrapped(policy=Policy(codec, dense_below=0, bias=None), node_size=2)
    theirs = reference()
    for step in range(2):
        got, want = gradients_of(ours, step), gradients_of(theirs, step)
        for name, gradient in want.items():
            assert same_on_all_ranks(got[name])
            tolerance = 1e-6 if codec == "none" else 2.0**-6
            error = (got[name] - gradient).abs().max()
            assert error <= tolerance * gradient.abs().max() + 1e-9, (name, error)
    assert not state.residuals()


@CHECKS(("int8",), (TopK(0.05),), ("threshold",), (OneBit(64),))
def bytes_between_nodes(codec):
    """Dense ones stay inside the node; between nodes it is what the codec sends of a shard."""
    codec, numel = codec_of(codec), 30_000
    model = nn.Linear(numel // 4, 4, bias=False)
    state = CompressionState(model=model, policy=Policy(codec, dense_below=0), node_size=2)
    model.weight.grad = torch.randn(4, numel // 4)
    with count_traffic() as traffic:
        compress_gradients(model, state)
    shard = shard_numel(numel, 2, 1)
    inside, between = 2 * 4 * shard, codec.sent_bytes(shard, 2)
    assert traffic.total_bytes == inside + between
    # Of all that leave a node: two ranks send, and with one level one of three peers is inside.
    assert 2 * between < 0.75 * 2 * codec.sent_bytes(numel, 4)


@CHECKS(("int8",), (TopK(0.05),), (TopK(0.05, algorithm="split"),), (Quantize(stochastic=True),))
def a_nan_on_one_rank(codec):
    """No trace is left of the step on any rank, whichever node the rank is on."""
    for nonfinite in ("raise", "propagate"):
        parallel, state = wrapped(codec=codec, nonfinite=nonfinite, node_size=2)
        for step in range(2):
            gradients_of(parallel, step)
        owed, raises = owed_of(state), nonfinite == "raise"
        loss = loss_of(parallel, batch(2))
        parallel.zero_grad()
        named = pytest.raises(ValueError, match=r"on rank 2$")
        with nothing_changes(parallel, state), named if raises else contextlib.nullcontext():
            (loss * (float("nan") if dist.get_rank() == 2 else 1.0)).backward()
        if not raises:
            assert all(p.grad.isnan().any() for p in parallel.parameters() if p.numel() > 1024)
        gradients_of(parallel, 3)
        state.undo()
        assert_same_bits(owed_of(state), owed)


@CHECKS()
def a_sum_that_overflows_inside_a_node():
    model = nn.Linear(50, 50, bias=False)
    state = CompressionState(model=model, policy=Policy("int8", dense_below=0), node_size=2)
    model.weight.grad = torch.full((50, 50), 3e38 if dist.get_rank() < 2 else 1.0)
    not_taken(model, state, r"weight on rank 0, weight on rank 1$")
    assert not any(r.any() for r in state.residuals().values())


@CHECKS()
def a_sum_that_half_precision_does_not_hold():
    model = nn.Linear(50, 50, bias=False)
    policy = Policy("fp16", dense_below=0)
    state = CompressionState(model=model, policy=policy, average=False, node_size=2)
    model.weight.grad = torch.full((50, 50), 4e4)
    compress_gradients(model, state)
    torch.testing.assert_close(model.weight.grad, torch.full((50, 50), 1.6e5), rtol=1e-3, atol=0)


@CHECKS()
def what_is_owed_counts_in_half_precision():
    model = nn.Linear(50, 50, bias=False)
    options = {"model": model, "average": False, "node_size": 2}
    state = CompressionState(policy=Policy(TopK(0.0), dense_below=0), **options)
    model.weight.grad = torch.full((50, 50), 4e4)
    compress_gradients(model, state)
    saved = state.state_dict()
    state = CompressionState(policy=Policy("fp16", dense_below=0), **options)
    state.load_state_dict(saved)
    model.weight.grad = torch.full((50, 50), 4e4)
    not_taken(model, state, "got NaN or infinity in weight on rank 0, weight on rank")
    owed = saved["memory"]["residual"]["weight"]
    assert torch.equal(state.state_dict()["memory"]["residual"]["weight"], owed)


@CHECKS()
def momentum_follows_shards_to_other_ranks():
    """Everything is sent by one node after the other: the momentum is that of the optimizer."""
    momentum_is_that_of_sgd(node_size=2)


@CHECKS(("int8",), (TopK(0.05),), (TopK(0.1, algorithm="split"),))
def flush_and_exact_resumption(codec):
    model, state = looped(codec, node_size=2)
    ledger = Ledger(state, model)
    for step in range(3):
        if step == 1:
            twin = copy.deepcopy(model)
            other = CompressionState(model=twin, codec=codec, node_size=2)
            other.load_state_dict(state.state_dict())
        local = local_gradients(model, step)
        loop_step(model, state, step)
        if step >= 1:
            loop_step(twin, other, step)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
        if step == 2:
            assert state.residuals() and flush(model, state) and not state.residuals()
        ledger.add(local)
    ledger.check()


@CHECKS((None, 2), (2, None), (2, 4), (4, 2))
def another_size_of_nodes_takes_over_what_is_owed(before, after):
    model = Net()
    states = [
        CompressionState(model=model, codec="int8", node_size=size) for size in (before, after)
    ]
    ledger = Ledger(states[0], model)
    for step in range(3):
        state = states[step > 0]
        if step == 1:
            state.load_state_dict(states[0].state_dict())
            ledger.state = state
        local = local_gradients(model, step)
        loop_step(model, state, step)
        ledger.add(local)
        ledger.check()


@CHECKS(("none",), ("int8",), ("lossless",), ("rows",), ("threshold",), (TopK(0.1),), ("auto",))
def parameters_of_no_element(codec):
    for node_size in (2, 4, None):
        model = torch.nn.Embedding(0, 16)
        policy = Policy(codec, embedding=codec, dense_below=0)
        state = CompressionState(model=model, policy=policy, node_size=node_size)
        for _ in range(2):
            model.weight.grad = torch.zeros(0, 16)
            assert compress_gradients(model, state)
        assert flush(model, state)
        assert model.weight.grad.shape == (0, 16)


@CHECKS()
def one_node_is_dense():
    parallel, state = wrapped(codec="onebit", node_size=4)
    plain = reference()
    for step in range(2):
        want = gradients_of(plain, step)
        for name, gradient in gradients_of(parallel, step).items():
            torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-7)
    assert not state.residuals()


@CHECKS()
def auto_prices_the_link_between_nodes():
    parallel, state = wrapped(
        Net(200), ddp={"bucket_cap_mb": 1}, candidates=("none", "int8", "int4"), node_size=2
    )
    device, place = torch.device("cpu"), dist.get_rank() % 2
    levels = state._buckets.nodes.levels(state.group, state.group, device)
    assert dist.get_process_group_ranks(levels.node_group) == [place, place + 2]
    # As the ranks of the second place have measured it, which are the slower ones.
    _links[levels.node_group] = Link.of_rate(1e7 if place else 1e10)
    ledger = Ledger(state, parallel.module)
    for step in range(2):
        ledger.hooked_step(parallel, step)
    model = state.cost_model
    assert model.num_ranks == 2
    assert model.link.exchange_bandwidth == pytest.approx(1e7 / 8, rel=1e-4)
    assert 200 * 200 < 2 * max(bucket.numel for bucket in model.buckets.values()) < 300 * 400
    tables = [None] * 4
    dist.all_gather_object(tables, state.explain())
    assert len(set(tables)) == 1 and "int4" in tables[0]


@CHECKS()
def a_link_that_was_given_is_that_between_nodes():
    link = Link.of_rate(1e6)
    parallel, state = wrapped(Net(200), cost_model=CostModel(link=link), node_size=2)
    gradients_of(parallel, 0)
    assert state.cost_model.num_ranks == 2 and state.cost_model.link == link
    assert "between nodes of 2 ranks:\n2 ranks on cpu, latency 50 us" in state.explain()


@CHECKS((False,), (True,))
def rows_and_experts_that_nobody_reached(sparse):
    sent, whole = bytes_of_words(sparse, rtol=1e-5, atol=1e-7, node_size=2)
    # Twice half of everything inside a node, half of it between nodes, without what is zero there.
    assert sent[-1] < 1.5 * whole


@CHECKS(("none", False), ("int8", False), ("int8", True))
def experts(codec, replicas_on_a_node):
    """Their replicas may be on other nodes, or all on this one."""
    rank = dist.get_rank()
    if replicas_on_a_node:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        ep_group = groups[rank % 2]
    else:
        ep_group = md.MoEMesh(dp=2, ep=2).ep_group
    model, twin = (Words(ep_group=ep_group) for _ in range(2))
    state = CompressionState(model=model, policy=Policy(codec, dense_below=1), node_size=2)
    for step in range(2):
        words_backward(twin, step)
        md.sync_gradients(twin)
        words_backward(model, step)
        assert compress_gradients(model, state)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            exact = codec == "none" or (replicas_on_a_node and "experts" in name)
            error = (p.grad - q.grad).abs().max()
            assert error <= (1e-5 if exact else 0.05) * q.grad.abs().max() + 1e-6, (name, error)
    owing = {name for name in state.residuals() if "experts" in name}
    assert bool(owing) == (codec == "int8" and not replicas_on_a_node)


@CHECKS()
def what_is_refused():
    cases = [
        ({"node_size": 3}, r"expected node_size to divide the number of ranks, got 3 for 4"),
        ({"node_size": 2, "codec": TopK(0.1, scope="row")}, "any shard of a parameter"),
        ({"node_size": 2, "codec": "powersgd"}, "any shard of a parameter"),
        ({"node_size": 2, "candidates": ("none", "powersgd")}, "any shard of a parameter"),
    ]
    for options, message in cases:
        parallel, state = wrapped(**options)
        with pytest.raises(ValueError, match=message):
            gradients_of(parallel, 0)
        assert state.step == 0
    with pytest.raises(ValueError, match="expected node_size to be at least 1, got 0"):
        CompressionState(node_size=0)


test_nodes = CHECKS.test(4, timeout=150, group_timeout=20)


def rank_elastic(rank, states, node_size):
    """(state, what was owed when it was loaded, what is owed after two steps) of each codec."""
    found, size = [], dist.get_world_size()
    for codec, saved in zip(("int8", TopK(0.05)), states, strict=True):
        (model, state), loaded = looped(codec, node_size=node_size), None
        if saved is not None:
            state.load_state_dict(saved)
            loaded = {n: summed(r) / size for n, r in state.residuals().items()}
        for step in range(2):
            loop_step(model, state, step)
        after = state.state_dict()
        state.regroup()
        owed = {n: summed(r) / size for n, r in state.residuals().items()}
        found.append((after, loaded, owed))
    return found


def test_resuming_on_other_numbers_of_ranks():
    """Four ranks on two nodes, three on none, two on one."""
    found = spawn_ranks(rank_elastic, 4, (None, None), 2)
    for turn, (size, node_size) in enumerate(((3, None), (2, 2)), 2):
        states = [[rank[place][0] for rank in found] for place in range(2)]
        before = [owed for _, _, owed in found[0]]
        found = spawn_ranks(rank_elastic, size, states, node_size)
        for (after, loaded, _), want in zip(found[0], before, strict=True):
            assert list(loaded) == list(want) and want and after["step"] == 2 * turn
            for name, owed in loaded.items():
                # Three roundings of float32 between what was owed and what is.
                bound = 4e-7 * float(want[name].abs().max()) + 1e-12
                torch.testing.assert_close(owed, want[name], rtol=0, atol=bound)


def test_a_rank_that_dies():
    """In one node; the others learn of it inside theirs and between nodes."""
    die = functools.partial(dies_in_the_backward_pass, dying=3, match="", node_size=2)
    found = spawn_ranks(die, 4, may_die=[3], timeout=60, group_timeout=10)
    assert found == [True, True, True, None]
