"""A model for ranks to wrap, and what their gradients are in one process."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import moe_ext
from moe_ext.compression.fsdp import zero_plus_plus
from moe_ext.ops import dequantize_blockwise, quantize_blockwise


class Block(nn.Module):
    """Odd widths, so that shards are uneven: 50 rows over 4 ranks."""

    def __init__(self, ep_group=None):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 50)
        self.down = nn.Linear(50, 64, bias=False)
        self.moe = moe_ext.MoELayer(64, 48, 4, 2, bias=True, ep_group=ep_group)

    def forward(self, x):
        h = self.norm(x)
        return self.moe(x + self.down(torch.nn.functional.gelu(self.up(h))))


class Model(nn.Module):
    def __init__(self, seed=3, ep_group=None):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(12, 64)
        self.blocks = nn.ModuleList(Block(ep_group) for _ in range(2))
        self.out = nn.Linear(64, 5)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Idle(nn.Module):
    """Two layers, of which one may have no part in a pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, both=True):
        return self.used(x) + (self.idle(x) if both else 0)


COMPRESSED = ("up.weight", "down.weight", "gate_up_proj", "down_proj")


def is_compressed(name):
    return name.endswith(COMPRESSED)


def mesh_of(ranks):
    return DeviceMesh("cpu", list(ranks))


def wrapped(mesh=None, model=None, **kwargs):
    model = Model() if model is None else model
    kwargs["mesh"] = mesh if mesh is not None else mesh_of(range(dist.get_world_size()))
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(100 * step)
    ranks = dist.get_world_size()
    data = [torch.randn(6 + r, 12, generator=generator) for r in range(ranks)]
    return data[dist.get_rank() if rank is None else rank]


def loss_of(model, step, rank=None):
    return model(batch(step, rank)).float().square().mean()


def backward(model, step):
    """One pass on gradients that start from none; returns the loss."""
    model.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def train(model, steps, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
    return torch.stack(losses)


def whole(tensors):
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors}


def weights(model):
    return whole((n, p.data) for n, p in model.named_parameters())


def gradients(model):
    return whole((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)


@functools.cache
def local_gradients(step, rank):
    """Of one rank's loss, in one process."""
    model = Model()
    loss_of(model, step, rank).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


def ranks():
    return dist.get_world_size()


@functools.cache
def mesh():
    return mesh_of(range(dist.get_world_size()))


@functools.cache
def node_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))


def quantized_gradients(**kwargs):
    model = wrapped(mesh())
    return model, zero_plus_plus(model, zero_quantized_gradients=True, **kwargs)


def mean_of_gradients(steps):
    """Over ranks, summed over steps, as one process computes them; and the largest of each rank."""
    total, largest = {}, {}
    for step in steps:
        for rank in range(ranks()):
            for name, grad in local_gradients(step, rank).items():
                total[name] = total.get(name, 0) + grad.double() / ranks()
                largest.setdefault(name, []).append(grad.abs().max().item())
    return total, largest


def poisoned_backward(model, step, rank, factor):
    model.zero_grad()
    (loss_of(model, step) * (factor if dist.get_rank() == rank else 1.0)).backward()


def assert_a_pass_is_not_finite(model, compression, step, rank, factor):
    """Assert that all ranks are told of a rank's pass, and owe what they did."""
    before = own_residuals(compression)
    poisoned_backward(model, step, rank, factor)
    assert not compression.finite()
    assert_same(own_residuals(compression), before)


def signs_of_shards(grad, num_shards, block=256):
    """What signs make of a gradient of whole rows, shard by shard, nothing padded."""
    rows = -(-grad.shape[0] // num_shards)
    parts = []
    for shard in grad.split(rows):
        coded = quantize_blockwise(shard.reshape(-1), format="sign", block=block)
        parts.append(
            dequantize_blockwise(*coded, shard.numel(), format="sign", block=block).view_as(shard)
        )
    return torch.cat(parts)


def assert_nearly_all_close(found, want):
    """All but the few elements whose sign depends on the order of a sum."""
    close = torch.isclose(found, want, rtol=1e-4, atol=1e-8)
    assert close.float().mean() > 0.995, (~close).nonzero()[:8]


def owed(compression):
    """Name to what is owed for a parameter, over all ranks."""
    found = {}
    for tensors in compression.state_dict()["residuals"].values():
        for name, left in whole(tensors.items()).items():
            found[name] = found.get(name, 0) + left
    return found


def own_residuals(compression):
    """(module, parameter) to what this rank owes."""
    residuals = compression.state_dict(sharded=False)["residuals"]
    return {(module, name): t for module, part in residuals.items() for name, t in part.items()}


def assert_nothing_is_lost(model, compression, *, num_steps=2, is_owed=is_compressed):
    """Assert that applied plus owed gradients are the sum of all, and that something is owed."""
    applied = {}
    for step in range(num_steps):
        backward(model, step)
        assert compression.finite()
        for name, grad in gradients(model).items():
            applied[name] = applied.get(name, 0) + grad.double()
    left = owed(compression)
    want, largest = mean_of_gradients(range(num_steps))
    assert {name for name in want if is_owed(name)} == set(left)
    for name, total in want.items():
        found = applied[name] + left.get(name, 0)
        assert (found - total).abs().max() <= 1e-6 * (1 + max(largest[name])), name
        if name in left:
            assert (applied[name] - total).abs().max() > 1e-5 * max(largest[name]), name
