"""State of torch that a call runs in: autocast, a recomputation, a move of its module."""

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
    """The dtype that autocast is casting to on this device, None outside autocast."""
    # torch raises on the meta device, which has no autocast.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def as_autocast(x: Tensor) -> Tensor:
    """Cast as autocast casts the input of a product: everything but float64."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which autocast is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS
    return torch.autocast(device.type, enabled=False)


@dataclass(frozen=True)
class TorchState:
    """State that a second forward pass needs: that of autocast and of the generators.

    Attributes:
        device: of the pass.
        autocast: see `autocast_dtype`.
        generator: state of the CPU's; None where nothing is drawn.
        device_generator: state of the device's, if it has one and anything is drawn.
    """

    device: torch.device
    autocast: torch.dtype | None
    generator: Tensor | None
    device_generator: Tensor | None

    @staticmethod
    def now(device: torch.device, *, draws: bool = True) -> TorchState:
        """The state before the first pass; reading that of a device's generator synchronises."""
        of_device = draws and streams.has_streams(device)
        return TorchState(
            device,
            autocast_dtype(device),
            torch.get_rng_state() if draws else None,
            torch.cuda.get_rng_state(device) if of_device else None,
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The state for the second pass, with gradients."""
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
    """True if this thread runs a backward pass: a forward pass inside one is a recomputation."""
    # NOTE: The only private state of autograd that the layers ask.
    return bool(torch._C._current_graph_task_id() != -1)


def has_hooks(module: nn.Module) -> bool:
    """True if hooks see what goes into a call of this module, or what comes out, either way."""
    of_all = torch.nn.modules.module
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or of_all._has_any_global_hook()
    )


def moved(tensor: Tensor, fn: Callable[..., Any]) -> Tensor:
    """A tensor that is no buffer, on the device to which `fn` of `nn.Module._apply` moves it."""
    device = fn(tensor).device
    if device == tensor.device:
        return tensor
    if tensor.is_meta or device.type == "meta":
        return torch.zeros_like(tensor, device=device)
    return tensor.to(device)
