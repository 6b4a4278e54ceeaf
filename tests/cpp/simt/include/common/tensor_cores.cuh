// Shadows csrc/common/tensor_cores.cuh: the same functions, of the emulated warp. Where each lane's part lies follows
// the tables of the PTX manual for ldmatrix and mma.m16n8k16.
#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

namespace moe_ext {

// A copy lands at the wait: what is read before it is still what was there.
inline void copy_async(void* shared, const void* global, bool real, SIMT_SITE) {
  simt::start_copy(shared, real ? global : nullptr, site);
}

inline void commit_copies() {
  simt::commit_copies();
}

template <int kPending>
void wait_copies() {
  simt::wait_copies(kPending);
}

template <bool kTransposed>
void load_matrices(uint32_t (&to)[4], const void* row, SIMT_SITE) {
  simt::check_shared("ldmatrix", row, site);
  const auto rows = simt::exchange({"ldmatrix", ~0u, reinterpret_cast<uintptr_t>(row), site});
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int first = simt::lane / 4, second = simt::lane % 4 * 2 + e;
      const int from = kTransposed ? second : first, col = kTransposed ? first : second;
      std::memcpy(&pair[e], reinterpret_cast<const unsigned char*>(rows[m * 8 + from]) + col * 2, 2);
    }
    std::memcpy(&to[m], pair, 4);
  }
  // No lane writes there before all have read.
  simt::exchange({"ldmatrix", ~0u, 0, site});
}

template <typename T>
void multiply_add(
    float& c0, float& c1, float& c2, float& c3, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_SITE) {
  // Each lane's elements as floats, which the others read before it goes on.
  float own[12];
  const uint32_t given[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 12; ++i) {
    const auto bits = static_cast<uint16_t>(given[i / 2] >> (16 * (i % 2)));
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    own[i] = static_cast<float>(value);
  }
  const auto of_lanes = simt::exchange({"mma", ~0u, reinterpret_cast<uintptr_t>(own), site});
  const auto of_lane = [&](int lane) { return reinterpret_cast<const float*>(of_lanes[lane]); };
  const int g = simt::lane / 4, t = simt::lane % 4;
  float* const sums[4] = {&c0, &c1, &c2, &c3};
  for (int e = 0; e < 4; ++e) {
    const int row_half = e / 2, col = 2 * t + e % 2;
    for (int k = 0; k < 16; ++k) {
      const int k_half = k / 8, in_half = k % 8;
      const float of_a = of_lane(g * 4 + in_half / 2)[k_half * 4 + row_half * 2 + in_half % 2];
      *sums[e] += of_a * of_lane(col * 4 + in_half / 2)[8 + k_half * 2 + in_half % 2];
    }
  }
  simt::exchange({"mma", ~0u, 0, site});
}

} // namespace moe_ext
