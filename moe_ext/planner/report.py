"""Report of a plan: one self-contained page of HTML with pictures."""

from __future__ import annotations

import html
from collections.abc import Mapping

from moe_ext.planner.apply import plan_problem
from moe_ext.planner.plan import Plan, stage_lines

_STYLE = (
    "body{font:15px sans-serif;max-width:52em;margin:2em auto}td,th{padding:.2em .8em;"
    "text-align:left}pre{background:#eee;padding:1em;overflow:auto}"
)


def html_report(
    plan: Plan, *, why_not: Mapping[str, str] | None = None, plan_file: str = "plan.json"
) -> str:
    """Make a page with the placement, its time and memory, other placements, and commands.

    If `Plan.apply` refuses the plan, the page shows the reason instead of commands.

    Args:
        plan: plan to show.
        why_not: lines of `Plan.why_not`, by names for the page.
        plan_file: see `Plan.commands`.
    """
    job = plan.job
    parts = [f"<h1>Plan for {job.num_ranks} ranks</h1>", f"<p>{html.escape(plan.title)}</p>"]
    parts.append(_table(plan.choice))
    parts.append(f"<p>{plan.seconds:.4g} s a step, {plan.memory / 1e9:.1f} GB on the fullest rank")
    parts.append(f" of {plan.cluster.memory / 1e9:.0f}; {plan.num_points} placements were costed, ")
    parts.append(f"{plan.num_too_large} of them too large.</p>")
    lines = map(html.escape, map(str.strip, stage_lines(plan.stages)))
    parts.append(f"<p>{'<br>'.join(lines)}</p><h2>Time (s)</h2>")
    parts.append(_bars(plan.time_terms()))
    parts.append("<h2>Memory (GB)</h2>")
    parts.append(_bars({name: value / 1e9 for name, value in plan.memory_terms().items()}))
    parts.append("<h2>Time and memory of the best</h2>" + _scatter(plan))
    if why_not:
        parts.append("<h2>Why not</h2>" + _table(why_not))
    problem = plan_problem(plan)
    if problem is not None:
        parts.append(f"<p>Nothing builds it yet: {html.escape(problem)}</p>")
    commands = plan.commands(plan_file=plan_file) if problem is None else {}
    for name, command in commands.items():
        parts.append(f"<h2>{name}</h2><pre>{html.escape(command)}</pre>")
    body = "".join(parts)
    return f"<!doctype html><meta charset=utf-8><title>Plan</title><style>{_STYLE}</style>{body}\n"


def _table(rows: Mapping[str, object]) -> str:
    cells = (
        f"<tr><th>{html.escape(str(name))}<td>{html.escape(str(value))}"
        for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _bars(values: Mapping[str, float]) -> str:
    longest = max(*values.values(), 1e-30)
    rows = []
    for i, (name, value) in enumerate(values.items()):
        y, width = 22 * i, 420 * value / longest
        rows.append(f'<text x="0" y="{y + 15}">{html.escape(name)}</text>')
        rows.append(f'<rect x="150" y="{y + 2}" width="{width:.1f}" height="16" fill="#47a"/>')
        rows.append(f'<text x="{155 + width:.1f}" y="{y + 15}">{value:.4g}</text>')
    return f'<svg width="660" height="{22 * len(values)}" font-size="14">{"".join(rows)}</svg>'


def _scatter(plan: Plan) -> str:
    if not plan.pareto:
        return ""
    most_time = max(each.seconds for each in plan.pareto)
    most_memory = max(each.memory for each in plan.pareto)
    dots = []
    for each in plan.pareto:
        x, y = 40 + 560 * each.seconds / most_time, 260 - 240 * each.memory / most_memory
        named = ", ".join(f"{name}={value}" for name, value in each.choice.items())
        title = f"{each.seconds:.4g} s, {each.memory / 1e9:.1f} GB: {named}"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#a43">'
            f"<title>{html.escape(title)}</title></circle>"
        )
    axes = '<path d="M40 10V260H620" fill="none" stroke="#333"/>'
    texts = f'<text x="460" y="278">time, to {most_time:.4g} s</text>'
    texts += f'<text x="45" y="12">memory, to {most_memory / 1e9:.1f} GB</text>'
    return f'<svg width="640" height="285" font-size="13">{axes}{"".join(dots)}{texts}</svg>'
