"""The options of compressed data parallelism, their schedules, and the counters of its steps."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from torch.optim import Optimizer

from moe_ext._checks import check_choice, check_kind, check_numbers_of_fields, check_rule
from moe_ext.compression.codecs import Codec, Dense
from moe_ext.compression.policy import Policy

MAX_DENSITY = 0.25


@dataclass(frozen=True)
class Warmup:
    """Dense steps, then a density that falls exponentially to that of the codec.

    Args:
        dense_steps: number of steps in which every codec is dense.
        ramp_steps: number of steps after the dense steps in which "topk" and "threshold" send more
            elements than later.
        start_density: share of the elements that the first of these steps sends.
        stages: number of times that the density falls, always by the same factor.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887), section 3.3.
    """

    dense_steps: int = 0
    ramp_steps: int = 0
    start_density: float = 0.25
    stages: int = 4

    def __post_init__(self) -> None:
        check_numbers_of_fields(self, ["dense_steps", "ramp_steps"])
        first = self.start_density
        check_rule("Warmup", "start_density", first, "in (0, 1]", 0.0 < first <= 1.0)
        check_rule("Warmup", "stages", self.stages, "at least 1", self.stages >= 1)

    def density(self, step: int, target: float) -> float:
        """Return the share of the elements to send in a step; 1 in dense steps."""
        if step < self.dense_steps:
            return 1.0
        done = step - self.dense_steps
        if done >= self.ramp_steps or target >= self.start_density or target <= 0.0:
            return target
        stage = done * self.stages // self.ramp_steps
        return math.exp(
            math.log(self.start_density)
            + (math.log(target) - math.log(self.start_density)) * stage / self.stages
        )

    def codec(self, codec: Codec, step: int) -> Codec:
        """Return the codec to use in a step instead of `codec`."""
        if codec.density is not None:
            return codec.with_density(self.density(step, codec.density))
        return Dense() if step < self.dense_steps and codec.lossy else codec


@dataclass(frozen=True)
class ResidualMonitor:
    """Compares the norms of residuals and gradients over all ranks, and warns if residuals grow.

    Args:
        every: steps between comparisons, each of which reads the residuals once; 0 for none.
        limit: largest ratio of the residuals' norm to the gradients' norm without a warning.
        action: "warn", or "densify": double the density of "topk" and "threshold", up to 0.25, and
            warn.
    """

    every: int = 50
    limit: float = 100.0
    action: str = "warn"

    def __post_init__(self) -> None:
        check_numbers_of_fields(self, ["every"])
        check_choice("ResidualMonitor", "action", self.action, ("warn", "densify"))
        check_rule("ResidualMonitor", "limit", self.limit, "positive", self.limit > 0)

    def due(self, step: int) -> bool:
        """Return True if this step compares the norms."""
        return self.every > 0 and (step + 1) % self.every == 0

    def factor(self, ratio: float, factor: float) -> float:
        """Return the factor on densities from the next step on; warn if the ratio is too large."""
        if ratio <= self.limit:
            return factor
        densify = self.action == "densify"
        then = "the density is doubled" if densify else "raise the density, or flush"
        warnings.warn(
            f"CompressionState: expected the norm of the residuals to be at most {self.limit:g} "
            f"times that of the gradients, got {ratio:.3g}; {then}",
            stacklevel=2,
        )
        return 2.0 * factor if densify else factor

    def codec(self, codec: Codec, factor: float) -> Codec:
        """Return a codec with the factor on its density."""
        if factor == 1.0 or codec.density is None:
            return codec
        return codec.with_density(min(codec.density * factor, max(codec.density, MAX_DENSITY)))


class LossScaler(Protocol):
    """Interface of `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """Return the factor on the loss of this step."""


@dataclass
class Options:
    """Arguments of `CompressionState` that steps read; they may change between steps."""

    policy: Policy
    candidates: tuple[Codec, ...]
    warmup: Warmup
    monitor: ResidualMonitor
    nonfinite: str
    average: bool
    clip_norm: float | None
    local_clip_norm: float | None
    optimizer: Optimizer | None
    grad_scaler: LossScaler | None
    node_size: int | None

    def __post_init__(self) -> None:
        kinds = {"warmup": Warmup, "monitor": ResidualMonitor, "optimizer": Optimizer}
        for name, kind in {**kinds, "clip_norm": Real, "local_clip_norm": Real}.items():
            check_kind("CompressionState", name, getattr(self, name), kind)
        read = getattr(self.grad_scaler, "get_scale", None)
        if self.grad_scaler is not None and not callable(read):
            raise TypeError(
                "CompressionState: expected grad_scaler to have a method get_scale, as a "
                f"torch.amp.GradScaler, got {self.grad_scaler!r}"
            )
        check_choice("CompressionState", "nonfinite", self.nonfinite, ("raise", "propagate"))
        for name in ("clip_norm", "local_clip_norm"):
            norm = getattr(self, name)
            check_rule("CompressionState", name, norm, "positive", norm is None or norm > 0)

    def facts(self) -> dict[str, object]:
        """Return the options that must be equal on every rank in a step, by name."""
        names = ("warmup", "monitor", "candidates", "nonfinite", "average", "clip_norm")
        found = {name: getattr(self, name) for name in (*names, "local_clip_norm", "node_size")}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {**found, "lr": [float(group["lr"]) for group in groups]}

    def rate_groups(self) -> dict[int, int]:
        """Map the id of each parameter to the number of its group in the optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {id(p): i for i, group in enumerate(groups) for p in group["params"]}

    def units_now(self, rate_group: int) -> dict[str, float]:
        """Return the units of the residuals that this step leaves: learning rate and loss scale."""
        units: dict[str, float] = {}
        if self.optimizer is not None:
            rate = float(self.optimizer.param_groups[rate_group]["lr"])
            # A rate of zero cannot be a unit, because `unit_factors` divides by it.
            units.update({"rate": rate} if rate > 0.0 else {})
        if self.grad_scaler is not None:
            units["loss_scale"] = self.loss_scale
        return units

    @property
    def loss_scale(self) -> float:
        """Factor on the gradients of this step."""
        return 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())


@dataclass
class Progress:
    """Counters of the steps of a state.

    Attributes:
        step: number of successful reductions.
        was_finite: gradients of the last reduction were finite on every rank.
        can_undo: the last reduction may be undone.
        density_factor: the monitor's factor on the densities of codecs.
        residual_ratio: norm of the residuals over that of the gradients, at the last comparison.
    """

    step: int = 0
    was_finite: bool = True
    can_undo: bool = False
    density_factor: float = 1.0
    residual_ratio: float | None = None
