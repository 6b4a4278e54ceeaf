"""Hash router: the experts of a token depend only on its vocabulary entry.

Shapes: T tokens, D model, E experts, K top-k, V vocabulary.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers, check_rule
from moe_ext.nn.routers.base import RouterOutput, ScoreRouter, Tokens, renormalizes
from moe_ext.nn.routers.topk import SCORE_FNS

_METHODS = ("balanced", "random")


class HashRouter(ScoreRouter):
    """K fixed experts for each entry of the vocabulary, with weights of 1/K or learned weights.

    The experts of an entry are a row of the table `expert_of_id` [V, K], made from `seed`:

    - "balanced" without `token_counts`: in each column, the numbers of entries of two experts
      differ by at most one; the order is random;
    - "balanced" with `token_counts`: each entry, from the most to the least frequent, gets the K
      experts with the fewest tokens so far; this is the paper's Balanced assignment;
    - "random": K different experts are drawn uniformly for each entry.

    Without `vocab_size` there is no table, and "random" mixes the bits of the id instead.

    The layer needs `token_ids`: `MoELayer.forward(x, token_ids=ids)`. The choice is not learned, so
    a layer adds no balance loss. With `learned`, the weights of the chosen experts are those of a
    `TopKRouter` with `logits = x @ weight.T`, as in the first layers of DeepSeek-V4.

    Args:
        model_dim: D, number of elements of a token.
        num_experts: E, number of experts over all ranks.
        top_k: K, number of experts per token, at most E.
        vocab_size: V; None allows any integer as an id, with method "random".
        method: "balanced" or "random".
        token_counts: `[V]`, number of occurrences of each entry in the training data, for
            "balanced".
        seed: seed of the table.
        learned: learn the weights of the experts.
        score_fn: score function of learned weights, see `ops.topk_gate`.
        renormalize: divide the K learned weights by their sum; None does so for K > 1.
        scale: finite factor on the weights.
        device: device of the table and of the weight.
        dtype: dtype of the weight.

    Raises:
        ValueError: a size or an option is out of its range, or options cannot be combined.

    Determinism: a seed gives the same experts on every rank and device, and in versions of torch
    with the same random generator. The table is part of the state dict. No host synchronisation.

    Reference: Roller et al., Hash Layers, 2021 (arXiv 2106.04426), section 3; DeepSeek-V4 in
    transformers (`DeepseekV4HashRouter`) for learned weights.
    """

    fills_slots = True
    balanced = True
    expert_of_id: Tensor | None
    weight: nn.Parameter | None

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        *,
        top_k: int = 1,
        vocab_size: int | None = None,
        method: str = "balanced",
        token_counts: Tensor | None = None,
        seed: int = 0,
        learned: bool = False,
        score_fn: str = "softmax",
        renormalize: bool | None = None,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_numbers("HashRouter", HashRouter.__init__.__annotations__, locals())
        if not learned and (score_fn != "softmax" or renormalize is not None):
            raise ValueError(
                "HashRouter: expected score_fn and renormalize to be left out without learned=True,"
                f" got {score_fn!r} and {renormalize}"
            )
        check_choice("HashRouter", "score_fn", score_fn, SCORE_FNS)
        super().__init__(
            model_dim,
            num_experts,
            top_k,
            score_fn=score_fn,
            renormalize=renormalizes("HashRouter", renormalize, top_k) if learned else True,
            scale=scale,
        )
        check_choice("HashRouter", "method", method, _METHODS)
        if vocab_size is None and method == "balanced":
            raise ValueError(
                "HashRouter: expected vocab_size to be given with method 'balanced', got None"
            )
        fits = vocab_size is None or vocab_size >= 1
        check_rule("HashRouter", "vocab_size", vocab_size, "at least 1", fits)
        check_rule("HashRouter", "seed", seed, "in 0..2**63-1", 0 <= seed < 2**63)
        if token_counts is not None and (
            method != "balanced" or token_counts.shape != (vocab_size,)
        ):
            raise ValueError(
                "HashRouter: expected token_counts to be of shape [vocab_size] and method to be "
                f"'balanced', got {tuple(token_counts.shape)} and {method!r}"
            )
        self.vocab_size = vocab_size
        self.method = method
        self.seed = int(seed)
        self.token_counts = None if token_counts is None else token_counts.detach().cpu().tolist()
        self.learned = learned
        table = None
        if vocab_size is not None:
            table = torch.empty((vocab_size, top_k), dtype=torch.int64, device=device)
        self.register_buffer("expert_of_id", table)
        self.weight = None
        if learned:
            self.weight = nn.Parameter(
                torch.empty(num_experts, model_dim, device=device, dtype=dtype)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the same table again, and draw the weight uniformly in +-1/sqrt(D)."""
        if self.weight is not None:
            bound = 1.0 / math.sqrt(self.model_dim)
            nn.init.uniform_(self.weight, -bound, bound)
        if self.expert_of_id is None or self.vocab_size is None or self.expert_of_id.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        if self.method == "random":
            rows_VE = _drawn_orders(self.vocab_size, self.num_experts, generator)
            table_VK = rows_VE[:, : self.top_k]
        elif self.token_counts is not None:
            table_VK = _greedy_table(self.token_counts, self.num_experts, self.top_k)
        else:
            table_VK = _even_table(self.vocab_size, self.num_experts, self.top_k, generator)
        self.expert_of_id.copy_(table_VK)

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        return (
            f"num_experts={self.num_experts}, top_k={self.top_k}, vocab_size={self.vocab_size}, "
            f"method={self.method!r}, seed={self.seed}"
            + (f", learned, score_fn={self.score_fn!r}" if self.weight is not None else "")
        )

    def logits(self, tokens: Tokens) -> Tensor:
        """Return `x @ weight.T`; without a weight, zeros, which give all experts equal weights."""
        x_TD = tokens.x_TD
        if self.weight is not None:
            return ops.router_logits(x_TD, self.weight)
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        return torch.zeros((x_TD.shape[0], self.num_experts), dtype=dtype, device=x_TD.device)

    def choose(self, logits_TE: Tensor, tokens: Tokens) -> RouterOutput:
        """Look up the experts of every token.

        Raises:
            ValueError: token_ids is missing or not of shape [T].
            TypeError: token_ids is not int64.
            IndexError: on CPU, an id is outside of the vocabulary.
        """
        num_tokens, ids_T, mask_T = tokens.x_TD.shape[0], tokens.ids_T, tokens.mask_T
        if ids_T is None:
            raise ValueError(
                "HashRouter: expected token_ids [T] to be given (MoELayer.forward takes them), got "
                "None"
            )
        if ids_T.dtype != torch.int64:
            raise TypeError(f"HashRouter: expected token_ids to be int64, got {ids_T.dtype}")
        if ids_T.shape != (num_tokens,):
            raise ValueError(
                f"HashRouter: expected token_ids to be of shape [{num_tokens}], got "
                f"{tuple(ids_T.shape)}"
            )
        if mask_T is not None:
            # A masked token may have any id, even one outside of the table.
            ids_T = ids_T.where(mask_T, 0)
        if self.expert_of_id is not None:
            try:
                idx_TK = self.expert_of_id.index_select(0, ids_T)
            except IndexError:
                outside_T = (ids_T < 0) | (ids_T >= self.expert_of_id.shape[0])
                token = int(outside_T.nonzero()[0])
                raise IndexError(
                    f"HashRouter: expected token_ids to be in [0, {self.vocab_size}), the "
                    f"vocabulary, got {int(ids_T[token])} at token {token}"
                ) from None
        else:
            idx_TK = _mixed_experts(ids_T, self.num_experts, self.top_k, self.seed)
        if mask_T is not None:
            idx_TK = idx_TK.where(mask_T[:, None], -1)
        return RouterOutput(logits_TE, self.gate_weights(logits_TE, idx_TK))


def _drawn_orders(num_rows: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Return rows that each hold all experts in a random order."""
    shape = num_rows, num_experts
    draws = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    return draws.argsort(dim=1)


def _even_table(
    vocab_size: int, num_experts: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """Cut the entries in random order into blocks of E; a column of a block is a permutation."""
    place_V = torch.randperm(vocab_size, generator=generator, device="cpu")
    num_blocks = -(-vocab_size // num_experts)
    # Each column of a block rotates the experts by another amount, so the K experts of an entry
    # differ.
    rotation_BE = _drawn_orders(num_blocks, num_experts, generator)
    rotation_VK = rotation_BE[place_V // num_experts, :top_k]
    return (place_V[:, None] + rotation_VK) % num_experts


def _greedy_table(counts: list[float], num_experts: int, top_k: int) -> Tensor:
    """Give each entry, the most frequent first, the K experts with the fewest tokens so far."""
    table = torch.empty(len(counts), top_k, dtype=torch.int64, device="cpu")
    load: list[tuple[float, int]] = [(0.0, e) for e in range(num_experts)]
    for token_id in sorted(range(len(counts)), key=lambda i: -counts[i]):
        chosen = [heapq.heappop(load) for _ in range(top_k)]
        table[token_id] = table.new_tensor([e for _, e in chosen])
        for tokens, expert in chosen:
            heapq.heappush(load, (tokens + counts[token_id], expert))
    return table


def _mixed_experts(ids_T: Tensor, num_experts: int, top_k: int, seed: int) -> Tensor:
    """Derive K different experts from the bits of an id, mixed by the finaliser of SplitMix64."""
    bits_T = ids_T + (seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**63
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits_T = (bits_T ^ _shifted(bits_T, shift)) * factor
    bits_T = _shifted(bits_T ^ _shifted(bits_T, 31), 1)
    # The K experts begin at `first_T` and have a distance of `stride_T`. The stride is at most
    # E // K, so no expert repeats.
    column_K = torch.arange(top_k, device=ids_T.device)
    first_T = bits_T % num_experts
    stride_T = bits_T // num_experts % max(1, num_experts // top_k) + 1
    return (first_T[:, None] + column_K * stride_T[:, None]) % num_experts


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift the bits to the right as those of an unsigned number."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
