#ifndef QUERN_OPS_ACTIVATION_ACT_AND_MUL_TESTUTIL_H_
#define QUERN_OPS_ACTIVATION_ACT_AND_MUL_TESTUTIL_H_

// What the tests of ActAndMulPlan share.

#include <cstdint>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/testing/isa_test.h"

namespace quern {

inline constexpr DType kActAndMulTypes[] = {DType::kF32, DType::kBF16,
                                            DType::kF16};

// Relative error: 10 units by act_and_mul.h, and one for the product with up.
inline constexpr double kActAndMulRelative = 11 * 0x1p-24;
// Absolute error where e^gate is a denormal: half a unit of 2^-149 in the
// exponential, multiplied by at most 128, and as much in the products.
inline constexpr double kActAndMulDenormal = 140 * 0x1p-149;

inline ActAndMulSpec ActAndMulSpecOf(int64_t d, DType x = DType::kF32,
                                     DType out = DType::kF32) {
  ActAndMulSpec spec;
  spec.d = d;
  spec.x_dtype = x;
  spec.out_dtype = out;
  return spec;
}

class ActAndMulFixture : public IsaTest {
 protected:
  ActAndMulPlan Plan(const ActAndMulSpec& spec) {
    auto plan = ActAndMulPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_ACT_AND_MUL_TESTUTIL_H_
