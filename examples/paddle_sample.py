"""PaddlePaddle's sample of a mixture of experts, on moe_ext: the layer's arguments are unchanged.

    torchrun --standalone --nproc-per-node 2 examples/paddle_sample.py
    python examples/paddle_sample.py                # one process, without torchrun

Each rank has eight experts of two linear layers (512 to 2048 and back), GShard's top-2 gate, and
plain SGD. A token is one of the eight rows of pixels of a digit. With the default options held-out
accuracy is above 0.9 on one rank and on two.

Output: losses and dropped tokens every 20 steps. The last line has the held-out accuracy.

Shape suffixes: B images, D model.
"""

from __future__ import annotations

import argparse

import digits
import torch
import torch.nn.functional as F
from moe_lm.runtime import Runtime, run_and_exit
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import moe_ext
from moe_ext.integrations.paddle import MoELayer

D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K = 512, 2048, 8, 2


class ExpertLayer(nn.Module):
    """One expert."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.htoh4 = nn.Linear(d_model, d_hidden)
        self.h4toh = nn.Linear(d_hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, D] -> [n, D]`."""
        return self.h4toh(self.htoh4(x))


class Model(nn.Module):
    """Linear, mixture of experts, linear."""

    def __init__(self, moe_group: ProcessGroup | None, rank: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear1 = nn.Linear(8, D_MODEL)
        self.position = nn.Parameter(torch.randn(8, D_MODEL) * 0.1)
        # Experts differ between ranks, all else is alike.
        torch.manual_seed(seed + 1 + rank)
        experts = nn.ModuleList(ExpertLayer(D_MODEL, D_HIDDEN) for _ in range(NUM_EXPERTS))
        torch.manual_seed(seed)
        self.moe = MoELayer(
            d_model=D_MODEL,
            experts=experts,
            gate={"type": "gshard", "top_k": TOP_K},
            moe_group=moe_group,
            mp_group=None,
            recompute_interval=0,
        )
        self.linear2 = nn.Linear(8 * D_MODEL, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images `[B, 1, 8, 8]` to logits `[B, 10]` and the balance loss."""
        x_B8D = self.linear1(images[:, 0]) + self.position
        x_B8D = x_B8D + self.moe(x_B8D)
        return self.linear2(torch.relu(x_B8D).flatten(1)), self.moe.gate.get_loss()


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Train, and print the held-out accuracy."""
    data = digits.load(runtime.device, args.seed)
    group = torch.distributed.group.WORLD if runtime.world_size > 1 else None
    model = Model(group, runtime.rank, args.seed).to(runtime.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        images, labels = data.batch(step, args.batch, runtime, args.seed)
        logits, balance = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        (loss + args.balance_loss_coef * balance).backward()
        moe_ext.distributed.sync_gradients(model)
        moe_ext.distributed.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if runtime.is_main and (step % args.log_every == 0 or step == args.steps - 1):
            dropped = int(model.moe.metrics["num_dropped"])
            print(
                f"step {step + 1:4d}  loss {loss.item():.3f}  balance {balance.item():.3f}  "
                f"dropped {dropped}",
                flush=True,
            )
    found = digits.accuracy(model, data, runtime)
    if runtime.is_main:
        print(f"result: held-out accuracy {found:.4f} after {args.steps} steps", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse the options and run."""
    parser = digits.options(__doc__)
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (%(default)s)")
    parser.add_argument(
        "--balance-loss-coef",
        type=float,
        default=0.1,
        help="factor on the balance loss (%(default)s)",
    )
    parser.set_defaults(steps=80)
    return digits.run(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
