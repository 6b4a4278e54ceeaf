"""Train a mixture of experts over stages of a pipeline, and go on with another number of them.

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py --schedule 1f1b --save saved
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --schedule zbv --save saved
    python examples/train_pipeline.py --save saved

Each rank holds the layers of its stages alone, and --save folders hold layers by their place in the
whole model: the same command goes on from the newest one, with any --schedule on any number of
ranks. With the schedules that update weights on the way (pipedream, pipedream-2bw, hetpipe) the
optimizer steps inside of the pipeline. The others give the same losses on any number of ranks up to
rounding. A token is one of the eight rows of pixels of a digit.

Output: the loss every 20 steps, of the rank with the last stage. The last line has the last loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import digits
import torch
import torch.nn.functional as F
from moe_lm.runtime import Runtime, UserError, make_folder, run_and_exit
from torch import Tensor, nn

import moe_ext
from moe_ext.distributed import MoEMesh, checkpoint, clip_grad_norm_
from moe_ext.pipeline import ASYNCHRONOUS, SCHEDULES, Pipeline, make_table

MODEL_DIM, FFN_DIM, NUM_EXPERTS, TOP_K, NUM_LAYERS = 32, 64, 4, 2, 8


class Block(nn.Module):
    """Attention over the rows of an image, and experts."""

    def __init__(self) -> None:
        super().__init__()
        experts = moe_ext.MoELayer(MODEL_DIM, FFN_DIM, NUM_EXPERTS, TOP_K)
        self.block = moe_ext.nn.TransformerBlock(MODEL_DIM, 4, experts)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 8, D]` to the same."""
        return self.block(x, position_ids=torch.arange(8))


class Model(nn.Module):
    """Layers of the model, those of this rank alone, under their names in the whole."""

    def __init__(self, own: Container[int], seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for i in range(NUM_LAYERS):
            torch.manual_seed(seed * NUM_LAYERS + i)  # whichever rank has it
            if i in own:
                self.layers[str(i)] = make_layer(i)


def make_layer(i: int) -> nn.Module:
    """The i-th layer: a linear map of pixels, blocks, and a linear map to classes."""
    if i == 0:
        return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, MODEL_DIM))
    if i < NUM_LAYERS - 1:
        return Block()
    return nn.Sequential(nn.ReLU(), nn.Flatten(1), nn.Linear(8 * MODEL_DIM, 10))


def newest(folder: Path | None) -> Path | None:
    """The last checkpoint that is complete."""
    found = [] if folder is None else sorted(folder.glob("*/.metadata"))
    return found[-1].parent if found else None


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Make the stages of this rank, load, train and save."""
    if runtime.device.type != "cpu":
        raise UserError("expected --device cpu: pipelines send by Gloo")
    micro = args.micro_batches
    if args.batch % micro:
        raise UserError(f"expected --batch to be a multiple of {micro}, got {args.batch}")
    try:
        table = make_table(args.schedule, runtime.world_size, micro)
    except ValueError as error:
        raise UserError(str(error)) from error
    count = table.num_stages
    if count > NUM_LAYERS:
        raise UserError(f"expected {NUM_LAYERS} stages at most, got {count} of {args.schedule}")
    mesh = MoEMesh(dp=1, ep=1, pp=runtime.world_size)
    layers = {
        stage: range(NUM_LAYERS * stage // count, NUM_LAYERS * (stage + 1) // count)
        for (_, stage), rank in table.rank_of.items()
        if rank == mesh.pp_rank
    }
    model = Model([i for own in layers.values() for i in own], args.seed)
    stages = {s: nn.Sequential(*(model.layers[str(i)] for i in own)) for s, own in layers.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def update(_stage: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    is_asynchronous = args.schedule in ASYNCHRONOUS
    pipeline = Pipeline(
        table,
        stages,
        F.cross_entropy,
        group=mesh.pp_group,
        recompute=args.recompute,
        update=update if is_asynchronous else None,
    )
    make_folder(args.save)
    progress, saved = {"step": 0}, newest(args.save)
    if saved is not None:
        checkpoint.load(saved, model, optimizer, extra=progress)
    data, alone = digits.load(runtime.device, args.seed), replace(runtime, rank=0, world_size=1)
    first = progress["step"] + 1
    losses: list[torch.Tensor] = []
    for step in range(first, args.steps + 1):
        images, labels = data.batch(step, args.batch, alone, args.seed)
        losses = pipeline.step(images.chunk(micro), labels.chunk(micro))
        if not is_asynchronous:
            clip_grad_norm_(model, 1.0, mesh=mesh)
            update(0)
        if losses and digits.has_line(step, first, args.steps, args.log_every):
            print(f"step {step:4d}  loss {torch.stack(losses).mean():.4f}", flush=True)
        if args.save is not None and (step % args.save_every == 0 or step == args.steps):
            progress["step"] = step
            checkpoint.save(args.save / f"{step:08d}", model, optimizer, extra=progress)
    if losses:
        print(f"result: loss {torch.stack(losses).mean():.4f} after {args.steps} steps")
    elif first > args.steps and runtime.is_main:
        print(f"result: {args.save} holds {first - 1} steps already")


def main(argv: list[str] | None = None) -> int:
    """Parse the options and run."""
    parser = digits.options(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument(
        "--schedule",
        choices=(*SCHEDULES, "chimera", *ASYNCHRONOUS),
        default="1f1b",
        help="order of the passes (%(default)s)",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="parts of a batch (%(default)s)"
    )
    parser.add_argument(
        "--recompute", action="store_true", help="keep inputs of stages alone (off)"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    parser.add_argument("--save", type=Path, help="folder of checkpoints, to go on from, too")
    parser.add_argument(
        "--save-every", type=int, default=20, help="steps between checkpoints (%(default)s)"
    )
    return digits.run(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
