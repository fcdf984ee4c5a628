// LinearPlan with hostile arguments, of either implementation: what CheckArgs
// takes, Execute computes; the rest is refused.

#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

// What a may be with weights of 2 and activations of 1: f32 by f32, i8 with
// scales of its own, f32 quantised on the way in, per token and per tensor.
// Every element of c is 2 k.
class LinearArgumentsTest : public testing::TestWithParam<const char*> {
 protected:
  struct Kind {
    WeightFormat format;
    LinearSpec spec;
  };
  bool onednn() const { return std::string(GetParam()) == "onednn"; }
  LinearPlan Plan(LinearSpec spec, const LinearWeights& weights) {
    spec.kernels = GetParam();
    auto plan = LinearPlan::Create(spec, weights, inline_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_STREQ(plan->implementation(), GetParam());
    return *std::move(plan);
  }
  static AlignedBuffer Memory(const LinearPlan& plan, int64_t max_m,
                              const Executor& executor) {
    const auto bytes = plan.WorkspaceBytes(max_m, executor.num_workers());
    EXPECT_EQ(bytes.status(), absl::OkStatus());
    auto memory = AlignedBuffer::Create(*bytes);
    EXPECT_EQ(memory.status(), absl::OkStatus());
    return *std::move(memory);
  }
  static std::vector<Kind> Kinds() {
    std::vector<Kind> kinds(4,
                            {WeightFormat::kI8Channel, SpecOf<float, float>()});
    kinds[0].format = WeightFormat::kF32;
    kinds[1].spec.a = DType::kI8;
    kinds[3].spec.granularity = Int8Granularity::kPerTensor;
    kinds[3].spec.a_scale = 1.0f / 127;
    return kinds;
  }
  template <typename T>
  static MatrixView<T> Matrix(std::vector<T>& data, int64_t rows, int64_t cols,
                              int64_t stride) {
    return {data.data(), {rows, cols}, {stride, 1}};
  }
  LinearPlan PlanOf(const Kind& kind, int64_t n, int64_t k, int64_t stride,
                    WeightLayout layout = WeightLayout::kNK) {
    LinearWeightsSpec spec;
    spec.n = n;
    spec.k = k;
    spec.format = kind.format;
    const bool nk = layout == WeightLayout::kNK;
    LinearSource source;
    source.layout = layout;
    if (kind.format == WeightFormat::kF32) {
      source.codes = Matrix(w_, nk ? n : k, nk ? k : n, stride);
    } else {
      source.codes = Matrix(w8_, nk ? n : k, nk ? k : n, stride);
      source.scales = DenseVector(scales_.data(), 1);
    }
    const auto weights = LinearWeights::Pack(spec, {source}, inline_);
    EXPECT_EQ(weights.status(), absl::OkStatus());
    return Plan(kind.spec, *weights);
  }
  LinearArgs Args(const LinearPlan& plan, int64_t m, int64_t a_stride,
                  int64_t c_stride) {
    LinearArgs args;
    if (plan.spec().a == DType::kI8) {
      args.a = Matrix(q_, m, plan.k(), a_stride);
      args.a_scales = DenseVector(scales_.data(), m);
    } else {
      args.a = Matrix(a_, m, plan.k(), a_stride);
    }
    args.c = Matrix(c_, m, plan.n(), c_stride);
    return args;
  }
  void ExpectAll(float want, int64_t m, int64_t n, int64_t stride) {
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        float& c = c_[static_cast<size_t>(r * stride + i)];
        ASSERT_NEAR(c, want, 1e-5f * want) << "row " << r << " column " << i;
        c = 0;
      }
    }
  }

  InlineExecutor inline_;
  std::vector<float> w_ = std::vector<float>(200, 2.0f);
  std::vector<int8_t> w8_ = std::vector<int8_t>(200, 2);
  std::vector<float> a_ = std::vector<float>(3000, 1.0f);
  std::vector<int8_t> q_ = std::vector<int8_t>(3000, 1);
  std::vector<float> scales_ = std::vector<float>(300, 1.0f);
  std::vector<float> c_ = std::vector<float>(3000);
};
INSTANTIATE_TEST_SUITE_P(Kernels, LinearArgumentsTest,
                         testing::Values("packed", "onednn"));

// The least int64_t is what oneDNN calls a dimension to be told later: it used
// to refuse such weights as Internal.
TEST_P(LinearArgumentsTest, TheStrideOfALoneRowMeansNothing) {
  for (const auto layout : {WeightLayout::kNK, WeightLayout::kKN}) {
    for (const int64_t length : {1, 5, 64}) {
      for (const int64_t stride :
           {int64_t{0}, int64_t{-5}, int64_t{1} << 40, kMost, kLeast}) {
        SCOPED_TRACE(testing::Message()
                     << "[1, " << length << "], stride " << stride << " "
                     << WeightLayoutName(layout));
        const bool nk = layout == WeightLayout::kNK;
        for (const Kind& kind : Kinds()) {
          const auto plan =
              PlanOf(kind, nk ? 1 : length, nk ? length : 1, stride, layout);
          auto memory = Memory(plan, 1, inline_);
          const auto args = Args(plan, 1, stride, stride);
          ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
          plan.Execute(args, Workspace(memory), inline_);
          ExpectAll(2.0f * static_cast<float>(plan.k()), 1, plan.n(), 0);
        }
      }
    }
  }
}

// Rows of a that overlap, or are one row, are fine by the packed kernels.
// oneDNN refuses them; the front of int8 used to let them through to an Execute
// that could not. A workspace for the most rows serves all.
TEST_P(LinearArgumentsTest, WhatCheckArgsTakesExecuteComputes) {
  const int64_t n = 5, k = 6;
  ManyWorkers executor(3);
  for (const Kind& kind : Kinds()) {
    const auto plan = PlanOf(kind, n, k, k);
    auto memory = Memory(plan, 300, executor);
    for (const int64_t m : {2, 4, 17, 300}) {
      for (const int64_t stride : {0, 1, 5, 6, 7}) {
        SCOPED_TRACE(testing::Message() << DTypeName(kind.spec.a) << " m=" << m
                                        << " stride of a=" << stride);
        const auto args = Args(plan, m, stride, n);
        const absl::Status status = plan.CheckArgs(args);
        if (onednn() && stride < k) {
          ExpectRefusal(status, "a.stride(0)=" + std::to_string(stride) +
                                    "; need 6 <= a.stride(0) <= 536870911");
          continue;
        }
        ASSERT_EQ(status, absl::OkStatus());
        plan.Execute(args, Workspace(memory), executor);
        ExpectAll(12.0f, m, n, n);
      }
      ExpectRefusal(plan.CheckArgs(Args(plan, m, k, n - 1)),
                    "c has stride 4 in dimension 0; need 5 or more");
      ExpectRefusal(plan.CheckArgs(Args(plan, m, -k, n)), "a has stride -6");
      ExpectRefusal(plan.CheckArgs(Args(plan, m, k, kLeast)), "c has stride");
      ExpectRefusal(plan.CheckArgs(Args(plan, m, kMost, n)),
                    "need fewer than 2^63 bytes");
      if (onednn()) {
        // Somewhere else, for it spans more than a is away.
        LinearArgs args = Args(plan, m, k, n);
        args.c = MatrixView<float>(reinterpret_cast<float*>(uintptr_t{1} << 46),
                                   {m, n}, {1 << 29, 1});
        ExpectRefusal(plan.CheckArgs(args),
                      "c.stride(0)=536870912; need 5 <= c.stride(0)");
      }
    }
    EXPECT_EQ(plan.CheckArgs(Args(plan, 0, kLeast, kLeast)), absl::OkStatus());
    ExpectRefusal(plan.CheckArgs(Args(plan, -1, k, n)), "a is [-1, 6]");
  }
}

TEST_P(LinearArgumentsTest, RefusesAWorkspaceThatCannotBe) {
  for (const Kind& kind : Kinds()) {
    const auto plan = PlanOf(kind, 5, 6, 6);
    // oneDNN holds the codes of all rows that it quantises.
    const bool all = onednn() && kind.format != WeightFormat::kF32 &&
                     kind.spec.a != DType::kI8;
    for (const int64_t m : {kMost, int64_t{1} << 61}) {
      EXPECT_EQ(
          plan.WorkspaceBytes(m, 1).status().code(),
          all ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk)
          << m;
    }
  }
}

// WorkspaceBytes used to count nothing for oneDNN, whose Execute then
// allocated.
TEST_P(LinearArgumentsTest, ExecuteTakesNoMoreThanWasReserved) {
  ManyWorkers executor(3);
  for (const Kind& kind : Kinds()) {
    const auto plan = PlanOf(kind, 5, 6, 6);
    for (const int64_t most : {300, 17, 1}) {
      // Execute aborts where this is too small.
      auto memory = Memory(plan, most, executor);
      for (const int64_t m : {1, 4, 17, 256, 300}) {
        for (const int64_t stride : {6, 7, 8}) {
          if (m > most) continue;
          plan.Execute(Args(plan, m, stride, stride), Workspace(memory),
                       executor);
          ExpectAll(12.0f, m, 5, stride);
        }
      }
    }
  }
}

// Every thread with another number of rows at the same time, half of them on
// one pool.
TEST_P(LinearArgumentsTest, EightThreadsOnOnePlanGetTheBitsOfOne) {
  TestRng rng;
  const int64_t n = 100, k = 700, most = 300;
  const auto a = UniformReals<BF>(rng, most * k);
  for (const auto format : {WeightFormat::kBF16, WeightFormat::kI8Channel}) {
    const auto plan =
        Plan(SpecOf<BF, BF>(),
             RealWeights(rng, {format}, {most, n, k}).Pack(inline_));
    const auto run = [&](int64_t m, const Workspace& workspace,
                         Executor& executor) {
      std::vector<BF> c(static_cast<size_t>(m * n));
      LinearArgs args;
      args.a = DenseMatrix(a.data(), m, k);
      args.c = DenseMatrix(c.data(), m, n);
      plan.Execute(args, workspace, executor);
      return c;
    };
    const std::vector<int64_t> rows = {1, 3, 17, 64, 257, most};
    std::vector<std::vector<BF>> want;
    AlignedBuffer own = Memory(plan, most, inline_);
    for (const int64_t m : rows) {
      want.push_back(run(m, Workspace(own), inline_));
    }
    const auto pool = Workers(3);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        InlineExecutor alone;
        Executor& executor = t % 2 == 0 ? static_cast<Executor&>(alone) : *pool;
        AlignedBuffer memory = Memory(plan, most, executor);
        for (size_t i = 0; i < 2 * rows.size(); ++i) {
          const size_t at = (i + t) % rows.size();
          EXPECT_TRUE(AllBitsEqual(run(rows[at], Workspace(memory), executor),
                                   want[at]))
              << WeightFormatName(format) << " m=" << rows[at];
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace quern
