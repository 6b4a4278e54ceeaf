"""Base class of the optimizers, their common checks, and parameter names for error messages."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from moe_ext._checks import check_numbers, check_rule, refuse_copy
from moe_ext.comm.groups import group_ranks
from moe_ext.distributed.dtensor import is_dtensor
from moe_ext.distributed.placement import known_shard
from moe_ext.distributed.state_dict import SavesByParameter, take_states

_KNOWN_BACKENDS = ("nccl", "gloo", "mpi", "hccl", "compressed")
# Arguments of DeepSpeed's optimizers that are options of parameter groups.
_OF_GROUPS = ("lr", "bias_correction", "betas", "eps", "weight_decay", "max_grad_norm")
# Options for the computation of a step or the form of a state. An optimizer that lacks such an
# option ignores it instead of refusing it.
_HOW = {"foreach", "fused", "capturable", "per_expert", "float32_state"}
# Values that are accepted for an option which an optimizer lacks, because the optimizer always
# behaves so. Any other option that it lacks must be off.
_ALWAYS = {"bias_correction": True, "decoupled_weight_decay": True}
# Names of the constructor arguments of all optimizers of this package.
_own_options: set[str] = set()


@contextlib.contextmanager
def _hooks(optimizer: Optimizer, kind: str) -> Iterator[list[dict[int, Callable[..., Any]]]]:
    """Yield the pre- and post-hooks of a method, which torch does not run inside the context."""
    names = [f"_optimizer_{kind}_{when}_hooks" for when in ("pre", "post")]
    found = [vars(optimizer)[name] for name in names]
    vars(optimizer).update({name: OrderedDict() for name in names})
    try:
        yield found
    finally:
        vars(optimizer).update(zip(names, found, strict=True))


def saving(method: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Decorate a `state_dict` that adds to torch's, so that hooks run once, on the whole state."""

    @functools.wraps(method)
    def call(self: Optimizer) -> dict[str, Any]:
        with _hooks(self, "state_dict") as (before, after):
            for hook in before.values():
                hook(self)
            state = method(self)
            for hook in after.values():
                changed = hook(self, state)
                state = state if changed is None else changed
        return state

    return call


def loading(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a `load_state_dict` that gives torch a part, so that hooks get the whole state."""

    @functools.wraps(method)
    def call(self: Optimizer, state_dict: dict[str, Any], **options: Any) -> None:
        with _hooks(self, "load_state_dict") as (before, after):
            state_dict = dict(state_dict)
            for hook in before.values():
                changed = hook(self, state_dict)
                state_dict = state_dict if changed is None else changed
            method(self, state_dict, **options)
            for hook in after.values():
                hook(self)

    return call


class CheckedOptimizer(Optimizer):
    """Base of all optimizers here: refuses options that it would ignore.

    A parameter group or a state may have an option of another optimizer, such as ``maximize``. The
    option is ignored if it is off, and also if no optimizer has it: it is then the user's own.
    """

    # Name of the class, for error messages.
    _op = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._op = cls.__name__
        _own_options.update(_options(cls))

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self, SavesByParameter):
            # A copy would lack the process group and the buffers outside `state`.
            refuse_copy(self._op)
        return super().__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options.

        Raises:
            ValueError: an option or a parameter does not fit; nothing has changed.
        """
        self._check_groups([param_group])
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        for index, parameter in enumerate(group["params"]):
            problem = self._problem_of(parameter, group, label(group, number, index))
            if problem is not None:
                self.param_groups.pop()
                raise ValueError(f"{self._op}: {problem}")

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups, in the order of their numbers in a state."""
        return [p for group in self.param_groups for p in group["params"]]

    def _named(self) -> Iterator[tuple[nn.Parameter, int, str]]:
        """Yield each parameter, the number of its group, and its name for error messages."""
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield parameter, number, label(group, number, index)

    def _trained(self) -> list[Trained]:
        """Return the parameters that have a gradient, in order.

        Raises:
            TypeError: a gradient is not dense, or a parameter is not of a real floating-point type.
        """
        found = []
        for parameter, number, name in self._named():
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise TypeError(
                    f"{self._op}: expected gradients to be dense, got {grad.layout} for {name}"
                )
            if not parameter.is_floating_point():
                raise TypeError(
                    f"{self._op}: expected parameters to be real floating-point tensors, got "
                    f"{parameter.dtype} for {name}"
                )
            found.append(Trained(parameter, grad, self.param_groups[number], name))
        return found

    def _problem_of(self, parameter: Tensor, group: dict[str, Any], name: str) -> str | None:
        """Return the reason to refuse a parameter of a group, as text; None if it fits."""
        if "per_expert" in self.defaults and group["per_expert"] and parameter.dim() < 1:
            return (
                "expected parameters of a group with per_expert=True to have a first dimension of "
                f"experts, got shape {tuple(parameter.shape)} for {name}"
            )
        return None

    @loading
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state. Options that the state lacks keep their values.

        Raises:
            ValueError: the state has an option that this optimizer does not know, or one that is
                out of range, or another number of parameters; nothing has changed.
        """
        self._check_groups(state_dict["param_groups"])
        before = self.param_groups
        super().load_state_dict(take_states(self, state_dict))
        for group, old in zip(self.param_groups, before, strict=True):
            for name in self.defaults.keys() & old.keys():
                group.setdefault(name, old[name])

    def _load_uncast(
        self, saved: dict[str, Any], kept: Callable[[nn.Parameter, dict[str, Any], str, Any], Any]
    ) -> None:
        """Continue from a state, without torch's cast of tensors to the parameter's dtype.

        Args:
            saved: state that holds this rank's parts of tensors.
            kept: called with a parameter, its group, and a name and value of `saved`; returns the
                value to keep.
        """
        plain = {
            number: {k: v for k, v in state.items() if k == "step" or not isinstance(v, Tensor)}
            for number, state in saved["state"].items()
        }
        CheckedOptimizer.load_state_dict(self, {**saved, "state": plain})
        for group, old in zip(self.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], old["params"], strict=True):
                for name, value in saved["state"].get(number, {}).items():
                    self.state[parameter][name] = kept(parameter, group, name, value)

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for an option of parameter groups that does not fit; change nothing."""
        for given in groups:
            group = {**self.defaults, **given}
            for name in sorted((given.keys() - _HOW) & (_options_of_torch() | _own_options)):
                value, wanted = given[name], _ALWAYS.get(name, False)
                # torch adds "differentiable" to the defaults of every optimizer, so its presence
                # there does not mean that this optimizer has the option.
                if name in self.defaults and name != "differentiable":
                    continue
                if name == "decoupled_weight_decay" and not group.get("weight_decay"):
                    continue
                if value != wanted if wanted else value:
                    raise ValueError(
                        f"{self._op}: expected options of a parameter group to be those of "
                        f"{self._op}, got {name}={value}"
                    )
            arguments = type(self).__init__.__annotations__
            found = {n: arguments[n] for n in arguments.keys() & self.defaults.keys()}
            check_numbers(self._op, found, group, ["ns_steps"])
            self._check_options(group)

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError for options out of their range."""


def options_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options of parameter groups from the `locals()` of a constructor."""
    others = ("self", "params", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _options(cls: type[Optimizer]) -> set[str]:
    """Return the names of an optimizer's arguments, except `params`."""
    return {*inspect.signature(cls).parameters} - {"params", "defaults", "args", "kwargs"}


@functools.cache
def _options_of_torch() -> frozenset[str]:
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    return frozenset().union(*(_options(cls) for cls in classes if issubclass(cls, Optimizer)))


@dataclass(frozen=True)
class Trained:
    """A parameter that has a gradient, with its group and its name for error messages."""

    parameter: Tensor
    grad: Tensor
    group: dict[str, Any]
    label: str


def label(group: dict[str, Any], group_index: int, index: int) -> str:
    """Return the parameter's name if the optimizer was given names, else its place."""
    names = group.get("param_names")
    return repr(names[index]) if names else f"parameter {index} of group {group_index}"


def check_positive(op: str, options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options of these names are finite and at least 0."""
    for name in names:
        if not 0 <= float(options[name]) < float("inf"):
            raise ValueError(
                f"{op}: expected {name} to be at least 0 and finite, got {options[name]}"
            )


def check_range(op: str, options: Mapping[str, Any], low: str, high: str) -> None:
    """Raise ValueError unless option `low` is finite and at least 0, and `high` at least `low`."""
    check_positive(op, options, low)
    rule = f"at least {low} ({options[low]})"
    check_rule(op, high, options[high], rule, options[high] >= options[low])


def check_betas(op: str, betas: Sequence[float], name: str = "betas") -> None:
    """Raise ValueError unless `betas` are two numbers in [0, 1)."""
    rows = [beta for beta in betas if isinstance(beta, Tensor) and beta.dim()]
    if len(betas) != 2 or rows or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{op}: expected {name} to be two numbers in [0, 1), got {betas}")


def is_own_part(parameter: Tensor) -> bool:
    """Return True for a plain parameter, and for whole experts or columns of this rank.

    Experts or columns that FSDP2 shards further are not whole. A DTensor of another tool is refused
    too, because only that tool knows its shards.
    """
    place = known_shard(parameter)
    return not is_dtensor(parameter) or (place is not None and not place.is_managed(parameter))


def placed_alike(grad: Tensor, parameter: Tensor) -> bool:
    """Return True if a gradient is placed over ranks as its parameter is."""
    return getattr(grad, "placements", None) == getattr(parameter, "placements", None)


def divided_within(parameter: Tensor, group: ProcessGroup | None) -> bool:
    """Return True if ranks of a group hold different parts of a parameter."""
    if not is_dtensor(parameter) or group is None:
        return False
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    return len({*ranks} & {*group_ranks(group)}) > 1


def deepspeed_options(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options of parameter groups from arguments in the form of DeepSpeed's optimizers.

    Arguments about the transport are ignored with a warning, because the process group defines it.

    Raises:
        ValueError: amsgrad, which has no compressed form.
    """
    if given["amsgrad"]:
        raise ValueError(f"{op}: expected amsgrad to be False, got {given['amsgrad']}")
    backend = given["comm_backend_name"]
    for is_given, text in (
        (given["deepspeed"] is not None, "deepspeed is ignored"),
        (given["cuda_aware"], "cuda_aware is ignored: the group moves the data"),
        (backend not in _KNOWN_BACKENDS, f"comm_backend_name={backend!r} is ignored"),
    ):
        if is_given:
            warnings.warn(f"{op}: {text}", stacklevel=3)
    return {name: given[name] for name in _OF_GROUPS} | {"per_expert": False}
