"""Peak memory of training steps in the placements of plans, counted beside what they predict.

Every allocation and release of torch's allocator is counted, so that runs find the same peaks.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from _harness import Table, peak_allocated, peak_sampled
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ext.optim import DiLoCo
from moe_ext.planner import ClusterSpec, Level, ModelSpec, Plan, plan
from moe_ext.planner.apply import rounds_of
from moe_ext.testing import spawn_ranks

CLUSTER = ClusterSpec((Level("node", 4, 1e-6, 1e10),), {"float32": 1e11}, 1e12, 1e10)
SEED = 0
# Options of the outer optimizer of local steps, with momentum, as DiLoCo has it.
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "foreach": True}


@dataclass(frozen=True)
class Setup:
    """A model, a placement and a routing.

    Attributes:
        ranks: processes.
        ep: ranks that the experts are spread over.
        zero: stage of ZeRO.
        recompute: layers are computed again in the backward pass.
        micro_batch: sequences.
        accumulate: micro-batches of a step.
        skew: of the routing: "even", "zipf", or "95 %" of tokens with the first expert.
        top_k: experts of a token.
        dispatcher: see `MoELayer`.
        combine: see `MoELayer`.
        wire: see `MoELayer`.
        sizes: of the model, in the place of those of `SIZES`.
        seq_len: tokens of a sequence.
        pp: stages.
        schedule: of them.
        turns: 1 for exchanges of experts beside other micro-batches.
        tp: ranks that dense layers are divided over.
        cp: ranks that share a sequence.
        scheme: of attention, with cp.
        etp: ranks that share each expert.
        balance: "exact" for experts that move in every pass.
        capacity_factor: rows of an expert over those of an even load.
        local_steps: of a round; 1 for means of gradients.
        local_codec: of rounds.
    """

    ranks: int
    ep: int = 1
    zero: int = 0
    recompute: int = 0
    micro_batch: int = 2
    accumulate: int = 1
    skew: str = "even"
    top_k: int = 2
    dispatcher: str = "alltoall"
    combine: str = "exact"
    wire: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    seq_len: int = 256
    pp: int = 1
    schedule: str = "1f1b"
    turns: int = 0
    tp: int = 1
    cp: int = 1
    scheme: str = "ring"
    etp: int = 1
    balance: str = "none"
    capacity_factor: float | None = None
    local_steps: int = 1
    local_codec: str = "none"

    @property
    def fixed(self) -> dict[str, int | str | None]:
        """Values of the axes of the setup's plan."""
        names = ("ep", "zero", "recompute", "micro_batch", "dispatcher", "combine", "wire")
        names = (*names, "pp", "schedule", "turns", "tp", "cp", "scheme", "etp", "balance")
        return {name: getattr(self, name) for name in names}

    @property
    def label(self) -> str:
        """Text of the values that are not the usual ones."""
        parts = [f"pp {self.pp}, {self.schedule}"] * (self.pp > 1)
        parts += ["in turn"] * self.turns
        parts += [f"tp {self.tp}"] * (self.tp > 1) + [f"cp {self.cp}"] * (self.cp > 1)
        parts += [self.scheme] * (self.scheme != "ring")
        parts += [f"ep {self.ep}", *[f"etp {self.etp}"] * (self.etp > 1), f"ZeRO {self.zero}"]
        parts += ["exact balance"] * (self.balance == "exact")
        if self.capacity_factor is not None:
            parts += [f"capacity {self.capacity_factor}"]
        parts += ["recompute"] * self.recompute
        parts += [f"{self.accumulate} micro-batches"] * (self.accumulate > 1)
        parts += [f"{self.micro_batch} x {self.seq_len} tokens", f"top-{self.top_k}"]
        if self.ep * self.etp > 1:
            parts += [self.dispatcher] + [self.combine] * (self.combine != "exact")
            parts += [self.wire] if self.wire else []
        parts += [f"{name} {value}" for name, value in self.sizes]
        if self.local_steps > 1:
            parts += [f"{self.local_steps} local steps, {self.local_codec}"]
        return ", ".join(parts)


SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
}
LONG, WIDE = (("vocab_size", 4096),), (("hidden_size", 256), ("num_hidden_layers", 2))
SETUPS = (
    Setup(1),
    Setup(1, recompute=1),
    Setup(1, accumulate=2, micro_batch=4),
    Setup(1, sizes=LONG, recompute=1),
    Setup(1, skew="95 %", top_k=1, micro_batch=8),
    Setup(2, zero=1),
    Setup(2, zero=3, recompute=1, sizes=WIDE),
    Setup(2, ep=2, skew="zipf", micro_batch=4),
    Setup(2, ep=2, zero=1, skew="95 %", top_k=1, micro_batch=8),
    Setup(2, ep=2, zero=2, dispatcher="dedup"),
    Setup(2, ep=2, skew="95 %", recompute=1, dispatcher="dedup", combine="reduced", micro_batch=8),
    Setup(4, ep=4, skew="95 %", micro_batch=4),
    Setup(4, ep=4, skew="95 %", top_k=1, micro_batch=8, recompute=1),
    Setup(4, ep=4, zero=1, dispatcher="dedup", skew="zipf", micro_batch=4),
    Setup(4, ep=4, dispatcher="allgather", accumulate=2),
    Setup(4, ep=2, zero=3, micro_batch=4),
    Setup(4, ep=2, wire="int8", skew="95 %", micro_batch=4),
    Setup(4, ep=4, wire="fp8", dispatcher="dedup", skew="zipf", sizes=WIDE, micro_batch=4),
    Setup(4, ep=2, zero=1, sizes=LONG, accumulate=2, recompute=1),
    Setup(4, zero=3, sizes=WIDE, accumulate=2),
)
# With stages, with layers and sequences that ranks share, and with rounds of local steps.
SHARED = (
    Setup(2, pp=2, accumulate=4),
    Setup(2, pp=2, accumulate=4, schedule="gpipe"),
    Setup(2, pp=2, accumulate=4, recompute=1),
    Setup(2, pp=2, accumulate=4, schedule="zb-h1"),
    Setup(2, pp=2, accumulate=4, schedule="zb-h1", recompute=1),
    Setup(2, pp=2, accumulate=4, schedule="interleaved"),
    Setup(2, tp=2, micro_batch=4),
    Setup(2, cp=2, micro_batch=4),
    Setup(2, cp=2, ep=2, micro_batch=4, recompute=1),
    Setup(2, cp=2, micro_batch=4, scheme="ulysses"),
    Setup(4, pp=4, accumulate=8),
    Setup(4, pp=2, ep=2, accumulate=4),
    Setup(4, pp=2, cp=2, accumulate=4, micro_batch=4),
    Setup(4, pp=2, tp=2, accumulate=4, micro_batch=4),
    Setup(2, local_steps=2, micro_batch=1, seq_len=128),
    Setup(2, ep=2, local_steps=2, micro_batch=4),
    Setup(2, local_steps=2, local_codec="int8", micro_batch=1, seq_len=128),
    Setup(4, pp=2, accumulate=4, local_steps=2, local_codec="sparseloco"),
    Setup(4, pp=2, ep=2, accumulate=4, turns=1),
    Setup(4, pp=2, ep=2, accumulate=4, turns=1, schedule="zb-h1"),
    Setup(4, pp=2, ep=2, accumulate=4, turns=1, recompute=1),
)
# With shards of experts, experts that move, and limits on their rows.
SPREAD = (
    Setup(2, ep=1, etp=2, micro_batch=4),
    Setup(4, ep=2, etp=2, skew="zipf", micro_batch=4, dispatcher="dedup", combine="reduced"),
    Setup(4, ep=2, etp=2, zero=1, recompute=1, micro_batch=4),
    Setup(4, ep=4, balance="exact", skew="95 %", top_k=1, micro_batch=8),
    Setup(4, ep=2, balance="exact", skew="95 %", recompute=1, micro_batch=4),
    Setup(2, ep=2, balance="exact", skew="zipf", zero=1, accumulate=2),
    Setup(2, ep=2, capacity_factor=1.25, skew="95 %", top_k=1, micro_batch=8),
    Setup(4, ep=4, capacity_factor=1.0, skew="zipf", micro_batch=4),
)


def routing(setup: Setup) -> Tensor:
    """Experts `[T, K]` of the tokens of a micro-batch, the same on every rank."""
    tokens = setup.micro_batch * setup.seq_len
    experts = SIZES["num_local_experts"]
    if setup.skew == "even":
        slots = torch.arange(tokens * setup.top_k)
        return (slots % experts).view(tokens, setup.top_k)
    draw = torch.Generator().manual_seed(SEED)
    share = 1 / torch.arange(1, experts + 1).double()
    if setup.skew == "95 %":
        share = torch.ones(experts).double()
    chosen = torch.multinomial(share.expand(tokens, -1), setup.top_k, generator=draw)
    if setup.skew == "95 %":
        here = torch.arange(tokens) < 0.95 * tokens
        # The first expert takes the place of the first choice, where it was not chosen.
        chosen[here & ~(chosen == 0).any(1), 0] = 0
    return chosen


def planned(setup: Setup, model: nn.Module | ModelSpec, memory: float = CLUSTER.memory) -> Plan:
    """The plan of a setup, for processors with so many bytes."""
    index = routing(setup)
    load = torch.bincount(index.view(-1), minlength=SIZES["num_local_experts"])
    cluster = ClusterSpec(CLUSTER.levels, CLUSTER.flops, memory, CLUSTER.memory_bandwidth)
    copies = setup.ranks // (setup.pp * setup.tp * setup.cp)
    batch = copies * setup.micro_batch * setup.accumulate
    return plan(
        *(model, cluster),
        num_ranks=setup.ranks,
        seq_len=setup.seq_len,
        global_batch=batch,
        dtype="float32",
        load=load.tolist(),
        capacity_factor=setup.capacity_factor,
        local_steps=setup.local_steps,
        local_codec=setup.local_codec,
        fixed=setup.fixed,
    )


def make_model(setup: Setup) -> nn.Module:
    """A small Mixtral."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.MixtralConfig(
        **{**SIZES, **dict(setup.sizes)},
        num_experts_per_tok=setup.top_k,
        output_router_logits=False,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


def measure(setup: Setup) -> tuple[int, Plan]:
    """Most bytes of tensors on this rank in a step of training, and the plan."""
    model: Any = make_model(setup)
    made = planned(setup, model)
    index = routing(setup)
    applied = made.apply(model)

    def choose(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Ranks that share sequences have a part of the tokens each.
        return inputs[0], index[: len(inputs[0])], inputs[2]

    for layer in (each for each in model.model.layers if hasattr(each, "mlp")):
        layer.mlp.experts.register_forward_pre_hook(choose)
        if setup.balance == "exact":
            # Whatever the rates of these processors are.
            rebalancer = layer.mlp.experts._rebalancer
            rebalancer.options = replace(rebalancer.options, break_even=0.0)
    optimizers = applied.optimizers(torch.optim.AdamW, lr=1e-3, foreach=True)
    shape = (setup.micro_batch, setup.seq_len)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [torch.randint(SIZES["vocab_size"], shape) for _ in range(setup.accumulate)]
        if applied.pipeline is None:
            for batch in batches:
                model(input_ids=batch, labels=batch).loss.backward()
        else:
            stages, last = applied.pipeline.stages, applied.pipeline.table.num_stages - 1
            applied.pipeline.step(*(batches if end in stages else () for end in (0, last)))
        applied.sync_gradients()
        for optimizer in optimizers:
            optimizer.step()

    rounds = None
    with contextlib.ExitStack() as stack:
        if setup.local_steps > 1:
            options = {"lr": 1.0} if setup.local_codec == "sparseloco" else OUTER
            # A round is one step.
            rounds = rounds_of(applied, optimizers[0], 1, torch.optim.SGD, **options)
            stack.enter_context(rounds)
        peak = _counted(model, optimizers, step, in_turn=bool(setup.turns))
        return peak + _kept(rounds), made


def _counted(
    model: nn.Module, optimizers: list[Optimizer], step: Callable[[], None], *, in_turn: bool
) -> int:
    """Most bytes of tensors on this rank in a step of training, but for what local steps keep."""
    # The first step makes the optimizer's state.
    step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    held = list(model.parameters())
    for optimizer in optimizers:
        for state in getattr(optimizer, "optim", optimizer).state.values():
            held += [value for value in state.values() if isinstance(value, Tensor)]
    local = [getattr(t, "_local_tensor", t) for t in held]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    # Memory that a message's thread releases may count for too long: take the lower of two steps.
    rises = []
    for _ in range(5 if in_turn else 2):
        # Lanes of a pipeline have threads of their own, which the profiler does not see.
        rises.append((peak_sampled if in_turn else peak_allocated)(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
    # Samples may miss the peak, too.
    return sum(storages.values()) + (statistics.median if in_turn else min)(rises)


def _kept(rounds: DiLoCo | None) -> int:
    """Bytes that local steps keep between rounds."""
    if rounds is None:
        return 0
    state, total = rounds.state_dict(), 0
    for outer in state["outer"]:
        for each in outer["state"].values():
            total += sum(x.nbytes for x in each.values() if isinstance(x, Tensor))
    (own,) = (value for name, value in state.items() if name.startswith("rank"))
    for part in own.values():
        total += sum(x.nbytes for x in part["original"])
        # The next round writes as many in their place.
        total += 2 * sum(x.nbytes for x in part["owed"].values())
    return total


def measure_on_rank(rank: int, setups: tuple[Setup, ...]) -> list[tuple[int, Plan]]:
    """Peak memory of each setup on this rank."""
    torch.set_num_threads(1)
    return [measure(setup) for setup in setups]


def measure_all(
    setups: tuple[Setup, ...] = SETUPS + SHARED + SPREAD,
) -> list[tuple[Setup, int, Plan]]:
    """Peak memory of the fullest rank in each setup."""
    found = []
    for ranks in sorted({setup.ranks for setup in setups}):
        here = tuple(setup for setup in setups if setup.ranks == ranks)
        rows = zip(*spawn_ranks(measure_on_rank, ranks, here, timeout=600.0), strict=True)
        for setup, peaks in zip(here, rows, strict=True):
            found.append((setup, max(peak for peak, _ in peaks), peaks[0][1]))
    return found


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    rows = []
    for setup, peak, made in measure_all():
        terms = {name: value for name, value in made.memory_terms().items() if value}
        predicted = sum(terms.values())
        most = max(terms, key=lambda name: terms[name])
        cells = (f"{peak / 1e6:.1f}", f"{predicted / 1e6:.1f}")
        off = f"{100 * (predicted / peak - 1):+.1f} %"
        rows.append((str(setup.ranks), setup.label, setup.skew, *cells, off, most))
    note = (
        "Most bytes of torch's allocator on the fullest rank in the second and third step of a "
        "small Mixtral (4 layers of 128, 8 experts of 256, 512 tokens in its vocabulary, "
        "float32), trained by `Plan.apply` with `AdamW(foreach=True)` on Gloo, beside "
        "`Plan.memory_terms`. "
        "*routing*: given to the experts; 95 % of tokens choose the first expert. "
        "`Plan.memory`, by which plans are refused, is a tenth more than *predicted*."
    )
    header = ("ranks", "placement", "routing", "peak MB", "predicted MB", "off", "largest term")
    return [Table("Planner: memory of a step", note, header, rows)]
