"""Dispatchers over libraries of GPUs, with fakes that have their signatures, and without them."""

import functools
import gc
import inspect
from unittest import mock

import fake_libraries
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from dispatchers import assert_same_bits, dispatcher, tokens
from rank_checks import Checks, raised

import moe_ext
from moe_ext import MoELayer
from moe_ext.dispatch import deep_ep, nccl_ep
from moe_ext.distributed import (
    AllToAllDispatcher,
    DeepEpDispatcher,
    NcclEpDispatcher,
    SymmetricMemoryDispatcher,
    count_traffic,
)
from moe_ext.nn import RowBudget

E, D, K = 12, 8, 4
CARRIERS = ("nccl_ep", "deep_ep")


def with_fakes(check):
    @functools.wraps(check)
    def run():
        with fake_libraries.installed():
            check()

    return run


def step(way, combine="exact", size=9, mask=None, x_grad=True, made=None, **options):
    """Output, gradients of tokens and router, and gradients of experts of one step."""
    torch.manual_seed(3)
    made = made or dispatcher(way, E, combine=combine)
    options = {"ep_group": dist.group.WORLD, "dispatcher": made, "dtype": torch.bfloat16, **options}
    one = MoELayer(D, 6, E, K, **options)
    x = tokens(size, D, torch.bfloat16).requires_grad_(x_grad)
    y = one(x, token_mask=mask)
    y.float().square().sum().backward()
    found = [y.detach(), x.grad, *[p.grad for p in one.router.parameters()]]
    experts = [p.grad for p in one.experts.parameters()]
    return [g for g in found if g is not None], experts, one


def cases():
    rank = dist.get_rank()
    yield {}
    yield {"shared_expert": 4, "bias": True}
    yield {"capacity": 0.5, "size": 40}
    yield {"mask": torch.full((9,), rank > 0)}
    yield {"x_grad": rank > 0}
    yield {"size": 4 * rank}
    yield {"size": 7 - 5 * rank}
    yield {"row_budget": RowBudget(7)}
    yield {"row_budget": RowBudget(11, overflow="drop"), "size": 5 * rank}


def assert_close(found, want):
    # Sums of the same bfloat16 products in another order: a rounding of the sum, 2**-8.
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * float(b.abs().max()))


@with_fakes
def check_exact_gives_the_bits_of_a_row_for_each_expert():
    for options in cases():
        want, experts, plain = step("alltoall", **options)
        for way in CARRIERS:
            found, found_experts, one = step(way, **options)
            assert_same_bits(found, want)
            assert torch.equal(one.metrics["num_dropped"], plain.metrics["num_dropped"])
            # The order of rows, which gradients of experts are summed in, is the library's.
            (assert_same_bits if way == "deep_ep" else assert_close)(found_experts, experts)


@with_fakes
def check_reduced_gives_the_sums_of_dedup():
    for options in cases():
        want, experts, _ = step("dedup", "reduced", **options)
        for way in CARRIERS:
            found, found_experts, _ = step(way, "reduced", **options)
            assert_same_bits(found, want)
            (assert_same_bits if way == "deep_ep" else assert_close)(found_experts, experts)


@with_fakes
def check_a_token_travels_once_and_is_counted():
    for combine, ways in (("exact", ("alltoall", "nccl_ep")), ("reduced", ("dedup", "deep_ep"))):
        sent = []
        for way in ways:
            made = dispatcher(way, E, combine=combine)
            x, idx = torch.zeros(9, D, dtype=torch.bfloat16), torch.arange(36).view(9, 4) % E
            with count_traffic() as traffic:
                made.dispatch(x, idx, torch.ones(9, K))
            sent.append(traffic.sent_bytes)
        # Indices and weights of tokens are rows of their own without a library.
        beside = 9 * K * (2 + 4) if combine == "reduced" else 0
        assert 0 <= sent[0]["all_to_all"] - sent[1]["library"] <= beside, sent


@with_fakes
def check_buffers_grow_for_the_rank_that_has_most_and_layers_share_them():
    rank = dist.get_rank()
    for way, kind in (("nccl_ep", fake_libraries.Group), ("deep_ep", fake_libraries.ElasticBuffer)):
        group = dist.new_group(list(range(dist.get_world_size())))
        torch.manual_seed(0)
        layers = [
            MoELayer(D, 6, E, K, ep_group=group, dispatcher=way, dtype=torch.bfloat16)
            for _ in range(2)
        ]
        before = kind.made
        for size in (3 + 5 * rank, 8, 0, 1 + 20 * rank, 32 - rank):
            for layer in layers:
                layer(torch.randn(size, D, dtype=torch.bfloat16))
        # 8 tokens of K choices, then 32.
        assert kind.made - before == 2, way


@with_fakes
def check_handles_end_with_the_graph():
    gc.collect()
    before = fake_libraries.Handle.open
    x = torch.randn(5, D, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(0)
    layer = MoELayer(D, 6, E, K, ep_group=dist.group.WORLD, dispatcher="nccl_ep")
    y = layer.bfloat16()(x)
    assert fake_libraries.Handle.open > before
    y.sum().backward()
    del y
    gc.collect()
    assert fake_libraries.Handle.open == before


@with_fakes
def check_what_cannot_be_served_is_refused_everywhere():
    world, rank = dist.group.WORLD, dist.get_rank()
    for way in CARRIERS:
        make = functools.partial(MoELayer, D, 6, E, K, ep_group=world, dispatcher=way)
        torch.manual_seed(0)
        layer, x = make(), torch.randn(3, D)
        raised(TypeError, "bfloat16 on cpu .*autocast.*got torch.float32", layer, x)
        x = x.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).shape == x.shape
        # The dtype of one rank alone.
        chosen = torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
        send = functools.partial(layer.dispatcher.dispatch, x.float() if rank else x)
        raised(TypeError, "bfloat16 on cpu.*got torch.float32", send, *chosen)
        odd = MoELayer(6, 6, E, K, ep_group=world, dispatcher=way, dtype=torch.bfloat16)
        raised(ValueError, "model_dim to be a multiple of 8, got 6", odd, x[:, :6])


@with_fakes
def check_options_that_differ_are_refused():
    world, rank = dist.group.WORLD, dist.get_rank()
    memory = functools.partial(SymmetricMemoryDispatcher, max_rows=64)
    for kind in (DeepEpDispatcher, NcclEpDispatcher, memory):
        options = {"average": False, "drop_policy": "score"}
        options |= {"wire": "int8"} if kind is memory else {"combine": "reduced"}
        for name, other in options.items():
            made = kind(E, world, **({name: other} if rank else {}))
            layer = MoELayer(D, 6, E, K, ep_group=world, dispatcher=made, dtype=torch.bfloat16)
            text = f"expected .*{name}.* to be equal on every rank, got .* on rank 0, .* on rank 1"
            raised(ValueError, text, layer, torch.randn(3, D).bfloat16())


def check_a_rank_without_the_library_stops_all():
    world, rank = dist.group.WORLD, dist.get_rank()
    for way in (*CARRIERS, "symm_mem"):
        make = functools.partial(
            MoELayer, D, 6, E, K, ep_group=world, dispatcher=way, row_budget=RowBudget(9)
        )
        raised(RuntimeError, "expected (a GPU|nccl-ext|deep_ep)", make)
    one = {"nccl_extensions": None, "deep_ep": None} if rank else {}
    with fake_libraries.installed(**one):
        for way in CARRIERS:
            make = functools.partial(MoELayer, D, 6, E, K, ep_group=world, dispatcher=way)
            raised(RuntimeError, "to be installed for the module .*, got None", make)
    other = {"nccl_extensions": f"0.1.{rank}"}
    with fake_libraries.installed(**other):
        make = functools.partial(NcclEpDispatcher, E, world)
        raised(ValueError, "expected the version to be equal.*0.1.0.*0.1.1", make)


@with_fakes
def check_symmetric_memory_gives_the_bits_of_a_row_for_each_expert():
    made = SymmetricMemoryDispatcher(E, dist.group.WORLD, max_rows=200)
    coded = SymmetricMemoryDispatcher(E, dist.group.WORLD, max_rows=200, wire="int8")
    for options in (*cases(), {"row_budget": RowBudget(24, static=True)}):
        want, experts, _ = step("alltoall", **options)
        found, found_experts, _ = step("symm_mem", made=made, **options)
        assert_same_bits([*found, *found_experts], [*want, *experts])
    plain = AllToAllDispatcher(E, dist.group.WORLD, wire="int8")
    assert_same_bits(step("symm_mem", made=coded)[0], step("alltoall", made=plain)[0])
    named = step("symm_mem", made="symm_mem", row_budget=RowBudget(7))
    assert_same_bits(named[0], step("alltoall", row_budget=RowBudget(7))[0])


@with_fakes
def check_rows_beyond_the_memory_are_refused_everywhere():
    world, rank = dist.group.WORLD, dist.get_rank()
    made = SymmetricMemoryDispatcher(E, world, max_rows=16)
    torch.manual_seed(0)
    layer = MoELayer(D, 6, E, K, ep_group=world, dispatcher=made)
    # 20 rows of one rank; they fit in rounds.
    x = torch.randn(5 * rank, D)
    raised(ValueError, r"max_rows=16 rows at once, got \d+ on rank .*RowBudget\(16\)", layer, x)
    budget = functools.partial(MoELayer, D, 6, E, K, ep_group=world, dispatcher=made)
    torch.manual_seed(0)
    assert budget(row_budget=RowBudget(16))(x).shape == x.shape
    large = budget(row_budget=RowBudget(17))
    raised(ValueError, "RowBudget to be at most max_rows=16, got 17", large, x)
    by_name = functools.partial(MoELayer, D, 6, E, K, ep_group=world, dispatcher="symm_mem")
    raised(ValueError, "expected row_budget with dispatcher='symm_mem'", by_name)
    make = functools.partial(SymmetricMemoryDispatcher, E, world)
    raised(ValueError, "max_rows", functools.partial(make, max_rows=0))
    sizes = functools.partial(make, max_rows=16 + rank)
    uneven = MoELayer(D, 6, E, K, ep_group=world, dispatcher=sizes())
    raised(ValueError, "expected max_rows to be equal", uneven, x)


test_over_two_ranks = Checks.of(globals()).test(2)


@pytest.mark.parametrize("library", [nccl_ep.LIBRARY, deep_ep.LIBRARY], ids=lambda lib: lib.module)
def test_a_library_says_why_it_is_not_used(library):
    assert library.state() == f"absent: no package {library.distribution}"
    name = library.distribution.replace("-", "_")
    with fake_libraries.installed(**{name: "9.9"}):
        assert library.state().startswith("9.9, which is not used: expected ")
        assert "got 9.9" in library.problem()
    with fake_libraries.installed():
        assert library.state() == fake_libraries.VERSIONS[library.distribution]
        assert library.problem() is None
        signatures = dict(library.signatures)
        method = next(n for n in signatures if n.endswith("dispatch"))
        for given in ((*signatures[method], "others"), signatures[method][1:]):
            with mock.patch.dict(library.signatures, {method: given}):
                assert f"{method} to take {list(given)}, got version" in library.problem()


def test_info_names_the_libraries():
    backends = moe_ext.info()["backends"]
    assert backends["nccl_ep"] == "absent: no package nccl-extensions"
    assert backends["deep_ep"] == "absent: no package deep_ep"
    assert backends["symm_mem"] == "not used: expected a GPU for symmetric memory, got none"


def test_the_stand_ins_for_symmetric_memory_have_its_signatures():
    for name in ("empty", "rendezvous"):
        real = inspect.signature(getattr(symmetric_memory, name))
        fake = inspect.signature(getattr(fake_libraries, name))
        assert list(fake.parameters) == list(real.parameters)
