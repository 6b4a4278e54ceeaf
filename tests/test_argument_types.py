"""What is made once refuses arguments of another type then, and not in the first step."""

import inspect
import math
import re
import warnings

import numpy as np
import pytest
import torch
from test_public_api import public
from torch import nn

import moe_ext
from moe_ext import compression, optim, sync
from moe_ext import nn as mn
from moe_ext.optim import DiLoCo
from moe_ext.planner import Level

LINEAR = nn.Linear(2, 2, bias=False)


class Alone:
    """A manager of torchft, of one group."""

    def start_quorum(self):
        pass

    def allreduce(self, tensor):
        return tensor

    def should_commit(self):
        return True


# Accepted for the sake of other libraries' calls, and ignored with a warning.
IGNORED = {"foreach", "comm_backend_name", "deepspeed"}


@pytest.mark.parametrize(
    ("name", "wrong", "kind"),
    [
        ("policy", "int8", "Policy"),
        ("warmup", 100, "Warmup"),
        ("monitor", 50, "ResidualMonitor"),
        ("optimizer", nn.Linear(1, 1), "Optimizer"),
        ("cost_model", "auto", "CostModel"),
        ("model", [], "Module"),
        ("clip_norm", "1", "number"),
        ("grad_scaler", 2.0, "a method get_scale"),
    ],
)
def test_the_text_says_what_is_wanted(name, wrong, kind):
    with pytest.raises(TypeError, match=rf"^CompressionState: expected {name} to .*{kind}.* got "):
        compression.CompressionState(**{name: wrong})


PARAMS = {"params": [nn.Parameter(torch.zeros(2, 2))]}
SIZES = {"model_dim": 8, "num_experts": 4}
# Class to a small row of good arguments; a class that can do without arguments needs no row.
GOOD = {
    "moe_ext.MoELayer": SIZES | {"ffn_dim": 8, "top_k": 2},
    "nn.Capacity": {"factor": 1.0},
    "nn.CosineRouter": SIZES,
    "nn.BaseRouter": SIZES,
    "nn.ExpertChoiceRouter": SIZES,
    "nn.FeedForward": {"model_dim": 8, "ffn_dim": 8},
    "nn.GShardRouter": SIZES,
    "nn.GroupedExperts": SIZES | {"ffn_dim": 8},
    "nn.HashRouter": SIZES | {"vocab_size": 8},
    "nn.ModuleExperts": {"experts": [nn.Linear(8, 8)]},
    "nn.NoisyTopKRouter": SIZES,
    "nn.ResidualMoE": SIZES | {"ffn_dim": 8},
    "nn.RowBudget": {"rows": 8},
    "nn.SharedExpert": {"ffn_dim": 8},
    "nn.SinkhornRouter": SIZES,
    "nn.SwitchRouter": SIZES,
    "nn.TopKRouter": SIZES,
    "nn.TransformerBlock": {"model_dim": 8, "num_heads": 2, "ffn": nn.Linear(8, 8)},
    "distributed.LocalDispatcher": {"num_experts": 4},
    "distributed.TokenDispatcher": {"num_experts": 4},
    "attention.RingAttention": {"group": None},
    "attention.RingSelfAttention": {"model_dim": 8, "num_heads": 2, "group": None},
    "attention.SequenceParallelMLP": {"model_dim": 8, "ffn_dim": 8, "group": None},
    "compression.CodecMemory": {"shapes": [torch.Size([4])], "device": torch.device("cpu")},
    "compression.CostModel": {"num_ranks": 2, "link": compression.Link(1.0, 1.0, 1.0)},
    "compression.Link": {"latency": 1.0, "exchange_bandwidth": 1.0, "reduce_bandwidth": 1.0},
    "compression.PackedExperts": {"experts": mn.GroupedExperts(2, 128, 128)},
    "compression.SplitRegions": {"numel": 10, "world_size": 2},
    "pipeline.WaveUpdates": {"parameters": PARAMS["params"], "group": None, "wave": 2},
    "sync.DeltaEncoder": {"state": {"weight": torch.zeros(2)}},
    **{
        f"optim.{name}": PARAMS
        for name in optim.__all__
        if inspect.isclass(getattr(optim, name)) and not issubclass(getattr(optim, name), DiLoCo)
    },
    "integrations.fastmoe.FMoE": {"expert": nn.Identity},
    "integrations.grace.RandomKCompressor": {"compress_ratio": 0.5},
    "integrations.grace.ThresholdCompressor": {"threshold": 0.5},
    "integrations.grace.TopKCompressor": {"compress_ratio": 0.5},
    **{
        f"optim.{name}": {
            "manager": Alone(),
            "model_fragments": [LINEAR],
            "inner_optimizer": optim.Muon(LINEAR.parameters(), lr=0.1),
            "outer_optimizer": torch.optim.SGD(LINEAR.parameters(), lr=0.1),
            "sync_every": 2,
        }
        for name in ("DiLoCo", "SparseLoCo", "MuLoCo")
    },
    "planner.CodecRate": dict.fromkeys(
        ("numel", "input_bytes", "payload_bytes", "encode_seconds", "decode_seconds"), 1
    ),
    "planner.Host": {"memory": 1.0, "bandwidth": 1.0, "rate": 1.0},
    "planner.Job": {"num_ranks": 2},
    "planner.Level": {"name": "node", "size": 2, "latency": 1.0, "bandwidth": 1.0},
    "planner.RecurrentSpec": {"projections": 8, "channels": 8, "taps": 4},
    "planner.ModelSpec": {
        "num_layers": 2,
        "model_dim": 8,
        "num_heads": 2,
        "ffn_dim": 8,
        "vocab_size": 8,
    },
    "planner.ClusterSpec": {
        "levels": (Level("node", 2, 1.0, 1.0),),
        "flops": {"bfloat16": 1.0},
        "memory": 1.0,
        "memory_bandwidth": 1.0,
    },
    "planner.CostTable": {
        "processor": "cpu",
        "device": "cpu",
        "threads": 1,
        "torch_version": "2",
    },
}
RESULT = "made by the package, not by a user"
RANKS = "needs a process group"
BASE = "base of other classes"
# Class to the reason why it has no row. Named tuples and errors are results too.
EXEMPT = {
    "ops.Permutation": RESULT,
    "nn.LayerMetrics": RESULT,
    "nn.RecordEntry": RESULT,
    "nn.Router": BASE,
    "nn.UpcycledFFN": RESULT,
    **{
        f"distributed.{kind}Dispatcher": RANKS
        for kind in (
            *("AllGather", "AllToAll", "Auto", "Dedup", "DeepEp", "Hierarchical", "NcclEp"),
            "SymmetricMemory",
        )
    },
    "distributed.GradScaler": "torch's class, with its arguments and its checks",
    "distributed.MoEMesh": RANKS,
    "distributed.naming_failed_ranks": "has no numbers or choices",
    "distributed.DispatchChoice": RESULT,
    "distributed.DispatchMetadata": RESULT,
    "distributed.Placement": RESULT,
    "distributed.Traffic": RESULT,
    "distributed.checkpoint.TrainingState": "has no numbers or choices",
    "attention.Candidate": RESULT,
    "attention.Layout": RESULT,
    "attention.Mask": RESULT,
    "attention.PackedDocuments": RESULT,
    "attention.SchemeChoice": RESULT,
    "compression.CompressedAllReduce": "needs a module of FSDP",
    "compression.Masked": "has no numbers or choices",
    "compression.Pruning": RESULT,
    "compression.Reduction": RESULT,
    "pipeline.Pipeline": RANKS,
    "pipeline.ActionTable": "has no numbers or choices",
    "pipeline.Timeline": RESULT,
    "pipeline.TurnPlan": RESULT,
    "sync.DeltaReceiver": "has no numbers or choices",
    "sync.Update": RESULT,
    "sync.WeightPatch": RESULT,
    "planner.Applied": RESULT,
    "planner.StepCost": "has no numbers or choices",
    "planner.Found": RESULT,
    "planner.Plan": RESULT,
    "planner.SearchResult": RESULT,
    "planner.StageLayers": RESULT,
}
WRONG = {
    "list": [1],
    "None": None,
    "text": "unknown name",
    "tensor": torch.ones(2, dtype=torch.bfloat16),
    "scalar": torch.tensor(4),
    "True": True,
    "-1": -1,
    "0": 0,
    "NaN": math.nan,
}
# What is wrong for an argument of a kind; -1 where it is no size is in SIGNED, names in FREE.
WRONG_FOR = {
    "int": ("list", "None", "text", "tensor", "scalar", "True", "-1", "NaN"),
    "float": ("list", "None", "text", "tensor", "NaN"),
    "bool": ("text",),
    "str": ("list", "None", "text", "tensor", "scalar", "True", "-1", "NaN"),
}
SIGNED = {"seed", "key"}
FREE = {"name", "source", "processor", "device", "torch_version", "layer_dtype"}


def constructors():
    """Name to class of all that the reference documents; not abstract, nor a tuple or error."""
    for module, name, value in public():
        if not inspect.isclass(value) or inspect.isabstract(value):
            continue
        if not issubclass(value, tuple | Exception):
            yield f"{module.removeprefix('moe_ext.')}.{name}", value


def required(made):
    found = inspect.signature(made).parameters.values()
    return [p for p in found if p.default is p.empty]


def listed():
    """Classes with a row, and those that need no argument."""
    for name, made in constructors():
        if name in GOOD or (name not in EXEMPT and not required(made)):
            yield name, made


# Classes of these packages refuse other objects, too, as soon as they are made.
AT_ONCE = ("attention.", "compression.", "distributed.", "optim.")
# The device of tensors is torch's to refuse.
LATER = {"compression.CodecMemory"}
# Classes whose arguments go on to others, which name them in their own way.
HAND_ON = {"distributed.TokenDispatcher"}


def cases():
    for name, made in listed():
        for argument, parameter in inspect.signature(made).parameters.items():
            # Anything is true or false.
            is_free = str(parameter.annotation) == "bool" or argument in IGNORED
            if name.startswith(AT_ONCE) and name not in LATER and not is_free:
                yield pytest.param(made, GOOD.get(name, {}), argument, id=f"{name}-{argument}")


@pytest.mark.parametrize(("made", "good", "name"), list(cases()))
def test_other_types_are_refused_at_once(made, good, name):
    made(**good)
    annotation = str(inspect.signature(made).parameters[name].annotation)
    for wrong in (object(), *(() if "str" in annotation else ("text",))):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            made(**{**good, name: wrong})


def wrong_values(made):
    """(argument, name of a value) of all that are wrong for the annotations of a class."""
    for name, parameter in inspect.signature(made).parameters.items():
        kinds = str(getattr(parameter.annotation, "__name__", parameter.annotation)).split(" | ")
        # Other annotations are objects, which the test above tries.
        if name in IGNORED or not {*kinds} <= {*WRONG_FOR, "None"}:
            continue
        sets = [{*WRONG_FOR[kind]} for kind in kinds if kind != "None"]
        for value in WRONG:
            right = value == "None" and "None" in kinds
            right |= value == "-1" and name in SIGNED
            right |= value == "text" and name in FREE
            if all(value in each for each in sets) and not right:
                yield name, value


def fault(made, good, argument, value):
    """None if the value is refused by an error with the names, else what happened."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made(**{**good, argument: WRONG[value]})
    except (TypeError, ValueError) as error:
        said = re.match(r"[\w.]+: ", str(error)) and argument in str(error)
        return None if said else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def test_each_public_class_is_tried_or_exempt():
    found = dict(constructors())
    assert not (GOOD.keys() | EXEMPT.keys()) - found.keys(), "of no public class"
    assert not GOOD.keys() & EXEMPT.keys()
    # Facades hand the arguments of another library to classes of the table.
    facades = {name for name in found if name.startswith("integrations.")}
    new = [
        name
        for name in found.keys() - GOOD.keys() - EXEMPT.keys() - facades
        if required(found[name])
    ]
    assert not new, "give each a row of good arguments in GOOD, or a reason in EXEMPT"


@pytest.mark.parametrize(
    ("name", "made"),
    [pytest.param(*each, id=each[0]) for each in listed() if each[0] not in HAND_ON],
)
def test_wrong_values_are_refused_by_name(name, made):
    good = GOOD.get(name, {})
    made(**good)
    tried = {each: fault(made, good, *each) for each in sorted({*wrong_values(made)})}
    taken = {each: text for each, text in tried.items() if text}
    assert not taken, f"{name}: refuse these as '{made.__name__}: expected <argument> to be ...'"
    for argument, value in tried:
        if value != "-1":
            continue
        with pytest.raises((TypeError, ValueError)) as refused:
            made(**{**good, argument: -1})
        # Who follows the message is not refused again.
        if "to be at least 0" in str(refused.value):
            made(**{**good, argument: 0})


@pytest.mark.parametrize(("name", "made"), [pytest.param(*each, id=each[0]) for each in listed()])
def test_numbers_of_numpy_are_taken(name, made):
    numpy = pytest.importorskip("numpy")
    good = GOOD.get(name, {})
    for argument, parameter in inspect.signature(made).parameters.items():
        value = good.get(argument, parameter.default)
        kind = {int: numpy.int64, float: numpy.float32}.get(type(value))
        if kind is None:
            continue
        found = made(**{**good, argument: kind(value)})
        if isinstance(found, mn.Router):
            found(torch.ones(3, 8), token_ids=torch.zeros(3, dtype=torch.int64))


def test_none_is_refused_where_an_argument_is_required():
    calls = {
        "parallelize: expected model to be of type Module": lambda: moe_ext.parallelize(None),
        "whole_state_dicts: expected optimizers to be of type Optimizer": lambda: (
            moe_ext.distributed.whole_state_dicts(None).__enter__()
        ),
        "checkpoint: expected optimizers to be of type Optimizer": lambda: (
            moe_ext.distributed.checkpoint.save("saved", nn.Linear(2, 2), None)
        ),
        "Pipeline: expected table to be of type ActionTable or TurnPlan": lambda: (
            moe_ext.pipeline.Pipeline(None, {}, None)
        ),
    }
    for text, call in calls.items():
        with pytest.raises(TypeError, match=f"^{text}, got None"):
            call()


@pytest.mark.parametrize(
    "make",
    [
        lambda: compression.CompressionState(model=LINEAR, node_size=np.int64(2)),
        lambda: sync.DeltaEncoder({"w": torch.ones(2)}, history=np.int64(2)),
        lambda: compression.prune(
            nn.Linear(8, 2), parameters=["weight"], density=torch.tensor(0.5)
        ),
        lambda: compression.prune(nn.Linear(8, 2), parameters=["weight"], density=np.float32(0.5)),
    ],
)
def test_numbers_of_other_libraries_are_numbers(make):
    make()
