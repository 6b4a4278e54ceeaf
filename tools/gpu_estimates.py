"""What each kernel should take on an H100 and an H200, from bytes and products: no GPU is needed.

A time is the larger of bytes by the rate of memory and products by that of tensor cores, by the
share of that limit which reading the kernel's code lets one expect, and 3 us for each launch. Bytes
are those of each tensor, once. Registers are the most of the kernel's variants for bfloat16 and
float32 on sm_90, as `make cuda` prints them. Rows have the names, shapes and dtypes of
benchmarks/gpu_kernels.py, whose figures stand beside them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# TB/s of a copy, as written bytes and read ones together.
MEMORY = {"H100": 3.35, "H200": 4.3}
# TFLOP/s of dense bfloat16 products that libraries reach on both.
PRODUCTS = 750.0
LAUNCH_MICROSECONDS = 3.0
# Of an SM of 9.0: registers, in groups of 8 a thread, and threads.
REGISTERS, THREADS = 65536, 2048

TOKENS, MODEL, FFN, EXPERTS, TOP_K = 32768, 4096, 1024, 128, 8
ROWS = TOKENS * TOP_K
GATE = "T=16384 E=64 K=8"
HIDDEN = f"N={ROWS} F={FFN}"
PERMUTED = f"T={TOKENS} D={MODEL} E={EXPERTS} K={TOP_K}"
HEADS, LENGTH, HEAD_DIM = 16, 8192, 64
ATTENDED = f"S={LENGTH} H={HEADS} Hkv=4 Dk={HEAD_DIM}"
NUMEL = 2**28
SELECTED = f"N={NUMEL} K={NUMEL // 100}"
LAYER = f"T={TOKENS} D={MODEL} F={FFN} E={EXPERTS} K={TOP_K}"

# Bytes of a token's rows, and of an attention's output in float32 with its LSE.
_TOKENS, _ROWS = 2 * TOKENS * MODEL, 2 * ROWS * MODEL
_OUT, _LSE = 4 * HEADS * LENGTH * HEAD_DIM, 4 * HEADS * LENGTH
# Of a causal block: q k^T and p v, half of all pairs; the backward pass has five products for two.
_ATTENTION = 2 * 2 * HEADS * HEAD_DIM * LENGTH**2 / 2
# Two matrices of weights, 3 D F numbers an expert: forward, and both gradients.
_LAYER = 3 * 2 * ROWS * 3 * MODEL * FFN


@dataclass(frozen=True)
class Estimate:
    """One kernel, or a few that run as one operator.

    Attributes:
        name: of the benchmark's row.
        shape: of it.
        share: of the limit by bytes and products.
        bytes: read and written.
        flop: on tensor cores.
        registers: of a thread; 0 for a library's kernels.
        threads: of a block.
        launches: kernels one behind the other.
        dtype: of the benchmark's row.
    """

    name: str
    shape: str
    share: float
    bytes: float = 0
    flop: float = 0
    registers: int = 0
    threads: int = 256
    launches: int = 1
    dtype: str = "bfloat16"

    def microseconds(self, device: str) -> float:
        """Expected time on a device."""
        limit = max(self.bytes / MEMORY[device] / 1e6, self.flop / PRODUCTS / 1e6)
        return limit / self.share + LAUNCH_MICROSECONDS * self.launches

    @property
    def occupancy(self) -> float:
        """Share of an SM's threads that registers leave room for."""
        each = -(-max(self.registers, 1) // 8) * 8 * self.threads
        return min(REGISTERS // each * self.threads, THREADS) / THREADS


def _quantizers() -> Iterable[Estimate]:
    for name, width in (("int8", 1.0), ("int4", 0.5), ("fp8", 1.0), ("sign", 0.125)):
        codes = (width + 4 / 256) * NUMEL
        shape = f"N={NUMEL}"
        yield Estimate(f"quantize_blockwise {name}", shape, 0.65, 10 * NUMEL + codes, 0, 55, 128)
        yield Estimate(f"dequantize_add_ {name}", shape, 0.8, 8 * NUMEL + codes, 0, 32, 128)


# Shares are those of a reading of the machine code for sm_90.
ESTIMATES = (
    Estimate("topk_gate", GATE, 0.2, 16384 * (2 * 64 + 12 * 8), 0, 64, launches=2),
    Estimate("topk_gate backward", GATE, 0.15, 16384 * (4 * 64 + 12 * 8), 0, 64),
    Estimate("router_z_loss", GATE, 0.3, 16384 * 2 * 64, 0, 38, launches=2),
    Estimate("gated_activation concatenated", HIDDEN, 0.78, 2 * ROWS * 3 * FFN, 0, 36),
    Estimate("gated_activation interleaved", HIDDEN, 0.78, 2 * ROWS * 3 * FFN, 0, 36),
    Estimate("gated_activation concatenated backward", HIDDEN, 0.8, 2 * ROWS * 5 * FFN, 0, 62),
    Estimate("gated_activation interleaved backward", HIDDEN, 0.8, 2 * ROWS * 5 * FFN, 0, 62),
    Estimate("permute_tokens", PERMUTED, 0.82, _TOKENS + _ROWS, 0, 62, launches=5),
    Estimate("unpermute_tokens", PERMUTED, 0.82, _TOKENS + _ROWS, 0, 63),
    Estimate("permute_tokens backward", PERMUTED, 0.82, _TOKENS + _ROWS, 0, 63),
    Estimate("unpermute_tokens backward", PERMUTED, 0.78, _TOKENS + 2 * _ROWS, 0, 47),
    Estimate("attention_block", ATTENDED, 0.2, 0, _ATTENTION, 192, 128, 2),
    Estimate("attention_block backward", ATTENDED, 0.13, 0, 2.5 * _ATTENTION, 253, 128, 4),
    Estimate("attention_delta", ATTENDED, 0.75, 2 * (_OUT + _LSE), 0, 28, dtype="float32"),
    Estimate("merge_attention", ATTENDED, 0.78, 3 * (_OUT + _LSE), 0, 28, dtype="float32"),
    Estimate("merge_attention_", ATTENDED, 0.78, 2.5 * _OUT + 3 * _LSE, 0, 45),
    Estimate("topk_compress_", SELECTED, 0.65, 10 * NUMEL, 0, 62, launches=6),
    Estimate("threshold_compress_", SELECTED, 0.65, 10 * NUMEL, 0, 62, launches=4),
    *_quantizers(),
    Estimate("nonzero_blocks", f"N={NUMEL}", 0.8, 2 * NUMEL, 0, 24, launches=3),
    Estimate("its grouped products alone", LAYER, 0.75, 0, _LAYER, launches=6),
)


def table(kernels: Iterable[Mapping[str, Any]] = ()) -> list[str]:
    """Lines of a table: estimates, beside what was measured of the same row."""
    measured = {(k["name"], k["shape"], k["dtype"]): k["microseconds"] for k in kernels}
    lines = [
        "| kernel | shape | dtype | GB | TFLOP | registers | occupancy | share of limit | "
        "H100 us | H200 us | measured us |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in ESTIMATES:
        found = measured.get((e.name, e.shape, e.dtype))
        used = f"{e.registers} | {100 * e.occupancy:.0f} %" if e.registers else "library | "
        times = " | ".join(f"{e.microseconds(device):.0f}" for device in MEMORY)
        lines.append(
            f"| {e.name} | {e.shape} | {e.dtype} | {e.bytes / 1e9:.3f} | {e.flop / 1e12:.2f} | "
            f"{used} | {100 * e.share:.0f} % | {times} | "
            f"{'' if found is None else f'{found:.0f}'} |"
        )
    return lines
