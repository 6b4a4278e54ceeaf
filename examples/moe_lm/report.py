"""Metrics on disk (JSON lines and TensorBoard) and the pictures drawn from them.

Shape suffixes: L MoE layers, E experts, N logged steps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from moe_ext import plot

METRICS = "metrics.jsonl"


def read_metrics(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Return the whole lines of a metrics file, up to `last_step`.

    A line cut short by a kill ends the file: what follows it was never written.
    """
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if last_step is None or record["step"] <= last_step:
            records.append(record)
    return records


class MetricsLog:
    """Appends to metrics.jsonl and TensorBoard; lines after the resumed step are dropped."""

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool) -> None:
        self.path = folder / METRICS
        kept = read_metrics(self.path, first_step)
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; numbers also go to TensorBoard under their key."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, float):
                    self._board.add_scalar(key, value, record["step"])

    def sync(self) -> None:
        """Force the lines to disk, so that a checkpoint never gets ahead of its metrics."""
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self.sync()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save_figure(figure: Any, path: Path) -> None:
    """Replace the picture in one step: a kill leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(path)
    _pyplot().close(figure)


def plot_loss(records: list[dict[str, Any]], entropy: float, path: Path) -> None:
    """Draw training and validation loss by step, with the unigram entropy as the mark to beat."""
    figure, axes = _pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validation = [
        (record["step"], record["validation_loss"])
        for record in records
        if "validation_loss" in record
    ]
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=0.8, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:red", label="validation")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Next-byte loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    _save_figure(figure, path)


def plot_curves(curves: dict[str, list[tuple[int, float]]], path: Path, title: str) -> None:
    """Draw the loss of each name by step."""
    figure, axes = _pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.0, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    _save_figure(figure, path)


def plot_expert_load(records: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel a MoE layer: expert by step, coloured by load over the balanced load."""
    logged = [record for record in records if "expert_load" in record]
    if not logged:
        return
    load_NLE = np.array([record["expert_load"] for record in logged], dtype=np.float64)
    steps = [record["step"] for record in logged]
    plot.expert_load(
        {f"MoE layer {layer}": load_NLE[:, layer] for layer in range(load_NLE.shape[1])},
        path,
        steps=steps,
        title="Expert load by layer and step",
    )
