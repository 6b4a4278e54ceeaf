// CPU side of the gated delta rule, by chunks of positions. Matrix products are torch's, on one thread; the loops
// between them are in delta_rule_simd.cpp. A head of a sequence is one task, so that bits do not depend on the number
// of threads.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "grouped_gemm/per_expert.h"
#include "recurrence/chunks.h"
#include "recurrence/delta_rule.h"
#include "recurrence/delta_rule_tables.h"
#include "recurrence/lanes.h"

namespace moe_ext::recurrence {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using grouped_gemm::mm_out;

// A matrix in memory that the caller owns.
template <typename Acc>
struct Rows {
  Acc* data;
  int64_t rows, cols, stride;

  Tensor view() const {
    return made({rows, cols}, {stride, 1});
  }
  Tensor transposed() const {
    return made({cols, rows}, {1, stride});
  }

 private:
  Tensor made(const std::array<int64_t, 2>& sizes, const std::array<int64_t, 2>& strides) const {
    using Value = std::remove_const_t<Acc>;
    const ScalarType dtype = sizeof(Acc) == 8 ? ScalarType::Double : ScalarType::Float;
    static const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    return torch::stable::from_blob(const_cast<Value*>(data), sizes, strides, cpu, dtype);
  }
};

// out = kept out + by a b. `out` is not read if `kept` is 0.
void add_product(const Tensor& out, const Tensor& a, const Tensor& b, double kept = 1, double by = 1) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), kept, by));
}

// The arguments, and the chunks of each row of the batch.
template <typename Acc>
struct __attribute__((visibility("hidden"))) Sequences {
  Tensor q, k, v, g;
  OptionalTensor beta;
  std::vector<std::vector<Chunk>> chunks; // for each row of the batch, or one for all
  int64_t batch, groups, heads, length, dim, v_dim;

  explicit Sequences(const DeltaRuleArgs& args)
      : q(with_dense_rows(args.q)),
        k(with_dense_rows(args.k)),
        v(with_dense_rows(args.v)),
        g(as_contiguous(args.g)),
        beta(optional_contiguous(args.beta)),
        batch(v.size(0)),
        groups(q.size(1)),
        heads(v.size(1)),
        length(v.size(2)),
        dim(q.size(3)),
        v_dim(v.size(3)) {
    const OptionalTensor documents = optional_contiguous(args.documents);
    for (int64_t row = 0; row < (documents ? documents->size(0) : 1); ++row) {
      const int64_t* numbers = documents ? data<int64_t>(*documents) + row * length : nullptr;
      chunks.push_back(chunks_of(numbers, length, kChunk));
    }
  }

  const std::vector<Chunk>& chunks_at(int64_t b) const {
    return chunks[chunks.size() > 1 ? b : 0];
  }
  int64_t group_of(int64_t h) const {
    return h / (heads / groups);
  }
  Rows<const Acc> rows(const Tensor& t, int64_t b, int64_t h, const Chunk& chunk) const {
    const int64_t offset = b * t.stride(0) + h * t.stride(1) + chunk.begin * t.stride(2);
    return {data<const Acc>(t) + offset, chunk.size(), t.size(3), t.stride(2)};
  }
};

// Scratch memory of a head for a chunk.
template <typename Acc>
struct __attribute__((visibility("hidden"))) Scratch {
  explicit Scratch(int64_t dim, int64_t v_dim) : memory(kChunk * (3 * kChunk + 2 * dim + 3 * v_dim + 5)) {
    const auto take = [this](int64_t cols) { return memory.take(kChunk * cols); };
    pairs = take(kChunk);
    products = take(kChunk);
    scores = take(kChunk);
    keys = take(dim);
    of_keys = take(dim);
    values = take(v_dim);
    more_values = take(v_dim);
    grads_of_news = take(v_dim);
    decays = {pairs, take(1), take(1)};
    decay = take(1);
    dots = take(1);
    by = take(1);
  }

  Rows<Acc> square(Acc* matrix, const Chunk& chunk) const {
    return {matrix, chunk.size(), chunk.size(), kChunk};
  }

  Acc *pairs, *products, *scores;            // [kChunk][kChunk]
  Acc *keys, *of_keys;                       // [kChunk][dim]
  Acc *values, *more_values, *grads_of_news; // [kChunk][v_dim]
  Decays<Acc> decays;
  Acc *decay, *dots, *by; // [kChunk]

 private:
  Memory<Acc> memory;
};

// A chunk of a head: its rows, and operations on the state [K][V] before it.
template <typename Acc>
struct __attribute__((visibility("hidden"))) ChunkOf {
  const Sequences<Acc>& in;
  const Chunk& chunk;
  Scratch<Acc>& scratch;
  Rows<const Acc> q, k, v;
  const Acc *g, *beta;
  int64_t n;

  ChunkOf(const Sequences<Acc>& in, int64_t b, int64_t h, const Chunk& chunk, Scratch<Acc>& scratch)
      : in(in),
        chunk(chunk),
        scratch(scratch),
        q(in.rows(in.q, b, in.group_of(h), chunk)),
        k(in.rows(in.k, b, in.group_of(h), chunk)),
        v(in.rows(in.v, b, h, chunk)),
        g(data<const Acc>(in.g) + (b * in.heads + h) * in.length + chunk.begin),
        beta(in.beta ? data<const Acc>(*in.beta) + (b * in.heads + h) * in.length + chunk.begin : nullptr),
        n(chunk.size()) {
  }

  const ChunkKernels<Acc>& loops() const {
    return kernels().of<Acc>();
  }
  Rows<Acc> values(Acc* matrix) const {
    return {matrix, n, in.v_dim, in.v_dim};
  }
  Rows<Acc> keys(Acc* matrix) const {
    return {matrix, n, in.dim, in.dim};
  }
  Rows<Acc> state(Acc* matrix) const {
    return {matrix, in.dim, in.v_dim, in.v_dim};
  }
  Rows<Acc> square(Acc* matrix) const {
    return scratch.square(matrix, chunk);
  }

  void find_decays() const {
    loops().decays(scratch.decays, g, n);
  }
  Acc through() const {
    return scratch.decays.carried[n - 1];
  }

  // Sets scratch.products to q k^T, and scratch.scores to the same with decays.
  void find_scores() const {
    mm_out(square(scratch.products).view(), q.view(), k.transposed());
    loops().weigh(scratch.scores, scratch.products, scratch.pairs, n);
  }

  // Sets scratch.products to k k^T, and scratch.scores to the triangular system of the WY form.
  void find_system() const {
    mm_out(square(scratch.products).view(), k.view(), k.transposed());
    loops().system(scratch.scores, scratch.products, scratch.pairs, beta, n);
  }

  // Computes `news`, the rows N: each position adds the outer product of its key and its row to the state.
  void find_news(Acc* news, Acc* before) const {
    if (chunk.fresh) {
      std::fill_n(news, n * in.v_dim, Acc(0));
    } else {
      mm_out(values(news).view(), k.view(), state(before).view());
    }
    loops().right_side(news, news, v.data, v.stride, scratch.decays.carried, beta, n, in.v_dim);
    find_system();
    loops().solve(news, scratch.scores, n, in.v_dim);
  }

  // Replaces the state before the chunk by the state after it.
  void go_on(Acc* matrix, const Rows<const Acc>& news) const {
    loops().scale_rows(scratch.keys, k.data, k.stride, scratch.decays.to_end, n, in.dim);
    add_product(
        state(matrix).view(), keys(scratch.keys).transposed(), news.view(), chunk.fresh ? 0 : double(through()));
  }

  void find_out(Acc* out, Acc* before, const Rows<const Acc>& news) const {
    find_scores();
    const Tensor rows = values(out).view();
    if (!chunk.fresh) {
      loops().scale_rows(scratch.keys, q.data, q.stride, scratch.decays.carried, n, in.dim);
      mm_out(rows, keys(scratch.keys).view(), state(before).view());
    }
    add_product(rows, square(scratch.scores).view(), news.view(), chunk.fresh ? 0 : 1);
  }
};

std::tuple<Tensor, Tensor, Tensor> gated_delta_rule_cpu(
    Tensor q, Tensor k, Tensor v, Tensor g, OptionalTensor beta, Tensor state, OptionalTensor documents) {
  const DeltaRuleArgs args = {q, k, v, g, beta, state, documents};
  check_delta_rule("gated_delta_rule", args);
  const ScalarType dtype = v.scalar_type();
  Tensor out = new_on_cpu(sizes_of(v), dtype);
  Tensor last = new_on_cpu(sizes_of(state), dtype);
  Tensor news = new_on_cpu(beta ? sizes_of(v) : std::vector<int64_t>{0}, dtype);
  torch::stable::copy_(last, state);
  dispatch_floating(dtype, [&]<typename T>() {
    using Acc = acc_t<T>;
    const Sequences<Acc> in(args);
    for_each_task(in.batch * in.heads, [&](int64_t head) {
      const int64_t b = head / in.heads, h = head % in.heads;
      Acc* const matrix = data<Acc>(last) + head * in.dim * in.v_dim;
      Scratch<Acc> scratch(in.dim, in.v_dim);
      for (const Chunk& chunk : in.chunks_at(b)) {
        const ChunkOf<Acc> part(in, b, h, chunk, scratch);
        const int64_t first = (head * in.length + chunk.begin) * in.v_dim;
        part.find_decays();
        Rows<const Acc> added = part.v;
        if (beta) {
          Acc* const rows = data<Acc>(news) + first;
          part.find_news(rows, matrix);
          added = {rows, part.n, in.v_dim, in.v_dim};
        }
        part.find_out(data<Acc>(out) + first, matrix, added);
        part.go_on(matrix, added);
      }
    });
  });
  return {out, last, news};
}

// Destinations of the gradients of a chunk.
template <typename Acc>
struct Grads {
  Acc *q, *k;        // [n][K], sums over heads
  bool first;        // true for the first head of the sums, which overwrites
  Acc *v, *g, *beta; // [n][V], [n], [n]
  Acc* state;        // [K][V]: gradient of the state after the chunk, then of the state before it
  const Acc* before; // [K][V], the state before the chunk
};

template <typename Acc>
void differentiate(
    const ChunkOf<Acc>& part, const Rows<const Acc>& news, const Rows<const Acc>& grad_out, const Grads<Acc>& to) {
  const ChunkKernels<Acc>& loops = part.loops();
  Scratch<Acc>& scratch = part.scratch;
  const Decays<Acc>& decays = scratch.decays;
  const int64_t n = part.n, dim = part.in.dim, v_dim = part.in.v_dim;
  const bool finds_state = !part.chunk.fresh;
  const Tensor q = part.q.view(), k = part.k.view(), out = grad_out.view();
  const Tensor grad_q = part.keys(to.q).view(), grad_k = part.keys(to.k).view(),
               grad_state = part.state(to.state).view();
  const Rows<const Acc> before = {to.before, dim, v_dim, v_dim};
  // Without beta, the rows that are added to the state are the values themselves.
  Acc* const grad_news = part.beta != nullptr ? scratch.grads_of_news : to.v;
  const Tensor of_news = part.values(grad_news).view();
  const Tensor squares = part.square(scratch.scores).view(), of_keys = part.keys(scratch.of_keys).view();
  part.find_decays();
  std::fill_n(scratch.decay, kChunk, Acc(0));

  part.find_scores();
  mm_out(of_news, part.square(scratch.scores).transposed(), out);
  loops.scale_rows(scratch.keys, part.k.data, part.k.stride, decays.to_end, n, dim);
  add_product(of_news, part.keys(scratch.keys).view(), grad_state);
  mm_out(squares, out, news.transposed());
  loops.of_scores(scratch.scores, scratch.products, scratch.pairs, scratch.decay, n);
  add_product(grad_q, squares, k, to.first ? 0 : 1);
  add_product(grad_k, part.square(scratch.scores).transposed(), q, to.first ? 0 : 1);

  // Gradients through the state after the chunk.
  mm_out(of_keys, news.view(), part.state(to.state).transposed());
  loops.add_scaled_rows(to.k, scratch.of_keys, decays.to_end, n, dim);
  loops.row_dots(scratch.dots, scratch.of_keys, dim, part.k.data, part.k.stride, n, dim);
  for (int64_t i = 0; i < n; ++i) {
    scratch.decay[i] -= decays.to_end[i] * scratch.dots[i];
    scratch.decay[n - 1] += decays.to_end[i] * scratch.dots[i];
  }
  if (finds_state) {
    Acc kept;
    loops.row_dots(&kept, to.before, 0, to.state, 0, 1, dim * v_dim);
    scratch.decay[n - 1] += part.through() * kept;
    // Gradients through the outputs, which read the state before the chunk.
    mm_out(of_keys, out, before.transposed());
    loops.add_scaled_rows(to.q, scratch.of_keys, decays.carried, n, dim);
    loops.row_dots(scratch.dots, scratch.of_keys, dim, part.q.data, part.q.stride, n, dim);
    for (int64_t i = 0; i < n; ++i) {
      scratch.decay[i] += decays.carried[i] * scratch.dots[i];
    }
    loops.scale_rows(scratch.keys, part.q.data, part.q.stride, decays.carried, n, dim);
    add_product(grad_state, part.keys(scratch.keys).transposed(), out, part.through());
  } else {
    std::fill_n(to.state, dim * v_dim, Acc(0));
  }

  if (part.beta != nullptr) {
    part.find_system();
    loops.solve_transposed(grad_news, scratch.scores, n, v_dim);
    loops.row_dots(to.beta, grad_news, v_dim, part.v.data, part.v.stride, n, v_dim);
    mm_out(squares, of_news, news.transposed());
    loops.of_system(scratch.scores, scratch.products, scratch.pairs, part.beta, scratch.decay, to.beta, n);
    add_product(grad_k, squares, k);
    loops.scale_rows(to.v, grad_news, v_dim, part.beta, n, v_dim);
    if (finds_state) {
      // Gradients through the term that the delta rule subtracts, which reads the state before the chunk.
      loops.scale_rows(scratch.values, grad_news, v_dim, decays.carried, n, v_dim);
      mm_out(of_keys, part.values(scratch.values).view(), before.transposed());
      loops.row_dots(scratch.dots, scratch.of_keys, dim, part.k.data, part.k.stride, n, dim);
      for (int64_t i = 0; i < n; ++i) {
        to.beta[i] -= scratch.dots[i];
        scratch.by[i] = -part.beta[i];
        scratch.decay[i] += scratch.by[i] * scratch.dots[i];
      }
      loops.add_scaled_rows(to.k, scratch.of_keys, scratch.by, n, dim);
      loops.scale_rows(scratch.more_values, scratch.values, v_dim, part.beta, n, v_dim);
      add_product(grad_state, part.k.transposed(), part.values(scratch.more_values).view(), 1, -1);
    }
  }
  Acc sum = 0;
  for (int64_t i = n - 1; i >= 0; --i) {
    sum += scratch.decay[i];
    to.g[i] = sum;
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward_cpu(
    Tensor grad_out, Tensor grad_last, Tensor q, Tensor k, Tensor v, Tensor g, OptionalTensor beta, Tensor state,
    OptionalTensor documents, Tensor news) {
  const DeltaRuleArgs args = {q, k, v, g, beta, state, documents};
  check_delta_rule_backward("_gated_delta_rule_backward", args, grad_out, grad_last, news);
  const ScalarType dtype = v.scalar_type();
  const Tensor of_out = with_dense_rows(grad_out), found = as_contiguous(state), added = as_contiguous(news);
  const int64_t batch = v.size(0), groups = q.size(1), per_group = v.size(1) / std::max<int64_t>(1, groups);
  // Heads that share q and k sum their gradients in several parts if there are too few groups to occupy all threads.
  const int64_t pairs = std::max<int64_t>(1, batch * groups);
  const int64_t parts = std::clamp<int64_t>((kTasksWanted + pairs - 1) / pairs, 1, std::max<int64_t>(1, per_group));
  Tensor grad_q = new_on_cpu({parts, batch, groups, q.size(2), q.size(3)}, dtype);
  Tensor grad_k = new_on_cpu(sizes_of(grad_q), dtype);
  Tensor grad_v = new_on_cpu(sizes_of(v), dtype), grad_g = new_on_cpu(sizes_of(g), dtype);
  Tensor grad_beta = new_on_cpu(beta ? sizes_of(g) : std::vector<int64_t>{0}, dtype);
  Tensor grad_state = new_on_cpu(sizes_of(state), dtype);
  torch::stable::copy_(grad_state, grad_last);
  dispatch_floating(dtype, [&]<typename T>() {
    using Acc = acc_t<T>;
    const Sequences<Acc> in(args);
    const int64_t matrix = in.dim * in.v_dim;
    for_each_task(parts * batch * groups, [&](int64_t task) {
      const int64_t place = task % (batch * groups), part = task / (batch * groups);
      const int64_t b = place / groups, group = place % groups;
      const std::vector<Chunk>& chunks = in.chunks_at(b);
      const int64_t first_head = group * per_group + per_group * part / parts;
      const int64_t end_head = group * per_group + per_group * (part + 1) / parts;
      Scratch<Acc> scratch(in.dim, in.v_dim);
      const std::unique_ptr<Acc[]> states(new Acc[(chunks.size() + 1) * matrix]);
      for (int64_t h = first_head; h < end_head; ++h) {
        const int64_t head = b * in.heads + h;
        const auto news_of = [&](const Chunk& chunk) -> Rows<const Acc> {
          const int64_t offset = (head * in.length + chunk.begin) * in.v_dim;
          return beta ? Rows<const Acc>{data<const Acc>(added) + offset, chunk.size(), in.v_dim, in.v_dim}
                      : in.rows(in.v, b, h, chunk);
        };
        std::copy_n(data<Acc>(found) + head * matrix, matrix, states.get());
        for (size_t i = 0; i + 1 < chunks.size(); ++i) {
          const ChunkOf<Acc> now(in, b, h, chunks[i], scratch);
          Acc* const next = states.get() + (i + 1) * matrix;
          std::copy_n(next - matrix, matrix, next);
          now.find_decays();
          now.go_on(next, news_of(chunks[i]));
        }
        for (size_t i = chunks.size(); i-- > 0;) {
          const Chunk& chunk = chunks[i];
          const int64_t row = head * in.length + chunk.begin, shared = task * in.length + chunk.begin;
          const Grads<Acc> to = {
              data<Acc>(grad_q) + shared * in.dim,
              data<Acc>(grad_k) + shared * in.dim,
              h == first_head,
              data<Acc>(grad_v) + row * in.v_dim,
              data<Acc>(grad_g) + row,
              beta ? data<Acc>(grad_beta) + row : nullptr,
              data<Acc>(grad_state) + head * matrix,
              states.get() + i * matrix};
          differentiate(ChunkOf<Acc>(in, b, h, chunk, scratch), news_of(chunk), in.rows(of_out, b, h, chunk), to);
        }
      }
    });
  });
  return {sum_over_first(grad_q), sum_over_first(grad_k), grad_v, grad_g, grad_beta, grad_state};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule_cpu));
  m.impl("_gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward_cpu));
}

} // namespace moe_ext::recurrence
