"""Sizes from which all costs of candidates follow: tokens, layers, ranks, parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext._checks import check_rule
from moe_ext.attention.layouts import make_layout
from moe_ext.attention.recurrent.functional import conv_sent_bytes, most_sent_bytes
from moe_ext.planner.axes import AGAIN, OFFLOADS, PARTS, SCHEMES, Columns, by_values
from moe_ext.planner.cluster import ClusterSpec
from moe_ext.planner.job import Job
from moe_ext.planner.presets import LayerParts, ModelSpec

# Bytes of a bucket of `sync_gradients`.
BUCKET = 25 * 2**20
# Bytes per parameter that `CPUAdamW` keeps: two moments and the weight, in float32.
HOST_STATE = 12.0


class SharedStates(NamedTuple):
    """The way in which ranks share the recurrence of a sequence, as scheme "auto" chooses.

    Attributes:
        scheme: "state" or "heads"; "" if layers have no states, or sequences are not shared.
        num_bytes: most bytes that a rank sends in a pass of one sequence.
        messages: number of consecutive messages for which a rank waits.
    """

    scheme: str
    num_bytes: float
    messages: float


def state_bytes(itemsize: int) -> float:
    """Return the bytes per parameter of AdamW's state, with float32 weights for 16-bit training."""
    return 8.0 if itemsize == 4 else 12.0


class Sizes:
    """Sizes of candidates of one job, and the links and rates for them.

    Columns of `STAGE` give the layers of a candidate's stage. Without such columns a stage has as
    many layers as the largest stage of an even division, with the mean share of each part.

    Args:
        model: sizes of the model.
        cluster: processors and links.
        job: a step of training.

    Raises:
        ValueError: a dtype has no rate, or the cluster joins fewer ranks.
    """

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        ranks, most = job.num_ranks, cluster.levels[-1].size
        rule = f"at most the {most} that cluster.levels join"
        check_rule("plan", "num_ranks", ranks, rule, ranks <= most)
        if isinstance(job.load, tuple):
            job.counts(model.num_experts)
        self._states: dict[tuple[int, str], SharedStates] = {}
        rates = [(level.latency, level.bandwidth) for level in cluster.levels]
        self._latency, self._bandwidth = torch.tensor(rates, dtype=torch.float64).unbind(1)
        layers = job.layer_dtype
        for dtype in (job.dtype, job.dtype if layers is None else layers):
            if dtype not in cluster.flops:
                raise ValueError(
                    f"plan: expected cluster.flops to have {dtype}, got {sorted(cluster.flops)}"
                )

    def rate(self, dtype: str | None = None) -> float:
        """Return the operations per second of products in `dtype`; None for those of layers."""
        named = dtype or self.job.layer_dtype or self.job.dtype
        return self.cluster.flops[named] * self.cluster.efficiency

    def measured(self, part: str, unknown: float = 1.0) -> float:
        """Return the measured time of a part of a step over its formula, or `unknown`."""
        return self.cluster.measured.get(part, unknown)

    def link(self, span: Tensor) -> tuple[Tensor, Tensor]:
        """Return latency and bandwidth of the level that joins `span` consecutive ranks."""
        levels = self.cluster.levels
        i = torch.zeros(span.shape, dtype=torch.int64)
        # A loop over the levels replaces `bucketize`, which uses several threads and waits for them
        # if they are busy.
        for level in levels[:-1]:
            i += span > level.size
        return self._latency[i], self._bandwidth[i]

    def ring(self, size: Tensor, stride: Tensor, num_bytes: Tensor) -> Tensor:
        """Return the seconds of an all-gather or reduce-scatter over a ring.

        Args:
            size: ranks of the ring.
            stride: distance between neighbours, in ranks.
            num_bytes: bytes of the whole tensor.
        """
        latency, bandwidth = self.link(size * stride)
        # A ring that leaves a node uses the outer links of all of its ranks in the node.
        inner = self.cluster.levels[0]
        inside = (inner.size / stride.double()).clamp(min=1.0).minimum(size.double())
        many = (bandwidth * inside).clamp(max=inner.bandwidth)
        bandwidth = torch.where(size * stride > inner.size, many, bandwidth)
        return (size - 1) * latency + (size - 1) / size * num_bytes / bandwidth

    def tokens(self, c: Columns) -> Tensor:
        """Return the tokens of a rank in a micro-batch."""
        return c["micro_batch"] * self.job.seq_len / (c["cp"] * c["tp"])

    def num_micro_batches(self, c: Columns) -> Tensor:
        """Return the number of micro-batches of a step."""
        return self.job.global_batch / (self.data_ranks(c) * c["micro_batch"])

    def stage_ranks(self, c: Columns) -> Tensor:
        """Return the number of ranks of a stage."""
        return self.job.num_ranks / c["pp"]

    def data_ranks(self, c: Columns) -> Tensor:
        """Return the number of ranks of a stage with different data."""
        return self.stage_ranks(c) / (c["tp"] * c["cp"])

    @staticmethod
    def width(c: Columns) -> Tensor:
        """Return the number of ranks over which experts and their shards lie."""
        return c["ep"] * c["etp"]

    def copies(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the numbers of ranks with copies of dense parameters, and of experts."""
        return self.data_ranks(c) * c["cp"], self.stage_ranks(c) / self.width(c)

    def layers(self, c: Columns) -> LayerParts:
        """Return the number of layers of a stage, and of those with each part."""
        if "layers" in c:
            return LayerParts(*(c[name] for name in PARTS))
        m = self.model
        layers = torch.ceil(m.num_layers / c["pp"].double())
        return LayerParts(*(layers * (count / m.num_layers) for count in m.all_parts))

    def again(self, c: Columns) -> LayerParts:
        """Return the same numbers as `layers`, for layers that are computed again."""
        if AGAIN[0] in c:
            return LayerParts(*(c[name] for name in AGAIN))
        return LayerParts(*(count * c["recompute"] for count in self.layers(c)))

    def alike(self, c: Columns, again: float | Tensor = 0.0) -> Columns:
        """Return columns of equal stages, each with 1 / pp of the layers and of the ends.

        Args:
            c: candidates.
            again: share of the layers that are computed again.
        """
        m, pp = self.model, c["pp"].double()
        ends = torch.where(c["pp"] > 1, 2.0 / pp, 1.0 if m.tied else 2.0)
        here = [count / pp for count in m.all_parts]
        shares = dict(zip(PARTS, here, strict=True))
        shares |= {name: again * count for name, count in zip(AGAIN, here, strict=True)}
        return {**c, **shares, "ends": ends}

    def word_matrices(self, c: Columns) -> Tensor:
        """Return the number of embedding and output matrices of a rank.

        The first stage has the embedding, and the last stage the output.
        """
        if "ends" in c:
            return c["ends"]
        return torch.where(c["pp"] > 1, 1.0, 1.0 if self.model.tied else 2.0)

    def norms(self, here: LayerParts) -> Any:
        """Return the number of norms of layers, each of which has a residual."""
        return (2 - self.model.one_part) * here.layers

    def layout(self, scheme: str) -> str:
        """Return the layout of sequences that ranks share.

        A ring of attention needs "zigzag" for equal work of ranks. Otherwise recurrences prefer
        "contiguous", in which states pass from one rank to the next.
        """
        is_ring = self.model.all_parts.attention > 0 and scheme == "ring"
        return "zigzag" if is_ring or self.model.recurrent is None else "contiguous"

    def states(self, cp: int, scheme: str) -> SharedStates:
        """Return the way in which recurrent layers share a sequence, for a scheme of attention.

        Recurrent layers use scheme "auto", which sends the fewest bytes.
        """
        r, name = self.model.recurrent, self.layout(scheme)
        if r is None or cp == 1:
            return SharedStates("", 0.0, 0.0)
        if (cp, name) not in self._states:
            layout, ranks = make_layout(name, self.job.seq_len, cp), range(cp)
            # With "zigzag", positions move to a contiguous layout and back, one message each.
            moves, sent = 2.0 * (name != "contiguous"), 0
            found = SharedStates("", 0.0, 0.0)
            if r.taps:
                conv: dict[str, Any] = {
                    "channels": r.channels,
                    "taps": r.taps,
                    "itemsize": self.job.itemsize,
                }
                sent = max(conv_sent_bytes(layout, rank, batch=1, **conv) for rank in ranks)
                found = SharedStates("", float(sent), 1.0 + moves)
            if r.num_heads:
                most = most_sent_bytes(layout, batch=1, **r.sent_sizes)
                of_states = min(most, key=most.__getitem__)
                messages = moves + cp.bit_length() if of_states == "state" else 2.0
                sent += most[of_states]
                found = SharedStates(of_states, float(sent), found.messages + messages)
            self._states[cp, name] = found
        return self._states[cp, name]

    def of_states(self, c: Columns) -> tuple[Tensor, ...]:
        """Return the numbers of `states` for candidates: 1 for "state", bytes, and messages."""

        def row(cp: int, scheme: int) -> tuple[float, float, float]:
            found = self.states(cp, SCHEMES[scheme])
            return float(found.scheme == "state"), found.num_bytes, found.messages

        return by_values([c["cp"], c["scheme"]], row).unbind(1)

    def parameters(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the dense parameters and the parameters of experts of a rank, before ZeRO."""
        m, here = self.model, self.layers(c)
        words = m.model_dim * m.vocab_size

        def held(parts: LayerParts) -> Any:
            found = parts.attention * m.attention_parameters() + parts.dense * m.dense_layer_ffn()
            recurrent = m.recurrent.parameters() if m.recurrent else 0
            return found + parts.recurrent * recurrent + parts.moe * m.shared_parameters()

        # Norms, biases, positions and second attentions are spread evenly over layers.
        rest = m.dense_parameters() - words * (1 if m.tied else 2) - held(m.all_parts)
        dense = held(here) + here.layers * (rest / m.num_layers)
        experts = m.expert_parameters * m.num_experts / self.width(c)
        return (dense + words * self.word_matrices(c)) / c["tp"], experts * here.moe

    def averaged(self, c: Columns) -> Tensor:
        """Return the parameters of a rank that rounds average.

        Experts that no other rank holds are not averaged.
        """
        dense, experts = self.parameters(c)
        width = self.width(c)
        return dense + torch.where((width == 1) | (self.stage_ranks(c) > width), experts, 0.0)

    def is_offloaded(self, c: Columns) -> Tensor:
        """Return True if the optimizer is on the host."""
        return c["offload"] == OFFLOADS.index("host")

    def optimized(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return a rank's parameters whose state ZeRO 1 divides, and all others.

        As in `Applied.optimizers`, ZeRO 1 divides the state of dense parameters. Experts that do
        not lie over ranks count as dense.
        """
        dense, experts = self.parameters(c)
        spread = self.width(c) > 1
        return dense + torch.where(spread, 0.0, experts), torch.where(spread, experts, 0.0)

    def stepped(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Return the parameters of a rank's optimizer, and the most that one optimizer steps."""
        m = self.model
        dense, experts = self.parameters(c)
        copies, edp = self.copies(c)
        zero, (shared, own) = c["zero"], self.optimized(c)
        # ZeRO 1 assigns whole parameters to ranks, so the rank with the embedding has at least it.
        largest = m.model_dim * m.vocab_size / c["tp"] * (self.word_matrices(c) > 0)
        held = torch.where(zero >= 1, torch.maximum(shared / copies, largest), shared)
        stepped = torch.where(zero >= 2, dense / copies + experts / edp, held + own)
        return stepped, torch.where(zero == 1, torch.maximum(held, own), stepped)


class CostPart:
    """Base class of the parts of a cost model, which compute with `Sizes`."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.model, self.cluster, self.job = sizes.model, sizes.cluster, sizes.job
