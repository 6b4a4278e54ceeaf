"""Collectives that are compared over the ranks before they are sent."""

import functools
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ext import MoELayer
from moe_ext.comm import collectives, debugging, failures
from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.nn import Dispatch, RowBudget
from moe_ext.testing import spawn_ranks


def message_of(function, *args, **options):
    with pytest.raises(ValueError) as error:
        function(*args, **options)
    text, seen, where = str(error.value).partition("; seen by rank ")
    assert seen and where.startswith(f"{dist.get_rank()} in a message")
    return text + where[len("0 in a message") :]


class TwoShapes(torch.nn.Module):
    """Sends what it gets."""

    def forward(self, x):
        with failures.in_layer(weakref.ref(self)):
            return collectives.all_gather(x, dist.group.WORLD, operation="rows")


def every_kind_of_difference(rank):
    world = dist.group.WORLD
    debugging.ENABLED = True
    try:
        found = {}
        # What is alike goes through, training of a layer too.
        layer = MoELayer(8, 6, 4, 2, ep_group=world)
        layer(torch.randn(3 * rank, 8)).sum().backward()
        x = torch.ones(2, 3)
        assert collectives.all_reduce_(x, world, operation="sums").sum() == 12
        # Rank 1 differs in the shape, the dtype, the splits, the collective, and the order.
        x = torch.ones(2 + rank, 3)
        found["shape"] = message_of(collectives.all_reduce_, x, world, operation="sums")
        x = torch.ones(2, 3, dtype=torch.float64 if rank else torch.float32)
        found["dtype"] = message_of(collectives.all_gather, x, world, operation="parts")
        rows, splits = torch.ones(3, 8), ([1, 2], [1, 1 + rank])
        found["splits"] = message_of(all_to_all_rows, rows, world, *splits, operation="rows")
        x = torch.ones(2, 3 + rank)
        splits = [1, 1], [1, 1]
        found["row"] = message_of(all_to_all_rows, x, world, *splits, operation="rows")
        start = collectives.reduce_scatter if rank else collectives.all_gather
        found["kind"] = message_of(start, torch.ones(2, 3), world, operation="sums")
        found["order"] = message_of(
            collectives.all_reduce_, torch.ones(2), world, operation=f"step {rank}"
        )
        found["layer"] = message_of(torch.nn.Sequential(TwoShapes()), torch.ones(2, 3 + rank))
        # The group is as it was.
        assert collectives.all_reduce_(torch.ones(1), world, operation="sums") == 2
    finally:
        debugging.ENABLED = False
    return found


def test_who_differs_is_named():
    first, second = spawn_ranks(every_kind_of_difference, 2)
    orders = [found.pop("order").partition(": ") for found in (first, second)]
    assert [order[0] for order in orders] == ["step 0", "step 1"]
    assert "expected the operation to be equal on every rank" in orders[0][2]
    assert first == second and orders[0][2] == orders[1][2]
    assert "rows: expected the shape" in first["layer"] and first["layer"].endswith("layer '0'")
    assert first["shape"] == (
        "sums: expected the shape to be equal on every rank, got (2, 3) on rank 0, (3, 3) on rank 1"
    )
    assert "parts: expected the dtype to be equal" in first["dtype"]
    assert "torch.float32 on rank 0, torch.float64 on rank 1" in first["dtype"]
    assert first["splits"] == (
        "rows: expected rank 1 to receive the 2 rows that rank 0 sends it, got 1 in its splits"
    )
    assert "rows: expected the shape of a row to be equal" in first["row"]
    assert "all_gather on rank 0, reduce_scatter on rank 1" in first["kind"]


WAYS = ({"dispatcher": "alltoall"}, {"dispatcher": "dedup"}, {})
WAYS = (*WAYS, {"dispatcher": "alltoall", "row_budget": RowBudget(16, static=True)})


def names_of(compare):
    return {call.args[3] for call in compare.call_args_list}


def of_one_layer(rank):
    world = dist.group.WORLD
    texts, counts = [], []
    for options in WAYS:

        def made(debug=None, options=options):
            way = Dispatch(options.get("dispatcher", "auto"), debug=debug)
            return MoELayer(8, 6, 4, 2, ep_group=world, **options | {"dispatcher": way})

        watched, silent, left_out = made(debug=True), made(), made(debug=False)
        with mock.patch.object(debugging, "compare", side_effect=debugging.compare) as compare:
            compared = functools.partial(names_of, compare)
            x = torch.randn(3, 8, requires_grad=True)
            silent(x).sum().backward()
            assert not compared(), compared()
            y = watched(x)
            forward = compared()
            compare.reset_mock()
            y.sum().backward()
            counts.append((sorted(forward), sorted(compared())))
            compare.reset_mock()
            with mock.patch.object(debugging, "ENABLED", True):
                left_out(x).sum().backward()
            assert not compared(), compared()
        with pytest.raises(ValueError) as error:
            made(debug=bool(rank))(x)
        texts.append(str(error.value))
    return texts, counts


def test_a_layer_is_compared_by_itself():
    (texts, counts), other = spawn_ranks(of_one_layer, 2)
    assert (texts, counts) == other
    for text in texts:
        assert "expected debug (or else MOE_EXT_DEBUG) to be equal on every rank" in text
        assert "False on rank 0, True on rank 1" in text
    for forward, backward in counts:
        assert any("counts" in name for name in forward), forward
        assert any("combine" in name for name in backward), backward
        assert any("dispatch" in name or "chunk" in name for name in backward), backward


def test_off_by_default(monkeypatch):
    assert not debugging.ENABLED

    def fail(*_arguments):
        raise AssertionError

    monkeypatch.setattr(debugging, "compare", fail)
    assert collectives.all_reduce_(torch.ones(1), None, operation="sums") == 1
