"""Rates of this machine, measured with one layer of the model that is to be planned."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.cost_table import CostTable, least_seconds
from moe_ext.distributed.groups import group_size
from moe_ext.distributed.link import link_of, max_over_ranks
from moe_ext.nn import MoELayer
from moe_ext.planner.cluster import ClusterSpec, Level
from moe_ext.planner.cost import CostModel, Job
from moe_ext.planner.presets import ModelSpec
from moe_ext.planner.search import columns_of

# A layer with more experts is measured with so many: the others would only take memory.
MAX_EXPERTS = 16
_REPEATS = 3


class _Layer(nn.Module):
    """A decoder layer of a model's sizes, without the scores of its attention."""

    def __init__(self, m: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.norms = nn.ModuleList(
            nn.RMSNorm(m.model_dim, device=device, dtype=dtype) for _ in range(2)
        )
        self.query, self.out = linear(m.model_dim, m.heads_dim), linear(m.heads_dim, m.model_dim)
        self.keys = linear(m.model_dim, 2 * m.kv_dim)
        gated = m.gated_experts if m.num_experts else m.gated
        # A dense layer is a layer of one expert that every token chooses.
        self.experts = MoELayer(
            m.model_dim,
            m.ffn_dim if m.num_experts else m.dense_ffn_dim or m.ffn_dim,
            max(1, m.num_experts),
            max(1, m.top_k),
            activation="swiglu" if gated else "gelu",
            shared_ffn_dim=m.shared_ffn_dim if m.num_experts else 0,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Projections, residuals and experts."""
        inner = self.norms[0](x)
        x = x + self.out(self.query(inner)) + self.keys(inner).sum(1, keepdim=True)
        out: Tensor = x + self.experts(self.norms[1](x))
        return out


def _pass(layer: nn.Module, x: Tensor) -> None:
    layer(x).sum().backward()


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> None:
    out = nn.functional.scaled_dot_product_attention(
        query, keys, values, is_causal=True, enable_gqa=True
    )
    out.sum().backward()


def measure_cluster(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    dtype: str = "bfloat16",
    seq_len: int = 512,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
) -> ClusterSpec:
    """A cluster with the rates of this machine, for plans of this model.

    A copy gives the rate of the memory; a tiny layer the time of launches; a layer of the model's
    sizes, forward and backward, that of products: what it takes beyond what it reads and writes;
    and fused attention of one sequence that of scores. Ranks of a group measure at the same time,
    so that cores which they share are shared, and the slowest one's numbers count.

    Args:
        model: whose layers are measured, with 16 experts at most.
        cluster: for what is not measured: memory, and links without a group.
        dtype: of products; the others of the cluster are left out.
        seq_len: tokens of a sequence.
        device: that is measured.
        group: ranks whose link is measured as the cluster's only level, joined by one switch.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    on, kind = torch.device(device), getattr(torch, dtype)
    experts = min(model.num_experts, max(MAX_EXPERTS, 2 * model.top_k))
    one = replace(
        model, num_layers=1, num_moe_layers=min(1, model.num_moe_layers), num_experts=experts
    )
    tiny = replace(one, model_dim=16, ffn_dim=16, num_heads=1, num_kv_heads=1, head_dim=16)
    tiny = replace(tiny, shared_ffn_dim=16 if model.shared_ffn_dim else 0, dense_ffn_dim=None)
    tiny = replace(tiny, latent=())
    least = functools.partial(least_seconds, device=on)
    table = CostTable.measure(device=on)
    small, layer = _Layer(tiny, on, kind), _Layer(one, on, kind)
    x_small = torch.randn(4, 16, device=on, dtype=kind)
    x = torch.randn(seq_len, one.model_dim, device=on, dtype=kind, requires_grad=True)
    heads, wide = model.num_heads, max(1, model.scores_dim // model.num_heads)
    kv_heads = model.num_kv_heads or heads
    attended = [
        torch.randn(1, n, seq_len, wide, device=on, dtype=kind, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    with torch.no_grad():
        launches = least(lambda: small(x_small), 4 * _REPEATS)
    found = [
        1 / (2 * table.copy_bandwidth),
        launches,
        least(lambda: _pass(layer, x), _REPEATS),
        least(lambda: _attend(*attended), _REPEATS),
    ]
    size = group_size(group)
    if group is not None and size > 1:
        found = max_over_ranks(found, group, on)
        link = link_of(group, on)
        levels: tuple[Level, ...] = (
            Level("measured", size, link.latency, link.exchange_bandwidth),
        )
    else:
        levels = cluster.levels
    a_byte, launches, whole, scores = found
    made = replace(
        cluster,
        levels=levels,
        flops={dtype: 1.0},
        efficiency=1.0,
        score_efficiency=None,
        memory_bandwidth=1 / a_byte,
        layer_seconds=launches,
        source=f"measured on {table.processor}, torch {table.torch_version}",
    )
    # A backward pass has two products for each of the forward pass; half of the pairs are masked.
    numel = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    active = numel - (one.num_experts - one.top_k) * one.expert_parameters
    products = 3 * 2.0 * seq_len * active
    of_scores = 3 * 4.0 * seq_len * seq_len / 2 * heads * wide
    cost = CostModel(one, made, Job(1, seq_len, 1, dtype))
    moved = 3 * float(cost.elementwise(columns_of([ALONE])))
    # What is read and written hides no more than half of the products.
    rate = products / max(whole - moved, whole / 2)
    return replace(made, flops={dtype: rate}, score_efficiency=min(1.0, of_scores / scores / rate))


ALONE: dict[str, int | str | None] = {
    "pp": 1,
    "tp": 1,
    "cp": 1,
    "ep": 1,
    "micro_batch": 1,
    "schedule": "1f1b",
    "zero": 0,
    "recompute": 0,
    "dispatcher": "alltoall",
    "wire": None,
    "combine": "exact",
}
