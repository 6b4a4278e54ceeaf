"""One block: the queries of a rank against the keys of one shard, in the form that operators take.

Shapes: B batch, H heads, Hkv heads of keys and values, L queries, M keys, D and Dv head dims.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ext._bytes import as_bytes
from moe_ext.attention.libraries import KernelLibrary, Piece, Runs, cut_block, library_for, runs_of
from moe_ext.attention.masks import Mask
from moe_ext.ops.attention import (
    attention_block,
    attention_block_,
    attention_block_backward,
    merge_attention_,
)
from moe_ext.ops.quantize import dequantize_rows, quantize_rows, row_bytes

# Least mean number of (query, key) pairs in a call of a library. Blocks with fewer pairs for each
# piece go to our own kernel.
_LEAST_PAIRS = 1 << 16


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class KeysForm:
    """Sizes and dtype of the `Keys` of every rank. Ranks differ only in the number of positions.

    `wire` is the format of `quantize_rows` in which keys and values travel, None for their dtype.
    """

    batch: int
    heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    masked: bool
    wire: str | None = None

    def num_elements(self, length: int) -> int:
        """Number of elements in the keys and values of `length` positions."""
        return self.batch * self.heads * length * (self.dim + self.v_dim)

    def num_bytes(self, length: int) -> int:
        """Bytes of a message with the keys, values and mask of `length` positions."""
        return sum(self._part_bytes(length)) + self.masked * self.batch * length

    def _part_bytes(self, length: int) -> tuple[int, int]:
        """Bytes of the keys and of the values in a message."""
        rows, dims = self.batch * self.heads * length, (self.dim, self.v_dim)
        if self.wire is None:
            each = [dim * self.dtype.itemsize for dim in dims]
        else:
            each = [row_bytes(dim, self.wire) for dim in dims]
        return rows * each[0], rows * each[1]

    def split(self, row: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """View a row of `num_elements(length)` elements as keys and values."""
        end = self.batch * self.heads * length * self.dim
        k = row[:end].view(self.batch, self.heads, length, self.dim)
        return k, row[end:].view(self.batch, self.heads, length, self.v_dim)

    def unpacked(self, message: Tensor, length: int) -> Keys:
        """The keys in a message of a rank that holds `length` positions."""
        parts = self._part_bytes(length)
        end = sum(parts)
        mask = message[end:].view(torch.bool).view(self.batch, length) if self.masked else None
        if self.wire is None:
            return Keys(*self.split(message[:end].view(self.dtype), length), mask)
        shape = (self.batch, self.heads, length)
        k, v = (
            dequantize_rows(
                part.view(math.prod(shape), row_bytes(dim, self.wire)),
                dim,
                self.wire,
                dtype=self.dtype,
            ).view(*shape, dim)
            for part, dim in zip(message[:end].split(parts), (self.dim, self.v_dim), strict=True)
        )
        return Keys(k, v, mask)

    def on_wire(self, keys: Keys) -> Keys:
        """Round keys and values to `wire`, so that all ranks compute with the same values."""
        if self.wire is None:
            return keys
        rows = [quantize_rows(x.flatten(0, 2), self.wire).view(-1) for x in (keys.k, keys.v)]
        if keys.key_mask is not None:
            rows.append(as_bytes(keys.key_mask))
        message = torch.cat(rows)
        return replace(self.unpacked(message, keys.k.shape[2]), message=message)


@dataclass(frozen=True)
class Keys:
    """Keys `[B, Hkv, M, D]`, values `[B, Hkv, M, Dv]` and mask `[B, M]` or None of one rank.

    `message` holds their packed bytes if they were rounded to a wire format, else None.
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    message: Tensor | None = None

    @property
    def form(self) -> KeysForm:
        """Sizes and dtype."""
        batch, heads, _, dim = self.k.shape
        masked = self.key_mask is not None
        return KeysForm(batch, heads, dim, self.v.shape[3], self.k.dtype, masked)

    def packed(self) -> Tensor:
        """Keys, values and mask as one row of bytes."""
        if self.message is not None:
            return self.message
        parts = [self.k, self.v] + ([] if self.key_mask is None else [self.key_mask])
        return torch.cat([as_bytes(part) for part in parts])


@dataclass(frozen=True)
class BlockOptions:
    """Options that are the same for every block of one attention.

    Attributes:
        scale: factor on q.k.
        mask: which keys each query sees, by position.
        softcap: scores are cap * tanh(score / cap); 0 for no cap.
        dropout_p: share of the softmax that is dropped.
        seed: seed of the dropout.
        first_head: global number of the first local head, on which the dropout depends.
        precision: "exact", or "fast", which allows blocks to be rounded to the dtype of q.
    """

    scale: float
    mask: Mask
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    first_head: int = 0
    precision: str = "exact"


@dataclass(frozen=True)
class Block:
    """Queries and keys of one block, with their global positions.

    Attributes:
        q: `[B, H, L, D]`.
        k: `[B, Hkv, M, D]`.
        v: `[B, Hkv, M, Dv]`.
        q_positions: `[L]`.
        k_positions: `[M]`.
        q_documents: `[L]` or None.
        k_documents: `[M]` or None.
        key_mask: `[B, M]` bool, True = real key.
        in_prefix: `[B or 1, M]` bool, True = seen by all queries of its document; None if no key
            is in a prefix.
        alibi_slopes: `[H]`.
        bias: `[B or 1, H or 1, L, M]`, added to the scores.
        grad_bias: `[B or 1, H or 1, L, S]`. The backward pass adds the gradient of the bias to the
            columns of the keys' positions.
        q_runs: the positions of the queries as ranges, if the host knows them.
        k_runs: the positions of the keys as ranges, if the host knows them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_positions: Tensor
    k_positions: Tensor
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    key_mask: Tensor | None = None
    in_prefix: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    grad_bias: Tensor | None = None
    q_runs: Runs | None = None
    k_runs: Runs | None = None

    def calls(self, options: BlockOptions) -> list[tuple[tuple[Tensor, ...], dict[str, Any]]]:
        """Positional and keyword arguments of the calls of an operator.

        Without a prefix there is one call. With a prefix there are two: the keys of the prefix are
        seen without the causal mask, and the other keys with it.
        """
        causal = options.mask.is_causal
        if self.in_prefix is None:
            return [self._arguments(options, self.key_mask, causal)]
        masks = [self.in_prefix, ~self.in_prefix]
        if self.key_mask is not None:
            masks = [mask & self.key_mask for mask in masks]
        prefix, rest = (mask.expand(self.k.shape[0], -1) for mask in masks)
        return [
            self._arguments(options, prefix, causal=False),
            self._arguments(options, rest, causal),
        ]

    def _arguments(
        self, options: BlockOptions, key_mask: Tensor | None, causal: bool
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        tensors = (self.q, self.k, self.v, self.q_positions, self.k_positions)
        return tensors, {
            "scale": options.scale,
            "causal": causal,
            "window_left": options.mask.left,
            "window_right": options.mask.right,
            "q_documents": self.q_documents,
            "k_documents": self.k_documents,
            "key_mask": key_mask,
            "alibi_slopes": self.alibi_slopes,
            "bias": self.bias,
            "softcap": options.softcap,
            "dropout_p": options.dropout_p,
            "seed": options.seed if options.dropout_p > 0 else None,
            "head_offset": options.first_head,
        }

    def part(self, piece: Piece) -> Block:
        """The queries and keys of a piece.

        Key masks, slopes and biases are left out, because a block with any of them has no pieces.
        """
        rows, cols = slice(*piece.rows), slice(*piece.cols)
        return Block(
            self.q[:, :, rows],
            self.k[:, :, cols],
            self.v[:, :, cols],
            self.q_positions[rows],
            self.k_positions[cols],
            None if self.q_documents is None else self.q_documents[rows],
            None if self.k_documents is None else self.k_documents[cols],
            in_prefix=None if self.in_prefix is None else self.in_prefix[:, cols],
        )

    def library(self, options: BlockOptions) -> KernelLibrary | None:
        """The library that may compute blocks of these tensors and masks, if any."""
        ours = options.precision == "exact" or options.softcap != 0 or options.dropout_p > 0
        # NOTE: torch's CPU kernel takes the maximum of the scores before it scales them, so that
        # the exponentials overflow for a negative scale.
        # Pieces are cut once for all rows of the batch, so rows must not differ in their prefixes.
        ours = ours or options.scale <= 0 or len(options.mask.prefix_lens or ()) > 1
        if ours or any(x is not None for x in (self.key_mask, self.alibi_slopes, self.bias)):
            return None
        return library_for(self.q, self.k, self.v)

    def served(self, options: BlockOptions) -> tuple[KernelLibrary | None, tuple[Piece, ...]]:
        """A library and the pieces of this block for it; None if our kernel takes the whole."""
        library = self.library(options)
        if library is None:
            return None, ()
        q_runs = runs_of(self.q_positions) if self.q_runs is None else self.q_runs
        k_runs = runs_of(self.k_positions) if self.k_runs is None else self.k_runs
        pieces = cut_block(q_runs, k_runs, options.mask)
        if all(piece.kind == "masked" for piece in pieces):
            return None, ()
        pairs = sum(piece.num_pairs for piece in pieces)
        return (library, pieces) if pairs >= _LEAST_PAIRS * len(pieces) else (None, ())


def attend_(out: Tensor, lse: Tensor, block: Block, options: BlockOptions) -> None:
    """Attend to the keys of a block, and merge the result into `out` and `lse` in place.

    `out` is `[B, H, L, Dv]` and `lse` `[B, H, L]`, both float32 (float64). Before the first block
    they hold 0 and -inf.
    """
    library, pieces = block.served(options)
    if library is None:
        for tensors, kwargs in block.calls(options):
            attention_block_(out, lse, *tensors, **kwargs)
        return
    for piece in pieces:
        part, rows = block.part(piece), slice(*piece.rows)
        if piece.kind == "masked":
            (tensors, kwargs), *rest = part.calls(options)
            found = attention_block(*tensors, **kwargs)
            for tensors, kwargs in rest:
                attention_block_(*found, *tensors, **kwargs)
        else:
            found = library.forward((part.q, part.k, part.v), piece.kind == "causal", options.scale)
        merge_attention_(out[:, :, rows], lse[:, :, rows], *found)


@dataclass(frozen=True, eq=False)
class Narrowed:
    """Gradient and output in the dtype that a library reads, converted at the first access.

    Attributes:
        wide: the gradient of the output, `[B, H, L, Dv]` float32 (float64).
        delta: `[B, H, L]`, see `block_backward`.
        dtype: dtype of q.
    """

    wide: Tensor
    delta: Tensor
    dtype: torch.dtype

    @functools.cached_property
    def grad_out(self) -> Tensor:
        """`[B, H, L, Dv]`."""
        return self.wide.to(self.dtype)

    @functools.cached_property
    def out(self) -> Tensor:
        """`[B, H, L, Dv]` with rowsum(grad_out * out) = delta.

        A library reads the output only to compute this product. The output here is a multiple of
        grad_out, so that no terms of the product cancel. Rounding then costs less accuracy than
        rounding of the true output would.
        """
        # The norm is taken in float64, because squares of small gradients underflow in float32.
        norm = torch.linalg.vector_norm(self.wide, dim=-1, dtype=torch.float64)
        factor = torch.where(norm > 0, self.delta / norm.square(), 0.0)
        return (self.wide * factor.to(self.delta.dtype)[..., None]).to(self.dtype)


def block_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    block: Block,
    options: BlockOptions,
    narrowed: Narrowed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of this block in float32 (float64).

    Args:
        grad_out: `[B, H, L, Dv]` float32 (float64).
        lse: `[B, H, L]` over the keys of all blocks.
        delta: `[B, H, L]`, rowsum(grad_out * out) - grad_lse, with the output of all blocks.
        block: as in the forward pass.
        options: as in the forward pass.
        narrowed: conversions of grad_out and delta that several blocks share, or None.
    """
    library, pieces = block.served(options)
    if library is None:
        return _ours_backward(grad_out, lse, delta, block, options)
    narrowed = narrowed or Narrowed(grad_out, delta, block.q.dtype)
    sums = [_Sum(x, lse.dtype) for x in (block.q, block.k, block.v)]
    for piece in pieces:
        part, rows = block.part(piece), slice(*piece.rows)
        if piece.kind == "masked":
            grads = _ours_backward(
                grad_out[:, :, rows], lse[:, :, rows], delta[:, :, rows], part, options
            )
        else:
            grads = library.backward(
                narrowed.grad_out[:, :, rows],
                narrowed.out[:, :, rows],
                lse[:, :, rows],
                (part.q, part.k, part.v),
                piece.kind == "causal",
                options.scale,
            )
        for total, grad, span in zip(
            sums, grads, (piece.rows, piece.cols, piece.cols), strict=True
        ):
            total.add(grad, *span)
    return sums[0].value, sums[1].value, sums[2].value


def _ours_backward(
    grad_out: Tensor, lse: Tensor, delta: Tensor, block: Block, options: BlockOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` by our kernel alone."""
    sums: tuple[Tensor, ...] = ()
    for tensors, kwargs in block.calls(options):
        kwargs["needs_grad_bias"] = block.grad_bias is not None
        *grads, last = attention_block_backward(grad_out, lse, delta, *tensors, **kwargs)
        if block.grad_bias is None:
            grads.append(last)
        else:
            block.grad_bias.index_add_(3, block.k_positions, last)
        if sums:
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        sums = sums or tuple(grads)
    return sums[0], sums[1], sums[2]


class _Sum:
    """Sum of the gradients of slices of `like`, in a wider dtype."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._value: Tensor | None = None

    def add(self, grad: Tensor, begin: int, end: int) -> None:
        if self._value is None and end - begin == self._like.shape[2]:
            self._value = grad.to(self._dtype)
        else:
            self._value = self.value
            self._value[:, :, begin:end] += grad

    @property
    def value(self) -> Tensor:
        if self._value is None:
            return torch.zeros_like(self._like, dtype=self._dtype)
        return self._value
