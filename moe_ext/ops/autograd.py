"""Registers the autograd formula of an operator, at less cost a call than torch's own helper.

`torch.library.register_autograd` packs and unpacks each recorded call in Python, which takes longer
than a small kernel. What is here does the same by fewer steps, with private functions of torch that
are used in this file alone; where a version of torch lacks one of them, torch's helper serves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor

Formula = Callable[..., Any]

_PRIVATE = ("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_any_requires_grad")
# A registration lasts as long as its library object.
_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")


def register_autograd(name: str, backward: Formula, *, setup_context: Formula) -> None:
    """Registers a formula as `torch.library.register_autograd` does, for one of our operators.

    Args:
        name: of the operator, with its namespace; neither its arguments nor its results are lists
            of tensors, and no argument is keyword-only.
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


class _SecondDerivative(torch.autograd.Function):
    """Passes results on; an error is all there is to their gradient."""

    @staticmethod
    def forward(ctx: Any, name: str, num_results: int, *tensors: Any) -> tuple[Tensor, ...]:
        ctx.operator = name
        return tensors[:num_results]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            f"{ctx.operator}: expected the result to be differentiated once, got a second "
            "derivative"
        )


def once_differentiable(name: str) -> Formula:
    """The operator of a formula that has no formula itself: to differentiate it again is an error.

    Torch leaves such a term out and warns. Its `once_differentiable` refuses a gradient of the
    result's gradient alone, and would still leave out what comes by the saved tensors.

    Args:
        name: of the operator, `moe_ext::_<name of the forward operator>_backward...`.
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
        name: of what is differentiated, for the error.
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
            # Inputs that were not saved are on no path from here: the last one stands for them.
            others = (*ctx.saved_tensors, *grads, torch.zeros((), requires_grad=True))
            passed = _SecondDerivative.apply(name, len(given), *results, *others)
            for i, grad in zip(given, passed, strict=True):
                result[i] = grad
            return tuple(result)

        return call

    return decorate


def _autograd_kernel(operator: Any, backward: Formula, setup_context: Formula) -> Formula:
    """Kernel for the Autograd key: records the call where a gradient is wanted."""
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
        needs_input_grad = ctx.needs_input_grad
        ctx.needs_input_grad = needs_input_grad[:-1]
        try:
            result = backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs_input_grad
        return (*result, None) if isinstance(result, tuple) else (result, None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_with_keys)}
    function = type(f"{operator._opname}_autograd", (torch.autograd.Function,), methods)
    record = function.apply  # type: ignore[attr-defined]

    def kernel(keys: Any, *args: Any) -> Any:
        if is_grad_enabled() and any_requires_grad(*args):
            return record(*args, keys)
        with below_autograd():
            return redispatch(keys & after_autograd, *args)

    return kernel
