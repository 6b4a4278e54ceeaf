"""The Python of the pages about sequences runs as it stands, given what a reader would have."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ext
from moe_ext import attention
from moe_ext.testing import spawn_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
VOCABULARY = 23


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


# A mesh of several ranks is for the tests of the schemes that need one.
@pytest.mark.parametrize(
    "code", [b for b in blocks("attention.md") + blocks("long_models.md") if "_mesh(" not in b]
)
def test_a_block_runs(code):
    names = {
        "attention": attention,
        "moe_ext": moe_ext,
        "torch": torch,
        "F": F,
        "cp_group": None,
        "tokens": torch.randint(VOCABULARY, (2, 9)),
        "logits": torch.randn(2, 9, VOCABULARY, requires_grad=True),
        "labels_L": torch.randint(VOCABULARY, (2, 9)),
        "ids": torch.randint(3, VOCABULARY, (2, 9)),
        **{name: torch.randn(2, 4, 9, 8, requires_grad=True) for name in "qkv"},
    }
    if any(word in code for word in ("huggingface", "transformers", "prepare_model")):
        transformers = pytest.importorskip("transformers", minversion="5.0")
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, intermediate_size=8, **sizes)
        names["model"] = transformers.LlamaForCausalLM(config)
    exec(code, names)


@pytest.mark.parametrize("name", ["choose_scheme", "pack_documents"])
def test_a_table_is_what_its_code_prints(name, capsys):
    text = (DOCS / "attention.md").read_text()
    code, table = re.search(
        rf"```python\n([^`]*{name}[^`]*)```\n+```text\n(.*?)```", text, re.S
    ).groups()
    exec(code, {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == table.splitlines()


def run_four_ranks(rank):
    torch.manual_seed(0)
    code = next(block for block in blocks("distributed.md") if "TransformerBlock" in block)
    code = code.replace("512", "16").replace("1024", "12")
    names = {
        "attention": attention,
        "moe_ext": moe_ext,
        "torch": torch,
        "F": F,
        "tokens": torch.randint(VOCABULARY, (2, 1, 13)),
        "embedding": nn.Embedding(VOCABULARY, 16),
        "head": nn.Linear(16, VOCABULARY),
    }
    # A model that is synchronised has all its parts.
    wanted = "moe_ext.distributed.sync_gradients(model)"
    assert wanted in code
    exec(code.replace(wanted, ""), names)
    model = nn.ModuleList([names["embedding"], names["block"], names["head"]])
    moe_ext.distributed.sync_gradients(model)
    return float(names["loss"])


def test_the_block_of_distributed_runs():
    losses = spawn_ranks(run_four_ranks, 4)
    assert len(set(losses)) == 1
