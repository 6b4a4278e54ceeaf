"""Finds the tensors of a model that are sent, and hashes their bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.comm.c10d import inner_model
from moe_ext.distributed.dtensor import local_part
from moe_ext.ops.delta import as_signed
from moe_ext.sync.region import Region

State = Mapping[str, Tensor] | nn.Module
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDE = 0x9E3779B97F4A7C15


def tensors_of(state: State, operation: str) -> dict[str, Tensor]:
    """Return tensors by name; for a module, those of its state dict, by names without wrappers.

    Raises:
        TypeError: a value is not a dense real tensor that has memory.
    """
    if isinstance(state, nn.Module):
        named = inner_model(state).state_dict()
        state = {name.replace("_orig_mod.", ""): value for name, value in named.items()}
    for name, value in state.items():
        if not _is_plain(value):
            about = type(value).__name__
            if isinstance(value, Tensor):
                about += f", {value.dtype}, {value.layout} on {value.device}"
            raise TypeError(
                f"{operation}: expected state to hold dense real tensors, got {name!r} of {about}"
            )
    return dict(state)


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_complex() or value.is_quantized or value.is_nested or value.is_meta)
    )


def bits(tensor: Tensor) -> Tensor:
    """Return this rank's part as integers of the same size, which share its memory."""
    local = local_part(tensor.detach())
    return local.view(_SIZED[local.itemsize]) if local.itemsize in _SIZED else local


def _seed_of(name: str) -> int:
    """Return the seed with which elements of a tensor are hashed."""
    return as_signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))


def hash_of(name: str, flat: Tensor, region: Region) -> int:
    """Return the hash of a part of a tensor. Hashes of all parts add up to that of the whole."""
    start = region.start
    if start is not None:
        return ops.delta_hash(flat, as_signed(_seed_of(name) + start * _STRIDE))
    return hash_at(name, flat, region.to_whole(torch.arange(flat.numel())))


def hash_at(name: str, values: Tensor, places: Tensor) -> int:
    """Return the hash of elements at places in the whole."""
    return ops.delta_hash(values.contiguous(), _seed_of(name), places.contiguous())


def hash_change(name: str, flat: Tensor, payload: Tensor, region: Region, xored: bool) -> int:
    """Return the number that a payload would add to `hash_of`."""
    start = region.start
    if start is not None:
        seed = as_signed(_seed_of(name) + start * _STRIDE)
        return ops.delta_hash_change(flat, payload, seed, xored=xored)
    like = flat.new_empty(0, device="cpu")
    places, values = ops.delta_unpack(payload, like, flat.numel())
    old = flat.reshape(-1)[places.to(flat.device)].cpu()
    values, places = old ^ values if xored else values, region.to_whole(places)
    return as_signed(hash_at(name, values, places) - hash_at(name, old, places))
