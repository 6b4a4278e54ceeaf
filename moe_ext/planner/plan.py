"""Plans: a placement with its costs, reasons, files, commands, and a model put into it."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from moe_ext._checks import check_fields
from moe_ext._files import read_json, write_json
from moe_ext.comm.groups import group_size
from moe_ext.comm.link import max_over_ranks
from moe_ext.planner.apply import Applied, apply_plan, rounds_of
from moe_ext.planner.axes import DEFAULTS, MESH, YOUNGER, Choice, Columns, columns_of
from moe_ext.planner.cluster import CLUSTERS, ClusterSpec
from moe_ext.planner.cost import StepCost
from moe_ext.planner.expert_load import load_of
from moe_ext.planner.job import Job
from moe_ext.planner.presets import PRESETS, ModelSpec, RecurrentSpec
from moe_ext.planner.profile import timed
from moe_ext.planner.search import Found, check_placement, search
from moe_ext.planner.sizes import SharedStates
from moe_ext.planner.spec import model_spec
from moe_ext.planner.stage_layers import StageLayers, rank_columns

SCHEMA = 1
# Advice for each term, shown if this term is the largest.
_REMEDIES = {
    "weights": "more pp, tp or ep, ZeRO 3, or processors with more memory",
    "gradients": "more pp, tp or ep, ZeRO 3, or processors with more memory",
    "optimizer": "ZeRO 1 over more copies, more pp, offload, or processors with more memory",
    "feedback": "gradients none or lossless, which owe nothing, or more pp or ep",
    "gathered": "ZeRO 1 or 3, or smaller layers by tp",
    "activations": "recompute, smaller micro-batches, more cp or tp, or more memory",
    "temporary": "smaller micro-batches, even routing, more ep, or more memory",
    "logits": "smaller micro-batches, more cp or tp",
    "compute": "quicker or more processors, recompute off, or even routing",
    "elementwise": "larger micro-batches, more tp, or processors with a quicker memory",
    "output": "more tp, or quicker or more processors",
    "launches": "larger micro-batches, or less tp",
    "update": "ZeRO 1, or processors with a quicker memory",
    "tensor": "less tp, or a quicker link inside the node",
    "context": "less cp, the other scheme, kv_wire int8, or a quicker link",
    "states": "less cp, the other scheme, or a quicker link",
    "experts": "ep inside the node, dispatcher dedup, wire int8, or a quicker link",
    "moved experts": "balance none, larger micro-batches, or a quicker link",
    "last round": "more pp, or processors with more memory",
    "host": "more pp or ep, ZeRO 1 over more copies, or a host with more memory",
    "offload": "ZeRO 1, a larger global batch, or a quicker link to the host",
    "rounds": "more local steps, another local_codec, or a quicker network",
    "gradient messages": "less ZeRO, a larger global batch, gradients int8, or a quicker network",
    "idle pipeline": "more micro-batches, less pp, or zb-h1",
}


@dataclass(frozen=True)
class Plan:
    """A placement of a job over ranks, why it was chosen, and how to run it.

    Attributes:
        model: sizes of the model.
        cluster: processors and links.
        job: a step of training.
        choice: value of each axis: pp, tp, cp, ep, etp, micro_batch, schedule, turns, zero,
            recompute, offload, dispatcher, wire, combine, balance, scheme, gradients and kv_wire.
            With recompute the layers that `stages` names are computed again.
        seconds: seconds of a step.
        memory: bytes of the fullest rank, with the margin.
        pareto: placements of which none is both quicker and smaller than another, by closed forms.
        num_points: number of placements that were costed.
        num_too_large: number of these placements that do not fit into memory.
        proven: True if no placement can be better, by the cost model.
        stages: layers of each stage of the pipeline in order (one stage without a pipeline), and
            the layers that are computed again. Empty for stages of even lengths, which compute all
            layers again if recompute is 1.
        runners_up: the second and third best placements by the cost model.
    """

    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    choice: Choice
    seconds: float
    memory: float
    pareto: tuple[Found, ...] = ()
    num_points: int = 0
    num_too_large: int = 0
    proven: bool = False
    stages: tuple[StageLayers, ...] = ()
    runners_up: tuple[Found, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=("num_points", "num_too_large"), below=2**63)

    @property
    def _cost(self) -> StepCost:
        return StepCost(self.model, self.cluster, self.job)

    def time_terms(self) -> dict[str, float]:
        """Return the seconds of a step on the slowest rank, by purpose; idle time is a term."""
        return _time_terms(self._cost, self)

    def memory_terms(self) -> dict[str, float]:
        """Return the bytes of the fullest rank, by purpose, without the margin."""
        cost = self._cost
        return _fullest(cost, _columns(cost, self))

    @property
    def title(self) -> str:
        """A line with the model, the cluster and the batch of a step."""
        m, job, node = self.model, self.job, self.cluster.levels[0]
        model = next((name for name, spec in PRESETS.items() if spec == m), m.source or "model")
        named = (name for name, spec in CLUSTERS.items() if spec == self.cluster)
        cluster = next(named, self.cluster.source or "the cluster")
        return (
            f"{model}: {m.parameters() / 1e9:.3g}B parameters, {m.num_layers} layers; {cluster}: "
            f"{job.num_ranks} ranks, up to {node.size} a {node.name}; {job.global_batch} sequences "
            f"of {job.seq_len} tokens a step, {job.dtype}"
        )

    @property
    def dropped_share(self) -> float:
        """Share of the choices of experts that exceed the job's capacity and are dropped."""
        experts = self.model.num_experts
        return self.job.dropped_share(experts) if experts else 0.0

    @property
    def host_memory(self) -> float:
        """Bytes on the host of the fullest rank, with the margin; 0 without offload."""
        cost = self._cost
        return float(cost.memory.host(_columns(cost, self)).max())

    @property
    def states(self) -> SharedStates:
        """The way in which recurrent layers share sequences over cp, as scheme "auto" chooses."""
        sizes = self._cost.sizes
        return sizes.states(int(self.choice["cp"] or 1), str(self.choice["scheme"]))

    def why_not(self, **fixed: int | str | None) -> str:
        """Explain in a line why the plan does not have other values.

        Args:
            fixed: values by axis, such as ``pp=1, ep=64``; other axes take their best values.

        Raises:
            ValueError: an axis has no such value, or no mesh has them.
        """
        cost = self._cost
        found = search(cost, fixed=fixed)
        named = ", ".join(f"{name}={value}" for name, value in fixed.items())
        if found.best is None:
            assert found.least is not None
            return f"{named}: {_too_large(cost, found.least)}"
        theirs = _time_terms(cost, found.best)
        own = self.time_terms()
        term = max(theirs, key=lambda name: theirs[name] - own[name])
        if found.best.seconds <= self.seconds:
            return f"{named}: takes no more than the plan, {found.best.seconds:.4g} s"
        return (
            f"{named}: {found.best.seconds:.4g} s a step instead of {self.seconds:.4g}; binding is "
            f"{term}, {theirs[term]:.4g} s instead of {own[term]:.4g}: {_REMEDIES[term]}"
        )

    def commands(
        self, script: str = "examples/train_moe_lm.py", *, plan_file: str = "plan.json"
    ) -> dict[str, str]:
        """Make commands and files that start the job, by launcher.

        "torchrun" is a line to run on each node; with several nodes MASTER_ADDR must name one of
        them. "slurm" is a script for sbatch. "kubernetes" is a PyTorchJob of the Kubeflow training
        operator, which passes torchrun its arguments; fill in IMAGE.

        Args:
            script: script to run on each rank, in shell syntax, optionally with arguments. The
                script reads the file after ``--plan`` by `Plan.from_json`, and puts its model into
                the placement by `Plan.apply`.
            plan_file: file that `to_json` wrote.
        """
        node = min(self.cluster.levels[0].size, self.job.num_ranks)
        nodes = -(-self.job.num_ranks // node)
        meeting = "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500"
        where = f"--nnodes {nodes} {meeting}" if nodes > 1 else "--standalone"
        run = f"torchrun {where} --nproc-per-node {node} {script} --plan {shlex.quote(plan_file)}"
        slurm = (
            "#!/bin/bash",
            "#SBATCH --job-name=moe-ext",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={node}",
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun {run}",
        )
        container = {
            "name": "pytorch",
            "image": "IMAGE",
            "command": ["torchrun", *shlex.split(script), "--plan", plan_file],
            "resources": {"limits": {"nvidia.com/gpu": node}},
        }
        template = {"spec": {"containers": [container]}}
        replicas = {"Master": 1, "Worker": nodes - 1}
        kubernetes = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "moe-ext"},
            "spec": {
                "nprocPerNode": str(node),
                "pytorchReplicaSpecs": {
                    role: {"replicas": count, "template": template}
                    for role, count in replicas.items()
                    if count
                },
            },
        }
        return {
            "torchrun": run,
            "slurm": "\n".join(slurm) + "\n",
            "kubernetes": json.dumps(kubernetes, indent=1),
        }

    def to_json(self, path: str | Path) -> None:
        """Write the plan to a file for `from_json`; an older file is replaced atomically."""
        write_json(path, SCHEMA, asdict(self))

    @classmethod
    def from_json(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            ValueError: the file is no plan of this version, or holds a placement that `search`
                cannot find.
        """
        found = read_json("Plan.from_json", path, SCHEMA)
        try:
            return cls._of(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"Plan.from_json: expected {path} to hold the fields of a plan, got "
                f"{type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _of(cls, found: dict[str, Any]) -> Plan:
        found = _with_tuples(found)
        model = {**found.pop("model")}
        if model.get("recurrent") is not None:
            model["recurrent"] = RecurrentSpec(**model["recurrent"])
        for name in ("pareto", "runners_up"):
            found[name] = tuple(Found(**_read_placement(each)) for each in found[name])
        made = cls(
            ModelSpec(**model),
            ClusterSpec.of(found.pop("cluster")),
            Job(**found.pop("job")),
            **_read_placement(found),
        )
        own = Found(made.choice, made.seconds, made.memory, made.stages)
        for each in (own, *made.runners_up, *made.pareto):
            check_placement(made._cost, each)
        return made

    def apply(self, model: nn.Module) -> Applied:
        """Put a model into the plan's placement; every rank calls this with the same model.

        The experts of a transformers model are divided over ranks and run by moe_ext
        (`moe_ext.replace`). Layers are recomputed as the plan says. ZeRO 2 and 3 use FSDP2; with
        ZeRO 2 weights stay gathered from a forward pass to its backward pass. ZeRO 1 is in the
        optimizers that `Applied.optimizers` makes. Pipeline stages are consecutive layers of the
        decoder, which `Applied.pipeline` runs by the plan's schedule. Dense layers are divided over
        tp by the tensor-parallel plan of transformers, and attention over cp by
        `attention.prepare_model`. Ranks of a tp or cp group take the same batches.

        Args:
            model: a transformers model, before its optimizer is made.

        Returns:
            The model with its mesh. Call its `sync_gradients()` after the backward passes of a
            step.

        Raises:
            ValueError: the sizes of the model differ from the plan's. With cp: `prepare_model`
                refuses the model or, with pp too, its loss takes no ``num_items_in_batch``. With
                pp: the model is not on the CPU, or its decoder has more than layers and a norm, or
                it uses losses of its routers. With tp: zero is 1, or the model has tied weights or
                layers that cannot be divided. Nothing has changed.
        """
        return apply_plan(self, model)

    def time(
        self,
        make_model: Callable[[], nn.Module],
        *,
        group: ProcessGroup | None = None,
        steps: int = 3,
    ) -> float:
        """Measure the seconds of a training step in this placement, on random tokens with AdamW.

        Every rank of the job must call this method.

        Args:
            make_model: makes the same transformers model on every rank, for `apply`.
            group: the ranks of the job; None for one process.
            steps: number of timed steps, after one warm-up step.

        Returns:
            The median over steps, of the slowest rank.

        Raises:
            ValueError: the number of ranks differs from the plan's, or `apply` refuses the model.
        """
        if group_size(group) != self.job.num_ranks:
            raise ValueError(
                f"Plan.time: expected group to have the {self.job.num_ranks} ranks of the plan, "
                f"got {group_size(group)}"
            )
        applied = self.apply(make_model())
        optimizers = applied.optimizers(torch.optim.AdamW, lr=1e-4)
        device, local_steps = next(applied.model.parameters()).device, self.job.local_steps
        step = functools.partial(_step, applied, _batches(applied, device), optimizers)

        def median() -> float:
            times = timed(step, steps, group=group, device=device)
            if group is not None:
                times = max_over_ranks(times, group, device)
            return statistics.median(times)

        if local_steps == 1:
            return median()
        # Steps with rounds are timed first, because rounds need weights that are equal on all
        # ranks, and local steps make them differ.
        with rounds_of(applied, optimizers[0], 1, torch.optim.SGD, lr=1.0):
            with_round = median()
        found = median()
        return found + (with_round - found) / local_steps

    def rerank(
        self,
        make_model: Callable[[], nn.Module],
        *,
        group: ProcessGroup | None = None,
        steps: int = 3,
    ) -> tuple[Plan, tuple[float, ...]]:
        """Run this plan and its runners-up, and return the quickest.

        Every rank of the job must call this method.

        Args:
            make_model: see `time`; called for each plan.
            group: see `time`.
            steps: see `time`.

        Returns:
            The quickest plan, and the measured seconds of a step of this plan and of each
            runner-up; infinite for a plan that `apply` refuses.

        Raises:
            ValueError: no plan can be applied.
        """
        plans, seconds, problem = [self], list[float](), None
        # Runners-up are not proven to be best, because the cost model prefers this plan.
        plans += [
            replace(self, **vars(each), proven=False, runners_up=()) for each in self.runners_up
        ]
        for each in plans:
            try:
                seconds.append(each.time(make_model, group=group, steps=steps))
            except ValueError as error:
                # If `apply` refuses a model, all ranks raise and nothing has changed, so the next
                # plan can be tried.
                seconds.append(math.inf)
                problem = error
        if problem is not None and min(seconds) == math.inf:
            raise problem
        return plans[min(range(len(plans)), key=seconds.__getitem__)], tuple(seconds)

    def __str__(self) -> str:
        # Axes of the mesh are always shown, other axes only if they differ from their default.
        shown = {
            name: value
            for name, value in self.choice.items()
            if name in MESH or value != DEFAULTS[name]
        }
        named = ", ".join(f"{name}={value}" for name, value in shown.items())
        lines = [self.title, f"{self.job.num_ranks} ranks: {named}"]
        lines.append(
            f"{self.seconds:.4g} s a step, {self.memory / 1e9:.1f} GB of "
            f"{self.cluster.memory / 1e9:.0f} on the fullest rank; {self.num_points} placements, "
            f"{self.num_too_large} too large, {'proven' if self.proven else 'not proven'} best"
        )
        if self.dropped_share:
            lines.append(f"{100 * self.dropped_share:.3g} % of the choices go to no expert")
        if scheme := self.states.scheme:
            lines.append(f"recurrent layers share sequences by {scheme!r}")
        if held := self.host_memory:
            lines.append(f"  {held / 1e9:.1f} GB of the fullest rank on its host")
        lines += stage_lines(self.stages)
        lines += [f"  {name:<18}{value:>12.4g} s" for name, value in self.time_terms().items()]
        memory = self.memory_terms().items()
        lines += [f"  {name:<18}{value / 1e9:>12.2f} GB" for name, value in memory]
        return "\n".join(lines)


def _with_tuples(value: Any) -> Any:
    """Replace lists by tuples in a value from JSON."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _read_placement(held: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a placement from a file; axes that older files lack get their defaults."""
    choice = held["choice"]
    missing = sorted(set(DEFAULTS) - set(YOUNGER) - set(choice))
    if missing:
        raise ValueError(f"Plan.from_json: expected choice to have {missing}, got {sorted(choice)}")
    choice = {**DEFAULTS, **choice}
    stages = tuple(StageLayers(**each) for each in held["stages"])
    return {**held, "choice": choice, "stages": stages}


def stage_lines(stages: Sequence[StageLayers]) -> list[str]:
    """Make a line for each run of stages with equal numbers of layers."""
    found = []
    alike = itertools.groupby(
        enumerate(stages), lambda each: (each[1].end - each[1].start, len(each[1].again))
    )
    for (layers, again), run in alike:
        numbers = [s for s, _ in run]
        named = f"stage {numbers[0]}" + f" to {numbers[-1]}" * (len(numbers) > 1)
        more = f", {again} of them computed again" if again else ""
        found.append(f"  {named}: {layers} layers each{more}")
    return found


def _batches(applied: Applied, device: torch.device) -> list[Tensor]:
    """Make random micro-batches, which are equal on the ranks of a tp or cp group."""
    plan, mesh = applied.plan, applied.mesh
    micro = int(plan.choice["micro_batch"] or 1)
    count = plan.job.global_batch // (mesh.data_size * micro)
    generator = torch.Generator().manual_seed(mesh.data_rank)
    size = count * micro, plan.job.seq_len
    tokens = torch.randint(plan.model.vocab_size, size, generator=generator, device="cpu")
    return list(tokens.to(device).split(micro))


def _step(applied: Applied, batches: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
    if applied.pipeline is None:
        for batch in batches:
            loss = applied.model(input_ids=batch, labels=batch).loss
            (loss / len(batches)).backward()
    else:
        stages, last = applied.pipeline.stages, applied.pipeline.table.num_stages - 1
        ends = (batches if end in stages else () for end in (0, last))
        applied.pipeline.step(*ends)
    applied.sync_gradients()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _columns(cost: StepCost, found: Found | Plan) -> Columns:
    """Return columns of a placement, with a candidate per pipeline rank if stages are known."""
    columns = columns_of([found.choice])
    return rank_columns(cost, columns, found.stages) if found.stages else columns


def _fullest(cost: StepCost, columns: Columns) -> dict[str, float]:
    """Return the bytes of the fullest rank, by purpose, without the margin."""
    terms = cost.memory.terms(columns)
    fullest = int(torch.stack(list(terms.values())).sum(0).argmax())
    return {name: float(value[fullest]) for name, value in terms.items()}


def _time_terms(cost: StepCost, found: Found | Plan) -> dict[str, float]:
    columns = {"loss": torch.ones(1), **_columns(cost, found)}
    micro = float(cost.sizes.num_micro_batches(columns)[0])
    each = {
        **cost.passes.terms(columns),
        "output": 3.0 * cost.compute.output(columns) * columns["loss"],
    }
    slowest = int(torch.stack(list(each.values())).sum(0).argmax())
    terms = {name: micro * float(value[slowest]) for name, value in each.items()}
    last = int(cost.end.seconds(columns).argmax())
    ends = {
        "gradient messages": cost.end.gradients,
        "rounds": cost.end.rounds,
        "update": cost.end.update,
        "offload": cost.end.offload,
    }
    terms |= {name: float(part(columns)[last]) for name, part in ends.items()}
    terms["idle pipeline"] = max(0.0, found.seconds - sum(terms.values()))
    return terms


def _too_large(cost: StepCost, found: Found) -> str:
    columns, host = _columns(cost, found), cost.cluster.host
    taken = float(cost.memory.host(columns).max())
    if host is not None and taken / host.memory > found.memory / cost.cluster.memory:
        return (
            f"the smallest takes {taken / 1e9:.1f} GB of {host.memory / 1e9:.1f} on the host: "
            f"{_REMEDIES['host']}"
        )
    terms = _fullest(cost, columns)
    term = max(terms, key=terms.__getitem__)
    even = ", of stages of even lengths," if found.stages else ""
    return (
        f"the smallest{even} takes {found.memory / 1e9:.1f} GB of {cost.cluster.memory / 1e9:.1f}; "
        f"binding is {term}, {terms[term] / 1e9:.1f} GB: {_REMEDIES[term]}"
    )


def plan(
    model: ModelSpec | nn.Module | Mapping[str, Any] | str | Path,
    cluster: ClusterSpec | Mapping[str, Any] | str | Path,
    *,
    num_ranks: int,
    seq_len: int = 4096,
    global_batch: int = 1024,
    dtype: str = "bfloat16",
    load: float | str | Path | Sequence[float] | Sequence[Sequence[float]] = 0.0,
    capacity_factor: float | None = None,
    local_steps: int = 1,
    local_codec: str = "none",
    layer_dtype: str | None = None,
    node_limit: int = 0,
    eager_attention: bool = False,
    hidden_exchanges: bool = False,
    hidden_gradients: bool = False,
    hidden_tensor: bool = False,
    fixed: Mapping[str, int | str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Choose how to place the training of a model on a cluster.

    Args:
        model: see `model_spec`.
        cluster: see `ClusterSpec.of`.
        num_ranks: processors of the job.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        dtype: dtype of products and messages.
        load: tokens of each expert as measured in one step or in each of many; s of Zipf's law; a
            name, "W0" to "W7"; or a file with a JSON list of tokens. Times are those of the busiest
            rank, averaged over steps. Memory is that of the worst step.
        capacity_factor: most rows that an expert takes from a rank's tokens, relative to an even
            load; None takes all rows.
        local_steps: see `Job`; above 1, tp and cp are 1, and there is no ZeRO.
        local_codec: see `Job`.
        layer_dtype: see `Job`. A plan with this or a hidden part is for another program, and
            `Plan.apply` refuses it.
        node_limit: see `Job`.
        eager_attention: see `Job`.
        hidden_exchanges: see `Job`.
        hidden_gradients: see `Job`.
        hidden_tensor: see `Job`.
        fixed: values that axes must have, such as ``{"pp": 1}``. Messages of rows, gradients, and
            keys and values are rounded only if "wire", "gradients" or "kv_wire" is fixed so. With
            ``"recompute": 1`` all layers are computed again, otherwise as few as fit.
        progress: see `search`.

    Raises:
        ValueError: no placement exists, or none fits; the message names the largest term.

    Determinism: equal arguments give equal plans.
    """
    given = locals()
    spec, found_cluster = model_spec(model), ClusterSpec.of(cluster)
    given["load"] = load_of(load, num_experts=spec.num_experts, top_k=spec.top_k)
    job = Job(**{each.name: given[each.name] for each in fields(Job)})
    cost = StepCost(spec, found_cluster, job)
    node = found_cluster.levels[0].size
    if num_ranks > node and num_ranks % node:
        raise ValueError(
            f"plan: expected num_ranks to fill nodes of {node}, the size of cluster.levels[0], got "
            f"{num_ranks}; give a cluster of nodes with as many ranks as the job has on each"
        )
    found = search(cost, fixed=fixed, progress=progress)
    if found.best is None:
        assert found.least is not None
        raise ValueError(
            f"plan: expected a placement on {num_ranks} ranks that fits into memory, got none: "
            f"{_too_large(cost, found.least)}"
        )
    return Plan(
        *(spec, found_cluster, job),
        **vars(found.best),
        pareto=found.pareto,
        num_points=found.num_points,
        num_too_large=found.num_too_large,
        proven=found.proven,
        runners_up=found.runners_up,
    )
