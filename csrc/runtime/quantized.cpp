// Reductions of quantised tensors. A shard is cut into pieces, so that some travel while others are encoded.
#include <algorithm>
#include <utility>

#include "runtime/collectives.h"

namespace moe_ext::runtime {
namespace {

using at::Tensor;

// Elements to decode at a time, a multiple of all block sizes: few enough that the sum stays in the cache while the
// payloads of all ranks are added.
constexpr int64_t kChunk = 262144;
// XORed to the seed, so that the second rounding of a step draws from another stream than the first.
constexpr int64_t kSecondSeed = 0x5851f42d4c957f2d;

// The stream of random numbers of a shard. Numbers count from 0 in every shard, so that each shard needs its own
// stream.
MaybeTensor stream_of(const MaybeTensor& rng_state, int64_t shard) {
  if (!rng_state) {
    return std::nullopt;
  }
  Tensor moved = rng_state->clone();
  moved.narrow(0, 0, 1).add_(shard);
  return moved;
}

MaybeTensor second_stream(const MaybeTensor& rng_state) {
  if (!rng_state) {
    return std::nullopt;
  }
  Tensor moved = rng_state->clone();
  moved.narrow(0, 0, 1).bitwise_xor_(kSecondSeed);
  return moved;
}

// Elements [start, start + length) of a residual. If an error must leave the residual unchanged (`restores`) and it is
// overwritten in place, its old values are kept for `undo`.
Owed owed_at(Messages& messages, const Owed& owed, int64_t start, int64_t length, bool restores) {
  Owed found;
  if (owed.residual) {
    found.residual = owed.residual->narrow(0, start, length);
  }
  if (owed.residual_in) {
    found.residual_in = owed.residual_in->narrow(0, start, length);
  } else if (owed.residual && restores) {
    messages.keep(*found.residual);
  }
  return found;
}

// N elements in shards of M, one for each rank. The last shards may end, or even start, behind element N.
class Shards {
 public:
  struct Piece {
    int64_t first; // first element in the shard
    int64_t room;  // elements of a full piece; fewer exist at the end of the N elements
  };

  Shards(Messages& messages, QuantizedCoding coding, int64_t numel, int64_t shard, int64_t piece)
      : messages_(messages), coding_(std::move(coding)), numel_(numel), shard_(shard) {
    for (int64_t first = 0; first < shard; first += piece) {
      pieces_.push_back({first, std::min(piece, shard - first)});
    }
  }

  const std::vector<Piece>& pieces() const {
    return pieces_;
  }

  int64_t length(int64_t rank, const Piece& piece) const {
    return std::clamp<int64_t>(numel_ - rank * shard_ - piece.first, 0, piece.room);
  }

  // Posts receives for a payload of each piece from every rank.
  std::vector<Message> ask(const Tensor& like) {
    std::vector<Message> found;
    for (const auto& piece : pieces_) {
      found.push_back(messages_.ask(coding_.payload_bytes(piece.room), like));
    }
    return found;
  }

  // Sends every piece to the owner of its shard.
  void scatter(
      std::vector<Message>& arriving, const Tensor& x, const Owed& owed, const MaybeTensor& rng_state, bool restores) {
    std::vector<MaybeTensor> streams;
    for (int64_t rank = 0; rank < messages_.size(); ++rank) {
      streams.push_back(stream_of(rng_state, rank));
    }
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const int64_t num_bytes = coding_.payload_bytes(pieces_[i].room);
      const Tensor row = messages_.scratch(messages_.size() * num_bytes, x);
      for (int64_t rank = 0; rank < messages_.size(); ++rank) {
        const int64_t count = length(rank, pieces_[i]);
        const int64_t start = count > 0 ? rank * shard_ + pieces_[i].first : 0;
        encode(
            row.narrow(0, rank * num_bytes, num_bytes), x.narrow(0, start, count),
            owed_at(messages_, owed, start, count, restores), streams[rank], pieces_[i].first);
      }
      messages_.all_to_all(arriving[i], row);
    }
  }

  // Overwrites `total` with the sum over ranks, in rank order, of a piece of this rank's shard.
  void add_up(const Tensor& total, Message& arriving, const Piece& piece) {
    const Tensor& row = arriving.wait();
    const int64_t num_bytes = coding_.payload_bytes(piece.room);
    for (int64_t first = 0; first < total.numel(); first += kChunk) {
      const Tensor chunk = total.narrow(0, first, std::min(kChunk, total.numel() - first));
      for (int64_t rank = 0; rank < messages_.size(); ++rank) {
        const Tensor payload = row.narrow(0, rank * num_bytes, num_bytes);
        coding_.decode_add_(chunk, payload, total.numel(), first, rank > 0, 1.0);
      }
    }
  }

  // Sends a piece of this rank's shard to all ranks.
  void gather(
      Message& gathered, const Tensor& piece, int64_t room, const Owed& owed, const MaybeTensor& rng_state,
      int64_t first) {
    const Tensor row = messages_.scratch(coding_.payload_bytes(room), piece);
    encode(row, piece, owed, rng_state, first);
    messages_.all_gather(gathered, row);
  }

  // Overwrites a piece of every shard with the received payloads, divided by `divisor`.
  void spread(const Tensor& x, Message& gathered, const Piece& piece, int64_t divisor) {
    const Tensor& row = gathered.wait();
    const int64_t num_bytes = coding_.payload_bytes(piece.room);
    for (int64_t rank = 0; rank < messages_.size(); ++rank) {
      const int64_t count = length(rank, piece);
      const Tensor payload = row.narrow(0, rank * num_bytes, num_bytes);
      for (int64_t first = 0; first < count; first += kChunk) {
        const int64_t start = rank * shard_ + piece.first + first;
        const Tensor chunk = x.narrow(0, start, std::min(kChunk, count - first));
        coding_.decode_add_(chunk, payload, count, first, false, static_cast<double>(divisor));
      }
    }
  }

  // The sum of the scales of each encoded payload.
  const Tensors& sums_of_scales() const {
    return sums_of_scales_;
  }
  void look() {
    looks_ = true;
  }

 private:
  void encode(const Tensor& row, const Tensor& x, const Owed& owed, const MaybeTensor& rng_state, int64_t first) {
    if (x.numel() == 0) {
      row.zero_();
      return;
    }
    const Tensor scales = coding_.encode(row, x, owed, rng_state, first);
    if (looks_) {
      sums_of_scales_.push_back(scales.sum());
    }
  }

  Messages& messages_;
  QuantizedCoding coding_;
  int64_t numel_, shard_;
  std::vector<Piece> pieces_;
  Tensors sums_of_scales_;
  bool looks_ = false;
};

} // namespace

Tensors quantized_all_reduce(
    Messages& messages, const Quantized& coding, const Tensor& x, const States& states, int64_t shard, int64_t piece,
    int64_t divisor, bool restores, bool looks) {
  const auto& [residual, server_residual, rng_state, residual_in, server_residual_in] = states;
  Shards shards(messages, {coding.first, coding.second}, x.numel(), shard, piece);
  if (looks) {
    shards.look();
  }
  auto arriving = shards.ask(x), gathered = shards.ask(x);
  shards.scatter(arriving, x, {residual, residual_in}, rng_state, restores);
  const Tensor room_for_sums = messages.scratch(4 * std::min(piece, shard), x).view(at::kFloat);
  const MaybeTensor stream = second_stream(rng_state);
  const Owed server{server_residual, server_residual_in};
  const auto& pieces = shards.pieces();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t count = shards.length(messages.rank(), pieces[i]);
    const Tensor total = room_for_sums.narrow(0, 0, count);
    shards.add_up(total, arriving[i], pieces[i]);
    const Owed owed = owed_at(messages, server, count > 0 ? pieces[i].first : 0, count, restores);
    shards.gather(gathered[i], total, pieces[i].room, owed, stream, pieces[i].first);
  }
  const int64_t count = shards.length(messages.rank(), {0, shard});
  if (server_residual_in && count < shard) {
    // Residual elements behind the end of the N elements stay unchanged.
    server_residual->narrow(0, count, shard - count).copy_(server_residual_in->narrow(0, count, shard - count));
  }
  if (restores) {
    // After these waits no message can fail, and x may be overwritten.
    for (auto& message : gathered) {
      message.wait();
    }
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    shards.spread(x, gathered[i], pieces[i], divisor);
  }
  return looks ? Tensors{x, at::stack(shards.sums_of_scales())} : Tensors{x};
}

Tensors quantized_reduce_scatter(
    Messages& messages, const Quantized& coding, const Tensor& out, const Tensor& x, const States& states,
    int64_t piece, int64_t divisor) {
  Shards shards(messages, {coding.first, coding.second}, x.numel(), out.numel(), piece);
  auto arriving = shards.ask(x);
  shards.scatter(arriving, x, {std::get<0>(states), std::get<3>(states)}, std::get<2>(states), true);
  Tensor total = messages.scratch(4 * out.numel(), x).view(at::kFloat);
  const auto& pieces = shards.pieces();
  for (size_t i = 0; i < pieces.size(); ++i) {
    shards.add_up(total.narrow(0, pieces[i].first, pieces[i].room), arriving[i], pieces[i]);
  }
  out.copy_(divisor == 1 ? total : total.div_(divisor));
  return {out};
}

Tensors quantized_all_gather(
    Messages& messages, const Quantized& coding, const Tensor& out, const Tensor& x, const MaybeTensor& rng_state,
    int64_t piece) {
  Shards shards(messages, {coding.first, coding.second}, out.numel(), x.numel(), piece);
  auto gathered = shards.ask(x);
  const auto& pieces = shards.pieces();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Tensor part = x.narrow(0, pieces[i].first, pieces[i].room);
    shards.gather(gathered[i], part, pieces[i].room, {}, rng_state, pieces[i].first);
  }
  for (auto& message : gathered) {
    message.wait();
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    shards.spread(out, gathered[i], pieces[i], 1);
  }
  return {out};
}

} // namespace moe_ext::runtime
