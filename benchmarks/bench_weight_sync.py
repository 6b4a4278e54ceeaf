"""Weights by deltas: scan, bytes and writes beside a dense copy, vLLM's indices and zstd alone."""

import torch
from _harness import Table, copy_of, interleaved, milliseconds

from moe_ext import ops

NUMEL = 1 << 26
SHARES = (0.1, 0.022, 0.01, 0.009, 0.001, 0.0001)


def zstd_bytes(x: torch.Tensor, base: torch.Tensor) -> str:
    """Bytes of the whole tensor's difference in bits under zstd alone, relative to dense."""
    try:
        import zstandard
    except ImportError:
        return "-"
    differ = (x.view(torch.int16) ^ base.view(torch.int16)).numpy().tobytes()
    return f"{len(differ) / len(zstandard.ZstdCompressor(level=1).compress(differ)):.1f}"


def row(share: float, base: torch.Tensor) -> tuple[str, ...]:
    """The row of one share of changed elements."""
    new = base.clone()
    places = torch.randperm(NUMEL)[: int(share * NUMEL)]
    new[places] = -new[places]
    payload = ops.delta_encode(new, base)
    indices, values = ops.delta_unpack(payload, base, NUMEL)
    target, coordinates = base.clone(), indices.int()
    times = interleaved(
        {
            "encode": lambda: ops.delta_encode(new, base),
            "hash": lambda: ops.delta_hash_change(base, payload),
            "apply": lambda: ops.delta_apply_(target, payload),
            "index": lambda: target.index_copy_(0, coordinates.long(), values),
            "copy": copy_of(2 * base.nbytes),
        }
    )
    return (
        f"{100 * share:g} %",
        milliseconds(times["encode"]),
        f"{base.nbytes / times['encode'].median / 1e9:.2f}",
        f"{base.nbytes / payload.nbytes:.1f}",
        f"{base.nbytes / (coordinates.nbytes + values.nbytes):.1f}",
        zstd_bytes(new, base),
        milliseconds(times["hash"]),
        milliseconds(times["apply"]),
        milliseconds(times["index"]),
        milliseconds(times["copy"]),
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    base = torch.randn(NUMEL).bfloat16()
    header = (
        "changed",
        "encode ms",
        "encode GB/s of input",
        "dense / delta bytes",
        "dense / (int32 indices, values) bytes",
        "dense / zstd bytes",
        "hash of the change ms",
        "apply ms",
        "index_copy_ ms",
        "copy ms",
    )
    note = (
        f"{NUMEL} bfloat16 elements, changed at random places, one thread. *encode* reads both "
        "versions; *copy* moves the bytes of a dense update, read and written. vLLM's patches hold "
        "int32 indices and values, which `index_copy_` writes. zstd alone compresses all bits that "
        "differ; here elements change their sign, one bit each, its best case. A write at a random "
        "place moves the line of 64 bytes around it: at 10 % nearly all lines, at 1 % 27 %, so "
        "that time follows the changes from there on."
    )
    rows = [row(share, base) for share in SHARES]
    torch.set_num_threads(threads)
    return [Table("Weights by deltas", note, header, rows)]
