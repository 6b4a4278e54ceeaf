"""Dispatchers that send a token once to a rank, against one that sends a row for each expert."""

import copy
import functools
import itertools
import math

import torch
import torch.distributed as dist
from dispatchers import assert_same_bits, dispatcher, sent_messages, tokens
from pairwise import FULL, pairs
from rank_checks import Checks, raised
from torch.utils.checkpoint import checkpoint

from moe_ext import MoELayer
from moe_ext.comm import c10d
from moe_ext.distributed import (
    AllGatherDispatcher,
    DedupDispatcher,
    HierarchicalDispatcher,
    count_traffic,
)
from moe_ext.nn import Dispatch, RowBudget

E, D, K = 12, 8, 4  # E is a multiple of every group size used
WAYS = ("dedup", "hierarchical", "allgather")
NODES = {2: 1, 3: 2}  # by the last rank


def layer(way, combine="exact", dtype=torch.float64, **options):
    torch.manual_seed(3)
    made = dispatcher(way, E, combine=combine)
    return MoELayer(D, 6, E, K, ep_group=dist.group.WORLD, dispatcher=made, dtype=dtype, **options)


def spread(way):
    """Options of a layer with a dispatcher of its own."""
    options = {"ep_group": dist.group.WORLD, "dispatcher": way}
    if way == "hierarchical":
        node_size = NODES[dist.get_world_size() - 1]
        options["dispatcher"] = HierarchicalDispatcher(E, dist.group.WORLD, node_size=node_size)
    return options


def step(way, combine="exact", size=9, mask=None, x_grad=True, frozen=(), **options):
    """Output and all gradients of one step."""
    one = layer(way, combine, **options)
    for part in frozen:
        getattr(one, part).requires_grad_(False)
    x = tokens(size, D, options.get("dtype", torch.float64)).requires_grad_(x_grad)
    y = one(x, token_mask=mask)
    if y.requires_grad:
        y.float().square().sum().backward()
    grads = [x.grad, *[p.grad for p in one.parameters()]]
    return [y, *[g for g in grads if g is not None]], one


def cases():
    """Options of a step that a dispatcher has to get through."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    yield {}
    yield {"dtype": torch.bfloat16}
    yield {"shared_expert": 4, "bias": True}
    yield {"capacity": 0.5, "size": 40}
    yield {"mask": torch.arange(9) % 2 == rank % 2}
    yield {"mask": torch.full((9,), rank > 0)}
    yield {"x_grad": rank > 0}
    yield {"x_grad": False}
    yield {"x_grad": False, "frozen": ["router"]}
    # No rank has tokens; the first or the last one alone has any, or alone has none.
    yield {"size": 0}
    for odd in (0, num_ranks - 1):
        yield {"size": 4 * (rank == odd)}
        yield {"size": 4 * (rank != odd)}


def frozen_cases():
    """Options of steps in which no rank has a gradient, or only that of others' tokens."""
    rank, everything = dist.get_rank(), ["router", "experts"]
    for budget, x_grad in itertools.product((None, RowBudget(8)), (False, rank > 0)):
        yield {"row_budget": budget, "x_grad": x_grad, "frozen": everything}
    yield {"x_grad": rank > 0, "frozen": ["router"]}


def by_way(cases, ways):
    """Each case's options with its ways and combines.

    On four ranks any two of a case, a way and a combine meet. On fewer, whose nodes are one rank
    each, ways and combines take turns.
    """
    cases, combines = list(cases), ("exact", "reduced")
    chosen = pairs(range(len(cases)), ways, combines)
    if not FULL and dist.get_world_size() != 4:
        chosen = [(i, ways[i % len(ways)], combines[i // len(ways) % 2]) for i in range(len(cases))]
    for number, options in enumerate(cases):
        yield options, [(way, combine) for i, way, combine in chosen if i == number]


def check_exact_gives_the_bits_of_a_row_for_each_expert_and_reduced_the_sums():
    for options, chosen in by_way(cases(), WAYS):
        want, plain = step("alltoall", **options)
        for way, combine in chosen:
            found, other = step(way, combine, **options)
            assert_close(found, want, options, combine)
            dropped = other.metrics["num_dropped"], plain.metrics["num_dropped"]
            assert torch.equal(*dropped), options


def check_ranks_take_part_in_a_backward_pass_where_any_has_one():
    for options, chosen in by_way(frozen_cases(), WAYS[:2]):
        want, _ = step("alltoall", **options)
        for way, combine in chosen:
            found, _ = step(way, combine, **options)
            assert found[0].requires_grad == want[0].requires_grad
            assert_close(found, want, options, combine)


def budgeted_cases():
    rank = dist.get_rank()
    yield {"row_budget": RowBudget(13)}
    yield {"row_budget": RowBudget(500), "shared_expert": 4}
    yield {"row_budget": RowBudget(17), "dtype": torch.bfloat16, "bias": True}
    yield {"row_budget": RowBudget(11, overflow="drop"), "dtype": torch.bfloat16}
    yield {"row_budget": RowBudget(5), "size": 4 * (rank == 0), "capacity": 0.7}
    yield {"row_budget": RowBudget(8), "x_grad": rank > 0, "mask": torch.arange(9) > 3}


def check_a_row_budget_runs_the_rounds_of_a_row_for_each_expert():
    # On fewer ranks both ways have the same hops.
    ways = WAYS[: 2 if dist.get_world_size() == 4 else 1]
    for options, chosen in by_way(budgeted_cases(), ways):
        want, plain = step("alltoall", **options)
        for way, combine in chosen:
            with sent_messages() as sent:
                found, other = step(way, combine, **options)
            rows = [x for call in sent.call_args_list for x in call.args[:2]]
            largest = max(x.shape[0] for x in rows if x.is_floating_point())
            assert_close(found, want, options, combine)
            assert torch.equal(other.metrics["num_dropped"], plain.metrics["num_dropped"])
            # A node's ranks pass on what comes from the ranks of their place, one a node.
            assert largest <= options["row_budget"].rows * (2 if way == "hierarchical" else 1)


def assert_close(found, want, options, combine):
    """The same bits, but for what "reduced" rounds."""
    if combine == "exact":
        assert_same_bits(found, want)
        return
    # In bfloat16 one rounding more a rank, and a node, each of at most 2**-9 of a part of the sum;
    # gradients of weights add them up over tokens. Float64 adds in another order.
    rounded = options.get("dtype") == torch.bfloat16
    for a, b in zip(found, want, strict=True):
        allowed = (0.03 if rounded else 1e-13) * float(b.abs().max() if b.numel() else 0)
        torch.testing.assert_close(a, b, rtol=0, atol=allowed)


def check_a_dispatcher_alone_heeds_a_capacity():
    """A layer has taken away what is beyond it before."""
    x, found = tokens(40, D, torch.float64), {}
    generator = torch.Generator().manual_seed(dist.get_rank())
    idx = torch.rand(40, E, generator=generator).topk(K).indices
    weights = torch.rand(40, K, generator=generator, dtype=torch.float64)
    for way in ("alltoall", *WAYS):
        made = dispatcher(way, E)
        rows, offsets, metadata = made.dispatch(x, idx, weights, capacity=5)
        assert int(metadata.num_dropped) > 0 and int(offsets.diff().max()) <= 5 * made.num_ranks
        found[way] = made.combine(rows, metadata)
        assert_same_bits(found[way], found["alltoall"])


def check_ranks_in_another_order():
    """Experts go by the rank in the group: each multiplies by its number."""
    num_ranks = dist.get_world_size()
    group = dist.new_group([num_ranks - 1, *range(num_ranks - 1)], **c10d.IN_ORDER)
    x, here = tokens(9, D, torch.float64), E // num_ranks
    generator = torch.Generator().manual_seed(dist.get_rank())
    idx = torch.rand(9, E, generator=generator).topk(K).indices
    own = torch.arange(here) + here * dist.get_rank(group)
    for way in ("alltoall", *WAYS):
        made = dispatcher(way, E, group)
        rows, offsets, metadata = made.dispatch(x, idx, torch.ones(9, K, dtype=torch.float64))
        y = made.combine(rows * own.repeat_interleave(offsets.diff())[:, None], metadata)
        torch.testing.assert_close(y, x * idx.sum(1, keepdim=True))


def check_checkpointing_and_autocast():
    ways = ("alltoall", *WAYS) if dist.get_world_size() == 4 else (WAYS[0], WAYS[2])
    for way, combine in itertools.product(ways, ("exact", "reduced")):
        one = layer(way, combine, dtype=torch.float32)
        x = tokens(9, D).requires_grad_()
        one(x).square().sum().backward()
        want = [p.grad.clone() for p in one.parameters()]
        for use_reentrant in (False, True):
            one.zero_grad()
            checkpoint(one, x, use_reentrant=use_reentrant).square().sum().backward()
            assert_same_bits([p.grad for p in one.parameters()], want)
        with torch.autocast("cpu", torch.bfloat16):
            y = one(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()


def needed_ranks(one, x, per_rank):
    """[T, groups of ranks]: where each token has experts."""
    owner_TK = one.router(x).gate.topk_idx // per_rank
    return torch.nn.functional.one_hot(owner_TK, E // per_rank).amax(1)


def check_a_token_travels_once_to_a_rank():
    """Or to every rank, padded to the most tokens of a rank; there and back, by bytes."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = tokens(50 - rank, D, torch.float64)
    for way, combine in itertools.product(("dedup", "allgather"), ("exact", "reduced")):
        one = layer(way, combine)
        one(x)
        needed = needed_ranks(one, x, E // num_ranks).sum(0)
        others = [p for p in range(num_ranks) if p != rank]
        table = [torch.empty_like(needed) for _ in range(num_ranks)]
        dist.all_gather(table, needed)
        slots = torch.bincount(one.router(x).gate.topk_idx.flatten() // (E // num_ranks))
        all_slots = [torch.empty_like(slots) for _ in range(num_ranks)]
        dist.all_gather(all_slots, slots)
        once = sum(int(needed[p]) for p in others)
        there = len(others) * 50 if way == "allgather" else once
        back = sum(int((table if combine == "reduced" else all_slots)[p][rank]) for p in others)
        row, indices, weights = D * 8, K * 2, K * 8
        with count_traffic() as traffic, torch.no_grad():
            one(x)
        assert traffic.total_bytes == there * (row + indices + weights) + back * row
        # Indices, weights and, for few tokens, these themselves go in one message.
        assert sum(traffic.calls.values()) == (2 if way == "allgather" else 3)
        with count_traffic() as traffic:
            one(x.requires_grad_()).sum().backward()
        # The gradient of an output goes once to a rank, those of a token come back as results do.
        forward = there * (row + indices + weights) + back * row
        backward = once * row + back * row + sum(int(table[p][rank]) for p in others) * weights
        assert traffic.total_bytes == forward + backward


def check_a_token_travels_once_to_a_node():
    if dist.get_world_size() != 4:
        return
    rank, x = dist.get_rank(), tokens(50, D, torch.float64)
    one = layer("hierarchical", "reduced")
    one(x)
    nodes_T2 = needed_ranks(one, x, E // 2)
    with sent_messages() as sent:
        one(x)
    calls = [
        (dist.get_process_group_ranks(call.args[2]), call.args[1].shape[0])
        for call in sent.call_args_list
        if call.args[1].dtype == torch.float64 and call.args[1].shape[1] == D
    ]
    between, inside = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    assert [ranks for ranks, _ in calls] == [between, inside, inside, between]
    assert calls[0][1] == nodes_T2.sum()


def check_the_published_number_of_rows():
    """In expectation over random choices, within four standard errors of the mean."""
    num_ranks, num_tokens, num_experts, top_k = dist.get_world_size(), 4000, 24, 8
    generator = torch.Generator().manual_seed(dist.get_rank())
    idx = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    x = torch.zeros(num_tokens, 1)
    _, _, metadata = dispatcher("dedup", num_experts).dispatch(
        x, idx, torch.ones(num_tokens, top_k)
    )
    reached = torch.tensor(metadata.sent).double() / num_tokens
    behind = num_experts // num_ranks
    absent = math.comb(num_experts - behind, top_k) / math.comb(num_experts, top_k)
    error = math.sqrt(absent * (1 - absent) / num_tokens)
    torch.testing.assert_close(
        reached, torch.full_like(reached, 1 - absent), rtol=0, atol=4 * error + 1e-9
    )


def leave_a_weight_out(_router, _inputs, routed):
    gate = routed.gate
    return routed._replace(gate=gate._replace(topk_weights=gate.topk_weights[:, 1:]))


def check_a_bad_input_on_one_rank_raises_everywhere():
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    where = "" if mine else rf" on rank {last}"
    for way in WAYS:
        one = layer(way, dtype=torch.float32)
        x = tokens(9, D)
        text = r"expected x to be of shape \[..., 8\], got \(9, 5\)" + where
        raised(ValueError, text, one, x[:, :5] if mine else x)
        text = r"expected x to be floating point, got torch.int64" + where
        raised(TypeError, text, one, x.long() if mine else x)
        hook = leave_a_weight_out if mine else lambda *_: None
        with one.router.register_forward_hook(hook):
            text = r"topk_weights .* of the shape of topk_idx, \(9, 4\), got \(9, 3\)" + where
            raised(ValueError, text, one, x)
        one(x)


def check_a_slot_of_no_expert_on_one_rank_raises_everywhere():
    last, x = dist.get_world_size() - 1, tokens(9, D)
    mine = dist.get_rank() == last
    for way, number in itertools.product(("alltoall", *WAYS), (E, 2 * E, -2)):
        made, idx, weights = dispatcher(way, E), torch.zeros(9, K).long(), torch.ones(9, K)
        idx[2, 1] = number if mine else 1
        text = rf"expected topk_idx to be in \[0, {E}\) or -1, got {number} at token 2, choice 1"
        where = "" if mine else f" on rank {last}"
        raised(RuntimeError, text + where, made.dispatch, x, idx, weights)


def check_a_layer_that_another_rank_skips_raises_everywhere():
    """On ranks too that exchange no counts with the odd one."""
    last, world = dist.get_world_size() - 1, dist.group.WORLD
    text = (
        r"the layer that runs \(.*\) to be equal on every rank, got .*text on rank.*, "
        rf"images on rank {last}"
    )
    x = tokens(9, D)
    in_nodes = functools.partial(HierarchicalDispatcher, node_size=NODES[last])
    for make in (DedupDispatcher, in_nodes, AllGatherDispatcher):
        layers = []
        for i in range(2):
            made = make(E, world)
            made.tell_apart(("text", "images"), i)
            layers.append(MoELayer(D, 6, E, K, ep_group=world, dispatcher=made))
        for _ in range(2):
            raised(ValueError, text, layers[dist.get_rank() == last], x)
            for one in layers:
                one(x).sum().backward()


def check_layers_that_have_met_others_raise_everywhere():
    """Without names: what ran together before has to run together again."""
    last, x = dist.get_world_size() - 1, tokens(9, D)
    for way in ("alltoall", *WAYS):
        layers = []
        for _ in range(3):
            torch.manual_seed(0)
            layers.append(MoELayer(D, 6, E, K, **spread(way)))
        # A layer that a rank alone had before is no reason to refuse the others.
        layers = layers[dist.get_rank() == 0 :][:2]
        for _ in range(2):
            for one in layers:
                one(x).sum().backward()
            odd = dist.get_rank() == last
            text = r"run the layer that ran with those of the others before \(.*, got layer \d+ on"
            raised(ValueError, text, layers[odd], x)
            # A copy is as good as its original.
            copy.deepcopy(layers[0])(x)


def check_options_that_cannot_be_served():
    world = dist.group.WORLD
    wrong = functools.partial(DedupDispatcher, E, world, combine="sum")
    for each in (wrong, functools.partial(Dispatch, combine="sum")):
        raised(ValueError, "expected combine to be one of .*'sum'", each)
    raised(
        ValueError,
        r"expected node_size, or else LOCAL_WORLD_SIZE, to divide .*, got 5",
        functools.partial(HierarchicalDispatcher, E, world, node_size=5),
    )
    gathering = functools.partial(layer, "allgather", row_budget=RowBudget(5))
    raised(ValueError, "MoELayer: expected .* got AllGatherDispatcher", gathering)
    by_name = MoELayer(D, 6, E, K, ep_group=world, dispatcher=Dispatch(combine="reduced"))
    assert by_name.dispatcher.combine_by == "reduced"


test_over_ranks = Checks.of(globals()).test(3, 4)
