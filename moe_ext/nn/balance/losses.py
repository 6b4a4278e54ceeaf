"""The losses of a layer: the tokens that they count, their terms, their way to the backward pass.

Shapes: T tokens, E experts, K top-k, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library, ops
from moe_ext._checks import check_choice
from moe_ext.nn.balance.counts import StepCounts
from moe_ext.nn.routers import BalanceTerms, RouterOutput

SCOPES = ("micro_batch", "sequence", "global_batch")
LOSS_MODES = ("inject", "return", "both")

# Name to (coefficient, loss in the graph).
LossTerms = dict[str, tuple[float, Tensor]]


@dataclass(frozen=True)
class Balance:
    """Over which tokens the balance loss of a layer counts.

    Attributes:
        scope: "micro_batch", the tokens of one forward pass on this rank; "sequence", each sequence
            of `x[..., S, D]` alone, averaged over the sequences that have a real token;
            "global_batch", the tokens of a whole step: the share of each expert is that over all
            ranks of `group` and all micro-batches of the step, the mean score that of this pass.
        group: of "global_batch": the ranks whose tokens count, every one that sees data of its own;
            None for this rank alone.

    Raises:
        ValueError: the scope is unknown, or has no use for a group.
        TypeError: the group is none of this rank.
    """

    scope: str = "micro_batch"
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Refuse what is not allowed."""
        check_choice("Balance", "scope", self.scope, SCOPES)
        if self.group is not None and not isinstance(self.group, ProcessGroup):
            raise TypeError(
                "Balance: expected group to be None or a ProcessGroup that this rank belongs to, "
                f"got {self.group!r}"
            )
        if self.group is not None and self.scope != "global_batch":
            raise ValueError(
                f"Balance: expected group to be None for scope={self.scope!r}, got {self.group}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Balance:
        return self


def balance_terms(routed: RouterOutput, top_k: int) -> BalanceTerms:
    """Terms of the balance loss in a router's output."""
    if routed.balance is not None:
        return routed.balance
    return BalanceTerms(routed.gate.score_sum, routed.gate.num_tokens_per_expert, top_k)


def loss_terms(
    routed: RouterOutput,
    counted: BalanceTerms,
    mask_T: Tensor | None,
    num_sequences: int,
    *,
    scope: str,
    balance_coef: float,
    z_coef: float,
    step: StepCounts | None,
) -> LossTerms:
    """The losses of one forward pass: "balance", "z", and the router's own.

    Args:
        routed: what the router said.
        counted: of `balance_terms`.
        mask_T: which tokens are real, None for all.
        num_sequences: B, equal runs of tokens.
        scope: of the `Balance`.
        balance_coef: 0 for no balance loss.
        z_coef: 0 for no z-loss.
        step: counts of the step, this pass included, for the losses of a global batch.
    """
    terms: LossTerms = {}
    z = ops.router_z_loss(routed.logits, token_mask=mask_T) if z_coef else None
    balance: Tensor | None = None
    if step is not None:
        balance, z = _global_batch_losses(counted, z, step)
    elif balance_coef and scope == "sequence":
        balance = _sequence_loss(routed, counted.top_k, mask_T, max(num_sequences, 1))
    elif balance_coef:
        balance = ops.load_balance_loss(*counted)
    if balance_coef and balance is not None:
        terms["balance"] = (balance_coef, balance)
    if z is not None:
        terms["z"] = (z_coef, z)
    for name, term in (routed.losses or {}).items():
        terms[name] = (1.0, term)
    return terms


def _sequence_loss(
    routed: RouterOutput, columns: int, mask_T: Tensor | None, num_sequences: int
) -> Tensor:
    """Mean over sequences of the balance loss of each; it counts the first columns of the gate."""
    score_sum_BE, counts_BE = ops.sequence_load(
        routed.logits,
        routed.gate.topk_idx[:, :columns],
        num_sequences,
        # Before the choice, the scores of "topk_softmax" are a softmax over all experts too.
        score_fn=(routed.score_fn or "softmax").removeprefix("topk_"),
        token_mask=mask_T,
    )
    return ops.sequence_balance_loss(score_sum_BE, counts_BE, columns)


def _global_batch_losses(
    counted: BalanceTerms, z_loss: Tensor | None, step: StepCounts
) -> tuple[Tensor, Tensor | None]:
    """The balance loss, and the z-loss, of this pass as its part of the step's.

    The mean over ranks and micro-batches of what every pass returns is the loss of the whole batch,
    however unevenly the tokens are spread: a pass counts by its tokens over the mean of all passes.
    """
    # A copy: the running total is written to again before the backward pass reads it.
    total_E, passes = step.total[:-1].clone(), step.total[-1].clone()
    loss = ops.load_balance_loss(counted.score_sum, total_E, counted.top_k) * passes
    if z_loss is not None:
        choices = counted.num_tokens_per_expert.sum() * passes
        # In the dtype of the loss: a quotient of whole numbers would be float32.
        z_loss = z_loss * choices.to(z_loss.dtype) / total_E.sum().clamp(min=1)
    return loss, z_loss


class _InjectLosses(torch.autograd.Function):
    """Identity on y; in the backward pass each loss gets the gradient `coefficient * scale`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, scale: float | Tensor, coefs: tuple[float, ...], *losses: Tensor
    ) -> Tensor:
        ctx.scale, ctx.coefs = scale, coefs
        ctx.like = [(loss.dtype, loss.device) for loss in losses]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.full((), coef, dtype=dtype, device=device) * ctx.scale
            for coef, (dtype, device) in zip(ctx.coefs, ctx.like, strict=True)
        ]
        return grad_y, None, None, *gradients


def inject_losses(y: Tensor, terms: LossTerms, scale: float | Tensor) -> Tensor:
    """`inject_loss` of several terms at once."""
    coefs, losses = zip(*terms.values(), strict=True)
    module = None if torch.compiler.is_compiling() else _runtime_library.load()
    injected: Tensor
    if module is None:
        injected = _InjectLosses.apply(y, scale, coefs, *losses)
    else:
        injected = module.inject_losses(y, losses, coefs, scale)
    return injected


def inject_loss(y: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return y unchanged; a backward pass through it adds `scale * loss` to the objective.

    Args:
        y: any tensor on the path to the caller's loss.
        loss: 0-d tensor in the graph.
        scale: factor on the loss, a number or a 0-d tensor; read in the forward pass.

    Returns:
        y, same values and shape.
    """
    return inject_losses(y, {"loss": (1.0, loss)}, scale)
