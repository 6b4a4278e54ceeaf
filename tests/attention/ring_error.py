"""Error of ring attention against float64, by precision and number of ranks, in one process.

Every rank's blocks are computed in the order of the ring, with the functions that it calls; only
the messages are left out. Run it: python tests/attention/ring_error.py

Shapes: S sequence, H heads, D head dim, P ranks.
"""

import argparse
import itertools
from unittest import mock

import torch
from torch import Tensor

from moe_ext.attention import block as blocks
from moe_ext.attention import make_layout
from moe_ext.attention.block import Block, BlockOptions, attend_, block_backward
from moe_ext.attention.masks import Mask
from moe_ext.ops.attention import attention_delta

NAMES = ("out", "dq", "dk", "dv")


def exact_results(tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk and dv of causal attention in float64, from q, k, v and a gradient of out."""
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].double())]


def ring_results(tensors: list[Tensor], num_ranks: int, precision: str) -> list[Tensor]:
    """The same of a causal zigzag ring, rounded to the dtype of the inputs."""
    q, k, v, grad = tensors
    layout = make_layout("zigzag", q.shape[2], num_ranks)
    options = BlockOptions(q.shape[3] ** -0.5, Mask(True), precision=precision)
    positions = [layout.positions(rank) for rank in range(num_ranks)]

    def block(rank: int, source: int) -> Block:
        rows, cols = positions[rank], positions[source]
        runs = {"q_runs": layout.shards[rank], "k_runs": layout.shards[source]}
        return Block(q[:, :, rows], k[:, :, cols], v[:, :, cols], rows, cols, **runs)

    sums = [torch.zeros(x.shape) for x in (v.new_empty(grad.shape), q, k, v)]
    for rank, rows in enumerate(positions):
        out, lse = torch.zeros(grad[:, :, rows].shape), torch.zeros(q[:, :, rows].shape[:3])
        lse.fill_(-torch.inf)
        for step in range(num_ranks):
            attend_(out, lse, block(rank, (rank - step) % num_ranks), options)
        sums[0][:, :, rows] = out
        wide = grad[:, :, rows].float()
        # A rank that lets libraries round keeps the rounded output alone.
        kept = out if precision == "exact" else out.to(q.dtype).float()
        delta = attention_delta(wide, kept)
        for stage in range(1, num_ranks + 1):
            source = (rank + stage) % num_ranks
            grads = block_backward(wide, lse, delta, block(rank, source), options)
            for total, at, part in zip(
                sums[1:], (rows, positions[source], positions[source]), grads, strict=True
            ):
                total[:, :, at] += part
    return [total.to(q.dtype) for total in sums]


def relative_errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Frobenius norm of each difference over that of what is expected."""
    pairs = zip(found, expected, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def study(
    seq_len: int = 2048,
    heads: int = 2,
    kv_heads: int = 2,
    dim: int = 64,
    ranks: tuple[int, ...] = (2, 4, 8, 16),
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, list[float]]:
    """Errors of out, dq, dk and dv by what computed them; "fast" by library blocks alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, dim))
    tensors = [torch.randn(1, h, seq_len, d, generator=generator).to(dtype) for h, d in shapes]
    expected = exact_results(tensors)
    rows = {"rounding alone": relative_errors([x.to(dtype) for x in expected], expected)}
    with mock.patch.object(blocks, "_LEAST_PAIRS", 0):
        for precision, num_ranks in itertools.product(("exact", "fast"), ranks):
            found = ring_results(tensors, num_ranks, precision)
            rows[f"{precision}, P = {num_ranks}"] = relative_errors(found, expected)
    return rows


def main() -> None:
    """Print the study as a table, errors in thousandths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--kv-heads", type=int, default=2)
    args = parser.parse_args()
    print(f"{'':16}" + "".join(f"{name:>8}" for name in NAMES))
    for name, errors in study(args.seq_len, kv_heads=args.kv_heads).items():
        print(f"{name:16}" + "".join(f"{1e3 * error:8.3f}" for error in errors))


if __name__ == "__main__":
    main()
