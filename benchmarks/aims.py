"""Aims of a page of benchmarks, read from its tables: whether they are met, and why not."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from _harness import Table

TITLE = "Aims"
Row = dict[str, str]
Value = Callable[[list[Row]], float]
BEST = ("dense fp32", "dense bf16", "torch's fp16 hook", "ours, int8", "ours, int4")


def number(cell: str) -> float:
    """A cell's number."""
    return float(cell.rstrip(" %"))


def most(name: str) -> Value:
    """The largest number of a column; a dash is none."""
    return lambda rows: max(number(row[name]) for row in rows if row[name] != "-")


def least_of_able(rows: list[Row]) -> float:
    """The smallest share hidden in turn, of schedules that hide 80 % by simulation."""
    able = [row for row in rows if number(row["in turn, simulated"]) >= 80]
    return min(number(row["in turn, hidden"]) for row in able)


def behind_best(name: str) -> Value:
    """By what percentage `auto` is behind the best fixed codec, at the link where it is most."""

    def value(rows: list[Row]) -> float:
        links = {row["link"] for row in rows}
        found = []
        for link in links:
            here = {row["contender"]: row for row in rows if row["link"] == link}
            best = min(number(here[each]["ms"]) for each in BEST)
            found.append(100 * (number(here["ours, auto"][name]) / best - 1))
        return max(found)

    return value


@dataclass(frozen=True)
class Aim:
    """A line of the table of aims.

    Attributes:
        what: is measured.
        table: title of the table that has it.
        rows: cells by column that its rows have.
        value: of these rows.
        goal: the most that is allowed; with `at_least`, the least.
        why: what stands in the way where the goal is not met.
        unit: behind the figures.
    """

    what: str
    table: str
    rows: Row
    value: Value
    goal: float
    why: str
    unit: str = ""
    at_least: bool = False

    def line(self, tables: dict[str, list[Row]]) -> tuple[str, ...] | None:
        """The aim's line; None where the page lacks the table or its column."""
        found = [
            row
            for row in tables.get(self.table, [])
            if all(row.get(name) == cell for name, cell in self.rows.items())
        ]
        if not found:
            return None
        try:
            value = self.value(found)
        except KeyError:  # a table of before the column was there
            return None
        met = value >= self.goal if self.at_least else value <= self.goal
        digits = 1 if self.unit else 2
        anchor = re.sub(r"[^a-z0-9 -]", "", self.table.lower()).replace(" ", "-")
        where = f"[{self.table}](#{anchor})"
        cells = (f"{self.goal:g}{self.unit}", f"{value:.{digits}f}{self.unit}")
        return (self.what, where, *cells, "yes" if met else "no", "" if met else self.why)


_LAYER, _GRADIENTS = "Mixture-of-experts layer", "All-reduce of gradients over slow links"
_AUTO, _TURNS = "Dispatchers chosen by auto", "Exchanges behind other micro-batches"
AIMS = (
    Aim(
        *("layer over its products, T=4096, memory kept", _LAYER, {"T": "4096"}),
        *(most("ours / products"), 1.03),
        "products run six in a row on an expert whose weights a cache holds; a step goes through "
        "all experts before it goes back (column *in order*)",
    ),
    Aim(
        *("layer over its products, T=4096, default process", _LAYER, {"T": "4096"}),
        *(most("fresh / products"), 1.08),
        "pages of new memory are cleared: how quickly, the host of a virtual machine decides, and "
        "columns *fresh* differ by a tenth from run to run",
    ),
    Aim(
        *("the same, T=1024, all tokens on K experts", _LAYER, {"routing": "all to one"}),
        *(most("fresh / products"), 1.08),
        "a router over all experts, and zeros as gradients of those without rows (note of the "
        "table)",
    ),
    Aim(
        *("layer over its products, T=64", _LAYER, {"T": "64"}),
        *(most("ours / products"), 1.12),
        "products of 64 tokens take as long only where a cache holds the weights (column *in "
        "order*), and differ by a sixth between processes",
    ),
    Aim(
        *("exact top-1 % of 2^24 over a copy", "Compression, aims"),
        {"what": "exact top-k 1 %, error feedback, checked"},
        *(most("measured"), 1.8, "the look for NaN (table *Gradient selection, over a copy*)"),
    ),
    Aim(
        *("overhead of a recorded call", "Overhead of a call", {"call": "grouped_mm"}),
        *(most("recorded overhead us"), 10.0),
        "three views and a product of the library for each of 8 experts",
        " us",
    ),
    Aim(
        *("exact dispatcher by auto, behind the best fixed one", _AUTO, {"combine": "exact"}),
        *(most("over the best"), 3.0),
        "auto changes only to a dispatcher that takes 5 % less",
        " %",
    ),
    Aim(
        *("the same with sums on the rank of the experts", _AUTO, {"combine": "reduced"}),
        *(most("over the best"), 3.0),
        "a rehearsal at the first pass decides, and errs by as much; later a change would show in "
        "the bits",
        " %",
    ),
    *(
        Aim(
            *(f"codec by auto, behind the best of five, P={p}", _GRADIENTS, {"P": f"{p}"}),
            *(behind_best("ms"), 3.0, "turns of one codec differ by as much", " %"),
        )
        for p in (2, 4)
    ),
    *(
        Aim(
            *(f"the same in the first 50 steps, P={p}", _GRADIENTS, {"P": f"{p}"}),
            *(behind_best("first ms"), 3.0),
            "the link is measured, and codecs and plain all-reduces that may be as quick are tried",
            " %",
        )
        for p in (2, 4)
    ),
    Aim(
        *(
            "torch's step of experts over ours, int8 rows, 2 x 2, 1 Gbit/s",
            "Experts over two nodes",
        ),
        {"ranks": "2 x 2", "link": "1 Gbit/s", "layer": "T=512 D=512 F=192 E=64 K=8"},
        *(most("torch / this"), 2.5),
        "four ranks share two cores, which a step's CPU time fills for most of it (column *CPU "
        "ms*)",
        at_least=True,
    ),
    Aim(
        *("exchanges of a layer that are hidden", "Transfer behind experts", {}),
        *(most("hidden"), 80.0),
        "the first rows, the last results and what sockets take of the processor have nothing to "
        "hide behind (column *at most*)",
        " %",
        at_least=True,
    ),
    Aim(
        *("exchanges hidden by turns, in schedules that can", _TURNS, {}, least_of_able),
        80.0,
        "a step that takes a hundredth longer than simulated hides three hundredths less",
        " %",
        at_least=True,
    ),
)


def rows_of(section: str) -> list[Row]:
    """The rows of a section's table."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


def table(sections: dict[str, str]) -> Table:
    """The aims that a page's sections, by title, have figures for."""
    known = {title: rows_of(text) for title, text in sections.items()}
    lines = [line for aim in AIMS if (line := aim.line(known)) is not None]
    note = (
        "What was aimed at, beside the figures of the tables below: of all shapes, links and loads "
        "the worst counts, of contenders and numbers of parts the best. More aims are in "
        "*Compression, aims*, and those of the planner on the page of its accuracy."
    )
    return Table(TITLE, note, ("what", "table", "aim", "measured", "met", "why not"), lines)
