"""Files that are replaced in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, whose file takes the place of another one at the end.

    Readers find the old file or the new one, and ranks may write the same file at once. After an
    error the old one is still there. A process that is killed leaves `<path>.<hex>.partial` behind,
    which nothing reads. A path that is no file, such as a pipe, is written to as it is.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    target = target.resolve()  # a link stays one
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
