"""Numbers of operations of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

The rules are those of torch: a product of M x K by K x N counts 2 M N K, a mask takes nothing off,
and work on single elements counts nothing. Recurrences count the products of their chunks of 64
positions.
"""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_OPS = torch.ops.moe_ext
_CHUNK = 64


def delta_rule_flops(dim: int, v_dim: int, *, has_beta: bool) -> int:
    """Return the operations of `gated_delta_rule`, forward, for a head and a position."""
    # Products of queries with the state, of keys with values for the state, and of queries with
    # keys and scores with values in a chunk.
    found = 4 * dim * v_dim + 2 * _CHUNK * (dim + v_dim)
    if has_beta:
        # Products for the triangular system of a chunk, its solution, and products with the state.
        found += 2 * _CHUNK * dim + _CHUNK * (v_dim + dim) + 2 * dim * v_dim
    return found


@register_flop_formula(
    [
        *(_OPS.grouped_mm, _OPS.masked_mm, _OPS.quantized_mm),
        *(_OPS.router_logits, _OPS._router_logits_backward_x),
    ]
)
def _product(x: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * prod(out_shape) * x[-1]


@register_flop_formula([_OPS._grouped_mm_backward_weight, _OPS._router_logits_backward_weight])
def _weight_gradient(grad: Any, x: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(grad) * x[-1]


@register_flop_formula(_OPS.attention_block)
def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(q[:3]) * k[2] * (q[3] + v[3])


@register_flop_formula(_OPS.attention_block_backward)
def _attention_backward(
    _grad: Any, _lse: Any, _delta: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any
) -> int:
    return 2 * prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


@register_flop_formula(_OPS.gated_delta_rule)
def _delta_rule(q: Any, _k: Any, v: Any, _g: Any, beta: Any, *_: Any, **__: Any) -> int:
    return prod(v[:3]) * delta_rule_flops(q[3], v[3], has_beta=beta is not None)


@register_flop_formula(_OPS.selective_scan)
def _scan(x: Any, _dt: Any, rates: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * rates[1]


@register_flop_formula(_OPS.causal_conv1d)
def _convolution(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[-1]


def _register_behind(operator: Any, count: int, formula: Any, *, times: int = 1) -> None:
    """Register a formula, times a number, for an operator with `count` more arguments in front."""

    @register_flop_formula(operator)
    def _(*arguments: Any, **_: Any) -> int:
        return times * formula(*arguments[count:])


_register_behind(_OPS._grouped_mm_backward_weight_add_, 1, _weight_gradient)
_register_behind(_OPS.attention_block_, 2, _attention)
_register_behind(_OPS._gated_delta_rule_backward, 2, _delta_rule, times=2)
_register_behind(_OPS._selective_scan_backward, 2, _scan, times=2)
_register_behind(_OPS._causal_conv1d_backward, 1, _convolution, times=2)
