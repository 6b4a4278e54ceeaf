"""NaN and infinity stop the step on every rank, and leave all that is kept as it was.

Everything that keeps numbers from step to step is found by walking the package. Each is trained
twice on the same gradients, once with steps between them in which a rank meets a bad number; those
are refused on all ranks, and the two runs end with the same bits.
"""

import copy
import importlib
import inspect
import math
import os
import pkgutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext import compression, optim
from moe_ext import nn as nn_ext
from moe_ext.compression import CompressionState, compress_gradients, compress_hook
from moe_ext.compression.codecs import Codec, codec_of
from moe_ext.compression.codecs.chunked import ChunkedTopK
from moe_ext.compression.codecs.quantized import Outliers, Quantize, Rounded
from moe_ext.compression.codecs.registry import codec_names
from moe_ext.compression.codecs.sparse import TopK
from moe_ext.dispatch.by_name import DISPATCHERS
from moe_ext.dispatch.wire import ROW_WIRES, WIRES
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations import grace
from moe_ext.nn import routers

two, masked = Checks(), Checks()
STEPS = 3
BAD = (math.nan, -math.inf)

# What keeps numbers and is not in the table, and why.
AS_TORCH = "keeps the moments of torch's optimizer of this name, owes nothing: NaN goes on as there"
PART = "a part of what is in the table"
EXEMPT = {
    "Adafactor": AS_TORCH,
    "CPUAdamW": AS_TORCH,
    "LAMB": AS_TORCH,
    "LARS": AS_TORCH,
    "Muon": AS_TORCH,
    "CheckedOptimizer": "base",
    "CompressedOptimizer": "base",
    "SlicedOptimizer": "base",
    "SplitRegions": PART,
    "FeedbackStore": PART,
    "Compressor": "base",
    "Memory": "base",
    "Communicator": "base",
    "FSDPCompression": "compression/test_fsdp_compression.py, a_nan_on_one_rank",
    "GradScaler": "looks for them: distributed/test_data_parallel.py, an_overflow_on_one_rank",
    "TrainingState": "saves what others keep",
    "Stateful": "saves what others keep",
    "ReplicaState": "saves what others keep",
    "CostModel": "measured times",
}


def found_classes():
    """Name to class of all that has a `state_dict`, and is no module."""
    found = {}
    for info in pkgutil.walk_packages(moe_ext.__path__, "moe_ext."):
        if info.name.rsplit(".", 1)[-1] in ("_C", "_C_cuda") or "_runtime." in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, made in vars(module).items():
            here = inspect.isclass(made) and made.__module__ == info.name
            if here and hasattr(made, "state_dict") and not issubclass(made, nn.Module):
                found[name] = made
    return found


def bits(kept):
    """Nested containers with tensors as what they hold, to be compared by `==`."""
    if isinstance(kept, torch.Tensor):
        kept = local_part(kept.detach()).contiguous()
        return str(kept.dtype), tuple(kept.shape), kept.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(kept, dict):
        return {str(key): bits(value) for key, value in kept.items()}
    if isinstance(kept, (list, tuple)):
        return [bits(value) for value in kept]
    return repr(kept)


def differing(found, want, path=""):
    """Places at which two results of `bits` differ."""
    if isinstance(found, dict) and isinstance(want, dict) and found.keys() == want.keys():
        return [d for key in found for d in differing(found[key], want[key], f"{path}.{key}")]
    if isinstance(found, list) and isinstance(want, list) and len(found) == len(want):
        pairs = enumerate(zip(found, want, strict=True))
        return [d for i, (a, b) in pairs for d in differing(a, b, f"{path}.{i}")]
    return [] if found == want else [f"{path}: {str(found)[:80]} for {str(want)[:80]}"]


def net():
    torch.manual_seed(0)
    made = {"dtype": torch.float32}
    return nn.Sequential(nn.Linear(24, 40, **made), nn.Tanh(), nn.Linear(40, 9, **made))


def give_gradients(model, step, bad=None):
    """Gradients of a step; with `bad`, one element of rank 1's second matrix is that."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32)
    if bad is not None and dist.get_rank() == 1:
        model[2].weight.grad[3, 5] = bad


class Stepping:
    """An optimizer that communicates itself."""

    def __init__(self, kind, **options):
        self.model = net()
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)

    def step(self, step, bad=None):
        give_gradients(self.model, step, bad)
        self.optimizer.step()

    def kept(self):
        return self.model.state_dict(), self.optimizer.state_dict()


class Rounds:
    """DiLoCo and its kind, in rounds of two steps."""

    def __init__(self, kind, **options):
        self.model = net()
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if kind is optim.MuLoCo:
            self.inner = optim.Muon(matrices, lr=0.1)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7)
        self.local = kind(None, [self.model], self.inner, outer, 2, **options)
        self.local.__enter__()

    def half_step(self, number, bad=None):
        give_gradients(self.model, number, bad)
        self.inner.step()

    def kept(self):
        return self.model.state_dict(), self.local.state_dict()


class Loop:
    """Gradients that a loop of the user's own compresses."""

    def __init__(self, codec, nonfinite):
        self.model, self.nonfinite = net(), nonfinite
        policy = compression.Policy(codec, dense_below=0, bias=None)
        self.state = CompressionState(model=self.model, policy=policy, nonfinite=nonfinite)

    def step(self, step, bad=None):
        give_gradients(self.model, step, bad)
        compress_gradients(self.model, self.state)
        self.apply()

    def apply(self):
        """As a loss scaler does: not where a gradient is not finite."""
        if not sum(p.grad.sum() for p in self.model.parameters()).isfinite():
            if self.state.was_finite:  # of codecs that keep nothing nobody looks at gradients
                self.state.undo()
            raise ValueError("expected gradients to be finite")
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(0.1 * p.grad)

    def kept(self):
        return self.model.state_dict(), self.state.state_dict()


class Hook(Loop):
    """The communication hook of DDP."""

    def __init__(self, codec, nonfinite):
        super().__init__(codec, nonfinite)
        self.parallel = DistributedDataParallel(self.model)
        self.parallel.register_comm_hook(self.state, compress_hook)
        # DDP makes its buckets anew after the first one.
        for step in (8, 9):
            self.step(step)

    def step(self, step, bad=None):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        self.model.zero_grad()
        y = self.parallel(torch.randn(6, 24, generator=generator))
        handle = None
        if bad is not None and dist.get_rank() == 1:
            handle = self.model[2].weight.register_hook(lambda grad: grad.index_fill(0, ROW, bad))
        try:
            y.square().mean().backward()
        finally:
            if handle is not None:
                handle.remove()
        self.apply()


ROW = torch.tensor([3])


class Grace:
    """GRACE's interface."""

    def __init__(self, compressor, memory):
        options = {"topk": "compress_ratio", "dgc": "compress_ratio", "randomk": "compress_ratio"}
        made = {options[compressor]: 0.2} if compressor in options else {}
        self.grace = grace.grace_from_params(
            {"compressor": compressor, "memory": memory, "communicator": "allgather", **made}
        )
        self.model = net()

    def step(self, step, bad=None):
        give_gradients(self.model, step, bad)
        weight = self.model[2].weight
        mean = self.grace.step(weight.grad, "2.weight")
        with torch.no_grad():
            weight.sub_(0.1 * mean)

    def kept(self):
        return self.model.state_dict(), self.grace.state_dict()


def codecs():
    """Name to codec of all classes: by their registered names, and those that have none."""
    named = {name: codec_of(name, 0.1) for name in codec_names() if name != "auto"}
    # Other tests of a process may have registered codecs of their own.
    made = {
        name: codec
        for name, codec in named.items()
        if type(codec).__module__.startswith("moe_ext.")
    }
    unnamed = {
        "chunked_topk": ChunkedTopK(8, 64),
        "outliers": Outliers(),
        "rounded": Rounded(),
        "at_random": Quantize("int4", stochastic=True),
        "one_scale": Quantize("int3", block=None),
        "momentum": TopK(0.1, momentum=0.9),
    }
    return {**made, **unnamed}


CASES = {
    "OneBitAdam": (Stepping, optim.OneBitAdam, {"freeze_step": 2}),
    "OneBitLamb": (Stepping, optim.OneBitLamb, {"freeze_step": 2}),
    "ZeroOneAdam": (Stepping, optim.ZeroOneAdam, {"var_freeze_step": 2}),
    "DeMo": (Stepping, optim.DeMo, {}),
    "DiLoCo": (Rounds, optim.DiLoCo, {"codec": "int8"}),
    "SparseLoCo": (Rounds, optim.SparseLoCo, {"chunk": 64, "density": 0.1}),
    "MuLoCo": (Rounds, optim.MuLoCo, {}),
}


def trained(make, values=()):
    """What is kept after some steps, with a step that is refused before each of them."""
    made = make()
    for step in range(STEPS):
        for value in values:
            before = bits(made.kept())
            with pytest.raises(ValueError, match="finite"):
                made.step(step, value)
            wrong = differing(bits(made.kept()), before)
            assert not wrong, (step, value, wrong)
        made.step(step)
    return bits(made.kept())


def check_refused(make, values=BAD, want=None):
    wrong = differing(trained(make, values), want or trained(make))
    assert not wrong, wrong


@two(*[(name,) for name in CASES])
def optimizer(name):
    kind, made, options = CASES[name]
    if kind is Rounds:
        return check_rounds(made, options)
    return check_refused(lambda: kind(made, **options))


def check_rounds(made, options):
    """A round that a worker's weights stop is tried again after the next step."""
    want = Rounds(made, **options)
    for number in range(2 * STEPS):
        want.half_step(number)
    found = Rounds(made, **options)
    for step in range(STEPS):
        found.half_step(2 * step)
        for value in BAD:
            before = copy.deepcopy((found.model.state_dict(), found.inner.state_dict()))
            kept = bits({**found.local.state_dict(), "local_step": 0})
            with pytest.raises(ValueError, match=r"expected weights to be finite.*on rank 1"):
                found.half_step(2 * step + 1, value)
            assert bits({**found.local.state_dict(), "local_step": 0}) == kept
            found.model.load_state_dict(before[0])
            found.inner.load_state_dict(before[1])
        found.half_step(2 * step + 1)
        assert found.local.round == step + 1
    assert bits(found.kept()) == bits(want.kept())


@two(*[(name,) for name in (*CASES, *codecs())])
def another_default_dtype(name):
    """Kept tensors are float32 whatever torch makes of tensors without a dtype."""
    kept = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            if name not in CASES:
                kept.append(trained(lambda: Loop(codecs()[name], "raise")))
                continue
            kind, made, options = CASES[name]
            found = kind(made, **options)
            for step in range(2 * STEPS):
                found.half_step(step) if kind is Rounds else found.step(step)
            kept.append(bits(found.kept()))
        finally:
            torch.set_default_dtype(torch.float32)
    assert differing(*kept) == []


@two(*[(name,) for name in codecs()])
def codec(name):
    want = trained(lambda: Loop(codecs()[name], "raise"))
    for nonfinite in ("raise", "propagate"):
        check_refused(lambda n=nonfinite: Loop(codecs()[name], n), want=want)
    # The error of a hook ends DDP's own step, see compression/test_hook_faults.py.
    if codecs()[name].feeds_back:
        check_refused(lambda: Hook(codecs()[name], "propagate"), BAD[:1])


GRACE = (
    "none", "fp16", "topk", "dgc", "randomk", "threshold", "qsgd", "int8", "int4", "fp8",
    "onebit", "efsignsgd", "signum", "powersgd",
)  # fmt: skip


@two(*[(name,) for name in GRACE])
def facade(name):
    for memory in ("none", "residual", "dgc") if name == "dgc" else ("none", "residual"):
        check_refused(lambda m=memory: Grace(name, m))


test_bad_numbers_are_refused = two.test(2, timeout=300)


def test_all_that_keeps_numbers_is_here():
    for name, made in found_classes().items():
        if name in CASES or name in EXEMPT or issubclass(made, CompressionState):
            continue
        assert made.__module__ == grace.__name__, f"{name} keeps numbers and is not in the table"


def below(made):
    """The classes of the package that are made of a class, and itself."""
    ours = {made} if made.__module__.startswith("moe_ext.") else set()
    return ours.union(*map(below, made.__subclasses__()))


def test_all_codecs_are_here():
    # One that an optimizer keeps to itself is tried with it.
    public = {c for c in below(Codec) if not c.__name__.startswith("_")}
    written = {c.__name__ for c in public if not inspect.isabstract(c)}
    tried = {type(made).__name__ for made in codecs().values()}
    # Those of a mask send what it marks as it is, and owe nothing; a gradient that has nobody to
    # go to stays where it is.
    assert written - tried == {"Masked", "TwoOfFour", "Unsent"}


# -- bad numbers where they are masked


D, E, TOKENS = 16, 8, 48
# By router: the options of layers that it is tried in, with `router` for its own.
ROUTERS = {
    "TopKRouter": [
        {},
        {"router": {"score_fn": "sigmoid", "bias": True, "num_groups": 4, "top_groups": 2}},
        {"router": {"score_fn": "sigmoid", "selection_bias": True}},
        {"router": {"score_fn": "sigmoid", "selection_bias": True, "bias_update": "quantile"}},
        {"balance": nn_ext.Balance("sequence")},
        {"balance": nn_ext.Balance("global_batch")},
        {"shared_expert": moe_ext.nn.SharedExpert(24, gate=True)},
        {"capacity": 1.0},
        {"capacity": nn_ext.Capacity(1.0, pad=True)},
        {"capacity": nn_ext.Capacity(1.0, overflow="reroute")},
        {"capacity": nn_ext.Capacity(1.0, drop="random")},
        {"row_budget": nn_ext.RowBudget(16)},
    ],
    "NoisyTopKRouter": [{}],
    "CosineRouter": [{"router": {"top_k": 2}}],
    "GShardRouter": [{"router": {"second_expert": e}} for e in ("random", "gumbel", "always")],
    "SwitchRouter": [{}],
    "SinkhornRouter": [{"router": {"top_k": 2}}],
    "ExpertChoiceRouter": [{}],
    "BaseRouter": [{}],
    "HashRouter": [{"router": {"vocab_size": 64, "learned": learned}} for learned in (False, True)],
}


def moe_of(name, **options):
    torch.manual_seed(1)
    options = dict(options)
    own = getattr(routers, name)(D, E, **options.pop("router", {}))
    own.reset_parameters()
    balance = replace(options.pop("balance", nn_ext.Balance()), z_coef=1e-3)
    return nn_ext.MoELayer(D, 24, E, router=own, balance=balance, **options)


def passed(layer, padding, seed=0):
    """All that a pass with this in its masked tokens leaves: results, gradients, state, metrics."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, TOKENS // 4, D, generator=generator)
    mask = torch.rand(4, TOKENS // 4, generator=generator) > 0.3
    ids = torch.randint(64, mask.shape, generator=generator)
    weights = torch.randn(x.shape, generator=generator)
    x = x.where(mask[..., None], padding[:D].expand(x.shape)).requires_grad_()
    y = layer(x, token_mask=mask, token_ids=ids)
    (y * weights).sum().backward()
    losses = {name: loss.detach() for name, loss in layer.losses.items()}
    assert y.isfinite().all()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    assert all(grad is None or grad.isfinite().all() for grad in grads.values())
    numbers = {name: layer.metrics[name] for name in sorted(layer.metrics)}
    # Nothing follows from an element that counts as zero.
    x_grad = x.grad.where(
        mask[..., None] | torch.tensor([False, False, False, True]).repeat(D // 4), 0
    )
    return bits([y, x_grad, grads, losses, numbers, layer.state_dict()])


def same_for_any_padding(layer, seed=0):
    """A shared expert sees masked tokens, too: what is finite in them stays."""
    shared = layer.shared_expert is not None
    bad = torch.tensor([math.nan, math.inf, -math.inf, 2.0 if shared else 3e38]).repeat(D // 4)
    want = passed(copy.deepcopy(layer), bad.where(bad == 2.0, 0.0), seed)
    wrong = differing(passed(copy.deepcopy(layer), bad, seed), want)
    assert not wrong, wrong


@pytest.mark.parametrize("router", ROUTERS)
def test_masked_tokens_may_hold_anything(router):
    for options in ROUTERS[router]:
        same_for_any_padding(moe_of(router, **options))


def test_all_routers_are_here():
    ours = {c.__name__ for c in below(routers.Router) if c.__module__.startswith(routers.__name__)}
    assert ours - set(ROUTERS) == {"Router", "ScoreRouter", "LinearRouter"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "HashRouter"])
def test_a_bad_token_stops_the_pass_before_anything_is_counted(router, bad):
    for options in ROUTERS[router]:
        layer = moe_of(router, **options)
        x = torch.randn(1, TOKENS, D)
        x[0, 7] = bad
        before = bits([layer.state_dict(), getattr(layer, "choices", None)])
        with pytest.raises((RuntimeError, ValueError), match="finite|NaN|nan"):
            layer(x)
        assert differing(bits([layer.state_dict(), getattr(layer, "choices", None)]), before) == []


def ways():
    """Options of layers over ranks: all named dispatchers with all wires."""
    for name in DISPATCHERS:
        # Rows of different lengths do not travel with their indices.
        wires = ROW_WIRES if name == "allgather" else WIRES
        for wire in wires if name not in ("auto", "local") else (None,):
            for combine in ("exact", "reduced") if name == "dedup" else ("exact",):
                yield {"dispatcher": moe_ext.nn.Dispatch(name, wire=wire, combine=combine)}
    yield {"dispatcher": moe_ext.nn.Dispatch("alltoall", overlap=2)}
    yield {"dispatcher": "alltoall", "row_budget": nn_ext.RowBudget(16)}
    yield {"dispatcher": "alltoall", "row_budget": nn_ext.RowBudget(64, static=True)}
    yield {"dispatcher": moe_ext.nn.Dispatch("alltoall", rebalance="exact")}


# Libraries of NVIDIA's GPUs.
NOT_HERE = {"nccl_ep", "deep_ep", "symm_mem", "local"}


@masked()
def every_way_over_ranks():
    for options in ways():
        if getattr(options["dispatcher"], "dispatcher", None) in NOT_HERE:
            continue
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        torch.manual_seed(1)
        layer = nn_ext.MoELayer(D, 24, E, shared_expert=8, ep_group=dist.group.WORLD, **options)
        same_for_any_padding(layer, dist.get_rank())


def test_masked_tokens_travel_nowhere():
    masked.assert_passed(2, "every_way_over_ranks", timeout=200)


@masked()
def another_default_device():
    for options in ways():
        if getattr(options["dispatcher"], "dispatcher", None) in NOT_HERE:
            continue
        layer = nn_ext.MoELayer(D, 24, E, ep_group=dist.group.WORLD, **options)
        x, found = torch.randn(TOKENS, D), []
        for device in (None, "meta"):
            torch.set_default_device(device)
            y = layer(x)
            y.square().sum().backward()
            torch.set_default_device(None)
            found.append([y.detach(), *[local_part(p.grad) for p in layer.parameters()]])
            layer.zero_grad()
        assert differing(*map(bits, found)) == [], options


def test_a_layer_over_ranks_makes_nothing_on_the_default_device():
    masked.assert_passed(2, "another_default_device", timeout=200)
