"""Replace the experts of a Hugging Face model, in place."""

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
    `DistributedConfig(ep_size=..., ep_implementation="moe_ext")`. `replace` calls this.

    Raises:
        ImportError: transformers 5 is not installed.
    """
    experts_interface().register(IMPLEMENTATION, experts_forward)
    try:
        parallel = importlib.import_module("transformers.distributed.expert_parallel")
        interface = parallel.EPImplementationInterface
    except (ImportError, AttributeError):
        return  # the first versions of transformers 5 have no such registry
    if IMPLEMENTATION not in interface():
        interface.register(IMPLEMENTATION, ep_implementation(parallel.EPImplementation))


def _copy_input(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook of a block that multiplies its input by a jitter in place: hand it a copy."""
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

    For every model whose experts are of a class that transformers decorates with
    `use_experts_implementation` (docs/hugging_face.md has the table). The model keeps its modules,
    parameters and their names; what changes is the function that its experts call, and that a block
    with jitter no longer writes to its input. So the router, its logits, the auxiliary loss,
    gradient checkpointing, `save_pretrained`, adapters and optimizers that already hold the
    parameters work as before. `model.set_experts_implementation("eager")` goes back. Importing this
    package's integration registers nothing; the first call registers the implementation "moe_ext"
    with transformers, and a model can then also be loaded with `experts_implementation="moe_ext"`.

    With `ep_group` each rank keeps E/P of the experts of every block: their parameters become
    DTensors of the same names. There is then no way back; `save_pretrained`, called by every rank,
    writes all experts, and gradients follow `moe_ext.distributed.sync_gradients`. Make optimizers
    and wrappers afterwards; every rank must hold the same model.

    Args:
        model: a transformers 5 model, or a `PeftModel` of one. With `ep_group` the outermost, since
            the `save_pretrained` of a model around it would know nothing of the other ranks.
        ep_group: process group to spread the experts over; None keeps them on this rank.
        dispatcher: "alltoall", "dedup", "hierarchical", "allgather", or "auto" for what takes least
            time in a rehearsal at the first forward pass, as in `MoELayer`. Families with a norm
            behind the experts take "alltoall" alone.
        combine: "exact" or "reduced", as in `MoELayer`; "reduced" needs another dispatcher.
        wire: formats in which rows travel, as in `MoELayer`. On one rank nothing travels.
        rebalance: "exact" or a `Rebalance`, as in `MoELayer`: every rank runs the same number of
            rows, for which weights of experts travel where that pays. On one rank nothing does.
        capacity_factor: rows that an expert takes of the tokens of a rank, over those of an even
            load, as in `MoELayer`; the others go to no expert. None takes all.

    Returns:
        Number of expert blocks that now run on moe_ext.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: no experts of a decorated class (`set_experts_implementation` silently changes
            nothing there); a quantised model; experts of another class beside them, of another
            layout, with unknown flags or already spread over ranks; a group whose size does not
            divide E; parameters of experts that something else holds (an optimizer, a wrapper, a
            graph, a variable); or options that do not go together. The model is unchanged.
        TypeError: ep_group is no process group of this rank.

    Synchronisation: none without ep_group. With it the ranks compare their experts in one message,
    and the layer reads its split sizes once per forward pass.
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
    """Load a model whose experts lie over ranks; each rank reads its own of them alone.

    As `cls.from_pretrained(path)` and `replace(model, ep_group=...)`, whatever the layout of the
    family's safetensors, with no more than this rank's part in memory; all ranks call it.

    Args:
        cls: a model class of transformers, or one of its auto classes.
        path: folder or name, as `from_pretrained` takes it.
        ep_group: see `replace`.
        options: `dispatcher`, `combine`, `wire`, `rebalance` and `capacity_factor` of `replace`,
            all others of `from_pretrained`.

    Returns:
        The model; what `from_pretrained` returns.

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
        # On the meta device, before transformers looks at what parameters need.
        replace(model, ep_group=ep_group, **own)
        with state_dicts_of_parts():
            return load(model, *args, **named)

    with mock.patch.object(base, "_load_pretrained_model", staticmethod(load_parts)):
        found = cls.from_pretrained(path, **options)
    # With output_loading_info the model is the first of two.
    sharded_parameters(found[0] if isinstance(found, tuple) else found)  # those are new
    return found


def _find_whole(model: nn.Module) -> ReplacedParts:
    """The experts of a model, all of them on this rank; ValueError for others."""
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
    """`replace` with a group: every rank does it, or every rank raises."""
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
        # After the ranks agree, since "hierarchical" makes groups with the others.
        dispatchers = dispatchers_of(found, ep_group, options)
        _run_by_us(found)
    shard(model, found, ep_group, dispatchers, options)
    parallelize(model)
    _protect_inputs(found.model)
    return len(found.experts)
