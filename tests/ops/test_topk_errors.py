"""What gradient selection refuses, by the text of the error."""

import pytest
import torch

from moe_ext import ops

GRAD = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.topk_compress_(GRAD.int(), GRAD, 1),
            r"^topk_compress_: expected grad to be fl",
        ),
        (
            lambda: ops.topk_compress_(GRAD, GRAD.double(), 1),
            r"expected residual to be Float, got Double",
        ),
        (
            lambda: ops.topk_compress_(GRAD.bfloat16(), GRAD.bfloat16(), 1),
            r"expected residual to be Float, got BFloat16",
        ),
        (
            lambda: ops.topk_compress_(GRAD, torch.zeros(24), 1),
            r"residual to be of shape \[4, 6\], that of grad, got shape \[24\]",
        ),
        (
            lambda: ops.topk_compress_(GRAD, torch.zeros(6, 4).t(), 1),
            r"residual to be contiguous, got a strided tensor of shape \[4, 6\]",
        ),
        (
            lambda: ops.topk_compress_(GRAD, GRAD, 1),
            r"residual to be in memory of its own, got a part of grad's",
        ),
        (
            lambda: ops.topk_compress_(GRAD, (r := GRAD.clone()), 1, velocity=r),
            r"velocity to be in memory of its own, got a part of residual's",
        ),
        (
            lambda: ops.topk_compress_(GRAD, GRAD.clone(), 1, velocity=torch.zeros(4)),
            r"velocity to be of shape \[4, 6\]",
        ),
        (
            lambda: ops.topk_compress_(GRAD, GRAD.clone(), 25),
            r"k to be in \[0, 24\], the elements of a gradient, got 25",
        ),
        (
            lambda: ops.topk_compress_(GRAD, GRAD.clone(), 7, scope="row"),
            r"k to be in \[0, 6\], the elements of a scope, got 7",
        ),
        (lambda: ops.topk_compress_(GRAD, GRAD.clone(), -1), r"k to be in \[0, 24\].* got -1"),
        (
            lambda: ops.topk_compress_(GRAD, GRAD.clone(), 1, velocity=GRAD.clone(), momentum=1.0),
            r"momentum to be in \[0, 1\), got 1",
        ),
        (
            lambda: ops.topk_compress_(GRAD, GRAD.clone(), 1, residual_scale=float("nan")),
            r"residual_scale to be finite and at least 0, got nan",
        ),
        (
            lambda: torch.ops.moe_ext.topk_compress_(GRAD, GRAD.clone(), 1, -3),
            r"scope_size to be at least 0, got -3",
        ),
        (
            lambda: ops.threshold_compress_(GRAD, GRAD.clone(), -1.0, 3),
            r"^threshold_compress_: expected threshold to be finite and at least 0, got -1",
        ),
        (
            lambda: ops.threshold_compress_(GRAD, GRAD.clone(), float("nan"), 3),
            r"threshold to be finite and at least 0, got nan",
        ),
        (
            lambda: ops.threshold_compress_(GRAD, GRAD.clone(), torch.ones(1), 3),
            r"threshold to be a 0-D tensor \[\], got shape \[1\]",
        ),
        (
            lambda: ops.threshold_compress_(GRAD, GRAD.clone(), torch.ones(()).double(), 3),
            r"threshold to be Float, got Double",
        ),
        (
            lambda: ops.threshold_compress_(GRAD, GRAD.clone(), 1.0, 25),
            r"capacity to be in \[0, 24\], the elements of grad, got 25",
        ),
        (
            lambda: ops.threshold_compress_(GRAD, GRAD.clone(), torch.ones(()), 2, target=-1),
            r"target to be at least 0, got -1",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


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
    with pytest.raises(RuntimeError, match="scope_size to be at least 0, got -1"):
        arguments = (GRAD, GRAD.clone(), torch.ones(4), 1, 0, None, 0.0, 1.0, True, -1)
        torch.ops.moe_ext.threshold_compress_(*arguments)


def test_refuses_to_adapt_a_number():
    with pytest.raises(
        ValueError, match="threshold to be a tensor where a target adapts it, got 2"
    ):
        ops.threshold_compress_(GRAD, GRAD.clone(), 2.0, 1, target=3)
