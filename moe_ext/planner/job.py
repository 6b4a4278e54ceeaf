"""One step of training: ranks, batch, formats, and the load of its experts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from moe_ext._checks import check_choice, check_fields, check_rule
from moe_ext.planner.expert_load import Load, counts_of
from moe_ext.planner.rounds import LOCAL_CODECS

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Job:
    """One step of training.

    Attributes:
        num_ranks: number of processors.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        dtype: dtype of products and messages.
        load: tokens of each expert, as `layer.metrics` counts them, or one such list for each of
            many steps; or s of Zipf's law, where expert i has tokens in proportion to 1 / i^s; 0
            for even routing.
        capacity_factor: most rows that an expert takes from a rank's tokens, relative to an even
            load; further rows go to no expert. None takes all rows.
        eager_attention: attention multiplies all pairs of positions and keeps scores in memory, as
            without a fused kernel. Affects times only.
        hidden_exchanges: for programs that interleave micro-batches: rows are sent to experts and
            back while another micro-batch computes, and only the excess over its work adds to the
            step. Affects times only.
        hidden_gradients: for programs that overlap messages of gradients and gathered weights with
            micro-batches, with ZeRO 2 and 3 with all micro-batches, else with one. Only the excess
            over this work adds to the step. Affects times only.
        hidden_tensor: for programs that overlap messages of tensor parallelism with the products
            that they belong to. Only the excess over these products adds to the step. Affects times
            only.
        node_limit: largest number of nodes that hold the experts of a token, for a router with such
            a limit; 0 for any. Affects only the dispatcher "hierarchical".
        layer_dtype: format of at most one byte for the products of layers, except scores and the
            output; a name of `ClusterSpec.flops`. None for `dtype`.
        local_steps: inner steps in a round of `moe_ext.optim.DiLoCo`. Each rank with its own data
            is a worker, and workers average their progress at the end of a round. With 1, gradients
            are averaged in each step instead.
        local_codec: codec of the messages of a round: "none", a format of `moe_ext.compression`
            ("bf16", "int8", "int4", ...) or "sparseloco", `moe_ext.optim.SparseLoCo`.
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
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=("node_limit",))
        check_choice("Job", "local_codec", self.local_codec, LOCAL_CODECS)
        fits = self.local_steps > 1 or self.local_codec == "none"
        check_rule("Job", "local_codec", self.local_codec, "'none' without local steps", fits)
        if self.dtype not in _BYTES:
            raise ValueError(
                f"Job: expected dtype to be one of {sorted(_BYTES)}, got {self.dtype!r}"
            )
        if isinstance(self.load, tuple):
            counts_of(self.load)
        elif (
            isinstance(self.load, bool)
            or not isinstance(self.load, Real)
            or not 0 <= self.load < math.inf
        ):
            raise ValueError(
                "Job: expected load to be a finite number of at least 0, or tokens of experts, got "
                f"{self.load!r:.80}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes per number in `dtype`."""
        return _BYTES[self.dtype]

    @functools.cached_property
    def _counts(self) -> Tensor:
        assert isinstance(self.load, tuple)
        return counts_of(self.load)

    def counts(self, num_experts: int) -> Tensor:
        """Return each expert's share of the choices in each step, `[S, E]`, before any are dropped.

        Raises:
            ValueError: the load is for another number of experts.
        """
        if not isinstance(self.load, tuple):
            counts_SE = torch.arange(1, num_experts + 1, dtype=torch.float64)[None] ** -float(
                self.load
            )
        else:
            counts_SE = self._counts
        if counts_SE.shape[1] != num_experts:
            raise ValueError(
                f"Job: expected load to hold tokens of {num_experts} experts, got "
                f"{counts_SE.shape[1]} numbers"
            )
        return counts_SE / counts_SE.sum(1, keepdim=True)

    def kept(self, num_experts: int) -> Tensor:
        """Return the shares of `counts`, limited by the capacity."""
        counts_SE = self.counts(num_experts)
        if self.capacity_factor is None:
            return counts_SE
        return counts_SE.clamp(max=self.capacity_factor / num_experts)

    def dropped_share(self, num_experts: int) -> float:
        """Return the share of the choices that go to no expert."""
        return max(0.0, 1.0 - float(self.kept(num_experts).sum(1).mean()))

    def imbalances(self, num_experts: int, ep: int) -> Tensor:
        """Return the load of the busiest of `ep` ranks over the mean, for each step, `[S]`.

        The mean is that of all choices, including dropped choices.
        """
        kept_SE = self.kept(num_experts)
        return ep * kept_SE.view(-1, ep, num_experts // ep).sum(2).amax(1)

    def imbalance(self, num_experts: int, ep: int, *, peak: bool = False) -> float:
        """Return the load of the busiest of `ep` ranks over the mean; experts lie in order.

        Args:
            num_experts: experts of a layer.
            ep: number of ranks.
            peak: return the number of the worst step instead of the average.

        Raises:
            ValueError: the load is for another number of experts.
        """
        over_S = self.imbalances(num_experts, ep)
        return float(over_S.max() if peak else over_S.mean())
