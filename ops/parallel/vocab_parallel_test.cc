#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/index_view.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/parallel/vocab_parallel_embedding.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

// vLLM's example: ids 0 to 7 and added ids 8 to 11 over two ranks, with two
// rows of padding after each kind.
TEST(VocabShard, HasVllmsRows) {
  const VocabShard shards[2] = {{0, 4, 2, 8, 10, 2}, {4, 8, 2, 10, 12, 2}};
  const std::vector<int64_t> want[2] = {{0, 1, 2, 3, 0, 0, 0, 0, 6, 7, 0, 0},
                                        {0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 6, 7}};
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(shards[rank].rows(), 10);
    std::vector<int64_t> rows;
    for (int64_t id = 0; id < 12; ++id) {
      const int64_t row = shards[rank].RowOf(id);
      const bool here = rank == 0 ? id < 4 || id == 8 || id == 9
                                  : (4 <= id && id < 8) || id >= 10;
      EXPECT_EQ(row != VocabShard::kNotHere, here) << id;
      rows.push_back(here ? row : 0);
    }
    EXPECT_EQ(rows, want[rank]);
  }
}

TEST(VocabShard, CutsWhereTheVocabularyEnds) {
  // P_org = 128 and P = 192, so that each of four ranks has 32 and 16 rows.
  const VocabSpec spec = {70, 20, 64};
  EXPECT_EQ(spec.padded_original(), 128);
  EXPECT_EQ(spec.padded(), 192);
  const VocabShard want[4] = {{0, 32, 0, 70, 86, 0},
                              {32, 64, 0, 86, 90, 12},
                              {64, 70, 26, 90, 90, 16},
                              {70, 70, 32, 90, 90, 16}};
  for (int rank = 0; rank < 4; ++rank) {
    const auto shard = VocabShard::Create(spec, rank, 4);
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_EQ(shard->original_begin, want[rank].original_begin);
    EXPECT_EQ(shard->original_end, want[rank].original_end);
    EXPECT_EQ(shard->original_padding, want[rank].original_padding);
    EXPECT_EQ(shard->added_begin, want[rank].added_begin);
    EXPECT_EQ(shard->added_end, want[rank].added_end);
    EXPECT_EQ(shard->added_padding, want[rank].added_padding);
  }
}

TEST(VocabShard, EveryIdHasOneRowAndEveryColumnOnePlace) {
  TestRng rng;
  for (int round = 0; round < 12; ++round) {
    VocabSpec spec;
    spec.original = rng.Integer(4000, 64000);
    spec.added = round == 0 ? 0 : rng.Integer(0, 1024);
    for (const int size : {1, 2, 4, 8}) {
      const auto order = GatheredVocabOrder(spec, size);
      ASSERT_TRUE(order.ok()) << order.status();
      std::set<int64_t> seen;  // rank * rows + row
      int64_t rows = 0;
      for (int rank = 0; rank < size; ++rank) {
        const auto shard = VocabShard::Create(spec, rank, size);
        ASSERT_TRUE(shard.ok()) << shard.status();
        rows = shard->rows();
        ASSERT_EQ(rows * size, spec.padded());
        for (int64_t id = -2; id < spec.ids() + 3; ++id) {
          const int64_t row = shard->RowOf(id);
          if (row == VocabShard::kNotHere) continue;
          ASSERT_TRUE(0 <= id && id < spec.ids());
          ASSERT_TRUE(0 <= row && row < rows);
          const int64_t column = rank * rows + row;
          ASSERT_TRUE(seen.insert(column).second);
          if (size > 1) {
            ASSERT_EQ((*order)[static_cast<size_t>(id)], column) << id;
          }
        }
      }
      ASSERT_EQ(static_cast<int64_t>(seen.size()), spec.ids());
      if (size == 1) {
        EXPECT_TRUE(order->empty());
        continue;
      }
      ASSERT_EQ(static_cast<int64_t>(order->size()), spec.padded());
      for (size_t i = seen.size(); i < order->size(); ++i) {
        ASSERT_TRUE(seen.insert((*order)[i]).second);
      }
      EXPECT_EQ(*seen.rbegin(), spec.padded() - 1);
    }
  }
}

TEST(VocabShard, LoadsOriginalRowsAndZeros) {
  const VocabSpec spec = {5, 2, 4};  // P_org = 8, P = 12
  const Doubles table = {0, 1, 10, 11, 20, 21, 30, 31, 40, 41};
  const AnyMatrix full(DType::kBF16, table, 5, 2, 3);
  const std::vector<Doubles> want = {{0, 1, 10, 11, 20, 21, 30, 31, 0, 0, 0, 0},
                                     {40, 41, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
  for (int rank = 0; rank < 2; ++rank) {
    const auto shard = VocabShard::Create(spec, rank, 2);
    ASSERT_TRUE(shard.ok());
    const AnyMatrix to(DType::kBF16, 6, 2, 5);
    EXPECT_EQ(LoadVocabShard(*shard, full.const_view(), to.view()),
              absl::OkStatus());
    EXPECT_EQ(to.doubles(), want[static_cast<size_t>(rank)]);
    const AnyMatrix small(DType::kBF16, 3, 2, 2), f32(DType::kF32, 6, 2, 2);
    ExpectRefusal(LoadVocabShard(*shard, small.const_view(), to.view()),
                  "vocab_shard: rows of table=3; need rows of table >= ");
    ExpectRefusal(LoadVocabShard(*shard, full.const_view(), f32.view()),
                  "vocab_shard: to");
    ExpectRefusal(LoadVocabShard(*shard, full.const_view(), small.view()),
                  "vocab_shard: to");
  }
}

TEST(VocabShard, Refuses) {
  struct Case {
    VocabSpec spec;
    int rank, size;
    std::string words;
  };
  for (const Case& c : {
           Case{{0, 0, 64}, 0, 1, "original=0; need 1 <= original"},
           Case{{9, -1, 64}, 0, 1, "added=-1; need 0 <= added"},
           Case{{9, int64_t{1} << 40, 64}, 0, 1, "added=1099511627776"},
           Case{{9, 0, 0}, 0, 1, "padding=0; need 1 <= padding"},
           Case{{9, 0, 64}, 0, 0, "size=0; need size >= 1"},
           Case{{9, 0, 64}, -1, 2, "rank=-1; need 0 <= rank <= 1"},
           Case{{9, 0, 64}, 2, 2, "rank=2; need 0 <= rank <= 1"},
           Case{{9, 0, 64},
                0,
                3,
                "64 padded original ids and 0 others; need multiples of the 3"},
           Case{{8, 1, 2}, 0, 4, "8 padded original ids and 2 others"},
       }) {
    ExpectRefusal(VocabShard::Create(c.spec, c.rank, c.size).status(),
                  "vocab_shard: " + c.words);
  }
  EXPECT_TRUE(VocabShard::Create({9, 1, 3}, 0, 3).ok());
  EXPECT_FALSE(GatheredVocabOrder({8, 1, 2}, 4).ok());
  EXPECT_FALSE(GatheredVocabOrder({8, 0, 2}, 0).ok());
  EXPECT_FALSE(GatheredVocabOrder({0, 0, 2}, 1).ok());
}

class VocabParallelEmbeddingTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(VocabParallelEmbeddingTest);

// Every rank gets the rows of a single rank's table, including the sign of
// zero. Padding rows hold NaN and must not be read.
TEST_P(VocabParallelEmbeddingTest, IsTheRowOfTheWholeTable) {
  TestRng rng;
  auto executor = HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(executor.ok());
  struct Types {
    DType weight, out;
  };
  std::vector<Types> all;
  for (const DType weight : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
      all.push_back({weight, out});
    }
  }
  for (const VocabSpec& vocab : {VocabSpec{70, 20, 64}, VocabSpec{64, 0, 64}}) {
    for (const int64_t hidden : {1, 37, 300}) {
      Doubles table;
      for (int64_t i = 0; i < vocab.ids() * hidden; ++i) {
        const int64_t kind = rng.Integer(0, 9);
        table.push_back(kind == 0   ? -0.0
                        : kind == 1 ? 0.0
                                    : rng.Uniform(-2, 2));
      }
      for (const Types types : all) {
        // Pairs of different dtypes need only one width.
        if (hidden != 37 && types.weight != types.out) continue;
        for (const int ranks : {1, 2, 4}) {
          for (const int64_t tokens :
               {int64_t{0}, int64_t{1}, hidden < 300 ? int64_t{270} : 9}) {
            std::vector<int64_t> ids;
            for (int64_t t = 0; t < tokens; ++t) {
              ids.push_back(t < vocab.ids() ? t
                                            : rng.Integer(0, vocab.ids() - 1));
            }
            Doubles want;
            for (const int64_t id : ids) {
              want.insert(want.end(), table.begin() + id * hidden,
                          table.begin() + (id + 1) * hidden);
            }
            // The table's values are rounded to the weight's dtype first.
            const AnyMatrix rows(types.weight, want, tokens, hidden, hidden);
            const AnyMatrix expected(types.out, rows.doubles(), tokens, hidden,
                                     hidden);
            VocabParallelEmbeddingSpec spec;
            spec.vocab = vocab;
            spec.hidden = hidden;
            spec.weight_dtype = types.weight;
            spec.out_dtype = types.out;
            RunRanks(ranks, [&](ThreadCommunicator& c) {
              const auto plan = VocabParallelEmbeddingPlan::Create(spec, c);
              ASSERT_TRUE(plan.ok()) << plan.status();
              if (c.rank() == 0) {
                EXPECT_RAN_ON(*plan);
              }
              const int64_t n = plan->shard().rows();
              Doubles own(static_cast<size_t>(n * hidden), NAN);
              for (int64_t id = 0; id < vocab.ids(); ++id) {
                const int64_t row = plan->shard().RowOf(id);
                if (row == VocabShard::kNotHere) continue;
                std::copy_n(table.begin() + id * hidden, hidden,
                            own.begin() + row * hidden);
              }
              const AnyMatrix weight(types.weight, own, n, hidden, hidden + 1);
              const AnyMatrix out(types.out, tokens, hidden, hidden + 2);
              const IndexView view(DenseVector<const int64_t>(
                  ids.data(), static_cast<int64_t>(ids.size())));
              ASSERT_EQ(plan->CheckArgs(view, weight.const_view(), out.view()),
                        absl::OkStatus());
              plan->Execute(view, weight.const_view(), out.view(), c,
                            **executor);  // the ranks' calls take turns on it
              EXPECT_EQ(out.bits(), expected.bits())
                  << "rank " << c.rank() << " of " << ranks;
            });
          }
        }
      }
    }
  }
}

TEST(VocabParallelEmbedding, Refuses) {
  auto group = ThreadCommunicator::CreateGroup(2);
  ASSERT_TRUE(group.ok());
  VocabParallelEmbeddingSpec spec;
  spec.vocab = {70, 20, 64};
  ExpectRefusal(VocabParallelEmbeddingPlan::Create(spec, *(*group)[0]).status(),
                "hidden=0; need 1 <= hidden <= ");
  spec.hidden = 3;
  const auto plan = VocabParallelEmbeddingPlan::Create(spec, *(*group)[0]);
  ASSERT_TRUE(plan.ok());
  const AnyMatrix weight(DType::kF32, 96, 3, 3), out(DType::kF32, 2, 3, 3);
  const AnyMatrix small(DType::kF32, 90, 3, 3);
  const auto check = [&](std::vector<int32_t> ids, const AnyMatrix& w,
                         const AnyMatrix& y) {
    return plan->CheckArgs(DenseVector<const int32_t>(
                               ids.data(), static_cast<int64_t>(ids.size())),
                           w.const_view(), y.view());
  };
  EXPECT_EQ(check({0, 89}, weight, out), absl::OkStatus());
  const std::string op = "vocab_parallel_embedding: ";
  ExpectRefusal(check({0, 90}, weight, out),
                op + "ids[1]=90; need 0 <= id < 90");
  ExpectRefusal(check({-1, 9}, weight, out),
                op + "ids[0]=-1; need 0 <= id < 90");
  ExpectRefusal(check({0, 1}, small, out), op + "weight");
  ExpectRefusal(check({0, 1, 2}, weight, out), op + "out");
  spec.weight_dtype = DType::kI8;
  ExpectRefusal(VocabParallelEmbeddingPlan::Create(spec, *(*group)[0]).status(),
                absl::StatusCode::kUnimplemented, "weight_dtype is i8");
  spec.vocab.padding = 1;
  ExpectRefusal(
      VocabParallelEmbeddingPlan::Create({{71, 0, 1}, 3}, *(*group)[0])
          .status(),
      "vocab_shard: 71 padded original ids");
}

TEST(VocabParallelEmbedding, AllocatesNothing) {
  RunRanks(2, [](ThreadCommunicator& c) {
    VocabParallelEmbeddingSpec spec;
    spec.vocab.original = 128;
    spec.hidden = 8;
    const auto plan = VocabParallelEmbeddingPlan::Create(spec, c);
    ASSERT_TRUE(plan.ok());
    const AnyMatrix weight(DType::kF32, Doubles(512, 1.0), 64, 8, 8);
    const AnyMatrix out(DType::kF32, 3, 8, 8);
    const int64_t ids[3] = {1, 64, 127};
    InlineExecutor executor;
    const auto run = [&] {
      plan->Execute(DenseVector(ids, 3), weight.const_view(), out.view(), c,
                    executor);
    };
    ExpectNoAllocation(c, run);
    EXPECT_EQ(out.doubles(), Doubles(24, 1.0));
  });
}

}  // namespace
}  // namespace quern
