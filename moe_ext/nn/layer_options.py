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
    """Return the `Capacity` for a value, if it can be combined with the layer's router."""
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
    """Add the random state to a router from which a capacity draws, if it does."""
    if capacity is not None and capacity.drop == "random":
        assert isinstance(router, Router)
        if router.rng_state is None:
            router.add_rng_state(capacity.seed, device=device)


def keep_for_router(layer: MoELayer, router: nn.Module, device: torch.device | str | None) -> None:
    """Create the histograms for quantile balancing, and the random state, if they are needed."""
    layer.required_bias = None
    if getattr(router, "bias_update", None) == "quantile":
        bins = (layer.num_experts, NUM_BINS)
        layer.required_bias = torch.zeros(bins, dtype=torch.int32, device=device)
    add_draws(layer.capacity, router, device)


def _take_part(layer: MoELayer, part: nn.Module | None) -> nn.Module | None:
    """Return a module that replaces another, and have the next pass compare its options."""
    if layer.__dict__.get("_watched") is not None:
        # `_compared` never equals a module, so the next pass compares all options.
        layer._watched = operator.attrgetter("router")
    return part


def _take_router(layer: MoELayer, router: nn.Module) -> nn.Module | None:
    """Check a router that replaces that of the layer."""
    if "router" in layer._modules:
        check_kind("MoELayer", "router", router, nn.Module, required=True)
        sizes = {"num_experts": layer.num_experts, "model_dim": layer.model_dim}
        check_sizes_of("router", router, **sizes)
        check_combination("MoELayer", capacity=layer.capacity, router=router)
        keep_for_router(layer, router, layer.choices.device)
    return _take_part(layer, router)


def _take_balance(layer: MoELayer, value: Balance | str | float | None) -> Balance:
    """Return the `Balance` for a value; another scope or group gets new counts."""
    balance, held = Balance.of("MoELayer", value), layer.__dict__.get("balance")
    if held is not None and (balance.scope, balance.group) != (held.scope, held.group):
        device = layer.choices.device
        layer.global_counts = step_counts_for(balance, layer.num_experts, device)
    return balance


def _take_dispatcher(layer: MoELayer, value: object) -> object:
    """Return a dispatcher. A name is refused: every rank would have to set it at the same time."""
    if not hasattr(value, "plan"):
        raise TypeError(
            f"MoELayer: expected dispatcher to be a TokenDispatcher once the layer is made, got "
            f"{value!r}; make the layer anew"
        )
    return value


def _fixed(name: str) -> Callable[[MoELayer, object], object]:
    """Return a function that refuses to change a size for which the layer's parts were made."""

    def take(layer: MoELayer, value: object) -> object:
        held = layer.__dict__.get(name, value)
        if held != value:
            raise ValueError(
                f"MoELayer: expected {name} to be {held}, for which the layer was made, got {value}"
            )
        return value

    return take


# Functions that check and convert values that a user assigns to attributes, by attribute.
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
    """Raise RuntimeError if the current transforms of `torch.func` do not work with this layer."""
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
    """Check the tokens, and tensors with a value for each token; see `forward`."""
    if not x.is_floating_point():
        raise TypeError(f"MoELayer: expected x to be floating point, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] != layer.model_dim:
        raise ValueError(
            f"MoELayer: expected x to be of shape [..., {layer.model_dim}], got {tuple(x.shape)}"
        )
    experts = layer.experts
    if isinstance(experts, GroupedExperts):
        weight = experts.down_proj
        # If FSDP2 wraps the experts separately, it gathers and casts their weights when they run.
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
    """Return True if ranks compare the bits of the router's parameters in this pass.

    The layer asks in passes 1, 2, 4, 8, .... Gradients that were not averaged are so found early,
    and a long run pays nothing. With a static row budget a CUDA graph may capture pass 3 or a later
    one, so only passes 1 and 2 compare.
    """
    router = layer.router
    # A user's own router may differ between ranks on purpose.
    if not isinstance(router, Router) or is_transformed():
        return False
    if layer._num_passes >= 2 and layer._cut().is_static:
        return False
    # Shards differ between ranks. The wrapper that sharded them keeps them consistent.
    return not any(is_dtensor(p) or may_differ(p) for p in router.parameters())


def check_way_of_exchange(layer: MoELayer, x: Tensor) -> None:
    """Raise ValueError on every rank if a rank changed an option that determines messages."""
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
    """Return options by name that must be equal on every rank and never change."""
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
    """Return current options by name that must be equal on every rank, and a reader of them."""
    # Names for messages, by the path of each attribute.
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
    """Return the parts of the layer that are modules of this package, by name."""
    names = ("router", "experts", "shared_expert")
    found = [(name, getattr(layer, name)) for name in names]
    # A user's own modules may differ between ranks on purpose.
    return [(n, m) for n, m in found if isinstance(m, (Router, GroupedExperts, FeedForward))]


def router_of(name: str, model_dim: int, num_experts: int, top_k: int, **made: Any) -> TopKRouter:
    """Make the router for the name of a score function."""
    if name not in SCORE_FNS:
        raise ValueError(
            f"MoELayer: expected router to be one of {SCORE_FNS}, or a module such as "
            "moe_ext.nn.SwitchRouter(model_dim, num_experts) (see the routers of moe_ext.nn, and "
            f"moe_ext.nn.switch_moe and its like for whole layers), got {name!r}"
        )
    return TopKRouter(model_dim, num_experts, top_k, score_fn=name, **made)


def check_modules(router: object, experts: object) -> None:
    """Raise TypeError for a class, a list, or anything else that is not a callable module."""
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
    """Raise ValueError for a part of the layer that was made for other sizes."""
    for size_name, size in sizes.items():
        held = getattr(part, size_name, None)
        if held is not None and size is not None and held != size:
            raise ValueError(f"MoELayer: expected {name} to have {size_name}={size}, got {held}")
