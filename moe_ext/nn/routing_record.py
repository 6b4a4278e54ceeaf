"""Records of routing decisions, taken from one model and replayed in another.

Shapes: T tokens of one forward pass, R rows of an entry, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import operator
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext._checks import check_integer, check_rule
from moe_ext._files import replacing
from moe_ext.nn.model_layers import moe_layers
from moe_ext.nn.replay import can_replay, close_session, open_session
from moe_ext.nn.routers import RouterOutput
from moe_ext.nn.torch_state import in_backward

NOT_RECORDED = -2
_MAGIC = b"moe_ext routing\n"
_VERSION = 1
# Version, and SHA-256 of all bytes that follow: size of the header, header, indices.
_PREFIX = struct.Struct("<I32s")
_SIZE = struct.Struct("<Q")
_DTYPES = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32}


class RecordKey(NamedTuple):
    """Key of an entry: the forward pass and the layer.

    Attributes:
        step: number of the step, or of the rollout.
        micro_batch: number of the forward pass in the step.
        layer: name of the layer in its model, without parts of wrappers (DDP, FSDP, compile).
    """

    step: int
    micro_batch: int
    layer: str


@dataclass(frozen=True)
class RecordEntry:
    """Choices of one layer in one forward pass.

    Attributes:
        topk_idx: `[R, K]` in the smallest of int8, int16 and int32 that holds E; -1 for no expert,
            -2 for a token that was not recorded.
        num_experts: E, number of experts of the layer.
    """

    topk_idx: Tensor
    num_experts: int


def index_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest signed dtype that holds the experts 0 to E - 1."""
    for dtype in (torch.int8, torch.int16):
        if num_experts - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def where(key: RecordKey) -> str:
    """Return the text for a key in error messages."""
    return f"{key.layer} at step {key.step}, micro-batch {key.micro_batch}"


class RoutingRecord:
    """Record of the experts of every token, by step, micro-batch and layer.

    A record holds only indices of experts. A replay sends the tokens to the recorded experts. It
    recomputes weights, sums of scores and losses from the logits of the replaying model for these
    experts. They remain differentiable, and a router that has drifted causes no division by zero::

        record = moe_ext.nn.RoutingRecord()
        with torch.no_grad(), record.recording(rollout_model, step=7):
            rollout_model(tokens)
        data = record.to_bytes()                      # to another process
        record = moe_ext.nn.RoutingRecord.from_bytes(data)
        with record.replaying(training_model, step=7):
            loss = training_model(tokens)
            loss.backward()

    The record stays on the device of the layer, without host synchronisation, until `cpu` or a
    serialisation copies it to the host. A record holds the tokens of its own rank.
    """

    def __init__(self) -> None:
        self._entries: dict[RecordKey, RecordEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RecordKey]:
        return iter(self._entries)

    def __getitem__(self, key: RecordKey | tuple[int, int, str]) -> RecordEntry:
        return self._entries[RecordKey(*key)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingRecord):
            return NotImplemented
        return self._entries.keys() == other._entries.keys() and all(
            entry.num_experts == other[key].num_experts
            and entry.topk_idx.shape == other[key].topk_idx.shape
            and torch.equal(entry.topk_idx.cpu(), other[key].topk_idx.cpu())
            for key, entry in self._entries.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"RoutingRecord({len(self)} entries, {len(self.layers())} layers, "
            f"{len({(k.step, k.micro_batch) for k in self})} forward passes, {self.nbytes} bytes)"
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes of the indices."""
        return sum(entry.topk_idx.nbytes for entry in self._entries.values())

    def layers(self, *, step: int | None = None, micro_batch: int | None = None) -> list[str]:
        """Return the names of the recorded layers in the order in which they ran.

        Args:
            step: only layers of this step; None for all.
            micro_batch: only layers of this forward pass; None for all.
        """
        return list(
            dict.fromkeys(
                key.layer
                for key in self
                if (step is None or key.step == step)
                and (micro_batch is None or key.micro_batch == micro_batch)
            )
        )

    def add(
        self,
        layer: str,
        topk_idx: Tensor,
        num_experts: int,
        *,
        step: int = 0,
        micro_batch: int = 0,
    ) -> None:
        """Add decisions that were made elsewhere, for example by an inference engine.

        Args:
            layer: name of the layer in the model that will replay them.
            topk_idx: `[R, K]`, any integer dtype, in [0, E), or -1 for no expert; copied.
            num_experts: E, number of experts of the layer.
            step: number of the step.
            micro_batch: number of the forward pass in the step.

        Raises:
            TypeError: topk_idx is not of an integer dtype, or a number is not an integer.
            ValueError: its shape or a value is wrong, or the record has such an entry already.
        """
        operation = "RoutingRecord.add"
        if topk_idx.is_floating_point() or topk_idx.dtype == torch.bool:
            raise TypeError(
                f"{operation}: expected topk_idx to be of an integer dtype, got {topk_idx.dtype}"
            )
        if topk_idx.dim() != 2 or not 1 <= topk_idx.shape[1] <= num_experts:
            raise ValueError(
                f"{operation}: expected topk_idx to be of shape [R, K] with K in "
                f"1..num_experts={num_experts}, got {tuple(topk_idx.shape)}"
            )
        if topk_idx.numel():
            # `aminmax` does not support some unsigned dtypes.
            low, high = (int(bound) for bound in topk_idx.long().aminmax())
            if low < -1 or high >= num_experts:
                raise ValueError(
                    f"{operation}: expected topk_idx to be in -1..{num_experts - 1}, got "
                    f"{low if low < -1 else high}"
                )
        key = _checked_key(operation, step, micro_batch, layer)
        if key in self._entries:
            raise ValueError(f"{operation}: expected a new entry, got {where(key)} again")
        copied = topk_idx.to(index_dtype(num_experts), copy=True)
        self._entries[key] = RecordEntry(copied, operator.index(num_experts))

    def update(self, other: RoutingRecord) -> None:
        """Add the entries of another record.

        Raises:
            ValueError: both records have an entry with the same key; this record is unchanged.
        """
        for key in other:
            if key in self._entries:
                raise ValueError(
                    f"RoutingRecord.update: expected new entries, got {where(key)} again"
                )
        self._entries.update(other._entries)

    def clear(self, *, step: int | None = None) -> None:
        """Remove the entries of a step, or all entries."""
        for key in [key for key in self if step is None or key.step == step]:
            del self._entries[key]

    def cpu(self) -> RoutingRecord:
        """Return a record with the same entries in host memory."""
        record = RoutingRecord()
        record._entries = {
            key: RecordEntry(entry.topk_idx.cpu(), entry.num_experts)
            for key, entry in self._entries.items()
        }
        return record

    @contextlib.contextmanager
    def recording(
        self,
        model: nn.Module,
        *,
        step: int = 0,
        micro_batch: int = 0,
        token_idx: Tensor | None = None,
        num_rows: int | None = None,
    ) -> Iterator[RoutingRecord]:
        """Record the routing of every `MoELayer` of a model while the context is open.

        Without `token_idx` each layer runs once, and its T tokens are the rows of the entry. A
        recomputation under activation checkpointing does not count as a run, and records nothing.
        An error in the context leaves the record as it was.

        Args:
            model: the model, or a wrapper of it.
            step: number of the step.
            micro_batch: number of the forward pass in the step.
            token_idx: `[T]` int64, the row of the entry for each token of the pass, or -1 to leave
                a token out. Several passes, such as the decoding steps of a rollout, can then fill
                one entry: open a context with its rows for each pass.
            num_rows: R, number of rows of the entry; needed with `token_idx`.

        Raises:
            ValueError: the model has no `MoELayer`, an argument is out of range, or the record has
                an entry for a layer already (the message names the layer).
            TypeError: token_idx is not int64.
        """
        operation = "RoutingRecord.recording"
        names = _names_of_layers(operation, model)
        keys = {n: _checked_key(operation, step, micro_batch, n) for n in names.values()}
        before = {key: self._entries[key] for key in keys.values() if key in self._entries}
        if token_idx is None and before:
            raise ValueError(
                f"{operation}: expected a new entry, got {where(next(iter(before)))} again"
            )
        if (token_idx is None) != (num_rows is None):
            raise ValueError(
                f"{operation}: expected num_rows together with token_idx, got num_rows={num_rows}"
            )
        _check_rows(operation, token_idx, num_rows)

        def record(
            layer: Any, routed: RouterOutput, topk_idx_TK: Tensor, mask_T: Tensor | None
        ) -> None:
            if layer in names and not in_backward():
                experts = operator.index(layer.num_experts)
                self._enter(keys[names[layer]], topk_idx_TK, experts, token_idx, num_rows)

        open_session(record)
        try:
            yield self
        except BaseException:
            # The record returns to its state before the context, so that the caller can record a
            # forward pass again that raised midway.
            for key in keys.values():
                self._entries.pop(key, None)
            self._entries.update(before)
            raise
        finally:
            close_session(record)

    @contextlib.contextmanager
    def replaying(
        self,
        model: nn.Module,
        *,
        step: int = 0,
        micro_batch: int = 0,
        token_idx: Tensor | None = None,
        strict: bool = True,
    ) -> Iterator[RoutingRecord]:
        """Send tokens to the recorded experts in every `MoELayer` while the context is open.

        The routers run as usual, and their logits give the weights of the recorded experts. A token
        that was recorded without an expert, since it was masked, gets no expert again. A token that
        is masked now gets no expert either. With activation checkpointing, run the backward pass in
        the context too, or checkpoint with `context_fn=pinned_routing`. Otherwise torch refuses the
        recomputation.

        Args:
            model: the model, or a wrapper of it.
            step: number of the recorded step.
            micro_batch: number of the recorded forward pass.
            token_idx: `[T]` int64, the row of the entry for each token of the pass. A token with -1
                keeps the choice of its router, as does a token whose row was never recorded. None
                means that token t has row t, and that the entry has T rows.
            strict: refuse a record with layers that the model does not have; False for a part of a
                model, such as a stage of a pipeline.

        Raises:
            ValueError: on entry, the record lacks the step, the micro-batch, a layer or a row; the
                model lacks a recorded layer; or E differs. In the forward pass, T or K differs. The
                messages name the layer.
            TypeError: token_idx is not int64; or, in the forward pass, the class of a router cannot
                replay a choice.
        """
        operation = "RoutingRecord.replaying"
        names = _names_of_layers(operation, model)
        self._check_pass(operation, step, micro_batch)
        recorded = self.layers(step=step, micro_batch=micro_batch)
        missing = [name for name in names.values() if name not in recorded]
        extra = [name for name in recorded if name not in names.values()]
        if missing or (extra and strict):
            raise ValueError(
                f"{operation}: expected the {len(names)} MoE layers of the model to be the "
                f"{len(recorded)} on record at step {step}, micro-batch {micro_batch}, got "
                f"{', '.join(missing or extra)} in the {'model' if missing else 'record'} alone"
            )
        for layer, name in names.items():
            key = RecordKey(step, micro_batch, name)
            if self[key].num_experts != layer.num_experts:
                raise ValueError(
                    f"{operation}: expected {name} to have {self[key].num_experts} experts as "
                    f"recorded, got {layer.num_experts}"
                )
            _check_rows(operation, token_idx, len(self[key].topk_idx))

        def replay(
            layer: Any, routed: RouterOutput, topk_idx_TK: Tensor, mask_T: Tensor | None
        ) -> Tensor | None:
            if layer not in names:
                return None
            if not can_replay(layer.router):
                raise TypeError(
                    f"{operation}: expected the router of {names[layer]} to have a method "
                    f"with_choice, got {type(layer.router).__name__}"
                )
            key = RecordKey(step, micro_batch, names[layer])
            idx_TK = self._recorded(key, topk_idx_TK, token_idx)
            return idx_TK if mask_T is None else idx_TK.masked_fill(~mask_T[:, None], -1)

        open_session(replay)
        try:
            yield self
        finally:
            close_session(replay)

    def _enter(
        self,
        key: RecordKey,
        topk_idx_TK: Tensor,
        num_experts: int,
        token_idx: Tensor | None,
        num_rows: int | None,
    ) -> None:
        """Record the choices of a layer: all rows of an entry, or the rows of `token_idx`."""
        operation, entry = "RoutingRecord.recording", self._entries.get(key)
        idx_TK = topk_idx_TK.to(index_dtype(num_experts))
        if token_idx is None or num_rows is None:
            if entry is not None:
                raise ValueError(
                    f"{operation}: expected {key.layer} to run once (or token_idx to be given), "
                    "got another forward pass: give each one a micro_batch of its own"
                )
            self._entries[key] = RecordEntry(idx_TK, num_experts)
            return
        rows_T = token_idx.to(idx_TK.device)
        if rows_T.shape != idx_TK.shape[:1]:
            raise ValueError(
                f"{operation}: expected token_idx to be of shape ({idx_TK.shape[0]},), the tokens "
                f"of {key.layer}, got {tuple(rows_T.shape)}"
            )
        shape = (num_rows, idx_TK.shape[1])
        if entry is None:
            entry = RecordEntry(idx_TK.new_full(shape, NOT_RECORDED), num_experts)
        elif entry.topk_idx.shape != shape:
            raise ValueError(
                f"{operation}: expected {where(key)} to have the shape "
                f"{tuple(entry.topk_idx.shape)} of the passes before, got {shape}"
            )
        # An extra last row receives the tokens that are left out. Selecting the others by a mask
        # would wait for the device.
        rows_RK = torch.cat([entry.topk_idx, entry.topk_idx.new_empty((1, shape[1]))])
        rows_RK[torch.where(rows_T < 0, num_rows, rows_T)] = idx_TK
        self._entries[key] = RecordEntry(rows_RK[:-1], num_experts)

    def _recorded(self, key: RecordKey, topk_idx_TK: Tensor, token_idx: Tensor | None) -> Tensor:
        """Return the recorded choices, or the router's for tokens that were not recorded."""
        recorded_RK = self[key].topk_idx.to(topk_idx_TK.device, torch.int64)
        num_tokens = recorded_RK.shape[0] if token_idx is None else token_idx.shape[0]
        expected = (num_tokens, recorded_RK.shape[1])
        if tuple(topk_idx_TK.shape) != expected:
            raise ValueError(
                f"RoutingRecord.replaying: expected {key.layer} to choose {expected[1]} experts "
                f"for {expected[0]} tokens as recorded at step {key.step}, micro-batch "
                f"{key.micro_batch}, got {topk_idx_TK.shape[1]} for {topk_idx_TK.shape[0]}"
            )
        idx_TK = recorded_RK
        if token_idx is not None:
            rows_T = token_idx.to(topk_idx_TK.device)
            idx_TK = recorded_RK[rows_T.clamp(min=0)]
            idx_TK = torch.where((rows_T < 0)[:, None], NOT_RECORDED, idx_TK)
        return torch.where(idx_TK == NOT_RECORDED, topk_idx_TK, idx_TK)

    def _check_pass(self, operation: str, step: int, micro_batch: int) -> None:
        steps = sorted({key.step for key in self})
        if step not in steps:
            raise ValueError(f"{operation}: expected step to be one of {steps}, got {step}")
        passes = sorted({key.micro_batch for key in self if key.step == step})
        if micro_batch not in passes:
            raise ValueError(
                f"{operation}: expected micro_batch to be one of {passes} at step {step}, got "
                f"{micro_batch}"
            )

    def agreement(self, other: RoutingRecord) -> dict[RecordKey, float]:
        """Return, for each entry, the fraction of choices that another record has for the token.

        The fraction is 1.0 if two routers send every token to the same set of experts, or if an
        entry has no choice. A drift between training and rollout shows here before it shows in the
        loss. Entries that only one record has are left out. The entries are copied to the host.

        Raises:
            ValueError: entries with the same key differ in shape or in the number of experts.
        """
        result = {}
        for key, entry in self._entries.items():
            if key not in other._entries:
                continue
            theirs = other[key]
            if (entry.topk_idx.shape, entry.num_experts) != (
                theirs.topk_idx.shape,
                theirs.num_experts,
            ):
                raise ValueError(
                    f"RoutingRecord.agreement: expected {where(key)} to have shape "
                    f"{tuple(entry.topk_idx.shape)} of {entry.num_experts} experts in both, got "
                    f"{tuple(theirs.topk_idx.shape)} of {theirs.num_experts}"
                )
            mine_RK, theirs_RK = entry.topk_idx.cpu(), theirs.topk_idx.cpu()
            same_RK = (mine_RK[:, :, None] == theirs_RK[:, None, :]).any(dim=2) & (mine_RK >= 0)
            num_choices = int((mine_RK >= 0).sum())
            result[key] = float(same_RK.sum()) / num_choices if num_choices else 1.0
        return result

    def to_bytes(self) -> bytes:
        """Serialise the record: version, checksum, a header in JSON, and the raw indices."""
        # Indices are written in the byte order of the machine: every one that runs torch is
        # little-endian.
        header, payload = [], []
        for key, entry in self._entries.items():
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

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RoutingRecord:
        """Read the bytes of `to_bytes`.

        Raises:
            ValueError: data is not a record, or is of another version, cut short or changed.
        """
        record = cls()
        data = bytes(data)
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
        header = start + _SIZE.size
        offset = header + _SIZE.unpack_from(data, start)[0]
        for fields in json.loads(data[header:offset]):
            dtype, shape = _DTYPES[fields["dtype"]], fields["shape"]
            size = shape[0] * shape[1] * dtype.itemsize
            # The bytes are copied, because the offset may not be a multiple of the dtype's size.
            raw = bytearray(data[offset : offset + size])
            idx = torch.frombuffer(raw, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            key = RecordKey(fields["step"], fields["micro_batch"], fields["layer"])
            record._entries[key] = RecordEntry(idx.view(*shape), fields["num_experts"])
            offset += size
        return record

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_bytes` to a file, which is replaced atomically."""
        with replacing(path) as file:
            file.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingRecord:
        """Read a file of `save`; see `from_bytes`."""
        return cls.from_bytes(Path(path).read_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutingRecord.from_bytes, (self.to_bytes(),)


def _names_of_layers(operation: str, model: nn.Module) -> dict[Any, str]:
    """Return the name of each layer, by layer, since a module hashes by identity."""
    layers = {layer: name for name, layer in moe_layers(model).items()}
    if not layers:
        raise ValueError(
            f"{operation}: expected model to have a MoELayer, got none in {type(model).__name__}"
        )
    return layers


def _check_rows(operation: str, token_idx: Tensor | None, num_rows: int | None) -> None:
    """Raise ValueError for rows that an entry does not have; rows on a GPU are not read."""
    if token_idx is None or num_rows is None:
        return
    if token_idx.dtype != torch.int64:
        raise TypeError(f"{operation}: expected token_idx to be int64, got {token_idx.dtype}")
    if token_idx.is_cpu and token_idx.numel() and int(token_idx.max()) >= num_rows:
        raise ValueError(
            f"{operation}: expected token_idx to be below {num_rows}, the rows of an entry, got "
            f"{int(token_idx.max())}"
        )


def _checked_key(operation: str, step: int, micro_batch: int, layer: str) -> RecordKey:
    for name, value in (("step", step), ("micro_batch", micro_batch)):
        check_integer(operation, name, value)
        check_rule(operation, name, value, "at least 0", value >= 0)
    return RecordKey(operator.index(step), operator.index(micro_batch), layer)
