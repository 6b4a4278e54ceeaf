"""Load balancing without a loss, by a selection bias that follows the load.

Shapes: E experts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from moe_ext.comm import collectives
from moe_ext.comm.agreement import SummedOptions
from moe_ext.comm.groups import group_size
from moe_ext.nn.balance.quantile import balanced_bias
from moe_ext.nn.moe_layer import MoELayer

# Comparison of the options of an update over the ranks, by group.
_compared: weakref.WeakKeyDictionary[ProcessGroup, SummedOptions] = weakref.WeakKeyDictionary()


def update_selection_bias(
    model: nn.Module,
    *,
    rate: float = 1e-3,
    group: ProcessGroup | None = None,
    center: bool = False,
) -> int:
    r"""Raise the selection bias of experts below the mean load, and lower it for those above.

    .. math:: b_e \leftarrow b_e + \mathrm{rate} \cdot \mathrm{sign}(\bar c - c_e)

    with the choices :math:`c_e` of expert e since the last update, over all ranks of the group.
    A router with `bias_update="quantile"` does not use the rate. Its bias is

    .. math:: b_e \leftarrow q_e - \bar q, \quad
        q_e = \mathrm{quantile}_{K/E}\{\alpha_t - s_{te}\}_t

    with the (K+1)-th largest biased score :math:`\alpha_t` of each token. With this bias each
    expert would have had its share of the tokens, if the :math:`\alpha_t` had not changed. The
    quantile comes from a histogram of 1000 bins over all possible values, interpolated within a
    bin.

    Call it once per step, after the optimizer, or use `register_bias_update`. Layers count the
    choices of their training passes. Each token counts once, for any number of micro-batches, and
    with activation checkpointing too. The bias is in the state dict; the counts are not.

    Args:
        model: a module with a `MoELayer` whose router has a `selection_bias`. Each stage of a
            pipeline updates its own layers.
        rate: step of the bias, at least 0, in units of the scores; 0.001 in the papers. Only for
            routers with `bias_update="sign"`.
        group: the ranks whose tokens count, every rank that has data of its own; None for this rank
            alone, which then holds all experts. All ranks of the group call this, and get the same
            bias.
        center: subtract the mean from each bias afterwards, which changes no choice. A quantile is
            always centered.

    Returns:
        Number of routers updated.

    Raises:
        ValueError: the rate is out of its range; no router has a selection bias; or group is None,
            and experts are divided over ranks.
        RankFailureError: a rank died or did not answer.

    Makes one all-reduce for all layers of each `bias_update`, and no host synchronisation.

    Reference: Wang et al. 2024 (arXiv 2408.15664), algorithm 1; DeepSeek-V3 (arXiv 2412.19437),
    section 2.1.2. Quantile balancing: Su 2026 (kexue.fm/archives/11619); Kimi K3 technical report,
    section 2.3.3 and appendix D.
    """
    layers = _check(model, rate, group, "update_selection_bias")
    return _update(layers, rate, group, center, None)


def register_bias_update(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    rate: float = 1e-3,
    group: ProcessGroup | None = None,
    center: bool = False,
) -> RemovableHandle:
    """Call `update_selection_bias` after every step of an optimizer.

    A step that a `GradScaler` skips updates nothing; its tokens count in the next update.

    Args:
        optimizer: optimizer whose steps are followed by updates.
        model: see `update_selection_bias`.
        rate: see `update_selection_bias`.
        group: see `update_selection_bias`.
        center: see `update_selection_bias`.

    Returns:
        Handle whose `remove()` ends the updates.

    Raises:
        ValueError: as `update_selection_bias`.
    """
    layers = _check(model, rate, group, "register_bias_update")

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # `GradScaler` calls the step of a fused optimizer even after an overflow, and sets
        # `found_inf`, so that the optimizer changes nothing.
        _update(layers, rate, group, center, getattr(optimizer, "found_inf", None))

    return optimizer.register_step_post_hook(after_step)


def _check(
    model: nn.Module, rate: float, group: ProcessGroup | None, operation: str
) -> list[MoELayer]:
    if not 0 <= rate < math.inf:
        raise ValueError(f"{operation}: expected rate to be at least 0, got {rate}")
    layers = [
        module
        for module in model.modules()
        if isinstance(module, MoELayer)
        and isinstance(getattr(module.router, "selection_bias", None), Tensor)
    ]
    if not layers:
        raise ValueError(
            f"{operation}: expected model to have a MoELayer whose router has a selection_bias, "
            "got none"
        )
    groups = [getattr(layer.experts, "ep_group", None) for layer in layers]
    if group is None and max(map(group_size, groups)) > 1:
        raise ValueError(
            f"{operation}: expected group to be all ranks that see data, since ranks hold experts "
            "between them and route alike, got None"
        )
    return layers


def _bias(layer: MoELayer) -> Tensor:
    bias = layer.router.selection_bias
    assert isinstance(bias, Tensor)
    return bias


@torch.no_grad()
def _update(
    layers: list[MoELayer],
    rate: float,
    group: ProcessGroup | None,
    center: bool,
    skipped: Tensor | None,
) -> int:
    layers = _one_for_each_bias(layers)
    by_sign = [layer for layer in layers if layer.required_bias is None]
    by_quantile = [layer for layer in layers if layer.required_bias is not None]
    options = None
    if group is not None:
        options = _compared.setdefault(group, SummedOptions("update_selection_bias"))
        options.begin()
        options.now = {"rate": rate, "center": center}
    for layer, total_E in _summed(by_sign, "choices", group, options):
        bias = _bias(layer)
        # The difference is scaled by E to stay an integer. It is 0 for exactly the mean load.
        step_E = torch.sign(total_E.sum() - total_E * total_E.shape[0]).to(bias.dtype) * rate
        if center:
            step_E = step_E - (bias + step_E).mean()
        _set(layer, bias + step_E, skipped)
    for layer, total_EB in _summed(by_quantile, "required_bias", group):
        _set(layer, balanced_bias(total_EB, _bias(layer), layer.top_k), skipped)
    return len(layers)


def _one_for_each_bias(layers: list[MoELayer]) -> list[MoELayer]:
    """Return one layer per bias; add the counts of further layers with the same bias to it."""
    found: dict[int, MoELayer] = {}
    for layer in layers:
        first = found.setdefault(id(_bias(layer)), layer)
        for name in ("choices", "required_bias") if first is not layer else ():
            counts = getattr(layer, name)
            if counts is not None:
                getattr(first, name).add_(counts)
                counts.zero_()
    return [*found.values()]


def _summed(
    layers: list[MoELayer],
    counter: str,
    group: ProcessGroup | None,
    options: SummedOptions | None = None,
) -> Iterator[tuple[MoELayer, Tensor]]:
    """Yield each layer with its counter summed over the group; compare `options` if given."""
    if not layers:
        return
    counts = [getattr(layer, counter) for layer in layers]
    flat = [count.flatten() for count in counts]
    if options is not None:
        flat.append(options.marks(flat[0].dtype, flat[0].device))
    totals = torch.cat(flat)
    collectives.all_reduce_(totals, group, operation="update_selection_bias")
    if options is not None:
        assert group is not None
        totals, marks = totals[:-2], totals[-2:]
        options.check([marks], [[group]])
    pieces = totals.split([count.numel() for count in counts])
    for layer, count, piece in zip(layers, counts, pieces, strict=True):
        yield layer, piece.view_as(count)


def _set(layer: MoELayer, new_E: Tensor, skipped: Tensor | None) -> None:
    """Set the bias and reset the counters, unless the step was skipped."""
    bias = _bias(layer)
    for counts in (layer.choices, layer.required_bias):
        if counts is None:
            continue
        if skipped is None:
            counts.zero_()
        else:
            counts.mul_((skipped != 0).to(counts.device))
    bias.copy_(new_E if skipped is None else torch.where(skipped.to(bias.device) != 0, bias, new_E))
