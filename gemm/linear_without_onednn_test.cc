// A program that does not link //gemm/onednn, as this one does not: what asks
// for oneDNN is refused, everything else works.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/linear.h"
#include "gemm/linear_backend.h"
#include "gemm/linear_impl.h"
#include "gemm/linear_spec.h"
#include "gemm/scaled_linear.h"
#include "gtest/gtest.h"
#include "testing/refusal.h"

namespace quern {
namespace {

constexpr char kWords[] =
    "impl=onednn, but this program does not link oneDNN; need "
    "@quern//gemm/onednn in its deps";

TEST(LinearWithoutOneDnnTest, ThereIsNoBackend) {
  EXPECT_EQ(OneDnnBackend(), nullptr);
}

TEST(LinearWithoutOneDnnTest, RefusesOneDnnByNameAndRunsThePackedKernels) {
  const std::vector<float> w(6, 2.0f), a(3, 1.0f);
  std::vector<float> c(2);
  InlineExecutor executor;
  LinearSpec spec;
  spec.n = 2;
  spec.k = 3;
  spec.a = spec.b = spec.c = DType::kF32;
  const auto weights = DenseMatrix(w.data(), 2, 3);
  spec.impl = LinearImpl::kOneDnn;
  ExpectRefusal(
      LinearPlan::Create(spec, weights, AnyTensorView(), executor).status(),
      absl::StatusCode::kFailedPrecondition, kWords);
  for (const LinearImpl impl : {LinearImpl::kAuto, LinearImpl::kPacked}) {
    spec.impl = impl;
    const auto plan =
        LinearPlan::Create(spec, weights, AnyTensorView(), executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    LinearScratch scratch;
    ASSERT_EQ(scratch.Reserve(*plan, 1, executor), absl::OkStatus());
    plan->Execute(DenseMatrix(a.data(), 1, 3), DenseMatrix(c.data(), 1, 2),
                  scratch, executor);
    EXPECT_EQ(c, std::vector<float>({6.0f, 6.0f}));
  }
}

TEST(LinearWithoutOneDnnTest, ScaledRefusesOneDnnByName) {
  const std::vector<int8_t> w(6, 2);
  const float scale = 1.0f;
  InlineExecutor executor;
  ScaledLinearSpec spec;
  spec.n = 2;
  spec.k = 3;
  spec.impl = LinearImpl::kOneDnn;
  ExpectRefusal(ScaledLinearPlan::Create(spec, DenseMatrix(w.data(), 2, 3),
                                         DenseVector(&scale, 1),
                                         AnyTensorView(), executor)
                    .status(),
                absl::StatusCode::kFailedPrecondition, kWords);
}

}  // namespace
}  // namespace quern
