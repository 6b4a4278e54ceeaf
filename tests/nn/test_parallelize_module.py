"""Our layers under torch's plans of tensor parallelism, against one process."""

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch.distributed.tensor import Replicate, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import moe_ext
from moe_ext.distributed import count_traffic
from moe_ext.nn.feed_forward import _pairs

CHECKS = Checks()
# Sums of some dozen products in another order.
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
GATED = {
    "shared_expert.gate_up_proj": ColwiseParallel(),
    "shared_expert.down_proj": RowwiseParallel(),
}


def layer(activation="gelu", ffn_dim=16, gate=False, **options):
    torch.manual_seed(0)
    shared = moe_ext.nn.SharedExpert(ffn_dim, gate=gate)
    made = moe_ext.MoELayer(8, 12, 4, 2, activation=activation, shared_expert=shared, **options)
    return made.double()


def assert_equals_one_process(plan, **options):
    """Output and all gradients, those of the input too; the layer with the plan."""
    whole, x = layer(**options), torch.randn(2, 5, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = parallelize_module(layer(**options), mesh, plan)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [module(x) for module, x in zip((whole, parts), inputs, strict=True)]
    torch.testing.assert_close(*results, **TIGHT)
    for y in results:
        y.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **TIGHT)
    named = zip(whole.named_parameters(), parts.parameters(), strict=True)
    for (name, p), q in named:
        grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        torch.testing.assert_close(grad, p.grad, **TIGHT, msg=name)
    return parts


@CHECKS()
def plain_shared_expert():
    plan = {
        "shared_expert.up_proj": ColwiseParallel(),
        "shared_expert.down_proj": RowwiseParallel(),
    }
    parts = assert_equals_one_process(plan)
    assert parts.shared_expert.up_proj.weight.to_local().numel() == 8 * 16 // dist.get_world_size()


@CHECKS((16, False), (12, True))
def gated_shared_expert(ffn_dim, bias):
    options = {"activation": "swiglu", "ffn_dim": ffn_dim, "gate": True, "bias": bias}
    with count_traffic() as traffic:
        parts = assert_equals_one_process(GATED, **options)
    columns = 2 * ffn_dim // dist.get_world_size()
    assert parts.shared_expert.gate_up_proj.weight.to_local().shape == (columns, 8)
    # 10 tokens, forward and backward, of columns whose pair is elsewhere.
    assert 0 < traffic.sent_bytes["all_to_all"] <= 2 * columns * 10 * 8


@CHECKS()
def gate_of_the_shared_expert_by_columns():
    plan = {"shared_expert_gate": ColwiseParallel(output_layouts=Replicate())}
    assert_equals_one_process(plan, activation="swiglu", gate=True)


@CHECKS()
def refuses_parts_that_are_not_equal():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gated = parallelize_module(layer("swiglu", 6 + dist.get_world_size() % 4 // 2), mesh, GATED)
    with pytest.raises(ValueError, match="ColwiseParallel an equal part of [67] pairs on each"):
        gated(torch.randn(10, 8, dtype=torch.float64))


test_over_ranks = CHECKS.test(2, 4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_columns_go_to_the_rank_of_their_pair(num_ranks):
    columns = torch.arange(24).chunk(num_ranks)
    found = [_pairs(12, num_ranks, rank) for rank in range(num_ranks)]
    sent = [columns[rank][order].split(send) for rank, (order, send, _) in enumerate(found)]
    gates = torch.arange(12).chunk(num_ranks)
    for rank, (_, _, receive) in enumerate(found):
        got = [parts[rank] for parts in sent]
        assert receive == [len(part) for part in got]
        assert torch.cat(got).equal(torch.cat([gates[rank], 12 + gates[rank]]))
