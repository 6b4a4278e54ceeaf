"""Plans that let a rank compute while its exchanges travel."""

import itertools
from dataclasses import replace

import pytest

from moe_ext.pipeline import (
    SCHEDULES,
    Action,
    ActionTable,
    Costs,
    in_flight,
    make_table,
    plan_turns,
    simulate,
)
from moe_ext.pipeline.turn_plan import plan_turns_within

# Sent after a tenth, back after nine tenths; the last gradients beside those of the weights.
EXCHANGES = {
    "F": [(0.1, 0.1), (0.9, 0.9)],
    "B": [(0.05, 0.05), (0.45, 0.95)],
    "I": [(0.1, 0.1), (0.9, 0.9)],
}


def costs(transfer, scale=1.0):
    return Costs(scale, scale, scale, transfer=transfer, exchanges=EXCHANGES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_lane_takes_the_time_of_the_table(name):
    table = make_table(name, 2, 8)
    found = plan_turns(table, Costs(), lanes=1, max_in_flight=99)
    assert found.makespan <= simulate(table).makespan + 1e-9


def test_two_passes_by_hand():
    # One rank: F0 and F1 in turn. 0.1 of F0, 0.1 of F1, wait for F0's rows (sent at 0.1, there at
    # 1.1); 0.8 of F0; F1's are there at 2.1, behind F0's on the link; 0.8 of F1, and so on.
    row = [Action(0, kind, i) for kind in "FB" for i in range(2)]
    table = ActionTable([row])
    found = plan_turns(table, costs(1.0))
    assert [start.action for start in found.starts[0]] == row
    assert found.starts[0][1].beside == (row[0],)
    # To the end of F1: F0's results are sent at 1.9 and there at 3.1, F1's at 2.9 and at 4.1.
    pair = ActionTable([[Action(-1, "OVERLAP_F_B", parts=(row[0], row[1])), *row[2:]]])
    forward = simulate(pair, costs(1.0)).spans[0][0]
    assert forward.end == pytest.approx(4.1 + 0.1)
    # What one action waits for: all but the last rows' gradients, 1.0 of which are half the time.
    alone = simulate(table, costs(0.5)).spans[0]
    assert [span.end - span.start for span in alone] == pytest.approx([2.0, 2.0, 2.5, 2.5])


@pytest.mark.parametrize("name", SCHEDULES)
def test_turns_take_less_time_and_one_micro_batch_more(name):
    table = make_table(name, 2, 16)
    share = 2 / table.num_stages
    given = costs(0.25 * share, share)
    one, two = (plan_turns(table, given, lanes=lanes) for lanes in (1, 2))
    assert two.makespan < one.makespan
    assert plan_turns(table, given) == two
    for rank, starts in enumerate(two.starts):
        begun = [start.action for start in starts]
        assert sorted(begun) == sorted(table.actions(rank))
        for kinds, stage in itertools.product(("F", "BI", "W"), range(table.num_stages)):
            same = [
                [a for a in row if a.kind in kinds and a.stage == stage]
                for row in (begun, table.actions(rank))
            ]
            assert same[0] == same[1]
        for i, start in enumerate(starts):
            assert len(start.beside) < 2 and set(start.beside) <= set(begun[:i])


def recomputed(num_stages, share):
    """Stages that run forward again: exchanges for half as long as a forward pass computes."""
    again, rows = [(0.1, 0.1), (0.9, 0.9)], [(1.1, 1.1), (1.9, 1.9)]

    def of(exchanges, whole):
        return [(begin / whole, end / whole) for begin, end in exchanges]

    whole = of([*again, (1.1, 1.1), (1.9, 2.9)], 3)
    exchanges = {"F": again, "B": whole, "I": of([*again, *rows], 2), "0I": (), "0W": whole}
    inputs = [0.0] + [2 * share] * (num_stages - 1)
    weights = [3 * share] + [share] * (num_stages - 1)
    # The second forward pass waits for no gradient.
    ahead = {"B": 1 / 3, "I": 1 / 2, "0I": 1.0, "0W": 1 / 3}
    return Costs(share, inputs, weights, transfer=share / 4, exchanges=exchanges, ahead=ahead)


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_fifths_of_the_exchanges_are_hidden(name):
    table = make_table(name, 2, 32)
    given = recomputed(table.num_stages, 2 / table.num_stages)
    at_once = {kind: [(sent, sent) for sent, _ in e] for kind, e in given.exchanges.items()}
    seen, none = (
        plan_turns(table, replace(given, **changed), lanes=1).makespan
        for changed in ({"exchanges": at_once}, {"transfer": 0.0})
    )
    found = plan_turns(table, given, max_in_flight=max(in_flight(table)) + 3).makespan
    assert (seen - found) / (seen - none) >= 0.8 - 1e-9


# F, I with a second forward pass of F, W, and a transfer; two exchanges in F, two more in I.
@pytest.mark.parametrize(
    "ranks, micro, f, i, w, t",
    [(2, 8, 1, 2, 1, 0.25), (4, 16, 2, 5, 2, 0.5), (2, 8, 3, 5, 2, 0.25)],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_hidden_share_has_the_bound_of_its_closed_form(name, ranks, micro, f, i, w, t):
    table = make_table(name, ranks, micro)
    per_rank, back = table.num_stages // ranks, i - f
    again, rows = [(0.1 * f, 0.1 * f), (0.9 * f, 0.9 * f)], [f + 0.1 * back, f + 0.9 * back]

    def of(pairs, whole):
        return [(begin / whole, end / whole) for begin, end in pairs]

    exchanges = {
        "F": of(again, f),
        "I": of([*again, *((at, at) for at in rows)], i),
        "B": of([*again, (rows[0], rows[0]), (rows[1], rows[1] + w)], i + w),
    }
    ahead = {"I": f / i, "B": f / (i + w)}
    given = Costs(f, i, w, transfer=t, exchanges=exchanges, ahead=ahead)

    def bubble(f, i, w):
        """Idle time of a rank between its neighbours, I without what runs ahead."""
        whole, split = f + i + w, f + i - w
        forms = {
            "zb-h1": split,
            "zero-bubble": split,
            "zbv": max(f, i),
            "dual-pipe-v": f + 2 * i - w,
        }
        return (ranks - 1) * forms.get(name, whole)

    own = per_rank * micro * (f + i + w)
    without = own + bubble(f, back, w)
    found = simulate(table, replace(given, transfer=0)).makespan
    assert found == pytest.approx(without) or (name == "dual-pipe-v" and f != back)
    seen = own + per_rank * micro * 6 * t + bubble(f + 2 * t, back + 2 * t, w)
    at_once = {kind: [(sent, sent) for sent, _ in e] for kind, e in exchanges.items()}
    found = simulate(table, replace(given, exchanges=at_once)).makespan
    # Its pairs wait in turn, and hide some of it by themselves.
    assert found < seen if name == "dual-pipe-v" else found == pytest.approx(seen)
    # The last rank waits for the first micro-batch, and whole backward passes for it at the end.
    least = own + (ranks - 1) * (f + 2 * t)
    if all(action.kind != "W" for action in table.actions(0)):
        least += (ranks - 1) * (back + t + w)
    more = max(in_flight(table))
    for lanes in (1, 2, 4):
        plan = plan_turns(table, given, lanes=lanes, max_in_flight=more + lanes)
        assert plan.makespan >= least - 1e-9


def test_a_second_forward_pass_waits_for_no_gradient():
    costs = Costs(1, 2, 1, ahead={"B": 1 / 4})
    found = simulate(make_table("gpipe", 2, 1), costs)
    # Stage 1 ends its backward pass at 2 + 3, stage 0 begins a fourth of its own ahead of it.
    assert [(span.start, span.end) for span in found.spans[0]] == [(0, 1), (4.25, 7.25)]
    # That of a first stage that does all in W, behind an I that takes no time: I of stage 1 ends
    # at 4, a third of W runs ahead.
    none = Costs(1, (0, 2), (3, 1), ahead={"0I": 1.0, "0W": 1 / 3, "I": 1 / 2})
    row = simulate(make_table("zb-h1", 2, 1), none).spans[0]
    assert [(span.start, span.end) for span in row] == [(0, 1), (1, 1), (3, 6)]
    assert plan_turns(make_table("zb-h1", 2, 1), none, lanes=1).makespan == 6


def test_refuses_what_it_cannot_plan():
    table = make_table("1f1b", 2, 4)
    with pytest.raises(ValueError, match="plan_turns: expected lanes to be at least 1, got 0"):
        plan_turns(table, Costs(), lanes=0)
    with pytest.raises(ValueError, match="expected max_in_flight to let all actions run, got 0"):
        plan_turns(table, Costs(), max_in_flight=0)
    with pytest.raises(ValueError, match="one version of weights, got 0F2v1"):
        plan_turns(make_table("pipedream", 2, 4), Costs())
    with pytest.raises(ValueError, match="check_table: expected table to have 0I0"):
        plan_turns(ActionTable([[Action(0, "F", 0)]]), Costs())


@pytest.mark.parametrize("name", SCHEDULES)
def test_within_a_time_there_is_the_same_plan_or_none(name):
    given = costs(0.25)
    found = plan_turns(make_table(name, 2, 8), given)
    table = found.table
    assert plan_turns_within(table, given, found.makespan) == found
    assert plan_turns_within(table, given, 0.999 * found.makespan) is None
    assert plan_turns_within(table, given, 0.1) is None


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_transfers_of_kinds_and_stages(name):
    table, given = make_table(name, 2, 8), costs(0.25)
    of_stages = {f"{stage}B": 0.25 for stage in range(table.num_stages)}
    each = replace(given, transfer={"F": 0.25, "I": 0.25, "B": 9.0, **of_stages})
    assert plan_turns(table, each) == plan_turns(table, given)
    assert simulate(table, each) == simulate(table, given)
    # A kind that is not named takes no time.
    forward = replace(given, transfer={"F": 0.25})
    alone = replace(given, exchanges={"F": EXCHANGES["F"]})
    assert simulate(table, forward).makespan == pytest.approx(simulate(table, alone).makespan)


def test_an_exchange_at_the_beginning_waits_for_what_it_sends():
    at_once = Costs(1, 1, 0, transfer=2, exchanges={"B": [(0, 0)], "I": [(0, 0)]})
    # F of both stages, then twice an exchange and a backward pass.
    for name in ("gpipe", "zb-h1"):
        assert simulate(make_table(name, 2, 1), at_once).makespan == 2 + 2 * 3
        assert plan_turns(make_table(name, 2, 1), at_once).makespan == 2 + 2 * 3
