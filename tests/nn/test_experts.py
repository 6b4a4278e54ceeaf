import copy

import pytest
import torch
import torch.nn.functional as F

import moe_ext
from moe_ext.nn import ClampedSwiGLU, GroupedExperts, GShardRouter

OFFSETS = torch.tensor([0, 4, 4, 9])  # one expert without rows, and two rows of no expert
N, D, FFN, E = 11, 5, 6, 3


def clamped(gate, up, alpha=1.5, limit=0.4):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


# What the experts are told, and the function of gate and up (or of the one half) it stands for.
ACTIVATIONS = {
    "swiglu": ({"activation": "swiglu"}, lambda g, u: F.silu(g) * u),
    "geglu_tanh": ({"activation": "geglu_tanh"}, lambda g, u: F.gelu(g, approximate="tanh") * u),
    "gated silu": ({"activation": "silu", "gated": True}, lambda g, u: F.silu(g) * u),
    "gated tanh": ({"activation": "tanh", "gated": True}, lambda g, u: torch.tanh(g) * u),
    "gated relu_squared": (
        {"activation": "relu_squared", "gated": True},
        lambda g, u: F.relu(g).square() * u,
    ),
    "gated function": ({"activation": F.mish, "gated": True}, lambda g, u: F.mish(g) * u),
    "gated module": ({"activation": torch.nn.SELU(), "gated": True}, lambda g, u: F.selu(g) * u),
    "clamped": ({"activation": ClampedSwiGLU(1.5, 0.4)}, clamped),
    "gelu": ({"activation": "gelu"}, F.gelu),
    "softplus": ({"activation": "softplus"}, F.softplus),
    "function": ({"activation": torch.sin}, torch.sin),
}


def one_by_one(experts, x, function):
    """Each expert as two linear layers, on its rows."""
    two = experts.gated
    up_w, up_b = (getattr(experts, n, None) for n in (experts._up_name, f"{experts._up_name}_bias"))
    outs = []
    for e in range(E):
        rows = x[OFFSETS[e] : OFFSETS[e + 1]]
        turn = (lambda w: w.t()) if experts.transposed else (lambda w: w)
        h = F.linear(rows, turn(up_w[e]), None if up_b is None else up_b[e])
        if two and experts.layout == "interleaved":
            h = function(h[:, 0::2], h[:, 1::2])
        elif two:
            h = function(h[:, :FFN], h[:, FFN:])
        else:
            h = function(h)
        bias = experts.down_proj_bias
        out = F.linear(h, turn(experts.down_proj[e]), None if bias is None else bias[e])
        outs.append(out if experts.post_expert_norm is None else experts.post_expert_norm(out))
    return torch.cat(outs)


@pytest.mark.parametrize("post_norm", [False, True], ids=["", "post norm"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_each_expert_by_itself(name, bias, layout, transposed, post_norm):
    options, function = ACTIVATIONS[name]
    torch.manual_seed(0)
    experts = GroupedExperts(
        E, D, FFN, **options, bias=bias, layout=layout, transposed=transposed,
        post_norm=torch.nn.RMSNorm(D, eps=1e-6) if post_norm else None, dtype=torch.float64,
    ).double()  # fmt: skip
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    got = experts(x, OFFSETS)
    assert not got[9:].any()
    inputs = [x, *experts.parameters()]
    grad = torch.randn_like(got)
    grads = torch.autograd.grad(got, inputs, grad)
    want = one_by_one(experts, x, function)
    torch.testing.assert_close(got[:9], want)
    for a, b in zip(grads, torch.autograd.grad(want, inputs, grad[:9]), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_of_a_transposed_weight_is_stored_as_the_weight_is():
    experts = GroupedExperts(E, D, FFN, transposed=True)
    assert experts.gate_up_proj.shape == (E, D, 2 * FFN)
    assert experts.down_proj.shape == (E, FFN, D)
    experts(torch.randn(N, D), OFFSETS).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_clamped_gate(layout):
    activation = ClampedSwiGLU(1.3, 1.0)
    x = 2 * torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    halves = (x[:, ::2], x[:, 1::2]) if layout == "interleaved" else x.chunk(2, dim=1)
    torch.testing.assert_close(activation(x, layout), clamped(*halves, 1.3, 1.0))
    assert torch.autograd.gradcheck(lambda x: activation(x, layout), (x,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        activation(x, layout)
    assert len(kept) == 1
    assert kept[0].data_ptr() == x.data_ptr()
    compiled = torch.compile(activation, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, layout), activation(x, layout))
    (grad,) = torch.autograd.grad(activation(x, layout).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="got a second derivative"):
        grad.sum().backward()


def test_known_kinds_run_fused(monkeypatch):
    kinds = []
    monkeypatch.setattr(
        moe_ext.ops,
        "gated_activation",
        lambda x, *, kind, layout, **slots: kinds.append((kind, layout)) or x,
    )
    for name, layout in (("silu", "concatenated"), ("gelu", "interleaved")):
        experts = GroupedExperts(E, D, FFN, activation=name, gated=True, layout=layout)
        with pytest.raises(RuntimeError, match="columns of x"):
            experts(torch.randn(N, D), OFFSETS)
    assert kinds == [("swiglu", "concatenated"), ("geglu", "interleaved")]


def test_parameters_of_an_activation_are_trained():
    experts = GroupedExperts(E, D, FFN, activation=torch.nn.PReLU())
    assert "activation.weight" in dict(experts.named_parameters())
    experts(torch.randn(N, D), OFFSETS).sum().backward()
    assert experts.activation.weight.grad is not None
    assert copy.deepcopy(experts).activation is not experts.activation


def test_representation():
    text = repr(GroupedExperts(E, D, FFN, layout="interleaved", transposed=True, bias=True))
    for part in ("activation='swiglu'", "bias=True", "layout='interleaved'", "transposed=True"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"activation": "swish"},
            ValueError,
            r"expected activation to be one of swiglu, .*'swish'",
        ),
        ({"activation": 3}, TypeError, r"expected activation to be a name or callable, got 3"),
        (
            {"activation": "reglu", "gated": False},
            ValueError,
            r"expected gated to be True or None for activation='reglu', got False",
        ),
        (
            {"activation": ClampedSwiGLU(), "gated": False},
            ValueError,
            r"expected gated to be True or None for ClampedSwiGLU",
        ),
        ({"layout": "mixed"}, ValueError, r"expected layout to be one of .* got 'mixed'"),
    ],
)
def test_errors(options, error, text):
    with pytest.raises(error, match="GroupedExperts: " + text):
        GroupedExperts(E, D, FFN, **options)


def test_shared_parameters_are_refused_over_ranks(monkeypatch):
    monkeypatch.setattr("moe_ext.nn.experts.group_size", lambda group: 2)
    with pytest.raises(ValueError, match=r"expected post_norm to have no parameters"):
        GroupedExperts(4, D, FFN, post_norm=torch.nn.RMSNorm(D))
    with pytest.raises(ValueError, match=r"expected activation to have no parameters"):
        GroupedExperts(4, D, FFN, activation=torch.nn.PReLU())


def test_own_experts_get_ends_where_every_row_has_an_expert(monkeypatch):
    x = torch.randn(12, D)

    def told(on_gpu=True, **kwargs):
        """The result, and what the experts were told of their rows."""
        monkeypatch.setattr("moe_ext.nn.parts.wants_ends", lambda rows: on_gpu)
        mask = kwargs.pop("token_mask", None)
        torch.manual_seed(0)
        layer, seen = moe_ext.MoELayer(D, FFN, E, 2, **kwargs), []
        layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        return layer(x, token_mask=mask), seen[0]

    y, ends = told()
    assert ends.dtype == torch.int32 and ends.shape == (E,) and ends[-1] == 24
    expected, offsets = told(on_gpu=False)
    assert torch.equal(y, expected) and torch.equal(offsets[1:], ends.long())

    class Own(GroupedExperts):
        def forward(self, rows_ND, expert_offsets):
            return super().forward(rows_ND, expert_offsets)

    # Rows may be of no expert; or experts of the caller's own know of offsets alone.
    for options in (
        {"token_mask": torch.arange(12) > 2},
        {"capacity": 0.5},
        {"router": GShardRouter(D, E)},
        {"experts": Own(E, D, FFN)},
    ):
        assert told(**options)[1].dtype == torch.int64
