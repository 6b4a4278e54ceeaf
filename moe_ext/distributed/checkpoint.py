"""Checkpoints by `torch.distributed.checkpoint` that fit any number of ranks.

They speak of the whole model: of experts by their global index, of the columns of a layer wherever
they lie, and of optimizer states by the name of the parameter. So what a job of one shape saved,
a job of another shape loads.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_kind
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import RankFailureError, first_line, naming_failed_ranks
from moe_ext.comm.groups import is_initialized, resolve_group
from moe_ext.distributed.dtensor import divided_as, is_dtensor, state_dicts_of_parts
from moe_ext.distributed.placement import (
    ExpertShards,
    Placement,
    logical_names,
    placements,
    sharded_buffers,
    sharded_parameters,
)
from moe_ext.distributed.state_dict import (
    OF_RANKS,
    ChecksOptions,
    ParameterStates,
    SavesByParameter,
    TakesOver,
    whole_of,
)

_MODEL = "model."
_STATE = "optimizer."
# Python's numbers in the states of parameters, and the counters of an optimizer.
_NUMBER = "optimizer_number."
_COUNTER = "optimizer_counter."
# Options of the group of a parameter, as bytes of JSON: whoever reads them unpickles nothing.
_OPTIONS = "optimizer_options."
# Entries of a group that are no options, or that say in which form this job keeps its state.
_NO_OPTIONS = {"params", "param_names", "name", "exp_avg_mask", "float32_state"}
# Part of parameters' names that torch's `checkpoint_wrapper` adds, and leaves out of state dicts.
_WRAPPER = "_checkpoint_wrapped_module."

_HALF_WAY = "model and optimizers hold parts of two states now: load again before going on"

_T = TypeVar("_T")

# Saves of `async_save` that are being written.
_underway: list[Future[None]] = []


class TrainingState:
    """Model and optimizers as tensors under the names of the whole model.

    Experts, and what optimizers hold of them, are DTensors. `torch.distributed.checkpoint` takes
    `state_dict()`, and loads into `empty(...)`. The 1-bit optimizers save the mean over ranks of
    what they owe, and each rank of the next job owes it. Of `DeMo`, each of as many ranks gets its
    own momentum back; of another number, each gets the mean.

    Options of parameter groups (learning rates, decays, what schedulers keep there) are saved by
    parameter; a group that loads takes those of its parameters. Where ranks hold experts, single
    numbers in the state of a parameter (a count of steps) are those of one of them.

    Args:
        model: any module.
        optimizers: of its parameters; none for the model alone.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._optimizers = given
        # By optimizer, what holds tensors that are loaded into.
        self._holders: dict[Optimizer, object] = {}
        sharded_parameters(self._model)  # notes them

    @state_dicts_of_parts()
    def state_dict(self) -> dict[str, Any]:
        """The live tensors; all ranks must call it.

        Extra state of a module (`get_extra_state`) that is no tensor is in a tuple of one.

        Raises:
            ValueError: a parameter is divided over ranks in a way that was not declared, or an
                optimizer's state does not tell how it is; or an optimizer is between two
                synchronisations; or two optimizers hold a parameter.
        """
        state = {_MODEL + name: value for name, value in self._model_values().items()}
        names, places = self._names(), self._placements()
        self._held(names)
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                written = _written(group)
                for parameter in group["params"]:
                    state[f"{_OPTIONS}{names[parameter]}"] = written
            states, counters = _states_of(optimizer)
            for key, count in counters.items():
                state[f"{_COUNTER}{index}.{key}"] = torch.tensor(count)
            for parameter, entries in states.items():
                name, place = _name_of(parameter, names), places.get(parameter)
                for key, value in entries.items():
                    if isinstance(value, Tensor):
                        state[f"{_STATE}{key}.{name}"] = whole_of(value, parameter, place, name)
                    elif isinstance(value, int | float):
                        state[f"{_NUMBER}{key}.{name}"] = torch.tensor(value)
        return state

    def empty(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors to load a checkpoint into; nothing live is touched.

        Args:
            saved: name to an object with `size` and `properties.dtype`, as in
                `Metadata.state_dict_metadata` of torch.distributed.checkpoint.

        Returns:
            Tensors of the model, and the optimizer's states that the checkpoint has.

        Raises:
            ValueError: the optimizers of the checkpoint lack a parameter of those here.

        Warns:
            UserWarning: the checkpoint has no options of parameter groups.
        """
        return self._destinations(saved, live=False)

    @state_dicts_of_parts()
    def _destinations(self, saved: Mapping[str, Any], *, live: bool) -> dict[str, Any]:
        """See `empty`; with `live` those that are there already are themselves."""
        state = {
            _MODEL + name: value if live or isinstance(value, tuple) else torch.zeros_like(value)
            for name, value in self._model_values().items()
        }
        if not self._optimizers:
            return state
        places, names = self._placements(), self._names()
        parameters = {name: parameter for parameter, name in names.items()}
        for name in _with_options(self._held(names), saved):
            entry = saved[f"{_OPTIONS}{name}"]
            state[f"{_OPTIONS}{name}"] = torch.zeros(entry.size, dtype=entry.properties.dtype)
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
            if size.numel() > max(1, parameter.numel()):
                raise ValueError(
                    f"checkpoint: expected {full_name} to be no larger than its parameter, got "
                    f"shape {tuple(size)}"
                )
            if len(size) == 0:
                state[full_name] = torch.zeros((), dtype=dtype)
                continue
            if isinstance(place, ExpertShards) and size.numel() < parameter.numel():
                continue  # rows that 1-bit optimizers find out anew
            shape = parameter.shape if _is_of(size, parameter, place) else size
            local = states.get(parameter, {}).get(key)
            if not isinstance(local, Tensor) or not _is_like(local, parameter, shape, dtype):
                local = _zeros(shape, parameter, dtype)
            state[full_name] = whole_of(local, parameter, place, full_name)
        return state

    @state_dicts_of_parts()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put loaded tensors into the model and the optimizers; all ranks must call it.

        Optimizers keep those of the right type.

        Raises:
            ValueError: an optimizer does not know an option that the state has, or parameters of a
                group had different ones; nothing has changed.
        """
        options = self._options(state)
        here = {whole: name for name, whole in self._logical_names().items()}
        places = _by_bare_name(placements(self._model))
        by_name, values = _by_bare_name(dict(self._model.named_parameters())), {}
        for full_name, tensor in state.items():
            if full_name.startswith(_MODEL):
                whole = full_name.removeprefix(_MODEL)
                name = here.get(whole, whole)
                alone = isinstance(tensor, tuple)
                values[name] = (
                    tensor[0] if alone else _local(tensor, places.get(name), by_name.get(name))
                )
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
        """Groups of the optimizers, and the options that each takes over; see `load_state_dict`."""
        names, found = self._names(), []
        for optimizer in self._optimizers:
            groups = []
            for group in optimizer.param_groups:
                whose = [_name_of(parameter, names) for parameter in group["params"]]
                options: dict[str, Any] = {}
                for number, name in enumerate(n for n in whose if f"{_OPTIONS}{n}" in state):
                    read = json.loads(bytes(state[f"{_OPTIONS}{name}"].tolist()))
                    if number and read != options:
                        key = min(k for k in {*options, *read} if options.get(k) != read.get(k))
                        raise ValueError(
                            "checkpoint: expected parameters of a group to have been saved with "
                            f"the same options, got {key}={options.get(key)} for {whose[0]} and "
                            f"{key}={read.get(key)} for {name}"
                        )
                    options = read
                groups.append((group, {k: _typed(v, group.get(k)) for k, v in options.items()}))
            if isinstance(optimizer, ChecksOptions):
                optimizer._check_groups([{**group, **options} for group, options in groups])
            found += groups
        return found

    def _held(self, names: Mapping[nn.Parameter, str]) -> list[str]:
        """Names of the parameters of all optimizers."""
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
        """Names of the model's state dict, to those that count the experts of all ranks."""
        names = logical_names(self._model)
        return {_bare(name): _bare(whole) for name, whole in names.items()}

    def _placements(self) -> dict[nn.Parameter, Placement]:
        parameters = dict(self._model.named_parameters())
        return {parameters[name]: place for name, place in placements(self._model).items()}

    def _model_values(self) -> dict[str, Any]:
        """Tensors of the model's state dict, whole, under their logical names; others in tuples."""
        places, whole_names = _by_bare_name(placements(self._model)), self._logical_names()
        parameters = _by_bare_name(dict(self._model.named_parameters()))
        buffers = _by_bare_name(sharded_buffers(self._model))
        found: dict[str, Any] = {}
        for name, value in self._model.state_dict().items():
            if not isinstance(value, Tensor):
                # In a tuple, into which torch's planners do not look.
                found[whole_names.get(name, name)] = (value,)
                continue
            if name in parameters and name in places:
                value = whole_of(value, parameters[name], places[name], name)
            elif name in buffers:
                value = whole_of(value, *buffers[name], name)
            found[whole_names.get(name, name)] = value.detach()
        return found


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint that fits any number of ranks; all ranks must call it.

    Args:
        path: folder that all ranks share.
        model: see `TrainingState`.
        optimizers: one, or several, or none.
        extra: more to save, by names of their own, such as a scheduler's `state_dict()`.
        options: passed on to `torch.distributed.checkpoint.save`, such as `storage_writer`.

    Raises:
        ValueError: on every rank: see `TrainingState.state_dict`.
        RuntimeError: on every rank: a rank could not write, for a full disk for instance.
        RankFailureError: a rank died or did not answer.

    Warns:
        UserWarning: what is in `extra` differs between ranks under one name, of which a checkpoint
            keeps that of one rank.

    A checkpoint that is in the folder stays whole until this one is, and is then replaced by it:
    wherever ranks die, one of the two is there.
    """
    # Not at the top: it takes a second to import.
    from torch.distributed.checkpoint import state_dict_saver

    state = _to_save("checkpoint.save", path, model, optimizers, extra, options)
    with _plain_errors("checkpoint.save"):
        state_dict_saver.save(state, checkpoint_id=path, no_dist=not is_initialized(), **options)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Future[None]:
    """Copy what `save` writes, and write it while training goes on; all ranks must call it.

    Messages go over a group of their own. The next call that saves or loads waits for the files.

    Args:
        path: see `save`.
        model: see `save`.
        optimizers: see `save`.
        extra: see `save`.
        options: passed on to `torch.distributed.checkpoint.async_save`.

    Returns:
        Done when the checkpoint is whole, on all ranks; `result()` raises what kept it from that,
        as `save` does.

    Raises:
        ValueError: see `save`.
        RankFailureError: a rank died or did not answer.
    """
    from torch.distributed.checkpoint import state_dict_saver

    state = _to_save("checkpoint.async_save", path, model, optimizers, extra, options)
    if is_initialized():
        options.setdefault("process_group", collectives.host_group())
    found: Any = state_dict_saver.async_save(
        state, checkpoint_id=path, no_dist=not is_initialized(), **options
    )
    written: Future[None] = Future()

    def finish(upload: Future[Any]) -> None:
        try:
            with _plain_errors("checkpoint.async_save"):
                upload.result()
        except BaseException as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    # With a stager that copies by itself there are two futures.
    upload: Future[Any] = getattr(found, "upload_completion", found)
    upload.add_done_callback(finish)
    _underway[:] = [written]
    return written


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Load a checkpoint that a job of any number of ranks saved; all ranks must call it.

    Args:
        path: folder that all ranks share.
        model: of the same parameters as a whole; its experts may be spread otherwise.
        optimizers: of the same classes; they may be new.
        extra: filled in place by all that was saved under the names that are in it.
        options: passed on to `torch.distributed.checkpoint.load`, such as `storage_reader`.

    Raises:
        ValueError: on every rank: the checkpoint lacks a tensor of the model, or its optimizers a
            parameter of those here; or see `TrainingState.load_state_dict`. Nothing has changed.
        RuntimeError: on every rank: a tensor has another shape, or a file is not whole, and nothing
            has changed; or a file could not be read later on.
        RankFailureError: a rank died or did not answer.

    Warns:
        UserWarning: the checkpoint has no options of parameter groups, since an earlier version
            saved it: learning rates stay those of the optimizers here.

    Tensors are read into the parameters, and into the moments where there are such, by pieces of
    8 MiB. A failure after ranks have begun to read leaves parts of two states behind, and the error
    says so.
    """
    from torch.distributed.checkpoint import state_dict_loader

    from moe_ext.distributed.checkpoint_files import SliceReader

    _check_kinds("checkpoint.load", path, model)
    wait(_underway)
    given = options.pop("storage_reader", None)
    reader = given or SliceReader(path)
    training = TrainingState(model, optimizers)
    with _on_every_rank("checkpoint.load", options):
        if given is None and not Path(path, ".metadata").exists():
            raise FileNotFoundError(
                f"checkpoint.load: expected path to be a folder with a whole checkpoint, got {path}"
                ", which has no .metadata"
            )
        metadata = reader.read_metadata()
        saved: Mapping[str, Any] = metadata.state_dict_metadata
    with _on_every_rank("checkpoint.load", options):
        state: dict[str, Any] = training._destinations(saved, live=True)
        for name in sorted(state.keys() - saved.keys()):
            name = name.removeprefix(_MODEL)
            raise ValueError(
                f"checkpoint.load: expected a checkpoint with {name}, got one without it"
            )
    # First what may be refused: nothing live is touched by it.
    first = {name: tensor for name, tensor in state.items() if name.startswith(_OPTIONS)}
    if any(name.startswith(_OPTIONS) for name in saved):
        with _plain_errors("checkpoint.load", lambda: "nothing has changed"):
            state_dict_loader.load(
                first,
                storage_reader=given or SliceReader(path),
                no_dist=not is_initialized(),
                **options,
            )
        with _on_every_rank("checkpoint.load", options):
            training._options(first)
    more = {} if extra is None else _with_all_saved(extra, saved, metadata.planner_data)
    found = {**{name: value for name, value in state.items() if name not in first}, **more}
    for name, tensor in state.items():
        if isinstance(tensor, tuple):
            continue
        # Ranks that share each expert show the gates and the ups as two pieces; others do not.
        shape, size = tensor.shape, saved[name].size
        if (dim := _split_dim(shape, size)) is not None:
            found[name] = tensor.unflatten(dim, size[dim : dim + 2])
        elif (dim := _split_dim(size, shape)) is not None and isinstance(reader, SliceReader):
            reader.split(name, dim, (shape[dim], shape[dim + 1]))

    def means() -> str:
        return _HALF_WAY if getattr(reader, "begun", True) else "nothing has changed"

    with _plain_errors("checkpoint.load", means):
        state_dict_loader.load(
            found, storage_reader=reader, no_dist=not is_initialized(), **options
        )
    alone = {name: found[name] for name, value in state.items() if isinstance(value, tuple)}
    training.load_state_dict({**state, **alone})
    if extra is not None:
        extra.update({name: found[name] for name in more})


def _to_save(
    operation: str,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    extra: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """State to save, once earlier files are written; adds a writer to the options."""
    from moe_ext.distributed.checkpoint_files import ReplacingWriter

    _check_kinds(operation, path, model)
    wait(_underway)
    if "storage_writer" not in options and ReplacingWriter.validate_checkpoint_id(path):
        options["storage_writer"] = ReplacingWriter(path)
    with _on_every_rank(operation, options) as told:
        state = {**TrainingState(model, optimizers).state_dict(), **(extra or {})}
        own = {zlib.crc32(name.encode()): name for name, _ in _leaves("", extra or {})}
        told[0] = [number for leaf in _leaves("", extra or {}) for number in _checksums(*leaf)]
    values = [dict(zip(row[::2], row[1::2], strict=True)) for row in told]
    for name, text in own.items():
        if len({of_rank[name] for of_rank in values if name in of_rank}) > 1:
            warnings.warn(
                f"{operation}: {text} of extra differs between ranks, and the checkpoint keeps "
                "that of one rank for all of them; save each rank's under a name of its own",
                stacklevel=3,
            )
    return state


def _check_kinds(operation: str, path: object, model: object) -> None:
    """TypeError for a model in the place of the folder, say."""
    check_kind(operation, "path", path, str, os.PathLike, required=True)
    check_kind(operation, "model", model, nn.Module, required=True)


def _with_all_saved(
    extra: Mapping[str, Any], saved: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None
) -> dict[str, Any]:
    """Extra to load into: as given, and what a new object's state has not yet, such as momenta.

    Args:
        extra: nested mappings and lists; they are not changed.
        saved: as in `TrainingState.empty`.
        paths: of what was saved, by its name: keys and indices.
    """
    found = {name: _copied(value) for name, value in extra.items()}
    for full_name, path in (paths or {}).items():
        if path[0] not in found or len(path) == 1 or full_name not in saved:
            continue
        inside: Any = found
        numbered = False
        for key, below in zip(path[:-1], path[1:], strict=True):
            # Optimizers count their parameters; torch writes the numbers as texts.
            key = int(key) if numbered and str(key).isdigit() else key
            numbered = key == "state" and isinstance(inside, dict) and "param_groups" in inside
            inside = _entry(inside, key, {} if isinstance(below, str) else [])
            if not isinstance(inside, dict | list):
                break  # a value of another kind here
        else:
            entry = saved[full_name]
            is_tensor = hasattr(entry, "properties")
            _entry(
                inside,
                path[-1],
                torch.zeros(entry.size, dtype=entry.properties.dtype) if is_tensor else None,
            )
    return found


def _entry(inside: Any, key: Any, default: Any) -> Any:
    """An entry of a mapping or list, which is the default if there is none."""
    if isinstance(inside, dict):
        return inside.setdefault(key, default)
    inside.extend([None] * (key + 1 - len(inside)))
    if inside[key] is None:
        inside[key] = default
    return inside[key]


def _copied(value: Any) -> Any:
    """Nested dicts and lists anew, with the same leaves."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The leaves of nested mappings and lists, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item)
    else:
        yield path, value


def _checksums(path: str, value: object) -> tuple[int, int]:
    """Checksums of a name and of its value; values that cannot be compared have equal ones."""
    content = b""
    if isinstance(value, Tensor) and not is_dtensor(value):
        content = as_bytes(value.detach().cpu()).numpy().tobytes()
    elif isinstance(value, int | float | complex | str | bytes):
        content = repr(value).encode()
    return zlib.crc32(path.encode()), zlib.crc32(content)


@contextmanager
def _on_every_rank(operation: str, options: Mapping[str, Any]) -> Iterator[list[list[int]]]:
    """Raise on every rank what any of them raises inside.

    Yields a row of integers to fill in, in whose place the rows of all ranks are afterwards.
    """
    problem, group = None, resolve_group(options.get("process_group"), operation)
    told: list[list[int]] = [[]]
    try:
        yield told
    except RankFailureError:
        raise
    except Exception as error:
        problem = error
    told[:] = Agreement(operation, group).compare({}, values=told[0], problem=problem)


@contextmanager
def _plain_errors(operation: str, means: Callable[[], str] | None = None) -> Iterator[None]:
    """Name the ranks that died or did not answer, and raise torch's error as an Exception.

    Args:
        operation: for messages.
        means: tells what has become of the state.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with naming_failed_ranks(None, operation) if is_initialized() else nullcontext():
            yield
    except RankFailureError as error:
        if means is None:
            raise
        raise RankFailureError(f"{error}; {means()}", error.ranks) from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        rest = f"; {means()}" if means else ""
        text = f"{operation}: {first_line(cause)}, on rank {rank}{rest}"
        raise RuntimeError(text) from error


def _bare(name: str) -> str:
    """The name in a state dict of what has this name in the model."""
    return name.replace(_WRAPPER, "")


def _by_bare_name(named: Mapping[str, _T]) -> dict[str, _T]:
    return {_bare(name): value for name, value in named.items()}


def _split_dim(whole: torch.Size, split: torch.Size) -> int | None:
    """Dimension of a shape that is one of two pieces, and one more, in another shape."""
    dims = range(len(whole) if len(split) == len(whole) + 1 else 0)
    fits = [d for d in dims if (*split[:d], 2 * split[d + 1], *split[d + 2 :]) == whole]
    return next((d for d in reversed(fits) if split[d] == 2), None)


def _is_like(value: Tensor, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """True if an optimizer's tensor has this shape, and is divided as the parameter."""
    if value.shape != shape or value.dtype != dtype:
        return False
    if is_dtensor(value) and is_dtensor(parameter):
        return value.placements == parameter.placements
    return is_dtensor(value) == is_dtensor(parameter)


def _is_of(size: torch.Size, parameter: Tensor, place: Placement | None) -> bool:
    """True for a saved tensor of a parameter's shape, in the form of `shown` or not."""
    if place is not None and place.dim is None and place.num_parts > 1:  # of one expert
        return size.numel() * place.num_parts == parameter.numel()
    pieces = place is not None and place.pieces[1] > 1
    if size == parameter.shape or (pieces and size.numel() == parameter.numel()):
        return True
    return place is not None and _split_dim(parameter.shape, size) is not None


def _zeros(shape: torch.Size, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros that are divided as a parameter, along the dimensions that they have of it."""
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return divided_as(torch.zeros(shape, dtype=dtype, device=parameter.device), parameter)


def _local(value: Tensor, place: Placement | None, parameter: Tensor | None) -> Tensor:
    """Undo `whole_of`."""
    if place is None or value.dim() == 0 or parameter is None:
        return value
    return place.taken(value, parameter)


def _of_ranks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a parameter's state that each rank has for itself."""
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
    """The options of a parameter group; those that are no numbers or texts are left out."""
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


def _number(value: Any) -> Any:
    """The number in a tensor of one element, or in a scalar of numpy."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(type(value).__name__)


def _typed(value: Any, like: Any) -> Any:
    """An option that was read, of the type that it has here."""
    if isinstance(like, Tensor):
        return torch.full_like(like, value)
    if isinstance(value, list) and not isinstance(like, list):
        likes = like if isinstance(like, tuple) and len(like) == len(value) else [None] * len(value)
        return tuple(_typed(item, old) for item, old in zip(value, likes, strict=True))
    return value


def _with_options(held: list[str], saved: Mapping[str, Any]) -> list[str]:
    """The parameters whose options a checkpoint has: all of those given, or none."""
    if any(name.startswith(_OPTIONS) for name in saved):
        for name in held:
            if f"{_OPTIONS}{name}" not in saved:
                raise ValueError(
                    f"checkpoint: expected one whose optimizers held {name}, got one whose "
                    "optimizers did not"
                )
        return held
    known = {n.partition(".")[2].partition(".")[2] for n in saved if not n.startswith(_MODEL)}
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
    """Name of a parameter to key to value."""
    found: dict[str, dict[str, Any]] = {}
    for full_name, tensor in state.items():
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if kind + "." == _STATE:
            found.setdefault(name, {})[key] = tensor
        elif kind + "." == _NUMBER:
            found.setdefault(name, {})[key] = tensor.item()
    return found
