"""Makes the tables of schedules, some of them with `torch.distributed.pipelining`."""

from __future__ import annotations

import itertools
from collections import Counter

from moe_ext._checks import check_choice, check_rule, check_sizes
from moe_ext.pipeline.table import UPDATE, Action, ActionTable

# Schedules that torch has too, and their names in torch.
_OF_TORCH = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dual-pipe-v": "DualPipeV",
}
_OF_A_V = ("zbv", "dual-pipe-v")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", *_OF_TORCH)
# Schedules with several versions of the weights.
ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "hetpipe")
_EVERY = (*SCHEDULES, "chimera", "terapipe", *ASYNCHRONOUS)


def make_table(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    stages_per_rank: int | None = None,
    num_slices: int | None = None,
    micro_batches_per_update: int | None = None,
) -> ActionTable:
    """Make the table of a schedule by name, without messages.

    Args:
        schedule: "gpipe"; "1f1b", one forward and one backward pass in turn; "zb-h1", the same with
            gradients of weights that wait for a gap. `torch.distributed.pipelining` has schedules
            with more stages than ranks: "interleaved" (1F1B), "looped-bfs", "zero-bubble"
            (interleaved), "zbv" and "dual-pipe-v" (stages in the form of a V). "chimera" has two
            chains of all stages, in opposite directions. "terapipe" is GPipe of slices along the
            sequence. Names of `ASYNCHRONOUS` are 1F1B with updates on the way and no flush.
            "pipedream" updates after every micro-batch, and takes the newest weights that a stage
            has. "hetpipe" updates as often, and takes the same version in all stages.
            "pipedream-2bw" updates after several micro-batches, which all take the weights before
            the newest.
        num_ranks: ranks of the pipeline.
        num_micro_batches: parts of a batch.
        stages_per_rank: stages of each chain on a rank: 1, or 2 for schedules of torch, of which
            some take more.
        num_slices: slices of a micro-batch in "terapipe"; by default as many as ranks.
        micro_batches_per_update: for "pipedream-2bw", a number from num_ranks on; num_ranks by
            default.

    Raises:
        ValueError: an argument is out of range, or torch cannot make the schedule of it.

    Reference:
        GPipe (arXiv:1811.06965); PipeDream-Flush (arXiv:2006.09503); interleaving
        (arXiv:2104.04473); ZB-H1 and ZB-V (arXiv:2401.10241); DualPipe (arXiv:2412.19437); Chimera
        (arXiv:2107.06925); TeraPipe (arXiv:2102.07988); PipeDream (arXiv:1806.03377);
        PipeDream-2BW (arXiv:2006.09503); HetPipe (arXiv:2005.14038).
    """
    check_choice("make_table", "schedule", schedule, _EVERY)
    check_sizes("make_table", num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    usual = 2 if schedule in _OF_TORCH else 1
    free = usual == 2 and schedule not in _OF_A_V
    count = usual if stages_per_rank is None else stages_per_rank
    fits = count == usual or (free and count > usual)
    rule = f"{usual}{' or more' if free else ''}"
    check_rule("make_table", f"stages_per_rank of {schedule}", count, rule, fits)
    for name, value, owner in (
        ("num_slices", num_slices, "terapipe"),
        ("micro_batches_per_update", micro_batches_per_update, "pipedream-2bw"),
    ):
        fits = value is None or schedule == owner
        check_rule("make_table", f"{name} of {schedule}", value, "None", fits)
    if schedule == "chimera":
        return _chimera(num_ranks, num_micro_batches)
    if schedule == "terapipe":
        num_slices = num_ranks if num_slices is None else num_slices
        check_sizes("make_table", num_slices=num_slices)
        return _of_slices(num_ranks, num_micro_batches, num_slices)
    if schedule in ASYNCHRONOUS:
        every = 1 if schedule != "pipedream-2bw" else micro_batches_per_update or num_ranks
        if num_micro_batches % every or (schedule == "pipedream-2bw" and every < num_ranks):
            raise ValueError(
                "make_table: expected micro_batches_per_update to be num_ranks or more, and to "
                f"divide num_micro_batches {num_micro_batches}, got {every} over {num_ranks} ranks"
            )
        return _without_flush(schedule, num_ranks, num_micro_batches, every)
    if schedule == "interleaved":
        return _interleaved(num_ranks, num_micro_batches, count)
    if schedule in _OF_TORCH:
        return _of_torch(schedule, num_ranks, num_micro_batches, count)
    order = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "zb-h1": _zero_bubble_h1}[schedule]
    rows = [order(num_ranks - 1 - rank, rank, num_micro_batches) for rank in range(num_ranks)]
    return ActionTable([[Action(rank, *each) for each in row] for rank, row in enumerate(rows)])


def _of_torch(name: str, num_ranks: int, micro: int, count: int) -> ActionTable:
    from moe_ext.pipeline._torch import get_schedule_ops

    try:
        rows = get_schedule_ops(_OF_TORCH[name], num_ranks, micro, count)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"make_table: expected num_micro_batches to be a number that {name} takes, got {micro} "
            f"over {num_ranks} ranks: {error}"
        ) from error
    # Actions are converted by their text, the form in which torch writes and loads tables.
    texts = [[str(action) for action in row if action is not None] for row in rows]
    return ActionTable([[Action.from_text(text) for text in row] for row in texts])


_Order = list[tuple[str, int]]


def _gpipe(after: int, rank: int, micro: int) -> _Order:
    return [(kind, i) for kind in "FB" for i in range(micro)]


def _one_f_one_b(after: int, rank: int, micro: int) -> _Order:
    """One forward pass for each of the `after` stages that follow; then F and B in turn."""
    ahead = min(after, micro)
    order = [("F", i) for i in range(ahead)]
    for i in range(micro):
        order += [("F", i + ahead)] * (i + ahead < micro) + [("B", i)]
    return order


def _zero_bubble_h1(after: int, rank: int, micro: int) -> _Order:
    """1F1B with W late by `rank` micro-batches. Each rank holds as many as rank 0 of 1F1B."""
    order: _Order = []
    for kind, i in _one_f_one_b(after, rank, micro):
        order.append((kind.replace("B", "I"), i))
        if kind == "B" and i >= rank:
            order.append(("W", i - rank))
    return order + [("W", i) for i in range(max(0, micro - rank), micro)]


def _interleaved(num_ranks: int, micro: int, count: int) -> ActionTable:
    """1F1B in rounds: a rank takes the micro-batches of a round through each of its stages.

    The table is equal to torch's, but torch's schedules take longer to import than a search of the
    planner takes.
    """
    rounds = max(1, micro // num_ranks)
    if micro % rounds:
        raise ValueError(
            "make_table: expected num_micro_batches to be a number that interleaved takes, got "
            f"{micro} over {num_ranks} ranks: no multiple of its {rounds} rounds"
        )
    each, total, rows = micro // rounds, micro * count, []
    for rank in range(num_ranks):
        # For each forward pass in order: the place of its stage on the rank, and its micro-batch.
        passes = [
            (turn, number * each + i)
            for number in range(rounds)
            for turn in range(count)
            for i in range(each)
        ]
        forward = [Action(turn * num_ranks + rank, "F", i) for turn, i in passes]
        backward = [Action((count - 1 - turn) * num_ranks + rank, "B", i) for turn, i in passes]
        ahead = min(total, (count - 1) * each + 2 * (num_ranks - 1 - rank))
        row = forward[:ahead]
        for i, action in enumerate(backward):
            row += [*forward[i + ahead : i + ahead + 1], action]
        rows.append(row)
    return ActionTable(rows)


def _of_slices(num_ranks: int, micro: int, slices: int) -> ActionTable:
    """All slices forward, then backward in the reverse order."""
    units = [(i, part) for i in range(micro) for part in range(slices)]
    order = [("F", *unit) for unit in units] + [("B", *unit) for unit in reversed(units)]
    return ActionTable(
        [[Action(rank, kind, i, 0, part) for kind, i, part in order] for rank in range(num_ranks)]
    )


def _without_flush(name: str, num_ranks: int, micro: int, every: int) -> ActionTable:
    """1F1B over all micro-batches, with an update after each `every` backward passes."""
    rows = []
    for rank in range(num_ranks):
        row: list[Action] = []
        made, versions = 0, {}
        for kind, i in _one_f_one_b(num_ranks - 1 - rank, rank, micro):
            if kind == "F":
                versions[i] = {
                    "pipedream": made,
                    "pipedream-2bw": max(0, i // every - 1),
                    "hetpipe": max(0, i - num_ranks + 1),
                }[name]
            row.append(Action(rank, kind, i, version=versions[i]))
            if kind == "B" and (i + 1) % every == 0:
                made += 1
                row.append(Action(rank, UPDATE, version=made))
        rows.append(row)
    return ActionTable(rows)


def _chimera(num_ranks: int, micro: int) -> ActionTable:
    """Two chains of 1F1B, in the order of actions of equal length that begin as soon as they can.

    Of the actions that a rank could begin, backward passes go before forward passes, and then those
    of the micro-batch that is furthest on its way. A stage holds at most a micro-batch for itself
    and each stage after it, and at most num_ranks / 2.
    """
    if num_ranks % 2 or micro % 2:
        raise ValueError(
            "make_table: expected num_ranks and num_micro_batches of chimera to be even, got "
            f"{num_ranks} and {micro}"
        )
    last = num_ranks - 1
    # For each rank, its actions in the order of preference, with the action that each waits for.
    todo: list[dict[Action, Action | None]] = [{} for _ in range(num_ranks)]
    for kind, stage, i in itertools.product("BF", reversed(range(num_ranks)), range(micro)):
        stage = stage if kind == "F" else last - stage
        action = Action(stage, kind, i, i % 2)
        before = action._replace(stage=stage - 1) if stage else None
        if kind == "B":
            after = action._replace(stage=stage + 1)
            before = after if stage < last else action._replace(kind="F")
        todo[last - stage if i % 2 else stage][action] = before
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action | None] = {None}
    while any(todo):
        begun = []
        for row, own in zip(rows, todo, strict=True):
            held = Counter(a.stage for a in row if a.kind == "F")
            held.subtract(a.stage for a in row if a.kind == "B")
            for action, before in own.items():
                room = min(num_ranks - action.stage, num_ranks // 2) - held[action.stage]
                if before in done and (action.kind == "B" or room > 0):
                    row.append(action)
                    begun.append(action)
                    del own[action]
                    break
        done.update(begun)
    return ActionTable(rows)
