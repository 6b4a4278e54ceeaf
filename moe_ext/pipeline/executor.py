"""Runs the stages of a rank as a table says."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_kind
from moe_ext.comm import agreement
from moe_ext.comm.groups import check_group, group_rank, group_ranks, group_size
from moe_ext.comm.interleaving import pass_turn, run_in_turns
from moe_ext.comm.point_to_point import PeerMessage, PointToPoint
from moe_ext.comm.reports import telling
from moe_ext.comm.traffic import not_counted
from moe_ext.distributed.clipping import is_scaled_alike, note_stage
from moe_ext.nn.model_layers import set_loss_scale
from moe_ext.nn.torch_state import autocast_dtype
from moe_ext.pipeline.check import check_table, kept_versions, updates_of
from moe_ext.pipeline.messages import add_messages
from moe_ext.pipeline.table import MESSAGES, OF_STAGE, UPDATE, Action, ActionTable
from moe_ext.pipeline.turn_plan import TurnPlan

LossFunction = Callable[[Tensor, Any], Tensor]
# For each weight that several stages have: stages, and the names of the parameters there.
Tied = Sequence[Sequence[tuple[int, str]]]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 14
# Tags of the messages that say shape and dtype; those of tensors are even.
_FORMAT = 1


@dataclass(frozen=True)
class _TorchState:
    """State of torch that a second forward pass needs: that of autocast and of the generator."""

    autocast: torch.dtype | None
    generator: Tensor

    @staticmethod
    def now() -> _TorchState:
        return _TorchState(autocast_dtype(torch.device("cpu")), torch.get_rng_state())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng([]):
            torch.set_rng_state(self.generator)
            dtype = self.autocast
            with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
                yield


class _InBackward(torch.autograd.Function):
    """Calls a function in a backward pass: layers take a forward pass there for a second one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.function()
        return None, None


class _Unit(NamedTuple):
    """A micro-batch, or a slice of it, in a stage, and the version of the weights it goes with."""

    stage: int
    number: int
    slice: int
    version: int
    chain: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self[:3]

    def at(self, stage: int) -> tuple[int, int, int]:
        """The key in another stage."""
        return stage, self.number, self.slice


@dataclass
class _Pass:
    """A unit from its forward pass to the end of its backward pass."""

    x: Tensor
    # The output, or the loss, and what is kept for later slices; None: to be computed again.
    outs: tuple[Tensor, ...] | None
    setting: _TorchState | None = None
    # Result of `stage_backward_input`, for the gradients of the weights.
    groups: list[dict[str, Any]] | None = None


@dataclass
class _Step:
    """Tensors of a step: micro-batches and gradients by (stage, micro-batch, slice)."""

    inputs: Sequence[Tensor]
    targets: Sequence[Any]
    scale: float | Tensor
    passes: dict[tuple[int, int, int], _Pass] = field(default_factory=dict)
    # Tensors on their way to a stage: activations forward, gradients backward, by kind.
    given: dict[tuple[str, tuple[int, int, int]], Tensor | PeerMessage] = field(
        default_factory=dict
    )
    # Leaves that the slices so far keep for those behind them, by (stage, micro-batch).
    kept: dict[tuple[int, int], list[tuple[Tensor, ...]]] = field(default_factory=dict)
    # Weights of (stage, version) by name: leaves, with the storage of the parameters or copies.
    weights: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    sent: list[PeerMessage] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)


class Pipeline:
    """Runs the stages of this rank as a table says, each action in the order of its row.

    Gradients are those of the mean of the micro-batches' losses, as one process would add them up;
    balance losses that the layers of any stage inject are divided with them, by `set_loss_scale` in
    every step. Activations and gradients travel between ranks over connections of their own: a
    receive is posted where the table has it, and what needs the tensor waits. "I" and "W" compute
    the gradients of inputs and of weights apart, where the input of a stage has one; of the first
    stage W computes all.

    A stage that lies on several ranks, one for each chain of the table, ends a step with the sum of
    their gradients. Where the table has slices, a stage is called as `stage(x, past)` and gives
    `(out, kept)`: `kept` is a tuple of tensors that later slices of the micro-batch need, such as
    keys and values, and `past` a tuple of those of the slices before it; their gradients come back
    to it from all of these. Where it has updates, `update` makes each new version of a stage's
    weights in the parameters; passes that began with an older one keep it, and gradients are those
    of the mean over the micro-batches of an update. A step begins with version 0.

    Rows of FSDP2 (UNSHARD, RESHARD, REDUCE_GRAD) are left to FSDP2's own hooks. Hooks of parameters
    (DistributedDataParallel) see no gradient that W computes: reduce after the step.

    Args:
        table: the same on every rank; `add_messages` completes it where it has no messages. Or a
            plan of `plan_turns`: a rank then computes one action while others of its own wait for
            exchanges between the ranks of their stage. Forward passes draw random numbers from a
            generator each, seeded by a number of the caller's.
        stages: modules of this rank by number, each of a tensor to a tensor, in floating point
            between stages and alike in shape for all micro-batches; on the CPU.
        loss_fn: gives the loss of the last stage's output and a target, a mean over the batch.
        group: the ranks of the pipeline, with Gloo; None is this process alone.
        max_in_flight: see `check_table`.
        recompute: keep of a forward pass nothing but the input of the stage, and run it again right
            before the backward pass: once, whether that is whole or in two. Layers count it once.
        slice_lengths: of the slices of a table that has them: places in dimension 1 of inputs and
            targets, tensors then. A micro-batch's loss is the mean of its slices' by length.
        update: for a table with updates: called with a stage when its parameters have the gradients
            of one; to take an optimizer's step and to clear the gradients.
        tied: weights that several stages have, such as an embedding in the first and the last one:
            for each, (stage, name of the parameter) of all of them. They begin alike, and have the
            sum of their gradients after a step; `clip_grad_norm_` counts it once.

    Raises:
        ValueError: on every rank: the tables differ, or are refused by `check_table`; the group has
            another number of ranks; stages are not those of the table; `slice_lengths` or `update`
            are missing or not needed; there are updates in several chains, or I and W of slices.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        table: ActionTable | TurnPlan,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFunction,
        *,
        group: ProcessGroup | None = None,
        max_in_flight: int | None = None,
        recompute: bool = False,
        slice_lengths: Sequence[int] | None = None,
        update: Callable[[int], None] | None = None,
        tied: Tied = (),
    ) -> None:
        check_kind("Pipeline", "table", table, ActionTable, TurnPlan, required=True)
        self._plan = table if isinstance(table, TurnPlan) else None
        table = self._plan.table if self._plan else table
        assert isinstance(table, ActionTable)
        check_group(group, "Pipeline", name="group")
        self._device = torch.device("cpu")
        self.rank = group_rank(group)
        problem: Exception | None = None
        try:
            check_table(table, max_in_flight=max_in_flight)
            self._refuse(table, stages, group_size(group))
            _refuse_options(table, slice_lengths, update)
            _refuse_tied(table, stages, tied, update)
        except ValueError as error:
            problem = error
        facts = {
            "table": "; ".join(" ".join(map(str, row)) for row in table.rows),
            "turns": self._plan and "; ".join(map(str, self._plan.starts)),
            "recompute": recompute,
            "slice_lengths": slice_lengths and list(slice_lengths),
            "tied": [list(map(list, names)) for names in tied],
        }
        agreement.agree("Pipeline", facts, problem, group, self._device)
        is_whole = table.has_messages or table.num_ranks == 1 or self._plan is not None
        self.table = table if is_whole else add_messages(table)
        self.stages, self._loss_fn, self._group = dict(stages), loss_fn, group
        self._last, self._recompute = table.num_stages - 1, recompute
        self._failed = False
        self._names: dict[Action, str] = {}
        self._transport: PointToPoint | None = None
        if group is not None and group_size(group) > 1:
            self._transport = PointToPoint(group, self._device)
        # Shape and dtype of what goes into each (chain, stage, slice), and which of another rank
        # have been told.
        self._formats: dict[tuple[int, int, int], tuple[torch.Size, torch.dtype]] = {}
        self._told: set[tuple[int, int, int]] = set()
        self._lengths = list(slice_lengths or ())
        self._update = update
        self._versions = kept_versions(table)
        # Weights and scales of a stage are then the same for all micro-batches.
        self._in_turns = not (self._lengths or update)
        # Number of micro-batches that the gradients of each are averaged with.
        updates, micro = updates_of(table).get((0, 0), {}), table.num_micro_batches
        sizes = Counter(updates.values())
        self._divisors = [sizes[updates[i]] if updates else micro for i in range(micro)]
        self._shared = self._shared_parameters(tied)
        if group is not None:
            trained = [p for stage in self.stages for p in self._trained(stage)]
            copies = [p for _, ranks, p in self._shared if self.rank != ranks[0]]
            note_stage(trained, group, copies)

    def _shared_parameters(self, tied: Tied) -> list[tuple[int, list[int], nn.Parameter]]:
        """Parameters of which other ranks have a copy: number, all of their ranks, this one's."""
        found, stages = [], self.table.num_stages
        for number, names in enumerate(tied):
            ranks = sorted({self.table.rank_of[0, stage] for stage, _ in names})
            mine = [self.stages[s].get_parameter(n) for s, n in names if s in self.stages]
            if mine and len(ranks) > 1:
                found.append((number, ranks, mine[0]))
        for stage in self.stages:
            ranks = sorted({rank for (_, s), rank in self.table.rank_of.items() if s == stage})
            for i, p in enumerate(self._trained(stage)):
                if len(ranks) > 1:
                    found.append((len(tied) + i * stages + stage, ranks, p))
        return sorted(found, key=lambda each: each[0])

    def _refuse(self, table: ActionTable, stages: Mapping[int, nn.Module], size: int) -> None:
        if table.num_ranks != size:
            raise ValueError(
                f"Pipeline: expected group to have a rank for each of the table's "
                f"{table.num_ranks}, got {size}"
            )
        own = sorted({stage for (_, stage), rank in table.rank_of.items() if rank == self.rank})
        if sorted(stages) != own:
            raise ValueError(
                f"Pipeline: expected stages to be {own}, those of the table for this rank, got "
                f"{sorted(stages)}"
            )
        for number, module in stages.items():
            for name, parameter in module.named_parameters():
                if parameter.device != self._device:
                    raise ValueError(
                        "Pipeline: expected stages to be on the CPU, since only Gloo knows "
                        f"messages by number, got {name} of stage {number} on {parameter.device}"
                    )

    def step(
        self,
        inputs: Sequence[Tensor] = (),
        targets: Sequence[Any] = (),
        *,
        loss_scale: float | Tensor = 1.0,
    ) -> list[Tensor]:
        """Run all micro-batches forward and backward; gradients are added to the parameters'.

        Args:
            inputs: one tensor for each micro-batch, on the rank of the first stage.
            targets: one for each micro-batch, on the rank of the last stage.
            loss_scale: factor of all gradients: a number, or `scaler.scale(torch.ones(()))` of a
                `moe_ext.distributed.GradScaler`, the same on all ranks.

        Returns:
            The losses of the micro-batches, unscaled, on the rank of the last stage; else nothing.
            Of chains, each rank with a last stage has those of its own.

        Raises:
            ValueError: another number of inputs or targets than micro-batches (on this rank, the
                others are told); outputs of a stage that differ in shape or dtype.
            RankFailureError: a rank died or raised, with stage, micro-batch and action of the wait.
            RuntimeError: an earlier step has failed.
        """
        if self._failed:
            raise RuntimeError(
                "Pipeline.step: expected no step before this one to have failed, got a pipeline "
                "whose messages were lost; build another one"
            )
        with telling(self._group, self._device, f"Pipeline.step on {self._name()}"):
            if self._group is not None and not is_scaled_alike(loss_scale):
                raise ValueError(
                    "Pipeline.step: expected loss_scale to be a number, or a tensor that "
                    "moe_ext.distributed.GradScaler has scaled, since with another scaler each "
                    "stage would skip steps by itself, got another tensor"
                )
        # Until it has ended: messages of a step that failed may still come.
        self._failed = self._transport is not None
        micro = self.table.num_micro_batches
        step = _Step(inputs, targets, loss_scale)
        with telling(self._group, self._device, f"Pipeline.step on {self._name()}"):
            for stage, name, given in ((0, "inputs", inputs), (self._last, "targets", targets)):
                if stage in self.stages and len(given) != micro:
                    raise ValueError(
                        f"Pipeline.step: expected {name} to be {micro}, one for each micro-batch, "
                        f"got {len(given)}"
                    )
        before = [p.grad for _, _, p in self._shared]
        for _, _, p in self._shared:
            p.grad = None
        for stage, module in self.stages.items():
            if self._update:
                step.weights[stage, 0] = self._leaves(stage, 0)
            if self._in_turns:
                set_loss_scale(module, loss_scale / micro)
        if self._plan is not None:
            self._run_plan(step, self._plan)
        for row in self.table.rows[self.rank] if self._plan is None else ():
            acts = [functools.partial(self._act, step, action) for action in row.in_turn()]
            if self._in_turns:
                run_in_turns(acts)
            else:
                for act in acts:
                    act()
        name = f"Pipeline.step, sum of the gradients of copies on {self._name()}"
        with telling(self._group, self._device, name):
            self._sum_copies(step, before, name)
        for message in step.sent:
            message.wait()
        self._failed = False
        return [step.losses[i] for i in sorted(step.losses)]

    @property
    def turns(self) -> TurnPlan | None:
        """The plan by which actions go beside each other; None where they go one by one."""
        return self._plan

    @property
    def tied_bytes(self) -> int:
        """Bytes of gradients that this rank sends in a step, of weights that other ranks have."""
        return sum((len(ranks) - 1) * p.nbytes for _, ranks, p in self._shared)

    def _name(self) -> str:
        ranks = (self.rank,) if self._group is None else group_ranks(self._group)
        return f"rank {ranks[self.rank] if self._group else 0}"

    def _named(self, action: Action) -> str:
        if action not in self._names:
            words = f"{action} ({action.described()}) on {self._name()}"
            self._names[action] = f"Pipeline.step, {words}"
        return self._names[action]

    def _run_plan(self, step: _Step, plan: TurnPlan) -> None:
        starts = list(plan.starts[self.rank])
        seeds = torch.randint(2**62, (len(starts),)).tolist()
        state, underway = torch.get_rng_state(), set[Action]()
        receives = [self.table.receive(start.action) for start in starts]
        next_start = 0

        def post(until: int, *, ahead: bool) -> None:
            """Receive what is needed soon, up to the first whose format is not known."""
            for i, receive in enumerate(receives[:until]):
                if receive is None:
                    continue
                if ahead and self._into(receive) not in self._formats:
                    # Messages of a rank are waited for in this order: a later one, which may come
                    # of what this one is for, must not stand before it.
                    return
                self._act(step, receive)
                receives[i] = None

        def run_lane() -> None:
            nonlocal next_start
            while next_start < len(starts):
                action, beside = starts[next_start]
                if not underway.issubset(beside):
                    pass_turn()
                    continue
                underway.add(action)
                next_start = own = next_start + 1
                post(own, ahead=False)
                post(own + plan.lanes, ahead=True)
                if action.kind == "F":
                    torch.default_generator.manual_seed(seeds[own - 1])
                self._act(step, action)
                send = self.table.send(action)
                if send is not None:
                    self._act(step, send)
                underway.discard(action)

        run_in_turns([run_lane] * plan.lanes)
        torch.set_rng_state(state)

    def _act(self, step: _Step, action: Action) -> None:
        try:
            self._run(step, action)
        except Exception as error:
            name = self._named(action)
            # Below the words of the error; from Python 3.11 on.
            if hasattr(error, "add_note"):
                error.add_note(f"in {name}")
            with telling(self._group, self._device, name):
                raise

    def _run(self, step: _Step, action: Action) -> None:
        if action.kind == UPDATE:
            self._make_version(step, action)
        if action.kind in OF_STAGE:
            return
        assert action.micro_batch is not None
        if action.kind in MESSAGES:
            (self._send if action.kind.startswith("SEND") else self._receive)(step, action)
        else:
            run = {
                "F": self._forward,
                "B": self._backward,
                "I": self._input_gradient,
                "W": self._weight_gradients,
            }[action.kind]
            run(step, _unit(action))

    def _take(self, step: _Step, kind: str, unit: _Unit) -> Tensor:
        found = step.given.pop((kind, unit.key))
        return found.wait() if isinstance(found, PeerMessage) else found

    def _forward(self, step: _Step, unit: _Unit) -> None:
        if unit.stage == 0:
            x = self._part(step.inputs, unit)
        else:
            x = self._take(step, "F", unit).requires_grad_()
        setting = _TorchState.now() if self._recompute else None
        outs = self._compute(step, unit, x)
        if unit.stage == self._last:
            loss = outs[0].detach() * self._share(unit)
            step.losses[unit.number] = step.losses.get(unit.number, 0) + loss
        else:
            step.given["F", unit.at(unit.stage + 1)] = outs[0].detach()
        if self._lengths:
            kept = tuple(each.detach().requires_grad_() for each in outs[1:])
            step.kept.setdefault((unit.stage, unit.number), []).append(kept)
        step.passes[unit.key] = _Pass(x, None if self._recompute else outs, setting)

    def _part(self, batches: Sequence[Any], unit: _Unit) -> Any:
        """The unit's part of inputs or targets."""
        found = batches[unit.number]
        return found.split(self._lengths, 1)[unit.slice] if self._lengths else found

    def _share(self, unit: _Unit) -> float:
        """Share of a slice in its micro-batch."""
        return self._lengths[unit.slice] / sum(self._lengths) if self._lengths else 1.0

    def _scale(self, step: _Step, unit: _Unit) -> float | Tensor:
        return step.scale * self._share(unit) / self._divisors[unit.number]

    def _compute(self, step: _Step, unit: _Unit, x: Tensor) -> tuple[Tensor, ...]:
        """The output of a stage, of the last one the loss, and what it keeps for later slices."""
        module, kept = self.stages[unit.stage], ()
        given: tuple[Any, ...] = (x,)
        if not self._in_turns:
            set_loss_scale(module, self._scale(step, unit))
        if self._lengths:
            given = (x, tuple(step.kept.get((unit.stage, unit.number), ())[: unit.slice]))
        if self._update:
            weights = step.weights[unit.stage, unit.version]
            out = torch.func.functional_call(module, weights, given)
        else:
            out = module(*given)
        if self._lengths:
            out, kept = out
        if unit.stage == self._last:
            out = self._loss_fn(out, self._part(step.targets, unit))
        else:
            self._check_output(unit, out)
        return out, *kept

    def _trained(self, stage: int) -> list[nn.Parameter]:
        return [p for p in self.stages[stage].parameters() if p.requires_grad]

    def _weights(self, step: _Step, unit: _Unit) -> Iterator[Any]:
        """Weights of the passes of a unit."""
        if self._update:
            return iter(step.weights[unit.stage, unit.version].values())
        return self.stages[unit.stage].parameters()

    def _make_version(self, step: _Step, action: Action) -> None:
        """Give the parameters the gradients of all versions, update them, and keep what is used."""
        assert self._update is not None
        stage, version = action.stage, action.version
        module, kept = self.stages[stage], self._versions[action.chain, stage, version]
        parameters = dict(module.named_parameters())
        for _, weights in [each for each in step.weights.items() if each[0][0] == stage]:
            for name, leaf in weights.items():
                if leaf.grad is not None:
                    grad = parameters[name].grad
                    parameters[name].grad = leaf.grad if grad is None else grad + leaf.grad
                    leaf.grad = None
        self._update(stage)
        for old in [key for key in step.weights if key[0] == stage and key[1] not in kept]:
            del step.weights[old]
        step.weights[stage, version] = self._leaves(stage, version)

    def _leaves(self, stage: int, version: int) -> dict[str, Tensor]:
        """The weights as leaves of their own: copies, if they are used behind the next update."""
        following = [v for key, v in self._versions.items() if key[1:] == (stage, version + 1)]
        outlives = any(version in kept for kept in following)
        return {
            name: (p.data.clone() if outlives else p.data).requires_grad_(p.requires_grad)
            for name, p in self.stages[stage].named_parameters()
        }

    def _sum_copies(self, step: _Step, before: list[Tensor | None], name: str) -> None:
        """Add up the gradients of each shared parameter, in the same order on all of its ranks."""
        base = 4 * self.table.num_micro_batches * self.table.num_stages * self.table.num_slices
        for (number, ranks, p), earlier in zip(self._shared, before, strict=True):
            assert self._transport is not None
            own, tag = torch.zeros_like(p) if p.grad is None else p.grad.contiguous(), base + number
            found = {self.rank: own}
            others = [rank for rank in ranks if rank != self.rank]
            for rank in others:
                step.sent.append(self._transport.send(own, rank, tag, operation=name))
            for rank in others:
                into = torch.empty_like(own)
                found[rank] = self._transport.receive(into, rank, tag, operation=name).wait()
            p.grad = torch.stack([found[rank] for rank in ranks]).sum(0)
            if earlier is not None:
                p.grad += earlier

    def _check_output(self, unit: _Unit, out: Any) -> None:
        stage = unit.stage
        is_sent = isinstance(out, Tensor) and out.dtype in _DTYPES and out.dim() <= _MOST_DIMS
        if not is_sent or out.device != self._device:
            raise ValueError(
                f"Pipeline.step: expected stage {stage} to give a tensor on the CPU, of one of "
                f"{_DTYPES}, got {type(out).__name__ if not isinstance(out, Tensor) else out.dtype}"
            )
        into = unit.chain, stage + 1, unit.slice
        known = self._formats.setdefault(into, (out.shape, out.dtype))
        if known != (out.shape, out.dtype):
            raise ValueError(
                f"Pipeline.step: expected stage {stage} to give the shape and dtype of its first "
                f"micro-batch {(tuple(known[0]), known[1])}, got {(tuple(out.shape), out.dtype)}"
            )

    def _backward(self, step: _Step, unit: _Unit) -> None:
        state, outs = self._computed(step, unit)
        grads = self._output_grads(step, unit, outs)
        graded = [i for i, out in enumerate(outs) if out.requires_grad]
        if graded:
            torch.autograd.backward([outs[i] for i in graded], [grads[i] for i in graded])
        self._give_back(step, unit, state.x)
        del step.passes[unit.key]

    def _input_gradient(self, step: _Step, unit: _Unit) -> None:
        if not step.passes[unit.key].x.requires_grad:
            return  # W computes all
        from moe_ext.pipeline._torch import stage_backward_input

        state, (out,) = self._computed(step, unit)
        grads, state.groups = self._output_grads(step, unit, (out,)), []
        if out.requires_grad:
            weights = self._weights(step, unit)
            # It detaches what it is given, which cannot be a view.
            _, state.groups = stage_backward_input([out.clone()], grads, [state.x], weights)
            if state.x.grad is None:
                # It finds weights on the way to the input alone: W computes all.
                state.groups, step.given["B", unit.key] = None, grads[0]
            else:
                state.outs = ()  # what W does not need is freed
        self._give_back(step, unit, state.x)

    def _weight_gradients(self, step: _Step, unit: _Unit) -> None:
        groups = step.passes[unit.key].groups
        if groups is None:
            self._backward(step, unit)
            return
        from moe_ext.pipeline._torch import stage_backward_weight

        for group in groups:
            stage_backward_weight(self._weights(step, unit), [group])
            pass_turn()
        del step.passes[unit.key]

    def _computed(self, step: _Step, unit: _Unit) -> tuple[_Pass, tuple[Tensor, ...]]:
        """A forward pass with its output, run again where that was not kept."""
        state = step.passes[unit.key]

        def compute() -> None:
            assert state.setting is not None
            with state.setting.restored():
                state.outs = self._compute(step, unit, state.x)

        if state.outs is None:
            _InBackward.apply(torch.zeros((), requires_grad=True), compute).backward()
        assert state.outs is not None
        return state, state.outs

    def _output_grads(self, step: _Step, unit: _Unit, outs: tuple[Tensor, ...]) -> list[Tensor]:
        if unit.stage == self._last:
            scale = self._scale(step, unit)
            grads = [torch.as_tensor(scale, dtype=outs[0].dtype).expand_as(outs[0])]
        else:
            grads = [self._take(step, "B", unit)]
        if self._lengths:
            leaves = step.kept[unit.stage, unit.number].pop()
            grads += [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return grads

    def _give_back(self, step: _Step, unit: _Unit, x: Tensor) -> None:
        if unit.stage > 0:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            step.given["B", unit.at(unit.stage - 1)] = grad
            x.grad = None  # W still holds x

    def _send(self, step: _Step, action: Action) -> None:
        assert self._transport is not None
        peer = self.table.peer(action)
        way, rank = action.kind[-1], self.table.rank(peer)
        x = step.given.pop((way, _unit(peer).key))
        assert isinstance(x, Tensor)
        into = peer.chain, peer.stage, peer.slice
        if way == "F" and into not in self._told:
            self._told.add(into)
            words = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
            head = torch.tensor(words + [0] * (2 + _MOST_DIMS - len(words)))
            tag, name = self._tag(peer) + _FORMAT, self._named(action)
            with not_counted():
                step.sent.append(self._transport.send(head, rank, tag, operation=name))
        message = self._transport.send(
            x.contiguous(), rank, self._tag(peer), operation=self._named(action)
        )
        step.sent.append(message)

    def _receive(self, step: _Step, action: Action) -> None:
        assert self._transport is not None
        way, rank = action.kind[-1], self.table.rank(self.table.peer(action))
        operation, tag = self._named(action), self._tag(action)
        into = self._into(action)
        if into not in self._formats:
            head = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
            # Before the first tensor of a stage: the table is one in which a receive may wait.
            told = self._transport.receive(head, rank, tag + _FORMAT, operation=operation)
            dtype, dims, *sizes = told.wait().tolist()
            self._formats[into] = torch.Size(sizes[:dims]), _DTYPES[dtype]
        shape, kind = self._formats[into]
        message = self._transport.receive(
            torch.empty(shape, dtype=kind), rank, tag, operation=operation
        )
        step.given[way, _unit(action).key] = message

    @staticmethod
    def _into(receive: Action) -> tuple[int, int, int]:
        """The (chain, stage, slice) whose input has the format of what comes."""
        return receive.chain, receive.stage + (receive.kind == "RECV_B"), receive.slice

    def _tag(self, receive: Action) -> int:
        """The number of a message, by its receive."""
        assert receive.micro_batch is not None
        place = receive.micro_batch * self.table.num_stages + receive.stage
        place = place * self.table.num_slices + receive.slice
        return 4 * place + 2 * (receive.kind == "RECV_B")


def _refuse_options(table: ActionTable, lengths: Sequence[int] | None, update: Any) -> None:
    slices, has_updates = table.num_slices, bool(updates_of(table))
    if len(lengths or [0]) != slices or (lengths is not None and min(lengths) < 1):
        wanted = f"the {slices} lengths of the table's slices" if slices > 1 else "None"
        raise ValueError(f"Pipeline: expected slice_lengths to be {wanted}, got {lengths}")
    if has_updates != (update is not None):
        wanted = "a function, for the updates of the table" if has_updates else "None"
        raise ValueError(f"Pipeline: expected update to be {wanted}, got {update}")
    if has_updates and any(chain for chain, _ in table.rank_of):
        raise ValueError("Pipeline: expected a table with updates to have one chain, got several")
    kinds = {a.kind for rank in range(table.num_ranks) for a in table.actions(rank)}
    if slices > 1 and "I" in kinds:
        raise ValueError("Pipeline: expected slices to go backward as a whole (B), got I and W")


def _refuse_tied(
    table: ActionTable, stages: Mapping[int, nn.Module], tied: Tied, update: Any
) -> None:
    if tied and (update is not None or any(chain for chain, _ in table.rank_of)):
        raise ValueError(
            "Pipeline: expected tied to be empty for a table with updates or several chains, got "
            f"{tied}"
        )
    for names in tied:
        for stage, name in names:
            if not 0 <= stage < table.num_stages:
                raise ValueError(f"Pipeline: expected tied to name stages, got {(stage, name)}")
            if stage in stages and name not in dict(stages[stage].named_parameters()):
                raise ValueError(
                    f"Pipeline: expected tied to name parameters of stages, got {(stage, name)}"
                )
        mine = {id(stages[stage].get_parameter(name)) for stage, name in names if stage in stages}
        if len(mine) > 1:
            raise ValueError(
                f"Pipeline: expected tied parameters of one rank to be the same object, got {names}"
            )


def _unit(action: Action) -> _Unit:
    assert action.micro_batch is not None
    return _Unit(action.stage, action.micro_batch, action.slice, action.version, action.chain)
