// How work is cut: what the bits and the speed of a grouped product rest on.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grouped_gemm/tiles.h"

namespace moe_ext::grouped_gemm {
namespace {

struct Cut {
  std::string name;
  int64_t begin;
  int64_t end;
  int64_t size;
  size_t num_tiles;
};

class CutTiles : public ::testing::TestWithParam<Cut> {};

TEST_P(CutTiles, FollowEachOtherNearTheNominalSize) {
  const Cut& p = GetParam();
  std::vector<Tile> tiles;
  cut(tiles, 3, p.begin, p.end, p.size);
  ASSERT_EQ(tiles.size(), p.num_tiles);
  int64_t at = p.begin;
  for (const Tile& tile : tiles) {
    EXPECT_EQ(tile.expert, 3);
    EXPECT_EQ(tile.begin, at);
    EXPECT_EQ((tile.begin - p.begin) % 32, 0);
    EXPECT_GT(tile.end, tile.begin);
    // One step of 32 more than half over the nominal size, from rounding the cuts.
    EXPECT_LE(tile.end - tile.begin, p.size + p.size / 2 + 32);
    at = tile.end;
  }
  EXPECT_EQ(at, p.num_tiles == 0 ? p.begin : p.end);
}

INSTANTIATE_TEST_SUITE_P(
    Cuts, CutTiles,
    ::testing::Values(
        Cut{"Nothing", 7, 7, 256, 0}, Cut{"OneRow", 7, 8, 256, 1}, Cut{"JustBelowHalfOver", 5, 5 + 383, 256, 1},
        Cut{"HalfOver", 5, 5 + 384, 256, 2}, Cut{"Ragged", 1, 1 + 3001, 512, 6}, Cut{"Columns", 0, 3584, 1792, 2}),
    [](const auto& info) { return info.param.name; });

TEST(TileSize, IsAShareOfTheWorkWithinBounds) {
  EXPECT_EQ(tile_size(0, 256, 512), 256);
  EXPECT_EQ(tile_size(16 * 300, 256, 512), 300);
  EXPECT_EQ(tile_size(1 << 20, 256, 512), 512);
}

TEST(ForEachTile, RunsEachOnceTheCostliestFirst) {
  torch::stable::get_num_threads();
  std::vector<Tile> tiles = {{0, 0, 10}, {1, 10, 40}, {2, 40, 60}, {3, 60, 80}};
  std::vector<std::atomic<int>> runs(4);
  sort_by_cost(tiles, [](const Tile& tile) { return tile.end - tile.begin; });
  EXPECT_EQ(tiles[0].expert, 1);
  EXPECT_EQ(tiles[1].expert, 2) << "tiles of one cost keep their order";
  EXPECT_EQ(tiles[3].expert, 0);
  for_each_tile(tiles, [&](const Tile& tile) { ++runs[tile.expert]; });
  for (const auto& count : runs) {
    EXPECT_EQ(count, 1);
  }
}

} // namespace
} // namespace moe_ext::grouped_gemm
