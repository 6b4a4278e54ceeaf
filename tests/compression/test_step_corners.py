"""Corners of a step: halves, codecs that change, buckets that are not compressed; one process."""

import copy
import gc
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from hook_models import not_taken
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext import ops
from moe_ext.compression import (
    BlockSparse,
    CodecMemory,
    CompressionState,
    Policy,
    ResidualMonitor,
    TopK,
    compress_gradients,
    flush,
    gradients,
)
from moe_ext.compression.codecs import Dense, Threshold
from moe_ext.compression.powersgd import PowerSGD


class Two(nn.Module):
    """Two parameters, in a bucket each where their dtypes differ."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(20, 3))
        self.b = nn.Parameter(torch.zeros(20, 3, dtype=dtype))


def fill(model, seed):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)


def fill_with(model, value):
    for p in model.parameters():
        p.grad = torch.full(p.shape, value)


def step_of(model, state, seed):
    """A step with random gradients."""
    fill(model, seed)
    assert compress_gradients(model, state)


def two(codec, dtype=torch.float32, **options):
    """A model and its state."""
    model, policy = Two(dtype), Policy(codec, dense_below=0, **options.pop("policy", {}))
    return model, CompressionState(model=model, policy=policy, **options)


def owed_of(state):
    return {name: residual.tolist() for name, residual in state.residuals().items()}


def hooked_half(state, parameter):
    """Begin, add and finish a step, as the hook of DistributedDataParallel does with one bucket."""
    state.is_hooked = True
    step = state.begin_step("compress_hook")
    step.add([parameter], parameter.grad.reshape(-1).clone(), state.group)
    step.finish()


def test_undo_takes_both_halves_back(monkeypatch):
    model, state = two(TopK(0.2))
    monkeypatch.setattr(gradients, "reduced_by_ddp", lambda module: {id(model.a)})
    for seed in range(2):
        before = {n: t.clone() for n, t in state.residuals().items()}
        fill(model, seed)
        hooked_half(state, model.a)
        model.a.grad = None
        compress_gradients(model, state)
    assert state.step == 2
    assert set(before) == {"a", "b"}
    state.undo()
    assert state.step == 1
    for name, tensor in state.residuals().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("codec", ["none", TopK(0.1)])
def test_clipping_where_nothing_has_a_gradient(codec):
    model, state = two(codec, clip_norm=1.0)
    assert compress_gradients(model, state)
    assert model.a.grad is None


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1.0), (torch.float32, 1e30)])
def test_clipping_of_wide_and_of_large_gradients(dtype, scale):
    model, state = two("none", clip_norm=1.0)
    model.to(dtype)
    fill(model, 0)
    for p in model.parameters():
        p.grad *= scale
    compress_gradients(model, state)
    total = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert total == pytest.approx(1.0, rel=1e-4)


def test_a_nan_in_a_bucket_that_is_not_compressed():
    policy = {"by_name": {"b": "none"}}
    model, state = two(TopK(0.1), torch.bfloat16, nonfinite="propagate", policy=policy)
    step_of(model, state, 0)
    before = state.residuals()["a"].clone()
    fill(model, 1)
    model.b.grad[0, 0] = math.inf
    assert not compress_gradients(model, state)
    assert not model.b.grad.isfinite().all()
    assert torch.equal(state.residuals()["a"], before)
    assert state.step == 1


def test_no_gradient_with_a_residual_that_was_put_back_is_applied():
    """A second optimizer would take a finite one, though what was owed in it is owed again."""
    model, state = two(TopK(0.1, scope="parameter"), nonfinite="propagate")
    step_of(model, state, 0)
    fill(model, 1)
    model.a.grad[0, 0] = math.nan
    assert not compress_gradients(model, state)
    assert model.a.grad.isnan().all()
    assert model.b.grad.isnan().all()


@pytest.fixture
def owing():
    """A memory that owes for a shard of the sum: elements 64 to 127, in a loss scale of 8."""
    memory = CodecMemory([torch.Size([200])], torch.device("cpu"))
    memory.begin({}, {"loss_scale": 8.0})
    memory.tensor("residual").fill_(1.0)
    memory.shard(64, 64).fill_(16.0)
    memory.commit()
    return memory


def test_a_shard_of_another_size_is_owed_where_it_was(owing):
    before = owing.whole("residual")
    for ends in ([owing.rollback], [owing.commit, owing.undo]):
        owing.begin()
        assert not owing.shard(128, 128).any()
        for end in ends:
            end()
            assert torch.equal(owing.whole("residual"), before)
    owing.begin()
    assert bool((owing.shard(64, 64) == 16.0).all())


@pytest.mark.parametrize("codec", [TopK(0.05), Threshold(0.05), PowerSGD(2)])
def test_selection_sends_what_the_owner_of_a_shard_owes(owing, codec):
    before = owing.whole("residual")
    owing.begin({"residual": 0.5, "server": 0.5}, {"loss_scale": 4.0})
    sent = codec.start(torch.zeros(200), owing).wait()
    owing.commit()
    assert sent.max() == 8.5
    torch.testing.assert_close(sent + owing.whole("residual"), before * 0.5)


def test_what_a_step_does_not_touch_follows_the_units_too(owing):
    """Another codec, for which momentum means nothing, between two that have it."""
    owing.begin()
    owing.tensor("velocity").fill_(8.0)
    owing.commit()
    owing.begin({"velocity": 0.5, "residual": 0.5, "server": 0.5}, {"loss_scale": 4.0})
    Dense().start(torch.zeros(200), owing)
    owing.commit()
    assert bool((owing.kept("velocity") == 4.0).all())
    owing.commit()
    assert bool((owing.kept("velocity") == 4.0).all())


@pytest.mark.parametrize("shared", [False, True])
def test_experts_that_something_else_than_the_router_reaches(shared):
    """A penalty on the weights, or a second layer with the same experts."""
    model = nn.ModuleList([moe_ext.MoELayer(4, 64, 8, 1) for _ in range(2)])
    model[1].experts = model[0].experts
    state = CompressionState(model=model, codec="none")
    weight = model[0].experts.down_proj
    x = torch.randn(1, 4)
    loss = model[0](x).sum()
    if shared:
        loss = loss + model[1](-x).sum() + model[1](torch.randn(30, 4)).sum()
    else:
        loss = loss + weight.square().sum()
    loss.backward()
    (part,) = state.begin_step("").add([weight], weight.grad.view(-1), None).bucket.parts
    BlockSparse("row").find_zeros(weight.grad.view(-1), part.memory, part.reached)
    found = set(ops.block_indices(part.memory.bitmap).tolist())
    assert found >= set(weight.grad.flatten(1).any(1).nonzero().view(-1).tolist())
    assert len(found) > 1


def test_a_model_that_a_state_watches():
    """A model is pickled and copied as before, and watched for as long as the state is there."""
    model = moe_ext.MoELayer(4, 64, 8, 1)
    for _ in range(2):
        state = CompressionState(model=model, codec="none")
    gc.collect()
    assert len(model._forward_hooks) == 1
    for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        copied(model)(torch.randn(30, 4))
        assert state.parameters.reached.bitmap("experts.down_proj") is None
    model(torch.randn(30, 4))
    assert state.parameters.reached.bitmap("experts.down_proj") is not None


@pytest.mark.parametrize("flushed", [False, True])
def test_parameters_without_a_gradient_keep_up_with_the_learning_rate(flushed):
    model, state = two(TopK(0.1, scope="parameter"))
    state.options.optimizer = optimizer = torch.optim.SGD(model.parameters(), 1.0)
    step_of(model, state, 0)
    owed = state.residuals()["a"].clone()
    optimizer.param_groups[0]["lr"] = 0.5
    fill(model, 1)
    model.a.grad = None
    compress_gradients(model, state)
    if flushed:
        flush(model, state)
        assert torch.equal(model.a.grad, 2.0 * owed)
        assert not state.residuals()
        return
    assert torch.equal(state.residuals()["a"], owed)
    fill(model, 2)
    model.a.grad.zero_()
    compress_gradients(model, state)
    assert torch.equal(state.residuals()["a"], 2.0 * owed)


@pytest.mark.parametrize("bound", ["clip_norm", "local_clip_norm"])
def test_bounds_are_those_of_gradients_before_a_scaler(bound):
    found = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        codec = "none" if bound == "clip_norm" else TopK(0.1, momentum=0.9)
        model, state = two(codec, grad_scaler=scaler, **{bound: 0.25})
        for seed in range(2):
            fill(model, seed)
            for p in model.parameters():
                p.grad *= scale
            compress_gradients(model, state)
        found.append([p.grad / scale for p in model.parameters()])
        if bound == "clip_norm":
            norms = torch.stack([p.norm() for p in found[-1]])
            torch.testing.assert_close(norms.norm(), torch.tensor(0.25))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("how", ["loaded", "changed"])
@pytest.mark.parametrize("scales", [(1024.0, None), (None, 1024.0), (1024.0, None, None, 64.0)])
def test_a_scaler_that_comes_or_goes(scales, how):
    """Whatever the loss is multiplied by, nothing of its gradients is lost."""
    model, total, applied = Two(), 0.0, 0.0
    saved = state = None
    for step, scale in enumerate(scales):
        if how == "loaded" or state is None:
            state = CompressionState(model=model, policy=Policy(TopK(0.1), dense_below=0))
            state.load_state_dict(saved or state.state_dict())
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        state.options.grad_scaler = scaler
        fill(model, step)
        total += model.a.grad
        model.a.grad *= scale or 1.0
        compress_gradients(model, state)
        if step == len(scales) - 1:
            flush(model, state)
        applied += model.a.grad / (scale or 1.0)
        saved = state.state_dict()
    torch.testing.assert_close(applied, total)


def test_a_flush_leaves_frozen_parameters_alone():
    model, state = two(TopK(0.1))
    step_of(model, state, 0)
    before = state.residuals()["a"].clone()
    model.a.requires_grad_(False).grad = None
    model.b.grad = torch.ones_like(model.b)
    compress_gradients(model, state)
    flush(model, state)
    assert model.a.grad is None
    assert list(state.residuals()) == ["a"]
    assert torch.equal(state.residuals()["a"], before)
    model.a.requires_grad_()
    flush(model, state)
    assert torch.equal(model.a.grad, before)
    assert not state.residuals()


@pytest.mark.parametrize("flushes", [1, 2])
def test_undo_after_flushes(flushes):
    model, state = two(TopK(0.1))
    for seed in range(2):
        before = owed_of(state)
        step_of(model, state, seed)
    for _ in range(flushes):
        assert flush(model, state)
        assert not state.residuals()
    state.undo()
    assert state.step == 1
    assert owed_of(state) == before
    step_of(model, state, 2)


def test_undo_leaves_a_flush_before_a_step_of_rows_alone():
    """A step of rows alone has no group that would be made anew."""
    model, state = two(TopK(0.1))
    for seed in range(2):
        step_of(model, state, seed)
    flush(model, state)
    model.a.grad = None
    model.b.grad = torch.ones(20, 3).to_sparse(1)
    assert compress_gradients(model, state)
    state.undo()
    assert state.step == 2
    assert not state.residuals()


@pytest.mark.parametrize("how", ["failed", "loaded"])
def test_undo_takes_nothing_back_but_the_last_reduction(how):
    model, state = two(TopK(0.1))
    step_of(model, state, 0)
    before = owed_of(state)
    if how == "loaded":
        state.load_state_dict(state.state_dict())
    else:
        fill(model, 1)
        model.a.grad[0, 0] = math.nan
        not_taken(model, state, "got NaN or infinity in a on rank 0")
    state.undo()
    assert state.step == 1
    assert owed_of(state) == before


def test_the_first_half_is_taken_back_where_the_second_cannot_begin(monkeypatch):
    model, state = two(TopK(0.2))
    monkeypatch.setattr(gradients, "reduced_by_ddp", lambda module: {id(model.a)})
    fill(model, 0)
    hooked_half(state, model.a)
    model.a.grad = None

    def fail(*_):
        raise ValueError("sparse on one rank")

    monkeypatch.setattr(gradients, "_agreed_kinds", fail)
    with pytest.raises(ValueError, match="sparse on one rank"):
        compress_gradients(model, state)
    assert state.step == 0
    assert not state.residuals()


def test_a_flush_of_a_step_that_will_be_skipped():
    model, state = two(TopK(0.1), nonfinite="propagate")
    step_of(model, state, 0)
    before = state.residuals()["a"].clone()
    fill(model, 1)
    model.a.grad[0, 0] = math.inf
    compress_gradients(model, state)
    assert not flush(model, state)
    assert torch.equal(state.residuals()["a"], before)


def test_a_state_made_before_the_process_group(tmp_path):
    """Its steps would be those of a process alone, on each rank."""
    state = two("int8")[1]
    assert state.group is None
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert state.group is dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["loop", "hook"])
def test_a_state_without_a_model_resumes(how):
    """Parameters are numbered anew in the first step of each process."""
    models, policy = [Two(), Two()], Policy(TopK(0.1), dense_below=0)
    states = [CompressionState(policy=policy) for _ in models]

    def step(which, seed):
        model, state = models[which], states[which]
        fill(model, seed)
        if how == "loop":
            compress_gradients(model, state)
        else:
            hooked_half(state, model.b)

    step(0, 0)
    states[1].load_state_dict(states[0].state_dict())
    step(0, 1)
    step(1, 1)
    assert owed_of(states[1]) == owed_of(states[0])
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("how", ["loop", "hook"])
@pytest.mark.parametrize("codec", ["none", "int8", "auto"])
def test_complex_parameters_are_refused(how, codec):
    model, state = two(codec, torch.complex64)
    fill(model, 0)
    step = compress_gradients if how == "loop" else lambda *_: hooked_half(state, model.b)
    with pytest.raises(ValueError, match="of real numbers, got torch.complex64 for b"):
        step(model, state)


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path):
    """Patterns of a policy would fit none, and a job that compiles could not resume another."""
    model, plain = two("int8")
    policy = Policy("int8", by_name={"a": "none"})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for wrapped in (
            torch.compile(model, backend="eager"),
            torch.compile(DistributedDataParallel(model), backend="eager"),
            DistributedDataParallel(torch.compile(model, backend="eager")),
        ):
            parameters = CompressionState(model=wrapped, policy=policy).parameters
            assert [*parameters.by_name] == [*plain.parameters.by_name]
            assert parameters.codec(policy, "a").name == "none"
    finally:
        dist.destroy_process_group()


def test_gradients_that_a_hook_has_reduced_are_not_reduced_again():
    model, state = two(TopK(0.2))
    fill(model, 0)
    hooked_half(state, model.a)
    before = state.residuals()["a"].clone()
    with pytest.raises(ValueError, match="expected model to be the DistributedDataParallel"):
        compress_gradients(model, state)
    assert torch.equal(state.residuals()["a"], before)


@pytest.mark.parametrize("codec", [TopK(0.1), Threshold(0.1)])
def test_gradients_whose_squares_are_zero_are_sent(codec):
    model, state = two(codec)
    fill_with(model, 1e-30)
    compress_gradients(model, state)
    assert model.a.grad.any()


def test_a_threshold_of_zero_gradients_does_not_stay():
    model, state = two(Threshold(0.1))
    for seed in range(2):
        fill(model, seed)
        if seed == 0:
            model.a.grad.zero_()
            model.b.grad.zero_()
        compress_gradients(model, state)
    # Twelve of 120 are aimed at; there is room for fifteen.
    assert sum(int(p.grad.count_nonzero()) for p in model.parameters()) == 12


@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
def test_gradients_that_half_precision_does_not_hold(nonfinite):
    model, state = two("fp16", nonfinite=nonfinite)
    fill_with(model, 6e4)
    assert compress_gradients(model, state)
    assert model.a.grad.isfinite().all()
    model.b.grad = torch.full(model.b.shape, 7e4)
    if nonfinite == "raise":
        not_taken(model, state, "expected gradients to be finite, got .* in b on")
        assert not model.b.grad.any()
    else:
        compress_gradients(model, state)
        assert not model.b.grad.isfinite().any()


@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
def test_what_is_owed_counts_in_half_precision(nonfinite):
    model, state = two(TopK(0.1), nonfinite=nonfinite)
    fill_with(model, 4e4)
    assert compress_gradients(model, state)
    before = owed_of(state)
    state.options.policy = Policy("fp16", dense_below=0)
    state.regroup()
    fill_with(model, 4e4)
    not_taken(model, state, "got NaN or infinity in a on rank 0")
    assert owed_of(state) == before
    fill_with(model, 1.0)
    assert compress_gradients(model, state)
    assert not state.residuals()


def test_no_gradient_at_all_is_no_growing_residual(recwarn):
    monitor = ResidualMonitor(every=1, action="densify")
    model, state = two(TopK(0.1), monitor=monitor)
    for seed in range(2):
        fill(model, seed)
        if seed:
            model.a.grad.zero_()
            model.b.grad.zero_()
        compress_gradients(model, state)
    assert not recwarn.list


def test_what_has_begun_ends_where_a_later_bucket_fails(monkeypatch):
    model, state = two(TopK(0.1))
    step_of(model, state, 0)
    before = state.residuals()["a"].clone()

    def buckets(parameters, group, device):
        yield [model.a], model.a.grad.reshape(-1).clone()
        raise ValueError("later")

    monkeypatch.setattr(gradients, "_filled_buckets", buckets)
    fill(model, 1)
    with pytest.raises(ValueError, match="later"):
        compress_gradients(model, state)
    assert torch.equal(state.residuals()["a"], before)
    assert not any(memory._open for memory in state.memory.memories.values())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_state_is_not_copied_but_its_state_dict_is(copied):
    state = two(TopK(0.1))[1]
    with pytest.raises(TypeError, match=r"expected its state_dict\(\) to be copied or pickled"):
        copied(state)
    copied(state.state_dict())
