#ifndef QUERN_GEMM_TESTING_RUN_H_
#define QUERN_GEMM_TESTING_RUN_H_

// Plans on known weights, Execute in guarded and poisoned memory, and the
// properties that every format has.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
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
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/block_format.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {

template <typename A, typename C>
LinearSpec SpecOf(LinearActivation act = LinearActivation::kNone) {
  LinearSpec spec;
  spec.a = DTypeOf<A>;
  spec.c = DTypeOf<C>;
  spec.activation = act;
  return spec;
}

// Rows of int8 in blocks.
template <typename A, typename C>
LinearSpec Int8Spec(LinearActivation act = LinearActivation::kNone) {
  LinearSpec spec = SpecOf<A, C>(act);
  spec.activations = LinearActivations::kInt8Blocks;
  return spec;
}

// c for the s.m rows of a, which lie as s says; residual is dense, and goes
// where s.residual says. n and k are the plan's.
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

// A plan of the packed implementation on these weights.
inline LinearPlan PackedPlan(const LinearWeights& weights,
                             LinearSpec spec = {}) {
  InlineExecutor executor;
  spec.kernels = "packed";
  auto plan = LinearPlan::Create(spec, weights, executor);
  EXPECT_EQ(plan.status(), absl::OkStatus());
  return *std::move(plan);
}

// c of PackedPlan for m rows of a. Gated weights run with silu_and_mul.
inline std::vector<float> RunPacked(const LinearWeights& weights, int64_t m,
                                    const std::vector<BFloat16>& a) {
  InlineExecutor executor;
  const auto spec = SpecOf<BFloat16, float>(weights.spec().gated
                                                ? LinearActivation::kSiluAndMul
                                                : LinearActivation::kNone);
  return RunLinear<BFloat16, float>(PackedPlan(weights, spec), {m}, a,
                                    executor);
}

inline std::vector<uint8_t> BytesOf(const LinearWeights& weights) {
  return {weights.bytes().begin(), weights.bytes().end()};
}

// Rows whose blocks have a scale of 1, and few numbers that are not 0.
template <typename A>
std::vector<A> IntegerRows(Rng& rng, int64_t count) {
  std::vector<A> a(static_cast<size_t>(count));
  for (size_t at = 0; at < a.size(); at += 32) {
    const auto place = [&] { return at + rng.Next() % 32; };
    a[place()] = FromDouble<A>(static_cast<double>(rng.Integer(-3, 3)));
    a[place()] = FromDouble<A>(rng.Next() % 2 == 0 ? 127 : -127);
  }
  return a;
}

// Neither threads, nor the rows beside it, nor strides, nor whether it is added
// to c or to a copy of it, nor whether codes are decoded in registers change a
// row of s.m.
template <typename A>
void ExpectRowsAlone(const LinearPlan& plan, Shape s, Rng& rng) {
  const int64_t cols = ColumnsOfC(plan.spec().activation, plan.n());
  const auto a = UniformReals<A>(rng, s.m * plan.k());
  const auto residual =
      UniformReals<float>(rng, s.residual == Residual::kNone ? 0 : s.m * cols);
  const auto rows_of = [](const auto& from, int64_t first, int64_t rows,
                          int64_t row_cols) {
    if (from.empty()) return from;
    return std::decay_t<decltype(from)>(
        from.begin() + first * row_cols,
        from.begin() + (first + rows) * row_cols);
  };
  InlineExecutor executor;
  const auto batch = RunLinear<A, float>(plan, s, a, executor, {}, residual);
  if (s.residual == Residual::kApart) s.residual = Residual::kInPlace;
  const auto threads = Workers(2);
  ManyWorkers two(2), three(3), five(5), many(64);
  for (Executor* workers :
       std::vector<Executor*>{threads.get(), &two, &three, &many}) {
    EXPECT_TRUE(AllBitsEqual(
        RunLinear<A, float>(plan, s, a, *workers, {}, residual), batch))
        << workers->num_workers() << " workers";
  }
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 9, 16, 17}) {
    for (const int64_t first :
         {int64_t{0}, int64_t{3}, int64_t{5}, s.m - rows}) {
      Shape part = s;
      part.m = rows;
      part.padding = 3;
      for (Executor* workers : std::vector<Executor*>{&five, &many}) {
        EXPECT_TRUE(AllBitsEqual(
            RunLinear<A, float>(plan, part, rows_of(a, first, rows, plan.k()),
                                *workers, {},
                                rows_of(residual, first, rows, cols)),
            rows_of(batch, first, rows, cols)))
            << rows << " rows from " << first;
      }
    }
  }
}

inline std::vector<double> NotFinite() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return {std::nan(""), kInfinity, -kInfinity};
}

// Each of `values` at element `at` of row 1 of a, which has more rows, changes
// that row of c alone; spoilt(c, value) says whether c is as it must be there.
template <typename A, typename Spoilt>
void ExpectStaysInItsRow(const LinearPlan& plan, std::vector<A> a, int64_t at,
                         const std::vector<double>& values,
                         const Spoilt& spoilt) {
  InlineExecutor executor;
  const int64_t n = plan.n(), k = plan.k();
  const Shape s{static_cast<int64_t>(a.size()) / k};
  const auto clean = RunLinear<A, float>(plan, s, a, executor);
  for (const double value : values) {
    a[static_cast<size_t>(k + at)] = FromDouble<A>(value);
    const auto got = RunLinear<A, float>(plan, s, a, executor);
    for (int64_t i = 0; i < s.m * n; ++i) {
      const float c = got[static_cast<size_t>(i)];
      if (i / n == 1) {
        EXPECT_TRUE(spoilt(c, value)) << i << ": " << c << " of " << value;
      } else {
        EXPECT_EQ(c, clean[static_cast<size_t>(i)]) << i;
      }
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
  const auto want = RunLinear<A, C>(plan, {m}, a, alone);
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

// Makes plans whose packed weights lie before a guard page.
class LinearTest : public IsaTest {
 protected:
  LinearPlan Plan(const LinearSpec& spec, const LinearWeights& packed) {
    const auto bytes = BytesOf(packed);
    const auto size = static_cast<int64_t>(bytes.size());
    packed_.push_back(std::make_unique<GuardBuffer<uint8_t>>(
        bytes, Edge::kEnd, RoundUp(size, LinearWeights::kAlignment) - size));
    const auto adopted =
        LinearWeights::Adopt({packed_.back()->data(), bytes.size()});
    EXPECT_EQ(adopted.status(), absl::OkStatus());
    auto plan = LinearPlan::Create(spec, *adopted, inline_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_EQ(plan->packed_bytes(), size);
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
  LinearPlan Plan(const LinearSpec& spec, KnownWeights weights) {
    weights.spec.gated = IsGated(spec.activation);
    return Plan(spec, weights.Pack(inline_));
  }

  // Expects the product of these rows, whose every step but the last rounding
  // must be exact.
  template <typename A, typename C>
  void ExpectExact(const LinearPlan& plan, const KnownWeights& w,
                   const Shape& s, const std::vector<A>& a,
                   Executor& executor) {
    EXPECT_TRUE(AllEqual(RunLinear<A, C>(plan, s, a, executor),
                         RoundedTo<C>(ProductOf(w, s.m, ToDoubles(a)))))
        << DTypeName(DTypeOf<A>) << " to " << DTypeName(DTypeOf<C>) << " " << s
        << " " << plan.Explain(s.m);
  }

  // Expects the exact product of random integers: weights in blocks of the
  // format, and rows that int8 represents.
  template <typename A, typename C>
  void ExpectExactBlocks(const LinearSpec& spec, BlockFormat format,
                         const Shape& s, Executor& executor) {
    SCOPED_TRACE(InfoOf(format).name);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const KnownWeights w = IntegerBlockWeights(rng, format, s.n, s.k);
    ExpectExact<A, C>(Plan(spec, w), w, s, IntegerRows<A>(rng, s.m * s.k),
                      executor);
  }

  // Expects the bits of this CPU's best instruction set. Integers are exact and
  // every sum in f32 is one chain, so that all with a fused multiply-add agree.
  void ExpectBitsOfTheBest(const LinearWeights& packed, Rng& rng) {
    const LinearSpec spec = Int8Spec<BFloat16, float>();
    const auto best =
        OnTheBestIsa([&] { return LinearPlan::Create(spec, packed, inline_); });
    ASSERT_EQ(best.status(), absl::OkStatus());
    const auto plan = Plan(spec, packed);
    if (std::string(isa()).rfind("AVX", 0) != 0) return;
    for (const int64_t m : {1, 4, 21}) {
      const auto a = UniformReals<BFloat16>(rng, m * plan.k());
      EXPECT_TRUE(
          AllBitsEqual(RunLinear<BFloat16, float>(plan, {m}, a, inline_),
                       RunLinear<BFloat16, float>(*best, {m}, a, inline_)))
          << plan.Explain(m) << "; " << best->Explain(m);
    }
  }

  // Expects that GroupedLinearPlan has the bits of layers of f32 rows, on
  // weights that make() returns, anew for each group.
  template <typename Make>
  void ExpectGroupsHaveTheBitsOfLayers(const LinearSpec& spec, Rng& rng,
                                       const Make& make) {
    ManyWorkers many(3);
    std::vector<LinearWeights> weights;
    std::vector<float> a, want;
    std::vector<int32_t> offsets = {0};
    for (const int64_t count : {2, 0, 9, 1, 3, 70, 5}) {
      weights.push_back(make().Pack(inline_));
      const auto plan = Plan(spec, weights.back());
      const auto rows = UniformReals<float>(rng, count * plan.k());
      a.insert(a.end(), rows.begin(), rows.end());
      const auto alone = RunLinear<float, float>(plan, {count}, rows, inline_);
      want.insert(want.end(), alone.begin(), alone.end());
      offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    }
    GroupedLinearSpec grouped;
    grouped.a = grouped.c = DType::kF32;
    grouped.activations = spec.activations;
    const auto plan = GroupedLinearPlan::Create(grouped, weights);
    ASSERT_EQ(plan.status(), absl::OkStatus());
    EXPECT_EQ(plan->WorkspaceBytes(0, 1).status(), absl::OkStatus());
    const int64_t rows = offsets.back();
    std::vector<float> c(want.size());
    GroupedLinearArgs args;
    args.a = DenseMatrix(a.data(), rows, plan->k());
    args.c = DenseMatrix(c.data(), rows, plan->n());
    args.offsets = DenseVector<const int32_t>(
        offsets.data(), static_cast<int64_t>(offsets.size()));
    const auto bytes = plan->WorkspaceBytes(rows, many.num_workers());
    ASSERT_EQ(bytes.status(), absl::OkStatus());
    GuardBuffer<float> memory(RoundUp(*bytes, AlignedBuffer::kAlignment) / 4);
    plan->Execute(args, Workspace(memory.data(), static_cast<size_t>(*bytes)),
                  many);
    EXPECT_TRUE(AllBitsEqual(c, want));
  }

  InlineExecutor inline_;

 private:
  std::vector<std::unique_ptr<GuardBuffer<uint8_t>>> packed_;
};

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_RUN_H_
