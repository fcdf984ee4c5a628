// gemm/linear.h and gemm/scaled_linear.h: hostile arguments, of either
// implementation. What CheckArgs takes, Execute computes; the rest is refused.

#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/many_workers.h"
#include "testing/refusal.h"
#include "testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

template <typename T>
MatrixView<T> Matrix(std::vector<T>& data, int64_t rows, int64_t cols,
                     int64_t stride) {
  return {data.data(), {rows, cols}, {stride, 1}};
}

// `data`, a byte later.
template <typename T>
AnyTensorView Askew(std::vector<T>& data, int rank,
                    const AnyTensorView::Dims& extents,
                    const AnyTensorView::Dims& strides) {
  return AnyTensorView(
      DTypeOf<T>,
      static_cast<void*>(reinterpret_cast<uint8_t*>(data.data()) + 1), rank,
      extents, strides);
}

// Weights of 2, activations of 1: every element of c is 2 k.
class FrontDoorArgsTest : public testing::TestWithParam<LinearImpl> {
 protected:
  LinearPlan Linear(LinearSpec spec, const AnyTensorView& weights) {
    spec.impl = GetParam();
    auto plan = LinearPlan::Create(spec, weights, AnyTensorView(), inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }
  ScaledLinearPlan Scaled(ScaledLinearSpec spec, const AnyTensorView& weights) {
    spec.impl = GetParam();
    auto plan = ScaledLinearPlan::Create(spec, weights, DenseVector(&one_, 1),
                                         AnyTensorView(), inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  // What a may be: i8 with scales of its own, or f32 quantised on the way in.
  static std::vector<ScaledLinearSpec> Kinds(int64_t n, int64_t k) {
    std::vector<ScaledLinearSpec> specs(3);
    for (ScaledLinearSpec& spec : specs) {
      spec.n = n;
      spec.k = k;
      spec.a = DType::kF32;
      spec.c = DType::kF32;
    }
    specs[0].a = DType::kI8;
    specs[2].granularity = Int8Granularity::kPerTensor;
    specs[2].a_scale = 1.0f / 127;
    return specs;
  }
  ScaledLinearArgs Args(const ScaledLinearSpec& spec, int64_t m,
                        int64_t a_stride, int64_t c_stride) {
    ScaledLinearArgs args;
    if (spec.a == DType::kI8) {
      args.a = Matrix(q_, m, spec.k, a_stride);
      args.a_scales = DenseVector(scales_.data(), m);
    } else {
      args.a = Matrix(a_, m, spec.k, a_stride);
    }
    args.c = Matrix(c_, m, spec.n, c_stride);
    return args;
  }
  // `stride` of c.
  void ExpectAll(float want, int64_t m, int64_t n, int64_t stride) {
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_NEAR(c_[static_cast<size_t>(r * stride + i)], want, 1e-5f * want)
            << "row " << r << " column " << i;
      }
    }
  }

  InlineExecutor inline_;
  const float one_ = 1.0f;
  std::vector<float> w_ = std::vector<float>(200, 2.0f);
  std::vector<int8_t> w8_ = std::vector<int8_t>(200, 2);
  std::vector<float> a_ = std::vector<float>(3000, 1.0f);
  std::vector<int8_t> q_ = std::vector<int8_t>(3000, 1);
  std::vector<float> scales_ = std::vector<float>(300, 1.0f);
  std::vector<float> c_ = std::vector<float>(3000);
};
INSTANTIATE_TEST_SUITE_P(Impl, FrontDoorArgsTest,
                         testing::Values(LinearImpl::kPacked,
                                         LinearImpl::kOneDnn));

// The least int64_t is what oneDNN calls a dimension to be told later: it used
// to refuse such weights as Internal.
TEST_P(FrontDoorArgsTest, TheStrideOfALoneRowMeansNothing) {
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    for (const int64_t length : {1, 5, 64}) {
      for (const int64_t stride :
           {int64_t{0}, int64_t{-5}, int64_t{1} << 40, kMost, kLeast}) {
        SCOPED_TRACE(testing::Message() << "[1, " << length << "], stride "
                                        << stride << ", order " << int(order));
        const bool nk = order == WeightOrder::kNK;
        LinearSpec spec;
        spec.n = nk ? 1 : length;
        spec.k = nk ? length : 1;
        spec.a = spec.b = spec.c = DType::kF32;
        spec.order = order;
        const auto plan = Linear(spec, Matrix(w_, 1, length, stride));
        LinearScratch scratch;
        ASSERT_TRUE(scratch.Reserve(plan, 1, inline_).ok());
        const auto in = Matrix(a_, 1, spec.k, stride);
        const auto out = Matrix(c_, 1, spec.n, stride);
        ASSERT_EQ(plan.CheckArgs(in, out), absl::OkStatus());
        plan.Execute(in, out, scratch, inline_);
        ExpectAll(2.0f * static_cast<float>(spec.k), 1, spec.n, 0);
        for (ScaledLinearSpec scaled : Kinds(spec.n, spec.k)) {
          scaled.order = order;
          const auto scaled_plan =
              Scaled(scaled, Matrix(w8_, 1, length, stride));
          ASSERT_TRUE(scratch.Reserve(scaled_plan, 1, inline_).ok());
          const auto args = Args(scaled, 1, stride, stride);
          ASSERT_EQ(scaled_plan.CheckArgs(args), absl::OkStatus());
          scaled_plan.Execute(args, scratch, inline_);
          ExpectAll(2.0f * static_cast<float>(spec.k), 1, spec.n, 0);
        }
      }
    }
  }
}

// Rows of a that overlap, or are one row, are fine by the packed kernels.
// oneDNN refuses them; the front door of int8 used to let them through to an
// Execute that could not.
TEST_P(FrontDoorArgsTest, WhatCheckArgsTakesExecuteComputes) {
  const int64_t n = 5, k = 6;
  const bool packed = GetParam() == LinearImpl::kPacked;
  ManyWorkers executor(3);
  for (const ScaledLinearSpec& spec : Kinds(n, k)) {
    const auto plan = Scaled(spec, Matrix(w8_, n, k, k));
    LinearScratch scratch;
    ASSERT_TRUE(scratch.Reserve(plan, 300, executor).ok());
    for (const int64_t m : {2, 4, 17, 300}) {
      for (const int64_t stride : {0, 1, 5, 6, 7}) {
        SCOPED_TRACE(testing::Message() << DTypeName(spec.a) << " m=" << m
                                        << " stride of a=" << stride);
        const auto args = Args(spec, m, stride, n);
        const absl::Status status = plan.CheckArgs(args);
        if (!packed && stride < k) {
          ExpectRefusal(status, "a.stride(0)=" + std::to_string(stride) +
                                    "; need 6 <= a.stride(0) <= 536870911");
          continue;
        }
        ASSERT_EQ(status, absl::OkStatus());
        plan.Execute(args, scratch, executor);
        ExpectAll(12.0f, m, n, n);
      }
      ExpectRefusal(plan.CheckArgs(Args(spec, m, k, n - 1)),
                    "c has stride 4 in dimension 0; need 5 or more");
      ExpectRefusal(plan.CheckArgs(Args(spec, m, -k, n)), "a has stride -6");
      ExpectRefusal(plan.CheckArgs(Args(spec, m, k, kLeast)), "c has stride");
      ExpectRefusal(plan.CheckArgs(Args(spec, m, kMost, n)),
                    "need fewer than 2^63 bytes");
      if (!packed) {
        // Somewhere else, for it spans more than a is away.
        ScaledLinearArgs args = Args(spec, m, k, n);
        args.c = MatrixView<float>(reinterpret_cast<float*>(uintptr_t{1} << 46),
                                   {m, n}, {1 << 29, 1});
        ExpectRefusal(plan.CheckArgs(args),
                      "c.stride(0)=536870912; need 5 <= c.stride(0)");
      }
    }
    EXPECT_EQ(plan.CheckArgs(Args(spec, 0, kLeast, kLeast)), absl::OkStatus());
    ExpectRefusal(plan.CheckArgs(Args(spec, -1, k, n)), "a is [-1, 6]");
  }
}

TEST_P(FrontDoorArgsTest, RefusesWhatIsNotAligned) {
  const int64_t n = 5, k = 6, m = 3;
  const std::string words = " is not aligned to its elements of 4 bytes";
  LinearSpec spec;
  spec.n = n;
  spec.k = k;
  spec.a = spec.b = spec.c = DType::kF32;
  spec.impl = GetParam();
  const AnyTensorView none, weights = Matrix(w_, n, k, k);
  ExpectRefusal(
      LinearPlan::Create(spec, Askew(w_, 2, {n, k}, {k, 1}), none, inline_)
          .status(),
      "weights" + words);
  ExpectRefusal(
      LinearPlan::Create(spec, weights, Askew(a_, 1, {n}, {1}), inline_)
          .status(),
      "bias" + words);
  const auto plan = Linear(spec, weights);
  const AnyTensorView in = Matrix(a_, m, k, k), out = Matrix(c_, m, n, n);
  ExpectRefusal(plan.CheckArgs(Askew(a_, 2, {m, k}, {k, 1}), out), "a" + words);
  ExpectRefusal(plan.CheckArgs(in, Askew(c_, 2, {m, n}, {n, 1})), "c" + words);

  ScaledLinearSpec scaled = Kinds(n, k)[0];
  scaled.impl = GetParam();
  const AnyTensorView w8 = Matrix(w8_, n, k, k);
  ExpectRefusal(ScaledLinearPlan::Create(scaled, w8, Askew(a_, 1, {n}, {1}),
                                         none, inline_)
                    .status(),
                "weight_scales" + words);
  const auto scaled_plan = Scaled(scaled, w8);
  ScaledLinearArgs args = Args(scaled, m, k, n);
  args.a_scales = Askew(scales_, 1, {m}, {1});
  ExpectRefusal(scaled_plan.CheckArgs(args), "a_scales" + words);
}

TEST_P(FrontDoorArgsTest, RefusesScratchThatCannotBe) {
  for (const ScaledLinearSpec& spec : Kinds(5, 6)) {
    const auto plan = Scaled(spec, Matrix(w8_, 5, 6, 6));
    LinearScratch scratch;
    ASSERT_TRUE(scratch.Reserve(plan, 20, inline_).ok());
    const size_t bytes = scratch.bytes();
    for (const int64_t m : {int64_t{-1}, kLeast}) {
      ExpectRefusal(
          scratch.Reserve(plan, m, inline_),
          "scaled_linear: max_m=" + std::to_string(m) + "; need max_m >= 0");
    }
    // The packed kernels need scratch of a few hundred rows for any number.
    const bool all = plan.impl() == LinearImpl::kOneDnn && spec.a != DType::kI8;
    for (const int64_t m : {kMost, int64_t{1} << 61, int64_t{1} << 45}) {
      EXPECT_EQ(
          scratch.Reserve(plan, m, inline_).code(),
          all ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk)
          << m;
    }
    EXPECT_GE(scratch.bytes(), bytes);
    const auto args = Args(spec, 20, 6, 5);
    plan.Execute(args, scratch, inline_);
    ExpectAll(12.0f, 20, 5, 5);
  }
}

// Reserve used to count nothing for oneDNN, whose Execute then allocated.
TEST_P(FrontDoorArgsTest, ExecuteTakesNoMoreThanWasReserved) {
  ManyWorkers executor(3);
  const auto run = [&](const auto& plan, LinearScratch& scratch, auto execute) {
    for (const int64_t most : {300, 17, 1}) {
      LinearScratch fresh;
      ASSERT_EQ(fresh.Reserve(plan, most, executor), absl::OkStatus());
      const size_t bytes = fresh.bytes();
      for (const int64_t m : {1, 4, 17, 256, 300}) {
        if (m > most) continue;
        for (const int64_t stride : {6, 7, 8}) execute(m, stride, fresh);
        EXPECT_EQ(fresh.bytes(), bytes) << "m=" << m << " most=" << most;
      }
    }
    ASSERT_EQ(scratch.Reserve(plan, 0, executor), absl::OkStatus());
  };
  LinearSpec spec;
  spec.n = 5;
  spec.k = 6;
  spec.a = spec.b = spec.c = DType::kF32;
  const auto plan = Linear(spec, Matrix(w_, 5, 6, 6));
  LinearScratch scratch;
  run(plan, scratch, [&](int64_t m, int64_t stride, LinearScratch& fresh) {
    plan.Execute(Matrix(a_, m, 6, stride), Matrix(c_, m, 5, stride), fresh,
                 executor);
    ExpectAll(12.0f, m, 5, stride);
  });
  for (const ScaledLinearSpec& scaled : Kinds(5, 6)) {
    const auto scaled_plan = Scaled(scaled, Matrix(w8_, 5, 6, 6));
    run(scaled_plan, scratch,
        [&](int64_t m, int64_t stride, LinearScratch& fresh) {
          scaled_plan.Execute(Args(scaled, m, stride, stride), fresh, executor);
          ExpectAll(12.0f, m, 5, stride);
        });
  }
}

// Every thread with another number of rows at the same time, half of them on
// one pool.
TEST_P(FrontDoorArgsTest, EightThreadsOnOnePlanGetTheBitsOfOne) {
  TestRng rng;
  const int64_t n = 100, k = 700, most = 300;
  const auto w = UniformReals<BF>(rng, n * k);
  const auto w8 = SmallIntegers<int8_t>(rng, n * k, -128, 127);
  const auto a = UniformReals<BF>(rng, most * k);
  LinearSpec spec;
  spec.n = n;
  spec.k = k;
  const auto plan = Linear(spec, DenseMatrix(w.data(), n, k));
  ScaledLinearSpec scaled;
  scaled.n = n;
  scaled.k = k;
  const auto scaled_plan = Scaled(scaled, DenseMatrix(w8.data(), n, k));
  const auto reserve = [&](LinearScratch& scratch, const Executor& executor) {
    EXPECT_TRUE(scratch.Reserve(plan, most, executor).ok());
    EXPECT_TRUE(scratch.Reserve(scaled_plan, most, executor).ok());
  };
  const auto run = [&](int64_t m, LinearScratch& scratch, Executor& executor) {
    std::vector<BF> c(static_cast<size_t>(2 * m * n));
    plan.Execute(DenseMatrix(a.data(), m, k), DenseMatrix(c.data(), m, n),
                 scratch, executor);
    ScaledLinearArgs args;
    args.a = DenseMatrix(a.data(), m, k);
    args.c = DenseMatrix(c.data() + m * n, m, n);
    scaled_plan.Execute(args, scratch, executor);
    return c;
  };
  const std::vector<int64_t> rows = {1, 3, 17, 64, 257, most};
  std::vector<std::vector<BF>> want;
  LinearScratch own;
  reserve(own, inline_);
  for (const int64_t m : rows) want.push_back(run(m, own, inline_));

  const auto pool = Workers(3);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      InlineExecutor alone;
      Executor& executor = t % 2 == 0 ? static_cast<Executor&>(alone) : *pool;
      LinearScratch scratch;
      reserve(scratch, executor);
      for (size_t i = 0; i < 2 * rows.size(); ++i) {
        const size_t at = (i + t) % rows.size();
        EXPECT_TRUE(AllBitsEqual(run(rows[at], scratch, executor), want[at]))
            << "m=" << rows[at];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace quern
