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
    # Where the cost model has chosen, and whether it asks for the time.
    chooser: ChoosesCodecs | None = None
    is_timed: bool = False
    # Whether NaN or infinity on any rank shows in the first element of the result (see `Dense`).
    shows_bad: bool = False
    seconds: float = 0.0
    # Square of the norm of what went in, where that is the shard of a node's sum.
    square: Tensor | None = None
    # What came out, of which the mean or sum over all ranks is this many times.
    sent: Tensor | None = None
    scale: float = 1.0

    def note_end(self) -> None:
        """Remember when the reduction has ended, which may be long before anyone waits for it."""

        def note(_: object) -> None:
            self.ended = time.perf_counter()

        assert self.reduction is not None
        self.reduction.get_future().then(note)

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
        if self.is_timed:
            self.seconds = max(self.ended - self.began, 1e-9)
        return self.seconds

    def shows_nan(self) -> bool:
        """Whether the first element of the result says that a rank has met NaN or infinity."""
        assert self.sent is not None
        return self.sent.numel() > 0 and math.isnan(float(self.sent[0]))

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

    @property
    def is_silent(self) -> bool:
        """Whether the ranks have nothing to tell of it but what shows in the result."""
        if self.norms is None:
            return self.rows is None
        return self.only_marks and all(
            u.shows_bad and not u.prepared and not u.is_timed for u in self.parts
        )

    def note_if(self, bad: Tensor, part: Part) -> None:
        """Count all gradients of a part as not finite, where `bad` (0-d) is set."""
        assert self.norms is not None
        places = list(part.indices)
        self.norms[places] = torch.where(bad, math.inf, self.norms[places])
