"""The models that tests of plans share."""

from moe_ext.planner import ModelSpec

# Sizes of a layer that simulations of thousands of placements can afford.
SMALL = ModelSpec(
    *(4, 64, 4, 96, 128),
    num_kv_heads=4,
    num_experts=8,
    top_k=2,
    num_moe_layers=4,
    gated=True,
    gated_experts=True,
)


def small_mixtral(**sizes):
    """A Mixtral that trains in milliseconds, with the same weights on every rank."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            **sizes,
        }
    )
    return transformers.MixtralForCausalLM(config)
