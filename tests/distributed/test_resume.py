"""Twelve steps are six, a checkpoint and six more, for every optimizer and every scheduler.

Rates that a resumed run did not have again: pytorch-lightning #5455, ColossalAI #5151.
"""

import copy
import functools
import inspect
import itertools
import os
import pickle
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import restarted
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import Script
from pairwise import FULL, pairs
from test_public_api import public
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils

import moe_ext
from moe_ext import distributed as md
from moe_ext import optim
from moe_ext.comm.groups import global_rank
from moe_ext.compression import (
    CompressionState,
    PowerSGD,
    Quantize,
    TopK,
    compress_gradients,
    compress_hook,
    zero_plus_plus,
)
from moe_ext.distributed.dtensor import divided_as, local_part
from moe_ext.testing import spawn_ranks

D, E, STEPS = 4, 4, 12
OURS = {
    name: cls
    for name, cls in vars(optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
}
ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
# Compressed steps, of which one rank's own state alone has all: those of `state_dict`.
COMPRESSED = {
    "OneBitAdam": {"freeze_step": 3, "variance_interval": 1},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 3, "local_step_scaler": 40},
}
DENSE = {"ZeroOneAdam": {"var_update_scaler": 1000}}
THEIRS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adam with a tensor as rate": {"betas": (0.8, 0.9), "foreach": False},
    "RMSprop": {"momentum": 0.5, "centered": True},
    # Not NAdam, whose product of momenta torch's `load_state_dict` turns from float32 to float64.
    "Adamax": {"weight_decay": 0.1},
}
OPTIMIZERS = [*OURS, *THEIRS]
SCHEDULERS = {
    name: cls
    for module in (lr_scheduler, swa_utils)
    for name, cls in vars(module).items()
    if inspect.isclass(cls)
    and issubclass(cls, lr_scheduler.LRScheduler)
    and cls not in (lr_scheduler.LRScheduler, getattr(lr_scheduler, "_LRScheduler", None))
}
# Arguments of those that have none by default, or whose defaults do nothing within the steps.
ARGUMENTS = {
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 4},
    "MultiStepLR": {"milestones": [2, 4, 4, 9]},
    "ConstantLR": {"total_iters": 8},
    "LinearLR": {"total_iters": 9},
    "PolynomialLR": {"total_iters": 10, "power": 2.0},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 8},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "ReduceLROnPlateau": {"patience": 2},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-2, "step_size_up": 4},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": STEPS + 1},
    "SWALR": {"swa_lr": 5e-2, "anneal_epochs": 7},
}
WAYS = ("checkpoint", "DCP", "state_dict")


def schedulers_of(number, optimizer):
    """Schedulers that an optimizer has in one process."""
    if "tensor" in optimizer:
        return list(SCHEDULERS)
    cycles = ["CyclicLR", "OneCycleLR"]
    others = [name for name in SCHEDULERS if name not in cycles]
    return [*cycles, others[number % len(others)]]


# On two ranks, and from there on one: every optimizer and every scheduler with every way. In one
# process: every optimizer with the schedulers that change more than rates, and one more; a rate
# that is a tensor with every scheduler. In a full run every one with every other.
CASES = (
    pairs(OPTIMIZERS, SCHEDULERS, WAYS)
    if FULL
    else [
        (OPTIMIZERS[(5 * shift + place) % len(OPTIMIZERS)], scheduler, way)
        for shift, way in enumerate(WAYS)
        for place, scheduler in enumerate(SCHEDULERS)
    ]
)
ALONE = (
    pairs(OPTIMIZERS, SCHEDULERS, WAYS)
    if FULL
    else [
        (optimizer, scheduler, WAYS[(i + j) % len(WAYS)])
        for i, optimizer in enumerate(OPTIMIZERS)
        for j, scheduler in enumerate(schedulers_of(i, optimizer))
    ]
)


class Model(nn.Module):
    """Experts, over ranks or not, whose router has a random state, beside a dense layer."""

    def __init__(self, ep_group, dtype, seed=5):
        super().__init__()
        torch.manual_seed(seed)
        router = moe_ext.nn.NoisyTopKRouter(D, E, 2)
        self.layer = moe_ext.MoELayer(D, 3, E, 2, router=router, ep_group=ep_group)
        self.head = nn.Linear(D, 3)
        self.to(dtype)


def dtype_of(name):
    """Float64 where the optimizer takes it; in 16 bits CPUAdamW has masters."""
    one = {"CPUAdamW": torch.bfloat16, "DeMo": torch.float32}
    return torch.float32 if name in ONE_BIT else one.get(name, torch.float64)


def make_optimizer(name, model, *, way, over_ranks):
    if name in ONE_BIT:
        options = COMPRESSED[name] if way == "state_dict" else DENSE.get(name, {})
        groups = optim.param_groups(model, process_groups=over_ranks)
        return OURS[name](groups, lr=1e-2, **options)
    if name in OURS:
        if name in ("CPUAdamW", "DeMo"):
            return OURS[name](model.named_parameters(), lr=1e-2)
        return OURS[name](optim.param_groups(model, muon=name == "Muon"), lr=1e-2)
    rate = torch.tensor(1e-2) if "tensor" in name else 1e-2
    cls = getattr(torch.optim, name.partition(" ")[0])
    return cls(model.named_parameters(), lr=rate, **THEIRS[name])


def make_scheduler(name, optimizer):
    arguments = dict(ARGUMENTS.get(name, {}))
    if name in ("CyclicLR", "OneCycleLR"):
        cycles = {"momentum", "betas"} & optimizer.defaults.keys()
        arguments["cycle_momentum"] = bool(cycles)
    if name in ("SequentialLR", "ChainedScheduler"):
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=3)]
        parts.append(lr_scheduler.CosineAnnealingLR(optimizer, 20))
        if name == "ChainedScheduler":
            return SCHEDULERS[name](parts)
        return SCHEDULERS[name](optimizer, parts, milestones=[4])
    return SCHEDULERS[name](optimizer, **arguments)


def take_steps(model, optimizer, scheduler, steps):
    """Gradients of the whole model's parameters, the same on all ranks but where these exchange."""
    # DeMo's momentum is each rank's own.
    own = 10_000 * global_rank() if isinstance(optimizer, optim.DeMo) else 0
    for step in steps:
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(own + 100 * step + index)
            whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = divided_as(whole.to(parameter.dtype), parameter)
        optimizer.step()
        # The random state moves on, and so does what a plateau looks at.
        model.layer.router.rng_state.add_(step)
        metric = [step % 5] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
        scheduler.step(*metric)


def scramble(optimizer):
    """Other rates, decays and directions than those that were saved."""
    for group in optimizer.param_groups:
        for name in optimizer.defaults:
            value = group.get(name)
            if name in ("maximize", "nesterov", "bias_correction"):
                group[name] = not value
            elif isinstance(value, float | torch.Tensor):
                group[name] = value / 2 + 0.25


def made(name, schedule, way, group, seed=5):
    own = None if name == "DeMo" else group
    model = Model(own, dtype_of(name), seed)
    optimizer = make_optimizer(name, model, way=way, over_ranks=own is not None)
    return model, optimizer, make_scheduler(schedule, optimizer)


def wholes(model, optimizer):
    """Weights, random state, and the options of each parameter, as one process would have them."""
    weights = {name: x.clone() for name, x in md.full_state_dict(model).items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    options = {
        names[p]: {
            name: float(value) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names", "name")
        }
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return weights, options


def own_state(optimizer):
    """The state dict of this rank, for as many ranks."""
    return getattr(optimizer, "rank_state_dict", optimizer.state_dict)()


class Prepared(torch.optim.Optimizer):
    """An optimizer in the wrapper of a tool such as Accelerate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state, self.param_groups = optimizer.state, optimizer.param_groups
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


def save(way, path, model, optimizer, scheduler):
    if way == "checkpoint":
        extra = {"scheduler": scheduler.state_dict()}
        md.checkpoint.save(path, model, Prepared(optimizer), extra=extra)
        return None
    if way == "DCP":
        optimizer.zero_grad()
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=path)
        return scheduler.state_dict()
    with md.whole_state_dicts(optimizer, keep=True):
        return copy.deepcopy((model.state_dict(), own_state(optimizer), scheduler.state_dict()))


def in_double(value):
    """A copy of a state, whose tensors are of another type, as they may be on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
    if isinstance(value, dict):
        return {key: in_double(item) for key, item in value.items()}
    return [in_double(item) for item in value] if isinstance(value, list) else value


def load(way, path, saved, model, optimizer, scheduler):
    alone = not dist.is_initialized()
    # torch's optimizers go on in the tensors that they load, and CyclicLR takes entries out.
    saved = copy.deepcopy(saved)
    if way == "checkpoint":
        extra = {"scheduler": scheduler.state_dict()}
        md.checkpoint.load(path, model, Prepared(optimizer), extra=extra)
        scheduler.load_state_dict(extra["scheduler"])
        return
    if way == "DCP":
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path, no_dist=alone)
        set_model_state_dict(model, state["model"])
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path, no_dist=alone)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        scheduler.load_state_dict(saved)
        return
    model.load_state_dict(saved[0])
    own = in_double(saved[1]) if isinstance(optimizer, optim.DeMo) else saved[1]
    with md.whole_state_dicts(optimizer):
        optimizer.load_state_dict(own)
    scheduler.load_state_dict(saved[2])


def goes_on(case, path, saved, group):
    """Six steps from what was saved, by a new model of other weights and options."""
    name, schedule, way = case
    model, optimizer, scheduler = made(name, schedule, way, group, seed=6)
    scramble(optimizer)
    load(way, path, saved, model, optimizer, scheduler)
    take_steps(model, optimizer, scheduler, range(STEPS // 2, STEPS))
    return wholes(model, optimizer)


def assert_same(found, wanted, where, atol=0.0):
    assert found[1] == wanted[1], where
    assert found[0].keys() == wanted[0].keys()
    for name, tensor in wanted[0].items():
        if atol:
            torch.testing.assert_close(found[0][name], tensor, rtol=0, atol=atol, msg=str(where))
        else:
            assert torch.equal(found[0][name], tensor), (*where, name)


def run_cases(rank, folder):
    """All cases on two ranks that share the experts: on both, and what one process begins with."""
    group = md.MoEMesh(dp=1, ep=2).ep_group
    found = {}
    for number, case in enumerate(CASES):
        if case[::2] == ("DeMo", "DCP"):
            check_momentum_is_missed(group)
        else:
            found[case] = run_case(case, folder / str(number), group)
    return found if rank == 0 else None


def run_case(case, path, group):
    """Twelve steps beside six and six: where they are saved, what is, and where they end."""
    name, schedule, way = case
    model, optimizer, scheduler = made(name, schedule, way, group)
    take_steps(model, optimizer, scheduler, range(STEPS // 2))
    saved = save(way, path, model, optimizer, scheduler)
    if dist.is_initialized() and (name, way) == ("DeMo", "checkpoint"):
        saved = momentum_of(optimizer)
        dist.all_reduce(saved.div_(2))
    take_steps(model, optimizer, scheduler, range(STEPS // 2, STEPS))
    wanted = wholes(model, optimizer)
    assert_same(goes_on(case, path, saved, group), wanted, case)
    return path, saved, wanted


def momentum_of(optimizer):
    return optimizer.state_dict()["momentum"]["residual"]


def subclasses(cls):
    return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]


class Loop:
    """A model that trains, and what else has a state, by name."""

    # Whether each rank has data of its own, and whether its weights are those of all ranks.
    own_data, same_weights = True, True
    # Numbers of all steps, and of those before it is saved.
    steps, saved_after = STEPS, (STEPS // 2,)

    def __init__(self, model, optimizer=None, /, **parts):
        self.model, self.parts = model, parts
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(self, number):
        self.optimizer.zero_grad()
        self.backward(self.run_model(self.batch(number)).square().mean(), number)
        self.reduce()
        self.optimizer.step()

    def batch(self, number):
        seed = 100 * number + global_rank() * self.own_data
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
        return x.to(next(self.model.parameters()).dtype)

    def run_model(self, x):
        return self.model(x)

    def backward(self, loss, number):
        loss.backward()

    def reduce(self):
        pass

    def run(self, steps):
        for number in steps:
            self.step(number)

    def state_of(self, part):
        return part.state_dict()


def network(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 64)).to(dtype)


class Scaled(Loop):
    """The scale grows every third step; the gradients of the fifth step overflow."""

    own_data = False

    def __init__(self, seed):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        super().__init__(network(seed), scaler=scaler)

    def backward(self, loss, number):
        scaler = self.parts["scaler"]
        scaler.scale(loss * float("inf") if number == 4 else loss).backward()

    def reduce(self):
        # In the place of `optimizer.step()`, which then has nothing to do.
        scaler = self.parts["scaler"]
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        # The scale is part of what training depends on.
        with torch.no_grad():
            self.model[0].bias.add_(scaler.get_scale() * 1e-6)


class Reduced(Loop):
    """A loop of one's own that compresses; feedback is each rank's own."""

    codec = Quantize("int4", stochastic=True)

    def __init__(self, seed):
        model = network(seed, torch.float32)
        state = CompressionState(model=model, codec=self.codec)
        super().__init__(model, compression=state)

    def reduce(self):
        compress_gradients(self.model, self.parts["compression"])


class ReducedTopK(Reduced):
    codec = TopK(0.1, algorithm="split")


class ReducedPowerSGD(Reduced):
    codec = PowerSGD(rank=2)


class Hooked(Loop):
    """DistributedDataParallel with the hook."""

    def __init__(self, seed):
        model = network(seed, torch.float32)
        state = CompressionState(model=model, codec="int4")
        # Its buckets stay those of the first pass.
        self.parallel = DistributedDataParallel(model, find_unused_parameters=True)
        self.parallel.register_comm_hook(state, compress_hook)
        super().__init__(model, compression=state)

    def run_model(self, x):
        return self.parallel(x)


class Sharded(Loop):
    """FSDP2 with compressed gradients."""

    def __init__(self, seed):
        model = fully_shard(network(seed, torch.float32), mesh=world_mesh())
        options = {"zero_quantized_gradients": True, "error_feedback": True, "min_numel": 64}
        options["stochastic"] = True
        super().__init__(model, compression=zero_plus_plus(model, **options))

    def state_of(self, part):
        return part.state_dict(sharded=False)


class Local(Loop):
    """Rounds of five steps, of which seven end in one; each worker has its own weights."""

    same_weights, saved_after = False, (5, 7)
    outer = optim.DiLoCo
    options = {"codec": "int4"}
    momentum = 0.9

    def __init__(self, seed):
        model = network(seed)
        fragments, options = self.fragments(model), {"momentum": self.momentum, "lr": 0.7}
        outer = [torch.optim.SGD(part.parameters(), **options) for part in fragments]
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if self.outer is optim.MuLoCo:
            inner = optim.Muon(optim.param_groups(model, muon=True), lr=1e-2)
        every = 5 * len(fragments)
        local = self.outer(None, fragments, inner, outer, sync_every=every, **self.options)
        super().__init__(model, inner, local=local, model=model, inner=inner)

    def fragments(self, model):
        return [model]

    def run(self, steps):
        with self.parts["local"]:
            super().run(steps)


class LocalInParts(Local):
    """Two fragments, of which one has been averaged in the round, and the other has not."""

    options = {"codec": "int4", "fragment_sync_delay": 1}
    # The first one is averaged once more.
    steps, saved_after = 17, (7,)

    def fragments(self, model):
        return [model[0], model[2]]


class LocalSparse(Local):
    outer, options, momentum = optim.SparseLoCo, {"density": 0.1, "chunk": 64}, 0.0


class LocalMuon(Local):
    outer, options = optim.MuLoCo, {}


class Moved(Loop):
    """Experts that move in each pass."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        group = md.MoEMesh(dp=1, ep=2).ep_group
        rebalance = moe_ext.nn.Rebalance("exact", break_even=0.0)
        layer = moe_ext.MoELayer(
            64, 8, 4, 1, ep_group=group, dispatcher=moe_ext.nn.Dispatch(rebalance=rebalance)
        )
        super().__init__(layer.double())

    def reduce(self):
        md.sync_gradients(self.model)


# All that keeps a state beside model and optimizer.
LOOPS = {cls.__name__: cls for cls in subclasses(Loop)}


def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def run_loops(rank, folder):
    """Each loop, by checkpoints with the states of each rank, and by state dicts in memory."""
    for name, cls, after in [(n, c, after) for n, c in LOOPS.items() for after in c.saved_after]:
        path = folder / f"{name}{after}"

        def states(loop):
            return {f"{part}{rank}": loop.state_of(x) for part, x in loop.parts.items()}

        def shared(loop):
            return (loop.model, loop.optimizer) if loop.same_weights else (nn.Module(), ())

        first = cls(5)
        first.run(range(after))
        kept = copy.deepcopy(states(first))
        md.checkpoint.save(path, *shared(first), extra=states(first))
        first.run(range(after, cls.steps))
        # Without the states of its parts a loop ends elsewhere: else it would not use them.
        for way in ("checkpoint", "state_dict", "without"):
            again = cls(6)
            found = states(again)
            md.checkpoint.load(path, *shared(again), extra=found)
            found = {"checkpoint": found, "state_dict": kept, "without": {}}[way]
            for part, x in again.parts.items() if found else ():
                x.load_state_dict(in_double(found[f"{part}{rank}"]))
            again.run(range(after, cls.steps))
            pairs_of = zip(first.model.parameters(), again.model.parameters(), strict=True)
            same = [torch.equal(*(local_part(p.detach()) for p in pair)) for pair in pairs_of]
            assert all(same) == (way != "without" or not first.parts), (name, after, way, same)

    check_a_round_underway()


def check_a_round_underway():
    """What is on its way is in no state: it is refused, and a step later it is not."""
    loop = LocalInParts(5)
    loop.run(range(4))
    with pytest.raises(RuntimeError, match="DiLoCo.state_dict: expected no message to be underway"):
        loop.parts["local"].state_dict()
    loop.run(range(4, 5))
    loop.parts["local"].state_dict()


def test_states_beside_the_optimizer(tmp_path):
    spawn_ranks(run_loops, 2, tmp_path)


def check_momentum_is_missed(group):
    """torch's state dicts of optimizers leave out what DeMo keeps for all parameters at once."""
    model, optimizer, scheduler = made("DeMo", "StepLR", "DCP", group)
    take_steps(model, optimizer, scheduler, range(2))
    with pytest.raises(ValueError, match="DeMo: expected a state with this rank's momentum"):
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    """What each case has saved, and where it ended."""
    folder, limit = tmp_path_factory.mktemp("resume"), 1800.0 if FULL else 120.0
    return spawn_ranks(run_cases, 2, folder, timeout=limit)[0]


def test_each_pair_is_tried():
    """Every optimizer of the reference, every scheduler and every way, on one rank and on two."""
    columns = (OPTIMIZERS, SCHEDULERS, WAYS, (1, 2))
    rows = [(*case, ranks) for ranks, cases in ((1, ALONE), (2, CASES)) for case in cases]
    for i, j in itertools.combinations(range(len(columns)), 2):
        if (i, j) == (0, 1) and not FULL:
            continue
        wanted = set(itertools.product(columns[i], columns[j]))
        assert {(row[i], row[j]) for row in rows} == wanted
    found = {value for _, _, value in public() if inspect.isclass(value)}
    assert {x for x in found if issubclass(x, torch.optim.Optimizer)} == {*OURS.values()}
    rounds = {getattr(loop, "outer", None) for loop in LOOPS.values()}
    assert {x for x in found if issubclass(x, optim.DiLoCo)} <= rounds


def test_bits_on_as_many_ranks(saved_by_two):
    """The ranks compare them."""
    assert set(saved_by_two) == {case for case in CASES if case[::2] != ("DeMo", "DCP")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_in_one_process(tmp_path, name):
    for number, case in enumerate(case for case in ALONE if case[0] == name):
        if case[::2] == ("DeMo", "DCP"):
            check_momentum_is_missed(None)
            case = (*case[:2], "state_dict")
        run_case(case, tmp_path / str(number), None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_takes_the_same_steps_or_is_refused(name):
    model, optimizer, _ = made(name, "StepLR", "state_dict", None)
    scheduler = SimpleNamespace(step=lambda *_: None)
    take_steps(model, optimizer, scheduler, range(STEPS // 2))
    ways = copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))
    if name in (*ONE_BIT, "DeMo"):
        for copied in ways:
            with pytest.raises(TypeError, match=f"{name}: expected its state_dict.* to be copied"):
                copied(optimizer)
        return
    copies = [(model, optimizer), *(copied((model, optimizer)) for copied in ways)]
    for pair in copies:
        take_steps(*pair, scheduler, range(STEPS // 2, STEPS))
    for pair in copies[1:]:
        assert_same(wholes(*pair), wholes(*copies[0]), name)


# Rounding of sums over a parameter, which another number of ranks takes in another order: each step
# has a relative rate below 1 of weights below 8, by norms of fewer than 32 elements in float64.
REORDERED = STEPS * 8 * 32 * 2**-52


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_number_of_ranks(saved_by_two, name):
    """One process goes on from what two have saved, but with what a rank alone owes."""
    for case in (case for case in saved_by_two if case[0] == name):
        path, saved, wanted = saved_by_two[case]
        if name in ONE_BIT and case[2] == "state_dict":
            continue
        if name == "DeMo":
            # It has the mean of the momentums; no other rank's steps follow from it.
            if case[2] == "checkpoint":
                model, optimizer, scheduler = made(*case, None, seed=6)
                load("checkpoint", path, None, model, optimizer, scheduler)
                assert torch.equal(momentum_of(optimizer), saved)
            continue
        assert_same(goes_on(case, path, saved, None), wanted, case, REORDERED)


@pytest.mark.slow
def test_torchrun_starts_again_after_a_rank_has_died(tmp_path):
    """The second try goes on from the checkpoint, and ends with the bits of one that ran through.

    Without the variable the ranks of the second try find those of the first in torch's store.
    """
    folders = [tmp_path / name for name in ("through", "again")]
    for folder in folders:
        folder.mkdir()
    wanted = spawn_ranks(restarted.train, 2, folders[0], False)[0][0]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", restarted.__file__, str(folders[1])]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = tmp_path / "log"
    assert Script(command, environment, log).wait(120) == 0, log.read_text()
    found = torch.load(folders[1] / "end.pt")
    assert found["tries"] == 1 and found["first"] == restarted.EVERY
    assert found["weights"].keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found["weights"][name], tensor), name


def trained(seed=0, **options):
    """A layer and AdamW after a step."""
    torch.manual_seed(seed)
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(layer.named_parameters(), **{"lr": 1e-2, **options})
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return layer, optimizer


def values(layer, optimizer):
    state = md.checkpoint.TrainingState(layer, optimizer).state_dict()
    return {name: x.clone() for name, x in state.items()}


def assert_unchanged(layer, optimizer, before):
    after = values(layer, optimizer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_checkpoints_of_earlier_versions(tmp_path):
    """They have no options: the loader says so, and what else is missing."""
    state = values(*trained(lr=1e-4))
    old = {name: x for name, x in state.items() if "optimizer_options" not in name}
    dcp.save(old, checkpoint_id=tmp_path / "old", no_dist=True)
    fewer = {name: x for name, x in old.items() if not name.endswith("_avg.bias")}
    fewer.pop("optimizer.step.bias"), fewer.pop("optimizer.exp_avg_sq.bias")
    dcp.save(fewer, checkpoint_id=tmp_path / "fewer", no_dist=True)
    dcp.save(
        {"model.weight": state["model.weight"], "model.bias": state["model.bias"]},
        checkpoint_id=tmp_path / "none",
        no_dist=True,
    )
    for folder, text in (
        ("old", "no options of parameter groups: learning rates"),
        ("fewer", "no options of parameter groups, and no state of bias: learning"),
        ("none", "no options and states of optimizers: learning rates"),
    ):
        layer, optimizer = trained(seed=1)
        with pytest.warns(UserWarning, match=text):
            md.checkpoint.load(tmp_path / folder, layer, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2


class Keeping(torch.optim.SGD):
    """Has a state of its own."""

    kept = None

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = self.kept


@pytest.mark.parametrize("kept", (0.1, 2**40 + 1, True, torch.tensor(0.1)))
def test_numbers_of_any_optimizer_come_back(tmp_path, kept):
    layer, _ = trained()
    optimizer, other = Keeping(layer.parameters()), Keeping(layer.parameters())
    optimizer.kept = kept
    optimizer.step()
    md.checkpoint.save(tmp_path, layer, optimizer)
    md.checkpoint.load(tmp_path, layer, other)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


@pytest.mark.parametrize(
    ("kept", "found"),
    (
        ([torch.ones(2)], "list"),
        ({"x": 1}, "dict"),
        (torch.ones(4, 4), r"shape \(4, 4\)"),
    ),
)
def test_a_state_that_no_checkpoint_has_is_refused(tmp_path, kept, found):
    """Instead, `extra` has it."""
    layer, _ = trained()
    optimizer, other = Keeping(layer.parameters()), Keeping(layer.parameters())
    optimizer.kept = kept
    optimizer.step()
    with pytest.raises(ValueError, match=f"expected kept of weight in .*got {found}; save the"):
        md.checkpoint.save(tmp_path, layer, optimizer)
    md.checkpoint.save(tmp_path, layer, extra={"optimizer": optimizer})
    md.checkpoint.load(tmp_path, layer, extra={"optimizer": other})
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_options_that_do_not_fit_are_refused(tmp_path):
    layer, optimizer = trained(maximize=True)
    md.checkpoint.save(tmp_path / "whole", layer, optimizer)
    ours = optim.CPUAdamW(layer.named_parameters())
    before = values(layer, ours)
    with pytest.raises(ValueError, match="options of a parameter group to be those of CPUAdamW, g"):
        md.checkpoint.load(tmp_path / "whole", layer, ours)
    assert_unchanged(layer, ours, before)
    head = torch.optim.AdamW([("bias", layer.bias)])
    md.checkpoint.save(tmp_path / "head", layer, head)
    layer, optimizer = trained(seed=1)
    before = values(layer, optimizer)
    with pytest.raises(
        ValueError, match="expected one whose optimizers held weight, got one whose"
    ):
        md.checkpoint.load(tmp_path / "head", layer, optimizer)
    groups = [
        {"params": [("weight", layer.weight)], "lr": 0.5},
        {"params": [("bias", layer.bias)], "betas": (0.5, 0.6)},
    ]
    md.checkpoint.save(tmp_path / "two", layer, torch.optim.AdamW(groups))
    text = r"same options, got betas=\[0.9, 0.999\] for weight and betas=\[0.5, 0.6\] for bias"
    with pytest.raises(ValueError, match=text):
        md.checkpoint.load(tmp_path / "two", layer, optimizer)
    assert_unchanged(layer, optimizer, before)
    with pytest.raises(ValueError, match="each parameter in one optimizer, got weight in two"):
        md.checkpoint.save(tmp_path / "both", layer, [optimizer, optimizer])


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("saved", "other", "option"),
    [
        (SGD, torch.optim.Adam, "betas"),
        (SGD, torch.optim.RMSprop, "alpha"),
        (torch.optim.Adam, SGD, "momentum"),
        (torch.optim.Adam, torch.optim.NAdam, "momentum_decay"),
    ],
)
def test_another_optimizer_is_refused_before_a_change(tmp_path, saved, other, option):
    """torch's own load_state_dict fails once the model is read, or takes a state that it drops."""
    layer = nn.Linear(2, 2)
    first = saved(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    first.step()
    md.checkpoint.save(tmp_path, layer, first)
    state = values(layer, first)
    optimizer = other(layer.parameters())
    nn.init.ones_(layer.weight)
    before = values(layer, optimizer)
    text = f"of the classes that were saved, got {type(optimizer).__name__} for one without "
    for load in (
        lambda: md.checkpoint.load(tmp_path, layer, optimizer),
        lambda: md.checkpoint.TrainingState(layer, optimizer).load_state_dict(state),
    ):
        with pytest.raises(ValueError, match=text + option):
            load()
        assert_unchanged(layer, optimizer, before)


def test_groups_may_be_others(tmp_path):
    """Options are those of the parameter, in whatever group; what cannot be written is named."""
    layer, _ = trained()
    groups = [{"params": [layer.weight], "lr": 0.5}, {"params": [layer.bias], "betas": (0.5, 0.6)}]
    optimizer = torch.optim.AdamW(groups)
    optimizer.param_groups[0]["own"] = layer
    with pytest.warns(UserWarning, match="the option 'own' of a parameter group is not saved"):
        md.checkpoint.save(tmp_path, layer, optimizer)
    other = torch.optim.AdamW(
        [{"params": [layer.bias]}, {"params": [layer.weight], "lr": torch.tensor(0.1)}]
    )
    md.checkpoint.load(tmp_path, layer, other)
    assert other.param_groups[0]["betas"] == (0.5, 0.6)
    assert isinstance(other.param_groups[1]["lr"], torch.Tensor)
    assert [float(group["lr"]) for group in other.param_groups] == [1e-3, 0.5]


class Counting(nn.Linear):
    """Has a state that is no tensor."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = {"rows": 0}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_extra_state_of_modules(tmp_path):
    layer, other = Counting(), Counting()
    layer.seen = {"rows": 7, "names": ["a"]}
    md.checkpoint.save(tmp_path, layer)
    md.checkpoint.load(tmp_path, other)
    assert other.seen == layer.seen


def stepped(steps):
    """An optimizer with momenta, and its scheduler."""
    torch.manual_seed(steps)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1, 3])
    for _ in range(steps):
        weight.square().sum().backward()
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


class Refuses(nn.Linear):
    """Refuses its extra state, as a module, and its state, as one of `extra`."""

    def __init__(self, refuses):
        super().__init__(2, 2)
        self.refuses = refuses

    def get_extra_state(self):
        return {"rows": 0}

    def set_extra_state(self, state):
        if self.refuses:
            raise KeyError("seen")


def load_on_one_rank_alone(rank, folder):
    """All ranks raise what one of them raises once the model is written."""
    layer, optimizer = trained()
    md.checkpoint.save(folder / "module", Refuses(False))
    md.checkpoint.save(folder / "extra", layer, optimizer, extra={"more": Refuses(False)})
    text = r"hold parts of two states now: load again .*, after KeyError\('seen'\) on rank 1"
    for load in (
        lambda: md.checkpoint.load(folder / "module", Refuses(rank == 1)),
        lambda: md.checkpoint.load(
            folder / "extra", layer, optimizer, extra={"more": Refuses(rank == 1)}
        ),
    ):
        with pytest.raises(RuntimeError, match=text):
            load()


def test_a_load_that_one_rank_refuses_late(tmp_path):
    spawn_ranks(load_on_one_rank_alone, 2, tmp_path)


@pytest.mark.parametrize("way", (md.checkpoint.save, md.checkpoint.async_save))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_extra_comes_back(tmp_path, way):
    """Keys that are no texts, mappings without entries, their classes, objects with a state."""
    (optimizer, scheduler), (other, other_scheduler) = stepped(2), stepped(0)
    saved = {
        "seen": {3: 4, 5: torch.ones(2), (1, 2): {True: 0.5}},
        "new": {"of": {}, "loader": [{"workers": {}, "names": ["a"]}]},
        "ordered": OrderedDict(b=1, a={}),
        "counted": Counter({2: 7}),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "optimizer": optimizer.state_dict(),
    }
    before = {
        "seen": {3: 0, 5: torch.zeros(2), (1, 2): {True: 0.0}},
        "new": {},
        "ordered": OrderedDict(b=0),
        "counted": Counter({2: 1}),
        "conjugate": torch.tensor([0j]),
        "optimizer": other.state_dict(),
    }
    own = copy.deepcopy(before)
    parts = {"part of optimizer": optimizer, "scheduler": scheduler}
    if (written := way(tmp_path, nn.Linear(2, 2), extra={**saved, **parts})) is not None:
        written.result()
    found = {**before, "part of optimizer": other, "scheduler": other_scheduler}
    md.checkpoint.load(tmp_path, nn.Linear(2, 2), extra=found)
    assert found.pop("part of optimizer") is other
    assert found.pop("scheduler") is other_scheduler
    assert repr(found) == repr(saved)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())
    assert other_scheduler.state_dict() == scheduler.state_dict()
    # The given mappings are as before, but for tensors that were read into.
    own["seen"][5].fill_(1), own["conjugate"].fill_(1 - 2j)
    assert repr(before) == repr(own)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_extra_takes_what_was_saved_of_another_kind(tmp_path):
    kinds = [torch.ones(2), [1], 7, None]
    pairs_of = [*itertools.product(kinds, kinds), ({"a": {"b": [torch.ones(2)]}}, None), ({}, None)]
    saved, found = (
        {f"{nested} {i}": {"y": pair[side]} if nested else pair[side]
         for nested in (False, True) for i, pair in enumerate(copy.deepcopy(pairs_of))}
        for side in (0, 1)
    )  # fmt: skip
    md.checkpoint.save(tmp_path, nn.Linear(2, 2), extra=saved)
    md.checkpoint.load(tmp_path, nn.Linear(2, 2), extra=found)
    assert repr(found) == repr(saved)


@pytest.mark.parametrize("extra", [{"model.weight": 0}, {"model": {"weight": 0}}])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_extra_takes_no_name_of_the_model(tmp_path, extra):
    with pytest.raises(ValueError, match=r"extra to hold no model\.weight, which"):
        md.checkpoint.save(tmp_path, nn.Linear(2, 2), extra=extra)


def save_what_differs(rank, folder):
    found = []
    for state in (torch.tensor([rank]), np.int64(rank), np.arange(3) + rank, f"of {rank}"):
        alike = {"step": 3, "order": np.arange(3)}
        extra = {**alike, "random": {"state": state}, f"rank{rank}": rank}
        with pytest.warns(UserWarning, match=r"random.state of extra differs between") as caught:
            md.checkpoint.save(folder, nn.Linear(2, 2), extra=extra)
        found.append(len([w for w in caught if "of extra differs" in str(w.message)]))
    return found


def test_extra_that_differs_between_ranks(tmp_path):
    assert spawn_ranks(save_what_differs, 2, tmp_path) == [[1] * 4] * 2


def save_apart(rank, folder):
    """Each rank with a folder of its own: the error of all, and the number that is still there."""
    model = nn.Linear(2, 2)
    md.checkpoint.save(folder / "0", model, extra={"saved": 1})
    for way in (md.checkpoint.save, md.checkpoint.async_save):
        with pytest.raises(RuntimeError, match=r"a folder that all ranks share, .* on rank 0"):
            written = way(folder / str(rank), model, extra={"saved": 2})
            written.result()
    found = {"saved": 0}
    md.checkpoint.load(folder / "0", model, extra=found)
    return found["saved"]


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path):
    assert spawn_ranks(save_apart, 2, tmp_path) == [1, 1]


def test_a_full_disk_is_an_exception(tmp_path, monkeypatch):
    from moe_ext.distributed.checkpoint_files import ReplacingWriter

    layer, optimizer = trained()
    before = values(layer, optimizer)
    md.checkpoint.save(tmp_path, layer, optimizer)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReplacingWriter, "write_data", fail)
    text = "save: .*No space left on device, on rank 0"
    with pytest.raises(RuntimeError, match=text):
        md.checkpoint.save(tmp_path, *trained(seed=1))
    with pytest.raises(RuntimeError, match=text):
        md.checkpoint.async_save(tmp_path, *trained(seed=1)).result()
    layer, optimizer = trained(seed=2)
    md.checkpoint.load(tmp_path, layer, optimizer)
    assert_unchanged(layer, optimizer, before)
