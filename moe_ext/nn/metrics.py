"""What a layer tells about its last forward pass.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

Metric = Tensor | Callable[[], Tensor]


class LayerMetrics(Mapping[str, Tensor]):
    """Mapping of names to detached tensors; what no loss needed is computed when it is read.

    Args:
        entries: name to tensor, or to a function that computes it. A function runs once.
    """

    def __init__(self, entries: dict[str, Metric]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Tensor:
        value = self._entries[name]
        if not isinstance(value, Tensor):
            value = value().detach()
            self._entries[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"LayerMetrics({', '.join(self._entries)})"
