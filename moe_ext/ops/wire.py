"""The wire format: a sparse or dense gradient as one uint8 tensor.

Shape suffixes: K values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_choice
from moe_ext.ops.quantize import dequantize_blockwise, quantize_blockwise

_INDEX_CODECS = ("dense", "bitmap", "u16", "delta")
_VALUE_CODECS = ("fp32", "bf16", "fp8", "int8", "int4", "sign")
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
_RUN = 65536


class DecodedGradient(NamedTuple):
    """Content of a payload.

    Attributes:
        values (Tensor[K]): float32.
        indices (Tensor[K]): int64, ascending and all different; None if every element has a value.
        numel (int): elements of the gradient.
    """

    values: Tensor
    indices: Tensor | None
    numel: int


def choose_index_codec(num_values: int, numel: int) -> str:
    """Returns the shortest index codec whose size does not depend on data, so that ranks agree.

    Args:
        num_values (int): K.
        numel (int): elements of the gradient.

    Returns:
        str: "dense", "bitmap" or "u16".
    """
    if num_values == numel:
        return "dense"
    sizes = {codec: _index_bytes(codec, num_values, numel) for codec in ("bitmap", "u16")}
    return "bitmap" if sizes["bitmap"] <= sizes["u16"] else "u16"


def encode_gradient(
    values_K: Tensor,
    indices_K: Tensor | None,
    numel: int,
    *,
    index_codec: str = "auto",
    value_codec: str = "fp32",
    block: int = 128,
    checksum: bool = False,
) -> Tensor:
    """Packs values and indices into one uint8 tensor that any collective carries.

    A header of 64 bytes, then indices, value codes and scales (see csrc/sparse/README.md for
    every byte). Offsets are 64 bits throughout.

    Args:
        values_K (Tensor[K]): float32. Coarse codecs round them. If that matters, quantise with a
            residual before.
        indices_K (Tensor[K]): int64, ascending and all different, in [0, numel); None if K is
            numel.
        numel (int): elements of the gradient, in [0, 2^62].
        index_codec (str): "bitmap" (numel / 8 bytes); "u16" (2 bytes for each index and 4 for each
            65536 elements); "delta" (1 byte for each index if at least one element of 128 is sent,
            2 if one of 16384 is); "dense" (none); or "auto": `choose_index_codec`.
        value_codec (str): "fp32", "bf16", "fp8", "int8", "int4" or "sign"; the last four with a
            scale for each ``block`` values, see `quantize_blockwise`.
        block (int): a power of two from 64 to 1024.
        checksum (bool): add a CRC-32C, for debugging.

    Returns:
        Tensor: uint8; its size depends on K, numel and the codecs alone, except for "delta".

    Raises:
        ValueError: the values are not a vector of float32, the value codec is unknown, or indices
            are missing.
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic.
    """
    if values_K.dtype != torch.float32 or values_K.dim() != 1:
        raise ValueError(
            "encode_gradient: expected values to be a 1-D tensor of float32, got "
            f"{values_K.dtype} of shape {tuple(values_K.shape)}"
        )
    check_choice("encode_gradient", "value_codec", value_codec, _VALUE_CODECS)
    count = values_K.shape[0]
    codec = index_codec
    if codec == "auto":
        codec = "dense" if indices_K is None else choose_index_codec(count, numel)
    if indices_K is None and codec != "dense":
        raise ValueError(f"encode_gradient: expected indices to be given for {codec!r}, got None")
    if indices_K is None or (codec == "dense" and indices_K.shape[0] == numel):
        indices_K = values_K.new_empty((0,), dtype=torch.int64)
    if value_codec in _PLAIN:
        codes = as_bytes(values_K.to(_PLAIN[value_codec]))
        scales, block = values_K.new_empty((0,), dtype=torch.float32), 0
    else:
        codes, scales = quantize_blockwise(values_K, format=value_codec, block=block)
    return torch.ops.moe_ext._encode_payload(
        indices_K, codes, scales, numel, count, codec, value_codec, block, checksum
    )


def _index_bytes(codec: str, count: int, numel: int) -> int:
    runs = (numel + _RUN - 1) // _RUN
    return {"bitmap": (numel + 7) // 8, "u16": 4 * runs + 2 * count}.get(codec, 0)


def _aligned(num_bytes: int) -> int:
    return (num_bytes + 15) // 16 * 16


@torch.library.register_fake("moe_ext::_encode_payload")
def _(indices: Any, codes: Tensor, scales: Tensor, *sizes: Any) -> Tensor:
    numel, count, index_codec, *_ = sizes
    if index_codec == "delta":
        return codes.new_empty((torch.library.get_ctx().new_dynamic_size(),))
    size = 64 + _aligned(_index_bytes(index_codec, count, numel))
    size += _aligned(codes.shape[0]) + _aligned(4 * scales.shape[0])
    return codes.new_empty((size,))


def decode_gradient(payload: Tensor) -> DecodedGradient:
    """Unpacks a payload of `encode_gradient`.

    Whatever the bytes are, the returned indices are ascending and in range, and no more memory is
    taken than the payload's size pays for.

    Args:
        payload (Tensor): uint8, one dimension.

    Returns:
        DecodedGradient: values, indices and the size of the gradient.

    Raises:
        RuntimeError: the payload is of another format or version, or is cut short or too long; it
            has an inconsistent header, indices that are not ascending or out of range, or another
            checksum than it says.

    Deterministic; synchronises the device, since sizes depend on the data.
    """
    numel, count, index_codec, value_codec, block = torch.ops.moe_ext._payload_header(
        payload
    ).tolist()
    indices_K, codes, scales = torch.ops.moe_ext._decode_payload(payload)
    name = _VALUE_CODECS[value_codec]
    if name in _PLAIN:
        values_K = codes.view(_PLAIN[name]).float()
    else:
        values_K = dequantize_blockwise(codes, scales, count, format=name, block=block)
    dense = _INDEX_CODECS[index_codec] == "dense"
    return DecodedGradient(values_K, None if dense else indices_K, numel)


@torch.library.register_fake("moe_ext::_payload_header")
def _(payload: Tensor) -> Tensor:
    # The header is on the CPU, because the host reads it. Graphs of a device are cut there.
    return torch.empty((5,), dtype=torch.int64)


@torch.library.register_fake("moe_ext::_decode_payload")
def _(payload: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(3)]
    return (
        payload.new_empty((sizes[0],), dtype=torch.int64),
        payload.new_empty((sizes[1],)),
        payload.new_empty((sizes[2],), dtype=torch.float32),
    )
