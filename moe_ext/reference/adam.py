"""Adam's step in plain PyTorch."""

import torch
from torch import Tensor


def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: float = 1.0,
    copy: Tensor | None = None,
    follow_copy: bool = False,
) -> None:
    """Same as `moe_ext.ops.adam_step_`."""
    if copy is not None and follow_copy:
        written = copy.to(param.dtype).view_as(param)
        param.copy_(torch.where(param.to(copy.dtype).to(param.dtype) == written, param, written))
    g = grad.to(param.dtype).view_as(param) * grad_scale
    exp_avg.add_(g - exp_avg, alpha=1 - betas[0])
    exp_avg_sq.mul_(betas[1]).add_(g * g, alpha=1 - betas[1])
    root = torch.sqrt(exp_avg_sq / (1 - betas[1] ** step))
    param.mul_(1 - lr * weight_decay)
    param.sub_(exp_avg / (root + eps), alpha=lr / (1 - betas[0] ** step))
    if copy is not None:
        copy.copy_(param.view_as(copy))
