"""Experts over parts of the tokens: one part travels while the experts work on another.

Shapes: T tokens, D model, R rows of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.dispatch import DispatchMetadata, Part, TokenDispatcher
from moe_ext.nn.experts import check_results, late_weights, run_experts, take_weights


def run_parts(
    dispatcher: TokenDispatcher,
    parts: list[Part],
    experts: nn.Module,
    dropped: list[Tensor],
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Dispatch, experts and combine of all parts; the backward pass goes the same way back.

    While the experts work on part i, the rows of part i + 1 and the results of part i - 1 travel:
    alone travel the rows of the first part, and the results of the last one beside `meanwhile`. In
    the backward pass the gradients of a part's rows travel beside those of its weights too, so that
    those of the last results alone travel by themselves.

    Args:
        dispatcher: of the layer.
        parts: of `dispatcher.in_parts`.
        experts: maps `(rows, expert_offsets)` to rows.
        dropped: receives the number of slots that were dropped, of each part.
        meanwhile: what else the layer computes.

    Returns:
        `[T, D]`.
    """
    # By part: rows that arrived, and later the results; then the sums.
    here: list[Any] = [None] * len(parts)
    sums: list[Any] = [None] * len(parts)

    def send(i: int, beside: Callable[[], None] | None) -> None:
        late: dict[str, Tensor] = {}

        def begin() -> None:
            late.update(late_weights(experts))
            if beside is not None:
                beside()

        rows, offsets, metadata = parts[i](begin)
        dropped.append(metadata.num_dropped)
        weights, metadata = take_weights(experts, dispatcher, rows, metadata)
        here[i] = late, (rows, offsets, *weights), metadata

    def compute(i: int) -> None:
        late, args, metadata = here[i]
        results = run_experts(experts, late, *args)
        check_results(experts, dispatcher, args[0], results)
        here[i] = results, metadata

    def bring_back(i: int, beside: Callable[[], None] | None) -> None:
        results: Tensor
        metadata: DispatchMetadata
        (results, metadata), here[i] = here[i], None
        sums[i] = dispatcher.combine(results, metadata, meanwhile=beside)

    def turn(i: int) -> None:
        """Work to run while the results of part i - 1 travel."""
        if i + 1 < len(parts):
            send(i + 1, lambda: compute(i))
        else:
            compute(i)

    send(0, None)
    turn(0)
    for i in range(1, len(parts)):
        bring_back(i - 1, lambda i=i: turn(i))  # type: ignore[misc]
    bring_back(len(parts) - 1, meanwhile)
    return torch.cat(sums)
