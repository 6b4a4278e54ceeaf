"""Experts that travel for an even load, against a layer that moves none."""

import contextlib
import functools
import os

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks, full, raised
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import distributed as md
from moe_ext.comm import agreement, collectives, pending
from moe_ext.comm.link import Link
from moe_ext.comm.reports import Underway
from moe_ext.dispatch import rows
from moe_ext.nn import Capacity, ModuleExperts, Rebalance, RowBudget, update_placement
from moe_ext.nn.balance.moved import _slots

D, F, E, K = 8, 6, 8, 2
# Sums of a few hundred products of numbers near one, in another order.
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
ALWAYS = Rebalance(break_even=0)
RANKS = Checks()


def make(rebalance=None, group=None, **options):
    torch.manual_seed(3)
    group = dist.group.WORLD if group is None else group
    fields = ("dispatcher", "combine", "wire", "overlap")
    way = {"dispatcher": "alltoall"} | {n: options.pop(n) for n in fields if n in options}
    way = moe_ext.nn.Dispatch(rebalance=rebalance, **way)
    options = {"dtype": torch.float64, "bias": True} | options
    layer = moe_ext.MoELayer(D, F, E, K, ep_group=group, dispatcher=way, **options)
    # Nearly all tokens choose experts 0 and 1, of rank 0.
    with torch.no_grad():
        layer.router.weight[:2] += 3
    return layer


def batch(step=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(9 + 4 * rank, D, dtype=torch.float64, generator=generator) + 0.5
    return x.requires_grad_()


def run(layer, call=lambda layer, x: layer(x), steps=1):
    """Outputs, and gradients of tokens and parameters."""
    found = []
    for step in range(steps):
        x = batch(step)
        y = call(layer, x)
        (y * y).sum().backward()
        found += [y.detach(), x.grad]
    return found, [p.grad for p in layer.parameters()]


def assert_same(layer, want, *args):
    (outputs, grads), (wanted, wanted_grads) = run(layer, *args), want
    for a, b in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


@RANKS(("alltoall",), ("dedup",), ("hierarchical",), ("allgather",), ("auto",))
def equal_to_unbalanced(dispatcher):
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # nodes of the hierarchical dispatcher
    layer = make(ALWAYS, dispatcher=dispatcher)
    assert_same(layer, run(make(dispatcher=dispatcher)))
    del os.environ["LOCAL_WORLD_SIZE"]
    moved = collectives.all_gather(
        layer.metrics["num_moved_experts"][None], dist.group.WORLD, operation="test"
    )
    assert moved.sum() > 0
    assert moved.max() <= E // dist.get_world_size()


@RANKS()
def same_bits():
    """Of outputs, with products that are exact: their own bits depend on the number of rows."""
    options = {"activation": "relu", "bias": False}
    plain, moved = make(**options), make(ALWAYS, **options)
    x = batch().detach()
    with torch.no_grad():
        for layer in (plain, moved):
            for parameter in layer.experts.parameters():
                parameter.copy_((16 * parameter).round() / 16)
        x = (8 * x).round() / 8
        assert torch.equal(moved(x), plain(x))
        assert torch.equal(make(ALWAYS, dispatcher="dedup")(x), make(ALWAYS)(x))


@RANKS()
def masked_tokens():
    mask = torch.arange(batch().shape[0]) % 3 > 0

    def masked(layer, x):
        return layer(x, token_mask=mask)

    layer = make(ALWAYS)
    assert_same(layer, run(make(), masked), masked)
    moved = layer.metrics["num_moved_experts"][None]
    assert collectives.all_gather(moved, dist.group.WORLD, operation="test").sum() > 0


# Modules that post messages.
POSTING = (agreement, collectives, pending, rows)


class Messages(list):
    """Collectives of this rank while the context is open: kind, and whether it brings integers."""

    def __enter__(self):

        def posted(work, call):
            self.append((call.kind, not call.x.is_floating_point()))
            return Underway(work, call)

        for module in POSTING:
            module.Underway = posted
        return self

    def __exit__(self, *raised):
        for module in POSTING:
            module.Underway = Underway

    @property
    def num_integers(self):
        return sum(integers for _, integers in self)


FREE = Link(0.0, 1e15, 1e15)
MODES = {
    "always": ALWAYS,
    "pays": Rebalance(link=FREE, flops=1e3),
    "does not pay": Rebalance(link=Link.of_rate(1e3), flops=1e15),
    "no plan": Rebalance("periodic"),
}


@RANKS(*((mode, passes) for mode in MODES for passes in (1, 2)))
def counts_travel_once(mode, passes):
    """In a forward pass, and once more where it is run again."""
    layer, plain, found = make(MODES[mode]), make(), []
    for each in (plain, layer):
        each(batch())
        with Messages() as sent:
            (each(batch()) if passes == 1 else recomputed(each, batch())).sum().backward()
        found.append(sent)
        assert sent.num_integers == passes
    moves = 4 * 2 * passes if mode in ("always", "pays") else 0
    assert int(layer.metrics["num_moved_experts"]) <= moves
    # Both ways of four weights and biases; those of a recomputation go out once more.
    extra = len(found[1]) - len(found[0])
    assert extra == (4 * (1 + passes) if moves else 0), (mode, found)


@RANKS(("dedup", 1), ("hierarchical", 2), ("allgather", 1))
def numbers_of_tokens_are_exchanged_for_each_hop(dispatcher, hops):
    """They do not follow from counts of experts; dedup brings indices in bytes, too."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    layer, plain = make(ALWAYS, dispatcher=dispatcher), make(dispatcher=dispatcher)
    del os.environ["LOCAL_WORLD_SIZE"]
    for each, counts in ((plain, 0), (layer, 1)):
        each(batch())
        with Messages() as sent:
            each(batch())
        assert sent.num_integers == counts + 2 * hops


@RANKS()
def every_rank_runs_its_share():
    layer, sizes = make(ALWAYS), []
    layer.experts.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[0]))
    run(layer)
    ranks = range(dist.get_world_size())
    rows = K * sum(batch(rank=rank).shape[0] for rank in ranks)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert sizes == [rows // size + (rank < rows % size)]


def recomputed(layer, x, reentrant=False):
    return checkpoint(layer, x, use_reentrant=reentrant)


@RANKS((False,), (True,))
def recomputation_and_accumulation(reentrant):
    want = run(make(), steps=3)
    call = functools.partial(recomputed, reentrant=reentrant)
    assert_same(make(ALWAYS), want, call, 3)


@RANKS()
def replicas():
    """Experts over two ranks, with two copies of each: averaged, and sharded by FSDP2."""
    mesh = md.MoEMesh(dp=2, ep=dist.get_world_size() // 2)
    plain, moved, sharded = (make(how, mesh.ep_group) for how in (None, ALWAYS, ALWAYS))
    md.fully_shard(sharded, mesh)
    outputs = [run(layer)[0] for layer in (plain, moved, sharded)]
    md.sync_gradients(plain)
    md.sync_gradients(moved)
    for layer, found in zip((moved, sharded), outputs[1:], strict=True):
        for a, b in zip(found, outputs[0], strict=True):
            torch.testing.assert_close(a, b, **TIGHT)
        for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), full(q.grad), **TIGHT)


class Recomputed(torch.nn.Module):
    """A layer whose forward pass is run again in the backward pass."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return recomputed(self.layer, x, self.reentrant)


@RANKS((False,), (True,))
def wrapped_by_torch(reentrant):
    """DistributedDataParallel, two replicas of the experts, one all-reduce in three passes."""
    mesh, found = md.MoEMesh(dp=2, ep=dist.get_world_size() // 2), []
    for rebalance in (None, ALWAYS):
        layer = make(rebalance, mesh.ep_group)
        wrapper = md.data_parallel(Recomputed(layer, reentrant))
        for step in range(3):
            with wrapper.no_sync() if step < 2 else contextlib.nullcontext():
                y = wrapper(batch(step))
                (y * y).sum().backward()
        found.append([p.grad for p in layer.parameters()])
    moved = layer.metrics["num_moved_experts"][None]
    assert collectives.all_gather(moved, dist.group.WORLD, operation="test").sum() > 0
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, **TIGHT)


@RANKS()
def cost_decides():
    slow = Rebalance(link=Link.of_rate(1e3), flops=1e15)
    layer = make(slow)
    assert_same(layer, run(make()))
    assert int(layer.metrics["num_moved_experts"]) == 0
    layer = make(Rebalance(link=Link(0.0, 1e15, 1e15), flops=1e3))
    assert_same(layer, run(make()))
    sent = collectives.all_gather(
        layer.metrics["moved_bytes"][None], dist.group.WORLD, operation="t"
    )
    assert sent[0] > 0
    # The heaviest rank by itself is as quick as all together: nothing to save.
    free = Link(0.0, 1e15, 1e15)
    layer = make(Rebalance(link=free, flops=1e3, flops_alone=1e3 * dist.get_world_size()))
    assert_same(layer, run(make()))
    assert int(layer.metrics["num_moved_experts"]) == 0
    # Measured: no more than an answer, the same on every rank.
    layer = make("exact")
    run(layer)
    link, flops, alone = layer._rebalancer.rates
    assert alone >= flops > 0
    rates = torch.tensor([[link.exchange_bandwidth, flops, alone]], dtype=torch.float64)
    everyone = collectives.all_gather(rates, dist.group.WORLD, operation="t")
    assert (everyone == rates).all()


@RANKS()
def periodic():
    layer, want = make(Rebalance("periodic", break_even=0, every=2)), run(make(), steps=1)
    assert_same(layer, want)
    assert layer._rebalancer.plan is None
    layer.zero_grad()
    update_placement(layer)
    update_placement(layer)
    first = layer._rebalancer.plan
    assert first is not None
    assert_same(layer, want)
    # The load is what it was: no plan is lighter.
    update_placement(layer)
    update_placement(layer)
    assert layer._rebalancer.plan is first


@RANKS()
def frozen_experts_and_no_gradients():
    layer, plain = make(ALWAYS), make()
    for each in (layer, plain):
        each.experts.requires_grad_(False)
        run(each)
    torch.testing.assert_close(layer.router.weight.grad, plain.router.weight.grad, **TIGHT)
    with torch.no_grad():
        torch.testing.assert_close(layer(batch()), plain(batch()), **TIGHT)


class Doubled(torch.nn.Module):
    """Parametrization."""

    def forward(self, weight):
        return 2 * weight


@RANKS(("gate_up_proj",), ("gate_up_proj_bias",), ("down_proj",), ("down_proj_bias",))
def experts_with_a_parametrization(name):
    layer, plain = make(ALWAYS), make()
    for each in (layer, plain):
        torch.nn.utils.parametrize.register_parametrization(each.experts, name, Doubled())
    assert_same(layer, run(plain))


@RANKS()
def a_failing_rank_is_named():
    layer = make(ALWAYS)
    wrong = dist.get_rank() == 0
    x = batch().float()[:, :3] if wrong else batch()
    raised(ValueError, "expected x to be of shape", layer, x)
    assert_same(layer, run(make()))


@RANKS(("alltoall",), ("dedup",))
def a_wrong_choice_is_told(dispatcher):
    layer = make(ALWAYS, dispatcher=dispatcher)

    def beyond(router, args, found):
        return found._replace(gate=found.gate._replace(topk_idx=found.gate.topk_idx + E))

    if dist.get_rank() == 1:
        hook = layer.router.register_forward_hook(beyond)
    raised(RuntimeError, "permute_tokens: expected topk_idx", layer, batch())
    if dist.get_rank() == 1:
        hook.remove()
    with torch.set_grad_enabled(dist.get_rank() == 0):
        raised(ValueError, "is_grad_enabled.* to be equal on every rank", layer, batch())
    assert_same(layer, run(make(dispatcher=dispatcher)))


@RANKS()
def an_error_behind_the_counts_is_told():
    layer = make(ALWAYS)
    own, layer._rebalancer._moves = layer._rebalancer._moves, None
    if dist.get_rank() != 1:
        layer._rebalancer._moves = own
    raised(TypeError, "NoneType", layer, batch())
    layer._rebalancer._moves = own
    assert_same(layer, run(make()))


@RANKS()
def refused():
    experts = ModuleExperts.build(lambda index: torch.nn.Linear(D, D), E, ep_group=dist.group.WORLD)
    for options, match in (
        ({"capacity": Capacity(1.0)}, "expected capacity to be None with rebalance"),
        ({"row_budget": RowBudget(64)}, "expected row_budget to be None with rebalance"),
        ({"overlap": 2}, "expected overlap to be 1 with rebalance, got 2"),
        ({"experts": experts}, "expected experts to be GroupedExperts with rebalance"),
        ({"dispatcher": "deep_ep"}, "expected dispatcher to be one of"),
    ):
        raised(ValueError, match, functools.partial(make, "exact", **options))
    size = dist.get_world_size()
    with_etp = functools.partial(make, "exact", md.MoEMesh(ep=size // 2, etp=2).ep_group)
    raised(ValueError, "expected etp of ep_group to be 1 with rebalance, got 2", with_etp)
    raised(ValueError, "Rebalance: expected mode to be one of", make, "even")
    match = "Rebalance: expected flops to be above 0, got 0.0"
    raised(ValueError, match, functools.partial(Rebalance, flops=0.0))
    match = "Rebalance: expected flops_alone to be at least flops"
    for flops in (None, 2.0):
        raised(ValueError, match, functools.partial(Rebalance, flops=flops, flops_alone=1.0))


test_over_four_ranks = RANKS.test(4)


def test_one_rank_moves_nothing():
    layer = moe_ext.MoELayer(D, F, E, K, dispatcher=moe_ext.nn.Dispatch(rebalance="exact"))
    layer(torch.randn(4, D))
    assert "moved_bytes" not in layer.metrics


def test_rows_take_the_slots_of_their_experts_in_order():
    expert_N = torch.tensor([2, -1, 0, 2, 2, 0, -1, 1])
    # Expert 0 in slots 0 and 5, a row each; 1 in slot 1; 2 in slots 3, for two rows, and 4.
    slots, rows = torch.tensor([0, 5, 1, 3, 4]), torch.tensor([1, 1, 1, 2, 1])
    _, tables = moe_ext.ops.permute_tokens(torch.zeros(8, 0), expert_N[:, None], 3)
    found = _slots(slots, rows, tables.slot_of_row[:6], 8)
    assert found.tolist() == [3, -1, 0, 3, 4, 5, -1, 1]


def test_a_plan_of_rows_on_a_gpu_waits_for_its_counts_alone():
    """Fake tensors have no values: what looks at one raises."""
    with torch._subclasses.FakeTensorMode():
        counts, place_R = torch.zeros(E, device="cuda").long(), torch.zeros(7, device="cuda").long()
        plan = moe_ext.ops.plan_balance(counts, 2)
        rows_PS = moe_ext.ops.split_rows(counts.expand(2, -1), plan)
        assert {x.device.type for x in (*plan, rows_PS)} == {"cpu"}
        rows_S = rows_PS.select(0, 0)
        assert _slots(torch.zeros_like(rows_S), rows_S, place_R, 9).is_cuda
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            counts.tolist()
