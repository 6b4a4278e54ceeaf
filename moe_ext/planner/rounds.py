"""Rounds of a job with local steps: what each codec of theirs sends and keeps."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from moe_ext.compression.codecs import ChunkedTopK, Codec, PayloadCodec, codec_of

# Codecs of pseudo-gradients: those whose bytes depend on the number of elements alone.
LOCAL_CODECS = (
    *("none", "bf16", "fp16", "int8", "int6", "int4", "int3", "int2", "fp8", "onebit"),
    "sparseloco",
)
# Elements of which payloads and times of codecs are taken, to be counted by the element.
_MANY = 2**24


@dataclass(frozen=True)
class RoundCodec:
    """A codec of pseudo-gradients, by the element.

    Attributes:
        name: of `Job.local_codec`.
        codec: the same of `moe_ext.compression`.
    """

    name: str
    codec: Codec

    @property
    def sent(self) -> float:
        """Bytes of an element as it is sent."""
        if isinstance(self.codec, PayloadCodec):
            return self.codec.coding().payload_bytes(_MANY) / _MANY
        return 2.0 if self.codec.lossy else 4.0

    @property
    def gathers(self) -> bool:
        """True if each rank sends all that it has to all others, instead of a sum by shards."""
        return isinstance(self.codec, PayloadCodec) and not self.codec.shardable

    @property
    def has_momentum(self) -> bool:
        """True if the outer optimizer has a momentum; the residual of SparseLoCo stands for it."""
        return self.name != "sparseloco"

    @property
    def making(self) -> float:
        """Bytes of an element while pseudo-gradients are made of their pieces, and coded."""
        return 16.0 if self.gathers else 8.0

    @property
    def travelling(self) -> float:
        """Bytes of an element until the mean is there, which takes the pseudo-gradient's place."""
        if self.gathers:
            return 8.0
        return 6.0 if self.codec.plain and self.codec.lossy else 4.0

    def passes(self, num_ranks: int) -> tuple[float, float]:
        """Elements that a rank encodes and decodes for each one of the pseudo-gradient."""
        return (0.0, 0.0) if self.name == "none" else self.codec.passes(num_ranks)

    def owed(self, num_ranks: int) -> float:
        """Bytes that are kept of an element, of the last round and to be written in the next."""
        if not self.codec.feeds_back:
            return 0.0
        return 8.0 if self.gathers else 8.0 + 8.0 / num_ranks


@functools.lru_cache(maxsize=len(LOCAL_CODECS))
def round_codec(name: str) -> RoundCodec:
    """The codec of a name of `LOCAL_CODECS`."""
    if name == "sparseloco":
        # The options of `SparseLoCo`.
        return RoundCodec(name, ChunkedTopK(64, 4096, 2, decay=0.95))
    return RoundCodec(name, codec_of(name))
