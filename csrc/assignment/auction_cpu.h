// The auction on CPU, with a heap of the kept bids for each class of places.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "assignment/assignment_tables.h"
#include "assignment/auction.h"

namespace moe_ext::assignment {

struct Bid {
  double amount;
  int64_t token;

  // Order that puts the worst bid on top of the heap.
  bool operator<(const Bid& other) const {
    return amount > other.amount || (amount == other.amount && token < other.token);
  }
};

struct Offer {
  int64_t place_class;
  double amount;
};

// Run one phase: fill the heaps and raise the prices. choose(token, prices) returns the token's Choice.
template <typename F>
void run_phase(
    const std::vector<int64_t>& tokens, const AuctionShape& shape, double eps, F&& choose, std::vector<double>& prices,
    std::vector<std::vector<Bid>>& kept) {
  for (auto& heap : kept) {
    heap.clear();
  }
  std::vector<int64_t> bidders(tokens), outbid;
  std::vector<Offer> offers;
  while (!bidders.empty()) {
    offers.resize(bidders.size());
    torch::stable::parallel_for(0, static_cast<int64_t>(bidders.size()), 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Choice choice = choose(bidders[i], prices.data());
        offers[i] = {choice.expert, prices[choice.expert] + choice.margin + eps};
      }
    });
    outbid.clear();
    for (size_t i = 0; i < bidders.size(); ++i) {
      const int64_t c = offers[i].place_class;
      const auto places = static_cast<size_t>(shape.places(c));
      std::vector<Bid>& heap = kept[c];
      heap.push_back({offers[i].amount, bidders[i]});
      std::push_heap(heap.begin(), heap.end());
      if (heap.size() > places) {
        std::pop_heap(heap.begin(), heap.end());
        outbid.push_back(heap.back().token);
        heap.pop_back();
      }
      if (heap.size() == places) {
        prices[c] = heap.front().amount;
      }
    }
    bidders.swap(outbid);
  }
}

// Set expert_of [num_tokens] for the listed tokens. Tokens from num_tokens on are dummies.
template <typename F>
void run_auction(
    const std::vector<int64_t>& tokens, int64_t num_tokens, const AuctionShape& shape, double eps, F&& choose,
    int64_t* expert_of) {
  std::vector<double> prices(shape.num_classes(), 0.0);
  std::vector<std::vector<Bid>> kept(shape.num_classes());
  for (;; eps = next_eps(eps)) {
    run_phase(tokens, shape, eps, choose, prices, kept);
    if (eps == 1) {
      break;
    }
  }
  for (int64_t c = 0; c < shape.num_classes(); ++c) {
    for (const Bid& bid : kept[c]) {
      if (bid.token < num_tokens) {
        expert_of[bid.token] = c % shape.num_experts;
      }
    }
  }
}

} // namespace moe_ext::assignment
