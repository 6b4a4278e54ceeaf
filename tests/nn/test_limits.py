import copy
import math

import pytest
import torch
from layer_oracle import assert_all_close, outcome
from torch import nn

import moe_ext
from moe_ext import ops
from moe_ext.nn import Capacity, RowBudget, TopKRouter, set_routing_step

E, K, T = 5, 2, 21
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def make_layer(capacity=None, **options):
    torch.manual_seed(1)
    options = {"dtype": torch.float64, **options}
    return moe_ext.MoELayer(8, 6, E, K, capacity=capacity, **options)


def tokens(num_tokens=T):
    torch.manual_seed(2)
    return torch.randn(num_tokens, 8, dtype=torch.float64)


def served_in_order(layer, x, capacity, rows):
    """Experts of every slot with room, by one loop over the slots, and the weights."""
    routed = layer.router(x)
    idx, weights = routed.gate.topk_idx.tolist(), routed.gate.topk_weights.detach()
    best = routed.logits.softmax(dim=1).amax(dim=1).tolist()
    size = -(-len(x) // capacity.groups)
    out = [list(row) for row in idx]
    for first in range(0, len(x), size):
        group = range(first, min(first + size, len(x)))
        slots = [(t, k) for t in group for k in range(K)]
        orders = {
            "position": lambda s: s,
            "choice": lambda s: (s[1], s[0]),
            "score": lambda s: (-float(weights[s]), s),
            "batch_prioritized": lambda s: (s[1], -best[s[0]], s[0]),
        }
        used = [0] * E
        refused = []
        for slot in sorted(slots, key=orders[capacity.drop]):
            expert = idx[slot[0]][slot[1]]
            if used[expert] < rows:
                used[expert] += 1
            else:
                out[slot[0]][slot[1]] = -1
                refused.append(slot)
        if capacity.overflow == "reroute":
            ranked = routed.logits.argsort(dim=1, descending=True).tolist()
            for t, k in refused:
                for expert in ranked[t]:
                    if used[expert] < rows and expert not in out[t]:
                        used[expert] += 1
                        out[t][k] = expert
                        break
    return torch.tensor(out, device=x.device), routed


def run_choices(layer, x, idx_TK, weights_TK):
    """Output of the experts for given choices."""
    rows, permutation = ops.permute_tokens(x, idx_TK, layer.num_experts)
    out = layer.experts(rows, permutation.expert_offsets)
    return ops.unpermute_tokens(out, permutation, weights_TK)


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("drop", ["position", "choice", "score", "batch_prioritized"])
@pytest.mark.parametrize("overflow", ["drop", "reroute"])
def test_policies_equal_a_loop_over_slots(device, drop, groups, overflow):
    capacity = Capacity(0.6, groups=groups, drop=drop, overflow=overflow)
    layer = make_layer(capacity)
    x = tokens()
    rows = math.ceil(-(-T // groups) * K * 0.6 / E)
    idx, routed = served_in_order(layer, x, capacity, rows)
    assert (idx != routed.gate.topk_idx).any()
    if overflow == "drop":
        weights = routed.gate.topk_weights
    else:
        weights = layer.router.with_choice(routed, idx).gate.topk_weights
    y = layer(x)
    torch.testing.assert_close(y, run_choices(layer, x, idx, weights), **TIGHT)
    assert int(layer.metrics["num_dropped"]) == int((idx < 0).sum())
    assert torch.equal(layer.metrics["num_tokens_per_expert"], routed.gate.num_tokens_per_expert), (
        "what was chosen, before any drop"
    )
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("score_fn", ["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"])
def test_batch_prioritized_is_by_the_score_before_it_is_divided(score_fn):
    # Both tokens want experts 0 and 1, which take one row each. The first token is earlier and has
    # the larger share of its two scores; the second has the larger score.
    router = TopKRouter(3, 3, 2, score_fn=score_fn, scale=3.0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(3))
    x = torch.tensor([[1.0, 0.3, 0.3], [2.0, 1.9, -5.0]])
    gate = router(x).gate
    assert gate.topk_weights[0, 0] > gate.topk_weights[1, 0]
    capacity = Capacity(0.5, drop="batch_prioritized")
    y = moe_ext.MoELayer(3, 4, 3, router=router, capacity=capacity)(x)
    assert y[0].count_nonzero() == 0 and y[1].count_nonzero() == 3


def test_rerouting_by_a_bias():
    torch.manual_seed(0)
    router = TopKRouter(8, E, K, score_fn="sigmoid", selection_bias=True).double()
    layer = make_layer(Capacity(0.4, overflow="reroute"), router=router)
    router.selection_bias.copy_(torch.tensor([0.0, 5.0, 4.0, 3.0, -5.0]))
    x = tokens()
    routed = router(x)
    assert set(routed.gate.topk_idx.flatten().tolist()) == {1, 2}
    layer(x)
    # ceil(21 * 2 * 0.4 / 5) rows each: what experts 1 and 2 refuse goes to 3 first, then to 0, 4.
    assert int(layer.metrics["num_dropped"]) == T * K - 5 * 4


@pytest.mark.parametrize("group_score", [None, "max", "top2", "topk"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score_fn", ["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"])
def test_rerouting_stays_in_the_groups_of_the_token(score_fn, biased, group_score):
    # Node-limited routing: a group is a node. Expert 5 is closed by a logit of -inf.
    num_experts, top_k, num_groups, top_groups, num_tokens = 12, 4, 3, 2, 48
    torch.manual_seed(3)
    router = TopKRouter(
        8,
        num_experts,
        top_k,
        score_fn=score_fn,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        bias=True,
        selection_bias=biased,
    ).double()
    with torch.no_grad():
        router.weight.mul_(4.0)
        router.bias[5] = -math.inf
        if biased:
            router.selection_bias.uniform_(-0.3, 0.3)
    layer = moe_ext.MoELayer(
        8,
        6,
        num_experts,
        router=router,
        capacity=Capacity(0.8, overflow="reroute"),
        dtype=torch.float64,
    )
    x = torch.randn(num_tokens, 8, dtype=torch.float64)
    routed = router(x)
    logits = routed.logits.detach()
    score = {
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": (logits.exp() + 1).log().sqrt(),
    }.get(score_fn, logits.softmax(1))
    key = score + router.selection_bias if biased else score
    size = num_experts // num_groups
    terms = {None: 2 if biased else 1, "max": 1, "top2": 2, "topk": top_k // top_groups}
    rows = math.ceil(num_tokens * top_k * 0.8 / num_experts)
    idx, used, refused = routed.gate.topk_idx.tolist(), [0] * num_experts, []
    for t, k in [(t, k) for t in range(num_tokens) for k in range(top_k)]:
        expert = idx[t][k]
        used[expert] += 1
        if used[expert] > rows:
            used[expert], idx[t][k] = rows, -1
            refused.append((t, k))
    for t, k in refused:
        of_group = [[float(key[t, g * size + i]) for i in range(size)] for g in range(num_groups)]
        of_group[5 // size].pop(5 % size)
        totals = [sum(sorted(keys)[-terms[group_score] :]) for keys in of_group]
        groups = sorted(range(num_groups), key=lambda g: -totals[g])[:top_groups]
        assert {e // size for e in routed.gate.topk_idx[t].tolist()} <= set(groups)
        for expert in key[t].argsort(descending=True).tolist():
            open_to = expert != 5 and expert // size in groups
            if open_to and used[expert] < rows and expert not in idx[t]:
                used[expert] += 1
                idx[t][k] = expert
                break
    choice = torch.tensor(idx)
    assert (choice < 0).any(), "a token whose groups are full loses a slot"
    assert sum(choice[t, k] >= 0 for t, k in refused) > 0, "others find room"
    weights = router.with_choice(routed, choice).gate.topk_weights
    torch.testing.assert_close(layer(x), run_choices(layer, x, choice, weights), **TIGHT)
    assert int(layer.metrics["num_dropped"]) == int((choice < 0).sum())


def test_rerouting_to_no_expert_at_minus_infinity():
    router = TopKRouter(2, 4, 1, score_fn="sigmoid", bias=True, selection_bias=True)
    with torch.no_grad():
        router.weight.zero_()
        # The bias of the selection would put expert 1 first among those that are left.
        router.bias.copy_(torch.tensor([2.0, -math.inf, 1.0, -math.inf]))
        router.selection_bias.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0]))
    layer = moe_ext.MoELayer(2, 4, 4, router=router, capacity=Capacity(1.0, overflow="reroute"))
    y = layer(torch.randn(8, 2))
    y.sum().backward()
    # Two rows each: of eight tokens two go to expert 0, two to expert 2, and four are dropped.
    assert int(layer.metrics["num_dropped"]) == 4
    assert (y != 0).any(1).tolist() == [True] * 4 + [False] * 4


def test_random_drops_follow_the_step_and_the_token():
    capacity = Capacity(0.5, drop="random", seed=7)
    layer = make_layer(capacity)
    x = tokens()

    def kept(**options):
        return layer(x, **options).abs().sum(1) > 0

    set_routing_step(layer, 1)
    first = kept()
    assert torch.equal(kept(), first), "the same step drops the same slots"
    found = []
    for step in range(2, 8):
        set_routing_step(layer, step)
        found.append(layer(x).detach())
    assert any(not torch.equal(a, b) for a, b in zip(found, found[1:], strict=False))
    set_routing_step(layer, 1, first_token=100)
    moved = layer(x).detach()
    set_routing_step(layer, 1)
    torch.testing.assert_close(layer(x, token_idx=torch.arange(100, 121)), moved)
    layer.eval()
    by_position = copy.deepcopy(make_layer(Capacity(0.5))).eval()
    assert torch.equal(layer(x), by_position(x)), "no noise in eval mode"
    assert "router.rng_state" in layer.state_dict()


def test_the_seed_of_a_layer_from_the_meta_device():
    layer = make_layer(Capacity(0.5, drop="random", seed=7), device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.router.rng_state.tolist() == [7, 0, 0, 0]


def test_capacity_of_eval_mode_and_minimum():
    x = tokens()
    layer = make_layer(Capacity(0.5, eval_factor=100.0))
    layer(x)
    assert int(layer.metrics["num_dropped"]) > 0
    layer.eval()(x)
    assert int(layer.metrics["num_dropped"]) == 0
    roomy = make_layer(Capacity(0.01, minimum=T))
    roomy(x)
    assert int(roomy.metrics["num_dropped"]) == 0


@pytest.mark.parametrize(
    ("factor", "tokens", "groups", "rows"),
    [(1.1, 50, 1, 22), (1.25, 21, 1, 11), (0.1, 1000, 4, 10), (1e-9, 10, 1, 1), (2.0, 0, 3, 1)],
)
def test_rows_per_group_are_exact(factor, tokens, groups, rows):
    assert Capacity(factor, groups=groups).rows_per_group(tokens, K, E) == rows


class EvenShapes(nn.Module):
    """Experts that want the same number of rows each."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.shapes = []

    def forward(self, rows, offsets):
        sizes = offsets.diff()
        assert bool((sizes == sizes[0]).all())
        self.shapes.append((rows.shape[0], int(sizes[0])))
        return self.inner(rows, offsets)


@pytest.mark.parametrize("drop", ["position", "choice"])
def test_padding_changes_shapes_and_nothing_else(drop):
    plain = make_layer(Capacity(0.6, drop=drop))
    padded = make_layer(Capacity(0.6, drop=drop, pad=True))
    padded.experts = EvenShapes(padded.experts)
    x = tokens()
    assert_all_close(outcome(padded, x), outcome(plain, x), **TIGHT)
    rows = math.ceil(T * K * 0.6 / E)
    assert padded.experts.shapes == [(rows * E, rows)]
    assert padded(x[:0]).shape == (0, 8)


@pytest.mark.parametrize("drop", ["position", "choice"])
def test_capacity_within_a_row_budget(drop):
    capacity = Capacity(0.6, groups=3, drop=drop, overflow="reroute")
    free = make_layer(capacity)
    bounded = make_layer(capacity, row_budget=RowBudget(4))
    x = tokens()
    torch.testing.assert_close(bounded(x), free(x), **TIGHT)
    assert torch.equal(bounded.metrics["num_dropped"], free.metrics["num_dropped"])


def test_masked_tokens_take_no_room():
    layer = make_layer(Capacity(0.5, drop="choice"))
    x = tokens(40)
    mask = torch.arange(40) % 2 == 0
    y = layer(x, token_mask=mask)
    assert not y[~mask].any()
    assert int(layer.metrics["num_tokens_per_expert"].sum()) == 20 * K


class OwnCapacity(nn.Module):
    """A router that sets the rows of each expert."""

    def __init__(self, inner, rows):
        super().__init__()
        self.inner, self.rows = inner, rows

    def forward(self, x_TD, *, token_mask=None):
        return self.inner(x_TD, token_mask=token_mask)._replace(capacity=self.rows)


def test_a_router_sets_the_capacity():
    inner = make_layer().router
    layer = make_layer(router=OwnCapacity(inner, 3))
    x = tokens()
    layer(x)
    counts = layer.metrics["num_tokens_per_expert"]
    assert int(layer.metrics["num_dropped"]) == int((counts - 3).clamp(min=0).sum())
    both = make_layer(Capacity(1.0), router=OwnCapacity(inner, 3))
    with pytest.raises(ValueError, match=r"expected capacity to be None with a router that sets"):
        both(x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Capacity(math.nan), ValueError, r"expected factor to be a number, got nan"),
        (lambda: Capacity(1.0, eval_factor=-1.0), ValueError, r"eval_factor to be positive, got"),
        (lambda: Capacity(1.0, minimum=0), ValueError, r"minimum to be at least 1, got 0"),
        (lambda: Capacity(1.0, groups=0), ValueError, r"groups to be at least 1, got 0"),
        (
            lambda: Capacity(1.0, groups=2**62),
            ValueError,
            "Capacity: .* groups to be at most",
        ),
        (lambda: Capacity(1.0, drop="last"), ValueError, r"drop to be one of .*, got 'last'"),
        (lambda: Capacity(1.0, overflow="x"), ValueError, r"overflow to be one of .*, got 'x'"),
        (
            lambda: make_layer("1.5"),
            TypeError,
            r"MoELayer: expected capacity to be of type Real or Capacity, got .1.5",
        ),
    ],
)
def test_wrong_options(make, error, message):
    with pytest.raises(error, match=message):
        make()
