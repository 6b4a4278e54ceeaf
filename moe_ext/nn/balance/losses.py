"""Losses of a layer: options, packed documents, loss terms, and injection of gradients.

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

# Coefficient and loss, a tensor with its graph, by name.
LossTerms = dict[str, tuple[float, Tensor]]


@dataclass(frozen=True)
class Balance:
    """Losses of a layer: tokens over which the balance loss counts, factors, and mode.

    Attributes:
        scope: "micro_batch" counts the tokens of one forward pass on this rank. "sequence" averages
            the losses of sequences of `x[..., S, D]`, or of packed documents that the layer is told
            of; those without a real token do not count. "global_batch" counts the tokens of a whole
            step: the share of each expert is that over all ranks of `group` and all micro-batches
            of the step, and the mean score is that of this pass.
        group: for "global_batch", the ranks whose tokens count: every rank that has data of its
            own. For "sequence", the ranks that share each sequence (`cp_group`). None means this
            rank alone, or the group of an `attention.sequence_parallel` around the layer.
        coef: factor on `ops.load_balance_loss`. None takes the factor of the layer's preset, or
            0.01. A router that is balanced by construction has no balance loss.
        z_coef: factor on `ops.router_z_loss`.
        mode: "inject" adds the gradients of the losses in the backward pass of the output. "return"
            adds none: the caller takes the losses, with their graph, from `losses` (see
            `collect_losses`). "both" injects too, for a caller who only looks at `losses`.

    Raises:
        ValueError: scope or mode is unknown, a factor is negative, or the scope has no use for a
            group.
        TypeError: the group is not a process group of this rank, or a factor is not a number.
    """

    scope: str = "micro_batch"
    group: ProcessGroup | None = None
    _: KW_ONLY
    coef: float | None = None
    z_coef: float = 0.0
    mode: str = "inject"

    def __post_init__(self) -> None:
        """Check the values."""
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
        """Return the `Balance` for the argument of a layer.

        Args:
            owner: name for error messages.
            value: a `Balance`, a scope, the factor of the balance loss, or None.
            coef: factor of the balance loss if `value` has none.
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
    """Return counters for the tokens of a step, or None if the losses do not need them."""
    is_global = balance.scope == "global_batch"
    return StepCounts(num_experts, balance.group, device) if is_global else None


class Documents(NamedTuple):
    """Sequences of a balance loss that differ in length or are shared with other ranks.

    Attributes:
        document_T: `[T]` int64, number of the document of each token. Parts of a document on
            several ranks have the same number.
        num_documents: N, including numbers that no token has.
        group: the ranks that share documents; None for this rank alone.
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
    """Return the documents of a pass; None if each sequence is one document of this rank alone.

    Ranks that share sequences compare their inputs in one message.

    Args:
        balance: losses of the layer, whose scope is "sequence".
        x: tokens `[..., S, D]`.
        document_ids: `[..., S]` or `[S]`.
        cu_seqlens: offsets in the sequences of this rank.
        token_mask: `[..., S]`.
        problem: error in other inputs of this rank, raised here.
    """
    # This import is local, because it loads all schemes of attention.
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
    # Without sequences `reshape(0, -1)` would be ambiguous, so the length is read from x.
    length = x.shape[-2] if x.dim() > 1 else 1
    document_T = (first_B[:, None] + ids_BS.reshape(num_sequences, length)).reshape(-1)
    return Documents(document_T, num_sequences * num_documents, group)


def _ids_of_offsets(
    cu_seqlens: Offsets,
    document_ids: Tensor | None,
    group: ProcessGroup | None,
    x: Tensor,
) -> Tensor:
    """Return the document ids for offsets in sequences that this rank holds as a whole."""
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
    """Return the document ids in the shape of the tokens, and the largest id plus one."""
    wanted = x.shape[:-1]
    # Errors are of class TypeError or ValueError, which the agreement raises on every rank.
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
        # A masked token may have any id, and counts nowhere.
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
    """Return the losses of one forward pass: "balance", "z", and those of the router.

    Args:
        routed: output of the router.
        counted: terms of the balance loss for all tokens of the pass.
        mask_T: True for real tokens; None for all.
        num_sequences: B, the number of sequences of equal length.
        documents: for scope "sequence", documents that replace these sequences.
        scope: scope of the `Balance`.
        balance_coef: 0 for no balance loss.
        z_coef: 0 for no z-loss.
        step: counts of the step, including this pass, for scope "global_batch".
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
    """Return the mean of the sequences' balance losses, from the first columns of the gate."""
    score_sum_BE, counts_BE = ops.sequence_load(
        routed.logits,
        routed.gate.topk_idx[:, :columns],
        num_sequences,
        # The loss counts the scores of all experts. Before the choice, "topk_softmax" has the
        # scores of "softmax".
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
    """Return this rank's parts of the loss of `_sequence_loss` over documents, and of the z-loss.

    The mean of the parts over the ranks that share documents is the loss of the whole documents.
    """
    num_tokens, num_experts = routed.logits.shape
    # Each token is a sequence of its own here. Only counts are then summed by document: sums of
    # whole numbers have the same bits in any order.
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
    # A document with C = T K choices has the loss E sum_e (c_e / C) (S_e K / C), averaged over the
    # documents with C > 0. The loss is linear in the scores: each rank adds its own tokens' terms.
    slope_N = num_ranks * num_experts * columns / choices_N.clamp(min=1).square()
    slope_N = slope_N / (choices_N > 0).sum().clamp(min=1)
    loss = ((slope_N[:, None] * counts_NE)[documents.document_T] * score_TE).sum()
    if z_loss is not None and num_ranks > 1:
        z_loss = z_loss * (own * num_ranks / choices_N.sum().clamp(min=1)).to(z_loss.dtype)
    return loss, z_loss


def _global_batch_losses(
    counted: BalanceTerms, z_loss: Tensor | None, step: StepCounts
) -> tuple[Tensor, Tensor | None]:
    """Return this pass's parts of the balance loss and the z-loss of the whole step.

    The mean of the parts over ranks and micro-batches is the loss of the whole batch, however
    unevenly the tokens are divided: the weight of a pass is its tokens over the mean of all passes.
    """
    # The total is copied, because later passes add to it before the backward pass reads it.
    total_E, passes = step.total[:-1].clone(), step.total[-1].clone()
    loss = ops.load_balance_loss(counted.score_sum, total_E, counted.top_k) * passes
    if z_loss is not None:
        choices = counted.num_tokens_per_expert.sum() * passes
        # A quotient of integers would be float32, so `choices` is cast to the dtype of the loss.
        z_loss = z_loss * choices.to(z_loss.dtype) / total_E.sum().clamp(min=1)
    return loss, z_loss


class _InjectLosses(torch.autograd.Function):
    """Identity on y. In the backward pass each loss gets the gradient `coefficient * scale`."""

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
    """Apply `inject_loss` for several terms at once."""
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
