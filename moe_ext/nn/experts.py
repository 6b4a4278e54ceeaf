"""Expert feed-forward networks, stacked and run as grouped matrix products.

Shapes: N rows, D model, F ffn, E experts, L local experts = E / size of the expert-parallel group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library, ops
from moe_ext._checks import check_choice, check_numbers, check_sizes
from moe_ext.comm.groups import GroupHandle, check_group, group_rank, group_size
from moe_ext.dispatch import DispatchMetadata, RowWeights, TokenDispatcher
from moe_ext.distributed.dtensor import is_fsdp, local_part
from moe_ext.distributed.placement import (
    ExpertShards,
    Placement,
    declare_placement,
    own_part_of,
    sharded_parameters,
)
from moe_ext.distributed.replicas import shards_of_experts
from moe_ext.nn.balance.moved import ExpertMoves
from moe_ext.nn.expert_activation import (
    GATED_ACTIVATIONS,
    LAYOUTS,
    Activation,
    resolve_activation,
    run_activation,
)
from moe_ext.nn.torch_state import as_autocast

# 2**64 / golden ratio, odd: seeds of neighbouring experts differ in about half of their bits.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class GroupedExperts(nn.Module):
    """E two-layer feed-forward networks over rows that are grouped by expert.

    Gated activations: `y = act(x @ gate.T) * (x @ up.T) @ down.T` with `gate_up_proj [L, 2F, D]`
    (gate rows first) and `down_proj [L, D, F]`, the layout of Hugging Face transformers 5. Plain
    activations have `up_proj [L, F, D]` in place of `gate_up_proj`. Biases are `gate_up_proj_bias
    [L, 2F]` (or `up_proj_bias [L, F]`) and `down_proj_bias [L, D]`.

    Args:
        num_experts: E, number of experts over all ranks.
        model_dim: D, number of elements of a token.
        ffn_dim: F, hidden size of an expert.
        activation: a fused kind, "swiglu", "geglu", "geglu_tanh", "reglu", or plain "silu", "gelu",
            "gelu_tanh", "relu", "relu_squared"; the name of another function of torch, such as
            "tanh" or "mish"; a `ClampedSwiGLU`; or any function or module of one tensor, applied to
            `[N, F]`.
        gated: whether a plain name or a function computes `act(gate) * up`. None follows the name,
            and takes a function as plain.
        bias: add biases.
        layout: position of the gate in the 2F features of `gate_up_proj`: "concatenated" is the
            first half, "interleaved" the even features.
        transposed: store the weights as `[L, D, 2F]` (`[L, D, F]`) and `[L, F, D]`.
        post_norm: module of `[N, D]`, such as `nn.RMSNorm(D)`, that is applied to the outputs of
            experts before they are weighted. One module serves all experts, as `post_expert_norm`.
        ep_group: expert-parallel process group; rank r of P holds experts [r*E/P, (r+1)*E/P).
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a size is not positive; the activation or the layout is unknown; P does not
            divide E; or a post_norm or an activation has parameters in a group of several ranks.
        TypeError: the activation is neither a name nor callable.
    """

    # Read by `declare_placement`: `forward` takes the local parts of DTensor parameters itself.
    takes_dtensors = True

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None
    activation: Any

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        ffn_dim: int,
        *,
        activation: Activation = "swiglu",
        gated: bool | None = None,
        bias: bool = False,
        layout: str = "concatenated",
        transposed: bool = False,
        post_norm: nn.Module | None = None,
        ep_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("GroupedExperts", num_experts=num_experts, model_dim=model_dim, ffn_dim=ffn_dim)
        check_numbers("GroupedExperts", GroupedExperts.__init__.__annotations__, locals())
        check_group(ep_group, "GroupedExperts")
        check_choice("GroupedExperts", "layout", layout, LAYOUTS)
        self.activation, self.gated = resolve_activation(activation, gated, "GroupedExperts")
        # Products of a numpy integer with `_SEED_STRIDE` would overflow, so an int is kept.
        self.num_experts = int(num_experts)
        self.model_dim = model_dim
        self.ffn_dim = ffn_dim
        self.layout = layout
        self.transposed = transposed
        self.post_expert_norm = post_norm
        self._up_name = "gate_up_proj" if self.gated else "up_proj"
        self._check_group(ep_group, bias)
        self._ep_group = GroupHandle(ep_group)
        self._add_parameters(bias, device, dtype)
        self._lie_over(ep_group)
        self.reset_parameters()

    def _add_parameters(
        self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        held = self.ffn_dim // shards_of_experts(self.ep_group)
        up_dim = 2 * held if self.gated else held
        for name, out_dim, in_dim in (
            (self._up_name, up_dim, self.model_dim),
            ("down_proj", self.model_dim, held),
        ):
            shape = (in_dim, out_dim) if self.transposed else (out_dim, in_dim)
            weight = torch.empty((self.num_local_experts, *shape), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
            bias_shape = (self.num_local_experts, out_dim)
            stacked_bias = nn.Parameter(torch.empty(bias_shape, device=device, dtype=dtype))
            self.register_parameter(f"{name}_bias", stacked_bias if bias else None)

    def _check_group(self, ep_group: ProcessGroup | None, bias: bool) -> None:
        shards, post_norm = shards_of_experts(ep_group), self.post_expert_norm
        if self.ffn_dim % shards or (shards > 1 and (bias or post_norm is not None)):
            raise ValueError(
                "GroupedExperts: expected bias and post_norm to be off and ffn_dim to be a multiple"
                f" of etp={shards} in an ep_group with etp, got bias={bias}, post_norm={post_norm} "
                f"and ffn_dim={self.ffn_dim}"
            )
        # In a group of ranks every parameter is declared as a stack of experts, so none may be
        # shared by all experts.
        for name, module in (("activation", self.activation), ("post_norm", post_norm)):
            shared = isinstance(module, nn.Module) and any(True for _ in module.parameters())
            if shared and group_size(ep_group) > 1:
                raise ValueError(
                    f"GroupedExperts: expected {name} to have no parameters in an ep_group of "
                    f"{group_size(ep_group)} ranks, got {module}"
                )
        local_experts(self.num_experts, ep_group, "GroupedExperts")

    def _placements_over(self, ep_group: ProcessGroup) -> dict[str, Placement]:
        """See `SpreadsExperts`."""
        own = [name + end for name in (self._up_name, "down_proj") for end in ("", "_bias")]
        held = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        if others := [name for name in held if name not in own]:
            raise ValueError(
                f"GroupedExperts: expected parameters and buffers to be among {own} where experts "
                f"are spread after they were made, got {others[0]}"
            )
        self._check_group(ep_group, "down_proj_bias" in held)
        return {name: self._place_of(name, ep_group) for name in held}

    def _place_of(self, name: str, ep_group: ProcessGroup | None) -> Placement:
        return ExpertShards.of_ffn(
            self.num_experts,
            ep_group,
            is_down=name == "down_proj",
            transposed=self.transposed,
            pairs=self.gated and self.layout == "concatenated",
        )

    def _lie_over(self, ep_group: ProcessGroup | None) -> None:
        """Declare that the parameters are this rank's part of the experts of a group."""
        self._ep_group = GroupHandle(ep_group)
        declare_placement(self, self._place_of("down_proj", ep_group))
        if shards_of_experts(ep_group) > 1:
            declare_placement(self, self._place_of(self._up_name, ep_group), [self._up_name])

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The expert-parallel group, or None if every expert is local."""
        return self._ep_group.group

    @property
    def num_local_experts(self) -> int:
        """L, the number of experts of this rank."""
        return local_experts(self.num_experts, self.ep_group, "GroupedExperts")

    @property
    def first_expert(self) -> int:
        """Global index of local expert 0."""
        place = group_rank(self.ep_group) // shards_of_experts(self.ep_group)
        return place * self.num_local_experts

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly in +-1/sqrt(fan_in), the same for any group size.

        Each expert has its own seed, made of a draw from torch's default CPU generator and of the
        expert's number. Values therefore depend only on `torch.manual_seed` and that number, and no
        rank draws experts of another. A rank with a shard of an expert draws the whole expert.
        """
        drawn: list[tuple[Tensor, float, Placement | None]] = []
        sharded = {name: place for name, (_, place) in sharded_parameters(self).items()}
        for name, inputs in ((self._up_name, self.model_dim), ("down_proj", self.ffn_dim)):
            for full_name in (name, f"{name}_bias"):
                parameter = getattr(self, full_name)
                if parameter is not None:
                    drawn.append((parameter, 1.0 / math.sqrt(inputs), sharded.get(full_name)))
        draw = torch.randint(0, 2**62, (1,), device="cpu")
        device = self.down_proj.device
        # There is nothing to fill on the meta device. Inside FakeTensorMode `draw` has no value.
        if device.type == "meta" or type(draw) is not Tensor:
            return
        base = int(draw)
        generator = torch.Generator(device)
        with torch.no_grad():
            for local in range(local_part(self.down_proj).shape[0]):
                generator.manual_seed((base + (self.first_expert + local) * _SEED_STRIDE) % 2**63)
                for parameter, bound, place in drawn:
                    tensor = local_part(parameter)
                    if isinstance(place, ExpertShards):
                        whole = tensor.new_empty((1, *parameter.shape[1:]))
                        whole.uniform_(-bound, bound, generator=generator)
                        tensor[local] = place.shard(whole)[0]
                    else:
                        tensor[local].uniform_(-bound, bound, generator=generator)

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        bias = self.down_proj_bias is not None
        text = (
            f"num_experts={self.num_experts}, model_dim={self.model_dim}, ffn_dim={self.ffn_dim}, "
            f"activation={self.activation!r}, bias={bias}"
        )
        if self.layout != "concatenated":
            text += f", layout={self.layout!r}"
        if self.transposed:
            text += ", transposed=True"
        if self.num_local_experts != self.num_experts:
            last = self.first_expert + self.num_local_experts - 1
            text += f", local_experts={self.first_expert}..{last}"
        return text

    @property
    def weighs_rows(self) -> bool:
        """True if `forward` takes weights: with a fused gate, and only a product after it."""
        # Another `forward` may not take weights. A subclass may define it, or a library may set it
        # on the module at any time, see `runs_own_forward`.
        own = type(self).forward is GroupedExperts.forward and "forward" not in self.__dict__
        fused = isinstance(self.activation, str) and self.activation in GATED_ACTIVATIONS
        return own and fused and self.down_proj_bias is None and self.post_expert_norm is None

    def forward(
        self,
        rows_ND: Tensor,
        expert_offsets: Tensor,
        row_weights: RowWeights | None = None,
        moves: ExpertMoves | None = None,
    ) -> Tensor:
        """Run every row through its expert.

        Args:
            rows_ND: rows grouped by local expert, `[N, D]`.
            expert_offsets: `[L + 1]` int64; local expert l owns rows [offsets[l], offsets[l + 1]).
                Or, if every row has an expert, `[L]` int32: the end of each expert's rows.
            row_weights: factors on the results; only if `weighs_rows` is True.
            moves: experts of other ranks that move to this rank in this pass; in the offsets they
                follow its own experts. All ranks of `ep_group` then call this together.

        Returns:
            `[N, D]`; rows past the last offset are zero, or the output of `post_norm` for zeros.
        """
        up = self._product(self._up_name, rows_ND, expert_offsets, moves)
        hidden = run_activation(
            up, self.activation, gated=self.gated, layout=self.layout, weights=row_weights
        )
        out_ND = self._product("down_proj", hidden, expert_offsets, moves)
        return out_ND if self.post_expert_norm is None else self.post_expert_norm(out_ND)

    def _product(
        self, name: str, x: Tensor, expert_offsets: Tensor, moves: ExpertMoves | None
    ) -> Tensor:
        bias_EM = getattr(self, f"{name}_bias")
        if bias_EM is not None:
            bias_EM = local_part(bias_EM) if moves is None else moves.extend(local_part(bias_EM))
        weight: Tensor = getattr(self, name)
        # A plain weight is used directly, which saves a call.
        if moves is not None or self.transposed or type(weight) not in (nn.Parameter, Tensor):
            weight = self._weight(name, moves)
        return ops.grouped_mm(x, weight, expert_offsets, bias_EM=bias_EM)

    def _weight(self, name: str, moves: ExpertMoves | None = None) -> Tensor:
        weight: Tensor = getattr(self, name)
        if type(weight) not in (nn.Parameter, Tensor):
            weight = local_part(weight)
        if moves is not None:
            weight = moves.extend(weight)
        return weight.transpose(1, 2) if self.transposed else weight


def take_weights(
    dispatcher: TokenDispatcher, rows: Tensor, metadata: DispatchMetadata
) -> tuple[tuple[RowWeights, ...], DispatchMetadata]:
    """Return the weights for experts that weigh their rows, and the metadata of the results."""
    weights = dispatcher.row_weights(rows, metadata)
    return ((), metadata) if weights is None else ((weights,), replace(metadata, topk_weights=None))


# Dictionary of a module's parameters, a name in it, and the tensor to use in a pass.
Weights = list[tuple[dict[str, Any], str, Tensor]]


def late_weights(experts: nn.Module) -> Weights:
    """Return weights for `run_experts`; to be called while the rows travel.

    The products for the gradients of these weights are deferred to autograd nodes recorded here.
    The engine runs nodes in the reverse order of recording: first the later nodes that start to
    send gradients, then these products, then the earlier nodes that wait for the messages. So the
    products overlap with the messages. The results have the same bits. Without `moe_ext._runtime`
    products are not deferred.
    """
    if not torch.is_grad_enabled():
        return []
    runtime = _runtime_library.load()
    found: Weights = []
    for module in experts.modules():
        # Hooks of FSDP2 gather the shards of such experts later, when the experts run.
        if not runs_own_forward(module) or module.transposed or is_fsdp(module):
            continue
        held = module._parameters
        for name in (module._up_name, "down_proj"):
            weight = held.get(name)
            # Other code may have put a plain tensor in place of the parameter for this pass.
            if weight is not None and type(weight) is not Tensor and weight.requires_grad:
                part = as_autocast(own_part_of(module, name, weight, runtime))
                found.append((held, name, part if runtime is None else runtime.late_gradient(part)))
    return found


def moved_weights(experts: GroupedExperts, moves: ExpertMoves) -> Weights:
    """Return weights extended by those of moved experts, which are sent beside the rows."""
    held, names = experts._parameters, (experts._up_name, "down_proj")
    # Weights that hooks of FSDP2 gather, or that hooks or parametrizations compute, exist only when
    # the experts run. `GroupedExperts.forward` sends them, after the rows.
    if is_fsdp(experts) or not {n + end for n in names for end in ("", "_bias")} <= held.keys():
        return []
    weights = experts.named_parameters(recurse=False)
    return [(held, n, moves.extend(own_part_of(experts, n, weight))) for n, weight in weights]


def run_experts(experts: nn.Module, late: Weights, *args: Any) -> Tensor:
    """Run experts with the weights of `late_weights` or `moved_weights`."""
    # `torch.func.functional_call` does the same, but searches for the names in each pass.
    held: Weights = []
    try:
        for parameters, name, weight in late:
            held.append((parameters, name, parameters[name]))
            parameters[name] = weight
        return experts(*args)
    finally:
        for parameters, name, parameter in held:
            parameters[name] = parameter


def runs_own_forward(experts: nn.Module) -> TypeGuard[GroupedExperts]:
    """Return True for `GroupedExperts` and subclasses that do not replace `forward`."""
    # Accelerate sets a `forward` on the module, which fetches the weights that it has offloaded.
    own = GroupedExperts.forward
    found = isinstance(experts, GroupedExperts) and type(experts).forward is own
    return found and "forward" not in experts.__dict__


def check_results(
    experts: nn.Module, dispatcher: TokenDispatcher, rows: Tensor, results: Tensor
) -> None:
    """Refuse results of another shape than the rows, or of a dtype that differs between ranks."""
    if results.shape != rows.shape:
        raise ValueError(
            f"MoELayer: expected experts to return rows of shape {tuple(rows.shape)}, got "
            f"{tuple(results.shape)}"
        )
    if type(experts) is not GroupedExperts and not runs_own_forward(experts):
        dispatcher.agree_on_results(rows, results)


def slots_of_shards(
    topk_idx_TK: Tensor, topk_weights_TK: Tensor, num_experts: int, ep_group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return slots `[T, K * etp]` for every shard of each chosen expert, and their weights.

    A dispatcher treats each shard as an expert. The output of an expert is the sum of those of its
    shards.
    """
    shards = shards_of_experts(ep_group)
    num_local = num_experts * shards // group_size(ep_group)
    place, local = topk_idx_TK // num_local, topk_idx_TK % num_local
    shard = torch.arange(shards, device=local.device)
    idx_TKS = (place[..., None] * shards + shard) * num_local + local[..., None]
    idx_TKS = idx_TKS.masked_fill(topk_idx_TK[..., None] < 0, -1)
    return idx_TKS.flatten(1), topk_weights_TK.repeat_interleave(shards, dim=-1)


def local_experts(num_experts: int, ep_group: ProcessGroup | None, owner: str) -> int:
    """Return the number of experts of each rank; ValueError if the group does not divide E."""
    ep_size = group_size(ep_group) // shards_of_experts(ep_group)
    if num_experts % ep_size != 0:
        raise ValueError(
            f"{owner}: expected num_experts to be a multiple of the size of ep_group "
            f"({ep_size}), got {num_experts}"
        )
    return num_experts // ep_size
