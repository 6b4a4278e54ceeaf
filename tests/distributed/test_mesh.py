"""Groups of a MoEMesh against brute force, with as many ranks as a cluster has."""

import itertools
import math
import time
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_ext.comm.c10d import local_group
from moe_ext.distributed import MoEMesh
from moe_ext.distributed.replicas import replica_group
from moe_ext.testing import spawn_ranks


@pytest.fixture
def fake_job():
    """Starts a job of fake ranks in the place of the one before; nothing is sent."""

    def start(ranks, rank=0):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def numbered(order, sizes):
    """Rank to index along each axis, one rank at a time."""
    found = {}
    for rank in range(math.prod(sizes.values())):
        left, found[rank] = rank, {}
        for axis in order.split("-"):
            left, found[rank][axis] = divmod(left, sizes[axis])
    return found


def grouped(numbers, by):
    """Groups of ranks that differ along the axes `by` alone."""
    groups = {}
    for rank, where in numbers.items():
        key = tuple((axis, i) for axis, i in where.items() if axis not in by)
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values())


# dp is that of attention, as in Megatron and torchtitan.
LAYOUTS = [
    ({"dp": 2}, "tp-cp-ep-dp-pp"),
    ({"dp": 4, "ep": 4}, "tp-cp-ep-dp-pp"),
    ({"dp": 2, "tp": 2, "ep": 2, "pp": 2}, "tp-cp-ep-dp-pp"),
    ({"dp": 1, "cp": 4, "ep": 2}, "tp-cp-ep-dp-pp"),
    ({"dp": 4, "cp": 2, "tp": 2, "ep": 8, "pp": 2}, "tp-cp-ep-dp-pp"),
    ({"dp": 4, "cp": 2, "tp": 2, "ep": 4, "pp": 2}, "cp-tp-dp-ep-pp"),
    ({"dp": 32, "cp": 2, "tp": 4, "ep": 64, "pp": 8}, "tp-cp-ep-dp-pp"),
    ({"dp": 64, "cp": 4, "tp": 8, "ep": 128}, "ep-dp-cp-tp-pp"),
    ({"dp": 4, "tp": 2, "ep": 2, "etp": 2, "pp": 2}, "tp-cp-ep-dp-pp"),
    ({"dp": 64, "tp": 8, "ep": 32, "etp": 4, "pp": 4}, "tp-cp-ep-dp-pp"),
]


@pytest.mark.parametrize(("sizes", "order"), LAYOUTS, ids=str)
def test_groups_are_those_of_brute_force(fake_job, sizes, order):
    full = {"tp": 1, "cp": 1, "ep": 1, "dp": 1, "pp": 1, "etp": 1} | sizes
    stage = full["dp"] * full["cp"] * full["tp"]
    ranks = stage * full["pp"]
    edp = stage // (full["ep"] * full["etp"])
    attention = numbered(order, full | {"ep": 1, "etp": 1})
    experts = numbered(order, full | {"tp": full["etp"], "etp": 1, "cp": 1, "dp": edp})
    wanted = {
        "stage": grouped(attention, {"tp", "cp", "dp"}),
        "pp": grouped(attention, {"pp"}),
        "data": grouped(attention, {"dp"}),
        "cp": grouped(attention, {"cp"}),
        "tp": grouped(attention, {"tp"}),
        "dense": grouped(attention, {"dp", "cp"}),
        "ep": grouped(experts, {"ep", "tp"}),
        "etp": grouped(experts, {"tp"}),
        "edp": grouped(experts, {"dp"}),
    }
    for rank in {0, 1, ranks // 3, ranks - 1}:
        fake_job(ranks, rank)
        mesh = MoEMesh(**sizes, order=order)
        for axis, groups in wanted.items():
            assert [sorted(group) for group in mesh.rank_groups(axis)] == groups, axis
        own = {axis: next(g for g in mesh.rank_groups(axis) if rank in g) for axis in wanted}
        made = {
            "stage": mesh.stage_group,
            "pp": mesh.pp_group,
            "cp": mesh.cp_group,
            "tp": mesh.tp_group,
            "ep": mesh.ep_group,
            "etp": mesh.etp_group,
            "edp": mesh.replica_mesh.get_group(),
        }
        for axis, group in made.items():
            assert group is None or dist.get_process_group_ranks(group) == own[axis], axis
            assert group is not None or len(own[axis]) == 1
        where, spread = attention[rank], experts[rank]
        assert (mesh.pp_rank, mesh.cp_rank) == (where["pp"], where["cp"])
        assert (mesh.tp_rank, mesh.data_rank) == (where["tp"], where["dp"])
        assert (mesh.edp_rank, mesh.ep_rank) == (spread["dp"], spread["ep"])
        assert mesh.etp_rank == spread["tp"]
        device = torch.device("cpu")
        replicas = replica_group(mesh.ep_group, device)
        assert replicas is (None if edp == 1 else made["edp"])
        if mesh.tp_group is not None:
            copies = replica_group(mesh.tp_group, device)
            assert own["dense"] == ([rank] if copies is None else group_ranks(copies))
            assert group_ranks(mesh.data_mesh["tp"].get_group()) == own["tp"]


def group_ranks(group):
    return dist.get_process_group_ranks(group)


def test_both_meanings_of_dp_are_one_arrangement(fake_job):
    """Copies of experts, or batches of a step."""
    for dp, ep, cp, tp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2)):
        fake_job(dp * cp * tp, 1 if dp * cp * tp > 1 else 0)
        if (dp * cp * tp) % ep or (cp > 1 and tp == 1):
            continue
        one = MoEMesh(dp=dp, ep=ep, cp=cp, tp=tp)
        other = MoEMesh(dp=dp * cp * tp // ep, ep=ep, cp=cp, tp=tp)
        assert one.explain() == other.explain()


def test_2048_ranks_take_a_second_at_most_and_little_memory(fake_job):
    """A rank makes its own groups; all of all ranks were 5,000 here."""
    fake_job(2048, 1300)
    before = len(dist.distributed_c10d._world.pg_map)
    tracemalloc.start()
    started = time.perf_counter()
    mesh = MoEMesh(dp=64, tp=4, cp=2, ep=16, pp=4)
    text = mesh.explain(1300)
    taken, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 1
    assert peak < 4e6
    assert len(dist.distributed_c10d._world.pg_map) - before == 8
    assert text.splitlines() == [
        "2048 ranks in 4 pipeline stages",
        "each stage for attention: data 64 x cp 2 x tp 4",
        "each stage for experts: edp 32 x ep 16 x etp 1",
        "rank 1300: stage 2, batch 34, cp_rank 1, tp_rank 0, ep_rank 4, etp_rank 0",
        "a pipeline stage: 1024-1535",
        "a pipeline: 276-1812:512",
        "the layers, by shards (tp): 1300-1303",
        "a sequence (cp): 1296,1300",
        "copies of the dense part: 1024-1532:4",
        "a set of experts (ep): 1296-1311",
        "copies of experts (edp): 1028-1524:16",
    ]


def test_a_line_says_which_ranks_share_what(fake_job):
    fake_job(8)
    mesh = MoEMesh(dp=2, tp=2, ep=2, pp=2)
    assert mesh.explain().splitlines()[3:] == [
        "a pipeline stage: 0-3 | 4-7",
        "a pipeline: 0,4 | 1,5 | 2,6 | 3,7",
        "the layers, by shards (tp): 0,1 | 2,3 | 4,5 | 6,7",
        "copies of the dense part: 0,2 | 1,3 | 4,6 | 5,7",
        "a set of experts (ep): 0,1 | 2,3 | 4,5 | 6,7",
        "copies of experts (edp): 0,2 | 1,3 | 4,6 | 5,7",
    ]
    assert (
        repr(mesh) == "MoEMesh(dp=2, ep=2, tp=2, pp=2, dp_rank=0, ep_rank=0, tp_rank=0, pp_rank=0)"
    )
    with pytest.raises(ValueError, match="expected axis to be one of .*'edp'.*, got 'dp'"):
        mesh.rank_groups("dp")


def test_a_mesh_is_made_where_models_are_built_on_meta(fake_job):
    fake_job(4)
    with torch.device("meta"):
        found = [MoEMesh(dp=2, ep=2).explain(), MoEMesh(cp=2, ep=2).explain()]
    assert found == [MoEMesh(dp=2, ep=2).explain(), MoEMesh(cp=2, ep=2).explain()]


def check_device_meshes(rank):
    """torchtitan's two meshes, Megatron's order, and one mesh with "ep" in it."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    sparse = init_device_mesh("cpu", (1, 4), mesh_dim_names=("efsdp", "ep"))
    mesh = MoEMesh.from_device_mesh(dense, sparse)
    assert mesh.explain() == MoEMesh(dp=2, tp=2, ep=4).explain()
    assert mesh.tp_group is dense.get_group("tp")
    assert mesh.ep_group is sparse.get_group("ep")
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    alone = MoEMesh.from_device_mesh(stages)
    assert alone.explain() == MoEMesh(dp=2, pp=2).explain()
    assert group_ranks(alone.stage_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    beside = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "ep"))
    mesh = MoEMesh(cp=2, ep=2)
    assert MoEMesh.from_device_mesh(beside).explain() == mesh.explain()
    assert mesh.device_mesh.mesh_dim_names == ("dp", "cp", "ep")
    assert MoEMesh(ep=4, cp=2).data_mesh.mesh_dim_names == ("data", "cp")
    odd = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    for wrong in (odd, init_device_mesh("cpu", (4,))):
        with pytest.raises(ValueError, match="expected the dimensions of a DeviceMesh to be named"):
            MoEMesh.from_device_mesh(wrong)
    with pytest.raises(ValueError, match="expected attention and experts to have the same ranks"):
        MoEMesh.from_device_mesh(stages, sparse)
    return True


def test_device_meshes():
    assert all(spawn_ranks(check_device_meshes, 4))


@pytest.mark.parametrize("size", [1.0, "2", None])
def test_sizes_are_ints(size):
    with pytest.raises(TypeError, match=f"MoEMesh: expected cp to be an int, got {size!r}"):
        MoEMesh(cp=size)


def test_sizes_that_do_not_fit(fake_job):
    for name in ("ep", "cp", "tp", "pp", "etp", "dp"):
        with pytest.raises(ValueError, match=f"expected {name} to be at least 1, got 0"):
            MoEMesh(**{name: 0})
    text = r"dp \* ep or dp \* cp or dp \* cp \* ep to be the number of ranks, 1, and cp a divisor"
    with pytest.raises(ValueError, match=f"{text} of it, got dp=1, ep=1, cp=2"):
        MoEMesh(cp=2)
    with pytest.raises(ValueError, match=r"expected dp \* ep or dp to be the number of ranks, 1"):
        MoEMesh(dp=2)
    fake_job(8)
    text = r"dp \* ep or dp \* tp to be the number of ranks of a stage \(pp=2\), 4, and tp a divis"
    with pytest.raises(ValueError, match=f"{text}or of it, got dp=3, ep=1, tp=2, pp=2"):
        MoEMesh(dp=3, tp=2, pp=2)
    with pytest.raises(ValueError, match="ranks of a stage .pp=3., 2.66667, got dp=2, ep=1, pp=3"):
        MoEMesh(dp=2, pp=3)
    with pytest.raises(ValueError, match="expected order to name the axes of 'tp-cp-ep-dp-pp'"):
        MoEMesh(dp=8, order="tp-dp")
    with pytest.raises(ValueError, match="expected order to be 'tp-cp-ep-dp-pp' with cp beside ep"):
        MoEMesh(cp=2, ep=4, order="cp-tp-ep-dp-pp")
    with pytest.raises(ValueError, match=r"the same ranks in each stage \(pp last in order\)"):
        MoEMesh(dp=2, tp=2, pp=2, ep=4, order="tp-cp-ep-pp-dp")


def test_a_rank_that_makes_its_own_group_splits_no_other(fake_job, monkeypatch):
    """A split of NCCL's default group, which has a device with device_id=, is for all ranks."""
    c10d = dist.distributed_c10d
    fake_job(4)
    sources = []
    monkeypatch.setattr(c10d, "_get_split_source", lambda group: object())
    monkeypatch.setattr(
        c10d, "new_group", lambda *_, **__: sources.append(c10d._get_split_source(None))
    )
    local_group([0, 1], dist.group.WORLD, torch.device("cpu"))
    assert sources == [None]
    assert c10d._get_split_source(None) is not None
