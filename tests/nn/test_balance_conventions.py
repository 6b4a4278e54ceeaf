"""The scale of the balance loss against the formulas of other projects; see docs/balance.md."""

import pytest
import torch
import torch.nn.functional as F

import moe_ext
from moe_ext import ops
from moe_ext.nn import Balance

E, T = 5, 40
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def ours(logits, top_k):
    gate = ops.topk_gate(logits, top_k)
    return ops.load_balance_loss(gate.score_sum, gate.num_tokens_per_expert, top_k)


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(T, E, dtype=torch.float64)


def test_switch(logits):
    # Fedus et al. 2021, eq. 4-6: N sum_i f_i P_i with f of the one expert chosen.
    probs = logits.softmax(-1)
    fraction = F.one_hot(probs.argmax(-1), E).double().mean(0)
    torch.testing.assert_close(ours(logits, 1), E * (fraction * probs.mean(0)).sum(), **TIGHT)


def test_gshard(logits):
    # Lepikhin et al. 2020, algorithm 1, line 13: (1/E) sum_e (c_e / S) m_e, c of first choices.
    probs = logits.softmax(-1)
    fraction = F.one_hot(probs.argmax(-1), E).double().mean(0)
    gshard = (fraction * probs.mean(0)).mean()
    torch.testing.assert_close(ours(logits, 1), E**2 * gshard, **TIGHT)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_deepspeed(logits, top_k):
    # topkgating: mean(me * ce) * E * E / k, with ce the mean of the mask of all k choices.
    probs = logits.softmax(-1)
    mask = F.one_hot(probs.topk(top_k).indices, E).sum(1).double()
    theirs = (probs.mean(0) * mask.mean(0)).mean() * E * E / top_k
    torch.testing.assert_close(ours(logits, top_k), theirs, **TIGHT)


def hugging_face(logits_of_layers, top_k):
    # load_balancing_loss_func: layers pooled, and the k choices summed, not averaged.
    probs = torch.cat(logits_of_layers).softmax(-1)
    chosen = F.one_hot(probs.topk(top_k).indices, E).double().mean(0)
    return E * (chosen * probs.mean(0)).sum()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_hugging_face(logits, top_k):
    theirs = hugging_face([logits], top_k)
    torch.testing.assert_close(top_k * ours(logits, top_k), theirs, **TIGHT)
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    original = modeling.load_balancing_loss_func((logits,), E, top_k)
    torch.testing.assert_close(top_k * ours(logits, top_k), original.double(), rtol=1e-6, atol=0)


def test_hugging_face_pools_the_layers(logits):
    # Two layers that send all tokens to one expert each, another one: pooled, they look even.
    skewed = [F.one_hot(torch.full((T,), e), E).double() * 50 for e in range(E)]
    pooled = hugging_face(skewed, 1)
    apart = torch.stack([ours(layer, 1) for layer in skewed]).mean()
    torch.testing.assert_close(pooled, torch.tensor(1.0, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(apart, torch.tensor(float(E), dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_megatron(logits, top_k):
    # switch_load_balancing_loss_func: sum(probs * counts) * E * coeff / (k * T^2).
    probs = logits.softmax(-1)
    counts = torch.bincount(probs.topk(top_k).indices.flatten(), minlength=E)
    theirs = (probs.sum(0) * counts).sum() * E / (top_k * T**2)
    torch.testing.assert_close(ours(logits, top_k), theirs, **TIGHT)


def test_megatron_sequences():
    # seq_aux_loss: B * E experts side by side, over B, which is the mean over sequences.
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(8, 6, E, 2, balance=Balance("sequence"), dtype=torch.float64)
    x = torch.randn(3, T, 8, dtype=torch.float64)
    layer(x)
    probs = (x @ layer.router.weight.T).softmax(-1)
    chosen = F.one_hot(probs.topk(2).indices, E).sum(2)
    theirs = (probs.sum(1) * chosen.sum(1)).sum() * E / (2 * T**2) / 3
    torch.testing.assert_close(layer.metrics["balance_loss"], theirs.detach(), **TIGHT)


def test_z_loss_of_st_moe(logits):
    # Zoph et al. 2022, eq. 5; Megatron's z_loss_func and Hugging Face's router_z_loss_func.
    theirs = torch.logsumexp(logits, dim=-1).square().mean()
    torch.testing.assert_close(ops.router_z_loss(logits), theirs, **TIGHT)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_balanced_load_is_one(top_k):
    # Token t prefers experts t, t + 1, ...: every expert is chosen as often as any other.
    order = (torch.arange(T)[:, None] + torch.arange(E)) % E
    logits = torch.zeros(T, E, dtype=torch.float64).scatter(
        1, order, torch.arange(E, 0, -1, dtype=torch.float64).expand(T, E)
    )
    one = torch.tensor(1.0, dtype=torch.float64)
    torch.testing.assert_close(ours(logits, top_k), one, **TIGHT)
