"""Recording, replay, pinning and metrics of expert-parallel layers."""

import torch
import torch.distributed as dist
from rank_checks import Checks, raised
from torch.utils.checkpoint import checkpoint

from moe_ext import MoELayer
from moe_ext.nn import RoutingRecord, pinned_routing, reduce_metrics

E = 6


def layers():
    """The same layer spread over the ranks and on one, with other routers than the recorded."""
    both = []
    for group in (dist.group.WORLD, None):
        torch.manual_seed(3)
        both.append(MoELayer(8, 6, E, 2, ep_group=group, dtype=torch.float64))
    return both


def tokens():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(5 + 3 * dist.get_rank(), 8, dtype=torch.float64, generator=generator)


def check_replay_across_ranks_equals_replay_on_one():
    sharded, whole = layers()
    x = tokens()
    generator = torch.Generator().manual_seed(9 + dist.get_rank())
    record = RoutingRecord()
    idx = torch.rand(x.shape[0], E, generator=generator).argsort(dim=1)[:, :2]
    record.add("(model)", idx, E, step=4)
    record = RoutingRecord.from_bytes(record.to_bytes())
    results = []
    for layer in (sharded, whole):
        again = RoutingRecord()
        with record.replaying(layer, step=4), again.recording(layer, step=4):
            y = layer(x)
        y.square().sum().backward()
        assert again == record
        results.append((y, layer.router.weight.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def check_pinned_layers_run_their_collectives_again():
    gradients = []
    for pin in (True, False):
        layer, _ = layers()
        x = tokens().requires_grad_()
        if pin:
            y = checkpoint(layer, x, use_reentrant=False, context_fn=pinned_routing)
        else:
            y = layer(x)
        y.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def check_a_record_that_one_rank_lacks_fails_on_every_rank():
    layer, _ = layers()
    record, x = RoutingRecord(), tokens()
    rows = x.shape[0] + (dist.get_rank() == 1)
    record.add("(model)", torch.zeros(rows, 2, dtype=torch.int64) + torch.arange(2), E)
    with record.replaying(layer):
        if dist.get_rank() == 1:
            raised(ValueError, r"expected \(model\) to choose 2 experts for 9", layer, x)
        else:
            raised(Exception, "rank 1", layer, x)


def check_reduced_metrics_are_those_of_all_tokens():
    layer, _ = layers()
    layer(tokens())
    metrics = reduce_metrics(layer.metrics, dist.group.WORLD)
    counts = layer.metrics["num_tokens_per_expert"].clone()
    dist.all_reduce(counts)
    assert metrics["num_tokens_per_expert"].dtype == torch.int64
    assert torch.equal(metrics["num_tokens_per_expert"], counts)
    torch.testing.assert_close(metrics["load"], (counts / counts.sum()).float())
    torch.testing.assert_close(
        metrics["max_over_mean"], (counts.max() / counts.double().mean()).float()
    )
    for name in ("balance_loss", "z_loss"):
        mean = layer.metrics[name].clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(metrics[name], mean / dist.get_world_size())


test_two_ranks = Checks.of(globals()).test(2)
