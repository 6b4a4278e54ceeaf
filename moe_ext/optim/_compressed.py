"""What the optimizers that communicate themselves share: agreement, dense means, errors, state."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from moe_ext.compression.agreement import resolve
from moe_ext.distributed.groups import check_group, group_ranks
from moe_ext.optim._agreement import Named, agree_on_step
from moe_ext.optim._arguments import check_betas, check_expert_axis, check_positive, label
from moe_ext.optim._compressed_mean import (
    CompressedMean,
    Ranks,
    all_owed,
    owes,
    ranks_in,
    sum_in_place,
)
from moe_ext.optim._steps import run_closure

_BUCKET_NUMEL = 25 * 2**18


@dataclass
class Entry:
    """A trained parameter within a step; `grad` is None where no rank has one."""

    parameter: nn.Parameter
    group_index: int
    label: str
    ranks: Ranks
    grad: Tensor | None = None
    active: bool = True


def _unless_it_fails(load: Callable[..., None]) -> Callable[..., None]:
    """Put back what an optimizer had where loading a state raises."""

    @functools.wraps(load)
    def run(self: CompressedOptimizer, saved: Any) -> None:
        names = ("state", "param_groups", "_made", "_frozen", "_means")
        kept = {name: getattr(self, name) for name in names}
        try:
            load(self, saved)
        except BaseException:
            self.__dict__.update(kept)
            raise

    return run


class CompressedOptimizer(Optimizer, ABC):
    """Base of OneBitAdam, OneBitLamb and ZeroOneAdam."""

    _op = ""

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
                self._op, named, self._frozen, self.steps_taken, self._process_group, first=first
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

    def _is_apart(self, entry: Entry) -> bool:
        """Whether a parameter has other values on each rank now."""
        return bool(self.state.get(entry.parameter, {}).get("apart", False))

    def _this_rank(self) -> tuple[int, ...]:
        return (torch.distributed.get_rank(),) if self._process_group is not None else (0,)

    def _clip(self, entries: list[Entry], *, local: bool) -> None:
        """Scale gradients to max_grad_norm, replacing them in the entries."""
        max_norm = self.defaults["max_grad_norm"]
        grads = [entry.grad for entry in entries if entry.grad is not None]
        if max_norm == 0 or not grads or local == self._is_dense():
            return
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2)))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for entry in entries:
            if entry.grad is not None:
                entry.grad = entry.grad * scale

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
                _average(self._op, run, dtype)

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

    def _made_means(self) -> list[tuple[CompressedMean, list[Entry]]]:
        """As `_flat_means`, none before the first compressed step."""
        return self._flat_means() if self._means else []

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

    # -- state

    def flush(self) -> None:
        """Bring what all ranks owe into the moments, by one dense all-reduce of it, on all ranks.

        Afterwards nothing is owed, and the state is that of any rank: save it, and go on with any
        number of ranks.

        Raises:
            RankFailureError: a rank died or did not answer.
        """
        with torch.no_grad():
            for mean, members in self._made_means():
                owed = mean.mean_error(self._op)
                for entry, error in zip(members, owed, strict=True):
                    self.state[entry.parameter]["exp_avg"].add_(error)
                mean.clear_errors()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: of torch's form, with what this rank owes.

        ``state[i]["worker_error"]`` belongs to parameter i; ``compression`` holds the errors of
        this rank's shard. Save it on every rank, or call `flush` and save it on one.
        """
        found = super().state_dict()
        found["state"] = {index: dict(state) for index, state in found["state"].items()}
        for group in found["param_groups"]:
            group.pop("exp_avg_mask", None)
        numbers = self._numbers()
        servers = []
        for mean, members in self._made_means():
            ids = [numbers[id(entry.parameter)] for entry in members]
            for position, index in enumerate(ids):
                state = found["state"].setdefault(index, {})
                state["worker_error"] = mean.worker_views[position].clone()
                if position in mean.touched:
                    state["touched_rows"] = mean.touched[position].clone()
            servers.append(
                {
                    "rank": mean.rank,
                    "world_size": mean.size,
                    "parameters": ids,
                    "server_error": mean.server_M.clone(),
                }
            )
        found["compression"] = {"block": self._block, "servers": servers}
        return found

    @_unless_it_fails
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state that this rank saved, or any rank after `flush`.

        States of Adam or of a flushed optimizer fit any number of ranks. For states that owe
        something to another number of ranks see `load_rank_states`.

        Raises:
            ValueError: the state owes something and is of another rank or number of ranks;
                nothing has changed.
        """
        saved = state_dict.get("compression", {"block": self._block, "servers": []})
        self._load_shared(state_dict)
        self._means = {}
        owing = any(owes(state_dict, server) for server in saved["servers"])
        if not owing and not self._is_between(state_dict):
            self._load_rows(state_dict, saved["servers"])
            return
        means = self._flat_means()
        numbers = self._numbers()
        if len(saved["servers"]) != len(means):
            raise ValueError(
                f"{self._op}: expected a state with the errors of {len(means)} groups of ranks, "
                f"got {len(saved['servers'])}"
            )
        for server, (mean, members) in zip(saved["servers"], means, strict=True):
            ids = [numbers[id(entry.parameter)] for entry in members]
            if (server["rank"], server["world_size"]) != (mean.rank, mean.size):
                raise ValueError(
                    f"{self._op}: expected the state of rank {mean.rank} of {mean.size}, got that "
                    f"of rank {server['rank']} of {server['world_size']}; call flush before "
                    "saving, or load_rank_states with the states of all ranks"
                )
            if server["parameters"] != ids or saved["block"] != self._block:
                raise ValueError(
                    f"{self._op}: expected a state of blocks of {self._block} of parameters {ids}, "
                    f"got blocks of {saved['block']} of {server['parameters']}"
                )
            mean.server_M.copy_(server["server_error"])
            for view, index in zip(mean.worker_views, ids, strict=True):
                view.copy_(state_dict["state"][index]["worker_error"])
        self._load_rows(state_dict, saved["servers"])

    @_unless_it_fails
    def load_rank_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the states of all ranks of a run with another number of ranks.

        Rank j takes over what ranks j, j + P', ... of the old run owe, times P' / P: what the mean
        over ranks is owed stays the same.

        Args:
            states: what `state_dict` returned on each rank, in the order of ranks.

        Raises:
            ValueError: the states are not those of all ranks, each once, in order.
        """
        saved = [state["compression"]["servers"] for state in states]
        for rank, servers in enumerate(saved):
            for server in servers:
                if (server["rank"], server["world_size"]) != (rank, len(states)):
                    raise ValueError(
                        f"{self._op}: expected state {rank} of {len(states)} to be that of rank "
                        f"{rank} of {len(states)}, got rank {server['rank']} of "
                        f"{server['world_size']}"
                    )
        if any(self._is_between(state) for state in states):
            raise ValueError(
                f"{self._op}: expected states of synchronised ranks, got some from between two "
                "synchronisations; call flush before saving"
            )
        self._load_shared(states[0])
        self._means = {}
        if saved[0]:
            numbers = self._numbers()
            for mean, members in self._flat_means():
                ids = [numbers[id(entry.parameter)] for entry in members]
                mine = range(mean.rank, len(states), mean.size)
                for rank in mine:
                    owed = all_owed(states[rank], saved[rank])
                    for view, index in zip(mean.worker_views, ids, strict=True):
                        view.add_(owed[index].to(view), alpha=mean.size / len(states))
        self._load_rows(states[0], saved[0])

    def _is_between(self, state_dict: dict[str, Any]) -> bool:
        """Whether ranks differ in more than errors, so that only their own state fits them."""
        return False

    def _load_shared(self, state_dict: dict[str, Any]) -> None:
        """All but the errors."""
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        private = ("worker_error", "touched_rows")
        plain = {
            index: {key: value for key, value in state.items() if key not in private}
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": plain})
        numbers = {index: p for p, index in self._by_number()}
        for index, state in plain.items():
            for key, value in state.items():
                if key == "step":
                    self.state[numbers[index]][key] = int(value)
                elif isinstance(value, Tensor):
                    # torch casts to the type of the parameter, which may be shorter.
                    dtype = torch.promote_types(value.dtype, torch.float32)
                    self.state[numbers[index]][key] = value.detach().to(
                        numbers[index].device, dtype, copy=True
                    )
        for group, mask in zip(self.param_groups, masks, strict=True):
            # Those of torch and DeepSpeed count in the state of each parameter.
            steps = [self.state[p].get("step", 0) for p in group["params"] if p in self.state]
            group.setdefault("step", int(max(steps, default=0)))
            for name, value in self._options.items():
                group.setdefault(name, value)
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._made = []
        self._entries()
        # A rank that alone has loaded would send another message than those that have not.
        self._compared = False

    def _load_rows(self, state_dict: dict[str, Any], servers: Sequence[dict[str, Any]]) -> None:
        if not servers:
            return
        numbers = self._numbers()
        for mean, members in self._flat_means():
            for position, touched_R in mean.touched.items():
                # A parameter may be new: frozen until now.
                state = state_dict["state"].get(numbers[id(members[position].parameter)], {})
                if "touched_rows" in state:
                    touched_R.copy_(state["touched_rows"])
            mean.refresh()

    def _by_number(self) -> list[tuple[nn.Parameter, int]]:
        flat = [p for group in self.param_groups for p in group["params"]]
        return [(p, index) for index, p in enumerate(flat)]

    def _numbers(self) -> dict[int, int]:
        """Id of a parameter to its number in a state of torch's form."""
        return {id(p): index for p, index in self._by_number()}


def _average(op: str, run: list[Entry], dtype: torch.dtype) -> None:
    size = ranks_in(run[0].ranks)
    parts = [
        torch.zeros_like(e.parameter, dtype=torch.float32) if e.grad is None else e.grad
        for e in run
    ]
    if size > 1:
        flat = torch.cat([part.reshape(-1) for part in parts]).div_(size).to(dtype)
        sum_in_place(flat, run[0].ranks, op)
        pieces = flat.float().split([part.numel() for part in parts])
        parts = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    for entry, part in zip(run, parts, strict=True):
        entry.grad = part
