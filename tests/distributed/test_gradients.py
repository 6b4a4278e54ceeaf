import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from parallel_models import (
    TIGHT,
    E,
    Model,
    assert_same_gradients,
    loss_of,
    mesh,
    one_process,
    run_steps,
)
from rank_checks import Checks, full, of_ranks, raised
from torch import nn

import moe_ext
from moe_ext import distributed as md
from moe_ext.compression import CompressionState, Policy, compress_gradients, flush
from moe_ext.dispatch.by_name import DISPATCHERS
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import Dispatch

ON_GPUS = ("nccl_ep", "deep_ep", "symm_mem")


def check_accumulated_gradients_norm_and_step_of_one_process():
    want = one_process(steps=3)
    for ep in (1, 2, 4):
        model = Model(mesh(ep).ep_group)
        run_steps(model, steps=3)
        md.sync_gradients(model)
        assert_same_gradients(model, want, ep)
        whole = copy.deepcopy(want)
        for p, q in zip(whole.parameters(), want.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        want_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        norm = md.clip_grad_norm_(model, 0.01)
        torch.testing.assert_close(norm, want_norm, **TIGHT)
        assert all(torch.equal(other, norm) for other in of_ranks(norm))
        assert_same_gradients(model, whole, ep)
        for module in (model, whole):
            torch.optim.SGD(md.expert_param_groups(module), lr=0.5).step()
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, msg=name, **TIGHT)


def check_accumulating_after_a_sync_is_still_the_mean():
    want = one_process()
    model = Model(mesh(2).ep_group)
    run_steps(model)
    md.sync_gradients(model)
    run_steps(model)
    md.sync_gradients(model)
    for p in want.parameters():
        if p.grad is not None:
            p.grad.mul_(2)
    assert_same_gradients(model, want, 2)


def check_gradients_missing_on_some_ranks():
    want = one_process(branch=True)
    model = Model(mesh(2).ep_group)
    run_steps(model, branch=True)
    assert (model.branch.weight.grad is None) == (dist.get_rank() % 2 == 0)
    md.sync_gradients(model)
    assert_same_gradients(model, want, 2)
    assert model.unused.weight.grad is None


def check_a_rank_without_any_backward():
    model = Model(mesh(1).ep_group)
    if dist.get_rank() == 0:
        model.out.weight.grad = torch.ones_like(model.out.weight)
    md.sync_gradients(model)
    share = 1.0 / dist.get_world_size()
    torch.testing.assert_close(model.out.weight.grad, torch.full_like(model.out.weight, share))


def check_gradients_of_another_dtype_than_parameters():
    for missing in (False, True):
        for reduce in ("sync", "compressed"):
            model = nn.ParameterList([nn.Parameter(torch.zeros(2, 3).bfloat16()) for _ in "123"])
            for p in list(model)[::2]:
                p.grad_dtype = torch.float32
            for p in model:
                if dist.get_rank() == 0 or not missing:
                    p.grad = torch.full(p.shape, 1.0 + 2**-6, dtype=p.grad_dtype)
            if reduce == "sync":
                md.sync_gradients(model)
            else:
                state = CompressionState(model=model, policy=Policy("int8", dense_below=0))
                compress_gradients(model, state)
                flush(model, state)
            value = (1.0 + 2**-6) / (dist.get_world_size() if missing else 1)
            for p in model:
                assert p.grad.dtype == p.grad_dtype
                torch.testing.assert_close(p.grad.float(), torch.full(p.shape, value))


def check_twice_is_refused_and_changes_nothing():
    model = Model(mesh(2).ep_group)
    run_steps(model)
    md.sync_gradients(model)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    text = "expected new gradients since the last call"
    raised(RuntimeError, text, md.sync_gradients, model)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    md.clip_grad_norm_(model, 0.1)
    raised(RuntimeError, text, md.sync_gradients, model)
    for to_none in (True, False):
        model.zero_grad(set_to_none=to_none)
        run_steps(model)
        md.sync_gradients(model)
    model.zero_grad()
    md.sync_gradients(model)


def check_models_that_differ_are_refused():
    model = Model(mesh(1).ep_group)
    run_steps(model)
    if dist.get_rank() == 1:
        model.extra = nn.Linear(2, 2)
    error = raised(ValueError, "the number of parameters to reduce", md.sync_gradients, model)
    assert "on rank 0" in str(error)
    assert "on rank 1" in str(error)


def check_replicas_with_different_values_are_refused():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[1, 2] += float(dist.get_rank() == 3)
    model(torch.ones(3)).sum().backward()
    grad = model.weight.grad.clone()
    text = r"values of the dense parameters at the first call \(seed every rank alike\) to be equal"
    raised(ValueError, text, md.sync_gradients, model)
    assert torch.equal(model.weight.grad, grad)


def check_a_problem_on_one_rank_raises_everywhere():
    model = nn.Embedding(4, 2, sparse=dist.get_rank() == 1)
    model(torch.tensor([1])).sum().backward()
    grad = model.weight.grad.to_dense().clone()
    text = r"expected gradients to be dense, got torch.sparse_coo for weight on rank 1"
    raised(ValueError, text, md.sync_gradients, model)
    assert torch.equal(model.weight.grad.to_dense(), grad)


def check_buckets_of_every_dtype_and_size():
    from moe_ext.distributed import gradients

    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    shapes = [(3,), (), (0, 4), (70,), (2, 3, 4), (1,)]
    old = gradients._BUCKET_BYTES
    gradients._BUCKET_BYTES = 64
    try:
        pairs = [(dtype, shape) for shape in shapes for dtype in dtypes]
        model = nn.ParameterList([nn.Parameter(torch.zeros(s, dtype=d)) for d, s in pairs])
        for i, p in enumerate(model):
            value = float(dist.get_rank() + i)
            p.grad = torch.full(p.shape, value, dtype=p.dtype)
            if p.dim() == 3:
                p.grad = torch.full(p.shape[::-1], value, dtype=p.dtype).permute(2, 1, 0)
        md.sync_gradients(model)
        mean = (dist.get_world_size() - 1) / 2
        for i, p in enumerate(model):
            # Small integers and quarters are exact in every dtype but for the two steps of a mean.
            want = torch.full(p.shape, i + mean, dtype=p.dtype)
            torch.testing.assert_close(p.grad, want, rtol=2e-2, atol=2e-2)
    finally:
        gradients._BUCKET_BYTES = old


def check_clipping():
    model = Model(mesh(2).ep_group)
    run_steps(model)
    raised(RuntimeError, "never synchronised", md.clip_grad_norm_, model, 1.0)
    md.sync_gradients(model)
    want = one_process()
    grads = [p.grad for p in want.parameters() if p.grad is not None]
    for norm_type in (2.0, 3.0, 1.0, math.inf, "inf"):
        norm = md.clip_grad_norm_(model, 1e9, norm_type)
        torch.testing.assert_close(norm, nn.utils.get_total_norm(grads, norm_type), **TIGHT)
    assert_same_gradients(model, want, 2)
    # One expert on one rank only holds it; every rank learns of it.
    before = model.inp.weight.grad.clone()
    clip = lambda: md.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)  # noqa: E731
    for value in (math.inf, math.nan):
        if mesh(2).ep_rank == 1:
            local_part(model.first.experts.down_proj.grad)[0, 0, 0] = value
        text = f"expected the norm of the gradients to be finite, got {value}"
        raised(RuntimeError, text, clip)
        assert torch.equal(model.inp.weight.grad, before)
    assert md.clip_grad_norm_(model, 1.0).isnan()


def check_names_of_the_experts():
    model = Model(mesh(2).ep_group)
    found = {name: (p, group, total) for name, p, group, total in md.expert_parameters(model)}
    assert set(found) == {
        "first.experts.gate_up_proj",
        "first.experts.gate_up_proj_bias",
        "first.experts.down_proj",
        "first.experts.down_proj_bias",
        "second.experts.gate_up_proj",
        "second.experts.down_proj",
    }
    for name, (p, group, total) in found.items():
        assert p is model.get_parameter(name)
        assert group is mesh(2).ep_group
        assert total == E
    groups = md.expert_param_groups(model)
    assert [group["name"] for group in groups] == ["dense", "experts"]
    assert len(groups[1]["params"]) == 6
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def check_groups_that_do_not_partition():
    # Ranks 0 and 1 share experts, the others keep to themselves.
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
    group = pair if dist.get_rank() < 2 else alone[dist.get_rank()]
    from moe_ext.distributed.replicas import replica_group

    text = r"expected the expert-parallel groups to split .*, got groups of 2 on rank 0"
    raised(ValueError, text, replica_group, group, torch.device("cpu"))


def check_a_forgotten_average_is_found_behind_the_first_step():
    """By every dispatcher and cut; passes without gradients are counted, too."""
    group = dist.group.WORLD
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # nodes of the hierarchical one
    dispatchers = [name for name in DISPATCHERS if name not in ("local", *ON_GPUS)]
    assert len(dispatchers) == 5
    for options in [
        *({"dispatcher": name} for name in dispatchers),
        {"dispatcher": Dispatch("alltoall", overlap=2)},
        {"dispatcher": "alltoall", "row_budget": moe_ext.nn.RowBudget(32)},
        {"dispatcher": "alltoall", "row_budget": moe_ext.nn.RowBudget(256, static=True)},
        {"dispatcher": Dispatch("alltoall", rebalance="exact")},
    ]:
        for averages in (True, False):
            torch.manual_seed(0)
            layer = moe_ext.MoELayer(8, 8, 4, ep_group=group, **options)
            optimizer = torch.optim.SGD(md.expert_param_groups(layer), lr=0.1)
            torch.manual_seed(1 + dist.get_rank())

            def step(layer=layer, optimizer=optimizer, averages=averages):
                # A static budget looks with two passes alone.
                if not (layer.row_budget and layer.row_budget.static):
                    with torch.no_grad():
                        layer(torch.randn(6, 8))
                layer(torch.randn(6, 8)).square().mean().backward()
                if averages:
                    md.sync_gradients(layer)
                optimizer.step()
                optimizer.zero_grad()

            step()
            if averages:
                step()
                step()
            else:
                raised(ValueError, "expected the checksum of the router's parameters .*seed", step)


def check_routers_that_start_apart_are_found_by_the_first_pass():
    torch.manual_seed(dist.get_rank())
    layer = moe_ext.MoELayer(8, 8, 4, ep_group=dist.group.WORLD)
    raised(ValueError, "expected the checksum of the router's parameters", layer, torch.randn(6, 8))


def check_ranks_compare_routers_in_the_same_passes_after_one_was_refused():
    torch.manual_seed(0)
    layers = [moe_ext.MoELayer(8, 8, 4, ep_group=dist.group.WORLD) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        model(x).square().mean().backward()
        md.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            raised(ValueError, "the layer that ran", layers[dist.get_rank() == 1], x)


test_four_ranks = Checks.of(globals()).test(4)


def test_without_process_group():
    model = Model(None)
    loss_of(model, torch.randn(5, 6, dtype=torch.float64)).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    md.sync_gradients(model)
    md.sync_gradients(model)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    norm = md.clip_grad_norm_(model, 0.01)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(before))
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert float(clipped) == pytest.approx(0.01, rel=1e-4)
    grid = md.MoEMesh()
    assert (grid.dp_rank, grid.ep_rank, grid.ep_group, grid.device_mesh) == (0, 0, None, None)
    assert repr(grid) == "MoEMesh(dp=1, ep=1, dp_rank=0, ep_rank=0)"
    with pytest.raises(ValueError, match="expected torch.distributed to be initialised"):
        md.data_parallel(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.0}, "expected max_norm to be positive, got 0.0"),
        ({"max_norm": math.nan}, "expected max_norm to be positive, got nan"),
        ({"max_norm": 1.0, "norm_type": -1.0}, "expected norm_type to be positive, got -1.0"),
        ({"max_norm": 1.0, "norm_type": 0}, "expected norm_type to be positive, got 0"),
    ],
)
def test_wrong_clip_options(options, message):
    with pytest.raises(ValueError, match=message):
        md.clip_grad_norm_(nn.Linear(2, 2), **options)
