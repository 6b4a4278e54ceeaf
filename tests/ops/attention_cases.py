"""Blocks of attention that tests share."""

import torch

from moe_ext import ops

# Sums of up to 300 products in float32, and a softmax of scores of up to about 10: a few hundred
# units of 2^-24 of the largest number. Inputs of 16 bits are exact in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
# Half a unit in the last place, for gradients in the dtype of the inputs.
ROUNDING = {
    torch.float32: 0.0,
    torch.float64: 0.0,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def qkv(batch, heads, key_heads, num_queries, num_keys, dim, dim_v=None, dtype=torch.float32):
    q = torch.randn(batch, heads, num_queries, dim).to(dtype)
    k = torch.randn(batch, key_heads, num_keys, dim).to(dtype)
    v = torch.randn(batch, key_heads, num_keys, dim_v or dim).to(dtype)
    return q, k, v


def positions(num_queries, num_keys):
    """Neighbouring shards: the queries begin in the middle of the keys."""
    return torch.arange(num_queries) + num_keys // 2, torch.arange(num_keys)


def mask_options(name, batch, heads, q_positions, k_positions):
    """Keyword arguments of `attention_block` by the name of a mask."""
    length = int(max([*q_positions.tolist(), *k_positions.tolist(), 0])) + 1
    cu_seqlens = torch.tensor([0, length // 5, length // 5, length // 2, length])
    documents = {
        "q_documents": ops.document_ids(q_positions, cu_seqlens),
        "k_documents": ops.document_ids(k_positions, cu_seqlens),
    }
    generator = torch.Generator(q_positions.device).manual_seed(1)
    key_mask = torch.rand(batch, len(k_positions), generator=generator, device=q_positions.device)
    key_mask = key_mask < 0.7
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window_left": 37, "window_right": 5},
        "causal window": {"causal": True, "window_left": 40},
        "documents": documents,
        "causal documents": {"causal": True, **documents},
        "key mask": {"key_mask": key_mask},
        "alibi": {"alibi_slopes": slopes.float()},
        "softcap": {"softcap": 2.5, "scale": 1.0},
        "dropout": {"dropout_p": 0.3, "seed": 2**40 + 7, "batch_offset": 3, "head_offset": 5},
        "all": {
            "causal": True,
            "window_left": 90,
            "key_mask": key_mask,
            "alibi_slopes": slopes.float(),
            "softcap": 3.0,
            "dropout_p": 0.1,
            "seed": torch.tensor([5]),
            **documents,
        },
    }[name]


MASKS = [
    "none",
    "causal",
    "window",
    "causal window",
    "documents",
    "causal documents",
    "key mask",
    "alibi",
    "softcap",
    "dropout",
    "all",
]


def assert_close(actual, exact, *, dtype=torch.float32, rounded_to=None):
    """Within TOLERANCE of the largest finite number, plus a rounding to another dtype."""
    exact = exact.detach().double()
    actual = actual.detach()
    assert actual.shape == exact.shape
    assert actual.dtype == (rounded_to or dtype)
    finite = exact.isfinite()
    assert torch.equal(actual.double()[~finite], exact[~finite])
    bound = TOLERANCE[dtype] * max(1.0, float(exact[finite].abs().max())) if finite.any() else 0.0
    error = (actual.double() - exact)[finite].abs()
    bound = bound + ROUNDING[rounded_to or dtype] * exact[finite].abs()
    if rounded_to == torch.float16:
        bound = bound + 2.0**-24  # the last place of its smallest numbers
    assert (error <= bound).all(), float((error - bound).max())
