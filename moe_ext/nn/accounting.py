"""The losses and the metrics of a layer's forward pass.

Shapes: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.nn._tally import tally_once
from moe_ext.nn.balance import balance_terms, global_batch_losses
from moe_ext.nn.losses import inject_losses
from moe_ext.nn.metrics import LayerMetrics, Metric
from moe_ext.nn.routers import RouterOutput

if TYPE_CHECKING:
    from moe_ext.nn.moe_layer import MoELayer

# What a forward pass leaves behind: tensors, in the graph, and numbers. A plain dictionary, which a
# compiled graph can fill.
Record = dict[str, Any]


def account(
    layer: MoELayer,
    y_TD: Tensor,
    routed: RouterOutput,
    mask_T: Tensor | None,
    num_sequences: int,
    num_dropped: Tensor,
) -> tuple[Tensor, Record]:
    """Count the tokens and work out the losses; y with the losses attached, and the record."""
    gate = routed.gate
    router_bias = getattr(layer.router, "selection_bias", None)
    if router_bias is not None and layer.training and not layer.counting:
        tally_once(layer.choices, gate.num_tokens_per_expert, 0)
    if layer.global_counts is not None and layer.training:
        layer.global_counts.add(balance_terms(routed, layer.top_k).num_tokens_per_expert)
    # The counts of a counting pass are not whole yet, and its losses go nowhere.
    terms = {} if layer.counting else _loss_terms(layer, routed, mask_T, num_sequences)
    if terms and layer.loss_mode != "return" and layer.training and torch.is_grad_enabled():
        y_TD = inject_losses(y_TD, terms, layer.loss_scale)
    if layer.loss_mode == "inject":
        terms = {name: (coef, term.detach()) for name, (coef, term) in terms.items()}
    balance = balance_terms(routed, layer.top_k)
    record: Record = {
        "num_tokens_per_expert": gate.num_tokens_per_expert.detach(),
        "num_dropped": num_dropped.detach(),
        "logits": routed.logits.detach(),
        "score_sum": balance.score_sum.detach(),
        "balance_counts": balance.num_tokens_per_expert.detach(),
        "balance_top_k": balance.top_k,
        "mask": mask_T,
        "terms": terms,
    }
    return y_TD, record


def wants_balance_loss(layer: MoELayer) -> bool:
    """A router that is balanced by construction gets none."""
    return layer.balance_loss_coef > 0 and not getattr(layer.router, "balanced", False)


def check_scores(layer: MoELayer, routed: RouterOutput) -> None:
    """Refuse a router that does not say what its scores are where the loss wants to know it."""
    by_sequence = layer.balance.scope == "sequence" and wants_balance_loss(layer)
    if by_sequence and routed.score_fn is None:
        raise ValueError(
            "MoELayer: expected router to say what its scores are (RouterOutput.score_fn) for "
            f"balance=Balance('sequence'), got None from {type(layer.router).__name__}"
        )


def _loss_terms(
    layer: MoELayer, routed: RouterOutput, mask_T: Tensor | None, num_sequences: int
) -> dict[str, tuple[float, Tensor]]:
    """Name to (coefficient, loss), in the graph."""
    scope = layer.balance.scope
    top_k = layer.top_k
    wants_balance = wants_balance_loss(layer)
    z = ops.router_z_loss(routed.logits, token_mask=mask_T) if layer.z_loss_coef else None
    balance: Tensor | None = None
    if layer.global_counts is not None and layer.training:
        counted = balance_terms(routed, top_k)
        balance, z = global_batch_losses(counted, z, layer.global_counts)
    elif wants_balance and scope == "sequence":
        assert routed.score_fn is not None, "refused before the dispatch"
        columns = top_k if routed.balance is None else routed.balance.top_k
        score_sum_BE, counts_BE = ops.sequence_load(
            routed.logits,
            routed.gate.topk_idx[:, :columns],
            max(num_sequences, 1),
            # Before the choice, "topk_softmax" is a softmax over all experts too.
            score_fn="sigmoid" if routed.score_fn == "sigmoid" else "softmax",
            token_mask=mask_T,
        )
        balance = ops.sequence_balance_loss(score_sum_BE, counts_BE, columns)
    elif wants_balance:
        balance = ops.load_balance_loss(*balance_terms(routed, top_k))
    terms: dict[str, tuple[float, Tensor]] = {}
    if wants_balance and balance is not None:
        terms["balance"] = (layer.balance_loss_coef, balance)
    if z is not None:
        terms["z"] = (layer.z_loss_coef, z)
    for name, term in (routed.losses or {}).items():
        terms[name] = (1.0, term)
    return terms


def read_losses(record: Record) -> dict[str, Tensor]:
    """Coefficient times loss of every term."""
    return {name: coef * term for name, (coef, term) in record.get("terms", {}).items()}


def read_metrics(record: Record) -> LayerMetrics:
    """The metrics of a record; the losses that the pass did not need are left to the reader."""
    if not record:
        return LayerMetrics({})
    terms = record["terms"]

    def balance_loss() -> Tensor:
        counts_E, top_k = record["balance_counts"], record["balance_top_k"]
        return ops.load_balance_loss(record["score_sum"], counts_E, top_k)

    def z_loss() -> Tensor:
        return ops.router_z_loss(record["logits"], token_mask=record["mask"])

    entries: dict[str, Metric] = {
        "num_tokens_per_expert": record["num_tokens_per_expert"],
        "num_dropped": record["num_dropped"],
        "balance_loss": terms["balance"][1].detach() if "balance" in terms else balance_loss,
        "z_loss": terms["z"][1].detach() if "z" in terms else z_loss,
    }
    for name in terms:
        if name not in ("balance", "z"):
            entries[f"{name}_loss"] = terms[name][1].detach()
    return LayerMetrics(entries)
