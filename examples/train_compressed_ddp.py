r"""Train a small mixture-of-experts language model whose ranks send compressed gradients.

    torchrun --standalone --nproc-per-node 2 examples/train_compressed_ddp.py --compression int8
    torchrun --standalone --nproc-per-node 2 examples/train_compressed_ddp.py --compare
    torchrun --standalone --nproc-per-node 2 examples/train_compressed_ddp.py \
        --compare none topk:0.05 topk:0.01 onebit

A small model as in train_moe_lm.py, data parallel over all ranks, on CPU over Gloo. With
--compression, a rank sends in a step:
    none      float32 gradients, as DistributedDataParallel sends them
    bf16      gradients rounded to bfloat16
    int8      8 bits an element and a scale for each 256; int4: 4 bits
    topk      the largest --density of the gradients; the rest waits in a residual
    onebit    1-bit Adam: dense gradients for --dense-steps, then signs of the momentum. Signs of
              the gradient under Adam would not converge, so this is an optimizer and not a codec
    auto      for each bucket the codec that the cost model finds cheapest on this network

A table follows: validation loss; time and bytes of a step after the warm-up, as counted and as
written to sockets; their ratio to dense float32; MB of the whole run. For auto it also has the
choice and its reason. On one machine the network is as fast as memory, and compression costs
more than it saves: look at the bytes, and at the loss beside them.

The folder --out receives loss_and_bytes.png and result.json.

Output: a progress bar for each way, then the table. The last line has the way that sends least.
"""

from __future__ import annotations

import argparse
import sys

import torch
from compressed_ddp import report
from compressed_ddp.report import Run
from compressed_ddp.settings import Setting, check_args, parse_args, settings_of
from compressed_ddp.training import Job, train
from moe_lm.data import DataError, load_text, unigram_entropy
from moe_lm.job import require_same_data
from moe_lm.model import count_parameters
from moe_lm.runtime import Runtime, agree, from_main, make_folder, run_and_exit, run_example
from tqdm import tqdm


def build_job(args: argparse.Namespace, runtime: Runtime) -> Job:
    """Check the options and read the data; writes nothing."""
    config = check_args(args, runtime.world_size)
    data = agree(lambda: load_text(args.data, config.seq_len), (DataError, OSError))
    expected = from_main(lambda: data.sha256, ())
    agree(lambda: require_same_data(data, expected, runtime.rank), DataError)
    return Job(args, runtime, config, data)


def say(job: Job, text: str) -> None:
    """Print on rank 0, above the progress bar."""
    if job.runtime.is_main:
        tqdm.write(text)
        sys.stdout.flush()


def describe(job: Job) -> float:
    """Print what will be trained; return the bytes that a dense step sends from a rank."""
    total, _ = count_parameters(job.build_model())
    ranks = job.runtime.world_size
    dense_bytes = 2 * (ranks - 1) / ranks * 4 * total
    say(
        job,
        f"ranks       {ranks}, {torch.get_num_threads()} threads each\n"
        f"data        {job.data.describe()}\n"
        f"model       {total / 1e6:.2f} M parameters, {job.config.num_layers} layers of "
        f"{job.config.num_experts} experts, top {job.config.top_k}\n"
        f"training    {job.args.steps} steps of {job.args.batch} x {job.config.seq_len} bytes\n"
        f"gradients   {dense_bytes / 1e3:.1f} kB leave a rank in a dense step\n"
        f"loss of a model without context: {unigram_entropy(job.data.validation_N):.3f}",
    )
    return dense_bytes


def run_setting(job: Job, setting: Setting) -> Run:
    """Train one setting with a progress bar."""
    interval = 0.5 if sys.stderr.isatty() else 15  # a log file gets a line now and then
    bar = tqdm(
        total=job.args.steps,
        desc=setting.label,
        unit="step",
        disable=not job.runtime.is_main,
        mininterval=interval,
    )

    def progress(run: Run) -> None:
        bar.set_postfix_str(
            f"loss {run.losses[-1]:.3f}, {1e3 * run.seconds[-1]:.0f} ms, "
            f"{run.sent_bytes[-1] / 1e3:.0f} kB",
            refresh=False,
        )
        bar.update()

    run, explanation = train(job, setting, progress)
    bar.close()
    if setting.name == "auto":
        say(job, explanation)
    return run


def write(job: Job, runs: list[Run], dense_bytes: float) -> None:
    """On rank 0: the table, result.json and the picture."""
    say(job, report.table(runs, dense_bytes))
    least = min(runs, key=lambda run: run.bytes_a_step)
    result = (
        f"result: {least.setting} sends least, {least.bytes_a_step / 1e3:.1f} kB a step, "
        f"validation loss {least.validation[-1].loss:.4f}"
    )
    out = job.args.out
    report.write_json(runs, dense_bytes, out / "result.json")
    picture = out / "loss_and_bytes.png"
    title = f"{job.runtime.world_size} ranks, {job.args.steps} steps"
    try:
        report.draw(runs, title, picture)
    except ImportError as error:
        say(job, f"no picture: {error}\n{result}")
        return
    say(job, f"wrote {picture}\n{result}")


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Run every setting, then report."""
    job = build_job(args, runtime)
    make_folder(args.out)
    dense_bytes = describe(job)
    runs = [run_setting(job, setting) for setting in settings_of(args)]
    from_main(lambda: write(job, runs, dense_bytes), OSError)


def main(argv: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    args = parse_args(argv, __doc__ or "")
    args.device = "cpu"
    return run_example(work, args)


if __name__ == "__main__":
    run_and_exit(main)
