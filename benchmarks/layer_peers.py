"""The contenders of the layer's benchmark: one set of weights, one routing, many layers.

Shape suffixes: T tokens, D model, F ffn, E experts, K top-k, C capacity, N rows.
"""

import contextlib
import importlib.util
import io
import itertools
import os
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shapes import QWEN3_SMALL, Case, LayerShape
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moe_ext


def chosen(case: Case, x: Tensor) -> Tensor:
    """The experts [T, K] that the tokens choose."""
    return x[0, :, : case.shape.num_experts].float().topk(case.shape.top_k, dim=1).indices


def hf_block(
    case: Case, implementation: str = "grouped_mm", *, device: torch.device | str = "cpu"
) -> nn.Module:
    """The block of transformers: Qwen3's for the shape with its proportions, else Mixtral's."""
    shape = case.shape
    common = {"hidden_size": shape.model_dim, "num_experts_per_tok": shape.top_k}
    if shape is QWEN3_SMALL:
        config = Qwen3MoeConfig(
            **common,
            moe_intermediate_size=shape.ffn_dim,
            num_experts=shape.num_experts,
            norm_topk_prob=True,
        )
        make = Qwen3MoeSparseMoeBlock
    else:
        config = MixtralConfig(
            **common, intermediate_size=shape.ffn_dim, num_local_experts=shape.num_experts
        )
        make = MixtralSparseMoeBlock
    config._experts_implementation = implementation
    with torch.device(device):
        block = make(config)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in block.experts.parameters():
            parameter.normal_(std=0.02, generator=generator)
        block.gate.weight.copy_(torch.eye(shape.num_experts, shape.model_dim, device=device))
    return block.to(case.dtype)


def our_layer(case: Case, block: nn.Module | None = None) -> nn.Module:
    """Our layer with the weights of the block, on its device."""
    shape, block = case.shape, hf_block(case) if block is None else block
    device = block.gate.weight.device
    sizes = (shape.model_dim, shape.ffn_dim, shape.num_experts, shape.top_k)
    layer = moe_ext.MoELayer(*sizes, balance=0.0, device=device, dtype=case.dtype)
    with torch.no_grad():
        layer.router.weight.copy_(block.gate.weight)
        layer.experts.gate_up_proj.copy_(block.experts.gate_up_proj)
        layer.experts.down_proj.copy_(block.experts.down_proj)
    return layer


class Expert(nn.Module):
    """A SwiGLU expert, for layers that take a module for each expert."""

    def __init__(self, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D] -> [..., D]`."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class DenseGate(nn.Module):
    """The block's router in the form of fairscale's gate, with room for every token.

    fairscale's own gate draws the second expert at random and drops tokens: it cannot be compared.
    """

    def __init__(self, weight: Tensor, top_k: int):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(weight.clone()), top_k

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the combine weights [T, E, C] and where they are."""
        scores_TE = F.linear(x_TD, self.weight).softmax(dim=-1)
        weights_TK, idx_TK = scores_TE.topk(self.top_k, dim=1)
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
        chosen_TE = torch.zeros_like(scores_TE).scatter(1, idx_TK, 1.0)
        place_TE = (chosen_TE.cumsum(dim=0) - 1).long()
        capacity = int(place_TE.max()) + 1
        place_TK = place_TE.gather(1, idx_TK)
        flat = idx_TK * capacity + place_TK
        combine = x_TD.new_zeros(x_TD.shape[0], scores_TE.shape[1] * capacity)
        combine = combine.scatter(1, flat, weights_TK).view(x_TD.shape[0], -1, capacity)
        return x_TD.new_zeros(()), combine, combine > 0


class Transposed(nn.Module):
    """fairscale wants the tokens along the first dimension."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """`[1, T, D] -> [1, T, D]`."""
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class First(nn.Module):
    """DeepSpeed returns the output, the loss and the counts."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """`[1, T, D] -> [1, T, D]`."""
        return self.layer(x)[0]


def join_group() -> None:
    """A process group of one, which both layers insist on."""
    if not torch.distributed.is_initialized():
        path = tempfile.mktemp(prefix="moe_ext_bench")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=0, world_size=1
        )


def fairscale_layer(case: Case) -> nn.Module:
    """Fairscale's MOELayer around the same experts."""
    from fairscale.nn import MOELayer

    join_group()
    block = hf_block(case)
    weights = zip(block.experts.gate_up_proj.data, block.experts.down_proj.data, strict=True)
    experts = nn.ModuleList(Expert(gate_up, down) for gate_up, down in weights)
    return Transposed(MOELayer(DenseGate(block.gate.weight.data, case.shape.top_k), experts))


def deepspeed_layer(case: Case) -> nn.Module:
    """DeepSpeed's MoE around the same experts, without drops and random choices."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        from deepspeed.moe.layer import MoE

        join_group()
        # The group exists already: DeepSpeed takes it over, and looks for no launcher.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        block, shape = hf_block(case), case.shape
        expert = Expert(block.experts.gate_up_proj.data[0], block.experts.down_proj.data[0])
        layer = MoE(
            shape.model_dim,
            expert,
            shape.num_experts,
            k=shape.top_k,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(block.gate.weight)
        for index, copied in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            copied.gate_up.copy_(block.experts.gate_up_proj[index])
            copied.down.copy_(block.experts.down_proj[index])
    return First(layer)


MAKERS: dict[str, Callable[[Case], nn.Module]] = {
    "ours": our_layer,
    "grouped_mm": hf_block,
    "eager": lambda case: hf_block(case, "eager"),
    "fairscale": fairscale_layer,
    "deepspeed": deepspeed_layer,
}


def contenders(case: Case) -> list[str]:
    """The contenders that can run the case and are installed."""
    names = ["ours", "grouped_mm", "eager"]
    names += ["deepspeed"] if importlib.util.find_spec("deepspeed") else []
    # fairscale's dense [T, E, C] tensor would take gigabytes; it mixes dtypes, which torch refuses.
    small = case.num_tokens <= 1024 and case.routing.exponent == 0
    if small and case.dtype == torch.float32 and importlib.util.find_spec("fairscale"):
        names.append("fairscale")
    return names


def make(case: Case, names: list[str]) -> dict[str, nn.Module]:
    """The contenders, with one set of weights."""
    return {name: MAKERS[name](case) for name in names}


def train(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    """A step without its optimizer: gradients of the weights and of the input."""
    layer.zero_grad(set_to_none=True)
    layer(x.detach().requires_grad_()).backward(grad)


def plain_products(case: Case, x: Tensor, *, in_order: bool = False) -> Callable[[], object]:
    """The floor of a case: `expert_products` on its routing."""
    counts = chosen(case, x).flatten().bincount(minlength=case.shape.num_experts).tolist()
    return expert_products(case.shape, case.dtype, counts, in_order=in_order)


def expert_products(
    shape: LayerShape, dtype: torch.dtype, counts: list[int], *, in_order: bool = False
) -> Callable[[], object]:
    """The six products of each expert on its rows, into memory that is there already.

    All six of an expert, then those of the next one; with `in_order` in the order of a step: one of
    every expert, then the next one of every expert.
    """
    num_rows, two_f = sum(counts), 2 * shape.ffn_dim
    rows_ND, out_ND, grad_x_ND, grad_ND = (
        torch.randn(num_rows, shape.model_dim).to(dtype) for _ in range(4)
    )
    up_NF, grad_up_NF = (torch.randn(num_rows, two_f).to(dtype) for _ in range(2))
    h_NF, grad_h_NF = (torch.randn(num_rows, shape.ffn_dim).to(dtype) for _ in range(2))
    up_EFD, grad_up_EFD = (
        torch.randn(shape.num_experts, two_f, shape.model_dim).to(dtype) for _ in range(2)
    )
    down_EDF, grad_down_EDF = (
        torch.randn(shape.num_experts, shape.model_dim, shape.ffn_dim).to(dtype) for _ in range(2)
    )

    ends = list(itertools.accumulate(counts))
    places = [(e, slice(end - counts[e], end)) for e, end in enumerate(ends) if counts[e]]
    products: tuple[Callable[[int, slice], object], ...] = (
        lambda e, rows: torch.mm(rows_ND[rows], up_EFD[e].t(), out=up_NF[rows]),
        lambda e, rows: torch.mm(h_NF[rows], down_EDF[e].t(), out=out_ND[rows]),
        lambda e, rows: torch.mm(grad_ND[rows], down_EDF[e], out=grad_h_NF[rows]),
        lambda e, rows: torch.mm(grad_ND[rows].t(), h_NF[rows], out=grad_down_EDF[e]),
        lambda e, rows: torch.mm(grad_up_NF[rows], up_EFD[e], out=grad_x_ND[rows]),
        lambda e, rows: torch.mm(grad_up_NF[rows].t(), rows_ND[rows], out=grad_up_EFD[e]),
    )
    calls = [(product, *place) for place in places for product in products]
    if in_order:
        calls = [(product, *place) for product in products for place in places]

    def run() -> None:
        for product, e, rows in calls:
            product(e, rows)

    return run
