"""Checks of the arguments that all attention functions share.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Require = Callable[[bool, str, str, object], None]


def refuse(operation: str, argument: str, rule: str, value: object) -> NoReturn:
    """Raise a ValueError about an argument, with the rule that its value breaks."""
    raise ValueError(f"{operation}: expected {argument} to be {rule}, got {value}")


def requires(operation: str) -> Require:
    """A function (condition, argument, rule, value) that raises ValueError if not `condition`."""

    def require(condition: bool, argument: str, rule: str, value: object) -> None:
        if not condition:
            refuse(operation, argument, rule, value)

    return require


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, require: Require
) -> None:
    """ValueError unless dtypes, devices and shapes match."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(isinstance(x, Tensor), name, "a tensor of shape [B, H, L, D]", type(x).__name__)
        require(x.dtype in DTYPES, name, "float32, bfloat16, float16 or float64", x.dtype)
        require(x.dim() == 4, name, "of shape [B, H, L, D]", list(x.shape))
        require(x.dtype == q.dtype, name, f"{q.dtype} like q", x.dtype)
        require(x.device == q.device, name, f"on {q.device} like q", x.device)
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    rule = f"[{batch}, Hkv, {length}, {dim}] to go with q"
    require(k.shape == (batch, kv_heads, length, dim), "k", rule, list(k.shape))
    rule = f"[{batch}, {kv_heads}, {length}, Dv] to go with k"
    require(v.shape[:3] == k.shape[:3], "v", rule, list(v.shape))
    multiple = heads % kv_heads == 0 if kv_heads else heads == 0
    require(multiple, "heads of q", f"a multiple of the {kv_heads} heads of k", heads)
    if key_mask is not None:
        require(isinstance(key_mask, Tensor), "key_mask", "a tensor", type(key_mask).__name__)
        fits = key_mask.shape == (batch, length) and key_mask.dtype == torch.bool
        found = f"{key_mask.dtype} {list(key_mask.shape)}"
        require(fits, "key_mask", f"bool [{batch}, {length}], this rank's keys", found)
        require(key_mask.device == q.device, "key_mask", f"on {q.device} like q", key_mask.device)


def check_latents(
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    key_mask: Tensor | None,
    require: Require,
) -> None:
    """ValueError unless latents `[B, 1, L, C]`, rope keys and up-projections match."""

    def named(condition: bool, argument: str, rule: str, value: object) -> None:
        require(condition, {"k": "latent", "v": "rope_key"}.get(argument, argument), rule, value)

    # Latents and rope keys are checked as keys and values of one head. C differs from the head dim
    # of q, so slices of width 0 stand for q and the latents.
    check_tensors(q[..., :0], latent[..., :0], rope, key_mask, named)
    for name, x in (("up_k", up_k), ("up_v", up_v)):
        require(x.dim() == 3, name, "of three dimensions, heads first", list(x.shape))
        require(x.dtype == q.dtype, name, f"{q.dtype} like q", x.dtype)
        require(x.device == q.device, name, f"on {q.device} like q", x.device)
    heads, nope = q.shape[1], q.shape[3] - rope.shape[3]
    rule = f"[{heads}, {nope}, {latent.shape[3]}] to go with q, latent and rope_key"
    require(up_k.shape == (heads, nope, latent.shape[3]), "up_k", rule, list(up_k.shape))
    rule = f"[{heads}, Dv, {latent.shape[3]}] to go with up_k"
    require(up_v.shape[::2] == up_k.shape[::2], "up_v", rule, list(up_v.shape))


def check_per_head(name: str, values: Tensor | None, q: Tensor, require: Require) -> None:
    """ValueError unless `values` is None or has a number for each head of q."""
    if values is not None:
        heads = q.shape[1]
        require(isinstance(values, Tensor), name, f"a tensor [{heads}]", type(values).__name__)
        require(values.shape == (heads,), name, f"[{heads}]", list(values.shape))
        require(values.dtype in DTYPES, name, "floating point", values.dtype)
        require(values.device == q.device, name, f"on {q.device} like q", values.device)


def check_attn_mask(attn_mask: Tensor | None, q: Tensor, require: Require) -> None:
    """ValueError unless `attn_mask` is None or has a row for each query of this rank."""
    if attn_mask is None:
        return
    rule = "a tensor (blocks of flex_attention: is_causal, window, cu_seqlens, prefix_len)"
    require(isinstance(attn_mask, Tensor), "attn_mask", rule, type(attn_mask).__name__)
    require(attn_mask.device == q.device, "attn_mask", f"on {q.device} like q", attn_mask.device)
    (batch, heads, length, _), shape = q.shape, attn_mask.shape
    fits = attn_mask.dim() == 4 and shape[0] in (1, batch) and shape[1] in (1, heads)
    rule = f"[{batch} or 1, {heads} or 1, {length}, S], this rank's queries by all keys"
    require(fits and shape[2] == length, "attn_mask", rule, list(shape))
    known = attn_mask.dtype == torch.bool or attn_mask.dtype in DTYPES
    require(known, "attn_mask", "bool or floating", attn_mask.dtype)


def message_device(*tensors: object) -> torch.device:
    """Device for the messages of a call: the device of its first tensor."""
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))


def scale_of(scale: float | None, head_dim: int) -> float:
    """The factor on scores, by default 1 / sqrt(D)."""
    return scale if scale is not None else 1 / math.sqrt(max(head_dim, 1))


def draw_seed(dropout_p: float) -> int:
    """A seed from torch's generator; without dropout 0, and the generator is left alone."""
    return int(torch.randint(1 << 62, ())) if dropout_p > 0 else 0


def wants_grad(*tensors: Tensor | None) -> int:
    """Return 1 if the call will have a backward pass, else 0.

    Ranks compare the result: the backward passes of other ranks would wait for a rank without one.
    """
    learns = any(x is not None and x.requires_grad for x in tensors)
    return int(torch.is_grad_enabled() and learns)
