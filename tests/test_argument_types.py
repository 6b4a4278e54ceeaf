"""What is made once refuses arguments of another type then, and not in the first step."""

import inspect
import math
import re
import warnings

import pytest
import torch
from test_public_api import public
from torch import nn

import moe_ext
from moe_ext import attention, compression, distributed, optim
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


# Class to the arguments that it cannot do without.
NEEDED = {
    compression.BlockSparse: {},
    compression.CompressedAllGather: {},
    compression.CompressedReduceScatter: {},
    compression.CompressionState: {},
    compression.CostModel: {"num_ranks": 2, "link": compression.Link(1.0, 1.0, 1.0)},
    compression.Dense: {},
    compression.Link: {"latency": 1.0, "exchange_bandwidth": 1.0, "reduce_bandwidth": 1.0},
    compression.OneBit: {},
    compression.Policy: {},
    compression.PowerSGD: {},
    compression.Quantize: {},
    compression.ResidualMonitor: {},
    compression.SplitRegions: {"numel": 10, "world_size": 2},
    compression.Threshold: {},
    compression.TopK: {},
    compression.Warmup: {},
    distributed.LocalDispatcher: {"num_experts": 4},
    distributed.TokenDispatcher: {"num_experts": 4},
    distributed.Wire: {},
    attention.RingAttention: {"group": None},
    attention.RingSelfAttention: {"model_dim": 8, "num_heads": 2, "group": None},
    attention.SequenceParallelMLP: {"model_dim": 8, "ffn_dim": 8, "group": None},
    **{
        getattr(optim, name): {"params": [nn.Parameter(torch.zeros(2, 2))]}
        for name in optim.__all__
        if inspect.isclass(getattr(optim, name)) and not issubclass(getattr(optim, name), DiLoCo)
    },
    **{
        made: {
            "manager": Alone(),
            "model_fragments": [LINEAR],
            "inner_optimizer": optim.Muon(LINEAR.parameters(), lr=0.1),
            "outer_optimizer": torch.optim.SGD(LINEAR.parameters(), lr=0.1),
            "sync_every": 2,
        }
        for made in (DiLoCo, optim.SparseLoCo, optim.MuLoCo)
    },
}
# Accepted for the sake of other libraries' calls, and ignored with a warning.
IGNORED = {"foreach", "comm_backend_name", "deepspeed"}


def cases():
    for made, needed in NEEDED.items():
        for name, parameter in inspect.signature(made).parameters.items():
            # Anything is true or false.
            if str(parameter.annotation) != "bool" and name not in IGNORED:
                yield pytest.param(made, needed, name, id=f"{made.__name__}-{name}")


@pytest.mark.parametrize(("made", "needed", "name"), cases())
def test_other_types_are_refused_at_once(made, needed, name):
    made(**needed)
    annotation = str(inspect.signature(made).parameters[name].annotation)
    for wrong in (object(), *(() if "str" in annotation else ("text",))):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            made(**{**needed, name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong", "kind"),
    [
        ("policy", "int8", "Policy"),
        ("warmup", 100, "Warmup"),
        ("monitor", 50, "ResidualMonitor"),
        ("optimizer", nn.Linear(1, 1), "Optimizer"),
        ("cost_model", "auto", "CostModel"),
        ("model", [], "Module"),
        ("clip_norm", "1", "Real"),
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
    "optim.DiLoCo": NEEDED[DiLoCo],
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
    "distributed.TokenDispatcher": BASE,
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
    "optim.MuLoCo": "hands all but the codec to DiLoCo",
    "optim.SparseLoCo": "hands its arguments to DiLoCo and ChunkedTopK",
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
FREE = {"name", "source", "processor", "device", "torch_version"}


# Class to argument to the values that are taken, or refused by a text without the names.
# The list may only shrink.
KNOWN_GAPS = {
    "distributed.LocalDispatcher": {
        "num_experts": "-1",
    },
    "attention.RingAttention": {
        "is_causal": "text",
        "scale": "list text tensor",
        "softcap": "list text tensor",
        "dropout_p": "list None text tensor",
    },
    "attention.SequenceParallelMLP": {
        "norm_eps": "NaN",
    },
    "compression.BlockSparse": {
        "block": "True",
    },
    "compression.CodecMemory": {
        "key": "list None text tensor scalar True NaN",
        "seed": "list None text tensor scalar True NaN",
    },
    "compression.CompressedAllGather": {
        "name": "None",
        "min_numel": "-1",
        "frozen_only": "text",
    },
    "compression.CompressedReduceScatter": {
        "error_feedback": "text",
        "stochastic": "text",
        "name": "None",
        "min_numel": "-1",
    },
    "compression.CompressionState": {
        "density": "NaN",
        "average": "text",
    },
    "compression.CostModel": {
        "num_ranks": "True -1",
    },
    "compression.PackedExperts": {
        "outliers": "list None text tensor NaN",
        "block": "list None text tensor scalar True -1 NaN",
    },
    "compression.Policy": {
        "dense_below": "-1",
        "density": "NaN",
    },
    "compression.SplitRegions": {
        "numel": "list None text tensor scalar True -1 NaN",
        "world_size": "list None text tensor scalar True -1 NaN",
    },
    "pipeline.Costs": {
        "hop": "list None text tensor NaN",
        "overlap": "list None text tensor NaN",
    },
    "pipeline.WaveUpdates": {
        "staleness": "list None text tensor scalar True NaN",
    },
    "sync.DeltaEncoder": {
        "history": "list None text tensor scalar True NaN",
        "xored": "text",
    },
    "optim.DeMo": {
        "compression_decay": "list None text tensor NaN",
        "compression_topk": "list None text tensor scalar True -1 NaN",
        "compression_chunk": "list None text tensor scalar True -1 NaN",
    },
    "optim.DiLoCo": {
        "sync_every": "list None text tensor scalar True",
        "pin_memory": "text",
        "use_bucketization": "text",
        "bucket_cap_mb": "-1",
        "should_quantize": "text",
        "fragment_sync_delay": "list None text tensor True",
        "fragment_update_alpha": "list None text tensor",
    },
    "optim.OneBitAdam": {
        "eps_inside_sqrt": "text",
        "max_grad_norm": "tensor",
        "cuda_aware": "text",
        "block": "tensor",
    },
    "optim.OneBitLamb": {
        "eps_inside_sqrt": "text",
        "max_grad_norm": "tensor",
        "max_coeff": "list None text tensor",
        "min_coeff": "list None text tensor",
        "cuda_aware": "text",
        "coeff_beta": "list None text tensor",
        "factor_max": "list None text tensor",
        "factor_min": "list None text tensor",
        "factor_threshold": "list None text tensor",
        "block": "tensor",
    },
    "optim.ZeroOneAdam": {
        "eps_inside_sqrt": "text",
        "max_grad_norm": "tensor",
        "cuda_aware": "text",
        "block": "tensor",
    },
    "planner.Job": {
        "layer_dtype": "text",
    },
    "integrations.fastmoe.FMoE": {
        "num_expert": "list None text tensor scalar NaN",
        "d_model": "list None text tensor scalar True -1 NaN",
        "world_size": "list None text tensor scalar True -1 NaN",
        "gate_bias": "text",
    },
    "integrations.megablocks.Arguments": {
        "hidden_size": "-1",
        "ffn_hidden_size": "-1",
        "num_layers": "-1",
        "moe_num_experts": "-1",
        "moe_top_k": "-1",
        "moe_capacity_factor": "NaN",
        "moe_normalize_expert_weights": "NaN",
        "moe_loss_weight": "NaN",
        "moe_jitter_eps": "NaN",
        "pipeline_model_parallel_size": "-1",
        "num_layers_per_virtual_pipeline_stage": "-1",
        "mlp_type": "list None text tensor scalar True -1 NaN",
        "mlp_impl": "list None text tensor scalar True -1 NaN",
        "shared_expert_hidden_size": "-1",
        "moe_zloss_weight": "NaN",
    },
    "integrations.grace.BlockQuantizer": {
        "bucket_size": "tensor",
    },
    "integrations.grace.DgcMemory": {
        "momentum": "list None text tensor",
        "gradient_clipping": "text",
        "world_size": "list text tensor scalar True -1 NaN",
    },
    "integrations.grace.FP16Compressor": {
        "average": "text",
        "tensors_size_are_same": "text",
    },
    "integrations.grace.NoneCompressor": {
        "average": "text",
        "tensors_size_are_same": "text",
    },
    "integrations.grace.OneBitCompressor": {
        "bucket_size": "tensor",
    },
    "integrations.grace.QSGDCompressor": {
        "quantum_num": "list None text tensor scalar True",
        "bucket_size": "tensor",
        "seed": "list None text tensor scalar True NaN",
    },
    "integrations.grace.ResidualMemory": {
        "beta": "list None text tensor NaN",
        "gamma": "list None text tensor NaN",
    },
    "integrations.grace.SignSGDCompressor": {
        "bucket_size": "tensor",
    },
    "integrations.grace.SignumCompressor": {
        "momentum": "list None text tensor",
        "bucket_size": "tensor",
    },
}


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
        said = re.match(r"\w+: ", str(error)) and argument in str(error)
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


@pytest.mark.parametrize(("name", "made"), [pytest.param(*each, id=each[0]) for each in listed()])
def test_wrong_values_are_refused_by_name(name, made):
    good = GOOD.get(name, {})
    made(**good)
    known = {a: set(values.split()) for a, values in KNOWN_GAPS.get(name, {}).items()}
    tried = {*wrong_values(made)}
    listed_gaps = {(a, value) for a, values in known.items() for value in values}
    assert listed_gaps <= tried, "KNOWN_GAPS names an argument or value that is not tried"
    faults = {each: fault(made, good, *each) for each in sorted(tried)}
    new = {each: text for each, text in faults.items() if text and each not in listed_gaps}
    assert not new, f"{name}: refuse these as '{made.__name__}: expected <argument> to be ...'"
    mended = {each for each in listed_gaps if not faults[each]}
    assert not mended, f"{name}: these are refused now, remove them from KNOWN_GAPS"


def test_gaps_are_of_classes_that_are_tried():
    assert KNOWN_GAPS.keys() <= {name for name, _ in listed()}


def test_none_is_refused_where_an_argument_is_required():
    calls = {
        "parallelize: expected model to be of type Module": lambda: moe_ext.parallelize(None),
        "whole_state_dicts: expected optimizers to be of type Optimizer": lambda: (
            moe_ext.distributed.whole_state_dicts(None).__enter__()
        ),
        "Pipeline: expected table to be of type ActionTable or TurnPlan": lambda: (
            moe_ext.pipeline.Pipeline(None, {}, None)
        ),
    }
    for text, call in calls.items():
        with pytest.raises(TypeError, match=f"^{text}, got None"):
            call()
