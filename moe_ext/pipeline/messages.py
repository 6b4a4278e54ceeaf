"""Adds sends and receives to a pipeline's table."""

from __future__ import annotations

from moe_ext.pipeline.check import check_table
from moe_ext.pipeline.simulate import Costs, Replay
from moe_ext.pipeline.table import Action, ActionTable


def add_messages(table: ActionTable, costs: Costs | None = None) -> ActionTable:
    """Add sends and receives to a table that has none.

    A send stands right after the action whose result it sends. Its receive is posted before the
    first action of the receiver that ends later, according to the costs. The message travels during
    that action, and exchanges between experts inside the action do not queue behind the message.
    Ranks never wait for each other for ever, even if a send waits for its receive: each send and
    its receive are added at once, in the order in which actions end.

    Args:
        table: as `check_table` accepts it, without messages.
        costs: costs of the actions; each costs 1 by default.

    Returns:
        The table with messages.

    Raises:
        ValueError: the table has messages, or is not in order.
    """
    if table.has_messages:
        raise ValueError("add_messages: expected table to have no messages, got one with messages")
    check_table(table)
    rows: list[list[Action]] = [[] for _ in table.rows]
    order = Replay(table, costs or Costs()).order
    for rank, span in sorted(order, key=lambda each: each[1].end):
        rows[rank].append(span.action)
        for part in span.action.parts or (span.action,):
            send = table.send(part)
            if send is not None:
                receive = table.peer(send)
                rows[rank].append(send)
                rows[table.rank(receive)].append(receive)
    return ActionTable(rows)
