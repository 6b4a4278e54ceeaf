"""State spaces, delta rules and convolutions of a prepared model, over sequences that ranks share.

Mixers of transformers call functions of their module by name. An instance of a prepared model
gets a forward pass of its own, of the same code, to which these names mean the functions here;
classes and modules of transformers stay as they are.

Shapes: B batch, L positions of this rank, H heads, K and V dims of a state, D channels.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext._compile import outside_graphs
from moe_ext.attention.huggingface.interface import PassDocuments
from moe_ext.attention.layouts import Layout
from moe_ext.attention.recurrent.functional import (
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
)
from moe_ext.comm import c10d


@dataclass(frozen=True)
class SharedMixers:
    """The functions that mixers of one model call while it has an attention of a name.

    Attributes:
        name: of the attention, by which the model is a prepared one.
        documents: of its forward passes, and the ranks.
        layout: see `ring_attention`.
        apart: every token is a sequence of its own, as a probe wants it.
    """

    name: str
    documents: PassDocuments
    layout: str | Layout
    apart: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMixers:
        # A copy of the model has the documents that its hook finds.
        return self

    @property
    def _where(self) -> dict[str, Any]:
        offsets: Any = _current.get()[1]
        batch = self.documents.batch
        if offsets is None and batch is not None and batch.offsets is not None:
            if not self.apart and c10d.backward_number() != -1:
                raise ValueError(
                    "prepare_model: expected a recomputation of packed documents to be of mixers "
                    "that take cu_seq_lens_q, got others, whose documents may be those of another "
                    "batch by now; train them without gradient checkpointing"
                )
            offsets = batch.offsets
        return {"group": self.documents.group, "layout": self.layout, "cu_seqlens": offsets}

    def _rows(self, x: Tensor) -> Tensor:
        """Rows `[B, L, ...]`, or `[B * L, 1, ...]` of tokens apart."""
        return x.flatten(0, 1).unsqueeze(1) if self.apart else x

    def _refuse_states(self, **given: Any) -> None:
        for name, value in given.items():
            if value is not None and value is not False:
                raise ValueError(
                    f"prepare_model: expected {name} of a recurrence to be none, since a cache "
                    f"holds no states of shards, got one (use_cache=False)"
                )

    @outside_graphs
    def causal_conv1d_fn(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Takes `[B, D, L]`, as transformers' function of the name."""
        known = activation if activation in (None, "silu", "swish") else None
        rows = self._rows(hidden_states.mT).mT
        out = causal_conv1d(rows, weight, bias, activation=known, **self._where)
        out = out.mT.reshape(hidden_states.mT.shape).mT
        if activation is not None and known is None:
            from transformers.activations import ACT2FN

            out = ACT2FN[activation](out)
        return out

    @outside_graphs
    def torch_chunk_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Takes `[B, L, H, K or V]`, as transformers' function of the name."""
        self._refuse_states(initial_state=initial_state, output_final_state=output_final_state)
        given = (query, key, value, g, beta)
        q, k, v, g, beta = (self._rows(x).transpose(1, 2) for x in given)
        if use_qk_l2norm_in_kernel:
            q, k = (_unit(x.to(torch.promote_types(x.dtype, torch.float32))) for x in (q, k))
        out, _state = gated_delta_rule(q, k, v, g, beta, **self._where)
        return out.transpose(1, 2).reshape(value.shape).to(query.dtype), None

    @outside_graphs
    def mamba2_chunk_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 64,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Tensor:
        """Takes `[B, L, H, V]`, as transformers' function of the name."""
        self._refuse_states(initial_state=initial_states, output_final_state=return_final_states)
        dt = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        given = (hidden_states, dt, B, C)
        x, step, b, c = (self._rows(each).transpose(1, 2).to(dtype) for each in given)
        out, _state = selective_scan(x, step, A, b, c, D, **self._where)
        return out.transpose(1, 2).reshape(hidden_states.shape).contiguous()

    @outside_graphs
    def mamba_selective_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Tensor:
        """Takes `[B, D, L]`, as transformers' function of the name."""
        self._refuse_states(output_final_state=return_last_state)
        dt = _step(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
        x, step, b, c = (self._rows(each.mT).mT for each in (hidden_states, dt, B, C))
        b, c = (each.mT.unsqueeze(1) for each in (b, c))
        out, _state = selective_scan(x.unsqueeze(-1), step, A, b, c, D, **self._where)
        out = out.squeeze(-1).mT.reshape(hidden_states.mT.shape).mT
        return out if z is None else out * F.silu(z)


# The mixers whose function runs, and documents that it was given: a recomputation may come after
# another batch.
_current: ContextVar[tuple[SharedMixers, Tensor | None]] = ContextVar("current")


def _function(name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(_current.get()[0], name)(*args, **kwargs)

    return function


FUNCTIONS = {
    name: _function(name)
    for name in (
        "causal_conv1d_fn",
        "torch_chunk_gated_delta_rule",
        "mamba2_chunk_scan",
        "mamba_selective_scan",
    )
}


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def share_mixers(model: Any, mixers: SharedMixers) -> tuple[int, Callable[[], None]]:
    """Have the mixers of a model call other functions while it has the attention of a name.

    Returns:
        The number of mixers, and a function that takes that back.
    """
    before = {module: vars(module).get("forward") for module in _mixers(model)}
    for module in before:
        # A partial function of these is copied and pickled with the model.
        vars(module)["forward"] = functools.partial(_forward, module, mixers, model.config)

    def take_back() -> None:
        for module, forward in before.items():
            del vars(module)["forward"]
            vars(module).update({} if forward is None else {"forward": forward})

    return len(before), take_back


def _mixers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        function = inspect.unwrap(type(module).forward)
        names = {*getattr(function, "__code__", _mixers.__code__).co_names} & {*FUNCTIONS}
        if names & {*getattr(function, "__globals__", {})}:
            yield module


def _forward(
    module: nn.Module, mixers: SharedMixers, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """The forward pass of a mixer, with functions of `mixers` while a model has their attention."""
    kind: Any = type(module)
    if config._attn_implementation != mixers.name:
        return kind.forward(module, *args, **kwargs)
    token = _current.set((mixers, kwargs.get("cu_seq_lens_q")))
    try:
        return _made(kind)(module, *args, **kwargs)
    finally:
        _current.reset(token)


@functools.cache
def _made(kind: Any) -> Callable[..., Any]:
    """The forward pass of a class, to which the names of functions mean others."""
    inner = inspect.unwrap(kind.forward)
    own = {name: f for name, f in FUNCTIONS.items() if name in inner.__globals__}
    made: Callable[..., Any] = _around(
        kind.forward, inner, _copy(inner, {**inner.__globals__, **own})
    )
    return made


def _around(outer: Any, inner: Any, made: Any) -> Any:
    """A function with its decorators, around another inner function than theirs."""
    if outer is inner:
        return made
    # A decorator holds the function that it calls in a cell.
    held = _around(outer.__wrapped__, inner, made)
    cells = (
        types.CellType(held) if c.cell_contents is outer.__wrapped__ else c
        for c in outer.__closure__
    )
    return _copy(outer, outer.__globals__, tuple(cells))


def _copy(function: Any, names: dict[str, Any], closure: Any = None) -> Any:
    """A function of the same code, with other globals and cells."""
    closure = function.__closure__ if closure is None else closure
    arguments = (function.__name__, function.__defaults__, closure)
    made = types.FunctionType(function.__code__, names, *arguments)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)
