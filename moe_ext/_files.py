"""Replaces files in one step, and reads and writes JSON files with a schema number."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


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


def write_json(path: str | os.PathLike[str], schema: int, fields: Mapping[str, Any]) -> None:
    """Write fields as JSON with a schema number. The file is replaced in one step."""
    with replacing(path) as file:
        file.write_text(json.dumps({"schema": schema, **fields}, indent=1) + "\n")


def read_json(operation: str, path: str | os.PathLike[str], schema: int) -> dict[str, Any]:
    """Read fields that `write_json` has written; ValueError for another file or schema number."""
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{operation}: expected {path} to hold JSON: {error}") from None
    number = found.pop("schema", None) if isinstance(found, dict) else None
    if number != schema:
        raise ValueError(f"{operation}: expected schema to be {schema}, got {number!r}")
    fields: dict[str, Any] = found
    return fields
