"""A table behind a server, trained by two workers, against one process; what they send."""

import parameter_server as ps
import pytest
import torch
from torch import nn

from moe_ext.testing import spawn_ranks

STEPS = 4


def run(rank, path):
    """What the rank has in the end, and the bytes of all tensors that went through its calls."""
    moved, call = [0], ps.rpc.rpc_sync

    def counted(to, function, args):
        result = call(to, function, args)
        tensors = [x for x in (*args, *(result or ())) if isinstance(x, torch.Tensor)]
        moved[0] += sum(x.untyped_storage().nbytes() for x in tensors)
        return result

    ps.rpc.rpc_sync = counted
    return ps.run(rank, 3, f"file://{path}", STEPS), moved[0]


def one_process():
    server = ps.Server(2, 1.0)
    table, weight = nn.Parameter(server.table), nn.Parameter(server.weight)
    optimizer = torch.optim.SGD([table, weight], lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [ps.batch(step, worker) for worker in (1, 2)]
        sum(ps.loss_of(table[rows], weight, clicks) / 2 for rows, clicks in batches).backward()
        optimizer.step()
    return table.detach(), weight.detach()


def test_equals_one_process_and_sends_rows_alone(tmp_path):
    (trained, _), *moved = spawn_ranks(run, 3, tmp_path / "rpc")
    for found, want in zip(trained, one_process(), strict=True):
        # Gradients of 64 summands of size 1 in another order, in 4 steps.
        torch.testing.assert_close(found, want, rtol=0, atol=4 * 64 * 2**-24)
    for worker, (bytes_moved, through_calls) in enumerate(moved, 1):
        rows = sum(ps.batch(step, worker)[0].unique().numel() for step in range(STEPS))
        assert bytes_moved == 2 * (rows * (8 + 4 * ps.DIM) + STEPS * 4 * ps.DIM)
        # The worker counts its rows, the test what is called with: rows go with both calls.
        assert through_calls == bytes_moved
        # A table that is sent whole both ways, as a dense all-reduce of its gradient would.
        assert bytes_moved < 0.02 * 2 * STEPS * 4 * ps.DIM * ps.ROWS


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        ps.main(["--steps", "0"])
    assert "expected --steps to be at least 1, got 0" in capsys.readouterr().err
