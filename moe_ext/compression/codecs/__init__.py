"""Codecs, which encode gradients for the network, and their registry by name."""

from moe_ext.compression.codecs.base import Codec, OnNonfinite, PayloadCodec, Unsent
from moe_ext.compression.codecs.chunked import ChunkedTopK
from moe_ext.compression.codecs.dense import BlockSparse, Dense, Lossless, dense_reduction
from moe_ext.compression.codecs.masked import Masked, TwoOfFour
from moe_ext.compression.codecs.quantized import OneBit, Outliers, Quantize, Rounded
from moe_ext.compression.codecs.registry import (
    MemoryFactory,
    codec_names,
    codec_of,
    rate_name,
    register_codec,
    rehearsal_of,
)
from moe_ext.compression.codecs.sparse import Threshold, TopK
