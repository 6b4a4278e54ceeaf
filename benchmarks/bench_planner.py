"""Published step times of training beside those that the planner predicts for the same plans."""

import collections
import csv
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _harness import Table

from moe_ext.planner import ClusterSpec, Job, Level, ModelSpec, StepCost, preset
from moe_ext.planner.axes import columns_of
from moe_ext.planner.cluster import LINK_SHARE, MEMORY_SHARE, REACHED
from moe_ext.planner.stage_layers import simulated

DATA = Path(__file__).resolve().parent / "data" / "published_runs.csv"
_GITHUB = "https://github.com"
SOURCES = {
    "vtrain": f"{_GITHUB}/VIA-Research/vTrain/tree/f8dda8473a48b373b1d25f51f52d685bff5150c5/data",
    "megatron-2021": "https://arxiv.org/abs/2104.04473",
    "megatron-bridge": f"{_GITHUB}/NVIDIA-NeMo/Megatron-Bridge/tree/"
    "067f987df03b8355b03192d88d70f1709fedf51a/docs",
    "torchtitan": f"{_GITHUB}/pytorch/torchtitan/tree/"
    "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/benchmarks",
    "deepseek-v3": "https://arxiv.org/abs/2412.19437",
}


@dataclass(frozen=True)
class System:
    """Nominal rates of a system.

    Attributes:
        node: ranks of it.
        link: bytes a second of a rank to others in the node.
        network: bytes a second of a rank to other nodes.
        flops: operations a second in 16 bits.
        memory: bytes a second of the memory.
        multiprocessors: of a processor.
        nvfp4: peak in NVFP4, over that of Blackwell.
        scores: rate of the exponentials in attention, over that of Blackwell and what was before.
    """

    node: int
    link: float
    network: float
    flops: float
    memory: float
    multiprocessors: int
    nvfp4: float = 1.0
    scores: float = 1.0


SYSTEMS = {
    # vTrain's configurations say 800 Gbit/s for a node.
    "A100-800G": System(8, 300e9, 12.5e9, 312e12, 2.039e12, 108),
    "A100": System(8, 300e9, 25e9, 312e12, 2.039e12, 108),
    "H100": System(8, 450e9, 50e9, 989e12, 3.35e12, 132),
    "H100-500W": System(8, 450e9, 50e9, 989e12, 2.4e12, 132),
    "H200": System(8, 450e9, 50e9, 989e12, 4.8e12, 132),
    "H800": System(8, 200e9, 50e9, 989e12, 3.35e12, 132),
    "B200": System(8, 900e9, 50e9, 2.25e15, 8e12, 148),
    "B300": System(8, 900e9, 100e9, 2.25e15, 8e12, 148, 1.5, 2.0),
    "GB200": System(72, 900e9, 50e9, 2.5e15, 8e12, 148),
    "GB300": System(72, 900e9, 100e9, 2.5e15, 8e12, 148, 1.5, 2.0),
}
# Name of the format of a run's layers; scores, output and messages are in 16 bits.
LAYERS = "layers"
# Sources whose programs send gradients and weights while micro-batches compute.
HIDDEN = ("megatron-bridge", "torchtitan", "deepseek-v3")
# Bytes of a parameter that the optimizer's step reads and writes over those of the planner's, which
# are 28: Megatron-LM of that time also turned gradients to float32, unscaled and clipped them.
UPDATES = {"vtrain": 60 / 28, "megatron-2021": 60 / 28}
# Products of a format over those of 16 bits, by their peaks.
FORMATS = {"FP16": 1.0, "BF16": 1.0, "FP8": 2.0, "MXFP8": 2.0, "NVFP4": 4.0}


@dataclass(frozen=True)
class Run:
    """A row of the data file.

    Seconds follow from tokens a second or operations where those are published instead.
    """

    source: str
    release: str
    model: str
    system: str
    gpus: int
    precision: str
    global_batch: int
    micro_batch: int
    seq_len: int
    tp: int
    cp: int
    pp: int
    vp: int
    ep: int
    zero: int
    recompute: int
    overlap: int
    dispatcher: str
    seconds: float
    tflops: float | None

    @property
    def single(self) -> bool:
        """All ranks are in one node."""
        return self.gpus <= SYSTEMS[self.system].node

    @property
    def level(self) -> str:
        """Name of the level that joins all ranks."""
        return "one node" if self.single else "many nodes"

    @property
    def job(self) -> tuple[object, ...]:
        """Runs of one job differ in their plans alone."""
        return (
            *(self.source, self.release, self.model, self.system, self.gpus),
            *(self.precision, self.global_batch, self.seq_len),
        )

    @property
    def plan(self) -> tuple[int, ...]:
        """Values of the plan."""
        return (
            *(self.micro_batch, self.tp, self.cp, self.pp, self.vp, self.ep),
            *(self.zero, self.recompute),
        )


@functools.cache
def model_of(name: str) -> ModelSpec:
    """Sizes of a model: a preset, one with multi-token prediction, or GPT's by its numbers."""
    if name.startswith("gpt-") and name.count("-") == 3:
        layers, dim, heads = (int(part) for part in name.split("-")[1:])
        return ModelSpec(layers, dim, heads, 4 * dim, 51200, positions=2048)
    base, _, more = name.partition("+")
    spec = preset(base)
    if more:
        # A further layer and the output again; its projection, 0.2 %, is left out.
        spec = dataclasses.replace(
            spec,
            num_layers=spec.num_layers + 1,
            num_moe_layers=spec.num_moe_layers + 1,
            vocab_size=2 * spec.vocab_size,
        )
    return spec


def model_tflop(run: Run) -> float:
    """Operations of a step, 1e12 each, as the sources count them.

    Causal scores, without recompute and embeddings; Megatron of 2021 counts all scores and the
    recomputed pass.
    """
    spec = model_of(run.model)
    tokens = run.global_batch * run.seq_len
    if run.source == "megatron-2021":
        layers, dim, vocab = spec.num_layers, spec.model_dim, spec.vocab_size
        each = 96 * layers * dim**2 * (1 + run.seq_len / 6 / dim + vocab / 16 / layers / dim)
        return tokens * each / 1e12
    inside = spec.active_parameters() - spec.model_dim * spec.positions
    inside -= 0 if spec.tied else spec.vocab_size * spec.model_dim
    scores = 2 * spec.num_layers * spec.mean_keys(run.seq_len) * spec.scores_dim
    return tokens * 6 * (inside + scores) / 1e12


def read_runs() -> list[Run]:
    """All rows of the data file."""
    found = []
    with DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            tflops = float(row["tflops"]) if row["tflops"] else None
            named = {
                field.name: int(row[field.name])
                for field in dataclasses.fields(Run)
                if field.type in (int, "int")
            }
            run = Run(
                *(row["source"], row["release"], row["model"], row["system"]),
                precision=row["precision"],
                dispatcher=row["dispatcher"],
                seconds=0.0,
                tflops=tflops,
                **named,
            )
            if row["seconds"]:
                seconds = float(row["seconds"])
            elif row["tokens_per_second"]:
                tokens = run.global_batch * run.seq_len
                seconds = tokens / run.gpus / float(row["tokens_per_second"])
            else:
                assert tflops is not None
                seconds = model_tflop(run) / run.gpus / tflops
            found.append(dataclasses.replace(run, seconds=seconds))
    return found


@dataclass(frozen=True)
class Rates:
    """Shares of nominal rates that are reached, and launches; see `ClusterSpec`.

    Attributes:
        efficiency: share of the peak of products, in each format.
        score_efficiency: share of the peak in 16 bits.
        memory: share of the memory's nominal rate.
        links: share of the nominal rates of links.
        layer_seconds: seconds of a layer's launches.
        node_launches: share by which they take longer with tensor parallelism over a node.
    """

    efficiency: float
    score_efficiency: float
    memory: float
    links: float
    layer_seconds: float
    node_launches: float

    def cluster(self, run: Run) -> ClusterSpec:
        """The run's system at these rates."""
        system = SYSTEMS[run.system]
        factor = FORMATS[run.precision] * (system.nvfp4 if run.precision == "NVFP4" else 1.0)
        levels = (
            Level("node", system.node, 3e-6, system.link * self.links),
            Level("network", system.node * 2**17, 10e-6, system.network * self.links),
        )
        return ClusterSpec(
            levels,
            {"bfloat16": system.flops, LAYERS: system.flops * factor},
            1e18,  # programs that ran had enough
            system.memory * self.memory,
            self.efficiency,
            min(1.0, self.score_efficiency * system.scores),
            self.layer_seconds,
            measured={"update": UPDATES.get(run.source, 1.0)},
            node_launches=self.node_launches,
            multiprocessors=system.multiprocessors,
        )


PRESETS = Rates(**REACHED, memory=MEMORY_SHARE, links=LINK_SHARE)
# Round numbers to choose from, and where the choice begins.
ROUND = {
    "efficiency": (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9),
    "score_efficiency": (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    "memory": (0.6, 0.7, 0.8, 0.9),
    "links": (0.5, 0.6, 0.7, 0.8, 0.9),
    "layer_seconds": (2e-4, 4e-4, 6e-4, 7e-4, 8e-4, 1e-3),
    "node_launches": (0.0, 0.2, 0.3, 0.4, 0.6),
}
START = Rates(0.6, 0.3, 0.7, 0.7, 6e-4, 0.2)


def cost_of(run: Run, rates: Rates) -> tuple[StepCost, dict[str, torch.Tensor]]:
    """The planner's cost model of a run, and its plan as columns."""
    cluster = rates.cluster(run)
    node, ep = SYSTEMS[run.system].node, run.ep
    away = ep > node and ep % node == 0
    plain = ep == 1 or run.dispatcher == "alltoall"
    choice = {
        **{"pp": run.pp, "tp": run.tp, "cp": run.cp, "ep": ep, "micro_batch": run.micro_batch},
        **{"schedule": "1f1b" if run.vp == 1 else "interleaved", "zero": run.zero},
        # DeepSeek-V3 sends rows to the experts in FP8.
        **{"recompute": run.recompute, "wire": "fp8" if run.source == "deepseek-v3" else None},
        # DeepEP's and HybridEP's way: a row once for each rank, or node, and sums on the way back.
        "dispatcher": "alltoall" if plain else "hierarchical" if away else "dedup",
        "combine": "exact" if plain else "reduced",
    }
    dense = not model_of(run.model).num_experts
    # The A100 runs are older than fused attention.
    job = Job(
        *(run.gpus, run.seq_len, run.global_batch),
        eager_attention="A100" in run.system,
        hidden_exchanges=bool(run.overlap),
        hidden_gradients=run.source in HIDDEN,
        hidden_tensor=run.source == "megatron-bridge" and run.precision != "NVFP4" and dense,
        node_limit=4 if run.source == "deepseek-v3" else 0,
        layer_dtype=LAYERS if FORMATS[run.precision] > 1 else None,
    )
    return StepCost(model_of(run.model), cluster, job), columns_of([choice])


def predict(run: Run, rates: Rates, *, closed: bool = False) -> float:
    """Seconds of a step by the planner; closed forms where it has no schedule of so many chunks."""
    cost, columns = cost_of(run, rates)
    if run.vp in (1, 2) and not closed:
        return simulated(cost, columns)
    each = sum(cost.passes.terms(columns).values())
    assert isinstance(each, torch.Tensor)
    fill = (run.pp - 1) / run.vp
    ends = cost.end.gradients(columns) + cost.end.update(columns)
    micro = cost.sizes.num_micro_batches(columns)
    last = 3 * cost.compute.output(columns)
    return float(
        micro * (each + last) + fill * each + 2 * (run.pp - 1) * cost.exchange.hop(columns) + ends
    )


def kind_of(run: Run) -> tuple[str, str]:
    """Source, and what of it counts as much as any other kind of runs."""
    what = "experts" if model_of(run.model).num_experts else "dense"
    return run.source, f"{what}, {run.level}"


def nearest(runs: Sequence[Run]) -> Rates:
    """The round numbers by which runs are foretold best, one number after the other, twice.

    Schedules are in closed forms.

    Least is the mean over the kinds of runs of their mean absolute logarithm of predicted over
    published.
    """

    def loss(rates: Rates) -> float:
        found: dict[tuple[str, str], list[float]] = {}
        for run in runs:
            log = math.log(predict(run, rates, closed=True) / run.seconds)
            found.setdefault(kind_of(run), []).append(abs(log))
        return statistics.mean(map(statistics.mean, found.values()))

    best, least = START, loss(START)
    for name, numbers in 2 * tuple(ROUND.items()):
        for number in numbers:
            other = dataclasses.replace(best, **{name: number})
            if other != best and (found := loss(other)) < least:
                best, least = other, found
    return best


def thinned(runs: Sequence[Run]) -> list[Run]:
    """All runs, but of vTrain's every 19th on one node and every 4th on many."""
    few, seen = [], collections.Counter[bool]()
    for run in runs:
        if run.source == "vtrain":
            seen[run.single] += 1
            if seen[run.single] % (19 if run.single else 4):
                continue
        few.append(run)
    return few


@dataclass(frozen=True)
class Validation:
    """Published runs, and what the planner predicts.

    Attributes:
        runs: all of them.
        predicted: seconds by the presets.
        chosen: the round numbers without each source.
        left_out: seconds by the numbers without the run's source.
    """

    runs: list[Run]
    predicted: list[float]
    chosen: dict[str, Rates]
    left_out: list[float]


def validate() -> Validation:
    """Predict all runs by the presets, and by numbers that are chosen without their source."""
    runs = read_runs()
    chosen = {
        source: nearest(thinned([run for run in runs if run.source != source]))
        for source in SOURCES
    }
    chosen["none"] = nearest(thinned(runs))
    if chosen["none"] != PRESETS:
        text = f"benchmark planner: the presets have {PRESETS}, not {chosen['none']}"
        print(text, file=sys.stderr)
    left_out = [predict(run, chosen[run.source]) for run in runs]
    return Validation(runs, [predict(run, PRESETS) for run in runs], chosen, left_out)


def regrets(runs: Sequence[Run], predicted: Sequence[float]) -> list[tuple[Run, int, float]]:
    """A run, the number of plans and the regret, for each job with several published plans.

    The regret: by how much the plan with the least predicted time is slower than the quickest.
    """
    jobs: dict[tuple[object, ...], list[int]] = {}
    for i, run in enumerate(runs):
        jobs.setdefault(run.job, []).append(i)
    regret = []
    for rows in jobs.values():
        if len({runs[i].plan for i in rows}) > 1:
            chosen = min(rows, key=lambda i: predicted[i])
            best = min(runs[i].seconds for i in rows)
            loss = runs[chosen].seconds / best - 1
            regret.append((runs[chosen], len(rows), 100 * loss))
    return regret


def release_spread(runs: Sequence[Run]) -> float:
    """Mean absolute difference of a plan's seconds to their median over releases, in percent."""
    plans: dict[tuple[object, ...], list[float]] = {}
    for run in runs:
        if run.release:
            plans.setdefault((run.job[2:], run.plan), []).append(run.seconds)
    found = [
        abs(seconds / statistics.median(same) - 1)
        for same in plans.values()
        if len(same) > 1
        for seconds in same
    ]
    return 100 * statistics.mean(found)


def errors_of(runs: Sequence[Run], predicted: Sequence[float]) -> list[float]:
    """Differences to the published seconds, in percent of those."""
    return [100 * (p / run.seconds - 1) for run, p in zip(runs, predicted, strict=True)]


def error_table(found: Validation) -> Table:
    """Errors by source and kind of runs."""
    rows = []
    by_preset, by_others = (errors_of(found.runs, p) for p in (found.predicted, found.left_out))
    places: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(found.runs):
        places.setdefault(kind_of(run), []).append(i)
    for source in SOURCES:
        for kind in sorted(kind for kind in places if kind[0] == source):
            cells = []
            for each in (by_preset, by_others):
                errors = [each[i] for i in places[kind]]
                cells += [
                    f"{statistics.mean(map(abs, errors)):.1f}",
                    f"{statistics.median(errors):+.1f}",
                ]
            rows.append((*kind, str(len(places[kind])), *cells))
    header = ("source", "runs", "rows", "error %", "bias %")
    header = (*header, "error without the source %", "bias without the source %")
    note = (
        "Seconds of a step of published runs, beside those that `moe_ext.planner` predicts for the "
        "same model, system and plan. *error*: mean absolute difference in percent of the "
        "published seconds, by what the presets of `ClusterSpec` reach of the nominal rates of "
        "the system; *bias*: the median difference. *without the source*: by round numbers that "
        "are chosen without any row of it (next table). A node is what the planner's first level "
        "joins: 72 ranks of GB200 and GB300, else 8. Seconds that several releases of "
        "megatron-bridge have for one plan differ from their median by "
        f"{release_spread(found.runs):.1f} % on the mean. Sources: "
        + ", ".join(f"[{name}]({url})" for name, url in SOURCES.items())
        + "."
    )
    return Table("Planner: published step times", note, header, rows)


def rates_table(found: Validation) -> Table:
    """The table of round numbers."""
    rows = []
    for source, rates in found.chosen.items():
        shares = (rates.efficiency, rates.score_efficiency, rates.memory, rates.links)
        cells = [*(f"{share:g}" for share in shares), f"{1e6 * rates.layer_seconds:.0f}"]
        rows.append((source, *cells, f"{rates.node_launches:g}"))
    header = ("left out", "products", "scores", "memory", "links", "launches", "node launches")
    note = (
        "Round numbers by which the other sources are foretold best; the presets have those of all "
        "sources. Shares of nominal rates: products in their format, scores of attention of the "
        "peak in 16 bits, memory, links. *launches*: microseconds of a layer's forward pass, which "
        "show where its kernels are shorter; *node launches*: by what share they are longer where "
        "tensor parallelism has all ranks of a node."
    )
    return Table("Planner: round numbers", note, header, rows)


def regret_table(found: Validation) -> Table:
    """Regret by source and level."""
    rows = []
    by_preset, by_others = (regrets(found.runs, p) for p in (found.predicted, found.left_out))
    for source in SOURCES:
        for level in ("one node", "many nodes"):
            jobs = [
                i
                for i, (run, _, _) in enumerate(by_preset)
                if (run.source, run.level) == (source, level)
            ]
            if not jobs:
                continue
            losses = [by_preset[i][2] for i in jobs]
            cells = [f"{f(losses):.1f}" for f in (statistics.mean, statistics.median, max)]
            others = statistics.mean(by_others[i][2] for i in jobs)
            rows.append(
                (
                    *(source, level, str(len(jobs))),
                    *(str(sum(by_preset[i][1] for i in jobs)), *cells),
                    *(str(sum(loss == 0 for loss in losses)), f"{others:.1f}"),
                )
            )
    header = ("source", "level", "jobs", "plans", "mean %", "median %", "worst %", "best found")
    header = (*header, "mean without the source %")
    note = (
        "Jobs (model, system, ranks, format, batch and release) of which several plans were "
        "published. *regret*: by how much the published time of the plan with the least predicted "
        "time is above that of the quickest plan. *best found*: jobs with none."
    )
    return Table("Planner: regret", note, header, rows)


def residual_table(found: Validation, largest: int = 4) -> Table:
    """Rows with the largest errors."""
    rows = []
    for source in SOURCES:
        part = [i for i, run in enumerate(found.runs) if run.source == source]
        ratio = {i: found.predicted[i] / found.runs[i].seconds for i in part}
        for i in sorted(part, key=lambda i: -abs(math.log(ratio[i])))[:largest]:
            run = found.runs[i]
            named = ("micro-batch", "tp", "cp", "pp", "vp", "ep", "zero", "recompute")
            plan = ", ".join(f"{n} {v}" for n, v in zip(named, run.plan, strict=True) if v != 1)
            what = (
                f"{run.model}, {run.gpus} {run.system}, {run.precision}, batch {run.global_batch}"
            )
            times = (f"{run.seconds:.3g}", f"{found.predicted[i]:.3g}")
            rows.append((f"{source} {run.release}".strip(), what, plan, *times))
    header = ("source", "job", "plan, but for ones", "published s", "predicted s")
    note = "The rows with the largest errors by the presets, four of each source."
    return Table("Planner: largest errors", note, header, rows)


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md."""
    found = validate()
    makers = (error_table, rates_table, regret_table, residual_table)
    return [maker(found) for maker in makers]
