"""Converts updates for other libraries: vLLM's patches, safetensors, names of Hugging Face."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._files import replacing
from moe_ext.sync.update import Update, UpdateEntry

Pieces = Sequence[tuple[str, tuple[int, ...]]]
_FUSED = re.compile(r"(.*experts\.)(gate_up_proj|down_proj)(_scale_inv)?$")
_FP8_MAX = 448.0
_FORMAT = "moe_ext patches 2"


@dataclass(frozen=True)
class WeightPatch:
    """New values for elements of a tensor in a checkpoint.

    The fields are those of vLLM's patches: name, full shape, dtype, flat indices and values.

    Attributes:
        name: name of the tensor.
        shape: shape of the whole tensor.
        dtype: dtype of the tensor and its values.
        indices: flat indices `[n]`: int32, or int64 for a tensor of 2^31 elements or more. None if
            the values are all elements.
        values: the values at the indices, `[n]`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: Tensor | None
    values: Tensor


def hugging_face_names(name: str, shape: tuple[int, ...]) -> Pieces:
    """Return names and shapes of the checkpoint's tensors for one of stacked experts, in order.

    `...experts.gate_up_proj` `[E, 2F, D]` becomes, for each expert, `gate_proj.weight` and
    `up_proj.weight` `[F, D]`; `...experts.down_proj` `[E, D, F]` becomes `down_proj.weight`
    `[D, F]`. Factors of `fp8_blocks` get names such as `gate_proj.weight_scale_inv`. Other tensors
    keep their name.
    """
    found = _FUSED.match(name)
    if found is None or len(shape) != 3:
        return [(name, shape)]
    num_experts, rows, columns = shape
    if found[2] == "down_proj":
        parts = [("down_proj", (rows, columns))]
    else:
        parts = [(part, (rows // 2, columns)) for part in ("gate_proj", "up_proj")]
    return [
        (f"{found[1]}{expert}.{part}.weight{found[3] or ''}", size)
        for expert in range(num_experts)
        for part, size in parts
    ]


def patches(
    update: Update, names: Callable[[str, tuple[int, ...]], Pieces] | None = None
) -> Iterator[WeightPatch]:
    """Yield the changes of an update as patches. Tensors without a change are left out.

    Args:
        update: a delta with values, or a full update.
        names: maps the name and shape of a tensor to the names and shapes of the pieces that follow
            each other in its memory, as `hugging_face_names` does.

    Raises:
        ValueError: the update holds bits that differ, or only hashes, instead of values; or pieces
            of two tensors have the same name.
    """
    if update.xored and update.kind == "delta" or update.kind == "base":
        raise ValueError(f"patches: expected an update with values, got {update.kind}, xored")
    owners: dict[str, str] = {}
    for entry in update.entries:
        whole, dtype = entry.region.whole, entry.torch_dtype
        pieces = [(entry.name, whole)] if names is None else names(entry.name, whole)
        for name, _ in pieces:
            if (owner := owners.setdefault(name, entry.name)) != entry.name:
                raise ValueError(
                    f"patches: expected names to be of one tensor each, got {name} of {owner} and "
                    f"{entry.name}"
                )
        sizes = torch.tensor([math.prod(shape) for _, shape in pieces])
        if int(sizes.sum()) != math.prod(whole):
            raise ValueError(
                f"patches: expected pieces of {math.prod(whole)} elements for {entry.name}, got "
                f"{int(sizes.sum())}"
            )
        places, values = _elements(entry, update.kind, dtype)
        ends = sizes.cumsum(0)
        cuts = torch.searchsorted(places, ends[:-1]).tolist()
        starts = (ends - sizes).tolist()
        parts = places.tensor_split(cuts), values.tensor_split(cuts)
        for (name, shape), start, own, kept in zip(pieces, starts, *parts, strict=True):
            if own.numel() == math.prod(shape) and own.numel():
                yield WeightPatch(name, shape, dtype, None, kept)
            elif own.numel():
                index = torch.int32 if math.prod(shape) < 2**31 else torch.int64
                yield WeightPatch(name, shape, dtype, (own - start).to(index), kept)


def _elements(entry: UpdateEntry, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ascending places in the flattened whole tensor, and the values there."""
    if kind == "delta":
        like = torch.empty(0, dtype={1: torch.uint8}.get(dtype.itemsize, dtype))
        places, values = ops.delta_unpack(entry.payload, like, entry.region.numel)
        values = values.view(dtype)
    else:
        places = torch.arange(entry.region.numel)
        values = entry.payload.clone().view(dtype)
    whole = entry.region.to_whole(places)
    if entry.region.start is None:
        whole, order = whole.sort()
        values = values[order]
    return whole, values


def save_patches(path: str | os.PathLike[str], found: Sequence[WeightPatch], version: int) -> None:
    """Write patches to a safetensors file, which appears as a whole or not at all.

    The tensors of each patch are `<number>.values` and `<number>.indices`, by its place in
    ``found``. Several patches may therefore have one name, as those of merged sources do. The
    metadata holds names, shapes, dtypes, the version, and a CRC-32 of all of it. A process that is
    killed leaves its unfinished `<path>.<hex>.partial` behind, which nothing reads.

    Raises:
        OSError: the file cannot be written, as on a full disk. An older file is still there then.
        RuntimeError: the package safetensors is not installed.
    """
    _safetensors("save_patches")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, about, places = {}, [], set[int]()
    for number, patch in enumerate(found):
        for part, tensor in (("values", patch.values), ("indices", patch.indices)):
            if tensor is None:
                continue
            # safetensors refuses tensors that share memory, as those of tied weights do.
            repeats = tensor.data_ptr() in places
            tensors[f"{number}.{part}"] = tensor.clone() if repeats else tensor.contiguous()
            places.add(tensor.data_ptr())
        about.append([patch.name, list(patch.shape), str(patch.dtype).removeprefix("torch.")])
    # `default` converts integers of NumPy.
    text = json.dumps({"version": version, "patches": about}, default=int)
    metadata = {"format": _FORMAT, "table": text, "crc32": f"{_checksum(text, tensors):08x}"}
    try:
        with replacing(path) as file:
            save_file(tensors, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"save_patches: {os.fspath(path)}: {error}") from error


def load_patches(path: str | os.PathLike[str]) -> tuple[list[WeightPatch], int]:
    """Read the patches and the version that `save_patches` wrote.

    Raises:
        OSError: the file cannot be read.
        RuntimeError: the package safetensors is not installed.
        ValueError: the file is cut, damaged, or was not written by `save_patches`.
    """
    _safetensors("load_patches")
    from safetensors import SafetensorError, safe_open

    metadata: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    read = None
    # safetensors opens the file twice by its name, and a writer may put the next version there in
    # between. The file is then read again.
    while read is None or read != _identity(path):
        read, problem = _identity(path), None
        try:
            with safe_open(os.fspath(path), "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            problem = error
    if problem is not None:
        raise ValueError(f"load_patches: expected {os.fspath(path)} to be whole, got {problem}")
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"load_patches: expected {os.fspath(path)} to be of the format {_FORMAT}, got "
            f"{metadata.get('format')}"
        )
    text, want = metadata.get("table", ""), metadata.get("crc32")
    if (crc := f"{_checksum(text, tensors):08x}") != want:
        raise ValueError(
            f"load_patches: expected {os.fspath(path)} to have the CRC-32 {want}, got {crc}: it is "
            "damaged"
        )
    table = json.loads(text)
    patches = [
        WeightPatch(
            name,
            tuple(shape),
            getattr(torch, dtype),
            tensors.get(f"{number}.indices"),
            tensors[f"{number}.values"],
        )
        for number, (name, shape, dtype) in enumerate(table["patches"])
    ]
    return patches, table["version"]


def _identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return numbers that differ between a file and another one that has taken its name."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> int:
    found = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        facts = f"{name} {tensor.dtype} {tensor.numel()}".encode()
        stored = memoryview(as_bytes(tensor.cpu()).numpy())  # type: ignore[arg-type]
        found = zlib.crc32(stored, zlib.crc32(facts, found))
    return found


def _safetensors(operation: str) -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise RuntimeError(
            f"{operation}: expected the package safetensors to be installed, got none; "
            "pip install safetensors"
        )


def fp8_blocks(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Quantise a weight to the fp8 form that rollouts hold, for `DeltaEncoder(transform=)`.

    Matrices `[..., M, N]` become `name` in float8_e4m3fn and `name_scale_inv`
    `[..., ceil(M / 128), ceil(N / 128)]` in float32. The latter are the factors that give the
    weight back, one for each block of 128 x 128, as in DeepSeek-V3's checkpoints. In
    `...experts.gate_up_proj` `[E, 2F, D]` no block has both gates and ups, and the factors of the
    ups follow those of the gates. Other tensors stay as they are.

    Reference: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2.
    """
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return {name: tensor}
    weight = tensor.detach()
    fused = _FUSED.match(name)
    halves = fused is not None and fused[2] == "gate_up_proj" and tensor.dim() == 3
    if halves:
        weight = weight.unflatten(1, (2, -1))
    *_, rows, columns = weight.shape
    pad = (0, -columns % 128, 0, -rows % 128)
    blocks = torch.nn.functional.pad(weight.float(), pad)
    blocks = blocks.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    # A denormal quotient may be rounded to 0, and blocks cannot be divided by 0.
    smallest = torch.finfo(torch.float32).tiny
    scale = torch.where(largest > 0, (largest / _FP8_MAX).clamp_min(smallest), 1.0)
    codes = (blocks / scale).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    scale = scale.squeeze(-1).squeeze(-2)
    if halves:
        codes, scale = codes.flatten(1, 2), scale.flatten(1, 2)
    return {
        name: codes.contiguous().to(torch.float8_e4m3fn),
        f"{name}_scale_inv": scale.contiguous(),
    }
