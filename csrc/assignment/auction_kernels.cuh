// The auction of auction.h in one block, so that rounds need no launch and nobody waits for the host. A warp tests 32
// tokens at a time and bids for those without a place. Then every class with more bidders than places keeps the best by
// a radix selection over (bid, token), all classes at once, four bits in each step. Then prices rise. A class's state
// is in shared memory, a token's in global memory. Bids are whole numbers, compared by their excess over the price of
// the round. The selection stops when nothing is left to tell apart.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "assignment/auction.h"
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/warp.cuh"

namespace moe_ext::assignment {

constexpr int kAuctionThreads = 1024;
constexpr int kOwnSharedBytes = 1024; // upper bound of the kernel's static shared memory, beside the classes
constexpr int kDigitBits = 4;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kNoPlace = -1;
constexpr int kMasked = -2;

using Bits = unsigned long long;

// Scratch memory of `bytes` bytes in global memory; num_dummies < E.
struct AuctionScratch {
  double* bid;  // [T + E]
  float* value; // [T, E] scores as whole numbers
  int* place;   // [T + E]: class of places, kNoPlace or kMasked

  static int64_t bytes(int64_t num_tokens, int64_t num_experts) {
    return (num_tokens + num_experts) * 12 + num_tokens * num_experts * 4;
  }
  AuctionScratch(void* memory, int64_t num_tokens, int64_t num_experts)
      : bid(static_cast<double*>(memory)),
        value(reinterpret_cast<float*>(bid + num_tokens + num_experts)),
        place(reinterpret_cast<int*>(value + num_tokens * num_experts)) {
  }
};

// State of the classes in shared memory, at most 2 E of them.
struct ClassState {
  double* price;
  Bits* bid_prefix; // known digits of the selection's threshold
  Bits* lowest;     // lowest kept bid, above the price
  unsigned* token_prefix;
  int* count;     // bidders that hold a place
  int* wanted;    // places left for bids that match the prefixes; 0 once these need not be told apart
  int* histogram; // [classes, kDigits]

  static int64_t bytes(int64_t num_classes) {
    return num_classes * (8 * 3 + 4 * 3 + 4 * kDigits);
  }
  static int64_t most_experts(const DeviceProperties& device) {
    return (device.shared_bytes_per_block_opt_in - kOwnSharedBytes) / bytes(2);
  }
  __device__ __forceinline__ ClassState(void* shared, int num_classes) {
    price = static_cast<double*>(shared);
    bid_prefix = reinterpret_cast<Bits*>(price + num_classes);
    lowest = bid_prefix + num_classes;
    token_prefix = reinterpret_cast<unsigned*>(lowest + num_classes);
    count = reinterpret_cast<int*>(token_prefix + num_classes);
    wanted = count + num_classes;
    histogram = wanted + num_classes;
  }
};

struct AuctionTask {
  AuctionScratch scratch;
  AuctionShape shape;
  int num_tokens;
  int num_bidders; // tokens, including masked tokens, and dummies

  __device__ __forceinline__ double value(int token, int c) const {
    const int n = static_cast<int>(shape.num_experts);
    return token < num_tokens ? scratch.value[int64_t{token} * n + (c < n ? c : c - n)] : shape.dummy_value(c);
  }
  // Key for ties between bids, which is larger for a lower token.
  __device__ __forceinline__ unsigned token_key(int token) const {
    return static_cast<unsigned>(num_bidders - 1 - token);
  }
};

__device__ __forceinline__ int block_thread() {
  return static_cast<int>(threadIdx.x);
}

__device__ __forceinline__ int block_threads() {
  return static_cast<int>(blockDim.x);
}

// Returns true in all threads of a block if `here` is true in any.
static __device__ bool block_any(bool here) {
  MOE_SHARED(int, any, 1);
  if (block_thread() == 0) {
    any[0] = 0;
  }
  __syncthreads();
  if (here) {
    any[0] = 1;
  }
  __syncthreads();
  const bool result = any[0] != 0;
  __syncthreads();
  return result;
}

// Returns the best class for a token, and its margin over the second best, in every lane.
__device__ __forceinline__ Candidate<double> best_class(
    const AuctionTask& task, const ClassState& state, int token, int num_classes, double& margin) {
  constexpr double kLow = -static_cast<double>(__builtin_inf());
  Candidate<double> best = {kLow, INT32_MAX};
  double second = kLow;
  for (int c = lane_id(); c < num_classes; c += kWarpSize) {
    const double worth = task.value(token, c) - state.price[c];
    if (worth > best.key) {
      second = best.key;
      best = {worth, c};
    } else if (worth > second) {
      second = worth;
    }
  }
  const Candidate<double> winner = warp_best(best);
  second = warp_max(best.idx == winner.idx ? second : best.key);
  margin = num_classes == 1 ? 0.0 : winner.key - second;
  return winner;
}

// Bids for every token without a place. Returns true if this thread's warp had such a token. `highest` becomes the
// largest excess of a bid over its price.
static __device__ bool place_bids(
    const AuctionTask& task, const ClassState& state, int num_classes, double eps, Bits* highest) {
  bool any = false;
  for (int base = warp_id() * kWarpSize; base < task.num_bidders; base += block_threads()) {
    const int mine = base + lane_id();
    const bool waits = mine < task.num_bidders && task.scratch.place[mine] == kNoPlace;
    for (unsigned left = __ballot_sync(kFullMask, waits); left != 0; left &= left - 1) {
      const int token = base + __ffs(static_cast<int>(left)) - 1;
      double margin = 0;
      const Candidate<double> best = best_class(task, state, token, num_classes, margin);
      any = true;
      if (lane_id() == 0) {
        task.scratch.place[token] = best.idx;
        task.scratch.bid[token] = state.price[best.idx] + margin + eps;
        atomicAdd(&state.count[best.idx], 1);
        atomicMax(highest, static_cast<Bits>(margin + eps));
      }
    }
  }
  return any;
}

// One step of the selection: extends the prefix of each class by the digit at `shift` of the bid or token.
static __device__ void select_digit(
    const AuctionTask& task, const ClassState& state, int num_classes, int shift, bool of_token) {
  for (int i = block_thread(); i < num_classes * kDigits; i += block_threads()) {
    state.histogram[i] = 0;
  }
  __syncthreads();
  for (int token = block_thread(); token < task.num_bidders; token += block_threads()) {
    const int c = task.scratch.place[token];
    if (c < 0 || state.wanted[c] == 0) {
      continue;
    }
    const Bits bid = static_cast<Bits>(task.scratch.bid[token] - state.price[c]);
    const Bits above = of_token ? bid : bid >> (shift + kDigitBits) << (shift + kDigitBits);
    const unsigned key = task.token_key(token);
    const Bits token_above = of_token ? Bits{key} >> (shift + kDigitBits) << (shift + kDigitBits) : 0;
    if (above == state.bid_prefix[c] && token_above == state.token_prefix[c]) {
      const Bits digit = (of_token ? Bits{key} : bid) >> shift & (kDigits - 1);
      atomicAdd(&state.histogram[c * kDigits + static_cast<int>(digit)], 1);
    }
  }
  __syncthreads();
  for (int c = block_thread(); c < num_classes; c += block_threads()) {
    int wanted = state.wanted[c];
    if (wanted == 0) {
      continue;
    }
    int digit = kDigits - 1;
    for (; state.histogram[c * kDigits + digit] < wanted; --digit) {
      wanted -= state.histogram[c * kDigits + digit];
    }
    if (of_token) {
      state.token_prefix[c] |= static_cast<unsigned>(digit) << shift;
    } else {
      state.bid_prefix[c] |= static_cast<Bits>(digit) << shift;
    }
    state.wanted[c] = state.histogram[c * kDigits + digit] == wanted ? 0 : wanted;
  }
  __syncthreads();
}

__device__ __forceinline__ int num_bits(Bits x) {
  int bits = 0;
  for (; x != 0; x >>= 1) {
    ++bits;
  }
  return bits;
}

// Takes back the places of outbid tokens, and raises the prices. No bid of the phase exceeds the price of its class by
// more than `highest`.
static __device__ void settle(const AuctionTask& task, const ClassState& state, int num_classes, Bits highest) {
  for (int c = block_thread(); c < num_classes; c += block_threads()) {
    const bool overfull = state.count[c] > task.shape.places(c);
    state.wanted[c] = overfull ? static_cast<int>(task.shape.places(c)) : 0;
    state.bid_prefix[c] = 0;
    state.token_prefix[c] = 0;
    state.lowest[c] = ~Bits{0};
  }
  const auto undecided = [&]() {
    bool mine = false;
    for (int c = block_thread(); c < num_classes; c += block_threads()) {
      mine = mine || state.wanted[c] != 0;
    }
    return block_any(mine);
  };
  for (int shift = (num_bits(highest) - 1) / kDigitBits * kDigitBits; shift >= 0 && undecided(); shift -= kDigitBits) {
    select_digit(task, state, num_classes, shift, false);
  }
  const int token_bits = num_bits(static_cast<Bits>(task.num_bidders));
  for (int shift = token_bits / kDigitBits * kDigitBits; shift >= 0 && undecided(); shift -= kDigitBits) {
    select_digit(task, state, num_classes, shift, true);
  }
  __syncthreads();
  for (int token = block_thread(); token < task.num_bidders; token += block_threads()) {
    const int c = task.scratch.place[token];
    if (c < 0 || state.count[c] < task.shape.places(c)) {
      continue;
    }
    const Bits bid = static_cast<Bits>(task.scratch.bid[token] - state.price[c]);
    const Bits threshold = state.bid_prefix[c];
    if (bid > threshold || (bid == threshold && task.token_key(token) >= state.token_prefix[c])) {
      atomicMin(&state.lowest[c], bid);
    } else {
      task.scratch.place[token] = kNoPlace;
    }
  }
  __syncthreads();
  for (int c = block_thread(); c < num_classes; c += block_threads()) {
    if (state.count[c] >= task.shape.places(c)) {
      state.price[c] += static_cast<double>(state.lowest[c]);
      state.count[c] = static_cast<int>(task.shape.places(c));
    }
  }
  __syncthreads();
}

// Runs a phase, until every bidder has a place. `highest` is in shared memory.
static __device__ void run_phase(
    const AuctionTask& task, const ClassState& state, int num_classes, double eps, Bits* highest) {
  for (int token = block_thread(); token < task.num_bidders; token += block_threads()) {
    if (task.scratch.place[token] != kMasked) {
      task.scratch.place[token] = kNoPlace;
    }
  }
  for (int c = block_thread(); c < num_classes; c += block_threads()) {
    state.count[c] = 0;
  }
  if (block_thread() == 0) {
    *highest = 0;
  }
  __syncthreads();
  while (block_any(place_bids(task, state, num_classes, eps, highest))) {
    settle(task, state, num_classes, *highest);
  }
}

__device__ __forceinline__ bool is_finite(double x) {
  return x - x == 0;
}

struct Survey {
  ScoreRange range;
  int num_real;
};

// Returns the range of the scores of real tokens and their number, in every thread. kCheck traps a score that is not
// finite.
template <typename T, bool kCheck>
__device__ Survey survey_scores(const T* scores, const bool* token_mask, int num_tokens, int num_experts) {
  constexpr double kUnbounded = static_cast<double>(__builtin_inf());
  MOE_SHARED(Survey, warps, kWarpSize);
  Survey mine = {{kUnbounded, -kUnbounded}, 0};
  for (int token = warp_id(); token < num_tokens; token += block_threads() / kWarpSize) {
    if (token_mask != nullptr && !token_mask[token]) {
      continue;
    }
    ++mine.num_real;
    for (int e = lane_id(); e < num_experts; e += kWarpSize) {
      const double s = static_cast<double>(static_cast<acc_t<T>>(scores[int64_t{token} * num_experts + e]));
      if constexpr (kCheck) {
        if (!is_finite(s)) {
          __trap();
        }
      }
      if (is_finite(s)) {
        mine.range.low = s < mine.range.low ? s : mine.range.low;
        mine.range.high = s > mine.range.high ? s : mine.range.high;
      }
    }
  }
  mine.range.low = -warp_max(-mine.range.low);
  mine.range.high = warp_max(mine.range.high);
  if (lane_id() == 0) {
    warps[warp_id()] = mine;
  }
  __syncthreads();
  Survey all = {{kUnbounded, -kUnbounded}, 0};
  for (int warp = 0; warp < block_threads() / kWarpSize; ++warp) {
    all.range.low = min(all.range.low, warps[warp].range.low);
    all.range.high = max(all.range.high, warps[warp].range.high);
    all.num_real += warps[warp].num_real;
  }
  return all;
}

// expert_of [T], -1 for a masked token. One block of whole warps.
template <typename T, bool kCheck>
__global__ void __launch_bounds__(kAuctionThreads, 1) auction_kernel(
    const T* __restrict__ scores, const bool* __restrict__ token_mask, int num_tokens, int num_experts,
    AuctionScratch scratch, int64_t* __restrict__ expert_of) {
  MOE_DYNAMIC_SHARED(double, shared);
  MOE_SHARED(Bits, highest, 1);
  const Survey survey = survey_scores<T, kCheck>(scores, token_mask, num_tokens, num_experts);
  const AuctionShape shape(survey.num_real, num_experts);
  const int num_classes = static_cast<int>(shape.num_classes());
  const AuctionTask task = {scratch, shape, num_tokens, num_tokens + static_cast<int>(shape.num_dummies())};
  const ClassState state(shared, num_classes);
  for (int64_t i = block_thread(); i < int64_t{num_tokens} * num_experts; i += block_threads()) {
    const double s = static_cast<double>(static_cast<acc_t<T>>(scores[i]));
    scratch.value[i] = is_finite(s) ? quantized_score(s, survey.range) : 0.0f;
  }
  for (int token = block_thread(); token < task.num_bidders; token += block_threads()) {
    const bool real = token >= num_tokens || token_mask == nullptr || token_mask[token];
    scratch.place[token] = real ? kNoPlace : kMasked;
  }
  for (int c = block_thread(); c < num_classes; c += block_threads()) {
    state.price[c] = 0;
  }
  __syncthreads();
  for (double eps = first_eps(survey.range);; eps = next_eps(eps)) {
    run_phase(task, state, num_classes, eps, highest);
    if (eps == 1) {
      break;
    }
  }
  for (int token = block_thread(); token < num_tokens; token += block_threads()) {
    const int c = scratch.place[token];
    expert_of[token] = c < 0 ? -1 : c < num_experts ? c : c - num_experts;
  }
}

// `memory` has AuctionScratch::bytes bytes. The launch uses ClassState::bytes(2 num_experts) of shared memory.
template <bool kCheck, typename T>
void launch_auction(
    const T* scores, const bool* token_mask, int num_tokens, int num_experts, void* memory, int64_t* expert_of,
    cudaStream_t stream) {
  if (num_tokens == 0) {
    return;
  }
  const int warps = ceil_div(num_tokens + num_experts, kWarpSize);
  const int64_t threads = std::min(kAuctionThreads, warps * kWarpSize);
  launch(
      {Dim3(1), Dim3(threads), static_cast<size_t>(ClassState::bytes(2 * int64_t{num_experts})), stream},
      auction_kernel<T, kCheck>, scores, token_mask, num_tokens, num_experts,
      AuctionScratch(memory, num_tokens, num_experts), expert_of);
}

} // namespace moe_ext::assignment
