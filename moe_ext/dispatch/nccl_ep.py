"""Dispatcher over the library `nccl.ep` of the wheel nccl-extensions, release 0.1.

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
# For each process group, its communicator, and groups of the library by E and bytes of a row. All
# layers share them.
_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()


class _Owned:
    """Owner of an object of the library, which is destroyed with the owner.

    Attributes:
        value: the object.
        needs: objects that must outlive `value`.
    """

    def __init__(self, value: Any, *needs: object, size: int = 0) -> None:
        self.value, self.needs, self.size = value, needs, size
        # `destroy` is not called at the end of the process.
        weakref.finalize(self, value.destroy).atexit = False


class _NcclEp:
    """`Transport` over the library's high-throughput mode, for flat rows with known counts."""

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
        """See `Transport`. In the backward pass the library takes rows only with weights."""
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
        """Return the library's group for `most` rows per rank, which all ranks make together."""
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
    """Sends rows between GPUs by the library `nccl.ep`, over NVLink and networks.

    Written for nccl-extensions 0.1 and tested with a fake that has its signatures; it has never run
    on a GPU. `combine="reduced"` sends a token once to each rank, as `DedupDispatcher` does, and
    the library sums the results, in its order and precision. `combine="exact"` gives every slot to
    the library as a separate row. These are as many rows as `AllToAllDispatcher` sends, and they
    are summed in the order of slots. Buffers grow to the largest number of tokens of a rank, in the
    same call on all ranks. The library determines the order of the rows of an expert, and so the
    order in which weight gradients are summed.

    All ranks of the group construct it together. If a rank ends inside a call of the library, the
    timeout of the library ends the call on the other ranks.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group of the backend nccl.
        combine: "exact" or "reduced".
        drop_policy: rule that drops slots beyond the capacity of an expert, "position" or "score".
        average: see `TokenDispatcher`.

    Raises:
        RuntimeError: on every rank, if one has no GPU, no nccl-extensions 0.1, or functions with
            other signatures.
        ValueError: see `DedupDispatcher`.

    Reference: NVIDIA/nccl-extensions.
    """

    library = LIBRARY
    transport = _NcclEp
