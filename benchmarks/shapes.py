"""Named shapes of the benchmarks."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """A mixture-of-experts layer, in the field's letters."""

    name: str
    model_dim: int
    ffn_dim: int
    num_experts: int
    top_k: int


# Mixtral's and Qwen3's proportions at a width that two cores can run.
MIXTRAL_SMALL = LayerShape("A (few wide experts)", 512, 1792, 8, 2)
QWEN3_SMALL = LayerShape("B (many narrow experts)", 512, 192, 64, 8)
LAYERS = (MIXTRAL_SMALL, QWEN3_SMALL)


@dataclass(frozen=True)
class PermutationShape:
    """Tokens that are permuted and combined."""

    num_tokens: int
    model_dim: int
    num_experts: int
    top_k: int


PERMUTATIONS = (PermutationShape(16384, 1024, 8, 2), PermutationShape(4096, 1024, 64, 8))


@dataclass(frozen=True)
class Routing:
    """Popularity of the experts: expert e draws tokens as (e + 1) ** -exponent."""

    name: str
    exponent: float


EVEN = Routing("even", 0.0)
ZIPF = Routing("Zipf 1.2", 1.2)
# So steep that every token chooses the same K experts.
ONE = Routing("all to one", 1000.0)


@dataclass(frozen=True)
class Case:
    """A measurement: a layer, its tokens, their dtype and how they are routed."""

    shape: LayerShape
    num_tokens: int
    dtype: torch.dtype
    routing: Routing

    @property
    def labels(self) -> tuple[str, ...]:
        """The first columns of a table."""
        dtype = str(self.dtype).removeprefix("torch.")
        return self.shape.name, str(self.num_tokens), dtype, self.routing.name


def tokens(case: Case) -> Tensor:
    """Tokens [1, T, D] whose first E columns are their logits: the router's weight is the identity.

    The logits of a token are the same numbers in another order, all of them exact in bfloat16: no
    two tie, so every contender chooses the same experts in every dtype.
    """
    shape = case.shape
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(case.num_tokens, shape.model_dim, generator=generator)
    popularity = -case.routing.exponent * torch.arange(1, shape.num_experts + 1).log()
    noise = -torch.rand(case.num_tokens, shape.num_experts, generator=generator).log_().neg_().log()
    rank_TE = (popularity + noise).argsort(dim=1, descending=True).argsort(dim=1)
    x_TD[:, : shape.num_experts] = (shape.num_experts - rank_TE) / 16
    return x_TD.to(case.dtype)[None]
