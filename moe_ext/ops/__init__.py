"""Operators, each also registered as ``torch.ops.moe_ext.<name>``.

By that name, an operator that writes into an argument does not move its version counter, by which
autograd finds that a tensor was changed; the functions of this package do.
"""

# ruff: noqa: E402

from typing import TYPE_CHECKING

from moe_ext import _library

_library.load()

import moe_ext.ops.flops  # noqa: F401

# `import name as name` marks a name as public for type checkers.
from moe_ext.ops.activation import activation as activation
from moe_ext.ops.activation import gated_activation as gated_activation
from moe_ext.ops.adam import adam_step_ as adam_step_
from moe_ext.ops.assignment import SequenceLoad as SequenceLoad
from moe_ext.ops.assignment import balanced_assignment as balanced_assignment
from moe_ext.ops.assignment import expert_choice_gate as expert_choice_gate
from moe_ext.ops.assignment import sequence_balance_loss as sequence_balance_loss
from moe_ext.ops.assignment import sequence_load as sequence_load
from moe_ext.ops.assignment import sinkhorn_gate as sinkhorn_gate
from moe_ext.ops.attention import attention_block as attention_block
from moe_ext.ops.attention import attention_block_ as attention_block_
from moe_ext.ops.attention import attention_block_backward as attention_block_backward
from moe_ext.ops.attention import attention_delta as attention_delta
from moe_ext.ops.attention import document_ids as document_ids
from moe_ext.ops.attention import merge_attention as merge_attention
from moe_ext.ops.attention import merge_attention_ as merge_attention_
from moe_ext.ops.attention import merge_attention_sinks as merge_attention_sinks
from moe_ext.ops.balance import BalancePlan as BalancePlan
from moe_ext.ops.balance import plan_balance as plan_balance
from moe_ext.ops.balance import split_rows as split_rows
from moe_ext.ops.capacity import limit_capacity as limit_capacity
from moe_ext.ops.delta import delta_apply_ as delta_apply_
from moe_ext.ops.delta import delta_encode as delta_encode
from moe_ext.ops.delta import delta_hash as delta_hash
from moe_ext.ops.delta import delta_hash_change as delta_hash_change
from moe_ext.ops.delta import delta_pack as delta_pack
from moe_ext.ops.delta import delta_unpack as delta_unpack
from moe_ext.ops.exponent import decode_exponent_row_ as decode_exponent_row_
from moe_ext.ops.exponent import decode_exponents_ as decode_exponents_
from moe_ext.ops.exponent import encode_exponent_rows as encode_exponent_rows
from moe_ext.ops.exponent import encode_exponents as encode_exponents
from moe_ext.ops.exponent import most_exponent_bytes as most_exponent_bytes
from moe_ext.ops.gating import GateOutput as GateOutput
from moe_ext.ops.gating import gate_weights as gate_weights
from moe_ext.ops.gating import load_balance_loss as load_balance_loss
from moe_ext.ops.gating import router_z_loss as router_z_loss
from moe_ext.ops.gating import topk_gate as topk_gate
from moe_ext.ops.grouped_gemm import grouped_mm as grouped_mm
from moe_ext.ops.mask import masked_mm as masked_mm
from moe_ext.ops.mask import pack_bits as pack_bits
from moe_ext.ops.mask import pack_masked_ as pack_masked_
from moe_ext.ops.mask import unpack_masked_ as unpack_masked_
from moe_ext.ops.noisy_gating import GShardGateOutput as GShardGateOutput
from moe_ext.ops.noisy_gating import NoisyGateOutput as NoisyGateOutput
from moe_ext.ops.noisy_gating import gshard_gate as gshard_gate
from moe_ext.ops.noisy_gating import noisy_topk_gate as noisy_topk_gate
from moe_ext.ops.noisy_gating import routing_jitter as routing_jitter
from moe_ext.ops.noisy_gating import routing_uniform as routing_uniform
from moe_ext.ops.noisy_gating import squared_variation as squared_variation
from moe_ext.ops.pairs import add_pairs_ as add_pairs_
from moe_ext.ops.pairs import pack_indices as pack_indices
from moe_ext.ops.pairs import packed_index_bytes as packed_index_bytes
from moe_ext.ops.pairs import unpack_indices as unpack_indices
from moe_ext.ops.permutation import Permutation as Permutation
from moe_ext.ops.permutation import permute_tokens as permute_tokens
from moe_ext.ops.permutation import unpermute_tokens as unpermute_tokens
from moe_ext.ops.quantize import QuantizedBlocks as QuantizedBlocks
from moe_ext.ops.quantize import dequantize_add_ as dequantize_add_
from moe_ext.ops.quantize import dequantize_blockwise as dequantize_blockwise
from moe_ext.ops.quantize import dequantize_rows as dequantize_rows
from moe_ext.ops.quantize import quantize_blockwise as quantize_blockwise
from moe_ext.ops.quantize import quantize_rows as quantize_rows
from moe_ext.ops.quantized_mm import quantized_mm as quantized_mm
from moe_ext.ops.recurrence import causal_conv1d as causal_conv1d
from moe_ext.ops.recurrence import gated_delta_rule as gated_delta_rule
from moe_ext.ops.recurrence import selective_scan as selective_scan
from moe_ext.ops.router_linear import router_logits as router_logits
from moe_ext.ops.scale_into import scale_into_ as scale_into_
from moe_ext.ops.sparse_blocks import block_indices as block_indices
from moe_ext.ops.sparse_blocks import gather_blocks as gather_blocks
from moe_ext.ops.sparse_blocks import nonzero_blocks as nonzero_blocks
from moe_ext.ops.sparse_blocks import scatter_blocks_ as scatter_blocks_
from moe_ext.ops.sparse_blocks import sum_rows as sum_rows
from moe_ext.ops.topk import SparseGradient as SparseGradient
from moe_ext.ops.topk import ThresholdGradient as ThresholdGradient
from moe_ext.ops.topk import threshold_compress_ as threshold_compress_
from moe_ext.ops.topk import topk_compress_ as topk_compress_
from moe_ext.ops.wire import DecodedGradient as DecodedGradient
from moe_ext.ops.wire import choose_index_codec as choose_index_codec
from moe_ext.ops.wire import decode_gradient as decode_gradient
from moe_ext.ops.wire import encode_gradient as encode_gradient

_NAMES = sorted(
    name
    for name, value in globals().items()
    if getattr(value, "__module__", "").startswith(f"{__name__}.")
)
if not TYPE_CHECKING:
    __all__ = _NAMES


def __dir__() -> list[str]:
    return _NAMES
