"""Simulated times against the closed forms of the papers."""

import math

import numpy as np
import pytest
import torch
from tables import table_of

from moe_ext.pipeline import SCHEDULES, Costs, add_messages, make_table, simulate
from moe_ext.pipeline.simulate import makespan

# F, I, W; powers of two and small sums: exact in floating point.
COSTS = [(1, 1, 1), (2, 3, 1.5), (1, 1, 0.5), (3, 4, 3)]


@pytest.mark.parametrize("f, i, w", COSTS)
@pytest.mark.parametrize("ranks, micro", [(2, 4), (4, 8), (6, 24)])
def test_the_bubble_of_dual_pipe_v_is_that_of_its_closed_form(f, i, w, ranks, micro):
    """P = 2 x ranks stages in a V. Where I > F, torch's order is shorter than the formula says."""
    dual = (ranks - 1) * (f + 2 * i - w)
    found = simulate(make_table("dual-pipe-v", ranks, micro), Costs(f, i, w)).idle
    assert found == pytest.approx([dual] * ranks) if i == f else max(found) < dual


# Weights that take longer than inputs, and forward passes that take longer than both, too.
UNEVEN = [*COSTS, (2, 1, 1), (2, 3, 1), (1, 1, 2), (1, 2, 2), (3, 1, 2), (1, 4, 1), (1, 3, 4)]
UNEVEN += [(4, 1, 1), (4, 3, 1), (6, 4, 1), (9, 7, 3), (9, 4, 1), (3, 2, 0), (0.5, 1, 3)]


def idle_by_formula(name, p, m, f, i, w):
    """Idle time of each rank as docs/pipelines.md says it; None where it leaves it to simulate."""
    b = i + w
    if name in ("gpipe", "1f1b"):
        return (p - 1) * (f + b)
    if name in ("interleaved", "looped-bfs"):
        return (p - 1 if m >= p else 2 * p - 1 - m) * (f + b)
    if name == "zb-h1":
        if m < p:
            return (p - 1) * (f + i) - (m - 1) * min(f, i, w)
        return (p - 1) * max(f, i, f + b - 2 * w)
    if m >= 2 * p - 1:
        first = max(f, i, 2 * f - i - w, f + i - 2 * w, 2 * f - 3 * w, 2 * i - 2 * w)
        return first + (p - 2) * max(i, w, 2 * f - i, 2 * f - 2 * w, 2 * i - 2 * w)
    if m <= p and f <= min(i + 2 * w, 2 * i + w):
        return 2 * (p - 1) * (f + i) - (m - 1) * (f + min(f, i))
    return None


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "looped-bfs", "zbv"])
def test_idle_time_for_any_costs_and_numbers(name):
    told = 0
    few = [(p, m) for p in (2, 4) for m in {1, p - 1, p, 2 * p - 1, 2 * p}]
    for ranks, micro in (*few, (6, 24)):
        try:
            table = make_table(name, ranks, micro)
        except ValueError:
            continue  # torch does not make it
        for costs in UNEVEN:
            wanted = idle_by_formula(name, ranks, micro, *costs)
            if wanted is not None:
                found = simulate(table, Costs(*costs)).idle
                assert found == pytest.approx([wanted] * ranks), (ranks, micro, costs)
                told += 1
    assert told > 70
    # What the page says in short.
    for f, i, w in COSTS:
        if name == "zbv" and f <= i and i / 2 <= w <= i:
            assert idle_by_formula(name, 4, 8, f, i, w) == 3 * i
        if name == "zb-h1":
            assert idle_by_formula(name, 4, 8, f, i, w) == 3 * (f + i - w)


def test_makespan_is_that_of_the_timeline():
    stages = (1.0, 2.5, 0.5, 3.0)
    for name in SCHEDULES:
        for costs in (Costs(), Costs(2, 3, 1.5, hop=0.25, overlap=0.75)):
            table = make_table(name, 4, 8)
            assert makespan(table, costs) == simulate(table, costs).makespan, name
    for name in ("gpipe", "1f1b", "zb-h1"):
        uneven = Costs(stages, stages[::-1], 0.5, hop=0.5)
        table = make_table(name, 4, 5)
        assert makespan(table, uneven) == simulate(table, uneven).makespan
        # Messages, exchanges and second forward passes are left to `simulate`.
        full = add_messages(table)
        assert makespan(full, uneven) == simulate(full, uneven).makespan
        ahead = Costs(2.0, ahead={"B": 0.5}, hop=1.0, transfer=0.5, exchanges={"F": [(0.2, 0.6)]})
        assert makespan(table, ahead) == simulate(table, ahead).makespan > makespan(table, Costs(2))
    with pytest.raises(ValueError, match="ranks that wait for each other"):
        makespan(table_of("0B0 0F0", "1F0 1B0"), Costs())


def test_overlap_shortens_dual_pipe_v():
    f, b, w, share = 2, 4, 2, 0.75
    found = simulate(make_table("dual-pipe-v", 4, 20), Costs(2, 2, 2, overlap=share))
    # Ranks with all of their pairs overlapped; the first ones have fewer, and idle less.
    assert max(found.idle) == 3 * (share * (f + b) + b - 3 * w)


@pytest.mark.parametrize("micro", [1, 5])
def test_share_of_the_bubble(micro):
    found = simulate(make_table("gpipe", 4, micro))
    assert found.makespan == (micro + 3) * 3
    assert found.bubble_share == pytest.approx(3 / (micro + 3))


def test_uneven_stages_and_hops():
    table = make_table("gpipe", 2, 2)
    found = simulate(table, Costs(forward=(1, 5), input_gradient=(2, 2), weight_gradient=0, hop=3))
    # Stage 1 begins at 1 + 3, ends 5 + 5 later, and its backward passes at 16 and 18.
    assert [(s.start, s.end, str(s.action)) for s in found.spans[0]] == [
        (0, 1, "0F0"),
        (1, 2, "0F1"),
        (19, 21, "0B0"),
        (21, 23, "0B1"),
    ]
    assert [(s.start, s.end) for s in found.spans[1]] == [(4, 9), (9, 14), (14, 16), (16, 18)]
    # With messages the second one waits for the first one on their link: it comes at 16 + 2 x 3.
    full = simulate(add_messages(table), Costs((1, 5), (2, 2), 0, hop=3))
    assert full.spans[1] == found.spans[1]
    assert full.spans[0][-1][:2] == (22, 24)


def test_a_link_carries_one_message_at_a_time():
    table = add_messages(make_table("gpipe", 2, 3))
    spans = simulate(table, Costs(hop=10)).spans
    assert [span.start for span in spans[1][:3]] == [11, 21, 31]


def test_a_receive_that_is_posted_late_delays_the_message():
    table = table_of(
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    found = simulate(table, Costs(hop=1))
    assert found.makespan == 2 * (1 + 1 + 1 + 2 + 1 + 2)


def test_says_that_ranks_wait_for_each_other():
    table = table_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(ValueError, match=r"simulate: .* 0B0 \(rank 0\), 1F1 \(rank 1\)"):
        simulate(table)


def test_a_hop_is_between_ranks_alone():
    table = make_table("zbv", 1, 2)
    assert simulate(table, Costs(hop=5)) == simulate(table)


def test_a_receive_stands_before_what_is_computed_when_it_comes():
    table = add_messages(make_table("gpipe", 2, 3), Costs(forward=(1, 5)))
    row = [str(action) for action in table.rows[1]]
    assert row[:6] == ["1RECV_F0", "1RECV_F1", "1RECV_F2", "1F0", "1F1", "1F2"]
    assert [str(action) for action in table.rows[0]][:2] == ["0F0", "0SEND_F0"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"forward": -1.0}, "forward to be at least 0 and finite, got -1.0"),
        ({"weight_gradient": (1.0, math.nan)}, "weight_gradient to be at least 0 and finite"),
        ({"update": np.array([1.0, -1.0])}, "update to be at least 0 and finite"),
        ({"hop": -2.0}, "hop to be at least 0 and finite, got -2.0"),
        ({"overlap": math.inf}, "overlap to be at least 0 and finite, got inf"),
        ({"slices": [-1.0]}, "slices to be at least 0 and finite"),
        ({"transfer": {"F": -1.0}}, "transfer to be at least 0 and finite"),
        ({"exchanges": {"F": [(0.6, 0.3)]}}, r"exchanges\['F'\] to be shares, begin before end"),
        ({"exchanges": {"0B": [(0.6, 1.3)]}}, r"exchanges\['0B'\] to be shares, begin before end"),
        ({"ahead": {"B": 2.0}}, "ahead to be shares, got"),
    ],
)
def test_costs_are_in_their_range(given, text):
    with pytest.raises(ValueError, match=f"^Costs: expected {text}"):
        Costs(**given)


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
@pytest.mark.parametrize("several", [np.array, torch.tensor])
def test_costs_are_numbers_of_any_library(number, several):
    table = make_table("terapipe", 2, 3, num_slices=2)
    costs = Costs(number(1.5), number(2.5), several([0.5, 0.25]), slices=several([0.5, 1.0]))
    want = Costs(1.5, 2.5, [0.5, 0.25], slices=[0.5, 1.0])
    assert float(simulate(table, costs).makespan) == simulate(table, want).makespan
