"""Feed-forward block in Megatron's sequence parallelism.

Shapes: S whole sequence, L positions of this rank, n rows of this rank, D model, F ffn, P ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_choice, check_integer, check_numbers
from moe_ext.attention.checks import DTYPES, draw_seed, requires
from moe_ext.attention.layouts import Layout, check_layout, make_layout
from moe_ext.attention.sharding import (
    Shards,
    check_lengths,
    linear_map,
    start_all_gather,
    start_reduce_scatter,
)
from moe_ext.comm.agreement import Agreement, told_option
from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import GroupHandle, check_group, group_rank, group_size
from moe_ext.distributed.dtensor import local_part
from moe_ext.distributed.placement import Placement, declare_placement, placements
from moe_ext.distributed.state_dict import full_state_dict
from moe_ext.nn.expert_activation import (
    Activation,
    resolve_activation,
    run_activation,
)
from moe_ext.nn.torch_state import as_autocast, autocast_dtype
from moe_ext.ops import routing_uniform
from moe_ext.ops.autograd import refuse_second_derivative

_NAME = "SequenceParallelMLP"
_NORMS: dict[str | None, Callable[..., nn.Module]]
_NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, None: nn.Identity}
_REDUCTIONS = ("sum", "mean")
_DROPOUT_STREAM = 4
_require = requires(_NAME)


class SequenceParallelMLP(nn.Module):
    """Norm, two-layer feed-forward network and dropout over a sharded sequence.

    Norm and dropout work on this rank's positions. The rows are all-gathered before the first
    layer, whose features are divided over ranks, and reduce-scattered after the second layer. The
    forward pass has one all-gather and one reduce-scatter, and so has the backward pass, where the
    gradient of the first weight is computed while the reduce-scatter is underway. The residual
    connection is left to the caller: `x + mlp(x)`.

    Gradients need no further reduction over the group. The backward pass sums those of the norm
    over the group, in one all-reduce of the norm's size, and computes the whole gradient of the
    last bias on every rank. Every rank has to run the backward pass.

    With equal seeds on all ranks, the initial weights are slices of those that one process draws.
    Biases start at 0. Dropout draws by position: with equal generator states on all ranks it drops
    the same elements as one process, and with different states the ranks draw independently.

    Args:
        model_dim: D, the elements of a token.
        ffn_dim: F over all ranks, a multiple of P.
        group: the P ranks; None is this process alone.
        activation: as in `GroupedExperts`. Gated ones have `gate_up_proj`, plain ones `up_proj`.
        norm: "layer_norm", "rms_norm" or None.
        norm_eps: epsilon of the norm.
        bias: if True, both layers have biases.
        dropout: share of the output that is dropped in training.
        layout: which rank holds which positions, see `make_layout`.
        regather: if True, save only this rank's rows for the backward pass and all-gather them
            again there, as Megatron does. This costs one more all-gather, and saves S - L rows.
        grad_reduction: "sum": gradients of the parameters are those of the sum over ranks of the
            local losses, as in Megatron. "mean": they are those of the mean, which
            `moe_ext.distributed.sync_gradients` takes for all other parameters; that function
            refuses "sum". The gradient of the input is the same in both cases.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        norm: `nn.LayerNorm`, `nn.RMSNorm` or `nn.Identity`, equal on every rank.
        gate_up_proj: `nn.Linear(D, 2F/P)`, with this rank's gates above its ups; or up_proj:
            `nn.Linear(D, F/P)`.
        down_proj: `nn.Linear(F/P, D)`; its bias is equal on every rank.

    Raises:
        ValueError: a number or name out of its range.
        TypeError: this rank does not belong to `group`.

    Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
    2022 (arXiv 2205.05198), section 4.2.2.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        *,
        group: ProcessGroup | None,
        activation: Activation = "gelu",
        norm: str | None = "layer_norm",
        norm_eps: float = 1e-5,
        bias: bool = True,
        dropout: float = 0.0,
        layout: str | Layout = "contiguous",
        regather: bool = False,
        grad_reduction: str = "sum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_numbers("SequenceParallelMLP", SequenceParallelMLP.__init__.__annotations__, locals())
        check_group(group, _NAME)
        ranks = group_size(group)
        _require(model_dim >= 1, "model_dim", "at least 1", model_dim)
        fits = ffn_dim >= 1 and ffn_dim % ranks == 0
        _require(fits, "ffn_dim", f"a multiple of the {ranks} ranks", ffn_dim)
        check_choice(_NAME, "norm", norm, tuple(_NORMS))
        _require(0 <= dropout < 1, "dropout", "in [0, 1)", dropout)
        check_layout(layout, _require)
        check_choice(_NAME, "grad_reduction", grad_reduction, _REDUCTIONS)
        self.activation, self.gated = resolve_activation(activation, None, _NAME)
        self.model_dim, self.ffn_dim, self.dropout = model_dim, ffn_dim, dropout
        self.layout, self.regather, self.grad_reduction = layout, regather, grad_reduction
        self._group = GroupHandle(group)
        where = torch.get_default_device() if device is None else device
        self.norm = _NORMS[norm](model_dim, norm_eps, device=where, dtype=dtype)
        up_dim = (2 if self.gated else 1) * (ffn_dim // ranks)
        self._up_name = "gate_up_proj" if self.gated else "up_proj"
        # On the meta device `nn.Linear` draws nothing. A draw of this rank's part would make the
        # state of the generator depend on P.
        up = nn.Linear(model_dim, up_dim, bias, "meta", dtype).to_empty(device=where)
        down = nn.Linear(ffn_dim // ranks, model_dim, bias, "meta", dtype).to_empty(device=where)
        self.add_module(self._up_name, up)
        self.down_proj = down
        first = group_rank(group) * (ffn_dim // ranks)
        columns = range(first, first + ffn_dim // ranks)
        reduction: Literal["mean", "sum"] = "sum" if grad_reduction == "sum" else "mean"
        rows = Placement("tp", group, columns, ffn_dim, 0, 1 + self.gated, False, reduction)
        declare_placement(up, rows)
        declare_placement(down, dataclasses.replace(rows, dim=1, blocks=1), ["weight"])
        self.reset_parameters()

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The ranks that share a sequence and the two layers."""
        return self._group.group

    @property
    def tp_sharded(self) -> tuple[str, ...]:
        """Names of the parameters that are divided over the ranks."""
        names = [f"{self._up_name}.weight", f"{self._up_name}.bias", "down_proj.weight"]
        return tuple(name for name in names if name in dict(self.named_parameters()))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the whole weights as `nn.Linear` does, and keep this rank's part of them.

        Biases become 0, so that the bias that every rank holds is equal even if seeds differ.
        """
        if isinstance(self.norm, nn.LayerNorm | nn.RMSNorm):
            self.norm.reset_parameters()
        for linear in (self._up, self.down_proj):
            weight, bound = local_part(linear.weight), 1 / math.sqrt(linear.weight.shape[1])
            whole = weight.new_empty(linear.weight.shape).uniform_(-bound, bound)
            weight.copy_(placements(linear)["weight"].part_of(whole))
            if linear.bias is not None:
                local_part(linear.bias).zero_()

    @property
    def _up(self) -> nn.Linear:
        up = self.get_submodule(self._up_name)
        assert isinstance(up, nn.Linear)
        return up

    def load_whole_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load this rank's parts from the state dict of a module of one process (`group=None`).

        Args:
            state_dict: `state_dict()` of such a module, or `whole_state_dict()` of a module on any
                number of ranks.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs. The module is unchanged.
        """
        own = self.state_dict(keep_vars=True)
        found = f"a difference in {sorted(set(own) ^ set(state_dict))}"
        same = set(own) == set(state_dict)
        _require(same, "state_dict", f"of the names {sorted(own)}", found)
        for name, whole in state_dict.items():
            shape = list(own[name].shape)
            _require(list(whole.shape) == shape, name, f"of shape {shape}", list(whole.shape))
        self.load_state_dict(state_dict)

    @torch.no_grad()
    def whole_state_dict(self) -> dict[str, Tensor]:
        """The whole parameters, on every rank. Every rank must call this method."""
        return {name: tensor.clone() for name, tensor in full_state_dict(self).items()}

    def forward(
        self,
        x: Tensor,
        *,
        seq_len: int | None = None,
        layout: str | Layout | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Run this rank's positions through the block.

        At every call the ranks first compare their arguments in one small message. An argument that
        is invalid on one rank raises an error on all ranks.

        NOTE: device-to-host sync in that message, with more than one rank.

        Args:
            x: `[..., L, D]`, this rank's positions.
            seq_len: S; None if all shards have the same length, S = L P. For another S the shards
                are uneven, with the lengths of the layout.
            layout: replaces the layout of the module. A `Layout` also determines S.
            seed: seed of the dropout; None draws one from torch's generator.

        Returns:
            `[..., L, D]`.

        Raises:
            ValueError: on every rank, if an argument is invalid on any rank or differs between
                ranks, or if lengths do not match the layout.
            RankFailureError: a rank died or did not answer; the message names it.
        """
        made = self._agreed_layout(x, self.layout if layout is None else layout, seq_len, seed)
        batch = math.prod(x.shape[:-2])
        shards = Shards(self.tp_group, tuple(batch * size for size in made.sizes), _NAME)
        factor = 1.0
        if self.grad_reduction == "mean":
            factor /= group_size(self.tp_group)
        rows_nD = as_autocast(self._normed(x, factor).reshape(-1, self.model_dim))
        up, down = self._up, self.down_proj
        weights = [
            _with_scaled_grad(p if p is None else local_part(p), factor)
            for p in (up.weight, up.bias, down.weight, down.bias)
        ]
        w_up, b_up, w_down, b_down = (None if w is None else as_autocast(w) for w in weights)
        # The gathered rows are saved for the backward pass, unless `regather` is set.
        hidden_NF: Tensor = _ColumnParallel.apply(rows_nD, w_up, b_up, shards, not self.regather)
        hidden_NF = run_activation(
            hidden_NF, self.activation, gated=self.gated, layout="concatenated"
        )
        y_nD: Tensor = _RowParallel.apply(hidden_NF, w_down, b_down, shards)
        if self.training and self.dropout > 0:
            y_nD = self._dropped(y_nD, batch, made, seed)
        return y_nD.view(x.shape)

    if TYPE_CHECKING:
        __call__ = forward

    def _check_input(self, x: Tensor, seed: int | None) -> None:
        # `forward` reads the parameters of these submodules, and does not call them. A module of
        # another class, such as a LoRA layer, would be ignored without an error.
        kinds = {"norm": (nn.LayerNorm, nn.RMSNorm, nn.Identity), "down_proj": (nn.Linear,)}
        for name, kind in {**kinds, self._up_name: (nn.Linear,)}.items():
            part, rule = self.get_submodule(name), " or ".join(f"nn.{k.__name__}" for k in kind)
            # The message has the whole type, because the LoRA layer of PEFT is also named Linear.
            _require(isinstance(part, kind), name, f"an {rule}", type(part))
        _require(isinstance(x, Tensor), "x", "a tensor", type(x).__name__)
        fits = x.dim() >= 2 and x.shape[-1] == self.model_dim
        _require(fits, "x", f"of shape [..., L, {self.model_dim}]", list(x.shape))
        weight = self.down_proj.weight
        _require(x.device == weight.device, "x", f"on {weight.device}", x.device)
        _require(x.dtype in DTYPES, "x", f"one of {DTYPES}", x.dtype)
        if autocast_dtype(x.device) is None:
            _require(x.dtype == weight.dtype, "x", f"{weight.dtype} like the weights", x.dtype)
        if seed is not None:
            check_integer(_NAME, "seed", seed)
            _require(-(1 << 63) <= seed < 1 << 63, "seed", "a 64-bit integer", seed)

    def _agreed_layout(
        self, x: Tensor, given: str | Layout, seq_len: int | None, seed: int | None
    ) -> Layout:
        """Compare a call over the ranks, and return its layout."""
        group, ranks = self.tp_group, group_size(self.tp_group)
        with Agreement(_NAME, group, self.down_proj.weight.device) as agreement:
            self._check_input(x, seed)
            check_layout(given, _require)
            length = x.shape[-2]
            if seq_len is None:
                seq_len = given.seq_len if isinstance(given, Layout) else length * ranks
            made = make_layout(given, seq_len, ranks)
            told = agreement.compare(self._facts(x, given, seq_len), values=[length])
        check_lengths(made, [row[0] for row in told], _NAME, group)
        return made

    def _facts(self, x: Tensor, layout: str | Layout, seq_len: int) -> dict[str, object]:
        """Name to value of facts that have to be equal on every rank."""
        return {
            "seq_len (by default P times the shard)": seq_len,
            "the rows of x beside the sequence": math.prod(x.shape[:-2]),
            "the dtype of x": x.dtype,
            "autocast": autocast_dtype(x.device),
            "layout": layout,
            # All options are a single fact, so that they fit into the first message.
            "options": {
                "model_dim": self.model_dim,
                "ffn_dim": self.ffn_dim,
                **told_option("activation", self.activation),
                "gated": self.gated,
                "norm": type(self.norm).__name__,
                "norm_eps": getattr(self.norm, "eps", None),
                "bias": self.down_proj.bias is not None,
                "dropout": self.dropout,
                "training": self.training,
                "regather": self.regather,
                "grad_reduction": self.grad_reduction,
            },
            "gradients wanted": (
                [p.requires_grad for p in (x, *self.parameters())],
                torch.is_grad_enabled(),
            ),
        }

    def _normed(self, x: Tensor, factor: float) -> Tensor:
        norm = self.norm
        if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            return x
        parameters = [norm.weight, getattr(norm, "bias", None)]
        weight, bias = _with_summed_grads(
            self.tp_group, [_with_scaled_grad(p, factor) for p in parameters]
        )
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, (self.model_dim,), weight, bias, norm.eps)
        return F.rms_norm(x, (self.model_dim,), weight, norm.eps)

    def _dropped(self, y_nD: Tensor, batch: int, layout: Layout, seed: int | None) -> Tensor:
        if seed is None:
            seed = draw_seed(self.dropout)
        positions_L = layout.positions(group_rank(self.tp_group), y_nD.device)
        starts_B = torch.arange(batch, device=y_nD.device) * layout.seq_len
        rows_n = (starts_B[:, None] + positions_L).flatten()
        # Draws depend only on the seed and on the numbers of row and column. The backward pass
        # repeats them, so that no mask is saved.
        drop = functools.partial(_dropped, p=self.dropout, seed=seed, token_idx_n=rows_n)
        return linear_map(y_nD, drop, drop)

    def extra_repr(self) -> str:
        """Options for `repr`."""
        return (
            f"model_dim={self.model_dim}, ffn_dim={self.ffn_dim}, activation={self.activation!r}, "
            f"ranks={group_size(self.tp_group)}, dropout={self.dropout}, regather={self.regather}"
        )


def _weight_grad(grad_NM: Tensor, x_NK: Tensor) -> Tensor:
    return grad_NM.mT @ x_NK


class _ColumnParallel(torch.autograd.Function):
    """All-gather of the rows, then the product with this rank's rows of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, shards: Shards, keep: bool
    ) -> Tensor:
        x_ND = shards.gathered(x_nD)
        ctx.save_for_backward(x_ND if keep else x_nD, weight_FD)
        ctx.shards, ctx.keep = shards, keep
        return F.linear(x_ND, weight_FD, bias_F)

    @staticmethod
    @refuse_second_derivative("SequenceParallelMLP")
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight_FD = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        gather = None
        if of_weight and not ctx.keep:
            gather = start_all_gather(kept, ctx.shards)
        scatter = start_reduce_scatter(grad_NF @ weight_FD, ctx.shards) if of_x else None
        # The gradients of the parameters are computed while the gradient of x is underway.
        grad_bias = grad_NF.sum(0) if of_bias else None
        grad_weight = None
        if of_weight:
            grad_weight = _weight_grad(grad_NF, kept if gather is None else gather.wait())
        grad_x = None if scatter is None else scatter.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _RowParallel(torch.autograd.Function):
    """The product with this rank's columns of the weight, then reduce-scatter and the bias.

    The backward pass gathers the gradient of all rows, so that every rank computes the whole
    gradient of the bias without a sum over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, shards: Shards
    ) -> Tensor:
        ctx.save_for_backward(x_NF, weight_DF)
        ctx.shards = shards
        y_nD = shards.reduced(x_NF @ weight_DF.mT)
        return y_nD if bias_D is None else y_nD + bias_D

    @staticmethod
    @refuse_second_derivative("SequenceParallelMLP")
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor | None, ...]:
        x_NF, weight_DF = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_ND = ctx.shards.gathered(grad_nD)
        grad_x = grad_ND @ weight_DF if of_x else None
        grad_weight = _weight_grad(grad_ND, x_NF) if of_weight else None
        return grad_x, grad_weight, grad_ND.sum(0) if of_bias else None, None


def _dropped(x_nD: Tensor, p: float, seed: int, token_idx_n: Tensor) -> Tensor:
    state = torch.tensor([seed, 0, 0, 0], device=x_nD.device)
    drawn_nD = routing_uniform(state, *x_nD.shape, stream=_DROPOUT_STREAM, token_idx=token_idx_n)
    return (x_nD / (1 - p)).masked_fill_(drawn_nD < p, 0)


def _with_summed_grads(
    group: ProcessGroup | None, parameters: list[Tensor | None]
) -> list[Tensor | None]:
    """Parameters that are applied to this rank's rows, with gradients summed over all rows."""
    trained = [p for p in parameters if p is not None and p.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return parameters

    def summed(grad_N: Tensor) -> Tensor:
        # The all-reduce runs in float32. In bfloat16 it would round every partial sum, and cost the
        # gradient half of its digits.
        wide_N = grad_N.to(torch.promote_types(grad_N.dtype, torch.float32), copy=True)
        return all_reduce_(wide_N, group, operation="SequenceParallelMLP backward").to(grad_N.dtype)

    # The parameters are concatenated so that their gradients take one all-reduce.
    row_N = linear_map(torch.cat([p.reshape(-1) for p in trained]), lambda same: same, summed)
    parts = iter(row_N.split([p.numel() for p in trained]))
    return [next(parts).view_as(p) if p is not None and p.requires_grad else p for p in parameters]


def _with_scaled_grad(x: Tensor | None, factor: float) -> Tensor | None:
    """Return x, whose gradient is then multiplied by `factor`."""
    if x is None or factor == 1.0:
        return x
    return linear_map(x, lambda same: same, lambda grad: grad * factor)
