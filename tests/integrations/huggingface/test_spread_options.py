"""Experts of transformers models over ranks: shards (etp), exact balance and capacity."""

import functools
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from hf_models import (
    assert_near,
    assert_same_state,
    assert_trains_as,
    build,
    make_batch,
    mean_of_ranks,
    spread,
)
from rank_checks import Checks

import moe_ext
from moe_ext.distributed import MoEMesh
from moe_ext.integrations.huggingface import from_pretrained
from moe_ext.nn import Rebalance

RANKS = 4
CHECKS = Checks()
FAMILIES = ("mixtral", "deepseek_v3", "qwen3_moe")
# Of all families, by the names that they have for it.
EIGHT = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}


def make(family):
    return build(family, **({EIGHT[family]: 8} if family in EIGHT else {})).eval()


def batch_of(rank):
    batch = make_batch()
    return batch if rank % 2 else {name: tensor[:1, :7] for name, tensor in batch.items()}


@functools.cache
def one_process(family):
    """The model with the mean of gradients, and the logits of each batch; only read."""
    return mean_of_ranks(make(family), [batch_of(rank) for rank in range(RANKS)])


def assert_is_one_process(model, family):
    whole, logits = one_process(family)
    rank = dist.get_rank()
    assert_trains_as(model, whole, batch_of(rank), logits[rank])


@CHECKS(*((family, etp) for family in FAMILIES for etp in (2, 4)))
def shards_of_experts_train_as_whole_ones(family, etp):
    mesh = MoEMesh(ep=RANKS // etp, etp=etp)
    # Both ways meet both numbers of shards and every family.
    names = ("dispatcher", "combine")
    ways = (("alltoall", "exact"), ("dedup", "reduced"))
    options = dict(zip(names, ways[(FAMILIES.index(family) + etp // 2) % 2], strict=True))
    assert_is_one_process(spread(make(family), mesh.ep_group, **options), family)


@CHECKS((False,), (True,))
def files_of_shards(by_ranks):
    import transformers

    whole, mesh = make("mixtral"), MoEMesh(ep=2, etp=2)
    model = spread(make("mixtral"), mesh.ep_group)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model.save_pretrained(folder[0], by_ranks=by_ranks)
    dist.barrier()
    again = transformers.MixtralForCausalLM.from_pretrained(folder[0])
    assert_same_state(again.state_dict(), whole.state_dict())
    with pytest.raises(ValueError, match="expected an ep_group with etp=1, .* got etp=2"):
        from_pretrained(transformers.MixtralForCausalLM, folder[0], ep_group=mesh.ep_group)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


@CHECKS(
    *(("mixtral", dispatcher, "always") for dispatcher in ("alltoall", "dedup", "allgather")),
    ("mixtral", "dedup", "if it pays"),
    ("qwen3_moe", "alltoall", "always"),
    ("gpt_oss", "dedup", "always"),
)
def moved_experts_train_as_at_home(family, dispatcher, when):
    rebalance = Rebalance("exact", break_even=0.0) if when == "always" else "exact"
    model = spread(make(family), dispatcher=dispatcher, rebalance=rebalance)
    assert_is_one_process(model, family)
    rebalancers = [m._rebalancer for m in model.modules() if hasattr(m, "_rebalancer")]
    moved = torch.tensor(sum(rebalancer.num_moved for rebalancer in rebalancers))
    dist.all_reduce(moved)
    assert moved > 0 or when != "always"


@CHECKS()
def capacity_drops_the_last_rows():
    rank = dist.get_rank()
    here = make("mixtral")
    moe_ext.replace(here, capacity_factor=1.0)
    over_ranks, free = spread(make("mixtral"), capacity_factor=1.0), make("mixtral")
    moe_ext.replace(free)
    logits = [model(**batch_of(rank)).logits for model in (here, over_ranks, free)]
    assert_near(logits[1], logits[0])
    assert not torch.allclose(logits[2], logits[0])
    # A second call says anew what holds.
    moe_ext.replace(here)
    assert_near(here(**batch_of(rank)).logits, logits[2])


@CHECKS()
def a_second_call_changes_nothing():
    """It could move no experts, and would take options of one rank for those of all."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = spread(make("mixtral"), capacity_factor=1.0)
    logits = model(**batch_of(0)).logits
    for options in ({}, {"rebalance": "exact"}, {"ep_group": alone, "capacity_factor": 2.0}):
        with pytest.raises(ValueError, match="that an earlier call has spread over ranks"):
            moe_ext.replace(model, **options)
    assert torch.equal(model(**batch_of(0)).logits, logits)


@CHECKS()
def refusals():
    world, shared = dist.group.WORLD, MoEMesh(ep=2, etp=2).ep_group
    for family, group, options, text in (
        ("mixtral", world, {"rebalance": "always"}, "expected mode to be one of"),
        ("mixtral", world, {"rebalance": 1}, "expected rebalance to be a Rebalance"),
        ("mixtral", world, {"capacity_factor": 0.0}, "expected factor to be positive"),
        (
            *("mixtral", world, {"capacity_factor": 1.0, "rebalance": "exact"}),
            "replace: expected capacity to be None with rebalance, got Capacity.factor=1.0",
        ),
        (
            *("mixtral", shared, {"rebalance": "exact"}),
            "expected etp of ep_group to be 1 with rebalance, got 2",
        ),
        (
            "mixtral",
            shared,
            {"wire": "int8"},
            "expected wire to be None with etp=2, got Wire.dispatch=.int8",
        ),
        ("gpt_oss", shared, {}, "a multiple of etp=2, .* got .* with .*_bias"),
    ):
        model = make(family)
        before = {name: p.clone() for name, p in model.named_parameters()}
        with pytest.raises((ValueError, TypeError), match=text):
            moe_ext.replace(model, ep_group=group, **options)
        assert model.config._experts_implementation != "moe_ext"
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])


test_over_ranks = CHECKS.test(RANKS)
