"""Every family of transformers whose experts can be replaced, and the list of them in the docs.

Run by hand, `python tests/integrations/huggingface/test_families.py` writes that list anew.
"""

import contextlib
import copy
import io
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_families import (
    FAMILIES,
    OTHERS,
    SMALL,
    VOCABULARY,
    build,
    decorated_families,
    spread_by_transformers,
    transformers,
)
from hf_models import one_probe
from rank_checks import full
from torch.distributed.device_mesh import init_device_mesh

import moe_ext
from moe_ext.attention import prepare_model
from moe_ext.testing import spawn_ranks

RANKS = 2
PAGE = Path(__file__).resolve().parents[3] / "docs" / "hugging_face.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
# In float64 what differs is float32 inside the model: norms, softmax, some gates, the loss. A value
# between two float32 rounds either way (6e-8), and up to four layers multiply that by about ten.
# A wrong expert, weight or sum is off by a thousandth and more.
RELATIVE = 1e-6
# For float32, by roundings of all products. These models cannot be in another dtype, or their own
# loop over the experts is in float32 whatever they are in.
RELATIVE_FLOAT32 = 1e-5
# Share of the model's largest gradient, where a sum in another order meets float32 inside the
# model: its roundings are of that size, and a small gradient is a difference of large ones.
OF_LARGEST = 1e-7
# Decays of their recurrence are in float32 in any model, as is their sum over a long sequence.
FLOAT32_DECAYS = {"bailing_hybrid"}
FLOAT32 = {"inkling2", "inkling2_loop", "nemotron_h", "openai_privacy_filter"}


def batch_of(rank):
    """Ranks have batches of different sizes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 11), generator=generator)
    return {"input_ids": ids if rank == 0 else ids[:1, :7], "use_cache": False}


def loss_of(logits):
    # Of a norm at the end the plain mean of squares is a constant.
    return (logits.double() * torch.linspace(0.5, 1.5, logits.shape[-1])).square().mean()


def run(model, rank):
    """Logits and gradients of one pass on a rank's batch; nothing of its graph stays."""
    output = model(**batch_of(rank))
    logits = output.logits if hasattr(output, "logits") else output[0]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss_of(logits), list(named.values()), allow_unused=True)
    return logits.detach(), dict(zip(named, gradients, strict=True))


def assert_near(got, want, relative, name):
    difference = float((full(got) - want).abs().max())
    assert difference <= relative * float(want.abs().max()), (name, difference)


def check_one_process(model, batch, relative):
    with contextlib.redirect_stdout(io.StringIO()):
        report = moe_ext.verify(model, batch)
    assert report.logits <= relative * report.logits_scale
    for name, (difference, scale) in report.gradients.items():
        assert difference <= relative * scale, (name, difference, scale)
    assert any(".experts." in name for name in report.gradients)


def wanted(model, rank):
    """Logits of eager, and the mean of its gradients over the ranks."""
    model.set_experts_implementation("eager")
    logits, local = run(model, rank)
    named = dict(model.named_parameters())
    parts = [torch.zeros_like(p) if local.get(n) is None else local[n] for n, p in named.items()]
    mean = torch.cat([part.flatten() for part in parts]) / RANKS
    dist.all_reduce(mean)
    parts = mean.split([p.numel() for p in named.values()])
    return logits, {n: x.view(p.shape) for (n, p), x in zip(named.items(), parts, strict=True)}


def check_plan(model, rank, relative, meshes, want_logits, want):
    """Spread by transformers, which leaves to its caller what is not of experts."""
    model.set_experts_implementation("moe_ext")
    model = spread_by_transformers(model, *meshes)
    logits, gradients = run(model, rank)
    assert_near(logits, want_logits, relative, "logits")
    for name, gradient in gradients.items():
        if hasattr(gradient, "to_local"):
            assert_near(gradient, RANKS * want[name], relative, name)


def check_two_ranks(model, rank, relative, want_logits, want):
    """With an expert-parallel group: logits, and gradients of the mean over the ranks."""
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    output = model(**batch_of(rank))
    logits = output.logits if hasattr(output, "logits") else output[0]
    assert_near(logits.detach(), want_logits, relative, "logits")
    loss_of(logits).backward()
    moe_ext.distributed.sync_gradients(model)
    for name, parameter in model.named_parameters():
        got = torch.zeros_like(want[name]) if parameter.grad is None else parameter.grad
        assert got.shape == want[name].shape, name
        assert_near(got, want[name], relative, name)


def check_ring(model, relative, *, compares):
    """Sequences and experts over the same ranks; "no" where the model or its pass is refused.

    One of the ranks compares with a pass of its own.
    """
    model.set_experts_implementation("eager")
    # Even parts, whose mean is that of the whole; longer than windows and compressed blocks.
    ids = torch.randint(3, VOCABULARY, (1, 256), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "use_cache": False}
    whole = copy.deepcopy(model) if compares else None
    try:
        with one_probe():
            prepare_model(model, group=dist.group.WORLD, layout="zigzag")
        moe_ext.replace(model, ep_group=dist.group.WORLD)
        output = model(**batch)
    except ValueError:
        return "no"
    loss_of(output.logits if hasattr(output, "logits") else output[0]).backward()
    moe_ext.distributed.sync_gradients(model)
    gradients = {n: p.grad if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
    if compares:
        output = whole(**batch)
        loss_of(output.logits if hasattr(output, "logits") else output[0]).backward()
        largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
        for (name, found), wanted in zip(gradients.items(), whole.parameters(), strict=True):
            if wanted.grad is not None:
                got = torch.zeros_like(wanted) if found is None else found
                limit = relative * float(wanted.grad.abs().max()) + OF_LARGEST * largest
                assert float((got - wanted.grad).abs().max()) <= limit, (name, limit)
    return "yes"


def name_of(family, model):
    """The family, with a star where the model is another one than that for causal language."""
    return family if type(model).__name__.endswith("ForCausalLM") else f"{family}*"


def check_families(rank):
    """Names of families that pass, with a ring and without."""
    found = {"yes": [], "no": []}
    ep_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    tp_mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("fsdp", "tp"))["tp"]
    for number, family in enumerate(FAMILIES):
        single = family in FLOAT32
        relative = RELATIVE_FLOAT32 if single else RELATIVE
        model = build(family).to(torch.float32 if single else torch.float64).eval()
        # One that nothing has touched before.
        fresh = copy.deepcopy(model)
        try:
            if number % RANKS == rank:
                check_one_process(model, batch_of(rank), relative)
            want = wanted(model, rank)
            of_ring = RELATIVE_FLOAT32 if family in FLOAT32_DECAYS else relative
            ring = check_ring(fresh, of_ring, compares=number % RANKS == rank)
            found[ring].append(name_of(family, model))
            assert "ep_dispatch_experts" in model.ep_plan.values(), "no plan of transformers"
            check_plan(copy.deepcopy(model), rank, relative, (ep_mesh, tp_mesh), *want)
            check_two_ranks(model, rank, relative, *want)
        except Exception as error:
            raise AssertionError(family) from error
    return found


def check_refused(family):
    """Its name, for a family whose experts transformers can run by its own code alone.

    transformers accepts an implementation for them, and changes nothing.
    """
    with torch.device("meta"):
        model = build(family)
    before = model.config._experts_implementation
    moe_ext.integrations.huggingface.register()
    model.set_experts_implementation("moe_ext")
    assert model.config._experts_implementation == before
    text = rf"got none in {type(model).__name__}: set_experts_implementation .* nothing there$"
    for call in (moe_ext.replace, lambda model: moe_ext.verify(model, {})):
        with pytest.raises(ValueError, match=text):
            call(model)
    return family


def lists():
    """The part of the page between its marks."""
    found, other = spawn_ranks(check_families, RANKS, timeout=600)
    assert found == other
    groups = {
        "Served": found["yes"],
        "Served, but not by `prepare_model` and `ep_group` together": found["no"],
        "Refused": [check_refused(family) for family in OTHERS],
    }
    texts = (f"**{title}**: {', '.join(sorted(names))}." for title, names in groups.items())
    wrap = {"width": 120, "break_on_hyphens": False}
    return "\n\n".join(textwrap.fill(text, **wrap) for text in texts) + "\n"


def page_with(text):
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


def test_the_list_is_complete():
    assert set(FAMILIES) == decorated_families()


def test_every_family():
    """Logits and gradients of eager in one process, with `ep_group`, over a ring; the list too."""
    assert PAGE.read_text() == page_with(lists()), "run this file to write the list anew"


def implementations(model):
    named = [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]
    return [module.config._experts_implementation for _, module in named]


def test_a_layer_with_a_config_of_its_own():
    """transformers changes the config of the model, of which each layer has a copy."""
    from transformers.models.dots3_note import modeling_dots3_note as dots

    config = dots.Dots3NoteVisionConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        moe_intermediate_size=12,
        mlp_layer_types=["dense", "sparse"],
        per_layer_config={1: {"num_local_experts": 8, "num_experts_per_tok": 2}},
        adapter_in_dim=32,
        adapter_out_dim=16,
    )
    model = dots.Dots3NoteVisionModel(config)
    moe_ext.integrations.huggingface.register()
    before = implementations(model)
    model.set_experts_implementation("moe_ext")
    assert implementations(model) == before != ["moe_ext"], "transformers mends this: say so"
    assert moe_ext.replace(model) == 1
    assert implementations(model) == ["moe_ext"]


def test_a_config_inside_a_config():
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 8}
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    small = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    small |= {"moe_intermediate_size": 12, "num_hidden_layers": 2, "num_experts": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"patch_size": 4, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=small | text, vision_config=vision)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    model.set_experts_implementation({"": "grouped_mm", "text_config": "eager"})
    before = model.get_experts_implementation()
    assert len(set(before.values())) == 2
    check_one_process(model, batch_of(0), RELATIVE_FLOAT32)
    assert model.get_experts_implementation() == before
    assert moe_ext.replace(model) == 2
    assert implementations(model) == ["moe_ext"] * 2
    model.set_experts_implementation("eager")
    assert implementations(model) == ["eager"] * 2


if __name__ == "__main__":
    PAGE.write_text(page_with(lists()))
