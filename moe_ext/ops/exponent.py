"""Lossless coding of floating point numbers by their exponents.

Shape suffixes: N elements.
"""

import torch
from torch import Tensor

from moe_ext.ops.fakes import keep_out_of_cuda_graphs, register_fake_like

# Elements of a block, the bytes in front of it, and those in front of all.
_BLOCK, _BLOCK_HEADER, _HEADER = 8192, 24, 16


def most_exponent_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that `encode_exponents` takes at most: 1/256 more than the elements, and 64.

    Args:
        numel: N, elements of the tensor.
        dtype: bfloat16, float16 or float32.
    """
    # torch.compile has no divmod of a size that it does not know.
    blocks, last = numel // _BLOCK, numel % _BLOCK
    table = _HEADER + _aligned(4 * (blocks + (1 if last else 0)))
    tail = _BLOCK_HEADER + _aligned(last * dtype.itemsize) if last else 0
    return table + blocks * (_BLOCK_HEADER + _BLOCK * dtype.itemsize) + tail


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def encode_exponents(x: Tensor) -> Tensor:
    """Payload from which `decode_exponents_` restores every bit, NaN and -0.0 included.

    Exponents of gradients, activations and weights differ little. Within a block of 8192 elements
    the most frequent ones get codes of one to four bits, in up to three levels: a code says that
    the next level has the exponent. The rarest get a byte. All other bits are kept. A block that
    would not shrink is kept as it is.

    Args:
        x (Tensor[...]): bfloat16, float16 or float32, contiguous, N elements.

    Returns:
        Tensor[bytes]: uint8; of a length that depends on the data, `most_exponent_bytes` at most,
        for which on CPU there is memory behind it until it is cloned.

    Raises:
        RuntimeError: x is strided, or of another dtype.

    Deterministic; one number of threads gives the bytes of any other, and CUDA those of the CPU. On
    CUDA it waits for the device, whose data tell the length.

    Reference: as DFloat11 (Zhang et al., 2025) and ZipNN (Hershcovitch et al., 2024), which code
    exponents by Huffman's method.
    """
    return torch.ops.moe_ext.encode_exponents(x)


@torch.library.register_fake("moe_ext::encode_exponents")
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)


def decode_exponents_(out: Tensor, payload: Tensor) -> None:
    """Restores what `encode_exponents` was given.

    Args:
        out (Tensor[...]): overwritten; contiguous, of the dtype and as many elements as were
            encoded.
        payload (Tensor[bytes]): uint8, contiguous.

    Raises:
        RuntimeError: the payload is of another dtype or number of elements, or damaged: sizes that
            do not fit are found before anything is read beyond them. ``out`` may have changed then.

    Deterministic. On CUDA it waits for the device, which tells whether blocks are damaged.
    """
    torch.ops.moe_ext.decode_exponents_(out, payload)
    torch.autograd.graph.increment_version(out)


register_fake_like("moe_ext::decode_exponents_")
keep_out_of_cuda_graphs("moe_ext::decode_exponents_")


def encode_exponent_rows(
    x_N: Tensor, num_rows: int, *, left_out: int = -1
) -> tuple[Tensor, Tensor]:
    """Payloads of equal parts of a tensor, for messages: in rows that have room for any of them.

    Args:
        x_N (Tensor[N]): bfloat16, float16 or float32, contiguous.
        num_rows: R; each part has ceil(N / R) elements, the last ones fewer or none.
        left_out: a row that is not written.

    Returns:
        tuple[Tensor[R, B], Tensor[R]]: uint8 rows, of each what `encode_exponents` gives of its
        part, and bytes of any value behind it, where B is `most_exponent_bytes` of a part; and the
        int64 bytes of each payload, multiples of 8, 0 for the row left out.

    Raises:
        RuntimeError: x is strided, or of another dtype or shape.

    Deterministic, but for what is behind payloads. On CUDA nothing waits for the device.
    """
    return torch.ops.moe_ext.encode_exponent_rows(x_N, num_rows, left_out)


@torch.library.register_fake("moe_ext::encode_exponent_rows")
def _(x: Tensor, num_rows: int, left_out: int = -1) -> tuple[Tensor, Tensor]:
    most = most_exponent_bytes(-(-x.shape[0] // num_rows), x.dtype)
    rows = x.new_empty((num_rows, most), dtype=torch.uint8)
    return rows, x.new_empty(num_rows, dtype=torch.int64)


def decode_exponent_row_(out: Tensor, row: Tensor, damaged: Tensor) -> None:
    """Restores what `encode_exponent_rows` was given of one part.

    Args:
        out (Tensor[...]): overwritten; contiguous, of the dtype and as many elements as the part.
        row (Tensor[bytes]): uint8, contiguous: the payload; bytes may stand behind it.
        damaged (Tensor[1]): int64; lowered to the first block of 8192 elements that is not as it
            was encoded, where there is one. Nothing is read beyond the row, whatever it says.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or layout, or the row is too short.

    Deterministic. On CUDA nothing waits for the device: who wants to know reads ``damaged``.
    """
    torch.ops.moe_ext.decode_exponent_row_(out, row, damaged)
    torch.autograd.graph.increment_version([out, damaged])


register_fake_like("moe_ext::decode_exponent_row_")
