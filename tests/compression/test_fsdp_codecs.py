"""A codec from outside in the messages of FSDP2; four ranks, as two nodes of two."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from fsdp_checks import (
    assert_nothing_is_lost,
    mesh,
    node_mesh,
    train,
    wrapped,
)
from outside_codecs import Short
from rank_checks import Checks

from moe_ext.compression import Quantize, Threshold, TopK, register_codec
from moe_ext.compression.fsdp import CompressedReduceScatter, zero_plus_plus
from moe_ext.distributed import count_traffic


@dataclass(frozen=True)
class Brief(Short):
    """The same by a name of its own."""

    name: ClassVar[str] = "brief"


@dataclass(frozen=True)
class Whole(Short):
    """The same, of whole gradients only."""

    name: ClassVar[str] = "whole"
    shardable: ClassVar[bool] = False


register_codec("brief", lambda density: Brief())
four = Checks()
SCATTERED = {"zero_quantized_gradients": True, "error_feedback": True}


def compressed(kind, codec):
    if kind == "scattered":
        model = wrapped(mesh())
        return model, zero_plus_plus(model, gradient_format=codec, **SCATTERED)
    model, nodes = wrapped(node_mesh()["local"]), node_mesh()["node"].get_group()
    return model, zero_plus_plus(model, node_group=nodes, node_codec=codec)


@four(
    ("scattered", "brief"),
    ("scattered", Brief()),
    ("scattered", Quantize("int6", block=None)),
    ("scattered", TopK(0.1)),
    ("nodes", "brief"),
    ("nodes", Threshold(0.1)),
    ("nodes", Quantize("int2", stochastic=True)),
)
def nothing_is_lost(kind, codec):
    model, compression = compressed(kind, codec)
    assert_nothing_is_lost(model, compression, num_steps=3)


@four()
def weights_and_gradients_train():
    plain, model = wrapped(mesh()), wrapped(mesh())
    zero_plus_plus(
        model, zero_quantized_weights=True, weight_format=Brief(), gradient_format="brief",
        **SCATTERED,
    )  # fmt: skip
    with count_traffic() as traffic:
        found = train(model, range(6))
    want = train(plain, range(6))
    torch.testing.assert_close(found, want, rtol=0.02, atol=0)
    # Half of what float32 numbers take, and what is not compressed.
    numel = sum(p.numel() for p in plain.parameters())
    sent = traffic.sent_bytes["all_to_all"]
    assert 0 < sent < 6 * 0.6 * 4 * numel


@pytest.mark.parametrize("name", four)
def test_four_ranks(name):
    four.assert_passed(4, name)


@pytest.mark.parametrize("codec", ["powersgd", "auto", Whole()])
def test_codecs_that_cannot_be_cut_are_refused(codec):
    with pytest.raises(ValueError, match="CompressedReduceScatter: expected format to be one of"):
        CompressedReduceScatter(codec)
