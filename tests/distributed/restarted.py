"""A job of two ranks, one of which dies in its first try: torchrun restarted.py FOLDER."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import moe_ext
from moe_ext import distributed as md

STEPS, DIES_AT, EVERY = 6, 3, 2


def train(rank, folder, dies):
    """Weights of all experts after the steps, from the last checkpoint on, and the first step."""
    torch.manual_seed(0)
    group = md.MoEMesh(dp=1, ep=2).ep_group
    layer = moe_ext.MoELayer(8, 6, 4, 2, ep_group=group, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.named_parameters(), lr=1e-2)
    progress, path = {"step": 0}, Path(folder)
    if (path / "last").exists():
        md.checkpoint.load(path / (path / "last").read_text(), layer, optimizer, extra=progress)
    first = progress["step"]
    for step in range(first, STEPS):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        y = layer(x.double())
        if dies and step == DIES_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y.square().mean().backward()
        md.sync_gradients(layer)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            name = f"step{step + 1}"
            md.checkpoint.save(path / name, layer, optimizer, extra={"step": step + 1})
            if rank == 0:
                (path / "last").write_text(name)
    return md.full_state_dict(layer), first


if __name__ == "__main__":
    dist.init_process_group("gloo")
    tries = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    weights, first = train(dist.get_rank(), sys.argv[1], dies=tries == 0)
    if dist.get_rank() == 0:
        torch.save(
            {"weights": weights, "tries": tries, "first": first}, Path(sys.argv[1]) / "end.pt"
        )
    dist.destroy_process_group()
