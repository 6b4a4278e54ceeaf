"""0/1 Adam: ever rarer updates of the variance, local steps, and one-bit synchronisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext._checks import check_numbers, check_rule
from moe_ext.optim._arguments import deepspeed_options
from moe_ext.optim._compressed import CompressedOptimizer
from moe_ext.optim._compressed_mean import CompressedMean, reduce_all
from moe_ext.optim._entries import Entry, average_gradients, clip
from moe_ext.optim._variance import fillings, roots

_BUFFERS = ("exp_avg", "exp_avg_sq", "momentum_accumulator")


class ZeroOneAdam(CompressedOptimizer):
    r"""AdamW that sends one bit per element from the start, and later not in every step.

    Every rank r moves by its own momentum and adds up the distances. A synchronisation sends these
    sums as signs with a scale per block, and all ranks move by the mean sum instead:

    .. math::
        m_r \leftarrow \beta_1 m_r + (1 - \beta_1) g_r,\quad u_r \leftarrow u_r + \gamma m_r,\quad
        \bar u = \mathrm{mean}_r\, C(u_r + e_r)

    .. math::
        w \leftarrow w' - \frac{\bar u}{\sqrt{v} + \epsilon},\quad
        m_r \leftarrow \frac{\bar u}{\sum \gamma},\quad u_r \leftarrow 0

    with w' the weights of the last synchronisation (times the weight decay of the steps since).
    Up to step ``var_freeze_step`` every step synchronises. Steps whose number is a multiple of the
    variance interval instead average uncompressed gradients, for both moments. The interval doubles
    after every ``var_update_scaler`` of such steps. Afterwards v is frozen, and only steps whose
    number is a multiple of the local interval synchronise. This interval doubles after every
    ``local_step_scaler`` steps, up to ``local_step_clipper``.

    Between two synchronisations parameters differ between ranks: `synchronised` tells, and `flush`
    makes them equal. Gradients, zeros, process groups and masks are treated as by `OneBitAdam`.

    Args:
        params: as `OneBitAdam`.
        lr: :math:`\gamma`.
        bias_correction: correct m and v for starting at zero, v by the number of its updates.
        betas: decay of m and of v.
        eps: :math:`\epsilon`.
        eps_inside_sqrt: add :math:`\epsilon` to v, inside the root.
        weight_decay: decay of the weights, decoupled.
        max_grad_norm: as `OneBitAdam`; bounds the averaged gradients in a step that updates v.
        var_freeze_step: last step that may update v.
        var_update_scaler: updates of v between two doublings of the variance interval.
        local_step_scaler: steps between two doublings of the local interval.
        local_step_clipper: upper bound on the local interval.
        amsgrad: must be False.
        cuda_aware: ignored.
        comm_backend_name: ignored.
        deepspeed: ignored.
        group: as `OneBitAdam`.
        block: as `OneBitAdam`.
        communication_data_type: as `OneBitAdam`.

    Raises:
        ValueError: an option is out of range.

    Reference: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam,
    2022 (arXiv 2202.06009), algorithm 1 and section 6.
    """

    _settings = (
        *("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
        "_eps_inside_sqrt",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        *,
        deepspeed: object = None,
        group: ProcessGroup | None = None,
        block: int = 256,
        communication_data_type: torch.dtype | None = None,
    ) -> None:
        check_numbers(self._op, ZeroOneAdam.__init__.__annotations__, locals())
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        for name in self._settings[:-1]:
            value = getattr(self, name)
            check_rule(self._op, name, value, "an integer of at least 1", value >= 1)
        self._eps_inside_sqrt = eps_inside_sqrt
        # Version counters of parameters after the last local step, to notice writes by others.
        self._versions: dict[Tensor, int] = {}
        # The schedule is kept in the parameter groups, so that it is saved with the options.
        schedule = {"var_interval": 1, "var_counter": 0}
        schedule |= {"local_step_interval": 1, "local_step_counter": 0}
        super().__init__(
            params,
            deepspeed_options(self._op, locals()) | schedule,
            group=group,
            block=block,
            communication_data_type=communication_data_type,
        )

    @property
    def synchronised(self) -> bool:
        """True if parameters are equal on all ranks now."""
        return not any(entry.is_apart for entry in self._made)

    def _is_dense(self) -> bool:
        step = self.steps_taken + 1
        group = self.param_groups[0]
        return step <= self.var_freeze_step and step % group["var_interval"] == 0

    def _load_shared(self, state_dict: dict[str, Any], *, copy: bool = True) -> None:
        self._versions = {}
        super()._load_shared(state_dict, copy=copy)

    def _check_step(self, entries: list[Entry]) -> None:
        for entry in entries:
            # No version is known after a state was loaded between two synchronisations.
            version = self._versions.get(entry.parameter)
            if entry.is_apart and version not in (None, entry.part._version):
                raise ValueError(
                    f"{self._op}: expected parameters to be written by the optimizer alone between "
                    "two synchronisations, which takes ranks back to where they parted, got a "
                    f"write to {entry.label}; call flush, and write them after it"
                )
        super()._check_step(entries)

    def _take_step(self, entries: list[Entry]) -> None:
        for entry in entries:
            state = entry.state
            # A state of Adam has no `var_steps`: every step has updated v. A parameter that was
            # frozen until now has no state, and no updates.
            state.setdefault("var_steps", self.steps_taken if state else 0)
            entry.make(_BUFFERS)
            if "filling" not in state:
                state["filling"] = fillings([state["exp_avg_sq"]])[0]
        means = self._flat_means()
        if self._is_dense():
            average_gradients(entries, self._op, self._halvings)
            clip(entries, self.defaults["max_grad_norm"])
            self._dense_step(entries)
            for mean in means:
                mean.note_rows("exp_avg_sq")
            self._count("var", self.var_update_scaler)
            return
        step, first = self.steps_taken + 1, self.param_groups[0]
        kept = [entry for entry in entries if not entry.is_compressed]
        # All messages come before the first change of moments and parameters, so that a failed
        # message leaves both as they were.
        average_gradients(kept, self._op, self._halvings)
        is_local = step > self.var_freeze_step
        if not is_local or step % first["local_step_interval"] == 0:
            self._synchronise(means)
        else:
            self._local_step([e for e in entries if e.is_compressed and e.active])
        self._dense_step(kept)
        if is_local:
            self._count("local_step", self.local_step_scaler, self.local_step_clipper)

    def _count(self, name: str, scaler: int, most: int | None = None) -> None:
        """Double an interval after every `scaler` calls, up to `most`."""
        for group in self.param_groups:
            group[f"{name}_counter"] += 1
            if group[f"{name}_counter"] == scaler:
                group[f"{name}_counter"] = 0
                doubled = 2 * group[f"{name}_interval"]
                group[f"{name}_interval"] = doubled if most is None else min(doubled, most)

    def _rate(self, group: dict[str, Any]) -> float:
        """Return the learning rate over the bias correction of m: the factor on m in a step."""
        lr = float(group["lr"])
        if not group["bias_correction"]:
            return lr
        return float(lr / (1 - group["betas"][0] ** (self.steps_taken + 1)))

    def _dense_step(self, entries: list[Entry]) -> None:
        """Take a step of AdamW by averaged gradients; compression errors do not change."""
        moved = [entry for entry in entries if entry.active]
        for entry in moved:
            state, (beta1, beta2) = entry.state, entry.group["betas"]
            assert entry.grad is not None
            state["exp_avg"].lerp_(entry.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(entry.grad, entry.grad, value=1 - beta2)
            state["var_steps"] += 1
        seconds = [entry.state["exp_avg_sq"] for entry in entries]
        for entry, filling in zip(entries, fillings(seconds), strict=True):
            entry.state["filling"] = filling
        for entry in moved:
            entry.part.mul_(_decay(entry.group))
            self._move(entry, entry.state["exp_avg"] * self._rate(entry.group))

    def _local_step(self, entries: list[Entry]) -> None:
        """Take a step on this rank alone, and add its distance to `momentum_accumulator`."""
        for entry in entries:
            state, rate = entry.state, self._rate(entry.group)
            if not entry.is_apart:
                state["anchor"], state["decay"], state["apart"] = entry.part.clone(), 1.0, True
            exp_avg = state["exp_avg"]
            entry.move_momentum(exp_avg)
            state["momentum_accumulator"].add_(exp_avg, alpha=rate)
            state["lrs"] = state.get("lrs", 0.0) + rate
            state["decay"] *= _decay(entry.group)
            entry.part.mul_(_decay(entry.group))
            self._move(entry, exp_avg * rate)
            self._versions[entry.parameter] = entry.part._version

    def _synchronise(self, means: list[CompressedMean]) -> None:
        """Take a step, and replace the local steps since the last synchronisation by their mean."""
        for mean in means:
            for entry, view in mean.by_entry():
                state = entry.state
                if entry.active:
                    entry.move_momentum(view.copy_(state["exp_avg"]))
                    view.mul_(self._rate(entry.group)).add_(state["momentum_accumulator"])
                else:
                    view.copy_(state["momentum_accumulator"])
        reduce_all(means, self._op)
        for mean in means:
            moved = [(entry, view) for entry, view in mean.by_entry() if not entry.is_idle]
            for entry in mean.entries:
                if entry.active:
                    state = entry.state
                    state["decay"] = state.get("decay", 1.0) * _decay(entry.group)
                    state["lrs"] = state.get("lrs", 0.0) + self._rate(entry.group)
            self._pay(moved)

    def _pay(self, owed: Sequence[tuple[Entry, Tensor]]) -> None:
        """Move from the weights of the last synchronisation by the ranks' mean distance."""
        for entry, mean in owed:
            state = entry.state
            if state.pop("apart", False):
                entry.part.copy_(state.pop("anchor"))
            entry.part.mul_(state.pop("decay", 1.0))
            self._move(entry, mean)
            # `lrs` sums the rates of the steps in which this parameter had a gradient. If all these
            # rates were zero, the momentum stays, because the distance does not depend on it.
            rates = state.pop("lrs", 0.0)
            if rates > 0:
                state["exp_avg"].copy_(mean).div_(rates)
            state["momentum_accumulator"].zero_()

    def _move(self, entry: Entry, distance: Tensor) -> None:
        """Subtract a distance divided by the root of v from the parameter."""
        state, second = entry.state, entry.state["exp_avg_sq"]
        second = torch.where(second > 0, second, state["filling"])
        steps = [max(1, state["var_steps"])]
        root = roots(entry.group, [second], steps, inside=self._eps_inside_sqrt)[0]
        entry.part.sub_(distance / root)


def _decay(group: dict[str, Any]) -> float:
    """Return the factor on the weights by a step's weight decay."""
    return 1 - float(group["lr"]) * float(group["weight_decay"])
