"""Adam's step on the CPU in one pass over the memory."""

import torch
from torch import Tensor

from moe_ext.ops.fakes import register_fake_like


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
    r"""Takes a step of AdamW in place, and writes a copy of the parameters in 16 bits.

    .. math::
        g = s\,grad,\quad m \leftarrow m + (1 - \beta_1)(g - m),\quad
        v \leftarrow \beta_2 v + (1 - \beta_2) g^2,\quad
        w \leftarrow (1 - \gamma\lambda) w
        - \frac{\gamma}{1 - \beta_1^t}\, \frac{m}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    Everything is computed in float32. The step is for parameters that are kept on the CPU while a
    device computes with their copy (ZeRO-Offload). For parameters on CUDA there is
    ``torch.optim.AdamW(fused=True)``.

    Args:
        param (Tensor): w, float32 on the CPU, contiguous, of any shape; changed.
        grad (Tensor): float32, bfloat16 or float16, with as many elements.
        exp_avg (Tensor): m, float32; changed.
        exp_avg_sq (Tensor): v, float32; changed.
        step: t, 1 for the first step.
        lr: :math:`\gamma`.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\epsilon`, added outside of the root.
        weight_decay: :math:`\lambda`, decoupled from the moments.
        grad_scale: s, such as that of clipping, or the inverse of a loss scale.
        copy (Tensor, optional): bfloat16 or float16, overwritten by the new w.
        follow_copy: begin the step at an element of ``copy`` where that is not the rounded w,
            because somebody has written it. If False, ``copy`` is not read.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, size or memory; nothing has changed
            then.
        ValueError: the parameters are on a GPU.

    Deterministic: the same bits for any number of threads and every instruction set.

    Reference: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021 (arXiv
    2101.06840), section 5; Loshchilov and Hutter, 2019 (arXiv 1711.05101), algorithm 2.
    """
    if param.is_cuda:
        raise ValueError(
            f"adam_step_: expected param to be on cpu, got {param.device}, for which there is "
            "torch.optim.AdamW(fused=True)"
        )
    torch.ops.moe_ext.adam_step_(
        *(param, grad, exp_avg, exp_avg_sq, copy, step, lr, *betas, eps, weight_decay, grad_scale),
        follow_copy,
    )
    written = [param, exp_avg, exp_avg_sq, *([] if copy is None else [copy])]
    torch.autograd.graph.increment_version(written)


register_fake_like("moe_ext::adam_step_")
