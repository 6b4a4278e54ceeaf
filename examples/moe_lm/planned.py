"""A model of transformers in the placement of a plan, trained on the bytes of the text.

Shape suffixes: B sequences, S bytes in a sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ext
from moe_ext.planner import Plan

from .data import DataError, load_text, train_batch
from .options import check_numbers, learning_rate
from .runtime import Runtime, UserError, agree

# Seconds between lines of progress.
EVERY = 2.0


def read_plan(args: argparse.Namespace, world_size: int) -> Plan:
    """Return the plan, if it is one of as many ranks as there are and of a model for bytes."""
    check_numbers(args)
    try:
        plan = Plan.from_json(args.plan)
    except (OSError, ValueError) as error:
        raise UserError(f"--plan: {error}") from error
    for name, size, fits in (
        (f"{world_size} ranks, which torchrun started", plan.job.num_ranks, world_size),
        ("a vocabulary of 256 bytes or more", plan.model.vocab_size, None),
    ):
        if size != fits if fits else size < 256:
            raise UserError(f"expected --plan to be of {name}, got {size}")
    return plan


def make_model(plan: Plan) -> torch.nn.Module:
    """Return a Mixtral of the plan's sizes; without experts a Llama."""
    import transformers

    sizes, job = plan.model, plan.job
    options: dict[str, Any] = {
        "hidden_size": sizes.model_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads or sizes.num_heads,
        "head_dim": sizes.head_dim or sizes.model_dim // sizes.num_heads,
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": sizes.tied,
        "max_position_embeddings": job.seq_len,
        "use_cache": False,
    }
    if not sizes.num_experts:
        width = sizes.dense_ffn_dim or sizes.ffn_dim
        config = transformers.LlamaConfig(intermediate_size=width, **options)
        return transformers.LlamaForCausalLM(config)
    config = transformers.MixtralConfig(
        intermediate_size=sizes.ffn_dim,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        sliding_window=sizes.window or None,
        **options,
    )
    return transformers.MixtralForCausalLM(config)


def run_micro_batches(applied: Any, batches: Sequence[Tensor]) -> list[Tensor]:
    """Run forward and backward passes; return the losses, none where another stage has them."""
    if applied.pipeline is not None:
        ends = 0, applied.pipeline.table.num_stages - 1
        inputs, targets = (batches if end in applied.pipeline.stages else () for end in ends)
        return applied.pipeline.step(inputs, targets)
    losses = []
    for number, ids_BS in enumerate(batches):
        if applied.plan.choice["zero"] in (2, 3):
            applied.model.set_requires_gradient_sync(number == len(batches) - 1)
        loss = applied.model(input_ids=ids_BS, labels=ids_BS).loss
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def mean_over_ranks(losses: Sequence[Tensor], device: torch.device) -> float:
    """Return the mean of the losses of all ranks that have some."""
    total = torch.tensor([sum(map(float, losses)), float(len(losses))], device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def train(args: argparse.Namespace, runtime: Runtime) -> None:
    """Train by the plan and say how long a step takes; nothing is written."""
    plan = read_plan(args, runtime.world_size)
    torch.manual_seed(args.seed)
    try:
        applied = plan.apply(make_model(plan).to(runtime.device))
    except ValueError as error:
        other = "; this example makes a Mixtral or a Llama, a script of your own any model"
        raise UserError(f"{error}{other * ('model to have' in str(error))}") from error
    data = agree(lambda: load_text(args.data, plan.job.seq_len), (DataError, OSError))
    optimizers = applied.optimizers(torch.optim.AdamW, lr=args.lr, weight_decay=args.weight_decay)
    if runtime.is_main:
        print(f"{plan.title}\n{applied.mesh}, {runtime.device_note}", flush=True)
    rounds: Any = contextlib.nullcontext()
    if plan.job.local_steps > 1:
        rounds = applied.local_steps(optimizers[0], lr=0.7, momentum=0.9, nesterov=True)
    shown, times, loss = -EVERY, [], float("nan")
    with rounds:
        for step in range(args.steps):
            started = time.perf_counter()
            ids_BS, _ = train_batch(
                data,
                step=step,
                seed=args.seed,
                batch=plan.job.global_batch,
                seq_len=plan.job.seq_len,
                rank=applied.mesh.data_rank,
                world_size=applied.mesh.data_size,
            )
            batches = ids_BS.to(runtime.device).split(int(plan.choice["micro_batch"] or 1))
            losses = run_micro_batches(applied, batches)
            applied.sync_gradients()
            if plan.job.local_steps == 1:
                moe_ext.distributed.clip_grad_norm_(applied.model, args.clip, mesh=applied.mesh)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(args, step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            loss = mean_over_ranks(losses, runtime.device)
            times.append(time.perf_counter() - started)
            if runtime.is_main and (started - shown >= EVERY or step + 1 == args.steps):
                shown = started
                print(f"step {step + 1}: loss {loss:.4f}, {times[-1]:.3g} s", flush=True)
    if runtime.is_main:
        middle = sorted(times)[len(times) // 2]
        print(
            f"result: {args.steps} steps, loss {loss:.4f}, {middle:.3g} s a step, for which the "
            f"plan says {plan.seconds:.3g} s"
        )
