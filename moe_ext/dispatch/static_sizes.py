"""Rounds whose sizes do not depend on counts, so that rows travel before the host knows counts.

Shapes: T tokens, D model, E experts, K top-k, P ranks, L = E/P local experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import is_told, mark_told
from moe_ext.comm.streams import HostCopy, is_capturing
from moe_ext.dispatch.counts import SKIPPED
from moe_ext.dispatch.parts import Choice, Round, RowBudget, count_dropped, cut_evenly, keep_first
from moe_ext.ops.grouped_gemm import row_alignment

if TYPE_CHECKING:
    from moe_ext.dispatch.base import TokenDispatcher


def static_rounds(
    dispatcher: TokenDispatcher, x_TD: Tensor, choice: Choice, budget: RowBudget
) -> tuple[Round, Callable[[], list[Round]]]:
    """Plan rounds in which each rank sends equally many rows to each rank, for any routing.

    Rows of a pair of ranks beyond `max_rows / P` go in further rounds, or are dropped. On a device
    with streams the ranks compare their calls by an `Agreement` with `repeats`. The host does not
    wait for the device before the further rounds are requested.

    Args:
        dispatcher: dispatcher whose `send` and `combine` run the rounds.
        x_TD: see `TokenDispatcher.plan`.
        choice: see `TokenDispatcher.plan`.
        budget: budget of at least P rows.

    Returns:
        The first round, and a function that returns the further rounds, equally many on every rank.
        Call it when the work of the first round is queued. It waits for the counts, which come
        before that work on the device.

    Raises:
        ValueError: see `TokenDispatcher.plan`.
        RuntimeError: a CUDA graph is captured, and rows may be left for further rounds.
        RankFailureError: a rank died or did not answer.
    """
    num_ranks, num_local = dispatcher.num_ranks, dispatcher.num_local_experts
    topk_idx_TK, topk_weights_TK, capacity, _, _ = choice
    max_rows, drop = budget.rows, budget.overflow == "drop"
    with telling_in_agreement(dispatcher, x_TD.device):
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
        "overflow": budget.overflow,
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

    def part(number: int) -> Round:
        return cut_evenly(tables, own_PL, received_PL, share, number, has_backward=has_backward)

    if drop:
        return part(0), list
    most_11 = own_PL.sum(1).max().reshape(1, 1)
    collectives.all_reduce_(most_11, dispatcher.group, operation=name, op="max", counted=False)
    on_host = HostCopy(most_11)

    def others() -> list[Round]:
        # NOTE: device-to-host sync, when the work of the first round is queued.
        ((most,),) = on_host.rows()
        return [part(number) for number in range(1, -(-most // share))]

    return part(0), others


@contextlib.contextmanager
def telling_in_agreement(dispatcher: TokenDispatcher, device: torch.device) -> Iterator[None]:
    """Context that sends an error inside to the other ranks, in place of their facts."""
    try:
        yield
    except Exception as error:
        if dispatcher.group is not None and not is_told(error):
            mark_told(error)
            # The agreement raises an error as well. The original error says more, and is kept.
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                _agree(dispatcher, device, {}, error)
        raise


def _agree(
    dispatcher: TokenDispatcher,
    device: torch.device,
    facts: dict[str, object],
    problem: Exception | None = None,
) -> None:
    # While a graph is captured nothing is compared, because its messages are those of the pass
    # before, which the ranks have compared.
    if not is_capturing(device):
        options = dispatcher._calls.options or {}
        facts = {**dispatcher._calls.first_facts(), **facts, "options": options}
        agreement = Agreement(dispatcher.operation, dispatcher.group, device, repeats=True)
        agreement.compare(facts, problem=problem)
