"""Products between shards of the sequence and shards of a weight, each with its collective.

Shapes: N rows of all ranks, n rows of this rank, D model, F this rank's part of the ffn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.attention.sequence_collectives import (
    Shards,
    start_all_gather,
    start_reduce_scatter,
)
from moe_ext.distributed.collectives import sum_over_ranks_
from moe_ext.ops import routing_uniform
from moe_ext.ops._autograd import refuse_second_derivative

_DROPOUT_STREAM = 4


def _weight_grad(grad_NM: Tensor, x_NK: Tensor) -> Tensor:
    return grad_NM.mT @ x_NK


class _ColumnParallel(torch.autograd.Function):
    """All-gather, then the product with some rows of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, shards: Shards, keep: bool
    ) -> Tensor:
        x_ND = start_all_gather(x_nD, shards).wait()
        ctx.save_for_backward(x_ND if keep else x_nD, weight_FD)
        ctx.shards, ctx.keep = shards, keep
        return F.linear(x_ND, weight_FD, bias_F)

    @staticmethod
    @refuse_second_derivative("SequenceParallelMLP")
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight_FD = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        gather = None
        if of_weight and not ctx.keep:
            gather = start_all_gather(kept, ctx.shards)
        scatter = start_reduce_scatter(grad_NF @ weight_FD, ctx.shards) if of_x else None
        # While the gradient of x is underway.
        grad_bias = grad_NF.sum(0) if of_bias else None
        grad_weight = None
        if of_weight:
            grad_weight = _weight_grad(grad_NF, kept if gather is None else gather.wait())
        grad_x = None if scatter is None else scatter.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _RowParallel(torch.autograd.Function):
    """The product with some columns of the weight, then reduce-scatter and the bias.

    The backward pass has the gradient of all rows on every rank: the bias needs no sum over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, shards: Shards
    ) -> Tensor:
        ctx.save_for_backward(x_NF, weight_DF)
        ctx.shards = shards
        y_nD = start_reduce_scatter(x_NF @ weight_DF.mT, shards).wait()
        return y_nD if bias_D is None else y_nD + bias_D

    @staticmethod
    @refuse_second_derivative("SequenceParallelMLP")
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor | None, ...]:
        x_NF, weight_DF = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_ND = start_all_gather(grad_nD, ctx.shards).wait()
        grad_x = grad_ND @ weight_DF if of_x else None
        grad_weight = _weight_grad(grad_ND, x_NF) if of_weight else None
        return grad_x, grad_weight, grad_ND.sum(0) if of_bias else None, None


class _SummedGrads(torch.autograd.Function):
    """Parameters as they are; their gradients are summed over the ranks, in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A sum of rounded sums would cost a bfloat16 parameter half of its digits.
        dtype = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        row = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        sum_over_ranks_(row, ctx.group, operation="SequenceParallelMLP backward")
        parts = row.split([grad.numel() for grad in grads])
        return None, *(p.view_as(g).to(g.dtype) for p, g in zip(parts, grads, strict=True))


class _ScaledGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Dropout(torch.autograd.Function):
    """Drops by seed, row and column alone; nothing but the rows' numbers is kept."""

    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, p: float, seed: int, token_idx_n: Tensor) -> Tensor:
        ctx.p, ctx.seed, ctx.token_idx = p, seed, token_idx_n
        return _dropped(x_nD, p, seed, token_idx_n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor, None, None, None]:
        return _dropped(grad_nD, ctx.p, ctx.seed, ctx.token_idx), None, None, None


def _dropped(x_nD: Tensor, p: float, seed: int, token_idx_n: Tensor) -> Tensor:
    state = torch.tensor([seed, 0, 0, 0], device=x_nD.device)
    drawn_nD = routing_uniform(state, *x_nD.shape, stream=_DROPOUT_STREAM, token_idx=token_idx_n)
    return (x_nD / (1 - p)).masked_fill_(drawn_nD < p, 0)


def column_parallel(
    x_nD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, shards: Shards, *, keep: bool
) -> Tensor:
    """`[N, F]` of all ranks' rows; `keep` them for the backward pass, or gather again there."""
    y_NF: Tensor = _ColumnParallel.apply(x_nD, weight_FD, bias_F, shards, keep)
    return y_NF


def row_parallel(x_NF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, shards: Shards) -> Tensor:
    """`[n, D]`, this rank's rows of the sum over ranks, and the bias."""
    y_nD: Tensor = _RowParallel.apply(x_NF, weight_DF, bias_D, shards)
    return y_nD


def with_summed_grads(
    group: ProcessGroup | None, parameters: list[Tensor | None]
) -> list[Tensor | None]:
    """The parameters, for use on this rank's rows alone; their gradients are those of all rows."""
    found = list(parameters)
    trained = [i for i, p in enumerate(parameters) if p is not None and p.requires_grad]
    if trained and torch.is_grad_enabled():
        summed = _SummedGrads.apply(group, *(parameters[i] for i in trained))
        for i, tensor in zip(trained, summed, strict=True):
            found[i] = tensor
    return found


def with_scaled_grad(x: Tensor | None, factor: float) -> Tensor | None:
    """The tensor; its gradient times `factor`."""
    if x is None or factor == 1.0:
        return x
    scaled: Tensor = _ScaledGrad.apply(x, factor)
    return scaled


def drop(x_nD: Tensor, p: float, seed: int, token_idx_n: Tensor) -> Tensor:
    """Zeros with probability p, the rest divided by 1 - p; by seed, token and column alone."""
    dropped: Tensor = _Dropout.apply(x_nD, p, seed, token_idx_n)
    return dropped
