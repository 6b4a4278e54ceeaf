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
# Tags of the messages that say shape and dtype; those of tensors are even.
_FORMAT = 1
_CPU = torch.device("cpu")
# Nodes of graphs that go backward as a whole: torch.compile has made one of all, and FSDP2 reduces
# gradients when that of the input is there.
_OF_A_WHOLE_PASS = ("CompiledFunctionBackward", "RegisterPostBackwardFunctionBackward")
# Purpose of the stream of weight gradients.
_WEIGHTS = "gradients of weights"


@dataclass(frozen=True)
class StageSetup:
    """The stages of a rank, and how a step runs them; see `Pipeline`.

    Attributes:
        stages: modules of this rank by number.
        loss_fn: gives the loss of the last stage's output and a target.
        recompute: run forward passes again before backward passes.
        lengths: of slices; empty without them.
        update: makes a new version of a stage's weights; None without versions.
        versions: versions of the weights that are used beyond an update, by chain, stage, version.
        divisors: for each micro-batch, the number of them that its gradient is averaged with.
        weight_stream: W runs on a stream of its own, where the device has streams.
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
    """A micro-batch, or a slice of it, from its forward pass to the end of its backward pass."""

    x: Tensor
    # The output, or the loss, and what is kept for later slices; None: to be computed again.
    outs: tuple[Tensor, ...] | None
    setting: TorchState | None = None
    # Result of `stage_backward_input`, for the gradients of the weights.
    groups: list[dict[str, Any]] | None = None


class StageMessages:
    """Messages between the stages of a pipeline, and the format of what goes into each stage.

    Args:
        table: with its messages.
        group: the ranks; None is this process alone.
        rank: of this process in the group.
        device: where tensors live.
        pairs: (sender, receiver) of all messages, where they go by their order; else None.
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
        # Formats go between the hosts on any device.
        self._hosts: PointToPoint | None = None
        self._transport: PointToPoint | OrderedMessages | None = None
        if group is not None and group_size(group) > 1:
            self._transport = self._hosts = PointToPoint(group, _CPU)
            if pairs is not None:
                self._transport = OrderedMessages(group, device, pairs)
        # Shape and dtype of what goes into each (chain, stage, slice), and which of another rank
        # have been told.
        self._formats: dict[tuple[int, int, int], tuple[torch.Size, torch.dtype]] = {}
        self._told: set[tuple[int, int, int]] = set()
        self._names: dict[Action, str] = {}

    @property
    def travels(self) -> bool:
        """True if there are other ranks."""
        return self._transport is not None

    @property
    def place(self) -> str:
        """This rank, for messages."""
        return f"rank {0 if self.group is None else group_ranks(self.group)[self.rank]}"

    def named(self, action: Action) -> str:
        """An action of this rank, for messages."""
        if action not in self._names:
            words = f"{action} ({action.described()}) on {self.place}"
            self._names[action] = f"Pipeline.step, {words}"
        return self._names[action]

    def check_output(self, action: Action, out: Any) -> None:
        """ValueError for an output of a stage that cannot be sent, or is unlike the first one."""
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
        """True if the format of what a receive brings is known."""
        return _into(receive) in self._formats

    def send(self, x: Tensor, action: Action) -> list[Message]:
        """Begin to send a tensor to the rank of another stage, at first with its format."""
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
        """Begin to receive a tensor; waits for its format where that is not known."""
        assert self._transport is not None and self._hosts is not None
        rank = self.table.rank(self.table.peer(action))
        name, tag, into = self.named(action), self._tag(action), _into(action)
        if into not in self._formats:
            head = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
            # Before the first tensor of a stage: the table is one in which a receive may wait.
            told = self._hosts.receive(head, rank, tag + _FORMAT, operation=name)
            dtype, dims, *sizes = told.wait().tolist()
            self._formats[into] = torch.Size(sizes[:dims]), _DTYPES[dtype]
        shape, kind = self._formats[into]
        into_place = torch.empty(shape, dtype=kind, device=self.device)
        return self._transport.receive(into_place, rank, tag, operation=name)

    def sum_over(
        self, own: Tensor, ranks: Sequence[int], number: int, name: str
    ) -> tuple[Tensor, list[Message]]:
        """The sum of a tensor over ranks, the same bits on all, and messages still underway."""
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
        """The number of a message, by its receive."""
        assert receive.micro_batch is not None
        place = receive.micro_batch * self.table.num_stages + receive.stage
        place = place * self.table.num_slices + receive.slice
        return 4 * place + 2 * (receive.kind == "RECV_B")


class _WeightStream:
    """Gradients of weights on a stream of their own, those of one micro-batch at a time.

    Its graph lives until the main stream has waited for them, since the graph's memory goes back to
    that stream. The main stream waits before the next ones begin, so that one graph at most lives
    longer than without this stream.

    Args:
        device: of the stages, with streams.
    """

    def __init__(self, device: torch.device) -> None:
        module = _runtime_library.load()
        assert module is not None
        self._move, self._device = module.move_to_current_stream, device
        self._work: streams.Beside | None = None

    def take(self, out: Tensor) -> None:
        """Let the backward nodes behind an output run on this stream, not on its forward pass's.

        Nodes of weights stay, since other micro-batches have the same.
        """
        with torch.cuda.stream(streams.side_stream(self._device, _WEIGHTS)):
            self._move(out)

    def run(self, groups: list[dict[str, Any]]) -> None:
        """Queue the gradients of weights, by the groups of `stage_backward_input`."""
        self.join()
        weights = _weights(groups)
        nodes = [node for group in groups for node in group["intermediates"]]
        all_grads = [grad for group in groups for grads in group["grads"] for grad in grads]
        grads = [grad for grad in all_grads if grad is not None]

        def work() -> None:
            # Or the main stream would wait for each gradient.
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
        """Let the main stream wait for all that was queued."""
        if self._work is not None:
            self._work.join()
            self._work = None


class StepRun:
    """A step on this rank: its tensors by (stage, micro-batch, slice), and its actions.

    Args:
        setup: the stages.
        messages: between them.
        inputs: one for each micro-batch, on the rank of the first stage.
        targets: one for each micro-batch, on the rank of the last stage.
        scale: factor of all gradients.

    Attributes:
        losses: of the micro-batches, by number.
        sent: messages underway.
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
        # Tensors on their way to a stage: activations forward, gradients backward, by kind.
        self.given: dict[tuple[str, tuple[int, int, int]], Tensor | Message] = {}
        # Leaves that the slices so far keep for those behind them, by (stage, micro-batch).
        self.kept: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        # Weights of (stage, version) by name: leaves, with the storage of parameters or copies.
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
            """Receive what is needed soon, up to the first whose format is not known."""
            for i, receive in enumerate(receives[:until]):
                if receive is None:
                    continue
                if ahead and not self.messages.is_known(receive):
                    # Messages of a rank are waited for in this order: a later one, which may come
                    # of what this one is for, must not stand before it.
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
        """Let the current stream wait for all gradients of weights so far."""
        if self.weight_stream is not None:
            self.weight_stream.join()

    def act(self, action: Action) -> None:
        """Run an action; an error says in which one it was."""
        try:
            self._run(action)
        except Exception as error:
            name = self.messages.named(action)
            # Below the words of the error; from Python 3.11 on.
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
            # Memory of those that have gone goes to the next tensors.
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
        # Under no_grad nothing goes backward.
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
        """The part of inputs or targets that an action has."""
        _, number, part = _key(action)
        lengths = self.setup.lengths
        return batches[number].split(lengths, 1)[part] if lengths else batches[number]

    def _share(self, action: Action) -> float:
        """Share of a slice in its micro-batch."""
        lengths = self.setup.lengths
        return lengths[action.slice] / sum(lengths) if lengths else 1.0

    def _scale(self, action: Action) -> float | Tensor:
        return self.scale * self._share(action) / self.setup.divisors[_key(action)[1]]

    def _compute(self, action: Action, x: Tensor) -> tuple[Tensor, ...]:
        """The output of a stage, of the last one the loss, and what it keeps for later slices."""
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
        """Give the parameters the gradients of all versions, update them, and keep what is used."""
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
        """The weights as leaves of their own: copies, if they are used behind the next update."""
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
        self.join()  # it adds to the same gradients
        if graded:
            torch.autograd.backward([outs[i] for i in graded], [grads[i] for i in graded])
        self._give_back(action, state.x)
        del self.passes[_key(action)]

    def _input_gradient(self, action: Action) -> None:
        if action.stage == 0:
            return  # W computes all
        from moe_ext.pipeline._torch import stage_backward_input

        state, (out,) = self._computed(action)
        nodes = _nodes(out)
        if any(node.name() in _OF_A_WHOLE_PASS for node in nodes):
            self._backward(action)
            return
        grads, state.groups = self._output_grads(action, (out,)), []
        if out.requires_grad:
            leaves = [node.variable for node in nodes if _is_of_leaf(node)]
            # The loss may have weights, too.
            weights = (leaf for leaf in leaves if leaf is not state.x)
            # It detaches what it is given, which cannot be a view.
            _, groups = stage_backward_input([out.clone()], grads, [state.x], weights)
            if state.x.grad is None:
                # It finds weights on the way to the input alone: W computes all.
                state.groups, self.given["B", _key(action)] = None, grads[0]
            else:
                state.groups = _joined(groups)
                if self.weight_stream is not None:
                    self.weight_stream.take(out)
                state.outs = ()  # what W does not need is freed
        self._give_back(action, state.x)

    def _weight_gradients(self, action: Action) -> None:
        if _key(action) not in self.passes:
            return  # I has computed all
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
        """A forward pass with its output, run again where that was not kept."""
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
            # A tensor made of a number would wait for the device.
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
            x.grad = None  # W still holds x


def _nodes(out: Tensor) -> list[Any]:
    """All nodes of the graph of a tensor."""
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
    """Groups of `stage_backward_input`, those with a weight in common as one.

    The backward pass of each frees its part of the graph.
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
    """Weights of groups of `stage_backward_input`."""
    return [node.variable for group in groups for node in group["params"]]


def _add_weight_gradients(group: dict[str, Any], *, retain_graph: bool = False) -> None:
    """Add the gradients of a group of `stage_backward_input` to its weights'."""
    from moe_ext.pipeline._torch import stage_backward_weight

    # Hooks of activations have seen these gradients in I, and shall not change them again.
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
    """The (chain, stage, slice) whose input has the format of what comes."""
    return receive.chain, receive.stage + (receive.kind == "RECV_B"), receive.slice


def _key(action: Action, ahead: int = 0) -> tuple[int, int, int]:
    """(stage, micro-batch, slice) of an action, or the same of a stage so many ahead."""
    assert action.micro_batch is not None
    return action.stage + ahead, action.micro_batch, action.slice
