"""The names that users import: there, once, and without the packages that are optional."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import moe_ext

# Beside those on the pages of docs/api/, see tests/test_public_api.py.
ON_NO_PAGE = {
    "moe_ext.compression.grace": "Compressor Memory Communicator grace_from_params",
    "moe_ext.compression.powersgd": "PowerSGD",
    "moe_ext.integrations.tutel": "moe_layer",
}
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


def test_names_on_no_page():
    for name, wanted in ON_NO_PAGE.items():
        module = importlib.import_module(name)
        assert [n for n in wanted.split() if not hasattr(module, n)] == []


def test_without_optional_packages():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
