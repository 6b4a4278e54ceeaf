"""Time and memory of a training step by formula, of many placements at once.

Placements are columns of one tensor each, so that a formula is written once and serves one of them
and a million. Without more columns a stage has as many layers as the largest one of an even
division, with experts in as many of them as on the mean. Columns of `STAGE` say otherwise.
Shapes: C candidates.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from moe_ext._checks import check_choice, check_fields
from moe_ext.comm.collectives import all_reduce_bytes
from moe_ext.comm.link import Link
from moe_ext.compression import codec_of
from moe_ext.dispatch.auto import DispatchShape, expected_ranks
from moe_ext.dispatch.base import sum_dtype
from moe_ext.dispatch.wire import LOSSLESS, Wire, sent_row_bytes
from moe_ext.ops.quantize import row_bytes
from moe_ext.planner.balance import Loads, balanced, moves_of
from moe_ext.planner.cluster import ClusterSpec
from moe_ext.planner.load import Load, counts_of
from moe_ext.planner.presets import ModelSpec
from moe_ext.planner.rates import ROUNDED, rows_rate
from moe_ext.planner.rounds import LOCAL_CODECS, RoundCodec, round_codec

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")
DISPATCHERS = ("alltoall", "dedup", "hierarchical", "allgather")
WIRES = (None, "int8", "fp8", "mx", LOSSLESS)
# Formats of keys and values on their way round a ring.
KV_WIRES = tuple(wire for wire in WIRES if wire != LOSSLESS)
COMBINES = ("exact", "reduced")
BALANCES = ("none", "exact")
SCHEMES = ("ring", "ulysses")
OFFLOADS = ("none", "host")
# Codecs of the messages of gradients.
GRADIENTS = ("none", LOSSLESS, *ROUNDED)
# Stages of a rank with "interleaved".
CHUNKS = 2
# Memory that formulas do not see, fragments and buffers of libraries, over what they see.
MARGIN = 1.1
# Of `sync_gradients`.
_BUCKET = 25 * 2**20
# Rows and columns of a product's result that a multiprocessor makes at a time.
_TILE = (128, 256)
# Bytes of a parameter that `CPUAdamW` keeps: two moments and the weight, in float32.
_HOST_STATE = 12.0
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Time of micro-batches that a pipeline is idle at least, for each stage behind the first.
_WAITS = {"1f1b": 2 / 3, "gpipe": 1.0, "zb-h1": 1 / 3, "interleaved": 0.0}
# The same where all stages are alike.
_FILLS = {"1f1b": 1.0, "gpipe": 1.0, "zb-h1": 1 / 3, "interleaved": 1 / CHUNKS}

Columns = dict[str, Tensor]
_EXCHANGE = ("ep", "etp", "dispatcher", "wire", "combine")
# Of a stage: layers, those of them with experts, those computed again and those of them with
# experts, matrices of words (embedding, output), micro-batches that it holds, those of them whose
# gradients of weights alone are left to do, 1 for the loss.
STAGE = ("layers", "moe", "again", "again_moe", "ends", "in_flight", "late", "loss")
# Passes through a layer of a step without recompute, by what takes time there.
_PASSES = {"compute": 3, "elementwise": 3, "tensor": 2, "context": 3, "experts": 2}
_PASSES |= {"heads": 1, "moved experts": 2}


@dataclass(frozen=True)
class Job:
    """One step of training.

    Attributes:
        num_ranks: processors.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        dtype: of products and messages.
        load: tokens of each expert, as `layer.metrics` counts them, or one such list for each of
            many steps; or s of Zipf's law, where expert i has tokens in proportion to 1 / i^s; 0
            for even routing.
        capacity_factor: rows that an expert takes of a rank's tokens, over those of an even load;
            the others go to no expert. None takes all.
        eager_attention: attention multiplies all pairs of positions and has their scores in memory,
            as without a fused kernel; of times alone.
        hidden_exchanges: rows travel to experts and back while another micro-batch computes; what
            they take longer than its work shows. Of times alone, of programs that interleave
            micro-batches.
        hidden_gradients: messages of gradients and of gathered weights travel while micro-batches
            compute: with ZeRO 2 and 3 behind all of them, else behind one. What they take longer
            shows. Of times alone, of programs that do so.
        hidden_tensor: messages of tensor parallelism travel beside the parts of the products that
            they belong to; what they take longer than these shows. Of times alone, as before.
        node_limit: nodes that hold the experts of a token, at most, by a router that keeps to it;
            0 for any. Of the dispatcher "hierarchical" alone.
        layer_dtype: format of a byte or less of the products of layers, but for scores and the
            output, which `ClusterSpec.flops` names; None for `dtype`.
        local_steps: steps of the inner optimizer in a round of `moe_ext.optim.DiLoCo`: each rank
            with data of its own is a worker, and the workers average what they did at the end of a
            round. 1 for the mean of the gradients in each step.
        local_codec: of what travels in a round: "none", a format of `moe_ext.compression` ("bf16",
            "int8", "int4", ...) or "sparseloco", `moe_ext.optim.SparseLoCo`.
    """

    num_ranks: int
    seq_len: int = 4096
    global_batch: int = 1024
    dtype: str = "bfloat16"
    load: Load = 0.0
    capacity_factor: float | None = None
    eager_attention: bool = False
    hidden_exchanges: bool = False
    hidden_gradients: bool = False
    hidden_tensor: bool = False
    node_limit: int = 0
    layer_dtype: str | None = None
    local_steps: int = 1
    local_codec: str = "none"

    def __post_init__(self) -> None:
        """ValueError for numbers that no job has."""
        check_fields(self, may_be_zero=("node_limit",))
        check_choice("Job", "local_codec", self.local_codec, LOCAL_CODECS)
        if self.local_steps == 1 and self.local_codec != "none":
            raise ValueError(
                "Job: expected local_codec to be 'none' without local steps, got "
                f"{self.local_codec!r}"
            )
        if self.dtype not in _BYTES:
            raise ValueError(
                f"Job: expected dtype to be one of {sorted(_BYTES)}, got {self.dtype!r}"
            )
        if isinstance(self.load, tuple):
            counts_of(self.load)
        elif (
            isinstance(self.load, bool)
            or not isinstance(self.load, (int, float))
            or not 0 <= self.load < math.inf
        ):
            raise ValueError(
                "Job: expected load to be a finite number of at least 0, or tokens of experts, got "
                f"{self.load!r:.80}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return _BYTES[self.dtype]

    @functools.cached_property
    def _counts(self) -> Tensor:
        assert isinstance(self.load, tuple)
        return counts_of(self.load)

    def counts(self, num_experts: int) -> Tensor:
        """Share of the choices of each step that each expert has, `[S, E]`, before any drop.

        Raises:
            ValueError: the load is one of other experts.
        """
        if not isinstance(self.load, tuple):
            counts_SE = torch.arange(1, num_experts + 1, dtype=torch.float64)[None] ** -self.load
        else:
            counts_SE = self._counts
        if counts_SE.shape[1] != num_experts:
            raise ValueError(
                f"Job: expected load to hold tokens of {num_experts} experts, got "
                f"{counts_SE.shape[1]} numbers"
            )
        return counts_SE / counts_SE.sum(1, keepdim=True)

    def kept(self, num_experts: int) -> Tensor:
        """Shares of the choices, as of `counts`, that are within the capacity."""
        counts_SE = self.counts(num_experts)
        if self.capacity_factor is None:
            return counts_SE
        return counts_SE.clamp(max=self.capacity_factor / num_experts)

    def dropped_share(self, num_experts: int) -> float:
        """Share of the choices that go to no expert."""
        return max(0.0, 1.0 - float(self.kept(num_experts).sum(1).mean()))

    def imbalances(self, num_experts: int, ep: int) -> Tensor:
        """Load of the busiest of `ep` ranks over the mean of all choices, of each step `[S]`."""
        kept_SE = self.kept(num_experts)
        return ep * kept_SE.view(-1, ep, num_experts // ep).sum(2).amax(1)

    def imbalance(self, num_experts: int, ep: int, *, peak: bool = False) -> float:
        """Load of the busiest of `ep` ranks over the mean, experts in order.

        Args:
            num_experts: of the model.
            ep: ranks.
            peak: of the worst step, not on average.

        Raises:
            ValueError: the load is one of other experts.
        """
        over_S = self.imbalances(num_experts, ep)
        return float(over_S.max() if peak else over_S.mean())


@dataclass(frozen=True)
class CostModel:
    """Cost of placements of one job.

    Attributes:
        model: sizes.
        cluster: processors and links.
        job: a step.
    """

    model: ModelSpec
    cluster: ClusterSpec
    job: Job

    def __post_init__(self) -> None:
        """ValueError for a dtype without a rate, and for more ranks than the cluster joins."""
        ranks = self.job.num_ranks
        if ranks > self.cluster.levels[-1].size:
            raise ValueError(
                f"plan: expected num_ranks to be at most the {self.cluster.levels[-1].size} that "
                f"cluster.levels join, got {ranks}"
            )
        layers = self.job.layer_dtype
        for dtype in (self.job.dtype, self.job.dtype if layers is None else layers):
            if dtype not in self.cluster.flops:
                raise ValueError(
                    f"plan: expected cluster.flops to have {dtype}, got "
                    f"{sorted(self.cluster.flops)}"
                )

    def _rate(self, dtype: str | None = None) -> float:
        """Operations a second of products; of layers without `dtype`."""
        named = dtype or self.job.layer_dtype or self.job.dtype
        return self.cluster.flops[named] * self.cluster.efficiency

    def _measured(self, part: str, unknown: float = 1.0) -> float:
        """What a part of a step takes over its formula."""
        return self.cluster.measured.get(part, unknown)

    @functools.cached_property
    def _known_loads(self) -> dict[tuple[int, int], Loads]:
        return {}

    def _loads_of(self, ep: int, tokens: int) -> Loads:
        """Loads over `ep` ranks; of balanced experts for a number of a rank's tokens, 0 for others.

        Time is that of the busiest rank. Where ranks share processors, rates are those of all at
        work; the busiest one is quicker by that share while others wait, and at least the work of
        all has to be done.
        """
        found = self._known_loads.get((ep, tokens))
        if found is not None:
            return found
        m, over_S = self.model, self.job.imbalances(self.model.num_experts, ep)
        kept_SE = self.job.kept(m.num_experts)
        sharing = max(self._measured("sharing"), 1.0)
        pace_S = torch.maximum(over_S / sharing, kept_SE.sum(1))
        if not tokens:
            found = Loads(float(pace_S.mean()), float(over_S.mean()), 0.0, float(over_S.max()), 0.0)
        else:
            latency, bandwidth = self._link(torch.tensor([ep]))
            found = balanced(
                *(over_S, pace_S, moves_of(kept_SE, ep)),
                rows=float(tokens * m.top_k),
                row_flops=2.0 * m.expert_parameters,
                flops=self._rate(),
                expert_bytes=float(m.expert_parameters * self.job.itemsize),
                link=Link(float(latency), float(bandwidth), float(bandwidth)),
            )
        self._known_loads[ep, tokens] = found
        return found

    def moves(self, c: Columns) -> Tensor:
        """Whether experts ever move in a layer."""
        return self._loads(c, "moved") > 0

    def _loads(self, c: Columns, name: str) -> Tensor:
        """One of the numbers of `Loads`, of each candidate."""
        ep, balance = c["ep"], c.get("balance")
        if not self.model.num_experts or not len(ep):
            return torch.full(ep.shape, float(name not in ("moved", "peak_moved")))
        if balance is None or not bool(balance.any()):
            table = torch.zeros(int(ep.max()) + 1, dtype=torch.float64)
            for size in _present(ep):
                table[size] = getattr(self._loads_of(size, 0), name)
            return table[ep]
        tokens = torch.where((balance > 0) & (ep > 1), self.tokens(c), 0.0).long()
        most = int(ep.max()) + 1
        keys, place = (tokens * most + ep).unique(return_inverse=True)
        each = [getattr(self._loads_of(key % most, key // most), name) for key in keys.tolist()]
        return torch.tensor(each, dtype=torch.float64)[place]

    @staticmethod
    def _width(c: Columns) -> Tensor:
        """Ranks of an expert-parallel group."""
        return c["ep"] * c["etp"] if "etp" in c else c["ep"]

    def _link(self, span: Tensor) -> tuple[Tensor, Tensor]:
        """Latency and bandwidth between ranks that reach over so many."""
        levels = self.cluster.levels
        ends = torch.tensor([float(level.size) for level in levels[:-1]], dtype=torch.float64)
        i = torch.bucketize(span.double(), ends)
        latency = torch.tensor([level.latency for level in levels], dtype=torch.float64)
        bandwidth = torch.tensor([level.bandwidth for level in levels], dtype=torch.float64)
        return latency[i], bandwidth[i]

    def _ring(self, size: Tensor, stride: Tensor, num_bytes: Tensor) -> Tensor:
        """Seconds of an all-gather or reduce-scatter of so many bytes in all."""
        latency, bandwidth = self._link(size * stride)
        # A ring that leaves a node takes the links of all of its ranks there.
        inner = self.cluster.levels[0]
        inside = (inner.size / stride.double()).clamp(min=1.0).minimum(size.double())
        many = (bandwidth * inside).clamp(max=inner.bandwidth)
        bandwidth = torch.where(size * stride > inner.size, many, bandwidth)
        return (size - 1) * latency + (size - 1) / size * num_bytes / bandwidth

    def tokens(self, c: Columns) -> Tensor:
        """Tokens of a rank in a micro-batch."""
        return c["micro_batch"] * self.job.seq_len / (c["cp"] * c["tp"])

    def num_micro_batches(self, c: Columns) -> Tensor:
        """Micro-batches of a step."""
        return self.job.global_batch / (self._data(c) * c["micro_batch"])

    def _stage(self, c: Columns) -> Tensor:
        return self.job.num_ranks / c["pp"]

    def _data(self, c: Columns) -> Tensor:
        return self._stage(c) / (c["tp"] * c["cp"])

    def _layers(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Layers of a stage, and those of them with experts."""
        if "layers" in c:
            return c["layers"], c["moe"]
        m = self.model
        layers = torch.ceil(m.num_layers / c["pp"].double())
        return layers, layers * (m.num_moe_layers / m.num_layers)

    def _again(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Layers of a stage that are computed again, and those of them with experts."""
        if "again" in c:
            return c["again"], c["again_moe"]
        layers, moe = self._layers(c)
        return layers * c["recompute"], moe * c["recompute"]

    def compute(self, c: Columns) -> Tensor:
        """Seconds of the products of a micro-batch's forward pass through a stage's layers."""
        m, tokens = self.model, self.tokens(c)
        layers, moe = self._layers(c)
        attention, ffn, shared, expert = self._met(c)
        met = layers * attention + (layers - moe) * ffn + moe * shared
        met = met + moe * m.top_k * expert * self._loads(c, "pace")
        return tokens * 2.0 * met / self._rate() + layers * self._scores(tokens)

    def _met(self, c: Columns) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Parameters that a token meets: attention, a dense layer's ffn, a shared one, an expert.

        Each counts as many times as its products take longer than those of full waves.
        """
        m, tokens = self.model, self.tokens(c)
        one, tp = torch.ones_like(tokens), c["tp"].double()
        more = 1 + m.num_cross_layers / m.num_layers
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
        else:
            attention = columns(dim, m.heads_dim + 2 * m.kv_dim) + lines(m.heads_dim, dim)
        width = float(m.dense_ffn_dim or m.ffn_dim)
        ffn = columns(dim, (1 + m.gated) * width) + lines(width, dim)
        shared, expert = dim * m.num_experts * one, 0.0 * one
        up = float(1 + m.gated_experts)
        if m.shared_ffn_dim:
            shared = shared + columns(dim, up * m.shared_ffn_dim) + lines(m.shared_ffn_dim, dim)
        if m.num_experts:
            # Experts of a rank are multiplied in one launch.
            count, shards = m.num_experts / c["ep"].double(), self._width(c) / c["ep"]
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
        m, tokens = self.model, self.tokens(c)
        product = tokens * 2.0 * m.vocab_size * m.model_dim / self._rate(self.job.dtype)
        # Logits, and the loss in float32.
        num_bytes = tokens * m.vocab_size * (self.job.itemsize + 8.0)
        return product + num_bytes / self.cluster.memory_bandwidth

    def _dense(self, layers: Tensor, moe: Tensor) -> Tensor:
        """Parameters of layers, `moe` of them with experts, that each token meets."""
        m = self.model
        attention = m.attention_parameters() * (1 + m.num_cross_layers / m.num_layers)
        ffn = (layers - moe) * m.dense_layer_ffn() + moe * m.shared_parameters()
        return layers * attention + ffn

    def _scores(self, tokens: Tensor) -> Tensor:
        """Seconds of the forward pass of one causal attention, its scores alone."""
        cluster = self.cluster
        rate = cluster.flops[self.job.dtype] * (cluster.score_efficiency or cluster.efficiency)
        # A fused kernel leaves out what a mask hides.
        eager = self.job.eager_attention
        keys = self.job.seq_len if eager else self.model.mean_keys(self.job.seq_len)
        return tokens * 4.0 * keys * self.model.scores_dim / rate

    def elementwise(self, c: Columns) -> Tensor:
        """Seconds in which a forward pass through a stage's layers reads and writes its numbers."""
        m, tokens = self.model, self.tokens(c)
        layers, moe = self._layers(c)
        dense = (layers - moe) * (m.dense_ffn_dim or m.ffn_dim) * (2 + m.gated)
        shared = moe * m.shared_ffn_dim * (2 + m.gated_experts)
        # An expert's rows are also permuted there and back.
        rows = moe * m.top_k * self._loads(c, "pace")
        # Each of the shards of an expert has all of its rows, and a part of its width.
        shards = self._width(c) / c["ep"]
        routed = rows * (m.ffn_dim * (2 + m.gated_experts) + 2 * m.model_dim * shards)
        # Two norms and residuals read and write 10 D, products 4 D gathered, each width twice.
        numbers = (10 + 4 * c["tp"]) * m.model_dim
        numbers = numbers + 4 * (m.heads_dim + m.kv_dim)
        if self.job.eager_attention:
            # Scores, softmax and dropout are written and read.
            numbers = numbers + 6 * m.num_heads * self.job.seq_len
        numbers = layers * numbers + 2 * (dense + shared + routed)
        held = self._dense(layers, moe) / c["tp"]
        held = held + moe * m.num_experts * m.expert_parameters / self._width(c)
        num_bytes = self.job.itemsize * (tokens * numbers + held)
        if self.job.layer_dtype is not None:
            # Inputs of products in a narrow format, and in the backward pass gradients of results:
            # two of three passes read what is to be rounded and write a byte along rows and along
            # columns.
            rounded = layers * (2.0 * m.model_dim + m.heads_dim)
            rounded = rounded + (dense + shared) / (2 + m.gated)
            rounded = rounded + rows * (m.model_dim + m.ffn_dim)
            num_bytes = num_bytes + 2.0 / 3.0 * tokens * rounded * (self.job.itemsize + 2.0)
        return num_bytes / self.cluster.memory_bandwidth

    def dispatch_bytes(
        self, ep: int, dispatcher: str, wire: str | None, combine: str, *, etp: int = 1
    ) -> float:
        """Bytes that a token sends through a layer, to the experts and back, for even routing."""
        return sum(self._dispatch(ep, etp, dispatcher, wire, combine))

    def _dispatch(
        self, ep: int, etp: int, dispatcher: str, wire: str | None, combine: str
    ) -> tuple[float, float]:
        """Bytes that stay in the node, and that leave it."""
        if ep * etp == 1:
            return 0.0, 0.0
        share = self._lossless_share if wire == LOSSLESS else None
        return self._sent(ep, etp, dispatcher, combine, wire, share)

    def _sent(
        self,
        ep: int,
        etp: int,
        dispatcher: str,
        combine: str,
        wire: str | None,
        share: float | None,
    ) -> tuple[float, float]:
        """Bytes as `_dispatch`; `share`: of their bytes that rows take with "lossless"."""
        m, inner, ranks = self.model, self.cluster.levels[0].size, ep * etp
        node = min(ranks, inner) if ranks % min(ranks, inner) == 0 else 1
        sizes = m.num_experts, m.top_k, ranks, node, m.model_dim, self._dtype
        shape = DispatchShape(*sizes, Wire.of("plan", wire), etp, share)
        sent, off = shape.sent_bytes(dispatcher, combine, 1)
        near, limit = sent - off, self.job.node_limit
        if limit and dispatcher == "hierarchical":
            # Of the nodes of even routing the router keeps to so many.
            off *= min(1.0, limit / expected_ranks(m.num_experts, ranks // node, m.top_k))
        return near, off

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.job.dtype)
        return found

    def has_rate(self, name: str) -> bool:
        """Whether the rate of a codec was measured."""
        return self.cluster.costs is not None and name in self.cluster.costs.codecs

    @functools.cached_property
    def _lossless_share(self) -> float | None:
        """Share of their bytes that rows take with "lossless", as measured; None for no rate."""
        name, costs = rows_rate(LOSSLESS, self._dtype), self.cluster.costs
        if costs is None or not self.has_rate(name):
            return None
        numel = costs.codecs[name][-1].numel
        return costs.payload_bytes(name, numel) / (numel * self._dtype.itemsize)

    def _coded(
        self, ep: int, dispatcher: str, wire: str | None, combine: str
    ) -> tuple[float, float]:
        """Elements of a token that are encoded in a layer's pass, for even routing, and messages.

        Rows of a message are encoded together with "lossless", and those of all messages else.
        """
        if ep == 1 or wire is None:
            return 0.0, 1.0
        m = self.model
        if wire == LOSSLESS:
            # All that leaves a rank, there and back, but indices and weights.
            whole, beside = (
                sum(self._sent(ep, 1, dispatcher, combine, wire, each)) for each in (1.0, 0.0)
            )
            return (whole - beside) / self.job.itemsize, 2.0 * (ep - 1)
        once = 1.0 if dispatcher == "allgather" else expected_ranks(m.num_experts, ep, m.top_k)
        return m.model_dim * (m.top_k if dispatcher == "alltoall" else once), 1.0

    def _coding(
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
        found, costs, dtype = torch.zeros_like(numel), self.cluster.costs, self._dtype
        for i in _present(wires):
            wire = WIRES[i]
            if wire is None:
                continue
            here, name = wires == i, rows_rate(wire, dtype)
            if costs is None or not self.has_rate(name):
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

    def terms(self, c: Columns) -> Columns:
        """Seconds of a micro-batch's forward and backward pass on a stage, by what they are for.

        Without the output, which the last stage alone has. In turn, exchanges take what they are
        longer than all of the work that can be beside them.
        """
        found, launches = self._parts(c)
        experts = found["experts"]
        if self.job.hidden_exchanges:
            work = found["compute"] + found["elementwise"]
            found["experts"] = (experts - work).clamp(min=0.0)
        if "turns" in c:
            work = sum(found.values()) - experts
            shown = (experts - work).clamp(min=0.0)
            found["experts"] = torch.where(c["turns"] > 0, shown, found["experts"])
        return {**found, "launches": (launches - sum(found.values())).clamp(min=0.0)}

    def apart(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Seconds of a micro-batch's work on a stage, and of its exchanges.

        Without the output, which the last stage alone has.
        """
        found, launches = self._parts(c)
        exchanges = found.pop("experts")
        work = sum(found.values())
        assert isinstance(work, Tensor)
        return launches.maximum(work), exchanges

    def _parts(self, c: Columns) -> tuple[Columns, Tensor]:
        """Terms of a micro-batch, each exchange waited for, and seconds of its launches."""
        layers, _ = self._layers(c)
        again, again_moe = self._again(c)
        once = self._pass(c)
        if not bool((again > 0).any()):
            more = dict.fromkeys(once, torch.zeros_like(once["compute"]))
        elif "again" in c:
            more = self._pass({**c, "layers": again, "moe": again_moe})
        else:
            more = {name: c["recompute"] * value for name, value in once.items()}
        found = {name: _PASSES[name] * value + more[name] for name, value in once.items()}
        back = torch.where(self._swaps_heads(c), layers * self._heads(c)[1], 0.0)
        found["context"] = found["context"] + found.pop("heads") + back
        if not self.job.eager_attention:
            # A fused kernel multiplies queries and keys again: five products for two.
            found["compute"] = found["compute"] + 0.5 * layers * self._scores(self.tokens(c))
        if self.job.hidden_tensor:
            found["tensor"] = (found["tensor"] - found["compute"]).clamp(min=0.0)
        if bool(c["kv_wire"].any()):
            # Gradients of keys and values are not rounded.
            plain = self._key_ring({**c, "kv_wire": torch.zeros_like(c["kv_wire"])})
            found["context"] = found["context"] + layers * plain - once["context"]
        # The processor waits for its launches where it is quicker than they are. Embedding, loss,
        # messages and the schedule have about as many as a layer.
        launches = (3.0 + again / layers) * (layers + 1) * self.cluster.layer_seconds
        node = self.cluster.levels[0].size
        launches = launches * (1.0 + self.cluster.node_launches * (c["tp"] >= max(node, 2)))
        return found, launches

    def _swaps_heads(self, c: Columns) -> Tensor:
        """Whether ranks of a cp group exchange heads, and each has whole sequences of some."""
        return (c["cp"] > 1) & (c.get("scheme", torch.zeros_like(c["cp"])) == 1)

    def _heads(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Seconds of a layer's exchanges of heads, forward and backward."""
        m, size = self.model, self.job.itemsize
        latency, bandwidth = self._link(c["cp"] * c["tp"])
        # Queries, keys and values there, results back in float32 with a number of each head; in the
        # backward pass queries once more, gradients of results, and those of all three back.
        out = 4.0 * (m.heads_dim + m.num_heads)
        there = size * (m.heads_dim + 2 * m.kv_dim) + out
        back = size * (3 * m.heads_dim + 2 * m.kv_dim) + 8.0 * m.num_heads
        share = self.tokens(c) * (c["cp"] - 1) / c["cp"] / bandwidth
        return 2.0 * latency + share * there, 4.0 * latency + share * back

    def _pass(self, c: Columns) -> Columns:
        """Seconds of one of the passes of a micro-batch through a stage's layers."""
        m, size, tokens = self.model, self.job.itemsize, self.tokens(c)
        layers, moe = self._layers(c)
        one = torch.ones_like(c["pp"])
        # Sequence-parallel: gathered before a product of columns, scattered behind one of rows.
        whole = tokens * c["tp"] * m.model_dim * size
        tensor = (4.0 * layers - 2.0 * moe) * self._ring(c["tp"], one, whole)
        swaps = self._swaps_heads(c)
        context = torch.where(swaps, 0.0, layers * self._key_ring(c))
        heads = torch.where(swaps, layers * self._heads(c)[0], 0.0)
        experts = torch.zeros_like(context)
        if m.num_experts:
            most = (int(c[name].max()) + 1 for name in _EXCHANGE[:2])
            shape = (*most, len(DISPATCHERS), len(WIRES), len(COMBINES))
            table = torch.zeros(*shape, 4, dtype=torch.float64)
            key = torch.zeros_like(c["ep"])
            for name, size_of in zip(_EXCHANGE, shape, strict=True):
                key = key * size_of + c[name]
            for place in _present(key):
                rest, index = place, list[int]()
                for size_of in reversed(shape):
                    rest, i = divmod(rest, size_of)
                    index.insert(0, i)
                ep, etp, way, wire, back = index
                names = DISPATCHERS[way], WIRES[wire], COMBINES[back]
                each = (*self._dispatch(ep, etp, *names), *self._coded(ep, *names))
                table[ep, etp, way, wire, back] = torch.tensor(each)
            near, far, coded, messages = table.view(-1, 4)[key].unbind(1)
            fast = self.cluster.levels[0].bandwidth
            latency, bandwidth = self._link(self._width(c))
            seconds = tokens * self._loads(c, "rows") * (near / fast + far / bandwidth)
            # Ranks tell each other how long messages without a lost bit are.
            rounds = torch.where(c["wire"] == WIRES.index(LOSSLESS), 4.0, 2.0)
            seconds = seconds + rounds * latency * (self._width(c) > 1)
            once = torch.ones_like(messages)
            coding = self._coding(c["wire"], tokens * coded, m.model_dim, messages, once)
            experts = moe * (seconds * self._measured("exchange") + coding)
        found = {"compute": self.compute(c), "elementwise": self.elementwise(c), "tensor": tensor}
        found |= {"context": context, "heads": heads, "experts": experts}
        return {**found, "moved experts": moe * self._loads(c, "moved")}

    def _key_ring(self, c: Columns) -> Tensor:
        """Seconds that a layer's pass waits for keys and values, and codes them."""
        m, tokens, wires = self.model, self.tokens(c), c["kv_wire"]
        numel = 2.0 * tokens * c["tp"] * m.kv_dim / c["tp"].clamp(max=m.num_kv_heads or 1)
        # Each head of a position is a row.
        dim = m.head_dim or m.model_dim // m.num_heads
        rows = [
            dim * self.job.itemsize if wire is None else row_bytes(dim, wire) for wire in KV_WIRES
        ]
        each = torch.tensor(rows, dtype=torch.float64)[wires] / dim
        latency, bandwidth = self._link(c["cp"] * c["tp"])
        block = self._scores(tokens) / c["cp"]
        hops = (c["cp"] - 1) * (latency + numel * each / bandwidth - block).clamp(min=0.0)
        if not bool(wires.any()):
            return hops
        # A rank encodes its own, and decodes those of all.
        coding = self._coding(wires, numel.double(), dim, torch.ones_like(hops), c["cp"].double())
        return hops + torch.where(c["cp"] > 1, coding, 0.0)

    def parameters(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Parameters of a rank before ZeRO: dense ones and those of experts."""
        m = self.model
        layers, moe = self._layers(c)
        words = m.model_dim * m.vocab_size
        ffn = (m.num_layers - m.num_moe_layers) * m.dense_layer_ffn()
        ffn += m.num_moe_layers * m.shared_parameters()
        rest = (m.dense_parameters() - words * (1 if m.tied else 2) - ffn) / m.num_layers
        dense = layers * rest + (layers - moe) * m.dense_layer_ffn() + moe * m.shared_parameters()
        experts = m.expert_parameters * m.num_experts / self._width(c)
        return (dense + words * self._ends(c)) / c["tp"], experts * moe

    def _ends(self, c: Columns) -> Tensor:
        """Matrices of words of a rank: a first stage has the embedding, a last one the output."""
        if "ends" in c:
            return c["ends"]
        return torch.where(c["pp"] > 1, 1.0, 1.0 if self.model.tied else 2.0)

    def gradients(self, c: Columns) -> Tensor:
        """Seconds of a step's messages for gradients and weights between copies."""
        dense, experts = self.parameters(c)
        if self.job.local_steps > 1:
            return torch.zeros_like(dense)
        copies, edp = self._data(c) * c["cp"], self._stage(c) / self._width(c)
        size = float(self.job.itemsize)
        of_dense = self._ring(copies, c["tp"], dense * size)
        of_experts = self._ring(edp, self._width(c), experts * size)
        # FSDP2 gathers for each micro-batch, with ZeRO 3 for each pass of it, and reduces each.
        times = self._measured("fsdp") * c["zero"] * self.num_micro_batches(c)
        times = torch.where(c["zero"] >= 2, times, 2.0 * self._measured("all_reduce"))
        # Experts that are spread are stepped where they are.
        sent = of_dense + torch.where(self._width(c) > 1, 0.0, of_experts)
        behind = torch.where(c["zero"] == 1, sent, 0.0) * self._measured("broadcast", 0.0)
        messages = (of_dense + of_experts) * times
        codecs = c["gradients"]
        if bool(codecs.any()):
            coded = self._coded_messages(codecs, dense, copies, c["tp"])
            coded = coded + self._coded_messages(codecs, experts, edp, self._width(c))
            messages = torch.where(codecs > 0, coded, messages)
        sent = messages + behind
        if not self.job.hidden_gradients:
            return sent
        each = sum(self.terms(c).values())
        assert isinstance(each, Tensor)
        work = torch.where(c["zero"] >= 2, self.num_micro_batches(c), 1.0) * each
        return (sent - work).clamp(min=0.0)

    def rounds(self, c: Columns) -> Tensor:
        """Seconds of a round of local steps, for each of its steps."""
        dense, experts = self.parameters(c)
        found = torch.zeros_like(dense)
        if self.job.local_steps == 1:
            return found
        codec, size = round_codec(self.job.local_codec), self.job.itemsize
        reduction = 2.0 * (self._measured("all_reduce") if codec.codec.plain else 1.0)
        for numel, ranks, stride in (
            (dense, self._data(c), torch.ones_like(c["ep"])),
            (experts, self._stage(c) / self._width(c), self._width(c)),
        ):
            # Each rank's payload goes to all others, or sums of shards come and go.
            num_bytes = codec.sent * numel * (ranks if codec.gathers else 1.0)
            found = found + self._ring(ranks, stride, num_bytes) * (
                1.0 if codec.gathers else reduction
            )
            found = found + self._round_coding(codec, numel, ranks)
        # Pseudo-gradients in float32, weights, those of the last round and the outer momentum are
        # each read and written.
        numbers = self._averaged(c) * (8.0 + 2.0 * (2 + codec.has_momentum) * size)
        return (found + numbers / self.cluster.memory_bandwidth) / self.job.local_steps

    def _averaged(self, c: Columns) -> Tensor:
        """Parameters of a rank that rounds average: not of experts that no other rank holds."""
        dense, experts = self.parameters(c)
        width = self._width(c)
        return dense + torch.where((width == 1) | (self._stage(c) > width), experts, 0.0)

    def _round_coding(self, codec: RoundCodec, numel: Tensor, ranks: Tensor) -> Tensor:
        """Seconds to encode and to decode so many elements of a pseudo-gradient."""
        found, costs = torch.zeros_like(numel), self.cluster.costs
        for count in _present(ranks.long()):
            passes = codec.passes(count) if count > 1 else (0.0, 0.0)
            if costs is None or codec.name not in costs.codecs:
                # Each pass reads one and writes the other.
                each = sum(passes) * (4.0 + codec.sent) / self.cluster.memory_bandwidth
            else:
                many = costs.codec_seconds(codec.name, 2**24)
                each = sum(p * s for p, s in zip(passes, many, strict=True)) / 2**24
            found = torch.where(ranks == count, each * numel, found)
        return found

    def ends(self, c: Columns) -> Tensor:
        """Seconds of a step behind its passes: messages between copies, and the optimizer."""
        return self.gradients(c) + self.rounds(c) + self.update(c) + self.offload(c)

    def _is_offloaded(self, c: Columns) -> Tensor:
        return c["offload"] == OFFLOADS.index("host")

    def offload(self, c: Columns) -> Tensor:
        """Seconds in which gradients go to the host, are stepped there, and weights come back."""
        shared, own = self._optimized(c)
        host, size = self.cluster.host, self.job.itemsize
        if host is None:
            return torch.zeros_like(shared)
        copies = torch.where(c["zero"] == 1, self._data(c) * c["cp"], 1.0)
        stepped = shared / copies + own
        # One parameter after the other: nothing of it is hidden.
        moved = 2.0 * size / host.bandwidth
        worked = (2.0 * _HOST_STATE + 2.0 * size) / host.rate
        return torch.where(self._is_offloaded(c), stepped * (moved + worked), 0.0)

    def host_memory(self, c: Columns) -> Tensor:
        """Bytes on the host of the fullest rank, with the margin."""
        return MARGIN * _HOST_STATE * torch.where(self._is_offloaded(c), self._stepped(c)[0], 0.0)

    def _over(self, c: Columns, memory: Tensor) -> Tensor:
        """What is taken over what is there, on the processor or on the host."""
        over, host = memory / self.cluster.memory, self.cluster.host
        return over if host is None else over.maximum(self.host_memory(c) / host.memory)

    def fits(self, c: Columns, memory: Tensor | None = None) -> Tensor:
        """Whether candidates fit into the memory of processor and host.

        Args:
            c: candidates.
            memory: of them, if it is known.
        """
        found = self.memory(c) if memory is None else memory
        here, host = found <= self.cluster.memory, self.cluster.host
        return here if host is None else here & (self.host_memory(c) <= host.memory)

    def _optimized(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Parameters of a rank whose state ZeRO 1 shares, and the others.

        It shares that of dense parameters alone, as `Applied.optimizers` does: experts that are not
        spread are among them.
        """
        dense, experts = self.parameters(c)
        spread = self._width(c) > 1
        return dense + torch.where(spread, 0.0, experts), torch.where(spread, experts, 0.0)

    def _stepped(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Parameters that a rank's optimizer steps, and those that it steps at once."""
        m = self.model
        dense, experts = self.parameters(c)
        copies, edp = self._data(c) * c["cp"], self._stage(c) / self._width(c)
        zero, (shared, own) = c["zero"], self._optimized(c)
        # A rank has the state of whole parameters.
        largest = m.model_dim * m.vocab_size / c["tp"] * (self._ends(c) > 0)
        held = torch.where(zero >= 1, torch.maximum(shared / copies, largest), shared)
        stepped = torch.where(zero >= 2, dense / copies + experts / edp, held + own)
        return stepped, torch.where(zero == 1, torch.maximum(held, own), stepped)

    def _coded_messages(
        self, codecs: Tensor, numel: Tensor, ranks: Tensor, stride: Tensor
    ) -> Tensor:
        """Seconds to average so many gradients over ranks, in the formats of `codecs`."""
        num_bytes, encode, decode = self._codec_rates[:, codecs]
        rings = self._ring(ranks, stride, numel * num_bytes)
        # Ranks tell each other how long messages without a lost bit are.
        lengths = self._ring(ranks, stride, torch.zeros_like(numel))
        rings = rings + torch.where(codecs == GRADIENTS.index(LOSSLESS), lengths, 0.0)
        sizes = ranks.round().long()
        passes = torch.zeros(len(GRADIENTS), int(sizes.max()) + 1, 2, dtype=torch.float64)
        for i, size in itertools.product(_present(codecs), _present(sizes)):
            passes[i, size] = torch.tensor(codec_of(GRADIENTS[i]).passes(max(size, 1)))
        encodes, decodes = passes[codecs, sizes].unbind(1)
        coding = numel * (encodes * encode + decodes * decode)
        return 2.0 * self._measured("all_reduce") * rings + torch.where(sizes > 1, coding, 0.0)

    @functools.cached_property
    def _codec_rates(self) -> Tensor:
        """`[3, codecs]`: bytes of a gradient, and seconds to encode it and to decode it.

        At the size of a bucket. In proportion to the number of gradients, so that the mean over
        stages of what they take is that of the mean stage: `least` is a bound.
        """
        rows = [(float(self.job.itemsize), 0.0, 0.0)]
        costs, bucket = self.cluster.costs, _BUCKET // self.job.itemsize
        for name in GRADIENTS[1:]:
            codec, rate = codec_of(name), name
            if name == LOSSLESS:
                rate = rows_rate(name, self._dtype)
                share = self._lossless_share
                plain = bucket * self.job.itemsize
                if share is None:
                    share = sent_row_bytes(LOSSLESS, bucket, self._dtype) / plain
                num_bytes = share * self.job.itemsize
            else:
                num_bytes = codec.sent_bytes(bucket, 2) / bucket
            if costs is not None and self.has_rate(rate):
                encode, decode = (each / bucket for each in costs.codec_seconds(rate, bucket))
            else:
                # Gradients and codes, and of what is owed the old and the new.
                moved = self.job.itemsize + num_bytes
                encode = (moved + 8.0 * codec.feeds_back) / self.cluster.memory_bandwidth
                decode = moved / self.cluster.memory_bandwidth
            rows.append((num_bytes, encode, decode))
        return torch.tensor(rows, dtype=torch.float64).T

    def update(self, c: Columns) -> Tensor:
        """Seconds of the optimizer's step, at the rate of the memory."""
        dense, experts = self.parameters(c)
        copies, edp = self._data(c) * c["cp"], self._stage(c) / self._width(c)
        own = torch.where(c["zero"] >= 1, dense / copies + experts / edp, dense + experts)
        size = self.job.itemsize
        # AdamW reads and writes its state, reads the gradient and writes the weight.
        num_bytes = own * (2 * _state_bytes(size) + 2 * size) * self._measured("update")
        return torch.where(self._is_offloaded(c), 0.0, num_bytes / self.cluster.memory_bandwidth)

    def hop(self, c: Columns) -> Tensor:
        """Seconds of an activation from one stage to the next."""
        latency, bandwidth = self._link(2 * self._stage(c))
        num_bytes = self.tokens(c) * self.model.model_dim * self.job.itemsize
        return torch.where(c["pp"] > 1, latency + num_bytes / bandwidth, 0.0)

    def split(self, c: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Seconds of a stage's forward pass, gradients of inputs, and gradients of weights.

        Without the output: each of its three takes `output`. Exchanges are waited for, but in turn,
        where none is in these numbers.
        """
        total = sum(self.terms(c).values())
        assert isinstance(total, Tensor)
        if "turns" in c and bool(c["turns"].any()):
            total = torch.where(c["turns"] > 0, self.apart(c)[0], total)
        forward = total / (3.0 + self._again(c)[0] / self._layers(c)[0])
        return forward, total - 2.0 * forward, forward

    def bound(self, c: Columns) -> Tensor:
        """Seconds of a step at least: products of stages alike, without messages or idle ranks."""
        even = {**c, "balance": torch.ones_like(c["pp"])}
        each = 3.0 * (self.compute(self._alike(even)) + self.output(c) / c["pp"])
        return self.num_micro_batches(c) * each

    def _alike(self, c: Columns, again: float | Tensor = 0.0) -> Columns:
        """Stages that have the same share of layers and ends, a share of them computed again."""
        m, pp = self.model, c["pp"].double()
        ends = torch.where(c["pp"] > 1, 2.0 / pp, 1.0 if m.tied else 2.0)
        shares = {"layers": m.num_layers / pp, "moe": m.num_moe_layers / pp, "ends": ends}
        shares |= {"again": again * shares["layers"], "again_moe": again * shares["moe"]}
        return {**c, **shares}

    def least(self, c: Columns) -> Tensor:
        """Seconds of a step at least, whatever layers the stages have and compute again.

        Some of S stages takes t, the mean, or more, for each of M micro-batches, and runs forward
        for t / 3 of it at most. It begins when the stages in front of it have run forward, ends
        before they run backward, and waits for a first backward pass when it has as many
        micro-batches as its schedule lets it hold: M + 2 / 3 (S - 1) times t with 1F1B, M +
        1 / 3 (S - 1) where gradients of weights come later. All forward passes of GPipe are over
        before a backward pass begins: M + S - 1. The last rank of interleaved stages waits for one
        chunk of each other rank where all are alike, and takes M t otherwise.
        """
        whole = (c["schedule"] == SCHEDULES.index("zb-h1")) & (c["recompute"] == 1)
        alike = self._alike(c, whole.double())
        layers = sum(self.terms(alike).values())
        each = layers + 3.0 * self.output(c) / c["pp"]
        waits = torch.tensor([_WAITS[name] for name in SCHEDULES], dtype=torch.float64)
        idle = waits[c["schedule"]] * (c["pp"] - 1) * each
        m = self.model
        uneven = (m.num_layers % (c["pp"] * CHUNKS) > 0) | (m.num_moe_layers % m.num_layers > 0)
        chunks = (c["pp"] - 1) / CHUNKS * layers
        chunked = c["schedule"] == SCHEDULES.index("interleaved")
        idle = torch.where(chunked & ~uneven, chunks, idle)
        found = self.num_micro_batches(c) * each + idle
        if "turns" in c and bool(c["turns"].any()):
            found = torch.where(c["turns"] > 0, self._least_in_turn(c, alike), found)
        return found + self.ends(alike)

    def _least_in_turn(self, c: Columns, alike: Columns) -> Tensor:
        """Seconds that all micro-batches take at least where a rank computes beside exchanges.

        For each of M micro-batches some stage computes for w, the mean, or more, and the exchanges
        of some stage travel for e, one after the other: M max(w, e). With 1F1B a stage that holds
        one more micro-batch waits for w / 3 less than it else does: (M + 2 / 3 (S - 1) - 1 / 3) w.
        The first stage holds S + 1 micro-batches at most, of 1F1B and of ZB-H1, each from its
        forward pass there to its return, which takes what all stages compute and exchange for it,
        but for gradients of weights that come later: M S (w + e) / (S + 1).
        """
        work, exchanges = self.apart(alike)
        micro, pp, output = self.num_micro_batches(c), c["pp"], self.output(c) / c["pp"]
        w = work + 3.0 * output
        found = micro * w.maximum(exchanges)
        whole = c["schedule"] == SCHEDULES.index("1f1b")
        waits = ((2.0 * pp - 3.0) / 3.0).clamp(min=0.0)
        found = torch.where(whole, found.maximum((micro + waits) * w), found)
        late = work / (3.0 + alike["again"] / alike["layers"]) + output
        there = torch.where(whole, w, w - late) + exchanges
        held = micro.clamp(max=pp + 1)
        in_two = c["schedule"] == SCHEDULES.index("zb-h1")
        return torch.where(whole | in_two, found.maximum(micro * pp * there / held), found)

    def likely(self, c: Columns, again: Tensor) -> Tensor:
        """Seconds of a step whose stages have the best numbers of layers, if all are alike.

        The slowest stage has x layers, or is the last one with y of them and the output, which is
        worth w of them.

        Args:
            c: candidates.
            again: share of the layers that are computed again.
        """
        pp, count = c["pp"].double(), float(self.model.num_layers)
        mean = self._alike(c, again)
        layer = self._each(mean) * pp / count
        w = 3.0 * self.output(c) / layer
        even = (count + w) / pp
        found = torch.full_like(pp, torch.inf)
        for more in (0.0, 1.0, 2.0):
            x = even.ceil() + more
            fits = (pp - 1) * x + (x - w).floor().clamp(min=1.0) >= count
            found = torch.where(fits & (x >= 1 + w), found.minimum(x), found)
            y = ((even - w).floor() + more).clamp(min=1.0)
            fits = (pp - 1) * (y + w).floor() + y >= count
            found = torch.where(fits, found.minimum(y + w), found)
        slowest = torch.where(pp > 1, found, count + w) * layer
        late = torch.tensor([_FILLS[name] for name in SCHEDULES], dtype=torch.float64)
        fill = late[c["schedule"]] * (pp - 1) * even * layer
        return self.num_micro_batches(c) * slowest + fill + self.ends(mean)

    def _each(self, c: Columns) -> Tensor:
        """Seconds of a micro-batch on a stage, in turn as many as its place in the pipeline lets.

        Exchanges show where they take longer than the work that is beside them, and where the first
        stage holds S + 1 micro-batches: each takes S stages what they compute and exchange.
        """
        found = sum(self.terms(c).values())
        assert isinstance(found, Tensor)
        if "turns" not in c:
            return found
        work, exchanges = self.apart(c)
        in_order = (c["schedule"] == SCHEDULES.index("1f1b")) | (
            c["schedule"] == SCHEDULES.index("zb-h1")
        )
        there = (work + exchanges) * c["pp"] / (c["pp"] + 1)
        return torch.where((c["turns"] > 0) & in_order, found.maximum(there), found)

    def seconds(self, c: Columns) -> Tensor:
        """Seconds of a step by closed forms; hops of the pipeline are left to the simulation.

        In turn, exchanges show as far as nothing that could be beside them is long enough, and
        where the pipeline fills and drains; simulations have what a schedule leaves of them.
        """
        forward, inputs, weights = self.split(c)
        each, fill = forward + inputs + weights, c["pp"] - 1
        kind = c["schedule"]
        gap = torch.where(kind == SCHEDULES.index("interleaved"), each / CHUNKS, each)
        late = (forward + inputs - weights).clamp(min=0.0)
        gap = torch.where(kind == SCHEDULES.index("zb-h1"), late, gap)
        if "turns" in c:
            gap = gap + torch.where(c["turns"] > 0, self.apart(c)[1], 0.0)
            each = torch.where(c["turns"] > 0, self._each(c), each)
        passes = self.num_micro_batches(c) * (each + 3.0 * self.output(c))
        return passes + fill * gap + self.ends(c)

    def in_flight(self, c: Columns) -> Tensor:
        """Micro-batches whose activations the first rank holds, in stages of a rank."""
        if "in_flight" in c:
            return c["in_flight"]
        pp, micro = c["pp"].double(), self.num_micro_batches(c)
        kind = c["schedule"]
        more = c.get("turns", torch.zeros_like(c["pp"]))
        found = torch.minimum(pp + more, micro)
        found = torch.where(kind == SCHEDULES.index("gpipe"), micro, found)
        chunks = torch.minimum(micro, (2 * (pp - 1) + (CHUNKS - 1) * pp + 1 + more) / CHUNKS)
        return torch.where(kind == SCHEDULES.index("interleaved"), chunks, found)

    def memory_terms(self, c: Columns) -> Columns:
        """Bytes of the fullest rank when it is fullest, by what they are for.

        That is at the loss, in the backward pass of the last or the first layer, where gradients
        are averaged, or in the optimizer's step, whichever takes most.
        """
        m, size = self.model, self.job.itemsize
        dense, experts = self.parameters(c)
        copies, edp = self._data(c) * c["cp"], self._stage(c) / self._width(c)
        is_fsdp = c["zero"] >= 2
        whole = torch.where(is_fsdp, dense / copies + experts / edp, dense + experts)
        here = ~self._is_offloaded(c)
        stepped, one_by_one = (numel * here for numel in self._stepped(c))
        fixed = {"weights": size * whole, "optimizer": _state_bytes(size) * stepped}
        kept, copied = self._coded_memory[:, c["gradients"]]
        if bool(kept.any()):
            fixed["feedback"] = kept * (_owed(dense, copies) + _owed(experts, edp))
        phases = self._phases(c, size * (dense + experts), size * whole)
        # A bucket of gradients is copied for its message, and AdamW takes a root of each moment.
        groups = torch.maximum(dense, experts) if m.num_experts else dense
        averages = (copies > 1) & ~is_fsdp & (self.job.local_steps == 1)
        bucket = torch.where(averages, (size * groups).clamp(max=_BUCKET), 0.0)
        # Messages with a codec are all under way at once.
        bucket = torch.where(c["gradients"] > 0, copied * (dense + experts), bucket)
        fixed["last round"], travelling = self._round_memory(c)
        for temporary in (bucket, size * one_by_one, travelling):
            phases.append({"gradients": size * whole, "temporary": temporary})
        names = ("gradients", "gathered", "activations", "temporary", "logits")
        none = torch.zeros_like(dense)
        table = torch.stack(
            [torch.stack([phase.get(name, none) for name in names]) for phase in phases]
        )
        fullest = table.sum(1).argmax(0)
        found = table.gather(0, fullest.expand(1, len(names), -1))[0]
        return fixed | dict(zip(names, found, strict=True))

    def _round_memory(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Bytes that local steps keep from round to round, and those of the end of a round."""
        numel, size = self._averaged(c), self.job.itemsize
        if self.job.local_steps == 1:
            return torch.zeros_like(numel), torch.zeros_like(numel)
        codec, ranks = round_codec(self.job.local_codec), self._data(c)
        owed = torch.zeros_like(numel)
        for count in _present(ranks.long()):
            owed = torch.where(ranks == count, codec.owed(count) * numel, owed)
        # Weights of the last round, and the outer momentum.
        kept = (1 + codec.has_momentum) * size * numel + owed
        # Beside the mean there are the worker's own weights, and the mean in 16 bits.
        own = (1 + (size < 4)) * size
        return kept, max(codec.making, codec.travelling + own) * numel

    def _phases(self, c: Columns, weights: Tensor, held: Tensor) -> list[Columns]:
        """Bytes at the loss, when FSDP2 gathers, and in the last layer's and the first's backward.

        Args:
            c: candidates.
            weights: bytes of a rank's weights before ZeRO.
            held: of those that it holds.
        """
        m, size, tokens = self.model, self.job.itemsize, self.tokens(c)
        layers, moe = self._layers(c)
        again, again_moe = self._again(c)
        is_fsdp = c["zero"] >= 2
        is_last = c.get("loss", torch.ones_like(layers))
        kept_dense, kept_moe, rise = self._layer_numbers(c)
        kept = (layers - moe) * kept_dense + moe * kept_moe
        # Ranks of a tp group have hidden states and logits whole.
        stream = tokens * c["tp"] * m.model_dim * size
        # Layers keep their inputs and run again one by one. Where the backward pass is in two, a
        # stage keeps its input and runs again whole.
        in_two = c["schedule"] == SCHEDULES.index("zb-h1")
        as_one = in_two & (again > 0)
        stay, stay_moe = layers - again, moe - again_moe
        each = (stay - stay_moe) * kept_dense + stay_moe * kept_moe + again * stream
        each = torch.where(as_one, stream, each)
        one = torch.where(moe > 0, kept_moe, kept_dense)
        # In turn two passes may be underway, each with a layer that it computes again.
        run = torch.where(as_one, kept, one) * (again > 0) * (1 + c.get("turns", 0))
        # Between the two parts of a backward pass all activations are there, and the gradients of
        # what products gave.
        in_flight = self.in_flight(c)
        most = in_flight.minimum(c["pp"].double())
        late = c.get("late", torch.where(in_two & (c["pp"] > 1), most, 0.0))
        due = kept + self._due(layers, moe, c)
        due = due + tokens * c["tp"] * m.vocab_size * size * is_last
        every = (in_flight - late) * each + late * due
        first = every - each + torch.where(again > 0, run + stream, one)
        first = torch.where(late > 0, every, first)
        run = torch.where(late > 0, 0.0, run)
        # Embedding and output are whole from the forward pass to the end of the backward pass.
        words = m.model_dim * m.vocab_size * size / c["tp"]
        ends = words * self._ends(c)
        output = words * (self._ends(c) > 0)
        layer = (weights - ends) / layers
        up = 1 + m.gated_experts if m.num_experts else 1 + m.gated
        # Gradients of a layer's down projection are there when its up projection's are made.
        made = layer * moe / layers / (1 + up)
        accumulates = self.num_micro_batches(c) > 1
        before = torch.where(accumulates, held, 0.0)
        # FSDP2 has a layer's weights, those of the next one on their way, which Gloo has twice as
        # they arrive, and later a copy of the last one's gradients on theirs; with ZeRO 2 the
        # weights of all.
        is_whole = c["zero"] == 2
        arriving = torch.where(is_whole, weights, ends + 3 * layer)
        moving = torch.where(is_whole, weights + layer, ends + layers.clamp(max=3) * layer)
        at_loss = torch.where(is_whole, weights, ends)
        new = torch.where(accumulates & ~is_fsdp, 0.0, output + made)
        all_but = torch.where(accumulates | is_fsdp, held, held - up * made)
        return [
            {
                "gradients": before,
                "gathered": at_loss * is_fsdp,
                "activations": every + 3 * stream,
                # Logarithms of probabilities, their gradients and those of logits, in float32.
                "logits": 12.0 * tokens * c["tp"] * m.vocab_size * is_last,
            },
            {
                "gradients": before + output,
                "gathered": arriving * is_fsdp,
                "activations": every,
                "temporary": 2 * stream,
            },
            {
                "gradients": before + new,
                "gathered": moving * is_fsdp,
                "activations": every + run,
                "temporary": rise + 2 * stream,
            },
            {
                "gradients": all_but + torch.where(is_fsdp, output + made, 0.0),
                "gathered": (ends + 2 * layer) * is_fsdp,
                "activations": first,
                "temporary": rise + 2 * stream,
            },
        ]

    def _due(self, layers: Tensor, moe: Tensor, c: Columns) -> Tensor:
        """Bytes of the gradients of what a stage's products and norms gave, of a micro-batch."""
        m, size, tokens = self.model, self.job.itemsize, self.tokens(c)
        rows, shards = self._rows(c)
        experts = (1 + m.gated_experts) * m.ffn_dim / shards + m.model_dim
        experts = rows * experts + m.num_experts
        experts = experts + (1 + m.gated_experts) * m.shared_ffn_dim
        ffn = (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) + m.model_dim
        attention = m.heads_dim + 2 * m.kv_dim + 3 * m.model_dim * c["tp"]
        return tokens * size * (layers * attention + (layers - moe) * ffn + moe * experts)

    def _rows(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Rows of the fullest rank for each of its tokens, and shards of an expert."""
        shards = self._width(c) / c["ep"]
        return self.model.top_k * shards * self._loads(c, "peak_rows"), shards

    def _layer_numbers(self, c: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes that a layer keeps for its backward pass, and by how much that pass rises above.

        Of a dense layer and of one with experts; it rises by that of experts where there are any.
        """
        m, size, tokens = self.model, self.job.itemsize, self.tokens(c)
        rows, shards = self._rows(c)
        ffn_dim = m.ffn_dim / shards
        # Rows that come back are kept to be weighted, or are weighted where the experts are.
        back = torch.where(c["combine"] == COMBINES.index("reduced"), rows, m.top_k * shards)
        up = 1 + m.gated_experts
        moe = rows * ((m.model_dim + (up + 1) * ffn_dim) * size + 28)
        moe = moe + back * m.model_dim * size
        # Unfused: gate, up, activation and product.
        moe = moe + 2 * up * m.shared_ffn_dim * size + 4.0 * m.num_experts
        ffn = 2 * (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) * size
        # Two norms of three numbers each, in 16 bits with their input in float32; queries, keys,
        # values, what attention gives and a float32 of each head.
        norms = (6 * m.model_dim * size + (8 * m.model_dim if size < 4 else 0)) * c["tp"]
        attention = norms + (2 * m.heads_dim + 2 * m.kv_dim) * size + 4 * m.num_heads
        # Gradients of up projection and activation; the activation and what came back are gone.
        if m.num_moe_layers:
            rise = tokens * (rows * up * ffn_dim - back * m.model_dim) * size
        else:
            rise = tokens * (1 + m.gated) * (m.dense_ffn_dim or m.ffn_dim) * size
        # Weights of experts that came lie behind a copy of a rank's own.
        came = self._loads(c, "peak_moved")
        held = torch.where(came > 0, came + m.num_experts / c["ep"], 0.0)
        copies = held * m.expert_parameters * size
        return tokens * (attention + ffn), tokens * (attention + moe) + copies, rise

    @functools.cached_property
    def _coded_memory(self) -> Tensor:
        """`[2, codecs]`: bytes that are kept of what a gradient is owed, and of it on its way.

        On its way it is copied with others, and coded beside that: as counted on two ranks.
        """
        rows, size = [(0.0, 0.0)], self.job.itemsize
        for name in GRADIENTS[1:]:
            codec = codec_of(name)
            if codec.feeds_back:
                # What is owed and what was before the step, in float32.
                rows.append((8.0, 8.0))
            elif codec.plain:
                rows.append((0.0, 10.0 if size == 4 else 4.0))
            else:
                rows.append((0.0, 2.0 * size + 0.5))
        return torch.tensor(rows, dtype=torch.float64).T

    def memory(self, c: Columns) -> Tensor:
        """Bytes of the fullest rank, with the margin."""
        total = sum(self.memory_terms(c).values())
        assert isinstance(total, Tensor)
        return MARGIN * total


def exchange_bytes(
    topk_idx_TK: Sequence[Tensor],
    rank: int,
    *,
    num_experts: int,
    model_dim: int,
    dispatcher: str = "alltoall",
    wire: Wire | str | None = None,
    combine: str = "exact",
    dtype: torch.dtype = torch.float32,
    weighed: bool = True,
    backward: bool = False,
) -> int:
    """Bytes of rows that a rank sends through a layer, to experts and back, for this routing.

    As `count_traffic` counts them, with the indices that travel beside tokens and the weights.

    Args:
        topk_idx_TK: of each rank, the experts `[T, K]` of its tokens; -1 for dropped slots.
        rank: that sends.
        num_experts: E.
        model_dim: D.
        dispatcher: "alltoall", "dedup" or "allgather".
        wire: see `MoELayer`.
        combine: "exact" or "reduced", see `MoELayer`.
        dtype: of rows.
        weighed: the experts multiply by the weights, as those of `MoELayer` do; "reduced" always.
        backward: of the gradients in the place of the forward pass.

    Raises:
        ValueError: dispatcher is none of these; or wire has "lossless", whose messages are as long
            as the data make them.
    """
    ways = ("alltoall", "dedup", "allgather")
    if dispatcher not in ways:
        raise ValueError(f"exchange_bytes: expected dispatcher to be in {ways}, got {dispatcher!r}")
    ranks, made = len(topk_idx_TK), Wire.of("exchange_bytes", wire)
    if LOSSLESS in astuple(made):
        raise ValueError(
            f"exchange_bytes: expected wire to have formats of rows of one length, got {wire!r}: "
            "how long lossless messages are depends on the numbers in them"
        )
    owner = [idx.div(num_experts // ranks, rounding_mode="floor") for idx in topk_idx_TK]
    others = [p for p in range(ranks) if p != rank]

    def rows(source: int, target: int, once: bool) -> int:
        hit = owner[source] == target
        return int((hit.any(1) if once else hit).sum())

    def sent(once: bool) -> int:
        return sum(rows(rank, p, once) for p in others)

    def returned(once: bool) -> int:
        return sum(rows(p, rank, once) for p in others)

    once, top_k = dispatcher != "alltoall", topk_idx_TK[rank].shape[1]
    weight = sum_dtype(dtype).itemsize
    formats = (made.backward_dispatch, made.backward_combine)
    if not backward:
        formats = (made.dispatch, made.combine)
    row, row_back = (sent_row_bytes(each, model_dim, dtype) for each in formats)
    weighed = weighed or combine == "reduced"
    back = returned(once and combine == "reduced") * row_back
    if not once:
        weights = weight if weighed else 0
        if backward:
            return sent(False) * row + back + returned(False) * weights
        return sent(False) * (row + weights) + back
    if backward:
        return sent(True) * row + back + returned(True) * top_k * weight * weighed
    beside = top_k * (2 + weight)
    if dispatcher == "allgather":
        return (ranks - 1) * max(map(len, topk_idx_TK)) * (row + beside) + back
    return sent(True) * (row + beside) + back


def gradient_bytes(buckets: Sequence[int], num_ranks: int) -> int:
    """Bytes that leave a rank when so many bytes of gradients are averaged, bucket by bucket."""
    return sum(all_reduce_bytes(each, num_ranks) for each in buckets)


def _owed(numel: Tensor, ranks: Tensor) -> Tensor:
    """Numbers that a rank owes, to its gradients and to its shard of the sum over ranks."""
    return torch.where(ranks > 1, numel * (1 + 1 / ranks), 0.0)


def _state_bytes(itemsize: int) -> float:
    """AdamW's moments of a parameter, with float32 weights where training is in less."""
    return 8.0 if itemsize == 4 else 12.0


def _present(column: Tensor) -> list[int]:
    """Values of a column of small numbers, ascending."""
    found: list[int] = torch.bincount(column).nonzero().view(-1).tolist()
    return found


def divisors(number: int) -> list[int]:
    """Of a number, ascending."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)})
