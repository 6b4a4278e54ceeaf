"""Compares collectives over their ranks before they are sent.

MOE_EXT_DEBUG=1 compares all collectives of this package, `Dispatch(debug=True)` those of a layer.

If ranks call a collective with different arguments, it hangs or mixes up bytes. With the
comparison, every rank raises an error instead. Each call then costs one more message and a host
synchronisation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import running, with_layer
from moe_ext.comm.groups import global_rank, group_ranks, group_size

# Name under which ranks compare the result of `enabled`.
OPTION = "debug (or else MOE_EXT_DEBUG)"
ENABLED = os.environ.get("MOE_EXT_DEBUG", "0") not in ("", "0")


def enabled() -> bool:
    """Return the `debug` option of the running layer, or ENABLED if the layer leaves it open."""
    layer = running.get()
    wanted: bool | None = None if layer is None else getattr(layer(), "debug", None)
    return ENABLED if wanted is None else wanted


def compare(
    kind: str,
    x: Tensor,
    group: ProcessGroup | None,
    operation: str,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> None:
    """Raise on every rank unless all of a group are about to make the same call.

    Args:
        kind: of the collective.
        x: what this rank sends, `[N, ...]`.
        group: the P ranks.
        operation: name for messages; compared as well, since ranks must call in the same order.
        send: number of rows for each of the P ranks, if parts are unequal.
        receive: number of rows from each of the P ranks.

    Raises:
        ValueError: the operation, the kind, the shape, the dtype or the splits differ; the message
            names the ranks and the value of each.
    """
    if group_size(group) == 1:
        return
    assert group is not None
    splits = [*send, *receive] if send is not None and receive is not None else []
    facts: dict[str, object] = {
        "the collective": kind,
        "the shape of a row" if splits else "the shape": tuple(x.shape[bool(splits) :]),
        "the dtype": str(x.dtype),
    }
    ranks = group_ranks(group)
    try:
        rows = Agreement(operation, group, x.device).compare(facts, values=splits)
        for i, row in enumerate(rows if splits else []):
            for j, other in enumerate(rows):
                if row[j] != other[len(ranks) + i]:
                    raise ValueError(
                        f"{operation}: expected rank {ranks[j]} to receive the {row[j]} rows that "
                        f"rank {ranks[i]} sends it, got {other[len(ranks) + i]} in its splits"
                    )
    except ValueError as error:
        raise ValueError(
            with_layer(f"{error}; seen by rank {global_rank()} in a message")
        ) from None
