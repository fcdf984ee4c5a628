#include "quern/ops/rope/table_rotary.h"

#include <cmath>
#include <cstddef>
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
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;
using Ints = std::vector<int64_t>;

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kPositions = 11, kTokens = 4, kHeads = 3, kKeyHeads = 1;

TableRotarySpec Spec(int64_t head_dim, int64_t rot_dim, int64_t offset = 0) {
  TableRotarySpec spec;
  spec.rotary.head_dim = head_dim;
  spec.rotary.rot_dim = rot_dim;
  spec.rotary.rot_offset = offset;
  spec.rotary.max_positions = kPositions;
  return spec;
}

// A table whose numbers are no cosines: an index that is wrong shows.
AnyMatrix Table(DType dtype, int64_t rot_dim) {
  Doubles values;
  for (int64_t i = 0; i < kPositions * rot_dim; ++i) {
    values.push_back(std::cos(0.37 * static_cast<double>(i * i % 1009)));
  }
  return AnyMatrix(dtype, values, kPositions, rot_dim, rot_dim + 2);
}

// The equation of the header. positions(t, j): that of pair j.
template <typename PositionOf>
Doubles Expected(const TableRotarySpec& spec, int64_t heads, const Doubles& x,
                 const Doubles& table, const PositionOf& position_of) {
  const RotaryEmbeddingSpec& r = spec.rotary;
  const int64_t half = r.rot_dim / 2;
  const double sign = r.turn == RotaryTurn::kBackward ? -1 : 1;
  Doubles out = x;
  for (int64_t row = 0; row < kTokens * heads; ++row) {
    for (int64_t j = 0; j < half; ++j) {
      const bool halves = r.style == RotaryStyle::kHalves;
      const int64_t at = row * r.head_dim + r.rot_offset;
      const auto a = static_cast<size_t>(at + (halves ? j : 2 * j));
      const auto b = static_cast<size_t>(at + (halves ? half + j : 2 * j + 1));
      const int64_t p = position_of(row / heads, j) * r.rot_dim;
      const double c = table[static_cast<size_t>(p + j)];
      const double s = sign * table[static_cast<size_t>(p + half + j)];
      out[a] = x[a] * c - x[b] * s;
      out[b] = x[b] * c + x[a] * s;
    }
  }
  return out;
}

class TableRotaryTest : public IsaTest {
 protected:
  TableRotaryPlan Plan(const TableRotarySpec& spec) {
    auto plan = TableRotaryPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  AnyMatrix Random(DType dtype, int64_t cols) {
    return AnyMatrix(dtype,
                     ToDoubles(UniformReals(rng_, kTokens * cols, -3, 3)),
                     kTokens, cols, cols + 3);
  }

  TestRng rng_;
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(TableRotaryTest);

TEST_P(TableRotaryTest, TurnsByTheRowsOfTheTable) {
  Ints positions = {7, 0, 10, 7};
  const IndexView at = DenseVector(positions.data(), kTokens);
  constexpr int64_t kShapes[][3] = {
      {2, 2, 0}, {64, 64, 0}, {80, 34, 0}, {80, 34, 46}, {128, 64, 3}};
  for (const auto& [n, rot_dim, offset] : kShapes) {
    for (const DType dtype : kDTypes) {
      for (const DType table_dtype : kDTypes) {
        for (const int form : {0, 1, 2, 3}) {
          SCOPED_TRACE(testing::Message() << n << " " << offset << " "
                                          << DTypeName(dtype) << form);
          TableRotarySpec spec = Spec(n, rot_dim, offset);
          spec.rotary.dtype = dtype;
          spec.table_dtype = table_dtype;
          if (form & 1) spec.rotary.style = RotaryStyle::kPairs;
          if (form & 2) spec.rotary.turn = RotaryTurn::kBackward;
          const TableRotaryPlan plan = Plan(spec);
          const AnyMatrix table = Table(table_dtype, rot_dim);
          const AnyMatrix q = Random(dtype, kHeads * n);
          const AnyMatrix k = Random(dtype, kKeyHeads * n);
          const AnyMatrix q_out(dtype, kTokens, kHeads * n, kHeads * n + 1);
          const AnyMatrix k_out(dtype, kTokens, kKeyHeads * n, kKeyHeads * n);
          TableRotaryArgs args;
          args.positions[0] = at;
          args.table = table.const_view();
          args.query = {q.heads(kHeads, n, n), q_out.heads(kHeads, n, n)};
          args.key = {k.heads(kKeyHeads, n, n), k_out.heads(kKeyHeads, n, n)};
          ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
          EXPECT_NO_ALLOCATION(plan.Execute(args, executor_));
          const auto position_of = [&](int64_t t, int64_t) {
            return positions[static_cast<size_t>(t)];
          };
          const auto near = [&](const AnyMatrix& have, int64_t heads,
                                const AnyMatrix& x) {
            EXPECT_TRUE(AllWithin(
                have.doubles(),
                Expected(spec, heads, x.doubles(), table.doubles(),
                         position_of),
                [&](double v, int64_t) { return TurnedBound(dtype, v); }));
          };
          near(q_out, kHeads, q);
          near(k_out, kKeyHeads, k);

          // In place, on several workers, and the query alone.
          ManyWorkers many(3);
          args.query.out = args.query.x;
          args.key = {};
          ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
          plan.Execute(args, many);
          EXPECT_EQ(q.bits(), q_out.bits());
        }
      }
    }
  }
}

TEST_P(TableRotaryTest, SectionsTakeThreePositions) {
  Ints first = {7, 0, 10, 7}, second = {1, 2, 3, 4}, third = {9, 8, 0, 6};
  const std::vector<Ints> streams = {first, second, third};
  for (const Ints& sections : {Ints{4, 6, 6}, Ints{16, 0, 0}, Ints{0, 3, 13}}) {
    for (const bool interleaved : {false, true}) {
      for (const RotaryStyle style :
           {RotaryStyle::kHalves, RotaryStyle::kPairs}) {
        SCOPED_TRACE(testing::Message() << sections[0] << interleaved);
        constexpr int64_t kDim = 40, kRot = 32;
        TableRotarySpec spec = Spec(kDim, kRot);
        spec.rotary.style = style;
        spec.sections = sections;
        spec.interleaved = interleaved;
        const TableRotaryPlan plan = Plan(spec);
        const AnyMatrix table = Table(DType::kF32, kRot);
        const AnyMatrix q = Random(DType::kF32, kHeads * kDim);
        const AnyMatrix out(DType::kF32, kTokens, kHeads * kDim, kHeads * kDim);
        TableRotaryArgs args;
        args.positions = {DenseVector(first.data(), kTokens),
                          DenseVector(second.data(), kTokens),
                          DenseVector(third.data(), kTokens)};
        args.table = table.const_view();
        args.query = {q.heads(kHeads, kDim, kDim),
                      out.heads(kHeads, kDim, kDim)};
        ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
        plan.Execute(args, executor_);
        const auto position_of = [&](int64_t t, int64_t j) {
          int64_t s = j < sections[0]                 ? 0
                      : j < sections[0] + sections[1] ? 1
                                                      : 2;
          if (interleaved) {
            s = j % 3;
            if (j >= 3 * sections[static_cast<size_t>(s)]) s = 0;
          }
          return streams[static_cast<size_t>(s)][static_cast<size_t>(t)];
        };
        EXPECT_TRUE(AllWithin(
            out.doubles(),
            Expected(spec, kHeads, q.doubles(), table.doubles(), position_of),
            [&](double v, int64_t) { return TurnedBound(DType::kF32, v); }));
      }
    }
  }
}

TEST(TableRotaryPlanTest, RefusesSpecs) {
  const auto sections = [](Ints s) {
    TableRotarySpec spec = Spec(8, 8);
    spec.sections = std::move(s);
    return spec;
  };
  TableRotarySpec i8 = Spec(8, 8);
  i8.table_dtype = DType::kI8;
  ExpectRefusal(TableRotaryPlan::Create(i8).status(),
                absl::StatusCode::kUnimplemented, "table_dtype is i8; need");
  const struct {
    TableRotarySpec spec;
    std::string words;
  } cases[] = {
      {Spec(8, 7), "rotary_by_table: rot_dim=7; need an even number"},
      {Spec(8, 10), "rot_dim=10; need 2 <= rot_dim <= 8"},
      {Spec(2048, 1026), "rot_dim=1026; need 2 <= rot_dim <= 1024"},
      {Spec(8, 6, 3), "rot_offset=3; need 0 <= rot_offset <= 2"},
      {sections({4}), "there are 1 sections; need 3, or none"},
      {sections({1, 1, 1}), "sections have 3 pairs; need 4"},
      {sections({5, 0, 0}), "sections[0]=5; need 0 <= section <= 4"},
      {sections({2, -1, 3}), "sections[1]=-1; need 0 <= section <= 2"},
  };
  for (const auto& c : cases) {
    ExpectRefusal(TableRotaryPlan::Create(c.spec).status(), c.words);
  }
}

TEST(TableRotaryPlanTest, RefusesArguments) {
  const auto plan = TableRotaryPlan::Create(Spec(4, 4));
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<float> memory(256);
  const auto heads = [&](int64_t from, int64_t count = 1) {
    return AnyTensorView(DType::kF32, static_cast<void*>(memory.data() + from),
                         3, {2, count, 4}, {4 * count, 4, 1});
  };
  Ints numbers = {0, 10};
  TableRotaryArgs good;
  good.positions[0] = DenseVector(numbers.data(), 2);
  good.table = DenseMatrix(memory.data() + 128, kPositions, 4);
  good.query = {heads(0), heads(8)};
  good.key = {heads(48, 2), heads(64, 2)};
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  const auto refused = [&](const TableRotaryArgs& args,
                           const std::string& words) {
    ExpectRefusal(plan->CheckArgs(args), words);
  };
  TableRotaryArgs args = good;
  numbers[1] = 11;
  refused(args, "positions[1]=11; need 0 <= position < 11");
  numbers[1] = -1;
  refused(args, "positions[1]=-1");
  numbers[1] = 0;
  args.positions[0] = DenseVector(numbers.data(), 1);
  refused(args, "positions.size");
  args = good;
  args.table = DenseMatrix(memory.data() + 128, kPositions - 1, 4);
  refused(args, "table is [10, 4]; need [11, 4]");
  args = good;
  args.query.out = heads(1);
  refused(args, "query_out overlaps query");
  args = good;
  args.key.out = heads(8, 2);
  refused(args, "key_out overlaps query_out");
  args = good;
  args.key.out = heads(125, 2);
  refused(args, "key_out overlaps table");
  args = good;
  args.key.x = AnyTensorView(DType::kF32, static_cast<void*>(memory.data()), 3,
                             {3, 1, 4}, {4, 4, 1});
  refused(args, "key is [3, 1, 4]; need [2, any, 4]");
  args = good;
  args.query.x = DenseMatrix(memory.data(), 2, 4);
  refused(args, "query is [2, 4]; need [any, any, 4]");
}

}  // namespace
}  // namespace quern
