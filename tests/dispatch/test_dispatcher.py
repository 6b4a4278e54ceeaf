import datetime
import functools
import itertools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dispatchers import sent_messages
from rank_checks import Checks, full, raised
from torch import nn

from moe_ext import MoELayer
from moe_ext.comm import collectives, groups
from moe_ext.comm.c10d import default_store
from moe_ext.comm.reports import Underway
from moe_ext.dispatch import base
from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.distributed import AllToAllDispatcher, LocalDispatcher, TokenDispatcher, count_traffic
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import (
    Balance,
    CosineRouter,
    Dispatch,
    GroupedExperts,
    ModuleExperts,
    ResidualMoE,
    RowBudget,
)

E = 12  # a multiple of every group size used


def world():
    return dist.group.WORLD


def layers(dtype=torch.float64, **kwargs):
    """The expert-parallel layer and the same layer on one rank."""
    both = []
    for group in (world(), None):
        torch.manual_seed(3)
        both.append(MoELayer(8, 6, E, 2, ep_group=group, dtype=dtype, **kwargs))
    # One process sums over the ranks' batches; the ranks average.
    both[1].loss_scale = 1.0 / dist.get_world_size()
    return both


def batches(sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, 8, dtype=dtype, generator=generator) for n in sizes]


def compare(sizes, masks=None, rtol=1e-12, atol=1e-13, **kwargs):
    """Forward and backward against one process, with a loss that weighs every output element."""
    sharded, whole = layers(**kwargs)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    xs, ys, x_grads = batches(sizes), [], []
    for r, x in enumerate(xs):
        x.requires_grad_()
        y = whole(x, token_mask=None if masks is None else masks[r])
        (y.square().sum() / num_ranks).backward()
        ys.append(y.detach())
        x_grads.append(x.grad * num_ranks)
    x = xs[rank].detach().clone().requires_grad_()
    y = sharded(x, token_mask=None if masks is None else masks[rank])
    y.square().sum().backward()
    torch.testing.assert_close(y, ys[rank], rtol=rtol, atol=atol)
    torch.testing.assert_close(x.grad, x_grads[rank], rtol=rtol, atol=atol)
    for (name, p), q in zip(
        sharded.experts.named_parameters(), whole.experts.parameters(), strict=True
    ):
        assert p.grad is not None, name
        torch.testing.assert_close(full(p.grad), q.grad, rtol=rtol, atol=atol)
    router_grad = sharded.router.weight.grad / num_ranks
    dist.all_reduce(router_grad)
    torch.testing.assert_close(router_grad, whole.router.weight.grad, rtol=rtol, atol=atol)
    return sharded


def check_equals_one_process():
    sizes = [5, 9, 1][: dist.get_world_size()]
    compare(sizes)
    compare(sizes, bias=True, activation="relu_squared", balance=Balance(z_coef=0.2))
    compare(sizes, shared_expert=4)


def check_bits_of_one_process():
    """Weights that travel to the experts are applied there as on one process."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype, bias in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        # Large enough for the library to sum all rows in one order.
        options = {"dtype": dtype, "bias": bias, "balance": 0.0}
        made = []
        for group in (world(), None):
            torch.manual_seed(3)
            made.append(MoELayer(64, 96, E, 4, ep_group=group, **options))
        sizes = [50 - 3 * r for r in range(num_ranks)]
        every = torch.randn(sum(sizes), 64, dtype=dtype)
        x = every.split(sizes)[rank].clone().requires_grad_()
        y, want = made[0](x), made[1](every.requires_grad_())
        y.float().square().sum().backward()
        want.float().square().sum().backward()
        assert torch.equal(y, want.split(sizes)[rank])
        if num_ranks == 2:  # a half is exact, a third is not
            assert torch.equal(x.grad, every.grad.split(sizes)[rank])


def check_capacity_counts_on_the_sending_rank():
    layer = compare([40] * dist.get_world_size(), capacity=0.5)
    assert int(layer.metrics["num_dropped"]) > 0


def check_masks():
    sizes = [6] * dist.get_world_size()
    masks = [torch.arange(6) % 2 == r % 2 for r in range(len(sizes))]
    masks[-1] = torch.zeros(6, dtype=torch.bool)
    compare(sizes, masks)


def check_received_rows_have_an_expert_each():
    """So that experts take ends on a GPU, whatever the mask of the senders."""
    seen, product = [], GroupedExperts._product

    def recorded(self, name, x, bounds, *others):
        seen.append((bounds.dtype, int(bounds[-1]) == x.shape[0]))
        return product(self, name, x, bounds, *others)

    sizes = [5, 9, 1][: dist.get_world_size()]
    masks = [torch.arange(n) % 3 != 1 for n in sizes]
    with (
        mock.patch("moe_ext.nn.parts.wants_ends", lambda rows: True),
        mock.patch.object(GroupedExperts, "_product", recorded),
    ):
        compare(sizes, masks)
        compare(sizes, bias=True)
        layers(row_budget=RowBudget(8))[0](batches(sizes)[dist.get_rank()])
    ends = [is_whole for dtype, is_whole in seen if dtype == torch.int32]
    # Two products of each comparison's sharded layer, and of the second one's for each batch.
    assert ends == [True] * (4 + 2 * len(sizes)) and len(seen) > len(ends)


def check_every_pattern_of_empty_ranks():
    for sizes in itertools.product([0, 4], repeat=dist.get_world_size()):
        compare(list(sizes))


def check_all_tokens_to_one_rank():
    sharded, whole = layers(balance=0.0)
    xs = batches([7] * dist.get_world_size())
    for layer in (sharded, whole):
        # Equal logits: ties go to experts 0 and 1, which live on rank 0.
        layer.router.weight.data.zero_()
    y = sharded(xs[dist.get_rank()])
    torch.testing.assert_close(y, whole(xs[dist.get_rank()]))
    y.sum().backward()
    assert local_part(sharded.experts.down_proj.grad).any() == (dist.get_rank() == 0)


def check_number_of_collectives():
    def sent_by(function):
        waits = []

        def wait(self, **options):
            waits.append(len(sent.call_args_list))
            return Underway.wait(self, **options)

        waiting = type("Waiting", (Underway,), {"wait": wait})
        with sent_messages() as sent, mock.patch.object(collectives, "Underway", waiting):
            result = function()
        given = [call.args[1] for call in sent.call_args_list]
        return result, [(x.dtype, tuple(x.shape[1:])) for x in given], waits

    (sharded, _), (biased, _) = layers(), layers(bias=True)
    x = batches([5])[0].requires_grad_()
    sharded(x), biased(x)
    counts = (torch.int64, (6 + E // dist.get_world_size(),))
    rows, weights = (torch.float64, (8,)), (torch.float64, (1,))
    y, sent, waits = sent_by(lambda: sharded(x))
    # The weights travel beside the rows, and so do their gradients: both wait for three messages.
    assert (sent, waits) == ([counts, weights, rows, rows], [1, 3, 3, 4])
    _, *found = sent_by(lambda: y.sum().backward())
    assert found == [[rows, weights, rows], [1, 3, 3]]
    # Weighted where the token is: no weight travels.
    assert sent_by(lambda: biased(x).sum().backward())[1] == [counts, rows, rows, rows, rows]


class Told(torch.autograd.Function):
    """Tells rank 1 that this rank is here, forward and backward."""

    @staticmethod
    def forward(ctx, x, key):
        ctx.key = key
        default_store().set(f"{key} forward", "1")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        default_store().set(f"{ctx.key} backward", "1")
        return grad, None


def check_other_work_runs_while_rows_travel():
    """Rank 1 sends nothing before the others have done theirs: whoever waits first fails."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    mine, patience = f"beside on {rank}", datetime.timedelta(seconds=20)
    others = [f"beside on {r}" for r in range(num_ranks) if r != 1] if rank == 1 else []
    x = torch.randn(num_ranks, 3, requires_grad=True)
    z = torch.randn(2, requires_grad=True)
    done = []
    default_store().wait([f"{key} forward" for key in others], patience)
    one_each = [1] * num_ranks
    rows = all_to_all_rows(
        x, world(), one_each, one_each, meanwhile=lambda: done.append(Told.apply(z, mine))
    )
    rows.register_hook(
        lambda _: default_store().wait([f"{key} backward" for key in others], patience)
    )
    (rows.sum() + done[0].sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(z.grad, torch.ones_like(z))


def check_rows_are_counted():
    """Rows of tokens travel, and the padding of 16-bit rows of experts does not."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float64, torch.bfloat16):
        sharded, whole = layers(dtype=dtype)
        x = batches([9] * num_ranks, dtype)[rank].requires_grad_()
        gate = whole.router(x.detach()).gate
        target = gate.topk_idx // (E // num_ranks)
        sent = torch.bincount(target.flatten(), minlength=num_ranks)
        table = [torch.empty_like(sent) for _ in range(num_ranks)]
        dist.all_gather(table, sent)
        others = [p for p in range(num_ranks) if p != rank]
        there, back = sum(int(sent[p]) for p in others), sum(int(table[p][rank]) for p in others)
        row, weight = 8 * dtype.itemsize, gate.topk_weights.itemsize
        sharded(x)
        with count_traffic() as traffic:
            y = sharded(x)
        assert traffic.calls == {"all_to_all": 3}
        assert traffic.total_bytes == (there + back) * row + there * weight
        with count_traffic() as traffic:
            y.sum().backward()
        assert traffic.total_bytes == (there + back) * row + back * weight


def check_compiling_around_the_layer():
    if dist.get_world_size() != 2:
        return  # what is compiled is the same on more ranks
    sharded, _ = layers()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).double(), sharded)
    compiled = torch.compile(model, backend="aot_eager")
    x = batches([5])[0]
    model(x).square().sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled(x).square().sum().backward()
    for p, w in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, w)


def check_a_frozen_input_needs_no_gradient():
    sharded, _ = layers()
    for p in sharded.router.parameters():
        p.requires_grad_(False)
    sharded(batches([5])[0]).sum().backward()
    assert sharded.experts.down_proj.grad is not None


def check_an_input_that_needs_no_gradient_on_one_rank():
    """It takes part in the backward pass of the others: an idle rank passes an empty tensor."""
    mine = dist.get_rank() == dist.get_world_size() - 1
    sizes = [5] * (dist.get_world_size() - 1)
    rows = RowBudget(2 * E)
    for size, options in itertools.product((0, 4), ({}, {"row_budget": rows})):
        for frozen in (False, True):
            found = []
            for needs in (True, not mine):
                sharded, _ = layers(**options)
                sharded.experts.requires_grad_(not frozen)
                x = batches([*sizes, size])[dist.get_rank()].requires_grad_(needs)
                sharded(x).square().sum().backward()
                found.append([p.grad for p in sharded.parameters()] + [None if mine else x.grad])
            for one, other in zip(*found, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def check_an_input_of_inference_mode_on_one_rank():
    mine, x = dist.get_rank() == dist.get_world_size() - 1, batches([5])[0]
    with torch.inference_mode():
        other = x.clone()
    linears = ModuleExperts.build(lambda _: nn.Linear(8, 8).double(), E, ep_group=world())
    for options in (
        *({"dispatcher": name} for name in ("alltoall", "dedup", "allgather")),
        {"row_budget": RowBudget(4 * E, static=True)},
        {"experts": linears},
    ):
        torch.manual_seed(3)
        layer = MoELayer(8, 6, E, 2, ep_group=world(), dtype=x.dtype, **options)
        layer.router.requires_grad_(False)
        found = []
        for one in (x, other if mine else x.clone().requires_grad_()):
            layer.zero_grad()
            layer(one).square().sum().backward()
            found.append([local_part(p.grad) for p in layer.experts.parameters()])
        torch.testing.assert_close(*found)


def check_experts_that_are_frozen_on_some_ranks():
    """The others train theirs, with nothing before them that needs a gradient."""
    x, rank, num_local = batches([5])[0], dist.get_rank(), E // dist.get_world_size()

    def linear(expert):
        torch.manual_seed(expert)
        return nn.Linear(8, 8, dtype=x.dtype).requires_grad_(expert >= num_local)

    def gradients(group, **options):
        experts = ModuleExperts.build(linear, E, ep_group=group)
        torch.manual_seed(3)
        options |= {"experts": experts, "ep_group": group, "balance": 0.0, "dtype": x.dtype}
        layer = MoELayer(8, 6, E, 2, **options)
        layer.router.requires_grad_(False)
        y = layer(x) * torch.ones((), dtype=x.dtype, requires_grad=True)
        y.square().sum().backward()
        return [p.grad for p in experts.parameters()]

    want = gradients(None)[2 * num_local * rank :][: 2 * num_local]
    for options in (
        *({"dispatcher": name} for name in ("alltoall", "dedup", "allgather")),
        {"dispatcher": Dispatch("alltoall", overlap=2)},
        *({"row_budget": RowBudget(n * E, static=n > 1)} for n in (1, 2)),
    ):
        for one, other in zip(gradients(world(), **options), want, strict=True):
            assert (one is None) == (other is None) == (rank == 0)
            if one is not None:
                torch.testing.assert_close(local_part(one), other)


def check_gradients_that_are_recorded_on_some_ranks():
    layer = MoELayer(8, 6, E, 2, ep_group=world())
    with torch.set_grad_enabled(dist.get_rank() != 0):
        text = r"torch.is_grad_enabled\(\) .* to be equal .* got False on rank 0, True on rank 1"
        raised(ValueError, text, layer, torch.randn(4, 8))
    with torch.no_grad():
        layer(torch.randn(4, 8))


def check_a_bad_input_on_one_rank_raises_everywhere():
    torch.manual_seed(0)
    layer = MoELayer(8, 6, E, 2, ep_group=world())
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    x = torch.randn(4, 8)
    wrong_dim, wrong_dtype, nan = x[:, :5], x.double(), torch.full_like(x, torch.nan)
    where = "" if mine else rf" on rank {last}"
    for error, text, wrong in (
        (ValueError, r"expected x to be of shape \[..., 8\], got \(4, 5\)", wrong_dim),
        (TypeError, r"expected x to be of dtype torch.float32.* got torch.float64.*", wrong_dtype),
        (TypeError, r"expected x to be floating point, got torch.int64", x.long()),
        (RuntimeError, r"(?i)nan.*", nan),
    ):
        raised(error, text + where, layer, wrong if mine else x)
    for _ in range(2):
        raised(TypeError, "expected x to be a tensor, got NoneType", layer, None if mine else x)
    good, told = torch.ones(4, dtype=torch.bool), "expected token_mask to be "
    for moe in (layer, ResidualMoE(8, 6, E, 2, ep_group=world())):
        for error, text, wrong in (
            (TypeError, r"bool, got torch.float32", good.float()),
            (ValueError, r"of shape \(4,\), got \(3,\)", good[:3]),
        ):
            masked = functools.partial(moe, token_mask=wrong if mine else good)
            raised(error, told + text + where, masked, x)
        moe(x)


def check_sizes_that_do_not_divide():
    num_ranks = dist.get_world_size()
    text = rf"expected num_experts to be a multiple of .*{num_ranks}\)?, got {E + 1}"
    raised(ValueError, text, AllToAllDispatcher, E + 1, world())
    raised(ValueError, text, lambda: MoELayer(8, 6, E + 1, ep_group=world()))
    text = r"expected dispatcher to be one of .* with an ep_group of several ranks, got 'local'"
    raised(ValueError, text, lambda: MoELayer(8, 6, E, ep_group=world(), dispatcher="local"))
    groups = [dist.new_group([rank]) for rank in range(num_ranks)]
    own_group = groups[dist.get_rank()]
    for made, text in (
        (AllToAllDispatcher(2 * E, world()), rf"dispatcher to have num_experts={E}, got {2 * E}"),
        (AllToAllDispatcher(E, own_group), rf"to have num_ranks={num_ranks}, got 1"),
        (LocalDispatcher(E), "with an ep_group of several ranks, got LocalDispatcher"),
    ):
        raised(ValueError, text, lambda m=made: MoELayer(8, 6, E, ep_group=world(), dispatcher=m))
    own = torch.nn.Linear(8, 8)
    text = r"expected experts to carry the layer's .*ep_group, got None"
    raised(ValueError, text, lambda: MoELayer(8, 6, E, ep_group=world(), experts=own))


class OwnTransport(TokenDispatcher):
    """A transport of the caller's own: how counts and rows travel, and nothing else."""

    def __init__(self):
        super().__init__(E, world())
        self.sent = []

    def exchange_counts(self, message_PM, *, operation):
        return collectives.all_to_all(message_PM, self.group, operation=operation)

    def exchange_rows(self, rows_ND, send, receive, *, grad_scale, operation, meanwhile=None):
        self.sent.append(rows_ND.shape[0])
        found = all_to_all_rows(
            rows_ND, self.group, send, receive, grad_scale=grad_scale, operation=operation
        )
        if meanwhile is not None:
            meanwhile()
        return found


def check_a_transport_of_ones_own_loses_nothing():
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    x = batches([9, 4, 13][:num_ranks])[rank]
    for options in (
        {},
        {"shared_expert": 4},
        {"row_budget": RowBudget(5)},
        {"capacity": 0.5},
    ):
        found, dispatcher = [], OwnTransport()
        for one in (dispatcher, "alltoall"):
            torch.manual_seed(3)
            layer = MoELayer(8, 6, E, 2, ep_group=world(), dispatcher=one, dtype=x.dtype, **options)
            mine = x.clone().requires_grad_()
            y = layer(mine)
            y.square().sum().backward()
            found.append([y, mine.grad, *[p.grad for p in layer.parameters()]])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), options
        if "row_budget" in options:
            assert 0 < max(dispatcher.sent) <= 5
    layer = MoELayer(8, 6, E, 2, ep_group=world(), dispatcher=OwnTransport(), dtype=x.dtype)
    if rank == num_ranks - 1:
        raised(TypeError, r"expected x to be floating point", layer, x.long())
    else:
        text = rf"OwnTransport: .*to be floating point, got torch.int64 on rank {num_ranks - 1}"
        raised(TypeError, text, layer, x)
    layer(x)


class OwnDispatch(TokenDispatcher):
    """A dispatcher that does all by itself."""

    def __init__(self):
        super().__init__(E, world())
        self.inner = AllToAllDispatcher(E, world())

    def dispatch(self, *args, **options):
        return self.inner.dispatch(*args, **options)

    def combine(self, rows, metadata, *, meanwhile=None):
        return self.inner.combine(rows, metadata, meanwhile=meanwhile)


def check_a_dispatch_of_ones_own():
    x, found = batches([7])[0], []
    for one in (OwnDispatch(), "auto"):
        torch.manual_seed(3)
        layer = MoELayer(8, 6, E, 2, ep_group=world(), dispatcher=one, dtype=x.dtype)
        raised(TypeError, r"expected x to be floating point", layer, x.long())
        found.append(layer(x))
    # Weighted behind the experts, not inside.
    torch.testing.assert_close(*found)
    layer.dispatcher, layer.row_budget = OwnDispatch(), RowBudget(5)
    raised(ValueError, r"to be one of .* with row_budget, got OwnDispatch", layer, x)


class Around(nn.Module):
    """A part of a layer inside a module that has none of its options."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        return self.inner(*args, **options)


def check_a_part_in_the_place_of_another():
    x = batches([5])[0]
    for name, make in (
        ("router", lambda _: CosineRouter(8, E, 2, dtype=x.dtype)),
        ("router", Around),
        ("experts", Around),
        ("shared_expert", Around),
        ("shared_expert", lambda _: None),
    ):
        both = layers(shared_expert=4)
        for layer in both:
            layer(x)
            torch.manual_seed(4)
            setattr(layer, name, make(getattr(layer, name)))
        torch.testing.assert_close(*[layer(x) for layer in both])
        sharded, _ = layers(shared_expert=4)
        sharded(x)
        if dist.get_rank() == 0:
            setattr(sharded, name, make(getattr(sharded, name)))
        text = rf"expected {name}\b.* to be equal on every rank, got .* on rank 0, "
        raised(ValueError, text, sharded, x)


test_expert_parallel = Checks.of(globals()).test(2, 3)


def test_local_dispatch_and_combine():
    dispatcher = LocalDispatcher(3)
    x = torch.randn(4, 5)
    idx = torch.tensor([[2, 0], [1, 2], [-1, -1], [0, 1]])
    weights = torch.rand(4, 2)
    rows, offsets, metadata = dispatcher.dispatch(x, idx, weights)
    assert offsets.tolist() == [0, 2, 4, 6]
    assert torch.equal(rows[:6], x[[0, 3, 1, 3, 0, 1]])
    y = dispatcher.combine(rows, metadata)
    want = x * weights.sum(1, keepdim=True)
    want[2] = 0
    torch.testing.assert_close(y, want)
    _, offsets, metadata = dispatcher.dispatch(x, idx, weights, capacity=1)
    assert offsets.tolist() == [0, 1, 2, 3]
    assert int(metadata.num_dropped) == 3


class Plain:
    """An object with `dispatch` and `combine` alone."""

    def __init__(self):
        self.inner = LocalDispatcher(E)

    def dispatch(self, *args, **options):
        return self.inner.dispatch(*args, **options)

    def combine(self, rows, metadata):
        return self.inner.combine(rows, metadata)


def test_an_object_with_dispatch_and_combine_alone():
    x, found = batches([7])[0], []
    for dispatcher in (Plain(), "local"):
        torch.manual_seed(3)
        layer = MoELayer(8, 6, E, 2, dispatcher=dispatcher, shared_expert=4, dtype=x.dtype)
        found.append(layer(x))
    # Weighted behind the experts, not inside.
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_16_bit_rows_of_an_expert_end_in_zero_rows(dtype):
    dispatcher = LocalDispatcher(3)
    x = torch.randn(50, 5).to(dtype).requires_grad_()
    idx = torch.rand(50, 3).topk(1, dim=1).indices
    rows, offsets, metadata = dispatcher.dispatch(x, idx, torch.ones(50, 1))
    counts = idx.flatten().bincount(minlength=3)
    step = 1 if dtype == torch.float32 else 8
    assert torch.equal(offsets.diff(), (counts + step - 1) // step * step)
    assert int((rows == 0).all(dim=1).sum()) == rows.shape[0] - 50
    y = dispatcher.combine(rows, metadata)
    y.sum().backward()
    assert torch.equal(y, x) and (x.grad == 1).all()


def test_drop_by_score_keeps_the_largest_weights():
    idx = torch.zeros(4, 1, dtype=torch.int64)
    weights = torch.tensor([[0.1], [0.9], [0.5], [0.7]], requires_grad=True)
    x = torch.arange(4.0)[:, None]
    dispatcher = LocalDispatcher(1, drop_policy="score")
    rows, offsets, _ = dispatcher.dispatch(x, idx, weights, capacity=2)
    assert offsets.tolist() == [0, 2]
    assert rows[:2, 0].tolist() == [1.0, 3.0]


def test_tokens_over_the_default_group_of_nccl_are_warned_of(monkeypatch):
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        own = dist.new_group([0])
        monkeypatch.setattr(groups, "group_size", lambda group: 2)
        assert not groups.shares_communicator(dist.group.WORLD)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        assert not groups.shares_communicator(own)
        with pytest.warns(UserWarning, match="give experts a group of their own"):
            AllToAllDispatcher(4, dist.group.WORLD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AllToAllDispatcher(4, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
        base._warn_of_shared_communicator.cache_clear()
