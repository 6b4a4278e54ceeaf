"""Steps of the optimizers on one rank, beside those of torch's."""

import torch
from _harness import Runs, Table, copy_of, interleaved, milliseconds
from torch import nn

from moe_ext import optim

# A block of a small mixture-of-experts model: attention, norms, biases and stacked experts.
MATRICES = [(1024, 1024)] * 4
VECTORS = [(1024,)] * 8
EXPERTS = [(8, 1024, 512), (8, 512, 512)]


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Parameters with gradients."""
    found = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in found:
        p.grad = torch.randn_like(p)
    return found


def groups() -> list[dict[str, object]]:
    """As `moe_ext.optim.param_groups` makes them."""
    return [
        {"params": parameters(MATRICES)},
        {"params": parameters(VECTORS), "weight_decay": 0.0, "adapt": False},
        {"params": parameters(EXPERTS), "per_expert": True},
    ]


def steps_of_muon() -> Table:
    """Muon of stacked experts, beside torch's of as many matrices."""
    rows = []
    for shape in [(64, 128, 64), (64, 256, 128), (8, 512, 512)]:
        stacked = parameters([shape])
        apart = parameters([shape[1:]] * shape[0])
        runs: Runs = {
            "torch Muon": torch.optim.Muon(apart).step,
            "Muon": optim.Muon(stacked).step,
        }
        torch_s, ours_s = (found.median for found in interleaved(runs, seconds=6.0).values())
        each_us = 1e6 * ours_s / shape[0]
        times = (f"{1e3 * torch_s:.2f}", f"{1e3 * ours_s:.2f}", f"{each_us:.0f}")
        rows.append((" x ".join(map(str, shape)), *times, f"{torch_s / ours_s:.2f}"))
    note = (
        "A step for stacked experts `[E, M, N]` of float32, one rank: torch's Muon has a parameter "
        "for each expert and takes them one after the other, ours all at once, both in bfloat16."
    )
    header = ("experts", "torch ms", "ours ms", "ours us an expert", "times as fast")
    return Table("Muon of stacked experts", note, header, rows)


def steps_on_the_cpu() -> Table:
    """AdamW in one pass, beside torch's fused one and a copy of as many bytes."""
    shapes = MATRICES + VECTORS + EXPERTS
    numel = sum(torch.Size(s).numel() for s in shapes)
    rounded = [nn.Parameter(p.detach().bfloat16()) for p in parameters(shapes)]
    for p in rounded:
        p.grad = torch.randn_like(p)
    sizes = {"copy": 28, "torch AdamW fused": 28, "CPUAdamW": 28, "CPUAdamW, bfloat16": 28}
    runs: Runs = {
        "copy": copy_of(28 * numel),
        "torch AdamW fused": torch.optim.AdamW(parameters(shapes), fused=True).step,
        "CPUAdamW": optim.CPUAdamW(parameters(shapes)).step,
        "CPUAdamW, bfloat16": optim.CPUAdamW(rounded).step,
    }
    times = interleaved(runs, seconds=6.0)
    rates = {name: sizes[name] * numel / t.median / 1e9 for name, t in times.items()}
    rows = [
        (name, milliseconds(t), f"{rates[name]:.1f}", f"{rates[name] / rates['copy']:.2f}")
        for name, t in times.items()
    ]
    note = (
        f"{numel / 1e6:.1f} M parameters in {len(shapes)} tensors. A step moves 28 bytes an "
        "element: parameter and moments in float32 both ways, and the gradient; with bfloat16 "
        "gradients the 2 bytes that they save go into the bfloat16 parameters. *copy* moves as "
        "many."
    )
    return Table("AdamW on the CPU", note, ("step", "ms", "GB/s", "of a copy"), rows)


def tables() -> list[Table]:
    """The tables of this benchmark."""
    contenders = {
        "torch Adam foreach": torch.optim.Adam(groups(), foreach=True),
        "torch Adafactor": torch.optim.Adafactor(groups()),
        "LAMB": optim.LAMB(groups()),
        "LARS": optim.LARS(groups(), weight_decay=0.01),
        "Adafactor": optim.Adafactor(groups()),
        "OneBitAdam warm-up": optim.OneBitAdam(groups()),
        "OneBitLamb warm-up": optim.OneBitLamb(groups()),
    }
    runs: Runs = {name: optimizer.step for name, optimizer in contenders.items()}
    times = interleaved(runs, seconds=10.0)
    numel = sum(torch.Size(s).numel() for s in MATRICES + VECTORS + EXPERTS)
    note = (
        f"{numel / 1e6:.1f} M float32 parameters in {len(MATRICES + VECTORS + EXPERTS)} tensors, "
        "one rank. Ratios and clipping are per expert in LAMB, LARS and Adafactor, over whole "
        "tensors in torch's. OneBitAdam and OneBitLamb include the look for NaN."
    )
    adam = times["torch Adam foreach"].median
    rows = [(name, milliseconds(t), f"{t.median / adam:.2f}") for name, t in times.items()]
    header = ("optimizer", "step ms", "over torch's Adam")
    return [Table("Optimizer steps", note, header, rows), steps_on_the_cpu(), steps_of_muon()]
