"""Megatron's sequence parallelism on ranks against one process; all cases share a spawn."""

import collections
import contextlib
import copy
import functools
import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import group
from rank_checks import ChecksOn, full
from torch.utils.checkpoint import checkpoint

from moe_ext.attention import (
    SequenceParallelMLP,
    gather_from_sequence,
    make_layout,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
    sequence_parallel_mlp,
    shard_sequence,
)
from moe_ext.comm.agreement import neighbours
from moe_ext.comm.c10d import ALL_GATHER, REDUCE_SCATTER
from moe_ext.distributed import count_traffic, sync_gradients
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn.feed_forward import FeedForward

D, FFN = 6, 12  # a multiple of 1, 2 and 3 ranks
COLLECTIVES = f"""
all_gather {ALL_GATHER} reduce_scatter {REDUCE_SCATTER} all_reduce broadcast
all_to_all all_to_all_single isend irecv batch_isend_irecv
"""
DTYPES, SPIRAL = (torch.float64, torch.float32), ("contiguous", "spiral")
# By the number of ranks.
check = ChecksOn(1, 2, 3)


def num_ranks():
    return dist.get_world_size() if group() else 1


def make(group, **options):
    torch.manual_seed(3)
    return SequenceParallelMLP(D, FFN, group=group, **{"dtype": torch.float64, **options})


def formula(state, x, activation, norm):
    """The block written out, of the parameters of one process."""
    if norm == "layer_norm":
        x = F.layer_norm(x, (D,), state["norm.weight"], state["norm.bias"], 1e-5)
    elif norm == "rms_norm":
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * state["norm.weight"]
    if activation == "swiglu":
        name = "gate_up_proj"
        gate, up = F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias")).chunk(2, -1)
        hidden = F.silu(gate) * up
    else:
        hidden = F.gelu(F.linear(x, state["up_proj.weight"], state.get("up_proj.bias")))
    return F.linear(hidden, state["down_proj.weight"], state.get("down_proj.bias"))


def data(seq_len, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seq_len)
    return torch.randn(2, 3, seq_len, D, generator=generator, dtype=torch.float64).to(dtype)


def train(module, x, grad, rate=0.3, **kwargs):
    """Two steps of gradient descent: outputs, gradients of x, gradients of the last step."""
    outputs = []
    for _ in range(2):
        leaf = x.detach().clone().requires_grad_()
        y = module(leaf, **kwargs)
        module.zero_grad()
        y.backward(grad)
        outputs += [y.detach(), leaf.grad]
        with torch.no_grad():
            for p in module.parameters():
                p -= rate * p.grad
    return outputs, {n: p.grad.clone() for n, p in module.named_parameters()}


@check.pairs(("gelu", "swiglu"), ("layer_norm", "rms_norm", None), (0, 1, 2, 12, 13))
def equals_one_process(activation, norm, seq_len):
    options = {"activation": activation, "norm": norm, "bias": norm != "rms_norm"}
    x, grad = data(seq_len)
    for layout, regather in (("contiguous", False), ("zigzag", False), ("striped", True)):
        module = make(group(), layout=layout, regather=regather, **options)
        state = {n: p.clone().requires_grad_() for n, p in module.whole_state_dict().items()}
        where = {"group": group(), "layout": layout, "dim": 1}
        parts = [shard_sequence(t, **where) for t in (x, grad)]
        found, found_grads = train(module, *parts, seq_len=seq_len)
        for step in range(2):
            leaf = x.detach().clone().requires_grad_()
            y = formula(state, leaf, activation, norm)
            grads = torch.autograd.grad(y, [leaf, *state.values()], grad)
            expected = (y.detach(), grads[0])
            for part, exact in zip(found[2 * step : 2 * step + 2], expected, strict=True):
                torch.testing.assert_close(part, shard_sequence(exact, **where))
            whole_grads = dict(zip(state, grads[1:], strict=True))
            state = {n: (p - 0.3 * whole_grads[n]).detach() for n, p in state.items()}
            state = {n: p.requires_grad_() for n, p in state.items()}
        for name, found_grad in found_grads.items():
            torch.testing.assert_close(
                full(found_grad), whole_grads[name], msg=lambda m, n=name: f"{n}: {m}"
            )


@check(("gelu",), ("swiglu",))
def starts_from_the_slices_of_one_process(activation):
    module, whole = make(group(), activation=activation), make(None, activation=activation)
    after = torch.rand(1)
    for name, parameter in module.named_parameters():
        assert torch.equal(full(parameter), dict(whole.named_parameters())[name]), name
        assert full(parameter).any() or name.endswith("bias")
        divided = num_ranks() if name == "down_proj.weight" or "up_proj" in name else 1
        assert local_part(parameter).numel() * divided == parameter.numel()
    make(group(), activation=activation)
    assert torch.equal(torch.rand(1), after)
    gathered = module.whole_state_dict()
    assert all(torch.equal(gathered[n], p) for n, p in whole.state_dict().items())
    other = make(group(), activation=activation)
    other.reset_parameters()
    other.load_whole_state_dict(whole.state_dict())
    pairs = zip(other.parameters(), module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match="down_proj.weight to be of shape"):
        other.load_whole_state_dict({**gathered, "down_proj.weight": torch.zeros(D, 5)})
    with pytest.raises(ValueError, match="state_dict to be of the names"):
        other.load_whole_state_dict({"norm.weight": torch.zeros(D)})


@check()
def loads_a_feed_forward():
    theirs = FeedForward(D, FFN, activation="swiglu", dtype=torch.float64)
    torch.manual_seed(4)
    theirs.reset_parameters()
    module = make(group(), activation="swiglu", norm=None, bias=False)
    module.load_whole_state_dict(theirs.state_dict())
    x, _ = data(12)
    where = {"group": group(), "layout": "contiguous", "dim": 1}
    torch.testing.assert_close(
        module(shard_sequence(x, **where)), shard_sequence(theirs(x), **where)
    )


@check(("contiguous",), ("zigzag",))
def dropout_is_that_of_one_process(layout):
    x, grad = data(13)
    where = {"group": group(), "layout": layout, "dim": 1}
    whole, part = make(None, dropout=0.4), make(group(), dropout=0.4, layout=layout)
    torch.manual_seed(8)
    expected, _ = train(whole, x, grad)
    torch.manual_seed(8)
    found, _ = train(part, *(shard_sequence(t, **where) for t in (x, grad)), seq_len=13)
    for part_of_it, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(part_of_it, shard_sequence(exact, **where))
    zeros = (expected[0] == 0).double().mean()
    assert 0.3 < zeros < 0.5 and not torch.equal(expected[0] == 0, expected[2] == 0)
    part.eval()
    assert (part(shard_sequence(x, **where), seq_len=13) != 0).all()


@contextlib.contextmanager
def collectives():
    """Counts of every collective and message that torch.distributed is asked for."""
    counted = collections.Counter()

    def counting(name, real, *args, **kwargs):
        counted[name] += 1
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES.split():
            patch.setattr(dist, name, functools.partial(counting, name, getattr(dist, name)))
        yield counted


@check(*itertools.product((12, 13), (False, True)))
def one_all_gather_and_one_reduce_scatter(seq_len, regather):
    module = make(group(), regather=regather)
    x = shard_sequence(data(seq_len)[0], group=group(), layout="contiguous", dim=1)
    x.requires_grad_()
    some = int(num_ranks() > 1)
    longest = 3 * -(-seq_len // num_ranks()) * D * 8
    one_each = {ALL_GATHER: some, REDUCE_SCATTER: some}
    unit = (num_ranks() - 1) * longest
    # Ranks that share memory compare their arguments there, and sum there.
    told = some and int(not neighbours(group(), x.device, "test").are_all)
    with collectives() as forward, count_traffic() as traffic:
        y = module(x, seq_len=seq_len)
    assert forward == collections.Counter(one_each) + collections.Counter({ALL_GATHER: told})
    assert traffic.sent_bytes == collections.Counter(all_gather=unit, reduce_scatter=unit)
    with collectives() as backward, count_traffic() as traffic:
        y.sum().backward()
    # Weight and bias of the norm, in float64.
    of_norm = 2 * (num_ranks() - 1) * (2 * D * 8) // num_ranks()
    expected = {"all_gather": unit * (1 + regather), "reduce_scatter": unit, "all_reduce": of_norm}
    assert traffic.sent_bytes == collections.Counter(expected)
    one_each[ALL_GATHER] += regather * some
    assert backward == collections.Counter({**one_each, "all_reduce": told})
    plain = make(group(), norm=None)
    plain(x.detach(), seq_len=seq_len)
    with collectives() as counted, torch.no_grad():
        plain(x, seq_len=seq_len)
    assert set(counted) <= {"all_gather", *one_each}


class LoggedWork:
    def __init__(self, work, name, events):
        self.work, self.name, self.events = work, name, events
        self.is_completed = work.is_completed

    def wait(self, timeout):
        event = f"wait {self.name}"
        # A wait may come in several parts.
        if self.events[-1] != event:
            self.events.append(event)
        return self.work.wait(timeout)


@check(on=(2, 3))
def the_weight_gradient_overlaps_the_reduce_scatter():
    events = []

    def log(patch, owner, name, wrap):
        real = getattr(owner, name)

        def logged(*args, **kwargs):
            events.append(name)
            return wrap(real(*args, **kwargs), name)

        patch.setattr(owner, name, logged)

    module, (x, _) = make(group()), data(12)
    x = shard_sequence(x, group=group(), layout="contiguous", dim=1).requires_grad_()
    y = module(x)
    with pytest.MonkeyPatch.context() as patch:
        for name in (ALL_GATHER, REDUCE_SCATTER):
            log(patch, dist, name, lambda work, n: LoggedWork(work, n, events))
        log(patch, sequence_parallel_mlp, "_weight_grad", lambda result, _: result)
        y.sum().backward()
    assert events == [
        ALL_GATHER,
        f"wait {ALL_GATHER}",
        "_weight_grad",
        REDUCE_SCATTER,
        "_weight_grad",
        f"wait {REDUCE_SCATTER}",
    ]


@check((False,), (True,))
def recomputation_gives_the_same_bits(reentrant):
    module = make(group(), dropout=0.3, activation="swiglu")
    where = {"group": group(), "layout": "contiguous", "dim": 1}
    x, grad = (shard_sequence(t, **where) for t in data(13))

    def run(recompute):
        torch.manual_seed(6)
        leaf = x.detach().clone().requires_grad_()
        call = functools.partial(module, seq_len=13)
        y = checkpoint(call, leaf, use_reentrant=reentrant) if recompute else call(leaf)
        module.zero_grad()
        y.backward(grad)
        return [y.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
    with torch.inference_mode():
        assert torch.isfinite(module(x, seq_len=13)).all()


@check(("autocast",), ("bfloat16",), ("float16",))
def half_precision(how):
    dtype = getattr(torch, how, torch.float32) if how != "autocast" else torch.float32
    module = make(group(), dtype=dtype, activation="swiglu")
    state = {n: p.double().requires_grad_() for n, p in module.whole_state_dict().items()}
    x, grad = data(13, dtype)
    where = {"group": group(), "layout": "contiguous", "dim": 1}
    leaf = shard_sequence(x, **where).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = module(leaf, seq_len=13)
    assert y.dtype == (torch.bfloat16 if how == "autocast" else dtype)
    y.backward(shard_sequence(grad, **where).to(y.dtype))
    exact_x = x.double().requires_grad_()
    expected = formula(state, exact_x, "swiglu", "layer_norm")
    grads = torch.autograd.grad(expected, [exact_x, *state.values()], grad.double())
    pairs = [(y, shard_sequence(expected, **where)), (leaf.grad, shard_sequence(grads[0], **where))]
    pairs += zip((full(p.grad) for p in module.parameters()), grads[1:], strict=True)
    for found, exact in pairs:
        assert found.isfinite().all()
        assert (found.double() - exact).norm() <= 0.02 * exact.norm()


@check()
def two_modules_and_frozen_parameters():
    modules = [make(group(), activation=a) for a in ("gelu", "swiglu")]
    states = [{n: p.clone() for n, p in m.whole_state_dict().items()} for m in modules]
    for module, state in zip(modules, states, strict=True):
        module.norm.requires_grad_(False)
        module.down_proj.weight.requires_grad_(False)
        state["down_proj.bias"].requires_grad_()
    where = {"group": group(), "layout": "contiguous", "dim": 1}
    x, grad = data(12)
    part = shard_sequence(x, **where)
    y = part + modules[0](part)
    y = y + modules[1](y)
    y.backward(shard_sequence(grad, **where))
    exact = x + formula(states[0], x, "gelu", "layer_norm")
    exact = exact + formula(states[1], exact, "swiglu", "layer_norm")
    exact.backward(grad)
    for module, state in zip(modules, states, strict=True):
        torch.testing.assert_close(module.down_proj.bias.grad, state["down_proj.bias"].grad)
        assert module.norm.weight.grad is None and module.down_proj.weight.grad is None
    twin = copy.deepcopy(modules[0])
    assert twin.tp_group is group()
    torch.testing.assert_close(twin(part), modules[0](part))


@check(on=(2, 3))
def sync_gradients_refuses_sums():
    """It takes the mean, see test_data_beside_tensor_parallel.py."""
    module = make(group())
    module(data(4)[0]).sum().backward()
    with pytest.raises(ValueError, match="made with grad_reduction='mean', .* got 'sum' for up_"):
        sync_gradients(module)


@check((12,), (13,))
def building_blocks(length):
    rank = dist.get_rank() if group() else 0
    made = make_layout("contiguous", length, num_ranks())
    even = length % num_ranks() == 0
    where = {"group": group(), "dim": 1, "sizes": None if even else made.sizes}
    whole = data(length)[0]
    part = whole[:, made.positions(rank)].requires_grad_()
    assert torch.equal(gather_from_sequence(part, **where), whole)
    (gather_from_sequence(part, **where) * (rank + 1)).sum().backward()
    torch.testing.assert_close(part.grad, torch.full_like(part, sum(range(num_ranks() + 1))))
    part.grad = None
    (gather_from_sequence(part, whole_grad=True, **where) * whole).sum().backward()
    torch.testing.assert_close(part.grad, part.detach())
    leaf = (whole * (rank + 1)).requires_grad_()
    reduced = reduce_scatter_to_sequence(leaf, **where)
    torch.testing.assert_close(reduced, part.detach() * sum(range(num_ranks() + 1)))
    (reduced * part.detach()).sum().backward()
    assert torch.equal(leaf.grad, whole)
    leaf = whole.clone().requires_grad_()
    shard = scatter_to_sequence(leaf, **where)
    assert torch.equal(shard, part)
    (shard * part.detach()).sum().backward()
    assert torch.equal(leaf.grad, whole)
    for function in (reduce_scatter_to_sequence, gather_from_sequence, scatter_to_sequence):
        with pytest.raises(ValueError, match=f"{function.__name__}: expected sizes to be"):
            function(part, group=group(), dim=1, sizes=[1] * num_ranks() + [2])
    if num_ranks() > 1:
        with pytest.raises(ValueError, match="to be a multiple of the . ranks"):
            reduce_scatter_to_sequence(torch.zeros(1, num_ranks() + 1), group=group(), dim=1)


def refused(match, module, x, **kwargs):
    with pytest.raises(ValueError, match=match):
        module(x, **kwargs)


@check(on=(2, 3))
def what_differs_between_ranks_is_refused_on_all():
    """Beside each option by itself, which tests/test_options_over_ranks.py has."""
    odd, module = dist.get_rank() == 1, make(group())
    x = data(4)[0]
    refused("seq_len .* equal on every rank, got .* on rank 0, .* on rank 1", module, x[:, odd:])
    match = "rows of x beside the sequence to be equal .* 3 on rank 0, 2 on rank 1"
    refused(match, module, x[odd:])
    refused("shards of a contiguous layout of 13", module, x, seq_len=13)
    refused("gradients wanted", module, x.clone().requires_grad_(odd))
    # By itself, at the first call of a module.
    match = r"x to be of shape \[..., L, 6\], got .* on rank 1$"
    refused(match, make(group()), x[..., odd:])
    refused("x to be a tensor, got NoneType on rank 1$", make(group()), None if odd else x)
    # And later on, as that rank's arguments are checked or with shapes that were seen before.
    assert torch.isfinite(module(x)).all() and torch.isfinite(module(x[:1])).all()
    refused(r"x to be of shape \[..., L, 6\], got .* on rank 1$", module, x[..., odd:])
    refused("x to be torch.float64 like the weights, .* on rank 1$", module, x.to(DTYPES[odd]))
    refused("seed to be a 64-bit integer, got .* on rank 1$", module, x, seed=odd << 63)
    for wrong in (1.5, True, torch.tensor(3)):
        match = f"SequenceParallelMLP: expected seed to be an integer, got {re.escape(repr(wrong))}"
        with pytest.raises(TypeError, match=f"{match} on rank 1$"):
            module(x, seed=wrong if odd else 3)
    refused("layout to be a Layout or one of .* on rank 1$", module, x, layout=SPIRAL[odd])
    refused("rows of x beside the sequence .* 2 on rank 0, 1 on rank 1", module, x[: 2 - odd])
    refused("gradients wanted", module, x.clone().requires_grad_(odd))
    assert torch.isfinite(module(x)).all()
    # A function of each process's own.
    partial = make(group(), activation=functools.partial(F.leaky_relu, negative_slope=0.1))
    assert torch.isfinite(partial(x)).all()


test_ranks = check.test(group_timeout=30)


def test_gradients_of_one_process():
    module = make(None, activation="swiglu", dropout=0.3)
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(functools.partial(module, seed=3), (x,))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model_dim": 0}, "model_dim to be at least 1, got 0"),
        ({"ffn_dim": 0}, "ffn_dim to be a multiple of the 1 ranks, got 0"),
        ({"norm": "batch_norm"}, "norm to be one of .* got 'batch_norm'"),
        ({"dropout": 1.0}, r"dropout to be in \[0, 1\), got 1.0"),
        ({"layout": "spiral"}, "layout to be a Layout or one of"),
        ({"grad_reduction": "max"}, "grad_reduction to be one of .* got 'max'"),
        ({"activation": "softmax"}, "activation to be one of"),
    ],
)
def test_modules_refused(kwargs, message):
    with pytest.raises(ValueError, match=f"SequenceParallelMLP: expected {message}"):
        SequenceParallelMLP(**{"model_dim": D, "ffn_dim": FFN, "group": None, **kwargs})


@pytest.mark.parametrize("name", ["norm", "up_proj", "down_proj"])
def test_another_module_in_the_place_of_a_part_is_refused(name):
    module, x = SequenceParallelMLP(D, FFN, group=None), torch.randn(2, 3, D)
    wrapped = torch.nn.Sequential()
    wrapped.weight = getattr(module, name).weight
    setattr(module, name, wrapped)
    with pytest.raises(ValueError, match=f"expected {name} to be an nn.*, got <class"):
        module(x)


def test_a_second_derivative_is_refused():
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(make(None)(x).sum(), x, create_graph=True)
    match = "SequenceParallelMLP: expected the result to be differentiated once, got a second"
    with pytest.raises(RuntimeError, match=match):
        grad.square().sum().backward()
