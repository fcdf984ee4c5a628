// Every row has the bits that the packed LinearPlan of its group gives,
// whatever the groups; linear_*_test.cc compare those with double.

#include "quern/gemm/grouped_linear.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

// Rows of each group.
using Counts = std::vector<int64_t>;

std::vector<int32_t> OffsetsOf(const Counts& counts) {
  std::vector<int32_t> offsets = {0};
  for (const int64_t count : counts) {
    offsets.push_back(offsets.back() + static_cast<int32_t>(count));
  }
  return offsets;
}

// Groups of known weights, and what gives the rows of one of them.
struct Groups {
  std::vector<LinearWeights> weights;
  std::vector<LinearPlan> alone;
};

class GroupedLinearTest : public IsaTest {
 protected:
  template <typename A, typename C>
  Groups MakeGroups(Rng& rng, WeightCase format, const Shape& s, size_t count) {
    Groups groups;
    for (size_t g = 0; g < count; ++g) {
      groups.weights.push_back(RealWeights(rng, format, s).Pack(inline_));
      LinearSpec spec = SpecOf<A, C>(s.act);
      spec.kernels = "packed";
      auto plan = LinearPlan::Create(spec, groups.weights.back(), inline_);
      EXPECT_EQ(plan.status(), absl::OkStatus());
      groups.alone.push_back(*std::move(plan));
    }
    return groups;
  }

  template <typename A, typename C>
  GroupedLinearPlan Plan(const Groups& groups, Act act) {
    GroupedLinearSpec spec;
    spec.a = DTypeOf<A>;
    spec.c = DTypeOf<C>;
    spec.activation = act;
    auto plan = GroupedLinearPlan::Create(spec, groups.weights);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  // c of Execute, which has one row more than it may write. Rows of a are those
  // of `index`, or of c where that is empty.
  template <typename A, typename C>
  std::vector<C> Run(const GroupedLinearPlan& plan, const Shape& s,
                     const Counts& counts, const std::vector<A>& a,
                     const std::vector<int32_t>& index, int64_t rows_per_index,
                     Executor& executor) {
    const std::vector<int32_t> offsets = OffsetsOf(counts);
    const int64_t rows = offsets.back(), cols = s.cols();
    const int64_t a_rows = static_cast<int64_t>(a.size()) / s.k;
    const StridedMatrix<A> in(a, a_rows, s.k, s.k + s.padding, Edge::kEnd,
                              s.shift);
    StridedMatrix<C> out(rows + 1, cols, cols + s.padding, Edge::kEnd, s.shift);
    const GuardBuffer<int32_t> guarded_offsets(offsets);
    const GuardBuffer<int32_t> guarded_index(index);
    GroupedLinearArgs args;
    args.a = in.view();
    args.c = out.view();
    args.offsets = guarded_offsets.view();
    if (!index.empty()) args.index = guarded_index.view();
    args.rows_per_index = rows_per_index;
    EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
    // Poisoned, and not a byte more than was asked for.
    const auto bytes = plan.WorkspaceBytes(rows, executor.num_workers());
    EXPECT_EQ(bytes.status(), absl::OkStatus());
    GuardBuffer<float> memory(RoundUp(*bytes, AlignedBuffer::kAlignment) / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
    std::vector<C> dense = out.ToDense();
    for (int64_t i = 0; i < cols; ++i) {
      EXPECT_TRUE(IsPoison(dense[static_cast<size_t>(rows * cols + i)]))
          << "column " << i << " of the row behind the last";
    }
    dense.resize(static_cast<size_t>(rows * cols));
    return dense;
  }

  // What the plans of the groups give, group by group.
  template <typename A, typename C>
  std::vector<C> Want(const Groups& groups, Shape s, const Counts& counts,
                      const std::vector<A>& a,
                      const std::vector<int32_t>& index,
                      int64_t rows_per_index) {
    const std::vector<int32_t> offsets = OffsetsOf(counts);
    std::vector<C> want;
    for (size_t g = 0; g < counts.size(); ++g) {
      std::vector<A> rows;
      for (int32_t r = offsets[g]; r < offsets[g + 1]; ++r) {
        const int64_t from =
            index.empty() ? r : index[static_cast<size_t>(r)] / rows_per_index;
        rows.insert(rows.end(), a.begin() + from * s.k,
                    a.begin() + (from + 1) * s.k);
      }
      s.m = counts[g];
      if (s.m == 0) continue;
      const auto c = RunLinear<A, C>(groups.alone[g], s, rows, inline_);
      want.insert(want.end(), c.begin(), c.end());
    }
    return want;
  }

  // Rows of a in any order, some of them twice.
  template <typename A, typename C>
  void ExpectRowsOfTheirGroups(WeightCase format, const Shape& s,
                               const Counts& counts) {
    TestRng rng;
    const Groups groups = MakeGroups<A, C>(rng, format, s, counts.size());
    const GroupedLinearPlan plan = Plan<A, C>(groups, s.act);
    const int64_t rows = OffsetsOf(counts).back();
    constexpr int64_t kPerIndex = 3;
    const int64_t a_rows = rows / 2 + 1;
    const auto a = UniformReals<A>(rng, a_rows * s.k);
    std::vector<int32_t> index;
    for (int64_t r = 0; r < rows; ++r) {
      index.push_back(
          static_cast<int32_t>(rng.Integer(0, a_rows * kPerIndex - 1)));
    }
    const auto want = Want<A, C>(groups, s, counts, a, index, kPerIndex);
    for (const int workers : {1, 2, 3, 64}) {
      ManyWorkers executor(workers);
      EXPECT_TRUE(AllBitsEqual(
          Run<A, C>(plan, s, counts, a, index, kPerIndex, executor), want))
          << workers << " workers";
    }
  }

  InlineExecutor inline_;
};
QUERN_INSTANTIATE_ISA_TEST(GroupedLinearTest);

// Weights in double, too, because the plans of the groups share the code that
// reorders a row of a. Every group has an order of its own.
TEST_P(GroupedLinearTest, FollowsTheActOrderOfEachGroup) {
  TestRng rng;
  const Counts counts = {0, 1, 5, 17, 3, 0, 40};
  for (const bool zeros : {false, true}) {
    for (const int64_t k : {64, 200, 608}) {  // 200: the last group has 8
      SCOPED_TRACE(testing::Message() << "k=" << k << " zeros " << zeros);
      Shape s{0, 40, k};
      s.padding = 3;
      s.bias = true;
      std::vector<KnownWeights> known;
      std::vector<LinearWeights> weights;
      for (size_t g = 0; g < counts.size(); ++g) {
        known.push_back(ExactWeights(
            rng, {WeightFormat::kI4Group, WeightLayout::kNK, zeros}, s, 7, 2));
        for (int64_t i = 0; i < k; ++i) {
          known[g].g_idx.push_back(static_cast<int32_t>(i / 32));
        }
        rng.Shuffle(known[g].g_idx);
        weights.push_back(known[g].Pack(inline_));
      }
      GroupedLinearSpec spec;
      spec.a = DType::kBF16;
      spec.c = DType::kF32;
      const auto plan = GroupedLinearPlan::Create(spec, weights);
      ASSERT_EQ(plan.status(), absl::OkStatus());
      EXPECT_RAN_ON(*plan);
      const int64_t rows = OffsetsOf(counts).back();
      const auto a = SmallIntegers<BF>(rng, rows * k, -4, 4);
      const std::vector<double> values = ToDoubles(a);
      std::vector<double> want;
      auto from = values.begin();
      for (size_t g = 0; g < counts.size(); ++g) {
        const auto to = from + static_cast<ptrdiff_t>(counts[g] * k);
        const auto part =
            ProductOf(known[g], counts[g], std::vector<double>(from, to));
        want.insert(want.end(), part.begin(), part.end());
        from = to;
      }
      for (const int workers : {1, 3, 64}) {
        ManyWorkers executor(workers);
        EXPECT_TRUE(
            AllEqual(Run<BF, float>(*plan, s, counts, a, {}, 1, executor),
                     RoundedTo<float>(want)))
            << workers << " workers";
      }
    }
  }
}

// Groups of no row, of one tile, of several tiles, and of more rows than one
// block has.
const Counts& FewAndMany() {
  static const auto& counts = *new Counts{0, 1, 0, 5, 17, 40, 3, 0};
  return counts;
}

TEST_P(GroupedLinearTest, EveryFormatGivesTheBitsOfItsLinears) {
  for (const WeightCase& format : kEveryFormat) {
    SCOPED_TRACE(testing::Message() << format);
    Shape s{0, 72, 608};
    s.padding = 5;
    s.bias = true;
    ExpectRowsOfTheirGroups<BF, float>(format, s, FewAndMany());
  }
}

TEST_P(GroupedLinearTest, EveryGatedFormatGivesTheBitsOfItsLinears) {
  for (const WeightCase& format : kEveryFormat) {
    SCOPED_TRACE(testing::Message() << format);
    Shape s{0, 104, 64};
    s.act = Act::kSiluAndMul;
    s.bias = true;
    ExpectRowsOfTheirGroups<BF, BF>(format, s, FewAndMany());
    ExpectRowsOfTheirGroups<float, Float16>(format, s, FewAndMany());
  }
}

TEST_P(GroupedLinearTest, ManyRowsOfOneGroupAreSeveralBlocks) {
  for (const WeightCase format :
       {WeightCase{WeightFormat::kBF16}, WeightCase{WeightFormat::kI8Channel},
        WeightCase{WeightFormat::kI4Group, WeightLayout::kNK, true}}) {
    SCOPED_TRACE(testing::Message() << format);
    const Shape s{0, 40, 64};
    ExpectRowsOfTheirGroups<BF, float>(format, s, {3, 257, 0, 519, 256});
  }
}

TEST_P(GroupedLinearTest, EveryFewRows) {
  Shape s{0, 33, 70};
  s.shift = 1;
  for (int64_t rows = 1; rows <= 30; ++rows) {
    ExpectRowsOfTheirGroups<float, float>({WeightFormat::kBF16}, s,
                                          {rows, 1, 31 - rows});
  }
}

// Tiles of unequal sizes leave gaps between the packed rows of a group, so that
// the group ends beyond its number of rows, where the next one must not begin.
TEST_P(GroupedLinearTest, GroupsWhoseTilesLeaveGapsLieApart) {
  const Shape s{0, 33, 70};
  for (const WeightCase format :
       {WeightCase{WeightFormat::kF32}, WeightCase{WeightFormat::kI8Channel},
        WeightCase{WeightFormat::kI4Group, WeightLayout::kNK, true}}) {
    for (int64_t rows = 13; rows <= 47; ++rows) {
      SCOPED_TRACE(testing::Message() << format << ", " << rows << " rows");
      ExpectRowsOfTheirGroups<float, float>(format, s, {rows, 2, rows, 1});
    }
  }
}

TEST_P(GroupedLinearTest, WithoutAnIndexRowsOfAAreThoseOfC) {
  TestRng rng;
  const Shape s{0, 48, 96};
  const Counts counts = {4, 0, 9};
  const Groups groups =
      MakeGroups<BF, float>(rng, {WeightFormat::kBF16}, s, counts.size());
  const auto plan = Plan<BF, float>(groups, s.act);
  const auto a = UniformReals<BF>(rng, 13 * s.k);
  EXPECT_TRUE(AllBitsEqual(Run<BF, float>(plan, s, counts, a, {}, 1, inline_),
                           Want<BF, float>(groups, s, counts, a, {}, 1)));
}

TEST_P(GroupedLinearTest, ThreadsChangeNoBit) {
  TestRng rng;
  // Rows enough that packing is divided, too.
  const Shape s{0, 320, 512};
  const Counts counts = {400, 0, 70, 1, 19, 2};
  for (const WeightCase format :
       {WeightCase{WeightFormat::kBF16}, WeightCase{WeightFormat::kI8Channel},
        WeightCase{WeightFormat::kI4Group, WeightLayout::kNK, true}}) {
    SCOPED_TRACE(testing::Message() << format);
    const Groups groups = MakeGroups<BF, float>(rng, format, s, counts.size());
    const auto plan = Plan<BF, float>(groups, s.act);
    const auto a = UniformReals<BF>(rng, 492 * s.k);
    const auto want = Run<BF, float>(plan, s, counts, a, {}, 1, inline_);
    for (const int workers : {2, 5}) {
      const auto executor = Workers(workers);
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(AllBitsEqual(
            Run<BF, float>(plan, s, counts, a, {}, 1, *executor), want));
      }
    }
  }
}

TEST_P(GroupedLinearTest, NoRowsAreNoWork) {
  TestRng rng;
  const Shape s{0, 16, 16};
  const Groups groups = MakeGroups<BF, float>(rng, {WeightFormat::kBF16}, s, 2);
  const auto plan = Plan<BF, float>(groups, s.act);
  const std::vector<BF> a(static_cast<size_t>(s.k));
  EXPECT_TRUE((Run<BF, float>(plan, s, {0, 0}, a, {}, 1, inline_).empty()));
  GroupedLinearArgs args;
  const int32_t offsets[] = {0, 0, 0};
  args.a = MatrixView<const BF>(nullptr, {0, s.k}, {s.k, 1});
  args.c = MatrixView<float>(nullptr, {0, s.n}, {s.n, 1});
  args.offsets = DenseVector(offsets, 3);
  EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
  plan.Execute(args, Workspace(), inline_);
}

TEST_P(GroupedLinearTest, BytesNeverFall) {
  TestRng rng;
  for (const WeightCase& format : kEveryFormat) {
    const Shape s{0, 48, 608};
    const Groups groups = MakeGroups<BF, float>(rng, format, s, 3);
    const auto plan = Plan<BF, float>(groups, s.act);
    int64_t fewer_rows[65] = {};
    for (const int64_t rows : {0, 1, 2, 14, 27, 28, 29, 255, 256, 257, 4000}) {
      int64_t bytes = 0;
      for (int workers = 1; workers <= 64; workers += 3) {
        const auto more = plan.WorkspaceBytes(rows, workers);
        ASSERT_EQ(more.status(), absl::OkStatus());
        EXPECT_GE(*more, bytes) << rows << " rows, " << workers << " workers";
        EXPECT_GE(*more, fewer_rows[workers]);
        bytes = fewer_rows[workers] = *more;
      }
    }
  }
}

}  // namespace
}  // namespace quern
