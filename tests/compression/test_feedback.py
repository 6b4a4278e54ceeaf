"""What is owed is conserved, whatever becomes of its grouping; one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_ext.compression import (
    BlockSparse,
    ChunkedTopK,
    CodecMemory,
    CompressionState,
    Dense,
    OneBit,
    Outliers,
    Policy,
    PowerSGD,
    Quantize,
    Threshold,
    TopK,
    codec_of,
    compress_gradients,
    flush,
)
from moe_ext.compression.feedback import FeedbackStore, by_name
from moe_ext.compression.state import merged_for

CODECS = [
    Dense(),
    Quantize("int8", 64),
    Quantize("int4", 64),
    Quantize("fp8", 128, stochastic=True),
    OneBit(64),
    TopK(0.0),
    TopK(0.1),
    TopK(0.1, scope="parameter"),
    TopK(0.3, scope="row"),
    TopK(0.2, scope=7),
    TopK(1.0),
    Threshold(0.1),
    BlockSparse("row"),
]


class Few(nn.Module):
    """Parameters of some shapes."""

    def __init__(self, shapes):
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))


SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 40)) | st.tuples(st.integers(1, 70)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(
    shapes=SHAPES,
    codecs=st.lists(st.sampled_from(CODECS), min_size=2, max_size=4),
    scale=st.sampled_from([1.0, 1e-20, 1e10, 0.0]),
    seed=st.integers(0, 2**31),
)
def test_applied_and_owed_are_what_was_given(shapes, codecs, scale, seed):
    """The codec changes from step to step; what another one owed is sent or kept."""
    torch.manual_seed(seed)
    model = Few(shapes)
    names = dict(model.named_parameters())
    given_, applied = ({n: torch.zeros_like(p).double() for n, p in names.items()} for _ in "12")
    saved = None
    for step in range(5):
        policy = Policy(codecs[step % len(codecs)], bias=None, dense_below=0)
        state = CompressionState(model=model, policy=policy)
        if saved is not None:
            state.load_state_dict(saved)
        for name, p in names.items():
            p.grad = torch.randn(p.shape) * scale
            p.grad[torch.rand(p.shape) < 0.3] = 0.0
            given_[name] += p.grad.double()
        compress_gradients(model, state)
        if step == 4:
            flush(model, state)
            assert not state.residuals()
        for name, p in names.items():
            applied[name] += p.grad.double()
        saved = state.state_dict()
        owed = by_name(saved["memory"])
        for name in names:
            left = owed.get(name, {}).get("residual", torch.zeros(1))
            bound = 1e-6 * (step + 1) * (scale * 6 * (step + 1)) + 1e-44
            assert (applied[name] + left - given_[name]).abs().max() <= bound, (step, name)


def filled(groups, rank, size, seed, server=True):
    """A memory with residuals in the groups, and a shard of each group's sum."""
    generator = torch.Generator().manual_seed(seed + rank)
    memory = FeedbackStore()
    for names, shapes in groups:
        part = memory.group(names, [torch.Size(s) for s in shapes], torch.device("cpu"), 0)
        part.begin(units={"rate": 0.5})
        part.tensor("residual").copy_(torch.randn(part.numel, generator=generator))
        if server:
            shard = -(-part.numel // (size * 64)) * 64
            part.server_start = rank * shard
            part.tensor("server", shard).copy_(torch.randn(shard, generator=generator))
            # What lies past the end is padding, and nobody owes it.
            part.tensor("server")[max(0, part.numel - part.server_start) :] = 0.0
    memory.commit()
    return memory


def groups_of(shapes, cuts):
    names = [f"p{i}" for i in range(len(shapes))]
    bounds = sorted({0, len(shapes), *(c % len(shapes) for c in cuts)})
    spans = list(zip(bounds, bounds[1:], strict=False))
    return [(tuple(names[a:b]), shapes[a:b]) for a, b in spans]


def total_owed(memories):
    total = {}
    for memory in memories:
        for name, kinds in by_name(memory).items():
            known = total.get(name)
            value = kinds["residual"].double()
            total[name] = value if known is None else known + value
    return total


def assert_total(got, want, factor=1.0):
    assert set(got) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value * factor, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    shapes=SHAPES,
    before=st.lists(st.integers(0, 9), max_size=3),
    after=st.lists(st.integers(0, 9), max_size=3),
    size=st.integers(1, 4),
    reload=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_regrouping_conserves(shapes, before, after, size, reload, seed):
    groups = groups_of(shapes, before)
    memories = [filled(groups, rank, size, seed) for rank in range(size)]
    want = total_owed([m.state_dict() for m in memories])
    for memory in memories:
        if reload:
            state = memory.state_dict()
            memory.load_state_dict(state)
        frozen = memory.state_dict()
        for names, part_shapes in groups_of(shapes, after):
            parts = [torch.Size(s) for s in part_shapes]
            memory.group(names, parts, torch.device("cpu"), 0)
        if seed % 3 == 0:
            # A step that fails takes the grouping back, bit for bit.
            assert memory.rollback() or groups_of(shapes, after) == groups
            assert repr(memory.state_dict()) == repr(frozen)
        else:
            memory.commit()
    assert_total(total_owed([m.state_dict() for m in memories]), want)


def saved_state(rank, world_size, memory, average=True, expert_parallel=None):
    """A state of a rank, as `CompressionState.state_dict` returns it."""
    return {
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "average": average,
        "step": 3,
        "expert_parallel": expert_parallel or {},
        "memory": memory.state_dict(),
    }


@settings(max_examples=40, deadline=None)
@given(
    shapes=SHAPES,
    cuts=st.lists(st.integers(0, 9), max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    average=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_other_numbers_of_ranks_conserve(shapes, cuts, sizes, average, seed):
    first = range(sizes[0])
    memories = [filled(groups_of(shapes, cuts), rank, sizes[0], seed) for rank in first]
    states = [saved_state(rank, sizes[0], memories[rank], average) for rank in first]
    want = total_owed([state["memory"] for state in states])
    for size in sizes[1:]:
        states = [merged_for(states[::-1], rank, size, {}, average) for rank in range(size)]
    factor = sizes[-1] / sizes[0] if average else 1.0
    assert_total(total_owed([state["memory"] for state in states]), want, factor)
    assert all(state["memory"]["marks"]["p0"] == {"rate": 0.5} for state in states)


@pytest.mark.parametrize("size", [2, 8])
def test_experts_go_to_ranks_with_the_same_ones(size):
    """Four ranks, experts over two: every replica takes over the mean of what is owed."""
    names, states = ("p0", "p1"), []
    for rank in range(4):
        memory = FeedbackStore()
        part = memory.group(names, [torch.Size([3])] * 2, torch.device("cpu"), 0)
        part.begin()
        part.tensor("residual").fill_(1.0 + rank)
        memory.commit()
        held = {name: (rank % 2, 2) for name in names}
        states.append(saved_state(rank, 4, memory, expert_parallel=held))
    for rank in range(size):
        mine = {name: (rank % 2, 2) for name in names}
        merged = merged_for(states, rank, size, mine, True)
        want = 2.0 if rank % 2 == 0 else 3.0
        assert torch.equal(merged["memory"]["residual"]["p0"], torch.full((3,), want))
    for ep_size, mine in ((4, {"p0": (0, 4)}), (1, {})):
        message = f"expert-parallel groups of {ep_size} ranks, got 2 for p0"
        with pytest.raises(ValueError, match=message):
            merged_for(states, 0, size, mine, True)
    for one in (states[0], states):
        with pytest.raises(ValueError, match="of average=False, got one of average=True"):
            CompressionState(average=False).load_state_dict(one)


def test_experts_that_every_rank_holds_are_divided_over_one():
    model = Few([(20, 40)])
    state = CompressionState(model=model, policy=Policy(TopK(0.1), dense_below=0))
    model.p0.grad = torch.randn(20, 40)
    compress_gradients(model, state)
    states = [{**state.state_dict(), "rank": rank, "world_size": 2} for rank in range(2)]
    owed = state.residuals()["p0"]
    for held in ({}, {"p0": (0, 1)}):
        told = [{**s, "expert_parallel": held} for s in states]
        for merged in (merged_for(told, 0, 1, {}, True), merged_for(states, 0, 1, held, True)):
            assert torch.equal(merged["memory"]["residual"]["p0"], owed)


def test_a_saved_state_is_not_written_to():
    model = Few([(20, 40)])
    policy = Policy(Threshold(0.1), dense_below=0)
    saved, found = None, []
    for _ in range(2):
        torch.manual_seed(0)
        state = CompressionState(model=model, policy=policy)
        if saved is not None:
            state.load_state_dict(saved)
        for _ in range(3):
            model.p0.grad = torch.randn(20, 40)
            compress_gradients(model, state)
        saved = saved or state.state_dict()
        found.append(saved["memory"]["layouts"][0]["tensors"]["threshold"].clone())
    assert torch.equal(*found)


def test_states_that_do_not_belong_together():
    state = CompressionState(codec="int8").state_dict()
    load = CompressionState(codec="int8").load_state_dict
    with pytest.raises(ValueError, match="states of all ranks, got none"):
        load([])
    with pytest.raises(ValueError, match="version 1, got 7"):
        load({**state, "version": 7})
    with pytest.raises(ValueError, match="each once, got"):
        load([{**state, "world_size": 2}])
    two = [{**state, "world_size": 2, "rank": r, "step": r} for r in range(2)]
    with pytest.raises(ValueError, match=r"got those of steps \[0, 1\]"):
        load(two)
    wrong = CompressionState(codec="int8").state_dict()
    wrong["memory"]["residual"] = {"parameter_0": torch.zeros(3)}
    model = nn.Linear(40, 40)
    state = CompressionState(codec="int8")
    state.load_state_dict(wrong)
    model(torch.ones(1, 40)).sum().backward()
    with pytest.raises(ValueError, match=r"residual of parameter_0 to be of shape \(40, 40\)"):
        compress_gradients(model, state)


def test_a_step_that_fails_in_memory():
    memory = CodecMemory([torch.Size([5]), torch.Size([2, 3])], torch.device("cpu"), key=3, seed=9)
    memory.begin()
    memory.tensor("residual").add_(1.0)
    memory.commit()
    kept = memory.copy_of("residual")
    memory.begin({"residual": 0.5})
    assert torch.equal(memory.tensor("residual"), kept * 0.5)
    memory.tensor("residual").add_(1.0)
    memory.carry("regions", lambda: [1], list).append(2)
    memory.rollback()
    assert torch.equal(memory.copy_of("residual"), kept)
    assert memory.carry("regions", lambda: [], list) == []
    memory.begin()
    memory.tensor("residual").add_(7.0)
    memory.commit()
    memory.undo()
    assert torch.equal(memory.copy_of("residual"), kept)
    memory.undo()
    assert torch.equal(memory.copy_of("residual"), kept)
    assert memory.rng_state(4, 2).tolist() == [9, 3, 4, 2]
    assert [tuple(p.shape) for p in memory.pieces(kept)] == [(5,), (2, 3)]


def owing():
    """Of 10 elements, with the shard of the sum from the seventh on, two of them padding."""
    memory = CodecMemory([torch.Size([10])], torch.device("cpu"))
    memory.begin(units={"rate": 1.0})
    memory.tensor("residual").copy_(torch.arange(10.0))
    memory.tensor("server", 6).fill_(100.0)
    memory.server_start = 6
    memory.commit()
    return memory


@pytest.mark.parametrize("opened", [False, True])
def test_what_a_dense_step_takes_is_owed_no_more(opened):
    memory, owed = owing(), torch.arange(10.0) + 100.0 * (torch.arange(10) >= 6)
    for keeps in (False, True):
        memory.begin({"residual": 0.5, "server": 0.5})
        if opened:
            memory.tensor("residual")
        grad = torch.ones(10)
        assert memory.take_owed(grad) and torch.equal(grad, 1.0 + 0.5 * owed)
        assert not memory.take_owed(grad) or opened
        assert torch.equal(grad, 1.0 + 0.5 * owed)
        assert memory.is_taken("residual") != opened and not memory.tensor("residual").any()
        memory.commit() if keeps else memory.rollback()
        # Bit for bit as it was, until the step is kept.
        assert torch.equal(memory.whole("residual"), owed * (not keeps))
    memory.undo()
    assert torch.equal(memory.whole("residual"), owed)


def test_a_dense_step_forgets_the_residual():
    for codec in (Dense(), Dense("bf16"), BlockSparse(4), Quantize("int8", 64, feedback=False)):
        memory = owing()
        memory.begin()
        result = codec.start(torch.ones(10), memory).wait()
        assert torch.equal(result.float(), 1.0 + owing().whole("residual"))
        memory.commit()
        assert memory.kinds() == [] and not memory.has("residual")
        memory.undo()
        assert torch.equal(memory.whole("residual"), owing().whole("residual"))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_rehearsals_change_nothing_but_the_memory(codec):
    grad = torch.randn(1000)
    before = grad.clone()
    memory = codec.new_memory(grad)
    for call in 2 * codec.rehearsal(grad, memory):
        call()
    assert all(number >= 0 for number in codec.passes(4))
    assert torch.equal(grad, before)
    assert codec.sent_bytes(1000, 1) == 0 and codec.sent_bytes(1000, 4) >= 0
    assert codec.num_rounds(1) == 0 and codec.num_rounds(4) > 0


@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "int8", "int4", "fp8", "onebit", "topk"])
def test_names(name):
    assert codec_of(name).name == name
    assert hash(codec_of(name)) == hash(codec_of(name)) and codec_of(name) == codec_of(name)
    assert codec_of(codec_of(name)) == codec_of(name)


# Other types and names are refused in tests/test_argument_types.py.
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: codec_of("zip"), "codec_of: expected codec to be one of"),
        (lambda: codec_of(3), "codec_of: expected codec to be a codec or one of"),
        (lambda: Quantize(block=100), "Quantize: expected block to be one of"),
        (lambda: Quantize("sign", block=None), "Quantize: expected block to be one of"),
        (lambda: Quantize("sign", stochastic=True), "expected stochastic to be False for signs"),
        (lambda: TopK(1.5), r"TopK: expected density to be in \[0, 1\], got 1.5"),
        (lambda: TopK(scope=0), "TopK: expected scope to be at least 1, got 0"),
        (lambda: TopK(momentum=1.0), "TopK: expected momentum to be None or in"),
        (lambda: PowerSGD(rank=0), "PowerSGD: expected rank to be at least 1, got 0"),
        (
            lambda: PowerSGD(min_compression_rate=0.5),
            "expected min_compression_rate to be at least 1, got 0.5",
        ),
        (lambda: PowerSGD(epsilon=0.0), "expected epsilon to be above 0 and finite, got 0.0"),
        (lambda: ChunkedTopK(chunk=1), r"expected chunk to be in \[2, 65536\], got 1"),
        (
            lambda: ChunkedTopK(chunk=4096, dct=True),
            r"expected chunk to be in \[2, 1024\], got 4096",
        ),
        (lambda: ChunkedTopK(k=0), "expected k to be in"),
        (lambda: ChunkedTopK(bits=3), "expected bits to be 2 or 32, got 3"),
        (lambda: ChunkedTopK(decay=1.5), "expected decay to be in"),
        (lambda: Outliers(fraction=1), r"fraction to be in \(0, 1\), got 1"),
        (lambda: Outliers("sign"), "format to be one of"),
        (lambda: Threshold(-0.1), "Threshold: expected density to be in"),
        (lambda: BlockSparse(0), "BlockSparse: expected block to be 'row' or at least 1, got 0"),
        (
            lambda: CompressionState(codec="zip"),
            "CompressionState: expected codec to be one of .*'auto'",
        ),
        (lambda: CompressionState(clip_norm=0.0), "expected clip_norm to be positive, got 0"),
        (lambda: CompressionState(candidates=["auto"]), "expected codec to be one of"),
    ],
)
def test_arguments_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
