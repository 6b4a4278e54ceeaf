"""Hand-written loops, experts, embeddings, saving and resuming."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from hook_models import (
    CAP_MB,
    Ledger,
    Words,
    bytes_of_words,
    dense,
    local_gradients,
    loop_step,
    looped,
    nothing_changes,
    reference,
    words,
    words_backward,
    wrapped,
)
from rank_checks import Checks, full, of_ranks

from moe_ext import distributed as md
from moe_ext.compression import (
    CompressionState,
    Policy,
    TopK,
    compress_gradients,
    compress_hook,
    flush,
)
from moe_ext.distributed.dtensor import local_part
from moe_ext.testing import spawn_ranks

CODECS = ("none", "int8", "onebit", TopK(0.1), TopK(0.1, algorithm="split"))


def check_embeddings_and_experts_in_a_hook():
    """Exact, in fewer bytes: at most 6 of 300 rows and 6 of 8 experts."""
    for sparse in (False, True):
        sent, whole = bytes_of_words(sparse, rtol=1e-6, atol=1e-8)
        whole *= 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        assert max(sent) < 0.8 * whole, (sent, whole)


def check_a_nan_in_a_sparse_embedding():
    for sparse in (True, False):
        parallel, state = wrapped(Words(sparse=sparse), codec="int8")
        words_backward(parallel, 0)
        parallel.zero_grad()
        output = parallel(words(1)).square().sum()
        with pytest.raises(ValueError, match=r"in (embedding.weight|head.bias) on rank 1$"):
            (output * float("inf") if dist.get_rank() == 1 else output).backward()
        assert state.step == 1
        assert not any(dense(p.grad).any() for p in parallel.parameters())


def check_an_embedding_that_is_mostly_touched_goes_dense():
    parallel, state = wrapped(Words(), codec="none")
    for _ in range(3):
        parallel.zero_grad()
        parallel(torch.arange(300)).square().sum().backward()
    (row,) = (row for row in state.explain().rows if row.parameters == ("embedding.weight",))
    assert (row.codec, row.why) == (
        "none",
        "role embedding; in the place of block_sparse(block=row) for now",
    )


def check_counts_of_the_router_cover_accumulation():
    parallel, state = wrapped(Words(), codec="none")
    plain = reference(model=Words())
    for wrapper in (parallel, plain):
        wrapper.zero_grad()
        with wrapper.no_sync():
            for step in range(2):
                wrapper(words(step)).square().sum().backward()
        wrapper(words(5)).square().sum().backward()
    for p, q in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-8)
    assert state.parameters.reached.bitmap("moe.experts.down_proj") is None


def check_a_loop_of_ones_own():
    for codec in CODECS:
        model, state = looped(codec)
        ledger = Ledger(state, model)
        for step in range(4):
            local = local_gradients(model, step, branch=step != 2)
            branch = step < 2 or dist.get_rank() == 0 and step != 2
            if step > 2 and dist.get_rank() > 0:
                local = local_gradients(model, step, branch=False)
            assert loop_step(model, state, step, branch=branch)
            assert (model.branch.weight.grad is None) == (step == 2)
            ledger.add(local)
            ledger.check()
        assert state.step == 4
        with pytest.raises(RuntimeError, match="expected new gradients since the last call"):
            compress_gradients(model, state)


def check_a_loop_with_a_sparse_embedding():
    model, twin = Words(sparse=True), Words()
    state = CompressionState(model=model, codec="none")
    for step in range(2):
        count = 0 if dist.get_rank() == 1 else 4
        words_backward(twin, step, count)
        words_backward(model, step, count)
        if step == 1 and dist.get_rank() == 1:
            model.embedding.weight.grad = None
        md.sync_gradients(twin)
        compress_gradients(model, state)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(dense(p.grad), q.grad, rtol=1e-5, atol=1e-8)


def check_an_embedding_that_is_sparse_on_one_rank():
    mixed = Words(sparse=dist.get_rank() == 0)
    words_backward(mixed, 0)
    with pytest.raises(ValueError, match="sparse on every rank or on none"):
        compress_gradients(mixed, CompressionState(model=mixed, codec="none"))


def check_states_of_others_are_refused():
    """That a loop resumes with the same bits is in tests/distributed/test_resume.py."""
    model, state = looped(TopK(0.1))
    loop_step(model, state, 0)
    with pytest.raises(ValueError, match="expected the state of rank"):
        state.load_state_dict({**state.state_dict(), "rank": 9})
    strange = state.state_dict()
    strange["memory"]["residual"]["nowhere"] = torch.zeros(3)
    with pytest.raises(ValueError, match="parameters of the model, got nowhere"):
        state.load_state_dict(strange)


def check_experts_that_no_other_rank_has():
    mesh = md.MoEMesh(ep=dist.get_world_size())
    for codec in ("none", "int8", "onebit", TopK(0.1), "powersgd", "auto"):
        model = Words(ep_group=mesh.ep_group, experts=4 * dist.get_world_size())
        policy = Policy("none", expert=codec, dense_below=0)
        state = CompressionState(model=model, policy=policy)
        for step in range(2):
            words_backward(model, step)
            local = {n: p.grad.clone() for n, p in model.named_parameters() if "experts" in n}
            compress_gradients(model, state)
            for name, p in model.named_parameters():
                assert name not in local or torch.equal(p.grad, local[name]), (codec, name)
        assert not state.residuals()


test_loop = Checks.of(globals()).test(2)


def experts_model(mesh, wrapped_in_ddp):
    model = Words(ep_group=mesh.ep_group, experts=8)
    return (md.data_parallel(model, bucket_cap_mb=CAP_MB) if wrapped_in_ddp else model), model


def rank_experts(rank):
    """Expert parallelism 2 of 4 ranks, in a loop, and as the second half of a pass of DDP."""
    mesh = md.MoEMesh(dp=2, ep=2)
    for hooked in (False, True):
        for codec in ("none", "int8"):
            outer, model = experts_model(mesh, hooked)
            twin = copy.deepcopy(model)
            state = CompressionState(model=model, codec=Policy(codec, dense_below=1))
            if hooked:
                outer.register_comm_hook(state, compress_hook)
            for step in range(2):
                words_backward(twin, step)
                md.sync_gradients(twin)
                words_backward(outer, step)
                # DDP has done it in the backward pass, and another call changes nothing.
                assert (hooked and step) or compress_gradients(outer, state)
                for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                    found, want = full(p.grad), full(q.grad)
                    if codec == "none":
                        # Four terms, added in another order.
                        bound = 8 * 2.0**-24 * float(want.abs().max())
                        torch.testing.assert_close(found, want, rtol=1e-5, atol=bound, msg=name)
                    else:
                        error = (found - want).abs().max()
                        assert error <= 0.05 * want.abs().max() + 1e-6, (name, error)
            assert state.step == 2
            md.clip_grad_norm_(outer, 1.0)
            if codec == "int8":
                assert any("experts" in name for name in state.residuals())
                check_flush_of_experts(outer, model, state, mesh)
    return check_an_overflow_in_experts(mesh)


def check_flush_of_experts(outer, model, state, mesh):
    name = "moe.experts.down_proj"
    replicas = [r for r in range(4) if r % 2 == mesh.ep_rank]
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    state.regroup()
    owed = {n: r.clone() for n, r in state.residuals().items()}
    flush(outer, state)
    added = local_part(model.moe.experts.down_proj.grad - before[name])
    everyone = of_ranks(owed[name])
    want = sum(everyone[r] for r in replicas) / 2
    torch.testing.assert_close(added, want, rtol=1e-3, atol=1e-6)
    assert not state.residuals()


def check_an_overflow_in_experts(mesh):
    """The half that DDP has reduced is taken back too."""
    outer, model = experts_model(mesh, True)
    state = CompressionState(
        model=model, codec=Policy("int8", dense_below=1), nonfinite="propagate"
    )
    outer.register_comm_hook(state, compress_hook)
    words_backward(outer, 0)
    compress_gradients(outer, state)
    if dist.get_rank() == 3:
        overflow = lambda grad: torch.full_like(grad, float("inf"))  # noqa: E731
        model.moe.experts.down_proj.register_hook(overflow)
    with nothing_changes(outer, state):
        words_backward(outer, 1)
        assert not compress_gradients(outer, state)
    return True


def test_expert_parallel():
    assert all(spawn_ranks(rank_experts, 4))


def rank_dies(rank):
    model, state = looped(TopK(0.1))
    for step in range(2):
        loop_step(model, state, step)
    if rank == 1:
        os._exit(7)
    named = pytest.raises(md.RankFailureError, match="rank 1 died")
    with nothing_changes(model, state), named:
        loop_step(model, state, 2)
    return True


def test_a_rank_that_dies():
    assert spawn_ranks(rank_dies, 3, may_die=[1]) == [True, None, True]
