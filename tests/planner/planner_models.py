"""Models that tests of plans share, and steps of training whose messages they count."""

import torch
import torch.distributed as dist

from moe_ext.comm.groups import group_size
from moe_ext.distributed import count_traffic
from moe_ext.planner import ModelSpec, search
from moe_ext.planner.axes import columns_of

# A step of training, and sizes of transformers' small models.
STEP = {"num_ranks": 4, "seq_len": 256, "global_batch": 16, "dtype": "float32"}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Sizes of a layer that simulations of thousands of placements can afford.
SMALL = ModelSpec(
    *(4, 64, 4, 96, 128),
    num_kv_heads=4,
    num_experts=8,
    top_k=2,
    num_moe_layers=4,
    gated=True,
    gated_experts=True,
)


def columns(**axes):
    """One placement, with the defaults of all other axes."""
    return columns_of([axes])


def best_of_all(cost, fixed):
    """Plan that a search finds and proves, the best of all placements with these values."""
    found, every = search(cost, fixed=fixed), search(cost, fixed=fixed, exhaustive=True)
    assert found.best == every.best and found.proven
    return found


def small_mixtral(**sizes):
    """A Mixtral that trains in milliseconds, with the same weights on every rank."""
    import transformers

    torch.manual_seed(0)
    given = {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, **sizes}
    config = transformers.MixtralConfig(**given, output_router_logits=False)
    return transformers.MixtralForCausalLM(config)


def run_step(applied, own):
    """Mean loss over the rank's micro-batches, with stages where it has the last one."""
    if applied.pipeline is None:
        total = 0.0
        for ids in own:
            loss = applied.model(input_ids=ids, labels=ids).loss / len(own)
            loss.backward()
            total += loss.item()
        return total
    ends = (0, applied.pipeline.table.num_stages - 1)
    given = (own if end in applied.pipeline.stages else () for end in ends)
    return float(sum(applied.pipeline.step(*given))) / len(own)


def routing_of(applied, run):
    """Experts that all ranks of the ep group choose in the layers of a step."""
    chosen, handles = [], []

    def note(module, inputs):
        # A recompute, inside of a backward pass, chooses the same once more.
        if torch._C._current_graph_task_id() == -1:
            chosen.append(inputs[1].contiguous())

    for name, module in applied.model.named_modules():
        if name.endswith("mlp.experts"):
            handles.append(module.register_forward_pre_hook(note))
    run()
    for handle in handles:
        handle.remove()
    found = []
    for mine in chosen:
        ranks = [torch.empty_like(mine) for _ in range(group_size(applied.mesh.ep_group))]
        dist.all_gather(ranks, mine, group=applied.mesh.ep_group)
        found.append(ranks)
    return found


def assert_sends_what_the_plan_says(applied, own):
    """Run a step, of which the messages are those that the plan tells; its routing."""
    with count_traffic() as traffic:
        routing = routing_of(applied, lambda: run_step(applied, own))
        applied.sync_gradients()
    told, sent = applied.sent_bytes(routing), traffic.sent_bytes
    layers = sum(name.endswith("mlp.experts") for name, _ in applied.model.named_modules())
    assert len(routing) == layers * len(own)
    assert told["gradients"] == sent.pop("all_reduce", 0), (told, sent)
    # Keys of a ring go as activations do, and heads by the same messages as rows.
    told["pipeline" if applied.plan.choice["scheme"] == "ring" else "rows"] += told.pop("attention")
    assert told["pipeline"] == sent.pop("send", 0), (told, sent)
    assert told["rows"] == traffic.total_bytes, (told, sent)
    return routing
