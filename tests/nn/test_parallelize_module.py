"""Our layers under torch's plans of tensor parallelism, against one process."""

import pytest
import torch
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import moe_ext
from moe_ext.testing import spawn_ranks

PLAN = {"shared_expert.up_proj": ColwiseParallel(), "shared_expert.down_proj": RowwiseParallel()}


def layer():
    torch.manual_seed(0)
    return moe_ext.MoELayer(8, 12, 4, 2, activation="gelu", shared_ffn_dim=16).double()


def shared_expert_by_columns_and_rows(rank):
    whole, x = layer(), torch.randn(10, 8, dtype=torch.float64)
    parts = parallelize_module(layer(), init_device_mesh("cpu", (2,)), PLAN)
    assert parts.shared_expert.up_proj.weight.to_local().shape == (8, 8)
    results = [module(x) for module in (whole, parts)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    for y in results:
        y.square().sum().backward()
    named = zip(whole.named_parameters(), parts.parameters(), strict=True)
    for (name, p), q in named:
        grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        # Sums of some dozen products in another order.
        torch.testing.assert_close(grad, p.grad, rtol=1e-12, atol=1e-12, msg=name)


def gates_apart_from_their_ups(rank):
    mesh = init_device_mesh("cpu", (2,))
    gated = moe_ext.MoELayer(8, 12, 4, 2, shared_ffn_dim=16)
    parallelize_module(gated, mesh, {"shared_expert.gate_up_proj": ColwiseParallel()})
    with pytest.raises(ValueError, match="FeedForward: expected gate_up_proj to give 32 columns"):
        gated(torch.randn(10, 8))


def test_shared_expert_by_columns_and_rows():
    spawn_ranks(shared_expert_by_columns_and_rows, 2)


def test_refuses_gates_apart_from_their_ups():
    spawn_ranks(gates_apart_from_their_ups, 2)
