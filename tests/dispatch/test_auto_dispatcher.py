"""`dispatcher="auto"`: the choice is that of all ranks, follows the times, and changes no bit."""

import copy
import itertools
import os
import time
from functools import partial
from unittest import mock

import dispatchers
import pytest
import torch
import torch.distributed as dist
from dispatchers import assert_same_bits, sent_messages
from layer_oracle import outcome
from rank_checks import Checks, raised
from torch.utils.checkpoint import checkpoint

from moe_ext import MoELayer
from moe_ext.dispatch import BatchPlan, auto
from moe_ext.distributed import AutoDispatcher, HierarchicalDispatcher, count_traffic
from moe_ext.nn import Balance, Dispatch, RowBudget

E, D, K = 12, 8, 4  # E is a multiple of every group size used
# A row for each of K experts in float64 is 256 bytes a token: beyond what few tokens are here.
FEW_BYTES = 8 * 1024
MANY = FEW_BYTES // (K * D * 8) + 1
NAMES = ("alltoall", "dedup", "hierarchical", "allgather")
tokens = partial(dispatchers.tokens, dim=D, dtype=torch.float64)


def two_ranks_a_node(*_):
    os.environ["LOCAL_WORLD_SIZE"] = "2"


def no_nodes(*_):
    os.environ.pop("LOCAL_WORLD_SIZE", None)


def layer(dispatcher="auto", combine="exact", **options):
    torch.manual_seed(3)
    auto.SMALL_BYTES = FEW_BYTES
    options = {"dtype": torch.float64, **options}
    world = dist.group.WORLD
    fields = {n: options.pop(n) for n in ("wire", "overlap", "rebalance") if n in options}
    way = Dispatch(dispatcher, combine=combine, **fields)
    two_ranks_a_node()
    one = MoELayer(D, 6, E, K, ep_group=world, dispatcher=way, **options)
    no_nodes()
    one.register_forward_pre_hook(two_ranks_a_node)
    one.register_forward_hook(no_nodes, always_call=True)
    return one


def skip_to(one, number):
    """Have the layer count the training passes before this one as made."""
    one._chooser._num_passes = number - 1


def on_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def expected_names(combine, in_rounds):
    names = [name for name in NAMES if name != "alltoall" or combine == "exact"]
    if dist.get_world_size() != 4:
        names.remove("hierarchical")
    return names[:-1] if in_rounds else names


def check_the_choice_is_that_of_all_ranks_and_changes_no_bit():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = tokens(MANY if rank == num_ranks - 1 else rank * 3)  # rank 0 has none
    for combine, budget in itertools.product(("exact", "reduced"), (None, RowBudget(115))):
        one = layer(combine=combine, row_budget=budget)
        assert "chosen at the first" in str(one.explain_dispatch())
        assert isinstance(copy.deepcopy(one).dispatcher, AutoDispatcher)
        with count_traffic() as first, mock.patch.object(auto, "ROUNDS", 2):
            found = outcome(one, x)
        with count_traffic() as second:
            assert_same_bits(outcome(one, x), found)
        assert first.sent_bytes == second.sent_bytes, "a rehearsal is not counted"
        choice = one.explain_dispatch()
        assert set(on_all_ranks(str(choice))) == {str(choice)}
        names = [c.name for c in choice.candidates]
        assert names == expected_names(combine, budget is not None)
        assert f"{MANY} tokens" in choice.reason and "as rehearsed" in choice.reason
        assert all(c.seconds > 0 for c in choice.candidates)
        want = outcome(layer("alltoall", row_budget=budget), x)
        if combine == "exact":
            assert_same_bits(found, want)
        else:
            for a, b in zip(found, want, strict=True):
                # Float64 adds in another order.
                largest = float(b.abs().max()) if b.numel() else 0.0
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * largest)


def check_few_tokens_take_the_fewest_messages():
    for combine, name in (("exact", "alltoall"), ("reduced", "allgather")):
        one = layer(combine=combine)
        one(tokens(MANY - 1))
        choice = one.explain_dispatch()
        assert choice.name == name and "fewest messages" in choice.reason
        assert all(c.seconds is None for c in choice.candidates)
    budgeted = layer(combine="reduced", row_budget=RowBudget(50))
    budgeted(tokens(9))
    expected = "hierarchical" if dist.get_world_size() == 4 else "dedup"
    assert budgeted.explain_dispatch().name == expected


def check_the_least_time_wins():
    """Seconds of a forward pass, a token: of all candidates by name."""
    original = auto._rehearse
    cases = (
        ({"alltoall": 3, "dedup": 2, "hierarchical": 4, "allgather": 5}, True, "dedup"),
        ({"alltoall": 3, "dedup": 9, "hierarchical": 4, "allgather": 2}, False, "allgather"),
        # Less than 2 % may be noise.
        ({"alltoall": 3, "dedup": 2.95, "hierarchical": 4, "allgather": 5}, True, "alltoall"),
    )
    for i, (times, recorded, name) in enumerate(cases, start=1):
        auto._rehearse = lambda made, *_, times=times: [(0.0, times[n]) for n, _ in made]
        try:
            # Layers of one shape share the times: each case has another number of tokens.
            with torch.set_grad_enabled(recorded):
                one = layer()
                one(tokens(MANY + i))
        finally:
            auto._rehearse = original
        choice = one.explain_dispatch()
        assert choice.name == name, (times, str(choice))
        by_name = {c.name: c.seconds for c in choice.candidates}
        assert by_name["dedup"] == times["dedup"] * (MANY + i)


def check_the_choice_is_looked_at_again_while_it_trains():
    """Times are made up: those of the second choice differ by too little, of the third by much."""
    by_look = [
        {"alltoall": 3.0, "dedup": 2.0, "hierarchical": 4.0, "allgather": 5.0},
        {"alltoall": 1.97, "dedup": 2.0, "hierarchical": 4.0, "allgather": 5.0},
        {"alltoall": 1.0, "dedup": 2.0, "hierarchical": 4.0, "allgather": 5.0},
    ]
    routed = []

    def rehearsed(made, shape, sizes, device, weighed, routed_TK):
        routed.append(routed_TK)
        return [(0.0, by_look[len(routed) - 1][name]) for name, _ in made]

    # Tokens of rank 0 alone are many: the others take part in each look.
    x = tokens(MANY + 20 if dist.get_rank() == 0 else 3)
    want, one = outcome(layer("alltoall"), x), layer()
    names = []
    with mock.patch.object(auto, "_rehearse", rehearsed):
        for number in (1, 2, 3, *range(14, 19), *range(61, 67)):
            if number in (14, 61):
                skip_to(one, number)
            assert_same_bits(outcome(one, x), want)
            if number in (1, 2, 15, 63):
                with torch.no_grad():
                    one(x)  # counts as no training pass
                one.eval()
                one(x.requires_grad_(False))
                one.train()
            names.append(one.explain_dispatch().name)
            assert len(routed) == 1 + (number >= 16) + (number >= 64)
    assert names == ["dedup"] * 11 + ["alltoall"] * 3
    assert "routing of training pass 63" in one.explain_dispatch().reason
    assert routed[0] is None and all(r.shape == (len(x), K) for r in routed[1:])
    # The ranks still compare the options with each exchange.
    assert type(one.dispatcher).__name__ == "AllToAllDispatcher"
    one.balance = Balance(coef=0.5 if dist.get_rank() == 1 else 0.25)
    raised(ValueError, "expected balance.* to be equal", one, x)


def check_a_change_that_would_show_is_not_made():
    x = tokens(2 * MANY + 21)
    for options, run in (
        ({"combine": "reduced"}, None),
        ({"wire": "int8", "dtype": torch.float32}, None),
        ({}, checkpoint),
        ({"rebalance": "exact"}, None),
    ):
        looks = []

        def rehearsed(made, *_, looks=looks):
            looks.append(1)
            return [(0.0, 1.0 + (name == "dedup") * (len(looks) == 1)) for name, _ in made]

        one = layer(**options)
        with mock.patch.object(auto, "_rehearse", rehearsed):
            for number in (1, 15, 16, 17):
                if number == 15:
                    skip_to(one, number)
                again = run and partial(run, one, use_reentrant=False)
                outcome(one, x.to(one.router.weight.dtype), again)
        assert len(looks) == 1, options


def check_a_dispatcher_set_by_hand_stays():
    x, one = tokens(MANY + 22), layer()
    for number in (1, 15, 16, 17):
        if number == 15:
            skip_to(one, number)
        with mock.patch.object(auto, "ROUNDS", 2):
            outcome(one, x)
        if number == 15:
            one.dispatcher = layer("dedup").dispatcher
    assert one.dispatcher.name == "DedupDispatcher"


def check_a_rehearsal_takes_the_routing_that_it_is_given():
    x, idx = torch.zeros(0, D), torch.tensor([[3, 1], [2, 0], [1, 5]])
    seen = []

    class Seen:
        group = dist.group.WORLD

        def plan(self, x, choice, weighed):
            seen.append((len(x), choice.topk_idx))
            return BatchPlan([lambda _: (x, None, None)], None)

        def combine(self, rows, metadata):
            return rows

    shape = auto.DispatchShape(E, 2, dist.get_world_size(), 1, D, x.dtype)
    with torch.no_grad():
        auto._rehearse([("any", Seen())], shape, (1, 7), x.device, False, idx)
    assert {size for size, _ in seen} == {1, 7}
    for size, found in seen:
        assert torch.equal(found, idx[torch.arange(size) % 3])


def check_a_rehearsal_sends_what_a_step_sends():
    one, x = layer("alltoall"), tokens(MANY)
    outcome(one, x)
    shape = auto.DispatchShape(E, K, dist.get_world_size(), 1, D, x.dtype)
    made = [("alltoall", one.dispatcher)]
    with sent_messages() as sent:
        outcome(one, x)
        of_step = sent.call_count
        auto._rehearse(made, shape, (MANY,), x.device, True)
        assert sent.call_count == of_step * (1 + auto.ROUNDS + 1)
        # Weights do not travel to experts that take none.
        auto._rehearse(made, shape, (MANY,), x.device, False)
        assert sent.call_count == of_step * (1 + auto.ROUNDS + 1) + (of_step - 2) * (
            auto.ROUNDS + 1
        )


def check_who_is_far_behind_drops_out():
    calls = [0, 0]

    def run(i):
        calls[i] += 1
        time.sleep(0.002 + 0.02 * i)

    medians = auto._medians(
        [partial(run, 0), partial(run, 1)], dist.group.WORLD, torch.device("cpu")
    )
    assert calls == [auto.ROUNDS + 1, 3]
    assert 0.002 <= medians[0] < medians[1]


def check_expected_bytes_are_those_that_are_sent():
    num_ranks, num_tokens, dim = dist.get_world_size(), 2000, 16
    generator = torch.Generator().manual_seed(dist.get_rank())
    idx = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :K]
    x, weights = torch.zeros(num_tokens, dim), torch.ones(num_tokens, K)
    node_size = 2 if num_ranks == 4 else 1
    shape = auto.DispatchShape(E, K, num_ranks, node_size, dim, torch.float32)
    for combine in ("exact", "reduced"):
        for name in expected_names(combine, False):
            made = AutoDispatcher(E, dist.group.WORLD, combine=combine)._make(name, node_size)
            with torch.no_grad(), count_traffic() as traffic:
                rows, _, metadata = made.dispatch(x, idx, weights)
                made.combine(rows, metadata)
            sent, abroad = shape.sent_bytes(name, combine, num_tokens)
            assert abroad < sent if node_size > 1 else abroad == sent
            # What a token sends there and back is at most a row for each slot to each, with half of
            # it as standard deviation; back comes what independent tokens of others ask for.
            allowed = 4 * num_tokens**0.5 * 0.5 * 2 * K * (dim * 4 + K * 6)
            assert abs(traffic.total_bytes - sent) < min(allowed, 0.05 * sent), name


def check_the_first_pass_may_be_checkpointed():
    x, want = tokens(MANY), outcome(layer("alltoall"), tokens(MANY))
    for use_reentrant in (False, True):
        one = layer()
        with mock.patch.object(auto, "ROUNDS", 2):
            found = outcome(one, x, partial(checkpoint, one, use_reentrant=use_reentrant))
        assert_same_bits(found, want)


def check_a_bad_input_on_one_rank_raises_everywhere():
    mine = dist.get_rank() == 1
    where = "" if mine else " on rank 1"
    for size in (5, MANY):
        one, x = layer(), tokens(size)
        raised(TypeError, "expected x to be a tensor, got NoneType", one, None if mine else x)
        text = r"expected x to be of shape \[..., 8\], got .*" + where
        raised(ValueError, text, one, x[:, :5] if mine else x)
        one(x)
        # All look at the choice again before the same pass.
        skip_to(one, 14)
        raised(ValueError, text, one, x[:, :5] if mine else x)
        with mock.patch.object(auto, "ROUNDS", 2):
            for _ in range(3):
                one(x)


def check_names():
    assert type(layer("hierarchical", "reduced").dispatcher) is HierarchicalDispatcher
    assert "named by the caller" in str(layer("dedup").explain_dispatch())
    alone = MoELayer(D, 6, E, K)
    assert "all experts are on this rank" in str(alone.explain_dispatch())


test_over_ranks = Checks.of(globals()).test(2, 4)


@pytest.mark.parametrize(
    "num_experts, num_parts, top_k, share",
    [
        (64, 4, 8, 0.457),
        (64, 2, 8, 0.249),
        (8, 2, 2, 0.786),
        (256, 8, 8, 0.662),
        (256, 32, 8, 0.908),
    ],
)
def test_the_published_shares(num_experts, num_parts, top_k, share):
    """Rows to other parts, of those that a row for each expert sends."""
    others = (num_parts - 1) / num_parts
    found = auto.expected_ranks(num_experts, num_parts, top_k) * others / (top_k * others)
    assert found == pytest.approx(share, abs=5e-4)
