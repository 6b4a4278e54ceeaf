"""One step of a compressed reduction: all its messages, and what becomes of the residuals.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.compression._layout import Layout, Part
from moe_ext.compression.codecs import BlockSparse, Codec, Dense, Unsent
from moe_ext.compression.exact_reduce import row_sparse_all_reduce
from moe_ext.compression.named_codecs import unsent
from moe_ext.compression.reduction import Reduction
from moe_ext.distributed.collectives import share
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_ranks, group_size

if TYPE_CHECKING:
    from moe_ext.compression.state import CompressionState

# Flags of parameters that go in one number of a message.
_FLAGS = 62
# Above this share of the blocks, the sum over ranks, all of them are sent for a while.
_MOSTLY_FULL = 0.75
_DENSE_STEPS = 16


def as_integer(value: float) -> int:
    """The bits of a float64, for a message of integers."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def as_float(value: int) -> float:
    """The float64 of some bits."""
    return float(struct.unpack("<d", struct.pack("<q", value))[0])


@dataclass
class Underway:
    """A part whose reduction has begun."""

    part: Part
    codec: Codec
    reduction: Reduction
    began: float
    ended: float = 0.0
    # Share of the blocks that are not zero here.
    filled: float = 0.0
    # Whether the gradient went in without what is not finite.
    prepared: bool = False


@dataclass
class Work:
    """A bucket in this step; `flat_N` holds the gradients, and later the result."""

    layout: Layout
    flat_N: Tensor
    norms: Tensor | None = None
    parts: list[Underway] = field(default_factory=list)
    rows: Reduction | None = None


@dataclass
class _Finding:
    """What the ranks have told each other at the end of a step."""

    bad: list[tuple[int, str]]
    unused: set[str]
    ratio: float | None
    filled: list[float]
    seconds: list[float]


class Step:
    """Takes the buckets of one step, in the same order on every rank."""

    def __init__(self, state: CompressionState) -> None:
        self.state = state
        self.works: list[Work] = []
        self.error: Exception | None = None
        # Of the hook, one for each bucket.
        self.futures: list[torch.futures.Future[Tensor]] = []
        # Norm of all gradients of this rank, where the caller has them at once.
        self.whole_norm: float | None = None

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

    def abandon(self) -> None:
        """End a step that will get no more buckets."""
        self.error = self.error or RuntimeError("abandoned")
        with contextlib.suppress(Exception):
            self._wait()
        self.state.rollback()

    # -- beginning ---------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        layout = work.layout
        if work.flat_N.layout == torch.sparse_coo:
            work.norms = _norms([work.flat_N._values()])
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
            assert isinstance(found, Reduction)
            work.rows = found
            return
        if self.state.watches(layout):
            work.norms = _norms(layout.pieces(work.flat_N))
        for part in layout.parts:
            work.parts.append(self._start_part(work, part))

    def _is_alone(self, work: Work) -> bool:
        """Whether no other rank has these experts; to collectives, None means the default group."""
        return work.layout.group is None and self.state.group is not None

    def _start_part(self, work: Work, part: Part) -> Underway:
        state, group = self.state, work.layout.group
        codec = state.codec_now(part)
        if self._is_alone(work):
            codec = unsent(codec)
        grad = part.take(work.flat_N)
        state.open(part)
        if work.norms is not None and codec == Dense("fp16"):
            _note_overflow(work.norms, work.layout.pieces(work.flat_N), part.indices)
        as_it_is = isinstance(codec, Dense | BlockSparse) or codec == Unsent()
        prepared = part.memory.has("residual") or not as_it_is
        if prepared:
            grad = self._prepared(work, part, grad.float())
        filled = 0.0
        if isinstance(codec, BlockSparse) and group_size(group) > 1:
            filled = self._look(part, grad, codec)
        began = time.perf_counter()
        reduction = codec.start(
            grad, part.memory, group=group, average=state.average, step=state.step
        )
        underway = Underway(part, codec, reduction, began, filled=filled, prepared=prepared)
        if part.codec is None and state.cost_model is not None:
            _note_end(underway)
        return underway

    def _look(self, part: Part, grad: Tensor, codec: BlockSparse) -> float:
        """Find the blocks that may not be zero: experts that the router has chosen, and others.

        Of those it has not, too: a penalty on the weights reaches them, or another layer.
        """
        block = codec.block_of(part.memory)
        bitmap = self.state.reached_bitmap(part.names[0]) if codec.block == "row" else None
        num_blocks = -(-grad.numel() // block)
        if bitmap is None or ops.block_indices(bitmap).numel() < num_blocks:
            # Takes no time where a block begins with other numbers than zero.
            seen = ops.nonzero_blocks(grad, block=block)
            bitmap = seen if bitmap is None else bitmap | seen
        part.memory.bitmap = bitmap
        return ops.block_indices(bitmap).numel() / max(num_blocks, 1)

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
            results = self._wait()
            finding = self._share()
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
                        found.extend(underway.reduction.wait() for underway in work.parts)
                    continue
            except Exception as error:
                self.error = error
            for underway in work.parts:
                with contextlib.suppress(Exception):
                    underway.reduction.wait()
        if self.error is not None:
            raise self.error
        return results

    def _share(self) -> _Finding:
        """One small message: what is finite, used, owed and how long things took."""
        state = self.state
        names = [name for work in self.works for name in work.layout.names]
        if not any(work.norms is not None for work in self.works):
            return _Finding([], set(), None, [], [])
        flags, bad = self._flags(names)
        looked = state.monitor is not None and state.monitor.due(state.step)
        squares = self._squares() if looked else (0.0, 0.0)
        filled = [u.filled for u in self._exact()]
        seconds = self._observed()
        message = [bad, state.step, *map(as_integer, [*squares, *filled, *seconds]), *flags]
        group = state.group
        rows = [message]
        if group_size(group) > 1:
            assert group is not None
            device = self.works[0].flat_N.device
            rows = share(message, group, device, operation=self.operation)
        ranks = group_ranks(group) if group is not None else (0,)
        steps = {row[1] for row in rows}
        if len(steps) > 1:
            found = ", ".join(f"{row[1]} on rank {r}" for r, row in zip(ranks, rows, strict=True))
            raise ValueError(
                f"{self.operation}: expected the step to be equal on every rank, got {found}"
            )
        bad_names = [
            (rank, names[row[0]]) for rank, row in zip(ranks, rows, strict=True) if row[0] >= 0
        ]
        floats = [[as_float(v) for v in row[2 : len(row) - len(flags)]] for row in rows]
        sums = [sum(column) for column in zip(*floats, strict=True)]
        ratio = math.sqrt(sums[0] / sums[1]) if looked and sums[1] > 0.0 else None
        slowest = [max(column) for column in zip(*floats, strict=True)][2 + len(filled) :]
        unused = _unused(names, [row[len(row) - len(flags) :] for row in rows])
        return _Finding(bad_names, unused, ratio, sums[2 : 2 + len(filled)], slowest)

    def _exact(self) -> list[Underway]:
        """Parts of which zero blocks may be left out."""
        return [u for work in self.works for u in work.parts if u.part.exact]

    def _flags(self, names: Sequence[str]) -> tuple[list[int], int]:
        """Bits of the parameters with a gradient here, and the first that is not finite or -1."""
        words = [0] * (-(-len(names) // _FLAGS))
        bad, index = -1, 0
        for work in self.works:
            count = len(work.layout.names)
            # NOTE: device-to-host sync, at the end of a step.
            norms = [1.0] * count if work.norms is None else work.norms.tolist()
            for offset, norm in enumerate(norms):
                place = index + offset
                if norm != 0.0:
                    words[place // _FLAGS] |= 1 << (place % _FLAGS)
                if bad < 0 and not math.isfinite(norm):
                    bad = place
            index += count
        return words, bad

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
                given += float(norms.square().sum())
        return owed, given

    def _observed(self) -> list[float]:
        """Seconds of the parts that the cost model chose for, in their order."""
        model = self.state.cost_model
        if model is None:
            return []
        for work in self.works:
            for underway in work.parts:
                if underway.part.codec is None:
                    took = max(underway.ended - underway.began, 1e-9)
                    exact = isinstance(underway.codec, BlockSparse)
                    codec = Dense() if exact else underway.codec
                    model.observe(underway.part.label, codec, took)
        return list(model.pending())

    def _keep_unused(self, results: list[list[Tensor]], unused: set[str]) -> None:
        """Owe again what was sent for parameters that no rank has a gradient for.

        DistributedDataParallel drops the result of a parameter that nobody used.
        """
        if not unused:
            return
        for work, tensors in zip(self.works, results, strict=True):
            # Every rank keeps the mean, or its share of the sum.
            share_of = 1.0 if self.state.average else 1.0 / group_size(work.layout.group)
            for underway, result in zip(work.parts, tensors, strict=True):
                memory = underway.part.memory
                if not memory.has("residual") or unused.isdisjoint(underway.part.names):
                    continue
                pieces = zip(
                    underway.part.names,
                    memory.pieces(memory.tensor("residual")),
                    memory.pieces(result),
                    strict=True,
                )
                for name, residual, piece in pieces:
                    if name in unused:
                        residual.add_(piece.float(), alpha=share_of)
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
        total = torch.linalg.vector_norm(torch.cat([_norms([flat]) for flat in flats]))
        coefficient = (limit / (total + 1e-6)).clamp(max=1.0)
        for flat in flats:
            flat.mul_(coefficient.to(flat.dtype))

    def _learn(self, finding: _Finding) -> None:
        """Adapt to how full the blocks were and how long things took."""
        state = self.state
        for underway, filled in zip(self._exact(), finding.filled, strict=False):
            if isinstance(underway.codec, BlockSparse) and filled > _MOSTLY_FULL:
                underway.part.dense_until = state.step + _DENSE_STEPS
        if state.cost_model is not None:
            state.cost_model.settle(finding.seconds)


def _norms(pieces: list[Tensor]) -> Tensor:
    """Norm of each tensor, float64; infinite or NaN only where one of its elements is."""
    if pieces[0].device.type != "cpu":
        return torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in pieces])
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    if pieces[0].dtype == wide and all(piece.dim() == 1 for piece in pieces):
        # Takes half the time of a norm.
        norms = [math.sqrt(float(torch.dot(piece, piece))) for piece in pieces]
    else:
        norms = [float(torch.linalg.vector_norm(piece, dtype=wide)) for piece in pieces]
    for i, norm in enumerate(norms):
        # Squares overflow and vanish before the elements do.
        wrong = bool(pieces[i].any()) if norm == 0.0 else not math.isfinite(norm)
        if wrong and bool(torch.isfinite(pieces[i]).all()):
            norms[i] = float(torch.linalg.vector_norm(pieces[i], dtype=torch.float64))
    return torch.tensor(norms, dtype=torch.float64)


def _note_overflow(norms: Tensor, pieces: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Count a gradient that float16 does not hold as infinite, which is what it becomes."""
    limit = torch.finfo(torch.float16).max
    for i in indices:
        if norms.device.type == "cpu" and float(norms[i]) <= limit:
            continue
        if pieces[i].numel():
            largest = pieces[i].abs().amax().half()
            norms[i] = torch.where(largest.isinf(), math.inf, norms[i])


def _note_end(underway: Underway) -> None:
    def note(_: object) -> None:
        underway.ended = time.perf_counter()

    underway.reduction.get_future().then(note)


def _unused(names: Sequence[str], rows: Sequence[Sequence[int]]) -> set[str]:
    """Parameters whose gradient is zero on every rank."""
    joined = [0] * (len(rows[0]) if rows else 0)
    for row in rows:
        joined = [a | b for a, b in zip(joined, row, strict=True)]
    return {name for i, name in enumerate(names) if not joined[i // _FLAGS] >> (i % _FLAGS) & 1}


def _describe(bad: list[tuple[int, str]], operation: str) -> str:
    found = ", ".join(f"{name} on rank {rank}" for rank, name in bad)
    return f"{operation}: expected gradients to be finite, got NaN or infinity in {found}"
