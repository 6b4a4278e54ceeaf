"""Block quantisers in plain PyTorch.

Shape suffixes: N elements, B blocks, S elements of a block.
"""

import torch
from torch import Tensor

from moe_ext.ops.quantize import (
    CODE_BITS,
    ROW_SCALES,
    QuantizedBlocks,
    format_of,
    num_scales,
    row_bytes,
)
from moe_ext.reference.noisy_gating import routing_uniform

_LARGEST = {
    "fp8": 448.0,
    **{f"int{bits}": 2.0 ** (bits - 1) - 1 for bits in (8, 6, 4, 3, 2)},
}


def _blocks(x_N: Tensor, block: int | None) -> Tensor:
    """Return `[B, S]`, the last block filled up with zeros; one block for None."""
    block = block or max(len(x_N), 1)
    missing = -len(x_N) % block
    return torch.cat([x_N, x_N.new_zeros(missing)]).view(-1, block)


def _mean_magnitude(a_BS: Tensor, numel: int) -> Tensor:
    """Return the mean magnitude of each block: sums in sixteen lanes, then of halves of lanes."""
    block = a_BS.shape[1]
    factor_B1 = torch.where(a_BS.abs().amax(1, keepdim=True) > 2.0**100, 2.0**-32, 1.0)
    lanes = torch.zeros(len(a_BS), 16)
    for part in (a_BS.abs() * factor_B1).split(16, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sizes_B = torch.full((len(a_BS),), float(block))
    if numel % block:
        sizes_B[-1] = numel % block
    return lanes[:, 0] / sizes_B / factor_B1[:, 0]


def _scales(a_BS: Tensor, largest: float) -> Tensor:
    scale_B = a_BS.abs().amax(dim=1) / largest
    too_large = (scale_B * largest).isinf()
    return torch.where(too_large, torch.nextafter(scale_B, torch.zeros(())), scale_B)


def _e4m3(x: Tensor, uniform: Tensor | None) -> Tensor:
    """Round to numbers of float8 e4m3fn, not beyond 448."""
    exponent = torch.frexp(x).exponent.clamp(min=-5) - 1
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    steps = x.abs() / step
    whole = steps.round() if uniform is None else (steps + uniform).floor()
    return torch.copysign((whole * step).clamp(max=448.0), x)


def _codes(a_BS: Tensor, scale_B: Tensor, format: str, uniform: Tensor | None) -> Tensor:
    """Return the codes as numbers."""
    largest = _LARGEST[format]
    lift_B = torch.where(scale_B < 2.0**-64, 2.0**64, 1.0)
    inverse_B = torch.where(scale_B > 0, 1 / (scale_B * lift_B), 0.0)
    scaled = a_BS * lift_B[:, None] * inverse_B[:, None]
    if format == "fp8":
        return _e4m3(scaled.clamp(-largest, largest), uniform)
    whole = scaled.round() if uniform is None else (scaled + uniform).floor()
    return whole.clamp(-largest, largest)


def _pack(code_N: Tensor, format: str) -> Tensor:
    if format == "fp8":
        return code_N.to(torch.float8_e4m3fn).view(torch.uint8)
    bits_NQ = (code_N.long()[:, None] >> torch.arange(CODE_BITS[format])) & 1
    return (_blocks(bits_NQ.flatten(), 8) << torch.arange(8)).sum(dim=1).to(torch.uint8)


def _unpack(codes: Tensor, numel: int, format: str) -> Tensor:
    """Return the codes as numbers, and signs as 0 and -1."""
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    bits = CODE_BITS[format]
    found = (codes.long()[:, None] >> torch.arange(8)) & 1
    code_N = (found.flatten()[: numel * bits].view(-1, bits) << torch.arange(bits)).sum(dim=1)
    return (code_N - (code_N >> (bits - 1) << bits)).float()


def quantize_blockwise(
    x: Tensor,
    *,
    bits: int = 8,
    block: int | None = 128,
    format: str | None = None,
    residual: Tensor | None = None,
    rng_state: Tensor | None = None,
    check_finite: bool = True,
    residual_in: Tensor | None = None,
    element_offset: int = 0,
) -> QuantizedBlocks:
    """Same as `moe_ext.ops.quantize_blockwise`."""
    name = format_of("quantize_blockwise", bits, format)
    numel = x.numel()
    owed = residual if residual_in is None else residual_in
    a_N = x.float().flatten() if owed is None else owed.flatten() + x.float().flatten()
    if not a_N.isfinite().all():
        raise RuntimeError("quantize_blockwise: expected x to be finite, got others")
    a_BS = _blocks(a_N, block)
    if name == "sign":
        scale_B = _mean_magnitude(a_BS, numel)
        code_BS = torch.where(a_BS < 0, -1.0, 1.0)
        codes = _pack((a_N < 0).float(), name)
    else:
        uniform_BS = None
        if rng_state is not None:
            uniform_N = routing_uniform(rng_state, 1, element_offset + numel, stream=5)[0]
            uniform_BS = _blocks(uniform_N[element_offset:], block)
        scale_B = _scales(a_BS, _LARGEST[name])
        code_BS = _codes(a_BS, scale_B, name, uniform_BS)
        codes = _pack(code_BS.flatten()[:numel], name)
    if residual is not None:
        residual.copy_((a_BS - code_BS * scale_B[:, None]).flatten()[:numel].view(x.shape))
    return QuantizedBlocks(codes, scale_B)


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    numel: int,
    *,
    bits: int = 8,
    block: int | None = 128,
    format: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Same as `moe_ext.ops.dequantize_blockwise`."""
    name = format_of("dequantize_blockwise", bits, format)
    code_N = _unpack(codes, numel, name)
    if name == "sign":
        code_N = 1.0 + 2.0 * code_N
    values_BS = _blocks(code_N, block) * scales[:, None]
    return values_BS.flatten()[:numel].to(dtype)


def dequantize_add_(
    out: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    bits: int = 8,
    block: int | None = 128,
    format: str | None = None,
    accumulate: bool = True,
) -> None:
    """Same as `moe_ext.ops.dequantize_add_`."""
    values_N = dequantize_blockwise(
        codes, scales, out.numel(), bits=bits, block=block, format=format
    )
    values = values_N.view(out.shape)
    out.copy_(out.float() + values if accumulate else values)


def _row_blocks(x_ND: Tensor, block: int) -> Tensor:
    """Return `[N, blocks, elements of a block]`, the last block of a row filled up with zeros."""
    num_blocks = num_scales(x_ND.shape[1], block)
    missing = num_blocks * block - x_ND.shape[1]
    return torch.nn.functional.pad(x_ND, (0, missing)).view(len(x_ND), num_blocks, block)


def quantize_rows(x: Tensor, format: str) -> Tensor:
    """Same as `moe_ext.ops.quantize_rows`."""
    block, _ = ROW_SCALES[format]
    num_rows, dim = x.shape
    a_BS = _row_blocks(x.float(), block).flatten(0, 1)
    code = "fp8" if format == "mx" else format
    largest_B = a_BS.abs().amax(1)
    if format == "mx":
        mantissa_B, exponent_B = torch.frexp(largest_B)  # mantissas in [1/2, 1)
        exponent_B = (exponent_B - 9 + (mantissa_B > 0.875)).clamp(min=-127)
        scaled_BS = torch.ldexp(a_BS.double(), -exponent_B[:, None]).float()
        whole_BS = _e4m3(scaled_BS, None)
        exponent_B = torch.where(largest_B > 0, exponent_B, -127).masked_fill(
            ~largest_B.isfinite(), 128
        )
        scales = (exponent_B + 127).to(torch.uint8)[:, None]
    else:
        scale_B = _scales(a_BS, _LARGEST[code])
        whole_BS = _codes(a_BS, scale_B, code, None)
        scale_B = scale_B.masked_fill(~largest_B.isfinite(), float("nan"))
        scales = scale_B[:, None].view(torch.uint8)
    whole_BS = whole_BS.masked_fill(~largest_B.isfinite()[:, None], 0.0)
    codes = _pack(whole_BS.flatten(), code).view(num_rows, num_scales(dim, block) * block)
    scales = scales.reshape(num_rows, row_bytes(dim, format) - dim)
    return torch.cat([codes[:, :dim], scales], 1)


def dequantize_rows(
    rows: Tensor, dim: int, format: str, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Same as `moe_ext.ops.dequantize_rows`."""
    block, _ = ROW_SCALES[format]
    codes, scales = rows[:, :dim], rows[:, dim:]
    code = "fp8" if format == "mx" else format
    values = _unpack(codes.flatten(), codes.numel(), code).view(codes.shape)
    if format == "mx":
        scale = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.int() - 127)
        scale = scale.masked_fill(scales == 255, float("nan"))
        product = (_row_blocks(values, block) * scale[:, :, None]).flatten(1)[:, :dim]
        most = torch.finfo(dtype).max
        return product.clamp(-most, most).float().to(dtype)
    # The clone aligns the scales, because part of a row may start at any byte.
    scale = scales.flatten().clone().view(torch.float32).view(len(rows), num_scales(dim, block))
    return (_row_blocks(values, block) * scale[:, :, None]).flatten(1)[:, :dim].to(dtype)


def quantized_mm(
    x_TK: Tensor,
    codes: Tensor,
    scales_MB: Tensor,
    outliers_n: Tensor,
    outlier_columns_n: Tensor,
    outlier_offsets: Tensor,
    *,
    bits: int = 8,
) -> Tensor:
    """Same as `moe_ext.ops.quantized_mm`, in float64."""
    num_rows, dim = codes.shape[0], x_TK.shape[1]
    places = torch.arange(8 // bits) * bits
    numbers = (codes[:, :, None].long() >> places & (1 << bits) - 1).view(num_rows, dim)
    numbers = numbers - (numbers >> bits - 1 << bits)
    weight = numbers * scales_MB.double().repeat_interleave(dim // scales_MB.shape[1], dim=1)
    for row in range(num_rows):
        mine = slice(int(outlier_offsets[row]), int(outlier_offsets[row + 1]))
        weight[row, outlier_columns_n[mine].long()] += outliers_n[mine].double()
    return x_TK.double() @ weight.T
