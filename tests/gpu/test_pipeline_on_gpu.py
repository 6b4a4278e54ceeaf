"""A pipeline of one rank on a GPU: its gradients of weights on a stream of their own."""

import pytest
import torch
from torch import nn

import moe_ext
from moe_ext.pipeline import Pipeline, make_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(256), nn.Linear(256, 256)
        self.moe = moe_ext.MoELayer(256, 512, 8, top_k=2)

    def forward(self, x):
        x = x + self.dense(self.norm(x))
        return x + self.moe(x)


def loss_of(out, target):
    return (out - target).square().mean()


def test_gradients_are_those_of_one_stream():
    found = []
    for weight_stream in (False, True):
        torch.manual_seed(0)
        table = make_table("zbv", 1, 8)
        stages = {i: Stage().to("cuda", torch.bfloat16) for i in range(table.num_stages)}
        x = list(torch.randn(8, 4, 128, 256, device="cuda", dtype=torch.bfloat16))
        pipeline = Pipeline(table, stages, loss_of, weight_stream=weight_stream)
        for _ in range(10):  # memory of one step goes to the next
            pipeline.step(x, x)
        found.append([p.grad for stage in stages.values() for p in stage.parameters()])
    for beside, one in zip(*found[::-1], strict=True):
        assert torch.equal(beside, one)
