"""Agreement: ranks compare their arguments before they communicate, in one message.

Every rank of a group calls `agree` with what has to be equal everywhere and with what is wrong on
this rank, if anything. Afterwards all of them go on, or all of them raise the same error. The
message has one length (a second one follows where a call takes more than a kilobyte to tell), so
that ranks that call different operations understand each other, too.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed import _c10d, comm
from moe_ext.distributed.failures import process_identity, remember_processes
from moe_ext.distributed.groups import global_rank, group_ranks, group_size

_TEXT_BYTES = 1024
_LONGEST_FACT = 64
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, RuntimeError)
}

Problem = str | Exception | None

# Other work of a rank may come between two ranks' calls: writing a file, a validation.
MEETING_SECONDS = 60.0
# How many times the ranks have met, by place and purpose.
_meetings: Counter[str] = Counter()


def share(
    values: Sequence[int], group: ProcessGroup, device: torch.device, *, operation: str
) -> list[list[int]]:
    """Gather a fixed number of integers from every rank, in group order.

    It also learns which process runs which rank, for messages about later failures.

    NOTE: device-to-host sync, since the callers branch on the result.
    """
    local = torch.tensor([[*process_identity(), *values]], dtype=torch.int64, device=device)
    gathered = comm.all_gather(local, group, operation=operation, counted=False)
    rows: list[list[int]] = gathered.tolist()
    remember_processes(group_ranks(group), [(row[0], row[1]) for row in rows])
    return [row[2:] for row in rows]


def agree(
    operation: str,
    facts: Mapping[str, object],
    problem: Problem,
    group: ProcessGroup | None,
    device: torch.device,
    *,
    validate: bool = True,
    values: Sequence[int] = (),
) -> list[list[int]]:
    """Check that every rank of a group makes the same call, and that none has refused its own.

    NOTE: device-to-host sync, with `validate` and more than one rank.

    Args:
        operation: name for messages, compared like a fact.
        facts: what must print alike on every rank, by the name to use in messages; as many on all
            ranks that call this operation. A long text is compared by its checksum, and told from
            its first difference in one message more.
        problem: what is wrong on this rank, "expected <arg> to be <rule>, got <value>", or the
            error to raise; None if nothing is.
        group: the ranks; None is this process alone.
        device: where messages of the group live.
        validate: compare with the other ranks. Without it only a problem of this rank is raised.
        values: integers to tell the others, who need not have the same.

    Returns:
        The values of every rank, in group order; of this rank alone without `validate`.

    Raises:
        ValueError: on every rank: a fact differs, with the value of each rank; or a rank has a
            problem, with the rank. An error given as `problem` keeps its class (ValueError,
            TypeError, RuntimeError).
        RankFailureError: a rank died or did not answer.
    """
    if not validate or group_size(group) == 1:
        if isinstance(problem, Exception):
            raise problem
        if problem is not None:
            raise ValueError(f"{operation}: {problem}")
        return [list(values)]
    assert group is not None
    mine = _encoded(operation, [_shortened(fact) for fact in facts.values()], problem, values)
    calls = [json.loads(text) for text in _share_bytes(mine, group, device, operation)]
    ranks = group_ranks(group)
    for rank, call in zip(ranks, calls, strict=True):
        if call["problem"] is not None:
            error = _ERRORS[call["error"]](f"{operation}: {call['problem']} on rank {rank}")
            raise error from problem if isinstance(problem, Exception) else None
    check_equal_over_ranks("the operation", [c["operation"] for c in calls], group, operation)
    for i, (name, fact) in enumerate(facts.items()):
        told = [call["facts"][i] if i < len(call["facts"]) else "nothing" for call in calls]
        if len(set(told)) > 1 and any("(checksum " in text for text in told):
            texts = _share_bytes(str(fact).encode(), group, device, operation)
            told = _from_first_difference([text.decode() for text in texts])
        check_equal_over_ranks(name, told, group, operation)
    return [call["values"] for call in calls]


def meet(
    operation: str, group: ProcessGroup | None, *, seconds: float | None = None, hint: str = ""
) -> None:
    """Wait until every rank of a group makes this call, for calls that one rank makes by mistake.

    Nothing is sent over the group, so that it stays usable where a rank does not come.

    Args:
        operation: name for messages; ranks meet under it, as often as each of them calls.
        group: the ranks; None is this process alone.
        seconds: to wait at most; None for a minute.
        hint: what to do, behind the message.

    Raises:
        RuntimeError: a rank did not come.
    """
    if group_size(group) == 1:
        return
    assert group is not None
    ranks, patience = group_ranks(group), MEETING_SECONDS if seconds is None else seconds
    where = f"moe_ext/meet/{operation}/{'_'.join(map(str, ranks))}"
    keys = {rank: f"{where}/{_meetings[where]}/{rank}" for rank in ranks}
    store, me = _c10d.default_store(), global_rank()
    store.set(keys[me], "1")
    try:
        store.wait(list(keys.values()), timedelta(seconds=patience))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if missing:
            # A rank that comes later must not think that this one still waits.
            store.delete_key(keys[me])
            raise RuntimeError(
                f"{operation}: expected every rank of {list(ranks)} to call it, since each holds "
                f"another part, got no call of rank {missing[0]} within {patience:g} s{hint}"
            ) from error
    _meetings[where] += 1


def check_equal_over_ranks(
    name: str, values: Sequence[object], group: ProcessGroup, operation: str
) -> None:
    """ValueError naming every rank's value unless all are equal; `values` in group order."""
    if any(value != values[0] for value in values):
        found = ", ".join(
            f"{v} on rank {r}" for r, v in zip(group_ranks(group), values, strict=True)
        )
        raise ValueError(f"{operation}: expected {name} to be equal on every rank, got {found}")


def is_nonfinite(x: Tensor) -> bool:
    """Whether an element is NaN or infinite; one pass. NOTE: device-to-host sync."""
    if x.numel() == 0:
        return False
    low, high = torch.aminmax(x.detach())
    return not bool(torch.isfinite(low) & torch.isfinite(high))


def _shortened(fact: object) -> str:
    text = str(fact)
    if len(text) <= _LONGEST_FACT:
        return text
    return f"{text[:40]}... (checksum {zlib.crc32(text.encode()):08x})"


def _from_first_difference(texts: list[str]) -> list[str]:
    """Rows of values from shortly before the first that differs, with the number of that one."""
    same = len(os.path.commonprefix(texts))
    item = texts[0].count(", ", 0, same)
    start = texts[0].rfind(", ", 0, max(texts[0].rfind(", ", 0, same), 0)) + 2 if item > 1 else 0
    if same - start >= _LONGEST_FACT // 2:
        # Items longer than what is shown.
        start = same - _LONGEST_FACT // 2
    ends = [min(start + _LONGEST_FACT, len(text)) for text in texts]
    return [
        f"{'... ' * (start > 0)}{text[start:end]}{'...' * (end < len(text))} (item {item})"
        for text, end in zip(texts, ends, strict=True)
    ]


def _encoded(operation: str, facts: list[str], problem: Problem, values: Sequence[int]) -> bytes:
    """A call as JSON."""
    text = None if problem is None else str(problem).removeprefix(f"{operation}: ")
    kind = type(problem).__name__
    call = {
        "operation": operation,
        "facts": facts,
        "values": list(values),
        "problem": text,
        "error": kind if kind in _ERRORS else ValueError.__name__,
    }
    return json.dumps(call).encode()


def _share_bytes(
    mine: bytes, group: ProcessGroup, device: torch.device, operation: str
) -> list[bytes]:
    """The bytes of every rank, in group order: one message, and a second one where any is long."""
    words = _words(mine[:_TEXT_BYTES], _TEXT_BYTES // 8)
    rows = share([len(mine), *words], group, device, operation=operation)
    lengths = [row[0] for row in rows]
    rows = [row[1:] for row in rows]
    if max(lengths) > _TEXT_BYTES:
        rows = share(_words(mine, -(-max(lengths) // 8)), group, device, operation=operation)
    texts = [struct.pack(f"<{len(row)}q", *row) for row in rows]
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]


def _words(text: bytes, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", text.ljust(8 * count))
