"""The whole layer over the time of its products, beside every peer: same weights, same routing."""

import torch
from _harness import Table, interleaved, interleaved_fresh, milliseconds, ratio
from layer_memory import measure
from layer_peers import MAKERS, contenders, make, plain_products, train
from shapes import EVEN, LAYERS, ONE, ZIPF, Case, tokens
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)
# Sums of F and K terms in the dtype of the rows, relative to the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def largest_difference(case: Case, layers: dict[str, nn.Module], x: Tensor) -> float:
    """Largest difference of two outputs, relative to the largest; RuntimeError if too large."""
    with torch.no_grad():
        outputs = {name: layer(x).float() for name, layer in layers.items()}
    scale = outputs["grouped_mm"].abs().max()
    worst = 0.0
    for name, output in outputs.items():
        difference = float((output - outputs["grouped_mm"]).abs().max() / scale)
        if difference > TOLERANCE[case.dtype]:
            raise RuntimeError(
                f"bench_moe_layer: expected the output of {name} to be within "
                f"{TOLERANCE[case.dtype]} of grouped_mm's for {case}, got {difference:.1e}"
            )
        worst = max(worst, difference)
    return worst


def time_row(case: Case) -> tuple[str, ...]:
    """Compare the outputs of a case, then time it."""
    layers = make(case, contenders(case))
    x = tokens(case)
    grad = torch.randn_like(x)
    worst = largest_difference(case, layers, x)
    runs = {
        name: (lambda layer=layer: train(layer, x, grad))  # type: ignore[misc]
        for name, layer in layers.items()
    }
    floors = {"floor": plain_products(case, x), "order": plain_products(case, x, in_order=True)}
    times = interleaved({**runs, **floors}, seconds=1.2 * len(runs) + 2.4, warmup=1, least=5)
    fresh = interleaved_fresh({"ours": runs["ours"], **floors}, seconds=6.0, warmup=2, least=9)
    cells = [milliseconds(times[name]) for name in ("ours", "floor", "order")]
    cells += [ratio(times["ours"], times[name]) for name in floors]
    cells += [milliseconds(fresh["ours"]), *(ratio(fresh["ours"], fresh[n]) for n in floors)]
    for name in list(MAKERS)[1:]:
        known = name in times
        cells.append(milliseconds(times[name]) if known else "-")
        cells.append(ratio(times[name], times["ours"]) if known else "-")
    return *case.labels, *cells, f"{worst:.0e}"


def time_table() -> Table:
    """Forward and backward of every case."""
    header = ["shape", "T", "dtype", "routing", "ms", "products ms", "in order ms"]
    header += ["ours / products", "ours / in order"]
    header += ["fresh ms", "fresh / products", "fresh / in order"]
    for name in list(MAKERS)[1:]:
        header += [f"{name} ms", f"{name} / ours"]
    cases = [Case(s, t, d, EVEN) for s in LAYERS for t in (64, 1024, 4096) for d in DTYPES]
    cases += [Case(s, 1024, d, r) for s in LAYERS for d in DTYPES for r in (ZIPF, ONE)]
    note = (
        "Forward and backward, dropless. *products* are the six `mm(out=)` of each expert on the "
        "same number of rows, into memory that is there already, and nothing else. All six of an "
        "expert, whose weights are then in a cache, come before those of the next. *in order* are "
        "the same products in the order of a step, which goes forward through all experts before "
        "it goes back. *fresh* is ours in a process that did not call `moe_ext.reuse_memory()`, "
        "over products that took turns with it. `grouped_mm` and `eager` are the block of "
        "transformers (Mixtral's for A, Qwen3's for B) under its two "
        "implementations. `deepspeed` is its `MoE` with `drop_tokens=False`, which pads an expert "
        "to the rows of the fullest. `fairscale` is its `MOELayer` under a gate with the block's "
        "routing (its own draws the second expert at random); it dispatches by a dense [T, E, C] "
        "tensor, which takes gigabytes above T = 1024 and under skewed routing, and refuses "
        "bfloat16. A dash stands for those, and for a peer that is not installed. *Zipf 1.2*: "
        "expert e draws tokens as "
        "1 / e^1.2; *all to one*: every token chooses the same K experts. *difference* is the "
        "largest between two outputs, relative to the largest output. With *all to one*, products "
        "has no more than K experts to run, while ours also writes zeros as the gradients of all "
        "others: for B in bfloat16, 33 of 38 MB, and by the profiler a tenth of the step on one "
        "thread, where products take 63 %, the activation 9, the permutation 7 and the router 7. "
        "A in bfloat16 at T = 1024, on an AMD EPYC, best of runs by turns: products 41.9 ms, in "
        "order 44.2, by `grouped_mm` 44.4, with the activation 45.6, the layer 47.7."
    )
    rows = [time_row(case) for case in cases]
    return Table("Mixture-of-experts layer", note, (*header, "difference"), rows)


def memory_table() -> Table:
    """Bytes that each contender keeps for the backward pass, and its peak."""
    cases = [Case(s, 1024, d, EVEN) for s in LAYERS for d in DTYPES]
    header = ["shape", "T", "dtype", "routing"]
    header += [f"{name} saved MB" for name in MAKERS] + [f"{name} peak MB" for name in MAKERS]
    note = (
        "*saved* counts the distinct storages that autograd keeps between forward and backward, "
        "parameters left out. *peak* is how far the resident memory of a fresh process rises in "
        "one forward and backward pass, after one that warmed it up, the median of three: the "
        "gradients of the weights are part of it. Ours is what design.md derives: the gradients of "
        "the weights (88 MB for A and 75 for B in float32) beside the gradient of the rows. "
        "`deepspeed` runs and frees one expert after the other, which keeps as little at once and "
        "takes longer."
    )
    rows = []
    for case in cases:
        names = contenders(case)
        found = measure(case, names)
        saved = [f"{found[n].saved_bytes / 1e6:.1f}" if n in found else "-" for n in MAKERS]
        peak = [f"{found[n].peak_bytes / 1e6:.1f}" if n in found else "-" for n in MAKERS]
        rows.append((*case.labels, *saved, *peak))
    return Table("Memory of the layer", note, tuple(header), rows)


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md."""
    return [time_table(), memory_table()]
