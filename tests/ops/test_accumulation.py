"""Weight gradients that are added to `.grad` at once, and memory that the backward pass uses again.

Shapes: N rows, M output features, K input features, E experts.
"""

import emulation
import numpy as np
import pytest
import torch
from peak_memory import peak_bytes

import moe_ext
from moe_ext import _runtime_library, ops

ADD = "moe_ext::_grouped_mm_backward_weight_add_"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
N, M, K, E = 200, 300, 48, 4

pytestmark = pytest.mark.skipif(
    _runtime_library.load() is None, reason="the formulas in Python leave it to the engine"
)


def make(dtype=torch.float32, device="cpu"):
    """Rows, a weight with a gradient, offsets with an empty expert, and a gradient of the rows."""
    torch.manual_seed(0)
    x = torch.randn(N, K).to(device, dtype).requires_grad_()
    weight = torch.randn(E, M, K).to(device, dtype).requires_grad_()
    weight.grad = torch.randn(E, M, K).to(device, dtype)
    offsets = torch.tensor([0, 90, 90, 150, N]).to(device)
    return x, weight, offsets, torch.randn(N, M).to(device, dtype)


def calls_of(function):
    with torch.profiler.profile() as profile:
        function()
    return {event.key: event.count for event in profile.key_averages()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_has_the_bits_of_the_engines(num_threads, dtype, device):
    # Emulated kernels run on one thread.
    for threads in (1,) if emulation.is_active() else (1, 3):
        num_threads(threads)
        x, weight, offsets, grad = make(dtype, device)
        (alone,) = torch.autograd.grad(ops.grouped_mm(x, weight, offsets), weight, grad)
        expected = weight.grad + alone
        held, version = weight.grad, weight.grad._version
        y = ops.grouped_mm(x, weight, offsets)
        calls = calls_of(lambda y=y, grad=grad: y.backward(grad))
        assert calls[ADD] == 1 and "moe_ext::_grouped_mm_backward_weight" not in calls
        assert weight.grad is held and weight.grad._version > version
        assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_products_of_a_gpu_add_their_own_bits(
    device, monkeypatch, transposed, ends, own, dtype
):
    """torch's product over all experts, of bfloat16, and ours."""
    if own:
        monkeypatch.setenv("MOE_EXT_GROUPED_MM", "own")
    x, weight, offsets, grad = make(dtype, device)
    offsets = offsets[1:].int() if ends else offsets
    op = torch.ops.moe_ext
    total = weight.grad.mT.contiguous() if transposed else weight.grad
    alone = op._grouped_mm_backward_weight(grad, x.detach(), offsets, transposed)
    want = total + (alone.mT if transposed else alone)
    op._grouped_mm_backward_weight_add_(total, grad, x.detach(), offsets, transposed)
    assert torch.equal(total, want)


def test_named_inputs_take_it_and_leave_others_alone():
    x, weight, offsets, grad = make()
    before = weight.grad.clone()
    ops.grouped_mm(x, weight, offsets).backward(grad, inputs=[x])
    assert torch.equal(weight.grad, before)
    y = ops.grouped_mm(x, weight, offsets)
    assert calls_of(lambda: y.backward(grad, inputs=[weight]))[ADD] == 1
    assert not torch.equal(weight.grad, before)


def test_a_weight_that_is_used_twice_gets_both():
    x, weight, offsets, grad = make(torch.float64)
    expected = weight.grad.clone()
    for factor in (1.0, 2.0):
        y = ops.grouped_mm(factor * x, weight, offsets)
        expected += torch.autograd.grad(y, weight, grad)[0]
    both = ops.grouped_mm(x, weight, offsets) + ops.grouped_mm(2.0 * x, weight, offsets)
    both.backward(grad)
    torch.testing.assert_close(weight.grad, expected)


def node_of(weight):
    return weight.expand_as(weight).grad_fn.next_functions[0][0]


SEEN = {
    "a hook of the parameter": lambda w, see: w.register_hook(see),
    "a hook behind the sum": lambda w, see: w.register_post_accumulate_grad_hook(
        lambda p: see(p.grad)
    ),
    "a hook before the node": lambda w, see: node_of(w).register_prehook(lambda g: see(g[0])),
    "a hook behind the node": lambda w, see: node_of(w).register_hook(lambda _, g: see(g[0])),
}


@pytest.mark.parametrize("kind", SEEN)
def test_who_looks_at_the_gradient_sees_it(kind):
    x, weight, offsets, grad = make()
    y = ops.grouped_mm(x, weight, offsets)
    (alone,) = torch.autograd.grad(y, weight, grad, retain_graph=True)
    expected = weight.grad + alone
    seen = []
    kept = node_of(weight)  # a node lives as long as somebody holds it
    SEEN[kind](weight, lambda g: seen.append(g.clone()))
    assert ADD not in calls_of(lambda: y.backward(grad))
    assert kept is not None
    assert torch.equal(weight.grad, expected)
    assert torch.equal(seen[0], expected if kind == "a hook behind the sum" else alone)


def test_a_gradient_that_is_asked_for_is_handed_out():
    x, weight, offsets, grad = make()
    before = weight.grad.clone()
    y = ops.grouped_mm(x, weight, offsets)
    (first,) = torch.autograd.grad(y, weight, grad, retain_graph=True)
    assert torch.equal(weight.grad, before)
    (again,) = torch.autograd.grad(y, weight, grad, create_graph=True)
    assert torch.equal(first, again) and again.requires_grad


def change(weight, how):
    if how == "strides":
        weight.grad = weight.grad.transpose(1, 2).contiguous().transpose(1, 2)
    elif how == "none":
        weight.grad = None


@pytest.mark.parametrize("how", ["strides", "none", "create_graph"])
def test_other_gradients_are_the_engines(how):
    x, weight, offsets, grad = make()
    change(weight, how)
    y = ops.grouped_mm(x, weight, offsets)
    (alone,) = torch.autograd.grad(y, weight, grad, retain_graph=True)
    expected = alone if weight.grad is None else weight.grad + alone
    graph = how == "create_graph"
    assert ADD not in calls_of(lambda: y.backward(grad, create_graph=graph))
    assert torch.equal(weight.grad, expected)


def test_refuses_a_sum_of_another_shape():
    x, weight, offsets, grad = make()
    with pytest.raises(RuntimeError, match="_add_: expected sum to be a contiguous tensor of the"):
        torch.ops.moe_ext._grouped_mm_backward_weight_add_(
            weight.grad.transpose(1, 2), grad, x.detach(), offsets
        )


def test_micro_batches_of_a_layer_take_no_memory_for_weight_gradients():
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(64, 256, 4, 2)
    batches = torch.randn(3, 32, 64)
    weights = (layer.experts.gate_up_proj, layer.experts.down_proj)
    found = []
    for looks in (False, True):  # with a hook, the engine adds
        layer.zero_grad()
        hooks = [w.register_hook(lambda grad: None) for w in weights if looks]
        layer(batches[0]).sum().backward()
        layer(batches[1]).sum().backward()
        peak = peak_bytes(lambda: layer(batches[2]).sum().backward())
        found.append(([p.grad.clone() for p in layer.parameters()], peak))
        for hook in hooks:
            hook.remove()
    (added, low), (expected, high) = found
    assert all(torch.equal(a, b) for a, b in zip(added, expected, strict=True))
    assert low < weights[0].nbytes < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_the_gradient_of_an_activation_over_its_input_has_the_same_bits(dtype, layout):
    torch.manual_seed(0)
    x, grad = torch.randn(33, 2 * 70).to(dtype), torch.randn(33, 70).to(dtype)
    slots = torch.arange(33)
    slots[5] = -1
    args = (grad, x, "swiglu", layout, torch.rand(33), slots)
    backward = torch.ops.moe_ext._gated_activation_backward_weighted
    expected = backward(*args)
    over = backward(*args, True)
    assert over[0].data_ptr() == x.data_ptr() != expected[0].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(over, expected, strict=True))


def weighted(x):
    num_rows = x.shape[0]
    return ops.gated_activation(
        x, slot_weights=torch.ones(num_rows), slot_of_row=torch.arange(num_rows)
    )


class OfNumpy(torch.autograd.Function):
    """A result whose memory is an array's."""

    @staticmethod
    def forward(ctx, x, array):
        array[...] = x.detach().numpy()
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("holder", ["name", "view", "numpy", "graph"])
def test_memory_that_somebody_else_holds_is_left_alone(holder):
    torch.manual_seed(0)
    leaf = torch.randn(8, 32, requires_grad=True)
    array = np.empty((8, 32), dtype=np.float32)
    x = OfNumpy.apply(leaf, array) if holder == "numpy" else leaf.clone()
    y = weighted(x).sum()
    held = {"name": x, "view": x[1:], "numpy": None, "graph": None}[holder]
    del x
    first = torch.autograd.grad(y, leaf, retain_graph=holder == "graph")
    if holder == "graph":
        assert torch.equal(torch.autograd.grad(y, leaf)[0], first[0])
    if held is not None:
        assert torch.equal(held, leaf[-held.shape[0] :])
    if holder == "numpy":
        assert np.array_equal(array, leaf.detach().numpy())


def test_memory_that_nobody_holds_is_used_again():
    torch.manual_seed(0)
    leaf = torch.randn(512, 1024, requires_grad=True)
    grad = torch.randn(512, 512)
    y = weighted(leaf.clone())
    # The input's gradient takes the input's place: what is new is small.
    assert peak_bytes(lambda: torch.autograd.grad(y, leaf, grad)) < leaf.nbytes // 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("owned", [(False, False), (True, False), (False, True), (True, True)])
def test_rows_that_are_done_with_give_their_pages_back(owned, dtype, transposed):
    """The system zeroes a page that was given back; one that other tensors share stays.

    1033 rows of the second expert are padded in bfloat16, and given back once they are copied.
    """
    operands = torch.ones(2033, 2048, dtype=dtype), torch.ones(2033, 1536, dtype=dtype)
    offsets = torch.tensor([0, 1000, 2033])
    op = torch.ops.moe_ext._grouped_mm_backward_weight
    found = op(*operands, offsets, transposed, *owned)
    assert torch.equal(found[1], torch.full((2048, 1536), 1033.0).to(dtype))
    for rows, is_owned in zip(operands, owned, strict=True):
        assert all((rows[i] == 0).all() == is_owned for i in (9, 998, 1500, 2024))


@pytest.mark.parametrize("larger", [0, 1])
def test_no_more_is_given_back_than_the_gradient_takes(larger):
    """4 MiB of gradient: rows of 8 MiB make room for it, and the other 4 MiB stay."""
    sizes = [512, 512]
    sizes[larger] = 1024
    operands = [torch.ones(2048, size) for size in sizes]
    offsets = torch.tensor([0, 1000, 2048])
    torch.ops.moe_ext._grouped_mm_backward_weight(*operands, offsets, False, True, True)
    assert (operands[larger][1500] == 0).all() and (operands[1 - larger] == 1).all()
    # A gradient that is added to one that is there takes no new memory.
    operands = [torch.ones(2048, size) for size in sizes]
    total = torch.zeros(2, *sizes)
    torch.ops.moe_ext._grouped_mm_backward_weight_add_(total, *operands, offsets, False, True, True)
    assert all((rows == 1).all() for rows in operands)


def test_pages_are_kept_where_memory_is_reused():
    if not moe_ext.reuse_memory():
        pytest.skip("needs glibc's malloc")
    try:
        grad, x = torch.ones(2048, 1024), torch.ones(2048, 16)
        op = torch.ops.moe_ext._grouped_mm_backward_weight
        op(grad, x, torch.tensor([0, 2048]), False, True)
        assert (grad == 1).all()
    finally:
        moe_ext.reuse_memory(False)
