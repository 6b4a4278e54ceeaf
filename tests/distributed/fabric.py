"""`Fabric.save` and `Fabric.load` of Lightning with experts that are spread over two ranks."""

import torch
import torch.distributed as dist
from torch import nn
from trainers import as_torchrun

import moe_ext


def save_and_load(rank, folder):
    """Train a step, save, spoil the parameters and load; the names and shapes in the file."""
    as_torchrun()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    world = TorchElasticEnvironment()
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=world, process_group_backend="gloo"),
    )
    fabric.launch()
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(8, 6, 4, 2, ep_group=dist.group.WORLD)
    model = nn.Sequential(nn.Linear(8, 8), layer)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    torch.manual_seed(rank)
    fabric.backward(model(torch.randn(5, 8)).square().mean())
    optimizer.step()
    path = f"{folder}/fabric.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 3})
    held = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    kept = [tensor.detach().clone() for tensor in held]
    with torch.no_grad():
        for tensor in held:
            tensor.add_(1.0)
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    assert rest == {"epoch": 3}
    held = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    assert all(torch.equal(was, now) for was, now in zip(kept, held, strict=True))
    found = torch.load(path, weights_only=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in found["model"].items()}
    assert shapes["1.experts.down_proj"] == (4, 8, 6)
    assert [tuple(s["exp_avg"].shape) for s in found["optimizer"]["state"].values()] == list(
        shapes.values()
    )
