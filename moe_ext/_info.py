"""Facts of this installation: versions, backends, CPU features, operators, missing packages."""

import importlib.metadata
import platform
import re
from typing import Any

import torch

from moe_ext import _library, _memory, _runtime_library
from moe_ext._version import __version__
from moe_ext.attention import libraries
from moe_ext.attention.recurrent import providers
from moe_ext.dispatch import deep_ep, nccl_ep, symmetric_memory
from moe_ext.ops import grouped_providers

_OPTIONAL = {
    "transformers": "moe_ext.replace: pip install transformers",
    "matplotlib": "charts of the examples: pip install matplotlib",
    "tensorboard": "metrics of the examples: pip install tensorboard",
    "tqdm": "progress of the examples: pip install tqdm",
}
_NO_CUDA = "the CUDA operators are not built"
_BRIEF = {"CUDA": "cuda", "runtime": "runtime"}


def info() -> dict[str, Any]:
    """Describes this installation; builds nothing and touches no device.

    Returns:
        dict: ``versions``, ``library``, ``cpu`` (``isa`` in use and ``supported``), ``backends``
        (name to what it offers or why it is absent), ``memory`` (whether `moe_ext.reuse_memory`
        holds), ``operators`` (public names) and ``missing`` (packages that are not installed, and
        the command that installs each).
    """
    supported = [
        isa for isa in ("portable", "avx2", "avx512") if torch.ops.moe_ext._cpu_isa_supported(isa)
    ]
    versions = {
        "moe_ext": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    missing = {}
    for package, purpose in _OPTIONAL.items():
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing[package] = purpose
    return {
        "versions": versions,
        "library": str(_library.PATH),
        "cpu": {
            "isa": torch.ops.moe_ext._cpu_isa(),
            "supported": supported,
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "backends": _backends(),
        "memory": _memory.state(),
        "operators": operators(),
        "missing": missing,
    }


def operators() -> list[str]:
    """Return names of the public operators of the compiled library, without those in Python."""
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name for s in schemas if s.name.startswith("moe_ext::")}
    compiled = [name.removeprefix("moe_ext::") for name in names if _has_kernel(name, "CPU")]
    return sorted(name for name in compiled if not name.startswith("_"))


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _backends() -> dict[str, str]:
    backends = {"cpu": "available, all operators"}
    if not torch.backends.cuda.is_built():
        backends["cuda"] = "absent: this torch is built without CUDA"
    else:
        has_gpu = torch.cuda.is_available()
        found = torch.cuda.get_device_name() if has_gpu else "absent, torch finds no GPU"
        built = f"{_num_cuda_operators()} operators" if _library.has_cuda() else _NO_CUDA
        backends["cuda"] = f"{found}: {built}"
    backends["grouped_mm"] = grouped_providers.state()
    backends["attention"] = libraries.state()
    backends["recurrence"] = providers.state()
    if torch.distributed.is_available():
        backends["gloo"] = "available" if torch.distributed.is_gloo_available() else "absent"
        backends["nccl"] = "available" if torch.distributed.is_nccl_available() else "absent"
        for name, carrier in (("nccl_ep", nccl_ep), ("deep_ep", deep_ep)):
            backends[name] = carrier.LIBRARY.state()
        backends["symm_mem"] = symmetric_memory.state()
    else:
        backends["distributed"] = "absent: this torch is built without torch.distributed"
    backends["runtime"] = _runtime_library.state()
    return backends


def _num_cuda_operators() -> int:
    return sum(_has_kernel(f"moe_ext::{name}", "CUDA") for name in operators())


def report(brief: bool = False) -> str:
    """Return the text of ``python -m moe_ext info``."""
    facts = info()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    cpu = facts["cpu"]
    if brief:
        names = ", ".join(f"{name} {facts['versions'][name]}" for name in ("moe_ext", "torch"))
        states = "; ".join(f"{n} {facts['backends'][k]}" for n, k in _BRIEF.items())
        return f"{names}, CPU {cpu['isa']}; {states}"
    lines = [
        f"versions:  {versions}",
        f"library:   {facts['library']}",
        f"cpu:       {cpu['isa']} in use of {', '.join(cpu['supported'])} "
        f"(MOE_EXT_CPU_ISA forces one); {cpu['threads']} threads; torch sees {cpu['capability']}",
        *(
            f"{name + ':':<10} {state}"
            for name, state in facts["backends"].items()
            if name != "cpu"
        ),
        f"memory:    {facts['memory']}",
        f"operators: {', '.join(facts['operators'])}",
        *(f"missing:   {name} ({how})" for name, how in facts["missing"].items()),
        *(f"next:      {step}" for step in _next_steps(facts)),
    ]
    return "\n".join(lines)


def _next_steps(facts: dict[str, Any]) -> list[str]:
    """Return commands that install what is missing, and the place of the tour."""
    found = [f"pip install {' '.join(facts['missing'])}"] if facts["missing"] else []
    root = _library.PATH.parent.parent
    build = "make build" if (root / "setup.py").exists() else "pip install --no-build-isolation ."
    has_cuda = torch.cuda.is_available()
    is_built = not re.search("is built for|is not built", facts["backends"]["runtime"])
    if (has_cuda and not _library.has_cuda()) or not is_built:
        found.append(f"{'MOE_EXT_CUDA=1 ' * has_cuda}{build}, in the folder of the sources")
    tour = root / "docs" / "tour.md"
    return [*found, f"the tour, {tour if tour.exists() else 'docs/tour.md of the sources'}"]
