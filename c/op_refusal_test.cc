// What operators of the C interface refuse, by tables.

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/norm_testutil.h"
#include "quern/testing/guard_buffer.h"

namespace quern {
namespace {

using OpRefusalTest = NormInC;

// What Execute refuses, each time from the arguments that it takes.
TEST_F(OpRefusalTest, RefusesWrongOperands) {
  struct Case {
    const char* words;
    std::function<void()> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  int64_t negative[] = {kRows, -1}, columns[] = {1, kRows};
  int64_t short_rows[] = {kRows, kHidden - 1}, backwards[] = {-kHidden, 1},
          repeated[] = {0, 1};
  int64_t huge[] = {int64_t{1} << 62, kHidden};
  const std::vector<Case> cases = {
      {"x has DLPack type code 2, 64 bits, 1 lanes",
       [&] { x_in_c_->dtype.bits = 64; }, QUERN_UNIMPLEMENTED},
      {"x has DLPack type code 17, 4 bits, 2 lanes",
       [&] {
         x_in_c_->dtype = {QUERN_CODE_FLOAT4_E2M1FN, 4, 2};
       },
       QUERN_UNIMPLEMENTED},
      {"x has DLPack type code 2, 32 bits, 4 lanes",
       [&] { x_in_c_->dtype.lanes = 4; }, QUERN_UNIMPLEMENTED},
      {"x is bf16; need f32",
       [&] { x_in_c_->dtype = quern_dtype_of(QUERN_CODE_BFLOAT, 16); }},
      {"x has device_type=2; need 1", [&] { x_in_c_->device.device_type = 2; }},
      {"x has ndim=0; need 1 to 5", [&] { x_in_c_->ndim = 0; }},
      {"x has ndim=6; need 1 to 5", [&] { x_in_c_->ndim = 6; }},
      {"x has a null shape", [&] { x_in_c_->shape = nullptr; }},
      {"x has shape[1]=-1", [&] { x_in_c_->shape = negative; }},
      {"rms_norm: x is [70, 599]; need ", [&] { x_in_c_->shape = short_rows; }},
      {"2^63 elements", [&] { x_in_c_->shape = huge; }},
      {"x has stride 70 in dimension 1; need 1",
       [&] { x_in_c_->strides = columns; }},
      {"out has stride 0 in dimension 0; need 600",
       [&] { out_in_c_->strides = repeated; }},
      {"out overlaps x", [&] { out_in_c_->data = &x_[1]; }},
      {"x has strides[0]=-600", [&] { x_in_c_->strides = backwards; }},
      {"x has byte_offset=8 and null data",
       [&] {
         x_in_c_->data = nullptr;
         x_in_c_->byte_offset = 8;
       }},
      {"beyond the address space",
       [&] { x_in_c_->byte_offset = ~uint64_t{0}; }},
      {"x is not aligned to its elements of 4 bytes",
       [&] { x_in_c_->byte_offset = 2; }},
      {"x is null; need", [&] { x_in_c_->data = nullptr; }},
      {"out is read-only", [&] { operands_[2].flags = QUERN_READ_ONLY; }},
      {"x has flags=2; need 0 or 1", [&] { operands_[0].flags = 2; }},
      {"has no tensor y; need x, weight, out",
       [&] { operands_[2].name = "y"; }},
      {"operand 1 has a null name", [&] { operands_[1].name = nullptr; }},
      {"x is given twice", [&] { operands_[1].name = "x"; }},
      {"out is missing", [&] { operands_.pop_back(); }},
      {"out is missing", [&] { operands_[2].tensor = nullptr; }},
  };
  const std::vector<quern_operand> operands = operands_;
  const quern_tensor x = *x_in_c_.get(), out = *out_in_c_.get();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    c.spoil();
    ExpectRefused(Execute(), op_, c.code, c.words);
    operands_ = operands;
    *x_in_c_.get() = x;
    *out_in_c_.get() = out;
  }
  ExpectRefused(quern_op_execute(op_, nullptr, 2, nullptr, 0, nullptr), op_,
                QUERN_INVALID_ARGUMENT, "operands is null");
  EXPECT_TRUE(IsPoison(out_[0])) << "a refused call wrote";
  EXPECT_C_OK(Execute(), op_);
}

// The order is that of quern_op_execute in quern.h. linear, which needs a
// workspace, is in weights_test.cc.
TEST_F(OpRefusalTest, ReportsTheFirstOfTwoFaults) {
  const auto refuse = [&](const char* words, quern_status code) {
    ExpectRefused(Execute(), op_, code, words);
  };
  // x is an operand, but not one that the operator takes.
  x_in_c_->dtype = quern_dtype_of(QUERN_CODE_BFLOAT, 16);
  refuse("x is bf16; need f32", QUERN_INVALID_ARGUMENT);
  operands_[2].flags = 2;
  refuse("out has flags=2", QUERN_INVALID_ARGUMENT);
  // Both are no operands: the one that is given first.
  x_in_c_->dtype.lanes = 4;
  refuse("x has DLPack type", QUERN_UNIMPLEMENTED);
  std::swap(operands_[0], operands_[2]);
  refuse("out has flags=2", QUERN_INVALID_ARGUMENT);
  // The operator takes neither: the one that its schema has first.
  operands_[0].flags = QUERN_READ_ONLY;
  x_in_c_->dtype = quern_dtype_of(QUERN_CODE_BFLOAT, 16);
  refuse("x is bf16; need f32", QUERN_INVALID_ARGUMENT);
  EXPECT_TRUE(IsPoison(out_[0])) << "a refused call wrote";
}

TEST_F(OpRefusalTest, RefusesWrongArguments) {
  struct Case {
    const char* words;
    std::vector<quern_argument> arguments;
    quern_status code = QUERN_INVALID_ARGUMENT;
    const char* op = "rms_norm";
  };
  const quern_argument x = quern_tensor_argument("x", x_in_c_.get());
  quern_argument reserved = x, unknown = x, not_bool = x;
  reserved.reserved = 1;
  unknown.type = 7;
  not_bool.type = QUERN_ARGUMENT_BOOL;
  not_bool.value.integer = 2;
  alignas(16) char junk[4096] = {};
  const std::vector<Case> cases = {
      {"no operator \"norm\"", {x}, QUERN_NOT_FOUND, "norm"},
      {"name is null", {x}, QUERN_INVALID_ARGUMENT, nullptr},
      {"x is missing", {}},
      {"x is given twice", {x, x}},
      {"has no y", {x, quern_int_argument("y", 1)}},
      {"eps is of another type", {x, quern_text_argument("eps", "1")}},
      {"x is of another type", {quern_int_argument("x", 1)}},
      {"out_dtype is a null text",
       {x, quern_text_argument("out_dtype", nullptr)}},
      {"argument 0 has a null name",
       {quern_tensor_argument(nullptr, x_in_c_.get())}},
      {"x has reserved=1", {reserved}},
      {"x has type=7; need 1 to 6", {unknown}},
      {"x=2 is a bool", {not_bool}},
      {"weight is no object", {x, quern_object_argument("weight", junk)}},
      {"weight is of kind operator", {x, quern_object_argument("weight", op_)}},
      {"num_arguments=65", std::vector<quern_argument>(65, x)},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_op* op = op_;
    const quern_status status =
        quern_op_create(library_.get(), c.op, nullptr, c.arguments.data(),
                        c.arguments.size(), &op);
    ExpectRefused(status, library_.get(), c.code, c.words);
    EXPECT_EQ(op, nullptr);
  }
  quern_op* op = nullptr;
  ExpectRefused(
      quern_op_create(library_.get(), "rms_norm", nullptr, nullptr, 1, &op),
      library_.get(), QUERN_INVALID_ARGUMENT, "arguments is null");
  ExpectRefused(
      quern_op_create(library_.get(), "rms_norm", nullptr, &x, 1, nullptr),
      library_.get(), QUERN_INVALID_ARGUMENT, "the result is null");
  EXPECT_EQ(quern_op_create(nullptr, "rms_norm", nullptr, &x, 1, &op),
            QUERN_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace quern
