"""Error feedback: residuals and other state of codecs, kept by the name of the parameter.

`CodecMemory` keeps them for parameters that are reduced together, side by side in one flat tensor.
`FeedbackStore` holds these memories and regroups them by name. Every step begins, and then commits
or rolls back. A step writes to other tensors than it reads, so that a failed step leaves
everything unchanged, bit for bit.

Shape suffixes: N elements of the parameters that are reduced together.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_ext._checks import check_numbers, check_rule

# Kinds of tensors with one element for each element of the gradient.
ELEMENTWISE = ("residual", "velocity")

_T = TypeVar("_T")


class Packing:
    """Layout of parameters in one flat tensor of N elements: one after the other.

    A subclass may hold a part of the parameters only, or use another layout.

    Args:
        shapes: shapes of the parameters.

    Attributes:
        shapes: shapes of the tensors that make up the N elements; here of the parameters.
        numel: N, elements of the tensor.
        window: (start, N) if the N elements are a part of the parameters, else None.
        place: number of that part; each part has random numbers of its own.
    """

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = tuple(shapes)
        self.sizes = tuple(math.prod(shape) for shape in self.shapes)
        self.numel = sum(self.sizes)
        self.window: tuple[int, int] | None = None
        self.place = 0

    @property
    def start(self) -> int:
        """Place of the first of the N elements among the elements of the parameters."""
        return 0 if self.window is None else self.window[0]

    def pieces(self, flat_N: Tensor) -> list[Tensor]:
        """Split a flat tensor into views in `shapes`."""
        parts = flat_N.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def spans(self) -> list[tuple[int, int]]:
        """Return (start, stop) of each parameter among the N elements."""
        return list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    def by_parameter(self, flat_N: Tensor) -> list[Tensor]:
        """Split a flat tensor into one tensor in the shape of each parameter."""
        return self.pieces(flat_N)

    def packed(self, whole: Tensor) -> Tensor:
        """Return the N elements, from a flat tensor of all elements of the parameters."""
        return whole


class _KeptTensors:
    """Tensors that a memory keeps between steps, by kind."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        # Tensors that are not read any more; the next step writes into them.
        self._spare: dict[str, Tensor] = {}

    def kinds(self) -> list[str]:
        """Return the kinds of tensors that are kept."""
        return sorted(self._kept)

    def kept(self, kind: str) -> Tensor | None:
        """Return the tensor of a kind after the last committed step; None if there is none."""
        return self._kept.get(kind)

    def kept_tensor(self, kind: str) -> Tensor:
        """Return the kept tensor of a kind, which must exist."""
        return self._kept[kind]

    def copy_of(self, kind: str) -> Tensor:
        """Copy the kept tensor of a kind, which must exist."""
        return self._kept[kind].clone()

    def put(self, kind: str, value: Tensor | None) -> None:
        """Replace the kept tensor of a kind; None drops it."""
        self._spare.pop(kind, None)
        if value is None:
            self._kept.pop(kind, None)
        else:
            self._kept[kind] = value


class CodecMemory(_KeptTensors):
    """Memory of a codec for parameters that are reduced together.

    Tensors are kept by kind. "residual" is the part of this rank's gradients that is not sent yet.
    "server" is the residual of the sum of the shard that this rank owns. "velocity" is the momentum
    of a sparse codec. Codecs may add other kinds.

    Args:
        shapes: shapes of the parameters, in their order in the flat gradient.
        device: device of the gradient.
        key: number that gives each memory its own stream of random numbers.
        seed: seed of the random numbers.
        packing: layout of the flat gradient, if parameters do not follow each other.

    Attributes:
        numel: N, elements of the tensor.
        bitmap: blocks that may be non-zero (see `nonzero_blocks`), if the caller knows them.
        server_start: first element of the shard whose sum this rank owns.
        units: units of the kept tensors: learning rate and loss scale.
        saved_objects: saved state by name; `carry` loads it when an object is first asked for.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        device: torch.device,
        *,
        key: int = 0,
        seed: int = 0,
        packing: Packing | None = None,
    ) -> None:
        check_numbers("CodecMemory", CodecMemory.__init__.__annotations__, locals())
        super().__init__()
        self.packing = packing or Packing(shapes)
        self.shapes, self.sizes = self.packing.shapes, self.packing.sizes
        self.numel, self.pieces = self.packing.numel, self.packing.pieces
        self.device, self.seed = device, seed
        self.key = (key + self.packing.place) & 0x7FFFFFFF
        self.bitmap: Tensor | None = None
        self.server_start = 0
        self.units: dict[str, float] = {}
        self.saved_objects: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        # The open step: tensors and objects that it has written, first element of its shard, kinds
        # that it has taken (dropped unless written), factors on kinds, and its units.
        self._open: dict[str, Tensor] = {}
        self._open_objects: dict[str, Any] = {}
        self._open_start: int | None = None
        self._taken: set[str] = set()
        self._scales: dict[str, float] = {}
        self._open_units: dict[str, float] = {}
        # State that the last `commit` has replaced, for `undo`.
        self._before: tuple[dict[str, Any], dict[str, float], dict[str, Any], int] | None = None

    # -- a step ------------------------------------------------------------------------------

    def begin(
        self, scales: Mapping[str, float] | None = None, units: Mapping[str, float] | None = None
    ) -> None:
        """Begin a step, after dropping the changes of an unfinished one.

        Args:
            scales: factors on kinds of tensors, for instance on the residual after a change of the
                learning rate.
            units: units of the tensors that this step leaves.
        """
        self.rollback()
        self._scales, self._open_units = dict(scales or {}), dict(units or {})

    def factor(self, kind: str) -> float:
        """Return the factor from the units of a kept tensor to the units of this step."""
        return self._scales.get(kind, 1.0)

    def tensor(self, kind: str, numel: int | None = None) -> Tensor:
        """Return this step's copy of a float32 tensor, zeros at first, to change in place."""
        if kind in self._open:
            return self._open[kind]
        kept, scale = self._kept.get(kind), self.factor(kind)
        if kept is None or kind in self._taken:
            return self.fresh(kind, self.numel if numel is None else numel)
        spare = self._spare.pop(kind, None)
        working = torch.empty_like(kept) if spare is None else spare
        torch.mul(kept, scale, out=working) if scale != 1.0 else working.copy_(kept)
        return self.write(kind, working)

    def write(self, kind: str, working: Tensor) -> Tensor:
        """Set the tensor of a kind that this step leaves; the memory owns it from now on."""
        # `working` may be the tensor that `undo` would restore, so `undo` is ruled out.
        self._before = None
        self._spare.pop(kind, None)
        self._open[kind] = working
        return working

    def fresh(self, kind: str, numel: int) -> Tensor:
        """Replace the kept tensor by zeros from this step on, possibly of another size."""
        return self.write(kind, torch.zeros(numel, device=self.device, dtype=torch.float32))

    def read_write(self, *kinds: str) -> dict[str, Tensor] | None:
        """Return tensors to write in this step and, as `<kind>_in`, those of the last step to read.

        Returns None if the caller must use `tensor` instead: if a kind is new or already open, or
        if a kind other than the residual changes its units.
        """
        found: dict[str, Tensor] = {}
        unused = {*self._kept} - {*self._open, *self._taken}
        scaled = any(kind != "residual" and self.factor(kind) != 1.0 for kind in kinds)
        if scaled or not {*kinds} <= unused or "server" in unused - {*kinds}:
            return None
        for kind in kinds:
            kept = self._kept[kind]
            spare = self._spare.pop(kind, None)
            found[kind] = self.write(kind, torch.empty_like(kept) if spare is None else spare)
            found[f"{kind}_in"] = kept
        return found

    def whole_residual(self) -> Tensor:
        """Return this step's copy of the residual, with the residual of the shard's sum added.

        For codecs that do not divide the gradient into shards, or divide it in another way.
        """
        residual_N = self.tensor("residual")
        if "server" in self._kept and "server" not in {*self._open, *self._taken}:
            add_at(residual_N, self._kept["server"], self.server_start, self.factor("server"))
            self._taken.add("server")
        return residual_N

    def keeps_shard(self, start: int, numel: int) -> bool:
        """Return True if the kept residual of the sum belongs to exactly this shard."""
        kept = self._kept.get("server")
        return kept is not None and (self.server_start, kept.numel()) == (start, numel)

    def shard(self, start: int, numel: int) -> Tensor:
        """Return this step's copy of the residual of the sum, for the shard that this rank owns.

        Args:
            start: first element of the shard.
            numel: elements of the shard.
        """
        if "server" in self._kept and not self.keeps_shard(start, numel):
            self.whole_residual()
        self._open_start = start
        return self.tensor("server", numel)

    def take_owed(self, grad_N: Tensor) -> bool:
        """Add all residuals to a gradient, in place, and drop them.

        Returns:
            True if there was any residual.
        """
        found = False
        for kind in ("residual", "server"):
            start = 0 if kind == "residual" else self.server_start
            if kind in self._open:
                if kind == "server" and self._open_start is not None:
                    start = self._open_start
                add_at(grad_N, self._open[kind], start)
                self._open[kind].zero_()
            elif kind in self._kept and kind not in self._taken:
                add_at(grad_N, self._kept[kind], start, self.factor(kind))
                self._taken.add(kind)
                self._before = None
            else:
                continue
            found = True
        return found

    def is_taken(self, kind: str) -> bool:
        """Return True if this step has taken the tensor of a kind and has not written another."""
        return kind in self._taken and kind not in self._open

    def carry(self, name: str, make: Callable[[], _T], copy: Callable[[_T], _T]) -> _T:
        """Return this step's copy of an object that is no tensor, to change in place."""
        if name not in self._open_objects:
            kept = self._objects.get(name)
            made: Any = make() if kept is None else copy(kept)
            if kept is None and name in self.saved_objects:
                made.load_state_dict(self.saved_objects[name])
            self._open_objects[name] = made
        found: _T = self._open_objects[name]
        return found

    def rng_state(self, step: int, rank: int) -> Tensor:
        """Return the `rng_state` of `quantize_blockwise`, for stochastic rounding."""
        return torch.tensor([self.seed, self.key, step, rank], device=self.device)

    def commit(self, *, continues: bool = False, finite: Tensor | None = None) -> None:
        """End the step and keep its changes.

        Args:
            continues: the step is the second half of the last one, so that `undo` reverts both.
            finite: 0-d bool; if it is False, the step is rolled back instead. On CUDA this needs
                no host synchronisation: the old values are selected on the device.
        """
        if finite is not None and finite.is_cuda:
            for kind, working in self._open.items():
                old = self._kept.get(kind, working.new_zeros(()))
                self._open[kind] = torch.where(finite, working, old)
        elif finite is not None and not finite:
            return self.rollback()
        if not (self._open or self._taken or self._open_units or self._open_objects):
            if not continues:
                self._before = None
            return None
        for kind in {*self._kept} - {*self._open, *self._taken}:
            # The codec did not use this kind in this step. The tensor still has to be converted to
            # the units of this step.
            if self.factor(kind) != 1.0:
                self.tensor(kind)
        replaced = {kind: self._kept.get(kind) for kind in {*self._open, *self._taken}}
        self._before = (replaced, self.units, dict(self._objects), self.server_start)
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
        rate = {"rate": self.units["rate"]} if "rate" in self.units else {}
        self.units = {**rate, **self._open_units}
        self._objects.update(self._open_objects)
        self._open = {}
        return self.rollback()

    def undo(self) -> None:
        """Revert the last `commit`. Nothing happens if another step has written since."""
        if self._before is None:
            return
        replaced, self.units, self._objects, self.server_start = self._before
        self._before = None
        for kind, tensor in replaced.items():
            self.put(kind, tensor)

    def keep_no_spare(self) -> None:
        """Free the tensors that `undo` would restore and that the next step would overwrite."""
        self._spare.clear()
        self._before = None

    def rollback(self) -> None:
        """End the step and drop its changes."""
        for kind, working in self._open.items():
            if kind in self._kept and self._kept[kind].shape == working.shape:
                self._spare[kind] = working
        self._open, self._open_objects, self._open_units = {}, {}, {}
        self._taken, self._scales, self._open_start = set(), {}, None

    # -- between steps -----------------------------------------------------------------------

    def has(self, kind: str) -> bool:
        """Return True if there is a tensor of this kind, kept or written in this step."""
        return kind in self._kept or kind in self._open

    def whole(self, kind: str) -> Tensor | None:
        """Copy a kept tensor, N elements; a residual includes that of the shard's sum."""
        kept, server = self._kept.get(kind), self._kept.get("server")
        if kind != "residual" or server is None:
            return None if kept is None else kept.clone()
        found = server.new_zeros(self.numel) if kept is None else kept.clone()
        add_at(found, server, self.server_start)
        return found

    def extras(self) -> dict[str, Any]:
        """Copy the state that is not kept by element, for `FeedbackStore.state_dict`."""
        objects = {name: made.state_dict() for name, made in self._objects.items()}
        return {
            "server_start": self.packing.start + self.server_start,
            "window": self.packing.window,
            "carried": {**self.saved_objects, **objects},
            "tensors": {k: self.copy_of(k) for k in self.kinds() if k not in ELEMENTWISE},
        }

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of tensors by kind, from any device."""
        for kind, tensor in tensors.items():
            # A copy is needed because later steps write to the kept tensors.
            self.put(kind, tensor.to(self.device, torch.float32, copy=True))

    def load_extras(self, extras: Mapping[str, Any]) -> None:
        """Load the result of `extras`."""
        self.server_start = extras["server_start"] - self.packing.start
        self.saved_objects = extras["carried"]
        self.take(extras["tensors"])


@contextlib.contextmanager
def committing(*memories: CodecMemory) -> Iterator[None]:
    """Begin a step of some memories; commit it at the end, or roll it back on an error."""
    for memory in memories:
        memory.begin()
    try:
        yield
    except BaseException:
        for memory in memories:
            memory.rollback()
        raise
    for memory in memories:
        memory.commit()


class _Table(NamedTuple):
    """Everything that a store keeps.

    `groups` are the memories, `loose` tensors by name and kind, `units` their units by name, and
    `loaded` saved extras of groups that are not made yet.
    """

    groups: dict[tuple[str, ...], CodecMemory]
    loose: dict[str, dict[str, Tensor]]
    units: dict[str, dict[str, float]]
    loaded: dict[tuple[str, ...], dict[str, Any]]

    def copy(self) -> _Table:
        loose = {name: dict(kinds) for name, kinds in self.loose.items()}
        return _Table(dict(self.groups), loose, dict(self.units), dict(self.loaded))


class FeedbackStore:
    """The memories of all groups of parameters, which may be regrouped at any time.

    Args:
        seed: seed of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._table = _Table({}, {}, {}, {})
        # Copies of the table from before a step that regrouped parameters, for `rollback`, and from
        # before `ungroup`, for `undo`.
        self._before: _Table | None = None
        self._grouped: _Table | None = None

    @property
    def memories(self) -> dict[tuple[str, ...], CodecMemory]:
        """Names of parameters to the memory of their group; read only."""
        return self._table.groups

    def group(
        self,
        names: tuple[str, ...],
        shapes: Sequence[torch.Size],
        device: torch.device,
        key: int = 0,
        packing: Packing | None = None,
    ) -> CodecMemory:
        """Return the memory of a group of parameters; make it from tensors kept by name if new.

        Args:
            names: names of the parameters.
            shapes: shapes of the parameters.
            device: device of the gradients.
            key: as `CodecMemory`.
            packing: as `CodecMemory`.

        Raises:
            ValueError: a tensor that was loaded for a parameter has another shape.
        """
        if names in self._table.groups:
            return self._table.groups[names]
        self._grouped = None
        if self._before is None:
            self._before = self._table.copy()
        groups, loose, units, loaded = self._table
        wanted = set(names)
        for other in [g for g in groups if wanted & set(g)]:
            self._dissolve(other)
        memory = CodecMemory(shapes, device, key=key, seed=self.seed, packing=packing)
        extras = None
        if names in loaded and loaded[names].get("window") == memory.packing.window:
            extras = loaded.pop(names)
        for other in [g for g in loaded if wanted & set(g)]:
            add_loaded_shard(loose, other, loaded.pop(other))
        memory.units = next((units[name] for name in names if name in units), {})
        for kind in ELEMENTWISE:
            if any(kind in loose.get(name, {}) for name in names):
                whole = self._side_by_side(kind, names, shapes, memory)
                memory.put(kind, memory.packing.packed(whole))
        for name in names:
            loose.pop(name, None)
            units.pop(name, None)
        if extras is not None:
            memory.load_extras(extras)
        groups[names] = memory
        return memory

    def _side_by_side(
        self, kind: str, names: Sequence[str], shapes: Sequence[torch.Size], memory: CodecMemory
    ) -> Tensor:
        """Concatenate tensors by name, in the units of a memory; zeros for missing tensors."""
        found = []
        for name, shape in zip(names, shapes, strict=True):
            tensor = self._table.loose.get(name, {}).get(kind)
            if tensor is None:
                found.append(torch.zeros(shape.numel(), device=memory.device, dtype=torch.float32))
                continue
            what, rule = f"the {kind} of {name}", f"of shape {tuple(shape)}"
            fits = tensor.shape == shape
            check_rule("CompressionState", what, tuple(tensor.shape), rule, fits)
            factor = unit_factors(self.units_of(name), memory.units)[kind]
            found.append(tensor.reshape(-1).to(memory.device) * factor)
        return torch.cat(found)

    def units_of(self, name: str) -> dict[str, float]:
        """Return the units of the tensors of a parameter that is in no group."""
        return self._table.units.get(name, {})

    def _dissolve(self, names: tuple[str, ...]) -> None:
        """Drop a group and keep its tensors by name."""
        memory = self._table.groups.pop(names)
        if memory.units:
            self._table.units.update((name, dict(memory.units)) for name in names)
        for kind in ELEMENTWISE:
            flat = memory.whole(kind)
            if flat is None:
                continue
            for name, piece in zip(names, memory.packing.by_parameter(flat), strict=True):
                self._table.loose.setdefault(name, {})[kind] = piece

    def ungroup(self) -> None:
        """Drop all groups and keep everything by name, including residuals of shards."""
        self._before = None
        if self._grouped is None:
            self._grouped = self._table.copy()
        for names in list(self._table.groups):
            self._dissolve(names)
        for names in list(self._table.loaded):
            add_loaded_shard(self._table.loose, names, self._table.loaded.pop(names))

    def commit(self, *, continues: bool = False, finite: Tensor | None = None) -> None:
        """End the step in all groups and keep its changes; see `CodecMemory.commit`."""
        self._before = self._grouped = None
        for memory in self._table.groups.values():
            memory.commit(continues=continues, finite=finite)

    def undo(self) -> None:
        """Revert the last `commit` of all groups, and an `ungroup` after it."""
        if self._grouped is not None:
            self._table, self._grouped = self._grouped, None
        for memory in self._table.groups.values():
            memory.undo()

    def rollback(self) -> bool:
        """End the step in all groups and drop its changes.

        Returns:
            True if groups that `group` had made in this step were dropped.
        """
        regrouped = self._before is not None
        if self._before is not None:
            self._table, self._before = self._before, None
        for memory in self._table.groups.values():
            memory.rollback()
        return regrouped

    def named(self, kind: str) -> dict[str, Tensor]:
        """Map names to tensors in the parameter's shape; views if the parameter is in a group."""
        found = {name: kinds[kind] for name, kinds in self._table.loose.items() if kind in kinds}
        for names, memory in self._table.groups.items():
            flat = memory.kept(kind)
            if flat is not None:
                found.update(zip(names, memory.packing.by_parameter(flat), strict=True))
        return dict(sorted(found.items()))

    def kinds_of(self, names: Sequence[str]) -> list[str]:
        """Return the kinds of tensors that are kept for at least one of the parameters."""
        return [kind for kind in ELEMENTWISE if not set(names).isdisjoint(self.named(kind))]

    def clear(self, kind: str, names: set[str]) -> None:
        """Drop the tensors of a kind of some parameters. Call `ungroup` first."""
        for name in names:
            self._table.loose.get(name, {}).pop(kind, None)

    def state_dict(self) -> dict[str, Any]:
        """Copy everything: tensors by name, and for each group the state not kept by element."""
        found: dict[str, Any] = {
            kind: {name: tensor.clone() for name, tensor in self.named(kind).items()}
            for kind in ELEMENTWISE
        }
        groups, _, units, loaded = self._table
        layouts = [{"names": list(names), **extras} for names, extras in loaded.items()]
        marks = {name: dict(numbers) for name, numbers in units.items()}
        for names, memory in groups.items():
            extras = memory.extras()
            if extras["tensors"] or extras["carried"]:
                layouts.append({"names": list(names), **extras})
            marks.update((name, dict(memory.units)) for name in names if memory.units)
        return {**found, "layouts": layouts, "marks": marks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by a state of `state_dict`."""
        self._before = self._grouped = None
        units = {name: dict(numbers) for name, numbers in state["marks"].items()}
        self._table = _Table({}, _loose_tensors(state), units, {})
        for layout in state["layouts"]:
            extras = {key: value for key, value in layout.items() if key != "names"}
            self._table.loaded[tuple(layout["names"])] = extras


def unit_factors(before: Mapping[str, float], units: Mapping[str, float]) -> dict[str, float]:
    """Return the factors from some units to others, by kind; a missing loss scale counts as 1."""
    velocity = residual = units.get("loss_scale", 1.0) / before.get("loss_scale", 1.0)
    if "rate" in before and "rate" in units:
        residual *= before["rate"] / units["rate"]
    return {"residual": residual, "server": residual, "velocity": velocity}


def _loose_tensors(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Copy the elementwise tensors of a saved store: name to tensor by kind."""
    loose: dict[str, dict[str, Tensor]] = {}
    for kind in ELEMENTWISE:
        for name, tensor in state[kind].items():
            loose.setdefault(name, {})[kind] = tensor.detach().clone().float()
    return loose


def by_name(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Copy a saved store's tensors by name and kind; residuals include those of shards' sums."""
    loose = _loose_tensors(state)
    for layout in state["layouts"]:
        add_loaded_shard(loose, layout["names"], layout)
    return loose


def add_loaded_shard(
    loose: dict[str, dict[str, Tensor]], names: Sequence[str], extras: Mapping[str, Any]
) -> None:
    """Add the residual of a shard's sum to the residuals by name of the group's parameters."""
    if "server" not in extras["tensors"]:
        return
    start = 0
    for name in names:
        residual = loose[name]["residual"]
        flat = residual.reshape(-1).clone()
        add_at(flat, extras["tensors"]["server"], extras["server_start"] - start)
        loose[name]["residual"] = flat.view(residual.shape)
        start += flat.numel()


def add_at(flat: Tensor, owed: Tensor, start: int, scale: float = 1.0) -> None:
    """Add `owed` to `flat` from element `start` on, in place; elements outside are left out."""
    owed, start = owed[max(-start, 0) :], max(start, 0)
    stop = min(start + owed.numel(), flat.numel())
    if stop > start:
        flat[start:stop].add_(owed[: stop - start].to(flat.device), alpha=scale)
