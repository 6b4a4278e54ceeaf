"""Horovod's calls over torch's process group.

Scripts of `horovod.torch` run with another import::

    import moe_ext.integrations.horovod as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size()),
                                         named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Arguments have Horovod's names and order. Gradients are averaged when the optimizer steps: after the
backward pass, not during it. Every call is compared over ranks, so ranks must make calls in the
same order. `_async` calls, too, are complete when they return. The error for a missing name of
Horovod says what to use instead. If ranks hold different experts, call `sync_gradients(model)`
before the step, with the plain optimizer.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_rule, refuse_copy
from moe_ext._compile import outside_graphs
from moe_ext.attention.sharding import Shards
from moe_ext.comm.collectives import all_reduce_, gather_objects
from moe_ext.comm.collectives import broadcast_ as _send
from moe_ext.comm.groups import (
    global_rank,
    is_initialized,
    join_processes,
    leave_processes,
    resolve_group,
    world_size,
)
from moe_ext.distributed import sync_gradients
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.gradients import gradient_dtype

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

Average, Sum, Adasum, Min, Max, Product = "average", "sum", "adasum", "min", "max", "product"
# Operations that calls accept; they refuse "adasum" and "product".
_OPS = (Average, Sum, Min, Max)
global_process_set = "global"
# Replacement, for messages, to names of Horovod that this module does not have.
_INSTEAD = {
    "torch.distributed.all_to_all_single": ("alltoall", "alltoall_async"),
    "torch.distributed.reduce_scatter_tensor": (
        *("reducescatter", "reducescatter_async"),
        *("grouped_reducescatter", "grouped_reducescatter_async"),
    ),
    "allgather for each tensor": ("grouped_allgather", "grouped_allgather_async"),
    "grouped_allreduce": ("grouped_allreduce_async", "grouped_allreduce_async_"),
    "moe_ext.compression.row_sparse_all_reduce": ("sparse_allreduce_async",),
    "torch.nn.SyncBatchNorm": ("SyncBatchNorm",),
    "torchrun --max-restarts and moe_ext.distributed.checkpoint": ("elastic",),
    "torch.distributed.new_group": ("ProcessSet", "add_process_set", "remove_process_set"),
    "torch.profiler": ("start_timeline", "stop_timeline"),
    "torch.distributed.get_backend": (
        *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
        *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
    ),
}
_ABSENT = {name: instead for instead, names in _INSTEAD.items() for name in names}
# Kinds of step for `_begin`. A kind of 0 or more is the step of the optimizer with that number.
_JOINED, _CALL, _SCALED = -1, -2, -3


def __getattr__(name: str) -> NoReturn:
    if name in _ABSENT:
        raise AttributeError(
            f"horovod.{name}: expected a name that moe_ext.integrations.horovod has, got {name}; "
            f"use {_ABSENT[name]}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Compressor(Protocol):
    """Makes tensors smaller before they are reduced, and restores dtype and shape afterwards."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a tensor like the argument of `compress`."""


class _NoneCompressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _FP16Compressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """Compressors of tensors that are sent: none, or half precision."""

    none: type[Compressor] = _NoneCompressor
    fp16: type[Compressor] = _FP16Compressor


_optimizers: list[_Gradients] = []
# Ranks that still had data at the last `_begin` in which any rank had.
_active: list[int] = []


def init(comm: None = None, process_sets: None = None) -> None:
    """Join the processes that torchrun started; an existing process group is kept.

    Args:
        comm: must be None; ranks are those of torchrun.
        process_sets: must be None; the only set is the global one.

    Raises:
        ValueError: an argument is not None.
    """
    for name, value in (("comm", comm), ("process_sets", process_sets)):
        check_rule("init", name, value, "None", value is None)
    if not is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        join_processes(backend)
        _optimizers.clear()
        _active.clear()


def shutdown() -> None:
    """Leave the process group."""
    leave_processes()


def rank() -> int:
    """Return this process's rank."""
    return global_rank()


def size() -> int:
    """Return the number of processes."""
    return world_size()


def local_rank() -> int:
    """Return this process's rank on its machine, as set by torchrun."""
    return int(os.environ.get("LOCAL_RANK", global_rank()))


def local_size() -> int:
    """Return the number of processes on this machine, as set by torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def cross_rank() -> int:
    """Return this machine's index."""
    return int(os.environ.get("GROUP_RANK", global_rank() // local_size()))


def cross_size() -> int:
    """Return the number of machines."""
    return -(-size() // local_size())


def is_homogeneous() -> bool:
    """Return True if the number of processes is a multiple of that on this machine."""
    return size() % local_size() == 0


def _group(operation: str) -> ProcessGroup | None:
    return resolve_group(None, operation)


def _begin(kind: int, operation: str, facts: object = None, value: Any = None) -> list[Any]:
    """Compare the calls or steps that the ranks begin.

    Args:
        kind: kind of step.
        operation: name for messages.
        facts: must be equal on all ranks that have not joined.
        value: any object to send to the other ranks.

    Returns:
        (kind, value) of every rank.
    """
    told = gather_objects((kind, facts, value), _group(operation), operation=operation)
    active = [index for index, other in enumerate(told) if other[0] != _JOINED]
    if active:
        _active[:] = active
    if len(active) < len(told) and any(told[index][0] == _CALL for index in active):
        call = str(told[active[0]][1]).split()[0]
        raise RuntimeError(
            f"{call}: expected no rank to have joined, got ranks "
            f"{[index for index in range(len(told)) if index not in active]}, which do not know "
            "the tensor's shape; join after the last allreduce"
        )
    calls = {index: told[index][:2] for index in active}
    if len(set(map(repr, calls.values()))) > 1:
        texts = [f"{_call_name(*call)} on rank {index}" for index, call in calls.items()]
        raise RuntimeError(
            f"{operation}: expected every rank to make the same call, got {', '.join(texts)}"
        )
    return [(told_kind, told_value) for told_kind, _, told_value in told]


def _call_name(kind: int, facts: object) -> str:
    names = {_CALL: str(facts), _SCALED: "a step under a GradScaler"}
    return names.get(kind, f"the step of optimizer {kind}")


def _check_op(function: str, op: str, choices: Sequence[str]) -> None:
    check_rule(function, "op", op, f"one of {', '.join(choices)}", op in choices)


def _check_set(function: str, process_set: object) -> None:
    if process_set != global_process_set:
        raise ValueError(
            f"{function}: expected process_set to be global_process_set, got {process_set!r}; "
            "torch.distributed has groups of some ranks"
        )


def _check_compression(function: str, compression: Any) -> None:
    needed = ("compress", "decompress")
    fits = all(callable(getattr(compression, name, None)) for name in needed)
    rule = "Compression.none, Compression.fp16 or another class with compress and decompress"
    check_rule(function, "compression", compression, rule, fits)


def _check_root(function: str, root_rank: int) -> None:
    fits = 0 <= root_rank < size()
    check_rule(function, "root_rank", root_rank, f"in [0, {size()})", fits)


def _op_of(function: str, average: bool | None, op: str | None) -> str:
    """Return the operation, from `op` or from `average`, Horovod's older argument for it."""
    if average is not None and op is not None:
        raise ValueError(f"{function}: expected one of average and op, got {average!r} and {op!r}")
    if average not in (None, True, False):
        raise ValueError(
            f"{function}: expected average to be None, True or False, got {average!r}; the name is "
            "the third argument"
        )
    if op is None:
        op = Sum if average is False else Average
    _check_op(function, op, _OPS)
    return op


class _AllReduce(torch.autograd.Function):
    """Reduces a tensor in the forward pass, and its gradient by the same operation in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, name: str | None, scale: float) -> Tensor:
        ctx.options = (op, name, scale)
        facts = f"allreduce {name} of {tuple(tensor.shape)} {tensor.dtype} by {op}"
        _begin(_CALL, "allreduce", facts)
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        kind = "sum" if op == Average else op
        all_reduce_(out, _group("allreduce"), operation="allreduce", op=kind)
        scale = scale / size() if op == Average else scale
        return out if scale == 1.0 else out.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        op, name, scale = ctx.options
        return _AllReduce.apply(grad, op, name, scale), None, None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks to a new tensor. Average and Sum are differentiable.

    Args:
        tensor: any tensor, with the same shape and dtype on every rank.
        average: if `op` is None, True means Average and False means Sum.
        name: any name, compared over ranks.
        compression: makes the tensor that is sent.
        op: Average (the default), Sum, Min or Max.
        prescale_factor: multiplies the tensors before they are reduced.
        postscale_factor: multiplies the result.
        process_set: `global_process_set`.

    Raises:
        ValueError: an argument is invalid.
        RuntimeError: on every rank, if a rank has joined or makes another call.
    """
    op = _op_of("allreduce", average, op)
    _check_set("allreduce", process_set)
    _check_compression("allreduce", compression)
    scales = prescale_factor != 1.0 or postscale_factor != 1.0
    if not tensor.is_floating_point() and (op == Average or scales):
        raise ValueError(
            f"allreduce: expected op to be Sum and no factors for {tensor.dtype}, got {op!r}"
        )
    if tensor.requires_grad and op not in (Average, Sum):
        tensor = tensor.detach()
    sent, ctx = compression.compress(tensor * prescale_factor if scales else tensor)
    return compression.decompress(_AllReduce.apply(sent, op, name, postscale_factor), ctx)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks, in place; see `allreduce`."""
    with torch.no_grad():
        factors = (prescale_factor, postscale_factor)
        found = allreduce(tensor, average, name, Compression.none, op, *factors, process_set)
        return tensor.copy_(found)


def grouped_allreduce(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Reduce several tensors, one after the other; arguments are those of `allreduce`."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Reduce several tensors in place; arguments are those of `allreduce_`."""
    return [allreduce_(tensor, *args, **kwargs) for tensor in tensors]


class _AllGather(torch.autograd.Function):
    """Concatenates rows; their gradient is the mean over ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None) -> Tensor:
        facts = f"allgather {name} of rows {tuple(tensor.shape[1:])} {tensor.dtype}"
        rows = [value for _, value in _begin(_CALL, "allgather", facts, tensor.shape[0])]
        ctx.rows = rows
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        return Shards(_group("allgather"), tuple(rows), "allgather").gathered(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mean = _AllReduce.apply(grad, Average, "the gradient of allgather", 1.0)
        return mean.split(ctx.rows)[rank()], None


def allgather(
    tensor: Tensor, name: str | None = None, process_set: object = global_process_set
) -> Tensor:
    """Concatenate the tensors of all ranks. Gradients are means over ranks, as in Horovod.

    Args:
        tensor: `[n, ...]`; n may differ between ranks.
        name: any name, compared over ranks.
        process_set: `global_process_set`.

    Raises:
        ValueError: the tensor has no dimension, or process_set is not the global one.
        RuntimeError: on every rank, if a rank has joined or makes another call.
    """
    _check_set("allgather", process_set)
    if tensor.dim() == 0:
        raise ValueError("allgather: expected tensor to have dimensions, got none")
    return _AllGather.apply(tensor, name)


class _Broadcast(torch.autograd.Function):
    """Copies the tensor of one rank; its gradient is the mean over ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root_rank = root_rank
        facts = f"broadcast {name} of {tuple(tensor.shape)} {tensor.dtype} from rank {root_rank}"
        _begin(_CALL, "broadcast", facts)
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        # The tensor is sent as bytes, because Gloo and NCCL cannot send 16-bit integers.
        _send(as_bytes(out), _group("broadcast"), root_rank, operation="broadcast")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        mean = _AllReduce.apply(grad, Average, "the gradient of broadcast", 1.0)
        return mean if rank() == ctx.root_rank else torch.zeros_like(mean), None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: object = global_process_set,
) -> Tensor:
    """Copy a rank's tensor to a new tensor on every rank. Its gradient is the mean over ranks.

    Raises:
        ValueError: root_rank is no rank, or process_set is not the global one.
        RuntimeError: on every rank, if a rank has joined or makes another call.
    """
    _check_set("broadcast", process_set)
    _check_root("broadcast", root_rank)
    return _Broadcast.apply(tensor, root_rank, name)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: object = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the tensor of one rank; see `broadcast`."""
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor, root_rank, name, process_set))


class _EndedCall:
    """Result of a call that is complete, for `synchronize` and `poll`."""

    def __init__(self, result: Tensor) -> None:
        self.result = result


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = global_process_set,
) -> _EndedCall:
    """Call `allreduce`, and return a handle for `synchronize`."""
    factors = (prescale_factor, postscale_factor)
    return _EndedCall(allreduce(tensor, average, name, Compression.none, op, *factors, process_set))


def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> _EndedCall:
    """Call `allreduce_` with these arguments, and return a handle for `synchronize`."""
    return _EndedCall(allreduce_(tensor, *args, **kwargs))


def allgather_async(tensor: Tensor, *args: Any, **kwargs: Any) -> _EndedCall:
    """Call `allgather` with these arguments, and return a handle for `synchronize`."""
    return _EndedCall(allgather(tensor, *args, **kwargs))


def broadcast_async(tensor: Tensor, root_rank: int, *args: Any, **kwargs: Any) -> _EndedCall:
    """Call `broadcast` with these arguments, and return a handle for `synchronize`."""
    return _EndedCall(broadcast(tensor, root_rank, *args, **kwargs))


def broadcast_async_(tensor: Tensor, root_rank: int, *args: Any, **kwargs: Any) -> _EndedCall:
    """Call `broadcast_` with these arguments, and return a handle for `synchronize`."""
    return _EndedCall(broadcast_(tensor, root_rank, *args, **kwargs))


def synchronize(handle: _EndedCall) -> Tensor:
    """Return the result of a call whose name ends in `_async` or `_async_`."""
    return handle.result


def poll(handle: _EndedCall) -> bool:
    """Return True for a handle, because calls are complete when they return."""
    return isinstance(handle, _EndedCall)


def barrier(process_set: object = global_process_set) -> None:
    """Wait until every rank makes this call."""
    _check_set("barrier", process_set)
    _begin(_CALL, "barrier", "barrier")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: object = global_process_set,
) -> Any:
    """Send the object of one rank, pickled, to every rank.

    Raises:
        ValueError: root_rank is no rank, or process_set is not the global one.
        RuntimeError: on every rank, if a rank has joined or makes another call.
    """
    _check_set("broadcast_object", process_set)
    _check_root("broadcast_object", root_rank)
    value = obj if rank() == root_rank else None
    told = _begin(_CALL, "broadcast_object", f"broadcast_object {name} from {root_rank}", value)
    return obj if rank() == root_rank else told[root_rank][1]


def allgather_object(
    obj: Any, name: str | None = None, process_set: object = global_process_set
) -> list[Any]:
    """Gather the objects of all ranks, pickled, in rank order.

    Raises:
        ValueError: process_set is not the global one.
        RuntimeError: on every rank, if a rank has joined or makes another call.
    """
    _check_set("allgather_object", process_set)
    return [
        value for _, value in _begin(_CALL, "allgather_object", f"allgather_object {name}", obj)
    ]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: object = global_process_set,
) -> None:
    """Overwrite tensors with the tensors of one rank.

    Args:
        params: a state dict, `named_parameters()`, or a list of tensors.
        root_rank: rank whose tensors are sent.
        process_set: `global_process_set`.

    Raises:
        ValueError: root_rank is no rank, process_set is not the global one, or a tensor is divided
            over ranks. Nothing is sent.
        RuntimeError: on every rank, if names, shapes or dtypes differ between ranks.
    """
    owner = "broadcast_parameters"
    _check_root(owner, root_rank)
    _check_set(owner, process_set)
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    else:
        listed = [(str(i), p) if isinstance(p, Tensor) else p for i, p in enumerate(params)]
        pairs = sorted(listed, key=lambda pair: str(pair[0]))
    tensors = {name: value for name, value in pairs if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"{owner}: expected tensors that every rank has a copy of, got {name}, which lies "
                "over ranks; each rank's part is its own"
            )
    facts = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    _begin(_CALL, owner, f"{owner} from rank {root_rank} of {', '.join(facts)}")
    with torch.no_grad():
        for tensor in tensors.values():
            whole = tensor.detach().contiguous()
            _send(as_bytes(whole), _group(owner), root_rank, operation=owner)
            tensor.copy_(whole)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: nn.Module | None = None
) -> None:
    """Overwrite an optimizer's state and options of parameter groups with those of one rank.

    Args:
        optimizer: any optimizer, with the same parameters on every rank.
        root_rank: rank whose state is sent.
        model: ignored; Horovod needs it to fill an empty state, which here remains empty.

    Raises:
        ValueError: root_rank is no rank, or a parameter is divided over ranks.
    """
    owner = "broadcast_optimizer_state"
    _check_root(owner, root_rank)
    _check_copies(owner, optimizer)
    state = io.BytesIO()
    torch.save(optimizer.state_dict(), state)
    sent = broadcast_object(state.getvalue(), root_rank, owner)
    if rank() != root_rank:
        found = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(found)


def _check_copies(owner: str, optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_dtensor(p) for p in parameters):
        raise ValueError(
            f"{owner}: expected parameters that every rank has a copy of, got experts that lie "
            "over ranks; call moe_ext.distributed.sync_gradients(model) before the step"
        )


class _Gradients:
    """Reduces the gradients of an optimizer over ranks, once after each backward pass."""

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        compression: type[Compressor],
        op: str,
        sparse_as_dense: bool,
        predivide: float,
    ) -> None:
        self._optimizer, self._number = optimizer, number
        self._compression, self._op, self._sparse_as_dense = compression, op, sparse_as_dense
        self._predivide = predivide
        self._holder = nn.ParameterList()
        self._hooked: set[nn.Parameter] = set()
        self._step: Callable[..., Any] = optimizer.step
        self._unscales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._synchronized = self._skips = False
        self._follow()

    def _follow(self) -> nn.ParameterList:
        """Return the optimizer's current parameters, and hook new ones.

        A user may have added a parameter group, or replaced parameters.
        """
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if list(map(id, parameters)) != list(map(id, self._holder)):
            self._holder = nn.ParameterList(parameters)
        for p in parameters:
            if p.requires_grad and p not in self._hooked:
                self._hooked.add(p)
                p.register_post_accumulate_grad_hook(self._accumulated)
        return self._holder

    def _accumulated(self, _: object) -> None:
        self._synchronized = False

    def synchronize(self) -> None:
        """Reduce the gradients. The step reduces them again only after another backward pass."""
        self._begin(None)

    def _begin(self, loss: float | None) -> float:
        """Reduce the gradients, and return the mean of the ranks' losses."""
        holder = self._follow()
        has = [p.grad is not None for p in holder]
        told = _begin(self._number, "DistributedOptimizer", len(has), (loss, has))
        self.reduce([value for _, value in told if value is not None])
        self._synchronized = True
        return sum(value[0] or 0.0 for _, value in told if value is not None) / len(told)

    def reduce(self, told: Sequence[tuple[float | None, Sequence[bool]]]) -> None:
        """Reduce the gradients.

        Args:
            told: for each rank that has data, its loss, and which parameters have a gradient.
        """
        holder = list(self._follow())
        if self._sparse_as_dense:
            for p in holder:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
        if self._compression is Compression.none:
            sync_gradients(self._holder)
        else:
            grown = [any(has) for has in zip(*(has for _, has in told), strict=True)]
            self._reduce_compressed([p for p, own in zip(holder, grown, strict=True) if own])
        if self._op == Sum:
            for p in holder:
                if p.grad is not None:
                    p.grad.mul_(size())

    def _reduce_compressed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the compressed gradients, in one message for each dtype."""
        made = []
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=gradient_dtype(p))
            made.append(self._compression.compress(p.grad.detach()))
        for dtype in sorted({sent.dtype for sent, _ in made}, key=str):
            chosen = [i for i, (sent, _) in enumerate(made) if sent.dtype == dtype]
            # Part of the division precedes the sum, as in Horovod, because a sum in half precision
            # may overflow.
            flat = torch.cat([made[i][0].reshape(-1) for i in chosen]) / self._predivide
            all_reduce_(flat, _group("DistributedOptimizer"), operation="DistributedOptimizer")
            flat /= size() / self._predivide
            pieces = flat.split([made[i][0].numel() for i in chosen])
            for i, piece in zip(chosen, pieces, strict=True):
                sent, ctx = made[i]
                grad = self._compression.decompress(piece.view(sent.shape), ctx)
                assert parameters[i].grad is not None
                parameters[i].grad.copy_(grad)  # type: ignore[union-attr]

    def clear(self) -> None:
        """Drop the gradients of a rank that has joined."""
        for p in self._follow():
            p.grad = None

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which a step uses the gradients as `synchronize` and clipping left them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients unless `synchronize` has reduced them, and step."""
        if hasattr(self._optimizer, "found_inf"):
            return self._scaled_step()
        if closure is not None:
            if self._skips:
                raise ValueError(
                    "DistributedOptimizer.step: expected no closure inside skip_synchronize, got "
                    "one, whose gradients ranks have not averaged"
                )
            found = self._step(lambda: self._averaged(closure))
            self._synchronized = False
            return found
        if not self._synchronized:
            if self._skips:
                raise RuntimeError(
                    "DistributedOptimizer.step: expected synchronize() since the last backward "
                    "pass inside skip_synchronize, got none"
                )
            self.synchronize()
        self._synchronized = False
        return self._step()

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        """Call a closure, reduce the gradients, and return the mean of its loss over ranks."""
        with torch.enable_grad():
            loss = closure()
        mean = self._begin(float(loss))
        return loss.detach().clone().fill_(mean) if isinstance(loss, Tensor) else mean

    def _scaled_step(self) -> Any:
        """Step for GradScaler, which calls this on every rank, even after an overflow."""
        found_inf, scale = float(self._optimizer.found_inf), self._optimizer.grad_scale  # type: ignore[attr-defined]
        told = _begin(_SCALED, "DistributedOptimizer", None, (self._synchronized, found_inf))
        values = [value for _, value in told if value is not None]
        if not all(synchronized for synchronized, _ in values):
            raise RuntimeError(
                "DistributedOptimizer.step: expected synchronize() before a GradScaler unscales or "
                "steps, got gradients that ranks have not averaged; call optimizer.synchronize(), "
                "then scaler.unscale_, and scaler.step inside optimizer.skip_synchronize()"
            )
        if len({bool(overflow) for _, overflow in values}) > 1:
            raise RuntimeError(
                "DistributedOptimizer.step: expected a GradScaler to find an overflow on all ranks "
                "or none, got some; call optimizer.synchronize() before scaler.unscale_"
            )
        self._synchronized = False
        if self._unscales:
            return self._step()
        if found_inf:
            return None
        if scale is not None:
            for p in self._follow():
                if p.grad is not None:
                    p.grad.mul_(scale.double().reciprocal().to(p.grad.device, torch.float32))
        # Some optimizers raise if `found_inf` or `grad_scale` is set and they are not fused. The
        # attributes become None, instead of being deleted, because GradScaler will delete them.
        optimizer: Any = self._optimizer
        optimizer.found_inf = optimizer.grad_scale = None
        return self._step()


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: object = global_process_set,
) -> Optimizer:
    """Have an optimizer average gradients over all ranks before each step.

    Args:
        optimizer: changed in place and returned, with Horovod's methods. Call `synchronize()`
            before clipping; `step()` then reduces gradients again only after another backward pass,
            inside `skip_synchronize()` or outside. `step(closure)` averages the gradients and the
            loss of each call of the closure. With a `GradScaler` call `synchronize()` before it
            unscales or steps; otherwise the step raises on every rank.
        named_parameters: names for all parameters of the optimizer, checked as Horovod does.
        compression: `Compression.none`, `Compression.fp16`, or another class with `compress` and
            `decompress`. Results of `compress` are averaged.
        backward_passes_per_step: number of backward passes whose gradients are added up. Gradients
            are sent when the optimizer steps, so every number of 1 or more has the same effect.
        op: Average or Sum.
        gradient_predivide_factor: positive, for Average. Compressed gradients are divided by it
            before the sum, and multiplied by it after the sum.
        num_groups: 0 or more; has no effect, because messages are buckets of gradients.
        groups: None, a number or lists of parameters; has no effect either.
        sparse_as_dense: make sparse gradients dense first; otherwise they are refused.
        process_set: `global_process_set`.

    Raises:
        ValueError: an argument is invalid, or a parameter is divided over ranks.
    """
    owner = "DistributedOptimizer"
    _check_op(owner, op, (Average, Sum))
    _check_compression(owner, compression)
    _check_set(owner, process_set)
    _check_copies(owner, optimizer)
    passes = backward_passes_per_step
    check_rule(owner, "backward_passes_per_step", passes, "1 or more", passes >= 1)
    if not gradient_predivide_factor > 0 or (gradient_predivide_factor != 1.0 and op != Average):
        raise ValueError(
            f"{owner}: expected gradient_predivide_factor to be positive, and 1 where op is not "
            f"Average, got {gradient_predivide_factor} with {op!r}"
        )
    check_rule(owner, "num_groups", num_groups, "0 or more", num_groups >= 0)
    if named_parameters is not None:
        _check_names(owner, optimizer, list(named_parameters))
    gradients = _Gradients(
        optimizer, len(_optimizers), compression, op, sparse_as_dense, gradient_predivide_factor
    )
    _optimizers.append(gradients)

    def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return gradients.step(closure)

    made: Any = optimizer
    # torch's schedulers expect `step` to be a bound method.
    made.step = MethodType(step, optimizer)
    made.synchronize = gradients.synchronize
    made.skip_synchronize = gradients.skip_synchronize
    # With this attribute GradScaler calls the step on every rank, even after an overflow, and
    # leaves unscaling and skipping to the step.
    made._step_supports_amp_scaling = True
    # A copy would have the `step` of its class, which sends nothing.
    made.__reduce_ex__ = lambda _protocol: refuse_copy("DistributedOptimizer")
    return optimizer


def _check_names(owner: str, optimizer: Optimizer, named: Sequence[Any]) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            f"{owner}: expected named_parameters to be pairs of a name and a parameter, got others"
        )
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{owner}: expected named_parameters to have each name once, got {twice}")
    known = {id(parameter) for _, parameter in named}
    unnamed = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if unnamed:
        raise ValueError(
            f"{owner}: expected named_parameters to have all parameters of the optimizer, got "
            f"{unnamed} without a name"
        )


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and take part in steps until no rank has any.

    Meanwhile the gradients of this rank count as zero, and means are still over all ranks. Its
    parameters are not updated; `broadcast_parameters(..., root_rank=join())` updates them.

    Args:
        device: ignored; parameters have a device.

    Returns:
        The last rank to join; the highest, if several joined last.
    """
    while True:
        told = _begin(_JOINED, "join")
        others = [(kind, value) for kind, value in told if kind != _JOINED]
        if not others:
            return max(_active, default=size() - 1)
        if others[0][0] == _SCALED:
            continue
        gradients = _optimizers[others[0][0]]
        gradients.clear()
        gradients.reduce([value for _, value in others])
        gradients.clear()
