"""What the optimizers that communicate themselves share: agreement, dense and compressed means."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext.compression.agreement import resolve
from moe_ext.distributed.groups import check_group, group_ranks
from moe_ext.optim._agreement import Named, agree_on_step
from moe_ext.optim._arguments import check_betas, check_expert_axis, check_positive, label
from moe_ext.optim._compressed_mean import (
    CompressedMean,
    Ranks,
    mean_over_ranks,
)
from moe_ext.optim._compressed_state import CompressedState, Entry
from moe_ext.optim._steps import run_closure

_BUCKET_NUMEL = 25 * 2**18


class CompressedOptimizer(CompressedState):
    """Base of OneBitAdam, OneBitLamb and ZeroOneAdam."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        group: ProcessGroup | None,
        block: int,
        communication_data_type: torch.dtype | None,
    ) -> None:
        check_group(group, self._op, name="group")
        if block not in (64, 128, 256, 512, 1024):
            raise ValueError(
                f"{self._op}: expected block to be a power of two from 64 to 1024, got {block}"
            )
        if communication_data_type not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{self._op}: expected communication_data_type to be None, float32, bfloat16 or "
                f"float16, got {communication_data_type}"
            )
        # torch adds entries of its own to `defaults`.
        self._options = dict(defaults)
        self._process_group = resolve(group, self._op)
        self._block, self._wire_dtype = block, communication_data_type
        # By parameter group: a process group can be neither compared nor saved with the options.
        self._ranks: list[Ranks] = []
        self._made: list[Entry] = []
        self._frozen: list[Named] = []
        self._compared = False
        self._means: dict[int, tuple[CompressedMean, list[int]]] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own; before the first step."""
        if self._made:
            raise ValueError(f"{self._op}: expected all groups to be added before the first step")
        param_group = dict(param_group)
        ranks = param_group.pop("process_group", None)
        if ranks != "self":
            check_group(ranks, self._op, name="process_group")
        group = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay", "max_grad_norm"):
            check_positive(self._op, name, group[name])
        check_betas(self._op, group["betas"])
        if ranks is not None and group["max_grad_norm"] > 0:
            raise ValueError(
                f"{self._op}: expected max_grad_norm to be 0 with a process_group, since norms "
                f"differ between its groups, got {group['max_grad_norm']}"
            )
        if group["max_grad_norm"] != self.defaults["max_grad_norm"]:
            raise ValueError(
                f"{self._op}: expected max_grad_norm of a group to be that of the optimizer "
                f"({self.defaults['max_grad_norm']}), got {group['max_grad_norm']}"
            )
        param_group.setdefault("step", 0)
        super().add_param_group(param_group)
        self._ranks.append(self._process_group if ranks is None else ranks)
        check_expert_axis(self._op, self.param_groups[-1], len(self.param_groups) - 1)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, on all ranks.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            ValueError: on every rank, with nothing changed: a gradient of any rank is NaN or
                infinite, or steps or parameters differ between ranks.
            TypeError: on every rank, with nothing changed: a parameter is a DTensor or of a type
                that is not supported, or a gradient is sparse.
            RankFailureError: a rank died or did not answer; parameters and moments are as before.
        """
        loss = run_closure(closure)
        with torch.no_grad():
            entries = self._agreed_entries()
            if entries:
                self._clip(entries, local=True)
                self._take_step(entries)
                for group in self.param_groups:
                    group["step"] += 1
        return loss

    @abstractmethod
    def _take_step(self, entries: list[Entry]) -> None:
        """Reduce, and change moments and parameters."""

    @property
    def steps_taken(self) -> int:
        """Number of steps since the start of the training."""
        return int(self.param_groups[0]["step"])

    # -- gradients

    def _entries(self) -> list[Entry]:
        """All trained parameters, in an order that does not change."""
        if not self._made:
            found = [
                Entry(parameter, group_index, label(group, group_index, index), ranks)
                for group_index, (group, ranks) in enumerate(
                    zip(self.param_groups, self._ranks, strict=True)
                )
                for index, parameter in enumerate(group["params"])
            ]
            self._made = [entry for entry in found if entry.parameter.requires_grad]
            others = [entry for entry in found if not entry.parameter.requires_grad]
            self._frozen = [Named(entry.parameter, entry.label, None) for entry in others]
        return self._made

    def _agreed_entries(self) -> list[Entry]:
        """The parameters with this rank's gradients in float32, once all ranks have agreed."""
        first = not self._compared
        entries = self._entries()
        if not entries:
            return []
        named = []
        for entry in entries:
            shared = entry.ranks is self._process_group and not self._is_apart(entry)
            own = isinstance(entry.ranks, ProcessGroup)
            ranks = group_ranks(entry.ranks) if own else None  # type: ignore[arg-type]
            named.append(
                Named(entry.parameter, entry.label, None if shared else ranks or self._this_rank())
            )
        try:
            active = agree_on_step(
                self._op,
                named,
                self._frozen,
                self.steps_taken,
                self._process_group,
                options=self._told_options() if first else None,
            )
        except Exception:
            if first:
                self._made = []
            raise
        self._compared = True
        for entry, has in zip(entries, active, strict=True):
            grad = entry.parameter.grad
            entry.active = has
            entry.grad = None if grad is None else grad.float()
        return entries

    def _told_options(self) -> str:
        """What must be equal on all ranks, or their messages or parameters are not."""
        groups = [{n: group[n] for n in self._options} for group in self.param_groups]
        for group in groups:
            group["lr"] = float(group["lr"])
            group["betas"] = tuple(group["betas"])
        return f"{self._block} {self._wire_dtype} {self._schedule()} {groups}"

    @abstractmethod
    def _schedule(self) -> tuple[int, ...]:
        """Which step does what, as far as that is not an option of groups."""

    def _is_apart(self, entry: Entry) -> bool:
        """Whether a parameter has other values on each rank now."""
        return bool(self.state.get(entry.parameter, {}).get("apart", False))

    def _this_rank(self) -> tuple[int, ...]:
        return (torch.distributed.get_rank(),) if self._process_group is not None else (0,)

    def _clip(self, entries: list[Entry], *, local: bool) -> None:
        """Scale gradients to max_grad_norm, replacing them in the entries."""
        scale = None if local == self._is_dense() else self._clip_factor(entries)
        for entry in entries:
            if entry.grad is not None and scale is not None:
                entry.grad = entry.grad * scale

    def _clip_factor(self, entries: list[Entry]) -> Tensor | None:
        """What makes the norm of the gradients max_grad_norm at most, None without a bound."""
        max_norm = self.defaults["max_grad_norm"]
        grads = [entry.grad for entry in entries if entry.grad is not None]
        if max_norm == 0 or not grads:
            return None
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2)))
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    @abstractmethod
    def _is_dense(self) -> bool:
        """Whether the next step sends gradients as they are."""

    def _average_gradients(self, entries: list[Entry]) -> None:
        """Replace the gradients of active entries by their means over ranks."""
        buckets: dict[tuple[int, torch.dtype], list[list[Entry]]] = {}
        for entry in entries:
            if not entry.active:
                continue
            key = (id(entry.ranks), self._wire_dtype or entry.parameter.dtype)
            runs = buckets.setdefault(key, [[]])
            if sum(e.parameter.numel() for e in runs[-1]) >= _BUCKET_NUMEL:
                runs.append([])
            runs[-1].append(entry)
        for (_, dtype), runs in buckets.items():
            for run in runs:
                parts = [
                    torch.zeros_like(e.parameter, dtype=torch.float32) if e.grad is None else e.grad
                    for e in run
                ]
                means = mean_over_ranks(parts, run[0].ranks, self._op, dtype=dtype)
                for entry, mean in zip(run, means, strict=True):
                    entry.grad = mean

    # -- compressed means

    def _flat_means(self) -> list[tuple[CompressedMean, list[Entry]]]:
        """The flat tensors of entries, one for each group of ranks and device; made once."""
        if not self._means:
            by_ranks: dict[tuple[int, torch.device], list[int]] = {}
            for index, entry in enumerate(self._entries()):
                if self._is_compressed(entry):
                    key = (id(entry.ranks), entry.parameter.device)
                    by_ranks.setdefault(key, []).append(index)
            for members in by_ranks.values():
                chosen = [self._entries()[index] for index in members]
                mean = CompressedMean([e.parameter for e in chosen], chosen[0].ranks, self._block)
                self._means[members[0]] = (mean, members)
        made = self._entries()
        return [(mean, [made[i] for i in members]) for mean, members in self._means.values()]

    def _is_compressed(self, entry: Entry) -> bool:
        frozen = not self.param_groups[entry.group_index].get("non_freeze", False)
        return frozen and entry.parameter.numel() > 0

    def _reduce(self, means: Sequence[tuple[CompressedMean, list[Entry]]]) -> None:
        """Reduce what is in the views, all or none."""
        saved = [(mean, mean.snapshot()) for mean, _ in means[:-1]]
        try:
            for mean, members in means:
                masks = {
                    index: self.param_groups[entry.group_index]["exp_avg_mask"]
                    for index, entry in enumerate(members)
                    if "exp_avg_mask" in self.param_groups[entry.group_index]
                }
                mean.set_masks(masks)
                mean.note_local_rows(mean.views, self._op)
                mean.reduce([i for i, entry in enumerate(members) if self._is_idle(entry)])
        except BaseException:
            for mean, errors in saved:
                mean.restore(errors)
            raise

    def _is_idle(self, entry: Entry) -> bool:
        """Whether a step leaves a parameter and its moments alone."""
        return not entry.active

    def _moments(self, entry: Entry, names: Sequence[str]) -> list[Tensor]:
        """Buffers of a parameter in float32, made of zeros at first."""
        state = self.state[entry.parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(entry.parameter, dtype=torch.float32)
        return [state[name] for name in names]
