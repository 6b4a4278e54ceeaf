"""The names that users import: there, once, and without the packages that are optional."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import moe_ext

PUBLIC = {
    "moe_ext": "MoELayer info replace replace_ffn verify",
    "moe_ext.nn": "TopKRouter SwitchRouter GShardRouter NoisyTopKRouter ExpertChoiceRouter "
    "HashRouter BaseRouter SinkhornRouter CosineRouter GroupedExperts RoutingRecord "
    "TransformerBlock",
    "moe_ext.attention": "ring_attention RingAttention sequence_parallel shard_sequence "
    "unshard_sequence position_ids shift_labels token_mean_loss make_layout prepare_model "
    "group_sampler",
    "moe_ext.compression": "CompressionState compress_hook compress_gradients flush Policy TopK "
    "Threshold Quantize Dense CostModel sparse_all_reduce quantized_all_reduce_ "
    "block_sparse_all_reduce_ masked_all_reduce_ row_sparse_all_reduce "
    "hierarchical_all_reduce_ zero_plus_plus",
    "moe_ext.compression.grace": "Compressor Memory Communicator grace_from_params",
    "moe_ext.integrations.grace": "Compressor Memory Communicator grace_from_params",
    "moe_ext.compression.powersgd": "PowerSGD",
    "moe_ext.optim": "LAMB LARS Adafactor OneBitAdam OneBitLamb ZeroOneAdam param_groups",
    "moe_ext.integrations.huggingface": "register_ring_attention shard_batch causal_lm_loss",
    "moe_ext.nn.presets": "switch gshard glam mixtral qwen3 deepseek_v3",
    "moe_ext.integrations.deepspeed": "MoE split_params_into_different_moe_groups_for_optimizer",
    "moe_ext.integrations.paddle": "MoELayer",
    "moe_ext.integrations.tutel": "moe_layer",
    "moe_ext.integrations.fastmoe": "FMoE FMoETransformerMLP",
    "moe_ext.integrations.megablocks": "dMoE",
    "moe_ext.integrations.fairscale": "MOELayer",
    "moe_ext.pipeline": "ActionTable Action make_table check_table add_messages simulate "
    "Costs Pipeline",
    "moe_ext.plot": "expert_load routing_flow pipeline_timeline summary_writer",
}
# Packages that `import moe_ext` leaves alone until they are asked for.
LATER = ("compression", "integrations", "optim", "pipeline", "planner", "plot", "sync")
OPTIONAL = ("matplotlib", "tensorboard", "transformers", "sklearn", "peft", "deepspeed", "numpy")
WITHOUT = f"""
import sys
import torch._dynamo
for name in {OPTIONAL!r}:
    for found in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[found]
    sys.modules[name] = None
import torch
import moe_ext
from moe_ext.nn import RoutingRecord
layer = torch.nn.Sequential(moe_ext.MoELayer(8, 8, 4), moe_ext.MoELayer(8, 8, 4))
record = RoutingRecord()
with record.recording(layer):
    layer(torch.randn(3, 8)).sum().backward()
assert RoutingRecord.from_bytes(record.to_bytes()) == record
for call, package in (
    (lambda: moe_ext.replace(layer), "transformers"),
    (lambda: moe_ext.verify(layer, {{}}), "transformers"),
    (lambda: moe_ext.plot.expert_load(layer), "matplotlib"),
    (lambda: moe_ext.plot.routing_flow(record), "matplotlib"),
    (lambda: moe_ext.plot.summary_writer("nowhere"), "tensorboard"),
):
    try:
        call()
    except ImportError as error:
        assert f"expected {{package}}" in str(error), error
    else:
        raise AssertionError(package)
"""


def modules():
    names = [m.name for m in pkgutil.walk_packages(moe_ext.__path__, "moe_ext.")]
    return ["moe_ext", *(n for n in names if "._C" not in n and not n.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_all_lists_each_name_once(name):
    module = importlib.import_module(name)
    listed = list(getattr(module, "__all__", []))
    assert sorted(set(listed)) == sorted(listed)
    assert [n for n in listed if not hasattr(module, n)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    module = importlib.import_module(name)
    assert [n for n in PUBLIC[name].split() if not hasattr(module, n)] == []


def test_without_optional_packages():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_load_when_they_are_asked_for():
    code = f"""
import sys
import moe_ext
names = {LATER!r}
assert not [n for n in sys.modules if n.startswith(tuple(f"moe_ext.{{each}}" for each in names))]
assert "moe_ext.attention.schemes" not in sys.modules
for name in dir(moe_ext):
    getattr(moe_ext, name)
assert moe_ext.replace is moe_ext.integrations.replace
for package in (moe_ext.attention, moe_ext.compression, moe_ext.distributed, moe_ext.nn):
    assert [name for name in dir(package) if not hasattr(package, name)] == []
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_earlier_names_warn():
    with pytest.warns(DeprecationWarning, match="CostModel is StepCost"):
        assert moe_ext.planner.CostModel is moe_ext.planner.StepCost
