"""Loads the compiled operators into torch. If that fails, an error says what to do."""

import sys
from pathlib import Path

import torch

PATH = Path(__file__).resolve().parent / "_C.so"
CUDA_PATH = PATH.with_name("_C_cuda.so")
MINIMUM_TORCH = (2, 11)


def load() -> None:
    """Registers the operators under `torch.ops.moe_ext`; a second call does nothing.

    `_C` has the operators. `_C_cuda` has CUDA kernels, and loads if it and torch were built for
    CUDA.

    Raises:
        ImportError: torch is too old, or the library is missing or does not load.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"moe_ext: expected torch to be 2.11 or later, got {torch.__version__}; "
            "try `pip install 'torch>=2.11'`"
        )
    if not PATH.exists():
        raise ImportError(
            f"moe_ext: expected the compiled operators at {PATH}, got no file; {_remedy()}"
        )
    _load(PATH)
    # `_C_cuda` needs libtorch_cuda, which a torch without CUDA does not have.
    if has_cuda():
        _load(CUDA_PATH)


def has_cuda() -> bool:
    """Return True if this installation has CUDA operators that this torch can load."""
    return CUDA_PATH.exists() and torch.backends.cuda.is_built()


def _remedy() -> str:
    """Return advice on missing operators. This folder may hide another moe_ext that has them."""
    for entry in sys.path:
        other = Path(entry or ".").resolve() / "moe_ext"
        if other != PATH.parent and (other / PATH.name).exists():
            return (
                f"this folder hides the moe_ext that is installed in {other}: start Python in "
                "another folder (`cd ..`), or build in this one with `make build`"
            )
    return "build them with `pip install --editable .` or `make build` in the repository"


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"moe_ext: expected {path} to load into torch {torch.__version__}, got: {error}"
        ) from error
