"""Train a mixture of experts under FSDP2, save it, and go on with another number of ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py --ep 2 --save checkpoint
    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --ep 2 --load checkpoint
    python examples/train_fsdp2.py --load checkpoint

With --ep 2, pairs of ranks share the eight experts, ranks with the same experts shard them, and all
ranks shard the rest. With --bf16 weights are gathered, and tokens sent, in bfloat16. A token is one
of the eight rows of pixels of a digit. With the default options the held-out accuracy is above
0.9 after 120 steps, on any number of ranks.

Output: loss and gradient norm every 20 steps. The last line has the held-out accuracy.

Shape suffixes: B images, D model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import torch
import torch.nn.functional as F
from moe_lm.runtime import Runtime, UserError, make_folder, run_and_exit
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import moe_ext
from moe_ext.distributed import MoEMesh, checkpoint, clip_grad_norm_, fully_shard

D_MODEL, D_FFN, NUM_EXPERTS, TOP_K, NUM_BLOCKS = 64, 128, 8, 2, 2


class Model(nn.Module):
    """Linear, blocks with experts, linear."""

    def __init__(self, mesh: MoEMesh, seed: int) -> None:
        super().__init__()
        # Every rank draws the same values, and keeps its shards of them.
        torch.manual_seed(seed)
        self.embed = nn.Linear(8, D_MODEL)
        self.blocks = nn.ModuleList(
            moe_ext.nn.TransformerBlock(
                D_MODEL,
                4,
                moe_ext.MoELayer(D_MODEL, D_FFN, NUM_EXPERTS, TOP_K, ep_group=mesh.ep_group),
            )
            for _ in range(NUM_BLOCKS)
        )
        self.classify = nn.Linear(8 * D_MODEL, 10)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Images `[B, 1, 8, 8]` to logits `[B, 10]`."""
        x_B8D = self.embed(images[:, 0])
        for block in self.blocks:
            x_B8D = block(x_B8D, position_ids=torch.arange(8, device=images.device))
        return (self.classify(torch.relu(x_B8D).flatten(1)).float(),)


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Wrap, load, train, save, and print the held-out accuracy."""
    if args.ep < 1 or runtime.world_size % args.ep or NUM_EXPERTS % args.ep:
        raise UserError(
            f"expected --ep to divide the number of ranks, {runtime.world_size}, and "
            f"{NUM_EXPERTS} experts, got {args.ep}"
        )
    if args.load is not None and not (args.load / ".metadata").exists():
        raise UserError(f"expected --load to be the folder of a checkpoint, got {args.load}")
    data = digits.load(runtime.device, args.seed)
    mesh = MoEMesh(dp=runtime.world_size // args.ep, ep=args.ep)
    model = Model(mesh, args.seed).to(runtime.device)
    policy = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh, mp_policy=policy)
    fully_shard(model, mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    make_folder(args.save)
    progress = {"step": 0}
    if args.load is not None:
        checkpoint.load(args.load, model, optimizer, extra=progress)
    first = progress["step"] + 1
    last = progress["step"] + args.steps
    for step in range(first, last + 1):
        images, labels = data.batch(step - 1, args.batch, runtime, args.seed)
        loss = F.cross_entropy(model(images)[0], labels)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        if runtime.is_main and digits.has_line(step, first, last, args.log_every):
            print(f"step {step:4d}  loss {loss:.3f}  gradient {norm:.3f}", flush=True)
    progress["step"] = last
    if args.save is not None:
        checkpoint.save(args.save, model, optimizer, extra=progress)
    found = digits.accuracy(model, data, runtime)
    if runtime.is_main:
        print(f"result: held-out accuracy {found:.4f} after {progress['step']} steps", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse the options and run."""
    parser = digits.options(__doc__)
    parser.add_argument("--ep", type=int, default=1, help="ranks that share experts (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (float32)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--load", type=Path, help="folder of a checkpoint to go on from")
    return digits.run(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
