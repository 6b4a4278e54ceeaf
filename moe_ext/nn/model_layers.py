"""Functions that find the `MoELayer`s of a model, or act on all of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.nn.balance.moved import Rebalancer
from moe_ext.nn.layer_metrics import reduce_metrics
from moe_ext.nn.moe_layer import MoELayer

# Parts of module names that wrappers insert.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return the `MoELayer`s of a model by name, without the parts that wrappers insert."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    short = [".".join(p for p in name.split(".") if p not in _WRAPPERS) for name in found]
    names = short if len(set(short)) == len(short) else list(found)
    return {name or "(model)": layer for name, layer in zip(names, found.values(), strict=True)}


def set_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set `loss_scale` of every `MoELayer` in a model.

    Every forward pass injects its own losses, whatever the caller does to its loss or to gradients.
    For the mean of the injected losses over the n passes of a step, the factor is 1/n, whether the
    caller divides its losses by n or by tokens. With a `GradScaler`, multiply the factor by its
    scale. If losses are sums, and gradients are divided by the N tokens of the step at its end, the
    factor is N/n.

    Args:
        model: any module.
        scale: the factor, a number or a 0-d tensor on the model's device, for the next passes.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.loss_scale = scale


def update_placement(model: nn.Module) -> None:
    """Count a step of every layer with rebalance="periodic", and make a new plan when it is due.

    Call it on all ranks after the optimizer's step, never between a forward pass and its backward
    pass. A new plan is made for the loads of training passes since the last plan. It replaces the
    plan in use if it makes the heaviest rank lighter by `Rebalance.hysteresis`. Parameters and
    optimizer state never move, because weights of moved experts are sent in each pass. Plans are
    not part of checkpoints: a run begins without a plan.

    Args:
        model: any module.
    """
    for module in model.modules():
        # A `MoELayer` may have a rebalancer, and so may the experts of a transformers model.
        rebalancer = vars(module).get("_rebalancer")
        if isinstance(rebalancer, Rebalancer):
            rebalancer.update()


def collect_losses(model: nn.Module) -> Tensor:
    """Sum the losses of every `MoELayer` of a model in its last forward pass.

    If layers have `Balance(mode="return")`, the caller adds this sum to its loss. It then has a
    graph, and the coefficients are its only factors. Losses of layers that inject them are in the
    sum too, detached. Call it before the backward pass. Activation checkpointing needs
    `use_reentrant=False`, since the reentrant variant has no graph before the backward pass.

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
    """Writer for `log_metrics`, with one method of TensorBoard's `SummaryWriter`."""

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
    """Write the metrics of every `MoELayer` of a model to TensorBoard, or to a similar writer.

    Tags are `<prefix>/<metric>/<layer>`. Metrics with a number for each expert, such as `load`, are
    left out; `moe_ext.plot.expert_load` draws them. The numbers of all layers are copied to the
    host at once.

    Args:
        writer: `torch.utils.tensorboard.SummaryWriter` (see `moe_ext.plot.summary_writer`), or
            anything with its `add_scalar`.
        model: a model after a forward pass. Layers that have not run are left out.
        step: number of the step.
        prefix: prefix of the tags.
        group: combine metrics over these ranks first, see `reduce_metrics`. All of them call this.

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
