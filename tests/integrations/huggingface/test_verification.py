import pytest
import torch
from hf_models import RELATIVE, build, make_batch

import moe_ext
from moe_ext.integrations.huggingface.verification import VerifyReport


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_reports_and_restores(family, capsys):
    model = build(family)
    before = model.config._experts_implementation
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    state = torch.get_rng_state()
    report = moe_ext.verify(model, make_batch())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._experts_implementation == before
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert model.model.embed_tokens.weight.grad is None
    assert report.logits <= RELATIVE * report.logits_scale
    assert report.gradients.keys() == dict(model.named_parameters()).keys()
    for name, (difference, scale) in report.gradients.items():
        assert difference <= RELATIVE * scale, name
    assert "logits: max difference" in capsys.readouterr().out


@pytest.mark.parametrize("labels", [False, True])
def test_a_wrong_operator_shows(labels, monkeypatch, capsys):
    original = moe_ext.ops.unpermute_tokens
    monkeypatch.setattr(moe_ext.ops, "unpermute_tokens", lambda *a: 1.01 * original(*a))
    batch = make_batch()
    if not labels:
        del batch["labels"]
    report = moe_ext.verify(build("mixtral"), batch)
    assert report.logits > RELATIVE * report.logits_scale
    assert any(difference > 1e-3 * scale for difference, scale in report.gradients.values())
    assert "gradient of" in str(report)


def test_a_capacity_is_kept_and_shows(capsys):
    model, batch = build("mixtral"), make_batch()
    whole = model(**batch).logits
    moe_ext.replace(model, capacity_factor=0.5)
    dropped = model(**batch).logits
    report = moe_ext.verify(model, batch)
    assert torch.equal(model(**batch).logits, dropped)
    difference = (dropped - whole).abs().max().item()
    assert report.logits == pytest.approx(difference, rel=1e-3) and difference > 1e-3


def test_numbers_that_are_none_come_first():
    sizes = [5.0, 3.0, float("nan"), 7.0, 2.0, 4.0, 9.0, float("inf"), 8.0, 6.0]
    report = VerifyReport(0.0, 1.0, {f"p{i}": (size, 1.0) for i, size in enumerate(sizes)})
    shown = [line.split()[2] for line in str(report).splitlines()[1:-1]]
    assert shown == ["p2:", "p7:", "p6:", "p8:", "p3:"]
