"""A codec that is registered from outside trains like the others; two ranks, and one alone."""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from hook_models import Ledger, batch, local_gradients, looped, loss_of, sent_by, wrapped
from outside_codecs import Short
from rank_checks import Checks

from moe_ext.compression import (
    PayloadCodec,
    Policy,
    Quantize,
    Threshold,
    TopK,
    TwoOfFour,
    codec_of,
    compress_gradients,
    flush,
    register_codec,
)
from moe_ext.compression.codecs import registry
from moe_ext.compression.feedback import committing
from moe_ext.distributed import count_traffic


@dataclass(frozen=True)
class Loudest(PayloadCodec):
    """Sends the largest of every eight elements, and which one it is."""

    name: ClassVar[str] = "loudest"
    shardable: ClassVar[bool] = False

    def payload_bytes(self, numel):
        return 5 * -(-numel // 8)

    def encode(self, x_N, residual_N=None, *, rng_state=None):
        whole_N = x_N.float() if residual_N is None else x_N + residual_N
        rows = torch.nn.functional.pad(whole_N, (0, -whole_N.numel() % 8)).view(-1, 8)
        place = rows.abs().argmax(dim=1, keepdim=True)
        value = rows.gather(1, place)
        if residual_N is not None:
            residual_N.copy_(rows.scatter(1, place, 0.0).view(-1)[: whole_N.numel()])
        return torch.cat([value.view(-1).view(torch.uint8), place.view(-1).to(torch.uint8)])

    def decode_add_(self, out_N, payload):
        rows = payload.numel() // 5
        value, place = payload[: 4 * rows].view(torch.float32), payload[4 * rows :].long()
        found = value.new_zeros(rows, 8).scatter_(1, place[:, None], value[:, None])
        out_N += found.view(-1)[: out_N.numel()]


@dataclass(frozen=True)
class Careless(Short):
    """The same with payloads of another length or type than it says."""

    more: int = 0
    dtype: torch.dtype = torch.uint8
    shardable: bool = True

    def payload_bytes(self, numel):
        return super().payload_bytes(numel) + self.more

    def encode(self, x_N, residual_N=None, *, rng_state=None):
        return super().encode(x_N, residual_N, rng_state=rng_state).view(self.dtype)


@dataclass(frozen=True)
class Forgetful(Short):
    """The same without error feedback."""

    name: ClassVar[str] = "forgetful"
    feeds_back: ClassVar[bool] = False


for made in (Short, Loudest, Forgetful):
    register_codec(made.name, lambda density, made=made: made())
register_codec("one_scale", lambda density: Quantize("int3", block=None))
NAMES = ("short", "loudest", "forgetful", "int3", "one_scale")
WRONG = [(-2, torch.uint8), (32, torch.uint8), (0, torch.int8), (0, torch.bfloat16)]
two = Checks()


# The hook takes formats as it takes codecs from outside.
@two(*[(name, True) for name in NAMES[:3]], *[(name, False) for name in NAMES])
def trains(name, hooked):
    policy = Policy(name, dense_below=0, bias=None, norm=None)
    run, state = wrapped(policy=policy) if hooked else looped(name)
    ledger, losses = Ledger(state, state.model), []
    optimizer = torch.optim.SGD(run.parameters(), 0.05)
    for step in range(8):
        local = local_gradients(state.model, 0)
        optimizer.zero_grad()
        loss = loss_of(run, batch(0))
        with count_traffic() as traffic:
            loss.backward()
            assert hooked or compress_gradients(run, state)
        assert bool(state.residuals()) == (name != "forgetful")
        if step == 7:
            flush(run, state)
        ledger.add(local)
        if name != "forgetful":
            ledger.check()
        optimizer.step()
        losses.append(float(loss))
    assert not state.residuals() and not state.state_dict()["memory"]["layouts"]
    assert losses[-1] < 0.7 * losses[0], losses
    assert 0 < traffic.total_bytes < 4 * sum(p.numel() for p in run.parameters())


@two(*[(name,) for name in NAMES])
def costs_what_it_says(name):
    codec, grad = codec_of(name), torch.randn(1000)
    _, sent = sent_by(codec, grad)
    assert sent == codec.sent_bytes(1000, dist.get_world_size())
    for call in codec.rehearsal(grad, codec.new_memory(grad)):
        call()
    assert codec.num_rounds(1) == 0 < codec.num_rounds(2)


@two()
def a_codec_that_refuses_to_encode_leaves_ranks_in_step():
    codec = TwoOfFour("fp32")
    with pytest.raises(ValueError, match="TwoOfFour: expected two of four"):
        codec.start(torch.ones(1000), codec.new_memory(torch.ones(1000))).wait()
    grad = torch.tensor([1.0, 0.0]).repeat(500) * (1.0 + dist.get_rank())
    found = codec.start(grad.clone(), codec.new_memory(grad)).wait()
    assert torch.equal(found, torch.tensor([1.5, 0.0]).repeat(500))


@two(*[(shardable, *wrong) for shardable in (True, False) for wrong in WRONG])
def payloads_that_are_not_as_they_say_are_refused(shardable, more, dtype):
    """And the next step is as if nothing had been."""
    options = {"more": more, "dtype": dtype, "shardable": shardable}
    text = r"Careless: expected encode to give uint8 of shape \(\d+,\), as payload_bytes says, got "
    for codec in (Careless(**options), Short()):
        grad = torch.full((1000,), 1.0 + dist.get_rank())
        is_wrong = isinstance(codec, Careless)
        refused = pytest.raises(ValueError, match=text) if is_wrong else contextlib.nullcontext()
        with refused:
            found = codec.start(grad, codec.new_memory(grad)).wait()
    assert torch.equal(found, torch.full((1000,), 1.5))


@pytest.mark.parametrize(
    "codec", [TopK(0.05), TopK(0.05, value_codec="int3"), Threshold(0.05), Quantize("int2")]
)
def test_payloads_alone_lose_nothing(codec):
    """One protocol: what is decoded plus what is kept is the gradient plus what was owed."""
    x, owed = torch.randn(1000), torch.randn(1000)
    residual, found = owed.clone(), torch.zeros(1000)
    payload = codec.encode(x, residual)
    assert payload.dtype == torch.uint8 and payload.numel() == codec.payload_bytes(1000)
    codec.decode_add_(found, payload)
    # One rounding of each sum, of numbers below 8.
    assert (found + residual - (x + owed)).abs().max() <= 2 * 8 * 2.0**-24
    assert codec.needs_feedback == isinstance(codec, (TopK, Threshold))
    if codec.needs_feedback:
        assert found.count_nonzero() <= 50 and found.abs().max() > 2


test_two_ranks = two.test(2)


def test_alone_everything_is_applied():
    for name in NAMES:
        codec, grad = codec_of(name), torch.randn(100)
        memory = codec.new_memory(grad)
        with committing(memory):
            assert torch.equal(codec.start(grad.clone(), memory).wait(), grad)
        assert memory.whole("residual") is None or not memory.whole("residual").any()


@pytest.mark.parametrize("name", ["int8", "short", "auto"])
def test_names_are_taken_once(name):
    with pytest.raises(ValueError, match=f"expected name to be a new one, got '{name}'"):
        register_codec(name, lambda density: Short())


def test_a_factory_that_makes_no_codec(monkeypatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    register_codec("none_at_all", lambda density: "int8")
    text = "codec_of: expected codec 'none_at_all' to be made as a codec by its factory, got 'int8'"
    with pytest.raises(ValueError, match=text):
        codec_of("none_at_all")
