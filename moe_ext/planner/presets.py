"""Sizes of models from their papers, and the numbers of parameters that follow from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_ext._checks import check_choice, check_fields, check_rule
from moe_ext.ops.flops import delta_rule_flops

# Fields of `ModelSpec` that may be 0.
_MAY_BE_ZERO = (
    *("num_cross_layers", "num_experts", "top_k", "num_moe_layers", "moe_layers", "positions"),
    *("shared_ffn_dim", "latent", "window", "num_window_layers", "vectors", "published"),
)
# Kinds of mixing between the positions of a sequence, in a layer.
MIXERS = ("attention", "recurrent", "both", "none")


@dataclass(frozen=True)
class RecurrentSpec:
    """Sizes of a layer's state space, delta rule or short convolution.

    Attributes:
        projections: parameters of the matrices that each token meets.
        channels: channels of the convolution, or of an activation in its place.
        taps: W, taps of the convolution; 0 without one.
        num_heads: H, heads of states; 0 for a convolution alone. Each channel of Mamba-1 is a head.
        num_groups: heads of queries and keys; H / num_groups adjacent heads share each of them.
        head_dim: K, the elements of a query or key.
        v_dim: V, the elements of a value.
        has_beta: whether the recurrence is a delta rule.
        by_element: whether decays are per element of a state, as in Mamba-1; with the delta rule
            per element of a key, as in Kimi Linear.
    """

    projections: int
    channels: int
    taps: int
    num_heads: int = 0
    num_groups: int = 0
    head_dim: int = 0
    v_dim: int = 0
    has_beta: bool = False
    by_element: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        sizes = ("num_groups", "head_dim", "v_dim")
        check_fields(self, may_be_zero=("taps", "num_heads", *sizes))
        for name in sizes:
            if bool(getattr(self, name)) != bool(self.num_heads):
                raise ValueError(
                    f"RecurrentSpec: expected {name} to be above 0 with heads and 0 without, got "
                    f"{getattr(self, name)} with num_heads={self.num_heads}"
                )
        if self.num_heads and self.num_heads % self.num_groups:
            raise ValueError(
                f"RecurrentSpec: expected num_groups to divide num_heads={self.num_heads}, got "
                f"{self.num_groups}"
            )

    @property
    def width(self) -> int:
        """Width of the values of all heads, or of the channels of a convolution alone."""
        return self.num_heads * self.v_dim or self.channels

    def parameters(self) -> int:
        """Return the number of parameters, without biases and norms (see `ModelSpec.vectors`)."""
        has_rates = self.by_element and not self.has_beta
        rates = self.num_heads * self.head_dim if has_rates else 0
        return self.projections + self.channels * self.taps + rates

    @property
    def state_numbers(self) -> int:
        """Numbers per token that a recurrence reads and writes, without its states."""
        each = 2 * self.v_dim + self.decay_numbers + self.has_beta
        return 2 * self.num_groups * self.head_dim + self.num_heads * each

    @property
    def decay_numbers(self) -> int:
        """Numbers of decays per head and token."""
        return self.head_dim if self.by_element and self.has_beta else 1

    @property
    def sent_sizes(self) -> dict[str, Any]:
        """Sizes for `moe_ext.attention.recurrent.functional.sent_bytes`."""
        found = {"heads": self.num_heads, "kv_heads": self.num_groups, "dim": self.head_dim}
        found |= {"v_dim": self.v_dim, "g_dim": self.decay_numbers}
        return {**found, "has_beta": self.has_beta, "by_element": self.by_element}

    def flops(self, *, by_state: bool = False) -> int:
        """Return the forward operations per token of a recurrence by chunks, without projections.

        Args:
            by_state: whether ranks share the sequence by scheme "state". Positions then also read
                the state that another rank sends, and a delta rule has K more columns.
        """
        dim = self.head_dim
        values = self.v_dim + by_state * self.has_beta * dim
        if self.by_element and not self.has_beta:
            # Per element of the state: 2 operations to read it by queries, 3 to add keys and values
            # and to decay it.
            each = 5 * dim * values
        else:
            each = delta_rule_flops(dim, values, has_beta=self.has_beta)
        if by_state:
            each += 2 * dim * self.v_dim
        return 2 * self.channels * self.taps + self.num_heads * each


class LayerParts(NamedTuple):
    """Parts of a layer, each 1 or 0; for many layers, the sums of these numbers.

    Attributes:
        layers: 1 for each layer.
        attention: 1 for a layer with attention.
        recurrent: 1 for a layer with a state space, a delta rule or a convolution.
        dense: 1 for a layer with a feed-forward network.
        moe: 1 for a layer with experts.
    """

    layers: Any
    attention: Any
    recurrent: Any
    dense: Any
    moe: Any


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a transformer.

    Attributes:
        num_layers: number of layers; of an encoder and a decoder together.
        model_dim: D, the elements of a token.
        num_heads: heads of attention.
        ffn_dim: F, width of an expert, and of dense layers without `dense_ffn_dim`.
        vocab_size: rows of the embedding and of the output.
        head_dim: elements of a head; None for D / num_heads.
        num_cross_layers: layers with a second attention, to the encoder.
        num_experts: E, experts of an expert layer; 0 for a dense model.
        top_k: experts of a token.
        num_moe_layers: layers with experts instead of a dense ffn.
        moe_layers: numbers of these layers, from 0; empty for the last layers.
        gated: whether the ffn of dense layers is gated.
        gated_experts: whether experts are gated.
        positions: learned positions.
        relative_positions: whether each layer has a matrix `[D, D]` of relative positions.
        num_kv_heads: heads of keys and values; None for `num_heads`.
        dense_ffn_dim: F of dense layers; None for that of experts.
        shared_ffn_dim: F of the shared expert of all tokens; 0 for none.
        tied: whether output and embedding share their weight.
        latent: (rank of queries, rank of keys and values, plain and rotary size of a head, size of
            its values) of multi-head latent attention; empty for ordinary attention. The rank of
            queries is 0 if they are not compressed.
        window: tokens that layers with a sliding window attend to.
        num_window_layers: layers with a sliding window.
        vectors: total number of elements of biases and norms, as a rule below 0.1 % of the
            parameters; 0 to leave them out.
        published: total number of parameters that the source gives.
        published_active: parameters per token, if the source gives them.
        source: source of the sizes.
        attention_gate: whether attention has a gate: as wide as its heads, or with latent attention
            one number per head.
        mixers: for each layer "attention", "recurrent", "both" side by side, or "none"; empty for
            attention in all layers.
        recurrent: sizes of the recurrence, for layers with one.
        one_part: whether a layer has a mixer alone, or a network or experts if its mixer is "none".
    """

    num_layers: int
    model_dim: int
    num_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int | None = None
    num_cross_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    num_moe_layers: int = 0
    moe_layers: tuple[int, ...] = ()
    gated: bool = False
    gated_experts: bool = False
    positions: int = 0
    relative_positions: bool = False
    num_kv_heads: int | None = None
    dense_ffn_dim: int | None = None
    shared_ffn_dim: int = 0
    tied: bool = True
    latent: tuple[int, ...] = ()
    window: int = 0
    num_window_layers: int = 0
    vectors: int = 0
    published: float = 0.0
    published_active: float | None = None
    source: str = ""
    attention_gate: bool = False
    mixers: tuple[str, ...] = ()
    recurrent: RecurrentSpec | None = None
    one_part: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=_MAY_BE_ZERO)
        for name in ("num_moe_layers", "num_cross_layers", "num_window_layers"):
            count, rule = getattr(self, name), f"at most num_layers ({self.num_layers})"
            check_rule("ModelSpec", name, count, rule, count <= self.num_layers)
        if self.head_dim is None and self.model_dim % self.num_heads:
            raise ValueError(
                f"ModelSpec: expected num_heads to divide model_dim={self.model_dim} without "
                f"head_dim, got {self.num_heads}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelSpec: expected num_kv_heads to divide num_heads={self.num_heads}, got "
                f"{self.num_kv_heads}"
            )
        rule = "five sizes, of which the first alone may be 0"
        fits = not self.latent or (len(self.latent) == 5 and all(self.latent[1:]))
        check_rule("ModelSpec", "latent", self.latent, rule, fits)
        rule = f"above 0 with {self.num_window_layers} layers that have one"
        fits = self.window > 0 or not self.num_window_layers
        check_rule("ModelSpec", "window", self.window, rule, fits)
        if bool(self.num_experts) != bool(self.num_moe_layers):
            raise ValueError(
                "ModelSpec: expected num_experts and num_moe_layers to be both zero or neither, "
                f"got {self.num_experts} and {self.num_moe_layers}"
            )
        places = {i for i in self.moe_layers if 0 <= i < self.num_layers}
        rule = f"{self.num_moe_layers} of the {self.num_layers} layers"
        fits = not self.moe_layers or len(places) == len(self.moe_layers) == self.num_moe_layers
        check_rule("ModelSpec", "moe_layers", self.moe_layers, rule, fits)
        self._check_mixers()
        rule = f"in [1, {self.num_experts}] with experts and 0 without"
        fits = min(1, self.num_experts) <= self.top_k <= self.num_experts
        check_rule("ModelSpec", "top_k", self.top_k, rule, fits)

    def _check_mixers(self) -> None:
        """Raise ValueError if mixers, recurrence, `one_part` and experts contradict each other."""
        if not isinstance(self.mixers, tuple) or len(self.mixers) not in (0, self.num_layers):
            raise ValueError(
                f"ModelSpec: expected mixers to be one of each of the {self.num_layers} layers, or "
                f"(), got {self.mixers!r:.80}"
            )
        for mixer in self.mixers:
            check_choice("ModelSpec", "mixers", mixer, MIXERS)
        if not isinstance(self.recurrent, RecurrentSpec | None) or (
            (self.recurrent is not None) != bool({"recurrent", "both"} & {*self.mixers})
        ):
            raise ValueError(
                "ModelSpec: expected recurrent to be a RecurrentSpec where mixers have one, and "
                f"None else, got {self.recurrent!r:.80}"
            )
        if self.one_part and any(p.moe and (p.attention or p.recurrent) for p in self.parts):
            raise ValueError(
                "ModelSpec: expected moe_layers to have mixers of 'none' with one_part, got "
                f"{self.moe_layers or self.num_moe_layers}"
            )

    @functools.cached_property
    def parts(self) -> tuple[LayerParts, ...]:
        """Parts of each layer."""
        first, found = self.num_layers - self.num_moe_layers, []
        places = {*(self.moe_layers or range(first, self.num_layers))}
        for i, mixer in enumerate(self.mixers or ("attention",) * self.num_layers):
            attends, recurs = mixer in ("attention", "both"), mixer in ("recurrent", "both")
            has = i in places
            dense = not has and not (self.one_part and mixer != "none")
            found.append(LayerParts(1, *map(int, (attends, recurs, dense, has))))
        return tuple(found)

    @functools.cached_property
    def kinds(self) -> tuple[LayerParts, ...]:
        """The distinct parts of layers; dense layers before layers with experts."""
        return tuple(sorted({*self.parts}, reverse=True))

    @functools.cached_property
    def all_parts(self) -> LayerParts:
        """The number of layers, and of layers with each part."""
        return LayerParts(*map(sum, zip(*self.parts, strict=True)))

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """For each layer, True if it has experts."""
        return tuple(bool(layer.moe) for layer in self.parts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return (2 + self.gated_experts) * self.model_dim * self.ffn_dim

    @property
    def heads_dim(self) -> int:
        """Width of all heads together."""
        return self.num_heads * (self.head_dim or self.model_dim // self.num_heads)

    @property
    def gate_dim(self) -> int:
        """Width of the gate of attention."""
        return self.attention_gate * (self.num_heads if self.latent else self.heads_dim)

    @property
    def kv_dim(self) -> int:
        """Numbers per token of the keys that attention keeps, and as many of values."""
        if self.latent:
            return (self.latent[1] + self.latent[3]) // 2
        return self.heads_dim // self.num_heads * (self.num_kv_heads or self.num_heads)

    @property
    def scores_dim(self) -> int:
        """Width of all heads, averaged over the products of scores and of values."""
        if self.latent:
            _, _, plain, rotary, values = self.latent
            return self.num_heads * (plain + rotary + values) // 2
        return self.heads_dim

    def mean_keys(self, seq_len: int) -> float:
        """Return the keys that a token attends to, averaged over layers and positions."""
        seen = min(self.window, seq_len)
        share = self.num_window_layers / max(1, self.all_parts.attention)
        return share * seen * (1 - seen / (2 * seq_len)) + (1 - share) * seq_len / 2

    def attention_parameters(self) -> int:
        """Return the parameters of one attention."""
        dim = self.model_dim
        if not self.latent:
            return dim * (2 * self.heads_dim + self.gate_dim + 2 * self.kv_dim)
        queries, keys, plain, rotary, values = self.latent
        heads = self.num_heads
        # Without a rank (0), queries are projected from the hidden states directly.
        return (
            dim * (queries + keys + rotary + self.gate_dim)
            + heads * ((queries or dim) * (plain + rotary) + keys * (plain + values))
            + heads * values * dim
        )

    def dense_layer_ffn(self) -> int:
        """Return the parameters of the ffn of a dense layer."""
        return (2 + self.gated) * self.model_dim * (self.dense_ffn_dim or self.ffn_dim)

    def shared_parameters(self) -> int:
        """Return the parameters of a layer's router and shared expert."""
        shared = (2 + self.gated_experts) * self.model_dim * self.shared_ffn_dim
        return self.model_dim * self.num_experts + shared

    def dense_parameters(self) -> int:
        """Return all parameters except experts: attention, dense ffn, routers, embeddings."""
        dim, parts = self.model_dim, self.all_parts
        attention = self.attention_parameters() * (parts.attention + self.num_cross_layers)
        recurrent = self.recurrent.parameters() * parts.recurrent if self.recurrent else 0
        relative = dim * dim * self.num_layers if self.relative_positions else 0
        ffn = self.dense_layer_ffn() * parts.dense
        beside = self.shared_parameters() * self.num_moe_layers
        vocabulary = self.vocab_size * (1 if self.tied else 2) + self.positions
        layers = attention + recurrent + relative + ffn + beside
        return layers + dim * vocabulary + self.vectors

    def parameters(self) -> int:
        """Return the total number of parameters."""
        experts = self.num_experts * self.num_moe_layers
        return self.dense_parameters() + experts * self.expert_parameters

    def active_parameters(self) -> int:
        """Return the parameters that one token meets: all dense parameters, and its experts."""
        experts = self.top_k * self.num_moe_layers
        return self.dense_parameters() + experts * self.expert_parameters


_GATED: dict[str, Any] = {"gated": True, "gated_experts": True, "tied": False}
_LLAMA_3 = {**_GATED, "num_kv_heads": 8}
_LLAMA_3["source"] = "Grattafiori et al. 2024 (arXiv 2407.21783), table 3"
_QWEN3 = {**_GATED, "head_dim": 128, "num_kv_heads": 4, "num_experts": 128, "top_k": 8}
_QWEN3["source"] = "Yang et al. 2025 (arXiv 2505.09388), table 2"

PRESETS = {
    "gpt3": ModelSpec(
        *(96, 12288, 96, 4 * 12288, 50257),
        positions=2048,
        published=175e9,
        source="Brown et al. 2020 (arXiv 2005.14165), table 2.1",
    ),
    "gopher": ModelSpec(
        *(80, 16384, 128, 4 * 16384, 32000),
        relative_positions=True,
        published=280e9,
        source="Rae et al. 2021 (arXiv 2112.11446), table 1; positions of Transformer-XL",
    ),
    "pangu-alpha": ModelSpec(
        *(64, 16384, 128, 4 * 16384, 40000),
        positions=1024,
        published=207e9,
        source="Zeng et al. 2021 (arXiv 2104.12369), table 1",
    ),
    "jurassic-1": ModelSpec(
        *(76, 13824, 96, 4 * 13824, 256000),
        positions=2048,
        published=178e9,
        source="Lieber et al. 2021, Jurassic-1: technical details and evaluation, table 1",
    ),
    "yuan-1.0": ModelSpec(
        *(76, 16384, 128, 4 * 16384, 53228),
        positions=2048,
        published=245.7e9,
        source="Wu et al. 2021 (arXiv 2110.04725), table 1",
    ),
    "ernie-3.0-titan": ModelSpec(
        *(48, 12288, 192, 16 * 12288, 50000),
        positions=512,
        published=260e9,
        source="Wang et al. 2021 (arXiv 2112.12731), section 4: the universal module, without the "
        "small one of tasks",
    ),
    "glam": ModelSpec(
        *(64, 8192, 128, 32768, 256000),
        head_dim=128,
        num_experts=64,
        top_k=2,
        num_moe_layers=32,
        moe_layers=tuple(range(1, 64, 2)),
        gated=True,
        published=1.162e12,
        published_active=96.6e9,
        source="Du et al. 2021 (arXiv 2112.06905), table 4, 64B/64E",
    ),
    "m6-10t": ModelSpec(
        *(48, 1024, 16, 9984, 21128),
        num_experts=10240,
        top_k=80,
        num_moe_layers=48,
        published=10e12,
        source="Lin et al. 2021 (arXiv 2110.03888): one expert of each of 80 prototypes",
    ),
    "t5-11b": ModelSpec(
        *(48, 1024, 128, 65536, 32128),
        head_dim=128,
        num_cross_layers=24,
        published=11e9,
        source="Raffel et al. 2019 (arXiv 1910.10683), section 3.7",
    ),
    "mixtral-8x7b": ModelSpec(
        *(32, 4096, 32, 14336, 32000),
        **_GATED,
        num_kv_heads=8,
        num_experts=8,
        top_k=2,
        num_moe_layers=32,
        published=46.7e9,
        published_active=12.9e9,
        source="Jiang et al. 2024 (arXiv 2401.04088), table 1",
    ),
    "llama-3-8b": ModelSpec(*(32, 4096, 32, 14336, 128256), **_LLAMA_3, published=8.03e9),
    "llama-3-70b": ModelSpec(*(80, 8192, 64, 28672, 128256), **_LLAMA_3, published=70.6e9),
    "llama-3.1-405b": ModelSpec(*(126, 16384, 128, 53248, 128256), **_LLAMA_3, published=405e9),
    "qwen3-30b": ModelSpec(
        *(48, 2048, 32, 768, 151936), **_QWEN3, num_moe_layers=48, published=30.5e9
    ),
    "qwen3-235b": ModelSpec(
        *(94, 4096, 64, 1536, 151936),
        **_QWEN3,
        num_moe_layers=94,
        published=235e9,
        published_active=22e9,
    ),
    "deepseek-v3": ModelSpec(
        *(61, 7168, 128, 2048, 129280),
        **_GATED,
        num_experts=256,
        top_k=8,
        num_moe_layers=58,
        dense_ffn_dim=18432,
        shared_ffn_dim=2048,
        latent=(1536, 512, 128, 64, 128),
        published=671e9,
        published_active=37e9,
        source="DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; without multi-token prediction",
    ),
    "kimi-k2": ModelSpec(
        *(61, 7168, 64, 2048, 163840),
        **_GATED,
        num_experts=384,
        top_k=8,
        num_moe_layers=60,
        dense_ffn_dim=18432,
        shared_ffn_dim=2048,
        latent=(1536, 512, 128, 64, 128),
        published=1.04e12,
        published_active=32.6e9,
        source="Kimi Team 2025 (arXiv 2507.20534), table 2",
    ),
    "gpt-oss-120b": ModelSpec(
        *(36, 2880, 64, 2880, 201088),
        **_GATED,
        head_dim=64,
        num_kv_heads=8,
        num_experts=128,
        top_k=4,
        num_moe_layers=36,
        window=128,
        num_window_layers=18,
        published=116.8e9,
        source="OpenAI 2025 (arXiv 2508.10925), table 1; 5.13B active, without the embedding",
    ),
}
_UNPUBLISHED = {"wudao-2.0": "1.75T parameters were announced without layers, width or experts"}


def preset(name: str) -> ModelSpec:
    """Return the specification of a published model.

    Raises:
        ValueError: no such model is known, or its sizes were never published.
    """
    if name in _UNPUBLISHED:
        raise ValueError(
            f"preset: expected name to be of published sizes, got {name!r}: {_UNPUBLISHED[name]}"
        )
    if name not in PRESETS:
        raise ValueError(f"preset: expected name to be one of {sorted(PRESETS)}, got {name!r}")
    return PRESETS[name]
