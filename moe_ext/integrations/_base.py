"""Shared parts of the layers of other libraries: names, groups, gates and capacity.

Shapes: T tokens, D model, E experts, K top-k, P ranks of the expert-parallel group.
"""

from __future__ import annotations

import abc
import math
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_rule
from moe_ext.comm import collectives
from moe_ext.comm.groups import GroupHandle, group_rank, group_size, resolve_group, world_size
from moe_ext.distributed.mesh import MoEMesh
from moe_ext.distributed.placement import Placement, declare_placement
from moe_ext.nn.expert_activation import PLAIN_ACTIVATIONS, plain_kind
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.moe_layer import MoELayer
from moe_ext.nn.routers import BalanceTerms, Router, RouterOutput, Tokens
from moe_ext.nn.torch_state import without_autocast

GateHook = Callable[[Tensor, Tensor, Any], object]


class Gate(Router):
    """Base of gates with the parameter names, capacity and balance loss of another library.

    Attributes:
        loss: balance loss of the last forward pass, in the graph, as the library defines it.
        num_dropped: number of slots of the last forward pass whose expert was full, 0-d int64.
    """

    loss: Tensor | None = None
    num_dropped: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # torch can neither copy nor pickle a tensor that has a grad_fn.
        return {**self.__dict__, "loss": None}

    def output(
        self,
        logits_TE: Tensor,
        topk_weights: Tensor,
        topk_idx: Tensor,
        kept: Tensor | None,
        counts: tuple[Tensor, Tensor],
        score_sum: Tensor,
    ) -> RouterOutput:
        """Make the output from a decision, and drop slots without room.

        Args:
            logits_TE: `[T, E]`.
            topk_weights: `[T, K]`, zero where a slot has no expert.
            topk_idx: `[T, K]`, -1 where a slot has no expert.
            kept: `[T, K]` bool, True for slots whose expert has room; None keeps all.
            counts: number of slots of each expert, and the number for the balance loss, `[E]` each.
            score_sum: `[E]`.
        """
        chosen = topk_idx >= 0
        if kept is None:
            self.num_dropped = topk_idx.new_zeros(())
        else:
            self.num_dropped = (chosen & ~kept).sum()
            topk_idx = topk_idx.masked_fill(~kept, -1)
            topk_weights = topk_weights.masked_fill(~kept, 0.0)
        gate = ops.GateOutput(topk_weights, topk_idx, counts[0], score_sum)
        top_k = self.top_k if counts[0] is counts[1] else 1
        return RouterOutput(
            logits_TE, gate, balance=BalanceTerms(score_sum.detach(), counts[1], top_k)
        )


class FacadeExperts(nn.Module):
    """Base of experts in stacked parameters; each rank of a group holds `num_local` experts."""

    def __init__(self, num_local: int, group: ProcessGroup | None) -> None:
        super().__init__()
        self._ep_group = GroupHandle(group)
        self.num_local_experts = num_local
        self.num_experts = num_local * group_size(group)

    def _spread(self) -> None:
        """Make DTensors of the parameters, after the subclass has created them."""
        declare_placement(self, Placement.of_experts(self.num_experts, self.ep_group))

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The expert-parallel group; None if every expert is local."""
        return self._ep_group.group


class RenamedLayer(MoELayer):
    """A `MoELayer` whose submodules have the names of another library.

    `paths` maps an attribute of `MoELayer` to the dotted name under which the submodule is
    registered, so that parameters and state dicts have the library's names.
    """

    paths: ClassVar[dict[str, str]] = {}

    def __init__(self, model_dim: int, gate: Gate, experts: ModuleExperts | FacadeExperts) -> None:
        super().__init__(
            *(model_dim, 1, experts.num_experts, gate.top_k),
            router=gate,
            experts=experts,
            balance=0.0,
            ep_group=experts.ep_group,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        owner, _, leaf = self.paths.get(name, name).rpartition(".")
        if not owner:
            super().__setattr__(leaf, value)
            return
        module: nn.Module = self
        for part in owner.split("."):
            child = module._modules.get(part)
            if child is None:
                child = nn.Module()
                module.add_module(part, child)
            module = child
        setattr(module, leaf, value)

    def __getattr__(self, name: str) -> Any:
        path = self.paths.get(name)
        if path is None:
            return super().__getattr__(name)
        module: Any = self
        for part in path.split("."):
            module = module._modules.get(part)
            if module is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return module

    def run(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Run the forward pass of `MoELayer`, for subclasses whose `forward` differs."""
        y = MoELayer.forward(self, x, token_mask=token_mask)
        # The gate drops slots, because it weights the remaining ones. The layer never sees the
        # dropped slots, so their number comes from the gate.
        self._record["num_dropped"] = self.router.num_dropped
        return y


class LayerWithLoss(RenamedLayer):
    """A `RenamedLayer` that keeps the balance loss of its last forward pass, in the graph."""

    l_aux: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # torch can neither copy nor pickle a tensor that has a grad_fn.
        return {**super().__getstate__(), "l_aux": None}


_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[int, ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def expert_group(ep_size: int, owner: str) -> ProcessGroup | None:
    """Return this rank's group of `ep_size` consecutive ranks; None if `ep_size` is 1.

    All ranks call it in the same order. The groups of a size are made once.

    Raises:
        ValueError: ep_size does not divide the number of ranks.
    """
    if ep_size < 1 or world_size() % ep_size != 0:
        raise ValueError(
            f"{owner}: expected ep_size to divide the number of ranks, {world_size()}, got "
            f"{ep_size}"
        )
    if ep_size == 1:
        return None
    world = resolve_group(None, owner)
    assert world is not None
    known = _groups.setdefault(world, {})
    if ep_size not in known:
        mesh = MoEMesh(dp=world_size() // ep_size, ep=ep_size)
        assert mesh.ep_group is not None
        known[ep_size] = mesh.ep_group
    return known[ep_size]


def float32_logits(x_TD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias` outside autocast, in float32, or float64 for float64 tokens."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    with without_autocast(x_TD.device):
        return nn.functional.linear(
            x_TD.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )


def slots_with_room(topk_idx_TK: Tensor, num_experts: int, capacity: int, **options: Any) -> Tensor:
    """Return True for slots that experts take, `[T, K]`; `options` go to `ops.limit_capacity`."""
    if capacity < 1:
        return torch.zeros_like(topk_idx_TK, dtype=torch.bool)
    kept_idx, _ = ops.limit_capacity(topk_idx_TK, num_experts, capacity, **options)
    return kept_idx >= 0


def counts_of(idx: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert occurs among indices, `[E]` int64; -1 is not counted."""
    flat = idx.reshape(-1) + 1
    # torch.bincount would make the host wait for a CUDA device.
    counts = flat.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]


def slots_with_room_on_all_ranks(
    topk_idx_TK: Tensor, num_experts: int, capacity: int, group: ProcessGroup | None
) -> Tensor:
    """Return True for slots that experts take if all ranks of a group share the `capacity`.

    Lower ranks are served first. Collective over the group.
    """
    if group_size(group) == 1:
        return slots_with_room(topk_idx_TK, num_experts, capacity)
    assert group is not None
    own_E = counts_of(topk_idx_TK, num_experts)
    counts_PE = collectives.all_gather(own_E[None], group, operation="capacity of the experts")
    room_E = (capacity - counts_PE[: group_rank(group)].sum(0)).clamp(min=0)
    slots_S1 = topk_idx_TK.reshape(-1, 1)
    # Only the tables of the permutation are needed, so rows have no features.
    _, permutation = ops.permute_tokens(
        slots_S1.new_empty((slots_S1.shape[0], 0), dtype=torch.float32), slots_S1, num_experts
    )
    expert_S = slots_S1[:, 0].clamp(min=0)
    place_S = permutation.row_of_slot - permutation.expert_offsets[expert_S]
    kept_S = (slots_S1[:, 0] >= 0) & (place_S < room_E[expert_S])
    return kept_S.view(topk_idx_TK.shape)


def gumbel_noise(like: Tensor) -> Tensor:
    """Draw standard Gumbel noise, bit for bit as torch.distributions does."""
    limits = torch.finfo(torch.float32)
    uniform = uniform_noise(like, limits.tiny, 1.0 - limits.eps)
    return -(-uniform.log()).log()


def first_and_drawn(logits_TE: Tensor, noisy_TE: Tensor) -> Tensor:
    """Return GShard's choice `[T, 2]`: the largest logit, then the largest other noisy logit."""
    first_T1 = logits_TE.argmax(dim=1, keepdim=True)
    others_TE = noisy_TE.scatter(1, first_T1, -math.inf)
    return torch.cat([first_T1, others_TE.argmax(dim=1, keepdim=True)], dim=1)


def uniform_noise(like: Tensor, low: float, high: float) -> Tensor:
    """Draw uniform noise, bit for bit as torch.distributions does."""
    noise = torch.rand(like.shape, dtype=torch.float32, device=like.device)
    return noise.mul_(high - low).add_(low)


def check_option(owner: str, name: str, value: object, *allowed: object) -> None:
    """Raise ValueError for a value that is not among the allowed ones."""
    *others, last = map(repr, allowed)
    rule = f"{', '.join(others)} or {last}" if others else last
    check_rule(owner, name, value, rule, value in allowed)


def check_known_keys(owner: str, config: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise ValueError for the first unknown key of a configuration."""
    for key in config:
        check_rule(owner, f"the keys of {what}", key, f"among {', '.join(known)}", key in known)


def activate(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Run an activation function, by a fused kernel if there is one."""
    function: Any = getattr(activation, "func", activation)
    if function is nn.functional.gelu:
        options = getattr(activation, "keywords", {})
        kind: str | None = "gelu_tanh" if options.get("approximate") == "tanh" else "gelu"
    elif function in (nn.functional.relu, torch.relu):
        kind = "relu"
    else:
        kind = plain_kind(function)
    return ops.activation(x, kind=kind) if kind in PLAIN_ACTIVATIONS else activation(x)


class LinearGate(Gate, abc.ABC):
    """Base of gates with linear logits, for which subclasses choose experts in `decide`.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts; E = num_expert * world_size.
        top_k: K, number of experts of a token.
        gate_bias: add a bias to the logits.

    Attributes:
        hook: called with (indices, weights, None) after every choice.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a gate that overrides `forward`; layers call `decide` instead."""
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            raise TypeError(
                f"{cls.__name__}: expected a gate to choose in decide(logits), which gives a "
                "RouterOutput, got a forward pass of its own"
            )

    def __init__(
        self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True
    ) -> None:
        super().__init__(d_model, num_expert * world_size, top_k)
        self.num_expert = num_expert
        self.world_size = world_size
        self.tot_expert = num_expert * world_size
        self.gate = nn.Linear(d_model, self.tot_expert, bias=gate_bias)
        self._group = GroupHandle(None)
        self.hook: GateHook | None = None

    @property
    def group(self) -> ProcessGroup | None:
        """Ranks over which the experts are spread; None if this rank holds all of them."""
        return self._group.group

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        self._group = GroupHandle(group)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as `nn.Linear` does."""
        self.gate.reset_parameters()

    @property
    def has_loss(self) -> bool:
        """True if `get_loss` would return a loss."""
        return self.loss is not None

    def set_loss(self, loss: Tensor | None) -> None:
        """Replace the loss."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """Return the balance loss of the last forward pass; `clear` frees it and its graph."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @abc.abstractmethod
    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""

    def logits(self, tokens: Tokens) -> Tensor:
        """Compute the logits, in float32."""
        return float32_logits(tokens.x_TD, self.gate.weight, self.gate.bias)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Choose K experts for every token, and call the hook."""
        assert tokens.mask_T is None, "the layers of these libraries take no mask"
        decided = self.decide(logits_TE)
        if self.hook is not None:
            self.hook(decided.gate.topk_idx, decided.gate.topk_weights, None)
        return decided


def gshard_output(
    gate: LinearGate,
    logits_TE: Tensor,
    chosen: ops.GateOutput,
    kept: Tensor,
    *,
    random_routing: bool,
) -> RouterOutput:
    """Make GShard's output: drop slots without room, and second experts at random.

    With u uniform in [0, 1), a second expert of weight w2 is kept if u <= 2 * w2.

    Args:
        gate: the gate, whose loss is set.
        logits_TE: `[T, E]`.
        chosen: the two best experts of each token.
        kept: True for slots whose expert has room, `[T, K]` bool.
        random_routing: drop second experts at random.
    """
    weights_TK, idx = chosen.topk_weights, chosen.topk_idx
    first_E = counts_of(idx[:, 0], gate.num_experts)
    gate.loss = ops.load_balance_loss(chosen.score_sum, first_E, 1)
    if random_routing:
        drawn_T = torch.rand(idx.shape[0], device=idx.device)
        second_T = 2 * weights_TK[:, 1].detach() >= drawn_T
        stays = torch.stack([torch.ones_like(second_T), second_T], dim=1)
        idx = idx.masked_fill(~stays, -1)
        weights_TK = weights_TK.masked_fill(~stays, 0.0)
    counts = (chosen.num_tokens_per_expert, first_E)
    return gate.output(logits_TE, weights_TK, idx, kept, counts, chosen.score_sum)


def switch_output(gate: LinearGate, logits_TE: Tensor, eps: float, capacity: int) -> RouterOutput:
    """Make Switch's output: one expert per token, additive noise in training, a shared capacity.

    The loss counts only kept slots.

    Args:
        gate: the gate, whose loss is set.
        logits_TE: `[T, E]`.
        eps: the noise is uniform in [1 - eps, 1 + eps).
        capacity: number of rows that an expert takes from all ranks together.
    """
    if gate.training:
        logits_TE = logits_TE + (torch.rand_like(logits_TE) * 2 * eps + 1.0 - eps)
    chosen = ops.topk_gate(logits_TE, 1, renormalize=False)
    idx, num_experts = chosen.topk_idx, logits_TE.shape[1]
    kept = slots_with_room_on_all_ranks(idx, num_experts, capacity, gate.group)
    kept_E = counts_of(idx.masked_fill(~kept, -1), num_experts)
    valid = kept_E.sum().clamp(min=1)
    share_E = kept_E.to(chosen.score_sum.dtype) / valid
    gate.loss = (chosen.score_sum / valid) @ share_E * num_experts
    counts = (chosen.num_tokens_per_expert, chosen.num_tokens_per_expert)
    return gate.output(logits_TE, chosen.topk_weights, idx, kept, counts, chosen.score_sum)


def check_capacity(owner: str, capacity: tuple[float, float]) -> tuple[float, float]:
    """Return the rates for training and evaluation; ValueError unless both are positive."""
    rates = tuple(capacity)
    if len(rates) != 2 or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"{owner}: expected capacity to be two positive rates, got {capacity}")
    return rates
