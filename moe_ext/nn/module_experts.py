"""Experts that are modules of any kind.

Shapes: N rows, D model, E experts, L local experts = E / size of the expert-parallel group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext._compile import outside_graphs
from moe_ext.comm.groups import GroupHandle, check_group, group_rank, group_size
from moe_ext.distributed.placement import Placement, declare_placement
from moe_ext.nn.experts import local_experts


class ModuleExperts(nn.ModuleList):
    """Any modules `[n, D] -> [n, D]` as the experts of a `MoELayer`, run one after the other.

    Every expert runs in every forward pass, on an empty tensor if no row is routed to it. Its
    parameters therefore always have gradients, and collectives inside experts run on all ranks.
    `GroupedExperts` is faster for feed-forward networks.

    Parameters have the names of a `ModuleList`: `0.weight`, `1.weight`, ... of the local experts.

    Args:
        experts: the L experts of this rank.
        ep_group: expert-parallel process group; rank r of P holds experts [r*E/P, (r+1)*E/P), and
            E = L * P.

    Raises:
        ValueError: there are no experts.
        TypeError: an expert is not a module.

    The host reads the number of each expert's rows once per forward pass, which synchronises with
    a CUDA device.
    """

    def __init__(
        self, experts: Iterable[nn.Module], *, ep_group: ProcessGroup | None = None
    ) -> None:
        check_group(ep_group, "ModuleExperts")
        modules = list(experts)
        if not modules:
            raise ValueError(
                "ModuleExperts: expected experts to hold at least one module, got none"
            )
        for index, module in enumerate(modules):
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"ModuleExperts: expected experts to be modules, got {module!r} at {index}"
                )
        super().__init__(modules)
        self._ep_group = GroupHandle(ep_group)
        self.num_experts = len(modules) * group_size(ep_group)
        for index, expert in enumerate(modules, self.first_expert):
            held = range(index, index + 1)
            place = Placement("ep", ep_group, held, self.num_experts, None, one_expert=True)
            declare_placement(expert, place)
        self.register_load_state_dict_pre_hook(_take_own)

    @classmethod
    def build(
        cls,
        make: Callable[[int], nn.Module],
        num_experts: int,
        *,
        ep_group: ProcessGroup | None = None,
    ) -> ModuleExperts:
        """Make this rank's experts from a function of the global index of an expert.

        Args:
            make: called for the experts of this rank only.
            num_experts: E, number of experts over all ranks.
            ep_group: expert-parallel process group.

        Raises:
            ValueError: E is not a positive multiple of the size of the group.
        """
        check_group(ep_group, "ModuleExperts")
        num_local = local_experts(num_experts, ep_group, "ModuleExperts")
        first = group_rank(ep_group) * num_local
        return cls((make(first + local) for local in range(num_local)), ep_group=ep_group)

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The expert-parallel group, or None if every expert is local."""
        return self._ep_group.group

    @property
    def num_local_experts(self) -> int:
        """L, the number of experts of this rank."""
        return len(self)

    @property
    def first_expert(self) -> int:
        """Global index of local expert 0."""
        return group_rank(self.ep_group) * len(self)

    def reset_parameters(self) -> None:
        """Call `reset_parameters` of every submodule that has it."""
        for module in self.modules():
            if module is not self and callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()  # type: ignore[operator]

    @outside_graphs
    def forward(self, rows_ND: Tensor, expert_offsets: Tensor) -> Tensor:
        """Run every row through its expert.

        Args:
            rows_ND: rows grouped by local expert, `[N, D]`.
            expert_offsets: `[L + 1]` int64; local expert l owns rows [offsets[l], offsets[l + 1]).

        Returns:
            `[N, D']`; rows of no expert are zero.

        Raises:
            ValueError: the offsets are not L + 1, or an expert changed the number of rows.
            TypeError: an expert did not return a tensor.
        """
        if expert_offsets.shape != (len(self) + 1,):
            raise ValueError(
                f"ModuleExperts: expected expert_offsets to be of shape ({len(self) + 1},), got "
                f"{tuple(expert_offsets.shape)}"
            )
        # NOTE: device-to-host sync, since each module is called with a slice of known size.
        bounds = expert_offsets.tolist()
        edges = [0, *bounds, rows_ND.shape[0]]
        # One `split` makes all slices. With a slice for each expert, autograd would make a gradient
        # of the size of all rows for each expert.
        pieces = rows_ND.split([last - first for first, last in itertools.pairwise(edges)])
        outputs = []
        for index, expert in enumerate(self):
            rows = pieces[index + 1]
            out = expert(rows)
            if not isinstance(out, Tensor):
                raise TypeError(
                    f"ModuleExperts: expected expert {index} to return a tensor, got "
                    f"{type(out).__name__}"
                )
            if out.dim() != 2 or out.shape[0] != rows.shape[0]:
                raise ValueError(
                    f"ModuleExperts: expected expert {index} to return {rows.shape[0]} rows, got "
                    f"shape {tuple(out.shape)}"
                )
            outputs.append(out)
        y = torch.cat(outputs)
        before, after = bounds[0], rows_ND.shape[0] - bounds[-1]
        return nn.functional.pad(y, (0, 0, before, after)) if before or after else y


def _take_own(
    experts: ModuleExperts, state_dict: dict[str, Any], prefix: str, *_arguments: object
) -> None:
    """Hook of `load_state_dict` that takes the experts of this rank from a state with all."""
    keys = [key for key in state_dict if key.startswith(prefix)]
    split = {key: key.removeprefix(prefix).partition(".") for key in keys}
    numbers = {key: int(number) for key, (number, _, _) in split.items() if number.isdigit()}
    if max(numbers.values(), default=0) < len(experts):
        return
    values = {key: state_dict.pop(key) for key in numbers}
    for key, number in numbers.items():
        if number in range(experts.first_expert, experts.first_expert + len(experts)):
            own = number - experts.first_expert
            state_dict[f"{prefix}{own}.{split[key][2]}"] = values[key]
