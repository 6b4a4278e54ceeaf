// Scaled copies on CPU. Elements are independent, so the bits do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <atomic>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "quantize/scale_into.h"
#include "quantize/scale_into_tables.h"

namespace moe_ext::scale_into {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

Tensor scale_into_cpu(Tensor out, Tensor x, double scale) {
  check_scale_into(out, x);
  Tensor nonfinite = torch::stable::new_empty(x, {}, ScalarType::Bool);
  std::atomic<bool> found = false;
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    dispatch_floating(out.scalar_type(), [&]<typename U>() {
      const auto loop = kernels().of<T>().to.template of<U>();
      torch::stable::parallel_for(0, x.numel(), grain_size(sizeof(T) + sizeof(U)), [&](int64_t begin, int64_t end) {
        if (loop(data<const T>(x) + begin, static_cast<acc_t<T>>(scale), end - begin, data<U>(out) + begin)) {
          found.store(true, std::memory_order_relaxed);
        }
      });
    });
  });
  *data<bool>(nonfinite) = found;
  return nonfinite;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("scale_into_", TORCH_BOX(&scale_into_cpu));
}

} // namespace moe_ext::scale_into
