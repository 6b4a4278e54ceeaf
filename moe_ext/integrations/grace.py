"""GRACE's interface on moe_ext, for scripts that use GRACE.

The three interfaces have the methods of ``grace_dl.dist``, and `grace_from_params` takes its keys::

    from moe_ext.integrations.grace import grace_from_params

    grace = grace_from_params({"compressor": "topk", "memory": "residual",
                               "communicator": "allgather", "compress_ratio": 0.01})
    for name, parameter in model.named_parameters():
        parameter.grad = grace.step(parameter.grad, name)

New code should use `CompressionState`, which is faster: this interface sends a separate message for
every tensor, and waits for each.

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
    """Encodes a tensor as a list of tensors, and decodes them.

    Args:
        average: communicators divide the sum over ranks by the number of ranks.
        tensors_size_are_same: codes have equal shapes on all ranks. Otherwise the codes of other
            ranks are flat when they are decoded.

    Attributes:
        is_linear: True if a sum of codes decodes to the sum of the tensors, so that `Allreduce` can
            add codes up.
    """

    is_linear = False

    def __init__(self, average: bool = True, tensors_size_are_same: bool = True) -> None:
        """Set the attributes that communicators read."""
        check_numbers(type(self).__name__, Compressor.__init__.__annotations__, locals())
        self.average = average
        self.tensors_size_are_same = tensors_size_are_same

    @abstractmethod
    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        """Return the tensors to send, and a context to decode the tensors of any rank."""

    @abstractmethod
    def decompress(self, tensors: Codes, ctx: Any) -> Tensor:
        """Decode a tensor of the original shape."""

    def undo(self, name: str) -> None:  # noqa: B027
        """Revert the state that the last `compress` of a name changed, after a failed step."""

    def aggregate(self, tensors: Codes) -> Tensor:
        """Sum the decoded tensors of all ranks, in rank order."""
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which the next steps depend."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load the result of `state_dict`."""


class Memory(ABC):
    """Adds the residual to a gradient, and keeps the part that compression leaves out.

    `Communicator.step` calls `commit` after a successful step, and `rollback` after a failed one.
    """

    @abstractmethod
    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """Return a new tensor to compress instead of the gradient."""

    def update(  # noqa: B027  (a memory may keep nothing)
        self, tensor: Tensor, name: str, compressor: Compressor, tensor_compressed: Codes, ctx: Any
    ) -> None:
        """Compute the new residual; `tensor` is the result of `compensate`."""

    def commit(self) -> None:  # noqa: B027
        """Keep the changes of this step."""

    def rollback(self) -> None:  # noqa: B027
        """Drop the changes of this step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load the result of `state_dict`."""


class Communicator(ABC):
    """Sends the codes of a compressor to all ranks.

    Args:
        compressor: encodes and decodes tensors.
        memory: error feedback.
        world_size: number of ranks of the group, which is checked; None skips the check.
        group: the ranks, None for the default group.

    Raises:
        ValueError: ``world_size`` is not that of the group, or codes are to be added but the
            compressor is not linear.

    Attributes:
        adds_codes: True if codes are added up over ranks, which needs a linear compressor.
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
        """Send codes, and return the mean (or sum) over ranks of the decoded tensors."""

    def step(self, tensor: Tensor, name: str) -> Tensor:
        """Reduce one gradient over ranks, with compression and error feedback.

        Args:
            tensor (Tensor): float32, bfloat16 or float16, of any shape; not changed.
            name (str): name of the parameter, under which its residual is kept.

        Returns:
            Tensor: a new tensor of the same shape and dtype, with the same bits on all ranks.

        Raises:
            ValueError: on every rank, if a tensor has NaN or infinity on some rank, is of another
                dtype, or differs in name, shape or dtype between ranks. Nothing is sent; memory and
                compressor are unchanged.
            RankFailureError: a rank died or did not answer. Memory and compressor are unchanged.
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
        """Return the residuals, momenta and factors of this rank by name. Ranks' states differ."""
        return {
            "version": 1,
            "world_size": self.world_size,
            "compressor": self.compressor.state_dict(),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` of the same rank.

        Raises:
            ValueError: the state has another version or number of ranks.
        """
        for key, want in (("version", 1), ("world_size", self.world_size)):
            found = state.get(key)
            check_rule(type(self).__name__, f"the state's {key}", found, f"{want}", found == want)
        self.compressor.load_state_dict(state["compressor"])
        self.memory.load_state_dict(state["memory"])

    def _check(self, tensor: Tensor, name: str) -> None:
        """Raise ValueError on every rank if a tensor is not finite, or differs between ranks.

        NaN and infinity would remain in the residuals. Codes of different tensors cannot be decoded
        or added. float64 is refused, because residuals and codes have 32 bits at most.

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
    """Adds the codes of a linear compressor up by an all-reduce.

    If a sum of half-precision numbers exceeds 65504, all ranks send them again in float32.

    Raises:
        ValueError: the compressor is not linear, so that a sum of its codes has no meaning.
    """

    adds_codes = True

    def send_receive(self, tensors: Codes, name: str, ctx: Any) -> Tensor:
        """See `Communicator`."""
        sums = [self._sum(tensor) for tensor in tensors]
        found = self.compressor.decompress(sums, ctx)
        # A compressor that returns no tensors has already averaged over the ranks.
        divides = self.compressor.average and len(sums) > 0
        return found / self.world_size if divides else found

    def _sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()  # gradients of channels-last weights are not contiguous
        total = all_reduce_(tensor.clone(), self.group, operation=_OP)
        # NOTE: device-to-host sync. Every rank has the same sum, so all take the same branch.
        if tensor.dtype == torch.float16 and not bool(total.isfinite().all()):
            return all_reduce_(tensor.float(), self.group, operation=_OP)
        return total


class Allgather(Communicator):
    """Sends codes to all ranks as one message of bytes; every rank decodes them in rank order."""

    def send_receive(self, tensors: Codes, name: str, ctx: Any) -> Tensor:
        """See `Communicator`."""
        if self.world_size == 1 or not tensors:
            return self.compressor.aggregate([self.compressor.decompress(list(tensors), ctx)])
        parts = [as_bytes(tensor) for tensor in tensors]
        sizes = [[part.numel() for part in parts]] * self.world_size
        if not self.compressor.tensors_size_are_same:
            mine = torch.tensor(sizes[:1], device=parts[0].device)
            # NOTE: device-to-host sync, because the host needs these sizes to cut messages.
            sizes = all_gather(mine, self.group, operation=_OP).tolist()
        totals = [sum(lengths) for lengths in sizes]
        row = Shards(self.group, tuple(totals), _OP).gathered(torch.cat(parts))
        decoded = []
        for sent, lengths in zip(row.split(totals), sizes, strict=True):
            # A piece may begin at any byte. Its copy is aligned for the code's dtype.
            pairs = zip(sent.split(lengths), tensors, strict=True)
            codes = [piece.clone().view(own.dtype) for piece, own in pairs]
            if self.compressor.tensors_size_are_same:
                codes = [code.view(own.shape) for code, own in zip(codes, tensors, strict=True)]
            decoded.append(self.compressor.decompress(codes, ctx))
        total = self.compressor.aggregate(decoded)
        return total / self.world_size if self.compressor.average else total


class _Memories(dict[str, CodecMemory]):
    """Memories of single tensors, by name."""

    def make(self, name: str, like: Tensor) -> CodecMemory:
        """Make a new memory for a tensor of this name."""
        self[name] = CodecMemory([like.shape], like.device)
        return self[name]

    def of(self, name: str, like: Tensor) -> CodecMemory:
        """Return the memory of a name, on the device of a tensor."""
        memory = self.get(name) or self.make(name, like)
        if memory.device != like.device:  # a state was loaded from another device
            memory.device = like.device
            memory.take({kind: memory.kept_tensor(kind) for kind in memory.kinds()})
        return memory

    def kept(self, kind: str) -> dict[str, Tensor]:
        """Return name to kept tensor of a kind, each in the shape of its gradient."""
        return {
            name: memory.kept_tensor(kind).view(memory.shapes[0])
            for name, memory in sorted(self.items())
            if kind in memory.kinds()
        }

    def load(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of a result of `kept`."""
        for name, tensor in tensors.items():
            memory = self.get(name) or self.make(name, tensor)
            memory.take({kind: tensor.detach().reshape(-1)})


# -- compressors -------------------------------------------------------------------------------


@dataclass
class Context:
    """Values that a rank needs to decode, and that its memory may use.

    Attributes:
        shape: shape of the tensor.
        left_N: the part that is not sent, if the compressor knows it; saves the memory a decoding.
        indices_K: indices of the sent elements, if the compressor selects elements.
        reduced: the mean over ranks, if the compressor has sent messages itself.
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
    """Sends tensors unchanged."""

    is_linear = True

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        return [tensor.detach().clone()], Context(tensor.shape)

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        return tensors[0].view(ctx.shape)


class FP16Compressor(Compressor):
    """Sends half-precision numbers, clamped to 65504.

    `Allreduce` adds them in half precision, or in float32 if a sum overflows.
    """

    is_linear = True

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        # An infinite code would make the residual infinite for all further steps. The clamped part
        # goes into the residual.
        return [tensor.detach().clamp(-_LARGEST_HALF, _LARGEST_HALF).half()], Context(tensor.shape)

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        return tensors[0].float().view(ctx.shape)


class _SparseCompressor(Compressor):
    """Sends the values of some elements, with int32 or int64 indices."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        flat_N = _flat(tensor)
        left_N = torch.zeros_like(flat_N)
        values_K, indices_K = self._select(flat_N, left_N)
        # int32 holds indices of at most 2^31 elements.
        dtype = torch.int32 if flat_N.numel() < 2**31 else torch.int64
        ctx = Context(tensor.shape, left_N=left_N, indices_K=indices_K)
        return [values_K, indices_K.to(dtype)], ctx

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        values_K, indices_K = tensors
        dense_N = values_K.new_zeros(ctx.shape.numel())
        # Indices are distinct, unless zeros fill up the message. Adding is correct in both cases.
        return dense_N.index_add_(0, indices_K.long(), values_K).view(ctx.shape)

    @abstractmethod
    def _select(self, flat_N: Tensor, left_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and indices to send, and write all other elements to `left_N`."""


class TopKCompressor(_SparseCompressor):
    """Sends the largest elements. The choice is exact; ties go to the lower index.

    Args:
        compress_ratio: share of the elements, in (0, 1]; at least one is sent.
    """

    def __init__(self, compress_ratio: float) -> None:
        """Check the ratio."""
        super().__init__()
        self.compress_ratio = _check_ratio(type(self).__name__, compress_ratio)

    def _select(self, flat_N: Tensor, left_N: Tensor) -> tuple[Tensor, Tensor]:
        k = min(flat_N.numel(), max(1, int(flat_N.numel() * self.compress_ratio)))
        found = topk_compress_(flat_N, left_N, k, check_finite=False)
        return found.values, found.indices


class DgcCompressor(TopKCompressor):
    """Sends the k largest elements, which GRACE's compressor finds approximately, from a sample.

    Unlike GRACE's, it sends no more than k elements of a tensor of zeros.
    """


class ThresholdCompressor(_SparseCompressor):
    """Sends the elements whose magnitude reaches a threshold. Their number differs between ranks.

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
        count = int(found[2])  # NOTE: device-to-host sync, for the length of the message
        return found.values[:count], found.indices[:count]


class _StatefulCompressor(Compressor):
    """Counts the steps of each name, and keeps tensors between steps; `undo` reverts a step."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[str, int] = {}
        self._memories = _Memories()

    def _next_step(self, name: str) -> int:
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        return step

    def _memory(self, name: str, tensor: Tensor) -> CodecMemory:
        """Return the memory of a name, after beginning a step."""
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
    """Sends elements at random places, which are equal on all ranks, so no indices are sent.

    Args:
        compress_ratio: share of the elements, in (0, 1].
        seed: seed of the places, equal on all ranks.
    """

    is_linear = True

    def __init__(self, compress_ratio: float, seed: int = 0) -> None:
        """Check the ratio."""
        super().__init__()
        check_numbers("RandomKCompressor", RandomKCompressor.__init__.__annotations__, locals())
        self.compress_ratio = _check_ratio("RandomKCompressor", compress_ratio)
        self.seed = seed

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        flat_N = _flat(tensor)
        k = min(flat_N.numel(), max(1, int(flat_N.numel() * self.compress_ratio)))
        step = self._next_step(name)
        # `hash` of a string differs between processes.
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
    """Sends quantised blocks, with one scale each."""

    def __init__(self, format: str, block: int, *, stochastic: bool = False, seed: int = 0) -> None:
        """Check the block size."""
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
        # The state includes the rank, so that rounding errors of ranks are independent.
        return torch.tensor([self.seed, tensor_id, step, global_rank()], device=device)


class QSGDCompressor(_BlockCompressor):
    """Rounds stochastically to a whole number of steps, in blocks scaled by their largest element.

    GRACE scales a bucket by its norm, which leaves some steps unused.

    Args:
        quantum_num: steps on either side of zero. Up to 7 are sent as 4 bits, up to 127 as 8 bits.
        bucket_size: number of elements that share a scale.
        seed: seed of the random numbers.
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
        format: see `moe_ext.ops.quantize_blockwise`.
        bucket_size: number of elements that share a scale.
    """

    def __init__(self, format: str = "int8", bucket_size: int = 256) -> None:
        """Check the format."""
        check_choice("BlockQuantizer", "format", format, ("int8", "int4", "fp8"))
        super().__init__(format, bucket_size)


class OneBitCompressor(_BlockCompressor):
    """Sends signs, eight per byte, and the mean magnitude of each block.

    A block of zeros decodes to zeros.

    Args:
        bucket_size: number of elements that share a magnitude.
    """

    def __init__(self, bucket_size: int = 256) -> None:
        """Check the block size."""
        super().__init__("sign", bucket_size)


class SignSGDCompressor(OneBitCompressor):
    """Takes the majority of the ranks' signs: the result is -1, 0 (a tie) or 1.

    Args:
        bucket_size: number of elements of a block. A block of zeros decodes to zeros.
    """

    def __init__(self, bucket_size: int = 256) -> None:
        """Set `average` to False, because a majority of signs is not divided by the ranks."""
        super().__init__(bucket_size)
        self.average = False

    def decompress(self, tensors: Codes, ctx: Context) -> Tensor:
        """See `Compressor`."""
        return super().decompress(tensors, ctx).sign()

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Context]:
        """See `Compressor`."""
        tensors, ctx = super().compress(tensor, name)
        # The quantiser's residual assumes that signs decode to the mean magnitude. They decode to
        # -1 and 1, so the memory has to compute the residual.
        ctx.left_N = None
        return tensors, ctx

    def aggregate(self, tensors: Codes) -> Tensor:
        """See `Compressor`."""
        return super().aggregate(tensors).sign()


class SignumCompressor(SignSGDCompressor):
    """Takes the majority of the signs of the ranks' momenta.

    Args:
        momentum: factor on the momentum of the last step, in [0, 1).
        bucket_size: see `SignSGDCompressor`.
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
    """Sends low-rank factors, see `PowerSGD`; `compress` itself reduces them over ranks.

    Args:
        rank: number of columns of the factors.
        group: the ranks, None for the default group.
    """

    is_linear = True

    def __init__(self, rank: int = 1, *, group: ProcessGroup | None = None) -> None:
        """Make a codec without error feedback, because the memory keeps the residual."""
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
    """Keeps no residual, so that the part which compression leaves out is lost."""

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        return tensor.detach().clone()


class _StoredMemory(Memory):
    """A memory that stores tensors by kind and name.

    Args:
        kinds: kind of tensor in a `state_dict`, to kind in a `CodecMemory`.
    """

    def __init__(self, **kinds: str) -> None:
        self._kinds = kinds
        self._memories = _Memories()
        self._begun: list[CodecMemory] = []

    def _begin(self, name: str, like: Tensor) -> tuple[CodecMemory, list[Tensor | None]]:
        """Return the memory of a name, and its tensor of each kind in the shape of `like`."""
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
    """Error feedback: adds the part that compression left out to the next gradient.

    If both factors are 1, nothing is lost: the sum of all results plus the mean residual over ranks
    equals the sum of the mean gradients.

    Args:
        beta: factor on the residual.
        gamma: factor on the gradient.
    """

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        """Begin without residuals."""
        check_numbers("ResidualMemory", ResidualMemory.__init__.__annotations__, locals())
        super().__init__(residuals="residual")
        self.beta = beta
        self.gamma = gamma

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Name to residual, after the last step."""
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

    ``u = momentum u + g``, ``v = v + u``. The largest elements of v are sent, and u and v become
    zero there. The optimizer must run without momentum.

    Args:
        momentum: factor on u, in [0, 1).
        gradient_clipping: clamp elements to the root of the mean over ranks of the squared norm.
        world_size: ignored; ranks are those of the group.
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
            ValueError: the compressor does not select elements.
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


# For each value of a key: class, and further keys that are its arguments.
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
# Keys that only GRACE's own implementation needs, with the reason why they are ignored.
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
    """Make a communicator from GRACE's keys.

    ============== =================================================================================
    key            values
    ============== =================================================================================
    compressor     none (default), fp16, topk, dgc, randomk, threshold, qsgd, qsgd_cuda (the same),
                   onebit, efsignsgd (the same), signsgd, signum, powersgd; and int8, int4, fp8
    memory         none (default), residual, dgc; powersgd and efsignsgd mean residual
    communicator   allreduce (default; none, fp16, randomk, powersgd), allgather, broadcast (the
                   same result, sent as allgather)
    compress_ratio topk, dgc and randomk: 0.3
    threshold      threshold: 0.01
    quantum_num    qsgd: 127; bucket_size: 128
    compress_rank  powersgd: 1
    momentum       signum and dgc memory: 0.9; gradient_clipping of dgc memory: False
    world_size     checked, if it is given
    seed           randomk and qsgd: 0
    ============== =================================================================================

    Intended differences from GRACE:

    - Signs are sent as bits, and decode correctly. Thresholds are compared with magnitudes. A
      tensor of zeros is not sent whole. Values and indices are sent in one message.
    - Residuals share no memory with gradients, are kept by name in a `state_dict`, and are
      unchanged if a gradient is NaN or a rank is lost.
    - ``allreduce`` accepts only linear compressors. Results have the same bits on all ranks.

    Args:
        params (dict): the keys of the table.
        group: the ranks; None is the default group.

    Returns:
        Communicator: call its ``step(tensor, name)`` for every gradient.

    Raises:
        ValueError: a key or value is unknown, or a combination has no meaning. A key that nothing
            reads causes a warning.
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
