"""Runs functions alternately: while one waits for other ranks, another one computes."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch

from moe_ext.comm.failures import mark_told

T = TypeVar("T")


class _Turns:
    """Passes the turn to run among several functions, in a circle. One runs at a time."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._left = list(range(count))
        self._now = 0
        self.error: BaseException | None = None

    def begin(self, own: int) -> None:
        """Wait for the turn of function `own`."""
        with self._changed:
            self._changed.wait_for(lambda: self._now == own)
        if self.error is not None:
            error = RuntimeError("run_in_turns: expected every function to end, got an error")
            mark_told(error)
            raise error

    def pass_on(self, own: int) -> None:
        """Give the turn to the next function, and wait until it comes back."""
        if len(self._left) > 1:
            state = torch.get_rng_state()
            self._give(own)
            self.begin(own)
            torch.set_rng_state(state)

    def end(self, own: int, error: BaseException | None) -> None:
        """Leave the circle. After an error the other functions raise at their next turn."""
        self.error = self.error or error
        self._give(own, leave=True)

    def _give(self, own: int, *, leave: bool = False) -> None:
        with self._changed:
            after = self._left.index(own) + 1
            self._now = self._left[after % len(self._left)]
            if leave:
                self._left.remove(own)
            self._changed.notify_all()


class _OwnTurns(threading.local):
    """The function that this thread runs, as its number and its circle."""

    turns: _Turns | None = None
    own: int = 0


lane = _OwnTurns()


def pass_turn() -> None:
    """Give the turn to another function, since this one is about to wait for other ranks."""
    if lane.turns is not None:
        lane.turns.pass_on(lane.own)


def run_in_turns(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions alternately: one computes while the others wait for other ranks.

    Typical functions are the forward and backward passes of several micro-batches through layers
    with experts over ranks. The turn passes in a circle. It passes at the end of a function and at
    every wait for a collective of CPU tensors, even if the collective is complete. Ranks that are
    given the same functions therefore send the same messages in the same order. Each function
    computes the same bits as alone, if no function writes to memory that another one uses.

    The first function runs in this thread. The others run in threads with the same autocast and
    gradient modes, and function modes such as `sequence_parallel`. Each function starts from the
    same state of the random generator. Afterwards the generator is in the state in which the first
    function left it.

    Args:
        functions: functions without arguments.

    Returns:
        The results of the functions.

    Raises:
        Exception: the first error of a function. The others end at their next wait.
    """
    if len(functions) < 2 or lane.turns is not None:
        return [function() for function in functions]
    turns, found = _Turns(len(functions)), dict[int, T]()
    state = torch.get_rng_state()
    after = [state]
    in_setting = _setting()

    def run(own: int) -> None:
        error: BaseException | None = None
        lane.turns, lane.own = turns, own
        try:
            turns.begin(own)
            torch.set_rng_state(state)
            found[own] = in_setting(functions[own]) if own else functions[own]()
            if own == 0:
                after[0] = torch.get_rng_state()
        except BaseException as raised:
            error = raised
        finally:
            lane.turns = None
            turns.end(own, error)

    others = [
        _threads().submit(contextvars.copy_context().run, run, own)
        for own in range(1, len(functions))
    ]
    run(0)
    for other in others:
        other.result()
    if turns.error is not None:
        raise turns.error
    torch.set_rng_state(after[0])
    return [found[own] for own in range(len(functions))]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="moe_ext.turns")


def _setting() -> Callable[[Callable[[], T]], T]:
    """Return a call that runs a function of another thread under the modes of this thread."""
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    cast, inference = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
    dtype: Any = torch.get_autocast_dtype("cpu")
    # Function modes of torch, such as `sequence_parallel` and the default device. Dispatch modes
    # count operators, or replace them by fakes.
    modes = overrides._get_current_function_mode_stack()
    of_operators = _python_dispatch._get_current_dispatch_mode_stack()

    def run(function: Callable[[], T]) -> T:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast("cpu", dtype, enabled=cast))
            for mode in modes:
                # Not entered: a default device that is entered twice forgets the one before it.
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            for each in of_operators:
                stack.enter_context(each)
            return function()

    return run
