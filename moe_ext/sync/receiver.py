"""The receiving end: updates written in place, each checked as a whole before its first write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.ops.delta import as_signed
from moe_ext.sync.region import Region
from moe_ext.sync.state import State, bits, hash_change, hash_of, seed_of, tensors_of
from moe_ext.sync.update import Entry, Update

_OP = "DeltaReceiver.apply"


class DeltaReceiver:
    """Holds tensors at a version of a `DeltaEncoder`, and applies its updates in place.

    Args:
        state: the tensors by name, which updates are written to, or the module whose state dict
            they are. They may be sharded otherwise than the sender's.

    A delta takes time for what changed alone. Its elements are decoded, and its hashes compared
    with those of the tensors here, before the first write. Tensors that someone else wrote to are
    found by `verify`, which reads all of them.
    """

    def __init__(self, state: State) -> None:
        self._tensors = tensors_of(state, "DeltaReceiver")
        for name, tensor in self._tensors.items():
            if not bits(tensor).is_contiguous():
                raise ValueError(f"DeltaReceiver: expected {name} to be contiguous, got a view")
        self._regions = {name: Region.of(tensor) for name, tensor in self._tensors.items()}
        self._hashes: dict[str, int] = {}
        self.chain = ""
        self.version = -1

    @torch.no_grad()
    def apply(self, update: Update | Tensor | bytes) -> None:
        """Bring the tensors to the version of an update, all or none.

        Args:
            update: the update or its bytes. The parts of several ranks come as one, by
                `Update.merged`.

        Raises:
            ValueError: the update is damaged, is of another encoder, or does not follow the version
                that is here; a tensor is missing, or has another shape or dtype; or the tensors
                here are not those that it was made for. Nothing has changed then.
        """
        if not isinstance(update, Update):
            update = Update.from_bytes(update)
        if update.kind == "delta" and (update.chain, update.base_version) != (
            self.chain,
            self.version,
        ):
            raise ValueError(
                f"{_OP}: expected an update of version {self.version} of {self.chain or 'none'}, "
                f"got one of version {update.base_version} of {update.chain}; ask the encoder for "
                "`since(version)` or `full()`"
            )
        writes: list[Callable[[], object]] = []
        hashes_before, hashes_after, parts = (defaultdict[str, list[int]](list) for _ in range(3))
        changes: dict[str, int] = defaultdict(int)
        for entry in update.entries:
            target = self._target(entry)
            hashes_before[entry.name].append(entry.before)
            hashes_after[entry.name].append(entry.after)
            parts[entry.name].append(entry.region.numel)
            if entry.region == self._regions[entry.name]:
                change, write = self._direct(update, entry, target)
            else:
                change, write = self._moved(update, entry, target)
            changes[entry.name] = as_signed(changes[entry.name] + change)
            writes.append(write)
        if update.kind != "delta":
            missing = self._tensors.keys() - parts.keys()
            if missing:
                raise ValueError(
                    f"{_OP}: expected all tensors in the update, got no {min(missing)}"
                )
        hashes = dict(self._hashes)
        for name, region in self._regions.items():
            if name not in parts:
                continue
            covers = region.is_whole and sum(parts[name]) == region.numel
            covers |= len(parts[name]) == 1 and self._is_same(update, name)
            if not covers:
                hashes.pop(name, None)
                continue
            before, after = (as_signed(sum(found[name])) for found in (hashes_before, hashes_after))
            if update.kind == "delta":
                known = self._hashes.get(name, before)
                if known != before or as_signed(before + changes[name]) != after:
                    raise ValueError(
                        f"{_OP}: expected {name} to have the hash {before:x} of version "
                        f"{update.base_version} and {after:x} after, got {known:x} and "
                        f"{as_signed(known + changes[name]):x}"
                    )
            elif changes[name] != after:
                raise ValueError(
                    f"{_OP}: expected {name} to have the hash {after:x}, got {changes[name]:x}"
                )
            hashes[name] = after
        for write in writes:
            write()
        self._hashes, self.chain, self.version = hashes, update.chain, update.version

    def verify(self) -> None:
        """Compare all tensors with the version that is here; reads every element.

        Raises:
            ValueError: a tensor is not what the updates made of it; someone else wrote to it.
        """
        for name, known in self._hashes.items():
            flat = bits(self._tensors[name]).reshape(-1)
            found = hash_of(name, flat, self._regions[name])
            if found != known:
                raise ValueError(
                    f"DeltaReceiver.verify: expected {name} to have the hash {known:x} of version "
                    f"{self.version}, got {found:x}"
                )

    def _is_same(self, update: Update, name: str) -> bool:
        return any(e.name == name and e.region == self._regions[name] for e in update.entries)

    def _target(self, entry: Entry) -> Tensor:
        tensor = self._tensors.get(entry.name)
        if tensor is None:
            raise ValueError(f"{_OP}: expected a tensor {entry.name} here, got none")
        if (tensor.dtype, tuple(tensor.shape)) != (entry.torch_dtype, entry.region.whole):
            raise ValueError(
                f"{_OP}: expected {entry.name} to be {entry.dtype} of shape {entry.region.whole}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        return bits(tensor).view(-1)

    def _direct(
        self, update: Update, entry: Entry, target: Tensor
    ) -> tuple[int, Callable[[], object]]:
        """Of a part that is the same here: its hash, or the change of it, and the write."""
        if update.kind == "delta":
            try:
                change = hash_change(entry.name, target, entry.payload, entry.region, update.xored)
            except RuntimeError as error:
                raise ValueError(f"{_OP}: {entry.name}: {error}") from None
            apply = partial(ops.delta_apply_, target, entry.payload, xored=update.xored)
            return change, apply
        if update.kind == "base":
            return hash_of(entry.name, target, entry.region), lambda: None
        values = _elements(entry, target)
        return hash_of(entry.name, values, entry.region), partial(target.copy_, values)

    def _moved(
        self, update: Update, entry: Entry, target: Tensor
    ) -> tuple[int, Callable[[], object]]:
        """Of a part that is cut otherwise here: its hash, or the change of it, and the write."""
        if update.kind == "delta":
            like = target.new_empty(0, device="cpu")
            try:
                places, values = ops.delta_unpack(entry.payload, like, entry.region.numel)
            except RuntimeError as error:
                raise ValueError(f"{_OP}: {entry.name}: {error}") from None
        else:
            places = torch.arange(entry.region.numel)
        whole = entry.region.to_whole(places)
        here = self._regions[entry.name].from_whole(whole)
        kept = here >= 0
        whole, here = whole[kept], here[kept].to(target.device)
        old = target[here].cpu()
        if update.kind == "base":
            return _hash_at(entry.name, old, whole), lambda: None
        values = (values if update.kind == "delta" else _elements(entry, target))[kept]
        if update.xored and update.kind == "delta":
            values = old ^ values
        change = _hash_at(entry.name, values, whole)
        if update.kind == "delta":
            change = as_signed(change - _hash_at(entry.name, old, whole))
        return change, partial(target.index_copy_, 0, here, values.to(target.device))


def _hash_at(name: str, values: Tensor, places: Tensor) -> int:
    return ops.delta_hash(values.contiguous(), seed_of(name), places.contiguous())


def _elements(entry: Entry, target: Tensor) -> Tensor:
    """The elements of a full update."""
    if entry.payload.numel() != entry.region.numel * target.itemsize:
        raise ValueError(
            f"{_OP}: expected {entry.region.numel * target.itemsize} bytes of {entry.name}, got "
            f"{entry.payload.numel()}"
        )
    payload = entry.payload
    if payload.storage_offset() % target.itemsize or payload.data_ptr() % target.itemsize:
        payload = payload.clone()
    return payload.view(target.dtype)
