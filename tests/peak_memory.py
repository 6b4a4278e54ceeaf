"""Measures the peak memory of a call."""

import gc
import itertools

import torch


def peak_bytes(function):
    """Most bytes that the allocator of the CPU has handed out during a call, above the start."""
    gc.collect()
    gc.collect()  # garbage of earlier tests must not be freed meanwhile
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))
