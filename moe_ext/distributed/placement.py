"""Placement: the part of each parameter that this rank holds, and the ranks of the others.

A module whose parameters differ between the ranks of a group says so once, with
`declare_placement`, which makes DTensors of them: torch's own tools then know the whole. What a
DTensor does not tell (which experts, that they are experts, what a mean of gradients is over) is
asked of `placements(model)`. Nothing is read off attribute or class names. Declarations stay with
the module: they survive `deepcopy`, `to`, `to_empty` and new parameters.
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
    groups_of_shards,
    replica_group,
    shards_of_experts,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as TensorPlacement

    from moe_ext.distributed.fsdp_state import Divided

# Attribute of a module: parameter name, or "" for all, to placement.
_DECLARED = "_moe_ext_placements"
# Attribute of a module whose forward pass runs: parameters that it holds as parts meanwhile.
_GIVEN = "_moe_ext_given_parts"

# Attribute of a parameter that is divided over ranks: its placement. (A weak dictionary would keep
# `Module.to` from putting another tensor in its place.)
_PLACED = "_moe_ext_placement"
# And what tells that its `data` was assigned.
_OWN_STORAGE = "_moe_ext_own_storage"
# Attribute of a module: names of its own parameters that became DTensors.
_DIVIDED = "_moe_ext_divided"


@dataclass(frozen=True)
class Placement:
    """Part of a parameter that this rank holds, out of the whole that one process would hold.

    Args:
        axis: what is divided over the ranks: "ep" the experts, "tp" the columns of a layer.
        group: ranks that hold the parts between them; None where this rank holds all.
        held: global indices along the axis (experts, columns) of this rank's part.
        size: indices along the axis, over all ranks.
        dim: dimension of the parameter that runs along the axis; its length is a multiple of
            `len(held)`, each index taking as many neighbouring rows. None: no dimension does, and
            the parameter is of the held experts in a way of its own.
        blocks: pieces of that dimension that are divided each by itself: 2 where the gates and the
            ups of a layer lie one above the other.
        one_expert: the declaring module is a single expert, in a container that counts the experts
            of this rank only; its name in the whole model has the global index.
        grad_reduction: gradients are those of the "mean" or the "sum" over the group of the ranks'
            losses.
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
        """Stacked experts: rank r of P holds experts [r*E/P, (r+1)*E/P)."""
        num_local = num_experts // group_size(group)
        first = group_rank(group) * num_local
        return cls("ep", group, range(first, first + num_local), num_experts, dim)

    @property
    def num_parts(self) -> int:
        """Ranks that the parameter is divided over."""
        return group_size(self.group)

    @property
    def part(self) -> int:
        """Index of the part that this rank holds."""
        return group_rank(self.group)

    def logical_shape(self, local: Iterable[int]) -> torch.Size:
        """Shape of the whole parameter, from that of this rank's part."""
        shape = list(local)
        if self.dim is not None:
            shape[self.dim] = shape[self.dim] // len(self.held) * self.size
        return torch.Size(shape)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh of the group, with dimension "ep" or "tp"."""
        assert self.group is not None
        return mesh_of(self.group, device, (self.axis,))

    def along(self) -> list[TensorPlacement]:
        """Placements of the parameter on the dimensions of the mesh."""
        return [shard_of(self.dim or 0, self.blocks)]

    def holds(self, parameter: Tensor) -> bool:
        """True for a parameter that is divided so, by FSDP2 further or not."""
        if self.num_parts == 1 or not is_dtensor(parameter):
            return self.num_parts == 1
        return self.is_managed(parameter) or list(parameter.placements) == self.along()

    def is_managed(self, parameter: Tensor) -> bool:
        """True for a parameter whose copies of this rank's part FSDP2 divides further."""
        return is_dtensor(parameter) and parameter.device_mesh.ndim > len(self.along())

    def whole(self, local: Tensor) -> Tensor:
        """The DTensor of which this rank holds `local`, and shares memory with it.

        Of a parameter that has no dimension for the parts, theirs lie one after the other. Nothing
        is sent. A tensor that is held whole comes back as it is.
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
        """Dimension and number of what `shown` makes a dimension."""
        return (0, self.num_parts) if self.dim is None else (self.dim, self.blocks)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a plain tensor as one process holds it."""
        if self.dim is None or self.num_parts == 1:
            return whole
        pieces = whole.unflatten(self.dim, (self.blocks, -1))
        rows = pieces.shape[self.dim + 1] // self.size
        part = pieces.narrow(self.dim + 1, self.held.start * rows, len(self.held) * rows)
        return part.flatten(self.dim, self.dim + 1)

    def shown(self, value: Tensor) -> Tensor:
        """The DTensor that stands for a divided tensor in `state_dict()`.

        It is the tensor itself, where `torch.distributed.checkpoint` can write it; pieces that are
        divided each by itself, and parts of which no dimension is divided, are a dimension.
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
        """The tensor of this rank's expert alone, where each expert is a module.

        A DTensor where FSDP2 divides it further.

        Args:
            value: the parameter, or as `shown` makes it.
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
        """The tensor for `load_state_dict`, divided as the parameter `like`.

        Args:
            value: as `shown` makes it, a plain tensor of that or of the logical shape, or of this
                rank's expert, where each is a module.
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
            # The value is that of this rank's expert alone, see `of_expert`.
            return with_local(like, local_part(value)) if self.dim is None else value
        if value.shape == like.shape:
            return divided_as(value, like)
        # Parts of stacked experts are refused by torch: a file of one rank would hold them.
        is_own = self.dim is None and value.shape == local_part(like).shape
        return with_local(like, value) if is_own else value

    @property
    def _stack(self) -> Placement:
        """Placement of the parts of all ranks in a dimension of their own, in front."""
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
    """Stacked experts of a mesh with etp: neighbours in the group hold shards of the same ones.

    Args:
        cut: dimension of the parameter that the shards divide.
        cut_blocks: pieces of that dimension that are divided each by itself.
    """

    cut: int = 1
    cut_blocks: int = 1

    @classmethod
    def of_stacked(
        cls, num_experts: int, group: ProcessGroup, *, cut: int, blocks: int
    ) -> ExpertShards:
        """Rank r holds shard r % etp of the experts of place r // etp."""
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
        """Matrices of stacked experts that shards divide by their width, the ffn dimension.

        Args:
            num_experts: E, experts of a layer.
            group: ranks that share them.
            is_down: `[L, D, F]`, else `[L, F, D]`.
            transposed: the other way round.
            pairs: gates and ups are one above the other, and divided each by itself.
        """
        if group is None or shards_of_experts(group) == 1:
            return Placement.of_experts(num_experts, group)
        cut, blocks = 2 if is_down != transposed else 1, 2 if pairs and not is_down else 1
        return ExpertShards.of_stacked(num_experts, group, cut=cut, blocks=blocks)

    @property
    def _groups(self) -> tuple[ProcessGroup, ProcessGroup]:
        assert self.group is not None
        return groups_of_shards(self.group)

    def logical_shape(self, local: Iterable[int]) -> torch.Size:
        """See `Placement`."""
        shape = list(super().logical_shape(local))
        shape[self.cut] *= group_size(self._groups[1])
        return torch.Size(shape)

    def shard(self, experts: Tensor) -> Tensor:
        """This rank's columns of whole experts."""
        pieces = experts.unflatten(self.cut, (self.cut_blocks, group_size(self._groups[1]), -1))
        return pieces.select(self.cut + 1, group_rank(self._groups[1])).flatten(
            self.cut, self.cut + 1
        )

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
    """A DTensor in one piece; a collective.

    Args:
        place: of the parameter.
        value: the parameter, or as `shown` makes it.
        num_dims: of the parameter, to undo `shown`; None keeps the form.
    """
    if not is_dtensor(value):
        return value
    with naming_failed_ranks(place.group, "state_dict"):
        found = gathered(value)
    dim = place.pieces[0]
    return found if num_dims is None or num_dims == found.dim() else found.flatten(dim, dim + 1)


def kept(place: Placement, value: Tensor) -> Tensor:
    """Tensor that a state dict holds inside `whole_state_dicts`, in the place of a DTensor."""
    found = plain(place, value)
    return found.to("cpu").contiguous() if keeps_wholes() else torch.empty(0, dtype=found.dtype)


def declare_placement(
    module: nn.Module, placement: Placement, names: Iterable[str] | None = None
) -> None:
    """Say which part of its parameters a module holds on this rank.

    Where modules inside one another declare, the innermost decides. A later call for the same names
    replaces an earlier one.

    Args:
        module: holds the parameters.
        placement: of each of them.
        names: parameters and buffers of the module that it is true of, by their names there; None
            is all of them, those added later too, except for names that were declared apart.
    """
    # A new dictionary: copies of the module share the old one.
    declared = dict(vars(module).get(_DECLARED, {}))
    has_hooks = _check_wrapping in module._forward_pre_hooks.values()
    declared.update(dict.fromkeys([""] if names is None else names, placement))
    if placement.num_parts > 1 and not has_hooks:
        module.register_state_dict_post_hook(_show_wholes)
        module.register_load_state_dict_pre_hook(_take_parts)
        module.register_forward_pre_hook(_check_wrapping)
        # Submodules too: a recomputation calls them when the forward pass of the module is over.
        for owner in () if getattr(module, "takes_dtensors", False) else module.modules():
            owner.register_forward_pre_hook(_give_parts)
            owner.register_forward_hook(_take_back, always_call=True)
    setattr(module, _DECLARED, declared)
    _distribute(module)
    # Optimizers ask for parameters alone.
    sharded_parameters(module)


def successor(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """A parameter of another tensor, with what is known of the one whose place it takes."""
    found = nn.Parameter(tensor, parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


def _distribute(module: nn.Module) -> None:
    """Put DTensors in the place of parameters that hold this rank's part."""
    places = {module.get_parameter(name): place for name, place in placements(module).items()}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            place = places.get(parameter)  # type: ignore[arg-type]
            if parameter is None or place is None:
                continue
            if place.num_parts > 1:
                # A new set: copies of the module share the old one.
                divided = vars(owner).get(_DIVIDED, frozenset()) | {name}
                object.__setattr__(owner, _DIVIDED, divided)
            if place.holds(parameter):
                continue
            if parameter not in made:
                made[parameter] = successor(parameter, place.whole(local_part(parameter.detach())))
            owner._parameters[name] = made[parameter]


def _give_parts(module: nn.Module, _inputs: object) -> None:
    """Give a module that knows nothing of DTensors this rank's parts, for one forward pass."""
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
    """Put DTensors of the whole into a state dict, for `torch.distributed.checkpoint`.

    Inside `whole_state_dicts` what they stand for.
    """
    for name, (own, placement) in _shown_tensors(module).items():
        value = state_dict.get(prefix + name)
        # With keep_vars=True the state dict holds the parameters themselves.
        if not isinstance(value, Tensor) or value is own or value.shape != own.shape:
            continue
        if placement.one_expert and placement is not placement_of(module):
            continue  # the expert has done it
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
                # Copies, since files with shared memory are not everybody's.
                state_dict[f"{path}.{name}"] = whole[index].clone() if len(whole) else whole


def check_known(name: str, placement: Placement, operation: str) -> None:
    """ValueError unless it is known how a parameter, or a buffer, of experts is part of a whole."""
    if placement.num_parts > 1 and placement.dim is None and not placement.one_expert:
        raise ValueError(
            f"{operation}: expected {name} to be stacked over the experts of this rank, or "
            "declared with moe_ext.distributed.declare_placement (as "
            "Placement.of_experts(num_experts, None, dim=None) where all ranks hold the same)"
        )


def _take_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_arguments: object
) -> None:
    """Take this rank's part out of DTensors, and out of plain tensors of the whole."""
    for name, (own, placement) in _shown_tensors(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            state_dict[prefix + name] = placement.taken(value, own)


def _shown_tensors(module: nn.Module) -> dict[str, tuple[Tensor, Placement]]:
    return {**sharded_parameters(module), **sharded_buffers(module)}


def own_part_of(module: nn.Module, name: str, parameter: Tensor, runtime: Any = None) -> Tensor:
    """This rank's part of a module's parameter, for a forward pass; ValueError as `_check_part`.

    With `runtime` as `part_in_graph`.
    """
    if not is_dtensor(parameter):
        _check_part(module, name, parameter)
        return parameter
    # In each pass: as `_was_assigned` found it.
    own = id(parameter), parameter.untyped_storage()._cdata
    if getattr(parameter, _OWN_STORAGE, None) != own:
        _check_part(module, name, parameter)
    return part_in_graph(parameter, runtime)


def _check_part(module: nn.Module, name: str, parameter: Tensor) -> None:
    """ValueError where a tool has replaced a DTensor, or assigned its `data`."""
    # Not what `functional_call`, or a module around this one, has given it for this pass.
    if type(parameter) is nn.Parameter:
        if name in module.__dict__.get(_DIVIDED, ()):
            raise ValueError(
                f"forward: expected {name} to be a DTensor, since ranks hold experts between them, "
                "got a plain tensor, which a tool has put in its place; for torch's replicate call "
                "moe_ext.parallelize(model) and give it ignored_modules=[layer.experts, ...]"
            )
    # An assigned tensor lies beside the part, where no operator looks.
    elif _was_assigned(parameter):
        raise ValueError(
            f"forward: expected the values of {name}, a DTensor, to be changed in place, got a "
            "tensor assigned to its `data` (as torch.nn.utils.vector_to_parameters does), "
            "which changes nothing; take load_state_dict, or copy_ of a DTensor"
        )


@outside_graphs
def _check_wrapping(module: nn.Module, _inputs: object) -> None:
    """Refuse a tool that took parts for wholes, and what FSDP2 was told."""
    for owner in module.modules() if module._modules else (module,):
        for name, parameter in owner._parameters.items():
            # Plain tensors have been given for this pass.
            if parameter is not None and type(parameter) is not Tensor:
                _check_part(owner, name, parameter)
    if "torch.distributed.fsdp" in sys.modules:
        # Not at the top: FSDP takes a second to import.
        from moe_ext.distributed.fsdp_state import check_wrapping

        check_wrapping(module, _divided)


def _divided(model: nn.Module) -> Divided:
    """Parameters that ranks hold between them, and the ranks whose gradients are averaged."""
    divided = {name: place for name, place in placements(model).items() if place.num_parts > 1}
    groups = {place.group for place in divided.values() if place.group is not None}
    sharers = [set(group_ranks(group)) for group in groups]

    def ranks(name: str) -> list[set[int]]:
        # Experts are DTensors, whose mesh has the ranks of their group already.
        group = divided[name].group if name in divided else None
        return sharers if group is None else [{rank for row in grid_of(group) for rank in row}]

    return divided, ranks


def declare_experts(module: nn.Module, num_experts: int, group: ProcessGroup | None) -> None:
    """Declare a module of experts that does not do so itself, as stacked ones `[E/P, ...]`.

    Parameters of another first dimension belong to this rank's experts in a way that is not known.

    Args:
        module: the experts of this rank.
        num_experts: E, over all ranks.
        group: ranks that share the experts; None keeps them on this rank.
    """
    if placement_of(module) is not None:
        return
    stacked = Placement.of_experts(num_experts, group)
    named = module.named_parameters(remove_duplicate=False)
    fitting = [n for n, p in named if p.dim() and p.shape[0] == len(stacked.held)]
    declare_placement(module, stacked, fitting)
    declare_placement(module, dataclasses.replace(stacked, dim=None))


def placement_of(module: nn.Module) -> Placement | None:
    """Placement that a module declared for all of its parameters; None if it declared none."""
    return vars(module).get(_DECLARED, {}).get("")


def holds_experts(module: nn.Module) -> bool:
    """True if a module declared itself that its parameters are those of experts."""
    placement = placement_of(module)
    return placement is not None and placement.axis == "ep"


def placements(model: nn.Module) -> dict[str, Placement]:
    """Name to placement, of the parameters that a module of the model declared.

    Args:
        model: any module.

    Returns:
        In the order of `model.named_parameters()`. A parameter that is not there is held whole, by
        every rank.
    """
    found: dict[nn.Parameter, Placement] = {}
    # Parents come before children: the innermost declaration stays.
    for module in model.modules():
        declared = vars(module).get(_DECLARED)
        if not declared:
            continue
        for name, parameter in module.named_parameters():
            placement = declared.get(name, declared.get(""))
            if placement is not None:
                found[parameter] = placement
    # Not by paths: torch's `checkpoint_wrapper` leaves itself out of the names of its parameters.
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def _names_on_ranks(place: Placement, path: str) -> list[str]:
    """Names of the experts that stand on each rank in the place of this one, a module."""
    parent, dot, _ = path.rpartition(".")
    num_local = place.size // place.num_parts
    first = place.held.start - place.part * num_local
    return [f"{parent}{dot}{first + part * num_local}" for part in range(place.num_parts)]


def logical_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters that count the experts of this rank, to those that count all.

    Only of experts that are modules each (see `Placement.one_expert`).
    """
    return {name: found[part] for name, (found, part) in logical_names_by_rank(model).items()}


def logical_names_by_rank(model: nn.Module) -> dict[str, tuple[list[str], int]]:
    """Names that count the experts of this rank, to those on every rank, and which one this is."""
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
    """Name to (parameter, placement) of those that are divided over more than one rank."""
    parameters = dict(model.named_parameters())
    found = {
        name: (parameters[name], placement)
        for name, placement in placements(model).items()
        if placement.num_parts > 1
    }
    for parameter, placement in found.values():
        # It is known by itself then, see `known_shard`.
        setattr(parameter, _PLACED, placement)
        _was_assigned(parameter)
    return found


def sharded_buffers(model: nn.Module) -> dict[str, tuple[Tensor, Placement]]:
    """Name to (buffer, placement), of those of experts that lie over several ranks.

    Next to stacked experts, those of their number are stacked like them. How others are part of the
    whole is not known, unless their names were declared.
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
    """True if the `data` of a DTensor is another tensor's than when it was seen first.

    A DTensor has a storage without memory. False for other tensors.
    """
    noted = getattr(parameter, _OWN_STORAGE, None)
    if noted is None and not is_dtensor(parameter):
        return False
    own = id(parameter), parameter.untyped_storage()._cdata
    if noted == own:
        return False
    if noted is not None and noted[0] == own[0]:
        return True
    setattr(parameter, _OWN_STORAGE, own)  # copies have the attribute of another one
    return bool(parameter.data_ptr())


def known_shard(parameter: Tensor) -> Placement | None:
    """Placement of a parameter by itself, if it is divided over ranks.

    It is read off the DTensor where no model was asked since `Module.to` has changed the parameter.
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
    """True if other ranks hold other shards of the same experts, in a mesh with etp."""
    return isinstance(known_shard(parameter), ExpertShards)


def sharded_tensors(model: nn.Module) -> list[str]:
    """Names, all of each, of parameters and buffers that differ between the ranks of a group."""
    shards = {id(tensor) for tensor, _ in _shown_tensors(model).values()}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [name for name, tensor in named if id(tensor) in shards]


def replicated_groups(
    sharded: Iterable[tuple[nn.Parameter, Placement]], device: torch.device
) -> list[tuple[ProcessGroup | None, list[nn.Parameter]]]:
    """Sharded parameters by the ranks that hold the same part, None where there are no others.

    All ranks of the job call it alike, see `replica_group`.
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

    They are the parameters of modules that declared them (see `declare_placement`): the experts of
    a `MoELayer`, whatever their class, and those of a model that `replace` was called for.

    Args:
        model: any module.

    Yields:
        Name in the model, parameter (this rank's experts), expert-parallel group (None when all
        experts are on this rank), number of experts over all ranks.
    """
    parameters = dict(model.named_parameters())
    for name, placement in placements(model).items():
        if placement.axis == "ep":
            yield name, parameters[name], placement.group, placement.size


def expert_param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: the dense part and the experts apart.

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
