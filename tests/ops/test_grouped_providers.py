"""The choice of a product over experts, with a stand-in for quack-kernels."""

import sys
import types

import emulation
import pytest
import torch

from moe_ext import info, ops
from moe_ext.ops import grouped_providers as providers

OFFSETS = torch.tensor([1, 4, 4, 9])


def stand_in(calls):
    """As `quack.gemm_interface.gemm`; leaves alone what belongs to no expert."""

    def gemm(a, b, *, out, tuned, bias=None, cu_seqlens_m=None, cu_seqlens_k=None):
        bounds = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
        assert bounds.dtype == torch.int32 and not tuned
        calls.append("k" if cu_seqlens_m is None else "m")
        ends = bounds.tolist()
        for e, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if begin == end:
                continue
            if cu_seqlens_m is None:
                out[e] = a[:, begin:end] @ b[begin:end]
            else:
                out[begin:end] = a[begin:end] @ b[e] + (0 if bias is None else bias[e])

    return gemm


@pytest.fixture
def quack(monkeypatch):
    calls = []
    module = types.ModuleType("quack.gemm_interface")
    module.gemm = stand_in(calls)
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    monkeypatch.setattr(providers, "CHOSEN", "quack")
    monkeypatch.setattr(providers, "_capability", lambda device: 9)
    providers._quack.cache_clear()
    yield calls
    providers._quack.cache_clear()


def make(dtype=torch.bfloat16, k=16):
    x = torch.randint(-3, 4, (10, k)).to(dtype).requires_grad_()
    weight = torch.randint(-3, 4, (3, 8, k)).to(dtype).requires_grad_()
    bias = torch.randint(-3, 4, (3, 8)).to(dtype).requires_grad_()
    return x, weight, bias


def test_quack_gives_what_the_operator_gives(quack):
    args = make()
    results = []
    for product in (providers.chosen_product(*args[:2]), torch.ops.moe_ext.grouped_mm):
        y = product(*args[:2], OFFSETS, args[2])
        # Small integers are exact in any order.
        results.append((y, *torch.autograd.grad((y * y.detach().sign()).sum(), args)))
    assert quack == ["m", "m", "k"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_the_needed_gradients_are_computed(quack):
    x, weight, _ = make()
    y = providers.chosen_product(x, weight)(x, weight.detach(), OFFSETS, None)
    y.sum().backward()
    assert quack == ["m", "m"]


def test_a_second_derivative_is_refused(quack):
    x, weight, bias = make()
    y = providers.chosen_product(x, weight)(x, weight, OFFSETS, bias)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_mm: expected .* differentiated once"):
        grad.float().sum().backward()


def test_grouped_mm_asks_for_the_choice_where_rows_are_not_on_the_cpu(quack, monkeypatch):
    x, weight, bias = (t.detach().to("meta") for t in make())
    taken = []
    monkeypatch.setattr(providers, "_quack_product", lambda *args: taken.append(args) or x)
    assert ops.grouped_mm(x, weight, OFFSETS.to("meta"), bias_EM=bias) is x
    assert len(taken) == 1 and taken[0][3] is bias
    cpu = make()
    ops.grouped_mm(*cpu[:2], OFFSETS)
    assert len(taken) == 1


@pytest.mark.parametrize("dtype, k", [(torch.float32, 16), (torch.bfloat16, 12)])
def test_what_quack_does_not_serve_is_left_to_the_operator(quack, dtype, k):
    x, weight, _ = make(dtype, k)
    assert providers.chosen_product(x, weight) is None


def test_devices_that_quack_does_not_know_are_left_to_the_operator(quack, monkeypatch):
    monkeypatch.setattr(providers, "_capability", lambda device: 8)
    assert providers.chosen_product(*make()[:2]) is None


def test_a_choice_that_cannot_be_served_is_refused(quack, monkeypatch):
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected quack-kernels .* got ModuleNotFoundError"):
            providers.chosen_product(*make()[:2])
    monkeypatch.setattr(providers, "CHOSEN", "cutlass")
    with pytest.raises(ValueError, match="to be one of auto, own, quack, got 'cutlass'"):
        providers.chosen_product(*make()[:2])
    assert "none of auto, own, quack" in providers.state()


def test_info_says_what_is_chosen(monkeypatch):
    assert info()["backends"]["grouped_mm"].startswith("auto: torch's product")
    monkeypatch.setattr(providers, "CHOSEN", "quack")
    assert "quack-kernels is not installed" in providers.state()


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
def test_own_takes_bfloat16_that_torch_has_a_product_for(monkeypatch):
    x, weight, _ = make()
    with emulation.emulated_cuda():
        named = []
        for choice in ("auto", "own"):
            monkeypatch.setenv("MOE_EXT_GROUPED_MM", choice)
            with torch.profiler.profile() as profile:
                ops.grouped_mm(x.detach(), weight.detach(), OFFSETS)
            named.append("aten::_grouped_mm" in {event.key for event in profile.key_averages()})
    assert named == [True, False]
