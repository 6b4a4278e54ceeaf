"""Sets a whole layer beside that of Hugging Face transformers, on one device.

Shape suffixes: T tokens, D model. Both layers hold the same weights and route the same tokens to
the same experts; `gpu_kernels.py` calls this and prints what it returns.
"""

import importlib.util
from collections.abc import Callable

import torch
from shapes import EVEN, Case, LayerShape, tokens
from torch import Tensor, nn

import moe_ext
from moe_ext import ops

NO_PEER = "not measured: transformers is not installed"
NO_GRAPH = "not measured: no CUDA device"
# Sums in bfloat16 in another order, relative to the largest output.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def measure(
    device: torch.device,
    shape: LayerShape,
    num_tokens: int,
    dtype: torch.dtype,
    time: Callable[[Callable[[], object]], float],
) -> dict[str, object]:
    """Microseconds of a forward and backward pass of each layer, and of the products alone."""
    case = Case(shape, num_tokens, dtype, EVEN)
    x = tokens(case).to(device)
    grad = torch.randn_like(x)
    beside: dict[str, object] = {"peer": NO_PEER}
    if importlib.util.find_spec("transformers") is None:
        sizes = (shape.model_dim, shape.ffn_dim, shape.num_experts, shape.top_k)
        layer: nn.Module = moe_ext.MoELayer(*sizes, device=device, dtype=dtype)
    else:
        from layer_peers import hf_block, our_layer

        block = hf_block(case, device=device)
        layer = our_layer(case, block)
        beside = {
            "peer": "Hugging Face grouped_mm",
            "difference": difference(layer, block, x),
            "peer_microseconds": time(lambda: train(block, x, grad)),
        }
    return {
        **beside,
        "shape": f"T={num_tokens} D={shape.model_dim} F={shape.ffn_dim} E={shape.num_experts} "
        f"K={shape.top_k}",
        "dtype": str(dtype).removeprefix("torch."),
        "ours_microseconds": time(lambda: train(layer, x, grad)),
        "products_microseconds": time(products(layer, x[0])),
        "graph": graph_capture(layer, x),
    }


def train(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    """A forward and a backward pass, gradients new."""
    layer.zero_grad(set_to_none=True)
    y = layer(x.detach().requires_grad_())
    (y[0] if isinstance(y, tuple) else y).backward(grad)


def difference(layer: nn.Module, block: nn.Module, x: Tensor) -> float:
    """The largest difference of the outputs, relative to the largest output.

    Raises:
        RuntimeError: the layers do not compute the same.
    """
    with torch.no_grad():
        expected = block(x)
        expected = expected[0] if isinstance(expected, tuple) else expected
        found = float((layer(x) - expected).abs().max() / expected.abs().max())
    if not found <= TOLERANCE[x.dtype]:
        raise RuntimeError(
            f"gpu_layer: expected the outputs to be within {TOLERANCE[x.dtype]}, got {found}"
        )
    return found


def products(layer: nn.Module, x_TD: Tensor) -> Callable[[], object]:
    """The six grouped products of the layer, on the rows that these tokens make."""
    experts = layer.experts
    with torch.no_grad():
        idx_TK = layer.router(x_TD).gate.topk_idx
        rows, permutation = ops.permute_tokens(x_TD, idx_TK, layer.num_experts)
    hidden = rows.new_ones(rows.shape[0], experts.down_proj.shape[2]).requires_grad_()
    rows.requires_grad_()
    offsets = permutation.expert_offsets

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        rows.grad = hidden.grad = None
        up = ops.grouped_mm(rows, experts.gate_up_proj, offsets)
        down = ops.grouped_mm(hidden, experts.down_proj, offsets)
        torch.autograd.backward((up, down), (up.detach(), down.detach()))

    return run


def graph_capture(layer: nn.Module, x: Tensor) -> str:
    """True if a forward and backward pass, captured as one CUDA graph, gives the same bits."""
    if x.device.type != "cuda":
        return NO_GRAPH
    static = x.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)

    def step() -> tuple[Tensor, ...]:
        y = layer(static)
        return (y, *torch.autograd.grad(y, (static, *layer.parameters()), torch.ones_like(y)))

    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                expected = step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[0]}"
    equal = all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    return "passed" if equal else "failed: the replay gives other bits"
