"""The command line: options, their checks and the learning rate they describe."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path

from .model import ModelConfig
from .parallel import SCHEDULES, check_axes
from .runtime import UserError

AXES = {
    "tp": "ranks that share attention and dense layers",
    "cp": "ranks that share a sequence",
    "pp": "pipeline stages",
    "etp": "ranks that share each expert",
}
DISPATCHERS = ["auto", "alltoall", "dedup", "hierarchical", "allgather"]
POSITIVE_OPTIONS = (
    "steps",
    "batch",
    "lr",
    "clip",
    "timeout",
    *AXES,
    "micro_batches",
    "checkpoint_every",
    "keep_checkpoints",
    "validate_every",
    "validation_batches",
    "temperature",
)
NON_NEGATIVE_OPTIONS = (
    "warmup",
    "weight_decay",
    "balance_loss_coef",
    "z_loss_coef",
    "sample_bytes",
)
# All else is the plan's, or writes into --out.
BESIDE_A_PLAN = [
    "plan",
    "data",
    "device",
    "timeout",
    "seed",
    "steps",
    "lr",
    "warmup",
    "weight_decay",
    "clip",
]
SIZES = {
    "model_dim": "width",
    "num_layers": "blocks",
    "num_heads": "heads of attention",
    "ffn_dim": "width of an expert",
    "num_experts": "experts of a layer",
    "top_k": "experts of a token",
    "moe_every": "experts in each n-th block",
    "seq_len": "bytes of a sequence",
}


def parse_args(argv: list[str] | None, doc: str) -> argparse.Namespace:
    """Read the command line; `doc` is a line and then the text below the list of options."""
    summary, _, details = doc.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=f"Defaults stand in parentheses.\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder of this job; resumed if it has one")
    add("--plan", type=Path, help="file of a plan, in the place of --out: axes, sizes and batch")
    add("--data", help="text file or folder (the Python standard library)")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto takes a GPU where there is one (%(default)s)",
    )
    add(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast (%(default)s)"
    )
    add("--timeout", type=float, default=300, help="seconds to wait for another rank (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and the sample (%(default)s)")
    add = parser.add_argument_group("parallelism").add_argument
    add("--ep", type=int, help="ranks that share one set of experts (as many as fit)")
    add("--dp", type=int, help="copies of the experts, or batches (what the other axes leave)")
    for name, what in AXES.items():
        add(f"--{name}", type=int, default=1, help=f"{what} (%(default)s)")
    add(
        "--zero",
        type=int,
        choices=range(4),
        default=0,
        help="1 divides states of the dense part, 2 all states and gradients, 3 all (%(default)s)",
    )
    add("--dispatcher", choices=DISPATCHERS, default="auto", help="of tokens (%(default)s)")
    add(
        "--combine",
        choices=["exact", "reduced"],
        default="exact",
        help="what comes back from experts (%(default)s)",
    )
    add("--compress", choices=["int8", "fp8", "mx"], help="rows on their way to experts (nothing)")
    add(
        "--checkpointing",
        choices=["none", "selective", "full"],
        default="none",
        help="activations to compute again: those that send nothing, or all (%(default)s)",
    )
    add("--schedule", choices=list(SCHEDULES), help="of a pipeline (1f1b)")
    add("--micro-batches", type=int, default=1, help="parts of a step (%(default)s)")
    model = parser.add_argument_group("model")
    for field in fields(ModelConfig):
        if field.name != "vocab_size":
            option = f"--{field.name.replace('_', '-')}"
            text = f"{SIZES[field.name]} (%(default)s)"
            model.add_argument(option, type=int, default=field.default, help=text)
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=400, help="optimizer steps (%(default)s)")
    add("--batch", type=int, default=16, help="sequences in a step, over all ranks (%(default)s)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    add("--warmup", type=int, default=50, help="steps until it is reached (%(default)s)")
    add("--weight-decay", type=float, default=0.1, help="of AdamW (%(default)s)")
    add("--clip", type=float, default=1.0, help="highest gradient norm (%(default)s)")
    add(
        "--balance-loss-coef",
        type=float,
        default=0.01,
        help="factor on the balance loss (%(default)s)",
    )
    add(
        "--z-loss-coef",
        type=float,
        default=1e-3,
        help="factor on the router's z-loss (%(default)s)",
    )
    add("--capacity-factor", type=float, help="rows an expert takes (no token is dropped)")
    add = parser.add_argument_group("output").add_argument
    add("--checkpoint-every", type=int, default=100, help="steps (%(default)s)")
    add("--keep-checkpoints", type=int, default=2, help="the last ones (%(default)s)")
    add("--validate-every", type=int, default=100, help="steps (%(default)s)")
    add("--validation-batches", type=int, default=16, help="in a validation (%(default)s)")
    add("--sample-bytes", type=int, default=400, help="length of the sample (%(default)s)")
    add("--prompt", help='text to continue ("def ", or held-out text with --data)')
    add("--temperature", type=float, default=0.8, help="of the sample (%(default)s)")
    board = argparse.BooleanOptionalAction
    add("--tensorboard", action=board, default=True, help="metrics for TensorBoard (yes)")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.plan is None):
        parser.error("expected one of --out and --plan")
    others = [name for name in vars(args) if name not in BESIDE_A_PLAN]
    given = [name for name in others if getattr(args, name) != parser.get_default(name)]
    if args.plan is not None and given:
        parser.error(f"expected --plan without --{given[0].replace('_', '-')}")
    return args


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be, beside a plan too."""
    for name in POSITIVE_OPTIONS:
        if not getattr(args, name) > 0:
            option = name.replace("_", "-")
            raise UserError(f"expected --{option} to be positive, got {getattr(args, name)}")
    for name in NON_NEGATIVE_OPTIONS:
        if not getattr(args, name) >= 0:
            option = name.replace("_", "-")
            raise UserError(f"expected --{option} to be at least 0, got {getattr(args, name)}")


def check_args(args: argparse.Namespace, world_size: int) -> ModelConfig:
    """Refuse values that cannot work, before anything is read or written."""
    check_numbers(args)
    if args.prompt == "":
        raise UserError("expected --prompt to be at least one byte, got an empty string")
    if args.dp is not None and args.dp < 1:
        raise UserError(f"expected --dp to be positive, got {args.dp}")
    try:
        config = ModelConfig(
            **{
                field.name: getattr(args, field.name)
                for field in fields(ModelConfig)
                if field.name != "vocab_size"
            }
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    check_axes(args, config, world_size)
    return config


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the rate of `step`: linear warm-up, then half a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))
