// Block attention on tensor cores: the passes of attention_kernels.cuh and backward_kernels.cuh for 16-bit operands
// whose rows are multiples of 16 bytes. A tile's own operands stay in shared memory; asynchronous copies bring the
// others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attention/backward_kernels.cuh"
#include "attention/tensor_products.cuh"

namespace moe_ext::attention {

constexpr int kMostTensorCols = 256;     // head dim of q and k in the forward pass
constexpr int kMostTensorGradCols = 128; // head dims in the backward pass, whose sums stay in registers

template <typename T>
constexpr bool kHasTensorCores = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;
// The gradients of scores are split into 16-bit parts. In float16 they would underflow.
template <typename T>
constexpr bool kHasTensorGradients = std::is_same_v<T, c10::BFloat16>;

template <typename T>
__device__ __forceinline__ T* tiles_behind(TileContext<T>* context) {
  return reinterpret_cast<T*>(
      reinterpret_cast<unsigned char*>(context) + ceil_div(sizeof(TileContext<T>), size_t{16}) * 16);
}

template <typename T>
size_t tensor_bytes(int64_t elements_of_tiles) {
  return ceil_div(sizeof(TileContext<T>), size_t{16}) * 16 + static_cast<size_t>(elements_of_tiles) * sizeof(T);
}

// Starts copies of tile t of the matrix that is multiplied second and, unless `underway`, of the one multiplied first.
// On return the first has arrived; `fetch_next` waits for the second.
template <typename T>
__device__ __forceinline__ void fetch_tiles(
    TileContext<T>& context, const TokenTile& tile, int t, bool underway, const Rows<T>& from_first,
    const SharedTile<T>& first, const Rows<T>& from_second, const SharedTile<T>& second) {
  if (!underway) {
    first.fetch(from_first, int64_t{t} * kTile);
    commit_copies();
  }
  second.fetch(from_second, int64_t{t} * kTile);
  commit_copies();
  copy_tokens(tile, context.tokens.k_positions, context.tokens.k_documents);
  wait_copies<1>();
  __syncthreads();
}

// Waits for the second matrix of the tile. Then starts copies of the first matrix of the tile `next`, because after the
// barrier no warp reads the present one. Returns `next`, or -1.
template <typename T>
__device__ __forceinline__ int fetch_next(int next, const Rows<T>& from, const SharedTile<T>& first) {
  wait_copies<0>();
  __syncthreads();
  if (next >= 0) {
    first.fetch(from, int64_t{next} * kTile);
    commit_copies();
  }
  return next;
}

template <int kCols, typename T>
__global__ void __launch_bounds__(kTensorThreads, 1)
    tensor_forward_kernel(BlockParams<T> params, ForwardState<float> state, int num_chunks) {
  MOE_DYNAMIC_SHARED(TileContext<T>, context);
  const TileTask task(params.queries.num_tiles, num_chunks, params.heads);
  // Under a causal mask the last tiles cost most. They come first, so that no SM ends late.
  const int tile = params.queries.num_tiles - 1 - task.tile;
  const int64_t row = int64_t{tile} * kTile, b = task.sequence;
  const int first_col = task.chunk * kCols;
  const TokenTile& own = params.queries.of_sequence(b)[tile];
  const TokenTile* const keys = params.keys.of_sequence(b);
  TileTokens<float>& tokens = context->tokens;
  const int64_t row0 = task.matrix * params.q.num_rows + row;
  if (threadIdx.x == 0) {
    const int64_t key_head = task.head / params.group();
    context->k = params.k.of(b, key_head);
    context->v = params.v.of(b, key_head).columns(first_col, kCols);
    context->head = head_score(params, b, task.head);
  }
  copy_tokens(own, tokens.q_positions, tokens.q_documents);
  const SharedTile<T> q(tiles_behind(context), params.q.cols), k(q.end(), params.k.cols);
  const SharedTile<T> v(k.end(), min(kCols, params.v.cols - first_col));
  q.fetch(params.q.of(b, task.head), row);
  float max[TensorLayout<>::kRows], sum[TensorLayout<>::kRows];
  TensorSums<kCols> out;
  load_state<TensorLayout<>>(state, row0, own.count, first_col, max, sum, out);
  const auto may = [&](int t) { return may_see(own.extent, keys[t].extent, params.window); };
  int underway = -1; // tile whose keys are being copied while the values of the tile before are multiplied
  for_each_visible<kTensorThreads>(params.keys.num_tiles, context->visible, may, [&](int t, int next) {
    fetch_tiles(*context, keys[t], t, underway == t, context->k, k, context->v, v);
    TensorScores<> s = {};
    add_products<kTile>(s, q, k, 0);
    const bool masked = is_masked(own.extent, keys[t], params.window);
    with_score<false>(context->head.score, [&]<bool kSoftcap, bool kAlibi>() {
      mask_scores<TensorLayout<>, kSoftcap, kAlibi, false>(s, tokens, context->head, context->bias, masked);
    });
    softmax_tile<TensorLayout<>>(s, max, sum, out);
    if (params.threshold > 0) {
      drop<TensorLayout<>>(s, kept_scores<TensorLayout<>, true>(tokens, context->head), params.inv_keep);
    }
    underway = fetch_next(next, context->k, k);
    out.template add<true, kTile>(s, v, 0);
    __syncthreads();
  });
  finish_rows<TensorLayout<>>(state, row0, own.count, first_col, max, sum, out);
}

template <typename T>
__global__ void __launch_bounds__(kTensorThreads, 1)
    tensor_backward_q_kernel(BlockParams<T> params, BackwardArrays<float> arrays) {
  MOE_DYNAMIC_SHARED(TileContext<T>, context);
  const TileTask task(params.queries.num_tiles, 1, params.heads);
  const int tile = params.queries.num_tiles - 1 - task.tile;
  const int64_t row = int64_t{tile} * kTile, b = task.sequence;
  const int64_t row0 = task.matrix * params.q.num_rows + row;
  const TokenTile& own = params.queries.of_sequence(b)[tile];
  const TokenTile* const keys = params.keys.of_sequence(b);
  TileTokens<float>& tokens = context->tokens;
  if (threadIdx.x == 0) {
    const int64_t key_head = task.head / params.group();
    context->k = params.k.of(b, key_head);
    context->v = params.v.of(b, key_head);
    context->grad_out = arrays.grad_out.of(b, task.head);
    context->head = head_score(params, b, task.head);
  }
  copy_tokens(own, tokens.q_positions, tokens.q_documents);
  copy_statistics(arrays, row0, own.count, tokens);
  const SharedTile<T> q(tiles_behind(context), params.q.cols), k(q.end(), params.k.cols);
  const SharedTile<T> v(k.end(), params.v.cols), grad(v.end(), params.v.cols), grad_low(grad.end(), params.v.cols);
  q.fetch(params.q.of(b, task.head), row);
  __syncthreads();
  split_rows(grad, grad_low, context->grad_out, row);
  TensorSums<kMostTensorGradCols> grad_q;
  grad_q.clear();
  const auto may = [&](int t) { return may_see(own.extent, keys[t].extent, params.window); };
  int underway = -1; // tile whose values are being copied while the keys of the tile before are multiplied
  for_each_visible<kTensorThreads>(params.keys.num_tiles, context->visible, may, [&](int t, int next) {
    fetch_tiles(*context, keys[t], t, underway == t, context->v, v, context->k, k);
    TensorScores<> s = {}, g = {};
    add_products<kTile>(g, grad, v, 0);
    add_products<kTile>(g, grad_low, v, 0);
    underway = fetch_next(next, context->v, v);
    add_products<kTile>(s, q, k, 0);
    gradient_of_tile<TensorLayout<>, true, false>(s, g, *context, is_masked(own.extent, keys[t], params.window));
    grad_q.template add<true, kTile>(g, k, 0);
    __syncthreads();
  });
  grad_q.store_tile(arrays.grad_q + row0 * params.q.cols, own.count, params.q.cols);
}

// Registers hold the sums of two gradients, and beside them only the scores of a quarter of a tile.
template <typename T>
__global__ void __launch_bounds__(kTensorThreads, 1)
    tensor_backward_kv_kernel(BlockParams<T> params, BackwardArrays<float> arrays) {
  MOE_DYNAMIC_SHARED(TileContext<T>, context);
  const TileTask task(params.keys.num_tiles, 1, params.key_heads);
  const int64_t row = int64_t{task.tile} * kTile, b = task.sequence, key_head = task.head;
  const TokenTile& own = params.keys.of_sequence(b)[task.tile];
  const TokenTile* const queries = params.queries.of_sequence(b);
  TileTokens<float>& tokens = context->tokens;
  copy_tokens(own, tokens.k_positions, tokens.k_documents);
  const SharedTile<T> k(tiles_behind(context), params.k.cols), v(k.end(), params.v.cols);
  const SharedTile<T> q(v.end(), params.q.cols);
  const SharedTile<T> grad(q.end(), params.v.cols), grad_low(grad.end(), params.v.cols);
  k.fetch(params.k.of(b, key_head), row);
  v.fetch(params.v.of(b, key_head), row);
  constexpr int kPart = kTile / 4;
  TensorSums<kMostTensorGradCols> grad_k, grad_v;
  grad_k.clear();
  grad_v.clear();
  const auto may = [&](int t) { return may_see(queries[t].extent, own.extent, params.window); };
  const int group = static_cast<int>(params.group());
  for (int member = 0; member < group; ++member) {
    const int h = task.head * group + member;
    if (threadIdx.x == 0) {
      context->q = params.q.of(b, h);
      context->grad_out = arrays.grad_out.of(b, h);
      context->head = head_score(params, b, h);
    }
    // The first barrier in for_each_visible makes the first thread's writes visible. Its last barrier ends their use.
    for_each_visible<kTensorThreads>(params.queries.num_tiles, context->visible, may, [&](int t, int) {
      q.fetch(context->q, int64_t{t} * kTile);
      commit_copies();
      split_rows(grad, grad_low, context->grad_out, int64_t{t} * kTile);
      copy_tokens(queries[t], tokens.q_positions, tokens.q_documents);
      copy_statistics(
          arrays, (b * params.heads + h) * params.q.num_rows + int64_t{t} * kTile, queries[t].count, tokens);
      wait_copies<0>();
      __syncthreads();
      const bool masked = is_masked(queries[t].extent, own, params.window);
      const auto add_part = [&]<int kFirst>() {
        TensorScores<kPart> s = {}, g = {};
        add_products<kPart>(s, k, q, kFirst);
        add_products<kPart>(g, v, grad, kFirst);
        add_products<kPart>(g, v, grad_low, kFirst);
        gradient_of_tile<TensorLayout<kPart, kFirst>, false, false>(s, g, *context, masked);
        grad_v.template add<true, kPart>(s, grad, kFirst);
        grad_v.template add<false, kPart>(s, grad_low, kFirst);
        grad_k.template add<true, kPart>(g, q, kFirst);
      };
      add_part.template operator()<0>();
      add_part.template operator()<kPart>();
      add_part.template operator()<2 * kPart>();
      add_part.template operator()<3 * kPart>();
      __syncthreads();
    });
  }
  const int64_t first = task.matrix * params.k.num_rows + row, rows = params.k.num_rows - row;
  grad_k.store_tile(arrays.grad_k + first * params.k.cols, rows, params.k.cols);
  grad_v.store_tile(arrays.grad_v + first * params.v.cols, rows, params.v.cols);
}

// Return true if the kernels accept the head dims. The caller has checked that rows are multiples of 16 bytes.
template <typename T>
bool tensor_forward_takes(const BlockParams<T>& params) {
  return kHasTensorCores<T> && params.bias.values == nullptr && params.q.cols % 8 == 0 && params.v.cols % 8 == 0 &&
         params.q.cols <= kMostTensorCols;
}

template <typename T>
bool tensor_backward_takes(const BlockParams<T>& params) {
  return kHasTensorGradients<T> && tensor_forward_takes(params) &&
         std::max(params.q.cols, params.v.cols) <= kMostTensorGradCols;
}

template <int kCols, typename T>
void launch_tensor_forward_columns(
    const BlockParams<T>& params, const ForwardState<float>& state, cudaStream_t stream) {
  const int chunks = num_chunks(state.cols, kCols);
  const int64_t blocks = int64_t{params.queries.num_tiles} * params.batch * params.heads * chunks;
  const int64_t tiles = 2 * SharedTile<T>::size(params.q.cols) + SharedTile<T>::size(std::min(kCols, state.cols));
  if (blocks > 0) {
    launch(
        {Dim3(blocks), Dim3(kTensorThreads), tensor_bytes<T>(tiles), stream}, tensor_forward_kernel<kCols, T>, params,
        state, chunks);
  }
}

template <typename T>
void launch_tensor_forward(const BlockParams<T>& params, const ForwardState<float>& state, cudaStream_t stream) {
  if (state.cols > kGroupCols) {
    launch_tensor_forward_columns<2 * kGroupCols>(params, state, stream);
  } else {
    launch_tensor_forward_columns<kGroupCols>(params, state, stream);
  }
}

template <typename T>
void launch_tensor_backward(const BlockParams<T>& params, const BackwardArrays<float>& arrays, cudaStream_t stream) {
  const int64_t tiles = 2 * SharedTile<T>::size(params.q.cols) + 3 * SharedTile<T>::size(params.v.cols);
  const int64_t q_blocks = int64_t{params.queries.num_tiles} * params.batch * params.heads;
  if (q_blocks > 0) {
    launch(
        {Dim3(q_blocks), Dim3(kTensorThreads), tensor_bytes<T>(tiles), stream}, tensor_backward_q_kernel<T>, params,
        arrays);
  }
  const int64_t kv_blocks = int64_t{params.keys.num_tiles} * params.batch * params.key_heads;
  if (kv_blocks > 0) {
    launch(
        {Dim3(kv_blocks), Dim3(kTensorThreads), tensor_bytes<T>(tiles), stream}, tensor_backward_kv_kernel<T>, params,
        arrays);
  }
}

} // namespace moe_ext::attention
