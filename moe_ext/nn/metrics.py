"""Metrics of layers over ranks, and of all layers of a model.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives
from moe_ext.comm.groups import check_group, group_size
from moe_ext.nn.layer_metrics import LayerMetrics, Metric
from moe_ext.nn.model_layers import moe_layers


def reduce_metrics(metrics: Mapping[str, Tensor], group: ProcessGroup | None) -> LayerMetrics:
    """Metrics over the ranks of a group: one all-reduce.

    Counts are added, everything else is averaged over ranks, as the objective averages the local
    losses; load, entropy and their like then are those of the group's tokens.

    Args:
        metrics: `layer.metrics`.
        group: every rank of it calls this for the same layer; None for this rank alone.

    Returns:
        Metrics of the group, equal on every rank.

    Raises:
        TypeError: group is no process group.
        RankFailureError: a rank died or did not answer.
    """
    check_group(group, "reduce_metrics")
    whole = metrics.measured() if isinstance(metrics, LayerMetrics) else dict(metrics)
    entries: dict[str, Metric] = dict(whole)
    if group is None or group_size(group) == 1 or not whole:
        return LayerMetrics(entries)
    # float64 holds counts exactly, so that one message does.
    packed = torch.cat([value.reshape(-1).double() for value in whole.values()])
    collectives.all_reduce_(packed, group, operation="reduce_metrics")
    parts = packed.split([value.numel() for value in whole.values()])
    for (name, value), part in zip(whole.items(), parts, strict=True):
        if value.is_floating_point():
            part = part / group_size(group)
        entries[name] = part.to(value.dtype).view(value.shape)
    return LayerMetrics(entries)


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
