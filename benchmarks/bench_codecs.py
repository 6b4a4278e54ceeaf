"""Rates of every codec on one core, kept as a cost table in docs/benchmarks/rates-<name>.json."""

import functools
from pathlib import Path

import torch
from _harness import Table
from namespaces import network, ranks_on, why_not
from torch import Tensor

from moe_ext import ops
from moe_ext.comm.rates import Rehearsed
from moe_ext.compression import Codec, Link, codec_of
from moe_ext.compression.codecs import rehearsal_of
from moe_ext.compression.feedback import CodecMemory
from moe_ext.dispatch.wire import REHEARSED_DIM, lossless, row_rehearsals, rows_rate
from moe_ext.planner import CostTable

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
CODECS = ("bf16", "int8", "int4", "int2", "fp8", "onebit", "topk", "threshold", "lossless")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Namespaces pass what a host does unless they are limited.
LINKS = {"node": None, "1 Gbit/s": 1e9, "0.2 Gbit/s": 0.2e9}
SCRIPT = Path(__file__).with_name("codecs_rank.py")


def delta(numel: int) -> Rehearsed:
    """Bfloat16 weights of which one in a hundred has changed."""
    base_N = torch.randn(numel).bfloat16()
    x_N = torch.where(torch.rand(numel) < 0.01, -base_N, base_N)
    sent, target_N = ops.delta_encode(x_N, base_N), base_N.clone()
    return (
        x_N.nbytes,
        sent.numel(),
        lambda: ops.delta_encode(x_N, base_N),
        lambda: ops.delta_apply_(target_N, sent),
    )


def bitmap(numel: int) -> Rehearsed:
    """Bfloat16 weights of which a mask, known to all, keeps every other one."""
    x_N, marks_N = torch.randn(numel).bfloat16(), torch.rand(numel) < 0.5
    bits, sent, out_N = ops.pack_bits(marks_N), x_N[marks_N], torch.empty_like(x_N)
    return (
        x_N.nbytes,
        sent.nbytes,
        lambda: ops.pack_masked_(torch.empty_like(sent), x_N, bits),
        lambda: ops.unpack_masked_(out_N, sent, bits),
    )


def matrices(codec: Codec, grad_N: Tensor) -> CodecMemory:
    """The memory of a gradient that is a matrix."""
    return CodecMemory(
        [torch.Size((grad_N.numel() // REHEARSED_DIM, REHEARSED_DIM))], grad_N.device
    )


REHEARSALS = {
    **{name: rehearsal_of(codec_of(name)) for name in CODECS},
    "powersgd": rehearsal_of(codec_of("powersgd"), memory_of=matrices),
    **{rows_rate("lossless", dtype): functools.partial(lossless, dtype=dtype) for dtype in DTYPES},
    **row_rehearsals(),
    "delta": delta,
    "bitmap": bitmap,
}


def links() -> dict[str, Link]:
    """Between two ranks of this host, and over slowed links where namespaces can be made."""
    if why_not():
        return {}
    found = {}
    with network(2) as wires:
        for name, rate in LINKS.items():
            wires.limit(rate)
            with ranks_on(wires, SCRIPT) as ranks:
                found[name] = Link(**ranks.ask({"do": "link"})[0])
    return found


def tables() -> list[Table]:
    """Shares of the copy bandwidth; writes the rates."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = CostTable.measure(codecs=REHEARSALS, links=links())
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
        "that. Codecs by their own name are those of float32 gradients, with what they keep; "
        '"rows" are formats of a dispatch, "delta" of weights of which 1 % changed, "bitmap" of '
        "weights of which half are kept, the last five of bfloat16. Where an error feedback is "
        "kept, the gradient and the residual are read and the residual and the codes written: 13 "
        "bytes an element at least where a copy moves 8, so that 0.62 is the most that there is. "
        "Of the delta's time half is the scan of both versions, half the changes, 30 ns each, "
        "which no branch foretells; top-k, threshold and PowerSGD search or multiply beside that. "
        "All sizes, and the rates of products and links, are in the JSON file beside this page."
    )
    header = ("codec", "times fewer bytes", "encode, share of copy", "decode, share of copy")
    return [Table("Codecs on one core", note, header, rows)]
