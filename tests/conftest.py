"""Fixtures that the whole suite shares."""

import contextlib
import fnmatch
import functools
import gc
import importlib.util
import os

import emulation
import marks
import pairwise
import pytest
import quick_guards  # noqa: F401
import torch
import torch.distributed as dist
import without_hypothesis
from instruction_sets import ISAS, forced_isa

import moe_ext  # noqa: F401  (registers the operators that the fixtures call)
from moe_ext import testing

if importlib.util.find_spec("hypothesis") is None:
    without_hypothesis.install()
elif not pairwise.FULL:
    from hypothesis import settings

    # Every run tries the same examples: a change is judged by what it changed. `make test-full`
    # tries others each time.
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")

CUDA = ["cuda"] if torch.cuda.is_available() else []

# Threads of OpenMP that wait sleep, in workers and other processes that tests start: spinning takes
# longer than most loops do, on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores, also with interpreters that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ranks outnumber the cores: who is woken waits for its turn. Otherwise it interrupts the thread
    # that holds a Gloo connection's lock, and then spins on that lock.
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# Ranks are forked from a process that has imported these: each would take seconds over them.
testing.PRELOADED += [
    *(
        f"moe_ext.{name}"
        for name in ("compression", "integrations", "optim", "pipeline", "planner")
    ),
    *(f"moe_ext.attention.{name}" for name in ("context", "huggingface.prepare", "module", "rsa")),
    "moe_ext.nn.transformer_block",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "hypothesis",
    "pytest",
]
TOOLS = [
    "torch._dynamo",
    "lightning.pytorch",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "tests.quick_guards",
    # The first compiles optimizers as it is imported.
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "transformers.trainer",
]


def pytest_configure(config):
    """Has ranks forked from the tools, too, but for tests that run alone, which use none."""
    if config.option.markexpr != "serial":
        testing.PRELOADED += TOOLS


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Runs a test marked `every_isa` once for each variant of the SIMD loops."""
    if metafunc.definition.get_closest_marker("every_isa"):
        backends = pytest.mark.parametrize("backend", [*ISAS, "simt", *CUDA], indirect=True)
        metafunc.definition.add_marker(backends)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks tests by their names, keeps of each function some of its cases, and orders files."""
    places = {name: place for place, name in enumerate(marks.DEAREST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    for item in items:
        for mark in marks_of(item.nodeid.partition("[")[0]):
            item.add_marker(mark)
    if pairwise.FULL:
        for item in items:
            fuzz_longer(item)
    # Who names a case on the command line wants it.
    elif not any("[" in argument for argument in config.args):
        keep_pairs(config, items)


@functools.cache
def marks_of(function):
    """Marks of all cases of a test."""
    return [
        mark
        for mark, patterns in marks.MARKS.items()
        if any(fnmatch.fnmatchcase(function, pattern) for pattern in patterns)
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    """Lets workers of xdist send what a summary shows of a test, not six messages."""
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = functools.partial(tell_less, plugin.sendevent)


def tell_less(send, name, **content):
    """Send an event, but for starts and ends of tests, and passed set-ups and tear-downs.

    Those that `--durations` shows are sent, too.
    """
    report = content.get("data", {}) if name == "testreport" else {}
    is_dull = report.get("when") in ("setup", "teardown") and report["duration"] < 0.005
    if name in ("logstart", "logfinish") or (is_dull and report["outcome"] == "passed"):
        return
    if report.get("outcome") == "passed":
        report["keywords"] = {}
    send(name, **content)


@pytest.fixture(scope="module", autouse=True)
def forget_graphs():
    """Forgets what other files have compiled: torch gives up a function after eight times."""
    torch.compiler.reset()


@pytest.fixture(scope="module", autouse=True)
def leave_no_group():
    """Ends a process group that tools have made in this process, for the next file."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_collection_finish():
    """Spares the collector of garbage what was imported, and the tests."""
    gc.freeze()


def keep_pairs(config, items):
    """Keeps of each function the cases that hold every pair of its parameters' values.

    Functions marked `product` run every combination.
    """
    functions = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("product") is None:
            functions.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    left_out = set()
    for cases in functions.values():
        # Cases of one value hold the same object.
        rows = [tuple(map(id, case.callspec.params.values())) for case in cases]
        kept = pairwise.covering(rows)
        left_out.update(set(cases).difference(cases[i] for i in kept))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def fuzz_longer(item):
    """Ten times the examples of a test by hypothesis."""
    function = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
    name = "_hypothesis_internal_use_settings"
    settings = getattr(function, name, None)
    if settings is not None and not hasattr(function, "fuzzed_longer"):
        function.fuzzed_longer = True
        longer = type(settings)(settings, max_examples=10 * settings.max_examples)
        setattr(function, name, longer)


@pytest.fixture(params=ISAS)
def isa(request):
    """Forces one variant of the SIMD loops for the test, and puts the former one back."""
    with forced_isa(request.param):
        yield request.param


@contextlib.contextmanager
def running_on(name):
    if name == "simt" and not emulation.is_built():
        pytest.skip("no emulation of CUDA: build with MOE_EXT_TESTS=1")
    where = torch.device("cuda" if name == "cuda" else "cpu")
    with contextlib.ExitStack() as stack:
        if name == "simt":
            stack.enter_context(emulation.emulated_cuda())
        if name == "cuda":
            # Tensors that a test makes without naming a device live there too.
            stack.enter_context(where)
        yield where


@pytest.fixture(params=["cpu", "simt", *CUDA])
def device(request):
    """Where the tensors live; under "simt" that is the CPU, and CUDA kernels are emulated."""
    with running_on(request.param) as where:
        yield where


@pytest.fixture
def moved(device, request):
    """Moves every tensor of a nested value to `device`, for a case of arguments to refuse.

    Skips a case that only a look at the values can refuse, where CUDA kernels run.
    """
    names = request.node.callspec.params
    looks = any(
        mark in str(names.get("message"))
        for mark in (" at token", " at expert", " at index", "NaN", "or -1")
    )
    if looks and (device.type == "cuda" or emulation.is_active()):
        pytest.skip("CUDA operators do not look at values")

    def move(value):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, dict):
            return {name: move(item) for name, item in value.items()}
        return tuple(map(move, value)) if isinstance(value, tuple) else value

    return move


@pytest.fixture(params=[*(ISAS if pairwise.FULL else ["cpu"]), "simt", *CUDA])
def backend(request):
    """As `device`; in a test marked `every_isa`, each variant of the SIMD loops too."""
    if request.param not in ISAS:
        with running_on(request.param) as where:
            yield where
        return
    with forced_isa(request.param):
        yield torch.device("cpu")


@pytest.fixture
def num_threads():
    """A setter of torch's thread count that is undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed():
    # `torch.manual_seed` keeps the caller's stack for each kind of device that may be used later.
    (torch if CUDA else torch.default_generator).manual_seed(0)


def pytest_fixture_setup(fixturedef):
    # A fixture of a module is set up before the fixture `seed`, which belongs to a test.
    if fixturedef.scope != "function":
        torch.manual_seed(0)
