"""Divides the dense layers of a transformers model over ranks, by the plan of its family."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._checks import check_rule

_OP = "Plan.apply"
_OF_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
# Style of norms over heads. Every rank has the whole weights, but only the gradient of its own
# heads, so that gradients must be summed.
_SUMMED = "replicated_with_grad_allreduce"
# The styles of transformers' plans for which torch.distributed.tensor.parallel has a class, and the
# style of norms over heads.
_STYLES = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    _SUMMED,
)


def tensor_parallel_styles(model: Any, num_ranks: int) -> dict[str, str]:
    """Return path to style, for each dense layer that the plan of the model's family divides.

    Args:
        model: a model of transformers.
        num_ranks: number of ranks that share each layer.

    Raises:
        ValueError: the family has no plan, or its plan has an unknown style or leaves weights
            between columns and rows whole; ranks do not divide the number of heads of keys and
            values, unless they are gathered; or embedding and output share their weights.
    """
    title, config = type(model).__name__, model.config.get_text_config()
    modules, found = dict(model.named_modules()), dict[str, str]()
    names = [*modules, *(name for name, _ in model.named_parameters())]
    for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
        if _OF_EXPERTS.search(pattern):
            continue
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        for name in filter(matches, names):
            if style not in _STYLES or name not in modules:
                raise ValueError(
                    f"{_OP}: expected styles of {title}'s tensor parallelism to be in "
                    f"{_STYLES} for tp={num_ranks}, got {style!r} of {name}"
                )
            found[name] = style
    if not any(style.startswith("rowwise") for style in found.values()):
        raise ValueError(
            f"{_OP}: expected the family of the model to have a plan of tensor parallelism "
            f"for tp={num_ranks}, got none for {title}"
        )
    for path in [path for path, style in found.items() if style == "colwise"]:
        parent = path.rpartition(".")[0]
        for name, _ in modules[parent].named_parameters(prefix=parent):
            if name.rpartition(".")[0] not in found:
                # An undivided weight would get only the gradient of this rank's columns.
                raise ValueError(
                    f"{_OP}: expected the plan of {title} to divide all of {parent} for "
                    f"tp={num_ranks}, got {name} whole"
                )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % num_ranks and "rowwise_split_input" not in found.values():
        raise ValueError(
            f"{_OP}: expected tp to divide the {heads} heads of keys and values, got {num_ranks}"
        )
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if None not in ends and ends[0].weight is ends[1].weight:
        raise ValueError(
            f"{_OP}: expected embedding and output to have weights of their own for "
            f"tp={num_ranks}, got tied ones in {title}"
        )
    return found


def parallelize(model: nn.Module, styles: dict[str, str], mesh: DeviceMesh) -> None:
    """Divide layers over the ranks of a mesh, which call the model with the same tokens.

    Each rank gives a part of these tokens to the experts, and gathers the results of all parts.

    Args:
        model: a model of transformers with replaced experts, or one with the same names.
        styles: see `tensor_parallel_styles`.
        mesh: mesh of one dimension.
    """
    # torch.distributed.tensor takes a second to import, so the import is local.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    made: dict[str, Any] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    plan = {path: made[style] for path, style in styles.items() if style != _SUMMED}
    # `src_data_rank=None` sends nothing, because every rank has the same weights.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for path, module in model.named_modules():
        columns = [
            child
            for name, child in module.named_children()
            if styles.get(f"{path}.{name}" if path else name) == "colwise"
        ]
        if len(columns) > 1:
            _share_input(module, columns, mesh)
        if styles.get(path) == _SUMMED:
            _sum_gradients(module, mesh)
        parent, _, last = path.rpartition(".")
        if last == "experts" and not _OF_EXPERTS.search(parent):
            _share_tokens(module, mesh)


def _share_input(parent: nn.Module, columns: list[nn.Module], mesh: DeviceMesh) -> None:
    """Have the divided children of a module share one DTensor as input.

    The gradients of the children with respect to the input are then summed over ranks in one
    message instead of one for each child.
    """
    from torch.distributed.tensor import DTensor, Replicate

    seen: list[tuple[Any, Any]] = []

    def whole(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x = given[0]
        if not seen or seen[0][0] is not x:
            seen[:] = [(x, DTensor.from_local(x, mesh, [Replicate()], run_check=False))]
        return (seen[0][1], *given[1:])

    for module in columns:
        module.register_forward_pre_hook(whole, prepend=True)
    parent.register_forward_hook(lambda *_: seen.clear(), always_call=True)


def _sum_gradients(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a module's weights over the ranks.

    Hooks of parameters would not do, because FSDP2 replaces the parameters.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def shadow(_: nn.Module, __: Any) -> None:
        for name, weight in norm.named_parameters(recurse=False):
            whole = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
            norm.__dict__[name] = whole.to_local(grad_placements=[Partial()])

    def show(*ignored: Any) -> None:
        for name, _ in norm.named_parameters(recurse=False):
            norm.__dict__.pop(name, None)

    norm.register_forward_pre_hook(shadow)
    norm.register_forward_hook(show, always_call=True)


def part_of_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of rows that all ranks hold. The backward pass gathers gradients."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def whole_of_tokens(part: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """Gather the rows of all ranks of a mesh; inverse of `part_of_tokens`."""
    from torch.distributed.tensor import DTensor, Shard

    shape, stride = torch.Size((num_tokens, part.shape[1])), (part.shape[1], 1)
    placed = DTensor.from_local(part.contiguous(), mesh, [Shard(0)], shape=shape, stride=stride)
    return placed.full_tensor()


def _share_tokens(experts: nn.Module, mesh: DeviceMesh) -> None:
    def scaled(x: Tensor, factor: float) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * factor)
        return x

    def cut(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        num_tokens, rule = len(given[0]), f"a multiple of tp={mesh.size()}"
        check_rule(_OP, "tokens", num_tokens, rule, num_tokens % mesh.size() == 0)
        return tuple(scaled(part_of_tokens(x, mesh), 1 / mesh.size()) for x in given)

    def join(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        # The mean over ranks of experts' gradients expects each token from every rank of the mesh,
        # but each token reaches the experts once. Its gradient is therefore scaled by the mesh's
        # size inside the experts; `cut` scales the gradient of their input back.
        return whole_of_tokens(scaled(out, mesh.size()), mesh, mesh.size() * len(out))

    experts.register_forward_pre_hook(cut)
    experts.register_forward_hook(join)
