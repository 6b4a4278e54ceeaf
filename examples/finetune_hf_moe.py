"""Fine-tune a mixture-of-experts model of Hugging Face transformers with moe_ext's experts.

    torchrun --standalone --nproc-per-node 2 examples/finetune_hf_moe.py --ep 2 --out runs/tuned
    python examples/finetune_hf_moe.py --model runs/tuned --out runs/more

Three lines make the difference: `moe_ext.verify` compares the replaced model with the original on a
batch, `moe_ext.replace` replaces it in place, and `save_pretrained` on every rank writes all
experts. Without --model a small Mixtral or Qwen3-MoE is built from its config. The text is read
byte by byte (by default the Python standard library), so a model needs a vocabulary of 256 at
least.

Output: the comparison with the original, then loss and gradient norm now and then. The last line
has the held-out loss before and after.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_text import TextTask, add_common_options, check, import_transformers
from moe_lm.runtime import Runtime, UserError, agree, make_folder, run_and_exit, run_example

import moe_ext

NUM_EXPERTS = 8
CONFIGS = {
    "mixtral": ("Mixtral", {"num_local_experts": NUM_EXPERTS, "intermediate_size": 96}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": NUM_EXPERTS,
            "moe_intermediate_size": 96,
            "intermediate_size": 256,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
}


def build(args: argparse.Namespace) -> Any:
    """The model: of --model, or from a config with weights drawn from --seed."""
    transformers = import_transformers()
    if args.model is not None:
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(args.model)
        except (OSError, ValueError) as error:
            raise UserError(
                f"expected --model to be a folder of save_pretrained: {error}"
            ) from error
    prefix, options = CONFIGS[args.family]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        router_aux_loss_coef=0.01,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    transformers.set_seed(args.seed)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Verify, replace, train, save."""
    check(args, runtime.world_size, NUM_EXPERTS if args.model is None else args.ep)
    task = TextTask(args, runtime)
    model = agree(lambda: build(args), UserError).to(runtime.device)
    mesh = moe_ext.distributed.MoEMesh(dp=runtime.world_size // args.ep, ep=args.ep)
    if runtime.is_main:
        print(f"{task.data.describe()}; {model.num_parameters() / 1e6:.2f} M parameters")
        moe_ext.verify(model, task.batch(0))

    def replace() -> int:
        return moe_ext.replace(model, ep_group=mesh.ep_group if args.ep > 1 else None)

    task.say(f"{agree(replace, ValueError)} blocks run on moe_ext, {mesh}")
    make_folder(args.out)
    before = task.validate(model)
    # The auxiliary loss is transformers' own, in the loss it returns.
    task.train(model, "fine-tuning", output_router_logits=True)
    after = task.validate(model)
    if args.out is not None:
        # Every rank takes part; the first one writes.
        model.save_pretrained(args.out, is_main_process=runtime.is_main)
        task.say(f"wrote {args.out}")
        task.draw(args.out, "Fine-tuning")
    task.say(f"result: held-out loss {before:.4f} before, {after:.4f} after")


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser, steps=100)
    parser.add_argument("--model", help="folder of save_pretrained (a new model by default)")
    parser.add_argument(
        "--family", default="mixtral", choices=sorted(CONFIGS), help="of a new model (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for save_pretrained and loss.png")
    return run_example(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
