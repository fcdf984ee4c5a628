#ifndef QUERN_OPS_REGISTRY_OP_ARGS_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_OP_ARGS_TESTUTIL_H_

// What the tests share that compare an operator by name with the plan that its
// arguments stand for.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"

namespace quern {

using Floats = std::vector<float>;

inline constexpr int64_t kRows = 3;
inline constexpr int64_t kCols = 16;

inline TensorMeta F32(std::vector<int64_t> extents) {
  return {DType::kF32, std::move(extents)};
}
inline AnyTensorView Matrix(Floats& data, int64_t cols) {
  return DenseMatrix(data.data(), static_cast<int64_t>(data.size()) / cols,
                     cols);
}

class OpArgsFixture : public testing::Test {
 protected:
  OpArgsFixture() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  Floats Reals(int64_t count) {
    return UniformReals<float>(rng_, count, -3, 3);
  }
  // Runs the operator by its default provider, simd.
  void Run(const std::string& name, const NamedArgs& args,
           const std::vector<AnyTensorView>& tensors) {
    SCOPED_TRACE(name);
    const OpDispatcher ops(registry_, OpPolicy());
    const auto made = ops.Make(name, args);
    ASSERT_TRUE(made.ok()) << made.status();
    ASSERT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
    made->op->Execute(tensors, executor_);
  }
  template <class Plan>
  static Plan Made(absl::StatusOr<Plan> plan) {
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  TestRng rng_;
  OpRegistry registry_;
  InlineExecutor executor_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_ARGS_TESTUTIL_H_
