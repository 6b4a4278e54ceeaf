"""The state of compressed data parallelism: what each parameter is sent as, and what is owed.

Shape suffixes: N elements of a bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from moe_ext.compression._choice import Choosers
from moe_ext.compression._layout import Layout, Part, divide, random_key, told
from moe_ext.compression._nodes import Nodes, packing_on
from moe_ext.compression._protocols import ChoosesCodecs, GradScaler
from moe_ext.compression._reached import ReachedExperts
from moe_ext.compression._step import Step
from moe_ext.compression.agreement import check_call, resolve
from moe_ext.compression.codecs import Codec, Dense, check_choice, codec_of
from moe_ext.compression.elastic import check_single, merged_for
from moe_ext.compression.feedback import FeedbackStore, unit_factors
from moe_ext.compression.policy import Policy, Role, parameter_roles, policy_of
from moe_ext.compression.schedules import ResidualMonitor, Warmup
from moe_ext.distributed.groups import group_rank, group_ranks, group_size
from moe_ext.distributed.parameters import sharded_experts

CANDIDATES = ("none", "bf16", "int8", "int4")


class CompressionState:
    r"""Everything that compressed data parallelism keeps between steps, for one model.

    Give it to `DistributedDataParallel.register_comm_hook(state, compress_hook)`, or to
    `compress_gradients(model, state)` in a loop of your own. Every rank makes it alike.

    What is left out of one step is owed and goes into the next ones (error feedback): over all
    steps, P times what was applied plus what is owed is the sum of the gradients. A step that
    fails, on any rank and for any reason, leaves all that is owed as it was, bit for bit. For this
    the state keeps two float32 numbers for each element of a compressed parameter, four with
    momentum.

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
        clip_norm: bound on the norm of all gradients after the reduction.
        local_clip_norm: c: gradients are scaled to a norm of at most :math:`c / \sqrt{P}` before
            they are added to what is owed, for "topk" with momentum. In the hook of DDP bucket by
            bucket, since the others are not there yet.
        optimizer: whose learning rates the residuals follow: a gradient that was left out under a
            rate counts as much as that rate made of it.
        grad_scaler: the scaler of the loss, whose factor the residuals follow.
        monitor: watches what is owed.
        cost_model: for "auto", on the ranks of `group`, with `node_size` on the link between
            nodes; None makes one at the first use. Experts have one for the ranks that hold them.
        average: the mean over ranks, or the sum.
        node_size: ranks of a node, neighbours in `group`: gradients are added up densely among
            them, and codecs send shards of those sums between nodes. None reduces over all at once.
        seed: of stochastic rounding.

    Attributes:
        step: reductions that went well.
        was_finite: whether the gradients of the last reduction were, on every rank.
        is_hooked: whether DDP reduces with this state; experts are then the rest of the same step.
        memory: what is owed (see `FeedbackStore`).
        residual_ratio: norm of what is owed over that of the gradients, when the monitor looked
            last.

    Raises:
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
        grad_scaler: GradScaler | None = None,
        monitor: ResidualMonitor | None = None,
        cost_model: ChoosesCodecs | None = None,
        average: bool = True,
        node_size: int | None = None,
        seed: int = 0,
    ) -> None:
        check_choice("CompressionState", "nonfinite", nonfinite, ("raise", "propagate"))
        for name, norm in (("clip_norm", clip_norm), ("local_clip_norm", local_clip_norm)):
            if norm is not None and not norm > 0:
                raise ValueError(f"CompressionState: expected {name} to be positive, got {norm}")
        resolve(group, "CompressionState")
        self._group = group
        self.policy = policy_of(codec, density) if policy is None else policy
        self.candidates = tuple(codec_of(c, density, owner="CompressionState") for c in candidates)
        self.warmup, self.monitor = warmup or Warmup(), monitor or ResidualMonitor()
        self.nonfinite, self.average = nonfinite, average
        self.clip_norm, self.local_clip_norm = clip_norm, local_clip_norm
        self.optimizer, self.grad_scaler = optimizer, grad_scaler
        self.choosers = Choosers(cost_model)
        self.nodes = Nodes(node_size)
        self.operation = "compress_hook"
        self.step = 0
        self.residual_ratio: float | None = None
        self.memory = FeedbackStore(seed)
        # The backward pass of DDP that is underway.
        self.underway: Step | None = None
        self.is_hooked = False
        self.was_finite = True
        self._counted = False
        self._density_factor = 1.0
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._identify(model)

    @property
    def cost_model(self) -> ChoosesCodecs | None:
        """Of the ranks of `group`, once "auto" has chosen; others have experts of their own."""
        return self.choosers.common

    @cost_model.setter
    def cost_model(self, model: ChoosesCodecs) -> None:
        self.choosers.common, self.choosers.used = model, True

    @property
    def group(self) -> ProcessGroup | None:
        """The data-parallel ranks; None as long as there is no torch.distributed."""
        return resolve(self._group, "CompressionState")

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

    # -- parameters --------------------------------------------------------------------------

    def _identify(self, model: nn.Module | None) -> None:
        """Names and roles, of the module inside a DistributedDataParallel."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.model = inner
        if isinstance(model, DistributedDataParallel):
            self.adopt_group(model.process_group)
        self._names: dict[int, str] = {}
        self._roles: dict[str, Role] = {}
        # Held, so that an id means one parameter for as long as the state lives.
        self._parameters: dict[str, nn.Parameter] = {}
        self._reached: ReachedExperts | None = None
        self._sharded: dict[str, tuple[int, int]] = {}
        # Whether a parameter may have a residual; not known without the model.
        self._compresses = inner is None
        if inner is None:
            return
        self._roles = parameter_roles(inner)
        for name, parameter in inner.named_parameters():
            self._names[id(parameter)] = name
            self._parameters[name] = parameter
        codecs = self._codecs(tuple(self._parameters), tuple(self._parameters.values()))
        self._compresses = any(codec is None or codec.feeds_back for codec in codecs)
        experts = [
            name
            for name, parameter in self._parameters.items()
            if self._roles[name] == "expert"
            and self.policy.is_exact(
                "expert", parameter, self.policy.codec_for(name, "expert", parameter)
            )
        ]
        self._reached = ReachedExperts(inner, experts)
        self._sharded = {
            name: (group_rank(group), group_size(group))
            for name, (_, group) in sharded_experts(inner).items()
        }

    def names_of(self, parameters: Sequence[nn.Parameter]) -> tuple[tuple[str, ...], str | None]:
        """Names of parameters, and what is wrong with them."""
        names, problem = [], None
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                name = f"parameter_{len(self._names)}"
                if self.model is not None or self.step > 0:
                    problem = (
                        "expected the parameters to belong to the one model that the state "
                        f"serves, got another one of shape {tuple(parameter.shape)}"
                    )
                else:
                    self._names[id(parameter)] = name
                    self._parameters[name] = parameter
            names.append(name)
        return tuple(names), problem

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of a name."""
        return self._parameters[name]

    def role_of(self, name: str, parameter: nn.Parameter) -> Role:
        """What a parameter is for."""
        return self._roles.get(name, "bias" if parameter.dim() <= 1 else "other")

    def _rate_groups(self) -> dict[int, int]:
        """Id of a parameter to the number of its group in the optimizer."""
        if self.optimizer is None:
            return {}
        groups = self.optimizer.param_groups
        return {id(p): i for i, group in enumerate(groups) for p in group["params"]}

    # -- layouts -----------------------------------------------------------------------------

    def layout(
        self,
        parameters: Sequence[nn.Parameter],
        flat_N: Tensor,
        group: ProcessGroup | None,
        problem: str | None = None,
    ) -> Layout:
        """The parts of a bucket, agreed on with the other ranks when it is new.

        Raises:
            ValueError: on every rank, when the ranks do not agree, or `problem` is given on one.
        """
        names, strange = self.names_of(parameters)
        sparse = flat_N.layout == torch.sparse_coo
        key = (names, flat_N.dtype, flat_N.device, sparse, group)
        if key in self._layouts and problem is None and strange is None:
            return self._layouts[key]
        shapes = tuple(parameter.shape for parameter in parameters)
        chosen, rates = self._codecs(names, parameters), self._rate_groups()
        facts = {
            "the parameters of a bucket": told(names),
            "their shapes": told([tuple(shape) for shape in shapes]),
            "their dtype": flat_N.dtype,
            "the codecs": told([c.name if c else "auto" for c in chosen]),
            "the options of the codecs": told(list(dict.fromkeys(map(repr, chosen)))),
            "the warm-up": told([self.warmup]),
            "other options": told([self.candidates, self.monitor, self.local_clip_norm]),
            "the optimizer's groups": told([rates.get(id(p), 0) for p in parameters]),
            "the step": self.step,
            "average": self.average,
            "nonfinite": self.nonfinite,
            "node_size": self.nodes.size,
            # With nodes it is brought to others; and where nothing is kept, steps may be silent.
            "what is kept of them": told(self.memory.kinds_of(names)),
        }
        problem = problem or strange or self.nodes.problem(self.group, chosen, self.candidates)
        check_call(self.operation, facts, problem, group, flat_N.device, validate=True)
        layout = Layout(names, shapes, group, self.nodes.levels(group, self.group))
        if not sparse:
            self._divide(layout, parameters, chosen, flat_N)
        self._layouts[key] = layout
        return layout

    def _codecs(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter]
    ) -> list[Codec | None]:
        return [
            self.policy.codec_for(name, self.role_of(name, parameter), parameter)
            for name, parameter in zip(names, parameters, strict=True)
        ]

    def _divide(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        codecs: Sequence[Codec | None],
        flat_N: Tensor,
    ) -> None:
        starts = list(itertools.accumulate(layout.sizes, initial=0))
        rates = self._rate_groups()
        exact = [
            self.policy.is_exact(self.role_of(name, parameter), parameter, codec)
            for name, parameter, codec in zip(layout.names, parameters, codecs, strict=True)
        ]
        rate_groups = [rates.get(id(parameter), 0) for parameter in parameters]
        for codec, rate, indices in divide(codecs, rate_groups, exact, flat_N.dtype):
            names = tuple(layout.names[i] for i in indices)
            shapes = [layout.shapes[i] for i in indices]
            packing = packing_on(layout.levels, exact[indices[0]], shapes)
            memory = self.memory.group(names, shapes, flat_N.device, random_key(names), packing)
            spans = tuple((starts[i], starts[i + 1]) for i in indices)
            part = Part(names, tuple(indices), spans, codec, rate, memory, exact[indices[0]])
            layout.parts.append(part)
        self._forget_stale(layout)

    def _forget_stale(self, layout: Layout) -> None:
        """Drop layouts whose memory went into this one: buckets are rebuilt after a step."""
        names = set(layout.names)
        self._layouts = {
            key: other
            for key, other in self._layouts.items()
            if other.group is not layout.group or not names & set(other.names)
        }

    def watches(self, layout: Layout) -> bool:
        """Whether the gradients of a bucket are looked at; the same on every rank."""
        # A NaN anywhere makes the optimizer skip the step, and puts back what all buckets owe.
        if self.nonfinite == "raise" or self._compresses:
            return True
        return any(
            part.exact or part.codec is None or part.memory.has("residual") or not part.codec.linear
            for part in layout.parts
        )

    # -- a step ------------------------------------------------------------------------------

    def codec_now(self, part: Part, chooser: ChoosesCodecs | None = None) -> Codec:
        """What a part is sent as in this step; of a cost model's choice where there is one."""
        codec = part.codec
        if codec is None and chooser is not None:
            codec = chooser.choose(part.memory.numel, self.candidates, bucket=part.label)
        codec = self.warmup.codec(codec or Dense(), self.step)
        codec = self.monitor.codec(codec, self._density_factor)
        if part.exact:
            full = self.step < part.dense_until
            codec = codec.keeping_zeros() if full else codec.skipping_zeros()
        return codec

    def open(self, part: Part) -> None:
        """Begin a step of a part, with what it owes in units of this step.

        Those are the loss scale, and for gradients that were left out the learning rate.
        """
        units = self._units_now(part.rate_group)
        part.memory.begin(unit_factors(part.memory.units, units), units)

    def _units_now(self, rate_group: int) -> dict[str, float]:
        units: dict[str, float] = {}
        if self.optimizer is not None:
            rate = float(self.optimizer.param_groups[rate_group]["lr"])
            # A rate of zero applies nothing that could be scaled.
            units.update({"rate": rate} if rate > 0.0 else {})
        if self.grad_scaler is not None:
            units["loss_scale"] = float(self.grad_scaler.get_scale())
        return units

    def reached_bitmap(self, name: str) -> Tensor | None:
        """Experts of a parameter that got tokens since the last step, None if unknown."""
        return None if self._reached is None else self._reached.bitmap(name)

    def clip_now(self) -> float | None:
        """Bound on the norm, unless gradients that are not here count too."""
        return None if self._sharded else self.clip_norm

    @property
    def begins_step(self) -> bool:
        """Whether a reduction is not the rest of a step that DDP has begun."""
        return self.operation == "compress_hook" or not self.is_hooked

    def committed(self, ratio: float | None) -> None:
        """Note that a step went well."""
        if self.begins_step:
            self._counted = True
            self.step += 1
        if self._reached is not None:
            self._reached.clear()
        if ratio is not None:
            self.residual_ratio = ratio
            self._density_factor = self.monitor.factor(ratio, self._density_factor)

    def rollback(self) -> None:
        """Forget what an unfinished step has changed."""
        if self.memory.rollback():
            self._layouts = {}
        self._counted = self._counted and not self.begins_step

    def undo(self) -> None:
        """Take the last reduction back: what is owed is as before, bit for bit.

        For a step that the optimizer does not take after all, on any rank; call it on all of them.
        The gradients are not brought back. Nothing where the last reduction has failed.
        """
        if self._counted:
            self.memory.undo()
            self.step -= 1
        self._counted = False

    def explain(self) -> str:
        """What "auto" chose and why, as a table; what the policy says without "auto"."""
        if self.choosers.used:
            return self.choosers.explain()
        lines = [
            f"{part.label}: {self.codec_now(part)}"
            for layout in self._layouts.values()
            for part in layout.parts
        ]
        return "\n".join(lines) or "no gradient was reduced yet"

    # -- saving ------------------------------------------------------------------------------

    def owed_now(self) -> dict[str, Tensor]:
        """Copies of what this rank owes, in units of this step; after `regroup`."""
        rates, found = self._rate_groups(), {}
        for name, residual in self.residuals().items():
            units = self._units_now(rates.get(id(self._parameters[name]), 0))
            factor = unit_factors(self.memory.units_of(name), units)["residual"]
            found[name] = residual * factor
        return found

    def residuals(self) -> dict[str, Tensor]:
        """What this rank owes, by the name of the parameter; not to be changed."""
        return self.memory.named("residual")

    def state_dict(self) -> dict[str, Any]:
        """What this rank owes and the counters, as copies; each rank has its own.

        Save one file for each rank, or `flush` first, after which nothing is owed.
        """
        return {
            "version": 1,
            "rank": group_rank(self.group),
            "world_size": group_size(self.group),
            "average": self.average,
            "step": self.step,
            "seed": self.memory.seed,
            "density_factor": self._density_factor,
            "expert_parallel": dict(self._sharded),
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
        if isinstance(state, Mapping):
            check_single(state, rank, size, self.average)
        else:
            state = merged_for(list(state), rank, size, self._sharded, self.average)
        if self.model is not None:
            known = set(self._parameters)
            strange = sorted(set(state["memory"]["residual"]) - known)
            if strange:
                raise ValueError(
                    "CompressionState.load_state_dict: expected residuals of parameters of the "
                    f"model, got {strange[0]}"
                )
        self.memory.load_state_dict(state["memory"])
        self.memory.seed = state["seed"]
        self.step, self._counted = state["step"], False
        self._density_factor = state["density_factor"]
        # Agreed on anew: another rank may have loaded something else.
        self._layouts = {}

    def regroup(self) -> None:
        """Keep everything by name; layouts are agreed on anew."""
        self.memory.ungroup()
        self._layouts = {}
