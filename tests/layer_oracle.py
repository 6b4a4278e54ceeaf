"""The layer as loops over tokens, the oracle of the layer tests."""

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x) ** 2,
}


def outcome(layer, x, run=None, **given):
    """Output of a step, and gradients of the tokens and of all parameters."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = (run or layer)(x, **given)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


def assert_all_close(found, wanted, **tolerance):
    """As `torch.testing.assert_close`, but a gradient of one that the other lacks is an error."""
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


def expert_output(experts, index, x_D):
    """One token through one expert of a GroupedExperts."""
    act = ACTIVATIONS[experts.activation]
    name = "gate_up_proj" if experts.gated else "up_proj"
    up = getattr(experts, name)[index] @ x_D
    if experts.down_proj_bias is not None:
        up = up + getattr(experts, f"{name}_bias")[index]
    if experts.gated:
        gate, value = up.chunk(2)
        hidden = act(gate) * value
    else:
        hidden = act(up)
    out = experts.down_proj[index] @ hidden
    if experts.down_proj_bias is not None:
        out = out + experts.down_proj_bias[index]
    return out


def layer_output(layer, x_TD, mask=None, capacity=None):
    """(y, balance loss, z loss) of a softmax MoELayer, and the number of rows it drops."""
    logits = x_TD @ layer.router.weight.T
    scores = logits.softmax(-1)
    num_tokens, num_experts = logits.shape
    real = torch.ones(num_tokens, dtype=torch.bool) if mask is None else mask
    used = [0] * num_experts
    counts = torch.zeros(num_experts, dtype=logits.dtype)
    dropped = 0
    rows = []
    for t in range(num_tokens):
        y = torch.zeros_like(x_TD[t])
        if real[t]:
            chosen = scores[t].topk(layer.top_k).indices.tolist()
            total = scores[t][chosen].sum() if layer.top_k > 1 else 1.0
            for e in chosen:
                counts[e] += 1
                used[e] += 1
                if capacity is not None and used[e] > capacity:
                    dropped += 1
                    continue
                y = y + scores[t, e] / total * expert_output(layer.experts, e, x_TD[t])
        if layer.shared_expert is not None:
            y = y + layer.shared_expert(x_TD[t])
        rows.append(y)
    num_real = int(real.sum())
    fraction = counts / max(num_real * layer.top_k, 1)
    probability = scores[real].sum(0) / max(num_real, 1)
    balance = num_experts * (fraction * probability).sum()
    z = (logits[real].logsumexp(-1) ** 2).sum() / max(num_real, 1)
    y_TD = torch.stack(rows) if rows else torch.zeros_like(x_TD)
    return y_TD, balance, z, dropped
