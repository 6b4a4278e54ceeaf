"""Dispatcher over `nccl.ep` of the wheel nccl-extensions, written against its release 0.1.

Shapes: N rows given, C choices of each, D model, U rows received.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.dispatch.gpu_libraries import Library, LibraryDispatcher, stream_of

LIBRARY = Library(
    "nccl.ep",
    "nccl-extensions",
    "0.1",
    {
        "Group.create": ("comm", "config"),
        "Group.create_handle": ("layout", "topk_idx", "layout_info", "stream"),
        "Group.destroy": (),
        "GroupConfig": (
            "algorithm",
            "num_experts",
            "max_dispatch_tokens_per_rank",
            "max_token_bytes",
        ),
        "Handle.dispatch": ("inputs", "outputs", "config", "stream"),
        "Handle.combine": ("inputs", "outputs", "config", "stream"),
        "Handle.destroy": (),
        "LayoutInfo": ("recv_total_counter", "recv_topk_idx_kind"),
        "DispatchConfig": ("pass_direction",),
        "CombineConfig": ("pass_direction",),
        "DispatchInputs": ("tokens", "topk_weights"),
        "DispatchOutputs": ("tokens", "topk_weights", "topk_idx"),
        "CombineInputs": ("tokens", "topk_weights"),
        "CombineOutputs": ("tokens", "topk_weights"),
        "Tensor": ("buffer",),
    },
)
# Communicator of a group of ranks, and the library's groups by E and bytes of a row; all layers
# share them.
_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()


class _Owned:
    """An object of the library, destroyed with this one.

    Attributes:
        value: the object.
        needs: what must outlive it.
    """

    def __init__(self, value: Any, *needs: object, size: int = 0) -> None:
        self.value, self.needs, self.size = value, needs, size
        # At the end of the process the library is not asked any more.
        weakref.finalize(self, value.destroy).atexit = False


class _NcclEp:
    """The library, in its high-throughput mode with flat rows, whose counts are known before."""

    def __init__(self, num_experts: int, group: ProcessGroup) -> None:
        self._ep: Any = importlib.import_module("nccl.ep")
        self._num_experts, self._ranks = num_experts, group

    def dispatch(
        self, rows_ND: Tensor, idx_NC: Tensor, weights_NC: Tensor, num_received: int, most: int
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """See `Transport`."""
        ep, stream = self._ep, stream_of(rows_ND.device)
        group = self._group(most, rows_ND.shape[1] * rows_ND.element_size())
        idx, counter = ep.Tensor(idx_NC), rows_ND.new_empty(1, dtype=torch.int32)
        made = group.value.create_handle(
            ep.Layout.FLAT,
            idx,
            layout_info=ep.LayoutInfo(
                recv_total_counter=ep.Tensor(counter), recv_topk_idx_kind=ep.ExpertIdKind.LOCAL
            ),
            stream=stream,
        )
        handle = _Owned(made, group, idx, counter)
        rows_UD = rows_ND.new_empty((num_received, rows_ND.shape[1]))
        idx_UC = idx_NC.new_empty((num_received, idx_NC.shape[1]))
        weights_UC = weights_NC.new_empty(idx_UC.shape)
        made.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(rows_ND), topk_weights=ep.Tensor(weights_NC)),
            ep.DispatchOutputs(
                tokens=ep.Tensor(rows_UD),
                topk_weights=ep.Tensor(weights_UC),
                topk_idx=ep.Tensor(idx_UC),
            ),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.FWD),
            stream=stream,
        )
        return (handle, idx_NC.shape, idx_UC.shape), rows_UD, idx_UC, weights_UC

    def send(self, handle: Any, rows_ND: Tensor) -> Tensor:
        """See `Transport`."""
        ep, (made, _, (num_received, _)) = self._ep, handle
        rows_UD = rows_ND.new_empty((num_received, rows_ND.shape[1]))
        made.value.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(rows_ND)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows_UD)),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            stream=stream_of(rows_ND.device),
        )
        return rows_UD

    def combine(
        self, handle: Any, rows_UD: Tensor, grad_weights_UC: Tensor | None, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `Transport`; in the backward pass the library takes no rows without weights."""
        ep, (made, sent, received) = self._ep, handle
        rows_ND = rows_UD.new_empty((sent[0], rows_UD.shape[1]))
        inputs, outputs = {"tokens": ep.Tensor(rows_UD)}, {"tokens": ep.Tensor(rows_ND)}
        grad_NC = None
        if backward:
            if grad_weights_UC is None:
                grad_weights_UC = rows_UD.new_zeros(received, dtype=torch.float32)
            grad_NC = grad_weights_UC.new_empty(sent)
            inputs["topk_weights"] = ep.Tensor(grad_weights_UC)
            outputs["topk_weights"] = ep.Tensor(grad_NC)
        direction = ep.PassDir.BWD if backward else ep.PassDir.FWD
        made.value.combine(
            ep.CombineInputs(**inputs),
            ep.CombineOutputs(**outputs),
            config=ep.CombineConfig(pass_direction=direction),
            stream=stream_of(rows_UD.device),
        )
        return rows_ND, grad_NC

    def _group(self, most: int, row_bytes: int) -> _Owned:
        """The library's group for so many rows of a rank, made by all ranks together."""
        known = _groups.setdefault(self._ranks, {})
        if "communicator" not in known:
            make: Callable[..., Any] = importlib.import_module(
                "nccl.ep.interop.torch"
            ).get_nccl_comm_from_group
            known["communicator"] = make(self._ranks)
        key = self._num_experts, row_bytes
        if key not in known or known[key].size < most:
            ep, size = self._ep, 1 << (most - 1).bit_length()
            config = ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT,
                num_experts=self._num_experts,
                max_dispatch_tokens_per_rank=size,
                max_token_bytes=row_bytes,
            )
            made = ep.Group.create(known["communicator"], config)
            known[key] = _Owned(made, known["communicator"], size=size)
        return known[key]


class NcclEpDispatcher(LibraryDispatcher):
    """Experts spread over a group of GPUs; `nccl.ep` carries the rows, over NVLink and networks.

    Written against nccl-extensions 0.1 and tested with a fake that has its signatures; it has never
    run on a GPU. `combine="reduced"` sends a token once to a rank, as `DedupDispatcher` does, and
    the library adds up what comes back, in its order and precision. `combine="exact"` gives the
    library every slot as a row of its own: as many rows as `AllToAllDispatcher` sends, added up in
    the order of slots. Buffers grow to the tokens of the rank that has most, at the same call on
    all ranks. The order of the rows of an expert is the library's, and with it the order in which
    its weight gradients are summed.

    All ranks of the group make it together. A rank that ends inside a call of the library is found
    by the library's timeout.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group of the backend nccl.
        combine: "exact" or "reduced".
        drop_policy: which slots of an expert beyond its capacity go, "position" or "score".
        average: see `TokenDispatcher`.

    Raises:
        RuntimeError: on every rank, where one has no GPU, no nccl-extensions 0.1, or functions of
            other signatures.
        ValueError: as for `DedupDispatcher`.

    Reference: NVIDIA/nccl-extensions.
    """

    library = LIBRARY
    transport = _NcclEp
