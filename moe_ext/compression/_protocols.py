"""What a `CompressionState` wants of what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class GradScaler(Protocol):
    """What the state wants of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """The factor on the loss of this step."""


class ChoosesCodecs(Protocol):
    """What the state wants of a cost model (see `CostModel`)."""

    def choose(self, numel: int, codecs: Sequence[Any], *, bucket: Any, current: Any = None) -> Any:
        """One of the codecs, the same on every rank."""

    def is_timed(self, bucket: Any) -> bool:
        """Whether the time of the chosen reduction is wanted, the same on every rank."""

    def observe(self, bucket: Any, codec: Any, seconds: float) -> None:
        """Takes in what a reduction took here."""

    def settle(self, agreed: Sequence[float] | None = None) -> None:
        """Takes in the same of the slowest rank."""

    def explain(self) -> str:
        """A table."""
