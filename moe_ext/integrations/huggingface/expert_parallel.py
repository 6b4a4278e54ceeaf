"""Expert parallelism for models of transformers.

Shapes: T tokens, D model, E experts, K top-k, P ranks, L = E/P local experts, R received rows.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import types
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils.parametrize import is_parametrized

from moe_ext._checks import check_rule
from moe_ext._compile import outside_graphs
from moe_ext._files import replacing
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.failures import in_layer
from moe_ext.comm.groups import GroupHandle, global_rank, group_rank, group_ranks, group_size
from moe_ext.dispatch import (
    WHOLE,
    AllToAllDispatcher,
    Choice,
    Cut,
    TokenDispatcher,
    Wire,
    named_dispatcher,
)
from moe_ext.distributed.dtensor import is_dtensor, state_dicts_of_parts
from moe_ext.distributed.placement import ExpertShards, Placement, declare_placement, placements
from moe_ext.distributed.replicas import shards_of_experts
from moe_ext.distributed.spread import Whole
from moe_ext.distributed.state_dict import gathered
from moe_ext.integrations.huggingface.adapters import factors_of, wrappers_of
from moe_ext.integrations.huggingface.decorated import ReplacedParts
from moe_ext.integrations.huggingface.experts import (
    IMPLEMENTATION,
    after_experts,
    as_weight,
    expert_rows,
    has_norm,
    known_experts,
    run_rows,
    weight_names,
)
from moe_ext.integrations.huggingface.tensor_parallel import part_of_tokens, whole_of_tokens
from moe_ext.nn.balance.moved import Rebalance, Rebalancer
from moe_ext.nn.capacity import Capacity
from moe_ext.nn.combinations import check_combination
from moe_ext.nn.experts import slots_of_shards
from moe_ext.nn.torch_state import as_autocast, in_backward


class _Spread(nn.Module):
    """Base of the mixins for classes of modules that `replace(ep_group=...)` spread over ranks."""

    _ep_group: GroupHandle

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle cannot find a class that was made at runtime. The group's handle comes before the
        # class, so that its error, which names the remedy, is raised first.
        return _new, (self._ep_group, type(self)), *super().__reduce_ex__(protocol)[2:]


def _new(handle: GroupHandle, cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


class ShardedExperts(_Spread):
    """Mixin for the class of experts that `replace(ep_group=...)` spread over ranks.

    `num_experts` remains E, as in every module of moe_ext with an `ep_group`.
    """

    # The forward pass itself takes this rank's parts of DTensor parameters, so that no forward hook
    # of `declare_placement` has to.
    takes_dtensors = True

    num_experts: int
    down_proj: nn.Parameter
    _dispatcher: TokenDispatcher
    _rebalancer: Rebalancer | None

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The expert-parallel group."""
        return self._ep_group.group

    # The host learns the split sizes from an exchange, so torch.compile cannot trace the layer.
    @outside_graphs
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts by moe_ext, whichever implementation the config names."""
        with in_layer(weakref.ref(self)):
            return self._over_ranks(hidden_states, top_k_index, top_k_weights)

    def _over_ranks(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        x_TD = as_autocast(as_weight(self, hidden_states))
        dispatcher = self._dispatcher
        if dispatcher.choose is not None:
            dispatcher, _ = dispatcher.choose(x_TD, top_k_index.shape[-1], in_rounds=False)
            self._dispatcher = dispatcher
        index_TK, weights_TK = known_experts(top_k_index, self.num_experts), top_k_weights
        capacity = expert_rows(self, index_TK)
        if shards_of_experts(self.ep_group) > 1:
            index_TK, weights_TK = slots_of_shards(
                index_TK, weights_TK, self.num_experts, self.ep_group
            )
        cut, place = WHOLE, None
        if self._rebalancer is not None:
            counts = self.training and not in_backward()
            place = functools.partial(self._rebalancer.place, x_TD, index_TK, counts=counts)
            cut = Cut(num_shared=self.num_experts)
        choice = Choice(index_TK, weights_TK, capacity)
        plan = dispatcher.plan(x_TD, choice, cut, place=place)
        rows, offsets, metadata = plan.parts.pop()(None)
        moves = None
        if plan.placed is not None:
            offsets, moves = plan.placed.offsets(offsets), plan.placed.moves
        with dispatcher.computing(x_TD):
            out_RD = run_rows(self, rows, offsets, moves)
            if has_norm(self):
                # The norm runs on the rank of the token. Its weights then get gradients from the
                # rank's own tokens, like every dense parameter of the model.
                back_ND = after_experts(self, dispatcher.bring_back(out_RD, metadata))
                y_TD = dispatcher.weighted_sum(back_ND, metadata)
            else:
                y_TD = dispatcher.combine(out_RD, metadata)
        return y_TD.to(hidden_states.dtype)


_OF_TRAINERS = (
    "; call it on all ranks, and give a Trainer of transformers "
    "moe_ext.integrations.huggingface.SavesExperts"
)


def _trainer_of_one_rank(*, saving: bool = False) -> Any:
    """Find a Trainer of transformers among the callers, if it saves models on rank 0 alone.

    With `saving`, its `_save` must be among the callers too, because a callback of the Trainer may
    save on all ranks.
    """
    module: Any = sys.modules.get("transformers.trainer")
    frame: types.FrameType | None = None if module is None else sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(module) and "self" in frame.f_locals:
            trainer: Any = frame.f_locals["self"]
            if hasattr(trainer, "is_fsdp_enabled"):
                # A subclass that overrides `_save`, as SavesExperts does, may save on all ranks.
                alone = type(trainer)._save.__module__ == module.__name__
                whole = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
                here = not saving or frame.f_code.co_name == "_save"
                return trainer if alone and here and not whole else None
        frame = frame.f_back
    return None


_INDEX = "model.safetensors.index.json"
_SAVE = "save_pretrained"
# Gathers whole tensors, on the CPU of the ranks that keep them.
_gathered = functools.partial(gathered, operation=_SAVE, hint=_OF_TRAINERS, device="cpu")


class WritesWhole(_Spread):
    """Mixin for the class of a model whose experts `replace(ep_group=...)` spread over ranks."""

    _writes_part = False

    def train(self, mode: bool = True) -> Any:
        """Call `nn.Module.train`, after checking the Trainer of transformers that calls this.

        A Trainer calls `train` at the start of each step, so the error comes before the first step.

        Raises:
            ValueError: the Trainer saves on rank 0 alone, and would fail at its first checkpoint.
        """
        if mode and group_size(self._ep_group.group) > 1:
            trainer = _trainer_of_one_rank()
            if trainer is not None and trainer.args.save_strategy != "no":
                name, strategy = type(trainer).__name__, trainer.args.save_strategy.value
                raise ValueError(
                    "train: expected a Trainer with moe_ext.integrations.huggingface.SavesExperts, "
                    "since each rank holds other experts and a Trainer saves those of rank 0, got "
                    f"{name} with save_strategy={strategy!r}; write "
                    f"`class MyTrainer(SavesExperts, {name}): pass`, or give save_strategy='no'"
                )
        return super().train(mode)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        by_ranks: bool = False,
        **options: Any,
    ) -> None:
        """Write the files of all experts, or of all adapters, as the class's own method does.

        Every rank of the expert-parallel group of rank 0 calls this, and rank 0 writes. Rank 0 may
        call it alone with a `state_dict` that holds all experts, such as that of `full_state_dict`.

        Args:
            save_directory: folder; with `by_ranks` one that all ranks share.
            is_main_process: False for a rank that takes part and writes nothing.
            state_dict: tensors to write instead of the model's own.
            by_ranks: each of these ranks writes the files of some layers, so that no rank holds all
                layers; rank 0 adds the index. Experts are gathered one tensor at a time.
            options: further arguments of the class's own method.

        Raises:
            RuntimeError: a rank of the group did not call this within a minute.
            ValueError: `by_ranks` with adapters, a `state_dict`, or options that need one writer.
        """
        if by_ranks:
            told = {"state_dict": state_dict, "adapters": getattr(self, "peft_config", None)}
            names = ("push_to_hub", "variant", "distributed_checkpoint")
            told |= {name: options.get(name) for name in names}
            for name in [name for name, value in told.items() if value]:
                raise ValueError(
                    f"save_pretrained: expected no {name} with by_ranks, which writes the weights "
                    "of the model alone; leave by_ranks out"
                )
            self._save_by_ranks(Path(save_directory), options)
            return
        with state_dicts_of_parts():
            state = dict(self.state_dict() if state_dict is None else state_dict)
        if getattr(self, "peft_config", None):
            # A model with adapters writes only the adapters, so experts are not gathered.
            trained = ("lora_", "modules_to_save")
            state = {
                name: value
                for name, value in state.items()
                if not is_dtensor(value) or any(part in name for part in trained)
            }
        parts = {name: value for name, value in state.items() if is_dtensor(value)}
        places = placements(self)
        # All ranks come to the groups in one order, that of the parameters.
        groups = dict.fromkeys(
            getattr(places.get(name), "group", None) or value.device_mesh.get_group()
            for name, value in parts.items()
        )
        if groups and all(0 not in group_ranks(group) for group in groups):
            return  # the group of rank 0 holds the same experts, and writes them
        writes = is_main_process and global_rank() == 0
        problem = None
        trainer = _trainer_of_one_rank(saving=True) if parts else None
        if trainer is not None and any(group_size(group) > 1 for group in groups):
            raise RuntimeError(
                f"{_SAVE}: expected every rank to call it, got a {type(trainer).__name__} that "
                f"calls it on rank 0 alone{_OF_TRAINERS}"
            )
        whole = _gathered(self, state, keep=writes)
        try:
            if writes:
                super().save_pretrained(  # type: ignore[misc]
                    save_directory, is_main_process=True, state_dict=whole, **options
                )
        except Exception as error:
            problem = error
        for group in groups:
            agreement = Agreement(_SAVE, group, next(iter(parts.values())).device)
            agreement.compare({}, problem=problem)
        if problem is not None:
            raise problem

    def _save_by_ranks(self, folder: Path, options: dict[str, Any]) -> None:
        group = self._ep_group.group
        if group is None or 0 not in group_ranks(group):
            return  # the group of rank 0 holds the same experts, and writes them
        with state_dicts_of_parts():
            state: dict[str, Any] = dict(self.state_dict())
        device = next(value.device for value in state.values() if is_dtensor(value))
        blocks: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            # transformers may write several tensors of a layer as one tensor of the file, so a
            # single rank writes all tensors of a layer.
            block = re.match(r".*?\.\d+\.", name)
            blocks.setdefault(block[0] if block else "", {})[name] = value
        rank = group_rank(group)
        mine: dict[str, Any] = {}
        for index, tensors in enumerate(blocks.values()):
            mine |= _gathered(self, tensors, keep=index % group_size(group) == rank)
        own = folder / f".rank-{rank}"
        with Agreement(_SAVE, group, device) as agreement:
            self._writes_part = True
            try:
                shutil.rmtree(own, ignore_errors=True)
                own.mkdir(parents=True)
                if mine:
                    super().save_pretrained(own, state_dict=mine, **options)  # type: ignore[misc]
            finally:
                self._writes_part = False
            agreement.compare({})
        with Agreement(_SAVE, group, device) as agreement:
            if rank == 0:
                _join_files(folder, group_size(group))
            agreement.compare({})

    def should_save_on_this_rank(self, is_main_process: bool) -> bool:
        """Return True if this rank writes files; overrides a method of transformers."""
        parent: Any = super()
        return self._writes_part or parent.should_save_on_this_rank(is_main_process)


def _join_files(folder: Path, num_ranks: int) -> None:
    """Join the files of the ranks, each of which wrote some layers, to one checkpoint."""
    parts = [folder / f".rank-{rank}" for rank in range(num_ranks)]
    for rank, part in enumerate(parts):
        if not part.is_dir():
            raise ValueError(
                f"save_pretrained: expected {folder} to be a folder that all ranks share, got one "
                f"without the files of rank {rank}"
            )
    files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
    weight_map: dict[str, str] = {}
    total = 0
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        weight_map |= dict.fromkeys(header, name)
        total += max(entry["data_offsets"][1] for entry in header.values())
        file.replace(folder / name)
    for part in parts:
        (part / _INDEX).unlink(missing_ok=True)
        for file in part.iterdir():  # configuration files, which are equal on all ranks
            file.replace(folder / file.name)
        part.rmdir()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with replacing(folder / _INDEX) as file:
        file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@functools.cache
def _mixed(mixin: type, cls: type, prefix: str = "") -> type:
    """Make a class that derives from a mixin and another class.

    A model's class keeps its name, without a prefix, because transformers writes it into files.
    """
    return type(f"{prefix}{cls.__name__}", (mixin, cls), {"__module__": __name__})


@dataclass(frozen=True)
class RowOptions:
    """Options of `replace` for the exchange of rows with the experts."""

    dispatcher: str = "alltoall"
    combine: str = "exact"
    wire: Wire | str | None = None
    rebalance: Rebalance | str | None = None
    capacity_factor: float | None = None

    @property
    def moves(self) -> Rebalance | None:
        """Rule by which experts move between ranks; None if they do not."""
        return Rebalance(self.rebalance) if isinstance(self.rebalance, str) else self.rebalance

    @property
    def capacity(self) -> Capacity | None:
        """Limit of the rows of an expert; None without a limit."""
        return None if self.capacity_factor is None else Capacity(self.capacity_factor)

    def check(self, ep_group: ProcessGroup | None) -> None:
        """Raise ValueError or TypeError if options are out of range or exclude each other."""
        if self.rebalance is not None and not isinstance(self.rebalance, (Rebalance, str)):
            raise TypeError(
                "replace: expected rebalance to be a Rebalance, 'exact' or 'periodic', got "
                f"{self.rebalance!r}"
            )
        check_combination(
            "replace",
            capacity=self.capacity,
            rebalance=self.moves,
            etp=shards_of_experts(ep_group),
            wire=Wire.of("replace", self.wire),
        )


def place_of(module: Any, name: str, group: ProcessGroup | None) -> Placement:
    """Return the placement of a stacked parameter of the experts of a module."""
    return ExpertShards.of_ffn(
        module.num_experts,
        group,
        is_down=name == "down_proj",
        transposed=module.is_transposed,
        pairs=module.has_gate and getattr(module, "is_concatenated", True),
    )


def declare_placements(module: Any, group: ProcessGroup | None) -> None:
    """Declare which part of the parameters of experts this rank holds."""
    # Parameters that every rank holds whole are declared first, because the next call divides all
    # parameters without a declaration.
    whole = Placement.of_experts(module.num_experts, None, dim=None)
    declare_placement(module, whole, [n for n, _ in module.named_parameters() if not _stacked(n)])
    declare_placement(module, place_of(module, "down_proj", group))
    if shards_of_experts(group) > 1:
        for name in weight_names(module):
            declare_placement(module, place_of(module, name, group), [name])


def _stacked(name: str) -> bool:
    return not name.startswith("post_expert_norm.")


def wholes(found: ReplacedParts, ep_group: ProcessGroup) -> list[Whole]:
    """Return the parameters of experts and their adapters, to be spread over a group.

    Raises:
        ValueError: P does not divide E, a parameter is not stacked, `forward` is set on a module
            itself, or adapters are of another kind.
    """
    shards = shards_of_experts(ep_group)
    num_ranks = group_size(ep_group) // shards
    made: list[Whole] = []
    for path, module in found.experts.items():
        num_experts: int = module.num_experts
        rule, fits = f"a multiple of the group size {num_ranks}", num_experts % num_ranks == 0
        check_rule("replace", f"{path}.num_experts", num_experts, rule, fits)
        if "forward" in vars(module):  # would hide `ShardedExperts.forward`
            raise ValueError(
                f"replace: expected {path} to have the forward of its class, where its experts are "
                "spread over ranks, got one that is set on the module, as hooks of Accelerate are; "
                "set it after replace"
            )
        if shards > 1:
            _check_shards(path, module, found, shards)
        for name, parameter in module.named_parameters():
            if not _stacked(name):
                continue
            if parameter.shape[0] != num_experts:
                raise ValueError(
                    f"replace: expected {path}.{name} to be stacked over {num_experts} experts, "
                    f"got shape {tuple(parameter.shape)}"
                )
            made.append((f"{path}.{name}", parameter, place_of(module, name, ep_group)))
        place = Placement.of_experts(num_experts, ep_group if shards == 1 else None)
        for _, name, layer, own in factors_of(found.model, path, place):
            made.append((f"{path}: {name}", layer.get_parameter("weight"), own))
    return made


def _check_shards(path: str, module: Any, found: ReplacedParts, shards: int) -> None:
    """Raise ValueError for experts that cannot be cut into shards."""
    names = weight_names(module)
    ffn_dim = module.down_proj.shape[1 if module.is_transposed else 2]
    problem = next((f"{path} with {name}" for name in names if name.endswith("_bias")), None)
    if has_norm(module):
        problem = f"{path} with a norm behind the experts"
    elif wrappers_of(found.model, path) or is_parametrized(module):
        problem = f"{path} with adapters"
    elif ffn_dim % shards:
        problem = f"{path} with a width of {ffn_dim}"
    if problem is not None:
        raise ValueError(
            "replace: expected experts without biases, adapters and norms, whose width is a "
            f"multiple of etp={shards}, in an ep_group with etp, got {problem}"
        )


def dispatchers_of(
    found: ReplacedParts, ep_group: ProcessGroup, options: RowOptions
) -> dict[str, TokenDispatcher]:
    """Make a dispatcher for each block of experts, by its path.

    Raises:
        ValueError: options exclude each other, or the family's experts need "alltoall".
    """
    made = {}
    for path, module in found.experts.items():
        if has_norm(module) and options.dispatcher != "alltoall":
            raise ValueError(
                "replace: expected dispatcher to be 'alltoall' for experts with a norm behind "
                "them, which takes every row on the rank of its token, got "
                f"{options.dispatcher!r} and {path}"
            )
        num_experts: int = module.num_experts
        # A dispatcher counts each shard of an expert, and each slot for a moved expert, as an
        # expert.
        spread = num_experts * shards_of_experts(ep_group) * (1 + (options.moves is not None))
        own = named_dispatcher(
            *("replace", options.dispatcher, spread, ep_group),
            combine=options.combine,
            wire=options.wire,
        )
        alike = [p for p, other in found.experts.items() if other.num_experts == num_experts]
        own.tell_apart(alike, alike.index(path))
        made[path] = own
    return made


def shard(
    model: nn.Module,
    found: ReplacedParts,
    ep_group: ProcessGroup,
    dispatchers: dict[str, TokenDispatcher],
    options: RowOptions,
) -> None:
    """Set group, dispatchers and classes of a model whose expert parameters were divided.

    Args:
        model: the user's module: `found.model`, or the PeftModel around it.
        found: the experts.
        ep_group: the P ranks.
        dispatchers: result of `dispatchers_of`.
        options: options of the exchange of rows.
    """
    for path, module in found.experts.items():
        module._ep_group = GroupHandle(ep_group)
        module._dispatcher = dispatchers[path]
        module.__class__ = _mixed(ShardedExperts, module.__class__, "Sharded")
        declare_placements(module, ep_group)
        module._capacity, moves = options.capacity, options.moves
        module._rebalancer = None if moves is None else Rebalancer(moves, module)
        if shards_of_experts(ep_group) > 1:
            continue  # `_check_shards` refused adapters
        place = Placement.of_experts(module.num_experts, ep_group)
        for wrapper, name, _, own in factors_of(found.model, path, place):
            wrapper.takes_dtensors = True
            declare_placement(wrapper, own, [name])
    for outer in {found.model, model}:
        outer._ep_group = GroupHandle(ep_group)
        outer.__class__ = _mixed(WritesWhole, outer.__class__)


def ep_implementation(base: type) -> type:
    """Make the class to register with transformers, derived from its `EPImplementation`."""

    class MoeExtEP(base):  # type: ignore[misc]
        """Exchanges rows by moe_ext's dispatcher: one exchange of counts, and two of rows.

        A rank takes part even with zero rows. As transformers expects, the gradients of experts are
        sums over the ranks of the group.
        """

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            num_experts = self.num_local_experts * ep_mesh.size()
            self.dispatcher = AllToAllDispatcher(num_experts, ep_mesh.get_group(), average=False)

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            num_tokens = len(hidden_states)
            shared = self.tp_mesh.size() > 1
            if shared:  # all ranks of the mesh hold this batch, and each takes a slice of tokens
                hidden_states, top_k_index, top_k_weights = (
                    part_of_tokens(x, self.tp_mesh)
                    for x in (hidden_states, top_k_index, top_k_weights)
                )
            x_TD = as_autocast(as_weight(self.experts, hidden_states))
            index_TK = known_experts(top_k_index, self.dispatcher.num_experts)
            rows, offsets, metadata = self.dispatcher.dispatch(x_TD, index_TK, top_k_weights)
            with self.dispatcher.computing(x_TD):
                back_ND = self.dispatcher.bring_back(self._run(rows, offsets), metadata)
            if self._is_ours():
                back_ND = after_experts(self.experts, back_ND)
            y_TD = self.dispatcher.weighted_sum(back_ND, metadata)
            return whole_of_tokens(y_TD, self.tp_mesh, num_tokens) if shared else y_TD

        def _is_ours(self) -> bool:
            config = getattr(self.experts, "config", None)
            return getattr(config, "_experts_implementation", None) == IMPLEMENTATION

        def _run(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:
            """Run this rank's experts, by the implementation that the config names."""
            if self._is_ours():
                return run_rows(self.experts, rows_RD, offsets)
            if rows_RD.shape[0] == 0:
                # For zero rows, other implementations return a tensor outside the autograd graph,
                # and this rank would miss the exchange of the backward pass. One row is run instead
                # and dropped.
                one = rows_RD.sum(dim=0, keepdim=True)
                index_11 = torch.zeros((1, 1), dtype=torch.int64, device=one.device)
                return self.experts_forward(one, index_11, one.new_ones((1, 1)))[:0]
            position_R = torch.arange(rows_RD.shape[0], device=rows_RD.device)
            # Rows past the last offset get index L, which means an expert of another rank to
            # transformers.
            index_R = torch.searchsorted(offsets[1:].contiguous(), position_R, right=True)
            weight_R = (index_R < self.num_local_experts).to(rows_RD.dtype)
            return self.experts_forward(rows_RD, index_R[:, None], weight_R[:, None])

    return MoeExtEP
