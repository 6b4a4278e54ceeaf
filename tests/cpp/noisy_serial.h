// The noisy gates as serial loops in double, for one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "common/philox.h"

namespace moe_ext::noisy_gating::serial {

inline std::vector<int> ranking(const std::vector<double>& keys) {
  std::vector<int> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] > keys[b]; });
  return order;
}

inline std::vector<double> softmax(const std::vector<double>& x) {
  std::vector<double> p(x.size());
  const double top = *std::max_element(x.begin(), x.end());
  std::transform(x.begin(), x.end(), p.begin(), [&](double v) { return std::exp(v - top); });
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& v : p) {
    v /= sum;
  }
  return p;
}

inline double uniform(const RngSource& rng, Stream stream, int64_t t, int64_t column) {
  return (token_draws(rng, stream, t).words(column).w[column % 4] >> 8) * 0x1p-24;
}

// In float, as the gates draw; a test of its own compares to_normals with double.
inline double normal(const RngSource& rng, int64_t t, int64_t column) {
  const PhiloxWords words = token_draws(rng, Stream::kNoise, t).words(column);
  const int pair = column % 4 < 2 ? 0 : 2;
  const NormalPair normals = to_normals(words.w[pair], words.w[pair + 1]);
  return column % 2 == 0 ? normals.first : normals.second;
}

struct Token {
  std::vector<int> idx;
  std::vector<double> weights;
  std::vector<double> sums;  // of each expert: score, or gate
  std::vector<double> loads; // of each expert
};

inline Token gshard(const std::vector<double>& x, const RngSource& rng, int64_t t) {
  const std::vector<int> order = ranking(x);
  const double w2 = 1 / (1 + std::exp(x[order[0]] - x[order[1]]));
  const bool kept = rng.state == nullptr || uniform(rng, Stream::kSecondExpert, t, 0) < 2 * w2;
  return {{order[0], kept ? order[1] : -1}, {1 - w2, kept ? w2 : 0}, softmax(x), {}};
}

inline Token noisy(
    const std::vector<double>& clean, const std::vector<double>& noise, const RngSource& rng, int64_t t, int top_k,
    double epsilon) {
  const int n = static_cast<int>(clean.size());
  std::vector<double> h = clean, deviation(n);
  for (int e = 0; !noise.empty() && e < n; ++e) {
    deviation[e] = std::log1p(std::exp(noise[e])) + epsilon;
    h[e] += normal(rng, t, e) * deviation[e];
  }
  const std::vector<int> order = ranking(h);
  std::vector<double> chosen;
  for (int k = 0; k < top_k; ++k) {
    chosen.push_back(h[order[k]]);
  }
  Token out{{order.begin(), order.begin() + top_k}, softmax(chosen), std::vector<double>(n), std::vector<double>(n)};
  for (int k = 0; k < top_k; ++k) {
    out.sums[order[k]] = out.weights[k];
  }
  for (int e = 0; e < n; ++e) {
    const bool is_chosen = std::find(out.idx.begin(), out.idx.end(), e) != out.idx.end();
    if (noise.empty()) {
      out.loads[e] = is_chosen;
      continue;
    }
    const int rank = is_chosen ? top_k : top_k - 1;
    const double threshold = rank < n ? h[order[rank]] : -std::numeric_limits<double>::infinity();
    out.loads[e] = 0.5 * std::erfc(-(clean[e] - threshold) / deviation[e] * M_SQRT1_2);
  }
  return out;
}

} // namespace moe_ext::noisy_gating::serial
