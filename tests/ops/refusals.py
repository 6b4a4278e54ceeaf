"""Tables of what operators refuse."""

import pytest
import torch

from moe_ext import ops


def parametrize(table):
    """A mark with every case of a table: names, arguments and messages.

    Args:
        table: by operator, its arguments by name, and then changes of them with the message.
    """
    cases = [
        (name, given | changes, message)
        for name, (given, *rows) in table.items()
        for changes, message in rows
    ]
    ids = [f"{name}-{message}" for name, _, message in cases]
    return pytest.mark.parametrize(("name", "given", "message"), cases, ids=ids)


def check(name, given, message):
    """Has the message begin with the operator, or as it says itself."""
    call = getattr(ops, name, None) or getattr(torch.ops.moe_ext, name)
    whole = message if message.startswith("^") else f"^{name}: expected .*{message}"
    with pytest.raises(RuntimeError, match=whole):
        call(**given)


def test(table):
    """A test of every case of a table: `test_refuses = refusals.test(REFUSED)`."""

    @parametrize(table)
    def refuses(name, given, message):
        check(name, given, message)

    return refuses


def test_on_devices(table):
    """The same with tensors on each device."""

    @parametrize(table)
    def refuses(moved, name, given, message):
        check(name, moved(given), message)

    return refuses
