"""`torch.nn.functional.scaled_dot_product_attention` over a sharded sequence, inside a context.

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
    """Torch's function over the whole sequence; its signature but for the first two arguments."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    # Without an error `ring_attention` compares.
    with Agreement(_OP, group, message_device(query)):
        _check(query, key, value, enable_gqa)
        if attn_mask is not None:
            options["attn_mask"] = _mask(attn_mask, query)
    tensors = [x if x.dim() == 4 else x.unsqueeze(1) for x in (query, key, value)]
    out: Tensor = ring(*tensors, **options)
    return out if query.dim() == 4 else out.squeeze(1)


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        # A nested or distributed tensor has a length that is not this rank's.
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
    """`[B or 1, H or 1, L, S]` of a mask that may have fewer dimensions, as torch takes it."""
    if attn_mask.dim() not in (2, 3, query.dim()):
        _refuse("attn_mask", f"of 2 to {query.dim()} dimensions", list(attn_mask.shape))
    if attn_mask.dim() == 3:
        # The first dimension is the batch if the query has no heads, otherwise the heads.
        attn_mask = attn_mask.unsqueeze(1 if query.dim() == 3 else 0)
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return mask.expand(-1, -1, query.shape[-2], -1) if mask.shape[2] == 1 else mask


def _open_checkpoints() -> int:
    """Number of forward passes of reentrant checkpoints on this thread's stack."""
    wanted, count = CheckpointFunction.forward.__code__, 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code is wanted
        frame = frame.f_back
    return count


def _body(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A function of torch that does not ask for a mode first; `names` it sees in place of others.

    Under a mode, its own body would only call the mode again.
    """
    questions = ("has_torch_function", "has_torch_function_unary")
    unasked = dict.fromkeys(questions, lambda _: False)
    return with_globals(function, {**function.__globals__, **names, **unasked})


def with_globals(function: Any, names: dict[str, Any], closure: Any = None) -> Any:
    """A function of the same code, with other globals and cells."""
    closure = function.__closure__ if closure is None else closure
    arguments = (function.__name__, function.__defaults__, closure)
    made = types.FunctionType(function.__code__, names, *arguments)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function)


# The copy of a function is none that a graph could guard.
@outside_graphs
def _multi_head(
    ring: Callable[..., Any], group: ProcessGroup | None, *args: Any, **kwargs: Any
) -> Any:
    """Multi-head attention of torch with its inner function replaced."""
    with Agreement(_OP, group, message_device(*args)):
        # Weights need the whole row of scores, which torch computes without the function.
        if kwargs.get("need_weights", True):
            refuse(_OP, "need_weights of multi_head_attention_forward", "False", True)
        hidden = kwargs.get("key_padding_mask") is not None
        ignored = kwargs.get("is_causal", False) and not hidden
        for name in ("key_padding_mask", *([] if ignored else ["attn_mask"])):
            # Torch takes no more columns than this rank has keys.
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
# Within these a checkpoint computes its forward pass again, where the mode has to hold.
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class SharedSequences(NamedTuple):
    """The sequences inside a context, for what counts by sequence.

    Attributes:
        group: the ranks that share each of them.
        layout: of their shards.
        cu_seqlens: offsets of packed documents in the whole sequence, None for a single one.
    """

    group: ProcessGroup | None
    layout: str | Layout
    cu_seqlens: Offsets | None


class _RingMode(TorchFunctionMode):
    """Sends torch's attention round the ring, on the thread that entered it."""

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
        """Refuse what autograd may run again where the context has ended, without a word."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        if _open_checkpoints() > self._checkpoints:
            raise ValueError(
                f"{_OP}: expected the context to be entered inside a reentrant checkpoint, whose "
                "backward pass runs the function again, got one around it; decorate the function "
                f"with {_OP}(...), or use use_reentrant=False and call backward in the context"
            )


def shared_sequences() -> SharedSequences | None:
    """The sequences of the innermost context of this thread; None outside of any."""
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
    """Inside, torch's `scaled_dot_product_attention` is attention over the whole sequence.

    Queries, keys and values are then this rank's shards. It holds on the thread that enters the
    context, for every way to call the function, and for `torch.nn.MultiheadAttention` and the
    layers of `torch.nn.Transformer`; nothing of torch is replaced, so nothing has to be restored.
    Contexts nest, the innermost holds. `is_causal`, `scale`, `dropout_p` and `enable_gqa` are
    served, and an `attn_mask` whose rows are this rank's queries and whose columns all keys in the
    order of the sequence (`[..., L, S]`, see `ring_attention`). A `MoELayer` with
    `Balance("sequence")` counts by the whole sequences and documents of the context. Graphs of
    `torch.compile` break at `MultiheadAttention`. The backward pass may be outside, unless
    activation checkpointing computes the forward pass again there: decorate the checkpointed
    function then, `checkpoint(sequence_parallel(group)(block), x)`.

    Args:
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: see `make_layout`.
        window: (left, right) of every attention inside, -1 for no limit.
        cu_seqlens: offsets of packed documents in the whole sequence, see `ring_attention`.
        prefix_len: positions at the start of each document that all of it sees, likewise; every
            attention inside has to be causal then.
        key_mask: `[B, L]` bool, False for this rank's keys that no query sees.
        softcap: see `ring_attention`.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        kv_grad_dtype: see `ring_attention`.
        wire: see `ring_attention`.

    Raises:
        ValueError: an option is out of range; inside: keys of another length than the queries,
            weights of `MultiheadAttention`, its masks on several ranks (but for one that
            `is_causal` stands for), and whatever `ring_attention` refuses.
        TypeError: the group is none of this rank.
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
