"""Functions that ranks run together in one spawn, since starting a rank takes long."""

import traceback


def run_in_order(functions):
    """Each function's traceback, None where it passed; ends with the first failure."""
    found = dict.fromkeys(functions, "not run, after another failure")
    for name, function in functions.items():
        try:
            function()
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
            break
    return found


def assert_all_passed(outcomes, name):
    failed = {rank: found[name] for rank, found in enumerate(outcomes) if found[name]}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
