"""GRACE's interface, so that its users can move here.

The three interfaces have the methods of ``grace_dl.dist``, and `grace_from_params` takes its keys::

    from moe_ext.integrations.grace import grace_from_params

    grace = grace_from_params({"compressor": "topk", "memory": "residual",
                               "communicator": "allgather", "compress_ratio": 0.01})
    for name, parameter in model.named_parameters():
        parameter.grad = grace.step(parameter.grad, name)

New code is better off with `CompressionState`: here every tensor is a message of its own that is
waited for.

Shape suffixes: N elements of a tensor, K selected ones, P ranks.
"""

from __future__ import annotations

import hashlib
import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_choice, check_numbers, check_rule
from moe_ext.attention.sharding import Shards
from moe_ext.comm.agreement import Agreement, is_nonfinite, options_of
from moe_ext.comm.collectives import all_gather, all_reduce_
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import global_rank, group_size, resolve_group
from moe_ext.compression.codecs.powersgd import PowerSGD
from moe_ext.compression.feedback import CodecMemory
from moe_ext.ops.quantize import dequantize_blockwise, quantize_blockwise
from moe_ext.ops.topk import threshold_compress_, topk_compress_

__all__ = [
    "Allgather",
    "Allreduce",
    "BlockQuantizer",
    "Communicator",
    "Compressor",
    "Context",
    "DgcCompressor",
    "DgcMemory",
    "FP16Compressor",
    "Memory",
    "NoneCompressor",
    "NoneMemory",
    "OneBitCompressor",
    "PowerSGDCompressor",
    "QSGDCompressor",
    "RandomKCompressor",
    "ResidualMemory",
    "SignSGDCompressor",
    "SignumCompressor",
    "ThresholdCompressor",
    "TopKCompressor",
    "grace_from_params",
]

_OP = "grace"
_LARGEST_HALF = torch.finfo(torch.float16).max

Codes = Sequence[Tensor]


class Compressor(ABC):
    """Codes a tensor as a list of tensors, and back.

    Args:
        average: communicators divide the sum over ranks by their number.
        tensors_size_are_same: what is sent has the same shapes on every rank; else it arrives flat.

    Attributes:
        is_linear: a sum of codes decodes to the sum of the tensors, so that `Allreduce` can add
            them up.
    """

    is_linear = False

    def __init__(self, average: bool = True, tensors_size_are_same: bool = True) -> None:
        """Keep what communicators look at."""
        check_numbers(type(self).__name__, Compressor.__init__.__annotations__, locals())
        self.average = average
        self.tensors_size_are_same = tensors_size_are_same

    @abstractmethod
    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        """Tensors to send, and what this rank needs to decode those of any rank."""

    @abstractmethod
    def decompress(self, tensors: Codes, ctx: Any) -> Tensor:
        """A tensor of the shape that was compressed."""

    def undo(self, name: str) -> None:  # noqa: B027
        """The step has failed: forget what the last `compress` of a name left for the next one."""

    def aggregate(self, tensors: Codes) -> Tensor:
        """The sum of what was decoded of each rank, in rank order."""
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total

    def state_dict(self) -> dict[str, Any]:
        """The state that the next steps depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` returned."""


class Memory(ABC):
    """Adds to a gradient what is owed, and remembers what compression leaves out.

    The residual of a step counts once the step has ended on all ranks: `Communicator.step` calls
    `commit` then, and `rollback` where it fails.
    """

    @abstractmethod
    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor to compress in the place of a gradient, a new one."""

    def update(  # noqa: B027  (a memory may keep nothing)
        self, tensor: Tensor, name: str, compressor: Compressor, tensor_compressed: Codes, ctx: Any
    ) -> None:
        """Note what is left; `tensor` is what `compensate` returned."""

    def commit(self) -> None:  # noqa: B027
        """The step has ended well."""

    def rollback(self) -> None:  # noqa: B027
        """The step has failed: everything is as before it."""

    def state_dict(self) -> dict[str, Any]:
        """Residuals by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` returned."""


class Communicator(ABC):
    """Sends what a compressor made to all ranks.

    Args:
        compressor: codes tensors.
        memory: error feedback.
        world_size: ranks of the group; None takes them from it.
        group: the ranks, None for the default group.

    Raises:
        ValueError: ``world_size`` is not that of the group, or the compressor is not linear where
            codes are added.

    Attributes:
        adds_codes: what compressors make is added up over ranks.
    """

    adds_codes = False

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        world_size: int | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Check the number of ranks."""
        owner = type(self).__name__
        group = resolve_group(group, owner)
        ranks = group_size(group)
        fits = world_size in (None, ranks)
        check_rule(owner, "world_size", world_size, f"the group's {ranks}", fits)
        if self.adds_codes and not compressor.is_linear:
            raise ValueError(
                f"{owner}: expected compressor to be linear (none, fp16, randomk, "
                f"powersgd), got {type(compressor).__name__}; its codes are sent by Allgather"
            )
        self.compressor, self.memory = compressor, memory
        self.group, self.world_size = group, ranks

    @abstractmethod
    def send_receive(self, tensors: Codes, name: str, ctx: Any) -> Tensor:
        """The mean (or sum) over ranks of what the tensors stand for."""

    def step(self, tensor: Tensor, name: str) -> Tensor:
        """One gradient of one step, the whole way.

        Args:
            tensor (Tensor): float32, bfloat16 or float16, of any shape; not changed.
            name (str): of the parameter, by which its residual is kept.

        Returns:
            Tensor: of the same shape and dtype, a new one, with the same bits on all ranks.

        Raises:
            ValueError: on every rank: an element is NaN or infinite on some rank, a dtype is
                another, or ranks gave other tensors. Nothing is sent; memory and compressor are as
                before.
            RankFailureError: a rank died or did not answer; memory and compressor are as before.
        """
        with naming_failed_ranks(self.group, f"{_OP}: {name}"), ExitStack() as if_it_fails:
            self._check(tensor, name)
            if_it_fails.callback(self.memory.rollback)
            compensated = self.memory.compensate(tensor, name)
            tensors, ctx = self.compressor.compress(compensated, name)
            if_it_fails.callback(self.compressor.undo, name)
            self.memory.update(compensated, name, self.compressor, tensors, ctx)
            found = self.send_receive(tensors, name, ctx)
            if_it_fails.pop_all()
        self.memory.commit()
        return found.to(tensor.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Residuals, momenta and factors by name: of this rank, for its own file."""
        return {
            "version": 1,
            "world_size": self.world_size,
            "compressor": self.compressor.state_dict(),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on the same rank.

        Raises:
            ValueError: another version or number of ranks.
        """
        for key, want in (("version", 1), ("world_size", self.world_size)):
            found = state.get(key)
            check_rule(type(self).__name__, f"the state's {key}", found, f"{want}", found == want)
        self.compressor.load_state_dict(state["compressor"])
        self.memory.load_state_dict(state["memory"])

    def _check(self, tensor: Tensor, name: str) -> None:
        """ValueError on every rank where a rank holds NaN or infinity, or another tensor.

        The former would poison residuals; of the latter codes have other sizes, or mean others.
        Residuals and codes have 32 bits at most.

        NOTE: device-to-host sync.
        """
        what = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        facts = {
            f"the numel of {name}": tensor.numel(),
            f"the checksum of name, shape and dtype of {name}": zlib.crc32(what.encode()),
            "options": {
                "communicator": type(self).__name__,
                "compressor": type(self.compressor).__name__,
                **options_of(self.compressor, "compressor"),
                "memory": type(self.memory).__name__,
                **options_of(self.memory, "memory"),
            },
        }
        with Agreement(_OP, self.group, tensor.device) as agreement:
            rule = "float32, bfloat16 or float16"
            fits = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
            check_rule(_OP, f"the gradient of {name}", tensor.dtype, rule, fits)
            told = agreement.compare(facts, values=[int(is_nonfinite(tensor))])
        bad = [rank for rank, (nonfinite,) in enumerate(told) if nonfinite]
        if bad:
            raise ValueError(
                f"{_OP}: expected the gradient of {name} to be finite, got NaN or infinity on "
                f"rank {', '.join(map(str, bad))} of the group"
            )


class Allreduce(Communicator):
    """Adds up what compressors make, element by element; for those that are linear.

    A sum of half-precision numbers that passes 65504 is sent again in float32, on all ranks.

    Raises:
        ValueError: the compressor is not linear: a sum of its codes means nothing.
    """

    adds_codes = True

    def send_receive(self, tensors: Codes, name: str, ctx: Any) -> Tensor:
        """See `Communicator`."""
        sums = [self._sum(tensor) for tensor in tensors]
        found = self.compressor.decompress(sums, ctx)
        # A compressor that sends nothing has reduced on its own.
        divides = self.compressor.average and len(sums) > 0
        return found / self.world_size if divides else found

    def _sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()  # gradients of channels-last weights are none such
        total = all_reduce_(tensor.clone(), self.group, operation=_OP)
        # NOTE: device-to-host sync. Every rank has the same sum, and decides alike.
        if tensor.dtype == torch.float16 and not bool(total.isfinite().all()):
            return all_reduce_(tensor.float(), self.group, operation=_OP)
        return total


class Allgather(Communicator):
    """Sends codes to all ranks, as one message of bytes; each decodes them in rank order."""

    def send_receive(self, tensors: Codes, name: str, ctx: Any) -> Tensor:
        """See `Communicator`."""
        if self.world_size == 1 or not tensors:
            return self.compressor.aggregate([self.compressor.decompress(list(tensors), ctx)])
        parts = [as_bytes(tensor) for tensor in tensors]
        sizes = [[part.numel() for part in parts]] * self.world_size
        if not self.compressor.tensors_size_are_same:
            mine = torch.tensor(sizes[:1], device=parts[0].device)
            # NOTE: device-to-host sync, since messages are cut by these sizes.
            sizes = all_gather(mine, self.group, operation=_OP).tolist()
        totals = [sum(lengths) for lengths in sizes]
        row = Shards(self.group, tuple(totals), _OP).gathered(torch.cat(parts))
        decoded = []
        for sent, lengths in zip(row.split(totals), sizes, strict=True):
            # A copy is aligned, wherever the piece begins.
            pairs = zip(sent.split(lengths), tensors, strict=True)
            codes = [piece.clone().view(own.dtype) for piece, own in pairs]
            if self.compressor.tensors_size_are_same:
                codes = [code.view(own.shape) for code, own in zip(codes, tensors, strict=True)]
            decoded.append(self.compressor.decompress(codes, ctx))
        total = self.compressor.aggregate(decoded)
        return total / self.world_size if self.compressor.average else total


class _Memories(dict[str, CodecMemory]):
    """A memory for each name, of one tensor."""

    def make(self, name: str, like: Tensor) -> CodecMemory:
        """A new memory for a tensor of this name."""
        self[name] = CodecMemory([like.shape], like.device)
        return self[name]

    def of(self, name: str, like: Tensor) -> CodecMemory:
        """The memory of a name, on the device of a tensor."""
        memory = self.get(name) or self.make(name, like)
        if memory.device != like.device:  # of a state that was read to another one
            memory.device = like.device
            memory.take({kind: memory.kept_tensor(kind) for kind in memory.kinds()})
        return memory

    def kept(self, kind: str) -> dict[str, Tensor]:
        """Name to the tensor of a kind, in the shape of the name's tensor."""
        return {
            name: memory.kept_tensor(kind).view(memory.shapes[0])
            for name, memory in sorted(self.items())
            if kind in memory.kinds()
        }

    def load(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of what `kept` returned."""
        for name, tensor in tensors.items():
            memory = self.get(name) or self.make(name, tensor)
            memory.take({kind: tensor.detach().reshape(-1)})


# -- compressors -------------------------------------------------------------------------------


@dataclass
class Context:
    """Facts that a rank needs to decode, and that its memory may use.

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


def _check_momentum(owner: str, momentum: float) -> float:
    check_rule(owner, "momentum", momentum, "in [0, 1)", 0.0 <= momentum < 1.0)
    return momentum


def _check_ratio(owner: str, ratio: float) -> float:
    check_numbers(owner, {"compress_ratio": "float"}, {"compress_ratio": ratio})
    check_rule(owner, "compress_ratio", ratio, "in (0, 1]", 0.0 < ratio <= 1.0)
    return ratio


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    is_linear = True

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        return [tensor.detach().clone()], Context(tensor.shape)

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
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

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
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

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
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
        check_numbers("ThresholdCompressor", ThresholdCompressor.__init__.__annotations__, locals())
        super().__init__(tensors_size_are_same=False)
        fits = threshold >= 0.0 and math.isfinite(threshold)
        check_rule("ThresholdCompressor", "threshold", threshold, "finite and at least 0", fits)
        self.threshold = threshold

    def _select(self, flat_N: Tensor, left_N: Tensor) -> tuple[Tensor, Tensor]:
        found = threshold_compress_(
            flat_N, left_N, self.threshold, flat_N.numel(), check_finite=False
        )
        count = int(found[2])  # NOTE: device-to-host sync, since as many are sent
        return found.values[:count], found.indices[:count]


class _StatefulCompressor(Compressor):
    """Numbers the steps of each name, and keeps tensors for the next one that may be undone."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[str, int] = {}
        self._memories = _Memories()

    def _next_step(self, name: str) -> int:
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        return step

    def _memory(self, name: str, tensor: Tensor) -> CodecMemory:
        """Memory of a name, with a step begun."""
        memory = self._memories.of(name, tensor)
        if memory.shapes[0] != tensor.shape:
            memory = self._memories.make(name, tensor)
        memory.begin()
        return memory

    def undo(self, name: str) -> None:
        """See `Compressor`."""
        if name in self._steps:
            self._steps[name] -= 1
        if name in self._memories:
            self._memories[name].undo()

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor`."""
        self._steps = dict(state["steps"])
        self._memories = _Memories()


class RandomKCompressor(_StatefulCompressor):
    """Sends elements at random places, the same on all ranks in every step: no indices travel.

    Args:
        compress_ratio: share of the elements, in (0, 1].
        seed: of the places, equal on all ranks.
    """

    is_linear = True

    def __init__(self, compress_ratio: float, seed: int = 0) -> None:
        """Check the share."""
        super().__init__()
        check_numbers("RandomKCompressor", RandomKCompressor.__init__.__annotations__, locals())
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
        order_N = torch.randperm(flat_N.numel(), generator=generator, device="cpu")
        places_K = order_N[:k].to(flat_N.device)
        return [flat_N[places_K]], Context(tensor.shape, indices_K=places_K)

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        assert ctx.indices_K is not None
        dense_N = tensors[0].new_zeros(ctx.shape.numel())
        dense_N[ctx.indices_K] = tensors[0]
        return dense_N.view(ctx.shape)


class _BlockCompressor(_StatefulCompressor):
    """Sends codes of blocks with a scale each."""

    def __init__(self, format: str, block: int, *, stochastic: bool = False, seed: int = 0) -> None:
        """Check the size of blocks."""
        super().__init__()
        owner = type(self).__name__
        check_numbers(owner, {"bucket_size": "int"}, {"bucket_size": block})
        rule = "a power of two from 64 to 1024"
        check_rule(owner, "bucket_size", block, rule, block in (64, 128, 256, 512, 1024))
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

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
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
        return torch.tensor([self.seed, tensor_id, step, global_rank()], device=device)


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
        check_numbers("QSGDCompressor", QSGDCompressor.__init__.__annotations__, locals())
        fits = 1 <= quantum_num <= 127
        check_rule("QSGDCompressor", "quantum_num", quantum_num, "in [1, 127]", fits)
        format = "int4" if quantum_num <= 7 else "int8"
        super().__init__(format, bucket_size, stochastic=True, seed=seed)


class BlockQuantizer(_BlockCompressor):
    """Rounds to the nearest code: "int8", "int4" or "fp8".

    Args:
        format: as `moe_ext.ops.quantize_blockwise`.
        bucket_size: elements that share a scale.
    """

    def __init__(self, format: str = "int8", bucket_size: int = 256) -> None:
        """Check the format."""
        check_choice("BlockQuantizer", "format", format, ("int8", "int4", "fp8"))
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

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        return super().decompress(tensors, ctx).sign()

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        tensors, ctx = super().compress(tensor, name)
        # The quantiser's rest belongs to the mean magnitude, which is not used.
        ctx.left_N = None
        return tensors, ctx

    def aggregate(self, tensors: Codes) -> Tensor:
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
        check_numbers("SignumCompressor", SignumCompressor.__init__.__annotations__, locals())
        super().__init__(bucket_size)
        self.momentum = _check_momentum("SignumCompressor", momentum)

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        memory = self._memory(name, tensor)
        before, mixed = memory.kept("velocity"), (1.0 - self.momentum) * tensor.detach().float()
        if before is not None:
            mixed += self.momentum * before.view(tensor.shape)
        found = super().compress(mixed, name)
        memory.write("velocity", mixed.reshape(-1))
        memory.commit()
        return found

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor`."""
        momenta = {name: u.clone() for name, u in self._memories.kept("velocity").items()}
        return {**super().state_dict(), "momenta": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor`."""
        super().load_state_dict(state)
        self._memories.load("velocity", state["momenta"])


class PowerSGDCompressor(_StatefulCompressor):
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

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        memory, step = self._memory(name, tensor), self._steps.get(name, 0)
        reduced = self.codec.start(_flat(tensor).clone(), memory, group=self.group, step=step)
        found = reduced.wait().view(tensor.shape)
        memory.commit()
        self._steps[name] = step + 1
        return [], Context(tensor.shape, reduced=found)

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        assert ctx.reduced is not None
        return ctx.reduced

    def state_dict(self) -> dict[str, Any]:
        """See `Compressor`."""
        memories = self._memories.items()
        kept = {name: {kind: m.copy_of(kind) for kind in m.kinds()} for name, m in memories}
        shapes = {name: tuple(memory.shapes[0]) for name, memory in memories}
        return {**super().state_dict(), "factors": kept, "shapes": shapes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressor`."""
        super().load_state_dict(state)
        for name, kinds in state["factors"].items():
            device = next((t.device for t in kinds.values()), torch.device("cpu"))
            memory = CodecMemory([torch.Size(state["shapes"][name])], device)
            memory.take(kinds)
            self._memories[name] = memory


# -- memories ----------------------------------------------------------------------------------


class NoneMemory(Memory):
    """Keeps nothing: what is left out is lost."""

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        return tensor.detach().clone()


class _StoredMemory(Memory):
    """Tensors by kind and name.

    Args:
        kinds: kinds of tensors in a `state_dict`, and in a `CodecMemory`.
    """

    def __init__(self, **kinds: str) -> None:
        self._kinds = kinds
        self._memories = _Memories()
        self._begun: list[CodecMemory] = []

    def _begin(self, name: str, like: Tensor) -> tuple[CodecMemory, list[Tensor | None]]:
        """The memory of a name, and what it keeps of each kind in the shape of the tensor."""
        memory = self._memories.of(name, like)
        before, shape = tuple(memory.shapes[0]), tuple(like.shape)
        rule = f"of shape {before} as before"
        check_rule(type(self).__name__, name, shape, rule, shape == before)
        memory.begin()
        self._begun.append(memory)
        kept = [memory.kept(kind) for kind in self._kinds.values()]
        return memory, [None if tensor is None else tensor.view(like.shape) for tensor in kept]

    def commit(self) -> None:
        """See `Memory`."""
        self._end(CodecMemory.commit)

    def rollback(self) -> None:
        """See `Memory`."""
        self._end(CodecMemory.rollback)

    def _end(self, how: Callable[[CodecMemory], None]) -> None:
        for memory in self._begun:
            how(memory)
            memory.keep_no_spare()
        self._begun.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Memory`."""
        return {
            kind: {name: tensor.clone() for name, tensor in self._memories.kept(stored).items()}
            for kind, stored in self._kinds.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Memory`."""
        if set(state) != set(self._kinds):
            raise ValueError(
                f"{type(self).__name__}: expected a state of {sorted(self._kinds)}, got "
                f"{sorted(state)}"
            )
        self._memories = _Memories()
        for kind, tensors in state.items():
            self._memories.load(self._kinds[kind], tensors)


class ResidualMemory(_StoredMemory):
    """Error feedback: what was left out is added to the next gradient.

    With both factors at 1, what was applied plus the mean of what is owed is the sum of the means.

    Args:
        beta: factor on what is owed.
        gamma: factor on the gradient.
    """

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        """Nothing is owed."""
        check_numbers("ResidualMemory", ResidualMemory.__init__.__annotations__, locals())
        super().__init__(residuals="residual")
        self.beta = beta
        self.gamma = gamma

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Name to what is owed, after the last step."""
        return self._memories.kept("residual")

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        whole = self.gamma * tensor.detach().float()
        _, (residual,) = self._begin(name, tensor)
        return whole if residual is None else whole.add_(residual, alpha=self.beta)

    def update(
        self, tensor: Tensor, name: str, compressor: Compressor, tensor_compressed: Codes, ctx: Any
    ) -> None:
        """See `Memory`."""
        left_N = ctx.left_N if isinstance(ctx, Context) else None
        if left_N is None:
            left_N = tensor - compressor.decompress(list(tensor_compressed), ctx)
        self._memories[name].write("residual", left_N.reshape(-1))


class DgcMemory(_StoredMemory):
    """Momentum correction and factor masking of Deep Gradient Compression.

    ``u = momentum u + g``, ``v = v + u``; of v the largest are sent, and both are zero there. The
    optimizer then runs without momentum.

    Args:
        momentum: in [0, 1).
        gradient_clipping: clamp elements to the root of the mean over ranks of the squared norm.
        world_size: not used; ranks are those of the group.
        group: the ranks, None for the default group.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887).
    """

    def __init__(
        self,
        momentum: float = 0.9,
        gradient_clipping: bool = False,
        world_size: int | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Check the momentum."""
        check_numbers("DgcMemory", DgcMemory.__init__.__annotations__, locals(), ["world_size"])
        super().__init__(momenta="velocity", residuals="residual")
        self.momentum = _check_momentum("DgcMemory", momentum)
        self.gradient_clipping = gradient_clipping
        self.group = group

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        gradient = tensor.detach().float()
        if self.gradient_clipping:
            gradient = self._clipped(gradient)
        memory, (u, v) = self._begin(name, tensor)
        u = gradient.clone() if u is None else gradient + self.momentum * u
        v = u.clone() if v is None else v + u
        memory.write("velocity", u.reshape(-1).clone())
        memory.write("residual", v.reshape(-1).clone())
        return v

    def update(
        self, tensor: Tensor, name: str, compressor: Compressor, tensor_compressed: Codes, ctx: Any
    ) -> None:
        """See `Memory`.

        Raises:
            ValueError: the compressor does not say which elements it sends.
        """
        indices_K = ctx.indices_K if isinstance(ctx, Context) else None
        if indices_K is None:
            raise ValueError(
                "DgcMemory: expected compressor to select elements (topk, dgc, threshold, "
                f"randomk), got {type(compressor).__name__}"
            )
        for kind in self._kinds.values():
            self._memories[name].tensor(kind)[indices_K] = 0.0

    def _clipped(self, gradient: Tensor) -> Tensor:
        group = resolve_group(self.group, "DgcMemory")
        square = gradient.square().sum().view(1)
        all_reduce_(square, group, operation="DgcMemory")
        limit = torch.sqrt(square / group_size(group))
        return torch.minimum(torch.maximum(gradient, -limit), limit)


# -- by GRACE's keys ---------------------------------------------------------------------------


def _powersgd(compress_rank: int = 1, group: ProcessGroup | None = None) -> Compressor:
    return PowerSGDCompressor(compress_rank, group=group)


# The class that a value stands for, and the keys that it reads.
_COMPRESSORS: dict[str, tuple[Callable[..., Compressor], tuple[str, ...]]] = {
    "none": (NoneCompressor, ()),
    "fp16": (FP16Compressor, ()),
    "topk": (TopKCompressor, ("compress_ratio",)),
    "dgc": (DgcCompressor, ("compress_ratio",)),
    "randomk": (RandomKCompressor, ("compress_ratio", "seed")),
    "threshold": (ThresholdCompressor, ("threshold",)),
    "qsgd": (QSGDCompressor, ("quantum_num", "bucket_size", "seed")),
    "qsgd_cuda": (QSGDCompressor, ("quantum_num", "bucket_size", "seed")),
    "int8": (partial(BlockQuantizer, "int8"), ("bucket_size",)),
    "int4": (partial(BlockQuantizer, "int4"), ("bucket_size",)),
    "fp8": (partial(BlockQuantizer, "fp8"), ("bucket_size",)),
    "onebit": (OneBitCompressor, ()),
    "efsignsgd": (OneBitCompressor, ()),
    "signsgd": (SignSGDCompressor, ()),
    "signum": (SignumCompressor, ("momentum",)),
    "powersgd": (_powersgd, ("compress_rank", "group")),
}
_MEMORIES: dict[str, tuple[Callable[..., Memory], tuple[str, ...]]] = {
    "none": (NoneMemory, ()),
    "residual": (ResidualMemory, ()),
    "powersgd": (ResidualMemory, ()),
    "efsignsgd": (ResidualMemory, ()),
    "dgc": (DgcMemory, ("momentum", "gradient_clipping", "group")),
}
_COMMUNICATORS: dict[str, tuple[Callable[..., Communicator], tuple[str, ...]]] = {
    "allreduce": (Allreduce, ("world_size", "group")),
    "allgather": (Allgather, ("world_size", "group")),
    "broadcast": (Allgather, ("world_size", "group")),
}
_DEFAULTS: dict[str, Any] = {
    "compressor": "none",
    "memory": "none",
    "communicator": "allreduce",
    "compress_ratio": 0.3,
    "threshold": 0.01,
}
# These belong to the kernels or the algebra of the original, and change nothing here.
_UNUSED = {
    "kernel": "selection is exact and fused here",
    "lr": "residuals are in units of the gradient here",
}
_TABLES: dict[str, Mapping[str, tuple[Callable[..., object], tuple[str, ...]]]] = {
    "compressor": _COMPRESSORS,
    "memory": _MEMORIES,
    "communicator": _COMMUNICATORS,
}
_KEYS = {key for table in _TABLES.values() for _, keys in table.values() for key in keys}


def grace_from_params(params: Mapping[str, Any], *, group: ProcessGroup | None = None) -> Any:
    """A communicator by GRACE's keys.

    ============== =================================================================================
    key            values
    ============== =================================================================================
    compressor     none (default), fp16, topk, dgc, randomk, threshold, qsgd, qsgd_cuda (the same),
                   onebit, efsignsgd (the same), signsgd, signum, powersgd; and int8, int4, fp8
    memory         none (default), residual, dgc; powersgd and efsignsgd are residual
    communicator   allreduce (default; none, fp16, randomk, powersgd), allgather, broadcast (the
                   same result, sent as allgather)
    compress_ratio topk, dgc and randomk: 0.3
    threshold      threshold: 0.01
    quantum_num    qsgd: 127; bucket_size: 128
    compress_rank  powersgd: 1
    momentum       signum and dgc memory: 0.9; gradient_clipping of the latter: False
    world_size     checked, if it is given
    seed           randomk and qsgd: 0
    ============== =================================================================================

    Differences from the original, on purpose: signs travel as bits and decode right; a
    threshold is compared with magnitudes; a tensor of zeros is not sent whole; values and indices
    are one message; residuals share no memory with gradients, are kept by name in a `state_dict`,
    and stay as they were where a gradient is NaN or a rank is lost; only what can be added up may
    be reduced by ``allreduce``; results have the same bits on all ranks.

    Args:
        params (dict): as above.
        group: the ranks; None is the default group.

    Returns:
        Communicator: its ``step(tensor, name)`` does the rest.

    Raises:
        ValueError: an unknown key or value, or a combination that has no meaning. A key that
            nothing reads is a warning.
    """
    known = {*_TABLES, *_KEYS} - {"group"}
    unknown = set(params) - known - set(_UNUSED)
    if unknown:
        raise ValueError(
            f"grace_from_params: expected keys of {tuple(sorted(known))}, got "
            f"{tuple(sorted(unknown))}"
        )
    values = {**_DEFAULTS, **params, "group": group}
    read = {*_TABLES}

    def make(key: str, *parts: object) -> Any:
        table = _TABLES[key]
        check_choice("grace_from_params", key, values[key], table)
        made, keys = table[values[key]]
        read.update(keys)
        return made(*parts, **{name: values[name] for name in keys if name in values})

    compressor, memory = make("compressor"), make("memory")
    selects = TopKCompressor | ThresholdCompressor | RandomKCompressor
    if isinstance(memory, DgcMemory) and not isinstance(compressor, selects):
        raise ValueError(
            "grace_from_params: expected compressor to select elements for memory 'dgc', got "
            f"{values['compressor']!r}"
        )
    communicator = make("communicator", compressor, memory)
    for key in sorted(set(params) - read):
        why = _UNUSED.get(
            key, f"{type(compressor).__name__} and {type(memory).__name__} do not read it"
        )
        warnings.warn(f"grace_from_params: {key} is not used: {why}", stacklevel=2)
    return communicator
