"""Experts over the parts of a batch, whose messages overlap with work, or over rounds.

Shapes: T tokens, D model, K top-k, R rows of a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_ext._compile import outside_graphs
from moe_ext.dispatch import (
    BatchPlan,
    DispatchMetadata,
    Round,
    RowWeights,
    TokenDispatcher,
    sum_dtype,
    take_part,
)
from moe_ext.nn.capacity import run_padded
from moe_ext.nn.experts import (
    Weights,
    check_results,
    late_weights,
    moved_weights,
    run_experts,
    runs_own_forward,
    take_weights,
)
from moe_ext.nn.torch_state import TorchState, has_hooks, without_autocast
from moe_ext.ops.grouped_gemm import wants_ends


def run_plan(
    dispatcher: TokenDispatcher,
    plan: BatchPlan,
    experts: nn.Module,
    x_TD: Tensor,
    topk_weights_TK: Tensor,
    *,
    weighed: bool,
    pad: bool = False,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Send the parts of a batch, run the experts, and combine the results.

    Args:
        dispatcher: dispatcher of the layer.
        plan: plan of the batch.
        experts: maps `(rows, expert_offsets)` to rows.
        x_TD: tokens.
        topk_weights_TK: weights of the slots of each token.
        weighed: whether the experts multiply their results by weights.
        pad: give every expert exactly its capacity of rows.
        beside: function that computes a further term `[T, D]` of the sum, such as a shared expert,
            called while the last results travel.

    Returns:
        `[T, D]`.
    """
    y_TD: Tensor | None = None
    if plan.parts:
        found: list[Tensor] = []
        meanwhile = None if beside is None else lambda: found.append(beside())
        y_TD = _run_parts(dispatcher, plan, experts, weighed, pad, meanwhile)
        if found:
            y_TD = y_TD + found[0]
    rounds = plan.later()
    if rounds:
        if beside is not None and y_TD is None:
            # `beside` comes first, so that its backward pass runs after that of the rounds. The
            # ranks have exchanged messages by then, and can be told of an error in it.
            y_TD = beside()
        later_TD = _run_rounds(dispatcher, rounds, experts, weighed, x_TD, topk_weights_TK)
        y_TD = later_TD if y_TD is None else y_TD + later_TD
    assert y_TD is not None
    return y_TD


def _run_parts(
    dispatcher: TokenDispatcher,
    plan: BatchPlan,
    experts: nn.Module,
    weighed: bool,
    pad: bool,
    meanwhile: Callable[[], None] | None,
) -> Tensor:
    """Send the parts, run the experts and combine; the backward pass takes the reverse order.

    While the experts work on part i, the rows of part i + 1 and the results of part i - 1 travel.
    Only the rows of the first part travel without work beside them, since `meanwhile` runs beside
    the last results. In the backward pass, gradients of a part's rows travel while gradients of its
    weights are computed, so that only those of the last results travel without work.
    """
    parts, placed = plan.parts, plan.placed
    moves = None if placed is None else placed.moves
    take_late = functools.partial(late_weights, experts)
    if moves is not None:
        take_late = functools.partial(moved_weights, experts, moves)  # type: ignore[arg-type]
    # For each part, `here` holds the function that sends it, then its rows, then its results.
    here: list[Any] = [*parts]
    sums: list[Any] = [None] * len(here)

    def send(i: int, beside: Callable[[], None] | None) -> None:
        late: Weights = []

        def begin() -> None:
            late.extend(take_late())
            if beside is not None:
                beside()

        part, here[i] = here[i], None
        rows, offsets, metadata = part(begin)
        if placed is not None:
            offsets = placed.offsets(offsets)
        if plan.filled and wants_ends(rows) and runs_own_forward(experts):
            offsets = offsets[1:].int()
        here[i] = late, rows, offsets, metadata

    def compute(i: int) -> None:
        late, rows, offsets, metadata = here[i]
        if pad:
            results = run_padded(experts, rows, offsets, metadata.expert_capacity)
        else:
            weights: tuple[RowWeights, ...] = ()
            if weighed:
                weights, metadata = take_weights(dispatcher, rows, metadata)
            if moves is None or late:
                results = run_experts(experts, late, rows, offsets, *weights)
            else:
                results = experts(rows, offsets, *weights, moves=moves)
        check_results(experts, dispatcher, rows, results)
        here[i] = results, metadata

    def bring_back(i: int, beside: Callable[[], None] | None) -> None:
        (results, metadata), here[i] = here[i], None
        # A user's dispatcher may not take `meanwhile`, so it is passed only if there is work.
        options: dict[str, Any] = {} if beside is None else {"meanwhile": beside}
        sums[i] = dispatcher.combine(results, metadata, **options)

    def turn(i: int) -> None:
        """Do the work that runs while the results of part i - 1 travel."""
        if i + 1 < len(here):
            send(i + 1, lambda: compute(i))
        else:
            compute(i)

    send(0, None)
    turn(0)
    for i in range(1, len(here)):
        bring_back(i - 1, lambda i=i: turn(i))  # type: ignore[misc]
    bring_back(len(here) - 1, meanwhile)
    return sums[0] if len(sums) == 1 else torch.cat(sums)


# A graph of `torch.compile` cannot contain the nested backward pass.
@outside_graphs
def _run_rounds(
    dispatcher: TokenDispatcher,
    rounds: list[Round],
    experts: nn.Module,
    weighed: bool,
    x_TD: Tensor,
    topk_weights_TK: Tensor,
) -> Tensor:
    """Send, run the experts and combine, round by round, in memory that no routing changes.

    Only the tokens and the tables are kept for the backward pass, which runs each round again.

    Returns:
        `[T, D]` in the dtype of the experts' results.
    """
    # `functional_call` needs full names. A checkpoint wrapper's own `named_parameters` would leave
    # out its prefix.
    named = dict(nn.Module.named_parameters(experts))
    work = _Work(dispatcher, rounds, experts, weighed, tuple(named))
    counts = rounds[0].counts
    if counts is not None and counts.has_backward:
        x_TD, topk_weights_TK = take_part(x_TD), take_part(topk_weights_TK)
    return _RunRounds.apply(work, x_TD, topk_weights_TK, *named.values())


@dataclass(frozen=True)
class _Work:
    """Rounds, and the modules that run them."""

    dispatcher: TokenDispatcher
    rounds: list[Round]
    experts: nn.Module
    weighed: bool
    names: tuple[str, ...]

    def run(
        self, one: Round, rows_RD: Tensor, weights_TK: Tensor, parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, torch.dtype, DispatchMetadata]:
        """Run a round; return its part of the sums, the dtype of the outputs, and metadata."""
        bound = dict(zip(self.names, parameters, strict=True))
        rows, offsets, metadata = self.dispatcher.send(rows_RD, one, weights_TK, self.weighed)
        weights: tuple[RowWeights, ...] = ()
        if self.weighed:
            weights, metadata = take_weights(self.dispatcher, rows, metadata)
        out = torch.func.functional_call(self.experts, bound, (rows, offsets, *weights))
        check_results(self.experts, self.dispatcher, rows, out)
        # Rows of a token may be in several rounds. The sum in this dtype is rounded once, at the
        # end.
        y_TD = self.dispatcher.combine(out, metadata, dtype=sum_dtype(out.dtype))
        return y_TD, out.dtype, metadata


class _RunRounds(torch.autograd.Function):
    """Runs rounds one after another, and each round again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, x_TD: Tensor, weights_TK: Tensor, *parameters: Tensor
    ) -> Tensor:
        # Grouped experts with a named activation, without submodules or hooks, draw no random
        # numbers. Others may draw some, so the state of the generators is kept.
        experts = work.experts
        named = runs_own_forward(experts) and isinstance(experts.activation, str)
        draws = not named or any(True for _ in experts.children()) or has_hooks(experts)
        ctx.work, ctx.setting = work, TorchState.now(x_TD.device, draws=draws)
        ctx.save_for_backward(x_TD, weights_TK, *parameters)
        y_TD: Tensor | None = None
        for one in work.rounds:
            part_TD, dtype, _ = work.run(one, one.take(x_TD), weights_TK, parameters)
            y_TD = part_TD if y_TD is None else y_TD.add_(part_TD)
            del part_TD
        assert y_TD is not None
        return y_TD.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, *parameters = ctx.saved_tensors
        work: _Work = ctx.work
        _, needs_x, needs_weights, *needs_parameters = ctx.needs_input_grad
        leaves = tuple(
            p.detach().requires_grad_(needs)
            for p, needs in zip(parameters, needs_parameters, strict=True)
        )
        weights = weights_TK.detach().requires_grad_(needs_weights)
        grad_y_TD = grad_y_TD.to(sum_dtype(grad_y_TD.dtype))
        grad_x_TD: Tensor | None = None
        # The tensors that need gradients: the routing weights, then the parameters.
        wanted = [leaf for leaf in (weights, *leaves) if leaf.requires_grad]
        sums: list[Tensor | None] = [None] * len(wanted)
        with ctx.setting.restored():
            for one in work.rounds:
                rows = one.take(x_TD.detach()).requires_grad_()
                part_TD, _, metadata = work.run(one, rows, weights, leaves)
                # Autocast applies to the second forward pass, not to a backward pass.
                with without_autocast(rows.device):
                    grad_rows, *found = torch.autograd.grad(
                        part_TD, [rows, *wanted], grad_y_TD, allow_unused=True
                    )
                del part_TD
                with torch.no_grad():
                    while found:
                        index = len(found) - 1
                        sums[index] = _plus(sums[index], found.pop())
                    if needs_x:
                        grad_rows = torch.zeros_like(rows) if grad_rows is None else grad_rows
                        grad_rows = grad_rows.to(sum_dtype(grad_rows.dtype))
                        part_TD = one.return_sums(grad_rows, metadata.permutation)
                        grad_x_TD = _plus(grad_x_TD, part_TD)
                        del part_TD
                del rows, grad_rows, metadata
        gradients = iter(sums)
        return (
            None,
            None if grad_x_TD is None else grad_x_TD.to(x_TD.dtype),
            *(next(gradients) if leaf.requires_grad else None for leaf in (weights, *leaves)),
        )


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return total if part is None else part
    return total.add_(part)
