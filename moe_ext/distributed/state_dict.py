"""State dicts of models and optimizers whose parameters are divided over ranks.

`state_dict()` holds DTensors, for `torch.distributed.checkpoint`. They cannot be pickled, because
the file of a rank would hold only its own part, but look complete. Inside `whole_state_dicts`,
`state_dict()` holds plain whole tensors instead.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ext._checks import check_kind
from moe_ext.comm.agreement import meet
from moe_ext.comm.groups import global_rank
from moe_ext.distributed.dtensor import (
    divided_as,
    is_dtensor,
    keeping_wholes,
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

# Optimizers that a `whole_state_dicts` context has hooked.
_showing: weakref.WeakSet[Optimizer] = weakref.WeakSet()

ParameterStates = dict[nn.Parameter, dict[str, Any]]

# End of the name of a tensor [P, ...] in a parameter's state that stacks a separate tensor of each
# rank. Only a job with the same number of ranks loads it.
OF_RANKS = "_of_ranks"


@runtime_checkable
class SavesByParameter(Protocol):
    """Optimizer that saves more than a state per parameter that is equal on all of its ranks."""

    def checkpoint_state(self) -> tuple[ParameterStates, dict[str, int]]:
        """Return states that are equal on all ranks of a parameter, and counters; collective.

        A state holds numbers, and tensors whose first dimensions are those of the parameter. It may
        also hold DTensors [P, ...] that stack the ranks' own tensors, named `...` + `OF_RANKS`.
        """

    def tensors_to_load(self, owing: bool) -> tuple[ParameterStates, object]:
        """Return tensors to read a checkpoint into, and the objects that hold these tensors.

        Args:
            owing: the checkpoint has residuals.
        """

    def load_checkpoint_state(
        self, states: ParameterStates, counters: Mapping[str, int], holders: object
    ) -> None:
        """Load a result of `checkpoint_state`, on any number of ranks.

        The optimizer keeps the tensors. `holders` is the second result of `tensors_to_load`.
        """


@runtime_checkable
class TakesOver(Protocol):
    """Optimizer that can keep the tensors of a state, which its `load_state_dict` copies."""

    def take_over(self, state_dict: dict[str, Any]) -> None:
        """Load a state with numbers of parameters as keys, without copying tensors."""


@runtime_checkable
class ChecksOptions(Protocol):
    """Optimizer that refuses options which it does not know."""

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for unknown options of parameter groups; changes nothing."""


@contextlib.contextmanager
def whole_state_dicts(*optimizers: Optimizer, keep: bool | None = None) -> Iterator[None]:
    """Have `state_dict()` of models and optimizers hold whole tensors, for tools that save them.

    Inside the context, `state_dict()` is collective: all ranks call it, as Accelerate does, and one
    rank writes the result. Experts, columns of layers, and their optimizer states become plain
    tensors on the CPU, as in one process. A job of any number of ranks can load them. A model's
    `load_state_dict` may be called anywhere. That of an optimizer of `torch.optim` must be called
    inside this context, with the optimizer as an argument. Other parameters that FSDP2 shards
    remain DTensors.

    Args:
        optimizers: optimizers of `torch.optim`, possibly wrapped by a tool, to save or load.
        keep: True if this rank gets whole tensors, False if it gets empty ones. None means True on
            rank 0 only.

    Raises:
        TypeError: an argument is no optimizer.
    """
    with contextlib.ExitStack() as stack:
        for given in optimizers:
            optimizer = unwrapped(given, "whole_state_dicts")
            # Optimizers that are `SavesByParameter` convert their states themselves.
            if not isinstance(optimizer, SavesByParameter) and optimizer not in _showing:
                _showing.add(optimizer)
                stack.callback(_showing.discard, optimizer)
                for hook in (
                    optimizer.register_state_dict_post_hook(show_states),
                    optimizer.register_load_state_dict_pre_hook(take_states),
                ):
                    stack.callback(hook.remove)
        stack.enter_context(keeping_wholes(global_rank() == 0 if keep is None else keep))
        yield


def unwrapped(optimizer: Any, operation: str) -> Optimizer:
    """Return the optimizer inside wrappers of Accelerate and Lightning; TypeError if none is."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    check_kind(operation, "optimizers", optimizer, Optimizer, required=True)
    return optimizer


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model as one process would hold it, on every rank.

    One rank may write the result by `torch.save` or `save_pretrained(dir, state_dict=...)`. A model
    on any number of ranks takes its part of it by `load_state_dict`.

    Args:
        model: any module; its experts may be spread over ranks.

    Returns:
        `model.state_dict()`, detached. Whole tensors, which are copies, replace DTensors.

    Raises:
        RuntimeError: a rank of the groups did not call it within a minute.
        RankFailureError: a rank died.

    Collective: every rank of the groups that hold parts calls it, and gets whole tensors.
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
    """Replace the DTensors of a state dict by whole tensors; collective.

    Args:
        model: the model of the state.
        state: result of `model.state_dict()`, or a part of it.
        operation: name for error messages.
        hint: end of the error message for a rank that does not call this, with the remedy.
        keep: False for a rank that only takes part, and gets an empty result.
        device: device of the result; None keeps the device of each tensor.
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
    """Return a parameter's tensor as `state_dict()` shows it, a DTensor if it is divided.

    The tensor has the parameter's shape, or only its first dimension.
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
    """Return this rank's part of a loaded value: a DTensor, a whole tensor, or already the part."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    found = place.taken(value, parameter)
    # Factored moments have only some dimensions of the parameter.
    return found if is_dtensor(found) else divided_as(found, parameter)


def _shards_of(optimizer: Optimizer) -> dict[int, tuple[Tensor, Placement]]:
    """Return number to (parameter, placement), for parameters that are divided over ranks."""
    parameters = enumerate(p for group in optimizer.param_groups for p in group["params"])
    found = {number: (p, known_shard(p)) for number, p in parameters}
    return {number: (p, place) for number, (p, place) in found.items() if place is not None}


def show_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook of `state_dict()` that replaces parts by whole tensors, see `whole_state_dicts`."""
    state = dict(state_dict["state"])
    for number, (parameter, place) in _shards_of(optimizer).items():
        if number in state:
            state[number] = {
                key: _shown(value, parameter, place, f"parameter {number}")
                for key, value in state[number].items()
            }
    return {**state_dict, "state": state}


def take_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook of `load_state_dict()` that takes this rank's parts of a state."""
    # Saved keys are names or numbers, in the order of this optimizer's parameters.
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for number, (parameter, place) in _shards_of(optimizer).items():
        if number < len(saved) and saved[number] in state:
            values = state[saved[number]].items()
            state[saved[number]] = {k: _part_of(v, parameter, place) for k, v in values}
    return {**state_dict, "state": state}
