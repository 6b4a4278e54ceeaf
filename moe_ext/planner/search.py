"""Search for the quickest placement: enumeration, bounds, and simulated pipelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ext._checks import check_fields, check_rule
from moe_ext.dispatch.wire import LOSSLESS, rows_rate
from moe_ext.planner.axes import (
    AXES,
    CHUNKS,
    COMBINES,
    DEFAULTS,
    DISPATCHERS,
    GRADIENTS,
    KV_WIRES,
    MESH,
    OFFLOADS,
    SCHEDULES,
    SCHEMES,
    WIRES,
    Choice,
    Columns,
    choice_of,
    columns_of,
    divisors,
    masked,
    number_of,
    one_of,
    runs,
)
from moe_ext.planner.cost import StepCost
from moe_ext.planner.stage_layers import (
    StageLayers,
    divide,
    divisible,
    even_stages,
    rank_columns,
    simulated,
)

# Axes other than the mesh, by the axis of the mesh without which they have no effect; "" for axes
# that always act.
_GROUPS = {
    "pp": ("schedule", "turns"),
    "": ("zero", "recompute", "offload", "gradients"),
    "ep": ("dispatcher", "wire", "combine", "balance"),
    "cp": ("scheme", "kv_wire"),
}
# Least number of placements whose pipelines are simulated. Further ones are simulated while all
# together have fewer passes of micro-batches through stages than `_PASSES`.
SIMULATED = 50
_PASSES = 2**15
# Most passes that are simulated for placements with "turns", whose simulation takes longer.
_TURN_PASSES = 2**13
# Most placements with uneven stages that are simulated in addition to `SIMULATED` placements.
_UNEVEN = 5
# Number of placements that are returned: the best one and its runners-up.
_RANKED = 3
_AT_ONCE = 2**18
_MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Found:
    """A placement with its time and memory.

    Attributes:
        choice: values by axis.
        seconds: seconds of a step.
        memory: bytes of the fullest rank.
        stages: layers of each stage, in order; empty for even stages that recompute all layers or
            none.
    """

    choice: Choice
    seconds: float
    memory: float
    stages: tuple[StageLayers, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self)


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search.

    Attributes:
        best: the quickest placement that fits; None if none fits.
        pareto: placements than which no other is both quicker and smaller, by closed forms;
            ascending in time.
        least: the placement with the smallest ratio of used to available memory.
        num_points: number of placements whose time was computed.
        num_too_large: number of these placements that do not fit.
        proven: True if no other placement can be better, by bounds of their times.
        runners_up: the second and third quickest of the simulated placements.
    """

    best: Found | None
    pareto: tuple[Found, ...]
    least: Found | None
    num_points: int
    num_too_large: int
    proven: bool
    runners_up: tuple[Found, ...] = ()


def meshes(cost: StepCost, *, all_shards: bool = False) -> Tensor:
    """Return the meshes `[C, 6]` whose sizes divide ranks, heads, experts and the batch.

    Args:
        cost: cost model of the job.
        all_shards: divide experts into shards even if whole experts on as many ranks send fewer
            rows.
    """
    m, job = cost.model, cost.job
    rows = []
    heads = m.num_kv_heads or m.num_heads
    for pp in divisors(job.num_ranks):
        if pp > m.num_layers:
            break
        stage = job.num_ranks // pp
        tps = [d for d in divisors(stage) if m.num_heads % d == 0 and heads % min(d, heads) == 0]
        # Tensor parallelism needs the quickest links, so it stays in the innermost level.
        tps = [d for d in tps if d <= cost.cluster.levels[0].size]
        spreads = _spreads(cost, stage, all_shards)
        # With local steps every rank of a stage is a worker with its own data, so tp and cp are 1.
        alone = job.local_steps > 1
        tps = tps[:1] if alone or m.recurrent is not None else tps
        for tp in tps:
            for cp in [1] if alone else divisors(stage // tp):
                # The zigzag layout cuts a sequence into 2 cp equal stretches. A rank without cp
                # takes a sequence of any length.
                if job.seq_len % (tp * (2 * cp if cp > 1 else 1)):
                    continue
                data = stage // (tp * cp)
                for micro in _MICRO_BATCHES:
                    if job.global_batch % (data * micro) == 0:
                        rows += [(pp, tp, cp, ep, etp, micro) for ep, etp in spreads]
    return torch.tensor(rows, dtype=torch.int64).view(-1, len(MESH))


def _spreads(cost: StepCost, stage: int, all_shards: bool) -> list[tuple[int, int]]:
    """Return pairs of the ranks that experts lie over, and the shards of each expert."""
    m, job, inner = cost.model, cost.job, cost.cluster.levels[0].size
    if not m.num_experts:
        return [(1, 1)]
    found = [(ep, 1) for ep in divisors(stage) if m.num_experts % ep == 0]
    even = float(job.imbalances(m.num_experts, m.num_experts).max()) <= 1.0
    for ep, _ in list(found) if job.local_steps == 1 else ():
        for etp in divisors(stage // ep)[1:]:
            fits = m.ffn_dim % etp == 0 and inner % etp == 0
            better = even and not all_shards and m.num_experts % (ep * etp) == 0
            if fits and not better:
                found.append((ep, etp))
    return found


def _options(cost: StepCost, fixed: Choice) -> dict[str, Tensor]:
    """Return the combinations of values `[O, A]` for each group of axes."""
    # Codecs that round change results, so they are used only if the caller fixes the axis. The
    # lossless codec is a candidate if its rate was measured.
    wires = [wire for wire in WIRES if "wire" in fixed or wire is None or _is_free(cost, wire)]
    codecs = [
        name for name in GRADIENTS if "gradients" in fixed or name == "none" or _is_free(cost, name)
    ]
    # Even loads need no balance, and `MoELayer` refuses balance together with a capacity.
    m, job = cost.model, cost.job
    uneven = m.num_experts and float(job.imbalances(m.num_experts, m.num_experts).max()) > 1.0
    balances = (0, 1) if job.capacity_factor is None and (uneven or "balance" in fixed) else (0,)
    ways = [
        (DISPATCHERS.index(way), WIRES.index(wire), COMBINES.index(back), balance)
        for way in DISPATCHERS
        for wire in wires
        for back in COMBINES
        for balance in balances
        if (way != "alltoall" or back == "exact") and (way != "allgather" or wire != LOSSLESS)
    ]
    rows = {
        "pp": list(itertools.product(range(len(SCHEDULES)), (0, 1))),
        "": [
            (zero, again, offload, GRADIENTS.index(codec))
            for zero, again, offload in itertools.product((0, 1, 2, 3), (0, 1), (0, 1))
            for codec in codecs
            if (not zero and not offload or job.local_steps == 1)
            # `CPUAdamW` refuses DTensors on a device, such as shards of FSDP2.
            and (not offload or zero < 2 and cost.cluster.host is not None)
            # FSDP2 averages gradients itself, and local steps do not average them.
            and (codec == "none" or zero < 2 and job.local_steps == 1)
        ],
        "ep": ways if m.num_experts else [(0, 0, 0, 0)],
        "cp": [
            (scheme, wire)
            for scheme in range(len(SCHEMES))
            for wire in range(len(KV_WIRES) if "kv_wire" in fixed else 1)
            # "ulysses" exchanges heads without rounding, so only a ring has a wire format.
            if not (scheme and wire)
        ],
    }
    return {axis: _fixed(torch.tensor(rows[axis]), _GROUPS[axis], fixed) for axis in _GROUPS}


def _is_free(cost: StepCost, codec: str) -> bool:
    """Return True if a codec does not change results and its rate was measured."""
    rate = rows_rate(LOSSLESS, cost.codecs.dtype)
    return codec == LOSSLESS and cost.codecs.measured(rate) is not None


def gradients_problem(choice: Mapping[str, int | str | None]) -> str | None:
    """Return the reason why a placement cannot have its codec of gradients, or None."""
    codec = choice.get("gradients", "none")
    if codec == "none":
        return None
    if choice.get("zero") in (2, 3):
        why = f"zero={choice['zero']}, got {codec!r}: FSDP2 averages gradients itself"
    elif (choice.get("tp") or 1) != 1:
        why = f"tp={choice['tp']}, got {codec!r}: codecs take no shards of tensor parallelism"
    elif (choice.get("etp") or 1) != 1:
        why = f"etp={choice['etp']}, got {codec!r}: codecs take whole experts"
    else:
        return None
    return f"expected gradients to be 'none' with {why}"


def _expand(cost: StepCost, mesh: Tensor, options: Mapping[str, Tensor]) -> Columns:
    """Return the candidates of some meshes, grouped by the groups of axes that act."""
    parts, own = [], {name: mesh[:, i] for i, name in enumerate(MESH)}
    ranks = {"pp": own["pp"], "ep": own["ep"] * own["etp"], "cp": own["cp"]}
    ranks[""] = own["pp"] + 1
    acts = torch.stack([ranks[axis] > 1 for axis in options], 1)
    for kind in acts.unique(dim=0):
        here = mesh[(acts == kind).all(1)].T
        # Axes are rows here, so that the numbers of a column of candidates are contiguous.
        found = torch.empty(0, 1, dtype=torch.int64)
        for (axis, rows), acting in zip(options.items(), kind.tolist(), strict=True):
            if not acting:
                plain = torch.tensor([number_of(name, DEFAULTS[name]) for name in _GROUPS[axis]])
                rows = rows[(rows == plain).all(1)]
            found = _crossed(found, rows.T)
        parts.append(_crossed(here, found))
    names = [*MESH, *(name for axis in options for name in _GROUPS[axis])]
    c = dict(zip(names, torch.cat(parts, 1), strict=True))
    inner = cost.cluster.levels[0].size
    micro = cost.sizes.num_micro_batches(c)
    keep = ~runs(c, "interleaved") | (
        (micro % c["pp"] == 0) & (c["pp"] * CHUNKS <= cost.model.num_layers)
    )
    # The hierarchical dispatcher needs whole nodes, and more than one.
    width = c["ep"] * c["etp"]
    nodes = (width > inner) & (width % inner == 0)
    keep &= (c["dispatcher"] != DISPATCHERS.index("hierarchical")) | nodes
    # Codecs of gradients take no shards of tp or of experts, and a single rank in a stage sends no
    # gradients.
    alone = (c["tp"] == 1) & (c["etp"] == 1) & (c["pp"] < cost.job.num_ranks)
    keep &= (c["gradients"] == 0) | alone
    # "ulysses" gives each rank of a sequence the same number of heads, of queries and of keys.
    heads = cost.model.num_heads, cost.model.num_kv_heads or cost.model.num_heads
    shared = [count % (c["tp"] * c["cp"]) == 0 for count in heads]
    keep &= (c["scheme"] == 0) | (shared[0] & shared[1])
    # "turns" overlaps exchanges of whole experts that are not moved.
    keep &= (c["turns"] == 0) | ((c["ep"] > 1) & (c["etp"] == 1) & (c["balance"] == 0))
    # Shards of experts work with none of a wire format, balance and FSDP2.
    whole = (c["wire"] == 0) & (c["balance"] == 0) & (c["zero"] < 2)
    keep &= (c["etp"] == 1) | whole
    # Pipelines run stages without FSDP2, which would reduce gradients for each micro-batch.
    keep &= (c["zero"] < 2) | (c["pp"] == 1)
    # `CPUAdamW` refuses DTensors on a device, such as shards of tp.
    keep &= (c["offload"] == OFFLOADS.index("none")) | (c["tp"] == 1)
    c = masked({name: c[name] for name in AXES}, keep)
    balances = options["ep"][:, _GROUPS["ep"].index("balance")]
    if bool((balances == 0).any()):
        # If moving experts never pays, a placement with balance equals that without.
        c = masked(c, (c["balance"] == 0) | cost.loads.moves(c))
    return c


def check_placement(cost: StepCost, found: Found) -> None:
    """Raise ValueError for a choice that `search` cannot make, or stages of another model."""
    choice = found.choice
    _check_fixed(cost, choice)
    mesh = _fixed(meshes(cost, all_shards=True), MESH, choice)
    if not len(mesh) or not len(_expand(cost, mesh, _options(cost, choice))["pp"]):
        raise ValueError(
            f"plan: expected choice to be a placement of the model on {cost.job.num_ranks} ranks, "
            f"got {choice}"
        )
    wanted = even_stages(cost.model.num_layers, columns_of([choice]))
    starts = [0, *(stage.end for stage in found.stages)]
    for stage, start in zip(found.stages, starts, strict=False):
        again = range(stage.start, stage.end if choice["recompute"] else stage.start)
        if stage.start != start or stage.end <= start or not {*stage.again} <= {*again}:
            raise ValueError(
                f"plan: expected stages to have layers in turn, and again some of them with "
                f"recompute=1, got {stage}"
            )
    if found.stages and (len(found.stages), starts[-1]) != (len(wanted), cost.model.num_layers):
        raise ValueError(
            f"plan: expected {len(wanted)} stages of {cost.model.num_layers} layers, got "
            f"{len(found.stages)} of {starts[-1]}"
        )


def _crossed(above: Tensor, below: Tensor) -> Tensor:
    """Stack each column of `above` on each column of `below`; columns of `above` vary slowest."""
    more, many = above.repeat_interleave(below.shape[1], 1), above.shape[1]
    return torch.cat([more, below.repeat(1, many)])


def _check_fixed(cost: StepCost, fixed: Choice) -> None:
    """Raise ValueError for values, or pairs of values, that no placement of the job has."""
    steps = cost.job.local_steps
    tp, rule = fixed.get("tp", 1), "1 for a model with recurrent layers, which are not divided"
    check_rule("plan", "tp", tp, rule, cost.model.recurrent is None or tp == 1)
    names = ("tp", "cp", "etp", "zero", "offload", "gradients")
    for name in names if steps > 1 else ():
        if fixed.get(name, DEFAULTS[name]) != DEFAULTS[name]:
            raise ValueError(
                f"plan: expected {name} to be {DEFAULTS[name]} with local_steps={steps}, got "
                f"{fixed[name]}"
            )
    on_host = fixed.get("offload") == "host"
    if on_host and cost.cluster.host is None:
        raise ValueError("plan: expected offload to be 'none' without cluster.host, got 'host'")
    for name, served in (("tp", (1,)), ("zero", (0, 1))):
        if on_host and name in fixed and fixed[name] not in served:
            raise ValueError(
                f"plan: expected {name} to be in {served} with offload='host', got {fixed[name]}"
            )
    if (fixed.get("wire"), fixed.get("dispatcher")) == (LOSSLESS, "allgather"):
        raise ValueError(
            "plan: expected dispatcher to be 'alltoall', 'dedup' or 'hierarchical' with "
            f"wire={LOSSLESS!r}, got 'allgather', which gathers rows of one length"
        )
    problem = gradients_problem(fixed)
    if problem is not None:
        raise ValueError(f"plan: {problem}")


def _fixed(rows: Tensor, names: Sequence[str], fixed: Choice) -> Tensor:
    for i, name in enumerate(names):
        if name in fixed:
            rows = rows[rows[:, i] == number_of(name, fixed[name])]
    return rows


def search(
    cost: StepCost,
    *,
    fixed: Mapping[str, int | str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    exhaustive: bool = False,
) -> SearchResult:
    """Find the quickest placement that fits into memory.

    The search is branch and bound. Meshes are costed in ascending order of a bound: the products of
    equal stages. The search stops at the first mesh whose bound exceeds the times found. Then 50
    placements, in the order of the estimate `StepCost.likely`, get the layers of their stages
    (`stage_layers.divide`), and their pipelines are simulated. A placement is skipped if its bound
    (`StepCost.least`) exceeds the third best simulated time. Placements with "turns" follow, for up
    to 8192 passes of micro-batches through stages. Placements that only fit with uneven stages come
    last, at most five beyond the 50. Of equal times the first in this order wins.

    Args:
        cost: cost model of the job.
        fixed: values that axes must have; with ``recompute=1`` all layers are computed again,
            otherwise as few as fit.
        progress: called with the number of costed meshes and of all meshes, and then, for each
            simulated pipeline, with the number of all meshes twice.
        exhaustive: simulate all placements, for tests.

    Raises:
        ValueError: an axis is unknown, or no placement has the values of `fixed`.
    """
    fixed = dict(fixed or {})
    for name, value in fixed.items():
        number_of(name, value)
    _check_fixed(cost, fixed)
    mesh = _fixed(meshes(cost, all_shards="etp" in fixed), MESH, fixed)
    options = _options(cost, fixed)
    num_options = math.prod(map(len, options.values()))
    none = (
        f"plan: expected ranks, heads, experts, sequence and batch to have a mesh of "
        f"{cost.job.num_ranks} ranks with {fixed}, got none; change seq_len, global_batch or fixed"
    )
    if not len(mesh) or not num_options:
        raise ValueError(none)
    c = {name: mesh[:, i] for i, name in enumerate(MESH)}
    bounds = cost.bound(c)
    order = torch.argsort(bounds, stable=True)
    mesh, bounds = mesh[order], bounds[order]
    all_again = fixed.get("recompute") == 1
    at_once = max(1, _AT_ONCE // num_options)
    kept: list[Columns] = []
    # Candidates that do not fit with even stages, but may fit with others.
    uneven: list[Columns] = []
    points = too_large = 0
    # Estimated time of the last of the placements to simulate, least bound of the placements that
    # are not simulated, and least ratio of used to available memory.
    limit, left, nearest = float("inf"), float("inf"), float("inf")
    least: Found | None = None
    for start in range(0, len(mesh), at_once):
        if float(bounds[start]) > limit and not exhaustive:
            left = min(left, float(bounds[start]))
            break
        columns = _expand(cost, mesh[start : start + at_once], options)
        if progress is not None:
            progress(min(start + at_once, len(mesh)), len(mesh))
        if not len(columns["pp"]):
            continue
        memory = cost.memory.fullest(columns)
        points += len(memory)
        fits = cost.memory.fits(columns, memory)
        too_large += int((~fits).sum())
        over = cost.memory.over(columns, memory)
        i = int(over.argmin())
        if float(over[i]) < nearest:
            nearest = float(over[i])
            seconds = float(cost.seconds(one_of(columns, i)))
            least = Found(choice_of(columns, i), seconds, float(memory[i]))
        # A placement whose even stages do not fit may fit with other stages. Only its twin with
        # recompute is kept, since `divide` decides which layers are computed again.
        others = ~fits & (columns["pp"] > 1)
        if "recompute" not in fixed:
            others &= (columns["recompute"] == 1) | runs(columns, "zb-h1")
        if bool(others.any()):
            rest = {**masked(columns, others), "memory": memory[others]}
            uneven.append(masked(rest, cost.memory.may_fit(rest)))
        if not bool(fits.any()):
            continue
        costed = {**masked(columns, fits), "memory": memory[fits]}
        costed = _costed(cost, costed, all_again=all_again)
        if not exhaustive:
            best = _best(costed)
            left = min([left, *costed["bound"][~best].tolist()])
            costed = masked(costed, best)
        kept.append(costed)
        plain = [each["likely"][each["turns"] == 0] for each in kept]
        times = torch.cat(plain).sort().values
        if len(times) >= SIMULATED:
            limit = float(times[SIMULATED - 1])
    if points == 0:
        raise ValueError(none)
    if not kept and not any(len(each["pp"]) for each in uneven):
        return SearchResult(None, (), least, points, too_large, True)
    num_simulated = passes = turn_passes = num_uneven = 0
    most = math.inf
    # The best simulated placements, in ascending order of time.
    ranked: list[Found] = []
    front: tuple[Found, ...] = ()
    for is_even, parts in ((True, kept), (False, uneven)):
        if not parts:
            continue
        c = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        if not is_even:
            # Few placements with uneven stages have bounds below the third best time found so far.
            for least_of in (cost.bound, cost.least):
                if len(c["pp"]) and most < math.inf:
                    c = masked(c, least_of(c) < most)
            if not len(c["pp"]):
                continue
            c = _costed(cost, c, all_again=all_again, even=False)
            enough = num_simulated >= SIMULATED and passes >= _PASSES
            tried = c["likely"] < (most if enough else math.inf)
            if not exhaustive:
                quick = torch.argsort(c["likely"], stable=True)
                tried[quick[10 * SIMULATED * len(parts) :]] = False
                left = min([left, *c["bound"][~tried].tolist()])
            if bool(tried.any()):
                tried[tried.clone()] = divisible(cost, masked(c, tried))
            c = masked(c, tried)
        order = torch.argsort(c["likely"], stable=True)
        if is_even:
            front = _front(c)
            order = order[torch.argsort(c["turns"][order], stable=True)]
        for i in order.tolist():
            bound = float(c["bound"][i])
            if bound >= most and most < math.inf:
                continue
            enough = num_simulated >= SIMULATED and passes >= _PASSES
            one = one_of(c, i)
            here, in_turn = int(one["pp"] * cost.sizes.num_micro_batches(one)), bool(one["turns"])
            spent = turn_passes + here > _TURN_PASSES if in_turn else enough and is_even
            if not is_even and enough:
                spent |= float(c["likely"][i]) >= most or num_uneven == _UNEVEN
                num_uneven += not spent
            if spent and not exhaustive:
                left = min(left, bound)
                continue
            if progress is not None:
                progress(len(mesh), len(mesh))
            passes, turn_passes = passes + here * (not in_turn), turn_passes + here * in_turn
            stages = divide(cost, one, all_again=all_again)
            if (
                stages is None
                and "recompute" not in fixed
                and not bool(one["recompute"] | runs(one, "zb-h1"))
            ):
                # Even stages fit by closed forms without recompute, but the real ones may not. The
                # placement is tried again with recompute.
                one = {**one, "recompute": torch.ones_like(one["recompute"])}
                stages = divide(cost, one)
            if stages is None:
                continue
            seconds = simulated(cost, one, stages, most=most)
            if seconds == math.inf:
                continue
            num_simulated += 1
            if len(ranked) == _RANKED and seconds >= ranked[-1].seconds:
                continue
            fullest = float(cost.memory.fullest(rank_columns(cost, one, stages)).max())
            ranked.append(Found(choice_of(one, 0), seconds, fullest, stages))
            ranked = sorted(ranked, key=lambda each: each.seconds)[:_RANKED]
            if len(ranked) == _RANKED and not exhaustive:
                most = ranked[-1].seconds
    found_best = ranked[0] if ranked else None
    if found_best is None and least is not None and nearest <= 1.0:
        # This placement fits only by closed forms, which give each stage the mean layer. Its memory
        # is replaced by that of real even stages.
        columns = columns_of([least.choice])
        even = even_stages(cost.model.num_layers, columns)
        fullest = float(cost.memory.fullest(rank_columns(cost, columns, even)).max())
        least = replace(least, memory=fullest, stages=even)
    proven = found_best is not None and left >= found_best.seconds
    return SearchResult(*(found_best, front, least, points, too_large, proven), tuple(ranked[1:]))


def _costed(cost: StepCost, c: Columns, *, all_again: bool, even: bool = True) -> Columns:
    """Add the estimates of closed forms, which take stages as even and alike, to candidates.

    The column "seconds" is of a step that computes all layers again, or none. "likely" interpolates
    between none and all, for as few layers as have to be computed again to fit. "bound" is a lower
    bound of the seconds of a step for any division into stages.

    Args:
        cost: cost model of the job.
        c: candidates, with a column "memory".
        all_again: with recompute, all layers are computed again.
        even: True if the candidates fit with even stages.
    """
    seconds, bound = cost.seconds(c), cost.least(c)
    share = c["recompute"].double()
    # With zb-h1 a stage runs again whole.
    some = (share == 1) & ~runs(c, "zb-h1") & (not all_again)
    if bool(some.any()):
        part = masked(c, some)
        full = cost.memory.fullest({**part, "recompute": torch.zeros_like(part["recompute"])})
        saved = (full - part["memory"]).clamp(min=1e-9)
        share[some] = ((full - cost.cluster.memory) / saved).clamp(0.0, 1.0)
    likely = torch.where(runs(c, "interleaved"), seconds, cost.likely(c, share))
    # A placement that fits without recompute is among the candidates already.
    known = some & (share == 0) & even
    likely[known] = bound[known] = torch.inf
    return {**c, "seconds": seconds, "likely": likely, "bound": bound}


def _front(c: Columns) -> tuple[Found, ...]:
    """Return the Pareto front: candidates that take less memory than all quicker candidates."""
    found, smallest = list[Found](), math.inf
    for i in torch.argsort(c["seconds"], stable=True).tolist():
        if float(c["memory"][i]) < smallest:
            smallest = float(c["memory"][i])
            found.append(Found(choice_of(c, i), float(c["seconds"][i]), smallest))
    return tuple(found)


def _best(c: Columns) -> Tensor:
    """Return a mask of the quickest candidates and of those on the Pareto front."""
    found = torch.zeros(len(c["seconds"]), dtype=torch.bool)
    order = torch.argsort(c["seconds"], stable=True)
    falls = c["memory"][order].cummin(0).values
    found[order[0]] = True
    found[order[1:]] = falls[1:] < falls[:-1]
    for in_turn in (0, 1):
        others = c["turns"] != in_turn
        quick = torch.argsort(c["likely"].masked_fill(others, torch.inf), stable=True)
        quick = quick[: 10 * SIMULATED]
        found[quick[~others[quick]]] = True
    return found
