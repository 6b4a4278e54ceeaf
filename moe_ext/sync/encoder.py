"""The sender: encodes the changes of tensors since the version that was sent last."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext._checks import check_numbers
from moe_ext.ops.delta import as_signed
from moe_ext.sync.region import Region
from moe_ext.sync.state import State, bits, hash_change, hash_of, tensors_of
from moe_ext.sync.update import Update, UpdateEntry

Transform = Callable[[str, Tensor], Mapping[str, Tensor]]
_OP = "DeltaEncoder"


@dataclass
class _Sent:
    """A tensor as it was sent last, with its elements as integers of the same bits."""

    flat: Tensor
    dtype: str
    region: Region
    hash: int


class DeltaEncoder:
    """Encodes the changes in a set of tensors since the version before.

    Values are compared as bits and sent as they are, so that receivers hold the bits of the sender
    after any number of updates. The encoder keeps a copy of the tensors as they were sent last, on
    their device. Of a DTensor it is that of this rank's part.

    Args:
        state: the tensors by name, or a module, for those of its state dict. Each `encode` reads
            them anew. Names, shapes and dtypes must not change.
        history: number of updates kept for receivers that missed some.
        xored: send the bits that differ instead of values. Updates have the same plain size, but
            zstd compresses them better.
        transform: maps the name and value of a tensor in ``state`` to the tensors that are sent, by
            name, as `fp8_blocks` does. Results of ``transform`` are compared, not its inputs.

    Raises:
        TypeError: a value of ``state``, or a result of ``transform``, is not a dense real tensor.
        ValueError: ``transform`` gives a name twice.

    Reference: Yu et al., PULSE (arXiv 2602.03839).
    """

    def __init__(
        self,
        state: State,
        *,
        history: int = 4,
        xored: bool = False,
        transform: Transform | None = None,
    ) -> None:
        check_numbers("DeltaEncoder", DeltaEncoder.__init__.__annotations__, locals(), ["history"])
        self._state, self._xored, self._transform = state, xored, transform
        self._history: deque[Update] = deque(maxlen=int(history))
        self.chain = uuid.uuid4().hex
        self.version = 0
        self._sent: dict[str, _Sent] = {}
        for name, tensor in self._tensors().items():
            flat, region = bits(tensor).reshape(-1).clone(), Region.of(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._sent[name] = _Sent(flat, dtype, region, hash_of(name, flat, region))

    def _tensors(self) -> dict[str, Tensor]:
        found = tensors_of(self._state, _OP)
        if self._transform is None:
            return found
        made: dict[str, Tensor] = {}
        for name, tensor in found.items():
            for key, value in self._transform(name, tensor).items():
                if key in made:
                    raise ValueError(
                        f"{_OP}: expected transform to give names of their own, got {key} twice, "
                        f"the second time of {name}"
                    )
                made[key] = value
        return tensors_of(made, f"{_OP}: transform")

    @torch.no_grad()
    def encode(self) -> Update:
        """Encode all changes since the last version as the next one; reads every tensor once.

        Returns:
            Update: its version is one more than before, even if nothing changed.

        Raises:
            ValueError: a tensor came, went, or changed its shape or dtype; the version stays then.
        """
        tensors = self._tensors()
        if tensors.keys() != self._sent.keys():
            raise ValueError(
                f"{_OP}.encode: expected the tensors of the first version, got "
                f"{sorted(tensors.keys() ^ self._sent.keys())} besides or too few"
            )
        entries = []
        for name, tensor in tensors.items():
            sent, region = self._sent[name], Region.of(tensor)
            if (str(tensor.dtype), region) != (f"torch.{sent.dtype}", sent.region):
                raise ValueError(
                    f"{_OP}.encode: expected {name} to stay {sent.dtype} of {sent.region}, got "
                    f"{tensor.dtype} of {region}"
                )
            now = bits(tensor).contiguous().reshape(-1)
            payload = ops.delta_encode(now, sent.flat, xored=self._xored)
            change = hash_change(name, sent.flat, payload, region, self._xored)
            after = as_signed(sent.hash + change)
            entries.append(UpdateEntry(name, sent.dtype, region, payload, sent.hash, after))
        for entry in entries:
            sent = self._sent[entry.name]
            ops.delta_apply_(sent.flat, entry.payload, xored=self._xored)
            sent.hash = entry.after
        base, self.version = self.version, self.version + 1
        update = Update("delta", self.chain, base, self.version, self._xored, tuple(entries))
        self._history.append(update)
        return update

    def full(self) -> Update:
        """Return all elements of the version that was sent last, for a receiver of any version."""
        return self._whole("full")

    def base(self) -> Update:
        """Return the hashes of the version that was sent last, without elements.

        The update serves a receiver that has loaded the same weights from the same checkpoint.
        """
        return self._whole("base")

    def since(self, version: int) -> list[Update]:
        """Return the updates since a version, or a full update if that version is too old."""
        missing = self.version - version
        if 0 <= missing <= len(self._history):
            return list(self._history)[len(self._history) - missing :]
        return [self.full()]

    def _whole(self, kind: Literal["full", "base"]) -> Update:
        entries = []
        for name, sent in self._sent.items():
            payload = torch.empty(0, dtype=torch.uint8)
            if kind == "full":
                payload = as_bytes(sent.flat.cpu()).clone()
            entries.append(
                UpdateEntry(name, sent.dtype, sent.region, payload, sent.hash, sent.hash)
            )
        return Update(kind, self.chain, -1, self.version, self._xored, tuple(entries))
