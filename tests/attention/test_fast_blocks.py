"""Blocks that kernels of torch compute, against float64 and against our own kernel."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from helpers import make_inputs, reference
from test_ring_attention import CASES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_ext import ops
from moe_ext.attention import block as blocks
from moe_ext.attention import libraries, ring_attention, shard_sequence
from moe_ext.attention.libraries import LIBRARIES, library_for
from moe_ext.attention.masks import Mask
from moe_ext.testing import spawn_ranks

SERVED = ("full", "causal", "scale", "window", "causal_window", "documents", "prefix", "sinks")
HALVES = (torch.bfloat16, torch.float16)


class LibraryCalls(TorchDispatchMode):
    """Lists (queries, keys) of what goes to a library."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.__name__:
            q, k = args[1:3] if "backward" in func.__name__ else args[:2]
            sizes = self.backward if "backward" in func.__name__ else self.forward
            sizes.append((q.shape[2], k.shape[2]))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def every_piece(monkeypatch):
    monkeypatch.setattr(blocks, "_LEAST_PAIRS", 0)


def halves(dtype=torch.bfloat16, **kwargs):
    return make_inputs(**{"dim": 16, "v_dim": 16, "dtype": dtype, **kwargs})


def results(inputs, case, with_lse=True, **kwargs):
    """out, lse and gradients of one process, and the calls of libraries."""
    q, k, v, grad = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {**CASES[case], **kwargs}
    with LibraryCalls() as calls:
        out, lse = ring_attention(*leaves, group=None, return_lse=True, **options)
        loss = (out * grad).sum()
        if with_lse:
            loss = loss + 0.1 * torch.where(lse > -torch.inf, lse, 0.0).sum()
        grads = torch.autograd.grad(loss, leaves)
    return [out.detach(), lse.detach(), *grads], calls


def exact(inputs, case, with_lse=True):
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out, lse = reference(*leaves, **CASES[case])
    loss = (out * inputs[3].double()).sum()
    if with_lse:
        loss = loss + 0.1 * torch.where(lse > -torch.inf, lse, 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def errors(found, expected):
    finite = expected[1] > -torch.inf
    assert torch.equal(finite, found[1] > -torch.inf)
    lse = [torch.where(finite, x[1], 0.0).double() for x in (found, expected)]
    pairs = [(found[0], expected[0]), tuple(lse), *zip(found[2:], expected[2:], strict=True)]
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", SERVED)
def test_served_blocks_are_a_librarys(case, kv_heads, dtype):
    inputs = halves(dtype, kv_heads=kv_heads)
    found, calls = results(inputs, case, with_lse=False, precision="fast")
    windowed = "window" in case
    assert windowed or len(calls.forward) == len(calls.backward) > 0
    assert all(min(sizes) > 0 for sizes in calls.forward + calls.backward)
    limit = 12e-3 if dtype == torch.bfloat16 else 1.5e-3
    assert max(errors(found, exact(inputs, case, with_lse=False))) < limit


class Traffic(TorchDispatchMode):
    """Counts bytes that operators read and write beside a library's: their tensors, once each."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view or "scaled_dot_product" in func.__name__:
            return result
        tensors = [x for x in (*args, *tree_leaves(result)) if isinstance(x, torch.Tensor)]
        written = [
            x
            for x, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.bytes += sum(x.numel() * x.element_size() for x in (*tensors, *written))
        return result


def test_bytes_beside_the_library_are_those_of_one_merge():
    q, k, v, _ = halves(seq_len=64, dim=64, v_dim=64)
    state = torch.zeros(*q.shape[:3], 64), torch.full(q.shape[:3], -torch.inf)
    at = torch.arange(64)
    options = blocks.BlockOptions(0.125, Mask(), precision="fast")
    runs = {"q_runs": (range(64),), "k_runs": (range(64),)}
    with Traffic() as traffic:
        blocks.attend_(*state, blocks.Block(q, k, v, at, at, **runs), options)
    rows = q[..., 0].numel()
    # The state is read and written in 4 bytes, and a result of 2 read; two LSE are read, one
    # written. 335 MB at 32 heads, 8192 positions and 128 columns.
    assert traffic.bytes == rows * (64 * (4 + 4 + 2) + 3 * 4)


@pytest.mark.parametrize(
    ("case", "change", "kwargs"),
    [
        *((case, {}, {}) for case in CASES if case not in SERVED),
        ("causal", {"dtype": torch.float32}, {}),
        ("causal", {"dtype": torch.float64}, {}),
        ("causal", {"v_dim": 8}, {}),
        ("causal", {"seq_len": 0}, {}),
        ("causal", {"heads": 0, "kv_heads": 0}, {}),
        ("causal", {"batch": 0}, {}),
        ("causal", {}, {"dropout_p": 0.3, "seed": 5}),
        ("causal", {}, {"prefix_len": [21, 3]}),
        # Torch gets these wrong.
        ("causal", {}, {"scale": -0.5}),
        ("causal", {}, {"scale": 0.0}),
    ],
)
def test_what_no_library_serves_is_ours(case, change, kwargs):
    inputs = halves(**change)
    if "scale" in kwargs:
        # Far from 0, so that exp(scale * maximum - scale * minimum) overflows.
        inputs[0] *= 100
    found, calls = results(inputs, case, precision="fast", **kwargs)
    assert not calls.forward and not calls.backward
    expected, _ = results(inputs, case, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_exact_calls_no_library():
    _, calls = results(halves(), "causal")
    assert not calls.forward and not calls.backward


def test_small_pieces_stay_together(monkeypatch):
    monkeypatch.setattr(blocks, "_LEAST_PAIRS", 9 * 9 * 4)
    assert not results(halves(), "documents", precision="fast")[1].forward
    assert results(halves(), "causal", precision="fast")[1].forward == [(37, 37)]


def test_a_gradient_of_the_lse_goes_through_our_kernel():
    inputs = halves()
    found, calls = results(inputs, "causal", precision="fast")
    assert calls.forward and not calls.backward
    assert max(errors(found, exact(inputs, "causal"))) < 6e-3


def test_a_window_is_cut_where_it_ends():
    q, k, v, _ = halves(seq_len=60)
    positions = torch.arange(60)
    mask = blocks.Mask(True, 30)
    options = blocks.BlockOptions(0.25, mask, precision="fast")
    runs = (range(0, 20), range(20, 40), range(40, 60))
    block = blocks.Block(q, k, v, positions, positions, q_runs=runs, k_runs=runs)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:3], -torch.inf)
    with LibraryCalls() as calls:
        blocks.attend_(out, lse, block, options)
    # Three blocks of the diagonal; those beside it are cut by the window, the one in the corner is
    # out of sight.
    assert calls.forward == [(20, 20)] * 3
    expected = reference(
        q.double(), k.double(), v.double(), scale=0.25, is_causal=True, window=(30, -1)
    )
    assert max(errors([out, lse], expected)) < 4e-3


def test_the_stand_in_for_the_output_has_the_same_product():
    grad = torch.randn(2, 3, 40, 16) * torch.logspace(-30, 10, 40)[:, None]
    grad[0, 0, 3] = 0
    delta = (grad * torch.randn(grad.shape)).sum(-1)
    out = blocks.Narrowed(grad, delta, torch.float32).out
    assert out.isfinite().all()
    torch.testing.assert_close((grad * out).sum(-1), delta, rtol=1e-5, atol=0)


def ring(rank, layout, case, scheme):
    blocks._LEAST_PAIRS = 0
    inputs = halves(seq_len=75, kv_heads=2)
    kwargs = {"cu_seqlens": (0, 20, 20, 75)} if case == "documents" else dict(CASES[case])
    if layout in ("per_document", "cost_balanced"):
        kwargs["cu_seqlens"] = (0, 20, 20, 75)
    where = {"group": dist.group.WORLD, "layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
    q, k, v, grad = (shard_sequence(x, dim=2, **where) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with LibraryCalls() as calls:
        out = ring_attention(*leaves, precision="fast", scheme=scheme, **{**kwargs, **where})
        grads = torch.autograd.grad(out, leaves, grad)
    masks = {name: kwargs[name] for name in ("is_causal", "window", "scale") if name in kwargs}
    wide = [x.double().requires_grad_() for x in inputs[:3]]
    expected, _ = reference(*wide, cu_seqlens=kwargs.get("cu_seqlens"), **masks)
    expected = [expected, *torch.autograd.grad(expected, wide, inputs[3].double())]
    for part, full in zip((out, *grads), expected, strict=True):
        full = shard_sequence(full, dim=2, **where)
        assert (part.double() - full).norm() < 12e-3 * full.norm(), (layout, case, scheme)
    return len(calls.forward), len(calls.backward)


def all_rings(rank):
    found = {}
    for layout in ("contiguous", "zigzag", "striped", "per_document", "cost_balanced"):
        for case in ("full", "causal", "causal_window", "documents"):
            found[layout, case, "ring"] = ring(rank, layout, case, "ring")
    for scheme in ("all_gather", "ulysses"):
        for layout in ("zigzag", "striped"):
            found[layout, "causal", scheme] = ring(rank, layout, "causal", scheme)
    return found


def test_ranks():
    for found in spawn_ranks(all_rings, 3):
        for (layout, case, scheme), (forward, backward) in found.items():
            assert forward == backward
            if case != "causal_window":
                assert forward > 0, (layout, case, scheme)


IN_TORCH = [library for library in LIBRARIES[1:] if library.name != "FlashAttention-4 (CUDA)"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("library", IN_TORCH, ids=lambda library: library.name)
def test_calls_of_the_cuda_libraries_fit_their_signatures(library, is_causal):
    """On meta tensors: shapes and arguments alone."""
    q, grad = (torch.empty(2, 4, 40, 32, device="meta", dtype=torch.bfloat16) for _ in range(2))
    k, v = (
        torch.empty(2, 4, 40 if is_causal else 24, 32, device="meta", dtype=torch.bfloat16)
        for _ in range(2)
    )
    assert library.serves(q, k, v)
    out, lse = library.forward((q, k, v), is_causal, 0.3)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = library.backward(grad, out, lse, (q, k, v), is_causal, 0.3)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert {g.dtype for g in grads} == {torch.bfloat16}


FOUR = "FlashAttention-4 (CUDA)"
AMPERE, HOPPER = (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("capability", "active", "has_four", "change", "name"),
    [
        (AMPERE, None, False, {}, "flash (CUDA)"),
        (AMPERE, None, False, {"kv_heads": 2}, "flash (CUDA)"),
        (AMPERE, None, False, {"dtype": torch.float32}, "efficient (CUDA)"),
        (AMPERE, None, False, {"dtype": torch.float32, "kv_heads": 2}, None),
        (AMPERE, None, False, {"v_dim": 24}, "efficient (CUDA)"),
        (AMPERE, None, False, {"v_dim": 24, "kv_heads": 2}, None),
        (AMPERE, None, False, {"dim": 12, "v_dim": 12}, None),
        (AMPERE, None, False, {"dim": 512, "v_dim": 512}, "efficient (CUDA)"),
        (AMPERE, None, False, {"dtype": torch.float64}, None),
        (AMPERE, None, False, {"batch": 0}, None),
        (AMPERE, None, False, {"seq_len": 0}, None),
        (HOPPER, None, False, {}, "cuDNN (CUDA)"),
        (HOPPER, None, False, {"v_dim": 24, "kv_heads": 2}, "cuDNN (CUDA)"),
        (HOPPER, None, False, {"dim": 136, "v_dim": 136}, "flash (CUDA)"),
        (HOPPER, None, False, {"dtype": torch.float32}, "efficient (CUDA)"),
        ((8, 6), None, True, {"v_dim": 24}, "efficient (CUDA)"),
        ((8, 6), None, True, {"v_dim": 24, "kv_heads": 2}, None),
        ((8, 6), "FA4", True, {}, "efficient (CUDA)"),
        (HOPPER, "FA3", True, {}, "flash (CUDA)"),
        ((10, 0), "FA3", True, {}, FOUR),
        ((10, 0), "FA4", True, {}, "flash (CUDA)"),
        ((10, 0), None, True, {}, FOUR),
        ((12, 0), None, True, {}, "flash (CUDA)"),
    ],
)
def test_which_library_serves_on_cuda(capability, active, has_four, change, name, monkeypatch):
    monkeypatch.setattr(libraries, "_capability", lambda device: capability)
    monkeypatch.setattr(libraries, "active_flash", lambda: active)
    monkeypatch.setattr(libraries, "_has_flash_four", lambda: has_four)
    library = library_for(*(x.to("meta") for x in halves(**{"kv_heads": 4, **change})[:3]))
    assert (library.name if library else None) == name


def test_what_has_no_deterministic_gradient_is_passed_over(monkeypatch):
    monkeypatch.setattr(libraries, "_capability", lambda device: (9, 0))
    qkv = [x.to("meta") for x in halves(kv_heads=4)[:3]]
    torch.use_deterministic_algorithms(True)
    try:
        assert library_for(*qkv).name == "flash (CUDA)"
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_implementation_that_torch_has_activated_is_known():
    class Handle:
        def remove(self):
            pass

    attention = torch.nn.attention
    attention.register_flash_attention_impl("FA-test", register_fn=Handle)
    attention.activate_flash_attention_impl("FA-test")
    try:
        assert libraries.active_flash() == "FA-test"
    finally:
        attention.restore_flash_attention_impl()
    assert libraries.active_flash() is None


# Of flash_attn.cute.interface, without the arguments that are not passed.
def flash_four_forward(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    assert return_lse and q.shape[1:] == (160, 2, 64)
    found = exact_block((q, k, v), causal, softmax_scale)
    return found[0].to(q.dtype).transpose(1, 2), found[1]


def flash_four_backward(
    q, k, v, out, grad_out, lse, softmax_scale=None, causal=False, deterministic=False
):
    assert lse.is_contiguous() and not deterministic and out.shape == grad_out.shape == q.shape
    wide = grad_out.transpose(1, 2).float()
    delta = ops.attention_delta(wide, out.transpose(1, 2).float())
    grads = ops.attention_block_backward(
        *(wide, lse, delta, *given_to_exact((q, k, v))), causal=causal, scale=softmax_scale
    )
    return tuple(grad.to(q.dtype).transpose(1, 2) for grad in grads[:3])


def given_to_exact(qkv):
    return (*(x.transpose(1, 2) for x in qkv), *(torch.arange(x.shape[1]) for x in qkv[:2]))


def exact_block(qkv, causal, scale):
    return ops.attention_block(*given_to_exact(qkv), causal=causal, scale=scale)


@pytest.fixture
def tried(monkeypatch):
    """Libraries that serve the CPU, and are tried there."""
    module = types.SimpleNamespace(
        _flash_attn_fwd=flash_four_forward, _flash_attn_bwd=flash_four_backward
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setattr(libraries, "_TRIED_ON", ("cpu",))
    monkeypatch.setattr(libraries, "_faults", {})
    monkeypatch.setattr(type(libraries._FOUR), "serves", lambda *_: True)
    monkeypatch.setattr(libraries, "LIBRARIES", (libraries._FOUR, LIBRARIES[0]))
    return module


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_an_installed_flash_attention_4_is_tried_and_taken(tried, kv_heads):
    qkv = halves(dim=64, v_dim=64, kv_heads=kv_heads)[:3]
    before = torch.get_rng_state()
    assert library_for(*qkv) is libraries._FOUR
    assert torch.equal(torch.get_rng_state(), before)
    assert list(libraries._faults.values()) == [""]


def broken(*args, **kwargs):
    raise RuntimeError("no kernel image\nfor this device")


@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("_flash_attn_fwd", broken, "RuntimeError: no kernel image"),
        (
            "_flash_attn_fwd",
            lambda *a, **k: tuple(1.1 * x for x in flash_four_forward(*a, **k)),
            "the output of a causal block is off by 10 %",
        ),
        (
            "_flash_attn_bwd",
            lambda *a, **k: flash_four_backward(*a, **k)[::-1],
            "the gradient of q of a causal block",
        ),
        (
            "_flash_attn_bwd",
            lambda *a, **k: [x * torch.nan for x in flash_four_backward(*a, **k)],
            "off by nan %",
        ),
    ],
)
def test_a_library_that_gives_wrong_numbers_is_passed_over(tried, name, fault, why, monkeypatch):
    setattr(tried, name, fault)
    qkv = halves(dim=64, v_dim=64, kv_heads=4)[:3]
    assert library_for(*qkv).name == "flash (CPU)"
    monkeypatch.setattr(libraries, "_try", None)  # once
    assert library_for(*qkv).name == "flash (CPU)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(libraries, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(libraries, "_has_flash_four", lambda: True)
    said = libraries.state()
    assert said.startswith(f"cuDNN (CUDA), {FOUR}") and "torch's flash is FA2" in said
    assert f"passed over: {FOUR}: " in said and why in said


def test_switches_of_torch_are_obeyed():
    qkv = [x.to("meta") for x in halves(kv_heads=4)[:3]]
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        assert library_for(*qkv).name == "efficient (CUDA)"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        assert library_for(*qkv).name == "cuDNN (CUDA)"
    with sdpa_kernel([SDPBackend.MATH]):
        assert library_for(*qkv) is None
