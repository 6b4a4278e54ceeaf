"""Strategies of Lightning for models with experts spread over ranks.

::

    from moe_ext.integrations.lightning import ExpertParallel

    class Strategy(ExpertParallel, DDPStrategy):
        pass

    trainer = Trainer(strategy=Strategy(), gradient_clip_val=1.0)

`ExpertParallel` is for the Trainer, `FabricExpertParallel` for Fabric. Mix each into a
`DDPStrategy`, or a subclass of it, of `lightning` or of `pytorch_lightning` and `lightning_fabric`.
This module does not import or change these packages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import resolve_group
from moe_ext.distributed import GradScaler, clip_grad_norm_, parallelize, whole_state_dicts
from moe_ext.distributed.data_parallel import expect_backward
from moe_ext.distributed.dtensor import warn_of_mixed_groups
from moe_ext.distributed.placement import sharded_parameters

__all__ = ["ExpertParallel", "FabricExpertParallel"]

_SAVE = "save_checkpoint"


class ExpertParallel:
    """Mixin for a `DDPStrategy` of Lightning's Trainer, for models with experts over ranks.

    - The module is prepared by `moe_ext.parallelize`, also for validation without fitting.
    - `gradient_clip_val` and `self.clip_gradients` clip the gradients of all experts, by norm or by
      value.
    - `ModelCheckpoint` and `save_checkpoint` write the file of one process, which `ckpt_path=`
      loads with any number of ranks. An error of the rank that writes is raised on all ranks.
    - "16-mixed" uses a `moe_ext.distributed.GradScaler`, so that all ranks skip a step, or none.
    - `manual_backward` also averages the gradients of experts.
    - A warning names an optimizer with a group on a GPU that has both experts and other parameters.

    Tensors that a callback or `on_save_checkpoint` adds to a checkpoint must be whole. Call a
    model's `state_dict()` inside `moe_ext.distributed.whole_state_dicts()`, and an optimizer's
    inside `whole_state_dicts(optimizer)`.

    Raises:
        ValueError: on every rank, if the precision plugin has a scaler of another class.
    """

    model: Any
    lightning_module: Any
    optimizers: list[Optimizer]
    precision_plugin: Any
    root_device: torch.device

    def model_to_device(self) -> None:
        """Move the module to the device, and prepare it."""
        super().model_to_device()  # type: ignore[misc]
        # Lightning next copies rank 0's states to all ranks, for fitting and for validation.
        # `parallelize` excludes the experts, which differ between ranks.
        parallelize(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make optimizers, and warn of groups that mix experts with other parameters."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:
            warn_of_mixed_groups("ExpertParallel", optimizer)

    def setup_precision_plugin(self) -> None:
        """Make the precision plugin clip by the gradients of all ranks."""
        super().setup_precision_plugin()  # type: ignore[misc]
        plugin = self.precision_plugin
        _set_scaler(plugin, self.lightning_module)
        # The methods are set on the object. Checkpoints hold the plugin's state under the name of
        # its class, which must remain Lightning's.
        plugin.clip_grad_by_norm = functools.partial(_clip_norm, plugin)
        plugin.clip_grad_by_value = functools.partial(_clip_value, plugin)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Average experts' gradients in each backward pass of `manual_backward`, as DDP does."""
        super().pre_backward(closure_loss)  # type: ignore[misc]
        is_manual = not self.lightning_module.automatic_optimization
        if is_manual and isinstance(self.model, DistributedDataParallel):
            expect_backward(self.lightning_module, self.model, closure_loss)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole module on rank 0."""
        with whole_state_dicts():
            return super().lightning_module_state_dict()  # type: ignore[misc]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on rank 0."""
        with whole_state_dicts(optimizer):
            return super().optimizer_state(optimizer)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load this rank's parts of whole states."""
        with whole_state_dicts(*self.optimizers):
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Write on rank 0. An error of rank 0 is raised on all ranks."""
        _call_on_all(super().save_checkpoint, self.root_device, *args, **options)  # type: ignore[misc]


class FabricExpertParallel:
    """Mixin for a `DDPStrategy` of Fabric, for models with experts over ranks.

    - `fabric.setup` and `setup_module` prepare the module by `moe_ext.parallelize`.
    - `fabric.clip_gradients` clips the gradients of all experts, by norm or by value.
    - `fabric.save` writes the file of one process, which `fabric.load` reads on any number of
      ranks. An error of the rank that writes is raised on all ranks.
    - "16-mixed" uses a `moe_ext.distributed.GradScaler`, so that all ranks skip a step, or none.
    - A warning names an optimizer with a group on a GPU that has both experts and other parameters.

    Tensors that a user puts into the state must be whole: take those of
    `moe_ext.distributed.full_state_dict(model)`.

    Raises:
        ValueError: on every rank, if the precision plugin has a scaler of another class.
    """

    precision: Any
    root_device: torch.device

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare the module, and wrap it."""
        parallelize(module)
        _set_scaler(self.precision, module)
        return super().setup_module(module)  # type: ignore[misc]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer, and warn of groups that mix experts with other parameters."""
        warn_of_mixed_groups("FabricExpertParallel", optimizer)
        return super().setup_optimizer(optimizer)  # type: ignore[misc]

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        """Write whole states on rank 0. An error of rank 0 is raised on all ranks."""
        with whole_state_dicts(*_optimizers(state)):
            save = super().save_checkpoint  # type: ignore[misc]
            _call_on_all(save, self.root_device, path, state, *args, **options)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Load this rank's parts of whole states."""
        with whole_state_dicts(*_optimizers(state)):
            return super().load_checkpoint(path, state, *args, **options)  # type: ignore[misc]

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip gradients by their norm over all ranks."""
        self.precision.unscale_gradients(optimizer)
        return _clip_norm(
            self.precision, optimizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip each element of the gradients."""
        self.precision.unscale_gradients(optimizer)
        _clip_value(self.precision, optimizer, clip_val)


def _clip_norm(
    precision: Any,
    optimizer: Optimizer,
    clip_val: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    parameters = precision.main_params(optimizer)
    return clip_grad_norm_(parameters, clip_val, norm_type, error_if_nonfinite=error_if_nonfinite)


def _clip_value(precision: Any, optimizer: Optimizer, clip_val: float) -> None:
    # torch's foreach kernels refuse a list that mixes DTensors with plain tensors.
    parameters = precision.main_params(optimizer)
    torch.nn.utils.clip_grad_value_(parameters, clip_val, foreach=False)


def _set_scaler(precision: Any, module: nn.Module) -> None:
    """Replace torch's scaler by one with which all ranks skip a step, or none."""
    scaler = getattr(precision, "scaler", None)
    if scaler is None or isinstance(scaler, GradScaler) or not sharded_parameters(module):
        return
    if type(scaler) is not torch.amp.GradScaler:
        raise ValueError(
            "ExpertParallel: expected the scaler of the precision plugin to be a "
            "moe_ext.distributed.GradScaler, since ranks that hold different experts have to skip "
            f"the same steps, got {type(scaler).__module__}.{type(scaler).__qualname__}"
        )
    precision.scaler = GradScaler(precision.device, enabled=scaler.is_enabled())
    precision.scaler.load_state_dict(scaler.state_dict())


def _optimizers(state: Any) -> list[Optimizer]:
    """Return the optimizers in a state that Fabric saves or loads."""
    values: Iterable[Any] = state.values() if isinstance(state, dict) else [state]
    return [value for value in values if isinstance(value, Optimizer)]


def _call_on_all(
    save: Callable[..., None], device: torch.device, *args: Any, **options: Any
) -> None:
    """Call a function that writes on one rank, and raise its error on all ranks."""
    with Agreement(_SAVE, resolve_group(None, _SAVE), device) as agreement:
        save(*args, **options)
        agreement.compare({})
