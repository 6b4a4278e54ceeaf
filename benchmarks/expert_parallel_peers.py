"""Expert parallelism of other libraries, on the router and the weights of one of our layers.

A library that is not installed is left out, see `missing`.

Shapes: T tokens of a rank, D model, E experts, K top-k, N = T*K rows, P ranks, L = E/P local
    experts.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from moe_ext import MoELayer
from moe_ext.distributed.dtensor import local_part

Layer = Callable[[Tensor], Tensor]
TORCH = "torch"


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


def torchtitan(layer: MoELayer) -> Layer:
    """AllToAll dispatcher of torchtitan around the layer's experts."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher as Dispatcher

    # The other backend exchanges lists of tensors, which Gloo refuses where they are uneven.
    set_spmd_backend("default")
    dispatcher = Dispatcher(Dispatcher.Config(num_experts=layer.num_experts, top_k=layer.top_k))
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def run(x_TD: Tensor) -> Tensor:
        gate = layer.router(x_TD).gate
        rows, counts, metadata = dispatcher.dispatch(
            x_TD, gate.topk_weights, gate.topk_idx, gate.num_tokens_per_expert
        )
        ends = counts.cumsum(0)
        out = layer.experts(rows, torch.cat([ends.new_zeros(1), ends]))
        return dispatcher.combine(out, metadata, x_TD)

    return run


def transformers(layer: MoELayer) -> Layer:
    """All-to-all of transformers, by which it trains, around its own experts."""
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    up, down = (local_part(p.detach()) for p in layer.experts.parameters())
    config = MixtralConfig(
        num_local_experts=up.shape[0], hidden_size=up.shape[2], intermediate_size=down.shape[2]
    )
    config._experts_implementation = "grouped_mm"  # as transformers chooses by itself
    experts = MixtralExperts(config)
    experts._is_expert_parallel = True
    experts.gate_up_proj, experts.down_proj = nn.Parameter(up), nn.Parameter(down)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    exchange = AllToAllEP(experts, mesh["ep"], mesh["tp"])

    def run(x_TD: Tensor) -> Tensor:
        gate = layer.router(x_TD).gate
        return exchange(x_TD, gate.topk_idx, gate.topk_weights)

    return run


class _Expert(nn.Module):
    """A SwiGLU expert, as users of DeepSpeed write it."""

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up_proj), nn.Parameter(down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.gate_up_proj).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj)


class _DeepSpeedGate(nn.Module):
    """DeepSpeed's gate without drops, on logits that make it choose the experts of the router."""

    def __init__(self, layer: MoELayer, gate: Any) -> None:
        super().__init__()
        self.layer, self.inner = [layer], gate

    def forward(self, x_TD: Tensor, *_: object) -> Any:
        from deepspeed.moe.sharded_moe import topkgating

        (layer,) = self.layer
        gate = layer.router(x_TD).gate
        logits_TE = gate.topk_weights.new_full((x_TD.shape[0], layer.num_experts), -1e4)
        logits_TE = logits_TE.scatter(1, gate.topk_idx, gate.topk_weights.log())
        group = self.inner.ep_group
        return topkgating(logits_TE, layer.top_k, 1.0, 0, False, group, sparse_routes=True)


def deepspeed(layer: MoELayer) -> Layer:
    """DeepSpeed's MoE layer without drops, padded to the fullest expert."""
    import deepspeed as library
    from deepspeed.moe.layer import MoE

    if not library.comm.is_initialized():
        # An all-reduce that no layer calls would be compiled first.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        library.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    up, down = (local_part(p.detach()) for p in layer.experts.parameters())
    moe = MoE(
        up.shape[2],
        _Expert(up[0], down[0]),
        layer.num_experts,
        ep_size=dist.get_world_size(),
        k=layer.top_k,
        drop_tokens=False,
    )
    moe.set_deepspeed_parallelism()
    inner = moe.deepspeed_moe
    for expert, up_proj, down_proj in zip(inner.experts.deepspeed_experts, up, down, strict=True):
        expert.gate_up_proj.data, expert.down_proj.data = up_proj.clone(), down_proj.clone()
    inner.gate = _DeepSpeedGate(layer, inner.gate)
    return lambda x_TD: moe(x_TD)[0]


PEERS: dict[str, Callable[[MoELayer], Layer]] = {
    TORCH: PlainTorch,
    "torchtitan": torchtitan,
    "transformers": transformers,
    "DeepSpeed": deepspeed,
}


def installed() -> list[str]:
    """Names of the peers that are there; a line for each that is not."""
    found = []
    for name in PEERS:
        if importlib.util.find_spec(name.lower()) is None:
            print(f"benchmark expert_parallel: {name} is not installed", file=sys.stderr)
        else:
            found.append(name)
    return found


def make_peer(name: str, layer: MoELayer) -> Layer:
    """A peer; what it says goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        return PEERS[name](layer)
