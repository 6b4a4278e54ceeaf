"""The command line, and the compression that a setting stands for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from moe_lm.model import ModelConfig
from moe_lm.runtime import UserError

NAMES = ("none", "bf16", "int8", "int4", "onebit", "topk", "auto")
POSITIVE = ("steps", "batch", "lr", "timeout", "validate_every", "validation_batches")
NON_NEGATIVE = ("warmup", "dense_steps", "balance_loss_coef")
SIZES = ("model_dim", "num_layers", "num_heads", "ffn_dim", "num_experts", "top_k", "seq_len")


@dataclass(frozen=True)
class Setting:
    """A way to compress gradients; `density` is the share of elements that top-k sends."""

    name: str
    density: float

    @property
    def label(self) -> str:
        """Name in the table and the picture."""
        return f"{self.name} {100 * self.density:g} %" if self.name == "topk" else self.name

    @property
    def begins_dense(self) -> bool:
        """True if the setting begins with dense steps."""
        return self.name in ("onebit", "topk", "auto")


def parse_setting(text: str, density: float) -> Setting:
    """`NAME`, or `topk:DENSITY`."""
    name, colon, number = text.partition(":")
    if name not in NAMES:
        raise UserError(f"expected a compression to be one of {', '.join(NAMES)}, got {text!r}")
    if colon:
        if name != "topk":
            raise UserError(f"expected a density after topk alone, got {text!r}")
        try:
            density = float(number)
        except ValueError:
            raise UserError(f"expected topk:DENSITY to hold a number, got {text!r}") from None
    if not 0 < density <= 1:
        raise UserError(f"expected the density to be above 0 and at most 1, got {density}")
    return Setting(name, density)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """The settings to run, in order."""
    if args.compare is None:
        return [parse_setting(args.compression, args.density)]
    settings = [parse_setting(text, args.density) for text in args.compare or NAMES]
    labels = [setting.label for setting in settings]
    if len(set(labels)) < len(labels):
        raise UserError(f"expected --compare to name each setting once, got {', '.join(labels)}")
    return settings


def check_args(args: argparse.Namespace, world_size: int) -> ModelConfig:
    """Refuse values that cannot work, before anything is read."""
    for names, works, rule in (
        (POSITIVE, lambda value: value > 0, "positive"),
        (NON_NEGATIVE, lambda value: value >= 0, "at least 0"),
    ):
        for name in names:
            if not works(getattr(args, name)):
                option = name.replace("_", "-")
                raise UserError(f"expected --{option} to be {rule}, got {getattr(args, name)}")
    if args.batch % world_size:
        raise UserError(
            f"expected --batch to be a multiple of the number of ranks {world_size}, got "
            f"{args.batch}"
        )
    names = [setting.name for setting in settings_of(args)]
    if "onebit" in names and args.dense_steps < 1:
        raise UserError(
            f"expected --dense-steps to be at least 1 for onebit, got {args.dense_steps}: the "
            "variance that it keeps comes from them"
        )
    try:
        return ModelConfig(**{name: getattr(args, name) for name in SIZES})
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_args(argv: list[str] | None, doc: str) -> argparse.Namespace:
    """Read the command line; `doc` is a line and then the text below the list of options."""
    summary, _, details = doc.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/compressed_ddp"), help="folder (%(default)s)")
    add("--data", help="text file or folder (the Python standard library)")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--timeout", type=float, default=300, help="seconds to wait for another rank (%(default)s)")
    add = parser.add_argument_group("compression").add_argument
    add("--compression", default="auto", help=f"one of {', '.join(NAMES)} (%(default)s)")
    add(
        "--compare",
        nargs="*",
        metavar="NAME",
        help="run these one after the other from the same weights, all without a name; "
        "topk:0.05 is top-k of another density",
    )
    add("--density", type=float, default=0.01, help="that top-k sends (%(default)s)")
    add(
        "--dense-steps",
        type=int,
        default=50,
        help="steps of dense gradients before topk, onebit and auto compress (%(default)s)",
    )
    add = parser.add_argument_group("model and training").add_argument
    add("--steps", type=int, default=200, help="optimizer steps (%(default)s)")
    add("--batch", type=int, default=32, help="sequences in a step, over all ranks (%(default)s)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    add("--warmup", type=int, default=10, help="steps until it is reached (%(default)s)")
    add(
        "--balance-loss-coef",
        type=float,
        default=0.01,
        help="factor on the balance loss (%(default)s)",
    )
    add("--model-dim", type=int, default=96, help="width (%(default)s)")
    add("--num-layers", type=int, default=2, help="blocks (%(default)s)")
    add("--num-heads", type=int, default=4, help="heads of attention (%(default)s)")
    add("--ffn-dim", type=int, default=128, help="width inside a network (%(default)s)")
    add("--num-experts", type=int, default=8, help="experts of a layer (%(default)s)")
    add("--top-k", type=int, default=2, help="experts a token (%(default)s)")
    add("--seq-len", type=int, default=64, help="bytes of a sequence (%(default)s)")
    add("--validate-every", type=int, default=20, help="steps (%(default)s)")
    add("--validation-batches", type=int, default=8, help="in a validation (%(default)s)")
    return parser.parse_args(argv)
