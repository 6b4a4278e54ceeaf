// CPU side of Adam's step. Elements are independent, and every loop computes the same bits.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "adam/adam.h"
#include "adam/adam_tables.h"
#include "common/cpu_isa.h"
#include "common/dispatch.h"

namespace moe_ext::adam {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

template <typename G, typename C>
void run(
    Step<G, C> loop, const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq, C* copy,
    const Factors& factors) {
  const int64_t bytes = 3 * sizeof(float) + sizeof(G) + sizeof(C);
  torch::stable::parallel_for(0, param.numel(), grain_size(bytes), [&](int64_t begin, int64_t end) {
    loop(
        data<float>(param) + begin, data<const G>(grad) + begin, data<float>(exp_avg) + begin,
        data<float>(exp_avg_sq) + begin, copy == nullptr ? copy : copy + begin, factors, end - begin);
  });
}

void adam_step_cpu(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> copy, int64_t step, double lr,
    double beta1, double beta2, double eps, double weight_decay, double grad_scale, bool follow_copy) {
  check_adam_step(param, grad, exp_avg, exp_avg_sq, copy, step);
  const double t = static_cast<double>(step);
  const Factors factors = {
      .decay = static_cast<float>(1 - lr * weight_decay),
      .grad_scale = static_cast<float>(grad_scale),
      .one_minus_beta1 = static_cast<float>(1 - beta1),
      .beta2 = static_cast<float>(beta2),
      .one_minus_beta2 = static_cast<float>(1 - beta2),
      .inverse_root = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, t))),
      .eps = static_cast<float>(eps),
      .step_size = static_cast<float>(lr / (1 - std::pow(beta1, t))),
      .follow_copy = follow_copy,
  };
  const auto with_copy = [&]<typename G>(const StepsFrom<G>& loops) {
    if (!copy) {
      run<G, float>(loops.none, param, grad, exp_avg, exp_avg_sq, nullptr, factors);
    } else if (copy->scalar_type() == ScalarType::BFloat16) {
      run(loops.bf16, param, grad, exp_avg, exp_avg_sq, data<BFloat16>(*copy), factors);
    } else {
      run(loops.f16, param, grad, exp_avg, exp_avg_sq, data<Half>(*copy), factors);
    }
  };
  switch (grad.scalar_type()) {
    case ScalarType::BFloat16:
      return with_copy(kernels().bf16);
    case ScalarType::Half:
      return with_copy(kernels().f16);
    default:
      return with_copy(kernels().f32);
  }
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("adam_step_", TORCH_BOX(&adam_step_cpu));
}

} // namespace moe_ext::adam
