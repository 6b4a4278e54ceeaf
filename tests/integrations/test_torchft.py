"""Replica groups with a manager that has torchft's signatures, against one process."""

import inspect
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_ext
from moe_ext import distributed as md
from moe_ext.compression import CompressionState, compress_gradients
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations.torchft import ReplicaState, average_over_groups
from moe_ext.testing import spawn_ranks

DIM, ROWS = 8, 6
# Some thousand roundings of 1e-16.
TIGHT = {"rtol": 1e-10, "atol": 1e-13}
# What happens in each step: the second group joins, or a message fails.
SCRIPT = ("", "", "joins", "", "fails", "")


class Manager:
    """Does what torchft's does between two groups, by a script."""

    script = SCRIPT

    def __init__(self, pg, load_state_dict, state_dict, min_replica_size=1):
        self._pg, self._load, self._save = pg, load_state_dict, state_dict
        self._step, self._error, self._joined, self._waited = 0, None, None, False

    def _source(self):
        """The group from which the other one heals, if one does."""
        return 0 if self.script[self._step] == "joins" else None

    def start_quorum(self, allow_heal=True, shrink_only=False, timeout=None):
        self._error, self._joined, self._waited = None, None, False
        source = self._source()
        if source is None:
            return
        file = io.BytesIO()
        if self._pg.rank() == source:
            torch.save(self._save(), file)  # torchft sends bytes, too
        size = torch.tensor([len(file.getvalue())])
        self._pg.broadcast(size, source).wait()
        data = torch.frombuffer(bytearray(file.getvalue() or int(size)), dtype=torch.uint8)
        self._pg.broadcast(data, source).wait()
        if self._pg.rank() != source:
            file = io.BytesIO(data.numpy().tobytes())
            self._joined = torch.load(file, weights_only=False)

    def allreduce(self, tensor, should_quantize=False, reduce_op=dist.ReduceOp.AVG):
        if self.script[self._step] == "fails":
            self._error = RuntimeError("connection reset by peer")
            tensor.fill_(torch.nan)
        else:
            if self._joined is not None:
                tensor.zero_()
            self._pg.allreduce([tensor]).wait()
            tensor /= self.num_participants()
        return Done()

    def num_participants(self):
        self._waited = True
        return 1 if self.script[self._step] == "joins" else 2

    def current_step(self):
        # A group that joins has its own count, 0, until the quorum is there.
        joins = self._joined is not None and not self._waited
        return 0 if joins else self._step

    def errored(self):
        return self._error

    def should_commit(self, timeout=None):
        if self._joined is not None:
            self._load(self._joined)
        self._step += 1
        return self._error is None


class Done:
    def wait(self, timeout=None):
        return True


class Model(nn.Module):
    def __init__(self, ep_group=None):
        super().__init__()
        torch.manual_seed(0)
        router = moe_ext.nn.TopKRouter(DIM, 4, 2, selection_bias=True)
        self.dense, self.unused = nn.Linear(DIM, DIM), nn.Linear(2, 2)
        self.sometimes = nn.Linear(DIM, DIM)
        self.moe = moe_ext.MoELayer(DIM, 4, 4, 2, router=router, ep_group=ep_group)
        self.double()

    def forward(self, x, group):
        """The first group has a gradient that the second has not."""
        x = self.dense(x)
        return self.moe(x + self.sometimes(x) if group == 0 else x)


def rows(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)


def one_process():
    """Trained by the rows of the groups that took part."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, event in enumerate(SCRIPT):
        optimizer.zero_grad()
        ranks = range(2 if event == "joins" else 4)
        moe_ext.nn.set_loss_scale(model, 1 / len(ranks))
        for rank in ranks:
            y = model(rows(step, rank), rank // 2)
            (y.square().mean() / len(ranks)).backward()
        if event != "fails":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            moe_ext.nn.update_selection_bias(model, rate=0.01)
    return model.state_dict()


def begin_anew(group, model, optimizer):
    """As a group that was killed, and started again."""
    if group == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer.state.clear()


def joined(rank, folder):
    """Ranks 0, 1 and ranks 2, 3, each pair a job of its own, and what is between the pairs."""
    dist.destroy_process_group()
    group, own = divmod(rank, 2)
    init = f"file://{folder}/group{group}"
    dist.init_process_group("gloo", init_method=init, rank=own, world_size=2)
    between = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/between{own}", 2), group, 2)
    return group, between, md.MoEMesh(dp=1, ep=2)


def assert_equal_on(ranks, model, *, beside=()):
    """Both ranks have the same parameters, bit for bit, but for those of some names."""
    for name, parameter in model.named_parameters():
        if not any(part in name for part in beside):
            kept = local_part(parameter.data).contiguous()
            other = [torch.empty_like(kept) for _ in range(2)]
            ranks.allgather([other], [kept]).wait()
            assert torch.equal(*other), name


def two_groups(rank, folder):
    group, between, mesh = joined(rank, folder)

    def manager_of(state):
        return Manager(between, state.load_state_dict, state.state_dict)

    model = Model(mesh.ep_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    manager = manager_of(ReplicaState(model, [optimizer]))
    for step, event in enumerate(SCRIPT):
        if event == "joins":
            begin_anew(group, model, optimizer)
        manager.start_quorum()
        optimizer.zero_grad()
        model(rows(step, rank), group).square().mean().backward()
        average_over_groups(manager, model)
        md.sync_gradients(model)
        assert model.unused.weight.grad is None
        md.clip_grad_norm_(model, 0.05)
        if manager.should_commit():
            optimizer.step()
            moe_ext.nn.update_selection_bias(model, rate=0.01, group=dist.group.WORLD)
    for name, tensor in md.full_state_dict(model).items():
        torch.testing.assert_close(tensor, one_process()[name], **TIGHT, msg=name)
    assert_equal_on(between, model)

    # What ranks owe goes along: of an optimizer, and of gradients.
    for kind in ("optimizer", "gradients"):
        model, others = Model(mesh.ep_group).float(), {}
        if kind == "optimizer":
            groups = moe_ext.optim.param_groups(model, process_groups=True)
            optimizer = moe_ext.optim.OneBitAdam(groups, lr=1e-3, eps=0.01, freeze_step=1)
        else:
            optimizer = moe_ext.optim.LAMB(moe_ext.optim.param_groups(model), lr=1e-3)
            others = {"owed": CompressionState(model=model, codec="onebit")}
        manager = manager_of(ReplicaState(model, [optimizer], others))
        for step, event in enumerate(SCRIPT):
            if event == "joins" and kind == "gradients":
                begin_anew(group, model, optimizer)
            manager.start_quorum()
            optimizer.zero_grad()
            model(rows(step, rank).float(), group).square().mean().backward()
            average_over_groups(manager, model)
            if others and not manager.errored():
                compress_gradients(model, others["owed"])
            if manager.should_commit():
                optimizer.step()
        assert_equal_on(between, model)

    state = ReplicaState(model, [optimizer])
    other = state.state_dict()
    name = "moe.experts.down_proj"
    first, last, size, parts = other["held"][name]
    other["held"][name] = (2 - first, 6 - last, size, parts)
    with pytest.raises(ValueError, match=f"the same MoEMesh, got {name} of"):
        state.load_state_dict(other)
    other = {**state.state_dict(), "model": {}}
    with pytest.raises(ValueError, match=r"the same model, got .* of shape None, and \("):
        state.load_state_dict(other)
    return True


class FirstQuorum(Manager):
    """All groups are there at step 0: rank i heals from group i, as torchft's init_sync has it."""

    script = ("", "", "")
    init_sync = True

    def _source(self):
        return dist.get_rank() if self._step == 0 and self.init_sync else None


# Order, init_sync, weights that are equal between groups; and what is refused.
FIRST_QUORUMS = [
    ("groups first", True, True, None),
    ("groups first", False, True, None),
    ("ranks first", False, True, None),
    ("ranks first", True, True, "not averaged over the ranks of the group yet"),
    ("groups first", True, False, "to begin with the same weights"),
    ("groups first", False, False, "to begin with the same weights"),
]


def first_quorums(rank, folder):
    """Ranks of a group keep the same dense weights and router, bit for bit, or are refused."""
    group, between, mesh = joined(rank, folder)
    for order, init_sync, equal, refusal in FIRST_QUORUMS:
        model = Model(mesh.ep_group)
        if group and not equal:
            with torch.no_grad():
                model.dense.weight += 0.1
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        state = ReplicaState(model, [optimizer])
        manager = FirstQuorum(between, state.load_state_dict, state.state_dict)
        manager.init_sync = init_sync
        for step in range(3):
            manager.start_quorum()
            optimizer.zero_grad()
            model(rows(step, rank), group).square().mean().backward()
            if order == "ranks first":
                md.sync_gradients(model)
            if refusal is not None:
                with pytest.raises(ValueError, match=refusal):
                    average_over_groups(manager, model)
                break
            average_over_groups(manager, model)
            if order == "groups first":
                md.sync_gradients(model)
            if manager.should_commit():
                optimizer.step()
        if refusal is None:
            assert_equal_on(between, model)
            assert_equal_on(dist.group.WORLD, model, beside=["experts"])
    return True


OPTIMIZERS = {
    "torch's": (torch.optim.AdamW, {}),
    "torch's of factors": (torch.optim.Adafactor, {}),
    "factors": (moe_ext.optim.Adafactor, {}),
    "matrices": (moe_ext.optim.Muon, {"muon": True}),
    "masters": (moe_ext.optim.CPUAdamW, {}),
    "one bit": (moe_ext.optim.OneBitLamb, {"process_groups": True}),
    "chunks": (moe_ext.optim.DeMo, {}),
}


class Prepared(torch.optim.Optimizer):
    """Wrapper as Accelerate's, without what torch's constructor makes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def goes_on(rank):
    """A rank goes on from the state of its counterpart as that one does."""
    mesh = md.MoEMesh(dp=1, ep=2)

    def made(cls, options):
        model = Model(mesh.ep_group).float()
        groups = moe_ext.optim.param_groups(model, **options)
        if cls is moe_ext.optim.DeMo:  # takes experts by themselves
            groups = [g for g in groups if g["name"].startswith("dense")]
        if cls.__module__.startswith("torch"):
            groups = [{"params": group["params"]} for group in groups]
        own = {"freeze_step": 2} if cls is moe_ext.optim.OneBitLamb else {}
        return model, cls(groups, lr=0.01, **own)

    def train(model, optimizer, step):
        optimizer.zero_grad()
        model(rows(step, rank).float(), 0).square().mean().backward()
        if not isinstance(optimizer, moe_ext.optim.OneBitLamb | moe_ext.optim.DeMo):
            md.sync_gradients(model)
        optimizer.step()

    for name, how in OPTIMIZERS.items():
        model, optimizer = made(*how)
        other, others = made(*how)
        for step in range(4):
            train(model, optimizer, step)
        file = io.BytesIO()
        torch.save(ReplicaState(model, [Prepared(optimizer)]).state_dict(), file)
        file.seek(0)
        ReplicaState(other, [others]).load_state_dict(torch.load(file, weights_only=False))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            for key, value in optimizer.state[p].items():
                got = others.state[q][key]
                assert type(got) is type(value), (name, key)
                if isinstance(value, torch.Tensor):
                    assert got.shape == value.shape, (name, key)
        for step in range(4, 6):
            train(model, optimizer, step)
            train(other, others, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_part(p), local_part(q)), name
    return True


def test_every_optimizer_goes_on_from_another_group():
    assert spawn_ranks(goes_on, 2) == [True] * 2


def test_ranks_of_a_group_stay_equal_after_the_first_quorum(tmp_path):
    assert spawn_ranks(first_quorums, 4, str(tmp_path)) == [True] * 4


def test_two_groups_are_one_process(tmp_path):
    assert spawn_ranks(two_groups, 4, str(tmp_path)) == [True] * 4


def test_the_manager_has_the_signatures_of_torchft():
    real = pytest.importorskip("torchft").Manager
    for name in (
        "start_quorum",
        "allreduce",
        "num_participants",
        "current_step",
        "errored",
        "should_commit",
    ):
        mine, theirs = (inspect.signature(getattr(c, name)).parameters for c in (Manager, real))
        assert list(mine) == list(theirs), name
    names = inspect.signature(real.__init__).parameters
    assert set(inspect.signature(Manager.__init__).parameters) <= set(names)


def of_sgd(parameters):
    return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]


def of_adam(parameters):
    return [torch.optim.Adam(parameters)]


def of_two_groups(parameters):
    return [torch.optim.Adam([{"params": [parameter]} for parameter in parameters])]


def of_two_optimizers(parameters):
    return [torch.optim.Adam([parameter]) for parameter in parameters]


def of_demo(parameters):
    return [moe_ext.optim.DeMo(parameters, lr=0.1)]


@pytest.mark.parametrize(
    ("sent", "here"),
    [
        (of_two_optimizers, of_adam),
        (of_adam, of_two_optimizers),
        (of_adam, of_two_groups),
        (of_sgd, of_adam),
        (of_adam, of_sgd),
        (of_adam, of_demo),
    ],
)
@pytest.mark.parametrize("others", [True, False])
def test_another_group_that_trains_otherwise_changes_nothing(sent, here, others):
    def made(optimizers_of):
        layer = nn.Linear(3, 4)
        optimizers = optimizers_of(list(layer.parameters()))
        layer(torch.ones(1, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return layer, optimizers

    model, optimizers = made(here)
    more = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizers[0], 2)} if others else {}
    state = ReplicaState(model, optimizers, more)
    before = repr((model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))
    for how in (sent, here) if others else (sent,):
        with pytest.raises(ValueError, match="every group to have the same optimizers and others"):
            state.load_state_dict(ReplicaState(*made(how)).state_dict())
    after = repr((model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))
    assert before == after
