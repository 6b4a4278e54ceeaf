"""A layer whose memory does not depend on where the tokens go.

Shapes: T tokens, D model, K top-k, N rows, R rows of a round.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_ext import ops
from moe_ext._compile import outside_graphs
from moe_ext.distributed.dispatcher import TokenDispatcher
from moe_ext.distributed.rounds import Round, plan_rounds, take_rows
from moe_ext.nn._autocast import autocast_dtype
from moe_ext.nn.capacity import RowBudget


def run_within_budget(
    budget: RowBudget,
    experts: nn.Module,
    dispatcher: TokenDispatcher,
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    capacity: int | None,
) -> tuple[Tensor, Tensor]:
    """Dispatch, experts and combine, with at most `budget.rows` rows in memory at once.

    More than one round keeps nothing but the tokens and the tables for the backward pass, which
    runs each round once more. One round, which is within the budget, keeps what the experts keep.

    Args:
        budget: the limit.
        experts: maps `(rows, expert_offsets)` to rows.
        dispatcher: of the layer.
        x_TD: tokens.
        topk_idx_TK: their experts, -1 = none.
        topk_weights_TK: their weights.
        capacity: rows that an expert takes from this rank, None for all.

    Returns:
        `y [T, D]` in the dtype of the experts' results, and the number of slots dropped.
    """
    rounds, num_dropped = plan_rounds(
        dispatcher,
        x_TD,
        topk_idx_TK,
        topk_weights_TK,
        capacity=capacity,
        budget=budget.rows,
        drop=budget.overflow == "drop",
    )
    if len(rounds) == 1:
        tables = rounds[0].tables
        rows = torch.ops.moe_ext._gather_tokens(x_TD, tables.slot_of_row, tables.top_k)
        out = rounds[0].run(rows, experts)
        return ops.unpermute_tokens(out, tables, topk_weights_TK), num_dropped
    return _run_rounds(rounds, experts, x_TD, topk_weights_TK), num_dropped


@dataclass(frozen=True)
class _Setting:
    """What a recomputation needs beyond tensors: the state of autocast and of the generators."""

    device: torch.device
    autocast: torch.dtype | None
    cpu_state: Tensor | None
    device_state: Tensor | None

    @staticmethod
    def now(device: torch.device, experts: nn.Module) -> _Setting:
        # Only dropout and its like draw numbers; reading the state of a device synchronises.
        draws = any(type(module).__name__.endswith("Dropout") for module in experts.modules())
        on_cuda = device.type == "cuda"
        return _Setting(
            device,
            autocast_dtype(device),
            torch.get_rng_state() if draws else None,
            torch.cuda.get_rng_state(device) if draws and on_cuda else None,
        )

    @contextlib.contextmanager
    def restored(self) -> Any:
        """The state of the forward pass."""
        devices = [self.device] if self.device_state is not None else []
        forked: AbstractContextManager[object] = contextlib.nullcontext()
        if self.cpu_state is not None:
            forked = torch.random.fork_rng(devices)
        with forked:
            if self.cpu_state is not None:
                torch.set_rng_state(self.cpu_state)
            if self.device_state is not None:
                torch.cuda.set_rng_state(self.device_state, self.device)
            with torch.enable_grad(), _autocast(self.device, self.autocast):
                yield


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


@dataclass(frozen=True)
class _Work:
    """The rounds and the module that runs them."""

    rounds: list[Round]
    experts: nn.Module
    names: tuple[str, ...]

    def run(self, index: int, rows_RD: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
        """One round with the given parameters in the place of the module's own."""
        bound = dict(zip(self.names, parameters, strict=True))

        def experts(rows: Tensor, expert_offsets: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.experts, bound, (rows, expert_offsets))
            return out

        return self.rounds[index].run(rows_RD, experts)


# A nested backward pass is nothing for a graph.
@outside_graphs
def _run_rounds(
    rounds: list[Round], experts: nn.Module, x_TD: Tensor, topk_weights_TK: Tensor
) -> Tensor:
    named = dict(experts.named_parameters())
    work = _Work(rounds, experts, tuple(named))
    y_TD: Tensor = _Rounds.apply(work, x_TD, topk_weights_TK, *named.values())
    return y_TD


class _Rounds(torch.autograd.Function):
    """Runs rounds one after another, and each once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, x_TD: Tensor, weights_TK: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.work, ctx.setting = work, _Setting.now(x_TD.device, work.experts)
        ctx.save_for_backward(x_TD, weights_TK, *parameters)
        y_TD: Tensor | None = None
        for index, part in enumerate(work.rounds):
            tables = part.tables
            out = work.run(index, take_rows(x_TD, tables), parameters)
            dtype = out.dtype
            # A token's rows may lie in several rounds: their sum is rounded once, at the end.
            part_TD = ops.unpermute_tokens(out.to(_acc_dtype(dtype)), tables, weights_TK)
            del out
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
        sums = _Sums(x_TD, needs_parameters)
        leaves = tuple(
            p.detach().requires_grad_(needs)
            for p, needs in zip(parameters, needs_parameters, strict=True)
        )
        weights = weights_TK.detach().requires_grad_(needs_weights)
        grad_y_TD = grad_y_TD.to(_acc_dtype(grad_y_TD.dtype))
        with ctx.setting.restored():
            for index, part in enumerate(work.rounds):
                tables = part.tables
                rows = take_rows(x_TD, tables).requires_grad_()
                out = work.run(index, rows, leaves).to(grad_y_TD.dtype)
                part_TD = ops.unpermute_tokens(out, tables, weights)
                del out
                wanted = [rows, *([weights] if needs_weights else [])]
                wanted += [leaf for leaf in leaves if leaf.requires_grad]
                found: list[Tensor | None] = [
                    *torch.autograd.grad(part_TD, wanted, grad_y_TD, allow_unused=True)
                ]
                del part_TD
                sums.add(tables, rows, found, needs_x, needs_weights)
        return None, *sums.results(x_TD, needs_x)


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Sums:
    """Gradients summed over the rounds, in place."""

    def __init__(self, x_TD: Tensor, needs_parameters: list[bool]) -> None:
        self.x_TD: Tensor | None = None
        self.weights: Tensor | None = None
        self.parameters: list[Tensor | None] = [None] * len(needs_parameters)
        self.wanted = [index for index, needs in enumerate(needs_parameters) if needs]

    def add(
        self,
        tables: ops.Permutation,
        rows: Tensor,
        found: list[Tensor | None],
        needs_x: bool,
        needs_weights: bool,
    ) -> None:
        """Take in what one round gave; empties `found`."""
        for index in reversed(self.wanted):
            self.parameters[index] = _plus(self.parameters[index], found.pop())
        if needs_weights:
            self.weights = _plus(self.weights, found.pop())
        grad_rows = found.pop()
        if needs_x:
            if grad_rows is None:
                grad_rows = torch.zeros_like(rows)
            grad_rows = grad_rows.to(_acc_dtype(grad_rows.dtype))
            with torch.no_grad():
                self.x_TD = _plus(self.x_TD, ops.unpermute_tokens(grad_rows, tables))

    def results(self, x_TD: Tensor, needs_x: bool) -> tuple[Tensor | None, ...]:
        """Gradients of x, of the weights and of the parameters."""
        assert self.x_TD is not None or not needs_x
        grad_x = None if self.x_TD is None else self.x_TD.to(x_TD.dtype)
        return grad_x, self.weights, *self.parameters


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return total if part is None else part
    with torch.no_grad():
        return total.add_(part)
