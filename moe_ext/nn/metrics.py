"""What a layer tells about its last forward pass.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import check_group, group_size

Metric = Tensor | Callable[[], Tensor]
_COUNTS = ("num_tokens_per_expert", "num_dropped")


def _load(metrics: Mapping[str, Tensor]) -> Tensor:
    counts_E = metrics["num_tokens_per_expert"].float()
    return counts_E / counts_E.sum().clamp(min=1)


def _entropy(metrics: Mapping[str, Tensor]) -> Tensor:
    load_E = metrics["load"]
    return -torch.special.xlogy(load_E, load_E).sum()


def _coefficient_of_variation(metrics: Mapping[str, Tensor]) -> Tensor:
    load_E = metrics["load"]
    # The mean load is 1 / E, or 0 without a token: then there is no spread either.
    return load_E.std(correction=0) * load_E.shape[0]


def _max_over_mean(metrics: Mapping[str, Tensor]) -> Tensor:
    load_E = metrics["load"]
    return load_E.max() * load_E.shape[0]


def _dropped_fraction(metrics: Mapping[str, Tensor]) -> Tensor:
    return metrics["num_dropped"] / metrics["num_tokens_per_expert"].sum().clamp(min=1)


_DERIVED: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "load": _load,
    "load_entropy": _entropy,
    "load_cv": _coefficient_of_variation,
    "max_over_mean": _max_over_mean,
    "dropped_fraction": _dropped_fraction,
}


class LayerMetrics(Mapping[str, Tensor]):
    """Mapping of names to detached tensors; what no loss needed is computed when it is read.

    With c the choices of each expert (`num_tokens_per_expert`) it also has

    - `load` `[E]`: `c / sum(c)`, 1/E each when balanced;
    - `load_entropy`: `-sum(load log load)` in nats, log E when balanced, 0 with one expert;
    - `load_cv`: standard deviation over mean of c, 0 when balanced;
    - `max_over_mean`: `max(c) / mean(c)`, 1 when balanced; what a step waits for;
    - `dropped_fraction`: `num_dropped / sum(c)`.

    All are 0 where no token came. They are float32 on the layer's device: no read of an entry waits
    for the device, only what looks at its value does.

    Args:
        entries: name to tensor, or to a function that computes it. A function runs once.
    """

    def __init__(self, entries: dict[str, Metric]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Tensor:
        value = self._entries.get(name)
        if value is None:
            if name not in self._derived():
                raise KeyError(name)
            value = self._entries[name] = _DERIVED[name](self)
        elif not isinstance(value, Tensor):
            value = self._entries[name] = value().detach()
        return value

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from [name for name in self._derived() if name not in self._entries]

    def __len__(self) -> int:
        return len(self._entries.keys() | set(self._derived()))

    def __repr__(self) -> str:
        return f"LayerMetrics({', '.join(self)})"

    def _derived(self) -> tuple[str, ...]:
        known = all(name in self._entries for name in _COUNTS)
        return tuple(_DERIVED) if known else ()

    def measured(self) -> dict[str, Tensor]:
        """The entries that do not follow from others."""
        return {name: self[name] for name in tuple(self._entries) if name not in _DERIVED}


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
    with naming_failed_ranks(group, "reduce_metrics"):
        dist.all_reduce(packed, group=group)
    parts = packed.split([value.numel() for value in whole.values()])
    for (name, value), part in zip(whole.items(), parts, strict=True):
        if value.is_floating_point():
            part = part / group_size(group)
        entries[name] = part.to(value.dtype).view(value.shape)
    return LayerMetrics(entries)


class ScalarWriter(Protocol):
    """What `log_metrics` wants of a writer: the method of TensorBoard's `SummaryWriter`."""

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
    from moe_ext.nn.routing_record import moe_layers

    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            f"log_metrics: expected model to have a MoELayer, got none in {type(model).__name__}"
        )
    tags: list[str] = []
    values: list[Tensor] = []
    for layer_name, layer in layers.items():
        metrics = reduce_metrics(layer.metrics, group)  # type: ignore[arg-type]
        for name, value in metrics.items():
            if value.dim() == 0:
                tags.append(f"{prefix}/{name}/{layer_name}")
                values.append(value.double())
    if not values:
        return
    for tag, number in zip(tags, torch.stack(values).tolist(), strict=True):
        writer.add_scalar(tag, number, step)
