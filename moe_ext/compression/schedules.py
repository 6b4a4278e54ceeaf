"""Changes over the steps: warm-up, and the monitor of the residuals."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from moe_ext._checks import check_choice, check_numbers_of_fields
from moe_ext.compression.codecs import Codec, Dense

MAX_DENSITY = 0.25


@dataclass(frozen=True)
class Warmup:
    """Dense steps, then a density that falls exponentially to that of the codec.

    Args:
        dense_steps: steps in which every codec is dense.
        ramp_steps: steps after them in which "topk" and "threshold" send more than later.
        start_density: share of the elements that the first of these sends.
        stages: the density falls that many times, by the same factor.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887), section 3.3.
    """

    dense_steps: int = 0
    ramp_steps: int = 0
    start_density: float = 0.25
    stages: int = 4

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        for name in ("dense_steps", "ramp_steps"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"Warmup: expected {name} to be at least 0, got {getattr(self, name)}"
                )
        if not 0.0 < self.start_density <= 1.0:
            raise ValueError(
                f"Warmup: expected start_density to be in (0, 1], got {self.start_density}"
            )
        if self.stages < 1:
            raise ValueError(f"Warmup: expected stages to be at least 1, got {self.stages}")

    def density(self, step: int, target: float) -> float:
        """Share of the elements to send in a step, 1 in the dense ones."""
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
        """The codec to use in a step in the place of another one."""
        if codec.density is not None:
            return codec.with_density(self.density(step, codec.density))
        return Dense() if step < self.dense_steps and codec.lossy else codec


@dataclass(frozen=True)
class ResidualMonitor:
    """Compares what is owed with the gradients, over all ranks: a residual that grows is a warning.

    Args:
        every: steps between looks, each of which reads the residuals once; 0 never looks.
        limit: norm of the residuals over that of the gradients that is too much.
        action: "warn", or "densify": double the density of "topk" and "threshold", up to 0.25, and
            warn.
    """

    every: int = 50
    limit: float = 100.0
    action: str = "warn"

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        check_choice("ResidualMonitor", "action", self.action, ("warn", "densify"))
        if self.every < 0:
            raise ValueError(f"ResidualMonitor: expected every to be at least 0, got {self.every}")
        if not self.limit > 0:
            raise ValueError(f"ResidualMonitor: expected limit to be positive, got {self.limit}")

    def due(self, step: int) -> bool:
        """True if to look after this step."""
        return self.every > 0 and (step + 1) % self.every == 0

    def factor(self, ratio: float, factor: float) -> float:
        """The factor on densities from the next step on; warns where the ratio is too much."""
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
        """A codec with the factor on its density."""
        if factor == 1.0 or codec.density is None:
            return codec
        return codec.with_density(min(codec.density * factor, max(codec.density, MAX_DENSITY)))
