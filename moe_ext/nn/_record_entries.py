"""Entries of a `RoutingRecord`, and their bytes.

Shapes: R rows of an entry, E experts, K top-k.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NOT_RECORDED = -2
_MAGIC = b"moe_ext routing\n"
_VERSION = 1
_PREFIX = struct.Struct("<I32s")  # version, SHA-256 of what follows: size of the header first
_SIZE = struct.Struct("<Q")
_DTYPES = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32}


class RecordKey(NamedTuple):
    """Where a decision belongs: the forward pass and the layer.

    Attributes:
        step: number of the step, or of the rollout.
        micro_batch: number of the forward pass in the step.
        layer: name of the layer in its model, wrappers (DDP, FSDP, compile) left out.
    """

    step: int
    micro_batch: int
    layer: str


@dataclass(frozen=True)
class RecordEntry:
    """The choices of one layer in one forward pass.

    Attributes:
        topk_idx: `[R, K]` in the smallest of int8, int16 and int32 that holds E; -1 for no expert,
            -2 for a token that was not recorded.
        num_experts: E.
    """

    topk_idx: Tensor
    num_experts: int


def index_dtype(num_experts: int) -> torch.dtype:
    """The smallest signed dtype for the experts 0 to E - 1."""
    for dtype in (torch.int8, torch.int16):
        if num_experts - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def where(key: RecordKey) -> str:
    """The key in an error message."""
    return f"{key.layer} at step {key.step}, micro-batch {key.micro_batch}"


def encode(entries: Mapping[RecordKey, RecordEntry]) -> bytes:
    """The bytes of `RoutingRecord.to_bytes`; little-endian, as every machine that runs torch."""
    header, payload = [], []
    for key, entry in entries.items():
        idx = entry.topk_idx.cpu().contiguous()
        header.append(
            {
                **key._asdict(),
                "shape": list(idx.shape),
                "dtype": str(idx.dtype).removeprefix("torch."),
                "num_experts": entry.num_experts,
            }
        )
        payload.append(ctypes.string_at(idx.data_ptr(), idx.nbytes) if idx.numel() else b"")
    head = json.dumps(header, separators=(",", ":")).encode()
    body = _SIZE.pack(len(head)) + head + b"".join(payload)
    return _MAGIC + _PREFIX.pack(_VERSION, hashlib.sha256(body).digest()) + body


def decode(data: bytes) -> dict[RecordKey, RecordEntry]:
    """The inverse of `encode`; ValueError where data is not what it wrote."""
    operation = "RoutingRecord.from_bytes"
    start = len(_MAGIC) + _PREFIX.size
    if not data.startswith(_MAGIC) or len(data) < start:
        raise ValueError(
            f"{operation}: expected data to be of a RoutingRecord, got {len(data)} bytes that "
            f"begin with {data[: len(_MAGIC)]!r}"
        )
    version, digest = _PREFIX.unpack_from(data, len(_MAGIC))
    if version != _VERSION:
        raise ValueError(f"{operation}: expected version to be {_VERSION}, got {version}")
    if hashlib.sha256(memoryview(data)[start:]).digest() != digest:
        raise ValueError(
            f"{operation}: expected data to have the checksum that was written with it, got "
            f"{len(data)} bytes that are cut short or changed"
        )
    entries = {}
    header = start + _SIZE.size
    offset = header + _SIZE.unpack_from(data, start)[0]
    for fields in json.loads(data[header:offset]):
        dtype, shape = _DTYPES[fields["dtype"]], fields["shape"]
        size = shape[0] * shape[1] * dtype.itemsize
        # Through bytes of its own: the offset need not be a multiple of the dtype's size.
        raw = bytearray(data[offset : offset + size])
        idx = torch.frombuffer(raw, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        key = RecordKey(fields["step"], fields["micro_batch"], fields["layer"])
        entries[key] = RecordEntry(idx.view(*shape), fields["num_experts"])
        offset += size
    return entries
