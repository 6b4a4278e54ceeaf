// Products with weights of 8 or 4 bits on CPU, for few tokens. The rows of the weight are divided between threads. With
// few tokens, reading the weight takes the time, so each row is read from memory once.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "quantize/quantized_mm.h"
#include "quantize/quantized_mm_tables.h"

namespace moe_ext::quantized_mm {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::new_empty;
using torch::stable::parallel_for;

void check_outliers(const Tensor& columns, const Tensor& offsets, int64_t dim) {
  const int64_t* begin = data<const int64_t>(offsets);
  const int64_t num_rows = offsets.size(0) - 1, count = columns.size(0);
  MOE_CHECK(
      begin[0] >= 0 && begin[num_rows] <= count, "quantized_mm: expected outlier_offsets to be in [0, ", count,
      "], got ", begin[0], " to ", begin[num_rows]);
  for (int64_t m = 0; m < num_rows; ++m) {
    MOE_CHECK(
        begin[m] <= begin[m + 1], "quantized_mm: expected outlier_offsets to ascend, got ", begin[m + 1], " after ",
        begin[m]);
  }
  const int32_t* of = data<const int32_t>(columns);
  for (int64_t i = begin[0]; i < begin[num_rows]; ++i) {
    const int32_t column = of[i];
    MOE_CHECK(
        column >= 0 && column < dim, "quantized_mm: expected outlier_columns to be in [0, ", dim, "), got ", column,
        " at ", i);
  }
}

// Multiplies tokens [first_token, first_token + num_tokens) with rows [first_row, first_row + num_rows).
template <typename T>
void multiply(
    const Tensor& out, const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& outliers,
    const Tensor& columns, const Tensor& offsets, int64_t bits, int64_t first_token, int64_t num_tokens,
    int64_t first_row, int64_t num_rows) {
  const int64_t dim = x.size(1), row_bytes = codes.size(1), num_blocks = scales.size(1);
  std::vector<float> wide(num_tokens * dim), halves;
  const T* given = data<const T>(x) + first_token * dim;
  for (int64_t i = 0; i < num_tokens * dim; ++i) {
    wide[i] = to_acc(given[i]);
  }
  if (bits == 4) {
    halves.resize(wide.size());
    for (size_t i = 0; i < wide.size(); ++i) {
      halves[i / 32 * 32 + i % 2 * 16 + i % 32 / 2] = wide[i];
    }
  }
  const float* tokens = bits == 4 ? halves.data() : wide.data();
  const auto rows = bits == 4 ? kernels().rows4 : kernels().rows8;
  // Pointers are fetched outside of the loop, because each `data` call goes through torch's C interface.
  const uint8_t* of_rows = data<const uint8_t>(codes) + first_row * row_bytes;
  const float* of_blocks = data<const float>(scales) + first_row * num_blocks;
  const T* exact = data<const T>(outliers);
  const int32_t* column_of = data<const int32_t>(columns);
  const int64_t* first = data<const int64_t>(offsets) + first_row;
  T* results = data<T>(out) + first_token * num_rows;
  parallel_for(0, num_rows, grain_size(row_bytes), [&](int64_t begin, int64_t end) {
    std::vector<float> sums((end - begin) * num_tokens);
    rows(
        {of_rows + begin * row_bytes, of_blocks + begin * num_blocks, tokens, sums.data(), end - begin, num_tokens, dim,
         dim / num_blocks});
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t t = 0; t < num_tokens; ++t) {
        float sum = sums[(m - begin) * num_tokens + t];
        for (int64_t i = first[m]; i < first[m + 1]; ++i) {
          sum += to_acc(exact[i]) * wide[t * dim + column_of[i]];
        }
        results[t * num_rows + m] = from_acc<T>(sum);
      }
    }
  });
}

Tensor quantized_mm_cpu(
    Tensor x,               // [T, K]
    Tensor codes,           // [M, K bits / 8]
    Tensor scales,          // [M, K / block]
    Tensor outliers,        // [n]
    Tensor outlier_columns, // [n]
    Tensor outlier_offsets, // [M + 1]
    int64_t bits, std::optional<Tensor> expert_offsets) {
  check_quantized_mm(x, codes, scales, outliers, outlier_columns, outlier_offsets, bits, expert_offsets);
  const Tensor columns = as_contiguous(outlier_columns), offsets = as_contiguous(outlier_offsets);
  check_outliers(columns, offsets, x.size(1));
  const Tensor tokens = as_contiguous(x), rows = as_contiguous(codes), of_blocks = as_contiguous(scales);
  const Tensor values = as_contiguous(outliers);
  const auto run = [&](const Tensor& out, int64_t first_token, int64_t num_tokens, int64_t first_row, int64_t count) {
    const auto product = x.scalar_type() == ScalarType::BFloat16 ? multiply<BFloat16> : multiply<float>;
    product(out, tokens, rows, of_blocks, values, columns, offsets, bits, first_token, num_tokens, first_row, count);
  };
  const int64_t num_tokens = x.size(0), num_rows = codes.size(0);
  if (!expert_offsets) {
    Tensor out = new_empty(tokens, {num_tokens, num_rows});
    run(out, 0, num_tokens, 0, num_rows);
    return out;
  }
  const Tensor of_experts = as_offsets(*expert_offsets);
  const int64_t* begin = data<const int64_t>(of_experts);
  const int64_t num_experts = of_experts.size(0) - 1, each = num_rows / num_experts;
  check_offsets("quantized_mm", begin, num_experts, num_tokens);
  Tensor out = torch::stable::new_zeros(tokens, {num_tokens, each});
  for (int64_t e = 0; e < num_experts; ++e) {
    if (begin[e] < begin[e + 1]) {
      run(out, begin[e], begin[e + 1] - begin[e], e * each, each);
    }
  }
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("quantized_mm", TORCH_BOX(&quantized_mm_cpu));
}

} // namespace moe_ext::quantized_mm
