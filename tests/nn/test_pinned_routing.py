"""pinned_routing: a recomputation takes the routing of its forward pass, whatever happens to it."""

import copy
import functools

import pytest
import torch
from layer_oracle import assert_all_close, outcome
from test_routing_record import Model, drifted, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import reference
from moe_ext.nn import (
    CosineRouter,
    GShardRouter,
    NoisyTopKRouter,
    RouterOutput,
    RoutingRecord,
    SwitchRouter,
    TopKRouter,
    pinned_routing,
)


def pinned(function, *args):
    return checkpoint(function, *args, use_reentrant=False, context_fn=pinned_routing)


@pytest.mark.parametrize("router", ["softmax", "topk_softmax", "sigmoid"])
def test_nothing_changes_where_nothing_is_perturbed(router):
    model, x = Model(router=router), tokens()
    found = outcome(model, x, functools.partial(pinned, model))
    assert_all_close(found, outcome(model, x), rtol=0, atol=0)


class Noisy(TopKRouter):
    """Logits that are other ones in each pass: what a product of another library does, but more."""

    noise = 0.0

    def forward(self, x_TD, *, token_mask=None, **kwargs):
        weight = self.weight + self.noise * torch.randn_like(self.weight)
        logits = x_TD @ weight.T
        gate = moe_ext.ops.topk_gate(logits, self.top_k, token_mask=token_mask)
        return RouterOutput(logits, gate)


def test_a_recomputation_that_would_choose_others_takes_the_choice_of_the_forward_pass():
    # With one token as the loss and no weights of the router in play but through its choice, the
    # experts that get a gradient are those that the forward pass went to.
    layer = moe_ext.MoELayer(8, 6, 16, 1, router=Noisy(8, 16, 1), balance=0.0)
    layer.router.noise = 3.0
    flips = 0
    for _ in range(20):
        layer.zero_grad()
        x = torch.randn(40, 8, requires_grad=True)
        record = RoutingRecord()
        with record.recording(layer):
            y = pinned(layer, x)
        want = torch.bincount(record[0, 0, "(model)"].topk_idx.flatten().long(), minlength=16)
        y.sum().backward()
        assert torch.equal(layer.experts.down_proj.grad.flatten(1).any(dim=1), want > 0)
        assert torch.equal(layer.metrics["num_tokens_per_expert"], want)
        layer(x)
        flips += int((layer.metrics["num_tokens_per_expert"] != want).any())
    assert flips > 15


def test_gradients_are_those_of_the_forward_pass_where_weights_change_before_the_backward_pass():
    # The router's rows are permuted in between: the recomputation alone would send every token
    # elsewhere. With its logits permuted back at the recorded experts, the expert gradients of an
    # unweighted sum over experts depend on the choice alone.
    torch.manual_seed(0)
    model = Model(num_layers=1)
    x = tokens()
    moe = model.blocks[0].moe
    moe.balance_loss_coef = 0.0
    moe.router.top_k = 1  # renormalised: the weight is one, whatever the logits
    want = outcome(model, x)
    x.requires_grad_()
    names = [name for name, _ in model.named_parameters()]
    for pin in (True, False):
        model.zero_grad()
        x.grad = None
        run = pinned if pin else (lambda f, x: checkpoint(f, x, use_reentrant=False))
        before = moe.router.weight.detach().clone()
        loss = run(model, x).square().sum()
        with torch.no_grad():
            moe.router.weight.copy_(before.roll(1, dims=0))
        loss.backward()
        with torch.no_grad():
            moe.router.weight.copy_(before)
        got = [x.grad, *(p.grad for p in model.parameters())]
        same = [torch.allclose(g, w) for g, w in zip(got, want[1:], strict=True)]
        assert all(same) == pin, dict(zip(["x", *names], same, strict=True))


def test_nested_checkpoints_keep_the_outer_choice():
    layer = moe_ext.MoELayer(8, 6, 16, 1, router=Noisy(8, 16, 1), balance=0.0)
    layer.router.noise = 3.0
    x = torch.randn(40, 8, requires_grad=True)
    record = RoutingRecord()
    with record.recording(layer):
        y = pinned(lambda x: pinned(layer, x) * 2, x)
    want = torch.bincount(record[0, 0, "(model)"].topk_idx.flatten().long(), minlength=16)
    y.sum().backward()
    assert torch.equal(layer.experts.down_proj.grad.flatten(1).any(dim=1), want > 0)


def test_a_graph_that_is_kept_is_recomputed_twice():
    model, x = Model(), tokens()
    want = outcome(model, x)[1:]
    model.zero_grad()
    loss = pinned(model, x.requires_grad_()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    for twice, once in zip(got, want, strict=True):
        torch.testing.assert_close(twice, 2 * once)


def test_regions_with_several_layers_and_several_regions():
    model, x = Model(4), tokens()

    def run(x):
        x = pinned(lambda x: model.blocks[1](model.blocks[0](x)), x)
        return pinned(lambda x: model.blocks[3](model.blocks[2](x)), x)

    assert_all_close(outcome(model, x, run), outcome(model, x), rtol=0, atol=0)


def test_a_replayed_choice_is_pinned_after_the_replay_has_closed():
    model, x = Model(), tokens()
    other, record = drifted(model), RoutingRecord()
    with torch.no_grad(), record.recording(other):
        other(x)
    with record.replaying(model):
        want = outcome(model, x)

    def run(x):
        with record.replaying(model):
            return pinned(model, x)

    assert_all_close(outcome(model, x, run), want, rtol=0, atol=0)


def test_a_recomputation_that_runs_other_layers_is_refused():
    model, x = Model(2), tokens().requires_grad_()
    order = [0, 1]

    def run(x):
        for index in order:
            x = model.blocks[index](x)
        return x

    loss = pinned(run, x).sum()
    order.reverse()
    with pytest.raises(RuntimeError, match=r"^pinned_routing: .* got another one at layer 0 of 2"):
        loss.backward()
    # The sessions are closed: the layers work on.
    model(x).sum().backward()


class Own(nn.Module):
    """A router without with_choice; its offset turns the choice of every token round."""

    def __init__(self):
        super().__init__()
        self.sign = 1.0

    def forward(self, x_TD, *, token_mask=None):
        logits = self.sign * x_TD[:, :4]
        return RouterOutput(logits, moe_ext.ops.topk_gate(logits, 1, token_mask=token_mask))


def test_a_router_that_cannot_replay_must_choose_the_same_again():
    layer = moe_ext.MoELayer(4, 2, 4, 1, router=Own())
    x = torch.randn(6, 4, requires_grad=True)
    pinned(layer, x).sum().backward()
    loss = pinned(layer, x).sum()
    layer.router.sign = -1.0
    with pytest.raises(
        RuntimeError, match=r"router of layer 0 of the region.* got a Own that does"
    ):
        loss.backward()


def test_a_copied_model_does_not_share_a_tape():
    model = Model(1)
    twin, x = copy.deepcopy(model), tokens().requires_grad_()
    loss = pinned(model, x).sum()
    twin(x).sum().backward()
    loss.backward()


def test_a_replay_that_closes_before_the_recomputation_is_noticed():
    model, x = Model(), tokens().requires_grad_()
    record = RoutingRecord()
    with torch.no_grad(), record.recording(model):
        model(x)
    with record.replaying(model):
        loss = checkpoint(model, x, use_reentrant=False).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()


ROUTERS = {
    "switch": lambda: SwitchRouter(8, 6, jitter_eps=0.2, dtype=torch.float64),
    "gshard": lambda: GShardRouter(8, 6, dtype=torch.float64),
    "gshard_always": lambda: GShardRouter(8, 6, second_expert="always", dtype=torch.float64),
    "cosine": lambda: CosineRouter(8, 6, 2, dtype=torch.float64),
    "noisy": lambda: NoisyTopKRouter(8, 6, 2, dtype=torch.float64),
}


def random_layer(name):
    torch.manual_seed(2)
    layer = moe_ext.MoELayer(8, 6, 6, router=ROUTERS[name](), dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.router.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_that_draw_are_pinned(name):
    layer, x = random_layer(name), tokens(200)
    found = outcome(layer, x, functools.partial(pinned, layer))
    assert_all_close(found, outcome(layer, x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_weighs_its_own_choice_as_it_did(name):
    router = random_layer(name).router
    mask = torch.rand(200) > 0.2
    routed = router(tokens(200), token_mask=mask)
    if name == "gshard":
        assert ((routed.gate.topk_idx == -1).sum(dim=1) == 1).any()
    again = router.with_choice(routed, routed.gate.topk_idx)
    assert_all_close(again.gate, routed.gate, rtol=1e-12, atol=1e-13)
    if routed.balance is not None:
        assert_all_close(again.balance, routed.balance, rtol=1e-12, atol=1e-13)


def test_noisy_routing_is_replayed_with_other_weights_and_the_same_noise():
    router = random_layer("noisy").router
    x, mask = tokens(200), torch.rand(200) > 0.2
    choice = router(x, token_mask=mask).gate.topk_idx
    with torch.no_grad():
        router.weight.mul_(-1.0)
    routed = router(x, token_mask=mask)
    assert not torch.equal(routed.gate.topk_idx, choice)
    gate = router.with_choice(routed, choice).gate
    normal = reference.noisy_gating.routing_normal(router.rng_state, 200, 6, stream=2)
    deviation = nn.functional.softplus(x @ router.noise_weight.T) + router.noise_epsilon
    h = x @ router.weight.T + normal * deviation
    want = h.gather(1, choice.clamp(min=0)).softmax(dim=1) * mask[:, None]
    # The operator draws its normals in float32.
    torch.testing.assert_close(gate.topk_weights, want, rtol=1e-5, atol=1e-6)
    sums = torch.zeros(200, 6, dtype=want.dtype).scatter_add(1, choice.clamp(min=0), want).sum(0)
    torch.testing.assert_close(gate.score_sum, sums, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(gate.topk_weights[:, 0].sum(), list(router.parameters()))
    wanted = torch.autograd.grad(want[:, 0].sum(), list(router.parameters()))
    for got, grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-5)
