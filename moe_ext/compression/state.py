"""The state of compressed data parallelism: codecs of a model's parameters, and what is owed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from moe_ext._checks import check_kind, check_numbers, refuse_copy
from moe_ext.comm.c10d import inner_model
from moe_ext.comm.groups import group_rank, group_ranks, group_size, resolve_group
from moe_ext.compression.buckets import Bucket, Buckets
from moe_ext.compression.codecs import Codec, Dense, codec_of
from moe_ext.compression.cost_model import CostModel, CostModels
from moe_ext.compression.explain import BucketChoice, Explanation, described
from moe_ext.compression.feedback import ELEMENTWISE, FeedbackStore, by_name, unit_factors
from moe_ext.compression.options import (
    LossScaler,
    Options,
    Progress,
    ResidualMonitor,
    Warmup,
)
from moe_ext.compression.parameters import NamedParameters
from moe_ext.compression.policy import Policy, policy_of
from moe_ext.compression.reducer import Reducer
from moe_ext.distributed.gradients import reduced_by_ddp

CANDIDATES = ("none", "bf16", "int8", "int4")


class CompressionState:
    r"""Everything that compressed data parallelism keeps between steps, for one model.

    Give it to `DistributedDataParallel.register_comm_hook(state, compress_hook)`, or to
    `compress_gradients(model, state)` in a loop of your own. Every rank makes it alike.

    The part of a gradient that one step leaves out is owed, and goes into the next ones (error
    feedback): over all steps, P times what was applied plus what is owed is the sum of the
    gradients. A step that fails, on any rank and for any reason, leaves all that is owed as it was,
    bit for bit. For this the state keeps two float32 numbers for each element of a compressed
    parameter, four with momentum.

    Args:
        group: the data-parallel ranks; None is those of the DistributedDataParallel that reduces
            with this state, and the default group without one.
        model: tells names and roles; a DistributedDataParallel its group, too. Without it
            parameters are numbered in the order in which they come, and those of one dimension
            count as biases.
        codec: a codec, its name ("none", "bf16", "fp16", "int8", "int4", "fp8", "onebit", "topk",
            "threshold"), or "auto": the cost model chooses from `candidates` for every bucket.
        density: share of the elements for the names "topk" and "threshold".
        policy: codecs by role, in the place of `codec`.
        candidates: codecs or names for "auto"; "topk" is not among them unless it is named here,
            since it costs accuracy.
        warmup: dense steps and a density that falls.
        nonfinite: what a NaN or infinity in the gradient of any rank leads to: "raise" a ValueError
            on every rank that names rank and parameter, or "propagate" it to the gradients of all
            ranks, as `torch.amp.GradScaler` wants it.
        clip_norm: bound on the norm of all gradients after the reduction, of a loss that is not
            scaled where there is a `grad_scaler`.
        local_clip_norm: c: gradients are scaled to a norm of at most :math:`c / \sqrt{P}` before
            they are added to what is owed, for "topk" with momentum. In the hook of DDP bucket by
            bucket, since the others are not there yet.
        optimizer: whose learning rates the residuals follow: a gradient that was left out under a
            rate counts as much as that rate made of it.
        grad_scaler: the scaler of the loss, whose factor the residuals and both bounds follow.
        monitor: watches what is owed.
        cost_model: for "auto", on the ranks of `group`, with `node_size` on the link between
            nodes; None makes one at the first use. Experts have one for the ranks that hold them.
        average: the mean over ranks, or the sum.
        node_size: ranks of a node, neighbours in `group`: gradients are added up densely among
            them, and codecs send shards of those sums between nodes. None reduces over all at once.
        seed: of stochastic rounding.

    Attributes:
        options: the arguments above that steps read; they may change between steps, a policy and
            the groups of an optimizer with a call of `regroup`, and all but `node_size`.
        is_hooked: whether DDP reduces with this state; experts are then the rest of the same step.
        memory: what is owed (see `FeedbackStore`).

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        model: nn.Module | None = None,
        codec: str | Codec = "auto",
        density: float = 0.01,
        policy: Policy | None = None,
        candidates: Sequence[str | Codec] = CANDIDATES,
        warmup: Warmup | None = None,
        nonfinite: str = "raise",
        clip_norm: float | None = None,
        local_clip_norm: float | None = None,
        optimizer: Optimizer | None = None,
        grad_scaler: LossScaler | None = None,
        monitor: ResidualMonitor | None = None,
        cost_model: CostModel | None = None,
        average: bool = True,
        node_size: int | None = None,
        seed: int = 0,
    ) -> None:
        check_numbers("CompressionState", CompressionState.__init__.__annotations__, locals())
        check_kind("CompressionState", "model", model, nn.Module)
        check_kind("CompressionState", "policy", policy, Policy)
        check_kind("CompressionState", "cost_model", cost_model, CostModel)
        self.options = Options(
            policy=policy_of(codec, density) if policy is None else policy,
            candidates=tuple(codec_of(c, density, owner="CompressionState") for c in candidates),
            warmup=warmup or Warmup(),
            monitor=monitor or ResidualMonitor(),
            nonfinite=nonfinite,
            average=average,
            clip_norm=clip_norm,
            local_clip_norm=local_clip_norm,
            optimizer=optimizer,
            grad_scaler=grad_scaler,
            node_size=node_size,
        )
        resolve_group(group, "CompressionState")
        self._group = group
        self._progress = Progress()
        self._costs = CostModels(cost_model)
        self.is_hooked = False
        # Parameters that DDP hands over in a pass, once it has been found.
        self.num_hooked: int | None = None
        # The step of DDP whose last bucket has not come yet.
        self.open_step: Reducer | None = None
        self.model = None if model is None else inner_model(model)
        # DDP reduces what is trained when it is made, which is now or soon.
        self._trained = None if self.model is None else _trained(self.model)
        if isinstance(model, DistributedDataParallel):
            self.adopt_ddp(model)
        self.parameters = NamedParameters(self.model, self.options.policy)
        self.memory = FeedbackStore(seed)
        self._buckets = Buckets(self.options, self.parameters, self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # Parameters, optimizer and process group are those of this job; copies would be others.
        refuse_copy("CompressionState")

    @property
    def step(self) -> int:
        """Reductions that went well."""
        return self._progress.step

    @property
    def was_finite(self) -> bool:
        """True if the gradients of the last reduction were, on every rank."""
        return self._progress.was_finite

    @property
    def residual_ratio(self) -> float | None:
        """Norm of what is owed over that of the gradients, when the monitor looked last."""
        return self._progress.residual_ratio

    @property
    def cost_model(self) -> CostModel | None:
        """Cost model of the ranks of `group`, once "auto" has chosen; experts may have others."""
        return self._costs.common

    @cost_model.setter
    def cost_model(self, model: CostModel) -> None:
        self._costs = CostModels(model)

    @property
    def group(self) -> ProcessGroup | None:
        """The data-parallel ranks; None as long as there is no torch.distributed."""
        return resolve_group(self._group, "CompressionState")

    def adopt_ddp(self, parallel: DistributedDataParallel) -> None:
        """Reduce over its ranks (see `adopt_group`), as many parameters in a pass as it does."""
        trained = _trained(parallel) if self._trained is None else self._trained
        self.num_hooked = len(trained & reduced_by_ddp(parallel))
        self.adopt_group(parallel.process_group)

    def adopt_group(self, group: ProcessGroup) -> None:
        """Reduce over the ranks of a DistributedDataParallel, unless `group` was given.

        Raises:
            ValueError: `group` was given and has other ranks, or steps were counted without it.
        """
        own = self.group
        if own is None or group_ranks(own) == group_ranks(group):
            return
        if self._group is None and self.step == 0:
            self._group = group
            return
        raise ValueError(
            "CompressionState: expected group to be the process_group of the "
            f"DistributedDataParallel that reduces with this state, of ranks {group_ranks(group)}, "
            f"got ranks {group_ranks(own)}"
        )

    def begin_step(self, operation: str) -> Reducer:
        """A reducer for the buckets of one step.

        Args:
            operation: name for messages; but for "compress_hook" it is the rest of the step of DDP
                where DDP reduces with this state.
        """
        return Reducer(
            self.options,
            self._buckets,
            self._costs,
            self._progress,
            group=self.group,
            operation=operation,
            continues=self.is_hooked and operation != "compress_hook",
        )

    def undo(self) -> None:
        """Take the last reduction back: what is owed is as before, bit for bit.

        For a step that the optimizer does not take after all, on any rank; call it on all of them.
        The gradients are not brought back. Nothing where the last reduction has failed.
        """
        if self._progress.can_undo:
            self.memory.undo()
            self._progress.step -= 1
        self._progress.can_undo = False

    def explain(self) -> Explanation:
        """Table of the codec that each bucket had in the last step, then the tables of "auto".

        Returns:
            Explanation: text, with a `BucketChoice` for each line of the table in ``rows``.
        """
        buckets = enumerate(self._buckets)
        rows = [row for number, bucket in buckets for row in self._choices(number, bucket)]
        return Explanation.of(rows, self._costs.explain())

    def _choices(self, number: int, bucket: Bucket) -> Iterator[BucketChoice]:
        """Rows of the table for a bucket."""
        if not bucket.parts:
            numel = sum(bucket.sizes)
            dense = Dense().sent_bytes(numel, group_size(bucket.group))
            why = "a sparse gradient: bytes of touched rows"
            yield BucketChoice(number, bucket.names, numel, dense, 0, "rows", None, why)
        model, num_ranks = self._costs.known(bucket, self.group), group_size(bucket.exchange_group)
        for part in bucket.parts:
            numel, codec = part.memory.numel, part.used
            if codec is None:
                continue
            why, milliseconds = self.parameters.why(self.options.policy, part.names), None
            if part.codec is None and model is not None and part.label in model.buckets:
                why = model.buckets[part.label].reason
                if model.knows([codec]):
                    milliseconds = 1e3 * model.estimate(codec, part.label)
            elif part.codec not in (None, codec):
                why = f"{why}; in the place of {described(part.codec)} for now"
            yield BucketChoice(
                number,
                part.names,
                numel,
                Dense().sent_bytes(numel, num_ranks),
                codec.sent_bytes(numel, num_ranks),
                described(codec),
                milliseconds,
                why,
            )

    # -- saving ------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """Residuals of this rank, by the name of the parameter; not to be changed.

        They have what the rank owes for its shard of a quantised sum after `regroup` alone.
        """
        return self.memory.named("residual")

    def regroup(self) -> None:
        """Keep everything by name; buckets are agreed on anew."""
        self.memory.ungroup()
        self._buckets.forget()

    def owed_now(self) -> dict[str, Tensor]:
        """Copies of what this rank owes, in units of this step; after `regroup`.

        Without frozen parameters, which take no gradient.
        """
        rates, found = self.options.rate_groups(), {}
        for name, residual in self.residuals().items():
            parameter = self.parameters.by_name[name]
            if not parameter.requires_grad:
                continue
            units = self.options.units_now(rates.get(id(parameter), 0))
            factor = unit_factors(self.memory.units_of(name), units)["residual"]
            found[name] = residual * factor
        return found

    def state_dict(self) -> dict[str, Any]:
        """Copies of the residuals of this rank and of the counters; each rank has its own.

        Save one file for each rank, or `flush` first, after which nothing is owed.
        """
        return {
            "version": 1,
            "rank": group_rank(self.group),
            "world_size": group_size(self.group),
            "average": self.options.average,
            "step": self.step,
            "seed": self.memory.seed,
            "density_factor": self._progress.density_factor,
            "expert_parallel": dict(self.parameters.sharded),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take over what `state_dict` returned.

        Args:
            state: that of this rank, for as many ranks as there are now; or the list of those of
                all ranks, for any number: a rank takes over what one or several ranks owed, and
                what the parameters are owed is conserved: with the mean over ranks the sum of the
                residuals over their number, otherwise their sum.

        Raises:
            ValueError: one state for another number of ranks, states of several runs, of another
                version or `average`, or of expert-parallel groups of another size; names that the
                model lacks.
        """
        rank, size = group_rank(self.group), group_size(self.group)
        average = self.options.average
        if isinstance(state, Mapping):
            _check_single(state, rank, size, average)
        else:
            state = merged_for(list(state), rank, size, self.parameters.sharded, average)
        if self.model is not None:
            known = set(self.parameters.by_name)
            strange = sorted(set(state["memory"]["residual"]) - known)
            if strange:
                raise ValueError(
                    "CompressionState.load_state_dict: expected residuals of parameters of the "
                    f"model, got {strange[0]}"
                )
        self.memory.load_state_dict(state["memory"])
        self.memory.seed = state["seed"]
        self._progress.step, self._progress.can_undo = state["step"], False
        self._progress.density_factor = state["density_factor"]
        # Agreed on anew: another rank may have loaded something else.
        self._buckets.forget()


def _trained(model: nn.Module) -> set[int]:
    """Ids of the parameters that require a gradient."""
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def merged_for(
    states: Sequence[Mapping[str, Any]],
    rank: int,
    world_size: int,
    expert_parallel: Mapping[str, tuple[int, int]],
    average: bool,
) -> dict[str, Any]:
    r"""The state of one of P' ranks, from those of P ranks.

    Rank j takes over :math:`e'_j = s \sum_r e_r` over the r with r mod P' = j. Steps apply the mean
    over ranks: with :math:`s = P' / P` the parameters are owed what they were,
    :math:`\frac{1}{P'} \sum e' = \frac{1}{P} \sum e`. Where it is the sum, s = 1. The replicas of
    an expert all take over its mean.

    Args:
        states: what `CompressionState.state_dict` returned on every rank, in any order.
        rank: j.
        world_size: P'.
        expert_parallel: of the model that loads: name to (rank, size) of the expert-parallel group;
            those parameters are different ones on its ranks.
        average: whether the state that loads takes the mean, which must be what was saved.

    Raises:
        ValueError: states are missing or do not belong together, or expert-parallel groups have
            another size than they had.
    """
    states = sorted(states, key=lambda state: state["rank"])
    _check(states, expert_parallel, average)
    size = len(states)
    if size == world_size:
        return dict(states[rank])
    memory: dict[str, Any] = {kind: {} for kind in ELEMENTWISE}
    for state in states:
        for name, kinds in by_name(state["memory"]).items():
            scale = world_size / size if average else 1.0
            if name in expert_parallel:
                ep_rank, ep_size = expert_parallel[name]
                if state["expert_parallel"].get(name, (0, 1))[0] != ep_rank:
                    continue
                # All replicas of an expert take over the same.
                scale = ep_size / (size if average else world_size)
            elif state["rank"] % world_size != rank:
                # Ranks that are owed nothing hold zeros: all hold tensors of the same names.
                scale = 0.0
            for kind, tensor in kinds.items():
                scaled = tensor * scale if scale else torch.zeros_like(tensor)
                known = memory[kind].get(name)
                memory[kind][name] = scaled if known is None else known + scaled
    memory["layouts"], memory["marks"] = [], states[0]["memory"]["marks"]
    return {**states[0], "rank": rank, "world_size": world_size, "memory": memory}


def _check_single(state: Mapping[str, Any], rank: int, world_size: int, average: bool) -> None:
    """ValueError unless a state is that of this rank of as many ranks."""
    _check_kind(state, average)
    found = (state["rank"], state["world_size"])
    if (rank, world_size) != found:
        raise _refused(
            f"the state of rank {rank} of {world_size}, got that of rank {found[0]} of {found[1]}; "
            "give the list of the states of all ranks to resume on another number of them"
        )


def _refused(problem: str) -> ValueError:
    return ValueError(f"CompressionState.load_state_dict: expected {problem}")


def _check_kind(state: Mapping[str, Any], average: bool) -> None:
    if state.get("version") != 1:
        raise _refused(f"a state of version 1, got {state.get('version')}")
    if state["average"] != average:
        raise _refused(
            f"a state of average={average}, got one of average={state['average']}: what a "
            "residual makes of a parameter is not the same with both; flush before the change"
        )


def _check(
    states: Sequence[Mapping[str, Any]],
    expert_parallel: Mapping[str, tuple[int, int]],
    average: bool,
) -> None:
    if not states:
        raise _refused("the states of all ranks, got none")
    for state in states:
        _check_kind(state, average)
    size = states[0]["world_size"]
    ranks = [state["rank"] for state in states]
    if ranks != list(range(size)) or any(state["world_size"] != size for state in states):
        raise _refused(f"the states of ranks 0 to {size - 1}, each once, got {ranks}")
    steps = [state["step"] for state in states]
    if len(set(steps)) > 1:
        raise _refused(f"states of one step, got those of steps {steps}")
    for state in states:
        for name in {**expert_parallel, **state["expert_parallel"]}:
            ep_size = expert_parallel.get(name, (0, 1))[1]
            held = state["expert_parallel"].get(name, (0, 1))[1]
            if held != ep_size:
                raise _refused(
                    f"expert-parallel groups of {ep_size} ranks, got {held} for {name}; flush "
                    "before the experts are divided otherwise"
                )
