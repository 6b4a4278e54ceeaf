"""Reads checkpoint files by slices, and writes files without damaging an earlier checkpoint.

This module imports `torch.distributed.checkpoint`, which takes a second. Import it locally.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# Most bytes to read at once.
_BLOCK = 8 << 20


@dataclasses.dataclass(frozen=True)
class _Saved:
    """Place of a contiguous tensor's bytes in its file."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype


class SliceReader(FileSystemReader):
    """Reads the files of torch's writer by slices, with little memory besides the destination.

    torch's reader first reads each saved tensor whole, and then takes this rank's part. This reader
    also finds damaged files while ranks plan, before any tensor is changed.

    Attributes:
        begun: True once this rank has begun to write into destinations.
    """

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.begun = False
        self._saved: dict[MetadataIndex, _Saved] = {}
        self._split: dict[str, tuple[int, tuple[int, int]]] = {}

    def split(self, name: str, dim: int, sizes: tuple[int, int]) -> None:
        """Present a dimension of a saved tensor as two, unless it is cut into several files."""
        self._split[name] = dim, sizes

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, and apply `split` to the shapes."""
        try:
            metadata = super().read_metadata(*args, **kwargs)
        except Exception as error:  # damaged bytes can make unpickling raise anything
            raise ValueError(
                f"checkpoint.load: expected {self.path}/.metadata to be whole, got {error!r}; "
                "nothing has changed"
            ) from error
        for name, (dim, sizes) in self._split.items():
            entry = metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            if all(chunk.sizes[dim] == entry.size[dim] for chunk in entry.chunks):
                for chunk in entry.chunks:
                    info = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
                    chunk.offsets = _split(chunk.offsets, dim, (0, 0))
                    chunk.sizes = _split(chunk.sizes, dim, sizes)
                    metadata.storage_data[MetadataIndex(name, chunk.offsets)] = info
                entry.size = _split(entry.size, dim, sizes)
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Find the tensors in their files, and raise for files that are too short."""
        for path, items in self._by_file(plan.items).items():
            with self.fs.create_stream(self.fs.concat_path(self.path, path), "rb") as stream:
                for item in items:
                    self._find(item, stream)
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the destinations. Items that `_find` did not locate are left to torch's reader."""
        self.begun = True
        found = [item for item in plan.items if item.storage_index in self._saved]
        for path, items in self._by_file(found).items():
            with self.fs.create_stream(self.fs.concat_path(self.path, path), "rb") as stream:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    _fill(target, stream, self._saved[item.storage_index], item)
                    planner.commit_tensor(item, target)
        rest = [item for item in plan.items if item.storage_index not in self._saved]
        return super().read_data(dataclasses.replace(plan, items=rest), planner)

    def _by_file(self, items: Sequence[ReadItem]) -> dict[str, list[ReadItem]]:
        """Group items by file, in the order of their bytes."""
        found: dict[str, list[ReadItem]] = {}
        for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
            path = self.storage_data[item.storage_index].relative_path
            found.setdefault(path, []).append(item)
        return found

    def _find(self, item: ReadItem, stream: io.IOBase) -> None:
        index, info = item.storage_index, self.storage_data[item.storage_index]
        end = stream.seek(0, io.SEEK_END)
        if end < info.offset + info.length:
            raise ValueError(
                f"expected {info.relative_path} to hold {info.offset + info.length} bytes for "
                f"{index.fqn}, got {end}"
            )
        is_tensor = item.type == LoadItemType.TENSOR
        if not is_tensor or index in self._saved or info.transform_descriptors:
            return
        view = self._slice_file(stream, info)
        try:
            tensor = torch.load(view, map_location="meta", weights_only=True)
        except Exception as error:  # damaged bytes can make unpickling raise anything
            raise ValueError(
                f"expected {info.relative_path} to hold {index.fqn}, got damaged bytes"
            ) from error
        if not isinstance(tensor, Tensor) or not tensor.numel() or not tensor.is_contiguous():
            return
        if tensor.is_conj() or tensor.is_neg():
            return  # the bytes in the file are not the tensor's values
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is not None:
            skipped = tensor.storage_offset() * tensor.element_size()
            begin += info.offset + skipped
            shape = tensor.shape
            if index.fqn in self._split:
                shape = _split(shape, *self._split[index.fqn])
            self._saved[index] = _Saved(begin, shape, tensor.dtype)


class _Files(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing. torch removes the old metadata before it renames the new file over it.

        A crash between the two would leave a folder without metadata.
        """


class ReplacingWriter(FileSystemWriter):
    """Writes new files next to an earlier checkpoint, and replaces it by one renaming at the end.

    torch's writer overwrites the earlier files. If a rank died meanwhile, the metadata of one state
    would be left with tensors of another.

    Args:
        path: the folder.
        more: paths of empty mappings on this rank, which torch would not keep.
    """

    def __init__(
        self, path: str | os.PathLike[str], more: Iterable[tuple[str | int, ...]] = ()
    ) -> None:
        super().__init__(os.path.abspath(path))
        self.fs = _Files()
        self._more = {".".join(map(str, path)): path for path in more}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keep the absolute path. A thread of `async_save` calls this after a possible chdir."""
        super().reset(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Plan as torch does, without its warning about an earlier checkpoint."""
        self.fs.mkdir(self.path)
        if plan.planner_data is None:
            return plan
        return dataclasses.replace(plan, planner_data={**self._more, **plan.planner_data})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give files names that no earlier save has used."""
        named = []
        for plan in super().prepare_global_plan(plans):
            prefix = f"{self.save_id[:8]}{plan.storage_data.prefix}"
            files = dataclasses.replace(plan.storage_data, prefix=prefix)
            named.append(dataclasses.replace(plan, storage_data=files))
        return named

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace the metadata, and remove files that it does not name."""
        names = {written.storage_data.relative_path for of_rank in results for written in of_rank}
        there = {path.name: path for path in Path(self.path).glob("*.distcp")}
        if lost := names - there.keys():
            raise FileNotFoundError(
                "expected path to be a folder that all ranks share, got one without the file "
                f"{min(lost)} of another rank: {self.path}"
            )
        super().finish(metadata, results)
        for name in there.keys() - names:
            there[name].unlink()


def _split(values: torch.Size, dim: int, two: tuple[int, int]) -> torch.Size:
    return torch.Size([*values[:dim], *two, *values[dim + 1 :]])


def _fill(target: Tensor, stream: io.IOBase, saved: _Saved, item: ReadItem) -> None:
    if target.shape != torch.Size(item.lengths):
        raise ValueError(
            f"expected {item.storage_index.fqn} to go into shape {tuple(item.lengths)}, got "
            f"{tuple(target.shape)}"
        )
    if not saved.shape:
        saved, target = dataclasses.replace(saved, shape=torch.Size([1])), target[None]
        item = dataclasses.replace(item, storage_offsets=torch.Size([0]), lengths=torch.Size([1]))
    _fill_box(target, stream, saved.begin, saved.shape, item.storage_offsets, saved.dtype)


def _fill_box(
    target: Tensor,
    stream: io.IOBase,
    begin: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Read the slice at `offsets` of a saved tensor into `target`, which has the slice's shape.

    Args:
        target: destination.
        stream: file of the tensor.
        begin: position of the tensor's first byte.
        shape: shape of the saved tensor.
        offsets: first index of the slice in each dimension.
        dtype: dtype of the saved tensor.
    """
    row = math.prod(shape[1:]) * dtype.itemsize
    begin += offsets[0] * row
    if row > _BLOCK and len(shape) > 1:
        for i, part in enumerate(target):
            _fill_box(part, stream, begin + i * row, shape[1:], offsets[1:], dtype)
        return
    num_rows = min(len(target), max(1, _BLOCK // row))
    block = bytearray(num_rows * row)
    stream.seek(begin)
    for part in target.split(num_rows):
        size = len(part) * row
        if stream.readinto(memoryview(block)[:size]) != size:  # type: ignore[attr-defined]
            raise OSError(f"expected {size} bytes more, got the end of the file")
        rows = torch.frombuffer(block, dtype=torch.uint8)[:size].view(dtype)
        rows = rows.view(len(part), *shape[1:])
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, offsets[dim], part.shape[dim])
        part.copy_(rows)
