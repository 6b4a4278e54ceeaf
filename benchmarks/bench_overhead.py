"""Cost of a call beside its kernel: the time extrapolated to no tokens.

Shape suffixes: T tokens, D model, F ffn, E experts, K top-k, N rows.
"""

from collections.abc import Callable

import torch
from _harness import Table, interleaved
from torch import Tensor

import moe_ext
from moe_ext import ops

NUM_TOKENS, LARGER = 64, 1024
DIM, NUM_EXPERTS, TOP_K = 64, 8, 2

Call = Callable[[], object]


def calls(num_tokens: int, *, requires_grad: bool) -> dict[str, Call]:
    """The operators, each on this many tokens."""

    def leaf(*size: int) -> Tensor:
        return torch.randn(*size, requires_grad=requires_grad)

    logits_TE, x_TD = leaf(num_tokens, NUM_EXPERTS), leaf(num_tokens, DIM)
    idx_TK = torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K).indices
    rows_ND, permutation = ops.permute_tokens(x_TD.detach(), idx_TK, NUM_EXPERTS)
    rows_ND.requires_grad_(requires_grad)
    weights_TK = torch.rand(num_tokens, TOP_K, requires_grad=requires_grad)
    weight_EFD = leaf(NUM_EXPERTS, 2 * DIM, DIM)
    up_NF = leaf(num_tokens * TOP_K, 2 * DIM)
    offsets = permutation.expert_offsets
    return {
        "topk_gate": lambda: ops.topk_gate(logits_TE, TOP_K),
        "permute_tokens": lambda: ops.permute_tokens(x_TD, idx_TK, NUM_EXPERTS),
        "grouped_mm": lambda: ops.grouped_mm(rows_ND, weight_EFD, offsets),
        "gated_activation": lambda: ops.gated_activation(up_NF),
        "unpermute_tokens": lambda: ops.unpermute_tokens(rows_ND, permutation, weights_TK),
        "router_z_loss": lambda: ops.router_z_loss(logits_TE),
    }


def layer_call(num_tokens: int, *, requires_grad: bool) -> dict[str, Call]:
    """The layer's forward pass on this many tokens."""
    layer = moe_ext.MoELayer(DIM, DIM, NUM_EXPERTS, TOP_K).requires_grad_(requires_grad)
    x = torch.randn(1, num_tokens, DIM, requires_grad=requires_grad)
    return {"MoELayer": lambda: layer(x)}


def fixed_costs(
    make: Callable[..., dict[str, Call]], *, requires_grad: bool
) -> dict[str, list[float]]:
    """For each call, in us: the time at T = 64, what grows with T in it, and the rest."""
    few = make(NUM_TOKENS, requires_grad=requires_grad)
    many = make(LARGER, requires_grad=requires_grad)
    result = {}
    for name in few:
        times = interleaved({"few": few[name], "many": many[name]}, seconds=0.6, warmup=20)
        at_few, at_many = times["few"].median * 1e6, times["many"].median * 1e6
        kernel = (at_many - at_few) / (LARGER - NUM_TOKENS) * NUM_TOKENS
        result[name] = [at_few, kernel, at_few - kernel]
    return result


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("call", "us", "kernel us", "overhead us", "recorded us", "recorded overhead us")
    note = (
        f"Forward at T = {NUM_TOKENS}, D = F = {DIM}, E = {NUM_EXPERTS}, K = {TOP_K}, float32, on "
        "one thread, through the public function. The kernel's time is what "
        f"{NUM_TOKENS} tokens add between T = {NUM_TOKENS} and T = {LARGER}; the rest is overhead: "
        "Python, the dispatcher, allocation. *recorded*: with gradients wanted, so that autograd "
        "records the call. Half of a call of `grouped_mm` is inside the library, which packs the "
        "weight of each of the 8 experts whatever T is; most of the rest makes three views an "
        "expert. `permute_tokens` makes six tensors."
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for make in (calls, layer_call):
        plain = fixed_costs(make, requires_grad=False)
        recorded = fixed_costs(make, requires_grad=True)
        for name, (at_few, kernel, overhead) in plain.items():
            kept = recorded[name]
            figures = (at_few, kernel, overhead, kept[0], kept[2])
            rows.append((name, *(f"{us:.1f}" for us in figures)))
    torch.set_num_threads(threads)
    return [Table("Overhead of a call", note, header, rows)]
