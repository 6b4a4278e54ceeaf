"""Several versions of weights, chains and slices: results of the published semantics."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call

import moe_ext
from moe_ext.distributed import MoEMesh
from moe_ext.distributed.dtensor import local_part
from moe_ext.pipeline import (
    ASYNCHRONOUS,
    Costs,
    Pipeline,
    WaveUpdates,
    in_flight,
    make_table,
    plan_slices,
    simulate,
    weight_versions,
)

P, MICRO, E = 4, 12, 4
# float64: sums of a few hundred terms near 1, whose order differs.
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
over_4 = Checks()
loss_of = nn.functional.mse_loss


def model():
    """Stages, the same on every rank; the last but one has experts and injects a balance loss."""
    torch.manual_seed(7)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(P)]
    stages[-2].append(moe_ext.MoELayer(6, 5, E, 2, balance=0.5))
    return nn.ModuleList(stages).double()


def batches(micro=MICRO, shape=(5,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(micro, *shape, 6, dtype=torch.float64, generator=generator)
    return list(x), list(torch.randn(x.shape, dtype=torch.float64, generator=generator))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)


def named_versions(name, stage, number, every=P):
    """The version of the weights with which a micro-batch passes a stage, as published."""
    return max(
        0,
        {
            # w(t+1) = w(t) - lr g(w_1(t-P+1), w_2(t-P+2), ..., w_P(t))
            "pipedream": number - (P - 1 - stage),
            # W(t+1) = W(t) - lr g(W(t-1))
            "pipedream-2bw": number // every - 1,
            # w(t+1) = w(t) - lr g(w(t-P+1))
            "hetpipe": number - (P - 1),
        }[name],
    )


@functools.cache
def trained(name, every):
    """All weights after one process has kept every version of every stage."""
    found, (x, y) = model(), batches()
    optimizers = [sgd(stage) for stage in found]
    moe_ext.nn.set_loss_scale(found, 1 / every)
    kept = [[copied(stage)] for stage in found]
    losses = []
    for number in range(MICRO):
        used = [kept[s][named_versions(name, s, number, every)] for s in range(P)]
        out = x[number]
        for stage, weights in zip(found, used, strict=True):
            out = functional_call(stage, weights, (out,))
        losses.append(loss_of(out, y[number]))
        leaves = [leaf for weights in used for leaf in weights.values()]
        grads = torch.autograd.grad(losses[-1] / every, leaves)
        for p, grad in zip(found.parameters(), grads, strict=True):
            p.grad = grad if p.grad is None else p.grad + grad
        if (number + 1) % every == 0:
            for stage, optimizer, versions in zip(found, optimizers, kept, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                versions.append(copied(stage))
    return found, torch.stack(losses).detach()


def copied(module):
    return {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}


class Divided(nn.Module):
    """A linear layer of DTensors, as experts over ranks are, of which each rank takes its part."""

    def __init__(self, like):
        super().__init__()
        where = init_device_mesh("cpu", (P,))
        for name, p in like.named_parameters():
            whole = DTensor.from_local(p.detach(), where, [Replicate()], run_check=False)
            self.register_parameter(name, nn.Parameter(whole))

    def forward(self, x):
        return nn.functional.linear(x, local_part(self.weight), local_part(self.bias))


@over_4(
    *((name, again) for name in ASYNCHRONOUS for again in (False, True)),
    ("pipedream-2bw", False, 6),  # more micro-batches an update than stages
    *((name, False, None, True) for name in ASYNCHRONOUS),
)
def weights_of_versions(name, recompute, every=None, divided=False):
    rank, (x, y) = dist.get_rank(), batches()
    stage = model()[rank]
    if divided:
        stage[0] = Divided(stage[0])
    optimizer = sgd(stage)

    def update(number):
        assert number == rank
        optimizer.step()
        optimizer.zero_grad()

    table = make_table(name, P, MICRO, micro_batches_per_update=every)
    pipeline = Pipeline(
        table, {rank: stage}, loss_of, group=dist.group.WORLD, update=update, recompute=recompute
    )
    losses = pipeline.step(x if rank == 0 else (), y if rank == P - 1 else ())
    want, want_losses = trained(name, every or (P if name == "pipedream-2bw" else 1))
    for (n, p), q in zip(stage.named_parameters(), want[rank].parameters(), strict=True):
        message = lambda m, n=n: f"{n}: {m}"  # noqa: E731
        torch.testing.assert_close(local_part(p), q, msg=message, **TIGHT)
        assert p.grad is None
    if losses:
        torch.testing.assert_close(torch.stack(losses), want_losses, **TIGHT)


@over_4()
def both_chains():
    rank, (x, y) = dist.get_rank(), batches()
    found, want = model(), model()
    stages = {rank: found[rank], P - 1 - rank: found[P - 1 - rank]}
    pipeline = Pipeline(make_table("chimera", P, MICRO), stages, loss_of, group=dist.group.WORLD)
    ends = rank in (0, P - 1)
    for _ in range(2):
        losses = pipeline.step(x if ends else (), y if ends else ())
    scale = 2 / MICRO  # two steps
    moe_ext.nn.set_loss_scale(want, scale)
    for each, target in zip(x, y, strict=True):
        (loss_of(nn.Sequential(*want)(each), target) * scale).backward()
    for stage, module in stages.items():
        for (n, p), q in zip(module.named_parameters(), want[stage].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=n: f"{n}: {m}", **TIGHT)
    assert len(losses) == (MICRO // 2 if ends else 0)


@functools.cache
def mesh():
    """Two pipelines of two stages."""
    return MoEMesh(dp=2, ep=1, pp=2)


def virtual_workers(staleness, stages=2, updates=5):
    """Weights of each worker after each of its updates, and in the end: (worker, update) to flat.

    A micro-batch goes with the weights of stages - 1 updates ago, a wave has as many micro-batches
    as stages; after wave c a worker has all updates of waves up to c - staleness, and its own.
    """
    found = nn.ModuleList(model()[:stages])
    start = nn.utils.parameters_to_vector(found.parameters()).detach()
    kept = {worker: [start] for worker in range(2)}
    waves, losses = {}, {}
    for number in range(updates):
        for worker in range(2):
            x, y = batches(updates, seed=worker)
            used = kept[worker][max(0, number - stages + 1)]
            nn.utils.vector_to_parameters(used.clone(), found.parameters())
            losses[worker, number] = loss_of(nn.Sequential(*found)(x[number]), y[number])
            grads = torch.autograd.grad(losses[worker, number], list(found.parameters()))
            step = -0.3 * nn.utils.parameters_to_vector(grads)
            wave = number // stages
            waves[worker, wave] = waves.get((worker, wave), 0) + step
            kept[worker].append(kept[worker][-1] + step)
        if (number + 1) % stages == 0:
            for worker in range(2):
                kept[worker][-1] = start + sum(
                    step
                    for (by, number), step in waves.items()
                    if by == worker or number <= wave - staleness
                )
    nn.utils.vector_to_parameters(start + sum(waves.values()), found.parameters())
    return found, losses


@over_4((0,), (1,), (2,))
def waves_of_virtual_workers(staleness, updates=5):
    rank, worker, (x, y) = mesh().pp_rank, mesh().dp_rank, batches(5, seed=mesh().dp_rank)
    stage = model()[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3)
    waves = WaveUpdates(
        stage.parameters(), mesh().stage_group, wave=mesh().pp_size, staleness=staleness
    )

    def update(_):
        optimizer.step()
        optimizer.zero_grad()
        waves.updated()

    table = make_table("hetpipe", 2, updates)
    pipeline = Pipeline(table, {rank: stage}, loss_of, group=mesh().pp_group, update=update)
    losses = pipeline.step(x if rank == 0 else (), y if rank == 1 else ())
    waves.finish()
    want, want_losses = virtual_workers(staleness)
    for p, q in zip(stage.parameters(), want[rank].parameters(), strict=True):
        torch.testing.assert_close(p, q, **TIGHT)
    for number, loss in enumerate(losses):
        torch.testing.assert_close(loss, want_losses[worker, number].detach(), **TIGHT)
    both = [torch.empty_like(p) for _ in range(2)]
    dist.all_gather(both, p.detach(), group=mesh().stage_group)
    assert torch.equal(*both)


class Attention(nn.Module):
    """Causal attention of a slice: keys and values of the slices before it are kept."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.experts = moe_ext.MoELayer(6, 5, E, 2, balance=0.5)

    def forward(self, x, past):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys = torch.cat([*(old[0] for old in past), k], 1)
        values = torch.cat([*(old[1] for old in past), v], 1)
        before = keys.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool).tril(before)
        out = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return x + self.experts(out), (k, v)

    def whole(self, x, lengths):
        """All slices at once: the balance loss of a slice counts as its length."""
        q, k, v = self.qkv(x).chunk(3, -1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        parts = []
        for part in out.split(lengths, 1):
            self.experts.loss_scale = part.shape[1] / out.shape[1] / 2
            parts.append(self.experts(part))
        return x + torch.cat(parts, 1)


@over_4((False,), (True,))
def slices(recompute):
    torch.manual_seed(3)
    rank, lengths = dist.get_rank(), [4, 1, 3]
    found = nn.ModuleList(Attention() for _ in range(P)).double()
    x, y = batches(2, (2, sum(lengths)))
    table = make_table("terapipe", P, 2, num_slices=3)
    pipeline = Pipeline(
        table,
        {rank: found[rank]},
        loss_of,
        group=dist.group.WORLD,
        slice_lengths=lengths,
        recompute=recompute,
    )
    losses = pipeline.step(x if rank == 0 else (), y if rank == P - 1 else ())
    grads, want = [p.grad.clone() for p in found[rank].parameters()], []
    found.zero_grad()
    for each, target in zip(x, y, strict=True):
        for stage in found:
            each = stage.whole(each, lengths)
        want.append(loss_of(each, target))
        (want[-1] / 2).backward()
    for grad, p in zip(grads, found[rank].parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, **TIGHT)
    if losses:
        torch.testing.assert_close(torch.stack(losses), torch.stack(want).detach(), **TIGHT)


test_ranks_have_the_results_of_one_process = over_4.test(P)


@pytest.mark.parametrize("ranks, micro", [(2, 4), (4, 12), (8, 24)])
def test_times_and_memory_are_those_of_the_papers(ranks, micro):
    f, i, w = 2, 3, 1
    for name in ASYNCHRONOUS:  # the bubble of one flush, whatever the number of updates
        table = make_table(name, ranks, micro)
        assert simulate(table, Costs(f, i, w)).idle == (((ranks - 1) * (f + i + w)),) * ranks
        assert in_flight(table) == tuple(range(ranks, 0, -1))
        wanted = {
            "pipedream": tuple(range(ranks, 0, -1)),
            "pipedream-2bw": (min(2, micro // ranks),) * ranks,
            "hetpipe": (ranks,) * ranks,
        }
        assert weight_versions(table) == wanted[name]
    assert weight_versions(make_table("1f1b", ranks, micro)) == (1,) * ranks
    slow = simulate(make_table("pipedream", ranks, micro), Costs(f, i, w, update=1.5))
    assert slow.idle == (((ranks - 1) * (f + i + w)),) * ranks
    assert slow.makespan == (ranks - 1 + micro) * (f + i + w) + micro * 1.5
    # Chimera: (P - 2) bubbles of one pass, P/2 + 1 to P micro-batches of activations.
    chimera = make_table("chimera", ranks, micro)
    assert simulate(chimera, Costs(1, 0.5, 0.5)).idle == ((ranks - 2),) * ranks
    up = [*range(ranks // 2 + 1, ranks + 1)]
    assert in_flight(chimera) == (*up, *reversed(up))
    # TeraPipe: the bubble of a slice.
    sliced = make_table("terapipe", ranks, micro, num_slices=5)
    assert simulate(sliced, Costs(f, i, w)).idle == (((ranks - 1) * (f + i + w)),) * ranks
    uneven = simulate(sliced, Costs(f, i, w, slices=(1, 1, 1, 1, 3)))
    assert max(uneven.idle) > (ranks - 1) * (f + i + w)


@pytest.mark.parametrize(
    "name, ranks, micro, options, message",
    [
        ("chimera", 3, 4, {}, "num_ranks and num_micro_batches of chimera to be even, got 3 and 4"),
        ("1f1b", 2, 4, {"num_slices": 2}, "num_slices of 1f1b to be None, got 2"),
        ("hetpipe", 2, 4, {"micro_batches_per_update": 2}, "of hetpipe to be None, got 2"),
        ("pipedream-2bw", 4, 12, {"micro_batches_per_update": 3}, "num_ranks or more.* got 3 over"),
        ("pipedream-2bw", 4, 10, {}, "to divide num_micro_batches 10, got 4"),
        ("terapipe", 4, 4, {"num_slices": 0}, "num_slices to be"),
    ],
)
def test_refuses_what_makes_no_table(name, ranks, micro, options, message):
    with pytest.raises(ValueError, match=f"make_table: expected .*{message}"):
        make_table(name, ranks, micro, **options)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("pipedream", {}, "update to be a function, for the updates of the table, got None"),
        ("1f1b", {"update": print}, "update to be None, got <built-in"),
        ("terapipe", {}, "slice_lengths to be the 2 lengths of the table's slices, got None"),
        ("1f1b", {"slice_lengths": [3, 2]}, r"slice_lengths to be None, got \[3, 2\]"),
        ("terapipe", {"slice_lengths": [5, 0]}, r".* slices, got \[5, 0\]"),
    ],
)
def test_refuses_what_does_not_go_with_the_table(name, options, message):
    table = make_table(name, 1, 2, num_slices=2 if name == "terapipe" else None)
    with pytest.raises(ValueError, match=f"Pipeline: expected {message}"):
        Pipeline(table, {0: nn.Linear(3, 3)}, loss_of, **options)


@pytest.mark.parametrize("ranks, rate", [(2, 0.1), (4, 0.1), (4, 0.0), (8, 3.0)])
def test_slices_are_the_best_of_all(ranks, rate):
    """By the simulator: the table's makespan with each slice's cost as a factor."""
    length, unit = 16, 2

    def cost(own, before):
        return 1 + own + rate * own * (before + own / 2)

    def makespan(lengths):
        starts = itertools.accumulate(lengths, initial=0)
        factors = [cost(*each) for each in zip(lengths, starts, strict=False)]
        table = make_table("terapipe", ranks, 1, num_slices=len(lengths))
        return simulate(table, Costs(slices=factors)).makespan

    found = plan_slices(length, ranks, cost, multiple=unit)
    cuts = range(unit, length, unit)
    every = [
        [b - a for a, b in itertools.pairwise((0, *inside, length))]
        for count in range(len(cuts) + 1)
        for inside in itertools.combinations(cuts, count)
    ]
    assert sum(found) == length
    assert makespan(found) == pytest.approx(min(map(makespan, every)))
    if rate == 0.1 and ranks == 4:
        assert found[0] > found[-1]  # later ones attend to more
    with pytest.raises(ValueError, match="plan_slices: expected length to be a multiple of 3, got"):
        plan_slices(length, ranks, cost, multiple=3)


def test_slices_are_the_best_of_all_for_costs_of_any_kind():
    """Section 3.3: the sum of the costs, and (P - 1) times the largest one."""
    generator = torch.Generator().manual_seed(0)
    length = 6
    every = [
        [b - a for a, b in itertools.pairwise((0, *inside, length))]
        for count in range(length)
        for inside in itertools.combinations(range(1, length), count)
    ]
    for ranks in [*range(1, 6)] * 20:
        costs = torch.rand(length + 1, length, generator=generator).tolist()

        def time(lengths, costs=costs, ranks=ranks):
            starts = itertools.accumulate(lengths, initial=0)
            each = [costs[own][before] for own, before in zip(lengths, starts, strict=False)]
            return sum(each) + (ranks - 1) * max(each)

        found = plan_slices(length, ranks, lambda own, before, costs=costs: costs[own][before])
        assert time(found) == pytest.approx(min(map(time, every)))


def test_refuses_waves_of_nothing():
    parameter = nn.Parameter(torch.ones(2))
    for given, options, message in (
        ([], {"wave": 2}, "parameters to be at least one, got none"),
        ([parameter], {"wave": 0}, "wave to be"),
        ([parameter], {"wave": 2, "staleness": -1}, "staleness to be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=f"WaveUpdates: expected {message}"):
            WaveUpdates(given, None, **options)


@pytest.mark.parametrize("several", [np.array, torch.tensor])
def test_lengths_of_slices_are_integers_of_any_library(several):
    class Past(nn.Linear):
        def forward(self, x, past):
            return super().forward(x), (x,)

    table, stage = make_table("terapipe", 1, 2, num_slices=2), Past(3, 3)
    pipeline = Pipeline(table, {0: stage}, nn.MSELoss(), slice_lengths=several([3, 1]))
    x = list(torch.randn(2, 5, 4, 3))
    pipeline.step(x, x)
    want = torch.autograd.grad(sum(nn.MSELoss()(stage(y, ())[0], y) / 2 for y in x), stage.weight)
    torch.testing.assert_close(stage.weight.grad, *want)
