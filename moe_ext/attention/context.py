"""Context in which `scaled_dot_product_attention` of torch attends over a sharded sequence.

Shapes: B batch, H heads, L positions of this rank, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from moe_ext._compile import outside_graphs
from moe_ext.attention.call import AttentionOptions
from moe_ext.attention.checks import message_device, refuse
from moe_ext.attention.functional import ring_attention
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Offsets, PrefixLen
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_size

_OP = "sequence_parallel"


def _refuse(argument: str, rule: str, value: object) -> None:
    refuse(_OP, f"{argument} of scaled_dot_product_attention", rule, value)


def _attend(
    ring: Callable[..., Any],
    group: ProcessGroup | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend over the whole sequence; arguments from `query` on are those of torch's function."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    # An error of this rank is sent here. Without an error, the ranks compare in `ring_attention`.
    with Agreement(_OP, group, message_device(query)):
        _check(query, key, value, enable_gqa)
        if attn_mask is not None:
            options["attn_mask"] = _mask(attn_mask, query)
    tensors = [x if x.dim() == 4 else x.unsqueeze(1) for x in (query, key, value)]
    out: Tensor = ring(*tensors, **options)
    return out if query.dim() == 4 else out.squeeze(1)


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        # The length of a nested or distributed tensor is not the length of this rank's shard.
        if x.is_nested or type(x) not in (Tensor, torch.nn.Parameter):
            _refuse(name, "a plain tensor", type(x).__name__)
        if x.dim() not in (3, 4):
            _refuse(name, "of shape [B, H, L, D] or [B, L, D]", list(x.shape))
    if key.shape[-2] != query.shape[-2]:
        rule = f"as long as this rank's {query.shape[-2]} queries"
        _refuse("key", rule, f"{key.shape[-2]} positions")
    if query.dim() == 4 and not enable_gqa and key.shape[1] != query.shape[1]:
        rule = f"of {query.shape[1]} heads without enable_gqa"
        _refuse("key", rule, f"{key.shape[1]} heads")


def _mask(attn_mask: Tensor, query: Tensor) -> Tensor:
    """View a mask, of which torch lets dimensions be left out, as `[B or 1, H or 1, L, S]`."""
    if attn_mask.dim() not in (2, 3, query.dim()):
        _refuse("attn_mask", f"of 2 to {query.dim()} dimensions", list(attn_mask.shape))
    if attn_mask.dim() == 3:
        # The first dimension of the mask is the batch if the query has no heads, else the heads.
        attn_mask = attn_mask.unsqueeze(1 if query.dim() == 3 else 0)
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return mask.expand(-1, -1, query.shape[-2], -1) if mask.shape[2] == 1 else mask


def _open_checkpoints() -> int:
    """Number of reentrant checkpoints whose forward pass is on this thread's stack."""
    wanted, count = CheckpointFunction.forward.__code__, 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code is wanted
        frame = frame.f_back
    return count


def _body(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Copy a function of torch so that it does not dispatch to modes.

    The unchanged function would call the active mode again, and never reach its own body. The
    globals in `names` are replaced in the copy.
    """
    questions = ("has_torch_function", "has_torch_function_unary")
    unasked = dict.fromkeys(questions, lambda _: False)
    return with_globals(function, {**function.__globals__, **names, **unasked})


def with_globals(function: Any, names: dict[str, Any], closure: Any = None) -> Any:
    """Copy a function with other globals and, if given, another closure."""
    closure = function.__closure__ if closure is None else closure
    arguments = (function.__name__, function.__defaults__, closure)
    made = types.FunctionType(function.__code__, names, *arguments)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)


# `_body` makes a new function at each call, which a compiled graph could not guard.
@outside_graphs
def _multi_head(
    ring: Callable[..., Any], group: ProcessGroup | None, *args: Any, **kwargs: Any
) -> Any:
    """`multi_head_attention_forward` of torch, with `_attend` in place of its inner attention."""
    with Agreement(_OP, group, message_device(*args)):
        # With `need_weights` torch computes the scores itself, and never calls the inner attention.
        if kwargs.get("need_weights", True):
            refuse(_OP, "need_weights of multi_head_attention_forward", "False", True)
        hidden = kwargs.get("key_padding_mask") is not None
        ignored = kwargs.get("is_causal", False) and not hidden
        for name in ("key_padding_mask", *([] if ignored else ["attn_mask"])):
            # torch accepts only masks over this rank's keys, not over those of all ranks.
            if group_size(group) > 1 and kwargs.get(name) is not None:
                rule = f"None (key_mask is an argument of {_OP}, is_causal one of the layer)"
                refuse(_OP, f"{name} of multi_head_attention_forward", rule, "a tensor")
    attend = functools.partial(_attend, ring, group)
    return _body(F.multi_head_attention_forward, scaled_dot_product_attention=attend)(
        *args, **kwargs
    )


_aten = torch.ops.aten.scaled_dot_product_attention
_FUNCTIONS = (F.scaled_dot_product_attention, _aten, _aten.default)
_FLEX = getattr(torch.ops.higher_order, "flex_attention", None)
# Functions that run a backward pass. Activation checkpointing recomputes forward passes in them,
# and the mode has to be active there.
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class SharedSequences(NamedTuple):
    """The sequences inside a context, for code that counts tokens of each sequence.

    Attributes:
        group: the ranks that share each sequence.
        layout: layout of the shards.
        cu_seqlens: offsets of packed documents in the whole sequence, None for one document.
    """

    group: ProcessGroup | None
    layout: str | Layout
    cu_seqlens: Offsets | None


class _RingMode(TorchFunctionMode):
    """Replaces torch's attention by `ring_attention`, on the thread that entered the mode."""

    def __init__(self, ring: Callable[..., Any], sequences: SharedSequences) -> None:
        super().__init__()
        self._ring = ring
        self.sequences = sequences
        self._checkpoints = 0 if torch.compiler.is_compiling() else _open_checkpoints()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            self._check_recompute()
            return _attend(self._ring, self.sequences.group, *args, **kwargs)
        if func is _FLEX:
            raise ValueError(
                f"{_OP}: expected attention by scaled_dot_product_attention or ring_attention, got "
                "flex_attention, which sees this rank's keys alone"
            )
        if func is F.multi_head_attention_forward:
            self._check_recompute()
            return _multi_head(self._ring, self.sequences.group, *args, **kwargs)
        if func in _BACKWARD:
            with self:
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _check_recompute(self) -> None:
        """Raise ValueError inside a reentrant checkpoint that began within the context.

        Its recomputation may run after the context has ended, and would then silently compute
        attention over this rank's shard alone.
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        if _open_checkpoints() > self._checkpoints:
            raise ValueError(
                f"{_OP}: expected the context to be entered inside a reentrant checkpoint, whose "
                "backward pass runs the function again, got one around it; decorate the function "
                f"with {_OP}(...), or use use_reentrant=False and call backward in the context"
            )


def shared_sequences() -> SharedSequences | None:
    """The sequences of the innermost context of this thread; None outside of all contexts."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, _RingMode):
            return mode.sequences
    return None


@contextlib.contextmanager
def sequence_parallel(
    group: ProcessGroup | DeviceMesh | None,
    *,
    layout: str | Layout = "zigzag",
    window: tuple[int, int] | None = None,
    cu_seqlens: Offsets | None = None,
    prefix_len: PrefixLen | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    scheme: str = "ring",
    precision: str = "exact",
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
) -> Iterator[None]:
    """Context in which torch's `scaled_dot_product_attention` attends over the whole sequence.

    Queries, keys and values are this rank's shards. The context applies on the thread that enters
    it, to every way of calling the function, to `torch.nn.MultiheadAttention` and to the layers of
    `torch.nn.Transformer`. No function of torch is patched. In nested contexts the innermost
    applies.

    Arguments `is_causal`, `scale`, `dropout_p` and `enable_gqa` of the function are supported. An
    `attn_mask` has this rank's queries as rows and all keys of the sequence as columns (`[..., L,
    S]`, see `ring_attention`). A `MoELayer` with `Balance("sequence")` counts over the whole
    sequences and documents of the context. Graphs of `torch.compile` break at `MultiheadAttention`.

    The backward pass may run outside the context, unless activation checkpointing recomputes the
    forward pass there. In that case decorate the checkpointed function:
    `checkpoint(sequence_parallel(group)(block), x)`.

    Args:
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: see `make_layout`.
        window: (left, right) of every attention inside, -1 for no limit.
        cu_seqlens: offsets of packed documents in the whole sequence, see `ring_attention`.
        prefix_len: number of positions at the start of each document that all its queries see, see
            `ring_attention`. Every attention inside has to be causal then.
        key_mask: `[B, L]` bool, False for those of this rank's keys that no query sees.
        softcap: see `ring_attention`.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        kv_grad_dtype: see `ring_attention`.
        wire: see `ring_attention`.

    Raises:
        ValueError: an option is out of range. Inside the context: keys of another length than the
            queries, weights of `MultiheadAttention`, its masks on several ranks (except a mask that
            `is_causal` stands for), or an argument that `ring_attention` refuses.
        TypeError: this rank does not belong to the group.
    """
    options: dict[str, Any] = {
        "layout": layout,
        "window": window,
        "softcap": softcap,
        "scheme": scheme,
        "precision": precision,
        "kv_grad_dtype": kv_grad_dtype,
        "wire": wire,
    }
    checked = AttentionOptions.of(group, _OP, **options)
    checked.check()
    masks = {"cu_seqlens": cu_seqlens, "prefix_len": prefix_len, "key_mask": key_mask}
    ring = functools.partial(ring_attention, group=group, **masks, **options)
    with _RingMode(ring, SharedSequences(checked.group, layout, cu_seqlens)):
        yield
