"""The sum of sparse gradients over ranks: by all-gather, by split and reduce, or dense.

Shape suffixes: K pairs that a rank gives, P ranks, S slots for a region.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import check_call, non_finite, resolve
from moe_ext.compression.pairs import (
    PAIR_CODECS,
    PairLayout,
    add_pairs,
    joined,
    pack_pairs,
    taken,
    unpack_pairs,
)
from moe_ext.compression.reduction import Reduction, run
from moe_ext.compression.regions import SplitRegions
from moe_ext.compression.stages import Slot, Stages
from moe_ext.distributed.comm import Pending
from moe_ext.distributed.groups import group_rank, group_size

_NAME = "sparse_all_reduce"
ALGORITHMS = ("auto", "all_gather", "split", "dense")
# Slots beyond the even share of a region. What does not fit waits for the next step.
SLACK = 1.25
# A smaller region is not worth a second round of messages.
_MIN_REGION = 64
# Cutting twice and waiting for two rounds take time that all-gathering spends on the wire, so that
# splitting must send this much less.
_SPLIT_GAIN = 0.4
_CACHED = 256


@dataclass(frozen=True)
class SparseLayout:
    """Sizes of one sparse all-reduce, equal on all ranks."""

    count: int
    numel: int
    world_size: int
    value_codec: str = "fp32"

    @property
    def pairs(self) -> PairLayout:
        """What a rank gives, in one payload."""
        return PairLayout(self.count, self.numel, self.value_codec)

    @property
    def slots(self) -> PairLayout:
        """What it has room for to one region."""
        count = -(-int(SLACK * 4) * self.count // (4 * self.world_size))
        return PairLayout(min(count, self.count), self.numel, self.value_codec)

    @property
    def kept(self) -> PairLayout:
        """What the owner of a region keeps of it."""
        return PairLayout(-(-self.count // self.world_size), self.numel, self.value_codec)

    def sent_bytes(self, algorithm: str) -> int:
        """What leaves a rank."""
        others = self.world_size - 1
        if algorithm == "dense":
            return 2 * others * 4 * self.numel // self.world_size
        if algorithm == "all_gather":
            return others * self.pairs.num_bytes
        return others * (self.slots.num_bytes + 16 + self.kept.num_bytes + 16)

    def choose(self, algorithm: str, *, may_split: bool) -> str:
        """What is done for `algorithm`: "auto" sends least, and splits by a clear margin only."""
        can_split = self.world_size > 1 and self.numel >= _MIN_REGION * self.world_size
        if algorithm == "split" and (not can_split or self.count == 0):
            return "all_gather"
        if algorithm != "auto":
            return algorithm
        cost = {name: float(self.sent_bytes(name)) for name in ("all_gather", "dense")}
        if may_split and can_split and self.count:
            cost["split"] = self.sent_bytes("split") / _SPLIT_GAIN
        return min(cost, key=lambda name: cost[name])


@functools.lru_cache(_CACHED)
def _gathered(layout: SparseLayout, divisor: int, keeps_error: bool) -> Stages:
    stages = Stages(3 + keeps_error)
    values, indices, out, *residual = stages.inputs()
    pairs = layout.pairs
    row = joined(stages, pack_pairs(stages, values, indices, pairs))
    found = stages.all_gather(row, layout.world_size * pairs.num_bytes)
    stages.call("aten::zero_", out)
    for rank in range(layout.world_size):
        theirs = unpack_pairs(stages, found, rank * pairs.num_bytes, pairs)
        add_pairs(stages, out, theirs, pairs, divisor=divisor)
    if keeps_error and layout.value_codec != "fp32":
        add_pairs(stages, residual[0], _lost(stages, values, row, 0, pairs), pairs)
    stages.results = [out.index]
    return stages


def _lost(
    stages: Stages, values: Slot, row: Slot, start: int, layout: PairLayout
) -> tuple[Slot, Slot]:
    """What the codes at byte `start` of a row lose of the values, and the packed indices."""
    sent, packed = unpack_pairs(stages, row, start, layout)
    return stages.call("aten::sub.Tensor", values, sent), packed


@functools.lru_cache(_CACHED)
def _dense(layout: SparseLayout, divisor: int) -> Stages:
    stages = Stages(3)
    values, indices, out = stages.inputs()
    stages.call("aten::zero_", out)
    stages.call("aten::index_add_", out, 0, indices, values)
    stages.all_reduce(out)
    if divisor != 1:
        stages.call("aten::div_.Scalar", out, divisor)
    stages.results = [out.index]
    return stages


def _slotted(
    stages: Stages, values: Slot, indices: Slot, bounds: Slot, layout: SparseLayout, step: int
) -> tuple[Slot, Slot, Slot, Slot]:
    """Values and indices [P * S] in slots, pairs found for each region [P], what did not fit [K].

    Where a region has L pairs, more than slots, those j are sent for which j S mod L is less than
    S: S pairs, evenly spread, others in the next step. Cutting at the end would leave out the same
    elements again and again, and tell nothing of where they are.
    """
    size, slots = layout.world_size, layout.slots.count
    call = stages.call
    wanted = call("aten::ne.Scalar", values, 0)
    zero = call("aten::new_zeros", indices, [1])

    def counted(mask: Slot) -> tuple[Slot, Slot]:
        """How many of the mask there are up to each pair, and before each region."""
        upto = call("aten::cumsum", mask, 0)
        return upto, call("aten::index_select", call("aten::cat", [zero, upto], 0), 0, starts)

    starts = call("aten::searchsorted.Tensor", indices, bounds)
    inner = call("aten::narrow", bounds, 0, 1, size - 1)
    region = call("aten::searchsorted.Tensor", inner, indices, False, True)
    upto, before = counted(wanted)
    first = call("aten::narrow", before, 0, 0, size)
    loads = call("aten::sub.Tensor", call("aten::narrow", before, 0, 1, size), first)
    place = call("aten::sub.Tensor", upto, call("aten::index_select", first, 0, region))
    load = call("aten::clamp", call("aten::index_select", loads, 0, region), 1)
    turned = call("aten::mul.Scalar", call("aten::sub.Scalar", place, 1 + step), slots)
    turned = call("aten::remainder.Tensor", turned, load)
    kept = call("aten::bitwise_and.Tensor", wanted, call("aten::lt.Scalar", turned, slots))
    upto, before = counted(kept)
    first = call("aten::narrow", before, 0, 0, size)
    place = call("aten::sub.Tensor", upto, call("aten::index_select", first, 0, region))
    place = call("aten::add.Tensor", place, call("aten::mul.Scalar", region, slots))
    # Counted from 1: slot 0 takes what has no slot.
    place = call("aten::mul.Tensor", place, kept)
    ends = call("aten::sub.Scalar", call("aten::narrow", bounds, 0, 1, size), 1)
    unused = call("aten::repeat_interleave.self_int", ends, slots, 0)
    slot_indices = call("aten::cat", [zero, unused], 0)
    call("aten::index_copy_", slot_indices, 0, place, indices)
    slot_values = call("aten::new_zeros", values, [size * slots + 1])
    call("aten::index_copy_", slot_values, 0, place, values)
    left = call("aten::masked_fill.Scalar", values, kept, 0)
    return (
        call("aten::narrow", slot_values, 0, 1, size * slots),
        call("aten::narrow", slot_indices, 0, 1, size * slots),
        loads,
        left,
    )


def _split(
    layout: SparseLayout, divisor: int, bounds: tuple[int, ...], rank: int, step: int
) -> Stages:
    stages = Stages(5)
    values, indices, out, residual, bounds_slot = stages.inputs()
    size, slots, kept = layout.world_size, layout.slots, layout.kept
    slot_values, slot_indices, loads, left = _slotted(
        stages, values, indices, bounds_slot, layout, step
    )
    row, owed = _to_owners(stages, slot_values, slot_indices, loads, layout)
    found = stages.all_to_all(row, size * (slots.num_bytes + 16))

    start, length = bounds[rank], bounds[rank + 1] - bounds[rank]
    stages.call("aten::zero_", out)
    total, load = _region_sum(stages, found, values, layout, start, length)
    rest = stages.scratch(values, 4 * length, torch.float32)
    # Nothing is owed of the sum: the result, which is zero so far, stands for that.
    nothing = stages.call("aten::narrow", out, 0, start, length)
    count = min(kept.count, length)
    kept_values, kept_indices = stages.call_many(
        "moe_ext::topk_compress_", 2, total, rest, count, 0, None, 0.0, 1.0, False, nothing
    )
    kept_indices = stages.call("aten::add.Scalar", kept_indices, start)
    if count < kept.count:
        more = [0, kept.count - count]
        kept_values = stages.call("aten::constant_pad_nd", kept_values, more, 0)
        kept_indices = stages.call("aten::constant_pad_nd", kept_indices, more, start + length - 1)
    parts = pack_pairs(stages, kept_values, kept_indices, kept)
    row, row_bytes = joined(stages, [*parts, (load, 8)]), kept.num_bytes + 16
    if layout.value_codec != "fp32":
        owed.append((_lost(stages, kept_values, row, 0, kept), kept))
    found = stages.all_gather(row, size * row_bytes)

    all_indices, all_loads = [], []
    for owner in range(size):
        theirs = unpack_pairs(stages, found, owner * row_bytes, kept)
        add_pairs(stages, out, theirs, kept, divisor=divisor)
        all_indices.append(
            stages.call("moe_ext::unpack_indices", theirs[1], kept.count, kept.numel)
        )
        at = owner * row_bytes + kept.num_bytes
        all_loads.append(taken(stages, found, at, 8, torch.int64))
    own = stages.call("aten::narrow", residual, 0, start, length)
    stages.call("aten::add_.Tensor", own, rest)
    stages.call("aten::index_add_", residual, 0, indices, left)
    for lost, sent in owed:
        add_pairs(stages, residual, lost, sent)
    stages.results = [
        out.index,
        stages.call("aten::cat", all_loads, 0).index,
        stages.call("aten::stack", all_indices, 0).index,
    ]
    return stages


def _to_owners(
    stages: Stages, values: Slot, indices: Slot, loads: Slot, layout: SparseLayout
) -> tuple[Slot, list[tuple[tuple[Slot, Slot], PairLayout]]]:
    """A row of the pairs and the load of each region; what its codes lose, and where."""
    slots = layout.slots
    parts: list[tuple[Slot, int]] = []
    given = []
    for part in range(layout.world_size):
        place = (0, part * slots.count, slots.count)
        given.append(stages.call("aten::narrow", values, *place))
        where = stages.call("aten::narrow", indices, *place)
        parts += pack_pairs(stages, given[part], where, slots)
        parts.append((stages.call("aten::narrow", loads, 0, part, 1), 8))
    row, row_bytes = joined(stages, parts), slots.num_bytes + 16
    if layout.value_codec == "fp32":
        return row, []
    lost = [_lost(stages, x, row, part * row_bytes, slots) for part, x in enumerate(given)]
    return row, [(pair, slots) for pair in lost]


def _region_sum(
    stages: Stages, found: Slot, like: Slot, layout: SparseLayout, start: int, length: int
) -> tuple[Slot, Slot]:
    """Sum [length] of what all ranks sent for one region, in rank order, and their pairs [1]."""
    slots = layout.slots
    row_bytes = slots.num_bytes + 16
    total = stages.scratch(like, 4 * length, torch.float32)
    stages.call("aten::zero_", total)
    load = stages.call("aten::new_zeros", like, [1], torch.int64)
    for source in range(layout.world_size):
        theirs = unpack_pairs(stages, found, source * row_bytes, slots)
        add_pairs(stages, total, theirs, slots, start=start)
        at = source * row_bytes + slots.num_bytes
        stages.call("aten::add_.Tensor", load, taken(stages, found, at, 8, torch.int64))
    return total, load


def _problem(
    values: Tensor, indices: Tensor, numel: int, residual: Tensor | None, out: Tensor | None
) -> str | None:
    """What is wrong with the tensors, by shape and dtype."""
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
    for name, x in (("residual", residual), ("out", out)):
        if x is not None and not _is_flat(x, numel):
            return (
                f"expected {name} to be contiguous float32 of {numel} elements, got {x.dtype} of "
                f"shape {tuple(x.shape)}"
            )
    return None


def _is_flat(x: Tensor, numel: int) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() == numel


def _content_problem(values: Tensor, indices: Tensor, numel: int) -> str | None:
    """What is wrong with the numbers. NOTE: device-to-host sync."""
    if non_finite(values):
        return "expected values to be finite, got NaN or infinity"
    if indices.shape[0] == 0:
        return None
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= numel:
        return f"expected indices to be in [0, {numel}), got {low if low < 0 else high}"
    steps = indices[1:] - indices[:-1]
    if bool((steps < 0).any()):
        return "expected indices to be ascending, got descending ones"
    repeated = (steps == 0) & (values[1:] != 0)
    if bool(repeated.any()):
        where = int(indices[1:][repeated][0])
        return f"expected indices to be all different, got {where} twice"
    return None


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
) -> Tensor | Reduction:
    r"""The mean over ranks of sparse gradients, as a dense tensor.

    "all_gather" sends all pairs to all ranks: exact, and the volume grows with P. "split" gives
    each rank a region of the elements (Ok-Topk): every rank sends it at most :math:`1.25 K / P`
    pairs, its owner adds them up, keeps the largest :math:`K / P` sums and sends those to all.
    Whatever is left out on the way goes into ``residual``: :math:`P` times the mean, plus the sum
    of all residuals, is what it was. "dense" scatters and takes a dense all-reduce, which is less
    once the union of the pairs fills the tensor. "auto" takes what sends least, but "split" only
    where it sends less than two fifths of what "all_gather" does: from about six ranks on. One
    rank, and fewer than 64 elements a rank, are not split but gathered.

    Args:
        values_K (Tensor[K]): float32; as `topk_compress_` and `threshold_compress_` return them.
        indices_K (Tensor[K]): int64, ascending and all different (a zero may repeat the last one).
        numel (int): elements of the result.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        algorithm (str): "auto", "all_gather", "split" or "dense".
        value_codec (str): what values travel as: "fp32", "bf16", "fp8", "int8" or "int4". What they
            lose goes into ``residual``, and is lost where there is none.
        residual (Tensor[numel]): float32, contiguous; what is left out is added to it at the end.
            "split" needs it.
        regions (SplitRegions): carried from step to step, for "split"; None takes equal regions.
        out (Tensor[numel]): float32, contiguous: where to put the result. Undefined after an error.
        validate (bool): compare the arguments of all ranks first, and look at the numbers.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor[numel]: float32, with the same bits on all ranks; or a `Reduction` of it.

    Raises:
        ValueError: on every rank (of the others only with ``validate``): an argument has the wrong
            dtype, shape or value, or differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer; the residual is as it was.

    Deterministic: an element's values are added in the order of the ranks, but for "dense", where
    the backend adds them.

    Reference: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022
    (arXiv 2201.07598); Renggli et al., SparCML, SC 2019 (the dense hand-over).
    """
    ranks = resolve(group, _NAME)
    if regions is not None:
        regions.settle()
    problem = _problem(values_K, indices_K, numel, residual, out)
    problem = problem or _option_problem(
        algorithm, value_codec, residual, regions, numel, group_size(ranks)
    )
    if problem is None and validate:
        problem = _content_problem(values_K, indices_K, numel)
    facts = {
        "the number of values": values_K.shape[0] if values_K.dim() else 0,
        "numel": numel,
        "algorithm": algorithm,
        "value_codec": value_codec,
        "average": average,
        "having a residual": residual is not None,
        "regions": None if regions is None else (*regions.bounds, regions.step),
    }
    check_call(_NAME, facts, problem, ranks, values_K.device, validate=validate)
    layout = SparseLayout(values_K.shape[0], numel, group_size(ranks), value_codec)
    chosen = layout.choose(algorithm, may_split=residual is not None)
    divisor = layout.world_size if average else 1
    result = values_K.new_empty(numel) if out is None else out
    inputs = [values_K.contiguous(), indices_K.contiguous(), result.detach().view(-1)]

    def finish(found: list[Tensor]) -> Tensor:
        if chosen == "split" and regions is not None:
            regions.update(found[1], found[2])
            regions.pending = None
        return result

    stages, more = _program(layout, chosen, divisor, residual, regions, group_rank(ranks))
    inputs += more
    underway = run(stages, inputs, ranks, _NAME, finish=finish, async_op=async_op)
    if regions is not None and isinstance(underway, Pending):
        regions.pending = underway
    return underway


def _program(
    layout: SparseLayout,
    algorithm: str,
    divisor: int,
    residual: Tensor | None,
    regions: SplitRegions | None,
    rank: int,
) -> tuple[Stages, list[Tensor]]:
    """What is run, and what it takes besides values, indices and result."""
    if algorithm == "split":
        assert residual is not None
        split = regions or SplitRegions(layout.numel, layout.world_size)
        stages = _split(layout, divisor, split.bounds, rank, split.step)
        return stages, [residual.view(-1), torch.tensor(split.bounds, device=residual.device)]
    if algorithm == "dense":
        return _dense(layout, divisor), []
    if residual is None or layout.value_codec == "fp32":
        return _gathered(layout, divisor, False), []
    return _gathered(layout, divisor, True), [residual.view(-1)]


def _option_problem(
    algorithm: str,
    value_codec: str,
    residual: Tensor | None,
    regions: SplitRegions | None,
    numel: int,
    size: int,
) -> str | None:
    """What is wrong with the options."""
    if algorithm not in ALGORITHMS:
        return f"expected algorithm to be one of {ALGORITHMS}, got {algorithm!r}"
    if value_codec not in PAIR_CODECS:
        return f"expected value_codec to be one of {PAIR_CODECS}, got {value_codec!r}"
    if algorithm == "split" and residual is None:
        return "expected residual to be given for algorithm='split', got None"
    if regions is not None and (regions.numel, regions.world_size) != (numel, size):
        return (
            f"expected regions to be those of {numel} elements and {size} ranks, got "
            f"{regions.numel} and {regions.world_size}"
        )
    return None
