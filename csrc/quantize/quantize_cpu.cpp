// Block quantisers on CPU. Blocks are independent and are spread over threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "common/stream.h"
#include "quantize/quantize.h"

namespace moe_ext::quantize {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;
using OptionalTensor = std::optional<Tensor>;

// Bytes of a residual from which on stores bypass the caches, because no written line would still be cached later.
constexpr int64_t kLeastStreamed = int64_t{32} << 20;

bool is_at_line(const void* base) {
  return reinterpret_cast<uintptr_t>(base) % kLineBytes == 0;
}

int64_t blocks_per_task(int64_t block) {
  return std::max<int64_t>(1, 16384 / block);
}

// Calls f(task, begin, end) -> largest key for ranges of blocks, in parallel, and returns the largest key of all.
template <typename F>
uint32_t largest_over_blocks(int64_t blocks, int64_t block, F&& f) {
  const int64_t per_task = blocks_per_task(block), tasks = (blocks + per_task - 1) / per_task;
  std::vector<uint32_t> keys(tasks);
  parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      keys[task] = f(task, task * per_task, std::min(blocks, (task + 1) * per_task));
    }
  });
  return keys.empty() ? 0 : *std::max_element(keys.begin(), keys.end());
}

// Quantises with feedback in place, and undoes it by a log if an element is not finite. Returns the largest key.
template <typename T>
uint32_t quantize_and_log(const QuantizeArgs<T>& args, Format format, int64_t blocks) {
  const QuantizeKernels<T>& loops = kernels().of<T>();
  const int64_t which = static_cast<int64_t>(format), per_task = blocks_per_task(args.block);
  const Tensor steps = new_on_cpu({args.numel}, ScalarType::Short);
  std::vector<std::vector<float>> values((blocks + per_task - 1) / per_task);
  const uint32_t largest = largest_over_blocks(blocks, args.block, [&](int64_t task, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> kept(new float[per_task * args.block + 1]);
    UndoLog log{data<int16_t>(steps), kept.get()};
    const uint32_t key = loops.quantize[which](args, begin, end, &log);
    values[task].assign(log.values, log.values + log.count);
    return key;
  });
  if (largest >= kInfinityKey<float>) {
    largest_over_blocks(blocks, args.block, [&](int64_t task, int64_t begin, int64_t end) {
      loops.undo[which](args, begin, end, UndoLog{data<int16_t>(steps), values[task].data()});
      return uint32_t{0};
    });
  }
  return largest;
}

template <typename T>
[[noreturn]] void refuse(const QuantizeArgs<T>& args) {
  int64_t i = 0;
  const auto value = [&] { return to_acc(args.x[i]) + (args.residual_in == nullptr ? 0.0f : args.residual_in[i]); };
  while (i + 1 < args.numel && key_of(value()) < kInfinityKey<float>) {
    ++i;
  }
  fail(
      "quantize_blockwise: expected x", args.residual_in == nullptr ? "" : " plus residual", " to be finite, got ",
      key_of(value()) == kInfinityKey<float> ? "inf" : "nan", " at element ", i);
}

std::tuple<Tensor, Tensor> quantize_blockwise_cpu(
    Tensor x, std::string format_name, int64_t block, OptionalTensor residual, OptionalTensor rng_state,
    bool check_finite, OptionalTensor residual_in, int64_t element_offset) {
  const Format format = check_quantize(x, format_name, block, residual, rng_state, residual_in, element_offset);
  const Tensor in = contiguous(x);
  const OptionalTensor state = optional_contiguous(rng_state);
  const bool shared = block == 0;
  const int64_t numel = in.numel(), size = shared ? kSharedBlock : block, blocks = num_scales(numel, size);
  Tensor codes = new_empty(in, {code_bytes(numel, format)}, ScalarType::Byte);
  Tensor scales = new_empty(in, {num_scales(numel, block)}, ScalarType::Float);
  const OptionalTensor& owed = residual_in ? residual_in : residual;
  dispatch_short_floating(in.scalar_type(), [&]<typename T>() {
    QuantizeArgs<T> args{
        data<const T>(in),
        data_or_null<float>(owed),
        residual ? data<float>(*residual) : nullptr,
        data<uint8_t>(codes),
        data<float>(scales),
        numel,
        size,
        {data_or_null<int64_t>(state), nullptr},
        element_offset};
    const QuantizeKernels<T>& loops = kernels().of<T>();
    args.streamed = residual && is_at_line(args.codes) && is_at_line(args.residual) && numel * 4 >= kLeastStreamed;
    if (check_finite && residual && !residual_in && !shared) {
      if (quantize_and_log(args, format, blocks) >= kInfinityKey<float>) {
        refuse(args);
      }
      return;
    }
    uint32_t largest = 0;
    if (shared) {
      largest = largest_over_blocks(
          blocks, size, [&](int64_t, int64_t begin, int64_t end) { return loops.largest(args, begin, end); });
      if (largest >= kInfinityKey<float> && check_finite) {
        refuse(args);
      }
      args.largest = &largest;
    }
    const auto loop = loops.quantize[static_cast<int64_t>(format)];
    const uint32_t found = largest_over_blocks(
        blocks, size, [&](int64_t, int64_t begin, int64_t end) { return loop(args, begin, end, nullptr); });
    // No residual was changed in place, so dropping the results is enough.
    if (found >= kInfinityKey<float> && check_finite) {
      refuse(args);
    }
  });
  return {codes, scales};
}

void dequantize_into(
    const Tensor& out, const Tensor& codes, const Tensor& scales, Format format, int64_t block, bool add) {
  const bool shared = block == 0;
  const int64_t numel = out.numel(), size = shared ? kSharedBlock : block;
  dispatch_short_floating(out.scalar_type(), [&]<typename T>() {
    const DequantizeArgs<T> args{data<T>(out), data<const uint8_t>(codes), data<const float>(scales), numel, size, add,
                                 shared};
    parallel_for(0, num_scales(numel, size), blocks_per_task(size), [&](int64_t begin, int64_t end) {
      kernels().of<T>().dequantize[static_cast<int64_t>(format)](args, begin, end);
    });
  });
}

Tensor dequantize_blockwise_cpu(
    Tensor codes, Tensor scales, int64_t numel, std::string format_name, int64_t block, ScalarType dtype) {
  const char* op = "dequantize_blockwise";
  check_short_floating(op, "dtype", dtype);
  const Format format = check_dequantize(op, codes, scales, numel, format_name, block);
  Tensor out = new_empty(codes, {numel}, dtype);
  dequantize_into(out, contiguous(codes), contiguous(scales), format, block, false);
  return out;
}

void dequantize_add_cpu(
    Tensor out, Tensor codes, Tensor scales, std::string format_name, int64_t block, bool accumulate) {
  const Format format = check_dequantize_add(out, codes, scales, format_name, block);
  dequantize_into(out, contiguous(codes), contiguous(scales), format, block, accumulate);
}

int64_t rows_per_task(int64_t dim) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, dim));
}

Tensor quantize_rows_cpu(Tensor x, std::string format_name) {
  const RowFormat format = check_quantize_rows(x, format_name);
  const Tensor in = contiguous(x);
  const int64_t num_rows = in.size(0), dim = in.size(1);
  Tensor rows = new_empty(in, {num_rows, row_bytes(dim, format)}, ScalarType::Byte);
  dispatch_short_floating(in.scalar_type(), [&]<typename T>() {
    const QuantizeRowsArgs<T> args{data<const T>(in), data<uint8_t>(rows), dim};
    const auto loop = kernels().of<T>().quantize_rows[static_cast<int64_t>(format)];
    parallel_for(0, num_rows, rows_per_task(dim), [&](int64_t begin, int64_t end) { loop(args, begin, end); });
  });
  return rows;
}

Tensor dequantize_rows_cpu(Tensor rows, int64_t dim, std::string format_name, ScalarType dtype) {
  const RowFormat format = check_dequantize_rows(rows, dim, format_name, dtype);
  const Tensor from = contiguous(rows);
  const int64_t num_rows = from.size(0);
  Tensor out = new_empty(from, {num_rows, dim}, dtype);
  dispatch_short_floating(dtype, [&]<typename T>() {
    const DequantizeRowsArgs<T> args{data<T>(out), data<const uint8_t>(from), dim};
    const auto loop = kernels().of<T>().dequantize_rows[static_cast<int64_t>(format)];
    parallel_for(0, num_rows, rows_per_task(dim), [&](int64_t begin, int64_t end) { loop(args, begin, end); });
  });
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("quantize_blockwise", TORCH_BOX(&quantize_blockwise_cpu));
  m.impl("dequantize_blockwise", TORCH_BOX(&dequantize_blockwise_cpu));
  m.impl("dequantize_add_", TORCH_BOX(&dequantize_add_cpu));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows_cpu));
  m.impl("dequantize_rows", TORCH_BOX(&dequantize_rows_cpu));
}

} // namespace moe_ext::quantize
