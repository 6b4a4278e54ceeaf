"""Train a small dense Llama, put experts in the place of its networks, train on.

    torchrun --standalone --nproc-per-node 2 examples/upcycle.py --ep 2
    python examples/upcycle.py --method granular --granularity 2 --top-k 4

The held-out loss is the same right after the change as before it. Then the dense model and the
mixture of experts train for as many steps again, on the same batches.

Output: loss and gradient norm now and then, and the held-out loss before and after the change. The
last line has the final held-out losses of the dense model and of the mixture.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

from hf_text import TextTask, add_common_options, check, import_transformers
from moe_lm.runtime import Runtime, agree, make_folder, run_and_exit, run_example

import moe_ext


def build(args: argparse.Namespace) -> Any:
    """A dense Llama over bytes."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.set_seed(args.seed)
    return transformers.LlamaForCausalLM(config)


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Dense steps, upcycling, and steps of both."""
    check(args, runtime.world_size, args.num_experts)
    dense = build(args).to(runtime.device)
    mesh = moe_ext.distributed.MoEMesh(dp=runtime.world_size // args.ep, ep=args.ep)

    def upcycled() -> tuple[Any, int]:
        moe = copy.deepcopy(dense)
        count = moe_ext.replace_ffn(
            moe,
            every=args.every,
            num_experts=args.num_experts,
            top_k=args.top_k,
            method=args.method,
            granularity=args.granularity,
            ep_group=mesh.ep_group if args.ep > 1 else None,
        )
        return moe, count

    # Options that do not fit are refused before anything is read or trained.
    agree(upcycled, ValueError)
    task = TextTask(args, runtime)
    task.say(f"{task.data.describe()}; {dense.num_parameters() / 1e6:.2f} M parameters, {mesh}")
    make_folder(args.out)
    task.train(dense, "dense")
    before = task.validate(dense)
    moe, count = upcycled()
    after = task.validate(moe)
    task.say(
        f"{count} of {dense.config.num_hidden_layers} networks are now {args.num_experts} experts: "
        f"held-out loss {before:.6f} before, {after:.6f} after"
    )
    losses = {}
    for name, model in (("dense", dense), ("upcycled", moe)):
        task.train(model, name, first_step=args.steps)
        losses[name] = f"{task.validate(model):.4f}"
        task.say(f"{name}: held-out loss {losses[name]}")
    if args.out is not None:
        task.draw(args.out, "Dense, and experts from the same weights")
    task.say(f"result: held-out loss {losses['dense']} dense, {losses['upcycled']} upcycled")


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser, steps=150)
    parser.add_argument("--every", type=int, default=2, help="replace each n-th (%(default)s)")
    parser.add_argument("--num-experts", type=int, default=8, help="experts (%(default)s)")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token (%(default)s)")
    parser.add_argument(
        "--method",
        default="copy",
        choices=("copy", "granular"),
        help="a whole network an expert, or pieces of it (%(default)s)",
    )
    parser.add_argument("--granularity", type=int, help="pieces of a network, for granular")
    parser.add_argument("--out", type=Path, help="folder for loss.png")
    return run_example(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
