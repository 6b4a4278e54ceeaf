"""Rows that travel in few bits, against one process that rounds where they would travel."""

import functools
import itertools

import emulation
import pytest
import torch
import torch.distributed as dist
from dispatchers import assert_same_bits, dispatcher, tokens
from layer_oracle import outcome
from pairwise import pairs_on
from rank_checks import Checks, full, raised
from torch.utils.checkpoint import checkpoint

from moe_ext import MoELayer, ops
from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.dispatch.wire import decode_messages, encode_messages, join_messages
from moe_ext.distributed import (
    LocalDispatcher,
    Wire,
    count_traffic,
)
from moe_ext.nn import Dispatch, RowBudget
from moe_ext.ops.quantize import row_bytes

E, D, K, T = 12, 150, 4, 9  # E is a multiple of every group size used; D of no block
FORMATS = ("int8", "fp8", "mx")
WAYS = ("alltoall", "dedup", "allgather", "hierarchical")
COUNTS = (3, 4)


def rounded(x, format):
    if format is None:
        return x
    codes = ops.quantize_rows(x.float(), format)
    return ops.dequantize_rows(codes, x.shape[1], format).to(x.dtype)


def layer(way, wire=None, dtype=torch.float32, combine="exact", **options):
    torch.manual_seed(3)
    made = dispatcher(way, E, wire=wire, combine=combine)
    made = Dispatch(made, overlap=options.pop("overlap", 1))
    options = {"balance": 0.0, **options}
    return MoELayer(D, 24, E, K, ep_group=dist.group.WORLD, dispatcher=made, dtype=dtype, **options)


class Rounding(torch.autograd.Function):
    """Rounds the rows, and their gradients by themselves, divided by a factor meanwhile."""

    @staticmethod
    def forward(ctx, rows, formats, factor):
        ctx.format, ctx.factor = formats[1], factor
        return rounded(rows, formats[0])

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad / ctx.factor, ctx.format) * ctx.factor, None, None


class RoundingDispatcher(LocalDispatcher):
    """All experts on this rank, with the rounding of a wire between `num_ranks` ranks."""

    def __init__(self, wire, num_ranks):
        super().__init__(E)
        self.rounds, self.factor = wire, num_ranks

    def dispatch(self, *args, **options):
        rows, offsets, metadata = super().dispatch(*args, **options)
        # The experts' gradients are divided by the number of ranks, those of tokens are not.
        return Rounding.apply(rows, self.rounds.out, self.factor), offsets, metadata

    def row_weights(self, rows, metadata):
        return LocalDispatcher(E).row_weights(rows, metadata)

    def bring_back(self, rows, metadata, *, meanwhile=None):
        return Rounding.apply(rows, self.rounds.back, 1)


def whole(wire):
    torch.manual_seed(3)
    made = RoundingDispatcher(Wire.of("test", wire), dist.get_world_size())
    return MoELayer(D, 24, E, K, dispatcher=made, balance=0.0).double()


def check_rows_and_gradients_are_rounded_once_each():
    """Bits, for uneven and zero splits, of every dtype and pair of formats."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    splits_PP = torch.arange(num_ranks)[:, None] * torch.arange(num_ranks) + 1
    splits_PP[0, -1] = splits_PP[-1, :] = 0
    send, receive = splits_PP[rank].tolist(), splits_PP[:, rank].tolist()
    for dtype, formats in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        [*zip(FORMATS, FORMATS[1:] + FORMATS[:1], strict=True), ("int8", None), (None, "mx")],
    ):
        x = tokens(sum(send), D, dtype).requires_grad_()
        options = {"grad_scale": 0.5, "formats": formats}
        y = all_to_all_rows(x, dist.group.WORLD, send, receive, **options)
        there = rounded(x.detach(), formats[0])
        want = all_to_all_rows(there, dist.group.WORLD, send, receive)
        assert y.dtype == dtype and torch.equal(y, want)
        grad = tokens(sum(receive), D, dtype, rank + 10)
        y.backward(grad)
        grad = rounded(grad, formats[1])
        back = all_to_all_rows(grad, dist.group.WORLD, receive, send)
        assert torch.equal(x.grad, back * 0.5)


def check_equals_one_process_that_rounds():
    """Outputs, and gradients but for elements that float64 rounds to the next code."""
    num_ranks = dist.get_world_size()
    wires = (*FORMATS, Wire("int8", "fp8", "mx", "int8"), Wire(combine="mx"))
    found = {wire: outcome(layer("alltoall", wire), tokens(T, D)) for wire in wires}
    plain = outcome(whole(None), tokens(T, D).double())
    for wire, (y, x_grad, _, *experts) in found.items():
        own = outcome(whole(wire), tokens(T, D).double())
        del own[2]  # of the router, which the ranks do not share
        for grad in own[2:]:
            # Gradients of experts are means over ranks.
            dist.all_reduce(grad)
            grad /= num_ranks
        for actual, want in zip([y, x_grad, *map(full, experts)], own, strict=True):
            # An element that lies between two codes moves by a step: by 1/40 of the typical
            # element for "int8", by 1/8 of itself for the others. With one in a thousand of them
            # that is 4e-3 of the norm.
            assert (actual - want).norm() < 4e-3 * want.norm(), wire
        for want, exact in zip(own[:2], plain[:2], strict=True):
            assert (exact - want).norm() > 4e-3 * want.norm() or wire == Wire(combine="mx")


def check_all_dispatchers_have_the_same_bits():
    """Outputs; gradients where a token's gradient is rounded before it is weighted, not after."""
    rank = dist.get_rank()
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, wire in pairs_on(dist.get_world_size(), COUNTS, dtypes, FORMATS):
        x = tokens(0 if rank == 1 else T, D, dtype)
        plain, once, *others = (outcome(layer(way, wire, dtype), x) for way in WAYS)
        assert torch.equal(plain[0], once[0])
        for found in others:
            assert_same_bits(found, once)
        for a, b in zip(plain, once, strict=True):
            # "fp8" is off by 1/16 of each number at most, twice.
            assert (a - b).float().norm() <= 0.125 * b.float().norm()


def check_lossless_keeps_every_bit():
    rank, world = dist.get_rank(), dist.get_world_size()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    ways = (("alltoall", "exact"), ("dedup", "exact"), ("hierarchical", "reduced"))
    for (way, combine), dtype in pairs_on(world, COUNTS, ways, dtypes):
        x = tokens(0 if rank == 1 else 400, D, dtype)
        sent, steps = [], []
        for wire in (None, "lossless"):
            one = layer(way, wire, dtype, combine)
            outcome(one, x[:1])
            with count_traffic() as traffic:
                steps.append(outcome(one, x))
            sent.append(torch.tensor(float(traffic.total_bytes)))
            dist.all_reduce(sent[-1])
        assert_same_bits(*steps)
        # Counts and indices are in both; short messages of many ranks have more in front.
        share = {torch.bfloat16: 0.76, torch.float16: 0.93, torch.float32: 0.89}[dtype]
        assert 0.6 < sent[1] / sent[0] < share + 0.01 * world, (way, dtype)
    for options in ({"row_budget": RowBudget(301)}, {"overlap": 2}):
        x = tokens(100, D, torch.bfloat16)
        both = (layer("dedup", wire, torch.bfloat16, **options) for wire in (None, "lossless"))
        assert_same_bits(*(outcome(one, x) for one in both))
    # Kernels know of no ranks.
    if emulation.is_built() and world == COUNTS[0]:
        launches, x = emulation.num_launches(), x[:12]
        with emulation.emulated_cuda():
            both = (layer("dedup", wire, torch.bfloat16) for wire in (None, "lossless"))
            assert_same_bits(*(outcome(one, x) for one in both))
        assert emulation.num_launches() > launches
    text = "expected wire to send tokens in rows of one length"
    raised(ValueError, text, functools.partial(dispatcher, "allgather", E, wire="lossless"))
    one = MoELayer(D, 24, E, K, ep_group=dist.group.WORLD, dispatcher=Dispatch(wire="lossless"))
    one(tokens(T, D))
    assert "allgather" not in [c.name for c in one.explain_dispatch().candidates]


def check_reduced_rounds_the_sums():
    for way in WAYS[1:]:
        want = outcome(layer(way, combine="reduced"), tokens(T, D))
        for wire in ("int8", Wire("int8", "int8", "int8", "int8")):
            found = outcome(layer(way, wire, combine="reduced"), tokens(T, D))
            for a, b in zip(found, want, strict=True):
                assert 0 < (a - b).norm() < 0.05 * b.norm()


def check_bytes():
    rank = dist.get_rank()
    choices = (torch.float32, torch.bfloat16), ("alltoall", "dedup"), ("int8", "mx")
    for dtype, way, wire in pairs_on(dist.get_world_size(), COUNTS, *choices):
        sent = {}
        for chosen in (None, wire):
            one = layer(way, chosen, dtype)
            x = tokens(30, D, dtype).requires_grad_()
            one(x)
            with count_traffic() as there:
                y = one(x)
            with count_traffic() as back:
                y.sum().backward()
            sent[chosen] = there.total_bytes, back.total_bytes
        target_TK = one.router(x).gate.topk_idx // (E // dist.get_world_size())
        away_TK = target_TK != rank
        rows = int(away_TK.sum())
        if way == "dedup":
            ranks = torch.nn.functional.one_hot(target_TK, dist.get_world_size()).amax(1)
            rows = int(ranks.sum() - ranks[:, rank].sum())
        saved = D * dtype.itemsize - row_bytes(D, wire)
        assert sent[None][0] - sent[wire][0] == rows * saved
        # Gradients of results go to the experts, as tokens do; those of tokens come back as is.
        assert sent[None][1] - sent[wire][1] == rows * saved


def check_chunks_and_recomputation():
    for way in ("alltoall", "dedup"):
        want = outcome(layer(way, "int8"), tokens(T, D))
        found = outcome(layer(way, "int8", row_budget=RowBudget(11)), tokens(T, D))
        torch.testing.assert_close(found[0], want[0])
        for a, b in zip(found, want, strict=True):
            assert (a - b).norm() < 4e-3 * b.norm()
        one = layer(way, "int8")
        x = tokens(T, D).requires_grad_()
        checkpoint(one, x, use_reentrant=False).square().sum().backward()
        assert torch.equal(x.grad, want[1])


def check_what_is_not_finite_arrives_as_nan():
    rank = dist.get_rank()
    idx = torch.arange(T * K).view(T, K) % E
    weights = torch.full((T, K), 0.5)
    for way, wire in itertools.product(WAYS, FORMATS):
        block = 32 if wire == "mx" else 128
        one, x = dispatcher(way, E, wire=wire), tokens(T, D).requires_grad_()
        with torch.no_grad():
            x[4, 40] = float("inf") if rank == 0 else 1.0
        rows, _, metadata = one.dispatch(x, idx, weights)
        y = one.combine(rows, metadata)
        lost = torch.zeros(T, D, dtype=torch.bool)
        lost[4, 40 // block * block : (40 // block + 1) * block] = rank == 0
        assert torch.equal(y.isnan(), lost)
        y.backward(torch.ones(T, D).masked_fill(lost, float("nan")))
        assert torch.equal(x.grad.isnan(), lost)


def check_short_rows_travel_as_they_are():
    world = dist.group.WORLD
    x = torch.randn(5, 2).bfloat16()  # 4 bytes a row; 6 as int8
    send = [5, *[0] * (dist.get_world_size() - 1)]
    receive = [5 if dist.get_rank() == 0 else 0] * dist.get_world_size()
    y = all_to_all_rows(x, world, send, receive, formats=("int8", None))
    if dist.get_rank() == 0:
        assert torch.equal(y[:5], x) and y.shape == (5 * dist.get_world_size(), 2)


def check_auto_chooses_among_dispatchers_with_the_wire():
    one = MoELayer(D, 24, E, K, ep_group=dist.group.WORLD, dispatcher=Dispatch(wire="mx"))
    with torch.no_grad():
        y = one(tokens(T, D))
    assert one.dispatcher.wire == Wire(dispatch="mx", backward_dispatch="mx")
    other = layer("alltoall", "mx")
    other.load_state_dict(one.state_dict())
    assert torch.equal(y, other(tokens(T, D)))
    sent = {c.name: c.sent_bytes for c in one.explain_dispatch().candidates}
    rows = T * K * (1 - 1 / dist.get_world_size())
    assert sent["alltoall"] == pytest.approx(rows * (row_bytes(D, "mx") + 4 * D))


def check_what_cannot_be_served():
    make = functools.partial(MoELayer, D, 24, E, K, ep_group=dist.group.WORLD)
    text = r"Dispatch: expected wire to be one of \(None, 'int8', 'fp8', 'mx', 'lossless'\)"
    raised(ValueError, text, functools.partial(Dispatch, wire="int4"))
    text = r"with Wire\(dispatch='int8'.*which has fewer digits, got torch.float64; leave wire out"
    for way in WAYS:
        one = layer(way, "int8", torch.float64)
        raised(TypeError, text, one, tokens(T, D, torch.float64))
    by_name = make(dispatcher=Dispatch(wire="mx"))
    assert "wire=Wire(dispatch='mx', combine=None, backward_dispatch='mx'" in repr(by_name)


CHECKS = Checks.of(globals())


@pytest.mark.parametrize("num_ranks", COUNTS)
@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(num_ranks, name):
    CHECKS.assert_passed(num_ranks, name)


def test_messages_keep_every_bit_of_every_number(device):
    x = torch.randn(300, 64, device=device).bfloat16()
    x[3], x[4], x[5, ::2], x[6] = float("nan"), -0.0, float("inf"), 1e-40
    # Of another rank without rows, of one row that coding would make longer, and of this rank.
    counts, own = [120, 0, 1, 179], 3
    messages, lengths_P = encode_messages(x, counts, own)
    lengths = lengths_P.tolist()
    assert lengths[1:] == [0, 128, 179 * 128] and lengths[0] < 0.8 * 120 * 128
    sent = join_messages(x, counts, messages, lengths)
    out = decode_messages(sent, lengths, torch.empty_like(x), counts, "dispatch")
    assert torch.equal(out.view(torch.int16), x.view(torch.int16))
    sent[16] ^= 0xFF
    with pytest.raises(RuntimeError, match="dispatch: expected payloads to arrive as they were"):
        decode_messages(sent, lengths, out, counts, "dispatch")


def test_one_rank_rounds_nothing():
    torch.manual_seed(0)
    plain, coded = (MoELayer(64, 32, 4, 2, dispatcher=Dispatch(wire=wire)) for wire in (None, "mx"))
    coded.load_state_dict(plain.state_dict())
    x = torch.randn(6, 64)
    assert torch.equal(plain(x), coded(x))


def test_a_wire_of_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="Wire: expected combine to be one of .*, got 'int4'"):
        Wire(combine="int4")


def test_every_wire_has_a_number():
    ways = itertools.product((None, *FORMATS, "lossless"), repeat=4)
    wires = [Wire(*formats) for formats in ways]
    assert sorted(wire.number for wire in wires) == list(range(len(wires)))
    assert all(Wire.from_number(wire.number) == wire for wire in wires) and Wire().number == 0


@pytest.mark.parametrize(("format", "percent"), [("int8", 1.0), ("fp8", 4.0), ("mx", 4.0)])
def test_error_of_a_layer_on_normal_rows(format, percent):
    """Of the output's norm.

    "int8": a step is the largest of 128 normal numbers, 2.8 on average, over 127, and the error of
    rounding a step's length over sqrt(12): 0.64 %. e4m3: steps of 1/8 of the power of two below a
    number, 2.7 % for mantissas between 1 and 2. A SwiGLU multiplies two functions of the row: about
    sqrt(2) times that.
    """
    torch.manual_seed(0)
    one = MoELayer(512, 64, 4, 2)
    x = torch.randn(128, 512)
    gate = one.router(x).gate
    found = []
    for rows in (x, rounded(x, format)):
        rows, offsets, metadata = one.dispatcher.dispatch(rows, gate.topk_idx, gate.topk_weights)
        found.append(one.dispatcher.combine(one.experts(rows, offsets), metadata))
    assert (found[1] - found[0]).norm() < percent / 100 * found[0].norm()
