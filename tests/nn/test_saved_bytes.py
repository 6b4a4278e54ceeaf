"""The bytes that a layer keeps for its backward pass, against the sum in docs/design.md.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N rows.
"""

import pytest
import torch

import moe_ext
from moe_ext.ops.grouped_gemm import row_alignment

D, F, E, K = 16, 24, 8, 2


def saved_bytes(layer, x, token_mask=None):
    """Bytes of the distinct storages that autograd keeps, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = []  # held, so that no address is used twice

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x.clone().requires_grad_(), token_mask=token_mask)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert output.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def expected_bytes(num_tokens, dtype, options, has_mask, top_k=K):
    """The formula of docs/design.md."""
    s, a = dtype.itemsize, max(4, dtype.itemsize)
    gated = options.get("activation", "swiglu").endswith("glu")
    up = 2 * F if gated else F
    num_slots = num_tokens * top_k
    factor = options.get("capacity")
    kept = num_slots if factor is None else min(num_slots, E * -(-int(num_slots * factor) // E))
    align = row_alignment(torch.empty(0, dtype=dtype), num_slots, E)
    num_rows = kept + E * (align - 1)
    # Of the down projection's results only where they are weighted behind it.
    down = 0 if gated and not options.get("bias") else D
    total = num_rows * (D + up + F + down) * s + num_tokens * D * s + num_tokens * E * a
    total += num_slots * (8 + 8 + a) + 8 * num_rows + 8 * (E + 1)
    balance = moe_ext.nn.Balance.of("", options.get("balance"))
    if balance.coef:
        total += E * (8 + a)
    if balance.z_coef and has_mask:
        total += num_tokens
    shared = options.get("shared_expert", 0)
    if has_mask:
        total += (2 if shared else 1) * num_tokens * D * (s + 1)
    return total + num_tokens * (3 if gated else 2) * shared * s


@pytest.mark.parametrize("num_tokens", [1, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "silu"},
        {"bias": True, "router": "sigmoid"},
        {"shared_expert": 40},
        {"shared_expert": 40, "activation": "relu"},
        {"capacity": 0.5},
        {"balance": 0.0},
        {"balance": moe_ext.nn.Balance(z_coef=1e-3)},
    ],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("has_mask", [False, True], ids=["", "masked"])
def test_layer_keeps_what_the_formula_says(num_tokens, dtype, options, has_mask):
    layer = moe_ext.MoELayer(D, F, E, K, dtype=dtype, **options)
    x = torch.randn(num_tokens, D, dtype=dtype)
    mask = torch.arange(num_tokens) % 3 != 1 if has_mask else None
    expected = expected_bytes(num_tokens, dtype, options, has_mask)
    assert saved_bytes(layer, x, mask) == expected


def test_one_choice_a_token_keeps_half_the_rows():
    layer = moe_ext.MoELayer(D, F, E, 1)
    expected = expected_bytes(64, torch.float32, {}, has_mask=False, top_k=1)
    assert saved_bytes(layer, torch.randn(64, D)) == expected


def test_the_count_sees_a_tensor_that_is_kept_beside():
    class Keeps(torch.nn.Module):
        def forward(self, x, token_mask=None):
            return (x * 1.0).exp()

    assert saved_bytes(Keeps(), torch.randn(64, D)) == 64 * D * 4
