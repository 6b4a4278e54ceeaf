"""Routing of other libraries, token by token: the formulas that the tests compare with.

Shapes: T tokens, D model, E experts, K top-k.
"""

import torch

# Sums of float64 in another order.
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def serve(idx, num_experts, room, order):
    """Which slots find room: experts serve the slots (t, k) of `order` until they are full."""
    room = [room] * num_experts if isinstance(room, int) else list(room)
    kept = torch.zeros_like(idx, dtype=torch.bool)
    for t, k in order:
        expert = int(idx[t, k])
        if expert >= 0 and room[expert] > 0:
            room[expert] -= 1
            kept[t, k] = True
    return kept


def by_token(idx):
    return [(t, k) for t in range(idx.shape[0]) for k in range(idx.shape[1])]


def by_choice(idx):
    return [(t, k) for k in range(idx.shape[1]) for t in range(idx.shape[0])]


def best_first(scores):
    """Indices of the experts of every token, the best first; the lower one of a tie."""
    return scores.argsort(dim=1, descending=True, stable=True)


def combine(x, weights, idx, kept, experts):
    """`y[t] = sum_k w[t, k] * experts[idx[t, k]](x[t])` over the slots that are kept."""
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[t])
        for k in range(idx.shape[1]):
            if kept[t, k]:
                row = row + weights[t, k] * experts[int(idx[t, k])](x[t][None])[0]
        rows.append(row)
    return torch.stack(rows)


def gshard_loss(scores, first):
    """E times the sum over experts of the share of first choices and the mean score."""
    num_tokens, num_experts = scores.shape
    counts = torch.tensor([int((first == e).sum()) for e in range(num_experts)]).to(scores)
    return num_experts * (counts / num_tokens * scores.mean(0)).sum()


def gradients(loss, module, x):
    """Gradients of x and of all parameters by name; zero where there is none."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, [x, *named.values()], allow_unused=True)
    pairs = zip(["x", *named], [x, *named.values()], found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in pairs}


def assert_same_gradients(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name, **tolerance)


def trained(module, upstream, x):
    """Results of a layer, loss included, and gradients; by the same random numbers each time."""
    torch.manual_seed(5)
    y = module(x)
    y, loss, *rest = y if isinstance(y, tuple) else (y, module.l_aux)
    return [y, loss, *rest], gradients((y * upstream).sum() + loss, module, x)


def assert_trains_alike(found, expected):
    """Results of `trained` of two libraries: float32 sums are in another order."""
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    assert_same_gradients(found[1], expected[1], **tolerance)


def assert_trains_as(layer, x, found, expected):
    """Outputs, losses, and the gradients of both are those of the formula; pairs of the two."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    upstream = torch.randn_like(found[0])
    assert_same_gradients(
        *(gradients((y * upstream).sum() + loss, layer, x) for y, loss in (found, expected)),
        **TIGHT,
    )
