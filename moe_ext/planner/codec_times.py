"""Seconds of the codecs of rows, gradients and rounds, as measured or by their bytes."""

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
    """Times of codecs by the cluster's cost table, or by the memory's bandwidth without a rate."""

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of products and messages."""
        return getattr(torch, self.job.dtype)

    def measured(self, name: str) -> CostTable | None:
        """Return the cost table if it has the rate of a codec, else None."""
        costs = self.cluster.costs
        return costs if costs is not None and name in costs.codecs else None

    @functools.cached_property
    def lossless_share(self) -> float | None:
        """Measured ratio of bytes, rows with "lossless" to plain rows; None without a rate."""
        name = rows_rate(LOSSLESS, self.dtype)
        costs = self.measured(name)
        if costs is None:
            return None
        numel = costs.codecs[name][-1].numel
        return costs.payload_bytes(name, numel) / (numel * self.dtype.itemsize)

    def rows(
        self, wires: Tensor, numel: Tensor, dim: int, messages: Tensor, decodes: Tensor
    ) -> Tensor:
        """Return the seconds to encode elements in a format of rows, and to decode them.

        Args:
            wires: formats, as positions in `WIRES`.
            numel: elements of all messages.
            dim: elements of a row.
            messages: number of messages, which are encoded separately.
            decodes: ratio of decoded elements to encoded elements.
        """
        found, dtype = torch.zeros_like(numel), self.dtype
        for i in present(wires):
            wire = WIRES[i]
            if wire is None:
                continue
            here, name = wires == i, rows_rate(wire, dtype)
            costs = self.measured(name)
            if costs is None:
                # Encoding and decoding each read one form of the rows and write the other form.
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
        """Numbers `[3, codecs]`: bytes of a gradient, and seconds to encode and to decode it.

        All are per element, at the size of a bucket. Times are thus proportional to the number of
        elements, and the mean over stages is the time of the mean stage, as `least` assumes.
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
                # Encoding moves gradients and codes, and reads and writes a float32 residual if
                # there is one.
                moved = self.job.itemsize + num_bytes
                encode = (moved + 8.0 * codec.feeds_back) / self.cluster.memory_bandwidth
                decode = moved / self.cluster.memory_bandwidth
            rows.append((num_bytes, encode, decode))
        return torch.tensor(rows, dtype=torch.float64).T

    def round(self, codec: RoundCodec, numel: Tensor, ranks: Tensor) -> Tensor:
        """Return the seconds to encode and decode `numel` elements of a pseudo-gradient."""
        costs = self.measured(codec.name)

        def seconds(count: int) -> list[float]:
            passes = codec.passes(count) if count > 1 else (0.0, 0.0)
            if costs is None:
                # Each pass reads float32 and writes the payload, or the reverse.
                return [sum(passes) * (4.0 + codec.sent) / self.cluster.memory_bandwidth]
            many = costs.codec_seconds(codec.name, 2**24)
            return [sum(p * s for p, s in zip(passes, many, strict=True)) / 2**24]

        return by_values([ranks.long()], seconds)[:, 0] * numel
