"""Replace the experts of a Hugging Face model, in place."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from moe_ext.distributed.groups import check_group, group_size
from moe_ext.distributed.placement import Placement, declare_placement
from moe_ext.integrations.huggingface.expert_parallel import (
    ShardedExperts,
    ep_implementation,
    shard,
)
from moe_ext.integrations.huggingface.experts import experts_forward
from moe_ext.integrations.huggingface.families import Found, find, import_transformers

IMPLEMENTATION = "moe_ext"


def register() -> None:
    """Register "moe_ext" with transformers: the experts and the expert-parallel implementation.

    A model can then be loaded with `experts_implementation="moe_ext"`, and with
    `DistributedConfig(ep_size=..., ep_implementation="moe_ext")`. `replace` calls this.

    Raises:
        ImportError: transformers 5 is not installed.
    """
    import_transformers().ExpertsInterface.register(IMPLEMENTATION, experts_forward)
    try:
        parallel = importlib.import_module("transformers.distributed.expert_parallel")
        interface = parallel.EPImplementationInterface
    except (ImportError, AttributeError):
        return  # the first versions of transformers 5 have no such registry
    if IMPLEMENTATION not in interface():
        interface.register(IMPLEMENTATION, ep_implementation(parallel.EPImplementation))


def _copy_input(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook of a block that multiplies its input by a jitter in place: hand it a copy."""
    implementation = block._moe_ext_config._experts_implementation
    jitters = block.training and getattr(block, block._moe_ext_jitter) > 0
    if not jitters or implementation != IMPLEMENTATION:
        return None
    if args:
        return (args[0].clone(), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clone()}


def _protect_inputs(found: Found) -> None:
    for block in found.blocks.values():
        if found.family.jitter and not hasattr(block, "_moe_ext_jitter"):
            block._moe_ext_jitter = found.family.jitter  # type: ignore[assignment]
            # Not that of block.experts: an adapter may wrap them later.
            block._moe_ext_config = found.model.config
            block.register_forward_pre_hook(_copy_input, with_kwargs=True)


def replace(model: nn.Module, *, ep_group: ProcessGroup | None = None) -> int:
    """Run the experts of a Hugging Face mixture-of-experts model by moe_ext.

    For Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3, GPT-OSS, OLMoE and Phi-MoE. The
    model keeps its modules, parameters and their names; what changes is the function that its
    experts call, and that a block with jitter no longer writes to its input. So router logits, the
    auxiliary loss, gradient checkpointing, `save_pretrained`, adapters and optimizers that already
    hold the parameters work as before. `model.set_experts_implementation("eager")` goes back.
    Importing this package's integration registers nothing; the first call registers the
    implementation "moe_ext" with transformers, and a model can then also be loaded with
    `experts_implementation="moe_ext"`.

    With `ep_group` each rank keeps E/P of the experts of every block: the parameters keep their
    objects and names, and hold a slice. There is then no way back; `save_pretrained`, called by
    every rank, writes all experts, and gradients follow `moe_ext.distributed.sync_gradients`. Do it
    before the optimizer has made a step; every rank must hold the same model.

    Args:
        model: a transformers 5 model of one of the families, or a `PeftModel` of one.
        ep_group: process group to spread the experts over; None keeps them on this rank.

    Returns:
        Number of expert blocks that now run on moe_ext.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: another family, a quantised model, experts of another class, with flags that are
            not known or already spread over ranks, or a group whose size does not divide E. The
            model is unchanged.
        TypeError: ep_group is no process group of this rank.

    Synchronisation: none; with ep_group the layer reads its split sizes once per forward pass.
    """
    check_group(ep_group, "replace")
    found = find(model, "replace")
    sharded = [n for n, m in found.experts.items() if isinstance(m, ShardedExperts)]
    if ep_group is not None and group_size(ep_group) > 1 and sharded:
        raise ValueError(
            f"replace: expected all experts of {sharded[0]} on this rank, got experts that an "
            "earlier call has spread over ranks"
        )
    before = found.model.get_experts_implementation()
    try:
        register()
        found.model.set_experts_implementation(IMPLEMENTATION)
        if ep_group is not None and group_size(ep_group) > 1:
            shard(found.model, found.experts, ep_group)
        elif not sharded:
            for experts in found.experts.values():
                whole = Placement.of_experts(experts.num_experts, None)  # type: ignore[arg-type]
                declare_placement(experts, whole)
    except BaseException:
        found.model.set_experts_implementation(before)
        raise
    _protect_inputs(found)
    return len(found.experts)
