"""Replaces the experts of a Hugging Face model, in place."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed import ProcessGroup

from moe_ext._checks import check_choice
from moe_ext.comm.agreement import told_option
from moe_ext.comm.groups import check_group, group_size
from moe_ext.dispatch import COMBINES, DISPATCHERS, Wire
from moe_ext.distributed import parallelize
from moe_ext.distributed.dtensor import state_dicts_of_parts
from moe_ext.distributed.placement import sharded_parameters
from moe_ext.distributed.replicas import shards_of_experts
from moe_ext.distributed.spread import Whole, spreading
from moe_ext.integrations.huggingface.decorated import (
    ReplacedParts,
    experts_interface,
    find,
    restore,
)
from moe_ext.integrations.huggingface.expert_parallel import (
    RowOptions,
    ShardedExperts,
    declare_placements,
    dispatchers_of,
    ep_implementation,
    shard,
    wholes,
)
from moe_ext.integrations.huggingface.experts import IMPLEMENTATION, experts_forward
from moe_ext.nn.balance.moved import Rebalance


def register() -> None:
    """Register "moe_ext" with transformers: the experts and the expert-parallel implementation.

    A model can then be loaded with `experts_implementation="moe_ext"`, and with
    `DistributedConfig(ep_size=..., ep_implementation="moe_ext")`. `replace` calls this function.

    Raises:
        ImportError: transformers 5 is not installed.
    """
    experts_interface().register(IMPLEMENTATION, experts_forward)
    try:
        parallel = importlib.import_module("transformers.distributed.expert_parallel")
        interface = parallel.EPImplementationInterface
    except (ImportError, AttributeError):
        return  # early versions of transformers 5 have no registry of expert parallelism
    if IMPLEMENTATION not in interface():
        interface.register(IMPLEMENTATION, ep_implementation(parallel.EPImplementation))


def _copy_input(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pre-hook that copies the input of a block, which multiplies it by a jitter in place."""
    if not block.training:
        return None
    if args:
        return (args[0].clone(), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clone()}


def _protect_inputs(model: nn.Module) -> None:
    for block in model.modules():
        jitters = any(
            getattr(block, name, 0) > 0 for name in ("jitter_noise", "input_jitter_noise")
        )
        hooked = _copy_input in block._forward_pre_hooks.values()
        if hasattr(block, "experts") and jitters and not hooked:
            block.register_forward_pre_hook(_copy_input, with_kwargs=True)


def replace(
    model: nn.Module,
    *,
    ep_group: ProcessGroup | None = None,
    dispatcher: str = "alltoall",
    combine: str = "exact",
    wire: Wire | str | None = None,
    rebalance: Rebalance | str | None = None,
    capacity_factor: float | None = None,
) -> int:
    """Run the experts of a Hugging Face mixture-of-experts model by moe_ext.

    Every model works whose experts are of a class that transformers decorates with
    `use_experts_implementation` (docs/hugging_face.md has the table). The model keeps its modules,
    parameters and their names. Only two things change: the function that its experts call, and that
    a block with jitter no longer writes to its input. The router, its logits, the auxiliary loss,
    gradient checkpointing, `save_pretrained`, adapters and optimizers that already hold the
    parameters work as before. `model.set_experts_implementation("eager")` undoes the call.
    Importing moe_ext registers nothing. The first call registers the implementation "moe_ext" with
    transformers, and a model can then also be loaded with `experts_implementation="moe_ext"`.

    With `ep_group` each rank keeps E/P of the experts of every block, and their parameters become
    DTensors of the same names. This cannot be undone. `save_pretrained`, called by every rank,
    writes all experts, and gradients follow `moe_ext.distributed.sync_gradients`. Before the call
    every rank must hold the same model. Make optimizers and wrappers after the call.

    Args:
        model: a transformers 5 model, or a `PeftModel` of one. With `ep_group` give the outermost
            model, because `save_pretrained` of a model around it would not gather the experts.
        ep_group: process group to spread the experts over; None keeps them on this rank.
        dispatcher: "alltoall", "dedup", "hierarchical", "allgather", or "auto" for the fastest in a
            rehearsal at the first forward pass, as in `MoELayer`. Families with a norm behind the
            experts take only "alltoall".
        combine: "exact" or "reduced", as in `MoELayer`; "reduced" needs another dispatcher.
        wire: formats in which rows are sent, as in `MoELayer`. On one rank nothing is sent.
        rebalance: "exact" or a `Rebalance`, as in `MoELayer`: weights of experts are sent to other
            ranks so that all ranks run the same number of rows, if that saves time. No effect on
            one rank.
        capacity_factor: most rows that an expert takes from the tokens of a rank, as a multiple of
            those of an even load, as in `MoELayer`. Further rows go to no expert. None takes all.

    Returns:
        Number of expert blocks that now run on moe_ext.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: the model has no experts of a decorated class (`set_experts_implementation`
            would silently change nothing), or is quantised; experts are of another class, of
            another layout, have unknown flags or are already spread over ranks; the group's size
            does not divide E; another object (an optimizer, a wrapper, a graph, a variable) holds
            parameters of experts; or options exclude each other. The model is unchanged.
        TypeError: ep_group is no process group of this rank.

    Synchronisation: none without ep_group. With ep_group the ranks compare their experts in one
    message, and the layer reads its split sizes once per forward pass.
    """
    check_group(ep_group, "replace")
    options = RowOptions(dispatcher, combine, wire, rebalance, capacity_factor)
    if ep_group is not None and group_size(ep_group) > 1:
        return _replace_over_ranks(model, ep_group, options)
    check_choice("replace", "dispatcher", dispatcher, DISPATCHERS)
    check_choice("replace", "combine", combine, COMBINES)
    options.check(None)
    found = _find_whole(model)
    _run_by_us(found)
    for experts in found.experts.values():
        experts._capacity = options.capacity
        declare_placements(experts, None)
    _protect_inputs(found.model)
    return len(found.experts)


def from_pretrained(
    cls: Any, path: str | os.PathLike[str], *, ep_group: ProcessGroup, **options: Any
) -> Any:
    """Load a model with experts spread over ranks, each of which reads only its own experts.

    Equivalent to `cls.from_pretrained(path)` and `replace(model, ep_group=...)`, for every layout
    of safetensors, but memory holds only this rank's part. All ranks call it.

    Args:
        cls: a model class of transformers, or one of its auto classes.
        path: folder or name, as `from_pretrained` takes it.
        ep_group: see `replace`.
        options: `dispatcher`, `combine`, `wire`, `rebalance` and `capacity_factor` of `replace`;
            all others go to `from_pretrained`.

    Returns:
        The result of `from_pretrained`, which is the model.

    Raises:
        As `replace` and `from_pretrained`; ValueError for an ep_group with etp.
    """
    experts_interface()
    if shards_of_experts(ep_group) > 1:
        raise ValueError(
            "from_pretrained: expected an ep_group with etp=1, since files are read by whole "
            f"experts, got etp={shards_of_experts(ep_group)}; load the model, then replace(model, "
            "ep_group=...)"
        )
    base: Any = importlib.import_module("transformers").PreTrainedModel
    own = {name: options.pop(name) for name in vars(RowOptions()) if name in options}
    load = base._load_pretrained_model

    def load_parts(model: nn.Module, *args: Any, **named: Any) -> Any:
        # The model is on the meta device here. Experts are divided before transformers looks at the
        # parameters and allocates memory for them.
        replace(model, ep_group=ep_group, **own)
        with state_dicts_of_parts():
            return load(model, *args, **named)

    with mock.patch.object(base, "_load_pretrained_model", staticmethod(load_parts)):
        found = cls.from_pretrained(path, **options)
    # With output_loading_info the result is a tuple of the model and the info. Loading made new
    # parameters, on which the call notes their placements.
    sharded_parameters(found[0] if isinstance(found, tuple) else found)
    return found


def _find_whole(model: nn.Module) -> ReplacedParts:
    """Find the experts of a model; ValueError unless all of them are on this rank."""
    found = find(model, "replace")
    for path, module in found.experts.items():
        if isinstance(module, ShardedExperts):
            raise ValueError(
                f"replace: expected all experts of {path} on this rank, got experts that an "
                "earlier call has spread over ranks"
            )
    return found


def _run_by_us(found: ReplacedParts) -> None:
    before = found.implementations()
    try:
        register()
        found.set_implementation(IMPLEMENTATION)
    except BaseException:
        restore(before)
        raise


def _replace_over_ranks(model: nn.Module, ep_group: ProcessGroup, options: RowOptions) -> int:
    """Replace experts and spread them over a group. Either every rank does, or all raise."""
    found: Any = None

    def whole() -> tuple[list[Whole], dict[str, object]]:
        nonlocal found
        options.check(ep_group)
        found = _find_whole(model)
        return wholes(found, ep_group), {
            "the number of expert blocks": len(found.experts),
            "num_experts": sorted({str(m.num_experts) for m in found.experts.values()}),
            "options": {**vars(options), **told_option("rebalance", options.moves)},
        }

    with spreading("replace", model, ep_group, whole):
        # Dispatchers are made after the ranks have agreed, because "hierarchical" makes process
        # groups, which is a collective call.
        dispatchers = dispatchers_of(found, ep_group, options)
        _run_by_us(found)
    shard(model, found, ep_group, dispatchers, options)
    parallelize(model)
    _protect_inputs(found.model)
    return len(found.experts)
