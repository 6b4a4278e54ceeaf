"""What has to hold of the arguments of an attention, on each rank and between the ranks.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D and Dv head
    dims, P ranks of the group.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention._block import BlockOptions
from moe_ext.attention._options import Options
from moe_ext.attention.layouts import LAYOUTS, Layout
from moe_ext.attention.schemes import SCHEME_NAMES
from moe_ext.distributed.collectives import check_equal_over_ranks

OPERATION = "ring_attention"
PRECISIONS = ("exact", "fast")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require(condition: bool, argument: str, rule: str, value: object) -> None:
    """ValueError about an argument unless the condition holds."""
    if not condition:
        raise ValueError(f"{OPERATION}: expected {argument} to be {rule}, got {value}")


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, per_head: dict[str, Tensor | None]
) -> None:
    """ValueError unless dtypes, devices and shapes go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.dtype in _DTYPES, name, "float32, bfloat16, float16 or float64", x.dtype)
        require(x.dim() == 4, name, "of shape [B, H, S/P, D]", list(x.shape))
        require(x.dtype == q.dtype, name, f"{q.dtype} like q", x.dtype)
        require(x.device == q.device, name, f"on {q.device} like q", x.device)
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    rule = f"[{batch}, Hkv, {length}, {dim}] to go with q"
    require(k.shape == (batch, kv_heads, length, dim), "k", rule, list(k.shape))
    rule = f"[{batch}, {kv_heads}, {length}, Dv] to go with k"
    require(v.shape[:3] == k.shape[:3], "v", rule, list(v.shape))
    multiple = heads % kv_heads == 0 if kv_heads else heads == 0
    require(multiple, "heads of q", f"a multiple of the {kv_heads} heads of k", heads)
    if key_mask is not None:
        fits = key_mask.shape == (batch, length) and key_mask.dtype == torch.bool
        found = f"{key_mask.dtype} {list(key_mask.shape)}"
        require(fits, "key_mask", f"bool [{batch}, {length}], this rank's keys", found)
    for name, values in per_head.items():
        if values is not None:
            require(values.shape == (heads,), name, f"[{heads}]", list(values.shape))


def check_numbers(
    scale: float | None, softcap: float | None, dropout_p: float, seed: int | None
) -> None:
    """ValueError for a number out of its range."""
    if scale is not None:
        require(math.isfinite(scale), "scale", "finite", scale)
    if softcap is not None:
        require(0 <= softcap < math.inf, "softcap", "0 (none) or more", softcap)
    require(0 <= dropout_p < 1, "dropout_p", "in [0, 1)", dropout_p)
    if seed is not None:
        require(-(1 << 63) <= seed < 1 << 63, "seed", "a 64-bit integer", seed)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


class Facts:
    """What ranks have to agree on, as integers to send and as values to print."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._shown: list[tuple[str, tuple[object, ...] | str]] = []

    def integer(self, name: str, value: int) -> None:
        """A whole number."""
        self.words.append(int(value))
        self._shown.append((name, "integer"))

    def number(self, name: str, value: float) -> None:
        """A float, compared bit by bit."""
        self.words.append(_bits(value))
        self._shown.append((name, "number"))

    def choice(self, name: str, value: object, choices: Sequence[object]) -> None:
        """One of a fixed list."""
        self.words.append(list(choices).index(value))
        self._shown.append((name, tuple(choices)))

    def checksum(self, name: str, value: object) -> None:
        """Anything that prints alike on every rank."""
        self.words.append(zlib.crc32(repr(value).encode()))
        self._shown.append((f"{name} (checksum)", "integer"))

    def check(self, rows: list[list[int]], group: ProcessGroup) -> None:
        """ValueError on every rank, naming the first fact that differs and every rank's value."""
        for i, (name, kind) in enumerate(self._shown):
            column: list[object] = [row[i] for row in rows]
            if kind == "number":
                column = [_number(row[i]) for row in rows]
            elif isinstance(kind, tuple):
                column = [kind[row[i]] for row in rows]
            check_equal_over_ranks(name, column, group, OPERATION)


def collect_facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    block: BlockOptions,
    flags: list[bool],
) -> Facts:
    """Of one call; all but lengths and seed."""
    facts = Facts()
    facts.choice("the dtype of q", q.dtype, _DTYPES)
    for name, value in zip("BHD", (q.shape[0], q.shape[1], q.shape[3]), strict=True):
        facts.integer(f"{name} of q", value)
    facts.integer("Hkv of k", k.shape[1])
    facts.integer("Dv of v", v.shape[3])
    layout, grid = options.layout, options.grid
    name = "a Layout" if isinstance(layout, Layout) else layout
    facts.choice("layout", name, (*LAYOUTS, "a Layout"))
    facts.checksum("layout", layout)
    facts.choice("scheme", options.scheme, SCHEME_NAMES)
    facts.choice("precision", options.precision, PRECISIONS)
    facts.integer("rows of the mesh", 0 if grid is None else grid.shape[0])
    facts.checksum("mesh", grid)
    facts.integer("is_causal", block.mask.is_causal)
    facts.integer("window[0]", block.mask.left)
    facts.integer("window[1]", block.mask.right)
    facts.checksum("cu_seqlens", block.mask.cu_seqlens)
    facts.number("scale", block.scale)
    facts.number("softcap", block.softcap)
    facts.number("dropout_p", block.dropout_p)
    for name, flag in zip(
        ("seed", "key_mask", "alibi_slopes", "sinks", "bfloat16 for kv_grad_dtype"),
        flags,
        strict=True,
    ):
        facts.integer(f"giving {name}", flag)
    return facts
