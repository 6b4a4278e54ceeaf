"""Layouts by names, and matrix products that they divide two and three ways.

All ranks run in one process, by torch's local tensors.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_ext.distributed import layout_placements

GATHER = "c10d_functional.all_gather_into_tensor"
SCATTER = "c10d_functional.reduce_scatter_tensor"


@pytest.fixture
def ranks():
    """Eight of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with LocalTensorMode(8):
        yield
    dist.destroy_process_group()


def multiply(mesh, x_placements, weight_placements, computed=None, result=None):
    """Placements of a product and its collectives, the factors redistributed first if so said."""
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16, dtype=torch.float64) for _ in range(2))
    x = distribute_tensor(a, mesh, x_placements)
    weight = distribute_tensor(b, mesh, weight_placements)
    with CommDebugMode() as mode:
        if computed:
            x = x.redistribute(placements=layout_placements(computed, mesh, "m k"))
            weight = weight.redistribute(placements=layout_placements(computed, mesh, "k n"))
        y = x @ weight
        if result:
            assert y.placements[-1].is_partial()
            y = y.redistribute(placements=result)
    # Sums of sixteen products of numbers of size 1, in another order.
    torch.testing.assert_close(y.full_tensor().reconcile(), a @ b, rtol=1e-12, atol=1e-12)
    return y.placements, {str(kind): n for kind, n in mode.get_comm_counts().items() if n}


def test_layouts(ranks):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    layout = "batch:dp;experts:ep;hidden:tp"
    found = layout_placements(layout, mesh, "experts model hidden")
    assert found == [Replicate(), Shard(0), Shard(2)]
    assert layout_placements(layout, mesh, "batch model") == [Shard(0), Replicate(), Replicate()]
    for wrong in ("batch", "batch:up", "batch:dp;batch:ep"):
        with pytest.raises(ValueError, match=r"layout_placements: expected layout to be"):
            layout_placements(wrong, mesh, "batch model")
    with pytest.raises(ValueError, match=r"expected axis dp to divide one dimension of 'a b'"):
        layout_placements("a:dp;b:dp", mesh, "a b")


def test_two_dimensions(ranks):
    """Each rank holds a block of either matrix: a row and a column of blocks are gathered."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("i", "j"))
    blocks = layout_placements("row:i;column:j", mesh, "row column")
    assert blocks == [Shard(0), Shard(1)]
    assert multiply(mesh, blocks, blocks) == (tuple(blocks), {GATHER: 2})


def test_two_and_a_half_dimensions(ranks):
    """Two copies of a grid's weights, each with its part of the rows of the other matrix."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copy", "i", "j"))
    weight = layout_placements("row:i;column:j", mesh, "row column")
    assert weight == [Replicate(), Shard(0), Shard(1)]
    x = (Shard(0), Shard(0), Shard(1))
    assert multiply(mesh, x, weight) == (x, {GATHER: 2})


def test_three_dimensions(ranks):
    """Blocks of three divided dimensions: no matrix lies twice, and the sums are scattered."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("i", "j", "l"))
    x, weight = [Shard(0), Shard(0), Shard(1)], [Shard(0), Shard(1), Shard(0)]
    result = (Shard(0), Shard(1), Shard(0))
    found = multiply(mesh, x, weight, "m:i;n:j;k:l", result)
    # Two gathers for the weight: torch gathers an outer axis only behind the inner ones.
    assert found == (result, {GATHER: 3, SCATTER: 1})
