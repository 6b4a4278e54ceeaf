"""Checks that ranks run together in one spawn, since starting a rank takes seconds."""

import contextlib
import functools
import tempfile
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from pairwise import pairs

from moe_ext.comm import failures
from moe_ext.distributed.dtensor import is_dtensor, local_part
from moe_ext.testing import spawn_ranks


class Checks(dict):
    """Names to functions that every rank calls; as a decorator, one for each tuple of arguments."""

    def __call__(self, *cases):
        def register(function):
            for case in cases or [()]:
                name = "-".join([function.__name__, *map(str, case)])
                self[name] = functools.partial(function, *case)
            return function

        return register

    @classmethod
    def of(cls, namespace):
        """Those of a module, which begin with check_."""
        return cls({name: f for name, f in namespace.items() if name.startswith("check_")})

    def test(self, *num_ranks, **limits):
        """A test of each check on so many ranks, or on each of these numbers of ranks.

        It has the name that a module gives it: `test_over_ranks = CHECKS.test(4)`.
        """

        @pytest.mark.parametrize("name", self)
        def on_ranks(name):
            self.assert_passed(*num_ranks, name, **limits)

        @pytest.mark.parametrize("count", num_ranks)
        @pytest.mark.parametrize("name", self)
        def on_each(count, name):
            self.assert_passed(count, name, **limits)

        return on_ranks if len(num_ranks) == 1 else on_each

    def assert_passed(self, num_ranks, name, **limits):
        """Assert that a check passed on every one of so many ranks, which run all of them once.

        The limits are those of `spawn_ranks`, the same for all checks.
        """
        found = self.__dict__.setdefault("found", {})
        if num_ranks not in found:
            found[num_ranks] = spawn_ranks(_run_on_rank, num_ranks, dict(self), **limits)
        assert_passed(found[num_ranks], name)


class ChecksOn(dict):
    """Checks by a setting of ranks, such as their number; those of one share a spawn of ranks.

    As a decorator it registers a function in all settings, once for each tuple of arguments.
    """

    def __init__(self, *settings):
        super().__init__((setting, Checks()) for setting in settings)
        self._alone = None

    def __call__(self, *cases, on=None):
        def register(function):
            for setting in self if on is None else on:
                self[setting](*cases)(function)
            return function

        return register

    def pairs(self, *parameters, on=None):
        """Register a function in cases in which any two values of settings or parameters meet."""

        def register(function):
            for setting, *case in pairs(self if on is None else on, *parameters):
                self[setting](tuple(case))(function)
            return function

        return register

    def names(self):
        """(setting, name) of all checks."""
        return [(setting, name) for setting, checks in self.items() for name in checks]

    def test(self, **limits):
        """A test of all checks, each on its number of ranks; as that of `Checks`."""

        @pytest.mark.parametrize(("num_ranks", "name"), self.names())
        def on_ranks(num_ranks, name):
            self.assert_passed(num_ranks, name, **limits)

        return on_ranks

    def assert_passed(self, num_ranks, name, **limits):
        """As that of `Checks`; a single rank is this process, without a group."""
        if num_ranks > 1:
            self[num_ranks].assert_passed(num_ranks, name, **limits)
            return
        if self._alone is None:
            self._alone = [run_checks(self[num_ranks])]
        assert_passed(self._alone, name)


def _run_on_rank(rank, functions):
    return run_checks(functions)


def run_checks(functions, *args, before=lambda: None):
    """Outcome of each function on this rank: None, or a traceback; ends with the first failure.

    From there on the ranks may be at different messages.
    """
    found = dict.fromkeys(functions, "not run, after another failure")
    for name, function in functions.items():
        before()
        try:
            function(*args)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
            break
    return found


def at_once(call, cases):
    """Each case to the future of `call(*case)`, for calls of which each waits most of the time."""
    with ThreadPoolExecutor(len(cases)) as threads:
        futures: dict[object, Future] = {case: threads.submit(call, *case) for case in cases}
    return futures


def ask_briefly():
    """Give a silent rank one second to answer after a failure on this rank, not five."""
    failures.diagnose = functools.partial(failures.diagnose, grace=1.0)


def raised(error, match, function, *args):
    """Check that a call raises; for use inside a rank."""
    with pytest.raises(error, match=match) as caught:
        function(*args)
    return caught.value


def assert_passed(outcomes, name):
    """AssertionError with what each rank that failed found."""
    failed = {rank: found[name] for rank, found in enumerate(outcomes) if found[name]}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


@contextlib.contextmanager
def shared_folder():
    """A folder of all ranks, gone when all have left the context."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def of_ranks(tensor, group=None):
    """A tensor of every rank, or of each its part of one; a collective."""
    mine = local_part(tensor.detach()).contiguous()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return found


def assert_same_bits(got, want):
    """Assert that nested values hold the same, in the same order."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same_bits(got[key], want[key])
    elif isinstance(want, list | tuple):
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
    else:
        assert got == want


def full(tensor):
    """The whole tensor, of which ranks may hold parts between them; a collective then."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
