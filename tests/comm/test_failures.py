import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_checks import ask_briefly, at_once

from moe_ext import MoELayer
from moe_ext.comm import collectives, failures, reports
from moe_ext.distributed import RankFailureError, checkpoint, clip_grad_norm_, sync_gradients
from moe_ext.nn import Dispatch
from moe_ext.testing import _free_port, spawn_ranks


def die(how):
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def train_until_a_rank_dies(rank, moment, victim, how):
    """(message, ranks named, seconds) of the error that a survivor sees."""
    layer = MoELayer(8, 6, 6, 2, ep_group=dist.group.WORLD)
    x = torch.randn(5, 8, requires_grad=True)
    layer(x).sum().backward()
    sync_gradients(layer)
    started = time.monotonic()
    try:
        mine = rank == victim
        y = layer(x)
        if mine and moment == "backward":
            y.register_hook(lambda grad: die(how))
        y.sum().backward()
        sync_gradients(layer)
        if mine and moment == "clip":
            die(how)
        clip_grad_norm_(layer, 1.0)
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "no error", (), 0.0


@pytest.mark.parametrize(
    ("moment", "victim", "how", "store"),
    [
        # Rank 0 takes the store with it.
        ("backward", 0, "SIGKILL", "tcp"),
        ("clip", 2, "exit", "file"),
    ],
)
def test_survivors_name_the_rank_that_died(moment, victim, how, store):
    found = spawn_ranks(
        train_until_a_rank_dies, 3, moment, victim, how, store=store, may_die=[victim]
    )
    assert found[victim] is None
    for rank in {0, 1, 2} - {victim}:
        message, named, seconds = found[rank]
        assert named == (victim,), message
        assert f"rank {victim} died" in message
        assert f"seen by rank {rank}" in message
        assert {"backward": "backward", "clip": "clip_grad_norm_"}[moment] in message
        # Well within the 60 s of the group.
        assert seconds < 20


def send_until_a_rank_dies(rank, dispatcher, combine, backward, victim):
    """(message, ranks named, seconds) of the error that a survivor sees."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    how = Dispatch(dispatcher, combine=combine)
    layer = MoELayer(8, 6, 8, 4, ep_group=dist.group.WORLD, dispatcher=how)
    x = torch.randn(5, 8, requires_grad=True)
    layer(x).sum().backward()
    started = time.monotonic()
    try:
        if rank == victim and not backward:
            die("SIGKILL")
        y = layer(x)
        if rank == victim:
            y.register_hook(lambda grad: die("SIGKILL"))
        y.sum().backward()
        sync_gradients(layer)
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "no error", (), 0.0


# Some send in groups of which the rank that died is no member.
@pytest.mark.parametrize(
    ("dispatcher", "combine", "backward", "victim"),
    [
        ("hierarchical", "exact", False, 2),
        ("hierarchical", "exact", True, 3),
        ("dedup", "exact", False, 2),
        ("allgather", "reduced", True, 1),
    ],
)
def test_all_survivors_of_any_dispatcher_name_the_rank_that_died(
    dispatcher, combine, backward, victim
):
    found = spawn_ranks(
        send_until_a_rank_dies, 4, dispatcher, combine, backward, victim, may_die=[victim]
    )
    for rank in {0, 1, 2, 3} - {victim}:
        message, named, seconds = found[rank]
        assert named == (victim,), message
        assert seconds < 20


def test_those_whom_others_miss_are_named_in_groups_without_them(monkeypatch):
    class Store:
        def __init__(self):
            self.kept = {"moe_ext/blamed/1": b"", "moe_ext/blamed/3": b"2"}

        def check(self, keys):
            return all(key in self.kept for key in keys)

        def get(self, key):
            return self.kept[key]

    monkeypatch.setattr(failures.c10d, "default_store", Store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(failures, "group_ranks", lambda group: (0, 1))
    assert failures._blamed_by_others(None) == (3, {2})
    monkeypatch.setattr(failures, "group_ranks", lambda group: (0, 1, 2, 3))
    assert failures._blamed_by_others(None) == (-1, set()), "each has asked all itself"


@pytest.mark.parametrize("size", [2, 3])
def test_the_last_rank_stays_for_nobody(monkeypatch, size):
    """Living ranks would take it for dead, or miss the store that it hosts; dead ones do not."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    stays = []
    monkeypatch.setattr(failures, "_processes", {1: (failures.process_identity()[0], child)})
    monkeypatch.setattr(failures.c10d, "default_store", mock.Mock(side_effect=RuntimeError))
    monkeypatch.setattr(failures.time, "sleep", stays.append)
    monkeypatch.setattr(failures, "group_ranks", lambda group: (0, 1))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    call = failures._roll_call(None, "step", 5.0)
    assert call.dead == {1} and call.store_lost
    assert bool(stays) == (size == 3)


def describe(**kwargs):
    return failures._describe(failures._RollCall(**kwargs), 5.0)


@pytest.mark.parametrize(
    ("silent", "dead", "text", "ranks"),
    [
        ({2, 5}, set(), "ranks 2, 5 did not answer within 5 s", {2, 5}),
        ({1, 2}, {2}, "rank 2 died or ended", {2}),
        (set(), set(), "every rank of the group is alive", set()),
    ],
)
def test_ranks_are_named_by_their_silence_but_for_slow_ones_beside_the_dead(
    silent, dead, text, ranks
):
    assert describe(silent=silent, dead=dead, looked=True) == (text, ranks)


def test_the_host_of_a_store_that_is_gone(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    text, ranks = describe(silent={0, 1}, store_lost=True)
    assert "its host, rank 0, has probably died" in text
    assert ranks == {0}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    text, ranks = describe(silent={0, 1}, store_lost=True)
    assert "launcher that hosts the store is gone" in text
    assert ranks == set()


def test_processes_of_this_host_are_known_dead_or_alive(monkeypatch):
    host, pid = failures.process_identity()
    child = os.fork()
    if child == 0:
        os._exit(0)
    known = {1: (host, pid), 2: (host, child), 3: (host + 1, child)}
    monkeypatch.setattr(failures, "_processes", known)
    deadline = time.monotonic() + 10
    # Not reaped yet: a zombie counts as dead.
    while failures._state_here(2) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert failures._state_here(2) == "Z"
    os.waitpid(child, 0)
    assert failures._state_here(2) == "X"
    assert failures._state_here(1) in ("R", "S")
    assert failures._state_here(3) == ""
    assert failures._state_here(4) == ""


def rank_with_an_error_of_its_own(rank):
    """(message, ranks named) of what each rank gets where one has a tensor of another shape."""
    ask_briefly()
    x = torch.zeros(4, 2)
    try:
        with failures.naming_failed_ranks(None, "step"):
            if rank == 1:
                x.view(3, 3)
            dist.all_reduce(x)
    except RankFailureError as error:
        return str(error), error.ranks
    except RuntimeError as error:
        return str(error), None
    return "no error", None


def test_an_error_of_shapes_is_no_failed_rank():
    messages, named = zip(*spawn_ranks(rank_with_an_error_of_its_own, 3, store="tcp"), strict=True)
    assert messages[1] == "shape '[3, 3]' is invalid for input of size 8"
    assert named == ((1,), None, (1,))
    for message in (messages[0], messages[2]):
        assert "the last error of rank 1 was \"step: shape '[3, 3]' is invalid" in message


@pytest.mark.parametrize(
    ("text", "is_of_connections"),
    [
        (
            "[/third_party/gloo/transport/tcp/pair.cc:5] Connection closed by peer",
            True,
        ),
        ("[../unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation", True),
        ("NCCL communicator was aborted on rank 1.", True),
        ("Broken pipe", True),
        ("aten.mul_: got inputs with different meshes", False),
        ("ProcessGroupGloo::allreduce: only supports dense tensors", False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_which_errors_are_of_connections(text, is_of_connections):
    assert bool(failures._OF_CONNECTIONS.search(text)) == is_of_connections


# Forks the ranks of each case, since imports take seconds. Rank 0, which hosts the store, fails
# before it sends a message.
PROGRAM = """
import os
import sys
import time
import torch, torch.distributed as dist
from moe_ext import MoELayer
folder, *cases = sys.argv[1:]
processes = [(case, rank) for case in cases for rank in "01"]
for case, rank in processes:
    if os.fork() == 0:
        break
else:
    for _ in processes:
        os.wait()
    os._exit(0)
when, os.environ["MASTER_PORT"] = case.split(":")
os.environ["RANK"] = rank
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{when}.{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
dist.init_process_group("gloo")
if when == "after":
    MoELayer(8, 6, 4, 2, ep_group=dist.group.WORLD)
if dist.get_rank() == 0:
    raise KeyError("no such file")
started = time.monotonic()
try:
    MoELayer(8, 6, 4, 2, ep_group=dist.group.WORLD)(torch.zeros(3, 8))
except RuntimeError as error:
    print(type(error).__name__, error.ranks, time.monotonic() - started, error, sep="|")
"""


SEEN = {
    "after": "the job: expected every rank to take part, but rank 0 raised "
    "KeyError: 'no such file', which ends its process; the group is unusable now",
    # A process without a layer over ranks that has sent nothing does nothing at its exit.
    "before": "MoELayer: expected every rank of the group [0, 1] to take part, but "
    "the store is gone; its host, rank 0, has probably died (seen by rank 1; ",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Texts that rank 0 wrote to stderr, and rank 1 to stdout, by case."""
    folder, cases = tmp_path_factory.mktemp("programs"), [f"{when}:{_free_port()}" for when in SEEN]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, *cases], env=env, check=True, timeout=120
    )
    files = ("0.err", "1.out")
    return {when: [(folder / f"{when}.{name}").read_text() for name in files] for when in SEEN}


@pytest.mark.parametrize("when", SEEN)
def test_an_error_that_ends_a_process_is_told_at_once(programs, when):
    words, out = programs[when]
    assert "KeyError: 'no such file'" in words
    kind, ranks, seconds, text = out.strip().split("|")
    assert (kind, ranks) == ("RankFailureError", "(0,)")
    assert text == SEEN[when] if when == "after" else text.startswith(SEEN[when])
    # The group's timeout is half an hour; the first look is after half a second.
    assert float(seconds) < 20


def all_but_rank_1_wait(rank, how):
    """(message, ranks named, seconds) of a sum over three ranks that rank 1 does not come to."""
    ask_briefly()
    group = dist.new_group(timeout=timedelta(seconds=3))
    # Who ends at once would break the connections that the others are still making.
    dist.barrier(group)
    started = time.monotonic()
    try:
        if rank == 1 and how == "ends":
            sys.last_value = ValueError("bad batch")
            reports._tell_end(1.0)
        elif rank == 1 and how == "ends unseen":
            failures.tell_own_error("ValueError", ValueError("bad batch"))
            os._exit(1)
        elif rank == 1 and how == "lives on":
            time.sleep(5)
        elif rank == 1:
            collectives.all_reduce_(torch.ones(3), group, operation="another sum")
        else:
            collectives.all_reduce_(torch.ones(3), dist.group.WORLD, operation="a sum")
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "no error", (), time.monotonic() - started


ABSENT = ("ends", "ends unseen", "lives on", "elsewhere")


@pytest.fixture(scope="module")
def absent():
    def run(how):
        return spawn_ranks(all_but_rank_1_wait, 3, how, group_timeout=3.0, may_die=[1])

    return at_once(run, [(how,) for how in ABSENT])


@pytest.mark.parametrize(
    ("how", "named", "words", "seconds"),
    [
        ("ends", (1,), "rank 1 raised ValueError: bad batch, which ends its process", 10),
        # Whoever waits in code that does not look into the store, as on CUDA.
        ("ends unseen", (1,), "the last error of rank 1 was 'ValueError: bad batch'", 10),
        ("lives on", (1,), "but rank 1 did not answer within 1 s", 20),
        ("elsewhere", (), "is alive: ranks 0, 2 in a sum, rank 1 in another sum (seen", 20),
    ],
)
def test_others_name_the_rank_that_does_not_come(absent, how, named, words, seconds):
    found = absent[(how,)].result()
    for rank in (0, 2):
        message, ranks, waited = found[rank]
        assert words in message
        assert ranks == named
        assert waited < seconds
    if how == "ends":
        # It stays until the others have looked.
        assert found[1][0] == "no error" and 0.3 < found[1][2] < 4


def layer_hooks(layer, phase, stop):
    """Have `stop()` run on this rank in a phase of the layer."""
    if phase == "dispatch":
        layer.router.register_forward_hook(lambda *_: stop())
    if phase == "experts":
        layer.experts.register_forward_pre_hook(lambda *_: stop())
    if phase == "combine":
        layer.experts.register_forward_hook(lambda *_: stop())


def go_on_once_seen(pid):
    """Have a stopped process go on a second after this rank has begun to look for it."""
    look, began = failures._state_here, []

    def look_and_continue(rank):
        found = look(rank)
        began.append(time.monotonic())
        # The other survivor sees it stopped, too.
        if time.monotonic() - began[0] > 1:
            os.kill(pid, signal.SIGCONT)
        return found

    failures._state_here = look_and_continue


def train_until_a_rank_is_gone(rank, phase, how, folder):
    """(message, ranks named, seconds) of the error that a survivor of rank 1 sees."""
    goes_on = how == "SIGCONT"
    if not goes_on:
        ask_briefly()
    layer = MoELayer(8, 6, 6, 2, ep_group=dist.group.WORLD, dispatcher="alltoall")
    model = torch.nn.Sequential(torch.nn.ModuleDict({"moe": layer}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pids = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    if goes_on and rank == 0:
        go_on_once_seen(pids[1])
    # So many tokens that each rank sends some to each other one, whatever the router draws.
    x = torch.randn(30, 8, requires_grad=True)
    layer(x).sum().backward()
    sync_gradients(layer)

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP if goes_on else getattr(signal, how))

    if rank == 1:
        layer_hooks(layer, phase, stop)
    started = time.monotonic()
    try:
        y = layer(x)
        if rank == 1 and phase == "backward":
            y.register_hook(lambda grad: stop())
        y.sum().backward()
        if rank == 1 and phase == "sync":
            stop()
        sync_gradients(layer)
        if rank == 1 and phase == "checkpoint":
            stop()
        checkpoint.save(folder, layer, optimizer)
    except RankFailureError as error:
        found = str(error), error.ranks, time.monotonic() - started
    else:
        found = "no error", (), 0.0
    if rank == 0 and how == "SIGSTOP":
        time.sleep(2)  # the other one looks at it, too
        os.kill(pids[1], signal.SIGKILL)
    return found


GONE = [(phase, "SIGKILL") for phase in ("dispatch", "combine", "checkpoint")]
GONE += [(phase, "SIGSTOP") for phase in ("experts", "backward", "sync", "checkpoint")]
# Stopped for longer than the group waits; it then goes on, and answers.
GONE += [(phase, "SIGCONT") for phase in ("experts", "checkpoint")]
SAID = {
    "SIGKILL": "rank 1 died",
    "SIGSTOP": "rank 1 did not answer",
    "SIGCONT": "rank 1 had been stopped by a signal",
}
WORDS = {
    "dispatch": "AllToAllDispatcher counts of layer '0.moe'",
    "experts": "AllToAllDispatcher combine of layer '0.moe'",
    "combine": "AllToAllDispatcher combine of layer '0.moe'",
    "backward": "AllToAllDispatcher combine backward of layer '0.moe'",
    "sync": "sync_gradients",
    "checkpoint": "checkpoint.save",
}


@pytest.fixture(scope="module")
def survivors(tmp_path_factory):
    def run(phase, how):
        folder = str(tmp_path_factory.mktemp(f"{phase}-{how}"))
        limits = {"may_die": [1], "group_timeout": 3}
        return spawn_ranks(train_until_a_rank_is_gone, 3, phase, how, folder, **limits)

    return at_once(run, GONE)


@pytest.mark.parametrize(("phase", "how"), GONE)
def test_survivors_name_rank_and_phase(survivors, phase, how):
    found = survivors[phase, how].result()
    for rank in (0, 2):
        message, named, seconds = found[rank]
        assert named == (1,), message
        assert WORDS[phase] in message
        assert SAID[how] in message
        # The group's timeout, the wait for answers, and what a busy machine takes.
        assert seconds < 3 + (5 if how == "SIGCONT" else 1) + 10
