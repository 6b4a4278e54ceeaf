"""Estimates each kernel's time on an H100 and an H200 from bytes and products, without a GPU.

A time is the larger of bytes by the rate of memory and products by that of tensor cores, by the
share of that limit which reading the kernel's code lets one expect, and 3 us for each launch. Bytes
are those of each tensor, once. Registers are the most of the kernel's variants for bfloat16 and
float32 on sm_90, as `make cuda` prints them. Rows have the names, shapes and dtypes of
benchmarks/gpu_kernels.py, whose figures stand beside them; `EXPECTED` are figures of other tables.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# TB/s of a copy, as written bytes and read ones together.
MEMORY = {"H100": 2.9, "H200": 4.3}
# TFLOP/s of dense bfloat16 products that libraries reach on both.
PRODUCTS = 750.0
# TFLOP/s of our kernels: 16-bit and float32 products, exact attention forward by head dim.
OWN, OWN_FLOAT32, EXACT = 340.0, 45.0, {64: 90.0, 128: 110.0}
LAUNCH_MICROSECONDS = 3.0
# Limits of an SM of 9.0: registers, in groups of 8 a thread, and threads.
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
ROUTER = f"T={TOKENS} D={MODEL} E={EXPERTS}"
LAYER = f"T={TOKENS} D={MODEL} F={FFN} E={EXPERTS} K={TOP_K}"

# Bytes of a token's rows, and of an attention's output in float32 with its LSE.
_TOKENS, _ROWS = 2 * TOKENS * MODEL, 2 * ROWS * MODEL
_OUT, _LSE = 4 * HEADS * LENGTH * HEAD_DIM, 4 * HEADS * LENGTH
# Causal block: q k^T and p v, half of all pairs; the backward pass has five products for two.
_ATTENTION = 2 * 2 * HEADS * HEAD_DIM * LENGTH**2 / 2
# Gradients of logits in float32, and written and read as three parts in bfloat16; their products.
_LOGITS, _ROUTER = (4 + 2 * 3 * 2) * TOKENS * EXPERTS, 2 * 3 * TOKENS * EXPERTS * MODEL
# Two matrices of weights, 3 D F numbers an expert: forward, and both gradients.
_LAYER = 3 * 2 * ROWS * 3 * MODEL * FFN


@dataclass(frozen=True)
class Estimate:
    """A kernel, or a few that run as one operator.

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
    Estimate("expert_choice_gate", GATE, 0.5, 16384 * 64 * 46, 0, 48, launches=9),
    Estimate("router_logits gradient of x", ROUTER, 0.7, _LOGITS + _TOKENS, _ROUTER, launches=3),
    Estimate(
        "router_logits gradient of weight", ROUTER, 0.6, _LOGITS + _TOKENS, _ROUTER, launches=7
    ),
    Estimate("gated_activation concatenated", HIDDEN, 0.78, 2 * ROWS * 3 * FFN, 0, 36),
    Estimate("gated_activation interleaved", HIDDEN, 0.78, 2 * ROWS * 3 * FFN, 0, 36),
    Estimate("gated_activation concatenated backward", HIDDEN, 0.8, 2 * ROWS * 5 * FFN, 0, 62),
    Estimate("gated_activation interleaved backward", HIDDEN, 0.8, 2 * ROWS * 5 * FFN, 0, 62),
    Estimate("permute_tokens", PERMUTED, 0.82, _TOKENS + _ROWS, 0, 62, launches=5),
    Estimate("unpermute_tokens", PERMUTED, 0.82, _TOKENS + _ROWS, 0, 63),
    Estimate("permute_tokens backward", PERMUTED, 0.82, _TOKENS + _ROWS, 0, 63),
    Estimate("unpermute_tokens backward", PERMUTED, 0.78, _TOKENS + 2 * _ROWS, 0, 47),
    Estimate("attention_block", ATTENDED, EXACT[HEAD_DIM] / PRODUCTS, 0, _ATTENTION, 185, 128, 2),
    Estimate(
        "attention_block backward",
        ATTENDED,
        EXACT[HEAD_DIM] / 1.5 / PRODUCTS,
        0,
        2.5 * _ATTENTION,
        253,
        128,
        4,
    ),
    Estimate("attention_delta", ATTENDED, 0.75, 2 * (_OUT + _LSE), 0, 28, dtype="float32"),
    Estimate("merge_attention", ATTENDED, 0.78, 3 * (_OUT + _LSE), 0, 28, dtype="float32"),
    Estimate("merge_attention_", ATTENDED, 0.78, 2.5 * _OUT + 3 * _LSE, 0, 45),
    Estimate("topk_compress_", SELECTED, 0.65, 10 * NUMEL, 0, 62, launches=6),
    Estimate("threshold_compress_", SELECTED, 0.65, 10 * NUMEL, 0, 62, launches=4),
    *_quantizers(),
    Estimate("nonzero_blocks", f"N={NUMEL}", 0.8, 2 * NUMEL, 0, 24, launches=3),
    Estimate("its grouped products alone", LAYER, 0.75, 0, _LAYER, launches=14),
)


@dataclass(frozen=True)
class Expected:
    """A figure of a table that benchmarks/gpu_layer_parts.py or gpu_attention.py prints.

    Attributes:
        section: its title.
        labels: cells that tell its row.
        column: of the figure.
        values: on an H100 and on an H200.
    """

    section: str
    labels: Mapping[str, Any]
    column: str
    values: tuple[float, float]


def _expected() -> Iterable[Expected]:
    def both(section: str, labels: Mapping[str, Any], column: str, value: float) -> Expected:
        return Expected(section, labels, column, (value, value))

    def by_memory(section: str, labels: Mapping[str, Any], share: float) -> Expected:
        h100, h200 = (1e3 * share * rate for rate in MEMORY.values())
        return Expected(section, labels, "GB/s", (h100, h200))

    yield by_memory("Ceilings", {"what": "copy"}, 1.0)
    yield by_memory("Ceilings", {"what": "index_select of rows, 8 a token"}, 0.84)
    yield both("Ceilings", {"what": "square mm", "dtype": "bfloat16"}, "TF", PRODUCTS)
    step = "Layer, forward and backward"
    even = {"T": TOKENS, "dtype": "bfloat16", "routing": "even"}
    # The products, and the passes over rows: rows in and out, activation, and their backward.
    rows = [e for e in ESTIMATES if e.shape in (PERMUTED, HIDDEN) and "interleaved" not in e.name]
    times = [sum(e.microseconds(device) for e in rows) for device in MEMORY]
    whole = tuple(_LAYER / PRODUCTS / 0.75 / 1e6 + us for us in times)
    yield Expected(step, even, "us", (whole[0], whole[1]))
    yield both(step, even, "waits", 0)
    yield both(step, {**even, "T": 64}, "launches", 36)
    yield both(step, {**even, "T": 64}, "host us", 700)
    for part, share in (("forward", 0.78), ("dX", 0.78), ("dW", 0.7)):
        labels = {"product": "gate and up", **even}
        yield both("Grouped products", labels, f"{part} TF", share * PRODUCTS)
    yield both("Grouped products", {"product": "gate and up", **even}, "ours forward TF", OWN)
    for dtype, own in (("float16", OWN), ("float32", OWN_FLOAT32)):
        labels = {"product": "gate and up", **even, "T": TOKENS // 4, "dtype": dtype}
        yield both("Grouped products", labels, "forward TF", own)
    rate, error = "Attention, rate", "Attention, error against float64"
    for kernel, dim, forward, backward in (
        ("exact", 64, EXACT[64], EXACT[64] / 1.5),
        ("exact", 128, EXACT[128], EXACT[128] / 1.5),
        ("flash (CUDA)", 64, 300, 250),
        ("flash (CUDA)", 128, 350, 300),
        ("cuDNN (CUDA)", 64, 400, 300),
        ("cuDNN (CUDA)", 128, 600, 450),
    ):
        labels = {"kernel": kernel, "dtype": "bfloat16", "D": dim}
        yield both(rate, labels, "forward TF", forward)
        yield both(rate, labels, "backward TF", backward)
        # 16 bits of the output, or the low part of P in 16 bits.
        yield both(error, labels, "out", 2e-5 if kernel == "exact" else 2e-3)
        yield both(error, labels, "dQ", 2e-5 if kernel == "exact" else 3e-3)
    ring = "Ring attention, one step (H=32, 8 of keys, D=128)"
    flop = 2 * 2 * 32 * 128 * LENGTH**2
    merged, hop = 335e6, 2 * 2 * 2 * 8 * LENGTH * 128
    fast = {"precision": "fast", "pass": "forward"}
    yield both(ring, fast, "attention us", flop / 600e6)
    for column, moved, share in (("merge us", merged, 0.78), ("copy of a hop us", hop, 0.8)):
        h100, h200 = (moved / rate / 1e6 / share for rate in MEMORY.values())
        yield Expected(ring, fast, column, (h100, h200))
    yield both(ring, {**fast, "precision": "exact"}, "attention us", flop / EXACT[128] / 1e6)
    kept = 2 * ROWS * (MODEL + 3 * FFN) + 4 * TOKENS * EXPERTS + 28 * ROWS
    peak = 2 * (3 * EXPERTS * MODEL * FFN + ROWS * (2 * MODEL + 2 * FFN) + 2 * TOKENS * MODEL)
    yield both("Memory of a step", even, "kept MB", kept / 1e6)
    yield both("Memory of a step", even, "peak MB", peak / 1e6)


EXPECTED = tuple(_expected())
NEVER = "never run"


def other_table(rows: Iterable[Mapping[str, Any]] = ()) -> list[str]:
    """Lines of a table: expected figures, beside what was measured of the same row."""
    rows = [row for row in rows if "section" in row]
    lines = [
        "| table | row | figure | H100 | H200 | measured |",
        "|---|---|---|---|---|---|",
    ]
    for e in EXPECTED:
        found = next(
            (r for r in rows if r["section"] == e.section and e.labels.items() <= r.items()), {}
        )
        cells = (e.section, ", ".join(map(str, e.labels.values())), e.column)
        values = (*e.values, found.get(e.column, NEVER))
        lines.append("| " + " | ".join((*cells, *map(figure, values))) + " |")
    return lines


def figure(value: Any) -> str:
    """A number with three digits at least, or a text."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


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
            f"{NEVER if found is None else f'{found:.0f}'} |"
        )
    return lines
