"""The axes of a job: who holds which part of the model, and how a batch runs through the parts.

Shape suffixes: B sequences, S bytes in a sequence, D model, L MoE layers, E experts, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import moe_ext
from moe_ext import attention
from moe_ext.distributed import MoEMesh

from .model import DenseFFN, ModelConfig, MoELanguageModel
from .runtime import Runtime, UserError, choose_expert_parallel_size

# Name to torch's class, and how many stages a rank has.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
    "dual-pipe-v": ("ScheduleDualPipeV", 2),
}
# The second stage of a rank lies as far from the end as the first one from the beginning.
V_SHAPED = ("zbv", "dual-pipe-v")


def check_axes(args: argparse.Namespace, config: ModelConfig, world_size: int) -> None:
    """Refuse what does not go together, before anything is read or written."""
    rules = [
        (
            args.zero and args.tp > 1,
            "--zero to be 0 with --tp, whose layers are divided already",
            args.zero,
        ),
        (
            args.zero > 1 and args.pp > 1,
            "--zero to be at most 1 with --pp: 2 and 3 gather weights for every micro-batch",
            args.zero,
        ),
        (args.zero > 1 and args.etp > 1, "--zero to be at most 1 with --etp", args.zero),
        (args.compress and args.etp > 1, "--compress to be left out with --etp", args.compress),
        (args.schedule and args.pp == 1, "--schedule to be left out without --pp", args.schedule),
        (
            config.seq_len % (2 * args.cp) and args.cp > 1,
            f"--seq-len to be a multiple of twice --cp {args.cp} (zigzag)",
            config.seq_len,
        ),
        (
            config.num_heads % args.tp,
            f"--num-heads to be a multiple of --tp {args.tp}",
            config.num_heads,
        ),
        (
            config.moe_every > 1 and config.ffn_dim * config.top_k % args.tp,
            f"--ffn-dim times --top-k to be a multiple of --tp {args.tp}",
            config.ffn_dim * config.top_k,
        ),
        (
            config.ffn_dim % args.etp,
            f"--ffn-dim to be a multiple of --etp {args.etp}",
            config.ffn_dim,
        ),
        (
            args.pp > 1 and num_stages(args) > config.num_layers,
            f"--num-layers to be at least the number of stages {num_stages(args)}",
            config.num_layers,
        ),
        (
            world_size % (args.pp * args.cp * args.tp),
            f"--pp x --cp x --tp to divide the number of ranks {world_size}",
            args.pp * args.cp * args.tp,
        ),
        (
            world_size % (args.pp * args.etp),
            f"--pp x --etp to divide the number of ranks {world_size}",
            args.pp * args.etp,
        ),
    ]
    for is_broken, rule, value in rules:
        if is_broken:
            raise UserError(f"expected {rule}, got {value}")
    parts = world_size // (args.pp * args.cp * args.tp) * args.micro_batches
    if args.batch % parts:
        raise UserError(
            f"expected --batch to be a multiple of {parts}, the number of ranks with batches of "
            f"their own times --micro-batches {args.micro_batches}, got {args.batch}"
        )


def make_mesh(args: argparse.Namespace, config: ModelConfig, world_size: int) -> MoEMesh:
    """Return the groups of this job; experts are spread as far as they go, unless --ep says."""
    sets = world_size // (args.pp * args.etp)
    ep = choose_expert_parallel_size(args.ep, sets, config.num_experts)
    sizes = {name: getattr(args, name) for name in ("tp", "cp", "pp", "etp")}
    try:
        return MoEMesh(dp=args.dp or sets // ep, ep=ep, **sizes)
    except ValueError as error:
        raise UserError(str(error)) from error


def num_stages(args: argparse.Namespace) -> int:
    """Pipeline stages of a job."""
    return args.pp * (SCHEDULES[args.schedule or "1f1b"][1] if args.pp > 1 else 1)


def owners(args: argparse.Namespace) -> list[int]:
    """Ranks of a pipeline that hold the stages, in the order of the stages."""
    if args.schedule in V_SHAPED:
        return [*range(args.pp), *reversed(range(args.pp))]
    return [stage % args.pp for stage in range(num_stages(args))]


def blocks_of_stages(args: argparse.Namespace, config: ModelConfig) -> list[range]:
    """Blocks of each stage, shared out evenly."""
    count = num_stages(args)
    bounds = [config.num_layers * i // count for i in range(count + 1)]
    return [range(*bounds[i : i + 2]) for i in range(count)]


def stages_of_rank(args: argparse.Namespace, config: ModelConfig, mesh: MoEMesh) -> list[range]:
    """Blocks of the stages that this rank holds."""
    blocks = zip(owners(args), blocks_of_stages(args, config), strict=True)
    return [stage for owner, stage in blocks if owner == mesh.pp_rank]


def divide(model: MoELanguageModel, args: argparse.Namespace, mesh: MoEMesh) -> None:
    """Leave this rank its part of each layer, and say what is computed again."""
    if mesh.tp_size > 1:
        for block in model.blocks:
            if not isinstance(block, nn.Identity):
                _tensor_parallel(block, mesh)
    _recompute(model, args.checkpointing)
    if args.zero > 1:
        for module in (*model.blocks, model):
            moe_ext.distributed.fully_shard(module, mesh, reshard_after_forward=args.zero == 3)


def _tensor_parallel(block: nn.Module, mesh: MoEMesh) -> None:
    """Divide attention by heads and a dense layer by columns; experts are divided by --etp."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    block.attention.num_heads //= mesh.tp_size
    packed = {"attention.qkv_proj": 3}
    plan = {"attention.o_proj": RowwiseParallel()}
    if isinstance(block.ffn, DenseFFN):
        packed["ffn.gate_up_proj"] = 2
        plan["ffn.down_proj"] = RowwiseParallel()
    for name in packed:
        plan[name] = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(block, mesh.data_mesh["tp"], plan)
    for name, pieces in packed.items():
        hook = functools.partial(_own_columns, pieces=pieces, mesh=mesh)
        block.get_submodule(name).register_forward_hook(hook)


def _own_columns(
    _module: nn.Module, _inputs: Any, out: Any, *, pieces: int, mesh: MoEMesh
) -> Tensor:
    """This rank's columns of each piece: rows of the weight are cut where no piece ends."""
    from torch.distributed.tensor import Partial

    whole = out.to_local(grad_placements=[Partial()])
    return whole.unflatten(-1, (pieces, mesh.tp_size, -1))[..., mesh.tp_rank, :].flatten(-2)


def _recompute(model: MoELanguageModel, what: str) -> None:
    """Drop activations, to compute them again in the backward pass: all, or what sends nothing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, block in enumerate(model.blocks):
        if what == "none" or isinstance(block, nn.Identity):
            continue
        if what == "full":
            model.blocks[i] = checkpoint_wrapper(block)
            continue
        block.attention = checkpoint_wrapper(block.attention)
        if isinstance(block.ffn, DenseFFN):
            block.ffn = checkpoint_wrapper(block.ffn)
        else:
            block.ffn.experts = checkpoint_wrapper(block.ffn.experts)


def make_optimizers(
    args: argparse.Namespace, model: MoELanguageModel, mesh: MoEMesh
) -> list[torch.optim.Optimizer]:
    """AdamW; with --zero 1 its states of the dense part lie over the ranks of a stage."""
    options = {"lr": args.lr, "betas": (0.9, 0.95)}
    found: dict[tuple[Any, bool], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        decays = p.ndim > 1 and "embedding" not in name
        # Shards and whole tensors do not go into one kernel.
        group = found.setdefault((getattr(p, "device_mesh", None), decays), {"params": []})
        group["params"].append(p)
        group["weight_decay"] = args.weight_decay if decays else 0.0
    groups = list(found.values())
    if args.zero != 1:
        return [torch.optim.AdamW(groups, **options)]
    from torch.distributed.optim import ZeroRedundancyOptimizer

    experts = {id(parameter) for _, parameter, *_ in moe_ext.distributed.expert_parameters(model)}
    dense = [{**g, "params": [p for p in g["params"] if id(p) not in experts]} for g in groups]
    spread = [{**g, "params": [p for p in g["params"] if id(p) in experts]} for g in groups]
    dense, spread = ([g for g in each if g["params"]] for each in (dense, spread))
    sharded = ZeroRedundancyOptimizer(
        dense, torch.optim.AdamW, process_group=mesh.stage_group, **options
    )
    own = torch.optim.AdamW(spread, **options) if spread else None
    return [sharded] if own is None else [sharded, own]


def with_states(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that hold the states: of ZeRO's the one of this rank's share."""
    return [getattr(optimizer, "optim", optimizer) for optimizer in optimizers]


class Stage(nn.Module):
    """Neighbouring blocks of the model, all of them where there is no pipeline."""

    def __init__(self, model: MoELanguageModel, blocks: range, precision: str) -> None:
        super().__init__()
        self.blocks, self.is_last = blocks, blocks[-1] + 1 == len(model.blocks)
        # Schedules scale the gradients of each stage: it must not have the parameters of others.
        self.whole = (model,)
        self.parts = nn.ModuleList(model.blocks[i] for i in blocks)
        self.parts.extend([model.embedding] if 0 in blocks else [])
        self.parts.extend([model.norm, model.head] if self.is_last else [])
        self.bf16 = precision == "bf16"
        self.context: tuple[Any, ...] = ()
        self.counts: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the last stage, or what goes on to the next one; float32."""
        autocast = torch.autocast(x.device.type, torch.bfloat16)
        with autocast if self.bf16 else contextlib.nullcontext():
            out = self.whole[0](x, *self.context, stage=self.blocks)
        for i, block in zip(self.blocks, self.parts, strict=False):
            for layer in block.modules():
                if isinstance(layer, moe_ext.MoELayer):
                    count = layer.metrics["num_tokens_per_expert"]
                    self.counts[i] = self.counts.get(i, 0) + count
        return out.float() if self.is_last else out


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the mean over all bytes, in nats a byte."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


class Runner:
    """Runs batches through the model: here, or through the stages of a pipeline."""

    def __init__(
        self, args: argparse.Namespace, runtime: Runtime, model: MoELanguageModel, mesh: MoEMesh
    ) -> None:
        self.args, self.model, self.mesh, self.device = args, model, mesh, runtime.device
        self.owners = owners(args)
        blocks = blocks_of_stages(args, model.config)
        own = [i for i, owner in enumerate(self.owners) if owner == mesh.pp_rank]
        self.stages = {i: Stage(model, blocks[i], args.precision) for i in own}
        self.schedule: Any = None
        if mesh.pp_size > 1:
            self.schedule = self._make_schedule()
        else:
            moe_ext.nn.set_loss_scale(model, 1 / args.micro_batches)

    def _make_schedule(self) -> Any:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        args, config = self.args, self.model.config
        count, micro = len(self.owners), args.micro_batches
        size = args.batch // (self.mesh.data_size * micro)
        length = config.seq_len // self.mesh.cp_size
        between = torch.empty(size, length, config.model_dim, device=self.device)
        between.requires_grad_()
        logits = torch.empty(size, length, config.vocab_size, device=self.device)
        tokens = torch.empty(size, length, dtype=torch.long, device=self.device)
        stages = [
            pipelining.PipelineStage(
                stage,
                i,
                count,
                self.device,
                input_args=(between if i else tokens,),
                output_args=logits if stage.is_last else between,
                group=self.mesh.pp_group,
            )
            for i, stage in self.stages.items()
        ]
        name, stages_of_a_rank = SCHEDULES[args.schedule or "1f1b"]
        try:
            return getattr(schedules, name)(
                stages if stages_of_a_rank > 1 else stages[0], micro, loss_fn=cross_entropy
            )
        except ValueError as error:
            raise UserError(f"--schedule {args.schedule}, {micro} micro-batches: {error}") from None

    def train(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run forward and backward passes; return the loss, 0 where another stage has it."""
        inputs_BS, targets_BS = self._of_this_rank(inputs_BS, targets_BS)
        for stage in self.stages.values():
            stage.counts.clear()
        if self.schedule is not None:
            return self._train_stages(inputs_BS, targets_BS)
        micro, total = self.args.micro_batches, torch.zeros((), device=self.device)
        pairs = zip(inputs_BS.chunk(micro), targets_BS.chunk(micro), strict=True)
        for number, (x_BS, y_BS) in enumerate(pairs):
            if self.args.zero > 1:
                self.model.set_requires_gradient_sync(number == micro - 1)
            loss = cross_entropy(self.stages[0](x_BS), y_BS) / micro
            loss.backward()
            total += loss.detach()
        return total

    def _train_stages(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        losses: list[Tensor] = []
        first = (inputs_BS,) if 0 in self.stages else ()
        is_last = len(self.owners) - 1 in self.stages
        self.schedule.step(*first, **({"target": targets_BS, "losses": losses} if is_last else {}))
        if not is_last:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).detach().mean()

    def _of_this_rank(self, *sequences: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of each sequence; its places go to attention."""
        found = tuple(x_BS.to(self.device) for x_BS in sequences)
        if self.mesh.cp_size == 1:
            return found
        where = {"group": self.mesh.cp_group, "layout": "zigzag"}
        ids_S = attention.position_ids(found[0].shape[1], **where, device=self.device)
        attend = functools.partial(attention.ring_attention, is_causal=True, **where)
        for stage in self.stages.values():
            stage.context = (ids_S, attend)
        return tuple(attention.shard_sequence(x_BS, dim=1, **where) for x_BS in found)

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits of whole sequences on every rank; all ranks must call it."""
        x, last = tokens_BS.to(self.device), len(self.owners) - 1
        group, me = self.mesh.pp_group, self.mesh.pp_rank
        config, shape = self.model.config, tokens_BS.shape
        for i, owner in enumerate(self.owners):
            if owner != me:
                continue
            if i and self.owners[i - 1] != me:
                x = torch.empty(*shape, config.model_dim, device=self.device)
                dist.recv(x, group=group, group_src=self.owners[i - 1])
            context, self.stages[i].context = self.stages[i].context, ()
            x = self.stages[i](x)
            self.stages[i].context = context
            if i < last and self.owners[i + 1] != me:
                dist.send(x, group=group, group_dst=self.owners[i + 1])
        if group is None:
            return x
        if last not in self.stages:
            x = torch.empty(*shape, config.vocab_size, device=self.device)
        dist.broadcast(x.contiguous(), group=group, group_src=self.owners[last])
        return x

    def loss(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the mean loss of whole sequences on every rank; all ranks must call it."""
        return cross_entropy(self.logits(inputs_BS), targets_BS.to(self.device))

    def expert_counts(self) -> Tensor:
        """Counts of the experts that this rank's tokens chose in the last step, [L, E].

        Rows of layers that other stages hold are zero.
        """
        config, every = self.model.config, self.model.config.moe_every
        blocks = range((config.num_layers - 1) % every, config.num_layers, every)
        counts = torch.zeros(len(blocks), config.num_experts, dtype=torch.float64)
        for stage in self.stages.values():
            for block, count in stage.counts.items():
                counts[blocks.index(block)] = count.cpu()
        # Ranks of a tp group count the same tokens.
        return counts / self.mesh.tp_size
