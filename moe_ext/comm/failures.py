"""Names the rank that is missing when a collective fails.

The error of a backend names a socket address at best. Here every process that sees a failure writes
a key into the default store and looks for the keys of the other ranks. Ranks without a key are
named in the error. For ranks on the same host the process table tells a dead process from a slow
one. An error of this rank alone, such as a wrong shape, is not a rank failure: it is raised
unchanged, and is stored for ranks that later find this rank missing.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import platform
import re
import time
import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.comm import at_exit, c10d
from moe_ext.comm.groups import group_ranks

GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
# Seconds that a rank stays alive after its diagnosis. The rank that hosts the store must outlive
# the other ranks' last read of it. Without a store, the other ranks would take a process that ends
# at once for a second dead one.
_LINGER_SECONDS = 0.5
_LINGER_WITHOUT_STORE_SECONDS = 2.0

# Words of Gloo, NCCL and c10d in errors about lost connections. These errors have no own class.
_OF_CONNECTIONS = re.compile(
    r"(?<!ProcessGroup)gloo|nccl|connect|time(d |-)?out|socket|broken pipe|reset by peer|closed",
    re.IGNORECASE,
)
_ERROR_KEY = "moe_ext/error"
_BLAME_KEY = "moe_ext/blamed"
# Seconds to wait for the finding of a rank in another group. A rank that finds another rank missing
# also stops using its other groups. There all ranks answer, and its finding follows shortly after.
_BLAME_SECONDS = 2.0

# (host id, process id) of every global rank seen so far; filled by `remember_processes`.
_processes: dict[int, tuple[int, int]] = {}


# The layer whose forward or backward pass is running.
running: ContextVar[weakref.ref[nn.Module] | None] = ContextVar("running", default=None)


class RankFailureError(RuntimeError):
    """A collective failed because ranks died or did not answer.

    Attributes:
        ranks: the global ranks that failed; empty if every rank answered.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class in_layer:
    """Context in which errors about failed ranks name the layer by its path in the model."""

    # This is a class because entering a generator-based context takes several times as long.
    __slots__ = ("_layer", "_token")

    def __init__(self, layer: weakref.ref[nn.Module] | None) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._token = running.set(self._layer)

    def __exit__(self, *_: object) -> None:
        running.reset(self._token)


def with_layer(operation: str) -> str:
    """Add the path of the running layer to the name of an operation. Slow: only for errors."""
    layer = running.get()
    module = None if layer is None else layer()
    if module is None:
        return operation
    parents: dict[int, tuple[str, nn.Module]] = {}
    for found in gc.get_objects():
        # `isinstance` would ask an object for its `__class__`, and proxies may run code for that.
        if issubclass(type(found), nn.Module):
            parents |= {id(child): (name, found) for name, child in found._modules.items()}
    path: list[str] = []
    while id(module) in parents and len(path) < len(parents):
        name, module = parents[id(module)]
        path.insert(0, name)
    return f"{operation} of layer {'.'.join(path)!r}" if path else operation


def process_identity() -> tuple[int, int]:
    """Return (id of host and process namespace, process id). The first fits into an int64."""
    return _host_identity("pid"), os.getpid()


def network_identity() -> int:
    """Return an id of the host and its network namespace."""
    return _host_identity("net")


def _host_identity(kind: str) -> int:
    """Return an id of the host and one namespace of this process. It fits into an int64."""
    namespace = Path(f"/proc/self/ns/{kind}")
    scope = str(namespace.stat().st_ino) if namespace.exists() else ""
    digest = hashlib.sha256(f"{platform.node()}/{scope}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def remember_processes(ranks: tuple[int, ...], identities: list[tuple[int, int]]) -> None:
    """Remember which process runs which global rank."""
    _processes.update(zip(ranks, identities, strict=True))


def known_hosts(ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the host of each global rank as a number from 0; None unless all are known."""
    if any(rank not in _processes for rank in ranks):
        return None
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(_processes[rank][0], len(numbers)) for rank in ranks)


def _state_here(rank: int) -> str:
    """Return the state letter of a rank's process as in /proc; "" if it is not known here.

    X and Z mean that the process has ended, T and t that a signal or a debugger has stopped it.
    """
    host, pid = _processes.get(rank, (0, 0))
    if pid == 0 or host != process_identity()[0]:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    except PermissionError:
        return ""
    stat = Path(f"/proc/{pid}/stat")
    try:
        # A killed child that its parent has not reaped still accepts signals; its state is Z.
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X" if stat.parent.parent.exists() and not stat.exists() else ""


@dataclass
class _RollCall:
    """Findings about the members of a group after a failure."""

    silent: set[int]
    dead: set[int] = field(default_factory=set)
    # Ranks seen in the stopped state. They may have continued and answered since.
    stopped: set[int] = field(default_factory=set)
    store_lost: bool = False
    looked: bool = False
    # The last error that each silent rank has stored.
    errors: dict[int, str] = field(default_factory=dict)
    # The collective that failed on each rank that answered.
    operations: dict[int, str] = field(default_factory=dict)


def _roll_call(group: ProcessGroup, operation: str, grace: float) -> _RollCall:
    """Write this rank's answer, then wait for the answers of the others for up to `grace` seconds.

    The wait ends early when every other member has answered or is known to be dead.
    """
    me = dist.get_rank()
    prefix = "moe_ext/failed"
    call = _RollCall(silent=set(group_ranks(group)) - {me})
    deadline = time.monotonic() + grace
    answered = False
    while True:
        if not call.store_lost:
            try:
                store = c10d.default_store()
                if not answered:
                    store.set(f"{prefix}/{me}", operation)
                    answered = True
                call.silent -= {r for r in call.silent if store.check([f"{prefix}/{r}"])}
                call.looked = True
            except (RuntimeError, ValueError):
                call.store_lost = True
        states = {rank: _state_here(rank) for rank in call.silent}
        call.dead = {rank for rank, state in states.items() if state in ("X", "Z")}
        call.stopped |= {rank for rank, state in states.items() if state in ("T", "t")}
        known = call.silent == call.dead
        # Without the store, only the process table of this host gives information.
        if call.store_lost and (call.dead or not any(states.values())):
            break
        if known or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if not call.store_lost:
        call.errors = _texts(_ERROR_KEY, call.silent)
        call.operations = _texts(prefix, set(group_ranks(group)) - call.silent)
    if len(call.dead) + 1 < dist.get_world_size():
        time.sleep(_LINGER_WITHOUT_STORE_SECONDS if call.store_lost else _LINGER_SECONDS)
    return call


def _write(prefix: str, text: str) -> None:
    """Store a text of this rank under a prefix. Does nothing if the store is gone."""
    with contextlib.suppress(RuntimeError, ValueError):
        c10d.default_store().set(f"{prefix}/{dist.get_rank()}", text)


def _texts(prefix: str, ranks: set[int]) -> dict[int, str]:
    """Texts that ranks have written under a prefix, by rank."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = c10d.default_store()
        known = [rank for rank in sorted(ranks) if store.check([f"{prefix}/{rank}"])]
        return {rank: store.get(f"{prefix}/{rank}").decode() for rank in known}
    return {}


def same_class(name: str) -> type[Exception]:
    """Return the class with which this rank raises an error of another rank."""
    return {"ValueError": ValueError, "TypeError": TypeError}.get(name, RuntimeError)


def mark_told(error: Exception) -> None:
    """Note that the other ranks know of an error."""
    error._moe_ext_told = True  # type: ignore[attr-defined]


def is_told(error: Exception) -> bool:
    """True if the other ranks know of an error."""
    return getattr(error, "_moe_ext_told", False)


def tell_own_error(operation: str, error: Exception) -> None:
    """Store an error of this rank, for ranks that later find this rank missing."""
    _write(_ERROR_KEY, f"{operation}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _named(ranks: set[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(str(rank) for rank in sorted(ranks))}"


def _describe(call: _RollCall, grace: float) -> tuple[str, set[int]]:
    """Return the finding as text, and the ranks at fault."""
    if call.dead:
        return f"{_named(call.dead)} died or ended", call.dead
    if call.store_lost and not call.looked:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher that hosts the store is gone; no rank could be asked", set()
        host = {0} & call.silent
        return "the store is gone; its host, rank 0, has probably died", host
    if call.silent:
        return f"{_named(call.silent)} did not answer within {grace:g} s", call.silent
    if call.stopped:
        return f"{_named(call.stopped)} had been stopped by a signal", call.stopped
    places: dict[str, set[int]] = {}
    for rank, operation in call.operations.items():
        places.setdefault(operation, set()).add(rank)
    where = ", ".join(f"{_named(ranks)} in {operation}" for operation, ranks in places.items())
    return "every rank of the group is alive" + f": {where}" * (len(places) > 1), set()


def _blamed_by_others(group: ProcessGroup) -> tuple[int, set[int]]:
    """Return a rank outside this group, and the ranks that it has found missing."""
    deadline = time.monotonic() + _BLAME_SECONDS
    others = set(range(dist.get_world_size())) - {dist.get_rank()}
    # A group of all ranks has no rank outside.
    if others < set(group_ranks(group)):
        return -1, set()
    while time.monotonic() < deadline:
        texts = _texts(_BLAME_KEY, others)
        for rank, text in texts.items():
            blamed = {int(number) for number in text.split()} - {dist.get_rank()}
            if blamed:
                return rank, blamed
        time.sleep(_POLL_SECONDS)
    return -1, set()


def diagnose(
    group: ProcessGroup, operation: str, error: Exception, *, grace: float = GRACE_SECONDS
) -> RankFailureError:
    """Build the error to raise after `operation` on `group` failed with `error`.

    Blocks for at most `grace` seconds beyond the failure itself.
    """
    call = _roll_call(group, operation, grace)
    finding, blamed = _describe(call, grace)
    if call.looked and not call.silent and not blamed:
        by, blamed = _blamed_by_others(group)
        if blamed:
            finding = f"{_named({by})} misses {_named(blamed)} in another group"
    if not call.store_lost:
        # Ranks of other groups read this finding when they find this rank missing.
        _write(_BLAME_KEY, " ".join(map(str, sorted(blamed))))
    reason = first_line(error)
    for rank, text in call.errors.items():
        finding += f"; the last error of rank {rank} was {text!r}"
    message = (
        f"{operation}: expected every rank of the group {list(group_ranks(group))} to take part, "
        f"but {finding} (seen by rank {dist.get_rank()}; {group.name()} reports: {reason})"
    )
    return RankFailureError(message, tuple(sorted(blamed)))


class naming_failed_ranks:
    """Context that turns a failure of its collectives into a `RankFailureError` that names ranks.

    Args:
        group: group of the collectives inside, None for the default group.
        operation: name of the code inside, for the message.

    Raises:
        RankFailureError: instead of a RuntimeError about a lost connection or a timeout.
    """

    __slots__ = ("_group", "_operation")

    def __init__(self, group: ProcessGroup | None, operation: str) -> None:
        self._group, self._operation = group, operation

    def __enter__(self) -> None:
        at_exit.wait_at_exit()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            name_failed_ranks(self._group, self._operation, error)


def name_failed_ranks(group: ProcessGroup | None, operation: str, error: RuntimeError) -> None:
    """Raise the RankFailureError for an error, as the context `naming_failed_ranks` does.

    Hot paths call this in an except clause, which costs less than a context. Errors of other kinds
    are stored for the other ranks, and this function returns.
    """
    if isinstance(error, RankFailureError) or is_told(error):
        return
    if not isinstance(error, dist.DistError) and not _OF_CONNECTIONS.search(str(error)):
        tell_own_error(operation, error)
        return
    members = dist.group.WORLD if group is None else group
    assert members is not None
    raise diagnose(members, with_layer(operation), error) from error
