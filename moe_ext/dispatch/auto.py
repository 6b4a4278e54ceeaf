"""Choice of a dispatcher by the time of a rehearsal of each, and the reason for it.

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
# Bytes of rows up to which messages cost only latency, so that a rehearsal is not worth its time.
SMALL_BYTES = 64 * 1024
# Most bytes of rows in a rehearsal. The time of more rows is extrapolated from two numbers of rows.
REHEARSED_BYTES = {"cpu": 2**23, "cuda": 2**26}
# Number of rounds of a rehearsal, whose median is the time of a candidate. A candidate whose median
# is above BEHIND times the least drops out of later rounds.
ROUNDS = 5
BEHIND = 1.5
# Least relative gain for which a candidate is preferred to a simpler one, since less may be noise.
# Replacing the dispatcher in use takes a larger gain.
LEAST_GAIN = 0.02
LEAST_GAIN_OF_A_CHANGE = 0.05
# The choice is first reconsidered before the training pass of this number, and then before those of
# 4, 16, ... times this number.
FIRST_LOOK_AGAIN = 16


def expected_ranks(num_experts: int, num_parts: int, top_k: int) -> float:
    """Return in how many of P equal parts of the experts a token has any, for even routing."""
    part = num_experts // num_parts
    none = math.comb(num_experts - part, top_k) / math.comb(num_experts, top_k)
    return num_parts * (1.0 - none)


def node_size_of(group: ProcessGroup) -> int:
    """Return the ranks per node in a group, by torchrun's LOCAL_WORLD_SIZE; 1 if nodes differ."""
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
    """Candidate for the dispatcher of a layer, with its expected bytes and time.

    Attributes:
        name: name of the dispatcher, as in `MoELayer`.
        sent_bytes: bytes of rows, indices and weights that leave a rank in a forward pass, out and
            back, for even routing. For "hierarchical" this includes bytes inside the node.
        node_bytes: the bytes among these that leave the node.
        seconds: time of the way out and back in the rehearsal, with the backward pass if gradients
            were recorded; None without a rehearsal.
    """

    name: str
    sent_bytes: float
    node_bytes: float
    seconds: float | None


@dataclass(frozen=True)
class DispatchChoice:
    """Dispatcher of a layer, and the reason for it. Its text is a table of the candidates.

    Attributes:
        name: name of the dispatcher, as in `MoELayer`; the name of the class for an object.
        reason: text of one line.
        candidates: all candidates, if there was a choice.
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


# Time of each candidate: seconds that do not depend on T, and seconds per token.
_Lines = tuple[tuple[float, float], ...]
_rehearsed: weakref.WeakKeyDictionary[ProcessGroup, dict[Hashable, _Lines]]
_rehearsed = weakref.WeakKeyDictionary()


class AutoDispatcher(TokenDispatcher):
    """Chooses the dispatcher of a `MoELayer` over a group, and reconsiders the choice later.

    At the first forward pass, all candidates in turn bring tokens with even routing to the experts
    and back, and their gradients if gradients are recorded. All ranks choose the candidate that
    takes least time for the tokens of the pass. Up to 64 KiB of rows cost only latency; for these
    the dispatcher with the fewest messages is chosen without a rehearsal. Layers of the same shape
    over the same group share the times. With `combine="exact"` all candidates give the same bits,
    so the choice affects only the time. The layer reconsiders before its training passes 16, 64,
    256, ..., with the routing of the pass before, and changes to a dispatcher that takes 5 % less.
    It does not reconsider if a change would be visible: with "reduced", with a wire, with moved
    experts, and if passes are recomputed.

    Args:
        num_experts: E, a multiple of the size of the group.
        group: process group.
        combine: "exact" or "reduced", see `DedupDispatcher`.
        wire: see `TokenDispatcher`. Some candidates round gradients before the multiplication by
            weights, others after it. The bits of gradients then depend on the choice, but those of
            outputs do not.

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
        # Experts of the tokens with which the next pass reconsiders the choice, or None.
        self.routed_TK: Tensor | None = None
        self._looks_again = combine == "exact" and self.wire == Wire()

    def is_due(self, used: TokenDispatcher, *, trains: bool) -> bool:
        """Return True if a pass that would use this dispatcher must call `choose` first."""
        if self.chosen is None:
            return True
        return trains and self.routed_TK is not None and self.chosen[0] is used

    def see(self, topk_idx: Tensor, *, may_change: bool) -> None:
        """Count a training pass, and keep its experts if the next pass reconsiders the choice.

        Args:
            topk_idx: `[T, K]`, as in the call of `plan`.
            may_change: False if this and all later passes must use the same dispatcher.
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
        """Return the dispatcher to use, and the reason. All ranks of the group call this together.

        The dispatcher in use remains unless another takes less time.

        Args:
            x: input of the layer, `[..., D]`; only its size is used, and nothing is checked here.
            top_k: K, number of experts per token.
            in_rounds: whether rows are sent in the rounds of a `RowBudget`.
            weighed: whether the experts multiply by the weights, which then travel to them.

        Raises:
            ValueError: on every rank, if the layers of the ranks differ.
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
        # A rank with a wrong input takes part as well, since the layer reports the error later.
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
            # "alltoall" and "allgather" take three messages, and other candidates take more.
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
        """Return the names of the candidates, from the simplest on."""
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
        """Return the seconds of each candidate on the slowest rank, for `num_tokens` tokens.

        Times for even routing are kept for other layers of the same shape.
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
    """Shape of a dispatch, which determines the expected numbers of bytes.

    `lossless_share` is the ratio of sent bytes to bytes for rows in the format "lossless"; None
    takes the ratio for normally distributed numbers.
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
        """Number of bytes of the K rows of a token."""
        return self.top_k * self.model_dim * self.dtype.itemsize

    def sent_bytes(self, name: str, combine: str, num_tokens: int) -> tuple[float, float]:
        """Return the bytes that leave a rank, and its node, out and back in a forward pass."""
        ranks, nodes = self.num_ranks, self.num_ranks // self.node_size
        # All `shards` ranks that share an expert get its rows.
        places = ranks // self.shards
        held = expected_ranks(self.num_experts, places, self.top_k) / places
        row, back = map(self._row_bytes, (self.wire.dispatch, self.wire.combine))
        # Bytes of the indices and weights of a token.
        beside = self.top_k * self.shards * (2.0 + sum_dtype(self.dtype).itemsize)
        rows_back = {"exact": self.top_k / places, "reduced": held}[combine]
        # Number of other ranks, and number of ranks on other nodes.
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
    """Return the times of the candidates as lines over the number of tokens, equal on all ranks.

    Tokens choose the experts `routed_TK` of a pass. Without these they choose at random.
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
            # Padding rows have slot -1, and so take the extra last weight.
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
    """Return the median seconds of each run on the slowest rank.

    Runs take turns (A B C A B C ...), so that a drift of the machine's speed affects all of them.
    """
    medians, times = [math.inf] * len(runs), [list[float]() for _ in runs]
    for turn in range(ROUNDS + 1):
        least = min(medians)
        running = [i for i, median in enumerate(medians) if turn < 3 or median <= BEHIND * least]
        spent = [seconds_of(runs[i], device) for i in running]
        for i, seconds in zip(running, max_over_ranks(spent, group, device), strict=True):
            # The first round is a warm-up, and does not count.
            if turn > 0:
                times[i].append(seconds)
                medians[i] = statistics.median(times[i])
    return medians
