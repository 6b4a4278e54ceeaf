"""OneFlow's table of split, broadcast and partial tensors: the collective and bytes of a change.

Ranks run in one process, by torch's local tensors.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

P, N = 4, 16
KINDS = {"S0": Shard(0), "S1": Shard(1), "B": Replicate(), "P": Partial()}
# From, to: the collective, and what leaves a rank as a share of the tensor. (Over processes torch
# makes an all-gather of S to S on CPU, since Gloo lacks its all-to-all.)
GATHER = ("all_gather_into_tensor", (P - 1) / P)
EXCHANGE = ("shard_dim_alltoall", (P - 1) / P**2)
SCATTER = ("reduce_scatter_tensor", (P - 1) / P)
NOTHING = (None, 0)
CHANGES = {
    ("S0", "S0"): NOTHING,
    ("S0", "S1"): EXCHANGE,
    ("S1", "S0"): EXCHANGE,
    ("S0", "B"): GATHER,
    ("S1", "B"): GATHER,
    ("B", "S0"): NOTHING,
    ("B", "S1"): NOTHING,
    ("P", "S0"): SCATTER,
    ("P", "S1"): SCATTER,
    ("P", "B"): ("all_reduce", 2 * (P - 1) / P),
}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=P)
    with LocalTensorMode(P):
        yield init_device_mesh("cpu", (P,))
    dist.destroy_process_group()


# Of the local input to a collective, what leaves a rank.
SENT = {
    "all_gather_into_tensor": P - 1,
    "shard_dim_alltoall": (P - 1) / P,
    "reduce_scatter_tensor": (P - 1) / P,
    "all_reduce": 2 * (P - 1) / P,
}


class Sent(TorchDispatchMode):
    """Bytes that a rank sends in collectives, and their names."""

    def __init__(self):
        super().__init__()
        self.names, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in SENT:
            self.names.append(name)
            self.bytes += SENT[name] * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_collective_and_bytes(mesh, source, target):
    whole = torch.arange(N * N, dtype=torch.float64).view(N, N)
    first = Partial() if source == "P" else Replicate()
    part = whole / P if source == "P" else whole
    x = DTensor.from_local(part, mesh, [first], run_check=False)
    if source.startswith("S"):
        x = x.redistribute(placements=[KINDS[source]])
    with Sent() as sent:
        y = x.redistribute(placements=[KINDS[target]])
    name, share = CHANGES[source, target]
    assert sent.names == ([name] if name else [])
    assert sent.bytes == share * 8 * N * N
    assert y.placements == (KINDS[target],)
    assert torch.equal(y.full_tensor().reconcile(), whole)
