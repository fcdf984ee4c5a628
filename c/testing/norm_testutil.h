#ifndef QUERN_C_TESTING_NORM_TESTUTIL_H_
#define QUERN_C_TESTING_NORM_TESTUTIL_H_

// Test utility: one operator of the C interface, and what C++ computes.

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

// rms_norm of x[kRows, kHidden] with a weight, and its operands.
class NormInC : public testing::Test {
 protected:
  // Enough for several tasks (core/threads/parallel_rows.h).
  static constexpr int64_t kRows = 70, kHidden = 600;

  NormInC() : x_(kRows * kHidden), weight_(kHidden), out_(kRows * kHidden) {
    for (int64_t i = 0; i < x_.size(); ++i) {
      x_[i] = static_cast<float>(i % 13 - 6) / 4;
    }
    for (int64_t i = 0; i < kHidden; ++i) {
      weight_[i] = 1 + static_cast<float>(i % 3);
    }
    const quern_argument arguments[] = {
        quern_tensor_argument("x", x_in_c_.get()),
        quern_tensor_argument("weight", weight_in_c_.get()),
        quern_float_argument("eps", 1e-5)};
    EXPECT_C_OK(quern_op_create(library_.get(), "rms_norm", nullptr, arguments,
                                3, &op_),
                library_.get());
  }

  quern_status Execute(quern_executor* executor = nullptr) {
    return quern_op_execute(op_, operands_.data(), operands_.size(), nullptr, 0,
                            executor);
  }
  std::vector<float> InCpp() const {
    RmsNormSpec spec;
    spec.hidden = kHidden;
    spec.eps = 1e-5f;
    const auto plan = RmsNormPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    std::vector<float> out(kRows * kHidden);
    InlineExecutor executor;
    plan->Execute(DenseMatrix<const float>(x_.data(), kRows, kHidden),
                  DenseVector<const float>(weight_.data(), kHidden),
                  DenseMatrix(out.data(), kRows, kHidden), executor);
    return out;
  }

  GuardBuffer<float> x_, weight_, out_;
  TensorInC x_in_c_{DType::kF32, x_.data(), {kRows, kHidden}};
  TensorInC weight_in_c_{DType::kF32, weight_.data(), {kHidden}};
  TensorInC out_in_c_{DType::kF32, out_.data(), {kRows, kHidden}};
  std::vector<quern_operand> operands_ = {
      {"x", x_in_c_.get(), QUERN_READ_ONLY},
      {"weight", weight_in_c_.get(), QUERN_READ_ONLY},
      {"out", out_in_c_.get(), 0}};
  LibraryInC library_;
  quern_op* op_ = nullptr;
};

}  // namespace quern

#endif  // QUERN_C_TESTING_NORM_TESTUTIL_H_
