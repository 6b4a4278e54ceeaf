"""Registers the gradients of operators: by their derivatives, or by a formula in Python.

Derivatives are calls of other operators, and run in C++ (`csrc/runtime/autograd.cpp`) if there is a
`_runtime` for this torch. A formula is recorded as by `torch.library.register_autograd`, but in
fewer steps: torch's helper packs and unpacks each call in Python, which takes longer than a small
kernel. The private functions of torch that this needs are used in this file alone. If a version of
torch lacks one of them, torch's helper is used.
"""

import ast
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from moe_ext import _runtime_library

Formula = Callable[..., Any]

_PRIVATE = ("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_any_requires_grad")
# A registration lasts as long as its library object.
_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")


# Functions of arguments in the text of a derivative. `_OF_TENSORS` are applied in the backward pass
# to a saved tensor. `_TO_VALUES` are applied when the call is recorded, and only their value is
# saved.
_OF_TENSORS: dict[str, Callable[[Tensor], Tensor | bool]] = {
    "": lambda t: t,
    "contiguous": lambda t: t.contiguous(),
    "transpose": lambda t: t.transpose(1, 2),
    "owned": lambda t: False,
}
_TO_VALUES: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "columns": lambda t: t.shape[1],
    "dtype": lambda t: t.dtype,
    "is_transposed": lambda t: t.stride(1) == 1 and t.stride(2) != 1,
}


def register_derivatives(
    operator: str,
    derivatives: dict[str, str],
    *,
    given: tuple[str, dict[str, str]] | None = None,
) -> None:
    """Registers the derivatives of an operator of ours.

    A derivative is written as a call, `"_backward(grad_y, contiguous(x), dtype(weight))"`, of an
    operator of ours. The call names arguments and results of the forward operator as the schema
    does. A sole result is `result`, and `grad_` before the name of a result is its gradient.
    Arguments may be passed through a function: `contiguous`, `transpose` (of the last two of three
    dimensions), `columns` (the size of dimension 1), `dtype`, or `is_transposed` (a stack of
    matrices whose columns are stored one after the other). `owned` of an earlier argument is True
    if nobody reads that argument afterwards, so that the call may overwrite it or give its pages
    back; in Python it is False. Results without a gradient in any derivative are not
    differentiable. If no gradient comes for a result, an optional argument is None, and any other
    argument is zeros. To differentiate a call of an operator without derivatives is an error.

    Beside the operator of a derivative of one argument, there may be an operator `<name>_add_`. If
    the argument is a parameter with a `.grad`, this operator adds the gradient to `.grad` at once,
    instead of the autograd engine. This happens only in `backward()`, and only if no hook needs to
    see the gradient by itself.

    Args:
        operator: its name, without the namespace.
        derivatives: maps the names of arguments, separated by commas, to the call that returns
            their gradients.
        given: name of an argument, and the derivatives to use if it is not None.
    """
    schema = getattr(torch.ops.moe_ext, operator).default._schema
    table = _Positions.read(schema, derivatives)
    names = [a.name for a in schema.arguments]
    second = None if given is None else (names.index(given[0]), _Positions.read(schema, given[1]))
    module = _runtime_library.load()
    if module is not None:
        module.register_derivatives(operator, table, second)
        return

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        is_given = second is not None and inputs[second[0]] is not None
        ctx.table = second[1] if second is not None and is_given else table
        ctx.table.keep(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.table.differentiate(ctx, grads, len(names))

    register_autograd(f"moe_ext::{operator}", backward, setup_context=setup_context)


class _Derivative(NamedTuple):
    operator: str
    # Places in `_Positions.inputs`.
    inputs: list[int]
    # "grad", "tensor" or "value"; the number of that gradient, tensor or value; a function of it.
    arguments: list[tuple[str, int, str]]

    def takes_none(self) -> bool:
        """Return True if the operator takes None for the gradients of some results."""
        schema = getattr(torch.ops.moe_ext, self.operator).default._schema.arguments
        kinds = zip(schema, self.arguments, strict=False)
        return any(kind == "grad" and "Optional" in str(a.type) for a, (kind, *_) in kinds)


class _Positions(NamedTuple):
    """Derivatives with positions for names, arguments before results. C++ reads it, too."""

    # Arguments with a gradient.
    inputs: list[int]
    # Tensors to save.
    tensors: list[tuple[int, str]]
    # Arguments or results of which a value is saved, and the function that makes the value.
    values: list[tuple[int, str]]
    # For each result, True if it is differentiable.
    differentiable: list[bool]
    derivatives: list[_Derivative]

    @classmethod
    def read(cls, schema: Any, derivatives: dict[str, str]) -> "_Positions":
        arguments, results = schema.arguments, schema.returns
        names = [a.name for a in arguments] + [r.name or "result" for r in results]
        are_tensors = ["Tensor" in str(a.type) for a in arguments] + [True] * len(results)
        table = cls([], [], [], [False] * len(results), [])
        for inputs, text in derivatives.items():
            edges = range(len(table.inputs), len(table.inputs) + inputs.count(",") + 1)
            table.inputs.extend(names.index(name.strip()) for name in inputs.split(","))
            call: Any = ast.parse(text, mode="eval").body
            found = []
            for node in call.args:
                function, name = (
                    (node.func.id, node.args[0].id) if hasattr(node, "func") else ("", node.id)
                )
                if name not in names:
                    place = names.index(name.removeprefix("grad_"), len(arguments)) - len(arguments)
                    table.differentiable[place] = True
                    found.append(("grad", place, function))
                    continue
                place = names.index(name)
                if are_tensors[place] and function in _OF_TENSORS:
                    kept, kind, entry = table.tensors, "tensor", (place, "")
                else:
                    kept, kind, entry = table.values, "value", (place, function)
                    function = ""
                if entry not in kept:
                    kept.append(entry)
                found.append((kind, kept.index(entry), function))
            table.derivatives.append(_Derivative(call.func.id, list(edges), found))
        return table

    def keep(self, ctx: Any, inputs: Any, output: Any) -> None:
        """Save the tensors that the derivatives will read, and nothing else."""
        outputs = output if isinstance(output, tuple) else (output,)
        pairs = zip(outputs, self.differentiable, strict=True)
        ctx.mark_non_differentiable(*[t for t, differentiable in pairs if not differentiable])
        ctx.set_materialize_grads(not any(d.takes_none() for d in self.derivatives))
        everything = (*inputs, *outputs)
        read = {
            index
            for derivative in self.derivatives
            if any(_needs(ctx, self.inputs[i]) for i in derivative.inputs)
            for kind, index, _ in derivative.arguments
            if kind == "tensor"
        }
        ctx.save_for_backward(
            *[everything[at] if i in read else None for i, (at, _) in enumerate(self.tensors)]
        )
        ctx.calls = [_callable(derivative.operator) for derivative in self.derivatives]
        ctx.values = [_TO_VALUES[function](everything[at]) for at, function in self.values]

    def differentiate(
        self, ctx: Any, grads: tuple[Any, ...], num_arguments: int
    ) -> tuple[Any, ...]:
        """Return the gradients of all arguments."""
        kept = {"grad": grads, "tensor": ctx.saved_tensors, "value": ctx.values}
        result: list[Any] = [None] * num_arguments
        for derivative, call in zip(self.derivatives, ctx.calls, strict=True):
            places = [self.inputs[i] for i in derivative.inputs]
            given = [grads[i] for kind, i, _ in derivative.arguments if kind == "grad"]
            if not any(_needs(ctx, at) for at in places) or all(grad is None for grad in given):
                continue
            taken = [kept[kind][i] for kind, i, _ in derivative.arguments]
            functions = [_OF_TENSORS[function] for _, _, function in derivative.arguments]
            found = call(*[f(value) for f, value in zip(functions, taken, strict=True)])
            for at, grad in zip(places, found if len(places) > 1 else (found,), strict=True):
                # An argument that is None has no gradient, whatever the call returns for it.
                result[at] = grad if _needs(ctx, at) else None
        return tuple(result)


def _needs(ctx: Any, argument: int) -> bool:
    # `needs_input_grad` has no entry for an argument that was left out.
    return any(ctx.needs_input_grad[argument : argument + 1])


@functools.cache
def _callable(operator: str) -> Formula:
    """Return an operator. If it has no derivatives, to differentiate its result is an error."""
    if _C._dispatch_has_kernel_for_dispatch_key(f"moe_ext::{operator}", "Autograd"):
        return getattr(torch.ops.moe_ext, operator).default
    return once_differentiable(f"moe_ext::{operator}")


def register_autograd(name: str, backward: Formula, *, setup_context: Formula) -> None:
    """Registers a formula as `torch.library.register_autograd` does, for one of our operators.

    Args:
        name: name of the operator, with its namespace. The operator must have no lists of tensors
            as arguments or results, and no keyword-only arguments.
        backward: takes the context and a gradient for each result, returns one for each argument.
        setup_context: takes the context, all arguments (defaults filled in) and the results.
    """
    namespace, operator_name = name.split("::")
    operator = getattr(getattr(torch.ops, namespace), operator_name).default
    if not all(hasattr(_C, private) for private in _PRIVATE):
        torch.library.register_autograd(name, backward, setup_context=setup_context)
        return
    kernel = _autograd_kernel(operator, backward, setup_context)
    _LIBRARY.impl(operator_name, kernel, "Autograd", with_keyset=True)


# Returns True inside a transform of `torch.func`. The name stands for torch's C function itself,
# because every pass calls it and a wrapper in Python would take time.
is_transformed = _C._are_functorch_transforms_active


def transforms() -> list[str]:
    """Return names of the active transforms of `torch.func`, such as "grad", outermost first."""
    return [level.key().name.lower() for level in _C._functorch.get_interpreter_stack() or ()]


class _SecondDerivative(torch.autograd.Function):
    """Returns results as they are. To differentiate them raises an error."""

    # `torch.func` needs this, because it records every gradient as if it were to be differentiated
    # again.
    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, num_results: int, *tensors: Any) -> tuple[Tensor, ...]:
        return tensors[:num_results]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operator = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            f"{ctx.operator}: expected the result to be differentiated once, got a second "
            "derivative"
        )


def once_differentiable(name: str) -> Formula:
    """Return the operator of a backward formula. To differentiate its result raises an error.

    torch alone would leave this term out of a second derivative, and warn. torch's
    `once_differentiable` raises an error for derivatives by the result's gradient alone, and would
    still leave out those by the saved tensors.

    Args:
        name: name of the operator, `moe_ext::_<name of the forward operator>_backward...`.
    """
    operator_name = name.split("::")[1]
    operator = getattr(torch.ops.moe_ext, operator_name).default
    forward_name = operator_name.removeprefix("_").partition("_backward")[0]

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return operator(*args)
        with torch.no_grad():
            result = operator(*args)
        results = result if isinstance(result, tuple) else (result,)
        passed: Any = _SecondDerivative.apply(forward_name, len(results), *results, *args)
        return passed if isinstance(result, tuple) else passed[0]

    return call


def refuse_second_derivative(name: str) -> Callable[[Formula], Formula]:
    """Decorates the `backward` of an `autograd.Function` as `once_differentiable` does an operator.

    Args:
        name: name of the differentiated function, for the error.
    """

    def decorate(backward: Formula) -> Formula:
        @functools.wraps(backward)
        def call(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            if not torch.is_grad_enabled():
                return tuple(backward(ctx, *grads))
            with torch.no_grad():
                result = list(backward(ctx, *grads))
            given = [i for i, grad in enumerate(result) if grad is not None]
            results = [result[i] for i in given]
            # Inputs that were not saved cannot be reached from here. The tensor of zeros stands for
            # them.
            others = (*ctx.saved_tensors, *grads, torch.zeros((), requires_grad=True))
            passed = _SecondDerivative.apply(name, len(given), *results, *others)
            for i, grad in zip(given, passed, strict=True):
                result[i] = grad
            return tuple(result)

        return call

    return decorate


def _refuse_tangents(operator: str, args: tuple[Any, ...]) -> None:
    """Raise an error for tangents, as derivatives in C++ do; torch would leave tangents out."""
    tensors = (x for x in args if isinstance(x, Tensor))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{operator}: expected reverse-mode gradients alone, got a tangent of forward mode"
        )


def _autograd_kernel(operator: Any, backward: Formula, setup_context: Formula) -> Formula:
    """Return a kernel for the Autograd key, which records the call if a gradient is wanted."""
    below_autograd, after_autograd = _C._AutoDispatchBelowAutograd, _C._after_autograd_keyset
    is_grad_enabled, any_requires_grad = _C.is_grad_enabled, _C._any_requires_grad
    redispatch = operator.redispatch
    # The dispatcher leaves out trailing arguments that are equal to their defaults.
    arguments = operator._schema.arguments
    defaults = tuple(a.default_value if a.has_default_value() else None for a in arguments)

    def forward(ctx: Any, *args_and_keys: Any) -> Any:
        *args, keys = args_and_keys
        with below_autograd():
            result = redispatch(keys & after_autograd, *args)
        setup_context(ctx=ctx, inputs=(*args, *defaults[len(args) :]), output=result)
        return result

    def backward_with_keys(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(operator._opname, grads)
        needs_input_grad = ctx.needs_input_grad
        ctx.needs_input_grad = needs_input_grad[:-1]
        try:
            result = backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs_input_grad
        return (*result, None) if isinstance(result, tuple) else (result, None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_with_keys)}
    name = f"{operator._opname}_autograd"
    record = type(name, (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]
    # `torch.func` calls a kernel once for each of its transforms, with the tensors of that
    # transform.
    record_at_level = type(name, (_SingleLevelFunction,), methods).apply  # type: ignore[attr-defined]

    def kernel(keys: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(operator._opname, args)
        if is_grad_enabled() and any_requires_grad(*args):
            if is_transformed():
                if transforms().count("grad") > 1:
                    raise RuntimeError(
                        f"{operator._opname}: expected the result to be differentiated once, got "
                        "a second derivative by torch.func"
                    )
                with enable_single_level_autograd_function():
                    return record_at_level(*args, keys)
            return record(*args, keys)
        with below_autograd():
            return redispatch(keys & after_autograd, *args)

    return kernel
