"""A stand-in for NCCL over Gloo: order alone tells messages apart, and streams wait, not the host.

A receive holds NaN until a stream has waited for it, so that a use before its event shows in all
results. Memory of both sides has to live, unchanged, until its event.
"""

import contextlib
import weakref
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from moe_ext.comm import c10d, point_to_point
from moe_ext.pipeline import executor

# A rank that waits longer for what the other one sends waits for ever.
LIMIT = timedelta(seconds=3)


class Communicator:
    """In the place of a group of two ranks: messages of one way, in the order of the calls."""

    def __init__(self, nccl, group, name):
        self.nccl, self.group, self.name = nccl, group, name
        self.num_posted, self.way = 0, None

    def post(self, way, x, peer, tag):
        assert self.way in (None, way), f"{self.name}: messages both ways stand behind each other"
        self.way, number = way, self.num_posted
        self.num_posted += 1
        self.nccl.log.append(f"{way} {tag} behind the main stream")
        kind = Sent if way == "send" else Received
        return kind(self, x, peer, number, tag)


class Work:
    """A message of a communicator, by its number there; Gloo carries its tag before it."""

    def __init__(self, line, x, peer, number, tag):
        self.line, self.peer, self.tag, self.is_over = line, peer, tag, False
        self.x = weakref.ref(x)
        self.places = 2 * number, 2 * number + 1
        line.nccl.works.append(self)
        self.begin(x)
        self.bytes = x.detach().numpy().tobytes()

    def wait(self):
        """The main stream waits; the host must not, and does so here for the data alone."""
        self.line.nccl.log.append(f"the main stream waits for {self.line.way} {self.tag}")
        self.end()

    def end(self):
        x = None if self.is_over else self.x()
        if x is None:
            assert self.is_over, f"{self.line.name}: memory of {self.tag} went before its event"
            return
        self.is_over = True
        assert x.detach().numpy().tobytes() == self.bytes, "memory changed before its event"
        self.finish(x)

    def is_completed(self):
        if self.line.nccl.is_fast and not self.is_over and self.line.way == "send":
            self.end()
        return self.is_over


class Sent(Work):
    def begin(self, x):
        self.parts = torch.tensor([self.tag]), x.detach().clone()
        self.under = [
            dist.isend(part, self.peer, self.line.group, place)
            for part, place in zip(self.parts, self.places, strict=True)
        ]

    def finish(self, x):
        pass

    def leave(self):
        """Gloo forgets what has not gone when its work is forgotten."""
        for part in self.under:
            part.wait()


class Received(Work):
    def begin(self, x):
        x.fill_(torch.nan)

    def leave(self):
        pass

    def finish(self, x):
        head = torch.empty(1, dtype=torch.int64)
        try:
            dist.irecv(head, self.peer, self.line.group, self.places[0]).wait(LIMIT)
        except RuntimeError:
            raise AssertionError(
                f"deadlock on {self.line.name}: nothing was sent for {self.tag}"
            ) from None
        # Without a host sync that `no_host_waits` would see.
        if head.numpy()[0] != self.tag:
            raise AssertionError(
                f"deadlock on {self.line.name}: {head.numpy()[0]} is sent where {self.tag} is "
                "received"
            )
        with torch.no_grad():
            dist.irecv(x, self.peer, self.line.group, self.places[1]).wait()


class FakeNccl:
    """Pipelines inside `in_place` take every tensor for one on CUDA.

    Args:
        is_fast: what is sent has gone as soon as somebody asks.
    """

    def __init__(self, is_fast=False):
        self.is_fast, self.log, self.works = is_fast, [], []

    def local_group(self, ranks, like, device):
        return Communicator(self, c10d.local_group(ranks, like, device), str(ranks))

    def twin_group(self, group, device):
        return c10d.twin_group(group, device)

    def __getattr__(self, name):
        return getattr(dist, name)

    def isend(self, x, peer, group, tag, **place):
        if isinstance(group, Communicator):
            return group.post("send", x, peer, tag)
        return dist.isend(x, peer, group, tag, **place)

    def irecv(self, x, peer, group, tag, **place):
        if isinstance(group, Communicator):
            return group.post("receive", x, peer, tag)
        return dist.irecv(x, peer, group, tag, **place)

    @contextlib.contextmanager
    def in_place(self):
        known = {"cpu": "gloo", "cuda": "nccl"}
        with (
            mock.patch.object(point_to_point, "goes_in_order", lambda device: True),
            mock.patch.object(executor, "backends", lambda group: known),
            mock.patch.object(point_to_point, "c10d", self),
            mock.patch.object(point_to_point, "dist", self),
        ):
            yield
        assert self.works, "nothing went over NCCL"
        for work in self.works:
            assert work.is_over, f"{work.line.name}: nobody waits for {work.line.way} {work.tag}"
            work.leave()
