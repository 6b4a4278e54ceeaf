"""Contenders of the attention benchmark as one rank runs them: ours, PyTorch's, another library's.

Shape suffixes: S whole sequence, L positions of this rank, H heads, D head dim.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_ext import attention

# Operations, in 4 * area * H * D: 1 in the forward pass, and 2.5 in the backward pass.
FLOP_FORWARD, FLOP_BOTH = 4, 14


@dataclass(frozen=True)
class Case:
    """Causal attention over one sequence or packed documents."""

    seq_len: int = 8192
    heads: int = 8
    dim: int = 64
    dtype: torch.dtype = torch.float32
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def mask(self) -> attention.Mask:
        """The mask: which keys a query sees."""
        return attention.Mask(is_causal=True, cu_seqlens=self.cu_seqlens)

    @property
    def area(self) -> int:
        """Pairs of query and key."""
        return int(self.mask.areas(self.seq_len).sum())

    def inputs(self) -> list[Tensor]:
        """q, k, v, gradient of the output `[1, H, S, D]`: bfloat16's numbers in any dtype."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.heads, self.seq_len, self.dim)
        drawn = [torch.randn(shape, generator=generator) for _ in range(4)]
        return [x.bfloat16().to(self.dtype) for x in drawn]


@dataclass(frozen=True)
class Contender:
    """A pass over the case: `run` gives out, and dq, dk, dv unless it is forward alone.

    Attributes:
        run: the pass.
        positions_L: which rows of the whole `run` gives.
        dim: dimension of the positions in its tensors.
        first_rank_alone: the other ranks do nothing.
    """

    run: Callable[[], list[Tensor]]
    positions_L: Tensor
    dim: int = 2
    first_rank_alone: bool = False


def both_passes(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Out and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def sharded(case: Case, layout: str) -> tuple[dict[str, Any], list[Tensor], Tensor]:
    """Keywords of a layout, this rank's part of the inputs, and its positions."""
    group = dist.group.WORLD
    where = {"group": group, "layout": layout, "cu_seqlens": case.cu_seqlens}
    parts = [attention.shard_sequence(x, dim=2, **where) for x in case.inputs()]
    ids_L = attention.position_ids(case.seq_len, **where, restart=False)
    return where, parts, ids_L


def ours(case: Case, *, layout: str = "zigzag", backward: bool = True, **options: Any) -> Contender:
    """`ring_attention` under one of its schemes."""
    where, inputs, ids_L = sharded(case, layout)
    attend = functools.partial(attention.ring_attention, is_causal=True, **where, **options)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attend(*inputs[:3])]

    run = functools.partial(both_passes, attend, inputs) if backward else forward
    return Contender(run, ids_L)


def torch_ring(case: Case, *, rotate: str = "alltoall") -> Contender:
    """PyTorch's template of a ring with its CPU kernel; its head-tail balancer is our zigzag.

    The public `context_parallel` has no causal attention on CPU.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    _, (q, k, v, grad), ids_L = sharded(case, "zigzag")
    aten, group = torch.ops.aten, dist.group.WORLD

    def run() -> list[Tensor]:
        cp.set_rotate_method(rotate)
        out, lse = cp._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
        )
        grads = cp._templated_ring_attention_backward(
            group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grad,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return [out, *grads[:3]]

    return Contender(run, ids_L)


def one_process(case: Case) -> Contender:
    """`scaled_dot_product_attention` over the whole sequence, document by document."""
    inputs = case.inputs()
    offsets = case.cu_seqlens or (0, case.seq_len)

    def attend(*qkv: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(*(x[:, :, a:b] for x in qkv), is_causal=True)
            for a, b in itertools.pairwise(offsets)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    run = functools.partial(both_passes, attend, inputs)
    return Contender(run, torch.arange(case.seq_len), first_rank_alone=True)


def ring_attention_pytorch(case: Case) -> Contender:
    """The library's forward pass; its gradients of keys and values are wrong."""
    from ring_attention_pytorch import ring_flash_attn

    _, (q, k, v, _), ids_L = sharded(case, "contiguous")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [ring_flash_attn(q, k, v, causal=True, ring_reduce_col=True)]

    return Contender(run, ids_L, dim=1)


OURS = "ours"
TORCH_RING = "torch's ring"
ONE_PROCESS = "PyTorch, one process"
OTHER_LIBRARY = "ring-attention-pytorch, forward"
CONTENDERS: dict[str, Callable[..., Contender]] = {
    OURS: ours,
    "ours, fast": functools.partial(ours, precision="fast"),
    "ours, bf16 dK and dV": functools.partial(ours, kv_grad_dtype=torch.bfloat16),
    "ours, fast, bf16 dK and dV": functools.partial(
        ours, precision="fast", kv_grad_dtype=torch.bfloat16
    ),
    "ours, Ulysses": functools.partial(ours, scheme="ulysses"),
    "ours, all-gather": functools.partial(ours, scheme="all_gather"),
    "ours, forward": functools.partial(ours, backward=False),
    "ours, contiguous": functools.partial(ours, layout="contiguous"),
    "ours, per document": functools.partial(ours, layout="per_document"),
    "ours, cost balanced": functools.partial(ours, layout="cost_balanced"),
    TORCH_RING: torch_ring,
    f"{TORCH_RING}, all-gather": functools.partial(torch_ring, rotate="allgather"),
    ONE_PROCESS: one_process,
    OTHER_LIBRARY: ring_attention_pytorch,
}


def missing(name: str) -> str | None:
    """Why a contender cannot run here, or None."""
    if name == OTHER_LIBRARY and importlib.util.find_spec("ring_attention_pytorch") is None:
        return "ring-attention-pytorch is not installed"
    if name.startswith(TORCH_RING):
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention as cp
        except ImportError:
            cp = None
        if not hasattr(cp, "_templated_ring_attention_backward"):
            return "this PyTorch has no template of a ring (a private part of 2.13)"
    return None


def present(names: Sequence[str]) -> list[str]:
    """The contenders that can run here."""
    return [name for name in names if missing(name) is None]


def absences(names: Sequence[str]) -> str:
    """A sentence for each contender that cannot run here."""
    reasons = {reason: None for name in names if (reason := missing(name)) is not None}
    return "".join(f" Absent: {reason}." for reason in reasons)


def whole_reference(case: Case) -> list[Tensor]:
    """Out, dq, dk, dv of one process in float64."""
    double = Case(case.seq_len, case.heads, case.dim, torch.float64, case.cu_seqlens)
    return one_process(double).run()
