"""Chunks whose sizes follow from no count, so that the host need not know one before rows travel.

Shapes: T tokens, D model, E experts, K top-k, P ranks, L = E/P local experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.comm import collectives
from moe_ext.comm.agreement import agree
from moe_ext.comm.failures import is_told, mark_told
from moe_ext.comm.streams import HostCopy, is_capturing
from moe_ext.dispatch.base import TokenDispatcher, count_dropped
from moe_ext.dispatch.chunks import Chunk, cut_evenly, keep_first
from moe_ext.dispatch.counts import SKIPPED
from moe_ext.ops.grouped_gemm import row_alignment


def check_static(dispatcher: TokenDispatcher) -> None:
    """TypeError where `static_chunks` cannot serve a dispatcher: it sends in a way of its own."""
    own, kind = (TokenDispatcher.dispatch, TokenDispatcher.chunks), type(dispatcher)
    if (kind.dispatch, kind.chunks) != own or dispatcher.group is None:
        raise TypeError(
            f"RowBudget: expected dispatcher to be 'alltoall' with static=True, got {kind.__name__}"
        )


def static_chunks(
    dispatcher: TokenDispatcher,
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    max_rows: int,
    capacity: int | None = None,
    drop: bool = False,
) -> tuple[Chunk, Callable[[], list[Chunk]]]:
    """Chunks in which each rank sends equally many rows to each, whatever the router says.

    The rows of a pair of ranks beyond `max_rows / P` go in further chunks, or are dropped. On a
    device with streams the ranks compare their calls as `agree` does with `repeats`, and nothing
    waits for the device before the other chunks are asked for.

    Args:
        dispatcher: whose `send` and `combine` take the chunks.
        x_TD: as in `TokenDispatcher.chunks`.
        topk_idx_TK: as there.
        topk_weights_TK: as there.
        max_rows: as there, at least P.
        capacity: as there.
        drop: leave out the rows beyond the first chunk.

    Returns:
        The first chunk; and what gives the others, as many on every rank. To be called once the
        first chunk's work is queued: it waits for the counts, which the device had before.

    Raises:
        TypeError: as `check_static`.
        ValueError: as `TokenDispatcher.chunks`.
        RuntimeError: a CUDA graph is captured, and rows may be left for further chunks.
        RankFailureError: a rank died or did not answer.
    """
    num_ranks, num_local = dispatcher.num_ranks, dispatcher.num_local_experts
    with telling_in_agreement(dispatcher, x_TD.device):
        check_static(dispatcher)
        if not drop and is_capturing(x_TD.device):
            raise RuntimeError(
                "RowBudget: expected overflow to be 'drop' where a CUDA graph is captured, since "
                "the host has to know whether rows are left, got 'rounds'"
            )
        if max_rows < num_ranks:
            raise ValueError(
                f"RowBudget: expected rows to be at least {num_ranks}, one for each rank, with "
                f"static=True, got {max_rows}"
            )
        dispatcher._check_dtype(x_TD)
        none_TD = x_TD.detach()[:, :0]
        _, tables = dispatcher._group_by_expert(none_TD, topk_idx_TK, topk_weights_TK, capacity)
    layers, layer = dispatcher._calls.layers, dispatcher._calls.layer or 0
    facts: dict[str, object] = {
        "rows": max_rows,
        "overflow": "drop" if drop else "rounds",
        "model_dim": x_TD.shape[-1],
        "the dtype of x": x_TD.dtype,
        "wire": dispatcher.wire,
        "top_k": topk_idx_TK.shape[1],
        "whether there is a capacity": capacity is not None,
        "torch.is_grad_enabled() in the forward pass": torch.is_grad_enabled(),
        f"the layer that runs ({SKIPPED})": layers[layer] if layers else "",
    }
    _agree(dispatcher, x_TD.device, facts)
    padding = num_local * (row_alignment(x_TD, max_rows, num_local) - 1)
    share = max((max_rows - padding) // num_ranks, 1)
    if drop:
        allowed_P = tables.expert_offsets.new_full((num_ranks,), share)
        kept_idx = keep_first(tables, topk_idx_TK, allowed_P)
        _, kept = ops.permute_tokens(none_TD, kept_idx, dispatcher.num_experts)
        tables = count_dropped(tables, kept)
    own_PL = tables.expert_offsets.diff().view(num_ranks, num_local)
    name = f"{dispatcher.operation} counts"
    received_PL = dispatcher.exchange_counts(own_PL, operation=name)
    has_backward = torch.is_grad_enabled()

    def chunk(number: int) -> Chunk:
        return cut_evenly(tables, own_PL, received_PL, share, number, has_backward=has_backward)

    if drop:
        return chunk(0), list
    most_11 = own_PL.sum(1).max().reshape(1, 1)
    collectives.all_reduce_(most_11, dispatcher.group, operation=name, op="max", counted=False)
    on_host = HostCopy(most_11)

    def others() -> list[Chunk]:
        # NOTE: device-to-host sync, behind the queued work of the first chunk.
        ((most,),) = on_host.rows()
        return [chunk(number) for number in range(1, -(-most // share))]

    return chunk(0), others


@contextlib.contextmanager
def telling_in_agreement(dispatcher: TokenDispatcher, device: torch.device) -> Iterator[None]:
    """Tell the other ranks when code before `static_chunks` fails, in the place of its facts."""
    try:
        yield
    except Exception as error:
        if dispatcher.group is not None and not is_told(error):
            mark_told(error)
            # The error of this rank says more than that of the agreement.
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                _agree(dispatcher, device, {}, error)
        raise


def _agree(
    dispatcher: TokenDispatcher,
    device: torch.device,
    facts: dict[str, object],
    problem: Exception | None = None,
) -> None:
    # The messages of a graph are those of the pass before it was captured.
    if not is_capturing(device):
        options = dispatcher._calls.options or {}
        facts = {**dispatcher._calls.first_facts(), **facts, "options": options}
        agree(dispatcher.operation, facts, problem, dispatcher.group, device, repeats=True)
