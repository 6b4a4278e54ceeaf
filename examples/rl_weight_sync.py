"""A trainer sends a rollout worker the weights that changed, and nothing else.

    torchrun --standalone --nproc-per-node 2 examples/rl_weight_sync.py

Rank 0 trains a mixture-of-experts layer in bfloat16, with float32 masters under Adam at a learning
rate as in reinforcement learning, while each other rank samples from its copy. After every step the
copies have the trainer's bits.

Output: a line a step with reward and bytes. The last line says how many times fewer bytes than
dense the updates took.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ext
from moe_ext.sync import DeltaEncoder, DeltaReceiver, sync_weights

DIM, FFN, EXPERTS = 64, 128, 8


class Trainer:
    """Policy gradients; the reward is the mean of samples drawn around the outputs."""

    def __init__(self, model: moe_ext.MoELayer, lr: float) -> None:
        self.model = model
        self.masters = [p.detach().float().clone() for p in model.parameters()]
        self.optimizer = torch.optim.Adam(self.masters, lr=lr)

    def step(self, x: Tensor, noise: Tensor) -> float:
        """One step of policy gradient; the mean reward."""
        y = self.model(x).float()
        reward = (y.detach() + noise).mean(dim=-1)
        loss = ((y - y.detach() - noise).square().mean(-1) * (reward - reward.mean())).mean()
        self.model.zero_grad()
        loss.backward()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = torch.zeros_like(master) if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.copy_(master)
        return float(reward.mean())


def train(steps: int, lr: float) -> list[int]:
    """Train on rank 0 of the default group and follow on the others; the bytes of each update."""
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)  # trainer and workers begin with the same weights
    model = moe_ext.MoELayer(DIM, FFN, EXPERTS, dtype=torch.bfloat16)
    end = DeltaReceiver(model) if rank else DeltaEncoder(model)
    trainer = None if rank else Trainer(model, lr)
    dense = sum(p.nbytes for p in model.parameters())
    sync_weights(end, group)  # the first update has all elements
    sent = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(256, DIM, generator=generator).bfloat16()
        noise = torch.randn(256, DIM, generator=generator)
        if trainer is not None:
            reward = trainer.step(x, noise)
            end.encode()
        sent.append(sync_weights(end, group))
        # A worker samples with the weights that it has received; here all ranks look at one output.
        outputs = [torch.empty(256, DIM) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, model(x).detach().float())
        assert all(torch.equal(outputs[0], output) for output in outputs)
        if trainer is not None:
            line = f"step {step}: reward {reward:+.4f}, {sent[-1]} bytes, {dense / sent[-1]:.0f}"
            print(f"{line} times fewer than dense, outputs equal", flush=True)
    if trainer is not None and sent:
        fewer = dense * steps / sum(sent)
        print(f"result: {steps} updates of {sum(sent)} bytes, {fewer:.0f} times fewer than dense")
    return sent


def main(argv: list[str] | None = None) -> int:
    """Train and follow on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of training (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-6, help="of Adam (%(default)s)")
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    train(args.steps, args.lr)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
