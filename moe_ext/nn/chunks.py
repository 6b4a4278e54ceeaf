"""Experts over the chunks of a layer's rows: memory that does not depend on where tokens go.

Shapes: T tokens, D model, K top-k, R rows of a chunk.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_ext._compile import outside_graphs
from moe_ext.dispatch import Chunk, DispatchMetadata, TokenDispatcher, sum_dtype, take_part
from moe_ext.nn.experts import check_results, take_weights
from moe_ext.nn.torch_state import autocast_dtype


# A nested backward pass is nothing for a graph.
@outside_graphs
def run_chunks(
    dispatcher: TokenDispatcher,
    chunks: list[Chunk],
    experts: nn.Module,
    x_TD: Tensor,
    topk_weights_TK: Tensor,
) -> Tensor:
    """Dispatch, experts and combine, one chunk after the other.

    Nothing is kept for the backward pass but the tokens and the tables; it runs each chunk once
    more.

    Args:
        dispatcher: of the layer.
        chunks: of `dispatcher.chunks`.
        experts: maps `(rows, expert_offsets)` to rows.
        x_TD: tokens.
        topk_weights_TK: their weights.

    Returns:
        `[T, D]` in the dtype of the experts' results.
    """
    named = dict(experts.named_parameters())
    work = _Work(dispatcher, chunks, experts, tuple(named))
    counts = chunks[0].counts
    if counts is not None and counts.has_backward:
        x_TD, topk_weights_TK = take_part(x_TD), take_part(topk_weights_TK)
    y_TD: Tensor = _RunChunks.apply(work, x_TD, topk_weights_TK, *named.values())
    return y_TD


@dataclass(frozen=True)
class _Setting:
    """State that a recomputation needs beyond tensors: that of autocast and of the generators."""

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
    """The chunks, and the modules that run them."""

    dispatcher: TokenDispatcher
    chunks: list[Chunk]
    experts: nn.Module
    names: tuple[str, ...]

    def run(
        self, chunk: Chunk, rows_RD: Tensor, weights_TK: Tensor, parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, torch.dtype, DispatchMetadata]:
        """A chunk's part of the sums, with these parameters; dtype of the outputs; tables."""
        bound = dict(zip(self.names, parameters, strict=True))
        rows, offsets, metadata = self.dispatcher.send(rows_RD, chunk, weights_TK)
        weights, metadata = take_weights(self.experts, self.dispatcher, rows, metadata)
        out = torch.func.functional_call(self.experts, bound, (rows, offsets, *weights))
        check_results(self.experts, self.dispatcher, rows, out)
        # A token's rows may lie in several chunks: their sum is rounded once, at the end.
        return self.dispatcher.combine_part(out, metadata), out.dtype, metadata


class _RunChunks(torch.autograd.Function):
    """Runs chunks one after another, and each once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, x_TD: Tensor, weights_TK: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.work, ctx.setting = work, _Setting.now(x_TD.device, work.experts)
        ctx.save_for_backward(x_TD, weights_TK, *parameters)
        y_TD: Tensor | None = None
        for chunk in work.chunks:
            part_TD, dtype, _ = work.run(chunk, chunk.take(x_TD), weights_TK, parameters)
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
        # Gradients of the weights first, then of every parameter that wants one.
        wanted = [leaf for leaf in (weights, *leaves) if leaf.requires_grad]
        sums: list[Tensor | None] = [None] * len(wanted)
        with ctx.setting.restored():
            for chunk in work.chunks:
                rows = chunk.take(x_TD.detach()).requires_grad_()
                part_TD, _, metadata = work.run(chunk, rows, weights, leaves)
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
                        part_TD = chunk.return_sums(grad_rows, metadata.permutation)
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
