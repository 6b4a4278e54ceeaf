"""Loads the compiled operators into torch, with an error that says what to do when that fails."""

from pathlib import Path

import torch

PATH = Path(__file__).resolve().parent / "_C.so"
MINIMUM_TORCH = (2, 11)


def load() -> None:
    """Registers the operators of `_C` under `torch.ops.moe_ext`; a second call does nothing.

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
            f"moe_ext: expected the compiled operators at {PATH}, got no file; "
            "build them with `pip install --no-build-isolation .` or `make build` in the repository"
        )
    try:
        torch.ops.load_library(str(PATH))
    except OSError as error:
        raise ImportError(
            f"moe_ext: expected {PATH} to load into torch {torch.__version__}, got: {error}"
        ) from error
