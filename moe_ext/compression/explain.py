"""A table of the codec of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from moe_ext.compression.codecs import Codec


@dataclass(frozen=True)
class BucketChoice:
    """Parameters of a bucket that one codec reduces.

    Attributes:
        bucket: number of the bucket, in the order in which the ranks agreed on buckets.
        parameters: names of the parameters.
        elements: elements of all parameters, or of the shard that is sent between nodes.
        bytes_before: bytes that a rank sends in a dense all-reduce.
        bytes_after: bytes that a rank sends in one reduction by the codec, as far as they are known
            beforehand.
        codec: name of the codec, with the options that are not the defaults.
        milliseconds: duration of one reduction, estimated or measured by the cost model; None
            without one.
        why: the rule or measurement that decided.
    """

    bucket: int
    parameters: tuple[str, ...]
    elements: int
    bytes_before: int
    bytes_after: int
    codec: str
    milliseconds: float | None
    why: str

    @property
    def ratio(self) -> float:
        """Bytes before over bytes after; 1 if nothing is sent."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    def cells(self) -> list[str]:
        """Return the cells of this row of the table."""
        more = len(self.parameters) - 1
        return [
            str(self.bucket),
            f"{self.parameters[0]} +{more}" if more else self.parameters[0],
            str(self.bytes_before),
            str(self.bytes_after),
            f"{self.ratio:.1f}",
            self.codec,
            "-" if self.milliseconds is None else f"{self.milliseconds:.3f}",
            self.why,
        ]


_HEAD = ["bucket", "parameters", "bytes before", "bytes after", "ratio", "codec", "ms", "why"]


class Explanation(str):
    """The table as text.

    Attributes:
        rows: data of the table.
    """

    rows: tuple[BucketChoice, ...]

    @classmethod
    def of(cls, rows: Sequence[BucketChoice], notes: str = "") -> Explanation:
        """Make a table with notes under it."""
        table = "no gradient was reduced yet"
        if rows:
            table = "\n".join(aligned_table([_HEAD, *(row.cells() for row in rows)]))
        found = cls(f"{table}\n\n{notes}" if notes else table)
        found.rows = tuple(rows)
        return found


def described(codec: Codec) -> str:
    """Return the name of a codec, with the options that are not the defaults."""
    known: tuple[Any, ...] = fields(codec) if is_dataclass(codec) else ()
    values = {option.name: getattr(codec, option.name) for option in known}
    usual = {option.name: option.default for option in known}
    options = [f"{name}={value}" for name, value in values.items() if value != usual[name]]
    return f"{codec.name}({', '.join(options)})" if options else codec.name


def aligned_table(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
