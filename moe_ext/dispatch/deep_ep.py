"""Dispatcher over the library `deep_ep`, release 2.1.

Shapes: N rows given, C choices of each, D model, U rows received.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.dispatch.gpu_libraries import Library, LibraryDispatcher

LIBRARY = Library(
    "deep_ep",
    "deep_ep",
    "2.1",
    {
        "ElasticBuffer": (
            "group",
            "num_max_tokens_per_rank",
            "hidden",
            "num_topk",
            "deterministic",
            "allow_multiple_reduction",
        ),
        "ElasticBuffer.dispatch": (
            "x",
            "topk_idx",
            "topk_weights",
            "num_experts",
            "num_sms",
            "handle",
        ),
        "ElasticBuffer.combine": ("x", "handle", "topk_weights"),
    },
)
# Buffers of a process group, by D and number of choices per row. All layers share them.
_buffers: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, int], Any]]
_buffers = weakref.WeakKeyDictionary()


class _DeepEp:
    """`Transport` over the library, with one row per token and rank, in a fixed order."""

    def __init__(self, num_experts: int, group: ProcessGroup) -> None:
        self._module: Any = importlib.import_module("deep_ep")
        self._num_experts, self._ranks = num_experts, group

    def dispatch(
        self, rows_ND: Tensor, idx_NC: Tensor, weights_NC: Tensor, num_received: int, most: int
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """See `Transport`. The library counts received rows again, and the host waits for it."""
        buffer = self._buffer(most, rows_ND.shape[1], idx_NC.shape[1])
        rows_UD, idx_UC, weights_UC, handle, _ = buffer.dispatch(
            rows_ND,
            topk_idx=idx_NC.to(self._module.topk_idx_t),
            topk_weights=weights_NC,
            num_experts=self._num_experts,
        )
        return (buffer, handle), rows_UD, idx_UC.to(torch.int64), weights_UC

    def send(self, handle: Any, rows_ND: Tensor) -> Tensor:
        """See `Transport`."""
        buffer, made = handle
        rows_UD, *_ = buffer.dispatch(
            rows_ND, handle=made, num_experts=self._num_experts, num_sms=made.num_sms
        )
        return rows_UD

    def combine(
        self, handle: Any, rows_UD: Tensor, grad_weights_UC: Tensor | None, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `Transport`. The library does not distinguish the backward pass."""
        buffer, made = handle
        rows_ND, grad_NC, _ = buffer.combine(rows_UD, made, topk_weights=grad_weights_UC)
        return rows_ND, grad_NC

    def _buffer(self, most: int, dim: int, num_choices: int) -> Any:
        """Return the buffer for `most` rows per rank, which all ranks make together."""
        known, key = _buffers.setdefault(self._ranks, {}), (dim, num_choices)
        if key not in known or known[key].num_max_tokens_per_rank < most:
            known[key] = self._module.ElasticBuffer(
                self._ranks,
                num_max_tokens_per_rank=1 << (most - 1).bit_length(),
                hidden=dim,
                num_topk=num_choices,
                deterministic=True,
                # A single reduction rounds each sum once.
                allow_multiple_reduction=False,
            )
        return known[key]


class DeepEpDispatcher(LibraryDispatcher):
    """Sends rows between GPUs by the library `deep_ep`, over NVLink and networks.

    Written for DeepEP 2.1 (`ElasticBuffer`) and tested with a fake that has its signatures; it has
    never run on a GPU. `combine`, buffers and failures are as in `NcclEpDispatcher`. The rows of an
    expert are in the order of ranks and tokens (`deterministic=True`). Each dispatch has one more
    host synchronisation, for the counts that the library makes itself.

    All ranks of the group construct it together.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group of the backend nccl.
        combine: "exact" or "reduced".
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.

    Raises:
        RuntimeError: on every rank, if one has no GPU, no DeepEP 2.1, or functions with other
            signatures.
        ValueError: see `DedupDispatcher`.

    Reference: deepseek-ai/DeepEP.
    """

    library = LIBRARY
    transport = _DeepEp
