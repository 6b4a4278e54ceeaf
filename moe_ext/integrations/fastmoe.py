"""FastMoE's `FMoE` and `FMoETransformerMLP` on moe_ext.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N rows, L experts of one module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext._checks import check_numbers, check_rule, check_sizes
from moe_ext.comm.groups import check_group, group_size, resolve_group
from moe_ext.integrations._base import (
    GateHook,
    LinearGate,
    RenamedLayer,
    activate,
    check_capacity,
    check_option,
    gshard_output,
    slots_with_room,
    switch_output,
)
from moe_ext.nn.module_experts import ModuleExperts
from moe_ext.nn.routers import RouterOutput


class NaiveGate(LinearGate):
    """Chooses the top k logits, with their softmax as weights; no balance loss.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts.
        top_k: K, number of experts of a token.
        gate_bias: add a bias to the logits.
    """

    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""
        # FastMoE adds up the losses of all gates, so a gate without a balance loss has a zero.
        self.loss = logits_TE.new_zeros(1, requires_grad=True)
        chosen = ops.topk_gate(logits_TE, self.top_k, score_fn="topk_softmax")
        weights, idx, counts_E, score_sum = chosen
        return self.output(logits_TE, weights, idx, None, (counts_E, counts_E), score_sum)


class GShardGate(NaiveGate):
    """Chooses two experts, with a capacity, a balance loss, and random drops of second experts.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts.
        topk: must be 2.
        capacity: rates for training and evaluation: an expert takes
            `ceil(rate * T) * 2 // E` rows of each rank.
        random_routing: drop a second expert of weight w with probability `1 - 2 * w`.
        gate_bias: add a bias to the logits.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        gate_bias: bool = True,
    ) -> None:
        check_option("fastmoe.GShardGate", "topk", topk, 2)
        super().__init__(d_model, num_expert, world_size, 2, gate_bias)
        self.capacity = check_capacity("fastmoe.GShardGate", capacity)
        self.random_routing = random_routing

    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""
        chosen = ops.topk_gate(logits_TE, 2, score_fn="topk_softmax")
        rows = math.ceil(self.capacity[0 if self.training else 1] * logits_TE.shape[0])
        room = rows * 2 // self.tot_expert
        kept = slots_with_room(chosen.topk_idx, self.tot_expert, room)
        return gshard_output(self, logits_TE, chosen, kept, random_routing=self.random_routing)


class SwitchGate(NaiveGate):
    """Chooses one expert, with noise on the logits in training, a capacity and a balance loss.

    Args:
        d_model: D, number of elements of a token.
        num_expert: number of experts of each rank.
        world_size: number of ranks that hold the experts.
        topk: must be 1.
        switch_eps: in training, noise uniform in [1 - eps, 1 + eps) is added to the logits.
        capacity: rates for training and evaluation: an expert takes `ceil(rate * T / num_expert)`
            rows from all ranks together, lower ranks first.
        gate_bias: add a bias to the logits.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        gate_bias: bool = True,
    ) -> None:
        check_option("fastmoe.SwitchGate", "topk", topk, 1)
        super().__init__(d_model, num_expert, world_size, 1, gate_bias)
        self.switch_eps = switch_eps
        self.capacity = check_capacity("fastmoe.SwitchGate", capacity)

    def decide(self, logits_TE: Tensor) -> RouterOutput:
        """Choose experts from logits."""
        rate = self.capacity[0 if self.training else 1]
        capacity = math.ceil(rate * logits_TE.shape[0] / self.num_expert)
        return switch_output(self, logits_TE, self.switch_eps, capacity)


class FMoELinear(nn.Module):
    """L linear layers over rows grouped by expert.

    Args:
        num_expert: L, number of experts of this rank.
        in_feat: number of input features.
        out_feat: number of output features.
        bias: add biases, which are initially zero.
        rank: must be 0; FastMoE does not use it either.
    """

    def __init__(
        self, num_expert: int, in_feat: int, out_feat: int, bias: bool = True, rank: int = 0
    ) -> None:
        super().__init__()
        check_option("fastmoe.FMoELinear", "rank", rank, 0)
        self.num_expert = num_expert
        self.in_feat = in_feat
        self.out_feat = out_feat
        self.weight = nn.Parameter(torch.empty(num_expert, out_feat, in_feat))
        self.bias = nn.Parameter(torch.zeros(num_expert, out_feat)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as `nn.Linear` does, and set biases to zero."""
        bound = 1.0 / math.sqrt(self.in_feat)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        """Map rows `[N, in]`, grouped by expert, to `[N, out]`; counts per expert are `[L]`."""
        counts_L = fwd_expert_count.to(inp.device, torch.int64)
        offsets = nn.functional.pad(counts_L.cumsum(0), (1, 0))
        rows = inp.to(self.weight.dtype)
        return ops.grouped_mm(rows, self.weight, offsets, bias_EM=self.bias)


class FMoE(RenamedLayer):
    """Mixture of experts with the signature and parameter names of FastMoE's `FMoE`.

    Args:
        num_expert: number of experts of each rank.
        d_model: D, number of elements of a token.
        world_size: number of ranks that hold the experts.
        mp_group: must be None.
        slice_group: must be None.
        moe_group: the group of these ranks; None is the default group.
        top_k: K, number of experts of a token.
        gate: `NaiveGate`, `GShardGate`, `SwitchGate` or a subclass.
        expert: callable that makes an expert from D; or a list of such callables, one for each
            expert. An expert is called with rows `[n, D]` and their number, a `[1]` tensor.
        gate_hook: called with (indices, weights, None) after every choice.
        mask: must be None.
        mask_dict: must be None.
        gate_bias: add a bias to the logits of the gate.

    Raises:
        ValueError: an option is not supported; the message names it.
        TypeError: the gate is not a gate of this module.
    """

    paths: ClassVar[dict[str, str]] = {"router": "gate"}

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: ProcessGroup | None = None,
        slice_group: ProcessGroup | None = None,
        moe_group: ProcessGroup | None = None,
        top_k: int = 2,
        gate: type[LinearGate] = NaiveGate,
        expert: Callable[[int], nn.Module] | list[Callable[[int], nn.Module]] | None = None,
        gate_hook: GateHook | None = None,
        mask: Tensor | None = None,
        mask_dict: dict[Any, Any] | None = None,
        gate_bias: bool = True,
    ) -> None:
        owner = "fastmoe.FMoE"
        check_numbers(owner, FMoE.__init__.__annotations__, locals())
        check_sizes(owner, num_expert=num_expert, d_model=d_model)
        slices = {"mp_group": mp_group, "slice_group": slice_group}
        for name, value in {**slices, "mask": mask, "mask_dict": mask_dict}.items():
            check_option(owner, name, value, None)
        if not (isinstance(gate, type) and issubclass(gate, NaiveGate)):
            raise TypeError(
                f"{owner}: expected gate to be NaiveGate, GShardGate, SwitchGate of "
                f"moe_ext.integrations.fastmoe or a subclass, got {gate!r}"
            )
        rule = "a callable or a list of callables"
        check_rule(owner, "expert", expert, rule, expert is not None)
        makers = expert if isinstance(expert, list) else [expert] * num_expert
        group = _group_of(owner, world_size, moe_group)
        modules = [make(d_model) for make in makers if make is not None]
        for module in modules:
            module.register_forward_pre_hook(_add_count)
        router = gate(d_model, len(modules), world_size, top_k, gate_bias=gate_bias)
        router.group, router.hook = group, gate_hook
        super().__init__(d_model, router, ModuleExperts(modules, ep_group=group))
        self.num_expert = len(modules)
        self.d_model = d_model
        self.world_size = world_size

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Set the attribute `dp_comm` of parameters, which FastMoE's data parallelism reads."""
        for module, comm in ((self.experts, expert_dp_comm), (self.router, "gate")):
            for parameter in module.parameters():
                parameter.dp_comm = comm  # type: ignore[attr-defined]

    def forward(self, moe_inp: Tensor) -> Tensor:  # type: ignore[override]
        """Run every token `[..., D]` through its experts."""
        return self.run(moe_inp)


class _Expert(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, d_model: int, d_hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.htoh4 = FMoELinear(1, d_model, d_hidden)
        self.h4toh = FMoELinear(1, d_hidden, d_model)
        self.activation = activation

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        hidden = activate(self.htoh4(inp, fwd_expert_count), self.activation)
        return self.h4toh(hidden, fwd_expert_count)


class FMoETransformerMLP(FMoE):
    """`FMoE` with two-layer feed-forward experts.

    Args:
        num_expert: number of experts of each rank.
        d_model: D, number of elements of a token.
        d_hidden: F, number of hidden units of an expert.
        activation: function or module between the layers.
        expert_dp_comm: "none" or "dp", see `FMoE.mark_parallel_comm`.
        expert_rank: must be 0; FastMoE does not use it either.
        kwargs: further arguments of `FMoE`.
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        d_hidden: int = 4096,
        activation: Callable[[Tensor], Tensor] | None = None,
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        owner = "fastmoe.FMoETransformerMLP"
        check_option(owner, "expert_dp_comm", expert_dp_comm, "none", "dp")
        check_option(owner, "expert_rank", expert_rank, 0)
        check_rule(owner, "expert", kwargs.get("expert"), "left out", "expert" not in kwargs)
        act = nn.GELU() if activation is None else activation
        super().__init__(
            num_expert, d_model, expert=lambda dim: _Expert(dim, d_hidden, act), **kwargs
        )
        self.mark_parallel_comm(expert_dp_comm)


def _group_of(owner: str, world_size: int, group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the expert-parallel group; ValueError unless it has `world_size` ranks."""
    if group is None and world_size > 1:
        group = resolve_group(None, owner)
    check_group(group, owner)
    ranks = group_size(group)
    rule = f"the size of moe_group, {ranks}"
    check_rule(owner, "world_size", world_size, rule, world_size == ranks)
    return group if world_size > 1 else None


def _add_count(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Pre-hook that adds the number of rows to the arguments of an expert, as FastMoE does."""
    return (*args, torch.tensor([args[0].shape[0]])) if len(args) == 1 else args
