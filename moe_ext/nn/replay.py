"""Sessions, which record or replace the choice of experts of layers while they are open.

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

# Function that sees the choice of a layer and may replace it. Arguments: the layer, the output of
# its router, the experts `[T, K]` chosen by the router or an earlier session, and the mask. Returns
# the experts to use, or None for no change.
Session = Callable[[Any, RouterOutput, Tensor, Tensor | None], Tensor | None]

# Open sessions, in the order in which they were opened. The list is only changed in place, because
# other modules import it by name.
sessions: list[Session] = []


def open_session(session: Session) -> None:
    """Begin to call the session in the forward pass of every layer."""
    sessions.append(session)


def close_session(session: Session) -> None:
    """Remove the session, even if later sessions are still open."""
    index = max(i for i, open_one in enumerate(sessions) if open_one == session)
    del sessions[index]


# A graph cannot contain sessions, which append to Python lists.
@outside_graphs
def apply_sessions(layer: nn.Module, routed: RouterOutput, mask_T: Tensor | None) -> RouterOutput:
    """Call all sessions with the choice of a router, and return the output for their choice."""
    topk_idx_TK, replaced = routed.gate.topk_idx, False
    for session in tuple(sessions):
        choice = session(layer, routed, topk_idx_TK, mask_T)
        if choice is not None:
            topk_idx_TK, replaced = choice, True
    if not replaced:
        return routed
    # `with_choice` is called once for all sessions. A recomputation must save the same tensors as
    # its forward pass, for any number of sessions in each.
    return layer.router.with_choice(routed, topk_idx_TK)  # type: ignore[operator, union-attr]


def can_replay(router: Any) -> bool:
    """Return True if a router computes weights for a choice that is not its own."""
    method = getattr(type(router), "with_choice", None)
    return method is not None and method is not Router.with_choice


# Layers and choices of a checkpointed region, in the order in which the layers ran.
_Tape = list[tuple[nn.Module, Tensor]]


class _TapeSession:
    """Context manager that writes a tape in the forward pass, or reads it in a recomputation.

    The context can be entered several times, because each backward pass through a graph that is
    kept recomputes it.
    """

    def __init__(self, tape: _Tape, *, replay: bool) -> None:
        self._tape, self._replay = tape, replay
        # Positions in the tape, by thread. Autograd recomputes on one thread per device, and two
        # threads must not share a position.
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
            # The router's own choice is returned, so that `with_choice` runs in this pass, too, and
            # both passes save the same tensors.
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

    Use it as `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False,
    context_fn=moe_ext.nn.pinned_routing)`. In the recomputation, every `MoELayer` of the region
    sends its tokens to the experts of the forward pass, even if its router now chooses others.
    Weights and losses are recomputed for these experts. Without this function the routing is the
    same only if everything before the layers is recomputed to the same bits. Matrix products of
    some libraries, dropout whose state is not restored, or changed weights can flip close choices.
    The gradients are then those of another function than the loss. Each layer keeps one `[T, K]`
    tensor of indices. A user's router without `with_choice` must make the same choice again; the
    check of this waits for the device.

    Returns:
        The contexts of the forward pass and of the recomputation.
    """
    tape: _Tape = []
    return _TapeSession(tape, replay=False), _TapeSession(tape, replay=True)
