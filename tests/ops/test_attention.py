"""attention_block against the formula in float64, under every mask."""

import math

import emulation
import pytest
import torch
from attention_cases import MASKS, assert_close, mask_options, positions, qkv
from hypothesis import given
from hypothesis import strategies as st
from ops_helpers import DTYPES, acc_dtype, examples

from moe_ext import ops, reference


def compare(q, k, v, q_positions, k_positions, **options):
    """Results and gradients of the operator, against those of the formula in float64."""
    acc = acc_dtype(q.dtype)
    bias = options.pop("bias", None)
    given = (q, k, v) if bias is None else (q, k, v, bias)
    inputs = [t.detach().requires_grad_() for t in given]
    exact_inputs = [t.detach().double().requires_grad_() for t in given]
    biases = [{} if bias is None else {"bias": x[3]} for x in (inputs, exact_inputs)]
    at = (q_positions, k_positions)
    out, lse = ops.attention_block(*inputs[:3], *at, **options, **biases[0])
    exact = reference.attention_block(*exact_inputs[:3], *at, **options, **biases[1])
    assert_close(out, exact[0], dtype=acc)
    assert_close(lse, exact[1], dtype=acc)
    grad_out = torch.randn(out.shape, dtype=acc)
    grad_lse = torch.randn(lse.shape, dtype=acc)
    seen = exact[1].isfinite()
    grads = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse))
    exact_loss = (exact[0] * grad_out).sum() + (exact[1] * grad_lse)[seen].sum()
    exact_grads = torch.autograd.grad(exact_loss, exact_inputs, allow_unused=True)
    for grad, exact_grad, x, like in zip(grads, exact_grads, exact_inputs, inputs, strict=True):
        exact_grad = torch.zeros_like(x) if exact_grad is None else exact_grad
        assert_close(grad, exact_grad, dtype=acc, rounded_to=like.dtype)
    assert not out[~seen].any() and not grads[0][~seen].any()
    return out, lse, grads


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(backend, mask, dtype):
    # The emulation has tiles of 64 by 64, and is slow.
    size = (70, 130) if emulation.is_active() else (150, 530)
    heads = 2 if emulation.is_active() else 4
    q, k, v = qkv(2, heads, heads // 2, *size, 24, dtype=dtype)
    q_positions, k_positions = positions(*size)
    options = mask_options(mask, 2, heads, q_positions, k_positions)
    compare(q, k, v, q_positions, k_positions, **options)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "mask"),
    [((1, 2), "causal"), ((2, 1), "softcap"), ((1, 1), "none"), ((2, 2), "all")],
)
def test_bias(backend, shape, mask, dtype):
    size = (70, 70) if emulation.is_active() else (150, 530)
    # Results of more columns than a block of threads has.
    q, k, v = qkv(2, 2, 1, *size, 24, 70, dtype=dtype)
    at = positions(*size)
    bias = torch.randn(*shape, *size).masked_fill(torch.rand(*shape, *size) < 0.1, -math.inf)
    bias = bias.to(dtype if mask == "none" else acc_dtype(dtype))
    if mask == "softcap":
        bias = bias.transpose(2, 3).contiguous().transpose(2, 3)
    compare(q, k, v, *at, bias=bias, **mask_options(mask, 2, 2, *at))


def test_a_bias_may_hide_all_keys(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 3, 9, 4))
    bias = torch.zeros(1, 1, 3, 9)
    bias[:, :, 1] = -math.inf
    bias.requires_grad_()
    out, lse = ops.attention_block(q, k, v, torch.arange(3), torch.arange(9), bias=bias)
    assert not out[:, :, 1].any() and (lse[:, :, 1] == -math.inf).all()
    grads = torch.autograd.grad((out, lse), (q, k, v, bias), (out + 1, torch.ones_like(lse)))
    assert all(grad.isfinite().all() for grad in grads) and grads[3].any()
    assert not grads[0][:, :, 1].any() and not grads[3][:, :, 1].any()


@pytest.mark.parametrize(
    "size",
    [(0, 5), (5, 0), (1, 1), (63, 65), (128, 128), (257, 255)],
    ids=lambda size: f"{size[0]}x{size[1]}",
)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (3, 1)])
def test_edge_sizes_and_key_heads(device, size, heads):
    q, k, v = qkv(1, *heads, *size, 16, 9)
    compare(q, k, v, torch.arange(size[0]), torch.arange(size[1]), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(1, 1), (16, 1), (7, 33), (64, 128), (192, 128)])
def test_head_dims(device, dims, dtype):
    q, k, v = qkv(1, 2, 1, 33, 40, *dims, dtype=dtype)
    compare(q, k, v, *positions(33, 40), causal=True)


def test_more_key_heads_than_tasks(device):
    q, k, v = qkv(3, 12, 6, 33, 40, 8)
    compare(q, k, v, *positions(33, 40), causal=True)


def test_empty_batch_and_heads(device):
    for batch, heads, key_heads in ((0, 2, 1), (2, 0, 0)):
        q, k, v = qkv(batch, heads, key_heads, 5, 7, 4)
        compare(q, k, v, *positions(5, 7))


def test_more_tiles_than_one_of_rows_and_columns(backend):
    rows, cols = (130, 300) if emulation.is_active() else (300, 1200)
    q, k, v = qkv(1, 2, 1, rows, cols, 8)
    q_positions = torch.arange(rows) + 7 * cols // 12
    compare(q, k, v, q_positions, torch.arange(cols), causal=True, window_left=cols // 2)


def test_agrees_with_the_library(device):
    q, k, v = qkv(2, 4, 2, 97, 97, 32)
    at = torch.arange(97)
    out, _ = ops.attention_block(q, k, v, at, at, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_arguments(device, dtype):
    q, k, v = qkv(2, 4, 2, 40, 60, 16, dtype=dtype)
    at = positions(40, 60)
    expected = ops.attention_block(q, k, v, *at, causal=True)
    views = {
        "sequence before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "columns first": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        "every second": lambda t: torch.stack([t, -t], dim=4)[..., 0],
        "half of the columns": lambda t: torch.cat([t, t], dim=3)[..., : t.shape[3]],
    }
    for view in views.values():
        actual = ops.attention_block(view(q), view(k), view(v), *at, causal=True)
        torch.testing.assert_close(actual, expected)
    wide = [torch.stack([p, p], dim=1)[:, 0] for p in at]
    torch.testing.assert_close(ops.attention_block(q, k, v, *wide, causal=True), expected)


def test_expanded_gradients(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 2, 9, 9, 4))
    at = torch.arange(9)
    out, lse = ops.attention_block(q, k, v, at, at)
    (out.sum() + lse.sum()).backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact_out, exact_lse = reference.attention_block(*exact, at, at)
    (exact_out.sum() + exact_lse.sum()).backward()
    for x, y in zip((q, k, v), exact, strict=True):
        assert_close(x.grad, y.grad)


@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck(device, mask):
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 5, 7, 3, 2, dtype=torch.float64))
    at = torch.tensor([3, 0, 6, 4, 5]), torch.tensor([2, 5, 0, 1, 6, 4, 3])
    options = mask_options(mask, 1, 2, *at)

    def finite(*inputs):
        out, lse = ops.attention_block(*inputs, *at, **options)
        return out, lse.masked_fill(lse.isinf(), 0)

    assert emulation.gradcheck(finite, (q, k, v))


def test_rows_that_see_nothing(device):
    q, k, v = (t.requires_grad_() for t in qkv(2, 2, 1, 20, 30, 8))
    at = torch.arange(20), torch.arange(30) + 10
    out, lse = ops.attention_block(q, k, v, *at, causal=True)
    assert (lse[:, :, :10] == -math.inf).all() and lse[:, :, 10:].isfinite().all()
    assert not out[:, :, :10].any()
    grads = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse))
    )
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, :10].any() and not grads[1][:, :, 10:].any()
    assert grads[0][:, :, 10:].any() and grads[1][:, :, :10].any()


def test_nothing_to_see_at_all(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 6, 6, 8))
    for options in (
        {"causal": True},
        {"key_mask": torch.zeros(1, 6, dtype=torch.bool)},
        {"q_documents": torch.zeros(6).long(), "k_documents": torch.ones(6).long()},
    ):
        out, lse = ops.attention_block(q, k, v, torch.arange(6), torch.arange(6) + 6, **options)
        assert not out.any() and (lse == -math.inf).all()
        grads = torch.autograd.grad((out, lse), (q, k, v), (out + 1, lse.new_ones(lse.shape)))
        assert not any(grad.any() for grad in grads)


def test_large_scores_do_not_overflow(backend):
    q, k, v = (40 * t for t in qkv(1, 1, 1, 64, 64, 16))
    at = torch.arange(64)
    out, lse = ops.attention_block(q, k, v, at, at)
    exact = reference.attention_block(q.double(), k.double(), v.double(), at, at)
    assert_close(lse, exact[1])
    assert out.isfinite().all()


def test_nan_is_handed_on(device):
    q, k, v = qkv(1, 1, 1, 4, 40, 8)
    k[0, 0, 33] = math.nan
    out, lse = ops.attention_block(q, k, v, torch.arange(4) + 30, torch.arange(40), causal=True)
    assert out[0, 0, :3].isfinite().all() and lse[0, 0, :3].isfinite().all()
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()


def of_keys(options, part):
    """Options for some of the keys."""
    found = dict(options)
    if "k_documents" in options:
        found["k_documents"] = options["k_documents"][part]
    if "key_mask" in options:
        found["key_mask"] = options["key_mask"][:, part]
    return found


@examples(25)
@given(data=st.data(), mask=st.sampled_from(MASKS))
def test_any_two_parts_of_the_keys_merge_into_the_whole(device, data, mask):
    num_keys = data.draw(st.integers(0, 40))
    at = positions(11, num_keys)
    q, k, v = qkv(2, 2, 1, 11, num_keys, 5, dtype=torch.float64)
    options = mask_options(mask, 2, 2, *at)
    whole = ops.attention_block(q, k, v, *at, **options)
    chosen = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=num_keys, max_size=num_keys)), dtype=torch.bool
    )
    parts = []
    for part in (chosen, ~chosen):
        given = q, k[:, :, part], v[:, :, part], at[0], at[1][part]
        parts += ops.attention_block(*given, **of_keys(options, part))
    out, lse = ops.merge_attention(*parts)
    assert_close(out, whole[0], dtype=torch.float64)
    assert_close(lse, whole[1], dtype=torch.float64)


@examples(25)
@given(data=st.data(), mask=st.sampled_from(MASKS))
def test_any_order_of_queries_and_keys(device, data, mask):
    q, k, v = qkv(1, 1, 1, 19, 23, 4, dtype=torch.float64)
    at = positions(19, 23)
    options = mask_options(mask, 1, 1, *at)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse = ops.attention_block(*inputs, *at, **options)
    rows = torch.tensor(data.draw(st.permutations(range(19))))
    cols = torch.tensor(data.draw(st.permutations(range(23))))
    permuted = of_keys(options, cols)
    if "q_documents" in options:
        permuted["q_documents"] = options["q_documents"][rows]
    other, other_lse = ops.attention_block(
        q[:, :, rows], k[:, :, cols], v[:, :, cols], at[0][rows], at[1][cols], **permuted
    )
    assert_close(other, out[:, :, rows], dtype=torch.float64)
    assert_close(other_lse, lse[:, :, rows], dtype=torch.float64)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad)
    actual = torch.autograd.grad(other, inputs, grad[:, :, rows])
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, dtype=torch.float64)


def test_dropout_does_not_depend_on_how_the_sequence_is_cut(device):
    q, k, _ = qkv(2, 4, 4, 60, 90, 8)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    v = torch.eye(90).expand(2, 4, 90, 90)
    options = {"dropout_p": 0.4, "seed": 11}
    rows, cols = torch.arange(60), torch.arange(90)
    # Equal scores and a unit matrix of values: the result is the mask, over 90 (1 - p).
    kept, _ = ops.attention_block(q, k, v, rows, cols, **options)
    assert set((kept * 90 * 0.6).round(decimals=4).unique().tolist()) == {0.0, 1.0}
    assert 0.55 < (kept > 0).float().mean() < 0.65
    for part in (cols[30:], cols[1::3], cols.flip(0), torch.randperm(90)):
        other, _ = ops.attention_block(q, k[:, :, part], v[:, :, part], rows, cols[part], **options)
        assert torch.equal(other[..., part] > 0, kept[..., part] > 0)
    other, _ = ops.attention_block(
        q[1:, 2:, 7:],
        k[1:, 2:],
        v[1:, 2:],
        rows[7:],
        cols,
        batch_offset=1,
        head_offset=2,
        **options,
    )
    assert torch.equal(other > 0, kept[1:, 2:, 7:] > 0)
    for change in ({"seed": 12}, {"batch_offset": 1}, {"head_offset": 1}):
        other, _ = ops.attention_block(q, k, v, rows, cols, **(options | change))
        assert not torch.equal(other > 0, kept > 0)


def test_the_backward_pass_keeps_the_seed_of_the_forward_pass(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 1, 1, 8, 8, 4))
    at, seed = torch.arange(8), torch.tensor([3])
    out, _ = ops.attention_block(q, k, v, at, at, dropout_p=0.5, seed=seed)
    expected = torch.autograd.grad(out.sum(), v, retain_graph=True)
    seed += 1
    assert torch.equal(torch.autograd.grad(out.sum(), v)[0], expected[0])


@pytest.mark.parametrize("mask", MASKS)
def test_in_place_equals_the_merge(device, mask):
    q, k, v = qkv(2, 4, 2, 40, 80, 8)
    at = positions(40, 80)
    options = mask_options(mask, 2, 4, *at)
    whole = ops.attention_block(q, k, v, *at, **options)
    out, lse = torch.full_like(whole[0], math.nan), torch.full_like(whole[1], -math.inf)
    for part in (slice(0, 30), slice(30, 30), slice(30, 80)):
        given = q, k[:, :, part], v[:, :, part], at[0], at[1][part]
        ops.attention_block_(out, lse, *given, **of_keys(options, part))
    assert_close(out, whole[0])
    assert_close(lse, whole[1])


def test_gradients_of_blocks_sum_to_those_of_the_whole(device):
    q, k, v = qkv(1, 4, 2, 60, 90, 8, dtype=torch.float64)
    at = positions(60, 90)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse = ops.attention_block(*inputs, *at, causal=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse))
    delta = ops.attention_delta(grad_out, out.detach(), grad_lse)
    torch.testing.assert_close(delta, reference.attention_delta(grad_out, out, grad_lse))
    grad_q = torch.zeros_like(q)
    for part in (slice(0, 17), slice(17, 90)):
        k_part, v_part = k[:, :, part].detach(), v[:, :, part].detach()
        share, grad_k, grad_v = ops.attention_block_backward(
            grad_out,
            lse.detach(),
            delta,
            q.detach(),
            k_part,
            v_part,
            at[0],
            at[1][part],
            causal=True,
        )
        grad_q += share
        assert_close(grad_k, expected[1][:, :, part], dtype=torch.float64)
        assert_close(grad_v, expected[2][:, :, part], dtype=torch.float64)
    assert_close(grad_q, expected[0], dtype=torch.float64)


def frobenius(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("num_blocks", [1, 16])
def test_error_of_16_bits_is_one_rounding_however_often_it_is_merged(device, num_blocks, request):
    length = 128 if emulation.is_active() else 512
    q, k, v = qkv(1, 1, 1, length, length, 64, dtype=torch.bfloat16)
    at = torch.arange(length)
    grad = torch.randn(q.shape).bfloat16()
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:3], -math.inf)
    for part in at.chunk(num_blocks):
        ops.attention_block_(out, lse, q, k[:, :, part], v[:, :, part], at, part, causal=True)
    delta = ops.attention_delta(grad.float(), out)
    grads = [torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)]
    for part in at.chunk(num_blocks):
        given = q, k[:, :, part], v[:, :, part], at, part
        shares = ops.attention_block_backward(grad.float(), lse, delta, *given, causal=True)
        grads[0] += shares[0]
        grads[1][:, :, part], grads[2][:, :, part] = shares[1:]
    exact_inputs = [t.double().requires_grad_() for t in (q, k, v)]
    exact, _ = reference.attention_block(*exact_inputs, at, at, causal=True)
    exact_grads = torch.autograd.grad(exact, exact_inputs, grad.double())
    # Tensor cores take weights and gradients as two bfloat16, which lose up to 2^-16 of each.
    limit = 1e-6 if request.node.callspec.params["device"] == "cpu" else 2**-16
    for actual, x in zip((out, *grads), (exact.detach(), *exact_grads), strict=True):
        # A rounding to 8 bits alone gives 1.6e-3 to 1.7e-3.
        assert frobenius(actual.bfloat16(), x) < 1.8e-3
        assert frobenius(actual, x) < limit


def test_saves_inputs_and_results_alone(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, 2, 64, 64, 8, dtype=torch.bfloat16))
    at, saved = torch.arange(64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out, lse = ops.attention_block(q, k, v, at, at, causal=True)
    expected = {t.data_ptr() for t in (q, k, v, at, out, lse)}
    assert {t.data_ptr() for t in saved} == expected
