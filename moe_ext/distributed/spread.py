"""Spreads experts that every rank holds: each rank keeps its part of them, as a DTensor.

`parallelize(model, mesh)` uses this for layers of this package, and `replace(model, ep_group=...)`
for experts of transformers.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_ranks
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.gradients import fingerprint
from moe_ext.distributed.placement import Placement, placements, successor

if TYPE_CHECKING:
    from moe_ext.distributed.mesh import MoEMesh

# Name in the model, parameter of all experts, and the placement that it will have.
Whole = tuple[str, nn.Parameter, Placement]


class SpreadsExperts:
    """Mixin of layers whose experts can be spread over ranks after construction."""

    def _placements_over(self, ep_group: ProcessGroup) -> dict[str, Placement]:
        """Return the placements that the expert parameters would have, by names in the layer.

        Raises:
            ValueError: the layer cannot be spread over these ranks.
        """
        raise NotImplementedError

    def _dispatcher_over(self, ep_group: ProcessGroup | None) -> Any:
        """Make the dispatcher for these ranks, which call this together."""
        raise NotImplementedError

    def _lie_over(self, ep_group: ProcessGroup, dispatcher: Any) -> None:
        """Set group and dispatcher, after the parameters were reduced to those of this rank."""
        raise NotImplementedError


def spread_layers(model: nn.Module, mesh: MoEMesh) -> None:
    """Spread all layers of a model that hold all experts. Either every rank does, or none does."""
    group, layers = mesh.ep_group, dict[str, SpreadsExperts]()
    assert group is not None

    def find() -> tuple[list[Whole], dict[str, object]]:
        wholes = list[Whole]()
        found = {n: m for n, m in model.named_modules() if isinstance(m, SpreadsExperts)}
        for path, layer in found.items():
            named = dict(layer.named_parameters())  # type: ignore[attr-defined]
            if not _is_spread(layer, group, path):  # type: ignore[arg-type]
                layers[path] = layer
                for name, place in layer._placements_over(group).items():
                    wholes.append((f"{path}.{name}".lstrip("."), named[name], place))
        _check_found(model, wholes, mesh)
        return wholes, {"the number of layers with experts": len(found)}

    with spreading("parallelize", model, mesh.stage_group, find):
        made = [layer._dispatcher_over(group) for layer in layers.values()]
    for layer, dispatcher in zip(layers.values(), made, strict=True):
        layer._lie_over(group, dispatcher)


def _is_spread(layer: nn.Module, group: ProcessGroup, path: str) -> bool:
    """Return True if a layer is already spread over this group. ValueError if over another."""
    groups = {p.group for p in placements(layer).values() if p.axis == "ep" and p.num_parts > 1}
    for other in groups:
        assert other is not None
        if group_ranks(other) != group_ranks(group):
            raise ValueError(
                "parallelize: expected layers to hold all experts, or those of mesh.ep_group, ranks"
                f" {list(group_ranks(group))}, got {path} over ranks {list(group_ranks(other))}"
            )
    return bool(groups)


def _check_found(model: nn.Module, wholes: list[Whole], mesh: MoEMesh) -> None:
    """Raise ValueError for experts outside the layers that can be spread."""
    known, places = {name for name, _, _ in wholes}, placements(model)
    left = [
        name
        for name, place in places.items()
        if place.axis == "ep" and place.num_parts == 1 and name not in known
        if place.dim is not None or place.one_expert
    ]
    # A pipeline stage may have no experts.
    if left or (not places and mesh.pp_size == 1):
        raise ValueError(
            "parallelize: expected experts to be those of a MoELayer (replace(model, ep_group="
            "mesh.ep_group) spreads those of transformers), got "
            f"{left[0] if left else 'a model without experts'}"
        )


@contextlib.contextmanager
def spreading(
    operation: str,
    model: nn.Module,
    group: ProcessGroup | None,
    find: Callable[[], tuple[list[Whole], dict[str, object]]],
) -> Iterator[None]:
    """Context that replaces whole parameters with this rank's parts, and undoes it after an error.

    Args:
        operation: name for messages.
        model: any module.
        group: ranks that compare the parameters which they spread.
        find: returns the parameters, and further facts that must be equal on all ranks.

    Raises:
        ValueError: on every rank, if a parameter cannot be divided or another object holds it, or
            if facts, names, shapes or values differ between ranks.
    """
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        with Agreement(operation, group) as agreement:
            facts, parts = _cut(operation, *find())
            before = _exchange(operation, model, parts)
            agreement.compare(facts)
        yield
    except BaseException:
        _put(before)
        raise


def _cut(
    operation: str, wholes: list[Whole], facts: dict[str, object]
) -> tuple[dict[str, object], dict[nn.Parameter, nn.Parameter]]:
    """Return all facts to compare, and a mapping from whole parameters to this rank's parts."""
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for name, whole, place in wholes:
        found = None
        if is_dtensor(whole):
            found = "be a plain tensor", "a DTensor"
        elif whole.grad is not None:
            found = "have no gradient", "one; call zero_grad first"
        elif whole._backward_hooks or whole._post_accumulate_grad_hooks:
            found = "have no hooks", f"some, which would not run any more; call {operation} first"
        if found is not None:
            raise ValueError(
                f"{operation}: expected {name} to {found[0]} when its experts are spread over "
                f"ranks, got {found[1]}"
            )
        parts[whole] = successor(whole, place.part_of(whole.detach()).clone())
    shapes = [(name, list(p.shape), p.dtype) for name, p, _ in wholes]
    facts = {**facts, "the parameters of experts": shapes}
    if not any(p.is_meta for p in parts):
        named = [(name, p) for name, p, _ in wholes]
        facts["the values of experts (seed every rank alike)"] = fingerprint(named)
    return facts, parts


def _exchange(
    operation: str, model: nn.Module, new: dict[nn.Parameter, nn.Parameter]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Replace parameters of a model by others. ValueError, with nothing replaced, if one is held.

    An optimizer that holds a replaced parameter would train a tensor that no module uses.

    Args:
        operation: name for messages.
        model: any module.
        new: whole parameter to its replacement; cleared, so that no reference remains.

    Returns:
        Module, name and parameter of each place, with which `_put` undoes the replacement.
    """
    found = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p in new]
    twins = {id(p): successor(p, p.data) for p in new}
    places = [(module, name, id(parameter)) for module, name, parameter in found]
    _put([(module, name, new[parameter]) for module, name, parameter in found])
    references = {id(parameter): weakref.ref(parameter) for parameter in new}
    new.clear()
    found.clear()
    if any(reference() is not None for reference in references.values()):
        gc.collect()
    held = {key: p for key, reference in references.items() if (p := reference()) is not None}
    before = [(module, name, held.get(key, twins[key])) for module, name, key in places]
    if held:
        _put(before)
        shape = list(next(iter(held.values())).shape)
        raise ValueError(
            f"{operation}: expected parameters of experts that nothing else holds when they are "
            f"spread over ranks, got {shape} in an optimizer, a wrapper such as "
            "DistributedDataParallel, the graph of an earlier forward pass, or a variable; make "
            f"optimizers and wrappers after {operation}, and delete the outputs of that pass"
        )
    return before


def _put(parameters: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, name, parameter in parameters:
        module._parameters[name] = parameter
