"""Plans: a placement with its costs, reasons, files, commands, and a model put into it."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moe_ext._files import replacing
from moe_ext.planner.apply import Applied, apply_plan
from moe_ext.planner.axes import DEFAULTS, MESH, YOUNGER, Choice, columns_of
from moe_ext.planner.cluster import CLUSTERS, ClusterSpec
from moe_ext.planner.cost import StepCost
from moe_ext.planner.expert_load import load_of
from moe_ext.planner.job import Job
from moe_ext.planner.presets import PRESETS, ModelSpec, RecurrentSpec
from moe_ext.planner.rerank import rerank, time_plan
from moe_ext.planner.search import Found, search
from moe_ext.planner.sizes import SharedStates
from moe_ext.planner.spec import model_spec
from moe_ext.planner.stage_layers import StageLayers, rank_columns

SCHEMA = 1
# To do about the term that binds.
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
        model: sizes.
        cluster: processors and links.
        job: a step.
        choice: value of each axis: pp, tp, cp, ep, etp, micro_batch, schedule, turns, zero,
            recompute, offload, dispatcher, wire, combine, balance, scheme, gradients and kv_wire.
            With recompute as many layers are computed again as `stages` names.
        seconds: of a step.
        memory: bytes of the fullest rank, with the margin.
        pareto: placements of which none is both quicker and smaller, by closed forms.
        num_points: placements that were costed.
        num_too_large: of these, those that do not fit into memory.
        proven: no placement can be better by the cost model.
        stages: layers of each stage of the pipeline, in turn (one without a pipeline), and those
            of them that are computed again; empty for stages of even lengths, all of whose layers
            are where recompute is 1.
        runners_up: the two placements that the cost model has next behind it.
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

    def time_terms(self) -> dict[str, float]:
        """Seconds of the step on the slowest rank by what they are for; the rest it is idle."""
        cost = StepCost(self.model, self.cluster, self.job)
        return _time_terms(cost, Found(self.choice, self.seconds, self.memory, self.stages))

    def memory_terms(self) -> dict[str, float]:
        """Bytes of the fullest rank by what they are for, without the margin."""
        cost = StepCost(self.model, self.cluster, self.job)
        columns = columns_of([self.choice])
        if self.stages:
            columns = rank_columns(cost, columns, self.stages)
        terms = cost.memory.terms(columns)
        fullest = int(torch.stack(list(terms.values())).sum(0).argmax())
        return {name: float(value[fullest]) for name, value in terms.items()}

    @property
    def title(self) -> str:
        """The model, the cluster and the batch of a step, in a line."""
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
        """Share of the choices of experts that the job's capacity lets go to no expert."""
        experts = self.model.num_experts
        return self.job.dropped_share(experts) if experts else 0.0

    @property
    def host_memory(self) -> float:
        """Bytes on the host of the fullest rank, with the margin; 0 without offload."""
        cost = StepCost(self.model, self.cluster, self.job)
        columns = columns_of([self.choice])
        if self.stages:
            columns = rank_columns(cost, columns, self.stages)
        return float(cost.memory.host(columns).max())

    @property
    def states(self) -> SharedStates:
        """The way in which recurrent layers share sequences over cp, by their scheme "auto"."""
        sizes = StepCost(self.model, self.cluster, self.job).sizes
        return sizes.states(int(self.choice["cp"] or 1), str(self.choice["scheme"]))

    def why_not(self, **fixed: int | str | None) -> str:
        """The reason why the plan does not have other values, in a line.

        Args:
            fixed: values by axis, such as ``pp=1, ep=64``; the others are the best beside them.

        Raises:
            ValueError: an axis has no such value, or no mesh has them.
        """
        cost = StepCost(self.model, self.cluster, self.job)
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
        """Commands and files that start the job, by launcher.

        "torchrun" is a line for each node, where MASTER_ADDR names one of them if there are
        several; "slurm" a script for sbatch; "kubernetes" a PyTorchJob of the Kubeflow training
        operator, which gives torchrun its arguments, with IMAGE to be filled in.

        Args:
            script: to run on each rank; it reads the file after ``--plan`` by `Plan.from_json`, and
                puts its model into the placement by `Plan.apply`.
            plan_file: that `to_json` wrote.
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
            "command": ["torchrun", script, "--plan", plan_file],
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
        """Write the plan to a file that `from_json` reads, which is replaced in one step."""
        with replacing(path) as file:
            file.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            ValueError: the file is none of this version.
        """
        try:
            found = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"Plan.from_json: expected {path} to hold JSON: {error}") from None
        schema = found.pop("schema", None) if isinstance(found, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"Plan.from_json: expected schema to be {SCHEMA}, got {schema!r}")
        try:
            return cls._of(found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Plan.from_json: expected {path} to hold the fields of a plan, got "
                f"{type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _of(cls, found: dict[str, Any]) -> Plan:
        model, job = {**found.pop("model")}, {**found.pop("job")}
        if isinstance(job["load"], list):
            steps = job["load"]
            job["load"] = tuple(tuple(s) if isinstance(s, list) else s for s in steps)
        model |= {name: tuple(model[name]) for name in ("latent", "moe_layers")}
        model["mixers"] = tuple(model.get("mixers", ()))
        if model.get("recurrent") is not None:
            model["recurrent"] = RecurrentSpec(**model["recurrent"])
        choice, stages = _read_choice(found.pop("choice")), _read_stages(found.pop("stages"))
        pareto, runners_up = (
            tuple(
                Found(
                    **{
                        **each,
                        "choice": _read_choice(each["choice"]),
                        "stages": _read_stages(each["stages"]),
                    }
                )
                for each in found.pop(name)
            )
            for name in ("pareto", "runners_up")
        )
        return cls(
            ModelSpec(**model),
            ClusterSpec.of(found.pop("cluster")),
            Job(**job),
            choice=choice,
            stages=stages,
            pareto=pareto,
            runners_up=runners_up,
            **found,
        )

    def apply(self, model: nn.Module) -> Applied:
        """Put a model into the plan's placement; every rank calls it with the same model.

        The experts of a transformers model are spread over the ranks and run by moe_ext
        (`moe_ext.replace`), layers are computed again where the plan says so. ZeRO 2 and 3 are
        FSDP2, 2 with weights that stay gathered from a forward pass to its backward pass. ZeRO 1 is
        in the optimizers that `Applied.optimizers` makes. Pipeline stages are consecutive layers of
        the decoder, which `Applied.pipeline` runs by the plan's schedule. Dense layers are divided
        over tp by the family's plan in transformers, and attention over cp by
        `attention.prepare_model`; ranks of a tp or cp group take the same batches.

        Args:
            model: a transformers model, before its optimizer is made.

        Returns:
            The model with its mesh; `sync_gradients()` ends the backward passes of a step.

        Raises:
            ValueError: the model has other sizes than the plan's; the plan has cp of a model that
                `prepare_model` refuses, or, with pp, whose loss takes no ``num_items_in_batch``; or
                stages of a model that is not on the CPU, whose decoder is more than layers and a
                norm, or that wants losses of its routers; or tp with zero 1; or tp of a model with
                tied weights or layers that it cannot divide. Nothing is changed.
        """
        return apply_plan(self, model)

    def time(
        self,
        make_model: Callable[[], nn.Module],
        *,
        group: ProcessGroup | None = None,
        steps: int = 3,
    ) -> float:
        """Seconds of a step of training in this placement, measured: random tokens, with AdamW.

        Every rank of the job calls it.

        Args:
            make_model: gives every rank the same transformers model, to which the plan is applied.
            group: the ranks of the job; None for one process.
            steps: that are timed, behind one that is not.

        Returns:
            The median over the steps, of the slowest rank.

        Raises:
            ValueError: the group has not as many ranks as the plan, or `apply` refuses the model.
        """
        return time_plan(self, make_model, group=group, steps=steps)

    def rerank(
        self,
        make_model: Callable[[], nn.Module],
        *,
        group: ProcessGroup | None = None,
        steps: int = 3,
    ) -> tuple[Plan, tuple[float, ...]]:
        """Run this plan and its runners-up, and take the one that is the quickest.

        Every rank of the job calls it.

        Args:
            make_model: see `time`; called for each plan.
            group: see `time`.
            steps: see `time`.

        Returns:
            The plan, and measured seconds of a step of this one and of each runner-up; infinite for
            one that `apply` refuses.

        Raises:
            ValueError: no plan can be applied.
        """
        return rerank(self, make_model, group=group, steps=steps)

    def __str__(self) -> str:
        # Axes beside the mesh only where they do something.
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


def _read_choice(choice: Mapping[str, int | str | None]) -> Choice:
    """The choice of a file; axes that are younger than the first plans have their default."""
    missing = sorted(set(DEFAULTS) - set(YOUNGER) - set(choice))
    if missing:
        raise ValueError(f"Plan.from_json: expected choice to have {missing}, got {sorted(choice)}")
    found = {**DEFAULTS, **choice}
    # Raises for values that axes have not.
    columns_of([found])
    return found


def _read_stages(stages: Sequence[Mapping[str, Any]]) -> tuple[StageLayers, ...]:
    return tuple(StageLayers(**{**each, "again": tuple(each["again"])}) for each in stages)


def stage_lines(stages: Sequence[StageLayers]) -> list[str]:
    """A line for each run of stages that have as many layers."""
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


def _time_terms(cost: StepCost, found: Found) -> dict[str, float]:
    columns = columns_of([found.choice])
    if found.stages:
        columns = rank_columns(cost, columns, found.stages)
    else:
        columns["loss"] = torch.ones(1)
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
    }
    ends["offload"] = cost.end.offload
    terms |= {name: float(part(columns)[last]) for name, part in ends.items()}
    terms["idle pipeline"] = max(0.0, found.seconds - sum(terms.values()))
    return terms


def _too_large(cost: StepCost, found: Found) -> str:
    columns, host = columns_of([found.choice]), cost.cluster.host
    taken = float(cost.memory.host(columns))
    if host is not None and taken / host.memory > found.memory / cost.cluster.memory:
        return (
            f"the smallest takes {taken / 1e9:.1f} GB of {host.memory / 1e9:.1f} on the host: "
            f"{_REMEDIES['host']}"
        )
    terms = cost.memory.terms(columns)
    term = max(terms, key=lambda name: float(terms[name]))
    return (
        f"the smallest takes {found.memory / 1e9:.1f} GB of {cost.cluster.memory / 1e9:.1f}; "
        f"binding is {term}, {float(terms[term]) / 1e9:.1f} GB: {_REMEDIES[term]}"
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
        dtype: of products and messages.
        load: tokens of each expert as measured in one step or in each of many; s of Zipf's law; a
            name, "W0" to "W7"; or a file with a JSON list of tokens. Times are those of the busiest
            rank of each step, on average; memory is that of the worst step.
        capacity_factor: rows that an expert takes of a rank's tokens, over those of an even load;
            None takes all.
        local_steps: see `Job`; with more than 1 tp and cp are 1, and there is no ZeRO.
        local_codec: see `Job`.
        layer_dtype: see `Job`; with this and the next ones the plan is one for another program,
            which `Plan.apply` refuses.
        node_limit: see `Job`.
        eager_attention: see `Job`.
        hidden_exchanges: see `Job`.
        hidden_gradients: see `Job`.
        hidden_tensor: see `Job`.
        fixed: values that axes must have, such as ``{"pp": 1}``. Rows, gradients, and keys and
            values of a ring are rounded on their way only where "wire", "gradients" and "kv_wire"
            are among them. With ``"recompute": 1`` all layers are computed again, without it as few
            as fit.
        progress: see `search`.

    Raises:
        ValueError: no placement exists, or none fits; the message names the binding term.

    Determinism: equal arguments give equal plans.
    """
    spec, found_cluster = model_spec(model), ClusterSpec.of(cluster)
    held = load_of(load, num_experts=spec.num_experts, top_k=spec.top_k)
    job = Job(
        *(num_ranks, seq_len, global_batch, dtype, held, capacity_factor),
        eager_attention=eager_attention,
        hidden_exchanges=hidden_exchanges,
        hidden_gradients=hidden_gradients,
        hidden_tensor=hidden_tensor,
        node_limit=node_limit,
        layer_dtype=layer_dtype,
        local_steps=local_steps,
        local_codec=local_codec,
    )
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
        found.best.choice,
        found.best.seconds,
        found.best.memory,
        found.pareto,
        found.num_points,
        found.num_too_large,
        found.proven,
        found.best.stages,
        found.runners_up,
    )
