"""The `Pipeline` of one rank: checks its table and stages, and runs training steps."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library
from moe_ext._checks import check_kind, check_rule
from moe_ext.comm import point_to_point
from moe_ext.comm.agreement import Agreement, checksum
from moe_ext.comm.groups import backends, check_group, group_rank, group_size
from moe_ext.comm.interleaving import run_in_turns
from moe_ext.comm.reports import look, telling
from moe_ext.distributed.clipping import is_scaled_alike, note_stage
from moe_ext.distributed.gradients import gradient_dtype
from moe_ext.nn.model_layers import set_loss_scale
from moe_ext.pipeline.check import check_table, kept_versions, messages_of_pairs, updates_of
from moe_ext.pipeline.messages import add_messages
from moe_ext.pipeline.step import LossFunction, StageMessages, StageSetup, StepRun
from moe_ext.pipeline.table import ActionTable
from moe_ext.pipeline.turn_plan import TurnPlan

_HOST = torch.device("cpu")
# For each weight that several stages share: (stage, name of the parameter in that stage).
Tied = Sequence[Sequence[tuple[int, str]]]


class Pipeline:
    """Runs the stages of this rank: the actions of its row of a table, in order.

    Gradients are those of the mean of the micro-batches' losses, as one process would add them up.
    Balance losses that the layers of any stage inject are divided alike, by `set_loss_scale` in
    every step. Activations and gradients travel between ranks over connections of their own. A
    receive is posted at its place in the table, and the action that needs the tensor waits. "I" and
    "W" compute the gradients of inputs and of weights apart. If the input of a stage has no
    gradient, as in the first stage, "W" computes all. "I" computes all gradients of a stage that
    has FSDP2 or `torch.compile` inside.

    For stages on CUDA, tensors go over NCCL (`comm.point_to_point.OrderedMessages`), and streams
    wait for them. The host waits once for the shape and dtype of each stage's input, which travel
    over Gloo. Later no host waits within a step, so that an error of another rank is raised at the
    beginning of the next one. Actions run on the current stream, W too unless `weight_stream`.

    If a stage lies on several ranks, one for each chain of the table, a step ends with the sum of
    its gradients on all of them. In a table with slices, a stage is called as `stage(x, past)` and
    returns `(out, kept)`. `kept` is a tuple of tensors that later slices of the micro-batch need,
    such as keys and values. `past` is a tuple with the `kept` of each earlier slice, and gradients
    flow back through it to these slices. In a table with updates, `update` makes each new version
    of a stage's weights in the parameters. The backward pass uses the version of the forward pass,
    and gradients are those of the mean over the micro-batches of an update. A step begins with
    version 0.

    Actions of FSDP2 (UNSHARD, RESHARD, REDUCE_GRAD) are left to FSDP2's own hooks. Hooks of
    parameters, such as those of DistributedDataParallel, do not see gradients that W computes.
    Reduce such gradients after the step.

    Args:
        table: the same on every rank; `add_messages` completes a table without messages. Or a plan
            of `plan_turns`, for stages on the CPU. A rank then computes one action while others of
            its own wait for exchanges between the ranks of their stage. Each forward pass of a plan
            has a random seed of its own, drawn from the caller's generator.
        stages: modules of this rank by number, on the CPU or one CUDA device. Each maps a tensor to
            a tensor. Between stages, tensors are in floating point and have one shape for all
            micro-batches.
        loss_fn: computes a loss, a mean over the batch, from the last stage's output and a target.
        group: the ranks of the pipeline, with Gloo; None for this process alone. Stages on CUDA
            need NCCL, too ("cpu:gloo,cuda:nccl").
        max_in_flight: see `check_table`.
        recompute: keep only the input of a stage from its forward pass, and run that pass again
            right before the backward pass. I and W share one such run. Layers do not count its
            tokens a second time.
        slice_lengths: lengths of a table's slices along dimension 1 of inputs and targets, which
            are tensors then. The loss of a micro-batch is the mean over slices, weighted by length.
        update: function for a table with updates, called with the number of a stage when its
            parameters have the gradients of an update. The function must take an optimizer's step,
            and clear the gradients.
        tied: weights that several stages share, such as an embedding in the first and the last one.
            Each is a list of all its (stage, name of the parameter). Copies of a weight must begin
            alike. All have the sum of their gradients after a step; `clip_grad_norm_` counts it
            once.
        weight_stream: for stages on CUDA, run W on a stream of its own, beside later actions and
            waits for messages. The next W, a whole backward pass and the end of a step wait for it,
            and its inputs stay in memory until then. No card has run it. The option has no effect
            on the CPU, and ranks may differ in it.

    Raises:
        ValueError: on every rank: the tables differ, or are refused by `check_table`; the table has
            another number of ranks than the group; stages are not those of the table, or are on
            several devices; copies of a tied weight, or of a stage that lies on several ranks,
            differ in shape or dtype; `slice_lengths` or `update` are missing or not needed; there
            are updates in several chains, or I and W of slices. For stages on CUDA: the group has
            no NCCL or no Gloo; the table is a plan; the messages of two ranks have another order on
            the receiver; `weight_stream` is True without the compiled module `_runtime`.
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
        weight_stream: bool = False,
    ) -> None:
        check_kind("Pipeline", "table", table, ActionTable, TurnPlan, required=True)
        self._plan = table if isinstance(table, TurnPlan) else None
        table = self._plan.table if self._plan else table
        assert isinstance(table, ActionTable)
        check_group(group, "Pipeline", name="group")
        self.rank = group_rank(group)
        with Agreement("Pipeline", group) as agreement:
            check_table(table, max_in_flight=max_in_flight)
            check_kind("Pipeline", "stages", stages, Mapping, required=True)
            for number, stage in stages.items():
                check_kind("Pipeline", f"stage {number}", stage, nn.Module, required=True)
            parameters = (p for stage in stages.values() for p in stage.parameters())
            self._device = next((p.device for p in parameters), _HOST)
            self._in_order = point_to_point.goes_in_order(self._device)
            self._refuse(table, stages, group_size(group))
            if self._in_order:
                self._refuse_order(group)
            if slice_lengths is not None:
                slice_lengths = [operator.index(length) for length in slice_lengths]
            _refuse_options(table, slice_lengths, update)
            _refuse_tied(table, stages, tied, update)
            if weight_stream and self._in_order:
                _refuse_weight_stream()
            facts = {
                "table": "; ".join(" ".join(map(str, row)) for row in table.rows),
                "turns": self._plan and "; ".join(map(str, self._plan.starts)),
                "type of device": self._device.type,
                "recompute": recompute,
                "slice_lengths": slice_lengths,
                "tied": [list(map(list, names)) for names in tied],
            }
            kinds = _kinds_of_weights(table, stages, tied)
            rows = agreement.compare(facts, values=[*kinds.values()])
            for name, of_ranks in zip(kinds, zip(*rows, strict=True), strict=True):
                if len({*of_ranks} - {0}) > 1:
                    raise ValueError(
                        f"Pipeline: expected {name} to have the same shapes and dtypes on all of "
                        "its ranks, got others"
                    )
        is_whole = table.has_messages or table.num_ranks == 1 or self._plan is not None
        self.table = table if is_whole else add_messages(table)
        self.stages, self._group, self._failed = dict(stages), group, False
        updates, micro = updates_of(table).get((0, 0), {}), table.num_micro_batches
        sizes = Counter(updates.values())
        self._setup = StageSetup(
            self.stages,
            loss_fn,
            recompute,
            list(slice_lengths or ()),
            update,
            kept_versions(table),
            [sizes[updates[i]] if updates else micro for i in range(micro)],
            weight_stream,
        )
        self._tied = tied
        self._note_parameters()
        pairs = None
        if self._in_order:
            of_copies = (p for _, r, _ in self._shared for p in itertools.permutations(r, 2))
            pairs = {*messages_of_pairs(self.table), *of_copies}
        self._messages = StageMessages(self.table, group, self.rank, self._device, pairs)

    def _note_parameters(self) -> None:
        """Note the parameters of this step; some may be frozen or replaced since the last step."""
        self._shared = self._shared_parameters()
        if self._group is not None:
            # Frozen parameters are noted too, so that a `GradScaler` on a rank without any trained
            # parameter skips the same steps as the other ranks.
            every = [p for stage in self.stages.values() for p in stage.parameters()]
            copies = [p for _, ranks, p in self._shared if self.rank != ranks[0]]
            note_stage(every, self._group, copies)

    def _shared_parameters(self) -> list[tuple[int, list[int], nn.Parameter]]:
        """Return parameters with copies on other ranks: (number, ranks of all copies, own copy)."""
        found, stages = [], self.table.num_stages
        for number, names in enumerate(self._tied):
            ranks = sorted({self.table.rank_of[0, stage] for stage, _ in names})
            mine = [self.stages[s].get_parameter(n) for s, n in names if s in self.stages]
            if mine and len(ranks) > 1:
                found.append((number, ranks, mine[0]))
        for stage in self.stages:
            ranks = sorted({rank for (_, s), rank in self.table.rank_of.items() if s == stage})
            for i, p in enumerate(_trained(self.stages[stage])):
                if len(ranks) > 1:
                    found.append((len(self._tied) + i * stages + stage, ranks, p))
        return sorted(found, key=lambda each: each[0])

    def _refuse(self, table: ActionTable, stages: Mapping[int, nn.Module], size: int) -> None:
        if table.num_ranks != size:
            raise ValueError(
                f"Pipeline: expected group to have a rank for each of the table's "
                f"{table.num_ranks}, got {size}"
            )
        own = sorted({stage for (_, stage), rank in table.rank_of.items() if rank == self.rank})
        rule = f"{own}, those of the table for this rank"
        check_rule("Pipeline", "stages", sorted(stages), rule, sorted(stages) == own)
        for number, module in stages.items():
            for name, parameter in module.named_parameters():
                device = parameter.device
                if device != self._device or device.type not in ("cpu", "cuda"):
                    raise ValueError(
                        "Pipeline: expected stages of a rank to be on the CPU or on one CUDA "
                        f"device, got {name} of stage {number} on {device}"
                    )

    def _refuse_order(self, group: ProcessGroup | None) -> None:
        if self._plan is not None:
            raise ValueError(
                "Pipeline: expected table to be an ActionTable for stages on CUDA, since NCCL "
                "needs one order of messages on both ranks, got a TurnPlan"
            )
        known = {} if group is None else backends(group)
        if group_size(group) > 1 and (known.get("cuda") != "nccl" or "cpu" not in known):
            raise ValueError(
                "Pipeline: expected group to have NCCL, and a backend for the CPU that tells "
                f'shapes ("cpu:gloo,cuda:nccl"), for stages on CUDA, got {known}'
            )

    def step(
        self,
        inputs: Sequence[Tensor] = (),
        targets: Sequence[Any] = (),
        *,
        loss_scale: float | Tensor = 1.0,
    ) -> list[Tensor]:
        """Run all micro-batches forward and backward; gradients are added to the parameters'.

        Under `torch.no_grad()`, for evaluation, only the losses are computed.

        Args:
            inputs: one tensor for each micro-batch, on the rank of the first stage.
            targets: one for each micro-batch, on the rank of the last stage.
            loss_scale: factor of all gradients: a number, or `scaler.scale(torch.ones(()))` of a
                `moe_ext.distributed.GradScaler`, the same on all ranks.

        Returns:
            The losses of the micro-batches, unscaled, on the rank of the last stage. Other ranks
            get an empty list. With several chains, each rank with a last stage gets the losses of
            its chain.

        Raises:
            ValueError: the number of inputs or targets is not that of the micro-batches (other
                ranks raise a `RankFailureError` then); outputs of a stage differ in shape or dtype;
                a loss is not one number.
            RankFailureError: a rank died or raised; the text has stage, micro-batch and action of
                the wait.
            RuntimeError: an earlier step has failed.
        """
        if self._failed:
            raise RuntimeError(
                "Pipeline.step: expected no step before this one to have failed, got a pipeline "
                "whose messages were lost; build another one"
            )
        with telling(self._group, _HOST, f"Pipeline.step on {self._messages.place}"):
            if self._group is not None and not is_scaled_alike(loss_scale):
                raise ValueError(
                    "Pipeline.step: expected loss_scale to be a number, or a tensor that "
                    "moe_ext.distributed.GradScaler has scaled, since with another scaler each "
                    "stage would skip steps by itself, got another tensor"
                )
        setup, micro = self._setup, self.table.num_micro_batches
        # The pipeline counts as failed until the step has ended. Messages of a step that failed may
        # still arrive, and a later step would take them for its own.
        self._failed = self._messages.travels
        if self._failed and self._in_order:
            # Within a step streams wait for messages, and the host learns of no error. The host
            # therefore asks here for errors of other ranks.
            assert self._group is not None
            look(self._group)
        with telling(self._group, _HOST, f"Pipeline.step on {self._messages.place}"):
            last = self.table.num_stages - 1
            for stage, name, given in ((0, "inputs", inputs), (last, "targets", targets)):
                if stage in self.stages:
                    rule = f"{micro}, one for each micro-batch"
                    count = len(given) if hasattr(given, "__len__") else given
                    check_rule("Pipeline.step", name, count, rule, count == micro)
        self._note_parameters()
        shared = self._shared if torch.is_grad_enabled() else []
        before = [p.grad for _, _, p in shared]
        for _, _, p in shared:
            p.grad = None
        run = StepRun(setup, self._messages, inputs, targets, loss_scale)
        for module in self.stages.values() if setup.in_turns else ():
            set_loss_scale(module, loss_scale / micro)
        if self._plan is not None:
            run.run_plan(self._plan)
        for row in self.table.rows[self.rank] if self._plan is None else ():
            acts = [functools.partial(run.act, action) for action in row.in_turn()]
            # On CUDA the host does not wait for exchanges, so that no action needs to pass a turn.
            if setup.in_turns and not self._in_order:
                run_in_turns(acts)
            else:
                for act in acts:
                    act()
        run.join()
        name = f"Pipeline.step, sum of the gradients of copies on {self._messages.place}"
        with telling(self._group, _HOST, name):
            for (number, ranks, p), earlier in zip(shared, before, strict=True):
                own = p.grad
                if own is None:
                    own = torch.zeros_like(p, dtype=gradient_dtype(p))
                total, sent = self._messages.sum_over(own.contiguous(), ranks, number, name)
                run.sent += sent
                if p.requires_grad:
                    p.grad = total if earlier is None else total.add_(earlier)
                else:
                    p.grad = earlier
        for message in run.sent:
            message.wait()
        self._failed = False
        return [run.losses[i] for i in sorted(run.losses)]

    @property
    def turns(self) -> TurnPlan | None:
        """The plan by which actions run beside each other; None if they run one by one."""
        return self._plan

    @property
    def tied_bytes(self) -> int:
        """Bytes of gradients that this rank sends in a step, for weights that other ranks share."""
        return sum((len(ranks) - 1) * p.nbytes for _, ranks, p in self._shared)


def _kinds_of_weights(
    table: ActionTable, stages: Mapping[int, nn.Module], tied: Tied
) -> dict[str, int]:
    """Map tied weights and stages to checksums of shapes and dtypes.

    The checksum is 0 if this rank does not have the weight or the stage.
    """
    weights = {
        f"tied {list(names)}": [stages[s].get_parameter(n) for s, n in names if s in stages][:1]
        for names in tied
    }
    weights |= {
        f"stage {s}, but for frozen weights,": _trained(stages[s]) if s in stages else []
        for s in range(table.num_stages)
    }
    kinds = {n: {str(i): (p.shape, p.dtype) for i, p in enumerate(w)} for n, w in weights.items()}
    return {name: checksum(own) if own else 0 for name, own in kinds.items()}


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [p for p in stage.parameters() if p.requires_grad]


def _refuse_weight_stream() -> None:
    if _runtime_library.load() is None:
        raise ValueError(
            "Pipeline: expected weight_stream to be False without moe_ext._runtime, which moves "
            f"nodes of autograd to another stream, got True; {_runtime_library.state()}"
        )


def _refuse_options(table: ActionTable, lengths: Sequence[int] | None, update: Any) -> None:
    slices, has_updates = table.num_slices, bool(updates_of(table))
    fits = len(lengths or [0]) == slices and (lengths is None or min(lengths) >= 1)
    wanted = f"the {slices} lengths of the table's slices" if slices > 1 else "None"
    check_rule("Pipeline", "slice_lengths", lengths, wanted, fits)
    wanted = "a function, for the updates of the table" if has_updates else "None"
    check_rule("Pipeline", "update", update, wanted, has_updates == (update is not None))
    if has_updates and any(chain for chain, _ in table.rank_of):
        raise ValueError("Pipeline: expected a table with updates to have one chain, got several")
    kinds = {a.kind for rank in range(table.num_ranks) for a in table.actions(rank)}
    if slices > 1 and "I" in kinds:
        raise ValueError("Pipeline: expected slices to go backward as a whole (B), got I and W")


def _refuse_tied(
    table: ActionTable, stages: Mapping[int, nn.Module], tied: Tied, update: Any
) -> None:
    is_plain = update is None and not any(chain for chain, _ in table.rank_of)
    rule = "empty for a table with updates or several chains"
    check_rule("Pipeline", "tied", tied, rule, is_plain or not tied)
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
