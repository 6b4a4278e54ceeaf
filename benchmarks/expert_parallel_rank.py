"""Rank of the expert-parallel benchmark: reads jobs as lines of JSON, answers with costs.

``expert_parallel_rank.py RANK WORLD_SIZE`` with the rendezvous in the environment.

Shapes: T tokens of a rank, D model, F ffn, E experts, K top-k.
"""

import os
import time

import torch
import torch.distributed as dist
from _harness import keep_memory, rise_of_memory
from expert_loads import routing, tokens_of
from expert_parallel_peers import PEERS, Layer, make_peer
from namespaces import TX_BYTES, answer_jobs
from torch import Tensor, nn

import moe_ext
from moe_ext import MoELayer, ops
from moe_ext.dispatch import auto
from moe_ext.distributed import AutoDispatcher
from moe_ext.nn.routers import RouterOutput

ALLTOALL = "alltoall"
EXACT = (ALLTOALL, "dedup, exact", "hierarchical, exact", "allgather, exact")
REDUCED = ("dedup, reduced", "hierarchical, reduced", "allgather, reduced")
AUTO = ("auto, exact", "auto, reduced")
CODED = (
    "alltoall, exact, lossless",
    "alltoall, exact, int8",
    "dedup, reduced, int8",
    "hierarchical, reduced, int8",
    "dedup, reduced, mx",
)
SEED = 1234


class GivenRouter(nn.Module):
    """Routes tokens as a load says, whatever they are; the step is told to it."""

    def __init__(self, load: str, sizes: dict[str, int], rank: int) -> None:
        super().__init__()
        self.load, self.num_experts, self.top_k = load, sizes["num_experts"], sizes["top_k"]
        self.num_tokens = tokens_of(load, sizes["num_tokens"], rank, dist.get_world_size())
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Draw the routing of a step."""
        sizes = self.num_tokens, self.num_experts, self.top_k
        idx_TK, weights_TK = routing(self.load, SEED, step, *sizes)
        counts_E = torch.bincount(idx_TK.flatten(), minlength=self.num_experts)
        scores_E = torch.zeros(self.num_experts)
        gate = ops.GateOutput(weights_TK, idx_TK, counts_E, scores_E)
        self.routed = RouterOutput(torch.zeros(self.num_tokens, self.num_experts), gate)

    def forward(self, x_TD: Tensor, *, token_mask: Tensor | None = None) -> RouterOutput:
        """The routing of the step."""
        return self.routed


def make(name: str, sizes: dict[str, int], router: nn.Module | None, overlap: int = 1) -> Layer:
    """A contender; the layers of all of them have the same weights."""
    torch.manual_seed(0)
    kind, *options = name.split(", ")
    combine, wire = [*options, None, None][:2]
    layer = MoELayer(
        sizes["model_dim"],
        sizes["ffn_dim"],
        sizes["num_experts"],
        sizes["top_k"],
        balance=0.0,
        ep_group=dist.group.WORLD,
        dispatcher=moe_ext.nn.Dispatch(
            kind if combine else ALLTOALL, combine=combine or "exact", wire=wire, overlap=overlap
        ),
    )
    if router is not None:
        layer.router = router
    return make_peer(name, layer) if name in PEERS else layer


class Rank:
    """Contenders that live from job to job."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(
        self, sizes: dict[str, int], names: list[str], node_size: int, load: str | None = None
    ) -> dict[str, tuple[float, int]]:
        """Make contenders anew: how far outputs are from `alltoall`'s, and peaks of memory."""
        # As torchrun says it to ranks.
        os.environ["LOCAL_WORLD_SIZE"] = str(node_size)
        generator = torch.Generator().manual_seed(1000 + self.rank)
        self.router = None if load is None else GivenRouter(load, sizes, self.rank)
        num_tokens = sizes["num_tokens"] if self.router is None else self.router.num_tokens
        self.x_TD = torch.randn((num_tokens, sizes["model_dim"]), generator=generator)
        self.layers = {name: make(name, sizes, self.router) for name in names}
        outputs = {name: torch.stack(self._step(name)) for name in names}
        usual = outputs[ALLTOALL]
        far = {n: float((y - usual).abs().max() / usual.abs().max()) for n, y in outputs.items()}
        moe_ext.reuse_memory(False)
        peaks = {name: rise_of_memory(lambda n=name: self._step(n)) for name in names}
        keep_memory(touched=0)
        return {name: (far[name], peaks[name]) for name in names}

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

    def chosen(self) -> dict[str, str]:
        """The dispatcher that each "auto" uses now."""
        return {
            name: layer.explain_dispatch().name
            for name, layer in self.layers.items()
            if name.startswith("auto")
        }

    def time(self, names: list[str], step: int) -> dict[str, list[float]]:
        """Run each once, forward and backward: wall and CPU seconds, bytes out of the node."""
        if self.router is not None:
            self.router.set_step(step)
        found = {}
        for name in names:
            dist.barrier()
            sent = int(TX_BYTES.read_text())
            wall, cpu = time.perf_counter(), time.process_time()
            self._step(name)
            spent = time.perf_counter() - wall, time.process_time() - cpu
            dist.barrier()  # acknowledgements are under way
            found[name] = [*spent, int(TX_BYTES.read_text()) - sent]
        return found

    def _step(self, name: str) -> tuple[Tensor, Tensor]:
        """Run a forward and backward pass; return the output and the gradient of the tokens."""
        x_TD = self.x_TD.clone().requires_grad_()
        y_TD = self.layers[name](x_TD)
        y_TD.sum().backward()
        assert x_TD.grad is not None
        return y_TD.detach(), x_TD.grad

    def prepare_parts(self, sizes: dict[str, int], parts: list[int]) -> None:
        """Make layers that send in parts, one that only sends, and one that only computes."""
        self.router = None
        self.x_TD = torch.randn(sizes["num_tokens"], sizes["model_dim"])
        made = {overlap: make(ALLTOALL, sizes, None, overlap) for overlap in (1, *parts)}
        self.layers = {str(overlap): layer for overlap, layer in made.items()}
        layer = make(ALLTOALL, sizes, None)
        layer.experts = _Nothing(layer.experts)
        experts = made[1].experts
        num_rows = self.x_TD.shape[0] * sizes["top_k"]

        def alone(parts: int) -> Layer:
            """The experts on as many rows in all, some of them in each call."""
            offsets = torch.arange(experts.num_local_experts + 1)
            offsets *= num_rows // parts // offsets[-1]
            rows = [torch.randn(int(offsets[-1]), sizes["model_dim"]) for _ in range(parts)]

            def run(x_TD: Tensor) -> Tensor:
                outs = [experts(part.requires_grad_(), offsets).sum() for part in rows]
                return torch.stack(outs) + x_TD[0, 0] * 0

            return run

        self.layers["transfer"] = layer
        self.layers |= {f"experts in {n}": alone(n) for n in (1, *parts)}


class _Nothing(nn.Module):
    """Experts that give back their rows."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.ep_group, self.num_experts = experts.ep_group, experts.num_experts

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The rows, as new ones."""
        return rows.clone()


if __name__ == "__main__":
    answer_jobs(Rank)
