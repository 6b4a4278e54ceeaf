"""What stages share: weights, norms, scales, losses of the whole batch, checkpoints."""

import copy
import functools
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from tables import table_of
from torch import nn

import moe_ext
from moe_ext.distributed import GradScaler, MoEMesh, checkpoint, clip_grad_norm_
from moe_ext.nn import Balance
from moe_ext.pipeline import Pipeline, make_table
from moe_ext.pipeline.step import StepRun
from moe_ext.pipeline.table import MESSAGES
from moe_ext.testing import spawn_ranks

P, MICRO, E, V = 2, 4, 4, 7
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
over_2 = Checks()


class Language(nn.ModuleList):
    """Embedding, blocks, and a head with its weights; rows are wider in the middle."""

    def __init__(self, scope="micro_batch"):
        torch.manual_seed(11)
        embedding = nn.Embedding(V, 6)
        head = nn.Linear(6, V, bias=False)
        head.weight = embedding.weight
        experts = moe_ext.MoELayer(10, 5, E, 2, balance=Balance(scope, coef=0.5))
        super().__init__(
            [
                nn.Sequential(embedding, nn.Linear(6, 8), nn.Tanh()),
                nn.Sequential(nn.Linear(8, 10), experts),
                nn.Sequential(nn.Linear(10, 6), nn.Tanh()),
                nn.Sequential(moe_ext.MoELayer(6, 5, E, 2, balance=Balance(scope)), head),
            ]
        )
        self.double()


def loss_of(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(V, (2, MICRO, 3, 5), generator=generator)
    return list(x[0]), list(x[1])


def one_process(scope="micro_batch"):
    found, (x, y) = Language(scope), batches()
    moe_ext.nn.set_loss_scale(found, 1 / MICRO)
    for each, target in zip(x, y, strict=True):
        (loss_of(nn.Sequential(*found)(each), target) / MICRO).backward()
    return found


TIED = [[(0, "0.weight"), (3, "1.weight")]]


def pipeline_of(name, found, **options):
    """Two ranks, four stages; each rank has its own copy of what others hold."""
    rank, table = dist.get_rank(), make_table(name, P, MICRO)
    stages = {s: found[s] for (_, s), r in table.rank_of.items() if r == rank}
    tied = TIED if table.num_stages == 4 else ()
    return Pipeline(table, stages, loss_of, group=dist.group.WORLD, tied=tied, **options)


def in_two_stages(found):
    """Stages of both chains, which every rank has."""
    return nn.ModuleList([nn.Sequential(*list(found)[:2]), nn.Sequential(*list(found)[2:])])


def step(pipeline, **options):
    x, y = batches()
    first, last = 0 in pipeline.stages, pipeline.table.num_stages - 1 in pipeline.stages
    return pipeline.step(x if first else (), y if last else (), **options)


def assert_same(pipeline, want):
    for stage, module in pipeline.stages.items():
        for (name, p), q in zip(module.named_parameters(), want[stage].parameters(), strict=True):
            text = f"{stage}.{name}"
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=text: f"{n}: {m}", **TIGHT)


@functools.cache
def mesh():
    return MoEMesh(dp=1, ep=1, pp=2)


@over_2(
    ("interleaved", "micro_batch"),  # embedding and head on two ranks
    ("interleaved", "sequence"),
    ("zero-bubble", "global_batch"),
    ("zbv", "micro_batch"),  # both on one
)
def tied_weights_losses_and_the_norm(name, scope):
    found, want = Language(scope), one_process(scope)
    pipeline = pipeline_of(name, found)
    step(pipeline)
    assert_same(pipeline, want)
    own = nn.ModuleList(pipeline.stages.values())
    norm = clip_grad_norm_(own, 0.01, mesh=mesh())
    expected = nn.utils.clip_grad_norm_(want.parameters(), 0.01)
    torch.testing.assert_close(norm, expected.double(), **TIGHT)
    assert_same(pipeline, want)
    # On top of what is there.
    step(pipeline)
    for p in own.parameters():
        p.grad /= 2
    expected = one_process(scope)
    for p, q in zip(want.parameters(), expected.parameters(), strict=True):
        p.grad = (p.grad + q.grad) / 2
    if scope != "global_batch":  # whose second step has counted the first one's tokens
        assert_same(pipeline, want)


@over_2(("interleaved",), ("chimera",))
def frozen_weights_that_several_ranks_have_get_no_gradient(name):
    """As in one process, where AdamW leaves them alone."""
    found = Language()
    if name == "chimera":
        found = in_two_stages(found)
    pipeline = pipeline_of(name, found)
    found.get_submodule("0.0").requires_grad_(False)
    step(pipeline)
    own = {id(p) for module in pipeline.stages.values() for p in module.parameters()}
    for p in found.parameters():
        assert (p.grad is not None) == (p.requires_grad and id(p) in own)


@over_2(("interleaved",), ("chimera",))
def weights_that_are_unfrozen_or_replaced_have_the_same_gradient_on_all_ranks(name):
    found, want = Language(), one_process()
    if name == "chimera":
        found = want = in_two_stages(found)
        found[1][1][1].weight = nn.Parameter(found[1][1][1].weight.detach().clone())
    found.requires_grad_(False)
    pipeline = pipeline_of(name, found)
    found.requires_grad_(True)
    own = nn.ModuleList(pipeline.stages.values())
    # Other objects in the place of the parameters.
    own.load_state_dict(copy.deepcopy(own.state_dict()), assign=True)
    step(pipeline)
    if name == "chimera":
        for p in own.parameters():
            both = [torch.empty_like(p) for _ in range(P)]
            dist.all_gather(both, p.grad)
            assert torch.equal(*both)
    else:
        assert_same(pipeline, want)
    total = torch.stack([p.grad.norm() for p in want.parameters()]).norm()
    torch.testing.assert_close(clip_grad_norm_(own, 1.0, mesh=mesh()), total, **TIGHT)


@over_2(("1f1b", (7, 8), torch.float32), ("1f1b", (8, 8), torch.float64))
@over_2(("chimera", (7, 8), torch.float32), ("chimera", (8, 8), torch.float64))
def refuses_copies_of_another_shape_or_dtype(name, shape, dtype):
    other = nn.Linear(*reversed(shape), dtype=dtype) if dist.get_rank() else nn.Linear(8, 8)
    is_tied = name == "1f1b"
    stages = {dist.get_rank(): other} if is_tied else {0: other, 1: nn.Linear(8, 8)}
    tied = [[(0, "weight"), (1, "weight")]] if is_tied else ()
    named = r"tied \[\(0, 'weight'\), \(1, 'weight'\)\]" if is_tied else "stage 0, but for frozen"
    with pytest.raises(ValueError, match=f"Pipeline: expected {named}.* the same shapes and dty"):
        Pipeline(make_table(name, 2, 2), stages, nn.MSELoss(), group=dist.group.WORLD, tied=tied)


@over_2(("interleaved",), ("zero-bubble",), ("chimera",))
def evaluation_gives_losses_alone(name):
    found = Language()
    if name == "chimera":
        found = in_two_stages(found)
    pipelines = [pipeline_of(name, found, recompute=recompute) for recompute in (False, True)]
    losses = [torch.stack(loss) for p in pipelines if (loss := step(p))]
    found.zero_grad()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            again = [torch.stack(loss) for p in pipelines if (loss := step(p))]
        torch.testing.assert_close(again, losses, rtol=0, atol=0)
    assert all(p.grad is None for p in found.parameters())


@over_2()
def all_ranks_take_a_scaled_step_or_none():
    found = Language()
    pipeline = pipeline_of("interleaved", found)
    own = [p for m in pipeline.stages.values() for p in m.parameters()]
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=1)
    with pytest.raises(ValueError, match="each stage would skip steps by itself"):
        step(pipeline, loss_scale=torch.ones(()))
    scales = []
    for place in (0, 1, None):
        before = [p.detach().clone() for p in own]
        optimizer.zero_grad()
        step(pipeline, loss_scale=scaler.scale(torch.ones(())))
        if place == dist.get_rank():
            own[-1].grad[0] = torch.inf
        scaler.unscale_(optimizer)
        if place is None:
            assert_same(pipeline, one_process())
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(*pair) for pair in zip(before, own, strict=True)]
        assert all(same) if place is not None else not any(same)
        scales.append(scaler.get_scale())
    assert scales == [128.0, 64.0, 128.0]


@over_2()
def a_frozen_stage_skips_a_scaled_step_with_the_others():
    rank = dist.get_rank()
    stage = nn.Linear(3, 3).requires_grad_(rank == 1)
    mse = nn.functional.mse_loss
    pipeline = Pipeline(make_table("1f1b", 2, 2), {rank: stage}, mse, group=dist.group.WORLD)
    optimizer, scaler = torch.optim.SGD(stage.parameters(), lr=0.1), GradScaler("cpu")
    x = [torch.ones(2, 3)] * 2
    for overflows in (True, False):
        optimizer.zero_grad()
        inputs, targets = (x, ()) if rank == 0 else ((), x)
        pipeline.step(inputs, targets, loss_scale=scaler.scale(torch.ones(())))
        if overflows and rank == 1:
            stage.weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15


class Slow(nn.Linear):
    """Says when a backward pass has ended, which takes a while."""

    def __init__(self, seconds):
        super().__init__(3, 3)
        self.seconds, self.ends = seconds, []

    def forward(self, x):
        out = super().forward(x)
        out.register_hook(self.sleep)
        return out

    def sleep(self, grad):
        time.sleep(self.seconds)
        self.ends.append(time.monotonic())


@over_2()
def a_step_ends_when_what_it_sends_has_come():
    rank = dist.get_rank()
    table = table_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    stage = Slow(0.2 if rank == 0 else 0.0)
    mse = nn.functional.mse_loss
    pipeline = Pipeline(table, {rank: stage}, mse, group=dist.group.WORLD)
    x = [torch.ones(2, 3)] * 2
    pipeline.step(x if rank == 0 else (), x if rank == 1 else ())
    ended = torch.tensor([time.monotonic(), stage.ends[0]], dtype=torch.float64)
    both = [torch.empty_like(ended) for _ in range(2)]
    dist.all_gather(both, ended)
    # Rank 0 receives the last gradient behind its first backward pass.
    assert both[1][0] >= both[0][1]


class Turned(nn.Module):
    """Gives a view that is not contiguous; may have no weight, or no gradient of its input."""

    def __init__(self, size, is_blind=False):
        super().__init__()
        self.linear, self.is_blind = nn.Linear(size, size) if size else nn.Identity(), is_blind

    def forward(self, x):
        return self.linear(x.detach() if self.is_blind else x).transpose(1, 2)


@over_2((False,), (True,))
def outputs_that_are_views_and_inputs_without_gradients(is_blind):
    torch.manual_seed(2)
    found = nn.ModuleList([Turned(0), Turned(4), Turned(5), Turned(4, is_blind)]).double()
    x = list(torch.randn(MICRO, 2, 4, 5, dtype=torch.float64))
    table, mse = make_table("zero-bubble", P, MICRO), nn.functional.mse_loss
    stages = {s: found[s] for (_, s), r in table.rank_of.items() if r == dist.get_rank()}
    pipeline = Pipeline(table, stages, mse, group=dist.group.WORLD)
    pipeline.step(x if 0 in stages else (), x if 3 in stages else ())
    grads = [p.grad for p in nn.ModuleList(stages.values()).parameters()]
    found.zero_grad()
    for each in x:
        (mse(nn.Sequential(*found)(each), each) / MICRO).backward()
    wanted = [p.grad for p in nn.ModuleList(stages.values()).parameters()]
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(grad) if want is None else want, **TIGHT)


test_ranks_have_what_one_process_has = over_2.test(P)


class Autoencoder(nn.Module):
    """One weight in two places, behind the bias that each of them has."""

    def __init__(self):
        super().__init__()
        self.biases = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        hidden = torch.tanh(nn.functional.linear(x, self.weight, self.biases[0]))
        return nn.functional.linear(hidden, self.weight.t(), self.biases[1])


class Halves(nn.Linear):
    """A hook halves the gradient of what comes in the middle."""

    def forward(self, x):
        hidden = super().forward(x)
        hidden.register_hook(lambda grad: grad / 2)
        return torch.tanh(hidden)


def compiled(*modules):
    return torch.compile(nn.Sequential(*modules), backend="aot_eager")


class LogCosh(nn.Module):
    def forward(self, x, target):
        return torch.log(torch.cosh(x - target)).mean()


class WeightedLoss(nn.Linear):
    def forward(self, x, target):
        return nn.functional.mse_loss(super().forward(x), target)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "make_stage, make_loss",
    [
        (Autoencoder, nn.MSELoss),
        (lambda: Halves(6, 6), nn.MSELoss),
        (lambda: nn.Linear(6, 6), lambda: WeightedLoss(6, 6)),
        (lambda: compiled(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.MSELoss),
        (lambda: nn.Linear(6, 6), lambda: torch.compile(LogCosh(), backend="aot_eager")),
    ],
    ids=["shared", "hook", "loss", "compiled", "compiled loss"],
)
def test_weights_have_the_gradients_of_one_process(schedule, recompute, make_stage, make_loss):
    torch.manual_seed(4)
    stages = [nn.Linear(6, 6), make_stage()]
    loss, inputs = make_loss(), nn.Linear(6, 6)
    model = nn.ModuleList([inputs, *stages, loss]).double()
    batches = torch.randn(3, 5, 6, dtype=torch.float64)

    def gradients():
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    for x in batches:
        (loss(nn.Sequential(inputs, *stages)(x), x) / 3).backward()
    want = gradients()
    table = make_table(schedule, 1, 3)
    pipeline = Pipeline(table, dict(enumerate(stages)), loss, recompute=recompute)
    pipeline.step([inputs(x) for x in batches], list(batches))
    torch.testing.assert_close(gradients(), want, **TIGHT)


class Named(nn.Module):
    """The whole model with this rank's layers alone, under the names that they have in it."""

    def __init__(self, seed, own):
        super().__init__()
        torch.manual_seed(seed)
        routers = [moe_ext.nn.TopKRouter(6, E, 2, selection_bias=True) for _ in range(3)]
        layers = [nn.Linear(6, 6), *(moe_ext.MoELayer(6, 5, E, router=r) for r in routers)]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers) if i in own})
        self.double()


def saved_and_loaded(rank, path, ranks, first, last):
    """Train from a checkpoint or from the start, as one of so many stages; save and return all."""
    if rank >= ranks:  # of a pool
        return None
    group = dist.group.WORLD if dist.is_initialized() else None
    alone = None if group is None else MoEMesh(dp=1, ep=1, pp=ranks).stage_group
    own = range(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    model = Named(5 if first == 0 else 6, own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if first:
        checkpoint.load(path / str(first), model, optimizer)
    stage = nn.Sequential(*model.layers.values())
    table = make_table("1f1b", ranks, MICRO)
    mse = nn.functional.mse_loss
    pipeline = Pipeline(table, {rank: stage}, mse, group=group)
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        x = list(torch.randn(MICRO, 5, 6, generator=generator, dtype=torch.float64))
        optimizer.zero_grad()
        pipeline.step(x if rank == 0 else (), x if rank == ranks - 1 else ())
        optimizer.step()
        if rank or ranks < 4:  # the first of four has no experts
            moe_ext.nn.update_selection_bias(model, rate=0.1 + number, group=alone)
    checkpoint.save(path / str(last), model, optimizer)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_stages_are_loaded_by_another_number_of_them(tmp_path):
    want = saved_and_loaded(0, tmp_path / "whole", 1, 0, 4)
    spawn_ranks(saved_and_loaded, 2, tmp_path, 2, 0, 2)
    on_one = saved_and_loaded(0, tmp_path, 1, 2, 4)
    on_four = {}
    for part in spawn_ranks(saved_and_loaded, 4, tmp_path, 4, 2, 4):
        on_four |= part
    assert want["layers.3.router.selection_bias"].abs().sum() > 0
    for found in (on_one, on_four):
        assert found.keys() == want.keys()
        for name, p in want.items():
            torch.testing.assert_close(found[name], p, **TIGHT)


@pytest.mark.parametrize(
    "tied, message",
    [
        ([[(0, "weight"), (2, "weight")]], r"to name stages, got \(2, 'weight'\)"),
        ([[(0, "bias2"), (1, "weight")]], r"to name parameters of stages, got \(0, 'bias2'\)"),
        ([[(0, "weight"), (1, "weight")]], "of one rank to be the same object, got"),
    ],
)
def test_refuses_what_is_not_tied(tied, message):
    stages = {i: nn.Linear(3, 3) for i in range(2)}
    with pytest.raises(ValueError, match=f"Pipeline: expected tied .*{message}"):
        Pipeline(make_table("zbv", 1, 2), stages, loss_of, tied=tied)
    with pytest.raises(ValueError, match="tied to be empty for a table with updates"):
        Pipeline(
            make_table("pipedream", 1, 2), {0: nn.Linear(3, 3)}, loss_of, tied=tied, update=print
        )


def dies(rank, name, text):
    """The middle one of three ranks dies in an action: before it computes, or behind a post."""
    pipeline = Pipeline(
        make_table(name, 3, MICRO),
        {rank: nn.Linear(3, 3)},
        nn.functional.mse_loss,
        group=dist.group.WORLD,
    )
    run = StepRun._run

    def run_and_die(self, action):
        is_message = action.kind in MESSAGES
        if is_message:
            run(self, action)
        if rank == 1 and str(action) == text:
            os.kill(os.getpid(), signal.SIGKILL)
        if not is_message:
            run(self, action)

    StepRun._run = run_and_die
    x, start = [torch.ones(2, 3)] * MICRO, time.monotonic()
    try:
        pipeline.step(x if rank == 0 else (), x if rank == 2 else ())
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize(
    "name, text",
    [
        ("1f1b", "1F1"),
        ("zb-h1", "1W0"),
        ("1f1b", "1SEND_F1"),
        ("1f1b", "1RECV_B0"),
    ],
)
def test_survivors_of_a_kill_name_stage_micro_batch_and_action(name, text):
    found = spawn_ranks(dies, 3, name, text, may_die=[1])
    for rank in (0, 2):
        kind, words, seconds = found[rank]
        assert kind == "RankFailureError" and seconds < 15, found[rank]
        where = rf"{rank}(RECV|SEND)_[FB]\d \(stage {rank}, micro-batch \d\) on rank {rank}"
        assert re.match(f"Pipeline.step, {where}", words), words
        assert "rank 1 died" in words or "rank 1 did not answer" in words
