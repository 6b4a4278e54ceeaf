"""Times every CUDA kernel beside a copy of as many bytes, on one GPU; prints JSON line by line.

    python benchmarks/gpu_kernels.py cuda [gating activation permutation ...]

Shape suffixes: T tokens, D model, F ffn, E experts, K top-k; of attention: B batch, H heads, G key
heads, Q queries, K keys, D head dim; of compression: N elements, K selected. Bytes are counted as
read once and written once; the share is that of the bandwidth of `Tensor.copy_` measured in the
same run.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import gpu_layer
import torch
from gpu_harness import Card, Timer, show
from shapes import LayerShape

import moe_ext
from moe_ext import ops


@dataclass(frozen=True)
class Shape:
    """A layer of a large model: tokens, width, experts."""

    num_tokens: int
    model_dim: int
    ffn_dim: int
    num_experts: int
    top_k: int


LARGE = Shape(32768, 4096, 1024, 128, 8)
SMALL = Shape(64, 256, 64, 8, 2)
GATE = Shape(16384, 0, 0, 64, 8)
SMALL_GATE = Shape(64, 0, 0, 16, 4)


@dataclass(frozen=True)
class Result:
    """A kernel's time; GB/s and share are None where it is not bound by memory."""

    name: str
    shape: str
    dtype: str
    microseconds: float
    gigabytes_per_second: float | None
    share_of_copy: float | None


class Suite:
    """Times kernels and shows each at once, beside the copy and the clocks of its process."""

    def __init__(self, device: torch.device, repeats: int, copy_bytes: int) -> None:
        self.device = device
        self.time = Timer(device, repeats)
        self.num_failed = 0
        self.card = Card(device, self.time, copy_bytes)

    def add(
        self,
        name: str,
        shape: str,
        dtype: torch.dtype,
        run: Callable[[], object],
        num_bytes: int | None = None,
    ) -> None:
        """Times `run`, which moves `num_bytes` in all; what fails is told, and the next goes on."""
        start = time.monotonic()
        try:
            microseconds = self.time(run)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            show({"section": "Failures", "what": f"{name} {shape} {dtype}", "why": why})
            self.num_failed += 1
            return
        rate = None if num_bytes is None else num_bytes / microseconds
        result = Result(
            name=name,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            microseconds=microseconds,
            gigabytes_per_second=None if rate is None else rate / 1e3,
            share_of_copy=None if rate is None else rate / self.card.copy,
        )
        show({"kernel": {**asdict(result), **self.card.beside({}, start)}})


def permutation(suite: Suite, shape: Shape, dtype: torch.dtype) -> None:
    """The four passes over rows."""
    device, top_k = suite.device, shape.top_k
    x_TD = torch.randn(shape.num_tokens, shape.model_dim, device=device).to(dtype)
    scores_TE = torch.rand(shape.num_tokens, shape.num_experts, device=device)
    idx_TK = scores_TE.topk(top_k).indices
    weights_TK = torch.rand(shape.num_tokens, top_k, device=device)
    rows, p = ops.permute_tokens(x_TD, idx_TK, shape.num_experts)
    tables = (p.slot_of_row, p.row_of_slot)
    op = torch.ops.moe_ext
    tokens, slots = x_TD.nbytes, rows.nbytes
    label = f"T={shape.num_tokens} D={shape.model_dim} E={shape.num_experts} K={top_k}"
    runs = {
        "permute_tokens": (
            lambda: ops.permute_tokens(x_TD, idx_TK, shape.num_experts),
            tokens + slots,
        ),
        "unpermute_tokens": (lambda: ops.unpermute_tokens(rows, p, weights_TK), tokens + slots),
        "permute_tokens backward": (
            lambda: op.unpermute_tokens(rows, *tables, top_k),
            tokens + slots,
        ),
        "unpermute_tokens backward": (
            lambda: op._unpermute_tokens_backward(x_TD, rows, *tables, weights_TK),
            tokens + 2 * slots,
        ),
    }
    for name, (run, num_bytes) in runs.items():
        suite.add(name, label, dtype, run, num_bytes)


def activation(suite: Suite, shape: Shape, dtype: torch.dtype) -> None:
    """The gated activation of a layer's rows, both passes and layouts."""
    num_rows = shape.num_tokens * shape.top_k
    x = torch.randn(num_rows, 2 * shape.ffn_dim, device=suite.device).to(dtype)
    grad = torch.randn(num_rows, shape.ffn_dim, device=suite.device).to(dtype)
    label = f"N={num_rows} F={shape.ffn_dim}"
    backward = torch.ops.moe_ext._gated_activation_backward
    for layout in ("concatenated", "interleaved"):
        suite.add(
            f"gated_activation {layout}",
            label,
            dtype,
            lambda layout=layout: ops.gated_activation(x, layout=layout),
            x.nbytes + grad.nbytes,
        )
        suite.add(
            f"gated_activation {layout} backward",
            label,
            dtype,
            lambda layout=layout: backward(grad, x, "swiglu", layout),
            2 * x.nbytes + grad.nbytes,
        )


def gating(suite: Suite, shape: Shape, dtype: torch.dtype) -> None:
    """The gate, which is bound by the latency of its rounds."""
    logits_TE = torch.randn(shape.num_tokens, shape.num_experts, device=suite.device).to(dtype)
    out = ops.topk_gate(logits_TE, shape.top_k)
    label = f"T={shape.num_tokens} E={shape.num_experts} K={shape.top_k}"
    suite.add("topk_gate", label, dtype, lambda: ops.topk_gate(logits_TE, shape.top_k))
    backward = torch.ops.moe_ext._topk_gate_backward
    args = (out.topk_weights, out.score_sum, logits_TE, out.topk_idx, "softmax", True, 1.0)
    suite.add("topk_gate backward", label, dtype, lambda: backward(*args))
    suite.add("router_z_loss", label, dtype, lambda: ops.router_z_loss(logits_TE))
    capacity = shape.num_tokens * shape.top_k // shape.num_experts
    choose = ops.expert_choice_gate
    suite.add("expert_choice_gate", label, dtype, lambda: choose(logits_TE, capacity))


def router(suite: Suite, shape: Shape, dtype: torch.dtype) -> None:
    """The two products of the router's backward pass."""
    x_TD = torch.randn(shape.num_tokens, shape.model_dim, device=suite.device).to(dtype)
    weight_ED = torch.randn(shape.num_experts, shape.model_dim, device=suite.device).to(dtype)
    grad_TE = torch.randn(shape.num_tokens, shape.num_experts, device=suite.device)
    label = f"T={shape.num_tokens} D={shape.model_dim} E={shape.num_experts}"
    op = torch.ops.moe_ext
    to_x, to_weight = op._router_logits_backward_x, op._router_logits_backward_weight
    suite.add("router_logits gradient of x", label, dtype, lambda: to_x(grad_TE, weight_ED, dtype))
    suite.add(
        "router_logits gradient of weight", label, dtype, lambda: to_weight(grad_TE, x_TD, dtype)
    )


def attention(suite: Suite, num_tokens: int, dtype: torch.dtype) -> None:
    """A causal block of the whole sequence and the merge, of 16 heads over 4 heads of keys."""
    num_heads, key_heads, head_dim = 16, 4, 64
    at_Q = torch.arange(num_tokens, device=suite.device)
    q_BHQD, k_BGKD, v_BGKD = (
        torch.randn(1, heads, num_tokens, head_dim, device=suite.device).to(dtype)
        for heads in (num_heads, key_heads, key_heads)
    )
    given = (q_BHQD, k_BGKD, v_BGKD, at_Q, at_Q)
    out_BHQD, lse_BHQ = ops.attention_block(*given, causal=True)
    delta_BHQ = ops.attention_delta(out_BHQD, out_BHQD, lse_BHQ)
    label = f"S={num_tokens} H={num_heads} Hkv={key_heads} Dk={head_dim}"
    suite.add("attention_block", label, dtype, lambda: ops.attention_block(*given, causal=True))
    suite.add(
        "attention_block backward",
        label,
        dtype,
        lambda: ops.attention_block_backward(out_BHQD, lse_BHQ, delta_BHQ, *given, causal=True),
    )
    suite.add(
        "attention_delta",
        label,
        out_BHQD.dtype,
        lambda: ops.attention_delta(out_BHQD, out_BHQD, lse_BHQ),
        2 * out_BHQD.nbytes + 2 * lse_BHQ.nbytes,
    )
    suite.add(
        "merge_attention",
        label,
        out_BHQD.dtype,
        lambda: ops.merge_attention(out_BHQD, lse_BHQ, out_BHQD, lse_BHQ),
        3 * out_BHQD.nbytes + 3 * lse_BHQ.nbytes,
    )

    found_BHQD, state_BHQD, state_BHQ = out_BHQD.to(dtype), out_BHQD.clone(), lse_BHQ.clone()
    suite.add(
        "merge_attention_",
        label,
        dtype,
        lambda: ops.merge_attention_(state_BHQD, state_BHQ, found_BHQD, lse_BHQ),
        2 * out_BHQD.nbytes + found_BHQD.nbytes + 3 * lse_BHQ.nbytes,
    )


def compression(suite: Suite, numel: int, dtype: torch.dtype) -> None:
    """Selection of 1 % and the block quantisers, with error feedback, beside torch's selection."""
    grad_N = torch.randn(numel, device=suite.device).to(dtype)
    residual_N = torch.zeros(numel, device=suite.device)
    k = numel // 100
    label = f"N={numel} K={k}"
    fed = grad_N.nbytes + 2 * residual_N.nbytes
    for check in (False, True):
        suite.add(
            "topk_compress_" + (" checked" if check else ""),
            label,
            dtype,
            lambda check=check: ops.topk_compress_(grad_N, residual_N, k, check_finite=check),
            fed,
        )
    suite.add("torch.topk alone", label, dtype, lambda: torch.topk(grad_N.abs(), k), grad_N.nbytes)
    residual_N.zero_()
    threshold = torch.tensor(2.576, device=suite.device)
    suite.add(
        "threshold_compress_",
        label,
        dtype,
        lambda: ops.threshold_compress_(
            grad_N, residual_N, threshold, 4 * k, target=k, check_finite=False
        ),
        fed,
    )
    for format in ("int8", "int4", "fp8", "sign"):
        residual_N.zero_()
        options = {"format": format, "block": 256}
        codes, scales = ops.quantize_blockwise(grad_N, residual=residual_N, **options)
        suite.add(
            f"quantize_blockwise {format}",
            f"N={numel}",
            dtype,
            lambda options=options: ops.quantize_blockwise(
                grad_N, residual=residual_N, check_finite=False, **options
            ),
            fed + codes.nbytes + scales.nbytes,
        )
        suite.add(
            f"dequantize_add_ {format}",
            f"N={numel}",
            dtype,
            lambda codes=codes, scales=scales, options=options: ops.dequantize_add_(
                residual_N, codes, scales, **options
            ),
            2 * residual_N.nbytes + codes.nbytes + scales.nbytes,
        )
    suite.add(
        "nonzero_blocks", f"N={numel}", dtype, lambda: ops.nonzero_blocks(grad_N), grad_N.nbytes
    )


def layer(suite: Suite, shape: Shape, dtype: torch.dtype) -> None:
    """A whole layer, forward and backward, and its six grouped products alone."""
    sizes = (shape.model_dim, shape.ffn_dim, shape.num_experts, shape.top_k)
    moe = moe_ext.MoELayer(*sizes, device=suite.device, dtype=dtype)
    x_TD = torch.randn(shape.num_tokens, shape.model_dim, device=suite.device).to(dtype)
    x_TD.requires_grad_()
    grad_TD = torch.randn_like(x_TD)
    idx_TK = moe.router(x_TD).gate.topk_idx
    rows_ND, p = ops.permute_tokens(x_TD.detach(), idx_TK, shape.num_experts)
    ends = p.expert_offsets[1:].int()
    hidden_NF = torch.randn(rows_ND.shape[0], shape.ffn_dim, device=suite.device).to(dtype)
    rows_ND.requires_grad_()
    hidden_NF.requires_grad_()

    def clear() -> None:
        moe.zero_grad(set_to_none=True)
        x_TD.grad = rows_ND.grad = hidden_NF.grad = None

    def whole() -> None:
        clear()
        moe(x_TD).backward(grad_TD)

    def products() -> None:
        clear()
        up = ops.grouped_mm(rows_ND, moe.experts.gate_up_proj, ends)
        down = ops.grouped_mm(hidden_NF, moe.experts.down_proj, ends)
        torch.autograd.backward((up, down), (up.detach(), down.detach()))

    label = f"T={shape.num_tokens} D={shape.model_dim} F={shape.ffn_dim} E={shape.num_experts}"
    label += f" K={shape.top_k}"
    suite.add("MoELayer forward and backward", label, dtype, whole)
    suite.add("its grouped products alone", label, dtype, products)


FAMILIES = ("gating", "router", "activation", "permutation", "attention", "compression", "layer")


def measure(device: torch.device, families: Sequence[str], *, small: bool) -> int:
    """Shows figures of these families, and returns how many failed.

    `small` is for a test of this file on a machine without a GPU.
    """
    layer_shape, gate = (SMALL, SMALL_GATE) if small else (LARGE, GATE)
    suite = Suite(device, repeats=3 if small else 20, copy_bytes=2**16 if small else 2**31)
    runs: dict[str, Callable[[torch.dtype], None]] = {
        "gating": lambda dtype: gating(suite, gate, dtype),
        "router": lambda dtype: router(suite, layer_shape, dtype),
        "activation": lambda dtype: activation(suite, layer_shape, dtype),
        "permutation": lambda dtype: permutation(suite, layer_shape, dtype),
        "attention": lambda dtype: attention(suite, 64 if small else 8192, dtype),
        "compression": lambda dtype: compression(suite, 2**12 if small else 2**28, dtype),
    }
    if "layer" in families:
        show({"family": "layer"})
        layer(suite, layer_shape, torch.bfloat16)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        sizes = (layer_shape.model_dim, layer_shape.ffn_dim, layer_shape.num_experts)
        shape = LayerShape("layer", *sizes, layer_shape.top_k)
        tokens = layer_shape.num_tokens
        start = time.monotonic()
        found = gpu_layer.measure(device, shape, tokens, torch.bfloat16, suite.time)
        show({"layer": {**found, **suite.card.beside({}, start)}})
    for family in [name for name in families if name in runs]:
        show({"family": family})
        for dtype in (torch.bfloat16, torch.float32):
            runs[family](dtype)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return suite.num_failed


if __name__ == "__main__":
    where = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    chosen = [name for name in sys.argv if name in FAMILIES] or FAMILIES
    sys.exit(int(measure(where, chosen, small="--small" in sys.argv) > 0))
