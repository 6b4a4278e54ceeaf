"""Activations composed of torch's own functions.

Shape suffixes: F ffn; ``...`` any leading dimensions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ext.reference.gating import widened

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}
_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def gated_activation(
    x: Tensor,
    *,
    kind: str = "swiglu",
    layout: str = "concatenated",
    slot_weights: Tensor | None = None,
    slot_of_row: Tensor | None = None,
) -> Tensor:
    """Same as `moe_ext.ops.gated_activation`: split the columns, activate the gate, multiply."""
    gate, up = x.chunk(2, dim=-1) if layout == "concatenated" else (x[..., ::2], x[..., 1::2])
    y = _FUNCTIONS[_GATES[kind]](widened(gate)) * widened(up)
    if slot_weights is not None and slot_of_row is not None:
        has_slot = slot_of_row >= 0
        weights = torch.zeros(x.shape[0], dtype=y.dtype)
        weights[has_slot] = slot_weights.reshape(-1)[slot_of_row[has_slot]].to(y.dtype)
        y = y * weights[:, None]
    return y.to(x.dtype)


def activation(x: Tensor, *, kind: str) -> Tensor:
    """Same as `moe_ext.ops.activation`."""
    return _FUNCTIONS[kind](widened(x)).to(x.dtype)
