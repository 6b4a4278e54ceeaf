"""Every family of transformers whose experts can be replaced, and the table of them in the docs.

Run by hand, `python tests/integrations/huggingface/test_families.py` writes that table anew.
"""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_families import FAMILIES, OTHERS, VOCABULARY, build, decorated_families

import moe_ext
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
FLOAT32 = {"inkling2", "nemotron_h", "openai_privacy_filter"}
FULL = os.environ.get("MOE_EXT_FULL") == "1"


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
    difference = float((got - want).abs().max())
    assert difference <= relative * float(want.abs().max()), (name, difference)


def check_one_process(model, batch, relative):
    with contextlib.redirect_stdout(io.StringIO()):
        report = moe_ext.verify(model, batch)
    assert report.logits <= relative * report.logits_scale
    for name, (difference, scale) in report.gradients.items():
        assert difference <= relative * scale, (name, difference, scale)
    assert any(".experts." in name for name in report.gradients)


def check_two_ranks(model, rank, relative):
    """With an expert-parallel group: logits, and gradients of the mean over the ranks."""
    model.set_experts_implementation("eager")
    want_logits, local = run(model, rank)
    want = {}
    for name, parameter in model.named_parameters():
        gradient = local.get(name)
        want[name] = torch.zeros_like(parameter) if gradient is None else gradient / RANKS
        dist.all_reduce(want[name])
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    output = model(**batch_of(rank))
    logits = output.logits if hasattr(output, "logits") else output[0]
    assert_near(logits.detach(), want_logits, relative, "logits")
    loss_of(logits).backward()
    moe_ext.distributed.sync_gradients(model)
    placed = moe_ext.distributed.placements(model)
    for name, parameter in model.named_parameters():
        own = want[name]
        if name in placed and placed[name].num_parts > 1:
            own = own.chunk(RANKS)[rank]
        got = torch.zeros_like(own) if parameter.grad is None else parameter.grad
        assert got.shape == own.shape, name
        assert_near(got, own, relative, name)


def row_of(family, model, served, words):
    """A row of the table."""
    plan = "ep_dispatch_experts" in (getattr(model, "ep_plan", None) or {}).values()
    return [family, f"`{type(model).__name__}`", served, "yes" if plan else "no plan", words]


def kind_of_experts(model):
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    words = {
        "transposed": experts.is_transposed,
        "interleaved": not experts.is_concatenated,
        "biases": experts.has_bias,
        "no gate": not experts.has_gate,
        "a gate of its own": "default" not in experts._apply_gate.__qualname__,
        "norm after each expert": experts.has_post_expert_norm,
    }
    return ", ".join(word for word, has in words.items() if has)


def check_families(rank):
    """Rows of the table, for families that pass."""
    rows = []
    for family in FAMILIES:
        for single in {family in FLOAT32, FULL or family in FLOAT32}:
            relative = RELATIVE_FLOAT32 if single else RELATIVE
            model = build(family).to(torch.float32 if single else torch.float64).eval()
            row = row_of(family, model, "yes | yes", kind_of_experts(model))
            try:
                check_one_process(model, batch_of(rank), relative)
                check_two_ranks(model, rank, relative)
            except Exception as error:
                raise AssertionError(f"{family} in {model.dtype}") from error
        rows.append(row)
    return rows


def check_refused(family):
    """Its row, for a family whose experts transformers can run by its own code alone.

    transformers accepts an implementation for them, and changes nothing.
    """
    with torch.device("meta"):
        model = build(family)
    before = model.config._experts_implementation
    moe_ext.integrations.huggingface.register()
    model.set_experts_implementation("moe_ext")
    assert model.config._experts_implementation == before
    text = rf"got none in {type(model).__name__}: (set_experts_implementation .* nothing there)$"
    for call in (moe_ext.replace, lambda model: moe_ext.verify(model, {})):
        with pytest.raises(ValueError, match=text) as raised:
            call(model)
    reason = re.search(text, str(raised.value))[1]
    return row_of(family, model, "no | no", f"no decorated class: {reason}")


def table():
    """The part of the page between its marks, of rows in the order of the families."""
    rows, other = spawn_ranks(check_families, RANKS, timeout=600)
    assert rows == other
    rows += [check_refused(family) for family in OTHERS]
    head = "| family | model in the test | `replace` | `ep_group` | `DistributedConfig` | experts |"
    lines = [head, "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in sorted(rows)), ""])


def page_with(text):
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


def test_the_list_is_complete():
    assert set(FAMILIES) == decorated_families()


def test_every_family():
    """Logits and gradients of eager, in one process and with `ep_group`; the table is current."""
    assert PAGE.read_text() == page_with(table()), "run this file to write the table anew"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
