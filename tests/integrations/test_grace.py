"""GRACE's interface on three ranks, and each compressor by itself."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_checks import Checks, raised

from moe_ext.distributed import count_traffic
from moe_ext.integrations import grace
from moe_ext.integrations.grace import grace_from_params

three = Checks()
SHAPE = (40, 33)
LINEAR = ("none", "fp16", "randomk", "powersgd")
OPTIONS = {
    "topk": {"compress_ratio": 0.05},
    "dgc": {"compress_ratio": 0.05},
    "randomk": {"compress_ratio": 0.2},
    "threshold": {"threshold": 1.5},
    "qsgd": {"quantum_num": 7},
    "powersgd": {"compress_rank": 2},
}
COMPRESSORS = (
    "none", "fp16", "topk", "dgc", "randomk", "threshold", "qsgd", "int8", "int4", "fp8",
    "onebit", "efsignsgd", "powersgd",
)  # fmt: skip


def assert_same(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


def made(compressor, memory="residual", communicator="allgather", **kwargs):
    params = {"compressor": compressor, "memory": memory, "communicator": communicator}
    return grace_from_params({**params, **OPTIONS.get(compressor, {}), **kwargs})


def gradient(step, rank=None, shape=SHAPE):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + rank))


def mean(step, shape=SHAPE):
    ranks = range(dist.get_world_size())
    return torch.stack([gradient(step, r, shape).double() for r in ranks]).mean(0)


def owed(communicator, name="w"):
    total = communicator.memory.residuals[name].double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@three(
    *((name, "allgather") for name in COMPRESSORS),
    *((name, "allreduce") for name in ("none", "randomk", "powersgd")),
)
def nothing_is_lost(name, communicator):
    step = made(name, communicator=communicator).step
    applied = want = 0
    for i in range(4):
        found = step(gradient(i), "w")
        other = found.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, found)
        applied, want = applied + found.double(), want + mean(i)
    left = owed(step.__self__)
    assert (applied + left - want).abs().max() < 1e-5
    assert name == "none" or left.abs().max() > 1e-5


@three()
def sizes_may_differ_between_ranks():
    communicator = made("threshold", threshold=1.0)
    x = torch.tensor([-3.0, 0.5, 0.2, 0.0]) if dist.get_rank() == 0 else torch.zeros(4)
    with count_traffic() as traffic:
        found = communicator.step(x, "w")
    # Two sizes, then as much as the largest has.
    assert traffic.total_bytes == 2 * (2 * 8 + 8)
    # By magnitude: the largest element of all is below the threshold.
    assert found.tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert owed(communicator)[0] == 0


@three()
def momentum_is_corrected():
    communicator = made("topk", memory="dgc", compress_ratio=0.1, momentum=0.9)
    u, v = ([torch.zeros(60) for _ in range(3)] for _ in range(2))
    for step in range(5):
        total = torch.zeros(60)
        for rank in range(3):
            u[rank] = 0.9 * u[rank] + gradient(step, rank, (60,))
            v[rank] = v[rank] + u[rank]
            chosen = v[rank].abs().topk(6).indices
            total[chosen] += v[rank][chosen]
            u[rank][chosen] = v[rank][chosen] = 0.0
        found = communicator.step(gradient(step, shape=(60,)), "w")
        torch.testing.assert_close(found, total / 3, rtol=1e-5, atol=1e-6)


@three()
def clipping_is_the_same_on_all_ranks():
    communicator = made("topk", memory="dgc", compress_ratio=1.0, gradient_clipping=True)
    with count_traffic() as traffic:
        found = communicator.step(torch.full((4,), 10.0 * (dist.get_rank() == 0)), "w")
    assert traffic.sent_bytes["all_reduce"] == 4 * 4 // 3
    limit = math.sqrt(400 / 3)
    torch.testing.assert_close(found, torch.full((4,), min(10.0, limit) / 3))


@three()
def random_places_are_new_in_each_step_and_the_same_on_all_ranks():
    x, sent = torch.ones(60), []
    communicator = made("randomk", memory="none", compress_ratio=0.2)
    for _ in range(30):
        found = communicator.step(x, "w")
        assert found.count_nonzero() == 12  # those of one rank are those of all
        sent.append(found)
    # Each place is left out of all 30 steps with a probability of 0.8^30, 1 in 800.
    assert torch.stack(sent).sum(0).count_nonzero() > 55


@three()
def random_rounding_is_unbiased_and_independent_over_ranks_and_steps():
    """QSGD of the same gradient everywhere: errors are those of independent draws."""
    x, steps = torch.randn(512, generator=torch.Generator().manual_seed(2)), 64
    communicator = made("qsgd", memory="none", bucket_size=128)
    errors = torch.stack([communicator.step(x, "w") - x for _ in range(steps)]).double()
    blocks = x.double().view(-1, 128)
    unit = blocks.abs().amax(1, keepdim=True) / 7
    place = (blocks / unit).frac().abs()
    variance = (unit.square() * place * (1 - place)).sum().item() / 3
    # 32768 draws, and 512 means of them: within some 10 and 5 standard deviations.
    assert errors.square().sum(1).mean().item() == pytest.approx(variance, rel=0.08)
    assert errors.mean(0).square().sum().item() == pytest.approx(variance / steps, rel=0.4)


@three()
def what_is_owed_has_a_factor_and_so_has_the_gradient():
    memory = grace.ResidualMemory(beta=0.5, gamma=2.0)
    communicator = grace.Allgather(grace.TopKCompressor(0.1), memory)
    owed_by = [torch.zeros(60) for _ in range(3)]
    for step in range(4):
        total = torch.zeros(60)
        for rank, left in enumerate(owed_by):
            whole = 0.5 * left + 2.0 * gradient(step, rank, (60,))
            chosen = whole.abs().topk(6).indices
            total[chosen] += whole[chosen]
            whole[chosen] = 0.0
            owed_by[rank] = whole
        found = communicator.step(gradient(step, shape=(60,)), "w")
        torch.testing.assert_close(found, total / 3, rtol=1e-5, atol=1e-6)


@three()
def most_signs_win():
    rows = [[1.0, -2.0, 0.0], [-3.0, -1.0, 0.0], [5.0, 2.0, 0.0]]
    for name in ("signsgd", "signum"):
        communicator = made(name, memory="none")
        x = torch.zeros(256)
        x[:3] = torch.tensor(rows[dist.get_rank()])
        assert communicator.step(x, "w")[:2].tolist() == [1.0, -1.0]
        assert communicator.step(torch.zeros(100), "z").count_nonzero() == 0


@three()
def a_nan_is_named_and_changes_nothing():
    for name in ("topk", "int8", "powersgd"):
        communicator = made(name)
        communicator.step(gradient(0), "w")
        before = communicator.memory.state_dict()
        x = gradient(1)
        if dist.get_rank() == 2:
            x[3, 4] = math.inf
        with pytest.raises(ValueError, match=r"gradient of w to be finite, got .* on rank 2 of"):
            communicator.step(x, "w")
        assert_same(communicator.memory.state_dict()["residuals"], before["residuals"])
        assert communicator.step(gradient(2), "w").isfinite().all()


def failing(function):
    """The function, with an error at its end."""

    def call(*args):
        function(*args)
        raise OSError("no room")

    return call


@three(("topk",), ("randomk",), ("qsgd",), ("signum",), ("powersgd",))
def a_step_that_fails_changes_nothing(name):
    """Neither of the memory nor of the compressor, in the first step and after others."""
    first, twin = made(name), made(name)
    for step in range(4):
        for owner, method in ((first.memory, "update"), (first, "send_receive")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, method, failing(getattr(owner, method)))
                raised(OSError, "no room", first.step, gradient(7), "w")
        assert torch.equal(first.step(gradient(step), "w"), twin.step(gradient(step), "w"))
        assert_same(first.memory.residuals, twin.memory.residuals)


@three(("topk", "dgc"), ("qsgd", "residual"), ("randomk", "residual"), ("powersgd", "powersgd"))
def states_resume_with_the_same_bits(name, memory):
    first, second = made(name, memory), made(name, memory)
    for step in range(2):
        first.step(gradient(step), "w")
    second.load_state_dict(first.state_dict())
    for step in range(2, 4):
        assert torch.equal(first.step(gradient(step), "w"), second.step(gradient(step), "w"))
    state = first.state_dict()
    for key, value in (("world_size", 2), ("version", 3)):
        with pytest.raises(ValueError, match=f"expected the state's {key} to be"):
            second.load_state_dict({**state, key: value})


@three()
def bytes_are_those_of_the_codes():
    for name, options, num_bytes in (
        ("none", {}, 16384),
        ("onebit", {}, 512 + 64),
        ("int8", {}, 4096 + 64),
        ("int4", {}, 2048 + 64),
        ("topk", {"compress_ratio": 0.01}, 40 * 8),
        # Seven levels are four bits.
        ("qsgd", {"quantum_num": 7, "bucket_size": 128}, 2048 + 128),
        ("qsgd", {"quantum_num": 8, "bucket_size": 128}, 4096 + 128),
    ):
        communicator = made(name, memory="none", **options)
        with count_traffic() as traffic:
            communicator.step(gradient(0, shape=(4096,)), "w")
        assert traffic.total_bytes == 2 * num_bytes, (name, options)


@three()
def sums_that_half_precision_cannot_hold_are_sent_again():
    communicator = made("fp16", communicator="allreduce")
    x = torch.full((300,), 1.0)
    with count_traffic() as traffic:
        communicator.step(x, "w")
    half = traffic.total_bytes
    x[7], x[8] = 3e4, -6e4
    with count_traffic() as traffic:
        found = communicator.step(x, "w")
    assert found[6:10].tolist() == [1.0, 3e4, -6e4, 1.0]
    assert (half, traffic.total_bytes) == (4 * 300 // 3 * 2, 3 * half)
    assert not owed(communicator).any()


@three(*((name,) for name in COMPRESSORS))
def strides_do_not_matter(name):
    plain = gradient(0, shape=(2, 3, 4, 5)) * (1e5 if name == "fp16" else 1.0)
    for way in ("allreduce", "allgather") if name in LINEAR else ("allgather",):
        found = [
            made(name, communicator=way).step(x, "w")
            for x in (plain, plain.to(memory_format=torch.channels_last))
        ]
        assert torch.equal(*found), way


@three(("int8",), ("topk",), ("none",))
def other_tensors_than_other_ranks_are_told(name):
    communicator, rank = made(name, memory="residual"), dist.get_rank()
    with pytest.raises(ValueError, match="numel of w to be equal on every rank, got 8 on rank 0"):
        communicator.step(torch.ones(8 + 300 * (rank == 1)), "w")
    message = (
        "numel of w to be equal on every rank, got 8 on rank 0, nothing on rank 1, 8 on rank 2"
    )
    with pytest.raises(ValueError, match=message):
        communicator.step(torch.ones(8), "v" if rank == 1 else "w")
    with pytest.raises(ValueError, match="name, shape and dtype of .* to be equal on every rank"):
        communicator.step(torch.ones(8).to(torch.bfloat16 if rank == 1 else torch.float32), "w")
    assert communicator.step(torch.ones(8), "w").shape == (8,)


class Halves(grace.Compressor):
    """A compressor of a user's own, with a type that is wider behind one that is narrower."""

    def compress(self, tensor, name):
        flat = tensor.flatten()
        return [flat[::2].half(), flat[1::2].double()], tensor.shape

    def decompress(self, tensors, ctx):
        flat = torch.zeros(ctx.numel())
        flat[::2], flat[1::2] = tensors[0].float(), tensors[1].float()
        return flat.view(ctx)


class Rows(grace.Compressor):
    """Another one, of codes that are a matrix, a column of scales and a number."""

    def compress(self, tensor, name):
        scales, largest = tensor.abs().amax(dim=1, keepdim=True), tensor.abs().max()
        return [(tensor / scales * 127).round().to(torch.int8), scales / largest, largest], None

    def decompress(self, tensors, ctx):
        codes, scales, largest = tensors
        return codes * (scales * largest) / 127


@three()
def codes_keep_their_shapes():
    communicator = grace.Allgather(Rows(), grace.ResidualMemory())
    found = communicator.step(gradient(0, shape=(3, 7)), "w")
    assert (found.double() + owed(communicator) - mean(0, (3, 7))).abs().max() < 1e-6


@three()
def a_compressor_of_ones_own():
    communicator = grace.Allgather(Halves(), grace.ResidualMemory(), 3)
    found = communicator.step(gradient(0, shape=(3, 7)), "w")
    torch.testing.assert_close(found.double(), mean(0, (3, 7)), rtol=0, atol=2e-3)
    assert (found.double() + owed(communicator) - mean(0, (3, 7))).abs().max() < 1e-6
    with pytest.raises(ValueError, match=r"Allreduce: expected compressor to be linear .*Halves"):
        grace.Allreduce(Halves(), grace.NoneMemory())
    with pytest.raises(ValueError, match="expected world_size to be the group's 3, got 4"):
        made("topk", world_size=4)


test_three_ranks = three.test(3)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(COMPRESSORS),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_one_rank_applies_or_owes_everything(name, shape, zeros, dtype):
    communicator = made(name)
    applied = want = torch.zeros(shape, dtype=torch.float64)
    for step in range(3):
        x = gradient(step, 0, shape).to(dtype) * (step >= zeros)
        before = x.clone()
        found = communicator.step(x, "w")
        assert found.shape == x.shape
        assert found.dtype == dtype
        assert torch.equal(x, before)
        applied, want = applied + found.double(), want + x.double()
    # What is applied is rounded to the dtype of the gradient.
    rounding = 0.06 if dtype == torch.bfloat16 else 1e-4
    left = communicator.memory.residuals["w"].double()
    assert (applied + left - want).abs().max() <= rounding * (1 + want.abs().max())


def test_signs_decode_right():
    compressor = grace.OneBitCompressor(64)
    tensors, ctx = compressor.compress(torch.tensor([-1.0, -3.0, 2.0, 4.0]), "w")
    assert tensors[0].tolist() == [0b0011]
    assert compressor.decompress(tensors, ctx).tolist() == [-2.5, -2.5, 2.5, 2.5]


def test_zeros_are_not_sent_whole():
    for name in ("dgc", "threshold"):
        tensors, _ = made(name).compressor.compress(torch.zeros(1000), "w")
        assert tensors[0].numel() in (50, 0)


def test_residuals_share_no_memory_with_gradients():
    for name in ("none", "fp16", "topk"):
        communicator = made(name)
        x = torch.randn(64)
        found = communicator.step(x, "w")
        kept, applied = communicator.memory.residuals["w"].clone(), found.clone()
        x.zero_()
        assert torch.equal(communicator.memory.residuals["w"], kept)
        assert torch.equal(found, applied)


def test_empty_tensors():
    for name in COMPRESSORS:
        assert made(name).step(torch.zeros(0, 4), "w").shape == (0, 4)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"compressor": "huffman"}, r"expected compressor to be one of \('none'.*got 'huffman'"),
        ({"memory": "bloom"}, r"expected memory to be one of \('none'.*got 'bloom'"),
        ({"communicator": "alltoall"}, r"expected communicator to be one of .*got 'alltoall'"),
        ({"ratio": 0.1}, r"expected keys of .*got \('ratio',\)"),
        ({"compressor": "topk"}, r"Allreduce: expected compressor to be linear .*TopKCompressor"),
        (
            {"compressor": "int8", "memory": "dgc", "communicator": "allgather"},
            "expected compressor to select elements for memory 'dgc', got 'int8'",
        ),
        ({"compressor": "topk", "compress_ratio": 0.0}, r"compress_ratio to be in \(0, 1\], got 0"),
        ({"compressor": "qsgd", "quantum_num": 128}, r"quantum_num to be in \[1, 127\], got 128"),
        ({"compressor": "qsgd", "bucket_size": 100}, "expected bucket_size to be a power of two"),
        ({"compressor": "threshold", "threshold": math.nan}, "threshold to be a number, got nan"),
        ({"compressor": "signum", "momentum": 1.0}, r"momentum to be in \[0, 1\), got 1.0"),
        ({"compressor": "topk", "memory": "dgc", "momentum": -1}, "DgcMemory: expected momentum"),
    ],
)
def test_errors(params, match):
    with pytest.raises(ValueError, match=match):
        grace_from_params(params)


def test_what_is_not_used_is_told():
    params = {"compressor": "topk", "communicator": "allgather", "kernel": "cupy", "lr": 0.1}
    with pytest.warns(UserWarning) as found:
        grace_from_params(params)
    told = [str(warning.message) for warning in found]
    assert [text.split(" is not used")[0].split()[-1] for text in told] == ["kernel", "lr"]
    params = {"compressor": "fp16", "compress_ratio": 0.1, "momentum": 0.5, "memory": "residual"}
    with pytest.warns(UserWarning, match="FP16Compressor and ResidualMemory do not read") as found:
        grace_from_params(params)
    told = [str(warning.message).split()[1] for warning in found]
    assert told == ["compress_ratio", "momentum"]


def test_shapes_must_not_change():
    communicator = made("topk")
    communicator.step(torch.ones(8), "w")
    with pytest.raises(ValueError, match=r"expected w to be of shape \(8,\) as before, got \(9,\)"):
        communicator.step(torch.ones(9), "w")
    with pytest.raises(ValueError, match=r"expected a state of \['residuals'\], got \[\]"):
        communicator.memory.load_state_dict({})


@pytest.mark.parametrize(
    ("name", "memory"),
    [("topk", "residual"), ("topk", "dgc"), ("signum", "none"), ("powersgd", "none")],
)
def test_states_go_to_the_device_of_the_gradients(name, memory):
    """From a file that was read to another one, as by `torch.load(map_location="cpu")`."""
    first, second = made(name, memory), made(name, memory)
    first.step(gradient(0, 0), "w")
    if name == "powersgd":  # one rank alone has no factors
        first.compressor._memories["w"].put("factors", torch.ones(4))
    second.load_state_dict(first.state_dict())
    x = gradient(1, 0).to("meta")
    second.memory.compensate(x, "w")
    if memory == "none":
        second.compressor._memory("w", x)
    holder = second.compressor if memory == "none" else second.memory
    kept = holder._memories["w"]
    assert kept.kinds()
    assert all(kept.kept_tensor(kind).is_meta for kind in kept.kinds())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_dtypes_that_residuals_and_codes_cannot_hold_are_refused(dtype):
    for name, memory in (("int8", "none"), ("none", "residual")):
        communicator = made(name, memory)
        with pytest.raises(ValueError, match=r"gradient of w to be float32, bfloat16 or float16, "):
            communicator.step(torch.ones(4, dtype=dtype), "w")
        assert not communicator.memory.state_dict().get("residuals")


def test_what_half_precision_cannot_hold_is_owed():
    communicator = grace_from_params({"compressor": "fp16", "memory": "residual"})
    found = communicator.step(torch.tensor([1e5, -7e4, 1.0]), "w")
    assert found.tolist() == [65504.0, -65504.0, 1.0]
    assert communicator.memory.residuals["w"].tolist() == [1e5 - 65504.0, 65504.0 - 7e4, 0.0]
    assert communicator.step(torch.zeros(3), "w").sum() == pytest.approx(3e4, rel=1e-3)
