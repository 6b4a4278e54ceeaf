"""Runs many checks in one spawn of ranks, since starting a rank takes seconds."""

import traceback

import pytest

from moe_ext.testing import spawn_ranks


def run_checks(rank, checks):
    """Outcome of each check on this rank: None, or a traceback."""
    outcome = {}
    for check in checks:
        try:
            check()
            outcome[check.__name__] = None
        except BaseException:
            outcome[check.__name__] = traceback.format_exc()
    return outcome


def outcomes(world_size, checks, **kwargs):
    """What every rank found, as a list over ranks."""
    return spawn_ranks(run_checks, world_size, checks, **kwargs)


def assert_passed(found, check):
    failed = [
        f"rank {rank}: {outcome[check.__name__]}"
        for rank, outcome in enumerate(found)
        if outcome[check.__name__] is not None
    ]
    assert not failed, "\n".join(failed)


def raised(error, match, function, *args):
    """Check that a call raises; for use inside a rank."""
    with pytest.raises(error, match=match) as caught:
        function(*args)
    return caught.value
