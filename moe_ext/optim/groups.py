"""Parameter groups by the kind of a parameter: matrix or vector, dense or expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.placement import placements, sharded_parameters
from moe_ext.distributed.replicas import replica_group


def param_groups(
    model: nn.Module,
    *,
    process_groups: bool = False,
    muon: bool = False,
    adamw: Iterable[nn.Module] = (),
) -> list[dict[str, Any]]:
    """Make groups for the optimizers of `moe_ext.optim`, with the names of the parameters.

    Biases, norms and other vectors get ``weight_decay=0`` and ``adapt=False``. Stacked experts
    (`GroupedExperts`) get ``per_expert=True``; the bias of a stacked expert is a vector. DTensors
    of each mesh have their own groups, apart from plain tensors. A mixed group makes torch's
    optimizers loop over parameters, or raise with ``fused=True`` or ``foreach=True``.

    Args:
        model: any module; frozen parameters are left out.
        process_groups: for OneBitAdam, OneBitLamb and ZeroOneAdam: give groups of expert-parallel
            parameters the ``process_group`` of the ranks that hold the same experts, or "self".
            All ranks must then call this function, because the first call makes process groups.
        muon: for Muon: set ``use_muon``, which is False for embeddings and for all parameters that
            are no matrices or stacks of matrices. For parameters that hold gate and up, also set
            their layout: ``fused``, ``interleaved`` and ``transposed``.
        adamw: further modules whose parameters get ``use_muon=False``, such as the output head of a
            model. The head of transformers' models (`get_output_embeddings()`) is found without.

    Returns:
        Groups that are not empty, each with a ``name`` and with (name, parameter) pairs.
    """
    # Registers the placements of parameters, because optimizers look them up without the model.
    sharded_parameters(model)
    experts = {name: p for name, p in placements(model).items() if p.axis == "ep"}
    # Parameters whose first dimension counts experts.
    stacked = {
        name
        for name, p in model.named_parameters()
        if name in experts and experts[name].dim == 0 and p.shape[:1] == (experts[name].size,)
    }
    options = _muon_options(model, stacked, adamw) if muon else {}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        each = name in stacked
        vector = parameter.dim() - int(each) < 2
        ep_group = experts[name].group if name in experts else None
        kind = "stacked experts" if each else "experts" if name in experts else "dense"
        own = options.get(name, {})
        mesh = parameter.device_mesh if is_dtensor(parameter) else None
        key = (kind, vector, mesh, id(ep_group) if process_groups else None, *own.items())
        if key not in groups:
            label = kind + (" vectors" if vector else "")
            group: dict[str, Any] = {"params": [], "name": label, **own}
            if each:
                group["per_expert"] = True
            if vector:
                group |= {"weight_decay": 0.0, "adapt": False}
            if process_groups and ep_group is not None and experts[name].num_parts > 1:
                replicas = replica_group(ep_group, parameter.device)
                group["process_group"] = "self" if replicas is None else replicas
            groups[key] = group
        groups[key]["params"].append((name, parameter))
    return list(groups.values())


def _muon_options(
    model: nn.Module, stacked: set[str], adamw: Iterable[nn.Module]
) -> dict[str, dict[str, Any]]:
    """Map the name of each parameter to its options for Muon."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    others = [*adamw, *embeddings, *([head] if isinstance(head, nn.Module) else [])]
    apart = {parameter for module in others for parameter in module.parameters()}
    places, found = placements(model), {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            own = name.rpartition(".")[2]
            matrices = parameter.dim() == 2 + int(name in stacked)
            found[name] = {"use_muon": matrices and parameter not in apart}
            if not found[name]["use_muon"]:
                continue
            # moe_ext's experts and those of transformers have different names for these flags.
            transposed = getattr(module, "transposed", getattr(module, "is_transposed", False))
            in_turn = getattr(module, "layout", "") == "interleaved" or not getattr(
                module, "is_concatenated", True
            )
            blocks = places[name].blocks if name in places else 1
            if name in stacked and transposed is True:
                found[name]["transposed"] = True
            if blocks > 1 or (name in stacked and own == "gate_up_proj"):
                found[name]["fused"] = max(2, blocks)
                if name in stacked and in_turn:
                    found[name]["interleaved"] = True
    return found
