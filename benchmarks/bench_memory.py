"""Cost of fresh memory: operators, optimizers and layers with `reuse_memory()` and without."""

import resource
import statistics
from collections.abc import Iterator

import torch
from _harness import Runs, Table, Timing, clone_of, copy_of, interleaved, keep_memory
from shapes import LAYERS, PERMUTATIONS, LayerShape

import moe_ext
from moe_ext import ops, optim

ROUNDS = 3
THIRD = LayerShape("C (16 experts)", 1024, 1024, 16, 2)

# A name, what is run, and the bytes that it reads and writes; 0 where products take the time.
Contender = tuple[str, object, int]


def operators() -> Iterator[Contender]:
    """The operators whose time is that of memory, and a product."""
    logits = torch.randn(16384, 64)
    leaf = logits.clone().requires_grad_()
    grads = (torch.randn(16384, 8), torch.randn(64))

    def gate_and_back() -> None:
        found = ops.topk_gate(leaf, 8)
        torch.autograd.grad((found[0], found[3]), leaf, grads)

    yield "topk_gate [16384, 64], K=8", lambda: ops.topk_gate(logits, 8), 2 * logits.nbytes
    yield "the same with backward", gate_and_back, 4 * logits.nbytes
    shape = PERMUTATIONS[0]
    x = torch.randn(shape.num_tokens, shape.model_dim)
    idx = torch.rand(shape.num_tokens, shape.num_experts).topk(shape.top_k).indices
    weights = torch.rand(shape.num_tokens, shape.top_k)
    rows, tables = ops.permute_tokens(x, idx, shape.num_experts)
    yield (
        "permute_tokens [16384, 1024], K=2",
        lambda: ops.permute_tokens(x, idx, shape.num_experts),
        x.nbytes + rows.nbytes,
    )
    yield (
        "unpermute_tokens, the same",
        lambda: ops.unpermute_tokens(rows, tables, weights),
        x.nbytes + rows.nbytes,
    )
    both = torch.randn(4096, 2 * 1792)
    both_leaf, grad = both.clone().requires_grad_(), torch.randn(4096, 1792)
    yield "swiglu [4096, 3584]", lambda: ops.gated_activation(both), both.nbytes * 3 // 2
    yield (
        "the same with backward",
        lambda: torch.autograd.grad(ops.gated_activation(both_leaf), both_leaf, grad),
        both.nbytes * 4,
    )
    flat = torch.randn(2**24)
    residual = torch.zeros_like(flat)
    yield "int8 blocks of 2^24", lambda: ops.quantize_blockwise(flat), flat.nbytes * 5 // 4
    yield (
        "exact top-1 % of 2^24, in place",
        lambda: ops.topk_compress_(flat, residual, 2**24 // 100, residual_scale=0.9),
        3 * flat.nbytes,
    )
    out, lse = torch.randn(1, 16, 4096, 64), torch.randn(1, 16, 4096)
    other = torch.randn_like(out)
    yield (
        "merge_attention [16, 4096, 64]",
        lambda: ops.merge_attention(out, lse, other, lse),
        3 * out.nbytes,
    )
    parameters = [torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for name, kind in (("LAMB", optim.LAMB), ("Adafactor", optim.Adafactor)):
        yield f"{name} step of 8.4 M", kind(parameters).step, 0


def layers() -> Iterator[Contender]:
    """Forward and backward of three layers, from T = 1024."""
    for shape in (*LAYERS, THIRD):
        for dtype in (torch.float32, torch.bfloat16):
            layer = moe_ext.MoELayer(
                shape.model_dim, shape.ffn_dim, shape.num_experts, top_k=shape.top_k
            ).to(dtype)
            for num_tokens in (1024, 4096):
                x = torch.randn(num_tokens, shape.model_dim).to(dtype)
                grad = torch.randn_like(x)

                def train(
                    layer: torch.nn.Module = layer, x: torch.Tensor = x, grad: torch.Tensor = grad
                ) -> None:
                    layer.zero_grad()
                    layer(x.detach().requires_grad_()).backward(grad)

                label = str(dtype).removeprefix("torch.")
                yield f"MoELayer {shape.name}, T={num_tokens}, {label}, with backward", train, 0


def faults_of(run: object, times: int = 3) -> float:
    """Page faults of a call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        run()  # type: ignore[operator]
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times


def memory_row(name: str, run: object, num_bytes: int) -> tuple[str, ...]:
    """Rounds in reused and in fresh memory by turns, each beside a copy as it is there."""
    runs: tuple[Runs, Runs] = ({"ours": run}, {"ours": run})  # type: ignore[dict-item]
    if num_bytes:
        runs[0]["copy"], runs[1]["copy"] = copy_of(num_bytes), clone_of(num_bytes)
    found: tuple[list[dict[str, Timing]], ...] = ([], [])
    faults = 0.0
    for _ in range(ROUNDS):
        keep_memory(2**30)
        found[0].append(interleaved(runs[0], seconds=0.3, least=3))
        moe_ext.reuse_memory(False)
        found[1].append(interleaved(runs[1], seconds=0.3, least=3))
        faults = faults_of(run)
    keep_memory(2**30)

    def median(rounds: list[dict[str, Timing]], contender: str) -> float:
        return 1e3 * statistics.median(times[contender].median for times in rounds)

    reused, fresh = (median(rounds, "ours") for rounds in found)
    copies = [f"{median(rounds, 'copy'):.3f}" if num_bytes else "-" for rounds in found]
    ratios = [b["ours"].median / a["ours"].median for a, b in zip(*found, strict=True)]
    paired = statistics.median(ratios)
    return name, f"{reused:.3f}", f"{fresh:.3f}", f"{paired:.2f}", *copies, f"{faults:.0f}"


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("what", "reused ms", "fresh ms", "fresh / reused", "copy ms", "fresh copy ms")
    note = (
        "*reused*: after `moe_ext.reuse_memory()`, which is what all other tables are measured "
        "with. *fresh*: as in a process that did not call it. Rounds of the two take turns, the "
        "ratio is the median of the pairs'. The copy moves as many bytes as the operator reads "
        "and writes, in fresh memory as a `clone`; where products or states decide there is none. "
        "*page faults* are those of a fresh call."
    )
    rows = [memory_row(*contender) for make in (operators, layers) for contender in make()]
    return [Table("Fresh memory", note, (*header, "page faults"), rows)]
