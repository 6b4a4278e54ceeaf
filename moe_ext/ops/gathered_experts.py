"""Gated experts by quack-kernels, whose first product gathers the tokens and applies the gate.

The backward pass needs neither gathered rows of the tokens nor the results of the experts.

Shape suffixes: D model, E experts, F ffn, K top-k, N rows, T tokens, U = 2F.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ext._trial import first_mistake
from moe_ext.ops import grouped_providers
from moe_ext.ops.activation import gated_activation
from moe_ext.ops.autograd import refuse_second_derivative
from moe_ext.ops.permutation import Permutation, permute_tokens

# Names of gates here, and their names in quack-kernels.
_GATES = {"swiglu": "swiglu", "reglu": "reglu", "geglu_tanh": "geglu"}


def gather_of(x_TD: Tensor, topk_idx_TK: Tensor, num_experts: int) -> Permutation:
    """Return the tables of a permutation, without its rows."""
    # The operator copies all columns that it is given, so it gets only 16 bytes of each token.
    return permute_tokens(x_TD.detach()[:, :8], topk_idx_TK, num_experts)[1]


def gathers(x_TD: Tensor, gate_up_EUD: Tensor, down_EDF: Tensor, kind: str) -> bool:
    """Return True if quack-kernels are chosen, serve these tensors, and were right in a trial.

    Tensors must be plain and of one dtype, outside of graphs of compile.

    NOTE: device-to-host sync, at the first call for a device and dtype.
    """
    if kind not in _GATES or down_EDF.shape[2] % 8 != 0:
        return False
    if grouped_providers.chosen_product(x_TD, gate_up_EUD) is None:
        return False
    key = (x_TD.device, x_TD.dtype)
    if key not in grouped_providers.faults:
        if x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        grouped_providers.faults[key] = _try(*key)
    return not grouped_providers.faults[key]


def gathered_experts(
    x_TD: Tensor,
    gate_up_EUD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    gather: Permutation,
    *,
    kind: str = "swiglu",
    layout: str = "concatenated",
) -> Tensor:
    r"""Runs each token through its experts: :math:`y_t = \sum_k w_{tk} W^{down} h(W^{up} x_t)`.

    Args:
        x_TD: tokens, bfloat16 or float16.
        gate_up_EUD: `[E, 2F, D]` in the dtype of x.
        down_EDF: `[E, D, F]`.
        weights_TK: float32.
        gather: tables of the tokens' experts, by `gather_of`.
        kind: "swiglu", "reglu" or "geglu_tanh".
        layout: layout of the 2F features, see `gated_activation`.

    Returns:
        `[T, D]`. Differentiable once in x, both weights and `weights_TK`.
    """
    return _Gathered.apply(x_TD, gate_up_EUD, down_EDF, weights_TK, gather, _GATES[kind], layout)


class _Gathered(torch.autograd.Function):
    """The products leave out rows of no expert, and nothing reads these rows afterwards."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_up_EUD: Tensor,
        down_EDF: Tensor,
        weights_TK: Tensor,
        gather: Permutation,
        gate: str,
        layout: str,
    ) -> Tensor:
        # Tuning would time kernels at the first use of a shape, and counts of rows change with
        # every batch.
        options = {"cu_seqlens_m": gather.expert_offsets.int(), "tuned": False}
        x_TD, top_k = x_TD.contiguous(), weights_TK.shape[1]
        token_N = (gather.slot_of_row // top_k).clamp_min(0).int()
        concat = ("B",) if layout == "concatenated" else None
        quack = grouped_providers.quack()
        # Columns of gate and up alternate in `up_NU`, whatever the layout of the weight.
        up_NU, hidden_NF = quack.gemm_gated(
            *(x_TD, gate_up_EUD.transpose(1, 2)),
            activation=gate,
            A_idx=token_N,
            concat_layout=concat,
            **options,
        )
        y_ND = quack.gemm(hidden_NF, down_EDF.transpose(1, 2), **options)
        tables = (gather.slot_of_row, gather.row_of_slot)
        ctx.save_for_backward(x_TD, gate_up_EUD, down_EDF, weights_TK, *tables, up_NU, token_N)
        ctx.options, ctx.gate, ctx.concat = options, gate, concat
        return torch.ops.moe_ext.unpermute_tokens(y_ND, *tables, top_k, weights_TK)

    @staticmethod
    @refuse_second_derivative("gathered_experts")
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_up_EUD, down_EDF, weights_TK, *tables, up_NU, token_N = ctx.saved_tensors
        slot_of_row, row_of_slot = tables
        quack, options, grad_TD = grouped_providers.quack(), ctx.options, grad_TD.contiguous()
        # `hidden_NF` is the activation, computed again, times the weight of the row. `dots_N` is
        # the product of each row's activation with its gradient, without the weight.
        grad_NU, hidden_NF, dots_N = quack.gemm_dgated(
            *(grad_TD, down_EDF, up_NU),
            activation=ctx.gate,
            colvec_scale=weights_TK.reshape(-1)[slot_of_row.clamp_min(0)].float(),
            colvec_reduce=True,
            A_idx=token_N,
            **options,
        )
        by_expert = {"cu_seqlens_k": options["cu_seqlens_m"], "A_idx": token_N, "tuned": False}
        grad_x = grad_up = grad_down = grad_weights = None
        if ctx.needs_input_grad[0]:
            rows_ND = quack.gemm(grad_NU, gate_up_EUD, concat_layout=ctx.concat, **options)
            top_k = weights_TK.shape[1]
            grad_x = torch.ops.moe_ext.unpermute_tokens(rows_ND, *tables, top_k, None)
        if ctx.needs_input_grad[1]:
            num_experts, up_dim, dim = gate_up_EUD.shape
            # `gemm` writes nothing for experts without rows.
            sums_EDU = grad_NU.new_zeros((num_experts, dim, up_dim))
            quack.gemm(x_TD.t(), grad_NU, out=sums_EDU, **by_expert)
            grad_up = sums_EDU.transpose(1, 2)
            if ctx.concat is not None:
                grad_up = grad_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        if ctx.needs_input_grad[2]:
            grad_down = torch.zeros_like(down_EDF)
            quack.gemm(grad_TD.t(), hidden_NF, out=grad_down, **by_expert)
        if ctx.needs_input_grad[3]:
            dots_S = dots_N[row_of_slot.clamp_min(0)]
            grad_weights = dots_S.where(row_of_slot >= 0, 0.0).view_as(weights_TK)
            grad_weights = grad_weights.to(weights_TK.dtype)
        return grad_x, grad_up, grad_down, grad_weights, None, None, None


# Largest relative error in a trial. Right results in 16 bits are far below, wrong ones far above.
_MOST_ERROR = 0.03


@torch.enable_grad()
def _try(device: torch.device, dtype: torch.dtype) -> str:
    """Compare a small layer with our operators. Return the mistake; empty if there is none."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((200, 64), (3, 128, 64), (3, 64, 64), (200, 64))
    x, up, down, grad = (
        torch.randn(size, generator=generator, device="cpu").mul(0.3).to(device, dtype)
        for size in sizes
    )
    # The last expert gets no token, and every fourth token has no second expert.
    idx = torch.tensor([[0, 1], [1, 0], [1, -1], [0, 1]], device=device).repeat(50, 1)
    weights = torch.rand(200, 2, generator=generator, device="cpu").to(device)
    leaves = x, up, down, weights = tuple(
        t.detach().requires_grad_() for t in (x, up, down, weights)
    )
    rows, p = permute_tokens(x, idx, 3)
    op = torch.ops.moe_ext
    hidden = gated_activation(op.grouped_mm(rows, up, p.expert_offsets, None))
    y = op.grouped_mm(hidden, down, p.expert_offsets, None)
    y = op.unpermute_tokens(y, p.slot_of_row, p.row_of_slot, 2, weights)
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    def run() -> list[Tensor]:
        y = gathered_experts(x, up, down, weights, gather_of(x, idx, 3))
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    inputs = ("x", "the up projection", "the down projection", "the weights")
    names = ["output", *(f"gradient of {name}" for name in inputs)]
    return first_mistake(run, [exact.double() for exact in wanted], names, _MOST_ERROR)
