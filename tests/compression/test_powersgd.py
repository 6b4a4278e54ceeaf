"""PowerSGD as a codec, on a memory of its own and behind DDP."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from fsdp_checks import Model, is_compressed, local_gradients, loss_of
from hook_models import opened, same_on_all_ranks, summed, wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_checks import Checks, of_ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from moe_ext.compression.powersgd import PowerSGD
from moe_ext.distributed import count_traffic

two = Checks()
SHAPES = tuple(torch.Size(s) for s in ((24, 40), (24,), (4, 32, 16), (4, 3, 3, 2), (24, 40), (0,)))
NUMEL = sum(s.numel() for s in SHAPES)


def gradient(step, rank=None, numel=NUMEL):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


def mean(step, numel=NUMEL):
    ranks = range(dist.get_world_size())
    return torch.stack([gradient(step, r, numel).double() for r in ranks]).mean(0)


def owed(memory):
    return summed(memory.tensor("residual")) / dist.get_world_size()


@two()
def what_is_small_is_exact_and_counted():
    codec, memory = PowerSGD(2), opened(SHAPES)
    assert codec.matrices_of(SHAPES) == [
        (24, 40), (24,), *[(32, 16)] * 4, (72,), (24, 40), (0,)
    ]  # fmt: skip
    with count_traffic() as traffic:
        found = codec.start(gradient(0), memory).wait()
    pieces, want = memory.pieces(found), memory.pieces(mean(0))
    for i in (1, 3, 5):
        torch.testing.assert_close(pieces[i].double(), want[i], rtol=1e-5, atol=1e-6)
    factors = 2 * 2 * (24 + 40) + 4 * 2 * (32 + 16)
    assert traffic.sent_bytes["all_reduce"] == 4 * (24 + 72 + factors)


@two()
def full_rank_is_exact():
    shapes = (torch.Size((64, 8)),)
    codec, memory = PowerSGD(8, min_compression_rate=1.0), opened(shapes)
    assert codec.matrices_of(shapes) == [(512,)]
    # Of rank 2 on every rank, and the same columns: P spans them.
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    y = torch.randn(2, 40, generator=torch.Generator().manual_seed(2 + dist.get_rank()))
    memory = opened([torch.Size((64, 40))])
    found = PowerSGD(4).start((x @ y).view(-1), memory).wait().view(64, 40)
    both = of_ranks(y)
    torch.testing.assert_close(found, x @ (both[0] + both[1]) / 2, rtol=1e-3, atol=1e-3)


@two()
def sums_and_short_floats():
    found = {}
    for average in (True, False):
        found[average] = PowerSGD(2).start(gradient(0), opened(SHAPES), average=average).wait()
    torch.testing.assert_close(found[False], 2 * found[True])
    half = PowerSGD(2).start(gradient(0).bfloat16(), opened(SHAPES)).wait()
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), found[True], rtol=0.1, atol=0.1)


@two()
def equals_torchs_hook():
    shapes = (torch.Size((24, 40)), torch.Size((24,)), torch.Size((24, 40)))
    numel = sum(s.numel() for s in shapes)
    memory = opened(shapes)
    state = torchs.PowerSGDState(None, 2, 2, 2, orthogonalization_epsilon=1e-8)
    state.iter, state.batch_tensors_with_same_shape = 2, True
    state.q_memory_dict[0] = torch.randn(160, generator=torch.Generator().manual_seed(3))
    state.p_memory_dict[0] = torch.empty(96)
    memory.write("powersgd", state.q_memory_dict[0].clone())

    def bucket(flat):
        return SimpleNamespace(
            buffer=lambda: flat,
            gradients=lambda: memory.pieces(flat),
            index=lambda: 0,
            is_last=lambda: False,
        )

    for step in range(3):
        want = torchs.powerSGD_hook(state, bucket(gradient(step, numel=numel))).wait()
        found = PowerSGD(2).start(gradient(step, numel=numel), memory, step=step).wait()
        # Torch's residual of what is dense adds up to nothing, but for its rounding.
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@two((1,), (4,))
def experts_without_tokens_wake_up(rank):
    shapes = (torch.Size((3, 32, 16)),)
    codec, memory = PowerSGD(rank, min_compression_rate=1.5), opened(shapes)
    zeros = torch.zeros(3 * 32 * 16)
    for step in range(2):
        assert codec.start(zeros.clone(), memory, step=step).wait().count_nonzero() == 0
    applied = want = 0
    for step in range(2, 40):
        applied = applied + codec.start(gradient(2, numel=1536), memory, step=step).wait().double()
        want = want + mean(2, 1536)
    assert (applied + owed(memory) - want).abs().max() < 1e-3
    # The same gradient again and again: error feedback gets to all of it.
    assert ((applied - want).norm() / want.norm()) < 0.4


@two()
def residuals_of_another_codec_are_applied():
    memory = opened(SHAPES)
    memory.tensor("residual").fill_(1.0)
    found = PowerSGD(2, feedback=False, warm_start=False).start(gradient(0), memory).wait()
    assert memory.tensor("residual").count_nonzero() == 0
    bias = memory.pieces(found)[1].double()
    torch.testing.assert_close(bias, memory.pieces(mean(0))[1] + 1, rtol=1e-5, atol=1e-5)


@two()
def behind_ddp_what_is_dense_is_the_mean():
    """Buckets are built anew after the first step."""
    ddp, state = wrapped(Model(), codec=PowerSGD(2), ddp={"bucket_cap_mb": 0.05})
    model, applied, want = ddp.module, {}, {}
    for step in range(3):
        model.zero_grad()
        loss_of(ddp, step).backward()
        for name, p in model.named_parameters():
            applied[name] = applied.get(name, 0) + p.grad.double()
            grads = [local_gradients(step, rank)[name].double() for rank in range(2)]
            want[name] = want.get(name, 0) + sum(grads) / 2
    residual = state.state_dict()["memory"]["residual"]
    for name, total in want.items():
        assert same_on_all_ranks(applied[name]), name
        if is_compressed(name):
            assert summed(residual[name]).abs().max() > 0, name
        else:
            assert (applied[name] - total).abs().max() < 1e-5, name


test_two_ranks = two.test(2)


def test_one_rank_sends_nothing():
    memory = opened(SHAPES)
    memory.tensor("residual").fill_(2.0)
    with count_traffic() as traffic:
        found = PowerSGD().start(torch.ones(NUMEL), memory).wait()
    assert torch.equal(found, torch.full((NUMEL,), 3.0))
    assert memory.tensor("residual").count_nonzero() == 0
    assert traffic.total_bytes == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_every_element_is_in_one_matrix(shapes, rank):
    sizes = [torch.Size(shape) for shape in shapes]
    codec = PowerSGD(rank)
    found = codec.matrices_of(sizes)
    assert sum(torch.Size(m).numel() for m in found) == sum(s.numel() for s in sizes)
    coded = [m for m in found if len(m) == 2]
    assert all((n + m) * min(n, m, rank) * 2 < n * m for n, m in coded)
    numel = sum(s.numel() for s in sizes)
    for call in codec.rehearsal(torch.ones(numel), opened(sizes)):
        call()


def test_what_it_says_of_itself():
    codec = PowerSGD(4)
    assert (codec.name, codec.lossy, codec.feeds_back) == ("powersgd", True, True)
    assert codec.sent_bytes(1024 * 1024, 2) == 4 * 8 * 1024
    assert codec.sent_bytes(100, 2) == 400
    assert codec.num_rounds(2) == 6
    assert hash(codec) == hash(PowerSGD(4))
