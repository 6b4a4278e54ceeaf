"""One step of a compressed reduction: all of its messages, and the fate of its residuals.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import group_size
from moe_ext.comm.pending import Pending
from moe_ext.compression.buckets import Bucket, Buckets, Part
from moe_ext.compression.codecs import Codec, Dense
from moe_ext.compression.collectives.exact import row_sparse_all_reduce
from moe_ext.compression.cost_model import CostModel, CostModels
from moe_ext.compression.feedback import unit_factors
from moe_ext.compression.norms import (
    infinite_as_half,
    norms_of,
    not_finite,
    note_overflow,
    presence_of,
)
from moe_ext.compression.options import Options, Progress
from moe_ext.compression.report import StepOutcome, StepReport, exchange_reports

# If the shares of non-zero blocks, summed over ranks, exceed this, all blocks are sent for a while.
_MOSTLY_FULL = 0.75
# Number of steps for which all blocks are then sent.
_DENSE_STEPS = 16
# Two numbers of smaller magnitude have a finite sum in float32.
_LARGE = 1e30


@dataclass
class PartInStep:
    """A part whose reduction has begun.

    Attributes:
        codec: codec of this step.
        chooser: the cost model that has chosen the codec, or None.
        is_timed: the cost model asks for the time from `began` to `ended`.
        prepared: NaN and infinity were removed from the gradient before it was encoded.
        shows_nonfinite: NaN or infinity on any rank shows in the first element of the result.
        filled: share of the blocks that may be non-zero on this rank.
        square: squared norm of the encoded shard of a node's sum; None without nodes.
        scale: factor from `sent` to the mean or sum over all ranks.
        reduction: handle of the codec's reduction.
        sent: result of the codec.
        result: result for the part, computed from `sent`.
    """

    part: Part
    codec: Codec
    chooser: CostModel | None = None
    is_timed: bool = False
    prepared: bool = False
    shows_nonfinite: bool = False
    filled: float = 0.0
    square: Tensor | None = None
    scale: float = 1.0
    reduction: Pending[Tensor] | None = None
    sent: Tensor | None = None
    result: Tensor | None = None
    began: float = 0.0
    ended: float = 0.0

    def note_end(self) -> None:
        """Note the end of the reduction, which may come long before anyone waits for it."""

        def note(_: object) -> None:
            self.ended = time.perf_counter()

        assert self.reduction is not None
        self.reduction.get_future().then(note)

    def end(self) -> Tensor:
        """Wait for the result of the codec and return it."""
        assert self.reduction is not None
        self.sent = self.reduction.wait()
        if self.ended == 0.0:
            # The callback of `note_end` may run only after `wait` has returned.
            self.ended = time.perf_counter()
        return self.sent

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds that the reduction took; 0 if it is not timed.

        The value is cached, because `ended` may be written again by the late callback.
        """
        return max(self.ended - self.began, 1e-9) if self.is_timed else 0.0

    def shows_nan(self) -> bool:
        """Return True if the first element of the result tells of NaN or infinity on some rank."""
        assert self.sent is not None
        return self.sent.numel() > 0 and math.isnan(float(self.sent[0]))


@dataclass
class BucketInStep:
    """A bucket whose reduction has begun.

    Attributes:
        flat_N: the gradients; after `finish` the result.
        norms: norms of the gradients, or None if gradients are not checked.
        only_presence: `norms` are 0 or 1 (see `presence_of`), because the codec finds NaN itself.
        rows: reduction of a sparse gradient.
        future: future of the DDP hook; completes at the end of the step.
    """

    bucket: Bucket
    flat_N: Tensor
    norms: Tensor | None = None
    only_presence: bool = False
    parts: list[PartInStep] = field(default_factory=list)
    rows: Pending[Tensor] | None = None
    future: torch.futures.Future[Tensor] | None = None

    @property
    def is_silent(self) -> bool:
        """True if the ranks need no report on it, because its result tells everything."""
        if self.norms is None:
            return self.rows is None
        return self.only_presence and all(
            p.shows_nonfinite and not p.prepared and not p.is_timed for p in self.parts
        )

    def note_if(self, bad: Tensor, part: Part) -> None:
        """Count all gradients of a part as not finite if `bad` (0-d) is True."""
        assert self.norms is not None
        places = list(part.indices)
        self.norms[places] = torch.where(bad, math.inf, self.norms[places])

    def note_nonfinite(self, part: Part, grad_N: Tensor) -> None:
        """Mark the gradients of a part that are not finite; with nodes, all of the part."""
        assert self.norms is not None
        whole = part.memory.packing.window is None
        pieces = part.memory.pieces(grad_N) if whole else [grad_N]
        for i in not_finite(pieces):
            self.norms[part.indices[i] if len(pieces) > 1 else list(part.indices)] = math.inf


@dataclass(eq=False)
class Reducer:
    """Takes the buckets of one step, in the same order on every rank.

    Args:
        options: options of the state.
        buckets: buckets that the ranks have agreed on, with their residuals.
        costs: cost models that choose codecs for "auto".
        progress: counters, which advance if the step succeeds.
        group: the ranks of the state.
        operation: name for error messages.
        continues: the step is the second half of a step that DDP has begun.

    Attributes:
        running: the buckets that were added.
        taken: ids of the parameters in these buckets.
        error: error that `finish` will raise.
        whole_norm: norm of all gradients of this rank, if the caller knows it.
    """

    options: Options
    buckets: Buckets
    costs: CostModels
    progress: Progress
    group: ProcessGroup | None
    operation: str
    continues: bool
    running: list[BucketInStep] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    error: Exception | None = None
    whole_norm: float | None = None
    # Parameters that only some ranks of the state hold, to the group of these ranks.
    _held_by: dict[str, ProcessGroup | None] = field(default_factory=dict)

    def expect(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
        """Reserve places in the report for parameters that not all ranks hold.

        Ranks add different buckets for them, or none if no replica has a gradient, but the report
        must have the same length on all ranks.
        """
        names, _ = self.buckets.parameters.names_of(parameters)
        self._held_by.update(dict.fromkeys(names, group))

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        flat_N: Tensor,
        group: ProcessGroup | None,
        problem: str | None = None,
    ) -> BucketInStep:
        """Begin to reduce a bucket. An error is kept, and `finish` raises it."""
        running = BucketInStep(Bucket((), (), group), flat_N)
        self.running.append(running)
        self.taken.update(map(id, parameters))
        if self.error is not None:
            return running
        try:
            bucket = running.bucket = self.buckets.find(
                parameters,
                flat_N,
                group,
                common=self.group,
                operation=self.operation,
                step=self.progress.step,
                problem=problem,
            )
            if flat_N.layout == torch.sparse_coo:
                self._start_rows(running)
                return running
            if self.buckets.watches(bucket):
                running.only_presence = bucket.levels is None and self._needs_no_norms(flat_N)
                if running.only_presence:
                    running.norms = presence_of(flat_N, bucket.sizes)
                else:
                    running.norms = norms_of(flat_N.split(bucket.sizes))
            for part in bucket.parts:
                running.parts.append(self._start(running, part))
        except Exception as error:
            self.error = error
        return running

    def abandon(self, error: Exception | None = None) -> None:
        """End a step early, because of an error of the caller."""
        self.error = self.error or error or RuntimeError("abandoned")
        with contextlib.suppress(Exception):
            self._wait()
        self._rollback()

    # -- beginning ---------------------------------------------------------------------------

    def _start_rows(self, running: BucketInStep) -> None:
        """Reduce a sparse gradient."""
        running.norms = norms_of([running.flat_N._values()])
        if running.bucket.group is None and self.group is not None:
            # No other rank holds the parameter. None must not be passed to collectives, for which
            # it means the default group.
            running.rows = Pending.done(running.flat_N.coalesce())
            return
        found = row_sparse_all_reduce(
            running.flat_N,
            group=running.bucket.group,
            average=self.options.average,
            validate=False,
            async_op=True,
        )
        assert isinstance(found, Pending)
        running.rows = found

    def _needs_no_norms(self, flat_N: Tensor) -> bool:
        looked = self.options.monitor.due(self.progress.step)
        on_cpu = flat_N.device.type == "cpu"
        return on_cpu and self.options.local_clip_norm is None and not looked

    def _start(self, running: BucketInStep, part: Part) -> PartInStep:
        """Begin to reduce a part of a bucket."""
        options, bucket, memory = self.options, running.bucket, part.memory
        group = bucket.exchange_group
        is_alone = group is None and self.group is not None
        chooser = None
        if part.codec is None and not is_alone:
            chooser = self.costs.of(bucket, self.group, memory.device)
        codec = part.used = self._codec_in_step(part, chooser)
        if is_alone:
            codec = codec.alone()
        grad = part.take(running.flat_N)
        units = options.units_now(part.rate_group)
        memory.begin(unit_factors(memory.units, units), units)
        watched = running.norms is not None
        # The sum over a node may hold NaN of another rank, which reports the NaN itself. A plain
        # codec must not report it as NaN of this rank.
        finds = codec.finds_nonfinite and (bucket.levels is None or not codec.plain)
        finds = finds and watched and grad.device.type == "cpu"
        looked = watched and not (finds and running.only_presence)
        if looked:
            self._take_norms(running, part, codec, grad)
        prepared = memory.has("residual") or not codec.linear
        if prepared:
            grad = self._prepared(running, part, grad.float()) if looked else grad.float()
        started = PartInStep(
            part,
            codec,
            chooser,
            is_timed=chooser is not None and chooser.is_timed(part.label),
            prepared=prepared,
            shows_nonfinite=finds and codec.plain,
        )
        if bucket.levels is not None:
            grad = self._sum_in_node(running, started, grad)
        if codec.skips_zeros and group_size(group) > 1:
            started.filled = codec.find_zeros(grad, memory, part.reached) / bucket.node_size
        started.began = time.perf_counter()
        started.reduction = codec.start(
            grad,
            memory,
            group=group,
            average=options.average,
            step=self.progress.step,
            on_nonfinite=functools.partial(running.note_nonfinite, part) if finds else None,
        )
        if started.is_timed:
            started.note_end()
        return started

    def _codec_in_step(self, part: Part, chooser: CostModel | None) -> Codec:
        """Return the codec of a part in this step, after cost model, warm-up and monitor."""
        options, step = self.options, self.progress.step
        codec = part.codec
        if codec is None and chooser is not None:
            codec = chooser.choose(part.memory.numel, options.candidates, bucket=part.label)
        codec = options.warmup.codec(codec or Dense(), step)
        codec = options.monitor.codec(codec, self.progress.density_factor)
        if part.exact:
            codec = codec.keeping_zeros() if step < part.dense_until else codec.skipping_zeros()
        return codec

    def _take_norms(self, running: BucketInStep, part: Part, codec: Codec, grad: Tensor) -> None:
        """Compute norms of a part whose codec does not find NaN and infinity itself."""
        assert running.norms is not None
        memory, no_nodes = part.memory, running.bucket.levels is None
        pieces = running.flat_N.split(running.bucket.sizes)
        if running.only_presence:
            running.norms[list(part.indices)] = norms_of([pieces[i] for i in part.indices])
        if codec.narrow_dtype is not None:
            # A dense codec adds an old residual to the gradients before it sends them, so the sum
            # is checked for overflow.
            owed_N = memory.whole("residual") if no_nodes else None
            if owed_N is not None:
                owed_N.mul_(memory.factor("residual"))
            added = None if owed_N is None else memory.pieces(owed_N)
            note_overflow(running.norms, pieces, part.indices, added)
        kept = memory.kept("residual")
        may_overflow = kept is not None and no_nodes and grad.device.type == "cpu"
        if may_overflow and bool((running.norms >= _LARGE).any()):
            assert kept is not None
            running.note_nonfinite(part, grad + kept * memory.factor("residual"))

    def _prepared(self, running: BucketInStep, part: Part, grad: Tensor) -> Tensor:
        """Return a gradient that is safe to compress: zeros if it is not finite, and clipped."""
        assert running.norms is not None
        finite = torch.isfinite(running.norms[list(part.indices)]).all()
        if grad.device.type != "cpu":
            grad = torch.where(finite, grad, 0.0)
        elif not bool(finite):
            return torch.zeros_like(grad)
        limit = self.options.local_clip_norm
        if limit is None:
            return grad
        bound = limit * self.options.loss_scale / math.sqrt(group_size(running.bucket.group))
        whole = torch.linalg.vector_norm(running.norms)
        if self.whole_norm is not None:
            whole = whole.new_tensor(self.whole_norm)
        return grad * (bound / (whole + 1e-12)).clamp(max=1.0).to(grad.dtype)

    def _sum_in_node(self, running: BucketInStep, started: PartInStep, grad: Tensor) -> Tensor:
        """Return this rank's shard of the sum over its node, scaled already for a linear codec."""
        levels, memory, codec = running.bucket.levels, started.part.memory, started.codec
        average = self.options.average
        assert levels is not None
        shard_S = levels.shard_of(grad, memory.numel)
        unit = 1.0 / levels.node_size if average else 1.0
        if codec.linear and levels.node_group is not None:
            # The residual is in units of the sum, so it is added before the shard is scaled.
            was_owed = memory.take_owed(shard_S)
            if codec.narrow_dtype is not None and not average:
                # A sum may overflow in float16 although each number fits, so the mean is sent.
                unit, started.scale = 1.0 / levels.node_size, float(levels.node_size)
            shard_S.mul_(unit)
            if codec.narrow_dtype is not None and was_owed:
                running.note_if(infinite_as_half(shard_S), started.part)
            return shard_S.to(grad.dtype)
        started.scale = unit
        assert running.norms is not None
        norm = norms_of([shard_S])[0]
        started.square = norm.square()
        # A sum may overflow although no gradient does.
        running.note_if(~torch.isfinite(norm), started.part)
        return torch.where(torch.isfinite(norm), shard_S, 0.0)

    # -- end ---------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait for all reductions; commit the residuals if the step succeeded, or roll them back.

        Returns:
            True if all gradients were finite on every rank.

        Raises:
            ValueError: on every rank: a gradient of any rank is not finite (unless the options
                propagate it), or the ranks disagree.
            RankFailureError: a rank died or did not answer.
        """
        progress = self.progress
        try:
            self._wait()
            outcome = self._agree()
            progress.was_finite = not outcome.bad
            if outcome.bad and self.options.nonfinite == "raise":
                bad = ", ".join(f"{name} on rank {rank}" for rank, name in outcome.bad)
                raise ValueError(
                    f"{self.operation}: expected gradients to be finite, got NaN or infinity in "
                    f"{bad}"
                )
        except Exception:
            self._rollback()
            self._clear()
            raise
        if outcome.bad:
            self._rollback()
            self._give()
            self._poison()
            return False
        self._keep_unused(outcome.unused)
        self._give()
        self.buckets.feedback.commit(continues=self.continues)
        self._clip()
        self._learn(outcome)
        if not self.continues:
            progress.can_undo = True
            progress.step += 1
        self.buckets.parameters.may_be_new = False
        self.buckets.parameters.reached.clear()
        if outcome.ratio is not None:
            progress.residual_ratio = outcome.ratio
            monitor = self.options.monitor
            progress.density_factor = monitor.factor(outcome.ratio, progress.density_factor)
        return True

    def _rollback(self) -> None:
        """Drop the changes of the step."""
        self.buckets.rollback()
        self.progress.can_undo = self.progress.can_undo and self.continues

    def _wait(self) -> None:
        """Wait for the results of all parts, so that no reduction runs any more, even on an error.

        An error is reported to ranks that hold other experts, because these have met no error.
        """
        for running in self.running:
            try:
                if self.error is None:
                    with naming_failed_ranks(running.bucket.group, self.operation):
                        if running.rows is not None:
                            running.flat_N = running.rows.wait()
                        for part in running.parts:
                            part.result = self._whole(running, part)
                    continue
            except Exception as error:
                self.error = error
            for part in running.parts:
                with contextlib.suppress(Exception):
                    part.end()
        if self.error is None:
            return
        if isinstance(self.error, ValueError) and self._held_by:
            with contextlib.suppress(ValueError):
                self._report(failed=True)
        raise self.error

    def _whole(self, running: BucketInStep, started: PartInStep) -> Tensor:
        """Return the result of a part; with nodes, gathered from the shards of a node's ranks."""
        sent, levels = started.end(), running.bucket.levels
        if levels is None:
            return sent
        target = started.part.take(running.flat_N)
        levels.share(target, sent * started.scale)
        return target

    def _agree(self) -> StepOutcome:
        """Return the outcome of the step on all ranks, without a report if results tell everything.

        All ranks decide alike: NaN of any rank makes the sum NaN on every rank.
        """
        is_silent = not self._held_by and all(running.is_silent for running in self.running)
        if is_silent and not any(part.shows_nan() for _, part in self._parts()):
            return StepOutcome()
        return self._report()

    def _report(self, *, failed: bool = False) -> StepOutcome:
        """Exchange step reports with the other ranks, in one small message."""
        if not self._held_by and not any(running.norms is not None for running in self.running):
            return StepOutcome()
        common = [
            running
            for running in self.running
            if not running.bucket.names or running.bucket.names[0] not in self._held_by
        ]
        looked = self.options.monitor.due(self.progress.step) and not failed
        numbered = {p.part.names[0]: p for _, p in self._parts() if p.part.is_numbered}
        places = [p.part.names[0] for r in common for p in r.parts if p.part.is_numbered]
        norms: dict[str, float] = {}
        for running in self.running:
            names = running.bucket.names
            # NOTE: device-to-host sync, at the end of a step.
            found = [1.0] * len(names) if running.norms is None else running.norms.tolist()
            norms.update(zip(names, found, strict=True))
        report = StepReport(
            step=self.progress.step,
            options=self.options.facts(),
            failed=failed,
            names=[*(name for running in common for name in running.bucket.names), *self._held_by],
            norms=norms,
            squares=self._squares() if looked else (0.0, 0.0),
            parts=[*places, *self._held_by],
            filled={name: part.filled for name, part in numbered.items()},
            seconds={name: part.seconds for name, part in numbered.items()},
        )
        if self.running:
            device = self.running[0].flat_N.device
        else:
            device = self.buckets.parameters.by_name[next(iter(self._held_by))].device
        return exchange_reports(report, self.group, self._held_by, device, self.operation)

    def _parts(self) -> list[tuple[BucketInStep, PartInStep]]:
        return [(running, part) for running in self.running for part in running.parts]

    def _squares(self) -> tuple[float, float]:
        """Return the squared norms of the residuals, and of the gradients that have a residual."""
        owed, given = 0.0, 0.0
        for running, started in self._parts():
            memory = started.part.memory
            if not memory.has("residual") or running.norms is None:
                continue
            if not memory.is_taken("residual"):
                owed += float(torch.linalg.vector_norm(memory.tensor("residual"))) ** 2
            norms = running.norms[list(started.part.indices)]
            given += float(norms.square().sum() if started.square is None else started.square)
        return owed, given

    def _keep_unused(self, unused: set[str]) -> None:
        """Put back the residuals that were sent for parameters without a gradient on any rank.

        DistributedDataParallel drops the result of a parameter that no rank has used.
        """
        for running, started in self._parts():
            part, memory, sent = started.part, started.part.memory, started.sent
            if not memory.has("residual") or unused.isdisjoint(part.names):
                continue
            assert sent is not None and started.result is not None
            # Every rank that took part keeps the mean, or an equal share of the sum.
            share_of = started.scale / group_size(running.bucket.exchange_group)
            if self.options.average:
                share_of = started.scale * running.bucket.node_size
            residual = memory.tensor("residual")
            pieces = started.result.split([stop - start for start, stop in part.spans])
            spans = memory.packing.spans()
            for name, (low, high), piece in zip(part.names, spans, pieces, strict=True):
                if name in unused:
                    residual[low:high].add_(sent[low:high].float(), alpha=share_of)
                    piece.zero_()

    def _give(self) -> None:
        for running, started in self._parts():
            assert started.result is not None
            started.part.give(running.flat_N, started.result)

    def _clear(self) -> None:
        """Zero the gradients, so that all ranks keep the same parameters if training goes on."""
        for running in self.running:
            flat_N = running.flat_N
            if flat_N.layout == torch.sparse_coo:
                # A tensor without rows is needed, because NaN times zero is NaN.
                rows, values = flat_N._indices()[:, :0], flat_N._values()[:0]
                running.flat_N = torch.sparse_coo_tensor(
                    rows, values, tuple(flat_N.shape), is_coalesced=True
                )
            else:
                flat_N.zero_()

    def _poison(self) -> None:
        """Write NaN to all compressed gradients, on every rank.

        Their residuals were rolled back, so the optimizer must not apply these gradients.
        """
        for running, started in self._parts():
            if started.prepared:
                for start, stop in started.part.spans:
                    running.flat_N[start:stop] = math.nan

    def _clip(self) -> None:
        limit = self.options.clip_norm
        # The norm must include experts of other ranks, so with those the caller clips.
        if limit is None or self.buckets.parameters.sharded or not self.running:
            return
        flats = [r.flat_N._values() if r.rows is not None else r.flat_N for r in self.running]
        total = torch.linalg.vector_norm(torch.cat([norms_of([flat]) for flat in flats]))
        coefficient = (limit * self.options.loss_scale / (total + 1e-6)).clamp(max=1.0)
        for flat in flats:
            flat.mul_(coefficient.to(flat.dtype))

    def _learn(self, outcome: StepOutcome) -> None:
        """Adapt to the share of non-zero blocks and to the measured times."""
        timed: dict[int, tuple[CostModel, list[float]]] = {}
        for _, started in self._parts():
            part, codec, chooser = started.part, started.codec, started.chooser
            if codec.skips_zeros:
                if part.exact and outcome.filled[part.names[0]] > _MOSTLY_FULL:
                    part.dense_until = self.progress.step + _DENSE_STEPS
                codec = codec.keeping_zeros()
            if started.is_timed and chooser is not None:
                chooser.observe(part.label, codec, started.seconds)
                _, agreed = timed.setdefault(id(chooser), (chooser, []))
                agreed.append(outcome.seconds[part.names[0]])
        for chooser, agreed in timed.values():
            chooser.settle(agreed)
