#include "quern/gemm/schedule/packed_product.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/workspace.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/division.h"
#include "quern/packing/vnni_layout.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/many_workers.h"

namespace quern {
namespace {

constexpr int64_t kPanelCols = VnniLayout::kPanelCols;
constexpr auto kChunk = static_cast<int64_t>(kChunkLines);

// Tiles without a product: each chunk adds 1 plus its panel's number, to the
// first and the last column of the panel alone. So a test of thousands of
// shapes takes seconds, and has the rows of a tile of any instruction set.
const uint8_t* weights = nullptr;
// The number that stands in every packed row of the product that runs.
uint32_t packed_as = 0;

void StubTile(const TileArgs& t, size_t rows, size_t panels) {
  QUERN_CHECK(t.a[0] == packed_as && t.a[kChunk - 1] == packed_as);
  QUERN_CHECK(t.prefetch_steps >= 1);
  QUERN_CHECK(t.prefetch_steps * (t.prefetch[0].lines + t.prefetch[1].lines) <=
              t.steps);
  auto* sums = static_cast<float*>(t.sums);
  const auto first = static_cast<size_t>(t.b - weights) / t.panel_bytes;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t p = 0; p < panels; ++p) {
      for (const size_t col : {size_t{0}, size_t{kPanelCols - 1}}) {
        float& sum = sums[r * t.sums_stride + p * kPanelCols + col];
        sum = (t.add ? sum : 0) + static_cast<float>(first + p + 1);
      }
    }
  }
}

template <size_t kRows, size_t kPanels>
void StubTileOf(const TileArgs& t) {
  StubTile(t, kRows, kPanels);
}

void StubAddChunks(const AddChunksArgs& args) {
  auto* sums = static_cast<float*>(args.sums);
  for (size_t r = 0; r < args.rows; ++r) {
    for (size_t i = 0; i < args.cols; ++i) {
      if (i % kPanelCols != 0 && i % kPanelCols != kPanelCols - 1) continue;
      float& sum = sums[r * args.sums_stride + i];
      for (size_t c = 1; c < args.chunks; ++c) {
        sum += (&sum)[c * args.chunk_stride];
      }
    }
  }
}

struct StubTiles {
  static constexpr size_t kMostRows = 14;
  static constexpr bool Has(size_t rows, size_t panels) {
    return panels <= (rows < 4 ? 4 : 2);
  }
  template <size_t kRows, size_t kPanels>
  static constexpr Tile kTile = &StubTileOf<kRows, kPanels>;
};

// `max_rows`: 14 with AVX-512, 6 with AVX2, 3 with vectors of 128 bits.
TileTable StubTable(size_t max_rows) {
  TileTable table = TableOf(kTilesOf<StubTiles>);
  table.max_rows = max_rows;
  table.add_chunks = &StubAddChunks;
  return table;
}

// Notes the tasks of every parallel region, and whether one is running.
class Recorder final : public Executor {
 public:
  explicit Recorder(int workers) : many_(workers) {}
  int num_workers() const override { return many_.num_workers(); }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    regions.push_back(num_tasks);
    inside = true;
    many_.ParallelFor(num_tasks, fn);
    inside = false;
  }

  std::vector<int64_t> regions;
  bool inside = false;

 private:
  ManyWorkers many_;
};

struct ProductShape {
  int64_t max_rows, rows, panels, chunks, parts;
};

class PackedProductTest : public testing::Test {
 protected:
  // Memory for the shapes of the tests, of which no tile reads a byte.
  PackedProductTest() : b_(*AlignedBuffer::Create(int64_t{64} << 20)) {
    weights = b_.data();
  }

  static VnniLayout LayoutOf(const ProductShape& s) {
    return *VnniLayout::Create(DType::kF32, s.chunks * kChunk,
                               s.panels * kPanelCols);
  }
  // For Run, or for RunWith where every worker packs.
  template <typename Allocator>
  static PackedScratch<float> LayOut(const PackedProduct<float>& product,
                                     Allocator& allocator, int64_t workers,
                                     OneRowIsPacked one_row) {
    return one_row == OneRowIsPacked::kOnce
               ? product.LayOut(allocator, workers)
               : product.LayOutWholeK(allocator, workers, one_row);
  }
  static int64_t Bytes(const ProductShape& s, int64_t rows, int64_t workers,
                       OneRowIsPacked one_row = OneRowIsPacked::kOnce) {
    const VnniLayout layout = LayoutOf(s);
    const TileTable table = StubTable(static_cast<size_t>(s.max_rows));
    WorkspaceLayout counted;
    LayOut(
        PackedProduct<float>(layout, table, PackedRowPitch(1), rows, s.parts),
        counted, workers, one_row);
    return counted.bytes();
  }
  static int64_t Most(const ProductShape& s, int64_t rows, int64_t workers,
                      OneRowIsPacked one_row) {
    return MostWorkspaceBytes(rows, workers, [&](int64_t r, int64_t w) {
      return Bytes(s, r, w, one_row);
    });
  }

  // Runs the product in exactly the bytes that it lays out, at the end of
  // memory_, which a guard page follows: every sum is of all chunks, finished
  // once and by a task. Returns whether k was divided.
  bool Run(const ProductShape& s, Recorder& executor,
           OneRowIsPacked one_row = OneRowIsPacked::kOnce) {
    const VnniLayout layout = LayoutOf(s);
    const TileTable table = StubTable(static_cast<size_t>(s.max_rows));
    const PackedProduct<float> product(layout, table, PackedRowPitch(1), s.rows,
                                       s.parts);
    const int64_t bytes = Bytes(s, s.rows, executor.num_workers(), one_row);
    EXPECT_LE(bytes, memory_.size());
    Workspace workspace(memory_.data() + memory_.size() - bytes,
                        static_cast<size_t>(bytes));
    const auto scratch =
        LayOut(product, workspace, executor.num_workers(), one_row);
    ++packed_as;
    packed_by_.assign(static_cast<size_t>(executor.num_workers()), 0);
    packed_at_.clear();
    const auto pack = [&](int64_t, uint32_t* to, int worker) {
      ++packed_by_[static_cast<size_t>(worker)];
      packed_at_.push_back(to);
      for (int64_t c = 0; c < s.chunks; ++c, to += product.a_chunk()) {
        to[0] = to[kChunk - 1] = packed_as;
      }
    };
    std::vector<int> finished(static_cast<size_t>(s.rows * s.panels));
    int64_t wrong = 0, alone = 0;
    const auto finish = [&](const SumsBlock<float>& block) {
      if (executor.num_workers() > 1 && !executor.inside) ++alone;
      for (int64_t r = 0; r < block.rows; ++r) {
        for (int64_t col = 0; col < block.cols; col += kPanelCols) {
          const int64_t panel = (block.col + col) / kPanelCols;
          ++finished[static_cast<size_t>((block.row + r) * s.panels + panel)];
          for (int64_t part = 0; part < s.parts; ++part) {
            const float* sum =
                block.sums + part * block.part_stride + r * block.stride + col;
            const auto want =
                static_cast<float>(s.chunks * (part * s.panels + panel + 1));
            wrong += sum[0] != want || sum[kPanelCols - 1] != want;
          }
        }
      }
    };
    if (one_row == OneRowIsPacked::kOnce) {
      product.Run(b_.data(), scratch, executor, pack, finish);
    } else {
      const auto multiply = [&](const uint32_t* a, const TileRange& range,
                                const SumsAt<float>& to, int /*worker*/) {
        product.MultiplyRange(b_.data(), a, range, to);
      };
      product.RunWith(scratch, executor, pack, multiply, finish);
    }
    shares_ = scratch.division.shares();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(std::count(finished.begin(), finished.end(), 1),
              s.rows * s.panels);
    finished_alone_ = alone > 0;
    return scratch.division.k_pieces > 1;
  }

  AlignedBuffer b_;
  GuardBuffer<uint8_t> memory_{int64_t{48} << 20};
  bool finished_alone_ = false;
  int64_t shares_ = 0;          // of the division
  std::vector<int> packed_by_;  // number of rows that each worker packed
  std::vector<const uint32_t*> packed_at_;  // the beginning of each packed row
};

testing::Message Of(const ProductShape& s, int workers) {
  return testing::Message()
         << s.rows << " rows in tiles of " << s.max_rows << ", " << s.panels
         << " panels, " << s.chunks << " chunks, " << s.parts << " parts, "
         << workers << " workers";
}

// A mixture whose experts are given no row lays out the scratch of none.
TEST(RowTilesTest, NoRowsAreNoTiles) {
  TileTable table = {};
  table.max_rows = 6;
  for (const TileCount count : {TileCount::kFewest, TileCount::kEven}) {
    const RowTiles tiles(0, table, count);
    EXPECT_EQ(tiles.count, 0);
    EXPECT_EQ(tiles.max_size(), 0);
  }
}

TEST_F(PackedProductTest, TakesWhatItLaysOutForEveryNumberOfWorkers) {
  int divided = 0, whole = 0;
  for (const int64_t max_rows : {3, 6, 14}) {
    for (const int64_t panels : {1, 4, 7, 8, 16, 128}) {
      for (const int64_t rows : {1, 2, 5, 6, 7, 15, 16, 17}) {
        const ProductShape s{max_rows, rows, panels, panels == 7 ? 3 : 16, 1};
        for (int workers = 1; workers <= 256;
             workers += panels == 128 ? 9 : 1) {
          Recorder executor(workers);
          ++(Run(s, executor) ? divided : whole);
          ASSERT_FALSE(HasFailure()) << Of(s, workers);
        }
      }
    }
  }
  EXPECT_GT(divided, 1000);
  EXPECT_GT(whole, 1000);
}

TEST_F(PackedProductTest, PartsAreDividedAlike) {
  for (const int64_t rows : {1, 15, 40}) {
    for (const int workers : {1, 3, 6, 7, 31, 127}) {
      const ProductShape s{6, rows, 8, 16, 2};
      Recorder executor(workers);
      Run(s, executor);
      ASSERT_FALSE(HasFailure()) << Of(s, workers);
    }
  }
}

// Where there are shares. No worker packs the row twice, and no two workers
// pack it to memory that overlaps.
TEST_F(PackedProductTest, EveryWorkerThatMultipliesPacksOneRow) {
  constexpr auto kEach = OneRowIsPacked::kByEachWorker;
  int with_shares = 0;
  for (const int64_t panels : {4, 16, 128, 352}) {
    for (const int64_t parts : {1, 2}) {
      for (const int workers : {1, 2, 3, 16, 127}) {
        const ProductShape s{14, 1, panels, 16, parts};
        Recorder executor(workers);
        Run(s, executor, kEach);
        ASSERT_FALSE(HasFailure()) << Of(s, workers);
        const auto rows = static_cast<int>(packed_at_.size());
        if (shares_ <= 1) {
          EXPECT_EQ(rows, 1) << Of(s, workers);
          continue;
        }
        ++with_shares;
        EXPECT_EQ(executor.regions, std::vector<int64_t>{shares_});
        // Workers that run first take what the next ones have left.
        EXPECT_GE(rows, DivCeil(shares_, 4)) << Of(s, workers);
        for (int worker = 0; worker < workers; ++worker) {
          EXPECT_LE(packed_by_[static_cast<size_t>(worker)], 1)
              << Of(s, workers) << ", worker " << worker;
        }
        std::sort(packed_at_.begin(), packed_at_.end());
        for (size_t i = 1; i < packed_at_.size(); ++i) {
          EXPECT_GE(packed_at_[i] - packed_at_[i - 1], s.chunks * kChunk)
              << Of(s, workers);
        }
      }
    }
  }
  EXPECT_GE(with_shares, 8);
  // Several rows are packed once.
  Recorder executor(2);
  Run({14, 3, 128, 16, 1}, executor, kEach);
  EXPECT_EQ(shares_, 2);
  EXPECT_EQ(packed_at_.size(), 3u);
}

// For few rows k may be divided or not as rows and workers change, so that the
// bytes of the most of both are not the most bytes.
TEST_F(PackedProductTest, MostBytesAreThoseOfEveryFewerRowsAndWorkers) {
  for (const ProductShape& s : {ProductShape{14, 0, 4, 16, 1},
                                {6, 0, 8, 32, 1},
                                {6, 0, 1, 40, 2},
                                {3, 0, 31, 16, 1},
                                {6, 0, 128, 16, 1}}) {
    for (const int64_t max_rows : {1, 7, 15, 16, 17, 256, 1000}) {
      for (const int max_workers : {1, 6, 7, 16, 127}) {
        for (const auto one_row :
             {OneRowIsPacked::kOnce, OneRowIsPacked::kByEachWorker}) {
          int64_t taken = 0;
          for (int64_t r = 1; r <= std::min(max_rows, kBlockRows); ++r) {
            for (int w = 1; w <= max_workers; ++w) {
              taken = std::max(taken, Bytes(s, r, w, one_row));
            }
          }
          EXPECT_EQ(Most(s, max_rows, max_workers, one_row), taken)
              << Of(s, max_workers) << ", at most " << max_rows << " rows";
        }
      }
    }
  }
}

TEST_F(PackedProductTest, AllWorkersAddTheChunksOfADividedK) {
  const ProductShape s{14, 16, 64, 16, 1};
  Recorder executor(200);
  ASSERT_TRUE(Run(s, executor));
  EXPECT_FALSE(finished_alone_) << "the caller finished sums by itself";
  // Rows are packed, chunks multiplied, sums added.
  ASSERT_EQ(executor.regions.size(), 3u);
  EXPECT_GE(executor.regions[2], 200);

  // One panel: rows are divided.
  const ProductShape one{14, 16, 1, 200, 1};
  Recorder few(8);
  ASSERT_TRUE(Run(one, few));
  ASSERT_EQ(few.regions.size(), 3u);
  EXPECT_EQ(few.regions[2], 8);
}

TEST_F(PackedProductTest, FewSumsAreAddedByTheCaller) {
  const ProductShape s{14, 1, 1, 16, 1};
  Recorder executor(200);
  ASSERT_TRUE(Run(s, executor));
  EXPECT_TRUE(finished_alone_);
}

}  // namespace
}  // namespace quern
