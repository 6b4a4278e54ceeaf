"""The counts of a step for the global-batch balance loss.

Shapes: E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.agreement import agree
from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.groups import group_size
from moe_ext.nn.balance import GlobalCounts
from moe_ext.nn.moe_layer import MoELayer


def reset_token_counts(model: nn.Module) -> None:
    """Begin a step: layers with `Balance("global_batch")` forget the tokens of the last one.

    Args:
        model: any module.
    """
    for counts in _global_counts(model).values():
        counts.reset()


@contextlib.contextmanager
def count_tokens(model: nn.Module) -> Iterator[None]:
    """Count the tokens of a whole step before its training passes.

    Inside, run the model forward on every micro-batch of the step, in training mode; it runs
    without gradients. The training passes that follow, as many, then know the counts of the step
    from the first one on, and the mean over ranks and micro-batches of their gradients is that of
    one batch of all tokens, whatever their order, with activation checkpointing or without. It
    costs one more forward pass of each micro-batch, and one all-reduce a group.

    Dropout draws the same numbers in both, where nothing else draws in between and the training
    passes come in the same order: the states of the generators are put back at the end.

    Args:
        model: a module with layers of `Balance("global_batch")`; a stage of a pipeline counts its
            own.

    Raises:
        ValueError: the model has no such layer, or, on every rank, ranks ran different numbers of
            passes.
        RuntimeError: a layer saw no pass in training mode.
        RankFailureError: a rank died or did not answer.

    One device-to-host synchronisation at the end.
    """
    counts = _global_counts(model)
    if not counts:
        raise ValueError(
            "count_tokens: expected model to have a MoELayer with balance=Balance('global_batch'), "
            "got none"
        )
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
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


def _global_counts(model: nn.Module) -> dict[str, GlobalCounts]:
    return {
        name: module.global_counts
        for name, module in model.named_modules()
        if isinstance(module, MoELayer) and module.global_counts is not None
    }


def _complete(counts: dict[str, GlobalCounts]) -> None:
    """Sum over the groups, and be ready for as many training passes."""
    # NOTE: device-to-host sync: the number of passes is compared on the host.
    passes = torch.stack([count.total[-1].cpu() for count in counts.values()]).tolist()
    for name, number in zip(counts, passes, strict=True):
        if number == 0:
            raise RuntimeError(
                f"count_tokens: expected a forward pass in training mode of layer {name!r}, got "
                "none"
            )
    by_group: dict[ProcessGroup, list[GlobalCounts]] = {}
    for count, number in zip(counts.values(), passes, strict=True):
        count.num_passes = count.passes_left = number
        count.state = "complete"
        if group_size(count.group) > 1:
            assert count.group is not None
            by_group.setdefault(count.group, []).append(count)
    for group, members in by_group.items():
        device = members[0].total.device
        facts = {f"the passes of layer {i}": member.num_passes for i, member in enumerate(members)}
        agree("count_tokens", facts, None, group, device)
        totals = torch.cat([member.total for member in members])
        with naming_failed_ranks(group, "count_tokens"):
            dist.all_reduce(totals, group=group)
        pieces = totals.split([member.total.shape[0] for member in members])
        for member, piece in zip(members, pieces, strict=True):
            member.total.copy_(piece)
