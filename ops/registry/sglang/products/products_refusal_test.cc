// What SGLang's products of packed weights refuse, when they are made and when
// they pack.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang/products/product_ops.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class SglangProductsRefusalTest : public ::testing::Test {
 protected:
  SglangProductsRefusalTest() {
    EXPECT_EQ(RegisterSglangLinearOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangProductOps(registry_), absl::OkStatus());
  }
  absl::StatusOr<MadeOp> Make(const char* name, const NamedArgs& args) {
    return OpDispatcher(registry_, OpPolicy()).Make(name, args);
  }

  // Packs int4 weights of 32 columns and `k` rows of one group, whose zero
  // points are all `zero`.
  absl::Status PackInt4(int64_t k, int8_t zero) {
    const int64_t bytes = 16 * k + 128;  // of a panel
    const std::vector<int64_t> w = {1, 1, bytes}, one = {1, 1, 32};
    QUERN_ASSIGN_OR_RETURN(MadeOp made,
                           Make("int4_scaled_mm_cpu",
                                {{"x", TensorMeta{DType::kF32, {4, k}}},
                                 {"w", TensorMeta{DType::kU8, w}},
                                 {"w_zeros", TensorMeta{DType::kI8, one}},
                                 {"w_scales", TensorMeta{DType::kF32, one}}}));
    std::vector<float> x(static_cast<size_t>(4 * k)), scales(32, 1), y(4 * 32);
    std::vector<uint8_t> codes(static_cast<size_t>(bytes));
    const std::vector<int8_t> zeros(32, zero);
    const auto panel = [](DType dtype, const void* data, int64_t n) {
      return AnyTensorView(dtype, data, 3, {1, 1, n}, {n, n, 1});
    };
    InlineExecutor executor;
    return made.op->Prepare({DenseMatrix<const float>(x.data(), 4, k),
                             panel(DType::kU8, codes.data(), bytes),
                             panel(DType::kI8, zeros.data(), 32),
                             panel(DType::kF32, scales.data(), 32),
                             {},
                             DenseMatrix<float>(y.data(), 4, 32)},
                            executor);
  }

  OpRegistry registry_;
};

TEST_F(SglangProductsRefusalTest, Int4WeightsWithoutRows) {
  EXPECT_EQ(PackInt4(0, 8).code(), absl::StatusCode::kInvalidArgument);
}

// Zero points of 16 are those of GPTQ, whose words hold eight rows.
TEST_F(SglangProductsRefusalTest, ZeroPointsThatNoFormatHas) {
  for (const int64_t k : {4, 12}) {
    ExpectRefusal(PackInt4(k, 16),
                  absl::StrCat("k=", k, "; need a multiple of 8"));
  }
  for (const int8_t zero : {-1, 17}) {
    EXPECT_EQ(PackInt4(16, zero).code(), absl::StatusCode::kInvalidArgument)
        << int{zero};
  }
  EXPECT_EQ(PackInt4(16, 16), absl::OkStatus());
  EXPECT_EQ(PackInt4(16, 0), absl::OkStatus());
}

}  // namespace
}  // namespace quern
