"""Message of counts, in which the ranks of a group also compare their calls of a layer.

Shapes: P ranks, M numbers for each of them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import debugging
from moe_ext.comm.agreement import Agreement, check_equal_over_ranks, checksum
from moe_ext.comm.groups import group_ranks
from moe_ext.dispatch.wire import Wire

if TYPE_CHECKING:
    from moe_ext.dispatch.base import TokenDispatcher

# State of autograd in the forward pass: no gradients are recorded, they are, or they are and this
# rank's rows need one. The maximum over ranks tells if any rank's rows need a gradient.
_NOT_RECORDED, _RECORDED, _IN_GRAPH = range(3)
_GRAPH_CODES = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_CODES = len(DTYPES) + 1
# Largest number of headers that are kept on the device. A layer needs a few, but with a capacity
# one for each number of tokens.
_MOST_HEADERS = 64
# Reason, for messages, why a rank may run another layer than the others.
SKIPPED = (
    "a batch without tokens of a kind, such as images, skips layers of that kind; give every rank "
    "some"
)
# Layers are numbered in the order of their first calls.
_numbers = itertools.count()
# Group to the sets of layers, one layer number for each rank, that have exchanged rows. Every rank
# sees the same exchanges, so all ranks judge the next one alike.
_met: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()

# Number of integers in a header: model_dim, dtype with wire, top_k, layer with failure, capacity,
# and checksum of options with state of autograd.
_HEAD = 6


@dataclass(frozen=True)
class ExchangedCounts:
    """Result of an exchange of counts. All attributes but `received_PM` are on the host.

    Attributes:
        received: for each total, the number from every rank.
        sent: for each total, the number for every rank.
        received_PM: the received numbers.
        expert_capacity: largest number of rows of an expert from all ranks; None for no limit.
        has_backward: True if rows of any rank need a gradient. All ranks then take part in the
            exchange of gradients.
    """

    received: tuple[tuple[int, ...], ...]
    sent: tuple[tuple[int, ...], ...]
    received_PM: Tensor
    expert_capacity: int | None
    has_backward: bool


class CallComparison:
    """Comparison of the calls of one layer over its ranks, which travels with their counts.

    Args:
        facts: name to value of what the ranks compare at the first call.

    Attributes:
        facts: the argument.
        options: options that the ranks of the layer have compared; None before `declare`.
        layers: names of the layers that share the group; empty before `tell_apart`.
        layer: index of this layer, or its number in the order of first calls; None before its first
            call.
    """

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = dict(facts)
        self.options: Mapping[str, object] | None = None
        self._checksum = 0
        self.layers: tuple[str, ...] = ()
        self.layer: int | None = None
        self._agreed = False
        self._heads: dict[tuple[object, ...], Tensor] = {}

    def tell_apart(self, layers: Sequence[str], layer: int) -> None:
        """See `TokenDispatcher.tell_apart`."""
        self.layers, self.layer = tuple(layers), layer
        # No Agreement is sent at the first call. It could be matched with the counts of another
        # layer, if ranks run different layers.
        self._agreed = True

    def declare(self, options: Mapping[str, object]) -> None:
        """See `TokenDispatcher.declare`."""
        self.options, self._checksum = options, checksum(options)
        self._agreed = True

    def exchange(
        self,
        dispatcher: TokenDispatcher,
        x: Tensor,
        own_PM: Tensor,
        top_k: int = 0,
        capacity: int | None = 0,
        in_graph: bool = False,
        num_parts: int | None = None,
        problem: Exception | None = None,
    ) -> ExchangedCounts:
        """Send row p of some numbers to rank p, and check that all ranks make the same call.

        A header in the message is compared. If rows had different sizes, or a backward pass ran on
        some ranks only, the following exchanges would hang or mix up bytes.

        Args:
            dispatcher: dispatcher that sends the message.
            x: the rows.
            own_PM: the numbers, int64.
            top_k: number of experts of a token.
            capacity: largest number of rows that an expert takes from this rank, None for all.
            in_graph: True if this rank's rows need a gradient, when gradients are recorded.
            num_parts: number of equal runs of a row, whose sums are read on the host; None to read
                every number.
            problem: error of this rank, to be sent to the other ranks.
        """
        group, operation = dispatcher._group.group, dispatcher.operation
        if self.layer is None:
            self.layer = next(_numbers)
        if not self._agreed:
            # The length of later messages depends on num_experts, so it is compared first.
            Agreement(operation, group, own_PM.device).compare(self.first_facts())
            self._agreed = True
        dim, code = x.shape[-1] if x.dim() else 0, len(DTYPES)
        if x.dtype in DTYPES:
            code = DTYPES.index(x.dtype)
        code += _DTYPE_CODES * dispatcher.wire.number
        graph = _NOT_RECORDED
        if torch.is_grad_enabled():
            graph = _IN_GRAPH if in_graph else _RECORDED
        graph += _GRAPH_CODES * self._checksum
        limit, state = -1 if capacity is None else capacity, 2 * self.layer + (problem is not None)
        header = (dim, code, top_k, state, limit, graph)
        key = (*header, own_PM.device)
        if key not in self._heads:
            if len(self._heads) == _MOST_HEADERS:
                self._heads.clear()
            # Copying a header to the device synchronises, so headers are kept.
            self._heads[key] = own_PM.new_tensor(header).expand(len(own_PM), -1)
        message = torch.cat([self._heads[key], own_PM], dim=1)
        received = dispatcher.exchange_counts(message, operation=f"{operation} counts")
        received_PM = received[:, _HEAD:]
        # NOTE: device-to-host sync, the only one of the layer. The host needs the counts for the
        # splits of the collective and the size of its output, and the headers to decide before rows
        # are sent.
        told = received_PM, own_PM
        if num_parts is not None:
            size = len(own_PM), num_parts, -1
            told = received_PM.view(size).sum(2), own_PM.view(size).sum(2)
        columns = [*zip(*torch.cat([received[:, :_HEAD], *told], 1).tolist(), strict=True)]
        _, _, _, states, limits, graphs = columns[:_HEAD]
        alike = states[0] % 2 == 0
        for column in columns[:_HEAD]:
            alike = alike and column.count(column[0]) == len(column)
        if not alike:
            self._compare(columns[:_HEAD], problem, group, operation, own_PM.device)
        elif not self.layers and (states[0] // 2,) * len(states) not in _met.get(group, ()):
            self._check_layers((states[0] // 2,) * len(states), group, operation)
        half = _HEAD + len(columns[_HEAD:]) // 2
        return ExchangedCounts(
            tuple(columns[_HEAD:half]),
            tuple(columns[half:]),
            received_PM,
            None if limits[0] < 0 else sum(limits),
            max(graphs) % _GRAPH_CODES == _IN_GRAPH,
        )

    def _compare(
        self,
        columns: Sequence[Sequence[int]],
        problem: Exception | None,
        group: ProcessGroup,
        operation: str,
        device: torch.device,
    ) -> None:
        """Raise ValueError on every rank for the first entry of the headers that differs."""
        dims, codes, top_ks, states, limits, graphs = columns
        if any(state % 2 for state in states):
            # One more message tells the error of the rank that failed.
            Agreement(operation, group, device).compare({}, problem=problem)
        self._check_layers(tuple(state // 2 for state in states), group, operation)
        if any(graph // _GRAPH_CODES != graphs[0] // _GRAPH_CODES for graph in graphs):
            # One more message finds the option that has changed on some ranks.
            Agreement(operation, group, device).compare({"options": self.options or {}})
        names = [*map(str, DTYPES), "another dtype"]
        for name, values in (
            ("model_dim", dims),
            ("the dtype of x", [names[code % _DTYPE_CODES] for code in codes]),
            ("wire", [Wire.from_number(code // _DTYPE_CODES) for code in codes]),
            ("top_k", top_ks),
            ("whether there is a capacity", [limit >= 0 for limit in limits]),
            (
                "torch.is_grad_enabled() in the forward pass",
                [graph % _GRAPH_CODES != _NOT_RECORDED for graph in graphs],
            ),
        ):
            check_equal_over_ranks(name, values, group, operation)

    def first_facts(self) -> dict[str, object]:
        """Return the facts that the ranks compare at the first call."""
        return {**self.facts, debugging.OPTION: debugging.enabled()}

    def _check_layers(self, layers: tuple[int, ...], group: ProcessGroup, operation: str) -> None:
        """Raise ValueError if a rank is found to run another layer than the others."""
        if self.layers:
            names = [self.layers[i] if i < len(self.layers) else "another" for i in layers]
            name = f"the layer that runs ({SKIPPED})"
            check_equal_over_ranks(name, names, group, operation)
            return
        met = _met.setdefault(group, set())
        if layers in met:
            return
        if any(one == other for row in met for one, other in zip(layers, row, strict=True)):
            found = ", ".join(
                f"layer {layer} on rank {rank}"
                for layer, rank in zip(layers, group_ranks(group), strict=True)
            )
            raise ValueError(
                f"{operation}: expected every rank to run the layer that ran with those of "
                f"the others before ({SKIPPED}; draw what drops layers alike on all), got "
                f"{found}, in the order of first calls"
            )
        met.add(layers)
