"""GRACE's compressors on the operators of this package.

Shape suffixes: N elements of a tensor, K selected ones.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.codecs.powersgd import PowerSGD
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.grace_base import Compressor
from moe_ext.ops.quantize import dequantize_blockwise, quantize_blockwise
from moe_ext.ops.topk import threshold_compress_, topk_compress_

_LARGEST_HALF = torch.finfo(torch.float16).max
_MAX_LEVELS = {"int4": 7, "int8": 127}


@dataclass
class Context:
    """What a rank needs to decode, and what its memory may look at.

    Attributes:
        shape: of the tensor.
        left_N: what is not sent, where the compressor knows it; saves the memory a decoding.
        indices_K: what is sent, where that is some elements.
        reduced: the mean over ranks, where the compressor has sent messages of its own.
    """

    shape: torch.Size
    left_N: Tensor | None = None
    indices_K: Tensor | None = None
    reduced: Tensor | None = None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).float()


def _check_ratio(owner: str, ratio: float) -> float:
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{owner}: expected compress_ratio to be in (0, 1], got {ratio!r}")
    return ratio


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    is_linear = True

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        return [tensor.detach().clone()], Context(tensor.shape)

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        return tensors[0].view(ctx.shape)


class FP16Compressor(Compressor):
    """Sends half-precision numbers, of at most 65504; `Allreduce` adds them in half precision.

    Unless their sum does not fit, see `Allreduce`.
    """

    is_linear = True

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        # Infinity would stay in the residual for ever; what is cut off is owed.
        return [tensor.detach().clamp(-_LARGEST_HALF, _LARGEST_HALF).half()], Context(tensor.shape)

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        return tensors[0].float().view(ctx.shape)


class _SparseCompressor(Compressor):
    """Sends values and int32 or int64 indices; zeros, of which nothing is owed, are not counted."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        flat_N = _flat(tensor)
        left_N = torch.zeros_like(flat_N)
        values_K, indices_K = self._select(flat_N, left_N)
        # Above 2^31 elements an int32 cannot tell them apart.
        dtype = torch.int32 if flat_N.numel() < 2**31 else torch.int64
        ctx = Context(tensor.shape, left_N=left_N, indices_K=indices_K)
        return [values_K, indices_K.to(dtype)], ctx

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        values_K, indices_K = tensors
        dense_N = values_K.new_zeros(ctx.shape.numel())
        # Indices differ from each other, but for zeros that fill up: adding is right for both.
        return dense_N.index_add_(0, indices_K.long(), values_K).view(ctx.shape)

    @abstractmethod
    def _select(self, flat_N: Tensor, left_N: Tensor) -> tuple[Tensor, Tensor]:
        """Values and indices that are sent; what is not goes into `left_N`."""


class TopKCompressor(_SparseCompressor):
    """Sends the largest elements, exactly, the lower index first among equals.

    Args:
        compress_ratio: share of the elements, in (0, 1]; at least one is sent.
    """

    def __init__(self, compress_ratio: float) -> None:
        """Check the share."""
        super().__init__()
        self.compress_ratio = _check_ratio(type(self).__name__, compress_ratio)

    def _select(self, flat_N: Tensor, left_N: Tensor) -> tuple[Tensor, Tensor]:
        k = min(flat_N.numel(), max(1, int(flat_N.numel() * self.compress_ratio)))
        found = topk_compress_(flat_N, left_N, k, check_finite=False)
        return found.values, found.indices


class DgcCompressor(TopKCompressor):
    """The same choice that GRACE's samples for: of a tensor of zeros it sends no more than k."""


class ThresholdCompressor(_SparseCompressor):
    """Sends the elements whose magnitude reaches a threshold: more or fewer on each rank.

    Args:
        threshold: finite and at least 0.
    """

    def __init__(self, threshold: float) -> None:
        """Check the threshold."""
        super().__init__(tensors_size_are_same=False)
        if not (threshold >= 0.0 and math.isfinite(threshold)):
            raise ValueError(
                f"ThresholdCompressor: expected threshold to be finite and at least 0, got "
                f"{threshold!r}"
            )
        self.threshold = threshold

    def _select(self, flat_N: Tensor, left_N: Tensor) -> tuple[Tensor, Tensor]:
        found = threshold_compress_(
            flat_N, left_N, self.threshold, flat_N.numel(), check_finite=False
        )
        count = int(found[2])  # NOTE: device-to-host sync, since as many are sent
        return found.values[:count], found.indices[:count]


class _CountingCompressor(Compressor):
    """Numbers the steps of each name, for random numbers that differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[str, int] = {}

    def _next_step(self, name: str) -> int:
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        return step

    def undo(self, name: str) -> None:
        """See `Compressor`."""
        if name in self._steps:
            self._steps[name] -= 1

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor`."""
        self._steps = dict(state["steps"])


class RandomKCompressor(_CountingCompressor):
    """Sends elements at random places, the same on all ranks in every step: no indices travel.

    Args:
        compress_ratio: share of the elements, in (0, 1].
        seed: of the places, equal on all ranks.
    """

    is_linear = True

    def __init__(self, compress_ratio: float, seed: int = 0) -> None:
        """Check the share."""
        super().__init__()
        self.compress_ratio = _check_ratio("RandomKCompressor", compress_ratio)
        self.seed = seed

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        flat_N = _flat(tensor)
        k = min(flat_N.numel(), max(1, int(flat_N.numel() * self.compress_ratio)))
        step = self._next_step(name)
        # Not hash(): it differs between processes.
        text = f"{self.seed}/{name}/{step}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        places_K = torch.randperm(flat_N.numel(), generator=generator)[:k].to(flat_N.device)
        return [flat_N[places_K]], Context(tensor.shape, indices_K=places_K)

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        assert ctx.indices_K is not None
        dense_N = tensors[0].new_zeros(ctx.shape.numel())
        dense_N[ctx.indices_K] = tensors[0]
        return dense_N.view(ctx.shape)


class _BlockCompressor(_CountingCompressor):
    """Sends codes of blocks with a scale each."""

    def __init__(self, format: str, block: int, *, stochastic: bool = False, seed: int = 0) -> None:
        """Check the size of blocks."""
        super().__init__()
        if block not in (64, 128, 256, 512, 1024):
            raise ValueError(
                f"{type(self).__name__}: expected bucket_size to be a power of two from 64 to "
                f"1024, got {block!r}"
            )
        self.format = format
        self.block = block
        self.stochastic = stochastic
        self.seed = seed

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        flat_N = _flat(tensor)
        left_N = torch.zeros_like(flat_N)
        coded = quantize_blockwise(
            flat_N,
            format=self.format,
            block=self.block,
            residual=left_N,
            rng_state=self._rng_state(name, flat_N.device),
            check_finite=False,
        )
        return [coded.codes, coded.scales], Context(tensor.shape, left_N=left_N)

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        codes, scales = tensors
        found_N = dequantize_blockwise(
            codes, scales, ctx.shape.numel(), format=self.format, block=self.block
        )
        return found_N.view(ctx.shape)

    def _rng_state(self, name: str, device: torch.device) -> Tensor | None:
        if not self.stochastic:
            return None
        step = self._next_step(name)
        tensor_id = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "little")
        # Ranks round differently, so that their errors are independent.
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return torch.tensor([self.seed, tensor_id, step, rank], device=device)


class QSGDCompressor(_BlockCompressor):
    """Rounds to a whole number of steps at random, in blocks that are scaled by their largest.

    GRACE scales a bucket by its norm; the largest element wastes no step.

    Args:
        quantum_num: steps on either side of zero: up to 7 are sent as 4 bits, up to 127 as 8.
        bucket_size: elements that share a scale.
        seed: of the random numbers.
    """

    def __init__(self, quantum_num: int = 127, bucket_size: int = 128, seed: int = 0) -> None:
        """Choose the format."""
        if not 1 <= quantum_num <= _MAX_LEVELS["int8"]:
            raise ValueError(
                f"QSGDCompressor: expected quantum_num to be in [1, 127], got {quantum_num!r}"
            )
        format = "int4" if quantum_num <= _MAX_LEVELS["int4"] else "int8"
        super().__init__(format, bucket_size, stochastic=True, seed=seed)


class BlockQuantizer(_BlockCompressor):
    """Rounds to the nearest code: "int8", "int4" or "fp8".

    Args:
        format: as `moe_ext.ops.quantize_blockwise`.
        bucket_size: elements that share a scale.
    """

    def __init__(self, format: str = "int8", bucket_size: int = 256) -> None:
        """Check the format."""
        if format not in ("int8", "int4", "fp8"):
            raise ValueError(
                "BlockQuantizer: expected format to be one of ('int8', 'int4', 'fp8'), got "
                f"{format!r}"
            )
        super().__init__(format, bucket_size)


class OneBitCompressor(_BlockCompressor):
    """Signs, eight in a byte, with the mean magnitude of each block; a block of zeros stays zero.

    Args:
        bucket_size: elements that share a magnitude.
    """

    def __init__(self, bucket_size: int = 256) -> None:
        """Check the size of blocks."""
        super().__init__("sign", bucket_size)


class SignSGDCompressor(OneBitCompressor):
    """The sign of most ranks: the result is -1, 0 (as many on either side) or 1.

    Args:
        bucket_size: elements that share the mark of a block of zeros.
    """

    def __init__(self, bucket_size: int = 256) -> None:
        """A sign is no mean."""
        super().__init__(bucket_size)
        self.average = False

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        return super().decompress(tensors, ctx).sign()

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        tensors, ctx = super().compress(tensor, name)
        # What the quantiser has left belongs to the mean magnitude, which is not used.
        ctx.left_N = None
        return tensors, ctx

    def aggregate(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Compressor`."""
        return super().aggregate(tensors).sign()


class SignumCompressor(SignSGDCompressor):
    """The same of a momentum.

    Args:
        momentum: in [0, 1).
        bucket_size: as `SignSGDCompressor`.
    """

    def __init__(self, momentum: float = 0.9, bucket_size: int = 256) -> None:
        """Check the momentum."""
        super().__init__(bucket_size)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(
                f"SignumCompressor: expected momentum to be in [0, 1), got {momentum!r}"
            )
        self.momentum = momentum
        self._momenta: dict[str, Tensor] = {}
        self._before: dict[str, Tensor | None] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        before = self._momenta.get(name)
        mixed = (1.0 - self.momentum) * tensor.detach().float()
        if before is not None:
            mixed += self.momentum * before
        found = super().compress(mixed, name)
        self._momenta[name], self._before = mixed, {name: before}
        return found

    def undo(self, name: str) -> None:
        """See `Compressor`."""
        super().undo(name)
        before = self._before.pop(name, None)
        if before is None:
            self._momenta.pop(name, None)
        else:
            self._momenta[name] = before

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor`."""
        momenta = {name: tensor.clone() for name, tensor in self._momenta.items()}
        return {**super().state_dict(), "momenta": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor`."""
        super().load_state_dict(state)
        self._momenta = {name: tensor.clone() for name, tensor in state["momenta"].items()}


class PowerSGDCompressor(_CountingCompressor):
    """Low-rank factors, see `PowerSGD`; sends its own messages while it compresses.

    Args:
        rank: columns of the factors.
        group: the ranks, None for the default group.
    """

    is_linear = True

    def __init__(self, rank: int = 1, *, group: ProcessGroup | None = None) -> None:
        """Without error feedback, which is the memory's."""
        super().__init__()
        self.codec = PowerSGD(rank, feedback=False)
        self.group = group
        self._factors: dict[str, CodecMemory] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        if name not in self._factors or self._factors[name].shapes[0] != tensor.shape:
            self._factors[name] = CodecMemory([tensor.shape], tensor.device)
        factors, step = self._factors[name], self._steps.get(name, 0)
        factors.begin()
        reduced = self.codec.start(_flat(tensor).clone(), factors, group=self.group, step=step)
        found = reduced.wait().view(tensor.shape)
        factors.commit()
        self._steps[name] = step + 1
        return [], Context(tensor.shape, reduced=found)

    def undo(self, name: str) -> None:
        """See `Compressor`."""
        super().undo(name)
        self._factors[name].undo()

    def decompress(self, tensors: Sequence[Tensor], ctx: Context) -> Tensor:
        """See `Compressor`."""
        assert ctx.reduced is not None
        return ctx.reduced

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor`."""
        kept = {
            name: {kind: factors.copy_of(kind) for kind in factors.kinds()}
            for name, factors in self._factors.items()
        }
        shapes = {name: tuple(factors.shapes[0]) for name, factors in self._factors.items()}
        return {**super().state_dict(), "factors": kept, "shapes": shapes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor`."""
        super().load_state_dict(state)
        self._factors = {}
        for name, kinds in state["factors"].items():
            device = next((t.device for t in kinds.values()), torch.device("cpu"))
            self._factors[name] = CodecMemory([torch.Size(state["shapes"][name])], device)
            for kind, tensor in kinds.items():
                self._factors[name].put(kind, tensor.clone())
