"""The state of compressed data parallelism: codecs of a model's parameters, and residuals."""

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

    Pass it to `DistributedDataParallel.register_comm_hook(state, compress_hook)`, or to
    `compress_gradients(model, state)` in a loop of your own. Every rank makes it with the same
    arguments.

    The part of a gradient that one step leaves out is kept as a residual and sent in later steps
    (error feedback). Over all steps, P times the applied gradients plus the residuals of all ranks
    is the sum of the gradients. A step that fails, on any rank and for any reason, leaves residuals
    unchanged, bit for bit. For this the state keeps two float32 numbers for each element of a
    compressed parameter, four with momentum.

    Args:
        group: the data-parallel ranks; None takes the ranks of the DistributedDataParallel that
            reduces with this state, or the default group without one.
        model: gives names and roles, and a DistributedDataParallel also its group. Without it,
            parameters are numbered in the order of their first reduction, and parameters of one
            dimension count as biases.
        codec: a codec, its name ("none", "bf16", "fp16", "int8", "int4", "fp8", "onebit", "topk",
            "threshold"), or "auto": the cost model chooses from `candidates` for every bucket.
        density: share of the elements for the names "topk" and "threshold".
        policy: codecs by role, instead of `codec`.
        candidates: codecs or names for "auto". "topk" must be named here to be considered, because
            it costs accuracy.
        warmup: dense steps and a density that falls.
        nonfinite: reaction to NaN or infinity in the gradient of any rank: "raise" a ValueError
            on every rank that names rank and parameter, or "propagate" NaN to the gradients of all
            ranks, as `torch.amp.GradScaler` expects.
        clip_norm: bound on the norm of all gradients after the reduction; with a `grad_scaler`, on
            the norm of the unscaled gradients.
        local_clip_norm: c: gradients are scaled to a norm of at most :math:`c / \sqrt{P}` before
            the residual is added, for "topk" with momentum. The hook of DDP scales each bucket on
            its own, because the other buckets have not arrived yet.
        optimizer: optimizer whose learning rates the residuals follow: a gradient that was left
            out under one rate is applied later as if under that rate.
        grad_scaler: the scaler of the loss, whose factor the residuals and both bounds follow.
        monitor: watches the size of the residuals.
        cost_model: for "auto", for the ranks of `group`; with `node_size`, for the link between
            nodes. None makes one at the first use. Experts have one for the ranks that hold them.
        average: take the mean over ranks; if False, the sum.
        node_size: ranks of a node, neighbours in `group`. Gradients are summed densely inside a
            node, and codecs send shards of these sums between nodes. None reduces in one level.
        seed: seed of stochastic rounding.

    Attributes:
        options: the arguments above that steps read. All but `node_size` may change between steps;
            a new policy and changed groups of an optimizer need a call of `regroup`.
        is_hooked: True if DDP reduces with this state; experts are then the rest of the same step.
        memory: residuals and other state of codecs (see `FeedbackStore`).

    Raises:
        TypeError: an argument has the wrong type.
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
        # Number of parameters that DDP reduces in a pass; None until the DDP module is known.
        self.num_hooked: int | None = None
        # The step of DDP whose last bucket has not arrived yet.
        self.open_step: Reducer | None = None
        self.model = None if model is None else inner_model(model)
        # DDP reduces the parameters that require a gradient when it is made. It has been made or
        # will be made soon, so they are noted now.
        self._trained = None if self.model is None else _trained(self.model)
        if isinstance(model, DistributedDataParallel):
            self.adopt_ddp(model)
        self.parameters = NamedParameters(self.model, self.options.policy)
        self.memory = FeedbackStore(seed)
        self._buckets = Buckets(self.options, self.parameters, self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # A state refers to this job's parameters, optimizer and process group, which a copy in
        # another process would not have.
        refuse_copy("CompressionState")

    @property
    def step(self) -> int:
        """Number of successful reductions."""
        return self._progress.step

    @property
    def was_finite(self) -> bool:
        """True if the gradients of the last reduction were finite on every rank."""
        return self._progress.was_finite

    @property
    def residual_ratio(self) -> float | None:
        """Norm of the residuals over that of the gradients, when the monitor last compared them."""
        return self._progress.residual_ratio

    @property
    def cost_model(self) -> CostModel | None:
        """Cost model of the ranks of `group`, after the first choice; experts may have others."""
        return self._costs.common

    @cost_model.setter
    def cost_model(self, model: CostModel) -> None:
        self._costs = CostModels(model)

    @property
    def group(self) -> ProcessGroup | None:
        """The data-parallel ranks; None while torch.distributed is not initialised."""
        return resolve_group(self._group, "CompressionState")

    def adopt_ddp(self, parallel: DistributedDataParallel) -> None:
        """Take the ranks of a DDP module (see `adopt_group`) and its number of parameters."""
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
        """Make a reducer for the buckets of one step.

        Args:
            operation: name for error messages. If DDP reduces with this state, any name but
                "compress_hook" continues the step that DDP has begun.
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
        """Revert the last reduction: residuals are as before it, bit for bit.

        For a step that the optimizer skips after all. Call it on all ranks if any rank skips. The
        gradients are not restored. Nothing happens if the last reduction has failed.
        """
        if self._progress.can_undo:
            self.memory.undo()
            self._progress.step -= 1
        self._progress.can_undo = False

    def explain(self) -> Explanation:
        """Make a table of the codec of each bucket in the last step, then the tables of "auto".

        Returns:
            Explanation: text, with a `BucketChoice` for each line of the table in ``rows``.
        """
        buckets = enumerate(self._buckets)
        rows = [row for number, bucket in buckets for row in self._choices(number, bucket)]
        return Explanation.of(rows, self._costs.explain())

    def _choices(self, number: int, bucket: Bucket) -> Iterator[BucketChoice]:
        """Yield the rows of the table for a bucket."""
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
        """Return the residuals of this rank, by the name of the parameter; read only.

        They include the residual of this rank's shard of quantised sums only after `regroup`.
        """
        return self.memory.named("residual")

    def regroup(self) -> None:
        """Keep everything by name, and have ranks agree on buckets again."""
        self.memory.ungroup()
        self._buckets.forget()

    def owed_now(self) -> dict[str, Tensor]:
        """Return this rank's residuals in units of this step, as copies. Call `regroup` first.

        Frozen parameters are left out, because they take no gradient.
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
        """Return copies of this rank's residuals and of the counters; ranks have different states.

        Save one file for each rank, or call `flush` first, after which all residuals are zero.
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
        """Load states of `state_dict`.

        Args:
            state: the state of this rank, from the same number of ranks; or the list of the states
                of all ranks, from any number. With a list, each rank takes over the residuals of
                one or several ranks. The mean of the residuals over ranks is conserved, or their
                sum if `average` is False.

        Raises:
            ValueError: a single state is from another number of ranks; states are from several
                runs, another version or `average`, or expert-parallel groups of another size; the
                model lacks a name.
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
        # Ranks agree on buckets again, because another rank may have loaded another state.
        self._buckets.forget()


def _trained(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that require a gradient."""
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def merged_for(
    states: Sequence[Mapping[str, Any]],
    rank: int,
    world_size: int,
    expert_parallel: Mapping[str, tuple[int, int]],
    average: bool,
) -> dict[str, Any]:
    r"""Make the state of one of P' ranks from the states of P ranks.

    Rank j takes over :math:`e'_j = s \sum_r e_r` over the r with r mod P' = j. If steps apply the
    mean over ranks, :math:`s = P' / P` conserves the mean of the residuals:
    :math:`\frac{1}{P'} \sum e' = \frac{1}{P} \sum e`. If steps apply the sum, s = 1. All replicas
    of an expert take over the same residual.

    Args:
        states: states of `CompressionState.state_dict` of every rank, in any order.
        rank: j.
        world_size: P'.
        expert_parallel: name to (rank, size) of the expert-parallel group, in the model that loads.
            Ranks of such a group hold different experts under the same name.
        average: `average` of the state that loads; must equal that of the saved states.

    Raises:
        ValueError: states are missing or do not belong together, or the size of expert-parallel
            groups has changed.
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
                # Every replica of an expert takes over the same residual.
                scale = ep_size / (size if average else world_size)
            elif state["rank"] % world_size != rank:
                # Ranks that take over nothing hold zeros, because all ranks must hold tensors of
                # the same names.
                scale = 0.0
            for kind, tensor in kinds.items():
                scaled = tensor * scale if scale else torch.zeros_like(tensor)
                known = memory[kind].get(name)
                memory[kind][name] = scaled if known is None else known + scaled
    memory["layouts"], memory["marks"] = [], states[0]["memory"]["marks"]
    return {**states[0], "rank": rank, "world_size": world_size, "memory": memory}


def _check_single(state: Mapping[str, Any], rank: int, world_size: int, average: bool) -> None:
    """Raise ValueError unless a state is from this rank and from the same number of ranks."""
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
