"""Experts with packed weights, for inference with few tokens.

Shape suffixes: N rows, D model, E experts, M rows and K columns of one weight.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers, check_rule, check_sizes
from moe_ext.compression.collectives.quantized import BLOCKS
from moe_ext.nn import GroupedExperts
from moe_ext.nn.expert_activation import run_activation

_OP = "PackedExperts"


@dataclass(frozen=True)
class _CodedWeights:
    """Quantised weights `[E, M, K]`, with their largest elements stored exactly.

    Codes, scales and offsets hold the rows of all experts, `[E M, ...]`.
    """

    codes: Tensor
    scales: Tensor
    outliers: Tensor
    columns: Tensor
    offsets: Tensor
    # The number of outliers of each expert.
    counts: tuple[int, ...]
    bits: int

    # Largest number of rows for a product with packed weights. With more rows a dense product with
    # the unpacked weight is faster (`run.py sparsity`).
    few_rows: ClassVar[int] = 16

    @classmethod
    def of(cls, weight_EMK: Tensor, bits: int, block: int, fraction: float) -> _CodedWeights:
        num_experts, num_rows, dim = weight_EMK.shape
        count = math.ceil(fraction * num_rows * dim)
        parts: list[tuple[Tensor, ...]] = []
        ends = dim * torch.arange(1, num_rows + 1, device=weight_EMK.device)
        for expert, weight_MK in enumerate(weight_EMK):
            flat = weight_MK.reshape(-1)
            rest, idx = flat.float(), ends[:0]
            if count:
                rest = torch.zeros_like(rest)
                _, idx = ops.topk_compress_(flat.float(), rest, count)
            codes, scales = ops.quantize_blockwise(rest, bits=bits, block=block)
            offsets = torch.searchsorted(idx, ends) + expert * count
            parts.append((codes, scales, flat[idx], (idx % dim).int(), offsets))
        codes, scales, outliers, columns, offsets = map(torch.cat, zip(*parts, strict=True))
        return cls(
            *(codes.view(num_experts * num_rows, -1), scales.view(num_experts * num_rows, -1)),
            *(outliers, columns, nn.functional.pad(offsets, (1, 0))),
            *((count,) * num_experts, bits),
        )

    def expert(self, expert: int) -> _CodedWeights:
        """Return the weight of one expert, in the same memory."""
        each = self.codes.shape[0] // len(self.counts)
        first = expert * each
        return dataclasses.replace(
            self,
            codes=self.codes.narrow(0, first, each),
            scales=self.scales.narrow(0, first, each),
            offsets=self.offsets.narrow(0, first, each + 1),
            counts=(self.counts[expert],),
        )

    def product(self, x: Tensor, expert_offsets: Tensor | None = None) -> Tensor:
        return ops.quantized_mm(
            *(x.to(self.outliers.dtype), self.codes, self.scales),
            *(self.outliers, self.columns, self.offsets),
            bits=self.bits,
            expert_offsets=expert_offsets,
        ).to(x.dtype)

    def dense(self) -> Tensor:
        """Unpack the weight; only after `expert`."""
        numel = self.codes.numel() * 8 // self.bits
        block = numel // self.scales.numel()
        flat = ops.dequantize_blockwise(
            self.codes.view(-1), self.scales.view(-1), numel, bits=self.bits, block=block
        )
        weight = flat.view(self.codes.shape[0], -1)
        (count,) = self.counts
        places = self.offsets.narrow(0, 0, 1) + torch.arange(count, device=flat.device)
        rows = torch.searchsorted(self.offsets, places, right=True) - 1
        columns, outliers = (x.index_select(0, places) for x in (self.columns, self.outliers))
        return weight.index_put_((rows, columns.long()), outliers.float())


@dataclass(frozen=True)
class _Kept:
    """Pruned weights `[E, M, K]`: kept elements, and a bitmap of all elements `[E M, K / 8]`."""

    values: Tensor
    bitmap: Tensor
    counts: tuple[int, ...]

    few_rows: ClassVar[int] = 4

    @classmethod
    def of(cls, weight_EMK: Tensor) -> _Kept:
        bitmap = ops.pack_bits(weight_EMK.contiguous())
        mask = weight_EMK.view(_BITS[weight_EMK.dtype]) != 0
        counts = tuple(mask.flatten(1).sum(1).tolist())
        return cls(weight_EMK[mask], bitmap.view(-1, weight_EMK.shape[2] // 8), counts)

    def expert(self, expert: int) -> _Kept:
        """Return the weight of one expert, in the same memory."""
        each, first = self.bitmap.shape[0] // len(self.counts), sum(self.counts[:expert])
        values = self.values.narrow(0, first, self.counts[expert])
        return _Kept(values, self.bitmap.narrow(0, expert * each, each), (len(values),))

    def product(self, x: Tensor, expert_offsets: Tensor | None = None) -> Tensor:
        found = ops.masked_mm(
            x.to(self.values.dtype), self.values, self.bitmap, expert_offsets=expert_offsets
        )
        return found.to(x.dtype)

    def dense(self) -> Tensor:
        """Unpack the weight; only after `expert`."""
        weight = self.values.new_empty(len(self.bitmap), 8 * self.bitmap.shape[1])
        ops.unpack_masked_(weight, self.values, self.bitmap.view(-1))
        return weight


def _versions(tensors: list[Tensor | None]) -> list[tuple[int, int | None]]:
    """Return ids and version counters of tensors; tensors of `inference_mode` have no counter."""
    return [(id(x), None if x is None or x.is_inference() else x._version) for x in tensors]


_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class PackedExperts(nn.Module):
    """Experts with packed weights, for decoding, in which reading the weights takes the time.

    Replaces a layer's `GroupedExperts`; has no gradients::

        layer.experts = PackedExperts(layer.experts, "int8")

    With "int8" and "int4" a weight is read in 8 or 4 bits per element, with a fraction of the
    elements exact. With "pruned" it is read as its kept elements and one bit per element, which is
    exact up to the order of sums. If an expert has more than sixteen rows, its weight is unpacked
    for a dense product.

    On a GPU, a pass in which experts have few rows on average is one launch for all experts,
    without a host synchronisation. Another pass reads the offsets back. Both need at most the
    memory of one unpacked weight. `.to` moves the weights but keeps their dtypes; rows may have
    another dtype, as under autocast.

    While the original experts exist, their version counters show writes to their weights, which are
    then packed again before the next pass. Writes through `.data` and by collectives of torch go
    unnoticed.

    Args:
        experts: float32 or bfloat16, with all experts on this rank.
        format: "int8", "int4" or "pruned".
        outliers: share of each weight that is exact; not used with "pruned".
        block: columns that share a scale.

    Attributes:
        num_bytes: bytes of all packed weights.

    Raises:
        ValueError: format or block is unknown; a share is out of range; experts have another dtype,
            lie over ranks or have a `post_norm`; the columns of a weight are not a multiple of the
            block (of 8 if pruned).

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
        check_sizes(_OP, block=block)
        check_numbers("PackedExperts", PackedExperts.__init__.__annotations__, locals())
        check_choice(_OP, "format", format, ("int8", "int4", "pruned"))
        check_choice(_OP, "block", block, BLOCKS)
        check_rule(_OP, "outliers", outliers, "in [0, 1]", 0 <= outliers <= 1)
        up_name = "gate_up_proj" if experts.gated else "up_proj"
        names = [*(up_name, "down_proj"), *(f"{name}_bias" for name in (up_name, "down_proj"))]
        sources = [getattr(experts, name) for name in names]
        weights = [weight.detach() for weight in sources[:2]]
        unit = 8 if format == "pruned" else block
        if experts.transposed:
            weights = [weight.mT for weight in weights]
        problem = None
        if weights[0].dtype not in _BITS:
            problem = f"float32 or bfloat16, got {weights[0].dtype}"
        elif experts.num_local_experts != experts.num_experts or experts.post_expert_norm:
            problem = f"all on this rank and without post_norm, got {experts}"
        elif any(weight.shape[2] % unit for weight in weights):
            shapes = [tuple(weight.shape) for weight in weights]
            problem = f"of a multiple of {unit} columns, got shapes {shapes}"
        if problem is not None:
            raise ValueError(f"{_OP}: expected experts to be {problem}")
        self.num_experts, self.format = experts.num_experts, format
        self.activation, self.gated, self.layout = experts.activation, experts.gated, experts.layout
        self._transposed, self._block, self._outliers = experts.transposed, block, outliers
        # The reference is weak, so that the memory of the original experts can be freed.
        self._source: weakref.ref[GroupedExperts] | None = weakref.ref(experts)
        self._names = names
        self._pack(sources)

    def _pack(self, sources: list[Tensor | None]) -> None:
        """Pack two weights; `sources` holds these and their two biases."""
        bits = {"int8": 8, "int4": 4}.get(self.format)
        self._weights: list[_CodedWeights | _Kept] = []
        for source in sources[:2]:
            assert source is not None
            weight = source.detach().mT.contiguous() if self._transposed else source.detach()
            self._weights.append(
                _Kept.of(weight)
                if bits is None
                else _CodedWeights.of(weight, bits, self._block, self._outliers)
            )
        self._biases = [None if bias is None else bias.detach() for bias in sources[2:]]
        self._versions = _versions(sources)
        self._split()

    def _follow(self) -> None:
        """Pack the weights again if the original experts were written to since."""
        experts = None if self._source is None else self._source()
        sources = [getattr(experts, name, None) for name in self._names]
        if experts is None or _versions(sources) == self._versions:
            return
        like = self._weights[0]
        device = (like.codes if isinstance(like, _CodedWeights) else like.values).device
        self._pack([None if x is None else x.detach().to(device) for x in sources])
        self._versions = _versions(sources)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the original experts, which a copy in another process does not have."""
        return {**self.__dict__, "_source": None}

    def _split(self) -> None:
        experts = range(self.num_experts)
        self._of_expert = [[weight.expert(e) for e in experts] for weight in self._weights]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedExperts:
        super()._apply(fn, recurse)

        def moved(x: Tensor) -> Tensor:
            found = fn(x)
            return found if found.dtype == x.dtype else x.to(found.device)

        self._biases = [None if bias is None else moved(bias) for bias in self._biases]
        for place, weight in enumerate(self._weights):
            tensors: dict[str, Any] = {
                name: moved(x) for name, x in vars(weight).items() if isinstance(x, Tensor)
            }
            self._weights[place] = dataclasses.replace(weight, **tensors)
        self._split()
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed weights."""
        found = [x for weight in self._weights for x in vars(weight).values()]
        return sum(x.nbytes for x in found if isinstance(x, Tensor))

    @torch.no_grad()
    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """Run every row through its expert; see `GroupedExperts.forward`."""
        self._follow()
        # On a GPU the mean number of rows per expert decides, because the numbers of each expert
        # would need a host synchronisation.
        few = self._weights[0].few_rows * (self.num_experts if rows_ND.is_cuda else 1)
        if rows_ND.shape[0] <= few:
            return self._forward_at_once(rows_ND, expert_offsets)
        return self._forward_by_expert(rows_ND, expert_offsets)

    def _forward_by_expert(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        out_ND = torch.zeros_like(rows_ND)
        # NOTE: device-to-host sync, only if experts have many rows.
        bounds = expert_offsets.tolist()
        bounds = bounds if len(bounds) > self.num_experts else [0, *bounds]
        for expert in range(self.num_experts):
            begin, end = bounds[expert], bounds[expert + 1]
            if begin < end:
                up = self._product(0, expert, rows_ND[begin:end])
                out_ND[begin:end] = self._product(1, expert, self._activated(up))
        return out_ND

    def _activated(self, up: Tensor) -> Tensor:
        return run_activation(up, self.activation, gated=self.gated, layout=self.layout)

    def _forward_at_once(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """Run all experts in one launch, by the offsets on the device."""
        # `bias_EM` is padded with rows of zeros at both ends, for rows that belong to no expert.
        row_N = torch.arange(len(rows_ND), device=rows_ND.device, dtype=expert_offsets.dtype)
        place_N = torch.searchsorted(expert_offsets, row_N, right=True)
        pad = (0, 0, len(expert_offsets) - self.num_experts, 1)

        def product(place: int, x: Tensor) -> Tensor:
            out, bias_EM = self._weights[place].product(x, expert_offsets), self._biases[place]
            if bias_EM is None:
                return out
            bias_ND = nn.functional.pad(bias_EM, pad).index_select(0, place_N)
            return out + bias_ND.to(x.dtype)

        return product(1, self._activated(product(0, rows_ND)))

    def _product(self, place: int, expert: int, x: Tensor) -> Tensor:
        weight, bias_EM = self._of_expert[place][expert], self._biases[place]
        if x.shape[0] <= weight.few_rows:
            out = weight.product(x)
        else:
            out = nn.functional.linear(x, weight.dense().to(x.dtype))
        return out if bias_EM is None else out + bias_EM[expert].to(x.dtype)

    def extra_repr(self) -> str:
        """Return sizes and format for `repr`."""
        return f"num_experts={self.num_experts}, format={self.format!r}, num_bytes={self.num_bytes}"
