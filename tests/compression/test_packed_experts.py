"""Experts of packed weights against experts of what these stand for; outliers as a codec."""

import math

import pytest
import torch

import moe_ext
from moe_ext import compression, ops, optim, sync
from moe_ext.compression import packed_experts

D, F, E = 128, 64, 4


def experts(**options):
    torch.manual_seed(0)
    options = {"dtype": torch.float32, **options}
    return moe_ext.nn.GroupedExperts(E, D, F, **options)


def dense_of(packed, place):
    return torch.stack([weight.dense() for weight in packed._of_expert[place]])


@pytest.mark.parametrize("format", ["int8", "int4", "pruned"])
@pytest.mark.parametrize(
    "options",
    [{"bias": True}, {"layout": "interleaved"}, {"transposed": True}, {"dtype": torch.bfloat16}],
)
def test_results_are_those_of_the_weights_that_are_read(format, options):
    own = experts(**options)
    if format == "pruned":
        compression.prune(own, "magnitude", density=0.4)
    packed = compression.PackedExperts(own, format, block=64)
    for place, name in enumerate(("gate_up_proj", "down_proj")):
        weight, before = getattr(own, name), getattr(own, name).detach().clone()
        read = dense_of(packed, place)
        read = read.mT if options.get("transposed") else read
        with torch.no_grad():
            weight.copy_(read)
        if format == "pruned":
            assert torch.equal(weight, before)
        else:
            # Half a step of each block's scale; bfloat16 rounds what is compared once more.
            step = before.float().abs().max() / (127 if format == "int8" else 7)
            assert (read - before.float()).abs().max() <= 0.5 * step * (1 + 2**-6)
    # Experts with few rows, none, and more than few.
    offsets = torch.tensor([0, 3, 3, 20, 28])
    rows = torch.randn(28, D).to(options.get("dtype", torch.float32))
    found, want = packed(rows, offsets), own(rows, offsets)
    tight = {"rtol": 2e-2, "atol": 2e-3} if rows.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, want, **tight)


@pytest.mark.parametrize("format", ["int8", "int4", "pruned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [False, True])
def test_all_experts_at_once_have_the_bits_of_each_by_itself(device, format, dtype, ends):
    own = experts(bias=True, dtype=dtype)
    torch.nn.init.normal_(own.gate_up_proj_bias)
    torch.nn.init.normal_(own.down_proj_bias)
    compression.prune(own, "magnitude", density=0.4)
    packed = compression.PackedExperts(own.to(device), format, block=64)
    offsets, rows = torch.tensor([0, 3, 3, 7, 9]), torch.randn(11, D).to(device, dtype)
    given = offsets[1:].int() if ends else offsets
    want = packed._forward_by_expert(rows, given.to(device))
    found = packed._forward_at_once(rows, given.to(device))
    assert torch.equal(found, want) and not found[9:].any() and found[:9].all(1).any()


@pytest.mark.parametrize("format", ["int8", "pruned"])
def test_a_gpu_runs_few_rows_without_waiting(format):
    """No value is looked at, and nothing stays behind on the CPU: fake tensors have no values."""
    packed = compression.PackedExperts(experts(bias=True), format, block=64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        packed._apply(lambda x: torch.empty_like(x, device="cuda"))
        rows, offsets = torch.randn(16, D, device="cuda"), torch.zeros(E, device="cuda").int()
        assert packed(rows, offsets).is_cuda
        assert packed._of_expert[0][1].dense().is_cuda
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            packed(torch.randn(16 * E + 1, D, device="cuda"), offsets)


def test_outliers_are_exact_and_the_rest_gains():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight.view(-1)[::997] *= 40
    errors = []
    for fraction in (0.0, 0.005):
        packed = packed_experts._CodedWeights.of(weight[None], 4, 128, fraction)
        errors.append((packed.dense() - weight).abs())
    largest = weight.abs().flatten().topk(math.ceil(0.005 * weight.numel())).indices
    assert not errors[1].flatten()[largest].any()
    assert errors[1].mean() < 0.8 * errors[0].mean()


def test_moving_leaves_dtypes_as_they_are():
    packed = compression.PackedExperts(experts(), "int8", block=64)
    x, offsets = torch.randn(3, D), torch.tensor([0, 1, 2, 2, 3])
    want = packed(x, offsets)
    assert torch.equal(packed.to("cpu", torch.bfloat16)(x, offsets), want)


@pytest.mark.parametrize("format", ["int8", "int4", "pruned"])
@pytest.mark.parametrize("count", [3, 200])
@pytest.mark.parametrize("how", ["autocast", "layer"])
def test_rows_may_have_another_dtype_than_weights(format, count, how):
    """As they have under autocast; few of them, whose products read packed weights, as many."""
    torch.manual_seed(0)
    layer, x = moe_ext.MoELayer(D, F, E, 2).eval(), torch.randn(count, D)
    layer.experts = experts(bias=True)
    torch.nn.init.normal_(layer.experts.down_proj_bias)
    layer.experts = compression.PackedExperts(layer.experts, format, block=64)
    with torch.no_grad():
        want = layer(x)
        if how == "layer":
            layer, x = layer.bfloat16(), x.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("writer", ["update", "receiver", "optimizer", "assign"])
def test_what_is_written_is_packed_anew(writer):
    own, source = experts(), experts()
    pruning = compression.prune(own, "magnitude", density=0.5)
    packed = compression.PackedExperts(own, "pruned")
    if writer == "update":
        pruning.update(0.25)
    elif writer == "receiver":
        compression.prune(source, "magnitude", density=0.5)
        encoder, receiver = sync.DeltaEncoder(source), sync.DeltaReceiver(own)
        receiver.apply(encoder.base())
        with torch.no_grad():
            source.down_proj *= 2
        receiver.apply(encoder.encode())
    elif writer == "assign":
        compression.prune(source, "magnitude", density=0.25)
        own.load_state_dict(source.state_dict(), assign=True)
    else:
        optimizer = optim.CPUAdamW(own.parameters(), lr=0.1)
        for p in own.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    x, offsets = torch.randn(3, D), torch.tensor([0, 1, 2, 2, 3])
    torch.testing.assert_close(packed(x, offsets), own(x, offsets))


def test_a_layer_reads_fewer_bytes():
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(D, 128, E, 2).bfloat16().eval()
    before = sum(p.nbytes for p in layer.experts.parameters())
    x = torch.randn(3, D).bfloat16()
    with torch.no_grad():
        want = layer(x)
    packed = compression.PackedExperts(layer.experts, "int8")
    layer.experts = packed
    # A code of 8 bits in the place of 16, scales, and 10 bytes for each outlier.
    assert packed.num_bytes < before * (0.5 + 2 / 128 + 0.005 * 4 + 0.05)
    with torch.no_grad():
        assert (layer(x) - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize(
    ("options", "format", "message"),
    [
        ({"dtype": torch.float64}, "int8", "float32 or bfloat16, got torch.float64"),
        ({}, "int8", "a multiple of 128 columns"),
        ({"post_norm": torch.nn.LayerNorm(D)}, "pruned", "without post_norm"),
    ],
)
def test_refuses(options, format, message):
    with pytest.raises(ValueError, match=message):
        compression.PackedExperts(experts(**options), format)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("numel", [0, 1, 300, 5000])
def test_outliers_as_a_codec(format, numel):
    torch.manual_seed(numel)
    codec = compression.Outliers(format, 0.01)
    x, owed = torch.randn(numel), torch.randn(numel) / 100
    total = x + owed
    payload, out = codec.encode(x, owed), torch.zeros(numel)
    assert payload.numel() == codec.payload_bytes(numel)
    codec.decode_add_(out, payload)
    # Nothing is lost but the rounding of two sums.
    assert ((out + owed) - total).abs().sum() <= 2.0**-22 * total.abs().sum()
    exact = total.abs().topk(math.ceil(0.01 * numel)).indices
    assert torch.equal(out[exact], total[exact])
    plain = ops.quantize_blockwise(x, format=format, block=128)
    back = ops.dequantize_blockwise(*plain, numel, format=format, block=128)
    alone = torch.zeros(numel)
    codec.decode_add_(alone, codec.encode(x))
    assert (alone - x).norm() <= (back - x).norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outliers": -0.1, "block": 64}, r"outliers to be in \[0, 1\], got -0.1"),
        ({"outliers": 1.5, "block": 64}, r"outliers to be in \[0, 1\], got 1.5"),
        ({"block": 16}, "block to be one of .*, got 16"),
    ],
)
def test_refuses_options_by_their_names(options, message):
    with pytest.raises(ValueError, match=f"PackedExperts: expected {message}"):
        compression.PackedExperts(experts(), **options)
