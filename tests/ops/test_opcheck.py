"""Schema, fake kernel, autograd and compiled graph of every operator fit each other."""

import emulation
import operator_table
import pytest
import torch

from moe_ext import ops

TABLE = operator_table.load()
op = TABLE.op
# The fake kernel of a hash, a number, is none.
NAMES = [name for name in TABLE.CALLS if not name.startswith("delta_hash")]
# Behind a payload is any value, and how long one is depends on the numbers.
NOT_COMPILED = {"encode_exponent_rows", "delta_encode", "delta_pack"}


def ends(i):
    return {"expert_offsets": i.permuted[3][1:].int()}


def quantized(i, format, block=128, numel=300):
    codes, scales = op("quantize_blockwise")(i.coded(numel), format, block)
    return {"codes": codes, "scales": scales, "format": format, "block": block}


# Changes of the table's first arguments by which results have other shapes, or are left out.
VARIANTS = {
    "topk_gate": [lambda i: {"num_groups": 4, "top_groups": 2, "selection_bias": i.wide(TABLE.E)}],
    "_topk_gate_backward": [lambda i: {"grad_weights": None, "grad_score_sum": None}],
    "_expert_choice_gate_backward": [lambda i: {"grad_weights": None}],
    "grouped_mm": [lambda i: {"bias": None}, ends],
    "_grouped_mm_backward_weight": [ends, lambda i: {"transposed": True}],
    "_grouped_mm_backward_bias": [ends],
    "gated_activation": [lambda i: {"slot_weights": None, "slot_of_row": None}],
    "permute_tokens": [lambda i: {"align": 4}, lambda i: {"align": 4, "capacity": 5}],
    "unpermute_tokens": [lambda i: {"topk_weights": None}],
    "noisy_topk_gate": [lambda i: {"noise_logits": None, "rng_state": None}],
    "_noisy_topk_gate_backward": [lambda i: {"noise_logits": None, "rng_state": None}],
    "attention_block_backward": [
        lambda i: {"needs_grad_bias": True},
        lambda i: {"bias": i.random(1, TABLE.HEADS, TABLE.S, TABLE.S)},
    ],
    "merge_attention": [lambda i: {"out_b": None}, lambda i: {"out_b": i.attended[0].half()}],
    "_merge_attention_backward": [
        lambda i: {"out_b": None},
        lambda i: {"out_b": i.attended[0].half()},
    ],
    "gated_delta_rule": [lambda i: {"beta": None}],
    "causal_conv1d": [lambda i: {"bias": None}],
    "nonzero_blocks": [lambda i: {"block": 300}],
    "gather_blocks": [lambda i: {"block": 270}],
    "topk_compress_": [lambda i: {"k": 3, "scope_size": 600}],
    "threshold_compress_": [
        lambda i: {"capacity": 30, "scope_size": 600, "threshold": i.wide(7).abs(), "target": 9}
    ],
    "_encode_payload": [lambda i: {"index_codec": "bitmap"}, lambda i: {"index_codec": "delta"}],
    "quantize_blockwise": [
        lambda i, f=format, b=block: {"x": i.coded(300), "format": f, "block": b, "residual": None}
        for format, block in (("int3", 128), ("int3", 0), ("sign", 128))
    ],
    "dequantize_blockwise": [
        lambda i, f=format: {"numel": 300, **quantized(i, f)} for format in ("int3", "sign")
    ],
    "dequantize_add_": [
        lambda i: {"out": i.single(300), **quantized(i, "int3")},
        lambda i: {"out": i.single(300), **quantized(i, "sign"), "accumulate": False},
    ],
    "quantize_rows": [lambda i: {"format": "fp8"}, lambda i: {"format": "mx"}],
    "dequantize_rows": [
        lambda i, f=format: {"rows": op("quantize_rows")(i.coded(3, 64), f), "format": f}
        for format in ("fp8", "mx")
    ],
}


def calls(name, i):
    """The table's arguments of an operator, and those of its variants."""
    made = TABLE.calls(name, i)
    declared = op(name).default._schema.arguments
    for change in VARIANTS.get(name, ()):
        changes = change(i)
        defaults = [a.default_value for a in declared[len(made[0]) :]]
        given = zip(declared, [*made[0], *defaults], strict=True)
        made.append(tuple(changes.pop(a.name, x) for a, x in given))
        assert not changes, f"{name} has no {', '.join(changes)}"
    return made


def by_kind(operator, given):
    """Positional arguments, and keyword-only ones by name."""
    declared = operator._schema.arguments[: len(given)]
    named = {a.name: x for a, x in zip(declared, given, strict=True) if a.kwarg_only}
    return given[: len(given) - len(named)], named


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    operator = op(name).default
    # Graphs and derivatives do not depend on the device.
    checks = ["test_schema", "test_faketensor"]
    if not emulation.is_active():
        checks.append("test_autograd_registration")
    differentiable = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Autograd")
    # A gradient that has none itself is part of the graph of the operator whose it is.
    in_another_graph = not differentiable and "_backward" in name and not name.endswith("_")
    # Leaves of 16 bits, whose sums and gates have 32. torch's product over experts, which takes
    # these, leaves a gradient of weights behind one of no expert: at an offset that a fake has not.
    dtype = torch.float32 if name == "_grouped_mm_backward_weight" else torch.bfloat16
    # One tile of attention has the shapes of two; recurrences have two chunks.
    TABLE.S = 11 if "attention" in name else 20 if "delta_rule" in name else 72
    made = calls(name, TABLE.Inputs(dtype))
    for number, arguments in enumerate(made):
        given = TABLE.moved(arguments, device)
        for x in given:
            if isinstance(x, torch.Tensor):
                x.requires_grad_(differentiable and x.is_floating_point())
        positional, named = by_kind(operator, given)
        of_variant = number >= len(made) - len(VARIANTS.get(name, ()))
        own_graph = not emulation.is_active() and (of_variant or not in_another_graph)
        graph = ["test_aot_dispatch_dynamic"] if own_graph and name not in NOT_COMPILED else []
        torch.library.opcheck(operator, positional, named, test_utils=checks + graph)


def moved_versions(name):
    """Steps by which an operator moves the version counter of each tensor that it writes to."""
    single, half, damaged = torch.ones(256), torch.ones(256).half(), torch.ones(1).long()
    codes, scales = ops.quantize_blockwise(single)
    rows, _ = ops.encode_exponent_rows(half, 1)
    packed, bitmap = torch.ones(256), torch.full((32,), 255, dtype=torch.uint8)
    more, out, lse = torch.ones(2, 256), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4)
    places, find = torch.arange(4), {"velocity": more[0]}
    arguments, options, written = {
        "adam_step_": (
            [single, packed, *more],
            {"step": 1, "copy": half, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8},
            [single, half, *more],
        ),
        "add_pairs_": (
            [single, packed, ops.pack_indices(torch.arange(256), 256), 256],
            {},
            [single],
        ),
        "attention_block_": ([out, lse, *[out.clone()] * 3, places, places], {}, [out, lse]),
        "decode_exponent_row_": ([half, rows[0], damaged], {}, [half, damaged]),
        "decode_exponents_": ([half, ops.encode_exponents(half)], {}, [half]),
        "delta_apply_": ([single, ops.delta_encode(packed + 1, packed)], {}, [single]),
        "dequantize_add_": ([single, codes, scales], {}, [single]),
        "merge_attention_": ([out, lse, out.clone(), lse.clone()], {}, [out, lse]),
        "pack_masked_": ([packed, single, bitmap], {}, [packed]),
        "quantize_blockwise": ([packed], {"residual": single}, [single]),
        "scale_into_": ([half, single], {"scale": 2.0}, [half]),
        "scatter_blocks_": ([single, packed[None], places[:1]], {}, [single]),
        "threshold_compress_": (
            [packed, single, damaged[0].float()],
            {"capacity": 9, **find},
            [single, more[0]],
        ),
        "topk_compress_": ([packed, single, 9], find, [single, more[0]]),
        "unpack_masked_": ([single, packed, bitmap], {}, [single]),
    }[name]
    versions = [x._version for x in written]
    getattr(ops, name)(*arguments, **options)
    return [x._version - version for x, version in zip(written, versions, strict=True)]


IN_PLACE = [
    name
    for name in ops.__all__
    if hasattr(torch.ops.moe_ext, name)
    and any(a.alias_info and a.alias_info.is_write for a in op(name).default._schema.arguments)
]


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_show_in_version_counters(name):
    """Or autograd would take a saved tensor for what it was, and packed weights would stay."""
    assert all(moved > 0 for moved in moved_versions(name))


WRITING = [
    name
    for name in NAMES
    if any(a.alias_info and a.alias_info.is_write for a in op(name).default._schema.arguments)
]


def sharing(written, x):
    """Copies of two tensors. The second begins in the last eight bytes of the first."""
    begin = (written.nbytes - 1) // 8 * 8
    memory = torch.zeros(begin + x.nbytes + 8, dtype=torch.uint8, device=x.device)
    first = memory[: written.nbytes].view(written.dtype).view(written.shape)
    second = memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
    return first.copy_(written), second.copy_(x)


@pytest.mark.parametrize("name", WRITING)
def test_what_is_written_shares_no_memory_with_another_argument(device, name):
    operator = op(name).default
    for arguments in calls(name, TABLE.Inputs(torch.bfloat16)):
        given = TABLE.moved(arguments, device)
        declared = operator._schema.arguments[: len(given)]
        tensors = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.numel()]
        for i in tensors:
            if not declared[i].alias_info or not declared[i].alias_info.is_write:
                continue
            for j in tensors:
                if j == i:
                    continue
                pair = list(given)
                pair[i], pair[j] = sharing(given[i], given[j])
                positional, named = by_kind(operator, pair)
                with pytest.raises(RuntimeError, match="in memory of its own"):
                    operator(*positional, **named)
                    pytest.fail(f"{declared[i].name} and {declared[j].name} share memory")
