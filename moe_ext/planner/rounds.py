"""Codecs of the rounds of local steps: bytes that they send and keep."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from moe_ext.compression.codecs import ChunkedTopK, Codec, PayloadCodec, codec_of

# Codecs of pseudo-gradients whose bytes depend only on the number of elements.
LOCAL_CODECS = (
    *("none", "bf16", "fp16", "int8", "int6", "int4", "int3", "int2", "fp8", "onebit"),
    "sparseloco",
)
# Size at which a codec's payload is computed, to get bytes per element.
_MANY = 2**24


@dataclass(frozen=True)
class RoundCodec:
    """A codec of pseudo-gradients, with its bytes per element.

    Attributes:
        name: name in `Job.local_codec`.
        codec: the codec of `moe_ext.compression`.
    """

    name: str
    codec: Codec

    @property
    def sent(self) -> float:
        """Bytes per element of a message."""
        if isinstance(self.codec, PayloadCodec):
            return self.codec.coding().payload_bytes(_MANY) / _MANY
        return 2.0 if self.codec.lossy else 4.0

    @property
    def gathers(self) -> bool:
        """True if payloads are all-gathered, instead of a reduce-scatter and an all-gather."""
        return isinstance(self.codec, PayloadCodec) and not self.codec.shardable

    @property
    def has_momentum(self) -> bool:
        """True if the outer optimizer has a momentum; SparseLoCo has its residual instead."""
        return self.name != "sparseloco"

    @property
    def making(self) -> float:
        """Bytes per element while pseudo-gradients are concatenated and encoded."""
        return 16.0 if self.gathers else 8.0

    @property
    def travelling(self) -> float:
        """Bytes per element until the mean has arrived and replaced the pseudo-gradient."""
        if self.gathers:
            return 8.0
        return 6.0 if self.codec.plain and self.codec.lossy else 4.0

    def passes(self, num_ranks: int) -> tuple[float, float]:
        """Return the elements that a rank encodes and decodes per element of a pseudo-gradient."""
        return (0.0, 0.0) if self.name == "none" else self.codec.passes(num_ranks)

    def owed(self, num_ranks: int) -> float:
        """Return the bytes of residuals per element: of the last round and of the next."""
        if not self.codec.feeds_back:
            return 0.0
        return 8.0 if self.gathers else 8.0 + 8.0 / num_ranks


@functools.lru_cache(maxsize=len(LOCAL_CODECS))
def round_codec(name: str) -> RoundCodec:
    """Return the codec of a name of `LOCAL_CODECS`."""
    if name == "sparseloco":
        # The numbers are the default options of `SparseLoCo`.
        return RoundCodec(name, ChunkedTopK(64, 4096, 2, decay=0.95))
    return RoundCodec(name, codec_of(name))
