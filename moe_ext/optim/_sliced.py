"""Base class of the optimizers with norms per tensor or per expert, sharded or not.

A sharded parameter is a DTensor, of which each rank changes its local part. Sums over the shards
of all parameters of a mesh take one all-reduce.

Shapes: G slices of a parameter with one norm each: its experts on this rank, or the whole.
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

    # Created by the first step and not by the constructor, because a copy has no such attribute.
    _options: SummedOptions | None = None

    @loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state. Parameters are matched by name if both sides have names.

        Moments are cast to the dtype that this optimizer's ``float32_state`` demands. Options that
        the state lacks, for example because torch's optimizer saved it, keep their values.

        Raises:
            ValueError: the state is of parameters with other names or sizes, or has options that
                this optimizer does not know or that are out of range.
        """
        self.take_over(by_name(self._op, self.param_groups, state_dict), copy=True)

    @loading
    def take_over(self, state_dict: dict[str, Any], *, copy: bool = False) -> None:
        """Continue from a state as `load_state_dict` does, by the numbers of the parameters.

        Args:
            state_dict: state of torch's form.
            copy: False keeps tensors that already have the right dtype and device.
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
            The loss that the closure returned; None without a closure.

        Raises:
            ValueError: on all ranks with shards of the parameters: their options differ, or one of
                them lacks a gradient. Parameters and moments are as before. On a device with
                streams a later step may raise the error.
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
        """Return parameters without a gradient here, of which other ranks hold parts.

        Messages include zeros for such parameters. Otherwise lengths would differ between ranks if
        one of them lacks a gradient, and no error could name it.
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
        """Return the process groups of the messages that a step sends for a parameter."""
        return sharding_groups(logical(entry.parameter))

    @abstractmethod
    def _take_step(self, trained: list[Trained], weights: list[Tensor], slices: SliceNorms) -> None:
        """Update moments and weights: this rank's parts, in the dtype of the moments."""

    def _buffer(self, entry: Trained, name: str) -> Tensor:
        """Return this rank's part of a moment of a parameter; zeros at its first step."""
        state, parameter = self.state[entry.parameter], entry.parameter
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=state_dtype(parameter, entry.group))
        return local_part(state[name])

    def _advance(self, entry: Trained) -> int:
        """Count a step of one parameter and return the number of its steps."""
        state = self.state[entry.parameter]
        if "step" not in state:
            # The count is on the host, as in torch's optimizers, so that reading it does not wait
            # for a device. FakeTensorMode knows the value of `torch.tensor`, but not of `zeros`.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        # The addition is not in place: torch keeps the tensor of a loaded state, and another
        # optimizer may have loaded the same tensor.
        state["step"] = state["step"] + 1
        return int(state["step"])

    def _adam_directions(
        self,
        entries: Sequence[Trained],
        betas: tuple[float, float],
        eps: float,
    ) -> list[Tensor]:
        """Update the moments of a group's parameters and return Adam's directions."""
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
        """Restore the states of parameters if a message to other ranks fails.

        Without cut slices no message is sent, so states are copied only if a slice is cut.
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
    """Update Adam's running means of gradients and of their squares, in place."""
    # The foreach operators would take a tensor for a list with one number per parameter.
    beta1, beta2 = map(float, betas)
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)


def state_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Return the dtype of a parameter's moments, and of its step before rounding."""
    if not group["float32_state"]:
        return parameter.dtype
    return torch.promote_types(parameter.dtype, torch.float32)


def local_grad(entry: Trained) -> Tensor:
    """Return this rank's part of a gradient in the moments' dtype, negated to maximize."""
    grad = local_part(entry.grad).to(state_dtype(entry.parameter, entry.group))
    return grad.neg() if entry.group["maximize"] else grad


def _check_placements(op: str, entry: Trained) -> None:
    """Raise ValueError for a partial parameter, or a gradient placed unlike its parameter."""
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
    """Sum each part over its own groups; parts with the same groups share one all-reduce.

    Args:
        parts: tensors of any shape; not changed.
        groups: for each part the groups to sum over, one after the other; may be empty.

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
    """Return a tensor with the shape that a single process would have, and with its placements.

    If each expert is a module of its own, the DTensor joins the experts of all ranks. The result is
    then the local part, which is one whole expert.
    """
    place = known_shard(parameter)
    return local_part(parameter) if place is not None and place.dim is None else parameter


def sum_with_options(
    parts: Sequence[Tensor],
    groups: Sequence[Sequence[ProcessGroup]],
    options: SummedOptions,
    over: Sequence[Sequence[ProcessGroup]] = (),
) -> list[Tensor]:
    """Sum float64 numbers as `sum_over_groups` does, and compare options in the same messages.

    Args:
        parts: tensors of any shape; not changed.
        groups: for each part the groups to sum over.
        options: options that the ranks compare.
        over: further groups over which options are compared.

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
    """Return the options of parameter groups by name, with a value for each group."""
    names = dict.fromkeys(name for group in groups for name in group)
    return {
        name: [_told_value(group.get(name)) for group in groups]
        for name in names
        if name not in ("params", "param_names")
    }


def _told_value(value: object) -> object:
    if isinstance(value, Tensor):
        # Reading a learning rate on a device with streams would wait for the device.
        return "a tensor" if has_streams(value.device) else value.tolist()
    return told_option("", value)[""]


class SliceNorms:
    """Norms over all shards, of whole tensors or of each expert of stacked tensors.

    Args:
        parameters: trained parameters of a step.
        per_expert: for each parameter, whether each of its experts has its own norm.
        options: options that the ranks compare.
        absent: parameters without a gradient here, each with the number of trained parameters
            before it.

    Attributes:
        absent: as given.
        groups: for each parameter, the groups over which parts of its slices are summed.
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
        """Merge values of trained and of absent parameters in the order of all parameters."""
        found = [*values]
        for (place, _), value in zip(reversed(self.absent), reversed(of_absent), strict=True):
            found.insert(place, value)
        return found

    def norms(self, *families: Sequence[Tensor]) -> list[list[Tensor]]:
        """Compute norms of several local tensors per parameter, in one all-reduce per mesh.

        Args:
            families: lists of local parts, in the order of the parameters.

        Returns:
            For each family and parameter, float64 norms: one per expert of this rank, else ``[1]``.
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
        """Return factors on updates, from functions of each slice's weight and update norms."""
        norms = zip(rate_of, *self.norms(weights, updates), strict=True)
        return self.factors([of(weight_G, update_G) for of, weight_G, update_G in norms])

    def factors(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Reshape the values of slices so that they multiply the local parts."""
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
    """Return the groups over which parts of a parameter's slices are summed."""
    # Shards along dimension 0 hold whole experts, so their norms are not summed.
    dims = range(1, parameter.dim()) if per_expert else None
    return sharding_groups(logical(parameter), dims)


def _no_squares(entry: Trained) -> Tensor:
    """Return zeros in the place of the squares of a parameter without a gradient."""
    local = local_part(entry.parameter)
    return local.new_zeros(len(local) if entry.group["per_expert"] else 1, dtype=torch.float64)
