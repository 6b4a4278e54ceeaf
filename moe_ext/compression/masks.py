"""Masks of pruned parameters: a buffer beside each parameter, with one bit per element.

The buffer of a parameter `weight` is `weight_mask`, uint8 `[rows, bytes of a row]`. It is divided
over ranks as the parameter is, and saved and loaded with the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.distributed.dtensor import dtensor_of, is_dtensor, local_part
from moe_ext.distributed.placement import known_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# Attribute of a module: its masks by the name of the parameter. A copy of the module copies them.
_PRUNED = "_masks_of_parameters"

_T = TypeVar("_T")


def unpacked_bits(bitmap: Tensor, numel: int) -> Tensor:
    """Unpack a bitmap of `moe_ext.ops.pack_bits` into a bool for each element, `[numel]`."""
    places = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap[:, None] >> places) & 1).view(-1)[:numel].bool()


def count_bits(bitmap: Tensor) -> int:
    """Count the bits that are set. NOTE: device-to-host sync."""
    return int(unpacked_bits(bitmap, 8 * bitmap.numel()).sum())


def checksum_of(bitmap: Tensor) -> int:
    """Return a checksum of a bitmap, for comparison over ranks. NOTE: device-to-host sync."""
    places = torch.arange(1, bitmap.numel() + 1, device=bitmap.device)
    return int((bitmap.long() * places).sum())


class ElementMask:
    """The elements of one parameter that are kept.

    Args:
        module: the module that holds the parameter and the mask.
        name: name of the parameter.

    Attributes:
        shape: shape of the mask: this rank's part of the parameter before FSDP2 divides it further.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        parameter: Any = self.parameter
        place = known_shard(parameter)
        # Number of mesh dimensions over which experts are divided. They are the last dimensions of
        # the parameter's mesh; FSDP2 puts its own before them.
        self.num_axes = 0 if place is None else len(place.along())
        shape = list(parameter.shape)
        for axis in range(-self.num_axes, 0):
            shape[parameter.placements[axis].dim] //= parameter.device_mesh.shape[axis]
        self.shape = torch.Size(shape)
        # Results of `once` for one version of the bitmap, by key.
        self._version: tuple[int, int] | None = None
        self._found: dict[object, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_version": None, "_found": {}}

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """Return the cached result of a function of the mask; made anew when the mask changes."""
        bitmap = self.bitmap
        version = (bitmap.data_ptr(), bitmap._version)
        if self._version != version:
            self._version, self._found = version, {}
        if key not in self._found:
            self._found[key] = make()
        found: _T = self._found[key]
        return found

    @property
    def held(self) -> nn.Parameter | None:
        """The parameter as the module holds it now, which FSDP2 may have replaced, or None."""
        return self.module._parameters.get(self.name)

    @property
    def parameter(self) -> nn.Parameter:
        """See `held`; ValueError for None."""
        found = self.held
        if found is None:
            raise ValueError(
                f"prune: expected {self.name} to be a parameter of {type(self.module).__name__} as "
                "it was when it was pruned, got none; call Pruning.remove() before it is replaced, "
                "as by a parametrization"
            )
        return found

    @property
    def bitmap(self) -> Tensor:
        """Bitmap of all elements of `shape`; see `moe_ext.ops.pack_bits`."""
        found = self.module._buffers.get(f"{self.name}_mask")
        if found is None:
            raise ValueError(
                f"prune: expected {self.name} to be pruned, got a mask that was removed"
            )
        return found.view(-1)

    @property
    def marks(self) -> Tensor:
        """Bool of `shape`, True for kept elements."""
        return unpacked_bits(self.bitmap, self.shape.numel()).view(self.shape)

    @property
    def count(self) -> int:
        """Number of kept elements. NOTE: device-to-host sync, once for each state of the mask."""
        return self.once("count", lambda: count_bits(self.bitmap))

    @property
    def checksum(self) -> int:
        """Checksum of the bitmap. NOTE: device-to-host sync, once for each state of the mask."""
        return self.once("checksum", lambda: checksum_of(self.bitmap))

    def pack(self, x: Tensor) -> Tensor:
        """Pack the kept elements of a contiguous tensor like the parameter into a vector."""
        packed = x.new_empty(self.count)
        ops.pack_masked_(packed, x, self.bitmap)
        return packed

    def clear_(self, x: Tensor) -> None:
        """Zero the elements that are not kept, in a tensor like the parameter or its shard."""
        bitmap, local = self.bitmap, local_part(x.detach())
        if is_dtensor(x) and x.device_mesh.ndim > self.num_axes:
            key = (x.device_mesh, x.placements)
            bitmap = self.once(key, lambda: ops.pack_bits(self.local_marks(x)))
        if not local.is_contiguous():
            local.masked_fill_(~unpacked_bits(bitmap, local.numel()).view(local.shape), 0)
            return
        count = self.once(("count", bitmap.data_ptr()), lambda: count_bits(bitmap))
        packed = local.new_empty(count)
        ops.pack_masked_(packed, local, bitmap)
        ops.unpack_masked_(local, packed, bitmap)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather a tensor like the parameter to `shape`. Under FSDP2 this is a collective."""
        return x.redistribute(placements=self._along(x)).to_local() if is_dtensor(x) else x

    def local_marks(self, like: Tensor) -> Tensor:
        """Return a bool, True for kept elements, in the shape of this rank's shard of a DTensor."""
        assert is_dtensor(like)
        marks = dtensor_of(self.marks, like.device_mesh, self._along(like), like.shape)
        # From replicated to sharded, `redistribute` sends nothing.
        return marks.redistribute(placements=like.placements).to_local().contiguous()

    def _along(self, like: DTensor) -> list[Placement]:
        """Return the placements of a tensor of `shape` on the mesh of a DTensor `like`."""
        from torch.distributed.tensor import Replicate

        added = like.device_mesh.ndim - self.num_axes
        return [Replicate()] * added + list(like.placements[added:])


def _own(module: nn.Module) -> dict[str, ElementMask]:
    found: dict[str, ElementMask] = vars(module).get(_PRUNED, {})
    return found


def mask_of(module: nn.Module, name: str) -> ElementMask | None:
    """Return the mask of a module's parameter; None if it is not pruned."""
    return _own(module).get(name)


def masks_of(model: nn.Module) -> Iterator[tuple[str, ElementMask]]:
    """Yield the name in the model and the mask of each pruned parameter."""
    for path, module in model.named_modules():
        for name, mask in _own(module).items():
            yield f"{path}.{name}" if path else name, mask


def add_mask(module: nn.Module, name: str) -> ElementMask:
    """Add a mask that keeps all elements of a parameter."""
    mask = ElementMask(module, name)
    shape = (mask.shape[0], mask.shape[1:].numel() // 8)
    # Tensors of inference_mode have no version counter, which `ElementMask.once` needs.
    with torch.inference_mode(False):
        whole = torch.full(shape, 255, dtype=torch.uint8, device=mask.parameter.device)
    module.register_buffer(f"{name}_mask", whole)
    vars(module)[_PRUNED] = {**_own(module), name: mask}
    return mask


def drop_mask(mask: ElementMask) -> None:
    """Remove a mask, if it is still the mask of its parameter."""
    own = dict(_own(mask.module))
    if own.get(mask.name) is mask:
        del own[mask.name], mask.module._buffers[f"{mask.name}_mask"]
        vars(mask.module)[_PRUNED] = own
