"""Agreement: ranks compare their arguments before they communicate, in one message.

Every rank of a group makes an `Agreement`, checks its arguments inside it, and compares the values
that must be equal on every rank. Then either all ranks go on, or all ranks raise the same error.
The message has a fixed length, so that ranks that call different operations can still compare. A
call that needs more than a kilobyte is followed by a second message.

A module passes all of its options as a single fact, a mapping. The message holds only a checksum of
the mapping; if the checksums differ, a second message finds the option that differs and names it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import c10d, shared_memory, streams
from moe_ext.comm.failures import (
    RankFailureError,
    naming_failed_ranks,
    process_identity,
    remember_processes,
)
from moe_ext.comm.groups import global_rank, group_ranks, group_size, small_message_device
from moe_ext.comm.pending import start_gather_into
from moe_ext.comm.reports import SHARED_ALL_GATHER, Collective, Underway
from moe_ext.comm.shared_memory import NOBODY, Neighbours, known

_TEXT_BYTES = 1024
_LONGEST_FACT = 64
# Bits of a checksum. With 20 bits the sum over ranks of squared checksums is exact in float64 for
# up to 2^13 ranks.
_MARK_BITS = 20
# Number of integers that `process_identity` returns.
_IDENTITY = 2
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, RuntimeError, FileNotFoundError)
}

Problem = str | Exception | None

# Seconds that `meet` waits. Two ranks may reach the call at different times because one of them
# writes a file or validates first.
MEETING_SECONDS = 60.0
# Limits for each group: calls whose answers are kept, and messages that may wait to be read.
_MOST_ANSWERS = 64
_MOST_UNREAD = 64


def share(
    values: Sequence[int], group: ProcessGroup, device: torch.device, *, operation: str
) -> list[list[int]]:
    """Gather a fixed number of integers from every rank, in group order.

    The message also carries the process identity of every rank, so that later errors can name the
    process of a rank that failed.

    NOTE: device-to-host sync, since the callers branch on the result.
    """
    rows: list[list[int]] = _gathered(_message(values, device), group, operation).tolist()
    remember_processes(group_ranks(group), [(row[0], row[1]) for row in rows])
    return [row[_IDENTITY:] for row in rows]


def neighbours(group: ProcessGroup, device: torch.device, operation: str) -> Neighbours:
    """Return the ranks of this group that are on this host.

    The first call for a group exchanges messages, so every rank of the group must make it.
    """
    if device.type != "cpu":
        return NOBODY

    def tell(values: list[int]) -> list[list[int]]:
        row = torch.tensor([values], dtype=torch.int64, device=device)
        found = row.new_empty(group_size(group), len(values))
        return start_gather_into(found, row, group, operation).wait().tolist()

    return known.get(group) or shared_memory.meet(group, tell)


def gather_into(found: Tensor, sent: Tensor, group: ProcessGroup, operation: str) -> Tensor:
    """Gather a contiguous tensor of every rank, without counting or comparing the call.

    Raises:
        RankFailureError: a rank died or did not answer; the message names it.
    """
    near = neighbours(group, sent.device, operation)
    if not near.are_all:
        return start_gather_into(found, sent, group, operation).wait()
    with naming_failed_ranks(group, operation):
        post = functools.partial(near.memory.all_gather, found, sent)
        Underway(post, Collective(SHARED_ALL_GATHER, group, sent)).wait()
    return found


def _gathered(message: Tensor, group: ProcessGroup, operation: str) -> Tensor:
    """Gather the messages of all ranks, without counting them as traffic."""
    size = group_size(group)
    if size == 1:
        return message
    found = message.new_empty(size * message.shape[0], message.shape[1])
    return gather_into(found, message, group, operation)


def _message(values: Sequence[int], device: torch.device) -> Tensor:
    """Return this rank's row of the table that `share` gathers."""
    return torch.tensor([[*process_identity(), *values]], dtype=torch.int64, device=device)


class Agreement:
    """Agreement of the ranks of a group before they exchange: all go on, or all raise one error.

    A function that exchanges opens an agreement, checks its arguments inside, and compares last::

        with Agreement("ring_attention", group, q.device) as agreement:
            check(q, k, v)
            rows = agreement.compare({"dtype": q.dtype}, values=[q.shape[2]])

    With nothing to check, write `Agreement("DeMo", group).compare(facts)`. An agreement promises:

    - An error before `compare` is sent to the other ranks instead of the facts. Every rank raises
      it with its text and the number of the rank. Its class is kept if it is in `_ERRORS`, and is
      ValueError otherwise.
    - A fact that differs raises a ValueError on every rank, with the value of each rank.
    - A rank that died or does not answer is named by a RankFailureError. If the error of a rank is
      itself a RankFailureError of another group, every rank raises it with the ranks it names.
    - When an error is raised, every rank has sent the same messages. The group therefore stays
      usable as long as all of its processes live.
    - A block that ends without an error and without `compare` sends nothing. A caller uses this
      form before it calls a function that compares under the same name.
    - An error after `compare` is not sent to other ranks, because it must follow from values that
      are equal on all of them. For code that runs between two exchanges, use `reports.telling`.

    Args:
        operation: name for messages, compared like a fact.
        group: the ranks; None is this process alone.
        device: device of the group's messages; None chooses the one for small messages.
        validate: compare with the other ranks. If False, only an error of this rank is raised.
        repeats: equal facts and values on this rank imply equal values on all ranks. On a device
            with streams, a repeated call then returns the answer of the earlier call without a
            host synchronisation. Its message is still sent, and a later call raises any
            difference that the message shows.
    """

    __slots__ = ("_compared", "_device", "_group", "_operation", "_validate", "repeats")

    def __init__(
        self,
        operation: str,
        group: ProcessGroup | None,
        device: torch.device | None = None,
        *,
        validate: bool = True,
        repeats: bool = False,
    ) -> None:
        self._operation, self._group, self._device = operation, group, device
        self._validate, self.repeats = validate, repeats
        self._compared = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self._compared:
            self.compare({}, problem=error)

    def compare(
        self,
        facts: Mapping[str, object],
        *,
        values: Sequence[int] = (),
        problem: Problem = None,
    ) -> list[list[int]]:
        """Send facts and values to the other ranks, and compare the facts with theirs.

        NOTE: device-to-host sync, with `validate` and more than one rank.

        Args:
            facts: name to value; the text of each value must be equal on every rank. A long text
                is compared by its checksum. If the checksums differ, a second message finds the
                first difference. A fact may be a mapping of further facts, which is also compared
                by checksum; the error then names the entry that differs.
            values: integers to send to the other ranks; they may differ between ranks.
            problem: an error that was not raised inside the context, or its text in the form
                "expected <arg> to be <rule>, got <value>"; None if this rank has none.

        Returns:
            The values of every rank, in group order; without `validate` those of this rank alone.

        Raises:
            ValueError: on every rank, if a fact differs or a rank has a problem; the message names
                the rank. An exception passed as `problem` keeps its class.
            RankFailureError: a rank died or did not answer.
        """
        self._compared = True
        operation, group, device = self._operation, self._group, self._device
        if not self._validate or group_size(group) == 1:
            if isinstance(problem, Exception):
                raise problem
            if problem is not None:
                raise ValueError(f"{operation}: {problem}")
            return [list(values)]
        assert group is not None
        if device is None:
            device = small_message_device(group)
        mine = _encoded(operation, facts, problem, values)
        told = _told.setdefault(group, _Told())
        told.read()
        if not self.repeats or not streams.has_streams(device):
            texts = _share_bytes(mine, group, device, operation)
            return _compared(operation, facts, problem, group, texts, device)
        if mine in told.answers:
            answer = told.answers[mine]
            gathered = _gathered(answer.message, group, operation)
            compare = functools.partial(_compared, operation, facts, None, group)
            told.unread.append((streams.HostCopy(gathered), answer, compare))
            return answer.values
        if len(mine) > _TEXT_BYTES and problem is not None:
            # Ranks that already know the answer to their call send no second message, so the
            # problem is shortened until it fits into the first one.
            mine = _encoded(operation, {}, ValueError(str(problem)[: _TEXT_BYTES // 2]), ())
        texts = _share_bytes(mine, group, device, operation)
        found = _compared(operation, facts, problem, group, texts, None)
        if all(len(text) <= _TEXT_BYTES for text in texts):
            told.remember(mine, _Answer(found, texts, _message(_first_words(mine), device)))
        return found


@dataclass
class _Answer:
    """Values and texts that the ranks sent in a call, and this rank's message on the device."""

    values: list[list[int]]
    texts: list[bytes]
    message: Tensor


@dataclass
class _Told:
    """Answers of a group's ranks by this rank's message, and messages that are not read yet."""

    answers: dict[bytes, _Answer] = field(default_factory=dict)
    unread: deque[tuple[streams.HostCopy, _Answer, Callable[..., object]]] = field(
        default_factory=deque
    )

    def remember(self, mine: bytes, answer: _Answer) -> None:
        if len(self.answers) == _MOST_ANSWERS:
            self.answers.clear()
        self.answers[mine] = answer

    def read(self) -> None:
        """Compare the messages that have arrived. Wait if more than `_MOST_UNREAD` are unread."""
        while self.unread and (len(self.unread) > _MOST_UNREAD or self.unread[0][0].is_there()):
            copy, answer, compare = self.unread.popleft()
            texts = _texts([row[_IDENTITY:] for row in copy.rows()])
            if texts != answer.texts:
                compare(texts, None)


_told: weakref.WeakKeyDictionary[ProcessGroup, _Told] = weakref.WeakKeyDictionary()


def _compared(
    operation: str,
    facts: Mapping[str, object],
    problem: Problem,
    group: ProcessGroup,
    texts: Sequence[bytes],
    device: torch.device | None,
) -> list[list[int]]:
    """Return the values of every rank from the texts of all ranks, or raise.

    With a device, ranks exchange further messages to find the first difference in long facts.
    """
    ranks = group_ranks(group)
    # A rank that reuses an earlier answer reads the first message only. A call longer than that
    # message arrives without its end.
    cut = [rank for rank, text in zip(ranks, texts, strict=True) if not text.endswith(b"}")]
    if cut:
        raise ValueError(
            f"{operation}: expected every rank to make the call that it made with these arguments "
            f"before, got another one on rank {cut[0]}"
        )
    calls = [json.loads(text) for text in texts]
    for rank, call in zip(ranks, calls, strict=True):
        if call["problem"] is not None:
            text, missed = f"{operation}: {call['problem']} on rank {rank}", call["ranks"]
            # A RankFailureError is raised here with the ranks that it names on the other rank.
            error = (
                _ERRORS[call["error"]](text)
                if missed is None
                else RankFailureError(text, tuple(missed))
            )
            raise error from problem if isinstance(problem, Exception) else None
    check_equal_over_ranks("the operation", [c["operation"] for c in calls], group, operation)
    if device is not None and any(call["names"] != calls[0]["names"] for call in calls):
        _check_by_name(facts, group, device, operation)
    for i, (name, fact) in enumerate(facts.items()):
        told = [call["facts"][i] if i < len(call["facts"]) else "nothing" for call in calls]
        long = any("(checksum " in text for text in told)
        if len(set(told)) > 1 and long and device is not None:
            if isinstance(fact, Mapping):
                _check_by_name(fact, group, device, operation)
            texts = _share_bytes(str(fact).encode(), group, device, operation)
            told = _from_first_difference([text.decode() for text in texts])
        check_equal_over_ranks(name, told, group, operation)
    return [call["values"] for call in calls]


def _check_by_name(
    facts: Mapping[str, object], group: ProcessGroup, device: torch.device, operation: str
) -> None:
    """Raise ValueError for the first fact that differs, where ranks may have different names."""
    mine: dict[str, str] = {}
    for name, fact in facts.items():
        options = fact if isinstance(fact, Mapping) else {name: fact}
        mine.update((option, str(value)) for option, value in options.items())
    texts = _share_bytes(json.dumps(mine).encode(), group, device, operation)
    told: list[dict[str, str]] = [json.loads(text) for text in texts]
    for name in dict.fromkeys(name for of_rank in told for name in of_rank):
        values = [of_rank.get(name, "nothing") for of_rank in told]
        if len(set(values)) > 1 and max(map(len, values)) > _LONGEST_FACT:
            values = _from_first_difference(values)
        check_equal_over_ranks(name, values, group, operation)


class SummedOptions:
    """Comparison of options that travels inside a sum over ranks which is made in any case.

    The caller appends a checksum and its square to the numbers that it sums. If all P ranks have
    the same checksum, P times the sum of squares equals the square of the sum. Otherwise it is
    larger.

    Args:
        operation: name for messages.

    Attributes:
        now: the options of this rank, by name.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.now: Mapping[str, object] = {}
        self._compared: set[ProcessGroup] = set()
        self._unread: tuple[streams.HostCopy, list[Sequence[ProcessGroup]]] | None = None

    def begin(self, over: Sequence[Sequence[ProcessGroup]] = ()) -> None:
        """Check the sums of the step before, which `check` left unread on a device with streams.

        Args:
            over: groups whose message lengths depend on the options. The options are compared over
                each such group in a separate message, once.
        """
        self._read()
        new = dict.fromkeys(g for groups in over for g in groups if g not in self._compared)
        if new:
            self._agree([*new])
            self._compared.update(new)

    def marks(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the checksum of `now` and its square, `[2]`, to be summed over the ranks."""
        number = checksum(self.now) % (1 << _MARK_BITS)
        return torch.tensor([number, number * number], dtype=dtype, device=device)

    def check(self, sums: Sequence[Tensor], over: Sequence[Sequence[ProcessGroup]]) -> None:
        """Compare sums of `marks`, each over some groups.

        Raises:
            ValueError: options differ; raised on every rank. On a device with streams the next
                `begin` raises it.
        """
        if sums:
            self._unread = streams.HostCopy(torch.stack([*sums])), [*over]
            if not streams.has_streams(sums[0].device):
                self._read()

    def _read(self) -> None:
        if self._unread is None:
            return
        (copy, over), self._unread = self._unread, None
        for row, groups in zip(copy.rows(), over, strict=True):
            total, squares = map(int, row)
            if math.prod(map(group_size, groups)) * squares != total * total:
                self._agree(groups)
                raise ValueError(
                    f"{self._operation}: expected options to be equal on every rank, got others in "
                    "the step before"
                )

    def _agree(self, groups: Sequence[ProcessGroup]) -> None:
        """Compare the options over each group; a difference in one is raised in all of them."""
        problem: Problem = None
        for group in groups:
            try:
                Agreement(self._operation, group).compare({"options": self.now}, problem=problem)
            except ValueError as error:
                problem = error
        if isinstance(problem, Exception):
            raise problem


def meet(operation: str, group: ProcessGroup | None, *, hint: str) -> None:
    """Wait until every rank of a group makes this call; guards calls that one rank may make alone.

    Ranks meet through the store. Nothing is sent over the group, which stays usable if a rank does
    not come.

    Args:
        operation: name for messages, and for the meeting; the n-th call of a rank meets the n-th
            call of the others.
        group: the ranks; None is this process alone.
        hint: advice, appended to the message.

    Raises:
        RuntimeError: a rank did not come within a minute.
    """
    if group_size(group) == 1:
        return
    assert group is not None
    ranks = group_ranks(group)
    where = f"moe_ext/meet/{operation}/{'_'.join(map(str, ranks))}"
    times = c10d.times()
    keys = {rank: f"{where}/{times[where]}/{rank}" for rank in ranks}
    store, me = c10d.default_store(), global_rank()
    store.set(keys[me], "1")
    try:
        store.wait(list(keys.values()), timedelta(seconds=MEETING_SECONDS))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if missing:
            # A rank that comes later must not find this key and take this rank for waiting.
            store.delete_key(keys[me])
            raise RuntimeError(
                f"{operation}: expected every rank of {list(ranks)} to call it, since each holds "
                f"another part, got no call of rank {missing[0]} within {MEETING_SECONDS:g} s{hint}"
            ) from error
    times[where] += 1


def check_equal_over_ranks(
    name: str, values: Sequence[object], group: ProcessGroup, operation: str
) -> None:
    """Raise ValueError with every rank's value unless all are equal; `values` in group order."""
    # The texts are compared, since NaN is not equal to itself.
    if any(repr(value) != repr(values[0]) for value in values):
        found = ", ".join(
            f"{v} on rank {r}" for r, v in zip(group_ranks(group), values, strict=True)
        )
        raise ValueError(f"{operation}: expected {name} to be equal on every rank, got {found}")


def is_nonfinite(x: Tensor) -> bool:
    """Return True if an element is NaN or infinite; one pass. NOTE: device-to-host sync."""
    if x.numel() == 0:
        return False
    low, high = torch.aminmax(x.detach())
    return not bool(torch.isfinite(low) & torch.isfinite(high))


def options_of(owner: object, name: str = "") -> dict[str, object]:
    """Return the arguments that an object was made with, if it keeps them under their names.

    Args:
        owner: object of a class of this package or of a user's subclass. Arguments that only the
            subclass has are left out, since they may differ between ranks for a good reason. An
            object of any other class has no options.
        name: prefix of the names in messages.

    Returns:
        Name to value. An object is represented by its class, a function by its name, a dataclass
        by its fields. Tensors, groups and devices are left out because each rank has its own, and
        so are the names in `FREE_TO_DIFFER` of the class.
    """
    found: dict[str, object] = {}
    for argument in option_names(owner):
        option = f"{name}.{argument}" if name else argument
        found.update(told_option(option, getattr(owner, argument)))
    return found


def option_names(owner: object) -> list[str]:
    """Return the names of the arguments that `options_of` returns."""
    ours = [c for c in type(owner).__mro__ if c.__module__.startswith("moe_ext.")]
    free = getattr(owner, "FREE_TO_DIFFER", ())
    found = []
    for argument in _arguments_of(ours[0]) if ours else ():
        value = getattr(owner, argument, dataclasses.MISSING)
        of_rank = isinstance(value, (Tensor, ProcessGroup, torch.device))
        kept = value is not dataclasses.MISSING and not inspect.ismethod(value)
        if kept and not of_rank and argument not in free:
            found.append(argument)
    return found


@functools.cache
def _arguments_of(made: type) -> tuple[str, ...]:
    return tuple(inspect.signature(made).parameters)


def told_option(name: str, value: object) -> dict[str, object]:
    """Return an option under its name, and the fields of a dataclass under theirs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: type(value).__name__, **options_of(value, name)}
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, tuple, list)):
        return {name: value}
    # The repr of an object may hold its address, which differs between ranks.
    return {name: getattr(value, "__qualname__", type(value).__qualname__)}


def checksum(options: Mapping[str, object]) -> int:
    """Return a checksum of 32 bits over names and values."""
    return zlib.crc32(json.dumps({name: str(value) for name, value in options.items()}).encode())


def _shortened(fact: object) -> str:
    if isinstance(fact, Mapping):
        return f"{len(fact)} options (checksum {checksum(fact):08x})"
    text = str(fact)
    if len(text) <= _LONGEST_FACT:
        return text
    return f"{text[:40]}... (checksum {zlib.crc32(text.encode()):08x})"


def _from_first_difference(texts: list[str]) -> list[str]:
    """Return each text from shortly before the first difference, with the number of that item."""
    same = len(os.path.commonprefix(texts))
    item = texts[0].count(", ", 0, same)
    start = texts[0].rfind(", ", 0, max(texts[0].rfind(", ", 0, same), 0)) + 2 if item > 1 else 0
    if same - start >= _LONGEST_FACT // 2:
        # The differing item begins too early for its difference to be shown.
        start = same - _LONGEST_FACT // 2
    ends = [min(start + _LONGEST_FACT, len(text)) for text in texts]
    return [
        f"{'... ' * (start > 0)}{text[start:end]}{'...' * (end < len(text))} (item {item})"
        for text, end in zip(texts, ends, strict=True)
    ]


def _encoded(
    operation: str, facts: Mapping[str, object], problem: Problem, values: Sequence[int]
) -> bytes:
    """Return operation, facts, values and problem of a call as JSON."""
    text = None if problem is None else str(problem).removeprefix(f"{operation}: ")
    kind = type(problem).__name__
    call = {
        "operation": operation,
        "facts": [_shortened(fact) for fact in facts.values()],
        "names": zlib.crc32("\n".join(facts).encode()),
        "values": list(values),
        "problem": text,
        "error": kind if kind in _ERRORS else ValueError.__name__,
        "ranks": list(problem.ranks) if isinstance(problem, RankFailureError) else None,
    }
    return json.dumps(call).encode()


def _share_bytes(
    mine: bytes, group: ProcessGroup, device: torch.device, operation: str
) -> list[bytes]:
    """Return the bytes of every rank, in group order.

    One message, and a second one if the bytes of any rank do not fit into the first.
    """
    rows = share(_first_words(mine), group, device, operation=operation)
    longest = max(row[0] for row in rows)
    if longest > _TEXT_BYTES:
        more = share(_words(mine, -(-longest // 8)), group, device, operation=operation)
        rows = [[row[0], *words] for row, words in zip(rows, more, strict=True)]
    return _texts(rows)


def _first_words(mine: bytes) -> list[int]:
    """Return the length of a text and the part of it that fits into the first message."""
    return [len(mine), *_words(mine[:_TEXT_BYTES], _TEXT_BYTES // 8)]


def _texts(rows: list[list[int]]) -> list[bytes]:
    """Return the bytes of every rank from rows of length and words."""
    return [struct.pack(f"<{len(words)}q", *words)[:length] for length, *words in rows]


def _words(text: bytes, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", text.ljust(8 * count))
