import sys

import pytest
import torch

import moe_ext

transformers = pytest.importorskip("transformers", minversion="5.0")

# Eager sums each token's K expert outputs by adding in the order of the experts, and weight
# gradients in another order than a grouped product: differences of a few roundings of float32
# (6e-8) on the largest element of a tensor, which four layers of norms and softmax multiply by
# about ten.
RELATIVE = 1e-5


def mixtral(**kwargs):
    options = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        **kwargs,
    }
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


def qwen3(**kwargs):
    options = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        **kwargs,
    }
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options))


FAMILIES = pytest.mark.parametrize("build", [mixtral, qwen3], ids=["mixtral", "qwen3_moe"])


@pytest.fixture
def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (2, 19))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def run(model, batch, **kwargs):
    model.zero_grad()
    output = model(**batch, **kwargs)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_near(got, want):
    atol = RELATIVE * float(want.detach().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@FAMILIES
@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "tanh"])
def test_equals_eager(build, hidden_act, batch):
    model = build(hidden_act=hidden_act)
    model.set_experts_implementation("eager")
    want, want_grads = run(model, batch, output_router_logits=True)
    assert moe_ext.replace(model) == 2
    got, grads = run(model, batch, output_router_logits=True)
    assert model.config._experts_implementation == "moe_ext"
    assert_near(got.logits, want.logits)
    assert_near(got.loss, want.loss)
    assert_near(got.aux_loss, want.aux_loss)
    assert len(got.router_logits) == len(want.router_logits) == 2
    for a, b in zip(got.router_logits, want.router_logits, strict=True):
        assert_near(a, b)
    assert grads.keys() == want_grads.keys()
    for name, gradient in grads.items():
        assert want_grads[name].any(), name
        assert_near(gradient, want_grads[name])


@FAMILIES
def test_it_is_our_operators_that_run(build, batch, monkeypatch):
    calls = []
    original = moe_ext.ops.permute_tokens
    monkeypatch.setattr(
        moe_ext.ops, "permute_tokens", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    model = build()
    model(**batch)
    assert not calls
    moe_ext.replace(model)
    model(**batch)
    assert len(calls) == 2
    model.set_experts_implementation("eager")
    model(**batch)
    assert len(calls) == 2


@FAMILIES
def test_parameters_and_saved_files_are_untouched(build, batch, tmp_path):
    model = build()
    names = list(model.state_dict())
    objects = list(map(id, model.parameters()))
    model.save_pretrained(tmp_path / "before")
    moe_ext.replace(model)
    assert list(model.state_dict()) == names
    assert list(map(id, model.parameters())) == objects
    model.save_pretrained(tmp_path / "after")
    for name in ("model.safetensors", "config.json"):
        before, after = (tmp_path / when / name for when in ("before", "after"))
        assert before.read_bytes() == after.read_bytes()
    loaded = type(model).from_pretrained(tmp_path / "after", experts_implementation="moe_ext")
    assert loaded.config._experts_implementation == "moe_ext"
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@FAMILIES
def test_gradient_checkpointing(build, batch):
    model = build().train()
    moe_ext.replace(model)
    want, want_grads = run(model, batch)
    model.gradient_checkpointing_enable()
    got, grads = run(model, batch)
    assert torch.equal(got.logits, want.logits)
    for name, gradient in grads.items():
        assert_near(gradient, want_grads[name])


@FAMILIES
def test_generate_and_bfloat16(build, batch):
    model = build().bfloat16().eval()
    model.set_experts_implementation("eager")
    want = model(**batch).logits.float()
    moe_ext.replace(model)
    got = model(**batch).logits
    assert got.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits, and two to three layers round in another order.
    torch.testing.assert_close(
        got.float(), want, rtol=0, atol=0.03 * float(want.detach().abs().max())
    )
    ids = model.generate(batch["input_ids"][:1, :4], max_new_tokens=3, do_sample=False)
    assert ids.shape[1] <= 7


@FAMILIES
def test_verify_reports_and_restores(build, batch, capsys):
    model = build()
    before = model.config._experts_implementation
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    state = torch.get_rng_state()
    report = moe_ext.verify(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._experts_implementation == before
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert model.model.embed_tokens.weight.grad is None
    assert report.logits <= RELATIVE * report.logits_scale
    assert report.gradients.keys() == dict(model.named_parameters()).keys()
    for name, (difference, scale) in report.gradients.items():
        assert difference <= RELATIVE * scale, name
    assert "logits: max difference" in capsys.readouterr().out


def test_other_models_are_refused_by_name():
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"family mixtral or qwen3_moe, got 'llama'"):
        moe_ext.replace(llama)
    with pytest.raises(ValueError, match=r"family mixtral or qwen3_moe, got Linear"):
        moe_ext.replace(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"verify: expected .*, got 'llama'"):
        moe_ext.verify(llama, {})


def test_a_refusal_changes_nothing():
    model = mixtral()
    before = model.config._experts_implementation
    with pytest.raises(ValueError, match=r"expected ep_group to be None in this version"):
        moe_ext.replace(model, ep_group=object())
    model.model.layers[1].mlp.experts = torch.nn.Linear(2, 2)
    text = r"expected model.layers.1.mlp.experts to be a plain MixtralExperts, got Linear"
    with pytest.raises(ValueError, match=text):
        moe_ext.replace(model)
    assert model.config._experts_implementation == before


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"expected transformers 5 or later to be installed"):
        moe_ext.replace(torch.nn.Linear(2, 2))
