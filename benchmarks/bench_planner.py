"""Published step times of training beside those that the planner predicts for the same plans."""

import csv
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _harness import Table

from moe_ext.planner import ClusterSpec, Job, Level, ModelSpec, StepCost, preset
from moe_ext.planner.axes import columns_of
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


@dataclass(frozen=True)
class Group:
    """Runs that share their constants: a machine with its software.

    Attributes:
        sources: of its runs.
        single: those on one node, or those on many, alone; None for both.
    """

    sources: tuple[str, ...]
    single: bool | None = None

    def __contains__(self, run: Run) -> bool:
        return run.source in self.sources and self.single in (None, run.single)

    def __str__(self) -> str:
        level = "" if self.single is None else f", {level_name(self.single)}"
        return ", ".join(self.sources) + level


GROUPS = (
    Group(("vtrain",), True),
    Group(("vtrain", "megatron-2021"), False),
    Group(("megatron-bridge", "deepseek-v3")),
    Group(("torchtitan",)),
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


def fitted_rows(runs: Sequence[Run]) -> set[int]:
    """Rows that constants are fitted on: at most every 20th plan of one node and every 4th of many.

    Plans of a source are taken in the order of the file, with all releases that measured them: none
    is among both the fitted and the others.
    """
    chosen: set[int] = set()
    for source in SOURCES:
        for single, every in ((True, 20), (False, 4)):
            rows = [i for i, run in enumerate(runs) if run.source == source]
            rows = [i for i in rows if runs[i].single == single]
            plans: dict[tuple[object, ...], list[int]] = {}
            for i in rows:
                run = runs[i]
                key = (run.model, run.system, run.gpus, run.precision, run.global_batch)
                plans.setdefault((*key, run.seq_len, run.plan), []).append(i)
            for same in list(plans.values())[every - 1 :: every]:
                chosen.update(same)
    return chosen


@dataclass(frozen=True)
class Constants:
    """The fitted constants: shares, seconds of a layer's launches, and factors.

    Attributes:
        products: share of the peak of products, in each format.
        scores: share of the peak in 16 bits that attention reaches.
        memory: share of the memory's nominal rate.
        links: share of the nominal rates of links.
        alltoall: share of these that NCCL's all-to-all reaches in the node.
        layer_seconds: see `ClusterSpec`.
        node_launches: see `ClusterSpec`.
        gradients: what means of gradients that travel behind work take over their formula.
    """

    products: float = 0.6
    scores: float = 0.3
    memory: float = 0.6
    links: float = 0.6
    alltoall: float = 0.5
    layer_seconds: float = 8e-4
    node_launches: float = 0.2
    gradients: float = 1.0

    def cluster(self, run: Run) -> ClusterSpec:
        """The run's system at these rates."""
        system = SYSTEMS[run.system]
        factor = FORMATS[run.precision] * (system.nvfp4 if run.precision == "NVFP4" else 1.0)
        node = system.link * self.links * (self.alltoall if run.dispatcher == "alltoall" else 1.0)
        levels = (
            Level("node", system.node, 3e-6 / self.links, node),
            Level("network", system.node * 2**17, 10e-6 / self.links, system.network * self.links),
        )
        measured = {"update": UPDATES.get(run.source, 1.0)}
        if run.source in HIDDEN:
            measured["all_reduce"] = self.gradients
        return ClusterSpec(
            levels,
            {"bfloat16": system.flops, LAYERS: system.flops * factor},
            1e18,  # programs that ran had enough
            system.memory * self.memory,
            self.products,
            min(1.0, self.scores * system.scores),
            self.layer_seconds,
            measured=measured,
            node_launches=self.node_launches,
            multiprocessors=system.multiprocessors,
        )

    def vector(self) -> torch.Tensor:
        """Logits of the five shares, and the logarithms of the others."""
        both = torch.tensor(dataclasses.astuple(self), dtype=torch.float64)
        return torch.cat([both[:5].logit(), both[5:].log()])

    @staticmethod
    def of(vector: torch.Tensor) -> "Constants":
        """The inverse of `vector`."""
        return Constants(*vector[:5].sigmoid().tolist(), *vector[5:].exp().tolist())


def cost_of(run: Run, constants: Constants) -> tuple[StepCost, dict[str, torch.Tensor]]:
    """The planner's cost model of a run, and its plan as columns."""
    cluster = constants.cluster(run)
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


def predict(run: Run, constants: Constants, *, closed: bool = False) -> float:
    """Seconds of a step by the planner; closed forms where it has no schedule of so many chunks."""
    cost, columns = cost_of(run, constants)
    if run.vp in (1, 2) and not closed:
        return simulated(cost, columns)
    each = sum(cost.passes.terms(columns).values())
    assert isinstance(each, torch.Tensor)
    fill = (run.pp - 1) / run.vp
    ends = cost.end.gradients(columns) + cost.end.update(columns)
    micro = cost.sizes.num_micro_batches(columns)
    each, last = each, 3 * cost.compute.output(columns)
    return float(
        micro * (each + last) + fill * each + 2 * (run.pp - 1) * cost.exchange.hop(columns) + ends
    )


def fit(runs: Sequence[Run], rounds: int = 30) -> Constants:
    """Constants by least absolute logarithms of predicted over published, from round numbers.

    Levenberg and Marquardt's steps with weights, and a weak pull to the start for constants that no
    row tells.
    """
    start = Constants().vector()

    def residuals(vector: torch.Tensor) -> torch.Tensor:
        constants = Constants.of(vector)
        logs = [math.log(predict(run, constants, closed=True) / run.seconds) for run in runs]
        return torch.tensor(logs, dtype=torch.float64)

    def loss(vector: torch.Tensor, r: torch.Tensor) -> float:
        return float(r.abs().sum() + 0.02 * (vector - start).square().sum())

    x, damping, gain = start, 1.0, 0.0
    r = residuals(x)
    for _ in range(rounds):
        moved = [x + 0.02 * unit for unit in torch.eye(len(x), dtype=x.dtype)]
        jacobian = torch.stack([(residuals(one) - r) / 0.02 for one in moved], 1)
        w = 1 / r.abs().clamp(min=0.01)
        left = jacobian.T @ (w[:, None] * jacobian) + 0.04 * torch.eye(len(x), dtype=x.dtype)
        right = jacobian.T @ (w * r) + 0.04 * (x - start)
        while damping < 1e4:
            step = torch.linalg.solve(left + damping * left.diag().diag(), right)
            new = x - step.clamp(-1, 1)
            found = residuals(new)
            gain = loss(x, r) - loss(new, found)
            if gain > 0:
                x, r, damping = new, found, damping / 4
                break
            damping *= 3
        if gain < 1e-3 * len(runs) / 100:
            break
    return Constants.of(x)


@dataclass(frozen=True)
class Validation:
    """Published runs, those that constants were fitted on, and what the planner predicts."""

    runs: list[Run]
    fitted: set[int]
    constants: list[Constants]
    predicted: list[float]


def validate() -> Validation:
    """Fit the constants of each group on its rows, and predict all runs."""
    runs = read_runs()
    fitted = fitted_rows(runs)
    constants = []
    predicted = [0.0] * len(runs)
    for group in GROUPS:
        rows = [i for i, run in enumerate(runs) if run in group]
        constants.append(fit([runs[i] for i in rows if i in fitted]))
        for i in rows:
            predicted[i] = predict(runs[i], constants[-1])
    return Validation(runs, fitted, constants, predicted)


def regrets(found: Validation) -> list[tuple[Run, int, float]]:
    """A run, the number of plans and the regret, for each job with several published plans.

    The regret: by how much the plan with the least predicted time is slower than the quickest.
    """
    jobs: dict[tuple[object, ...], list[int]] = {}
    for i, run in enumerate(found.runs):
        jobs.setdefault(run.job, []).append(i)
    regret = []
    for rows in jobs.values():
        if len({found.runs[i].plan for i in rows}) > 1:
            chosen = min(rows, key=lambda i: found.predicted[i])
            best = min(found.runs[i].seconds for i in rows)
            loss = found.runs[chosen].seconds / best - 1
            regret.append((found.runs[chosen], len(rows), 100 * loss))
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


def error(runs: Sequence[Run], predicted: Sequence[float]) -> float:
    """Mean absolute difference to the published seconds, in percent of those."""
    found = [abs(p / run.seconds - 1) for run, p in zip(runs, predicted, strict=True)]
    return 100 * statistics.mean(found) if found else math.nan


def level_name(single: bool) -> str:
    """Name of a run's level in tables."""
    return "one node" if single else "many nodes"


def error_table(found: Validation) -> Table:
    """Errors by source and level."""
    rows = []

    def row(name: str, level: str, inside: Callable[[Run], bool]) -> None:
        every = [i for i, run in enumerate(found.runs) if inside(run)]
        parts = [[i for i in every if (i in found.fitted) == seen] for seen in (True, False)]
        if not every:
            return
        ratios = [100 * (found.predicted[i] / found.runs[i].seconds - 1) for i in parts[1]]
        errors = [
            error([found.runs[i] for i in part], [found.predicted[i] for i in part])
            for part in parts
        ]
        cells = [f"{value:.1f}" if value == value else "-" for value in errors]
        within = statistics.median(abs(ratio) for ratio in ratios)
        rows.append(
            (
                *(name, level, str(len(parts[0])), str(len(parts[1])), *cells),
                *(f"{within:.1f}", f"{statistics.mean(ratios):+.1f}"),
            )
        )

    for source in SOURCES:
        for single in (True, False):
            row(
                *(source, level_name(single)),
                lambda run, s=source, o=single: run.source == s and run.single == o,
            )
    row("all", "one node", lambda run: run.single)
    row("all", "many nodes", lambda run: not run.single)
    header = ("source", "level", "fitted rows", "unseen rows", "error of fitted %")
    header = (*header, "error of unseen %", "median %", "bias %")
    note = (
        "Seconds of a step of published runs, beside those that `moe_ext.planner` predicts for the "
        "same model, system and plan. *error*: mean absolute difference in percent of the "
        "published seconds; *median* and *bias*, predicted over published, are of unseen rows. "
        "Constants (next table) are fitted on every 20th plan of one node and every 4th of many; a "
        "plan that several releases measured is on one side as a whole. A node is what the "
        "planner's first level joins: 72 ranks of GB200 and GB300, else 8. Seconds that several "
        "releases of megatron-bridge have for one plan differ from their median by "
        f"{release_spread(found.runs):.1f} % on the mean. Sources: "
        + ", ".join(f"[{name}]({url})" for name, url in SOURCES.items())
        + "."
    )
    return Table("Planner: published step times", note, header, rows)


def constants_table(found: Validation) -> Table:
    """The table of fitted constants."""
    rows = []
    for group, made in zip(GROUPS, found.constants, strict=True):
        shares = dataclasses.astuple(made)[:5]
        cells = [f"{share:.2f}" for share in shares]
        cells += [f"{1e6 * made.layer_seconds:.0f}", f"{made.node_launches:.2f}"]
        rows.append((str(group), *cells, f"{made.gradients:.2f}"))
    header = ("runs", "products", "scores", "memory", "links", "alltoall")
    header = (*header, "launches", "node launches", "gradients")
    note = (
        "Shares of nominal rates: products in their format, scores of attention of the peak in 16 "
        "bits, memory, links, and NCCL's all-to-all in a node of those. *launches*: microseconds "
        "of a layer's forward pass, which show where its kernels are shorter; *node launches*: by "
        "what share they are longer where tensor parallelism has all ranks of a node. *gradients*: "
        "what their messages take behind work, over the formula. Constants that no row of a group "
        "tells stay where the fit begins."
    )
    return Table("Planner: fitted constants", note, header, rows)


def regret_table(found: Validation) -> Table:
    """Regret by source and level."""
    every, rows = regrets(found), []
    for source in SOURCES:
        for single in (True, False):
            part = [r for r in every if r[0].source == source and r[0].single == single]
            if part:
                losses = [loss for _, _, loss in part]
                best = sum(loss == 0 for loss in losses)
                rows.append(
                    (
                        *(source, level_name(single), str(len(part))),
                        *(
                            str(sum(count for _, count, _ in part)),
                            f"{statistics.mean(losses):.1f}",
                        ),
                        *(f"{statistics.median(losses):.1f}", f"{max(losses):.1f}", str(best)),
                    )
                )
    header = ("source", "level", "jobs", "plans", "mean %", "median %", "worst %", "best found")
    note = (
        "Jobs (model, system, ranks, format, batch and release) of which several plans were "
        "published. *regret*: by how much the published time of the plan with the least predicted "
        "time is above that of the quickest plan. *best found*: jobs with none."
    )
    return Table("Planner: regret", note, header, rows)


def residual_table(found: Validation, largest: int = 4) -> Table:
    """Unseen rows with the largest errors."""
    rows = []
    for source in SOURCES:
        part = [i for i, run in enumerate(found.runs) if run.source == source]
        ratio = {i: found.predicted[i] / found.runs[i].seconds for i in part}
        part = sorted(set(part) - found.fitted, key=lambda i: -abs(math.log(ratio[i])))
        for i in part[:largest]:
            run = found.runs[i]
            named = ("micro-batch", "tp", "cp", "pp", "vp", "ep", "zero", "recompute")
            plan = ", ".join(f"{n} {v}" for n, v in zip(named, run.plan, strict=True) if v != 1)
            what = (
                f"{run.model}, {run.gpus} {run.system}, {run.precision}, batch {run.global_batch}"
            )
            times = (f"{run.seconds:.3g}", f"{found.predicted[i]:.3g}")
            rows.append((f"{source} {run.release}".strip(), what, plan, *times))
    header = ("source", "job", "plan, but for ones", "published s", "predicted s")
    note = "The unseen rows with the largest errors, four of each source."
    return Table("Planner: largest errors", note, header, rows)


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md."""
    found = validate()
    makers = (error_table, regret_table, constants_table, residual_table)
    return [maker(found) for maker in makers]
