import functools
from unittest import mock

import torch
import torch.distributed as dist
from layer_oracle import outcome
from peak_memory import peak_bytes
from rank_checks import Checks, raised
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.comm import collectives
from moe_ext.dispatch import static_sizes
from moe_ext.nn import RowBudget

E, K, RANKS = 12, 2, 3
SIZES = [9, 4, 13]
CHECKS = Checks()
# The same products; a token's rows are summed in the order of the rounds.
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def world():
    return dist.group.WORLD


def make(budget=None, ep=True, **options):
    torch.manual_seed(3)
    options = {"dtype": torch.float64, **options}
    group = world() if ep else None
    return moe_ext.MoELayer(8, 6, E, K, ep_group=group, row_budget=budget, **options)


def batch(sizes, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5 + rank)
    return torch.randn(sizes[rank], 8, dtype=dtype, generator=generator)


class Exchanged:
    """Rows of every exchange, sent and received."""

    def __enter__(self):
        self.rows = []
        self.original = collectives._post

        def counted(out, x, *args):
            if x.is_floating_point():
                self.rows += [x.shape[0], out.shape[0]]
            return self.original(out, x, *args)

        collectives._post = counted
        return self

    def __exit__(self, *error):
        collectives._post = self.original


def compare(sizes, rows, *, static=False, one_expert=False, **options):
    """A budget changes nothing but the rows of each exchange; returns twice their number."""
    bounded, free = make(RowBudget(rows, static=static), **options), make(**options)
    if one_expert:
        for layer in (bounded, free):
            layer.router.weight.data.zero_()
    x = batch(sizes, dist.get_rank())
    want = outcome(free, x)
    with Exchanged() as exchanged:
        found = outcome(bounded, x)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    if static:
        # Rows and weights there, rows back, and the same backward, of a size that no count changes.
        assert set(exchanged.rows) == {rows // RANKS * RANKS}
        with torch.no_grad():
            torch.testing.assert_close(bounded(x), want[0], **TIGHT)
    assert max(exchanged.rows, default=0) <= rows
    for name in ("num_dropped", "num_tokens_per_expert"):
        assert torch.equal(bounded.metrics[name], free.metrics[name])
    again = outcome(bounded, x)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "deterministic"
    return len(exchanged.rows)


@CHECKS((False,), (True,))
def rounds_equal_the_layer_without_a_budget(static):
    whole = compare(SIZES, 500, static=static)
    for rows in (3, 11):
        assert compare(SIZES, rows, static=static) > whole
    compare(SIZES, 7, static=static, bias=True, activation="relu_squared", shared_expert=4)
    compare([40] * RANKS, 11, static=static, capacity=0.5)
    compare(SIZES, 6, static=static, one_expert=True, balance=0.0)
    # Ranks without tokens.
    compare([6, 0, 6], 5, static=static)
    compare([0] * RANKS, 5, static=static)


@CHECKS()
def a_budget_of_one_row():
    compare([2, 1, 3], 1)


@CHECKS()
def checkpointing():
    layer = make(RowBudget(5))
    x = batch([9] * RANKS, dist.get_rank())
    want = outcome(layer, x)
    for use_reentrant in (False, True):
        run = functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
        found = outcome(layer, x, run)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@CHECKS((200, False), (300, True))
def low_precision(rows, static):
    layer = make(RowBudget(rows, static=static), dtype=torch.bfloat16)
    free = make(dtype=torch.bfloat16)
    x = batch([150] * RANKS, dist.get_rank(), torch.bfloat16)
    with Exchanged() as exchanged:
        found = outcome(layer, x)
    assert max(exchanged.rows) <= rows
    for a, b in zip(found, outcome(free, x), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-1)


@CHECKS()
def drop_is_counted_and_keeps_the_budget():
    rank = dist.get_rank()
    layer = make(RowBudget(8, overflow="drop"), balance=0.0)
    free = make(balance=0.0)
    for one in (layer, free):
        one.router.weight.data.zero_()  # all on experts 0 and 1, which live on rank 0
    x = batch([9] * RANKS, rank)
    with Exchanged() as exchanged:
        found = outcome(layer, x)
    assert max(exchanged.rows) <= 8
    kept = 9 * K - int(layer.metrics["num_dropped"])
    total = torch.tensor(kept)
    dist.all_reduce(total)
    assert int(total) == 8, "the budget of rank 0 is used up"
    assert abs(kept - 8 / RANKS) < 1, "every rank gets its share"
    want = outcome(free, x)[0]
    whole = kept // K
    torch.testing.assert_close(found[0][:whole], want[:whole], **TIGHT)
    assert not found[0][whole + 1 :].any()
    assert all(gradient is not None for gradient in found)
    layer.row_budget = RowBudget(1000, overflow="drop")
    for a, b in zip(outcome(layer, x), outcome(free, x), strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    assert int(layer.metrics["num_dropped"]) == 0


@CHECKS()
def peak_with_all_tokens_on_one_expert():
    num_tokens, model_dim, ffn_dim, rows = 256, 32, 256, 64
    torch.manual_seed(3)
    layer = moe_ext.MoELayer(
        model_dim, ffn_dim, E, K, ep_group=world(), row_budget=RowBudget(rows), balance=0
    )
    layer.router.weight.data.zero_()
    x = torch.randn(num_tokens, model_dim, requires_grad=True)
    layer(x).sum().backward()
    layer.zero_grad()
    x.grad = None
    peak = peak_bytes(lambda: layer(x).sum().backward())
    parameters = sum(p.numel() for p in layer.experts.parameters())
    tables = num_tokens * (12 * K + 2 * E)
    bound = rows * (7 * model_dim + 5 * ffn_dim) + 4 * num_tokens * model_dim
    assert peak <= 4 * (bound + 2 * parameters + tables)


@CHECKS()
def static_drop_keeps_the_first_tokens_of_each_rank():
    layer = make(RowBudget(12, overflow="drop", static=True), balance=0.0)
    free = make(balance=0.0)
    for one in (layer, free):
        one.router.weight.data.zero_()  # all on experts 0 and 1, which live on rank 0
    x = batch([9] * RANKS, dist.get_rank())
    found, want = outcome(layer, x), outcome(free, x)
    kept = 12 // RANKS
    assert int(layer.metrics["num_dropped"]) == 9 * K - kept
    torch.testing.assert_close(found[0][: kept // K], want[0][: kept // K], **TIGHT)
    assert not found[0][kept // K :].any()
    layer.row_budget = RowBudget(1000, overflow="drop", static=True)
    for a, b in zip(outcome(layer, x), want, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    assert int(layer.metrics["num_dropped"]) == 0


@CHECKS((False,), (True,))
def budgets_are_compared_and_failures_are_told(static):
    rank = dist.get_rank()
    x = batch([9] * RANKS, rank)
    layer = make(RowBudget(6 + rank, static=static))
    raised(ValueError, r"row_budget.rows to be equal on every rank, got 6 on rank 0", layer, x)
    layer = make(RowBudget(6, static=static))
    told = r"expected x to be of shape" + ("" if rank == 1 else " .* on rank 1")
    raised(ValueError, told, layer, x[:, :7] if rank == 1 else x)
    outcome(layer, x)  # the group goes on


@CHECKS()
def what_a_static_budget_cannot_do_is_refused():
    x = batch([9] * RANKS, dist.get_rank())
    layer = make(RowBudget(1, static=True))
    raised(ValueError, rf"expected rows to be at least {RANKS}, one for each rank", layer, x)
    match = (
        r"MoELayer: expected dispatcher to be .*'alltoall'.* with row_budget.static, got 'dedup'"
    )
    raised(ValueError, match, lambda: make(RowBudget(6, static=True), dispatcher="dedup"))
    with mock.patch.object(static_sizes, "is_capturing", lambda device: True):
        match = r"expected overflow to be 'drop' where a CUDA graph is captured, .* got 'rounds'"
        raised(RuntimeError, match, make(RowBudget(6, static=True)), x)
        with mock.patch.object(static_sizes, "Agreement", None):
            outcome(make(RowBudget(6, static=True, overflow="drop")), x)


test_on_ranks = CHECKS.test(RANKS)
