"""Models and steps that the tests of the hooks share."""

import contextlib
import copy
import os

import pytest
import torch
import torch.distributed as dist
from rank_checks import assert_same_bits, of_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext.compression import (
    CodecMemory,
    CompressionState,
    CostModel,
    OneBit,
    Policy,
    Quantize,
    Threshold,
    TopK,
    compress_gradients,
    compress_hook,
)
from moe_ext.compression.feedback import by_name
from moe_ext.distributed import RankFailureError, count_traffic

# Small enough for several buckets.
CAP_MB = 0.008


class Net(nn.Module):
    """Linear layers with norms between them, and a branch that may stay unused."""

    def __init__(self, width=40):
        super().__init__()
        torch.manual_seed(5)
        self.inp = nn.Linear(12, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.branch = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x, branch=True):
        h = torch.relu(self.norm(self.inp(x)))
        h = torch.relu(self.hidden(h))
        if branch:
            h = h + self.branch(h)
        return self.out(h)


def batch(step, rows=6, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 12, generator=generator)


def loss_of(model, x, **kwargs):
    return model(x, **kwargs).square().mean()


class Words(nn.Module):
    """An embedding, an MoE layer of which few experts are reached, and a head."""

    def __init__(self, *, sparse=False, ep_group=None, experts=8):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(300, 16, sparse=sparse)
        self.moe = moe_ext.MoELayer(16, 24, experts, 1, ep_group=ep_group)
        self.head = nn.Linear(16, 100)

    def forward(self, ids):
        h = self.embedding(ids)
        return self.head(h + self.moe(h))


def words(step, count=3):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 300, (count,), generator=generator)


def words_backward(model, step, count=3):
    model.zero_grad()
    model(words(step, count)).square().sum().backward()


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def wrapped(model=None, *, ddp=None, **options):
    """(DDP, state) of a copy of the model with the hook."""
    model = copy.deepcopy(model) if model is not None else Net()
    state = CompressionState(model=model, **options)
    parallel = DistributedDataParallel(model, **{"bucket_cap_mb": CAP_MB, **(ddp or {})})
    parallel.register_comm_hook(state, compress_hook)
    return parallel, state


def local_gradients(model, step, **kwargs):
    """Name to gradient of this rank alone, for the model's parameters as they are."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.grad = None
    loss_of(twin, batch(step), **kwargs).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in twin.named_parameters()
    }


def looped(codec, **options):
    """(model, state) for a loop without DistributedDataParallel."""
    model = Net()
    return model, CompressionState(model=model, codec=codec, **options)


def loop_step(model, state, step, **kwargs):
    """A step of a loop without DistributedDataParallel, up to the reduced gradients."""
    model.zero_grad()
    loss_of(model, batch(step), **kwargs).backward()
    return compress_gradients(model, state)


def not_taken(model, state, match):
    """A reduction of gradients that are not finite, refused or passed on as the state says."""
    if state.options.nonfinite == "raise":
        with pytest.raises(ValueError, match=match):
            compress_gradients(model, state)
    else:
        assert not compress_gradients(model, state)


def opened(shapes):
    """An empty memory in a step."""
    memory = CodecMemory(shapes, torch.device("cpu"))
    memory.begin()
    return memory


def sent_by(codec, grad):
    """(result, bytes that leave this rank) of one reduction by a codec."""
    memory = codec.new_memory(grad)
    memory.begin()
    with count_traffic() as traffic:
        found = codec.start(grad, memory).wait()
    memory.commit()
    return found, traffic.total_bytes


def summed(tensor):
    """Float64 sum over the ranks."""
    total = tensor.detach().double().clone()
    dist.all_reduce(total)
    return total


def summed_together(tensors):
    """The same of a list of tensors, by one all-reduce."""
    flat = summed(torch.cat([x.double().flatten() for x in tensors]))
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def same_on_all_ranks(tensor):
    first, *others = of_ranks(tensor)
    return all(torch.equal(other, first) for other in others)


def state_bits(state):
    """Steps and all that is remembered."""
    state = state.state_dict()
    return [state["step"], state["memory"]]


@contextlib.contextmanager
def nothing_changes(model, state):
    """Assert that the state and the weights end as they are."""
    before, weights = state_bits(state), [p.clone() for p in model.parameters()]
    yield
    assert_same_bits(state_bits(state), before)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


class Ledger:
    """Checks that P times what was applied plus what is owed is the sum of the gradients."""

    def __init__(self, state, model):
        self.state, self.model, self.size = state, model, dist.get_world_size()
        self.given, self.applied = (
            {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in model.named_parameters()}
            for _ in range(2)
        )

    def hooked_step(self, parallel, step, **kwargs):
        """A step of a DistributedDataParallel of the model, noted and checked."""
        local = local_gradients(self.model, step, **kwargs)
        gradients_of(parallel, step, **kwargs)
        self.add(local)
        self.check()

    def add(self, gradients):
        """Note gradients of this rank, and those of the model, to which they were reduced."""
        for name, total in zip(gradients, summed_together([*gradients.values()]), strict=True):
            self.given[name] += total
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        if not same_on_all_ranks(torch.cat([grad.double().flatten() for grad in found.values()])):
            differing = [name for name, grad in found.items() if not same_on_all_ranks(grad)]
            raise AssertionError(f"gradients differ between ranks: {differing}")
        for name, grad in found.items():
            self.applied[name] += grad.double()

    def check(self, tolerance=2e-6):
        loose = by_name(self.state.state_dict()["memory"])
        lefts = [
            loose.get(name, {}).get("residual", torch.zeros(given.shape))
            for name, given in self.given.items()
        ]
        sums = summed_together([*lefts, *(left.abs() for left in lefts)])
        owed, magnitudes = sums[: len(lefts)], sums[len(lefts) :]
        for (name, given), left, magnitude in zip(
            self.given.items(), owed, magnitudes, strict=True
        ):
            total = self.size * self.applied[name] + left
            scale = given.abs().max() + magnitude.max() + 1e-6
            error = (total - given).abs().max()
            assert error <= tolerance * self.size * scale, (name, error, scale)


KINDS = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
}
CODECS = {
    "int8": "int8",
    "int4": Quantize("int4", 64),
    "random": Quantize("int8", 64, stochastic=True),
    "fp8": "fp8",
    "onebit": OneBit(64),
    "nothing": TopK(0.0),
    "topk": TopK(0.05),
    "rows": TopK(0.1, scope="row"),
    "parameter": TopK(0.05, scope="parameter"),
    "blocks": TopK(0.05, scope=128),
    "split": TopK(0.05, algorithm="split"),
    "bf16_values": TopK(0.05, algorithm="all_gather", value_codec="bf16"),
    "threshold": Threshold(0.05),
}


def reference(hook=None, *, model=None, **ddp):
    parallel = DistributedDataParallel(model or Net(), **{"bucket_cap_mb": CAP_MB, **ddp})
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    return parallel


def gradients_of(parallel, step, **kwargs):
    parallel.zero_grad()
    loss_of(parallel, batch(step), **kwargs).backward()
    return {n: p.grad for n, p in parallel.module.named_parameters()}


def conserving_steps(name, **options):
    """Four steps by a codec, while buckets are rebuilt and a branch may not be used.

    Yields DDP and the state after each one, of which the applied and the owed were checked.
    """
    kind = KINDS[list(KINDS)[len(name) % len(KINDS)]]
    parallel, state = wrapped(codec=CODECS[name], ddp=kind, **options)
    ledger = Ledger(state, parallel.module)
    for step in range(4):
        branch = "find_unused_parameters" not in kind or step not in (1, 2)
        ledger.hooked_step(parallel, step, branch=branch)
        yield parallel, state
    assert state.residuals(), name


class Chooser(CostModel):
    """Chooses in turns, and remembers what it was told."""

    def __init__(self):
        self.turn, self.told, self.settled, self.buckets = 0, [], [], {}

    def choose(self, numel, codecs, *, bucket, current=None):
        self.turn += 1
        return codecs[self.turn % len(codecs)]

    def is_timed(self, bucket):
        return True

    def observe(self, bucket, codec, seconds):
        self.told.append(seconds)

    def pending(self):
        return list(self.told)

    def settle(self, agreed=None):
        assert len(agreed) == len(self.told)
        assert all(a >= t > 0 for a, t in zip(agreed, self.told, strict=True))
        self.settled.append(agreed)
        self.told.clear()

    def explain(self):
        return "a table"


def assert_mean_of_short_gradients(codec, dtype, average=True, **options):
    """Check that a step of gradients of a type is their mean or sum, but for what is owed."""
    parallel, state = wrapped(Net().to(dtype), codec=codec, average=average, **options)
    twin = copy.deepcopy(parallel.module)
    for model in (parallel, twin):
        model(batch(0).to(dtype)).square().mean().backward()
    owed = by_name(state.state_dict()["memory"])
    divisor = dist.get_world_size() if average else 1
    for (name, p), q in zip(parallel.module.named_parameters(), twin.parameters(), strict=True):
        assert p.grad.dtype == dtype and same_on_all_ranks(p.grad), name
        left = owed.get(name, {}).get("residual")
        want = summed(q.grad) - (0.0 if left is None else summed(left))
        magnitude = summed(q.grad.abs()).max() / divisor
        # Rounded once on the way in each rank, once in a sum, once in the result.
        bound = (4 * 2.0**-8 if dtype != torch.float32 else 0.02) * magnitude + 1e-6
        assert (p.grad.double() - want / divisor).abs().max() <= bound, (codec, dtype, name)


def bytes_of_words(sparse, rtol, atol, **options):
    """(bytes of each of three steps, of the gradients), which are checked to be those of DDP.

    In the second step a rank has no words.
    """
    parallel, _ = wrapped(Words(sparse=sparse), codec="none", **options)
    ours, theirs = parallel.module, Words()
    plain, sent = reference(model=theirs), []
    for step in range(3):
        count = 0 if step == 1 and dist.get_rank() == 1 else 3
        words_backward(plain, step, count)
        with count_traffic() as traffic:
            words_backward(parallel, step, count)
        sent.append(traffic.total_bytes)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(dense(p.grad), q.grad, rtol=rtol, atol=atol, msg=name)
    assert ours.embedding.weight.grad.is_sparse == sparse
    return sent, 4 * sum(p.numel() for p in theirs.parameters())


def dies_in_the_backward_pass(rank, dying, match, **options):
    """A rank ends before the third backward pass; True from the others, which change nothing."""
    parallel, state = wrapped(codec=TopK(0.1), **options)
    for step in range(2):
        gradients_of(parallel, step)
    loss = loss_of(parallel, batch(2))
    if rank == dying:
        os._exit(7)
    named = pytest.raises(RankFailureError, match=match)
    with nothing_changes(parallel, state), named:
        loss.backward()
    return True


def momentum_is_that_of_sgd(**options):
    """Check top-k with momentum where everything is sent, as by SGD without momentum."""
    policy = Policy(TopK(1.0, momentum=0.9), norm=None, bias=None, dense_below=0)
    ours, _ = wrapped(policy=policy, **options)
    theirs = reference()
    optimizers = [
        torch.optim.SGD(ours.parameters(), 0.1),
        torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9),
    ]
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            gradients_of(model, step)
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
