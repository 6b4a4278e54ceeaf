"""What only a GPU shows: the layer without synchronisation, in a graph, and over NCCL."""

import pytest
import torch
import torch.distributed as dist

import moe_ext
from moe_ext import testing
from moe_ext.comm import streams
from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.nn import Capacity, RowBudget
from moe_ext.optim import DiLoCo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Sums of some hundred float32 terms in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def make_layer(dtype, **options):
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(64, 128, 8, top_k=2, dtype=torch.float32, **options)
    return layer.to("cuda", dtype)


def test_equals_the_cpu():
    results = []
    for device in ("cuda", "cpu"):
        layer = make_layer(torch.float32).to(device)
        torch.manual_seed(1)
        x = torch.randn(257, 64).to(device).requires_grad_()
        y = layer(x)
        grads = torch.autograd.grad(y.square().mean(), (x, *layer.parameters()))
        results.append([t.cpu() for t in (y, *grads)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropless_layer_does_not_synchronise(dtype):
    layer = make_layer(dtype)
    x = torch.randn(256, 64, device="cuda", dtype=dtype)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("capacity", [None, Capacity(1.25, drop="batch_prioritized")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_in_a_cuda_graph(dtype, capacity):
    layer = make_layer(
        dtype,
        bias=True,
        capacity=capacity,
        balance=moe_ext.nn.Balance(z_coef=0.1),
        shared_expert=32,
    )
    x = torch.randn(256, 64, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.arange(256, device="cuda") % 7 > 0

    def step():
        y = layer(x, token_mask=mask)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]

    check_replays(step, x, 50)


def check_replays(step, x, num_replays):
    """The step in a CUDA graph gives the bits of the step by itself, for other inputs too."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        want = step()
        for _ in range(num_replays):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(held, want, strict=True))


@pytest.fixture
def one_rank():
    """A group of this process alone, over NCCL."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    address = f"tcp://127.0.0.1:{testing._free_port()}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


BUDGET = RowBudget(200, overflow="drop", static=True)


@pytest.mark.parametrize("options", [{}, {"row_budget": BUDGET}], ids=["counts", "static"])
def test_one_nccl_rank_equals_no_group(options, one_rank):
    results = []
    for given in ({}, {"ep_group": one_rank, "dispatcher": "alltoall", **options}):
        layer = make_layer(torch.float32, shared_expert=32, **given)
        x = torch.linspace(-1, 1, 100 * 64, device="cuda").reshape(100, 64).requires_grad_()
        y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_a_static_budget_over_nccl_in_a_cuda_graph(one_rank):
    options = {"ep_group": one_rank, "dispatcher": "alltoall", "row_budget": BUDGET}
    layer = make_layer(torch.bfloat16, **options)
    x = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]

    check_replays(step, x, 5)


def test_rows_wait_for_the_caller_over_nccl(one_rank):
    check_rows_wait_for_the_caller(one_rank)


def check_rows_wait_for_the_caller(group):
    """Rows written late, on a stream of the caller's; memory is freed while they travel."""
    main = torch.cuda.Stream()
    with torch.cuda.stream(main):
        for step in range(20):
            torch.cuda._sleep(10_000_000)
            rows = torch.full((1 << 20, 2), float(step), device="cuda", requires_grad=True) + 0
            out = all_to_all_rows(rows, group, [1 << 20], [1 << 20], grad_scale=2.0)
            (grad,) = torch.autograd.grad(out.square().sum(), rows)
            del rows
            assert bool((out == step).all() & (grad == 4 * step).all())
    assert streams.side_stream(torch.device("cuda", torch.cuda.current_device()), "tokens") != main


def test_local_steps_may_keep_the_weights_of_the_last_round_on_the_host():
    found = []
    for backup_device in (None, torch.device("cpu")):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).cuda()
        inner, outer = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.7))
        with DiLoCo(None, [model], inner, outer, sync_every=2, backup_device=backup_device):
            for _ in range(4):
                inner.zero_grad()
                model(torch.ones(2, 8, device="cuda")).square().mean().backward()
                inner.step()
        found.append(model.weight.detach())
    assert torch.equal(*found)
