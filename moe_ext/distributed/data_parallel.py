"""DistributedDataParallel for models whose experts, or columns of layers, are divided over ranks.

Divided parameters are DTensors, which DDP refuses unless its module lists them as ignored.
`parallelize` lists them, and registers hooks on the module. At the end of each backward pass in
which DDP reduces the other gradients, the hooks average the gradients of divided parameters over
the ranks that hold the same parts.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from moe_ext._checks import check_kind, check_rule
from moe_ext._compile import outside_graphs
from moe_ext.comm import c10d, collectives
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_ranks, group_size, is_initialized, world_size
from moe_ext.distributed.dtensor import is_dtensor, local_part
from moe_ext.distributed.gradients import (
    HOW_TO_KEEP_EQUAL,
    average_gradients,
    fingerprint,
    may_differ,
    reduction_problem,
)
from moe_ext.distributed.mesh import MoEMesh
from moe_ext.distributed.placement import (
    Placement,
    placements,
    replicated_groups,
    sharded_parameters,
    sharded_tensors,
)
from moe_ext.distributed.replicas import grid_of, replica_group
from moe_ext.distributed.spread import spread_layers

_OPERATION = "DistributedDataParallel"
# Fact that ranks compare of a model without a wrapper.
_DENSE_BITS = f"the checksum of the dense parameters ({HOW_TO_KEEP_EQUAL})"
# Attribute of a module that `parallelize` was called for: its `_Averaging`.
_AVERAGING = "_moe_ext_averaging"

_Model = TypeVar("_Model", bound=nn.Module)

# Communication hook of DDP to the function that reduces the divided parameters of a wrapper with
# that hook, see `reduce_shards_with`.
_reduce_with: dict[Callable[..., Any], Callable[[DistributedDataParallel, Any], bool]] = {}


def broadcast_experts(model: nn.Module) -> None:
    """Copy expert parameters from the first of the ranks with the same ep_rank to the others.

    `GroupedExperts` draws the same experts on ranks with the same seed. This function makes them
    equal after ranks had different seeds, or after a checkpoint was read on one rank only. Call it
    on all ranks. Experts that FSDP2 has sharded have no copies, and are not changed. Parameters on
    the meta device are not changed either.

    Args:
        model: any module.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    for parameter, placement in sharded_parameters(model).values():
        assert placement.group is not None
        if placement.is_managed(parameter) or parameter.is_meta:
            continue
        replicas = replica_group(placement.group, parameter.device)
        if replicas is not None:
            part = local_part(parameter.detach())
            collectives.broadcast_(part, replicas, 0, operation="broadcast_experts")


def parallelize(model: _Model, mesh: MoEMesh | DeviceMesh | None = None) -> _Model:
    """Spread the experts of a model over ranks, and prepare it for data parallelism, in place.

    With a mesh, each `MoELayer` that was made without an `ep_group` keeps only the experts of this
    rank, as DTensors on the mesh dimension "ep". The layer then equals one made with
    `mesh.ep_group`. Before the call every rank must hold the same model. Make optimizers and
    wrappers after the call.

    `DistributedDataParallel` refuses DTensors. This function lists them as ignored by DDP, and
    gives equal values to the ranks that hold the same experts. It averages the gradients of experts
    over these ranks, at the end of each backward pass in which DDP reduces the other gradients.
    Accumulation under `no_sync` works as in DDP. The same is done for divided columns of layers,
    and for the parameters that torch's `fully_shard(model, ignored_params=...)` leaves whole.

    Call it on all ranks, for the module that DDP will wrap. DDP may be called by a tool:
    Accelerate, the Trainer of transformers, Lightning, Fabric. Call it again for a module that is
    built around that module, such as a `PeftModel`. `data_parallel` and `replace(model,
    ep_group=...)` include this call. Layers with an `ep_group` need no such call in a plain loop
    with `sync_gradients`, or under `moe_ext.distributed.fully_shard`.

    torch's `replicate(model, ignored_modules=[layer.experts, ...])` works in the same way, if all
    modules with experts are ignored.

    Args:
        model: any module.
        mesh: a `MoEMesh`, or a DeviceMesh that `MoEMesh.from_device_mesh` accepts, such as one with
            dimensions "edp" and "ep". None does not move any experts.

    Returns:
        The same module.

    Raises:
        TypeError: mesh is neither of these.
        ValueError: parameters are divided in a way for which means over ranks are wrong. Also, on
            every rank and with the model unchanged: experts cannot be spread (they are of another
            class, in an optimizer, over other ranks, ...) or differ between ranks.
        RankFailureError: a rank died or did not answer.
    """
    check_kind("parallelize", "model", model, nn.Module, required=True)
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "parallelize: expected model to be the module that DistributedDataParallel is to wrap, "
            "got the wrapper; call it for wrapper.module, before that is wrapped"
        )
    check_kind("parallelize", "mesh", mesh, MoEMesh, DeviceMesh)
    if problem := reduction_problem(sharded_parameters(model)):
        raise ValueError(f"parallelize: {problem}")
    if isinstance(mesh, DeviceMesh):
        mesh = MoEMesh.from_device_mesh(mesh)
    if mesh is not None and group_size(mesh.ep_group) > 1:
        spread_layers(model, mesh)
    if world_size() == 1:
        return model
    broadcast_experts(model)
    c10d.add_ddp_ignored(model, sharded_tensors(model))
    if _begin_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin_forward)
        model.register_forward_hook(_end_forward, always_call=True)
    # `setattr` on the module of torch.compile would set the attribute of the module inside.
    vars(model)[_AVERAGING] = _Averaging()
    return model


def data_parallel(model: nn.Module, **ddp_kwargs: Any) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel over all ranks.

    Equivalent to `DistributedDataParallel(parallelize(model), **ddp_kwargs)`.

    Args:
        model: the module. Its parameters are made equal over their replicas.
        ddp_kwargs: arguments of DDP, except `process_group`; the default group is used.

    Returns:
        The wrapper.

    Raises:
        ValueError: torch.distributed is not initialised, `process_group` is given, or, on every
            rank, DistributedDataParallel cannot serve the model.
    """
    if not is_initialized():
        raise ValueError(
            "data_parallel: expected torch.distributed to be initialised, got no process group"
        )
    group = ddp_kwargs.get("process_group")
    rule = "None, since the dense part is averaged over all ranks"
    check_rule("data_parallel", "process_group", group, rule, group is None)
    return DistributedDataParallel(parallelize(model), **ddp_kwargs)


def reduce_shards_with(
    hook: Callable[..., Any], reduce: Callable[[DistributedDataParallel, Any], bool]
) -> None:
    """Register the function that reduces divided parameters for DDP wrappers with a hook.

    Args:
        hook: communication hook, as passed to `register_comm_hook`.
        reduce: called with the wrapper and the state of the hook, at the end of each backward pass
            in which DDP has reduced the other gradients. It marks the gradients as synchronised. It
            returns False if it does not serve the state; the gradients then become the exact mean.
    """
    _reduce_with[hook] = reduce


class _Averaging:
    """Averages the gradients of a model's experts over the ranks that hold the same experts.

    The wrapper is a DDP, or under FSDP2 the model itself. As in the wrapper, gradients are reduced
    at the end of a backward pass whose forward pass ran outside `no_sync`. They then include what
    earlier passes have accumulated.
    """

    def __init__(self) -> None:
        self._wrapper: weakref.ref[nn.Module] | None = None
        # A wrapper of another model. After an error in its forward pass, torch still returns it as
        # the active wrapper.
        self._stranger: weakref.ref[nn.Module] | None = None
        self._groups: list[tuple[ProcessGroup | None, list[nn.Parameter]]] = []
        # Module, name and parameter of everything in the groups, and the hooks on the parameters.
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._hooks: list[RemovableHandle] = []
        # True if a forward pass has run since the last reduction, and if one of these passes
        # wants a reduction.
        self._ran = self._wants = False
        self._is_queued = False
        self._num_passes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model starts with an empty state, and finds its own parameters and wrapper.
        return (_Averaging, ())

    def begin_forward(self, model: nn.Module, wrapper: nn.Module) -> bool:
        """Prepare for a pass of a wrapper, on all of its ranks. False if it wraps another model.

        Raises:
            ValueError: on every rank, if the wrapper's ranks or its inputs cannot be served.
        """
        is_new = self._wrapper is None or self._wrapper() is not wrapper
        if is_new and isinstance(wrapper, DistributedDataParallel):
            if self._stranger is not None and self._stranger() is wrapper:
                return False
            own = {id(parameter) for parameter in model.parameters()}
            if own.isdisjoint(id(parameter) for parameter in wrapper.module.parameters()):
                self._stranger = weakref.ref(wrapper)
                return False
        if is_new or any(owner._parameters.get(name) is not p for owner, name, p in self._places):
            self._adopt(model, wrapper)
        is_ddp = isinstance(wrapper, DistributedDataParallel)
        if is_ddp and self._groups and c10d.expects_uneven_inputs(wrapper):
            raise ValueError(
                f"{_OPERATION}.join: expected as many forward passes on every rank, since ranks "
                "exchange tokens in each, got a model with parameters that are divided over them; "
                "end all ranks together (drop_last=True), or have a rank without a batch go on "
                "with one of no tokens, and the sum of its outputs as its loss"
            )
        return True

    def compare_dense(self, model: nn.Module) -> None:
        """Compare the dense parameters over the ranks that share experts, in a loop of the user's.

        Looks in passes 1, 2, 4, 8, ...: a forgotten `sync_gradients` is found soon, and a long run
        does not pay for it. NOTE: device-to-host sync in these passes.

        Raises:
            ValueError: on every rank, if dense parameters differ between ranks.
        """
        if not (model.training and torch.is_grad_enabled()) or c10d.backward_number() != -1:
            return
        if self._num_passes & (self._num_passes + 1) == 0:
            placed = placements(model)
            experts = (p for p in placed.values() if p.axis == "ep" and p.num_parts > 1)
            groups = dict.fromkeys(place.group for place in experts)
            dense = [
                (name, parameter)
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and name not in placed
                if not (is_dtensor(parameter) or may_differ(parameter))
            ]
            facts = {_DENSE_BITS: fingerprint(dense)} if groups else {}
            for group in groups if dense else ():
                Agreement("forward", group, dense[0][1].device).compare(facts)
        self._num_passes += 1

    def _adopt(self, model: nn.Module, wrapper: nn.Module) -> None:
        """Find the parameters, at the first pass and after `Module.to` has replaced some."""
        found = sharded_parameters(model)
        sharded = {n: (p, place) for n, (p, place) in found.items() if not place.is_managed(p)}
        device = next(model.parameters()).device
        if isinstance(wrapper, DistributedDataParallel) and sharded:
            trained = sum(parameter.requires_grad for parameter, _ in sharded.values())
            facts = {
                "the number of parameters that are divided over ranks": len(sharded),
                "the number of those that require a gradient": trained,
            }
            world = wrapper.process_group
            with Agreement(_OPERATION, world, device) as agreement:
                _check_ranks(sharded, world)
                agreement.compare(facts)
            if self._wrapper is None:
                # DDP's constructor has broadcast the other parameters. Experts are broadcast here,
                # since they may have been drawn, or read by one rank, after `parallelize`.
                with torch.no_grad():
                    broadcast_experts(model)
        # Frozen parameters are included, because they may be unfrozen later.
        self._groups = replicated_groups(sharded.values(), device)
        if not isinstance(wrapper, DistributedDataParallel):
            self._groups += _left_whole(model, set(found))
        self._wrapper = weakref.ref(wrapper)
        held = {id(p): p for _, parameters in self._groups for p in parameters}
        self._places = [
            (owner, name, parameter)
            for owner in model.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in held
        ]
        for hook in self._hooks:
            hook.remove()
        # These hooks serve a loss that does not depend on the outputs. Otherwise the hooks on the
        # outputs run first. They are needed because a recomputation may run a nested backward pass.
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: _begin(this()))
            for parameter in held.values()
            if parameter.requires_grad
        ]

    def end_forward(self, wrapper: nn.Module, output: Any) -> None:
        """Note that a backward pass may follow, and put hooks on the outputs."""
        if not self._groups:
            return
        self._ran, self._is_queued = True, False
        self._wants = self._wants or _reduces(wrapper)
        for tensor in c10d.output_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _begin(self))

    def begin_backward(self) -> None:
        """Queue the averaging for the end of the current backward pass."""
        if self._ran and not self._is_queued:
            self._is_queued = True
            c10d.call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._is_queued = False
        wrapper = None if self._wrapper is None else self._wrapper()
        # The wrapper is asked again, because Accelerate switches the reduction on between the
        # forward and the backward pass.
        if wrapper is None or not (self._wants or _reduces(wrapper)):
            return
        self._ran = self._wants = False
        with torch.no_grad():
            if isinstance(wrapper, DistributedDataParallel):
                for hook, state in c10d.ddp_hooks(wrapper):
                    if hook in _reduce_with and _reduce_with[hook](wrapper, state):
                        return
            for replicas, parameters in self._groups:
                average_gradients(replicas, parameters)


class _Running(threading.local):
    """Prepared models whose forward pass runs in this thread, the outermost first.

    Each comes with the wrapper that it serves. None means that it has no wrapper, or that a
    prepared model around it serves the wrapper.
    """

    def __init__(self) -> None:
        self.passes: list[tuple[nn.Module, nn.Module | None]] = []


_running = _Running()


def _begin(averaging: _Averaging | None) -> None:
    if averaging is not None:
        averaging.begin_backward()


def _left_whole(
    model: nn.Module, experts: Collection[str]
) -> list[tuple[ProcessGroup | None, list[nn.Parameter]]]:
    """Return the parameters that FSDP2 was told to ignore, and the group of all ranks."""
    from moe_ext.distributed import fsdp_state

    managed = {name: shards for name, shards, _ in fsdp_state.wrapped_parameters(model)}
    dense = [shards.device_mesh for name, shards in managed.items() if name not in experts]
    named = model.named_parameters()
    whole = [p for n, p in named if n not in managed and n not in experts and not is_dtensor(p)]
    if not dense or not whole:
        return []
    return [(c10d.flat_group(max(dense, key=lambda mesh: mesh.size())), whole)]


def _reduces(wrapper: nn.Module) -> bool:
    """Return True if a wrapper reduces gradients in the current pass."""
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper.require_backward_grad_sync
    # The import is local because FSDP takes a second to import.
    from moe_ext.distributed import fsdp_state

    return fsdp_state.reduces_gradients(wrapper)


def _wrapper_of(model: nn.Module) -> nn.Module | None:
    """Return the wrapper that reduces gradients after a pass of a model, or None."""
    if not torch.is_grad_enabled():
        return None
    if (ddp := c10d.active_ddp() or c10d.ddp_of_replicate(model)) is not None:
        return ddp
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from moe_ext.distributed import fsdp_state

    # Inside a prepared model that serves FSDP2, this model is only a part of it.
    is_part = any(wrapper is outer for outer, wrapper in _running.passes)
    return None if is_part or not fsdp_state.holds_wrapped(model) else model


@outside_graphs
def _begin_forward(model: nn.Module, _inputs: object) -> None:
    averaging, wrapper = vars(model).get(_AVERAGING), _wrapper_of(model)
    if averaging is not None and wrapper is None and not _running.passes:
        averaging.compare_dense(model)
    if any(wrapper is served for _, served in _running.passes):
        wrapper = None  # a prepared model around this one serves the wrapper
    if averaging is None or wrapper is None or not averaging.begin_forward(model, wrapper):
        wrapper = None
    _running.passes.append((model, wrapper))


@outside_graphs
def _end_forward(model: nn.Module, _inputs: object, output: object) -> None:
    while _running.passes:
        found, wrapper = _running.passes.pop()
        if found is model:
            break
    else:
        return  # `_begin_forward` of this model has raised
    if wrapper is not None:
        vars(model)[_AVERAGING].end_forward(wrapper, output)
        return
    # In its first pass, `replicate` makes its wrapper after the model's pre-hooks have run.
    made = c10d.ddp_of_replicate(model) if torch.is_grad_enabled() else None
    if made is not None and not any(served for _, served in _running.passes):
        expect_backward(model, made, output)


def expect_backward(model: nn.Module, wrapper: nn.Module, output: object) -> None:
    """Average at the end of the backward pass of an output, if the wrapper reduces in that pass.

    A prepared model calls this after each of its forward passes. Other code calls it for a backward
    pass that begins before the forward pass of the model has ended.
    """
    averaging = vars(model).get(_AVERAGING)
    if averaging is not None and averaging.begin_forward(model, wrapper):
        averaging.end_forward(wrapper, output)


def _check_ranks(sharded: dict[str, tuple[nn.Parameter, Placement]], world: ProcessGroup) -> None:
    """Raise ValueError if the ranks of a wrapper do not fit those of its divided parameters."""
    members = set(group_ranks(world))
    whole = True
    for _, place in sharded.values():
        assert place.group is not None
        grid = grid_of(place.group)
        # The wrapper may cover all ranks of the stage, or the ranks with the parts of this rank.
        stage, replicas = {r for row in grid for r in row}, {row[place.part] for row in grid}
        whole = whole and members in (stage, replicas)
    if len(members) != world_size() and not whole:
        raise ValueError(
            f"{_OPERATION}: expected process_group to be None or all ranks of the job (or of its "
            "stage, MoEMesh.stage_group) for a model whose "
            f"parameters are divided over some of them, got the ranks {list(group_ranks(world))} "
            f"and {next(iter(sharded))}"
        )
