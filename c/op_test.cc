// Operators through the C interface: their bits, tensors and shapes.

#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/norm_testutil.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using OpTest = NormInC;

TEST_F(OpTest, HasTheBitsOfTheCppOperator) {
  ASSERT_C_OK(Execute(), op_);
  EXPECT_EQ(out_.ToVector(), InCpp());
}

TEST_F(OpTest, TakesOperandsInAnyOrder) {
  std::swap(operands_[0], operands_[2]);
  ASSERT_C_OK(Execute(), op_);
  EXPECT_EQ(out_.ToVector(), InCpp());
}

TEST_F(OpTest, AddsTheByteOffset) {
  x_in_c_->data = reinterpret_cast<char*>(x_.data()) - 4096;
  x_in_c_->byte_offset = 4096;
  ASSERT_C_OK(Execute(), op_);
  EXPECT_EQ(out_.ToVector(), InCpp());
}

TEST_F(OpTest, FollowsStrides) {
  std::vector<float> wide(kRows * (kHidden + 5), -1.0f);
  int64_t strides[] = {kHidden + 5, 1};
  out_in_c_->data = wide.data();
  out_in_c_->strides = strides;
  ASSERT_C_OK(Execute(), op_);
  const std::vector<float> want = InCpp();
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kHidden + 5; ++i) {
      EXPECT_EQ(wide[r * (kHidden + 5) + i],
                i < kHidden ? want[r * kHidden + i] : -1.0f);
    }
  }
}

TEST_F(OpTest, AllocatesNothing) {
  ASSERT_C_OK(Execute(), op_);
  quern_status status = QUERN_INTERNAL;
  EXPECT_NO_ALLOCATION(status = Execute());
  EXPECT_C_OK(status, op_);
}

TEST_F(OpTest, TellsShapesOfReturnedTensors) {
  quern_tensor returned;
  ASSERT_C_OK(quern_op_returned(op_, 0, &returned), op_);
  EXPECT_EQ(returned.ndim, 2);
  EXPECT_EQ(returned.shape[0], kRows);
  EXPECT_EQ(returned.shape[1], kHidden);
  EXPECT_EQ(returned.dtype.code, QUERN_CODE_FLOAT);
  EXPECT_EQ(returned.dtype.bits, 32);
  ExpectRefused(quern_op_returned(op_, 1, &returned), op_, QUERN_NOT_FOUND,
                "index=1; it returns 1 tensors");
  ExpectRefused(quern_op_returned(op_, 0, nullptr), op_, QUERN_INVALID_ARGUMENT,
                "tensor is null");
}

TEST_F(OpTest, TakesTheProviderThatIsNamed) {
  const quern_argument x = quern_tensor_argument("x", x_in_c_.get());
  quern_op* op = nullptr;
  quern_op_options options = {sizeof(options), "reference"};
  ASSERT_C_OK(quern_op_create(library_.get(), "rms_norm", &options, &x, 1, &op),
              library_.get());
  EXPECT_EQ(ExplanationOf(op), "rms_norm of reference: scalar");
  options.provider = "cuda";
  ExpectRefused(
      quern_op_create(library_.get(), "rms_norm", &options, &x, 1, &op),
      library_.get(), QUERN_NOT_FOUND, "no provider \"cuda\"");
}

}  // namespace
}  // namespace quern
