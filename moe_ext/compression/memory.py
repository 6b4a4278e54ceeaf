"""Error feedback: what a rank still owes, kept by the name of the parameter.

A step writes to other tensors than it reads, so that one that fails leaves everything as it was,
bit for bit.

Shape suffixes: N elements of the parameters that are reduced together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ext.compression._owed import add_at, fold_into, joined, unit_factors

# Kinds of tensors that have an element for each one of the gradient.
ELEMENTWISE = ("residual", "velocity")

_T = TypeVar("_T")


class CodecMemory:
    """What a codec remembers of parameters that are reduced together.

    Args:
        shapes: of the parameters, in the order in which they lie in the flat gradient.
        device: of the gradient.
        key: tells the streams of random numbers of different memories apart.
        seed: of the random numbers.

    Attributes:
        numel: N.
        bitmap: what the caller knows of the blocks that are not zero (see `nonzero_blocks`).
        server_start: first element of the shard whose sum this rank owns.
        marks: numbers that go with what is kept, such as its learning rate.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        device: torch.device,
        *,
        key: int = 0,
        seed: int = 0,
    ) -> None:
        self.shapes = tuple(shapes)
        self.sizes = tuple(math.prod(shape) for shape in self.shapes)
        self.numel = sum(self.sizes)
        self.device = device
        self.key = key
        self.seed = seed
        self.bitmap: Tensor | None = None
        self._carried: dict[str, Any] = {}
        # Of the objects that are carried, until they are made.
        self.loaded: dict[str, Any] = {}
        self._open_carried: dict[str, Any] = {}
        self.server_start = 0
        # Where N elements lie in the parameters, if they are a shard of them: (start, N).
        self.window: tuple[int, int] | None = None
        self._open_start: int | None = None
        self._kept: dict[str, Tensor] = {}
        self._open: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        # Kinds that this step forgets, but for what it has left in `_open`.
        self._taken: set[str] = set()
        self._scales: dict[str, float] = {}
        self.marks: dict[str, float] = {}
        self._open_marks: dict[str, float] = {}
        # What the last `commit` has replaced.
        self._before: tuple[dict[str, Any], dict[str, float], dict[str, Any], int] | None = None

    @property
    def start(self) -> int:
        """Which element of the parameters the first one is."""
        return 0 if self.window is None else self.window[0]

    def open(
        self, scales: Mapping[str, float] | None = None, marks: Mapping[str, float] | None = None
    ) -> None:
        """Begin a step; what an unfinished one has changed is dropped.

        Args:
            scales: factors on kinds of tensors, as on the residual for a new learning rate.
            marks: numbers to keep with what this step leaves.
        """
        self.rollback()
        self._scales, self._open_marks = dict(scales or {}), dict(marks or {})

    def tensor(self, kind: str, numel: int | None = None) -> Tensor:
        """The copy of this step of a float32 tensor, zeros at first, to change in place."""
        if kind in self._open:
            return self._open[kind]
        self._before = None
        kept, scale = self._kept.get(kind), self.factor(kind)
        if kind in self._taken:
            kept = None
        if kept is None:
            working = torch.zeros(self.numel if numel is None else numel, device=self.device)
        else:
            working = self._room_for(kind, kept)
            torch.mul(kept, scale, out=working) if scale != 1.0 else working.copy_(kept)
        self._open[kind] = working
        return working

    def renewed(self, *kinds: str) -> dict[str, Tensor] | None:
        """Tensors to be written in this step, and as `<kind>_in` those of the last, to be read.

        None where `tensor` is needed: for new or open ones, and units other than the residual's.
        """
        found: dict[str, Tensor] = {}
        unused = {*self._kept} - {*self._open, *self._taken}
        scaled = any(kind != "residual" and self.factor(kind) != 1.0 for kind in kinds)
        if scaled or not {*kinds} <= unused or "server" in unused - {*kinds}:
            return None
        self._before = None
        for kind in kinds:
            self._open[kind] = self._room_for(kind, self._kept[kind])
            found.update({kind: self._open[kind], f"{kind}_in": self._kept[kind]})
        return found

    def _room_for(self, kind: str, kept: Tensor) -> Tensor:
        spare = self._spare.pop(kind, None)
        return torch.empty_like(kept) if spare is None else spare

    def factor(self, kind: str) -> float:
        """What makes units of this step of what is kept."""
        return self._scales.get(kind, 1.0)

    def fresh(self, kind: str, numel: int) -> Tensor:
        """Zeros in the place of what was kept, from this step on; for what has another size now."""
        self._before = None
        self._spare.pop(kind, None)
        self._open[kind] = torch.zeros(numel, device=self.device)
        return self._open[kind]

    def whole_residual(self) -> Tensor:
        """The copy of this step of the residual, with what the owner of a shard owes in it.

        For what does not divide the gradient into shards, or divides it otherwise.
        """
        residual_N = self.tensor("residual")
        if "server" in self._kept and "server" not in {*self._open, *self._taken}:
            add_at(residual_N, self._kept["server"], self.server_start, self.factor("server"))
            self._taken.add("server")
        return residual_N

    def keeps_shard(self, start: int, numel: int) -> bool:
        """Whether what is owed for a shard of the sum is that for this one."""
        kept = self._kept.get("server")
        return kept is not None and (self.server_start, kept.numel()) == (start, numel)

    def shard(self, start: int, numel: int) -> Tensor:
        """The copy of this step of what is owed for the shard of the sum that this rank owns.

        Args:
            start: first element of the shard.
            numel: elements of the shard.
        """
        if "server" in self._kept and not self.keeps_shard(start, numel):
            self.whole_residual()
        self._open_start = start
        return self.tensor("server", numel)

    def take_owed(self, grad_N: Tensor) -> bool:
        """Add to a gradient, in place, all that is owed, which is then owed no more.

        Returns:
            Whether anything was owed.
        """
        found = False
        for kind in ("residual", "server"):
            if kind in self._open:
                start = 0 if kind == "residual" else self.server_start
                if kind == "server" and self._open_start is not None:
                    start = self._open_start
                add_at(grad_N, self._open[kind], start)
                self._open[kind].zero_()
            elif kind in self._kept and kind not in self._taken:
                start = 0 if kind == "residual" else self.server_start
                add_at(grad_N, self._kept[kind], start, self.factor(kind))
                self._taken.add(kind)
                self._before = None
            else:
                continue
            found = True
        return found

    def is_taken(self, kind: str) -> bool:
        """Whether this step has taken the tensor of a kind, and left nothing instead."""
        return kind in self._taken and kind not in self._open

    def carry(self, name: str, make: Callable[[], _T], copy: Callable[[_T], _T]) -> _T:
        """The copy of this step of an object that is no tensor, to change in place."""
        if name not in self._open_carried:
            kept = self._carried.get(name)
            made: Any = make() if kept is None else copy(kept)
            if kept is None and name in self.loaded:
                made.load_state_dict(self.loaded[name])
            self._open_carried[name] = made
        found: _T = self._open_carried[name]
        return found

    def has(self, kind: str) -> bool:
        """Whether there is a tensor of this kind."""
        return kind in self._kept or kind in self._open

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor of N elements, one for each parameter, in its shape."""
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each parameter among the N elements."""
        stops = list(itertools.accumulate(self.sizes))
        return list(zip([0, *stops], stops, strict=False))

    def by_parameter(self, flat: Tensor) -> list[Tensor]:
        """A tensor of N elements as one in the shape of each parameter."""
        return self.pieces(flat)

    def take_over(self, kind: str, flat: Tensor) -> None:
        """Keep what this rank had of all elements of the parameters."""
        self.put(kind, flat)

    def rng_state(self, step: int, rank: int) -> Tensor:
        """What `quantize_blockwise` wants for rounding at random."""
        return torch.tensor([self.seed, self.key, step, rank], device=self.device)

    def commit(self, *, continues: bool = False) -> None:
        """End the step and keep what it has changed.

        Args:
            continues: it is the rest of the last step, so that `undo` takes both back.
        """
        if not (self._open or self._taken or self._open_marks or self._open_carried):
            if not continues:
                self._before = None
            return
        for kind in {*self._kept} - {*self._open, *self._taken}:
            # Of a codec that was not used: in the units of this step like the marks.
            if self.factor(kind) != 1.0:
                self.tensor(kind)
        replaced = {kind: self._kept.get(kind) for kind in {*self._open, *self._taken}}
        self._before = (replaced, self.marks, dict(self._carried), self.server_start)
        if self._open_start is not None:
            self.server_start = self._open_start
        for kind in self._taken:
            self._kept.pop(kind, None)
            self._spare.pop(kind, None)
        for kind, working in self._open.items():
            before = self._kept.get(kind)
            if before is not None and before.shape == working.shape:
                self._spare[kind] = before
            self._kept[kind] = working
        self.marks = {**self.marks, **self._open_marks}
        self._carried.update(self._open_carried)
        self._close()

    def undo(self) -> None:
        """Take the last `commit` back; nothing where another step has begun since."""
        if self._before is None:
            return
        replaced, self.marks, self._carried, self.server_start = self._before
        self._before = None
        for kind, tensor in replaced.items():
            self.put(kind, tensor)

    def rollback(self) -> None:
        """End the step and forget what it has changed."""
        for kind, working in self._open.items():
            if kind in self._kept and self._kept[kind].shape == working.shape:
                self._spare[kind] = working
        self._close()

    def _close(self) -> None:
        self._open, self._open_carried, self._open_marks = {}, {}, {}
        self._taken, self._scales, self._open_start = set(), {}, None

    def carried_state(self) -> dict[str, Any]:
        """The `state_dict` of the objects that are carried."""
        return {**self.loaded, **{name: made.state_dict() for name, made in self._carried.items()}}

    def kinds(self) -> list[str]:
        """What is kept."""
        return sorted(self._kept)

    def copy_of(self, kind: str) -> Tensor:
        """A copy of what is kept."""
        return self._kept[kind].clone()

    def kept(self, kind: str) -> Tensor | None:
        """The tensor of a kind as the last step that was committed has left it."""
        return self._kept.get(kind)

    def put(self, kind: str, value: Tensor | None) -> None:
        """Replace what is kept; None forgets it."""
        self._spare.pop(kind, None)
        if value is None:
            self._kept.pop(kind, None)
        else:
            self._kept[kind] = value

    def whole(self, kind: str) -> Tensor | None:
        """A copy of what is kept, N elements; in the residual, what the shard of the sum owes."""
        kept, server = self._kept.get(kind), self._kept.get("server")
        if kind != "residual" or server is None:
            return None if kept is None else kept.clone()
        found = torch.zeros(self.numel, device=self.device) if kept is None else kept.clone()
        add_at(found, server, self.server_start)
        return found


class FeedbackMemory:
    """The memories of all groups of parameters, which may be regrouped at any time.

    Args:
        seed: of random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._groups: dict[tuple[str, ...], CodecMemory] = {}
        self._loose: dict[str, dict[str, Tensor]] = {}
        self._marks: dict[str, dict[str, float]] = {}
        self._waiting: dict[tuple[str, ...], dict[str, Any]] = {}
        # All of it, as it was before a step that has regrouped parameters, and before `settle`.
        self._before: tuple[Any, ...] | None = None
        self._unsettled: tuple[Any, ...] | None = None

    def group(
        self,
        names: tuple[str, ...],
        shapes: Sequence[torch.Size],
        device: torch.device,
        key: int,
        make: Callable[..., CodecMemory] = CodecMemory,
    ) -> CodecMemory:
        """The memory of parameters that are reduced together, made of what is kept by name.

        Args:
            names: of the parameters.
            shapes: of the parameters.
            device: of their gradients.
            key: of random numbers.
            make: as the constructor of `CodecMemory`, where it is to hold a part of the elements.
        """
        if names in self._groups:
            return self._groups[names]
        self._unsettled = None
        if self._before is None:
            self._before = self._all()
        wanted = set(names)
        for other in [g for g in self._groups if wanted & set(g)]:
            self._dissolve(other)
        memory = make(shapes, device, key=key, seed=self.seed)
        extras = None
        if names in self._waiting and self._waiting[names].get("window") == memory.window:
            extras = self._waiting.pop(names)
        for other in [g for g in self._waiting if wanted & set(g)]:
            self._fold_waiting(other)
        memory.marks = next((self._marks[name] for name in names if name in self._marks), {})
        for kind in ELEMENTWISE:
            if any(kind in self._loose.get(name, {}) for name in names):
                kept = [self._loose.get(name, {}).get(kind) for name in names]
                units = [unit_factors(self.marks_of(n), memory.marks)[kind] for n in names]
                memory.take_over(kind, joined(kind, names, shapes, kept, units, device))
        for name in names:
            self._loose.pop(name, None)
            self._marks.pop(name, None)
        if extras is not None:
            memory.server_start = extras["server_start"] - memory.start
            memory.loaded = extras["carried"]
            for kind, tensor in extras["tensors"].items():
                # What is kept is written to in later steps.
                memory.put(kind, tensor.to(device, torch.float32, copy=True))
        self._groups[names] = memory
        return memory

    def _all(self) -> tuple[Any, ...]:
        loose = {name: dict(kinds) for name, kinds in self._loose.items()}
        return dict(self._groups), loose, dict(self._waiting), dict(self._marks)

    def marks_of(self, name: str) -> dict[str, float]:
        """What goes with the tensors of a parameter that is in no group."""
        return self._marks.get(name, {})

    def _dissolve(self, names: tuple[str, ...]) -> None:
        """Keep the tensors of a group by name instead."""
        memory = self._groups.pop(names)
        if memory.marks:
            self._marks.update((name, dict(memory.marks)) for name in names)
        for kind in ELEMENTWISE:
            flat = memory.whole(kind)
            if flat is None:
                continue
            for name, piece in zip(names, memory.by_parameter(flat), strict=True):
                self._loose.setdefault(name, {})[kind] = piece

    def _fold_waiting(self, names: tuple[str, ...]) -> None:
        """The same for a shard's residual that was loaded for a group that is not made again."""
        extras = self._waiting.pop(names)
        fold_into(self._loose, names, extras)

    def settle(self) -> None:
        """Keep everything by name, shards included; groups are made anew when asked for."""
        self._before = None
        if self._unsettled is None:
            self._unsettled = self._all()
        for names in list(self._groups):
            self._dissolve(names)
        for names in list(self._waiting):
            self._fold_waiting(names)

    def commit(self, *, continues: bool = False) -> None:
        """End the step in all groups and keep what it has changed; see `CodecMemory.commit`."""
        self._before = None
        for memory in self._groups.values():
            memory.commit(continues=continues)

    def undo(self) -> None:
        """Take the last `commit` of all groups back, and a `settle` after it."""
        if self._unsettled is not None:
            self._groups, self._loose, self._waiting, self._marks = self._unsettled
            self._unsettled = None
        for memory in self._groups.values():
            memory.undo()

    def rollback(self) -> bool:
        """End the step in all groups and forget what it has changed.

        Returns:
            Whether groups that `group` has made in this step are gone.
        """
        regrouped = self._before is not None
        if self._before is not None:
            self._groups, self._loose, self._waiting, self._marks = self._before
            self._before = None
        for memory in self._groups.values():
            memory.rollback()
        return regrouped

    def named(self, kind: str) -> dict[str, Tensor]:
        """Name to tensor in the parameter's shape; views where the parameter is in a group."""
        found = {name: kinds[kind] for name, kinds in self._loose.items() if kind in kinds}
        for names, memory in self._groups.items():
            flat = memory.kept(kind)
            if flat is not None:
                found.update(zip(names, memory.by_parameter(flat), strict=True))
        return dict(sorted(found.items()))

    def kinds_of(self, names: Sequence[str]) -> list[str]:
        """Which kinds of tensors there are for any of some parameters."""
        return [kind for kind in ELEMENTWISE if not set(names).isdisjoint(self.named(kind))]

    def clear(self, kind: str, names: set[str]) -> None:
        """Forget the tensors of a kind that belong to some parameters; after `settle`."""
        for name in names:
            self._loose.get(name, {}).pop(kind, None)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything: by name, and for groups what is not by element."""
        found: dict[str, Any] = {
            kind: {name: tensor.clone() for name, tensor in self.named(kind).items()}
            for kind in ELEMENTWISE
        }
        layouts = [{"names": list(names), **extras} for names, extras in self._waiting.items()]
        for names, memory in self._groups.items():
            tensors = {k: memory.copy_of(k) for k in memory.kinds() if k not in ELEMENTWISE}
            extras = {
                "server_start": memory.start + memory.server_start,
                "window": memory.window,
                "carried": memory.carried_state(),
            }
            if tensors or extras["carried"]:
                layouts.append({"names": list(names), **extras, "tensors": tensors})
        found["layouts"] = layouts
        marks = {name: dict(marks) for name, marks in self._marks.items()}
        for names, memory in self._groups.items():
            marks.update((name, dict(memory.marks)) for name in names if memory.marks)
        found["marks"] = marks
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything."""
        self._groups, self._waiting, self._loose = {}, {}, {}
        self._before = self._unsettled = None
        self._marks = {name: dict(marks) for name, marks in state["marks"].items()}
        for kind in ELEMENTWISE:
            for name, tensor in state[kind].items():
                self._loose.setdefault(name, {})[kind] = tensor.detach().clone().float()
        for layout in state["layouts"]:
            extras = {key: value for key, value in layout.items() if key != "names"}
            self._waiting[tuple(layout["names"])] = extras
