"""Pruning that lasts through training and checkpoints, by masks beside the parameters.

Shape suffixes: E experts of this rank, F ffn, D model.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers
from moe_ext._compile import outside_graphs
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import resolve_group
from moe_ext.compression.codecs.masked import Masked
from moe_ext.compression.masks import (
    ElementMask,
    add_mask,
    checksum_of,
    drop_mask,
    mask_of,
    masks_of,
)
from moe_ext.distributed.dtensor import is_dtensor, local_part, with_local
from moe_ext.distributed.placement import Placement, is_expert_shard, placements, sharded_parameters
from moe_ext.distributed.replicas import replica_group
from moe_ext.nn import GroupedExperts

PATTERNS = ("magnitude", "2:4", "movement", "experts", "neurons")

_OP = "prune"
# Modules with masks. The hook after each optimizer step visits all of them.
_pruned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Pruning:
    """Handle of the parameters that `prune` has pruned.

    Attributes:
        masks: masks by the name of the parameter in the model.
    """

    def __init__(self, model: nn.Module, pattern: str, masks: dict[str, ElementMask]) -> None:
        self._model, self.pattern, self.masks = model, pattern, masks
        self._hooks: list[Any] = []
        # Scores of movement pruning, in the shapes of this rank's shards.
        self._scores: dict[str, Tensor] = {}
        if pattern == "movement":
            self._hooks.append(register_optimizer_step_pre_hook(self._add_scores))

    @property
    def density(self) -> float:
        """Share of the elements of the pruned parameters that are kept on this rank."""
        kept = sum(mask.count for mask in self.masks.values())
        return kept / sum(mask.shape.numel() for mask in self.masks.values())

    @torch.no_grad()
    def update(self, density: float) -> None:
        """Prune to a lower density; pruned elements stay pruned. Collective, between steps.

        Args:
            density: in (0, 1]; for "2:4" 0.5.

        Raises:
            ValueError: on every rank: the density is out of range, or masks differ between ranks
                with the same parameters.
        """
        _check_density(self.pattern, density)
        density = float(density)
        if self.pattern in ("experts", "neurons"):
            found = self._structured(density)
        else:
            found = {name: self._unstructured(name, density) for name in self.masks}
        bitmaps = {
            name: ops.pack_bits((marks & self.masks[name].marks).contiguous())
            for name, marks in found.items()
        }
        self._agree(bitmaps)
        for name, bitmap in bitmaps.items():
            mask = self.masks[name]
            mask.bitmap.copy_(bitmap)
            mask.clear_(mask.parameter)

    def codecs(self) -> dict[str, Masked]:
        """Return codecs for `Policy(by_name=...)`: a `CompressionState` then sends kept elements.

        Make a new state after `update`.
        """
        found = {name: Masked(mask) for name, mask in self.masks.items()}
        # Patterns for a larger model that holds this one. The first pattern that fits counts, so
        # longer names come first: one name may be the end of another.
        ends = sorted(found, key=len, reverse=True)
        return found | {f"*.{name}": found[name] for name in ends}

    def remove(self) -> None:
        """Remove the masks; pruned weights stay zero until an optimizer changes them."""
        for mask in self.masks.values():
            drop_mask(mask)
        for hook in self._hooks:
            hook.remove()

    def to_semi_structured(self) -> None:
        """Convert "2:4" pruned matrices to torch's semi-structured layout, for inference.

        Raises:
            ValueError: the pattern is another one; torch has no kernels for stacked experts, or for
                the device (CUDA of capability 8.0 at least). Nothing is changed.
        """
        parameters = [mask.parameter for mask in self.masks.values()]
        problem = None if self.pattern == "2:4" else f"pattern {self.pattern!r}"
        for name, parameter in zip(self.masks, parameters, strict=True):
            if parameter.dim() != 2:
                problem = f"{name} of shape {tuple(parameter.shape)}"
            elif not parameter.is_cuda or torch.cuda.get_device_capability() < (8, 0):
                problem = f"{name} on {parameter.device}"
        if problem is not None:
            raise ValueError(
                f"{_OP}: expected matrices pruned 2:4 on CUDA of capability 8.0, got {problem}"
            )
        for mask in self.masks.values():
            packed = torch.sparse.to_sparse_semi_structured(mask.parameter.detach())
            mask.module._parameters[mask.name] = nn.Parameter(packed, requires_grad=False)

    # -- choice of the kept elements ---------------------------------------------------------

    def _whole(self, name: str, like: Tensor | None = None) -> Tensor:
        """Gather this rank's part of a parameter, or of a tensor like its shard, from FSDP2."""
        mask = self.masks[name]
        own = mask.parameter.detach()
        return mask.gathered(own if like is None else with_local(own, like))

    def _unstructured(self, name: str, density: float) -> Tensor:
        weight = self._whole(name)
        if self.pattern == "2:4":
            fours = weight.abs().unflatten(-1, (-1, 4))
            return _largest(fours, 2).flatten(-2)
        importance = weight.abs()
        if self.pattern == "movement":
            local = self._scores.get(name)
            if local is None:
                local = torch.zeros_like(local_part(self.masks[name].parameter.detach()))
            importance = self._whole(name, local)
        # Pruned elements must never be chosen again.
        importance = importance.float().masked_fill(~self.masks[name].marks, -math.inf)
        rows = importance.flatten(1) if importance.dim() > 2 else importance.view(1, -1)
        count = max(1, round(density * rows.shape[1]))
        return _largest(rows, count).view(weight.shape)

    def _structured(self, density: float) -> dict[str, Tensor]:
        """Choose the largest experts of each layer, or the largest neurons of each expert."""
        by_module: dict[nn.Module, list[str]] = {}
        for name, mask in self.masks.items():
            by_module.setdefault(mask.module, []).append(name)
        found: dict[str, Tensor] = {}
        for module, names in by_module.items():
            weights = {self.masks[n].name: self._whole(n).float() for n in names}
            if self.pattern == "experts":
                place = placements(module).get(next(iter(weights)))
                marks = _experts(weights, density, place)
            else:
                assert isinstance(module, GroupedExperts)
                marks = _neurons(module, weights, density)
            for name in names:
                own = marks[self.masks[name].name]
                found[name] = own.expand(self.masks[name].shape)
        return found

    @torch.no_grad()
    def _add_scores(self, optimizer: Optimizer, *_args: object) -> None:
        """Add -gradient * weight to the scores, before an optimizer step (Sanh et al.)."""
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, mask in self.masks.items():
            parameter = mask.held
            if parameter is not None and id(parameter) in owned and parameter.grad is not None:
                weight, grad = local_part(parameter.detach()), local_part(parameter.grad)
                score = self._scores.setdefault(name, torch.zeros_like(weight))
                score.sub_(weight * grad)

    def _agree(self, bitmaps: dict[str, Tensor]) -> None:
        """Raise if masks differ between ranks that hold the same parameters."""
        places = sharded_parameters(self._model)
        world = resolve_group(None, _OP)
        by_group: dict[Any, dict[str, object]] = {world: {}}
        device = next(iter(bitmaps.values())).device
        for name, bitmap in bitmaps.items():
            place = places[name][1] if name in places else None
            group = world
            if place is not None:
                assert place.group is not None
                group = replica_group(place.group, device)
            by_group.setdefault(group, {})[f"the mask of {name}"] = checksum_of(bitmap)
        for group, facts in by_group.items():
            if group is not None and facts:
                Agreement(_OP, group, device).compare(facts)


def prune(
    model: nn.Module,
    pattern: str = "magnitude",
    *,
    density: float = 0.5,
    parameters: Collection[str] | None = None,
) -> Pruning:
    """Set weights to zero, and keep them zero in optimizer steps and checkpoints.

    A mask is a buffer beside its parameter (`gate_up_proj_mask`, one bit per element).
    `state_dict`, `moe_ext.distributed.checkpoint` and torch's checkpoints save and load it with the
    parameter, also over another number of ranks: call `prune` on the new model first, then load.
    Gradients of pruned elements are zeroed before they are reduced, and pruned weights after every
    step of any torch optimizer. With `pack_fsdp_messages` and `Pruning.codecs` ranks send only kept
    elements.

    ============ ==================================================================================
    pattern      keeps
    ============ ==================================================================================
    "magnitude"  the largest weights of each expert (of each matrix, where there are no experts)
    "2:4"        the two largest of four neighbours in the last dimension
    "movement"   all at first; `Pruning.update` then keeps weights that training moves away from
                 zero, with the largest sums of -gradient * weight over the steps until then. The
                 sums are not saved.
    "experts"    the experts of a layer whose weights have the largest norms
    "neurons"    of each expert, the hidden units with the largest norms of rows and columns
    ============ ==================================================================================

    Ties go to the lower index, so that ranks with the same weights agree. If the model lies over
    ranks, this is a collective, before or after FSDP2 or DistributedDataParallel wraps it.

    Args:
        model: any module.
        pattern: see above.
        density: share that is kept of each expert, layer or matrix, at least one; 0.5 for "2:4".
        parameters: names in the model; None takes the weights of all `GroupedExperts`.

    Returns:
        Handle of the masks, with methods to change them.

    Raises:
        ValueError: pattern or density is unknown; a parameter is missing or pruned already, or has
            rows that are no multiples of 8 elements; experts are divided by etp; "neurons" is used
            without `GroupedExperts`; masks differ between ranks. Nothing is changed.

    References: Zhu and Gupta, To prune, or not to prune, 2017 (arXiv 1710.01878); Sanh et al.,
    Movement pruning, 2020 (arXiv 2005.07683), equation 3; Mishra et al., Accelerating sparse deep
    neural networks, 2021 (arXiv 2104.08378).
    """
    check_choice(_OP, "pattern", pattern, PATTERNS)
    found = _named(model, parameters)
    problem = _problem(model, pattern, found)
    if problem is not None:
        raise ValueError(f"{_OP}: expected {problem}")
    _check_density(pattern, density)
    masks = {full: add_mask(module, name) for full, (module, name) in found.items()}
    handle = Pruning(model, pattern, masks)
    try:
        if pattern != "movement":
            handle.update(density)
    except BaseException:
        handle.remove()
        raise
    for mask in masks.values():
        _hook_gradient(mask)
    for module in {id(m): m for m, _ in found.values()}.values():
        _pruned.add(module)
        module.register_forward_pre_hook(_watch)
    _install()
    return handle


def _check_density(pattern: str, density: float) -> None:
    check_numbers(_OP, _check_density.__annotations__, locals())
    if not 0 < density <= 1 or (pattern == "2:4" and density != 0.5):
        wanted = "0.5 for 2:4" if pattern == "2:4" else "in (0, 1]"
        raise ValueError(f"{_OP}: expected density to be {wanted}, got {density}")


def _named(model: nn.Module, parameters: Collection[str] | None) -> dict[str, Any]:
    """Map each parameter's name in the model to its module, and its name in the module."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            is_expert = isinstance(module, GroupedExperts) and parameter.dim() == 3
            if full in parameters if parameters is not None else is_expert:
                owners[full] = module, name
    missing = sorted(set(parameters or ()) - owners.keys())
    if missing:
        raise ValueError(f"{_OP}: expected parameters to be names of the model's, got {missing}")
    if not owners:
        raise ValueError(
            f"{_OP}: expected model to hold GroupedExperts, or parameters to be named, got none"
        )
    return owners


def _problem(model: nn.Module, pattern: str, found: dict[str, Any]) -> str | None:
    sharded_parameters(model)
    for full, (module, name) in found.items():
        parameter = module._parameters[name]
        shape = tuple(parameter.shape)
        if mask_of(module, name) is not None:
            return f"{full} not to be pruned already, got a second call"
        if is_expert_shard(parameter):
            return f"experts to be held whole, got {full} divided by etp"
        if parameter.dim() < 2 or parameter.shape[1:].numel() % 8:
            return f"rows of {full} to be a multiple of 8 elements, got shape {shape}"
        if pattern == "2:4" and parameter.shape[-1] % 4:
            return f"the last dimension of {full} to be a multiple of 4, got shape {shape}"
        if pattern in ("experts", "neurons") and not isinstance(module, GroupedExperts):
            return f"{full} to be of GroupedExperts for pattern {pattern!r}, got {type(module)}"
    return None


def _largest(x: Tensor, count: int) -> Tensor:
    """Mark the `count` largest along the last dimension; ties go to the lower index."""
    order = x.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)


def _experts(
    weights: dict[str, Tensor], density: float, place: Placement | None
) -> dict[str, Tensor]:
    """Mark the kept experts of a layer, `[E, 1, 1]`; norms are compared over all of its ranks."""
    norms_E = torch.stack([w.flatten(1).square().sum(dim=1) for w in weights.values()]).sum(dim=0)
    first, num_local = 0, len(norms_E)
    if place is not None and place.num_parts > 1:
        norms_E = collectives.all_gather(norms_E, place.group, operation=_OP)
        first = place.held.start
    count = max(1, round(density * len(norms_E)))
    marks = _largest(norms_E, count)[first : first + num_local]
    return dict.fromkeys(weights, marks.view(-1, 1, 1))


def _neurons(
    experts: GroupedExperts, weights: dict[str, Tensor], density: float
) -> dict[str, Tensor]:
    """Mark the kept hidden units of each expert, in shapes that broadcast to the weights."""
    up_name = next(name for name in ("gate_up_proj", "up_proj") if hasattr(experts, name))
    up, down = experts._parameters[up_name], experts._parameters["down_proj"]
    assert up is not None and down is not None
    up_dim, down_dim = (2, 1) if experts.transposed else (1, 2)
    squares_EF: Any = 0
    pieces = up.shape[up_dim] // down.shape[down_dim]
    interleaved = experts.layout != "concatenated"
    if up_name in weights:
        sums = weights[up_name].square().sum(dim=3 - up_dim)
        split = sums.unflatten(1, (-1, pieces) if interleaved else (pieces, -1))
        squares_EF = squares_EF + split.sum(dim=2 if interleaved else 1)
    if "down_proj" in weights:
        squares_EF = squares_EF + weights["down_proj"].square().sum(dim=3 - down_dim)
    count = max(1, round(density * squares_EF.shape[1]))
    marks_EF = _largest(squares_EF, count)
    doubled = (
        marks_EF.repeat_interleave(pieces, dim=1) if interleaved else marks_EF.repeat(1, pieces)
    )
    return {up_name: doubled.unsqueeze(3 - up_dim), "down_proj": marks_EF.unsqueeze(3 - down_dim)}


# -- hooks that keep pruned weights at zero ---------------------------------------------------


def _hook_gradient(mask: ElementMask) -> None:
    """Add a hook that zeroes pruned elements of the gradient of the module's present parameter."""
    parameter = mask.parameter
    # A tensor that is no leaf, in the place of the parameter, needs no hook: its gradient flows on
    # to the parameter, which has one.
    if not (parameter.requires_grad and parameter.is_leaf):
        return
    if is_dtensor(parameter) and parameter.device_mesh.ndim > mask.num_axes:
        return
    # The hooks themselves show if one was added. An attribute of the parameter would be pickled
    # with it, but hooks are not.
    hooks: Any = parameter._backward_hooks or {}
    if any(getattr(hook, "mask", None) is mask for hook in hooks.values()):
        return

    def masked(grad: Tensor) -> Tensor:
        if mask_of(mask.module, mask.name) is not mask:
            return grad
        grad = grad.contiguous().clone()
        mask.clear_(grad)
        return grad

    masked.mask = mask  # type: ignore[attr-defined]
    parameter.register_hook(masked)


@outside_graphs
def _watch(module: nn.Module, _inputs: object) -> None:
    """Add hooks before a forward pass, because FSDP2 puts gathered parameters into the module."""
    _pruned.add(module)
    for _, mask in masks_of(module):
        if mask.module is module:
            _hook_gradient(mask)


def _mask_weights(optimizer: Optimizer, *_args: object) -> None:
    """Zero pruned weights after an optimizer step; momentum, for instance, may have moved them."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for pruned in list(_pruned):
        for _, mask in masks_of(pruned):
            # `held` may be None for a model of another optimizer, so it is not an error here.
            parameter = mask.held
            if parameter is not None and mask.module is pruned and id(parameter) in owned:
                mask.clear_(parameter)


@functools.cache
def _install() -> None:
    """Run `_mask_weights` after the steps of all optimizers; registered once in a process."""
    register_optimizer_step_post_hook(_mask_weights)
