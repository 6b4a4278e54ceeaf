"""`RingAttention`, and what models do with it: compile, checkpoint, infer, two groups at a time."""

import dataclasses
import functools
import os

import pytest
import torch
import torch.distributed as dist
from helpers import TIGHT, leaves, make_inputs
from rank_checks import ChecksOn, assert_passed, run_checks
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_ext.attention import Layout, RingAttention, make_layout, ring_attention, shard_sequence
from moe_ext.attention.autograd import _graph_options, _options_of_graph
from moe_ext.attention.call import AttentionOptions
from moe_ext.attention.layouts import even_grid
from moe_ext.testing import spawn_ranks

FULL = os.environ.get("MOE_EXT_FULL") == "1"
# By the number of ranks. A graph knows it by the length of what they agreed on: two see all graphs.
check = ChecksOn(2, 3)
GRAPHS = {"on": (2, 3) if FULL else (2,)}


class Model(nn.Module):
    """Projections around the module, a query without keys included."""

    def __init__(self, group, dtype=torch.float64, **kwargs):
        super().__init__()
        torch.manual_seed(1)
        self.proj = nn.Linear(8, 8, dtype=dtype)
        self.sinks = nn.Parameter(torch.randn(4, dtype=dtype))
        self.attention = RingAttention(group, **kwargs)

    def forward(self, q, k, v, **kwargs):
        return self.attention(self.proj(q), k, v, sinks=self.sinks, **kwargs).square()


def results(model, tensors, run=None, **kwargs):
    """Output and all gradients."""
    tensors = leaves(tensors)
    out = (model if run is None else run)(*tensors, **kwargs)
    return [out.detach(), *torch.autograd.grad(out.sum(), [*tensors, *model.parameters()])]


def assert_same_bits(found, expected):
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a.ne(b).any()] == []


def make_shards(layout="zigzag", cu_seqlens=None, dtype=torch.float64, **kwargs):
    where = {"group": dist.group.WORLD, "layout": layout, "cu_seqlens": cu_seqlens}
    return [shard_sequence(x, dim=2, **where) for x in make_inputs(dtype=dtype, **kwargs)[:3]]


PACKED = (0, 9, 9, 30, 37)
CASES = {
    "plain": ({}, {}),
    "options": (
        {"window": (5, 2), "scale": 0.3, "softcap": 1.5, "layout": "striped"}
        | {"scheme": "auto", "kv_grad_dtype": torch.float32},
        {},
    ),
    "packed": ({"layout": "per_document", "is_causal": True}, {"cu_seqlens": PACKED}),
    "dropout": ({"dropout_p": 0.4, "is_causal": True}, {"seed": 7}),
    "fast": ({"precision": "fast", "is_causal": True, "layout": "contiguous"}, {}),
}


@check(
    *((case, "float64") for case in ("plain", "options", "packed")),
    *((case, "bfloat16") for case in ("plain", "dropout", "fast")),
    **GRAPHS,
)
def compiled_like_eager(case, dtype):
    options, kwargs = CASES[case]
    model = Model(dist.group.WORLD, getattr(torch, dtype), **options)
    layout = options.get("layout", "zigzag")
    shards = make_shards(layout, kwargs.get("cu_seqlens"), getattr(torch, dtype))
    if "cu_seqlens" in kwargs:
        kwargs = {"cu_seqlens": torch.tensor(PACKED)}
    mask = torch.arange(shards[0].shape[2])[None].expand(2, -1) % 4 != 1
    expected = results(model, shards, key_mask=mask, **kwargs)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(results(model, shards, graph, key_mask=mask, **kwargs), expected)


# A graph holds the call of any scheme as one operator; eager calls of all have these lengths too.
# Down to one row on a rank, and none on the others.
@check(("ring", 37, 6, 1, 0), ("ulysses", 37, 1), **GRAPHS)
def a_graph_for_any_length(scheme, *lengths):
    heads = dist.get_world_size()

    def run(*tensors):
        return ring_attention(*tensors, group=dist.group.WORLD, is_causal=True, scheme=scheme)

    graph = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq_len in lengths:
        shards = make_shards(batch=1, heads=heads, kv_heads=heads, seq_len=seq_len)
        found = []
        for function in (graph, run):
            tensors = leaves(shards)
            out = function(*tensors)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), tensors)])
        assert_same_bits(*found)


@check(**GRAPHS)
def a_layout_of_ones_own_in_a_graph():
    layout = make_layout("cost_balanced", 37, dist.get_world_size(), cu_seqlens=PACKED)
    model = Model(dist.group.WORLD, layout=layout, is_causal=True)
    shards = make_shards(layout)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(results(model, shards, graph), results(model, shards))


@check(**GRAPHS)
def compiled_dropout_draws_as_torch_does():
    model = Model(dist.group.WORLD, dropout_p=0.4)
    shards = make_shards()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    runs = []
    for turn, seed in enumerate((3, 3, 4)):
        # Only the first rank's draw counts.
        torch.manual_seed(seed if dist.get_rank() == 0 else 100 + turn)
        runs.append(results(model, shards, graph))
    assert_same_bits(runs[1], runs[0])
    assert not torch.equal(runs[2][0], runs[0][0])


@check(**GRAPHS)
def what_the_ranks_refuse_reaches_the_caller_of_a_graph():
    model = Model(dist.group.WORLD)
    shards = make_shards()
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"expected window\[0\] to be equal on every rank"):
        model.attention.window = (dist.get_rank(), 0)
        graph(*shards)


@check(("reentrant",), ("not",))
@check(("compiled",), **GRAPHS)
def recomputation_has_the_same_bits(kind):
    model = Model(dist.group.WORLD, dropout_p=0.4, is_causal=True)
    shards = make_shards()
    torch.manual_seed(3 + dist.get_rank())
    expected = results(model, shards)

    def run(*tensors):
        return checkpoint(model, *tensors, use_reentrant=kind == "reentrant")

    if kind == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    tensors = leaves(shards)
    torch.manual_seed(3 + dist.get_rank())
    out = run(*tensors)
    # The reentrant kind wants backward; later draws must not reach the recomputation.
    torch.manual_seed(99)
    out.sum().backward()
    found = [out.detach(), *(x.grad for x in [*tensors, *model.parameters()])]
    assert_same_bits(found, expected)


@check(**GRAPHS)
def any_strides_and_unequal_head_dims():
    model = RingAttention(dist.group.WORLD, is_causal=True)
    shards = make_shards(dim=8, v_dim=5)
    out = model(*shards)
    assert out.shape[3] == 5
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards]
    assert not strided[0].is_contiguous()
    every_other = [torch.stack([x, x], -1).flatten(3)[..., ::2] for x in shards]
    for other in (strided, every_other):
        assert torch.equal(model(*other), out)
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(graph(*other), out)


@check()
def two_groups_at_a_time():
    """A model on all ranks and one on half of them, in one graph of autograd."""
    world, num_ranks = dist.group.WORLD, dist.get_world_size()
    middle = num_ranks // 2
    parts = [range(middle), range(middle, num_ranks)]
    half = [dist.new_group(list(part)) for part in parts][dist.get_rank() >= middle]
    tensors = make_inputs()[:3]
    whole = leaves(tensors)
    alone = ring_attention(*whole, group=None, is_causal=True)
    expected = torch.autograd.grad(alone.square().sum(), whole)
    shards = {g: leaves(shard_sequence(x, dim=2, group=g) for x in tensors) for g in (world, half)}
    modules = {g: RingAttention(g, is_causal=True) for g in (world, half)}
    loss = sum(modules[g](*shards[g]).square().sum() for g in (world, half))
    loss.backward()
    for g in (world, half):
        for shard, full in zip(shards[g], expected, strict=True):
            wanted = shard_sequence(full, dim=2, group=g)
            torch.testing.assert_close(shard.grad, wanted, **TIGHT)


def run_all(_, num_ranks):
    return run_checks(check[num_ranks], before=torch.compiler.reset)


@functools.lru_cache
def outcomes(num_ranks):
    return spawn_ranks(run_all, num_ranks, num_ranks, timeout=300)


@pytest.mark.parametrize(("num_ranks", "name"), check.names())
def test_ranks(num_ranks, name):
    assert_passed(outcomes(num_ranks), name)


def test_it_is_the_function():
    tensors = make_inputs()[:3]
    module = RingAttention(None, is_causal=True, window=(9, 3), softcap=2.0, scale=0.4)
    options = {"is_causal": True, "window": (9, 3), "softcap": 2.0, "scale": 0.4}
    assert torch.equal(module(*tensors), ring_attention(*tensors, group=None, **options))
    assert "window=(9, 3)" in repr(module)


def test_dropout_is_for_training():
    tensors = make_inputs()[:3]
    module = RingAttention(None, dropout_p=0.5)
    expected = ring_attention(*tensors, group=None)
    assert not torch.equal(module(*tensors), expected)
    assert torch.equal(module.eval()(*tensors), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "zagzig"}, "layout to be a Layout or one of"),
        ({"dropout_p": 1.0}, r"dropout_p to be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        RingAttention(None, **options)


def test_wrong_group():
    with pytest.raises(TypeError, match="expected group to be None or a ProcessGroup"):
        RingAttention("cp")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operator(dtype):
    q, k, v = leaves(make_inputs(dtype=dtype)[:3])
    sinks = torch.randn(4, requires_grad=True)
    mask = torch.rand(2, 37) < 0.8
    options = AttentionOptions(None, is_causal=True, scale=0.3, softcap=1.5, dropout_p=0.25)
    seed = torch.tensor([5])
    offsets = torch.tensor(PACKED)
    lens = torch.tensor([11, 3])
    bias = torch.randn(1, 4, 37, 37, requires_grad=True)
    for window, *given in (
        ((9, -1), mask, torch.rand(4), sinks, offsets, None, None),
        (None, None, None, None, None, lens, bias),
    ):
        chosen = _graph_options(dataclasses.replace(options, window=window))
        arguments = (q, k, v, *given, seed, False, *chosen)
        torch.library.opcheck(torch.ops.moe_ext.ring_attention.default, arguments)


def test_options_survive_as_arguments_of_an_operator():
    names = {"scheme": "hybrid", "kv_grad_dtype": torch.bfloat16, "wire": "mx"}
    names["mesh"] = even_grid(4, 2)
    own = Layout("mine", 3, ((range(0, 3, 2),), (), (range(1, 2),)))
    for layout in ("striped", make_layout("striped", 9, 2), own):
        for more in ({}, names):
            given = AttentionOptions(
                None, layout=layout, is_causal=True, scale=0.1, window=(3, -1), softcap=2.0, **more
            )
            assert _options_of_graph(_graph_options(given)) == given


def test_a_second_derivative_is_refused():
    tensors = leaves(make_inputs()[:3])
    graph = torch.compile(RingAttention(None), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError):
        grad = torch.autograd.grad(graph(*tensors).square().sum(), tensors, create_graph=True)
        torch.autograd.grad(grad[0].sum(), tensors)


# A graph of an earlier run has the strides that the fake kernel had then.
@torch._inductor.config.patch(force_disable_caches=True)
def test_inductor():
    """Without operators of torch beside it, which a C++ compiler would build for ten seconds."""
    tensors = make_inputs(dtype=torch.float32)[:3]
    model = RingAttention(None, is_causal=True)
    expected = results(model, tensors)
    found = results(model, tensors, torch.compile(model, fullgraph=True))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
