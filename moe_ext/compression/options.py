"""The options of compressed data parallelism, and the counters of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from torch.optim import Optimizer

from moe_ext._checks import check_choice, check_kind
from moe_ext.compression.codecs import Codec
from moe_ext.compression.policy import Policy
from moe_ext.compression.schedules import ResidualMonitor, Warmup


class LossScaler(Protocol):
    """A `torch.amp.GradScaler`, or what has its factor."""

    def get_scale(self) -> float:
        """The factor on the loss of this step."""


@dataclass
class Options:
    """See `CompressionState`, whose arguments they are; they may change between steps."""

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
        for name, kind in kinds.items():
            check_kind("CompressionState", name, getattr(self, name), kind)
        for name in ("clip_norm", "local_clip_norm"):
            check_kind("CompressionState", name, getattr(self, name), Real)
        read = getattr(self.grad_scaler, "get_scale", None)
        if self.grad_scaler is not None and not callable(read):
            raise TypeError(
                "CompressionState: expected grad_scaler to have a method get_scale, as a "
                f"torch.amp.GradScaler, got {self.grad_scaler!r}"
            )
        check_choice("CompressionState", "nonfinite", self.nonfinite, ("raise", "propagate"))
        for name in ("clip_norm", "local_clip_norm"):
            norm = getattr(self, name)
            if norm is not None and not norm > 0:
                raise ValueError(f"CompressionState: expected {name} to be positive, got {norm}")

    def facts(self) -> dict[str, object]:
        """Options that must be equal on every rank in a step, by name."""
        names = ("warmup", "monitor", "candidates", "nonfinite", "average", "clip_norm")
        found = {name: getattr(self, name) for name in (*names, "local_clip_norm", "node_size")}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {**found, "lr": [float(group["lr"]) for group in groups]}

    def rate_groups(self) -> dict[int, int]:
        """Id of a parameter to the number of its group in the optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {id(p): i for i, group in enumerate(groups) for p in group["params"]}

    def units_now(self, rate_group: int) -> dict[str, float]:
        """In which units a step leaves what it owes: learning rate and loss scale."""
        units: dict[str, float] = {}
        if self.optimizer is not None:
            rate = float(self.optimizer.param_groups[rate_group]["lr"])
            # A rate of zero applies nothing that could be scaled.
            units.update({"rate": rate} if rate > 0.0 else {})
        if self.grad_scaler is not None:
            units["loss_scale"] = float(self.grad_scaler.get_scale())
        return units


@dataclass
class Progress:
    """Counters of the steps of a state.

    Attributes:
        step: reductions that went well.
        was_finite: whether the gradients of the last one were, on every rank.
        can_undo: whether the last one may be taken back.
        density_factor: of the monitor, on the densities of codecs.
        residual_ratio: norm of what is owed over that of the gradients, when it looked last.
    """

    step: int = 0
    was_finite: bool = True
    can_undo: bool = False
    density_factor: float = 1.0
    residual_ratio: float | None = None
