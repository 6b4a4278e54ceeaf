"""Models that take whole batches and share their sequences, and models that are refused.

The table of docs/long_models.md is made from the names here: run this file to write it.
"""

import copy
import inspect
import itertools
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_models import by_one_rank, one_probe, transformers
from rank_checks import Checks, full
from torch.nn.attention.flex_attention import create_block_mask

import moe_ext
from moe_ext.attention import group_sampler, prepare_model, shard_sequence
from moe_ext.attention.huggingface.interface import CACHES
from moe_ext.attention.huggingface.probe import Traits, probe
from moe_ext.integrations.huggingface import register_ring_attention

PAGE = Path(__file__).resolve().parents[3] / "docs" / "long_models.md"
VOCABULARY = 61
# Sizes by the names of all families; each config takes those that it knows.
SIZES = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 12),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "num_ssm_heads", "mamba_expand"), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_d_ssm", "mamba_d_state", "state_size"), 32),
    "head_dim": 8,
    "rotary_dim": 4,
    "n_groups": 1,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
WINDOW = {"sliding_window": 5}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
KIMI = {
    **dict.fromkeys(("linear_head_dim", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), 4),
    "q_lora_rank": 16,
}
# Family to options of its config; "model_type/mlm" is a masked language model.
SERVED = {
    "bert": {"is_decoder": True},
    "bert/mlm": {},
    "bailing_hybrid": {
        **HYBRID,
        **KIMI,
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": 2,
        "topk_group": 1,
    },
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere2": WINDOW,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "distilbert/mlm": {},
    "esm/mlm": {"position_embedding_type": "rotary"},
    "eurobert/mlm": {},
    "falcon_h1": {"mamba_d_ssm": 64},
    "falcon_mamba": {},
    "gemma2": {**WINDOW, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5},
    "gemma3_text": WINDOW,
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": WINDOW,
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {**HYBRID, **KIMI, "mlp_layer_types": ["dense", "sparse"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": {"attention_chunk_size": 8, "no_rope_layers": [1, 0]},
    "mamba": {},
    "mamba2": {"head_dim": 32, "num_heads": 2},
    "minimax": {**HYBRID, "head_dim": 8, "block_size": 7},
    "ministral3": {},
    "mistral": WINDOW,
    "mixtral": {},
    "modernbert-decoder": {},
    "modernbert/mlm": {"local_attention": 8},
    "nemotron_h": {"mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 8},
    "olmo2": {},
    "olmo_hybrid": HYBRID,
    "olmoe": {},
    "opt": {"do_layer_norm_before": True},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_moe": {},
    "qwen3_next": HYBRID,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 5},
    "roberta": {"is_decoder": True},
    "roberta/mlm": {},
    "smollm3": {},
    "starcoder2": {},
    "xlm-roberta/mlm": {},
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "n_mamba_heads": 2,
        "num_mem_blocks": 1,
    },
}
# Reason by which a model is refused, to a part of the message and the families.
MIXED = "tokens mixed in "
REFUSED = {
    "recurrences and mixtures of other kinds": (
        MIXED,
        {
            "fnet/mlm": {},
            "rwkv": {},
            "xlstm": {},
        },
    ),
    "no attention by name": (
        MIXED,
        {
            "bloom": {},
            "deberta-v2/mlm": {},
            "falcon": {},
            "gpt_neo": {"attention_types": [[["global"], 2]]},
            "mpt": {},
            "xglm": {},
        },
    ),
    "masks of other kinds": (
        "expected the mask of the model to be|keys to be as many as|RingMask",
        {
            "deepseek_v4": {
                "max_position_embeddings": 512,
                "layer_types": ["heavily_compressed_attention"] * 2,
            },
            "glm_moe_dsa": {},
        },
    ),
    "positions of its own": (
        "take its positions from position_ids alone",
        {"bart": {}, "marian": {}},
    ),
    "two sequences": ("have one sequence", {"t5/mlm": {}}),
}
# One family of each recurrence, in cases of test_hybrid_models.py.
RECURRENCES = (
    *("bamba", "jamba", "kimi_linear", "lfm2", "minimax", "qwen3_next", "recurrent_gemma"),
)
RECOMPUTED = (
    *("gpt_bigcode", "qwen3_next", "lfm2", "bamba", "nemotron_h", "zamba"),
    *("minimax", "recurrent_gemma"),
)
check = Checks()


def make(family, *, seed=0, **kwargs):
    kind, _, head = family.partition("/")
    config_class = type(transformers.AutoConfig.for_model(kind))
    default = config_class()
    names = {*inspect.signature(config_class.__init__).parameters, *vars(default)}
    names |= {*getattr(config_class, "attribute_map", {})}
    config = config_class(**{**{k: v for k, v in SIZES.items() if k in names}, **kwargs})
    torch.manual_seed(seed)
    auto = transformers.AutoModelForMaskedLM if head else transformers.AutoModelForCausalLM
    if kind == "t5":
        auto = transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Scores of small weights are all alike: no mask and no position would be seen.
            scores = any(part in name for part in ("q_proj", "k_proj", "query", "key"))
            # Scores of RecurrentGemma differ; larger weights put its own float32 off by 5e-5.
            if scores and kind != "recurrent_gemma":
                parameter.mul_(20)
    return model.eval()


def group():
    return dist.group.WORLD


def prepared(family, ranks, **options):
    model = make(family, **SERVED[family])
    prepare_model(model, group=ranks, **options)
    return model


def make_batch(kind="padded"):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (1 if kind == "packed" else 2, 23), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 17:] = 0
        batch["labels"][1, 17:] = -100
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 1, 13)])[None]
    return batch


def one_process(model, kind="padded"):
    """Loss with a backward pass; documents one by one, which some families do not keep apart."""
    batch, count = make_batch(kind), {}
    parts = [batch]
    if kind == "packed":
        parts = [{"input_ids": x, "labels": x} for x in batch["input_ids"].split((9, 1, 13), 1)]
        count["num_items_in_batch"] = sum(part["labels"].shape[1] - 1 for part in parts)
    loss = sum(model(**part, use_cache=False, **count).loss for part in parts)
    loss.backward()
    return loss.detach()


@by_one_rank
def _loss_and_gradients(whole, kind):
    """As numpy's, which are pickled whatever torch calls its dtypes."""
    loss = one_process(whole, kind)
    return [x if x is None else x.numpy() for x in (loss, *(p.grad for p in whole.parameters()))]


def one_process_for_all(whole, kind="padded"):
    """Loss of `one_process` on one of the ranks; all have its gradients."""
    loss, *grads = [
        x if x is None else torch.from_numpy(x) for x in _loss_and_gradients(whole, kind)
    ]
    for parameter, grad in zip(whole.parameters(), grads, strict=True):
        parameter.grad = grad
    return loss


def expect_near(model, whole, of_own=1e-5, of_largest=1e-7):
    """Gradients of float32 within a few of its roundings, as models multiply them."""
    gradients = [p.grad for p in whole.parameters() if p.grad is not None]
    largest = max(float(grad.abs().max()) for grad in gradients)
    for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        if wanted.grad is None:
            continue
        # The gradient of a key's bias is 0 but for rounding.
        limit = of_own * float(wanted.grad.abs().max()) + of_largest * largest
        grad = full(found.grad)
        torch.testing.assert_close(
            grad, wanted.grad, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


def trained(model, batch, layout="zigzag"):
    """This rank's part of the loss, summed over the ranks; gradients of their mean."""
    labels = batch["labels"]
    try:
        loss = model(**batch).loss
    except ValueError as error:
        if "expected labels to be none: its loss is not told the number" not in str(error):
            raise
        # As the message says.
        logits = model(**{k: x for k, x in batch.items() if k != "labels"}).logits
        own = shard_sequence(labels, group=group(), dim=1, layout=layout)
        total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
        loss = total * dist.get_world_size() / (labels != -100).sum()
    loss.backward()
    moe_ext.distributed.sync_gradients(model)
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def trains_as_one_process(model, kind, layout, rtol=1e-5, of_own=1e-5, of_largest=1e-7, **spread):
    """Prepared, and spread by `replace`; compared with a copy that has eager attention."""
    whole = copy.deepcopy(model)
    whole.set_attn_implementation("eager")
    loss = one_process_for_all(whole, kind)
    with one_probe():
        prepare_model(model, group=group(), layout=layout)
    if spread:
        assert moe_ext.replace(model, **spread) > 0
    found = trained(model, make_batch(kind), layout)
    about = f"{kind} {layout}: "
    torch.testing.assert_close(found, loss, rtol=rtol, atol=0, msg=lambda m: about + m)
    expect_near(model, whole, of_own, of_largest)


@check(*((family,) for family in SERVED if family not in RECURRENCES))
def equals_one_process(family):
    trains_as_one_process(make(family, **SERVED[family]), "padded", "zigzag")


@check(*((kind, layout) for kind in ("plain", "packed") for layout in ("zigzag", "contiguous")))
def batches_and_layouts(kind, layout):
    trains_as_one_process(make("llama"), kind, layout)


@check()
def keys_of_a_byte():
    model = make("llama")
    whole, exact = copy.deepcopy(model), copy.deepcopy(model)
    prepare_model(whole, group=None, wire="int8")
    loss = one_process(whole, "plain")
    prepare_model(model, group=group(), wire="int8")
    torch.testing.assert_close(trained(model, make_batch("plain")), loss, rtol=1e-5, atol=0)
    expect_near(model, whole)
    assert one_process(exact, "plain") != loss
    with pytest.raises(ValueError, match="expected wire to be None for scheme 'ulysses'"):
        prepare_model(model, group=group(), scheme="ulysses", wire="int8")


@check(("llama", "zigzag"), ("gemma2", "contiguous"))
def masks_of_all_pairs(family, layout):
    model = make(family, **SERVED[family])
    whole = copy.deepcopy(model)
    whole.set_attn_implementation("eager")
    batch = make_batch("plain")
    behind = torch.arange(23)[:, None] < torch.arange(23)
    # A prefix of its own for each row, and a bias by distance.
    hidden = behind & (torch.arange(23) >= torch.tensor([7, 12])[:, None, None])
    bias = -0.1 * (torch.arange(23)[:, None] - torch.arange(23)).abs().float()
    least = torch.finfo(torch.float32).min
    batch["attention_mask"] = bias.expand(2, -1, -1).masked_fill(hidden, least)[:, None]
    loss = whole(**batch).loss
    loss.backward()
    prepare_model(model, group=group(), layout=layout)
    torch.testing.assert_close(trained(model, batch), loss.detach(), rtol=1e-5, atol=0)
    expect_near(model, whole)
    batch["attention_mask"][0, 0, 3, 1] += dist.get_rank()
    with pytest.raises(ValueError, match="attention_mask .* the same whole batch"):
        model(**batch)


@check(*((family,) for family in ("llama4_text", "qwen3_next", "lfm2", "mamba")))
def rows_have_documents_of_their_own(family):
    model = prepared(family, group())
    batch, positions = make_batch("plain"), make_batch("packed")["position_ids"]
    batch["position_ids"] = torch.cat([positions, torch.arange(23)[None]])
    together = model(**batch).logits
    for row in (0, 1):
        alone = model(**{key: x[row : row + 1] for key, x in batch.items()}).logits
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-6)
    if family != "llama4_text":
        return
    batch["attention_mask"] = (torch.arange(23) > 2).expand(2, -1).long()
    with pytest.raises(ValueError, match="without padding on the left, got chunks of 8"):
        model(**batch)


@check()
def a_balance_loss_of_padding_alone_is_refused():
    """On every rank; rank 1 holds positions 12 to 23, and with one token of them it counts."""
    tokens = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": tokens, "labels": tokens}
    padding, tail = ((torch.arange(24) < torch.tensor([[2], [n]])).long() for n in (12, 13))
    wanted = {"output_router_logits": True}
    for model, by_call in ((make("mixtral", **wanted), {}), (make("olmoe"), wanted)):
        prepare_model(model, group=group(), layout="contiguous")
        rule = "output_router_logits to be False where a rank has padding alone"
        with pytest.raises(ValueError, match=f"prepare_model: expected {rule}.* rank 1"):
            model(**batch, **by_call, attention_mask=padding)
        served = model(**batch, **by_call, attention_mask=tail)
        assert served.aux_loss.isfinite() and served.loss.isfinite()
        without = model(**batch, attention_mask=padding, output_router_logits=False)
        assert without.loss.isfinite() and without.aux_loss is None


@check()
def documents_given_by_offsets():
    model = prepared("modernbert-decoder", group())
    batch = make_batch("packed")
    expected = model(**batch).logits
    offsets = torch.tensor([0, 9, 10, 23])
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 13}
    assert torch.equal(model(**batch, **given, max_length_k=13).logits, expected)
    # Offsets of every row.
    rows = torch.cat([batch["position_ids"], torch.arange(23)[None]])
    twice = {"input_ids": batch["input_ids"].expand(2, -1), "position_ids": rows}
    found = model(**twice, **given).logits[:1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    whole = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 23]))
    with pytest.raises(ValueError, match="position_ids to count up from 0 .* around position 9"):
        model(**twice | {"position_ids": rows.flip(0)}, **whole)


@check(*[(name,) for name in RECOMPUTED])
def a_recomputation_after_another_batch_has_its_documents(family):
    model = prepared(family, group()).train()
    found = []
    for kwargs in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        model.zero_grad()
        if kwargs:
            model.gradient_checkpointing_enable(kwargs)
        torch.manual_seed(5)
        loss = model(**make_batch("packed")).loss
        model(**make_batch("plain"))
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


@check()
def a_recomputation_that_may_have_other_documents_is_refused():
    """Mixers of Mamba-1 are not told of documents."""
    model = prepared("mamba", group()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**make_batch("plain")).loss.backward()
    with pytest.raises(ValueError, match="prepare_model: expected a recomputation of packed"):
        model(**make_batch("packed")).loss.backward()


@check()
def generation_after_training():
    model = make("llama")
    whole = copy.deepcopy(model)
    prepare_model(model, group=group())
    ids = make_batch()["input_ids"]
    with pytest.raises(ValueError, match="use_cache to be none .*sdpa.* before generate"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("sdpa")
    found = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, whole.generate(ids, max_new_tokens=3, do_sample=False))


@check(("llama",), ("mamba",))
def a_group_is_not_pickled(family):
    model = prepared(family, group())
    with pytest.raises(TypeError, match="pickle: expected a module without a process group"):
        pickle.dumps(model)


@check()
def other_samples_on_the_ranks_are_refused():
    model = prepared("llama", group())
    odd = dist.get_rank() == 1
    for change, message in (
        ({"input_ids": make_batch()["input_ids"] + odd}, "input_ids .* the same whole batch"),
        ({"labels": make_batch()["labels"].flip(1 - int(odd))}, "labels .* the same whole batch"),
        ({"attention_mask": None} if odd else {}, "the arguments of the model to be equal"),
        ({"position_ids": torch.arange(23)[None] + odd}, "position_ids to count .* on rank 1$"),
    ):
        with pytest.raises(ValueError, match=f"prepare_model: expected {message}"):
            model(**{**make_batch(), **change})
    # And all is well after that.
    assert torch.isfinite(model(**make_batch()).loss)


@check()
def a_refusal_of_one_rank_is_heard_by_all():
    model = make("llama") if dist.get_rank() == 0 else make("llama").to("meta")
    with pytest.raises(ValueError, match="have its weights, got the meta device on rank 1$"):
        prepare_model(model, group=group())


@check()
def a_sampler_gives_a_group_the_same_samples():
    samplers = [group_sampler(range(7), group=g) for g in (group(), None)]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [list(sampler) for sampler in samplers])
    (together, apart), (together_1, apart_1) = found
    assert together == together_1 and sorted(together) == [*range(7)]
    assert {*apart, *apart_1} == {*range(7)} and len(apart) == len(apart_1) == 4


@check()
def trainer_takes_a_prepared_model():
    pytest.importorskip("accelerate")
    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2}
    model, data = make("llama"), make_samples()
    whole = copy.deepcopy(model)
    prepare_model(model, group=group())
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
            patch.setenv(name, str(value))
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            # What it does not log is the part of one rank.
            logging_steps=1,
            disable_tqdm=True,
        )
        with pytest.raises(ValueError, match="input_ids .* to be equal on every rank"):
            transformers.Trainer(model, arguments, train_dataset=data).train()
        trainer = ring_trainer()(model, arguments, train_dataset=data)
        trainer.train()
    loader, losses = trainer.get_train_dataloader(), []
    batches = iter(loader)
    for first, second in zip(batches, batches, strict=True):
        batch = {key: torch.cat([first[key], second[key]]) for key in first}
        losses.append(whole(**batch).loss)
        whole.zero_grad()
        losses[-1].backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    logged = [entry["loss"] for entry in trainer.state.log_history[:-1]]
    assert logged == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-5)
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))


def make_samples():
    """Eight samples of one length, two of which have fewer labels."""
    rows = torch.randint(3, VOCABULARY, (8, 23), generator=torch.Generator().manual_seed(4))
    labels = rows.clone()
    labels[:3, 9:] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def ring_trainer():
    """The class as the page writes it."""
    code = next(
        c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "(Trainer)" in c
    )
    names = {"torch": torch, "attention": moe_ext.attention, "cp_group": group()}
    exec(code, names)
    return names["RingTrainer"]


test_ranks = check.test(2, timeout=300)


CASES = [
    (family, message, options)
    for message, families in REFUSED.values()
    for family, options in families.items()
]


@pytest.mark.parametrize(("family", "message", "options"), CASES, ids=lambda x: str(x)[:24])
def test_refused_families(family, message, options):
    model = make(family, **options)
    flags = [module.training for module in model.train().modules()]
    implementation, state = model.config._attn_implementation, torch.get_rng_state()
    with pytest.raises(ValueError, match=f"^prepare_model: .*({message})"):
        prepare_model(model, group=None)
    # The model is as it was.
    assert model.config._attn_implementation == implementation
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert not model._forward_pre_hooks and not any(m._forward_hooks for m in model.modules())


def test_a_look_at_a_model_of_parts_leaves_their_attention():
    text = make("llama").config
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    vision = transformers.CLIPVisionConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    model = transformers.LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    probe(model)
    parts = (config, config.text_config, config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


@pytest.mark.parametrize(
    "family", ["falcon_h1", "kimi_linear", "lfm2", "minimax", "qwen3_5_text", "recurrent_gemma"]
)
def test_names_that_are_registered_refuse_them_too(family):
    """Where nobody has called prepare_model."""
    register_ring_attention(None)
    model = make(family, **SERVED[family])
    model.set_attn_implementation("moe_ext_ring")
    text = "expected model to be of layers that mix tokens in their attention alone .*, got .+"
    with pytest.raises(ValueError, match=text):
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)


def test_a_copy_is_prepared_and_ended_by_itself():
    model = prepared("qwen3_next", None)
    twin, batch = copy.deepcopy(model), make_batch("packed")
    apart = model(**batch).logits
    model.set_attn_implementation("sdpa")
    # transformers' own recurrences run through all documents.
    together = model(input_ids=batch["input_ids"]).logits
    assert not torch.allclose(together, apart, atol=1e-3)
    assert torch.equal(twin(**batch).logits, apart)
    twin.set_attn_implementation("sdpa")
    assert torch.equal(twin(input_ids=batch["input_ids"]).logits, together)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_a_hybrid_compiles():
    model, batch = prepared("lfm2", None), make_batch("packed")
    wanted = model(**batch).logits
    torch.testing.assert_close(torch.compile(model, backend="eager")(**batch).logits, wanted)


PICKLED = ("llama", "qwen3_next")


def test_a_model_is_pickled_whole():
    models, batch = [prepared(family, None) for family in PICKLED], make_batch("packed")
    # In another process, too, where nobody prepared them, or has imported moe_ext.
    code = "import pickle, sys; models, b = pickle.load(sys.stdin.buffer); "
    code += "print(*(float(m(**b).loss) for m in models))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((models, batch)), capture_output=True
    )
    losses = [model(**batch).loss.item() for model in models]
    assert [*map(float, done.stdout.split())] == pytest.approx(losses, rel=1e-6), done.stderr
    for model, family in zip(models, PICKLED, strict=True):
        found = pickle.loads(pickle.dumps(model))
        assert torch.equal(found(**batch).logits, model(**batch).logits)
        # Whose end is its own.
        found.set_attn_implementation("sdpa")
        model(**batch).loss.backward()
        whole = make(family, **SERVED[family])
        given = {"input_ids": batch["input_ids"]}
        assert torch.equal(found(**given).logits, whole(**given).logits)


def test_positions_of_roberta_skip_padding():
    model = make("roberta").eval()
    ids = torch.randint(8, VOCABULARY, (2, 23))
    ids[0, :5] = model.config.pad_token_id
    given = {"input_ids": ids, "attention_mask": (ids != model.config.pad_token_id).long()}
    expected = model(**given).logits
    prepare_model(model, group=None)
    found = model(**given).logits
    torch.testing.assert_close(found[0, 5:], expected[0, 5:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_losses_are_told_the_number_of_labels():
    assert probe(make("mixtral", output_router_logits=True)).loss == "shifted"
    assert probe(make("eurobert/mlm")).loss == "plain"
    # Its loss is a mean of its own.
    assert probe(make("roberta/mlm")) == Traits(2, False, None)
    assert probe(make("opt")) == Traits(0, True, "shifted")


@pytest.mark.parametrize("family", ["llama", "eurobert/mlm"])
def test_another_number_may_stand_for_no_label(family):
    batch = {**make_batch("whole"), "ignore_index": 1}
    batch["labels"][:, 5:9] = 1
    losses = [model(**batch).loss for model in (make(family), prepared(family, None))]
    torch.testing.assert_close(*losses)


FORMS = {"llama": "shifted", "gpt_neox": "shifted", "mistral": "shifted", "eurobert/mlm": "plain"}


def test_no_weights_make_the_form_of_a_loss_another():
    for seed, family in zip(range(50), itertools.cycle(FORMS)):
        model = make(family, seed=seed, num_hidden_layers=1)
        assert probe(model).loss == FORMS[family], f"{family}, seed {seed}"


def test_other_refusals():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=r"one way for sequences .* rope_type \['dynamic'\]"):
        prepare_model(make("llama", rope_parameters=rope), group=None)
    config = make("llama").config
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match="a row for each of 53 tokens, got .1, 2"):
        prepare_model(classifier, group=None)
    with pytest.raises(ValueError, match="call the attention that .*, got no call in Llama"):
        prepare_model(make("llama", num_hidden_layers=0), group=None)
    with pytest.raises(TypeError, match="one of transformers, not yet wrapped, got Linear"):
        prepare_model(torch.nn.Linear(2, 2), group=None)
    with pytest.raises(ValueError, match="expected layout to be"):
        prepare_model(make("llama"), group=None, layout="spiral")
    model = prepared("opt", None)
    ids = make_batch()["input_ids"]
    blocks = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 64, 64, "cpu")
    for given, message in (
        ({"shift_labels": ids}, "shift_labels to be no tensor"),
        ({"use_cache": True}, "use_cache to be none"),
        *(({name: [1]}, f"{name} to be none") for name in CACHES),
        ({"logits_to_keep": 1}, "logits_to_keep to be none"),
        ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep to be none"),
        ({"attention_mask": ids[:, None, None] > 0}, "attention_mask to be"),
        ({"attention_mask": blocks}, "attention_mask to be a tensor, got BlockMask"),
        ({"attention_mask": (ids > 8).long()}, "position_ids to be given where padding is not on"),
        ({"cu_seq_lens_q": ids[0]}, "cu_seq_lens_q and cu_seq_lens_k to be given both"),
    ):
        with pytest.raises(ValueError, match=f"prepare_model: expected {message}"):
            model(input_ids=ids, **given)


def test_preparing_again_stands_for_the_new_options():
    model = prepared("gpt2", None, layout="striped")
    prepare_model(model, group=None)
    assert len(model._forward_pre_hooks) == 1
    expected = make("gpt2")(**make_batch()).loss
    torch.testing.assert_close(copy.deepcopy(model)(**make_batch()).loss, expected)
    # Positionally, too.
    ids = make_batch()["input_ids"]
    torch.testing.assert_close(model(ids).logits, make("gpt2")(ids).logits)


def table():
    """The families of the page."""

    def listed(names):
        return ", ".join(sorted(name.replace("/mlm", "") for name in names))

    lines = [f"Served: {listed({name.replace('/mlm', '') for name in SERVED})}.", ""]
    lines += [f"- {reason}: {listed(names)}." for reason, (_, names) in REFUSED.items()]
    wrapped = [
        textwrap.fill(
            line, 138, subsequent_indent="  " * line.startswith("-"), break_on_hyphens=False
        )
        for line in lines
    ]
    return "\n".join([*wrapped[:1], "", "Refused:", "", *wrapped[2:]])


def test_the_page_names_these_families():
    assert table() in PAGE.read_text(), f"run python {Path(__file__).name}"


if __name__ == "__main__":
    head, begin, rest = PAGE.read_text().partition("<!-- families -->\n")
    _, end, tail = rest.partition("<!-- end of families -->")
    assert end, "the page has no place for the table"
    PAGE.write_text(f"{head}{begin}{table()}\n{end}{tail}")
