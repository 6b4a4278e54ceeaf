import pytest
import torch
from moe_lm.model import ModelConfig, MoELanguageModel, count_parameters, init_weights, sample

CONFIG = ModelConfig(
    model_dim=16, num_layers=3, num_heads=2, ffn_dim=8, num_experts=4, top_k=2, seq_len=12
)
pytestmark = pytest.mark.usefixtures("process_group")


def make_model(config=CONFIG, seed=0):
    model = MoELanguageModel(
        config, ep_group=None, balance_loss_coef=0.01, z_loss_coef=0.0, capacity_factor=None
    )
    init_weights(model, seed)
    return model


def test_a_byte_does_not_see_the_bytes_after_it():
    model = make_model()
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_positions_matter():
    model = make_model()
    first = model(torch.tensor([[65, 66, 67]]))
    swapped = model(torch.tensor([[66, 65, 67]]))
    assert not torch.allclose(first[:, -1], swapped[:, -1])


def test_attention_depends_on_relative_positions_alone():
    attention = make_model().blocks[0].attention
    q = torch.randn(8).expand(1, 2, 12, 8)
    k = torch.randn(8).expand(1, 2, 12, 8)
    ids = torch.arange(12)
    scores = attention._rotate(q, ids) @ attention._rotate(k, ids).transpose(-1, -2)
    torch.testing.assert_close(scores[..., 5, 2], scores[..., 9, 6])
    assert not torch.allclose(scores[..., 5, 2], scores[..., 5, 3])


def test_every_parameter_gets_a_gradient():
    model = make_model()
    model(torch.randint(256, (4, 12))).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = make_model().state_dict()
    torch.manual_seed(2)
    second = make_model().state_dict()
    other = make_model(seed=1).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert weight.ndim == 1 or not torch.equal(weight, other[name])
    experts = first["blocks.0.ffn.experts.down_proj"]
    assert not torch.equal(experts[0], experts[1])


def test_moe_every_counts_from_the_last_block():
    model = make_model(ModelConfig(**{**vars(CONFIG), "moe_every": 2}))
    kinds = [type(block.ffn).__name__ for block in model.blocks]
    assert kinds == ["MoELayer", "DenseFFN", "MoELayer"]
    assert len(model.moe_layers()) == 2
    model(torch.randint(256, (2, 12)))
    kept = make_model(ModelConfig(**{**vars(CONFIG), "moe_every": 2}))
    kept.keep([range(1, 3)])
    assert len(kept.moe_layers()) == 1 and not list(kept.embedding.parameters())
    tokens = torch.randint(256, (2, 12))
    half = model(tokens, stage=range(1))
    assert torch.equal(kept(half, stage=range(1, 3)), model(tokens))


def test_parameter_counts():
    model = make_model()
    total, active = count_parameters(model)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert active == total - 3 * (4 - 2) * (3 * 8 * 16)


def continued(model, prompt, **options):
    where = {"seq_len": CONFIG.seq_len, "device": torch.device("cpu")}
    return sample(model, prompt, **options, **where)


def test_sample_continues_the_prompt_beyond_the_window():
    model = make_model()
    text = continued(model, b"def ", num_bytes=20, seed=0, temperature=1.0)
    assert text.startswith(b"def ") and len(text) == 24
    assert text == continued(model, b"def ", num_bytes=20, seed=0, temperature=1.0)
    assert text != continued(model, b"def ", num_bytes=20, seed=1, temperature=1.0)


def test_cold_samples_are_the_most_likely_bytes():
    model = make_model()
    text = continued(model, b"de", num_bytes=1, seed=0, temperature=1e-4)
    assert text[-1] == int(model(torch.tensor([[100, 101]]))[0, -1].argmax())
