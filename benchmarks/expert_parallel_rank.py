"""One rank of the expert-parallel benchmark: reads jobs as lines of JSON, answers with costs.

``expert_parallel_rank.py RANK WORLD_SIZE`` with the rendezvous in the environment.

Shapes: T tokens of a rank, D model, F ffn, E experts, K top-k, N = T*K rows, P ranks.
"""

import os
import time

import torch
import torch.distributed as dist
from namespaces import TX_BYTES, answer_jobs
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_ext import MoELayer
from moe_ext.distributed import AutoDispatcher
from moe_ext.distributed.dispatch import auto

TORCH, ALLTOALL = "torch", "alltoall"
NAMES = (
    TORCH,
    ALLTOALL,
    "dedup, exact",
    "dedup, reduced",
    "hierarchical, exact",
    "hierarchical, reduced",
    "allgather, exact",
    "auto, exact",
    "auto, reduced",
    "alltoall, exact, int8",
    "dedup, reduced, int8",
    "dedup, reduced, mx",
)


class PlainTorch:
    """Expert parallelism as written by hand in torch: sort, all-to-all, products, and back.

    Args:
        layer: whose router and experts it uses.
    """

    def __init__(self, layer: MoELayer) -> None:
        self.layer = layer
        self.num_ranks = dist.get_world_size()

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Run every token through its experts."""
        gate = self.layer.router(x_TD).gate
        num_local = self.layer.num_experts // self.num_ranks
        expert_N = gate.topk_idx.flatten()
        order_N = expert_N.argsort(stable=True)
        token_N = order_N // gate.topk_idx.shape[1]
        sent_PL = torch.bincount(expert_N, minlength=self.layer.num_experts)
        received_PL = torch.empty_like(sent_PL)
        dist.all_to_all_single(received_PL, sent_PL)
        send = sent_PL.view(self.num_ranks, -1).sum(1).tolist()
        receive = received_PL.view(self.num_ranks, -1).sum(1).tolist()
        rows = _exchange(x_TD[token_N], send, receive)
        local = torch.arange(num_local).repeat(self.num_ranks)
        by_expert = local.repeat_interleave(received_PL).argsort(stable=True)
        ends = received_PL.view(self.num_ranks, -1).sum(0).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        out = self.layer.experts(rows[by_expert], offsets)
        back = torch.empty_like(out).index_copy(0, by_expert, out)
        returned = _exchange(back, receive, send)
        weights = gate.topk_weights.flatten()[order_N, None]
        return torch.zeros_like(x_TD).index_add(0, token_N, returned * weights)


def _exchange(x_ND: Tensor, send: list[int], receive: list[int]) -> Tensor:
    return all_to_all_single_autograd(x_ND.contiguous(), receive, send, dist.group.WORLD)


def make(name: str, sizes: dict[str, int]) -> PlainTorch | MoELayer:
    """A contender; the layers of all of them have the same weights."""
    torch.manual_seed(0)
    kind, *options = name.split(", ")
    combine, wire = [*options, None, None][:2]
    layer = MoELayer(
        sizes["model_dim"],
        sizes["ffn_dim"],
        sizes["num_experts"],
        sizes["top_k"],
        balance_loss_coef=0.0,
        ep_group=dist.group.WORLD,
        dispatcher=kind if combine else ALLTOALL,
        combine=combine or "exact",
        wire=wire,
    )
    return PlainTorch(layer) if name == TORCH else layer


class Rank:
    """Contenders that live from job to job."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self, sizes: dict[str, int], names: list[str], node_size: int) -> dict[str, float]:
        """Make contenders anew; how far their outputs are from the second one's."""
        # As torchrun says it to ranks.
        os.environ["LOCAL_WORLD_SIZE"] = str(node_size)
        generator = torch.Generator().manual_seed(1000 + self.rank)
        shape = (sizes["num_tokens"], sizes["model_dim"])
        self.x_TD = torch.randn(shape, generator=generator)
        self.layers = {name: make(name, sizes) for name in names}
        with torch.no_grad():
            outputs = {name: layer(self.x_TD) for name, layer in self.layers.items()}
        usual = outputs[ALLTOALL]
        return {n: float((y - usual).abs().max() / usual.abs().max()) for n, y in outputs.items()}

    def choose(self) -> dict[str, str]:
        """Let "auto" choose anew, on a link that has changed; what it says."""
        auto._rehearsed.clear()
        found = {}
        for name, layer in self.layers.items():
            if isinstance(layer, MoELayer) and name.startswith("auto"):
                combine = name.partition(", ")[2]
                group = layer.experts.ep_group
                layer.dispatcher = AutoDispatcher(layer.num_experts, group, combine=combine)
                layer(self.x_TD)
                found[name] = str(layer.explain_dispatch())
        return found

    def time(self, names: list[str]) -> dict[str, list[float]]:
        """One turn of each, forward and backward: wall and CPU seconds, bytes out of the node."""
        found = {}
        for name in names:
            x_TD = self.x_TD.clone().requires_grad_()
            dist.barrier()
            sent = int(TX_BYTES.read_text())
            wall, cpu = time.perf_counter(), time.process_time()
            self.layers[name](x_TD).sum().backward()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            dist.barrier()  # acknowledgements are under way
            found[name] = [*spent, int(TX_BYTES.read_text()) - sent]
        return found


if __name__ == "__main__":
    answer_jobs(Rank)
