"""What a collective does, as a list of stages: operators, and messages between the ranks.

One description serves every path: `run_stages` interprets it in Python, `moe_ext._runtime` without
the interpreter's lock. Both call the same operators on the same tensors, so that they give the same
bits. Messages travel while later stages compute; a stage that touches their memory waits for them.

Shapes: P ranks of the group; messages are contiguous.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.distributed.groups import group_rank, group_size

# torch 2.13 warns of the name that earlier versions have.
_ALL_GATHER = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)

# Of messages that csrc/runtime/stage_messages.cpp sends too, apart from the caller's; the number of
# the message is added.
_EXCHANGE_TAG = 0x6D780000


MESSAGES = ("all_to_all", "all_gather", "all_reduce")


@dataclass(frozen=True)
class Slot:
    """Where a tensor will be when the stages run."""

    index: int


@dataclass(frozen=True)
class Stage:
    """One step: an operator of torch, or a message.

    Attributes:
        name: "aten::add_.Tensor" and the like; or one of `MESSAGES`; or "scratch" or "wait".
        args: constants, slots and lists of slots, in the order of the operator's schema.
        outputs: slots that are filled.
    """

    name: str
    args: tuple[Any, ...]
    outputs: tuple[int, ...]


@dataclass
class Stages:
    """A list of stages and the slots that they use; the first `num_inputs` are given by the caller.

    Attributes:
        undo: pairs of slots; when a stage fails, the first of each is overwritten with the second.
        results: slots of what is returned.
    """

    num_inputs: int
    steps: list[Stage] = field(default_factory=list)
    undo: list[tuple[int, int]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    num_slots: int = 0
    # The same for `moe_ext._runtime`, made at its first use.
    compiled: Any = None

    def __post_init__(self) -> None:
        self.num_slots = self.num_inputs

    def inputs(self) -> tuple[Slot, ...]:
        """Slots of what the caller gives."""
        return tuple(Slot(index) for index in range(self.num_inputs))

    def call(self, name: str, *args: Any) -> Slot:
        """Add an operator that returns one tensor."""
        return self.call_many(name, 1, *args)[0]

    def call_many(self, name: str, num_outputs: int, *args: Any) -> tuple[Slot, ...]:
        """Add an operator that returns `num_outputs` tensors."""
        first = self.num_slots
        self.num_slots += num_outputs
        outputs = tuple(range(first, self.num_slots))
        self.steps.append(Stage(name, args, outputs))
        return tuple(Slot(index) for index in outputs)

    def all_to_all(self, sent: Slot, num_bytes: int | None = None) -> Slot:
        """Part p of P equal parts goes to rank p; returns what came, in rank order.

        Args:
            sent: what to send.
            num_bytes: of what will come, where that is known beforehand and the same on all ranks:
                it is then asked for before the first stage, so that it need not wait for what goes.
        """
        return self.call("all_to_all", sent, num_bytes)

    def all_gather(self, sent: Slot, num_bytes: int | None = None) -> Slot:
        """One row of what every rank sent, in rank order; args as `all_to_all`."""
        return self.call("all_gather", sent, num_bytes)

    def all_reduce(self, x: Slot) -> None:
        """Sum over the ranks, in place; of any shape, and nothing where it is empty."""
        self.call_many("all_reduce", 0, x)

    def wait(self) -> None:
        """Later stages begin when all messages have come and gone: none of them can fail then."""
        self.call_many("wait", 0)

    def scratch(self, like: Slot, num_bytes: int, dtype: torch.dtype = torch.uint8) -> Slot:
        """Memory on the device of `like` that is given back at the end: no result may be in it."""
        room = self.call("scratch", like, num_bytes)
        return room if dtype is torch.uint8 else self.call("aten::view.dtype", room, dtype)

    def keep(self, x: Slot, num_bytes: int) -> None:
        """Remember a tensor that later stages change, to put it back when one of them fails."""
        bits = self.call("aten::view.dtype", x, torch.uint8)
        saved = self.call("aten::copy_", self.scratch(x, num_bytes), bits)
        self.undo.append((bits.index, saved.index))


@functools.cache
def _operator(name: str) -> tuple[Any, tuple[str, ...]]:
    """The overload of a qualified name, and the names of its arguments that only go by keyword."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    keywords = tuple(a.name if a.kwarg_only else "" for a in found._schema.arguments)
    return found, keywords


def sent_bytes(name: str, num_bytes: int, size: int) -> int:
    """What leaves a rank of `size` for a message of `num_bytes`."""
    if name == "all_gather":
        return (size - 1) * num_bytes
    if name == "all_to_all":
        return (size - 1) * num_bytes // size
    return 2 * (size - 1) * num_bytes // size


class _Pool:
    """Memory for what stages need for a while.

    New memory has to be mapped page by page, which takes longer than what is done with it. An
    accelerator's allocator does the same by itself.
    """

    def __init__(self, most_bytes: int) -> None:
        self._free: list[Tensor] = []
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int, like: Tensor) -> Tensor:
        """A row of bytes on the device of `like`."""
        if like.device.type == "cpu":
            with self._lock:
                # The least that is enough, and not more than twice of it.
                fitting = [x for x in self._free if num_bytes <= x.numel() <= 2 * num_bytes]
                if fitting:
                    best = min(fitting, key=lambda x: x.numel())
                    self._free = [x for x in self._free if x is not best]
                    return best
        return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)

    def give_back(self, rows: list[Tensor]) -> None:
        """For the next ones; those unused for the longest time go."""
        with self._lock:
            self._free += [x for x in rows if x.device.type == "cpu"]
            while self.num_bytes() > self._most_bytes:
                self._free.pop(0)

    def num_bytes(self) -> int:
        """Of what waits to be taken."""
        return sum(x.numel() for x in self._free)


_pool = _Pool(2**27)


@dataclass
class _Underway:
    """A message: its memory, what was sent last, and what has to end before it is touched."""

    tensors: list[Tensor]
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _Messages:
    """`Messages` of csrc/runtime/stage_messages.h: the messages of one run.

    Gloo's own collectives ask for data behind the data that they send, so that what comes waits for
    what goes: twice the time on a slow link. Here everything is asked for first.
    """

    def __init__(self, group: ProcessGroup | None, take: Callable[[int, Tensor], Tensor]) -> None:
        self._group, self._take = group, take
        self._size, self._rank = group_size(group), group_rank(group)
        self._num_posted = 0
        self._expected: dict[int, _Underway] = {}
        self._underway: list[_Underway] = []

    def expect(self, number: int, num_bytes: int, like: Tensor) -> None:
        """Ask for what the message of that number will bring."""
        if num_bytes and self._size > 1 and like.device.type == "cpu":
            self._expected[number] = self._receive(number, self._take(num_bytes, like))

    def post(self, name: str, x: Tensor) -> Tensor | None:
        """Send a message; returns what it will fill, None for one in place."""
        number = self._num_posted
        self._num_posted += 1
        if name == "all_reduce":
            if self._size > 1 and x.numel():
                work = dist.all_reduce(x, group=self._group, async_op=True)
                self._underway.append(_Underway([x], [work]))
            return None
        x = x.view(-1)
        if self._size == 1:
            return x
        on_cpu = x.device.type == "cpu"
        found = self._expected.pop(number, None)
        if found is None:
            room = self._take(x.nbytes * (self._size if name == "all_gather" else 1), x)
            asks = on_cpu and x.numel() > 0
            found = self._receive(number, room) if asks else _Underway([room], [])
        out = found.tensors[0].view(x.dtype)
        if x.numel() and on_cpu:
            self._send(number, name, found, x.view(torch.uint8))
        elif x.numel():
            call = getattr(dist, _ALL_GATHER) if name == "all_gather" else dist.all_to_all_single
            found.works.append(call(out, x, group=self._group, async_op=True))
        found.tensors.append(x)
        self._underway.append(found)
        return out

    def wait_for(self, tensors: Sequence[Tensor]) -> None:
        """Wait for the messages that read or fill memory of some tensors."""
        if not self._underway:
            return
        touched = {x.untyped_storage().data_ptr() for x in tensors}
        for message in list(self._underway):
            if any(x.untyped_storage().data_ptr() in touched for x in message.tensors):
                message.wait()
                self._underway.remove(message)

    def wait(self) -> None:
        """Wait for all."""
        for message in self._underway:
            message.wait()
        self._underway.clear()

    def _receive(self, number: int, out: Tensor) -> _Underway:
        theirs, tag = out.chunk(self._size), _EXCHANGE_TAG + number
        works = []
        for step in range(1, self._size):
            peer = (self._rank - step) % self._size
            works.append(dist.irecv(theirs[peer], group=self._group, group_src=peer, tag=tag))
        return _Underway([out], works)

    def _send(self, number: int, name: str, message: _Underway, x: Tensor) -> None:
        out, tag = message.tensors[0], _EXCHANGE_TAG + number
        mine = [x] * self._size if name == "all_gather" else x.chunk(self._size)
        for step in range(1, self._size):
            peer = (self._rank + step) % self._size
            message.works.append(dist.isend(mine[peer], group=self._group, group_dst=peer, tag=tag))
        out.chunk(self._size)[self._rank].copy_(mine[self._rank])


def message(name: str, x: Tensor, group: ProcessGroup | None) -> Tensor | None:
    """Send `x` as one of `MESSAGES`; returns what came, None for one in place."""
    messages = _Messages(
        group, lambda num_bytes, like: like.new_empty(num_bytes, dtype=torch.uint8)
    )
    found = messages.post(name, x)
    messages.wait()
    return found


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Those among arguments, and in lists of them."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, list):
            found += [entry for entry in arg if isinstance(entry, Tensor)]
    return found


def _call(name: str, args: Sequence[Any]) -> Any:
    """What an operator returns."""
    operator, keywords = _operator(name)
    plain = [a for a, key in zip(args, keywords, strict=False) if not key]
    named = {key: a for a, key in zip(args, keywords, strict=False) if key}
    return operator(*plain, **named)


def run_stages(
    stages: Stages,
    inputs: Sequence[Tensor],
    group: ProcessGroup | None,
    on_sent: Callable[[str, int], None] | None,
) -> list[Tensor]:
    """Run the stages in this thread; what `moe_ext._runtime.StageRunner.run` does.

    Args:
        stages: what to do.
        inputs: the tensors of the first slots.
        group: whose ranks all run the same stages.
        on_sent: told kind and bytes of every message.
    """
    slots: list[Any] = [*inputs, *[None] * (stages.num_slots - len(inputs))]

    def value(arg: Any) -> Any:
        if isinstance(arg, Slot):
            return slots[arg.index]
        if isinstance(arg, (list, tuple)):
            return [value(entry) for entry in arg]
        return arg

    borrowed: list[Tensor] = []

    def take(num_bytes: int, like: Tensor) -> Tensor:
        borrowed.append(_pool.take(num_bytes, like))
        return borrowed[-1][:num_bytes]

    messages = _Messages(group, take)
    sent = [step for step in stages.steps if step.name in MESSAGES]
    try:
        with torch.no_grad():
            for number, step in enumerate(sent):
                if step.args[1:] and step.args[1] is not None:
                    messages.expect(number, step.args[1], inputs[0])
            for step in stages.steps:
                args = [value(arg) for arg in step.args]
                found: Any = None
                if step.name == "wait":
                    messages.wait()
                elif step.name == "scratch":
                    found = take(args[1], args[0])
                else:
                    messages.wait_for(_tensors(args))
                    if step.name not in MESSAGES:
                        found = _call(step.name, args)
                    else:
                        found = messages.post(step.name, args[0])
                        if on_sent is not None:
                            num_bytes = sent_bytes(step.name, args[0].nbytes, group_size(group))
                            on_sent(step.name, num_bytes)
                if len(step.outputs) == 1:
                    slots[step.outputs[0]] = found
                elif step.outputs:
                    for index, tensor in zip(step.outputs, found, strict=True):
                        slots[index] = tensor
            messages.wait()
    except BaseException:
        for changed, saved in stages.undo:
            if slots[saved] is not None:
                slots[changed].copy_(slots[saved])
        # What was borrowed is not given back: a backend may still write to it.
        raise
    _pool.give_back(borrowed)
    return [slots[index] for index in stages.results]
