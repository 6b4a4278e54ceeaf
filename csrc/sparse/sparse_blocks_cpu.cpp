// Block and row sparsity on CPU. A block belongs to one thread, and one thread adds the rows of one index in order.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/dispatch.h"
#include "sparse/sparse_blocks.h"

namespace moe_ext::sparse_blocks {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;

// True if any bit other than a sign bit is set: -0.0 counts as zero, NaN does not. Compares words of 8 bytes.
bool has_nonzero(const uint8_t* bytes, int64_t size, uint64_t sign_bits) {
  uint64_t any = 0;
  int64_t i = 0;
  for (; i + 64 <= size && any == 0; i += 64) {
    uint64_t words[8];
    std::memcpy(words, bytes + i, sizeof(words));
    for (const uint64_t word : words) {
      any |= word & ~sign_bits;
    }
  }
  for (; i < size && any == 0; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<int64_t>(8, size - i));
    any |= word & ~sign_bits;
  }
  return any != 0;
}

uint64_t sign_bits(int64_t element_size) {
  return element_size == 8 ? 0x8000000000000000u : element_size == 4 ? 0x8000000080000000u : 0x8000800080008000u;
}

Tensor nonzero_blocks_cpu(Tensor x, int64_t block) {
  check_nonzero_blocks(x, block);
  const Tensor in = contiguous(x);
  const int64_t size = static_cast<int64_t>(in.element_size()), numel = in.numel();
  const int64_t blocks = num_blocks(numel, block), bytes = num_bitmap_bytes(blocks);
  Tensor bitmap = new_empty(in, {bytes}, ScalarType::Byte);
  const uint8_t* from = data<const uint8_t>(in);
  parallel_for(0, bytes, grain_size(8 * std::min(block, numel) * size), [&](int64_t begin, int64_t end) {
    for (int64_t byte = begin; byte < end; ++byte) {
      uint32_t bits = 0;
      for (int64_t b = 8 * byte; b < std::min(blocks, 8 * byte + 8); ++b) {
        const int64_t length = std::min(block, numel - b * block);
        bits |= static_cast<uint32_t>(has_nonzero(from + b * block * size, length * size, sign_bits(size))) << b % 8;
      }
      data<uint8_t>(bitmap)[byte] = static_cast<uint8_t>(bits);
    }
  });
  return bitmap;
}

void check_values(const char* op, const Tensor& block_idx, int64_t blocks, bool ascending) {
  const int64_t* idx = data<const int64_t>(block_idx);
  for (int64_t i = 0; i < block_idx.size(0); ++i) {
    MOE_CHECK(
        idx[i] >= 0 && idx[i] < blocks, op, ": expected block_idx to be in [0, ", blocks, "), got ", idx[i], " at ", i);
    // With equal indices, two threads would write the same block.
    MOE_CHECK(
        !ascending || i == 0 || idx[i - 1] < idx[i], op, ": expected block_idx to be ascending, got ", idx[i],
        " after ", idx[i - 1], " at ", i);
  }
}

Tensor gather_blocks_cpu(
    Tensor x,
    Tensor block_idx, // [B]
    int64_t block) {
  const char* op = "gather_blocks";
  check_blocks(op, "x", x, block, block_idx);
  const Tensor in = contiguous(x), idx = contiguous(block_idx);
  const int64_t size = static_cast<int64_t>(in.element_size()), numel = in.numel(), count = idx.size(0);
  check_values(op, idx, num_blocks(numel, block), false);
  Tensor packed = new_empty(in, {count, block});
  parallel_for(0, count, grain_size(2 * block * size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = data<const int64_t>(idx)[i] * block, length = std::min(block, numel - first);
      uint8_t* to = data<uint8_t>(packed) + i * block * size;
      std::memcpy(to, data<const uint8_t>(in) + first * size, length * size);
      std::memset(to + length * size, 0, (block - length) * size);
    }
  });
  return packed;
}

void scatter_blocks_cpu(
    Tensor out,
    Tensor packed,    // [B, block]
    Tensor block_idx, // [B]
    int64_t block) {
  const char* op = "scatter_blocks_";
  check_blocks(op, "out", out, block, block_idx);
  check_packed(op, packed, out, block, block_idx);
  const Tensor from = contiguous(packed), idx = contiguous(block_idx);
  const int64_t size = static_cast<int64_t>(out.element_size()), numel = out.numel();
  check_values(op, idx, num_blocks(numel, block), true);
  parallel_for(0, idx.size(0), grain_size(2 * block * size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = data<const int64_t>(idx)[i] * block, length = std::min(block, numel - first);
      std::memcpy(data<uint8_t>(out) + first * size, data<const uint8_t>(from) + i * block * size, length * size);
    }
  });
}

// Adds the `count` rows that `order` lists, in that order, in float (double for double).
template <typename T>
void sum_group(T* out, const T* rows, const int64_t* order, int64_t count, int64_t dim, acc_t<T>* sum) {
  std::fill(sum, sum + dim, acc_t<T>(0));
  for (int64_t i = 0; i < count; ++i) {
    const T* row = rows + order[i] * dim;
    for (int64_t d = 0; d < dim; ++d) {
      sum[d] += to_acc(row[d]);
    }
  }
  for (int64_t d = 0; d < dim; ++d) {
    out[d] = from_acc<T>(sum[d]);
  }
}

std::tuple<Tensor, Tensor> sum_rows_cpu(
    Tensor rows,    // [N, D]
    Tensor row_idx, // [N]
    int64_t num_rows) {
  check_sum_rows(rows, row_idx, num_rows);
  const Tensor in = contiguous(rows), idx = contiguous(row_idx);
  const int64_t count = in.size(0), dim = in.size(1);
  const int64_t* of = data<const int64_t>(idx);
  for (int64_t i = 0; i < count; ++i) {
    MOE_CHECK(
        of[i] >= -1 && of[i] < num_rows, "sum_rows: expected row_idx to be in [0, ", num_rows, ") or -1, got ", of[i],
        " at row ", i);
  }
  std::vector<int64_t> order, begin;
  for (int64_t i = 0; i < count; ++i) {
    if (of[i] >= 0) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(), [of](int64_t a, int64_t b) { return of[a] < of[b]; });
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || of[order[i]] != of[order[i - 1]]) {
      begin.push_back(static_cast<int64_t>(i));
    }
  }
  const int64_t groups = static_cast<int64_t>(begin.size());
  begin.push_back(static_cast<int64_t>(order.size()));
  Tensor sums = new_empty(in, {groups, dim});
  Tensor unique = new_empty(in, {groups}, ScalarType::Long);
  dispatch_floating(in.scalar_type(), [&]<typename T>() {
    parallel_for(0, groups, grain_size(4 * dim * static_cast<int64_t>(sizeof(T))), [&](int64_t first, int64_t last) {
      std::vector<acc_t<T>> sum(dim);
      for (int64_t g = first; g < last; ++g) {
        data<int64_t>(unique)[g] = of[order[begin[g]]];
        sum_group<T>(
            data<T>(sums) + g * dim, data<const T>(in), order.data() + begin[g], begin[g + 1] - begin[g], dim,
            sum.data());
      }
    });
  });
  return {sums, unique};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("nonzero_blocks", TORCH_BOX(&nonzero_blocks_cpu));
  m.impl("gather_blocks", TORCH_BOX(&gather_blocks_cpu));
  m.impl("scatter_blocks_", TORCH_BOX(&scatter_blocks_cpu));
  m.impl("sum_rows", TORCH_BOX(&sum_rows_cpu));
}

} // namespace moe_ext::sparse_blocks
