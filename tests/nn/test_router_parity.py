"""The choices and weights of other libraries on equal logits.

Hugging Face's routers are called; Megatron's and DeepSpeed's functions are written out here as
formulas, since neither can be imported without CUDA packages. Libraries leave ties to torch.topk,
so that on logits with ties the scores of the choices are compared, and ours with the lowest index.

Shapes: T tokens, E experts, K top-k, G groups.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

from moe_ext import ops
from moe_ext.nn import TopKRouter

T = 1024
# The weights are quotients of float32 exponentials: some ten roundings of numbers below one.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def logits_of(num_experts, *, ties=False):
    logits = 2 * torch.randn(T, num_experts)
    # Quarters: float32 sigmoids and softmaxes keep them apart, and most rows have a tie.
    return (logits * 4).round() / 4 if ties else logits


def by_expert(idx_TK, weights_TK):
    """Columns in the order of the experts, for libraries that do not sort their choices."""
    order = idx_TK.argsort(dim=1)
    return idx_TK.gather(1, order), weights_TK.gather(1, order)


def assert_same(gate, idx_TK, weights_TK):
    ours, theirs = by_expert(gate.topk_idx, gate.topk_weights), by_expert(idx_TK, weights_TK)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1].float(), **TOLERANCE)


def assert_same_up_to_ties(gate, idx_TK, weights_TK, key_TE):
    """Equal keys chosen, and ours are those of the lowest experts."""
    theirs = key_TE.gather(1, idx_TK).sort(dim=1).values
    ours = key_TE.gather(1, gate.topk_idx)
    assert torch.equal(ours.sort(dim=1).values, theirs)
    weights = gate.topk_weights.sort(dim=1).values
    torch.testing.assert_close(weights, weights_TK.sort(dim=1).values.float(), **TOLERANCE)
    lowest = key_TE.sort(dim=1, descending=True, stable=True).indices[:, : idx_TK.shape[1]]
    assert torch.equal(gate.topk_idx, lowest)


# --- Hugging Face -------------------------------------------------------------------------------

GROUPED = {"n_group": 8, "topk_group": 4}
# Family: class of the router, its options, our options, E, K.
FAMILIES = {
    "mixtral": ("MixtralTopKRouter", {}, {}, 8, 2),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {}, 128, 8),
    "qwen2_moe": (
        "Qwen2MoeTopKRouter",
        {"norm_topk_prob": False},
        {"renormalize": False},
        60,
        4,
    ),
    "olmoe": ("OlmoeTopKRouter", {"norm_topk_prob": False}, {"renormalize": False}, 64, 8),
    "gpt_oss": ("GptOssTopKRouter", {}, {"score_fn": "topk_softmax"}, 32, 4),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **GROUPED},
        {"renormalize": False, "scale": 16.0, "num_groups": 8, "top_groups": 4},
        160,
        6,
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, **GROUPED},
        {"score_fn": "sigmoid", "scale": 2.5, "num_groups": 8, "top_groups": 4},
        256,
        8,
    ),
}


def huggingface_router(family):
    pytest.importorskip("transformers", minversion="5")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name, options, ours, num_experts, top_k = FAMILIES[family]
    config = SimpleNamespace(
        num_experts_per_tok=top_k,
        num_local_experts=num_experts,
        num_experts=num_experts,
        hidden_size=num_experts,
        **options,
    )
    router = getattr(module, name)(config)
    with torch.no_grad():
        # The logits are then the hidden states themselves, to the bit.
        router.weight.copy_(torch.eye(num_experts))
    ours = dict(ours)
    if family == "deepseek_v3":
        router.e_score_correction_bias = torch.randn(num_experts) / 10
        ours["selection_bias"] = router.e_score_correction_bias
    return router, ours, num_experts, top_k


@pytest.mark.parametrize("family", FAMILIES)
def test_huggingface_router(family):
    router, ours, num_experts, top_k = huggingface_router(family)
    logits = logits_of(num_experts)
    with torch.no_grad():
        their_logits, weights, idx = router(logits)
    assert torch.equal(their_logits, logits)
    assert_same(ops.topk_gate(logits, top_k, **ours), idx, weights)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("deepseek")])
def test_huggingface_router_with_ties(family):
    router, ours, num_experts, top_k = huggingface_router(family)
    logits = logits_of(num_experts, ties=True)
    with torch.no_grad():
        _, weights, idx = router(logits)
    assert_same_up_to_ties(ops.topk_gate(logits, top_k, **ours), idx, weights, logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_gradients_of_huggingface_routers(family):
    router, ours, num_experts, top_k = huggingface_router(family)
    logits = logits_of(num_experts)
    grads = []
    for library in ("theirs", "ours"):
        leaf = logits.clone().requires_grad_()
        if library == "theirs":
            _, weights, idx = router(leaf)
        else:
            gate = ops.topk_gate(leaf, top_k, **ours)
            weights, idx = gate.topk_weights, gate.topk_idx
        # A loss that does not depend on the order of the columns.
        (weights * torch.sin(idx.float())).sum().backward()
        grads.append(leaf.grad)
    scale = grads[0].abs().max()
    torch.testing.assert_close(grads[1] / scale, grads[0] / scale, rtol=1e-5, atol=1e-6)


def test_a_router_module_and_a_huggingface_router_of_the_same_weight():
    router, _, num_experts, top_k = huggingface_router("mixtral")
    torch.nn.init.normal_(router.weight)
    ours = TopKRouter(num_experts, num_experts, top_k)
    ours.load_state_dict({"weight": router.weight}, strict=False)
    x = torch.randn(T, num_experts)
    with torch.no_grad():
        _, weights, idx = router(x)
        assert_same(ours(x).gate, idx, weights)


# --- Megatron -----------------------------------------------------------------------------------


def megatron_groups(score_TE, top_k, num_groups, top_groups):
    """A group counts with the sum of its top_k / top_groups best scores."""
    score_TGS = score_TE.unflatten(1, (num_groups, -1))
    group_TG = score_TGS.topk(top_k // top_groups, dim=2).values.sum(dim=2)
    kept = torch.zeros_like(group_TG).scatter(1, group_TG.topk(top_groups, dim=1).indices, 1.0)
    return score_TGS.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)


def megatron_routing(
    logits, top_k, *, pre_softmax=False, sigmoid=False, bias=None, groups=None, scale=1.0
):
    """top-k of the logits, then softmax; or softmax, then top-k; or biased sigmoids, normalised."""
    if sigmoid:
        score = logits.float().sigmoid()
        key = score if bias is None else score + bias
    else:
        score = logits.float().softmax(dim=1) if pre_softmax else logits
        key = score
    if groups is not None:
        key = megatron_groups(key, top_k, *groups)
    idx = key.topk(top_k, dim=1).indices
    weights = score.gather(1, idx)
    if not sigmoid and not pre_softmax:
        weights = weights.float().softmax(dim=1)
    if sigmoid and top_k > 1:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return idx, weights * scale


MEGATRON = {
    "post_softmax": ({}, {"score_fn": "topk_softmax"}),
    "post_softmax_is_renormalized_softmax": ({}, {"score_fn": "softmax"}),
    "pre_softmax": ({"pre_softmax": True}, {"renormalize": False}),
    "pre_softmax_scaled": (
        {"pre_softmax": True, "scale": 2.0},
        {"renormalize": False, "scale": 2.0},
    ),
    "sigmoid": ({"sigmoid": True}, {"score_fn": "sigmoid"}),
    "sigmoid_biased": ({"sigmoid": True, "bias": True}, {"score_fn": "sigmoid"}),
    # 8 of 4 groups: two of each, which is the rule of DeepSeek-V3.
    "deepseek_v3": (
        {"sigmoid": True, "bias": True, "groups": (8, 4), "scale": 2.5},
        {"score_fn": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5},
    ),
    # 8 of 8 groups: one of each, the largest.
    "groups_by_largest": (
        {"pre_softmax": True, "groups": (16, 8)},
        {"renormalize": False, "num_groups": 16, "top_groups": 8},
    ),
}


# The groups are those of 8 experts.
@pytest.mark.parametrize(
    ("case", "top_k"),
    [
        (case, k)
        for case in MEGATRON
        for k in (1, 2, 8)
        if k == 8 or "groups" not in MEGATRON[case][0]
    ],
)
def test_megatron_routing(case, top_k):
    theirs, ours = (dict(options) for options in MEGATRON[case])
    if theirs.get("sigmoid") and top_k == 1:
        ours["renormalize"] = False
    logits = logits_of(64)
    if theirs.get("bias"):
        theirs["bias"] = ours["selection_bias"] = torch.randn(64) / 10
    gate = ops.topk_gate(logits, top_k, **ours)
    idx, weights = megatron_routing(logits, top_k, **theirs)
    assert_same(gate, idx, weights)
    assert torch.equal(gate.num_tokens_per_expert, torch.bincount(idx.flatten(), minlength=64))


# --- DeepSpeed ----------------------------------------------------------------------------------


def deepspeed_gating(logits, top_k):
    """Softmax; one expert keeps its probability, more are divided by their sum."""
    gates_TE = logits.float().softmax(dim=1)
    idx = logits.topk(top_k, dim=1).indices
    weights = gates_TE.gather(1, idx)
    if top_k > 1:
        eps = torch.finfo(torch.float32).eps
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=eps)
    chosen_TE = torch.zeros_like(gates_TE).scatter(1, idx, 1.0)
    return idx, weights, chosen_TE.sum(dim=0).long()


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_deepspeed_gating(top_k):
    logits = logits_of(16)
    gate = ops.topk_gate(logits, top_k, renormalize=top_k > 1)
    idx, weights, counts = deepspeed_gating(logits, top_k)
    assert_same(gate, idx, weights)
    assert torch.equal(gate.num_tokens_per_expert, counts)
    logits = logits_of(16, ties=True)
    gate = ops.topk_gate(logits, top_k, renormalize=top_k > 1)
    idx, weights, _ = deepspeed_gating(logits, top_k)
    assert_same_up_to_ties(gate, idx, weights, logits)
