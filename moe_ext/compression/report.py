"""The one small message by which the ranks of a step tell each other how it went.

Its length follows from what all ranks have agreed on, whatever gradients there are: experts have
their places in it even where no replica of them has a gradient.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from moe_ext.comm.agreement import Agreement, check_equal_over_ranks, share
from moe_ext.comm.groups import group_rank, group_ranks, group_size

# Flags of parameters that go in one number of a message.
_FLAGS = 62


@dataclass
class StepReport:
    """Report of one rank to the others at the end of a step.

    Attributes:
        step: its number.
        options: see `Options.facts`; a checksum travels, and all of it where that differs.
        failed: whether it has met an error that the others may not know of.
        names: parameters of the step, the same in the same order on every rank.
        norms: of the gradients, for those that are here.
        squares: of the norms of what is owed and of the gradients.
        parts: first names of the parts with numbers, the same in the same order on every rank.
        filled: share of the blocks that are not zero, for those that are here.
        seconds: that the reduction took, for those that are here.
    """

    step: int
    options: Mapping[str, object]
    failed: bool
    names: Sequence[str]
    norms: Mapping[str, float]
    squares: tuple[float, float]
    parts: Sequence[str]
    filled: Mapping[str, float]
    seconds: Mapping[str, float]

    def message(self) -> list[int]:
        """The report as integers, as many as follow from `names` and `parts`."""
        words = [0] * (-(-len(self.names) // _FLAGS))
        bad = -1
        for place, name in enumerate(self.names):
            norm = self.norms.get(name, 0.0)
            if norm != 0.0:
                words[place // _FLAGS] |= 1 << (place % _FLAGS)
            if bad < 0 and not math.isfinite(norm):
                bad = place
        floats = [*self.squares]
        for numbers in (self.filled, self.seconds):
            floats += [numbers.get(name, 0.0) for name in self.parts]
        # Their bits, in a message of integers.
        coded = struct.unpack(f"<{len(floats)}q", struct.pack(f"<{len(floats)}d", *floats))
        return [int(self.failed), bad, self.step, self.checksum, *coded, *words]

    @property
    def checksum(self) -> int:
        """CRC-32 of the options."""
        return zlib.crc32(str(self.options).encode())


@dataclass
class StepOutcome:
    """Sum of the reports of all ranks.

    Attributes:
        bad: (rank, parameter) of gradients that are not finite, the first of each rank.
        unused: parameters whose gradient is zero on every rank that holds them.
        ratio: norm of what is owed over that of the gradients; None if nobody looked.
        filled: first name of a part to the sum over its ranks.
        seconds: first name of a part to those of the slowest of its ranks.
    """

    bad: list[tuple[int, str]] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    ratio: float | None = None
    filled: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def exchange_reports(
    report: StepReport,
    group: ProcessGroup | None,
    groups_of: Mapping[str, ProcessGroup | None],
    device: torch.device,
    operation: str,
) -> StepOutcome:
    """Tell the other ranks, and hear from them.

    Args:
        report: of this rank.
        group: the ranks of the step.
        groups_of: parameters and parts that other ranks of the step do not hold, to those that do
            (None is this process alone).
        device: of messages.
        operation: for error messages.

    Raises:
        ValueError: on every rank: one of them has failed, or they are not at the same step, or
            have other options.
        RankFailureError: a rank died or did not answer.
    """
    message = report.message()
    rows = [message]
    if group_size(group) > 1:
        assert group is not None
        rows = share(message, group, device, operation=operation)
    ranks = group_ranks(group) if group is not None else (0,)
    failed = [rank for rank, row in zip(ranks, rows, strict=True) if row[0]]
    if failed:
        raise ValueError(
            f"{operation}: expected every rank to reduce its gradients, got an error on ranks "
            f"{failed}, which say what it is"
        )
    if group is not None:
        check_equal_over_ranks("the step", [row[2] for row in rows], group, operation)
        if any(row[3] != report.checksum for row in rows):
            Agreement(operation, group, device).compare(report.options)
    bad = [(r, report.names[row[1]]) for r, row in zip(ranks, rows, strict=True) if row[1] >= 0]
    end = 6 + 2 * len(report.parts)
    count = end - 4
    floats = [struct.unpack(f"<{count}d", struct.pack(f"<{count}q", *row[4:end])) for row in rows]
    owed, given = (sum(row[i] for row in floats) for i in range(2))
    ratio = math.sqrt(owed / given) if given > 0.0 else None
    found = StepOutcome(bad, ratio=ratio)
    places = {rank: place for place, rank in enumerate(ranks)}
    mine = group_rank(group)
    everyone = list(range(len(rows)))

    def holders(name: str) -> list[int]:
        """Rows of the ranks that hold a parameter."""
        if name not in groups_of:
            return everyone
        others = groups_of[name]
        return [mine] if others is None else [places[r] for r in group_ranks(others) if r in places]

    for i, name in enumerate(report.parts):
        held = holders(name)
        found.filled[name] = sum(floats[row][2 + i] for row in held)
        found.seconds[name] = max(floats[row][2 + len(report.parts) + i] for row in held)
    for i, name in enumerate(report.names):
        word, bit = end + i // _FLAGS, i % _FLAGS
        if not any(rows[row][word] >> bit & 1 for row in holders(name)):
            found.unused.add(name)
    return found
