"""Rates of every codec on one core, kept as a cost table in docs/benchmarks/rates-<name>.json."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from _harness import Table

from moe_ext.compression import PayloadCodec, codec_of
from moe_ext.ops import decode_exponents_, encode_exponents
from moe_ext.planner import CostTable

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
PAYLOADS = ("int8", "int4", "int2", "fp8", "onebit")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Calls = tuple[int, int, Callable[[], object], Callable[[], object]]


def payload(name: str, numel: int) -> Calls:
    """A codec's own payload of float32 elements, without error feedback."""
    codec = codec_of(name)
    assert isinstance(codec, PayloadCodec)
    x_N, out_N = torch.randn(numel), torch.zeros(numel)
    coding, sent = codec.coding(), codec.encode(x_N)
    return (
        x_N.nbytes,
        sent.numel(),
        lambda: coding.encode(x_N),
        lambda: coding.decode_add_(out_N, sent, overwrite=True),
    )


def lossless(dtype: torch.dtype, numel: int) -> Calls:
    """Exponents of normally distributed elements."""
    x_N = torch.randn(numel).to(dtype)
    sent, out_N = encode_exponents(x_N), torch.empty_like(x_N)
    return (
        x_N.nbytes,
        sent.numel(),
        lambda: encode_exponents(x_N),
        lambda: decode_exponents_(out_N, sent),
    )


def dense(numel: int) -> Calls:
    """Float32 rounded to bfloat16, and back."""
    x_N = torch.randn(numel)
    sent, out_N = x_N.bfloat16(), torch.empty_like(x_N)
    return x_N.nbytes, sent.nbytes, lambda: sent.copy_(x_N), lambda: out_N.copy_(sent)


REHEARSALS = {
    "bf16": dense,
    **{name: functools.partial(payload, name) for name in PAYLOADS},
    **{f"lossless {name}": functools.partial(lossless, dtype) for name, dtype in DTYPES.items()},
}


def tables() -> list[Table]:
    """Shares of the copy bandwidth; writes the rates."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = CostTable.measure(codecs=REHEARSALS)
    finally:
        torch.set_num_threads(threads)
    words = found.processor.lower().replace("(r)", "").split()
    found.save(FOLDER / f"rates-{'-'.join(word for word in words if word.isalnum())}.json")
    rows = []
    for name, rates in found.codecs.items():
        rate, (encode, decode) = rates[-1], found.share_of_copy(name)
        ratio = rate.input_bytes / rate.payload_bytes
        rows.append((name, f"{ratio:.2f}", f"{encode:.2f}", f"{decode:.2f}"))
    note = (
        f"One core, {found.copy_bandwidth / 1e9:.1f} GB/s copied (each byte once), 2^24 elements "
        "of a normal distribution: bytes of elements encoded or decoded a second, as a share of "
        "that. All sizes, and the rates of products, are in the JSON file beside this page."
    )
    header = ("codec", "times fewer bytes", "encode, share of copy", "decode, share of copy")
    return [Table("Codecs on one core", note, header, rows)]
