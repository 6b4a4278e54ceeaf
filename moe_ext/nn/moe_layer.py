"""Mixture-of-experts layer.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N rows.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_kind, check_numbers, check_sizes
from moe_ext._compile import outside_graphs
from moe_ext.attention.masks import Offsets
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import running
from moe_ext.comm.groups import check_group, group_size
from moe_ext.dispatch import (
    WHOLE,
    AutoDispatcher,
    Choice,
    Cut,
    DispatchChoice,
    RowBudget,
    TokenDispatcher,
    Wire,
    WrappedDispatcher,
    named_dispatcher,
    take_part,
)
from moe_ext.distributed.gradients import HOW_TO_KEEP_EQUAL, fingerprint
from moe_ext.distributed.placement import Placement, declare_experts
from moe_ext.distributed.replicas import shards_of_experts
from moe_ext.distributed.spread import SpreadsExperts
from moe_ext.nn.balance.counts import UNSET_SCALE, CountingModule, add_once
from moe_ext.nn.balance.losses import (
    Balance,
    Documents,
    find_documents,
    inject_losses,
    loss_terms,
    step_counts_for,
)
from moe_ext.nn.balance.moved import Rebalancer
from moe_ext.nn.balance.quantile import add_required_bias
from moe_ext.nn.capacity import Capacity, limit_choice
from moe_ext.nn.combinations import check_combination
from moe_ext.nn.expert_activation import Activation
from moe_ext.nn.experts import (
    GroupedExperts,
    runs_own_forward,
    slots_of_shards,
)
from moe_ext.nn.feed_forward import FeedForward, without_bad_padding
from moe_ext.nn.layer_metrics import LayerMetrics, Record, read_losses, read_metrics
from moe_ext.nn.layer_options import (
    TAKES,
    check_inputs,
    check_modules,
    check_sizes_of,
    check_transforms,
    check_way_of_exchange,
    keep_for_router,
    looks_at_router,
    made_with,
    options_now,
    router_of,
)
from moe_ext.nn.options import Dispatch, SharedExpert, names_other_arguments, of_number
from moe_ext.nn.parts import run_plan
from moe_ext.nn.replay import apply_sessions, sessions
from moe_ext.nn.routers import BalanceTerms, Router, RouterOutput
from moe_ext.nn.torch_state import as_autocast, has_hooks, in_backward
from moe_ext.ops.autograd import is_transformed

# Arguments `document_ids` and `cu_seqlens` of a call.
_Packed = tuple[Tensor | None, Offsets | None]
# Name, for messages, of the checksum that ranks compare.
_ROUTER_BITS = f"the checksum of the router's parameters ({HOW_TO_KEEP_EQUAL})"


def _field_of_balance(name: str) -> Any:
    """Return a property of the layer for a field of its `Balance`; it can be set between steps."""
    return property(
        lambda layer: getattr(layer.balance, name),
        lambda layer, value: setattr(layer, "balance", replace(layer.balance, **{name: value})),
    )


class MoELayer(CountingModule, SpreadsExperts):
    """Mixture of experts, `[..., D] -> [..., D]`, that replaces a dense feed-forward network.

    `y[t] = sum_k w[t, k] * expert[idx[t, k]](x[t]) (+ shared_expert(x[t]))`. No token is dropped
    unless a capacity is given. By default the layer injects the balance loss, the z-loss and the
    router's own losses: in training mode, a backward pass through the output also adds the gradient
    of `loss_scale * (balance.coef * balance_loss + balance.z_coef * z_loss + ...)`.

    Args:
        model_dim: D, number of elements of a token.
        ffn_dim: F, hidden size of each expert.
        num_experts: E, number of experts over all ranks of `ep_group`.
        top_k: K, number of experts per token. None takes that of a router module, otherwise 2.
        router: score function of a `TopKRouter`: "softmax", "topk_softmax", "sigmoid" or
            "sqrtsoftplus"; or a module that maps `(x_TD, token_mask=)` to a `RouterOutput`.
        experts: module that maps `(rows [N, D], expert_offsets)` to `[N, D]`; None makes
            `GroupedExperts`. The rows of an expert may end with padding rows of zeros, whose
            results are ignored. In an expert-parallel layer the module holds the experts of this
            rank, and has the attributes `ep_group` and `num_experts` (E).
        activation: activation of the default experts and of the shared expert, see
            `GroupedExperts`.
        bias: give the default experts and the shared expert biases.
        capacity: limit on the rows of an expert from the T tokens of this rank (T includes masked
            tokens), and what happens to rows beyond it. None sets no limit, and a number is short
            for `Capacity(number)`.
        row_budget: limit on the rows that this rank holds at once. None sets no limit, and a number
            is short for `RowBudget(number)`.
        balance: losses, with their factors and the tokens over which they count. None is short for
            `Balance()`, "sequence" and "global_batch" for that scope, a number for that factor.
        shared_expert: expert that processes every token, including masked ones. A number is its F;
            0 or None makes no shared expert.
        ep_group: process group over which the experts are divided; None keeps all experts on this
            rank.
        dispatcher: how rows travel between the ranks: a `Dispatch`; or "auto", "local", "alltoall",
            "dedup", "hierarchical", "allgather", "nccl_ep", "deep_ep", "symm_mem" or a
            `TokenDispatcher`, which are short for `Dispatch(dispatcher)`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        balance_loss_coef, z_loss_coef, loss_mode: coef, z_coef and mode of `balance`. These, and
            `balance`, `capacity`, `router`, `row_budget` and `debug`, may be set between steps.
        loss_scale: factor on the injected losses, a number or a 0-d tensor, 1.0 at first; see
            `set_loss_scale`. A warning tells if gradients accumulate and no factor was set.
        metrics: detached metrics of the last forward pass on this rank: `num_tokens_per_expert`
            ([E] int64, choices before any drop), `num_dropped`, `balance_loss`, `z_loss`, and
            `<name>_loss` for each loss of the router. With rebalance also `num_moved_experts`, the
            number of experts whose weights came to this rank, and `moved_bytes`, the bytes of
            weights that left it. `LayerMetrics` lists derived metrics. Each pass overwrites them,
            so a recomputation leaves the same values. Reading a metric synchronises with the
            device, and computes it if no loss needed it.
        losses: loss terms of the last forward pass, `balance`, `z` and those of the router, each
            multiplied by its coefficient. They are detached if `balance.mode` is "inject". Without
            gradients, the terms of a micro-batch are computed when they are read.
        choices: `[E]` int64, number of choices of each expert by this rank's training tokens, for
            `update_selection_bias`. Counted only if the router has a `selection_bias`.

    Raises:
        ValueError: sizes or options are out of range, or E is not a multiple of the size of
            `ep_group`.

    Determinism: the same input gives the same bits. A layer on one rank does not synchronise. An
    expert-parallel layer reads the split sizes on the host once per forward pass.
    """

    # Ranks compare these options under other names, because equal behaviour can be given in several
    # ways.
    FREE_TO_DIFFER = ("dispatcher", "top_k")

    @names_other_arguments
    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        router: str | nn.Module = "softmax",
        experts: nn.Module | None = None,
        activation: Activation = "swiglu",
        bias: bool = False,
        capacity: Capacity | float | None = None,
        row_budget: RowBudget | int | None = None,
        balance: Balance | str | float | None = None,
        shared_expert: SharedExpert | int | None = None,
        ep_group: ProcessGroup | None = None,
        dispatcher: Dispatch | TokenDispatcher | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("MoELayer", model_dim=model_dim, num_experts=num_experts)
        check_numbers("MoELayer", MoELayer.__init__.__annotations__, locals())
        check_group(ep_group, "MoELayer")
        check_kind("MoELayer", "dtype", dtype, torch.dtype)
        check_modules(router, experts)
        num_ranks, self._dispatch = group_size(ep_group), Dispatch.of(dispatcher)
        self.model_dim = model_dim
        self.num_experts = num_experts
        self.capacity: Capacity | None = capacity  # type: ignore[assignment]
        self.row_budget: RowBudget | None = row_budget  # type: ignore[assignment]
        self.balance: Balance = balance  # type: ignore[assignment]
        self.debug = self._dispatch.debug
        self.loss_scale: float | Tensor = UNSET_SCALE
        self._record: Record = {}
        self._check_group(ep_group, experts=experts, router=router)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if isinstance(router, str):
            columns = 2 if top_k is None else top_k
            router = router_of(router, model_dim, num_experts, columns, **made)
        elif not callable(router):
            raise TypeError(f"MoELayer: expected router to be a name or a module, got {router!r}")
        if isinstance(router, Router):
            sizes = {"num_experts": num_experts, "model_dim": model_dim, "top_k": top_k}
            check_sizes_of("router", router, **sizes)
        self.router = router
        # top_k for router modules that have no such attribute.
        self._top_k = 2 if top_k is None else top_k
        made.update(activation=activation, bias=bias)
        if experts is None:
            experts = GroupedExperts(num_experts, model_dim, ffn_dim, ep_group=ep_group, **made)
        else:
            carried = getattr(experts, "ep_group", None)
            if num_ranks > 1 and carried is not ep_group:
                raise ValueError(
                    "MoELayer: expected experts to carry the layer's group as attribute ep_group, "
                    f"got {carried}"
                )
            check_sizes_of("experts", experts, num_experts=num_experts, model_dim=model_dim)
            declare_experts(experts, num_experts, ep_group)
        self.experts = experts
        self._take_group(ep_group, self._dispatcher_over(ep_group))
        shared = of_number("shared_expert", shared_expert or None, SharedExpert)
        self.shared_expert = FeedForward(model_dim, shared.ffn_dim, **made) if shared else None
        self.shared_expert_gate: nn.Linear | None = None
        if shared is not None and shared.gate:
            self.shared_expert_gate = nn.Linear(model_dim, 1, False, device=device, dtype=dtype)
        counts = step_counts_for(self.balance, num_experts, device)
        self.add_counters(num_experts, counts, device)
        keep_for_router(self, router, device)

    def _take_group(self, ep_group: ProcessGroup | None, dispatcher: TokenDispatcher) -> None:
        """Set the attributes that depend on the group."""
        self.dispatcher = dispatcher
        self._dispatch_choice: DispatchChoice | None = None
        self._chooser: AutoDispatcher | None = None
        # With etp the dispatcher treats each shard of an expert as an expert. The output of an
        # expert is the sum of those of its shards.
        self._shards = shards_of_experts(ep_group)
        # On a single rank nothing travels, so nothing can overlap.
        is_alone = group_size(ep_group) == 1
        self.overlap = 1 if is_alone else self._dispatch.overlap
        self._rebalancer: Rebalancer | None = None
        if self._dispatch.moves is not None and not is_alone:
            assert runs_own_forward(self.experts)
            self._rebalancer = Rebalancer(self._dispatch.moves, self.experts)
        # Reader of the options that the ranks compare, and the values at the last comparison.
        self._watched: operator.attrgetter[Any] | None = None
        self._compared: object = None
        # Options that are fixed once the layer is constructed.
        self._made_with: dict[str, object] = {}
        # Cut of the first pass. It must not change later, because it determines the messages.
        self._first_cut: Cut | None = None
        self._num_passes = 0

    def _check_group(self, ep_group: ProcessGroup | None, **parts: Any) -> None:
        """ValueError for a group that the layer's options, experts or router do not go with."""
        dispatch, num_ranks = self._dispatch, group_size(ep_group)
        places = num_ranks // shards_of_experts(ep_group)
        if self.num_experts % places:
            raise ValueError(
                "MoELayer: expected num_experts to be a multiple of the group size "
                f"{places}, got {self.num_experts}"
            )
        check_combination(
            "MoELayer",
            **vars(dispatch),
            capacity=self.capacity,
            row_budget=self.row_budget,
            balance=self.balance,
            num_ranks=num_ranks,
            etp=shards_of_experts(ep_group),
            own_dispatcher=dispatch.dispatcher if dispatch.is_object else None,
            **parts,
        )
        if dispatch.is_object:
            sizes = {"num_experts": self.num_experts, "num_ranks": num_ranks}
            check_sizes_of("dispatcher", dispatch.dispatcher, **sizes)

    def _placements_over(self, ep_group: ProcessGroup) -> dict[str, Placement]:
        """See `SpreadsExperts`."""
        experts, dispatch = self.experts, self._dispatch
        if dispatch.is_object or not isinstance(experts, GroupedExperts):
            what, kind, part = "experts", "GroupedExperts", type(experts).__name__
            if dispatch.is_object:
                what, kind, part = "dispatcher", "a name", type(dispatch.dispatcher).__name__
            raise ValueError(
                f"MoELayer: expected {what} to be {kind} where experts are spread after the layer "
                f"was made, got {part}; make the layer with ep_group"
            )
        self._check_group(ep_group, experts=experts, router=self.router)
        places = experts._placements_over(ep_group)
        return {f"experts.{name}": place for name, place in places.items()}

    def _dispatcher_over(self, ep_group: ProcessGroup | None) -> TokenDispatcher:
        """See `SpreadsExperts`."""
        dispatch, budget = self._dispatch, self.row_budget
        name = dispatch.dispatcher
        if not isinstance(name, str):
            return name if hasattr(name, "plan") else WrappedDispatcher(name)
        if budget is not None and budget.static and name == "auto":
            name = "alltoall"
        # With rebalance every rank has as many slots for experts of others as for its own.
        moves = dispatch.moves is not None and group_size(ep_group) > 1
        return named_dispatcher(
            *("MoELayer", name, self.num_experts * shards_of_experts(ep_group) * (1 + moves)),
            ep_group,
            combine=dispatch.combine,
            wire=dispatch.wire,
            max_rows=None if budget is None else budget.rows,
        )

    def _lie_over(self, ep_group: ProcessGroup, dispatcher: TokenDispatcher) -> None:
        """See `SpreadsExperts`."""
        assert isinstance(self.experts, GroupedExperts)
        self.experts._lie_over(ep_group)
        self._take_group(ep_group, dispatcher)

    def __setattr__(self, name: str, value: Any) -> None:
        take = TAKES.get(name)
        super().__setattr__(name, value if take is None else take(self, value))

    # Fields of `balance` that may be set between steps.
    balance_loss_coef = _field_of_balance("coef")
    z_loss_coef = _field_of_balance("z_coef")
    loss_mode = _field_of_balance("mode")

    def reset_parameters(self) -> None:
        """Draw all parameters anew; the values depend on the seed but not on `ep_group`."""
        for module in (self.router, self.experts, self.shared_expert, self.shared_expert_gate):
            if module is not None:
                module.reset_parameters()  # type: ignore[operator]
        if isinstance(self.router, Router):
            self.router.reset_rng_state()

    def extra_repr(self) -> str:
        """Sizes and options for `repr`."""
        text = (
            f"model_dim={self.model_dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"balance_loss_coef={self.balance_loss_coef}, z_loss_coef={self.z_loss_coef}, "
            f"dispatcher={type(self.dispatcher).__name__}"
        )
        if self.capacity is not None:
            text += f", capacity={self.capacity}"
        if self.row_budget is not None:
            text += f", row_budget={self.row_budget}"
        if self.dispatcher.wire != Wire():
            text += f", wire={self.dispatcher.wire}"
        if self.balance.scope != "micro_batch":
            text += f", balance={self.balance.scope!r}"
        return text if self.loss_mode == "inject" else f"{text}, loss_mode={self.loss_mode!r}"

    @property
    def top_k(self) -> int:
        """K, experts per token, as the router has it now."""
        return self.router.top_k if isinstance(self.router, Router) else self._top_k

    @property
    def metrics(self) -> LayerMetrics:
        """See the class."""
        return read_metrics(self._record)

    @property
    def losses(self) -> dict[str, Tensor]:
        """See the class."""
        return read_losses(self._record)

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_idx: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Offsets | None = None,
    ) -> Tensor:
        """Run every token through its experts.

        Args:
            x: tokens, `[..., D]`, floating point.
            token_mask: `[...]` bool, True = real token. A masked token reaches no routed expert and
                counts in no loss; its output is that of the shared expert, or zero. NaN and
                infinity in it, as of memory that nobody has written, count as zeros.
            token_ids: `[...]` int64, entry of the vocabulary of each token, for routers that look
                at it (hash routing).
            token_idx: `[...]` int64, index of each token in the global batch, for routers and
                capacities that draw random numbers; by default counted from `set_routing_step`'s
                `first_token`.
            document_ids: `[..., S]` int64 from 0, or `[S]` for all sequences of `x[..., S, D]`: the
                packed document of each token, for `Balance("sequence")`, which looks at them alone.
                Where ranks share sequences, numbers in the whole sequence, see
                `attention.document_ids`.
            cu_seqlens: offsets of packed documents, in the place of document_ids, where this rank
                holds whole sequences: `[0, ..., S]`, or a row of them for each sequence.

        Returns:
            `[..., D]`, in the dtype of x, or under autocast in that of autocast.

        Raises:
            ValueError: x, token_mask, or what tells of tokens or documents, has the wrong shape, or
                document_ids a negative number; on every rank that shares the sequences.
            TypeError: x is not floating point, token_mask not bool, or an index not int64.
        """
        per_token = {"token_mask": token_mask, "token_ids": token_ids, "token_idx": token_idx}
        packed = document_ids, cu_seqlens
        if is_transformed():
            check_transforms(self)
        if self.dispatcher.in_graph:
            return self._forward(x, per_token, packed)
        return self._forward_outside_of_graphs(x, per_token, packed)

    if TYPE_CHECKING:
        __call__ = forward

    @outside_graphs
    def _forward_outside_of_graphs(
        self, x: Tensor, per_token: dict[str, Tensor | None], packed: _Packed
    ) -> Tensor:
        # The same as the context `in_layer`, but cheaper.
        token = running.set(weakref.ref(self))
        try:
            self._compare_options(x)
            return self._forward(x, per_token, packed)
        finally:
            running.reset(token)

    def _check_combination(self, **more: Any) -> None:
        """Refuse current options that cannot be combined, see `check_combination`."""
        names = ("capacity", "row_budget", "overlap", "balance")
        now: dict[str, Any] = {name: getattr(self, name) for name in names}
        check_combination("MoELayer", **{**now, "etp": self._shards, **more})

    def _compare_options(self, x: Tensor) -> None:
        """Compare the options over the ranks, in the first pass and after an option has changed."""
        watched = self._watched
        # NOTE: device-to-host sync, in passes 1, 2, 4, 8, ....
        looks = not self._num_passes & (self._num_passes + 1) and looks_at_router(self)
        if watched is not None:
            changed = watched(self) != self._compared
            if not changed and not looks:
                return
            if changed:
                check_way_of_exchange(self, x)
        dispatcher = self.dispatcher
        if watched is None:
            self._made_with = made_with(self)
            self._first_cut = self._cut()
        if looks:
            self._made_with[_ROUTER_BITS] = fingerprint([*self.router.named_parameters()])
        now, read = options_now(self)
        options = {**now, **self._made_with}
        # Only the very first layer of a group compares in a separate message. Later layers compare
        # with their counts: a separate message could be matched with the counts of another layer,
        # if ranks run different layers.
        if watched is None and not dispatcher._calls.layers:
            Agreement("MoELayer", dispatcher.group).compare({"options": options})
        self._watched, self._compared = read, read(self)
        dispatcher.declare(options)

    def explain_dispatch(self) -> DispatchChoice:
        """Return the dispatcher of the layer and the reason for it.

        Returns:
            DispatchChoice: its text is a table with the bytes and times of the candidates, if there
            was a choice.
        """
        if self.dispatcher.choose is not None:
            return DispatchChoice("auto", self.dispatcher.reason)
        if self._dispatch_choice is not None:
            return self._dispatch_choice
        return DispatchChoice(type(self.dispatcher).__name__, self.dispatcher.reason)

    def _forward(self, x: Tensor, per_token: dict[str, Tensor | None], packed: _Packed) -> Tensor:
        dispatcher, cut, experts = self.dispatcher, self._cut(), self.experts
        if not isinstance(x, Tensor):
            # The others may choose a dispatcher before they tell each other anything.
            with dispatcher.computing(self.choices):
                raise TypeError(f"MoELayer: expected x to be a tensor, got {type(x).__name__}")
        weighed = isinstance(experts, GroupedExperts) and experts.weighs_rows
        if dispatcher.choose is not None:
            # The chooser is kept, because it reconsiders its choice in later passes.
            self._chooser = cast(AutoDispatcher, dispatcher)
        chooser = self._chooser
        if chooser is not None and chooser.is_due(dispatcher, trains=self._trains()):
            self.dispatcher, self._dispatch_choice = chooser.choose(
                x,
                self.top_k,
                in_rounds=cut.budget is not None or cut.num_parts > 1,
                weighed=weighed and not (self.capacity and self.capacity.pad),
            )
            dispatcher = self.dispatcher
        with dispatcher.routing(x, cut):
            if cut is not WHOLE and not torch.compiler.is_compiling():
                # The options are checked again, since they may have been set after construction.
                moved = self._rebalancer and self._rebalancer.options
                self._check_combination(dispatcher=dispatcher, experts=experts, rebalance=moved)
            documents = None
            if self.balance.scope == "sequence" and self._wants_balance_loss():
                # An error in the inputs of this rank is sent to the ranks that share its sequences.
                problem: Exception | None = None
                try:
                    check_inputs(self, x, per_token)
                except (TypeError, ValueError) as error:
                    problem = error
                mask = per_token["token_mask"]
                documents = find_documents(self.balance, x, *packed, mask, problem)
            else:
                check_inputs(self, x, per_token)
            x_TD = x.reshape(-1, self.model_dim)
            flat: dict[str, Tensor] = {}
            for name, value in per_token.items():
                if value is not None:
                    flat[name] = value.reshape(-1)
            mask_T = flat.pop("token_mask", None)
            router = self.router
            # Only the given arguments are passed, since a user's router may accept only the mask.
            routed: RouterOutput = router(x_TD, token_mask=mask_T, **flat)
            if routed.score_fn is None and self._wants_balance_loss():
                check_combination("MoELayer", balance=self.balance, unknown_scores=router)
            own = routed
            top_k = router.top_k if isinstance(router, Router) else self._top_k
            if sessions:
                routed = apply_sessions(self, routed, mask_T)
            choice = limit_choice(
                self.capacity,
                router,
                routed,
                top_k,
                flat.get("token_idx"),
                training=self.training,
                filled=mask_T is None and routed is own and getattr(router, "fills_slots", False),
            )
        if self.shared_expert is not None:
            x_TD = without_bad_padding(x_TD, mask_T)
        # Under autocast the experts would cast x anyway. Casting before the dispatch halves the
        # bytes that are permuted and sent.
        y_TD, num_dropped = self._run_experts(as_autocast(x_TD), choice, cut, weighed)
        sequences = math.prod(x.shape[:-2]), documents
        y_TD = self._account(y_TD, routed, top_k, mask_T, sequences, num_dropped)
        return y_TD.reshape(x.shape)

    def _trains(self) -> bool:
        """Return True in a training pass with gradients, outside `count_tokens`."""
        return self.training and torch.is_grad_enabled() and not self.counting

    def _cut(self) -> Cut:
        """Return the cut of a batch into parts that follows from the current options."""
        moves = self._rebalancer is not None
        if self.overlap == 1 and self.row_budget is None and not moves:
            return WHOLE
        return Cut(self.overlap, self.row_budget, self.num_experts if moves else None)

    def _run_experts(
        self, x_TD: Tensor, choice: Choice, cut: Cut, weighed: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the experts; return `y [T, D]` and the number of dropped slots."""
        dispatcher, experts, limited = self.dispatcher, self.experts, choice.num_dropped
        beside = None
        if self.shared_expert is not None:
            beside = functools.partial(self._run_shared_expert, x_TD)
        run = dispatcher.routed_experts
        # If rows neither travel nor are seen by hooks, one operator does all, without rows.
        if run and weighed and cut is WHOLE and choice.capacity is None and not has_hooks(experts):
            assert isinstance(experts, GroupedExperts)
            summed = run(
                *(x_TD, choice.topk_idx, choice.topk_weights),
                *(experts._weight(experts._up_name), experts._weight("down_proj")),
                kind=experts.activation,
                layout=experts.layout,
                filled=choice.filled,
            )
            if summed is not None:
                y_TD, num_dropped = summed
                return y_TD if beside is None else y_TD + beside(), num_dropped
        if self._shards > 1:
            group: ProcessGroup | None = experts.ep_group  # type: ignore[assignment]
            slots = choice.topk_idx, choice.topk_weights, self.num_experts, group
            idx, weights = slots_of_shards(*slots)
            choice = choice._replace(topk_idx=idx, topk_weights=weights)
        place = None
        if self._rebalancer is not None:
            counts = self.training and not self.counting and not in_backward()
            place = functools.partial(self._rebalancer.place, x_TD, choice.topk_idx, counts=counts)
        own = not (dispatcher.in_graph or isinstance(experts, GroupedExperts))
        if own and torch.is_grad_enabled() and any(p.requires_grad for p in experts.parameters()):
            # A module of the user's may have trained experts on some ranks and frozen ones on
            # others. All ranks must take part in the exchange of gradients.
            x_TD = take_part(x_TD)
        plan = dispatcher.plan(x_TD, choice, cut, weighed=weighed, place=place)
        if not dispatcher.in_graph:
            # The count comes after `plan`, so that a pass which a rank has refused counts on none.
            self.__dict__["_num_passes"] += 1
        if self._chooser is not None and self._trains():
            may_change = not in_backward() and not is_transformed() and place is None
            self._chooser.see(choice.topk_idx, may_change=may_change)
        pad = self.capacity is not None and self.capacity.pad
        with dispatcher.computing(x_TD):
            y_TD = run_plan(
                *(dispatcher, plan, experts, x_TD, choice.topk_weights),
                weighed=weighed,
                pad=pad,
                beside=beside,
            )
        num_dropped = plan.num_dropped // self._shards if self._shards > 1 else plan.num_dropped
        return y_TD, num_dropped if limited is None else num_dropped + limited

    def _run_shared_expert(self, x_TD: Tensor) -> Tensor:
        assert self.shared_expert is not None
        y_TD: Tensor = self.shared_expert(x_TD)
        if self.shared_expert_gate is not None:
            y_TD = y_TD * torch.sigmoid(self.shared_expert_gate(x_TD))
        return y_TD

    def _wants_balance_loss(self) -> bool:
        """Return False without a coefficient, or if the router is balanced by construction."""
        return bool(self.balance.coef) and not getattr(self.router, "balanced", False)

    def _account(
        self,
        y_TD: Tensor,
        routed: RouterOutput,
        top_k: int,
        mask_T: Tensor | None,
        sequences: tuple[int, Documents | None],
        num_dropped: Tensor,
    ) -> Tensor:
        """Count the tokens, inject the losses into y, and keep the record of the pass."""
        chosen_E = routed.gate.num_tokens_per_expert
        counted = routed.balance or BalanceTerms(routed.gate.score_sum, chosen_E, top_k)
        if self.choices.device != chosen_E.device:
            # The parameters were assigned on another device, for example to a layer that was made
            # on the meta device.
            self._move_counters(lambda _: chosen_E)
        step = self.global_counts if self.training else None
        bias_E = getattr(self.router, "selection_bias", None)
        if bias_E is not None and self.training and not self.counting:
            add_once(self.choices, chosen_E, 0)
            if self.required_bias is not None:
                add_required_bias(self.required_bias, routed.logits.detach(), bias_E, mask_T, top_k)
        if step is not None:
            step.add(counted.num_tokens_per_expert)
        balance_coef = (self.balance.coef or 0.0) if self._wants_balance_loss() else 0.0
        coefs = {"balance": balance_coef, "z": self.balance.z_coef}
        unread = {}
        # Without gradients, the losses of a micro-batch are computed only if someone reads them.
        if not torch.is_grad_enabled() and self.balance.scope == "micro_batch":
            unread, coefs = coefs, dict.fromkeys(coefs, 0.0)
        terms = {}
        # Inside `count_tokens` the counts of the step are incomplete, so there are no losses.
        if not self.counting:
            terms = loss_terms(
                routed,
                counted,
                mask_T,
                *sequences,
                scope=self.balance.scope,
                balance_coef=coefs["balance"],
                z_coef=coefs["z"],
                step=step,
            )
        if terms and self.balance.mode != "return" and self.training and torch.is_grad_enabled():
            if step is not None or self.loss_scale is UNSET_SCALE:
                self.check_step()
            y_TD = inject_losses(y_TD, terms, self.loss_scale)
        if self.balance.mode == "inject":
            for name, (coef, term) in terms.items():
                terms[name] = coef, term.detach()
        record: Record = {
            "num_tokens_per_expert": chosen_E,
            "num_dropped": num_dropped,
            "logits": routed.logits.detach(),
            "score_sum": counted.score_sum.detach(),
            "balance_counts": counted.num_tokens_per_expert,
            "balance_top_k": counted.top_k,
            "mask": mask_T,
            "terms": terms,
            "unread": {} if self.counting else unread,
            "moved": {} if self._rebalancer is None else self._rebalancer.metrics(chosen_E.device),
        }
        # `__setattr__` of the layer checks options. The record is not an option.
        object.__setattr__(self, "_record", record)
        return y_TD

    def __getstate__(self) -> dict[str, Any]:
        # The record may hold tensors of a graph, which cannot be copied or pickled.
        return {**self.__dict__, "_record": {}}
