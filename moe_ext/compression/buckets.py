"""Buckets of gradients, and their parts that one codec reduces together.

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
        names: of the parameters.
        indices: of the parameters in the bucket.
        spans: (start, stop) in the bucket, one for each.
        codec: None where the cost model chooses.
        rate_group: which of the optimizer's parameter groups they are in.
        memory: what the codec remembers.
        exact: whether blocks that are zero may be left out of a plain all-reduce.
        reached: the rows that are known not to be zero in this step, or None.
        dense_until: step up to which few enough blocks were zero to send them all.
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
        """For tables."""
        more = len(self.names) - 1
        return f"{self.names[0]} +{more}" if more else self.names[0]

    @property
    def is_numbered(self) -> bool:
        """True if ranks tell each other of it how full or how fast it was, alike on all holders."""
        return self.exact or self.codec is None

    @functools.cached_property
    def _run(self) -> tuple[int, int] | None:
        """(start, stop) where the parameters are neighbours."""
        is_run = all(a[1] == b[0] for a, b in itertools.pairwise(self.spans))
        return (self.spans[0][0], self.spans[-1][1]) if is_run else None

    def take(self, flat_N: Tensor) -> Tensor:
        """The part of a bucket, a view where its parameters are neighbours."""
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
    """Parameters whose gradients lie side by side, as it was agreed on with the other ranks.

    Attributes:
        names: of the parameters, in the order in which they lie in the bucket.
        shapes: of the parameters.
        group: ranks that hold copies of them; None is this process alone.
        levels: how these lie on nodes, if they are to be reduced there first.
        parts: none for a sparse gradient, which goes by rows.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    group: ProcessGroup | None
    levels: Levels | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def exchange_group(self) -> ProcessGroup | None:
        """The ranks that a codec reduces over; None if there are no others."""
        return self.group if self.levels is None else self.levels.node_group

    @property
    def node_size(self) -> int:
        """Ranks that reduce densely first; 1 without nodes."""
        return 1 if self.levels is None else self.levels.node_size

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [shape.numel() for shape in self.shapes]


class Buckets:
    """All buckets that the ranks have agreed on.

    Args:
        options: of the state.
        parameters: of the model.
        feedback: keeps what the parts of buckets owe.
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
        """The bucket of some parameters, agreed on with the other ranks when it is new.

        Args:
            parameters: in the order in which their gradients lie in the bucket.
            flat_N: the gradients.
            group: ranks that hold copies of the parameters; None is this process alone.
            common: the ranks of the state.
            operation: for messages.
            step: its number, which must be equal on all ranks.
            problem: what is wrong on this rank, if anything.

        Raises:
            ValueError: on every rank, when the ranks do not agree, or one has a problem.
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
            # With nodes it is brought to others; and where nothing is kept, steps may be silent.
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

        Rows of different parameters have different sizes, so that those of which rows may be left
        out are a part each. Float64, in which nobody trains for speed, has no compressed form.
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
            # Tells the random streams of parts apart, the same in every process.
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
        # Buckets are rebuilt after a step: what the others owed is now in this one.
        self._agreed = {
            key: other
            for key, other in self._agreed.items()
            if other.group is not bucket.group or set(bucket.names).isdisjoint(other.names)
        }

    def watches(self, bucket: Bucket) -> bool:
        """True if the gradients of a bucket are looked at; the same on every rank."""
        # A NaN anywhere makes the optimizer skip the step, and puts back what all buckets owe.
        if self.options.nonfinite == "raise" or self.parameters.compresses:
            return True
        return any(
            part.exact or part.codec is None or part.memory.has("residual") or not part.codec.linear
            for part in bucket.parts
        )

    def forget(self) -> None:
        """Agree on all buckets anew."""
        self._agreed = {}

    def rollback(self) -> None:
        """End the step, and forget what it has changed."""
        if self.feedback.rollback():
            self.forget()


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
