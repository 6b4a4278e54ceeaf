"""torch's attention inside `sequence_parallel`."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import TIGHT, leaves, make_inputs, with_grads
from rank_checks import ChecksOn
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as bound_early
from torch.utils.checkpoint import checkpoint

from moe_ext.attention import (
    ring_attention,
    sequence_parallel,
    shard_sequence,
)

check = ChecksOn(2, 3)  # by the number of ranks


def expect_shards(found, whole, **where):
    for part, full in zip(found, whole, strict=True):
        torch.testing.assert_close(part, shard_sequence(full, dim=2, **where), **TIGHT)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.7},
    "gqa": {"is_causal": True, "enable_gqa": True},
}


@check(*((case, layout) for case in CASES for layout in ("zigzag", "contiguous")))
def equals_one_process(case, layout):
    *tensors, grad = make_inputs(kv_heads=2 if case == "gqa" else 4)
    where = {"group": dist.group.WORLD, "layout": layout}
    call = functools.partial(F.scaled_dot_product_attention, **CASES[case])
    whole = with_grads(call, *tensors, grad)
    shards = leaves(shard_sequence(x, dim=2, **where) for x in tensors)
    with sequence_parallel(**where):
        out = call(*shards)
    # Autograd needs no context.
    grads = torch.autograd.grad(out, shards, shard_sequence(grad, dim=2, **where))
    expect_shards([out.detach(), *grads], whole, **where)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), sequence_parallel(**where):
            assert torch.equal(call(*shards), out)


@check()
def options_of_the_context_hold():
    *tensors, _ = make_inputs(kv_heads=4)
    mask = torch.arange(37)[None].expand(2, -1) % 5 != 1
    where = {"group": dist.group.WORLD, "layout": "per_document", "cu_seqlens": (0, 20, 37)}
    shards = [shard_sequence(x, dim=2, **where) for x in tensors]
    options = {"window": (7, 0), "softcap": 2.0, "scheme": "all_gather"}
    options["key_mask"] = shard_sequence(mask, dim=1, **where)
    with sequence_parallel(**where, **options):
        found = F.scaled_dot_product_attention(*shards)
    assert torch.equal(found, ring_attention(*shards, **where, **options))


@check()
def two_groups_at_a_time():
    """Nested: all ranks, then this rank's half of them, then all again."""
    world, num_ranks = dist.group.WORLD, dist.get_world_size()
    halves = [
        dist.new_group(list(r)) for r in (range(num_ranks // 2), range(num_ranks // 2, num_ranks))
    ]
    half = halves[dist.get_rank() >= num_ranks // 2]
    *tensors, _ = make_inputs(kv_heads=4)
    expected = F.scaled_dot_product_attention(*tensors)
    for_world = [shard_sequence(x, dim=2, group=world) for x in tensors]
    for_half = [shard_sequence(x, dim=2, group=half, layout="striped") for x in tensors]
    with sequence_parallel(world):
        before = F.scaled_dot_product_attention(*for_world)
        with sequence_parallel(half, layout="striped"):
            inner = F.scaled_dot_product_attention(*for_half)
        after = F.scaled_dot_product_attention(*for_world)
    expect_shards([before, after], [expected, expected], group=world)
    expect_shards([inner], [expected], group=half, layout="striped")


@check()
def masks_of_all_pairs_are_served():
    where = {"group": dist.group.WORLD, "layout": "striped"}
    *tensors, grad = make_inputs(kv_heads=4)
    bias = torch.randn(2, 4, 37, 37, generator=torch.Generator().manual_seed(1)).double()
    shards = [shard_sequence(x, dim=2, **where) for x in tensors]
    attend, part = F.scaled_dot_product_attention, shard_sequence(grad, dim=2, **where)
    for mask in (bias, bias[0], bias[0, 0], bias[:, :1, :1]):
        dim = mask.dim() - 2
        rows = mask if mask.shape[dim] == 1 else shard_sequence(mask, dim=dim, **where)
        *expected, wanted = with_grads(attend, *tensors, mask, grad)
        with sequence_parallel(**where):
            *found, of_rows = with_grads(attend, *shards, rows, part)
        expect_shards(found, expected, **where)
        if rows is mask:
            dist.all_reduce(of_rows)
        else:
            wanted = shard_sequence(wanted, dim=dim, **where)
        torch.testing.assert_close(of_rows, wanted, **TIGHT)
    seen = bias[:, :1] > -1
    expected = with_grads(attend, *tensors, grad, attn_mask=seen)
    with sequence_parallel(**where):
        rows = shard_sequence(seen, dim=2, **where)
        found = with_grads(attend, *shards, part, attn_mask=rows)
    expect_shards(found, expected, **where)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


@check(("reentrant",), ("not",))
def checkpointing(kind):
    """The recomputation runs after the context: the decorated function brings its own."""
    where = {"group": dist.group.WORLD}
    x = torch.randn(2, 19, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = Block()
    block(x.requires_grad_()).square().sum().backward()
    shard = shard_sequence(x.detach(), dim=1, **where).requires_grad_()
    step = sequence_parallel(**where)(Block())
    out = checkpoint(step, shard, use_reentrant=kind == "reentrant")
    out.square().sum().backward()
    torch.testing.assert_close(shard.grad, shard_sequence(x.grad, dim=1, **where), **TIGHT)


@check()
def a_recomputation_outside_is_refused():
    shard = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    block = Block()
    with (
        sequence_parallel(dist.group.WORLD),
        pytest.raises(ValueError, match="reentrant checkpoint"),
    ):
        checkpoint(block, shard, use_reentrant=True)
    with sequence_parallel(dist.group.WORLD):
        out = checkpoint(block, shard, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        out.sum().backward()
    with sequence_parallel(dist.group.WORLD):
        out = checkpoint(block, shard, use_reentrant=False)
        out.sum().backward()


@check(on=(2,))
def masks_of_torchs_layers_are_refused():
    shard = torch.zeros(2, 5, 16, dtype=torch.float64)
    attend = functools.partial(Block().attention, shard, shard, shard, need_weights=False)
    rows = torch.zeros(5, 10, dtype=torch.bool)
    for masks, name in (
        ({"key_padding_mask": rows[:2, :5]}, "key_padding_mask"),
        ({"attn_mask": rows}, "attn_mask"),
        ({"attn_mask": rows, "is_causal": True, "key_padding_mask": rows[:2, :5]}, "key_padding"),
    ):
        with (
            sequence_parallel(dist.group.WORLD),
            pytest.raises(ValueError, match=f"expected {name}.* to be None .*, got a tensor"),
        ):
            attend(**masks)
    with sequence_parallel(dist.group.WORLD):
        attend(attn_mask=rows, is_causal=True)


@check()
def a_mistake_of_one_rank_is_an_error_on_all():
    *tensors, _ = make_inputs(kv_heads=4)
    q, k, v = (shard_sequence(x, dim=2, group=dist.group.WORLD) for x in tensors)
    odd = dist.get_rank() == 1
    attend, shard = F.scaled_dot_product_attention, torch.zeros(2, 5, 16, dtype=torch.float64)
    layer = functools.partial(Block().attention, shard, shard, shard)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    for match, call, args, wrong in (
        ("key .* as long as", attend, (q, k, v), {"key": k[:, :, 1:]}),
        ("value .* of shape", attend, (q, k, v), {"value": v[0, 0]}),
        ("key .* heads without enable_gqa", attend, (q, k, v), {"key": k[:, :2]}),
        ("attn_mask .* dimensions", attend, (q, k, v), {"attn_mask": hidden[0]}),
        ("need_weights", layer, (), {"need_weights": True}),
        ("key_padding_mask", layer, (), {"key_padding_mask": hidden}),
    ):
        given = dict(zip(("query", "key", "value"), args, strict=False))
        given |= {"need_weights": False} if call is layer else {}
        with (
            sequence_parallel(dist.group.WORLD),
            pytest.raises(ValueError, match=f"expected {match}.* on rank 1$"),
        ):
            call(**given | (wrong if odd else {}))
    with sequence_parallel(dist.group.WORLD):
        assert torch.isfinite(attend(q, k, v)).all()


@check(on=(2,))
def compiled():
    where = {"group": dist.group.WORLD}
    *tensors, _ = make_inputs(kv_heads=4)
    shards = [shard_sequence(x, dim=2, **where) for x in tensors]

    def inside(q, k, v):
        with sequence_parallel(**where):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def around(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    expected = inside(*shards)
    compile_whole = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    assert torch.equal(compile_whole(inside)(*shards), expected)
    graph = compile_whole(around)
    with sequence_parallel(**where):
        assert torch.equal(graph(*shards), expected)
    assert torch.equal(graph(*shards), around(*shards))
    block = Block()
    graph = torch.compile(block, backend="aot_eager")
    x = torch.randn(2, 19, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shard = shard_sequence(x, dim=1, **where)
    for _ in range(2):
        with sequence_parallel(**where):
            torch.testing.assert_close(graph(shard), block(shard), rtol=0, atol=0)
        torch.testing.assert_close(graph(x), block(x), rtol=0, atol=0)


test_ranks = check.test(timeout=300)


def inputs(**kwargs):
    return make_inputs(kv_heads=4, **kwargs)[:3]


def ring_ran(q, k, v, **kwargs):
    """Whether a call goes to our operators, told by a dropout that is keyed on positions."""
    torch.manual_seed(3)
    expected = ring_attention(q, k, v, group=None, dropout_p=0.5)
    torch.manual_seed(3)
    return torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), expected)


def test_every_way_to_call_it():
    tensors = inputs()
    torch.manual_seed(3)
    expected = ring_attention(*tensors, group=None, dropout_p=0.5)
    ways = (
        F.scaled_dot_product_attention,
        bound_early,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
        lambda q, k, v, dropout_p: bound_early(query=q, key=k, value=v, dropout_p=dropout_p),
    )
    for call in ways:
        with sequence_parallel(None):
            torch.manual_seed(3)
            assert torch.equal(call(*tensors, dropout_p=0.5), expected)
        torch.manual_seed(3)
        assert not torch.equal(call(*tensors, dropout_p=0.5), expected)


def test_three_dimensions():
    tensors = [x[:, 0] for x in inputs()]
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    with sequence_parallel(None):
        found = F.scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(found, expected, **TIGHT)


def test_it_ends_with_an_exception():
    function = F.scaled_dot_product_attention
    with pytest.raises(KeyError), sequence_parallel(None), sequence_parallel(None):
        assert ring_ran(*inputs())
        raise KeyError
    assert not ring_ran(*inputs())
    with pytest.raises(ValueError, match="attn_mask"), sequence_parallel(None):
        bound_early(*inputs(), attn_mask=torch.zeros(37, 36))
    assert not ring_ran(*inputs())
    assert F.scaled_dot_product_attention is function


def test_other_threads_are_left_alone():
    found = []
    with sequence_parallel(None):
        thread = threading.Thread(target=lambda: found.append(ring_ran(*inputs())))
        thread.start()
        thread.join()
        found.append(ring_ran(*inputs()))
    assert found == [False, True]


@pytest.mark.parametrize("grad", [True, False])
def test_layers_of_torch(grad):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).eval()
    x = torch.randn(3, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    with torch.set_grad_enabled(grad):
        hidden = torch.arange(7).expand(3, 7) > torch.tensor([[6], [4], [2]])
        for kwargs in (
            {},
            {"src_mask": mask, "is_causal": True},
            {"src_mask": mask},
            {"src_key_padding_mask": hidden},
        ):
            expected = layer(x, **kwargs)
            with sequence_parallel(None):
                torch.testing.assert_close(layer(x, **kwargs), expected)
    with (
        sequence_parallel(None),
        pytest.raises(ValueError, match="need_weights .* got True"),
    ):
        layer.self_attn(x, x, x)


def test_it_trains_a_layer_with_dropout():
    layer = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    x = torch.randn(3, 7, 16)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        with sequence_parallel(None):
            found.append(layer(x, x, x, need_weights=False)[0])
    assert torch.equal(found[0], found[1])
    torch.manual_seed(3)
    assert not torch.allclose(layer(x, x, x, need_weights=False)[0], found[0])


q, k, v = inputs()
REFUSED = {
    "attn_mask": ((q, k, v, torch.zeros(37)), {}, r"attn_mask .* 2 to 4 dim.* got \[37\]"),
    "lengths": ((q, k[:, :, :5], v[:, :, :5]), {}, "key .* this rank's 37 queries, got 5"),
    "heads": ((q, k[:, :2], v[:, :2]), {}, "key .* of 4 heads without enable_gqa, got 2 heads"),
    "rank": ((q[0, 0], k[0, 0], v[0, 0]), {}, r"query .* \[B, H, L, D\] or"),
    "dropout": ((q, k, v), {"dropout_p": 1.0}, r"dropout_p to be in \[0, 1\), got 1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    args, kwargs, message = REFUSED[name]
    with sequence_parallel(None), pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(*args, **kwargs)


def test_flex_attention_is_refused():
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 2, 128, 16)
    # torch's own compilation of it wraps the ValueError.
    text = "expected attention by scaled_dot_product_attention .*, got flex_attention, which sees"
    with sequence_parallel(None), pytest.raises(Exception, match=text):
        flex_attention(x, x, x)
    flex_attention(x, x, x)


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    with sequence_parallel(None), pytest.raises(ValueError, match="query .* a plain tensor"):
        F.scaled_dot_product_attention(x, x, x)
