"""Sizes of candidates that all of their costs are made of: tokens, layers, ranks, parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.planner.axes import OFFLOADS, Columns
from moe_ext.planner.cluster import ClusterSpec
from moe_ext.planner.job import Job
from moe_ext.planner.presets import ModelSpec

# Bytes of a message of `sync_gradients`.
BUCKET = 25 * 2**20
# Bytes of a parameter that `CPUAdamW` keeps: two moments and the weight, in float32.
HOST_STATE = 12.0


def state_bytes(itemsize: int) -> float:
    """AdamW's moments of a parameter, with float32 weights where training is in less."""
    return 8.0 if itemsize == 4 else 12.0


class Sizes:
    """Sizes of candidates of one job, and the links and rates that they meet.

    Without more columns a stage has as many layers as the largest one of an even division, with
    experts in as many of them as on the mean. Columns of `STAGE` say otherwise.

    Args:
        model: sizes.
        cluster: processors and links.
        job: a step.

    Raises:
        ValueError: a dtype has no rate, or the cluster joins fewer ranks.
    """

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        ranks = job.num_ranks
        if ranks > cluster.levels[-1].size:
            raise ValueError(
                f"plan: expected num_ranks to be at most the {cluster.levels[-1].size} that "
                f"cluster.levels join, got {ranks}"
            )
        layers = job.layer_dtype
        for dtype in (job.dtype, job.dtype if layers is None else layers):
            if dtype not in cluster.flops:
                raise ValueError(
                    f"plan: expected cluster.flops to have {dtype}, got {sorted(cluster.flops)}"
                )

    def rate(self, dtype: str | None = None) -> float:
        """Operations a second of products; of layers without `dtype`."""
        named = dtype or self.job.layer_dtype or self.job.dtype
        return self.cluster.flops[named] * self.cluster.efficiency

    def measured(self, part: str, unknown: float = 1.0) -> float:
        """Measured time of a part of a step over its formula."""
        return self.cluster.measured.get(part, unknown)

    def link(self, span: Tensor) -> tuple[Tensor, Tensor]:
        """Latency and bandwidth between ranks that reach over so many."""
        levels = self.cluster.levels
        ends = torch.tensor([float(level.size) for level in levels[:-1]], dtype=torch.float64)
        i = torch.bucketize(span.double(), ends)
        latency = torch.tensor([level.latency for level in levels], dtype=torch.float64)
        bandwidth = torch.tensor([level.bandwidth for level in levels], dtype=torch.float64)
        return latency[i], bandwidth[i]

    def ring(self, size: Tensor, stride: Tensor, num_bytes: Tensor) -> Tensor:
        """Seconds of an all-gather or reduce-scatter of so many bytes in all."""
        latency, bandwidth = self.link(size * stride)
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
        return self.job.global_batch / (self.data_ranks(c) * c["micro_batch"])

    def stage_ranks(self, c: Columns) -> Tensor:
        """Ranks of a stage."""
        return self.job.num_ranks / c["pp"]

    def data_ranks(self, c: Columns) -> Tensor:
        """Ranks with data of their own."""
        return self.stage_ranks(c) / (c["tp"] * c["cp"])

    @staticmethod
    def width(c: Columns) -> Tensor:
        """Ranks of an expert-parallel group."""
        return c["ep"] * c["etp"] if "etp" in c else c["ep"]

    def copies(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Ranks that hold the same dense parameters, and those that hold the same experts."""
        return self.data_ranks(c) * c["cp"], self.stage_ranks(c) / self.width(c)

    def layers(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Layers of a stage, and those of them with experts."""
        if "layers" in c:
            return c["layers"], c["moe"]
        m = self.model
        layers = torch.ceil(m.num_layers / c["pp"].double())
        return layers, layers * (m.num_moe_layers / m.num_layers)

    def again(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Layers of a stage that are computed again, and those of them with experts."""
        if "again" in c:
            return c["again"], c["again_moe"]
        layers, moe = self.layers(c)
        return layers * c["recompute"], moe * c["recompute"]

    def word_matrices(self, c: Columns) -> Tensor:
        """Matrices of words of a rank: a first stage has the embedding, a last one the output."""
        if "ends" in c:
            return c["ends"]
        return torch.where(c["pp"] > 1, 1.0, 1.0 if self.model.tied else 2.0)

    def parameters(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Parameters of a rank before ZeRO: dense ones and those of experts."""
        m = self.model
        layers, moe = self.layers(c)
        words = m.model_dim * m.vocab_size
        ffn = (m.num_layers - m.num_moe_layers) * m.dense_layer_ffn()
        ffn += m.num_moe_layers * m.shared_parameters()
        rest = (m.dense_parameters() - words * (1 if m.tied else 2) - ffn) / m.num_layers
        dense = layers * rest + (layers - moe) * m.dense_layer_ffn() + moe * m.shared_parameters()
        experts = m.expert_parameters * m.num_experts / self.width(c)
        return (dense + words * self.word_matrices(c)) / c["tp"], experts * moe

    def averaged(self, c: Columns) -> Tensor:
        """Parameters of a rank that rounds average: not of experts that no other rank holds."""
        dense, experts = self.parameters(c)
        width = self.width(c)
        return dense + torch.where((width == 1) | (self.stage_ranks(c) > width), experts, 0.0)

    def is_offloaded(self, c: Columns) -> Tensor:
        """True where the optimizer is on the host."""
        return c["offload"] == OFFLOADS.index("host")

    def optimized(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Parameters of a rank whose state ZeRO 1 shares, and the others.

        It shares that of dense parameters alone, as `Applied.optimizers` does: experts that are not
        spread are among them.
        """
        dense, experts = self.parameters(c)
        spread = self.width(c) > 1
        return dense + torch.where(spread, 0.0, experts), torch.where(spread, experts, 0.0)

    def stepped(self, c: Columns) -> tuple[Tensor, Tensor]:
        """Parameters that a rank's optimizer steps, and those that it steps at once."""
        m = self.model
        dense, experts = self.parameters(c)
        copies, edp = self.copies(c)
        zero, (shared, own) = c["zero"], self.optimized(c)
        # A rank has the state of whole parameters.
        largest = m.model_dim * m.vocab_size / c["tp"] * (self.word_matrices(c) > 0)
        held = torch.where(zero >= 1, torch.maximum(shared / copies, largest), shared)
        stepped = torch.where(zero >= 2, dense / copies + experts / edp, held + own)
        return stepped, torch.where(zero == 1, torch.maximum(held, own), stepped)


class CostPart:
    """A part of the costs of candidates, by their sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.model, self.cluster, self.job = sizes.model, sizes.cluster, sizes.job
