"""How a bucket of gradients is divided into parts that one codec reduces together.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression._nodes import Levels
from moe_ext.compression.codecs import Codec, Dense
from moe_ext.compression.feedback import CodecMemory


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
        dense_until: step up to which few enough blocks were zero to send them all.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    codec: Codec | None
    rate_group: int
    memory: CodecMemory
    exact: bool = False
    dense_until: int = 0

    @property
    def label(self) -> str:
        """For tables."""
        more = len(self.names) - 1
        return f"{self.names[0]} +{more}" if more else self.names[0]

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [stop - start for start, stop in self.spans]

    def _is_run(self) -> bool:
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return all(a[1] == b[0] for a, b in pairs)

    def take(self, flat_N: Tensor) -> Tensor:
        """The part of a bucket, a view where its parameters are neighbours."""
        if self._is_run():
            return flat_N[self.spans[0][0] : self.spans[-1][1]]
        return torch.cat([flat_N[start:stop] for start, stop in self.spans])

    def give(self, flat_N: Tensor, result: Tensor) -> None:
        """Write the part into a bucket."""
        if self._is_run():
            target = flat_N[self.spans[0][0] : self.spans[-1][1]]
            if target.data_ptr() != result.data_ptr() or target.dtype != result.dtype:
                target.copy_(result)
            return
        pieces = result.split(self.sizes)
        for (start, stop), piece in zip(self.spans, pieces, strict=True):
            flat_N[start:stop].copy_(piece)


@dataclass
class Layout:
    """A bucket as it was agreed on with the other ranks.

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

    def pieces(self, flat_N: Tensor) -> list[Tensor]:
        """Views of a bucket, one for each parameter."""
        return list(flat_N.split(self.sizes))


def random_key(names: Sequence[str]) -> int:
    """A number that tells the random streams of parts apart, the same in every process."""
    return zlib.crc32("\n".join(names).encode()) & 0x7FFFFFFF


def told(values: Sequence[object]) -> str:
    """A short text that differs where the values do."""
    text = ", ".join(map(str, values))
    if len(text) <= 60:
        return text
    return f"{text[:40]}... ({len(values)}, checksum {random_key([text])})"


def divide(
    codecs: Sequence[Codec | None],
    rate_groups: Sequence[int],
    exact: Sequence[bool],
    dtype: torch.dtype,
) -> list[tuple[Codec | None, int, list[int]]]:
    """(codec, rate group, indices of parameters) of the parts of a bucket.

    Rows of different parameters have different sizes, so that those of which rows may be left out
    are a part each. Float64, in which nobody trains for speed, has no compressed form.
    """
    parts: dict[tuple[object, ...], tuple[Codec | None, int, list[int]]] = {}
    for index, (codec, rate) in enumerate(zip(codecs, rate_groups, strict=True)):
        if dtype == torch.float64 and (codec is None or codec.lossy):
            codec = Dense()
        key = (codec, rate, index if exact[index] else -1)
        parts.setdefault(key, (codec, rate, []))[2].append(index)
    return list(parts.values())
