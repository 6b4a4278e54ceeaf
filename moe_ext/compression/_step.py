"""One step of a compressed reduction: all its messages, and what becomes of the residuals.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.compression._layout import Layout, Part
from moe_ext.compression._look import (
    infinite_as_half,
    marks_of,
    norms_of,
    not_finite,
    note_overflow,
)
from moe_ext.compression._status import Finding, Told, exchange
from moe_ext.compression._work import Underway, Work
from moe_ext.compression.codecs import Codec
from moe_ext.compression.exact_reduce import row_sparse_all_reduce
from moe_ext.compression.reduction import Reduction
from moe_ext.distributed.comm import Pending
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_size

if TYPE_CHECKING:
    from moe_ext.compression._protocols import ChoosesCodecs
    from moe_ext.compression.state import CompressionState

# Above this share of the blocks, the sum over ranks, all of them are sent for a while.
_MOSTLY_FULL = 0.75
_DENSE_STEPS = 16
# What is less does not make a finite float32 overflow that it is added to.
_LARGE = 1e30


class Step:
    """Takes the buckets of one step, in the same order on every rank."""

    def __init__(self, state: CompressionState) -> None:
        self.state = state
        self.works: list[Work] = []
        self.error: Exception | None = None
        # Parameters that other ranks of the state do not hold, to the ranks that do.
        self._held_by: dict[str, ProcessGroup | None] = {}
        # Of the hook, one for each bucket.
        self.futures: list[torch.futures.Future[Tensor]] = []
        # Norm of all gradients of this rank, where the caller has them at once.
        self.whole_norm: float | None = None

    def expect(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
        """Keep places in the status message for parameters that not all ranks hold.

        Ranks that hold others add other buckets, and none where no replica has a gradient.
        """
        names, _ = self.state.names_of(parameters)
        self._held_by.update(dict.fromkeys(names, group))

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        flat_N: Tensor,
        group: ProcessGroup | None,
        problem: str | None = None,
    ) -> Work:
        """Begin to reduce a bucket; an error, or a problem of this rank, waits for `finish`."""
        work = Work(Layout((), (), group), flat_N)
        self.works.append(work)
        if self.error is None:
            try:
                work.layout = self.state.layout(parameters, flat_N, group, problem)
                self._start(work)
            except Exception as error:
                self.error = error
        return work

    def abandon(self, error: Exception | None = None) -> None:
        """End a step that will get no more buckets, for an error of the caller's."""
        self.error = self.error or error or RuntimeError("abandoned")
        with contextlib.suppress(Exception):
            self._results()
        self.state.rollback()

    # -- beginning ---------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        layout = work.layout
        if work.flat_N.layout == torch.sparse_coo:
            work.norms = norms_of([work.flat_N._values()])
            if self._is_alone(work):
                work.rows = Reduction.done(work.flat_N.coalesce())
                return
            found = row_sparse_all_reduce(
                work.flat_N,
                group=layout.group,
                average=self.state.average,
                validate=False,
                async_op=True,
            )
            assert isinstance(found, Pending)
            work.rows = found
            return
        if self.state.watches(layout):
            work.only_marks = layout.levels is None and self._wants_only_marks(work.flat_N)
            if work.only_marks:
                work.norms = marks_of(work.flat_N, layout.sizes)
            else:
                work.norms = norms_of(layout.pieces(work.flat_N))
        for part in layout.parts:
            work.parts.append(self._start_part(work, part))

    def _wants_only_marks(self, flat_N: Tensor) -> bool:
        state = self.state
        looked = state.monitor.due(state.step)
        return flat_N.device.type == "cpu" and state.local_clip_norm is None and not looked

    def _is_alone(self, work: Work) -> bool:
        """Whether no other rank has these experts; to collectives, None means the default group."""
        return work.layout.group is None and self.state.group is not None

    def _start_part(self, work: Work, part: Part) -> Underway:
        state, group = self.state, work.layout.exchange_group
        is_alone = group is None and state.group is not None
        chooser = None
        if part.codec is None and not is_alone:
            chooser = state.choosers.of(work.layout, state.group, part.memory.device)
        codec = state.codec_now(part, chooser)
        if is_alone:
            codec = codec.alone()
        grad = part.take(work.flat_N)
        state.open(part)
        looks = work.norms is not None and grad.device.type == "cpu" and _looks(codec, work.layout)
        looked = work.norms is not None and not (looks and work.only_marks)
        if looked:
            self._look_first(work, part, codec, grad)
        prepared = part.memory.has("residual") or not codec.linear
        if prepared:
            grad = self._prepared(work, part, grad.float()) if looked else grad.float()
        underway = Underway(part, codec, prepared=prepared, chooser=chooser)
        underway.is_timed = chooser is not None and chooser.is_timed(part.label)
        underway.shows_bad = looks and codec.plain
        if work.layout.levels is not None:
            grad = self._sum_in_node(work, underway, grad)
        if codec.skips_zeros and group_size(group) > 1:
            reached = functools.partial(state.reached_bitmap, part.names[0])
            filled = codec.find_zeros(grad, part.memory, reached)
            underway.filled = filled / work.layout.node_size
        underway.began = time.perf_counter()
        underway.reduction = codec.start(
            grad,
            part.memory,
            group=group,
            average=state.average,
            step=state.step,
            on_nonfinite=functools.partial(_note_bad, work, part) if looks else None,
        )
        if underway.is_timed:
            underway.note_end()
        return underway

    def _look_first(self, work: Work, part: Part, codec: Codec, grad: Tensor) -> None:
        """Norms of a part, where its codec does not look whether it is finite."""
        assert work.norms is not None
        pieces = work.layout.pieces(work.flat_N)
        if work.only_marks:
            work.norms[list(part.indices)] = norms_of([pieces[i] for i in part.indices])
        if codec.narrow_dtype is not None:
            note_overflow(work.norms, pieces, part.indices, _added(work, part))
        owed = part.memory.kept("residual")
        may_overflow = owed is not None and work.layout.levels is None
        if may_overflow and grad.device.type == "cpu" and bool((work.norms >= _LARGE).any()):
            assert owed is not None
            _note_bad(work, part, grad + owed * part.memory.factor("residual"))

    def _sum_in_node(self, work: Work, underway: Underway, grad: Tensor) -> Tensor:
        """This rank's shard of the sum over its node; of the mean where no codec owes anything."""
        levels, memory = work.layout.levels, underway.part.memory
        assert levels is not None
        shard_S = levels.shard_of(grad, memory.numel)
        unit = 1.0 / levels.node_size if self.state.average else 1.0
        if underway.codec.linear and work.layout.exchange_group is not None:
            # What is owed is in units of the sum.
            was_owed = memory.take_owed(shard_S)
            half = underway.codec.narrow_dtype is not None
            if half and not self.state.average:
                # Half precision may hold all numbers, and not their sum.
                unit, underway.scale = 1.0 / levels.node_size, float(levels.node_size)
            shard_S.mul_(unit)
            if half and was_owed:
                work.note_if(infinite_as_half(shard_S), underway.part)
            return shard_S.to(grad.dtype)
        underway.scale = unit
        assert work.norms is not None
        norm = norms_of([shard_S])[0]
        underway.square = norm.square()
        # A sum may overflow where no gradient does.
        work.note_if(~torch.isfinite(norm), underway.part)
        return torch.where(torch.isfinite(norm), shard_S, 0.0)

    def _prepared(self, work: Work, part: Part, grad: Tensor) -> Tensor:
        """A gradient that is safe to compress: zeros for one that is not finite, and clipped."""
        assert work.norms is not None
        finite = torch.isfinite(work.norms[list(part.indices)]).all()
        if grad.device.type != "cpu":
            grad = torch.where(finite, grad, 0.0)
        elif not bool(finite):
            return torch.zeros_like(grad)
        limit = self.state.local_clip_norm
        if limit is None:
            return grad
        bound = limit / math.sqrt(group_size(work.layout.group))
        whole = torch.linalg.vector_norm(work.norms)
        if self.whole_norm is not None:
            whole = whole.new_tensor(self.whole_norm)
        return grad * (bound / (whole + 1e-12)).clamp(max=1.0).to(grad.dtype)

    # -- end ---------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait for everything; keep the residuals of a step that went well, or put them back.

        Returns:
            Whether all gradients were finite on every rank.

        Raises:
            ValueError: on every rank: a gradient is not finite anywhere (and the state does not
                let it pass), or the ranks disagree.
            RankFailureError: a rank died or did not answer.
        """
        state = self.state
        try:
            results = self._results()
            finding = self._agree()
            state.was_finite = not finding.bad
            if finding.bad and state.nonfinite == "raise":
                raise ValueError(_describe(finding.bad, self.operation))
        except Exception:
            state.rollback()
            self._clear()
            raise
        if finding.bad:
            state.rollback()
            self._poison(results)
            return False
        self._keep_unused(results, finding.unused)
        self._give(results)
        state.memory.commit(continues=not state.begins_step)
        self._clip()
        self._learn(finding)
        state.committed(finding.ratio)
        return True

    @property
    def operation(self) -> str:
        """For messages."""
        return self.state.operation

    def _results(self) -> list[list[Tensor]]:
        """As `_wait`; an error reaches the ranks that hold other experts, which have met none."""
        try:
            return self._wait()
        except ValueError:
            if self._held_by:
                with contextlib.suppress(ValueError):
                    self._share(failed=True)
            raise

    def _wait(self) -> list[list[Tensor]]:
        """Results of the parts of each bucket; of those begun none runs any more afterwards."""
        results = []
        for work in self.works:
            found: list[Tensor] = []
            results.append(found)
            try:
                if self.error is None:
                    with naming_failed_ranks(work.layout.group, self.operation):
                        if work.rows is not None:
                            work.flat_N = work.rows.wait()
                        found.extend(self._whole(work, underway) for underway in work.parts)
                    continue
            except Exception as error:
                self.error = error
            for underway in work.parts:
                with contextlib.suppress(Exception):
                    underway.end()
        if self.error is not None:
            raise self.error
        return results

    def _whole(self, work: Work, underway: Underway) -> Tensor:
        """The result of a part, from the shards of the ranks of a node where there are any."""
        sent = underway.end()
        if work.layout.levels is None:
            return sent
        target = underway.part.take(work.flat_N)
        work.layout.levels.share(target, sent * underway.scale)
        return target

    def _agree(self) -> Finding:
        """What the ranks tell each other, without a message where the sums have told all of it.

        Every rank sees the same there: NaN plus anything is NaN.
        """
        is_silent = not self._held_by and all(work.is_silent for work in self.works)
        if is_silent and not any(underway.shows_nan() for underway in self._parts()):
            return Finding()
        return self._share()

    def _share(self, *, failed: bool = False) -> Finding:
        """One small message: what is finite, used, owed and how long things took."""
        state = self.state
        if not self._held_by and not any(work.norms is not None for work in self.works):
            return Finding()
        common = [w for w in self.works if not self._is_held_elsewhere(w.layout)]
        looked = state.monitor is not None and state.monitor.due(state.step)
        numbered = {u.part.names[0]: u for u in self._parts() if u.is_numbered}
        places = [u.part.names[0] for work in common for u in work.parts if u.is_numbered]
        told = Told(
            step=state.step,
            failed=failed,
            names=[*(name for work in common for name in work.layout.names), *self._held_by],
            norms=self._named_norms(),
            squares=self._squares() if looked and not failed else (0.0, 0.0),
            parts=[*places, *self._held_by],
            filled={name: underway.filled for name, underway in numbered.items()},
            seconds={name: underway.settle_time() for name, underway in numbered.items()},
        )
        device = self.works[0].flat_N.device if self.works else self._held_device()
        return exchange(told, state.group, self._held_by, device, self.operation)

    def _held_device(self) -> torch.device:
        return self.state.parameter(next(iter(self._held_by))).device

    def _parts(self) -> list[Underway]:
        return [underway for work in self.works for underway in work.parts]

    def _is_held_elsewhere(self, layout: Layout) -> bool:
        return bool(layout.names) and layout.names[0] in self._held_by

    def _named_norms(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for work in self.works:
            # NOTE: device-to-host sync, at the end of a step.
            norms = None if work.norms is None else work.norms.tolist()
            names = work.layout.names
            found.update(zip(names, norms or [1.0] * len(names), strict=True))
        return found

    def _squares(self) -> tuple[float, float]:
        """Squares of the norms of what is owed and of the gradients, where something is owed."""
        owed, given = 0.0, 0.0
        for work in self.works:
            for underway in work.parts:
                memory = underway.part.memory
                if not memory.has("residual") or work.norms is None:
                    continue
                if not memory.is_taken("residual"):
                    owed += float(torch.linalg.vector_norm(memory.tensor("residual"))) ** 2
                norms = work.norms[list(underway.part.indices)]
                square = norms.square().sum() if underway.square is None else underway.square
                given += float(square)
        return owed, given

    def _keep_unused(self, results: list[list[Tensor]], unused: set[str]) -> None:
        """Owe again what was sent for parameters that no rank has a gradient for.

        DistributedDataParallel drops the result of a parameter that nobody used.
        """
        if not unused:
            return
        for work, tensors in zip(self.works, results, strict=True):
            layout = work.layout
            # Every rank that has sent it keeps the mean, or its share of the sum.
            for underway, result in zip(work.parts, tensors, strict=True):
                part, memory, sent = underway.part, underway.part.memory, underway.sent
                if not memory.has("residual") or unused.isdisjoint(part.names):
                    continue
                assert sent is not None
                share_of = underway.scale / group_size(layout.exchange_group)
                if self.state.average:
                    share_of = underway.scale * layout.node_size
                residual, pieces = memory.tensor("residual"), result.split(part.sizes)
                for name, (low, high), piece in zip(
                    part.names, memory.packing.spans(), pieces, strict=True
                ):
                    if name in unused:
                        residual[low:high].add_(sent[low:high].float(), alpha=share_of)
                        piece.zero_()

    def _give(self, results: list[list[Tensor]]) -> None:
        for work, tensors in zip(self.works, results, strict=True):
            for underway, result in zip(work.parts, tensors, strict=True):
                underway.part.give(work.flat_N, result)

    def _clear(self) -> None:
        """Leave gradients that move no parameter, alike on all ranks."""
        for work in self.works:
            if work.flat_N.layout == torch.sparse_coo:
                # Without a row; NaN times zero is NaN.
                empty = work.flat_N._values()[:0], work.flat_N._indices()[:, :0]
                work.flat_N = torch.sparse_coo_tensor(
                    empty[1], empty[0], tuple(work.flat_N.shape), is_coalesced=True
                )
            else:
                work.flat_N.zero_()

    def _poison(self, results: list[list[Tensor]]) -> None:
        """Let the NaN of one rank reach the gradients of every rank.

        Of all that was compressed: what they owe is put back, so that no optimizer may take them.
        """
        self._give(results)
        for work in self.works:
            for underway in work.parts:
                if underway.prepared:
                    for start, stop in underway.part.spans:
                        work.flat_N[start:stop] = math.nan

    def _clip(self) -> None:
        limit = self.state.clip_now()
        if limit is None:
            return
        flats = [w.flat_N._values() if w.rows is not None else w.flat_N for w in self.works]
        if not flats:
            return
        total = torch.linalg.vector_norm(torch.cat([norms_of([flat]) for flat in flats]))
        coefficient = (limit / (total + 1e-6)).clamp(max=1.0)
        for flat in flats:
            flat.mul_(coefficient.to(flat.dtype))

    def _learn(self, finding: Finding) -> None:
        """Adapt to how full the blocks were and how long things took."""
        timed: dict[int, tuple[ChoosesCodecs, list[float]]] = {}
        for underway in self._parts():
            part, codec = underway.part, underway.codec
            if codec.skips_zeros:
                if part.exact and finding.filled[part.names[0]] > _MOSTLY_FULL:
                    part.dense_until = self.state.step + _DENSE_STEPS
                codec = codec.keeping_zeros()
            if underway.is_timed:
                assert underway.chooser is not None
                underway.chooser.observe(part.label, codec, underway.seconds)
                _, agreed = timed.setdefault(id(underway.chooser), (underway.chooser, []))
                agreed.append(finding.seconds[part.names[0]])
        for chooser, agreed in timed.values():
            chooser.settle(agreed)


def _added(work: Work, part: Part) -> list[Tensor] | None:
    """What a dense codec adds to the gradients of a part before it sends them, if anything."""
    owed = None if work.layout.levels is not None else part.memory.whole("residual")
    return None if owed is None else part.memory.pieces(owed.mul_(part.memory.factor("residual")))


def _looks(codec: Codec, layout: Layout) -> bool:
    """Whether a codec tells `OnNonfinite` what it is given.

    A dense sum over a node may hold the NaN of another rank, which names it.
    """
    return codec.finds_nonfinite and (layout.levels is None or not codec.plain)


def _note_bad(work: Work, part: Part, grad_N: Tensor) -> None:
    """Find which gradients of a part are not finite; all of them where a sum of ranks is not."""
    assert work.norms is not None
    pieces = part.memory.pieces(grad_N) if part.memory.packing.window is None else [grad_N]
    for i in not_finite(pieces):
        work.norms[part.indices[i] if len(pieces) > 1 else list(part.indices)] = math.inf


def _describe(bad: list[tuple[int, str]], operation: str) -> str:
    found = ", ".join(f"{name} on rank {rank}" for rank, name in bad)
    return f"{operation}: expected gradients to be finite, got NaN or infinity in {found}"
