"""Schedules as tables: torch's, and the ones with a stage on each rank."""

from __future__ import annotations

from moe_ext._checks import check_choice, check_sizes
from moe_ext.pipeline.table import Action, ActionTable

# Of torch, by our name: its name, and whether a rank may hold another number of stages than two.
_OF_TORCH = {
    "interleaved": ("Interleaved1F1B", True),
    "looped-bfs": ("LoopedBFS", True),
    "zero-bubble": ("InterleavedZeroBubble", True),
    "zbv": ("ZBVZeroBubble", False),
    "dual-pipe-v": ("DualPipeV", False),
}
SCHEDULES = ("gpipe", "1f1b", "zb-h1", *_OF_TORCH)


def make_table(
    schedule: str, num_ranks: int, num_micro_batches: int, *, stages_per_rank: int | None = None
) -> ActionTable:
    """Make the table of a schedule by name, without messages.

    Args:
        schedule: "gpipe"; "1f1b", one forward and one backward in turn; "zb-h1", the same where the
            gradients of weights wait for a gap; or one that `torch.distributed.pipelining` makes,
            with more stages than ranks: "interleaved" (1F1B), "looped-bfs", "zero-bubble"
            (interleaved), "zbv" and "dual-pipe-v" (stages in the form of a V).
        num_ranks: ranks of the pipeline.
        num_micro_batches: parts of a batch.
        stages_per_rank: 1 for the first three, else 2 unless this says more.

    Raises:
        ValueError: an argument is out of range, or torch's schedule cannot be made of it.

    Reference:
        GPipe (arXiv:1811.06965); PipeDream-Flush (arXiv:2006.09503); interleaving
        (arXiv:2104.04473); ZB-H1 and ZB-V (arXiv:2401.10241); DualPipe (arXiv:2412.19437).
    """
    check_choice("make_table", "schedule", schedule, SCHEDULES)
    check_sizes("make_table", num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    torch_name, free = _OF_TORCH.get(schedule, ("", False))
    usual = 2 if torch_name else 1
    count = usual if stages_per_rank is None else stages_per_rank
    if count < usual or (count > usual and not free):
        raise ValueError(
            f"make_table: expected stages_per_rank of {schedule} to be "
            f"{usual}{' or more' if free else ''}, got {count}"
        )
    if torch_name:
        return _of_torch(schedule, torch_name, num_ranks, num_micro_batches, count)
    order = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "zb-h1": _zero_bubble_h1}[schedule]
    rows = [order(num_ranks - 1 - rank, rank, num_micro_batches) for rank in range(num_ranks)]
    return ActionTable([[Action(rank, *each) for each in row] for rank, row in enumerate(rows)])


def _of_torch(name: str, torch_name: str, num_ranks: int, micro: int, count: int) -> ActionTable:
    from moe_ext.pipeline._torch import get_schedule_ops

    try:
        rows = get_schedule_ops(torch_name, num_ranks, micro, count)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"make_table: expected num_micro_batches to be a number that {name} takes, got {micro} "
            f"over {num_ranks} ranks: {error}"
        ) from error
    # By way of its text, which is what torch loads and writes, too.
    texts = [[str(action) for action in row if action is not None] for row in rows]
    return ActionTable([[Action.from_text(text) for text in row] for row in texts])


_Order = list[tuple[str, int]]


def _gpipe(after: int, rank: int, micro: int) -> _Order:
    return [(kind, i) for kind in "FB" for i in range(micro)]


def _one_f_one_b(after: int, rank: int, micro: int) -> _Order:
    """`after` forward passes ahead, for the stages behind this one."""
    ahead = min(after, micro)
    order = [("F", i) for i in range(ahead)]
    for i in range(micro):
        order += [("F", i + ahead)] * (i + ahead < micro) + [("B", i)]
    return order


def _zero_bubble_h1(after: int, rank: int, micro: int) -> _Order:
    """1F1B, with weights' gradients late by `rank`: as many as fit under 1F1B's memory."""
    order: _Order = []
    for kind, i in _one_f_one_b(after, rank, micro):
        order.append((kind.replace("B", "I"), i))
        if kind == "B" and i >= rank:
            order.append(("W", i - rank))
    return order + [("W", i) for i in range(max(0, micro - rank), micro)]
