"""The way of the keys through rings of rings, by arithmetic alone.

P = R * I places lie in R rings of I. In stage t = o * I + i every place has the keys of one source:
place (n, j) those of (n - o, j - i). Forward, keys go round inside their ring, i = 0 .. I - 1; at
i = 0 they also set out for the next ring, where they are due I stages later. Backward the same film
runs in reverse: keys set out at i = I - 1 for the ring before, gradients follow the stages of the
forward pass back to their source.

What the mask does not need is left out: a source's keys visit the stages between their first and
their last use, and stages that would only pass them on from home are jumped.

Shapes: none; P places, R rings of I.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Circuit:
    """R rings of I places; R = 1 or I = 1 is a plain ring."""

    rings: int
    inner: int

    @property
    def num_places(self) -> int:
        """P."""
        return self.rings * self.inner

    def holder(self, source: int, stage: int) -> int:
        """Place that has the keys of a source."""
        ring, index = divmod(source, self.inner)
        outer, step = divmod(stage, self.inner)
        return (ring + outer) % self.rings * self.inner + (index + step) % self.inner

    def source(self, place: int, stage: int) -> int:
        """Whose keys a place has."""
        ring, index = divmod(place, self.inner)
        outer, step = divmod(stage, self.inner)
        return (ring - outer) % self.rings * self.inner + (index - step) % self.inner

    def before(self, stage: int) -> int:
        """Stage of the forward pass that keys come from; messages are posted as it begins."""
        return stage - (1 if stage % self.inner else self.inner)

    def after(self, stage: int) -> int:
        """The same of the backward pass; P stands for home."""
        goes_round = stage % self.inner != self.inner - 1
        return min(stage + (1 if goes_round else self.inner), self.num_places)

    def crosses(self, stage: int, *, backward: bool = False) -> bool:
        """Whether keys come to this stage from another ring."""
        return stage % self.inner == (self.inner - 1 if backward else 0)

    def following(self, stage: int) -> list[int]:
        """Stages of the forward pass whose messages are posted in this one, nearest first."""
        found = (stage + 1, stage + self.inner)
        return [t for t in dict.fromkeys(found) if t < self.num_places and self.before(t) == stage]

    def preceding(self, stage: int) -> list[int]:
        """The same of the backward pass, from `stage` = P on."""
        found = (stage - 1, stage - self.inner)
        return [t for t in dict.fromkeys(found) if t >= 0 and self.after(t) == stage]


@dataclass(frozen=True)
class Paths:
    """Where keys come from, of every source a dict of stage to stage.

    Attributes:
        forward: stage 0 is home. Gradients go the same way back.
        is_full: keys visit every stage; they can be kept where the forward pass ends.
        kept: of a backward pass that begins there, in stage P - 1.
        home: of one that begins at home, which is stage P; nothing has to come back to stage 0.
    """

    forward: tuple[dict[int, int], ...]
    is_full: bool
    kept: tuple[dict[int, int], ...]
    home: tuple[dict[int, int], ...]


def _tree(needed: Iterable[int], parent: Callable[[int], int], root: int) -> dict[int, int]:
    """Stage to the stage it comes from, of all stages on the way from the root to needed ones."""
    wanted = set(needed) - {root}
    edges: dict[int, int] = {}
    for stage in wanted:
        while stage != root and stage not in edges:
            edges[stage] = parent(stage)
            stage = edges[stage]
    for first in [stage for stage, origin in edges.items() if origin == root]:
        children = [stage for stage, origin in edges.items() if origin == first]
        while first not in wanted and len(children) == 1:
            del edges[first]
            first = children[0]
            edges[first] = root
            children = [stage for stage, origin in edges.items() if origin == first]
    return edges


@functools.lru_cache(maxsize=256)
def plan_paths(circuit: Circuit, needs: tuple[tuple[bool, ...], ...]) -> Paths:
    """The paths of all keys; `needs[r][c]`: some query of place r sees some key of place c."""
    last = circuit.num_places - 1
    used = [
        [t for t in range(last + 1) if needs[circuit.holder(source, t)][source]]
        for source in range(last + 1)
    ]
    forward = tuple(_tree(stages, circuit.before, 0) for stages in used)
    is_full = last > 0 and all(len(edges) == last for edges in forward)
    kept = tuple(_tree(stages, circuit.after, last) for stages in used) if is_full else ()
    home = tuple(_tree(set(stages) - {0}, circuit.after, last + 1) for stages in used)
    return Paths(forward, is_full, kept, home)
