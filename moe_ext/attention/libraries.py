"""Kernels of torch for full and causal pieces of a block, and how blocks are cut for them.

The kernels return the dtype of their inputs, so each piece is rounded. A library never gets a piece
without queries or keys, nor a query that sees no key, because libraries differ in the results.

Shapes: B batch, H heads, Hkv heads of keys and values, L queries and M keys of a block in local
    order, D head dim.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.attention
from torch import Tensor

from moe_ext._trial import first_mistake
from moe_ext.attention.masks import Mask
from moe_ext.ops import attention_block, attention_block_backward, attention_delta

Runs = tuple[range, ...]
Span = tuple[int, int]  # (first, past the last)
Kind = Literal["full", "causal", "masked"]
Qkv = tuple[Tensor, Tensor, Tensor]
# Largest number of pairs of runs for which a block is cut. With more pairs, cutting would take
# longer than it saves.
_MOST_PAIRS = 4096
_HALVES = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten


class KernelLibrary(Protocol):
    """A kernel with its backward pass. Causal pieces have as many queries as keys."""

    name: str

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """True if the kernel supports the device, dtype and shapes of the tensors."""

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out `[B, H, L, D]` in the dtype of q, lse `[B, H, L]` float32)."""

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        """(dq, dk, dv) in the dtype of q, given out and lse over the keys of all blocks."""


class _FlashCpu:
    """FlashAttention of torch's CPU backend.

    Used for 16 bits only, because our own kernel is as fast in float32.
    """

    name = "flash (CPU)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return q.device.type == "cpu" and q.dtype in _HALVES and v.shape[3] == q.shape[3]

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv, 0.0, is_causal, scale=scale
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *qkv, out, lse, 0.0, is_causal, scale=scale
        )
        return dq, dk, dv


# Major compute capabilities that an implementation runs on, for implementations with which a user
# can replace torch's own FlashAttention.
_MAJORS = {"FA3": (9,), "FA4": (9, 10)}


def active_flash() -> str | None:
    """The implementation that `torch.nn.attention.activate_flash_attention_impl` activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


class _FlashCuda:
    """FlashAttention in torch's CUDA backend: torch's own version 2, or the active implementation.

    For 16 bits. Version 2 needs a card of capability 8.0 or later.
    """

    name = "flash (CUDA)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        capability, majors = _capability(q.device), _MAJORS.get(active_flash() or "")
        return (
            _are_halves(q, v, most=256)
            and v.shape[3] == q.shape[3]
            and (capability >= (8, 0) if majors is None else capability[0] in majors)
        )

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_flash_attention(*qkv, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        lengths: list[Any] = [None, None, qkv[0].shape[2], qkv[1].shape[2]]
        # The two states of a random generator are not read, because there is no dropout.
        states = lse.new_zeros((2, 2), dtype=torch.int64).unbind()
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, *qkv, out, lse, *lengths, 0.0, is_causal, *states, scale=scale
        )
        return dq, dk, dv


class _FlashFour:
    """FlashAttention-4 of the package `flash-attn-4`, called without torch's registry.

    For 16 bits on cards of capability 9 and 10, with values as wide as keys, at most 128.
    """

    name = "FlashAttention-4 (CUDA)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return (
            _are_halves(q, v, most=128)
            and v.shape[3] == q.shape[3]
            and _capability(q.device)[0] in _MAJORS["FA4"]
            and _has_flash_four()
        )

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        given = (x.transpose(1, 2) for x in qkv)
        out, lse = _flash_four()._flash_attn_fwd(
            *given, softmax_scale=scale, causal=is_causal, return_lse=True
        )
        return out.transpose(1, 2), lse

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        q, k, v, out, grad_out = (x.transpose(1, 2) for x in (*qkv, out, grad_out))
        dq, dk, dv = _flash_four()._flash_attn_bwd(
            *(q, k, v, out, grad_out, lse.contiguous()),
            softmax_scale=scale,
            causal=is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@functools.cache
def _has_flash_four() -> bool:
    found = importlib.util.find_spec("flash_attn")
    return found is not None and importlib.util.find_spec("flash_attn.cute") is not None


def _flash_four() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


class _EfficientCuda:
    """The memory-efficient kernel of torch's CUDA backend.

    The kernel supports float32 as well, but needs as many heads of keys as of queries.
    """

    name = "efficient (CUDA)"
    # The log-sum-exp is padded to a multiple of this number of queries.
    _ROWS = 32

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        even = 16 // q.dtype.itemsize
        return (
            q.device.type in ("cuda", "meta")
            and q.dtype in (*_HALVES, torch.float32)
            and q.shape[1] == k.shape[1]
            and q.shape[3] % even == 0
            and v.shape[3] % even == 0
            and (q.dtype != torch.bfloat16 or _capability(q.device) >= (8, 0))
        )

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_efficient_attention(
            *qkv, None, True, 0.0, is_causal, scale=scale
        )
        return found[0], found[1][:, :, : qkv[0].shape[2]]

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        missing = -lse.shape[2] % self._ROWS
        lse = torch.nn.functional.pad(lse, (0, missing), value=torch.inf)
        states = lse.new_zeros((2,), dtype=torch.int64).unbind()
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            *qkv,
            None,
            out,
            lse,
            *states,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return dq, dk, dv


class _CudnnCuda:
    """The kernel of cuDNN, for 16 bits.

    Values of another width than keys need capability 9.0. The backward pass is not deterministic.
    """

    name = "cuDNN (CUDA)"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return (
            _are_halves(q, v, most=128)
            and not torch.are_deterministic_algorithms_enabled()
            and _capability(q.device) >= ((8, 0) if v.shape[3] == q.shape[3] else (9, 0))
        )

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_cudnn_attention(
            *qkv, None, True, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1].squeeze(-1)

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        lengths: list[Any] = [None, None, qkv[0].shape[2], qkv[1].shape[2]]
        states = lse.new_zeros((2,), dtype=torch.int64).unbind()
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            *qkv,
            out,
            lse[..., None].contiguous(),
            *states,
            None,
            *lengths,
            0.0,
            is_causal,
            scale=scale,
        )
        return dq, dk, dv


def _are_halves(q: Tensor, v: Tensor, *, most: int) -> bool:
    """True for CUDA tensors of 16 bits whose widths are multiples of 8, up to `most`."""
    widths = (q.shape[3], v.shape[3])
    on_cuda = q.device.type in ("cuda", "meta")
    return on_cuda and q.dtype in _HALVES and max(widths) <= most and not any(w % 8 for w in widths)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


_FLASH, _FOUR, _CUDNN = _FlashCuda(), _FlashFour(), _CudnnCuda()
LIBRARIES: tuple[KernelLibrary, ...] = (_FlashCpu(), _FLASH, _FOUR, _EfficientCuda(), _CUDNN)
# torch's own switches, which `torch.nn.attention.sdpa_kernel` also sets.
_SWITCHES = {
    "flash (CUDA)": torch.backends.cuda.flash_sdp_enabled,
    "FlashAttention-4 (CUDA)": torch.backends.cuda.flash_sdp_enabled,
    "efficient (CUDA)": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cuDNN (CUDA)": torch.backends.cuda.cudnn_sdp_enabled,
}


def _order(capability: tuple[int, int]) -> tuple[KernelLibrary, ...]:
    """All libraries in order of preference. A library may occur twice; its first place counts.

    An implementation that the user activated comes first. On cards of capability 9.0 cuDNN trains
    1.7 to 2.3 times as fast as FlashAttention-2, but slower on 8.0 and 12.0, as transformers
    measured. FlashAttention-4 is made for capability 10.
    """
    if active_flash() is not None:
        return (_FLASH, *LIBRARIES)
    first: dict[int, tuple[KernelLibrary, ...]] = {9: (_CUDNN, _FOUR), 10: (_FOUR, _CUDNN)}
    return (*first.get(capability[0], ()), *LIBRARIES)


def library_for(q: Tensor, k: Tensor, v: Tensor) -> KernelLibrary | None:
    """The kernel for blocks of these tensors, or None.

    Returns the first in `_order` that supports the tensors, that is not switched off in torch, and
    whose results were right when it was tried.
    """
    if not (q.numel() and k.numel() and v.numel()):
        return None
    for library in _order(_capability(q.device)):
        is_on = _SWITCHES.get(library.name)
        if (is_on is None or is_on()) and library.serves(q, k, v) and not _fault(library, q, k, v):
            return library
    return None


# Types of devices on which a library is tried before it is first used.
_TRIED_ON = ("cuda",)
# Mistakes found by trials, or "". The key is library, active implementation, device, dtype, widths
# and whether heads share keys.
_faults: dict[tuple[object, ...], str] = {}
# Largest relative error in a trial. Rounding to 16 bits stays far below, wrong results far above.
_MOST_ERROR = 0.03


def _fault(library: KernelLibrary, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Reason why a library is passed over for tensors of this kind, or "".

    The first call of a kind tries the library.

    NOTE: device-to-host sync, at the first call of a kind.
    """
    if q.device.type not in _TRIED_ON or torch.compiler.is_compiling() or type(q) is not Tensor:
        return ""
    is_shared = q.shape[1] > k.shape[1]
    kind = (q.dtype, q.shape[3], v.shape[3], is_shared)
    key = (library.name, active_flash(), q.device, *kind)
    if key not in _faults:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            # A capture forbids host synchronisation. The pass before it has tried the library.
            return ""
        _faults[key] = _try(library, q.device, *kind)
    return _faults[key]


@torch.no_grad()
def _try(library: KernelLibrary, device: torch.device, dtype: torch.dtype, *sizes: int) -> str:
    """Run two small blocks, and return the mistake in their results, or ""."""
    dim, v_dim, is_shared = sizes
    # 160 positions are more than a tile of a kernel, and not a multiple of one. A generator of its
    # own leaves the user's random state alone.
    generator = torch.Generator().manual_seed(0)
    heads = 2 - is_shared
    shapes = ((2, dim), (heads, dim), (heads, v_dim), (2, v_dim))
    q, k, v, grad_out = (
        torch.randn(1, count, 160, width, generator=generator, device="cpu").to(device, dtype)
        for count, width in shapes
    )
    at, scale = torch.arange(160, device=device), dim**-0.5
    for is_causal, keys in ((True, 160), (False, 96)):
        qkv = (q, k[:, :, :keys], v[:, :, :keys])
        options = {"causal": is_causal, "scale": scale}
        given = (*qkv, at, at[:keys])
        exact, lse = attention_block(*given, **options)
        delta = attention_delta(grad_out.to(exact.dtype), exact)
        grads = attention_block_backward(grad_out.to(exact.dtype), lse, delta, *given, **options)

        def run(qkv: Qkv = qkv, is_causal: bool = is_causal) -> list[Tensor]:
            out_lse = library.forward(qkv, is_causal, scale)
            return [*out_lse, *library.backward(grad_out, *out_lse, qkv, is_causal, scale)]

        names = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")
        of = f" of a {'causal' if is_causal else 'whole'} block"
        if mistake := first_mistake(run, (exact, lse, *grads[:3]), names, _MOST_ERROR, of=of):
            return mistake
    return ""


def state() -> str:
    """Text of `info` for `precision="fast"`: libraries in order, and those passed over."""
    if not torch.cuda.is_available():
        return f"{LIBRARIES[0].name} for 16 bits"
    device = torch.device("cuda", torch.cuda.current_device())
    order = dict.fromkeys(library.name for library in _order(_capability(device)))
    absent = set() if _has_flash_four() else {_FOUR.name}
    names = [name for name in order if "CUDA" in name and name not in absent]
    said = f"{', '.join(names)}, in this order; torch's flash is {active_flash() or 'FA2'}"
    passed = sorted({f"{key[0]}: {why}" for key, why in _faults.items() if why})
    return "; passed over: ".join([said, *passed])


@dataclass(frozen=True)
class Piece:
    """Rows and columns of a block, and the kind of mask on them.

    Attributes:
        rows: (first, past the last) of the queries.
        cols: (first, past the last) of the keys.
        kind: "full", every query sees every key; "causal", there are as many queries as keys, and
            query i sees keys 0 to i; "masked", anything else.
    """

    rows: Span
    cols: Span
    kind: Kind

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs, including those that the mask hides."""
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])


@dataclass(frozen=True)
class _Run:
    """Ascending positions of one document that are consecutive in local order.

    `begin` and `end` are local indices, `first` and `last` global positions. `step` is None for a
    single position and for uneven spacing. `in_prefix` is True for keys of the document's prefix.
    """

    begin: int
    end: int
    first: int
    last: int
    step: int | None
    document: int
    in_prefix: bool = False


def runs_of(positions: Tensor) -> Runs:
    """Split a tensor of positions into evenly spaced ranges, in its order.

    NOTE: device-to-host sync.
    """
    values = positions.cpu()
    steps, counts = torch.unique_consecutive(values.diff(), return_counts=True)
    runs: list[range] = []
    # Index of the first position that is in no run yet, and of the last one that was looked at.
    begin = end = 0
    at = values.tolist()
    for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
        end += count
        if step == 1 or (step > 1 and count > 1):
            runs.append(range(at[begin], at[end] + 1, step))
            begin = end + 1
        else:
            runs += [range(position, position + 1) for position in at[begin:end]]
            begin = max(begin, end)
    return (*runs, *(range(position, position + 1) for position in at[begin:]))


def _cut(runs: Runs, mask: Mask, *, are_keys: bool = False) -> list[_Run]:
    """Cut runs at the ends of documents, and runs of keys also at the ends of prefixes."""
    offsets, prefixes = mask.cu_seqlens, mask.prefixes if are_keys else ()
    cut, local = [], 0
    for run in runs:
        while run:
            document, stop, in_prefix = 0, run.stop, False
            if offsets is not None:
                document = bisect.bisect_right(offsets, run.start) - 1
                stop = min(stop, offsets[document + 1])
            if prefixes and run.start < prefixes[document][1]:
                stop, in_prefix = min(stop, prefixes[document][1]), True
            length = len(range(run.start, stop, run.step))
            step = run.step if length > 1 else None
            part = run[:length]
            cut.append(_Run(local, local + length, part[0], part[-1], step, document, in_prefix))
            run, local = run[length:], local + length
    return cut


def _joined(runs: list[_Run]) -> list[_Run]:
    """Join neighbouring runs of one document whose positions ascend."""
    joined: list[_Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.document == run.document and last.last < run.first:
            joined[-1] = _Run(last.begin, run.end, last.first, run.last, None, run.document)
        else:
            joined.append(run)
    return joined


def _aligned(q: _Run, k: _Run, right: int) -> Iterator[Piece]:
    """Pieces of two evenly spaced runs, if the mask hides keys to the right of some query."""
    step = q.step or k.step or 1
    # Query i sees the first i + shift + 1 keys.
    shift = (q.first + right - k.first) // step
    row, col = q.begin + max(0, -shift), k.begin + max(0, shift)
    if col > k.begin:
        yield Piece((row, q.end), (k.begin, col), "full")
    square = min(q.end - row, k.end - col)
    yield Piece((row, row + square), (col, col + square), "causal")
    if row + square < q.end:
        yield Piece((row + square, q.end), (col, k.end), "full")


def _pair(q: _Run, k: _Run, left: int, right: int) -> Iterator[Piece]:
    """Pieces of two runs; none if no query of the one sees a key of the other."""
    right = -1 if k.in_prefix else right
    hidden = (right >= 0 and k.first > q.last + right) or (left >= 0 and k.last < q.first - left)
    if q.document != k.document or hidden:
        return
    is_cut_left, is_cut_right = 0 <= left < q.last - k.first, 0 <= right < k.last - q.first
    if is_cut_right and not is_cut_left and _evenly(q, k):
        yield from _aligned(q, k, right)
    else:
        kind: Kind = "masked" if is_cut_left or is_cut_right else "full"
        yield Piece((q.begin, q.end), (k.begin, k.end), kind)


def _evenly(q: _Run, k: _Run) -> bool:
    """True if both runs have the same spacing. A single position goes with any spacing."""
    steps = [run.step for run in (q, k) if run.end - run.begin > 1]
    return None not in steps and len(set(steps)) <= 1


def _merge_full(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent full pieces, first along the keys and then along the queries."""
    spans = [(piece.cols, piece.rows, piece.kind) for piece in pieces]
    for _ in range(2):
        merged: list[tuple[Span, Span, Kind]] = []
        ends: dict[tuple[Span, int], int] = {}
        for along, across, kind in spans:
            at = ends.pop((across, along[0]), None) if kind == "full" else None
            if at is None:
                at = len(merged)
                merged.append((along, across, kind))
            else:
                merged[at] = ((merged[at][0][0], along[1]), across, kind)
            if kind == "full":
                ends[across, along[1]] = at
        spans = [(across, along, kind) for along, across, kind in merged]
    return tuple(Piece(rows, cols, kind) for cols, rows, kind in spans)


@functools.lru_cache(maxsize=256)
def cut_block(q_runs: Runs, k_runs: Runs, mask: Mask) -> tuple[Piece, ...]:
    """Pieces that together contain every visible (query, key) pair once.

    No piece is empty, and in a full or causal piece every query sees at least one key.

    Args:
        q_runs: positions of the queries, in local order.
        k_runs: positions of the keys, in local order.
        mask: mask of the whole sequence.
    """
    right = 0 if mask.is_causal else mask.right
    queries, keys = _cut(q_runs, mask), _cut(k_runs, mask, are_keys=True)
    if queries == keys and right == 0 and mask.left < 0:
        runs = _joined(queries)
        if all(a.document != b.document for a, b in zip(runs, runs[1:], strict=False)):
            queries = keys = runs
    if len(queries) * len(keys) > _MOST_PAIRS:
        return (Piece((0, queries[-1].end), (0, keys[-1].end), "masked"),)
    pieces: list[Piece] = []
    for q in queries:
        for k in keys:
            if q == k and right == 0 and mask.left < 0:
                pieces.append(Piece((q.begin, q.end), (k.begin, k.end), "causal"))
            else:
                pieces += _pair(q, k, mask.left, right)
    return _merge_full(pieces)
