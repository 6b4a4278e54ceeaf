"""State dicts of whole models and their optimizers, where parameters lie over ranks.

`state_dict()` of both holds DTensors of the whole, for `torch.distributed.checkpoint`; no rank can
pickle them, since its file would hold its own part and look like all. Inside `whole_state_dicts` it
holds plain tensors instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from moe_ext.distributed.agreement import meet
from moe_ext.distributed.dtensor import (
    divided_as,
    is_dtensor,
    keeps_wholes,
    local_part,
    state_dicts_of_parts,
)
from moe_ext.distributed.placement import (
    Placement,
    check_known,
    kept,
    known_shard,
    logical_names_by_rank,
    placements,
    plain,
    sharded_buffers,
)

# Optimizers whose state dicts speak of the whole.
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()

ParameterStates = dict[nn.Parameter, dict[str, Any]]

# End of the name of a tensor [P, ...] in a parameter's state with each rank's own. Only as many
# ranks load it.
OF_RANKS = "_of_ranks"


@runtime_checkable
class SavesByParameter(Protocol):
    """Optimizer with more to save than a state for each parameter that ranks hold alike."""

    def checkpoint_state(self) -> tuple[ParameterStates, dict[str, int]]:
        """States that all ranks with the same parameters hold alike, and counters; collective.

        A state holds numbers, and tensors whose first dimensions are those of the parameter; and
        DTensors [P, ...] of what each rank has for itself, under names that end in `OF_RANKS`.
        """

    def tensors_to_load(self, owing: bool) -> tuple[ParameterStates, object]:
        """Tensors to read a checkpoint into, with what ranks owe or not, and what holds them."""

    def load_checkpoint_state(
        self, states: ParameterStates, counters: Mapping[str, int], holders: object
    ) -> None:
        """Go on from what `checkpoint_state` returned, on any number of ranks.

        The tensors are kept; those of `tensors_to_load` come with what holds them.
        """


@runtime_checkable
class TakesOver(Protocol):
    """Optimizer that can keep the tensors of a state, which its `load_state_dict` copies."""

    def take_over(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, by the numbers of the parameters."""


@runtime_checkable
class ChecksOptions(Protocol):
    """Optimizer that refuses options which it does not know."""

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for options of parameter groups, in their order; changes nothing."""


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model as one process would hold it, on every rank.

    One rank may write it by `torch.save` or `save_pretrained(dir, state_dict=...)`, and a model of
    any number of ranks takes its part of it by `load_state_dict`.

    Args:
        model: any module; its experts may lie over ranks.

    Returns:
        `model.state_dict()`, detached, with whole tensors, which are copies, instead of DTensors.

    Raises:
        RuntimeError: a rank of the groups did not call it within a minute.
        RankFailureError: a rank died.

    A collective: every rank of the groups that hold parts calls it, and each then holds all.
    """
    with state_dicts_of_parts():
        state = model.state_dict()
    return gathered(model, state, operation="full_state_dict")


def gathered(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    operation: str,
    hint: str = "",
    keep: bool = True,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """A state dict with whole tensors in the place of DTensors.

    Args:
        model: whose state it is.
        state: of `model.state_dict()`, or some of it.
        operation: name for error messages.
        hint: what to do where a rank does not call it, behind the message.
        keep: False for a rank that takes part and wants nothing.
        device: where to keep them; None leaves each where it is.
    """
    buffers = {name: place for name, (_, place) in sharded_buffers(model).items()}
    places, by_rank = {**placements(model), **buffers}, logical_names_by_rank(model)
    dims = {name: parameter.dim() for name, parameter in model.named_parameters()}
    parts = {name: places.get(name) for name, value in state.items() if is_dtensor(value)}
    for name, place in parts.items():
        if place is not None:
            check_known(name, place, operation)
    for group in dict.fromkeys(place.group for place in parts.values() if place is not None):
        meet(operation, group, hint=hint)
    found = {}
    for name, value in state.items():
        wholes, place = {name: value}, parts.get(name)
        if place is not None:
            whole = plain(place, value, dims.get(name) if place.dim is not None else None)
            names, stacked = by_rank.get(name, ([name], 0))[0], place.dim is not None
            wholes = {name: whole} if stacked else dict(zip(names, whole.clone(), strict=True))
        elif is_dtensor(value):
            wholes = {name: value.full_tensor()}
        for whole_name, whole in wholes.items() if keep else ():
            value = whole.detach() if isinstance(whole, Tensor) else whole
            found[whole_name] = value.to(device) if isinstance(value, Tensor) and device else value
    return found


def whole_of(value: Tensor, parameter: Tensor, place: Placement | None, name: str) -> Tensor:
    """A tensor of a parameter, as `state_dict()` shows it: a DTensor where that is one.

    It is of the parameter's shape, or has its first dimension.
    """
    if place is not None:
        check_known(name, place, "checkpoint")
    if place is None or value.dim() == 0:
        return value
    if place.num_parts > 1 and place.dim is None:
        return place.of_expert(place.taken(value, parameter))
    if value.shape in (parameter.shape, local_part(parameter).shape):
        return place.shown(value)
    if place.num_parts == 1 or is_dtensor(value):
        return value
    rows = local_part(parameter).shape[0]
    if place.dim == 0 and place.pieces[1] == 1 and value.shape[0] == rows:
        return place.whole(value)
    raise ValueError(
        f"checkpoint: expected the optimizer's tensors of {name} to have its first dimension, "
        f"{rows}, got shape {tuple(value.shape)}"
    )


def _shown(value: Any, parameter: Tensor, place: Placement, name: str) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if keeps_wholes() is None:
        return (
            whole_of(value, parameter, place, name) if place.dim is not None else place.shown(value)
        )
    return kept(place, place.whole(value) if place.dim is not None else place.shown(value))


def _part_of(value: Any, parameter: Tensor, place: Placement) -> Any:
    """This rank's part of a loaded value, which is a DTensor, the whole, or already that part."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    found = place.taken(value, parameter)
    # Factored moments have some dimensions of the parameter.
    return found if is_dtensor(found) else divided_as(found, parameter)


def _shards_of(optimizer: Optimizer) -> dict[int, tuple[Tensor, Placement]]:
    """Number to parameter and placement, of those that lie over ranks."""
    parameters = enumerate(p for group in optimizer.param_groups for p in group["params"])
    found = {number: (p, known_shard(p)) for number, p in parameters}
    return {number: (p, place) for number, (p, place) in found.items() if place is not None}


def show_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """DTensors of the whole, or this, in the place of parts; hook of `state_dict()`."""
    state = dict(state_dict["state"])
    for number, (parameter, place) in _shards_of(optimizer).items():
        if number in state:
            state[number] = {
                key: _shown(value, parameter, place, f"parameter {number}")
                for key, value in state[number].items()
            }
    return {**state_dict, "state": state}


def take_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts of a state that `load_state_dict()` takes, whose hook it is, too."""
    # By names or numbers, in the order of the parameters here.
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for number, (parameter, place) in _shards_of(optimizer).items():
        if number < len(saved) and saved[number] in state:
            values = state[saved[number]].items()
            state[saved[number]] = {k: _part_of(v, parameter, place) for k, v in values}
    return {**state_dict, "state": state}


def watch(optimizer: Optimizer, *_call: object) -> None:
    """Have the state dicts of an optimizer of parts of the model speak of the whole.

    A hook before every step of every optimizer.
    """
    if optimizer in _watched or not (shards := _shards_of(optimizer)):
        return
    # By name: its module takes long to import.
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer: expected parameters that every rank holds, since each rank "
            "sends all others those that it has updated, got experts that lie over ranks; give it "
            "the group 'dense' of moe_ext.distributed.expert_param_groups(model), and the experts "
            "an optimizer of their own"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS: expected parameters that every rank holds, since its products run over all "
            "parameters of a rank and each would take other steps, got experts that lie over "
            "ranks; take an optimizer that updates each parameter by itself"
        )
    _watched.add(optimizer)
    if isinstance(optimizer, SavesByParameter):
        return  # its state dicts do so by themselves
    optimizer.register_state_dict_post_hook(show_states)
    optimizer.register_load_state_dict_pre_hook(take_states)
    # State that was loaded before this hook was registered.
    for parameter, place in shards.values():
        state = optimizer.state.get(parameter, {})
        state.update({key: _part_of(value, parameter, place) for key, value in state.items()})


register_optimizer_step_pre_hook(watch)
