"""DistributedDataParallel on some of the ranks: the hook reduces over those, or says why not."""

import pytest
import torch.distributed as dist
from hook_models import gradients_of, reference
from rank_checks import Checks, assert_passed, run_checks

from moe_ext.compression import CompressionState, compress_hook
from moe_ext.distributed import count_traffic
from moe_ext.testing import spawn_ranks

CHECKS = Checks()


def made(parallel, how, **options):
    models = {"inner": parallel.module, "outer": parallel, "nothing": None}
    return CompressionState(model=models[how], **options)


@CHECKS(*[(how, codec) for how in ("inner", "outer", "nothing") for codec in ("none", "int8")])
def two_of_three_ranks(how, codec, group):
    ours, theirs = reference(process_group=group), reference(process_group=group)
    state = made(ours, how, codec=codec)
    ours.register_comm_hook(state, compress_hook)
    for step in range(3):
        with count_traffic() as traffic:
            got = gradients_of(ours, step)
        for name, want in gradients_of(theirs, step).items():
            error = (got[name] - want).abs().max()
            assert error <= (0.0 if codec == "none" else 0.02 * want.abs().max()), (step, error)
    assert state.step == 3 and dist.get_process_group_ranks(state.group) == [0, 2]
    # A dense all-reduce of two ranks sends as much as there is, one of three 4/3 of it.
    whole = 4 * sum(p.numel() for p in ours.parameters())
    assert 0 < traffic.total_bytes <= whole
    with pytest.raises(ValueError, match=r"of ranks \(0, 1, 2\), got ranks \(0, 2\)"):
        state.adopt_group(dist.group.WORLD)


@CHECKS()
def a_group_that_was_given_and_is_another(group):
    parallel = reference(process_group=group)
    message = r"expected group to be the process_group .* of ranks \(0, 2\), got ranks \(0, 1, 2\)"
    with pytest.raises(ValueError, match=message):
        CompressionState(model=parallel, group=dist.group.WORLD)
    state = CompressionState(model=parallel.module, group=dist.group.WORLD)
    parallel.register_comm_hook(state, compress_hook)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            gradients_of(parallel, 0)
        assert not any(p.grad.any() for p in parallel.parameters()) and state.step == 0


@CHECKS()
def a_state_that_has_counted_over_other_ranks(group):
    parallel = reference(process_group=group)
    saved = {**CompressionState(model=parallel.module).state_dict(), "step": 2}
    state = CompressionState(model=parallel.module)
    state.load_state_dict(saved)
    parallel.register_comm_hook(state, compress_hook)
    with pytest.raises(ValueError, match=r"of ranks \(0, 2\), got ranks \(0, 1, 2\)"):
        gradients_of(parallel, 0)
    right = CompressionState(model=parallel)
    with pytest.raises(ValueError, match="of 2, got that of rank"):
        right.load_state_dict(saved)


def rank_all(rank):
    group = dist.new_group([0, 2])
    # Until then the others may still connect to the one that leaves.
    dist.barrier()
    if rank == 1:
        # Takes part in nothing, so that a message to it would never be answered.
        return dict.fromkeys(CHECKS)
    return run_checks(CHECKS, group)


@pytest.fixture(scope="module")
def outcomes():
    return spawn_ranks(rank_all, 3, timeout=90, group_timeout=20)


@pytest.mark.parametrize("name", list(CHECKS))
def test_groups(outcomes, name):
    assert_passed(outcomes, name)
