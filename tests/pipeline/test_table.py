"""Tables: torch's text and files, and schedules against torch's."""

import csv
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from moe_ext.pipeline import Action, ActionTable, add_messages, check_table, make_table

OF_TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dual-pipe-v": "ScheduleDualPipeV",
}


def texts(rows):
    return [[str(action) for action in row if action is not None] for row in rows]


def torch_runtime(name, ranks, micro):
    """torch's schedule, which can read and write files, with stages that only say their number."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = 2 * ranks
    return getattr(torch_schedules, OF_TORCH[name])([stage, stage], micro)


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("ranks, micro", [(2, 4), (4, 8)])
def test_schedules_are_those_of_torch(name, ranks, micro):
    rows = texts(get_schedule_ops(getattr(torch_schedules, OF_TORCH[name]), ranks, micro))
    rows = [[text for text in row if "REDUCE_GRAD" not in text] for row in rows]
    if name == "1f1b" and rows[-1][0] == f"{ranks - 1}F1":
        # torch 2.13 counts the forward passes of the last rank from 1.
        backward = [text for text in rows[-1] if "B" in text]
        forward = [f"{ranks - 1}F{i}" for i in range(micro)]
        rows[-1] = [text for pair in zip(forward, backward, strict=True) for text in pair]
    assert texts(make_table(name, ranks, micro).rows) == rows


@pytest.mark.parametrize("name", list(OF_TORCH)[2:])
def test_torch_reads_what_we_write_and_the_other_way_round(name, tmp_path):
    table, path = make_table(name, 2, 4), tmp_path / "table.csv"
    runtime = torch_runtime(name, 2, 4)
    table.write_csv(path)
    runtime._load_csv(path)
    assert texts(runtime.pipeline_order.values()) == texts(table.rows)
    assert ActionTable.read_csv(path) == table

    # With messages; torch adds rows of FSDP.
    runtime._dump_csv(path)
    theirs = ActionTable.read_csv(path)
    check_table(theirs)
    assert texts(theirs.rows) == texts(runtime.pipeline_order_with_comms.values())
    ours = add_messages(table)
    ours.write_csv(path)
    runtime._load_csv(path, format="compute_comms")
    assert texts(runtime.pipeline_order_with_comms.values()) == texts(ours.rows)


def test_chain_slice_and_version_are_written(tmp_path):
    rows = [[Action(0, "F", 1, 2, 3, 4), Action(0, "F", 0), Action(0, "F", 2, slice=1)]]
    assert texts(rows) == [["0F1c2s3v4", "0F0", "0F2s1"]]
    ActionTable(rows).write_csv(tmp_path / "t.csv")
    assert list(csv.reader((tmp_path / "t.csv").open())) == texts(rows)
    assert ActionTable.read_csv(tmp_path / "t.csv") == ActionTable(rows)


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2F", "2F0x1", "0UNSHARD1", "(0F1;2)OVERLAP_F_B"]
)
def test_refuses_text_that_is_no_action(text):
    with pytest.raises(ValueError, match="Action.from_text: expected text to be of the form"):
        Action.from_text(text)


@pytest.mark.parametrize(
    "args, options, message",
    [
        (("1b1f", 2, 4), {}, "make_table: expected schedule to be one of"),
        (("gpipe", 0, 4), {}, "make_table: expected num_ranks to be at least 1, got 0"),
        (("1f1b", 2, 4), {"stages_per_rank": 2}, "expected stages_per_rank of 1f1b to be 1, got 2"),
        (("zbv", 2, 4), {"stages_per_rank": 3}, "expected stages_per_rank of zbv to be 2, got 3"),
        (("interleaved", 2, 4), {"stages_per_rank": 1}, "interleaved to be 2 or more, got 1"),
        (
            ("dual-pipe-v", 2, 3),
            {},
            "num_micro_batches to be a number that dual-pipe-v takes, got 3",
        ),
    ],
)
def test_refuses_schedules_that_are_none(args, options, message):
    with pytest.raises(ValueError, match=message):
        make_table(*args, **options)


def test_refuses_a_table_without_an_action():
    with pytest.raises(ValueError, match="ActionTable: expected rows to hold actions"):
        ActionTable([[], []])
