"""Message of counts, in which the ranks of a group compare their calls of a layer.

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

# State of the backward pass: not recorded, recorded, or recorded with this rank's rows in it, which
# is the largest number.
_NOT_RECORDED, _RECORDED, _IN_GRAPH = range(3)
_GRAPH_CODES = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_CODES = len(DTYPES) + 1
# Headers kept on the device: a layer has a few, or one for each number of tokens with a capacity.
_MOST_HEADERS = 64
# Causes for which a rank may run another layer than the others.
SKIPPED = (
    "a batch without tokens of a kind, such as images, skips layers of that kind; give every rank "
    "some"
)
# Layers are numbered by their first calls.
_numbers = itertools.count()
# Layers that have exchanged rows over a group, by their numbers. Every rank sees all exchanges, and
# comes to the same verdict on the next one.
_met: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()

# Numbers of a header: model_dim, dtype and wire, top_k, layer and failure, capacity, options and
# state of the backward pass.
_HEAD = 6


@dataclass(frozen=True)
class ExchangedCounts:
    """Numbers that the ranks told each other, on the host but for `received_PM`.

    Attributes:
        received: for each total, the number from every rank.
        sent: for each total, the number for every rank.
        received_PM: the numbers themselves.
        expert_capacity: rows that an expert gets at most from all ranks; None without limit.
        has_backward: whether rows of some rank get a gradient: all ranks then take part.
    """

    received: tuple[tuple[int, ...], ...]
    sent: tuple[tuple[int, ...], ...]
    received_PM: Tensor
    expert_capacity: int | None
    has_backward: bool


class CallComparison:
    """Comparison of the calls of one layer over its ranks, which travels with their counts.

    Args:
        facts: what the ranks compare at the first call, by the name to use in messages.

    Attributes:
        facts: these.
        options: of the layer that runs, which its ranks have compared; None where it has none.
        layers: names of the layers that share the group; empty where they have none.
        layer: index of this one, or its number in the order of first calls; None before the first.
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
        # The first message of one layer must not meet a later one of another.
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
        """Tell rank p row p of some numbers, and check that the ranks make the same call.

        The message carries a header, since an exchange of rows of different sizes, or a backward
        pass on some ranks alone, would hang or mix up bytes.

        Args:
            dispatcher: that sends it.
            x: the rows.
            own_PM: the numbers, int64.
            top_k: columns of the choice.
            capacity: rows that an expert takes from this rank, None for all.
            in_graph: whether gradients reach this rank's rows, where they are recorded.
            num_parts: equal runs of the numbers, whose sums the host reads; None for each number.
            problem: error of this rank, to tell the others.
        """
        group, operation = dispatcher._group.group, dispatcher.operation
        if self.layer is None:
            self.layer = next(_numbers)
        if not self._agreed:
            # The length of the message depends on num_experts.
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
            # A copy to the device, which waits, happens once.
            self._heads[key] = own_PM.new_tensor(header).expand(len(own_PM), -1)
        message = torch.cat([self._heads[key], own_PM], dim=1)
        received = dispatcher.exchange_counts(message, operation=f"{operation} counts")
        received_PM = received[:, _HEAD:]
        # NOTE: device-to-host sync, the only one of the layer: the collective takes its splits, and
        # the allocator its size, on the host; and every rank must reach the same verdict before
        # rows move.
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
        """ValueError on every rank for what differs in the headers of all ranks and must not."""
        dims, codes, top_ks, states, limits, graphs = columns
        if any(state % 2 for state in states):
            # One more message, with the reason.
            Agreement(operation, group, device).compare({}, problem=problem)
        self._check_layers(tuple(state // 2 for state in states), group, operation)
        if any(graph // _GRAPH_CODES != graphs[0] // _GRAPH_CODES for graph in graphs):
            # One more message, with the option that has changed on some ranks.
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
        """Facts that the ranks compare at the first call: every later message depends on them."""
        return {**self.facts, debugging.OPTION: debugging.enabled()}

    def _check_layers(self, layers: tuple[int, ...], group: ProcessGroup, operation: str) -> None:
        """ValueError if a rank runs another layer than the others, where that can be known."""
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
