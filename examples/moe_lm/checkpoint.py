"""Checkpoints that appear whole or not at all, and that cannot run code when they are read.

A checkpoint is a folder `step-00000100`: files of torch.distributed.checkpoint and a manifest
(JSON) with the settings, and the size and SHA-256 of each file. It is written under a temporary
name, flushed to disk and renamed; whoever sees the final name sees a whole checkpoint.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException

from moe_ext.distributed import naming_failed_ranks

from .runtime import UserError, agree, from_main

MANIFEST = "manifest.json"
FORMAT = "moe_lm checkpoint 2"
PREFIX = "step-"
TEMPORARY = ".incomplete-"


class CheckpointError(UserError):
    """The checkpoint cannot be used; the message says why and what to do."""


def _enum_member(owner: Any, name: str) -> Any:
    """Stand-in for `getattr`, by which Python 3.11.0 to 3.11.3 pickles a member of an enum."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__):
        raise CheckpointError("its metadata asks for an attribute, which is not allowed")
    return owner[name]


# The classes that DCP's own metadata consists of, looked up by exact name: unpickling can then
# build these and nothing else.
_METADATA_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (cls.__module__, cls.__name__): cls
        for cls in (
            dcp_metadata.Metadata,
            dcp_metadata.MetadataIndex,
            dcp_metadata.TensorStorageMetadata,
            dcp_metadata.BytesStorageMetadata,
            dcp_metadata.TensorProperties,
            dcp_metadata.ChunkStorageMetadata,
            dcp_metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    },
    ("builtins", "getattr"): _enum_member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        ("torch", str(dtype)[6:]): dtype
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8)
    },
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder and what its manifest says."""

    path: Path
    step: int
    settings: dict[str, Any]
    files: dict[str, dict[str, Any]]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_CLASSES:
            raise CheckpointError(f"its metadata asks for {module}.{name}, which is not allowed")
        return _METADATA_CLASSES[module, name]


class _SafeReader(filesystem.FileSystemReader):
    """Reads the files named in the manifest; never unpickles more than tensor metadata."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self._files = checkpoint.files

    # Without **kwargs here, DCP does not fall back to the pickled metadata of single ranks.
    def read_metadata(self) -> dcp_metadata.Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, dcp_metadata.Metadata):
            raise CheckpointError(f"its metadata is a {type(metadata).__name__}")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
                raise CheckpointError(f"{key} is not a tensor but pickled data")
        for info in metadata.storage_data.values():
            if info.relative_path not in self._files:
                raise CheckpointError(f"its metadata names the foreign file {info.relative_path}")
            if info.transform_descriptors:
                raise CheckpointError("its metadata asks for stream transforms")
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata


class _TensorsOnlyPlanner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: IO[bytes]) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor but pickled data")


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        return None  # torch's own would hold the path of the temporary folder


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Remove a folder in such a way that a kill half-way leaves no broken checkpoint behind."""
    trash = path.with_name(f"{TEMPORARY}{path.name}-old")
    if not path.name.startswith(TEMPORARY):
        path.rename(trash)
        path = trash
    shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed job left half-written."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        digits = path.name[len(PREFIX) :]
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def _commit(temporary: Path, folder: Path, step: int, settings: dict[str, Any], keep: int) -> Path:
    """Write the manifest, give the folder its final name, and drop all but `keep` checkpoints."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(temporary.iterdir())
    }
    manifest = {"format": FORMAT, "step": step, "settings": settings, "files": files}
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _fsync_folder(temporary)
    final = folder / f"{PREFIX}{step:08d}"
    if final.exists():
        _remove(final)
    temporary.rename(final)
    _fsync_folder(folder)
    for _, path in _steps(folder)[:-keep]:
        _remove(path)
    return final


def save(
    folder: Path, state: dict[str, Tensor], *, step: int, settings: dict[str, Any], keep: int
) -> Path:
    """Write `state` (tensors and DTensors) as the checkpoint of `step`; all ranks call this.

    The folder must be on a file system that all ranks share.
    """
    temporary = folder / f"{TEMPORARY}{PREFIX}{step:08d}"

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        temporary.mkdir()

    from_main(prepare, OSError)
    agree(lambda: None if temporary.is_dir() else _not_shared(folder), UserError)
    try:
        with naming_failed_ranks(None, "save"):
            dcp.save(state, storage_writer=_Writer(temporary, sync_files=True))
    except CheckpointException as error:
        raise UserError(f"cannot write a checkpoint to {folder}: {_causes(error)}") from error
    return from_main(lambda: _commit(temporary, folder, step, settings, keep), OSError)


def _not_shared(folder: Path) -> None:
    raise UserError(f"expected --out to be shared by all ranks, but {folder} is not")


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))


def _read_manifest(path: Path, step: int) -> Checkpoint:
    with open(path / MANIFEST, encoding="utf-8") as file:
        manifest = json.load(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST} is not of format {FORMAT!r}")
    if manifest.get("step") != step:
        raise CheckpointError(f"{MANIFEST} says step {manifest.get('step')}")
    settings, files = manifest.get("settings"), manifest.get("files")
    if not isinstance(settings, dict) or not isinstance(files, dict) or ".metadata" not in files:
        raise CheckpointError(f"{MANIFEST} lacks the settings or the list of files")
    return Checkpoint(path, step, settings, files)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of `folder`, with its manifest read but its files unchecked."""

    def find() -> Checkpoint | None:
        steps = _steps(folder)
        if not steps:
            return None
        step, path = steps[-1]
        try:
            return _read_manifest(path, step)
        except (OSError, ValueError, CheckpointError) as error:
            raise CheckpointError(_advice(path, str(error))) from error

    return from_main(find, (CheckpointError, OSError))


def _advice(path: Path, reason: str) -> str:
    older = [step for step, other in _steps(path.parent) if other != path]
    then = f"to resume from step {older[-1]}" if older else "to start again from step 0"
    return f"checkpoint {path} cannot be used: {reason}. Move it away {then}; nothing was changed"


def check_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Refuse a checkpoint of other settings, naming the first that differs."""
    for key in sorted(settings.keys() | checkpoint.settings.keys()):
        saved, wanted = checkpoint.settings.get(key), settings.get(key)
        if saved != wanted:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is of another job: expected {key} to be {wanted} as "
                f"in this command, got {saved}. Use another --out, or the checkpoint's settings; "
                "nothing was changed"
            )


def _verify_file(checkpoint: Checkpoint, name: str) -> None:
    expected = checkpoint.files[name]
    path = checkpoint.path / name
    if Path(name).name != name:
        raise CheckpointError(f"{MANIFEST} names a file outside the checkpoint: {name}")
    if not path.is_file():
        raise CheckpointError(f"file {name} is missing")
    if path.stat().st_size != expected["size"]:
        raise CheckpointError(
            f"file {name} is truncated or changed: expected {expected['size']} bytes, "
            f"got {path.stat().st_size}"
        )
    if _digest(path) != expected["sha256"]:
        raise CheckpointError(f"file {name} is damaged: its SHA-256 differs from the manifest")


def empty_tensors(
    checkpoint: Checkpoint, make: Callable[[Mapping[str, Any]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return what `make` makes of the names, shapes and types in `checkpoint`, to load it into."""

    def read() -> dict[str, Tensor]:
        try:
            _verify_file(checkpoint, ".metadata")
            return make(_SafeReader(checkpoint).read_metadata().state_dict_metadata)
        except Exception as error:  # hostile bytes can make unpickling raise anything
            raise CheckpointError(_advice(checkpoint.path, str(error))) from error

    return agree(read, CheckpointError)


def load(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    """Fill `state` in place from `checkpoint`, on any number of ranks; all ranks call this.

    Each rank verifies its part of the files; then every rank reads its part of the tensors.
    """
    reader = _SafeReader(checkpoint)
    wanted: list[set[str]] = [set()] * dist.get_world_size()
    with naming_failed_ranks(None, "load"):
        dist.all_gather_object(wanted, set(state))  # stages of a pipeline have each their own

    def verify() -> None:
        names = sorted(checkpoint.files)
        try:
            for name in names[dist.get_rank() :: dist.get_world_size()]:
                _verify_file(checkpoint, name)
            keys = reader.read_metadata().state_dict_metadata.keys()
            if other := sorted(keys ^ set().union(*wanted)):
                raise CheckpointError(f"it is of another model: {', '.join(other[:3])} differ")
        except Exception as error:  # hostile bytes can make unpickling raise anything
            raise CheckpointError(_advice(checkpoint.path, str(error))) from error

    agree(verify, CheckpointError)
    try:
        with naming_failed_ranks(None, "load"):
            dcp.load(state, storage_reader=reader, planner=_TensorsOnlyPlanner())
    except CheckpointException as error:
        raise CheckpointError(_advice(checkpoint.path, _causes(error))) from error
