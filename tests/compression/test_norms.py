"""What is found in gradients before they are sent, and how often a step reads them."""

import contextlib
import math

import pytest
import torch
from hook_models import Chooser, not_taken
from rank_checks import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ext.compression.codecs import Dense, Quantize, Threshold, TopK
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.gradients import compress_gradients
from moe_ext.compression.norms import presence_of
from moe_ext.compression.options import ResidualMonitor
from moe_ext.compression.state import CompressionState


@pytest.mark.parametrize("value", [1e-45, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 6000])
def test_marks_find_the_one_number_of_a_piece(value, place):
    flat = torch.zeros(20_000)
    flat[:7] = -0.0
    flat[7 + place] = value
    assert presence_of(flat, [7, 0, 9993, 10_000]).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_marks_of_nothing():
    assert presence_of(torch.empty(0), [0, 0]).tolist() == [0.0, 0.0]


def stack(codec, **options):
    """Two layers and their state."""
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(2)))
    return model, CompressionState(model=model, codec=codec, **options)


def fill(model, seed):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)


SPARSE = [
    TopK(0.1),
    TopK(0.1, scope="parameter"),
    TopK(0.1, momentum=0.5),
    Threshold(0.1),
    Threshold(0.1, momentum=0.5),
]


@pytest.mark.parametrize("codec", [*SPARSE, Quantize("int8"), Dense(), Dense("bf16")])
@pytest.mark.parametrize("every", [0, 1])
def test_what_overflows_only_with_what_is_owed_is_refused(codec, every):
    """Gradient and residual are finite; the parameter is named and nothing is changed."""
    plain = isinstance(codec, Dense)
    model, state = stack(
        TopK(0.1) if plain else codec, monitor=ResidualMonitor(every=every, limit=1e9)
    )
    for seed in range(2):
        fill(model, seed)
        assert compress_gradients(model, state)
    (memory,) = state.memory.memories.values()
    memory.pieces(memory._kept["residual"])[1].fill_(3e38)
    if plain:
        (part,) = next(iter(state._buckets)).parts
        part.codec = codec
    before = state.state_dict()
    fill(model, 2)
    model[1].weight.grad.fill_(3e38)
    not_taken(model, state, r"be finite, got NaN or infinity in 1\.weight on rank 0$")
    assert not model[0].weight.grad.any()
    assert_same_bits(state.state_dict(), before)


@pytest.mark.parametrize("codec", SPARSE)
def test_undo_and_a_failed_step_bring_back_what_was_read(codec):
    model, state = stack(codec)
    before = []
    for seed in range(3):
        before.append(state.state_dict())
        fill(model, seed)
        assert compress_gradients(model, state)
    after = state.state_dict()
    want = [p.grad.clone() for p in model.parameters()]
    fill(model, 5)
    model[0].weight.grad[3, 4] = math.nan
    not_taken(model, state, r"got NaN or infinity in 0\.weight on rank 0$")
    assert_same_bits(state.state_dict(), after)
    fill(model, 3)
    assert compress_gradients(model, state)
    state.undo()
    assert_same_bits(state.state_dict(), after)
    # The same bits as where every step works on copies.
    other_model, other = stack(codec)
    other.load_state_dict(before[2])
    fill(other_model, 2)
    assert compress_gradients(other_model, other)
    assert all(map(torch.equal, want, (p.grad for p in other_model.parameters())))


class Passes(TorchDispatchMode):
    """Operators that are given a vector of at least N elements."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        views = ("view", "split", "slice", "detach", "_unsafe_view", "reshape", "select", "narrow")
        name = func._schema.name.split("::")[1]
        if name not in views and any(x.numel() >= self.numel for x in tensors):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("codec", [TopK(0.01), Threshold(0.01)])
def test_a_step_passes_once_over_gradient_and_residual(codec):
    """No norm of the gradient, no copy of the residual: on CPU a step is made of such passes."""
    model = torch.nn.Linear(1000, 100, bias=False)
    state = CompressionState(model=model, codec=codec)
    (parameter,) = model.parameters()
    step, passes = None, Passes(parameter.numel())
    for seed in range(3):
        flat = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), passes if seed == 2 else contextlib.nullcontext():
            step = state.begin_step("compress_gradients")
            step.add([parameter], flat, state.group)
            assert step.finish()
    operator = "topk_compress_" if isinstance(codec, TopK) else "threshold_compress_"
    assert passes.found[:1] == ["index"]  # the first elements of the parameters
    assert passes.found[1] == operator
    assert set(passes.found[2:]) <= {"zero_", "add_pairs_", "empty_like"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_plain_reduction_passes_once_each_way(dtype):
    x = torch.full((1000,), 3e4)
    x[900] = math.inf
    heard, passes, memory = [], Passes(1000), CodecMemory([x.shape], x.device)
    with passes:
        found = Dense(dtype).start(x, memory, on_nonfinite=heard.append).wait()
    once_each_way = ["empty_like", "scale_into_", "scale_into_"]
    assert passes.found == (["scale_into_"] if dtype == "fp32" else once_each_way)
    assert found is x and bool(x[0].isnan()) and bool(x[900].isinf())
    assert len(heard) == 1


def test_a_step_is_timed_though_the_callback_comes_late(monkeypatch):
    """Nobody may measure a plain all-reduce to take no time, or not at all."""
    monkeypatch.setattr("moe_ext.compression.reducer.PartInStep.note_end", lambda part: None)
    model, chooser = torch.nn.Linear(200, 200, bias=False), Chooser()
    state = CompressionState(model=model, candidates=("none",), cost_model=chooser)
    model.weight.grad = torch.randn(200, 200)
    assert compress_gradients(model, state)
    ((seconds,),) = chooser.settled
    assert 1e-6 < seconds < 60.0


@pytest.mark.parametrize(
    ("factor", "rank", "reads"), [(1.0, 1, True), (0.5, 1, False), (1.0, 0, False)]
)
def test_a_quantiser_reads_what_is_owed_where_it_is_kept(factor, rank, reads):
    """Not in other units, nor where the shard is another one: these need a working copy."""
    memory, codec = CodecMemory([torch.Size([1024])], torch.device("cpu")), Quantize("int8", 64)
    for kept in codec._states(memory, 2, 1)[:2]:
        kept.copy_(torch.arange(kept.numel()))
    memory.commit()
    residual, server = memory.kept("residual"), memory.kept("server")
    memory.begin({"residual": factor, "server": factor})
    states = codec._states(memory, 2, rank)
    if reads:
        assert states.residual_in is residual
        assert states.server_residual_in is server
        memory.rollback()
        assert torch.equal(memory.kept("residual"), torch.arange(1024.0))
        return
    assert states.residual_in is None
    assert states.server_residual_in is None
    whole = residual.clone()
    if rank == 0:
        whole[512:] += server
    assert torch.equal(states.residual, factor * whole)
