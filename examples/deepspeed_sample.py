"""DeepSpeed's sample of a mixture of experts, a small conv net, on moe_ext.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_sample.py --ep-size 2
    torchrun --standalone --nproc-per-node 4 examples/deepspeed_sample.py --ep-size 2 --top-k 1
    python examples/deepspeed_sample.py --mlp-type residual --dtype bf16

The net of the CIFAR-10 tutorials, with an MoE layer before its last layer, learns the digits of
scikit-learn. It trains by Adam with warm-up and clipping, in float32, bfloat16, or float16 with a
dynamic loss scale. With the default options the held-out accuracy is above 0.9 in each dtype.

Output: loss and tokens of each expert every 20 steps. The last line has the held-out accuracy.

Shape suffixes: B images.
"""

from __future__ import annotations

import argparse
import contextlib
import math

import digits
import torch
import torch.nn.functional as F
from moe_lm.runtime import Runtime, UserError, run_and_exit
from torch import Tensor, nn

import moe_ext
from moe_ext.integrations import deepspeed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HIDDEN = 84


class Net(nn.Module):
    """Two convolutions, a linear layer, a mixture of experts, and the classifier."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, HIDDEN)
        self.moe = deepspeed.MoE(
            hidden_size=HIDDEN,
            expert=nn.Linear(HIDDEN, HIDDEN),
            num_experts=args.num_experts,
            ep_size=args.ep_size,
            use_residual=args.mlp_type == "residual",
            k=args.top_k,
            capacity_factor=1.25,
            eval_capacity_factor=2.0,
            min_capacity=args.min_capacity,
            noisy_gate_policy=args.noisy_gate_policy,
        )
        self.classify = nn.Linear(HIDDEN, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images `[B, 1, 8, 8]` to logits `[B, 10]` and the balance loss."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x, l_aux, _ = self.moe(x)
        return self.classify(x), l_aux


class LossScale:
    """Factor on the loss for float16: halved after an overflow, doubled after calm steps.

    All ranks judge by the norm of the whole model, so they skip the same steps.
    """

    def __init__(self, enabled: bool, calm: int = 50) -> None:
        self.value = 2.0**16 if enabled else 1.0
        self._enabled, self._calm, self._good = enabled, calm, 0

    def accept(self, norm: Tensor) -> bool:
        """Update the scale; True if the step is to be taken."""
        # NOTE: device-to-host sync, as whether to step is decided on the host.
        if math.isfinite(norm.item()):
            self._good += 1
            if self._enabled and self._good % self._calm == 0:
                self.value *= 2
            return True
        if not self._enabled:
            raise UserError("the gradients are not finite: try a lower --lr")
        self._good = 0
        self.value /= 2
        return False


def train_step(
    model: Net, images: Tensor, labels: Tensor, scale: LossScale, args: argparse.Namespace
) -> tuple[Tensor, bool]:
    """Compute the gradients of one step; return the loss, and whether to take the step."""
    dtype = DTYPES[args.dtype]
    cast = contextlib.nullcontext()
    if dtype != torch.float32:
        cast = torch.autocast(images.device.type, dtype=dtype)
    model.zero_grad()
    with cast:
        logits, l_aux = model(images)
        loss = F.cross_entropy(logits.float(), labels)
    ((loss + args.moe_loss_coef * l_aux) * scale.value).backward()
    moe_ext.distributed.sync_gradients(model)
    # The norm of the scaled gradients, so the bound is scaled too.
    norm = moe_ext.distributed.clip_grad_norm_(model, scale.value)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale.value)
    return loss.detach(), scale.accept(norm)


def work(args: argparse.Namespace, runtime: Runtime) -> None:
    """Train, and print the held-out accuracy."""
    data = digits.load(runtime.device, args.seed)
    torch.manual_seed(args.seed)
    try:
        model = Net(args).to(runtime.device)
    except ValueError as error:
        raise UserError(str(error)) from error
    # Every rank has its own experts and its own noise.
    torch.manual_seed(args.seed + 1 + runtime.rank)
    groups = deepspeed.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    optimizer = torch.optim.Adam(groups, lr=args.lr)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / args.warmup)
    )
    scale = LossScale(args.dtype == "fp16")
    skipped = 0
    for step in range(args.steps):
        images, labels = data.batch(step, args.batch, runtime, args.seed)
        loss, usable = train_step(model, images, labels, scale, args)
        if usable:
            optimizer.step()
            warm_up.step()
        skipped += not usable
        if runtime.is_main and (step % args.log_every == 0 or step == args.steps - 1):
            counts = model.moe.metrics["num_tokens_per_expert"].tolist()
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  load {counts}", flush=True)
    found = digits.accuracy(model, data, runtime)
    if runtime.is_main:
        print(
            f"result: held-out accuracy {found:.4f} after {args.steps} steps, {skipped} of them "
            "skipped",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Parse the options and run."""
    parser = digits.options(__doc__)
    parser.add_argument("--num-experts", type=int, default=4, help="over all ranks (%(default)s)")
    parser.add_argument(
        "--ep-size", type=int, default=1, help="ranks that share the experts (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (%(default)s)")
    parser.add_argument(
        "--mlp-type",
        choices=("standard", "residual"),
        default="standard",
        help="residual: a dense network beside the experts (%(default)s)",
    )
    parser.add_argument(
        "--min-capacity", type=int, default=4, help="rows of an expert at least (%(default)s)"
    )
    parser.add_argument(
        "--noisy-gate-policy", choices=("Jitter", "RSample"), help="of the router (none)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="fp32", help="of the model (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate (%(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=10, help="steps until the full --lr (%(default)s)"
    )
    parser.add_argument(
        "--moe-loss-coef", type=float, default=0.01, help="factor on the balance loss (%(default)s)"
    )
    parser.set_defaults(steps=300, batch=128, log_every=50)
    return digits.run(work, parser.parse_args(argv))


if __name__ == "__main__":
    run_and_exit(main)
