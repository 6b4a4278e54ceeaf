"""ZeRO++ for FSDP2 under DeepSpeed's names, and the state of its messages.

Shape suffixes: see `layout`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from moe_ext._checks import check_rule
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.collectives import all_reduce_, gather_objects, reduce_scatter
from moe_ext.comm.groups import (
    global_rank,
    group_rank,
    group_ranks,
    group_size,
    resolve_group,
    world_size,
)
from moe_ext.compression.codecs import PayloadCodec
from moe_ext.compression.fsdp.layout import (
    KeepDense,
    LayoutFinder,
    Segment,
    ShardLayout,
    keep_small_dense,
)
from moe_ext.compression.fsdp.ledger import Residual, StepLedger
from moe_ext.compression.fsdp.messages import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
    GradientMessage,
)
from moe_ext.distributed.dtensor import divided_as, dtensor_of, local_part, with_local
from moe_ext.distributed.fsdp_state import (
    ManagedParameter,
    fsdp_modules,
    messages_of,
    replicate_group,
    resharded_over,
    shard_group,
)
from moe_ext.distributed.placement import sharded_parameters

_OP, _STATE = "zero_plus_plus", "FSDPCompression"
_LOCO_KEYS = {"err_beta", "reset_T"}


class FSDPCompression:
    """The messages that `zero_plus_plus` has set on a model, with residuals and finite checks.

    Attributes:
        all_gathers: module name to `CompressedAllGather`.
        reduce_scatters: module name to `CompressedReduceScatter`.
        all_reduces: module name to `CompressedAllReduce`.
    """

    def __init__(self) -> None:
        """Start without messages; `zero_plus_plus` adds them."""
        self.ledger = StepLedger()
        self.all_gathers: dict[str, CompressedAllGather] = {}
        self.reduce_scatters: dict[str, CompressedReduceScatter] = {}
        self.all_reduces: dict[str, CompressedAllReduce] = {}

    def finite(self) -> bool:
        """Return True if all backward passes since the last call were finite on every rank.

        If a pass was not finite, the gradients are NaN and the residuals are those from before the
        pass. The caller must then skip the optimizer's step. A pass also ends, without this call,
        when the next one begins. If only weights are compressed, the present gradients are checked.

        Collective. NOTE: device-to-host sync.
        """
        if not (self.reduce_scatters or self.all_reduces):
            for name, gather in self.all_gathers.items():
                module = gather.finder.module
                assert module is not None
                gradients = {
                    parameter: local_part(p).new_zeros(0) if p.grad is None else local_part(p.grad)
                    for parameter, p in ((n, e.param) for n, e in gather.finder.parameters())
                }
                self.ledger.watch_gradients(gather, name, gradients, shard_group(module))
        return self.ledger.finite()

    def check(self) -> None:
        """Call `finite`, and raise if it returns False.

        Raises:
            ValueError: on every rank, with the ranks and parameters that were not finite.
        """
        if self.finite():
            return
        everyone = resolve_group(None, _OP)
        found = gather_objects(self.ledger.bad_parameters(), everyone, operation=_OP)
        bad = "; ".join(f"{', '.join(n)} on rank {rank}" for rank, n in enumerate(found) if n)
        raise ValueError(f"{_OP}: expected gradients to be finite, got NaN or infinity in {bad}")

    def flush(self) -> None:
        """Have the next backward pass send gradients plus residuals densely.

        After that pass all residuals are zero on every rank, until a later pass compresses again.
        If each of several micro-batches reduces its gradients, call this before the last one.

        Use it for the last step before a change that loses residuals, such as a new optimizer.
        `state_dict` keeps residuals, so a checkpoint needs no flush. The request stays until a
        finite pass in which every parameter has a gradient.
        """
        self.ledger.settle()
        self.ledger.flushing = True

    def _counted(self) -> dict[str, GradientMessage]:
        """Return the gradient messages by the names under which their steps are saved."""
        between = {f"all_reduce.{name}": message for name, message in self.all_reduces.items()}
        return {**self.reduce_scatters, **between}

    def _residuals(self) -> Iterator[tuple[str, NamedResiduals]]:
        for name, scatter in self.reduce_scatters.items():
            if scatter.residual is not None:
                module = scatter.finder.module
                assert module is not None
                shards, copies = shard_group(module), replicate_group(module)
                if copies is None and name in self.all_reduces:
                    copies = self.all_reduces[name].group
                named = NamedResiduals(scatter.finder, scatter.residual, shards, copies)
                yield f"reduce_scatter.{name}", named
        for name, reduce in self.all_reduces.items():
            if reduce.residual is not None:
                named = NamedResiduals(reduce.finder, reduce.residual, None, reduce.group)
                yield f"all_reduce.{name}", named

    def state_dict(self, *, sharded: bool = True) -> dict[str, Any]:
        """Return the residuals by module and parameter name (collective).

        Args:
            sharded (bool): if True, return the mean over ranks of each residual as a DTensor,
                sharded like the parameter. torch.distributed.checkpoint can save it, and any number
                of ranks can load it. If False, return this rank's own residuals, for a file of this
                rank. Training then continues with the same bits, on the same number of ranks.

        Returns:
            dict: state for `load_state_dict`.
        """
        self.ledger.settle()
        residuals = {
            name: named.mean() if sharded else named.local() for name, named in self._residuals()
        }
        state: dict[str, Any] = {
            "version": 1,
            "sharded": sharded,
            "steps": {name: message.step for name, message in self._counted().items()},
            "residuals": residuals,
        }
        if not sharded:
            state["rank"], state["num_ranks"] = global_rank(), world_size()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load residuals. Nothing is changed if this raises.

        Args:
            state (dict): from `state_dict`; a sharded state may stem from any number of ranks.
                DTensors may lie on another mesh; plain tensors hold whole parameters.

        Raises:
            ValueError: the state has another version; own residuals stem from another rank or
                number of ranks; a name or shape is missing or is not in the model.
        """
        version = state.get("version")
        check_rule(_OP, "state", version, "of version 1", version == 1)
        sharded = bool(state["sharded"])
        here = (global_rank(), world_size())
        saved = (state.get("rank"), state.get("num_ranks"))
        if not sharded and saved != here:
            raise ValueError(
                f"{_OP}: expected own residuals of rank {here[0]} of {here[1]}, got those of rank "
                f"{saved[0]} of {saved[1]}; state_dict(sharded=True) can change the number of ranks"
            )
        mine = dict(self._residuals())
        if set(mine) != set(state["residuals"]):
            raise ValueError(
                f"{_OP}: expected residuals of {sorted(mine)}, got {sorted(state['residuals'])}"
            )
        self.ledger.settle()
        packed = {
            name: named.packed(state["residuals"][name], own=not sharded)
            for name, named in mine.items()
        }
        for name, named in mine.items():
            named.residual.put(*packed[name])
        for name, message in self._counted().items():
            message.step = int(state["steps"].get(name, message.step))


def zero_plus_plus(
    model: nn.Module,
    *,
    zero_quantized_weights: bool = False,
    zero_quantized_gradients: bool = False,
    zero_hpz_partition_size: int = 1,
    zero_quantized_nontrainable_weights: bool = False,
    zeropp_loco_param: Mapping[str, float] | None = None,
    weight_format: str | PayloadCodec = "int8",
    gradient_format: str | PayloadCodec = "int4",
    block: int = 256,
    error_feedback: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    node_group: ProcessGroup | None = None,
    node_codec: str | PayloadCodec = "int8",
    density: float = 0.01,
    keep_dense: KeepDense = keep_small_dense,
    min_numel: int = 1024,
) -> FSDPCompression:
    """Compress the messages of a model that `fully_shard` has wrapped, under DeepSpeed's names.

    ============================= ==============================================================
    name                          in FSDP2
    ============================= ==============================================================
    zero_quantized_weights (qwZ)  `CompressedAllGather` on every module
    zero_quantized_gradients      `CompressedReduceScatter` on every module (qgZ), in one hop: codes
                                  are decoded and summed once, in float32
    zero_hpz_partition_size (hpZ) ``fully_shard(..., reshard_after_forward=<that number>)``: after
                                  the forward pass groups of that many ranks, such as a node, keep
                                  the parameters and gather them for the backward pass; checked here
    zeropp_loco_param             error feedback
    ============================= ==============================================================

    Call this after the last `fully_shard`, and before the first step.

    Args:
        model (nn.Module): holds FSDP modules, or is one.
        zero_quantized_weights (bool): as above.
        zero_quantized_gradients (bool): as above.
        zero_hpz_partition_size (int): as above; 1 is off.
        zero_quantized_nontrainable_weights (bool): compress frozen parameters alone (LoRA).
        zeropp_loco_param (dict): turns error feedback on. In DeepSpeed, ``err_beta`` and
            ``reset_T`` discard a part of the residual. Here nothing is discarded, so both are
            ignored with a warning.
        weight_format: as `CompressedAllGather`.
        gradient_format: as `CompressedReduceScatter`.
        block (int): elements that share a scale.
        error_feedback (bool): as `CompressedReduceScatter`, for gradients.
        stochastic (bool): as `CompressedReduceScatter`.
        seed (int): as `CompressedReduceScatter`.
        node_group (ProcessGroup): reduce over these ranks too, by `CompressedAllReduce`.
        node_codec: codec of `CompressedAllReduce`.
        density (float): density of `CompressedAllReduce`.
        keep_dense (callable): as `CompressedAllGather`.
        min_numel (int): as `CompressedAllGather`.

    Returns:
        FSDPCompression: handle for `FSDPCompression.finite` and `FSDPCompression.state_dict`.

    Raises:
        ValueError: the model has no FSDP module; modules are not wrapped as
            ``zero_hpz_partition_size`` says; a message of a module is compressed already; experts
            are spread over ranks and there is a ``node_group``; one of the three classes raises.

    Reference: Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training, 2023 (arXiv 2306.10209).
    """
    modules = _wrapped_modules(model, zero_hpz_partition_size)
    experts = next(iter(sharded_parameters(model)), None)
    if experts is not None and node_group is not None:
        raise ValueError(
            f"{_OP}: expected node_group to be None where experts are spread over ranks, got "
            f"{list(group_ranks(node_group))} and {experts}"
        )
    wanted = {
        "all-gather": zero_quantized_weights or zero_quantized_nontrainable_weights,
        "reduce-scatter": zero_quantized_gradients,
        "all-reduce": node_group is not None,
    }
    _check_free(modules, [kind for kind, is_wanted in wanted.items() if is_wanted])
    error_feedback |= _is_loco(zeropp_loco_param)
    options: dict[str, object] = {
        "zero_quantized_weights": zero_quantized_weights,
        "zero_quantized_gradients": zero_quantized_gradients,
        "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        "node_group": "None" if node_group is None else "given",
    }
    # Options are compared here, because a rank that compresses nothing sends FSDP's own messages,
    # which compare no options.
    for group in dict.fromkeys(shard_group(module) for _, module in modules):
        Agreement(_OP, group).compare({"options": options})
    found = FSDPCompression()
    for name, module in modules:
        common: dict[str, Any] = {
            "block": block,
            "module": module,
            "name": name,
            "model": model,
            "keep_dense": keep_dense,
            "min_numel": min_numel,
        }
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            found.all_gathers[name] = CompressedAllGather(
                weight_format, frozen_only=not zero_quantized_weights, **common
            )
        common["ledger"] = found.ledger
        if zero_quantized_gradients:
            found.reduce_scatters[name] = CompressedReduceScatter(
                gradient_format,
                error_feedback=error_feedback,
                stochastic=stochastic,
                seed=seed,
                **common,
            )
        if node_group is not None:
            found.all_reduces[name] = CompressedAllReduce(
                node_codec, node_group, density=density, **common
            )
    _install(modules, found)
    return found


def _is_loco(param: Mapping[str, float] | None) -> bool:
    if param is None:
        return False
    if not set(param) <= _LOCO_KEYS:
        raise ValueError(
            f"{_OP}: expected zeropp_loco_param to have keys of {sorted(_LOCO_KEYS)}, got "
            f"{sorted(param)}"
        )
    if param:
        warnings.warn(
            f"{_OP}: {', '.join(sorted(param))} of zeropp_loco_param are not used: error feedback "
            "forgets nothing here",
            stacklevel=3,
        )
    return True


def _wrapped_modules(model: nn.Module, hpz_size: int) -> list[tuple[str, FSDPModule]]:
    """Return names and FSDP modules; ValueError if they are not wrapped for `hpz_size`."""
    modules = list(fsdp_modules(model))
    if not modules:
        raise ValueError(
            f"{_OP}: expected model to be wrapped with fully_shard, got {type(model).__name__}"
        )
    counts = isinstance(hpz_size, int) and not isinstance(hpz_size, bool) and hpz_size >= 1
    check_rule(_OP, "zero_hpz_partition_size", hpz_size, "a number of ranks", counts)
    ranks_of = {name or "the model": resharded_over(module) for name, module in modules}
    # 1 is allowed, because by default the outermost module keeps its parameters after the forward
    # pass.
    wrong = {name: ranks for name, ranks in ranks_of.items() if ranks not in (1, hpz_size)}
    if hpz_size > 1 and (wrong or set(ranks_of.values()) == {1}):
        raise ValueError(
            f"{_OP}: expected modules to be wrapped with fully_shard(..., "
            f"reshard_after_forward={hpz_size}) for zero_hpz_partition_size={hpz_size}, got "
            f"{wrong or 'parameters that stay with each rank'}"
        )
    return modules


def _check_free(modules: list[tuple[str, FSDPModule]], kinds: list[str]) -> None:
    ours = (CompressedAllGather, CompressedReduceScatter, CompressedAllReduce)
    for name, module in modules:
        for kind in kinds:
            # Replacing a compressed message would drop its residual without an error.
            if isinstance(messages_of(module)[kind], ours):
                raise ValueError(
                    f"{_OP}: expected modules without a compressed {kind}, got "
                    f"{name or 'the model'}, which has one"
                )
        between = replicate_group(module)
        if "all-reduce" in kinds and between is not None:
            raise ValueError(
                f"{_OP}: expected fully_shard to have a mesh of one dimension where node_group is "
                f"given, got ranks {list(group_ranks(between))} that reduce densely"
            )


def _install(modules: list[tuple[str, FSDPModule]], found: FSDPCompression) -> None:
    # If modules are sharded over different groups, the ranks of one group do not receive the
    # messages of another. All of these groups must then agree at the end of a pass.
    several = len({group_ranks(shard_group(module)) for _, module in modules}) > 1
    for name, module in modules:
        if name in found.all_gathers:
            module.set_custom_all_gather(found.all_gathers[name])
        if name in found.reduce_scatters:
            module.set_custom_reduce_scatter(found.reduce_scatters[name])
        if name in found.all_reduces:
            module.set_all_reduce_hook(found.all_reduces[name])
        between = replicate_group(module)
        if between is not None:
            found.ledger.add_group(between)
        if found.all_reduces or several:
            # An all-reduce between nodes tells its status only to ranks that hold the same shard.
            found.ledger.add_group(shard_group(module))


@dataclass
class NamedResiduals:
    """The residual of one message, as tensors by parameter name.

    Attributes:
        finder: finds the layout of the message.
        residual: residual that is read and written.
        shards: ranks over which the message is scattered; None if the message is a single shard.
        copies: further ranks with residuals of the same elements; None if there are none.
    """

    finder: LayoutFinder
    residual: Residual
    shards: ProcessGroup | None
    copies: ProcessGroup | None

    def local(self) -> dict[str, Tensor]:
        """Map each name to a copy of this rank's residual, ``[P, elements of a shard]``."""
        return {name: part.clone() for name, part in self.residual.by_name().items()}

    def mean(self) -> dict[str, Tensor]:
        """Map each name to the mean over all ranks, a DTensor like the parameter (collective)."""
        kept, layout = self.residual.kept, self.residual.layout
        if kept is None or layout is None:
            return {}
        packed_Q = kept.view(-1).clone()
        if self.shards is not None:
            packed_Q = reduce_scatter(packed_Q, self.shards, operation=_STATE)
            packed_Q /= self.shards.size()
        if self.copies is not None:
            all_reduce_(packed_Q, self.copies, operation=_STATE)
            packed_Q /= self.copies.size()
        found: dict[str, Tensor] = {}
        for name, segment, like in self._in_whole_model(layout):
            part = like.to_local()
            local = packed_Q[segment.packed_start :][: part.numel()].view(part.shape).clone()
            found[name] = with_local(like, local)
        return found

    def _in_whole_model(self, layout: ShardLayout) -> Iterator[tuple[str, Segment, DTensor]]:
        """Yield names in the whole model, segments, and DTensors shaped like the residuals."""
        wholes = self.finder.logical_names()
        for segment in layout.compressed:
            assert segment.source is not None
            name = wholes.get(segment.name, segment.name)
            yield name, segment, _like(segment.source, is_alone=segment.name in wholes)

    def packed(
        self, saved: Mapping[str, Tensor], *, own: bool
    ) -> tuple[ShardLayout, Tensor | None]:
        """Pack the result of `local` (``own``) or `mean` into ``[P, Q]``; ValueError if misfit."""
        wholes = {} if own else self.finder.logical_names()
        entries = self.finder.parameters()
        # A parameter that is frozen now may have had a residual when the state was saved.
        kept = [(n, e) for n, e in entries if e.param.requires_grad or wholes.get(n, n) in saved]
        layout = self.finder.build(kept)
        if not saved:
            return layout, None
        sources = {
            segment.name if own else name: (segment, like)
            for name, segment, like in self._in_whole_model(layout)
        }
        if set(saved) != set(sources):
            raise ValueError(
                f"{_STATE}: expected residuals of parameters {sorted(sources)}, got {sorted(saved)}"
            )
        ranks = group_size(self.shards)
        _, first = next(iter(sources.values()))
        # The device is taken from the mesh, because the shard may be offloaded to the CPU.
        packed_PQ = torch.zeros(
            (ranks, layout.packed_numel), device=first.device_mesh.device_type, dtype=torch.float32
        )
        row = group_rank(self.shards)
        for name, (segment, like) in sources.items():
            place = packed_PQ.narrow(1, segment.packed_start, segment.numel)
            if own:
                _check_shape(name, saved[name], torch.Size((ranks, segment.numel)))
                place.copy_(saved[name])
                continue
            local = _shard_like(name, saved[name], like)
            # Each rank gets a residual for its own shard alone. The sum over ranks must be kept,
            # so this one is `ranks` times the mean.
            place[row, : local.numel()] = local.reshape(-1) * ranks
        return layout, packed_PQ


def _check_shape(name: str, found: Tensor, shape: torch.Size) -> None:
    what, rule = f"the residual of {name}", f"of shape {tuple(shape)}"
    check_rule(_STATE, what, tuple(found.shape), rule, found.shape == shape)


def _like(source: ManagedParameter, *, is_alone: bool) -> DTensor:
    """Return a DTensor in the layout of a parameter.

    If experts are a module each (`is_alone`), other ranks hold other experts, with other names, in
    this place. The DTensor then lacks the mesh dimension over which experts are spread.
    """
    like = source.sharded
    if not is_alone or like.shape == source.shape:
        return like
    mesh, placements = like.device_mesh, like.placements[:-1]
    along = [place if place.is_replicate() else Shard(source.dim) for place in placements]
    own = mesh[(mesh.mesh_dim_names or ())[:-1]]
    return dtensor_of(like.to_local(), own, along, source.shape)


def _shard_like(name: str, saved: Tensor, like: DTensor) -> Tensor:
    _check_shape(name, saved, like.shape)
    if isinstance(saved, DTensor):
        if saved.device_mesh == like.device_mesh and saved.placements == like.placements:
            return saved.to_local()
        saved = saved.full_tensor()
    whole = saved.to(like.to_local().device, torch.float32)
    return local_part(divided_as(whole, like))
