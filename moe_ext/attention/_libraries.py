"""Attention kernels of torch that serve a whole or a causal block, with its log-sum-exp.

They read and write the dtype of their inputs, so each block is rounded. A library never gets a
block without queries or keys, nor a row that sees no key: what they make of these differs.

Shapes: B batch, H heads, Hkv heads of keys and values, L queries, M keys, D head dim.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)


class Library(Protocol):
    """A kernel with its backward pass; causal blocks have as many queries as keys."""

    name: str

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether it takes tensors of these devices, dtypes and shapes."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out `[B, H, L, D]` in the dtype of q, lse `[B, H, L]` float32)."""

    def backward(
        self,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in the dtype of q, given out and lse over the keys of all blocks."""


class _FlashCpu:
    """FlashAttention of torch's CPU backend.

    For 16 bits alone: of float32 blocks ours takes no longer.
    """

    name = "flash (CPU)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return q.device.type == "cpu" and q.dtype in _HALVES and v.shape[3] == q.shape[3]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *tensors, out, lse, 0.0, is_causal, scale=scale
        )
        return dq, dk, dv


class _FlashCuda:
    """FlashAttention-2 in torch's CUDA backend: 16 bits on cards of capability 8.0 and later."""

    name = "flash (CUDA)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        dim = q.shape[3]
        return (
            q.device.type in ("cuda", "meta")
            and q.dtype in _HALVES
            and v.shape[3] == dim
            and dim % 8 == 0
            and dim <= 256
            and _capability(q.device) >= (8, 0)
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1]

    def backward(
        self,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths: list[Any] = [None, None, tensors[0].shape[2], tensors[1].shape[2]]
        # Two states of a random generator that nothing is drawn from.
        states = lse.new_zeros((2, 2), dtype=torch.int64).unbind()
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, *tensors, out, lse, *lengths, 0.0, is_causal, *states, scale=scale
        )
        return dq, dk, dv


class _EfficientCuda:
    """The memory-efficient kernel of torch's CUDA backend: float32 too, a key head per head."""

    name = "efficient (CUDA)"
    # Rows that its log-sum-exp is filled up to a multiple of.
    _ROWS = 32

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        even = 16 // q.dtype.itemsize
        return (
            q.device.type in ("cuda", "meta")
            and q.dtype in (*_HALVES, torch.float32)
            and q.shape[1] == k.shape[1]
            and q.shape[3] % even == 0
            and v.shape[3] % even == 0
            and (q.dtype != torch.bfloat16 or _capability(q.device) >= (8, 0))
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        return found[0], found[1][:, :, : q.shape[2]]

    def backward(
        self,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        missing = -lse.shape[2] % self._ROWS
        lse = torch.nn.functional.pad(lse, (0, missing), value=torch.inf)
        states = lse.new_zeros((2,), dtype=torch.int64).unbind()
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            *tensors,
            None,
            out,
            lse,
            *states,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return dq, dk, dv


class _CudnnCuda:
    """The kernel of cuDNN: 16 bits, for values of another width than keys."""

    name = "cuDNN (CUDA)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return (
            q.device.type in ("cuda", "meta")
            and q.dtype in _HALVES
            and q.shape[3] % 8 == 0
            and v.shape[3] % 8 == 0
            and max(q.shape[3], v.shape[3]) <= 128
            and _capability(q.device) >= (8, 0)
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1].squeeze(-1)

    def backward(
        self,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths: list[Any] = [None, None, tensors[0].shape[2], tensors[1].shape[2]]
        states = lse.new_zeros((2,), dtype=torch.int64).unbind()
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            *tensors,
            out,
            lse[..., None].contiguous(),
            *states,
            None,
            *lengths,
            0.0,
            is_causal,
            scale=scale,
        )
        return dq, dk, dv


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


# The first that serves a block gets it.
LIBRARIES: tuple[Library, ...] = (_FlashCpu(), _FlashCuda(), _EfficientCuda(), _CudnnCuda())


def library_for(q: Tensor, k: Tensor, v: Tensor) -> Library | None:
    """The kernel for blocks of these tensors, or None."""
    if not (q.numel() and k.numel() and v.numel()):
        return None
    return next((library for library in LIBRARIES if library.serves(q, k, v)), None)
