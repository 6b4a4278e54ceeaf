"""Put a transformers model into the placement of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ext._checks import check_rule
from moe_ext.attention import choose_scheme, prepare_model
from moe_ext.attention.huggingface.prepare import BatchCutter
from moe_ext.attention.layouts import make_layout
from moe_ext.attention.recurrent.functional import conv_sent_bytes, sent_bytes
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_size
from moe_ext.compression import Codec, CompressionState, Dense, Policy, compress_gradients
from moe_ext.dispatch.wire import LOSSLESS
from moe_ext.distributed import MoEMesh, fully_shard, sync_gradients
from moe_ext.distributed.dtensor import is_dtensor, local_part
from moe_ext.distributed.gradients import gradient_buckets
from moe_ext.distributed.placement import sharded_parameters
from moe_ext.integrations.huggingface import replace
from moe_ext.integrations.huggingface.stages import Stages, decoder_of
from moe_ext.integrations.huggingface.tensor_parallel import parallelize, tensor_parallel_styles
from moe_ext.nn.experts import slots_of_shards
from moe_ext.optim import CPUAdamW, DiLoCo, SparseLoCo
from moe_ext.pipeline import ActionTable, Pipeline, TurnPlan, make_table
from moe_ext.planner.axes import columns_of
from moe_ext.planner.cost import StepCost
from moe_ext.planner.rounds import round_codec
from moe_ext.planner.search import gradients_problem
from moe_ext.planner.sent_bytes import exchange_bytes, gradient_bytes
from moe_ext.planner.spec import model_spec
from moe_ext.planner.stage_layers import StageLayers, even_stages, turn_plan

if TYPE_CHECKING:
    from moe_ext.planner.plan import Plan

# Fields and methods of `ModelSpec` that must be equal for the plan's model and the given model.
_SIZES = (
    *("num_layers", "model_dim", "num_heads", "ffn_dim", "vocab_size", "num_experts", "top_k"),
    *("num_moe_layers", "has_experts", "heads_dim", "kv_dim", "latent", "expert_parameters"),
    *("shared_ffn_dim", "tied", "mixers", "recurrent", "attention_gate", "one_part"),
    *("positions", "num_window_layers", "window"),
)
# Fields of a job that describe other programs than moe_ext. A plan with them cannot be applied.
_OF_OTHERS = ("layer_dtype", "hidden_exchanges", "hidden_gradients", "hidden_tensor")


@dataclass(frozen=True)
class Applied:
    """A model in the placement of a plan.

    Attributes:
        model: the given model.
        mesh: mesh of the job's ranks.
        plan: the applied plan.
        pipeline: pipeline of a plan with stages; None without. `pipeline.step(inputs, targets)`
            runs forward and backward passes of a step by the loss function of the model. Both
            arguments are token ids `[micro_batch, seq_len]` of each micro-batch of the rank's data;
            targets are the labels. The model then holds only this rank's layers, under their names
            in the whole model.
        compression: state of a plan with a codec of gradients; None without. If the codec rounds,
            save it with the model (see `CompressionState.state_dict`).
    """

    model: nn.Module
    mesh: MoEMesh
    plan: Plan
    pipeline: Pipeline | None = None
    compression: CompressionState | None = None

    def sent_bytes(self, routing: Sequence[Sequence[Tensor]]) -> dict[str, int]:
        """Compute the bytes that this rank sends in a step, as `count_traffic` counts them.

        They include rows to experts and back, averaged gradients, activations between pipeline
        stages, messages of attention and recurrences over cp, and the gradients of all of these.
        Messages of FSDP2 and of DTensors are not counted. With local steps gradients are not
        averaged, and a round ends with `round_bytes` more.

        Args:
            routing: the experts `[T, K]` that the tokens of every rank of the expert-parallel group
                choose; for each layer with experts of each micro-batch on this rank, in the order
                of the table's forward passes.

        Returns:
            Bytes of "rows", "gradients", "pipeline" and "attention".

        Raises:
            ValueError: the plan's dispatcher is "hierarchical", whose bytes per hop are not
                predicted; or its wire or codec of gradients is "lossless", for which the length of
                messages depends on the data; or it has cp and the model has windows or latent
                attention.
        """
        choice = self.plan.choice
        ep, etp = int(choice["ep"] or 1), int(choice["etp"] or 1)
        balance, capacity = choice["balance"], self.plan.job.capacity_factor
        rule = "'none', since experts move where that takes less by measured rates"
        check_rule("Applied.sent_bytes", "balance", balance, rule, balance == "none")
        check_rule("Applied.sent_bytes", "capacity_factor", capacity, "None", capacity is None)
        for axis in ("wire", "gradients"):
            if choice.get(axis) == LOSSLESS:
                raise ValueError(
                    f"Applied.sent_bytes: expected a plan whose {axis} has messages of known "
                    f"lengths, got {LOSSLESS!r}: how long they are depends on the numbers in them"
                )
        experts, group = self.plan.model.num_experts, self.mesh.ep_group
        options: dict[str, Any] = {
            "num_experts": experts * etp,
            "model_dim": self.plan.model.model_dim,
            "dispatcher": choice["dispatcher"],
            "wire": choice["wire"],
            "combine": choice["combine"],
            "dtype": getattr(torch, self.plan.job.dtype),
            "weighed": False,
        }
        # Number of this rank among those that experts lie over; shards of an expert are neighbours.
        here = self.mesh.ep_rank * etp + self.mesh.etp_rank
        rows, again = 0, _again(self.plan)
        layers = itertools.cycle(i for i in self._layers() if self.plan.model.has_experts[i])
        for chosen, layer in zip(routing, layers, strict=False) if ep * etp > 1 else ():
            each = [slots_of_shards(idx, idx, experts, group)[0] for idx in chosen]
            rows += exchange_bytes(each, here, **options) * (2 if layer in again else 1)
            rows += exchange_bytes(each, here, backward=True, **options)
        return {
            "rows": rows,
            "gradients": self._gradient_bytes() if self._averages else 0,
            "pipeline": self._pipeline_bytes(),
            "attention": self._attention_bytes(),
        }

    def round_bytes(self) -> int:
        """Compute the bytes that this rank sends at the end of a round; 0 without local steps."""
        job, mesh = self.plan.job, self.mesh
        if job.local_steps == 1:
            return 0
        codec, total = round_codec(job.local_codec).codec, 0
        whole = (self._dense(), group_size(mesh.stage_group)), (self._sharded(), mesh.edp_size)
        for held, ranks in whole:
            numel = sum(local_part(p).numel() for p in held if p.requires_grad)
            total += codec.sent_bytes(numel, ranks) if numel and ranks > 1 else 0
        return total

    def local_steps(
        self, inner: Optimizer, cls: type[Optimizer] = torch.optim.SGD, **options: Any
    ) -> DiLoCo:
        """Make the `DiLoCo` or `SparseLoCo` of a job with local steps, for a `with` statement.

        ::

            (inner,) = applied.optimizers(torch.optim.AdamW, lr=4e-4)
            with applied.local_steps(inner, lr=0.7, momentum=0.9, nesterov=True):
                ...  # steps of training; each `Job.local_steps`-th one ends a round

        Each rank of a stage is a worker. Dense parameters are averaged over all workers. Experts
        are averaged over the ranks that hold the same experts, or not at all if only one does.

        Args:
            inner: the model's optimizer, as `optimizers` makes it.
            cls: class of the outer optimizer.
            options: options of the outer optimizer.

        Raises:
            ValueError: the job has no local steps.
        """
        steps = self.plan.job.local_steps
        if steps == 1:
            raise ValueError(
                "Applied.local_steps: expected a plan made with local_steps above 1, got 1"
            )
        return rounds_of(self, inner, steps, cls, **options)

    def optimizers(self, cls: type[Optimizer], **options: Any) -> list[Optimizer]:
        """Make the optimizers of the model, to be stepped one after another.

        With ZeRO 1 the first is a `ZeroRedundancyOptimizer` for dense parameters, which keeps the
        state of each parameter on one rank. Experts keep their state on their own ranks. If the
        plan offloads the optimizer to the host, the class is `moe_ext.optim.CPUAdamW`. A rank whose
        parameters are all frozen gets an empty list.

        Args:
            cls: class of the optimizer, such as ``torch.optim.AdamW``.
            options: options of the optimizer; `CPUAdamW` ignores "foreach" and "fused".

        Raises:
            ValueError: the plan has the optimizer on the host, and the class is not AdamW.
        """
        if self.plan.choice.get("offload") == "host":
            if cls not in (torch.optim.AdamW, CPUAdamW):
                raise ValueError(
                    "Applied.optimizers: expected cls to be torch.optim.AdamW for offload='host', "
                    f"got {cls.__name__}"
                )
            cls = CPUAdamW
            options = {name: o for name, o in options.items() if name not in ("foreach", "fused")}
        group = self.mesh.stage_group
        if self.plan.choice["zero"] != 1 or group is None or group.size() == 1:
            kinds: dict[object, list[nn.Parameter]] = {}
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    mesh = parameter.device_mesh if is_dtensor(parameter) else None
                    kinds.setdefault(mesh, []).append(parameter)
            # Optimizers with `foreach` refuse a group with DTensors of several meshes, or with
            # DTensors and plain tensors.
            return [cls([{"params": p} for p in kinds.values()], **options)] if kinds else []
        from torch.distributed.optim import ZeroRedundancyOptimizer

        dense, experts = (
            [p for p in held if p.requires_grad] for held in (self._dense(), self._sharded())
        )
        found = list[Optimizer]()
        if dense:
            found.append(ZeroRedundancyOptimizer(dense, cls, process_group=group, **options))
        return [*found, cls(experts, **options)] if experts else found

    @property
    def _averages(self) -> bool:
        """True if `sync_gradients` averages gradients at the end of a step."""
        return not _is_fsdp(self.plan) and self.plan.job.local_steps == 1

    def _layers(self) -> list[int]:
        """Return this rank's layers in the order of forward passes.

        With a pipeline these are the forward passes of a step, otherwise of one micro-batch.
        """
        stages = _plan_stages(self.plan)
        if self.pipeline is None:
            return list(range(self.plan.model.num_layers))
        row = self.pipeline.table.rows[self.pipeline.rank]
        passed = [stages[action.stage] for action in row if action.kind == "F"]
        return [i for stage in passed for i in range(stage.start, stage.end)]

    def _sharded(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in sharded_parameters(self.model).values()]

    def _dense(self) -> list[nn.Parameter]:
        experts = {id(parameter) for parameter in self._sharded()}
        return [p for p in self.model.parameters() if id(p) not in experts]

    def _gradient_bytes(self) -> int:
        dense, stage = self._dense(), group_size(self.mesh.stage_group)
        shards = [p for p in dense if is_dtensor(p)]
        whole = [p for p in dense if not is_dtensor(p)]
        alike = (whole, stage), (shards, stage // self.mesh.tp_size)
        total = 0
        for held, copies in (*alike, (self._sharded(), self.mesh.edp_size)):
            trained = [p for p in held if p.requires_grad]
            if self.compression is not None:
                total += _compressed_bytes(trained, self.compression, copies)
                continue
            own = [nn.Parameter(local_part(p.detach())) for p in trained]
            buckets = gradient_buckets(own)
            total += gradient_bytes([sum(p.nbytes for p in each) for each in buckets], copies)
        return total

    def _attention_bytes(self) -> int:
        choice, job, sizes = self.plan.choice, self.plan.job, self.plan.model
        if choice["cp"] == 1:
            return 0
        rule = "1 for a model with windows or latent attention"
        is_known = not (sizes.window or sizes.latent)
        check_rule("Applied.sent_bytes", "cp", choice["cp"], rule, is_known)
        heads, micro, tp = sizes.num_heads, int(choice["micro_batch"] or 1), self.mesh.tp_size
        of_attention = (0, 0)
        if sizes.all_parts.attention:
            found = choose_scheme(
                batch=micro,
                heads=heads // tp,
                kv_heads=(sizes.num_kv_heads or heads) // tp,
                dim=sizes.head_dim or sizes.model_dim // heads,
                seq_len=job.seq_len,
                num_ranks=self.mesh.cp_size,
                dtype=getattr(torch, job.dtype),
                is_causal=True,
                wire=choice.get("kv_wire"),  # type: ignore[arg-type]
            )
            # Candidates have the largest number of bytes of any rank. Every rank sends that many,
            # because shards have equal lengths and keys go all the way round the ring.
            scheme = next(each for each in found.candidates if each.scheme == choice["scheme"])
            of_attention = scheme.forward_bytes, scheme.backward_bytes
        of_states = [self._state_bytes(micro, backward=each) for each in (False, True)]
        again, passes = _again(self.plan), 0
        for i in self._layers():
            part = sizes.parts[i]
            forward, backward = (
                part.attention * a + part.recurrent * r
                for a, r in zip(of_attention, of_states, strict=True)
            )
            passes += forward * (1 + (i in again)) + backward
        steps = job.global_batch // (self.mesh.data_size * micro)
        # With a pipeline, `_layers` lists the layers of all micro-batches of the step already.
        return passes * (1 if self.pipeline is not None else steps)

    def _state_bytes(self, batch: int, *, backward: bool) -> int:
        """Compute the bytes that this rank sends in a pass of a layer with a recurrence."""
        r, job, mesh = self.plan.model.recurrent, self.plan.job, self.mesh
        if r is None:
            return 0
        sizes = StepCost(self.plan.model, self.plan.cluster, job).sizes
        scheme = str(self.plan.choice["scheme"])
        layout = make_layout(sizes.layout(scheme), job.seq_len, mesh.cp_size)
        rank, found = mesh.cp_rank, 0
        how: dict[str, Any] = {"batch": batch, "backward": backward}
        if r.taps:
            size = getattr(torch, job.dtype).itemsize
            conv = {"channels": r.channels, "taps": r.taps, "itemsize": size}
            found += conv_sent_bytes(layout, rank, **conv, **how)
        if r.num_heads:
            taken = sizes.states(mesh.cp_size, scheme).scheme
            found += sent_bytes(taken, layout, rank, **r.sent_sizes, **how)
        return found

    def _pipeline_bytes(self) -> int:
        if self.pipeline is None:
            return 0
        job, sizes = self.plan.job, self.plan.model
        tokens = int(self.plan.choice["micro_batch"] or 1) * job.seq_len // self.mesh.cp_size
        table = self.pipeline.table
        sends = sum(table.send(a) is not None for a in table.actions(self.pipeline.rank))
        return sends * tokens * sizes.model_dim * job.itemsize + self.pipeline.tied_bytes

    def sync_gradients(self) -> None:
        """Average gradients after the last backward pass of a step.

        FSDP2 has averaged them already, and with local steps each rank keeps its own: nothing
        happens then. A codec of gradients is used as by `compress_gradients`: for matrices, but not
        for routers, norms, biases and parameters of fewer than 1024 elements.

        Raises:
            ValueError: on every rank, with a codec of gradients: a gradient is NaN or infinite.
        """
        if self.compression is not None:
            compress_gradients(self.model, self.compression)
        elif self._averages:
            sync_gradients(self.model, mesh=self.mesh)


def rounds_of(
    applied: Applied, inner: Optimizer, steps: int, cls: type[Optimizer], **options: Any
) -> DiLoCo:
    """Make the optimizer of `Applied.local_steps`, with `steps` inner steps in a round."""
    mesh, codec = applied.mesh, applied.plan.job.local_codec
    outer = cls([p for p in applied.model.parameters() if p.requires_grad], **options)
    if codec == "sparseloco":
        return SparseLoCo(mesh.stage_group, [applied.model], inner, outer, steps)
    return DiLoCo(mesh.stage_group, [applied.model], inner, outer, steps, codec=codec)


def plan_problem(plan: Plan) -> str | None:
    """Return the reason why a plan cannot be applied to any model, as text; None if it can."""
    for name in _OF_OTHERS:
        if value := getattr(plan.job, name):
            return f"expected a plan without {name}, which moe_ext does not build, got {value!r}"
    choice = plan.choice
    if choice["tp"] != 1 and choice["zero"] == 1:
        return (
            f"expected zero to be 0, 2 or 3 for tp={choice['tp']}, got 1: ZeroRedundancyOptimizer "
            "shares no shards"
        )
    return gradients_problem(choice)


def apply_plan(plan: Plan, model: nn.Module) -> Applied:
    """See `Plan.apply`."""
    problem = plan_problem(plan)
    if problem is not None:
        raise ValueError(f"Plan.apply: {problem}")
    _check_model(plan, model)
    choice = plan.choice
    pp, tp, cp, ep, etp = (int(choice[name] or 1) for name in ("pp", "tp", "cp", "ep", "etp"))
    styles = tensor_parallel_styles(model, tp) if tp > 1 else {}
    table = _table(plan) if pp > 1 else None
    stages = None if table is None else _stages(model, plan)
    again = _again(plan)
    some = 0 < len(again) < plan.model.num_layers
    layers: Sequence[Any] = ()
    if _is_fsdp(plan) or some:
        layers = decoder_of(model).layers
    if some and not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise ValueError(
            f"Plan.apply: expected layers of the model to have gradient_checkpointing, to compute "
            f"{len(again)} of {len(layers)} again, got {type(layers[0]).__name__}; plan it with "
            "fixed={'recompute': 1} or 0"
        )
    edp = plan.job.num_ranks // (pp * ep * etp)
    mesh = MoEMesh(ep=ep, dp=edp, cp=cp, tp=tp, pp=pp, etp=etp)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    sequences = None
    if cp > 1:
        scheme = str(choice["scheme"])
        layout = StepCost(plan.model, plan.cluster, plan.job).sizes.layout(scheme)
        how: dict[str, Any] = {"layout": layout, "scheme": scheme, "wire": choice.get("kv_wire")}
        prepare_model(model, group=mesh.cp_group, **how)
    try:
        if cp > 1 and pp > 1:
            sequences = BatchCutter(model, "Plan.apply")
        if plan.model.num_experts:
            replace(
                model,
                ep_group=mesh.ep_group if ep * etp > 1 else None,
                dispatcher=str(choice["dispatcher"]),
                combine=str(choice["combine"]),
                wire=choice["wire"],  # type: ignore[arg-type]
                rebalance="exact" if choice["balance"] == "exact" else None,
                capacity_factor=plan.job.capacity_factor,
            )
    except BaseException:
        if cp > 1:
            model.set_attn_implementation(attention)  # type: ignore[operator]
        raise
    if tp > 1:
        assert mesh.data_mesh is not None
        parallelize(model, styles, mesh.data_mesh["tp"])
    # Schedules with separate passes for gradients of weights let the pipeline recompute. A layer
    # with activation checkpointing would be recomputed once more in each of these passes.
    splits = table is not None and any(a.kind == "W" for a in table.actions(0))
    if again and not splits:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        for i in range(len(layers)) if some else ():
            layers[i].gradient_checkpointing = i in again
    if _is_fsdp(plan):
        for layer in layers:
            fully_shard(layer, mesh, reshard_after_forward=choice["zero"] == 3)
        fully_shard(model, mesh)
    pipeline = None
    if table is not None:
        assert stages is not None
        in_turn = _turns(plan, mesh) if choice.get("turns") else None
        pipeline = _pipeline(
            in_turn or table, stages, mesh, sequences, recompute=bool(again) and splits
        )
    codec, state = choice.get("gradients", "none"), None
    if codec != "none":
        # By default only touched rows of embeddings are sent. With None all rows are sent, which
        # are the same number of bytes in each step, as the plan assumes.
        policy = Policy(str(codec), embedding=None)
        state = CompressionState(group=mesh.stage_group, model=model, policy=policy)
    return Applied(model, mesh, plan, pipeline, state)


def _compressed_bytes(parameters: Iterable[Any], state: CompressionState, num_ranks: int) -> int:
    """Compute the bytes that a rank sends to average gradients by the codecs of a state."""
    names, total = {id(p): name for name, p in state.parameters.by_name.items()}, 0
    for bucket in gradient_buckets(list(parameters)):
        by_codec: dict[Codec, list[nn.Parameter]] = {}
        for p in bucket:
            codec = state.parameters.codec(state.options.policy, names[id(p)])
            # float64 gradients are never rounded, but sent dense.
            if codec is None or p.dtype == torch.float64:
                codec = Dense()
            by_codec.setdefault(codec, []).append(p)
        for codec, held in by_codec.items():
            if codec == Dense():
                total += gradient_bytes([sum(local_part(p).nbytes for p in held)], num_ranks)
            else:
                total += codec.sent_bytes(sum(local_part(p).numel() for p in held), num_ranks)
    return total


def _check_model(plan: Plan, model: nn.Module) -> None:
    """Raise ValueError for a model whose sizes differ from those of the plan."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise ValueError(
            f"Plan.apply: expected model to be a transformers model, got {type(model).__name__}"
        )
    found = model_spec(model)
    dense = ("dense_layer_ffn",) if plan.model.num_moe_layers < plan.model.num_layers else ()
    for name in (*_SIZES, *dense):
        wanted, size = (getattr(each, name) for each in (plan.model, found))
        if callable(wanted):
            wanted, size = wanted(), size()
        if size != wanted:
            raise ValueError(
                f"Plan.apply: expected model to have {name}={wanted}, for which the plan was made, "
                f"got {size}"
            )


def _table(plan: Plan) -> ActionTable:
    choice, job = plan.choice, plan.job
    pp, size = int(choice["pp"] or 1), int(choice["micro_batch"] or 1)
    stage = pp * int(choice["tp"] or 1) * int(choice["cp"] or 1)
    per_rank = job.global_batch * stage // job.num_ranks
    return make_table(str(choice["schedule"]), pp, per_rank // size)


def _plan_stages(plan: Plan) -> tuple[StageLayers, ...]:
    """Return the layers of each stage of the plan."""
    if plan.stages:
        return plan.stages
    return even_stages(plan.model.num_layers, columns_of([plan.choice]))


def _turns(plan: Plan, mesh: MoEMesh) -> TurnPlan:
    """Return the order of passes and exchanges of the plan's costs, compared over all ranks."""
    cost = StepCost(plan.model, plan.cluster, plan.job)
    found = turn_plan(cost, columns_of([plan.choice]), _plan_stages(plan))
    facts = {"turns": "; ".join(map(str, found.starts))}
    Agreement("Plan.apply", mesh.stage_group).compare(facts)
    return found


def _again(plan: Plan) -> set[int]:
    """Return the layers that are recomputed in the backward pass."""
    return {i for stage in _plan_stages(plan) for i in stage.again}


def _stages(model: nn.Module, plan: Plan) -> Stages:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(
                f"Plan.apply: expected a model to be on the CPU for pp={plan.choice['pp']}, since "
                f"moe_ext.pipeline runs there, got {name} on {parameter.device}"
            )
    spans = [(stage.start, stage.end) for stage in _plan_stages(plan)]
    return Stages(model, spans)


def _pipeline(
    plan: ActionTable | TurnPlan,
    stages: Stages,
    mesh: MoEMesh,
    sequences: BatchCutter | None,
    *,
    recompute: bool,
) -> Pipeline:
    table = plan.table if isinstance(plan, TurnPlan) else plan
    own = [stage for (_, stage), rank in table.rank_of.items() if rank == mesh.pp_rank]
    held = {number: stages.stage(number, sequences) for number in sorted(own)}
    model = stages.model
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    names = [(0, stages.embedding), (stages.num_stages - 1, stages.output)]
    tied = [[(stage, f"model.{path}.weight") for stage, path in names]]
    loss, size = model.loss_function, model.config.get_text_config().vocab_size

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        parts = {"labels": labels} if sequences is None else sequences.labels(labels)
        return loss(logits=logits, vocab_size=size, **parts)

    made = Pipeline(
        *(plan, held, loss_fn),
        group=mesh.pp_group,
        recompute=recompute,
        tied=tied if ends[0] is ends[1] else (),
    )
    stages.keep(own)
    return made


def _is_fsdp(plan: Plan) -> bool:
    return plan.choice["zero"] in (2, 3)
