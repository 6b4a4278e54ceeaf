"""State spaces, delta rules and convolutions of a prepared model, over sharded sequences.

Mixers of transformers call functions that are globals of their module. An instance in a prepared
model gets its own copy of the forward method, with the same code, in which these globals are the
functions here. Classes and modules of transformers are not changed.

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
from moe_ext.attention.checks import refuse
from moe_ext.attention.context import with_globals
from moe_ext.attention.huggingface.interface import CACHES, PassDocuments
from moe_ext.attention.layouts import Layout
from moe_ext.attention.recurrent.functional import (
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
)
from moe_ext.comm import c10d


@dataclass(frozen=True)
class SharedMixers:
    """The functions that mixers of one model call while the model has an attention of a name.

    Attributes:
        name: name of the attention of the prepared model.
        documents: documents of its forward passes, and the ranks.
        layout: see `ring_attention`.
        apart: if True, every token is a sequence of its own, for a probe.
    """

    name: str
    documents: PassDocuments
    layout: str | Layout
    apart: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMixers:
        # A copy of the model uses the same documents, which the hook of the model sets.
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
        """Rows `[B, L, ...]`, or with `apart` `[B * L, 1, ...]`."""
        return x.flatten(0, 1).unsqueeze(1) if self.apart else x

    def refuse_states(self, **given: Any) -> None:
        """ValueError for arguments that are neither None nor False."""
        for name, value in given.items():
            if value is not None and value is not False:
                rule = "none, since a cache holds no states of shards"
                refuse("prepare_model", f"{name} of a recurrence", rule, "one (use_cache=False)")

    @outside_graphs
    def causal_conv1d_fn(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """The function of this name in transformers, for `[B, D, L]`."""
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
        """The function of this name in transformers, for `[B, L, H, K or V]`."""
        self.refuse_states(initial_state=initial_state, output_final_state=output_final_state)
        given = (query, key, value, g, beta)
        q, k, v, g, beta = (self._rows(x).transpose(1, 2) for x in given)
        if use_qk_l2norm_in_kernel:
            q, k = (_unit(x.to(torch.promote_types(x.dtype, torch.float32))) for x in (q, k))
        out, _state = gated_delta_rule(q, k, v, g, beta, **self._where)
        return out.transpose(1, 2).reshape(value.shape).to(query.dtype), None

    # Kimi's function has the same arguments, with decays by element of a key.
    chunk_kimi_delta_attention = torch_chunk_gated_delta_rule

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
        """The function of this name in transformers, for `[B, L, H, V]`."""
        self.refuse_states(initial_state=initial_states, output_final_state=return_final_states)
        dt = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        given = (hidden_states, dt, B, C)
        x, step, b, c = (self._rows(each).transpose(1, 2) for each in given)
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
        """The function of this name in transformers, for `[B, D, L]`."""
        self.refuse_states(output_final_state=return_last_state)
        dt = _step(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
        x, step, b, c = (self._rows(each.mT).mT for each in (hidden_states, dt, B, C))
        b, c = (each.mT.unsqueeze(1) for each in (b, c))
        out, _state = selective_scan(x.unsqueeze(-1), step, A, b, c, D, **self._where)
        out = out.squeeze(-1).mT.reshape(hidden_states.mT.shape).mT
        return out if z is None else out * F.silu(z)

    @outside_graphs
    def lightning_attention(
        self,
        module: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The forward pass of MiniMax's lightning attention."""
        heads = module.num_attention_heads
        x = module.act_fn(module.qkv_proj(hidden_states))
        if attention_mask is not None:
            x = x * attention_mask.to(x.dtype).unsqueeze(-1)
        x = self._rows(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        q, k, v = x.split(module.head_dim, -1)
        g = -module.slope_rate.view(heads, 1).expand(v.shape[:3])
        out, _state = gated_delta_rule(q, k, v, g, None, scale=1.0, **self._where)
        out = out.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)
        gate = torch.sigmoid(module.output_gate(hidden_states))
        return module.out_proj(gate * module.norm(out)), None

    @outside_graphs
    def recurrent_block(
        self,
        module: Any,
        input_states: Tensor,
        position_ids: Tensor,
        use_cache: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The forward pass of RecurrentGemma's block."""
        self.refuse_states(use_cache=use_cache)
        conv, x = module.conv_1d, module.linear_x(input_states).mT
        x = self.causal_conv1d_fn(x, conv.weight.squeeze(1), conv.bias)
        x = module.rg_lru(x.mT, position_ids)
        return module.linear_out(x * module.act_fn(module.linear_y(input_states))), None

    @outside_graphs
    def rnn_scan(
        self,
        module: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The recurrence of RecurrentGemma's RG-LRU, in which each channel is a head."""
        self.refuse_states(recurrent_states=recurrent_states)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        # A reset begins a document, where the gate does not count. Other gates are clamped, because
        # 0 has no logarithm.
        gate = recurrent_gate.to(dtype).masked_fill(reset, 1).clamp_min(torch.finfo(dtype).tiny)
        x, g = (self._rows(each).mT.unsqueeze(-1) for each in (hidden_states, gate.log()))
        one = x.new_ones(()).expand(x.shape[0], 1, x.shape[2], 1)
        out, _state = gated_delta_rule(one, one, x, g, None, scale=1.0, **self._where)
        return out.squeeze(-1).mT.reshape(hidden_states.shape), None


# The `SharedMixers` of the running mixer, and the documents that were passed to it. Those are used
# first, because a recomputation may run after the next batch has begun.
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
        "chunk_kimi_delta_attention",
        "mamba2_chunk_scan",
        "mamba_selective_scan",
    )
}
# Mixers that call none of FUNCTIONS: class to the method that is replaced, and its replacement.
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "MiniMaxLightningAttention": ("forward", SharedMixers.lightning_attention),
    "RecurrentGemmaRecurrentBlock": ("forward", SharedMixers.recurrent_block),
    "RecurrentGemmaRglru": ("_rnn_scan", SharedMixers.rnn_scan),
}


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def share_mixers(model: Any, mixers: SharedMixers) -> tuple[int, Callable[[], None]]:
    """Let the mixers of a model call functions of `mixers` while it has the attention of that name.

    Returns:
        The number of mixers, and a function that undoes the change.
    """
    before = {pair: vars(pair[0]).get(pair[1]) for pair in _mixers(model)}
    for module, name in before:
        # Unlike a closure, a `functools.partial` can be copied and pickled with the model.
        vars(module)[name] = functools.partial(_shared, module, name, mixers, model.config)

    def take_back() -> None:
        for (module, name), method in before.items():
            del vars(module)[name]
            vars(module).update({} if method is None else {name: method})

    return len(before), take_back


def _mixers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Mixers of a model, with the names of the methods to replace."""
    for module in model.modules():
        kind = type(module)
        function = inspect.unwrap(kind.forward)
        names = {*getattr(function, "__code__", _mixers.__code__).co_names} & {*FUNCTIONS}
        if kind.__name__ in METHODS:
            yield module, METHODS[kind.__name__][0]
        elif names & {*getattr(function, "__globals__", {})}:
            yield module, "forward"


def _shared(
    module: nn.Module, name: str, mixers: SharedMixers, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Method of a mixer that calls functions of `mixers` while the model has their attention."""
    kind: Any = type(module)
    if config._attn_implementation != mixers.name:
        return getattr(kind, name)(module, *args, **kwargs)
    mixers.refuse_states(**{name: kwargs.get(name) for name in CACHES})
    # A method that another replaced method calls has the documents of its caller.
    _, offsets = _current.get((mixers, None))
    token = _current.set((mixers, kwargs.get("cu_seq_lens_q", offsets)))
    try:
        if kind.__name__ in METHODS:
            return METHODS[kind.__name__][1](mixers, module, *args, **kwargs)
        made = _MADE.get(kind) or _make(kind)
        return made(module, *args, **kwargs)
    finally:
        _current.reset(token)


# A dict is used, because torch.compile traces through functools.cache.
_MADE: dict[type, Callable[..., Any]] = {}


def _make(kind: Any) -> Callable[..., Any]:
    """Copy the forward method of a class, with FUNCTIONS among its globals."""
    inner = inspect.unwrap(kind.forward)
    own = {name: f for name, f in FUNCTIONS.items() if name in inner.__globals__}
    _MADE[kind] = _around(kind.forward, inner, with_globals(inner, {**inner.__globals__, **own}))
    return _MADE[kind]


def _around(outer: Any, inner: Any, made: Any) -> Any:
    """Copy the decorated function `outer`, with `made` in place of the undecorated `inner`."""
    if outer is inner:
        return made
    # A decorator holds the function that it calls in a cell of its closure.
    held = _around(outer.__wrapped__, inner, made)
    cells = (
        types.CellType(held) if c.cell_contents is outer.__wrapped__ else c
        for c in outer.__closure__
    )
    return with_globals(outer, outer.__globals__, tuple(cells))
