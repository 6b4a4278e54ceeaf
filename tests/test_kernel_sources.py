"""Index arithmetic and launches of kernels, read from their sources, without a compiler.

`check_launch` refuses a grid or shared memory that no device takes. These rules keep every launch
behind it, and sums of elements out of 32 bits; tests/ops/test_addresses.py runs rows that are far.
"""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# A name for what counts elements or rows of a tensor.
COUNT = r"(?:numel|num_elements|num_rows|num_slots|total)\b"
# Rule to a pattern of what breaks it.
RULES = {
    "a launch and its attributes are those of common/launch.cuh": (
        r"<<<|\bcudaLaunch\w*|\bcudaFuncSetAttribute\b|\bcudaFuncAttributeMax\w+"
    ),
    "a size of a launch is a Dim3 of 64 bits": (
        r"\bdim3\b|grid\.[xyz] = static_cast"
        r"|Dim3(?: \w+)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*?static_cast<(?:int|unsigned)>"
    ),
    "a place in the grid is multiplied in 64 bits: int64_t{blockIdx.x} * n": (
        r"(?<!int64_t\{)(?<!static_cast<int>\()\b(?:blockIdx|gridDim)\.[xyz] \* (?!int64_t)"
        r"|(?<!\})(?<!\}\)) \* (?:blockIdx|gridDim)\.[xyz] [*+]"
    ),
    "a loop over elements or rows counts in 64 bits": (
        rf"for \((?:const )?(?:int|unsigned|uint32_t|auto) \w+ = [^;]*; \w+ < [^;]*{COUNT}"
    ),
    "a number of elements becomes an int by check_int32": (
        rf"(?:static_cast<int>\(|\bint \w+ = )[\w.>-]*{COUNT}(?!\.)"
    ),
    "a product of sizes is no int": (
        r"static_cast<(?:int|unsigned|int32_t|uint32_t)>\([^()]*(?:stride|numel|row)\w* \* "
    ),
}
BREAKS = (
    "kernel<<<grid, block>>>(x);",
    "launch({Dim3(static_cast<unsigned>(blocks)), Dim3(32)}, kernel, x);",
    "const int64_t i = blockIdx.x * kThreads + threadIdx.x;",
    "for (int i = threadIdx.x; i < numel; i += kThreads) {",
    "const int count = num_rows;",
    "const T* place = from + static_cast<int>(row * stride) + col;",
)
# Statements that hold to the rule in another way, and how.
KEPT = {
    "plan_sort(static_cast<int>(idx.numel())": "permute_tokens_cuda has checked it",
    "static_cast<uint32_t>(rows * dim / kSize)": "each_piece gives as many rows as fit",
    "int rows = m.num_rows": "of a tile",
    "static_cast<int>(m.num_rows": "of a tile",
    "int rows_left = num_rows": "of a tile",
    "partials[2 * blockIdx.x": "as many blocks as the device holds",
}


# Files with grids of two dimensions, of which the second takes 65,535 blocks, and what bounds it.
# `check_launch` refuses more; that is no answer to sizes that a tensor may well have.
WIDE_GRID = re.compile(r"grid\.[yz] = |Dim3(?: \w+)?\((?:[^(),]|\((?:[^()]|\([^()]*\))*\))+, ")
GRIDS = {
    "assignment_kernels.cuh": "assignment_cuda.cu refuses more sequences and more experts",
    "causal_conv1d_kernels.cuh": "causal_conv1d_cuda.cu refuses more taps",
    "delta_rule_kernels.cuh": "delta_rule_cuda.cu refuses longer values",
    "grouped_gemm_kernels.cuh": "at most 1024, or a row of two million columns",
    "merge_kernels.cuh": "kMostBlocksAlongY",
    "rows_kernels.cuh": "a row of two million columns",
    "selective_scan_kernels.cuh": "scan_parts gives at most 256",
}


def broken(text):
    """(rule, what breaks it)."""
    for kept in KEPT:
        text = text.replace(kept, "")
    # Loops often stand on two lines.
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"\s+", " ", text)
    return [(rule, m[0]) for rule, pattern in RULES.items() for m in re.finditer(pattern, text)]


def sources():
    files = [*CSRC.rglob("*.cuh"), *CSRC.rglob("*_cuda.cu")]
    return sorted(file for file in files if file != CSRC / "common" / "launch.cuh")


def test_every_kernel_keeps_the_rules():
    found = [(file.name, *fault) for file in sources() for fault in broken(file.read_text())]
    assert not found


def test_second_dimensions_of_grids_are_bounded():
    texts = {file.name: re.sub(r"\s+", " ", file.read_text()) for file in sources()}
    assert {name for name, text in texts.items() if WIDE_GRID.search(text)} == set(GRIDS)
    assert WIDE_GRID.search("const Dim3 grid(f(n), rows);")
    assert not WIDE_GRID.search("{Dim3(1), Dim3(kFewThreads), bytes, stream}")


def test_exceptions_are_there():
    assert all(any(kept in file.read_text() for file in sources()) for kept in KEPT)


@pytest.mark.parametrize(("rule", "line"), list(zip(RULES, BREAKS, strict=True)))
def test_a_line_that_breaks_a_rule_is_found(rule, line):
    assert rule in [name for name, _ in broken(line)]
