"""A table of what each bucket is sent as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from moe_ext.compression.codecs import Codec


@dataclass(frozen=True)
class BucketChoice:
    """Parameters of a bucket that one codec reduces.

    Attributes:
        bucket: its number, in the order in which the ranks agreed on them.
        parameters: their names.
        elements: of all of them; of the shard that travels between nodes, where there are any.
        bytes_before: that leave a rank in a dense all-reduce.
        bytes_after: that leave it in one reduction by the codec, as far as that is known before.
        codec: its name, with the options that are not the usual ones.
        milliseconds: of one reduction, estimated or measured by the cost model; None without one.
        why: what decided.
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
        """Bytes before over bytes after; 1 where nothing is sent."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    def cells(self) -> list[str]:
        """The cells of this row of the table."""
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
        rows: its data.
    """

    rows: tuple[BucketChoice, ...]

    @classmethod
    def of(cls, rows: Sequence[BucketChoice], notes: str = "") -> Explanation:
        """A table with notes under it."""
        table = "no gradient was reduced yet"
        if rows:
            table = "\n".join(aligned_table([_HEAD, *(row.cells() for row in rows)]))
        found = cls(f"{table}\n\n{notes}" if notes else table)
        found.rows = tuple(rows)
        return found


def described(codec: Codec) -> str:
    """Name of a codec, with the options that are not the usual ones."""
    known: tuple[Any, ...] = fields(codec) if is_dataclass(codec) else ()
    values = {option.name: getattr(codec, option.name) for option in known}
    usual = {option.name: option.default for option in known}
    options = [f"{name}={value}" for name, value in values.items() if value != usual[name]]
    return f"{codec.name}({', '.join(options)})" if options else codec.name


def aligned_table(rows: list[list[str]]) -> list[str]:
    """Lines of a table in Markdown; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
