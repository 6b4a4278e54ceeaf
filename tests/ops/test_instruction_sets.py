"""Every operator with loops for several instruction sets gives the same bits on all of them."""

import pytest
import torch

from moe_ext import ops

NAMES = ("portable", "avx2", "avx512")


@pytest.fixture
def set_isa():
    before = torch.ops.moe_ext._cpu_isa()
    yield torch.ops.moe_ext._set_cpu_isa
    torch.ops.moe_ext._set_cpu_isa(before)


def numbers(*shape, dtype, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def results(function, *inputs):
    """What it returns, and the gradients of all inputs."""
    found = function(*inputs)
    found = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    wanted = [t for t in found if t.requires_grad]
    of_outputs = [numbers(*t.shape, dtype=t.dtype, seed=1, grad=False) for t in wanted]
    return found, torch.autograd.grad(wanted, inputs, of_outputs, allow_unused=True)


def gate(score_fn, renormalize):
    return lambda x: ops.topk_gate(x, 5, score_fn=score_fn, renormalize=renormalize)


def permutation(x, weights):
    idx = torch.arange(3 * len(x)).view(-1, 3) * 5 % 16
    rows, tables = ops.permute_tokens(x, idx, 16)
    return ops.unpermute_tokens(rows, tables, weights)


def block(**options):
    positions = torch.arange(40)
    return lambda q, k, v: ops.attention_block(q, k, v, positions[10:], positions, **options)


def cases(dtype):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    logits = numbers(70, 37, dtype=dtype)
    for score_fn in ("softmax", "sigmoid", "sqrtsoftplus"):
        for renormalize in (True, False):
            yield gate(score_fn, renormalize), logits
    yield ops.router_z_loss, logits
    yield lambda x: tuple(ops.sinkhorn_gate(x, 5)), logits
    yield lambda x: tuple(ops.expert_choice_gate(x, 11)), logits
    state = torch.tensor([1, 2, 3, 0])
    yield lambda x: tuple(ops.gshard_gate(x, state)), logits
    noise = numbers(70, 37, dtype=dtype, seed=2)
    yield lambda x, y: tuple(ops.noisy_topk_gate(x, y, state, 5)), logits, noise
    x = numbers(19, 130, dtype=dtype)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
        yield lambda x, kind=kind: ops.activation(x, kind=kind), x
    for layout in ("concatenated", "interleaved"):
        yield lambda x, layout=layout: ops.gated_activation(x, kind="geglu", layout=layout), x
    yield permutation, x, numbers(19, 3, dtype=acc)
    if dtype == acc:
        q, rows = numbers(1, 2, 70, 24, dtype=dtype), numbers(1, 2, 70, 35, dtype=dtype, seed=5)
        per_row, decays = rows[..., 0].sigmoid(), -rows[..., 1].abs()
        state = numbers(1, 2, 24, 35, dtype=dtype, seed=6)
        for beta in (per_row, None):
            yield (
                lambda q, v, s, beta=beta: ops.gated_delta_rule(q, q, v, decays, beta, s),
                *(t.detach().requires_grad_() for t in (q / 5, rows, state)),
            )
        wide, rates = numbers(1, 37, 70, dtype=dtype), -numbers(37, 24, dtype=dtype).abs()
        yield (
            lambda x, a, b, s: ops.selective_scan(x, x.abs() / 9, a, b[:, :1], b[:, 1:], s),
            *(t.detach().requires_grad_() for t in (wide, rates, q, rates[None])),
        )
        yield (
            lambda x, w: ops.causal_conv1d(x, w, None, x[..., :3], silu=True),
            *(t.detach().requires_grad_() for t in (wide, rates[:, :4])),
        )
    q, k = numbers(1, 2, 30, 24, dtype=dtype), numbers(1, 2, 40, 24, dtype=dtype, seed=3)
    for options in ({"causal": True}, {"softcap": 5.0}, {"alibi_slopes": torch.rand(2)}):
        yield block(**options), q, k, k.detach().requires_grad_()
    yield block(dropout_p=0.2, seed=3), q, k, k.detach().requires_grad_()
    lse = numbers(1, 2, 30, dtype=acc)
    out = numbers(1, 2, 30, 24, dtype=acc, seed=4)
    others = [t.detach().requires_grad_() for t in (out, lse)]
    yield ops.merge_attention, out, lse, *others


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_instruction_set_gives_the_same_bits(set_isa, dtype):
    names = [name for name in NAMES if torch.ops.moe_ext._cpu_isa_supported(name)]
    for index, (function, *inputs) in enumerate(cases(dtype)):
        found = []
        for name in names:
            set_isa(name)
            found.append(results(function, *inputs))
        for name, other in zip(names, found, strict=True):
            text = f"case {index} on {name}: other bits than {names[0]}"
            torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True, msg=text)
