"""What is made once refuses arguments of another type then, and not in the first step."""

import inspect

import pytest
import torch
from torch import nn

from moe_ext import attention, compression, distributed, optim
from moe_ext.optim import DiLoCo

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
