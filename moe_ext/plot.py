"""Pictures of routing and pipelines (matplotlib), and a writer for TensorBoard; both are optional.

Shapes: L layers, N steps, T tokens, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from moe_ext._files import replacing
from moe_ext.nn.model_layers import moe_layers
from moe_ext.nn.routing_record import RoutingRecord
from moe_ext.pipeline import Action, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 400


@contextlib.contextmanager
def _installed(operation: str, package: str) -> Iterator[None]:
    """Context for an import of a package that may not be installed."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{operation}: expected {package} to be installed, try `pip install {package}` "
            f"({error})"
        ) from error


def summary_writer(folder: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return a `torch.utils.tensorboard.SummaryWriter` for `moe_ext.nn.log_metrics`.

    Args:
        folder: folder of the event files.
        **kwargs: passed on to the writer, such as `purge_step`.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    with _installed("summary_writer", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(os.fspath(folder), **kwargs)


def _figure(operation: str, **kwargs: Any) -> Figure:
    """Return a figure without pyplot: no window, no global state, any backend."""
    with _installed(operation, "matplotlib"):
        from matplotlib.figure import Figure
    return Figure(layout="constrained", **kwargs)


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 120) -> None:
    """Write a figure as PNG, in one step: a killed process leaves the old picture or the new."""
    with replacing(path) as file:
        figure.savefig(file, dpi=dpi, format="png")


def _saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    if path is not None:
        save_figure(figure, path)
    return figure


def expert_load(
    load: nn.Module | RoutingRecord | Mapping[str, Any] | Tensor,
    path: str | os.PathLike[str] | None = None,
    *,
    steps: Sequence[int] | None = None,
    title: str = "Expert load",
) -> Figure:
    """Draw how many tokens each expert got, relative to a balanced load.

    A balanced load is white, a larger one red, a smaller one blue. From twice the balanced load on
    the red is full.

    Args:
        load: one forward pass, drawn as layers by experts: a model (`metrics` of its layers), a
            `RoutingRecord` (added up over its passes), or a mapping of layer name to counts `[E]`.
            Or a history, drawn as a panel for each layer, steps by experts: a mapping of layer name
            to counts `[N, E]`, or one tensor `[N, L, E]`. Counts may be tensors, arrays or lists;
            each row is scaled by itself.
        path: PNG to write, None for none.
        steps: N step numbers of a history; 0 to N - 1 by default.
        title: title of the picture.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no layer, counts have another shape, or ``steps`` does not have a
            number for each row.
    """
    counts = _counts_by_layer(load)
    dims = {value.dim() for value in counts.values()}
    if not counts or dims not in ({1}, {2}) or any(v.numel() == 0 for v in counts.values()):
        shapes = {name: tuple(value.shape) for name, value in counts.items()}
        raise ValueError(
            "expert_load: expected load to hold counts [E] of each layer, or [N, E] of each, got "
            f"{shapes}"
        )
    relative = {name: _relative(value) for name, value in counts.items()}
    figure = _draw_layers(relative, title) if dims == {1} else _draw_history(relative, steps, title)
    return _saved(figure, path)


def _counts_by_layer(load: Any) -> dict[str, Tensor]:
    if isinstance(load, RoutingRecord):
        counts: dict[str, Tensor] = {}
        for key in load:
            idx, num_experts = load[key].topk_idx.cpu().long(), load[key].num_experts
            total = torch.bincount(idx[idx >= 0], minlength=num_experts).double()
            counts[key.layer] = counts.get(key.layer, torch.zeros(num_experts)) + total
        return counts
    if isinstance(load, nn.Module):
        metrics: dict[str, Any] = {name: m.metrics for name, m in moe_layers(load).items()}
        load = {name: of["num_tokens_per_expert"] for name, of in metrics.items() if of}
    if isinstance(load, Mapping):
        return {name: _as_counts(value) for name, value in load.items()}
    history_NLE = _as_counts(load)
    if history_NLE.dim() != 3:
        raise ValueError(
            "expert_load: expected load to be a tensor [N, L, E], a mapping, a model or a "
            f"RoutingRecord, got shape {tuple(history_NLE.shape)}"
        )
    return {f"layer {i}": history_NLE[:, i] for i in range(history_NLE.shape[1])}


def _as_counts(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().cpu().double()


def _relative(counts: Tensor) -> Tensor:
    """Divide counts by those of a balanced load. A row without a token stays 0."""
    return counts * counts.shape[-1] / counts.sum(dim=-1, keepdim=True).clamp(min=1)


_STYLE: dict[str, Any] = {
    "aspect": "auto",
    "interpolation": "nearest",
    "cmap": "RdBu_r",
    "vmin": 0,
    "vmax": 2,
}


def _draw_layers(load: dict[str, Tensor], title: str) -> Figure:
    """Draw layers by experts in one panel; experts that a layer does not have stay grey."""
    rows = pad_sequence(list(load.values()), batch_first=True, padding_value=float("nan"))
    num_experts = rows.shape[1]
    size = (min(14.0, 3.5 + 0.28 * num_experts), 1.6 + 0.34 * len(load))
    figure = _figure("expert_load", figsize=size)
    axes = figure.add_subplot()
    axes.set_facecolor("lightgray")
    image = axes.imshow(rows.tolist(), **_STYLE)
    axes.set_yticks(range(len(load)), list(load))
    axes.set(xlabel="expert", title=title)
    axes.locator_params(axis="x", integer=True)
    if num_experts * len(load) <= 160:
        for y, row in enumerate(rows.tolist()):
            for x, value in enumerate(row):
                if value == value:
                    color = "white" if abs(value - 1) > 0.7 else "black"
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, size=7)
    figure.colorbar(image, ax=axes, label="load (1 = balanced)", extend="max")
    return figure


def _draw_history(load: dict[str, Tensor], steps: Sequence[int] | None, title: str) -> Figure:
    """Draw a panel for each layer: experts by steps."""
    lengths = {value.shape[0] for value in load.values()}
    steps = list(range(max(lengths))) if steps is None else list(steps)
    if lengths != {len(steps)}:
        raise ValueError(
            f"expert_load: expected steps to number the {sorted(lengths)} rows of load, got "
            f"{len(steps)}"
        )
    figure = _figure("expert_load", figsize=(8, 1 + 1.4 * len(load)))
    panels = figure.subplots(len(load), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, load_NE) in zip(panels, load.items(), strict=True):
        image = axes.imshow(
            _mean_columns(load_NE).T.tolist(),
            extent=(steps[0], steps[-1] + 1, load_NE.shape[1] - 0.5, -0.5),
            **_STYLE,
        )
        axes.set(ylabel=f"{name}\nexpert")
        axes.locator_params(axis="y", integer=True)
    panels[-1].set(xlabel="step")
    figure.colorbar(image, ax=list(panels), label="load (1 = balanced)", extend="max")
    figure.suptitle(title)
    return figure


def _mean_columns(load_NE: Tensor) -> Tensor:
    """Average neighbouring steps, so that a picture has at most `MAX_COLUMNS` columns."""
    if load_NE.shape[0] <= MAX_COLUMNS:
        return load_NE
    return torch.stack([part.mean(dim=0) for part in load_NE.tensor_split(MAX_COLUMNS)])


def routing_flow_counts(
    record: RoutingRecord, first: str, second: str, *, step: int = 0, micro_batch: int = 0
) -> Tensor:
    """Count the tokens that went to expert i of one layer and to expert j of another.

    Args:
        record: record of both layers, in the same forward pass.
        first: name of a layer.
        second: name of a later layer.
        step: number of the step.
        micro_batch: number of the forward pass.

    Returns:
        `[E_first, E_second]` int64; a token counts once for each pair of its choices.

    Raises:
        ValueError: a layer is not on record in this pass, or the layers saw different numbers of
            tokens.
    """
    recorded = record.layers(step=step, micro_batch=micro_batch)
    for name in (first, second):
        if name not in recorded:
            raise ValueError(
                f"routing_flow: expected layers on record at step {step}, micro-batch "
                f"{micro_batch}, one of {recorded}, got {name!r}"
            )
    one, two = (record[step, micro_batch, name] for name in (first, second))
    if one.topk_idx.shape[0] != two.topk_idx.shape[0]:
        raise ValueError(
            f"routing_flow: expected {first} and {second} to have as many tokens, got "
            f"{one.topk_idx.shape[0]} and {two.topk_idx.shape[0]}"
        )
    from_TKK = one.topk_idx.cpu().long()[:, :, None].expand(-1, -1, two.topk_idx.shape[1])
    to_TKK = two.topk_idx.cpu().long()[:, None, :].expand_as(from_TKK)
    both = (from_TKK >= 0) & (to_TKK >= 0)
    pair = from_TKK[both] * two.num_experts + to_TKK[both]
    flat = torch.bincount(pair, minlength=one.num_experts * two.num_experts)
    return flat.view(one.num_experts, two.num_experts)


def routing_flow(
    record: RoutingRecord,
    path: str | os.PathLike[str] | None = None,
    *,
    step: int = 0,
    micro_batch: int = 0,
    layers: Sequence[str] | None = None,
    max_flows: int = 400,
    title: str = "Where the tokens of each expert go next",
) -> Figure:
    """Draw where the tokens of each expert go in the next layer.

    Each layer is a column of bars, with a bar for each expert, as tall as its load. A band between
    two bars is as wide as the number of tokens that went to both experts. Its colour is that of the
    expert that it comes from.

    Args:
        record: record of the layers, in one forward pass.
        path: PNG to write, None for none.
        step: number of the step.
        micro_batch: number of the forward pass.
        layers: names of the layers, in order; all of the pass by default.
        max_flows: largest number of bands between two layers. The widest ones are drawn.
        title: title of the picture.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are fewer than two layers, or one is not on record in this pass.
    """
    names = list(layers or record.layers(step=step, micro_batch=micro_batch))
    if len(names) < 2:
        raise ValueError(
            f"routing_flow: expected at least 2 layers on record at step {step}, micro-batch "
            f"{micro_batch}, got {names}"
        )
    flows = [
        routing_flow_counts(record, a, b, step=step, micro_batch=micro_batch).double()
        for a, b in zip(names, names[1:], strict=False)
    ]
    most = max(max(flow.shape) for flow in flows)
    size = (min(18.0, 2.2 + 2.0 * len(names)), min(12.0, max(4.5, 1.5 + 0.16 * most)))
    figure = _figure("routing_flow", figsize=size)
    axes = figure.add_subplot()
    shares = [flow / flow.sum().clamp(min=1) for flow in flows]
    loads = [share.sum(dim=1) for share in shares] + [shares[-1].sum(dim=0)]
    # Layers may mask different tokens. The flows into and out of an inner layer then differ, and
    # its bars have the larger of the two.
    for place in range(1, len(names) - 1):
        loads[place] = torch.maximum(loads[place], shares[place - 1].sum(dim=0))
    bars = [_stack(load) for load in loads]
    for place, share in enumerate(shares):
        _draw_bands(axes, place, share, bars[place][1], bars[place + 1][1], max_flows)
    for place, (height, top) in enumerate(bars):
        _draw_bars(axes, place, height, top, least_label=0.13 / size[1])
    axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
    axes.set_yticks([])
    axes.set(xlim=(-0.25, len(names) - 0.75), ylim=(1.02, -0.02), title=title)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    return _saved(figure, path)


_BAR_WIDTH = 0.14
_GAPS = 0.12


def _stack(load_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return heights and upper edges of a column's bars, expert 0 on top, with gaps between."""
    heights = load_E * (1 - _GAPS) / load_E.sum().clamp(min=1e-12)
    gap = _GAPS / max(1, load_E.shape[0] - 1)
    return heights, heights.cumsum(0) - heights + gap * torch.arange(load_E.shape[0])


def _color(expert: int, num_experts: int) -> Any:
    from matplotlib import colormaps

    return colormaps["turbo"](0.06 + 0.88 * expert / max(1, num_experts - 1))


def _draw_bars(
    axes: Any, place: int, height_E: Tensor, top_E: Tensor, *, least_label: float
) -> None:
    num_experts, heights = height_E.shape[0], height_E.tolist()
    colors = [_color(e, num_experts) for e in range(num_experts)]
    axes.bar([place] * num_experts, heights, _BAR_WIDTH, top_E.tolist(), color=colors, linewidth=0)
    for expert, (height, top) in enumerate(zip(heights, top_E.tolist(), strict=True)):
        if height > least_label:
            red, green, blue, _ = colors[expert]
            color = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "white"
            place_of_text = {"ha": "center", "va": "center_baseline"}
            axes.text(place, top + height / 2, str(expert), color=color, size=7, **place_of_text)


def _draw_bands(
    axes: Any, place: int, share: Tensor, left_E: Tensor, right_E: Tensor, max_flows: int
) -> None:
    """Draw bands, stacked at both ends by the order of the experts at their other ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    widths = share * (1 - _GAPS)
    starts = left_E[:, None] + widths.cumsum(1) - widths
    ends = right_E[None, :] + widths.cumsum(0) - widths
    order = widths.flatten().argsort(descending=True)[:max_flows]
    x0, x1 = place + _BAR_WIDTH / 2, place + 1 - _BAR_WIDTH / 2
    middle = (x0 + x1) / 2
    codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
    for flat in order.tolist():
        source, target = divmod(flat, widths.shape[1])
        width = widths[source, target].item()
        if width == 0:
            break
        a, b = starts[source, target].item(), ends[source, target].item()
        points = [(x0, a), (middle, a), (middle, b), (x1, b), (x1, b + width)]
        points += [(middle, b + width), (middle, a + width), (x0, a + width), (x0, a)]
        color = _color(source, widths.shape[0])
        axes.add_patch(PathPatch(Curve(points, codes), facecolor=color, alpha=0.45, linewidth=0))


_COLORS = {"F": "#6fa8dc", "B": "#f6b26b", "I": "#ffd966", "W": "#93c47d"}
_MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of weights",
}


def pipeline_timeline(
    timelines: Timeline | Mapping[str, Timeline],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw the times at which each rank of a pipeline runs its actions.

    Each timeline is a panel, each rank a line, and each action a box with the number of its
    micro-batch, and of its slice from the second one on. Forward passes are blue, and backward
    passes orange. Gradients of inputs alone are yellow, and gradients of weights green, as the
    legend says. A rank's second stage is darker than its first. Parts that run at once stand above
    each other. Idle time stays white.

    Args:
        timelines: a result of `moe_ext.pipeline.simulate`, or several by name.
        path: PNG to write, None for none.
        title: title of the picture.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no timeline.
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    if not named:
        raise ValueError("pipeline_timeline: expected timelines to be at least one, got none")
    lines = [len(timeline.spans) for timeline in named.values()]
    figure = _figure("pipeline_timeline", figsize=(12, 0.7 + sum(0.6 + 0.24 * n for n in lines)))
    panels = figure.subplots(
        len(named), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": lines}
    )[:, 0]
    for axes, (name, timeline) in zip(panels, named.items(), strict=True):
        _draw_timeline(axes, timeline)
        found = f"{timeline.makespan:g} long, {timeline.bubble_share:.1%} idle"
        axes.set_title(f"{name}: {found}" if name else found, size=9, loc="left")
    panels[-1].set(
        xlabel="time, in the unit of the costs", xlim=(0, max(t.makespan for t in named.values()))
    )
    figure.suptitle(title)
    _name_colors(figure, list(named.values()))
    return _saved(figure, path)


def _name_colors(figure: Figure, timelines: Sequence[Timeline]) -> None:
    """Add a legend of the colours and numbers, above all panels."""
    from matplotlib.patches import Patch

    rows = [_parts(spans) for timeline in timelines for spans in timeline.spans]
    kinds = {part.kind for row in rows for part in row}
    found = [Patch(color=_COLORS[k], label=_MEANINGS[k]) for k in _COLORS if k in kinds]
    if any(len({part.stage for part in row}) > 1 for row in rows):
        found.append(Patch(color="#555555", label="darker: a rank's second stage"))
    found.append(Patch(facecolor="white", edgecolor="#999999", label="idle"))
    text = "number: micro-batch" + ".slice" * any(p.slice for row in rows for p in row)
    found.append(Patch(alpha=0, label=text))
    figure.legend(handles=found, loc="outside upper center", ncols=len(found), fontsize=7)


def _parts(spans: Iterable[Span]) -> list[Action]:
    """Return the actions of some spans, with the parts of an overlap in its place."""
    return [part for span in spans for part in span.action.parts or (span.action,)]


def _draw_timeline(axes: Any, timeline: Timeline) -> None:
    for rank, spans in enumerate(timeline.spans):
        stages = sorted({part.stage for part in _parts(spans)})
        for start, end, action in spans:
            parts = action.parts or (action,)
            for place, part in enumerate(parts):
                bottom, height = rank - 0.45 + 0.9 * place / len(parts), 0.9 / len(parts)
                second = stages.index(part.stage) / len(stages)
                _draw_action(axes, part, (start, end - start, bottom, height), second)
    axes.set(ylim=(len(timeline.spans) - 0.4, -0.6))
    axes.set_yticks(range(len(timeline.spans)), [f"rank {r}" for r in range(len(timeline.spans))])
    axes.tick_params(length=0, labelsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_action(
    axes: Any, action: Action, box: tuple[float, float, float, float], shade: float
) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    left, width, bottom, height = box
    if width == 0 or action.kind not in _COLORS:
        return
    color = [channel * (1 - 0.5 * shade) for channel in to_rgb(_COLORS[action.kind])]
    style: dict[str, Any] = {"facecolor": color, "edgecolor": "white", "linewidth": 0.4}
    axes.add_patch(Rectangle((left, bottom), width, height, **style))
    place = (left + width / 2, bottom + height / 2)
    text = f"{action.micro_batch}" + f".{action.slice}" * bool(action.slice)
    axes.text(*place, text, ha="center", va="center_baseline", size=5)
