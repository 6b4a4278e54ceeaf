"""Options of a mixture-of-experts layer, which ranks compare, and checks of its inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_ext._checks import check_kind
from moe_ext.comm import debugging
from moe_ext.comm.agreement import option_names, told_option
from moe_ext.comm.groups import group_size
from moe_ext.dispatch import RowBudget
from moe_ext.distributed.dtensor import is_dtensor, is_fsdp
from moe_ext.distributed.gradients import may_differ
from moe_ext.nn.balance.losses import Balance, step_counts_for
from moe_ext.nn.balance.quantile import NUM_BINS
from moe_ext.nn.capacity import Capacity
from moe_ext.nn.combinations import check_combination
from moe_ext.nn.experts import GroupedExperts
from moe_ext.nn.feed_forward import FeedForward
from moe_ext.nn.options import of_number
from moe_ext.nn.routers import Router, TopKRouter
from moe_ext.nn.routers.topk import SCORE_FNS
from moe_ext.nn.torch_state import autocast_dtype
from moe_ext.ops.autograd import is_transformed, transforms

if TYPE_CHECKING:
    from moe_ext.nn.moe_layer import MoELayer


def _take_capacity(layer: MoELayer, value: Capacity | float | None) -> Capacity | None:
    """The capacity that is meant, where the layer's router goes with it."""
    capacity = of_number("capacity", value, Capacity)
    router = layer._modules.get("router")
    if router is not None:
        check_combination("MoELayer", capacity=capacity, router=router)
        device = next((p.device for p in layer.parameters()), None)
        add_draws(capacity, router, device)
    return capacity


def add_draws(
    capacity: Capacity | None, router: nn.Module, device: torch.device | str | None
) -> None:
    """Give the router the random state that a capacity draws from."""
    if capacity is not None and capacity.drop == "random":
        assert isinstance(router, Router)
        if router.rng_state is None:
            router.add_rng_state(capacity.seed, device=device)


def keep_for_router(layer: MoELayer, router: nn.Module, device: torch.device | str | None) -> None:
    """Begin to keep what a router's own way of balancing, and a capacity that draws, want."""
    layer.required_bias = None
    if getattr(router, "bias_update", None) == "quantile":
        bins = (layer.num_experts, NUM_BINS)
        layer.required_bias = torch.zeros(bins, dtype=torch.int32, device=device)
    add_draws(layer.capacity, router, device)


def _take_part(layer: MoELayer, part: nn.Module | None) -> nn.Module | None:
    """A part in the place of another, whose options the ranks compare with the next pass."""
    if layer.__dict__.get("_watched") is not None:
        # A module is no value that they have compared.
        layer._watched = operator.attrgetter("router")
    return part


def _take_router(layer: MoELayer, router: nn.Module) -> nn.Module | None:
    """A router in the place of that which the layer was made with."""
    if "router" in layer._modules:
        check_kind("MoELayer", "router", router, nn.Module, required=True)
        sizes = {"num_experts": layer.num_experts, "model_dim": layer.model_dim}
        check_sizes_of("router", router, **sizes)
        check_combination("MoELayer", capacity=layer.capacity, router=router)
        keep_for_router(layer, router, layer.choices.device)
    return _take_part(layer, router)


def _take_balance(layer: MoELayer, value: Balance | str | float | None) -> Balance:
    """The losses that are meant; those of another scope or group count anew."""
    balance, held = Balance.of("MoELayer", value), layer.__dict__.get("balance")
    if held is not None and (balance.scope, balance.group) != (held.scope, held.group):
        device = layer.choices.device
        layer.global_counts = step_counts_for(balance, layer.num_experts, device)
    return balance


def _take_dispatcher(layer: MoELayer, value: object) -> object:
    """A dispatcher; a name would have to be given on every rank at once."""
    if not hasattr(value, "plan"):
        raise TypeError(
            f"MoELayer: expected dispatcher to be a TokenDispatcher once the layer is made, got "
            f"{value!r}; make the layer anew"
        )
    return value


def _fixed(name: str) -> Callable[[MoELayer, object], object]:
    """A size that the layer's parts were made for."""

    def take(layer: MoELayer, value: object) -> object:
        held = layer.__dict__.get(name, value)
        if held != value:
            raise ValueError(
                f"MoELayer: expected {name} to be {held}, for which the layer was made, got {value}"
            )
        return value

    return take


# Attributes by name, and functions that give their values from those that a user sets.
TAKES: dict[str, Callable[[MoELayer, Any], Any]] = {
    "balance": _take_balance,
    "router": _take_router,
    "experts": _take_part,
    "shared_expert": _take_part,
    "capacity": _take_capacity,
    "row_budget": lambda _, value: of_number("row_budget", value, RowBudget),
    "dispatcher": _take_dispatcher,
    **{name: _fixed(name) for name in ("model_dim", "num_experts")},
}


def check_transforms(layer: MoELayer) -> None:
    """RuntimeError for what `torch.func` cannot make of this layer."""
    found = transforms()
    if found.count("grad") > 1:
        raise RuntimeError(
            f"MoELayer: expected the layer to be differentiated once by torch.func, got {found}"
        )
    counts = layer.global_counts is not None
    counts |= getattr(layer.router, "selection_bias", None) is not None
    layer._check_combination(
        transforms=found,
        experts=layer.experts,
        num_ranks=group_size(layer.dispatcher.group),
        counts=counts and layer.training,
    )


def check_inputs(layer: MoELayer, x: Tensor, per_token: dict[str, Tensor | None]) -> None:
    """Refuse tokens and what is told of each; see `forward`."""
    if not x.is_floating_point():
        raise TypeError(f"MoELayer: expected x to be floating point, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] != layer.model_dim:
        raise ValueError(
            f"MoELayer: expected x to be of shape [..., {layer.model_dim}], got {tuple(x.shape)}"
        )
    experts = layer.experts
    if isinstance(experts, GroupedExperts):
        weight = experts.down_proj
        # FSDP2 gathers those that it wrapped by themselves, and casts them, when they run.
        wrong = x.dtype != weight.dtype and not is_fsdp(experts)
        if wrong and autocast_dtype(x.device) is None:
            raise TypeError(
                f"MoELayer: expected x to be of dtype {weight.dtype}, that of the experts, got "
                f"{x.dtype}; cast one of them (layer.to({x.dtype}), x.to({weight.dtype})), or "
                "call the layer under torch.autocast; with a MixedPrecisionPolicy of FSDP2, "
                "wrap the experts too, by moe_ext.distributed.fully_shard"
            )
    for name, value in per_token.items():
        if value is None:
            continue
        check_kind("MoELayer", name, value, Tensor)
        wanted, word = (torch.bool, "bool") if name == "token_mask" else (torch.int64, "int64")
        if value.dtype != wanted:
            raise TypeError(f"MoELayer: expected {name} to be {word}, got {value.dtype}")
        if value.shape != x.shape[:-1]:
            raise ValueError(
                f"MoELayer: expected {name} to be of shape {tuple(x.shape[:-1])}, got "
                f"{tuple(value.shape)}"
            )


def looks_at_router(layer: MoELayer) -> bool:
    """True if ranks compare the bits of the router's parameters with this pass.

    With passes 1, 2, 4, 8, ...: a step before which gradients were not averaged is found soon,
    and looking costs nothing in a long run. With a static budget, which a CUDA graph may hold
    from the third pass on, with 1 and 2 alone.
    """
    router = layer.router
    # A caller's own may have a reason to differ between ranks.
    if not isinstance(router, Router) or is_transformed():
        return False
    if layer._num_passes >= 2 and layer._cut().is_static:
        return False
    # Shards differ between ranks; what holds them keeps them in step.
    return not any(is_dtensor(p) or may_differ(p) for p in router.parameters())


def check_way_of_exchange(layer: MoELayer, x: Tensor) -> None:
    """ValueError on every rank if one has set what other messages than before follow from."""
    first, now = layer._first_cut, layer._cut()
    assert first is not None
    for name, old, new in (
        ("overlap", first.num_parts, now.num_parts),
        ("row_budget.static", first.is_static, now.is_static),
    ):
        if new != old:
            with layer.dispatcher.routing(x, first):
                raise ValueError(
                    f"MoELayer: expected {name} to be {old} as in the first forward pass, "
                    f"got {new}; make the layer anew"
                )


def made_with(layer: MoELayer) -> dict[str, object]:
    """Options that must be equal on every rank and do not change, by name."""
    dispatcher, rebalancer = layer.dispatcher, layer._rebalancer
    found = told_option("rebalance", None if rebalancer is None else rebalancer.options)
    found["dispatcher"] = type(dispatcher).__name__
    found.update(told_option("wire", dispatcher.wire))
    for name, fact in dispatcher._calls.facts.items():
        found["num_experts of the dispatcher" if name == "num_experts" else name] = fact
    found[debugging.OPTION] = debugging.enabled()
    found["shared_expert_gate"] = layer.shared_expert_gate is not None
    found.update(told_option("post_norm", getattr(layer.experts, "post_expert_norm", None)))
    for name, module in _parts(layer):
        for parameter_name, parameter in module.named_parameters():
            found[f"the shape of {name}.{parameter_name}"] = list(parameter.shape)
            found[f"the dtype of {name}.{parameter_name}"] = parameter.dtype
    return found


def options_now(layer: MoELayer) -> tuple[dict[str, object], operator.attrgetter[Any]]:
    """Options that must be equal on every rank, by name, and what reads their attributes."""
    # Paths of attributes to names for messages.
    names = {name: name for name in (*option_names(layer), "overlap")}
    for part, module in _parts(layer):
        names |= {f"{part}.{name}": f"{part}.{name}" for name in option_names(module)}
    if layer._rebalancer is not None and layer._rebalancer.options.mode == "periodic":
        names["_rebalancer.calls"] = "calls of update_placement"
        names["training"] = "training, with rebalance='periodic'"
    read = operator.attrgetter(*names)
    found: dict[str, object] = {"num_experts": layer.num_experts, "top_k": layer.top_k}
    for name, value in zip(names.values(), read(layer), strict=True):
        found.update(told_option(name, value))
    return found, read


def _parts(layer: MoELayer) -> list[tuple[str, nn.Module]]:
    """Modules of this package that the layer consists of, by name."""
    names = ("router", "experts", "shared_expert")
    found = [(name, getattr(layer, name)) for name in names]
    # A caller's own may have a reason to differ between ranks.
    return [(n, m) for n, m in found if isinstance(m, (Router, GroupedExperts, FeedForward))]


def router_of(name: str, model_dim: int, num_experts: int, top_k: int, **made: Any) -> TopKRouter:
    """The router that a name stands for: that of a score function."""
    if name not in SCORE_FNS:
        raise ValueError(
            f"MoELayer: expected router to be one of {SCORE_FNS}, or a module such as "
            "moe_ext.nn.SwitchRouter(model_dim, num_experts) (see the routers of moe_ext.nn, and "
            f"moe_ext.nn.switch_moe and its like for whole layers), got {name!r}"
        )
    return TopKRouter(model_dim, num_experts, top_k, score_fn=name, **made)


def check_modules(router: object, experts: object) -> None:
    """TypeError for what is no module, or cannot be called as one."""
    if isinstance(router, type):
        raise TypeError(
            f"MoELayer: expected router to be a name or a module, got the class {router.__name__}; "
            "make one, with model_dim and num_experts"
        )
    if isinstance(experts, (list, tuple)) or type(experts) is nn.ModuleList:
        raise TypeError(
            "MoELayer: expected experts to be one module, got a "
            f"{type(experts).__name__} of {len(experts)}; moe_ext.nn.ModuleExperts runs modules of "
            "any kind one after the other"
        )
    check_kind("MoELayer", "experts", experts, nn.Module)


def check_sizes_of(name: str, part: object, **sizes: int | None) -> None:
    """Refuse a part of the layer that was made for other sizes."""
    for size_name, size in sizes.items():
        held = getattr(part, size_name, None)
        if held is not None and size is not None and held != size:
            raise ValueError(f"MoELayer: expected {name} to have {size_name}={size}, got {held}")
