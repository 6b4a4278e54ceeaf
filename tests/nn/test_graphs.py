"""What CUDA graphs may hold, by what torch's compiler says of traced graphs: no GPU is needed."""

import re
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ext
from moe_ext import ops
from moe_ext.nn import Capacity

CSRC = Path(moe_ext.__file__).parents[1] / "csrc"


def traced(function, *args):
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "balance": moe_ext.nn.Balance(z_coef=0.1), "shared_expert": 8},
        {"capacity": Capacity(1.25, drop="batch_prioritized", overflow="reroute")},
        {"capacity": Capacity(1.0, pad=True)},
    ],
    ids=["dropless", "rerouted", "padded"],
)
def test_a_layer_may_be_held_with_its_backward_pass(options):
    layer = moe_ext.MoELayer(16, 8, 4, 2, dtype=torch.bfloat16, **options)
    mask = torch.arange(24) % 5 > 0

    def step(x):
        y = layer(x, token_mask=mask)
        return y, torch.autograd.grad(y.sum(), [x, *layer.parameters()])

    graph = traced(step, torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True))
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"moe_ext.grouped_mm.default", "moe_ext._grouped_mm_backward_weight.default"} <= names
    assert get_first_incompatible_cudagraph_node(graph) is None


def test_what_reads_the_host_may_not():
    values = torch.ones(4)
    payload = ops.encode_gradient(values, torch.arange(4), 64, index_codec="u16")
    op = torch.ops.moe_ext
    delta = op.delta_encode(values, torch.zeros(4))
    exponents = op.encode_exponents(values)
    reading = {
        "_encode_payload": lambda x: ops.encode_gradient(
            x, torch.arange(4), 64, index_codec="delta"
        ),
        "_decode_payload": lambda x: op._decode_payload(payload),
        "sum_rows": lambda x: op.sum_rows(x[:, None], torch.tensor([2, 1, 2, 0]), 3),
        "delta_encode": lambda x: op.delta_encode(x, torch.zeros(4)),
        "delta_unpack": lambda x: op.delta_unpack(delta, x, 4),
        "delta_apply_": lambda x: op.delta_apply_(x, delta),
        "encode_exponents": lambda x: op.encode_exponents(x),
        "decode_exponents_": lambda x: op.decode_exponents_(x, exponents),
    }
    for name in ("delta_hash", "delta_hash_change"):  # they give a number, and cannot be traced
        assert torch.Tag.cudagraph_unsafe in getattr(op, name).default.tags
    for name, function in reading.items():
        found = get_first_incompatible_cudagraph_node(traced(function, values))
        assert found is not None and name in str(found.target), name
    # What has its result on the CPU is left out by its device.
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        header = op._payload_header(torch.empty(96, dtype=torch.uint8, device="meta"))
    assert header.device.type == "cpu"
    # Every kernel that reads back is one of these.
    files = {path.name for path in CSRC.rglob("*.cu") if "read_back(" in path.read_text()}
    sparse = {"wire_cuda.cu", "sparse_blocks_cuda.cu"}
    assert files == sparse | {"delta_cuda.cu", "exponent_cuda.cu"}
    text = "".join(path.read_text() for path in CSRC.rglob("*_cuda.cu"))
    assert len(re.findall(r"\bread_back\(", text)) == 11
