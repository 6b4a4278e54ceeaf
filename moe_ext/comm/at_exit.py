"""Waits at the exit of a process, so that no thread needs the interpreter afterwards.

A thread of C++ that asks for the interpreter just before that ends is unwound through destructors,
and the process aborts: "terminate called without an active exception". Threads of a backend do ask:
they tell that a message is done, and let go of its tensors, which are objects of Python, later.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Callable

# For what threads of ours still have to do, which may wait for a peer that never answers.
_TASK_SECONDS = 1.0
# A backend's thread takes some microseconds, once the interpreter is free and a core as well.
_BACKEND_SECONDS = 0.1

_waits: list[Callable[[float], None]] = []


def call_at_exit(wait: Callable[[float], None]) -> None:
    """Have the exit of the process call `wait` with the number of seconds that it may take."""
    _waits.append(wait)


def wait_at_exit() -> None:
    """Have the exit of this process wait, briefly; to be called before others wait for it."""
    _register(os.getpid())


@functools.cache
def _register(process: int) -> None:
    atexit.register(_wait, process)


def _wait(process: int) -> None:
    # A fork has none of the threads.
    if process == os.getpid():
        for wait in _waits:
            wait(_TASK_SECONDS)
        time.sleep(_BACKEND_SECONDS)
