"""What a step has begun: buckets, and their parts.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ext.compression._layout import Layout, Part
from moe_ext.compression._protocols import ChoosesCodecs
from moe_ext.compression.codecs import Codec
from moe_ext.compression.reduction import Reduction


@dataclass
class Underway:
    """A part whose reduction has begun."""

    part: Part
    codec: Codec
    reduction: Reduction | None = None
    began: float = 0.0
    ended: float = 0.0
    # Share of the blocks that are not zero here.
    filled: float = 0.0
    # Whether the gradient went in without what is not finite.
    prepared: bool = False
    # Where the cost model has chosen.
    chooser: ChoosesCodecs | None = None
    seconds: float = 0.0
    # Square of the norm of what went in, where that is the shard of a node's sum.
    square: Tensor | None = None
    # What came out, of which the mean or sum over all ranks is this many times.
    sent: Tensor | None = None
    scale: float = 1.0

    def end(self) -> Tensor:
        """The result of the codec, once it is there."""
        assert self.reduction is not None
        self.sent = self.reduction.wait()
        if self.ended == 0.0:
            # The callback that notes the end has not had its turn yet.
            self.ended = time.perf_counter()
        return self.sent

    def settle_time(self) -> float:
        """Seconds that it took, for good: its end may be noted late; 0 where nobody asks."""
        if self.chooser is not None:
            self.seconds = max(self.ended - self.began, 1e-9)
        return self.seconds

    @property
    def is_numbered(self) -> bool:
        """Whether there is something to tell of it; the same on all ranks that hold it."""
        return self.part.exact or self.part.codec is None


@dataclass
class Work:
    """A bucket in this step; `flat_N` holds the gradients, and later the result.

    Attributes:
        norms: of the gradients, where they are watched.
        only_marks: whether all that is wanted of `norms` is what is zero and what is not finite.
    """

    layout: Layout
    flat_N: Tensor
    norms: Tensor | None = None
    only_marks: bool = False
    parts: list[Underway] = field(default_factory=list)
    rows: Reduction | None = None

    def note_if(self, bad: Tensor, part: Part) -> None:
        """Count all gradients of a part as not finite, where `bad` (0-d) is set."""
        assert self.norms is not None
        places = list(part.indices)
        self.norms[places] = torch.where(bad, math.inf, self.norms[places])
