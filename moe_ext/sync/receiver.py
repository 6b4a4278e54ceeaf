"""The receiver: writes updates in place, each after a check of the whole update."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._bytes import as_bytes
from moe_ext.ops.delta import as_signed
from moe_ext.sync.region import Region
from moe_ext.sync.state import State, bits, hash_at, hash_change, hash_of, tensors_of
from moe_ext.sync.update import Update, UpdateEntry

_OP = "DeltaReceiver.apply"


class DeltaReceiver:
    """Holds tensors at a version of a `DeltaEncoder`, and applies its updates in place.

    Args:
        state: the tensors by name to which updates are written, or a module, for those of its state
            dict. The tensors may be sharded otherwise than the sender's, and may share memory.

    The time of a delta depends on the number of changed elements alone. Before the first write, its
    elements are decoded, and its hashes are compared with those of the tensors here. `verify` finds
    tensors that someone else wrote to, and reads all elements for that. `apply` and `verify` raise
    an error if a tensor was replaced, as by `module.to(dtype)`.

    Raises:
        ValueError: a tensor is not contiguous.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._tensors = tensors_of(state, "DeltaReceiver")
        for name, tensor in self._tensors.items():
            if not bits(tensor).is_contiguous():
                raise ValueError(f"DeltaReceiver: expected {name} to be contiguous, got a view")
        self._places = {name: _place(tensor) for name, tensor in self._tensors.items()}
        self._regions = {name: Region.of(tensor) for name, tensor in self._tensors.items()}
        self._shared = _sharing(self._tensors)
        self._hashes: dict[str, int] = {}
        self.chain = ""
        self.version = -1

    def apply(self, update: Update | Tensor | bytes) -> None:
        """Bring all tensors to the version of an update, or change none of them.

        Args:
            update: the update or its bytes. `Update.merged` makes one update from the parts of
                several ranks.

        Raises:
            ValueError: the update is damaged, is of another encoder, or does not follow the version
                that is here; a tensor or some of its elements are missing, or it has another shape
                or dtype; the tensors here are not those that it was made for, or were replaced; or
                tensors that share memory here would differ. Nothing has changed then.
        """
        self.prepare(update)()

    @torch.no_grad()
    def prepare(self, update: Update | Tensor | bytes) -> Callable[[], None]:
        """Check an update, and change nothing yet.

        Returns:
            A function that writes the update. The tensors must not change before its call.

        Raises:
            ValueError: as `apply`.
        """
        if not isinstance(update, Update):
            update = Update.from_bytes(update)
        here = self.chain, self.version
        if update.kind == "delta" and (update.chain, update.base_version) != here:
            raise ValueError(
                f"{_OP}: expected an update of version {self.version} of {self.chain or 'none'}, "
                f"got one of version {update.base_version} of {update.chain}; ask the encoder for "
                "`since(version)` or `full()`"
            )
        self._check_places(_OP)
        entries = defaultdict[str, list[UpdateEntry]](list)
        for entry in update.entries:
            entries[entry.name].append(entry)
        missing = self._tensors.keys() - entries.keys()
        if missing and update.kind != "delta":
            raise ValueError(f"{_OP}: expected all tensors in the update, got no {min(missing)}")
        repeated, staged = self._split_shared(entries)
        writes: list[Callable[[], object]] = []
        hashes = dict(self._hashes)
        for name, parts in entries.items():
            found = [self._change(update, entry, staged.get(name)) for entry in parts]
            hashes[name] = self._hash_after(update, name, parts, [change for change, _ in found])
            if name in staged:
                for _, write in found:
                    write()
                writes.append(partial(self._flat(name).copy_, staged[name]))
            elif name not in repeated:
                writes += [write for _, write in found]
        self._check_equal_memory(staged)

        def commit() -> None:
            with torch.no_grad():
                for write in writes:
                    write()
            self._hashes, self.chain, self.version = hashes, update.chain, update.version

        return commit

    def verify(self) -> None:
        """Compare all tensors with the version that is here; reads every element.

        Raises:
            ValueError: no update has come yet; or a tensor differs from the result of the updates,
                because someone else wrote to it or replaced it.
        """
        if self.version < 0:
            raise ValueError("DeltaReceiver.verify: expected an update to be here, got none yet")
        self._check_places("DeltaReceiver.verify")
        for name, known in self._hashes.items():
            found = hash_of(name, self._flat(name), self._regions[name])
            if found != known:
                raise ValueError(
                    f"DeltaReceiver.verify: expected {name} to have the hash {known:x} of version "
                    f"{self.version}, got {found:x}"
                )

    def _flat(self, name: str) -> Tensor:
        return bits(self._tensors[name]).view(-1)

    def _check_places(self, operation: str) -> None:
        """Raise a ValueError if the state no longer holds the tensors that are written to."""
        found = tensors_of(self._state, operation)
        for name in sorted(found.keys() | self._places.keys()):
            now = _place(found[name]) if name in found else None
            if now != self._places.get(name):
                raise ValueError(
                    f"{operation}: expected state to hold the tensors that it had when the "
                    f"receiver was made, got another {name} (by module.to or load_state_dict("
                    "assign=True), or a copy that state_dict makes); make a new DeltaReceiver"
                )

    def _split_shared(
        self, entries: Mapping[str, Sequence[UpdateEntry]]
    ) -> tuple[set[str], dict[str, Tensor]]:
        """Return names of tensors that need no write of their own, and copies of others to change.

        Of tied tensors that change alike, only the first one is written. Other tensors that share
        memory are changed in copies, which are copied back after a check that they agree.
        """
        repeated: set[str] = set()
        staged: dict[str, Tensor] = {}
        for names in self._shared:
            first, *others = names
            if all(
                self._places[first] == self._places[name]
                and self._regions[first] == self._regions[name]
                and _changes_alike(entries.get(first, ()), entries.get(name, ()))
                for name in others
            ):
                repeated.update(others)
            else:
                staged.update((name, self._flat(name).clone()) for name in names)
        return repeated, staged

    def _check_equal_memory(self, staged: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if staged tensors would write different bytes to one place."""
        for names in self._shared:
            for one, other in itertools.combinations([n for n in names if n in staged], 2):
                starts = [self._places[name][1] for name in (one, other)]
                ends = [s + staged[n].nbytes for s, n in zip(starts, (one, other), strict=True)]
                first, last = max(starts), max(max(starts), min(ends))
                parts = [
                    as_bytes(staged[name])[first - start : last - start]
                    for name, start in zip((one, other), starts, strict=True)
                ]
                if not torch.equal(*parts):
                    raise ValueError(
                        f"{_OP}: expected {one} and {other}, which share memory here, to get the "
                        "same elements, got different ones"
                    )

    def _hash_after(
        self, update: Update, name: str, parts: Sequence[UpdateEntry], changes: Sequence[int]
    ) -> int:
        """Return the hash of the part here after an update, compared with those of the senders.

        If only pieces of a sender's part lie here, there is no hash to compare with.
        """
        region, known = self._regions[name], self._hashes.get(name, 0)
        shares = [entry.region.overlap(region) for entry in parts]
        is_delta, is_covered = update.kind == "delta", sum(shares) == region.numel
        if not is_delta and not is_covered:
            raise ValueError(
                f"{_OP}: expected all {region.numel} elements of {name} that are here, got "
                f"{sum(shares)}; did all sources send theirs?"
            )
        found = as_signed((known if is_delta else 0) + sum(changes))
        inside = [entry for entry, share in zip(parts, shares, strict=True) if share]
        if is_covered and sum(entry.region.numel for entry in inside) == region.numel:
            before = as_signed(sum(entry.before for entry in inside))
            after = as_signed(sum(entry.after for entry in inside))
            if is_delta and (known != before or found != after):
                raise ValueError(
                    f"{_OP}: expected {name} to have the hash {before:x} of version "
                    f"{update.base_version} and {after:x} after, got {known:x} and {found:x}"
                )
            if found != after:
                raise ValueError(
                    f"{_OP}: expected {name} to have the hash {after:x}, got {found:x}"
                )
        return found

    def _change(
        self, update: Update, entry: UpdateEntry, staged: Tensor | None
    ) -> tuple[int, Callable[[], object]]:
        """Return the hash of an entry's elements here (of a delta, its change), and the write."""
        live = self._target(entry)
        is_direct = entry.region == self._regions[entry.name]
        change = self._direct if is_direct else self._moved
        try:
            return change(update, entry, live if staged is None else staged)
        except RuntimeError as error:
            # The payload is damaged.
            raise ValueError(f"{_OP}: {entry.name}: {error}") from None

    def _target(self, entry: UpdateEntry) -> Tensor:
        tensor = self._tensors.get(entry.name)
        if tensor is None:
            raise ValueError(f"{_OP}: expected a tensor {entry.name} here, got none")
        if (tensor.dtype, tuple(tensor.shape)) != (entry.torch_dtype, entry.region.whole):
            raise ValueError(
                f"{_OP}: expected {entry.name} to be {entry.dtype} of shape {entry.region.whole}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        return self._flat(entry.name)

    def _direct(
        self, update: Update, entry: UpdateEntry, target: Tensor
    ) -> tuple[int, Callable[[], object]]:
        """Return the results of `_change` for an entry whose region is the part here."""
        if update.kind == "delta":
            change = hash_change(entry.name, target, entry.payload, entry.region, update.xored)
            apply = partial(ops.delta_apply_, target, entry.payload, xored=update.xored)
            return change, apply
        if update.kind == "base":
            return hash_of(entry.name, target, entry.region), lambda: None
        values = _elements(entry, target)
        return hash_of(entry.name, values, entry.region), partial(target.copy_, values)

    def _moved(
        self, update: Update, entry: UpdateEntry, target: Tensor
    ) -> tuple[int, Callable[[], object]]:
        """Return the results of `_change` for an entry that is cut otherwise than the part here."""
        if update.kind == "delta":
            like = target.new_empty(0, device="cpu")
            places, values = ops.delta_unpack(entry.payload, like, entry.region.numel)
        else:
            places = torch.arange(entry.region.numel)
        whole = entry.region.to_whole(places)
        here = self._regions[entry.name].from_whole(whole)
        kept = here >= 0
        whole, here = whole[kept], here[kept].to(target.device)
        old = target[here].cpu()
        if update.kind == "base":
            return hash_at(entry.name, old, whole), lambda: None
        values = (values if update.kind == "delta" else _elements(entry, target))[kept]
        if update.xored and update.kind == "delta":
            values = old ^ values
        change = hash_at(entry.name, values, whole)
        if update.kind == "delta":
            change = as_signed(change - hash_at(entry.name, old, whole))
        return change, partial(target.index_copy_, 0, here, values.to(target.device))


def _place(tensor: Tensor) -> tuple[torch.device, int, torch.dtype, torch.Size]:
    """Return facts of a tensor that change if another one replaces it."""
    local = bits(tensor)
    return local.device, local.data_ptr(), tensor.dtype, tensor.shape


def _sharing(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return lists of the names of tensors that overlap in memory."""
    spans = sorted(
        (str(local.device), local.data_ptr(), local.nbytes, name)
        for name, local in ((name, bits(tensor)) for name, tensor in tensors.items())
        if local.nbytes
    )
    groups: list[list[str]] = []
    last = ("", 0)
    for device, start, size, name in spans:
        if (device, start) < last and device == last[0]:
            groups[-1].append(name)
        else:
            groups.append([name])
            last = (device, 0)
        last = max(last, (device, start + size))
    return [names for names in groups if len(names) > 1]


def _changes_alike(one: Sequence[UpdateEntry], other: Sequence[UpdateEntry]) -> bool:
    """Return True if two tensors get the same elements at the same places."""
    return len(one) == len(other) and all(
        a.region == b.region and torch.equal(a.payload, b.payload)
        for a, b in zip(one, other, strict=True)
    )


def _elements(entry: UpdateEntry, target: Tensor) -> Tensor:
    """Return the elements of an entry of a full update."""
    if entry.payload.numel() != entry.region.numel * target.itemsize:
        raise ValueError(
            f"{_OP}: expected {entry.region.numel * target.itemsize} bytes of {entry.name}, got "
            f"{entry.payload.numel()}"
        )
    payload = entry.payload
    if payload.storage_offset() % target.itemsize or payload.data_ptr() % target.itemsize:
        payload = payload.clone()
    return payload.view(target.dtype)
