// Sums over ranks of (value, index) pairs.
#include <algorithm>

#include "runtime/collectives.h"
#include "runtime/operators.h"

namespace moe_ext::runtime {
namespace {

using at::Tensor;

// Bytes behind the pairs of a payload, for the number of pairs that were found.
constexpr int64_t kLoadBytes = 16;

std::tuple<Tensor, Tensor> topk_compress_(
    const Tensor& x, const Tensor& residual, int64_t k, const Tensor& residual_in) {
  static const auto op = find_operator<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, int64_t, int64_t, const MaybeTensor&, double, double, bool, const MaybeTensor&,
      const MaybeTensor&)>("moe_ext::topk_compress_");
  return op.call(x, residual, k, 0, std::nullopt, 0.0, 1.0, false, residual_in, std::nullopt);
}

struct Slots {
  Tensor values, indices; // [P * S]
  Tensor loads;           // [P], number of pairs found for each region
  Tensor left;            // [K], values that got no slot; zero elsewhere
};

// Assign slots. A region with L pairs, more than its S slots, sends the S pairs j for which (j - step) S mod L < S:
// evenly spread, and others in the next step. Cutting at the end would omit the same elements in every step.
Slots fill_slots(const Tensor& values_K, const Tensor& indices_K, const Tensor& bounds, int64_t slots, int64_t step) {
  const int64_t size = bounds.size(0) - 1;
  const Tensor zero = at::zeros({1}, indices_K.options());
  const Tensor starts = at::searchsorted(indices_K, bounds);
  const Tensor region = at::searchsorted(bounds.narrow(0, 1, size - 1), indices_K, false, true);
  // Return the number of set elements of a mask up to and including each pair, and before each region.
  const auto counted = [&](const Tensor& mask) {
    const Tensor upto = mask.cumsum(0);
    return std::pair(upto, at::cat({zero, upto}).index_select(0, starts));
  };
  const Tensor wanted = values_K.ne(0);
  const auto [upto, before] = counted(wanted);
  const Tensor first = before.narrow(0, 0, size);
  const Tensor loads = before.narrow(0, 1, size) - first;
  const Tensor load = loads.index_select(0, region).clamp(1);
  const Tensor turned = ((upto - first.index_select(0, region) - (1 + step)) * slots).remainder(load);
  const Tensor kept = wanted.bitwise_and(turned.lt(slots));
  const auto [kept_upto, kept_before] = counted(kept);
  const Tensor kept_first = kept_before.narrow(0, 0, size).index_select(0, region);
  // Places count from 1, because all pairs without a slot go to place 0.
  const Tensor place = (kept_upto - kept_first + region * slots) * kept;
  const Tensor unused = (bounds.narrow(0, 1, size) - 1).repeat_interleave(slots, 0);
  Tensor slot_indices = at::cat({zero, unused}).index_copy_(0, place, indices_K);
  Tensor slot_values = at::zeros({size * slots + 1}, values_K.options()).index_copy_(0, place, values_K);
  return {
      slot_values.narrow(0, 1, size * slots), slot_indices.narrow(0, 1, size * slots), loads,
      values_K.masked_fill(kept, 0)};
}

// Write the number of pairs, int64, behind the pairs of a payload.
void put_load(const Tensor& row, int64_t start, const Tensor& load) {
  row.narrow(0, start, 8).copy_(load.view({1}).view(at::kByte));
  row.narrow(0, start + 8, kLoadBytes - 8).zero_();
}

Tensor load_at(const Tensor& row, int64_t start) {
  return row.narrow(0, start, 8).view(at::kLong);
}

} // namespace

Tensors sparse_all_gather_sum(
    Messages& messages, const Tensor& out, const Tensor& values_K, const Tensor& indices_K, const MaybeTensor& residual,
    const std::string& value_codec, int64_t divisor) {
  const PairCoding coding{values_K.size(0), out.numel(), value_codec};
  const int64_t num_bytes = coding.payload_bytes();
  Message gathered = messages.ask(num_bytes, out);
  const Tensor row = messages.scratch(num_bytes, out);
  coding.encode(row, values_K, indices_K);
  messages.all_gather(gathered, row);
  out.zero_();
  const Tensor& found = gathered.wait();
  for (int64_t rank = 0; rank < messages.size(); ++rank) {
    coding.decode_add_(out, found.narrow(0, rank * num_bytes, num_bytes), 0, static_cast<double>(divisor));
  }
  if (residual) {
    coding.add_lost_(*residual, row, values_K);
  }
  return {out};
}

Tensors sparse_split_sum(
    Messages& messages, const Tensor& out, const Tensor& values_K, const Tensor& indices_K, const Tensor& residual,
    const Tensor& bounds, const std::string& value_codec, int64_t slots, int64_t kept, int64_t step, int64_t divisor) {
  const int64_t size = messages.size(), rank = messages.rank(), numel = out.numel();
  const PairCoding sent{slots, numel, value_codec}, summed{kept, numel, value_codec};
  const int64_t sent_bytes = sent.payload_bytes() + kLoadBytes, summed_bytes = summed.payload_bytes() + kLoadBytes;
  Message arriving = messages.ask(sent_bytes, out), gathered = messages.ask(summed_bytes, out);

  const Slots given = fill_slots(values_K, indices_K, bounds, slots, step);
  const Tensor row = messages.scratch(size * sent_bytes, out);
  for (int64_t part = 0; part < size; ++part) {
    const Tensor payload = row.narrow(0, part * sent_bytes, sent_bytes);
    sent.encode(payload, given.values.narrow(0, part * slots, slots), given.indices.narrow(0, part * slots, slots));
    put_load(payload, sent.payload_bytes(), given.loads.narrow(0, part, 1));
  }
  messages.all_to_all(arriving, row);
  out.zero_();

  const auto bound = [&](int64_t part) { return bounds[part].item<int64_t>(); };
  const int64_t start = bound(rank), length = bound(rank + 1) - start;
  const Tensor total = messages.scratch(4 * length, out).view(at::kFloat).zero_();
  Tensor load = at::zeros({1}, indices_K.options());
  const Tensor& found = arriving.wait();
  for (int64_t source = 0; source < size; ++source) {
    const Tensor payload = found.narrow(0, source * sent_bytes, sent_bytes);
    sent.decode_add_(total, payload, start);
    load.add_(load_at(payload, sent.payload_bytes()));
  }
  const Tensor rest = messages.scratch(4 * length, out).view(at::kFloat);
  // The sum has no residual of its own. `out` is still zero, and serves as the residual to read.
  auto [values, indices] = topk_compress_(total, rest, std::min(kept, length), out.narrow(0, start, length));
  indices = indices + start;
  if (length < kept) {
    values = at::constant_pad_nd(values, {0, kept - length}, 0);
    indices = at::constant_pad_nd(indices, {0, kept - length}, start + length - 1);
  }
  const Tensor own_row = messages.scratch(summed_bytes, out);
  summed.encode(own_row, values, indices);
  put_load(own_row, summed.payload_bytes(), load);
  messages.all_gather(gathered, own_row);

  Tensors all_indices, all_loads;
  const Tensor& all = gathered.wait();
  for (int64_t owner = 0; owner < size; ++owner) {
    const Tensor payload = all.narrow(0, owner * summed_bytes, summed_bytes);
    summed.decode_add_(out, payload, 0, static_cast<double>(divisor));
    all_indices.push_back(summed.indices(payload));
    all_loads.push_back(load_at(payload, summed.payload_bytes()));
  }
  // All messages have arrived. An error before this line leaves the residual unchanged.
  residual.narrow(0, start, length).add_(rest);
  residual.index_add_(0, indices_K, given.left);
  for (int64_t part = 0; part < size; ++part) {
    const Tensor payload = row.narrow(0, part * sent_bytes, sent_bytes);
    sent.add_lost_(residual, payload, given.values.narrow(0, part * slots, slots));
  }
  summed.add_lost_(residual, own_row, values);
  return {at::cat(all_loads), at::stack(all_indices)};
}

Tensors sparse_dense_sum(
    Messages& messages, const Tensor& out, const Tensor& values_K, const Tensor& indices_K, int64_t divisor) {
  out.zero_();
  out.index_add_(0, indices_K, values_K);
  messages.all_reduce(out);
  if (divisor != 1) {
    out.div_(divisor);
  }
  return {out};
}

} // namespace moe_ext::runtime
