"""Kernels of other libraries for recurrences on CUDA, and rules for the calls that they take.

Libraries bring their own gradients, and are chosen above our operators, where the caller's dtype
and documents are still known. The environment variable `MOE_EXT_RECURRENCE` is "auto" or "own".
Before a library is first used for a kind of call, a small call is compared with our own operator,
gradients included.

Shapes: B batch, G groups, H heads, L positions, K dim of queries and keys, V dim of values, D
channels, W taps, N documents of all rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ext._trial import first_mistake
from moe_ext.attention.checks import refuse
from moe_ext.ops.autograd import is_transformed

CHOICES = {
    "auto": "the libraries that are installed, where they serve",
    "own": "ours",
}
CHOSEN = os.environ.get("MOE_EXT_RECURRENCE", "auto")
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stretch:
    """The positions of a recurrence, with facts that its tensors do not show.

    Attributes:
        documents: `[B or 1, L]`, see `local.delta_rule`. For a convolution, with those of its halo.
        edges: for each row of `documents` the first positions of documents and L, ascending from 0.
        dtype: dtype of the caller's values, to which outputs are rounded; None for that of the
            tensors.
        is_shared: True if other ranks continue with the state after the last position.
    """

    documents: Tensor | None = None
    edges: tuple[tuple[int, ...], ...] | None = None
    dtype: torch.dtype | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class Provider:
    """A function of a library.

    Attributes:
        package: package that users install.
        module: module that has the function.
        function: name of the function.
        takes: names of the arguments that are passed.
    """

    package: str
    module: str
    function: str
    takes: tuple[str, ...]


PROVIDERS = {
    "gated_delta_rule": Provider(
        "flash-linear-attention",
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"),
    ),
    "selective_scan": Provider(
        "mamba-ssm",
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        ("x", "dt", "A", "B", "C", "chunk_size", "initial_states", "seq_idx")
        + ("return_final_states",),
    ),
    "selective_scan by element": Provider(
        "mamba-ssm",
        "mamba_ssm.ops.selective_scan_interface",
        "selective_scan_fn",
        ("u", "delta", "A", "B", "C", "return_last_state"),
    ),
    "causal_conv1d": Provider(
        "causal-conv1d",
        "causal_conv1d",
        "causal_conv1d_fn",
        ("x", "weight", "bias", "seq_idx", "activation"),
    ),
}


class Asked(NamedTuple):
    """A call of an operator, as the rules get it."""

    values: Tensor
    dtype: torch.dtype
    given: Mapping[str, Tensor | None]
    stretch: Stretch


# Reasons why our own kernels take a call, with their conditions: first those for all operators,
# then those for some or one of them.
_ALWAYS: dict[str, Callable[[Asked], bool]] = {
    "not on CUDA": lambda call: not on_cuda(call.values),
    "no elements": lambda call: call.values.numel() == 0,
    "a transform of torch.func, torch.compile or a subclass of Tensor": lambda call: (
        type(call.values) is not Tensor or torch.compiler.is_compiling() or is_transformed()
    ),
    "deterministic algorithms": lambda _: torch.are_deterministic_algorithms_enabled(),
}
_NARROW: dict[str, Callable[[Asked], bool]] = {
    "not of 16 bits: it multiplies float32 in TF32": lambda call: call.dtype not in _HALVES,
    "a state of more than 256 rows": lambda call: _size(call, "k", "B") > 256,
}
RULES: dict[str, dict[str, Callable[[Asked], bool]]] = {
    "gated_delta_rule": {
        "no beta": lambda call: call.given["beta"] is None,
        "a decay by element of a key": lambda call: _of(call, "g").dim() == 4,
        **_NARROW,
    },
    "selective_scan": _NARROW,
    "selective_scan by element": {
        "float64": lambda call: call.dtype == torch.float64,
        "a state to begin with": lambda call: call.given["state"] is not None,
        "packed documents": lambda call: call.stretch.documents is not None,
        "a state that ranks take on: it has no gradient": lambda call: call.stretch.is_shared,
        "a state of more than 128 rows": lambda call: _size(call, "B") > 128,
    },
    "causal_conv1d": {
        "float64": lambda call: torch.float64 in (call.dtype, _of(call, "weight").dtype),
        "other than 2 to 4 taps": lambda call: not 2 <= _size(call, "weight") <= 4,
        "packed documents of channels that are no multiple of 8": lambda call: (
            call.stretch.documents is not None and call.values.shape[1] % 8 > 0
        ),
    },
}


def on_cuda(x: Tensor) -> bool:
    """True if x is on a device that the libraries support."""
    return x.is_cuda


def _of(call: Asked, name: str) -> Tensor:
    found = call.given[name]
    assert found is not None
    return found


def _size(call: Asked, *names: str) -> int:
    """Size of the last dimension of the argument with one of the names."""
    return next(_of(call, name).shape[-1] for name in names if name in call.given)


def own_reason(operator: str, call: Asked) -> str:
    """Reason why our own kernels take a call with any library, or "" if there is none."""
    rules = (*_ALWAYS.items(), *RULES[operator].items())
    return next((reason for reason, holds in rules if holds(call)), "")


def serve(
    operator: str,
    own: Callable[..., Any],
    given: Mapping[str, Tensor | None],
    stretch: Stretch,
    **options: Any,
) -> Any:
    """Run a call with a library if possible, else with our own function.

    Args:
        operator: name of an entry of `PROVIDERS`.
        own: our own function, with the same arguments.
        given: tensors by name.
        stretch: the positions.
        options: further arguments of the operator.

    Raises:
        ValueError: the choice is unknown.
    """
    if CHOSEN not in CHOICES:
        refuse(operator, "MOE_EXT_RECURRENCE", f"one of {', '.join(CHOICES)}", repr(CHOSEN))
    values = given["v"] if "v" in given else given["x"]
    assert values is not None
    call = Asked(values, stretch.dtype or values.dtype, given, stretch)
    is_served = (
        CHOSEN == "auto"
        and not own_reason(operator, call)
        and not isinstance(load(operator), str)
        and not _fault(operator, own, call, options)
    )
    if not is_served:
        return own(**given, stretch=stretch, **options)
    return _call(operator, own, given, stretch, options)


def _call(
    operator: str,
    own: Callable[..., Any],
    given: Mapping[str, Tensor | None],
    stretch: Stretch,
    options: Mapping[str, Any],
) -> Any:
    """Run a call with a library. A state without a gradient gets the gradient of our function."""
    found = _CALLS[operator](load(operator), **given, stretch=stretch, **options)
    if operator != "selective_scan by element":
        return found
    names = [name for name, x in given.items() if x is not None]
    absent = dict.fromkeys(given)

    def again(*tensors: Tensor) -> Tensor:
        state: Tensor = own(
            **{**absent, **dict(zip(names, tensors, strict=True))}, stretch=stretch, **options
        )[1]
        return state

    out, last = found
    return out, _WithGradient.apply(last.detach(), again, *(given[name] for name in names))


@functools.cache
def load(operator: str) -> Any:
    """The function of a library, or the reason why it cannot be used. Cached."""
    provider = PROVIDERS[operator]
    if not _is_installed(provider):
        return "not installed"
    try:
        function = getattr(importlib.import_module(provider.module), provider.function)
        known = _arguments(function)
    # The import of a library may compile code or ask for a device, and raise any error.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    lacks = [name for name in provider.takes if name not in known]
    return f"{provider.function} takes no {', '.join(lacks)}" if lacks else function


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a function, cached."""
    return frozenset(inspect.signature(function).parameters)


def _is_installed(provider: Provider) -> bool:
    try:
        return importlib.util.find_spec(provider.module.partition(".")[0]) is not None
    # `find_spec` raises ValueError for an imported module without a specification.
    except ValueError:
        return True


def state() -> str:
    """Text of `info` on the choice of libraries. Without a device no library is loaded."""
    if CHOSEN not in CHOICES:
        return f"{CHOSEN!r}, which is none of {', '.join(CHOICES)}"
    parts = [f"{CHOSEN}: {CHOICES[CHOSEN]}"]
    for operator, provider in PROVIDERS.items() if CHOSEN == "auto" else ():
        if _is_installed(provider):
            found = load(operator) if torch.cuda.is_available() else "on CUDA alone"
            said = f" ({found})" if isinstance(found, str) else ""
            parts.append(f"{operator} by {provider.package}{said}")
    passed = sorted({f"{key[0]} passed over: {why}" for key, why in faults.items() if why})
    return "; ".join([*parts, *passed, "MOE_EXT_RECURRENCE chooses"])


# Operator and kind of call to the mistake that the trial found, or "".
faults: dict[tuple[object, ...], str] = {}
# Largest relative error in a trial. Rounding to 16 bits stays far below, wrong results far above.
_MOST_ERROR = 0.05
# Dimensions of the arguments. P is W - 1, and R is 1 or K.
_SHAPES = {
    **{"q": "BGLK", "k": "BGLK", "v": "BHLV", "g": "BHL", "beta": "BHL", "state": "BHKV"},
    **{"dt": "BHL", "A": "HR", "B": "BGLK", "C": "BGLK", "D": "BDL"},
    **{"weight": "DW", "bias": "D", "halo": "BDP"},
}
# Positions of a trial, and edges of its documents.
_LENGTH, _EDGES = 80, (0, 30, 80)


def _fault(operator: str, own: Callable[..., Any], call: Asked, options: Any) -> str:
    """The mistake of a library for calls of this kind, or "". The first call tries the library.

    NOTE: device-to-host sync, at the first call of a kind.
    """
    sizes = {"B": 2, "G": 1, "H": 2, "L": _LENGTH, "D": 8}
    for name, x in call.given.items():
        if x is not None:
            letters = _letters(operator, name)
            sizes |= {d: n for d, n in zip(letters, x.shape, strict=True) if d not in "BGHLD"}
    kinds = tuple(None if x is None else x.dtype for x in call.given.values())
    is_packed = call.stretch.documents is not None
    kind = (call.dtype, *kinds, is_packed, *sorted(sizes.items()), *options.items())
    key = (operator, call.values.device, *kind)
    if key not in faults:
        if call.values.is_cuda and torch.cuda.is_current_stream_capturing():
            return "not tried before a capture"
        is_known = any(why for (of, *_), why in faults.items() if of == operator)
        # The trial runs in another thread, because modes, hooks of saved tensors and recomputation
        # of the caller apply to its own thread only.
        with ThreadPoolExecutor(1) as apart:
            faults[key] = apart.submit(_try, operator, own, call, sizes, options).result()
        if faults[key] and not is_known:
            warnings.warn(
                f"{operator}: {PROVIDERS[operator].package} is passed over, and our kernels "
                f"serve: {faults[key]}",
                RuntimeWarning,
                stacklevel=2,
            )
    return faults[key]


def _letters(operator: str, name: str) -> str:
    return "BDL" if (operator, name) == ("causal_conv1d", "x") else _SHAPES.get(name, "BHLV")


def _try(
    operator: str, own: Callable[..., Any], call: Asked, sizes: dict[str, int], options: Any
) -> str:
    """Run a small call, and return the mistake in its results and gradients, or ""."""
    # A generator of its own leaves the user's random state alone.
    generator, device = torch.Generator().manual_seed(0), call.values.device
    given: dict[str, Tensor | None] = {}
    for name, x in call.given.items():
        given[name] = None
        if x is not None:
            shape = [sizes[letter] for letter in _letters(operator, name)]
            draw = torch.rand if name in ("g", "A", "dt", "beta") else torch.randn
            values = draw(shape, generator=generator) * (-1 if name in ("g", "A") else 1)
            # Keys are scaled to about unit length, as delta rules require.
            values = values * shape[-1] ** -0.5 if name in ("k", "B", "C") else values
            given[name] = values.to(device, x.dtype).requires_grad_()
    stretch = Stretch(dtype=call.dtype, is_shared=call.stretch.is_shared)
    if call.stretch.documents is not None:
        before = sizes["W"] - 1 if operator == "causal_conv1d" else 0
        # The halo belongs to the first document, because a halo of another document would get no
        # gradient.
        at = torch.arange(-before, _LENGTH, device=device).clamp_min(0)
        documents = torch.bucketize(at, torch.tensor(_EDGES, device=device), right=True)[None]
        stretch = Stretch(documents, (_EDGES,), call.dtype, call.stretch.is_shared)
    leaves = [x for x in given.values() if x is not None]

    def results(function: Callable[[], Any]) -> list[Tensor]:
        outs = function()
        outs = [outs] if isinstance(outs, Tensor) else [*outs]
        weights = [torch.arange(x.numel(), device=device).cos().view(x.shape) for x in outs]
        loss = sum((x * w).sum() for x, w in zip(outs, weights, strict=True))
        assert isinstance(loss, Tensor)
        found = (*outs, *torch.autograd.grad(loss, leaves))
        return [x.detach().float() for x in found]

    theirs = functools.partial(_call, operator, own, given, stretch, options)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        exact = results(functools.partial(own, **given, stretch=stretch, **options))
        names = [f"gradient of {name}" for name, x in given.items() if x is not None]
        names = [*("output", "state")[: len(exact) - len(names)], *names]
        return first_mistake(lambda: results(theirs), exact, names, _MOST_ERROR)


def by_head(x: Tensor, heads: int) -> Tensor:
    """Repeat each of G entries `[B, G, ...]` for its H / G consecutive heads: `[B, H, ...]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def as_columns(x: Tensor, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[B, H V, L]`, steps and rates of a scan in which every column of v is a head."""
    v_dim = x.shape[3]
    return x.mT.flatten(1, 2), dt.repeat_interleave(v_dim, 1), A.repeat_interleave(v_dim, 0)


def of_columns(x: Tensor, v_dim: int) -> Tensor:
    """Turn a result `[B, H V, ...]` of such a scan into `[B, H, ..., V]`. H may be 0."""
    return x.unflatten(1, (-1, v_dim)).mT


def _numbers(documents: Tensor, batch: int) -> Tensor:
    """Numbers of documents from 0, int32 `[B, L]`."""
    return (documents - documents[:, :1]).expand(batch, -1).int().contiguous()


def _delta_rule(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    stretch: Stretch,
) -> tuple[Tensor, Tensor]:
    """Call `chunk_gated_delta_rule` of flash-linear-attention.

    The function takes positions before heads, packed documents as one row with a float32 state for
    each, and logarithms of decays.
    """
    heads, (batch, _, length, _) = v.shape[1], v.shape
    dtype = stretch.dtype or v.dtype
    # Versions before 0.5 require as many heads of q and k as of v.
    q, k = by_head(q, heads), by_head(k, heads)
    rows = [x.to(dtype).transpose(1, 2) for x in (q, k, v)]
    rows += [x.float().transpose(1, 2) for x in (g, beta)]
    state, packed = None if state is None else state.float(), {}
    lasts = None
    if stretch.edges is not None:
        edges = stretch.edges * (batch // len(stretch.edges))
        ends = [row * length + end for row, of_row in enumerate(edges) for end in of_row[1:]]
        lasts = torch.tensor([len(of_row) - 1 for of_row in edges], device="cpu").cumsum(0) - 1
        offsets = torch.tensor([0, *ends], device="cpu")
        packed = {"cu_seqlens": offsets.to(v.device)}
        if "cu_seqlens_cpu" in _arguments(function):
            packed["cu_seqlens_cpu"] = offsets
        rows = [x.flatten(0, 1).unsqueeze(0) for x in rows]
        if state is not None:
            firsts = torch.tensor([0, *(lasts + 1)][:batch], device=v.device)
            zeros = state.new_zeros(len(ends), *state.shape[1:])
            state = zeros.index_copy(0, firsts, state)
    q, k, v, g, beta = rows
    more = {"scale": 1.0, "initial_state": state, "output_final_state": True, **packed}
    out, last = function(q=q, k=k, v=v, g=g, beta=beta, **more)
    if lasts is not None:
        out, last = out.view(batch, length, *out.shape[2:]), last[lasts.to(v.device)]
    return out.transpose(1, 2), last


def _head_scan(
    function: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    stretch: Stretch,
) -> tuple[Tensor, Tensor]:
    """Call `mamba_chunk_scan_combined`, with positions before heads and states `[B, H, V, K]`."""
    numbers = None
    if stretch.documents is not None:
        # The library takes the initial state for the document with number 0.
        numbers = _numbers(stretch.documents, len(x))
    out, last = function(
        x=x.to(stretch.dtype or x.dtype).transpose(1, 2),
        dt=dt.float().transpose(1, 2),
        A=A.float().squeeze(1),
        B=B.to(stretch.dtype or x.dtype).transpose(1, 2),
        C=C.to(stretch.dtype or x.dtype).transpose(1, 2),
        chunk_size=256,
        initial_states=None if state is None else state.float().mT.contiguous(),
        seq_idx=numbers,
        return_final_states=True,
    )
    return out.transpose(1, 2), last.mT


def _element_scan(
    function: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: None,
    stretch: Stretch,
) -> tuple[Tensor, Tensor]:
    """Call `selective_scan_fn` in float32. Its channels are the columns of heads."""
    x, dt, A, B, C = (t.float() for t in (x, dt, A, B, C))
    u, delta, A = as_columns(x, dt, A)
    out, last = function(u=u, delta=delta, A=A, B=B.mT, C=C.mT, return_last_state=True)
    return of_columns(out, x.shape[3]), of_columns(last, x.shape[3])


class _WithGradient(torch.autograd.Function):
    """Gives a result the gradient of another function, which runs in the backward pass."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, function: Any, *given: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*given)
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        given = [
            x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.function(*given)
        leaves = [x for x in given if x.requires_grad]
        grads = iter(torch.autograd.grad(result, leaves, grad, allow_unused=True))
        return None, None, *(next(grads) if w else None for w in wanted)


def _convolution(
    function: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    halo: Tensor | None,
    stretch: Stretch,
    silu: bool,
) -> Tensor:
    """Call `causal_conv1d_fn`.

    With documents the function requires channels to be contiguous and takes no initial states, so
    that the halo is concatenated.
    """
    length, numbers, width = x.shape[2], None, weight.shape[1]
    if halo is not None:
        x = torch.cat([halo, x], 2)
    if stretch.documents is None:
        x = x.contiguous()
    else:
        x = x.mT.contiguous().mT
        numbers = _numbers(stretch.documents[:, 0 if halo is not None else width - 1 :], len(x))
    bias = None if bias is None else bias.to(weight.dtype).contiguous()
    activation = "silu" if silu else None
    out = function(x=x, weight=weight, bias=bias, seq_idx=numbers, activation=activation)
    found: Tensor = out[:, :, x.shape[2] - length :]
    return found


_CALLS: dict[str, Callable[..., Any]] = {
    "gated_delta_rule": _delta_rule,
    "selective_scan": _head_scan,
    "selective_scan by element": _element_scan,
    "causal_conv1d": _convolution,
}
