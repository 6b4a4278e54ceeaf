"""Ring attention as the attention of a Hugging Face model.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdRef

from moe_ext._compile import outside_graphs
from moe_ext.attention.call import AttentionOptions
from moe_ext.attention.checks import refuse
from moe_ext.attention.functional import ring_attention
from moe_ext.attention.huggingface.packing import FoundOffsets, document_offsets
from moe_ext.attention.layouts import Layout
from moe_ext.attention.sharding import unshard_sequence
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import GroupHandle, group_rank, group_size

ATTENTION = "moe_ext_ring"
# Values of `layer_types` in a config for layers that mix tokens outside of attention.
_MIXING = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
# Arguments of attention functions that change the result, and that ring attention does not support.
_REFUSED = ("position_bias", "head_mask", "cache", "block_table", "output_attentions")
# Names of arguments with which models take a cache. Since transformers 5.24 the name is "cache".
CACHES = ("past_key_values", "cache_params", "cache")


def of_transformers(operation: str, module: str, name: str) -> Any:
    """Import an object from a module of transformers 5; ImportError if there is none."""
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{operation}: expected transformers 5 or later to be installed, "
            f"try `pip install 'transformers>=5'` ({error})"
        ) from error


def forward_arguments(model: Any) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    """Parameters of a model's forward pass, and arguments that turn off its cache.

    For a model of PEFT the parameters are those of the base model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    accepted = inspect.signature(base.forward).parameters
    return accepted, {"use_cache": False} if {"use_cache", *CACHES} & {*accepted} else {}


@dataclass(frozen=True)
class BatchFacts:
    """Facts of a batch that a prepared model knows before a layer runs.

    Attributes:
        offsets: offsets of packed documents in the whole sequence; None for one document.
        seq_len: length of the whole sequence; None if it is not known.
        is_padded: True if any row has padding on the left.
    """

    offsets: FoundOffsets | None = None
    seq_len: int | None = None
    is_padded: bool = False

    def cut(self, chunk: int | None, name: str) -> FoundOffsets | None:
        """Offsets of the documents, with those of chunks of `chunk` positions from position 0."""
        if chunk is None:
            return self.offsets
        if self.seq_len is None or self.is_padded:
            rule = "without chunks, or that of a model that prepare_model serves, without padding "
            refuse(name, "the mask of the model", rule + "on the left", f"chunks of {chunk}")
        edges = {*range(0, self.seq_len, chunk), self.seq_len}
        if self.offsets is not None and isinstance(self.offsets[0], tuple):
            return tuple(tuple(sorted({*row, *edges})) for row in self.offsets)
        return tuple(sorted({*(self.offsets or ()), *edges}))


@dataclass(frozen=True)
class RingMask:
    """Mask that layers pass to their attention instead of a tensor of all pairs.

    Attributes:
        is_causal: if True, a query sees no key after it.
        window: number of keys that a query sees on each side, with `is_causal` including itself;
            None for all.
        key_mask: `[B, L]` bool, False for padding; None for no padding.
        chunk: number of positions of a chunk, outside of which a query sees nothing; None for no
            chunks.
        batch: facts of the batch of a prepared model, else None. They are part of the mask because
            a recomputation may run after the next batch has begun.
    """

    is_causal: bool
    window: int | None
    key_mask: Tensor | None
    chunk: int | None = None
    batch: BatchFacts | None = None


def _parse(name: str, function: Callable[..., Any]) -> tuple[bool, int | None, int | None]:
    """(causal, window, chunk) of a mask function of transformers, read from its closures."""
    held = inspect.getclosurevars(function).nonlocals
    kind = function.__qualname__.partition(".")[0]
    if kind == "and_masks":
        parts = [_parse(name, part) for part in held["mask_functions"]]
        windows = [window for _, window, _ in parts if window is not None]
        chunks = [chunk for *_, chunk in parts if chunk is not None]
        if len(chunks) > 1:
            refuse(name, "the mask of the model", "of one size of chunks", chunks)
        causal = any(causal for causal, *_ in parts)
        return causal, min(windows, default=None), min(chunks, default=None)
    if kind == "remap_positions_for_packed_sequence":
        return _parse(name, held["mask_function"])
    if kind in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
        return False, held["sliding_window"], None
    if kind == "chunked_overlay":
        return False, None, held["chunk_size"]
    plain = ("causal_mask_function", "bidirectional_mask_function", "packed_sequence_mask_function")
    if kind not in plain:
        rule = "causal or bidirectional, with a window, chunks, documents or padding at most"
        refuse(name, "the mask of the model", rule, function.__qualname__)
    return kind == "causal_mask_function", None, None


def _ring_mask(
    documents: PassDocuments,
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> RingMask:
    """The mask of a layer, with the signature of transformers' `AttentionMaskInterface`."""
    name = documents.name
    if kv_length != q_length or int(q_offset) != 0:
        rule = (
            "empty, since it holds no shards; call the model with use_cache=False, or "
            "set_attn_implementation('sdpa') before generate"
        )
        refuse(name, "the cache of keys", rule, f"{kv_length} keys for {q_length} queries")
    causal, window, chunk = _parse(name, mask_function)
    if attention_mask is not None and attention_mask.dim() != 2:
        rule = "[B, L], this rank's part of the padding mask"
        refuse(name, "attention_mask", rule, list(attention_mask.shape))
    key_mask = None if attention_mask is None else attention_mask.bool()
    return RingMask(causal, window, key_mask, chunk, documents.batch)


class PassDocuments:
    """The documents of a forward pass.

    A prepared model sets them in `batch`. Otherwise they are found once for all layers.
    """

    def __init__(
        self, name: str, options: AttentionOptions, batch: BatchFacts | None = None
    ) -> None:
        self.batch = batch
        self.group = options.group
        self.name = name
        self._options = options
        # Identities and versions of the tensors that the offsets were found in. References to the
        # tensors would keep them alive.
        self._known: list[tuple[WeakIdRef, int]] = []
        self._values: Tensor | None = None
        self._offsets: FoundOffsets | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        GroupHandle(self.group).__reduce__()
        return _installed, (self.name, self._options)

    # The method reads values of tensors on the host, which a graph cannot contain.
    @outside_graphs
    def offsets(self, position_ids: Tensor | None, given: Tensor | None) -> FoundOffsets | None:
        """Offsets of packed documents in the whole sequence; None for one document.

        NOTE: device-to-host sync and a collective, once for each tensor of positions.
        """
        if position_ids is None:
            rule = "handed on to it by the model (prepare_model serves models that do not)"
            refuse(self.name, "position_ids of the attention", rule, "None")
        if position_ids.dim() != 2:
            shape = list(position_ids.shape)
            refuse(self.name, "position_ids of the attention", "[B, L] or [1, L]", shape)
        found = [x for x in (position_ids, given) if x is not None]
        known = [(WeakIdRef(x), 0 if x.is_inference() else x._version) for x in found]
        # Finding offsets is a collective, so either all ranks do it or none. Ranks decide by the
        # identities and versions of tensors, because values may change on one rank alone.
        if known != self._known:
            self._known = []
            self._offsets = self._find(position_ids, given)
            self._known = known
            self._values = position_ids.clone() if position_ids.is_inference() else None
        elif self._values is not None and not torch.equal(self._values, position_ids):
            rule = "a new tensor where its values change in inference mode"
            refuse(self.name, "position_ids", rule, "the same one")
        return self._offsets

    def _find(self, position_ids: Tensor, given: Tensor | None) -> FoundOffsets | None:
        group, name = self.group, self.name
        facts = {
            "the number of rows of position_ids": position_ids.shape[0],
            "giving cu_seq_lens_q": int(given is not None),
        }
        Agreement(name, group, position_ids.device).compare(facts)
        offsets = None if given is None else tuple(int(x) for x in given.tolist())
        with torch.no_grad():
            whole = unshard_sequence(
                position_ids, group=group, dim=1, layout=self._options.layout, cu_seqlens=offsets
            )
        if offsets is None:
            self._check_counting(whole)
        return document_offsets(whole, offsets, name)

    def _check_counting(self, whole: Tensor) -> None:
        """Refuse positions that count from 0 on every rank.

        A model counts so if its caller passes no `position_ids` of the shard.
        """
        layout = self._options.layout
        num_ranks = group_size(self.group)
        contiguous = layout == "contiguous" or getattr(layout, "name", "") == "contiguous"
        if num_ranks == 1 or not contiguous or whole.shape[1] < 2 * num_ranks:
            return
        edges = [i * whole.shape[1] // num_ranks for i in range(num_ranks)]
        if bool((whole[:, edges] == 0).all()) and int((whole == 0).sum(1).max()) == num_ranks:
            rule = "those of this rank's shard in the whole sequence (see shard_batch)"
            rank = group_rank(self.group)
            refuse(self.name, "position_ids", rule, f"a count from 0 on every rank (rank {rank})")


# Name to the documents that were passed to `install`.
_INSTALLED: dict[str, PassDocuments] = {}


def _installed(name: str, options: AttentionOptions) -> PassDocuments:
    """The documents of an attention by name, installed if needed; used to unpickle models."""
    documents = _INSTALLED.get(name)
    if documents is None:
        documents = PassDocuments(name, options, BatchFacts())
        names = ("group", "layout", "scheme", "precision", "kv_grad_dtype", "wire")
        given = {key: getattr(options, key) for key in names}
        install(name, functools.partial(ring_attention, **given), documents)
    elif documents._options != options:
        refuse(name, "a pickled model", "of the options of the model that has its name", options)
    return documents


def given_offsets(name: str, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Offsets of the documents that collators of transformers pass, for queries and for keys."""
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if queries is None and keys is None:
        return None
    if queries is None or keys is None or not torch.equal(queries, keys):
        refuse(name, "cu_seq_lens_q and cu_seq_lens_k", "given both, and equal", "others")
    assert isinstance(queries, Tensor)
    return queries


def _window(name: str, mask: RingMask, sliding_window: int | None) -> tuple[int, int] | None:
    width = mask.window
    if width is None:
        return None
    # The `sliding_window` of ModernBERT's layers counts the query itself, but that of its mask does
    # not.
    if sliding_window not in ((None, width) if mask.is_causal else (None, width, width + 1)):
        refuse(name, "sliding_window", f"{width}, that of the mask", sliding_window)
    return (width - 1, -1) if mask.is_causal else (width, width)


def _mask_of(
    name: str,
    module: nn.Module,
    attention_mask: RingMask | Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> RingMask:
    """The `RingMask` of a call, from the arguments of the layer."""
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return RingMask(bool(causal), sliding_window, None)
    if not isinstance(attention_mask, RingMask):
        found = f"{type(attention_mask).__name__} {list(attention_mask.shape)}"
        rule = "None, or this rank's part [B, L] of a padding mask or [B, H or 1, L, S] of any"
        refuse(name, "attention_mask", rule, found)
    if is_causal not in (None, attention_mask.is_causal):
        refuse(name, "is_causal", f"{attention_mask.is_causal}, as the mask is", is_causal)
    return attention_mask


@functools.cache
def _counts_from_padding(file: str) -> bool:
    """True for models like RoBERTa, whose positions start at `padding_idx + 1`.

    The source file of such a model has a function or method of a known name.
    """
    source = vars(sys.modules[file])
    counts = "create_position_ids_from_input_ids"
    classes = [found for found in source.values() if isinstance(found, type)]
    return counts in source or any(hasattr(found, counts) for found in classes)


@outside_graphs
def _check_model(name: str, module: nn.Module) -> None:
    """ValueError for a model that is not supported according to its config or source file."""
    config = getattr(module, "config", None)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    mixing = sorted(kinds & _MIXING)
    if mixing:
        rule = "of layers that mix tokens in their attention alone (see prepare_model)"
        refuse(name, "model", rule, ", ".join(mixing))
    if _counts_from_padding(type(module).__module__):
        rule = "one whose positions start at 0 (prepare_model serves others)"
        refuse(name, "model", rule, f"{type(module).__name__}, which counts from padding_idx + 1")


def _ring_forward(
    ring: Callable[..., Any],
    documents: PassDocuments,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RingMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, with the signature of transformers' `AttentionInterface`.

    Returns:
        `[B, L, H, Dv]`, and None in place of the weights.
    """
    name, sliding_window = documents.name, kwargs.get("sliding_window")
    for refused in _REFUSED:
        if kwargs.get(refused) is not None and kwargs[refused] is not False:
            refuse(name, refused, "None", type(kwargs[refused]).__name__)
    if key.shape[2] != query.shape[2]:
        rule = f"as many as this rank's {query.shape[2]} queries: a cache of keys holds no shards"
        refuse(name, "keys", rule, key.shape[2])
    attn_mask = None
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        # As in transformers, a mask of all pairs replaces all other masks.
        attn_mask, mask = attention_mask, RingMask(False, None, None, batch=BatchFacts())
    else:
        mask = _mask_of(name, module, attention_mask, kwargs.get("is_causal"), sliding_window)
    batch = mask.batch or documents.batch
    if batch is None:
        _check_model(name, module)
        batch = BatchFacts(
            documents.offsets(kwargs.get("position_ids"), given_offsets(name, kwargs))
        )
    out: Tensor = ring(
        query,
        key,
        value,
        is_causal=mask.is_causal,
        scale=scaling,
        window=_window(name, mask, sliding_window),
        cu_seqlens=batch.cut(mask.chunk, name),
        key_mask=mask.key_mask,
        attn_mask=attn_mask,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def register_ring_attention(
    group: ProcessGroup | DeviceMesh | None,
    *,
    layout: str | Layout = "zigzag",
    scheme: str = "ring",
    precision: str = "exact",
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
    name: str = ATTENTION,
) -> None:
    """Register ring attention in transformers under a name.

    Use the name as `attn_implementation=name` when a model is built or loaded, or in
    `model.set_attn_implementation(name)`. Each rank of the group then runs the model on its shard,
    as made by `shard_batch`, and the model attends over the whole sequence. No mask of all pairs is
    built. Packed documents begin where `position_ids` restart in the whole sequence, or are given
    by `cu_seq_lens_q`. Padding by `attention_mask`, sliding windows, softcap, sinks and dropout are
    supported.

    A model is refused if its config has layers of state space, convolution or linear attention, or
    if it counts positions from `padding_idx + 1`. Nothing else about a model is checked: results
    are wrong if it mixes tokens outside of attention, calls no attention by name, or makes its own
    positions. `prepare_model` checks all of this, and takes whole batches.

    Args:
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: layout of the shards, see `moe_ext.attention.make_layout`.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        kv_grad_dtype: see `ring_attention`.
        wire: see `ring_attention`.
        name: name of the implementation. Models with different names can use different groups.
            Registering a name again changes the options of all models that use it.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: an option is out of range. In the forward pass, on every rank: positions that do
            not count up from 0 in each document of the whole sequence, or differ between the
            sequences of a batch. On each rank: a cache with keys in it, other kinds of masks,
            `output_attentions`, position biases, or a model that is refused.
        TypeError: this rank does not belong to the group.
    """
    names: dict[str, Any] = {
        "scheme": scheme,
        "precision": precision,
        "kv_grad_dtype": kv_grad_dtype,
        "wire": wire,
    }
    options = AttentionOptions.of(group, "register_ring_attention", layout=layout, **names)
    options.check()
    documents = PassDocuments(name, options)
    install(name, functools.partial(ring_attention, group=group, layout=layout, **names), documents)


def install(name: str, ring: Callable[..., Any], documents: PassDocuments) -> None:
    """Register `ring` in transformers under a name. Error messages begin with `documents.name`.

    Raises:
        ImportError: transformers 5 is not installed.
    """
    attention = of_transformers(documents.name, "modeling_utils", "AttentionInterface")
    masks = of_transformers(documents.name, "masking_utils", "AttentionMaskInterface")
    attention.register(name, functools.partial(_ring_forward, ring, documents))
    masks.register(name, functools.partial(_ring_mask, documents))
    _INSTALLED[name] = documents
