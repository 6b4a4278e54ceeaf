"""Horovod's calls on two ranks against one process that saw all rows."""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ext.integrations.horovod as hvd
from moe_ext import MoELayer
from moe_ext.testing import spawn_ranks


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def rows(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin()


# Steps of each rank before it joins: the last to join is the middle one, the lowest, one of two.
ENDS = [(2, 4, 1), (4, 1, 2), (4, 4, 1), (1, 4, 4)]


def two_optimizers(rank):
    """Sums and means by an optimizer each, stepped in turn, while ranks run out of data."""
    hvd.init()
    found = []
    for ends in ENDS:
        model = made(seed=1)
        layers = model[0], model[2]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), op=op)
            for layer, op in zip(layers, (hvd.Sum, hvd.Average), strict=True)
        ]
        hvd.init()  # a second time changes nothing
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict.. to be copied or pickled"):
                copied(optimizers[0])
        for step in range(ends[rank]):
            model.zero_grad()
            x, y = rows(rank, step)
            F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        found.append((last, [p.detach() for p in model.parameters()]))
    return found


def summed_and_averaged(ends):
    model = made(seed=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(ends)):
        model.zero_grad()
        for rank, end in enumerate(ends):
            if step < end:
                x, y = rows(rank, step)
                F.mse_loss(model(x), y).backward()
        for p in model[2].parameters():
            p.grad /= len(ends)
        sgd.step()
    return [p.detach() for p in model.parameters()]


def test_sums_and_two_optimizers_while_ranks_join():
    for found in spawn_ranks(two_optimizers, 3):
        for ends, (last, parameters) in zip(ENDS, found, strict=True):
            assert last == max(rank for rank, end in enumerate(ends) if end == 4)
            for p, want in zip(parameters, summed_and_averaged(ends), strict=True):
                torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-12)


# What Horovod's documentation lists, by name and order; horovod.torch of 0.28.
REDUCE = ("average", "name", "op", "prescale_factor", "postscale_factor", "process_set")
SIGNATURES = {
    "init": ("comm", "process_sets"),
    "allreduce": ("tensor", *REDUCE[:2], "compression", *REDUCE[2:]),
    "allreduce_": ("tensor", *REDUCE),
    "allreduce_async": ("tensor", *REDUCE),
    "allgather": ("tensor", "name", "process_set"),
    "broadcast": ("tensor", "root_rank", "name", "process_set"),
    "broadcast_": ("tensor", "root_rank", "name", "process_set"),
    "broadcast_object": ("obj", "root_rank", "name", "process_set"),
    "allgather_object": ("obj", "name", "process_set"),
    "broadcast_parameters": ("params", "root_rank", "process_set"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model"),
    "barrier": ("process_set",),
    "join": ("device",),
    "DistributedOptimizer": (
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "num_groups",
        "groups",
        "sparse_as_dense",
        "process_set",
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_horovods_in_its_order(name):
    assert tuple(inspect.signature(getattr(hvd, name)).parameters) == SIGNATURES[name]


def test_names_that_are_absent_say_what_to_use():
    assert not set(hvd._ABSENT) & set(hvd.__all__)
    for name in hvd._ABSENT:
        with pytest.raises(AttributeError, match=rf"horovod\.{name}: expected .*; use \w+"):
            getattr(hvd, name)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        hvd.other  # noqa: B018


def documented(rank):
    """Each call of Horovod's documentation on two ranks."""
    hvd.init()
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (rank, 2, rank)
    assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (2, 0, 1)
    x = torch.tensor([1.0, 4.0]) if rank else torch.tensor([3.0, 2.0])
    assert hvd.allreduce(x, False).tolist() == [4.0, 6.0]
    assert hvd.allreduce(x, True, "x", hvd.Compression.fp16).tolist() == [2.0, 3.0]
    assert hvd.allreduce(x, op=hvd.Min).tolist() == [1.0, 2.0]
    assert hvd.allreduce(x, op=hvd.Max).tolist() == [3.0, 4.0]
    assert hvd.allreduce(x, None, None, op=hvd.Sum, prescale_factor=2.0).tolist() == [8.0, 12.0]
    assert hvd.allreduce(x, postscale_factor=0.5).tolist() == [1.0, 1.5]
    # Rounded to half precision on the way, as it says.
    fine = torch.tensor([1.0 + 2.0**-12])
    assert hvd.allreduce(fine, compression=hvd.Compression.fp16).tolist() == [1.0]
    own = x.clone()
    handle = hvd.allreduce_async_(own, average=False)
    assert hvd.poll(handle) and hvd.synchronize(handle) is own and own.tolist() == [4.0, 6.0]
    both = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
    assert [t.tolist() for t in both] == [[4.0, 6.0], [8.0, 12.0]]
    # A sum of two is above 65504.
    large = nn.Parameter(torch.zeros(1))
    options = {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([large]), **options)
    (4e4 * large).sum().backward()
    optimizer.synchronize()
    assert large.grad.tolist() == [4e4]

    rows = torch.full((3 - 2 * rank, 2), float(rank), requires_grad=True)
    found = hvd.allgather(rows)
    assert found[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    (found * torch.arange(4.0)[:, None] * (rank + 1)).sum().backward()
    # Means over ranks, as of Horovod since it has process sets.
    assert rows.grad[:, 0].tolist() == ([4.5] if rank else [0.0, 1.5, 3.0])
    assert hvd.allgather(torch.empty(2 * rank, dtype=torch.int32)).shape == (2,)
    x.requires_grad_()
    (hvd.allreduce(x) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.5, 1.5]
    x.grad = None
    (hvd.broadcast(x, 1) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == ([1.5, 1.5] if rank else [0.0, 0.0])
    assert hvd.broadcast_(torch.tensor([rank]), 1).tolist() == [1]
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16):
        for shape in ((), (0,), (2, 3)):
            mine, others, theirs = (torch.full(shape, n, dtype=dtype) for n in (rank, rank, 1))
            assert torch.equal(hvd.allreduce(mine, op=hvd.Max), theirs)
            assert torch.equal(hvd.broadcast(mine, 1), theirs)
            hvd.broadcast_parameters({"buffer": others}, 1)
            assert torch.equal(others, theirs)
    assert hvd.broadcast_object({"rank": rank}, 1, name="o") == {"rank": 1}
    assert hvd.allgather_object(f"rank {rank}") == ["rank 0", "rank 1"]
    hvd.barrier()

    model = made(seed=rank)
    hvd.broadcast_parameters([*model.parameters()], root_rank=0)
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), amsgrad=rank == 1)
    if rank:
        model(rows.double() @ torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        adam.step()
    hvd.broadcast_optimizer_state(adam, 1)
    hvd.broadcast_parameters(model.state_dict(), 1)
    told = hvd.allgather_object((adam.param_groups[0]["lr"], adam.param_groups[0]["amsgrad"]))
    assert told == [(0.2, True)] * 2
    assert all(adam.state[p]["step"] == 1 for p in model.parameters())
    refused(model, adam, rank)
    return True


def refused(model, adam, rank):
    """Everything else is refused by name, on every rank."""
    x = torch.ones(2)
    expert = MoELayer(4, 4, 2, ep_group=torch.distributed.group.WORLD)
    names = [*model.named_parameters()]
    for message, call in {
        "expected comm to be None": lambda: hvd.init([0]),
        "one of average and op": lambda: hvd.allreduce(x, True, op=hvd.Sum),
        "the name is the third": lambda: hvd.allreduce(x, "x"),
        "op to be one of average, sum, min, max": lambda: hvd.allreduce(x, op=hvd.Adasum),
        "got 'product'": lambda: hvd.allreduce(x, op=hvd.Product),
        "allreduce: expected process_set": lambda: hvd.allreduce(x, process_set=[0]),
        "allreduce: expected compression": lambda: hvd.allreduce(x, compression="fp16"),
        "op to be Sum and no factors for torch.int64": lambda: hvd.allreduce(x.long()),
        "expected tensor to have dimensions": lambda: hvd.allgather(torch.tensor(1.0)),
        "broadcast: expected root_rank": lambda: hvd.broadcast(x, 2),
        r"broadcast_parameters: expected root_rank to be in \[0": lambda: hvd.broadcast_parameters(
            {}, 2
        ),
        "broadcast_object: expected root_rank": lambda: hvd.broadcast_object(1, -1),
        "every rank has a copy of, got experts.*, which": lambda: hvd.broadcast_parameters(
            expert.named_parameters()
        ),
        "state: expected parameters that every rank": lambda: hvd.broadcast_optimizer_state(
            torch.optim.SGD(expert.parameters()), 0
        ),
        "op to be one of average, sum, got": lambda: hvd.DistributedOptimizer(adam, op=hvd.Adasum),
        "backward_passes_per_step": lambda: hvd.DistributedOptimizer(
            adam, None, None or hvd.Compression.none, 0
        ),
        "gradient_predivide_factor": lambda: hvd.DistributedOptimizer(
            adam, op=hvd.Sum, gradient_predivide_factor=2.0
        ),
        "num_groups": lambda: hvd.DistributedOptimizer(adam, num_groups=-1),
        "expected compression to be Compression.none": lambda: hvd.DistributedOptimizer(
            adam, compression="fp16"
        ),
        "DistributedOptimizer: expected process_set": lambda: hvd.DistributedOptimizer(
            adam, process_set=1
        ),
        "got 1 without a name": lambda: hvd.DistributedOptimizer(adam, names[1:]),
        "each name once": lambda: hvd.DistributedOptimizer(adam, names + names[:1]),
        "to be pairs": lambda: hvd.DistributedOptimizer(adam, model.parameters()),
        # Calls that differ between ranks.
        "the same call, got .* on rank 0, .* on rank 1": lambda: hvd.allreduce(
            torch.ones(2 + rank)
        ),
        "same call, got broadcast_parameters": lambda: hvd.broadcast_parameters({f"{rank}": x}),
        "expected no rank to have joined": lambda: hvd.join() if rank else hvd.allreduce(x),
    }.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()


def test_documented_calls_on_two_ranks():
    assert spawn_ranks(documented, 2) == [True, True]


def plain(optimizer, model, backward, step):
    optimizer.zero_grad()
    backward()
    optimizer.step()


def clipped(optimizer, model, backward, step):
    """As in Horovod's documentation; gradients are reduced once (horovod #1099)."""
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()


def clipped_at_times(optimizer, model, backward, step):
    """A step alone reduces what has not been reduced."""
    optimizer.zero_grad()
    backward()
    if step % 2:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def skipped(optimizer, model, backward, step):
    """Every other step is left out after the gradients were reduced."""
    optimizer.zero_grad()
    backward()
    if step % 2:
        optimizer.step()
    else:
        optimizer.synchronize()


def closure(optimizer, model, backward, step):
    def loss():
        optimizer.zero_grad()
        return backward()

    optimizer.step(loss)


def twice(optimizer, model, backward, step):
    """Two backward passes for a step, the first of them reduced already."""
    optimizer.zero_grad()
    backward()
    optimizer.step()
    backward()
    optimizer.step()


def frozen(optimizer, model, backward, step):
    """A layer thaws, and a group of parameters is added."""
    if step == 2:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": [*model[0].parameters()]})
    plain(optimizer, model, backward, step)


def exchanged(optimizer, model, backward, step):
    """A parameter takes the place of another, as where an embedding is made larger."""
    if step == 2:
        model[0].weight = torch.nn.Parameter(model[0].weight.detach() / 2)
        optimizer.param_groups[0]["params"][0] = model[0].weight
    plain(optimizer, model, backward, step)


LOOPS = [plain, clipped, clipped_at_times, skipped, closure, twice, frozen, exchanged]


def train(loop, ranks, wrap, **options):
    """Parameters after four steps on the rows of some ranks."""
    model = made(seed=1)
    if loop is frozen:
        model[0].requires_grad_(False)
    kept = [p for p in model.parameters() if p.requires_grad]
    optimizer = wrap(torch.optim.SGD(kept, lr=0.1, momentum=0.9, **options))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):

        def backward(step=step):
            loss = sum(F.mse_loss(model(x), y) for x, y in (rows(r, step) for r in ranks))
            loss = loss / len(ranks)
            loss.backward()
            return loss

        loop(optimizer, model, backward, step)
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def alone(optimizer):
    """An optimizer of one process with the methods of a distributed one."""
    optimizer.synchronize = lambda: None
    optimizer.skip_synchronize = contextlib.nullcontext
    return optimizer


def half(optimizer):
    return hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)


def loops(rank):
    hvd.init()
    found = {loop.__name__: train(loop, [rank], hvd.DistributedOptimizer) for loop in LOOPS}
    found["half"] = train(plain, [rank], half)
    scaled(rank)
    return found


def scaled(rank):
    """GradScaler where one rank overflows: as documented, and refused on both ranks without it."""
    for how in ("documented", "unscaled before", "not synchronized"):
        model = made(seed=1).float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        x, y = (t.float() for t in rows(rank, 0))
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss * (torch.inf if rank == 0 and step == 0 else 1.0)).backward()
            if how == "not synchronized":
                with pytest.raises(RuntimeError, match=r"expected synchronize\(\) before a Grad"):
                    scaler.step(optimizer)
                break
            if how == "unscaled before":
                scaler.unscale_(optimizer)
                optimizer.synchronize()
                with (
                    optimizer.skip_synchronize(),
                    pytest.raises(RuntimeError, match="find an overflow on all ranks or none"),
                ):
                    scaler.step(optimizer)
                break
            optimizer.synchronize()
            if step:
                want = [p - 0.1 * p.grad / scaler.get_scale() for p in model.parameters()]
                if rank:
                    scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            # Both ranks skip the first step, and halve the scale alike.
            assert scaler.get_scale() == 4.0
            for p, old in zip(model.parameters(), want if step else before, strict=True):
                torch.testing.assert_close(p.detach(), old.detach())


def test_loops_of_the_documentation_are_one_process():
    """Two ranks against one process that has the rows of both, in float64."""
    found = spawn_ranks(loops, 2)
    for loop in LOOPS:
        want = train(loop, [0, 1], alone)
        if loop is twice:
            continue  # of another meaning in one process; ranks agree, see below
        for own in found:
            for p, q in zip(own[loop.__name__], want, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=loop.__name__)
    # Gradients of two ranks are rounded to 2^-11 of themselves, and four steps of 0.1 with
    # momentum move by less than 0.1 x 10 of them.
    want = train(plain, [0, 1], alone)
    for own in found:
        for p, q in zip(own["half"], want, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2**-10)
            assert not torch.equal(p, q)
    for name, own in found[0].items():
        for p, q in zip(own, found[1][name], strict=True):
            assert torch.equal(p, q), name
