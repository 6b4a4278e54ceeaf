"""Strategies of Lightning for models whose experts lie over ranks.

::

    from moe_ext.integrations.lightning import ExpertParallel

    class Strategy(ExpertParallel, DDPStrategy):
        pass

    trainer = Trainer(strategy=Strategy(), gradient_clip_val=1.0)

`ExpertParallel` is for the Trainer, `FabricExpertParallel` for Fabric. Each is mixed into a
`DDPStrategy`, or a subclass of it, of `lightning` or of `pytorch_lightning` and `lightning_fabric`;
none of these is imported here, and nothing of theirs is replaced.
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
    """Mixed into a `DDPStrategy` of Lightning's Trainer: trains models with experts over ranks.

    - The module is prepared by `moe_ext.parallelize`, in fitting and in validation alone.
    - `gradient_clip_val` counts the gradients of all experts, by norm or by value, and so does
      `self.clip_gradients`.
    - `ModelCheckpoint` and `save_checkpoint` write the file of one process, from which `ckpt_path=`
      goes on with any number of ranks. An error of the rank that writes is raised on all.
    - "16-mixed" gets a `moe_ext.distributed.GradScaler`: all ranks skip a step, or none.
    - `manual_backward` averages the gradients of experts, too.
    - An optimizer that has experts beside other parameters in one group on a GPU is warned of.

    Tensors that a callback or `on_save_checkpoint` adds to a checkpoint have to be whole: let it
    call a model's `state_dict()` inside `moe_ext.distributed.whole_state_dicts()`, an optimizer's
    inside `whole_state_dicts(optimizer)`.

    Raises:
        ValueError: on every rank: the precision plugin has a scaler of another class.
    """

    model: Any
    lightning_module: Any
    optimizers: list[Optimizer]
    precision_plugin: Any
    root_device: torch.device

    def model_to_device(self) -> None:
        """Move the module, and prepare it."""
        super().model_to_device()  # type: ignore[misc]
        # Rank 0's states go to all ranks next, in fitting and in validation alone.
        parallelize(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make optimizers; a warning for one that is slower than it need be."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:
            warn_of_mixed_groups("ExpertParallel", optimizer)

    def setup_precision_plugin(self) -> None:
        """Have this job's plugin clip over all ranks."""
        super().setup_precision_plugin()  # type: ignore[misc]
        plugin = self.precision_plugin
        _set_scaler(plugin, self.lightning_module)
        # Only this object has it: its class is Lightning's, by whose name files keep its state.
        plugin.clip_grad_by_norm = functools.partial(_clip_norm, plugin)
        plugin.clip_grad_by_value = functools.partial(_clip_value, plugin)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Have the backward passes of `manual_backward` count, each of which DDP reduces."""
        super().pre_backward(closure_loss)  # type: ignore[misc]
        is_manual = not self.lightning_module.automatic_optimization
        if is_manual and isinstance(self.model, DistributedDataParallel):
            expect_backward(self.lightning_module, self.model, closure_loss)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module on rank 0."""
        with whole_state_dicts():
            return super().lightning_module_state_dict()  # type: ignore[misc]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0."""
        with whole_state_dicts(optimizer):
            return super().optimizer_state(optimizer)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Take this rank's parts of whole states."""
        with whole_state_dicts(*self.optimizers):
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Write on rank 0; all ranks raise what it raises."""
        _call_on_all(super().save_checkpoint, self.root_device, *args, **options)  # type: ignore[misc]


class FabricExpertParallel:
    """Mixed into a `DDPStrategy` of Fabric: trains models with experts over ranks.

    - `fabric.setup` and `setup_module` prepare the module by `moe_ext.parallelize`.
    - `fabric.clip_gradients` counts the gradients of all experts, by norm or by value.
    - `fabric.save` writes the file of one process, which `fabric.load` reads on any number of
      ranks. An error of the rank that writes is raised on all.
    - "16-mixed" gets a `moe_ext.distributed.GradScaler`: all ranks skip a step, or none.
    - An optimizer that has experts beside other parameters in one group on a GPU is warned of.

    Tensors that are in the state by themselves have to be whole: take those of
    `moe_ext.distributed.full_state_dict(model)`.

    Raises:
        ValueError: on every rank: the precision plugin has a scaler of another class.
    """

    precision: Any
    root_device: torch.device

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare the module, and wrap it."""
        parallelize(module)
        _set_scaler(self.precision, module)
        return super().setup_module(module)  # type: ignore[misc]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer; a warning for one that is slower than it need be."""
        warn_of_mixed_groups("FabricExpertParallel", optimizer)
        return super().setup_optimizer(optimizer)  # type: ignore[misc]

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        """Write the whole on rank 0; all ranks raise what it raises."""
        with whole_state_dicts(*_optimizers(state)):
            save = super().save_checkpoint  # type: ignore[misc]
            _call_on_all(save, self.root_device, path, state, *args, **options)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Take this rank's parts of the whole."""
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
        """Clip by the norm over all ranks."""
        self.precision.unscale_gradients(optimizer)
        return _clip_norm(
            self.precision, optimizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip each element."""
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
    # Foreach kernels take no DTensors beside other tensors.
    parameters = precision.main_params(optimizer)
    torch.nn.utils.clip_grad_value_(parameters, clip_val, foreach=False)


def _set_scaler(precision: Any, module: nn.Module) -> None:
    """Put a scaler by which all ranks skip a step, or none, in the place of torch's."""
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
    """Optimizers of what Fabric saves or loads."""
    values: Iterable[Any] = state.values() if isinstance(state, dict) else [state]
    return [value for value in values if isinstance(value, Optimizer)]


def _call_on_all(
    save: Callable[..., None], device: torch.device, *args: Any, **options: Any
) -> None:
    """Call a function that works on one rank, for whom others will wait."""
    with Agreement(_SAVE, resolve_group(None, _SAVE), device) as agreement:
        save(*args, **options)
        agreement.compare({})
