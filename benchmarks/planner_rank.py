"""Rank of training runs in the placements of plans; a script of `namespaces.Ranks`."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from namespaces import answer_jobs

from moe_ext.planner import CLUSTERS, ClusterSpec, measure_cluster, model_spec, plan

SEQ_LEN, GLOBAL_BATCH = 128, 8
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def model_of(skew: float) -> torch.nn.Module:
    """A small Mixtral; with a skew, most tokens choose experts 0 and 1."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, output_router_logits=False)
    model = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0 * bool(skew)
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter[:2] += skew
    return model


class Rank:
    """Measures the machine, and steps of plans."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def profile(self) -> dict[str, Any]:
        """The cluster as all ranks measure it together."""
        found = measure_cluster(
            model_spec(model_of(0.0)),
            CLUSTERS["h100"],
            dtype="float32",
            seq_len=SEQ_LEN,
            group=dist.group.WORLD,
        )
        return found.to_dict()

    def steps(
        self, cluster: dict[str, Any], choice: dict[str, Any], skew: float, count: int
    ) -> tuple[float, float]:
        """Seconds of a step as they are and as planned, for the load that the layers counted."""
        options = {"num_ranks": dist.get_world_size(), "seq_len": SEQ_LEN}
        options |= {"global_batch": GLOBAL_BATCH, "dtype": "float32", "fixed": choice}
        spec = ClusterSpec.of(cluster)
        model = model_of(skew)
        applied = plan(model, spec, **options).apply(model)
        optimizers = applied.optimizers(torch.optim.AdamW, lr=1e-4)
        made = applied.plan.choice
        ids = torch.randint(SIZES["vocab_size"], (GLOBAL_BATCH, SEQ_LEN))
        mine = ids[self.rank :: dist.get_world_size()].split(int(made["micro_batch"]))
        times, loads, experts = [], [], int(SIZES["num_local_experts"])
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(
                    lambda _, args: loads.append(
                        torch.bincount(args[1].flatten(), minlength=experts)
                    )
                )
        for _ in range(1 + count):
            dist.barrier()
            start = time.perf_counter()
            for batch in mine:
                (model(input_ids=batch, labels=batch).loss / len(mine)).backward()
            applied.sync_gradients()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            times.append(time.perf_counter() - start)
        # Counts of the passes of the last step, over all ranks.
        counts = torch.stack(loads[-len(loads) // (1 + count) :])
        dist.all_reduce(counts)
        fixed = {**choice, **made}
        told = plan(
            model_spec(model_of(0.0)), spec, load=counts.tolist(), **{**options, "fixed": fixed}
        )
        return statistics.median(times[1:]), told.seconds


if __name__ == "__main__":
    answer_jobs(Rank)
