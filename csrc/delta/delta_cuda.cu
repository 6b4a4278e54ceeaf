// CUDA side of deltas of tensors: allocates and launches. It waits for values that the host must know: the size of a
// payload, the soundness of a payload before the first write, and hashes.
#include <cstring>
#include <tuple>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/read_back.h"
#include "common/torch_cuda.cuh"
#include "delta/delta.h"
#include "delta/delta_kernels.cuh"

namespace moe_ext::delta {
namespace {

using torch::stable::new_empty;
using torch::stable::new_zeros;

// NOTE: device-to-host sync. Return one element of an int64 tensor.
int64_t read_one(const Tensor& longs, int64_t at) {
  return *data<const int64_t>(read_back(torch::stable::narrow(const_cast<Tensor&>(longs), 0, at, 1)));
}

// A payload under construction, of numel > 0 elements.
class Encoder {
 public:
  Encoder(const Tensor& like, int64_t numel, cudaStream_t stream)
      : numel_(numel),
        stream_(stream),
        changed_(new_zeros(like, {num_segments(numel) * kThreads}, ScalarType::Int)),
        segments_(new_empty(like, {num_segments(numel) * kInts<Segment>}, ScalarType::Int)),
        headers_(new_empty(like, {num_chunks(numel) * kInts<Header>}, ScalarType::Int)),
        starts_(new_empty(like, {num_chunks(numel) + 1}, ScalarType::Long)) {
  }
  uint32_t* changed() const {
    return data<uint32_t>(changed_);
  }
  // Makes the payload, after the map of changes has been written.
  template <typename Bits, typename Values>
  Tensor payload(const Values& values) const {
    const Draft draft{changed(), data<Segment>(segments_), data<Header>(headers_), data<int64_t>(starts_)};
    launch_plan(draft, numel_, sizeof(Bits), stream_);
    Tensor payload = new_empty(changed_, {read_one(starts_, num_chunks(numel_))}, ScalarType::Byte);
    launch_write<Bits>(draft, numel_, values, data<uint8_t>(payload), stream_);
    return payload;
  }

 private:
  template <typename T>
  static constexpr int64_t kInts = sizeof(T) / sizeof(int32_t);

  int64_t numel_;
  cudaStream_t stream_;
  Tensor changed_, segments_, headers_, starts_;
};

Tensor encode_cuda(Tensor x, Tensor base, bool xored) {
  check_encode(x, base);
  const DeviceScope device(x);
  const int64_t numel = x.numel();
  if (numel == 0) {
    return new_empty(x, {0}, ScalarType::Byte);
  }
  const Encoder encoder(x, numel, device.stream());
  return dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    const Bits *bits = data<const Bits>(x), *old = data<const Bits>(base);
    launch_compare(bits, old, numel, encoder.changed(), device.stream());
    return encoder.payload<Bits>(NewValues<Bits>{bits, xored ? old : nullptr});
  });
}

Tensor pack_cuda(Tensor places, Tensor values, int64_t numel) {
  check_pack(places, values, numel);
  const DeviceScope device(places);
  const int64_t count = places.numel();
  if (numel == 0 && count == 0) {
    return new_empty(values, {0}, ScalarType::Byte);
  }
  const Encoder encoder(places, std::max<int64_t>(numel, 1), device.stream());
  const int64_t* place = data<const int64_t>(places);
  if (count > 0) {
    const Tensor wrong = torch::stable::fill_(new_empty(places, {1}), static_cast<double>(count));
    launch(
        over_threads(count, device.stream()), mark_places_kernel, place, count, numel, encoder.changed(),
        data<unsigned long long>(wrong));
    const int64_t first = read_one(wrong, 0);
    MOE_CHECK(
        first == count, "delta_pack: expected places to ascend in [0, ", numel, "), got ", read_one(places, first),
        " at ", first);
  }
  return dispatch_size(static_cast<int64_t>(values.element_size()), [&]<typename Bits>() {
    return encoder.payload<Bits>(GivenValues<Bits>{data<const Bits>(values), place, count});
  });
}

// The chunks of a sound payload, on the device.
struct Chunks {
  Tensor table, starts;
  const Chunk* chunks() const {
    return data<const Chunk>(table);
  }
};

// NOTE: device-to-host sync. The payload must be known to be sound before the first write.
Chunks chunks_of(const char* op, const Tensor& payload, int64_t numel, int64_t item_bytes, cudaStream_t stream) {
  static_assert(sizeof(Verdict) == 2 * sizeof(int64_t) && sizeof(Chunk) % sizeof(int64_t) == 0);
  const Tensor verdict = new_zeros(payload, {3}, ScalarType::Long);
  const Chunks found{
      new_empty(payload, {num_chunks(numel) * int64_t{sizeof(Chunk) / sizeof(int64_t)}}, ScalarType::Long),
      new_empty(payload, {num_chunks(numel) + 1}, ScalarType::Long)};
  launch_read(
      data<const uint8_t>(payload), payload.numel(), numel, item_bytes,
      {data<Verdict>(verdict), data<unsigned long long>(verdict) + 2, data<Chunk>(found.table),
       data<int64_t>(found.starts)},
      stream);
  const Tensor told = read_back(verdict);
  const int64_t* words = data<const int64_t>(told);
  const Verdict of_headers{static_cast<Fault>(words[0]), words[1]};
  check_verdict(
      op, of_headers.fault == kSound && words[2] != 0 ? Verdict{kPlaces, words[2] - 1} : of_headers, payload.numel(),
      numel);
  return found;
}

void apply_cuda(Tensor target, Tensor payload, bool xored) {
  const char* op = "delta_apply_";
  check_apply(op, target, payload);
  const DeviceScope device(target);
  const int64_t numel = target.numel(), item_bytes = static_cast<int64_t>(target.element_size());
  const Chunks found = chunks_of(op, payload, numel, item_bytes, device.stream());
  dispatch_size(item_bytes, [&]<typename Bits>() {
    launch(
        over_blocks(num_chunks(numel), device.stream()), apply_kernel<Bits>, data<Bits>(target), numel, found.chunks(),
        xored);
  });
}

// NOTE: device-to-host sync. Return the sum of the blocks' sums, modulo 2^64, in any order.
int64_t sum_of(const Tensor& sums) {
  const Tensor told = read_back(sums);
  uint64_t sum = 0;
  for (int64_t i = 0; i < told.numel(); ++i) {
    sum += data<const uint64_t>(told)[i];
  }
  return static_cast<int64_t>(sum);
}

int64_t hash_change_cuda(Tensor target, Tensor payload, int64_t seed, bool xored) {
  const char* op = "delta_hash_change";
  check_apply(op, target, payload);
  const DeviceScope device(target);
  const int64_t numel = target.numel(), item_bytes = static_cast<int64_t>(target.element_size());
  const Chunks found = chunks_of(op, payload, numel, item_bytes, device.stream());
  const Launch grid = over_blocks(num_chunks(numel), device.stream());
  const Tensor sums = new_empty(target, {grid.grid.x}, ScalarType::Long);
  dispatch_size(item_bytes, [&]<typename Bits>() {
    launch(
        grid, hash_change_kernel<Bits>, data<const Bits>(target), numel, found.chunks(), static_cast<uint64_t>(seed),
        xored, data<uint64_t>(sums));
  });
  return sum_of(sums);
}

int64_t hash_cuda(Tensor x, int64_t seed, std::optional<Tensor> places) {
  check_hash(x, places);
  const DeviceScope device(x);
  const Launch grid = over_threads(x.numel(), device.stream());
  const Tensor sums = new_empty(x, {grid.grid.x}, ScalarType::Long);
  dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    launch(
        grid, hash_kernel<Bits>, data<const Bits>(x), data_or_null<int64_t>(places), x.numel(),
        static_cast<uint64_t>(seed), data<uint64_t>(sums));
  });
  return sum_of(sums);
}

std::tuple<Tensor, Tensor> unpack_cuda(Tensor payload, Tensor like, int64_t numel) {
  check_unpack(payload, like, numel);
  const DeviceScope device(payload);
  const auto item_bytes = static_cast<int64_t>(like.element_size());
  const Chunks found = chunks_of("delta_unpack", payload, numel, item_bytes, device.stream());
  const int64_t count = read_one(found.starts, num_chunks(numel));
  Tensor places = new_empty(like, {count}, ScalarType::Long), values = new_empty(like, {count});
  dispatch_size(item_bytes, [&]<typename Bits>() {
    launch(
        over_blocks(num_chunks(numel), device.stream()), unpack_kernel<Bits>, numel, found.chunks(),
        data<const int64_t>(found.starts), data<int64_t>(places), data<Bits>(values));
  });
  return {places, values};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("delta_encode", TORCH_BOX(&encode_cuda));
  m.impl("delta_apply_", TORCH_BOX(&apply_cuda));
  m.impl("delta_hash_change", TORCH_BOX(&hash_change_cuda));
  m.impl("delta_hash", TORCH_BOX(&hash_cuda));
  m.impl("delta_pack", TORCH_BOX(&pack_cuda));
  m.impl("delta_unpack", TORCH_BOX(&unpack_cuda));
}

} // namespace moe_ext::delta
