"""The `MoELayer`s of a model: finding them, and calls for all of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.nn.balance.moved import Rebalancer
from moe_ext.nn.layer_metrics import reduce_metrics
from moe_ext.nn.moe_layer import MoELayer

# Parts that wrappers put into the names of modules.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The `MoELayer`s of a model by name, the names of wrappers left out."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    short = [".".join(p for p in name.split(".") if p not in _WRAPPERS) for name in found]
    names = short if len(set(short)) == len(short) else list(found)
    return {name or "(model)": layer for name, layer in zip(names, found.values(), strict=True)}


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set `loss_scale` of every `MoELayer` in a model.

    The injected losses do not see what the caller does to the loss or to gradients, and every
    forward pass injects its own. For their mean over the n passes of a step the factor is 1/n,
    whether the caller divides losses by n or by tokens; times the scale of a `GradScaler`; and N/n
    where losses are sums, and gradients are divided by the N tokens of the step at its end.

    Args:
        model: any module.
        scale: the factor, a number or a 0-d tensor on the model's device, for the next passes.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.loss_scale = scale


def update_placement(model: nn.Module) -> None:
    """Count a step of every layer with rebalance="periodic", and make a new plan in its turn.

    Call it on all ranks after the optimizer's step, and not between a forward pass and its backward
    pass. A new plan is for the loads of the training passes since the last one; it replaces the
    plan in use where it makes the heaviest rank lighter by `Rebalance.hysteresis`. Weights stay
    where they are: those of moved experts are sent in each pass, so that optimizer state never
    moves. Plans are not part of checkpoints: a run begins without one.

    Args:
        model: any module.
    """
    for module in model.modules():
        # A `MoELayer` has one, or the experts of a transformers model.
        rebalancer = vars(module).get("_rebalancer")
        if isinstance(rebalancer, Rebalancer):
            rebalancer.update()


def collect_losses(model: nn.Module) -> Tensor:
    """Sum the losses of every `MoELayer` of a model, as of their last forward passes.

    Term for the caller's loss where layers have `Balance(mode="return")`: it is in the graph
    then, and scaled by nothing but the coefficients. The terms of layers that inject theirs are in
    the sum too, detached. Call it before the backward pass. Under activation checkpointing the
    layers need `use_reentrant=False`: the reentrant one has no graph until the backward pass.

    Args:
        model: any module.

    Returns:
        0-d tensor; 0.0 for a model whose layers have no losses.
    """
    terms = [
        term
        for module in model.modules()
        if isinstance(module, MoELayer)
        for term in module.losses.values()
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


class ScalarWriter(Protocol):
    """Writer that `log_metrics` takes: the method of TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""
        ...


def log_metrics(
    writer: ScalarWriter,
    model: nn.Module,
    step: int,
    *,
    prefix: str = "moe",
    group: ProcessGroup | None = None,
) -> None:
    """Write the metrics of every `MoELayer` of a model to TensorBoard, or what looks like it.

    Tags are `<prefix>/<metric>/<layer>`; `load` and the counts, one number an expert, are left out:
    `moe_ext.plot.expert_load` draws them. All numbers of all layers are fetched at once.

    Args:
        writer: `torch.utils.tensorboard.SummaryWriter` (see `moe_ext.plot.summary_writer`), or
            anything with its `add_scalar`.
        model: after a forward pass; layers that have not run are left out.
        step: number of the step.
        prefix: of the tags.
        group: reduce over its ranks first (see `reduce_metrics`); then every rank calls this.

    Raises:
        ValueError: the model has no `MoELayer`.
    """
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            f"log_metrics: expected model to have a MoELayer, got none in {type(model).__name__}"
        )
    tags: list[str] = []
    values: list[Tensor] = []
    for layer_name, layer in layers.items():
        metrics = reduce_metrics(layer.metrics, group)
        for name, value in metrics.items():
            if value.dim() == 0:
                tags.append(f"{prefix}/{name}/{layer_name}")
                values.append(value.double())
    if not values:
        return
    for tag, number in zip(tags, torch.stack(values).tolist(), strict=True):
        writer.add_scalar(tag, number, step)
