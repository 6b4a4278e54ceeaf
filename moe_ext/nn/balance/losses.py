"""The losses of a layer: the tokens that they count, their terms, their way to the backward pass.

Shapes: T tokens, E experts, K top-k, B sequences, S positions of a sequence on this rank,
    N documents.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import _runtime_library, ops
from moe_ext._checks import check_choice, check_kind, check_real, check_rule
from moe_ext._compile import outside_graphs
from moe_ext.attention.masks import Offsets, check_cu_seqlens, check_end, rows_of_offsets
from moe_ext.attention.sharding import document_ids as ids_of_documents
from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import check_group, group_size
from moe_ext.nn.balance.counts import StepCounts
from moe_ext.nn.routers import BalanceTerms, RouterOutput
from moe_ext.ops.autograd import is_transformed, transforms

if TYPE_CHECKING:
    from moe_ext.attention.context import SharedSequences

SCOPES = ("micro_batch", "sequence", "global_batch")
LOSS_MODES = ("inject", "return", "both")

# Name to (coefficient, loss in the graph).
LossTerms = dict[str, tuple[float, Tensor]]


@dataclass(frozen=True)
class Balance:
    """The losses of a layer: over which tokens the balance loss counts, factors, and their way.

    Attributes:
        scope: "micro_batch", the tokens of one forward pass on this rank; "sequence", each sequence
            of `x[..., S, D]` alone, or each of the packed documents in it that the layer is told
            of, averaged over those that have a real token; "global_batch", the tokens of a whole
            step: the share of each expert is that over all ranks of `group` and all micro-batches
            of the step, the mean score that of this pass.
        group: of "global_batch": the ranks whose tokens count, every one that sees data of its own;
            of "sequence": the ranks that share each sequence (`cp_group`). None for this rank
            alone, or for the group of an `attention.sequence_parallel` around the layer.
        coef: factor on `ops.load_balance_loss`; None is that of the layer, 0.01 if its preset has
            no other. A router that is balanced by construction gets no balance loss.
        z_coef: factor on `ops.router_z_loss`.
        mode: "inject" adds the losses' gradients in the backward pass of the output; "return"
            leaves them to the caller, in the graph, in `losses` (see `collect_losses`); "both" does
            both, for a caller who looks at them without adding them.

    Raises:
        ValueError: scope or mode is unknown, a factor is negative, or the scope has no use for a
            group.
        TypeError: the group is none of this rank, or a factor is no number.
    """

    scope: str = "micro_batch"
    group: ProcessGroup | None = None
    _: KW_ONLY
    coef: float | None = None
    z_coef: float = 0.0
    mode: str = "inject"

    def __post_init__(self) -> None:
        """Refuse what is not allowed."""
        check_choice("Balance", "scope", self.scope, SCOPES)
        check_choice("Balance", "mode", self.mode, LOSS_MODES)
        for name in ("coef", "z_coef"):
            value = getattr(self, name)
            if name == "coef" and value is None:
                continue
            check_real("Balance", name, value)
            check_rule("Balance", name, value, "at least 0", 0 <= value < math.inf)
        check_group(self.group, "Balance", name="group")
        fits = self.group is None or self.scope != "micro_batch"
        check_rule("Balance", "group", self.group, f"None for scope={self.scope!r}", fits)

    def __deepcopy__(self, memo: dict[int, Any]) -> Balance:
        return self

    @classmethod
    def of(cls, owner: str, value: Balance | str | float | None, coef: float = 0.01) -> Balance:
        """The losses that are meant: a text is a scope, a number the factor of the balance loss.

        Args:
            owner: name for error messages.
            value: of the layer.
            coef: where it says none.
        """
        if isinstance(value, str):
            check_choice(owner, "balance", value, SCOPES)
            value = cls(value)
        elif isinstance(value, Real) and not isinstance(value, bool):
            value = cls(coef=float(value))
        check_kind(owner, "balance", value, cls)
        found = value if isinstance(value, Balance) else cls()
        return found if found.coef is not None else replace(found, coef=coef)


def step_counts_for(
    balance: Balance, num_experts: int, device: torch.device | str | None
) -> StepCounts | None:
    """Counts of the tokens of a step, where the losses are over them."""
    is_global = balance.scope == "global_batch"
    return StepCounts(num_experts, balance.group, device) if is_global else None


class Documents(NamedTuple):
    """Sequences of a balance loss that are no equal runs of this rank's tokens.

    Attributes:
        document_T: `[T]` int64, number of the sequence of each token, the same on all ranks.
        num_documents: N, sequences and documents without a token included.
        group: the ranks that share them; None for this rank alone.
    """

    document_T: Tensor
    num_documents: int
    group: ProcessGroup | None


def find_documents(
    balance: Balance,
    x: Tensor,
    document_ids: Tensor | None,
    cu_seqlens: Offsets | None,
    token_mask: Tensor | None,
    problem: Exception | None,
) -> Documents | None:
    """The documents of a pass; None where every sequence is one, and on this rank alone.

    Ranks that share sequences compare in one message what they were given.

    Args:
        balance: of the layer, by sequence.
        x: tokens `[..., S, D]`.
        document_ids: `[..., S]` or `[S]`.
        cu_seqlens: offsets in the sequences of this rank.
        token_mask: `[..., S]`.
        problem: what else is wrong on this rank.
    """
    # Not at the top: the schemes of attention come with it.
    from moe_ext.attention.context import shared_sequences

    shared = shared_sequences()
    told = document_ids is not None or cu_seqlens is not None
    if not told and shared is None and group_size(balance.group) == 1:
        if problem is not None:
            raise problem
        return None
    return _agreed_documents(balance, x, document_ids, cu_seqlens, token_mask, problem, shared)


@outside_graphs
def _agreed_documents(
    balance: Balance,
    x: Tensor,
    document_ids: Tensor | None,
    cu_seqlens: Offsets | None,
    token_mask: Tensor | None,
    problem: Exception | None,
    shared: SharedSequences | None,
) -> Documents | None:
    group = balance.group
    if group is None and shared is not None:
        group = shared.group
    num_sequences = math.prod(x.shape[:-2])
    ids_BS, num_documents = x.new_zeros(x.shape[:-1], dtype=torch.int64), 1
    with Agreement("Balance", group) as agreement:
        if problem is not None:
            raise problem
        if document_ids is None and shared is not None and cu_seqlens is None:
            if shared.cu_seqlens is not None:
                document_ids = ids_of_documents(
                    shared.cu_seqlens, group=shared.group, layout=shared.layout, device=x.device
                )
        elif cu_seqlens is not None:
            document_ids = _ids_of_offsets(cu_seqlens, document_ids, group, x)
        if document_ids is not None:
            ids_BS, num_documents = _numbered(document_ids, x, token_mask)
        facts = {"the number of sequences": num_sequences}
        found = agreement.compare(facts, values=(num_documents,))
    num_documents = max(numbers[0] for numbers in found)
    first_B = torch.arange(num_sequences, device=x.device) * num_documents
    # Without sequences their length cannot follow from the number of tokens.
    length = x.shape[-2] if x.dim() > 1 else 1
    document_T = (first_B[:, None] + ids_BS.reshape(num_sequences, length)).reshape(-1)
    return Documents(document_T, num_sequences * num_documents, group)


def _ids_of_offsets(
    cu_seqlens: Offsets,
    document_ids: Tensor | None,
    group: ProcessGroup | None,
    x: Tensor,
) -> Tensor:
    """Documents by offsets in sequences that this rank holds whole."""
    op = "MoELayer"
    if document_ids is not None:
        raise ValueError(f"{op}: expected document_ids or cu_seqlens to be None, got both")
    if group_size(group) > 1:
        raise ValueError(
            f"{op}: expected document_ids (moe_ext.attention.document_ids) in the place of "
            f"cu_seqlens where ranks share sequences, got cu_seqlens and {group_size(group)} ranks"
        )
    rows, num_sequences = rows_of_offsets(cu_seqlens, op), math.prod(x.shape[:-2])
    if rows is not None and len(rows) != num_sequences:
        raise ValueError(
            f"{op}: expected cu_seqlens to be a row of offsets, or one for each of the "
            f"{num_sequences} sequences, got {len(rows)}"
        )
    for row in rows or [check_cu_seqlens(cu_seqlens, op)]:
        check_end(row, x.shape[-2] if x.dim() > 1 else 1, op)
    ids = ids_of_documents(cu_seqlens, group=None, device=x.device)
    return ids if rows is None else ids.view(x.shape[:-1])


def _numbered(document_ids: Tensor, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, int]:
    """Numbers of the documents, of the shape of the tokens, and how many there may be."""
    wanted = x.shape[:-1]
    # A TypeError or a ValueError of the layer is raised by every rank of the group.
    check_kind("MoELayer", "document_ids", document_ids, Tensor)
    if document_ids.dtype != torch.int64:
        raise TypeError(f"MoELayer: expected document_ids to be int64, got {document_ids.dtype}")
    if document_ids.shape not in (wanted, wanted[-1:]):
        raise ValueError(
            f"MoELayer: expected document_ids to be of shape {tuple(wanted)}, one for each token, "
            f"got {tuple(document_ids.shape)}"
        )
    ids_BS = document_ids.expand(wanted)
    if token_mask is not None:
        # A masked token may have any number.
        ids_BS = ids_BS.where(token_mask, 0)
    if ids_BS.numel() == 0:
        return ids_BS, 1
    # NOTE: device-to-host sync: the number of documents is the size of a table.
    least, most = torch.stack(torch.aminmax(ids_BS)).tolist()
    if least < 0:
        raise ValueError(f"MoELayer: expected document_ids to be at least 0, got {least}")
    return ids_BS, most + 1


def loss_terms(
    routed: RouterOutput,
    counted: BalanceTerms,
    mask_T: Tensor | None,
    num_sequences: int,
    documents: Documents | None,
    *,
    scope: str,
    balance_coef: float,
    z_coef: float,
    step: StepCounts | None,
) -> LossTerms:
    """The losses of one forward pass: "balance", "z", and the router's own.

    Args:
        routed: what the router said.
        counted: terms of the balance loss in it.
        mask_T: which tokens are real, None for all.
        num_sequences: B, equal runs of tokens.
        documents: the sequences of a loss by sequence, where they are not these.
        scope: of the `Balance`.
        balance_coef: 0 for no balance loss.
        z_coef: 0 for no z-loss.
        step: counts of the step, this pass included, for the losses of a global batch.
    """
    terms: LossTerms = {}
    z = ops.router_z_loss(routed.logits, token_mask=mask_T) if z_coef else None
    balance: Tensor | None = None
    if step is not None:
        balance, z = _global_batch_losses(counted, z, step)
    elif balance_coef and documents is not None:
        balance, z = _document_losses(routed, counted.top_k, mask_T, documents, z)
    elif balance_coef and scope == "sequence":
        balance = _sequence_loss(routed, counted.top_k, mask_T, max(num_sequences, 1))
    elif balance_coef:
        balance = ops.load_balance_loss(*counted)
    if balance_coef and balance is not None:
        terms["balance"] = (balance_coef, balance)
    if z is not None:
        terms["z"] = (z_coef, z)
    for name, term in (routed.losses or {}).items():
        terms[name] = (1.0, term)
    return terms


def _sequence_loss(
    routed: RouterOutput, columns: int, mask_T: Tensor | None, num_sequences: int
) -> Tensor:
    """Mean over sequences of the balance loss of each; it counts the first columns of the gate."""
    score_sum_BE, counts_BE = ops.sequence_load(
        routed.logits,
        routed.gate.topk_idx[:, :columns],
        num_sequences,
        # Before the choice, the scores of "topk_softmax" are a softmax over all experts too.
        score_fn=(routed.score_fn or "softmax").removeprefix("topk_"),
        token_mask=mask_T,
    )
    return ops.sequence_balance_loss(score_sum_BE, counts_BE, columns)


@outside_graphs
def _document_losses(
    routed: RouterOutput,
    columns: int,
    mask_T: Tensor | None,
    documents: Documents,
    z_loss: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """As `_sequence_loss` for documents of any lengths, and the z-loss, as this rank's part.

    The mean over the ranks that share the sequences is the loss of the whole sequences.
    """
    num_tokens, num_experts = routed.logits.shape
    # Each token for itself: only whole numbers are summed by document, in any order.
    score_TE, chosen_TE = ops.sequence_load(
        routed.logits,
        routed.gate.topk_idx[:, :columns],
        num_tokens,
        score_fn=(routed.score_fn or "softmax").removeprefix("topk_"),
        token_mask=mask_T,
    )
    counts_NE = chosen_TE.new_zeros((documents.num_documents, num_experts))
    counts_NE.index_add_(0, documents.document_T, chosen_TE)
    own, num_ranks = counts_NE.sum(), group_size(documents.group)
    if num_ranks > 1:
        counts_NE = collectives.all_reduce_(counts_NE, documents.group, operation="Balance")
    counts_NE = counts_NE.to(score_TE.dtype)
    choices_N = counts_NE.sum(dim=1)
    # E sum_e (c_e / C) (S_e K / C) of a document with C = T K choices, over the documents that have
    # one. Linear in the scores, so that each rank adds the terms of its own tokens.
    slope_N = num_ranks * num_experts * columns / choices_N.clamp(min=1).square()
    slope_N = slope_N / (choices_N > 0).sum().clamp(min=1)
    loss = ((slope_N[:, None] * counts_NE)[documents.document_T] * score_TE).sum()
    if z_loss is not None and num_ranks > 1:
        z_loss = z_loss * (own * num_ranks / choices_N.sum().clamp(min=1)).to(z_loss.dtype)
    return loss, z_loss


def _global_batch_losses(
    counted: BalanceTerms, z_loss: Tensor | None, step: StepCounts
) -> tuple[Tensor, Tensor | None]:
    """The balance loss, and the z-loss, of this pass as its part of the step's.

    The mean over ranks and micro-batches of what every pass returns is the loss of the whole batch,
    however unevenly the tokens are spread: a pass counts by its tokens over the mean of all passes.
    """
    # A copy: the running total is written to again before the backward pass reads it.
    total_E, passes = step.total[:-1].clone(), step.total[-1].clone()
    loss = ops.load_balance_loss(counted.score_sum, total_E, counted.top_k) * passes
    if z_loss is not None:
        choices = counted.num_tokens_per_expert.sum() * passes
        # In the dtype of the loss: a quotient of whole numbers would be float32.
        z_loss = z_loss * choices.to(z_loss.dtype) / total_E.sum().clamp(min=1)
    return loss, z_loss


class _InjectLosses(torch.autograd.Function):
    """Identity on y; in the backward pass each loss gets the gradient `coefficient * scale`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        y: Tensor, scale: float | Tensor, coefs: tuple[float, ...], *losses: Tensor
    ) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.scale, ctx.coefs, *losses = inputs
        ctx.like = [(loss.dtype, loss.device) for loss in losses]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.full((), coef, dtype=dtype, device=device) * ctx.scale
            for coef, (dtype, device) in zip(ctx.coefs, ctx.like, strict=True)
        ]
        return grad_y, None, None, *gradients


def inject_losses(y: Tensor, terms: LossTerms, scale: float | Tensor) -> Tensor:
    """`inject_loss` of several terms at once."""
    coefs, losses = zip(*terms.values(), strict=True)
    by_torch = torch.compiler.is_compiling() or (is_transformed() and "vmap" in transforms())
    module = None if by_torch else _runtime_library.load()
    if module is None:
        return _InjectLosses.apply(y, scale, coefs, *losses)
    return module.inject_losses(y, losses, coefs, scale)


def inject_loss(y: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return y unchanged; a backward pass through it adds `scale * loss` to the objective.

    Args:
        y: any tensor on the path to the caller's loss.
        loss: 0-d tensor in the graph.
        scale: factor on the loss, a number or a 0-d tensor; read in the forward pass.

    Returns:
        y, same values and shape.
    """
    return inject_losses(y, {"loss": (1.0, loss)}, scale)
