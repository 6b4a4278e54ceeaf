"""Lossless coding of floating point numbers by their exponents.

Shape suffixes: N elements.
"""

import torch
from torch import Tensor

from moe_ext.ops.fakes import keep_out_of_cuda_graphs, register_fake_like

# Elements of a block, bytes of the header of a block, and bytes of the header of a payload.
_BLOCK, _BLOCK_HEADER, _HEADER = 8192, 24, 16


def most_exponent_bytes(numel: int, dtype: torch.dtype) -> int:
    """Returns the most bytes of a payload: 1/256 more than those of the elements, and 64.

    Args:
        numel: N, elements of the tensor.
        dtype: bfloat16, float16 or float32.
    """
    # torch.compile does not support divmod of a symbolic size.
    blocks, last = numel // _BLOCK, numel % _BLOCK
    table = _HEADER + _aligned(4 * (blocks + (1 if last else 0)))
    tail = _BLOCK_HEADER + _aligned(last * dtype.itemsize) if last else 0
    return table + blocks * (_BLOCK_HEADER + _BLOCK * dtype.itemsize) + tail


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def encode_exponents(x: Tensor) -> Tensor:
    """Returns a payload from which `decode_exponents_` restores every bit, NaN and -0.0 included.

    Exponents of gradients, activations and weights differ little. Within a block of 8192 elements
    the most frequent exponents get codes of one to four bits, in up to three levels. One code of a
    level says that the next level has the exponent. The rarest exponents get a byte. All other bits
    are kept. A block that would not shrink is kept as it is.

    Args:
        x (Tensor[...]): bfloat16, float16 or float32, contiguous, N elements.

    Returns:
        Tensor[bytes]: uint8, of a length that depends on the data, `most_exponent_bytes` at most.
        On CPU the tensor holds memory for that most, until it is cloned.

    Raises:
        RuntimeError: x is strided, or of another dtype.

    Deterministic, with the same bytes for any number of threads, and on CPU and CUDA. On CUDA it
    waits for the device, because the length depends on the data.

    Reference: as DFloat11 (Zhang et al., 2025) and ZipNN (Hershcovitch et al., 2024), which code
    exponents by Huffman's method.
    """
    return torch.ops.moe_ext.encode_exponents(x)


@torch.library.register_fake("moe_ext::encode_exponents")
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


def decode_exponents_(out: Tensor, payload: Tensor) -> None:
    """Restores the elements that `encode_exponents` was given.

    Args:
        out (Tensor[...]): overwritten; contiguous, of the dtype and as many elements as were
            encoded.
        payload (Tensor[bytes]): uint8, contiguous.

    Raises:
        RuntimeError: the payload is of another dtype or number of elements, or damaged. Wrong sizes
            are found before anything is read beyond them. ``out`` may have changed then.

    Deterministic. On CUDA it waits for the device, which finds damaged blocks.
    """
    torch.ops.moe_ext.decode_exponents_(out, payload)
    torch.autograd.graph.increment_version(out)


register_fake_like("moe_ext::decode_exponents_")
keep_out_of_cuda_graphs("moe_ext::decode_exponents_")


def encode_exponent_rows(
    x_N: Tensor, num_rows: int, *, left_out: int = -1
) -> tuple[Tensor, Tensor]:
    """Encodes equal parts of a tensor for messages, each in a row with room for any payload.

    Args:
        x_N (Tensor[N]): bfloat16, float16 or float32, contiguous.
        num_rows: R; each part has ceil(N / R) elements, the last ones fewer or none.
        left_out: number of a row that is not written; -1 for none.

    Returns:
        tuple[Tensor[R, B], Tensor[R]]: uint8 rows, and the int64 bytes of each row's payload. A row
        has the payload that `encode_exponents` makes of its part, then bytes of any value. B is
        `most_exponent_bytes` of a part. The bytes are multiples of 8, and 0 for the row left out.

    Raises:
        RuntimeError: x is strided, or of another dtype or shape.

    Deterministic, except for bytes after payloads. On CUDA nothing waits for the device.
    """
    return torch.ops.moe_ext.encode_exponent_rows(x_N, num_rows, left_out)


@torch.library.register_fake("moe_ext::encode_exponent_rows")
def _(x: Tensor, num_rows: int, left_out: int = -1) -> tuple[Tensor, Tensor]:
    most = most_exponent_bytes(-(-x.shape[0] // num_rows), x.dtype)
    rows = x.new_empty((num_rows, most), dtype=torch.uint8)
    return rows, x.new_empty(num_rows, dtype=torch.int64)


def decode_exponent_row_(out: Tensor, row: Tensor, damaged: Tensor) -> None:
    """Restores one part of the elements that `encode_exponent_rows` was given.

    Args:
        out (Tensor[...]): overwritten; contiguous, of the dtype and as many elements as the part.
        row (Tensor[bytes]): uint8, contiguous: the payload; other bytes may follow it.
        damaged (Tensor[1]): int64; lowered to the number of the first damaged block of 8192
            elements, if there is one. Nothing is read beyond the row, whatever its bytes say.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or layout, or the row is too short.

    Deterministic. On CUDA nothing waits for the device; the caller reads ``damaged``.
    """
    torch.ops.moe_ext.decode_exponent_row_(out, row, damaged)
    torch.autograd.graph.increment_version([out, damaged])


register_fake_like("moe_ext::decode_exponent_row_")
