"""Seconds in which a stage's layers and the output compute, and read and write their numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.planner.axes import Columns
from moe_ext.planner.presets import LayerParts
from moe_ext.planner.rank_loads import RankLoads
from moe_ext.planner.sizes import CostPart, Sizes

# Rows and columns of a product's result that a multiprocessor makes at a time.
_TILE = (128, 256)


class Compute(CostPart):
    """Products and memory of a micro-batch's forward pass."""

    def __init__(self, sizes: Sizes, loads: RankLoads) -> None:
        super().__init__(sizes)
        self.loads = loads

    def products(self, c: Columns) -> Tensor:
        """Seconds of the products of a micro-batch's forward pass through a stage's layers."""
        sizes = self.sizes
        m, tokens = self.model, sizes.tokens(c)
        here = sizes.layers(c)
        attention, ffn, shared, expert = self._met(c)
        met = here.attention * attention + here.dense * ffn + here.moe * shared
        met = met + here.moe * m.top_k * expert * self.loads.of(c, "pace")
        if m.recurrent is not None:
            met = met + here.recurrent * m.recurrent.projections
        inner = here.attention * self.scores(tokens) + here.recurrent * self.states(c)
        return tokens * 2.0 * met / sizes.rate() + inner

    def _met(self, c: Columns) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Parameters that a token meets: attention, a dense layer's ffn, a shared one, an expert.

        Each counts as many times as its products take longer than those of full waves.
        """
        m, tokens = self.model, self.sizes.tokens(c)
        one, tp = torch.ones_like(tokens), c["tp"].double()
        more = 1 + m.num_cross_layers / max(1, m.all_parts.attention)
        if not self.cluster.multiprocessors:
            parts = (m.attention_parameters() * more, m.dense_layer_ffn(), m.shared_parameters())
            attention, ffn, shared = (part * one for part in parts)
            return attention, ffn, shared, m.expert_parameters * one
        dim, rows = float(m.model_dim), tokens * tp

        def columns(inner: float, outer: float) -> Tensor:
            return self._product(rows, inner * one, outer / tp) * tp

        def lines(inner: float, outer: float) -> Tensor:
            return self._product(rows, inner / tp, outer * one) * tp

        if m.latent:
            queries, keys, plain, rotary, values = m.latent
            down = self._product(tokens, dim * one, (queries + keys + rotary) * one)
            attention = down + columns(queries or dim, m.num_heads * (plain + rotary))
            attention = attention + columns(keys, m.num_heads * (plain + values))
            attention = attention + lines(m.num_heads * values, dim)
            if m.gate_dim:
                attention = attention + columns(dim, m.gate_dim)
        else:
            inner = m.heads_dim + m.gate_dim + 2 * m.kv_dim
            attention = columns(dim, inner) + lines(m.heads_dim, dim)
        width = float(m.dense_ffn_dim or m.ffn_dim)
        ffn = columns(dim, (1 + m.gated) * width) + lines(width, dim)
        shared, expert = dim * m.num_experts * one, 0.0 * one
        up = float(1 + m.gated_experts)
        if m.shared_ffn_dim:
            shared = shared + columns(dim, up * m.shared_ffn_dim) + lines(m.shared_ffn_dim, dim)
        if m.num_experts:
            # Experts of a rank are multiplied in one launch.
            count, shards = m.num_experts / c["ep"].double(), self.sizes.width(c) / c["ep"]
            each, width_of = tokens * m.top_k * shards / count, m.ffn_dim / shards
            expert = self._product(each, dim * one, up * width_of, count)
            expert = shards * (expert + self._product(each, width_of, dim * one, count))
        return more * attention, ffn, shared, expert

    def _product(
        self, rows: Tensor, inner: Tensor, outer: Tensor, count: float | Tensor = 1.0
    ) -> Tensor:
        """Parameters of `count` matrices `[inner, outer]` for each, over the share of full waves.

        The share is that of the mean of the product and of its two gradients: tiles of a result go
        to multiprocessors wave by wave, and the last wave takes as long as a full one.
        """
        units, over = self.cluster.multiprocessors, torch.zeros_like(rows)
        for high, wide in ((rows, outer), (rows, inner), (inner, outer)):
            waves = torch.full_like(rows, torch.inf)
            for tile_high, tile_wide in (_TILE, _TILE[::-1]):
                tiles = count * (high / tile_high).ceil() * (wide / tile_wide).ceil()
                waves = waves.minimum((tiles / units).ceil())
            full = count * high * wide / (_TILE[0] * _TILE[1] * units)
            over = over + waves / full
        return inner * outer * over / 3.0

    def output(self, c: Columns) -> Tensor:
        """Seconds of a micro-batch's forward pass through the output and the loss."""
        m, tokens = self.model, self.sizes.tokens(c)
        product = tokens * 2.0 * m.vocab_size * m.model_dim / self.sizes.rate(self.job.dtype)
        # Logits, and the loss in float32.
        num_bytes = tokens * m.vocab_size * (self.job.itemsize + 8.0)
        return product + num_bytes / self.cluster.memory_bandwidth

    def _dense(self, here: LayerParts) -> Tensor:
        """Parameters of a stage's layers that each token meets, experts left out."""
        m = self.model
        more = 1 + m.num_cross_layers / max(1, m.all_parts.attention)
        found = here.attention * m.attention_parameters() * more
        if m.recurrent is not None:
            found = found + here.recurrent * m.recurrent.parameters()
        ffn: Tensor = here.dense * m.dense_layer_ffn() + here.moe * m.shared_parameters()
        return found + ffn

    def _score_rate(self) -> float:
        cluster = self.cluster
        return cluster.flops[self.job.dtype] * (cluster.score_efficiency or cluster.efficiency)

    def scores(self, tokens: Tensor) -> Tensor:
        """Seconds of the forward pass of one causal attention, its scores alone."""
        # A fused kernel leaves out what a mask hides.
        eager = self.job.eager_attention
        keys = self.job.seq_len if eager else self.model.mean_keys(self.job.seq_len)
        return tokens * 4.0 * keys * self.model.scores_dim / self._score_rate()

    def states(self, c: Columns) -> Tensor:
        """Seconds of the forward pass of one recurrence, its convolution and states alone."""
        m, tokens = self.model, self.sizes.tokens(c)
        if m.recurrent is None:
            return torch.zeros_like(tokens)
        alone, shared = (float(m.recurrent.flops(by_state=each)) for each in (False, True))
        numbers = torch.full_like(tokens, alone)
        # Bounds are those of all schemes.
        if "scheme" in c:
            numbers = numbers + (shared - alone) * self.sizes.of_states(c)[0]
        return tokens * numbers / self._score_rate()

    def elementwise(self, c: Columns) -> Tensor:
        """Seconds in which a forward pass through a stage's layers reads and writes its numbers."""
        sizes = self.sizes
        m, tokens = self.model, sizes.tokens(c)
        here = sizes.layers(c)
        moe = here.moe
        dense = here.dense * (m.dense_ffn_dim or m.ffn_dim) * (2 + m.gated)
        shared = moe * m.shared_ffn_dim * (2 + m.gated_experts)
        # An expert's rows are also permuted there and back.
        rows = moe * m.top_k * self.loads.of(c, "pace")
        # Each of the shards of an expert has all of its rows, and a part of its width.
        shards = sizes.width(c) / c["ep"]
        routed = rows * (m.ffn_dim * (2 + m.gated_experts) + 2 * m.model_dim * shards)
        # A norm and a residual read and write 5 D, products 2 D gathered, each width twice.
        numbers = sizes.norms(here) * (5 + 2 * c["tp"]) * m.model_dim
        attention = 4 * (m.heads_dim + m.kv_dim) + 2 * m.gate_dim
        if self.job.eager_attention:
            # Scores, softmax and dropout are written and read.
            attention = attention + 6 * m.num_heads * self.job.seq_len
        numbers = numbers + here.attention * attention + 2 * (dense + shared + routed)
        if m.recurrent is not None:
            # A convolution and its activation, a gate and a norm; the recurrence in float32.
            inner = m.recurrent.state_numbers * 8.0 / self.job.itemsize
            each = 4 * m.recurrent.channels + 4 * m.recurrent.width + inner
            numbers = numbers + here.recurrent * each
        held = self._dense(here) / c["tp"]
        held = held + moe * m.num_experts * m.expert_parameters / sizes.width(c)
        num_bytes = self.job.itemsize * (tokens * numbers + held)
        if self.job.layer_dtype is not None:
            # Inputs of products in a narrow format, and in the backward pass gradients of results:
            # two of three passes read what is to be rounded and write a byte along rows and along
            # columns.
            rounded = sizes.norms(here) * m.model_dim + here.attention * m.heads_dim
            if m.recurrent is not None:
                rounded = rounded + here.recurrent * m.recurrent.width
            rounded = rounded + (dense + shared) / (2 + m.gated)
            rounded = rounded + rows * (m.model_dim + m.ffn_dim)
            num_bytes = num_bytes + 2.0 / 3.0 * tokens * rounded * (self.job.itemsize + 2.0)
        return num_bytes / self.cluster.memory_bandwidth
