"""How kernels access memory, read from their machine code (make cuda), without a compiler."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
# As cuobjdump prints it: the address of an instruction, a predicate, operands, its encoding.
LINE = "        /*{:04x}*/   {:>8} {} ;      /* 0x00000a00ff017b82 */\n"
ENCODING = " " * 80 + "/* 0x000fe20000000800 */\n"
COPY = ["LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "STG.E.U16 desc[UR4][R2.64], R4"]
# A generic address is made of a shared one, and the store names global memory.
STORE_ASTRAY = ["LDS.128 R8, [R10]", *COPY, "ATOMG.E.ADD R3, desc[UR4][R2.64], R4"]


@pytest.fixture
def sass(monkeypatch):
    spec = importlib.util.spec_from_file_location("kernel_sass", TOOLS / "kernel_sass.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_sass", module)
    spec.loader.exec_module(module)
    return module


def text(**kernels):
    lines = ["\n\tcode for sm_90\n"]
    for name, code in kernels.items():
        lines.append(f'\t\tFunction : {name}\n\t.headerflags\t@"EF_CUDA_SM90"\n')
        for i, (predicate, operation) in enumerate(
            line.split("~") if "~" in line else ("", line) for line in code
        ):
            lines += [LINE.format(16 * i, predicate, operation), ENCODING]
    return "".join(lines)


WRITERS = [
    "STS.128 [R10], R4",
    "@!P0 ~STS [UR4+0x10], R4",
    "ATOMS.ADD RZ, [R10], R4",
    "LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64]",
    "STSM.16.M88.4 [R3], R4",
    "UBLKCP [UR8], [UR6], UR4",
    "@UP0 ~UTMALDG.2D [UR8], [UR6]",
    # Generic addresses may be shared ones.
    "ST.E.128 desc[UR4][R2.64], R4",
    "ATOM.E.ADD R3, desc[UR4][R2.64], R4",
]


@pytest.mark.parametrize("load", ["LDS.128 R8, [R10]", "LDSM.16.M88.4 R8, [R10]"])
def test_a_kernel_that_loads_shared_memory_has_to_write_it(sass, load):
    kernels = {f"good{i}": [load, *COPY, writer] for i, writer in enumerate(WRITERS)}
    found = sass.parse(text(**kernels, bad=[load, *STORE_ASTRAY], none=COPY))
    refused = [kernel.kernel for kernel in found if kernel.reads_what_nobody_wrote]
    assert len(found) == len(WRITERS) + 2 and refused == ["bad"]


def test_counts_widths_and_slow_accesses(sass):
    code = [*COPY, "@P1 ~LDG.E R4, desc[UR4][R2.64]", "LDG.E.64 R4, desc[UR4][R2.64]"]
    code += ["LD.E R4, desc[UR4][R2.64]", "LDL.64 R4, [R1]", "STL [R1], R4", "STG.E.U8 [R2], R4"]
    (kernel,) = sass.parse(text(k=code))
    assert kernel.loads == Counter({16: 1, 4: 1, 8: 1}) and kernel.stores == Counter({2: 1, 1: 1})
    assert (kernel.count(sass.GENERIC), kernel.count(sass.LOCAL)) == (1, 2)
    assert sass.widths(kernel.loads) == "16x1 8x1 4x1"


@pytest.mark.parametrize("product", ["HMMA.16816.F32.BF16 R4, R8, R12, R4", "HGMMA.64x8x16 R4"])
def test_a_kernel_on_tensor_cores_names_the_memory_that_it_accesses(sass, product):
    generic = "LD.E.128 R8, desc[UR4][R2.64]"
    kernels = {"good": [product, *COPY], "bad": [product, *COPY, generic], "other": [generic]}
    found = sass.parse(text(**kernels))
    assert [k.kernel for k in found if k.multiplies_what_it_looks_for] == ["bad"]


def test_make_cuda_fails_for_such_a_kernel(sass, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    spec = importlib.util.spec_from_file_location("kernel_resources", TOOLS / "kernel_resources.py")
    resources = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_resources", resources)
    spec.loader.exec_module(resources)
    objects = tmp_path / "csrc" / "CMakeFiles" / "_C_cuda.dir"
    objects.mkdir(parents=True)
    (objects / "a.cu.o").touch()
    report = "ptxas info    : Compiling entry function 'k' for 'sm_90'\n    Used 40 registers\n"
    (objects / "a.cu.o.ptxas").write_text(report)
    # A stand-in for the programs of the toolkit, which the tests do not install.
    for name in ("cuobjdump", "nvdisasm"):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat {tmp_path}/code\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    unwritten = "k loads shared memory, and has no store or atomic to it"
    slow = "k uses tensor cores, and has generic accesses"
    for code, refused in (
        (STORE_ASTRAY, {unwritten}),
        ([*STORE_ASTRAY, WRITERS[0]], set()),
        (["HMMA.16816.F32 R4, R8, R12, R4", WRITERS[-1]], {slow}),
    ):
        (tmp_path / "code").write_text(text(k=code))
        assert resources.main(str(tmp_path)) == len(refused)
        said = capsys.readouterr().out
        assert {why for why in (unwritten, slow) if why in said} == refused
