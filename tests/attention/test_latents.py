"""Attention over latents against keys and values made of them, on ranks and in one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import TIGHT, reference, with_grads
from rank_checks import Checks
from torch.distributed.device_mesh import init_device_mesh

from moe_ext.attention import latent_ring_attention, shard_sequence
from moe_ext.distributed import count_traffic

BATCH, HEADS, LENGTH, LATENT, NOPE, ROPE, VALUE = 2, 6, 41, 10, 5, 4, 3
MASKS = {
    "causal": {"is_causal": True},
    "window": {"window": (5, 2)},
    "documents": {"is_causal": True, "cu_seqlens": (0, 9, 30, 41)},
}
LAYOUTS = ("zigzag", "contiguous", "striped")
SCHEMES = ("ring", "all_gather", "double_ring", "auto")
check = Checks()


def make_inputs(dtype=torch.float64):
    """q, latent, rope key, both up-projections, and a gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (BATCH, HEADS, LENGTH, NOPE + ROPE),
        (BATCH, LENGTH, LATENT),
        (BATCH, LENGTH, ROPE),
        (HEADS, NOPE, LATENT),
        (HEADS, VALUE, LATENT),
        (BATCH, HEADS, LENGTH, VALUE),
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def expanded(q, latent, rope_key, up_k, up_v, **masks):
    """The same by keys and values of all heads."""
    nope = torch.einsum("blc,hnc->bhln", latent, up_k)
    k = torch.cat([nope, rope_key[:, None].expand(-1, HEADS, -1, -1)], 3)
    return reference(q, k, torch.einsum("blc,hvc->bhlv", latent, up_v), **masks)[0]


def shards(inputs, **where):
    dims = (2, 1, 1, None, None, 2)
    return [
        x if dim is None else shard_sequence(x, dim=dim, **where)
        for x, dim in zip(inputs, dims, strict=True)
    ]


@pytest.mark.parametrize("name", MASKS)
def test_one_process_equals_expanded_keys(name):
    found = with_grads(latent_ring_attention, *make_inputs(), group=None, **MASKS[name])
    for one, other in zip(found, with_grads(expanded, *make_inputs(), **MASKS[name]), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_a_backward_pass_inside_autocast_has_the_same_bits():
    found = []
    for inside in (False, True):
        *inputs, grad = make_inputs(torch.float32)
        leaves = [x.requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            out = latent_ring_attention(*leaves, group=None)
            if inside:
                out.backward(grad)
        if not inside:
            out.backward(grad)
        found.append([x.grad for x in leaves])
    assert all(map(torch.equal, *found))


@check(*zip(itertools.cycle(SCHEMES), LAYOUTS * 4, list(MASKS) * 3 + ["causal"]))
def equals_expanded_keys_of_one_process(scheme, layout, name):
    masks, group = MASKS[name], dist.group.WORLD
    if scheme == "double_ring":
        group = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("r", "i"))
    where = {"group": group, "layout": layout, "cu_seqlens": masks.get("cu_seqlens")}
    parts = shards(make_inputs(), **where)
    found = with_grads(latent_ring_attention, *parts, **where | masks, scheme=scheme)
    for weight in found[4:]:
        dist.all_reduce(weight)
    out, *gradients = with_grads(expanded, *make_inputs(), **masks)
    expected = shards([*gradients, out], **where)
    for one, other in zip(found, [expected[-1], *expected[:-1]], strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@check((None,), ("int8",))
def the_latent_and_its_gradient_travel_alone(wire):
    num_ranks, group = dist.get_world_size(), dist.group.WORLD
    inputs = make_inputs(torch.float32)
    where = {"group": group, "layout": "contiguous"}
    with count_traffic() as counted:
        with_grads(latent_ring_attention, *shards(inputs, **where), **where, wire=wire)
    total = torch.tensor(counted.total_bytes)
    dist.all_reduce(total)
    width = 4 * (LATENT + ROPE) if wire is None else LATENT + 4 + ROPE + 4
    # Each position visits the other ranks twice, and so do the gradients once.
    assert total == BATCH * LENGTH * (num_ranks - 1) * (2 * width + 4 * (LATENT + ROPE))


@check()
def what_cannot_be_served_is_refused():
    where = {"group": dist.group.WORLD}
    q, latent, rope_key, up_k, up_v, _ = shards(make_inputs(), **where)
    with pytest.raises(ValueError, match="latent to be None for scheme 'ulysses'"):
        latent_ring_attention(q, latent, rope_key, up_k, up_v, scheme="ulysses", **where)
    odd = up_k[:, dist.get_rank() :]
    with pytest.raises(ValueError, match=r"up_k to be \[6, 5, 10\] .* on rank 1"):
        latent_ring_attention(q, latent, rope_key, odd, up_v, **where)


test_ranks = check.test(2, 3)


def test_deepseek_v3_of_transformers_has_the_same_numbers():
    transformers = pytest.importorskip("transformers")
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    seen = {}

    def capture(module, query, key, value, attention_mask, scaling, **kwargs):
        seen.update(q=query, rope=key[:, 0, :, -ROPE:], scale=scaling)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        seen["out"] = out
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("capture", capture)
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=12,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        attn_implementation="capture",
    )
    torch.manual_seed(0)
    module = deepseek.DeepseekV3Attention(config, layer_idx=0).double()
    module.kv_a_layernorm.register_forward_hook(lambda _m, _i, out: seen.update(latent=out))
    positions = torch.arange(LENGTH)[None]
    hidden = torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)(hidden, positions)
    module(hidden, position_embeddings=rotary, attention_mask=None)
    weight = module.kv_b_proj.weight
    up_k, up_v = weight.view(HEADS, NOPE + VALUE, LATENT).split([NOPE, VALUE], 1)
    found = latent_ring_attention(
        seen["q"],
        seen["latent"],
        seen["rope"],
        up_k,
        up_v,
        group=None,
        is_causal=True,
        scale=seen["scale"],
    )
    grad = torch.randn_like(found)
    wanted = (weight, seen["latent"], seen["q"])
    torch.testing.assert_close(found, seen["out"], **TIGHT)
    both = [
        torch.autograd.grad((x * grad).sum(), wanted, retain_graph=True)
        for x in (found, seen["out"])
    ]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
