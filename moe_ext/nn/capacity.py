"""Capacity: number of rows that an expert takes, choice of their slots, and overflow.

Shapes: T tokens, D model, E experts, K top-k, N rows, C rows of an expert, L local experts.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers, check_rule, check_sizes
from moe_ext.dispatch import Choice
from moe_ext.nn.combinations import SETS_ROWS, refusal
from moe_ext.nn.routers import Router, RouterOutput

DROP_POLICIES = ("position", "score", "random", "batch_prioritized", "choice")
OVERFLOWS = ("drop", "reroute")
_MOST_GROUPS = 1 << 20
# Stream of the draws that order the slots of the "random" policy.
_DROP_STREAM = 3


@dataclass(frozen=True)
class Capacity:
    """Limit on the rows of an expert: `ceil(factor * T' * K / E)` from each group of T' tokens.

    Attributes:
        factor: positive; 1.0 has room for an even load and no more.
        minimum: least number of rows that an expert takes from each group.
        groups: number of groups into which the T tokens of a rank are cut. Each has `T' = ceil(T /
            groups)` consecutive tokens, and an expert takes its capacity from every group.
        drop: which slots of an overfull expert are dropped. "position" drops those of the last
            tokens. "choice" serves every token's first choice before any second, and by position
            within a choice (GShard). "batch_prioritized" is "choice" with tokens in the order of
            their largest chosen score, before renormalisation (V-MoE). "score" drops the slots of
            the smallest weights. "random" draws slots, anew at each step of `set_routing_step`; in
            eval mode it is "position".
        overflow: "drop" leaves such a slot without an expert. "reroute" sends it to the token's
            next best expert that has room, and drops it if there is none.
        pad: give every expert exactly its capacity of rows, filled with zero rows, for experts that
            need equal shapes.
        eval_factor: factor in eval mode; None keeps `factor`.
        seed: seed of "random", if the router draws no random numbers itself.

    Raises:
        ValueError: a value is out of its range.
    """

    factor: float
    _: KW_ONLY
    minimum: int = 1
    groups: int = 1
    drop: str = "position"
    overflow: str = "drop"
    pad: bool = False
    eval_factor: float | None = None
    seed: int = 0
    _ratios: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers("Capacity", Capacity.__annotations__, vars(self))
        for name in ("factor", "eval_factor"):
            value = getattr(self, name)
            if not (name == "eval_factor" and value is None):
                check_rule("Capacity", name, value, "positive", 0 < value < math.inf)
        fits, rule = self.groups <= _MOST_GROUPS, f"at most {_MOST_GROUPS}"
        check_rule("Capacity", "groups", self.groups, rule, fits)
        check_sizes("Capacity", minimum=self.minimum, groups=self.groups)
        for name, known in (("drop", DROP_POLICIES), ("overflow", OVERFLOWS)):
            check_choice("Capacity", name, getattr(self, name), known)

        # Ratios for eval mode and for training. Integers make `rows_per_group` exact, and symbolic
        # if the number of tokens is.
        factors = (self.factor if self.eval_factor is None else self.eval_factor, self.factor)
        ratios = [Fraction(float(factor)).limit_denominator(1 << 20) for factor in factors]
        object.__setattr__(self, "_ratios", tuple(r.as_integer_ratio() for r in ratios))

    def rows_per_group(
        self, num_tokens: int, top_k: int, num_experts: int, *, training: bool = True
    ) -> int:
        """Return the number of rows that an expert takes from each group of tokens."""
        numerator, denominator = self._ratios[int(training)]
        group_tokens = -(-num_tokens // self.groups)
        rows = -(-group_tokens * top_k * numerator // (denominator * num_experts))
        return torch.sym_max(rows, self.minimum)


def limit_choice(
    capacity: Capacity | None,
    router: nn.Module,
    routed: RouterOutput,
    top_k: int,
    token_idx_T: Tensor | None,
    *,
    training: bool,
    filled: bool = False,
) -> Choice:
    """Limit a router's choice to the capacity: drop or reroute slots beyond it.

    Args:
        capacity: capacity of the layer. None changes no slot, and takes a limit of the router.
        router: router of the layer.
        routed: output of the router.
        top_k: K of the layer.
        token_idx_T: index of each token in the global batch, for random draws.
        training: draw random numbers if `drop` is "random".
        filled: whether the host knows that no slot of the router is -1.
    """
    gate = routed.gate
    if gate.topk_weights.shape != gate.topk_idx.shape:
        raise ValueError(
            "MoELayer: expected topk_weights of the router to be of the shape of topk_idx, "
            f"{tuple(gate.topk_idx.shape)}, got {tuple(gate.topk_weights.shape)}"
        )
    if capacity is None:
        filled = filled and routed.capacity is None
        return Choice(gate.topk_idx, gate.topk_weights, routed.capacity, None, filled)
    if routed.capacity is not None:
        raise refusal("MoELayer", "capacity", SETS_ROWS, {"capacity": capacity})
    num_tokens, num_experts = routed.logits.shape
    rows = capacity.rows_per_group(num_tokens, top_k, num_experts, training=training)
    topk_idx, topk_weights, policy = gate.topk_idx, gate.topk_weights, capacity.drop
    # In eval mode the output must not depend on the step.
    policy = "position" if policy == "random" and not training else policy
    keys = None if policy in ("position", "choice") else topk_weights.detach()
    if policy == "batch_prioritized" and routed.score_fn is not None:
        # Keys are the scores of the chosen experts, neither renormalised nor scaled. Before the
        # choice, "topk_softmax" has the scores of "softmax", over all experts.
        score_fn = routed.score_fn.removeprefix("topk_")
        keys = ops.gate_weights(
            routed.logits.detach(), topk_idx, score_fn=score_fn, renormalize=False
        ).topk_weights
    if policy == "random":
        # Every slot gets a draw that depends only on seed, layer, step and token.
        assert isinstance(router, Router) and router.rng_state is not None
        keys = ops.routing_uniform(
            router.rng_state, *topk_idx.shape, stream=_DROP_STREAM, token_idx=token_idx_T
        )
    ranked = _ranked_experts(router, routed) if capacity.overflow == "reroute" else None
    if capacity.groups > 1:
        # The last group is padded to the size of the others, with tokens that choose no expert.
        end = (0, 0, 0, -num_tokens % capacity.groups)
        topk_idx = functional.pad(topk_idx, end, value=-1)
        keys = None if keys is None else functional.pad(keys, end)
        ranked = None if ranked is None else functional.pad(ranked, end, value=-1)
    topk_idx, num_dropped = ops.limit_capacity(
        topk_idx,
        num_experts,
        rows,
        topk_weights=keys,
        policy=policy,
        priority=keys,
        num_groups=capacity.groups,
        ranked_idx=ranked,
        overflow=capacity.overflow,
    )
    if capacity.groups > 1:
        topk_idx = topk_idx[:num_tokens]
    if ranked is not None:
        assert isinstance(router, Router)
        topk_weights = router.with_choice(routed, topk_idx).gate.topk_weights
    return Choice(topk_idx, topk_weights, rows * capacity.groups, num_dropped)


def _ranked_experts(router: nn.Module, routed: RouterOutput) -> Tensor:
    """Return the experts that a token may choose, best first, `[T, E]`, then -1."""
    logits_TE = routed.logits.detach()
    key_TE, score_fn = logits_TE, routed.score_fn
    bias = getattr(router, "selection_bias", None)
    num_groups, top_groups = getattr(router, "num_groups", 1), getattr(router, "top_groups", 1)
    limited = top_groups < num_groups
    terms = _terms_of_group(router) if limited else 1
    # Scores order experts as logits do, so logits are enough in general. A selection bias is added
    # to scores, though, and the key of a group is a sum of scores.
    if bias is not None or terms > 1:
        if score_fn == "sigmoid":
            key_TE = key_TE.sigmoid()
        elif score_fn == "sqrtsoftplus":
            key_TE = functional.softplus(key_TE).sqrt()
        else:
            key_TE = key_TE.softmax(1)
    if bias is not None:
        key_TE = key_TE + bias
    key_TE = key_TE.where(logits_TE > -math.inf, -math.inf)
    if limited:
        key_TE = _in_groups(key_TE, routed.gate.topk_idx, num_groups, top_groups, terms)
    # Without a bias the order is that of logits, which differ even if scores underflow or saturate.
    order_TE = key_TE if bias is not None else logits_TE.where(key_TE > -math.inf, -math.inf)
    ranked_TE = order_TE.argsort(dim=1, descending=True, stable=True)
    return ranked_TE.where(key_TE.gather(1, ranked_TE) > -math.inf, -1)


def _terms_of_group(router: nn.Module) -> int:
    """Return the number of largest keys whose sum is the score of a group of experts."""
    bias, group_score = getattr(router, "selection_bias", None), router.group_score
    if group_score == "topk":
        return router.top_k // router.top_groups  # type: ignore[operator, return-value]
    return 2 if group_score == "top2" or (group_score is None and bias is not None) else 1


def _in_groups(
    key_TE: Tensor, topk_idx_TK: Tensor, num_groups: int, top_groups: int, terms: int
) -> Tensor:
    """Return the keys with -inf for experts outside of a token's groups."""
    key_TGS = key_TE.unflatten(1, (num_groups, -1))
    best_TGN = key_TGS.topk(min(terms, key_TGS.shape[2]), dim=2).values
    best_TGN[:, :, 1:].masked_fill_(best_TGN[:, :, 1:] == -math.inf, 0)
    group_TG = best_TGN.sum(dim=2)
    # Groups with a chosen expert rank first. The sums may be rounded differently from those of the
    # gate, and could otherwise give the token a further group.
    size = key_TGS.shape[2]
    chosen_TK = topk_idx_TK.div(size, rounding_mode="floor").where(topk_idx_TK >= 0, num_groups)
    held_TG = functional.pad(torch.zeros_like(group_TG), (0, 1)).scatter(1, chosen_TK, 1.0)
    group_TG = group_TG.masked_fill(held_TG[:, :num_groups] > 0, math.inf)
    first_TG = group_TG.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
    kept_TG = torch.zeros_like(group_TG).scatter(1, first_TG, 1.0) > 0
    return key_TGS.masked_fill(~kept_TG[:, :, None], -math.inf).flatten(1)


def run_padded(experts: nn.Module, rows_ND: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Run experts on exactly C rows each, padded with zeros; return the results of `rows_ND`.

    Args:
        experts: maps `([L * C, D], offsets)` to `[L * C, D]`.
        rows_ND: rows grouped by expert, at most C each.
        offsets: `[L + 1]`.
        capacity: C, rows of an expert.
    """
    num_rows, num_experts = rows_ND.shape[0], offsets.shape[0] - 1
    place_LC = torch.arange(capacity, device=offsets.device).expand(num_experts, -1)
    row_LC = (offsets[:-1, None] + place_LC).where(place_LC < offsets.diff()[:, None], -1)
    row_of_place = row_LC.reshape(-1)
    place_of_row = row_of_place.new_full((num_rows + 1,), -1)
    # Places without a row have index -1. They write to the extra last entry, which is cut off.
    place_of_row[row_of_place] = torch.arange(row_of_place.shape[0], device=offsets.device)
    place_of_row = place_of_row[:-1]
    padded = _moved_rows(rows_ND, place_of_row, row_of_place)
    even = torch.arange(num_experts + 1, device=offsets.device) * capacity
    return _moved_rows(experts(padded, even), row_of_place, place_of_row)


def _moved_rows(rows: Tensor, to: Tensor, origin: Tensor) -> Tensor:
    """Return rows in another order: `out[i] = rows[origin[i]]`, or zero if `origin[i]` is -1."""
    counts = origin.new_zeros(())
    permutation = ops.Permutation(to, origin, counts, counts, counts, 1)
    return ops.unpermute_tokens(rows, permutation)
