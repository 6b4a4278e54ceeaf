"""The hook for DistributedDataParallel.

DDP hands over one bucket of gradients after the other while the backward pass runs, and waits for
all of them at its end. The results stay here until the last bucket is there: only then it is known
whether the step went well on every rank.
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


# DistributedDataParallel compares the annotations, which must not be text.
def compress_hook(
    state: CompressionState,
    bucket: GradBucket,
) -> torch.futures.Future[Tensor]:
    """Reduces a bucket as the state says: `ddp.register_comm_hook(state, compress_hook)`.

    Works with rebuilt buckets, `no_sync`, `static_graph`, `find_unused_parameters`,
    `gradient_as_bucket_view` and sparse embeddings. Parameters without a gradient on any rank keep
    what they are owed.

    Args:
        state: made for the model that DDP wraps; one state for one DDP.
        bucket: of gradients of this rank.

    Returns:
        A future of the mean over ranks, which is there when the last bucket of the pass is.

    Raises:
        ValueError: on every rank, at the end of the backward pass: a gradient is NaN or infinite
            (unless the state lets it pass), the ranks have different options, or the state serves
            another model or other ranks than DDP. Gradients are zero then, and what is owed is as
            it was; the next step may go on.
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
    # The first pass of a static graph hands over all of its buckets at its end, each as number 0.
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
            # An error has ended that pass early.
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
    """The gradients in a bucket with the strides that DDP lays them out by; none for rows alone.

    DDP takes the strides of a parameter that has no gaps, as one of `torch.channels_last`.
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
    """A result in the order of `CompressionState`, as DDP lays out its bucket."""
    pieces = done.value().split([view.numel() for view in views])
    for view, piece in zip(views, pieces, strict=True):
        view.copy_(piece.view(view.shape))
    return buffer_N


def _adopt(state: CompressionState) -> ValueError | None:
    """Take the ranks of DDP, and how many parameters it reduces; a bucket tells neither."""
    parallel = _find_ddp(state)
    try:
        if parallel is not None:
            state.adopt_ddp(parallel)
    except ValueError as error:
        # Without a message: all ranks of DDP find the same, and others wait for none.
        return error
    state.is_hooked = True
    return None


def _find_ddp(state: CompressionState) -> Any:
    """The DistributedDataParallel that a state is registered with, if found.

    Looked for among all objects, once. DDP lists its hooks in `_comm_hooks`, but tells them nothing
    of itself: a bucket has gradients and parameters only, and the reducer in C++, which calls the
    hook, has no attribute that leads to it.
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
    """Raise when DDP has ended its pass: it cannot be used again if a hook raises."""
    if c10d.backward_number() < 0:
        # This rank has no more batches, and joins in the passes of the others.
        raise error

    def boom() -> None:
        raise error

    # The first callback is queued before that of DDP, and the second one after it.
    c10d.call_after_backward(boom, num_before=1)


def _compress_shards(ddp: DistributedDataParallel, state: CompressionState) -> bool:
    """Reduce what DDP leaves alone, as the second half of the step; its names are the model's."""
    if state.model is not None:
        compress_gradients(ddp, state)
    return state.model is not None


reduce_shards_with(compress_hook, _compress_shards)
