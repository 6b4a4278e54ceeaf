"""`FlopCounterMode` counts the products of the operators as it counts those of torch."""

import re

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from moe_ext import MoELayer, ops
from moe_ext.planner.presets import RecurrentSpec

PRODUCTS = re.compile(r"mm|router_logits|attention_block|delta_rule|selective_scan|conv1d")
# Sums over rows.
WITHOUT = {"_grouped_mm_backward_bias"}


def count(step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def rand(*sizes, device="cpu"):
    return torch.rand(*sizes, device=device, requires_grad=True)


def test_every_operator_with_products_has_a_formula():
    names = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    due = {name for space, _, name in names if space == "moe_ext" and PRODUCTS.search(name)}
    found = {str(op).removeprefix("moe_ext.") for op in flop_registry if "moe_ext" in str(op)}
    assert found == due - WITHOUT and due > WITHOUT and len(found) > 15


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_a_layer_counts_as_its_products_in_torch(activation, device):
    T, D, width, E, K = 24, 16, 32, 4, 2
    layer = MoELayer(D, width, E, K, activation=activation, device=device)
    x = rand(T, D, device=device)
    gated = 1 + (activation == "swiglu")

    def products():
        for rows, to in [(rand(T, D), E), (rand(T * K, D), gated * width), (rand(T * K, width), D)]:
            F.linear(rows, rand(to, rows.shape[1])).sum().backward()

    assert count(lambda: layer(x).sum().backward()) == count(products) > 0


@pytest.mark.parametrize("value_dim", [16, 8])
def test_a_block_of_attention_counts_as_that_of_torch(value_dim):
    q, k, v = rand(2, 4, 20, 16), rand(2, 2, 12, 16), rand(2, 2, 12, value_dim)
    places = torch.arange(20), torch.arange(12)
    wide_k, wide_v = (x.detach().repeat_interleave(2, 1).requires_grad_() for x in (k, v))

    def ours():
        ops.attention_block(q, k, v, *places, causal=True)[0].sum().backward()

    def products():
        (torch.softmax(q @ wide_k.mT, -1) @ wide_v).sum().backward()

    # The backward pass computes the scores once more.
    again = 2 * 2 * 4 * 20 * 12 * 16
    assert count(ours) == count(products) + again


def test_a_masked_product_counts_as_a_whole_one():
    x, weight = torch.rand(6, 64), torch.rand(32, 64)
    bitmap = ops.pack_bits(torch.ones_like(weight)).view(32, 8)
    values = weight.flatten()
    assert count(lambda: ops.masked_mm(x, values, bitmap)) == 2 * 6 * 32 * 64


@pytest.mark.parametrize("has_beta", [False, True])
def test_a_delta_rule_counts_as_the_planner_does(has_beta):
    B, G, H, L, K, V = 2, 1, 3, 70, 8, 16
    rule = (rand(B, G, L, K), rand(B, G, L, K), rand(B, H, L, V), -rand(B, H, L))
    beta = rand(B, H, L) if has_beta else None
    state = torch.zeros(B, H, K, V)
    spec = RecurrentSpec(1, 1, 0, H, G, K, V, has_beta=has_beta)
    forward = B * L * spec.flops()
    assert count(lambda: ops.gated_delta_rule(*rule, beta, state)) == forward

    def train():
        ops.gated_delta_rule(*rule, beta, state)[0].sum().backward()

    assert count(train) == 3 * forward


def test_a_scan_counts_what_it_reads_of_states():
    B, H, L, K = 2, 6, 9, 4
    x, steps, rates = rand(B, H, L), rand(B, H, L), -rand(H, K)
    keys, state = rand(B, 1, L, K), torch.zeros(B, H, K)

    def train():
        ops.selective_scan(x, steps, rates, keys, keys, state)[0].sum().backward()

    assert count(train) == 3 * 2 * B * H * L * K


def test_a_convolution_counts_as_that_of_torch():
    x, weight = rand(2, 6, 9), rand(6, 4)

    def train():
        ops.causal_conv1d(x, weight, None, torch.zeros(2, 6, 3)).sum().backward()

    # Torch counts the gradient of a weight as if all channels met.
    forward = count(lambda: F.conv1d(F.pad(x, (3, 0)), weight[:, None], groups=6))
    assert count(train) == 3 * forward
