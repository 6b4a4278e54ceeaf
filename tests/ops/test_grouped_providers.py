"""The choice of a product over experts, with a stand-in for quack-kernels."""

import functools
import sys
import types

import emulation
import pytest
import torch
import torch.nn.functional as F

import moe_ext
from moe_ext import info, ops
from moe_ext.ops import grouped_providers as providers

OFFSETS = torch.tensor([1, 4, 4, 9])


GATES = {"swiglu": F.silu, "reglu": F.relu, "geglu": functools.partial(F.gelu, approximate="tanh")}


class StandIn:
    """As `quack.gemm_interface`, its names and defaults; leaves alone what is no expert's."""

    def __init__(self):
        self.calls = []

    def gemm(
        self,
        A,
        B,
        out=None,
        bias=None,
        cu_seqlens_m=None,
        cu_seqlens_k=None,
        A_idx=None,
        tuned=True,
        concat_layout=None,
    ):
        bounds = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
        assert bounds.dtype == torch.int32 and not tuned
        assert A_idx is None or A_idx.dtype == torch.int32
        self.calls.append("k" if cu_seqlens_m is None else "m")
        B = side_by_side(B) if concat_layout == ("B",) else B
        if cu_seqlens_m is None:
            A = A if A_idx is None else A[:, A_idx]
        else:
            A = A if A_idx is None else A[A_idx]
            out = A.new_full((A.shape[0], B.shape[2]), torch.nan) if out is None else out
        ends = bounds.tolist()
        for e, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if begin == end:
                continue
            if cu_seqlens_m is None:
                out[e] = A[:, begin:end] @ B[begin:end]
            else:
                out[begin:end] = A[begin:end] @ B[e] + (0 if bias is None else bias[e])
        return out

    def gemm_gated(
        self,
        A,
        B,
        C=None,
        bias=None,
        activation=None,
        cu_seqlens_m=None,
        A_idx=None,
        store_preact=True,
        tuned=True,
        concat_layout=None,
    ):
        assert B.stride(1) == 1  # so that the columns of B are what `concat_layout` is about
        up = self.gemm(A, B, None, bias, cu_seqlens_m, None, A_idx, tuned, concat_layout)
        self.calls[-1] = "gated"
        return up, GATES[activation](up[:, ::2]) * up[:, 1::2]

    def gemm_dgated(
        self,
        A,
        B,
        PreAct,
        activation=None,
        colvec_scale=None,
        colvec_reduce=False,
        cu_seqlens_m=None,
        A_idx=None,
        tuned=True,
    ):
        assert colvec_scale.dtype == torch.float32 and colvec_reduce
        grad = self.gemm(A, B, None, None, cu_seqlens_m, None, A_idx, tuned).float()
        self.calls[-1] = "dgated"
        with torch.enable_grad():
            up = PreAct.float().requires_grad_()
            hidden = GATES[activation](up[:, ::2]) * up[:, 1::2]
        (grad_up,) = torch.autograd.grad(hidden, up, grad * colvec_scale[:, None])
        scaled = hidden.detach() * colvec_scale[:, None]
        dots = (hidden.detach() * grad).sum(1)
        return grad_up.to(A.dtype), scaled.to(A.dtype), dots


def side_by_side(B):
    """The halves of the dimension that is not contiguous as pairs, as `concat_layout` says."""
    dim = -2 if B.stride(-1) == 1 else -1
    half = B.shape[dim] // 2
    return B.unflatten(dim, (2, half)).transpose(dim - 1, dim).flatten(dim - 1, dim)


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("quack.gemm_interface")
    found = module.stand_in = StandIn()
    for name in ("gemm", "gemm_gated", "gemm_dgated"):
        setattr(module, name, getattr(found, name))
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    monkeypatch.setattr(providers, "CHOSEN", "quack")
    monkeypatch.setattr(providers, "_capability", lambda device: 9)
    monkeypatch.setattr(providers, "faults", {})
    providers.quack.cache_clear()
    yield module
    providers.quack.cache_clear()


@pytest.fixture
def quack(stand_in):
    return stand_in.stand_in.calls


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


def layer_and_gradients(layer, x, mask):
    x = x.clone().requires_grad_()
    y = layer(x, token_mask=mask)
    leaves = (x, *layer.parameters())
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "interleaved", "activation": "reglu"},
        {"activation": "geglu_tanh"},
    ],
    ids=str,
)
def test_a_layer_gathers_its_tokens_by_quack(options, masked, quack, monkeypatch):
    torch.manual_seed(0)
    experts = moe_ext.nn.GroupedExperts(8, 64, 32, **options)
    layer = moe_ext.MoELayer(64, 32, 8, 2, experts=experts, shared_expert=16).bfloat16()
    x = torch.randn(65, 64).bfloat16()
    mask = torch.arange(65) % 5 > 0 if masked else None
    layer(x)  # tries the products
    quack.clear()
    found = layer_and_gradients(layer, x, mask)
    assert quack == ["gated", "m", "dgated", "m", "k", "k"]
    assert layer.metrics["num_dropped"] == 0
    monkeypatch.setattr(providers, "CHOSEN", "auto")
    expected = layer_and_gradients(layer, x, mask)
    assert len(quack) == 6 and len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        # Each result is rounded to 8 bits a few times on its way, elsewhere on either side.
        assert (a.float() - b.float()).norm() < 2**-6 * b.float().norm()


def wrong(function):
    def call(*args, **kwargs):
        first, *rest = function(*args, **kwargs)
        return (1.2 * first, *rest)

    return call


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemm_gated", "AttributeError"),
        ("gemm_dgated", "the gradient of x is off by 20 %"),
    ],
)
def test_products_with_gather_that_are_wrong_are_passed_over(name, why, stand_in):
    if why == "AttributeError":
        delattr(stand_in, name)
    else:
        setattr(stand_in, name, wrong(stand_in.gemm_dgated))
    layer = moe_ext.MoELayer(64, 32, 8, 2).bfloat16()
    x = torch.randn(65, 64).bfloat16()
    layer(x)
    assert f"gather passed over: {why}" in providers.state()
    calls = stand_in.stand_in.calls
    calls.clear()
    y = layer(x)
    assert calls == [] and y.shape == x.shape  # on CPU the product is the operator's
    (key,) = providers.faults
    assert key == (x.device, torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"activation": "geglu"},
        {"activation": "silu"},
        {"capacity": 1.0},
    ],
    ids=str,
)
def test_layers_that_quack_does_not_gather_for_make_rows(options, quack):
    layer = moe_ext.MoELayer(64, 32, 8, 2, **options).bfloat16()
    layer(torch.randn(65, 64).bfloat16())
    assert quack == [] and providers.faults == {}


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
