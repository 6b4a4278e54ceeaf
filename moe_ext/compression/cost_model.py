r"""Chooses a codec for each bucket: dense, 16 bits, quantised or sparse.

A reduction takes

.. math:: T = \mathrm{bytes} / BW + \mathrm{rounds} \cdot \alpha + e E(n) + d D(n)

with latency :math:`\alpha` and bandwidth BW of the group, the times E and D of a `CostTable` to
encode and decode n elements on this device, and the numbers e and d of such passes. Compression
pays if the time saved on the wire exceeds the time to compute, which is far from always.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from moe_ext._checks import check_callable, check_kind, check_numbers, check_rule
from moe_ext.comm.groups import check_group, group_ranks, group_size, resolve_group
from moe_ext.comm.link import Link, link_of, max_over_ranks
from moe_ext.comm.rates import SIZES, CodecRate, CostTable, known_codec
from moe_ext.compression.codecs import Codec, MemoryFactory, codec_of, rate_name, rehearsal_of
from moe_ext.compression.explain import aligned_table

if TYPE_CHECKING:
    from moe_ext.compression.buckets import Bucket

# A bucket of fewer bytes in float32 is sent uncompressed, because its time is all latency.
SMALL_BUCKET_BYTES = 64 * 1024
# Least relative gain for which another codec replaces the one in use (at first dense and exact).
HYSTERESIS = 0.10
# Largest relative slowdown over plain all-reduce that a codec may show before it is dropped.
ALLOWED_BEHIND = 0.03
# Least share of the time that a rounding codec in use must save to be kept. A smaller saving may be
# noise, and rounding costs accuracy.
LEAST_SAVING = 0.03
# Plain all-reduce is not measured if the chosen codec takes less than this share of the estimate
# for plain all-reduce: before its first measurement, and after it. Even the first estimate is
# trusted that far, because the link was measured by (smaller) all-reduces.
CLEAR_SHARE, CLEAR_SHARE_AGAIN = 1 / 3, 0.5
# Turns of a comparison with plain all-reduce. Only after as many turns may a codec count as slower
# than predicted. The first turn warms up, and two of the other five may be disturbed.
TRIAL_TURNS = 6
# Turns after which a comparison ends early if plain all-reduce takes twice the time, both measured
# and predicted.
CLEAR_TURNS = 2
# Number of measured times of which the median is taken.
REMEMBERED = 5
# A plain codec that has been compared is measured again for one turn, at the earliest after
# `LEAST_INTERVAL` turns, and so rarely that it costs at most `TRIAL_SHARE` of the total time.
LEAST_INTERVAL, TRIAL_SHARE = 16, 0.005
# Turns between timings of a well-known plain codec. Without a timing, ranks need no message to
# agree on the time.
TIMED_EVERY = 32
# A shorter time means that the clock was not read; no message is so fast.
LEAST_SECONDS = 1e-6
TRIAL = "measured, to compare with"


@dataclass
class _Measured:
    """Measured times of one codec for one bucket, on the slowest rank."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    least: float = math.inf
    count: int = 0
    turn: int = 0

    def add(self, seconds: float, turn: int) -> None:
        """Add a time. The second one replaces the first, which was slowed by new memory."""
        if self.count == 1:
            self.seconds.clear()
        self.seconds.append(seconds)
        self.least = min(self.least, seconds)
        self.count += 1
        self.turn = turn

    @property
    def median(self) -> float:
        """Median of the last few times."""
        return statistics.median(self.seconds)


@dataclass
class BucketState:
    """Codecs, choice and measurements of one bucket; equal on all ranks."""

    numel: int = 0
    codecs: tuple[Codec, ...] = ()
    turn: int = 0
    current: Codec | None = None
    chosen: Codec | None = None
    reason: str = ""
    measured: dict[Codec, _Measured] = field(default_factory=dict)
    trial_turn: dict[Codec, int] = field(default_factory=dict)


class CostModel:
    """Chooses a codec for every bucket from measurements of the link and the device.

    Every choice follows from numbers that all ranks have agreed on, so all ranks choose alike. A
    method marked *collective* must be called by all ranks of the group in the same order.

    Args:
        group: process group of P ranks; None is the default group, or this process alone.
        device: device of the buckets.
        link: bandwidths and latency of the network; if None, `probe` measures them.
        num_ranks: P, to ask for the choice on a group of another size; needs ``link``. Ranks then
            exchange nothing.
        agreed_over: ranks that must choose alike, if they are more than the ranks of ``group``.
            Each of them has such a group of its own. None for the ranks of ``group``.
        memory_of: makes the memory for ``codec.rehearsal`` from codec and gradient; None for
            ``codec.new_memory(grad)``.
        costs: rates of codecs; missing rates are measured, once in the life of the process.

    Raises:
        TypeError: ``group`` is not a process group of this rank, or an argument has the wrong type.
        ValueError: ``num_ranks`` is given without ``link``.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        link: Link | None = None,
        num_ranks: int | None = None,
        agreed_over: ProcessGroup | None = None,
        memory_of: MemoryFactory | None = None,
        costs: CostTable | None = None,
    ) -> None:
        check_numbers("CostModel", CostModel.__init__.__annotations__, locals(), ["num_ranks"])
        check_kind("CostModel", "link", link, Link)
        check_group(agreed_over, "CostModel", name="agreed_over")
        check_callable("CostModel", "memory_of", memory_of)
        check_kind("CostModel", "costs", costs, CostTable)
        fits = num_ranks is None or link is not None
        check_rule("CostModel", "link", link, "given with num_ranks", fits)
        self.device = torch.device(device)
        self.link = link
        self._group = resolve_group(group, "CostModel")
        self._agreed_over = agreed_over or self._group
        self._alone = num_ranks is not None
        self.num_ranks = group_size(self._group) if num_ranks is None else num_ranks
        self._memory_of = memory_of
        self._given = costs or CostTable.of_process(self.device)
        # Rates that all ranks have agreed on.
        self.costs = replace(self._given, codecs={})
        self.buckets: dict[Hashable, BucketState] = {}
        self._observed: list[tuple[Hashable, Codec, float]] = []
        self._scales: dict[Codec, dict[Hashable, float]] = {}
        self._corrections: dict[Codec, float] = {}

    def _agreed(self, seconds: list[float]) -> list[float]:
        """Return the largest seconds over the ranks, element by element; *collective*."""
        if self._alone or self.num_ranks == 1 or not seconds:
            return seconds
        assert self._agreed_over is not None
        return max_over_ranks(seconds, self._agreed_over, self.device)

    def probe(self, *, again: bool = False) -> Link | None:
        """Measure the link with a dozen messages of two sizes, at the first call; *collective*.

        Args:
            again: measure again, because the link has changed.

        Returns:
            Link: agreed over the ranks and kept for the group; None for P = 1.

        Raises:
            RankFailureError: a rank died or did not answer.
        """
        if self.num_ranks == 1 or (self.link is not None and not again) or self._alone:
            return self.link
        assert self._group is not None
        link = link_of(self._group, self.device, again=again)
        if self._agreed_over is not self._group:
            costs = [link.latency, 1 / link.exchange_bandwidth, 1 / link.reduce_bandwidth]
            latency, exchange, reduce = self._agreed(costs)
            link = Link(latency, 1 / exchange, 1 / reduce)
        self.link = link
        return self.link

    def prepare(self, codecs: Sequence[Codec]) -> None:
        """Look up the rates of codecs that are new to this model, or measure them; *collective*.

        Rates that the table lacks are measured on a million elements, at the first call in the life
        of the process. `choose` calls this for its codecs.
        """
        new = [codec for codec in dict.fromkeys(codecs) if not self._has(codec)]
        if not new or self.num_ranks == 1:
            return
        local: list[float] = []
        for codec in new:
            table, name = self._given, rate_name(codec)
            if name not in table.codecs:
                rehearsal = rehearsal_of(codec, self.device, self._memory_of)
                rates = known_codec(name, rehearsal, self.device)
                table = replace(table, codecs={name: rates})
            for numel in SIZES:
                local += table.codec_seconds(name, numel)
        agreed = iter(self._agreed(local))
        found = dict(self.costs.codecs)
        for codec in new:
            found[rate_name(codec)] = tuple(
                CodecRate(n, 4 * n, codec.sent_bytes(n, 2), next(agreed), next(agreed))
                for n in SIZES
            )
        self.costs = replace(self.costs, codecs=found)

    def _has(self, codec: Codec) -> bool:
        return rate_name(codec) in self.costs.codecs

    def knows(self, codecs: Sequence[Codec]) -> bool:
        """Return True if link and codecs have been measured, so that `predict` works."""
        return self.link is not None and all(map(self._has, codecs))

    def compute_seconds(self, codec: Codec, numel: int) -> float:
        """Return the seconds to encode and decode; after `prepare`."""
        encodes, decodes = codec.passes(self.num_ranks)
        encode, decode = self.costs.codec_seconds(rate_name(codec), numel)
        return encodes * encode + decodes * decode

    def wire_seconds(self, codec: Codec, numel: int) -> float:
        """Return the seconds on the wire; after `probe`."""
        assert self.link is not None
        plain = codec.plain
        bandwidth = self.link.reduce_bandwidth if plain else self.link.exchange_bandwidth
        sent = codec.sent_bytes(numel, self.num_ranks)
        return sent / bandwidth + codec.num_rounds(self.num_ranks) * self.link.latency

    def predict(self, codec: Codec, numel: int) -> float:
        """Return the seconds of one reduction by the formula; after `probe` and `prepare`."""
        return self.wire_seconds(codec, numel) + self.compute_seconds(codec, numel)

    def estimate(self, codec: Codec, bucket: Hashable) -> float:
        """Return the seconds measured for the bucket, or predicted and corrected by other buckets.

        A codec that is not plain counts with the least of its times and the prediction until six
        times were measured.
        """
        state = self.buckets[bucket]
        known = state.measured.get(codec)
        # A codec that was dropped is not measured again, so it may be dropped only after as many
        # measurements as a trial has. The prediction is not corrected by other buckets here,
        # because the same turns may have been disturbed in them.
        if known and not codec.plain and known.count < TRIAL_TURNS and self.knows([codec]):
            return min(known.least, self.predict(codec, state.numel))
        if known:
            return known.median
        if codec in self._scales and codec not in self._corrections:
            self._corrections[codec] = statistics.median(self._scales[codec].values())
        return self.predict(codec, state.numel) * self._corrections.get(codec, 1.0)

    def break_even(self, codec: Codec, against: Codec, numel: int) -> float:
        r"""Return the bandwidth above which a codec is slower than another; after `prepare`.

        .. math:: BW^* = \frac{\mathrm{bytes}_a - \mathrm{bytes}_c}{t_c - t_a}

        Args:
            codec: c, the codec that computes more.
            against: a, usually dense.
            numel: elements of the bucket.

        Returns:
            float: bytes per second; infinite if c does not compute more than a, and 0 if c does not
            send less than a.
        """
        saved = against.sent_bytes(numel, self.num_ranks) - codec.sent_bytes(numel, self.num_ranks)
        more = self.compute_seconds(codec, numel) - self.compute_seconds(against, numel)
        if saved <= 0:
            return 0.0
        return float("inf") if more <= 0 else saved / more

    def choose(
        self,
        numel: int,
        codecs: Sequence[str | Codec],
        *,
        bucket: Hashable,
        current: Codec | None = None,
    ) -> Codec:
        """Choose the codec for the next reduction of a bucket; *collective* if codecs are new.

        With P = 1 and for buckets below 64 KiB the choice is dense. Codecs that send no fewer bytes
        than the dense bucket are left out. Otherwise the least estimate wins if it is 10 % below
        that of the codec in use, which at first is the exact one. If the choice is not clear, plain
        all-reduce is measured for six turns, or for two that make it clear, and from time to time
        again. A codec that is more than 3 % slower in six turns is dropped. A codec that rounds and
        saves less than 3 % of the time is dropped, too.

        Args:
            numel: elements of the bucket.
            codecs: candidates or their names, in the same order on all ranks. At least one must be
                plain (dense in float32 or 16 bits); the first plain one is the dense choice.
            bucket: key of the bucket's measurements, such as a name or a number.
            current: the codec in use; None for the last choice.

        Returns:
            Codec: one of ``codecs``.

        Raises:
            ValueError: ``codecs`` has no plain codec, or a name is unknown.
            RankFailureError: a rank died or did not answer.
        """
        made = tuple(
            dict.fromkeys(
                codec_of(codec, owner="CostModel.choose") if isinstance(codec, str) else codec
                for codec in codecs
            )
        )
        plain = [codec for codec in made if codec.plain]
        if not plain:
            raise ValueError(
                "CostModel.choose: expected codecs to hold a dense one to fall back to, got "
                f"{[codec.name for codec in made]}"
            )
        state = self.buckets.setdefault(bucket, BucketState())
        if state.numel != numel:
            state.measured.clear()
            state.trial_turn.clear()
        state.numel, state.codecs, state.turn = numel, made, state.turn + 1
        state.current = state.current if current is None else current
        chosen, state.reason = self._rule(numel, plain[0])
        if chosen is None:
            self.probe()
            self.prepare(state.codecs)
            # Codecs that send no fewer bytes than the dense bucket are left out.
            dense = max(codec.sent_bytes(numel, self.num_ranks) for codec in plain)
            seconds = {
                codec: self.estimate(codec, bucket)
                for codec in made
                if codec.plain or codec.sent_bytes(numel, self.num_ranks) < dense
            }
            chosen, state.reason = self._least(state, plain, seconds)
            # `current` is not the codec of a trial, so that the choice continues after the trial.
            state.current = chosen
            trial = self._trial(state, plain, seconds, chosen)
            if trial is not None:
                chosen, state.reason = trial, TRIAL
        state.chosen = chosen
        return chosen

    def _rule(self, numel: int, plain: Codec) -> tuple[Codec | None, str]:
        if self.num_ranks == 1:
            return plain, "one rank"
        if 4 * numel < SMALL_BUCKET_BYTES:
            return plain, "below 64 KiB"
        return None, ""

    def _least(
        self, state: BucketState, plain: list[Codec], seconds: dict[Codec, float]
    ) -> tuple[Codec, str]:
        """Return the codec with the least estimate, or the one in use if that is about as good."""
        best = min(seconds, key=lambda codec: seconds[codec])
        baseline = min(plain, key=lambda codec: seconds[codec])
        exact = next((codec for codec in plain if not codec.lossy), plain[0])
        current = state.current if state.current in seconds else exact
        assert current is not None
        saves = seconds[current] <= (1 - LEAST_SAVING) * seconds[exact]
        hardly = current.lossy and not exact.lossy and not saves
        if best == current and not hardly:
            return best, self._why(best, baseline, seconds)
        if seconds[best] < (1 - HYSTERESIS) * seconds[current]:
            return best, self._why(best, baseline, seconds)
        if hardly:
            return exact, f"exact, and {current.name} is hardly faster"
        if seconds[current] > (1 + ALLOWED_BEHIND) * seconds[baseline]:
            return baseline, f"{current.name} was behind {baseline.name}"
        return current, f"in use, and {best.name} is less than 10 % better"

    def _why(self, best: Codec, baseline: Codec, seconds: dict[Codec, float]) -> str:
        if best.plain:
            return "least; nothing compressed is faster"
        return f"least; {seconds[baseline] / seconds[best]:.1f} x faster than {baseline.name}"

    def _trial(
        self,
        state: BucketState,
        plain: list[Codec],
        seconds: dict[Codec, float],
        chosen: Codec,
    ) -> Codec | None:
        """Return a plain codec to measure in this turn instead of the chosen one, or None."""
        for codec in plain:
            known = state.measured.get(codec)
            share = seconds[chosen] / seconds[codec]
            interval = max(LEAST_INTERVAL, (1 / share - 1) / TRIAL_SHARE)
            since = state.turn - state.trial_turn.get(codec, -math.inf)
            # A trial goes on for several turns, because one or two may be disturbed. The limit on
            # turns ends a trial whose times the caller never records.
            begun = known is not None and known.count < TRIAL_TURNS and since < 4 * TRIAL_TURNS
            if known is not None and begun and known.count >= CLEAR_TURNS:
                # A disturbance makes a turn longer, so the least of two times is reliable.
                predicted = self.predict(chosen, state.numel) / self.predict(codec, state.numel)
                begun = max(seconds[chosen] / known.least, predicted) > CLEAR_SHARE_AGAIN
            clear = CLEAR_SHARE_AGAIN if known else CLEAR_SHARE
            if codec == chosen or (not begun and share <= clear):
                continue
            if known and known.count >= TRIAL_TURNS and state.turn - known.turn < interval:
                continue
            if since >= interval:
                state.trial_turn[codec], since = state.turn, 0
            if begun or since < TRIAL_TURNS:
                return codec
        return None

    def is_timed(self, bucket: Hashable) -> bool:
        """Return True if the chosen codec should be timed in this turn; equal on all ranks.

        A plain codec in use is timed only every `TIMED_EVERY` turns once its time is known.
        """
        state = self.buckets.get(bucket)
        if (
            state is None
            or state.chosen is None
            or self._rule(state.numel, state.chosen)[0] is not None
        ):
            return False
        known = state.measured.get(state.chosen)
        if not state.chosen.plain or known is None or known.count < TRIAL_TURNS:
            return True
        return state.reason == TRIAL or state.turn - known.turn >= TIMED_EVERY

    def record(self, bucket: Hashable, codec: Codec, seconds: float) -> None:
        """Record the time of a reduction, which must be the same number on all ranks.

        The time corrects the estimates of this bucket, and those of the codec in other buckets.

        Args:
            bucket: as in `choose`.
            codec: the codec that was used.
            seconds: time from start to end of the reduction, on the slowest rank.
        """
        state = self.buckets.get(bucket)
        if state is None or not seconds >= LEAST_SECONDS:
            return
        state.measured.setdefault(codec, _Measured()).add(seconds, state.turn)
        if self.knows([codec]):
            ratio = state.measured[codec].median / self.predict(codec, state.numel)
            self._scales.setdefault(codec, {})[bucket] = ratio
            self._corrections.pop(codec, None)

    def observe(self, bucket: Hashable, codec: Codec, seconds: float) -> None:
        """Keep the time of a reduction on this rank until `settle`."""
        self._observed.append((bucket, codec, seconds))

    def pending(self) -> list[float]:
        """Return the seconds observed on this rank since `settle`, for a message of the caller."""
        return [seconds for _, _, seconds in self._observed]

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Record the times observed since the last call; *collective* without ``agreed``.

        All ranks must have observed the same reductions in the same order.

        Args:
            agreed: element-wise maximum over the ranks of the results of `pending`; None to compute
                it with one small all-reduce.

        Raises:
            ValueError: ``agreed`` is not as long as `pending`.
            RankFailureError: a rank died or did not answer.
        """
        local = self.pending()
        numbers = self._agreed(local) if agreed is None else list(agreed)
        rule, count = f"{len(local)} long", len(numbers)
        check_rule("CostModel.settle", "agreed", count, rule, count == len(local))
        for (bucket, codec, _), seconds in zip(self._observed, numbers, strict=True):
            self.record(bucket, codec, seconds)
        self._observed.clear()

    def explain(self) -> str:
        """Make a table of the choice for each bucket and its reason.

        Returns:
            str: a line about the link, a table with the milliseconds of every codec (`estimate`,
            with a star if measured), and the bandwidth up to which each codec pays.
        """
        codecs = list(dict.fromkeys(c for state in self.buckets.values() for c in state.codecs))
        # Codecs of one class with different options share a name. Their heads are then the repr.
        names = [codec.name for codec in codecs]
        heads = [n if names.count(n) == 1 else repr(c) for n, c in zip(names, codecs, strict=True)]
        rows = [["bucket", "elements", *(f"{head} ms" for head in heads), "choice", "why"]]
        for bucket, state in self.buckets.items():
            row = [str(bucket), str(state.numel)]
            for codec in codecs:
                known = state.measured.get(codec)
                if codec not in state.codecs or not (known or self.knows([codec])):
                    row.append("-")
                    continue
                seconds = self.estimate(codec, bucket)
                is_measured = known and seconds in (known.least, known.median)
                row.append(f"{1e3 * seconds:.3f}{'*' if is_measured else ''}")
            chosen = "-" if state.chosen is None else heads[codecs.index(state.chosen)]
            rows.append([*row, chosen, state.reason])
        return "\n".join([_about(self), *aligned_table(rows), *_break_even(self)])


def _gigabits(bytes_per_second: float) -> str:
    return f"{8e-9 * bytes_per_second:.3g} Gbit/s"


def _about(model: CostModel) -> str:
    ranks = f"{model.num_ranks} rank{'s' if model.num_ranks > 1 else ''} on {model.device}"
    if model.link is None:
        return f"{ranks}, link not measured"
    return (
        f"{ranks}, latency {1e6 * model.link.latency:.0f} us, all-to-all "
        f"{_gigabits(model.link.exchange_bandwidth)}, all-reduce "
        f"{_gigabits(model.link.reduce_bandwidth)}"
    )


def _break_even(model: CostModel) -> list[str]:
    """For the largest known bucket, compare every codec with the plain one that sends least."""
    buckets = [state for state in model.buckets.values() if model.knows(state.codecs)]
    if not buckets:
        return []
    largest = max(buckets, key=lambda state: state.numel)
    plain = [codec for codec in largest.codecs if codec.plain]
    least = min(plain, key=lambda codec: codec.sent_bytes(largest.numel, model.num_ranks))
    lines = []
    for codec in largest.codecs:
        if codec in plain:
            continue
        limit = model.break_even(codec, least, largest.numel)
        pays = {0.0: "never", float("inf"): "at any bandwidth"}
        text = pays.get(limit, f"below {_gigabits(limit)}")
        lines.append(f"{codec.name} pays {text} ({largest.numel} elements, beside {least.name})")
    return lines


class CostModels:
    """One cost model for each group of ranks that reduce together.

    A cost model is made at the first bucket of its group, which all ranks of the group reach
    together. Every rank comes to its groups in the order of the layers, so no two ranks wait for
    each other in different groups.

    Args:
        given: cost model for the ranks of the state; with nodes, its link is the link between
            nodes.

    Attributes:
        common: cost model for the ranks of the state.
    """

    def __init__(self, given: CostModel | None) -> None:
        self.common = given
        # Number of ranks of a node; `common` describes the link between such nodes.
        self._node_size = 1
        self._others: dict[ProcessGroup, CostModel] = {}

    def of(self, bucket: Bucket, common: ProcessGroup | None, device: torch.device) -> CostModel:
        """Return the cost model of the ranks that reduce a bucket; make it if there is none.

        With nodes, it measures the link between nodes, and all ranks of the bucket agree on it.

        Args:
            bucket: the bucket.
            common: the ranks of the state.
            device: device of the bucket.
        """
        make = functools.partial(
            CostModel,
            bucket.exchange_group,
            device=device,
            agreed_over=bucket.group if bucket.node_size > 1 else None,
        )
        if bucket.group is not None and bucket.group is not common:
            if bucket.group not in self._others:
                self._others[bucket.group] = make()
            return self._others[bucket.group]
        if self.common is None or bucket.node_size != self._node_size:
            self.common = make(link=None if self.common is None else self.common.link)
            self._node_size = bucket.node_size
        return self.common

    def known(self, bucket: Bucket, common: ProcessGroup | None) -> CostModel | None:
        """Return the cost model of the ranks that reduce a bucket; None if there is none yet."""
        if bucket.group is not None and bucket.group is not common:
            return self._others.get(bucket.group)
        return self.common

    def explain(self) -> str:
        """Return the tables of all cost models; a line above names nodes or ranks of a group."""
        where = f"between nodes of {self._node_size} ranks:\n" if self._node_size > 1 else ""
        tables = [] if self.common is None else [where + self.common.explain()]
        for group, model in self._others.items():
            ranks = ", ".join(map(str, group_ranks(group)))
            tables.append(f"ranks {ranks}, which hold the same experts:\n{model.explain()}")
        return "\n\n".join(tables)
