"""Waits at the exit of a process, so that no thread needs the interpreter afterwards.

A C++ thread that asks for the interpreter while the interpreter shuts down is unwound through
destructors, and the process aborts with "terminate called without an active exception". The threads
of a backend do ask for it: after a message has completed they release its tensors, which are Python
objects.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Callable

# Seconds for the unfinished tasks of our threads. The limit is there because a task may wait for a
# peer that never answers.
_TASK_SECONDS = 1.0
# Seconds for the threads of a backend. A thread needs some microseconds once it gets a core and the
# interpreter's lock.
_BACKEND_SECONDS = 0.1

_waits: list[Callable[[float], None]] = []


def call_at_exit(wait: Callable[[float], None]) -> None:
    """Register a function that is called at exit with the number of seconds that it may take."""
    _waits.append(wait)


def wait_at_exit() -> None:
    """Make this process wait briefly at exit; called before other ranks can wait for it."""
    _register(os.getpid())


@functools.cache
def _register(process: int) -> None:
    atexit.register(_wait, process)


def _wait(process: int) -> None:
    # A forked child inherits the registration but none of the threads.
    if process == os.getpid():
        for wait in _waits:
            wait(_TASK_SECONDS)
        time.sleep(_BACKEND_SECONDS)
