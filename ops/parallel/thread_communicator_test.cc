#include "quern/ops/parallel/thread_communicator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/quant/scalar_convert.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

// The sum that the header promises, one element at a time.
std::vector<uint32_t> SumBits(DType dtype, const std::vector<Doubles>& parts) {
  std::vector<uint32_t> bits;
  for (size_t i = 0; i < parts[0].size(); ++i) {
    volatile float sum = static_cast<float>(parts[0][i]);
    for (size_t r = 1; r < parts.size(); ++r) {
      sum = sum + static_cast<float>(parts[r][i]);
    }
    bits.push_back(WithType(dtype, [&](auto type) {
      return static_cast<uint32_t>(BitsOf(FromF32<decltype(type)>(sum)));
    }));
  }
  return bits;
}

class ThreadCommunicatorTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(ThreadCommunicatorTest);

TEST_P(ThreadCommunicatorTest, SumsInTheOrderOfRanksAndRoundsOnce) {
  TestRng rng;
  struct Shape {
    int64_t rows, cols, stride;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int ranks : {1, 2, 3, 4}) {
      // Shapes of small sums, and of sums in place whose chunks end within
      // rows.
      for (const Shape& s :
           {Shape{0, 5, 5}, Shape{1, 1, 1}, Shape{3, 37, 40},
            Shape{1, 8192, 8192}, Shape{67, 259, 261}, Shape{3001, 7, 9}}) {
        std::vector<Doubles> parts;
        std::vector<std::unique_ptr<AnyMatrix>> x;
        for (int r = 0; r < ranks; ++r) {
          Doubles values;
          for (int64_t i = 0; i < s.rows * s.cols; ++i) {
            values.push_back(rng.Uniform(-1, 1) * std::exp2(static_cast<double>(
                                                      rng.Integer(-9, 9))));
          }
          x.push_back(std::make_unique<AnyMatrix>(dtype, values, s.rows, s.cols,
                                                  s.stride));
          parts.push_back(x.back()->doubles());
        }
        RunRanks(ranks, [&](ThreadCommunicator& c) {
          c.AllReduceSum(x[static_cast<size_t>(c.rank())]->view());
          if (c.rank() == 0) {
            EXPECT_RAN_ON(c);
          }
        });
        const std::vector<uint32_t> want = SumBits(dtype, parts);
        for (int r = 0; r < ranks; ++r) {
          EXPECT_EQ(x[static_cast<size_t>(r)]->bits(), want)
              << DTypeName(dtype) << " rank " << r << " of " << ranks << ", ["
              << s.rows << ", " << s.cols << "]";
        }
      }
    }
  }
}

TEST(ThreadCommunicator, SumsSpecialsAsF32Does) {
  const double inf = INFINITY;
  for (const int64_t copies : {1, 5000}) {  // small, in place
    const int64_t cols = 4 * copies;
    std::vector<std::unique_ptr<AnyMatrix>> x;
    for (const Doubles& values :
         {Doubles{-0.0, inf, NAN, -0.0}, Doubles{-0.0, -inf, 1.0, 0.0}}) {
      Doubles all;
      for (int64_t i = 0; i < copies; ++i) {
        all.insert(all.end(), values.begin(), values.end());
      }
      x.push_back(
          std::make_unique<AnyMatrix>(DType::kBF16, all, 1, cols, cols));
    }
    RunRanks(2, [&](ThreadCommunicator& c) {
      c.AllReduceSum(x[static_cast<size_t>(c.rank())]->view());
    });
    for (const auto& sum : x) {
      const Doubles y = sum->doubles();
      for (size_t i = 0; i < y.size(); i += 4) {
        EXPECT_TRUE(y[i] == 0 && std::signbit(y[i]));
        EXPECT_TRUE(std::isnan(y[i + 1]) && std::isnan(y[i + 2]));
        EXPECT_TRUE(y[i + 3] == 0 && !std::signbit(y[i + 3]));
      }
    }
  }
}

// Value of column c of row i.
double ValueAt(int64_t i, int64_t c) {
  return static_cast<double>(i * 100 + c);
}

TEST(ThreadCommunicator, GathersColumns) {
  for (const int ranks : {1, 2, 3, 4}) {
    // The last shard is full, cut, or empty.
    for (const ColumnShards shards :
         {ColumnShards{int64_t{5} * ranks, 5}, ColumnShards{4 * ranks - 2, 4},
          ColumnShards{3, 3}}) {
      for (const int64_t rows : {0, 1, 7}) {
        for (const bool in_place : {false, true}) {
          for (const bool to_root : {false, true}) {
            std::vector<std::unique_ptr<AnyMatrix>> out;
            for (int r = 0; r < ranks; ++r) {
              out.push_back(std::make_unique<AnyMatrix>(
                  DType::kF32, rows, shards.total, shards.total + 3));
            }
            const int root = ranks - 1;
            RunRanks(ranks, [&](ThreadCommunicator& c) {
              const int64_t begin = shards.Begin(c.rank());
              const int64_t count = shards.Count(c.rank());
              Doubles values;
              for (int64_t i = 0; i < rows; ++i) {
                for (int64_t j = 0; j < count; ++j) {
                  values.push_back(ValueAt(i, begin + j));
                }
              }
              const AnyMatrix apart(DType::kF32, values, rows, count,
                                    count + 2);
              const AnyTensorView y =
                  out[static_cast<size_t>(c.rank())]->view();
              AnyTensorView shard = apart.const_view();
              if (in_place) {
                shard = AnyTensorView(
                    DType::kF32,
                    static_cast<void*>(static_cast<float*>(y.mutable_data()) +
                                       begin),
                    2, {rows, count}, {y.stride(0), 1});
                CopyColumns(apart.const_view(), shard);
              }
              if (to_root) {
                c.GatherColumnsToRoot(shard,
                                      c.rank() == root ? y : AnyTensorView(),
                                      shards, root);
              } else {
                c.AllGatherColumns(shard, y, shards);
              }
            });
            for (int r = 0; r < ranks; ++r) {
              if (to_root && r != root) continue;
              const Doubles y = out[static_cast<size_t>(r)]->doubles();
              for (int64_t i = 0; i < rows * shards.total; ++i) {
                EXPECT_EQ(y[static_cast<size_t>(i)],
                          ValueAt(i / shards.total, i % shards.total));
              }
            }
          }
        }
      }
    }
  }
}

TEST(ThreadCommunicator, MovesBytes) {
  RunRanks(4, [](ThreadCommunicator& c) {
    const uint8_t mine[3] = {1, 2, static_cast<uint8_t>(c.rank())};
    uint8_t all[12] = {};
    c.AllGather(mine, all, 3);
    for (int r = 0; r < 4; ++r) EXPECT_EQ(all[3 * r + 2], r);
    uint8_t at_root[12] = {};
    c.GatherToRoot(mine, c.rank() == 2 ? at_root : nullptr, 3, 2);
    for (int r = 0; r < 4 && c.rank() == 2; ++r)
      EXPECT_EQ(at_root[3 * r + 2], r);
    int64_t word = c.rank() == 1 ? 77 : 0;
    c.Broadcast(&word, sizeof(word), 1);
    EXPECT_EQ(word, 77);
    c.AllGather(nullptr, nullptr, 0);
  });
}

// More ranks than cores, so that ranks sleep, and late ranks, which make others
// sleep. Calls of all kinds follow one another, so that one overtaking another
// would show.
TEST(ThreadCommunicator, KeepsManyCallsApart) {
  for (const int ranks : {2, 8}) {
    RunRanks(ranks, [ranks](ThreadCommunicator& c) {
      std::vector<float> large(5000);
      for (int call = 0; call < 300; ++call) {
        if (call % 100 == c.rank()) {
          std::this_thread::sleep_for(ThreadCommunicator::kSpin * 3);
        }
        float small[2] = {static_cast<float>(c.rank() + call), 1.0f};
        c.AllReduceSum(DenseMatrix(small, 1, 2));
        EXPECT_EQ(small[0], ranks * (ranks - 1) / 2 + ranks * call);
        if (call % 3 == 0) {
          std::iota(large.begin(), large.end(),
                    static_cast<float>(c.rank() + call));
          c.AllReduceSum(DenseMatrix(large.data(), 50, 100));
          EXPECT_EQ(large[4999],
                    ranks * (ranks - 1) / 2 + ranks * (call + 4999));
        }
        if (call % 5 == 0) {
          int all[8] = {};
          const int mine = c.rank() * 1000 + call;
          c.AllGather(&mine, all, sizeof(mine));
          for (int r = 0; r < ranks; ++r) EXPECT_EQ(all[r], r * 1000 + call);
        }
        if (call % 7 == 0) c.Barrier();
        int word = c.rank() == call % ranks ? call : -1;
        c.Broadcast(&word, sizeof(word), call % ranks);
        EXPECT_EQ(word, call);
      }
    });
  }
}

// After a call has returned, its memory may be overwritten, because no other
// rank reads it any more.
TEST(ThreadCommunicator, ReturnsWhenNobodyReadsAnyMore) {
  constexpr int64_t kCount = 4096;
  for (const int ranks : {2, 8}) {
    RunRanks(ranks, [&](ThreadCommunicator& c) {
      std::vector<int32_t> x(kCount), all(kCount * 8);
      for (int call = 0; call < 200; ++call) {
        std::fill(x.begin(), x.end(), c.rank() == 0 ? call : 0);
        c.Broadcast(x.data(), kCount * 4, 0);
        if (c.rank() != 0) {  // rank 0 is ahead; it does not look
          EXPECT_EQ(std::count(x.begin(), x.end(), call), kCount);
        }
        std::fill(x.begin(), x.end(), c.rank());
        c.AllGather(x.data(), all.data(), kCount * 4);
        std::fill(x.begin(), x.end(), -1);
        for (int r = 0; r < ranks; ++r) {
          const auto from = all.begin() + r * kCount;
          EXPECT_EQ(std::count(from, from + kCount, r), kCount) << call;
        }
      }
    });
  }
}

// Small sums follow one another without a barrier. A rank that is ahead must
// not write where others still read.
TEST(ThreadCommunicator, KeepsSmallSumsApart) {
  for (const int ranks : {2, 8}) {
    RunRanks(ranks, [ranks](ThreadCommunicator& c) {
      constexpr int64_t kCount =
          ThreadCommunicator::kSmallBytes / static_cast<int64_t>(sizeof(float));
      std::vector<float> x(kCount);
      for (int call = 0; call < 3000; ++call) {
        std::fill(x.begin(), x.end(), static_cast<float>(c.rank() + call));
        c.AllReduceSum(DenseMatrix(x.data(), 1, kCount));
        const auto want =
            static_cast<float>(ranks * (ranks - 1) / 2 + ranks * call);
        EXPECT_EQ(std::count(x.begin(), x.end(), want), kCount) << call;
      }
    });
  }
}

// A row that is alone has no next one: its stride is not used, not even in a
// product that would overflow.
TEST(ThreadCommunicator, IgnoresTheStrideOfOneRow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  RunRanks(2, [](ThreadCommunicator& c) {
    for (const int64_t count : {int64_t{10}, int64_t{20000}}) {
      for (const int64_t stride : {kMost, -kMost, int64_t{0}}) {
        std::vector<float> x(static_cast<size_t>(count), 1.0f + c.rank());
        c.AllReduceSum(MatrixView<float>(x.data(), {1, count}, {stride, 1}));
        EXPECT_EQ(std::count(x.begin(), x.end(), 3.0f), count);
        std::vector<float> all(static_cast<size_t>(2 * count));
        c.AllGatherColumns(
            MatrixView<const float>(x.data(), {1, count}, {stride, 1}),
            MatrixView<float>(all.data(), {1, 2 * count}, {stride, 1}),
            {2 * count, count});
        EXPECT_EQ(std::count(all.begin(), all.end(), 3.0f), 2 * count);
      }
    }
  });
}

TEST(ThreadCommunicator, AllocatesNothing) {
  RunRanks(2, [](ThreadCommunicator& c) {
    std::vector<float> x(20000, 1.0f), all(40000);
    c.Barrier();
    const auto calls = [&] {
      c.AllReduceSum(DenseMatrix(x.data(), 100, 200));
      c.AllReduceSum(DenseMatrix(x.data(), 1, 200));
      c.AllGather(x.data(), all.data(), 80000);
      c.Broadcast(x.data(), 100, 1);
    };
    ExpectNoAllocation(c, calls);
  });
}

TEST(ThreadCommunicator, RefusesNoRanksAndTooMany) {
  for (const int ranks : {-1, 0, 65}) {
    ExpectRefusal(ThreadCommunicator::CreateGroup(ranks).status(),
                  "thread_communicator: ranks=" + std::to_string(ranks) +
                      "; need 1 <= ranks <= 64");
  }
  EXPECT_TRUE(ThreadCommunicator::CreateGroup(64).ok());
}

TEST(SelfCommunicator, IsAGroupOfOne) {
  SelfCommunicator self;
  EXPECT_EQ(self.rank(), 0);
  EXPECT_EQ(self.size(), 1);
  float x[4] = {1, 2, 3, 4}, y[4] = {};
  self.Barrier();
  self.AllReduceSum(DenseMatrix(x, 2, 2));
  self.Broadcast(x, sizeof(x), 0);
  self.AllGatherColumns(DenseMatrix(x, 2, 2), DenseMatrix(y, 2, 2), {2, 2});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(y[i], i + 1);
}

}  // namespace
}  // namespace quern
