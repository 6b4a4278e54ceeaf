"""Plugin of pytest for gpu_check: writes each result at once, and ends where a device is broken.

A faulty kernel makes every later call of its process fail, or ends the process. Whoever runs pytest
again with the same file of results goes on behind that test; its other cases are left out.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest

SECONDS = 60  # seconds of one test: a kernel that hangs ends the process too
EXIT = 9


def results_file() -> Path:
    """File of JSON lines: the number of tests, a test's begin, its outcome, the session's end."""
    return Path(os.environ["MOE_EXT_RESULTS"])


def records(path: Path) -> list[dict[str, str]]:
    """The objects written so far; the last line may be cut off."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def ended(path: Path) -> dict[str, str]:
    """The outcome of each test; "died" where it is not known."""
    return {r["test"]: r.get("outcome", "died") for r in records(path) if "test" in r}


def write(**record: str) -> None:
    """Adds a line."""
    with results_file().open("a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has run, and the other cases of functions that ended their process."""
    outcomes = ended(results_file())
    deadly = {test.partition("[")[0] for test, outcome in outcomes.items() if outcome == "died"}
    left = [
        item
        for item in items
        if item.nodeid not in outcomes and item.nodeid.partition("[")[0] not in deadly
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


def pytest_collection_finish(session: pytest.Session) -> None:
    """Notes how many there are."""
    write(collected=str(len(ended(results_file())) + len(session.items)))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Notes a test before it runs."""
    write(test=nodeid)
    faulthandler.dump_traceback_later(SECONDS, exit=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes how it ended; where it broke the device, ends the process and leaves that unknown."""
    if report.failed and not device_answers():
        os._exit(EXIT)
    if report.when == "call" or not report.passed:
        write(test=report.nodeid, outcome=report.outcome, text=report.longreprtext[-1500:])


def pytest_runtest_logfinish() -> None:
    """Calls the watch off."""
    faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish() -> None:
    """Tells that no test is left."""
    write(end="reached")


def device_answers() -> bool:
    """True if the process can still use its GPU, or has none."""
    try:
        cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
        if cuda and cuda.is_available():
            cuda.synchronize()
    except RuntimeError:
        return False
    return True
