"""The state of training as tensors under the names of the whole model.

Experts have their global index, columns of a layer have their place in the whole layer, and
optimizer states have the name of their parameter. A job with another number of ranks can therefore
load the state.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from moe_ext.comm.c10d import inner_model
from moe_ext.distributed.dtensor import divided_as, is_dtensor, state_dicts_of_parts
from moe_ext.distributed.placement import (
    ExpertShards,
    Placement,
    logical_names,
    placed_parameters,
    sharded_buffers,
    sharded_parameters,
)
from moe_ext.distributed.state_dict import (
    OF_RANKS,
    ChecksOptions,
    ParameterStates,
    SavesByParameter,
    TakesOver,
    unwrapped,
    whole_of,
)

MODEL = "model."
# Options of a parameter's group, as bytes of JSON, so that reading them unpickles nothing.
OPTIONS = "optimizer_options."
_STATE = "optimizer."
# Python numbers in the states of parameters, and counters of an optimizer.
_NUMBER = "optimizer_number."
_COUNTER = "optimizer_counter."
# Entries of a group that are no options, or that depend on how this job keeps its state.
_NO_OPTIONS = {"params", "param_names", "name", "exp_avg_mask", "float32_state"}
# Parts that torch's `checkpoint_wrapper` and `torch.compile` add to names of parameters. State
# dicts do not have the part of `checkpoint_wrapper`.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

_T = TypeVar("_T")


class TrainingState:
    """Model and optimizers as tensors under the names of the whole model.

    Experts and their optimizer states are DTensors. `torch.distributed.checkpoint` saves
    `state_dict()`, and loads into `empty(...)`. The 1-bit optimizers save the mean of the ranks'
    residuals, which becomes the residual of each rank that loads it. With `DeMo` each rank loads
    its own momentum if the number of ranks is equal, and the mean otherwise.

    Options of parameter groups (learning rates, decays, entries of schedulers) are saved by
    parameter; a group loads the options of its parameters. If ranks hold different experts, single
    numbers in the state of a parameter, such as a count of steps, are those of one rank.

    Args:
        model: any module.
        optimizers: optimizers of its parameters; none to save the model alone.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> None:
        self._model = inner_model(model)
        given = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        self._optimizers = [unwrapped(optimizer, "checkpoint") for optimizer in given]
        # Optimizer to second result of its `tensors_to_load`.
        self._holders: dict[Optimizer, object] = {}
        sharded_parameters(self._model)  # the call notes placements on the parameters

    @state_dicts_of_parts()
    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors; all ranks must call it.

        Extra state of a module (`get_extra_state`) that is no tensor is in a tuple of one element.

        Raises:
            ValueError: it is not declared how a parameter is divided over ranks, or unclear how an
                optimizer's tensor is. Or an optimizer is between two synchronisations. Or its state
                has a tensor larger than the parameter, or a value that is neither a tensor nor a
                number. Or two optimizers hold a parameter.
        """
        state = {MODEL + name: value for name, value in self._model_values().items()}
        names, places = self._names(), self._placements()
        self._held(names)
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                written = _written(group)
                for parameter in group["params"]:
                    state[f"{OPTIONS}{names[parameter]}"] = written
            states, counters = _states_of(optimizer)
            for key, count in counters.items():
                state[f"{_COUNTER}{index}.{key}"] = torch.tensor(count)
            for parameter, entries in states.items():
                name, place = _name_of(parameter, names), places.get(parameter)
                for key, value in entries.items():
                    if isinstance(value, Tensor) and _fits(key, value.shape, parameter):
                        state[f"{_STATE}{key}.{name}"] = whole_of(value, parameter, place, name)
                    elif isinstance(value, int | float):
                        dtype = torch.float64 if isinstance(value, float) else None
                        state[f"{_NUMBER}{key}.{name}"] = torch.tensor(value, dtype=dtype)
                    elif value is not None:
                        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                        raise ValueError(
                            f"checkpoint: expected {key} of {name} in the state of an optimizer to "
                            f"be a number or a tensor no larger than {name}, got "
                            f"{shape or type(value).__name__}; save the optimizer in `extra`"
                        )
        return state

    def empty(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load a checkpoint into; model and optimizers do not change.

        Args:
            saved: name to an object with `size` and `properties.dtype`, as in
                `Metadata.state_dict_metadata` of torch.distributed.checkpoint.

        Returns:
            Tensors of the model, and of those optimizer states that the checkpoint has.

        Raises:
            ValueError: the checkpoint lacks a parameter of the optimizers.

        Warns:
            UserWarning: the checkpoint has no options of parameter groups.
        """
        return self._destinations(saved, live=False)

    @state_dicts_of_parts()
    def _destinations(self, saved: Mapping[str, Any], *, live: bool) -> dict[str, Any]:
        """See `empty`; with `live`, existing tensors of model and optimizers are returned."""
        # Earlier versions saved names with the part that `torch.compile` adds.
        as_saved = {**{_bare(name): name for name in saved}, **{name: name for name in saved}}
        found = self._bare_destinations({n: saved[old] for n, old in as_saved.items()}, live=live)
        return {as_saved.get(name, name): value for name, value in found.items()}

    def _bare_destinations(self, saved: Mapping[str, Any], *, live: bool) -> dict[str, Any]:
        """See `_destinations`; for names without the parts of wrappers."""
        state = {
            MODEL + name: value if live or isinstance(value, tuple) else torch.zeros_like(value)
            for name, value in self._model_values().items()
        }
        if not self._optimizers:
            return state
        places, names = self._placements(), self._names()
        parameters = {name: parameter for parameter, name in names.items()}
        for name in _with_options(self._held(names), saved):
            entry = saved[f"{OPTIONS}{name}"]
            state[f"{OPTIONS}{name}"] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        states: ParameterStates = {}
        for optimizer in self._optimizers:
            found: Any = optimizer.state if live else {}
            if isinstance(optimizer, SavesByParameter):
                owing = live and any(name.startswith(f"{_STATE}owed.") for name in saved)
                found, holders = optimizer.tensors_to_load(owing)
                if live:
                    self._holders[optimizer] = holders
                else:
                    found = {p: _of_ranks(state) for p, state in found.items()}
            states.update(found)
        for full_name, entry in saved.items():
            kind, _, rest = full_name.partition(".")
            if kind + "." == _COUNTER:
                state[full_name] = torch.zeros((), dtype=entry.properties.dtype)
            key, _, name = rest.partition(".")
            parameter = parameters.get(name)
            if kind + "." not in (_STATE, _NUMBER) or parameter is None:
                continue
            place, size, dtype = places.get(parameter), entry.size, entry.properties.dtype
            if key.endswith(OF_RANKS):
                own = states.get(parameter, {}).get(key)
                if isinstance(own, Tensor) and own.shape == size:
                    state[full_name] = own
                continue
            if not _fits(key, size, parameter):
                raise ValueError(
                    f"checkpoint: expected {full_name} to be no larger than its parameter, got "
                    f"shape {tuple(size)}"
                )
            if len(size) == 0:
                state[full_name] = torch.zeros((), dtype=dtype)
                continue
            if isinstance(place, ExpertShards) and size.numel() < parameter.numel():
                continue  # flags of rows; 1-bit optimizers compute them from the moments
            shape = parameter.shape if _is_of(size, parameter, place) else size
            local = states.get(parameter, {}).get(key)
            if not isinstance(local, Tensor) or not _is_like(local, parameter, shape, dtype):
                local = _zeros(shape, parameter, dtype)
            state[full_name] = whole_of(local, parameter, place, full_name)
        return state

    @state_dicts_of_parts()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load tensors into the model and the optimizers; all ranks must call it.

        Optimizers keep tensors of the right dtype without a copy.

        Raises:
            ValueError: an optimizer does not know an option in the state, or parameters of a group
                were saved with different options. Nothing is changed.
        """
        state = _by_bare_name(state)
        options = self._options(state)
        here = {whole: name for name, whole in self._logical_names().items()}
        own_names = {_bare(name): name for name in self._model.state_dict()}
        placed, values = _by_bare_name(placed_parameters(self._model)), {}
        for full_name, tensor in state.items():
            if full_name.startswith(MODEL):
                whole = full_name.removeprefix(MODEL)
                name = here.get(whole, whole)
                parameter, place = placed.get(name, (None, None))
                value = tensor[0] if isinstance(tensor, tuple) else _local(tensor, place, parameter)
                values[own_names.get(name, name)] = value
        self._model.load_state_dict(values)
        for group, found_options in options:
            group.update(found_options)
        names, own, saved = self._names(), self._placements(), _by_parameter(state)
        for index, optimizer in enumerate(self._optimizers):
            states: ParameterStates = {}
            for parameter in _parameters_of(optimizer):
                found, place = saved.get(_name_of(parameter, names), {}), own.get(parameter)
                states[parameter] = {
                    key: _local(value, place, parameter) if isinstance(value, Tensor) else value
                    for key, value in found.items()
                }
            prefix = f"{_COUNTER}{index}."
            counters = {
                name.removeprefix(prefix): int(value)
                for name, value in state.items()
                if name.startswith(prefix)
            }
            held = {p: s for p, s in states.items() if s}
            _load_states(optimizer, held, counters, self._holders.pop(optimizer, None))

    def _options(self, state: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (group, options to load) for each group of the optimizers.

        Raises:
            ValueError: see `load_state_dict`.
        """
        names, found, state = self._names(), [], _by_bare_name(state)
        for optimizer in self._optimizers:
            groups = []
            for group in optimizer.param_groups:
                whose = [_name_of(parameter, names) for parameter in group["params"]]
                options: dict[str, Any] = {}
                for number, name in enumerate(n for n in whose if f"{OPTIONS}{n}" in state):
                    read = json.loads(bytes(state[f"{OPTIONS}{name}"].tolist()))
                    if number and read != options:
                        key = min(k for k in {*options, *read} if options.get(k) != read.get(k))
                        raise ValueError(
                            "checkpoint: expected parameters of a group to have been saved with "
                            f"the same options, got {key}={options.get(key)} for {whose[0]} and "
                            f"{key}={read.get(key)} for {name}"
                        )
                    options = read
                if options and not isinstance(optimizer, ChecksOptions):
                    _check_class(optimizer, options)
                groups.append((group, {k: _typed(v, group.get(k)) for k, v in options.items()}))
            if isinstance(optimizer, ChecksOptions):
                optimizer._check_groups([{**group, **options} for group, options in groups])
            found += groups
        return found

    def _held(self, names: Mapping[nn.Parameter, str]) -> list[str]:
        """Return the names of all optimizers' parameters; ValueError if two share one."""
        held: dict[str, None] = {}
        for parameter in (p for optimizer in self._optimizers for p in _parameters_of(optimizer)):
            name = _name_of(parameter, names)
            if name in held:
                raise ValueError(
                    f"checkpoint: expected each parameter in one optimizer, got {name} in two; "
                    "save the state dict of the other one in `extra`"
                )
            held[name] = None
        return list(held)

    def _names(self) -> dict[nn.Parameter, str]:
        whole, named = self._logical_names(), dict(self._model.named_parameters())
        return {p: whole.get(name, name) for name, p in _by_bare_name(named).items()}

    def _logical_names(self) -> dict[str, str]:
        """Return names of the model's state dict, to names with global indices of experts."""
        names = logical_names(self._model)
        return {_bare(name): _bare(whole) for name, whole in names.items()}

    def _placements(self) -> dict[nn.Parameter, Placement]:
        return dict(placed_parameters(self._model).values())

    def _model_values(self) -> dict[str, Any]:
        """Return whole tensors of the state dict by logical names, and other values in tuples."""
        buffers, parameters = sharded_buffers(self._model), placed_parameters(self._model)
        placed = _by_bare_name({**buffers, **parameters})
        whole_names, found = self._logical_names(), dict[str, Any]()
        for name, value in _by_bare_name(self._model.state_dict()).items():
            if not isinstance(value, Tensor):
                # torch's planners flatten mappings and lists, but leave a tuple as one value.
                found[whole_names.get(name, name)] = (value,)
                continue
            if name in placed:
                value = whole_of(value, *placed[name], name)
            found[whole_names.get(name, name)] = value.detach()
        return found


def _bare(name: str) -> str:
    """Return the name in a checkpoint for a name in the model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _by_bare_name(named: Mapping[str, _T]) -> dict[str, _T]:
    return {_bare(name): value for name, value in named.items()}


def split_dim(whole: torch.Size, split: torch.Size) -> int | None:
    """Return the dimension of `whole` that `split` has as (2, half of its length), or None."""
    dims = range(len(whole) if len(split) == len(whole) + 1 else 0)
    fits = [d for d in dims if (*split[:d], 2 * split[d + 1], *split[d + 2 :]) == whole]
    return next((d for d in reversed(fits) if split[d] == 2), None)


def _is_like(value: Tensor, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return True if a tensor has this shape and dtype, and is divided like the parameter."""
    if value.shape != shape or value.dtype != dtype:
        return False
    if is_dtensor(value) and is_dtensor(parameter):
        return value.placements == parameter.placements
    return is_dtensor(value) == is_dtensor(parameter)


def _fits(key: str, size: torch.Size, parameter: Tensor) -> bool:
    """Return True for a tensor no larger than its parameter, or with a part for each rank."""
    return key.endswith(OF_RANKS) or size.numel() <= max(1, parameter.numel())


def _is_of(size: torch.Size, parameter: Tensor, place: Placement | None) -> bool:
    """Return True if a saved tensor has the parameter's shape, possibly as changed by `shown`."""
    # Each expert is a module, and a rank's parameter is that of a single expert.
    if place is not None and place.dim is None and place.num_parts > 1:
        return size.numel() * place.num_parts == parameter.numel()
    pieces = place is not None and place.pieces[1] > 1
    if size == parameter.shape or (pieces and size.numel() == parameter.numel()):
        return True
    return place is not None and split_dim(parameter.shape, size) is not None


def _zeros(shape: torch.Size, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Make zeros that are divided like a parameter, along the dimensions that they share."""
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return divided_as(torch.zeros(shape, dtype=dtype, device=parameter.device), parameter)


def _local(value: Tensor, place: Placement | None, parameter: Tensor | None) -> Tensor:
    """Return this rank's part of a loaded tensor; inverse of `whole_of`."""
    if place is None or value.dim() == 0 or parameter is None:
        return value
    return place.taken(value, parameter)


def _of_ranks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter's state that have a part for each rank."""
    return {key: value for key, value in state.items() if key.endswith(OF_RANKS)}


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise ValueError(
            "checkpoint: expected optimizers to hold parameters of the model, got one of shape "
            f"{tuple(parameter.shape)} that is not"
        )
    return names[parameter]


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states_of(optimizer: Optimizer) -> tuple[ParameterStates, dict[str, int]]:
    if isinstance(optimizer, SavesByParameter):
        return optimizer.checkpoint_state()
    return {p: dict(optimizer.state.get(p, {})) for p in _parameters_of(optimizer)}, {}


def _load_states(
    optimizer: Optimizer, states: ParameterStates, counters: Mapping[str, int], holders: object
) -> None:
    if isinstance(optimizer, SavesByParameter):
        optimizer.load_checkpoint_state(states, counters, holders)
        return
    numbers = {p: number for number, p in enumerate(_parameters_of(optimizer))}
    saved = optimizer.state_dict()
    saved["state"] = {numbers[parameter]: state for parameter, state in states.items()}
    if isinstance(optimizer, TakesOver):
        optimizer.take_over(saved)
    else:
        optimizer.load_state_dict(saved)


def _written(group: Mapping[str, Any]) -> Tensor:
    """Return the options of a parameter group as bytes, and warn of options that JSON lacks."""
    options = {}
    for name, value in group.items():
        if name in _NO_OPTIONS:
            continue
        try:
            options[name] = json.loads(json.dumps(value, default=_number))
        except (TypeError, ValueError):
            warnings.warn(
                f"checkpoint: the option {name!r} of a parameter group is not saved, being of type "
                f"{type(value).__name__}",
                stacklevel=4,
            )
    return torch.frombuffer(
        bytearray(json.dumps(options, sort_keys=True).encode()), dtype=torch.uint8
    )


def _check_class(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the saved options lack one of this optimizer, which is another class."""
    for name, value in optimizer.defaults.items():
        # New versions of torch add flags, so a missing flag is accepted.
        is_flag = isinstance(value, bool | None)
        if not is_flag and name not in options and name not in _NO_OPTIONS:
            raise ValueError(
                f"checkpoint: expected optimizers to be of the classes that were saved, got "
                f"{type(optimizer).__name__} for one without {name}"
            )


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element, or in a scalar of numpy."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(type(value).__name__)


def _typed(value: Any, like: Any) -> Any:
    """Convert an option that was read to the type of this optimizer's option."""
    if isinstance(like, Tensor):
        return torch.full_like(like, value)
    if isinstance(value, list) and not isinstance(like, list):
        likes = like if isinstance(like, tuple) and len(like) == len(value) else [None] * len(value)
        return tuple(_typed(item, old) for item, old in zip(value, likes, strict=True))
    return value


def _with_options(held: list[str], saved: Mapping[str, Any]) -> list[str]:
    """Return the parameters whose options a checkpoint has: all given ones, or none.

    Raises:
        ValueError: the checkpoint has the options of some of them only.
    """
    if any(name.startswith(OPTIONS) for name in saved):
        for name in held:
            if f"{OPTIONS}{name}" not in saved:
                raise ValueError(
                    f"checkpoint: expected one whose optimizers held {name}, got one whose "
                    "optimizers did not"
                )
        return held
    known = {n.partition(".")[2].partition(".")[2] for n in saved if not n.startswith(MODEL)}
    missing = "options of parameter groups"
    if held and not known:
        missing = "options and states of optimizers"
    elif fresh := [name for name in held if name not in known]:
        missing = f"options of parameter groups, and no state of {fresh[0]}"
    warnings.warn(
        f"checkpoint: the checkpoint has no {missing}: learning rates and other options stay those "
        "of the optimizers here; where a scheduler is loaded too, set the 'lr' of each group to "
        "what its get_last_lr() says",
        stacklevel=4,
    )
    return []


def _by_parameter(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name of a parameter, to key, to value."""
    found: dict[str, dict[str, Any]] = {}
    for full_name, tensor in state.items():
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if kind + "." == _STATE:
            found.setdefault(name, {})[key] = tensor
        elif kind + "." == _NUMBER:
            found.setdefault(name, {})[key] = tensor.item()
    return found
