#include "attention/attention.h"

#include <cmath>
#include <utility>

#include "attention/attention_math.h"
#include "common/dispatch.h"
#include "common/library.h"
#include "common/overlap.h"

// Schema of the arguments of a block, which three operators share.
#define MOE_EXT_BLOCK_ARGS                                                                                           \
  "Tensor q, Tensor k, Tensor v, Tensor q_positions, Tensor k_positions, Tensor? q_documents, Tensor? k_documents, " \
  "Tensor? key_mask, Tensor? alibi_slopes, Tensor? bias, Tensor? seed, float scale, bool causal, int window_left, "  \
  "int window_right, float softcap, float dropout_p, int batch_offset, int head_offset"

namespace moe_ext::attention {

MOE_EXT_SCHEMAS(m) {
  m.def("attention_block(" MOE_EXT_BLOCK_ARGS ") -> (Tensor out, Tensor lse)");
  m.def("attention_block_(Tensor(a!) out, Tensor(b!) lse, " MOE_EXT_BLOCK_ARGS ") -> ()");
  m.def(
      "attention_block_backward(Tensor grad_out, Tensor lse, Tensor delta, " MOE_EXT_BLOCK_ARGS
      ", bool needs_grad_bias) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias)");
  m.def("attention_delta(Tensor grad_out, Tensor out, Tensor? grad_lse) -> Tensor");
  m.def("merge_attention(Tensor out_a, Tensor lse_a, Tensor? out_b, Tensor lse_b) -> (Tensor out, Tensor lse)");
  m.def("merge_attention_(Tensor(a!) out, Tensor(b!) lse, Tensor out_b, Tensor lse_b) -> ()");
  m.def(
      "_merge_attention_backward(Tensor grad_out, Tensor grad_lse, Tensor out_a, Tensor lse_a, Tensor? out_b, "
      "Tensor lse_b) -> (Tensor grad_a, Tensor grad_lse_a, Tensor grad_b, Tensor grad_lse_b)");
}

namespace {

// Throw unless the first `dims` sizes of `t` are those of `as`.
void check_shape(
    const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as, int64_t dims) {
  bool same = t.dim() == dims;
  for (int64_t i = 0; same && i < dims; ++i) {
    same = t.size(i) == as.size(i);
  }
  MOE_CHECK(
      same, op, ": expected ", name, " to have the first ", dims, " sizes of ", as_name, ", ", shape_string(as),
      ", got shape ", shape_string(t));
}

void check_per_token(
    const char* op, const char* name, const Tensor& t, int64_t size, const char* rule, const Tensor& q) {
  check_same_device(op, name, t, "q", q);
  check_dtype(op, name, t, ScalarType::Long);
  check_dim(op, name, t, 1, "[S]");
  check_size(op, name, t, 0, size, rule);
}

void check_heads(const char* op, const BlockArgs& args) {
  const Tensor &q = args.q, &k = args.k, &v = args.v;
  check_floating(op, "q", q);
  for (const auto& [name, t] : {std::pair("k", &k), std::pair("v", &v)}) {
    check_same_device(op, name, *t, "q", q);
    check_dtype(op, name, *t, q.scalar_type());
  }
  check_dim(op, "q", q, 4, "[B, H, Sq, Dk]");
  check_dim(op, "k", k, 4, "[B, Hkv, Sk, Dk]");
  check_dim(op, "v", v, 4, "[B, Hkv, Sk, Dv]");
  check_size(op, "k", k, 0, q.size(0), "the batch of q");
  check_size(op, "k", k, 3, q.size(3), "the head dim of q");
  check_size(op, "v", v, 0, k.size(0), "the batch of k");
  check_size(op, "v", v, 1, k.size(1), "the heads of k");
  check_size(op, "v", v, 2, k.size(2), "the keys of k");
  MOE_CHECK(
      k.size(1) > 0 ? q.size(1) % k.size(1) == 0 : q.size(1) == 0, op,
      ": expected the heads of q to be a multiple of those of k, got ", q.size(1), " and ", k.size(1));
}

void check_masks(const char* op, const BlockArgs& args) {
  const Tensor& q = args.q;
  const int64_t num_keys = args.k.size(2);
  check_per_token(op, "q_positions", args.q_positions, q.size(2), "the queries of q", q);
  check_per_token(op, "k_positions", args.k_positions, num_keys, "the keys of k", q);
  MOE_CHECK(
      args.q_documents.has_value() == args.k_documents.has_value(), op,
      ": expected q_documents and k_documents to be given together, got ",
      args.q_documents ? "q_documents" : "k_documents", " alone");
  if (args.q_documents) {
    check_per_token(op, "q_documents", *args.q_documents, q.size(2), "the queries of q", q);
    check_per_token(op, "k_documents", *args.k_documents, num_keys, "the keys of k", q);
  }
  if (args.key_mask) {
    check_same_device(op, "key_mask", *args.key_mask, "q", q);
    check_dtype(op, "key_mask", *args.key_mask, ScalarType::Bool);
    check_dim(op, "key_mask", *args.key_mask, 2, "[B, Sk]");
    check_size(op, "key_mask", *args.key_mask, 0, q.size(0), "the batch of q");
    check_size(op, "key_mask", *args.key_mask, 1, num_keys, "the keys of k");
  }
  if (args.alibi_slopes) {
    check_same_device(op, "alibi_slopes", *args.alibi_slopes, "q", q);
    check_floating(op, "alibi_slopes", *args.alibi_slopes);
    check_dim(op, "alibi_slopes", *args.alibi_slopes, 1, "[H]");
    check_size(op, "alibi_slopes", *args.alibi_slopes, 0, q.size(1), "the heads of q");
  }
}

// bias [B or 1, H or 1, Sq, Sk]
void check_bias(const char* op, const BlockArgs& args) {
  if (!args.bias) {
    return;
  }
  const Tensor &bias = *args.bias, &q = args.q;
  check_same_device(op, "bias", bias, "q", q);
  check_floating(op, "bias", bias);
  check_dim(op, "bias", bias, 4, "[B or 1, H or 1, Sq, Sk]");
  for (const int64_t i : {0, 1}) {
    MOE_CHECK(
        bias.size(i) == 1 || bias.size(i) == q.size(i), op, ": expected bias to have size 1 or ", q.size(i), " in dim ",
        i, ", as q, got shape ", shape_string(bias));
  }
  check_size(op, "bias", bias, 2, q.size(2), "the queries of q");
  check_size(op, "bias", bias, 3, args.k.size(2), "the keys of k");
}

void check_numbers(const char* op, const BlockArgs& args) {
  MOE_CHECK(std::isfinite(args.scale), op, ": expected scale to be finite, got ", args.scale);
  for (const auto& [name, size] :
       {std::pair("window_left", args.window_left), std::pair("window_right", args.window_right)}) {
    MOE_CHECK(size >= -1 && size < kMostPositions, op, ": expected ", name, " to be in [-1, 2^31 - 2), got ", size);
  }
  MOE_CHECK(
      std::isfinite(args.softcap) && args.softcap >= 0, op, ": expected softcap to be finite and not negative, got ",
      args.softcap);
  MOE_CHECK(
      args.dropout_p >= 0 && args.dropout_p < 1, op, ": expected dropout_p to be in [0, 1), got ", args.dropout_p);
  MOE_CHECK(
      args.batch_offset >= 0 && args.head_offset >= 0, op,
      ": expected batch_offset and head_offset not to be negative, got ", args.batch_offset, " and ", args.head_offset);
  if (args.dropout_p == 0) {
    return;
  }
  MOE_CHECK(args.seed.has_value(), op, ": expected seed to be given with dropout_p ", args.dropout_p, ", got none");
  check_same_device(op, "seed", *args.seed, "q", args.q);
  check_dtype(op, "seed", *args.seed, ScalarType::Long);
  MOE_CHECK(args.seed->numel() == 1, op, ": expected seed to be one number, got shape ", shape_string(*args.seed));
  MOE_CHECK(
      args.head_offset + args.q.size(1) <= kMaxDropoutHeads, op, ": expected at most ", kMaxDropoutHeads,
      " heads with dropout, got ", args.head_offset + args.q.size(1));
}

} // namespace

void check_block(const char* op, const BlockArgs& args) {
  check_heads(op, args);
  check_masks(op, args);
  check_bias(op, args);
  check_numbers(op, args);
}

void check_state(const char* op, const BlockArgs& args, const Tensor& out, const Tensor& lse) {
  const ScalarType acc = acc_dtype(args.q.scalar_type());
  check_same_device(op, "out", out, "q", args.q);
  check_same_device(op, "lse", lse, "q", args.q);
  check_dtype(op, "out", out, acc);
  check_dtype(op, "lse", lse, acc);
  check_dim(op, "out", out, 4, "[B, H, Sq, Dv]");
  check_shape(op, "lse", lse, "q", args.q, 3);
  check_size(op, "out", out, 3, args.v.size(3), "the head dim of v");
  for (int64_t i = 0; i < 3; ++i) {
    check_size(op, "out", out, i, args.q.size(i), "that of q");
  }
  MOE_CHECK(out.is_contiguous(), op, ": expected out to be contiguous, got strides of a view");
  MOE_CHECK(lse.is_contiguous(), op, ": expected lse to be contiguous, got strides of a view");
  check_apart(op, "lse", lse, "out", out);
  const auto check_read = [&](const char* name, const Tensor& t) {
    check_apart(op, name, t, "out", out);
    check_apart(op, name, t, "lse", lse);
  };
  check_read("q", args.q);
  check_read("k", args.k);
  check_read("v", args.v);
  check_read("q_positions", args.q_positions);
  check_read("k_positions", args.k_positions);
  const std::pair<const char*, const OptionalTensor*> optional[] = {
      {"q_documents", &args.q_documents},
      {"k_documents", &args.k_documents},
      {"key_mask", &args.key_mask},
      {"alibi_slopes", &args.alibi_slopes},
      {"bias", &args.bias},
      {"seed", &args.seed}};
  for (const auto& [name, tensor] : optional) {
    if (*tensor) {
      check_read(name, **tensor);
    }
  }
}

void check_block_backward(
    const BlockArgs& args,
    const Tensor& grad_out, // [B, H, Sq, Dv]
    const Tensor& lse,      // [B, H, Sq]
    const Tensor& delta) {  // [B, H, Sq]
  const char* op = "attention_block_backward";
  check_block(op, args);
  const ScalarType acc = acc_dtype(args.q.scalar_type());
  check_same_device(op, "grad_out", grad_out, "q", args.q);
  check_dtype(op, "grad_out", grad_out, acc);
  check_dim(op, "grad_out", grad_out, 4, "[B, H, Sq, Dv]");
  for (int64_t i = 0; i < 3; ++i) {
    check_size(op, "grad_out", grad_out, i, args.q.size(i), "that of q");
  }
  check_size(op, "grad_out", grad_out, 3, args.v.size(3), "the head dim of v");
  for (const auto& [name, t] : {std::pair("lse", &lse), std::pair("delta", &delta)}) {
    check_same_device(op, name, *t, "q", args.q);
    check_dtype(op, name, *t, acc);
    check_shape(op, name, *t, "q", args.q, 3);
  }
}

void check_delta(
    const Tensor& grad_out,           // [B, H, S, D]
    const Tensor& out,                // [B, H, S, D]
    const OptionalTensor& grad_lse) { // [B, H, S]
  const char* op = "attention_delta";
  check_same_device(op, "out", out, "grad_out", grad_out);
  MOE_CHECK(
      grad_out.scalar_type() == acc_dtype(grad_out.scalar_type()), op,
      ": expected grad_out to be float32 or float64, got ", dtype_string(grad_out));
  check_dtype(op, "out", out, grad_out.scalar_type());
  check_dim(op, "grad_out", grad_out, 4, "[B, H, S, D]");
  check_shape(op, "out", out, "grad_out", grad_out, 4);
  if (grad_lse) {
    check_same_device(op, "grad_lse", *grad_lse, "grad_out", grad_out);
    check_dtype(op, "grad_lse", *grad_lse, grad_out.scalar_type());
    check_shape(op, "grad_lse", *grad_lse, "grad_out", grad_out, 3);
  }
}

void check_merge(
    const char* op,
    const Tensor& out_a,         // [..., D]
    const Tensor& lse_a,         // [...]
    const OptionalTensor& out_b, // [..., D]
    const Tensor& lse_b) {       // [...]
  check_floating(op, "out_a", out_a);
  const ScalarType acc = acc_dtype(out_a.scalar_type());
  MOE_CHECK(out_a.dim() >= 1, op, ": expected out_a to have a dim at least, got shape ", shape_string(out_a));
  if (out_b) {
    check_same_device(op, "out_b", *out_b, "out_a", out_a);
    check_floating(op, "out_b", *out_b);
    MOE_CHECK(
        acc_dtype(out_b->scalar_type()) == acc, op, ": expected out_b to be ",
        acc == ScalarType::Double ? "float64" : "float32, bfloat16 or float16", " beside out_a, got ",
        dtype_string(*out_b));
    check_shape(op, "out_b", *out_b, "out_a", out_a, out_a.dim());
  }
  for (const auto& [name, t] : {std::pair("lse_a", &lse_a), std::pair("lse_b", &lse_b)}) {
    check_same_device(op, name, *t, "out_a", out_a);
    check_dtype(op, name, *t, acc);
    check_shape(op, name, *t, "out_a", out_a, out_a.dim() - 1);
  }
}

void check_merge_into(
    const Tensor& out,     // [B, H, S, D]
    const Tensor& lse,     // [B, H, S]
    const Tensor& out_b,   // [B, H, S, D]
    const Tensor& lse_b) { // [B, H, S]
  const char* op = "merge_attention_";
  check_floating(op, "out", out);
  check_dtype(op, "out", out, acc_dtype(out.scalar_type()));
  check_dim(op, "out", out, 4, "[B, H, S, D]");
  check_merge(op, out, lse, out_b, lse_b);
  const auto check_own = [&](const char* name, const Tensor& t) {
    for (int64_t i = 0; i < t.dim(); ++i) {
      MOE_CHECK(
          t.size(i) <= 1 || t.stride(i) != 0, op, ": expected ", name,
          " to have memory for each element, got stride 0 in dim ", i);
    }
  };
  check_own("out", out);
  check_own("lse", lse);
  MOE_CHECK(
      out.stride(3) == 1 || out.size(3) <= 1, op, ": expected the columns of out to be adjacent, got stride ",
      out.stride(3));
  check_apart(op, "lse", lse, "out", out);
  check_apart(op, "out_b", out_b, "out", out);
  check_apart(op, "out_b", out_b, "lse", lse);
  check_apart(op, "lse_b", lse_b, "out", out);
  check_apart(op, "lse_b", lse_b, "lse", lse);
}

void check_merge_backward(
    const Tensor& grad_out, // [..., D]
    const Tensor& grad_lse, // [...]
    const Tensor& out_a, const Tensor& lse_a, const OptionalTensor& out_b, const Tensor& lse_b) {
  const char* op = "_merge_attention_backward";
  check_merge(op, out_a, lse_a, out_b, lse_b);
  check_same_device(op, "grad_out", grad_out, "out_a", out_a);
  check_same_device(op, "grad_lse", grad_lse, "out_a", out_a);
  check_dtype(op, "grad_out", grad_out, lse_a.scalar_type());
  check_dtype(op, "grad_lse", grad_lse, lse_a.scalar_type());
  check_shape(op, "grad_out", grad_out, "out_a", out_a, out_a.dim());
  check_shape(op, "grad_lse", grad_lse, "out_a", out_a, out_a.dim() - 1);
}

void check_range(
    const char* op, const char* name, const int64_t* values, int64_t n, int64_t low, int64_t high, const char* rule) {
  for (int64_t i = 0; i < n; ++i) {
    MOE_CHECK(
        values[i] >= low && values[i] < high, op, ": expected ", name, " to be in ", rule, ", got ", values[i],
        " at index ", i);
  }
}

} // namespace moe_ext::attention
