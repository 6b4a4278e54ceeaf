"""Masks of pruned parameters: buffers beside them, a bit an element.

The buffer of a parameter `weight` is `weight_mask`, uint8 `[rows, bytes of a row]`. It lies over
ranks as the parameter does, and is saved and loaded with it.
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

# Attribute of a module: masks by the name of the parameter. Copies of the module have their own.
_PRUNED = "_masks_of_parameters"

_T = TypeVar("_T")


def unpacked_bits(bitmap: Tensor, numel: int) -> Tensor:
    """Bool of each element, `[numel]`, from the bitmap of `moe_ext.ops.pack_bits`."""
    places = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap[:, None] >> places) & 1).view(-1)[:numel].bool()


def count_bits(bitmap: Tensor) -> int:
    """Bits that are set. NOTE: device-to-host sync."""
    return int(unpacked_bits(bitmap, 8 * bitmap.numel()).sum())


def checksum_of(bitmap: Tensor) -> int:
    """Tells bitmaps apart. NOTE: device-to-host sync."""
    places = torch.arange(1, bitmap.numel() + 1, device=bitmap.device)
    return int((bitmap.long() * places).sum())


class ElementMask:
    """The elements of one parameter that are kept.

    Args:
        module: holds the parameter, and the mask.
        name: of the parameter.

    Attributes:
        shape: of the elements that it is of: this rank's part, before FSDP2 divides it further.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        parameter: Any = self.parameter
        place = known_shard(parameter)
        # The last dimensions of its mesh: experts over ranks. FSDP2 puts its own before them.
        self.num_axes = 0 if place is None else len(place.along())
        shape = list(parameter.shape)
        for axis in range(-self.num_axes, 0):
            shape[parameter.placements[axis].dim] //= parameter.device_mesh.shape[axis]
        self.shape = torch.Size(shape)
        # Results of one state of the bitmap, by the function that makes them.
        self._version: tuple[int, int] | None = None
        self._found: dict[object, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_version": None, "_found": {}}

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """The result of a function of the mask as it is now; made when it is first asked for."""
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
        """The parameter as the module holds it now, or None: FSDP2 puts others in its place."""
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
        """See `moe_ext.ops.pack_bits`; of all elements of `shape`."""
        found = self.module._buffers.get(f"{self.name}_mask")
        if found is None:
            raise ValueError(
                f"prune: expected {self.name} to be pruned, got a mask that was removed"
            )
        return found.view(-1)

    @property
    def marks(self) -> Tensor:
        """True for what is kept, of `shape`."""
        return unpacked_bits(self.bitmap, self.shape.numel()).view(self.shape)

    @property
    def count(self) -> int:
        """Elements that are kept. NOTE: device-to-host sync, once for each state of the mask."""
        return self.once("count", lambda: count_bits(self.bitmap))

    @property
    def checksum(self) -> int:
        """Equal where masks are. NOTE: device-to-host sync, once for each state of the mask."""
        return self.once("checksum", lambda: checksum_of(self.bitmap))

    def pack(self, x: Tensor) -> Tensor:
        """The kept elements of a contiguous tensor like the parameter, side by side."""
        packed = x.new_empty(self.count)
        ops.pack_masked_(packed, x, self.bitmap)
        return packed

    def clear_(self, x: Tensor) -> None:
        """Set to zero what is not kept, of a tensor like the parameter or its shards."""
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
        """The elements of `shape` of a tensor like the parameter; a collective under FSDP2."""
        return x.redistribute(placements=self._along(x)).to_local() if is_dtensor(x) else x

    def local_marks(self, like: Tensor) -> Tensor:
        """True for what is kept, in the shape of this rank's shard of a DTensor."""
        assert is_dtensor(like)
        marks = dtensor_of(self.marks, like.device_mesh, self._along(like), like.shape)
        # Cutting sends nothing.
        return marks.redistribute(placements=like.placements).to_local().contiguous()

    def _along(self, like: DTensor) -> list[Placement]:
        """Placements of a tensor of `shape` on the mesh of a DTensor like the parameter."""
        from torch.distributed.tensor import Replicate

        added = like.device_mesh.ndim - self.num_axes
        return [Replicate()] * added + list(like.placements[added:])


def _own(module: nn.Module) -> dict[str, ElementMask]:
    found: dict[str, ElementMask] = vars(module).get(_PRUNED, {})
    return found


def mask_of(module: nn.Module, name: str) -> ElementMask | None:
    """The mask of a parameter of a module; None where it is not pruned."""
    return _own(module).get(name)


def masks_of(model: nn.Module) -> Iterator[tuple[str, ElementMask]]:
    """Names in the model of all pruned parameters, and their masks."""
    for path, module in model.named_modules():
        for name, mask in _own(module).items():
            yield f"{path}.{name}" if path else name, mask


def add_mask(module: nn.Module, name: str) -> ElementMask:
    """Put a mask beside a parameter that keeps everything."""
    mask = ElementMask(module, name)
    shape = (mask.shape[0], mask.shape[1:].numel() // 8)
    # Tensors of inference_mode have no version, by which results of a mask are kept.
    with torch.inference_mode(False):
        whole = torch.full(shape, 255, dtype=torch.uint8, device=mask.parameter.device)
    module.register_buffer(f"{name}_mask", whole)
    vars(module)[_PRUNED] = {**_own(module), name: mask}
    return mask


def drop_mask(mask: ElementMask) -> None:
    """Take the mask of a parameter away; nothing where it is gone, or another one there."""
    own = dict(_own(mask.module))
    if own.get(mask.name) is mask:
        del own[mask.name], mask.module._buffers[f"{mask.name}_mask"]
        vars(mask.module)[_PRUNED] = own
