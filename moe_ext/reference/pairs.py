"""Packed indices and their sums in plain PyTorch.

Shape suffixes: K pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_RUN = 65536


def _num_runs(count: int, numel: int) -> int:
    """Return the number of runs whose ends are packed; 0 if indices are packed as int32."""
    runs = -(-numel // _RUN)
    return runs if 4 * runs + 2 * count < 4 * count or numel > 2**31 else 0


def pack_indices(indices_K: Tensor, numel: int) -> Tensor:
    """Same as `moe_ext.ops.pack_indices`."""
    runs = _num_runs(len(indices_K), numel)
    ends = torch.arange(1, runs + 1, device=indices_K.device) * _RUN
    ends = torch.searchsorted(indices_K, ends, out_int32=True)
    offsets = indices_K.to(torch.int16 if runs else torch.int32)
    packed = torch.cat([ends.view(torch.uint8), offsets.view(torch.uint8)])
    return F.pad(packed, (0, -len(packed) % 16))


def unpack_indices(packed: Tensor, count: int, numel: int) -> Tensor:
    """Same as `moe_ext.ops.unpack_indices`."""
    runs = _num_runs(count, numel)
    if not runs:
        return packed[: 4 * count].view(torch.int32).long().clamp(0, max(numel - 1, 0))
    ends = packed[: 4 * runs].view(torch.int32).clone()
    offsets = packed[4 * runs : 4 * runs + 2 * count].view(torch.int16).long() % _RUN
    ends[-1] = count
    # A run whose end is below that of the run before counts as empty. Such ends come only from
    # damaged bytes.
    ends = ends.clamp(0, count).cummax(0).values
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    base_K = torch.repeat_interleave(counts, output_size=count).long() * _RUN
    return (base_K + offsets).clamp(0, numel - 1)


def add_pairs_(
    out: Tensor,
    values_K: Tensor,
    packed: Tensor,
    numel: int,
    *,
    start: int = 0,
    divisor: float = 1.0,
) -> None:
    """Same as `moe_ext.ops.add_pairs_`."""
    indices_K = unpack_indices(packed, len(values_K), numel) - start
    kept = values_K != 0
    where = indices_K[kept].clamp(0, max(out.numel() - 1, 0))
    by = torch.tensor(divisor, dtype=torch.float32, device=out.device)
    out.view(-1).index_add_(0, where, values_K[kept] / by)
