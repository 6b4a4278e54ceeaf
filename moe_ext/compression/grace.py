"""GRACE's interface, so that its users can move here.

The three interfaces have the methods of ``grace_dl.dist``, and `grace_from_params` takes its keys::

    from moe_ext.compression.grace import grace_from_params

    grace = grace_from_params({"compressor": "topk", "memory": "residual",
                               "communicator": "allgather", "compress_ratio": 0.01})
    for name, parameter in model.named_parameters():
        parameter.grad = grace.step(parameter.grad, name)

New code is better off with `CompressionState`: here every tensor is a message of its own that is
waited for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import ProcessGroup

from moe_ext.compression.grace_base import (
    Allgather,
    Allreduce,
    Communicator,
    Compressor,
    Memory,
)
from moe_ext.compression.grace_compressors import (
    BlockQuantizer,
    Context,
    DgcCompressor,
    FP16Compressor,
    NoneCompressor,
    OneBitCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    RandomKCompressor,
    SignSGDCompressor,
    SignumCompressor,
    ThresholdCompressor,
    TopKCompressor,
)
from moe_ext.compression.grace_memories import DgcMemory, NoneMemory, ResidualMemory

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

_OP = "grace_from_params"
_Params = Mapping[str, Any]


def _qsgd(params: _Params, group: ProcessGroup | None) -> Compressor:
    return QSGDCompressor(
        params.get("quantum_num", 127), params.get("bucket_size", 128), params.get("seed", 0)
    )


def _blocks(format: str) -> Callable[[_Params, ProcessGroup | None], Compressor]:
    return lambda params, group: BlockQuantizer(format, params.get("bucket_size", 256))


_COMPRESSORS: dict[str, Callable[[_Params, ProcessGroup | None], Compressor]] = {
    "none": lambda params, group: NoneCompressor(),
    "fp16": lambda params, group: FP16Compressor(),
    "topk": lambda params, group: TopKCompressor(params.get("compress_ratio", 0.3)),
    "dgc": lambda params, group: DgcCompressor(params.get("compress_ratio", 0.3)),
    "randomk": lambda params, group: RandomKCompressor(
        params.get("compress_ratio", 0.3), params.get("seed", 0)
    ),
    "threshold": lambda params, group: ThresholdCompressor(params.get("threshold", 0.01)),
    "qsgd": _qsgd,
    "qsgd_cuda": _qsgd,
    "int8": _blocks("int8"),
    "int4": _blocks("int4"),
    "fp8": _blocks("fp8"),
    "onebit": lambda params, group: OneBitCompressor(),
    "efsignsgd": lambda params, group: OneBitCompressor(),
    "signsgd": lambda params, group: SignSGDCompressor(),
    "signum": lambda params, group: SignumCompressor(params.get("momentum", 0.9)),
    "powersgd": lambda params, group: PowerSGDCompressor(
        params.get("compress_rank", 1), group=group
    ),
}
_MEMORIES: dict[str, Callable[[_Params, ProcessGroup | None], Memory]] = {
    "none": lambda params, group: NoneMemory(),
    "residual": lambda params, group: ResidualMemory(),
    "powersgd": lambda params, group: ResidualMemory(),
    "efsignsgd": lambda params, group: ResidualMemory(),
    "dgc": lambda params, group: DgcMemory(
        params.get("momentum", 0.9), params.get("gradient_clipping", False), group=group
    ),
}
_COMMUNICATORS: dict[str, type[Communicator]] = {
    "allreduce": Allreduce,
    "allgather": Allgather,
    "broadcast": Allgather,
}
_KEYS = {
    "compressor", "memory", "communicator", "world_size", "compress_ratio", "threshold",
    "quantum_num", "bucket_size", "momentum", "gradient_clipping", "compress_rank", "seed",
}  # fmt: skip
# These belong to the kernels or the algebra of the original, and change nothing here.
_UNUSED = {
    "kernel": "selection is exact and fused here",
    "lr": "residuals are in units of the gradient here",
}


class _Read(dict[str, Any]):
    """Keys and values that tell which keys nobody asked for."""

    def __init__(self, params: _Params) -> None:
        super().__init__(params)
        self.unread = set(params)

    def get(self, key: str, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().get(key, default)


def _chosen(params: _Params, key: str, default: str, table: Mapping[str, Any]) -> Any:
    name = params.get(key, default)
    if name not in table:
        raise ValueError(f"{_OP}: expected {key} to be one of {tuple(table)}, got {name!r}")
    return table[name]


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

    What is different from the original, on purpose: signs travel as bits and decode right; a
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
    unknown = set(params) - _KEYS - set(_UNUSED)
    if unknown:
        raise ValueError(
            f"{_OP}: expected keys of {tuple(sorted(_KEYS))}, got {tuple(sorted(unknown))}"
        )
    given = _Read(params)
    compressor = _chosen(given, "compressor", "none", _COMPRESSORS)(given, group)
    memory = _chosen(given, "memory", "none", _MEMORIES)(given, group)
    if isinstance(memory, DgcMemory) and not isinstance(
        compressor, TopKCompressor | ThresholdCompressor | RandomKCompressor
    ):
        raise ValueError(
            f"{_OP}: expected compressor to select elements for memory 'dgc', got "
            f"{given.get('compressor', 'none')!r}"
        )
    communicator = _chosen(given, "communicator", "allreduce", _COMMUNICATORS)
    made = communicator(compressor, memory, given.get("world_size"), group=group)
    for key in sorted(given.unread):
        why = _UNUSED.get(
            key, f"{type(compressor).__name__} and {type(memory).__name__} do not read it"
        )
        warnings.warn(f"{_OP}: {key} is not used: {why}", stacklevel=2)
    return made
