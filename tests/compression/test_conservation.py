"""What was given is what was sent plus what is owed, for everything public that owes.

Each row of the table takes steps and is asked for the sums over ranks, in float64. Then one rank's
numbers are NaN in a step, or the step is rolled back: what is owed stays as it was, to the bit. The
rows are compared with the classes and functions that keep what they owe, as the source says.
"""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_checks import (
    Model,
    backward,
    gradients,
    local_gradients,
    loss_of,
    mesh_of,
    whole,
    wrapped,
)
from hook_models import summed
from outside_codecs import Short
from rank_checks import Checks, of_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_ext import compression, optim
from moe_ext.compression import CompressionState, compress_gradients, compress_hook
from moe_ext.compression.codecs import Codec
from moe_ext.compression.codecs.sparse import _Sparse as Sparse
from moe_ext.compression.feedback import by_name
from moe_ext.optim._compressed_mean import CompressedMean

ROOT = Path(compression.__file__).parents[1]
NUMEL, STEPS = 28 * 32, 4
SHAPES = [(9, 20), (70,), (3, 5, 64)]
two = Checks()


def rank_numbers(step, numel=NUMEL):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(numel, generator=generator)


class Row:
    """Something that owes: `given` and `sent` are sums over ranks and steps."""

    # Float32: a few roundings in each step, of numbers below 64.
    bound = STEPS * 8 * 64 * 2.0**-24

    def __init__(self):
        self.given = self.sent = 0.0

    def note(self, given, mean):
        """Count what ranks gave, and the mean that they got."""
        self.given = self.given + summed(given.reshape(-1))
        self.sent = self.sent + dist.get_world_size() * mean.detach().double().reshape(-1)

    def step(self, step):
        raise NotImplementedError

    def fail(self, step):
        """A step that is not taken."""

    def owed(self):
        """What this rank owes."""
        raise NotImplementedError


class CodecRow(Row):
    """A codec by itself, with a memory of its own making."""

    def __init__(self, codec):
        super().__init__()
        self.codec = codec
        self.memory = codec.new_memory(torch.zeros(28, 32))

    def numbers(self, step):
        x = rank_numbers(step)
        if isinstance(self.codec, compression.TwoOfFour):
            x = x * torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(NUMEL // 4)
        return x * self.codec.mask.marks.view(-1) if self.codec.name == "masked" else x

    def reduced(self, step):
        self.memory.begin()
        return self.codec.start(self.numbers(step), self.memory, step=step).wait()

    def step(self, step):
        found = self.reduced(step)
        self.memory.commit()
        self.note(self.numbers(step), found)

    def fail(self, step):
        self.reduced(step)
        self.memory.rollback()
        self.reduced(step)
        self.memory.commit(finite=torch.tensor(False))
        self.reduced(step)
        self.memory.commit()
        self.memory.undo()

    def owed(self):
        found = self.memory.whole("residual")
        return torch.zeros(NUMEL) if found is None else found


class StateRow(Row):
    """`compress_gradients` of a model in a loop, or `compress_hook` in DDP."""

    def __init__(self, codec, hooked=False):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 5))
        self.run = DistributedDataParallel(self.model) if hooked else self.model
        self.state = CompressionState(model=self.run, codec=codec)
        if hooked:
            self.run.register_comm_hook(self.state, compress_hook)

    def backward(self, model, step, factor=1.0):
        model.zero_grad()
        (model(rank_numbers(step, 320).view(8, 40)).square().sum() * factor).backward()

    def grads(self):
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def reduce(self, step, factor=1.0):
        self.backward(self.run, step, factor)
        if self.run is self.model:
            compress_gradients(self.model, self.state)

    def step(self, step):
        self.backward(self.model, step)
        given = self.grads()
        self.reduce(step)
        self.note(given, self.grads())

    def fail(self, step):
        with pytest.raises(ValueError, match="expected gradients to be finite"):
            self.reduce(step, torch.nan if dist.get_rank() else 1.0)
        self.reduce(step)
        self.state.undo()

    def owed(self):
        kept = by_name(self.state.state_dict()["memory"])
        none = torch.zeros(1)
        return torch.cat(
            [
                kept.get(name, {}).get("residual", none).expand_as(p).flatten()
                for name, p in self.model.named_parameters()
            ]
        )


class FsdpRow(Row):
    """Messages of FSDP2: over both ranks, or between two nodes of one rank each."""

    def __init__(self, between_nodes=False, **options):
        super().__init__()
        here = [dist.get_rank()] if between_nodes else range(2)
        self.model = wrapped(mesh_of(here))
        nodes = dist.group.WORLD if between_nodes else None
        self.messages = compression.zero_plus_plus(self.model, node_group=nodes, **options)

    def step(self, step):
        backward(self.model, step)
        want = local_gradients(step, dist.get_rank())
        given = torch.cat([want[name].flatten() for name, _ in Model().named_parameters()])
        found = gradients(self.model)
        self.note(given, torch.cat([found[name].flatten() for name in want]))
        assert self.messages.finite()

    def fail(self, step):
        self.model.zero_grad()
        (loss_of(self.model, step) * (torch.nan if dist.get_rank() else 1.0)).backward()
        assert not self.messages.finite()

    def owed(self):
        """The mean over ranks, of which every rank has the whole."""
        found = {}
        for part in self.messages.state_dict()["residuals"].values():
            found.update(whole(part.items()))
        shapes = {name: p.shape for name, p in Model().named_parameters()}
        return torch.cat([found.get(n, torch.zeros(s)).flatten() for n, s in shapes.items()])


class OptimizerRow(Row):
    """An optimizer whose messages begin and end in a method, which is followed."""

    def __init__(self, make, monkeypatch, owner, method, warm=0):
        super().__init__()
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(s)) for s in SHAPES]
        self.optimizer = make(self.params)
        monkeypatch.setattr(owner, method, self.followed(getattr(owner, method)))
        for step in range(warm):
            self.take(100 + step)

    def followed(self, plain):
        """A `CompressedMean.reduce` that notes what goes in and out."""

        def reduce(mean, *args):
            given = torch.cat([view.flatten() for view in mean.views])
            plain(mean, *args)
            self.note(given, torch.cat([view.flatten() for view in mean.views]))

        return reduce

    def take(self, step, factor=1.0):
        for index, p in enumerate(self.params):
            p.grad = rank_numbers(10 * step + index, p.numel()).view(p.shape) * factor
        self.optimizer.step()

    step = take

    def fail(self, step):
        with pytest.raises(ValueError, match="to be finite"):
            self.take(step, torch.nan if dist.get_rank() else 1.0)

    def owed(self):
        mean, *_ = self.optimizer._means
        return torch.cat([part.flatten() for part in mean.parts_of(mean.errors())])


class StartRow(OptimizerRow):
    """An optimizer that starts a codec in every round."""

    def followed(self, plain):
        def start(codec, grad_N, memory, **how):
            self.memory, given = memory, grad_N.clone()

            def note(mean_N):
                if bool(mean_N.isfinite().all()):
                    self.note(given, mean_N)
                return mean_N

            return plain(codec, grad_N, memory, **how).then(note)

        return start

    def owed(self):
        return self.memory.whole("residual")


class LocalRow(StartRow):
    """Local steps, of which each one ends a round."""

    def __init__(self, cls, monkeypatch, owner, **options):
        def make(params):
            model = nn.ParameterList(params)
            inner = torch.optim.SGD(params, lr=0.1)
            if cls is optim.MuLoCo:
                inner = optim.Muon([{"params": params, "use_muon": False}], lr=0.1)
            outer = torch.optim.SGD(params, lr=1.0)
            self.outer = cls(None, [model], inner, outer, sync_every=1, **options)
            self.outer.__enter__()
            return inner

        super().__init__(make, monkeypatch, owner, "start")

    def fail(self, step):
        before = [p.detach().clone() for p in self.params]
        super().fail(step)
        # The inner optimizer is not taken back.
        self.optimizer.state.clear()
        with torch.no_grad():
            for p, value in zip(self.params, before, strict=True):
                p.copy_(value)


class CollectiveRow(Row):
    """A collective with residuals of the caller's."""

    def __init__(self):
        super().__init__()
        self.residual, self.server = (
            torch.zeros(NUMEL),
            torch.zeros(compression.shard_numel(NUMEL, 2)),
        )

    def owed(self):
        found = torch.zeros(1024 + len(self.server))
        found[:NUMEL] += self.residual
        start = dist.get_rank() * len(self.server)
        found[start : start + len(self.server)] += self.server
        return found[:NUMEL]


class QuantizedRow(CollectiveRow):
    def step(self, step):
        x = rank_numbers(step)
        residuals = {"residual": self.residual, "server_residual": self.server}
        found = compression.quantized_all_reduce_(x.clone(), format="int3", **residuals)
        self.note(x, found)


class ScatterRow(CollectiveRow):
    def step(self, step):
        x, part = rank_numbers(step), torch.empty(NUMEL // 2)
        compression.quantized_reduce_scatter(part, x, format="int3", residual=self.residual)
        self.note(x, torch.cat(of_ranks(part)))


class SparseRow(CollectiveRow):
    def step(self, step):
        indices = torch.arange(step, NUMEL, 7)
        x = torch.zeros(NUMEL).index_copy_(0, indices, rank_numbers(step, len(indices)))
        how = {"value_codec": "int4", "algorithm": "split", "residual": self.residual}
        found = compression.sparse_all_reduce(x[indices], indices, NUMEL, **how)
        self.note(x, found)


def masked(monkeypatch):
    model = nn.Linear(32, 28, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(NUMEL).view(28, 32) * 5 % 7)
    pruning = compression.prune(model, parameters=["weight"])
    return CodecRow(pruning.codecs()["weight"])


def scattered(format):
    options = {"zero_quantized_gradients": True, "error_feedback": True}
    return lambda _: FsdpRow(gradient_format=format, **options)


def one_bit(cls, **options):
    return lambda monkeypatch: OptimizerRow(
        lambda params: cls(params, lr=0.05, **options), monkeypatch, CompressedMean, "reduce", 3
    )


def local(cls, owner=compression.PayloadCodec, **options):
    return lambda monkeypatch: LocalRow(cls, monkeypatch, owner, **options)


CODECS = {
    "BlockSparse": [compression.BlockSparse()],
    "ChunkedTopK": [
        compression.ChunkedTopK(8, 128),
        compression.ChunkedTopK(8, 64, bits=32, dct=True),
    ],
    "Dense": [compression.Dense()],
    "Lossless": [compression.Lossless()],
    "OneBit": [compression.OneBit(64)],
    "Outliers": [compression.Outliers(fraction=0.02, block=64)],
    "PowerSGD": [compression.PowerSGD(2)],
    "Quantize": [compression.Quantize("int3", 64), compression.Quantize("fp8", None)],
    "Threshold": [compression.Threshold(0.05)],
    "TopK": [compression.TopK(0.05), compression.TopK(0.05, algorithm="split", value_codec="int4")],
    "TwoOfFour": [compression.TwoOfFour("fp32")],
}
# Name in moe_ext.compression or moe_ext.optim: makers of rows, which take pytest's monkeypatch.
TABLE = {
    name: [lambda _, codec=codec: CodecRow(codec) for codec in codecs]
    for name, codecs in CODECS.items()
} | {
    "Masked": [masked],
    "PayloadCodec": [lambda _: CodecRow(Short())],
    "CompressionState": [
        lambda _: StateRow("int4"),
        lambda _: StateRow("topk"),
        lambda _: StateRow("onebit", hooked=True),
    ],
    "CompressedReduceScatter": [*map(scattered, ("int8", "sign"))],
    "CompressedAllReduce": [lambda _: FsdpRow(True, node_codec="int3")],
    "OneBitAdam": [one_bit(optim.OneBitAdam, freeze_step=3, variance_interval=1)],
    "OneBitLamb": [one_bit(optim.OneBitLamb, freeze_step=3, block=64)],
    "ZeroOneAdam": [one_bit(optim.ZeroOneAdam, var_freeze_step=2, local_step_scaler=1000)],
    "DeMo": [
        lambda monkeypatch: StartRow(
            lambda params: optim.DeMo(params, compression_decay=1.0),
            monkeypatch,
            compression.PayloadCodec,
            "start",
        )
    ],
    "DiLoCo": [
        local(optim.DiLoCo, codec="int3"),
        local(optim.DiLoCo, Sparse, codec=compression.TopK(0.05)),
    ],
    "SparseLoCo": [local(optim.SparseLoCo, decay=1.0)],
    "MuLoCo": [local(optim.MuLoCo)],
    "quantized_all_reduce_": [lambda _: QuantizedRow()],
    "quantized_reduce_scatter": [lambda _: ScatterRow()],
    "sparse_all_reduce": [lambda _: SparseRow()],
}
# Public names that keep what they owe without a row of their own, and why.
EXEMPT = {
    "Codec": "base of the codecs, which have rows",
    "CodecMemory": "holds what is owed; every row has one",
    "FSDPCompression": "made by the rows of CompressedReduceScatter and CompressedAllReduce",
}


@two(*((name, place) for name, rows in TABLE.items() for place in range(len(rows))))
def given_is_sent_and_owed(name, place):
    with pytest.MonkeyPatch.context() as monkeypatch, torch.random.fork_rng():
        row = TABLE[name][place](monkeypatch)
        for step in range(STEPS):
            row.step(step)
        owed = row.owed()
        left = (row.sent + summed(owed.reshape(-1)) - row.given).abs().max()
        assert left <= row.bound, (name, float(left), row.bound)
        row.fail(STEPS)
        assert torch.equal(row.owed(), owed) and bool(owed.isfinite().all())
        row.step(STEPS)
        left = (row.sent + summed(row.owed().reshape(-1)) - row.given).abs().max()
        assert left <= row.bound, (name, "after a step that failed", float(left))


test_two_ranks = two.test(2)


def classes():
    """Names of all classes of the package, to the names that their bodies and bases call."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                calls = {getattr(n.func, "id", "") for n in ast.walk(node) if type(n) is ast.Call}
                bases = {getattr(base, "id", "") for base in node.bases}
                found.setdefault(node.name, set()).update(calls | bases)
    return found


def test_the_table_has_everything_that_owes():
    keeps, known = {"CodecMemory", "FeedbackStore"}, classes()
    codecs = {name for name, cls in vars(compression).items() if is_codec(cls)}
    while more := {name for name, uses in known.items() if uses & keeps and name not in keeps}:
        keeps |= more - {"Codec"}
        if more <= {"Codec"}:
            break
    public = {
        name: getattr(module, name) for module in (compression, optim) for name in module.__all__
    }
    found = codecs | {name for name, thing in public.items() if name in keeps}
    found |= {
        name
        for name, thing in public.items()
        if inspect.isfunction(thing) and "residual" in inspect.signature(thing).parameters
    }
    found |= {name for name, thing in public.items() if is_codec(thing)}
    assert {"DeMo", "OneBitLamb", "MuLoCo", "CompressedAllReduce", "PowerSGD"} <= found
    assert found == TABLE.keys() | EXEMPT.keys()


def is_codec(thing):
    return inspect.isclass(thing) and issubclass(thing, Codec)
