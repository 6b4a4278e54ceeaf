"""Open sessions in which the choice of experts of a layer is recorded or replaced.

Shapes: T tokens, K top-k.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._compile import outside_graphs
from moe_ext.nn.routers.base import Router, RouterOutput

# Looks at the choice of a layer, and may replace it: called with the layer, what its router said,
# the experts `[T, K]` so far (the router's, or those of a session opened before) and the mask;
# returns the experts to go on with, None to leave them.
Session = Callable[[Any, RouterOutput, Tensor, Tensor | None], Tensor | None]

# In the order in which they were opened. Mutated in place: layers look at it in every forward pass.
sessions: list[Session] = []


def open_session(session: Session) -> None:
    """From now on layers show the session their routing."""
    sessions.append(session)


def close_session(session: Session) -> None:
    """Take the session away, wherever it stands."""
    index = max(i for i, open_one in enumerate(sessions) if open_one == session)
    del sessions[index]


# A list of Python objects that grows is nothing for a graph.
@outside_graphs
def apply_sessions(layer: nn.Module, routed: RouterOutput, mask_T: Tensor | None) -> RouterOutput:
    """Give a layer the choice to go on with; called between router and dispatcher in a session."""
    topk_idx_TK, replaced = routed.gate.topk_idx, False
    for session in tuple(sessions):
        choice = session(layer, routed, topk_idx_TK, mask_T)
        if choice is not None:
            topk_idx_TK, replaced = choice, True
    if not replaced:
        return routed
    # Once, whoever replaced it: a recomputation must save the tensors that its forward pass saved.
    return layer.router.with_choice(routed, topk_idx_TK)  # type: ignore[operator, union-attr]


def can_replay(router: Any) -> bool:
    """True if a router weighs a choice that is not its own."""
    method = getattr(type(router), "with_choice", None)
    return method is not None and method is not Router.with_choice


# Layers and choices of one checkpointed region, in the order in which its layers ran.
_Tape = list[tuple[nn.Module, Tensor]]


class _TapeSession:
    """Writes a tape in the forward pass, or reads it in a recomputation.

    A context manager that can be entered again: a graph that is kept is recomputed by each backward
    pass through it.
    """

    def __init__(self, tape: _Tape, *, replay: bool) -> None:
        self._tape, self._replay = tape, replay
        # Autograd recomputes on a thread of each device: two of them must not read one another's.
        self._threads: dict[int, list[int]] = {}

    def __enter__(self) -> _TapeSession:
        self._threads.setdefault(threading.get_ident(), []).append(0)
        if not self._replay:
            self._tape.clear()
        open_session(self._choose)
        return self

    def __exit__(self, *_: object) -> None:
        close_session(self._choose)
        thread = threading.get_ident()
        self._threads[thread].pop()
        if not self._threads[thread]:
            del self._threads[thread]

    def _choose(
        self, layer: nn.Module, routed: RouterOutput, topk_idx_TK: Tensor, mask_T: Tensor | None
    ) -> Tensor | None:
        places = self._threads.get(threading.get_ident())
        if places is None:
            return None
        if not self._replay:
            self._tape.append((layer, topk_idx_TK))
            # Its own choice once more, so that both passes save the same tensors.
            return topk_idx_TK if can_replay(layer.router) else None
        place = places[-1]
        places[-1] += 1
        if place >= len(self._tape) or self._tape[place][0] is not layer:
            raise RuntimeError(
                "pinned_routing: expected the recomputation to run the layers of the forward pass "
                f"in their order, got another one at layer {place} of "
                f"{len(self._tape)}"
            )
        taped_TK = self._tape[place][1]
        if can_replay(layer.router):
            return taped_TK
        if not torch.equal(taped_TK, topk_idx_TK):
            raise RuntimeError(
                f"pinned_routing: expected the router of layer {place} of the region, which has no "
                "with_choice, to choose again what it chose in the forward pass, got a "
                f"{type(layer.router).__name__} that does not"
            )
        return None


def pinned_routing() -> tuple[_TapeSession, _TapeSession]:
    """Keep the routing of a forward pass for its recomputation under activation checkpointing.

    For `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False,
    context_fn=moe_ext.nn.pinned_routing)`. Every `MoELayer` that runs in the region sends its
    tokens in the recomputation to the experts of the forward pass, also where its router chooses
    others then. Weights and losses are computed anew at these experts. Without it the layers route
    the same way anyway where everything before them is recomputed to the same bits; products of
    another library, dropout without a restored state or weights that have changed flip close
    choices, and then the gradients are of another function than the loss. Each layer keeps one
    `[T, K]` tensor of indices. A router of one's own without `with_choice` is held to choose the
    same again, which waits for the device.

    Returns:
        The contexts of the forward pass and of the recomputation.
    """
    tape: _Tape = []
    return _TapeSession(tape, replay=False), _TapeSession(tape, replay=True)
