"""The cost model's choices as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_ext.compression.cost_model import CostModel


def _gigabits(bytes_per_second: float) -> str:
    return f"{8e-9 * bytes_per_second:.3g} Gbit/s"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def _about(model: CostModel) -> str:
    ranks = f"{model.num_ranks} rank{'s' if model.num_ranks > 1 else ''} on {model.device}"
    if model.link is None:
        return f"{ranks}, link not measured"
    return (
        f"{ranks}, latency {1e6 * model.link.latency:.0f} us, all-to-all "
        f"{_gigabits(model.link.exchange_bandwidth)}, all-reduce "
        f"{_gigabits(model.link.reduce_bandwidth)}"
    )


def _break_even(model: CostModel) -> list[str]:
    """A line for every codec, beside the leanest plain one, for the largest bucket timed."""
    from moe_ext.compression.cost_model import is_plain

    buckets = [state for state in model.buckets.values() if model.knows(state.codecs)]
    if not buckets:
        return []
    largest = max(buckets, key=lambda state: state.numel)
    plain = [codec for codec in largest.codecs if is_plain(codec)]
    least = min(plain, key=lambda codec: codec.sent_bytes(largest.numel, model.num_ranks))
    lines = []
    for codec in largest.codecs:
        if codec in plain:
            continue
        limit = model.break_even(codec, least, largest.numel)
        pays = {0.0: "never", float("inf"): "at any bandwidth"}
        text = pays.get(limit, f"below {_gigabits(limit)}")
        lines.append(f"{codec.name} pays {text} ({largest.numel} elements, beside {least.name})")
    return lines


def cost_table(model: CostModel) -> str:
    """See `CostModel.explain`."""
    codecs = list(dict.fromkeys(c for state in model.buckets.values() for c in state.codecs))
    # Codecs of one kind with other options would share a name.
    names = [codec.name for codec in codecs]
    heads = [n if names.count(n) == 1 else repr(c) for n, c in zip(names, codecs, strict=True)]
    rows = [["bucket", "elements", *(f"{head} ms" for head in heads), "choice", "why"]]
    for bucket, state in model.buckets.items():
        row = [str(bucket), str(state.numel)]
        for codec in codecs:
            known = codec in state.measured
            if codec not in state.codecs or not (known or model.knows([codec])):
                row.append("-")
                continue
            row.append(f"{1e3 * model.estimate(codec, bucket):.3f}{'*' if known else ''}")
        chosen = "-" if state.chosen is None else heads[codecs.index(state.chosen)]
        rows.append([*row, chosen, state.reason])
    return "\n".join([_about(model), *_aligned(rows), *_break_even(model)])
