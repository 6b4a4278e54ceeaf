"""One step of a pipeline on one rank: the actions of its row, and the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library
from moe_ext.comm import streams
from moe_ext.comm.groups import group_ranks, group_size
from moe_ext.comm.interleaving import pass_turn, run_in_turns
from moe_ext.comm.pending import Pending
from moe_ext.comm.point_to_point import OrderedMessages, PeerMessage, PointToPoint
from moe_ext.comm.reports import telling
from moe_ext.comm.traffic import not_counted
from moe_ext.nn.model_layers import set_loss_scale
from moe_ext.nn.torch_state import TorchState
from moe_ext.pipeline.table import MESSAGES, OF_STAGE, UPDATE, Action, ActionTable
from moe_ext.pipeline.turn_plan import TurnPlan

LossFunction = Callable[[Tensor, Any], Tensor]
Message = PeerMessage | Pending[Tensor]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 14
# Added to the tag of a tensor, which is even, for the message with the tensor's shape and dtype.
_FORMAT = 1
_CPU = torch.device("cpu")
# Autograd nodes of stages that cannot go backward in two parts. `torch.compile` makes a single node
# of a graph, and FSDP2 reduces the gradients of weights once it sees that of the input.
_OF_A_WHOLE_PASS = ("CompiledFunctionBackward", "RegisterPostBackwardFunctionBackward")
# Name of the side stream for gradients of weights.
_WEIGHTS = "gradients of weights"


@dataclass(frozen=True)
class StageSetup:
    """The stages of a rank, and how a step runs them; see `Pipeline`.

    Attributes:
        stages: modules of this rank by number.
        loss_fn: computes the loss from the last stage's output and a target.
        recompute: True to run forward passes again before backward passes.
        lengths: lengths of the slices; empty for whole micro-batches.
        update: makes a new version of a stage's weights; None for tables without updates.
        versions: for each update (chain, stage, version), the versions to keep, as `kept_versions`.
        divisors: for each micro-batch, the number of micro-batches in the mean of its gradient.
        weight_stream: True to run W on a stream of its own, if the device has streams.
    """

    stages: Mapping[int, nn.Module]
    loss_fn: LossFunction
    recompute: bool
    lengths: Sequence[int]
    update: Callable[[int], None] | None
    versions: Mapping[tuple[int, int, int], Any]
    divisors: Sequence[int]
    weight_stream: bool

    @property
    def in_turns(self) -> bool:
        """True if weights and scales of a stage are the same for all micro-batches."""
        return not (self.lengths or self.update)


class _InBackward(torch.autograd.Function):
    """Calls a function in a backward pass, where layers do not count a forward pass again."""

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
    """A micro-batch, or a slice of it, from its forward pass to the end of its backward pass."""

    x: Tensor
    # The output (or the loss) and the tensors kept for later slices. None if the forward pass has
    # to run again.
    outs: tuple[Tensor, ...] | None
    setting: TorchState | None = None
    # Result of `stage_backward_input` in I, for W. None if W computes all gradients.
    groups: list[dict[str, Any]] | None = None


class StageMessages:
    """Messages between the stages of a pipeline, and the format (shape, dtype) of stages' inputs.

    Args:
        table: table with its messages.
        group: the ranks; None for this process alone.
        rank: rank of this process in the group.
        device: device of the tensors.
        pairs: (sender, receiver) of all messages, if the device needs `OrderedMessages`; else None.
    """

    def __init__(
        self,
        table: ActionTable,
        group: ProcessGroup | None,
        rank: int,
        device: torch.device,
        pairs: Collection[tuple[int, int]] | None = None,
    ) -> None:
        self.table, self.group, self.rank, self.device = table, group, rank, device
        # Formats are tensors on the CPU, whatever the device of the stages.
        self._hosts: PointToPoint | None = None
        self._transport: PointToPoint | OrderedMessages | None = None
        if group is not None and group_size(group) > 1:
            self._transport = self._hosts = PointToPoint(group, _CPU)
            if pairs is not None:
                self._transport = OrderedMessages(group, device, pairs)
        # Shape and dtype of the input of each (chain, stage, slice).
        self._formats: dict[tuple[int, int, int], tuple[torch.Size, torch.dtype]] = {}
        # Each (chain, stage, slice) of another rank to which its format has been sent.
        self._told: set[tuple[int, int, int]] = set()
        self._names: dict[Action, str] = {}

    @property
    def travels(self) -> bool:
        """True if there are other ranks."""
        return self._transport is not None

    @property
    def place(self) -> str:
        """Name of this rank, for error messages."""
        return f"rank {0 if self.group is None else group_ranks(self.group)[self.rank]}"

    def named(self, action: Action) -> str:
        """Return the name of an action of this rank, for error messages."""
        if action not in self._names:
            words = f"{action} ({action.described()}) on {self.place}"
            self._names[action] = f"Pipeline.step, {words}"
        return self._names[action]

    def check_output(self, action: Action, out: Any) -> None:
        """Raise a ValueError if an output cannot be sent, or has another format than the first."""
        stage = action.stage
        is_sent = isinstance(out, Tensor) and out.dtype in _DTYPES and out.dim() <= _MOST_DIMS
        if not is_sent or out.device != self.device:
            raise ValueError(
                f"Pipeline.step: expected stage {stage} to give a tensor on {self.device}, of one "
                f"of {_DTYPES}, got {_kind(out)}"
            )
        into = action.chain, stage + 1, action.slice
        known = self._formats.setdefault(into, (out.shape, out.dtype))
        if known != (out.shape, out.dtype):
            raise ValueError(
                f"Pipeline.step: expected stage {stage} to give the shape and dtype of its first "
                f"micro-batch {(tuple(known[0]), known[1])}, got {(tuple(out.shape), out.dtype)}"
            )

    def is_known(self, receive: Action) -> bool:
        """Return True if the format of the tensor that a receive brings is known."""
        return _into(receive) in self._formats

    def send(self, x: Tensor, action: Action) -> list[Message]:
        """Begin to send a tensor to the rank of another stage; the first time with its format."""
        assert self._transport is not None and self._hosts is not None
        peer = self.table.peer(action)
        sent: list[Message] = []
        rank, name, tag = self.table.rank(peer), self.named(action), self._tag(peer)
        into = peer.chain, peer.stage, peer.slice
        if action.kind[-1] == "F" and into not in self._told:
            self._told.add(into)
            words = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
            head = torch.tensor(words + [0] * (2 + _MOST_DIMS - len(words)))
            with not_counted():
                sent.append(self._hosts.send(head, rank, tag + _FORMAT, operation=name))
        return [*sent, self._transport.send(x.contiguous(), rank, tag, operation=name)]

    def receive(self, action: Action) -> Message:
        """Begin to receive a tensor. Wait for its format if that is not known yet."""
        assert self._transport is not None and self._hosts is not None
        rank = self.table.rank(self.table.peer(action))
        name, tag, into = self.named(action), self._tag(action), _into(action)
        if into not in self._formats:
            head = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
            # The wait happens before the first tensor of a stage. No circle of waits can arise,
            # because `check_table` accepts only tables in which a receive may wait.
            told = self._hosts.receive(head, rank, tag + _FORMAT, operation=name)
            dtype, dims, *sizes = told.wait().tolist()
            self._formats[into] = torch.Size(sizes[:dims]), _DTYPES[dtype]
        shape, kind = self._formats[into]
        into_place = torch.empty(shape, dtype=kind, device=self.device)
        return self._transport.receive(into_place, rank, tag, operation=name)

    def sum_over(
        self, own: Tensor, ranks: Sequence[int], number: int, name: str
    ) -> tuple[Tensor, list[Message]]:
        """Return the sum of a tensor over ranks, the same bits on all, and the sends underway."""
        assert self._transport is not None
        base = 4 * self.table.num_micro_batches * self.table.num_stages * self.table.num_slices
        found, tag = {self.rank: own}, base + number
        sent: list[Message] = []
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            sent.append(self._transport.send(own, rank, tag, operation=name))
        for rank in others:
            into = torch.empty_like(own)
            found[rank] = self._transport.receive(into, rank, tag, operation=name).wait()
        return torch.stack([found[rank] for rank in ranks]).sum(0), sent

    def _tag(self, receive: Action) -> int:
        """Return the tag of a message, from its receive."""
        assert receive.micro_batch is not None
        place = receive.micro_batch * self.table.num_stages + receive.stage
        place = place * self.table.num_slices + receive.slice
        return 4 * place + 2 * (receive.kind == "RECV_B")


class _WeightStream:
    """Computes gradients of weights on a side stream, one micro-batch at a time.

    The graph of the micro-batch lives until the main stream has waited for the side stream, because
    the main stream reuses its memory. The main stream waits before the next micro-batch begins, so
    that at most one graph lives longer than without the side stream.

    Args:
        device: device of the stages, with streams.
    """

    def __init__(self, device: torch.device) -> None:
        module = _runtime_library.load()
        assert module is not None
        self._move, self._device = module.move_to_current_stream, device
        self._work: streams.Beside | None = None

    def take(self, out: Tensor) -> None:
        """Move the backward nodes behind an output from the stream of its forward pass to this one.

        The nodes that accumulate gradients of weights stay, because other micro-batches share them.
        """
        with torch.cuda.stream(streams.side_stream(self._device, _WEIGHTS)):
            self._move(out)

    def run(self, groups: list[dict[str, Any]]) -> None:
        """Queue the gradients of weights from the groups of `stage_backward_input`."""
        self.join()
        weights = _weights(groups)
        nodes = [node for group in groups for node in group["intermediates"]]
        all_grads = [grad for group in groups for grads in group["grads"] for grad in grads]
        grads = [grad for grad in all_grads if grad is not None]

        def work() -> None:
            # Nodes that accumulate on the main stream would make that stream wait for each
            # gradient.
            for weight in weights:
                self._move(weight)
            for group in groups:
                _add_weight_gradients(group, retain_graph=True)

        if not grads:
            return
        try:
            self._work = streams.run_beside(work, *grads, purpose=_WEIGHTS, held=tuple(nodes))
        finally:
            for weight in weights:
                self._move(weight)

    def join(self) -> None:
        """Let the main stream wait for everything that was queued."""
        if self._work is not None:
            self._work.join()
            self._work = None


class StepRun:
    """Runs the actions of a step on this rank, and holds tensors by (stage, micro-batch, slice).

    Args:
        setup: the stages.
        messages: messages between the stages.
        inputs: one for each micro-batch, on the rank of the first stage.
        targets: one for each micro-batch, on the rank of the last stage.
        scale: factor of all gradients.

    Attributes:
        losses: losses of the micro-batches, by number.
        sent: sends that may be underway.
    """

    def __init__(
        self,
        setup: StageSetup,
        messages: StageMessages,
        inputs: Sequence[Tensor],
        targets: Sequence[Any],
        scale: float | Tensor,
    ) -> None:
        self.setup, self.messages = setup, messages
        self.inputs, self.targets, self.scale = inputs, targets, scale
        self.table, self.last = messages.table, messages.table.num_stages - 1
        self.losses: dict[int, Tensor] = {}
        self.sent: list[Message] = []
        self.passes: dict[tuple[int, int, int], _Pass] = {}
        # Tensors for a stage, of this rank or underway to it: activations ("F"), gradients ("B").
        self.given: dict[tuple[str, tuple[int, int, int]], Tensor | Message] = {}
        # Leaves that each slice keeps for later slices, by (stage, micro-batch).
        self.kept: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        # Weights of each (stage, version) by name: leaves that share the storage of the parameters,
        # or copies.
        self.weights: dict[tuple[int, int], dict[str, Tensor]] = {}
        if setup.update is not None:
            for stage in setup.stages:
                self.weights[stage, 0] = self._leaves(stage, 0)
        beside = setup.weight_stream and streams.has_streams(messages.device)
        self.weight_stream = _WeightStream(messages.device) if beside else None

    def run_plan(self, plan: TurnPlan) -> None:
        """Run the actions of a plan, in as many lanes as it has."""
        starts = list(plan.starts[self.messages.rank])
        seeds = torch.randint(2**62, (len(starts),)).tolist()
        state, underway = torch.get_rng_state(), set[Action]()
        receives = [self.table.receive(start.action) for start in starts]
        next_start = 0

        def post(until: int, *, ahead: bool) -> None:
            """Post the first receives. Stop, if `ahead`, at one whose format is not known."""
            for i, receive in enumerate(receives[:until]):
                if receive is None:
                    continue
                if ahead and not self.messages.is_known(receive):
                    # A thread waits for the messages of a peer in the order of their posts. A later
                    # message may depend on the action that takes this one, and would never come if
                    # the thread waited for it first.
                    return
                self.act(receive)
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
                self.act(action)
                send = self.table.send(action)
                if send is not None:
                    self.act(send)
                underway.discard(action)

        run_in_turns([run_lane] * plan.lanes)
        torch.set_rng_state(state)

    def join(self) -> None:
        """Let the current stream wait for the gradients of weights that were queued."""
        if self.weight_stream is not None:
            self.weight_stream.join()

    def act(self, action: Action) -> None:
        """Run an action. An error gets a note with the name of the action."""
        try:
            self._run(action)
        except Exception as error:
            name = self.messages.named(action)
            # Python has `add_note` from 3.11 on. A note is printed below the text of the error.
            if hasattr(error, "add_note"):
                error.add_note(f"in {name}")
            with telling(self.messages.group, _CPU, name):
                raise

    def _run(self, action: Action) -> None:
        if action.kind == UPDATE:
            self._make_version(action)
        if action.kind in OF_STAGE:
            return
        way = action.kind[-1]
        if action.kind.startswith("SEND"):
            x = self.given.pop((way, _key(self.table.peer(action))))
            assert isinstance(x, Tensor)
            # Sends that have ended are dropped, so that their memory is free for later tensors.
            self.sent = [message for message in self.sent if not message.is_completed()]
            self.sent += self.messages.send(x, action)
        elif action.kind in MESSAGES:
            self.given[way, _key(action)] = self.messages.receive(action)
        else:
            run = {
                "F": self._forward,
                "B": self._backward,
                "I": self._input_gradient,
                "W": self._weight_gradients,
            }[action.kind]
            run(action)

    def _take(self, kind: str, action: Action) -> Tensor:
        found = self.given.pop((kind, _key(action)))
        return found if isinstance(found, Tensor) else found.wait()

    def _forward(self, action: Action) -> None:
        stage, number, _ = _key(action)
        if stage == 0:
            x = self._part(self.inputs, action)
        else:
            x = self._take("F", action).requires_grad_()
        # Under `no_grad` no backward pass comes that would need a second forward pass.
        again = self.setup.recompute and torch.is_grad_enabled()
        setting = TorchState.now(self.messages.device) if again else None
        outs = self._compute(action, x)
        if stage == self.last:
            loss = outs[0].detach() * self._share(action)
            self.losses[number] = self.losses.get(number, 0) + loss
        else:
            self.given["F", _key(action, 1)] = outs[0].detach()
        if self.setup.lengths:
            kept = tuple(each.detach().requires_grad_() for each in outs[1:])
            self.kept.setdefault((stage, number), []).append(kept)
        self.passes[_key(action)] = _Pass(x, None if again else outs, setting)

    def _part(self, batches: Sequence[Any], action: Action) -> Any:
        """Return the part of inputs or targets that an action takes."""
        _, number, part = _key(action)
        lengths = self.setup.lengths
        return batches[number].split(lengths, 1)[part] if lengths else batches[number]

    def _share(self, action: Action) -> float:
        """Return the share of a slice in the length of its micro-batch."""
        lengths = self.setup.lengths
        return lengths[action.slice] / sum(lengths) if lengths else 1.0

    def _scale(self, action: Action) -> float | Tensor:
        return self.scale * self._share(action) / self.setup.divisors[_key(action)[1]]

    def _compute(self, action: Action, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of a stage (the loss, of the last one) and what later slices need."""
        module, kept = self.setup.stages[action.stage], ()
        given: tuple[Any, ...] = (x,)
        if not self.setup.in_turns:
            set_loss_scale(module, self._scale(action))
        if self.setup.lengths:
            given = (x, tuple(self.kept.get(_key(action)[:2], ())[: action.slice]))
        if self.setup.update:
            weights = self.weights[action.stage, action.version]
            out = torch.func.functional_call(module, weights, given)
        else:
            out = module(*given)
        if self.setup.lengths:
            out, kept = out
        if action.stage == self.last:
            out = self.setup.loss_fn(out, self._part(self.targets, action))
            if not isinstance(out, Tensor) or out.numel() != 1 or not out.is_floating_point():
                shape = f" of shape {tuple(out.shape)}" if isinstance(out, Tensor) else ""
                raise ValueError(
                    "Pipeline.step: expected loss_fn to give a tensor of one number in floating "
                    f"point, got {_kind(out)}{shape}"
                )
        else:
            self.messages.check_output(action, out)
        return out, *kept

    def _make_version(self, action: Action) -> None:
        """Sum the gradients of all versions, update the parameters, and drop unused versions."""
        assert self.setup.update is not None
        self.join()
        stage, version = action.stage, action.version
        module, kept = self.setup.stages[stage], self.setup.versions[action.chain, stage, version]
        parameters = dict(module.named_parameters())
        for _, weights in [each for each in self.weights.items() if each[0][0] == stage]:
            for name, leaf in weights.items():
                if leaf.grad is not None:
                    grad = parameters[name].grad
                    parameters[name].grad = leaf.grad if grad is None else grad + leaf.grad
                    leaf.grad = None
        self.setup.update(stage)
        for old in [key for key in self.weights if key[0] == stage and key[1] not in kept]:
            del self.weights[old]
        self.weights[stage, version] = self._leaves(stage, version)

    def _leaves(self, stage: int, version: int) -> dict[str, Tensor]:
        """Return the weights as new leaves, copied if they are used after the next update."""
        following = [v for key, v in self.setup.versions.items() if key[1:] == (stage, version + 1)]
        outlives = any(version in kept for kept in following)
        return {
            name: (p.data.clone() if outlives else p.data).requires_grad_(p.requires_grad)
            for name, p in self.setup.stages[stage].named_parameters()
        }

    def _backward(self, action: Action) -> None:
        state, outs = self._computed(action)
        grads = self._output_grads(action, outs)
        graded = [i for i, out in enumerate(outs) if out.requires_grad]
        # W on the side stream adds to the same gradients.
        self.join()
        if graded:
            torch.autograd.backward([outs[i] for i in graded], [grads[i] for i in graded])
        self._give_back(action, state.x)
        del self.passes[_key(action)]

    def _input_gradient(self, action: Action) -> None:
        if action.stage == 0:
            # W computes all gradients of the first stage.
            return
        from moe_ext.pipeline._torch import stage_backward_input

        state, (out,) = self._computed(action)
        nodes = _nodes(out)
        if any(node.name() in _OF_A_WHOLE_PASS for node in nodes):
            self._backward(action)
            return
        grads, state.groups = self._output_grads(action, (out,)), []
        if out.requires_grad:
            leaves = [node.variable for node in nodes if _is_of_leaf(node)]
            # Weights are taken from the graph, because `loss_fn` may have some, too.
            weights = (leaf for leaf in leaves if leaf is not state.x)
            # `stage_backward_input` detaches the output in place, which torch refuses for a view. A
            # clone is not a view.
            _, groups = stage_backward_input([out.clone()], grads, [state.x], weights)
            if state.x.grad is None:
                # The output does not depend on the input, and `stage_backward_input` finds only
                # weights on the way to the input. W computes all gradients.
                state.groups, self.given["B", _key(action)] = None, grads[0]
            else:
                state.groups = _joined(groups)
                if self.weight_stream is not None:
                    self.weight_stream.take(out)
                # Parts of the graph that W does not need are freed.
                state.outs = ()
        self._give_back(action, state.x)

    def _weight_gradients(self, action: Action) -> None:
        if _key(action) not in self.passes:
            # I has computed all gradients.
            return
        groups = self.passes[_key(action)].groups
        if groups is None:
            self._backward(action)
            return
        if self.weight_stream is not None:
            self.weight_stream.run(groups)
        else:
            for group in groups:
                _add_weight_gradients(group)
                pass_turn()
        del self.passes[_key(action)]

    def _computed(self, action: Action) -> tuple[_Pass, tuple[Tensor, ...]]:
        """Return a forward pass with its output, after a second run if that was not kept."""
        state = self.passes[_key(action)]

        def compute() -> None:
            assert state.setting is not None
            with state.setting.restored():
                state.outs = self._compute(action, state.x)

        if state.outs is None:
            _InBackward.apply(torch.zeros((), requires_grad=True), compute).backward()
        assert state.outs is not None
        return state, state.outs

    def _output_grads(self, action: Action, outs: tuple[Tensor, ...]) -> list[Tensor]:
        if action.stage == self.last:
            # `mul_` takes a number or a device tensor, and neither makes the host wait.
            grads = [torch.ones_like(outs[0]).mul_(self._scale(action))]
        else:
            grads = [self._take("B", action)]
        if self.setup.lengths:
            leaves = self.kept[_key(action)[:2]].pop()
            grads += [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return grads

    def _give_back(self, action: Action, x: Tensor) -> None:
        if action.stage > 0:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            self.given["B", _key(action, -1)] = grad
            # W still holds x, and would hold its gradient with it.
            x.grad = None


def _nodes(out: Tensor) -> list[Any]:
    """Return all nodes of the graph of a tensor."""
    found, left = dict[Any, None](), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = None
            left += [before for before, _ in node.next_functions]
    return list(found)


def _is_of_leaf(node: Any) -> bool:
    return not node.next_functions and hasattr(node, "variable")


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups of `stage_backward_input` that have a weight in common.

    The backward pass of a group frees its part of the graph, which such groups share.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        apart, joined = list[dict[str, Any]](), [group]
        for other in found:
            is_apart = other["params"].isdisjoint(group["params"])
            (apart if is_apart else joined).append(other)
        grads = {
            node: grad
            for each in joined
            for node, grad in zip(each["intermediates"], each["grads"], strict=True)
        }
        params = set().union(*(each["params"] for each in joined))
        joined_group = {"intermediates": [*grads], "grads": [*grads.values()], "params": params}
        found = [*apart, joined_group]
    return found


def _weights(groups: list[dict[str, Any]]) -> list[Any]:
    """Return the weights of groups of `stage_backward_input`."""
    return [node.variable for group in groups for node in group["params"]]


def _add_weight_gradients(group: dict[str, Any], *, retain_graph: bool = False) -> None:
    """Add the gradients of a group of `stage_backward_input` to those of its weights."""
    from moe_ext.pipeline._torch import stage_backward_weight

    # Hooks of activations have changed these gradients in I, and run again here. A prehook that
    # gives the gradient of I undoes the second change.
    pairs = zip(group["intermediates"], group["grads"], strict=True)
    handles = [node.register_prehook(lambda _, grad=grad: grad) for node, grad in pairs]
    try:
        stage_backward_weight(iter(_weights([group])), [group], retain_graph)
    finally:
        for handle in handles:
            handle.remove()


def _kind(out: Any) -> str:
    return f"{out.dtype} on {out.device}" if isinstance(out, Tensor) else type(out).__name__


def _into(receive: Action) -> tuple[int, int, int]:
    """Return the (chain, stage, slice) whose input has the format of a receive's tensor."""
    return receive.chain, receive.stage + (receive.kind == "RECV_B"), receive.slice


def _key(action: Action, ahead: int = 0) -> tuple[int, int, int]:
    """Return (stage, micro-batch, slice) of an action, or of the stage that is `ahead` later."""
    assert action.micro_batch is not None
    return action.stage + ahead, action.micro_batch, action.slice
