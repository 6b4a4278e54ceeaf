"""Models trained in the placement of a plan against one process."""

import dataclasses
import functools
import os
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner_models import SIZES, assert_sends_what_the_plan_says, run_step
from rank_checks import Checks
from torch.distributed.tensor.debug import CommDebugMode

from moe_ext import MoELayer
from moe_ext.distributed import MoEMesh, count_traffic
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import Dispatch
from moe_ext.planner import ClusterSpec, Level, exchange_bytes, plan
from moe_ext.planner.axes import DEFAULTS
from moe_ext.planner.stage_layers import StageLayers

CHECKS = Checks()
FULL = bool(os.environ.get("MOE_EXT_FULL"))
CLUSTER = ClusterSpec((Level("node", 4, 1e-6, 1e10),), {"float32": 1e11}, 4e8, 1e10)
SGD = {"lr": 0.1, "momentum": 0.9}
# Sums of a few hundred products in float64, over three steps.
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
STEPS = 3
# Updates that losses show: none follows the last one.
SEEN = STEPS - 1


# Norms of each head, and of all heads together, before which queries and keys are gathered.
FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 8},
    "Olmoe": {"num_experts": 8},
    "MiniMaxM2": {"num_local_experts": 8, "head_dim": 8},
}


def made_model(family="Mixtral", **options):
    import transformers

    torch.manual_seed(0)
    made = {**SIZES, "num_experts_per_tok": 2, **FAMILIES[family], **options}
    config = getattr(transformers, f"{family}Config")(**made, output_router_logits=False)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.set_experts_implementation("eager")  # torch's grouped products know no float64
    model.loss_function = next_token_loss
    return model.double()


def next_token_loss(logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **_):
    """As that of transformers, which rounds logits to float32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    return total / (
        (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    )


def planned(model, fixed):
    """The plan with these values for four ranks, and eight sequences of 16 tokens a step."""
    sizes = {"num_ranks": 4, "seq_len": 16, "global_batch": 8, "dtype": "float32"}
    # One rank searches: four at once would share its cores.
    given = [plan(model, CLUSTER, **sizes, fixed=fixed) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    return given[0]


# A mesh is made once: a thread of each of Gloo's groups wakes a hundred times a second.
mesh_of = functools.cache(MoEMesh)


def applied_to(model, stages=(), **fixed):
    """The model in the placement of such a plan."""
    # All axes, so that a search has one placement.
    whole = {**DEFAULTS, "micro_batch": 2, **fixed}
    made = planned(model, whole)
    assert {name: made.choice[name] for name in whole} == whole
    with mock.patch("moe_ext.planner.apply.MoEMesh", mesh_of):
        return dataclasses.replace(made, stages=stages or made.stages).apply(model)


def whole_batch():
    return torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))


def own_batches(applied):
    """The rank's micro-batches of a step."""
    own = whole_batch().chunk(applied.mesh.data_size)[applied.mesh.data_rank]
    return own.split(applied.plan.choice["micro_batch"])


def train(model, own, finish, optimizers, updates=SEEN):
    """Mean losses of three steps over the rank's micro-batches, and as many updates."""
    losses = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = 0.0
        for batch in own:
            loss = model(input_ids=batch, labels=batch).loss
            if step < updates:
                (loss / len(own)).backward()
            total += float(loss) / len(own)
        losses.append(total)
        if step == updates:
            break
        finish()
        for optimizer in optimizers:
            optimizer.step()
    return losses


ONE_PROCESS = {}


def losses_of_one_process(family="Mixtral", **options):
    """The same for every placement of a model: one rank computes them once."""
    key = str((family, options))
    if key not in ONE_PROCESS:
        found = torch.zeros(STEPS, dtype=torch.float64)
        if dist.get_rank() == 0:
            model = made_model(family, **options)
            optimizers = [torch.optim.SGD(model.parameters(), **SGD)]
            losses = train(model, [whole_batch()], lambda: None, optimizers)
            found.copy_(torch.tensor(losses, dtype=found.dtype))
        dist.broadcast(found, 0)
        ONE_PROCESS[key] = found
    return ONE_PROCESS[key]


# Two shards' sums have other bits than the whole product, and Mixtral's norms round to float32: a
# number that is rounded the other way is off by 6e-8 of it.
ROUNDED = {"rtol": 1e-8, "atol": 1e-8}


def assert_mean_losses(found, want, tolerance=TIGHT):
    found = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(found)
    torch.testing.assert_close(found / dist.get_world_size(), want, **tolerance)


PLAIN = [(4, 0, "dedup"), (2, 1, "alltoall"), (2, 2, "alltoall"), (2, 3, "alltoall")]
PLAIN += [(2, 3, "alltoall", 1, 2), (4, 0, "alltoall", 4, 1, "Olmoe")]
PLAIN += [(2, 3, "alltoall", 2, 1, "Qwen3Moe")]
if FULL:
    PLAIN += [
        (2, 0, "alltoall", 2),
        (4, 1, "dedup", 1, 2),
        (2, 3, "alltoall", 2),
        (4, 0, "alltoall", 2, 1, "Qwen3Moe"),
        (2, 3, "alltoall", 2, 1, "Olmoe"),
        (2, 0, "alltoall", 2, 1, "MiniMaxM2"),
        (1, 0, "alltoall", 2),
        (4, 0, "dedup", 2),
        (2, 2, "alltoall", 2),
        (2, 0, "alltoall", 2, 2),
    ]


@CHECKS(*PLAIN)
def trains_as_one_process(ep, zero, dispatcher, tp=1, cp=1, family="Mixtral"):
    model, want = made_model(family), losses_of_one_process(family=family)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    fixed = {"ep": ep, "zero": zero, "dispatcher": dispatcher, "tp": tp, "cp": cp, "scheme": "ring"}
    # Two micro-batches at most, whose sum shows what sums of more do; of four shards all in one.
    applied = applied_to(model, recompute=1, micro_batch=8 if tp == 4 else 2, **fixed)
    optimizers, own = applied.optimizers(torch.optim.SGD, **SGD), own_batches(applied)
    found = train(model, own, applied.sync_gradients, optimizers)
    if tp > 1:
        assert model.model.embed_tokens.weight.to_local().numel() <= 64 * 32 // 2
    assert_mean_losses(found, want)
    if zero >= 2:
        # After a forward pass the weights of a layer are whole, or shards again; with tp a shard
        # that is no longer divided over the copies. After a backward pass they are shards.
        layer = model.model.layers[0].self_attn.q_proj
        out = model(input_ids=own[0]).logits
        assert local_part(layer.weight).numel() == 32 * 32 // (4 if zero == 3 else tp)
        out.sum().backward()
        assert local_part(layer.weight).numel() == 32 * 32 // 4
    if zero == 1:
        held = torch.tensor(_state_numel(optimizers))
        dist.all_reduce(held)
        # Dense parameters' state is on one rank, experts' on all that hold them.
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        assert int(held) == sum(sizes.values()) + experts * (4 // ep - 1)


@CHECKS()
def columns_of_one_input_send_one_gradient():
    """Messages of tp: the embedding's rows, attention's results and input, the output's input."""
    model = made_model()
    applied_to(model, ep=4, zero=0, dispatcher="alltoall", tp=2)
    ids = whole_batch()[:2]
    with CommDebugMode() as sent:
        model(input_ids=ids, labels=ids).loss.backward()
    counts = {str(name): count for name, count in sent.get_comm_counts().items()}
    assert counts["c10d_functional.all_reduce"] == 2 + 2 * SIZES["num_hidden_layers"]


# Values of axes: each expert in shards, beside ZeRO 1 and tp; experts that move where that pays,
# with recompute, FSDP2, tp and cp; attention by heads.
HEADS = {"cp": 2, "scheme": "ulysses"}
PLACED = {
    "etp": {"ep": 2, "etp": 2, "dispatcher": "dedup", "combine": "reduced", "zero": 1},
    "etp-alone": {"ep": 1, "etp": 4, "dispatcher": "alltoall", "recompute": 1},
    "etp-tp": {"ep": 2, "etp": 2, "dispatcher": "alltoall", "tp": 2, "zero": 0, "micro_batch": 4},
    "balance": {"ep": 4, "balance": "exact", "dispatcher": "dedup", "zero": 1, "recompute": 1},
    "balance-zero": {"ep": 2, "balance": "exact", "dispatcher": "alltoall", "zero": 3},
    "balance-tp": {"ep": 4, "balance": "exact", "dispatcher": "alltoall", "tp": 2, "zero": 0},
    "heads": {**HEADS, "ep": 4, "zero": 1, "recompute": 1, "micro_batch": 4},
    "heads-zero": {**HEADS, "ep": 2, "zero": 3},
    "balance-cp": {"ep": 2, "balance": "exact", "dispatcher": "allgather", "cp": 2, "zero": 2},
}


@CHECKS(*((name,) for name in PLACED))
def trains_in_a_placement_as_one_process(name):
    model, want = made_model(), losses_of_one_process()
    applied = applied_to(model, **PLACED[name])
    layer = model.model.layers[0].mlp.experts
    choice = applied.plan.choice
    held = local_part(layer.gate_up_proj)
    assert layer.gate_up_proj.shape[:2] == (8, 2 * 48)
    if choice["zero"] < 2:
        assert held.shape[:2] == (8 // choice["ep"], 2 * 48 // choice["etp"])
    if choice["balance"] == "exact":
        # Whatever the processors' rates are.
        for each in model.model.layers:
            rebalancer = each.mlp.experts._rebalancer
            rebalancer.options = dataclasses.replace(rebalancer.options, break_even=0.0)
    optimizers = applied.optimizers(torch.optim.SGD, **SGD)
    found = train(model, own_batches(applied), applied.sync_gradients, optimizers)
    assert_mean_losses(found, want, ROUNDED if choice["etp"] > 1 else TIGHT)
    if choice["balance"] == "exact":
        moved = torch.tensor(layer._rebalancer.num_moved)
        dist.all_reduce(moved)
        assert moved > 0


@CHECKS((2, 0), (4, 1))
def trains_with_gradients_that_lose_no_bit(ep, zero):
    """In 64 bits, which travel as they are, as one process; in 32 bits the codec is at work."""
    model, want = made_model(), losses_of_one_process()
    applied = applied_to(model, ep=ep, zero=zero, gradients="lossless")
    own, optimizers = own_batches(applied), applied.optimizers(torch.optim.SGD, **SGD)
    assert_mean_losses(train(model, own, applied.sync_gradients, optimizers), want)
    sent, weights = [], []
    for codec in ("none", "lossless"):
        single = made_model().float()
        applied = applied_to(single, ep=ep, zero=zero, gradients=codec)
        optimizers = applied.optimizers(torch.optim.SGD, **SGD)
        with count_traffic() as traffic:
            train(single, own, applied.sync_gradients, optimizers, updates=1)
        sent.append(traffic.total_bytes)
        weights.append(torch.cat([local_part(p).detach().flatten() for p in single.parameters()]))
    assert sent[1] < sent[0]
    # Ranks are added up in another order.
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@CHECKS(("int8", 2, 0, 1), ("bf16", 4, 1, 1), ("fp8", 1, 0, 1), ("int4", 2, 0, 2))
def sends_coded_gradients_as_the_plan_says(codec, ep, zero, pp):
    model, want = made_model().float(), losses_of_one_process()
    applied = applied_to(model, ep=ep, zero=zero, pp=pp, gradients=codec)
    optimizers = applied.optimizers(torch.optim.SGD, **SGD)
    told, found = applied.sent_bytes([])["gradients"], []
    plain = dataclasses.replace(applied, compression=None).sent_bytes([])["gradients"]

    def sync():
        with count_traffic() as traffic:
            applied.sync_gradients()
        found.append(traffic.total_bytes)

    if pp == 1:
        losses = train(model, own_batches(applied), sync, optimizers, STEPS)
        mean = torch.tensor(losses)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 4, want.float(), rtol=0.02, atol=0.0)
        assert mean[-1] < mean[0]
    else:
        for _ in range(STEPS):
            run_step(applied, own_batches(applied))
            sync()
    assert found == [told] * STEPS and 0 < told < plain, (found, told, plain)
    # As many numbers are owed as the cost model counts, but for norms, routers and padding.
    memories = applied.compression.memory.memories.values()
    kept = [x for each in memories for x in (*each._kept.values(), *each._spare.values())]
    terms = applied.plan.memory_terms()
    assert bool(kept) == ("feedback" in terms) == (codec != "bf16")
    if kept and pp == 1:
        assert sum(x.nbytes for x in kept) == pytest.approx(terms["feedback"], rel=0.15)
    dense = torch.cat([p.detach().flatten() for p in applied._dense()])
    same = [torch.empty_like(dense) for _ in range(4 // pp)]
    dist.all_gather(same, dense, group=applied.mesh.stage_group)
    assert all(torch.equal(each, dense) for each in same)


@CHECKS()
def refuses_codecs_that_gradients_cannot_have():
    model = made_model().float()
    applied = applied_to(model, ep=4, zero=0, gradients="lossless")
    with pytest.raises(ValueError, match="^Applied.sent_bytes: expected a plan whose gradients "):
        applied.sent_bytes([])
    for fixed, text in (
        ({"zero": 3}, "^Plan.apply: expected gradients to be 'none' with zero=3, got 'int8'"),
        ({"tp": 2, "zero": 0}, "^Plan.apply: expected gradients to be 'none' with tp=2, got 'int8"),
    ):
        model = made_model().float()
        made = applied.plan
        choice = {**made.choice, "gradients": "int8", **fixed}
        with pytest.raises(ValueError, match=text):
            dataclasses.replace(made, choice=choice).apply(model)
        assert not any(name.startswith("moe_ext") for name in map(_module_of, model.modules()))


def _module_of(module):
    return type(module).__module__


def _state_numel(optimizers):
    return sum(
        local_part(state["momentum_buffer"]).numel()
        for optimizer in optimizers
        for state in getattr(optimizer, "optim", optimizer).state.values()
    )


# Their layers, some more than others, on the ranks of two or four stages, whose micro-batches are
# two, or as many as the stages.
PIPELINES = {
    "1f1b": {"schedule": "1f1b", "pp": 2, "ep": 2, "recompute": 1},
    "zb-h1": {"schedule": "zb-h1", "pp": 2, "ep": 1, "zero": 1, "recompute": 1},
    "interleaved": {"schedule": "interleaved", "pp": 2, "ep": 2, "dispatcher": "dedup"},
    "gpipe": {"schedule": "gpipe", "pp": 4, "ep": 1, "zero": 0},
    "tp": {"schedule": "zb-h1", "pp": 2, "tp": 2, "ep": 2, "zero": 0, "micro_batch": 4},
}
CP = {"pp": 2, "cp": 2, "micro_batch": 4}
PIPELINES["cp"] = {**CP, "schedule": "1f1b", "scheme": "ring", "ep": 2, "zero": 1, "recompute": 1}
PIPELINES["cp-zb"] = {**CP, "schedule": "zb-h1", "scheme": "ulysses", "ep": 1, "zero": 0}
PIPELINES["cp-chunks"] = {**CP, "schedule": "interleaved", "scheme": "ring", "ep": 2}
# Experts' exchanges beside other micro-batches.
PIPELINES["turns-1f1b"] = {**PIPELINES["1f1b"], "turns": 1, "recompute": 0}
PIPELINES["turns-zb-h1"] = {"schedule": "zb-h1", "pp": 2, "ep": 2, "zero": 1, "turns": 1}
PIPELINES["turns-interleaved"] = {**PIPELINES["interleaved"], "turns": 1, "recompute": 1}
if FULL:
    PIPELINES["turns-again"] = {**PIPELINES["turns-zb-h1"], "recompute": 1}
    PIPELINES["cp-zb-again"] = {**PIPELINES["cp-zb"], "ep": 2, "recompute": 1}
PIPELINES["etp"] = {"schedule": "1f1b", "pp": 2, "ep": 1, "etp": 2, "recompute": 1}
PIPELINES["balance"] = {"schedule": "zb-h1", "pp": 2, "ep": 2, "balance": "exact"}
PIPELINES["tp-Qwen3Moe"] = PIPELINES["tp"]
# Of its five layers, of two kinds in turn, some are computed again.
LAYERS = (StageLayers(0, 3, (0, 1)), StageLayers(3, 5, (4,)))
PIPELINES["layers-Qwen3Moe"] = {"schedule": "1f1b", "pp": 2, "ep": 2}


def _runs_again(layer):
    return getattr(layer, "gradient_checkpointing", False)


def staged(name, tied, dtype=torch.float64):
    """A model in the stages of a pipeline, its parameters' names before, and its options."""
    axes = PIPELINES[name]
    is_many = name.startswith("layers") or axes["pp"] == 4 or axes["schedule"] == "interleaved"
    options = {"num_hidden_layers": 5 if is_many else 3, "tie_word_embeddings": tied}
    options["family"] = "Qwen3Moe" if name.endswith("Qwen3Moe") else "Mixtral"
    if name.startswith("layers"):
        options["mlp_only_layers"] = [1, 3]
    model = made_model(**options).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    return applied_to(model, LAYERS if name.startswith("layers") else (), **axes), names, options


def losses_of(applied, optimizers):
    """Losses of this rank's own batches, a step each."""
    own, losses = own_batches(applied), []
    for _ in range(SEEN):
        losses.append(run_step(applied, own) * applied.mesh.pp_size)
        applied.sync_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


# "tp" is repeated with norms of each head by "tp-Qwen3Moe", rings by "cp-chunks", and turns of
# whole backward passes by "turns-interleaved".
FEW = [name for name in PIPELINES if FULL or name not in ("tp", "cp", "turns-1f1b")]


@CHECKS(*((name, name in ("1f1b", "gpipe")) for name in FEW))
def trains_stages_as_one_process(name, tied):
    applied, names, options = staged(name, tied)
    model, want = applied.model, losses_of_one_process(**options)
    if name.startswith("layers"):
        again = {i for i, layer in enumerate(model.model.layers) if _runs_again(layer)}
        assert again == set(LAYERS[applied.mesh.pp_rank].again)
    losses = losses_of(applied, applied.optimizers(torch.optim.SGD, **SGD))
    assert_mean_losses(losses, want[:SEEN], ROUNDED if name == "etp" else TIGHT)
    in_turn = applied.pipeline.turns
    assert (in_turn is not None) == name.startswith("turns")
    if in_turn is not None:
        assert any(start.beside for row in in_turn.starts for start in row)
    mine = [None] * 4
    dist.all_gather_object(mine, [name for name, _ in model.named_parameters()])
    stages = mine[:: 4 // applied.mesh.pp_size]
    own = {name for stage in stages for name in stage} - ({"lm_head.weight"} if tied else set())
    assert own == set(names) and sum(map(len, stages)) == len(names) + tied


# Parts that are trained alone: of two stages the last one, and experts.
UNFROZEN = {"pp": ("layers.1.", {"pp": 2, "ep": 1}), "zero": (".experts.", {"ep": 2, "zero": 1})}


@CHECKS(*((name,) for name in UNFROZEN))
def trains_parts_as_one_process(name):
    trained, axes = UNFROZEN[name]
    models = [made_model(), made_model()]
    for model in models:
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(trained in path)
    alone = [torch.optim.SGD([p for p in models[1].parameters() if p.requires_grad], **SGD)]
    want = train(models[1], [whole_batch()], lambda: None, alone)
    applied = applied_to(models[0], **axes)
    optimizers = applied.optimizers(torch.optim.SGD, **SGD)
    # The first stage trains nothing, and nothing dense is trained.
    assert len(optimizers) == (name == "zero" or applied.mesh.pp_rank)
    want = torch.tensor(want[:SEEN], dtype=torch.float64)
    assert_mean_losses(losses_of(applied, optimizers), want)


SENDING = [("1f1b",), ("tp", False), ("layers-Qwen3Moe",), ("cp",), ("turns-1f1b",)]


@CHECKS(*SENDING, *([("zb-h1",), ("interleaved",)] if FULL else ()))
def stages_send_what_the_plan_says(name, tied=True):
    applied, _, _ = staged(name, tied, torch.float32)
    assert_sends_what_the_plan_says(applied, own_batches(applied))


@CHECKS()
def takes_the_plan_that_is_quickest_here():
    fixed = {name: value for name, value in DEFAULTS.items() if name not in ("ep", "micro_batch")}
    made = planned(made_model().float(), fixed)
    assert len(made.runners_up) == 2
    assert made.seconds <= made.runners_up[0].seconds <= made.runners_up[1].seconds
    staged = dataclasses.replace(
        made.runners_up[1], choice={**made.choice, "pp": 2, "ep": 2}, stages=()
    )
    # Zero 1 is refused beside tp, and the others are run.
    refused = dataclasses.replace(staged, choice={**made.choice, "tp": 2, "zero": 1})
    made = dataclasses.replace(made, runners_up=(staged, refused))
    calls = []

    def make_model():
        calls.append(0)
        return made_model().float()

    best, seconds = made.rerank(make_model, group=dist.group.WORLD, steps=1)
    assert len(calls) == 3 and min(seconds) > 0 and seconds[2] == float("inf")
    assert best.choice == (made, staged)[seconds[0] > seconds[1]].choice
    told = [None] * 4
    dist.all_gather_object(told, seconds)
    assert told == [seconds] * 4
    only = dataclasses.replace(made, choice=refused.choice, runners_up=())
    with pytest.raises(ValueError, match="expected zero to be 0, 2 or 3 for tp=2"):
        only.rerank(make_model, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="expected group to have the 4 ranks of the plan, got 1"):
        made.time(make_model)


RINGS = [(2, 2), (2, 1, "int8"), (4, 1, "mx"), (2, 1, None, "ulysses")]


@CHECKS(*RINGS, *([(2, 1), (4, 1), (2, 2, "fp8")] if FULL else ()))
def rings_send_what_the_plan_says(cp, tp, kv_wire=None, scheme="ring"):
    model = made_model().float()
    fixed = {"cp": cp, "tp": tp, "ep": 4, "zero": 0, "recompute": int(tp == 2), "kv_wire": kv_wire}
    # Each micro-batch sends as much: one case has two of them.
    fixed["micro_batch"] = cp * tp * (1 if kv_wire == "int8" else 2)
    applied = applied_to(model, **fixed, scheme=scheme)
    routing = assert_sends_what_the_plan_says(applied, own_batches(applied))
    told = applied.sent_bytes(routing)["attention"]
    assert told > 0
    if kv_wire is not None:
        plain = dataclasses.replace(applied.plan, choice={**applied.plan.choice, "kv_wire": None})
        assert told < dataclasses.replace(applied, plan=plain).sent_bytes(routing)["attention"]


@CHECKS()
def sends_the_bytes_of_the_formula():
    rank = dist.get_rank()
    ways = [("alltoall", "exact"), ("dedup", "exact"), ("dedup", "reduced"), ("allgather", "exact")]
    for way, combine in ways:
        for wire in (None, "int8", "mx"):
            torch.manual_seed(1)
            how = Dispatch(way, combine=combine, wire=wire)
            layer = MoELayer(64, 96, 8, 2, ep_group=dist.group.WORLD, dispatcher=how, balance=0.0)
            inputs = [torch.randn(11 + r, 64, generator=torch.Generator().manual_seed(r))
                      for r in range(4)]  # fmt: skip
            routing = [layer.router(x).gate.topk_idx for x in inputs]
            options = {"num_experts": 8, "model_dim": 64, "dispatcher": way, "wire": wire}
            options["combine"] = combine
            with count_traffic() as forward:
                out = layer(inputs[rank].requires_grad_())
            with count_traffic() as backward:
                out.sum().backward()
            for i, traffic in enumerate((forward, backward)):
                want = exchange_bytes(routing, rank, backward=bool(i), **options)
                assert traffic.total_bytes == want, (options, i, traffic, want)


def random_plan(seed):
    """Values of axes, and sizes of a model, for a plan that `apply` builds."""
    draw = random.Random(seed)
    fixed = {"ep": draw.choice((2, 4)), "zero": draw.choice((0, 1, 3))}
    fixed["dispatcher"] = draw.choice(("alltoall", "dedup", "allgather"))
    fixed["combine"] = draw.choice(("exact", "reduced"))
    if fixed["dispatcher"] == "alltoall":
        fixed["combine"] = "exact"
    fixed["wire"] = draw.choice((None, "int8", "fp8", "mx"))
    fixed |= {"recompute": draw.choice((0, 1)), "micro_batch": draw.choice((1, 2))}
    return fixed, {
        "num_local_experts": draw.choice((4, 8)),
        "num_experts_per_tok": draw.choice((1, 2)),
    }


# Of the few, one of each dispatcher; then experts in shards.
RANDOM = [(seed,) for seed in (range(20) if FULL else (2, 12, 16))] + [(17, 2, 2), (18, 1, 4)]


@CHECKS(*RANDOM)
def sends_what_a_random_plan_says(seed, ep=None, etp=1):
    fixed, sizes = random_plan(seed)
    if etp > 1:
        fixed |= {"ep": ep, "etp": etp, "wire": None, "zero": min(fixed["zero"], 1)}
    applied = applied_to(made_model(**sizes).float(), **fixed)
    assert_sends_what_the_plan_says(applied, own_batches(applied))


@CHECKS()
def refuses_before_it_changes_anything():
    doubled = made_model()
    doubled.model.register_forward_pre_hook(
        lambda _, args, given: (args, {**given, "inputs_embeds": 2 * given["inputs_embeds"]}),
        with_kwargs=True,
    )
    other, partly = made_model(), made_model()
    other._tp_plan = {**other._tp_plan, "model.norm": "sequence_parallel"}
    partly._tp_plan = {n: style for n, style in partly._tp_plan.items() if "k_proj" not in n}
    alone, losing = made_model(), made_model()
    # The mean over its own labels, whatever other ranks have.
    alone.loss_function = lambda logits, labels, vocab_size, **_: next_token_loss(
        logits, labels, vocab_size
    )
    losing.config.output_router_logits = True
    cases = (
        (alone, {"cp": 2, "pp": 2}, "to take num_items_in_batch, got that of MixtralForCausalLM"),
        (made_model(), {"cp": 2, "dispatcher": "dedup", "ep": 4}, "to have no gradient"),
        (made_model(), {"tp": 2, "zero": 1}, "expected zero to be 0, 2 or 3 for tp=2"),
        (made_model(), {"tp": 4, "zero": 0}, "tp to divide the 2 heads of keys and values, got 4"),
        (made_model(tie_word_embeddings=True), {"tp": 2, "zero": 0}, "weights of their own"),
        (partly, {"tp": 2, "zero": 0}, "got model.layers.0.self_attn.k_proj.weight whole"),
        (other, {"tp": 2, "zero": 0}, "styles of MixtralForCausalLM's tensor parallelism"),
        (doubled, {"pp": 2}, "layers and a norm alone, got MixtralForCausalLM"),
        (losing, {"pp": 2}, "expected output_router_logits to be False"),
        (made_model().to("meta"), {"pp": 2}, "on the CPU for pp=2"),
    )
    cases[1][0].model.layers[1].mlp.experts.down_proj.grad = torch.zeros(8, 32, 48).double()
    for model, fixed, text in cases:
        attention = model.config._attn_implementation
        before = [(name, type(module)) for name, module in model.named_modules()]
        with pytest.raises(ValueError, match=text):
            applied_to(model, **{"ep": 2, **fixed})
        assert before == [(name, type(module)) for name, module in model.named_modules()]
        assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name):
    pytest.importorskip("transformers")
    CHECKS.assert_passed(4, name, timeout=600.0)
