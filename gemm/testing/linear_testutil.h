#ifndef QUERN_GEMM_TESTING_LINEAR_TESTUTIL_H_
#define QUERN_GEMM_TESTING_LINEAR_TESTUTIL_H_

// What the tests of LinearPlan share: Execute in guarded and poisoned memory,
// and properties that every format has.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
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
#include "quern/gemm/testing/known_weights_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// What belongs to the rows of an a that is i8.
struct RowTerms {
  std::vector<float> scales;
  std::vector<int32_t> zero_points;
};

// scale * (q - zero point), row by row.
inline std::vector<double> Dequantised(const std::vector<int8_t>& q,
                                       const RowTerms& rows) {
  std::vector<double> a = ToDoubles(q);
  const size_t k = a.size() / rows.scales.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (!rows.zero_points.empty()) a[i] -= rows.zero_points[i / k];
    a[i] *= double{rows.scales[i / k]};
  }
  return a;
}

template <typename A, typename C>
LinearSpec SpecOf(LinearActivation act = LinearActivation::kNone) {
  LinearSpec spec;
  spec.a = DTypeOf<A>;
  spec.c = DTypeOf<C>;
  spec.activation = act;
  return spec;
}

// c for the s.m rows of a, which lie as s says; residual is dense, and goes
// where s.residual says.
template <typename A, typename C>
std::vector<C> RunLinear(const LinearPlan& plan, const Shape& s,
                         const std::vector<A>& a, Executor& executor,
                         const RowTerms& terms = {},
                         const std::vector<C>& residual = {}) {
  const int64_t cols = ColumnsOfC(plan.spec().activation, plan.n());
  const Edge edge = s.m % 2 == 0 ? Edge::kBegin : Edge::kEnd;
  const StridedMatrix<A> in(a, s.m, plan.k(), plan.k() + s.padding, edge,
                            s.shift);
  StridedMatrix<C> out(s.m, cols, cols + s.padding, edge, s.shift);
  const bool any = !residual.empty();
  const StridedMatrix<C> apart(residual, any ? s.m : 0, cols,
                               cols + 2 * s.padding, edge);
  const GuardBuffer<float> scales(terms.scales);
  const GuardBuffer<int32_t> zero_points(terms.zero_points);
  LinearArgs args;
  args.a = in.view();
  args.c = out.view();
  args.a_scales = scales.view();
  args.a_zero_points = zero_points.view();
  if (any && s.residual == Residual::kApart) args.residual = apart.view();
  if (any && s.residual == Residual::kInPlace) {
    for (int64_t r = 0; r < s.m; ++r) {
      std::copy_n(residual.data() + r * cols, cols, out.view().Row(r));
    }
    args.residual = out.view();
  }
  // Poisoned, and not a byte more than was asked for.
  const auto bytes = plan.WorkspaceBytes(s.m, executor.num_workers());
  EXPECT_EQ(bytes.status(), absl::OkStatus());
  GuardBuffer<float> memory(RoundUp(*bytes, AlignedBuffer::kAlignment) / 4);
  const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
  EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
  if (absl::string_view(plan.implementation()) == "packed") {
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
  } else {
    plan.Execute(args, workspace, executor);
  }
  return out.ToDense();
}

// c of `weights` for rows that are a in double: the bound of each sum, and one
// rounding of what is then there.
template <typename C>
testing::AssertionResult IsWithinBound(const std::vector<C>& c,
                                       const KnownWeights& weights, int64_t m,
                                       const std::vector<double>& a) {
  const auto bounds = weights.Bounds(m, a);
  return AllWithin(c, weights.Product(m, a), [&](double v, int64_t flat) {
    const double sum = bounds[static_cast<size_t>(flat)];
    return sum + UnitRoundoff<C>() * (std::abs(v) + sum);
  });
}

// Neither threads, nor the rows beside it, nor strides, nor whether it is added
// to c or to a copy of it change a row of s.m.
template <typename A>
void ExpectRowsAlone(const LinearPlan& plan, Shape s, Rng& rng) {
  const auto a = UniformReals<A>(rng, s.m * plan.k());
  const auto residual = UniformReals<float>(
      rng, s.residual == Residual::kNone ? 0 : s.m * s.cols());
  const auto rows_of = [](const auto& from, int64_t first, int64_t rows,
                          int64_t cols) {
    if (from.empty()) return from;
    return std::decay_t<decltype(from)>(from.begin() + first * cols,
                                        from.begin() + (first + rows) * cols);
  };
  InlineExecutor executor;
  const auto batch = RunLinear<A, float>(plan, s, a, executor, {}, residual);
  if (s.residual == Residual::kApart) s.residual = Residual::kInPlace;
  for (const int workers : {2, 3, 64}) {
    ManyWorkers many(workers);
    EXPECT_TRUE(AllBitsEqual(
        RunLinear<A, float>(plan, s, a, many, {}, residual), batch))
        << workers << " workers";
  }
  ManyWorkers many(64);
  for (const int64_t rows : {1, 2, 6, 16}) {
    for (const int64_t first : {int64_t{0}, int64_t{5}, s.m - rows}) {
      Shape part = s;
      part.m = rows;
      part.padding = 3;
      EXPECT_TRUE(AllBitsEqual(
          RunLinear<A, float>(plan, part, rows_of(a, first, rows, plan.k()),
                              many, {},
                              rows_of(residual, first, rows, s.cols())),
          rows_of(batch, first, rows, s.cols())))
          << rows << " rows from " << first;
    }
  }
}

// a, c and residual of no rows need no memory.
template <typename A, typename C>
void ExpectNoRowsAreNoWork(const LinearPlan& plan) {
  const int64_t cols = ColumnsOfC(plan.spec().activation, plan.n());
  LinearArgs args;
  args.a = MatrixView<const A>(nullptr, {0, plan.k()}, {plan.k(), 1});
  args.c = MatrixView<C>(nullptr, {0, cols}, {cols, 1});
  InlineExecutor executor;
  for (const AnyTensorView& residual : {AnyTensorView(), args.c}) {
    if (residual.rank() != 0 && !plan.spec().residual) continue;
    args.residual = residual;
    EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
    plan.Execute(args, Workspace(), executor);
  }
}

// Eight threads, each with a workspace of its own, on one plan.
template <typename A, typename C>
void ExpectThreadsAgree(const LinearPlan& plan, int64_t m, Rng& rng) {
  const auto a = UniformReals<A>(rng, m * plan.k());
  InlineExecutor alone;
  Shape s;
  s.m = m;
  const auto want = RunLinear<A, C>(plan, s, a, alone);
  std::vector<std::vector<C>> got(8, std::vector<C>(want.size()));
  std::vector<std::thread> threads;
  for (auto& result : got) {
    threads.emplace_back([&] {
      InlineExecutor executor;
      auto memory = AlignedBuffer::Create(*plan.WorkspaceBytes(m, 1));
      LinearArgs args;
      args.a = DenseMatrix(a.data(), m, plan.k());
      args.c = DenseMatrix(result.data(), m, plan.n());
      for (int i = 0; i < 20; ++i) {
        plan.Execute(args, Workspace(*memory), executor);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : got) EXPECT_TRUE(AllBitsEqual(result, want));
}

class LinearTest : public IsaTest {
 protected:
  LinearPlan Plan(const LinearSpec& spec, const KnownWeights& weights) {
    const LinearWeights packed = weights.Pack(inline_);
    auto plan = LinearPlan::Create(spec, packed, inline_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_EQ(plan->packed_bytes(),
              static_cast<int64_t>(packed.bytes().size()));
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  InlineExecutor inline_;
};

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_LINEAR_TESTUTIL_H_
