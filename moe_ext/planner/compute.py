"""Seconds of products and of memory traffic in a stage's layers and in the output."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.planner.axes import Columns
from moe_ext.planner.presets import LayerParts
from moe_ext.planner.rank_loads import RankLoads
from moe_ext.planner.sizes import CostPart, Sizes

# Rows and columns of the tile of a product's result that a multiprocessor computes at a time.
_TILE = (128, 256)


class Compute(CostPart):
    """Products and memory traffic of a micro-batch's forward pass."""

    def __init__(self, sizes: Sizes, loads: RankLoads) -> None:
        super().__init__(sizes)
        self.loads = loads

    def products(self, c: Columns) -> Tensor:
        """Return the seconds of products in a micro-batch's forward pass through a stage."""
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
        """Return the parameters that a token meets in attention, dense ffn, shared ffn, expert.

        Each number is multiplied by the slowdown of its products against full waves of tiles.
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
            # One launch multiplies all experts of a rank, so their tiles share waves.
            count, shards = m.num_experts / c["ep"].double(), self.sizes.width(c) / c["ep"]
            each, width_of = tokens * m.top_k * shards / count, m.ffn_dim / shards
            expert = self._product(each, dim * one, up * width_of, count)
            expert = shards * (expert + self._product(each, width_of, dim * one, count))
        return more * attention, ffn, shared, expert

    def _product(
        self, rows: Tensor, inner: Tensor, outer: Tensor, count: float | Tensor = 1.0
    ) -> Tensor:
        """Return inner * outer times the slowdown of `count` such products against full waves.

        Tiles of a result go to multiprocessors in waves, and the last wave takes as long as a full
        wave. The slowdown is the mean over the product and its two gradients.
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
        """Return the seconds of a micro-batch's forward pass through the output and the loss."""
        m, tokens = self.model, self.sizes.tokens(c)
        product = tokens * 2.0 * m.vocab_size * m.model_dim / self.sizes.rate(self.job.dtype)
        # Memory traffic: logits in the job's dtype, and two float32 numbers each for the loss.
        num_bytes = tokens * m.vocab_size * (self.job.itemsize + 8.0)
        return product + num_bytes / self.cluster.memory_bandwidth

    def _dense(self, here: LayerParts) -> Tensor:
        """Return the parameters of a stage's layers that each token meets, without experts."""
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
        """Return the seconds of the scores in the forward pass of one causal attention."""
        # A fused kernel skips masked keys, eager attention multiplies all keys.
        eager = self.job.eager_attention
        keys = self.job.seq_len if eager else self.model.mean_keys(self.job.seq_len)
        return tokens * 4.0 * keys * self.model.scores_dim / self._score_rate()

    def states(self, c: Columns) -> Tensor:
        """Return the seconds of convolution and states in the forward pass of one recurrence."""
        m, tokens = self.model, self.sizes.tokens(c)
        if m.recurrent is None:
            return torch.zeros_like(tokens)
        alone, shared = (float(m.recurrent.flops(by_state=each)) for each in (False, True))
        numbers = torch.full_like(tokens, alone)
        # Columns without "scheme" are for bounds over all schemes, so they take the lower number.
        if "scheme" in c:
            numbers = numbers + (shared - alone) * self.sizes.of_states(c)[0]
        return tokens * numbers / self._score_rate()

    def elementwise(self, c: Columns) -> Tensor:
        """Return the seconds of memory traffic in a forward pass through a stage's layers."""
        sizes = self.sizes
        m, tokens = self.model, sizes.tokens(c)
        here = sizes.layers(c)
        moe = here.moe
        dense = here.dense * (m.dense_ffn_dim or m.ffn_dim) * (2 + m.gated)
        shared = moe * m.shared_ffn_dim * (2 + m.gated_experts)
        # Rows of experts are also permuted, before and after the experts.
        rows = moe * m.top_k * self.loads.of(c, "pace")
        # Each shard of an expert processes all rows of the expert, with a part of its width.
        shards = sizes.width(c) / c["ep"]
        routed = rows * (m.ffn_dim * (2 + m.gated_experts) + 2 * m.model_dim * shards)
        # Per token, a norm and a residual read and write 5 D numbers. Products read and write 2 D
        # gathered over tp, and twice the width of each inner result.
        numbers = sizes.norms(here) * (5 + 2 * c["tp"]) * m.model_dim
        attention = 4 * (m.heads_dim + m.kv_dim) + 2 * m.gate_dim
        if self.job.eager_attention:
            # Scores, softmax and dropout are each written and read.
            attention = attention + 6 * m.num_heads * self.job.seq_len
        numbers = numbers + here.attention * attention + 2 * (dense + shared + routed)
        if m.recurrent is not None:
            # Convolution and activation move 4 numbers per channel, gate and norm 4 per value. The
            # recurrence reads and writes float32.
            inner = m.recurrent.state_numbers * 8.0 / self.job.itemsize
            each = 4 * m.recurrent.channels + 4 * m.recurrent.width + inner
            numbers = numbers + here.recurrent * each
        held = self._dense(here) / c["tp"]
        held = held + moe * m.num_experts * m.expert_parameters / sizes.width(c)
        num_bytes = self.job.itemsize * (tokens * numbers + held)
        if self.job.layer_dtype is not None:
            # Inputs of products are rounded to a narrow format, and in the backward pass gradients
            # of results. Two of three passes read these numbers and write one byte along rows and
            # one along columns.
            rounded = sizes.norms(here) * m.model_dim + here.attention * m.heads_dim
            if m.recurrent is not None:
                rounded = rounded + here.recurrent * m.recurrent.width
            rounded = rounded + (dense + shared) / (2 + m.gated)
            rounded = rounded + rows * (m.model_dim + m.ffn_dim)
            num_bytes = num_bytes + 2.0 / 3.0 * tokens * rounded * (self.job.itemsize + 2.0)
        return num_bytes / self.cluster.memory_bandwidth
