"""Token permutation: rows sorted by expert, and the weighted way back.

Shape suffixes: T tokens, D model, E experts, K top-k, N permuted rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_autograd, register_derivatives
from moe_ext.ops.fakes import register_fake_like


@dataclass(frozen=True)
class Permutation:
    """Tables of a permutation; slot ``t * K + k`` is choice ``k`` of token ``t``.

    Attributes:
        slot_of_row (Tensor[N]): int64, slot that a row came from; -1 for a row without a slot.
        row_of_slot (Tensor[T * K]): int64, row of a slot; -1 for a slot that has no row.
        expert_offsets (Tensor[E + 1]): int64, expert ``e`` owns the rows from
            ``expert_offsets[e]`` to ``expert_offsets[e + 1]``, its alignment padding included.
            Rows past the last offset belong to no expert.
        num_tokens_per_expert (Tensor[E]): int64, rows of each expert that carry a token.
        num_dropped (Tensor[]): int64, slots refused for lack of capacity.
        top_k (int): slots of each token, K.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    expert_offsets: Tensor
    num_tokens_per_expert: Tensor
    num_dropped: Tensor
    top_k: int


def permute_tokens(
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    num_experts: int,
    *,
    topk_weights: Tensor | None = None,
    capacity: int | None = None,
    drop_policy: str = "position",
    align: int = 1,
) -> tuple[Tensor, Permutation]:
    """Copies each token once per chosen expert, rows sorted by expert and, within one, by slot.

    The number of rows is ``N = min(T * K, E * capacity) + E * (align - 1)``. This number does not
    depend on the routing, so that nothing waits for the counts. Rows without a slot are zero.

    Args:
        x_TD (Tensor[T, D]): tokens, any dtype.
        topk_idx_TK (Tensor[T, K]): int32 or int64 expert of each slot; -1 for a slot that is not
            routed.
        num_experts (int): number of experts E, >= 1.
        topk_weights (Tensor[T, K]): weights that `drop_policy="score"` ranks by; neither applied
            nor differentiated.
        capacity (int): rows an expert keeps at most, >= 1; None keeps every slot.
        drop_policy (str): ``"position"`` keeps the first slots of an overfull expert, ``"score"``
            those with the largest weights, ties to the earlier slot.
        align (int): each expert's rows are padded with zero rows to a multiple of this, >= 1.

    Returns:
        tuple[Tensor[N, D], Permutation]: the rows, and the tables for `unpermute_tokens`.
        Differentiable in ``x_TD``.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape, or, on CPU, an index is out
            of range. On CUDA such a slot counts as not routed.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    rows_ND, *tables = torch.ops.moe_ext.permute_tokens(
        x_TD,
        topk_idx_TK,
        num_experts,
        None if topk_weights is None else topk_weights.detach(),
        capacity,
        drop_policy,
        align,
    )
    fields = (*tables, topk_idx_TK.shape[1])
    return rows_ND, Permutation(*fields)


@torch.library.register_fake("moe_ext::permute_tokens")
def _(
    x: Tensor,
    topk_idx: Tensor,
    num_experts: int,
    topk_weights: Tensor | None = None,
    capacity: int | None = None,
    drop_policy: str = "position",
    align: int = 1,
) -> tuple[Tensor, ...]:
    num_slots = topk_idx.shape[0] * topk_idx.shape[1]
    kept = num_slots if capacity is None else torch.sym_min(num_slots, num_experts * capacity)
    num_rows = kept + num_experts * (align - 1)
    sizes = ((num_rows,), (num_slots,), (num_experts + 1,), (num_experts,), ())
    tables = (topk_idx.new_empty(size, dtype=torch.int64) for size in sizes)
    return x.new_empty((num_rows, x.shape[1])), *tables


# Every row is a copy of its token, whose gradient is therefore the sum of those of its rows.
register_derivatives(
    "permute_tokens",
    {"x": "unpermute_tokens(grad_rows, slot_of_row, row_of_slot, columns(topk_idx))"},
)


def unpermute_tokens(
    rows_ND: Tensor, permutation: Permutation, topk_weights_TK: Tensor | None = None
) -> Tensor:
    r"""Sums each token's rows: :math:`y_t = \sum_k w_{t,k} \, \mathrm{rows}_{r(t,k)}`.

    Slots without a row add nothing. Sums are taken in float32 (float64 for float64 rows), in the
    order of k and without atomics: the same bits for any number of threads.

    Args:
        rows_ND (Tensor[N, D]): float32, float64, bfloat16 or float16.
        permutation (Permutation): the tables that `permute_tokens` returned with the rows.
        topk_weights_TK (Tensor[T, K]): weight of each slot, any floating dtype; None for ones.

    Returns:
        Tensor[T, D]: in the dtype of the rows. Differentiable in the rows and in the weights.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape. Tables that point outside
            are refused on CPU alone.
    """
    weights_TK = topk_weights_TK
    if weights_TK is not None:
        weights_TK = weights_TK.to(
            torch.float64 if rows_ND.dtype == torch.float64 else torch.float32
        )
    return torch.ops.moe_ext.unpermute_tokens(
        rows_ND, permutation.slot_of_row, permutation.row_of_slot, permutation.top_k, weights_TK
    )


@torch.library.register_fake("moe_ext::unpermute_tokens")
def _(rows: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, top_k: int, *_rest: Any) -> Tensor:
    return rows.new_empty((row_of_slot.shape[0] // top_k, rows.shape[1]))


register_derivatives(
    "unpermute_tokens",
    {"rows": "_gather_tokens(grad_result, slot_of_row, top_k)"},
    given=(
        "topk_weights",
        {
            "rows, topk_weights": "_unpermute_tokens_backward(grad_result, rows, slot_of_row, "
            "row_of_slot, topk_weights)"
        },
    ),
)


register_fake_like("moe_ext::_unpermute_tokens_backward", 1, 4)


@torch.library.register_fake("moe_ext::_gather_tokens")
def _(x: Tensor, slot_of_row: Tensor, top_k: int) -> Tensor:
    return x.new_empty((slot_of_row.shape[0], x.shape[1]))


def _gather_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, slot_of_row, ctx.top_k = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(slot_of_row)


def _gather_backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
    (slot_of_row,) = ctx.saved_tensors
    row_of_slot = slot_of_row.new_full((ctx.num_tokens * ctx.top_k + 1,), -1)
    # Rows without a slot (-1) write to the last place, which is cut off.
    row_of_slot[slot_of_row] = torch.arange(slot_of_row.shape[0], device=slot_of_row.device)
    tables = slot_of_row, row_of_slot[:-1]
    return torch.ops.moe_ext.unpermute_tokens(grad_rows, *tables, ctx.top_k), None, None


register_autograd("moe_ext::_gather_tokens", _gather_backward, setup_context=_gather_setup_context)
