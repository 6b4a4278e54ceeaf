"""Costs of experts over ranks as DTensors: of a layer, an optimizer step, and an import.

Each contender takes turns with the one that it is compared with. Other jobs may share the machine:
figures are the least of many runs, CPU time and calls stand beside the time. What the first costs
beyond the second is a median over turns, of the CPU time of the thread that trains: threads of Gloo
wait for each other.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _harness import Table, processor
from import_cost_rank import Contender, Cost, calls_of, cost_of
from torch import Tensor, nn

NUM_RANKS = (2, 4)
NUM_TOKENS = (64, 4096)
DIM, FFN_DIM, NUM_EXPERTS, TOP_K = 256, 256, 8, 2
PAIRS = {64: 400, 4096: 120}
# Parameters of the optimizer, plain ones and those of experts, and their side.
NUM_PLAIN, NUM_EXPERT, SIDE = 60, 20, 64
STEP_PAIRS = 100
# Program that measures a model without experts.
SCRIPT = Path(__file__).resolve().parent / "import_cost_rank.py"
# A module unknown to torch shows how far figures are from each other by chance.
ROUNDS, CONTROL = 100, "html"


class Pair(NamedTuple):
    """Costs of the second and of the first.

    Attributes:
        plain: least milliseconds, those of the CPU, those of the thread, and functions entered.
        ours: the same of the first.
        beyond: the thread's milliseconds of the first less those of the second: the median of all
            turns, and the ends of an interval that holds it in 95 of 100 cases.
    """

    plain: Cost
    ours: Cost
    beyond: tuple[float, float, float]


def median_of(values: list[float]) -> tuple[float, float, float]:
    """The median, and its interval of 95 % by order statistics."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = len(ordered) // 2
    first = max(0, int(middle - half))
    return ordered[middle], ordered[first], ordered[min(len(ordered) - 1, int(middle + half))]


def in_turn(first: Contender, second: Contender, pairs: int, together: bool = False) -> Pair:
    """Run both in turn, and either one first in every other pair.

    Args:
        first: the one that is measured.
        second: the one that it is compared with.
        pairs: their number; a tenth more warms up.
        together: ranks begin each turn together.
    """
    warmup = pairs // 10 + 1
    spent: dict[Contender, list[Cost]] = {first: [], second: []}
    for number in range(warmup + pairs):
        for run in (first, second) if number % 2 else (second, first):
            if together:
                dist.barrier()
            spent[run].append(cost_of(run))
    costs = {run: spent[run][warmup:] for run in (second, first)}
    plain, ours = (
        (*(min(column) for column in zip(*of_run, strict=True)), calls_of(run))
        for run, of_run in costs.items()
    )
    turns = zip(costs[first], costs[second], strict=True)
    return Pair(plain, ours, median_of([own[2] - other[2] for own, other in turns]))


def with_plain_parameters(layer: nn.Module) -> nn.Module:
    """The same layer with this rank's parts as plain parameters, and nothing that looks at them."""
    for experts in [m for m in layer.modules() if hasattr(m, "num_local_experts")]:
        for mark in ("_moe_ext_placements", "_moe_ext_divided"):
            vars(experts).pop(mark)
        experts._forward_pre_hooks.clear()
        for name, parameter in experts._parameters.items():
            if parameter is not None:
                part: Tensor = parameter.to_local()  # type: ignore[attr-defined]
                experts._parameters[name] = nn.Parameter(part.detach().clone())
    return layer


def layer_on_rank(rank: int) -> dict[tuple[int, str], Pair]:
    """(Tokens, what runs) to the times of a layer on this rank."""
    import moe_ext

    def made() -> nn.Module:
        torch.manual_seed(0)
        sizes = DIM, FFN_DIM, NUM_EXPERTS, TOP_K
        return moe_ext.MoELayer(*sizes, ep_group=dist.group.WORLD, dispatcher="alltoall")

    layers = made(), with_plain_parameters(made())
    found = {}
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(rank))
        names = "forward", "and backward", "and step", "backward that adds"
        runs: dict[str, list[Contender]] = {name: [] for name in names}
        outputs = []
        for layer in layers:
            groups = moe_ext.distributed.expert_param_groups(layer)
            if len(groups) == 1:  # nothing says that they are experts
                groups = [{"params": list(layer.parameters())}]
            # Ranks whose routers a step has moved apart would be refused.
            optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)
            outputs.append(layer(x).detach())

            def forward(layer: nn.Module = layer, x: Tensor = x) -> Tensor:
                with torch.no_grad():
                    return layer(x)  # type: ignore[no-any-return]

            def backward(layer: nn.Module = layer, x: Tensor = x) -> None:
                layer.zero_grad()
                layer(x).sum().backward()

            def step(
                run: Contender = backward, optimizer: torch.optim.Optimizer = optimizer
            ) -> None:
                run()
                optimizer.step()

            def adding(layer: nn.Module = layer, x: Tensor = x) -> None:
                layer(x).sum().backward()

            for name, run in zip(runs, (forward, backward, step, adding), strict=True):
                runs[name].append(run)
        assert torch.equal(*outputs), "both have to compute the same"
        for name, (first, second) in runs.items():
            found[num_tokens, name] = in_turn(first, second, PAIRS[num_tokens], together=True)
    return found


def steps_on_rank(rank: int) -> dict[tuple[str, str], Pair | None]:
    """(How AdamW runs, how parameters lie) to times, beside plain tensors; None where it raises."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))

    def parameters(*, spread: bool) -> list[list[nn.Parameter]]:
        made: list[list[nn.Parameter]] = [[], []]
        for number in range(NUM_PLAIN + NUM_EXPERT):
            is_expert = number >= NUM_PLAIN
            shape = (NUM_EXPERTS // 2, SIDE, SIDE) if is_expert else (SIDE, SIDE)
            value, gradient = torch.randn(2, *shape)
            if is_expert and spread:
                value, gradient = (
                    DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                    for part in (value, gradient)
                )
            made[is_expert].append(nn.Parameter(value))
            made[is_expert][-1].grad = gradient
        return made

    found: dict[tuple[str, str], Pair | None] = {}
    kinds: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "loop": {"foreach": False},
        "default": {},
    }
    for kind, options in kinds.items():
        dense, experts = parameters(spread=False)
        plain = torch.optim.AdamW([*dense, *experts], **options)
        for lie, is_apart in (("DTensors apart", True), ("mixture", False)):
            dense, experts = parameters(spread=True)
            groups = [{"params": dense}, {"params": experts}] if is_apart else dense + experts
            optimizer = torch.optim.AdamW(groups, **options)
            try:
                found[kind, lie] = in_turn(optimizer.step, plain.step, STEP_PAIRS)
            except RuntimeError:
                found[kind, lie] = None
    return found


def without_experts() -> dict[tuple[str, str], Pair]:
    """(Imported, what runs) to its costs beside those in a process that imports neither."""
    names = ("", "moe_ext", CONTROL)
    ranks = {
        name: subprocess.Popen(
            [sys.executable, str(SCRIPT), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    spent: dict[tuple[str, str], list[Cost]] = {}
    for number in range(ROUNDS):
        for name in names[:: 1 if number % 2 else -1]:
            talk = ranks[name]
            assert talk.stdin is not None and talk.stdout is not None
            print(file=talk.stdin, flush=True)
            for what, cost in json.loads(talk.stdout.readline()).items():
                spent.setdefault((what, name), []).append(cost)
    for rank in ranks.values():
        rank.communicate()
    least = {key: tuple(map(min, *costs[1:])) for key, costs in spent.items()}
    return {
        (what, name): Pair(
            least[what, ""],
            cost,
            median_of(
                [a[2] - b[2] for a, b in zip(spent[what, name], spent[what, ""], strict=True)]
            ),
        )
        for (what, name), cost in least.items()
        if name
    }


def median(found: list[dict[Any, Pair]]) -> dict[Any, Pair]:
    """Each measurement from the rank whose cost beyond plain is the median over ranks."""
    return {
        key: sorted((one[key] for one in found), key=lambda p: p.beyond)[len(found) // 2]
        for key in found[0]
    }


TIMES = (
    *("plain ms", "ms", "ratio", "plain CPU ms", "CPU ms"),
    *("CPU ms beyond plain", "of 95 %", "plain calls", "calls"),
)


def cells(pair: Pair | None) -> tuple[str, ...]:
    """Cells of `TIMES`."""
    if pair is None:
        return ("", "refused", *("",) * 7)
    (ms, cpu, _, calls), (our_ms, our_cpu, _, our_calls), (beyond, low, high) = pair
    times = f"{ms:.3f}", f"{our_ms:.3f}", f"{our_ms / ms:.3f}", f"{cpu:.3f}", f"{our_cpu:.3f}"
    extra = f"{beyond:.3f}", f"{low:.3f} to {high:.3f}"
    return (*times, *extra, f"{calls:.0f}", f"{our_calls:.0f}")


def tables() -> list[Table]:
    """A layer, an optimizer step, and what a model without experts pays."""
    from moe_ext.testing import spawn_ranks

    note = (
        "Taken in turn: the least time, CPU time of the process and number of functions entered, "
        "of Python and C. Beyond plain: the median over all turns of the difference in the CPU "
        "time of the thread that trains, with the interval that holds it in 95 of 100 cases. "
        f"Measured on {processor()}."
    )
    sizes = f"float32, D={DIM}, F={FFN_DIM}, E={NUM_EXPERTS}, K={TOP_K}, Gloo, one thread a rank"
    layer_rows, step_rows = [], []
    for ranks in NUM_RANKS:
        layer = median(spawn_ranks(layer_on_rank, ranks, timeout=1800.0))
        layer_rows += [(f"{ranks}", f"{t}", name, *cells(p)) for (t, name), p in layer.items()]
    steps = spawn_ranks(steps_on_rank, 2, timeout=1800.0)[0]
    step_rows = [(*key, *cells(pair)) for key, pair in steps.items()]
    plain = [(*key, *cells(pair)) for key, pair in without_experts().items()]
    return [
        Table(
            "Experts as DTensors: a layer",
            f"A `MoELayer` ({sizes}) whose experts are DTensors, beside one that has the same "
            "local tensors as plain parameters. The step is AdamW's, fused; a backward pass that "
            f"adds finds the gradients of the one before. {note}",
            ("ranks", "T", "runs", *TIMES),
            layer_rows,
        ),
        Table(
            "Experts as DTensors: an optimizer step",
            f"AdamW over {NUM_PLAIN} plain [{SIDE}, {SIDE}] and {NUM_EXPERT} expert parameters "
            f"[{NUM_EXPERTS // 2}, {SIDE}, {SIDE}] of a rank, beside plain tensors alone. {note}",
            ("AdamW", "parameters", *TIMES),
            step_rows,
        ),
        Table(
            "A model without experts",
            "2000 tensors of 16 elements in a process that has imported `moe_ext`, and in one that "
            "has imported a module of Python's library (a control), beside one with neither. "
            f"{note}",
            ("runs", "imported", *TIMES),
            plain,
        ),
    ]
