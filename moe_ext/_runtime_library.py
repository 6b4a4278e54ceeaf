"""Finds and loads the compiled module `moe_ext._runtime`, or says why it cannot be loaded.

The module is built on C++ classes of c10d and autograd, whose layout belongs to one torch version.
The name of its file therefore has the version of torch and the tag of the Python that it was built
for, and no other file is loaded. Everything that the module offers has a twin in Python.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).resolve().parent
_PREFIX = "_runtime."
_REMEDY = "`pip install .` in its source, with this torch and this Python, builds it"


def path() -> Path:
    """Return the path of the module for this torch and this Python, built or not."""
    # `setup.py` builds the module under the same name.
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return FOLDER / f"{_PREFIX}torch-{torch.__version__}{suffix}"


def load() -> ModuleType | None:
    """Return the module, or None if its twins in Python are to be used.

    In the environment, MOE_EXT_RUNTIME=0 demands the twins, and 1 demands the module.

    Raises:
        ImportError: the module is demanded, and cannot be loaded.
        ValueError: MOE_EXT_RUNTIME is something else.
    """
    asked = os.environ.get("MOE_EXT_RUNTIME", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"moe_ext: expected MOE_EXT_RUNTIME to be 0 or 1, got {asked}")
    if asked == "0":
        return None
    module, reason = _load()
    if module is None and asked == "1":
        raise ImportError(f"moe_ext: expected moe_ext._runtime to load, got: {reason}")
    return module


def state() -> str:
    """Return "compiled" with the version of torch, or "in Python" with the reason, as a text."""
    if os.environ.get("MOE_EXT_RUNTIME") == "0":
        return "in Python: MOE_EXT_RUNTIME=0"
    module, reason = _load()
    return f"in Python: {reason}" if module is None else f"compiled for torch {torch.__version__}"


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """Return (the module, ""), or (None, the reason why it cannot be loaded)."""
    name, found = "moe_ext._runtime", path()
    if not torch.distributed.is_available():
        return None, "this torch is built without torch.distributed"
    if not found.exists():
        return None, _why_absent(found)
    spec = importlib.util.spec_from_file_location(name, found)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        return None, f"{found.name} does not load: {error}"
    if module.torch_version != torch.__version__:
        return None, f"{found.name} is built for torch {module.torch_version}"
    sys.modules[name] = module
    return module, ""


def _why_absent(expected: Path) -> str:
    def target(file: Path) -> str:
        return file.name.removeprefix(_PREFIX).removesuffix(".so")

    others = sorted(target(other) for other in FOLDER.glob(f"{_PREFIX}*.so"))
    if not others:
        return f"_runtime is not built: {_REMEDY}"
    return f"_runtime is built for {', '.join(others)}, not for {target(expected)}: {_REMEDY}"
