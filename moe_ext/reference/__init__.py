"""Slow, obvious formulas in plain PyTorch: the oracle of the tests, and the maths to read."""

from moe_ext.reference.activation import activation, gated_activation
from moe_ext.reference.adam import adam_step_
from moe_ext.reference.assignment import (
    balanced_assignment,
    expert_choice_gate,
    sequence_balance_loss,
    sequence_load,
    sinkhorn_gate,
)
from moe_ext.reference.attention import (
    attention_block,
    attention_delta,
    merge_attention,
    merge_attention_sinks,
)
from moe_ext.reference.balance import plan_balance, split_rows
from moe_ext.reference.capacity import limit_capacity
from moe_ext.reference.delta import delta_hash, delta_places
from moe_ext.reference.exponent import decode_exponents_
from moe_ext.reference.gating import (
    gate_weights,
    load_balance_loss,
    router_z_loss,
    topk_gate,
)
from moe_ext.reference.grouped_gemm import grouped_mm
from moe_ext.reference.mask import masked_mm, pack_bits, pack_masked_, unpack_masked_
from moe_ext.reference.noisy_gating import (
    gshard_gate,
    noisy_topk_gate,
    routing_jitter,
    routing_uniform,
    squared_variation,
)
from moe_ext.reference.pairs import add_pairs_, pack_indices, unpack_indices
from moe_ext.reference.permutation import permute_tokens, unpermute_tokens
from moe_ext.reference.quantize import (
    dequantize_add_,
    dequantize_blockwise,
    dequantize_rows,
    quantize_blockwise,
    quantize_rows,
    quantized_mm,
)
from moe_ext.reference.recurrence import causal_conv1d, gated_delta_rule, selective_scan
from moe_ext.reference.router_linear import router_logits
from moe_ext.reference.scale_into import scale_into_
from moe_ext.reference.sparse_blocks import (
    gather_blocks,
    nonzero_blocks,
    scatter_blocks_,
    sum_rows,
)
from moe_ext.reference.topk import threshold_compress_, topk_compress_
