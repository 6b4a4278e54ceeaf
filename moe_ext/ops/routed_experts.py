"""Gated experts in one call, from tokens and the choice of a gate to the sums of the tokens.

Shape suffixes: D model, E experts, F ffn, K top-k, T tokens, U = 2F.
"""

import torch
from torch import Tensor

from moe_ext import _runtime_library
from moe_ext.ops import grouped_providers
from moe_ext.ops.gathered_experts import gather_of, gathered_experts, gathers
from moe_ext.ops.grouped_gemm import row_alignment, wants_ends


def routed_experts(
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_EUD: Tensor,
    down_EDF: Tensor,
    *,
    kind: str,
    layout: str,
    filled: bool = False,
) -> tuple[Tensor, Tensor] | None:
    r"""Runs each token through its experts: :math:`y_t = \sum_k w_{tk} W^{down} h(W^{up} x_t)`.

    The call runs the operators that a caller from Python would run one after the other, with the
    same bits. Intermediate results cannot be read afterwards.

    NOTE: device-to-host sync, if quack-kernels are chosen, at the first call for a device and
    dtype.

    Args:
        x_TD: tokens, which no autocast casts.
        topk_idx_TK: int64 expert of each slot, -1 for none.
        topk_weights_TK: weight of each slot.
        gate_up_EUD: `[E, 2F, D]`.
        down_EDF: `[E, D, F]`.
        kind: the activation, see `gated_activation`.
        layout: layout of the 2F features, see `gated_activation`.
        filled: True if no slot is -1.

    Returns:
        `[T, D]`, and the `num_dropped` of `permute_tokens`. None inside a graph of compile, without
        the compiled module, and for tensors that are not plain or not of one dtype.
    """
    # Sharded parameters of FSDP2 are DTensors here: they are whole only inside the experts'
    # `forward`.
    plain = {type(x_TD), type(gate_up_EUD), type(down_EDF)} <= {Tensor, torch.nn.Parameter}
    one_dtype = x_TD.dtype == gate_up_EUD.dtype == down_EDF.dtype
    if torch.compiler.is_compiling() or not plain or not one_dtype:
        return None
    if grouped_providers.CHOSEN == "quack":
        stored = gate_up_EUD.is_contiguous() and down_EDF.is_contiguous()
        if not stored or not gathers(x_TD, gate_up_EUD, down_EDF, kind):
            return None
        gather = gather_of(x_TD, topk_idx_TK, gate_up_EUD.shape[0])
        y_TD = gathered_experts(
            *(x_TD, gate_up_EUD, down_EDF, topk_weights_TK, gather), kind=kind, layout=layout
        )
        return y_TD, gather.num_dropped
    module = _runtime_library.load()
    if module is None or x_TD.is_meta:
        return None
    weights_TK = topk_weights_TK.to(torch.float64 if x_TD.dtype == torch.float64 else torch.float32)
    align = row_alignment(x_TD, topk_idx_TK.numel(), gate_up_EUD.shape[0])
    return module.routed_experts(
        *(x_TD, topk_idx_TK, weights_TK, gate_up_EUD, down_EDF, kind, layout, align),
        filled and wants_ends(x_TD),
    )
