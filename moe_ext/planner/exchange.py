"""Seconds of a layer's messages in a pass: rows of experts, keys, heads and activations."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_ext.dispatch.auto import DispatchShape, expected_ranks
from moe_ext.dispatch.wire import LOSSLESS, Wire
from moe_ext.ops.quantize import row_bytes
from moe_ext.planner.axes import (
    COMBINES,
    DISPATCHERS,
    KV_WIRES,
    SCHEMES,
    WIRES,
    Columns,
    by_values,
)
from moe_ext.planner.codec_times import CodecTimes
from moe_ext.planner.compute import Compute
from moe_ext.planner.rank_loads import RankLoads
from moe_ext.planner.sizes import CostPart, Sizes

_AXES = ("ep", "etp", "dispatcher", "wire", "combine")


class LayerExchange(CostPart):
    """Messages of a layer between ranks that share its parameters or its tokens."""

    def __init__(
        self, sizes: Sizes, loads: RankLoads, compute: Compute, codecs: CodecTimes
    ) -> None:
        super().__init__(sizes)
        self.loads, self.compute, self.codecs = loads, compute, codecs
        self._known = functools.cache(self._sent_and_coded)

    def sent(
        self,
        ep: int,
        etp: int,
        dispatcher: str,
        wire: str | None,
        combine: str,
        *,
        share: float | None = None,
    ) -> tuple[float, float]:
        """Return the bytes that a layer sends per token, to experts and back, for even routing.

        Args:
            ep: ranks that the experts lie over.
            etp: shards of each expert.
            dispatcher: value of the axis.
            wire: value of the axis.
            combine: value of the axis.
            share: ratio of the bytes of rows with "lossless" to plain rows; None for the measured
                ratio.

        Returns:
            Bytes that stay in the node, and bytes that leave it.
        """
        if ep * etp == 1:
            return 0.0, 0.0
        m, inner, ranks = self.model, self.cluster.levels[0].size, ep * etp
        if share is None and wire == LOSSLESS:
            share = self.codecs.lossless_share
        node = min(ranks, inner) if ranks % min(ranks, inner) == 0 else 1
        sizes = m.num_experts, m.top_k, ranks, node, m.model_dim, self.codecs.dtype
        shape = DispatchShape(*sizes, Wire.of("plan", wire), etp, share)
        whole, off = shape.sent_bytes(dispatcher, combine, 1)
        near, limit = whole - off, self.job.node_limit
        if limit and dispatcher == "hierarchical":
            # `sent_bytes` assumes even routing, which may reach more nodes than the router allows.
            off *= min(1.0, limit / expected_ranks(m.num_experts, ranks // node, m.top_k))
        return near, off

    def _coded(
        self, ep: int, dispatcher: str, wire: str | None, combine: str
    ) -> tuple[float, float]:
        """Return the elements per token that a layer's pass encodes, and the number of messages.

        Routing is even. With "lossless" the rows of each message are encoded together; other
        formats encode the rows of all messages at once, which counts as one message.
        """
        if ep == 1 or wire is None:
            return 0.0, 1.0
        m = self.model
        if wire == LOSSLESS:
            # Bytes with share 1 minus bytes with share 0 are the rows alone, without indices and
            # weights, on the way to experts and back.
            whole, beside = (
                sum(self.sent(ep, 1, dispatcher, wire, combine, share=share))
                for share in (1.0, 0.0)
            )
            return (whole - beside) / self.job.itemsize, 2.0 * (ep - 1)
        once = 1.0 if dispatcher == "allgather" else expected_ranks(m.num_experts, ep, m.top_k)
        return m.model_dim * (m.top_k if dispatcher == "alltoall" else once), 1.0

    def _sent_and_coded(
        self, ep: int, etp: int, dispatcher: int, wire: int, combine: int
    ) -> tuple[float, ...]:
        """Return the numbers of `sent` and `_coded`, for values as columns hold them."""
        names = DISPATCHERS[dispatcher], WIRES[wire], COMBINES[combine]
        return *self.sent(ep, etp, *names), *self._coded(ep, *names)

    def rows(self, c: Columns) -> Tensor:
        """Return the seconds in a layer's pass to send rows to experts and back."""
        m, tokens = self.model, self.sizes.tokens(c)
        found = by_values([c[name] for name in _AXES], self._known, dtype=torch.float32)
        near, far, coded, messages = found.unbind(1)
        fast, width = self.cluster.levels[0].bandwidth, self.sizes.width(c)
        latency, bandwidth = self.sizes.link(width)
        seconds = tokens * self.loads.of(c, "rows") * (near / fast + far / bandwidth)
        # With "lossless" the lengths of messages depend on the data, so ranks exchange them first.
        rounds = torch.where(c["wire"] == WIRES.index(LOSSLESS), 4.0, 2.0)
        seconds = seconds + rounds * latency * (width > 1)
        once = torch.ones_like(messages)
        coding = self.codecs.rows(c["wire"], tokens * coded, m.model_dim, messages, once)
        return seconds * self.sizes.measured("exchange") + coding

    def key_ring(self, c: Columns) -> Tensor:
        """Return the seconds in a layer's pass to wait for keys and values, and to code them."""
        m, tokens, wires = self.model, self.sizes.tokens(c), c["kv_wire"]
        numel = 2.0 * tokens * c["tp"] * m.kv_dim / c["tp"].clamp(max=m.num_kv_heads or 1)
        # Each head of a position is a row.
        dim = m.head_dim or m.model_dim // m.num_heads
        rows = [
            dim * self.job.itemsize if wire is None else row_bytes(dim, wire) for wire in KV_WIRES
        ]
        each = torch.tensor(rows, dtype=torch.float64)[wires] / dim
        latency, bandwidth = self.sizes.link(c["cp"] * c["tp"])
        block = self.compute.scores(tokens) / c["cp"]
        hops = (c["cp"] - 1) * (latency + numel * each / bandwidth - block).clamp(min=0.0)
        if not bool(wires.any()):
            return hops
        # A rank encodes its own keys and values once, and decodes those of all ranks.
        coding = self.codecs.rows(
            wires, numel.double(), dim, torch.ones_like(hops), c["cp"].double()
        )
        return hops + torch.where(c["cp"] > 1, coding, 0.0)

    def swaps_heads(self, c: Columns) -> Tensor:
        """Return True if ranks of a cp group exchange heads, and attend to whole sequences."""
        return (c["cp"] > 1) & (c["scheme"] == SCHEMES.index("ulysses"))

    def heads(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the seconds of a layer's exchanges of heads, forward and backward."""
        m, size = self.model, self.job.itemsize
        latency, bandwidth = self.sizes.link(c["cp"] * c["tp"])
        # The forward pass sends queries, keys and values, and returns results in float32 with one
        # number per head. The backward pass sends queries again and gradients of results, and
        # returns gradients of queries, keys and values.
        out = 4.0 * (m.heads_dim + m.num_heads)
        there = size * (m.heads_dim + 2 * m.kv_dim) + out
        back = size * (3 * m.heads_dim + 2 * m.kv_dim) + 8.0 * m.num_heads
        share = self.sizes.tokens(c) * (c["cp"] - 1) / c["cp"] / bandwidth
        return 2.0 * latency + share * there, 4.0 * latency + share * back

    def states(self, c: Columns) -> Tensor:
        """Return the seconds of a recurrent layer's messages in a pass."""
        sizes = self.sizes
        latency, bandwidth = sizes.link(c["cp"] * c["tp"])
        _, sent, messages = sizes.of_states(c)
        return messages * latency + c["micro_batch"] * sent / bandwidth

    def hop(self, c: Columns) -> Tensor:
        """Return the seconds to send an activation from one stage to the next."""
        sizes = self.sizes
        latency, bandwidth = sizes.link(2 * sizes.stage_ranks(c))
        num_bytes = sizes.tokens(c) * self.model.model_dim * self.job.itemsize
        return torch.where(c["pp"] > 1, latency + num_bytes / bandwidth, 0.0)
