"""Contenders that average a bucket of gradients: ours, PyTorch's hooks, and the eager way.

Shape suffixes: N elements of the bucket, K selected ones, P ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

SHAPE = (2500, 2500)  # 25 MB of float32
DENSITY = 0.01
RANK = 4  # rank of PowerSGD
DENSE, BF16 = "dense fp32", "dense bf16"
POWERSGD = "torch's PowerSGD hook"
AUTO, AUTO_TOPK = "ours, auto", "ours, auto or top-k"

Reduce = Callable[[Tensor], Tensor]


@dataclass
class Bucket:
    """Stand-in for the bucket of DDP, since torch's own class has no constructor."""

    parameter: nn.Parameter
    grad: Tensor

    def index(self) -> int:
        """The only bucket."""
        return 0

    def is_last(self) -> bool:
        """The only bucket."""
        return True

    def buffer(self) -> Tensor:
        """The flat gradient."""
        return self.grad.view(-1)

    def set_buffer(self, buffer_N: Tensor) -> None:
        """Replace the gradient."""
        self.grad = buffer_N.view(self.grad.shape)

    def gradients(self) -> list[Tensor]:
        """The bucket as one matrix."""
        return [self.grad]

    def parameters(self) -> list[Tensor]:
        """The bucket as one matrix."""
        return [self.parameter]


def hooked(hook: Callable[[Any, Any], Any], state: Any) -> Reduce:
    """Reduce as DistributedDataParallel would, with a hook and its state."""
    parameters: dict[torch.Size, nn.Parameter] = {}

    def run(grad: Tensor) -> Tensor:
        if grad.shape not in parameters:
            parameters[grad.shape] = nn.Parameter(torch.empty(grad.shape))
        found: Tensor = hook(state, Bucket(parameters[grad.shape], grad)).wait()
        return found.view(grad.shape)

    return run


def dense(dtype: torch.dtype) -> Reduce:
    """An all-reduce in some dtype."""

    def run(grad: Tensor) -> Tensor:
        wire = grad.to(dtype).div_(dist.get_world_size())
        dist.all_reduce(wire)
        return grad.copy_(wire) if dtype != grad.dtype else wire

    return run


def torch_powersgd() -> Reduce:
    """PyTorch's hook, with error feedback and warm start as by default."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    return hooked(powerSGD_hook.powerSGD_hook, state)


def naive_topk() -> Reduce:
    """Error feedback, selection and scatter by PyTorch's operators, as papers' code has it."""
    residuals: dict[int, Tensor] = {}

    def run(grad: Tensor) -> Tensor:
        size = dist.get_world_size()
        residual_N = residuals.setdefault(grad.numel(), torch.zeros(grad.numel()))
        residual_N.add_(grad.view(-1))
        k = max(1, int(DENSITY * grad.numel()))
        indices_K = residual_N.abs().topk(k, sorted=False).indices
        values_K = residual_N[indices_K]
        residual_N[indices_K] = 0.0
        values = [torch.empty_like(values_K) for _ in range(size)]
        indices = [torch.empty(k, dtype=torch.int32) for _ in range(size)]
        dist.all_gather(values, values_K)
        dist.all_gather(indices, indices_K.int())
        out_N = torch.zeros_like(residual_N)
        for one, places in zip(values, indices, strict=True):
            out_N.index_add_(0, places, one)
        return out_N.div_(size).view_as(grad)

    return run


class Ours:
    """The hook of moe_ext, with its message of status every step."""

    def __init__(self, codec: Any, **options: Any) -> None:
        from moe_ext.compression import CompressionState, compress_hook

        self.state = CompressionState(codec=codec, density=DENSITY, **options)
        self._run = hooked(compress_hook, self.state)

    def __call__(self, grad: Tensor) -> Tensor:
        """Average the bucket once."""
        return self._run(grad)

    def explain(self) -> tuple[str, str]:
        """The table of the cost model, and the codec that it chose."""
        model = self.state.cost_model
        chosen = [] if model is None else [bucket.chosen for bucket in model.buckets.values()]
        return self.state.explain(), ", ".join(codec.name for codec in chosen if codec)


def split() -> Reduce:
    """Top-k by split and reduce."""
    from moe_ext.compression import TopK

    return Ours(TopK(DENSITY, algorithm="split"))


def gathered() -> Reduce:
    """Top-k by all-gather."""
    from moe_ext.compression import TopK

    return Ours(TopK(DENSITY, algorithm="all_gather"))


MAKERS: dict[str, Callable[[], Reduce]] = {
    DENSE: lambda: dense(torch.float32),
    BF16: lambda: dense(torch.bfloat16),
    "torch's fp16 hook": lambda: hooked(default_hooks.fp16_compress_hook, None),
    POWERSGD: torch_powersgd,
    "eager top-k": naive_topk,
    "ours, dense": lambda: Ours("none"),
    "ours, int8": lambda: Ours("int8"),
    "ours, int4": lambda: Ours("int4"),
    "ours, onebit": lambda: Ours("onebit"),
    "ours, top-k": gathered,
    "ours, top-k split": split,
    AUTO: lambda: Ours("auto"),
    AUTO_TOPK: lambda: Ours("auto", candidates=("none", "bf16", "int8", "topk")),
}


def make(name: str) -> Reduce:
    """A contender by its name."""
    return MAKERS[name]()
