"""Handwritten digits of scikit-learn: 1797 images of 8 x 8 pixels, in ten classes.

Shape suffixes: B images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from moe_lm.runtime import Runtime, UserError, start
from torch import Tensor, nn

import moe_ext


@dataclass(frozen=True)
class Digits:
    """Images `[B, 1, 8, 8]` in 0..1 and their classes, for training and held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batch(self, step: int, size: int, runtime: Runtime, seed: int) -> tuple[Tensor, Tensor]:
        """This rank's share of the global batch of a step: the same images on any ranks."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen_B = torch.randint(len(self.train_labels), (size,), generator=generator)
        own_B = chosen_B.chunk(runtime.world_size)[runtime.rank]
        return self.train_images[own_B], self.train_labels[own_B]


def load(device: torch.device, seed: int) -> Digits:
    """A random fifth of the images is held out; a UserError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("scikit-learn is needed: pip install scikit-learn") from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32, device=device)[:, None] / 16
    labels = torch.tensor(found.target, dtype=torch.int64, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return Digits(images[rest], labels[rest], images[held_out], labels[held_out])


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, runtime: Runtime) -> float:
    """Share of the held-out images that are classified right; each rank takes its part."""
    model.eval()
    own = slice(runtime.rank, None, runtime.world_size)
    found_B = model(digits.test_images[own])[0].argmax(dim=1)
    right = (found_B == digits.test_labels[own]).sum()
    with moe_ext.distributed.naming_failed_ranks(dist.group.WORLD, "accuracy"):
        dist.all_reduce(right)
    model.train()
    return int(right) / len(digits.test_labels)


def has_line(step: int, first: int, last: int, every: int) -> bool:
    """True for the steps that are printed: the first, the last, and one in so many."""
    return step in (first, last) or step % every == 0


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that the examples share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=64, help="images a step, over all ranks (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument(
        "--log-every",
        type=int,
        default=20,
        help="steps between lines, beside the first and the last (%(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU where there is one (%(default)s)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="of a collective, in seconds (%(default)s)"
    )
    return parser


def check_options(args: argparse.Namespace, world_size: int) -> None:
    """UserError for numbers that cannot be."""
    for name in ("steps", "batch", "log_every", "micro_batches", "save_every"):
        if getattr(args, name, 1) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"expected --{flag} to be at least 1, got {getattr(args, name)}")
    if not args.lr > 0:
        raise UserError(f"expected --lr to be positive, got {args.lr}")
    if args.batch % world_size:
        raise UserError(
            f"expected --batch to be a multiple of the number of ranks, {world_size}, got "
            f"{args.batch}"
        )


def run(work: Callable[[argparse.Namespace, Runtime], None], args: argparse.Namespace) -> int:
    """Join the job and do the work; a mistake of the user is one line and exit code 2."""
    try:
        runtime = start(args)
        check_options(args, runtime.world_size)
        if runtime.is_main:
            print(f"{runtime.device_note}; {runtime.world_size} ranks", flush=True)
        work(args, runtime)
    except UserError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
