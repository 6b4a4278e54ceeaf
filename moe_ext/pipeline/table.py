"""Actions of each rank of a pipeline in their order: read from and written to torch's CSV form."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from moe_ext._files import replacing

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
# Makes new weights from the gradients so far, in a table that trains without a flush.
UPDATE = "UPDATE"
# Actions of a whole stage: FSDP2 gathers and frees weights and reduces gradients; updates.
OF_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD", UPDATE)
OVERLAP = "OVERLAP_F_B"

_TEXT = re.compile(
    rf"(\d+)({'|'.join(MESSAGES + OF_STAGE + COMPUTE)})(\d*)(?:c(\d+))?(?:s(\d+))?"
    r"(?:v(\d+))?"
)


class Action(NamedTuple):
    """One action of a rank. Its string is that of torch, such as `2F0`.

    Attributes:
        stage: number of the stage, from 0; for messages, of the stage that sends or receives.
        kind: "F" is a forward pass, "B" a backward pass. "I" and "W" are a backward pass in two:
            the gradient of the input, and the gradients of the weights. "SEND_F" and "RECV_F" move
            activations, "SEND_B" and "RECV_B" gradients. "OVERLAP_F_B" runs `parts` at once.
            "UNSHARD", "RESHARD" and "REDUCE_GRAD" are those of FSDP2 for a whole stage. "UPDATE"
            makes `version` of the stage's weights from the gradients since the version before.
        micro_batch: number of the micro-batch; None for actions of a whole stage.
        chain: number of the chain of stages, if micro-batches go through the ranks in more than one
            direction.
        slice: number of the part of the sequence, if micro-batches are cut along it.
        version: version of the weights, if a stage keeps several. A step begins with version 0.
        parts: the actions that run at once.
    """

    stage: int
    kind: str
    micro_batch: int | None = None
    chain: int = 0
    slice: int = 0
    version: int = 0
    parts: tuple[Action, ...] = ()

    def described(self) -> str:
        """Return the stage, the micro-batch, and other numbers that are not 0, in words."""
        if self.parts:
            return " and ".join(part.described() for part in self.parts)
        return (
            f"chain {self.chain}, " * bool(self.chain)
            + f"stage {self.stage}"
            + f", micro-batch {self.micro_batch}" * (self.micro_batch is not None)
            + f", slice {self.slice}" * bool(self.slice)
            + f", version {self.version}" * (self.kind == UPDATE)
        )

    def in_turn(self) -> tuple[Action, ...]:
        """Return the action alone, or the parts of an overlap as they begin: forward first."""
        return tuple(sorted(self.parts or (self,), key=lambda part: part.kind != "F"))

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        more = zip("csv", (self.chain, self.slice, self.version), strict=True)
        number = "" if self.micro_batch is None else self.micro_batch
        return f"{self.stage}{self.kind}{number}" + "".join(f"{k}{n}" for k, n in more if n)

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Return the action whose string is `text`.

        Raises:
            ValueError: the text is not that of an action.
        """
        inside, _, kind = text.strip().removeprefix("(").partition(")")
        if kind == OVERLAP:
            return cls(-1, OVERLAP, parts=tuple(map(cls.from_text, inside.split(";"))))
        found = _TEXT.fullmatch(text.strip())
        # Every action has a micro-batch, except actions of a whole stage.
        if found is None or (found[2] in OF_STAGE) == bool(found[3]):
            raise ValueError(
                "Action.from_text: expected text to be of the form <stage><kind><micro-batch>, "
                f"'2F0' say, got {text!r}"
            )
        stage, kind, micro_batch, *rest = found.groups()
        chain, part, version = (int(number or 0) for number in rest)
        number = int(micro_batch) if micro_batch else None
        return cls(int(stage), kind, number, chain, part, version)


class Step(NamedTuple):
    """An action of `ActionTable.steps`, with the steps that it depends on.

    Attributes:
        rank: rank that runs the action.
        action: the action.
        like: a number that is equal for actions of the same kind, stage and slice.
        needs: numbers of the steps whose results the action takes, each with True if the step is on
            another rank.
    """

    rank: int
    action: Action
    like: int
    needs: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class ActionTable:
    """The actions of every rank of a pipeline, in order.

    Rows have no times: a rank begins an action when the one before has ended and the input is
    there. A table that runs has messages (sends and receives). A table without messages says only
    what is computed, and `add_messages` adds them.

    Args:
        rows: a sequence of actions for each rank.

    Raises:
        ValueError: there is no rank, or no action.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __init__(self, rows: Sequence[Sequence[Action]]) -> None:
        object.__setattr__(self, "rows", tuple(map(tuple, rows)))
        if not any(self.rows):
            raise ValueError(f"ActionTable: expected rows to hold actions, got {rows!r}")

    @cached_property
    def rank_of(self) -> Mapping[tuple[int, int], int]:
        """Map from (chain, stage) to its rank: the first rank with a forward pass of the stage."""
        found: dict[tuple[int, int], int] = {}
        for rank in range(self.num_ranks):
            for action in self.actions(rank):
                if action.kind == "F":
                    found.setdefault((action.chain, action.stage), rank)
        return found

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.rows)

    @cached_property
    def num_stages(self) -> int:
        """Stages of a chain."""
        return 1 + max((stage for _, stage in self.rank_of), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of all chains."""
        every = (a.micro_batch for rank in range(self.num_ranks) for a in self.actions(rank))
        return 1 + max((number for number in every if number is not None), default=-1)

    @cached_property
    def num_slices(self) -> int:
        """Parts of a micro-batch along its sequence; 1 if micro-batches are not cut."""
        return 1 + max(a.slice for rank in range(self.num_ranks) for a in self.actions(rank))

    @cached_property
    def steps(self) -> tuple[Step, ...] | None:
        """All actions, each after those whose results it takes; None if there is no such order.

        Only for a table without messages.
        """
        place: dict[Action, int] = {}
        kinds: dict[tuple[Any, ...], int] = {}
        found: list[Step] = []
        at = [0] * self.num_ranks
        before = -1
        while before < len(found):
            before = len(found)
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row):
                    action = row[at[rank]]
                    parts = action.parts or (action,)
                    sources = [(self.source(part), part) for part in parts]
                    if any(s is not None and s not in place for s, _ in sources):
                        break
                    for stage, kind, micro_batch, chain, part, _, _ in parts:
                        if kind in ("F", "B", "I"):
                            kind = "B" if kind == "I" else kind
                            place[Action(stage, kind, micro_batch, chain, part)] = len(found)
                    like = tuple((part.kind, part.stage, part.slice) for part in parts)
                    needs = tuple(
                        (place[s], self.rank(s) != self.rank(part))
                        for s, part in sources
                        if s is not None
                    )
                    kind_of = kinds.setdefault((bool(action.parts), *like), len(kinds))
                    found.append(Step(rank, action, kind_of, needs))
                    at[rank] += 1
        return tuple(found) if len(found) == sum(map(len, self.rows)) else None

    @cached_property
    def has_messages(self) -> bool:
        """True if the table has sends and receives."""
        return any(action.kind in MESSAGES for row in self.rows for action in row)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank, and the parts of an overlap in its place."""
        for action in self.rows[rank]:
            yield from action.parts or (action,)

    def source(self, action: Action) -> Action | None:
        """Return the pass whose result an F, B or I takes; None if it takes that of no stage.

        A backward pass is returned with kind "B", even if the table has an "I" instead.
        """
        stage, kind, micro_batch, chain, part, _, _ = action
        if kind == "F" and stage > 0:
            return Action(stage - 1, kind, micro_batch, chain, part)
        if kind in ("B", "I") and stage < self.num_stages - 1:
            return Action(stage + 1, "B", micro_batch, chain, part)
        return None

    def receive(self, action: Action) -> Action | None:
        """Return the receive that an F, B or I waits for; None if no other rank gives its input."""
        source = self.source(action)
        if source is None or self.rank(source) == self.rank(action):
            return None
        return action._replace(kind=f"RECV_{source.kind}", version=0)

    def send(self, action: Action) -> Action | None:
        """Return the send of the result of an F, B or I; None if no other rank takes it."""
        if action.kind not in ("F", "B", "I"):
            return None
        kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
        after = action._replace(stage=action.stage + step, kind=kind)
        if not 0 <= after.stage < self.num_stages or self.rank(after) == self.rank(action):
            return None
        return action._replace(kind=f"SEND_{kind}", version=0)

    def rank(self, action: Action) -> int:
        """Return the rank of an action's stage."""
        return self.rank_of[action.chain, action.stage]

    @staticmethod
    def peer(action: Action) -> Action:
        """Return the receive of a send, or the send of a receive."""
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        way, what = action.kind.split("_")
        kind = f"{'RECV' if way == 'SEND' else 'SEND'}_{what}"
        return action._replace(stage=action.stage + step, kind=kind)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a line for each rank, as `torch.distributed.pipelining` reads it.

        Chain, slice and version, which torch does not know, follow the micro-batch if they are not
        0: `2F0c1s3v2`.
        """
        with replacing(path) as partial, partial.open("w", newline="") as file:
            csv.writer(file).writerows(self.rows)

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ActionTable:
        """Read a file that `write_csv` or torch wrote. Empty steps of torch are left out.

        Raises:
            ValueError: a cell is not an action.
        """
        with Path(path).open(newline="") as file:
            rows = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
        return cls([[Action.from_text(cell) for cell in row] for row in rows])
