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
# The weights that the gradients so far make, where a table trains without a flush.
UPDATE = "UPDATE"
# Actions of a whole stage: FSDP2's weights, and the reduction of gradients.
OF_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD", UPDATE)
OVERLAP = "OVERLAP_F_B"

_TEXT = re.compile(
    rf"(\d+)({'|'.join(MESSAGES + OF_STAGE + COMPUTE)})(\d*)(?:c(\d+))?(?:s(\d+))?"
    r"(?:v(\d+))?"
)


class Action(NamedTuple):
    """One action of a rank; prints as torch prints it, `2F0` say.

    Attributes:
        stage: number of the stage, from 0.
        kind: "F" forward; "B" backward; "I" and "W" the backward pass in two, gradient of the input
            and gradients of the weights; "SEND_F" and "RECV_F" activations, "SEND_B" and "RECV_B"
            gradients, each of the stage that has sent or receives them; "OVERLAP_F_B" the `parts`
            at once; "UNSHARD", "RESHARD" and "REDUCE_GRAD" of the whole stage; "UPDATE" makes
            `version` of its weights, of the gradients since the version before.
        micro_batch: number of the micro-batch; None for actions of a whole stage.
        chain: number of the chain of stages, where micro-batches go through the ranks in more than
            one direction.
        slice: number of the part of the sequence, where micro-batches are cut along it.
        version: of the weights, where a stage keeps several: 0 those that it begins with.
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
        """Stage, micro-batch and what else there is, in words."""
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
        """Itself, or the parts of an overlap in the order in which they begin: forward first."""
        return tuple(sorted(self.parts or (self,), key=lambda part: part.kind != "F"))

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        more = zip("csv", (self.chain, self.slice, self.version), strict=True)
        number = "" if self.micro_batch is None else self.micro_batch
        return f"{self.stage}{self.kind}{number}" + "".join(f"{k}{n}" for k, n in more if n)

    @classmethod
    def from_text(cls, text: str) -> Action:
        """The action that prints so.

        Raises:
            ValueError: the text is none.
        """
        inside, _, kind = text.strip().removeprefix("(").partition(")")
        if kind == OVERLAP:
            return cls(-1, OVERLAP, parts=tuple(map(cls.from_text, inside.split(";"))))
        found = _TEXT.fullmatch(text.strip())
        # All actions but those of a stage have a micro-batch.
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
    """An action among those of all ranks.

    Attributes:
        rank: that runs it.
        action: that is run.
        like: a number that actions of the same kind, stage and slice have.
        needs: numbers of the steps whose results it takes, and whether they come from another rank.
    """

    rank: int
    action: Action
    like: int
    needs: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class ActionTable:
    """The actions of every rank of a pipeline, in order.

    Rows say nothing of time: a rank begins an action when it has ended the one before, and what the
    action needs has come. A table may have messages (send and receive), as one that runs;
    without them it says what is computed, and `add_messages` adds them.

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
        """(chain, stage) to the rank that runs it: the first that has a forward pass of it."""
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
        """Parts of a micro-batch along its sequence, 1 where it is whole."""
        return 1 + max(a.slice for rank in range(self.num_ranks) for a in self.actions(rank))

    @cached_property
    def steps(self) -> tuple[Step, ...] | None:
        """Actions in an order in which each is behind what it needs; None where there is none.

        Of a table without messages.
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
        """True if it says where to send and to receive."""
        return any(action.kind in MESSAGES for row in self.rows for action in row)

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank, and in the place of an overlap its parts."""
        for action in self.rows[rank]:
            yield from action.parts or (action,)

    def source(self, action: Action) -> Action | None:
        """The forward or backward pass that an F, B or I takes its input from; None of a batch.

        Of a backward pass it has kind "B", though the table may have an "I" there.
        """
        stage, kind, micro_batch, chain, part, _, _ = action
        if kind == "F" and stage > 0:
            return Action(stage - 1, kind, micro_batch, chain, part)
        if kind in ("B", "I") and stage < self.num_stages - 1:
            return Action(stage + 1, "B", micro_batch, chain, part)
        return None

    def receive(self, action: Action) -> Action | None:
        """The receive that an F, B or I waits for; None where its input is of the same rank."""
        source = self.source(action)
        if source is None or self.rank(source) == self.rank(action):
            return None
        return action._replace(kind=f"RECV_{source.kind}", version=0)

    def send(self, action: Action) -> Action | None:
        """The send of what an F, B or I gives; None where it stays on the rank or goes nowhere."""
        if action.kind not in ("F", "B", "I"):
            return None
        kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
        after = action._replace(stage=action.stage + step, kind=kind)
        if not 0 <= after.stage < self.num_stages or self.rank(after) == self.rank(action):
            return None
        return action._replace(kind=f"SEND_{kind}", version=0)

    def rank(self, action: Action) -> int:
        """The rank of an action's stage."""
        return self.rank_of[action.chain, action.stage]

    @staticmethod
    def peer(action: Action) -> Action:
        """The receive of a send, or the send of a receive."""
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        way, what = action.kind.split("_")
        kind = f"{'RECV' if way == 'SEND' else 'SEND'}_{what}"
        return action._replace(stage=action.stage + step, kind=kind)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a line for each rank, as `torch.distributed.pipelining` reads it.

        Chain, slice and version, which torch does not know, stand behind the micro-batch where they
        are not 0: `2F0c1s3v2`.
        """
        with replacing(path) as partial, partial.open("w", newline="") as file:
            csv.writer(file).writerows(self.rows)

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> ActionTable:
        """Read what `write_csv` or torch wrote; torch's empty steps are left out.

        Raises:
            ValueError: a cell is no action.
        """
        with Path(path).open(newline="") as file:
            rows = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
        return cls([[Action.from_text(cell) for cell in row] for row in rows])
