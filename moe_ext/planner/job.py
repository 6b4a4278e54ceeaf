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
            compute: with ZeRO 2 and 3 behind all of them, else behind one. The rest of their time
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
