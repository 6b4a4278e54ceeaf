"""Bytes of random plans against what ranks send in a step of training."""

import os
import random

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks

from moe_ext.distributed import count_traffic
from moe_ext.planner import ClusterSpec, Level, plan
from moe_ext.planner.axes import DEFAULTS

CHECKS = Checks()
CLUSTER = ClusterSpec((Level("node", 64, 1e-6, 1e10),), {"float32": 1e11}, 4e9, 1e10)
# Of the few, one of each dispatcher.
PLANS = range(20) if os.environ.get("MOE_EXT_FULL") else (2, 12, 16)
# Experts in shards.
SHARDS = [(17, 2, 2), (18, 1, 4)]


def _random_plan(seed):
    """Values of axes, and sizes of a model, for a plan that `apply` builds."""
    draw = random.Random(seed)
    fixed = {**DEFAULTS, "ep": draw.choice((2, 4)), "zero": draw.choice((0, 1, 3))}
    fixed["dispatcher"] = draw.choice(("alltoall", "dedup", "allgather"))
    fixed["combine"] = draw.choice(("exact", "reduced"))
    if fixed["dispatcher"] == "alltoall":
        fixed["combine"] = "exact"
    fixed["wire"] = draw.choice((None, "int8", "fp8", "mx"))
    fixed |= {"recompute": draw.choice((0, 1)), "micro_batch": draw.choice((1, 2))}
    sizes = {"num_local_experts": draw.choice((4, 8)), "num_experts_per_tok": draw.choice((1, 2))}
    return fixed, sizes, draw.choice((8, 14))


@CHECKS(*((seed,) for seed in PLANS), *SHARDS)
def sends_what_the_plan_says(seed, ep=None, etp=1):
    transformers = pytest.importorskip("transformers")
    fixed, sizes, seq_len = _random_plan(seed)
    if etp > 1:
        fixed |= {"ep": ep, "etp": etp, "wire": None, "zero": min(fixed["zero"], 1)}
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        **sizes, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, output_router_logits=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    applied = plan(
        model, CLUSTER, num_ranks=4, seq_len=seq_len, global_batch=8, dtype="float32", fixed=fixed
    ).apply(model)
    assert {name: applied.plan.choice[name] for name in fixed} == fixed
    chosen = []

    def note(module, inputs):
        # A recompute chooses the same once more.
        if forward:
            chosen.append(inputs[1].contiguous())

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(note)
    batches = torch.randint(64, (2 // fixed["micro_batch"], fixed["micro_batch"], seq_len))
    batches = (batches + dist.get_rank() * 7) % 64
    with count_traffic() as traffic:
        for batch in batches:
            forward = True
            loss = model(input_ids=batch, labels=batch).loss
            forward = False
            loss.backward()
        applied.sync_gradients()
    routing = []
    for mine in chosen:
        ranks = [torch.empty_like(mine) for _ in range(fixed["ep"] * etp)]
        dist.all_gather(ranks, mine, group=applied.mesh.ep_group)
        routing.append(ranks)
    assert len(routing) == 2 * len(batches)
    found = applied.sent_bytes(routing)
    reduced = traffic.sent_bytes["all_reduce"]
    read = {"rows": traffic.total_bytes - reduced, "gradients": reduced, "pipeline": 0}
    read["attention"] = 0
    assert found == read, (fixed, sizes, found, read)


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name):
    pytest.importorskip("transformers")
    CHECKS.assert_passed(4, name)
