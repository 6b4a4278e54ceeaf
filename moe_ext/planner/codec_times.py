"""Seconds that codecs of rows, gradients and rounds take, as measured or by their bytes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_ext.comm.rates import CostTable
from moe_ext.compression import codec_of
from moe_ext.dispatch.wire import LOSSLESS, rows_rate, sent_row_bytes
from moe_ext.planner.axes import GRADIENTS, WIRES, by_values, present
from moe_ext.planner.rounds import RoundCodec
from moe_ext.planner.sizes import BUCKET, CostPart


class CodecTimes(CostPart):
    """Times of codecs by the cost table of the cluster; without a rate, by the memory."""

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Format of products and messages."""
        return getattr(torch, self.job.dtype)

    def measured(self, name: str) -> CostTable | None:
        """The table with the rate of a codec, if it was measured."""
        costs = self.cluster.costs
        return costs if costs is not None and name in costs.codecs else None

    @functools.cached_property
    def lossless_share(self) -> float | None:
        """Share of their bytes that rows take with "lossless", as measured; None for no rate."""
        name = rows_rate(LOSSLESS, self.dtype)
        costs = self.measured(name)
        if costs is None:
            return None
        numel = costs.codecs[name][-1].numel
        return costs.payload_bytes(name, numel) / (numel * self.dtype.itemsize)

    def rows(
        self, wires: Tensor, numel: Tensor, dim: int, messages: Tensor, decodes: Tensor
    ) -> Tensor:
        """Seconds to encode elements in a format of rows, message by message, and to decode them.

        Args:
            wires: formats, as numbers of `WIRES`.
            numel: elements of all messages.
            dim: elements of a row.
            messages: parts of the elements that are encoded one by one.
            decodes: how many times as many elements are decoded.
        """
        found, dtype = torch.zeros_like(numel), self.dtype
        for i in present(wires):
            wire = WIRES[i]
            if wire is None:
                continue
            here, name = wires == i, rows_rate(wire, dtype)
            costs = self.measured(name)
            if costs is None:
                # Read and written, both times.
                each = dtype.itemsize + sent_row_bytes(wire, dim, dtype) / dim
                moved = numel[here] * each * (1.0 + decodes[here])
                found[here] = moved / self.cluster.memory_bandwidth
                continue
            alike, place = torch.stack([numel, messages, decodes])[:, here].unique(
                dim=1, return_inverse=True
            )
            seconds = []
            for n, count, times in alike.T.tolist():
                encode, decode = costs.codec_seconds(name, round(n / count))
                seconds.append(count * (encode + times * decode))
            found[here] = torch.tensor(seconds, dtype=found.dtype)[place]
        return torch.where(numel > 0, found, 0.0)

    @functools.cached_property
    def gradient_rates(self) -> Tensor:
        """`[3, codecs]`: bytes of a gradient, and seconds to encode it and to decode it.

        At the size of a bucket. In proportion to the number of gradients, so that the mean over
        stages of what they take is that of the mean stage: `least` is a bound.
        """
        rows = [(float(self.job.itemsize), 0.0, 0.0)]
        bucket = BUCKET // self.job.itemsize
        for name in GRADIENTS[1:]:
            codec, rate = codec_of(name), name
            if name == LOSSLESS:
                rate, share = rows_rate(name, self.dtype), self.lossless_share
                if share is None:
                    plain = bucket * self.job.itemsize
                    share = sent_row_bytes(LOSSLESS, bucket, self.dtype) / plain
                num_bytes = share * self.job.itemsize
            else:
                num_bytes = codec.sent_bytes(bucket, 2) / bucket
            costs = self.measured(rate)
            if costs is not None:
                encode, decode = (each / bucket for each in costs.codec_seconds(rate, bucket))
            else:
                # Gradients and codes, and of what is owed the old and the new.
                moved = self.job.itemsize + num_bytes
                encode = (moved + 8.0 * codec.feeds_back) / self.cluster.memory_bandwidth
                decode = moved / self.cluster.memory_bandwidth
            rows.append((num_bytes, encode, decode))
        return torch.tensor(rows, dtype=torch.float64).T

    def round(self, codec: RoundCodec, numel: Tensor, ranks: Tensor) -> Tensor:
        """Seconds to encode and to decode so many elements of a pseudo-gradient."""
        costs = self.measured(codec.name)

        def seconds(count: int) -> list[float]:
            passes = codec.passes(count) if count > 1 else (0.0, 0.0)
            if costs is None:
                # Each pass reads one and writes the other.
                return [sum(passes) * (4.0 + codec.sent) / self.cluster.memory_bandwidth]
            many = costs.codec_seconds(codec.name, 2**24)
            return [sum(p * s for p, s in zip(passes, many, strict=True)) / 2**24]

        return by_values([ranks.long()], seconds)[:, 0] * numel
