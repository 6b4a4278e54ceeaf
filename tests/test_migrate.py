"""What docs/migrate.md says exists, and runs."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import moe_ext
from moe_ext.integrations.state_dict import LAYOUTS

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "migrate.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_imports_work():
    pattern = r"^from (moe_ext\S*) import (?:\(([^)]+)\)|(.+))$"
    found = re.findall(pattern, TEXT, re.MULTILINE)
    assert len(found) >= 7
    for module, *names in found:
        for name in re.findall(r"\w+", " ".join(names)):
            assert hasattr(importlib.import_module(module), name), (module, name)


def test_every_layout_has_a_row():
    table = TEXT.split("\n## Checkpoints\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(LAYOUTS)


def after(block):
    """The half of a block that is ours, at a size that a test can afford, on one rank."""
    for large, small in (("512", "8"), ("2048", "16"), ("1024", "8"), ("4096", "16")):
        block = re.sub(rf"\b{large}\b", small, block)
    block = block.replace("world_size=2", "world_size=1").replace("ep_size=2", "ep_size=1")
    return block.split("# after\n")[-1]


@pytest.mark.parametrize(
    "library", ["deepspeed", "paddle", "fastmoe", "tutel", "megablocks", "fairscale"]
)
def test_the_layer_of_each_library_runs_as_written(library):
    code = next(b for b in BLOCKS if f"# after\nfrom moe_ext.integrations.{library} import" in b)
    code = after(code).replace("nn.ModuleList(...)", "nn.ModuleList(local_experts)")
    names = {
        "torch": torch,
        "moe_ext": moe_ext,
        "nn": nn,
        "group": None,
        "x": torch.randn(2, 5, 8),
        "hidden_states": torch.randn(2, 5, 84),
        "local_experts": [nn.Linear(8, 8) for _ in range(4)],
        "num_experts": 4,
        "loss": torch.zeros(()),
    }
    # MegaBlocks' layers are float16 unless they are told otherwise.
    exec(code.replace("num_layers=12", "num_layers=1, fp16=False"), names)
    layer = names.get("layer") or names.get("mlp")
    if library == "fastmoe":
        assert layer(names["x"]).shape == (2, 5, 8)
    elif library == "deepspeed":
        assert names["output"].shape == (2, 5, 84) and names["l_aux"].requires_grad
    else:
        assert names["y"].shape == (2, 5, 8) and names["loss"].requires_grad


def test_dense_models_come_over_as_written():
    code = next(b for b in BLOCKS if "moe_ext.replace_ffn" in b)
    ffns = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)]
    names = {"moe_ext": moe_ext, "model": nn.Sequential(*ffns)}
    x = torch.randn(3, 8)
    before = names["model"](x)
    exec(code, names)
    assert names["count"] == 2
    torch.testing.assert_close(names["model"](x), before)
