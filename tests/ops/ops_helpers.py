"""Dtypes, roundings and settings that tests of operators share."""

import torch
from hypothesis import HealthCheck, settings

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Half a unit in the last place.
UNIT = {
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
# One rounding to a 16-bit dtype on each side.
GRAD_ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
NUM_TOKENS = [0, 1, 255, 256, 257]


def acc_dtype(dtype):
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tolerance(dtype, terms, others=32):
    """Relative: two sums of `terms` positive numbers, and so many roundings around them."""
    return (2 * terms + others) * UNIT[acc_dtype(dtype)]


def examples(count):
    """Settings of hypothesis; a fixture gives every example the same device."""
    checks = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, deadline=None, suppress_health_check=checks)


def saved_by(function):
    """Tensors that autograd saves in a call."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function()
    return saved
