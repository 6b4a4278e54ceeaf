import sys

import pytest
import torch
from hf_models import (
    NUM_BLOCKS,
    assert_near,
    assert_near_each,
    assert_same_state,
    build,
    families,
    make_batch,
    run,
    transformers,
)

import moe_ext
from moe_ext.integrations.huggingface import replacement


@pytest.fixture
def batch():
    return make_batch()


def assert_same_pass(model, batch, **kwargs):
    """Logits, losses and all gradients of the model before and after `replace`."""
    model.set_experts_implementation("eager")
    want, want_grads = run(model, batch, **kwargs)
    assert moe_ext.replace(model) == NUM_BLOCKS
    assert model.config._experts_implementation == "moe_ext"
    got, grads = run(model, batch, **kwargs)
    assert_near(got.logits, want.logits)
    assert_near(got.loss, want.loss)
    assert_near_each(grads, want_grads)
    return got, want, grads


@families
def test_equals_eager(family, batch):
    model = build(family)
    got, want, grads = assert_same_pass(model, batch, output_router_logits=True)
    assert grads.keys() == dict(model.named_parameters()).keys()
    for name, gradient in grads.items():
        assert gradient.any(), name
    # DeepSeek's classes have no auxiliary loss.
    if "deepseek" not in family:
        assert_near(got.aux_loss, want.aux_loss)
        assert len(got.router_logits) == len(want.router_logits) == NUM_BLOCKS
        for a, b in zip(got.router_logits, want.router_logits, strict=True):
            assert_near(a, b)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "relu", "relu2", "tanh"])
def test_other_activations(family, hidden_act, batch):
    assert_same_pass(build(family, hidden_act=hidden_act), batch)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5}),
        ("gpt_oss", {"swiglu_limit": 7.0, "swiglu_alpha": 1.0}),
        ("mixtral", {"router_jitter_noise": 0.3}),
        ("phimoe", {"input_jitter_noise": 0.3}),
        ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 1}),
    ],
    ids=str,
)
def test_options_of_a_family(family, options, batch):
    assert_same_pass(build(family, **options).train(), batch)


# In float32 a rounding flips the choice between two close experts now and then, and a flip moves
# the loss by up to a thousandth: transformers' own implementations differ by as much among
# themselves. In float64 nothing flips, and what is left is the float32 of the routers' softmax.
@families
def test_the_same_losses(family, batch):
    curves = []
    for replaced in (False, True):
        model = build(family).double().train()
        model.set_experts_implementation("eager")
        if replaced:
            moe_ext.replace(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        torch.manual_seed(3)
        for _ in range(15):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    eager, ours = curves
    assert eager[-1] < 0.8 * eager[0]
    torch.testing.assert_close(ours, eager, rtol=1e-6, atol=0)


@families
def test_it_is_our_operators_that_run(family, batch, monkeypatch):
    calls = []
    original = moe_ext.ops.permute_tokens
    monkeypatch.setattr(
        moe_ext.ops, "permute_tokens", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    model = build(family)
    model(**batch)
    assert not calls
    moe_ext.replace(model)
    model(**batch)
    assert len(calls) == NUM_BLOCKS
    model.set_experts_implementation("eager")
    model(**batch)
    assert len(calls) == NUM_BLOCKS


@families
def test_parameters_and_saved_files_are_untouched(family, batch, tmp_path):
    model = build(family)
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
    # transformers keeps no implementation in the file.
    plain = type(model).from_pretrained(tmp_path / "after")
    assert plain.config._experts_implementation != "moe_ext"
    loaded = type(model).from_pretrained(tmp_path / "after", experts_implementation="moe_ext")
    assert loaded.config._experts_implementation == "moe_ext"
    assert_same_state(loaded.state_dict(), model.state_dict())
    # Weights read from a file lie at any multiple of 8 bytes, where the linear layers of some
    # processors sum in another order: a copy lies as those that torch allocates.
    for parameter in loaded.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


@families
def test_gradient_checkpointing(family, batch):
    model = build(family).train()
    moe_ext.replace(model)
    want, want_grads = run(model, batch)
    model.gradient_checkpointing_enable()
    got, grads = run(model, batch)
    assert torch.equal(got.logits, want.logits)
    assert_near_each(grads, want_grads)


@families
def test_generate_and_bfloat16(family, batch):
    model = build(family).bfloat16().eval()
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


@pytest.mark.parametrize(
    ("family", "jitter"),
    [("mixtral", {"router_jitter_noise": 0.2}), ("phimoe", {"input_jitter_noise": 0.2})],
)
def test_jitter_leaves_the_input_of_a_block_alone(family, jitter):
    model = build(family, **jitter).train()
    block = model.model.layers[0].mlp
    x = torch.randn(2, 3, 32)
    model.set_experts_implementation("eager")
    mutated = x.clone()
    torch.manual_seed(0)
    want = block(mutated)
    assert not torch.equal(mutated, x), "transformers mends this itself: the hook can go"
    moe_ext.replace(model)
    assert moe_ext.replace(model) == NUM_BLOCKS  # again is harmless
    for call in (lambda: block(x), lambda: block(hidden_states=x)):
        kept = x.clone()
        torch.manual_seed(0)
        got = call()
        assert torch.equal(x, kept)
        assert_near(got, want)


def test_models_without_decorated_experts_are_refused():
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    none = r"got none in LlamaForCausalLM: set_experts_implementation changes nothing there"
    with pytest.raises(ValueError, match=r"replace: .*use_experts_implementation, " + none):
        moe_ext.replace(llama)
    with pytest.raises(ValueError, match=r"verify: .*use_experts_implementation, " + none):
        moe_ext.verify(llama, {})
    with pytest.raises(ValueError, match=r"model to be a transformers model, got Linear"):
        moe_ext.replace(torch.nn.Linear(2, 2))


def changed(**changes):
    """A change to the config of a model."""
    return lambda model: [setattr(model.config, name, value) for name, value in changes.items()]


def set_flag(model):
    model.model.layers[1].mlp.experts.has_low_rank = True


def quantise(model):
    experts = model.model.layers[1].mlp.experts
    weight = torch.nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    experts.down_proj = weight


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        (
            "mixtral",
            changed(quantization_config={"quant_method": "fp8"}),
            r"expected a model that is not quantised, got \{'quant_method': 'fp8'\}",
        ),
        ("olmoe", quantise, r"expected model.layers.1.mlp.experts.down_proj to be floating point"),
        (
            "deepseek_v2",
            lambda model: setattr(model.model.layers[1].mlp.experts, "num_experts", 4),
            r"expected model.layers.1.mlp.experts.gate_up_proj to be stacked over 4 experts in 3 "
            r"dimensions, got \[8, 24, 32\]",
        ),
        (
            "qwen2_moe",
            set_flag,
            r"expected the flags of model.layers.1.mlp.experts .*, got has_low_rank=True",
        ),
        (
            "gpt_oss",
            lambda model: setattr(model, "_use_kernels", True),
            r"expected use_kernels=False",
        ),
        (
            "phimoe",
            lambda model: setattr(model.model.layers[1].mlp, "experts", torch.nn.Linear(2, 2)),
            r"expected model.layers.1.mlp.experts to be of a class that .*, got Linear",
        ),
    ],
    # The names of functions hold addresses, and every worker must find the same cases.
    ids=lambda value: value if isinstance(value, str) else "model",
)
def test_a_refusal_changes_nothing(family, change, text):
    model = build(family)
    before = model.config._experts_implementation
    change(model)
    with pytest.raises(ValueError, match="replace: " + text):
        moe_ext.replace(model)
    assert model.config._experts_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_group_that_is_none_is_refused():
    model = build("mixtral")
    with pytest.raises(TypeError, match=r"replace: expected ep_group to be None or a ProcessGroup"):
        moe_ext.replace(model, ep_group=object())


def test_an_error_midway_puts_the_model_back(monkeypatch):
    def fail(*args):
        raise MemoryError("no room")

    model = build("mixtral")
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(replacement, "register", fail)
    with pytest.raises(MemoryError, match="no room"):
        moe_ext.replace(model)
    assert model.config._experts_implementation == "grouped_mm"


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"expected transformers 5 or later to be installed"):
        moe_ext.replace(torch.nn.Linear(2, 2))
