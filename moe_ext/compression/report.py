"""The small message at the end of a step in which ranks report to each other.

Its length follows from agreed facts alone, never from the gradients that a rank has. Experts have
places in the message even if no replica of them has a gradient.
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

# Number of flags that one integer of a message holds, one for each parameter.
_FLAGS = 62


@dataclass
class StepReport:
    """Report of one rank to the others at the end of a step.

    Attributes:
        step: number of the step.
        options: see `Options.facts`. A checksum is sent; if it differs, the options follow.
        failed: True if this rank has met an error that other ranks may not know of.
        names: parameters of the step, the same in the same order on every rank.
        norms: norms of the gradients that this rank has, by name.
        squares: squared norms of the residuals and of the gradients.
        parts: first names of the parts with numbers, the same in the same order on every rank.
        filled: share of non-zero blocks, for the parts that this rank has.
        seconds: duration of the reduction, for the parts that this rank has.
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
        """Encode the report as integers, whose number follows from `names` and `parts`."""
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
        # The message holds integers, so floats are sent as their bits.
        coded = struct.unpack(f"<{len(floats)}q", struct.pack(f"<{len(floats)}d", *floats))
        return [int(self.failed), bad, self.step, self.checksum, *coded, *words]

    @property
    def checksum(self) -> int:
        """CRC-32 of the options."""
        return zlib.crc32(str(self.options).encode())


@dataclass
class StepOutcome:
    """The combined reports of all ranks.

    Attributes:
        bad: (rank, parameter) of gradients that are not finite, the first of each rank.
        unused: parameters whose gradient is zero on every rank that holds them.
        ratio: norm of the residuals over that of the gradients; None if they were not compared.
        filled: first name of a part to the sum of `StepReport.filled` over the part's ranks.
        seconds: first name of a part to the seconds of the slowest of its ranks.
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
    """Exchange the reports of all ranks and combine them.

    Args:
        report: report of this rank.
        group: the ranks of the step.
        groups_of: parameters and parts that only some ranks of the step hold, to these ranks (None
            is this process alone).
        device: device of messages.
        operation: name for error messages.

    Raises:
        ValueError: on every rank: a rank has failed, or steps or options of the ranks differ.
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
        """Return the rows of the ranks that hold a parameter."""
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
