"""Runs every CUDA operator once beside the same call on the CPU.

    python tools/gpu_operators.py cuda FILE [NAME ...]

Writes one JSON object a line to FILE: an operator, how it ended, and why. One process runs all
operators; after an operator that ended it, hung or broke the device, a new process goes on. The
program waits for every launch, so that an error is that of its operator. Registered operators
without a call here are reported as "no call"; compression comes last. `simt` is the emulated device
of the tests.

Shape suffixes: T tokens, D model, F ffn, E experts, K top-k, N rows; of attention: B batch, H
heads, S sequence; of recurrences V values.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_ext
from moe_ext.attention import ring_attention

SECONDS = 20  # for one operator in a dtype: a kernel that hangs ends its process
START_SECONDS = 40  # to import torch and start the driver, besides
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
T, D, F, E, K, B, H, V = 257, 64, 32, 8, 2, 2, 4, 16
# Two tiles of attention, and two chunks of a recurrence: their emulation takes long.
HEADS, S = 2, 72
WEIGHTS = 300_000  # elements of a tensor that an update by deltas changes
# Tolerances, relative to the largest number of the CPU's result: two roundings and another order.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-4, torch.float64: 1e-5}

Arguments = tuple[Any, ...]

# Operators without a CUDA kernel.
CPU_ONLY = {
    "adam_step_",  # for memory that a GPU lacks
    # Limit on counts that the host has read. `ops` brings others there.
    *("plan_balance", "split_rows"),
}


class Inputs:
    """Inputs of the calls below, on the CPU: a faulty kernel spoils no other operator's inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def wide(self, *shape: int) -> Tensor:
        """Normal numbers in the dtype of sums: float32, or float64 for float64."""
        return self.random(*shape, dtype=self.sum_dtype)

    def coded(self, *shape: int) -> Tensor:
        """Normal numbers in a dtype that codecs take."""
        return self.random(*shape, dtype=self.coded_dtype)

    def single(self, *shape: int) -> Tensor:
        """Normal numbers in float32."""
        return self.random(*shape, dtype=torch.float32)

    def any_bits(self, numel: int) -> Tensor:
        """Finite numbers of any bits, which no coder makes smaller."""
        size = (numel * self.coded_dtype.itemsize,)
        x = torch.randint(256, size, generator=self.generator).byte().view(self.coded_dtype)
        return x.where(x.isfinite(), 1)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of sums."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def coded_dtype(self) -> torch.dtype:
        """Dtype of codecs, which take no float64."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype

    @property
    def product_dtype(self) -> torch.dtype:
        """Dtype of products with packed weights, which take no float16."""
        return torch.float32 if self.dtype == torch.float16 else self.coded_dtype

    @cached_property
    def idx_TK(self) -> Tensor:
        """Experts of each token, all different."""
        return torch.rand(T, E, generator=self.generator).topk(K).indices

    @cached_property
    def weights_TK(self) -> Tensor:
        """Weights of the chosen experts."""
        return torch.rand(T, K, generator=self.generator, dtype=self.sum_dtype)

    @cached_property
    def mask_T(self) -> Tensor:
        """Mask of the tokens that are not padding."""
        return torch.arange(T) % 7 > 0

    @cached_property
    def documents_BS(self) -> Tensor:
        """Documents' numbers of all positions: three documents."""
        return (torch.arange(S) // 30).expand(B, S).clone()

    @property
    def padded_documents(self) -> Tensor:
        """`documents_BS` behind three earlier positions, for `causal_conv1d`."""
        return torch.nn.functional.pad(self.documents_BS, (3, 0))

    @cached_property
    def permuted(self) -> tuple[Tensor, ...]:
        """Rows, slot_of_row, row_of_slot and offsets."""
        found: tuple[Tensor, ...] = op("permute_tokens")(self.random(T, D), self.idx_TK, E)
        return found[:4]

    @cached_property
    def qkv(self) -> tuple[Tensor, ...]:
        """Inputs of a block of attention, with the positions of queries and keys."""
        at_S = torch.arange(S)
        return (*(self.random(B, heads, S, D) for heads in (HEADS, 1, 1)), at_S, at_S)

    @cached_property
    def attended(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block."""
        found: tuple[Tensor, Tensor] = op("attention_block")(*self.qkv, *BLOCK)
        return found

    @cached_property
    def scanned(self) -> tuple[Tensor, ...]:
        """x, dt, A, B and C of a selective scan."""
        x_BHS, dt_BHS, rates_HK = self.wide(B, H, S), self.wide(B, H, S).abs(), self.wide(H, 16)
        return x_BHS, dt_BHS, -rates_HK.abs(), self.wide(B, 2, S, 16), self.wide(B, 2, S, 16)

    @cached_property
    def ruled(self) -> tuple[Tensor, ...]:
        """q, k, v, g, beta and state of a gated delta rule."""
        q_BGSF, k_BGSF = self.wide(B, 2, S, F) / 8, self.wide(B, 2, S, F) / 8
        decays_BHS, beta_BHS = -self.wide(B, H, S).abs(), self.wide(B, H, S).sigmoid()
        return q_BGSF, k_BGSF, self.wide(B, H, S, V), decays_BHS, beta_BHS, self.wide(B, H, F, V)

    @cached_property
    def rng_state(self) -> Tensor:
        """Seed, layer, step and first token."""
        return torch.tensor([5, 1, 2, 0])

    @cached_property
    def indices_K(self) -> Tensor:
        """Ascending indices into 4096 elements."""
        return torch.randperm(4096, generator=self.generator)[:64].sort().values

    @cached_property
    def versions(self) -> tuple[Tensor, Tensor]:
        """A tensor, and a copy in which one element in thirty differs."""
        x = self.random(WEIGHTS)
        return x, x.where(torch.rand(x.shape, generator=self.generator) < 29 / 30, -x)

    def payload(self) -> Tensor:
        """Values and indices of a sparse gradient."""
        values, no_scales = self.single(64).view(torch.uint8), torch.empty(0)
        made: Tensor = op("_encode_payload")(
            self.indices_K, values, no_scales, 4096, 64, "u16", "fp32", 0, True
        )
        return made


# No documents, mask, slopes, bias or seed; scale, causal, no window, softcap or dropout.
BLOCK = (*(None,) * 6, 0.125, True, -1, -1, 0.0, 0.0, 0, 0)


def op(name: str) -> Any:
    """A registered operator."""
    return getattr(torch.ops.moe_ext, name)


def _block_gradient(i: Inputs) -> Arguments:
    out, lse = i.attended
    return (i.wide(*out.shape), lse, i.wide(*lse.shape), *i.qkv, *BLOCK, False)


# In the order in which they are started: the layer's first.
CALLS: dict[str, Callable[[Inputs], Arguments]] = {
    "grouped_mm": lambda i: (i.permuted[0], i.random(E, F, D), i.permuted[3], i.random(E, F)),
    "_grouped_mm_backward_weight": lambda i: (i.random(T * K, F), i.permuted[0], i.permuted[3]),
    "_grouped_mm_backward_weight_add_": lambda i: (
        *(i.random(E, F, D), i.random(T * K, F)),
        *(i.permuted[0], i.permuted[3]),
    ),
    "_grouped_mm_backward_bias": lambda i: (i.random(T * K, F), i.permuted[3]),
    "router_logits": lambda i: (i.random(T, D), i.wide(E, D)),
    "_router_logits_backward_x": lambda i: (i.wide(T, E), i.wide(E, D), i.dtype),
    "_router_logits_backward_weight": lambda i: (i.wide(T, E), i.random(T, D), i.sum_dtype),
    "topk_gate": lambda i: (i.random(T, E), K),
    "_topk_gate_backward": lambda i: (
        *(i.wide(T, K), i.wide(E), i.random(T, E), i.idx_TK),
        *("softmax", True, 1.0),
    ),
    "permute_tokens": lambda i: (i.random(T, D), i.idx_TK, E),
    "unpermute_tokens": lambda i: (*i.permuted[:3], K, i.weights_TK),
    "_gather_tokens": lambda i: (i.random(T, D), i.permuted[1], K),
    "_unpermute_tokens_backward": lambda i: (i.random(T, D), *i.permuted[:3], i.weights_TK),
    "gated_activation": lambda i: (
        *(i.random(T * K, 2 * F), "swiglu", "concatenated"),
        *(i.weights_TK.view(-1), i.permuted[1]),
    ),
    "_gated_activation_backward": lambda i: (
        *(i.random(T, F), i.random(T, 2 * F), "swiglu", "interleaved"),
    ),
    "_gated_activation_backward_weighted": lambda i: (
        *(i.random(T * K, F), i.random(T * K, 2 * F), "swiglu", "concatenated"),
        *(i.weights_TK.view(-1), i.permuted[1]),
    ),
    "activation": lambda i: (i.random(T, F), "gelu"),
    "_activation_backward": lambda i: (i.random(T, F), i.random(T, F), "gelu"),
    "router_z_loss": lambda i: (i.random(T, E),),
    "_router_z_loss_backward": lambda i: (i.wide(1)[0], i.random(T, E), None),
    "load_balance_loss": lambda i: (i.wide(E), torch.arange(E), K),
    "_load_balance_loss_backward": lambda i: (i.wide(1)[0], i.wide(E), torch.arange(E), K),
    "gate_weights": lambda i: (i.random(T, E), i.idx_TK),
    "attention_block": lambda i: (*i.qkv, *BLOCK),
    "attention_block_": lambda i: (*(x.clone() for x in i.attended), *i.qkv, *BLOCK),
    "attention_block_backward": _block_gradient,
    "attention_delta": lambda i: (
        i.wide(B, HEADS, S, D),
        i.wide(B, HEADS, S, D),
        i.wide(B, HEADS, S),
    ),
    "merge_attention": lambda i: (
        *i.attended,
        i.wide(B, HEADS, S, D),
        i.wide(B, HEADS, S),
    ),
    "_merge_attention_backward": lambda i: (
        *(
            i.wide(B, HEADS, S, D),
            i.wide(B, HEADS, S),
            *i.attended,
            i.wide(B, HEADS, S, D),
            i.wide(B, HEADS, S),
        ),
    ),
    "merge_attention_": lambda i: (
        *(x.clone() for x in i.attended),
        *(i.random(B, HEADS, S, D), i.wide(B, HEADS, S)),
    ),
    "limit_capacity": lambda i: (i.idx_TK, E, 40),
    "expert_choice_gate": lambda i: (i.random(T, E), 40),
    "_expert_choice_gate_backward": lambda i: (
        *(i.wide(T, E), i.wide(E), i.random(T, E)),
        *(op("expert_choice_gate")(i.random(T, E), 40)[1], None),
    ),
    "_sinkhorn_scale": lambda i: (i.wide(T, E), 8, 1e-4),
    "balanced_assignment": lambda i: (i.random(T // 4 // E * E, E),),
    "sequence_load": lambda i: (i.random(T - 1, E), i.idx_TK[1:], 2),
    "_sequence_load_backward": lambda i: (i.wide(2, E), i.random(T - 1, E), "softmax", None),
    "routing_uniform": lambda i: (i.rng_state, T, 5, 2),
    "routing_jitter": lambda i: (i.random(T, D), i.rng_state, 0.1),
    "gshard_gate": lambda i: (i.random(T, E), i.rng_state),
    "_gshard_gate_backward": lambda i: (*(i.wide(T, 2), i.wide(E), i.random(T, E), i.idx_TK, 1.0),),
    "noisy_topk_gate": lambda i: (i.random(T, E), i.random(T, E), i.rng_state, K),
    "_noisy_topk_gate_backward": lambda i: (
        *(i.wide(T, K), i.wide(E), i.wide(E), i.random(T, E), i.random(T, E), i.rng_state),
        *(i.idx_TK, 0.01, 1.0, None),
    ),
    "sum_rows": lambda i: (i.random(T, D), torch.arange(T) % 50, 60),
    "nonzero_blocks": lambda i: (i.random(4096).where(torch.arange(4096) < 900, 0), 256),
    "pack_bits": lambda i: (i.random(4099).relu(),),
    "pack_masked_": lambda i: (
        *(i.random(64), i.random(4096)),
        op("pack_bits")(torch.zeros(4096).index_fill(0, i.indices_K, 1)),
    ),
    "unpack_masked_": lambda i: (
        *(i.random(4096), i.random(64)),
        op("pack_bits")(torch.zeros(4096).index_fill(0, i.indices_K, 1)),
    ),
    "delta_encode": lambda i: i.versions,
    "delta_apply_": lambda i: (i.versions[1], op("delta_encode")(*i.versions)),
    "delta_hash": lambda i: (i.versions[0], 5),
    "delta_hash_change": lambda i: (i.versions[1], op("delta_encode")(*i.versions), 5),
    "delta_pack": lambda i: (i.indices_K, i.random(64), 4096),
    "delta_unpack": lambda i: (op("delta_encode")(*i.versions), i.versions[0], WEIGHTS),
    "encode_exponents": lambda i: (i.coded(20_000),),
    "decode_exponents_": lambda i: (
        *(i.coded(20_000), op("encode_exponents")(i.coded(20_000)).clone()),
    ),
    "encode_exponent_rows": lambda i: (i.any_bits(20_000), 1),
    "decode_exponent_row_": lambda i: (
        *(i.coded(20_000), op("encode_exponents")(i.coded(20_000)).clone()),
        torch.tensor([9]),
    ),
    "quantized_mm": lambda i: (
        *(i.random(5, D).to(i.product_dtype), torch.arange(F * D).byte().view(F, D)),
        *(i.single(F, 1), i.random(F, dtype=i.product_dtype), torch.arange(F).int()),
        *(torch.arange(F + 1), 8, torch.tensor([0, 2, 5])),
    ),
    "masked_mm": lambda i: (
        *(i.random(5, D).to(i.product_dtype), i.random(F * D // 2, dtype=i.product_dtype)),
        *(torch.full((F, D // 8), 0b01100110, dtype=torch.uint8), torch.tensor([0, 2, 5])),
    ),
    "gated_delta_rule": lambda i: (*i.ruled, None),
    "_gated_delta_rule_backward": lambda i: (
        *(i.wide(B, H, S, V), i.wide(B, H, F, V), *i.ruled, None),
        op("gated_delta_rule")(*i.ruled, None)[2],
    ),
    "selective_scan": lambda i: (*i.scanned, i.wide(B, H, 16), None),
    "_selective_scan_backward": lambda i: (
        *(i.wide(B, H, S), i.wide(B, H, 16), *i.scanned, None),
        op("selective_scan")(*i.scanned, i.wide(B, H, 16), None)[2],
    ),
    "causal_conv1d": lambda i: (
        *(i.wide(B, F, S), i.wide(F, 4), i.wide(F), i.wide(B, F, 3), None, True),
    ),
    "_causal_conv1d_backward": lambda i: (
        *(i.wide(B, F, S), i.wide(B, F, S), i.wide(F, 4), i.wide(F), i.wide(B, F, 3), None, True),
    ),
    "gather_blocks": lambda i: (i.random(4096), torch.tensor([1, 4, 15]), 256),
    "scatter_blocks_": lambda i: (
        *(i.random(4096), i.random(3, 256), torch.tensor([1, 4, 15]), 256),
    ),
    "scale_into_": lambda i: (i.random(4096), i.random(4096), 0.5),
    "topk_compress_": lambda i: (i.random(4096), i.wide(4096), 64),
    "threshold_compress_": lambda i: (
        i.random(4096),
        i.wide(4096),
        torch.tensor(2.0, dtype=i.sum_dtype),
        900,
    ),
    "pack_indices": lambda i: (i.indices_K, 4096),
    "unpack_indices": lambda i: (op("pack_indices")(i.indices_K, 4096), 64, 4096),
    "add_pairs_": lambda i: (
        *(i.single(4096), i.single(64), op("pack_indices")(i.indices_K, 4096), 4096),
    ),
    "_encode_payload": lambda i: (
        *(i.indices_K, i.single(64).view(torch.uint8), torch.empty(0)),
        *(4096, 64, "u16", "fp32", 0, True),
    ),
    "_payload_header": lambda i: (i.payload(),),
    "_decode_payload": lambda i: (i.payload(),),
    "quantize_blockwise": lambda i: (i.coded(4096), "int8", 256, i.single(4096)),
    "dequantize_blockwise": lambda i: (
        *op("quantize_blockwise")(i.coded(4096), "int4", 256),
        *(4096, "int4", 256),
    ),
    "dequantize_add_": lambda i: (
        i.single(4096),
        *op("quantize_blockwise")(i.coded(4096), "int8", 256),
        *("int8", 256),
    ),
    "quantize_rows": lambda i: (i.coded(T, D), "int8"),
    "dequantize_rows": lambda i: (op("quantize_rows")(i.coded(T, D), "int8"), D, "int8"),
}


def _documents(i: Inputs) -> dict[str, Any]:
    return {"documents": i.documents_BS}


def _mask(i: Inputs) -> dict[str, Any]:
    return {"token_mask": i.mask_T}


def _tokens(_: Inputs) -> dict[str, Any]:
    return {"token_idx": torch.arange(T) + 5}


def _velocity(i: Inputs) -> dict[str, Any]:
    residual, velocity = i.wide(4096), i.wide(4096)
    return {
        **{"velocity": i.wide(4096), "momentum": 0.9},
        **{"residual_in": residual, "velocity_in": velocity},
    }


def _in_block(i: Inputs) -> dict[str, Any]:
    documents = torch.arange(S) // 30
    return {
        **{"q_documents": documents, "k_documents": documents, "alibi_slopes": i.wide(HEADS)},
        **{"key_mask": documents.expand(B, S) < 2, "seed": torch.tensor(7)},
        **{"bias": i.random(B, HEADS, S, S), "dropout_p": 0.1},
    }


# Options that the calls above leave out, by name: operators that have one are called again.
FURTHER: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "topk_gate": lambda i: {"selection_bias": i.wide(E), **_mask(i)},
    "permute_tokens": lambda i: {
        **{"topk_weights": i.weights_TK, "capacity": 40, "drop_policy": "score"},
    },
    "router_z_loss": _mask,
    "_router_z_loss_backward": _mask,
    "attention_block": _in_block,
    "attention_block_": _in_block,
    "attention_block_backward": lambda i: {**_in_block(i), "needs_grad_bias": True},
    "limit_capacity": lambda i: {
        "order": torch.randperm(T * K, generator=i.generator),
        "ranked_idx": torch.rand(T, E, generator=i.generator).argsort(),
    },
    "expert_choice_gate": _mask,
    "_expert_choice_gate_backward": _mask,
    "_sinkhorn_scale": _mask,
    "balanced_assignment": lambda i: {"token_mask": i.mask_T[: T // 4 // E * E]},
    "sequence_load": lambda i: {"token_mask": i.mask_T[1:]},
    "_sequence_load_backward": lambda i: {"token_mask": i.mask_T[1:]},
    "routing_uniform": _tokens,
    "routing_jitter": _tokens,
    "gshard_gate": lambda i: {**_mask(i), **_tokens(i)},
    "noisy_topk_gate": lambda i: {**_mask(i), **_tokens(i)},
    "_noisy_topk_gate_backward": _tokens,
    "delta_hash": lambda i: {"places": torch.arange(WEIGHTS) * 3},
    "gated_delta_rule": _documents,
    "_gated_delta_rule_backward": _documents,
    "selective_scan": _documents,
    "_selective_scan_backward": _documents,
    "causal_conv1d": lambda i: {"documents": i.padded_documents},
    "_causal_conv1d_backward": lambda i: {"documents": i.padded_documents},
    "topk_compress_": _velocity,
    "threshold_compress_": _velocity,
    "quantize_blockwise": lambda i: {"rng_state": i.rng_state, "residual_in": i.single(4096)},
}


def calls(name: str, i: Inputs) -> list[Arguments]:
    """The arguments of an operator, and those with all tensors that it may be given."""
    made = CALLS[name](i)
    if name not in FURTHER:
        return [made]
    further = FURTHER[name](i)
    declared = op(name).default._schema.arguments
    given = [
        further.pop(a.name, made[at] if at < len(made) else a.default_value)
        for at, a in enumerate(declared)
    ]
    assert not further, f"{name} has no {', '.join(further)}"
    return [made, tuple(given)]


def _layer(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of a layer with a shared expert."""
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(
        D, F, E, K, bias=True, balance=moe_ext.nn.Balance(z_coef=0.1), shared_expert=F
    )
    x_TD = torch.randn(T, D).to(device, dtype).requires_grad_()
    y_TD = layer.to(device, dtype)(x_TD)
    y_TD.square().sum().backward()
    return [y_TD.detach(), *(p.grad for p in (x_TD, *layer.parameters()) if p.grad is not None)]


def _attention(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of ring attention on one rank, by a library where one serves it."""
    made = Inputs(dtype).qkv[:3]
    q, k, v = (x.to(device).requires_grad_() for x in made)
    out = ring_attention(q, k, v, group=None, is_causal=True, precision="fast")
    out.square().sum().backward()
    return [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]


# Modules made of many operators; 10 % of a norm: a token may choose another expert.
WHOLE: dict[str, Callable[[str, torch.dtype], list[Tensor]]] = {
    "MoELayer": _layer,
    "attention_by_a_library": _attention,
}


def registered() -> list[str]:
    """Operators with kernels, less those of the CPU alone."""
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("moe_ext::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {name.removeprefix("moe_ext::") for name in names if has_kernel(name, "CPU")}
    return sorted(found - CPU_ONLY)


def everything() -> list[str]:
    """Names in the order in which they run; operators without a call last."""
    return [*CALLS, *(name for name in registered() if name not in CALLS)]


def moved(arguments: Arguments, device: str) -> Arguments:
    """Copies on a device: operators may write into them."""
    return tuple(x.clone().to(device) if isinstance(x, Tensor) else x for x in arguments)


def result(name: str, arguments: Arguments) -> list[Tensor]:
    """Return the results of an operator, and its arguments after the call."""
    declared = op(name).default._schema.arguments[: len(arguments)]
    named = [a.name for a in declared if a.kwarg_only]
    positional = len(arguments) - len(named)
    options = dict(zip(named, arguments[positional:], strict=True))
    found = op(name)(*arguments[:positional], **options)
    found = torch.tensor(found) if isinstance(found, int) else found
    several = found if isinstance(found, tuple | list) else (found,)
    return [x for x in (*several, *arguments) if isinstance(x, Tensor)]


def difference(found: list[Tensor], expected: list[Tensor], tolerance: float) -> str:
    """Describe the fault; an empty text if there is none.

    One integer of a hundred may differ, since a number between two codes may get either.
    """
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        a = a.cpu()
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {place} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if not a.is_floating_point():
            share = float((a != b).double().mean()) if a.numel() else 0.0
            if share > 0.01:
                return f"result {place}: {100 * share:.0f} % of {a.numel()} integers differ"
            continue
        # A query without keys has minus infinity.
        error = float((a.double() - b.double()).where(a != b, 0.0).norm())
        norm = float(b.double().where(b.isfinite(), 0.0).norm())
        if not error <= tolerance * norm:
            return f"result {place} of {tuple(a.shape)} is off by {error:.3g} of {norm:.3g}"
    return ""


def check(name: str, device: str, dtype: torch.dtype) -> str:
    """Runs an operator on the device and on the CPU; what is wrong."""
    if name in WHOLE:
        return difference(WHOLE[name](device, dtype), WHOLE[name]("cpu", dtype), 0.1)
    for arguments in calls(name, Inputs(dtype)):
        expected = result(name, moved(arguments, "cpu"))
        with _emulated() if device == "simt" else contextlib.nullcontext():
            found = result(name, moved(arguments, "cpu" if device == "simt" else device))
        wrong = difference(found, expected, TOLERANCE[dtype])
        if wrong:
            return wrong
    return ""


def _emulated() -> contextlib.AbstractContextManager[None]:
    """Runs kernels by the emulation of the tests."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    import emulation

    context: contextlib.AbstractContextManager[None] = emulation.emulated_cuda()
    return context


def check_here(name: str, device: str, tell: Callable[[str], object] = print) -> tuple[str, str]:
    """(state, why) of an operator in every dtype; tells which one runs."""
    if name not in CALLS and name not in WHOLE:
        return "failed", "no call: add one to tools/gpu_operators.py"
    for dtype in DTYPES if device != "simt" else DTYPES[:1]:
        tell(str(dtype).removeprefix("torch."))
        try:
            why = check(name, device, dtype)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"{type(error).__name__}: {' '.join(lines[:2])}"
            traceback.print_exc()
        if why:
            return "failed", f"{dtype}: {why}"
    return "passed", ""


def _child(names: list[str], device: str, connection: Connection) -> None:
    """Body of a process: sends the dtypes as they run, and how each operator ended."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    for name in names:
        connection.send((name, *check_here(name, device, connection.send)))
        if device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                break
    # Without the destructors: a broken device may hang in them.
    os._exit(0)


def run(names: list[str], device: str, method: str) -> Iterator[tuple[str, str, str]]:
    """(operator, state, why), in order; a new process goes on behind one that ended."""
    context: Any = multiprocessing.get_context(method)
    left = list(names)
    while left:
        connection, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(left, device, theirs), daemon=True)
        process.start()
        theirs.close()
        last, seconds, begun = "its start", SECONDS + START_SECONDS, len(left)
        try:
            while left:
                if not connection.poll(seconds):
                    yield left.pop(0), "hung", f"no end within {SECONDS} s, in {last}"
                    break
                message, seconds = connection.recv(), SECONDS
                if isinstance(message, tuple):
                    yield message
                    left.remove(message[0])
                    message = "its start"
                last = message
        except (EOFError, OSError):
            process.join(5)
            # A process that broke the device, and said so, has ended by itself.
            if process.exitcode != 0 or len(left) == begun:
                yield left.pop(0), "died", f"exit code {process.exitcode}, in {last}"
        finally:
            process.kill()
            process.join(5)


def main() -> int:
    """Parses the command line."""
    device, file, *names = sys.argv[1:]
    if "--here" in names:
        return int(check_here(names[-1], device)[0] != "passed")
    failed = False
    with Path(file).open("a") as out:
        for name, state, why in run(names or everything(), device, "spawn"):
            failed |= state != "passed"
            out.write(json.dumps({"operator": name, "state": state, "why": why}) + "\n")
            out.flush()
    return int(failed)


if __name__ == "__main__":
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    sys.exit(main())
