"""Named shapes of the benchmarks."""

from dataclasses import dataclass


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
    """How popular the experts are: expert e draws tokens as (e + 1) ** -exponent."""

    name: str
    exponent: float


EVEN = Routing("even", 0.0)
ZIPF = Routing("Zipf 1.2", 1.2)
# So steep that every token chooses the same K experts.
ONE = Routing("all to one", 1000.0)
