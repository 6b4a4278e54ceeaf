"""The optimizers that communicate themselves, over ranks."""

import copy
import functools
import io
import math

import pytest
import torch
import torch.distributed as dist
from one_bit_formulas import (
    SignMean,
    adam_by_formula,
    lamb_by_formula,
    zero_one_by_formula,
)
from one_bit_ranks import (
    BLOCK,
    MAKERS,
    assert_equal_on_ranks,
    give,
    owed,
    parameters,
    rank_gradient,
    run,
    total,
)
from rank_checks import Checks, assert_same_bits
from torch import nn

import moe_ext
from moe_ext import distributed as md
from moe_ext import optim
from moe_ext.distributed.dtensor import local_part

# Checks that need four ranks, or an even number of them, are in the second one.
over_3, over_4 = Checks(), Checks()


@over_3(*((name,) for name in MAKERS))
def check_equal_bits_in_bfloat16(name):
    params = parameters(torch.bfloat16)
    optimizer = MAKERS[name](params, lr=0.05, weight_decay=0.1)
    before = [p.detach().clone() for p in params]
    for step in range(10):
        run(optimizer, params, [step])
        if name != "ZeroOneAdam" or optimizer.synchronised:
            assert_equal_on_ranks(params)
    optimizer.flush()
    assert_equal_on_ranks(params)
    assert not torch.equal(params[0], before[0])
    assert all(bool(torch.isfinite(p).all()) for p in params)
    assert not bool(owed(optimizer).any())
    assert {optimizer.state[p]["exp_avg"].dtype for p in params} == {torch.float32}


def adam_of_ranks(w, grads, **common):
    return adam_by_formula(w, grads, freeze=3, corrected=True, inside=False, **common)


def lamb_of_ranks(w, grads, **common):
    options = {"beta3": 0.6, "factors": (0.5, 4.0), "threshold": 0.1}
    return lamb_by_formula(w, grads, freeze=3, **options, **common)[0]


def zero_one_of_ranks(w, grads, **common):
    return zero_one_by_formula(w, grads, freeze=5, kappa=2, scaler=3, clipper=4, **common)


PUBLISHED = {
    "adam": (
        functools.partial(optim.OneBitAdam, freeze_step=3, variance_interval=0),
        adam_of_ranks,
    ),
    "lamb": (
        functools.partial(optim.OneBitLamb, freeze_step=3, coeff_beta=0.6, bias_correction=False),
        lamb_of_ranks,
    ),
    "zero_one": (MAKERS["ZeroOneAdam"], zero_one_of_ranks),
}


@over_3()
@over_4()
def check_it_is_the_published_algorithm():
    """Blocks that end in padding: 40 and 44 of 64 elements, and 40 in the place of all."""
    rank, ranks, betas, eps = dist.get_rank(), dist.get_world_size(), (0.8, 0.95), 1e-3
    options = {"lr": 0.05, "betas": betas, "eps": eps, "weight_decay": 0.1, "block": BLOCK}
    common = {"lr": 0.05, "betas": betas, "eps": eps, "decay": 0.1}
    for shapes in (((40,),), ((300,), (3, 50), (4, 64))):
        generator = torch.Generator().manual_seed(1)
        starts = [torch.randn(shape, generator=generator) for shape in shapes]
        for name, (make, by_formula) in PUBLISHED.items():
            params = [nn.Parameter(start.clone()) for start in starts]
            optimizer = make(params, **options)
            run(optimizer, params, range(16), rank)
            assert_equal_on_ranks(params)
            # Each rank computes what one of them has to be.
            for index in range(rank, len(params), ranks):
                p, start = params[index], starts[index]
                grads = [
                    [rank_gradient(p.shape, step, r, index).double() for r in range(ranks)]
                    for step in range(16)
                ]
                want = by_formula(start.double(), grads, mean=SignMean(BLOCK), **common)
                error = (p.detach() - want).abs().max()
                # Float32: 16 steps of some ten roundings each, of weights of up to about 4.
                assert error <= 160 * 2.0**-24 * 4, (p.shape, name, error)


@over_3()
def check_bytes_are_those_of_the_formula():
    ranks = dist.get_world_size()
    numel = 2 * 3 * 4 * 1024 * BLOCK // 16  # whole blocks for 2, 3 and 4 ranks
    steps, freeze = 12, 3
    p = nn.Parameter(torch.zeros(numel // 64, 64))
    optimizer = optim.OneBitAdam(
        [p],
        freeze_step=freeze,
        block=BLOCK,
        communication_data_type=torch.bfloat16,
        variance_interval=5,
    )
    sent = []
    for step in range(steps):
        give([p], step, dist.get_rank())
        with md.count_traffic() as traffic:
            optimizer.step()
        sent.append(traffic.total_bytes)
    share = 2 * (ranks - 1) / ranks
    dense = share * 2 * numel
    compressed = share * (numel / 8 + 4 * numel / BLOCK)
    for look in (4, 9):  # steps 5 and 10
        sent[look] -= share * 4 * numel / BLOCK
    assert sent == [dense] * freeze + [compressed] * (steps - freeze)
    # The published average, w + (1 - w) / 16 of 16-bit gradients, is that of the signs alone.
    scales = share * 4 * numel / BLOCK * (steps - freeze)
    warm = freeze / steps
    assert math.isclose((sum(sent) - scales) / (dense * steps), warm + (1 - warm) / 16)


@over_3()
def check_zero_one_sends_nothing_between_synchronisations():
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = MAKERS["ZeroOneAdam"]([p])
    kinds = []
    for step in range(16):
        give([p], step, dist.get_rank())
        with md.count_traffic() as traffic:
            optimizer.step()
        sizes = {0: "-", 2 * (dist.get_world_size() - 1) * p.nbytes // dist.get_world_size(): "d"}
        kinds.append(sizes.get(traffic.total_bytes, "c"))
        assert optimizer.synchronised == (kinds[-1] != "-")
    # Variance at steps 1, 2, 4; frozen after 5; intervals 1 (6 to 8), 2 (9 to 11), then 4.
    assert "".join(kinds) == "ddcdc" + "ccc" + "-c-" + "c---c"


@over_3(*((name,) for name in MAKERS))
def check_nan_or_infinity_on_one_rank(name):
    params = parameters()
    optimizer = MAKERS[name]([(f"p{i}", p) for i, p in enumerate(params)], lr=0.05)
    bad_rank = dist.get_world_size() - 1
    for done, more, bad in ((0, 2, math.inf), (2, 7, math.nan), (7, 9, math.inf)):
        run(optimizer, params, range(done, more))
        weights = [p.detach().clone() for p in params]
        before = copy.deepcopy(optimizer.rank_state_dict())
        give(params, 99, dist.get_rank())
        if dist.get_rank() == bad_rank:
            params[2].grad[1, 1, 1] = bad
        message = f"{name}: expected gradients to be finite, got NaN or infinity for 'p2' on rank "
        with pytest.raises(ValueError, match=message + str(bad_rank)):
            optimizer.step()
        assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
        assert_same_bits(optimizer.rank_state_dict(), before)
    run(optimizer, params, range(9, 11))


@over_3(*((name,) for name in MAKERS))
def check_zeros_stay_zero(name):
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(12, 20))  # rows share blocks
    experts = nn.Parameter(torch.randn(4, 8, 64))
    optimizer = MAKERS[name]([table, experts], lr=0.05)
    start = [table.detach().clone(), experts.detach().clone()]
    rank, steps = dist.get_rank(), 16
    for step in range(steps):
        give([table, experts], step, rank)
        table.grad[6:] = 0
        experts.grad[2:] = 0
        optimizer.step()
    for p, first in ((table, 6), (experts, 2)):
        assert torch.equal(p[first:], start[p is experts][first:])
        state = optimizer.rank_state_dict()["state"][int(p is experts)]
        assert not bool(state["worker_error"][first:].any())
        assert not bool(state["exp_avg"][first:].any())
        assert bool(state["worker_error"][:first].any())
        assert not torch.equal(p[:first], start[p is experts][:first])
    assert not bool(optimizer.rank_state_dict()["state"][0]["touched_rows"][6:].any())
    # A row and an expert that only the last rank meets, after v was frozen at zero.
    for step in range(steps, steps + 4):
        give([table, experts], step, rank)
        table.grad[6:], experts.grad[2:] = 0, 0
        if rank == dist.get_world_size() - 1:
            table.grad[9], experts.grad[3] = 1.0, 1.0
        optimizer.step()
    assert torch.equal(table[10:], start[0][10:])
    assert torch.equal(experts[2], start[1][2])
    for moved, was in ((table[9], start[0][9]), (experts[3], start[1][3])):
        step = (moved - was).abs()
        assert 0 < step.max() < 2.0
    optimizer.flush()
    assert_equal_on_ranks([table, experts])


@over_3()
def check_gradients_that_some_ranks_lack():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, make in MAKERS.items():
        p, q = nn.Parameter(torch.zeros(3, 64)), nn.Parameter(torch.zeros(3, 64))
        optimizer = make([p, q], lr=0.05)
        for _ in range(8):
            p.grad = torch.ones(3, 64) if rank == 0 else None
            optimizer.step()
        optimizer.flush()
        assert_equal_on_ranks([p])
        assert bool((p < 0).all()), name
        assert not bool(q.any())
        if name == "OneBitAdam":
            torch.testing.assert_close(
                optimizer.state[p]["exp_avg"].mean().item(), (1 - 0.9**8) / ranks, rtol=1e-4, atol=0
            )


@over_3(*((name,) for name in MAKERS))
def check_without_gradients_nothing_is_owed_nor_moves(name):
    p, q = nn.Parameter(torch.zeros(3, 64)), nn.Parameter(torch.zeros(5, 20))
    optimizer = MAKERS[name]([p, q], lr=0.05)
    last = 10 if name == "ZeroOneAdam" else 5  # a synchronisation
    run(optimizer, [p, q], range(last))
    assert name != "ZeroOneAdam" or optimizer.synchronised
    index = next(i for i, e in enumerate(optimizer._means[0].entries) if e.parameter is q)

    def of_q():
        mean = optimizer._means[0]
        owed_q = mean.parts_of(mean.errors())[index]
        return [t.clone() for t in (q.detach(), optimizer.state[q]["exp_avg"], owed_q)]

    before = of_q()
    assert bool(total(before[2]).any())
    for step in range(last, last + 4):
        give([p, q], step, dist.get_rank())
        q.grad = None
        optimizer.step()
    assert_same_bits(of_q(), before)


class Model(nn.Module):
    def __init__(self, ep_group):
        super().__init__()
        torch.manual_seed(5)
        self.inp = nn.Linear(6, 16)
        self.moe = moe_ext.MoELayer(16, 8, 4, 2, ep_group=ep_group)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.inp(x) + self.moe(self.inp(x)))


@over_4()
def check_expert_parallel():
    for ep, etp in ((2, 1), (4, 1), (1, 2), (2, 2)):
        mesh = md.MoEMesh(dp=4 if etp > 1 else 4 // ep, ep=ep, etp=etp)
        ours, want = Model(mesh.ep_group), Model(mesh.ep_group)
        with pytest.raises(
            ValueError, match="process_group of ranks that hold the same part of 'm"
        ):
            optim.OneBitAdam(optim.param_groups(ours))
        groups = optim.param_groups(ours, process_groups=True)
        optimizer = optim.OneBitAdam(groups, 0.01, freeze_step=2, block=BLOCK)
        apart = optim.param_groups(want)
        adam = torch.optim.AdamW(apart, 0.01, weight_decay=0.0, foreach=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(4):
            x = torch.randn(12, 6, generator=generator)
            for model in (ours, want):
                model.zero_grad()
                model(x).square().mean().backward()
            optimizer.step()
            md.sync_gradients(want)
            adam.step()
            if step < 2:
                for p, q in zip(ours.parameters(), want.parameters(), strict=True):
                    torch.testing.assert_close(local_part(p), local_part(q), rtol=1e-4, atol=1e-5)
        experts = {name for name, *_ in md.expert_parameters(ours)}
        assert_equal_on_ranks([p for n, p in ours.named_parameters() if n not in experts])
        parts = ep * etp
        replicas = dist.new_subgroups_by_enumeration(
            [[r for r in range(4) if r % parts == part] for part in range(parts)]
        )[0]
        held = [local_part(p) for n, p in ours.named_parameters() if n in experts]
        assert_equal_on_ranks(held, replicas)
        state = optimizer.rank_state_dict()
        assert [s["world_size"] for s in state["compression"]["servers"]] == [4, 4 // parts]
        torch.save(state, io.BytesIO())
        optimizer.load_state_dict(state)


@over_4()
def check_shards_of_experts_take_the_steps_of_whole_ones():
    """With etp, in blocks that no shard cuts: bits of whole experts, on as many copies."""
    mesh = md.MoEMesh(dp=4, ep=1, etp=2)
    pairs = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    torch.manual_seed(1)
    shards = moe_ext.MoELayer(BLOCK, 2 * BLOCK, 2, ep_group=mesh.ep_group).experts
    whole = moe_ext.MoELayer(BLOCK, 2 * BLOCK, 2).experts
    whole.load_state_dict(md.full_state_dict(shards))
    places = md.placements(shards)
    with pytest.raises(ValueError, match="OneBitLamb: .* that a rank holds whole, .* got parts in"):
        optim.OneBitLamb(optim.param_groups(shards, process_groups=True))
    for name in ("OneBitAdam", "ZeroOneAdam"):
        groups = optim.param_groups(shards, process_groups=True)
        found = MAKERS[name](groups, lr=0.05, weight_decay=0.1)
        wanted = MAKERS[name](whole.parameters(), lr=0.05, weight_decay=0.1, group=pairs)
        for step in range(14):
            for index, (path, p) in enumerate(whole.named_parameters()):
                p.grad = rank_gradient(p.shape, step, dist.get_rank() // 2, index)
                grad = places[path].part_of(p.grad).contiguous()
                shards.get_parameter(path).grad = places[path].whole(grad)
            found.step()
            wanted.step()
            for path, p in whole.named_parameters():
                mine = local_part(shards.get_parameter(path))
                assert torch.equal(mine, places[path].part_of(p.data)), step


@over_3()
def check_non_freeze_stays_dense():
    ranks = dist.get_world_size()
    p, q = nn.Parameter(torch.zeros(4, 64)), nn.Parameter(torch.zeros(4, 64))
    want = nn.Parameter(torch.zeros(4, 64))
    optimizer = optim.OneBitAdam(
        [{"params": [p]}, {"params": [q], "non_freeze": True}], 0.05, freeze_step=2
    )
    adam = torch.optim.AdamW([want], 0.05, weight_decay=0.0, foreach=True)
    for step in range(6):
        give([p, q], step, dist.get_rank())
        grads = [rank_gradient(q.shape, step, rank, 1) for rank in range(ranks)]
        want.grad = torch.stack(grads).mean(0)
        optimizer.step()
        adam.step()
    torch.testing.assert_close(q, want, rtol=1e-4, atol=1e-5)
    assert len(optimizer.rank_state_dict()["compression"]["servers"][0]["parameters"]) == 1


@over_3()
def check_a_mask_that_is_written_between_steps():
    params, mask = parameters(), torch.ones(9, 20)
    groups = [{"params": params[:1], "exp_avg_mask": mask}, {"params": params[1:]}]
    optimizer = MAKERS["OneBitAdam"](groups, lr=0.05)
    run(optimizer, params, range(6))
    mask[4:, ::2] = 0
    run(optimizer, params, range(6, 8))
    state = optimizer.rank_state_dict()["state"][0]
    assert not bool(state["exp_avg"][mask == 0].any() or state["worker_error"][mask == 0].any())


@over_3()
def check_masks():
    mask = torch.ones(9, 20)
    mask[4:, ::2] = 0
    # DeepSpeed's is flat; a group may have one row for all.
    for given in (mask, mask.view(-1), mask[4]):
        params, held = parameters(), given.expand(9, 20) if given.numel() == 20 else mask
        groups = [{"params": params[:1], "exp_avg_mask": given}, {"params": params[1:]}]
        optimizer = MAKERS["OneBitAdam"](groups, lr=0.05)
        run(optimizer, params, range(3))
        before = params[0].detach().clone()
        run(optimizer, params, range(3, 8))
        state = optimizer.rank_state_dict()["state"][0]
        assert not bool(state["exp_avg"][held == 0].any())
        assert not bool(state["worker_error"][held == 0].any())
        assert torch.equal(params[0][held == 0], before[held == 0])
        assert not torch.equal(params[0], before)
    message = r"exp_avg_mask to have as many elements .*, 180 in shape \(9, 20\) of parameter 0 "
    with pytest.raises(ValueError, match=message):
        MAKERS["OneBitAdam"]([{"params": params[:1], "exp_avg_mask": mask[:3]}])
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["exp_avg_mask"] = mask[:3]
    weights = params[0].detach().clone()
    give(params, 8, dist.get_rank())
    with pytest.raises(ValueError, match=message + ".* on rank 1"):
        optimizer.step()
    assert torch.equal(params[0], weights)


test_over_three_ranks = over_3.test(3)


test_over_four_ranks = over_4.test(4)
