"""Buckets of gradients, and parts of buckets that one codec reduces together.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.comm.agreement import Agreement
from moe_ext.compression.codecs import Codec, Dense
from moe_ext.compression.feedback import CodecMemory, FeedbackStore
from moe_ext.compression.nodes import Levels, Nodes, NodeShard
from moe_ext.compression.options import Options
from moe_ext.compression.parameters import NamedParameters
from moe_ext.distributed.dtensor import local_part


@dataclass
class Part:
    """Parameters of a bucket with one codec.

    Attributes:
        names: names of the parameters.
        indices: numbers of the parameters in the bucket.
        spans: (start, stop) of each parameter in the bucket.
        codec: the codec; None if the cost model chooses.
        rate_group: number of the optimizer's parameter group that holds the parameters.
        memory: residual and other state of the codec.
        exact: a plain all-reduce may leave out blocks of zeros.
        reached: returns the rows that may be non-zero in this step, or None if not known.
        dense_until: all blocks are sent up to this step, because few of them were zero.
        used: the codec of the last step.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    codec: Codec | None
    rate_group: int
    memory: CodecMemory
    exact: bool
    reached: Callable[[], Tensor | None]
    dense_until: int = 0
    used: Codec | None = None

    @property
    def label(self) -> str:
        """Name for tables."""
        more = len(self.names) - 1
        return f"{self.names[0]} +{more}" if more else self.names[0]

    @property
    def is_numbered(self) -> bool:
        """True if step reports hold numbers (filled blocks, seconds) of this part."""
        return self.exact or self.codec is None

    @functools.cached_property
    def _run(self) -> tuple[int, int] | None:
        """(start, stop) of the part if its parameters are neighbours, else None."""
        is_run = all(a[1] == b[0] for a, b in itertools.pairwise(self.spans))
        return (self.spans[0][0], self.spans[-1][1]) if is_run else None

    def take(self, flat_N: Tensor) -> Tensor:
        """Return the part of a bucket, as a view if its parameters are neighbours."""
        if self._run is not None:
            return flat_N[slice(*self._run)]
        return torch.cat([flat_N[start:stop] for start, stop in self.spans])

    def give(self, flat_N: Tensor, result: Tensor) -> None:
        """Write the part into a bucket."""
        if self._run is not None:
            target = flat_N[slice(*self._run)]
            if target.data_ptr() != result.data_ptr() or target.dtype != result.dtype:
                target.copy_(result)
            return
        pieces = result.split([stop - start for start, stop in self.spans])
        for (start, stop), piece in zip(self.spans, pieces, strict=True):
            flat_N[start:stop].copy_(piece)


@dataclass
class Bucket:
    """Parameters whose gradients lie side by side; all ranks have agreed on them.

    Attributes:
        names: names of the parameters, in their order in the bucket.
        shapes: shapes of the parameters.
        group: ranks that hold copies of the parameters; None is this process alone.
        levels: groups for a reduction inside nodes first; None for one level.
        parts: parts of the bucket; none for a sparse gradient, which is reduced by rows.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    group: ProcessGroup | None
    levels: Levels | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def exchange_group(self) -> ProcessGroup | None:
        """The ranks over which a codec reduces; None if there are no others."""
        return self.group if self.levels is None else self.levels.node_group

    @property
    def node_size(self) -> int:
        """Number of ranks that first reduce densely inside a node; 1 without nodes."""
        return 1 if self.levels is None else self.levels.node_size

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [shape.numel() for shape in self.shapes]


class Buckets:
    """All buckets that the ranks have agreed on.

    Args:
        options: options of the state.
        parameters: parameters of the model.
        feedback: keeps the residuals of the parts.
    """

    def __init__(
        self, options: Options, parameters: NamedParameters, feedback: FeedbackStore
    ) -> None:
        self.options, self.parameters, self.feedback = options, parameters, feedback
        self.nodes = Nodes(options.node_size)
        self._agreed: dict[tuple[object, ...], Bucket] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._agreed.values())

    def find(
        self,
        parameters: Sequence[nn.Parameter],
        flat_N: Tensor,
        group: ProcessGroup | None,
        *,
        common: ProcessGroup | None = None,
        operation: str,
        step: int,
        problem: str | None = None,
    ) -> Bucket:
        """Return the bucket of some parameters; agree on it with the other ranks if it is new.

        Args:
            parameters: the parameters, in the order of their gradients in the bucket.
            flat_N: the gradients.
            group: ranks that hold copies of the parameters; None is this process alone.
            common: the ranks of the state.
            operation: name for error messages.
            step: number of the step, which must be equal on all ranks.
            problem: problem of this rank, or None.

        Raises:
            ValueError: on every rank, if the ranks do not agree, or one has a problem.
        """
        names, strange = self.parameters.names_of(parameters)
        sparse = flat_N.layout == torch.sparse_coo
        key = (names, flat_N.dtype, flat_N.device, sparse, group)
        if key in self._agreed and problem is None and strange is None:
            return self._agreed[key]
        options = self.options
        shapes = tuple(local_part(parameter.detach()).shape for parameter in parameters)
        rate_groups = options.rate_groups()
        rates = [rate_groups.get(id(p), 0) for p in parameters]
        codecs: list[Codec | None] = []
        if strange is None:
            codecs = [self.parameters.codec(options.policy, name) for name in names]
        problem = problem or strange or self.nodes.problem(common, codecs, options.candidates)
        facts = {
            "the parameters of a bucket": _joined(names),
            "their shapes": _joined(tuple(shape) for shape in shapes),
            "their dtype": flat_N.dtype,
            "the codecs": _joined(c.name if c else "auto" for c in codecs),
            "the options of the codecs": _joined(dict.fromkeys(map(repr, codecs))),
            "the optimizer's groups": _joined(rates),
            "the step": step,
            **options.facts(),
            # Ranks must hold the same kinds of tensors: with nodes `NodeShard.packed` sends them to
            # other ranks, and without a residual a step may end without a report.
            "what is kept of them": _joined(self.feedback.kinds_of(names)),
        }
        Agreement(operation, group, flat_N.device).compare(facts, problem=problem)
        levels = self.nodes.levels(group, common, flat_N.device)
        bucket = Bucket(names, shapes, group, levels)
        if not sparse:
            self._divide(bucket, codecs, rates, flat_N)
        self._agreed[key] = bucket
        return bucket

    def _divide(
        self, bucket: Bucket, codecs: Sequence[Codec | None], rates: Sequence[int], flat_N: Tensor
    ) -> None:
        """Find the parts of a bucket.

        Rows of different parameters have different sizes, so each parameter whose rows may be left
        out is a part of its own. Float64 is never compressed.
        """
        spans = list(itertools.pairwise(itertools.accumulate(bucket.sizes, initial=0)))
        found: dict[tuple[Codec | None, int, int], list[int]] = {}
        for index, (name, codec, rate) in enumerate(zip(bucket.names, codecs, rates, strict=True)):
            exact = self.parameters.is_exact(self.options.policy, name, codec)
            if flat_N.dtype == torch.float64 and (codec is None or codec.lossy):
                codec = Dense()
            found.setdefault((codec, rate, index if exact else -1), []).append(index)
        for (codec, rate, alone), indices in found.items():
            names = tuple(bucket.names[i] for i in indices)
            shapes = [bucket.shapes[i] for i in indices]
            levels = bucket.levels
            packing = None if levels is None else NodeShard(levels, alone >= 0, shapes)
            # Key of the part's random stream; it must be the same in every process.
            key = zlib.crc32("\n".join(names).encode()) & 0x7FFFFFFF
            part = Part(
                names,
                tuple(indices),
                tuple(spans[i] for i in indices),
                codec,
                rate,
                self.feedback.group(names, shapes, flat_N.device, key, packing),
                alone >= 0,
                functools.partial(self.parameters.reached.bitmap, names[0]),
            )
            bucket.parts.append(part)
        # DDP may rebuild its buckets after a step. Residuals of the old buckets with these
        # parameters have moved to this bucket, so the old buckets are dropped.
        self._agreed = {
            key: other
            for key, other in self._agreed.items()
            if other.group is not bucket.group or set(bucket.names).isdisjoint(other.names)
        }

    def watches(self, bucket: Bucket) -> bool:
        """Return True if gradients of a bucket are checked for NaN; the same on every rank."""
        # NaN in any bucket rolls back the residuals of all buckets, so all buckets are checked if
        # any parameter of the model may have a residual.
        if self.options.nonfinite == "raise" or self.parameters.compresses:
            return True
        return any(
            part.exact or part.codec is None or part.memory.has("residual") or not part.codec.linear
            for part in bucket.parts
        )

    def forget(self) -> None:
        """Forget all buckets, so that the ranks agree on them again."""
        self._agreed = {}

    def rollback(self) -> None:
        """End the step, and drop its changes."""
        if self.feedback.rollback():
            self.forget()


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
