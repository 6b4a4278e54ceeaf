"""Operators that differentiate once say so, instead of leaving a term of the gradient out."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp

from moe_ext import ops

STATE = torch.tensor([1, 2, 3, 4])
IDX = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])


def attend(x, result=0):
    x_BHSD, positions_S = x.view(1, 1, 4, 4), torch.arange(4, device=x.device)
    return ops.attention_block(*[x_BHSD] * 3, positions_S, positions_S)[result]


def recur(x, beta):
    rows, decays = x.view(1, 1, 4, 4), x[:1, :4].view(1, 1, 4)
    return ops.gated_delta_rule(rows, rows, rows, decays, decays if beta else None, rows)[0]


FORMULAS = {
    "gated_delta_rule": lambda x: recur(x, True),
    "gated_delta_rule without beta": lambda x: recur(x, False),
    "selective_scan": lambda x: ops.selective_scan(
        x.view(1, 4, 4), x.view(1, 4, 4), x, x.view(1, 1, 4, 4), x.view(1, 1, 4, 4), x[None]
    )[0],
    "causal_conv1d": lambda x: ops.causal_conv1d(x[None], x[:, :3], x[0], x[None, :, :2]),
    "topk_gate": lambda x: ops.topk_gate(x, 2).topk_weights,
    "gate_weights": lambda x: ops.gate_weights(x, IDX.to(x.device)).topk_weights,
    "router_z_loss": lambda x: ops.router_z_loss(x),
    "load_balance_loss": lambda x: ops.load_balance_loss(x[0], STATE.to(x.device), 1),
    "expert_choice_gate": lambda x: ops.expert_choice_gate(x, 2).topk_weights,
    "sequence_load": lambda x: ops.sequence_load(x, IDX.to(x.device), 2).score_sum,
    "gshard_gate": lambda x: ops.gshard_gate(x, STATE.to(x.device)).topk_weights,
    "noisy_topk_gate": lambda x: ops.noisy_topk_gate(x, x, STATE.to(x.device), 2).load,
    "router_logits": lambda x: ops.router_logits(x, x),
    "unpermute_tokens": lambda x: ops.unpermute_tokens(
        *ops.permute_tokens(x, IDX.to(x.device), 4), x[:, :2]
    ),
    "attention_block": attend,
    "attention_block, its LSE": lambda x: attend(x, 1),
    "merge_attention": lambda x: ops.merge_attention(x, x[0], x * x, x[1])[0],
    "merge_attention, its LSE": lambda x: ops.merge_attention(x, x[0], x * x, x[1])[1],
    "merge_attention_sinks": lambda x: ops.merge_attention_sinks(
        x.view(1, 1, 4, 4), x[0].view(1, 1, 4), x[1, :1]
    )[0],
    "gated_activation": lambda x: ops.gated_activation(x),
    "gated_activation, weighted": lambda x: ops.gated_activation(
        x, slot_weights=x[0], slot_of_row=IDX[:, 0].to(x.device)
    ),
    "activation": lambda x: ops.activation(x, kind="silu"),
}
OFFSETS = torch.tensor([0, 1, 4])
# These may be differentiated twice.
TWICE = {
    "grouped_mm": lambda x: ops.grouped_mm(x, x.view(2, 2, 4), OFFSETS.to(x.device)),
    "permute_tokens": lambda x: ops.permute_tokens(x, IDX.to(x.device), 4)[0] ** 2,
    "unpermute_tokens of equal weights": lambda x: ops.unpermute_tokens(
        *ops.permute_tokens(x * x, IDX.to(x.device), 4)
    ),
    "routing_jitter": lambda x: ops.routing_jitter(x, STATE.to(x.device), 0.1) ** 2,
}
EVERY = {**FORMULAS, **TWICE}
# These have tests of their own.
ELSEWHERE = {"ring_attention"}


def test_each_operator_with_a_gradient_is_here():
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    recorded = {
        name.partition("::")[2]
        for name in names
        if name.startswith("moe_ext::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd")
    }
    public = {name for name in recorded if not name.startswith("_")}
    here = {name.partition(" ")[0].strip(",") for name in EVERY}
    assert public <= here | ELSEWHERE


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_gradients_by_torch_func(device, name):
    """Refused, or right: the outer transform sees the calls of a backward pass alone."""
    x = torch.linspace(-1, 1, 16, device=device, dtype=torch.float32).sin().view(4, 4)

    def loss(x):
        return EVERY[name](x).square().sum()

    def penalty(x):
        return grad(loss)(x).square().sum()

    if name in FORMULAS:
        with pytest.raises(RuntimeError, match="expected the result to be differentiated once"):
            grad(penalty)(x)
        return
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (wanted,) = torch.autograd.grad(first.square().sum(), leaf)
    try:
        found = grad(penalty)(x)
    except RuntimeError as error:  # formulas in Python are refused, whatever they could do
        assert "expected the result to be differentiated once" in str(error)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", EVERY)
def test_tangents_of_gradients_are_refused(device, name):
    """They would be left out: no operator has a formula of forward mode."""
    x = torch.linspace(-1, 1, 16, device=device).sin().view(4, 4).requires_grad_()
    y = EVERY[name](x)
    text = "expected reverse-mode gradients alone, got a tangent"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
        dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        torch.autograd.grad(y, x, dual, retain_graph=True)
    y, pull = vjp(EVERY[name], x.detach())
    with pytest.raises(NotImplementedError, match=text):
        jvp(lambda v: pull(v)[0], (torch.ones_like(y),), (torch.ones_like(y),))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_penalty_on_the_gradient_is_refused(device, name):
    x = torch.linspace(-1, 1, 16, device=device).sin().view(4, 4).requires_grad_()
    loss = FORMULAS[name](x).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    # By way of the loss there is a path to x that the refused one could hide behind.
    with pytest.raises(RuntimeError, match=r"expected the result to be differentiated once"):
        torch.autograd.grad(loss + grad.square().sum(), x)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_graph_of_the_gradient_changes_no_number(device, name):
    x = torch.linspace(-1, 1, 16, device=device).sin().view(4, 4).requires_grad_()
    grads = [
        torch.autograd.grad(FORMULAS[name](x).square().sum(), x, create_graph=create_graph)[0]
        for create_graph in (False, True)
    ]
    assert torch.equal(grads[0], grads[1])
