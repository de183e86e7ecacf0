// Tests of the order of a grouped matmul's tiles, run by host_test.

#include "layer/matmul/hopper/matmul_tiles.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/check.h"

namespace jax_ep::matmul {
namespace {

constexpr uint32_t kMaxTileRows = 256;
constexpr uint32_t kWorkers = 66;  // clusters of two of a GPU's 132 multiprocessors

struct Groups {
  std::vector<uint32_t> row_offsets;
  uint32_t n_rows, n_columns;
  bool divides_evenly = true;

  MatmulTileShape Shape() const {
    const auto n_groups = static_cast<uint32_t>(row_offsets.size()) - 1;
    return {row_offsets.data(), n_rows, n_groups, kMaxTileRows, divides_evenly};
  }
};

// The table of the groups, as the device fills it.
class Table {
 public:
  explicit Table(const Groups& groups) : groups_(groups), n_groups_(groups.Shape().n_groups) {
    const MatmulTileShape shape = groups.Shape();
    std::vector<uint32_t> keys(n_groups_);
    for (uint32_t group = 0; group < n_groups_; ++group) {
      keys[group] = MatmulTileKey(MatmulGroup::Of(shape, group));
    }
    ends_.resize(n_groups_), spans_.resize(n_groups_);
    for (uint32_t group = 0; group < n_groups_; ++group) {
      EnterMatmulGroup({ends_.data(), spans_.data(), nullptr}, MatmulGroup::Of(shape, group),
                       PlaceOf(keys, group), group);
    }
  }

  // Two threads that each compare the group with half of the groups.
  MatmulPlace PlaceOf(const std::vector<uint32_t>& keys, uint32_t group) const {
    const auto even = MatmulPlace::Among(keys.data(), n_groups_, group, 0, 2);
    const auto odd = MatmulPlace::Among(keys.data(), n_groups_, group, 1, 2);
    return {even.position + odd.position, even.first_tile + odd.first_tile};
  }

  // As one worker sees them.
  MatmulTiles Tiles() {
    return {{ends_.data(), spans_.data(), nullptr}, n_groups_, groups_.n_columns};
  }

 private:
  const Groups& groups_;
  const uint32_t n_groups_;
  std::vector<uint32_t> ends_;
  std::vector<MatmulSpan> spans_;
};

Groups MakeGroups(const std::vector<uint32_t>& sizes, uint32_t n_columns) {
  Groups groups{{0}, 0, n_columns, true};
  for (const uint32_t size : sizes) groups.row_offsets.push_back(groups.row_offsets.back() + size);
  groups.n_rows = groups.row_offsets.back() + 5;
  return groups;
}

// The sizes of `n_groups` groups of rows that choose theirs at random.
std::vector<uint32_t> DrawSizes(uint32_t n_groups, uint32_t n_rows, std::mt19937& random) {
  std::vector<uint32_t> sizes(n_groups);
  for (uint32_t i = 0; i < n_rows; ++i) ++sizes[random() % n_groups];
  return sizes;
}

std::vector<uint32_t> ZipfSizes(uint32_t n_groups, uint32_t n_rows) {
  double sum = 0;
  for (uint32_t i = 1; i <= n_groups; ++i) sum += 1.0 / i;
  std::vector<uint32_t> sizes;
  for (uint32_t i = 1; i <= n_groups; ++i) {
    sizes.push_back(static_cast<uint32_t>(n_rows / sum / i));
  }
  return sizes;
}

void CheckTile(const MatmulTileShape& shape, const MatmulTile& tile) {
  CHECK_EQ(tile.group() < shape.n_groups, true);
  CHECK_EQ(tile.n_rows >= 1 && tile.n_rows <= shape.max_tile_rows, true);
  CHECK_EQ(tile.row >= shape.row_offsets[tile.group()], true);
  CHECK_EQ(tile.row + tile.n_rows <= std::min(shape.row_offsets[tile.group() + 1], shape.n_rows),
           true);
  CHECK_EQ(tile.column % kMatmulTileColumns, 0u);
}

// Each row has each column of tiles once, from whichever worker: each sees some of the tiles.
void ExpectCovered(const Groups& groups, uint32_t n_workers) {
  Table table(groups);
  const MatmulTileShape shape = groups.Shape();
  const uint32_t n_column_tiles = (groups.n_columns + kMatmulTileColumns - 1) / kMatmulTileColumns;
  std::vector<int> taken(size_t{groups.n_rows} * n_column_tiles);
  for (uint32_t worker = 0; worker < n_workers; ++worker) {
    MatmulTiles tiles = table.Tiles();
    for (uint32_t number = worker;; number += n_workers) {
      const MatmulTile tile = tiles.Find(number);
      if (tile.n_rows == 0) break;
      CheckTile(shape, tile);
      for (uint32_t row = tile.row; row < tile.row + tile.n_rows; ++row) {
        ++taken[size_t{row} * n_column_tiles + tile.column / kMatmulTileColumns];
      }
    }
  }
  const size_t n_used = std::min(groups.row_offsets.back(), groups.n_rows);
  for (size_t i = 0; i < taken.size(); ++i) {
    CHECK_EQ(taken[i], i < n_used * n_column_tiles ? 1 : 0);
  }
}

TEST(TilesCoverEachRowOnce) {
  std::mt19937 random(1);
  std::vector<Groups> cases = {
      MakeGroups({}, 256),
      MakeGroups({0, 0, 0}, 256),
      MakeGroups({0, 1, 7, 8, 9, 0, 17, 127, 128, 129, 255, 256, 257, 0}, 8),
      MakeGroups({5000, 0, 1, 4999, 2049}, 1032),
      MakeGroups(ZipfSizes(32, 32768), 4096),
      MakeGroups({3, 4}, 0),
  };
  for (int i = 0; i < 50; ++i) {
    const uint32_t n_groups = 1 + random() % 70;
    cases.push_back(MakeGroups(DrawSizes(n_groups, random() % 9000, random), random() % 1500));
  }
  Groups beyond = MakeGroups({40, 65, 0, 30, 100}, 300);
  beyond.n_rows = 100;
  beyond.row_offsets.back() = 4000000000;
  cases.push_back(beyond);
  for (Groups groups : cases) {
    for (const bool divides_evenly : {true, false}) {
      groups.divides_evenly = divides_evenly;
      for (const uint32_t n_workers : {1u, 7u, kWorkers}) ExpectCovered(groups, n_workers);
    }
  }
}

// The rows of a group's tiles, of which there is one column.
std::vector<uint32_t> TileRows(uint32_t n_rows, bool divides_evenly) {
  Groups groups = MakeGroups({n_rows}, kMatmulTileColumns);
  groups.divides_evenly = divides_evenly;
  Table table(groups);
  MatmulTiles tiles = table.Tiles();
  std::vector<uint32_t> rows;
  for (MatmulTile tile = tiles.Find(0); tile.n_rows > 0; tile = tiles.Find(rows.size())) {
    rows.push_back(tile.n_rows);
  }
  return rows;
}

TEST(GroupsAreDividedEvenlyIfAsked) {
  CHECK_EQ(TileRows(257, true) == (std::vector<uint32_t>{136, 121}), true);
  CHECK_EQ(TileRows(257, false) == (std::vector<uint32_t>{256, 1}), true);
  CHECK_EQ(TileRows(512, false) == (std::vector<uint32_t>{256, 256}), true);
  CHECK_EQ(TileRows(9, false) == (std::vector<uint32_t>{9}), true);
}

// Rows that the busiest worker and all workers multiply, and rows in use, in units of instructions.
struct Load {
  uint64_t most = 0, all = 0, useful = 0;
};

// Workers take tiles when they have done theirs.
Load Measure(const Groups& groups) {
  Table table(groups);
  MatmulTiles tiles = table.Tiles();
  Load load;
  std::vector<uint64_t> ends(kWorkers);
  for (uint32_t number = 0;; ++number) {
    const MatmulTile tile = tiles.Find(number);
    if (tile.n_rows == 0) break;
    const uint64_t rows = (tile.n_rows + kMatmulRowUnit - 1) / kMatmulRowUnit * kMatmulRowUnit;
    *std::min_element(ends.begin(), ends.end()) += rows;
    load.useful += tile.n_rows;
    load.all += rows;
  }
  load.most = *std::max_element(ends.begin(), ends.end());
  return load;
}

// The useful share of the busiest worker's time, at least, if time is proportional to rows.
void ExpectUseful(const std::string& name, const Groups& groups, double share) {
  const Load load = Measure(groups);
  const double got = static_cast<double>(load.useful) / kWorkers / static_cast<double>(load.most);
  const double rounding = static_cast<double>(load.useful) / static_cast<double>(load.all);
  if (got < share) std::cerr << name << ": " << got << ", by rounding " << rounding << std::endl;
  CHECK_EQ(got >= share, true);
}

TEST(LoadsAreBalanced) {
  std::mt19937 random(2);
  const auto drawn = [&](uint32_t n_groups, uint32_t mean, uint32_t n_columns) {
    return MakeGroups(DrawSizes(n_groups, n_groups * mean, random), n_columns);
  };
  ExpectUseful("32 x 1024, 4096 columns", drawn(32, 1024, 4096), 0.96);
  ExpectUseful("32 x 1024, 7168 columns", drawn(32, 1024, 7168), 0.97);
  ExpectUseful("64 x 512, 2048 columns", drawn(64, 512, 2048), 0.94);
  ExpectUseful("64 x 256, 1536 columns", drawn(64, 256, 1536), 0.92);
  ExpectUseful("64 x 128, 1536 columns", drawn(64, 128, 1536), 0.91);
  ExpectUseful("zipf, 4096 columns", MakeGroups(ZipfSizes(32, 32768), 4096), 0.94);
}

TEST(TilesOfTheSameWeightsFollowEachOther) {
  const Groups groups = MakeGroups({1000, 300}, 1024);
  Table table(groups);
  MatmulTiles tiles = table.Tiles();
  uint32_t n_changes = 0, number = 0;
  MatmulTile last{};
  for (MatmulTile tile = tiles.Find(0); tile.n_rows > 0; tile = tiles.Find(++number)) {
    n_changes += tile.group() != last.group() || tile.column != last.column;
    last = tile;
  }
  CHECK_EQ(n_changes, 2 * 4 - 1u);
}

}  // namespace
}  // namespace jax_ep::matmul
