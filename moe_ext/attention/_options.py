"""The arguments of an attention: its tensors, and the others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention.grid import Grid
from moe_ext.attention.layouts import Layout
from moe_ext.distributed._c10d import group_of_name


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the compiled operator; see `ring_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens: Tensor | Sequence[int] | None = None


def scale_of(scale: float | None, head_dim: int) -> float:
    """The factor on scores, 1 / sqrt(D) where none is given."""
    return scale if scale is not None else 1 / math.sqrt(max(head_dim, 1))


def draw_seed(dropout_p: float) -> int:
    """A seed from torch's generator; without dropout none is drawn."""
    return int(torch.randint(1 << 62, ())) if dropout_p > 0 else 0


@dataclass(frozen=True)
class Options:
    """What calls of one attention have in common; see `ring_attention`.

    `group` is that of all ranks, `grid` the rows that a 2-D mesh puts them in.
    """

    group: ProcessGroup | None
    layout: str | Layout = "zigzag"
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    scheme: str = "ring"
    precision: str = "exact"
    kv_grad_dtype: torch.dtype | None = None
    grid: Grid | None = None

    @staticmethod
    def of_text(
        text: str,
        is_causal: bool,
        scale: float | None,
        window: tuple[int, int],
        softcap: float,
        dropout_p: float,
    ) -> Options:
        """The options of `options_text`, and the others."""
        group, layout, scheme, precision, dtype, rows = json.loads(text)
        if isinstance(layout, list):
            name, seq_len, shards = layout
            layout = Layout(name, seq_len, tuple(tuple(range(*r) for r in s) for s in shards))
        wire = getattr(torch, dtype) if dtype else None
        numbers = (is_causal, scale, window, softcap, dropout_p)
        grid = Grid(tuple(map(tuple, rows))) if rows else None
        return Options(group_of_name(group), layout, *numbers, scheme, precision, wire, grid)


def options_text(
    group: ProcessGroup | None,
    layout: str | Layout,
    scheme: str,
    precision: str,
    kv_grad_dtype: torch.dtype | None,
    grid: Grid | None,
) -> str:
    """Those options as a string that an operator can take; the others are numbers."""
    found: Any = layout
    if isinstance(layout, Layout):
        shards = [[[r.start, r.stop, r.step] for r in shard] for shard in layout.shards]
        found = [layout.name, layout.seq_len, shards]
    dtype = "" if kv_grad_dtype is None else str(kv_grad_dtype).removeprefix("torch.")
    rows = None if grid is None else grid.rows
    name = "" if group is None else group.group_name
    return json.dumps([name, found, scheme, precision, dtype, rows])


def group_of_text(text: str) -> ProcessGroup | None:
    """The group of `options_text`."""
    return group_of_name(json.loads(text)[0])
