"""DistributedDataParallel around experts that differ between ranks, as a framework makes it."""

import copy
import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parallel_models import (
    TIGHT,
    E,
    Model,
    assert_same_gradients,
    batches,
    loss_of,
    mesh,
    one_process,
    run_steps,
)
from rank_checks import Checks, full, of_ranks, raised
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import distributed as md
from moe_ext.distributed.dtensor import local_part


def wrapped(model, **options):
    model = moe_ext.parallelize(model)
    return DistributedDataParallel(model, find_unused_parameters=True, **options)


def without_unused(*models):
    """Models of which every rank uses all parameters."""
    for model in models:
        del model.branch, model.unused
    return models


def flat(model):
    return torch.cat([local_part(p.detach()).flatten() for p in model.parameters()])


def check_experts_become_equal_over_replicas_and_over_no_others():
    model = Model(mesh(2).ep_group, seed=dist.get_rank())
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        DistributedDataParallel(model)
    wrapped(model)
    everyone = of_ranks(flat(model))
    for rank, other in enumerate(everyone):
        assert torch.equal(other, flat(model)) == (rank % 2 == dist.get_rank() % 2)
    dense = of_ranks(model.inp.weight.detach())
    assert all(torch.equal(one, dense[0]) for one in dense)


def check_accumulation():
    want, double = one_process(steps=2), one_process()
    for p in double.parameters():
        if p.grad is not None:
            p.grad.mul_(2)
    first, second = batches(2)
    rank = dist.get_rank()
    model = Model(mesh(2).ep_group)
    ddp = wrapped(model)
    moe_ext.nn.set_loss_scale(model, 0.5)
    with ddp.no_sync():
        (loss_of(ddp, first[rank]) / 2).backward()
    part = model.first.experts.down_proj.grad.clone()
    everyone = of_ranks(part)
    assert not torch.equal(everyone[rank], everyone[rank - 2])
    (loss_of(ddp, second[rank]) / 2).backward()
    assert_same_gradients(model, want, 2)
    # Two reduced passes into one gradient: the first mean is a part of the second.
    ddp.zero_grad()
    moe_ext.nn.set_loss_scale(model, 1.0)
    for _ in range(2):
        loss_of(ddp, batches()[0][rank]).backward()
    assert_same_gradients(model, double, 2)
    md.sync_gradients(ddp)
    md.sync_gradients(ddp)
    assert_same_gradients(model, double, 2)
    # Passes past the wrapper are nobody's to reduce.
    ddp.zero_grad()
    loss_of(model, batches()[0][rank]).backward()
    assert not torch.equal(*of_ranks(model.first.experts.down_proj.grad)[rank % 2 :: 2])
    # All under no_sync, and reduced by hand: of what DDP holds, the experts alone.
    md.sync_gradients(ddp)
    assert torch.equal(*of_ranks(model.first.experts.down_proj.grad)[rank % 2 :: 2])


def check_a_reduction_that_is_asked_for_after_the_forward_passes():
    """What Accelerate's trigger_sync_in_backward does."""
    want, model = without_unused(one_process(steps=2), Model(mesh(2).ep_group))
    ddp = DistributedDataParallel(moe_ext.parallelize(model))
    moe_ext.nn.set_loss_scale(model, 0.5)
    with ddp.no_sync():
        losses = [loss_of(ddp, step[dist.get_rank()]) / 2 for step in batches(2)]
        losses[0].backward()
    ddp.reducer.prepare_for_backward([])
    losses[1].backward()
    assert_same_gradients(model, want, 2)


def check_a_pass_in_no_sync_does_not_take_back_the_one_before():
    """One backward pass through two forward passes, of which the first asks for a reduction."""
    want, model = without_unused(one_process(steps=2), Model(mesh(2).ep_group))
    ddp = DistributedDataParallel(moe_ext.parallelize(model))
    moe_ext.nn.set_loss_scale(model, 0.5)
    first, second = (step[dist.get_rank()] for step in batches(2))
    loss = loss_of(ddp, first)
    with ddp.no_sync():
        ((loss + loss_of(ddp, second)) / 2).backward()
    assert_same_gradients(model, want, 2)


class Checkpointed(Model):
    reentrant = False

    def forward(self, x, branch=False):
        h = self.inp(x)
        for layer in (self.first, self.second):
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return {"out": [self.out(h)]}


def check_recomputation():
    want = one_process()
    for reentrant in (False, True):
        for static in (False, True):
            [model] = without_unused(Checkpointed(mesh(2).ep_group))
            model.reentrant = reentrant
            ddp = DistributedDataParallel(moe_ext.parallelize(model), static_graph=static)
            for _ in range(2):
                ddp.zero_grad()
                x = batches()[0][dist.get_rank()]
                ddp(x)["out"][0].square().mean().backward()
            named = dict(want.named_parameters())
            for name, p in model.named_parameters():
                torch.testing.assert_close(full(p.grad), named[name].grad, **TIGHT)


class Branches(Model):
    """The second layer runs on the replicas with an even index alone."""

    def forward(self, x, branch=False):
        h = self.first(self.inp(x))
        return self.out(self.second(h) if branch else h)


def check_layers_that_some_replicas_leave_out():
    world = dist.get_world_size()
    want, model = Branches(None), Branches(mesh(2).ep_group)
    moe_ext.nn.set_loss_scale(want, 1.0 / world)
    for rank, x in enumerate(batches()[0]):
        (loss_of(want, x, rank // 2 == 0) / world).backward()
    ddp = wrapped(model)
    x, runs = batches()[0][dist.get_rank()], mesh(2).dp_rank == 0
    loss_of(ddp, x, runs).backward()
    assert_same_gradients(model, want, 2)
    ddp.zero_grad()
    loss_of(ddp, x, False).backward()
    assert model.second.experts.down_proj.grad is None


class Stored(Model):
    """Gives nothing back that a loss is made of."""

    def forward(self, x, branch=False):
        self.loss = super().forward(x, branch).square().mean()


def check_a_loss_beside_the_outputs():
    want, model = without_unused(one_process(), Stored(mesh(2).ep_group))
    ddp = DistributedDataParallel(moe_ext.parallelize(model))
    ddp(batches()[0][dist.get_rank()])
    model.loss.backward()
    assert_same_gradients(model, want, 2)


def check_frozen_parameters():
    want = one_process()
    model = Model(mesh(2).ep_group)
    model.second.experts.requires_grad_(False)
    ddp = wrapped(model)
    run_steps(ddp)
    for name in ("down_proj", "gate_up_proj"):
        getattr(want.second.experts, name).grad = None
    assert_same_gradients(model, want, 2)
    # Trained from now on, as after a stage of fine-tuning.
    model.second.experts.requires_grad_(True)
    ddp.zero_grad()
    run_steps(ddp)
    assert_same_gradients(model, one_process(), 2)
    model.requires_grad_(False)
    model.first.experts.requires_grad_(True)
    text = "doesn't have any parameter that requires a gradient"
    raised(RuntimeError, text, DistributedDataParallel, model)


def check_experts_that_are_frozen_on_one_rank():
    model = Model(mesh(2).ep_group)
    model.second.experts.requires_grad_(dist.get_rank() != 1)
    text = "the number of those that require a gradient to be equal .* got 6 on rank 0, 4 on rank 1"
    raised(ValueError, text, run_steps, wrapped(model))


def check_an_overflow_on_one_rank_is_skipped_on_all():
    model = Model(mesh(2).ep_group).float()
    ddp, optimizer = wrapped(model), torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = md.GradScaler("cpu", init_scale=8.0)
    overflow = [False]
    if mesh(2).ep_rank == 1:
        hooked = model.first.experts.down_proj
        hooked.register_hook(lambda grad: grad * math.inf if overflow[0] else grad)
    for overflow[0] in (False, True):
        before = flat(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, batches()[0][dist.get_rank()].float())).backward()
        scaler.unscale_(optimizer)
        md.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model)) == overflow[0]
        assert scaler.get_scale() == (4.0 if overflow[0] else 8.0)
    dense = of_ranks(model.inp.weight.detach())
    assert all(torch.equal(one, dense[0]) for one in dense)


def check_replicate_of_torch():
    want, model = without_unused(one_process(steps=2), Model(mesh(2).ep_group))
    experts = [model.first.experts, model.second.experts]
    replicate(moe_ext.parallelize(model), ignored_modules=experts)
    moe_ext.nn.set_loss_scale(model, 0.5)
    for step, found in enumerate(batches(2)):
        model.set_requires_gradient_sync(step == 1)
        (loss_of(model, found[dist.get_rank()]) / 2).backward()
    assert_same_gradients(model, want, 2)
    # It makes plain tensors of all that it does not ignore, and sends those of rank 0 to all.
    model = Model(mesh(2).ep_group)
    replicate(model)
    text = "forward: expected .* to be a DTensor, .* ignored_modules="
    with mock.patch.object(DistributedDataParallel, "_active_ddp_module", None):
        raised(ValueError, text, loss_of, model, batches()[0][0])


class Around(nn.Module):
    """A prepared model inside another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, branch=False):
        return self.inner(x, branch)


def check_models_around_a_prepared_one():
    """One's own, and torch.compile's, prepared or not; the first wrapper goes on as before."""
    want, twice = one_process(), one_process()
    for p in twice.parameters():
        if p.grad is not None:
            p.grad.mul_(2)
    compiled = functools.partial(torch.compile, backend="eager")
    for around, wrap in ((Around, wrapped), (compiled, wrapped), (compiled, wrapped_as_it_is)):
        model = moe_ext.parallelize(Model(mesh(2).ep_group))
        first = wrapped(model)
        second = wrap(around(model))
        for ddp in (first, second, first):
            ddp.zero_grad()
            run_steps(ddp)
            assert_same_gradients(model, want, 2)
    raised(ValueError, "expected model to be the module that", moe_ext.parallelize, first)
    # Replaced after the first pass.
    model.first.experts.down_proj = nn.Parameter(model.first.experts.down_proj.detach().clone())
    first.zero_grad()
    run_steps(first)
    assert_same_gradients(model, want, 2)


def check_experts_that_are_drawn_after_the_model_was_prepared():
    model = moe_ext.parallelize(Model(mesh(2).ep_group))
    with torch.no_grad():
        local_part(model.first.experts.down_proj).add_(dist.get_rank())
    run_steps(wrapped_as_it_is(model))
    everyone = of_ranks(model.first.experts.down_proj.detach())
    for rank, other in enumerate(everyone):
        same = torch.equal(other, everyone[dist.get_rank()])
        assert same == (rank % 2 == dist.get_rank() % 2)


def wrapped_as_it_is(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def check_replicate_before_and_after_an_error():
    want, model = without_unused(one_process(), Model(mesh(2).ep_group))
    replicate(model, ignored_modules=[model.first.experts, model.second.experts])
    moe_ext.parallelize(model)
    loss_of(model, batches()[0][dist.get_rank()]).backward()
    assert_same_gradients(model, want, 2)
    # An error in its forward pass leaves torch's note of a pass that runs.
    other = moe_ext.parallelize(Model(mesh(2).ep_group))
    with mock.patch.object(DistributedDataParallel, "_active_ddp_module", None):
        raised(RuntimeError, "", model, torch.zeros(3, 1))
        assert DistributedDataParallel._active_ddp_module is not None
        run_steps(other)
        md.sync_gradients(other)
    assert_same_gradients(other, one_process(), 2)


def check_parameters_that_come_later():
    layer = moe_ext.MoELayer(8, 8, E, 2, ep_group=mesh(2).ep_group)
    layer.experts.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    layer(torch.ones(3, 8))


def check_a_tensor_alone_is_clipped():
    model = Model(mesh(2).ep_group)
    run_steps(wrapped(model))
    norm = md.clip_grad_norm_(model.inp.weight, 1e-3)
    assert norm > 1e-2
    torch.testing.assert_close(
        model.inp.weight.grad.norm(), norm.new_tensor(1e-3), rtol=1e-3, atol=0
    )


def check_uneven_inputs():
    """A rank that has joined would leave the others alone in their exchanges."""
    world = dist.get_world_size()
    want, model = Model(None), Model(mesh(2).ep_group)
    ddp = wrapped(model)
    text = "DistributedDataParallel.join: expected as many forward passes on every rank"
    with pytest.raises(ValueError, match=text), ddp.join():
        run_steps(ddp)
    with pytest.raises(ValueError, match=text), Join([ddp]):
        run_steps(ddp)
    with ddp.join(enable=False):
        run_steps(ddp)
    ddp.zero_grad()
    with wrapped(nn.Linear(2, 2)).join():
        pass
    # What the text says: the last rank has no batch.
    moe_ext.nn.set_loss_scale(want, 1.0 / world)
    x = batches()[0]
    for rank in range(world - 1):
        (loss_of(want, x[rank]) / world).backward()
    is_idle = dist.get_rank() == world - 1
    out = ddp(x[dist.get_rank()][:0] if is_idle else x[dist.get_rank()])
    (out.sum() if is_idle else out.square().mean()).backward()
    assert_same_gradients(model, want, 2)


def check_a_hook_and_a_copy():
    want, model = one_process(), Model(mesh(2).ep_group)
    ddp = wrapped(model)
    ddp.register_comm_hook(None, allreduce_hook)
    again = copy.deepcopy(ddp)
    for one in (ddp, again):
        run_steps(one)
        assert_same_gradients(one.module, want, 2)


def check_a_pass_that_failed():
    model = Model(mesh(2).ep_group)
    ddp = wrapped(model)
    out = loss_of(ddp, batches()[0][dist.get_rank()])
    fails = model.inp.weight.register_hook(lambda _: 1 / 0)
    raised(ZeroDivisionError, "division by zero", out.backward)
    fails.remove()
    ddp = wrapped(model)
    ddp.zero_grad()
    run_steps(ddp)
    assert_same_gradients(model, one_process(), 2)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.proj(x) if len(x) else x


def check_experts_that_are_modules_and_a_rank_without_gradients():
    group = mesh(4).ep_group
    rank = dist.get_rank()
    experts = moe_ext.nn.ModuleExperts([Expert() for _ in range(E // 4)], ep_group=group)
    layer = moe_ext.MoELayer(8, 8, E, 1, experts=experts, ep_group=group).double()
    model = nn.Sequential(nn.Linear(8, 8).double(), layer)
    for expert in experts:
        expert.seen += rank
    ddp = wrapped(model)
    with torch.no_grad():
        # Every token goes to the experts of rank 0.
        layer.router.weight.zero_()
    ddp(torch.ones(3, 8, dtype=torch.float64)).square().mean().backward()
    assert [expert.seen.item() for expert in experts] == [rank] * (E // 4)
    has = [p.grad is not None for p in experts.parameters()]
    assert any(has) == (rank == 0)
    norm = md.clip_grad_norm_(model, 1e-3)
    assert all(torch.equal(norm, other) for other in of_ranks(norm))


def check_groups_of_ddp():
    grid = mesh(2)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    across = pairs[dist.get_rank() % 2]
    # The ranks that hold the same experts: nothing differs between them, and DDP does all.
    model = Model(grid.ep_group, seed=dist.get_rank() // 2)
    ddp = wrapped(model, process_group=across)
    assert torch.equal(*of_ranks(flat(model))[dist.get_rank() % 2 :: 2])
    run_steps(ddp)
    assert torch.equal(*of_ranks(model.first.experts.down_proj.grad)[dist.get_rank() % 2 :: 2])
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    text = r"expected process_group to be None or all ranks of the job .* got the ranks \[\d, \d\]"
    half = halves[dist.get_rank() // 2]
    raised(ValueError, text, run_steps, wrapped(Model(grid.ep_group), process_group=half))


def check_wrappers_that_take_experts_for_copies():
    for options in ({"use_orig_params": True}, {}):
        model = Model(mesh(2).ep_group)
        for part in (model, model.first.experts):
            with pytest.raises(RuntimeError):  # DTensors have no memory to flatten
                FullyShardedDataParallel(part, device_id=torch.device("cpu"), **options)
    model = Model(mesh(2).ep_group)
    ignored = [model.first.experts, model.second.experts]
    fsdp = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), ignored_modules=ignored, use_orig_params=True
    )
    run_steps(fsdp)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Model(mesh(2).ep_group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    run_steps(wrapped(model))
    raised(NotImplementedError, "c10d.broadcast_.default does not have a shard", optimizer.step)
    optimizer = torch.optim.LBFGS(model.parameters())
    raised(RuntimeError, "mixed torch.Tensor and DTensor", optimizer.step, lambda: torch.ones(()))
    groups = md.expert_param_groups(model)
    dense = next(group["params"] for group in groups if group["name"] == "dense")
    ZeroRedundancyOptimizer(dense, torch.optim.SGD, lr=0.1).step()


def check_wrapping_before_the_library_knows():
    """Experts that are declared after the constructor: DDP reduces them, and nobody says so."""
    model = Model(mesh(1).ep_group)
    ddp = wrapped(model)
    place = md.Placement.of_experts(E * 2, mesh(2).ep_group)
    md.declare_placement(model.first.experts, place)
    run_steps(ddp)
    raised(
        ValueError, "expected DistributedDataParallel to leave the expert", md.sync_gradients, ddp
    )


test_four_ranks = Checks.of(globals()).test(4, timeout=120.0)
