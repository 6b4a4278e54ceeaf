// CPU side of deltas of tensors. Chunks are independent: one thread scans a chunk, or applies it. A scan compares 64
// bytes at a time, and single elements only where these differ.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <tuple>
#include <vector>

#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "delta/delta.h"

namespace moe_ext::delta {

namespace {

using torch::stable::new_empty;
using torch::stable::parallel_for;

// A chunk under construction.
struct Writer {
  std::vector<uint32_t> places;
  std::vector<uint8_t> values;

  template <typename Bits>
  void add(int64_t place, Bits value) {
    places.push_back(static_cast<uint32_t>(place));
    const size_t end = values.size();
    values.resize(end + sizeof(Bits));
    std::memcpy(values.data() + end, &value, sizeof(Bits));
  }

  template <typename Entry>
  int64_t num_gaps() const {
    constexpr uint32_t kSkip = static_cast<Entry>(-1);
    int64_t found = 0;
    uint32_t next = 0;
    for (const uint32_t place : places) {
      found += (place - next) / kSkip + 1;
      next = place + 1;
    }
    return found;
  }

  template <typename Entry>
  void append_gaps(std::vector<uint8_t>& out) const {
    constexpr uint32_t kSkip = static_cast<Entry>(-1);
    uint32_t next = 0;
    const auto append = [&](uint32_t gap) {
      const auto entry = static_cast<Entry>(gap);
      const size_t end = out.size();
      out.resize(end + sizeof(Entry));
      std::memcpy(out.data() + end, &entry, sizeof(Entry));
    };
    for (const uint32_t place : places) {
      uint32_t gap = place - next;
      for (; gap >= kSkip; gap -= kSkip) {
        append(kSkip);
      }
      append(gap);
      next = place + 1;
    }
  }

  void append_to(std::vector<uint8_t>& out) const {
    const int64_t narrow = num_gaps<uint8_t>(), wide = num_gaps<uint16_t>();
    Header header{static_cast<uint32_t>(places.size()), 0, 2 * wide < narrow, {0, 0, 0}};
    header.num_gaps = static_cast<uint32_t>(header.wide ? wide : narrow);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&header);
    out.insert(out.end(), bytes, bytes + kHeader);
    header.wide ? append_gaps<uint16_t>(out) : append_gaps<uint8_t>(out);
    out.insert(out.end(), values.begin(), values.end());
  }
};

template <typename Bits>
void scan(Writer& writer, const Bits* x, const Bits* base, int64_t n, bool xored) {
  constexpr int64_t kLine = 64 / sizeof(Bits);
  const auto look_at = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (x[i] != base[i]) {
        writer.add<Bits>(i, xored ? x[i] ^ base[i] : x[i]);
      }
    }
  };
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    Bits differ = 0;
    for (int64_t j = 0; j < kLine; ++j) {
      differ |= x[i + j] ^ base[i + j];
    }
    if (differ != 0) {
      look_at(i, i + kLine);
    }
  }
  look_at(i, n);
}

// Make a payload of the chunks that `fill(writer, chunk)` writes.
template <typename F>
Tensor payload_of(const Tensor& like, int64_t numel, F&& fill) {
  const int64_t chunks = num_chunks(numel);
  std::vector<std::vector<uint8_t>> parts(chunks);
  parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    Writer writer;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      writer.places.clear();
      writer.values.clear();
      fill(writer, chunk);
      writer.append_to(parts[chunk]);
    }
  });
  std::vector<int64_t> starts(chunks + 1, 0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    starts[chunk + 1] = starts[chunk] + static_cast<int64_t>(parts[chunk].size());
  }
  Tensor payload = new_empty(like, {starts[chunks]}, ScalarType::Byte);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::memcpy(data<uint8_t>(payload) + starts[chunk], parts[chunk].data(), parts[chunk].size());
  }
  return payload;
}

// Return the chunks of a payload for a tensor of numel elements, after checking lengths, order and places.
std::vector<Chunk> chunks_of(const char* op, const Tensor& payload, int64_t numel, int64_t item_bytes) {
  std::vector<Chunk> found(num_chunks(numel));
  const auto refuse = [&](const Verdict& verdict) { check_verdict(op, verdict, payload.numel(), numel); };
  refuse(for_each_chunk(
      data<const uint8_t>(payload), payload.numel(), numel, item_bytes,
      [&](int64_t i, const Chunk& chunk) { found[i] = chunk; }));
  std::atomic<int64_t> wrong{-1};
  parallel_for(0, static_cast<int64_t>(found.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t count = 0, last = -1;
      found[i].for_each(0, [&](int64_t place, const uint8_t*) { ++count, last = place; });
      if (count != found[i].count || last >= std::min(kChunk, numel - i * kChunk)) {
        wrong = i;
      }
    }
  });
  refuse(wrong < 0 ? Verdict{} : Verdict{kPlaces, wrong.load()});
  return found;
}

Tensor encode_cpu(Tensor x, Tensor base, bool xored) {
  check_encode(x, base);
  const int64_t numel = x.numel();
  return dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    return payload_of(x, numel, [&](Writer& writer, int64_t chunk) {
      const int64_t start = chunk * kChunk;
      scan<Bits>(
          writer, data<const Bits>(x) + start, data<const Bits>(base) + start, std::min(kChunk, numel - start), xored);
    });
  });
}

void apply_cpu(Tensor target, Tensor payload, bool xored) {
  const char* op = "delta_apply_";
  check_apply(op, target, payload);
  const auto item_bytes = static_cast<int64_t>(target.element_size());
  const std::vector<Chunk> chunks = chunks_of(op, payload, target.numel(), item_bytes);
  dispatch_size(item_bytes, [&]<typename Bits>() {
    parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Bits* out = data<Bits>(target) + i * kChunk;
        chunks[i].for_each(item_bytes, [&](int64_t place, const uint8_t* value) {
          Bits bits;
          std::memcpy(&bits, value, sizeof(Bits));
          out[place] = xored ? out[place] ^ bits : bits;
        });
      }
    });
  });
}

int64_t hash_change_cpu(Tensor target, Tensor payload, int64_t seed, bool xored) {
  const char* op = "delta_hash_change";
  check_apply(op, target, payload);
  const auto item_bytes = static_cast<int64_t>(target.element_size());
  const std::vector<Chunk> chunks = chunks_of(op, payload, target.numel(), item_bytes);
  std::atomic<uint64_t> sum{0};
  dispatch_size(item_bytes, [&]<typename Bits>() {
    parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
      uint64_t own = 0;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t start = i * kChunk;
        const Bits* old = data<const Bits>(target) + start;
        chunks[i].for_each(item_bytes, [&](int64_t place, const uint8_t* value) {
          Bits bits;
          std::memcpy(&bits, value, sizeof(Bits));
          const Bits now = xored ? old[place] ^ bits : bits;
          own += hash_of(seed, start + place, now) - hash_of(seed, start + place, old[place]);
        });
      }
      sum += own;
    });
  });
  return static_cast<int64_t>(sum.load());
}

int64_t hash_cpu(Tensor x, int64_t seed, std::optional<Tensor> places) {
  check_hash(x, places);
  const int64_t* place = places ? data<const int64_t>(*places) : nullptr;
  std::atomic<uint64_t> sum{0};
  dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    const Bits* bits = data<const Bits>(x);
    parallel_for(0, x.numel(), kChunk, [&](int64_t begin, int64_t end) {
      uint64_t own = 0;
      for (int64_t i = begin; i < end; ++i) {
        own += hash_of(seed, place == nullptr ? i : place[i], bits[i]);
      }
      sum += own;
    });
  });
  return static_cast<int64_t>(sum.load());
}

Tensor pack_cpu(Tensor places, Tensor values, int64_t numel) {
  check_pack(places, values, numel);
  const int64_t count = places.numel();
  const int64_t* place = data<const int64_t>(places);
  for (int64_t i = 0; i < count; ++i) {
    MOE_CHECK(
        place[i] < numel && place[i] >= (i == 0 ? 0 : place[i - 1] + 1),
        "delta_pack: expected places to ascend in [0, ", numel, "), got ", place[i], " at ", i);
  }
  return dispatch_size(static_cast<int64_t>(values.element_size()), [&]<typename Bits>() {
    return payload_of(values, numel, [&](Writer& writer, int64_t chunk) {
      const int64_t start = chunk * kChunk;
      for (int64_t i = std::lower_bound(place, place + count, start) - place; i < count && place[i] < start + kChunk;
           ++i) {
        writer.add<Bits>(place[i] - start, data<const Bits>(values)[i]);
      }
    });
  });
}

std::tuple<Tensor, Tensor> unpack_cpu(Tensor payload, Tensor like, int64_t numel) {
  check_unpack(payload, like, numel);
  const auto item_bytes = static_cast<int64_t>(like.element_size());
  const std::vector<Chunk> chunks = chunks_of("delta_unpack", payload, numel, item_bytes);
  int64_t count = 0;
  for (const Chunk& chunk : chunks) {
    count += chunk.count;
  }
  Tensor places = new_empty(like, {count}, ScalarType::Long), values = new_empty(like, {count});
  int64_t* place_out = data<int64_t>(places);
  auto* value_out = static_cast<uint8_t*>(values.data_ptr());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t start = static_cast<int64_t>(i) * kChunk;
    chunks[i].for_each(item_bytes, [&](int64_t place, const uint8_t*) { *place_out++ = start + place; });
    std::memcpy(value_out, chunks[i].values, chunks[i].count * item_bytes);
    value_out += chunks[i].count * item_bytes;
  }
  return {places, values};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("delta_encode", TORCH_BOX(&encode_cpu));
  m.impl("delta_apply_", TORCH_BOX(&apply_cpu));
  m.impl("delta_hash_change", TORCH_BOX(&hash_change_cpu));
  m.impl("delta_hash", TORCH_BOX(&hash_cpu));
  m.impl("delta_pack", TORCH_BOX(&pack_cpu));
  m.impl("delta_unpack", TORCH_BOX(&unpack_cpu));
}

} // namespace moe_ext::delta
