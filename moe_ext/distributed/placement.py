"""Placement: which part of each parameter this rank holds, and which ranks hold the other parts.

A module whose parameters differ between the ranks of a group declares that once, with
`declare_placement`. Its parameters become DTensors, so that torch's own tools see the whole
parameters. `placements(model)` returns what a DTensor does not tell: that a parameter belongs to
experts, to which ones, and how its gradients are averaged. Attribute and class names are never
interpreted. Declarations are kept by the module, and survive `deepcopy`, `to`, `to_empty` and new
parameters.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._compile import outside_graphs
from moe_ext.comm.failures import naming_failed_ranks
from moe_ext.comm.groups import GroupHandle, group_rank, group_ranks, group_size
from moe_ext.distributed.dtensor import (
    divided_as,
    dtensor_of,
    flattened,
    gathered,
    group_of_mesh,
    is_dtensor,
    is_part,
    keeps_wholes,
    local_part,
    mesh_of,
    own_part,
    part_in_graph,
    placed_as,
    refusing_files,
    shard_of,
    unflattened,
    with_local,
)
from moe_ext.distributed.replicas import (
    grid_of,
    group_of_shards,
    replica_group,
    shards_of_experts,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as TensorPlacement

    from moe_ext.distributed.fsdp_state import Divided

# Attribute of a module: mapping of parameter name, or "" for all parameters, to placement.
_DECLARED = "_moe_ext_placements"
# Attribute of a module during its forward pass: the DTensors that `_give_parts` has replaced.
_GIVEN = "_moe_ext_given_parts"

# Attribute of a divided parameter: its placement. A dictionary with weak keys could not replace the
# attribute, because `Module.to` does not swap a tensor that has weak references.
_PLACED = "_moe_ext_placement"
# Attribute of a divided parameter: its identity and storage when it was divided. Another storage
# means that a user has assigned `parameter.data`.
_OWN_STORAGE = "_moe_ext_own_storage"
# Attribute of a module: names of its own parameters that became DTensors.
_DIVIDED = "_moe_ext_divided"


@dataclass(frozen=True)
class Placement:
    """Part of a parameter that this rank holds, out of the whole that one process would hold.

    Args:
        axis: "ep" if experts are divided over the ranks, "tp" if columns of a layer are.
        group: ranks that together hold all parts; None if this rank holds everything.
        held: global indices, of experts or columns, of this rank's part.
        size: number of indices over all ranks.
        dim: dimension of the parameter that runs along the axis. Its length is a multiple of
            `len(held)`, and each index has an equal number of neighbouring rows. None if no
            dimension runs along the axis; how the parameter belongs to the experts is then unknown.
        blocks: number of equal pieces of that dimension, each of which is divided by itself. For
            example 2, if the dimension holds all gates followed by all ups.
        one_expert: the module is a single expert, in a container that numbers the experts of this
            rank only. In the whole model its name has the global index.
        grad_reduction: whether gradients belong to the "mean" or the "sum" of the losses of the
            group's ranks.
    """

    axis: Literal["ep", "tp"]
    group: ProcessGroup | None
    held: range
    size: int
    dim: int | None = 0
    blocks: int = 1
    one_expert: bool = False
    grad_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        shards = shards_of_experts(self.group) if self.axis == "ep" else 1
        if shards > 1 and not isinstance(self, ExpertShards):
            raise ValueError(
                "Placement: expected an ep_group of a MoEMesh with etp=1 for experts that are not "
                f"GroupedExperts, got etp={shards}"
            )

    @classmethod
    def of_experts(
        cls, num_experts: int, group: ProcessGroup | None, *, dim: int | None = 0
    ) -> Placement:
        """Return the placement of stacked experts: rank r of P holds [r*E/P, (r+1)*E/P)."""
        num_local = num_experts // group_size(group)
        first = group_rank(group) * num_local
        return cls("ep", group, range(first, first + num_local), num_experts, dim)

    @property
    def num_parts(self) -> int:
        """Number of ranks over which the parameter is divided."""
        return group_size(self.group)

    @property
    def part(self) -> int:
        """Index of the part that this rank holds."""
        return group_rank(self.group)

    def logical_shape(self, local: Iterable[int]) -> torch.Size:
        """Return the shape of the whole parameter, from the shape of this rank's part."""
        shape = list(local)
        if self.dim is not None:
            shape[self.dim] = shape[self.dim] // len(self.held) * self.size
        return torch.Size(shape)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of the group, with dimension "ep" or "tp"."""
        assert self.group is not None
        return mesh_of(self.group, device, (self.axis,))

    def along(self) -> list[TensorPlacement]:
        """Return the DTensor placements of the parameter on the dimensions of the mesh."""
        return [shard_of(self.dim or 0, self.blocks)]

    def holds(self, parameter: Tensor) -> bool:
        """Return True if a parameter has this placement. FSDP2 may divide it further."""
        if self.num_parts == 1 or not is_dtensor(parameter):
            return self.num_parts == 1
        return self.is_managed(parameter) or list(parameter.placements) == self.along()

    def is_managed(self, parameter: Tensor) -> bool:
        """Return True if FSDP2 divides this rank's part further, over ranks with copies of it."""
        return is_dtensor(parameter) and parameter.device_mesh.ndim > len(self.along())

    def whole(self, local: Tensor) -> Tensor:
        """Return the DTensor whose part on this rank is `local`. Shares its memory; sends nothing.

        If no dimension runs along the axis, the parts are joined along dimension 0. A tensor that
        every rank holds whole is returned unchanged.
        """
        if self.num_parts == 1 or is_dtensor(local):
            return local
        if local.dim() == 0:
            raise ValueError(
                "Placement: expected parameters of experts over ranks to have a dimension, got a "
                "number of shape ()"
            )
        shape = list(self.logical_shape(local.shape))
        if self.dim is None:
            shape[0] *= self.num_parts
        return dtensor_of(local, self.mesh(local.device), self.along(), torch.Size(shape))

    @property
    def pieces(self) -> tuple[int, int]:
        """Dimension that `shown` splits, and the number of its pieces."""
        return (0, self.num_parts) if self.dim is None else (self.dim, self.blocks)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a plain whole tensor."""
        if self.dim is None or self.num_parts == 1:
            return whole
        pieces = whole.unflatten(self.dim, (self.blocks, -1))
        rows = pieces.shape[self.dim + 1] // self.size
        part = pieces.narrow(self.dim + 1, self.held.start * rows, len(self.held) * rows)
        return part.flatten(self.dim, self.dim + 1)

    def shown(self, value: Tensor) -> Tensor:
        """Return the DTensor that represents a divided tensor in `state_dict()`.

        `torch.distributed.checkpoint` can write only plain shards of a dimension. If a dimension
        has several pieces, or no dimension runs along the axis, the pieces become a dimension.
        """
        if self.dim is None and self.num_parts == 1:
            return value
        if self.dim is None and not is_dtensor(value):
            return self._stack.whole(value[None])
        value = self.whole(value)
        dim, pieces = self.pieces
        if pieces == 1:
            return value
        if not is_dtensor(value):
            return value.unflatten(dim, (pieces, -1))
        return unflattened(value, dim, pieces, stacked=self.dim is None)

    def of_expert(self, value: Tensor) -> Tensor:
        """Return the tensor of this rank's expert alone, if each expert is a module.

        The result is a DTensor if FSDP2 divides it further.

        Args:
            value: the parameter, or the result of `shown`.
        """
        if not is_dtensor(value):
            return value
        along, local = list(value.placements[:-1]), value.to_local()
        shape = list(value.shape)
        shape[0] //= self.num_parts
        if not along:
            return local
        mesh = value.device_mesh
        names = mesh.mesh_dim_names
        assert names is not None
        plain = [p if p.is_replicate() else shard_of(getattr(p, "dim", 0), 1) for p in along]
        return dtensor_of(local, mesh[names[:-1]], plain, torch.Size(shape))

    def taken(self, value: Tensor, like: Tensor) -> Tensor:
        """Return a loaded tensor in the layout of the parameter `like`, for `load_state_dict`.

        Args:
            value: result of `shown`; or a plain tensor of the shape of that result, of the logical
                shape, or of this rank's expert if each expert is a module.
            like: the parameter, or a plain buffer.
        """
        if value.shape == (0,) != like.shape:
            raise ValueError(
                "load_state_dict: expected tensors, got the empty ones that whole_state_dicts "
                "gives to ranks that do not keep the whole; load what rank 0 has written"
            )
        if self.num_parts > 1 and not is_dtensor(like):
            if self.dim is not None:
                return local_part(self.taken(value, self.whole(like)))
            is_stack = value.shape == (self.num_parts, *like.shape)
            return local_part(self._stack.taken(value, self.shown(like)))[0] if is_stack else value
        if value.dim() == like.dim() + 1:
            value = flattened(value, self.pieces[0], like)
        if not is_dtensor(like):
            return value
        if is_dtensor(value):
            if value.shape == like.shape:
                return placed_as(own_part(value), like)
            # Without a dimension along the axis, the value is a result of `of_expert`.
            return with_local(like, local_part(value)) if self.dim is None else value
        if value.shape == like.shape:
            return divided_as(value, like)
        # A plain part of stacked experts comes from a file of one rank. It is returned as it is,
        # and torch then refuses its shape.
        is_own = self.dim is None and value.shape == local_part(like).shape
        return with_local(like, value) if is_own else value

    @property
    def _stack(self) -> Placement:
        """Placement of the stack of all ranks' parts, along a new dimension 0."""
        held = range(self.part, self.part + 1)
        return dataclasses.replace(self, held=held, size=self.num_parts, dim=0, one_expert=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "group": GroupHandle(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, group=None)


@dataclass(frozen=True)
class ExpertShards(Placement):
    """Stacked experts of a mesh with etp: etp neighbouring ranks hold shards of the same experts.

    Args:
        cut: dimension of the parameter that etp divides.
        cut_blocks: number of equal pieces of that dimension, each of which is divided by itself.
    """

    cut: int = 1
    cut_blocks: int = 1

    @classmethod
    def of_stacked(
        cls, num_experts: int, group: ProcessGroup, *, cut: int, blocks: int
    ) -> ExpertShards:
        """Return the placement: rank r holds shard r % etp of expert set r // etp."""
        shards = shards_of_experts(group)
        num_local = num_experts * shards // group_size(group)
        first = group_rank(group) // shards * num_local
        held = range(first, first + num_local)
        return cls("ep", group, held, num_experts, cut=cut, cut_blocks=blocks)

    @staticmethod
    def of_ffn(
        num_experts: int,
        group: ProcessGroup | None,
        *,
        is_down: bool,
        transposed: bool,
        pairs: bool,
    ) -> Placement:
        """Return the placement of matrices of stacked experts that etp divides along F.

        Args:
            num_experts: E, number of experts of a layer.
            group: ranks that share the experts.
            is_down: the matrix is `[L, D, F]`; if False, `[L, F, D]`.
            transposed: the last two dimensions are exchanged.
            pairs: the matrix holds gates followed by ups, each of which is divided by itself.
        """
        if group is None or shards_of_experts(group) == 1:
            return Placement.of_experts(num_experts, group)
        cut, blocks = 2 if is_down != transposed else 1, 2 if pairs and not is_down else 1
        return ExpertShards.of_stacked(num_experts, group, cut=cut, blocks=blocks)

    @property
    def _shards(self) -> ProcessGroup:
        """Ranks with shards of the same experts."""
        assert self.group is not None
        return group_of_shards(self.group)

    def logical_shape(self, local: Iterable[int]) -> torch.Size:
        """See `Placement`."""
        shape = list(super().logical_shape(local))
        shape[self.cut] *= self._shards.size()
        return torch.Size(shape)

    def shard(self, experts: Tensor) -> Tensor:
        """Return this rank's etp shard of whole experts."""
        pieces = experts.unflatten(self.cut, (self.cut_blocks, self._shards.size(), -1))
        own = pieces.select(self.cut + 1, group_rank(self._shards))
        return own.flatten(self.cut, self.cut + 1)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """See `Placement`: dimensions "ep" and "etp"."""
        assert self.group is not None
        return mesh_of(self.group, device, ("ep", "etp"))

    def along(self) -> list[TensorPlacement]:
        """See `Placement`."""
        return [shard_of(0, 1), shard_of(self.cut, self.cut_blocks)]

    @property
    def pieces(self) -> tuple[int, int]:
        """See `Placement`."""
        return self.cut, self.cut_blocks

    def part_of(self, whole: Tensor) -> Tensor:
        """See `Placement`."""
        return self.shard(whole.narrow(0, self.held.start, len(self.held)))


def plain(place: Placement, value: Tensor, num_dims: int | None = None) -> Tensor:
    """Gather a DTensor into a plain tensor; a collective.

    Args:
        place: placement of the parameter.
        value: the parameter, or the result of `shown`.
        num_dims: number of dimensions of the parameter, to undo `shown`; None keeps the form.
    """
    if not is_dtensor(value):
        return value
    with naming_failed_ranks(place.group, "state_dict"):
        found = gathered(value)
    dim = place.pieces[0]
    return found if num_dims is None or num_dims == found.dim() else found.flatten(dim, dim + 1)


def kept(place: Placement, value: Tensor) -> Tensor:
    """Return the tensor that replaces a DTensor in state dicts inside `whole_state_dicts`."""
    found = plain(place, value)
    return found.to("cpu").contiguous() if keeps_wholes() else torch.empty(0, dtype=found.dtype)


def declare_placement(
    module: nn.Module, placement: Placement, names: Iterable[str] | None = None
) -> None:
    """Declare which part of its parameters a module holds on this rank.

    For nested modules, the declaration of the innermost applies. A later call for the same names
    replaces an earlier one.

    Args:
        module: module that holds the parameters.
        placement: placement of each of the parameters.
        names: names of the module's parameters and buffers that have this placement. None means
            all without a declaration of their own, including parameters that are added later.
    """
    # The dictionary is copied, because shallow copies of the module share the old one.
    declared = dict(vars(module).get(_DECLARED, {}))
    has_hooks = _check_wrapping in module._forward_pre_hooks.values()
    declared.update(dict.fromkeys([""] if names is None else names, placement))
    if placement.num_parts > 1 and not has_hooks:
        module.register_state_dict_post_hook(_show_wholes)
        module.register_load_state_dict_pre_hook(_take_parts)
        module.register_forward_pre_hook(_check_wrapping)
        # Submodules get the hooks as well, because a recomputation under activation checkpointing
        # calls them after the forward pass of the module.
        for owner in () if getattr(module, "takes_dtensors", False) else module.modules():
            owner.register_forward_pre_hook(_give_parts)
            owner.register_forward_hook(_take_back, always_call=True)
    setattr(module, _DECLARED, declared)
    _distribute(module)
    # The call notes placements on the parameters, for optimizers, which see no modules.
    sharded_parameters(module)


def successor(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """Return a parameter of another tensor, with the attributes of the parameter it replaces."""
    found = nn.Parameter(tensor, parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


def _distribute(module: nn.Module) -> None:
    """Replace the declared parameters of a module with DTensors."""
    places = dict(placed_parameters(module).values())
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            place = places.get(parameter)  # type: ignore[arg-type]
            if parameter is None or place is None:
                continue
            if place.num_parts > 1:
                # The set is not changed in place, because copies of the module share it.
                divided = vars(owner).get(_DIVIDED, frozenset()) | {name}
                object.__setattr__(owner, _DIVIDED, divided)
            if place.holds(parameter):
                continue
            if parameter not in made:
                made[parameter] = successor(parameter, place.whole(local_part(parameter.detach())))
            owner._parameters[name] = made[parameter]


def _give_parts(module: nn.Module, _inputs: object) -> None:
    """Replace the DTensors of a module with this rank's parts for one forward pass.

    Modules of other libraries compute with plain tensors only.
    """
    given = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and is_part(parameter):
                given.append((owner, name, parameter))
    for owner, name, parameter in given:
        owner._parameters[name] = local_part(parameter)  # type: ignore[assignment]
    vars(module).setdefault(_GIVEN, []).append(given)


def _take_back(module: nn.Module, _inputs: object, _output: object) -> None:
    for owner, name, parameter in vars(module)[_GIVEN].pop():
        owner._parameters[name] = parameter


def _show_wholes(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: dict[str, Any]
) -> None:
    """State dict hook: put DTensors into the state dict, for `torch.distributed.checkpoint`.

    Inside `whole_state_dicts` put whole tensors instead.
    """
    for name, (own, placement) in _shown_tensors(module).items():
        value = state_dict.get(prefix + name)
        # With keep_vars=True the state dict holds the parameters themselves.
        if not isinstance(value, Tensor) or value is own or value.shape != own.shape:
            continue
        if placement.one_expert and placement is not placement_of(module):
            continue  # the hook of the expert's own module has done it
        if keeps_wholes() is None:
            shown, has_pieces = placement.shown(value), placement.pieces[1] > 1
            state_dict[prefix + name] = refusing_files(shown, has_pieces=has_pieces)
        elif placement.dim is not None:
            state_dict[prefix + name] = kept(placement, placement.whole(value))
        else:
            check_known(prefix + name, placement, "state_dict")
            whole = kept(placement, placement.shown(value))
            paths = _names_on_ranks(placement, prefix[:-1])
            for index, path in enumerate(paths):
                # The slices are copied, because some file formats refuse tensors that share memory.
                state_dict[f"{path}.{name}"] = whole[index].clone() if len(whole) else whole


def check_known(name: str, placement: Placement, operation: str) -> None:
    """Raise ValueError if it is unknown how a tensor of experts is part of a whole tensor."""
    if placement.num_parts > 1 and placement.dim is None and not placement.one_expert:
        raise ValueError(
            f"{operation}: expected {name} to be stacked over the experts of this rank, or "
            "declared with moe_ext.distributed.declare_placement (as "
            "Placement.of_experts(num_experts, None, dim=None) where all ranks hold the same)"
        )


def _take_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_arguments: object
) -> None:
    """Load hook: convert DTensors and plain whole tensors to the layout of the parameters."""
    for name, (own, placement) in _shown_tensors(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            state_dict[prefix + name] = placement.taken(value, own)


def _shown_tensors(module: nn.Module) -> dict[str, tuple[Tensor, Placement]]:
    return {**sharded_parameters(module), **sharded_buffers(module)}


def own_part_of(module: nn.Module, name: str, parameter: Tensor, runtime: Any = None) -> Tensor:
    """Return this rank's part of a parameter for a forward pass; ValueError as in `_check_part`.

    `runtime` is passed to `part_in_graph`.
    """
    if not is_dtensor(parameter):
        _check_part(module, name, parameter)
        return parameter
    # The test of `_was_assigned` is repeated inline here, since this runs in every pass.
    own = id(parameter), parameter.untyped_storage()._cdata
    if getattr(parameter, _OWN_STORAGE, None) != own:
        _check_part(module, name, parameter)
    return part_in_graph(parameter, runtime)


def _check_part(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Raise ValueError if a tool has replaced a DTensor parameter, or assigned its `data`."""
    # A plain `Tensor`, as opposed to a `Parameter`, was put there for this pass by
    # `functional_call` or by a module around this one.
    if type(parameter) is nn.Parameter:
        if name in module.__dict__.get(_DIVIDED, ()):
            raise ValueError(
                f"forward: expected {name} to be a DTensor, since ranks hold experts between them, "
                "got a plain tensor, which a tool has put in its place; for torch's replicate call "
                "moe_ext.parallelize(model) and give it ignored_modules=[layer.experts, ...]"
            )
    # Assigning `data` of a DTensor does not change its local tensor, with which operators compute.
    elif _was_assigned(parameter):
        raise ValueError(
            f"forward: expected the values of {name}, a DTensor, to be changed in place, got a "
            "tensor assigned to its `data` (as torch.nn.utils.vector_to_parameters does), "
            "which changes nothing; take load_state_dict, or copy_ of a DTensor"
        )


@outside_graphs
def _check_wrapping(module: nn.Module, _inputs: object) -> None:
    """Raise ValueError if a tool or FSDP2 has wrapped the module in a way that is not served."""
    for owner in module.modules() if module._modules else (module,):
        for name, parameter in owner._parameters.items():
            # A plain `Tensor` was put there for this pass.
            if parameter is not None and type(parameter) is not Tensor:
                _check_part(owner, name, parameter)
    if "torch.distributed.fsdp" in sys.modules:
        # The import is local because FSDP takes a second to import.
        from moe_ext.distributed.fsdp_state import check_wrapping

        check_wrapping(module, _divided)


def _divided(model: nn.Module) -> Divided:
    """Return the divided parameters, and a function from name to sets of ranks for its mesh.

    The mesh of FSDP2 must contain each of these sets, since gradients are averaged over them.
    """
    divided = {name: place for name, place in placements(model).items() if place.num_parts > 1}
    groups = {place.group for place in divided.values() if place.group is not None}
    sharers = [set(group_ranks(group)) for group in groups]

    def ranks(name: str) -> list[set[int]]:
        # For a divided parameter, its own mesh covers the ranks of its group. FSDP2's mesh must
        # cover all ranks of the grid.
        group = divided[name].group if name in divided else None
        return sharers if group is None else [{rank for row in grid_of(group) for rank in row}]

    return divided, ranks


def declare_experts(module: nn.Module, num_experts: int, group: ProcessGroup | None) -> None:
    """Declare the placement of stacked experts `[E/P, ...]` for a module without a declaration.

    If the first dimension of a parameter is not E/P, how it belongs to the experts is unknown.

    Args:
        module: the experts of this rank.
        num_experts: E, number of experts over all ranks.
        group: ranks that share the experts; None if this rank holds all.
    """
    if placement_of(module) is not None:
        return
    stacked = Placement.of_experts(num_experts, group)
    named = module.named_parameters(remove_duplicate=False)
    fitting = [n for n, p in named if p.dim() and p.shape[0] == len(stacked.held)]
    declare_placement(module, stacked, fitting)
    declare_placement(module, dataclasses.replace(stacked, dim=None))


def placement_of(module: nn.Module) -> Placement | None:
    """Return the placement that a module declares for all of its parameters, or None."""
    return vars(module).get(_DECLARED, {}).get("")


def holds_experts(module: nn.Module) -> bool:
    """Return True if a module declares that its parameters belong to experts."""
    placement = placement_of(module)
    return placement is not None and placement.axis == "ep"


def placements(model: nn.Module) -> dict[str, Placement]:
    """Return name to placement, for the parameters with a declared placement.

    Args:
        model: any module.

    Returns:
        In the order of `model.named_parameters()`. Every rank holds the other parameters whole.
    """
    return {name: placement for name, (_, placement) in placed_parameters(model).items()}


def placed_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, Placement]]:
    """Return name to (parameter, placement), see `placements`."""
    found: dict[nn.Parameter, Placement] = {}
    # Children come after their parents, so the innermost declaration overwrites the others.
    for module in model.modules():
        declared = vars(module).get(_DECLARED)
        if not declared:
            continue
        for name, parameter in module.named_parameters():
            placement = declared.get(name, declared.get(""))
            if placement is not None:
                found[parameter] = placement
    # Parameters are matched by identity, because torch's `checkpoint_wrapper` leaves its own path
    # out of the names of its parameters.
    return {name: (p, found[p]) for name, p in model.named_parameters() if p in found}


def _names_on_ranks(place: Placement, path: str) -> list[str]:
    """Return the global name of the expert module at this path, for each rank."""
    parent, dot, _ = path.rpartition(".")
    num_local = place.size // place.num_parts
    first = place.held.start - place.part * num_local
    return [f"{parent}{dot}{first + part * num_local}" for part in range(place.num_parts)]


def logical_names(model: nn.Module) -> dict[str, str]:
    """Return parameter names with local expert numbers, to names with global expert numbers.

    Only for experts that are modules of their own, see `Placement.one_expert`.
    """
    return {name: found[part] for name, (found, part) in logical_names_by_rank(model).items()}


def logical_names_by_rank(model: nn.Module) -> dict[str, tuple[list[str], int]]:
    """Return local names, to the global names on all ranks and the index of this rank's name."""
    names: dict[str, tuple[list[str], int]] = {}
    for path, module in model.named_modules():
        place = placement_of(module)
        if place is None or not place.one_expert or not path:
            continue
        wholes = _names_on_ranks(place, path)
        for name, _ in [*module.named_parameters(), *module.named_buffers()]:
            names[f"{path}.{name}"] = ([f"{whole}.{name}" for whole in wholes], place.part)
    return names


def sharded_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, Placement]]:
    """Return name to (parameter, placement), for parameters that are divided over several ranks.

    The placement is also noted on the parameter, for `known_shard`.
    """
    placed = placed_parameters(model)
    found = {name: pair for name, pair in placed.items() if pair[1].num_parts > 1}
    for parameter, placement in found.values():
        setattr(parameter, _PLACED, placement)
        _was_assigned(parameter)
    return found


def sharded_buffers(model: nn.Module) -> dict[str, tuple[Tensor, Placement]]:
    """Return name to (buffer, placement), for buffers of experts over several ranks.

    A buffer whose first dimension is the number of stacked experts is divided as they are. For
    other buffers the placement is unknown, unless their names were declared.
    """
    found: dict[str, tuple[Tensor, Placement]] = {}
    for path, module in model.named_modules():
        declared = vars(module).get(_DECLARED, {})
        for name, buffer in module.named_buffers(path) if declared else ():
            own = name[len(path) + 1 :] if path else name
            placement = declared.get(own, declared.get(""))
            found.pop(name, None)
            if placement is None or placement.num_parts == 1:
                continue
            is_stacked = buffer.dim() > 0 and buffer.shape[0] == len(placement.held)
            if own not in declared and not is_stacked and not placement.one_expert:
                placement = dataclasses.replace(placement, dim=None)
            found[name] = (buffer, placement)
    return found


def _was_assigned(parameter: Tensor) -> bool:
    """Return True if a user has assigned `data` of a DTensor since it was seen first.

    The storage of a DTensor itself has no memory; that of an assigned tensor may have. Returns
    False for other tensors.
    """
    noted = getattr(parameter, _OWN_STORAGE, None)
    if noted is None and not is_dtensor(parameter):
        return False
    own = id(parameter), parameter.untyped_storage()._cdata
    if noted == own:
        return False
    if noted is not None and noted[0] == own[0]:
        return True
    # A copy of a parameter has the attribute of the original, whose identity differs.
    setattr(parameter, _OWN_STORAGE, own)
    return bool(parameter.data_ptr())


def known_shard(parameter: Tensor) -> Placement | None:
    """Return the placement of a divided parameter without its model, or None.

    `Module.to` may have dropped the noted placement. It is then derived from the DTensor.
    """
    found: Placement | None = getattr(parameter, _PLACED, None)
    if found is not None or not is_dtensor(parameter):
        return found
    group = group_of_mesh(parameter.device_mesh)
    if group is None:
        return None
    along, ranks = parameter.placements[-1], group_size(group)
    dim, blocks = getattr(along, "dim", 0), getattr(along, "split_factor", 1)
    if parameter.device_mesh.ndim == 2:
        return ExpertShards.of_stacked(parameter.shape[0], group, cut=dim, blocks=blocks)
    size = parameter.shape[dim] // blocks
    first = group_rank(group) * size // ranks
    axis: Any = (parameter.device_mesh.mesh_dim_names or ("ep",))[0]
    return Placement(axis, group, range(first, first + size // ranks), size, dim, blocks)


def is_expert_shard(parameter: Tensor) -> bool:
    """Return True if this is an etp shard, so that other ranks hold shards of the same experts."""
    return isinstance(known_shard(parameter), ExpertShards)


def sharded_tensors(model: nn.Module) -> list[str]:
    """Return all names of the parameters and buffers that are divided over ranks."""
    shards = {id(tensor) for tensor, _ in _shown_tensors(model).values()}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [name for name, tensor in named if id(tensor) in shards]


def replicated_groups(
    sharded: Iterable[tuple[nn.Parameter, Placement]], device: torch.device
) -> list[tuple[ProcessGroup | None, list[nn.Parameter]]]:
    """Return divided parameters by the group of ranks with the same part; None for a single rank.

    May make groups: all ranks of the job make the call together, see `replica_group`.
    """
    by_group: dict[ProcessGroup, list[nn.Parameter]] = {}
    for parameter, placement in sharded:
        assert placement.group is not None
        by_group.setdefault(placement.group, []).append(parameter)
    return [(replica_group(group, device), found) for group, found in by_group.items()]


def expert_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, ProcessGroup | None, int]]:
    """Yield the parameters of all experts of a model.

    The experts of every `MoELayer`, and of a model passed to `replace`, are found by their
    declarations, see `declare_placement`.

    Args:
        model: any module.

    Yields:
        Name in the model, parameter (of this rank's experts), expert-parallel group (None if all
        experts are on this rank), number of experts over all ranks.
    """
    for name, (parameter, placement) in placed_parameters(model).items():
        if placement.axis == "ep":
            yield name, parameter, placement.group, placement.size


def expert_param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: one of dense parameters, one of experts.

    Args:
        model: any module.

    Returns:
        `[{"params": [...], "name": "dense"}, {"params": [...], "name": "experts"}]`, without frozen
        parameters and without a group that would be empty.
    """
    experts = {id(parameter) for _, parameter, _, _ in expert_parameters(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in experts], "name": "dense"},
        {"params": [p for p in trained if id(p) in experts], "name": "experts"},
    ]
    return [group for group in groups if group["params"]]
