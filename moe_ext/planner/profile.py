"""Rates of this machine, measured with one layer of the model to be planned."""

from __future__ import annotations

import collections
import functools
import math
import os
import socket
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_kind
from moe_ext.comm.collectives import gather_objects
from moe_ext.comm.groups import group_rank, group_size
from moe_ext.comm.link import link_of, max_over_ranks, seconds_of
from moe_ext.comm.rates import CostTable, Rehearsal
from moe_ext.compression.codecs import codec_of, rehearsal_of
from moe_ext.dispatch.wire import LOSSLESS, lossless, row_rehearsals, rows_rate
from moe_ext.distributed import MoEMesh, fully_shard, sync_gradients
from moe_ext.integrations.huggingface.tensor_parallel import parallelize
from moe_ext.nn import MoELayer
from moe_ext.planner.axes import ROUNDED, columns_of
from moe_ext.planner.cluster import ClusterSpec, Level
from moe_ext.planner.cost import StepCost
from moe_ext.planner.job import Job
from moe_ext.planner.presets import ModelSpec

# Experts of a layer that are measured, unless top-k needs more. Further experts only take memory.
MAX_EXPERTS = 16
_REPEATS = 5
# Numbers of elements at which codecs are measured.
CODEC_SIZES = (2**14, 2**20, 2**22)


class _DecoderLayer(nn.Module):
    """A decoder layer with the sizes of a model, without attention scores."""

    def __init__(
        self,
        m: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        ep_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.norms = nn.ModuleList(
            nn.RMSNorm(m.model_dim, device=device, dtype=dtype) for _ in range(2)
        )
        self.query, self.out = linear(m.model_dim, m.heads_dim), linear(m.heads_dim, m.model_dim)
        self.keys = linear(m.model_dim, 2 * m.kv_dim)
        gated = m.gated_experts if m.num_experts else m.gated
        # A dense layer is measured as an MoE layer with one expert, which every token chooses.
        self.experts = MoELayer(
            m.model_dim,
            m.ffn_dim if m.num_experts else m.dense_ffn_dim or m.ffn_dim,
            max(1, m.num_experts),
            max(1, m.top_k),
            activation="swiglu" if gated else "gelu",
            shared_expert=m.shared_ffn_dim if m.num_experts else 0,
            ep_group=ep_group,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply projections, residuals and experts."""
        inner = self.norms[0](x)
        x = x + self.out(self.query(inner)) + self.keys(inner).sum(1, keepdim=True)
        return x + self.experts(self.norms[1](x))


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
    """Measure the rates of this machine, and return a cluster with them for plans of a model.

    The rate of the memory is that of a copy, and the time of launches that of a tiny layer. The
    rate of products follows from the forward and backward pass of a layer of the model's sizes,
    minus its memory traffic. Fused attention of one sequence gives the rate of scores, and a step
    of AdamW its time over the formula. `costs` has the rates of codecs at three sizes.

    With a group, averages of gradients, `ZeroRedundancyOptimizer`, FSDP2 and experts over ranks are
    measured too. All ranks measure at the same time, because they may share cores, and the slowest
    rank counts. Memory is bounded by that of the device, or by a rank's share of it. The host is
    unknown, so that plans keep nothing there.

    Args:
        model: model whose layers are measured, as a rule with at most 16 experts; attention stands
            for recurrences.
        cluster: cluster for numbers that are not measured: memory if the device has more, and links
            without a group.
        dtype: dtype of products; other rates of the cluster are dropped.
        seq_len: tokens of a sequence.
        device: device to measure.
        group: all ranks of the job. Their link is measured as the only level of the cluster, joined
            by one switch, and messages of a step are measured relative to their formulas.

    Raises:
        TypeError: model or cluster is no `ModelSpec` or `ClusterSpec`, such as a name.
        RankFailureError: a rank died or did not answer.
    """
    check_kind("measure_cluster", "model", model, ModelSpec, required=True)
    check_kind("measure_cluster", "cluster", cluster, ClusterSpec, required=True)
    on, kind = torch.device(device), getattr(torch, dtype)
    one = _one_layer(model)
    tiny = replace(one, model_dim=16, ffn_dim=16, num_heads=1, num_kv_heads=1, head_dim=16)
    tiny = replace(tiny, shared_ffn_dim=16 if model.shared_ffn_dim else 0, dense_ffn_dim=None)
    tiny = replace(tiny, latent=())
    seconds = functools.partial(_seconds, group=group, device=on)
    table = CostTable.measure(device=on, codecs=rehearsals(kind, on), sizes=CODEC_SIZES)
    small, layer = _DecoderLayer(tiny, on, kind), _DecoderLayer(one, on, kind)
    x_small = torch.randn(4, 16, device=on, dtype=kind)
    x = torch.randn(seq_len, one.model_dim, device=on, dtype=kind, requires_grad=True)
    heads, wide = one.num_heads, max(1, one.scores_dim // one.num_heads)
    kv_heads = one.num_kv_heads or heads
    attended = [
        torch.randn(1, n, seq_len, wide, device=on, dtype=kind, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    with torch.no_grad():
        launches = seconds(lambda: small(x_small), 4 * _REPEATS)
    found = [
        1 / (2 * table.copy_bandwidth),
        launches,
        seconds(lambda: _pass(layer, x)),
        seconds(lambda: _attend(*attended)),
    ]
    size, levels = group_size(group), cluster.levels
    if group is not None and size > 1:
        found = max_over_ranks(found, group, on)
        table = _slowest(table, group, on)
        link = link_of(group, on)
        levels = (Level("measured", size, link.latency, link.exchange_bandwidth),)
    a_byte, launches, whole, scores = found
    made = replace(
        cluster,
        levels=levels,
        flops={dtype: 1.0},
        efficiency=1.0,
        score_efficiency=None,
        memory_bandwidth=1 / a_byte,
        layer_seconds=launches,
        node_launches=0.0,
        multiprocessors=0,
        memory=min(cluster.memory, _memory(on, group)),
        # The host of a preset belongs to other machines. If the device is the CPU, the host's
        # memory is `memory` already.
        host=None,
        source=f"measured on {table.processor}, torch {table.torch_version}",
        costs=table,
    )
    # A backward pass has two products for each product of the forward pass.
    numel = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    active = numel - (one.num_experts - one.top_k) * one.expert_parameters
    products = 3 * 2.0 * seq_len * active
    # The backward pass of fused attention has five products for two of the forward pass, and a
    # causal mask hides half of the pairs.
    of_scores = 3.5 * 4.0 * seq_len * seq_len / 2 * heads * wide
    cost = StepCost(one, made, Job(1, seq_len, 1, dtype))
    moved = 3 * float(cost.compute.elementwise(columns_of([{}])))
    # At least half of the time counts as products, even if the formula of memory traffic takes
    # more.
    rate = products / max(whole - moved, whole / 2)
    share = min(1.0, of_scores / scores / rate)
    made = replace(made, flops={dtype: rate}, score_efficiency=share)
    cost = StepCost(one, made, cost.job)
    return replace(made, measured=_factors(cost, layer, x, whole, group))


def _one_layer(model: ModelSpec) -> ModelSpec:
    """Return the sizes of one layer of a model, with attention and a network or experts."""
    one = replace(
        model,
        num_layers=1,
        num_cross_layers=0,
        num_window_layers=0,
        num_moe_layers=min(1, model.num_moe_layers),
        moe_layers=(),
        num_experts=min(model.num_experts, max(MAX_EXPERTS, 2 * model.top_k)),
        attention_gate=False,
        mixers=(),
        recurrent=None,
        one_part=False,
    )
    if model.recurrent is None:
        return one
    # If the model has no attention, its recurrences are measured as attention of equal width.
    if not model.all_parts.attention:
        one = replace(one, num_heads=math.gcd(model.model_dim, max(1, model.model_dim // 64)))
    is_bare = not model.all_parts.dense + model.all_parts.moe
    return replace(one, ffn_dim=model.recurrent.width) if is_bare else one


def rehearsals(dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Rehearsal]:
    """Return rehearsals, by name, of all codecs that a plan may use for a job in this dtype."""
    exact = functools.partial(lossless, dtype=dtype, device=device)
    return {
        **{name: rehearsal_of(codec_of(name), device) for name in ROUNDED},
        rows_rate(LOSSLESS, dtype): exact,
        **row_rehearsals(dtype, device),
    }


def _memory(device: torch.device, group: ProcessGroup | None) -> float:
    """Return the bytes of a rank's memory: its accelerator's, or a share of its machine's."""
    if device.type != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    mine = socket.gethostname(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    alone = group is None or group.size() == 1
    ranks = [mine] if alone else gather_objects(mine, group, operation="measure_cluster")
    shared = collections.Counter(host for host, _ in ranks)
    return min(whole / shared[host] for host, whole in ranks)


def _slowest(table: CostTable, group: ProcessGroup, device: torch.device) -> CostTable:
    """Return a table with the slowest rank's number for each rate, equal on all ranks."""
    rows = [row for rates in table.codecs.values() for row in rates]
    seconds = [1 / table.copy_bandwidth, *(1 / rate for rate in table.product_rates.values())]
    seconds += [each for row in rows for each in (row.encode_seconds, row.decode_seconds)]
    found = iter(max_over_ranks(seconds, group, device))
    return replace(
        table,
        copy_bandwidth=1 / next(found),
        product_rates={name: 1 / next(found) for name in table.product_rates},
        codecs={
            name: tuple(
                replace(row, encode_seconds=next(found), decode_seconds=next(found))
                for row in rates
            )
            for name, rates in table.codecs.items()
        },
    )


def _factors(
    cost: StepCost, layer: _DecoderLayer, x: Tensor, whole: float, group: ProcessGroup | None
) -> dict[str, float]:
    """Measure parts of a step of one layer, relative to formulas; see `ClusterSpec.measured`.

    Args:
        cost: cost model of the layer, by the measured rates.
        layer: the whole layer on this rank.
        x: input tokens.
        whole: seconds of the layer's forward and backward pass.
        group: ranks over which the layer is divided.
    """
    size, device, m = group_size(group), x.device, cost.model
    seconds = functools.partial(_seconds, group=group, device=device)
    num_bytes = sum(p.nbytes for p in layer.parameters())
    optimizer = torch.optim.AdamW(layer.parameters())
    # The formula also counts embedding and output, which `layer` lacks, so it is taken per
    # parameter.
    alone = columns_of([{}])
    step = seconds(optimizer.step)
    per_parameter = float(cost.end.update(alone)) / sum(map(float, cost.sizes.parameters(alone)))
    told = per_parameter * sum(p.numel() for p in layer.parameters())
    found = {"update": step / told}
    if group is None or size == 1:
        return found
    # The import is local, because it needs numpy and warns of functions that torch deprecates.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    once, alone_seconds = functools.partial(_pass, layer, x), math.inf
    for turn in range(size):
        max_over_ranks([0.0], group, device)
        if turn == group_rank(group):
            alone_seconds = statistics.median(seconds_of(once, device) for _ in range(_REPEATS))
    found["sharing"] = min(max(whole / alone_seconds, 1.0), float(size))
    level = cost.cluster.levels[0]
    ring = (size - 1) * level.latency + (size - 1) / size * num_bytes / level.bandwidth
    # Each timed call needs new gradients from `once`, because gradients can be averaged only once.
    found["all_reduce"] = seconds(lambda: sync_gradients(layer), before=once) / (2 * ring)
    shared = ZeroRedundancyOptimizer(
        layer.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
    )
    found["broadcast"] = max(seconds(shared.step) - step / size, 0.0) / ring
    if m.num_experts and m.num_experts % size == 0:
        spread = _DecoderLayer(m, device, x.dtype, group)
        placed = columns_of([{"ep": size}])
        # Without messages the spread layer is quicker by `here`, because it reads only a share of
        # the experts' weights.
        here = 3 * float(cost.compute.elementwise(alone) - cost.compute.elementwise(placed))
        beyond = seconds(lambda: _pass(spread, x)) - (whole - here)
        found["exchange"] = max(beyond / float(cost.passes.terms(placed)["experts"]), 1.0)
    if len(x) % size == 0:
        placed, divided = columns_of([{"tp": size}]), _divided(m, x, size)
        beyond = seconds(lambda: _pass(divided, x))
        # Without messages the divided layer would take a share of the products' time, and all of
        # the time of memory traffic.
        reads = 3 * float(cost.compute.elementwise(alone))
        beyond -= reads + max(whole - reads, 0.0) / size
        found["tensor"] = max(beyond / float(cost.passes.terms(placed)["tensor"]), 1.0)
    mesh = MoEMesh(dp=size)
    stack = nn.Sequential(layer)
    fully_shard(layer, mesh)
    fully_shard(stack, mesh)
    found["fsdp"] = max((seconds(lambda: _pass(stack, x)) - whole) / (3 * ring), 1.0)
    names = list(found)
    return dict(zip(names, max_over_ranks(list(found.values()), group, device), strict=True))


def _divided(m: ModelSpec, x: Tensor, size: int) -> nn.Module:
    """Make a layer divided over all ranks, as `Plan.apply` divides the layers of a model."""
    mesh = MoEMesh(tp=size, dp=1).data_mesh
    assert mesh is not None
    layer = _DecoderLayer(m, x.device, x.dtype)
    parallelize(layer, {"query": "colwise", "keys": "colwise", "out": "rowwise"}, mesh["tp"])
    return layer


def _seconds(
    call: Callable[[], object],
    repeats: int = _REPEATS,
    *,
    group: ProcessGroup | None,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the median of `timed`."""
    times = timed(call, repeats, group=group, device=device, before=before)
    return max(statistics.median(times), 1e-9)


def timed(
    call: Callable[[], object],
    repeats: int,
    *,
    group: ProcessGroup | None,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Time a few calls after a warm-up call; the ranks of a group begin each call together.

    Args:
        call: function to time.
        repeats: number of timed calls.
        group: all ranks that time the function; None for one process.
        device: device to wait for.
        before: function that is called before each call, outside of its time.
    """
    times = []
    for _ in range(1 + repeats):
        before()
        if group is not None:
            max_over_ranks([0.0], group, device)
        times.append(seconds_of(call, device))
    return times[1:]
