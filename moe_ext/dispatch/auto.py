"""Chooses a dispatcher by what a rehearsal of each takes, and says why.

Shapes: T tokens of a rank, D model, E experts, K top-k, P ranks, N nodes.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import debugging
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_rank, group_ranks
from moe_ext.comm.link import max_over_ranks, seconds_of
from moe_ext.comm.traffic import not_counted
from moe_ext.dispatch.allgather import AllGatherDispatcher
from moe_ext.dispatch.alltoall import AllToAllDispatcher
from moe_ext.dispatch.base import CAPABILITIES, TokenDispatcher
from moe_ext.dispatch.counts import DTYPES
from moe_ext.dispatch.dedup import DedupDispatcher, HierarchicalDispatcher
from moe_ext.dispatch.parts import Choice, sum_dtype
from moe_ext.dispatch.wire import LOSSLESS, Wire, sent_row_bytes

_OPERATION = "MoELayer(dispatcher='auto')"
# Rows of fewer bytes cost nothing but latency, and are not worth a rehearsal.
SMALL_BYTES = 64 * 1024
# Bytes of rows that are rehearsed at most: the time of more follows from that of two numbers.
REHEARSED_BYTES = {"cpu": 2**23, "cuda": 2**26}
# A rehearsal is the median of so many rounds; who has taken so many times the least drops out.
ROUNDS = 5
BEHIND = 1.5
# Share by which another dispatcher must beat one that does less: a smaller gain may be noise. It
# must beat the one in use by more.
LEAST_GAIN = 0.02
LEAST_GAIN_OF_A_CHANGE = 0.05
# The choice is looked at again before this training pass, before that of four times its number, ...
FIRST_LOOK_AGAIN = 16


def expected_ranks(num_experts: int, num_parts: int, top_k: int) -> float:
    """Number of the P equal parts of the experts in which a token of even routing has any."""
    part = num_experts // num_parts
    none = math.comb(num_experts - part, top_k) / math.comb(num_experts, top_k)
    return num_parts * (1.0 - none)


def node_size_of(group: ProcessGroup) -> int:
    """Ranks of the group on each node by torchrun's LOCAL_WORLD_SIZE; 1 where they differ."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    ranks = group_ranks(group)
    if per_node < 1:
        return 1
    nodes = [rank // per_node for rank in ranks]
    size = nodes.count(nodes[0])
    even = all(nodes[i] == nodes[i // size * size] for i in range(len(nodes)))
    return size if even and len(set(nodes)) * size == len(nodes) else 1


@dataclass(frozen=True)
class DispatchCandidate:
    """A dispatcher, and what it is expected to take in a layer's step.

    Attributes:
        name: as `MoELayer` takes it.
        sent_bytes: rows and what belongs to them that leave a rank in a forward pass, there and
            back, for even routing; those of "hierarchical" inside the node, too.
        node_bytes: of these, what leaves the node.
        seconds: of there and back by the rehearsal, with the backward pass where gradients were
            recorded; None where nothing was rehearsed.
    """

    name: str
    sent_bytes: float
    node_bytes: float
    seconds: float | None


@dataclass(frozen=True)
class DispatchChoice:
    """The dispatcher of a layer and why; print it for a table.

    Attributes:
        name: as `MoELayer` takes it; of one that was given, its class.
        reason: one line.
        candidates: all of them.
    """

    name: str
    reason: str
    candidates: tuple[DispatchCandidate, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.reason}"]
        if self.candidates:
            lines.append(f"{'dispatcher':<14}{'sent KB':>12}{'off node KB':>14}{'ms':>10}")
        for c in self.candidates:
            time = "-" if c.seconds is None else f"{1e3 * c.seconds:.2f}"
            sent, off = f"{c.sent_bytes / 1e3:.1f}", f"{c.node_bytes / 1e3:.1f}"
            lines.append(f"{c.name:<14}{sent:>12}{off:>14}{time:>10}")
        return "\n".join(lines)


# (seconds whatever T is, seconds a token) of each candidate.
_Lines = tuple[tuple[float, float], ...]
_rehearsed: weakref.WeakKeyDictionary[ProcessGroup, dict[Hashable, _Lines]]
_rehearsed = weakref.WeakKeyDictionary()


class AutoDispatcher(TokenDispatcher):
    """Chooses the dispatcher of a `MoELayer` over a group, and looks at the choice again.

    At the first forward pass each candidate brings tokens of even routing to the experts and back,
    and their gradients where they are recorded; they take turns, and the one that takes least for
    the tokens of the pass is chosen, on all ranks alike. Tokens so few that all they cost is
    latency (64 KiB of rows) take the fewest messages without a rehearsal. Layers of one shape over
    one group share the times. With `combine="exact"` all candidates have the same bits, so that
    nothing but time depends on the choice. The layer looks again before its training passes 16, 64,
    256, ..., with the routing of the pass before. It changes to a dispatcher that takes 5 % less.
    It does not look again where a change would show: with "reduced", with a wire, with moved
    experts, and where passes are recomputed.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        combine: "exact" or "reduced", see `DedupDispatcher`.
        wire: see `TokenDispatcher`. Gradients are then rounded to one side or the other of the
            weights, so that their bits depend on the choice; those of outputs do not.

    Raises:
        ValueError: the size of the group does not divide E.
    """

    reason = "chosen at the first forward pass"
    serves = frozenset(CAPABILITIES)

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        *,
        combine: str = "exact",
        wire: Wire | str | None = None,
    ) -> None:
        super().__init__(num_experts, group, wire=wire)
        self.combine_by = self._calls.facts["combine"] = combine
        self._num_passes = 0
        self.chosen: tuple[TokenDispatcher, DispatchChoice] | None = None
        # Experts that the next pass looks at the choice with.
        self.routed_TK: Tensor | None = None
        self._looks_again = combine == "exact" and self.wire == Wire()

    def is_due(self, used: TokenDispatcher, *, trains: bool) -> bool:
        """True if a pass that would use this dispatcher asks `choose` first."""
        if self.chosen is None:
            return True
        return trains and self.routed_TK is not None and self.chosen[0] is used

    def see(self, topk_idx: Tensor, *, may_change: bool) -> None:
        """Count a training pass, and keep its choice of experts where the next one looks at it.

        Args:
            topk_idx: `[T, K]`, as `plan` was given it.
            may_change: False where this pass and all that follow must use the same dispatcher.
        """
        self._looks_again = self._looks_again and may_change
        self._num_passes += 1
        following = self._num_passes + 1
        is_power_of_4 = following & (following - 1) == 0 and following.bit_length() % 2 == 1
        if self._looks_again and is_power_of_4 and following >= FIRST_LOOK_AGAIN:
            self.routed_TK = topk_idx.detach()

    def choose(
        self,
        x: Tensor,
        top_k: int,
        *,
        in_rounds: bool,
        weighed: bool = True,
    ) -> tuple[TokenDispatcher, DispatchChoice]:
        """The dispatcher to use, and why; all ranks of the group call it together.

        The one chosen before stays unless another takes less.

        Args:
            x: input of the layer, `[..., D]`; for its size alone, and checked by nobody here.
            top_k: K, experts of a token.
            in_rounds: whether rows are sent in the rounds of a `RowBudget`.
            weighed: whether the experts multiply by the weights, which then travel to them.

        Raises:
            ValueError: on every rank, where the layers differ.
            RankFailureError: a rank died or did not answer.
        """
        group, kind = self.group, x.device.type
        facts = {
            "num_experts": self.num_experts,
            "combine": self.combine_by,
            "wire": str(self.wire),
            "top_k": top_k,
            "whether there is a row_budget": in_rounds,
            "whether the experts take weights": weighed,
            debugging.OPTION: debugging.enabled(),
        }
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        code = DTYPES.index(dtype) if dtype in DTYPES else 0
        dim = x.shape[-1] if x.dim() else 1
        values = (x.numel() // max(dim, 1), max(dim, 1), code, node_size_of(group))
        told = Agreement(_OPERATION, group, x.device).compare(facts, values=values)
        # A rank whose input is wrong answers too: the layer says so.
        num_tokens, dim, code, node_size = (max(numbers) for numbers in zip(*told, strict=True))
        if any(row[3] != node_size for row in told):
            node_size = 1
        names = self._names(node_size, in_rounds)
        shape = DispatchShape(
            self.num_experts, top_k, self.num_ranks, node_size, dim, DTYPES[code], self.wire
        )
        amounts = [shape.sent_bytes(name, self.combine_by, num_tokens) for name in names]
        seconds: list[float] | None = None
        now, routed_TK, self.routed_TK = self.chosen, self.routed_TK, None
        if num_tokens * shape.token_bytes <= SMALL_BYTES:
            if now is not None:
                return now
            # Both take three messages; every other takes more.
            name = "alltoall" if "alltoall" in names else names[-1]
            reason = f"{num_tokens} tokens are so few that the fewest messages take least"
        else:
            made = [(name, self._make(name, node_size)) for name in names]
            seconds = self._predicted(made, shape, num_tokens, x.device, weighed, routed_TK)
            allowed = min(seconds) * (1.0 + LEAST_GAIN)
            by_name = dict(zip(names, seconds, strict=True))
            name = next(name for name, time in by_name.items() if time <= allowed)
            what = "and back, and their gradients" if torch.is_grad_enabled() else "and back"
            reason = f"least time for {num_tokens} tokens to the experts {what}, as rehearsed"
            if routed_TK is not None:
                reason += f" with the routing of training pass {self._num_passes}"
            if now is not None and now[1].name in by_name:
                used = now[1].name
                if by_name[name] * (1.0 + LEAST_GAIN_OF_A_CHANGE) >= by_name[used]:
                    name = used
        if now is not None and name == now[1].name:
            chosen = now[0]
        else:
            chosen, calls = self._make(name, node_size), (now[0] if now else self)._calls
            if calls.layer is not None:
                chosen.tell_apart(calls.layers, calls.layer)
            if calls.options is not None:
                chosen.declare(calls.options)
        candidates = tuple(
            DispatchCandidate(name, sent, off, None if seconds is None else seconds[i])
            for i, (name, (sent, off)) in enumerate(zip(names, amounts, strict=True))
        )
        self.chosen = chosen, DispatchChoice(name, reason, candidates)
        return self.chosen

    def _names(self, node_size: int, in_rounds: bool) -> list[str]:
        """The candidates, of which those that do less come first."""
        names = ["alltoall"] if self.combine_by == "exact" else []
        names.append("dedup")
        if 1 < node_size < self.num_ranks:
            names.append("hierarchical")
        no_rows = in_rounds or self.wire.dispatch == LOSSLESS
        return names if no_rows else [*names, "allgather"]

    def _make(self, name: str, node_size: int) -> TokenDispatcher:
        if name == "alltoall":
            return AllToAllDispatcher(self.num_experts, self.group, wire=self.wire)
        once: dict[str, Any] = {"combine": self.combine_by, "wire": self.wire}
        if name == "hierarchical":
            return HierarchicalDispatcher(self.num_experts, self.group, node_size=node_size, **once)
        kind = DedupDispatcher if name == "dedup" else AllGatherDispatcher
        return kind(self.num_experts, self.group, **once)

    def _predicted(
        self,
        made: list[tuple[str, TokenDispatcher]],
        shape: DispatchShape,
        num_tokens: int,
        device: torch.device,
        weighed: bool,
        routed_TK: Tensor | None,
    ) -> list[float]:
        """Seconds of each candidate for so many tokens, of the slowest rank.

        Those of even routing are kept for other layers of the shape.
        """
        limit = REHEARSED_BYTES.get(device.type, REHEARSED_BYTES["cpu"]) // shape.token_bytes
        many = max(2, min(num_tokens, limit))
        recorded = torch.is_grad_enabled()
        known = _rehearsed.setdefault(self.group, {}) if routed_TK is None else {}
        key = (shape, self.combine_by, many, tuple(name for name, _ in made), recorded, weighed)
        if key not in known:
            sizes = (many,) if num_tokens <= many else (many // 8 or 1, many)
            with not_counted():
                known[key] = _rehearse(made, shape, sizes, device, weighed, routed_TK)
        return [base + num_tokens * slope for base, slope in known[key]]


@dataclass(frozen=True)
class DispatchShape:
    """Facts that the expected numbers of rows follow from.

    `lossless_share` is the share of their bytes that rows in the format "lossless" take, None for
    that of normally distributed numbers.
    """

    num_experts: int
    top_k: int
    num_ranks: int
    node_size: int
    model_dim: int
    dtype: torch.dtype
    wire: Wire = Wire()
    shards: int = 1
    lossless_share: float | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of the K rows of a token."""
        return self.top_k * self.model_dim * self.dtype.itemsize

    def sent_bytes(self, name: str, combine: str, num_tokens: int) -> tuple[float, float]:
        """Bytes that leave a rank, and its node, there and back in a forward pass."""
        ranks, nodes = self.num_ranks, self.num_ranks // self.node_size
        # Ranks that share each expert all get its rows.
        places = ranks // self.shards
        held = expected_ranks(self.num_experts, places, self.top_k) / places
        row, back = map(self._row_bytes, (self.wire.dispatch, self.wire.combine))
        # Indices and weights.
        beside = self.top_k * self.shards * (2.0 + sum_dtype(self.dtype).itemsize)
        rows_back = {"exact": self.top_k / places, "reduced": held}[combine]
        # The ranks but this one, and those on other nodes.
        others, abroad = ranks - 1, ranks - self.node_size
        if name == "hierarchical":
            out = expected_ranks(self.num_experts, nodes, self.top_k) / nodes
            at_node = self.top_k * self.shards / nodes if combine == "exact" else out
            off = (nodes - 1) * (out * (row + beside) + at_node * back)
            inside = nodes * (self.node_size - 1) * (held * (row + beside) + rows_back * back)
            return num_tokens * (off + inside), num_tokens * off
        there = {
            "alltoall": self.top_k / places * row,
            "dedup": held * (row + beside),
            "allgather": row + beside,
        }[name]
        each = num_tokens * (there + rows_back * back)
        return others * each, abroad * each

    def _row_bytes(self, format: str | None) -> float:
        if format == LOSSLESS and self.lossless_share is not None:
            return self.lossless_share * self.model_dim * self.dtype.itemsize
        return float(sent_row_bytes(format, self.model_dim, self.dtype))


def _rehearse(
    made: list[tuple[str, TokenDispatcher]],
    shape: DispatchShape,
    sizes: tuple[int, ...],
    device: torch.device,
    weighed: bool,
    routed_TK: Tensor | None = None,
) -> _Lines:
    """Times of the candidates as lines over the number of tokens, agreed over the ranks.

    Tokens choose what those of a pass chose, their experts at random where none are given.
    """
    group = made[0][1].group
    if routed_TK is not None and len(routed_TK):
        idx_TK = routed_TK[torch.arange(sizes[-1], device=device) % len(routed_TK)]
    else:
        generator = torch.Generator().manual_seed(group_rank(group))
        scores_TE = torch.rand(sizes[-1], shape.num_experts, generator=generator, device="cpu")
        idx_TK = scores_TE.topk(shape.top_k).indices.to(device)
    x_TD = torch.zeros(sizes[-1], shape.model_dim, dtype=shape.dtype, device=device)
    weights_TK = torch.ones(idx_TK.shape, device=device)
    recorded = torch.is_grad_enabled()

    def step(dispatcher: TokenDispatcher, size: int) -> None:
        x = x_TD[:size].requires_grad_(recorded)
        given = weights_TK[:size].requires_grad_(recorded)
        choice = Choice(idx_TK[:size], given)
        rows, _, metadata = dispatcher.plan(x, choice, weighed=weighed).parts.pop()(None)
        taken = dispatcher.row_weights(rows, metadata) if weighed else None
        if taken is not None:
            # Padding rows (-1) may take any weight.
            flat = torch.cat([taken.slot_weights.view(-1), taken.slot_weights.new_zeros(1)])
            rows = rows * flat[taken.slot_of_row, None].to(rows.dtype)
            metadata = replace(metadata, topk_weights=None)
        y_TD = dispatcher.combine(rows, metadata)
        if recorded:
            torch.autograd.grad(y_TD, [x, given], torch.ones_like(y_TD))

    found = [
        _medians([functools.partial(step, one, size) for _, one in made], group, device)
        for size in sizes
    ]
    lines = []
    for times in zip(*found, strict=True):
        if len(sizes) == 1:
            lines.append((0.0, times[0] / sizes[0]))
            continue
        slope = max(times[1] - times[0], 0.0) / (sizes[1] - sizes[0])
        lines.append((max(0.0, times[1] - sizes[1] * slope), slope))
    return tuple(lines)


def _medians(
    runs: list[Callable[[], object]], group: ProcessGroup, device: torch.device
) -> list[float]:
    """Seconds of each on the slowest rank, in turn: A B C A B C ...; what drifts hits all alike."""
    medians, times = [math.inf] * len(runs), [list[float]() for _ in runs]
    for turn in range(ROUNDS + 1):
        least = min(medians)
        running = [i for i, median in enumerate(medians) if turn < 3 or median <= BEHIND * least]
        spent = [seconds_of(runs[i], device) for i in running]
        for i, seconds in zip(running, max_over_ranks(spent, group, device), strict=True):
            # The first round warms up.
            if turn > 0:
                times[i].append(seconds)
                medians[i] = statistics.median(times[i])
    return medians
