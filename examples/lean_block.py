"""A transformer block that keeps neither softmax nor the inputs of its layer norms.

    python examples/lean_block.py

The block follows DeepSpeed's transformer kernel. The backward pass recovers the input of a layer
norm from its output, which the next product keeps anyway, and computes attention again from queries
and keys.

Output: the bytes that a plain block and this one keep for the backward pass. The last line has
their ratio.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ext.attention import ring_attention


class InvertedLayerNorm(torch.autograd.Function):
    """Layer norm that keeps its output: the normalised input is (y - bias) / weight."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """As `F.layer_norm`."""
        y, _, inverse = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(y, weight, bias, inverse)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Gradients from the saved output, without normalising again."""
        y, weight, bias, inverse = ctx.saved_tensors
        normal = (y - bias) / weight
        of_normal = grad * weight
        mean = of_normal.mean(-1, keepdim=True)
        along = (of_normal * normal).mean(-1, keepdim=True)
        rows = grad.flatten(0, -2)
        of_weight = (rows * normal.flatten(0, -2)).sum(0)
        return inverse * (of_normal - mean - normal * along), of_weight, rows.sum(0), None


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose input is not kept; no weight may be zero."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.LayerNorm`."""
        if bool((self.weight == 0).any()):
            raise ValueError("LayerNorm: expected weight to have no zeros, which end its inverse")
        return InvertedLayerNorm.apply(x, self.weight, self.bias, self.eps)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention that keeps its softmax."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(mask, -torch.inf).softmax(-1) @ v


def lean_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ring attention of one rank, which keeps a number for each row of the softmax."""
    return ring_attention(q, k, v, group=None, is_causal=True)


class Block(nn.Module):
    """Attention and a dense layer, each behind a layer norm."""

    def __init__(self, dim: int, num_heads: int, *, lean: bool) -> None:
        super().__init__()
        norm = LayerNorm if lean else nn.LayerNorm
        self.norms = nn.ModuleList([norm(dim), norm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.num_heads = num_heads
        self.attention = lean_attention if lean else plain_attention

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, D]` to the same."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))
        attended = self.attention(*heads.permute(2, 0, 3, 1, 4))
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def kept_bytes(run: Callable[[], Tensor], module: nn.Module) -> int:
    """Memory that a forward pass keeps for the backward pass, besides parameters."""
    mine = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    assert result.requires_grad
    return sum(kept.values())


def main(argv: list[str] | None = None) -> int:
    """Print what both blocks keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of the sequence (%(default)s)")
    parser.add_argument("--dim", type=int, default=256, help="of a token (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="of the attention (%(default)s)")
    args = parser.parse_args(argv)
    for name in ("tokens", "dim", "heads"):
        if getattr(args, name) < 1:
            parser.error(f"expected --{name} to be positive, got {getattr(args, name)}")
    if args.dim % args.heads:
        parser.error(f"expected --dim to be a multiple of --heads {args.heads}, got {args.dim}")
    x = torch.randn(1, args.tokens, args.dim, requires_grad=True)
    kept = {}
    for name in ("plain", "lean"):
        block = Block(args.dim, args.heads, lean=name == "lean")
        kept[name] = kept_bytes(lambda b=block: b(x), block)
        print(f"{name}: {kept[name]} bytes")
    share = kept["lean"] / kept["plain"]
    print(f"result: the lean block keeps {share:.1%} of the bytes of the plain one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
