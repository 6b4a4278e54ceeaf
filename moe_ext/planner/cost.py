"""Seconds of a training step by formulas, for many placements at once."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.planner.axes import AGAIN, CHUNKS, PARTS, SCHEDULES, Columns, runs
from moe_ext.planner.cluster import ClusterSpec
from moe_ext.planner.codec_times import CodecTimes
from moe_ext.planner.compute import Compute
from moe_ext.planner.exchange import LayerExchange
from moe_ext.planner.job import Job
from moe_ext.planner.memory import StepMemory
from moe_ext.planner.passes import Passes
from moe_ext.planner.presets import ModelSpec
from moe_ext.planner.rank_loads import RankLoads
from moe_ext.planner.sizes import CostPart, Sizes
from moe_ext.planner.step_end import StepEnd

# Least idle time of a pipeline per stage after the first, in times of a micro-batch.
_WAITS = {"1f1b": 2 / 3, "gpipe": 1.0, "zb-h1": 1 / 3, "interleaved": 0.0}
# Idle time of a pipeline of equal stages, per stage after the first, in times of a micro-batch.
_FILLS = {"1f1b": 1.0, "gpipe": 1.0, "zb-h1": 1 / 3, "interleaved": 1 / CHUNKS}


class StepCost(CostPart):
    """Cost of placements of one job: times of schedules by closed forms, and parts of these times.

    Args:
        model: sizes of the model.
        cluster: processors and links.
        job: a step of training.

    Raises:
        ValueError: a dtype has no rate, or the cluster joins fewer ranks.
    """

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job) -> None:
        super().__init__(Sizes(model, cluster, job))
        self.loads = RankLoads(self.sizes)
        self.compute = Compute(self.sizes, self.loads)
        self.codecs = CodecTimes(self.sizes)
        self.exchange = LayerExchange(self.sizes, self.loads, self.compute, self.codecs)
        self.passes = Passes(self.sizes, self.compute, self.exchange)
        self.end = StepEnd(self.sizes, self.codecs, self.passes)
        self.memory = StepMemory(self.sizes, self.loads)

    def seconds(self, c: Columns) -> Tensor:
        """Return the seconds of a step by closed forms, without hops of the pipeline.

        With "turns", exchanges add the time that exceeds the work beside them, and the time in
        which the pipeline fills and drains. Only a simulation knows what the schedule can hide.
        """
        forward, inputs, weights = self.passes.split(c)
        each, fill = forward + inputs + weights, c["pp"] - 1
        gap = torch.where(runs(c, "interleaved"), each / CHUNKS, each)
        late = (forward + inputs - weights).clamp(min=0.0)
        gap = torch.where(runs(c, "zb-h1"), late, gap)
        gap = gap + torch.where(c["turns"] > 0, self.passes.apart(c)[1], 0.0)
        each = torch.where(c["turns"] > 0, self._each(c), each)
        passes = self.sizes.num_micro_batches(c) * (each + 3.0 * self.compute.output(c))
        return passes + fill * gap + self.end.seconds(c)

    def bound(self, c: Columns) -> Tensor:
        """Return a lower bound of the seconds of a step: products alone, of equal stages."""
        even = {**c, "balance": torch.ones_like(c["pp"])}
        products = self.compute.products(self.sizes.alike(even))
        each = 3.0 * (products + self.compute.output(c) / c["pp"])
        return self.sizes.num_micro_batches(c) * each

    def least(self, c: Columns) -> Tensor:
        """Return a lower bound of the seconds of a step, for any layers of stages and recompute.

        One of the S stages takes at least the mean time t for each of M micro-batches, at most
        t / 3 of it forward. This stage begins after the forward passes of earlier stages, and ends
        before their backward passes. It waits for its first backward pass when it holds as many
        micro-batches as the schedule allows. In units of t this gives M + 2 / 3 (S - 1) for 1F1B,
        and M + 1 / 3 (S - 1) if gradients of weights come later. GPipe ends all forward passes
        before the first backward pass: M + S - 1. With equal interleaved stages the last rank waits
        for one chunk of each other rank; with unequal stages the bound is M.
        """
        whole = runs(c, "zb-h1") & (c["recompute"] == 1)
        alike = self.sizes.alike(c, whole.double())
        layers = self.passes.seconds(alike)
        each = layers + 3.0 * self.compute.output(c) / c["pp"]
        waits = torch.tensor([_WAITS[name] for name in SCHEDULES], dtype=torch.float64)
        idle = waits[c["schedule"]] * (c["pp"] - 1) * each
        m = self.model
        uneven = (m.num_layers % (c["pp"] * CHUNKS) > 0) | (len(m.kinds) > 1)
        chunks = (c["pp"] - 1) / CHUNKS * layers
        chunked = runs(c, "interleaved")
        idle = torch.where(chunked & ~uneven, chunks, idle)
        found = self.sizes.num_micro_batches(c) * each + idle
        if bool(c["turns"].any()):
            found = torch.where(c["turns"] > 0, self._least_in_turn(c, alike), found)
        return found + self.end.seconds(alike)

    def _least_in_turn(self, c: Columns, alike: Columns) -> Tensor:
        """Return a lower bound of the seconds of all micro-batches if ranks overlap exchanges.

        For each of M micro-batches some stage computes for at least the mean time w, and some
        stage's exchanges take at least the mean e, one after the other: M max(w, e). With 1F1B a
        stage holds one more micro-batch, and so waits w / 3 less than in `least`:
        (M + 2 / 3 (S - 1) - 1 / 3) w. With 1F1B and ZB-H1 the first stage holds at most S + 1
        micro-batches. It holds each until its gradient returns, while all stages compute and
        exchange, except gradients of weights that come later: M S (w + e) / (S + 1).
        """
        work, exchanges = self.passes.apart(alike)
        micro, pp = self.sizes.num_micro_batches(c), c["pp"]
        output = self.compute.output(c) / pp
        w = work + 3.0 * output
        found = micro * w.maximum(exchanges)
        whole = runs(c, "1f1b")
        waits = ((2.0 * pp - 3.0) / 3.0).clamp(min=0.0)
        found = torch.where(whole, found.maximum((micro + waits) * w), found)
        late = work / (3.0 + alike[AGAIN[0]] / alike[PARTS[0]]) + output
        there = torch.where(whole, w, w - late) + exchanges
        held = micro.clamp(max=pp + 1)
        in_two = runs(c, "zb-h1")
        return torch.where(whole | in_two, found.maximum(micro * pp * there / held), found)

    def likely(self, c: Columns, again: Tensor) -> Tensor:
        """Estimate the seconds of a step with the best numbers of equal layers per stage.

        The slowest stage has x layers, or is the last stage with y layers and the output, whose
        time is that of w layers.

        Args:
            c: candidates.
            again: share of the layers that are computed again.
        """
        pp, count = c["pp"].double(), float(self.model.num_layers)
        mean = self.sizes.alike(c, again)
        layer = self._each(mean) * pp / count
        w = 3.0 * self.compute.output(c) / layer
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
        return self.sizes.num_micro_batches(c) * slowest + fill + self.end.seconds(mean)

    def _each(self, c: Columns) -> Tensor:
        """Return the seconds of a micro-batch on a stage.

        With "turns", exchanges add the time that exceeds the work beside them. The first stage
        holds at most S + 1 micro-batches, for each of which S stages compute and exchange, which is
        another lower bound.
        """
        found = self.passes.seconds(c)
        work, exchanges = self.passes.apart(c)
        in_order = runs(c, "1f1b") | runs(c, "zb-h1")
        there = (work + exchanges) * c["pp"] / (c["pp"] + 1)
        return torch.where((c["turns"] > 0) & in_order, found.maximum(there), found)
