"""Models on shards of a sequence against the same models in one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from hf_models import DENSE, SLIDING, VOCABULARY, assert_near, build, transformers
from rank_checks import ChecksOn
from torch.distributed.device_mesh import init_device_mesh

import moe_ext
from moe_ext.attention import make_layout
from moe_ext.attention.huggingface.interface import BatchFacts
from moe_ext.integrations.huggingface import (
    causal_lm_loss,
    register_ring_attention,
    shard_batch,
)

# Family to options beside those of hf_models.
MODELS = {
    **dict.fromkeys((*DENSE, "qwen3_moe"), {}),
    "gpt_oss": SLIDING,
    "deepseek_v3": {"v_head_dim": 6},
}
DOCUMENTS = (9, 1, 20, 7)
POSITIONS = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
check = ChecksOn(2, 3)  # by the number of ranks


def make(name, **kwargs):
    model = build(name, **MODELS[name], **kwargs)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Scores of small weights are all alike: no mask would be seen.
            if "q_proj" in parameter_name or "k_proj" in parameter_name:
                parameter.mul_(20)
            if "sinks" in parameter_name:
                parameter.normal_()
            # Biases of 0.1 beside embeddings of 0.02 make the tokens alike: what they have in
            # common is 8 times their differences, of which alone the gradients of queries and
            # keys consist, so that these have lost a digit to cancellation.
            if name == "gpt_oss" and "embed_tokens" in parameter_name:
                parameter.mul_(20)
    return model


def on_ring(ranks, name="llama", **options):
    register_ring_attention(ranks, **options)
    return make(name, attn_implementation="moe_ext_ring")


def make_batch(kind):
    rows = 1 if kind == "packed" else 2
    ids = torch.randint(3, VOCABULARY, (rows, 37), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = POSITIONS
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        # A hole, too: causal queries never look at padding on the right.
        for start, stop in ((4, 11), (31, 37)):
            batch["attention_mask"][1, start:stop] = 0
            # A query in the hole may see no key, where eager attention takes the mean of them all.
            batch["labels"][1, start : stop + 1] = -100
    return batch


@functools.cache
def one_process(name, kind):
    """The model with transformers' own attention, after a backward pass, and its loss; only read.

    Documents go through it one by one: some families forget to keep packed ones apart.
    """
    model = make(name, attn_implementation="eager")
    batch = make_batch(kind)
    parts = [batch]
    if kind == "packed":
        columns = batch["input_ids"].split(DOCUMENTS, dim=1)
        parts = [{"input_ids": ids, "labels": ids} for ids in columns]
    count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    loss = sum(model(**part, use_cache=False, num_items_in_batch=count).loss for part in parts)
    loss.backward()
    return model, loss.detach()


def expect_equal(model, loss, name, kind):
    whole, expected = one_process(name, kind)
    assert_near(loss, expected)
    for (parameter_name, parameter), other in zip(
        model.named_parameters(), whole.parameters(), strict=True
    ):
        if other.grad is None:
            continue
        try:
            assert_near(parameter.grad, other.grad)
        except AssertionError as error:
            raise AssertionError(parameter_name) from error


def group():
    return dist.group.WORLD


KINDS = ("plain", "packed", "padded")


@check.pairs(MODELS, KINDS, ["zigzag"])
@check(
    ("llama", "packed", "contiguous"),
    ("llama", "packed", "per_document"),
    ("llama", "padded", "striped"),
)
def equals_one_process(name, kind, layout):
    model = on_ring(group(), name, layout=layout)
    batch = shard_batch(make_batch(kind), group=group(), layout=layout)
    # By the model's own loss.
    loss = model(**batch).loss
    loss.backward()
    moe_ext.distributed.sync_gradients(model)
    total = loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    expect_equal(model, total, name, kind)


@check(("llama", False), ("qwen3_moe", False), ("qwen3_moe", True))
def equals_one_process_with_our_loss_and_experts(name, spread):
    register_ring_attention(group())
    model = make(name)
    model.set_attn_implementation("moe_ext_ring")
    if name == "qwen3_moe":
        assert moe_ext.replace(model, ep_group=group() if spread else None) == 2
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batch = shard_batch(make_batch("packed"), group=group())
    labels = batch.pop("shift_labels")
    del batch["labels"]
    loss = causal_lm_loss(model(**batch).logits, labels, group=group())
    loss.backward()
    moe_ext.distributed.sync_gradients(model)
    expect_equal(model, loss.detach(), name, "packed")


@check()
def labels_beyond_the_vocabulary_on_one_rank_are_refused_on_all():
    labels = torch.full((1, 3), 5 if dist.get_rank() == 1 else 4)
    with pytest.raises((IndexError, RuntimeError), match="Target 5 is out of bounds"):
        causal_lm_loss(torch.zeros(1, 3, 5), labels, group=group())


@check()
def reentrant_checkpointing():
    register_ring_attention(group())
    model = make("llama", attn_implementation="moe_ext_ring", attention_dropout=0.2).train()
    batch = shard_batch(make_batch("packed"), group=group())
    found = []
    for kwargs in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        model.zero_grad()
        if kwargs:
            model.gradient_checkpointing_enable(kwargs)
        torch.manual_seed(5)
        model(**batch, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


@check()
def documents_are_found_without_being_told():
    model = on_ring(group())
    batch = shard_batch(make_batch("packed"), group=group())
    told = model(**batch).logits
    kept = {key: batch[key] for key in ("input_ids", "position_ids")}
    assert torch.equal(model(**kept).logits, told)
    with torch.inference_mode():
        assert torch.equal(model(**batch).logits, told)
    # Offsets that part of the positions does not show: the positions are the same tensor.
    plain = shard_batch(make_batch("plain"), group=group())["position_ids"]
    count = {**kept, "position_ids": plain}
    apart = {name: torch.tensor((0, 20, 37)) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    together = model(**count).logits
    assert not torch.equal(model(**count, **apart).logits, together)
    assert torch.equal(model(**count).logits, together)
    # Positions in place: the tensor is the same, its values are not.
    kept["position_ids"].copy_(shard_batch(make_batch("plain"), group=group())["position_ids"][:1])
    assert not torch.equal(model(**kept).logits, told)


@check()
def positions_that_change_in_inference_mode_are_refused():
    model = on_ring(group())
    with torch.inference_mode():
        batch = shard_batch(make_batch("packed"), group=group())
        ids, position_ids = batch["input_ids"], batch["position_ids"]
        assert position_ids.is_inference()
        model(input_ids=ids, position_ids=position_ids)
        position_ids.add_(1)
        with pytest.raises(ValueError, match="position_ids to be a new tensor .* inference mode"):
            model(input_ids=ids, position_ids=position_ids)


@check()
def meshes_stand_for_their_ranks():
    num_ranks = dist.get_world_size()
    row = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
    grid = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("ring", "ulysses"))
    for mesh, scheme in ((row, "ring"), (grid, "double_ring"), (grid, "auto")):
        model = on_ring(mesh, scheme=scheme)
        batch = shard_batch(make_batch("packed"), group=mesh)
        logits = model(**{name: x for name, x in batch.items() if "labels" not in name}).logits
        loss = causal_lm_loss(logits, batch["shift_labels"], group=mesh)
        loss.backward()
        moe_ext.distributed.sync_gradients(model)
        expect_equal(model, loss.detach(), "llama", "packed")


@check()
def two_names_at_a_time():
    register_ring_attention(group(), name="ring_a")
    register_ring_attention(None, name="ring_b")
    a = make("llama", attn_implementation="ring_a")
    b = make("llama", attn_implementation="ring_b")
    whole = make_batch("packed")
    expected = shard_batch(
        {"inputs_embeds": b(**shard_batch(whole, group=None)).logits}, group=group()
    )
    assert_near(a(**shard_batch(whole, group=group())).logits, expected["inputs_embeds"])


@check(("contiguous",), ("zigzag",), ("striped",))
def positions_that_nobody_gave_are_refused(layout):
    model = on_ring(group(), layout=layout)
    batch = shard_batch(make_batch("plain"), group=group(), layout=layout)
    with pytest.raises(ValueError, match=r"moe_ext_ring: expected position_ids to .* shard"):
        model(input_ids=batch["input_ids"])


@check()
def rows_have_documents_of_their_own():
    model = on_ring(group())
    batch = make_batch("plain")
    positions = torch.cat([POSITIONS, torch.arange(37)[None]])
    shards = shard_batch({**batch, "position_ids": positions}, group=group())
    together = model(**shards).logits
    for row in (0, 1):
        one = {key: x[row : row + 1] for key, x in {**batch, "position_ids": positions}.items()}
        alone = shard_batch(one, group=group())
        assert_near(together[row : row + 1], model(**alone).logits)
        assert torch.equal(shards["shift_labels"][row : row + 1], alone["shift_labels"])
    ids = shards["position_ids"].clone()
    if dist.get_rank() == 1:
        ids[1, 0] = 0
    with pytest.raises(ValueError, match="position_ids to count up from 0 in each document"):
        model(input_ids=shards["input_ids"], position_ids=ids)


@check()
def other_samples_on_the_ranks_are_refused():
    odd = dist.get_rank() == 1
    batch = make_batch("packed")
    given = (
        ({"input_ids": batch["input_ids"] + odd}, "input_ids .* to be equal on every rank"),
        ({"labels": None} if odd else {}, "the keys of the batch to be equal"),
        (
            {"position_ids": batch["position_ids"] + odd},
            "position_ids to count up from 0 .* on rank 1$",
        ),
    )
    for change, message in given:
        changed = {key: x for key, x in {**batch, **change}.items() if x is not None}
        with pytest.raises(ValueError, match=f"shard_batch: expected {message}"):
            shard_batch(changed, group=group())


@check()
def models_that_count_positions_from_elsewhere_are_refused():
    register_ring_attention(group())
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(vocab_size=VOCABULARY, intermediate_size=8, **sizes)
    model = transformers.RobertaForMaskedLM(config)
    model.set_attn_implementation("moe_ext_ring")
    ids = make_batch("plain")["input_ids"]
    with pytest.raises(ValueError, match="positions start at 0 .prepare_model serves others"):
        model(**shard_batch({"input_ids": ids}, group=group()))


@check()
def a_cache_is_refused():
    model = on_ring(group())
    batch = shard_batch(make_batch("plain"), group=group())
    inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
    cache = model(**inputs, use_cache=True).past_key_values
    step = {"input_ids": inputs["input_ids"][:, :1], "position_ids": torch.tensor([[37]])}
    with pytest.raises(ValueError, match="expected the cache of keys to be empty"):
        model(**step, past_key_values=cache)
    with pytest.raises(ValueError, match="moe_ext_ring: expected"):
        model.generate(inputs["input_ids"], max_new_tokens=2)


test_ranks = check.test(timeout=300)


def refused(message, model, **kwargs):
    ids = torch.randint(3, VOCABULARY, (2, 6))
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, **kwargs)


def test_refusals():
    model = on_ring(None)
    refused("S of attn_mask to be the 6 keys", model, attention_mask=torch.zeros(2, 1, 6, 5))
    refused("counts? up from 0", model, position_ids=torch.arange(1, 7)[None])
    row = torch.tensor([0, 6])
    refused("given both, and equal", model, cu_seq_lens_q=row)
    refused("expected head_mask to be None", model, head_mask=object())
    refused("expected output_attentions to be None", model, output_attentions=True)
    refused("expected position_bias to be None", model, position_bias=torch.zeros(1))
    gpt = make("gpt_oss", attn_implementation="moe_ext_ring")
    gpt.model.layers[0].self_attn.sliding_window = 3
    refused("sliding_window to be 5, that of the mask, got 3", gpt)


def test_numbers_of_labels_are_exact_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        ids = torch.zeros(1, 300, dtype=torch.int64)
        batch = shard_batch({"input_ids": ids, "labels": ids}, group=None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(batch["num_items_in_batch"]) == 299


def test_masks_of_other_kinds_are_refused():
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    config = on_ring(None).config
    config.attention_chunk_size = 4
    given = (config, torch.zeros(1, 12, 32), None, None)
    # Where chunks end follows from what a prepared model knows.
    assert create_chunked_causal_mask(*given).chunk == 4
    with pytest.raises(ValueError, match="expected the mask of the model to be without chunks, or"):
        BatchFacts().cut(4, "moe_ext_ring")
    with pytest.raises(ValueError, match=r"expected the mask of the model to be .* or_masks"):
        create_causal_mask(*given, or_mask_function=lambda b, h, q, k: q == k)
    assert create_causal_mask(*given).key_mask is None


def test_options_are_checked():
    with pytest.raises(ValueError, match="expected layout to be"):
        register_ring_attention(None, layout="zagzig")
    with pytest.raises(TypeError, match="expected group to be None or a ProcessGroup"):
        register_ring_attention("cp")
    ids = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="other keys to be among"):
        shard_batch({"input_ids": ids, "pixel_values": ids}, group=None)
    for key in ("input_ids", "inputs_embeds"):
        with pytest.raises(ValueError, match=rf"expected {key} to be \[B, S\] or .*, got \[8\]"):
            shard_batch({key: torch.zeros(8, dtype=torch.int64)}, group=None)
    rule = r"of shape \[1 or 1, 6, ...\]"
    for key in ("labels", "attention_mask", "token_type_ids", "position_ids"):
        for x in (ids[:, :4], ids[0], ids.expand(2, -1)):
            with pytest.raises(ValueError, match=f"expected {key} to be {rule}, got"):
                shard_batch({"input_ids": ids, key: x}, group=None)
    with pytest.raises(ValueError, match="expected position_ids to count up from 0"):
        shard_batch({"input_ids": ids, "position_ids": ids + 3}, group=None)


def test_a_layout_of_ones_own():
    layout = make_layout("striped", 37, 1)
    model = on_ring(None, layout=layout)
    loss = model(**shard_batch(make_batch("padded"), group=None, layout=layout)).loss
    loss.backward()
    expect_equal(model, loss.detach(), "llama", "padded")
