"""What a collective does, as a list of stages: operators, and messages between the ranks.

One description serves every path: `run_stages` interprets it in Python, `moe_ext._runtime` without
the interpreter's lock. Both call the same operators on the same tensors, so that they give the same
bits.

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

# Of messages that csrc/runtime/stages.cpp sends too, apart from the caller's.
_EXCHANGE_TAG = 0x6D78


@dataclass(frozen=True)
class Slot:
    """Where a tensor will be when the stages run."""

    index: int


@dataclass(frozen=True)
class Stage:
    """One step: an operator of torch, or a message.

    Attributes:
        name: "aten::add_.Tensor" and the like; or "all_to_all", "all_gather", "all_reduce"; or
            "scratch".
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

    def all_to_all(self, sent: Slot) -> Slot:
        """Part p of P equal parts goes to rank p; returns what came, in rank order."""
        return self.call("all_to_all", sent)

    def all_gather(self, sent: Slot) -> Slot:
        """One row of what every rank sent, in rank order."""
        return self.call("all_gather", sent)

    def all_reduce(self, x: Slot) -> None:
        """Sum over the ranks, in place; of any shape, and nothing where it is empty."""
        self.call_many("all_reduce", 0, x)

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

    def __init__(self) -> None:
        self._free: list[Tensor] = []
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
            self._free = [*self._free, *(x for x in rows if x.device.type == "cpu")][-POOLED:]


POOLED = 24
_pool = _Pool()


def _exchange(name: str, out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """All parts to and from all ranks, over Gloo.

    Its own collectives ask for data behind the data that they send, so that what comes waits for
    what goes: twice the time on a slow link. Here everything is asked for first.
    """
    size, rank = group_size(group), group_rank(group)
    theirs = out.chunk(size)
    mine = [x] * size if name == "all_gather" else x.chunk(size)
    works = []
    for step in range(1, size):
        peer = (rank - step) % size
        works.append(dist.irecv(theirs[peer], group=group, group_src=peer, tag=_EXCHANGE_TAG))
    for step in range(1, size):
        peer = (rank + step) % size
        works.append(dist.isend(mine[peer], group=group, group_dst=peer, tag=_EXCHANGE_TAG))
    theirs[rank].copy_(mine[rank])
    for work in works:
        assert work is not None
        work.wait()


def message(
    name: str,
    x: Tensor,
    group: ProcessGroup | None,
    take: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor | None:
    """Send `x` as one of the messages of `Stages`; returns what came, None for one in place.

    Args:
        name: of the message.
        x: what to send.
        group: the ranks.
        take: where the memory for what comes is from; None for new memory.
    """
    size = group_size(group)
    if name == "all_reduce":
        if size > 1 and x.numel():
            dist.all_reduce(x, group=group)
        return None
    if size == 1:
        return x.view(-1)
    num_bytes = size * x.nbytes if name == "all_gather" else x.nbytes
    room = x.new_empty(num_bytes, dtype=torch.uint8) if take is None else take(num_bytes, x)
    out = room.view(x.dtype)
    if x.numel():
        if x.device.type == "cpu":
            _exchange(name, out, x.view(-1), group)
        elif name == "all_gather":
            getattr(dist, _ALL_GATHER)(out, x.view(-1), group=group)
        else:
            dist.all_to_all_single(out, x.view(-1), group=group)
    return out


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

    try:
        with torch.no_grad():
            for step in stages.steps:
                args = [value(arg) for arg in step.args]
                if step.name == "scratch":
                    found: Any = take(args[1], args[0])
                elif "::" not in step.name:
                    found = message(step.name, args[0], group, take)
                    if on_sent is not None:
                        on_sent(step.name, sent_bytes(step.name, args[0].nbytes, group_size(group)))
                else:
                    operator, keywords = _operator(step.name)
                    plain = [a for a, key in zip(args, keywords, strict=False) if not key]
                    named = {key: a for a, key in zip(args, keywords, strict=False) if key}
                    found = operator(*plain, **named)
                if len(step.outputs) == 1:
                    slots[step.outputs[0]] = found
                elif step.outputs:
                    for index, tensor in zip(step.outputs, found, strict=True):
                        slots[index] = tensor
    except BaseException:
        for changed, saved in stages.undo:
            if slots[saved] is not None:
                slots[changed].copy_(slots[saved])
        # What was borrowed is not given back: a backend may still write to it.
        raise
    _pool.give_back(borrowed)
    return [slots[index] for index in stages.results]
