"""Sums of sparse gradients over ranks by all-gather, by split and reduce, or dense.

Shape suffixes: N elements, K pairs of a rank, P ranks, S slots of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext._checks import check_numbers, check_sizes
from moe_ext.comm import workers
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.collectives import all_reduce_bytes
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.comm.workers import Messages
from moe_ext.compression.collectives.arguments import (
    choice_problem,
    finite_problem,
    flat_problem,
    range_problem,
)
from moe_ext.compression.collectives.coding import PAIR_CODECS, Coding, PairCoding

_NAME = "sparse_all_reduce"
ALGORITHMS = ("auto", "all_gather", "split", "dense")
# Least elements of a region. Below, a second round of messages takes longer than it saves.
_MIN_REGION = 64
# Largest ratio of bytes, "split" to "all_gather", at which "auto" splits. Splitting selects pairs
# twice and waits for two rounds of messages. An all-gather sends during that time.
_SPLIT_GAIN = 0.4
# Bytes behind the pairs of a payload that hold the number of pairs found, padded to 16.
_LOAD_BYTES = 16


@dataclass(frozen=True)
class SparseLayout:
    """Sizes of one sparse all-reduce, equal on all ranks."""

    count: int
    numel: int
    world_size: int
    value_codec: str = "fp32"

    def _pairs(self, count: int) -> PairCoding:
        return PairCoding(count, self.numel, self.value_codec)

    @property
    def slots(self) -> PairCoding:
        """Coding of the pairs sent to one region: a quarter more slots than K / P.

        Pairs that find no slot stay in the residual for the next step.
        """
        return self._pairs(min(-(-5 * self.count // (4 * self.world_size)), self.count))

    @property
    def kept(self) -> PairCoding:
        """Coding of the sums that the owner of a region keeps."""
        return self._pairs(-(-self.count // self.world_size))

    def sent_bytes(self, algorithm: str) -> int:
        """Return the bytes that each rank sends."""
        others = self.world_size - 1
        if algorithm == "dense":
            return all_reduce_bytes(4 * self.numel, self.world_size)
        if algorithm == "all_gather":
            return others * self._pairs(self.count).num_bytes
        return others * (self.slots.num_bytes + self.kept.num_bytes + 2 * _LOAD_BYTES)

    def choose(self, algorithm: str, *, may_split: bool) -> str:
        """Resolve "auto" to the algorithm that sends least; "split" must win by `_SPLIT_GAIN`."""
        can_split = self.world_size > 1 and self.numel >= _MIN_REGION * self.world_size
        if algorithm == "split" and (not can_split or self.count == 0):
            return "all_gather"
        if algorithm != "auto":
            return algorithm
        cost = {name: float(self.sent_bytes(name)) for name in ("all_gather", "dense")}
        if may_split and can_split and self.count:
            cost["split"] = self.sent_bytes("split") / _SPLIT_GAIN
        return min(cost, key=lambda name: cost[name])


class SplitRegions:
    """Bounds of the regions that `sparse_all_reduce(algorithm="split")` gives to the ranks.

    One object serves one tensor over all steps. Bounds are chosen so that each region would have
    held equally many pairs in the last step. Every rank computes them from the same received data,
    so they are equal on all ranks without a message.

    Args:
        numel (int): elements of the tensor.
        world_size (int): ranks.

    Attributes:
        bounds (tuple[int, ...]): region p is ``[bounds[p], bounds[p + 1])``.
        step (int): number of reductions that have used the regions.
        loads (tuple[int, ...]): pairs that all ranks had for each region in the last step.
        pending (Pending): reduction underway that uses the regions (``async_op=True``), or None.
    """

    def __init__(self, numel: int, world_size: int) -> None:
        check_sizes("SplitRegions", world_size=world_size)
        check_numbers("SplitRegions", SplitRegions.__init__.__annotations__, locals(), ["numel"])
        self.numel = numel
        self.bounds = tuple(numel * p // world_size for p in range(world_size + 1))
        self.step = 0
        self.loads: tuple[int, ...] = ()
        self.pending: Pending[Tensor] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next step continues, as plain numbers."""
        return {"bounds": list(self.bounds), "step": self.step, "loads": list(self.loads)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, for the same numbers of elements and ranks."""
        self.bounds, self.loads = tuple(state["bounds"]), tuple(state["loads"])
        self.step = state["step"]

    def settle(self) -> None:
        """Wait for the reduction underway, because the next one takes its regions from it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def update(self, loads_P: Tensor, kept_idx_PK: Tensor) -> None:
        """Move the bounds so that regions would have held equal numbers of the last step's pairs.

        Args:
            loads_P (Tensor[P]): pairs that all ranks had for each region.
            kept_idx_PK (Tensor[P, K]): indices that the owner of each region kept, ascending. They
                show the distribution of the pairs inside the region.
        """
        # NOTE: device-to-host sync.
        loads = [max(int(load), 0) for load in loads_P.tolist()]
        size, total = self.world_size, sum(loads)
        self.loads, self.step = tuple(loads), self.step + 1
        if total == 0 or kept_idx_PK.shape[1] == 0:
            return
        bounds, region, before = [0], 0, 0
        for part in range(1, size):
            while region < size - 1 and (before + loads[region]) * size < part * total:
                before += loads[region]
                region += 1
            share = (part * total - before * size) / max(loads[region] * size, 1)
            column = min(int(share * kept_idx_PK.shape[1]), kept_idx_PK.shape[1] - 1)
            found = int(kept_idx_PK[region, column])
            # Every region holds at least one element.
            bounds.append(min(max(found, bounds[-1] + 1), self.numel - (size - part)))
        self.bounds = (*bounds, self.numel)


def sparse_all_reduce(
    values_K: Tensor,
    indices_K: Tensor,
    numel: int,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    algorithm: str = "auto",
    value_codec: str = "fp32",
    residual: Tensor | None = None,
    regions: SplitRegions | None = None,
    out: Tensor | None = None,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    r"""Return the mean over ranks of sparse gradients, as a dense tensor.

    "all_gather" sends all pairs to all ranks. The result is exact, and the volume grows with P.
    "split" gives each rank a region of the elements (Ok-Topk). Every rank sends at most
    :math:`1.25 K / P` pairs to the owner of a region, who adds them up, keeps the largest
    :math:`K / P` sums and sends these to all. Pairs that are not sent, and sums that are not kept,
    are added to ``residual``, so that :math:`P` times the mean plus all residuals is conserved.
    "dense" scatters the pairs into a tensor and all-reduces it, which sends less once the union of
    the pairs fills the tensor. "auto" takes the algorithm that sends least, but "split" only below
    two fifths of the bytes of "all_gather": from about six ranks on. With one rank, or fewer than
    64 elements per rank, "split" falls back to "all_gather".

    Args:
        values_K (Tensor[K]): float32; as `topk_compress_` and `threshold_compress_` return them.
        indices_K (Tensor[K]): int64, ascending and all different, except that a pair with the value
            zero may repeat the index before it.
        numel (int): elements of the result.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        algorithm (str): "auto", "all_gather", "split" or "dense".
        value_codec (str): format of the sent values: "fp32", "bf16", "fp8", "int8" or "int4". The
            rounding error is added to ``residual``, and lost without one.
        residual (Tensor[numel]): float32, contiguous. Everything that the result lacks is added at
            the end. "split" needs it.
        regions (SplitRegions): carried from step to step, for "split"; None takes equal regions.
        out (Tensor[numel]): float32, contiguous; receives the result. Undefined after an error.
        validate (bool): compare the arguments of all ranks first, and check values and indices.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor[numel]: float32, with the same bits on all ranks; or a `Reduction` of it.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value, or differs between ranks; the
            message names them. With ``validate`` every rank raises it.
        RankFailureError: a rank died or did not answer; the residual is unchanged.

    Deterministic: the values of an element are added in the order of the ranks. With "dense" the
    backend adds them, in its own order.

    Reference: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022
    (arXiv 2201.07598); Renggli et al., SparCML, SC 2019 (the dense hand-over).
    """
    ranks = resolve_group(group, _NAME)
    if regions is not None:
        regions.settle()
    size = group_size(ranks)
    problem = (
        _problem(values_K, indices_K, numel)
        or flat_problem(residual, "residual", numel)
        or flat_problem(out, "out", numel)
        or _option_problem(algorithm, value_codec, residual, regions, numel, size)
        or (_content_problem(values_K, indices_K, numel) if validate else None)
    )
    facts = {
        "the number of values": values_K.shape[0] if values_K.dim() else 0,
        "numel": numel,
        "algorithm": algorithm,
        "value_codec": value_codec,
        "average": average,
        "having a residual": residual is not None,
        "regions": None if regions is None else (*regions.bounds, regions.step),
    }
    agreement = Agreement(_NAME, ranks, values_K.device, validate=validate)
    agreement.compare(facts, problem=problem)
    layout = SparseLayout(values_K.shape[0], numel, size, value_codec)
    chosen = layout.choose(algorithm, may_split=residual is not None)
    divisor = size if average else 1
    result = values_K.new_empty(numel) if out is None else out
    given = (result.detach().view(-1), values_K.contiguous(), indices_K.contiguous())
    owed_N = None if residual is None else residual.view(-1)

    def finish(found: list[Tensor]) -> Tensor:
        if chosen == "split" and regions is not None:
            regions.update(*found)
            regions.pending = None
        return result

    twin: Callable[..., list[Tensor]]
    args: tuple[Any, ...]
    if chosen == "split":
        split = SplitRegions(numel, size) if regions is None else regions
        bounds = torch.tensor(split.bounds, device=values_K.device)
        more = (layout.slots.count, layout.kept.count, split.step, divisor)
        method, twin = "sparse_split_sum", _split_sum
        args = (*given, owed_N, bounds, value_codec, *more)
    elif chosen == "dense":
        method, twin = "sparse_dense_sum", _dense_sum
        args = (*given, divisor)
    else:
        method, twin = "sparse_all_gather_sum", _all_gather_sum
        args = (*given, owed_N, value_codec, divisor)
    pending = workers.start(
        twin, args, ranks, _NAME, compiled=(method,), finish=finish, async_op=async_op
    )
    if not async_op:
        return pending.wait()
    if regions is not None:
        regions.pending = pending
    return pending


def _problem(values: Tensor, indices: Tensor, numel: int) -> str | None:
    """Check the shapes and dtypes of the pairs; return an error text or None."""
    if values.dtype != torch.float32 or values.dim() != 1:
        return (
            f"expected values to be a vector of float32, got {values.dtype} of shape "
            f"{tuple(values.shape)}"
        )
    if indices.dtype != torch.int64 or indices.shape != values.shape:
        return (
            f"expected indices to be int64 of shape {tuple(values.shape)}, got {indices.dtype} of "
            f"shape {tuple(indices.shape)}"
        )
    if values.shape[0] > numel:
        return f"expected values to be at most numel ({numel}), got {values.shape[0]}"
    return None


def _content_problem(values: Tensor, indices: Tensor, numel: int) -> str | None:
    """Check the values and indices of the pairs. NOTE: device-to-host sync."""
    problem = finite_problem(values, "values") or range_problem(indices, "indices to be", numel)
    if problem is not None:
        return problem
    steps = indices[1:] - indices[:-1]
    if bool((steps < 0).any()):
        return "expected indices to be ascending, got descending ones"
    repeated = (steps == 0) & (values[1:] != 0)
    if bool(repeated.any()):
        where = int(indices[1:][repeated][0])
        return f"expected indices to be all different, got {where} twice"
    return None


def _option_problem(
    algorithm: str,
    value_codec: str,
    residual: Tensor | None,
    regions: SplitRegions | None,
    numel: int,
    size: int,
) -> str | None:
    """Check the options; return an error text or None."""
    problem = choice_problem(algorithm, "algorithm", ALGORITHMS)
    problem = problem or choice_problem(value_codec, "value_codec", PAIR_CODECS)
    if problem is not None:
        return problem
    if algorithm == "split" and residual is None:
        return "expected residual to be given for algorithm='split', got None"
    if regions is not None and (regions.numel, regions.world_size) != (numel, size):
        return (
            f"expected regions to be those of {numel} elements and {size} ranks, got "
            f"{regions.numel} and {regions.world_size}"
        )
    return None


def start_gather_sum(
    payload: Tensor,
    out_N: Tensor,
    coding: Coding,
    group: ProcessGroup | None,
    average: bool,
    *,
    operation: str,
) -> Pending[Tensor]:
    """Start to gather and average the decoded payloads, for codecs that cannot be sharded.

    Args:
        payload: this rank's tensor, encoded.
        out_N: float32, overwritten with the result.
        coding: decodes the payloads.
        group: the ranks; None is this process alone.
        average: divide by P.
        operation: name for error messages.
    """
    divisor = group_size(group) if average else 1
    args = (coding, out_N.detach(), payload, divisor)
    return workers.start(_gather_sum, args, group, operation, finish=lambda _: out_N, async_op=True)


def _gather_sum(
    coding: Coding | PairCoding, out_N: Tensor, payload: Tensor, divisor: int, messages: Messages
) -> list[Tensor]:
    out_N.zero_()
    for theirs in messages.gather(payload):
        coding.decode_add_(out_N, theirs, divisor=divisor)
    return [out_N]


def _all_gather_sum(
    out_N: Tensor,
    values_K: Tensor,
    indices_K: Tensor,
    residual_N: Tensor | None,
    value_codec: str,
    divisor: int,
    messages: Messages,
) -> list[Tensor]:
    coding = PairCoding(values_K.shape[0], out_N.numel(), value_codec)
    payload = coding.encode(values_K, indices_K)
    _gather_sum(coding, out_N, payload, divisor, messages)
    if residual_N is not None:
        coding.add_lost_(residual_N, payload, values_K)
    return [out_N]


def _dense_sum(
    out_N: Tensor, values_K: Tensor, indices_K: Tensor, divisor: int, messages: Messages
) -> list[Tensor]:
    out_N.zero_().index_add_(0, indices_K, values_K)
    messages.all_reduce(out_N)
    if divisor != 1:
        out_N.div_(divisor)
    return [out_N]


def _with_load(payload: Tensor, load: Tensor) -> Tensor:
    """Append the number of pairs to a payload."""
    padding = payload.new_zeros(_LOAD_BYTES - 8)
    return torch.cat([payload, as_bytes(load), padding])


def _load(row: Tensor) -> Tensor:
    return row[-_LOAD_BYTES : 8 - _LOAD_BYTES].view(torch.int64)


def _fill_slots(
    values_K: Tensor, indices_K: Tensor, bounds: Tensor, slots: int, step: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put pairs into the S slots of each region.

    If a region has L > S pairs, pair number j is sent if (j - step) S mod L < S. The S pairs are
    evenly spread and differ between steps. Taking the first S pairs would leave out the same
    elements in every step, and hide from `SplitRegions.update` where the pairs are.

    Returns:
        values [P, S], indices [P, S], pairs found for each region [P], and values that got no
        slot [K], with zeros for the others.
    """
    size = bounds.shape[0] - 1
    starts = torch.searchsorted(indices_K, bounds)
    region = torch.searchsorted(bounds[1:-1].contiguous(), indices_K, right=True)

    def counted(mask: Tensor) -> tuple[Tensor, Tensor]:
        """Count the set elements of the mask up to each pair, and before each region."""
        upto = mask.cumsum(0)
        return upto, torch.nn.functional.pad(upto, (1, 0))[starts]

    wanted = values_K != 0
    upto, before = counted(wanted)
    loads = before[1:] - before[:-1]
    turned = (upto - before[region] - (1 + step)) * slots
    kept = wanted & (turned.remainder(loads[region].clamp(1)) < slots)
    upto, before = counted(kept)
    # Slots are counted from 1. All pairs without a slot are written to place 0, which is dropped.
    place = (upto - before[region] + region * slots) * kept
    unused = (bounds[1:] - 1).repeat_interleave(slots)
    slot_indices = torch.nn.functional.pad(unused, (1, 0)).index_copy_(0, place, indices_K)
    slot_values = values_K.new_zeros(size * slots + 1).index_copy_(0, place, values_K)
    left = values_K.masked_fill(kept, 0)
    return slot_values[1:].view(size, -1), slot_indices[1:].view(size, -1), loads, left


def _split_sum(
    out_N: Tensor,
    values_K: Tensor,
    indices_K: Tensor,
    residual_N: Tensor,
    bounds: Tensor,
    value_codec: str,
    *numbers: Any,
) -> list[Tensor]:
    slots, kept, step, divisor, messages = numbers
    numel, size = out_N.numel(), messages.size
    sent = PairCoding(slots, numel, value_codec)
    summed = PairCoding(kept, numel, value_codec)
    arriving = messages.ask(sent.num_bytes + _LOAD_BYTES, out_N)
    values_PS, indices_PS, loads, left_K = _fill_slots(values_K, indices_K, bounds, slots, step)
    rows = [
        _with_load(sent.encode(values_PS[part], indices_PS[part]), loads[part])
        for part in range(size)
    ]
    messages.all_to_all(arriving, torch.cat(rows))
    out_N.zero_()

    start, stop = bounds[messages.rank : messages.rank + 2].tolist()
    total, rest = out_N.new_zeros(stop - start), out_N.new_empty(stop - start)
    load = loads.new_zeros(1)
    for theirs in arriving.wait().view(size, -1):
        sent.decode_add_(total, theirs, start=start)
        load += _load(theirs)
    # `topk_compress_` needs a residual to add, but sums have none. This part of `out_N` is still
    # zero and serves as one.
    nothing = out_N[start:stop]
    values, indices = torch.ops.moe_ext.topk_compress_(
        total, rest, min(kept, stop - start), check_finite=False, residual_in=nothing
    )
    more = (0, kept - values.shape[0])
    values = torch.nn.functional.pad(values, more)
    indices = torch.nn.functional.pad(indices + start, more, value=stop - 1)
    row = _with_load(summed.encode(values, indices), load)

    found = messages.gather(row)
    for theirs in found:
        summed.decode_add_(out_N, theirs, divisor=divisor)
    # The residual changes only now, because no message can fail any more.
    residual_N[start:stop] += rest
    residual_N.index_add_(0, indices_K, left_K)
    for part in range(size):
        sent.add_lost_(residual_N, rows[part], values_PS[part])
    summed.add_lost_(residual_N, row, values)
    all_loads = torch.cat([_load(theirs) for theirs in found])
    return [all_loads, torch.stack([summed.indices(theirs) for theirs in found])]
