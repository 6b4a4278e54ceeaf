"""Metrics of the last forward pass of a layer, of one rank or of the ranks of a group.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.comm import collectives
from moe_ext.comm.groups import check_group, group_size

Metric = Tensor | Callable[[], Tensor]
# Record of a forward pass: numbers, and tensors that keep their graph. The record is a plain
# dictionary, because a compiled graph can fill one.
Record = dict[str, Any]
_COUNTS = ("num_tokens_per_expert", "num_dropped")


def _load(metrics: Mapping[str, Tensor]) -> Tensor:
    counts_E = metrics["num_tokens_per_expert"].float()
    return counts_E / counts_E.sum().clamp(min=1)


# Functions that compute derived metrics from other metrics, by name.
_DERIVED: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "load": _load,
    "load_entropy": lambda metrics: -torch.special.xlogy(metrics["load"], metrics["load"]).sum(),
    # The mean load is 1 / E, so multiplying by E divides by the mean. Without tokens this is 0.
    "load_cv": lambda metrics: metrics["load"].std(correction=0) * metrics["load"].shape[0],
    "max_over_mean": lambda metrics: metrics["load"].max() * metrics["load"].shape[0],
    "dropped_fraction": lambda metrics: (
        metrics["num_dropped"].float() / metrics["num_tokens_per_expert"].sum().clamp(min=1)
    ),
}


class LayerMetrics(Mapping[str, Tensor]):
    """Mapping of names to detached tensors. A metric that no loss needed is computed when read.

    With c the choices of each expert (`num_tokens_per_expert`), the derived metrics are

    - `load` `[E]`: `c / sum(c)`, 1/E each when balanced;
    - `load_entropy`: `-sum(load log load)` in nats, log E when balanced, 0 with one expert;
    - `load_cv`: standard deviation over mean of c, 0 when balanced;
    - `max_over_mean`: `max(c) / mean(c)`, 1 when balanced; a step waits for the fullest expert;
    - `dropped_fraction`: `num_dropped / sum(c)`.

    All of these are 0 without tokens. They are float32 on the layer's device. Looking up an entry
    does not wait for the device; reading the value of its tensor does.

    Args:
        entries: name to tensor, or to a function that computes it. A function runs once.
    """

    def __init__(self, entries: dict[str, Metric]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Tensor:
        value = self._entries.get(name)
        if value is None:
            if name not in self._derived():
                known = ", ".join(self) or "none before the first forward pass"
                raise KeyError(f"MoELayer: expected a name of a metric ({known}), got {name!r}")
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
        """Return the entries that are not derived from others."""
        return {name: self[name] for name in tuple(self._entries) if name not in _DERIVED}


def read_losses(record: Record) -> dict[str, Tensor]:
    """Return every loss term, multiplied by its coefficient."""
    unread = {name: coef for name, coef in record.get("unread", {}).items() if coef}
    losses = {name: coef * _LOSSES[name](record) for name, coef in unread.items()}
    losses |= {name: coef * term for name, (coef, term) in record.get("terms", {}).items()}
    return losses


def _balance_loss(record: Record) -> Tensor:
    counts_E, top_k = record["balance_counts"], record["balance_top_k"]
    return ops.load_balance_loss(record["score_sum"], counts_E, top_k)


def _z_loss(record: Record) -> Tensor:
    return ops.router_z_loss(record["logits"], token_mask=record["mask"])


_LOSSES = {"balance": _balance_loss, "z": _z_loss}


def read_metrics(record: Record) -> LayerMetrics:
    """Return the metrics of a record. Losses that the pass did not need are computed when read."""
    if not record:
        return LayerMetrics({})
    terms = record["terms"]
    entries: dict[str, Metric] = {
        "num_tokens_per_expert": record["num_tokens_per_expert"],
        "num_dropped": record["num_dropped"],
    }
    for name, compute in _LOSSES.items():
        known = name in terms
        entries[f"{name}_loss"] = (
            terms[name][1].detach() if known else functools.partial(compute, record)
        )
    entries |= record["moved"]
    for name in terms:
        if name not in _LOSSES:
            entries[f"{name}_loss"] = terms[name][1].detach()
    return LayerMetrics(entries)


def reduce_metrics(metrics: Mapping[str, Tensor], group: ProcessGroup | None) -> LayerMetrics:
    """Combine metrics over the ranks of a group, by one all-reduce.

    Counts are summed. Everything else is averaged over ranks, as the objective averages the local
    losses. Derived metrics, such as the load, are then those of all tokens of the group.

    Args:
        metrics: `layer.metrics`.
        group: process group, all ranks of which call this for the same layer; None for this rank
            alone.

    Returns:
        Metrics of the group, equal on every rank.

    Raises:
        TypeError: group is not a process group.
        RankFailureError: a rank died or did not answer.
    """
    check_group(group, "reduce_metrics")
    whole = metrics.measured() if isinstance(metrics, LayerMetrics) else dict(metrics)
    entries: dict[str, Metric] = dict(whole)
    if group is None or group_size(group) == 1 or not whole:
        return LayerMetrics(entries)
    # float64 holds counts exactly, so one message is enough for counts and losses.
    packed = torch.cat([value.reshape(-1).double() for value in whole.values()])
    collectives.all_reduce_(packed, group, operation="reduce_metrics")
    parts = packed.split([value.numel() for value in whole.values()])
    for (name, value), part in zip(whole.items(), parts, strict=True):
        if value.is_floating_point():
            part = part / group_size(group)
        entries[name] = part.to(value.dtype).view(value.shape)
    return LayerMetrics(entries)
