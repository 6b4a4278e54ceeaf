import math

import pytest
import torch
import torch.distributed as dist
from hook_models import (
    CAP_MB,
    CODECS,
    KINDS,
    Chooser,
    Ledger,
    Net,
    assert_mean_of_short_gradients,
    batch,
    conserving_steps,
    gradients_of,
    local_gradients,
    loss_of,
    momentum_is_that_of_sgd,
    reference,
    same_on_all_ranks,
    sent_by,
    summed,
    wrapped,
)
from rank_checks import Checks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from moe_ext.compression import (
    CompressionState,
    Dense,
    Policy,
    PowerSGD,
    Quantize,
    ResidualMonitor,
    TopK,
    Warmup,
    codec_of,
    compress_hook,
    flush,
    prune,
)
from moe_ext.compression.feedback import by_name
from moe_ext.distributed import count_traffic
from moe_ext.testing import spawn_ranks


def none_is_plain_ddp(kind):
    ours, state = wrapped(codec="none", ddp=KINDS[kind])
    theirs = reference(**KINDS[kind])
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs)]
    for step in range(3):
        branch = kind != "unused" or step % 2 == 0
        got, want = (gradients_of(m, step, branch=branch) for m in (ours, theirs))
        for name, gradient in want.items():
            if gradient is None:
                assert got[name] is None, name
            else:
                assert torch.equal(got[name], gradient), (kind, step, name)
        for optimizer in optimizers:
            optimizer.step()
    assert state.step == 3


def rank_of_any_number(rank):
    for kind in KINDS:
        none_is_plain_ddp(kind)
    for name in CODECS:
        for parallel, _ in conserving_steps(name):
            with torch.no_grad():
                for p in parallel.parameters():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.05)
    static_graph_of_several_buckets()


class Mixed(torch.nn.Module):
    """Parameters of two types and sparse gradients: a bucket each in DDP's first pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(20, 8, sparse=True)
        self.wide = torch.nn.Linear(8, 300)
        self.short = torch.nn.Linear(300, 4).bfloat16()

    def forward(self, x):
        wide = self.wide(self.embedding((x[:, 0] * 10).long() % 20))
        return self.short(wide.bfloat16()).float()


def static_graph_of_several_buckets():
    theirs, size = reference(model=Mixed(), static_graph=True), dist.get_world_size()
    for codec in ("none", "int8"):
        ours, state = wrapped(Mixed(), codec=codec, ddp={"static_graph": True})
        left = 0.0
        for step in range(3):
            got, want = gradients_of(ours, step), gradients_of(theirs, step)
            for name in want if codec == "none" else ():
                # DDP divides before it adds, in bfloat16 where the parameter is.
                unit = 2.0**-8 if "short" in name else 2.0**-24
                bound = size * unit * want[name].to_dense().abs().max()
                assert (got[name] - want[name]).to_dense().abs().max() <= bound, (step, name)
            left = left + size * (want["wide.weight"] - got["wide.weight"]).double()
        if codec == "int8":
            kept = by_name(state.state_dict()["memory"]).get("wide.weight", {})
            owed = summed(kept.get("residual", torch.zeros(1)))
            bound = 2e-6 * size * want["wide.weight"].abs().max()
            assert owed.any() == (size > 1) and (left - owed).abs().max() <= bound, codec
        assert state.step == 3
    # DDP reduces what was trained when it was made, whatever is frozen or trained since then.
    for frozen in (False, True):
        model = Mixed()
        model.wide.bias.requires_grad_(not frozen)
        ours, state = wrapped(model, codec="none", ddp={"static_graph": True})
        ours.module.wide.bias.requires_grad_(frozen)
        for step in range(3):
            gradients_of(ours, step)
        assert state.step == 3
    # As a part of another hook's state, where nobody finds DDP by it.
    for knows in (True, False):
        parallel = DistributedDataParallel(Mixed(), static_graph=True)
        state = CompressionState(model=parallel if knows else parallel.module, codec="none")
        parallel.register_comm_hook((state,), hook_of_another_state)
        if knows:
            gradients_of(parallel, 0)
            assert state.step == 1
        else:
            with pytest.raises(ValueError, match="expected state to be made with model="):
                gradients_of(parallel, 0)


def hook_of_another_state(
    states: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    return compress_hook(states[0], bucket)


@pytest.mark.parametrize("world", [1, 3])
def test_none_is_plain_ddp_and_codecs_conserve(world):
    spawn_ranks(rank_of_any_number, world)


def check_fp16_is_that_of_torch():
    policy = Policy("fp16", norm=None, bias=None, dense_below=0)
    ours, _ = wrapped(policy=policy)
    theirs = reference(fp16_compress_hook)
    for step in range(3):
        got, want = gradients_of(ours, step), gradients_of(theirs, step)
        assert all(torch.equal(got[name], want[name]) for name in want)


def check_bf16_rounds_once_a_rank_and_once_an_addition():
    ours, _ = wrapped(policy=Policy("bf16", norm=None, bias=None, dense_below=0))
    size = dist.get_world_size()
    local = local_gradients(ours.module, 0)
    for name, gradient in gradients_of(ours, 0).items():
        magnitude = summed(local[name].abs()) / size
        # Half a unit of 8 bits for each rank, as much for each of P - 1 additions.
        bound = 2.0**-8 * magnitude * (1 + size)
        assert bool(((gradient - summed(local[name]) / size).abs() <= bound + 1e-30).all()), name


class Laid(nn.Module):
    """Parameters of any strides, whose gradients are given."""

    def __init__(self, strided):
        super().__init__()
        torch.manual_seed(4)
        image, matrix, part = (
            torch.randn(8, 16, 3, 3),
            torch.randn(48, 40),
            torch.randn(32, 80),
        )
        if strided:
            image = image.contiguous(memory_format=torch.channels_last)
            matrix, part = matrix.t().contiguous().t(), part[:, ::2]
        self.image, self.matrix = nn.Parameter(image), nn.Parameter(matrix)
        self.part = nn.Parameter(part if strided else part[:, ::2].contiguous())

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True))


def check_gradients_of_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        for codec in ("none", "bf16", "int8", TopK(1.0), TopK(0.2)):
            assert_mean_of_short_gradients(codec, dtype)


def check_parameters_of_any_strides_are_as_contiguous_ones():
    torch.manual_seed(dist.get_rank())
    gradients = [[torch.randn(p.shape) for p in Laid(False).parameters()] for _ in range(2)]
    for codec in ("none", "int8", TopK(0.05, scope="row"), PowerSGD(2), "pruned"):
        found = []
        for strided in (False, True):
            model, kind = Laid(strided), codec
            if codec == "pruned":
                pruning = prune(model, "magnitude", parameters=["image", "matrix"])
                kind = Policy("none", by_name=pruning.codecs())
            parallel = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
            state = CompressionState(model=model, codec=kind)
            parallel.register_comm_hook(state, compress_hook)
            for given in gradients:
                model.zero_grad()
                parallel(given).backward()
            tensors = [p.grad.clone() for p in model.parameters()]
            tensors += state.residuals().values()
            flush(model, state)
            found.append([*tensors, *(p.grad for p in model.parameters())])
        for got, want in zip(found[1], found[0], strict=True):
            assert torch.equal(got, want), codec


def check_no_sync_accumulates_outside():
    for codec in ("none", "int8", TopK(0.1)):
        parallel, state = wrapped(codec=codec)
        with parallel.no_sync():
            loss_of(parallel, batch(0)).backward()
        assert state.step == 0
        want = {n: p.grad.clone() for n, p in parallel.module.named_parameters()}
        for name, gradient in local_gradients(parallel.module, 1).items():
            want[name] += gradient
        loss_of(parallel, batch(1)).backward()
        assert state.step == 1
        ledger = Ledger(state, parallel.module)
        ledger.add(want)
        ledger.check()


def check_momentum_is_that_of_sgd_where_everything_is_sent():
    """A dense step of Deep Gradient Compression, without momentum in the optimizer."""
    momentum_is_that_of_sgd()


def check_learning_rates_scale_what_is_owed():
    """With plain SGD, rate times (P applied + owed) is the sum of rate times gradient."""
    parallel, state = wrapped(codec=TopK(0.05))
    module = parallel.module
    named = dict(module.named_parameters())
    groups = [{"params": [p for n, p in named.items() if n != "branch.weight"]}]
    groups.append({"params": [module.branch.weight]})
    state.options.optimizer = optimizer = torch.optim.SGD(groups, 0.1)
    moved = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in named.items()}
    wanted = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in named.items()}
    for step in range(5):
        for group, rate in zip(
            optimizer.param_groups, (0.1 / (step + 1), 0.3 * 3**step), strict=True
        ):
            group["lr"] = rate
        rates = {n: 0.3 * 3**step if n == "branch.weight" else 0.1 / (step + 1) for n in named}
        local = local_gradients(module, step)
        applied = gradients_of(parallel, step)
        for name in named:
            wanted[name] += rates[name] * summed(local[name])
            moved[name] += rates[name] * dist.get_world_size() * applied[name].double()
    assert {"hidden.weight", "branch.weight"} <= set(state.residuals())
    for name, residual in state.residuals().items():
        total = moved[name] + rates[name] * summed(residual)
        torch.testing.assert_close(total, wanted[name], rtol=1e-5, atol=1e-6)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for step in range(2):
        gradients_of(parallel, step)
    assert all(torch.isfinite(r).all() for r in state.residuals().values())


def check_clipping_after_the_reduction():
    ours, _ = wrapped(codec="none", clip_norm=0.01)
    theirs = reference()
    gradients_of(ours, 0)
    gradients_of(theirs, 0)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def check_local_clipping():
    parallel, state = wrapped(codec=TopK(0.1), local_clip_norm=1e-3)
    gradients_of(parallel, 0)
    bound = 1e-3 / math.sqrt(dist.get_world_size())
    total = sum(float(r.square().sum()) for r in state.residuals().values())
    assert 0 < math.sqrt(total) <= bound * 1.001


def check_warm_up():
    warmup = Warmup(dense_steps=2, ramp_steps=4, start_density=0.25, stages=2)
    parallel, state = wrapped(codec=TopK(0.01, algorithm="all_gather"), warmup=warmup)
    plain = reference()
    sent = []
    for step in range(7):
        with count_traffic() as traffic:
            got = gradients_of(parallel, step)
        sent.append(traffic.total_bytes)
        if step < 2:
            want = gradients_of(plain, step)
            assert all(torch.equal(got[name], want[name]) for name in want)
            assert not any(r.any() for r in state.residuals().values())
    assert sent[0] == sent[1] > sent[2] == sent[3] > sent[4] == sent[5] > sent[6]


def check_the_monitor():
    monitor = ResidualMonitor(every=2, limit=1e-3, action="densify")
    parallel, state = wrapped(codec=TopK(0.02), monitor=monitor)
    gradients_of(parallel, 0)
    assert state.residual_ratio is None
    with pytest.warns(UserWarning, match="the density is doubled"):
        gradients_of(parallel, 1)
    assert state.residual_ratio > 0
    gradients_of(parallel, 2)
    assert "density=0.04" in state.explain()


def check_codecs_chosen_anew_in_every_step():
    chooser = Chooser()
    parallel, state = wrapped(cost_model=chooser, candidates=("none", "int8", TopK(0.1), "onebit"))
    ledger = Ledger(state, parallel.module)
    for step in range(6):
        ledger.hooked_step(parallel, step)
    assert len(chooser.settled) == 6 and state.explain().endswith("a table")
    times = torch.tensor(chooser.settled[-1], dtype=torch.float64)
    assert torch.equal(summed(times), times * dist.get_world_size())


def check_auto_agrees_and_explains():
    """Sixteen steps: enough for all trials of a close call."""
    parallel, state = wrapped(
        Net(300), ddp={"bucket_cap_mb": 1}, candidates=("none", "int8", TopK(0.01))
    )
    ledger = Ledger(state, parallel.module)
    for step in range(16):
        ledger.hooked_step(parallel, step)
    table = state.explain()
    assert "branch.weight" in table and "int8 pays" in table, table
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, table)
    assert len(set(tables)) == 1


def check_the_table_tells_bytes_and_reasons():
    policy = Policy("int8", by_name={"hidden.*": TopK(0.1)}, dense_below=100)
    parallel, state = wrapped(Net(60), policy=policy, warmup=Warmup(dense_steps=1))
    assert state.explain() == "no gradient was reduced yet" and state.explain().rows == ()
    gradients_of(parallel, 0)
    warm = {row.codec: row for row in state.explain().rows}
    assert warm.keys() == {"none", "topk(density=1.0)"} and warm["none"].ratio == 1.0
    assert "in the place of topk(density=0.1) for now" in warm["topk(density=1.0)"].why
    for step in range(1, 3):
        gradients_of(parallel, step)
    table = state.explain()
    rows = {name: row for row in table.rows for name in row.parameters}
    assert rows.keys() == {name for name, _ in parallel.module.named_parameters()}
    assert sum(row.elements for row in table.rows) == sum(p.numel() for p in parallel.parameters())
    size = dist.get_world_size()
    for name, codec, text, why in (
        ("branch.weight", Quantize("int8"), "int8", "default"),
        ("hidden.weight", TopK(0.1), "topk(density=0.1)", "name fits hidden.*"),
        ("norm.weight", Dense(), "none", "fewer than 100 elements"),
    ):
        row = rows[name]
        assert row.codec == text and why in row.why and row.milliseconds is None
        assert row.bytes_before == Dense().sent_bytes(row.elements, size)
        assert row.bytes_after == codec.sent_bytes(row.elements, size)
        assert row.ratio == row.bytes_before / row.bytes_after
        assert any(f" {row.bytes_after} " in line and why in line for line in table.splitlines())


def check_bytes_are_those_that_a_codec_announces():
    numel = 70_000
    for codec in (Dense(), Dense("bf16"), *CODECS.values()):
        codec = codec_of(codec)
        found, sent = sent_by(codec, torch.randn(numel))
        assert found.shape == (numel,) and same_on_all_ranks(found)
        announced = codec.sent_bytes(numel, dist.get_world_size())
        if codec in (CODECS["rows"], CODECS["parameter"], CODECS["blocks"]):
            # Each scope is rounded up.
            assert announced <= sent < 1.1 * announced
        else:
            assert sent == announced, codec


test_hook = Checks.of(globals()).test(2)
