"""Layers as in the papers: functions that return a `MoELayer` with a paper's constants.

The caller gives the sizes. A preset sets the options that the paper fixes, and any option of
`MoELayer` that is given replaces them. A preset makes only the layer; depth, initialisation and
optimizer are matters of the model.

Shapes: D model, F ffn, E experts, K top-k.
"""

from __future__ import annotations

from typing import Any

from moe_ext.nn.balance.losses import Balance
from moe_ext.nn.capacity import Capacity
from moe_ext.nn.moe_layer import MoELayer
from moe_ext.nn.routers import GShardRouter, Router, SwitchRouter, TopKRouter

__all__ = ["deepseek_v3", "glam", "gshard", "mixtral", "qwen3", "switch"]


def _made(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the layer that its router takes too: device and dtype."""
    return {name: options[name] for name in ("device", "dtype") if name in options}


def _layer(
    router: Router,
    ffn_dim: int,
    options: dict[str, Any],
    balance: Balance | None = None,
    **preset: Any,
) -> MoELayer:
    """Make the layer. A `Balance` among the options without `coef` gets that of the preset."""
    if "capacity_factor" in options:
        preset.pop("capacity", None)
    coef = None if balance is None else balance.coef
    given = Balance.of("MoELayer", options.get("balance", balance), 0.01 if coef is None else coef)
    preset = {"top_k": router.top_k, "router": router, **preset}
    sizes = (router.model_dim, ffn_dim, router.num_experts)
    return MoELayer(*sizes, **{**preset, **options, "balance": given})


def switch(
    model_dim: int,
    ffn_dim: int,
    num_experts: int = 128,
    *,
    jitter_eps: float = 0.01,
    seed: int = 0,
    **options: Any,
) -> MoELayer:
    """Switch Transformer: one expert per token, capacity 1.25, balance loss 0.01, jitter 0.01.

    The weight is the softmax probability of the chosen expert, not renormalised. An expert takes
    the first `ceil(1.25 T / E)` of its tokens in training, and the first `ceil(2 T / E)` in
    evaluation, as in the released code. Other tokens get no expert. Experts are two linear layers
    with ReLU, as in the released checkpoints.

    Args:
        model_dim: D, number of elements of a token.
        ffn_dim: F, hidden size of each expert.
        num_experts: E, number of experts.
        jitter_eps: eps; the input of the router is multiplied by U[1 - eps, 1 + eps).
        seed: seed of the jitter.
        **options: options of `MoELayer`, which replace those of the preset.

    Reference: Fedus, Zoph, Shazeer 2021 (arXiv 2101.03961): eq. 1-3 (gate, capacity), 4-6 (loss,
    which is `ops.load_balance_loss` with K = 1, alpha = 0.01), table 1 (capacity factor), appendix
    C (jitter).
    """
    router = SwitchRouter(
        model_dim, num_experts, jitter_eps=jitter_eps, seed=seed, **_made(options)
    )
    capacity = Capacity(1.25, eval_factor=2.0)
    return _layer(router, ffn_dim, options, activation="relu", capacity=capacity)


def gshard(
    model_dim: int,
    ffn_dim: int,
    num_experts: int = 128,
    *,
    groups: int = 1,
    seed: int = 0,
    **options: Any,
) -> MoELayer:
    """GShard: two experts per token, the second with probability 2 g2; capacity 2 S / E per group.

    An expert takes `ceil(2 S / E)` tokens of a group of S. Every first choice is served before any
    second, and by position. Weights are the two probabilities divided by their sum. The balance
    loss counts first choices. The paper gives no coefficient; 0.01 is that of its successors.
    Experts are two linear layers with ReLU.

    Args:
        model_dim: D, number of elements of a token.
        ffn_dim: F, hidden size of each expert.
        num_experts: E; the paper has 128, 512 and 2048.
        groups: number of groups into which the tokens of a rank are cut.
        seed: seed of the draws that keep or drop second experts.
        **options: options of `MoELayer`, which replace those of the preset.

    Reference: Lepikhin et al. 2020 (arXiv 2006.16668): section 2.2 and algorithm 1.
    """
    router = GShardRouter(model_dim, num_experts, seed=seed, **_made(options))
    capacity = Capacity(1.0, groups=groups, drop="choice")
    return _layer(router, ffn_dim, options, activation="relu", capacity=capacity)


def glam(
    model_dim: int,
    ffn_dim: int,
    num_experts: int = 64,
    *,
    groups: int = 1,
    seed: int = 0,
    **options: Any,
) -> MoELayer:
    """GLaM: 64 experts, two per token, with the gate and the loss of GShard; balance loss 0.01.

    The model has this layer in place of every other feed-forward network. Experts are two linear
    layers with GELU. Their size, 2 D F, follows from the number of parameters in table 4 of the
    paper; only the dense networks of the paper are gated.

    Args:
        model_dim: D; 8192 in the largest model.
        ffn_dim: F, hidden size of each expert; 32768 in the largest model.
        num_experts: E, number of experts.
        groups: number of groups into which the tokens of a rank are cut.
        seed: seed of the draws that keep or drop second experts.
        **options: options of `MoELayer`, which replace those of the preset.

    Reference: Du et al. 2021 (arXiv 2112.06905): sections 4 (architecture) and 5 (0.01).
    """
    options = {"activation": "gelu", **options}
    return gshard(model_dim, ffn_dim, num_experts, groups=groups, seed=seed, **options)


def mixtral(
    model_dim: int,
    ffn_dim: int,
    num_experts: int = 8,
    top_k: int = 2,
    **options: Any,
) -> MoELayer:
    """Mixtral: 8 SwiGLU experts, two per token, softmax over the two logits, no token dropped.

    The paper does not mention a balance loss, so the coefficient is the default of `MoELayer`. The
    coefficient of the released configuration, `router_aux_loss_coef`, multiplies a loss that is K
    times ours.

    Args:
        model_dim: D; 4096 in Mixtral 8x7B.
        ffn_dim: F, hidden size of each expert; 14336 in Mixtral 8x7B.
        num_experts: E, number of experts.
        top_k: K, number of experts per token.
        **options: options of `MoELayer`, which replace those of the preset.

    Reference: Jiang et al. 2024 (arXiv 2401.04088): section 2.1, table 1.
    """
    made = _made(options)
    router = TopKRouter(model_dim, num_experts, top_k, score_fn="topk_softmax", **made)
    return _layer(router, ffn_dim, options, activation="swiglu")


def qwen3(
    model_dim: int,
    ffn_dim: int,
    num_experts: int = 128,
    top_k: int = 8,
    **options: Any,
) -> MoELayer:
    """Qwen3-MoE: 128 fine-grained SwiGLU experts, 8 per token; none shared, no token dropped.

    Weights are a softmax over all experts; those of the chosen experts are divided by their sum.
    The paper balances over the global batch, and gives no coefficient. For that, pass
    `balance=Balance("global_batch", group=...)` with the ranks that have data of their own. The
    coefficient here is that of the released configuration, 0.001, times K, because the loss there
    is K times ours. It is also the mean over layers, while ours is the sum.

    Args:
        model_dim: D; 2048 in Qwen3-30B-A3B.
        ffn_dim: F, hidden size of each expert; 768 in Qwen3-30B-A3B.
        num_experts: E, number of experts.
        top_k: K, number of experts per token.
        **options: options of `MoELayer`, which replace those of the preset.

    Reference: Qwen team 2025 (arXiv 2505.09388): section 2, table 2; Qiu et al. 2025
    (arXiv 2501.11873), the global-batch loss.
    """
    router = TopKRouter(model_dim, num_experts, top_k, **_made(options))
    return _layer(router, ffn_dim, options, Balance(coef=0.001 * top_k), activation="swiglu")


def deepseek_v3(
    model_dim: int,
    ffn_dim: int,
    num_experts: int = 256,
    top_k: int = 8,
    *,
    num_groups: int = 8,
    top_groups: int = 4,
    scale: float = 2.5,
    **options: Any,
) -> MoELayer:
    """DeepSeek-V3: 256 SwiGLU experts, 8 per token from 4 of 8 nodes; one shared; selection bias.

    Weights are sigmoid scores, divided by their sum over the chosen experts and multiplied by 2.5.
    The selection bias starts at zero, and `update_selection_bias` changes it by 0.001 per step.
    There is also a sequence-wise balance loss with coefficient 0.0001. No token is dropped.

    Args:
        model_dim: D; 7168 in the paper.
        ffn_dim: F, hidden size of each expert and of the shared expert; 2048 in the paper.
        num_experts: E, number of experts.
        top_k: K, number of experts per token.
        num_groups: number of nodes over which the experts are divided.
        top_groups: number of nodes to which a token may go.
        scale: factor on the weights.
        **options: options of `MoELayer`, which replace those of the preset.

    Reference: DeepSeek-AI 2024 (arXiv 2412.19437): section 2.1.2, eq. 12-20, and 4.2
    (hyper-parameters); the scale is `routed_scaling_factor` of the released configuration.
    """
    router = TopKRouter(
        model_dim,
        num_experts,
        top_k,
        score_fn="sigmoid",
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
        selection_bias=True,
        **_made(options),
    )
    return _layer(
        router,
        ffn_dim,
        options,
        Balance("sequence", coef=1e-4),
        activation="swiglu",
        shared_expert=ffn_dim,
    )
