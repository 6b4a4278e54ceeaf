"""Probe of a model: a run on a few tokens shows how the model treats tokens and positions.

The model runs unchanged, except that its attention returns the own value of each token. If
anything still goes from one token to another, the model mixes tokens outside of attention.

Shapes: L tokens of the probe, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ext.attention.call import AttentionOptions
from moe_ext.attention.huggingface.interface import (
    BatchFacts,
    PassDocuments,
    forward_arguments,
    install,
)
from moe_ext.attention.huggingface.mixers import SharedMixers, share_mixers
from moe_ext.attention.sharding import shift_labels

OP = "prepare_model"
_NAME = "moe_ext_ring_probe"
# Numbers of tokens of a probe. Other dimensions rarely have these sizes, so a dimension of that
# size is that of the tokens. The first length that the model has positions for is taken, because a
# longer probe also shows pooling over 128 tokens.
_LENGTHS = (263, 53, 11)
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# Logit of each token for itself, where all other logits are 0. The loss of the token itself is
# lower than that of another label by this number, which is more than any rounding error.
_FAVOUR = 6.0
# Types of rotary embeddings whose frequencies depend on the largest position in the input, which
# differs between ranks.
_ROTATIONS_OF_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Traits:
    """Form of the batches that a model takes.

    Attributes:
        first_position: first position of a sequence; for RoBERTa padding_idx + 1.
        positions_follow_mask: True if padding does not count when the model makes positions itself.
        loss: "shifted", the mean over labels of the next token; "plain", the mean over labels of
            the token itself; None if the model has no loss that takes the number of labels.
    """

    first_position: int
    positions_follow_mask: bool
    loss: Literal["shifted", "plain"] | None


def probe(model: nn.Module) -> Traits:
    """Run a model on a few tokens, and leave it unchanged.

    Raises:
        ValueError: the model mixes tokens outside of attention, does not call attention by name,
            has an attention that ring attention does not support, or ignores its `position_ids`.
    """
    return _Probe(model).traits()


def _require(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{OP}: expected the model to {rule}, got {found}")


class _Probe:
    def __init__(self, model: Any) -> None:
        self._model = model
        _, self._fixed = forward_arguments(model)
        self._embedding = model.get_input_embeddings()
        sizes = [getattr(model.config, name, None) or _LENGTHS[0] + 2 for name in _POSITIONS]
        # RoBERTa has two positions fewer than its config says.
        fitting = (n for n in _LENGTHS if n + 2 <= min(sizes))
        self._length = next(fitting, _LENGTHS[-1])
        self._middle = self._length // 2
        self._queries: list[Tensor] = []
        self._num_mixers = 0

    def traits(self) -> Traits:
        model = self._model
        title, config = type(model).__name__, model.config
        is_meta = any(weight.is_meta for weight in model.parameters())
        _require(not is_meta, "have its weights", "the meta device")
        _require(not getattr(config, "is_encoder_decoder", False), "have one sequence", title)
        kinds = sorted({*_rotations(config)} & {*_ROTATIONS_OF_LENGTH})
        rule = "rotate a position in one way for sequences of any length"
        _require(not kinds, rule, f"rope_type {kinds} in {title}")
        device = self._embedding.weight.device
        was, training = config._attn_implementation, [(m, m.training) for m in model.modules()]
        held = [(part, part._attn_implementation) for part in _parts(config)]
        documents = PassDocuments(OP, AttentionOptions(None), BatchFacts(None, self._length))
        install(_NAME, self._own_values, documents)
        mixers = SharedMixers(_NAME, documents, "contiguous", apart=True)
        self._num_mixers, take_back = share_mixers(model, mixers)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                model.set_attn_implementation(_NAME)
                model.eval()
                return self._traits(title, device)
            finally:
                take_back()
                model.set_attn_implementation(was)
                for part, name in held:
                    part._attn_implementation = name
                for module, flag in training:
                    module.training = flag

    def _traits(self, title: str, device: torch.device) -> Traits:
        tokens = self._tokens()
        ids = torch.full((1, self._length), tokens[0], device=device)
        self._check_mixing(title, ids)
        plain = self._run(input_ids=ids)
        first = self._first_position(title, ids, plain)
        changed = ids.clone()
        changed[:, self._middle] = tokens[1]
        same = self._run(input_ids=changed, position_ids=torch.full_like(ids, first))
        others = [i for i in range(self._length) if i != self._middle]
        rows = [x[..., others, :] for x in same]
        apart = any(not _close(x, x[..., :1, :].expand_as(x)) for x in rows)
        _require(not apart, "take its positions from position_ids alone", f"others in {title}")
        mask = torch.ones_like(ids)
        mask[:, : self._middle] = 0
        padded = self._run(input_ids=ids, attention_mask=mask)
        real = slice(self._middle, None)
        pairs = zip(plain, padded, strict=True)
        alike = all(_close(a[..., real, :], b[..., real, :]) for a, b in pairs)
        return Traits(first, not alike, self._loss(torch.tensor(tokens, device=device)))

    def _tokens(self) -> list[int]:
        """Ids of tokens that are not special in the config."""
        special = [v for k, v in vars(self._model.config).items() if k.endswith(("_id", "_index"))]
        size = self._embedding.weight.shape[0]
        free = [i for i in range(size // 2, size) if i not in special]
        return [free[i * i % len(free)] for i in range(self._length)]

    def _own_values(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """Attention in which each token sees only itself."""
        self._queries += [query, key]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def _call(self, **inputs: Any) -> Any:
        self._queries.clear()
        try:
            return self._model(**inputs, **self._fixed)
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith(OP):
                raise
            found = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{OP}: expected {type(self._model).__name__} to run with attention of its own "
                f"choice ({', '.join(inputs)}), got {found}"
            ) from error

    def _run(self, **inputs: Any) -> list[Tensor]:
        """Queries and keys of all layers `[1, H, L, D]`, and the output `[1, L, V]`."""
        out = self._rows(self._call(**inputs))
        return [*self._queries, out]

    def _rows(self, output: Any) -> Tensor:
        logits = getattr(output, "logits", None)
        rows = getattr(output, "last_hidden_state", None) if logits is None else logits
        whole = isinstance(rows, Tensor) and rows.dim() == 3 and rows.shape[1] == self._length
        found = list(rows.shape) if isinstance(rows, Tensor) else type(output).__name__
        _require(whole, f"give a row for each of {self._length} tokens", found)
        assert isinstance(rows, Tensor)
        return rows

    def _check_mixing(self, title: str, ids: Tensor) -> None:
        """Raise ValueError if NaN in the embedding of one token reaches the output of another."""
        mixer: list[str] = []
        middle = torch.tensor([self._middle], device=ids.device)

        def poison(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output.index_fill(1, middle, torch.nan)

        def watch(name: str) -> Callable[..., None]:
            def look(module: nn.Module, args: Any, output: Any) -> None:
                out = output[0] if isinstance(output, tuple) and output else output
                if not mixer and isinstance(out, Tensor) and self._spread(out):
                    mixer.append(f"{name} ({type(module).__name__})")

            return look

        with ExitStack() as stack:
            stack.callback(self._embedding.register_forward_hook(poison).remove)
            for name, module in self._model.named_modules():
                if name and module is not self._embedding:
                    stack.callback(module.register_forward_hook(watch(name)).remove)
            rows = self._rows(self._call(input_ids=ids))
        reached = rows.isnan().any(-1)[0].nonzero()[:, 0].tolist()
        rule = "mix tokens by its attention alone, which transformers' AttentionInterface gives it"
        found = f"tokens mixed in {mixer[0] if mixer else title}; see docs/long_models.md"
        _require(set(reached) <= {self._middle}, rule, found)
        rule = "call the attention that transformers' AttentionInterface gives it"
        calls = len(self._queries) + self._num_mixers
        _require(calls > 0 and len(reached) > 0, rule, f"no call in {title}")

    def _spread(self, x: Tensor) -> bool:
        """True if x has NaN at tokens other than the one that it was put in for."""
        if not x.is_floating_point():
            return False
        for dim in [i for i, size in enumerate(x.shape) if size == self._length]:
            found = x.isnan().transpose(0, dim).flatten(1).any(1)
            found[self._middle] = False
            if bool(found.any()):
                return True
        return False

    def _first_position(self, title: str, ids: Tensor, plain: list[Tensor]) -> int:
        """The first position that the model uses without `position_ids`."""
        embeddings = [m for m in self._model.modules() if isinstance(m, nn.Embedding)]
        pads = {m.padding_idx + 1 for m in embeddings if m.padding_idx is not None}
        for first in (0, *sorted(pads - {0})):
            positions = torch.arange(first, first + self._length, device=ids.device)[None]
            found = self._run(input_ids=ids, position_ids=positions)
            if all(_close(a, b) for a, b in zip(plain, found, strict=True)):
                return first
        rule = "count positions from 0 or from padding_idx + 1"
        raise ValueError(f"{OP}: expected the model to {rule}, got another count in {title}")

    def _loss(self, tokens: Tensor) -> Literal["shifted", "plain"] | None:
        ids = labels = tokens[None]
        nexts = shift_labels(labels)

        def know(module: nn.Module, args: Any, output: Any) -> Any:
            """Replace logits by ones that favour the token itself, so that all losses differ."""
            if type(output) is not Tensor or output.shape[:-1] != ids.shape:
                return None
            known = torch.zeros_like(output)
            return known.scatter_(-1, ids[..., None], _FAVOUR)

        find = getattr(self._model, "get_output_embeddings", lambda: None)
        head = find()
        with ExitStack() as stack:
            if isinstance(head, nn.Module):
                stack.callback(head.register_forward_hook(know).remove)
            mean = self._own_loss(ids, {"labels": labels})
            if _is_loss(mean, labels, self._length):
                told = self._own_loss(ids, {"labels": labels}, 3.0)
                return "plain" if _is_loss(told, labels, 3) else None
            if _is_loss(mean, nexts, self._length - 1):
                told = self._own_loss(ids, {"labels": nexts, "shift_labels": labels}, 3.0)
                return "shifted" if _is_loss(told, labels, 3) else None
            return None

    def _own_loss(
        self, ids: Tensor, labels: dict[str, Tensor], count: float = 0.0
    ) -> tuple[Tensor, Tensor] | None:
        """The model's loss for labels, and its logits `[L, V]`; None if it has no loss."""
        given = {"num_items_in_batch": torch.tensor(count, device=ids.device)} if count else {}
        try:
            output = self._call(input_ids=ids, **labels, **given)
        except ValueError:
            return None
        loss, auxiliary = getattr(output, "loss", None), getattr(output, "aux_loss", None)
        if loss is None or getattr(output, "logits", None) is None:
            return None
        if auxiliary is not None:
            loss = loss - self._model.config.router_aux_loss_coef * auxiliary
        return loss.float(), output.logits[0].float()


def _is_loss(found: tuple[Tensor, Tensor] | None, targets: Tensor, count: int) -> bool:
    """True if a loss is the sum of the cross entropies of the targets, divided by `count`."""
    if found is None:
        return False
    loss, logits = found
    total = F.cross_entropy(logits, targets[0], reduction="sum")
    return bool(torch.isclose(loss, total / count, rtol=1e-3))


def _close(a: Tensor, b: Tensor) -> bool:
    # The same row in batches with other rows may give products that differ in their last digits.
    limit = 1e-4 if a.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((a - b).abs().max() <= limit * a.abs().max())


def _parts(config: Any) -> Iterator[Any]:
    """Nested configurations of a configuration, outer ones first."""
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield part
            yield from _parts(part)


def _rotations(config: Any) -> list[str]:
    """All rope_types of a config, which may have one for each type of layer."""
    found = []
    for options in (getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")):
        if isinstance(options, dict):
            parts = [options, *(v for v in options.values() if isinstance(v, dict))]
            found += [part["rope_type"] for part in parts if "rope_type" in part]
    return found
