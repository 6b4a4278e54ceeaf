"""Stands in for hypothesis where it is not installed: its tests are skipped, the others run.

`make gpu-check` takes the Python of the machine with the GPU as it is.
"""

import sys
import types

import pytest


class _Anything:
    """Whatever is asked of it, it gives itself."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __or__(self, other):
        return self


def _given(*arguments, **strategies):
    def skipped(test):
        @pytest.mark.skip(reason="no hypothesis")
        def stand_in():
            pass

        stand_in.__name__ = test.__name__
        return stand_in

    return skipped


def install() -> None:
    module = types.ModuleType("hypothesis")
    module.given = _given
    module.settings = lambda **options: lambda test: test
    module.HealthCheck = module.strategies = _Anything()
    sys.modules["hypothesis"] = module
    sys.modules["hypothesis.strategies"] = module.strategies
