"""Trains with torchft's replica groups, each of which spreads the experts over its own ranks.

A replica group is a separate job, with its own default process group and `MoEMesh`. Experts are
spread over the ranks of one group, and every group holds all experts. torchft's `Manager` connects
rank i of all groups. If a group dies, the others go on; a group that returns gets its state from a
living group.

::

    state = ReplicaState(model, [optimizer])
    manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), min_replica_size=1,
                              load_state_dict=state.load_state_dict, state_dict=state.state_dict)
    for x, y in batches:
        manager.start_quorum()
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        average_over_groups(manager, model)  # over the groups
        sync_gradients(model)                # over the ranks of this group
        clip_grad_norm_(model, 1.0)
        if manager.should_commit():
            optimizer.step()

All groups must begin with the same weights. At step 0, unless `Manager(init_sync=False)`, torchft
copies one group's weights to rank i of every group, and uses only that group's gradients. It picks
a different group for each i. Therefore `average_over_groups` compares the weights, and means over
groups must come before means over the ranks of a group.

A rank that loses another rank of its own group raises a `RankFailureError`. End the group then, so
that its launcher restarts it. This module does not import torchft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.optim.optimizer import Optimizer

from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import resolve_group, world_size
from moe_ext.distributed.dtensor import dtensor_of, is_dtensor, local_part
from moe_ext.distributed.gradients import (
    fingerprint,
    flat_gradient,
    gradient_buckets,
    is_synced,
    mark_synced,
    put_gradients,
)
from moe_ext.distributed.placement import sharded_parameters
from moe_ext.distributed.state_dict import unwrapped
from moe_ext.nn.model_layers import moe_layers
from moe_ext.optim import DeMo, OneBitAdam, OneBitLamb, ZeroOneAdam

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["ReplicaState", "average_over_groups"]

_OP = "average_over_groups"
_ONE_BIT = (OneBitAdam, OneBitLamb, ZeroOneAdam)


class QuorumManager(Protocol):
    """Methods of `torchft.Manager` that this module calls."""

    def allreduce(self, tensor: Tensor) -> Work:
        """Replace a tensor by its mean over the groups that take part."""

    def errored(self) -> object | None:
        """Return the error because of which the step will be skipped, or None."""

    def num_participants(self) -> int:
        """Return the number of groups that take part."""

    def current_step(self) -> int:
        """Return the number of the step."""


class ReplicaState:
    """State that a rank gives to its counterpart in a joining group, for `torchft.Manager`.

    `model.state_dict()` cannot be used, because it holds experts as DTensors, which cannot be
    pickled. This state is the rank's own part: parameters, buffers, optimizer states with the
    residuals of this rank, and the global indices of its experts. Nothing is sent.

    Args:
        model: any module; equal on all groups, over equal meshes.
        optimizers: optimizers of its parameters.
        others: further states by name, such as a `CompressionState` with its residuals, or a
            scheduler.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._model = model
        self._optimizers = [unwrapped(optimizer, "ReplicaState") for optimizer in optimizers]
        self._others = dict(others or {})

    def state_dict(self) -> dict[str, Any]:
        """Return the parts of this rank. Tensors share memory with the model."""
        return {
            "held": self._held(),
            "trained": self._trained(),
            "model": {name: local_part(t).detach() for name, t in self._tensors().items()},
            "optimizers": [_state_of(optimizer) for optimizer in self._optimizers],
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the rank with the same number in another group.

        Raises:
            ValueError: that rank has different experts, tensors, optimizers or other states.
                Nothing is changed.
        """
        held, tensors = self._held(), self._tensors()
        for name in sorted(held.keys() | state["held"].keys()):
            mine, theirs = held.get(name), state["held"].get(name)
            if mine != theirs:
                raise ValueError(
                    f"ReplicaState: expected every group to have the same MoEMesh, got {name} of "
                    f"(first, last, all, parts) {theirs}, and {mine} on this rank"
                )
        found = {name: tuple(t.shape) for name, t in state["model"].items()}
        own = {name: tuple(local_part(t).shape) for name, t in tensors.items()}
        if found != own:
            name = min(n for n in found.keys() | own.keys() if found.get(n) != own.get(n))
            raise ValueError(
                f"ReplicaState: expected every group to have the same model, got {name} of shape "
                f"{found.get(name)}, and {own.get(name)} on this rank"
            )
        if state["trained"] != self._trained():
            raise ValueError(
                "ReplicaState: expected every group to have the same optimizers and others, got "
                f"{state['trained']}, and {self._trained()} on this rank"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                local_part(tensor).copy_(state["model"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            _load(optimizer, saved)
        for name, other in self._others.items():
            other.load_state_dict(state["others"][name])

    def _held(self) -> dict[str, tuple[int, int, int, int]]:
        return {
            name: (place.held.start, place.held.stop, place.size, place.num_parts)
            for name, (_, place) in sharded_parameters(self._model).items()
        }

    def _trained(self) -> list[object]:
        """Return optimizers, with the number of parameters of each group, and names of others."""
        optimizers = [
            (type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups])
            for optimizer in self._optimizers
        ]
        return [*optimizers, *sorted(self._others)]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the parameters and the persistent buffers by name."""
        saved: dict[str, Tensor] = dict(self._model.named_parameters())
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    saved[name] = buffer
        return saved


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    if isinstance(optimizer, _ONE_BIT):
        return optimizer.rank_state_dict()
    if isinstance(optimizer, DeMo):
        return optimizer.state_dict()
    # The method of the base class is called, because a subclass may return the whole model's state.
    saved = Optimizer.state_dict(optimizer)
    states, placed = {}, {}
    for number, state in saved["state"].items():
        states[number] = {k: local_part(v) if is_dtensor(v) else v for k, v in state.items()}
        placed[number] = {k: (v.placements, v.shape) for k, v in state.items() if is_dtensor(v)}
    return {**saved, "state": states, "placed": placed}


def _load(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        placed, states[number] = saved.get("placed", {}).get(number, {}), {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                value = value.clone()  # torchft's tensors may be in read-only memory
            if key in placed:
                value = dtensor_of(value, parameters[number].device_mesh, *placed[key])
            states[number][key] = value
    optimizer.load_state_dict({**saved, "state": states})


@torch.no_grad()
def average_over_groups(manager: QuorumManager, model: nn.Module) -> None:
    """Average gradients over replica groups, among the ranks of the same number.

    Call it on all ranks after the backward pass, and before gradients are averaged over the ranks
    of a group (by `sync_gradients`, `compress_gradients`, or the step of a 1-bit optimizer). If
    only some ranks take part in the mean over groups, the ranks of a group get different gradients,
    which the mean over ranks makes equal again. The counts of layers for `update_selection_bias`
    become sums over the groups, so that biases stay equal.

    A gradient that is None in some groups counts as zero there; one that is None in all groups
    remains None. If a message fails, gradients do not change, and `manager.should_commit()` will be
    False.

    Args:
        manager: `torchft.Manager`, between `start_quorum` and `should_commit`.
        model: any module.

    Raises:
        ValueError: a gradient is sparse. Also on every rank, at step 0 of groups of several ranks:
            weights differ between groups or ranks; or gradients were already averaged over the
            ranks of the group, but torchft uses those of only some ranks.
        RankFailureError: at step 0, a rank of this group died or did not answer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                "average_over_groups: expected gradients to be dense, got a sparse one of shape "
                f"{tuple(parameter.shape)}"
            )
    if not parameters:
        return
    device, buckets = parameters[0].device, gradient_buckets(parameters)
    synced = any(p.grad is not None and is_synced(p.grad) for p in parameters)
    # `num_participants` waits for the quorum, after which a joining group knows its step.
    if manager.num_participants() and manager.current_step() == 0 and world_size() > 1:
        _check_first_step(manager, model, synced)
    has = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
    counts = [c for layer in moe_layers(model).values() for c in _counts(layer)]
    flat_counts = [count.flatten().double() for count in counts]
    messages = [has, *([torch.cat(flat_counts)] if counts else [])]
    messages += [torch.cat([flat_gradient(p) for p in bucket]) for bucket in buckets]
    for work in [manager.allreduce(message) for message in messages]:
        work.wait()
    if manager.errored() is not None:
        return
    grown = {p for p, share in zip(parameters, has.tolist(), strict=True) if share > 0}
    if counts:
        totals = messages.pop(1).mul_(manager.num_participants()).round_()
        for count, total in zip(counts, totals.split([c.numel() for c in counts]), strict=True):
            count.copy_(total.view_as(count))
    for bucket, flat in zip(buckets, messages[1:], strict=True):
        put_gradients(bucket, flat)
    for parameter in parameters:
        if parameter not in grown:
            # A healing rank sends zeros, even for its own gradient, which is dropped here if no
            # rank that takes part has one.
            parameter.grad = None
        elif synced and parameter.grad is not None:
            mark_synced(parameter.grad)


def _check_first_step(manager: QuorumManager, model: nn.Module, synced: bool) -> None:
    """Raise ValueError on every rank if ranks would have different weights after step 0."""
    sharded = sharded_parameters(model)
    named = [(name, local_part(p.detach())) for name, p in model.named_parameters()]
    dense = fingerprint([(name, p) for name, p in named if name not in sharded])
    whole = fingerprint(named)
    device = named[0][1].device
    # Healing ranks send zeros. The mean of the first number is therefore the share of other ranks,
    # and dividing by it gives means over these ranks alone.
    numbers = [1.0, float(whole & 0xFFFF), float(whole >> 16)]
    message = torch.tensor(numbers, dtype=torch.float64, device=device)
    manager.allreduce(message).wait()
    share, *means = message.tolist() if manager.errored() is None else numbers
    with Agreement(_OP, resolve_group(None, _OP), device) as agreement:
        if share > 0 and [round(mean / share) for mean in means] != numbers[1:]:
            raise ValueError(
                f"{_OP}: expected all replica groups to begin with the same weights, as by the "
                "same seed, got others in another group; torchft would give each rank those of "
                "another group"
            )
        if synced and share != 1.0:
            raise ValueError(
                f"{_OP}: expected gradients that are not averaged over the ranks of the group "
                "yet, got those that sync_gradients has averaged, of which torchft takes some "
                "ranks' alone in the first step; call average_over_groups before sync_gradients, "
                "or make the Manager with init_sync=False"
            )
        agreement.compare({"the dense parameters' checksum": dense})


def _counts(layer: Any) -> Iterator[Tensor]:
    for count in (layer.choices, layer.required_bias):
        if count is not None:
            yield count
