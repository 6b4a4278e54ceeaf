"""Small models of every family that can be replaced, and what the tests measure on them."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from rank_checks import full

import moe_ext
from moe_ext.attention.huggingface import prepare

transformers = pytest.importorskip("transformers", minversion="5.0")

# Eager sums each token's K expert outputs by adding in the order of the experts, and weight
# gradients in another order than a grouped product: differences of a few roundings of float32
# (6e-8) on the largest element of a tensor, which four layers of norms and softmax multiply by
# about ten.
RELATIVE = 1e-5

VOCABULARY = 61
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "norm_topk_prob": True,
}
# Family to the prefix of its classes and the options of its config; each has two MoE blocks.
FAMILIES = {
    "mixtral": ("Mixtral", {"intermediate_size": 20, "num_local_experts": 6}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 16,
            "num_experts": 6,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 12,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "gpt_oss": (
        "GptOss",
        {
            "intermediate_size": 20,
            "num_local_experts": 6,
            "head_dim": 8,
            # Small weights never reach the limit of 7.
            "swiglu_limit": 0.02,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 12, "num_experts": 6}),
    "phimoe": (
        "Phimoe",
        {
            "intermediate_size": 20,
            "num_local_experts": 6,
            # Small logits lie within the default of 0.01, and all gradients of the router vanish.
            "router_jitter_noise": 0.5,
        },
    ),
}
NUM_BLOCKS = 2
_SIZES = {"intermediate_size": 24, "head_dim": 8}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# Families without experts.
DENSE = {
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", {**_SIZES, "sliding_window": 6}),
    "gemma2": (
        "Gemma2",
        {**_SIZES, **SLIDING, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5},
    ),
}

families = pytest.mark.parametrize("family", FAMILIES)


def build(family, **kwargs):
    prefix, options = {**FAMILIES, **DENSE}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **options, **kwargs})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Zero biases would hide a bias that is left out; a zero router ties everywhere.
            if name.endswith("bias") or "gate.weight" in name or "router" in name:
                parameter.normal_(std=0.1)
    return model


def make_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 19), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def mean_of_ranks(model, batches):
    """Gradients of the mean of the ranks' losses, as one process computes it, and their logits."""
    model.set_experts_implementation("eager")
    logits = []
    for batch in batches:
        output = model(**batch)
        (output.loss / len(batches)).backward()
        logits.append(output.logits.detach())
    return model, logits


def run(model, batch, seed=5, **kwargs):
    """Output and gradients of one pass; the seed is for routers that draw."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(**batch, **kwargs)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_near(got, want, relative=RELATIVE):
    got, want = full(got.detach()), full(want.detach())
    torch.testing.assert_close(got, want, rtol=0, atol=relative * float(want.abs().max()))


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_near_each(got, want):
    """Gradients by name, such as those of a replaced model and those of eager."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert_near(got[name], gradient)


def assert_same_state(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def spread(model, group=None, **options):
    """The model, with experts over the ranks of a group, by default of all."""
    group = dist.group.WORLD if group is None else group
    assert moe_ext.replace(model, ep_group=group, **options) == NUM_BLOCKS
    return model


def assert_trains_as(model, whole, batch, logits):
    """Logits, gradients and state are those of one process, which has the mean of gradients."""
    output = model(**batch)
    assert_near(output.logits, logits)
    output.loss.backward()
    moe_ext.distributed.sync_gradients(model)
    assert_near_each(gradients_of(model), gradients_of(whole))
    assert_same_state(moe_ext.distributed.full_state_dict(model), whole.state_dict())


def by_one_rank(function):
    """A function that one rank calls, another each time; all get what it returns or raises."""
    turns = itertools.count()

    @functools.wraps(function)
    def call(*args, **kwargs):
        turn, found = next(turns) % dist.get_world_size(), [None]
        if dist.get_rank() == turn:
            try:
                found = [function(*args, **kwargs)]
            except Exception as error:
                found = [error]
        dist.broadcast_object_list(found, turn)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return call


_probe = by_one_rank(prepare.probe)


@contextlib.contextmanager
def one_probe():
    """Has one rank run a model on a few tokens: all would find the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "probe", _probe)
        yield
