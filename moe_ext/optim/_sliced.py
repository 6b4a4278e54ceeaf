"""Base of the optimizers that treat whole tensors or each expert alike, sharded or not.

A sharded parameter is a DTensor, of which each rank changes its local part; sums over the shards
are one all-reduce for all parameters of a mesh.

Shapes: G slices of a parameter that have a norm each: its experts on this rank, or one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._compile import outside_graphs
from moe_ext.comm.agreement import SummedOptions, told_option
from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import small_message_device
from moe_ext.comm.streams import has_streams
from moe_ext.distributed.dtensor import is_dtensor, local_part, sharding_groups
from moe_ext.distributed.placement import known_shard
from moe_ext.distributed.state_dict import take_states
from moe_ext.optim._arguments import (
    CheckedOptimizer,
    Trained,
    loading,
    loss_of,
    placed_alike,
)
from moe_ext.optim._saved_states import by_name
from moe_ext.optim._variance import roots

T = TypeVar("T")


class SlicedOptimizer(CheckedOptimizer, ABC):
    """Base of LAMB, LARS, Adafactor and Muon."""

    # Made by the first step, since copies of an optimizer begin without.
    _options: SummedOptions | None = None

    @loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; by the names of the parameters, where both have names.

        Moments of any type become those of this optimizer's ``float32_state``. Options that the
        state does not have, such as one of torch's optimizer, stay as they are.

        Raises:
            ValueError: the state is of parameters with other names or sizes, or has options that
                this optimizer does not know or that are out of range.
        """
        self.take_over(by_name(self._op, self.param_groups, state_dict), copy=True)

    @loading
    def take_over(self, state_dict: dict[str, Any], *, copy: bool = False) -> None:
        """Go on from a state as `load_state_dict` does, by the numbers of the parameters.

        Args:
            state_dict: of torch's form.
            copy: False keeps tensors that are of the right type.
        """
        saved = take_states(self, state_dict)
        groups = [
            {**old, "float32_state": mine["float32_state"]}
            for old, mine in zip(saved["param_groups"], self.param_groups, strict=False)
        ]
        groups += saved["param_groups"][len(groups) :]

        def kept(parameter: Tensor, group: dict[str, Any], name: str, value: Any) -> Any:
            if name == "step" or not isinstance(value, Tensor):
                return self.state[parameter][name]
            dtype = state_dtype(parameter, group)
            return value.detach().to(parameter.device, dtype, copy=copy)

        self._load_uncast({**saved, "param_groups": groups}, kept)

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            ValueError: ranks that hold other shards give other options, or one of them has no
                gradient, on all of them; parameters and moments are as before. On a device with
                streams a later step may tell.
            RankFailureError: a rank that holds other shards died or did not answer; parameters
                and moments are as before.
        """
        loss = loss_of(closure)
        trained = self._trained()
        for entry in trained:
            _check_placements(self._op, entry)
        if self._options is None:
            self._options = SummedOptions(self._op)
        parameters = [e.parameter for e in trained]
        per_expert = [e.group["per_expert"] for e in trained]
        slices = SliceNorms(parameters, per_expert, self._options, self._absent())
        options = options_of_groups(self.param_groups)
        if slices.absent:
            options["parameters without a gradient"] = [e.label for _, e in slices.absent]
        self._options.now = options
        everyone = slices.in_order(trained, [e for _, e in slices.absent])
        self._options.begin([self._exchanges_over(e) for e in everyone])
        weights = [local_part(e.parameter).to(state_dtype(e.parameter, e.group)) for e in trained]
        self._take_step(trained, weights, slices)
        for entry, weight in zip(trained, weights, strict=True):
            if weight.dtype != entry.parameter.dtype:
                local_part(entry.parameter).copy_(weight)
        return loss

    def _absent(self) -> list[tuple[int, Trained]]:
        """Parameters that other ranks hold parts of, without a gradient here.

        Messages have room for them, so that a rank that alone has none is heard of.
        """
        found, place = [], 0
        for parameter, number, name in self._named():
            if parameter.grad is not None:
                place += 1
            elif is_dtensor(parameter):
                entry = Trained(parameter, parameter, self.param_groups[number], name)
                if self._exchanges_over(entry):
                    found.append((place, entry))
        return found

    def _exchanges_over(self, entry: Trained) -> Sequence[ProcessGroup]:
        """Groups of the messages that a step sends for a parameter."""
        return sharding_groups(logical(entry.parameter))

    @abstractmethod
    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        """Change moments and weights: this rank's parts, of the type of the moments."""

    def _buffer(self, entry: Trained, name: str) -> Tensor:
        """This rank's part of a moment of a parameter, of zeros before its first step."""
        state, parameter = self.state[entry.parameter], entry.parameter
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=state_dtype(parameter, entry.group))
        return local_part(state[name])

    def _advance(self, entry: Trained) -> int:
        """Count a step of one parameter; its number."""
        state = self.state[entry.parameter]
        if "step" not in state:
            # On the host, as torch's optimizers keep it: reading it costs nothing. FakeTensorMode
            # follows the value of a constant.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        # Not in place: torch keeps the tensor of a loaded state, which another optimizer may have.
        state["step"] = state["step"] + 1
        return int(state["step"])

    def _adam_directions(
        self,
        entries: Sequence[Trained],
        betas: tuple[float, float],
        eps: float,
    ) -> list[Tensor]:
        """Adam's quotient of the moments of each parameter of a group, which are moved on."""
        steps = [self._advance(e) for e in entries]
        if not entries:
            return []
        corrects = entries[0].group.get("bias_correction", True)
        options = {"betas": betas, "eps": eps, "bias_correction": corrects}
        exp_avgs, exp_avg_sqs = (
            [self._buffer(e, name) for e in entries] for name in ("exp_avg", "exp_avg_sq")
        )
        grads = [local_grad(e) for e in entries]
        move_moments(exp_avgs, exp_avg_sqs, grads, betas)
        denominators = roots(options, exp_avg_sqs, steps)
        if corrects:
            torch._foreach_mul_(denominators, [1 - betas[0] ** step for step in steps])
        return list(torch._foreach_div(exp_avgs, denominators))

    @contextmanager
    def _unchanged_if_it_fails(
        self, trained: Sequence[Trained], slices: SliceNorms
    ) -> Iterator[None]:
        """Put the states of parameters back where a message to other ranks fails.

        Only slices that are cut need any; a copy of all states is kept meanwhile.
        """
        parameters = [entry.parameter for entry in trained]
        kept = {}
        if any(slices.groups):
            kept = {
                p: {name: (value, value.clone()) for name, value in self.state.get(p, {}).items()}
                for p in parameters
            }
        try:
            yield
        except BaseException:
            for parameter, state in kept.items():
                self.state.pop(parameter, None)
                for name, (value, before) in state.items():
                    self.state[parameter][name] = value.copy_(before)
            raise


def move_moments(
    firsts: list[Tensor], seconds: list[Tensor], grads: list[Tensor], betas: tuple[float, float]
) -> None:
    """Adam's running means of gradients and of their squares."""
    # A tensor would be taken for a row of a number for each parameter.
    beta1, beta2 = map(float, betas)
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)


def state_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Type of the moments of a parameter, and of its step before that is rounded."""
    if not group["float32_state"]:
        return parameter.dtype
    return torch.promote_types(parameter.dtype, torch.float32)


def local_grad(entry: Trained) -> Tensor:
    """This rank's part of a gradient, or its negative to maximize, in the type of the moments."""
    grad = local_part(entry.grad).to(state_dtype(entry.parameter, entry.group))
    return grad.neg() if entry.group["maximize"] else grad


def _check_placements(op: str, entry: Trained) -> None:
    """ValueError unless a parameter's shards can be summed and its gradient lies as they do."""
    parameter, grad, name = entry.parameter, entry.grad, entry.label
    if not is_dtensor(parameter):
        if is_dtensor(grad):
            raise ValueError(f"{op}: expected a plain gradient for {name}, got a DTensor")
        return
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(
            f"{op}: expected DTensor parameters to be sharded or replicated, got "
            f"{parameter.placements} for {name}"
        )
    if not placed_alike(grad, parameter):
        found = grad.placements if is_dtensor(grad) else "a plain tensor"
        raise ValueError(
            f"{op}: expected gradients to be placed as their parameters, "
            f"{parameter.placements}, got {found} for {name}"
        )


def sum_over_groups(
    parts: Sequence[Tensor], groups: Sequence[Sequence[ProcessGroup]]
) -> list[Tensor]:
    """Sum each part over its own groups, one all-reduce for all parts that share them.

    Args:
        parts: tensors of any shape; not changed.
        groups: for each part the groups to sum over, one after the other; none leaves it.

    Returns:
        The sums, in the dtype of the parts and the same bits on every rank.
    """
    sums = list(parts)
    fused: dict[tuple[object, ...], list[int]] = {}
    for index, (part, over) in enumerate(zip(parts, groups, strict=True)):
        if over:
            fused.setdefault((part.dtype, part.device, *over), []).append(index)
    for members in fused.values():
        flat = torch.cat([parts[index].reshape(-1) for index in members])
        for group in groups[members[0]]:
            all_reduce_(flat, group, operation="optimizer step")
        pieces = flat.split([parts[index].numel() for index in members])
        for index, piece in zip(members, pieces, strict=True):
            sums[index] = piece.view(parts[index].shape)
    return sums


def logical(parameter: Tensor) -> Tensor:
    """A tensor of the shape that one process has, and of the placements of its shards.

    Of an expert that is a module of its own it is this rank's: the DTensor holds those of others.
    """
    place = known_shard(parameter)
    return local_part(parameter) if place is not None and place.dim is None else parameter


def sum_with_options(
    parts: Sequence[Tensor],
    groups: Sequence[Sequence[ProcessGroup]],
    options: SummedOptions,
    over: Sequence[Sequence[ProcessGroup]] = (),
) -> list[Tensor]:
    """`sum_over_groups` of float64 numbers, with which the ranks compare options.

    Args:
        parts: tensors of any shape; not changed.
        groups: for each part the groups to sum over.
        options: what the ranks compare.
        over: further groups to compare over.

    Raises:
        ValueError: on every rank: options differ.
    """
    marked = [*dict.fromkeys(tuple(one) for one in (*groups, *over) if one)]
    marks: list[Tensor] = []
    if marked:
        device = parts[0].device if parts else small_message_device(marked[0][0])
        marks = [options.marks(torch.float64, device)] * len(marked)
    sums = sum_over_groups([*parts, *marks], [*groups, *marked])
    options.check(sums[len(parts) :], marked)
    return sums[: len(parts)]


def options_of_groups(groups: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Options of parameter groups by name, with a value for each group."""
    names = dict.fromkeys(name for group in groups for name in group)
    return {
        name: [_told_value(group.get(name)) for group in groups]
        for name in names
        if name not in ("params", "param_names")
    }


def _told_value(value: object) -> object:
    if isinstance(value, Tensor):
        # A rate, which a device would be waited for.
        return "a tensor" if has_streams(value.device) else value.tolist()
    return told_option("", value)[""]


class SliceNorms:
    """Norms of whole tensors, or of each expert of stacked ones, over all shards.

    Args:
        parameters: those of a step.
        per_expert: of each, whether its experts have norms of their own.
        options: what the ranks compare.
        absent: those without a gradient here, each with the number of trained ones before it.

    Attributes:
        absent: as given.
        groups: of each parameter, those over which parts of its slices are summed.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        per_expert: Sequence[bool],
        options: SummedOptions | None = None,
        absent: Sequence[tuple[int, Trained]] = (),
    ) -> None:
        self._parameters = parameters
        self._per_expert = per_expert
        self._options = options
        self.absent = absent
        self.groups = [*map(groups_of_slices, parameters, per_expert)]

    def in_order(self, values: Sequence[T], of_absent: Sequence[T]) -> list[T]:
        """Values of the trained parameters and of the absent ones, in the order of all."""
        found = [*values]
        for (place, _), value in zip(reversed(self.absent), reversed(of_absent), strict=True):
            found.insert(place, value)
        return found

    def norms(self, *families: Sequence[Tensor]) -> list[list[Tensor]]:
        """The norms of several local tensors per parameter, in one all-reduce per mesh.

        Args:
            families: lists of local parts, in the order of the parameters.

        Returns:
            For each family and parameter float64 norms: of this rank's experts, else ``[1]``.
        """
        squares = [self._local_squares(family) for family in families]
        empty = [_no_squares(entry) for _, entry in self.absent]
        parts = [square_G for family in squares for square_G in self.in_order(family, empty)]
        over = [groups_of_slices(e.parameter, e.group["per_expert"]) for _, e in self.absent]
        groups = self.in_order(self.groups, over) * len(families)
        if self._options is None:
            sums = sum_over_groups(parts, groups)
        else:
            sums = sum_with_options(parts, groups, self._options)
        left_out = {place + i for i, (place, _) in enumerate(self.absent)}
        count = len(self._parameters) + len(left_out)
        return [
            [sums[i * count + j].sqrt() for j in range(count) if j not in left_out]
            for i in range(len(families))
        ]

    def rates(
        self,
        rate_of: Sequence[Callable[[Tensor, Tensor], Tensor]],
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
    ) -> list[Tensor]:
        """Factors on updates: of each parameter a function of both norms of its slices."""
        norms = zip(rate_of, *self.norms(weights, updates), strict=True)
        return self.factors([of(weight_G, update_G) for of, weight_G, update_G in norms])

    def factors(self, values: Sequence[Tensor]) -> list[Tensor]:
        """A value for each slice, shaped to multiply with the local parts."""
        return [
            value_G.view(-1, *[1] * (parameter.dim() - 1)) if each else value_G.reshape(())
            for value_G, parameter, each in zip(
                values, self._parameters, self._per_expert, strict=True
            )
        ]

    def _local_squares(self, family: Sequence[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        whole: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(family):
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            if self._per_expert[i]:
                rows = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
                found[i] = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
            else:
                whole.setdefault(dtype, []).append(i)
        for dtype, members in whole.items():
            norms = torch._foreach_norm([family[i] for i in members], 2, dtype=dtype)
            found |= {i: norm.reshape(1) for i, norm in zip(members, norms, strict=True)}
        return [found[i].to(torch.float64).square() for i in range(len(family))]


def groups_of_slices(parameter: Tensor, per_expert: bool) -> list[ProcessGroup]:
    """Groups over which parts of the slices of a parameter are summed."""
    # Along dimension 0 a rank holds whole experts: nothing is summed over that.
    dims = range(1, parameter.dim()) if per_expert else None
    return sharding_groups(logical(parameter), dims)


def _no_squares(entry: Trained) -> Tensor:
    """The squares of a parameter without a gradient."""
    local = local_part(entry.parameter)
    return local.new_zeros(len(local) if entry.group["per_expert"] else 1, dtype=torch.float64)
