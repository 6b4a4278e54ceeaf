"""Recurrences over ranks against one process: every layout, scheme and number of ranks."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from pairwise import pairs
from rank_checks import Checks
from test_recurrent import KINDS, made, run

from moe_ext.attention import (
    causal_conv1d,
    gated_delta_rule,
    make_layout,
    sequence_parallel,
    shard_sequence,
)
from moe_ext.attention.recurrent.functional import conv_sent_bytes, sent_bytes
from moe_ext.distributed import count_traffic

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document")
# Documents that end inside ranks, and at the edges of two and of three.
PACKED = (0, 1, 18, 19, 24, 24, 37)
# Lengths that no rank divides, and below the number of ranks.
LENGTHS = (1, 2, 37, 70)
SCHEMES = ("state", "heads", "auto")
SEQUENCE = ("x", "dt", "B", "C", "q", "k", "v", "g", "beta")
RANKS = (2, 3, 4)
ALL = Checks()


def cases():
    for length, layout in itertools.product(LENGTHS, LAYOUTS):
        if layout != "per_document":
            yield length, layout, None
        if length == PACKED[-1]:
            yield length, layout, PACKED


def summed(x):
    # Gloo adds what lies in memory: the same strides on every rank.
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def parts_of(given, where):
    """A copy of the arguments with this rank's part of sequences."""
    copies = {name: x if x is None else x.detach().clone() for name, x in given.items()}
    sequences = {n: x for n, x in copies.items() if n in SEQUENCE and x is not None}
    return copies | {n: shard_sequence(x, dim=2, **where) for n, x in sequences.items()}


def equals_one_process(kind, given, scheme, layout, offsets):
    """Outputs and gradients of shards against those of the whole; the bytes that were sent."""
    group = dist.group.WORLD
    given = {n: x if x is None else x.requires_grad_() for n, x in given.items()}
    out, _ = run(kind, given, cu_seqlens=offsets)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    names = [name for name, x in given.items() if x is not None]
    grads = torch.autograd.grad((out * weight).sum(), [given[name] for name in names])
    where = {"group": group, "layout": layout, "cu_seqlens": offsets}

    def part(x):
        return shard_sequence(x.detach(), dim=2, **where)

    parts = {n: x if x is None else x.requires_grad_() for n, x in parts_of(given, where).items()}
    with count_traffic() as traffic:
        found, _ = run(kind, parts, **where, scheme=scheme)
    about = f"{kind} {scheme} {tuple(out.shape)} {layout} {offsets}: "
    torch.testing.assert_close(found, part(out), rtol=1e-9, atol=1e-10, msg=lambda m: f"{about}{m}")
    (found * part(weight)).sum().backward()
    for name, grad in zip(names, grads, strict=True):
        of_rank = parts[name].grad
        whole = name in SEQUENCE
        if not whole:
            of_rank = summed(of_rank)
        wanted = part(grad) if whole else grad
        how = {"rtol": 1e-8, "atol": 1e-9, "msg": lambda m, n=name: f"{about}gradient of {n}: {m}"}
        torch.testing.assert_close(of_rank, wanted, **how)
    return traffic.total_bytes


def due_bytes(kind, given, scheme, layout, offsets):
    """Bytes that the formula gives for this rank."""
    value, key = given.get("v", given.get("x")), given.get("k", given.get("B"))
    diagonal = kind in ("linear by element", "scan by element")
    dim = key.shape[3]
    return sent_bytes(
        scheme,
        make_layout(layout, value.shape[2], dist.get_world_size(), cu_seqlens=offsets),
        dist.get_rank(),
        batch=value.shape[0],
        heads=value.shape[1],
        kv_heads=key.shape[1],
        dim=dim,
        v_dim=value.shape[3],
        has_beta=kind.startswith("delta"),
        g_dim=dim if kind in ("delta by element", "linear by element") else 1,
        by_element=diagonal and dim > 1,
        itemsize=8,
    )


# Any two of the number of ranks, kind, scheme and sequence meet.
RECURRENCES = pairs(RANKS, KINDS, SCHEMES, cases())


@ALL(*itertools.product(KINDS, SCHEMES))
def a_recurrence_equals_one_process(kind, scheme):
    chosen = (dist.get_world_size(), kind, scheme)
    for length, layout, offsets in (case for *other, case in RECURRENCES if (*other,) == chosen):
        case = kind, made(kind, length), scheme, layout, offsets
        sent = equals_one_process(*case)
        if scheme != "auto":
            assert sent == due_bytes(*case), case[2:]


@ALL()
def random_sizes_equal_one_process():
    draw = random.Random(0)
    for _ in range(12):
        kind, scheme = draw.choice(KINDS), draw.choice(("state", "heads"))
        length, groups = draw.randint(1, 150), draw.randint(1, 3)
        sizes = {"batch": draw.randint(1, 2), "groups": groups}
        sizes |= {"heads": groups * draw.randint(1, 3)}
        sizes |= {"dim": draw.randint(1, 6), "v_dim": draw.randint(1, 6)}
        layout, offsets = draw.choice(LAYOUTS), None
        if layout == "per_document" or draw.random() < 0.5:
            inner = sorted(draw.choices(range(length + 1), k=draw.randint(0, 5)))
            offsets = (0, *inner, length)
        case = kind, made(kind, length, **sizes), scheme, layout, offsets
        assert equals_one_process(*case) == due_bytes(*case), (sizes, *case[2:])


@ALL(*((kind,) for kind in KINDS))
def fewer_heads_than_ranks_equal_one_process(kind):
    for heads, scheme in itertools.product((1, 2), ("state", "heads")):
        given = made(kind, 13, batch=1, groups=heads, heads=heads)
        case = kind, given, scheme, "contiguous", None
        assert equals_one_process(*case) == due_bytes(*case)


@ALL(*itertools.product(KINDS, ("state", "heads")))
def sums_are_float32_under_autocast(kind, scheme):
    given = {n: x if x is None else x.float() for n, x in made(kind, 37).items()}
    where = {"group": dist.group.WORLD, "layout": "zigzag"}
    parts = parts_of(given, where)
    exact = run(kind, parts, **where, scheme=scheme)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(kind, parts, **where, scheme=scheme)
    assert all(map(torch.equal, found, exact))


@ALL()
def a_convolution_equals_one_process():
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(0)
    for number, (length, layout, offsets) in enumerate(cases()):
        # Another one for each number of ranks.
        width = (1, 2, 4)[(number + dist.get_world_size()) % 3]
        shapes = ((2, 3, length), (3, width), (3,), (2, 3, length))
        tensors = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
        *leaves, weight = [x.requires_grad_() for x in tensors]
        how = {"activation": "silu", "cu_seqlens": offsets}
        out = causal_conv1d(*leaves, **how)
        wanted = torch.autograd.grad((out * weight).sum(), leaves)

        def part(x, layout=layout, offsets=offsets):
            where = {"group": group, "layout": layout, "cu_seqlens": offsets}
            return shard_sequence(x.detach(), dim=2, **where)

        x = part(leaves[0]).requires_grad_()
        mine = [x, *(each.detach().clone().requires_grad_() for each in leaves[1:])]
        with count_traffic() as traffic:
            found = causal_conv1d(*mine, group=group, layout=layout, **how)
        whole = make_layout(layout, length, dist.get_world_size(), cu_seqlens=offsets)
        sizes = {"batch": 2, "channels": 3, "taps": width, "itemsize": 8}
        assert traffic.total_bytes == conv_sent_bytes(whole, dist.get_rank(), **sizes)
        torch.testing.assert_close(found, part(out), rtol=1e-11, atol=1e-12)
        (found * part(weight)).sum().backward()
        torch.testing.assert_close(x.grad, part(wanted[0]), rtol=1e-10, atol=1e-11)
        for leaf, grad in zip(mine[1:], wanted[1:], strict=True):
            torch.testing.assert_close(summed(leaf.grad), grad, rtol=1e-10, atol=1e-11)


@ALL()
def the_last_rank_has_the_last_state():
    group, size = dist.group.WORLD, dist.get_world_size()
    given = made("delta", 37)
    _, wanted = gated_delta_rule(**given)
    where = {"group": group, "layout": "contiguous"}
    _, state = gated_delta_rule(**parts_of(given, where), **where, scheme="state")
    if dist.get_rank() == size - 1:
        torch.testing.assert_close(state, wanted, rtol=1e-9, atol=1e-10)


@ALL()
def a_context_gives_group_layout_and_documents():
    group, given = dist.group.WORLD, made("linear", 37)
    where = {"group": group, "layout": "striped", "cu_seqlens": PACKED}
    out, _ = gated_delta_rule(**given, cu_seqlens=PACKED)
    with sequence_parallel(**where):
        found, _ = gated_delta_rule(**parts_of(given, where))
    expected = shard_sequence(out, dim=2, **where)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@ALL()
def other_options_on_one_rank_are_named():
    group, rank = dist.group.WORLD, dist.get_rank()
    given = made("delta", 4 * (rank + 1))
    sizes = {"group": group, "layout": "contiguous"}
    with pytest.raises(ValueError, match="gated_delta_rule: expected the shards of a contiguous"):
        gated_delta_rule(**given, **sizes)
    ways = {"scheme": "ring"} if rank == 1 else {}
    with pytest.raises(ValueError, match=r"gated_delta_rule: expected scheme to be one.*on rank 1"):
        gated_delta_rule(**given, **sizes, **ways)
    if rank == 1:
        given["g"] = given["g"][..., :1]
    with pytest.raises(ValueError, match=r"gated_delta_rule: expected g to be of shape.*on rank 1"):
        gated_delta_rule(**given, **sizes)


@ALL()
def graphs_break_at_a_recurrence():
    if dist.get_world_size() > 2:
        return  # Dynamo takes seconds on each rank
    where = {"group": dist.group.WORLD, "layout": "zigzag"}
    for kind in ("delta", "scan"):
        given = parts_of(made(kind, 37), where)
        graph = torch.compile(run, backend="eager")
        assert torch.equal(graph(kind, given, **where)[0], run(kind, given, **where)[0])
    given = shard_sequence(torch.ones(2, 3, 37), dim=2, **where), torch.ones(3, 4)
    graph = torch.compile(causal_conv1d, backend="eager")
    assert torch.equal(graph(*given, **where), causal_conv1d(*given, **where))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_ranks(num_ranks, name):
    ALL.assert_passed(num_ranks, name)
