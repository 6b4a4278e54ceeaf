"""Counts of tokens over the forward passes of a step, each token once.

Shapes: E experts, C counters.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext.comm import collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_size
from moe_ext.nn.torch_state import in_backward, moved
from moe_ext.ops.autograd import is_transformed

# Value of `loss_scale` until a user sets one, known by its identity.
UNSET_SCALE = float("1.0")

# Groups by id. An operator takes no process groups, so the id is passed, 0 for no group.
_groups: weakref.WeakValueDictionary[int, ProcessGroup] = weakref.WeakValueDictionary()


# This is an operator so that a compiled layer checks at run time whether it is being recomputed.
@torch.library.custom_op("moe_ext::_tally_once", mutates_args={"total_C"})
def add_once(total_C: Tensor, counts_C: Tensor, group: int) -> None:
    """Add counts, summed over a group, to a running total, unless a backward pass is running.

    Args:
        total_C: running total, `[C]` int64, in place.
        counts_C: `[C]` int64 of this forward pass.
        group: key of `_groups`, 0 for this rank alone.
    """
    if in_backward():
        return
    if group:
        counts_C = collectives.all_reduce_(counts_C.clone(), _groups[group], operation="Balance")
    total_C += counts_C


@add_once.register_fake
def _(total_C: Tensor, counts_C: Tensor, group: int) -> None:
    return None


class StepCounts:
    """Choices of each expert over the ranks and micro-batches of a step, for one layer.

    Attributes:
        total: `[E + 1]` int64: choices of each expert, then the number of forward passes; over the
            group once they are summed.
        state: "running" if each pass adds its own counts, "counting" inside `count_tokens`, or
            "complete" after `count_tokens` has counted all passes of the step.
        passes_left: number of training passes still to come on this rank, if complete.
        num_passes: number of passes counted on this rank.
        version: version counter of the router's weight in the first pass of a running count.
    """

    def __init__(
        self, num_experts: int, group: ProcessGroup | None, device: torch.device | str | None
    ) -> None:
        self.total = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self.group = group
        self._group_key = 0
        if group_size(group) > 1:
            assert group is not None
            self._group_key = id(group)
            _groups[self._group_key] = group
        self.state = "running"
        self.num_passes = 0
        self.passes_left = 0
        self.version: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCounts:
        return StepCounts(self.total.shape[0] - 1, self.group, self.total.device)

    def reset(self) -> None:
        """Begin a new step."""
        self.total.zero_()
        self.state = "running"
        self.num_passes = self.passes_left = 0
        self.version = None

    def begin(self, version: int) -> None:
        """Note the version of the router's weight. RuntimeError if the count has begun before."""
        if self.state == "running" and self.version is not None:
            raise RuntimeError(
                "MoELayer: expected moe_ext.nn.reset_token_counts(model) before the first pass of "
                "each step with Balance('global_batch'), got a pass after the router's weight has "
                "changed"
            )
        self.version = version

    def add(self, counts_E: Tensor) -> None:
        """Add the choices of one forward pass."""
        if self.state == "complete":
            if not torch.compiler.is_compiling() and not in_backward():
                self._use_up_a_pass()
            return
        # Inside `count_tokens` the counts are summed over the group once, after all micro-batches.
        group = 0 if self.state == "counting" else self._group_key
        add_once(self.total, torch.cat((counts_E, counts_E.new_ones(1))), group)

    def _use_up_a_pass(self) -> None:
        if self.passes_left == 0:
            raise RuntimeError(
                f"MoELayer: expected {self.num_passes} training passes after count_tokens counted "
                "as many, got another; count the tokens of each step anew"
            )
        self.passes_left -= 1


class CountingModule(nn.Module):
    """Base of the layer with its counters.

    Counters are not buffers, because `DistributedDataParallel` would overwrite them with those of
    rank 0.

    Attributes:
        choices: `[E]` int64, choices of each expert in training since the last bias update.
        required_bias: `[E, NUM_BINS]` int32, histograms of `balance.quantile` since the last bias
            update; None if the router's bias is updated in another way.
        counting: True inside `count_tokens`, where a pass only counts.
        global_counts: counts of the step; None if no loss needs them.
        loss_scale: factor on the losses that the layer injects.
    """

    router: nn.Module
    loss_scale: float | Tensor
    choices: Tensor
    required_bias: Tensor | None
    counting: bool
    global_counts: StepCounts | None

    def add_counters(
        self, num_experts: int, step: StepCounts | None, device: torch.device | str | None
    ) -> None:
        """Create the counters."""
        self.choices = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.required_bias = None
        self.counting = False
        self.global_counts = step
        self._version = -1

    def check_step(self) -> None:
        """Look for a pass that needs a call to `reset_token_counts` or `set_loss_scale`.

        Within a step the version counter of the router's weight stays the same, and an optimizer
        changes it.
        """
        if torch.compiler.is_compiling() or is_transformed():
            return
        for weight in self.router.parameters():
            if weight.requires_grad and weight.is_leaf:
                break
        else:
            return
        before, version, counts = self._version, weight._version, self.global_counts
        self.__dict__["_version"] = version
        if counts is not None and counts.version != version:
            counts.begin(version)
        if self.loss_scale is not UNSET_SCALE or version != before or weight.grad is None:
            return
        # NOTE: device-to-host sync, in passes that follow a backward pass of the same step.
        if not in_backward() and weight.grad.any():
            warnings.warn(
                "MoELayer: expected moe_ext.nn.set_loss_scale(model, 1 / n) where the gradients of "
                "n passes add up, since each pass injects its balance losses, got loss_scale=1.0 "
                "in the second pass of a step; set_loss_scale(model, 1.0) keeps the sum of all "
                "passes",
                stacklevel=2,
            )
            self.loss_scale = 1.0

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CountingModule:
        """Apply `fn` as `nn.Module` does, and move the counters to the same device."""
        super()._apply(fn, recurse)
        self._move_counters(fn)
        return self

    def _move_counters(self, fn: Callable[..., Any]) -> None:
        """Move the counters to the device to which `fn` of `_apply` moves them."""
        self.choices = moved(self.choices, fn)
        if self.required_bias is not None:
            self.required_bias = moved(self.required_bias, fn)
        if self.global_counts is not None:
            self.global_counts.total = moved(self.global_counts.total, fn)


def reset_token_counts(model: nn.Module) -> None:
    """Begin a step: layers with `Balance("global_batch")` reset their token counts.

    Args:
        model: any module.
    """
    for counts in _global_counts(model).values():
        counts.reset()


@contextlib.contextmanager
def count_tokens(model: nn.Module) -> Iterator[None]:
    """Count the tokens of a whole step before its training passes.

    Inside the context, run the model forward on every micro-batch of the step, in training mode. It
    runs without gradients. Then make the same number of training passes. All of them use the counts
    of the whole step, so that the mean of their gradients over ranks and micro-batches is that of
    one batch of all tokens. This holds for any order of passes, and with activation checkpointing.
    A further pass is refused, except in graphs of `torch.compile`, which do not count passes. The
    cost is one more forward pass of each micro-batch, and one all-reduce for each group.

    The random generators are restored at the end. Dropout therefore draws the same numbers in both
    passes of a micro-batch, if the order of the passes is the same and nothing else draws between.

    Args:
        model: module with layers of `Balance("global_batch")`. A pipeline stage counts its own
            layers.

    Raises:
        ValueError: the model has no such layer; or, on every rank, ranks ran different numbers of
            passes.
        RuntimeError: a layer had no pass in training mode.
        RankFailureError: a rank died or did not answer.

    NOTE: one device-to-host synchronisation at the end.
    """
    counts = _global_counts(model)
    if not counts:
        raise ValueError(
            "count_tokens: expected model to have a MoELayer with balance=Balance('global_batch'), "
            "got none"
        )
    layers = [module for module in model.modules() if isinstance(module, CountingModule)]
    devices = {count.total.device for count in counts.values() if count.total.is_cuda}
    for count in counts.values():
        count.reset()
        count.state = "counting"
    for layer in layers:
        layer.counting = True
    try:
        with torch.no_grad(), torch.random.fork_rng(list(devices)):
            yield
        _complete(counts)
    except BaseException:
        for count in counts.values():
            count.reset()
        raise
    finally:
        for layer in layers:
            layer.counting = False


def _global_counts(model: nn.Module) -> dict[str, StepCounts]:
    return {
        name: module.global_counts
        for name, module in model.named_modules()
        if isinstance(module, CountingModule) and module.global_counts is not None
    }


def _complete(counts: dict[str, StepCounts]) -> None:
    """Sum the counts over the groups, and set the number of training passes to come."""
    # NOTE: device-to-host sync, since the number of passes is compared on the host.
    passes = torch.stack([count.total[-1].cpu() for count in counts.values()]).tolist()
    by_group: dict[ProcessGroup, list[StepCounts]] = {}
    for count, number in zip(counts.values(), passes, strict=True):
        count.num_passes = count.passes_left = number
        count.state = "complete"
        if group_size(count.group) > 1:
            assert count.group is not None
            by_group.setdefault(count.group, []).append(count)
    for group, members in by_group.items():
        facts = {f"the passes of layer {i}": member.num_passes for i, member in enumerate(members)}
        Agreement("count_tokens", group, members[0].total.device).compare(facts)
        totals = torch.cat([member.total for member in members])
        collectives.all_reduce_(totals, group, operation="count_tokens")
        pieces = totals.split([member.total.shape[0] for member in members])
        for member, piece in zip(members, pieces, strict=True):
            member.total.copy_(piece)
    # Now on all ranks alike.
    for name, number in zip(counts, passes, strict=True):
        if number == 0:
            raise RuntimeError(
                f"count_tokens: expected a forward pass in training mode of layer {name!r}, got "
                "none"
            )
