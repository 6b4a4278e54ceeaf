"""Every operator gives the same bits on all instruction sets and with any number of threads.

Sizes are those of several blocks of a loop, or of several tasks.
"""

import pytest
import torch
from attention_cases import mask_options, positions
from instruction_sets import ISAS, forced_isa
from noisy_cases import make_state
from ops_helpers import DTYPES, acc_dtype
from test_recurrence import OPERATORS, made, run

from moe_ext import ops

T, E, WIDTH = 3001, 37, 331


def numbers(*shape, dtype, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def chance(*shape, seed=0):
    """Numbers from 0 to 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def results(function, *inputs):
    """Return the results of a call, and the gradients of all inputs that have them."""
    found = function(*inputs)
    found = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    wanted = [t for t in found if t.requires_grad]
    of_outputs = [numbers(*t.shape, dtype=t.dtype, seed=1, grad=False) for t in wanted]
    leaves = [x for x in inputs if wanted and x.requires_grad]
    grads = torch.autograd.grad(wanted, leaves, of_outputs, allow_unused=True) if leaves else ()
    return found, grads


def gate(score_fn, renormalize, **options):
    return lambda x: ops.topk_gate(x, 5, score_fn=score_fn, renormalize=renormalize, **options)


def permutation(x, weights):
    idx = torch.arange(3 * len(x)).view(-1, 3) * 5 % 16
    kept = {"topk_weights": weights, "capacity": 500, "drop_policy": "score"}
    rows, tables = ops.permute_tokens(x, idx, 16, **kept)
    return ops.unpermute_tokens(rows, tables, weights), tables.slot_of_row


def choice_of_experts(x):
    mask = chance(len(x)) > 0.4
    idx = ops.topk_gate(x.detach(), 2, token_mask=mask).topk_idx
    load = ops.sequence_load(x, idx, 19, token_mask=mask)
    return (
        *ops.expert_choice_gate(x, 200, token_mask=mask),
        *ops.sinkhorn_gate(x, 2, token_mask=mask),
        *load,
        ops.sequence_balance_loss(*load, 2),
    )


def limits(x):
    ranked = x.argsort(dim=1, descending=True)
    weights = x.softmax(1).gather(1, ranked[:, :2])
    found = []
    for policy in ("position", "choice", "score", "random", "batch_prioritized"):
        options = {"policy": policy, "topk_weights": weights, "priority": weights}
        options |= {"num_groups": 7, "ranked_idx": ranked, "overflow": "reroute"}
        found += ops.limit_capacity(ranked[:, :2], E, 60, **options)
    return tuple(found)


def scaled_into(dtype):
    def scale(x):
        out = torch.empty_like(x, dtype=dtype)
        return ops.scale_into_(out, x, scale=1 / 3), out

    return scale


def adam(x):
    found = [x.clone(), x.abs(), x.square()]
    copy = torch.empty_like(x, dtype=torch.bfloat16)
    ops.adam_step_(found[0], x, *found[1:], step=1, lr=0.02, weight_decay=0.1, copy=copy)
    return *found, copy


def recurrence(name, inputs):
    """An operator of the tensors that need gradients."""

    def call(*leaves):
        left = iter(leaves)
        return tuple(run(ops, name, [next(left) if is_leaf(x) else x for x in inputs]))

    def is_leaf(x):
        return x is not None and x.is_floating_point()

    return call, *(x.detach().requires_grad_() for x in inputs if is_leaf(x))


def attention(dtype):
    q = numbers(1, 4, 300, 16, dtype=dtype)
    k, v = (numbers(1, 1, 700, 16, dtype=dtype, seed=seed) for seed in (3, 4))
    at = positions(300, 700)
    for mask in ("causal", "softcap", "alibi", "dropout", "all"):
        options = mask_options(mask, 1, 4, *at)
        yield lambda q, k, v, o=options: ops.attention_block(q, k, v, *at, **o), q, k, v
    for other in {dtype, torch.float32} if dtype != torch.float64 else {dtype}:
        outs = [numbers(4, 300, 64, dtype=t, seed=5) for t in (dtype, other)]
        lses = [numbers(4, 300, dtype=acc_dtype(dtype), seed=seed) for seed in (6, 7)]
        yield ops.merge_attention, outs[0], lses[0], outs[1], lses[1]


def activations(dtype):
    x, slots = numbers(97, 2 * WIDTH, dtype=dtype), torch.randperm(120)[:97]
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
        yield lambda x, kind=kind: ops.activation(x, kind=kind), x
    for kind in ("swiglu", "geglu", "geglu_tanh", "reglu"):
        for layout in ("concatenated", "interleaved"):
            how = {"kind": kind, "layout": layout}
            yield lambda x, how=how: ops.gated_activation(x, **how), x
            if dtype == torch.bfloat16:  # others sum the gradients of weights in other orders
                yield (
                    lambda x, w, how=how: ops.gated_activation(
                        x, slot_weights=w, slot_of_row=slots, **how
                    ),
                    x,
                    chance(120).requires_grad_(),
                )


def cases(dtype):
    logits, noise = (numbers(T, E, dtype=dtype, seed=seed) for seed in (0, 2))
    for score_fn in ("softmax", "sigmoid", "sqrtsoftplus"):
        for renormalize in (True, False):
            yield gate(score_fn, renormalize), logits
    groups = {"selection_bias": chance(36), "num_groups": 9, "top_groups": 3, "scale": 2.5}
    yield gate("sigmoid", True, **groups), numbers(T, 36, dtype=dtype)
    chosen = chance(T, E).argsort(1)[:, :4].masked_fill(chance(T, 4, seed=1) < 0.25, -1)
    yield lambda x: ops.gate_weights(x, chosen, score_fn="sigmoid", scale=2.5), logits
    yield ops.router_z_loss, logits
    yield choice_of_experts, numbers(1501, 12, dtype=dtype)
    yield limits, numbers(4000, E, dtype=dtype, grad=False)
    yield lambda x: ops.gshard_gate(x, make_state()), logits
    yield lambda x, y: ops.noisy_topk_gate(x, y, make_state(), 5), logits, noise
    yield lambda x: ops.routing_jitter(x, make_state(), 0.1), logits
    yield ops.router_logits, numbers(1500, 96, dtype=dtype), numbers(24, 96, dtype=dtype)
    yield permutation, numbers(T, 257, dtype=dtype), numbers(T, 3, dtype=acc_dtype(dtype))
    yield scaled_into(torch.bfloat16), numbers(100_003, dtype=dtype, grad=False)
    if dtype == torch.float32:
        yield adam, numbers(70_001, dtype=dtype, grad=False)
    if dtype != torch.float64:
        yield ops.encode_exponents, numbers(2**19, dtype=dtype, grad=False)
    if dtype == acc_dtype(dtype):
        for name in OPERATORS:
            yield recurrence(name, made(name, 150, dtype=dtype, packed=1, heads=34))
    yield from activations(dtype)
    yield from attention(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(num_threads, dtype):
    for index, (function, *inputs) in enumerate(cases(dtype)):
        found = {}
        for isa in ISAS:
            with forced_isa(isa):
                for threads in (1, 2, 3):
                    num_threads(threads)
                    found[isa, threads] = results(function, *inputs)
        first = found[ISAS[0], 1]
        for name, other in found.items():
            text = f"case {index}, {name}: other bits than of {ISAS[0]} and one thread"
            torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True, msg=text)
