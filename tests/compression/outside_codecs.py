"""A codec as a user writes it, for tests that register it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from moe_ext.compression import PayloadCodec


@dataclass(frozen=True)
class Short(PayloadCodec):
    """Sends bfloat16 numbers."""

    name: ClassVar[str] = "short"

    def payload_bytes(self, numel):
        return 2 * numel

    def encode(self, x_N, residual_N=None, *, rng_state=None):
        whole_N = x_N.float() if residual_N is None else x_N + residual_N
        sent_N = whole_N.bfloat16()
        if residual_N is not None:
            torch.sub(whole_N, sent_N, out=residual_N)
        return sent_N.view(torch.uint8)

    def decode_add_(self, out_N, payload):
        out_N += payload.view(torch.bfloat16)
