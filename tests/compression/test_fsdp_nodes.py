"""FSDP2 on four ranks: between nodes, on two meshes, with other numbers of ranks and codecs."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from fsdp_checks import (
    Idle,
    Model,
    assert_a_pass_is_not_finite,
    assert_nearly_all_close,
    assert_nothing_is_lost,
    assert_same,
    backward,
    gradients,
    is_compressed,
    local_gradients,
    loss_of,
    mesh,
    mesh_of,
    node_mesh,
    own_residuals,
    poisoned_backward,
    quantized_gradients,
    signs_of_shards,
    train,
    weights,
    whole,
    wrapped,
)
from outside_codecs import Short
from rank_checks import Checks
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from moe_ext.compression import Quantize, Threshold, TopK, register_codec
from moe_ext.compression.fsdp import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
    zero_plus_plus,
)
from moe_ext.distributed import count_traffic
from moe_ext.distributed.fsdp_state import messages_of


@dataclass(frozen=True)
class Brief(Short):
    """The same by a name of its own."""

    name: ClassVar[str] = "brief"


@dataclass(frozen=True)
class Whole(Short):
    """The same, of whole gradients only."""

    name: ClassVar[str] = "whole"
    shardable: ClassVar[bool] = False


register_codec("brief", lambda density: Brief())
four = Checks()
GRADIENTS = {"zero_quantized_gradients": True, "error_feedback": True}


def over_nodes(**options):
    """(model, compression) of four ranks that are two nodes of two."""
    model, nodes = wrapped(node_mesh()["local"]), node_mesh()["node"].get_group()
    return model, zero_plus_plus(model, node_group=nodes, **options)


@four()
def nodes_of_two_ranks_without_a_codec():
    plain, (ours, _) = wrapped(node_mesh()), over_nodes(node_codec="none")
    assert torch.equal(train(plain, range(2)), train(ours, range(2)))
    assert_same(weights(ours), weights(plain))


@four()
def top_k_between_nodes_sends_its_share():
    model, compression = over_nodes(node_codec="topk", density=0.25)
    backward(model, 0)
    for name, part in compression.state_dict(sharded=False)["residuals"].items():
        owed = sum(int(t.count_nonzero()) for t in part.values())
        numel = sum(t.numel() for t in part.values())
        # Gradients of zero are not owed either.
        assert numel == 0 or 0.6 * numel < owed <= 0.7501 * numel, name


@four()
def padding_has_no_part_in_the_scale_of_signs():
    """Over four ranks the last shard has two rows of padding, besides what fills up blocks."""
    model, _ = quantized_gradients(gradient_format="sign", error_feedback=True)
    backward(model, 0)
    for name, found in gradients(model).items():
        if is_compressed(name):
            coded = [signs_of_shards(local_gradients(0, r)[name], 4) for r in range(4)]
            assert_nearly_all_close(found, torch.stack(coded).mean(0))


@four()
def padding_has_no_part_in_the_scales_between_nodes():
    model, _ = over_nodes(node_codec="sign")
    backward(model, 0)
    for name, found in gradients(model).items():
        if is_compressed(name):
            local = [local_gradients(0, r)[name] for r in range(4)]
            nodes = [(local[0] + local[1]) / 2, (local[2] + local[3]) / 2]
            total = sum(signs_of_shards(node, 2) for node in nodes)
            assert_nearly_all_close(found, signs_of_shards(total, 2) / 2)


@four(("gradients",), ("nodes",))
def a_flush_waits_for_what_has_no_gradient(hop):
    nodes = hop == "nodes"
    model = fully_shard(Idle(), mesh=node_mesh()["local"] if nodes else mesh())
    compression = zero_plus_plus(
        model,
        zero_quantized_gradients=not nodes,
        error_feedback=not nodes,
        node_group=node_mesh()["node"].get_group() if nodes else None,
    )
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().sum().backward()
    assert compression.finite()
    compression.flush()
    with pytest.warns(UserWarning, match="parameters of module '' had no gradient, its messages"):
        model(x, both=False).square().sum().backward()
    assert compression.finite() and compression.ledger.flushing
    assert any(t.any() for t in own_residuals(compression).values())
    model(x).square().sum().backward()
    assert compression.finite() and not compression.ledger.flushing
    assert not any(t.any() for t in own_residuals(compression).values())


@four()
def a_nan_in_one_node_reaches_all_nodes():
    model, compression = over_nodes(node_codec="topk", density=0.1)
    backward(model, 0)
    assert_a_pass_is_not_finite(model, compression, 1, 3, math.inf)


class NanForWeight(torch.autograd.Function):
    """An identity that gives a parameter, and nothing else, a gradient of NaN."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.like = torch.empty_like(weight)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full_like(ctx.like, math.nan)


def assert_only_rank_two_is_bad(model, module, parameter, **kwargs):
    """Every rank is told of a gradient that one rank holds, in whatever message it was."""
    compression = zero_plus_plus(model, **kwargs)
    backward(model, 0)
    assert compression.finite()
    before = own_residuals(compression)
    if dist.get_rank() == 2:
        module.register_forward_hook(
            lambda m, args, out: NanForWeight.apply(out, getattr(m, parameter))
        )
    backward(model, 1)
    assert not compression.finite()
    with pytest.raises(ValueError, match=rf"NaN or infinity in .*{parameter}.* on rank 2$"):
        compression.check()
    assert_same(own_residuals(compression), before)


@four()
def modules_on_meshes_of_their_own_agree():
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=node_mesh()["local"])
    fully_shard(model, mesh=mesh())
    assert_only_rank_two_is_bad(model, model.blocks[0].up, "weight", **GRADIENTS)


@four()
def messages_that_are_not_compressed_are_looked_at():
    model = wrapped(mesh())
    assert_only_rank_two_is_bad(model, model.out, "bias", **GRADIENTS)


@four()
def messages_that_are_not_compressed_between_nodes_are_looked_at():
    model, compression = over_nodes()
    model.out.register_forward_hook(
        lambda m, args, out: NanForWeight.apply(out, m.bias) if dist.get_rank() == 2 else out
    )
    backward(model, 0)
    assert not compression.finite()


@four()
def a_mesh_of_two_dimensions_is_refused_before_anything_is_set():
    model, nodes = wrapped(node_mesh()), node_mesh()["node"].get_group()
    with pytest.raises(ValueError, match="expected fully_shard to have a mesh of one dimension"):
        zero_plus_plus(model, zero_quantized_gradients=True, node_group=nodes)
    assert all(message is None for message in set_on(model))


def set_on(model):
    """What compresses the messages of the outermost module."""
    ours = (CompressedAllGather, CompressedReduceScatter, CompressedAllReduce)
    return [m if isinstance(m, ours) else None for m in messages_of(model).values()]


@four()
def what_is_set_twice_is_refused():
    model, nodes = wrapped(node_mesh()["local"]), node_mesh()["node"].get_group()
    kinds = {
        "all-gather": {"zero_quantized_weights": True},
        "reduce-scatter": {"zero_quantized_gradients": True},
        "all-reduce": {"node_group": nodes},
    }
    for options in kinds.values():
        zero_plus_plus(model, **options)
    for kind, options in kinds.items():
        message = f"expected modules without a compressed {kind}, got the model, which has one"
        with pytest.raises(ValueError, match=message):
            zero_plus_plus(model, **options)
    model.set_custom_reduce_scatter(DefaultReduceScatter())
    with pytest.raises(ValueError, match="got blocks.0, which has one"):
        zero_plus_plus(model, zero_quantized_gradients=True)


@four()
def passes_that_add_up_are_all_looked_at():
    model, compression = quantized_gradients()
    poisoned_backward(model, 0, 1, math.nan)
    loss_of(model, 1).backward()  # onto the gradients of the first
    assert not compression.finite()
    assert not compression.finite()
    with pytest.raises(ValueError, match="got NaN or infinity in .* on rank 1$"):
        compression.check()
    backward(model, 2)
    assert compression.finite()


@four()
def gradients_are_looked_at_where_weights_alone_are_compressed():
    model = wrapped(mesh())
    compression = zero_plus_plus(model, zero_quantized_weights=True)
    assert compression.finite()
    poisoned_backward(model, 0, 1, math.nan)
    assert not compression.finite()
    with pytest.raises(ValueError, match="got NaN or infinity in .*up.weight.* on rank"):
        compression.check()
    model.zero_grad()
    backward(model, 1)
    assert compression.finite()


@four()
def secondary_partitions_gather_inside_a_node():
    alike = {}
    for size in (True, 2):
        model = wrapped(mesh(), reshard_after_forward=size)
        zero_plus_plus(
            model,
            zero_quantized_weights=True,
            zero_hpz_partition_size=1 if size is True else size,
        )
        with count_traffic() as traffic:
            losses = train(model, range(2))
        alike[size] = losses, weights(model), traffic.calls["all_gather"]
    assert torch.equal(alike[True][0], alike[2][0])
    assert_same(alike[2][1], alike[True][1])


@four()
def native_hsdp_with_error_feedback():
    model = wrapped(node_mesh())
    compression = zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)
    assert_nothing_is_lost(model, compression, num_steps=1)


def on_ranks(members, state, steps):
    """Load, run steps, and return the sum of what was applied and what is owed, on every rank."""
    where = mesh_of(members)
    if dist.get_rank() not in members:
        return None, None
    model = wrapped(where)
    compression = zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)
    if state is not None:
        compression.load_state_dict(state)
    for step in steps:
        backward(model, step)
    state = compression.state_dict()
    left = {name: whole(part.items()) for name, part in state["residuals"].items()}
    return {**state, "residuals": left}, gradients(model) if steps else None


def from_first(value):
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


@four()
def residuals_survive_another_number_of_ranks():
    four_state, _ = on_ranks(range(4), None, [0, 1])
    total = {n: t for part in four_state["residuals"].values() for n, t in part.items()}
    assert len(total) == 8
    state = four_state
    for members in ((0, 1), (0, 1, 2)):
        state = from_first(on_ranks(members, from_first(state), [])[0])
        found = {n: t for part in state["residuals"].values() for n, t in part.items()}
        assert found.keys() == total.keys()
        for name, tensor in total.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9)
    # And they are applied: the next gradients of 3 ranks plus what is owed then.
    after, applied = on_ranks((0, 1, 2), state, [2])
    after, applied = from_first(after), from_first(applied)
    grads = [local_gradients(2, rank) for rank in range(3)]
    for name, left in total.items():
        want = sum(g[name].double() for g in grads) / 3 + left
        part = next(p for p in after["residuals"].values() if name in p)
        assert (applied[name] + part[name] - want).abs().max() <= 2e-6, name


def compressed(kind, codec):
    if kind == "scattered":
        model = wrapped(mesh())
        return model, zero_plus_plus(model, gradient_format=codec, **GRADIENTS)
    # Both hops owe for a parameter, by the same name.
    hop = {"weight_format": "none", "zero_quantized_weights": True, **GRADIENTS}
    return over_nodes(node_codec=codec, density=0.05, **(hop if kind == "both" else {}))


@four(
    ("scattered", Quantize("int6", block=None)),
    ("scattered", TopK(0.1)),
    ("nodes", "sign"),
    ("nodes", "topk"),
    ("both", "topk"),
    ("nodes", "brief"),
    ("nodes", Threshold(0.1)),
    ("nodes", Quantize("int2", stochastic=True)),
)
def nothing_is_lost(kind, codec):
    model, compression = compressed(kind, codec)
    assert_nothing_is_lost(model, compression)


@four()
def weights_and_gradients_train():
    plain, model = wrapped(mesh()), wrapped(mesh())
    zero_plus_plus(
        model, zero_quantized_weights=True, weight_format=Brief(), gradient_format="brief",
        **GRADIENTS,
    )  # fmt: skip
    with count_traffic() as traffic:
        found = train(model, range(3))
    want = train(plain, range(3))
    torch.testing.assert_close(found, want, rtol=0.02, atol=0)
    # Half of what float32 numbers take, and what is not compressed.
    numel = sum(p.numel() for p in plain.parameters())
    sent = traffic.sent_bytes["all_to_all"]
    assert 0 < sent < 3 * 0.6 * 4 * numel


test_four_ranks = four.test(4)


@pytest.mark.parametrize("codec", ["powersgd", "auto", Whole()])
def test_codecs_that_cannot_be_cut_are_refused(codec):
    with pytest.raises(ValueError, match="CompressedReduceScatter: expected format to be one of"):
        CompressedReduceScatter(codec)
