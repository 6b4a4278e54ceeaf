"""Operators, each also registered as ``torch.ops.moe_ext.<name>``."""

from moe_ext import _library

_library.load()

import moe_ext.ops.flops  # noqa: E402, F401
from moe_ext.ops.activation import activation, gated_activation  # noqa: E402
from moe_ext.ops.adam import adam_step_  # noqa: E402
from moe_ext.ops.assignment import (  # noqa: E402
    SequenceLoad,
    balanced_assignment,
    expert_choice_gate,
    sequence_balance_loss,
    sequence_load,
    sinkhorn_gate,
)
from moe_ext.ops.attention import (  # noqa: E402
    attention_block,
    attention_block_,
    attention_block_backward,
    attention_delta,
    document_ids,
    merge_attention,
    merge_attention_,
    merge_attention_sinks,
)
from moe_ext.ops.balance import BalancePlan, plan_balance, split_rows  # noqa: E402
from moe_ext.ops.capacity import limit_capacity  # noqa: E402
from moe_ext.ops.delta import (  # noqa: E402
    delta_apply_,
    delta_encode,
    delta_hash,
    delta_hash_change,
    delta_pack,
    delta_unpack,
)
from moe_ext.ops.exponent import (  # noqa: E402
    decode_exponent_row_,
    decode_exponents_,
    encode_exponent_rows,
    encode_exponents,
    most_exponent_bytes,
)
from moe_ext.ops.gating import (  # noqa: E402
    GateOutput,
    gate_weights,
    load_balance_loss,
    router_z_loss,
    topk_gate,
)
from moe_ext.ops.grouped_gemm import grouped_mm  # noqa: E402
from moe_ext.ops.mask import masked_mm, pack_bits, pack_masked_, unpack_masked_  # noqa: E402
from moe_ext.ops.noisy_gating import (  # noqa: E402
    GShardGateOutput,
    NoisyGateOutput,
    gshard_gate,
    noisy_topk_gate,
    routing_jitter,
    routing_uniform,
    squared_variation,
)
from moe_ext.ops.pairs import (  # noqa: E402
    add_pairs_,
    pack_indices,
    packed_index_bytes,
    unpack_indices,
)
from moe_ext.ops.permutation import Permutation, permute_tokens, unpermute_tokens  # noqa: E402
from moe_ext.ops.quantize import (  # noqa: E402
    QuantizedBlocks,
    dequantize_add_,
    dequantize_blockwise,
    dequantize_rows,
    quantize_blockwise,
    quantize_rows,
)
from moe_ext.ops.quantized_mm import quantized_mm  # noqa: E402
from moe_ext.ops.recurrence import (  # noqa: E402
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
)
from moe_ext.ops.router_linear import router_logits  # noqa: E402
from moe_ext.ops.scale_into import scale_into_  # noqa: E402
from moe_ext.ops.sparse_blocks import (  # noqa: E402
    block_indices,
    gather_blocks,
    nonzero_blocks,
    scatter_blocks_,
    sum_rows,
)
from moe_ext.ops.topk import (  # noqa: E402
    SparseGradient,
    ThresholdGradient,
    threshold_compress_,
    topk_compress_,
)
from moe_ext.ops.wire import (  # noqa: E402
    DecodedGradient,
    choose_index_codec,
    decode_gradient,
    encode_gradient,
)

__all__ = [
    "BalancePlan",
    "DecodedGradient",
    "GShardGateOutput",
    "GateOutput",
    "NoisyGateOutput",
    "Permutation",
    "QuantizedBlocks",
    "SequenceLoad",
    "SparseGradient",
    "ThresholdGradient",
    "activation",
    "adam_step_",
    "add_pairs_",
    "attention_block",
    "attention_block_",
    "attention_block_backward",
    "attention_delta",
    "balanced_assignment",
    "block_indices",
    "causal_conv1d",
    "choose_index_codec",
    "decode_exponent_row_",
    "decode_exponents_",
    "decode_gradient",
    "delta_apply_",
    "delta_encode",
    "delta_hash",
    "delta_hash_change",
    "delta_pack",
    "delta_unpack",
    "dequantize_add_",
    "dequantize_blockwise",
    "dequantize_rows",
    "document_ids",
    "encode_exponent_rows",
    "encode_exponents",
    "encode_gradient",
    "expert_choice_gate",
    "gate_weights",
    "gated_activation",
    "gated_delta_rule",
    "gather_blocks",
    "grouped_mm",
    "gshard_gate",
    "limit_capacity",
    "load_balance_loss",
    "masked_mm",
    "merge_attention",
    "merge_attention_",
    "merge_attention_sinks",
    "most_exponent_bytes",
    "noisy_topk_gate",
    "nonzero_blocks",
    "pack_bits",
    "pack_indices",
    "pack_masked_",
    "packed_index_bytes",
    "permute_tokens",
    "plan_balance",
    "quantize_blockwise",
    "quantize_rows",
    "quantized_mm",
    "router_logits",
    "router_z_loss",
    "routing_jitter",
    "routing_uniform",
    "scale_into_",
    "scatter_blocks_",
    "selective_scan",
    "sequence_balance_loss",
    "sequence_load",
    "sinkhorn_gate",
    "split_rows",
    "squared_variation",
    "sum_rows",
    "threshold_compress_",
    "topk_compress_",
    "topk_gate",
    "unpack_indices",
    "unpack_masked_",
    "unpermute_tokens",
]


def __dir__() -> list[str]:
    return __all__
