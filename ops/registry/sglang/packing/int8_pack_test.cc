#include "quern/ops/registry/sglang/packing/int8_pack.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

class SglangInt8PackTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(SglangInt8PackTest);

// The hash was produced by SGLang's own packing functions, compiled alone
// (commit 2f14d6c6f).
TEST_P(SglangInt8PackTest, ReproducesSglang) {
  const auto plan = SglangInt8PackPlan::Create(64, 64);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_RAN_ON(*plan);
  std::vector<int8_t> values;
  for (int n = 0; n < 64; ++n) {
    for (int k = 0; k < 64; ++k) {
      values.push_back(static_cast<int8_t>((7 * n + 3 * k) % 251 - 125));
    }
  }
  const StridedMatrix<int8_t> w(values, 64, 64, 67);
  GuardBuffer<int32_t> compensation(64);
  GuardBuffer<uint8_t> packed(plan->layout().bytes());
  InlineExecutor executor;
  ASSERT_EQ(plan->CheckArgs(w.view(), compensation.view(), packed.data()),
            absl::OkStatus());
  const MatrixView<const int8_t> view = w.view();
  const VectorView<int32_t> comp = compensation.view();
  EXPECT_NO_ALLOCATION(plan->Pack(view, comp, packed.data(), executor));

  EXPECT_EQ(compensation[0], -249856);
  EXPECT_EQ(compensation[3], -77824);
  int32_t behind_the_block = 0;
  std::memcpy(&behind_the_block, packed.data() + 32 * 64, sizeof(int32_t));
  EXPECT_EQ(behind_the_block, -249856);
  const std::vector<uint8_t> bytes = packed.ToVector();
  EXPECT_EQ(HashOf(std::string(bytes.begin(), bytes.end())),
            0x43784b3c3eb2cb20u);
}

TEST(SglangInt8PackPlanTest, Refuses) {
  const auto expect = [](const absl::Status& status, const char* words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
        << status << "\nlacks: " << words;
  };
  expect(SglangInt8PackPlan::Create(64, 48).status(), "need n % 32 == 0");
  expect(SglangInt8PackPlan::Create(33, 32).status(), "k % 32 == 0");
  expect(SglangInt8PackPlan::Create(131072, 32).status(), "131071");

  const auto plan = SglangInt8PackPlan::Create(32, 32);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<int8_t> w(32 * 32);
  std::vector<int32_t> comp(32);
  std::vector<uint8_t> packed(32 * 36);
  expect(plan->CheckArgs(DenseMatrix<const int8_t>(w.data(), 31, 32),
                         DenseVector(comp.data(), 32), packed.data()),
         "rows of w=31");
  expect(plan->CheckArgs(DenseMatrix<const int8_t>(w.data(), 32, 32),
                         DenseVector(comp.data(), 31), packed.data()),
         "compensation=31");
  const auto good = DenseMatrix<const int8_t>(w.data(), 32, 32);
  expect(
      plan->CheckArgs(MatrixView<const int8_t>(w.data(), {32, 32}, {31, 1}),
                      DenseVector(comp.data(), 32), packed.data()),
      "w has stride 31 in dimension 0; need 32 or more, as its elements must");
  expect(plan->CheckArgs(
             good, DenseVector(reinterpret_cast<int32_t*>(w.data() + 512), 32),
             packed.data()),
         "compensation overlaps w");
  EXPECT_EQ(plan->CheckArgs(good, DenseVector(comp.data(), 32), packed.data()),
            absl::OkStatus());
}

}  // namespace
}  // namespace quern
