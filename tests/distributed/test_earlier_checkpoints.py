"""Checkpoints of an earlier version, whose experts over ranks were plain tensors.

    python tests/distributed/test_earlier_checkpoints.py

has written `earlier/`, run in the last commit in which they were.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import moe_ext
from moe_ext import distributed as md
from moe_ext.attention import SequenceParallelMLP
from moe_ext.nn import ModuleExperts
from moe_ext.testing import spawn_ranks

FOLDER = Path(__file__).parent / "earlier"
D, E = 4, 4
# Name to ranks, and the mesh that they had.
SAVED = {"ep": (2, {"ep": 2}), "etp": (4, {"dp": 4, "ep": 2, "etp": 2})}


def expert(_index):
    return nn.Linear(D, D)


def make(name, mesh, seed):
    """Model and optimizer; `mesh` None: in one process."""
    torch.manual_seed(seed)
    ep_group = None if mesh is None else mesh.ep_group
    model = nn.Sequential(moe_ext.MoELayer(D, 6, E, 2, ep_group=ep_group))
    if name == "ep":  # what etp does not take
        experts = ModuleExperts.build(expert, E, ep_group=ep_group)
        model.append(moe_ext.MoELayer(D, D, E, 2, experts=experts, ep_group=ep_group))
        columns = {"activation": "swiglu", "grad_reduction": "mean"}
        model.append(SequenceParallelMLP(D, 8, group=ep_group, **columns))
    return model, torch.optim.AdamW(model.named_parameters(), lr=0.1)


def tensors(model, optimizer):
    """Weights and moments of one process, by name."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{key} of {name}"] = value
    return found


def load(rank, name, ranks):
    """What this process holds after a job of `ranks` ranks has loaded, and saved again for it."""
    mesh = md.MoEMesh(**({"ep": ranks} if ranks != 4 else SAVED["etp"][1]))
    model, optimizer = make(name, mesh, seed=1)
    md.checkpoint.load(FOLDER / name, model, optimizer)
    return {key: value.clone() for key, value in md.full_state_dict(model).items()}


def train_and_save(rank, name):
    model, optimizer = make(name, md.MoEMesh(**SAVED[name][1]), seed=0)
    for step in range(2):
        torch.manual_seed(step * 8 + rank)
        model(torch.randn(6, D)).square().mean().backward()
        md.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    md.checkpoint.save(FOLDER / name, model, optimizer)


@pytest.mark.parametrize("name", SAVED)
def test_in_one_process(name):
    model, optimizer = make(name, None, seed=1)
    md.checkpoint.load(FOLDER / name, model, optimizer)
    wanted = torch.load(FOLDER / f"{name}.pt")
    found = tensors(model, optimizer)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(("name", "ranks"), [("ep", 2), ("etp", 2), ("etp", 4)])
def test_over_ranks(name, ranks):
    wanted = torch.load(FOLDER / f"{name}.pt")
    for found in spawn_ranks(load, ranks, name, ranks):
        for key, value in found.items():
            assert torch.equal(value, wanted[key]), key


if __name__ == "__main__":
    for name, (ranks, _) in SAVED.items():
        spawn_ranks(train_and_save, ranks, name)
        model, optimizer = make(name, None, seed=1)
        md.checkpoint.load(FOLDER / name, model, optimizer)
        torch.save(tensors(model, optimizer), FOLDER / f"{name}.pt")
