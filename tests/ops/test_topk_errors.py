"""What gradient selection refuses, by the text of the error."""

import pytest
import refusals
import torch

from moe_ext import ops

GRAD, OWED, MOVED, READ = (torch.zeros(4, 6) for _ in range(4))
PAIRED = "velocity_in to be given where residual_in and velocity are, .* got "


ELSEWHERE = [
    ({"residual_in": GRAD.double()}, "residual_in to be Float, got Double"),
    (
        {"residual_in": torch.zeros(24)},
        r"residual_in to be of shape \[4, 6\], that of grad, got shape \[24\]",
    ),
    (
        {"residual_in": torch.zeros(6, 4).t()},
        r"residual_in to be contiguous, got a strided tensor of shape \[4, 6\]",
    ),
    (
        {"residual_in": OWED},
        "residual_in to be in memory of its own, got a part of residual's",
    ),
    (
        {"residual_in": MOVED, "velocity": MOVED, "velocity_in": READ},
        "residual_in to be in memory of its own, got a part of velocity's",
    ),
    (
        {"residual_in": READ, "velocity": MOVED, "velocity_in": MOVED},
        "velocity_in to be in memory of its own, got a part of velocity's",
    ),
    (
        {"residual_in": READ, "velocity": MOVED, "velocity_in": OWED},
        "velocity_in to be in memory of its own, got a part of residual's",
    ),
    (
        {"residual_in": READ, "velocity": MOVED, "velocity_in": torch.zeros(4)},
        r"velocity_in to be of shape \[4, 6\]",
    ),
    ({"residual_in": READ, "velocity": MOVED}, PAIRED + "None"),
    ({"velocity": MOVED, "velocity_in": READ}, PAIRED + "a tensor"),
    ({"residual_in": READ, "velocity_in": MOVED}, PAIRED + "a tensor"),
]
REFUSED = {
    "topk_compress_": [
        {"grad": GRAD, "residual": OWED, "k": 1},
        *ELSEWHERE,
        ({"grad": GRAD.int()}, "grad to be fl"),
        ({"residual": GRAD.double()}, "residual to be Float, got Double"),
        (
            {"grad": GRAD.bfloat16(), "residual": GRAD.bfloat16()},
            "residual to be Float, got BFloat16",
        ),
        (
            {"residual": torch.zeros(24)},
            r"residual to be of shape \[4, 6\], that of grad, got shape \[24\]",
        ),
        (
            {"residual": torch.zeros(6, 4).t()},
            r"residual to be contiguous, got a strided tensor of shape \[4, 6\]",
        ),
        ({"residual": GRAD}, "residual to be in memory of its own, got a part of grad's"),
        ({"velocity": OWED}, "velocity to be in memory of its own, got a part of residual's"),
        (
            {"velocity": torch.zeros(4)},
            r"velocity to be of shape \[4, 6\]",
        ),
        (
            {"k": 25},
            r"k to be in \[0, 24\], the elements of a gradient, got 25",
        ),
        (
            {"k": 7, "scope": "row"},
            r"k to be in \[0, 6\], the elements of a scope, got 7",
        ),
        ({"k": -1}, r"k to be in \[0, 24\].* got -1"),
        (
            {"velocity": GRAD.clone(), "momentum": 1.0},
            r"momentum to be in \[0, 1\), got 1",
        ),
        (
            {"residual_scale": float("nan")},
            "residual_scale to be finite and at least 0, got nan",
        ),
    ],
    "threshold_compress_": [
        {"grad": GRAD, "residual": OWED, "threshold": 1.0, "capacity": 3},
        *ELSEWHERE,
        (
            {"threshold": -1.0},
            "threshold to be finite and at least 0, got -1",
        ),
        (
            {"threshold": float("nan")},
            "threshold to be finite and at least 0, got nan",
        ),
        (
            {"threshold": torch.ones(1)},
            r"threshold to be a 0-D tensor \[\], got shape \[1\]",
        ),
        (
            {"threshold": torch.ones(()).double()},
            "threshold to be Float, got Double",
        ),
        (
            {"capacity": 25},
            r"capacity to be in \[0, 24\], the elements of grad, got 25",
        ),
        (
            {"threshold": torch.ones(()), "capacity": 2, "target": -1},
            "target to be at least 0, got -1",
        ),
    ],
}
test_refuses = refusals.test(REFUSED)


@pytest.mark.parametrize("scope", ["column", 0, -4, True, 2.0])
def test_refuses_a_scope(scope):
    with pytest.raises(ValueError, match=r"topk_compress_: expected scope to be one of .*, got "):
        ops.topk_compress_(GRAD, GRAD.clone(), 1, scope=scope)


def test_refuses_a_threshold_that_does_not_fit_the_scopes():
    with pytest.raises(ValueError, match=r"threshold_compress_: expected scope to be one of "):
        ops.threshold_compress_(GRAD, GRAD.clone(), 1.0, 1, scope="column")
    for bound, capacity, message in (
        (torch.ones(()), 1, r"threshold to be a 1-D tensor \[num_scopes\], got shape \[\]"),
        (torch.ones(3), 1, r"threshold to be of shape \[4\], one of each scope, got shape \[3\]"),
        (torch.ones(8)[::2], 1, r"threshold to be contiguous, got a strided tensor"),
        (torch.tensor([1, 1, -1.0, 1]), 1, r"threshold to be finite and at least 0, got -1"),
        (torch.ones(4), 7, r"capacity to be in \[0, 6\], the elements of a scope, got 7"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.threshold_compress_(GRAD, GRAD.clone(), bound, capacity, scope="row")
    for name, (given, *_) in REFUSED.items():
        call = getattr(torch.ops.moe_ext, name)
        bounds = {"threshold": torch.ones(4)} if "threshold" in given else {}
        with pytest.raises(RuntimeError, match=f"^{name}: expected scope_size to be .* got -1"):
            call(**(given | bounds), scope_size=-1)


def test_refuses_to_adapt_a_number():
    with pytest.raises(
        ValueError, match="threshold to be a tensor where a target adapts it, got 2"
    ):
        ops.threshold_compress_(GRAD, GRAD.clone(), 2.0, 1, target=3)


@pytest.mark.parametrize("offset", [0, 12])
def test_refuses_memory_that_overlaps_in_part(offset):
    memory = torch.zeros(36)
    with pytest.raises(RuntimeError, match="residual_in to be in memory of its own"):
        ops.topk_compress_(
            GRAD.view(-1), memory[offset:][:24], 1, residual_in=memory[12 - offset :][:24]
        )
