import torch
import torch.distributed as dist
from rank_checks import Checks, full
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext.nn import Capacity, SwitchRouter, set_routing_step

E, K = 4, 2
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def layers(capacity):
    """The expert-parallel layer and the same layer on one rank."""
    both = []
    for group in (dist.group.WORLD, None):
        torch.manual_seed(3)
        both.append(
            moe_ext.MoELayer(8, 6, E, K, ep_group=group, capacity=capacity, dtype=torch.float64)
        )
    both[1].loss_scale = 1.0 / dist.get_world_size()
    return both


def batches():
    """Of every rank, uneven."""
    generator = torch.Generator().manual_seed(5)
    sizes = [11 + 6 * rank for rank in range(dist.get_world_size())]
    return [torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in sizes]


def compare(capacity, prepare=lambda layer: None):
    """An expert takes its capacity from every rank, as one process would rank by rank."""
    sharded, whole = layers(capacity)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    prepare(sharded)
    prepare(whole)
    wanted = []
    for x in batches():
        y = whole(x)
        (y.square().sum() / num_ranks).backward()
        wanted.append((y.detach(), whole.metrics["num_dropped"]))
    y = sharded(batches()[rank])
    y.square().sum().backward()
    torch.testing.assert_close(y, wanted[rank][0], **TIGHT)
    assert torch.equal(sharded.metrics["num_dropped"], wanted[rank][1])
    for p, q in zip(sharded.experts.parameters(), whole.experts.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, **TIGHT)
    return sharded


def check_every_policy():
    for drop in ("position", "score", "choice", "batch_prioritized", "random"):
        for groups in (1, 3):
            layer = compare(
                Capacity(0.5, drop=drop, groups=groups), lambda layer: set_routing_step(layer, 3)
            )
            assert int(layer.metrics["num_dropped"]) > 0


def check_rerouting():
    compare(Capacity(0.7, overflow="reroute"))


class EvenShapes(nn.Module):
    """Experts that want the same number of rows each."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.ep_group, self.num_experts = inner, inner.ep_group, E
        self.seen = []

    def forward(self, rows, offsets):
        sizes = offsets.diff().tolist()
        assert len(set(sizes)) == 1
        self.seen.append(sizes[0])
        return self.inner(rows, offsets)


def check_padding_to_what_all_ranks_may_send():
    def prepare(layer):
        layer.experts = EvenShapes(layer.experts)

    capacity = Capacity(0.7, pad=True)
    layer = compare(capacity, prepare)
    rows = [capacity.rows_per_group(x.shape[0], K, E) for x in batches()]
    assert layer.experts.seen == [sum(rows)]


def check_random_drops_do_not_depend_on_the_number_of_ranks():
    capacity = Capacity(100.0, drop="random")
    sharded, whole = layers(capacity)
    xs = batches()
    first = sum(x.shape[0] for x in xs[: dist.get_rank()])
    set_routing_step(sharded, 2, first_token=first)
    set_routing_step(whole, 2)
    draws = [
        moe_ext.ops.routing_uniform(layer.router.rng_state, num_tokens, K, stream=3)
        for layer, num_tokens in (
            (sharded, xs[dist.get_rank()].shape[0]),
            (whole, sum(x.shape[0] for x in xs)),
        )
    ]
    assert torch.equal(draws[0], draws[1][first : first + draws[0].shape[0]])


def check_noise_does_not_depend_on_the_number_of_ranks_under_ddp():
    rank, x = dist.get_rank(), torch.randn(4 * dist.get_world_size(), 8)
    layer = moe_ext.MoELayer(8, 6, E, router=SwitchRouter(8, E, jitter_eps=0.5))
    # DDP copies rank 0's buffers to all ranks before every forward pass.
    wrapped = DistributedDataParallel(layer)
    set_routing_step(layer, 3)
    whole = layer.router(x).logits
    for _ in range(2):
        set_routing_step(layer, 3, first_token=4 * rank)
        seen = []
        hook = layer.router.register_forward_hook(
            lambda module, args, out, seen=seen: seen.append(out.logits)
        )
        wrapped(x[4 * rank : 4 * rank + 4]).sum().backward()
        hook.remove()
        torch.testing.assert_close(seen[0], whole[4 * rank : 4 * rank + 4])
    assert layer.router.rng_state.tolist() == [0, 0, 3, 4 * rank]


test_on_ranks = Checks.of(globals()).test(4)
