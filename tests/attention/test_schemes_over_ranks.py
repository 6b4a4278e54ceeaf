"""Every scheme against one process, and what it sends against its formula."""

import contextlib
import dataclasses
import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from helpers import assert_rounded_once, expect_equal, make_inputs, sharded, whole
from pairwise import FULL, pairs
from rank_checks import ChecksOn
from test_ring_attention import ATTN_MASKS, CASES
from torch.distributed.device_mesh import init_device_mesh

from moe_ext.attention import (
    LAYOUTS,
    Mask,
    explain_scheme,
    make_layout,
    position_ids,
    ring_attention,
    shard_sequence,
    token_mean_loss,
    unshard_sequence,
)
from moe_ext.attention.block import KeysForm
from moe_ext.attention.layouts import even_grid
from moe_ext.attention.schemes import SCHEMES, ring
from moe_ext.attention.schemes.base import Workload
from moe_ext.comm import agreement
from moe_ext.distributed import count_traffic

PER_HEAD = ("alibi_slopes", "sinks")
SHAPES = {
    3: [(1, 3), (3, 1)],
    4: [(1, 4), (2, 2), (4, 1)],
    6: [(2, 3), (3, 2)],
}
FLAT = ("ring", "all_gather", "ulysses", "auto")
# By the number of ranks; rows and columns of two are in (2, 2), rings of two in
# test_ring_over_ranks.py.
check = ChecksOn(1, 3, 4, 6)


@functools.cache
def mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))


def ways():
    """(scheme, group) of every scheme and shape for this number of ranks."""
    shapes = SHAPES[dist.get_world_size()]
    found = [(scheme, mesh(shape)) for scheme in ("hybrid", "double_ring") for shape in shapes]
    return [*found, *((scheme, dist.group.WORLD) for scheme in FLAT), ("auto", mesh(shapes[-1]))]


def halved(cases):
    """Every other case; three ranks run those that four leave out, and six every third."""
    kept = {3: slice(1, None, 2), 4: slice(0, None, 2), 6: slice(1, None, 3)}
    return [*cases][slice(None) if FULL else kept[dist.get_world_size()]]


def compare(inputs, scheme, group, layout, last="dsinks", **kwargs):
    where = {"group": group, "layout": layout}
    found = sharded(*inputs, **where, scheme=scheme, **kwargs)
    where["cu_seqlens"] = kwargs.get("cu_seqlens")
    expect_equal(found, whole(*inputs, **kwargs), **where, last=last)


def row_size(group):
    return dist.get_world_size() if group is dist.group.WORLD else group.size(1)


@check(on=(3, 4, 6))
def schemes_equal_one_process():
    num_ranks = dist.get_world_size()
    heads = 2 * num_ranks
    groups_of_heads = itertools.cycle((heads, num_ranks, 1, 2))
    layouts = itertools.cycle(LAYOUTS)
    # test_ring_over_ranks.py has the schemes of groups without rows, and rings of few ranks.
    schemes = [(scheme, group) for scheme, group in ways() if FULL or scheme not in FLAT[1:3]]
    for (scheme, group), case in halved(itertools.product(schemes, CASES)):
        layout, kv_heads = next(layouts), next(groups_of_heads)
        kwargs = {"cu_seqlens": (0, 20, 20, 37), **CASES[case]}
        if layout not in ("per_document", "cost_balanced") and "documents" not in case:
            kwargs["cu_seqlens"] = CASES[case].get("cu_seqlens")
        if scheme in ("ulysses", "hybrid") and max(row_size(group), 2) % kv_heads:
            kv_heads = row_size(group)
        inputs = make_inputs(heads=heads, kv_heads=kv_heads)
        per_head = {n: kwargs[n][torch.arange(heads) % 4] for n in PER_HEAD if n in kwargs}
        try:
            compare(inputs, scheme, group, layout, **{**kwargs, **per_head})
        except BaseException as error:
            raise AssertionError(f"{scheme} {group} {layout} {case} {kv_heads}") from error


@check(on=(4, 6))
def a_bias_in_a_double_ring_equals_one_process():
    num_ranks = dist.get_world_size()
    for shape, layout in zip(SHAPES[num_ranks], ("zigzag", "striped", "contiguous"), strict=False):
        way = ("double_ring", mesh(shape), layout)
        compare(make_inputs(), *way, **ATTN_MASKS["bias"], last="dmask")


@check(on=(3, 4))
def heads_that_the_ranks_do_not_divide():
    layouts = itertools.cycle(("zigzag", "contiguous", "striped"))
    ulysses = [way for way in ways() if way[0] in ("ulysses", "hybrid")]
    # Whole heads of keys, and groups that are cut.
    counts = ((7, 7), (12, 2), (10, 5), (5, 1))
    dropout = {"dropout_p": 0.3, "seed": 5}

    @functools.cache
    def alone(heads, kv_heads):
        inputs = make_inputs(heads=heads, kv_heads=kv_heads)
        return sharded(*inputs, group=None, scheme="ring", **dropout)

    for (scheme, group), (heads, kv_heads) in itertools.product(ulysses, counts):
        layout, wire = next(layouts), torch.float32
        inputs = make_inputs(heads=heads, kv_heads=kv_heads)
        kwargs = {"is_causal": True, "window": (20, -1)}
        slopes, sinks = torch.linspace(0, 1, heads), torch.linspace(-1, 1, heads).double()
        options = {**kwargs, "alibi_slopes": slopes, "sinks": sinks}
        options["key_mask"] = torch.arange(37).repeat(2, 1) % 5 != 1
        compare(inputs, scheme, group, layout, **options)
        found = sharded(*inputs, group=group, layout=layout, scheme=scheme, **dropout)
        expect_equal(found, alone(heads, kv_heads), group=group, layout=layout)
        half = [x.bfloat16() for x in inputs]
        with count_traffic() as counted:
            sharded(*half, group=group, layout=layout, scheme=scheme, kv_grad_dtype=wire, **kwargs)
        due = due_bytes(workload(half, layout, wire, False, **kwargs), scheme, group)
        assert counted.total_bytes == sum(due), (scheme, str(group), layout, heads, kv_heads)


@check(on=(4,))
def lengths_down_to_none():
    cases = [{"is_causal": True}, {"window": (1, 0)}, {"is_causal": True, "cu_seqlens": True}]
    rows = pairs(ways(), (0, 1, 3, 6), cases, ("contiguous", "zigzag"))
    for (scheme, group), seq_len, kwargs, layout in rows:
        if "cu_seqlens" in kwargs:
            kwargs = {**kwargs, "cu_seqlens": (0, 0, seq_len // 2, seq_len // 2, seq_len)}
        inputs = make_inputs(seq_len=seq_len, heads=dist.get_world_size(), kv_heads=1)
        compare(inputs, scheme, group, layout, **kwargs)


@check(on=(3, 4))
def kept_keys_jump_where_none_of_the_next_ranks_sees_them():
    # All keys go all round, and some are needed by the last ranks of the way and by the first.
    rings = [way for way in ways() if way[0] in ("ring", "double_ring")]
    for (scheme, group), seq_len, window in pairs(rings, range(7, 11), ((1, 2), (1, 1), (0, 2))):
        inputs = make_inputs(1, seq_len=seq_len, heads=dist.get_world_size(), kv_heads=1)
        compare(inputs, scheme, group, "zigzag", window=window)


@check(on=(4,))
def dtypes_are_rounded_once():
    num_ranks = dist.get_world_size()
    kwargs = {"is_causal": True, "key_mask": (torch.arange(67) % 7 != 2)[None]}
    dtypes = itertools.cycle((torch.bfloat16, torch.float16, torch.float32))
    sizes = {"batch": 1, "heads": 2 * num_ranks, "seq_len": 67, "dim": 32, "v_dim": 32}
    # Each kind of heads has all dtypes, one after the other.
    for kv_heads, (scheme, group) in itertools.product((num_ranks, 1), ways()):
        inputs = make_inputs(kv_heads=kv_heads, dtype=next(dtypes), **sizes)
        found = sharded(*inputs, group=group, scheme=scheme, **kwargs)
        expected = whole(*(x.double() for x in inputs), **kwargs)
        assert_rounded_once(found, expected, group, scheme)


@check(on=(4,))
def library_blocks_in_every_scheme():
    inputs = make_inputs(1, 8, 4, seq_len=260, dim=16, v_dim=16, dtype=torch.bfloat16)
    expected = whole(*(x.double() for x in inputs), is_causal=True)
    for scheme, group in ways():
        leaves = [shard_sequence(x, group=group, dim=2).requires_grad_() for x in inputs[:3]]
        given = {"group": group, "scheme": scheme, "precision": "fast", "is_causal": True}
        out = ring_attention(*leaves, **given)
        (out * shard_sequence(inputs[3], group=group, dim=2)).sum().backward()
        full = unshard_sequence(out.detach(), group=group, dim=2).double()
        error = (full - expected[0]).norm() / expected[0].norm()
        # More than one rounding, and no wrong key.
        assert error <= 6e-3, (scheme, error)


@check(on=(4,))
def dropout_is_that_of_one_process():
    inputs = make_inputs(heads=2 * dist.get_world_size(), kv_heads=dist.get_world_size())
    kwargs = {"is_causal": True, "dropout_p": 0.4, "seed": 11}
    expected = sharded(*inputs, group=None, **kwargs)
    for scheme, group in ways():
        found = sharded(*inputs, group=group, scheme=scheme, **kwargs)
        expect_equal(found, expected, group=group)


def workload(inputs, layout, wire, masked, *, is_causal=False, window=(-1, -1), cu_seqlens=None):
    q, k, v, _ = inputs
    num_ranks = dist.get_world_size()
    form = KeysForm(k.shape[0], k.shape[1], q.shape[3], v.shape[3], q.dtype, masked)
    made = make_layout(layout, q.shape[2], num_ranks, cu_seqlens=cu_seqlens)
    mask = Mask(is_causal, *window, cu_seqlens)
    return Workload(q.shape[1], form, wire, made, mask, (0,) * num_ranks)


def due_bytes(work, scheme, group):
    """Bytes that the formula gives for this rank's (forward, backward) pass."""
    traffic = SCHEMES[scheme].traffic(work, even_grid(dist.get_world_size(), row_size(group)))
    return [each.sent[dist.get_rank()] for each in (traffic.forward, traffic.backward)]


MASKS = [
    ("zigzag", {"is_causal": True}),
    ("contiguous", {"is_causal": True}),
    ("contiguous", {"window": (4, 0)}),
    ("contiguous", {"window": (13, 3)}),
    ("striped", {"window": (2, 1)}),
    ("contiguous", {"is_causal": True, "cu_seqlens": (0, 9, 9, 30, 43)}),
    ("per_document", {"is_causal": True, "cu_seqlens": (0, 9, 9, 30, 43)}),
]


@check(on=(3, 4, 6))
def bytes_sent_are_those_of_the_formula():
    num_ranks = dist.get_world_size()
    wires = itertools.cycle((torch.float32, torch.float32, torch.bfloat16, torch.bfloat16))
    masked = itertools.cycle((False, True, True))
    counts = itertools.cycle((2 * num_ranks, 1))
    schemes = [(scheme, group) for scheme, group in ways() if scheme != "auto"]
    for (scheme, group), (layout, kwargs) in halved(itertools.product(schemes, MASKS)):
        wire, has_mask = next(wires), next(masked)
        sizes = {"heads": 2 * num_ranks, "kv_heads": next(counts), "seq_len": 43}
        inputs = make_inputs(**sizes, dtype=torch.bfloat16)
        where = {"group": group, "layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
        parts = [shard_sequence(x, dim=2, **where).requires_grad_() for x in inputs[:3]]
        options = {"kv_grad_dtype": wire, "scheme": scheme, **kwargs}
        if has_mask:
            key_mask = torch.ones(2, 43, dtype=torch.bool)
            options["key_mask"] = shard_sequence(key_mask, dim=1, **where)
        with count_traffic() as forward:
            out = ring_attention(*parts, group=group, layout=layout, **options)
        with count_traffic() as backward:
            out.sum().backward()
        due = due_bytes(workload(inputs, layout, wire, has_mask, **kwargs), scheme, group)
        found = [forward.total_bytes, backward.total_bytes]
        assert found == due, (scheme, str(group), layout, kwargs, found, due)


@check(on=(3, 4))
def rounded_keys_are_those_of_one_process_and_of_the_formula():
    num_ranks = dist.get_world_size()
    formats = itertools.cycle(("int8", "fp8", "mx"))
    key_mask = torch.arange(43).repeat(2, 1) % 5 != 1
    for (scheme, group), (layout, kwargs) in halved(itertools.product(ways(), MASKS)):
        wire = next(formats)
        shape = {"heads": 2 * num_ranks, "kv_heads": num_ranks, "seq_len": 43}
        inputs = make_inputs(**shape, dtype=torch.float32)
        options = {"layout": layout, "wire": wire, "key_mask": key_mask, **kwargs}
        if scheme in ("ulysses", "hybrid"):
            with pytest.raises(ValueError, match="wire to be None for scheme"):
                sharded(*inputs, group=group, scheme=scheme, **options)
            continue
        with count_traffic() as counted:
            found = sharded(*inputs, group=group, scheme=scheme, **options)
        where = {"layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
        expected = sharded(*inputs, group=None, **options)
        tolerances = {"rtol": 1e-4, "atol": 2e-5}
        expect_equal(found, expected, group=group, **where, tolerances=tolerances)
        if scheme in ("ring", "double_ring", "all_gather"):
            work = workload(inputs, layout, torch.float32, True, **kwargs)
            work = dataclasses.replace(work, form=dataclasses.replace(work.form, wire=wire))
            due = sum(due_bytes(work, scheme, group))
            assert counted.total_bytes == due, (scheme, str(group), layout, wire)


@check(on=(4,))
def the_choice_is_the_same_on_every_rank_and_says_why():
    num_ranks = dist.get_world_size()
    for group, (layout, kwargs) in itertools.product((dist.group.WORLD, mesh((2, 2))), MASKS):
        inputs = make_inputs(heads=8, kv_heads=4, seq_len=43, dtype=torch.bfloat16)
        where = {"group": group, "layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
        parts = [shard_sequence(x, dim=2, **where) for x in inputs]
        choice = explain_scheme(*parts[:3], group=group, layout=layout, **kwargs)
        texts = [None] * num_ranks
        dist.all_gather_object(texts, str(choice))
        assert len(set(texts)) == 1
        with count_traffic() as forward:
            leaves = [x.requires_grad_() for x in parts[:3]]
            out = ring_attention(*leaves, group=group, layout=layout, scheme="auto", **kwargs)
        with count_traffic() as backward:
            out.sum().backward()
        most = torch.tensor([forward.total_bytes, backward.total_bytes])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        best = choice.candidates[0]
        assert best.scheme == choice.scheme
        assert most.tolist() == [best.forward_bytes, best.backward_bytes], str(choice)


@check(on=(6,))
def hops_between_rings_are_few_and_posted_early():
    inputs = make_inputs(seq_len=36, dtype=torch.bfloat16)
    for rings, inner in SHAPES[6]:
        group, events = mesh((rings, inner)), []
        real_post, real_attend, real_wait = ring.Exchange.post, ring.attend_, ring.Pending.wait

        def post(self, sends, *rest, real=real_post, into=events, inner=inner):
            hop = real(self, sends, *rest)
            for _, rank in sends:
                hop.between = rank // inner != dist.get_rank() // inner
                into.append("between" if hop.between else "inside")
            return hop

        def wait(self, real=real_wait, into=events):
            if getattr(self, "between", False):
                self.between = False
                into.append("awaited")
            return real(self)

        def attend(*args, real=real_attend, into=events):
            into.append("block")
            return real(*args)

        qkv = [shard_sequence(x, group=group, dim=2) for x in inputs[:3]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring.Exchange, "post", post)
            patch.setattr(ring.Pending, "wait", wait)
            patch.setattr(ring, "attend_", attend)
            ring_attention(*qkv, group=group, scheme="double_ring", is_causal=True)
        assert events.count("between") == rings - 1
        assert events.count("inside") == rings * (inner - 1)
        for number in range(rings - 1):
            start = [i for i, e in enumerate(events) if e == "between"][number]
            stop = [i for i, e in enumerate(events) if e == "awaited"][number]
            assert events[start:stop].count("block") == inner, events


@check(on=(4,))
def helpers_take_meshes():
    group = mesh((2, 2))
    x = torch.arange(37.0)[:, None]
    part = shard_sequence(x, group=group, dim=0)
    assert torch.equal(part[:, 0].long(), position_ids(37, group=group))
    assert torch.equal(unshard_sequence(part, group=group, dim=0), x)
    mean = token_mean_loss(part.sum(), len(part), group=group)
    assert mean.item() == 18.0
    wide = make_layout("zigzag", 37, 4)
    assert torch.equal(part[:, 0].long(), wide.positions(dist.get_rank()))


def refused(match, *tensors, error=ValueError, **kwargs):
    with pytest.raises(error, match=match):
        ring_attention(*tensors, **kwargs)


@check(on=(4,))
def groups_that_no_scheme_can_use_are_refused():
    q, k, v, _ = make_inputs(heads=6, kv_heads=6)
    match = "group to be a 2-D DeviceMesh .'ring', 'ulysses'. for scheme 'hybrid', got a group of 4"
    refused(match, q, k, v, group=dist.group.WORLD, scheme="hybrid")
    match = "heads of q to be at least as many as the 4 ranks, got 3"
    few = (x[:, :3] for x in (q, k, v))
    refused(match, *few, group=mesh((1, 4)), scheme="hybrid")
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    refused("dims of group to be .'ring', 'ulysses'., in this order", q, k, v, group=swapped)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ring", "ulysses"))
    refused("group to be a mesh of one dim, or of two with names", q, k, v, group=cube)
    nameless = init_device_mesh("cpu", (2, 2))
    refused("group to be a mesh of one dim, or of two with names", q, k, v, group=nameless)
    refused("to be None or a ProcessGroup or DeviceMesh", q, k, v, group=7, error=TypeError)


@check(on=(4,))
def slices_of_a_mesh_are_groups():
    inputs = make_inputs(kv_heads=2)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ring", "ulysses"))
    ways = [(scheme, cube["ring", "ulysses"]) for scheme in ("hybrid", "double_ring", "auto")]
    for scheme, part in (*ways, ("ring", cube["ring"])):
        compare(inputs, scheme, part, "zigzag", is_causal=True)


@contextlib.contextmanager
def host(number):
    """Have this process pass for one of another host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "process_identity", lambda: (number + 1, os.getpid()))
        yield


@check(on=(4,))
def rows_of_a_double_ring_are_the_hosts():
    group, rank, inputs = dist.group.WORLD, dist.get_rank(), make_inputs()
    parts = [shard_sequence(x, group=group, dim=2) for x in inputs[:3]]
    # All ranks are here: one row, which is a plain ring.
    compare(inputs, "double_ring", group, "zigzag", is_causal=True)
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1)):
        with host(hosts[rank]):
            compare(inputs, "double_ring", group, "zigzag", is_causal=True)
            choice = explain_scheme(*parts, group=group, is_causal=True)
        assert ("double_ring", (2, 2)) in [(c.scheme, c.shape) for c in choice.candidates]
    with host(rank == 3):
        match = "of hosts with as many ranks each, .* got hosts of .3, 1. ranks"
        refused(match, *parts, group=group, scheme="double_ring")
    explain_scheme(*parts, group=group)


@check(on=(1,))
def groups_of_one():
    group = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))
    inputs = make_inputs()
    schemes = ("ring", "all_gather", "ulysses", "hybrid", "double_ring", "auto")
    for scheme, where in itertools.product(schemes, (group, None)):
        compare(inputs, scheme, where, "zigzag", is_causal=True)
    assert explain_scheme(*inputs[:3], group=None).scheme == "ring"


@pytest.mark.parametrize(("num_ranks", "name"), check.names())
def test_ranks(num_ranks, name):
    check[num_ranks].assert_passed(num_ranks, name)
