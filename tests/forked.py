"""Python's command line in a process that is forked from one that has imported torch."""

import multiprocessing
import os
import runpy
import subprocess
import sys

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from moe_ext import testing

OPENED = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def run_script(command, environment, log, folder):
    """Goes on as `python COMMAND` would, in a process that has imported torch."""
    if log is None:  # started by torchrun: with its output, and in a session of its own
        os.setsid()
    else:
        for stream, file in zip((1, 2), log if isinstance(log, tuple) else (log, log), strict=True):
            os.dup2(os.open(file, OPENED), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # an interpreter of its own would draw its seed anew at each start
    sys.argv[:] = command
    kind, *rest = command
    if kind == "-c":
        sys.path.insert(0, "")
        exec(rest[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.path.insert(0, "")
        sys.argv.pop(0)
        # torch.distributed.run starts interpreters, and looks at all modules to name a caller.
        subprocess_handler.Popen = start_rank
        dynamic_rendezvous.get_method_name = str
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")


def forkserver():
    """A context whose processes are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOADED)
    return context


class Fork:
    """A process that calls a function, with the methods of `subprocess.Popen`.

    It is forked from a process that has imported torch: an interpreter of its own takes seconds.
    """

    def __init__(self, context, function, *args, daemon=None):
        self.process = context.Process(target=function, args=args, daemon=daemon)
        self.process.start()
        self.kill, self.pid = self.process.kill, self.process.pid

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.process.exitcode


class Script(Fork):
    """A script; files of its output and of its errors, or one for both, come by `log`."""

    def __init__(self, command, environment, log, folder=".", context=None):
        super().__init__(context or forkserver(), run_script, command, environment, log, folder)


def start_rank(args, env, **_):
    """In the place of `subprocess.Popen`, which would start an interpreter (`python -u SCRIPT`)."""
    return Script(args[2:], env, None, context=multiprocessing.get_context("fork"))
