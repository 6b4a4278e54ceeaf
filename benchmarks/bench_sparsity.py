"""Packing by mask beside a copy, and products with packed weights beside dense ones, with bytes."""

import torch
from _harness import Table, copy_of, interleaved, milliseconds, ratio

from moe_ext import ops
from moe_ext.compression import Outliers, TwoOfFour
from moe_ext.compression.packed_experts import _CodedWeights, _Kept

ROWS, COLUMNS = 8192, 4096
DENSITIES = (0.1, 0.25, 0.5)
TOKENS = (1, 2, 4, 16)
EXPERT = 4096, 1024
EXPERT_ROWS = (2, 4, 8, 16, 32)


def kept_at(weight: torch.Tensor, density: float) -> torch.Tensor:
    """Bool, so many of each row at random."""
    mask = torch.zeros_like(weight, dtype=torch.bool)
    order = torch.rand(weight.shape).argsort(dim=1)[:, : int(density * weight.shape[1])]
    return mask.scatter_(1, order, True)


def packing_rows() -> list[tuple[str, ...]]:
    """Gradients and weights as they travel: bytes, and times beside a copy."""
    weight = torch.randn(ROWS // 4, COLUMNS).bfloat16()
    rows = []
    for density in DENSITIES:
        mask = kept_at(weight, density)
        bitmap, packed = ops.pack_bits(mask), weight[mask]
        out = torch.empty_like(weight)
        indices = mask.view(-1).nonzero().view(-1)
        times = interleaved(
            {
                "pack": lambda p=packed, b=bitmap: ops.pack_masked_(p, weight, b),
                "unpack": lambda p=packed, b=bitmap, o=out: ops.unpack_masked_(o, p, b),
                "index": lambda i=indices: weight.view(-1)[i],
                "copy": copy_of(weight.nbytes + packed.nbytes),
            }
        )
        rows.append(
            (
                f"mask, density {density}",
                f"{packed.nbytes / weight.nbytes:.4f}",
                *(milliseconds(times[name]) for name in ("pack", "unpack", "index", "copy")),
            )
        )
    pruned = weight * kept_fours(weight)
    for codec in (TwoOfFour(), Outliers("int8"), Outliers("int4")):
        x, out = pruned.view(-1), torch.zeros(pruned.numel())
        payload = codec.encode(x)
        times = interleaved(
            {
                "encode": lambda c=codec, x=x: c.encode(x),
                "decode": lambda c=codec, o=out, p=payload: c.decode_add_(o, p),
                "copy": copy_of(weight.nbytes + payload.nbytes),
            }
        )
        share = f"{payload.nbytes / weight.nbytes:.4f}"
        shown = [milliseconds(times[name]) for name in ("encode", "decode", "copy")]
        rows.append((codec.name, share, shown[0], shown[1], "-", shown[2]))
    return rows


def kept_fours(weight: torch.Tensor) -> torch.Tensor:
    """Bool, the two largest of four neighbours."""
    fours = weight.abs().unflatten(-1, (-1, 4))
    best = fours.topk(2).indices
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)


def product_rows() -> list[tuple[str, ...]]:
    """Rows of a weight that is read dense and packed."""
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    packed = {}
    for bits in (8, 4):
        codes, scales = ops.quantize_blockwise(weight, bits=bits, block=128)
        count = weight.numel() // 200
        places = torch.randperm(weight.numel())[:count].sort().values
        offsets = torch.searchsorted(places, torch.arange(ROWS + 1) * COLUMNS)
        parts = (
            codes.view(ROWS, -1),
            scales.view(ROWS, -1),
            weight.view(-1)[places],
            (places % COLUMNS).int(),
            offsets,
        )
        size = sum(part.nbytes for part in parts)
        packed[f"int{bits}, 0.5 % exact"] = (
            size,
            lambda x, parts=parts, bits=bits: ops.quantized_mm(x, *parts, bits=bits),
        )
    for density in DENSITIES:
        mask = kept_at(weight, density)
        values, bitmap = weight[mask], ops.pack_bits(mask).view(ROWS, -1)
        packed[f"mask, density {density}"] = (
            values.nbytes + bitmap.nbytes,
            lambda x, v=values, b=bitmap: ops.masked_mm(x, v, b),
        )
    sparse = (weight * kept_at(weight, 0.1)).float().to_sparse_csr()
    size = sparse.values().nbytes + sparse.col_indices().nbytes
    packed["torch CSR, float32, density 0.1"] = size, lambda x: sparse @ x.float().T
    rows = []
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, COLUMNS).bfloat16()
        runs = {"dense": lambda x=x: torch.nn.functional.linear(x, weight)}
        runs |= {name: (lambda x=x, run=run: run(x)) for name, (_, run) in packed.items()}
        times = interleaved(runs, seconds=3.0)
        for name in runs:
            size = weight.nbytes if name == "dense" else packed[name][0]
            rows.append(
                (
                    name,
                    f"T={num_tokens}",
                    f"{size / weight.nbytes:.3f}",
                    milliseconds(times[name]),
                    ratio(times["dense"], times[name]),
                )
            )
    return rows


def expert_rows() -> list[tuple[str, ...]]:
    """An expert's product with packed weights over one with weights that are unpacked for it."""
    weight = torch.randn(1, *EXPERT).bfloat16()
    kinds = {
        "int8, 0.5 % exact": _CodedWeights.of(weight, 8, 128, 0.005),
        "int4, 0.5 % exact": _CodedWeights.of(weight, 4, 128, 0.005),
        "mask, density 0.1": _Kept.of(weight * kept_at(weight, 0.1)),
        "mask, density 0.5": _Kept.of(weight * kept_at(weight, 0.5)),
    }
    found = []
    for name, packed in kinds.items():
        cells = []
        for num_rows in EXPERT_ROWS:
            x = torch.randn(num_rows, EXPERT[1]).bfloat16()
            times = interleaved(
                {
                    "packed": lambda x=x, packed=packed: packed.product(x),
                    "dense": lambda x=x, packed=packed: torch.nn.functional.linear(
                        x, packed.dense().to(x.dtype)
                    ),
                }
            )
            cells.append(ratio(times["packed"], times["dense"]))
        found.append((name, *cells))
    return found


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md."""
    travels = (
        f"A weight of {ROWS // 4} x {COLUMNS} in bfloat16. *bytes* are those that travel, of dense "
        "ones; by mask the ranks know the places. The index is `weight[indices]`, eight bytes an "
        "element; the copy moves the dense and the packed bytes."
    )
    reads = (
        f"`x @ weight.T` with a weight of {ROWS} x {COLUMNS}, dense in bfloat16 by torch (AMX "
        "where there is), and packed. *bytes* are those of the weight as it is read. Above one, "
        "*dense / ours* says that packing pays."
    )
    unpacked = (
        f"A weight of {EXPERT[0]} x {EXPERT[1]} times the rows of one expert: time with the packed "
        "weight over that of unpacking it and a dense product. `PackedExperts` unpacks codes above "
        f"{_CodedWeights.few_rows} rows and masks above {_Kept.few_rows}."
    )
    experts = ("weight", *(f"{n} rows" for n in EXPERT_ROWS))
    packing = ("what", "bytes", "pack ms", "unpack ms", "index ms", "copy ms")
    products = ("weight", "tokens", "bytes", "ms", "dense / ours")
    return [
        Table("Sparse messages", travels, packing, packing_rows()),
        Table("Products with packed weights", reads, products, product_rows()),
        Table("Rows of a packed expert", unpacked, experts, expert_rows()),
    ]
