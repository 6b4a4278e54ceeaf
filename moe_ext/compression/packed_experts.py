"""Experts of packed weights, for inference with few tokens on a CPU.

Shape suffixes: N rows, D model, E experts, M rows and K columns of one weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_choice
from moe_ext.nn import GroupedExperts
from moe_ext.nn.expert_activation import run_activation

_OP = "PackedExperts"


@dataclass(frozen=True)
class _Coded:
    """A weight `[M, K]` of codes, with its largest elements beside them."""

    codes: Tensor
    scales: Tensor
    outliers: Tensor
    columns: Tensor
    offsets: Tensor
    bits: int

    # Rows above which the weight is unpacked once, for a dense product (`run.py sparsity`).
    few_rows: ClassVar[int] = 16

    @classmethod
    def of(cls, weight_MK: Tensor, bits: int, block: int, fraction: float) -> _Coded:
        num_rows, dim = weight_MK.shape
        rest, count = torch.zeros(weight_MK.numel()), math.ceil(fraction * weight_MK.numel())
        idx = torch.zeros(0, dtype=torch.long)
        if count:
            _, idx = ops.topk_compress_(weight_MK.reshape(-1).float(), rest, count)
        else:
            rest.copy_(weight_MK.reshape(-1))
        codes, scales = ops.quantize_blockwise(rest, bits=bits, block=block)
        return cls(
            codes.view(num_rows, -1),
            scales.view(num_rows, -1),
            weight_MK.reshape(-1)[idx],
            (idx % dim).int(),
            torch.searchsorted(idx, torch.arange(num_rows + 1) * dim),
            bits,
        )

    def product(self, x: Tensor) -> Tensor:
        return ops.quantized_mm(
            x, self.codes, self.scales, self.outliers, self.columns, self.offsets, bits=self.bits
        )

    def dense(self) -> Tensor:
        numel = self.codes.numel() * 8 // self.bits
        block = numel // self.scales.numel()
        flat = ops.dequantize_blockwise(
            self.codes.view(-1), self.scales.view(-1), numel, bits=self.bits, block=block
        )
        weight = flat.view(self.codes.shape[0], -1)
        rows = torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.offsets.diff())
        return weight.index_put_((rows, self.columns.long()), self.outliers.float())

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.outliers, self.columns, self.offsets)
        return sum(t.nbytes for t in tensors)


@dataclass(frozen=True)
class _Kept:
    """A pruned weight `[M, K]`: what is kept, and a bit an element."""

    values: Tensor
    bitmap: Tensor

    few_rows: ClassVar[int] = 4

    @classmethod
    def of(cls, weight_MK: Tensor) -> _Kept:
        bitmap = ops.pack_bits(weight_MK.contiguous())
        return cls(
            weight_MK[weight_MK.view(_BITS[weight_MK.dtype]) != 0], bitmap.view(len(weight_MK), -1)
        )

    def product(self, x: Tensor) -> Tensor:
        return ops.masked_mm(x, self.values, self.bitmap)

    def dense(self) -> Tensor:
        weight = self.values.new_empty(len(self.bitmap), 8 * self.bitmap.shape[1])
        ops.unpack_masked_(weight, self.values, self.bitmap.view(-1))
        return weight

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.bitmap.nbytes


_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class PackedExperts(nn.Module):
    """Experts whose weights are read packed: for decoding, where reading them takes the time.

    Takes the place of a layer's `GroupedExperts`, without gradients::

        layer.experts = PackedExperts(layer.experts, "int8")

    A weight is read as codes of 8 or 4 bits, with a fraction of the elements exact; or, pruned, as
    its kept elements and a bit an element, with the bits of weights that are not packed but for the
    order of sums. Where an expert has more than sixteen rows, its weight is unpacked for a dense
    product.

    Args:
        experts: float32 or bfloat16, on CPU, with all experts on this rank.
        format: "int8", "int4" or "pruned".
        outliers: share of each weight that is exact, of codes.
        block: columns that share a scale.

    Attributes:
        num_bytes: of all weights as they are read.

    Raises:
        ValueError: an unknown format; experts on another device, of another dtype, over ranks, with
            a `post_norm`, or whose weights' columns are no multiple of the block (of 8, pruned).

    Reference: Dettmers et al., SpQR, 2023 (arXiv 2306.03078).
    """

    def __init__(
        self,
        experts: GroupedExperts,
        format: str = "int8",
        *,
        outliers: float = 0.005,
        block: int = 128,
    ) -> None:
        super().__init__()
        check_choice(_OP, "format", format, ("int8", "int4", "pruned"))
        up_name = "gate_up_proj" if experts.gated else "up_proj"
        weights = [getattr(experts, name).detach() for name in (up_name, "down_proj")]
        unit = 8 if format == "pruned" else block
        if experts.transposed:
            weights = [weight.mT.contiguous() for weight in weights]
        problem = None
        if weights[0].device.type != "cpu" or weights[0].dtype not in _BITS:
            problem = f"float32 or bfloat16 on CPU, got {weights[0].dtype} on {weights[0].device}"
        elif experts.num_local_experts != experts.num_experts or experts.post_expert_norm:
            problem = f"all on this rank and without post_norm, got {experts}"
        elif any(weight.shape[2] % unit for weight in weights):
            shapes = [tuple(weight.shape) for weight in weights]
            problem = f"of a multiple of {unit} columns, got shapes {shapes}"
        if problem is not None:
            raise ValueError(f"{_OP}: expected experts to be {problem}")
        self.num_experts, self.format = experts.num_experts, format
        self.activation, self.gated, self.layout = experts.activation, experts.gated, experts.layout
        biases = [getattr(experts, f"{name}_bias") for name in (up_name, "down_proj")]
        self._biases = [None if bias is None else bias.detach() for bias in biases]
        bits = {"int8": 8, "int4": 4}.get(format)
        self._weights: list[list[_Coded] | list[_Kept]] = [
            [_Kept.of(w) for w in weight]
            if bits is None
            else [_Coded.of(w, bits, block, outliers) for w in weight]
            for weight in weights
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they are read."""
        return sum(weight.num_bytes for weights in self._weights for weight in weights)

    @torch.no_grad()
    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """Run every row through its expert; see `GroupedExperts.forward`."""
        out_ND = torch.zeros_like(rows_ND)
        bounds = expert_offsets.tolist()
        bounds = bounds if len(bounds) > self.num_experts else [0, *bounds]
        for expert in range(self.num_experts):
            begin, end = bounds[expert], bounds[expert + 1]
            if begin < end:
                up = self._product(0, expert, rows_ND[begin:end])
                hidden = run_activation(up, self.activation, gated=self.gated, layout=self.layout)
                out_ND[begin:end] = self._product(1, expert, hidden)
        return out_ND

    def _product(self, place: int, expert: int, x: Tensor) -> Tensor:
        weight, bias_EM = self._weights[place][expert], self._biases[place]
        if x.shape[0] <= weight.few_rows:
            out = weight.product(x)
        else:
            out = nn.functional.linear(x, weight.dense().to(x.dtype))
        return out if bias_EM is None else out + bias_EM[expert]

    def extra_repr(self) -> str:
        """Sizes for `repr`."""
        return f"num_experts={self.num_experts}, format={self.format!r}, num_bytes={self.num_bytes}"
