"""limit_capacity against a walk over the slots, and beside permute_tokens."""

import pytest
import refusals
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import examples

from moe_ext import ops, reference

POLICIES = ["position", "choice", "score", "random", "batch_prioritized"]


def make(num_tokens, top_k, num_experts, *, levels=1000, generator=None):
    """Choices with crowded first experts and some -1; weights and priorities with ties."""
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    ranked = scores.argsort(dim=1, descending=True)
    idx = (scores * torch.linspace(2, 1, num_experts)).argsort(dim=1, descending=True)[:, :top_k]
    keep = torch.rand(num_tokens, top_k, generator=generator) > 0.1
    numbers = torch.randint(0, levels, (2, num_tokens, top_k), generator=generator) / levels
    return idx.where(keep, -1), ranked, {"topk_weights": numbers[0], "priority": numbers[1]}


def assert_equals_reference(idx, num_experts, capacity, **options):
    out, num_dropped = ops.limit_capacity(idx, num_experts, capacity, **options)
    expected, expected_dropped = reference.limit_capacity(idx, num_experts, capacity, **options)
    assert torch.equal(out, expected)
    assert num_dropped == expected_dropped
    assert out.dtype == num_dropped.dtype == torch.int64 and num_dropped.shape == ()


@pytest.mark.parametrize("overflow", ["drop", "reroute"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 256, 257])
def test_equals_the_reference(device, num_tokens, policy, overflow):
    idx, ranked, numbers = make(num_tokens, 2, 6, levels=9)
    for capacity, num_groups in ((1, 1), (num_tokens // 4 + 1, 1), (11, 4), (10**12, 2)):
        assert_equals_reference(
            idx,
            6,
            capacity,
            policy=policy,
            num_groups=num_groups,
            overflow=overflow,
            ranked_idx=ranked,
            **numbers,
        )


@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 1), (1, 40), (4, 4), (3, 70)])
def test_any_number_of_experts(device, top_k, num_experts):
    idx, ranked, numbers = make(64, top_k, num_experts)
    # A ranking that is cut short, and has gaps.
    ranked = ranked[:, : max(1, num_experts // 2)].masked_fill(ranked[:, :1] % 7 == 0, -1)
    for policy in POLICIES:
        assert_equals_reference(
            idx, num_experts, 3, policy=policy, ranked_idx=ranked, overflow="reroute", **numbers
        )


def test_position_keeps_the_earliest_tokens(device):
    # Many equal choices: a top-k over a map of zeros and ones keeps any of them.
    idx = torch.zeros(1000, 1, dtype=torch.int64)
    for capacity in (1, 10, 999):
        out, num_dropped = ops.limit_capacity(idx, 4, capacity)
        assert (out[:capacity] == 0).all() and (out[capacity:] == -1).all()
        assert num_dropped == 1000 - capacity
    # A later token's first choice does not come before an earlier one's second.
    idx = torch.tensor([[1, 0], [0, 1]])
    assert ops.limit_capacity(idx, 2, 1)[0].tolist() == [[1, 0], [-1, -1]]
    assert ops.limit_capacity(idx, 2, 1, policy="choice")[0].tolist() == [[1, -1], [0, -1]]


def test_batch_prioritized_serves_tokens_by_their_largest_weight(device):
    idx = torch.tensor([[0, 1], [0, 1], [1, 0]])
    weights = torch.tensor([[0.4, 0.3], [0.9, 0.1], [0.5, 0.2]])
    out, num_dropped = ops.limit_capacity(
        idx, 2, 1, policy="batch_prioritized", topk_weights=weights
    )
    # The sure token's second choice comes after the first one of the last token.
    assert out.tolist() == [[-1, -1], [0, -1], [1, -1]] and num_dropped == 4


def test_reroute_goes_to_the_best_expert_with_room(device):
    idx = torch.tensor([[0, 1], [0, 1], [0, 2]])
    ranked = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3]])
    out, num_dropped = ops.limit_capacity(idx, 4, 1, ranked_idx=ranked, overflow="reroute")
    assert out.tolist() == [[0, 1], [3, -1], [-1, 2]] and num_dropped == 2
    out, num_dropped = ops.limit_capacity(idx, 4, 2, ranked_idx=ranked, overflow="reroute")
    assert out.tolist() == [[0, 1], [0, 1], [3, 2]] and num_dropped == 0


@pytest.mark.parametrize("policy", ["position", "score"])
def test_permute_tokens_drops_the_same_slots(device, policy):
    idx, _, numbers = make(129, 3, 5)
    weights = numbers["topk_weights"]
    x = torch.randn(129, 4)
    options = {"topk_weights": weights, "capacity": 30, "drop_policy": policy}
    rows, permutation = ops.permute_tokens(x, idx, 5, **options)
    limited, num_dropped = ops.limit_capacity(idx, 5, 30, topk_weights=weights, policy=policy)
    limited_rows, limited_permutation = ops.permute_tokens(x, limited, 5, capacity=30)
    assert torch.equal(rows, limited_rows)
    assert torch.equal(permutation.row_of_slot, limited_permutation.row_of_slot)
    assert permutation.num_dropped == num_dropped and limited_permutation.num_dropped == 0


@examples(60)
@given(
    num_tokens=st.integers(0, 50),
    top_k=st.integers(1, 4),
    num_experts=st.integers(4, 9),
    capacity=st.integers(1, 20),
    num_groups=st.integers(1, 5),
    policy=st.sampled_from(POLICIES),
    reroute=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_invariants(
    device, num_tokens, top_k, num_experts, capacity, num_groups, policy, reroute, seed
):
    generator = torch.Generator(device).manual_seed(seed)
    idx, ranked, numbers = make(num_tokens, top_k, num_experts, levels=5, generator=generator)
    overflow = "reroute" if reroute else "drop"
    options = dict(policy=policy, num_groups=num_groups, ranked_idx=ranked, overflow=overflow)
    out, num_dropped = ops.limit_capacity(idx, num_experts, capacity, **options, **numbers)
    group_size = -(-num_tokens // num_groups)
    for first in range(0, num_tokens, max(1, group_size)):
        part = out[first : first + group_size]
        counts = torch.bincount(part[part >= 0], minlength=num_experts)
        assert (counts <= capacity).all()
    kept = (out >= 0).sum()
    assert kept + num_dropped == (idx >= 0).sum()
    assert (out[idx < 0] == -1).all()
    assert all(len({e for e in row if e >= 0}) == sum(e >= 0 for e in row) for row in out.tolist())
    if not reroute:
        assert ((out == idx) | (out == -1)).all()
    elif num_dropped > 0 and num_groups == 1:
        # Whoever was dropped has a place with every expert that has room left.
        counts = torch.bincount(out[out >= 0], minlength=num_experts)
        free = (counts < capacity).nonzero().flatten()
        dropped = ((out < 0) & (idx >= 0)).any(dim=1)
        for row in out[dropped]:
            assert all((row == e).any() for e in free)


@pytest.mark.parametrize("policy", POLICIES)
def test_groups_beyond_the_tokens_are_empty(device, policy):
    idx, ranked, numbers = make(9, 2, 4)
    options = dict(policy=policy, ranked_idx=ranked, overflow="reroute", **numbers)
    expected = ops.limit_capacity(idx, 4, 1, num_groups=9, **options)
    for num_groups in (10, 2**62, 2**63 - 1):
        actual = ops.limit_capacity(idx, 4, 1, num_groups=num_groups, **options)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_strided_inputs(device):
    idx, ranked, numbers = make(65, 3, 6)
    expected = ops.limit_capacity(
        idx, 6, 9, policy="score", ranked_idx=ranked, overflow="reroute", **numbers
    )
    numbers = {name: value.t().contiguous().t() for name, value in numbers.items()}
    actual = ops.limit_capacity(
        idx.t().contiguous().t(),
        6,
        9,
        policy="score",
        ranked_idx=torch.stack([ranked, ranked], dim=2)[:, :, 0],
        overflow="reroute",
        **numbers,
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_compiles_as_one_graph_for_any_number_of_tokens(device):
    def limit(idx, ranked, weights):
        outs = []
        for policy in POLICIES:
            outs += ops.limit_capacity(
                idx, 6, 9, policy=policy, topk_weights=weights, priority=weights
            )
        return outs + [*ops.limit_capacity(idx, 6, 9, ranked_idx=ranked, overflow="reroute")]

    compiled = torch.compile(limit, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (40, 41, 70):
        idx, ranked, numbers = make(num_tokens, 2, 6)
        args = (idx, ranked, numbers["topk_weights"])
        for actual, expected in zip(compiled(*args), limit(*args), strict=True):
            assert torch.equal(actual, expected)


IDX = torch.zeros(4, 2, dtype=torch.int64)


REROUTE = {"overflow": "reroute"}
REFUSED = {
    "limit_capacity": [
        {"topk_idx_TK": IDX, "num_experts": 3, "capacity": 1},
        ({"topk_idx_TK": IDX.int()}, "topk_idx to be Long, got Int"),
        ({"topk_idx_TK": IDX[0]}, r"topk_idx to be a 2-D tensor \[T, K\]"),
        ({"topk_idx_TK": IDX[:, :0]}, "topk_idx to have at least 1 column"),
        ({"topk_idx_TK": IDX[0], "policy": "choice"}, r"topk_idx to be a 2-D tensor \[T, K\]"),
        (
            {
                **{"topk_idx_TK": IDX[:, :0], "topk_weights": IDX[:, :0]},
                "policy": "batch_prioritized",
            },
            "topk_idx to have at least 1 column",
        ),
        ({"num_experts": 0}, "num_experts to be at least 1, got 0"),
        ({"num_experts": 2**61}, r"num_experts to be below 2\^31, got 2305843009213693952"),
        ({"capacity": 0}, "capacity to be at least 1, got 0"),
        ({"num_groups": 0}, "num_groups to be at least 1, got 0"),
        ({"ranked_idx": IDX.int(), **REROUTE}, "ranked_idx to be Long, got Int"),
        (
            {"ranked_idx": IDX[:3], **REROUTE},
            r"ranked_idx to be of size 4 in dim 0 \(the tokens of topk_idx\)",
        ),
    ],
}
test_refuses = refusals.test_on_devices(REFUSED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, r"policy to be one of .*, got 'fifo'"),
        ({"overflow": "queue"}, r"overflow to be one of .*, got 'queue'"),
        ({"overflow": "reroute"}, r"ranked_idx to be given to reroute, got None"),
        ({"policy": "score"}, r"topk_weights to be given with policy 'score', got None"),
        ({"policy": "random"}, r"priority to be given with policy 'random', got None"),
        (
            {"policy": "batch_prioritized", "topk_weights": torch.zeros(4, 3)},
            r"topk_weights to be of shape \(4, 2\), that of topk_idx, got \(4, 3\)",
        ),
    ],
)
def test_refuses_options(options, message):
    with pytest.raises(ValueError, match=r"^limit_capacity: expected " + message):
        ops.limit_capacity(IDX, 3, 1, **options)


def test_refuses_values_that_point_outside():
    idx = IDX.clone()
    idx[2, 1] = 3
    with pytest.raises(RuntimeError, match=r"topk_idx to be in \[0, 3\) .* got 3 at token 2, col"):
        ops.limit_capacity(idx, 3, 1)
    with pytest.raises(RuntimeError, match=r"ranked_idx to be in \[0, 3\) .* got 3 at token 2"):
        ops.limit_capacity(IDX, 3, 1, ranked_idx=idx, overflow="reroute")
    op = torch.ops.moe_ext.limit_capacity
    for order in (torch.zeros(8, dtype=torch.int64), torch.arange(8).roll(1)):
        with pytest.raises(RuntimeError, match=r"order to name each slot of a group once, got"):
            op(IDX, 3, 1, order, 2)
    # Beyond the slots there are, within what a whole last group would have.
    with pytest.raises(RuntimeError, match=r"order to name each slot of a group once, got 5 at"):
        op(torch.zeros(5, 1, dtype=torch.int64), 3, 1, torch.tensor([0, 1, 2, 5, 3]), 2)
