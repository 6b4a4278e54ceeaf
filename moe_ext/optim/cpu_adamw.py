"""AdamW with state and arithmetic on the CPU, for parameters on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from moe_ext._compile import outside_graphs
from moe_ext.distributed.dtensor import is_dtensor, local_part
from moe_ext.distributed.state_dict import take_states
from moe_ext.ops import adam_step_
from moe_ext.optim._arguments import (
    CheckedOptimizer,
    Trained,
    check_betas,
    check_positive,
    loading,
    loss_of,
    options_in,
)
from moe_ext.optim._saved_states import by_name

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CPUAdamW(CheckedOptimizer):
    r"""AdamW by `moe_ext.ops.adam_step_`, with moments and arithmetic on the CPU (ZeRO-Offload).

    Float32 parameters on the CPU are changed in place. For 16-bit parameters and parameters on a
    device, the state keeps a float32 `master` on the CPU, which takes the step. The parameter is
    the rounded copy of its master, and on the CPU the same pass writes both. Gradients are copied
    to the CPU in their own dtype. For a bfloat16 parameter on a device a step moves 4 bytes per
    element over the bus. In exchange the device saves 12 bytes per element of master and moments.

    A parameter may be written between steps, by `load_state_dict` or with averaged weights. Each
    element that is no longer the rounded copy of its master then replaces the master's element. On
    a device this is checked only if the parameter's version counter has changed. Writes to `.data`
    and by torch's collectives do not change the counter.

    Parameters on the CPU may be DTensors, such as those of FSDP2 with `CPUOffloadPolicy`. The step
    of an element does not depend on other elements, so shards take the steps of whole tensors.

    Args:
        params: parameters, or groups of them.
        lr: :math:`\gamma`.
        betas: decay of the two moments.
        eps: :math:`\epsilon`, added outside of the root.
        weight_decay: :math:`\lambda`, decoupled from the moments.

    Raises:
        ValueError: an option is out of range, or a parameter is strided or of another dtype than
            float32, bfloat16 or float16.
        TypeError: in `step`: a gradient is not dense.

    Reference: Ren et al., ZeRO-Offload, 2021 (arXiv 2101.06840).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        # Version counters of parameters on a device after the last step.
        self._versions: dict[Tensor, int] = {}
        super().__init__(params, options_in(locals()))

    def _problem_of(self, parameter: Tensor, group: dict[str, Any], name: str) -> str | None:
        if is_dtensor(parameter) and not parameter.is_cpu:
            return (
                "expected DTensors to be on the CPU, as fully_shard(..., "
                f"offload_policy=CPUOffloadPolicy()) keeps them, got {parameter.device} for {name}"
            )
        if parameter.dtype not in _DTYPES or not local_part(parameter).is_contiguous():
            return (
                "expected parameters to be contiguous in float32, bfloat16 or float16, got "
                f"{parameter.dtype} of strides {local_part(parameter).stride()} for {name}"
            )
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions = {}

    @loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, also of torch's AdamW; tensors become float32 on the CPU."""

        def kept(parameter: Tensor, group: dict[str, Any], name: str, value: Any) -> Tensor:
            return torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)

        saved = by_name(self._op, self.param_groups, state_dict)
        self._load_uncast(take_states(self, saved), kept)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive(self._op, group, "lr", "eps", "weight_decay")
        check_betas(self._op, group["betas"])

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scale: factor on all gradients, such as that of clipping. It saves a pass over the
                gradients.

        Returns:
            The loss that the closure returned; None without a closure.
        """
        loss = loss_of(closure)
        for entry in self._trained():
            self._step_one(entry, grad_scale)
        return loss

    def _step_one(self, entry: Trained, grad_scale: float) -> None:
        parameter, group, state = entry.parameter, entry.group, self.state[entry.parameter]
        in_place = parameter.is_cpu and parameter.dtype == torch.float32
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        if not in_place and "master" not in state:
            state["master"] = parameter.detach().to("cpu", torch.float32, copy=True)
        for name in _MOMENTS:
            if name not in state:
                of = parameter if in_place else state["master"]
                state[name] = torch.zeros_like(of)
        held = local_part(parameter)
        master = held if in_place else local_part(state["master"])
        rounded = parameter.is_cpu and not in_place
        if not parameter.is_cpu and self._versions.get(parameter) != parameter._version:
            written = held.cpu()
            master.copy_(torch.where(master.to(held.dtype) == written, master, written.float()))
        adam_step_(
            master,
            local_part(entry.grad).cpu().contiguous(),
            *(local_part(state[name]) for name in _MOMENTS),
            step=int(state["step"]) + 1,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=grad_scale,
            copy=held if rounded else None,
            follow_copy=rounded,
        )
        state["step"] += 1
        if not parameter.is_cpu:
            held.copy_(master)
            self._versions[parameter] = parameter._version
