"""Over which tokens the balance loss counts.

Shapes: T tokens, E experts, K top-k, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.distributed.groups import group_size
from moe_ext.nn._recompute import in_backward
from moe_ext.nn._tally import group_id, tally_once
from moe_ext.nn.routers import BalanceTerms, RouterOutput

SCOPES = ("micro_batch", "sequence", "global_batch")


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
        if self.scope not in SCOPES:
            raise ValueError(f"Balance: expected scope to be one of {SCOPES}, got {self.scope!r}")
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


class GlobalCounts:
    """Choices of each expert over the ranks and micro-batches of a step, of one layer.

    Attributes:
        total: `[E + 1]` int64: choices of each expert, and the number of forward passes, over the
            group once they are summed.
        state: "running", where each pass adds its own counts; "counting", in a counting pass;
            "complete", where all passes of the step were counted before.
        passes_left: training passes of this rank still to come, when complete.
        num_passes: passes counted on this rank.
    """

    def __init__(
        self, num_experts: int, group: ProcessGroup | None, device: torch.device | str | None
    ) -> None:
        self.total = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self.group = group
        self.group_id = group_id(group) if group_size(group) > 1 else 0
        self.state = "running"
        self.num_passes = 0
        self.passes_left = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalCounts:
        copied = GlobalCounts(self.total.shape[0] - 1, self.group, self.total.device)
        return copied

    def reset(self) -> None:
        """Forget the step."""
        self.total.zero_()
        self.state = "running"
        self.num_passes = self.passes_left = 0

    def add(self, counts_E: Tensor) -> None:
        """Take part in the count with one forward pass."""
        if self.state == "complete":
            if not torch.compiler.is_compiling() and not in_backward():
                self._use_up_a_pass()
            return
        # A counting pass is summed over the group once, when all micro-batches are through.
        group = 0 if self.state == "counting" else self.group_id
        tally_once(self.total, torch.cat((counts_E, counts_E.new_ones(1))), group)

    def _use_up_a_pass(self) -> None:
        if self.passes_left == 0:
            raise RuntimeError(
                f"MoELayer: expected {self.num_passes} training passes after count_tokens counted "
                "as many, got another; count the tokens of each step anew"
            )
        self.passes_left -= 1


def balance_terms(routed: RouterOutput, top_k: int) -> BalanceTerms:
    """What the balance loss counts of a router's output."""
    if routed.balance is not None:
        return routed.balance
    return BalanceTerms(routed.gate.score_sum, routed.gate.num_tokens_per_expert, top_k)


def global_batch_losses(
    terms: BalanceTerms, z_loss: Tensor | None, counts: GlobalCounts
) -> tuple[Tensor, Tensor | None]:
    """The balance loss, and the z-loss, of this pass as its part of the step's.

    The mean over ranks and micro-batches of what every pass returns is the loss of the whole batch,
    however unevenly the tokens are spread: a pass counts by its tokens over the mean of all passes.
    """
    # A copy: the running total is written to again before the backward pass reads it.
    total_E, passes = counts.total[:-1].clone(), counts.total[-1].clone()
    loss = ops.load_balance_loss(terms.score_sum, total_E, terms.top_k) * passes
    if z_loss is not None:
        choices = terms.num_tokens_per_expert.sum() * passes
        # In the dtype of the loss: a quotient of whole numbers would be float32.
        z_loss = z_loss * choices.to(z_loss.dtype) / total_E.sum().clamp(min=1)
    return loss, z_loss
