"""The routers that balance by construction, alone and in a layer."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import reference
from moe_ext.nn import BaseRouter, ExpertChoiceRouter, HashRouter, SinkhornRouter

MODEL_DIM, NUM_EXPERTS, VOCAB = 16, 4, 50
ROUTERS = {
    "expert_choice": lambda **kw: ExpertChoiceRouter(MODEL_DIM, NUM_EXPERTS, **kw),
    "sinkhorn": lambda **kw: SinkhornRouter(MODEL_DIM, NUM_EXPERTS, **kw),
    "sinkhorn_2": lambda **kw: SinkhornRouter(MODEL_DIM, NUM_EXPERTS, top_k=2, **kw),
    "base": lambda **kw: BaseRouter(MODEL_DIM, NUM_EXPERTS, **kw),
    "hash": lambda **_: HashRouter(MODEL_DIM, NUM_EXPERTS, top_k=2, vocab_size=VOCAB),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(params=ROUTERS)
def name(request):
    return request.param


def inputs(num_tokens, dtype=torch.float64):
    x = torch.randn(num_tokens, MODEL_DIM, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, VOCAB, (num_tokens,))
    return x, torch.rand(num_tokens) > 0.3, ids


def make_layer(name, dtype=torch.float64, **options):
    torch.manual_seed(3)
    router = ROUTERS[name](dtype=dtype)
    return moe_ext.MoELayer(MODEL_DIM, 12, NUM_EXPERTS, router=router, dtype=dtype, **options)


def expected_output(layer, x, gate):
    """Every chosen expert by itself."""
    y = torch.zeros_like(x)
    for e in range(NUM_EXPERTS):
        gate_up = x @ layer.experts.gate_up_proj[e].T
        hidden = torch.nn.functional.silu(gate_up[:, :12]) * gate_up[:, 12:]
        weight_T = (gate.topk_weights * (gate.topk_idx == e)).sum(dim=1, keepdim=True)
        y = y + weight_T.to(x.dtype) * (hidden @ layer.experts.down_proj[e].T)
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_layer_equals_its_experts_one_by_one(name, num_tokens, dtype):
    layer = make_layer(name, dtype)
    x, mask, ids = inputs(num_tokens, dtype)
    y = layer(x, token_mask=mask, token_ids=ids)
    gate = layer.router(x, token_mask=mask, token_ids=ids).gate
    expected = expected_output(layer, x, gate)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert layer.metrics["num_dropped"] == 0
    assert "balance" not in layer.losses
    parameters = [x, *layer.parameters()]
    grads = torch.autograd.grad(y.square().sum(), parameters)
    expected_grads = torch.autograd.grad(expected.square().sum(), parameters)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        scale = max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
        atol = 100 * TOLERANCE[dtype] * scale
        torch.testing.assert_close(actual, wanted, rtol=TOLERANCE[dtype], atol=atol)


def test_masked_tokens_have_no_expert(name):
    layer = make_layer(name)
    x, mask, ids = inputs(30)
    ids = ids.masked_fill(~mask, -100)
    y = layer(x, token_mask=mask, token_ids=ids)
    assert (y[~mask] == 0).all()
    routed = layer.router(x, token_mask=mask, token_ids=ids)
    assert (routed.gate.topk_idx[~mask] == -1).all()
    assert torch.equal(layer.metrics["num_tokens_per_expert"], routed.gate.num_tokens_per_expert)


def test_with_choice_gives_the_gate_of_the_same_choice(name):
    router = ROUTERS[name](dtype=torch.float64) if name != "hash" else ROUTERS[name]()
    x, mask, ids = inputs(23)
    routed = router(x, token_mask=mask, token_ids=ids)
    again = router.with_choice(routed, routed.gate.topk_idx)
    assert torch.equal(again.gate.topk_idx, routed.gate.topk_idx)
    torch.testing.assert_close(again.gate.topk_weights, routed.gate.topk_weights)
    assert torch.equal(again.gate.num_tokens_per_expert, routed.gate.num_tokens_per_expert)
    assert again.capacity == routed.capacity


def test_a_recomputation_has_the_same_bits(name):
    grads = []
    for recomputed in (False, True):
        layer = make_layer(name, torch.float32)
        x = torch.randn(45, MODEL_DIM, generator=torch.Generator().manual_seed(5))
        x.requires_grad_()
        ids = torch.arange(45)

        def run(x, layer=layer, ids=ids):
            return layer(x, token_ids=ids)

        y = checkpoint(run, x, use_reentrant=False) if recomputed else run(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_state_dict_round_trip(name):
    layer, other = make_layer(name), make_layer(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(layer.state_dict())
    x, _, ids = inputs(20)
    assert torch.equal(layer(x, token_ids=ids), other(x, token_ids=ids))


def test_reset_parameters_after_the_meta_device(name):
    with torch.device("meta"):
        layer = make_layer(name, torch.float32)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    x, _, ids = inputs(20, torch.float32)
    assert layer(x, token_ids=ids).isfinite().all()


@pytest.mark.parametrize("router", ["expert_choice", "sinkhorn", "base"])
def test_bfloat16_parameters(router):
    layer = make_layer(router, torch.bfloat16)
    x = torch.randn(20, MODEL_DIM, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert layer.router(x).logits.dtype == torch.float32
    y.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0


def test_expert_choice_fills_every_expert():
    for num_tokens, factor, capacity in ((32, 2.0, 16), (33, 1.25, 11), (1, 0.1, 1), (10, 9.0, 23)):
        router = ExpertChoiceRouter(MODEL_DIM, NUM_EXPERTS, capacity_factor=factor)
        routed = router(torch.randn(num_tokens, MODEL_DIM))
        assert routed.capacity == capacity
        expected = min(capacity, num_tokens)
        assert routed.gate.num_tokens_per_expert.tolist() == [expected] * NUM_EXPERTS


def test_base_router_balances_in_training_and_takes_the_best_in_evaluation():
    router = BaseRouter(MODEL_DIM, NUM_EXPERTS)
    torch.testing.assert_close(
        router.weight @ router.weight.T, 0.01 * torch.eye(NUM_EXPERTS), rtol=1e-4, atol=1e-6
    )
    x = torch.randn(30, MODEL_DIM) + 5 * router.weight[0].detach() / 0.1
    routed = router(x)
    counts = routed.gate.num_tokens_per_expert
    assert counts.min() == 7 and counts.max() == 8
    chosen = routed.logits.gather(1, routed.gate.topk_idx)
    torch.testing.assert_close(routed.gate.topk_weights, chosen.sigmoid())
    best = reference.balanced_assignment(routed.logits.detach())
    best_sum = routed.logits.gather(1, best[:, None]).sum()
    torch.testing.assert_close(chosen.sum(), best_sum, rtol=1e-5, atol=1e-5)
    gate = router.eval()(x).gate
    assert torch.equal(gate.topk_idx, routed.logits.argmax(dim=1, keepdim=True))


def test_sinkhorn_router_takes_the_logits_in_evaluation():
    router = SinkhornRouter(MODEL_DIM, NUM_EXPERTS, top_k=2)
    x = torch.randn(64, MODEL_DIM) + 3 * router.weight[0].detach()
    expected = reference.sinkhorn_gate(router(x).logits.detach().double(), 2)
    assert (router(x).gate.topk_idx == expected.topk_idx).float().mean() > 0.98
    gate = router.eval()(x).gate
    logits = router(x).logits
    assert torch.equal(gate.topk_idx, logits.topk(2).indices)
    torch.testing.assert_close(gate.topk_weights, logits.softmax(1).topk(2).values)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_hash_tables(top_k):
    options = {"top_k": top_k, "vocab_size": 103}
    even = HashRouter(8, 4, **options)
    random = HashRouter(8, 4, method="random", **options)
    counts = torch.arange(103).flip(0).double().square()
    greedy = HashRouter(8, 4, token_counts=counts, **options)
    for router in (even, random, greedy):
        table = router.expert_of_id
        assert table.shape == (103, top_k) and table.min() >= 0 and table.max() < 4
        assert all(len(set(row)) == top_k for row in table.tolist())
    for column in even.expert_of_id.T:
        sizes = torch.bincount(column, minlength=4)
        assert sizes.max() - sizes.min() <= 1
    load = torch.zeros(4, dtype=torch.float64)
    load.index_add_(0, greedy.expert_of_id.flatten(), counts.repeat_interleave(top_k))
    # The last entries, which are rare, level what the frequent ones left.
    assert load.max() - load.min() <= counts.max() * 0.01 * top_k or top_k == 4
    assert not torch.equal(HashRouter(8, 4, seed=1, **options).expert_of_id, even.expert_of_id)
    assert torch.equal(HashRouter(8, 4, **options).expert_of_id, even.expert_of_id)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 1), (8, 3), (6, 6), (7, 5)])
def test_hash_without_a_vocabulary(num_experts, top_k):
    router = HashRouter(8, num_experts, top_k=top_k, method="random", seed=9)
    ids = torch.arange(4000) * 977 + 2**40
    gate = router(torch.zeros(4000, 8), token_ids=ids).gate
    assert all(len(set(row)) == top_k for row in gate.topk_idx.tolist())
    share = gate.num_tokens_per_expert / (4000 * top_k / num_experts)
    # A thousand and more draws each: four standard deviations.
    assert (share - 1).abs().max() < 4 * math.sqrt(num_experts / 4000)
    torch.testing.assert_close(gate.topk_weights, torch.full((4000, top_k), 1 / top_k))
    shuffled = torch.randperm(4000)
    again = router(torch.zeros(4000, 8), token_ids=ids[shuffled]).gate
    assert torch.equal(again.topk_idx, gate.topk_idx[shuffled])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertChoiceRouter(8, 4, capacity_factor=0.0), "capacity_factor to be positive"),
        (lambda: ExpertChoiceRouter(0, 4), "ExpertChoiceRouter: expected model_dim"),
        (lambda: SinkhornRouter(8, 4, num_iters=0), "num_iters to be at least 1, got 0"),
        (lambda: SinkhornRouter(8, 4, tolerance=math.inf), "tolerance to be finite"),
        (lambda: SinkhornRouter(8, 4, top_k=5), r"top_k to be in 1..num_experts=4, got 5"),
        (lambda: BaseRouter(8, 0), "BaseRouter: expected num_experts to be at least 1"),
        (lambda: HashRouter(8, 4, vocab_size=9, method="md5"), "method to be one of .*'md5'"),
        (lambda: HashRouter(8, 4), "vocab_size to be given with method 'balanced', got None"),
        (lambda: HashRouter(8, 4, vocab_size=0), "vocab_size to be at least 1, got 0"),
        (lambda: HashRouter(8, 4, vocab_size=9, seed=-1), "seed to be in"),
        (
            lambda: HashRouter(8, 4, vocab_size=9, score_fn="sigmoid"),
            "score_fn and renormalize to be left out without learned=True, got 'sigmoid' and None",
        ),
        (
            lambda: HashRouter(8, 4, vocab_size=9, learned=True, score_fn="tanh"),
            "score_fn to be one of .* got 'tanh'",
        ),
        (
            lambda: HashRouter(8, 4, vocab_size=9, token_counts=torch.ones(8)),
            r"token_counts to be of shape \[vocab_size\] .* got \(8,\) and 'balanced'",
        ),
    ],
)
def test_refuses_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_hashed_experts_with_learned_weights():
    options = {"top_k": 2, "vocab_size": 9, "learned": True, "score_fn": "sqrtsoftplus"}
    router = HashRouter(8, 4, scale=1.5, dtype=torch.float64, **options)
    x, ids = torch.randn(30, 8, dtype=torch.float64), torch.randint(0, 9, (30,))
    gate = router(x, token_ids=ids).gate
    assert torch.equal(gate.topk_idx, router.expert_of_id[ids])
    # As DeepSeek-V4: the score at the experts of the table, over their sum, times the scale.
    scores = torch.nn.functional.softplus(x @ router.weight.T).sqrt().gather(1, gate.topk_idx)
    torch.testing.assert_close(gate.topk_weights, 1.5 * scores / scores.sum(1, keepdim=True))
    (grad,) = torch.autograd.grad(gate.topk_weights[:, 0].sum(), router.weight)
    (expected,) = torch.autograd.grad(
        (1.5 * scores / scores.sum(1, keepdim=True))[:, 0].sum(), router.weight
    )
    torch.testing.assert_close(grad, expected)
    assert set(router.state_dict()) == {"weight", "expert_of_id"}
    one = HashRouter(8, 4, vocab_size=9, learned=True)
    weights = one(x.float(), token_ids=ids).gate.topk_weights
    assert (weights < 1).all() and weights.requires_grad
    layer = moe_ext.MoELayer(8, 6, 4, router=HashRouter(8, 4, **options))
    layer(x.float(), token_ids=ids).square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 0


def test_hash_router_refuses_missing_and_wrong_ids():
    router = HashRouter(8, 4, vocab_size=9)
    x = torch.zeros(5, 8)
    with pytest.raises(ValueError, match=r"^HashRouter: expected token_ids \[T\] .* got None"):
        router(x)
    with pytest.raises(ValueError, match=r"token_ids to be of shape \[5\], got \(4,\)"):
        router(x, token_ids=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"token_ids to be int64, got torch.int32"):
        router(x, token_ids=torch.zeros(5, dtype=torch.int32))
    for wrong in (9, -1):
        ids = torch.tensor([0, 8, wrong, 9, 0])
        message = rf"^HashRouter: expected token_ids to be in \[0, 9\), .* got {wrong} at token 2$"
        with pytest.raises(IndexError, match=message):
            router(x, token_ids=ids)
    layer = moe_ext.MoELayer(8, 6, 4, router=router)
    with pytest.raises(ValueError, match=r"token_ids \[T\] to be given"):
        layer(x)
