"""The hook for DistributedDataParallel.

DDP hands over one bucket of gradients after the other while the backward pass runs, and waits for
all of them at the end of the pass. The hook holds results back until the last bucket has arrived,
because only then is it known whether the step succeeded on every rank.
"""

import functools
import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from moe_ext.comm import c10d
from moe_ext.compression.gradients import compress_gradients
from moe_ext.compression.reducer import Reducer
from moe_ext.compression.state import CompressionState
from moe_ext.distributed.data_parallel import reduce_shards_with

_Future = torch.futures.Future[Tensor]


# DistributedDataParallel compares the annotations with types, so they must not be strings. This
# file therefore does not import `annotations`.
def compress_hook(
    state: CompressionState,
    bucket: GradBucket,
) -> torch.futures.Future[Tensor]:
    """Reduce a bucket with a state: `ddp.register_comm_hook(state, compress_hook)`.

    Works with rebuilt buckets, `no_sync`, `static_graph`, `find_unused_parameters`,
    `gradient_as_bucket_view` and sparse embeddings. Parameters without a gradient on any rank keep
    their residuals.

    Args:
        state: made for the model that DDP wraps; one state serves one DDP.
        bucket: gradients of this rank.

    Returns:
        A future of the mean over ranks, which completes after the last bucket of the pass.

    Raises:
        ValueError: on every rank, at the end of the backward pass: a gradient is NaN or infinite
            (unless the state propagates it), the ranks have different options, or the state serves
            another model or other ranks than DDP. Gradients are then zero, residuals are
            unchanged, and training may continue with the next step.
        RankFailureError: at the end of the backward pass: a rank died or did not answer.
        TypeError: state is no `CompressionState`.
    """
    if not isinstance(state, CompressionState):
        raise TypeError(
            f"compress_hook: expected state to be a CompressionState, got {type(state).__name__}"
        )
    with torch.no_grad():
        return _take(state, bucket)


def _take(state: CompressionState, bucket: Any) -> _Future:
    step, problem, parameters = state.open_step, None, bucket.parameters()
    # In the first pass of a static graph, DDP hands over all buckets at the end of the pass, each
    # with index 0.
    is_static = (
        step is not None and bucket.index() == 0 and step.taken.isdisjoint(map(id, parameters))
    )
    if is_static and state.num_hooked is None:
        raise ValueError(
            "compress_hook: expected state to be made with model=<the DistributedDataParallel>, "
            "where it is a part of another hook's state and static_graph is on, got it without"
        )
    if step is None or (bucket.index() == 0 and not is_static):
        if step is not None:
            # The last pass ended early with an error and left its step open.
            step.abandon()
        error = None if state.is_hooked else _adopt(state)
        step = state.open_step = state.begin_step("compress_hook")
        step.error = error
    if bucket.index() != len(step.running) and not is_static:
        problem = "expected the state to serve one DistributedDataParallel, got buckets of two"
    buffer_N = flat_N = bucket.buffer()
    views = _strided_views(buffer_N, parameters)
    if views:
        flat_N = torch.cat([view.reshape(-1) for view in views])
    future: _Future = torch.futures.Future(devices=[flat_N.device] if flat_N.is_cuda else None)
    step.add(parameters, flat_N, state.group, problem).future = future
    if bucket.is_last() or (is_static and len(step.taken) == state.num_hooked):
        _finish(state, step)
    return future.then(functools.partial(_lay_out, buffer_N, views)) if views else future


def _strided_views(buffer_N: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return views of a bucket's gradients in DDP's strides; none if all are row-major.

    DDP lays out the gradient of a dense strided parameter, for instance in `torch.channels_last`,
    in the strides of the parameter.
    """
    if buffer_N.layout != torch.strided or all(p.is_contiguous() for p in parameters):
        return []
    likes = [torch.empty_like(parameter, device="meta") for parameter in parameters]
    pieces = buffer_N.split([like.numel() for like in likes])
    return [
        piece.as_strided(like.shape, like.stride())
        if like.stride() == parameter.stride()
        else piece.view(like.shape)
        for piece, like, parameter in zip(pieces, likes, parameters, strict=True)
    ]


def _lay_out(buffer_N: Tensor, views: Sequence[Tensor], done: _Future) -> Tensor:
    """Copy a result, whose gradients are row-major, into DDP's bucket with its strides."""
    pieces = done.value().split([view.numel() for view in views])
    for view, piece in zip(views, pieces, strict=True):
        view.copy_(piece.view(view.shape))
    return buffer_N


def _adopt(state: CompressionState) -> ValueError | None:
    """Take the ranks of DDP and its number of parameters, which a bucket does not know."""
    parallel = _find_ddp(state)
    try:
        if parallel is not None:
            state.adopt_ddp(parallel)
    except ValueError as error:
        # No message to other ranks is needed: every rank of this DDP module finds the same error
        # here, and no other rank is waiting for one.
        return error
    state.is_hooked = True
    return None


def _find_ddp(state: CompressionState) -> Any:
    """Return the DistributedDataParallel that a state is registered with, or None.

    All objects of the process are searched, once. DDP lists its hooks in `_comm_hooks`, but a hook
    has no way back to DDP: a bucket holds gradients and parameters only, and the C++ reducer that
    calls the hook has no reference to the module.
    """
    for one in gc.get_objects():
        is_wrapper = issubclass(type(one), DistributedDataParallel)
        if is_wrapper and any(known is state for _, known in c10d.ddp_hooks(one)):
            return one
    return None


def _finish(state: CompressionState, step: Reducer) -> None:
    state.open_step = None
    try:
        step.finish()
    except Exception as error:
        _raise_after_backward(error)
    for running in step.running:
        assert running.future is not None
        running.future.set_result(running.flat_N)


def _raise_after_backward(error: Exception) -> None:
    """Raise after DDP has ended its pass, because DDP is unusable after a hook has raised."""
    if c10d.backward_number() < 0:
        # No backward pass runs: this rank has no more batches and shadows the passes of the other
        # ranks (`join`).
        raise error

    def boom() -> None:
        raise error

    # This callback is queued before the callback of DDP. The callback that it queues runs after
    # that of DDP.
    c10d.call_after_backward(boom, num_before=1)


def _compress_shards(ddp: DistributedDataParallel, state: CompressionState) -> bool:
    """Reduce the parameters that DDP ignores, as the second half of the step; needs the model."""
    if state.model is not None:
        compress_gradients(ddp, state)
    return state.model is not None


reduce_shards_with(compress_hook, _compress_shards)
