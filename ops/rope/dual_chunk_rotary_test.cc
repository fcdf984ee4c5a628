#include "quern/ops/rope/dual_chunk_rotary.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

DualChunkRotarySpec Spec(int64_t head_dim, RotaryStyle style, DType dtype) {
  DualChunkRotarySpec spec;
  spec.rotary.head_dim = spec.rotary.rot_dim = head_dim;
  spec.rotary.max_positions = 1000;
  spec.rotary.style = style;
  spec.rotary.dtype = dtype;
  spec.chunk = 40;
  spec.local = 10;
  return spec;
}

class DualChunkRotaryTest : public IsaTest {
 protected:
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(DualChunkRotaryTest);

TEST_P(DualChunkRotaryTest, TurnsQueriesFiveTimesAndKeysOnce) {
  TestRng rng;
  const std::vector<int64_t> positions = {0, 29, 30, 999};
  struct Turns {
    int64_t local;
    // The expected rotation of each token, for the five copies.
    std::vector<std::vector<double>> of;
  };
  for (const Turns& turns : {Turns{10,
                                   {{0, 30, 40, 30, 40},
                                    {29, 40, 40, 59, 69},
                                    {0, 30, 40, 30, 40},
                                    {9, 39, 40, 39, 49}}},
                             Turns{25,
                                   {{0, 15, 29, 15, 40},
                                    {14, 29, 29, 29, 54},
                                    {0, 15, 29, 15, 40},
                                    {9, 24, 29, 24, 49}}}}) {
    for (const RotaryStyle style :
         {RotaryStyle::kHalves, RotaryStyle::kPairs}) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const int64_t n : {2, 34, 128}) {
          SCOPED_TRACE(testing::Message() << DTypeName(dtype) << n);
          DualChunkRotarySpec spec = Spec(n, style, dtype);
          spec.local = turns.local;
          const auto plan = DualChunkRotaryPlan::Create(spec);
          ASSERT_TRUE(plan.ok()) << plan.status();
          EXPECT_RAN_ON(*plan);
          const int64_t tokens = 4, heads = 2;
          const auto reals = [&](int64_t count) {
            return ToDoubles(UniformReals(rng, count, -3, 3));
          };
          const AnyMatrix q(dtype, reals(tokens * heads * n), tokens, heads * n,
                            heads * n + 1);
          const AnyMatrix k(dtype, reals(tokens * n), tokens, n, n + 2);
          const AnyMatrix q_out(dtype, tokens, 5 * heads * n,
                                5 * heads * n + 3);
          const AnyMatrix k_out(dtype, tokens, n, n);
          DualChunkRotaryArgs args = {DenseVector(positions.data(), tokens),
                                      q.heads(heads, n, n), k.heads(1, n, n),
                                      q_out.heads(5 * heads, n, n),
                                      k_out.heads(1, n, n)};
          ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
          EXPECT_NO_ALLOCATION(plan->Execute(args, executor_));

          const auto qs = q.doubles();
          std::vector<double> copies;
          for (size_t t = 0; t < 4; ++t) {
            const auto row = qs.begin() + static_cast<int64_t>(t) * heads * n;
            for (int copy = 0; copy < 5; ++copy) {
              copies.insert(copies.end(), row, row + heads * n);
            }
          }
          const auto frequency = [&](size_t j) {
            return std::pow(
                1e4, -2.0 * static_cast<double>(j) / static_cast<double>(n));
          };
          const auto bound = [&](double v, int64_t) {
            return TurnedBound(dtype, v);
          };
          EXPECT_TRUE(
              AllWithin(q_out.doubles(),
                        TurnedBy(copies, style, n,
                                 [&](size_t head, size_t j) {
                                   return turns.of[head / 10][head % 10 / 2] *
                                          frequency(j);
                                 }),
                        bound));
          EXPECT_TRUE(AllWithin(k_out.doubles(),
                                TurnedBy(k.doubles(), style, n,
                                         [&](size_t t, size_t j) {
                                           return turns.of[t][0] * frequency(j);
                                         }),
                                bound));

          // The keys again: in place, on several workers.
          ManyWorkers many(3);
          args.key_out = args.key;
          ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
          const auto before = q_out.bits();
          plan->Execute(args, many);
          EXPECT_EQ(k.bits(), k_out.bits());
          EXPECT_EQ(q_out.bits(), before);
        }
      }
    }
  }
}

// A single token, whose key is rotated in place, and no tokens at all.
TEST_P(DualChunkRotaryTest, TakesOneTokenAndNone) {
  const auto plan =
      DualChunkRotaryPlan::Create(Spec(4, RotaryStyle::kHalves, DType::kF32));
  ASSERT_TRUE(plan.ok());
  EXPECT_RAN_ON(*plan);
  const std::vector<int32_t> positions = {30};
  const AnyMatrix q(DType::kF32, {1, 2, 3, 4}, 1, 4, 4);
  const AnyMatrix k(DType::kF32, {1, 2, 3, 4}, 1, 4, 4);
  const AnyMatrix out(DType::kF32, 1, 20, 20);
  const DualChunkRotaryArgs args = {DenseVector(positions.data(), 1),
                                    q.heads(1, 4, 4), k.heads(1, 4, 4),
                                    out.heads(5, 4, 4), k.heads(1, 4, 4)};
  ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
  plan->Execute(args, executor_);
  EXPECT_EQ(k.doubles(), (std::vector<double>{1, 2, 3, 4}));  // m = 0
  const AnyTensorView none(DType::kF32, static_cast<void*>(nullptr), 3,
                           {0, 1, 4}, {4, 4, 1});
  const AnyTensorView none_out(DType::kF32, static_cast<void*>(nullptr), 3,
                               {0, 5, 4}, {20, 4, 1});
  const DualChunkRotaryArgs empty = {DenseVector(positions.data(), 0), none,
                                     none, none_out, none};
  ASSERT_EQ(plan->CheckArgs(empty), absl::OkStatus());
  plan->Execute(empty, executor_);
}

TEST(DualChunkRotaryPlanTest, Refuses) {
  struct Bad {
    DualChunkRotarySpec spec;
    std::string words;
  };
  const DualChunkRotarySpec good = Spec(4, RotaryStyle::kHalves, DType::kF32);
  std::vector<Bad> cases(5, {good, ""});
  cases[0].spec.chunk = 0;
  cases[0].words = "dual_chunk_rotary_embedding: chunk=0; need 1 <= chunk";
  cases[1].spec.local = 40;
  cases[1].words = "local=40; need 0 <= local <= 39";
  cases[2].spec.local = -1;
  cases[2].words = "local=-1; need 0 <= local <= 39";
  cases[3].spec.rotary.rot_dim = 3;
  cases[3].words = "rot_dim=3; need an even number";
  cases[4].spec.chunk = int64_t{1} << 40;
  cases[4].spec.local = 0;
  cases[4].spec.rotary.head_dim = cases[4].spec.rotary.rot_dim = 1 << 22;
  cases[4].words = "2 * chunk - local=2199023255552, rot_dim=4194304; need";
  for (const Bad& c : cases) {
    const absl::Status status = DualChunkRotaryPlan::Create(c.spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(c.words), std::string::npos) << status;
  }
  const auto plan = DualChunkRotaryPlan::Create(good);
  ASSERT_TRUE(plan.ok());
  const std::vector<int32_t> positions = {0, 1000};
  const AnyMatrix m(DType::kF32, 2, 60, 60);
  const auto heads = [&](int64_t from, int64_t count) {
    return AnyTensorView(
        DType::kF32,
        static_cast<void*>(static_cast<float*>(m.view().mutable_data()) + from),
        3, {1, count, 4}, {60, 4, 1});
  };
  DualChunkRotaryArgs args = {DenseVector(positions.data(), 1), heads(0, 1),
                              heads(4, 1), heads(8, 5), heads(28, 1)};
  EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
  const auto refused = [&](const DualChunkRotaryArgs& bad,
                           const std::string& words) {
    const absl::Status status = plan->CheckArgs(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(words), std::string::npos) << status;
  };
  DualChunkRotaryArgs bad = args;
  bad.query_out = heads(8, 1);
  refused(bad, "query_out is [1, 1, 4]; need [1, 5, 4]");
  bad = args;
  bad.query_out = heads(0, 5);
  refused(bad, "query_out overlaps query");
  bad = args;
  bad.key_out = heads(24, 1);
  refused(bad, "key_out overlaps query_out");
  bad = args;
  bad.key_out = heads(1, 1);
  refused(bad, "key_out overlaps query");
  bad = args;
  bad.key = heads(50, 1);
  bad.key_out = heads(51, 1);
  refused(bad, "key_out overlaps key");
  bad = args;
  bad.key = heads(10, 1);
  refused(bad, "query_out overlaps key");
  // 5 * heads would overflow to 4.
  constexpr int64_t kMany = 0x3333333333333334;
  bad = args;
  bad.query = AnyTensorView(DType::kF32, static_cast<const void*>(nullptr), 3,
                            {0, kMany, 4}, {4, 4, 1});
  refused(bad, "query has 3689348814741910324 heads; need 5 times as many");
  bad = args;
  bad.positions = DenseVector(positions.data() + 1, 1);
  refused(bad, "positions[0]=1000; need 0 <= position < 1000");
}

}  // namespace
}  // namespace quern
