"""Results of a run: a table, a picture of loss against bytes, and JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moe_ext import plot


@dataclass
class Point:
    """A validation: what it found, and what had been spent until then."""

    step: int
    loss: float
    sent_bytes: int
    seconds: float


@dataclass
class Run:
    """One setting: what each step took and sent on this rank, and the validations."""

    setting: str
    warm_steps: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """Median of a step after the warm-up."""
        return 1e3 * statistics.median(self._after_warmup(self.seconds))

    @property
    def bytes_a_step(self) -> float:
        """Mean of a step after the warm-up, as counted."""
        return statistics.mean(self._after_warmup(self.sent_bytes))

    @property
    def written_a_step(self) -> float:
        """Mean of a step after the warm-up, to sockets; 0 where the system does not tell."""
        return statistics.mean(self._after_warmup(self.written_bytes))

    @property
    def total_bytes(self) -> int:
        """Counted bytes of all steps."""
        return sum(self.sent_bytes)

    def _after_warmup(self, values: list[float] | list[int]) -> list[float] | list[int]:
        """Without the first step too, in which buffers are made and buckets laid out."""
        return values[max(1, self.warm_steps) :] or values


HEADER = ("setting", "validation loss", "ms a step", "kB a step", "to sockets", "dense /", "MB")


def table(runs: list[Run], dense_bytes: float) -> str:
    """A line a run; `dense_bytes` is what a rank would send of float32 gradients in a step."""
    rows = [HEADER]
    for run in runs:
        written = f"{run.written_a_step / 1e3:.1f}" if run.written_a_step else "-"
        share = f"{dense_bytes / run.bytes_a_step:.1f}" if run.bytes_a_step else "-"
        rows.append(
            (
                run.setting,
                f"{run.validation[-1].loss:.4f}",
                f"{run.milliseconds:.1f}",
                f"{run.bytes_a_step / 1e3:.1f}",
                written,
                share,
                f"{run.total_bytes / 1e6:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def write_json(runs: list[Run], dense_bytes: float, path: Path) -> None:
    """Everything that was measured."""
    found = {"dense_bytes_a_step": dense_bytes, "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(found))


def draw(runs: list[Run], title: str, path: Path) -> None:
    """Validation loss against bytes and against time; ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed; try `pip install matplotlib`") from error

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_bytes, by_time = figure.subplots(1, 2, sharey=True)
    for run in runs:
        losses = [point.loss for point in run.validation]
        megabytes = [point.sent_bytes / 1e6 for point in run.validation]
        by_bytes.plot(megabytes, losses, "o-", markersize=3, label=run.setting)
        seconds = [point.seconds for point in run.validation]
        by_time.plot(seconds, losses, "o-", markersize=3, label=run.setting)
    if all(point.sent_bytes > 0 for run in runs for point in run.validation):
        by_bytes.set_xscale("log")
    by_bytes.set(xlabel="MB that a rank has sent", ylabel="validation loss (nats per byte)")
    by_time.set(xlabel="seconds of training")
    for axes in (by_bytes, by_time):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    plot.save_figure(figure, path)
