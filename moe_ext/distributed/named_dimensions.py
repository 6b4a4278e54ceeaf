"""Layouts by names of dimensions, as Mesh-TensorFlow writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def layout_placements(layout: str, mesh: DeviceMesh, dims: str) -> list[Placement]:
    """Placements of a tensor, for torch's `distribute_tensor`.

    Args:
        layout: dimensions and the axes of the mesh that divide them, for all tensors of a model:
            `"batch:dp;experts:ep;hidden:tp"`.
        mesh: with names of its axes.
        dims: names of the tensor's dimensions with spaces between; those that the layout does not
            name are whole on every rank.

    Raises:
        ValueError: the layout is not written as above, names an axis that the mesh lacks or a
            dimension twice, or divides two dimensions of the tensor by one axis.

    Reference: Shazeer et al., Mesh-TensorFlow (2018), section 3.2.
    """
    from torch.distributed.tensor import Replicate, Shard

    owner, axes = "layout_placements", mesh.mesh_dim_names or ()
    axis_of: dict[str, int] = {}
    for rule in layout.split(";"):
        name, _, named = rule.strip().partition(":")
        if named not in axes or name in axis_of:
            raise ValueError(
                f"{owner}: expected layout to be `dimension:axis` of different dimensions with ; "
                f"between and axes of {tuple(axes)}, got {layout!r}"
            )
        axis_of[name] = axes.index(named)
    placements: list[Placement] = [Replicate()] * len(axes)
    for dim, name in enumerate(dims.split()):
        if name not in axis_of:
            continue
        axis = axis_of[name]
        if not placements[axis].is_replicate():
            raise ValueError(
                f"{owner}: expected axis {axes[axis]} to divide one dimension of {dims!r}, got "
                f"layout {layout!r}"
            )
        placements[axis] = Shard(dim)
    return placements
