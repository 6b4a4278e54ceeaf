"""DistributedDataParallel for models whose parameters differ between ranks.

DDP takes every parameter for a copy of rank 0's. Frameworks wrap a model in it by themselves, and
DDP asks nobody; so its constructor is wrapped here. What ranks share between them (experts, columns
of layers) is kept out of its broadcasts and buckets, and reduced at the end of the backward passes
in which DDP reduces the rest.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from moe_ext._compile import outside_graphs
from moe_ext.distributed import _c10d, comm
from moe_ext.distributed.agreement import agree
from moe_ext.distributed.dtensor import keeps_wholes, local_part, whole_state_dicts
from moe_ext.distributed.gradients import average_gradients, reduction_problem
from moe_ext.distributed.groups import (
    GroupHandle,
    group_ranks,
    is_initialized,
    resolve_group,
    world_size,
)
from moe_ext.distributed.placement import (
    Placement,
    known_ranks,
    replica_group,
    replica_ranks,
    replicated_groups,
    sharded_parameters,
    sharded_tensors,
)

_OPERATION = "DistributedDataParallel"
# Attribute of a wrapper.
_SHARDS = "_moe_ext_shards"

# Classes of strategies of Fabric that write the parts of all ranks.
_saving_wholes: weakref.WeakSet[type] = weakref.WeakSet()

# Communication hook to what reduces a wrapper's shards in its place, with the hook's state.
_reduce_with: dict[Callable[..., Any], Callable[[DistributedDataParallel, Any], bool]] = {}


def broadcast_experts(model: nn.Module) -> None:
    """Give all ranks with the same ep_rank the expert parameters of the first of them, in place.

    `GroupedExperts` draws the same experts on ranks with the same seed; this makes them the same
    where seeds differ, or after a checkpoint was read on one rank only. Call it on all ranks. Of
    experts that FSDP2 has sharded no rank has a copy; they stay as they are.

    Args:
        model: any module.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    for parameter, placement in sharded_parameters(model).values():
        assert placement.group is not None
        replicas = replica_group(placement.group, parameter.device)
        if replicas is not None and not placement.is_managed(parameter):
            part = local_part(parameter.detach())
            comm.broadcast_(part, replicas, 0, operation="broadcast_experts")


def data_parallel(model: nn.Module, **ddp_kwargs: Any) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel over all ranks.

    The same as `DistributedDataParallel(model, **ddp_kwargs)`, which leaves parameters that differ
    between ranks alone once moe_ext is imported, and averages their gradients over the ranks that
    hold the same ones at the end of the backward pass.

    Args:
        model: the module; its parameters are made equal over their replicas.
        ddp_kwargs: passed on, but `process_group`, which is the default group here.

    Returns:
        The wrapper.

    Raises:
        ValueError: torch.distributed is not initialised, or `process_group` is given; and on every
            rank what DistributedDataParallel cannot serve.
    """
    if not is_initialized():
        raise ValueError(
            "data_parallel: expected torch.distributed to be initialised, got no process group"
        )
    if ddp_kwargs.get("process_group") is not None:
        raise ValueError(
            "data_parallel: expected process_group to be None, since the dense part is averaged "
            f"over all ranks, got {ddp_kwargs['process_group']}"
        )
    return DistributedDataParallel(model, **ddp_kwargs)


def reduce_shards_with(
    hook: Callable[..., Any], reduce: Callable[[DistributedDataParallel, Any], bool]
) -> None:
    """Have wrappers with a communication hook reduce what DDP leaves alone by a function.

    Args:
        hook: the function that `register_comm_hook` takes.
        reduce: called with the wrapper and the state of the hook, at the end of each backward pass
            in which DDP has reduced the rest. It marks the gradients as synchronised, or returns
            False if it cannot serve the state; they become the exact mean then.
    """
    _reduce_with[hook] = reduce


class _Shards:
    """Reduces the parameters that differ between the ranks of a wrapper.

    Passes count as in DDP: gradients are reduced at the end of a backward pass if the wrapper's
    forward pass came outside `no_sync`, and what earlier passes have accumulated is in them.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        groups: list[tuple[ProcessGroup | None, list[nn.Parameter]]],
    ) -> None:
        # Every parameter, frozen or not: one that is trained from later on has a gradient then.
        # First, so that pickling ends at the groups, whose error says what to save.
        self._groups = [(GroupHandle(replicas), found) for replicas, found in groups]
        self._ddp = weakref.ref(ddp)
        # Whether there was a forward pass since the last reduction, and whether one asks for it.
        self._ran = self._wants = False
        self._is_queued = False
        setattr(ddp, _SHARDS, self)
        ddp.register_forward_hook(_note_forward)
        # For a loss that was not made of the outputs. (The outputs come first: a recomputation may
        # run a backward pass inside the one that is meant.)
        this = weakref.ref(self)
        for parameter in (p for _, found in groups for p in found if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda _: _begin(this()))

    def note_forward(self, ddp: DistributedDataParallel, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # A deep copy is called with another wrapper than the one it was made for.
        self._ddp = weakref.ref(ddp)
        self._ran, self._is_queued = True, False
        self._wants = self._wants or ddp.require_backward_grad_sync
        for tensor in _c10d.output_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _begin(self))

    def begin_backward(self) -> None:
        if self._ran and not self._is_queued:
            self._is_queued = True
            _c10d.call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._is_queued = False
        ddp = self._ddp()
        # Accelerate asks for a reduction between the forward and the backward pass.
        if ddp is None or not (self._wants or ddp.require_backward_grad_sync):
            return
        self._ran = self._wants = False
        with torch.no_grad():
            for hook, state in _c10d.ddp_hooks(ddp):
                if hook in _reduce_with and _reduce_with[hook](ddp, state):
                    return
            for handle, parameters in self._groups:
                average_gradients(handle.group, parameters)


def _begin(shards: _Shards | None) -> None:
    if shards is not None:
        shards.begin_backward()


@outside_graphs
def _note_forward(ddp: Any, args: Any, output: Any) -> None:
    getattr(ddp, _SHARDS).note_forward(ddp, output)


def _before_init(
    module: nn.Module, arguments: dict[str, Any]
) -> Callable[[DistributedDataParallel], None] | None:
    """Keep what differs between ranks out of a `DistributedDataParallel` that is to be made."""
    if world_size() == 1 or not sharded_parameters(module):
        return None
    mesh = arguments.get("device_mesh")
    group = arguments.get("process_group") if mesh is None else mesh.get_group()
    world = resolve_group(group, _OPERATION)
    assert world is not None
    sharded = sharded_parameters(module)
    problem = _find_problem(module, sharded, world)
    device = next(module.parameters()).device
    trained = sum(parameter.requires_grad for parameter, _ in sharded.values())
    facts = {
        "the number of parameters that are divided over ranks": len(sharded),
        "the number of those that require a gradient": trained,
    }
    agree(_OPERATION, facts, problem, world, device)
    if not sharded:
        return None
    groups = replicated_groups(sharded.values(), device)
    _c10d.add_ddp_ignored(module, sharded_tensors(module))

    def after(ddp: DistributedDataParallel) -> None:
        if arguments.get("init_sync", True):
            broadcast_experts(module)
        _Shards(ddp, groups)
        _save_wholes_in_lightning(module)
        _save_wholes_in_fabric()

    return after


def _save_wholes_in_lightning(module: Any) -> None:
    """Have a Lightning Trainer's checkpoints hold the parts of all ranks.

    Rank 0 alone writes them. It would be refused there, and the others would wait for it.
    """
    if all(cls.__name__ != "LightningModule" for cls in type(module).__mro__):
        return
    trainer = module.trainer
    save = getattr(trainer, "save_checkpoint", None)
    # A Fabric has no Trainer.
    if save is not None and "save_checkpoint" not in vars(trainer):
        trainer.save_checkpoint = _saving_whole(save)


def _save_wholes_in_fabric() -> None:
    """Have `Fabric.save` write the parts of all ranks, where Lightning's rank 0 alone writes.

    The strategies that write files of all ranks (FSDP) have a method of their own.
    """
    for package in ("lightning.fabric", "lightning_fabric"):
        strategies = sys.modules.get(f"{package}.strategies.strategy")
        strategy = getattr(strategies, "Strategy", None)
        if strategy is not None and strategy not in _saving_wholes:
            _saving_wholes.add(strategy)
            strategy.save_checkpoint = _saving_whole(strategy.save_checkpoint)


def _saving_whole(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def save_wholes(*args: Any, **options: Any) -> None:
        # All ranks call it, as Lightning says.
        with contextlib.nullcontext() if keeps_wholes() is not None else whole_state_dicts():
            save(*args, **options)

    return save_wholes


def num_reduced(ddp: DistributedDataParallel) -> int:
    """Parameters that a wrapper reduces: those that were trained when it was made."""
    # One from before the import of moe_ext: those of now. Its C++ logger would tell, but waits for
    # a lock that is held while a communication hook runs.
    return _c10d.ddp_num_reduced.get(ddp, _c10d.ddp_num_trained(ddp))


def _find_problem(
    module: nn.Module, sharded: dict[str, tuple[nn.Parameter, Placement]], world: ProcessGroup
) -> str | None:
    """Problem of this rank's model, or None."""
    if not sharded:
        return None
    members = set(group_ranks(world))
    places = [placement for _, placement in sharded.values()]
    # The ranks of its stage, or those that hold the parts of this one.
    whole = all(
        members in (known_ranks(place), set(replica_ranks(place) or ())) for place in places
    )
    if len(members) != world_size() and not whole:
        return (
            "expected process_group to be None or all ranks of the job (or of its stage, "
            "MoEMesh.stage_group) for a model whose "
            f"parameters are divided over some of them, got the ranks {list(group_ranks(world))} "
            f"and {next(iter(sharded))}"
        )
    shards = {id(parameter) for parameter, _ in sharded.values()}
    if not any(p.requires_grad and id(p) not in shards for p in module.parameters()):
        return (
            "expected a parameter that every rank holds (a router, a norm) to require a gradient, "
            "got none but those that are divided over ranks; train one of them, or call "
            "moe_ext.distributed.sync_gradients in a loop without DistributedDataParallel"
        )
    return reduction_problem(sharded)


def _check_join(joinables: list[Any]) -> None:
    """Refuse contexts in which ranks that have run out of batches leave the forward pass."""
    for ddp in joinables:
        if isinstance(ddp, DistributedDataParallel) and sharded_parameters(ddp.module):
            raise ValueError(
                f"{_OPERATION}.join: expected as many forward passes on every rank, since ranks "
                "exchange tokens in each, got a model with parameters that are divided over them; "
                "end all ranks together (drop_last=True), or have a rank without a batch go on "
                "with one of no tokens, and the sum of its outputs as its loss"
            )


_c10d.around_ddp_init(_before_init)
_c10d.before_join(_check_join)
