"""The way of keys through rings of rings, and the choice of a scheme, by arithmetic alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ext.attention import choose_scheme
from moe_ext.attention.schemes.ring import Circuit, plan_paths
from moe_ext.comm.link import Link
from moe_ext.comm.rates import CostTable

LLAMA = {"batch": 1, "heads": 32, "kv_heads": 8, "dim": 128, "is_causal": True}


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (4, 4)])
def test_every_place_has_keys_of_one_source_in_each_stage(shape):
    circuit = Circuit(*shape)
    for stage in range(circuit.num_places):
        held = [circuit.source(place, stage) for place in range(circuit.num_places)]
        assert sorted(held) == list(range(circuit.num_places))
        assert all(circuit.holder(source, stage) == place for place, source in enumerate(held))
    visited = {(0, circuit.holder(0, stage)) for stage in range(circuit.num_places)}
    assert len(visited) == circuit.num_places


def follow(edges, start):
    """Stages that keys come to from a stage."""
    found, new = {start}, True
    while new:
        new = {stage for stage, origin in edges.items() if origin in found} - found
        found |= new
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_keys_come_to_all_who_need_them_and_few_others(rings, inner, data):
    circuit = Circuit(rings, inner)
    size = circuit.num_places
    share = data.draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    drawn = torch.rand(size, size, generator=generator) < share
    needs = tuple(tuple(row) for row in drawn.tolist())
    paths = plan_paths(circuit, needs)
    for source in range(size):
        needed = {t for t in range(size) if needs[circuit.holder(source, t)][source]}
        assert needed - {0} <= follow(paths.forward[source], 0)
        assert needed - {0} <= follow(paths.home[source], size)
        if paths.is_full:
            assert needed <= follow(paths.kept[source], size - 1) | {size - 1}
        for stage, origin in paths.forward[source].items():
            # Posted before it is awaited, and from home or a stage that has the keys by then.
            assert circuit.before(stage) < stage and origin in (0, circuit.before(stage))
        backward = [(paths.home[source], size)]
        backward += [(edges, size - 1) for edges in paths.kept[source : source + 1]]
        for edges, root in backward:
            for stage, origin in edges.items():
                assert stage < origin and origin in (root, circuit.after(stage))
        # Whatever is visited without need passes keys on, and not from home to a single one.
        for edges, root in ((paths.forward[source], 0), (paths.home[source], size)):
            for stage in set(edges) - needed:
                onward = [other for other, origin in edges.items() if origin == stage]
                assert len(onward) >= (2 if edges[stage] == root else 1)
    assert (share < 1.0 or size == 1) or paths.is_full


def test_a_double_ring_seldom_crosses():
    circuit = Circuit(3, 4)
    paths = plan_paths(circuit, ((True,) * 12,) * 12)
    for edges, is_backward in ((paths.forward[5], False), (paths.kept[5], True)):
        crossing = [t for t in edges if circuit.crosses(t, backward=is_backward)]
        assert len(edges) == 11 and len(crossing) == 2
        assert all(abs(t - edges[t]) == 4 for t in crossing)
        for stage, origin in edges.items():
            rings = {circuit.holder(5, t) // 4 for t in (stage, origin)}
            assert len(rings) == (2 if stage in crossing else 1)


def figures(choice):
    return {(c.scheme, c.shape): c for c in choice.candidates}


def test_long_sequences_go_round_and_short_ones_change_heads():
    long = choose_scheme(**LLAMA, seq_len=1 << 17, num_ranks=8)
    assert long.scheme == "ring"
    all_heads = {**LLAMA, "heads": 28, "kv_heads": 28}
    assert choose_scheme(**all_heads, seq_len=4096, num_ranks=7).scheme == "ulysses"
    few_heads = {**LLAMA, "heads": 1, "kv_heads": 1}
    assert choose_scheme(**few_heads, seq_len=512, num_ranks=8).scheme == "all_gather"
    # Two of seven ranks would compute twice as long as the others: a long sequence goes round.
    uneven = {**LLAMA, "heads": 9, "kv_heads": 9}
    assert choose_scheme(**uneven, seq_len=4096, num_ranks=7).scheme == "ulysses"
    assert choose_scheme(**uneven, seq_len=1 << 15, num_ranks=7).scheme != "ulysses"
    shard = 2 * 8 * (1 << 14) * 128 * 2
    ring = figures(long)["ring", (1, 8)]
    assert (ring.forward_bytes, ring.backward_bytes) == (7 * shard, 21 * shard)


def test_gathering_is_left_out_where_it_would_hold_too_much():
    long, short = (choose_scheme(**LLAMA, seq_len=n, num_ranks=8) for n in (1 << 17, 1024))
    assert "holds more than 64 MiB" in figures(long)["all_gather", (1, 8)].refused
    assert figures(short)["all_gather", (1, 8)].refused is None


def test_hops_between_hosts_make_a_double_ring():
    sizes = {**LLAMA, "heads": 30, "kv_heads": 10, "seq_len": 1 << 15, "num_ranks": 16}
    choice = choose_scheme(**sizes, hosts=[0] * 8 + [1] * 8)
    assert choice.scheme == "double_ring" and choice.grid.shape == (2, 8)
    found = figures(choice)
    shard = 2 * 10 * (1 << 11) * 128 * 2
    # One hop of keys forward; one of keys and one of gradients twice as wide backward. A plain ring
    # has the first rank of a host send all that goes back there.
    assert found["double_ring", (2, 8)].abroad_bytes == 4 * shard
    assert found["ring", (1, 16)].abroad_bytes == 45 * shard
    assert choose_scheme(**sizes).scheme != "double_ring"
    # Hosts of unequal size are no rows.
    uneven = choose_scheme(**sizes, hosts=[0] * 9 + [1] * 7)
    assert all(c.scheme != "double_ring" for c in uneven.candidates)


def test_queries_stay_where_their_rows_of_a_mask_are():
    sizes = {**LLAMA, "heads": 28, "kv_heads": 28, "seq_len": 4096, "num_ranks": 7}
    assert choose_scheme(**sizes).scheme == "ulysses"
    choice = choose_scheme(**sizes, has_attn_mask=True)
    assert choice.scheme in ("ring", "all_gather")
    assert "attn_mask to be None" in figures(choice)["ulysses", (1, 7)].refused


def test_rows_of_a_mesh_count_as_hosts():
    sizes = {**LLAMA, "heads": 4, "kv_heads": 4, "seq_len": 8192, "num_ranks": 8}
    choice = choose_scheme(**sizes, mesh_shape=(2, 4))
    assert [c.shape for c in choice.candidates if c.scheme == "hybrid"] == [(2, 4)]
    assert choice.scheme == "hybrid"


def test_the_table_tells_all():
    choice = choose_scheme(**{**LLAMA, "heads": 3, "kv_heads": 3}, seq_len=4096, num_ranks=4)
    text = str(choice)
    assert choice.reason in text and text.splitlines()[2].startswith(choice.scheme)
    assert "expects the heads of q to be at least as many as the 4 ranks, got 3" in text
    for candidate in choice.candidates:
        assert candidate.scheme in text
    costs = [c.cost for c in choice.candidates if c.refused is None]
    assert costs == sorted(costs)


def test_sizes_of_any_kind_have_a_choice():
    for num_ranks, heads, seq_len in itertools.product((1, 2, 5, 12), (1, 12), (0, 1, 77)):
        choice = choose_scheme(batch=1, heads=heads, seq_len=seq_len, dim=8, num_ranks=num_ranks)
        assert sum(map(len, choice.grid.rows)) == num_ranks


@pytest.mark.parametrize(
    ("flops", "bandwidth", "scheme"),
    # Slow products hide a ring's hops; fast ones, or a round that takes long, do not.
    [(1e10, 1e9, "ring"), (1e15, 1e9, "ulysses"), (1e10, 1e12, "ulysses")],
)
def test_measured_costs_take_the_place_of_the_constants(flops, bandwidth, scheme):
    links = {"node": Link(50e-6, bandwidth, bandwidth)}
    costs = CostTable("a CPU", "cpu", 1, "2.13", 1e10, {"bfloat16": flops}, links=links)
    assert choose_scheme(**LLAMA, seq_len=8192, num_ranks=8, costs=costs).scheme == scheme
    with pytest.raises(ValueError, match="expected costs to have a link named 'node', got \\[\\]"):
        choose_scheme(**LLAMA, seq_len=64, num_ranks=4, costs=replace(costs, links={}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "heads to be positive, got 0"),
        ({"seq_len": -1}, "seq_len to be positive, got -1"),
        ({"num_ranks": 0}, "num_ranks to be positive, got 0"),
        ({"kv_heads": 5}, "heads to be a multiple of the 5 kv_heads, got 32"),
        ({"hosts": [0, 0]}, "hosts to be of 4 ranks, got 2 numbers"),
        ({"mesh_shape": (3, 2)}, r"mesh_shape to hold 4 ranks, got \(3, 2\)"),
        ({"window": (-2, 0)}, "window to be -1"),
        ({"cu_seqlens": [0, 7]}, "cu_seqlens to end at"),
    ],
)
def test_sizes_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        choose_scheme(**{**LLAMA, "seq_len": 64, "num_ranks": 4, **changes})
