"""Gradients of weights on a stream of their own, on a device whose streams have clocks."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from moe_ext import _runtime_library
from moe_ext.comm import point_to_point
from moe_ext.pipeline import Pipeline, make_table

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "_C_streams.so"
MAIN, SIDE = 0, 2  # the stream of the seeded races is 1
needs_streams = pytest.mark.skipif(
    not LIBRARY.exists() or _runtime_library.load() is None,
    reason="build/_C_streams.so or moe_ext._runtime is not built",
)


@functools.cache
def steps():
    script = Path(__file__).with_name("streams_script.py")
    done = subprocess.run(
        [sys.executable, script, LIBRARY], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_streams
@pytest.mark.parametrize("name", ["zbv", "mixed"])
def test_gradients_have_the_same_bits_without_a_race(name):
    found = steps()[name]
    assert steps()["seeded"] == [
        "aten::add on stream 1 reads what stream 0 uses",
        "aten::mul on stream 0 reads what stream 1 uses",
        "a new tensor of stream 0 has memory that stream 1 still uses",
    ]
    assert not found["main"]["races"] and not found["side"]["races"]
    assert found["side"]["grads"] == found["main"]["grads"]
    for side, cpu in zip(found["side"]["grads"], found["cpu"], strict=True):
        torch.testing.assert_close(torch.tensor(side), torch.tensor(cpu))


@needs_streams
@pytest.mark.parametrize(("name", "num_units"), [("zbv", 8), ("mixed", 4)])
def test_all_of_w_is_on_its_stream_and_waits_are_late(name, num_units):
    """In two steps, of stages whose input has a gradient: of the first stage W computes all."""
    found = steps()[name]
    events = [tuple(event) for event in found["side"]["events"]]
    kernels = [(kernel, stream) for kernel, stream in events if not kernel.startswith("waits")]
    assert {stream for _, stream in kernels} == {MAIN, SIDE}
    on_main = [kernel for kernel, stream in kernels if stream == MAIN]
    without = [kernel for kernel, _ in found["main"]["events"]]
    of_weights = [kernel for kernel, stream in kernels if stream == SIDE]
    assert sorted(on_main + of_weights) == sorted(without)
    # Each linear layer's product of a weight, one of which is used twice.
    assert of_weights.count("aten::mm") == 3 * num_units
    waits = [event for event in events if event[0].startswith("waits")]
    assert waits.count((f"waits for {SIDE}", MAIN)) == num_units == len(waits) // 2
    assert waits.count((f"waits for {MAIN}", SIDE)) == num_units
    # The main stream goes on before it waits, but where B adds to the same gradients.
    lateness, since = [], 0
    for kernel, stream in events:
        if stream == SIDE:
            since = 0
        elif kernel.startswith("waits"):
            lateness.append(since)
        else:
            since += 1
    assert len([late for late in lateness if late > 5]) >= num_units - 2


def test_without_the_compiled_module_it_is_refused_on_cuda_alone():
    stage = nn.Linear(2, 2)
    with mock.patch.object(_runtime_library, "load", lambda: None):
        Pipeline(make_table("gpipe", 1, 2), {0: stage}, nn.functional.mse_loss, weight_stream=True)
        with (
            mock.patch.object(point_to_point, "goes_in_order", lambda device: True),
            pytest.raises(ValueError, match=r"expected weight_stream to be False without moe_ext"),
        ):
            Pipeline(
                make_table("gpipe", 1, 2), {0: stage}, nn.functional.mse_loss, weight_stream=True
            )
