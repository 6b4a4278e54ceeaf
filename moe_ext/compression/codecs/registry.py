"""Registry of codecs by name. A new codec is a class, registered here or by its user.

Shape suffixes: N elements of a flat gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_ext._checks import check_choice, check_rule
from moe_ext.comm.rates import Rehearsal
from moe_ext.compression.codecs.base import Codec
from moe_ext.compression.codecs.dense import BlockSparse, Dense, Lossless
from moe_ext.compression.codecs.quantized import OneBit, Quantize
from moe_ext.compression.codecs.sparse import Threshold, TopK
from moe_ext.compression.collectives.coding import FORMATS
from moe_ext.compression.feedback import CodecMemory

CodecFactory = Callable[[float], Codec]
MemoryFactory = Callable[[Codec, Tensor], CodecMemory]

_factories: dict[str, CodecFactory] = {}


def register_codec(name: str, factory: CodecFactory) -> None:
    """Give a codec a name, by which policies, states and cost models find it.

    Args:
        name: as for ``CompressionState(codec=name)``; the same on every rank.
        factory: makes the codec from a density, which only sparse codecs use.

    Raises:
        ValueError: the name is taken.
    """
    check_rule("register_codec", "name", name, "a new one", name not in codec_names())
    _factories[name] = factory


def codec_names() -> tuple[str, ...]:
    """Return the names that policies and states accept; "auto" chooses between codecs."""
    return (*_factories, "auto")


def codec_of(codec: str | Codec, density: float = 0.01, *, owner: str = "codec_of") -> Codec:
    """Make the codec of a name.

    Args:
        codec: a name, or a codec, which is returned.
        density: for "topk" and "threshold".
        owner: for error messages.

    Raises:
        ValueError: the name is unknown, or is "auto", which stands for a choice between codecs.
    """
    if isinstance(codec, str):
        check_choice(owner, "codec", codec, tuple(_factories))
        made = _factories[codec](density)
        rule = "made as a codec by its factory"
        check_rule(owner, f"codec {codec!r}", made, rule, isinstance(made, Codec))
        return made
    rule = f"a codec or one of {tuple(_factories)}"
    check_rule(owner, "codec", codec, rule, isinstance(codec, Codec))
    return codec


def rate_name(codec: Codec) -> str:
    """Return the name of a codec in a `CostTable`, or its repr if options are not the defaults."""
    named = codec.name in codec_names()[:-1] and codec_of(codec.name) == codec
    return codec.name if named else repr(codec)


def rehearsal_of(
    codec: Codec,
    device: torch.device | str = "cpu",
    memory_of: MemoryFactory | None = None,
) -> Rehearsal:
    """Return encode and decode calls for `CostTable.measure`, of float32 gradients and a residual.

    Args:
        codec: the codec to rehearse.
        device: device of the gradients.
        memory_of: makes the memory for ``codec.rehearsal``; None for `Codec.new_memory`.
    """

    def rehearse(numel: int) -> tuple[int, int, Callable[[], object], Callable[[], object]]:
        generator = torch.Generator().manual_seed(0)
        # Numbers are random, because a constant gradient would compress too well.
        grad_N = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(
            device
        )
        memory = codec.new_memory(grad_N) if memory_of is None else memory_of(codec, grad_N)
        calls = codec.rehearsal(grad_N, memory)
        return grad_N.nbytes, codec.sent_bytes(numel, 2), *calls

    return rehearse


def _quantize(format: str, density: float) -> Codec:
    return Quantize(format)


def _powersgd(density: float) -> Codec:
    # torch's PowerSGD hook needs numpy, so it is imported only on demand.
    from moe_ext.compression.codecs.powersgd import PowerSGD

    return PowerSGD()


register_codec("none", lambda density: Dense())
register_codec("bf16", lambda density: Dense("bf16"))
register_codec("fp16", lambda density: Dense("fp16"))
register_codec("lossless", lambda density: Lossless())
for _format in FORMATS:
    if _format != "sign":
        register_codec(_format, partial(_quantize, _format))
register_codec("onebit", lambda density: OneBit())
register_codec("topk", TopK)
register_codec("threshold", Threshold)
register_codec("powersgd", _powersgd)
register_codec("block_sparse", lambda density: BlockSparse())
register_codec("rows", lambda density: BlockSparse("row"))
