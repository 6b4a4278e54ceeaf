"""Base class of the optimizers that exchange gradients and momenta themselves."""

from __future__ import annotations

import contextlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from moe_ext._checks import check_rule
from moe_ext._compile import outside_graphs
from moe_ext.comm.agreement import Agreement, is_nonfinite
from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import check_group, group_rank, group_ranks, group_size, resolve_group
from moe_ext.distributed.dtensor import local_part
from moe_ext.distributed.gradients import fingerprint
from moe_ext.distributed.state_dict import show_states, take_states
from moe_ext.optim._arguments import (
    CheckedOptimizer,
    check_betas,
    check_positive,
    divided_within,
    is_own_part,
    loading,
    loss_of,
    placed_alike,
    saving,
)
from moe_ext.optim._compressed_mean import CompressedMean
from moe_ext.optim._entries import Entry, alike, clip, mask_problem
from moe_ext.optim._saved_states import (
    by_name,
    check_order,
    check_synchronised,
    check_whole,
    holders,
    is_between,
    owed_by,
    owes,
    shared_state,
)

# Entries of parameter groups that are counters; all other entries are options.
_COUNTERS = {"step", "var_counter", "var_interval", "local_step_counter", "local_step_interval"}
# State of a parameter that depends on how ranks divide it. Checkpoints omit it, and the optimizer
# measures it again after a load.
_OF_THIS_RANK = ("block_sq", "looks", "filling")
# Name of the entry of a saved state that tells whether compressed steps have begun.
_OWED = "compressed"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parameters per int64 of the message that tells which parameters have a gradient, one bit each.
_BITS = 62


class CompressedOptimizer(CheckedOptimizer, ABC):
    """Base of OneBitAdam, OneBitLamb and ZeroOneAdam."""

    # Attributes that are options of the optimizer as a whole, so that no parameter group has them.
    _settings: tuple[str, ...] = ()

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        group: ProcessGroup | None,
        block: int,
        communication_data_type: torch.dtype | None,
    ) -> None:
        check_group(group, self._op, name="group")
        is_power, dtype = block in (64, 128, 256, 512, 1024), communication_data_type
        check_rule(self._op, "block", block, "a power of two from 64 to 1024", is_power)
        rule, fits = "None, float32, bfloat16 or float16", dtype in (None, *_DTYPES)
        check_rule(self._op, "communication_data_type", dtype, rule, fits)
        # A copy, because torch adds other entries to `defaults`.
        self._options = dict(defaults)
        self._process_group = resolve_group(group, self._op)
        self._block, self._wire_dtype = block, dtype
        # The process group of each parameter group. It is not among the options of the group,
        # because options are compared over ranks and saved.
        self._ranks: list[ProcessGroup | None] = []
        self._made: list[Entry] = []
        self._frozen: list[Entry] = []
        # True once ranks have compared shapes, dtypes and values of the parameters.
        self._compared = False
        # Number of times that gradients are halved so that they fit into the dtype of messages.
        self._halvings = 0
        # Empty before the first compressed step.
        self._means: list[CompressedMean] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options; only before the first step."""
        if self._made:
            raise ValueError(f"{self._op}: expected all groups to be added before the first step")
        param_group = dict(param_group)
        ranks = param_group.pop("process_group", None)
        if ranks != "self":
            check_group(ranks, self._op, name="process_group")
        group = {**self.defaults, **param_group}
        name = "max_grad_norm"
        bound, of_all = group[name], self.defaults[name]
        rule = "0 with a process_group, since norms differ between its groups"
        check_rule(self._op, name, bound, rule, ranks is None or not bound > 0)
        rule = f"that of the optimizer ({of_all})"
        check_rule(self._op, f"{name} of a group", bound, rule, bound == of_all)
        param_group.setdefault("step", 0)
        shared = self._process_group if ranks is None else None if ranks == "self" else ranks
        self._ranks.append(shared)
        try:
            super().add_param_group(param_group)
        except BaseException:
            self._ranks.pop()
            raise

    def _problem_of(self, parameter: Tensor, group: dict[str, Any], name: str) -> str | None:
        if is_own_part(parameter) and divided_within(parameter, self._ranks[-1]):
            return (
                f"expected a process_group of ranks that hold the same part of {name}, got one of "
                "ranks that hold others; make the groups by moe_ext.optim.param_groups(model, "
                "process_groups=True)"
            )
        problem = mask_problem(group, local_part(parameter), name)
        return problem or super()._problem_of(parameter, group, name)

    def _check_options(self, group: dict[str, Any]) -> None:
        check_positive(self._op, group, "lr", "eps", "weight_decay", "max_grad_norm")
        check_betas(self._op, group["betas"])

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, on all ranks.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss that the closure returned; None without a closure.

        Raises:
            ValueError: on every rank, with nothing changed: a gradient of any rank is NaN or
                infinite, or steps, options or parameters differ between ranks.
            TypeError: on every rank, with nothing changed: a parameter is a DTensor but not experts
                over ranks, or has an unsupported dtype, or a gradient is sparse or placed unlike
                its parameter.
            RankFailureError: a rank died or did not answer; parameters and moments are as before.
        """
        loss = loss_of(closure)
        with torch.no_grad():
            entries = self._entries()
            if entries:
                self._agree(entries)
                if not self._is_dense():
                    clip(entries, self.defaults["max_grad_norm"])
                self._take_step(entries)
                for group in self.param_groups:
                    group["step"] += 1
        return loss

    @abstractmethod
    def _take_step(self, entries: list[Entry]) -> None:
        """Reduce gradients or momenta over ranks, and update moments and parameters."""

    @abstractmethod
    def _is_dense(self) -> bool:
        """Return True if the next step sends gradients uncompressed."""

    @property
    def steps_taken(self) -> int:
        """Number of steps since the start of the training."""
        return int(self.param_groups[0]["step"])

    # -- agreement of ranks before a step

    def _entries(self) -> list[Entry]:
        """Return an entry for each parameter that requires gradients; the order is fixed."""
        if not self._made:
            found: list[Entry] = []
            for parameter, index, name in self._named():
                group, ranks = self.param_groups[index], self._ranks[index]
                dtype, place = self._wire_dtype or parameter.dtype, (index, group, name)
                found.append(Entry(parameter, len(found), *place, ranks, self, dtype))
            self._made = [entry for entry in found if entry.parameter.requires_grad]
            self._frozen = [entry for entry in found if not entry.parameter.requires_grad]
        return self._made

    def _agree(self, entries: list[Entry]) -> None:
        """Check that all ranks take the same step, and learn which gradients any rank has."""
        first, common = not self._compared, self._process_group
        self._halvings = 0
        try:
            with Agreement(self._op, common, entries[0].device) as agreement:
                self._check_step(entries)
                has = [entry.parameter.grad is not None for entry in entries]
                words = [
                    sum(1 << bit for bit, flag in enumerate(has[start : start + _BITS]) if flag)
                    for start in range(0, len(has), _BITS)
                ]
                options = _all_options(self)
                checksum = zlib.crc32(str(options).encode())
                facts = self._facts(entries, first)
                rows = agreement.compare(facts, values=[*words, self._halvings, checksum])
                if any(row[-1] != checksum for row in rows):
                    agreement.compare(options)
        except Exception:
            if first:
                self._made = []
            raise
        self._compared = True
        self._halvings = max(row[-2] for row in rows)
        places = {id(ranks): _places(common, ranks) for ranks in self._ranks}
        for index, entry in enumerate(entries):
            word, bit = divmod(index, _BITS)
            entry.active = any(rows[p][word] >> bit & 1 for p in places[id(entry.ranks)])
            grad = entry.parameter.grad
            entry.grad = None if grad is None else local_part(grad).float()

    def _facts(self, entries: list[Entry], first: bool) -> dict[str, object]:
        """Return the facts of a step, except options, that must be equal on every rank."""
        signature, values = "", 0
        if first:
            signature = "\n".join(f"{tuple(e.part.shape)} {e.parameter.dtype}" for e in entries)
        if first and group_size(self._process_group) > 1:
            # Values are compared only for parameters of which all ranks hold equal copies.
            shared = [e for e in entries if e.ranks is self._process_group and not e.is_apart]
            values = fingerprint([(e.label, e.part) for e in shared])
        return {
            "whether this is the first step since the start or load_state_dict (load a state on "
            "all ranks or on none)": int(first),
            "the number of parameters": len(entries),
            "the checksum of their shapes and dtypes": zlib.crc32(signature.encode()),
            "the number of the step": self.steps_taken,
            "the values of the parameters at the first step (seed every rank alike)": values,
        }

    def _check_step(self, entries: list[Entry]) -> None:
        """Raise the error, if any, that prevents this rank from taking the step."""
        for entry in self._frozen:
            if entry.parameter.requires_grad:
                raise ValueError(
                    f"{self._op}: expected parameters to require gradients from the first step on, "
                    "or from load_state_dict (flush, and load the state_dict again), got a later "
                    f"one for {entry.label}"
                )
        present: list[tuple[Entry, Tensor]] = []
        for entry in entries:
            parameter, grad = entry.parameter, entry.parameter.grad
            rule = ""
            if not is_own_part(parameter):
                rule = "parameters to be plain tensors or experts over ranks, got a DTensor"
            elif parameter.dtype not in _DTYPES:
                rule = "parameters to be float32, bfloat16 or float16, got another type"
            elif grad is not None and grad.layout != torch.strided:
                rule = "gradients to be dense, got a sparse one"
            elif grad is not None and not placed_alike(grad, parameter):
                rule = "gradients to be placed as their parameters, got another one"
            if rule:
                raise TypeError(f"{self._op}: expected {rule} for {entry.label}")
            problem = mask_problem(entry.group, entry.part, entry.label)
            if problem is not None:
                raise ValueError(f"{self._op}: {problem}")
            if grad is not None and entry.part.numel():
                present.append((entry, local_part(grad)))
        if not present:
            return
        norms = torch.stack(torch._foreach_norm([g for _, g in present], 2, dtype=torch.float32))
        # NOTE: device-to-host sync: NaN must raise on the host before a parameter changes.
        for (entry, grad), norm in zip(present, norms.tolist(), strict=True):
            # The norm of finite elements may be infinite, because squares overflow.
            if not math.isfinite(norm) and is_nonfinite(grad):
                raise ValueError(
                    f"{self._op}: expected gradients to be finite, got NaN or infinity for "
                    f"{entry.label}"
                )
            limit = torch.finfo(entry.sent_dtype).max
            if entry.sent_dtype != torch.float32 and norm > limit:
                largest = float(grad.abs().max())
                if largest > limit:
                    halvings = math.frexp(largest)[1] - math.frexp(limit)[1] + 1
                    self._halvings = max(self._halvings, halvings)

    # -- compressed means

    def _flat_means(self) -> list[CompressedMean]:
        """Return the flat tensors of entries, one per group of ranks and device; made once."""
        if not self._means:
            compressed = [entry for entry in self._entries() if entry.is_compressed]
            self._means = [CompressedMean(m, self._block) for m in alike(compressed, "device")]
        return self._means

    def flush(self) -> None:
        """Add the compression errors of all ranks to the moments by a dense all-reduce; collective.

        Afterwards ranks are synchronised and all errors are zero, so the state is the same on every
        rank. A state that is saved now can be loaded by any number of ranks.

        Raises:
            RankFailureError: a rank died or did not answer.
        """
        with torch.no_grad():
            for mean in self._means:
                owed_N = mean.errors()
                for entry, error in mean.by_entry(owed_N):
                    # Local steps of 0/1 Adam collect momenta here that no rank has sent yet.
                    if "momentum_accumulator" in entry.state:
                        error.add_(entry.state["momentum_accumulator"])
                all_reduce_(owed_N, mean.group, operation=self._op).div_(mean.size)
                self._pay(list(mean.by_entry(owed_N)))
                mean.clear_errors()

    def _pay(self, owed: Sequence[tuple[Entry, Tensor]]) -> None:
        """Add the mean over ranks of their errors to the moments."""
        for entry, error in owed:
            entry.state["exp_avg"].add_(error)

    # -- saved states

    @saving
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks in torch's form, for any number of ranks; collective.

        The state of experts over ranks has DTensors for `torch.distributed.checkpoint`, as the
        model's `state_dict` has. ``state[i]["owed"]`` is the mean over ranks of their compression
        errors for parameter i. Each rank that loads takes this mean as its error, so that the mean
        over ranks stays the same. After `flush` errors are zero, and nothing is sent.

        Raises:
            ValueError: ranks are between two synchronisations.
            RankFailureError: a rank died or did not answer.
        """
        states, counters = self.checkpoint_state()
        found = super().state_dict()
        for group in found["param_groups"]:
            group.pop("exp_avg_mask", None)
            group[_OWED] = _OWED in counters
        groups = [(group, p) for group in self.param_groups for p in group["params"]]
        found["state"] = {
            number: self._with_all_entries(group, p, states[p])
            for number, (group, p) in enumerate(groups)
            if states[p]
        }
        return show_states(self, found)

    def _with_all_entries(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Add missing entries, because a checkpoint loads only the names that the state has."""
        # torch's checkpoints load tensors in place, but write a plain number under the text of its
        # keys, "0" instead of 0.
        found = {
            name: torch.tensor(value) if isinstance(value, int | float) else value
            for name, value in state.items()
            if name != "touched_rows"
        }
        found.setdefault("owed", torch.zeros_like(local_part(parameter), dtype=torch.float32))
        return found

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, in torch's form, with this rank's compression errors.

        ``state[i]["worker_error"]`` is the error of parameter i; ``compression`` holds the errors
        of this rank's shard. If every rank saves its state, a run of as many ranks can continue bit
        for bit.
        """
        found = super().state_dict()
        found["state"] = {index: dict(state) for index, state in found["state"].items()}
        for group in found["param_groups"]:
            group.pop("exp_avg_mask", None)
        found["compression"] = {
            "block": self._block,
            "servers": [mean.save(found["state"]) for mean in self._means],
            "members": [_places(self._process_group, ranks) for ranks in self._ranks],
        }
        return found

    @loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()` of any rank, or from `rank_state_dict()` of this rank.

        States of Adam fit any number of ranks, too. Rank states of another number of ranks need
        `load_rank_states`. Parameters are matched by name if the state and the optimizer have
        names.

        Raises:
            ValueError: the state has compression errors, but is of another rank, number of ranks or
                order of parameters, or lacks the errors of shards; or its parameters have other
                names. Nothing has changed.
        """
        state_dict = by_name(self._op, self.param_groups, state_dict)
        check_whole(self._op, state_dict)
        if "compression" not in state_dict:
            self._load_state_of_all(take_states(self, state_dict))
            return
        states, saved = state_dict["state"], state_dict["compression"]
        servers = saved["servers"]
        with _unchanged_if_it_fails(self):
            self._load_shared(state_dict)
            if owes(state_dict) or is_between(state_dict):
                means = self._flat_means()
                if len(servers) != len(means):
                    raise ValueError(
                        f"{self._op}: expected a state with the errors of {len(means)} groups of "
                        f"ranks, got {len(servers)}"
                    )
                for server, mean in zip(servers, means, strict=True):
                    mean.load(self._op, states, server, saved["block"])
            for mean in self._flat_means() if servers else ():
                mean.load_rows(states)

    def load_rank_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the states of all ranks of a run with another number of ranks.

        With P old and P' new ranks, rank j takes over the compression errors of old ranks j,
        j + P', ... times P' / P, so that the mean over ranks stays the same. States and errors of
        experts come from old ranks that held the same experts. The number of replicas of experts
        may change, but not the number of ranks over which they are divided.

        Args:
            states: results of `rank_state_dict` on each rank, in the order of ranks.

        Raises:
            ValueError: the states are not those of all ranks, each once, in order; or experts were
                divided over another number of ranks. Nothing has changed.
        """
        if not all("compression" in state for state in states):
            raise ValueError(
                f"{self._op}: expected states that rank_state_dict returned on each rank, got one "
                "of all ranks; load_state_dict takes that"
            )
        states = [by_name(self._op, self.param_groups, state) for state in states]
        check_order(self._op, states)
        for state in states:
            check_synchronised(self._op, state)
        members_of = [_places(self._process_group, ranks) for ranks in self._ranks]
        held_by = holders(self._op, states, members_of, group_size(self._process_group))
        merged, servers = shared_state(states, held_by), states[0]["compression"]["servers"]
        with _unchanged_if_it_fails(self):
            self._load_shared(merged)
            for mean in self._flat_means() if servers else ():
                held = held_by[mean.entries[0].group_index]
                owed = [owed_by(states[rank]) for rank in held[mean.rank :: mean.size]]
                mean.take_over(owed, len(held))
                mean.load_rows(merged["state"])

    def checkpoint_state(self) -> tuple[dict[nn.Parameter, dict[str, Any]], dict[str, int]]:
        """Return state that is equal on ranks with the same parameters; collective.

        See `moe_ext.distributed.checkpoint`. ``owed`` in the state of a parameter is the mean over
        ranks of their compression errors, by one all-reduce. The errors of this optimizer do not
        change.

        Raises:
            ValueError: ranks are between two synchronisations.
            RankFailureError: a rank died or did not answer.
        """
        remedy = ", or save rank_state_dict() on every rank"
        check_synchronised(self._op, super().state_dict(), remedy)
        found = {p: dict(self.state.get(p, {})) for p in self._parameters()}
        for state in found.values():
            for name in _OF_THIS_RANK:
                state.pop(name, None)
        with torch.no_grad():
            for mean in self._means:
                mean.save_mean(found, self._op)
        counters: dict[str, int] = {
            f"{index}_{name}": value
            for index, group in enumerate(self.param_groups)
            for name, value in group.items()
            if name in _COUNTERS
        }
        if self._means:
            counters[_OWED] = 1
        return found, counters

    def tensors_to_load(self, owing: bool) -> tuple[dict[nn.Parameter, dict[str, Any]], object]:
        """Return tensors to read a checkpoint into, by parameter, and the owners of some of them.

        Args:
            owing: whether the checkpoint has compression errors.

        Returns:
            The state of each parameter, and the `holders` for `load_checkpoint_state`. The
            optimizer does not change before that call.
        """
        found = {p: dict(self.state.get(p, {})) for p in self._parameters()}
        if not owing:
            return found, []
        made, frozen, means = self._made, self._frozen, self._means
        try:
            self._made = []
            if [e.number for e in self._entries()] != [e.number for e in made]:
                self._means = []
            for mean in self._flat_means():
                for entry, error in mean.by_entry(mean.worker_N):
                    found[entry.parameter]["owed"] = error
            return found, self._means
        finally:
            self._made, self._frozen, self._means = made, frozen, means

    def load_checkpoint_state(
        self,
        states: dict[nn.Parameter, dict[str, Any]],
        counters: Mapping[str, int],
        holders: Any = None,
    ) -> None:
        """Continue from the result of `checkpoint_state`; the mean error becomes each rank's error.

        Args:
            states: states of the parameters; their tensors are kept, not copied.
            counters: see `checkpoint_state`.
            holders: owners of some of the tensors, from `tensors_to_load`.
        """
        numbers = {p: i for i, p in enumerate(self._parameters())}
        saved = {**super().state_dict(), "state": {numbers[p]: s for p, s in states.items()}}
        for index, group in enumerate(saved["param_groups"]):
            for name in _COUNTERS & group.keys():
                group[name] = counters.get(f"{index}_{name}", group[name])
            group[_OWED] = _OWED in counters
        self._load_state_of_all(saved, copy=False, means=holders)

    def _load_state_of_all(
        self, saved: dict[str, Any], *, copy: bool = True, means: Any = None
    ) -> None:
        """Continue from this rank's part of a state of all ranks, or from a state of Adam."""
        # One group with the flag decides for all groups, because all ranks must take the next step
        # in the same way.
        compressed = any(group.get(_OWED, False) for group in saved["param_groups"])
        if compressed and not any(saved["state"].values()):
            raise ValueError(
                f"{self._op}: expected a state of compressed steps to have moments, got none; "
                "torch's get_optimizer_state_dict has nothing to load into before the first step "
                "while parameters have gradients: call zero_grad first"
            )
        groups = [{k: v for k, v in g.items() if k != _OWED} for g in saved["param_groups"]]
        with _unchanged_if_it_fails(self):
            self._load_shared({**saved, "param_groups": groups}, copy=copy)
            self._means = list(means or ())
            by_number = {entry.number: entry for entry in self._entries()}
            for mean in self._means:
                mean.entries = [by_number[entry.number] for entry in mean.entries]
            for mean in self._flat_means() if compressed else ():
                mean.load_mean(saved["state"])

    def _load_shared(self, state_dict: dict[str, Any], *, copy: bool = True) -> None:
        """Load everything but the compression errors."""
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        private = ["worker_error", "touched_rows", "owed"]
        if state_dict.get("compression", {}).get("block", self._block) != self._block:
            # `block_sq` has means per block of another size, so the growth of gradients is measured
            # again.
            private += ["block_sq", "looks"]
        plain = {
            index: {key: value for key, value in state.items() if key not in private}
            for index, state in state_dict["state"].items()
        }

        def kept(parameter: Tensor, group: dict[str, Any], name: str, value: Any) -> Any:
            is_count = isinstance(value, Tensor) and not value.dtype.is_floating_point
            if name == "step" or (is_count and value.dim() == 0):
                return int(value)
            if not isinstance(value, Tensor):
                return self.state[parameter][name]
            # States keep at least float32, also for parameters of 16 bits.
            dtype = torch.promote_types(value.dtype, torch.float32)
            return local_part(value.detach()).to(parameter.device, dtype, copy=copy)

        self._load_uncast({**state_dict, "state": plain}, kept)
        for group, mask in zip(self.param_groups, masks, strict=True):
            # Optimizers of torch and DeepSpeed count steps in the state of each parameter instead.
            steps = [self.state[p].get("step", 0) for p in group["params"] if p in self.state]
            group.setdefault("step", int(max(steps, default=0)))
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._made, self._means = [], []
        self._entries()
        # A rank that alone has loaded a state would send other messages than the rest. Ranks
        # compare this flag before the next step, and raise on a difference.
        self._compared = False


def _all_options(optimizer: CompressedOptimizer) -> dict[str, object]:
    """Return the options that must be equal on all ranks; lists have one value per group."""
    groups = optimizer.param_groups
    found: dict[str, object] = {name: [g[name] for g in groups] for name in optimizer._options}
    found["lr"] = [float(group["lr"]) for group in groups]
    found["betas"] = [tuple(group["betas"]) for group in groups]
    found["non_freeze"] = [bool(group.get("non_freeze", False)) for group in groups]
    found["block"] = optimizer._block
    found["communication_data_type"] = optimizer._wire_dtype
    return found | {name.lstrip("_"): getattr(optimizer, name) for name in optimizer._settings}


@contextlib.contextmanager
def _unchanged_if_it_fails(optimizer: CompressedOptimizer) -> Iterator[None]:
    names = ("state", "param_groups", "_made", "_frozen", "_means")
    kept = {name: getattr(optimizer, name) for name in names}
    try:
        yield
    except BaseException:
        vars(optimizer).update(kept)
        raise


def _places(common: ProcessGroup | None, ranks: ProcessGroup | None) -> list[int]:
    """Return the positions of a parameter group's ranks among all ranks of the optimizer."""
    if common is None or ranks is None:
        return [group_rank(common)]
    places = {rank: place for place, rank in enumerate(group_ranks(common))}
    return [places[rank] for rank in group_ranks(ranks) if rank in places]
