"""The Python in the pages about several ranks runs, page by page, on four Gloo ranks."""

import os
import re
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext.compression import CompressionState
from moe_ext.testing import spawn_ranks

DOCS = Path(__file__).resolve().parent.parent / "docs"
NUM_RANKS = 4
PAGES = (
    "checkpoints",
    "collectives",
    "compression",
    "dispatchers",
    "distributed",
    "fsdp",
    "migrate",
    "optimizers",
    "parallelism",
)
# What a page says of its own: a group of its own, nodes of 8 GPUs, 16 ranks.
HERE = (
    ('torch.distributed.init_process_group("gloo")', ""),
    ('"cuda"', '"cpu"'),
    ("(nodes, 8)", "(nodes, 2)"),
    ("reshard_after_forward=8", "reshard_after_forward=2"),
    ("zero_hpz_partition_size=8", "zero_hpz_partition_size=2"),
    ("freeze_step=2000", "freeze_step=1"),
    ("dp=2, ep=4", "dp=2, ep=2"),
    ("fsdp_size=2", "fsdp_size=4"),
    ("accelerate.Accelerator()", "accelerate.Accelerator(cpu=True)"),
    ("devices=2", "devices=4, enable_progress_bar=False, logger=False"),
    ("save_steps=1", "save_steps=1, use_cpu=True, disable_tqdm=True, report_to=[]"),
)
# These run in tests/attention, tests/distributed, tests/test_readme.py and tests/test_migrate.py.
ELSEWHERE = (
    "# was: ",
    "# after\nfrom moe_ext.integrations",
    "state = convert(",
    "replace_ffn",
    "TransformerBlock",
    "dist.init_process_group",
    "block.moe.experts",
    "presets",
    "shard_sequence",
    "from_config",
)


class MyModel(nn.Module):
    """Blocks with experts, of which each rank holds all, or those of its place in a group."""

    def __init__(self, ep_group=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), moe_ext.MoELayer(32, 32, 4, ep_group=ep_group))
            for _ in range(2)
        )
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def given(rank, code):
    """The names that a reader has, anew for each block."""
    model = MyModel()
    batches = [torch.randn(5, 32) for _ in range(3)]
    model(batches[0]).square().mean().backward()
    stacked = [p for p in model.parameters() if p.dim() == 3]
    names = {
        "os": os,
        "torch": torch,
        "F": F,
        "moe_ext": moe_ext,
        "rank": rank,
        "model": model,
        "MyModel": MyModel,
        "build_model": MyModel,
        "DistributedDataParallel": DistributedDataParallel,
        "loss": model(batches[1]).square().mean(),
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "loss_function": lambda out: out.square().mean(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "data": batches,
        "batches": batches,
        "batches_of_this_rank": batches,
        "loader": torch.utils.data.DataLoader(batches, batch_size=None),
        "path": f"model-{rank}.pt",
        "old": NUM_RANKS,
        "old_world_size": NUM_RANKS,
        "nodes": 2,
        "matrices": [p for p in model.parameters() if p.dim() == 2],
        "biases_and_norms": [p for p in model.parameters() if p.dim() == 1],
        "stacked_experts": stacked,
        "grad": torch.randn(4096),
        "residual": torch.zeros(4096),
        "k": 40,
    }
    if "accelerate." in code:
        import accelerate

        names["accelerate"] = accelerate
    if "rank_state" in code:
        # Those of the block before.
        del names["optimizer"], names["model"]
    if "register_comm_hook" in code:
        names["ddp"] = DistributedDataParallel(model)
    if re.search(r"\bstate\b", code):
        names["state"] = CompressionState(model=model, codec="int8")
        torch.save(names["state"].state_dict(), f"residual_{rank}.pt")
        torch.distributed.barrier()
    if "set_custom_all_gather" in code:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
        names["block"] = fully_shard(model.blocks[0], mesh=mesh["local"])
        names["node_group"] = mesh["node"].get_group()
    return names


def given_transformers(rank, code):
    """The same for the page about Hugging Face: a small Mixtral, anew for each block."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 32, (2, 8))
    return {
        "torch": torch,
        "rank": rank,
        "path": "mixtral",
        "batch": {"input_ids": tokens, "labels": tokens},
        "data": [{"input_ids": tokens[0], "labels": tokens[0]}] * 64,
        "model": AutoModelForCausalLM.from_pretrained("mixtral"),
    }


def save_mixtral(folder):
    """For `path` of the page."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def run_pages(rank, folder, pages, given):
    """(page, block, traceback) of the first failure, of None."""
    os.chdir(folder)
    # As torchrun on nodes of two ranks.
    os.environ.update(LOCAL_WORLD_SIZE="2", WORLD_SIZE=str(NUM_RANKS), RANK=str(rank))
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    for page in pages:
        found = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
        names = {}
        for index, code in enumerate(found):
            if any(word in code for word in ELSEWHERE):
                continue
            for there, here in HERE:
                code = code.replace(there, here)
            # Other ranks may still write or read the files of the block before.
            torch.distributed.barrier()
            # What a block imports or makes, later blocks of its page have.
            names = {**names, **given(rank, code)}
            try:
                exec(compile(code, f"{page}-{index}", "exec"), names)
            except Exception:
                # Ranks that wait for this one fail later, with an error of their own.
                traceback.print_exc()
                return page, index, traceback.format_exc()
    return None


@pytest.mark.slow
def test_blocks_run(tmp_path):
    check_all_ran(spawn_ranks(run_pages, NUM_RANKS, str(tmp_path), PAGES, given, timeout=120))


@pytest.mark.slow
def test_blocks_about_transformers_run(tmp_path):
    save_mixtral(tmp_path / "mixtral")
    pages = ("hugging_face",)
    check_all_ran(
        spawn_ranks(run_pages, NUM_RANKS, str(tmp_path), pages, given_transformers, timeout=120)
    )


def check_all_ran(found):
    assert found == [None] * NUM_RANKS, found[0][2] if found[0] else found
