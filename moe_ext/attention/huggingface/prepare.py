"""Preparation of a Hugging Face model for ring attention: checks it, and cuts its batches.

Shapes: B batch, S whole sequence, L positions of this rank.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._compile import outside_graphs
from moe_ext.attention.call import AttentionOptions
from moe_ext.attention.checks import message_device, requires
from moe_ext.attention.functional import ring_attention
from moe_ext.attention.huggingface.interface import (
    ATTENTION,
    CACHES,
    BatchFacts,
    PassDocuments,
    forward_arguments,
    given_offsets,
    install,
)
from moe_ext.attention.huggingface.mixers import SharedMixers, share_mixers
from moe_ext.attention.huggingface.packing import (
    KEYS,
    FoundOffsets,
    batch_facts,
    check_batch,
    cut_batch,
    document_offsets,
)
from moe_ext.attention.huggingface.probe import OP, Traits, probe
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import check_cu_seqlens
from moe_ext.attention.sharding import shard_sequence
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import GroupHandle, group_size

_require = requires(OP)
_numbers = itertools.count()
# Arguments in which collators of transformers pass the documents.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("max_length_q", "max_length_k")


def prepare_model(
    model: nn.Module,
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout = "zigzag",
    scheme: str = "ring",
    precision: str = "exact",
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
) -> None:
    """Let the ranks of a group share the sequences of a Hugging Face model, or refuse the model.

    Afterwards call the model on every rank with the same whole batch: `input_ids` `[B, S]` or
    `inputs_embeds`. Optional are `labels` (not shifted), `token_type_ids`, and `attention_mask`
    `[B, S]`, or `[B, H or 1, S, S]`, which replaces all other masks. Packed documents are given by
    `position_ids`, or by `cu_seq_lens_q` and `cu_seq_lens_k`.

    The model takes this rank's part of the batch, and returns logits of this part. Its loss is this
    rank's part of the loss, such that the mean over the ranks is the loss of the batch.
    DistributedDataParallel, FSDP, Trainer and `moe_ext.distributed.sync_gradients` average over
    ranks, and so give the gradients of one process. In one message a forward pass the ranks compare
    their batches, and raise an error if a loader gave them different samples.

    The function runs the model on a few tokens, with an attention that does not mix tokens. NaN in
    one token must then appear in the output of that token only, otherwise the model is refused.

    Mixers of state spaces, delta rules and convolutions get forward methods with the same code that
    call `selective_scan`, `gated_delta_rule` and `causal_conv1d`.

    `model.set_attn_implementation("sdpa")` ends the sharing: each rank then runs the whole model by
    itself, for `generate` and everything else.

    Args:
        model: a model of transformers 5, or of PEFT around one, before it is wrapped for data
            parallelism.
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: see `make_layout`; "per_document" needs packed documents in each batch.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        kv_grad_dtype: see `ring_attention`.
        wire: see `ring_attention`.

    Raises:
        ImportError: transformers 5 is not installed.
        TypeError: the model is not one of transformers, or this rank does not belong to the group.
        ValueError: on every rank: an option is out of range; the model mixes tokens by other
            layers than attention, delta rules, Mamba and short convolutions, or calls no attention
            by name; it has a mask that ring attention does not support, its own positions, or one
            result for a whole sequence. In the forward pass, on every rank: batches that differ
            between the ranks or cannot be cut, and `output_router_logits` if the part of a rank is
            nothing but padding.
        RankFailureError: a rank died or did not answer.
    """
    names: dict[str, Any] = {
        "scheme": scheme,
        "precision": precision,
        "kv_grad_dtype": kv_grad_dtype,
        "wire": wire,
    }
    options = AttentionOptions.of(group, OP, layout=layout, **names)
    facts = {"the class of the model": type(model).__name__, "layout": layout, **names}
    with Agreement(OP, options.group) as agreement:
        options.check()
        if not hasattr(model, "set_attn_implementation"):
            raise TypeError(
                f"{OP}: expected model to be one of transformers, not yet wrapped, got "
                f"{type(model).__name__}; sequence_parallel serves models of torch"
            )
        traits = probe(model)
        agreement.compare(facts)
    name = f"{ATTENTION}_{next(_numbers)}"
    documents = PassDocuments(name, options, BatchFacts())
    install(name, functools.partial(ring_attention, group=group, layout=layout, **names), documents)
    num_mixers, _ = share_mixers(model, SharedMixers(name, documents, layout))
    _take_hook(model)
    hook = _WholeBatches(name, documents, traits, GroupHandle(group), layout, num_mixers > 0)
    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    getattr(model, "set_attn_implementation")(name)  # noqa: B009 (no method of nn.Module)


def _check_balance_loss(model: Any, given: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """ValueError for a part that is all padding, if transformers computes its balance loss."""
    config, mask = model.config.get_text_config(), parts.get("attention_mask")
    wanted = given.get("output_router_logits", getattr(config, "output_router_logits", False))
    if wanted and mask is not None:
        rule = "False where a rank has padding alone, whose balance loss is 0/0 in transformers"
        _require(bool(mask.any()), "output_router_logits", rule, "True")


def _take_hook(model: nn.Module) -> _WholeBatches | None:
    """Remove the hook that cuts the batches of a prepared model, and return it, or None."""
    found = None
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _WholeBatches):
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
            found = hook
    return found


class BatchCutter:
    """Cuts the batches of a prepared model outside of it, for a model that runs in stages.

    The hook of the model is removed, so that the model itself no longer cuts batches.

    Args:
        model: a model on which `prepare_model` was called.
        operation: name for error messages.

    Raises:
        ValueError: the model has no loss that takes the number of labels.
    """

    def __init__(self, model: nn.Module, operation: str) -> None:
        hook = _take_hook(model)
        assert hook is not None
        self._model, self._hook = model, hook
        self._size = group_size(hook.documents.group)
        if hook.traits.loss is None:
            raise ValueError(
                f"{operation}: expected the loss of a model in stages whose sequences ranks share "
                f"to take num_items_in_batch, got that of {type(model).__name__}"
            )

    def tokens(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of tokens `[B, S]`, and its positions, both `[B or 1, L]`.

        Raises:
            ValueError: on every rank, if tokens differ between ranks or cannot be cut.
        """
        parts = self._cut(input_ids=input_ids)
        return parts["input_ids"], parts["position_ids"]

    def positions(self, hidden: Tensor) -> Tensor:
        """Positions of hidden states `[B, L, D]` of this rank's part."""
        whole = hidden.new_zeros(hidden.shape[0], hidden.shape[1] * self._size, dtype=torch.int64)
        found: Tensor = self._hook.cut({"input_ids": whole})["position_ids"]
        return found

    def labels(self, labels: Tensor) -> dict[str, Tensor]:
        """Arguments of the model's loss for this rank's part of labels `[B, S]`, not shifted.

        Raises:
            ValueError: on every rank, if labels differ between ranks.
        """
        parts = self._cut(input_ids=labels, labels=labels)
        names = ("labels", "shift_labels", "num_items_in_batch")
        return {name: parts[name] for name in names if name in parts}

    def _cut(self, **given: Tensor) -> dict[str, Any]:
        found = self._hook(self._model, (), given)
        assert found is not None
        return found[1]


@dataclass(frozen=True, eq=False)
class _WholeBatches:
    """Pre-hook of a model's forward pass that cuts this rank's part out of a whole batch.

    Attributes:
        name: name of the attention of the prepared model.
        documents: documents of its forward passes.
        traits: traits of the model.
        handle: handle of the group or mesh that the user passed.
        layout: see `ring_attention`.
        tells_documents: True if the model has mixers, which need the documents as an argument.
    """

    name: str
    documents: PassDocuments
    traits: Traits
    handle: GroupHandle
    layout: str | Layout
    tells_documents: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeBatches:
        # A copy of the model calls the attention of the same name, which has the same documents.
        return self

    # The hook reads values of tensors on the host, which a graph cannot contain.
    @outside_graphs
    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if model.config._attn_implementation != self.name:
            return None
        accepted, without_cache = forward_arguments(model)
        given = {**dict(zip(accepted, args, strict=False)), **kwargs}
        given = {key: value for key, value in given.items() if value is not None}
        given = {**without_cache, **given}
        device = message_device(*given.values())
        with Agreement(OP, self.documents.group, device) as agreement:
            for key, value in given.items():
                whole = isinstance(value, Tensor) or key not in (*KEYS, *_OFFSETS)
                _require(whole, key, "a tensor", type(value).__name__)
            facts = batch_facts(given, (*KEYS, *_OFFSETS))
            parts = self.cut(given)
            offsets = self.documents.batch and self.documents.batch.offsets
            kinds = {argument.kind for argument in accepted.values()}
            if self.tells_documents and offsets and inspect.Parameter.VAR_KEYWORD in kinds:
                parts["cu_seq_lens_q"] = torch.tensor(offsets)
            _check_balance_loss(model, given, parts)
            agreement.compare({"the arguments of the model": sorted(given), **facts})
        return (), parts

    def cut(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch, without a comparison with other ranks."""
        batch = {key: given[key] for key in KEYS if key in given}
        rest = {key: value for key, value in given.items() if key not in KEYS}
        mask = batch.get("attention_mask")
        is_whole = mask is not None and mask.dim() == 4
        pairs = batch.pop("attention_mask") if is_whole else None
        seq_len = check_batch(batch, OP).shape[1]
        documents = {key: rest.pop(key, None) for key in (*_OFFSETS, *_LENGTHS)}
        offsets, positions = self._positions(batch, given_offsets(OP, documents))
        mask = batch.get("attention_mask")
        if mask is not None:
            rule = "[B, S], or [B, H or 1, S, S]"
            _require(mask.dim() == 2, "attention_mask", rule, list(mask.shape))
            if bool(mask.bool().all()):
                # A mask that hides nothing is dropped, because it would travel with the keys.
                del batch["attention_mask"]
        for key, value in rest.items():
            matrix = isinstance(value, Tensor) and value.dim() > 1
            _require(not matrix, key, f"no tensor (of {KEYS} alone)", "one")
        for key in ("use_cache", "logits_to_keep", "output_attentions", *CACHES):
            value = rest.get(key)
            absent = not isinstance(value, Tensor) and not value
            rule = "none (set_attn_implementation('sdpa') before generate)"
            _require(absent, key, rule, value)
        loss = self.traits.loss
        rule = "none: its loss is not told the number of labels; compute it from the logits"
        _require("labels" not in batch or loss is not None, "labels", rule, "labels")
        parts = cut_batch(
            {**batch, "position_ids": positions},
            offsets,
            group=self.handle.group,
            layout=self.layout,
            shifts=loss != "plain",
            num_items=rest.pop("num_items_in_batch", None),
            ignore_index=rest.get("ignore_index", -100),
        )
        if pairs is not None:
            rule = f"[B, S], or [B, H or 1, S, S] of {seq_len} positions"
            fits = pairs.shape[2:] == (seq_len, seq_len)
            _require(fits, "attention_mask", rule, list(pairs.shape))
            where = {"group": self.handle.group, "layout": self.layout, "cu_seqlens": offsets}
            parts["attention_mask"] = shard_sequence(pairs, dim=2, **where)
        padded = mask is not None and not bool(mask[:, :1].all())
        self.documents.batch = BatchFacts(offsets, seq_len, padded)
        return {**rest, **parts}

    def _positions(
        self, batch: Mapping[str, Tensor], given: Tensor | None
    ) -> tuple[FoundOffsets | None, Tensor]:
        """Offsets of the documents and positions `[B, S]` or `[1, S]`."""
        first, ids = self.traits.first_position, batch.get("input_ids")
        mask = batch.get("attention_mask")
        tokens = batch["inputs_embeds"] if ids is None else ids
        offsets = check_cu_seqlens(given, OP)
        if "position_ids" in batch:
            positions = batch["position_ids"]
            return document_offsets(positions - first, offsets, OP), positions
        count = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if first > 0 and ids is not None:
            # RoBERTa gives padding the position padding_idx, and counts other tokens from there.
            real = ids.ne(first - 1).int()
            return offsets, (real.cumsum(1) * real + first - 1).long()
        if self.traits.positions_follow_mask and mask is not None:
            ends = bool((mask.bool().int().diff(dim=1) <= 0).all())
            rule = "given where padding is not on the right: the model counts without it"
            _require(ends, "position_ids", rule, "none")
        return offsets, count + first
