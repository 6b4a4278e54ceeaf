"""The smallest work there is: no tokens, one of K, no positions, one micro-batch, one rank.

One pairwise table for each registry, whose names are read from it: a newcomer is in the table.
"""

import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from pairwise import pairs
from rank_checks import Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moe_ext
from moe_ext._bytes import as_bytes
from moe_ext.attention import LAYOUTS, ring_attention, shard_sequence, unshard_sequence
from moe_ext.attention.schemes import SCHEME_NAMES
from moe_ext.compression.codecs.registry import codec_names, codec_of
from moe_ext.dispatch import COMBINES, DISPATCHERS
from moe_ext.dispatch.wire import WIRES
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import Capacity, Rebalance, RowBudget
from moe_ext.pipeline import SCHEDULES, Costs, Pipeline, make_table, plan_turns

# float64, few products: as elsewhere. float32: some dozens of numbers near one.
TIGHT, SINGLE = {"rtol": 1e-11, "atol": 1e-12}, {"rtol": 1e-5, "atol": 1e-6}


@functools.cache
def alone():
    """A group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


GROUPS = {"one rank": alone, "all ranks": lambda: dist.group.WORLD}


def or_refused(make, refused):
    """What `make` makes; None, and noted, where the package says that it does not go together."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        assert ": expected " in str(error), error
        refused.append(str(error))
        return None


def each(table, check, *refused):
    """Calls the check with each row of a table, and gives how many there are."""
    for case in table:
        try:
            check(*case, *refused)
        except Exception as error:
            raise AssertionError(f"{case}") from error
    return len(table)


def with_others(table, *parameters):
    """Each row of a table with the next of all combinations of further parameters."""
    others = itertools.cycle(itertools.product(*parameters))
    return [(*row, *other) for row, other in zip(table, others, strict=False)]


# -- experts: every dispatcher ---------------------------------------------------------------------

# These need NVIDIA's GPUs; "auto" takes one of the others after a rehearsal; nodes are tried apart.
ELSEWHERE = ("nccl_ep", "deep_ep", "symm_mem", "auto", "hierarchical")
FLAT = [name for name in DISPATCHERS if name not in ELSEWHERE]
TOKENS = {
    "none": lambda rank: 0,
    "none on one rank": lambda rank: rank,
    "one in all": lambda rank: int(rank == 1),
    "one each": lambda rank: 1,
}
OPTIONS = {
    "plain": {},
    "capacity": {"capacity": Capacity(1.0)},
    "reroute": {"capacity": Capacity(0.5, overflow="reroute", groups=2)},
    "padded": {"capacity": Capacity(1.0, pad=True)},
    "budget": {"row_budget": RowBudget(1)},
    "static": {"row_budget": RowBudget(12, static=True)},
    "overlap": {"overlap": 2},
    "rebalance": {"rebalance": Rebalance("exact", break_even=0)},
}


def experts(refused, dispatchers=FLAT):
    # Each dispatcher with each option meets each size: a fault wants all three.
    ways = itertools.product(dispatchers, OPTIONS)
    sizes = [*itertools.product(TOKENS, (1,), ("all ranks",)), ("none on one rank", 2, "all ranks")]
    table = with_others(pairs(ways, [*sizes, ("one each", 1, "one rank")]), COMBINES, WIRES, (1, 2))
    return each(table, check_experts, refused)


def nodes(refused):
    return experts(refused, ["hierarchical"])


def check_experts(way, size, combine, wire, local, refused):
    (dispatcher, option), (tokens, top_k, group) = way, size
    group, rank = GROUPS[group](), dist.get_rank()
    ranks = dist.get_world_size(group)
    num_experts, top_k = ranks * local, min(top_k, ranks * local)
    given = {"balance": 0.1, **OPTIONS[option]}
    fields = {n: given.pop(n) for n in ("overlap", "rebalance") if n in given}

    def make():
        how = moe_ext.nn.Dispatch(dispatcher, combine=combine, wire=wire, **fields)
        sizes = (4, 3, num_experts, top_k)
        return moe_ext.MoELayer(*sizes, ep_group=group, dispatcher=how, **given)

    layer = or_refused(make, refused)
    if layer is None:
        return
    torch.manual_seed(0)
    alike = {k: v for k, v in given.items() if k != "row_budget"}
    whole = moe_ext.MoELayer(4, 3, num_experts, top_k, **alike)
    own = slice(dist.get_rank(group) * local, (dist.get_rank(group) + 1) * local)
    with torch.no_grad():
        for p, q in zip(layer.parameters(), whole.parameters(), strict=True):
            part = local_part(p)
            part.copy_(q if part.shape == q.shape else q[own])
    x = torch.randn(TOKENS[tokens](rank), 4, generator=torch.Generator().manual_seed(rank))
    found = []
    for each in (layer, whole):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.square().sum().backward()
        found.append((y.detach(), leaf.grad))
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        if wire in (None, "lossless") or ranks == 1:
            torch.testing.assert_close(a, b, **SINGLE)


# -- attention: every scheme -----------------------------------------------------------------------


@functools.cache
def mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))


ATTENTION_GROUPS = {
    **GROUPS,
    "ranks in a row": lambda: mesh((1, dist.get_world_size())),
    "ranks in a column": lambda: mesh((dist.get_world_size(), 1)),
}
DOCUMENTS = {
    "one": lambda length, batch: None,
    "some": lambda length, batch: (0, 0, length // 2, length),
    "of each row": lambda length, batch: [
        (0, i % 2 * (length // 2), length // 2, length) for i in range(batch)
    ],
}


def attention(refused):
    # Documents and a length together: each pair of them meets each group.
    sizes = itertools.product(DOCUMENTS, (0, 1, 2, 4))
    table = pairs(sizes, ATTENTION_GROUPS, SCHEME_NAMES, LAYOUTS)
    table = with_others(table, (1, 2), (False, True), (1, 2))
    return each(table, check_attention, refused)


def check_attention(size, group, scheme, layout, batch, is_causal, dim, refused):
    documents, length = size
    group = ATTENTION_GROUPS[group]()
    cu_seqlens = DOCUMENTS[documents](length, batch)
    generator = torch.Generator().manual_seed(1)
    shape = (4, batch, dist.get_world_size(), length, dim)
    *inputs, weight = torch.randn(*shape, dtype=torch.float64, generator=generator).unbind()
    where = {"group": group, "layout": layout}
    if not isinstance(cu_seqlens, list):
        where["cu_seqlens"] = cu_seqlens
    if or_refused(lambda: shard_sequence(weight, dim=2, **where), refused) is None:
        return
    found = []
    for here in (True, False):
        leaves, factor = [x.clone() for x in inputs], weight
        if here:
            *leaves, factor = (shard_sequence(x, dim=2, **where) for x in (*inputs, weight))
        leaves = [x.requires_grad_() for x in leaves]
        how = {"group": group, "layout": layout, "scheme": scheme} if here else {"group": None}
        options = {"is_causal": is_causal, "cu_seqlens": cu_seqlens, **how}
        out = or_refused(lambda: ring_attention(*leaves, **options), refused)  # noqa: B023
        if out is None:
            return
        (out * factor).sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(unshard_sequence(a, dim=2, **where), b, **TIGHT)


# -- pipelines: every schedule ---------------------------------------------------------------------


def pipelines(refused):
    # Planned or not, and the size, together: each schedule meets all of both. Fewer
    # micro-batches than ranks hung in torchtitan #775.
    sizes = [("one rank", 1), ("all ranks", 1), ("all ranks", 2)]
    ways = itertools.product(SCHEDULES, (False, True))
    table = pairs(ways, sizes, (False, True), (0, 1))
    return each(table, check_pipeline, refused)


def check_pipeline(way, size, recompute, rows, refused):
    (schedule, planned), (group, micro) = way, size
    group, rank = GROUPS[group](), dist.get_rank()
    ranks = dist.get_world_size(group)
    table = or_refused(lambda: make_table(schedule, ranks, micro), refused)
    if table is None:
        return
    # Several stages of a rank, which receive from the same other rank in turn.
    plan = plan_turns(table, Costs(exchanges={"F": [(0.3, 0.5)]})) if planned else table
    torch.manual_seed(2)
    whole = nn.ModuleList(nn.Linear(2, 2) for _ in range(table.num_stages)).double()
    owned = {s for (_, s), r in table.rank_of.items() if r == dist.get_rank(group)}
    torch.manual_seed(2)
    mine = nn.ModuleList(nn.Linear(2, 2) for _ in range(table.num_stages)).double()
    seed = 0 if ranks > 1 else rank
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, micro, rows, 2, dtype=torch.float64, generator=generator).unbind()
    pipeline = Pipeline(
        plan, {s: mine[s] for s in owned}, sum_of_squares, group=group, recompute=recompute
    )
    for _ in range(2):
        first, last = 0 in owned, table.num_stages - 1 in owned
        pipeline.step(list(x) if first else (), list(y) if last else ())
    for a, b in zip(x, y, strict=True):
        (2 * sum_of_squares(nn.Sequential(*whole)(a), b) / micro).backward()
    for stage in owned:
        for p, q in zip(mine[stage].parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **TIGHT)


def sum_of_squares(out, target):
    # The mean of no rows is NaN.
    return (out - target).square().sum()


# -- gradients: every codec ------------------------------------------------------------------------

# "auto" is no codec, but a choice between some.
CODECS = [name for name in codec_names() if name != "auto"]
MEMORY = {
    "its own": lambda x: x,
    # What a slice of a matrix leaves: a row of one element, or none, with any stride.
    "strided": lambda x: (
        torch.cat([x, x.new_zeros(8 * max(len(x), 1))]).as_strided(x.shape, (7,))
        if len(x) < 2
        else x
    ),
}


def gradients(refused):
    table = pairs(CODECS, GROUPS, (0, 1, 2, 17), (torch.float32, torch.bfloat16), MEMORY)
    return each(table, check_gradient)


def check_gradient(name, group, numel, dtype, memory):
    group = GROUPS[group]()
    size, codec = dist.get_world_size(group), codec_of(name, 0.5)
    parts = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(dist.get_world_size())
    ]
    # Some write the mean in place.
    grad = MEMORY[memory](parts[dist.get_rank()].clone())
    kept = codec.new_memory(grad)
    out = codec.start(grad, kept, group=group, average=True).wait()
    assert out.shape == (numel,) and out.isfinite().all()
    mean = torch.stack(parts).double().mean(0) if size > 1 else parts[dist.get_rank()].double()
    if not codec.lossy:
        # A rounding of the dtype for each addition, and one of the quotient.
        bound = 4 * torch.finfo(dtype).eps * torch.stack(parts).double().abs().sum(0)
        assert ((out.double() - mean).abs() <= bound).all()
    else:
        # No codec makes a gradient of another size than those that it was given.
        assert out.double().norm() <= 2 * torch.stack(parts).double().norm() + 1e-6


# -- all of them -----------------------------------------------------------------------------------


def run_kind(kind):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    alone()
    refused = []
    count = kind(refused)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, refused)
    assert told == [refused] * len(told)
    assert len(refused) < 0.8 * count, "some are served"


# By the number of ranks: four make two nodes, three divide nothing.
KINDS = {2: (experts,), 3: (attention, pipelines, gradients), 4: (nodes,)}
CHECKS = {
    num_ranks: Checks({kind.__name__: functools.partial(run_kind, kind) for kind in kinds})
    for num_ranks, kinds in KINDS.items()
}


@pytest.mark.parametrize(
    ("num_ranks", "kind"), [(num_ranks, kind) for num_ranks in CHECKS for kind in CHECKS[num_ranks]]
)
def test_ranks_with_the_least_to_do_equal_one_process(num_ranks, kind):
    CHECKS[num_ranks].assert_passed(num_ranks, kind, timeout=150, group_timeout=20)


STRIDED = {
    "no rows": lambda x: x.as_strided((0, 1), (1, 5)),
    "rows of one": lambda x: x.as_strided((3, 1), (1, 5)),
    "one": lambda x: x.as_strided((1, 1), (3, 7)),
    "one in a row": lambda x: x.as_strided((1,), (7,)),
    "none in a row": lambda x: x.as_strided((0,), (7,)),
    "gaps": lambda x: x[::2],
    "no dimension": lambda x: x[3],
    "columns": lambda x: x.view(5, 4).t(),
}


@pytest.mark.parametrize("name", STRIDED)
def test_bytes_of_any_strides(name):
    x = STRIDED[name](torch.arange(20, dtype=torch.int16))
    wanted = bytes(x.clone(memory_format=torch.contiguous_format).numpy().tobytes())
    assert bytes(as_bytes(x).tolist()) == wanted
