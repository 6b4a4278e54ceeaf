"""A small model of every family of transformers whose experts can be replaced."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch

from moe_ext.integrations.huggingface import register

transformers = pytest.importorskip("transformers", minversion="5.0")

VOCABULARY = 61
# Fields of any config to a small value.
SMALL = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_hidden_size": 16,
    # Experts.
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 0,
    "router_hidden_size": 8,
    # Attention.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_kpool": 2,
    "gated_norm_rank": 4,
    "rel_extent": 16,
    "d_rel": 4,
    "hc_mult": 2,
    "hc_lowrank": 8,
    # Layers that mix tokens in other ways.
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "short_conv_kernel_size": 2,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "n_groups": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
}
ONE_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
# An indexer beside the attention, which takes heads of one size.
INDEXED = {**ONE_SPARSE, "num_key_value_heads": 4, "head_dim": 4}
LOOP = {
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_gate_rank": 4,
    "n_layers_per_attn_res_block": 1,
}
LLAMA4 = {"intermediate_size_mlp": 24, "attention_chunk_size": 8, "moe_layers": [0, 1]}


def rope(*sections):
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": list(sections),
            "partial_rotary_factor": 2 * sum(sections) / 8,
        }
    }


# Family to the class of its model, and the options of its config that differ from SMALL.
FAMILIES = {
    "afmoe": ("AfmoeForCausalLM", {}),
    "aria": ("AriaTextForCausalLM", {}),
    "axk1": ("AXK1ForCausalLM", {}),
    "axk2": ("AXK2ForCausalLM", INDEXED),
    "bailing_hybrid": ("BailingHybridForCausalLM", {}),
    "beam": ("BeamForCausalLM", ONE_SPARSE),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    "deepseek_ocr2": ("DeepseekOcr2TextModel", ONE_SPARSE),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEXED),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {}),
    "diffusion_gemma": ("DiffusionGemmaEncoderTextModel", {}),
    "dots1": ("Dots1ForCausalLM", {}),
    "dots3_note": ("Dots3NoteForCausalLM", {**INDEXED, "layer_types": ["indexed_attention"] * 2}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextModel",
        {
            **rope(1, 1, 2),
            "moe_intermediate_size": [12, 8],
            "mlp_layer_types": ["sparse", "sparse"],
        },
    ),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "flint": ("FlintForCausalLM", {"mlp_only_layers": []}),
    "gemma4": ("Gemma4ForCausalLM", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm4v_moe": ("Glm4vMoeTextModel", rope(1, 1, 0)),
    "glm5_next": ("Glm5NextTextModel", {**INDEXED, "qk_rope_head_dim": 0, "head_dim": 0}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", INDEXED),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "hy_v3": ("HYV3ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {}),
    "hy_v4_vl": ("HYV4VLTextModel", {**INDEXED, **rope(1, 1, 0)}),
    "inkling": ("InklingForCausalLM", {}),
    "inkling2": ("Inkling2ForCausalLM", {}),
    # The second layer runs three times.
    "inkling2_loop": ("Inkling2LoopForCausalLM", LOOP),
    "jamba": ("JambaForCausalLM", {}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {**ONE_SPARSE, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "kolibri1": ("Kolibri1ForCausalLM", {}),
    "laguna": ("LagunaForCausalLM", {}),
    "lara_mini": ("LaraMiniForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["full_attention"] * 2}),
    "mellum": ("MellumForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
    "minimax": ("MiniMaxForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "mistral_large4": ("MistralLarge4TextModel", INDEXED),
    "mixtral": ("MixtralForCausalLM", {}),
    "muse_spark": ("MuseSparkTextModel", {}),
    "nemotron_h": ("NemotronHForCausalLM", {"layers_block_type": ["attention", "moe"]}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterModel", {}),
    "phimoe": ("PhimoeForCausalLM", {"router_jitter_noise": 0.5}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextModel", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextModel", {}),
    "qwen4_exp": ("Qwen4ExpForCausalLM", {}),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "unlimited_ocr": ("UnlimitedOcrTextModel", {}),
    "zaya": ("ZayaForCausalLM", {"num_experts_per_tok": 1}),
}
# Families with experts that transformers runs by code of their own alone.
OTHERS = {
    "dbrx": (
        "DbrxForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"rope_theta": 1e4}},
    ),
    "doge": ("DogeForCausalLM", {"is_moe": True, "num_experts": 16}),
    "jetmoe": ("JetMoeForCausalLM", {}),
    "llama4": ("Llama4ForCausalLM", LLAMA4),
    "longcat_flash": ("LongcatFlashForCausalLM", {}),
    "nllb_moe": ("NllbMoeForConditionalGeneration", {}),
    "step3p7": ("Step3p7TextModel", {}),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", {}),
}


def decorated_families():
    """Names of the families whose source uses the decorator."""
    folder = Path(transformers.__file__).parent / "models"
    decorator = re.compile("^@use_experts_implementation", re.MULTILINE)
    pages = sorted(folder.glob("*/modeling_*.py"))
    return {page.parent.name for page in pages if decorator.search(page.read_text())}


def build(family):
    """The model, with nothing in it that would hide a difference."""
    name, options = {**FAMILIES, **OTHERS}[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    cls = getattr(module, name)
    fields = {field.name for field in dataclasses.fields(cls.config_class)}
    small = {key: value for key, value in SMALL.items() if key in fields}
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**small, **options}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Zero biases would hide a bias that is left out; a zero router ties everywhere.
            if key.endswith("bias") or "gate.weight" in key or "router" in key:
                parameter.normal_(std=0.1)
            if ".experts." in key:
                parameter.mul_(10)  # or the residual stream hides what they do
        for key, buffer in model.named_buffers():
            if key.endswith("tid2eid"):  # the hashed experts of each token, all 0
                rows = torch.rand(len(buffer), SMALL["num_experts"]).argsort(1)
                buffer.copy_(rows[:, : buffer.shape[1]])
    return model


def spread_by_transformers(model, ep_mesh, tp_mesh):
    """The model as `DistributedConfig(ep_implementation="moe_ext")` spreads it over ranks."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    register()
    named = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    stars = {name: re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in named}
    # Some plans (Gemma) divide dense networks besides, for ranks that share a batch.
    ours = ("grouped_gemm", "ep_dispatch_experts")
    styles = {star: style for star, style in model.ep_plan.items() if style in ours}
    plan = {name: styles[star] for name, star in stars.items() if star in styles}
    assert set(plan.values()) == set(ours)
    return apply_expert_parallelism(model, ep_mesh, tp_mesh, plan, ep_implementation="moe_ext")
