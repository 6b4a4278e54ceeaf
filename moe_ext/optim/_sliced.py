"""Base of the optimizers that look at norms of whole tensors or of each expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from moe_ext.optim._arguments import Trained, check_expert_axis, trained_parameters
from moe_ext.optim._names import by_name
from moe_ext.optim._shards import SliceNorms, check_placements, local_part
from moe_ext.optim._steps import run_closure


class SlicedOptimizer(Optimizer, ABC):
    """Base of LAMB, LARS and Adafactor."""

    _op = ""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        check_expert_axis(self._op, self.param_groups[-1], len(self.param_groups) - 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; by the names of the parameters, where both have names.

        Raises:
            ValueError: the state is of parameters with other names or sizes.
        """
        super().load_state_dict(by_name(self._op, self.param_groups, state_dict))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            RankFailureError: a rank that holds other shards died or did not answer; parameters
                and moments are as before.
        """
        loss = run_closure(closure)
        trained = trained_parameters(self._op, self.param_groups)
        for entry in trained:
            check_placements(self._op, entry.parameter, entry.grad, entry.label)
        slices = SliceNorms(
            [e.parameter for e in trained], [e.group["per_expert"] for e in trained]
        )
        self._take_step(trained, [local_part(entry.parameter) for entry in trained], slices)
        return loss

    @abstractmethod
    def _check_options(self, group: dict[str, Any]) -> None:
        """ValueError for options out of their range."""

    @abstractmethod
    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        """Change moments and weights, which are this rank's parts."""
