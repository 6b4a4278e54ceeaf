"""What only a GPU shows of block attention: long sequences, no synchronisation, a graph."""

import pytest
import torch

from moe_ext import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Sums of some thousand float32 terms in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def block(device, length, head_dim, dtype, **options):
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, length, head_dim).to(dtype) for heads in (4, 2, 2)]
    q, k, v = (t.to(device).requires_grad_() for t in tensors)
    at = torch.randperm(length).to(device)
    documents = {"q_documents": at // 700, "k_documents": at // 700}
    return (q, k, v, at, at), {"causal": True, **documents, **options}


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "dropout_p": 0.2, "seed": 3}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_cpu(dtype, head_dim, options):
    results = []
    for device in ("cuda", "cpu"):
        args, given = block(device, 1500, head_dim, dtype, **options)
        out, lse = ops.attention_block(*args, **given)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), args[:3])
        results.append([t.detach().cpu() for t in (out, lse, *grads)])
    for actual, expected in zip(*results, strict=True):
        if actual.dtype == torch.bfloat16:
            torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=1e-3)
        else:
            torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_same_bits_every_time():
    args, given = block("cuda", 3000, 64, torch.bfloat16)
    results = []
    for _ in range(3):
        out, lse = ops.attention_block(*args, **given)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), args[:3])))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_does_not_synchronise():
    seed = torch.tensor([3], device="cuda")
    args, given = block("cuda", 300, 64, torch.float32, dropout_p=0.1, seed=seed)
    ops.attention_block(*args, **given)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = ops.attention_block(*args, **given)
        ops.merge_attention(out, lse, out, lse)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_cuda_graph():
    args, given = block("cuda", 300, 64, torch.float32)
    args = [t.detach() for t in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.attention_block(*args, **given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ops.attention_block(*args, **given)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    expected = ops.attention_block(*args, **given)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
