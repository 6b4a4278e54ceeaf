"""Runs a function on several ranks of one machine, for tests."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import secrets
import socket
import tempfile
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from moe_ext._checks import check_choice, check_sizes

# Modules that the fork server imports, from which ranks are forked. The list is read when the first
# ranks start.
PRELOADED = ["moe_ext"]


def _rank_main(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    init_method: str,
    group_timeout: float,
) -> None:
    """Body of one rank: join the group, run, send (result, None) or (None, traceback)."""
    # The garbage collector leaves frozen objects alone. Memory of modules that were imported before
    # the fork therefore stays shared between ranks.
    gc.freeze()
    torch.set_num_threads(1)
    # Ranks would otherwise continue the random numbers of the process they are forked from, which
    # draws its seed anew at each start.
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=group_timeout),
        )
        # Without a barrier a rank could end before the others have joined, which they would take
        # for a failure.
        dist.barrier()
        # `connection.send` is not used, because it leaves tensors in shared memory that this
        # process serves, and this process ends.
        connection.send_bytes(pickle.dumps((function(rank, *args), None)))
    except BaseException:
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
    finally:
        connection.close()
    # `destroy_process_group` is not called, because it waits for all ranks, and a test may let some
    # of them die on purpose.
    os._exit(0)


def _collect(
    connections: dict[int, Connection], processes: list[BaseProcess], deadline: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """Return results and failures by rank, once each rank has sent, ended, or run out of time."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_ranks = dict(connections)
    while open_ranks:
        left = deadline - monotonic()
        ready = wait(list(open_ranks.values()), max(left, 0))
        for rank in [r for r, c in open_ranks.items() if c in ready]:
            try:
                result, error = pickle.loads(open_ranks.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join(5)
                failures[rank] = f"ended with exit code {processes[rank].exitcode}"
                continue
            if error is None:
                results[rank] = result
            else:
                failures[rank] = error
        if left <= 0:
            failures.update((rank, "still running at the time limit") for rank in open_ranks)
            break
    return results, failures


def spawn_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    store: str = "file",
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run `function(rank, *args)` in `world_size` processes that share a Gloo process group.

    Each rank begins with torch's random generators at seed 0.

    Args:
        function: a function of an importable module. Its result must be picklable; tensors are
            returned by value.
        world_size: number of ranks.
        args: further arguments of the function.
        timeout: seconds after which ranks that still run are killed.
        group_timeout: timeout of the process group in seconds.
        store: "file", or "tcp" for a store that rank 0 hosts on 127.0.0.1.
        may_die: ranks that may end without a result; their result is None.

    Returns:
        The result of every rank, in rank order.

    Raises:
        ValueError: there are no ranks, or another store is named.
        RuntimeError: a rank raised, ended or ran out of time; the message has every rank's
            traceback.
    """
    check_sizes("spawn_ranks", world_size=world_size)
    check_choice("spawn_ranks", "store", store, ("file", "tcp"))
    # Ranks are forked from a process that has imported torch and started no thread. A rank then
    # takes a tenth of a second to start, and a new interpreter would take three seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes: list[BaseProcess] = []
    process: BaseProcess
    connections: dict[int, Connection] = {}
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{Path(folder) / 'store'}"
        if store == "tcp":
            init_method = f"tcp://127.0.0.1:{_free_port()}"
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, function, args, rank, world_size, init_method, group_timeout),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections[rank] = ours
            results, failures = _collect(connections, processes, monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
    for rank in may_die:
        failures.pop(rank, None)
    if failures:
        texts = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        raise RuntimeError("spawn_ranks: expected every rank to succeed, got\n" + "\n".join(texts))
    return [results.get(rank) for rank in range(world_size)]


def _free_port() -> int:
    """Return a port below those that the system gives to connections.

    A connection could otherwise take the port before rank 0 listens on it.
    """
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
