"""Train a mixture-of-experts language model on text, one byte at a time.

    torchrun --standalone --nproc-per-node 2 examples/train_moe_lm.py --out runs/demo
    torchrun --standalone --nproc-per-node 4 examples/train_moe_lm.py --out runs/books --data books/
    python examples/train_moe_lm.py --out runs/one          # one process, without torchrun

Without --data the text is the source code of the Python standard library. Gloo is used on CPU,
NCCL on GPUs. Of P ranks, groups of --ep ranks share one set of experts (expert parallelism);
these P / ep groups are data parallel, and so are all ranks for everything else. --tp, --cp,
--pp, --etp and --zero divide attention, sequences, layers, experts and states as well:

    torchrun --standalone --nproc-per-node 4 examples/train_moe_lm.py --out runs/stages \
        --pp 2 --schedule zbv --micro-batches 4 --ep 2 --compress int8
    torchrun --standalone --nproc-per-node 4 examples/train_moe_lm.py --out runs/zero \
        --zero 3 --cp 2 --ep 2 --dispatcher dedup --checkpointing selective

With a plan of `python -m moe_ext plan`, the script trains the plan's model of transformers in the
plan's placement, prints how long a step takes, and writes nothing:

    torchrun --standalone --nproc-per-node 4 examples/train_moe_lm.py --plan plan.json --steps 20

The folder --out receives
    checkpoints/      the last --keep-checkpoints checkpoints (torch.distributed.checkpoint)
    metrics.jsonl     a line a step, and a line a validation; tensorboard/ holds the same
    loss.png          training and validation loss; expert_load.png: load by layer and step
    sample.txt        text the model wrote; result.json: the final numbers

Output: sizes of the job, a progress bar, the sample. The last line has the validation loss.

The same command continues where the last checkpoint left off, also with another number of ranks
or another --ep; it prints the result again when there is nothing left to train. The model, the
data, --batch and --seed must stay the same, other options may change. A checkpoint
appears whole or not at all, so a job killed at any moment loses only the steps since the last one
(`torchrun --max-restarts 3` restarts by itself). SIGTERM or Ctrl-C saves after the current step;
every rank then exits with 0 (torchrun itself reports a signal that it received with 1).
Only tensors and JSON are read from a checkpoint: no pickled code is run.

The balance loss is that of each rank's own tokens, as usual in data parallel training. With
--balance-loss-coef 0 the losses are the same on any number of ranks up to rounding.

Shape suffixes: B sequences, S bytes in a sequence, L MoE layers, E experts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_lm import checkpoint as ckpt
from moe_lm import planned, report
from moe_lm.data import train_batch, unigram_entropy
from moe_lm.job import Job, build_job, describe, lock_existing_out, prepare_out
from moe_lm.model import sample
from moe_lm.options import learning_rate, parse_args
from moe_lm.runtime import (
    FolderLock,
    StopSignal,
    UserError,
    agree,
    from_main,
    run_and_exit,
    run_example,
)
from moe_lm.validation import sum_over_ranks, validation_loss
from tqdm import tqdm

import moe_ext

NATS_TO_BITS = 1 / math.log(2)


def resume(job: Job) -> int:
    """Load the newest checkpoint, if any; return the number of steps already done."""
    found = ckpt.latest(job.checkpoints)
    if found is None:
        return 0
    ckpt.check_settings(found, job.settings)
    tensors = ckpt.empty_tensors(found, job.state.empty)
    ckpt.load(found, tensors)
    job.state.load_state_dict(tensors)
    job.say(f"resume      from step {found.step}: {found.path}")
    return found.step


def train_step(job: Job, step: int, signals: StopSignal) -> dict[str, Any]:
    """Take one optimizer step; return the metrics of the whole batch and the agreed stop flag."""
    started = time.perf_counter()
    rate = learning_rate(job.args, step)
    for optimizer in job.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    rank, size = job.share
    inputs_BS, targets_BS = train_batch(
        job.data,
        step=step,
        seed=job.args.seed,
        batch=job.args.batch,
        seq_len=job.config.seq_len,
        rank=rank,
        world_size=size,
    )
    loss = job.runner.train(inputs_BS, targets_BS)
    if job.args.zero < 2:  # FSDP2 reduces in the backward pass
        moe_ext.distributed.sync_gradients(job.model, mesh=job.mesh)
    norm = float(moe_ext.distributed.clip_grad_norm_(job.model, job.args.clip, mesh=job.mesh))
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient norm of step {step + 1} is {norm}: training diverged. The last "
            "checkpoint is from before; continue from it with a lower --lr"
        )
    for optimizer in job.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss_value, balance, stop, load_LE = reduce_metrics(job, loss, signals.received)
    imbalance_L = load_LE.max(dim=1).values / load_LE.mean(dim=1)
    return {
        "step": step + 1,
        "loss": loss_value,
        "learning_rate": rate,
        "grad_norm": norm,
        "balance_loss": balance,
        "load_imbalance": float(imbalance_L.mean()),
        "tokens_per_second": job.args.batch * job.config.seq_len / (time.perf_counter() - started),
        "expert_load": load_LE.long().tolist(),
        "stop": stop,
    }


def reduce_metrics(
    job: Job, loss: torch.Tensor, wants_stop: bool
) -> tuple[float, float, bool, torch.Tensor]:
    """Sum the metrics over ranks in one message, which also carries the wish to stop.

    All ranks then stop after the same step, whichever rank received the signal.
    """
    counts_LE = job.runner.expert_counts().to(loss.device)
    found = [layer.metrics["balance_loss"].double() for layer in job.model.moe_layers()]
    balance = sum(found, torch.zeros_like(loss, dtype=torch.float64)) / len(counts_LE)
    stop = torch.tensor(float(wants_stop), device=loss.device)
    packed = torch.cat([torch.stack([loss.double(), balance, stop.double()]), counts_LE.flatten()])
    sum_over_ranks(packed, "metrics")
    packed = packed.cpu()
    ranks = job.runtime.world_size / job.mesh.pp_size
    return (
        float(packed[0]) / ranks,
        float(packed[1]) / ranks,
        bool(packed[2] > 0),
        packed[3:].view(counts_LE.shape),
    )


def train(job: Job, first_step: int, signals: StopSignal) -> int:
    """Train from `first_step` to the end or to a signal; return the number of steps done."""
    args, main = job.args, job.runtime.is_main
    log = None
    if main:
        log = report.MetricsLog(args.out, first_step=first_step, tensorboard=args.tensorboard)
    interval = 0.5 if sys.stderr.isatty() else 15  # a log file gets a line now and then
    bar = tqdm(
        total=args.steps, initial=first_step, unit="step", disable=not main, mininterval=interval
    )
    done = first_step
    stop = False
    while done < args.steps and not stop:
        metrics = train_step(job, done, signals)
        done += 1
        stop = metrics.pop("stop")
        last = done == args.steps
        records = [metrics]
        if last or done % args.validate_every == 0:
            loss = validation_loss(job, job.model, job.runner.loss, job.share)
            records.append({"step": done, "validation_loss": loss})
            job.say(f"step {done}: validation loss {records[-1]['validation_loss']:.4f}")
        if log is not None:
            for record in records:
                log.write(record)
            bar.set_postfix_str(
                f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:.0f} bytes/s, "
                f"imbalance {metrics['load_imbalance']:.2f}",
                refresh=False,
            )
            bar.update()
        if last or stop or done % args.checkpoint_every == 0:
            if log is not None:
                log.sync()
            ckpt.save(
                job.checkpoints,
                job.state.state_dict(),
                step=done,
                settings=job.settings,
                keep=args.keep_checkpoints,
            )
    bar.close()
    if log is not None:
        log.close()
    return done


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file in one step."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def printable(text: bytes) -> str:
    """Return `text` for the terminal: sampled control bytes must not steer it."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = (
        char if char.isprintable() or char in "\n\t" else "?"
        for char in text.decode("utf-8", "replace")
    )
    return "".join(shown).encode(encoding, "replace").decode(encoding)


def finish(job: Job, step: int) -> None:
    """Validate, write a sample, draw the pictures and print the result."""
    args = job.args
    job.say(f"step {step}: validates, then writes a sample of {args.sample_bytes} bytes")
    loss = validation_loss(job, job.model, job.runner.loss, job.share)
    entropy = unigram_entropy(job.data.validation_N)
    prompt = b"def " if args.data is None else bytes(job.data.validation_N[:32].tolist())
    if args.prompt is not None:
        prompt = args.prompt.encode("utf-8", "surrogateescape")
    job.model.eval()
    text = sample(
        job.runner.logits,
        prompt,
        num_bytes=args.sample_bytes,
        seed=args.seed,
        temperature=args.temperature,
        seq_len=job.config.seq_len,
        device=job.runtime.device,
    )

    def write() -> None:
        if not job.runtime.is_main:
            return
        records = report.read_metrics(args.out / report.METRICS)
        report.plot_loss(records, entropy, args.out / "loss.png")
        report.plot_expert_load(records, args.out / "expert_load.png")
        write_atomically(args.out / "sample.txt", text)
        result = {"step": step, "validation_loss": loss, "unigram_entropy": entropy}
        write_atomically(args.out / "result.json", json.dumps(result).encode())

    agree(write, OSError)
    job.say(
        f"----- sample\n{printable(text)}\n-----\n"
        f"wrote loss.png, expert_load.png, sample.txt, metrics.jsonl to {args.out}\n"
        f"result: step {step}, validation loss {loss:.4f} nats/byte "
        f"({loss * NATS_TO_BITS:.3f} bits/byte), unigram entropy {entropy:.4f} nats/byte "
        f"({entropy * NATS_TO_BITS:.3f} bits/byte)"
    )


def run(job: Job) -> None:
    """Do the whole job; nothing in --out changes before the input has been found good."""
    describe(job)
    from_main(lambda: lock_existing_out(job), (UserError, OSError))
    first_step = resume(job)
    from_main(lambda: prepare_out(job), (UserError, OSError))
    with StopSignal() as stop:
        done = train(job, first_step, stop) if first_step < job.args.steps else first_step
    if done < job.args.steps:
        job.say(f"stopped by a signal after step {done}: the same command resumes there")
        return
    finish(job, done)


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    args = parse_args(argv, __doc__ or "")
    if args.plan is not None:
        return run_example(planned.train, args)
    lock = FolderLock()
    try:
        return run_example(lambda args, runtime: run(build_job(args, runtime, lock)), args)
    except Exception:
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(
            f"rank {rank} failed; the same command resumes from the last checkpoint:",
            file=sys.stderr,
        )
        raise
    finally:
        lock.release()


if __name__ == "__main__":
    run_and_exit(main)
