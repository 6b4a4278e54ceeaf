"""FSDP2 with compressed messages against FSDP2 without; one spawn of ranks for each number."""

import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_checks import (
    Idle,
    Model,
    assert_a_pass_is_not_finite,
    assert_same,
    backward,
    batch,
    gradients,
    is_compressed,
    loss_of,
    mean_of_gradients,
    mesh,
    owed,
    own_residuals,
    quantized_gradients,
    ranks,
    train,
    weights,
    wrapped,
)
from hook_models import same_on_all_ranks
from rank_checks import Checks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moe_ext.compression import TopK
from moe_ext.compression.fsdp import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
    zero_plus_plus,
)
from moe_ext.distributed import RankFailureError, count_traffic
from moe_ext.testing import spawn_ranks

two = Checks()
# Half a code over the largest number; fp8 has 3 bits behind the leading one.
RELATIVE = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 1 / 16, "bf16": 2.0**-8}


@two(({"weight_format": "none", "gradient_format": "none"},), ({"min_numel": 10**6},))
def without_codes_it_is_plain_fsdp_bit_for_bit(options):
    plain, ours = wrapped(mesh()), wrapped(mesh())
    zero_plus_plus(
        ours,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        **options,
    )
    assert torch.equal(train(plain, range(2)), train(ours, range(2)))
    assert_same(weights(ours), weights(plain))


@two(("int8",), ("int4",), ("fp8",), ("bf16",))
def gathered_weights_are_within_half_a_code(format):
    model = wrapped(mesh())
    zero_plus_plus(model, zero_quantized_weights=True, weight_format=format)
    want = weights(model)
    for module in (model, *model.blocks):
        module.unshard()
    for name, found in model.named_parameters():
        error = (found - want[name]).abs().max()
        if is_compressed(name):
            assert 0 < error <= 1.001 * RELATIVE[format] * want[name].abs().max(), name
        else:
            assert error == 0, name
        assert same_on_all_ranks(found.detach()), name


@two(
    ("int8", "AVG"),
    ("int4", "AVG"),
    ("bf16", "AVG"),
    ("int8", "SUM"),
    ("int8", "divide"),
    ("int8", "premultiply"),
)
def gradients_are_within_half_a_code(format, op):
    model, compression = quantized_gradients(gradient_format=format)
    factor = 1.0
    for module in (model, *model.blocks):
        if op in ("SUM", "divide"):
            module.set_force_sum_reduction_for_comms(True)
        if op in ("divide", "premultiply"):
            module.set_gradient_divide_factor(8.0)
            factor = ranks() / 8.0
    backward(model, 0)
    want, largest = mean_of_gradients([0])
    for name, found in gradients(model).items():
        error = (found / factor - want[name]).abs().max().item()
        bound = RELATIVE[format] * math.fsum(largest[name]) / ranks()
        if not is_compressed(name):
            bound = 0.0
        elif bound > 1e-5:
            assert error > 0, name
        assert error <= 1.001 * bound + 1e-6, name
    assert compression.finite()


@two()
def premultiplied_sums_are_understood():
    out, flat = torch.empty(512), torch.randn(1024, generator=torch.Generator().manual_seed(2))
    comm = CompressedReduceScatter("int8")
    op = dist._make_nccl_premul_sum(0.25)
    work = comm(out, flat, dist.group.WORLD, op, async_op=True)
    assert work.wait()
    mine = flat.view(2, 512)[dist.get_rank()]
    torch.testing.assert_close(out, 0.5 * mine, rtol=0, atol=flat.abs().max().item() / 254)
    with pytest.raises(ValueError, match=r"expected op to be SUM, AVG or PREMUL_SUM .*, got .*MAX"):
        comm(out, flat, dist.group.WORLD, dist.ReduceOp.MAX)


@two()
def random_rounding_depends_on_the_seed_alone():
    found = []
    for seed in (1, 1, 2):
        model, _ = quantized_gradients(gradient_format="int4", stochastic=True, seed=seed)
        backward(model, 0)
        found.append(gradients(model))
    assert_same(found[0], found[1])
    name = "blocks.0.up.weight"
    assert not torch.equal(found[0][name], found[2][name])


@two()
def random_rounding_is_unbiased_and_independent_over_ranks_steps_and_modules():
    """Of the same gradient everywhere: errors are those of independent draws, whose mean ends."""
    flat = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    steps, mine = 64, flat.view(ranks(), -1)[dist.get_rank()].double()
    errors = []
    for name in ("a", "b"):
        comm = CompressedReduceScatter("int4", stochastic=True, name=name)
        for _ in range(steps):
            out = torch.empty(len(mine))
            comm(out, flat, dist.group.WORLD, dist.ReduceOp.AVG)
            errors.append(out - mine)
    # A number between two codes is rounded up with the probability of its place between them.
    blocks = mine.view(-1, 256)
    unit = blocks.abs().amax(1, keepdim=True) * 2 * RELATIVE["int4"]
    place = (blocks / unit).frac().abs()
    variance = (unit.square() * place * (1 - place)).sum().item()
    each = torch.stack(errors).square().sum(1).mean().item()
    of_mean = torch.stack(errors).mean(0).square().sum().item()
    # 65536 draws, and 512 means of them: within some 10 and 5 standard deviations.
    assert each == pytest.approx(variance / ranks(), rel=0.05)
    assert of_mean == pytest.approx(variance / (ranks() * len(errors)), rel=0.4)


@two()
def a_nan_on_one_rank_leaves_residuals_as_they_were():
    model, compression = quantized_gradients(error_feedback=True)
    backward(model, 0)
    assert compression.finite()
    assert any(t.any() for t in own_residuals(compression).values())
    assert_a_pass_is_not_finite(model, compression, 1, 1, math.nan)
    assert all(g.isnan().all() for n, g in gradients(model).items() if is_compressed(n))
    with pytest.raises(ValueError, match=r"got NaN or infinity in .*up\.weight.* on rank 1$"):
        compression.check()
    backward(model, 2)
    assert compression.finite()
    assert all(g.isfinite().all() for g in gradients(model).values())


@two()
def weights_that_are_nan_on_one_rank_reach_all():
    model = wrapped(mesh())
    zero_plus_plus(model, zero_quantized_weights=True)
    if dist.get_rank() == 1:
        next(p for n, p in model.named_parameters() if n == "blocks.0.up.weight").data.to_local()[
            0, 0
        ] = float("nan")
    model.blocks[0].unshard()
    found = dict(model.named_parameters())["blocks.0.up.weight"]
    assert found[25:].isnan().all()
    assert found[:25].isfinite().all()


@two((64,), (256,))
def bytes_follow_from_the_format(block):
    shards = {
        name: math.ceil(p.shape[0] / ranks()) * p[0].numel()
        for name, p in Model().named_parameters()
    }
    dense = sum(n for name, n in shards.items() if not is_compressed(name))
    coded = [n for name, n in shards.items() if is_compressed(name)]
    blocks = sum(math.ceil(n / block) for n in coded)
    sent = {}
    for format, bits in (("int8", 8), ("int4", 4)):
        model = wrapped(mesh())
        zero_plus_plus(
            model,
            zero_quantized_weights=True,
            zero_quantized_gradients=True,
            weight_format=format,
            gradient_format=format,
            block=block,
        )
        with count_traffic() as traffic:
            backward(model, 0)
        sent[format] = traffic.sent_bytes
        # One more for each module that is coded tells that it is finite.
        assert traffic.sent_bytes["reduce_scatter"] == 4 * (dense + 2)
        codes = blocks * block * bits // 8 + blocks * 4
        assert codes <= traffic.sent_bytes["all_to_all"] <= codes + 4 * 64
    assert sent["int4"]["all_gather"] < 0.62 * sent["int8"]["all_gather"]


@two(("param",), ("reduce",))
def mixed_precision(kind):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16 if kind == "reduce" else torch.float32,
    )
    plain, ours = wrapped(mesh(), mp_policy=policy), wrapped(mesh(), mp_policy=policy)
    zero_plus_plus(ours, zero_quantized_gradients=True, gradient_format="int8")
    assert torch.equal(backward(plain, 0), backward(ours, 0))
    want = gradients(plain)
    for name, found in gradients(ours).items():
        assert found.dtype == torch.float32
        # Half a code of int8 and, where sums are rounded, 8 bits of bfloat16.
        bound = want[name].abs().max() * (ranks() / 254 + (1 / 128 if kind == "reduce" else 0))
        torch.testing.assert_close(found, want[name], rtol=0.02, atol=3 * bound.item() + 1e-6)
    zero_plus_plus(ours, zero_quantized_weights=True)
    assert abs(backward(ours, 1) - backward(plain, 1)) < 0.02


@two()
def a_flush_applies_what_is_owed():
    model, compression = quantized_gradients(error_feedback=True)
    backward(model, 0)
    left = owed(compression)
    compression.flush()
    backward(model, 1)
    assert compression.finite()
    want, largest = mean_of_gradients([1])
    for name, found in gradients(model).items():
        total = want[name] + left.get(name, 0)
        assert (found - total).abs().max() <= 1e-6 * (1 + max(largest[name])), name
    assert not any(t.any() for t in own_residuals(compression).values())
    backward(model, 2)
    assert all(t.any() for t in own_residuals(compression).values())


@two()
def accumulated_gradients_are_sent_once():
    model, compression = quantized_gradients(gradient_format="int8")
    model.set_requires_gradient_sync(False)
    with count_traffic() as traffic:
        loss_of(model, 0).backward()
    assert traffic.total_bytes == 0
    model.set_requires_gradient_sync(True)
    loss_of(model, 1).backward()
    assert compression.finite()
    want, largest = mean_of_gradients([0, 1])
    for name, found in gradients(model).items():
        bound = 2 * max(largest[name]) / 254 if is_compressed(name) else 0
        assert (found - want[name]).abs().max() <= 1.001 * bound + 1e-6, name


@two()
def parameters_may_be_frozen_and_thawed():
    model, compression = quantized_gradients(error_feedback=True)
    backward(model, 0)
    frozen = model.blocks[0].up.weight
    states = [compression.state_dict(sharded=sharded) for sharded in (True, False)]
    before = own_residuals(compression)
    frozen.requires_grad_(False)
    for state in states:
        compression.load_state_dict(state)
    assert_same(own_residuals(compression), before)
    backward(model, 1)
    kept = compression.state_dict()["residuals"]["reduce_scatter.blocks.0"]
    assert "blocks.0.down.weight" in kept
    assert "blocks.0.up.weight" not in kept
    frozen.requires_grad_(True)
    backward(model, 2)
    assert "blocks.0.up.weight" in compression.state_dict()["residuals"]["reduce_scatter.blocks.0"]


@two((False, True), (True, False), (True, True))
def frozen_and_other_weights(all_weights, frozen_weights):
    """`zero_quantized_weights` is of all, the other flag of frozen ones: together of all."""
    model = Model()
    model.blocks[0].requires_grad_(False)
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    model = wrapped(mesh(), model)
    zero_plus_plus(
        model,
        zero_quantized_weights=all_weights,
        zero_quantized_nontrainable_weights=frozen_weights,
    )
    for block in model.blocks:
        block.unshard()
    found = dict(model.named_parameters())
    assert not torch.equal(found["blocks.0.up.weight"], want["blocks.0.up.weight"])
    same = torch.equal(found["blocks.1.up.weight"], want["blocks.1.up.weight"])
    assert same == (not all_weights)


@two()
def a_parameter_without_gradient_is_told():
    plain, ours = fully_shard(Idle(), mesh=mesh()), fully_shard(Idle(), mesh=mesh())
    zero_plus_plus(ours, zero_quantized_gradients=True)
    x = batch(0).repeat(1, 6)[:, :64]
    plain(x, both=False).sum().backward()
    with pytest.warns(UserWarning, match="had no gradient"):
        ours(x, both=False).sum().backward()
    assert_same(gradients(ours), gradients(plain))
    if hasattr(ours, "set_reduce_scatter_unused_params"):
        ours.zero_grad()
        ours.set_reduce_scatter_unused_params(True)
        with warnings.catch_warnings(), count_traffic() as traffic:
            warnings.simplefilter("error", UserWarning)
            ours(x, both=False).sum().backward()
        assert traffic.calls["all_to_all"] == 1


@two()
def modules_that_are_wrapped_together():
    def pair():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32))
        fully_shard([model[0], model[2]], mesh=mesh())
        return fully_shard(model, mesh=mesh())

    plain, ours = pair(), pair()
    found = zero_plus_plus(
        ours, zero_quantized_gradients=True, gradient_format="int8", error_feedback=True
    )
    x = batch(0).repeat(1, 3)[:, :32]
    plain(x).square().sum().backward()
    with count_traffic() as traffic:
        ours(x).square().sum().backward()
    assert traffic.calls["all_to_all"] == 1
    want = gradients(plain)
    for name, grad in gradients(ours).items():
        bound = 0.01 * want[name].abs().max().item()
        torch.testing.assert_close(grad, want[name], rtol=0, atol=bound)
    names = [set(part) for part in found.state_dict()["residuals"].values() if part]
    assert names == [{"0.weight", "2.weight"}]


@two()
def asynchronous_gathers():
    shard = torch.randn(700, generator=torch.Generator().manual_seed(dist.get_rank()))
    comm = CompressedAllGather("int8")
    out, again = torch.empty(1400), torch.empty(1400)
    assert comm(out, shard, dist.group.WORLD) is None
    work = comm(again, shard, dist.group.WORLD, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait()
    assert torch.equal(out, again)
    bytes_in = torch.arange(12, dtype=torch.uint8)
    gathered = torch.empty(24, dtype=torch.uint8)
    comm(gathered, bytes_in, dist.group.WORLD)
    assert torch.equal(gathered, bytes_in.repeat(2))


@two()
def wrong_states_and_options_are_refused():
    model, compression = quantized_gradients(error_feedback=True)
    backward(model, 0)
    good, before = compression.state_dict(sharded=False), own_residuals(compression)
    sharded = compression.state_dict()
    module = "reduce_scatter.blocks.0"
    cut = {n: t[:, :1] for n, t in good["residuals"][module].items()}
    for state, match in (
        ({**good, "version": 2}, "expected state to be of version 1, got 2"),
        ({**good, "num_ranks": 3}, "expected own residuals of rank . of 2, got those of rank . of"),
        ({**good, "residuals": {}}, r"expected residuals of \[.*\], got \[\]"),
        ({**good, "residuals": {**good["residuals"], module: cut}}, "expected the residual of"),
        (
            {**sharded, "residuals": {**sharded["residuals"], module: {"x": torch.ones(1)}}},
            "expected residuals of parameters",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            compression.load_state_dict(state)
    assert_same(own_residuals(compression), before)
    with pytest.raises(ValueError, match=r"expected modules to be wrapped with .*=4\) for"):
        zero_plus_plus(wrapped(mesh()), zero_hpz_partition_size=4)
    with pytest.raises(ValueError, match=r"expected error_feedback to be on for 'topk'"):
        CompressedAllReduce("topk", dist.group.WORLD, error_feedback=False)
    with pytest.raises(ValueError, match=r"expected module to be given with error feedback"):
        CompressedAllReduce("int8", dist.group.WORLD)


@two()
def deepspeeds_names_are_taken():
    with pytest.warns(UserWarning, match="err_beta, reset_T of zeropp_loco_param are not used"):
        found = zero_plus_plus(
            wrapped(mesh()),
            zero_quantized_weights=True,
            zero_quantized_gradients=True,
            zero_hpz_partition_size=1,
            zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024},
        )
    assert all(comm.residual is not None for comm in found.reduce_scatters.values())
    assert list(found.all_gathers) == ["", "blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match="expected zeropp_loco_param to have keys"):
        zero_plus_plus(wrapped(mesh()), zeropp_loco_param={"beta": 1.0})


test_two_ranks = two.test(2)


def lose_a_rank(rank):
    # Gathered weights stay, so that the backward pass sends gradients alone.
    model = wrapped(mesh(), reshard_after_forward=False)
    compression = zero_plus_plus(model, zero_quantized_gradients=True, error_feedback=True)
    backward(model, 0)
    before = own_residuals(compression)
    assert before
    loss = loss_of(model, 1)
    if rank == 1:
        os._exit(1)
    with pytest.raises(RankFailureError, match="rank 1"):
        loss.backward()
    assert_same(own_residuals(compression), before)
    return True


def test_a_lost_rank_is_named_and_residuals_stay():
    assert spawn_ranks(lose_a_rank, 2, may_die=(1,), group_timeout=10.0) == [True, None]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: CompressedAllGather("sign"),
            "CompressedAllGather: expected format to be one of those that need no .*, got 'sign'",
        ),
        (
            lambda: CompressedAllGather(TopK(0.5)),
            r"expected format to be one of those that need no error feedback, got TopK\(",
        ),
        (
            lambda: CompressedReduceScatter(TopK(momentum=0.9), error_feedback=True),
            "TopK: expected momentum to be None where parts of a gradient .*, got 0.9",
        ),
        (
            lambda: CompressedReduceScatter(TopK(scope=64), error_feedback=True),
            "TopK: expected scope to be 'bucket' where parts of a gradient .*, got 64",
        ),
        (
            lambda: CompressedReduceScatter("int8", 100),
            r"expected block to be a power of two in \[64, 1024\], got 100",
        ),
        (
            lambda: CompressedReduceScatter("sign"),
            "expected error_feedback to be on for 'sign', got False",
        ),
        (
            lambda: CompressedReduceScatter("topk"),
            "expected error_feedback to be on for 'topk', got False",
        ),
        (
            lambda: CompressedReduceScatter("int8", error_feedback=True),
            "expected module to be given with error feedback, got None",
        ),
        (
            lambda: CompressedAllReduce("int8", density=0.0),
            r"expected density to be in \(0, 1\], got 0.0",
        ),
        (
            lambda: CompressedAllReduce("huffman"),
            "CompressedAllReduce: expected format to be one of .*'topk'.*, got 'huffman'",
        ),
        (
            lambda: zero_plus_plus(nn.Linear(2, 2)),
            "zero_plus_plus: expected model to be wrapped with fully_shard, got Linear",
        ),
    ],
)
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()
