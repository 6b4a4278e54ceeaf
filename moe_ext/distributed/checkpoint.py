"""Saves and loads checkpoints by `torch.distributed.checkpoint`, for any number of ranks."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_kind
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import RankFailureError, first_line, naming_failed_ranks
from moe_ext.comm.groups import is_initialized, resolve_group
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.training_state import MODEL, OPTIONS, TrainingState, split_dim

__all__ = ["TrainingState", "async_save", "load", "save"]

_HALF_WAY = "model and optimizers hold parts of two states now: load again before going on"

# Last save of `async_save`, which may still be writing.
_underway: list[Future[None]] = []


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint that any number of ranks can load; all ranks must call it.

    Args:
        path: folder that all ranks share.
        model: see `TrainingState`.
        optimizers: one optimizer, several or none.
        extra: name to further object to save, such as a scheduler or its `state_dict()`.
        options: passed on to `torch.distributed.checkpoint.save`, such as `storage_writer`.

    Raises:
        ValueError: on every rank; see `TrainingState.state_dict`.
        RuntimeError: on every rank, if a rank could not write, for example because of a full disk.
        RankFailureError: a rank died or did not answer.

    Warns:
        UserWarning: a value in `extra` differs between ranks; the checkpoint keeps that of one
            rank.

    An earlier checkpoint in the folder remains until the new one is complete, and is then replaced.
    If ranks die at any time, one of the two is whole.
    """
    # torch.distributed.checkpoint takes a second to import, so the import is local.
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
    """Copy the state that `save` writes, and write it during training; all ranks must call it.

    Messages use a separate group. The next call that saves or loads waits until files are written.

    Args:
        path: see `save`.
        model: see `save`.
        optimizers: see `save`.
        extra: see `save`.
        options: passed on to `torch.distributed.checkpoint.async_save`.

    Returns:
        A future, done when the checkpoint is whole on all ranks. `result()` raises the errors of
        writing, as `save` does.

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

    # With an asynchronous stager, torch returns two futures: one for the copy, one for the upload.
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
        model: model with the same whole parameters; its experts may be spread differently.
        optimizers: optimizers of the saved classes; they may be new.
        extra: mapping that is filled in place by everything that was saved under its names. Loaded
            keys are strings, except keys that `extra` already has, and numbers of parameters in an
            optimizer's state.
        options: passed on to `torch.distributed.checkpoint.load`, such as `storage_reader`.

    Raises:
        ValueError: on every rank, and nothing has changed: the checkpoint lacks a tensor of the
            model or a parameter of the optimizers; the model is on the meta device; `.metadata` is
            damaged; or see `TrainingState.load_state_dict`.
        RuntimeError: on every rank. If a tensor has another shape or a file is damaged, nothing has
            changed. It is also raised if a file cannot be read later, or if loading a state fails.
        RankFailureError: a rank died or did not answer.

    Warns:
        UserWarning: an earlier version saved the checkpoint, without options of parameter groups.
            Learning rates remain those of the given optimizers.

    Tensors are read in pieces of 8 MiB, directly into the parameters and into existing moments. A
    failure after the first read leaves parts of two states behind; the error then says so.
    """
    from torch.distributed.checkpoint import state_dict_loader

    from moe_ext.distributed.checkpoint_files import SliceReader

    _check_kinds("checkpoint.load", path, model)
    wait(_underway)
    given = options.pop("storage_reader", None)
    reader = given or SliceReader(path)
    training = TrainingState(model, optimizers)

    def read(state: dict[str, Any], reader: Any, means: Callable[[], str]) -> None:
        with _plain_errors("checkpoint.load", means):
            state_dict_loader.load(
                state, storage_reader=reader, no_dist=not is_initialized(), **options
            )

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
            name = name.removeprefix(MODEL)
            raise ValueError(
                f"checkpoint.load: expected a checkpoint with {name}, got one without it"
            )
        for name in (n for n, x in state.items() if isinstance(x, Tensor) and x.is_meta):
            raise ValueError(
                f"checkpoint.load: expected {name.removeprefix(MODEL)} to have memory to be read "
                "into, got it on the meta device; call to_empty of the model first"
            )
        before = _states(extra)
    # Options of parameter groups are read and checked first, because they may be refused. Reading
    # them changes no parameter.
    first = {name: tensor for name, tensor in state.items() if name.startswith(OPTIONS)}
    if any(name.startswith(OPTIONS) for name in saved):
        read(first, given or SliceReader(path), lambda: "nothing has changed")
        with _on_every_rank("checkpoint.load", options):
            training._options(first)
    more = _with_all_saved(before, saved, metadata.planner_data)
    found = {**{name: value for name, value in state.items() if name not in first}, **more}
    for name, tensor in state.items():
        if isinstance(tensor, tuple):
            continue
        # A job with etp saves gates and ups as two pieces of a dimension; a job without saves them
        # as one dimension. The job that loads may differ from the job that saved.
        shape, size = tensor.shape, saved[name].size
        if (dim := split_dim(shape, size)) is not None:
            found[name] = tensor.unflatten(dim, size[dim : dim + 2])
        elif (dim := split_dim(size, shape)) is not None and isinstance(reader, SliceReader):
            reader.split(name, dim, (shape[dim], shape[dim + 1]))

    def means() -> str:
        return _HALF_WAY if getattr(reader, "begun", True) else "nothing has changed"

    read(found, reader, means)
    alone = {name: found[name] for name, value in state.items() if isinstance(value, tuple)}
    with _on_every_rank("checkpoint.load", options):
        try:
            training.load_state_dict({**state, **alone})
            for name in more:
                assert extra is not None
                loaded = _like(before[name], found[name])
                if _has_state(extra[name]):
                    extra[name].load_state_dict(loaded)
                else:
                    extra[name] = loaded
        except RankFailureError:
            raise
        except Exception as error:
            raise RuntimeError(f"checkpoint.load: {_HALF_WAY}, after {error!r}") from error


def _to_save(
    operation: str,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    extra: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Wait for earlier saves, and return the state to save. Adds a writer to the options."""
    from moe_ext.distributed.checkpoint_files import ReplacingWriter

    _check_kinds(operation, path, model)
    wait(_underway)
    with _on_every_rank(operation, options) as told:
        more, trained = _states(extra), TrainingState(model, optimizers).state_dict()
        own = {zlib.crc32(name.encode()): name for name, _ in _leaves("", more)}
        for text in own.values():
            if text in trained:
                raise ValueError(
                    f"{operation}: expected extra to hold no {text}, which the model or its "
                    "optimizers have in the checkpoint, got one"
                )
        state = {**trained, **more}
        told[0] = [number for leaf in _leaves("", more) for number in _checksums(*leaf)]
    if "storage_writer" not in options and ReplacingWriter.validate_checkpoint_id(path):
        options["storage_writer"] = ReplacingWriter(path, _empty_mappings(more))
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
    """Raise TypeError for wrong arguments, such as a model instead of the folder."""
    check_kind(operation, "path", path, str, os.PathLike, required=True)
    check_kind(operation, "model", model, nn.Module, required=True)


def _has_state(value: object) -> TypeGuard[Any]:
    """Return True for an object that is saved by its `state_dict`, such as a scheduler."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _states(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    return {n: x.state_dict() if _has_state(x) else x for n, x in (extra or {}).items()}


def _with_all_saved(
    extra: Mapping[str, Any], saved: Mapping[str, Any], paths: Mapping[str, Sequence[Any]] | None
) -> dict[str, Any]:
    """Return a copy of `extra` to load into, with all entries that were saved under its names.

    For example, the state of a new optimizer does not have momenta yet.

    Args:
        extra: nested mappings and lists; they are not changed.
        saved: see `TrainingState.empty`.
        paths: saved name to its path of keys, which torch writes as strings, and indices.
    """
    found = {name: _copied(value) for name, value in extra.items()}
    for full_name, path in (paths or {}).items():
        if path[0] not in found:
            continue
        inside: Any = found
        for key, below in itertools.pairwise(path):
            inside = _entry(inside, key, {} if isinstance(below, str) else [])
            if not isinstance(inside, dict | list):
                break  # `extra` has a value that is no container here
        else:
            entry: Any = saved.get(full_name)
            # torch writes no entry for an empty mapping.
            default: Any = {} if entry is None else None
            if hasattr(entry, "properties"):
                default = torch.zeros(entry.size, dtype=entry.properties.dtype)
            here = _entry(inside, path[-1], default)
            if isinstance(default, Tensor) and not isinstance(here, Tensor):
                inside[path[-1]] = default
    return found


def _entry(inside: Any, key: Any, default: Any) -> Any:
    """Return an entry of a mapping or list, after setting it to the default if it is missing."""
    if isinstance(inside, dict):
        inside.setdefault(key)
    else:
        inside.extend([None] * (key + 1 - len(inside)))
    if inside[key] is None:
        inside[key] = default
    return inside[key]


def _copied(value: Any) -> Any:
    """Copy nested mappings and lists, with string keys, as torch writes them, and equal leaves."""
    if isinstance(value, Mapping):
        return {str(key): _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _like(given: Any, loaded: Any, *, numbered: bool = False) -> Any:
    """Return a loaded value with the classes of mappings and the keys of the given value."""
    if isinstance(loaded, list):
        known = given[: len(loaded)] if isinstance(given, list) else []
        return [_like(old, new) for old, new in itertools.zip_longest(known, loaded)]
    if not isinstance(loaded, dict):
        return loaded
    found = copy.copy(given) if isinstance(given, dict) else {}
    own = {str(key): (key, value) for key, value in found.items()}
    found.clear()
    for text, value in loaded.items():
        # An optimizer's state has numbers of parameters as keys.
        new = int(text) if numbered and text.isdigit() else text
        key, old = own.get(text, (new, None))
        counts = text == "state" and "param_groups" in loaded
        found[key] = _like(old, value, numbered=counts)
    return found


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, leaf) for nested mappings and lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item)
    else:
        yield path, value


def _empty_mappings(value: object, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of empty mappings, which torch does not write."""
    if isinstance(value, Mapping):
        if path and not value:
            yield path
        for key, item in value.items():
            yield from _empty_mappings(item, *path, str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _empty_mappings(item, *path, index)


def _checksums(path: str, value: object) -> tuple[int, int]:
    """Return checksums of a name and of its value. A value that cannot be compared has 0."""
    content = b""
    if isinstance(value, Tensor) and not is_dtensor(value):
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        content = as_bytes(plain).numpy().tobytes()
    elif isinstance(value, int | float | complex | str | bytes):
        content = repr(value).encode()
    elif hasattr(value, "tobytes"):  # numpy's numbers and arrays, such as its random state
        content = value.tobytes()
    return zlib.crc32(path.encode()), zlib.crc32(content)


@contextmanager
def _on_every_rank(operation: str, options: Mapping[str, Any]) -> Iterator[list[list[int]]]:
    """Context that raises the error of any rank on every rank.

    Yields a list with one row of integers, which the caller fills. After the context the list holds
    the rows of all ranks.
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
    """Context that names ranks that died or did not answer, and simplifies torch's errors.

    torch raises a `CheckpointException`, which is no Exception; it becomes a RuntimeError.

    Args:
        operation: name for messages.
        means: returns a text on whether the state has changed, for the end of the message.
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
