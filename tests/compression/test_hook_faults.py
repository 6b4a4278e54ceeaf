"""Steps that fail leave no trace on any rank."""

import contextlib
import functools
import math

import pytest
import torch
import torch.distributed as dist
from hook_models import (
    CAP_MB,
    KINDS,
    Ledger,
    Net,
    batch,
    dies_in_the_backward_pass,
    gradients_of,
    local_gradients,
    loss_of,
    nothing_changes,
    state_bits,
    wrapped,
)
from rank_checks import Checks, assert_same_bits
from torch.nn.parallel import DistributedDataParallel

from moe_ext.comm.link import Link
from moe_ext.compression import (
    CompressionState,
    CostModel,
    Threshold,
    TopK,
    Warmup,
    compress_gradients,
    compress_hook,
    cost_model,
    reducer,
)
from moe_ext.compression.cost_model import TIMED_EVERY, TRIAL_TURNS
from moe_ext.testing import spawn_ranks


def poisoned(parallel, step, rank, value=math.nan):
    """A backward pass in which one rank's gradient of `hidden.weight` holds a value."""
    parallel.zero_grad()
    weight = parallel.module.hidden.weight
    handle = None
    if dist.get_rank() == rank:
        handle = weight.register_hook(
            lambda g: g.index_put((torch.tensor(3),), g.new_tensor(value))
        )
    try:
        loss_of(parallel, batch(step)).backward()
    finally:
        if handle is not None:
            handle.remove()


def check_nan_on_one_rank_is_named_everywhere():
    for codec, kind in (
        ("none", "view"),
        ("none", "static"),
        ("int8", "view"),
        ("onebit", "static"),
        (TopK(0.1), "view"),
        (Threshold(0.1), "static"),
        (TopK(0.1, momentum=0.9), "view"),
    ):
        parallel, state = wrapped(codec=codec, ddp=KINDS[kind])
        twin, same = wrapped(codec=codec, ddp=KINDS[kind])
        for step in range(2):
            gradients_of(parallel, step)
            gradients_of(twin, step)
        for value in (math.nan, math.inf):
            named = pytest.raises(ValueError, match="in hidden.weight on rank 1$")
            with nothing_changes(parallel, state), named:
                poisoned(parallel, 2, 1, value)
            assert all(not p.grad.any() for p in parallel.parameters())
        got, want = gradients_of(parallel, 3), gradients_of(twin, 3)
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert_same_bits(state_bits(state), state_bits(same))


def check_quantisers_look_in_their_own_pass():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "norms_of", lambda pieces: pytest.fail("a pass of its own"))
        for codec in ("int8", "onebit"):
            parallel, _ = wrapped(codec=codec)
            gradients_of(parallel, 0)
            gradients_of(parallel, 1)


def check_a_sum_that_overflows_is_refused_everywhere():
    """The gradients are finite on every rank, and so is what they owe."""
    for codec in ("int8", "int4", "fp8"):
        parallel, state = wrapped(codec=codec)
        gradients_of(parallel, 0)
        parallel.module.hidden.weight.register_hook(lambda g: torch.full_like(g, 3e38))
        named = pytest.raises(ValueError, match="be finite, got NaN or infinity in")
        with nothing_changes(parallel, state), named:
            gradients_of(parallel, 1)


def check_large_gradients_are_finite():
    parallel, _ = wrapped(codec="int8")
    (loss_of(parallel, batch(0)) * 1e25).backward()
    assert all(torch.isfinite(p.grad).all() for p in parallel.parameters())


def check_options_changed_on_one_rank_are_named():
    changed = {"average": False, "clip_norm": 0.5, "local_clip_norm": 2.0, "lr": 0.05}
    for hooked in (True, False):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state = CompressionState(model=model, codec="int8", optimizer=optimizer)
        parallel = DistributedDataParallel(model) if hooked else model
        if hooked:
            parallel.register_comm_hook(state, compress_hook)

        def reduce(step, parallel=parallel, model=model, state=state):
            model.zero_grad()
            loss_of(parallel, batch(step)).backward()
            if parallel is model:
                compress_gradients(model, state)

        for step in range(2):
            reduce(step)
        for name, value in changed.items():
            where = optimizer.param_groups[0] if name == "lr" else vars(state.options)
            kept = where[name]
            where[name] = value if dist.get_rank() == 1 else kept
            message = rf"expected {name} to be equal on every rank, .*{value}\]? on rank 1"
            with nothing_changes(model, state), pytest.raises(ValueError, match=message):
                reduce(2)
            where[name] = kept
            assert not hooked or all(not p.grad.any() for p in model.parameters())
        reduce(3)
        assert state.step == 3


def counting_messages(monkeypatch):
    """List that grows by an entry with every message of status."""
    found, exchange = [], reducer.exchange_reports

    def noted(report, *args):
        found.append(report.step)
        return exchange(report, *args)

    monkeypatch.setattr(reducer, "exchange_reports", noted)
    return found


def check_dense_steps_need_no_message():
    """A NaN travels in the sum; only then the ranks tell each other where it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = counting_messages(monkeypatch)
        for codec in ("none", "bf16"):
            parallel, state = wrapped(codec=codec)
            for step in range(3):
                gradients_of(parallel, step)
            assert sent == []
            for rank, value in ((0, math.nan), (1, -math.inf)):
                with pytest.raises(ValueError, match=f"in hidden.weight on rank {rank}$"):
                    poisoned(parallel, 3, rank, value)
            assert sent == [3, 3]
            assert state.step == 3
            gradients_of(parallel, 4)
            assert sent.pop() == sent.pop() == 3 and sent == []
        # As long as nothing is owed.
        parallel, state = wrapped(codec="int8", warmup=Warmup(dense_steps=2))
        for step in range(4):
            gradients_of(parallel, step)
        assert sent == [2, 3], sent
        sent.clear()
        state.options.warmup = Warmup(dense_steps=6)
        for step in range(2):
            gradients_of(parallel, step)
        assert sent == [4]  # in which it was sent


def check_a_cost_model_asks_for_messages_while_it_measures():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cost_model, "SMALL_BUCKET_BYTES", 1024)
        sent = counting_messages(monkeypatch)
        model = CostModel(dist.group.WORLD, link=Link.of_rate(1e12))
        parallel, _ = wrapped(codec="auto", candidates=("none",), cost_model=model)
        for step in range(40):
            gradients_of(parallel, step)
        # After the second step DDP has other buckets, of which nothing is known.
        assert sent[:-2] == list(range(len(sent) - 2))
        assert TRIAL_TURNS < len(sent) <= TRIAL_TURNS + 4
        assert sent[-1] - sent[-2] == TIMED_EVERY
        with pytest.raises(ValueError, match="in hidden.weight on rank 1$"):
            poisoned(parallel, 40, 1)


def check_a_sum_that_overflows_is_no_fault_of_a_rank():
    """Inf of infinite sums is passed on as torch does; no rank had one, and all go on alike."""
    parallel, state = wrapped(codec="none", average=False)
    weight = parallel.module.hidden.weight
    weight.register_hook(lambda g: torch.full_like(g, 3e38))
    gradients_of(parallel, 0)
    assert state.was_finite
    assert torch.isinf(weight.grad).all()


def check_overflow_under_a_grad_scaler():
    for codec, dense_steps in (("int8", 0), ("int8", 9), (TopK(0.1), 0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        options = {"warmup": Warmup(dense_steps), "grad_scaler": scaler}
        parallel, state = wrapped(codec=codec, nonfinite="propagate", **options)
        optimizer = torch.optim.SGD(parallel.parameters(), 0.05)
        ledger = Ledger(state, parallel.module)
        for step in range(6):
            bad, scale = step == 3, scaler.get_scale()
            local = local_gradients(parallel.module, step)
            optimizer.zero_grad()
            weight, handle = parallel.module.hidden.weight, None
            if bad and dist.get_rank() == 1:
                handle = weight.register_hook(lambda g: g * math.inf)
            with nothing_changes(parallel, state) if bad else contextlib.nullcontext():
                scaler.scale(loss_of(parallel, batch(step))).backward()
                if handle is not None:
                    handle.remove()
                scaler.unscale_(optimizer)
                if not bad:
                    ledger.add(local)
                scaler.step(optimizer)
                scaler.update()
            assert not bad or scaler.get_scale() == scale / 2
        # What is owed is in units of the last scale that was used.
        used = {m["loss_scale"] for m in state.state_dict()["memory"]["marks"].values()}
        assert len(used) == 1
        for residual in state.residuals().values():
            residual.div_(used.copy().pop())
        for memory in state.memory.memories.values():
            if memory.kept("server") is not None:
                memory.kept("server").div_(used.copy().pop())
        ledger.check()


def check_codecs_that_differ():
    for codecs in (("int8", "int4"), ("none", TopK(0.1)), (TopK(0.1), TopK(0.2))):
        parallel, state = wrapped(codec=codecs[dist.get_rank() % 2])
        for _ in range(2):
            with pytest.raises(ValueError, match=r"codecs.* to be equal on every rank.* on rank 1"):
                gradients_of(parallel, 0)
        assert state.step == 0 and not state.residuals()


def check_steps_that_differ():
    parallel, state = wrapped(codec="int8")
    for step in range(2):
        gradients_of(parallel, step)
    if dist.get_rank() == 1:
        state._progress.step = 7
    message = "expected the step to be equal .*2 on rank 0, 7 on rank 1"
    with nothing_changes(parallel, state), pytest.raises(ValueError, match=message):
        gradients_of(parallel, 3)


def check_one_state_serves_one_model():
    parallel, state = wrapped(codec="int8")
    with pytest.raises(RuntimeError, match="can only be called once"):
        parallel.register_comm_hook(state, compress_hook)
    gradients_of(parallel, 0)
    other = DistributedDataParallel(Net(), bucket_cap_mb=CAP_MB)
    other.register_comm_hook(state, compress_hook)
    for _ in range(2):
        with pytest.raises(ValueError, match="belong to the one model that the state serves"):
            gradients_of(other, 0)
    gradients_of(parallel, 1)
    assert state.step == 2
    unnamed = CompressionState(codec="int8")
    several = [DistributedDataParallel(Net(), bucket_cap_mb=CAP_MB) for _ in range(2)]
    for wrapper in several:
        wrapper.register_comm_hook(unnamed, compress_hook)
    gradients_of(several[0], 0)
    with pytest.raises(ValueError, match="belong to the one model"):
        gradients_of(several[1], 0)
    wrong = DistributedDataParallel(Net())
    wrong.register_comm_hook(None, compress_hook)
    with pytest.raises(TypeError, match="expected state to be a CompressionState, got NoneType"):
        gradients_of(wrong, 0)


def check_an_aborted_backward_pass():
    parallel, state = wrapped(codec=TopK(0.1))
    for step in range(2):
        gradients_of(parallel, step)

    def boom(gradient):
        raise KeyError("boom")

    parallel.module.inp.weight.register_hook(boom)
    with nothing_changes(parallel, state), pytest.raises(KeyError):
        gradients_of(parallel, 2)
    assert state.open_step is not None


def check_a_nan_reaches_a_rank_that_has_joined():
    parallel, state = wrapped(codec="int8")
    text = "got NaN or infinity in hidden.weight on rank 1"
    with pytest.raises(ValueError, match=text), parallel.join():
        for step in range(1 + 2 * dist.get_rank()):
            poisoned(parallel, step, 1, math.nan if step == 2 else 1.0)
    assert state.step == 2


test_fault = Checks.of(globals()).test(2)


def test_a_rank_that_dies_in_the_backward_pass():
    die = functools.partial(dies_in_the_backward_pass, dying=1, match="but rank 1 died")
    assert spawn_ranks(die, 2, may_die=[1]) == [True, None]
