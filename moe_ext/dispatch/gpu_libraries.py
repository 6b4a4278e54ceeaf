"""Base of dispatchers over libraries that send tokens together with their choices between GPUs.

Shapes: T tokens, D model, K top-k, N rows that this rank gives to the library with C choices each,
    U rows that this rank receives.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import in_layer, naming_failed_ranks, running
from moe_ext.comm.groups import check_group, group_rank
from moe_ext.comm.traffic import record_traffic
from moe_ext.dispatch.dedup import DedupDispatcher
from moe_ext.dispatch.token_exchange import Hop, Route
from moe_ext.dispatch.wire import Formats, Wire

# Device type on which the libraries run. Tests replace the libraries by fakes, and this by the CPU.
DEVICE = "cuda"
_ROW_ALIGNMENT = 16


def has_device() -> bool:
    """Return True if torch finds a device on which the libraries run."""
    return bool(torch.get_device_module(DEVICE).is_available())


def stream_of(device: torch.device) -> int:
    """Return the current stream of a device as a number, the form that libraries take."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@dataclass(frozen=True)
class Library:
    """Library in the release for which a dispatcher was written.

    Attributes:
        module: name of the module to import.
        distribution: name of its wheel.
        release: first part of its version, "major.minor".
        signatures: for each function or class that is called, the names of the arguments that are
            passed.
    """

    module: str
    distribution: str
    release: str
    signatures: Mapping[str, tuple[str, ...]]

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def state(self) -> str:
        """Return the text for `moe_ext.info`, without importing the library."""
        version = self.version
        if version is None:
            return f"absent: no package {self.distribution}"
        if not version.startswith(f"{self.release}."):
            return f"{version}, which is not used: expected {self.release}"
        return version if has_device() else f"{version}, which is not used: torch finds no GPU"

    def problem(self) -> str | None:
        """Return the reason why the library cannot be used here, or None."""
        version = self.version
        if version is None or not version.startswith(f"{self.release}."):
            return (
                f"expected {self.distribution} {self.release} to be installed for the module "
                f"{self.module}, got {version}"
            )
        if not has_device():
            return f"expected a GPU for {self.distribution}, got none"
        try:
            module = importlib.import_module(self.module)
        except Exception as error:
            return f"expected {self.module} to import, got {type(error).__name__}: {error}"
        for name, given in self.signatures.items():
            try:
                taken = inspect.signature(operator.attrgetter(name)(module)).parameters
            except AttributeError:
                return f"expected {self.module} to have {name}, got version {version} without it"
            needed = {p for p, it in taken.items() if it.default is it.empty} - {"self"}
            if not needed <= set(given) <= set(taken):
                return (
                    f"expected {self.module}.{name} to take {list(given)}, got version {version} "
                    f"whose arguments are {list(taken)}"
                )
        return None


def require(owner: str, version: object, problem: str | None, group: ProcessGroup) -> None:
    """Raise on every rank if one of them lacks a library, or has another version of it."""
    check_group(group, owner, name="group")
    error = None if problem is None else RuntimeError(f"{owner}: {problem}")
    Agreement(owner, group).compare({"the version": version}, problem=error)


class Transport(Protocol):
    """Calls of a library. A handle identifies the choices of one dispatch."""

    def dispatch(
        self, rows_ND: Tensor, idx_NC: Tensor, weights_NC: Tensor, num_received: int, most: int
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Send each row once to every rank that has experts of it. Collective.

        Args:
            rows_ND: rows, bfloat16.
            idx_NC: experts of each row, int64, -1 for none.
            weights_NC: weights of the experts, float32.
            num_received: U.
            most: largest N of all ranks.

        Returns:
            A handle; rows `[U, D]`; their choices `[U, C]`, counted from the first expert of this
            rank, -1 for experts of other ranks; weights `[U, C]`.
        """

    def send(self, handle: Any, rows_ND: Tensor) -> Tensor:
        """Send other rows the same way in the backward pass; return `[U, D]` in the same order."""

    def combine(
        self, handle: Any, rows_UD: Tensor, grad_weights_UC: Tensor | None, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return sums over the ranks for each row, `[N, D]`, and gradients of weights `[N, C]`."""


@dataclass(frozen=True)
class _Handle:
    """Handle of a library, with facts that the library does not return.

    Attributes:
        handle: handle of the library.
        no_expert_N1: True for rows without an expert, for which a library may return any values.
        dim: D, number of elements of a row.
        sent: number of rows for other ranks.
        received: number of rows from other ranks.
    """

    handle: Any
    no_expert_N1: Tensor
    dim: int
    sent: int
    received: int


class LibraryHop(Hop):
    """Hop whose rows a library sends. The ranks compare their calls in `Hop.count`.

    With `combine="exact"` every slot is a row with one choice, so that the sum that comes back is
    the result of the slot. With "reduced" a token is a row with K choices.
    """

    def __init__(
        self,
        owner: str,
        num_experts: int,
        group: ProcessGroup,
        combine: str,
        average: bool,
        transport: Transport,
    ) -> None:
        super().__init__(owner, num_experts, group, combine, average, Wire())
        self._by_slot = combine == "exact"
        self._transport = transport

    def _check_dtype(self, x_TD: Tensor) -> None:
        if x_TD.dtype != torch.bfloat16 or x_TD.device.type != DEVICE:
            raise TypeError(
                f"{self.operation}: expected x_TD to be bfloat16 on {DEVICE} (or the layer to run "
                f"under torch.autocast), got {x_TD.dtype} on {x_TD.device}"
            )
        if x_TD.shape[1] * x_TD.element_size() % _ROW_ALIGNMENT:
            raise ValueError(
                f"{self.operation}: expected model_dim to be a multiple of "
                f"{_ROW_ALIGNMENT // x_TD.element_size()}, got {x_TD.shape[1]}"
            )

    def find_routes(
        self,
        x_TD: Tensor,
        idx: Sequence[Tensor],
        weights: Sequence[Tensor] | None,
        origin: Sequence[Tensor] | None,
        capacity: int | None,
        *,
        in_graph: bool,
    ) -> list[Route]:
        """See `Hop`. The tokens travel together with their choices."""
        _, (slots,), told = self.count(x_TD, idx, capacity, in_graph=in_graph)
        sent, slots_sent, _ = told.sent
        received, slots_received, tokens_of_ranks = told.received
        assert weights is not None
        (idx_NC,), (weights_NC,), most = idx, weights, max(tokens_of_ranks)
        if self._by_slot:
            most *= idx_NC.shape[1]
            idx_NC, weights_NC = idx_NC.reshape(-1, 1), weights_NC.reshape(-1, 1)
            sent, received = slots_sent, slots_received
        rank = group_rank(self.group)
        rows_ND = self._rows(x_TD, idx[0].shape[1])
        with self._naming("dispatch", running.get()):
            handle, arrived_UD, idx_UC, weights_UC = self._transport.dispatch(
                rows_ND,
                idx_NC.to(torch.int64).contiguous(),
                weights_NC.contiguous(),
                sum(received),
                max(most, 1),
            )
        kept = _Handle(
            handle,
            (idx_NC < 0).all(1, keepdim=True),
            x_TD.shape[1],
            sum(sent) - sent[rank],
            sum(received) - received[rank],
        )
        _count(rows_ND, kept.sent)
        # `once` has one row per token, because the library sums the rows that come back.
        every = torch.arange(x_TD.shape[0], device=x_TD.device)
        return [
            Route(
                replace(slots, slot_of_row=every, row_of_slot=every, top_k=1),
                replace(slots, slot_of_row=slots.slot_of_row[: sum(slots_sent)]),
                sent,
                received,
                slots_sent,
                slots_received,
                idx_UC,
                idx_UC.new_zeros(idx_UC.shape[0]),
                weights_UC,
                told.expert_capacity,
                told.has_backward,
                [arrived_UD],
                kept,
            )
        ]

    def start_out(
        self, rows: Tensor, route: Route, name: str, *, format: str | None = None
    ) -> Callable[[], Tensor]:
        """Return the tokens that came with their choices. Later rows are sent by the handle."""
        if route.arrived:
            return route.arrived.pop
        rows_ND = self._rows(rows, route.slots.top_k)
        _count(rows_ND, route.handle.sent)
        with self._naming(name, route.layer):
            arrived_UD = self._transport.send(route.handle.handle, rows_ND)
        return lambda: arrived_UD

    def start_back(
        self,
        rows: Tensor,
        route: Route,
        name: str,
        format: str | None,
        *,
        slots: bool,
        backward: bool,
    ) -> Callable[[], Tensor]:
        """See `Hop`."""
        back, _ = self._combine(rows, None, route, name, backward=backward)
        if slots:
            back = back[route.slots.slot_of_row]
        return lambda: back

    def bring_sums(
        self,
        y_UD: Tensor,
        route: Route,
        name: str,
        formats: Formats,
        meanwhile: Callable[[], None] | None,
    ) -> Tensor:
        """See `Hop`."""
        if meanwhile is not None:
            meanwhile()
        return _BringSums.apply(y_UD, self, route, name)

    def return_weights(self, routes: Sequence[Route], grads: Sequence[Tensor]) -> list[Tensor]:
        """See `Hop`. A library takes weights only together with rows, which are zeros here."""
        (route,), (grad_UC,) = routes, grads
        none_UD = grad_UC.new_zeros((grad_UC.shape[0], route.handle.dim), dtype=torch.bfloat16)
        _, back = self._combine(none_UD, grad_UC, route, "weights backward", backward=True)
        assert back is not None
        return [back.view(-1, route.slots.top_k)]

    def _rows(self, x_TD: Tensor, top_k: int) -> Tensor:
        return (x_TD.repeat_interleave(top_k, 0) if self._by_slot else x_TD).contiguous()

    def _combine(
        self, rows_UD: Tensor, grad_UC: Tensor | None, route: Route, name: str, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        kept: _Handle = route.handle
        _count(rows_UD, kept.received)
        with self._naming(name, route.layer):
            back_ND, grad_NC = self._transport.combine(
                kept.handle,
                rows_UD.contiguous(),
                None if grad_UC is None else grad_UC.contiguous(),
                backward=backward,
            )
        back_ND = back_ND.masked_fill_(kept.no_expert_N1, 0.0)
        if backward and self.grad_scale != 1.0:
            back_ND.mul_(self.grad_scale)
        if grad_NC is not None:
            grad_NC = grad_NC.masked_fill_(kept.no_expert_N1, 0.0).mul_(self.grad_scale)
        return back_ND, grad_NC

    @contextlib.contextmanager
    def _naming(self, name: str, layer: Any) -> Iterator[None]:
        with in_layer(layer), naming_failed_ranks(self.group, f"{self.operation} {name}"):
            yield


class _BringSums(torch.autograd.Function):
    """Sums results over the ranks. The gradient of a sum goes to all ranks that contributed."""

    @staticmethod
    def forward(ctx: Any, y_UD: Tensor, hop: LibraryHop, route: Route, name: str) -> Tensor:
        ctx.way = hop, route, name
        return hop.start_back(y_UD, route, name, None, slots=False, backward=False)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        hop, route, name = ctx.way
        grad_UD = hop.start_out(grad_TD, route, f"{name} backward")()
        if hop.grad_scale != 1.0:
            grad_UD = grad_UD.mul_(1.0 / hop.grad_scale)
        return grad_UD, None, None, None


def _count(rows: Tensor, num_others: int) -> None:
    record_traffic("library", num_others * rows.shape[1] * rows.element_size())


class LibraryDispatcher(DedupDispatcher):
    """Base of the dispatchers over a library, see `LibraryHop`.

    Whole batches and the rounds of a `RowBudget` are supported, but not `overlap` or a `wire`. Rows
    are bfloat16.
    """

    serves = frozenset({"an ep_group of several ranks", "row_budget", "combine='reduced'"})
    library: Library
    # Class of the `Transport`, which is constructed from num_experts and the group.
    transport: type[Any]

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        combine: str = "exact",
        drop_policy: str = "position",
        average: bool = True,
    ) -> None:
        require(type(self).__name__, self.library.version, self.library.problem(), group)
        super().__init__(
            num_experts, group, combine=combine, drop_policy=drop_policy, average=average
        )

    def _make_hops(self, num_experts: int, group: ProcessGroup) -> tuple[Hop, ...]:
        options = (self.combine_by, self.average, self.transport(num_experts, group))
        return (LibraryHop(self.operation, num_experts, group, *options),)
