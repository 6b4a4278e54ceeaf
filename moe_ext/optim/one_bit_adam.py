"""1-bit Adam: momentum that is sent as signs after the variance is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext._checks import check_numbers
from moe_ext.optim._arguments import deepspeed_options
from moe_ext.optim._compressed import CompressedOptimizer
from moe_ext.optim._compressed_mean import reduce_all
from moe_ext.optim._entries import (
    Entry,
    alike,
    average_gradients,
    clip,
    clip_factor,
    mean_over_ranks,
)
from moe_ext.optim._sliced import move_moments
from moe_ext.optim._variance import (
    block_squares,
    fill_zeros,
    follow_squares,
    roots,
    scale_blocks,
)


class OneBitAdam(CompressedOptimizer):
    r"""AdamW that averages over ranks itself, with one bit per element after ``freeze_step``.

    The first ``freeze_step`` steps average uncompressed gradients and are AdamW. Afterwards the
    variance v is frozen. Every rank updates the momentum by its own gradient and sends it as signs
    with a scale per block, keeping the error for the next step:

    .. math::
        m_r = \beta_1 \bar m + (1 - \beta_1) g_r,\quad
        \bar m = \mathrm{mean}_r\, C(m_r + e_r),\quad
        w \leftarrow (1 - \gamma \lambda) w - \gamma \frac{\bar m}{\sqrt{v} + \epsilon}

    The freeze fixes the ratios of v within a block, but not its size. Every ``variance_interval``
    steps ranks average the squares of their gradients, one number per block. The running mean of
    these squares decays like v, and v is scaled by its growth. Steps thus keep the right size if
    gradients grow or shrink after the freeze. The scaling begins after eight such exchanges.
    ``variance_interval=0`` is the algorithm of the paper.

    Do not reduce the gradients otherwise: use the plain module (or `ddp.no_sync()`), made from the
    same seed on every rank. A compressed step sends numel / 8 bytes of signs and 4 numel / block of
    scales in each of two rounds. If the warm-up is a share w of all steps, the volume is
    :math:`w + (1 - w) / 16` of that of 16-bit gradients, plus the scales. An exchange of squares
    adds as much as the scales of one step. Parameters have the same bits on all ranks after every
    step.

    A decoded sign is never zero, so zeros are treated apart. Blocks of zeros (experts without
    tokens, unused rows) stay zero. Rows that share a block with other rows stay zero as long as
    they are zero on all ranks. A variance of zero counts as the mean of its tensor. Masks
    (``exp_avg_mask`` in a group, with DeepSpeed's meaning, flat or not) are therefore not needed.

    Args:
        params: parameters, or groups of them. A group may have ``process_group`` (the ranks
            that hold copies of its parameters, or "self"; see `moe_ext.optim.param_groups`),
            ``non_freeze=True`` (never compressed) and ``exp_avg_mask``.
        lr: :math:`\gamma`.
        freeze_step: steps before compression starts, 15 to 25 % of a training.
        bias_correction: correct m and v for starting at zero; the correction of v freezes with it.
        betas: decay of m and of v.
        eps: :math:`\epsilon`.
        eps_inside_sqrt: add :math:`\epsilon` to v, inside the root.
        weight_decay: :math:`\lambda`, decoupled.
        max_grad_norm: bound on the norm of all gradients, 0 for none. Before ``freeze_step`` it
            bounds the averaged gradients, afterwards the gradients of each rank.
        amsgrad: must be False.
        cuda_aware: ignored, as ``comm_backend_name`` and ``deepspeed`` are: the process group moves
            the data.
        comm_backend_name: ignored.
        variance_interval: steps between two exchanges of squares of gradients; 0 for none.
        deepspeed: ignored.
        group: ranks that train together; None is the default group, or this process alone.
        block: elements that share a scale, a power of two from 64 to 1024.
        communication_data_type: dtype of the gradients in the warm-up's all-reduce; None is that of
            the parameter.

    Raises:
        ValueError: an option is out of range.

    Moments are float32 for parameters of every dtype. Each step has one device-to-host
    synchronisation, to check that the gradients of all ranks are finite before anything changes.

    Reference: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed, 2021 (arXiv 2102.02888), algorithm 1.
    """

    _settings: tuple[str, ...] = ("freeze_step", "variance_interval", "_eps_inside_sqrt")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        *,
        variance_interval: int = 16,
        deepspeed: object = None,
        group: ProcessGroup | None = None,
        block: int = 256,
        communication_data_type: torch.dtype | None = None,
    ) -> None:
        check_numbers(
            self._op,
            OneBitAdam.__init__.__annotations__,
            locals(),
            ["freeze_step", "variance_interval"],
        )
        self.freeze_step, self.variance_interval = freeze_step, variance_interval
        self._eps_inside_sqrt = eps_inside_sqrt
        super().__init__(
            params,
            deepspeed_options(self._op, locals()),
            group=group,
            block=block,
            communication_data_type=communication_data_type,
        )

    def _is_dense(self) -> bool:
        return self.steps_taken < self.freeze_step

    def _take_step(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.make(("exp_avg", "exp_avg_sq"))
            state = entry.state
            state["var_steps"] = state.get("var_steps", state.setdefault("step", 0))
        is_dense = self._is_dense()
        compressed = [entry for entry in entries if entry.is_compressed and not is_dense]
        dense = [entry for entry in entries if is_dense or not entry.is_compressed]
        # All messages come before the first change of moments and parameters, so that a failed
        # message leaves both as they were.
        squares = self._mean_squares(entries)
        average_gradients(dense, self._op, self._halvings)
        if is_dense:
            clip(dense, self.defaults["max_grad_norm"])
        is_first = not self._means
        momenta = self._mean_momenta() if compressed else {}
        late = [e for e in compressed if is_first or not e.state["var_steps"]]
        if late:
            fill_zeros([entry.state["exp_avg_sq"] for entry in compressed])
        for entry in late:
            self._freeze_variance(entry)
        for entry, mean_S in squares:
            beta2 = entry.group["betas"][1] ** self.variance_interval
            growth_S = follow_squares(entry.state, mean_S, beta2)
            if growth_S is not None and not is_dense:
                scale_blocks(entry.state["exp_avg_sq"], growth_S, self._block)
        for group_index, group in enumerate(self.param_groups):
            members = [e for e in entries if e.group_index == group_index and e.active]
            self._update_moments(group, members, momenta)
            self._apply(group, members)

    def _freeze_variance(self, entry: Entry) -> None:
        """Fix the number of variance updates, at the first compressed step of a parameter."""
        entry.state["var_steps"] = entry.state["var_steps"] or max(1, self.steps_taken)

    def _mean_squares(self, entries: list[Entry]) -> list[tuple[Entry, Tensor]]:
        """Return the mean over ranks of each block's squares; empty in most steps.

        Only every `variance_interval`-th step exchanges them.
        """
        interval = self.variance_interval
        if not interval or (self.steps_taken + 1) % interval:
            return []
        # After the freeze `step` has clipped the gradients already. Before the freeze they are
        # clipped after averaging, so the squares are scaled here.
        max_norm = self.defaults["max_grad_norm"] if self._is_dense() else 0
        scale = clip_factor(entries, max_norm)
        found: list[tuple[Entry, Tensor]] = []
        for members in alike((e for e in entries if e.active and e.is_compressed), "device"):
            squares = [block_squares(e.part, e.grad, self._block) for e in members]
            if scale is not None:
                torch._foreach_mul_(squares, scale.square())
            means = mean_over_ranks(squares, members[0].ranks, self._op)
            found += zip(members, means, strict=True)
        return found

    def _mean_momenta(self) -> dict[int, Tensor]:
        """Reduce the new momentum of compressed entries; returned by `id` of the entry."""
        is_first, means = not self._means, self._flat_means()
        for mean in means:
            if is_first:
                mean.note_rows("exp_avg_sq")
            torch._foreach_copy_(mean.views, [entry.state["exp_avg"] for entry in mean.entries])
            for entry, view in mean.by_entry():
                entry.move_momentum(view)
        try:
            reduce_all(means, self._op)
        except BaseException:
            if is_first:
                self._means = []
            raise
        return {id(entry): view for mean in means for entry, view in mean.by_entry()}

    def _update_moments(
        self, group: dict[str, Any], entries: list[Entry], momenta: dict[int, Tensor]
    ) -> None:
        dense = [entry for entry in entries if id(entry) not in momenta]
        if dense:
            move_moments(
                [entry.state["exp_avg"] for entry in dense],
                [entry.state["exp_avg_sq"] for entry in dense],
                [entry.grad for entry in dense if entry.grad is not None],
                group["betas"],
            )
        for entry in dense:
            entry.state["var_steps"] += 1
        for entry in entries:
            if id(entry) in momenta:
                self._take_momentum(entry, momenta[id(entry)])
            entry.state["step"] += 1

    def _take_momentum(self, entry: Entry, momentum: Tensor) -> None:
        entry.state["exp_avg"].copy_(momentum)

    def _denominators(self, group: dict[str, Any], entries: list[Entry]) -> list[Tensor]:
        exp_avg_sqs = [entry.state["exp_avg_sq"] for entry in entries]
        steps = [entry.state["var_steps"] for entry in entries]
        return roots(group, exp_avg_sqs, steps, inside=self._eps_inside_sqrt)

    def _apply(self, group: dict[str, Any], entries: list[Entry]) -> None:
        if not entries:
            return
        lr, beta1 = float(group["lr"]), float(group["betas"][0])
        parameters, states = [e.part for e in entries], [e.state for e in entries]
        if group["weight_decay"] != 0:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        rates = [-lr] * len(entries)
        if group["bias_correction"]:
            rates = [-lr / (1 - beta1 ** state["step"]) for state in states]
        exp_avgs = [state["exp_avg"] for state in states]
        denominators = self._denominators(group, entries)
        if all(p.dtype == torch.float32 for p in parameters):
            torch._foreach_addcdiv_(parameters, exp_avgs, denominators, rates)
            return
        updates = torch._foreach_div(exp_avgs, denominators)
        for parameter, update, rate in zip(parameters, updates, rates, strict=True):
            parameter.add_(update, alpha=rate)
