"""A process that a launcher started beside others refuses to work alone without a group."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from test_public_api import public
from torch import nn

import moe_ext
from moe_ext import attention, compression, optim
from moe_ext.distributed import (
    MoEMesh,
    checkpoint,
    clip_grad_norm_,
    from_ds_config,
    sync_gradients,
    whole_state_dicts,
)
from moe_ext.integrations import fairscale, fastmoe, grace, horovod, tutel

SOURCES = Path(moe_ext.__file__).parent
ONES = torch.ones(8)


def model():
    layer = nn.Linear(4, 4, bias=False)
    layer(torch.ones(2, 4)).sum().backward()
    return layer


def optimizer(made, **options):
    return made(model().parameters(), lr=0.1, **options)


def entered(context):
    with context:
        pass


def local_steps(made):
    layer = nn.Linear(2, 2)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    return made(None, [layer], sgd, torch.optim.SGD(layer.parameters(), lr=0.1), 2)


# Name to a call that uses the default group.
CALLS = {
    "MoEMesh": MoEMesh,
    "sync_gradients": lambda: sync_gradients(model()),
    "clip_grad_norm_": lambda: clip_grad_norm_(model(), 1.0),
    "whole_state_dicts": lambda: entered(whole_state_dicts()),
    "from_ds_config": lambda: from_ds_config({"train_batch_size": 2}),
    "checkpoint.save": lambda: checkpoint.save("absent", model()),
    "checkpoint.async_save": lambda: checkpoint.async_save("absent", model()),
    "checkpoint.load": lambda: checkpoint.load("absent", model()),
    "CompressionState": lambda: compression.CompressionState(),
    "CostModel": lambda: compression.CostModel(),
    "block_sparse_all_reduce_": lambda: compression.block_sparse_all_reduce_(ONES),
    "hierarchical_all_reduce_": lambda: compression.hierarchical_all_reduce_(
        ONES, local_group=None, node_group=None, reduce=lambda *_: None
    ),
    "lossless_all_gather": lambda: compression.lossless_all_gather(ONES.clone(), ONES),
    "lossless_all_reduce_": lambda: compression.lossless_all_reduce_(ONES),
    "lossless_reduce_scatter": lambda: compression.lossless_reduce_scatter(ONES.clone(), ONES),
    "masked_all_reduce_": lambda: compression.masked_all_reduce_(ONES, ONES > 0),
    "quantized_all_gather": lambda: compression.quantized_all_gather(ONES.clone(), ONES),
    "quantized_all_reduce_": lambda: compression.quantized_all_reduce_(ONES),
    "quantized_reduce_scatter": lambda: compression.quantized_reduce_scatter(ONES.clone(), ONES),
    "row_sparse_all_reduce": lambda: compression.row_sparse_all_reduce(
        torch.sparse_coo_tensor([[0]], [[1.0]], (2, 1))
    ),
    "sparse_all_reduce": lambda: compression.sparse_all_reduce(ONES, torch.arange(8), 8),
    "DeMo": lambda: optimizer(optim.DeMo),
    "OneBitAdam": lambda: optimizer(optim.OneBitAdam),
    "OneBitLamb": lambda: optimizer(optim.OneBitLamb),
    "ZeroOneAdam": lambda: optimizer(optim.ZeroOneAdam),
    "DiLoCo": lambda: local_steps(optim.DiLoCo),
    "SparseLoCo": lambda: local_steps(optim.SparseLoCo),
    "group_sampler": lambda: attention.group_sampler([0], group=None),
    "tutel.moe_layer": lambda: tutel.moe_layer(
        {"type": "top", "k": 1}, 4, {"type": "ffn", "count_per_node": 2}
    ),
    "fairscale.MOELayer": lambda: fairscale.MOELayer(
        fairscale.Top2Gate(4, 2), nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    ),
    "fastmoe.FMoE": lambda: fastmoe.FMoE(2, 4, world_size=2, expert=nn.Linear),
    "horovod.rank": horovod.rank,
    "horovod.size": horovod.size,
    "horovod.allreduce": lambda: horovod.allreduce(ONES),
    "Communicator": lambda: grace.grace_from_params({}),
}
# These need what the calls above have made, or no group at all.
EXEMPT = {
    "Balance": "None is this rank alone",
    "log_metrics": "None is this rank alone",
    "measure_cluster": "None measures this machine, and no link",
    "GShardGate": "the layer sets its group",
    "SwitchGate": "the layer sets its group",
    "CompressedAllReduce": "takes the group of its module, which FSDP has made",
    "PowerSGD": "a codec has no group before its first message, whose group is the hook's",
    "Lossless": "a codec has no group before its first message, whose group is the hook's",
    "PowerSGDCompressor": "resolves its group with its first tensor, behind a Communicator",
    "DgcMemory": "resolves its group with its first tensor, behind a Communicator",
    "Allreduce": "is a Communicator",
    "Allgather": "is a Communicator",
    "grace_from_params": "makes a Communicator",
    "moe_layer": "is tutel.moe_layer",
    "MOELayer": "is fairscale.MOELayer",
    "MuLoCo": "is a DiLoCo",
    "zero_plus_plus": "takes a module that FSDP has wrapped",
}


@pytest.fixture
def started_beside_another(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_without_a_group_does_not_work_alone(name, started_beside_another):
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) to have run.*WORLD_SIZE.* 2 "):
        CALLS[name]()


def test_one_process_needs_no_group(monkeypatch):
    for started in (None, "1", "", "many"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if started is not None:
            monkeypatch.setenv("WORLD_SIZE", started)
        assert MoEMesh().dp_size == 1
        sync_gradients(model())


def means_default(value):
    """True for what takes a group, and does not say that None is this process alone."""
    if not callable(value) or not (text := inspect.getdoc(value)):
        return False
    try:
        taken = inspect.signature(value).parameters
    except ValueError:
        return False
    found = [n for n in ("group", "process_group", "node_group") if n in taken]
    return any(
        taken[name].default is None
        and not re.search(
            rf"^ +{name}:[^:]*(alone|None keeps|without a group)|^ +{name}: see", text, re.MULTILINE
        )
        for name in found
    )


def test_every_name_that_takes_the_default_group_is_tried():
    names = {name for _, name, value in public() if means_default(value)}
    for path in SOURCES.rglob("*.py"):
        names |= set(re.findall(r"resolve_group\([^()]*, \"([^\"]+)\"\)", path.read_text()))
    tried = {*CALLS, *(name.rpartition(".")[2] for name in CALLS), *EXEMPT}
    assert names <= tried, f"neither tried nor exempt: {sorted(names - tried)}"
