"""State of torch around a call: autocast, random generators, recomputation, hooks, devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.comm import streams

_AS_IT_IS = contextlib.nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts on this device, or None outside autocast."""
    # `is_autocast_enabled` raises for the meta device, which has no autocast.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def as_autocast(x: Tensor) -> Tensor:
    """Cast x as autocast casts the input of a matrix product: every dtype except float64."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS
    return torch.autocast(device.type, enabled=False)


@dataclass(frozen=True)
class TorchState:
    """State of autocast and of the generators, for a forward pass that runs again.

    Attributes:
        device: device of the pass.
        autocast: see `autocast_dtype`.
        generator: state of the CPU's generator; None if the pass draws nothing.
        device_generator: state of the device's generator; None if it has none, or if the pass draws
            nothing.
    """

    device: torch.device
    autocast: torch.dtype | None
    generator: Tensor | None
    device_generator: Tensor | None

    @staticmethod
    def now(device: torch.device, *, draws: bool = True) -> TorchState:
        """Return the current state. Reading the state of a CUDA generator synchronises."""
        of_device = draws and streams.has_streams(device)
        return TorchState(
            device,
            autocast_dtype(device),
            torch.get_rng_state() if draws else None,
            torch.cuda.get_rng_state(device) if of_device else None,
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context for the second pass, which records gradients."""
        with contextlib.ExitStack() as stack:
            if self.generator is not None:
                devices = [] if self.device_generator is None else [self.device]
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self.generator)
            if self.device_generator is not None:
                torch.cuda.set_rng_state(self.device_generator, self.device)
            stack.enter_context(torch.enable_grad())
            kind, dtype = self.device.type, self.autocast
            if kind != "meta":
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            yield


def in_backward() -> bool:
    """Return True in a thread that runs a backward pass; a forward pass then is a recomputation."""
    # NOTE: This is the only private state of autograd that the layers read.
    return bool(torch._C._current_graph_task_id() != -1)


def has_hooks(module: nn.Module) -> bool:
    """Return True if forward or backward hooks are called for this module."""
    of_all = torch.nn.modules.module
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or of_all._has_any_global_hook()
    )


def moved(tensor: Tensor, fn: Callable[..., Any]) -> Tensor:
    """Move a tensor that is not a buffer to the device to which `fn` of `_apply` moves it."""
    device = fn(tensor).device
    if device == tensor.device:
        return tensor
    if tensor.is_meta or device.type == "meta":
        return torch.zeros_like(tensor, device=device)
    return tensor.to(device)
