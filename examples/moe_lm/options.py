"""The command line: options, their checks and the learning rate they describe."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path

from .model import ModelConfig
from .runtime import UserError

POSITIVE_OPTIONS = (
    "steps",
    "batch",
    "lr",
    "clip",
    "timeout",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "validation_batches",
    "temperature",
)
NON_NEGATIVE_OPTIONS = (
    "seed",
    "warmup",
    "weight_decay",
    "balance_loss_coef",
    "z_loss_coef",
    "sample_bytes",
)


def parse_args(argv: list[str] | None, doc: str) -> argparse.Namespace:
    """Read the command line; `doc` is a line and then the text below the list of options."""
    summary, _, details = doc.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of this job; resumed if it has one")
    add("--data", help="text file or folder (default: the Python standard library)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 runs under autocast")
    add("--ep", type=int, help="ranks that share one set of experts (default: as many as fit)")
    add("--timeout", type=float, default=300, help="seconds to wait for another rank")
    add("--seed", type=int, default=0)
    model = parser.add_argument_group("model")
    for field in fields(ModelConfig):
        if field.name != "vocab_size":
            model.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=400)
    add("--batch", type=int, default=16, help="sequences in a step, over all ranks")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=int, default=50, help="steps until it is reached")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="highest gradient norm")
    add("--balance-loss-coef", type=float, default=0.01)
    add("--z-loss-coef", type=float, default=1e-3)
    add("--capacity-factor", type=float, help="rows an expert takes (default: no token dropped)")
    add = parser.add_argument_group("output").add_argument
    add("--checkpoint-every", type=int, default=100, help="steps")
    add("--keep-checkpoints", type=int, default=2)
    add("--validate-every", type=int, default=100, help="steps")
    add("--validation-batches", type=int, default=16)
    add("--sample-bytes", type=int, default=400)
    add("--prompt", help='text to continue (default: "def ", or held-out text with --data)')
    add("--temperature", type=float, default=0.8)
    add("--tensorboard", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace, world_size: int) -> ModelConfig:
    """Refuse values that cannot work, before anything is read or written."""
    for name in POSITIVE_OPTIONS:
        if not getattr(args, name) > 0:
            option = name.replace("_", "-")
            raise UserError(f"expected --{option} to be positive, got {getattr(args, name)}")
    for name in NON_NEGATIVE_OPTIONS:
        if not getattr(args, name) >= 0:
            option = name.replace("_", "-")
            raise UserError(f"expected --{option} to be at least 0, got {getattr(args, name)}")
    if args.batch % world_size:
        raise UserError(
            f"expected --batch to be a multiple of the number of ranks {world_size}, "
            f"got {args.batch}"
        )
    if args.prompt == "":
        raise UserError("expected --prompt to be at least one byte, got an empty string")
    try:
        return ModelConfig(
            **{
                field.name: getattr(args, field.name)
                for field in fields(ModelConfig)
                if field.name != "vocab_size"
            }
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the rate of `step`: linear warm-up, then half a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))
