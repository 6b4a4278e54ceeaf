"""Runs the stages of a rank as a table says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_kind
from moe_ext.distributed import agreement
from moe_ext.distributed.groups import check_group, group_rank, group_ranks, group_size
from moe_ext.distributed.own_errors import telling
from moe_ext.distributed.point_to_point import Message, PointToPoint
from moe_ext.nn.moe_layer import set_loss_scale
from moe_ext.nn.torch_state import autocast_dtype
from moe_ext.pipeline.check import check_table
from moe_ext.pipeline.messages import add_messages
from moe_ext.pipeline.table import MESSAGES, OF_STAGE, Action, ActionTable

LossFunction = Callable[[Tensor, Any], Tensor]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 14
# Tags of the messages that say shape and dtype; those of tensors are even.
_FORMAT = 1


@dataclass(frozen=True)
class _Setting:
    """State of torch that a second forward pass needs: that of autocast and of the generator."""

    autocast: torch.dtype | None
    generator: Tensor

    @staticmethod
    def now() -> _Setting:
        return _Setting(autocast_dtype(torch.device("cpu")), torch.get_rng_state())

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


@dataclass
class _Pass:
    """A micro-batch in a stage, from its forward pass to the end of its backward pass."""

    x: Tensor
    # The output, or the loss; None where it is to be computed again.
    out: Tensor | None
    setting: _Setting | None = None
    # Of `stage_backward_input`, for the gradients of the weights.
    groups: list[dict[str, Any]] | None = None


@dataclass
class _Step:
    """What a step holds: micro-batches and gradients by (stage, micro-batch)."""

    inputs: Sequence[Tensor]
    targets: Sequence[Any]
    scale: float | Tensor
    passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)
    # What goes to a stage: activations forward, gradients backward, by kind.
    given: dict[tuple[str, int, int], Tensor | Message] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)


class Pipeline:
    """Runs the stages of this rank as a table says, each action in the order of its row.

    Gradients are those of the mean of the micro-batches' losses, as one process would add them up;
    balance losses that the layers of any stage inject are divided with them, by `set_loss_scale` in
    every step. Activations and gradients travel between ranks over connections of their own: a
    receive is posted where the table has it, and what needs the tensor waits. "I" and "W" compute
    the gradients of inputs and of weights apart, where the input of a stage has one; of the first
    stage W computes all.

    Rows of FSDP2 (UNSHARD, RESHARD, REDUCE_GRAD) are left to FSDP2's own hooks. Hooks of parameters
    (DistributedDataParallel) see no gradient that W computes: reduce after the step.

    Args:
        table: the same on every rank; `add_messages` completes it where it has no messages.
        stages: modules of this rank by number, each of a tensor to a tensor, in floating point
            between stages and alike in shape for all micro-batches; on the CPU.
        loss_fn: gives the loss of the last stage's output and a target, a mean over the batch.
        group: the ranks of the pipeline, with Gloo; None is this process alone.
        max_in_flight: see `check_table`.
        recompute: keep of a forward pass nothing but the input of the stage, and run it again right
            before the backward pass: once, whether that is whole or in two. Layers count it once.

    Raises:
        ValueError: on every rank: the tables differ, or are refused by `check_table`; the group has
            another number of ranks; stages are not those of the table; there are chains, slices or
            versions of weights, which this does not run.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        table: ActionTable,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFunction,
        *,
        group: ProcessGroup | None = None,
        max_in_flight: int | None = None,
        recompute: bool = False,
    ) -> None:
        check_kind("Pipeline", "table", table, ActionTable)
        check_group(group, "Pipeline", name="group")
        self._device = torch.device("cpu")
        self.rank = group_rank(group)
        problem: Exception | None = None
        try:
            check_table(table, max_in_flight=max_in_flight)
            self._refuse(table, stages, group_size(group))
        except ValueError as error:
            problem = error
        facts = {
            "table": "; ".join(" ".join(map(str, row)) for row in table.rows),
            "recompute": recompute,
        }
        agreement.agree("Pipeline", facts, problem, group, self._device)
        self.table = table if table.has_messages or table.num_ranks == 1 else add_messages(table)
        self.stages, self._loss_fn, self._group = dict(stages), loss_fn, group
        self._last, self._recompute = table.num_stages - 1, recompute
        self._failed = False
        self._transport: PointToPoint | None = None
        if group is not None and group_size(group) > 1:
            self._transport = PointToPoint(group, self._device)
        # Shape and dtype of what goes into each stage, and which other ranks have been told.
        self._formats: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self._told: set[int] = set()

    def _refuse(self, table: ActionTable, stages: Mapping[int, nn.Module], size: int) -> None:
        if table.num_ranks != size:
            raise ValueError(
                f"Pipeline: expected group to have a rank for each of the table's "
                f"{table.num_ranks}, got {size}"
            )
        for rank in range(table.num_ranks):
            for action in table.actions(rank):
                if action.chain or action.slice or action.version:
                    raise ValueError(
                        "Pipeline: expected table to have one chain, whole micro-batches and one "
                        f"version of weights, got {action}"
                    )
        own = sorted(stage for (_, stage), rank in table.rank_of.items() if rank == self.rank)
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
            loss_scale: factor of all gradients, of a `GradScaler` say.

        Returns:
            The losses of the micro-batches, unscaled, on the rank of the last stage; else nothing.

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
        # Until it has ended: messages of a step that failed may still come.
        self._failed = self._transport is not None
        micro = self.table.num_micro_batches
        step = _Step(inputs, targets, loss_scale / micro)
        with telling(self._group, self._device, f"Pipeline.step on {self._name()}"):
            for stage, name, given in ((0, "inputs", inputs), (self._last, "targets", targets)):
                if stage in self.stages and len(given) != micro:
                    raise ValueError(
                        f"Pipeline.step: expected {name} to be {micro}, one for each micro-batch, "
                        f"got {len(given)}"
                    )
            for module in self.stages.values():
                set_loss_scale(module, step.scale)
        for row in self.table.rows[self.rank]:
            for action in row.parts or (row,):
                name = self._named(action)
                with telling(self._group, self._device, name), _noting(name):
                    self._run(step, action)
        for message in step.sent:
            message.wait()
        self._failed = False
        return [step.losses[i] for i in sorted(step.losses)]

    def _name(self) -> str:
        ranks = (self.rank,) if self._group is None else group_ranks(self._group)
        return f"rank {ranks[self.rank] if self._group else 0}"

    def _named(self, action: Action) -> str:
        return f"Pipeline.step, {action} ({action.described()}) on {self._name()}"

    def _run(self, step: _Step, action: Action) -> None:
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
            run(step, action.stage, action.micro_batch)

    def _take(self, step: _Step, kind: str, stage: int, number: int) -> Tensor:
        found = step.given.pop((kind, stage, number))
        return found.wait() if isinstance(found, Message) else found

    def _forward(self, step: _Step, stage: int, number: int) -> None:
        if stage == 0:
            x = step.inputs[number]
        else:
            x = self._take(step, "F", stage, number).requires_grad_()
        setting = _Setting.now() if self._recompute else None
        out = self._compute(step, stage, number, x)
        if stage == self._last:
            step.losses[number] = out.detach()
        else:
            step.given["F", stage + 1, number] = out.detach()
        step.passes[stage, number] = _Pass(x, None if self._recompute else out, setting)

    def _compute(self, step: _Step, stage: int, number: int, x: Tensor) -> Tensor:
        """The output of a stage, of the last one the loss."""
        out = self.stages[stage](x)
        if stage == self._last:
            return self._loss_fn(out, step.targets[number])
        self._check_output(stage, out)
        return out

    def _check_output(self, stage: int, out: Any) -> None:
        is_sent = isinstance(out, Tensor) and out.dtype in _DTYPES and out.dim() <= _MOST_DIMS
        if not is_sent or out.device != self._device:
            raise ValueError(
                f"Pipeline.step: expected stage {stage} to give a tensor on the CPU, of one of "
                f"{_DTYPES}, got {type(out).__name__ if not isinstance(out, Tensor) else out.dtype}"
            )
        known = self._formats.setdefault(stage + 1, (out.shape, out.dtype))
        if known != (out.shape, out.dtype):
            raise ValueError(
                f"Pipeline.step: expected stage {stage} to give the shape and dtype of its first "
                f"micro-batch {(tuple(known[0]), known[1])}, got {(tuple(out.shape), out.dtype)}"
            )

    def _backward(self, step: _Step, stage: int, number: int) -> None:
        state, out = self._computed(step, stage, number)
        grad = self._output_grad(step, stage, number, out)
        if out.requires_grad:
            torch.autograd.backward(out, grad)
        self._give_back(step, stage, number, state.x)
        del step.passes[stage, number]

    def _input_gradient(self, step: _Step, stage: int, number: int) -> None:
        if not step.passes[stage, number].x.requires_grad:
            return  # W computes all
        from moe_ext.pipeline._torch import stage_backward_input

        state, out = self._computed(step, stage, number)
        grad, state.groups = self._output_grad(step, stage, number, out), []
        if out.requires_grad:
            # It detaches what it is given, which cannot be a view.
            outputs = [out.clone() if out._is_view() else out]
            parameters = self.stages[stage].parameters()
            _, state.groups = stage_backward_input(outputs, [grad], [state.x], parameters)
        self._give_back(step, stage, number, state.x)

    def _weight_gradients(self, step: _Step, stage: int, number: int) -> None:
        groups = step.passes[stage, number].groups
        if groups is None:
            self._backward(step, stage, number)
            return
        from moe_ext.pipeline._torch import stage_backward_weight

        stage_backward_weight(self.stages[stage].parameters(), groups)
        del step.passes[stage, number]

    def _computed(self, step: _Step, stage: int, number: int) -> tuple[_Pass, Tensor]:
        """A forward pass with its output, run again where that was not kept."""
        state = step.passes[stage, number]

        def compute() -> None:
            assert state.setting is not None
            with state.setting.restored():
                state.out = self._compute(step, stage, number, state.x)

        if state.out is None:
            _InBackward.apply(torch.zeros((), requires_grad=True), compute).backward()
        assert state.out is not None
        return state, state.out

    def _output_grad(self, step: _Step, stage: int, number: int, out: Tensor) -> Tensor:
        if stage == self._last:
            return torch.as_tensor(step.scale, dtype=out.dtype).expand_as(out)
        return self._take(step, "B", stage, number)

    def _give_back(self, step: _Step, stage: int, number: int, x: Tensor) -> None:
        if stage > 0:
            step.given["B", stage - 1, number] = torch.zeros_like(x) if x.grad is None else x.grad
            x.grad = None  # W still holds x

    def _send(self, step: _Step, action: Action) -> None:
        assert self._transport is not None and action.micro_batch is not None
        peer = self.table.peer(action)
        way, rank = action.kind[-1], self.table.rank(peer)
        x = step.given.pop((way, peer.stage, action.micro_batch))
        assert isinstance(x, Tensor)
        if way == "F" and peer.stage not in self._told:
            self._told.add(peer.stage)
            words = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
            head = torch.tensor(words + [0] * (2 + _MOST_DIMS - len(words)))
            tag = self._tag(peer) + _FORMAT
            step.sent.append(self._transport.send(head, rank, tag, operation=self._named(action)))
        message = self._transport.send(
            x.contiguous(), rank, self._tag(peer), operation=self._named(action)
        )
        step.sent.append(message)

    def _receive(self, step: _Step, action: Action) -> None:
        assert self._transport is not None and action.micro_batch is not None
        way, rank = action.kind[-1], self.table.rank(self.table.peer(action))
        operation, tag = self._named(action), self._tag(action)
        into = action.stage + (way == "B")
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
        step.given[way, action.stage, action.micro_batch] = message

    def _tag(self, receive: Action) -> int:
        """The number of a message, by its receive."""
        assert receive.micro_batch is not None
        place = receive.micro_batch * self.table.num_stages + receive.stage
        return 4 * place + 2 * (receive.kind == "RECV_B")


@contextlib.contextmanager
def _noting(name: str) -> Iterator[None]:
    """Say below the words of an error in which action it was raised; from Python 3.11 on."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"in {name}")
        raise
