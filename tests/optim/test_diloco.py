"""Local steps against explicit references of all workers in one process."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from one_bit_ranks import assert_equal_on_ranks
from rank_checks import Checks, of_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moe_ext
from moe_ext.attention import SequenceParallelMLP
from moe_ext.compression import ChunkedTopK, Quantize
from moe_ext.distributed import count_traffic
from moe_ext.distributed.dtensor import local_part
from moe_ext.distributed.gradients import let_differ
from moe_ext.integrations import horovod
from moe_ext.optim import DeMo, DiLoCo, MuLoCo, SparseLoCo

checks = Checks()
RANKS = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def backward(net, worker, step):
    generator = torch.Generator().manual_seed(100 * step + worker)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    net.zero_grad()
    net(x.to(net[0].weight.dtype)).square().mean().backward()


def sgd(net, **options):
    return torch.optim.SGD(net.parameters(), **options)


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def load(net, values):
    with torch.no_grad():
        for p, piece in zip(
            net.parameters(), values.split([p.numel() for p in net.parameters()]), strict=True
        ):
            p.copy_(piece.view(p.shape))


def reference(steps, sync_every, encode=lambda worker, x: x, nesterov=True):
    """DiLoCo by its formula: all workers in this process; float32 where our messages are."""
    workers = [model() for _ in range(RANKS)]
    inners = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in workers]
    original = flat(workers[0])
    momentum = torch.zeros_like(original)
    for step in range(steps):
        for worker, net in enumerate(workers):
            backward(net, worker, step)
            inners[worker].step()
        if (step + 1) % sync_every == 0:
            deltas = [(original.float() - flat(net).float()) for net in workers]
            mean = sum(encode(w, d) for w, d in enumerate(deltas)).div(RANKS).double()
            if nesterov:
                momentum = 0.9 * momentum + mean
                mean = mean + 0.9 * momentum
            original = original - 0.7 * mean
            for net in workers:
                load(net, original)
    return workers


def nesterov(net):
    return sgd(net, lr=0.7, momentum=0.9, nesterov=True)


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        backward(net, dist.get_rank(), step)
        optimizer.step()


@checks()
def check_equals_the_formula():
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    with DiLoCo(None, [net], inner, nesterov(net), sync_every=3) as outer:
        train(net, inner, 10)
    assert outer.round == 3
    want = flat(reference(10, 3)[dist.get_rank()])
    # Pseudo-gradients travel in float32: one rounding each of three rounds and four summands.
    torch.testing.assert_close(flat(net), want, rtol=0, atol=3 * 8 * 2**-24)


@checks()
def check_sparse_loco_equals_the_formula():
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    codec = ChunkedTopK(4, 32, 2, decay=0.95)
    owed = [torch.zeros(flat(net).numel()) for _ in range(RANKS)]

    def encode(worker, x):
        out = torch.zeros_like(x)
        codec.decode_add_(out, codec.encode(x, owed[worker]))
        return out

    options = {"density": 1 / 8, "chunk": 32}
    outer = SparseLoCo(None, [net], inner, sgd(net, lr=0.7), sync_every=2, **options)
    with count_traffic() as traffic, outer:
        train(net, inner, 6)
    want = flat(reference(6, 2, encode, nesterov=False)[dist.get_rank()])
    torch.testing.assert_close(flat(net), want, rtol=0, atol=3 * 8 * 2**-24)
    # 103 elements are 4 chunks: 4 places of 5 bits, 4 codes of 2, 4 bytes of magnitudes; to 16.
    assert codec.payload_bytes(flat(net).numel()) == 10 + 4 + 16
    assert outer.round == 3
    assert traffic.total_bytes == 3 * (RANKS - 1) * 32, traffic


@checks()
def check_streaming_fragments():
    """Two fragments take turns; the message travels while an inner step goes on."""
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    outers = [sgd(net[0], lr=0.7), sgd(net[2], lr=0.7)]
    options = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.25}
    rank = dist.get_rank()
    with DiLoCo(None, [net[0], net[2]], inner, outers, 4, **options) as outer:
        train(net, inner, 4)
    assert outer.round == 2
    workers = [model() for _ in range(RANKS)]
    inners = [torch.optim.AdamW(w.parameters(), lr=0.01) for w in workers]
    original = [flat(workers[0][i]) for i in (0, 2)]
    for step in range(4):
        for worker, one in enumerate(workers):
            backward(one, worker, step)
            inners[worker].step()
        turn = step // 2
        layers = [one[(0, 2)[turn]] for one in workers]
        if step % 2 == 0:
            mean = sum(original[turn].float() - flat(layer).float() for layer in layers) / RANKS
        else:
            new = original[turn] - 0.7 * mean.double()
            for layer in layers:
                load(layer, new.lerp(flat(layer), 0.25))
    torch.testing.assert_close(flat(net), flat(workers[rank]), rtol=0, atol=8 * 2**-24)


@checks()
def check_weights_of_two_fragments_go_with_the_first():
    found = []
    for second in (2, slice(None)):
        net = model()
        inner = sgd(net, lr=0.1)
        parts = [net[0], net[second]]
        outers = [nesterov(part) for part in parts]
        with DiLoCo(None, parts, inner, outers, 4):
            train(net, inner, 8)
        found.append(flat(net))
    assert torch.equal(*found)


@checks()
def check_steps_that_are_compiled():
    def local_steps(net):
        inner = sgd(net, lr=0.1)
        DiLoCo(None, [net], inner, sgd(net, lr=1.0), 2).__enter__()
        return inner

    for made in (
        local_steps,
        lambda net: DeMo(net.parameters(), lr=0.01),
        lambda net: horovod.DistributedOptimizer(sgd(net, lr=0.1)),
    ):
        found = []
        for backend in (None, "eager"):
            net = model().float()
            optimizer = made(net)
            step = torch.compile(lambda o=optimizer: o.step(), backend=backend or "eager")
            for index in range(4):
                generator = torch.Generator().manual_seed(4 * index + dist.get_rank())
                net.zero_grad()
                net(torch.randn(8, 6, generator=generator)).square().mean().backward()
                step() if backend else optimizer.step()
            found.append(flat(net))
        assert torch.equal(*found)


@checks()
def check_optimizers_that_accelerate_has_prepared():
    accelerate = pytest.importorskip("accelerate")
    accelerator, found = accelerate.Accelerator(cpu=True), []
    for prepare in (lambda optimizer: optimizer, accelerator.prepare):
        net = model()
        inner, outer = prepare(sgd(net, lr=0.1)), prepare(nesterov(net))
        with DiLoCo(None, [net], inner, outer, sync_every=2):
            train(net, inner, 4)
        found.append(flat(net))
    assert torch.equal(*found)


@checks()
def check_a_state_without_a_fragment_is_refused():
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    local = DiLoCo(None, [net], inner, nesterov(net), sync_every=3, codec=Quantize("int4"))
    wrong = {**local.state_dict(), f"rank{dist.get_rank()}": {}}
    with pytest.raises(ValueError, match="load_state_dict: expected rank. to hold fragment 0.0"):
        local.load_state_dict(wrong)


@checks()
def check_experts():
    """Experts over the workers themselves stay local; copies of them are averaged."""
    for ep in (4, 2):
        mesh = moe_ext.distributed.MoEMesh(dp=4 // ep, ep=ep)
        torch.manual_seed(0)
        layer = moe_ext.MoELayer(8, 16, 4, ep_group=mesh.ep_group)
        inner = sgd(layer, lr=0.1)
        local = DiLoCo(None, [layer], inner, sgd(layer, lr=1.0), 2)
        groups = {len(part.parameters): part.group for part in local._fragments[0].parts}
        assert len(groups) == (1 if ep == 4 else 2)
        torch.manual_seed(0)
        alone = moe_ext.MoELayer(8, 16, 4, ep_group=mesh.ep_group)
        let_differ(alone.parameters())
        for net, optimizer, rounds in (
            (layer, inner, local),
            (alone, sgd(alone, lr=0.1), contextlib.nullcontext()),
        ):
            with rounds:
                for step in range(2):
                    torch.manual_seed(10 * step + dist.get_rank())
                    optimizer.zero_grad()
                    net(torch.randn(16, 8)).square().mean().backward()
                    optimizer.step()
        if ep == 4:
            # The outer optimizer holds them, too, and they have a gradient: it is not its own.
            for p, q in zip(layer.experts.parameters(), alone.experts.parameters(), strict=True):
                assert torch.equal(local_part(p), local_part(q))
            assert layer.experts.down_proj.grad is not None
        own = local_part(layer.experts.gate_up_proj.detach())
        copies = [torch.equal(own, other) for other in of_ranks(own)]
        assert sum(copies) == (1 if ep == 4 else 2), copies
        router = next(p for n, p in layer.named_parameters() if "router" in n or "gate.w" in n)
        assert_equal_on_ranks([router])


@checks()
def check_columns():
    """Columns of a layer over two of four workers: means are of those that hold the same ones."""
    rank, pair = dist.get_rank(), dist.new_subgroups(2)[0]
    layer = SequenceParallelMLP(8, 12, group=pair, activation="swiglu")
    for p in layer.parameters():
        torch.manual_seed(rank % 2 if isinstance(p, DTensor) else 5)
        with torch.no_grad():
            local_part(p).random_(-8, 8)  # sums of such are exact
    before = [local_part(p.detach()).clone() for p in layer.parameters()]
    inner = sgd(layer, lr=0.5)
    with DiLoCo(None, [layer], inner, sgd(layer, lr=1.0), 1):
        for p in layer.parameters():
            p.grad = torch.full_like(p, float(rank))
        inner.step()
    for p, x in zip(layer.parameters(), before, strict=True):
        mean = rank % 2 + 1 if isinstance(p, DTensor) else 1.5
        assert torch.equal(local_part(p), x - 0.5 * mean)
    halves = nn.Linear(8, 8)
    fully_shard(halves, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="parts of weight, which FSDP2 divides, to lie on one"):
        DiLoCo(None, [halves], sgd(halves, lr=0.5), sgd(halves, lr=1.0), 1)


@checks()
def check_demo_of_experts():
    """As of plain tensors that the ranks with the same experts hold."""
    mesh = moe_ext.distributed.MoEMesh(dp=2, ep=2)
    experts = moe_ext.MoELayer(8, 16, 4, ep_group=mesh.ep_group).experts
    with pytest.raises(ValueError, match="DeMo: expected plain tensors, or experts in an optimiz"):
        DeMo(experts.parameters())
    copies = [nn.Parameter(local_part(p.detach()).clone()) for p in experts.parameters()]
    options = {"compression_chunk": 16, "process_group": mesh.replica_mesh.get_group()}
    ours, want = DeMo(experts.parameters(), **options), DeMo(copies, **options)
    for step in range(3):
        for p, q in zip(experts.parameters(), copies, strict=True):
            torch.manual_seed(10 * step + dist.get_rank())
            q.grad = torch.randn_like(q)
            p.grad = torch.zeros_like(p)
            local_part(p.grad).copy_(q.grad)
        ours.step()
        want.step()
        if step == 1:
            again = DeMo(experts.parameters(), **options)
            again.load_checkpoint_state(*ours.checkpoint_state())
            # A checkpoint has the mean of the copies' momentums for experts over ranks.
            states, counters = want.checkpoint_state()
            means = {p: {"momentum": state["momentum"]} for p, state in states.items()}
            want.load_checkpoint_state(means, counters)
            ours = again
    for p, q in zip(experts.parameters(), copies, strict=True):
        assert torch.equal(local_part(p), q)


@checks()
def check_demo_loads_by_name():
    """Whole chunks of 64 elements a parameter, so that the order of these is of no matter."""
    shapes = {"a": (4, 16), "b": (64,), "c": (2, 64)}
    first, other = ({n: nn.Parameter(torch.ones(s)) for n, s in shapes.items()} for _ in range(2))
    one = DeMo([*first.items()], lr=0.1)
    two = DeMo([(name, other[name]) for name in "cab"], lr=0.1)
    for step in range(4):
        trained = [(one, first), (two, other)][: 1 + step // 2]
        for optimizer, net in trained:
            generator = torch.Generator().manual_seed(RANKS * step + dist.get_rank())
            for p in net.values():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        if step == 1:
            two.load_state_dict(copy.deepcopy(one.state_dict()))
            for p, q in zip(first.values(), other.values(), strict=True):
                q.data.copy_(p.data)
    assert all(map(torch.equal, first.values(), other.values()))


@checks()
def check_demo_equals_the_formula():
    net = model().float()
    optimizer = DeMo(
        net.parameters(), lr=0.01, compression_chunk=16, compression_topk=2, weight_decay=0.1
    )
    codec = ChunkedTopK(2, 16, 32, dct=True, decay=0.999)
    want = flat(model().float())
    owed = [torch.zeros_like(want) for _ in range(RANKS)]
    other = model().float()
    for step in range(3):
        total = torch.zeros_like(want)
        for worker in range(RANKS):
            load(other, want)
            backward(other, worker, step)
            grad = torch.cat([p.grad.flatten() for p in other.parameters()])
            codec.decode_add_(total, codec.encode(grad, owed[worker]))
            if worker == dist.get_rank():
                for p, q in zip(net.parameters(), other.parameters(), strict=True):
                    p.grad = q.grad.clone()
        optimizer.step()
        want = want * (1 - 0.01 * 0.1) - 0.01 * (total / RANKS).sign()
        torch.testing.assert_close(flat(net), want, rtol=0, atol=1e-6)
        want = flat(net)


@checks()
def check_what_is_frozen_later_stays():
    net = model()
    weight, inner = net[0].weight, sgd(net, lr=0.1)
    with DiLoCo(None, [net], inner, nesterov(net), 2):
        for step in range(8):
            if step == 3:
                # Workers differ by the first step of the second round.
                weight.requires_grad_(False)
                want = weight.clone()
                dist.all_reduce(want)
            backward(net, dist.get_rank(), step)
            inner.step()
        torch.testing.assert_close(weight, want / RANKS, rtol=0, atol=1e-6)
        net[0].bias.requires_grad_(dist.get_rank() > 0)
        with pytest.raises(ValueError, match="parameters that are frozen by now"):
            for step in range(2):
                backward(net, dist.get_rank(), step)
                inner.step()


test_over_ranks = checks.test(RANKS, timeout=120)


class Manager:
    """One replica group of torchft; the second round does not commit."""

    def __init__(self):
        self.rounds = 0

    def start_quorum(self):
        self.rounds += 1

    def allreduce(self, tensor):
        class Work:
            def wait(self):
                return True

        return Work()

    def should_commit(self):
        return self.rounds != 2


def test_a_round_that_a_manager_does_not_commit_is_taken_back():
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    local = SparseLoCo(Manager(), [net], inner, sgd(net, lr=0.7), 2, chunk=32, density=0.1)
    seen, owed = [flat(net)], []
    with local:
        for step in range(6):
            backward(net, 0, step)
            inner.step()
            if step % 2:
                seen.append(flat(net))
                owed.append(local._fragments[0].parts[0].memory.copy_of("residual"))
    assert torch.equal(seen[1], seen[2]) and torch.equal(owed[0], owed[1])
    assert not torch.equal(seen[2], seen[3]) and not torch.equal(owed[1], owed[2])
    assert local.round == 2


class LateQuorum(Manager):
    """Its first quorum does not come about; `allreduce` returns what a dead group left."""

    def __init__(self, mean=None):
        super().__init__()
        self.mean, self.errors = mean, []

    def start_quorum(self):
        super().start_quorum()
        if self.rounds == 1 and self.mean is None:
            raise TimeoutError("no quorum")

    def allreduce(self, tensor):
        if self.rounds == 1 and self.mean is not None:
            tensor.fill_(self.mean)
        return super().allreduce(tensor)

    def should_commit(self):
        return True

    def report_error(self, error):
        self.errors.append(error)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_that_could_not_begin_begins_after_the_next_step(delay):
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    outer = sgd(net, lr=0.7)
    local = DiLoCo(LateQuorum(), [net], inner, outer, 3, fragment_sync_delay=delay)
    seen = []
    with local:
        for step in range(10):
            backward(net, 0, step)
            with contextlib.suppress(TimeoutError):
                inner.step()
            seen.append(local.round)
    # Begun with the third step, or the second of them; ended with the last one.
    assert seen == (
        [0, 0, 0, 1, 1, 1, 2, 2, 2, 3] if delay == 0 else [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    )


def test_numbers_of_a_manager_that_are_not_finite_are_not_committed():
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    manager = LateQuorum(float("nan"))
    local = SparseLoCo(manager, [net], inner, sgd(net, lr=0.7), 2, chunk=32, density=0.1)
    before = flat(net)
    with local:
        backward(net, 0, 0)
        inner.step()
        backward(net, 0, 1)
        with pytest.raises(ValueError, match="SparseLoCo: expected weights to be finite"):
            inner.step()
        assert torch.equal(flat(net), before) and local.round == 0
        assert [str(error) for error in manager.errors]
        assert local._fragments[0].parts[0].memory.kinds() == []
        for step in (2, 3):
            backward(net, 0, step)
            inner.step()
    assert local.round == 1 and flat(net).isfinite().all()


def test_an_outer_optimizer_that_fails_leaves_the_round_as_it_was():
    net = model()
    inner, outer = torch.optim.SGD(net.parameters(), lr=0.01), sgd(net, lr=0.7)
    local = DiLoCo(None, [net], inner, outer, 1)
    hook = outer.register_step_post_hook(lambda *_: 1 / 0)
    with local:
        backward(net, 0, 0)
        want = [p.detach() - 0.01 * p.grad for p in net.parameters()]
        grads = [p.grad.clone() for p in net.parameters()]
        with pytest.raises(ZeroDivisionError):
            inner.step()
        found = [p.detach() for p in net.parameters()]
        torch.testing.assert_close(found, want, rtol=0, atol=1e-15)
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
        assert local.round == 0
        hook.remove()
        backward(net, 0, 1)
        inner.step()
    assert local.round == 1


def test_no_state_is_loaded_while_a_message_is_underway():
    net = model()
    inner = sgd(net, lr=0.01)
    local = DiLoCo(None, [net], inner, sgd(net, lr=0.7), 3, fragment_sync_delay=1)
    saved = local.state_dict()
    with local:
        for step in range(3):
            backward(net, 0, step)
            inner.step()
            if step == 1:
                for call in (local.state_dict, lambda: local.load_state_dict(saved)):
                    with pytest.raises(RuntimeError, match="expected no message to be underway"):
                        call()
    assert local.round == 1
    local.load_state_dict(saved)
    assert local.round == 0


@pytest.mark.parametrize("refused", ["outer", "local_step"])
def test_a_state_that_is_refused_changes_nothing(refused):
    net = model()
    inner = sgd(net, lr=0.01)
    outers = [nesterov(net[0]), nesterov(net[2])]
    local = DiLoCo(None, [net[0], net[2]], inner, outers, 2)
    first = local.state_dict()
    with local:
        for step in range(4):
            backward(net, 0, step)
            inner.step()
    before = copy.deepcopy(local.state_dict())
    if refused == "outer":
        first["outer"][1] = sgd(net, lr=0.1).state_dict()
    else:
        del first["local_step"]
    with pytest.raises((ValueError, KeyError)):
        local.load_state_dict(first)
    torch.testing.assert_close(local.state_dict(), before, rtol=0, atol=0)


def test_what_is_owed_goes_to_the_device_of_the_parameters():
    """From a file that was read to another one, as by `torch.load(map_location="cpu")`."""
    net, other = model(), model().to("meta")
    demo, demo_of_other = DeMo(net.parameters()), DeMo(other.parameters())
    backward(net, 0, 0)
    demo.step()
    demo_of_other.load_state_dict(demo.state_dict())
    assert demo_of_other._memory.kept("residual").is_meta
    local, local_of_other = (
        SparseLoCo(None, [each], sgd(each, lr=0.1), sgd(each, lr=0.7), 1) for each in (net, other)
    )
    saved = local.state_dict()
    saved["rank0"]["0.0"]["owed"]["residual"] = demo.state_dict()["momentum"]["residual"]
    local_of_other.load_state_dict(saved)
    assert local_of_other._fragments[0].parts[0].memory.kept("residual").is_meta


def test_demo_leaves_frozen_parameters_alone():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = DeMo(net.parameters(), lr=0.01, weight_decay=0.1)
    backward(net, 0, 0)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert moved == [False, True, True, True]
    # One that is frozen later has a momentum that could move it.
    net[0].bias.requires_grad_(False)
    before = net[0].bias.clone()
    backward(net, 0, 1)
    optimizer.step()
    assert torch.equal(net[0].bias, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "expected sync_every to be a positive multiple of the 1 fragments"),
        ({"fragment_sync_delay": 2}, r"expected fragment_sync_delay to be in \[0, 2\), got 2"),
        ({"fragment_update_alpha": 2.0}, "expected fragment_update_alpha"),
        ({"outer_optimizer": []}, "expected outer_optimizer to be one a fragment, got 0"),
        ({"codec": "nothing"}, "expected codec to be one of"),
    ],
)
def test_refuses(options, message):
    net = model()
    args = {"sync_every": 2, "outer_optimizer": sgd(net, lr=1.0), **options}
    with pytest.raises(ValueError, match=message):
        DiLoCo(Manager(), [net], sgd(net, lr=0.1), **args)
    with pytest.raises(ValueError, match="expected an outer_optimizer without momentum"):
        SparseLoCo(Manager(), [net], sgd(net, lr=0.1), nesterov(net), 2)
    with pytest.raises(TypeError, match="MuLoCo: expected inner_optimizer to be a moe_ext.optim.M"):
        MuLoCo(Manager(), [net], sgd(net, lr=1.0), nesterov(net), 2)


@pytest.mark.parametrize("kind", [DeMo, DiLoCo])
def test_complex_parameters_are_refused(kind):
    net = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    net[0].grad = torch.ones_like(net[0])
    with pytest.raises(TypeError, match=f"{kind.__name__}: .* real floating-point tensors, got"):
        if kind is DeMo:
            DeMo(net.parameters()).step()
        else:
            DiLoCo(Manager(), [net], sgd(net, lr=0.1), sgd(net, lr=1.0), 2)


def test_demo_refuses_groups_after_the_first_step():
    net = model()
    optimizer = DeMo(net[0].parameters())
    backward(net, 0, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="DeMo: expected all groups to be added before the first"):
        optimizer.add_param_group({"params": net[2].parameters()})
    optimizer.step()


def test_demo_refuses_sparse_gradients():
    net = nn.Embedding(4, 3, sparse=True)
    optimizer = DeMo(net.parameters())
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="DeMo: expected gradients to be dense, got torch.sp"):
        optimizer.step()
