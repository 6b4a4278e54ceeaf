"""Decoding of exponents in plain PyTorch, from the description of the format.

There is no encoder, since encoders may choose among several codes.

Shape suffixes: n elements of a block.
"""

import torch
from torch import Tensor

_PLANS = ((1, 2, 2), (1, 2, 3), (2, 2, 2), (2, 2, 3), (2, 3, 3), (3, 3), (3, 4), (4, 3))
_BLOCK = 8192
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _codes(planes: Tensor, width: int, count: int) -> Tensor:
    """Return a code for each of `count` elements, from `width` planes of 64 bits side by side."""
    bits = (planes[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    words = bits.view(-1, width, 64).long()
    return (words << torch.arange(width)[:, None]).sum(dim=1).flatten()[:count]


def _exponents(coded: Tensor, plan: int, symbols: list[int], n: int) -> list[int]:
    """Return the exponents of a block, one level at a time.

    Each level has the exponents for which the levels before have no code.
    """
    places, found = torch.arange(n), torch.zeros(n, dtype=torch.long)
    for width in _PLANS[plan]:
        num_bytes = 8 * width * -(-len(places) // 64)
        codes, coded = _codes(coded[:num_bytes], width, len(places)), coded[num_bytes:]
        own, symbols = symbols[: 2**width - 1], symbols[2**width - 1 :]
        found[places] = torch.tensor([*own, 0])[codes]
        places = places[codes == 2**width - 1]
    found[places] = coded[: len(places)].long()
    numbers: list[int] = found.tolist()
    return numbers


def _block(block: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    item = dtype.itemsize
    head, rest = block[:24].tolist(), block[24:]
    if head[0] == 0:
        return rest[: n * item].clone().view(_BITS[dtype]).long()
    if dtype == torch.float32:
        low = rest[: 2 * n].clone().view(torch.int16).long() & 0xFFFF
        kept, skip = low | rest[2 * n : 3 * n].long() << 16, _aligned(3 * n)
    else:
        kept, skip = rest[:n].long(), _aligned(n)
    if dtype == torch.float16:
        three_bytes = 3 * 8 * -(-n // 64)
        high = _codes(rest[skip : skip + three_bytes], 3, n)
        skip += three_bytes
        kept |= (high & 3) << 8 | (high & 4) << 13
    exponents = torch.tensor(_exponents(rest[skip:], head[0] - 1, head[1:], n))
    if dtype == torch.float16:
        return kept | exponents << 10
    rotated = exponents << (8 * item - 8) | kept
    return rotated >> 1 | (rotated & 1) << (8 * item - 1)


def decode_exponents_(out: Tensor, payload: Tensor) -> None:
    """Same as `moe_ext.ops.decode_exponents_`, for payloads that are not damaged."""
    numel, flat = out.numel(), out.view(-1).view(_BITS[out.dtype])
    blocks = -(-numel // _BLOCK)
    sizes = payload[16 : 16 + 4 * blocks].clone().view(torch.int32).tolist()
    place = 16 + _aligned(4 * blocks)
    for i, size in enumerate(sizes):
        part = flat[i * _BLOCK : (i + 1) * _BLOCK]
        part.copy_(_block(payload[place : place + size], len(part), out.dtype).to(part.dtype))
        place += size
