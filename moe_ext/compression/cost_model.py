r"""Picks what to send for each bucket: dense, 16 bits, quantised or sparse.

A reduction takes

.. math:: T = \mathrm{bytes} / BW + \mathrm{rounds} \cdot \alpha + e E(n) + d D(n)

with the latency and bandwidth of the group, the times E and D of a `CostTable` to encode and to
decode n elements on this device, and how often a rank does either. Compression pays where it saves
more on the wire than it computes, which is far from always.
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

# A bucket of fewer bytes in float32 is sent as it is: all it costs is latency.
SMALL_BUCKET_BYTES = 64 * 1024
# Another codec must be this much better than the one in use, which at first is dense and exact.
HYSTERESIS = 0.10
# Share of plain all-reduce's time by which a codec may be slower before it is given up.
ALLOWED_BEHIND = 0.03
# Share of the time that rounding, once in use, must save: less may be noise, and costs accuracy.
LEAST_SAVING = 0.03
# Plain all-reduce is not measured where the chosen codec takes less than these shares of what it is
# taken to need: the first time, and again. The link was measured by all-reduces, if smaller ones.
CLEAR_SHARE, CLEAR_SHARE_AGAIN = 1 / 3, 0.5
# Turns that a comparison with plain all-reduce takes, and before which no other codec is taken to
# be slower than predicted: the first of them warms up, and of five two may be disturbed.
TRIAL_TURNS = 6
# Turns after which it ends where plain all-reduce takes twice the time, by the formula too.
CLEAR_TURNS = 2
REMEMBERED = 5
# A codec that has been compared is measured for one turn again after at least so many turns: as
# many as make the time lost in that turn this share of the whole.
LEAST_INTERVAL, TRIAL_SHARE = 16, 0.005
# A plain codec that is known well is timed now and then: when its time is not asked for, ranks need
# no message to agree on it.
TIMED_EVERY = 32
# A shorter time is that of a clock that was not read, not that of a message.
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
        """The first one counts until there is another: it touches new memory."""
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
    """A bucket: its codecs, the choice and the measurements; equal on all ranks."""

    numel: int = 0
    codecs: tuple[Codec, ...] = ()
    turn: int = 0
    current: Codec | None = None
    chosen: Codec | None = None
    reason: str = ""
    measured: dict[Codec, _Measured] = field(default_factory=dict)
    trial_turn: dict[Codec, int] = field(default_factory=dict)


class CostModel:
    """Chooses a codec for every bucket from what link and device were measured to do.

    Every choice follows from numbers that all ranks agreed on, so that all choose alike; each
    method marked *collective* is called by all ranks of the group in the same order.

    Args:
        group: process group of P ranks; None is the default group, or this process alone.
        device: where buckets are.
        link: what is known of the network; measured by `probe` where it is None.
        num_ranks: P, for the question what would be chosen on another group than this one; with
            ``link``. Nothing is agreed then.
        agreed_over: ranks that choose alike, if they are more than those of ``group``: every one of
            them has a group of this kind. None for those of ``group``.
        memory_of: makes the memory that ``codec.rehearsal`` takes, from codec and gradient; None
            for ``codec.new_memory(grad)``.
        costs: rates of codecs; those that it lacks are measured, once in the life of the process.

    Raises:
        TypeError: ``group`` is not a process group that this rank belongs to, or an argument is of
            another type.
        ValueError: ``num_ranks`` without ``link``.
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
        # As all ranks agreed.
        self.costs = replace(self._given, codecs={})
        self.buckets: dict[Hashable, BucketState] = {}
        self._observed: list[tuple[Hashable, Codec, float]] = []
        self._scales: dict[Codec, dict[Hashable, float]] = {}
        self._corrections: dict[Codec, float] = {}

    def _agreed(self, seconds: list[float]) -> list[float]:
        """The slowest rank's; collective."""
        if self._alone or self.num_ranks == 1 or not seconds:
            return seconds
        assert self._agreed_over is not None
        return max_over_ranks(seconds, self._agreed_over, self.device)

    def probe(self, *, again: bool = False) -> Link | None:
        """Measures the group with a dozen messages of two sizes, at the first call; *collective*.

        Args:
            again: measure even if it has been, since the link has changed.

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
        """Looks the codecs up that are new to this model, or times them; *collective*.

        Rates that the table lacks are rehearsed on a million elements, at the first call in the
        life of the process. `choose` calls it for what it is given.
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
        """True if link and codecs have been measured, so that `predict` works."""
        return self.link is not None and all(map(self._has, codecs))

    def compute_seconds(self, codec: Codec, numel: int) -> float:
        """To encode and decode; after `prepare`."""
        encodes, decodes = codec.passes(self.num_ranks)
        encode, decode = self.costs.codec_seconds(rate_name(codec), numel)
        return encodes * encode + decodes * decode

    def wire_seconds(self, codec: Codec, numel: int) -> float:
        """On the wire; after `probe`."""
        assert self.link is not None
        plain = codec.plain
        bandwidth = self.link.reduce_bandwidth if plain else self.link.exchange_bandwidth
        sent = codec.sent_bytes(numel, self.num_ranks)
        return sent / bandwidth + codec.num_rounds(self.num_ranks) * self.link.latency

    def predict(self, codec: Codec, numel: int) -> float:
        """Seconds of one reduction by the formula; after `probe` and `prepare`."""
        return self.wire_seconds(codec, numel) + self.compute_seconds(codec, numel)

    def estimate(self, codec: Codec, bucket: Hashable) -> float:
        """Seconds as measured for the bucket, or as predicted and corrected by other buckets.

        A codec that is not plain counts with the least of its times and of the prediction until six
        were measured.
        """
        state = self.buckets[bucket]
        known = state.measured.get(codec)
        # A codec that was given up is not measured again: before, it is measured as often as in a
        # trial. By the formula alone, since the same turns were disturbed in other buckets.
        if known and not codec.plain and known.count < TRIAL_TURNS and self.knows([codec]):
            return min(known.least, self.predict(codec, state.numel))
        if known:
            return known.median
        if codec in self._scales and codec not in self._corrections:
            self._corrections[codec] = statistics.median(self._scales[codec].values())
        return self.predict(codec, state.numel) * self._corrections.get(codec, 1.0)

    def break_even(self, codec: Codec, against: Codec, numel: int) -> float:
        r"""Bandwidth above which a codec is slower than another one; after `prepare`.

        .. math:: BW^* = \frac{\mathrm{bytes}_a - \mathrm{bytes}_c}{t_c - t_a}

        Args:
            codec: c, the one that computes more.
            against: a, as a rule dense.
            numel: elements of the bucket.

        Returns:
            float: bytes a second; infinite where the codec computes no more than the other, 0 where
            it sends no less.
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
        """The codec for the next reduction of a bucket; *collective* where codecs are new.

        P = 1 and buckets below 64 KiB stay dense, and so does what would send more bytes than the
        dense bucket. Otherwise the least estimate wins, where it is 10 % below that of the codec in
        use, which at first is the exact one. Where the choice is not clear, plain all-reduce is
        measured for six turns, or for two that make it clear, and now and then again. A codec that
        is more than 3 % behind it in six turns is given up. A codec that rounds, and saves less
        than 3 % of the time, is given up too.

        Args:
            numel: elements of the bucket.
            codecs: to choose from, or their names, the same in the same order on all ranks; the
                first plain one (dense in float32 or 16 bits), of which there must be one, is taken
                where a rule says dense.
            bucket: what to remember measurements by, as a name or a number.
            current: the codec in use; None for the one chosen last.

        Returns:
            Codec: one of ``codecs``.

        Raises:
            ValueError: no plain codec in ``codecs``, or an unknown name.
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
            # Compressed forms that send no less than the dense bucket are left out.
            dense = max(codec.sent_bytes(numel, self.num_ranks) for codec in plain)
            seconds = {
                codec: self.estimate(codec, bucket)
                for codec in made
                if codec.plain or codec.sent_bytes(numel, self.num_ranks) < dense
            }
            chosen, state.reason = self._least(state, plain, seconds)
            state.current = chosen  # what a trial interrupts goes on after it
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
        """The least estimate, unless what is in use is as good."""
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
        """A plain codec that should be measured beside the chosen one, if there is one."""
        for codec in plain:
            known = state.measured.get(codec)
            share = seconds[chosen] / seconds[codec]
            interval = max(LEAST_INTERVAL, (1 / share - 1) / TRIAL_SHARE)
            since = state.turn - state.trial_turn.get(codec, -math.inf)
            # The result of a turn or two may be a disturbance. By turns too, not by measurements
            # alone: where nobody measures, a trial must end.
            begun = known is not None and known.count < TRIAL_TURNS and since < 4 * TRIAL_TURNS
            if known is not None and begun and known.count >= CLEAR_TURNS:
                # A disturbed turn is longer: the least of two is not far off.
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
        """True if the time of the chosen codec should be measured in this turn, on all ranks alike.

        Of a plain codec in use only now and then, once it is known.
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
        """Takes in what a reduction took; the number must be the same on all ranks.

        It corrects the estimates of this bucket, and those of the codec in other buckets.

        Args:
            bucket: as in `choose`.
            codec: what was used.
            seconds: from its start to its end, on the slowest rank.
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
        """Keeps what a reduction took on this rank until `settle`, or until `pending` is sent."""
        self._observed.append((bucket, codec, seconds))

    def pending(self) -> list[float]:
        """Seconds observed on this rank since the last `settle`, for a message of the caller's."""
        return [seconds for _, _, seconds in self._observed]

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Records what was observed since the last call; *collective* without ``agreed``.

        All ranks have observed the same reductions in the same order.

        Args:
            agreed: the largest over the ranks of what `pending` returned, element by element; None
                to find them with one small all-reduce.

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
        """A table of the choice for each bucket and its reason.

        Returns:
            str: a line about the link, a table with the milliseconds of every codec (`estimate`,
            with a star where measured), and the bandwidth up to which each codec pays.
        """
        codecs = list(dict.fromkeys(c for state in self.buckets.values() for c in state.codecs))
        # Codecs of one kind with other options would share a name.
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
    """A line for every codec, beside the leanest plain one, for the largest bucket timed."""
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

    It is made at the first bucket of the group, which its ranks reach together: ranks of different
    groups come to their groups in the order of the layers, which is one for all, so that no two
    wait for each other in two groups.

    Args:
        given: the one for the ranks of the state; where these lie on nodes, its link is taken as
            that between nodes.

    Attributes:
        common: the one for the ranks of the state.
    """

    def __init__(self, given: CostModel | None) -> None:
        self.common = given
        # Ranks of a node that `common` looks upon as one.
        self._node_size = 1
        self._others: dict[ProcessGroup, CostModel] = {}

    def of(self, bucket: Bucket, common: ProcessGroup | None, device: torch.device) -> CostModel:
        """The cost model of the ranks that reduce a bucket.

        With nodes it measures what is between them; all ranks agree on what these have found.

        Args:
            bucket: its ranks.
            common: the ranks of the state.
            device: of the bucket.
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
        """As `of`, without making one."""
        if bucket.group is not None and bucket.group is not common:
            return self._others.get(bucket.group)
        return self.common

    def explain(self) -> str:
        """The tables, those of some of the ranks under a line that names them."""
        where = f"between nodes of {self._node_size} ranks:\n" if self._node_size > 1 else ""
        tables = [] if self.common is None else [where + self.common.explain()]
        for group, model in self._others.items():
            ranks = ", ".join(map(str, group_ranks(group)))
            tables.append(f"ranks {ranks}, which hold the same experts:\n{model.explain()}")
        return "\n\n".join(tables)
