"""What ranks of the optimizers that communicate themselves tell each other before a step."""

import copy

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import MAKERS, assert_equal_on_ranks, assert_same, give, parameters, run
from rank_checks import Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moe_ext import optim

checks = Checks()


@checks()
def check_messages_on_every_rank():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for name, make in MAKERS.items():
        p = nn.Parameter(torch.zeros(4, 4))
        optimizer = make([("w", p)])
        p.grad = torch.ones(4, 4).to_sparse() if rank == last else torch.ones(4, 4)
        message = f"{name}: expected gradients to be dense, got a sparse one for 'w' on rank {last}"
        with pytest.raises(TypeError, match=message):
            optimizer.step()
        p.grad = torch.ones(4, 4)
        optimizer.step()
        q = nn.Parameter(torch.full((2, 2), float(rank)))
        q.grad = torch.ones(2, 2)
        message = r"the values of the parameters at the first step \(seed every rank alike\) to be"
        with pytest.raises(ValueError, match=message):
            make([q]).step()
        more = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
        message = "expected the number of parameters to be equal on every rank, got 1 on rank 0, 2 "
        with pytest.raises(ValueError, match=message):
            make(more).step()
        p.grad = torch.ones(4, 4)
        if rank == last:
            optimizer.param_groups[0]["step"] += 1
        message = "expected the number of the step to be equal on every rank, got 1 on rank 0"
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        where = init_device_mesh("cpu", (dist.get_world_size(),))
        d = nn.Parameter(distribute_tensor(torch.ones(4), where, [Shard(0)]))
        d.grad = distribute_tensor(torch.ones(4), where, [Shard(0)])
        with pytest.raises(
            TypeError,
            match="to be plain tensors or experts over ranks, got a DTensor for parameter 0 of",
        ):
            make([d]).step()


@checks(*((name,) for name in MAKERS))
def check_a_state_loaded_on_one_rank_is_told(name):
    params, rank = parameters(), dist.get_rank()
    optimizer = MAKERS[name](params, lr=0.05)
    if rank == 1:
        others = parameters()
        adam = torch.optim.AdamW(others)
        run(adam, others, range(2))
        optimizer.load_state_dict(adam.state_dict())
    give(params, 0, rank)
    with pytest.raises(ValueError, match="expected the number of the step to be equal"):
        optimizer.step()


@checks(*((name,) for name in MAKERS))
def check_a_state_loaded_on_one_rank_in_mid_training_is_told(name):
    params, rank = parameters(), dist.get_rank()
    optimizer = MAKERS[name](params, lr=0.05)
    run(optimizer, params, range(4))
    saved = copy.deepcopy(optimizer.rank_state_dict())
    if rank == 1:
        optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        give(params, 4, rank)
        with pytest.raises(
            ValueError, match=r"\(load a state on all ranks or on none\) to be equal"
        ):
            optimizer.step()
        assert all(torch.equal(p, w) for p, w in zip(params, before, strict=True))
    optimizer.load_state_dict(saved)
    run(optimizer, params, range(4, 6))


@checks()
def check_options_of_one_rank_are_told():
    p, rank = nn.Parameter(torch.zeros(4)), dist.get_rank()
    p.grad = torch.ones(4)
    for options in (
        {"freeze_step": 3 + rank},
        {"lr": 0.1 + rank},
        {"block": 64 << rank},
        {"variance_interval": rank},
        {"betas": (0.9, 0.9 + 0.01 * rank)},
        {"eps_inside_sqrt": rank == 1},
    ):
        message = f"OneBitAdam: expected {next(iter(options))} to be equal on every rank, got "
        with pytest.raises(ValueError, match=message):
            optim.OneBitAdam([p], **options).step()
    with pytest.raises(ValueError, match="expected coeff_beta to be equal on every rank, got 0.9 "):
        optim.OneBitLamb([p], coeff_beta=0.8 if rank else 0.9).step()


@checks(*((name,) for name in MAKERS))
def check_options_changed_on_one_rank_are_told(name):
    params, last = parameters(), dist.get_rank() == dist.get_world_size() - 1
    optimizer = MAKERS[name](params, lr=0.05)
    # ZeroOneAdam has a step of its own at 8, and synchronises at 9.
    for steps in (2, 4, 9):
        run(optimizer, params, range(optimizer.steps_taken, steps))
        weights = [p.detach().clone() for p in params]
        before = copy.deepcopy(optimizer.rank_state_dict())
        for option, value in (("lr", 0.04), ("weight_decay", 0.1), ("non_freeze", True)):
            group, kept = optimizer.param_groups[0], dict(optimizer.param_groups[0])
            group[option] = value if last else kept.get(option, False)
            give(params, steps, dist.get_rank())
            message = rf"{name}: expected {option} to be equal .*, got \[.*{value}\] on rank 2"
            with pytest.raises(ValueError, match=message):
                optimizer.step()
            group.clear()
            group.update(kept)
            assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
            assert_same(optimizer.rank_state_dict(), before)
    run(optimizer, params, range(9, 10))


@checks(*((name,) for name in MAKERS))
def check_gradients_too_large_for_the_type_they_travel_as(name):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    # The second one travels as it is after the freeze, too; float16 ends at 65504.
    for steps, options in ((1, {}), (6, {"non_freeze": True})):
        params = [nn.Parameter(torch.zeros(4, 80)) for _ in range(2)]
        optimizers = [
            MAKERS[name]([{"params": [p], **options}], lr=0.05, communication_data_type=dtype)
            for p, dtype in zip(params, (torch.float16, torch.float32), strict=True)
        ]
        for step in range(steps + 1):
            for p, optimizer in zip(params, optimizers, strict=True):
                give([p], step, rank)
                if step == steps:
                    p.grad = p.grad * 4e5 + (1e15 if rank == last else 0.0)
                optimizer.step()
        assert_equal_on_ranks(params)
        moments = [o.state[p]["exp_avg"] for o, p in zip(optimizers, params, strict=True)]
        # Rounded to 11 bits in each rank, and in each of two sums.
        bound = 2.0**-11 * 3 * moments[1].abs().max()
        assert moments[0].abs().max() > 1e13 and (moments[0] - moments[1]).abs().max() <= bound


@checks()
def check_many_parameters():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(520)]
    optimizer = optim.OneBitAdam(params, 0.1)
    last = dist.get_world_size() - 1
    for index in (1, 300, 510):
        params[index].grad = torch.ones(1) if dist.get_rank() == last else None
    optimizer.step()
    assert [i for i, p in enumerate(params) if bool(p)] == [1, 300, 510]
    assert_equal_on_ranks(params[300:301] + params[510:511])


@pytest.mark.parametrize("name", checks)
def test_over_three_ranks(name):
    checks.assert_passed(3, name)
