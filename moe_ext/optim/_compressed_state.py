"""State of the optimizers that communicate themselves: saved, flushed, taken to other ranks."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from moe_ext.distributed.groups import group_size
from moe_ext.optim._agreement import Named
from moe_ext.optim._compressed_mean import CompressedMean, Ranks, all_owed, owes
from moe_ext.optim._names import by_name
from moe_ext.optim._rank_states import check_order, holders, members_of, shared_state


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
    def run(self: CompressedState, saved: Any) -> None:
        names = ("state", "param_groups", "_made", "_frozen", "_means")
        kept = {name: getattr(self, name) for name in names}
        try:
            load(self, saved)
        except BaseException:
            self.__dict__.update(kept)
            raise

    return run


class CompressedState(Optimizer, ABC):
    """Base of CompressedOptimizer: what is kept from step to step."""

    _op = ""
    _options: dict[str, Any]
    _block: int
    _made: list[Entry]
    _frozen: list[Named]
    _compared: bool
    _process_group: ProcessGroup | None
    _ranks: list[Ranks]
    _means: dict[int, tuple[CompressedMean, list[int]]]

    @abstractmethod
    def _entries(self) -> list[Entry]:
        """All trained parameters, in an order that does not change."""

    @abstractmethod
    def _flat_means(self) -> list[tuple[CompressedMean, list[Entry]]]:
        """The flat tensors of entries, one for each group of ranks and device; made once."""

    def _made_means(self) -> list[tuple[CompressedMean, list[Entry]]]:
        """As `_flat_means`, none before the first compressed step."""
        return self._flat_means() if self._means else []

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
        found["compression"] = {
            "block": self._block,
            "servers": servers,
            "members": self._members(),
        }
        return found

    @_unless_it_fails
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state that this rank saved, or any rank after `flush`.

        States of Adam or of a flushed optimizer fit any number of ranks. For states that owe
        something to another number of ranks see `load_rank_states`. Where both have names of
        parameters, states go by them.

        Raises:
            ValueError: the state owes something and is of another rank or number of ranks, or of
                another order of the parameters, or has lost what the ranks owe for their shards; or
                it is of parameters with other names. Nothing has changed.
        """
        state_dict = by_name(self._op, self.param_groups, state_dict)
        self._check_whole(state_dict)
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
                    f"got blocks of {saved['block']} of {server['parameters']}; what is owed goes "
                    "to another order by load_rank_states"
                )
            mean.server_M.copy_(server["server_error"])
            for view, index in zip(mean.worker_views, ids, strict=True):
                view.copy_(state_dict["state"][index]["worker_error"])
        self._load_rows(state_dict, saved["servers"])

    @_unless_it_fails
    def load_rank_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the states of all ranks of a run with another number of ranks.

        Rank j takes over what ranks j, j + P', ... of the old run owe, times P' / P: what the mean
        over ranks is owed stays the same. Experts, and what they owe, come from the old ranks that
        held the same ones: their replicas may be more or fewer, if they are divided over as many
        ranks as they were.

        Args:
            states: what `state_dict` returned on each rank, in the order of ranks.

        Raises:
            ValueError: the states are not those of all ranks, each once, in order; or experts were
                divided over another number of ranks. Nothing has changed.
        """
        states = [by_name(self._op, self.param_groups, state) for state in states]
        check_order(self._op, states)
        if any(self._is_between(state) for state in states):
            raise ValueError(
                f"{self._op}: expected states of synchronised ranks, got some from between two "
                "synchronisations; call flush before saving"
            )
        saved = [state["compression"]["servers"] for state in states]
        size = group_size(self._process_group)
        held_by = holders(self._op, states, self._members(), size)
        merged = shared_state(states, held_by)
        self._load_shared(merged)
        self._means = {}
        if saved[0]:
            numbers = self._numbers()
            for mean, members in self._flat_means():
                ids = [numbers[id(entry.parameter)] for entry in members]
                held = held_by[members[0].group_index]
                for rank in held[mean.rank :: mean.size]:
                    owed = all_owed(states[rank], saved[rank])
                    for view, index in zip(mean.worker_views, ids, strict=True):
                        view.add_(owed[index].to(view), alpha=mean.size / len(held))
        self._load_rows(merged, saved[0])

    def _check_whole(self, state_dict: dict[str, Any]) -> None:
        """Tools that know torch's form alone leave `compression` out."""
        owing = [
            index
            for index, state in state_dict["state"].items()
            if "worker_error" in state and bool(state["worker_error"].any())
        ]
        if owing and "compression" not in state_dict:
            raise ValueError(
                f"{self._op}: expected a state that owes something to hold `compression`, got one "
                f"without it that owes for parameter {owing[0]}; call flush before saving, or take "
                "`worker_error` out of it to give up what is owed"
            )

    def _members(self) -> list[list[int]]:
        """Of each parameter group: places of the ranks that share it."""
        return [members_of(ranks, self._process_group) for ranks in self._ranks]

    def _is_between(self, state_dict: dict[str, Any]) -> bool:
        """Whether ranks differ in more than errors, so that only their own state fits them."""
        return False

    def _load_shared(self, state_dict: dict[str, Any]) -> None:
        """All but the errors."""
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        private = ["worker_error", "touched_rows"]
        if state_dict.get("compression", {}).get("block", self._block) != self._block:
            # Means of other blocks: how far gradients grow is looked at anew.
            private += ["block_sq", "looks"]
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
