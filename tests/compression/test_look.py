"""What is found in gradients before they are sent."""

import math

import pytest
import torch

from moe_ext.compression._look import _CHUNK, marks_of, not_finite, scaled
from moe_ext.compression.codecs import Dense
from moe_ext.compression.loop import compress_gradients
from moe_ext.compression.state import CompressionState


@pytest.mark.parametrize("value", [1e-45, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 6000])
def test_marks_find_the_one_number_of_a_piece(value, place):
    flat = torch.zeros(20_000)
    flat[:7] = -0.0
    flat[7 + place] = value
    assert marks_of(flat, [7, 0, 9993, 10_000]).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_marks_of_nothing():
    assert marks_of(torch.empty(0), [0, 0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 5, _CHUNK, 2 * _CHUNK + 3])
def test_scaled_has_the_bits_of_two_operators(dtype, numel):
    x = torch.randn(numel)
    want = x.to(dtype).mul_(1 / 3)
    found, finite = scaled(x, 1 / 3, dtype)
    assert finite
    assert torch.equal(found, want)
    assert (found is x) == (dtype == torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, _CHUNK - 1, _CHUNK, _CHUNK + 4])
def test_scaled_sees_what_is_not_finite(value, place):
    x = torch.ones(_CHUNK + 5)
    x[place] = value
    found, finite = scaled(x, 0.5, torch.float32)
    assert not finite
    assert not_finite(found.split([_CHUNK, 5])) == [int(place >= _CHUNK)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sum_with_what_is_owed_that_overflows_is_refused(dtype):
    """The gradient is finite, and so is the residual."""
    model = torch.nn.Linear(40, 40, bias=False)
    state = CompressionState(model=model, codec="int8")
    model.weight.grad = torch.full((40, 40), 1e30)
    assert compress_gradients(model, state)
    memory = next(iter(state.memory._groups.values()))
    memory._kept["residual"].fill_(3e38)
    for layout in state._layouts.values():
        layout.parts[0].codec = Dense(dtype)
    model.weight.grad = torch.full((40, 40), 3e38)
    with pytest.raises(ValueError, match="expected gradients to be finite, got .* in weight on"):
        compress_gradients(model, state)
    assert bool((state.residuals()["weight"] == 3e38).all())


class _Link:
    """A cost model that only listens."""

    def __init__(self):
        self.heard = []

    def choose(self, numel, codecs, *, bucket, current=None):
        return codecs[0]

    def observe(self, bucket, codec, seconds):
        self.heard.append(seconds)

    def pending(self):
        return []

    def settle(self, agreed=None):
        pass

    def explain(self):
        return ""


def test_a_step_is_timed_though_the_callback_comes_late(monkeypatch):
    """Nobody may measure a plain all-reduce to take no time, or not at all."""
    monkeypatch.setattr("moe_ext.compression._step._note_end", lambda underway: None)
    model, heard = torch.nn.Linear(200, 200, bias=False), _Link()
    state = CompressionState(model=model, codec="auto", cost_model=heard)
    model.weight.grad = torch.randn(200, 200)
    assert compress_gradients(model, state)
    assert len(heard.heard) == 1
    assert 1e-6 < heard.heard[0] < 60.0
