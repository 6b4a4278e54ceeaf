"""The checker: what is in order passes, and each defect is named."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import random_table, table_of
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from moe_ext.pipeline import (
    ASYNCHRONOUS,
    SCHEDULES,
    Action,
    ActionTable,
    Costs,
    add_messages,
    check_table,
    in_flight,
    make_table,
    simulate,
)
from moe_ext.pipeline.check import messages_of_pairs

OTHERS = [*ASYNCHRONOUS, "chimera", "terapipe"]


@pytest.mark.parametrize("name", [*SCHEDULES, *OTHERS])
@pytest.mark.parametrize("ranks, micro", [(1, 2), (2, 4), (4, 12)])
def test_accepts_the_schedules(name, ranks, micro):
    if name == "chimera" and ranks == 1:
        return  # it goes in two directions
    table = make_table(name, ranks, micro)
    check_table(table, max_in_flight=ranks if name in OTHERS[:-1] else None)
    full = add_messages(table)
    check_table(full)
    assert simulate(full).makespan == simulate(table).makespan


def sends(table):
    return sum(
        table.send(action) is not None
        for rank in range(table.num_ranks)
        for action in table.actions(rank)
    )


@pytest.mark.parametrize("name", [*SCHEDULES, *OTHERS])
def test_both_ranks_have_the_messages_of_all_schedules_in_one_order(name):
    count = 0
    for ranks in (1, 2, 3, 4, 6, 8):
        most = 2 * ranks + 1 if ranks < 8 else ranks
        for micro in sorted(n for n in {1, 2, 3, ranks, 2 * ranks, 2 * ranks + 1} if n <= most):
            try:
                table = make_table(name, ranks, micro)
            except ValueError as error:
                assert "num_micro_batches" in str(error)
                continue  # the schedule has none of this size
            assert (table.num_ranks, table.num_micro_batches) == (ranks, micro)
            for costs in (None, Costs(2.0, 3.0, 1.0, hop=0.5), Costs(1.0, 0.5, 4.0)):
                found = messages_of_pairs(add_messages(table, costs))
                assert sum(map(len, found.values())) == sends(table)
                count += 1
    assert count >= 27


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_both_ranks_have_the_messages_of_torch_in_one_order(name, ranks):
    rows = get_schedule_ops(name, ranks, 4 * ranks, with_comms=True)
    table = table_of(*(" ".join(str(a) for a in row if a is not None) for row in rows))
    assert sum(map(len, messages_of_pairs(table).values())) == sends(table)


def test_refuses_messages_in_two_orders():
    table = table_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    message = "in one order on both, got message 0 of rank 0 to rank 1 as 0SEND_F0 and 1RECV_F1"
    with pytest.raises(ValueError, match=f"Pipeline: expected table to have.*{message}"):
        messages_of_pairs(table)
    with pytest.raises(ValueError, match="check_table: expected table to come to its end"):
        check_table(table)
    with pytest.raises(ValueError, match="got message 1 of rank 0 to rank 1 as 0SEND_F1 and"):
        messages_of_pairs(ActionTable([table.rows[0], table.rows[1][1:]]))


@given(st.randoms(use_true_random=False), st.integers(1, 2), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_accepts_what_is_in_order(rng, chains, slices):
    table = random_table(rng, chains=chains, slices=slices)
    check_table(table)
    full = add_messages(table)
    check_table(full)
    assert sum(map(len, messages_of_pairs(full).values())) == sends(table)
    # Nobody waits for a message that is posted late.
    assert simulate(full).makespan == simulate(table).makespan


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_refuses_what_lacks_or_repeats_an_action(rng):
    table = add_messages(random_table(rng))
    rank = rng.choice([r for r, row in enumerate(table.rows) if row])
    rows = [list(row) for row in table.rows]
    place = rng.randrange(len(rows[rank]))
    if rng.random() < 0.5:
        rows[rank].insert(rng.randint(0, len(rows[rank])), rows[rank][place])
    else:
        del rows[rank][place]
    if any(rows):
        with pytest.raises(ValueError, match="check_table: expected"):
            check_table(ActionTable(rows))


@pytest.mark.parametrize(
    "rows, message",
    [
        (["0F0 0B0 0F0"], "0F0 (rank 0, stage 0, micro-batch 0) once, got it 2 times"),
        (["0F0 0F1 0B0"], "0I1 (rank 0, stage 0, micro-batch 1) once, got it 0 times"),
        (["0F0 0I0"], "0W0 (rank 0, stage 0, micro-batch 0) once, got it 0 times"),
        (["0F0 0W0 0I0"], "0W0 (rank 0, stage 0, micro-batch 0) to stand behind 0I0, got places 1"),
        (["0B0 0F0"], "0B0 (rank 0, stage 0, micro-batch 0) to stand behind 0F0, got places 0 and"),
        (["0F0 0B0 0I0 0W0"], "I and W or a B, got both with 0B0 (rank 0"),
        (["(0F0;0B0)OVERLAP_F_B"], "0B0 (rank 0, stage 0, micro-batch 0) to stand behind 0F0"),
        (["0F0 0B0 2B0"], "each stage to run forward, got 2B0 (rank 0, stage 2, micro-batch 0)"),
        (
            ["0F0 0B0", "0B1"],
            "each stage to lie on one rank, got stage 0 on rank 0 and 0B1 (rank 1",
        ),
        (["0F0 2F0 2B0 0B0"], "to have all stages, got no stage 1 in chain 0"),
        (["0F0 0B0 0F2 0B2"], "each micro-batch to be in one chain, got micro-batch 1 in []"),
        (["0F0 0B0 0F0c1 0B0c1"], "in one chain, got micro-batch 0 in [0, 1]"),
        (["0F0s1 0B0s1"], "slices from 0 on, got slice 1 alone of micro-batch 0"),
        (
            ["0F0s1 0F0 0B0s1 0B0"],
            "0F0s1 (rank 0, stage 0, micro-batch 0, slice 1) to stand behind",
        ),
        (["0F0 0F0s1 0B0 0B0s1"], "0B0 (rank 0, stage 0, micro-batch 0) to stand behind 0B0s1"),
        (
            ["0F0 0B0 0UPDATEv1 0F1v1 0B1 0UPDATEv2"],
            "a backward pass with the weights of its forward pass 0F1v1, got 0B1 (rank",
        ),
        (["0F0v1 0B0v1 0UPDATEv1"], "used behind the update that makes them, got 0F0v1 (rank 0"),
        (["0F0 0B0 0UPDATEv2"], "one version after the other, got 0UPDATEv2 (rank 0, stage 0, ver"),
        (["0F0 0B0 0UPDATEv1 0F1 0B1"], "got micro-batch 1 in 0 at stage 0 and 0 at stage 0"),
        (
            ["0F0 0B0 0UPDATEv1 0F1 0B1 0UPDATEv2", "1F0 1B0 1F1 1B1 1UPDATEv1"],
            "got micro-batch 1 in 1 at stage 1 and 2 at stage 0",
        ),
        (["0F0 0SEND_F0 0B0"], "messages between ranks alone, got 0SEND_F0 (rank 0, stage 0"),
        # Messages.
        (
            ["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"],
            "1RECV_F0 (rank 1, stage 1, micro-batch 0) once, got it 0 times",
        ),
        (
            ["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
            "0SEND_F0 (rank 0, stage 0, micro-batch 0) to stand behind 0F0",
        ),
        (
            ["0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
            "0B0 (rank 0, stage 0, micro-batch 0) to stand behind 0RECV_B0",
        ),
        # Receives in another order than sends.
        (
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            ],
            "a circle: 0SEND_F0 (rank 0, stage 0, micro-batch 0) waits for 1RECV_F1 (rank 1, "
            "stage 1, micro-batch 1) waits for rank 0",
        ),
        # Both send first.
        (
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ],
            "a circle: 0SEND_F1 (rank 0, stage 0, micro-batch 1) waits for 1SEND_B0 (rank 1, "
            "stage 1, micro-batch 0) waits for rank 0",
        ),
        # A circle of computations, over ranks and on one.
        (
            ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
            "0B0 (rank 0, stage 0, micro-batch 0) waits for 1F1 (rank 1, stage 1, micro-batch 1) "
            "waits for rank 0",
        ),
        (["1F0 0F0 1B0 0B0"], "a circle: 1F0 (rank 0, stage 1, micro-batch 0) waits for rank 0"),
    ],
)
def test_names_the_defect(rows, message):
    with pytest.raises(ValueError, match="check_table: expected .*" + re.escape(message)):
        check_table(table_of(*rows))


def test_swapped_messages_of_a_schedule_are_found():
    rng = random.Random(0)
    for name in SCHEDULES:
        table = add_messages(make_table(name, 2, 4))
        rows = [list(row) for row in table.rows]
        receives = [i for i, a in enumerate(rows[1]) if a.kind == "RECV_F" and a.stage == 1]
        i, j = sorted(rng.sample(receives, 2))
        rows[1][i], rows[1][j] = rows[1][j], rows[1][i]
        with pytest.raises(ValueError, match="waits for rank|to stand behind"):
            check_table(ActionTable(rows))


def test_counts_micro_batches_in_flight():
    assert in_flight(make_table("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert in_flight(make_table("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(make_table("zb-h1", 4, 8)) == (4, 4, 4, 4)
    check_table(make_table("1f1b", 4, 8), max_in_flight=4)
    with pytest.raises(
        ValueError,
        match=re.escape("max_in_flight 3 micro-batches at most, got 4 at 0F3 (rank 0, stage 0"),
    ):
        check_table(make_table("1f1b", 4, 8), max_in_flight=3)
    with pytest.raises(ValueError, match="expected max_in_flight to be at least 1, got 0"):
        check_table(make_table("1f1b", 4, 8), max_in_flight=0)


def test_messages_are_added_once_and_in_order():
    table = add_messages(make_table("1f1b", 2, 2))
    with pytest.raises(ValueError, match="add_messages: expected table to have no messages"):
        add_messages(table)
    with pytest.raises(ValueError, match="check_table: expected"):
        add_messages(table_of("0F0"))


@pytest.mark.parametrize("strange", [Action(0, "X", 0), Action(-1, "F", 0)])
def test_refuses_actions_that_no_text_names(strange):
    table = ActionTable([[Action(0, "F", 0), strange, Action(0, "B", 0)]])
    with pytest.raises(ValueError, match="expected actions of known kinds, of stages from 0, got"):
        check_table(table)
