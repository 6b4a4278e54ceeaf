// The k-th largest of many unsigned keys, by histograms of ever narrower ranges, until few keys are left. Host code.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace moe_ext {

// The k-th largest of n keys, all in [low, most], for 1 <= k <= n. Overwrites `keys`.
template <typename Key>
Key kth_largest(Key* keys, int64_t n, int64_t k, Key low, Key most) {
  constexpr int kBits = 11;
  constexpr int64_t kFew = 1024;
  while (n > kFew && low < most) {
    int shift = 0;
    while (((most - low) >> shift) >> kBits != 0) {
      ++shift;
    }
    std::array<int64_t, 1 << kBits> histogram{};
    for (int64_t i = 0; i < n; ++i) {
      ++histogram[(keys[i] - low) >> shift];
    }
    Key bin = ((most - low) >> shift) + 1;
    int64_t above = 0, in_bin = 0;
    while (above + in_bin < k) {
      above += in_bin;
      in_bin = histogram[--bin];
    }
    k -= above;
    // Without a branch, because the processor could not predict if a key is in the bin.
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const Key key = keys[i];
      keys[kept] = key;
      kept += (key - low) >> shift == bin;
    }
    n = kept;
    low += bin << shift;
    most = std::min<Key>(most, low + ((Key{1} << shift) - 1));
  }
  if (low == most) {
    return low;
  }
  std::nth_element(keys, keys + (k - 1), keys + n, std::greater<Key>());
  return keys[k - 1];
}

template <typename Key>
Key kth_largest(Key* keys, int64_t n, int64_t k) {
  Key low = keys[0], most = keys[0];
  for (int64_t i = 1; i < n; ++i) {
    low = keys[i] < low ? keys[i] : low;
    most = keys[i] > most ? keys[i] : most;
  }
  return kth_largest(keys, n, k, low, most);
}

// The taken keys: all keys above `bound`, and the first `ties` keys equal to it.
template <typename Key>
struct Cut {
  Key bound;
  int64_t ties;
};

// Cut of the k largest of n keys in [low, most]; of equal keys the first are taken. Overwrites `scratch`, which must
// hold a copy of the keys.
template <typename Key>
Cut<Key> cut_largest(const Key* keys, Key* scratch, int64_t n, int64_t k, Key low, Key most) {
  if (k == 0) {
    return {static_cast<Key>(-1), 0};
  }
  const Key bound = kth_largest(scratch, n, k, low, most);
  int64_t above = 0;
  for (int64_t i = 0; i < n; ++i) {
    above += keys[i] > bound;
  }
  return {bound, k - above};
}

template <typename Key>
Cut<Key> cut_largest(const Key* keys, Key* scratch, int64_t n, int64_t k) {
  const auto [low, most] = std::minmax_element(keys, keys + n);
  return cut_largest(keys, scratch, n, k, *low, *most);
}

} // namespace moe_ext
