"""Replaces files in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context with a path to write to, whose file replaces the one at `path` at the end.

    Readers find the old file or the new one, and ranks may write the same file at once. After an
    error the old file is still there. A process that is killed leaves `<path>.<hex>.partial`
    behind, which nothing reads. If `path` is not a regular file, such as a pipe, the context gives
    `path` itself.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    # A symbolic link stays a link: the file that it points to is replaced.
    target = target.resolve()
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
