#ifndef QUERN_OPS_SPECULATION_NUMBERS_TESTUTIL_H_
#define QUERN_OPS_SPECULATION_NUMBERS_TESTUTIL_H_

// Test utility: a vector or a matrix of whole numbers of i32, i64 or u8, before
// a guard page, with poison between its rows.
//
//   Numbers ids(DType::kI64, {1, 2, 3});          // a vector
//   Numbers table(DType::kI32, {1, 2, 3, 4}, 2);  // two rows of two
//   plan.Execute({ids.view(), table.view()}, executor);
//   EXPECT_EQ(ids.Read(), ...);

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"

namespace quern {

class Numbers {
 public:
  // cols = 0: a vector. `gap`: elements between rows.
  Numbers(DType dtype, const std::vector<int64_t>& values, int64_t cols = 0,
          int64_t gap = 0)
      : Numbers(dtype, values,
                cols == 0 ? static_cast<int64_t>(values.size())
                          : static_cast<int64_t>(values.size()) / cols,
                cols, gap) {}
  Numbers(DType dtype, const std::vector<int64_t>& values, int64_t rows,
          int64_t cols, int64_t gap)
      : dtype_(dtype),
        size_(SizeOf(dtype)),
        rows_(rows),
        cols_(cols),
        stride_(cols == 0 ? 1 : cols + gap),
        memory_(
            (rows == 0 ? 0 : (rows - 1) * stride_ + (cols == 0 ? 1 : cols)) *
            static_cast<int64_t>(SizeOf(dtype))) {
    QUERN_CHECK(static_cast<int64_t>(values.size()) == Count());
    for (int64_t i = 0; i < Count(); ++i) {
      std::memcpy(Place(i), &values[static_cast<size_t>(i)], size_);
    }
  }

  AnyTensorView view() const {
    return AnyTensorView(dtype_, static_cast<void*>(memory_.data()),
                         cols_ == 0 ? 1 : 2, {rows_, cols_},
                         {cols_ == 0 ? 1 : stride_, 1});
  }
  std::vector<int64_t> Read() const {
    std::vector<int64_t> values;
    for (int64_t i = 0; i < Count(); ++i) {
      int64_t value = 0;
      std::memcpy(&value, Place(i), size_);
      if (dtype_ == DType::kI32) value = static_cast<int32_t>(value);
      values.push_back(value);
    }
    return values;
  }
  bool GapsAreIntact() const {
    const auto row = static_cast<int64_t>(size_) * (cols_ == 0 ? 1 : cols_);
    const auto step = static_cast<int64_t>(size_) * stride_;
    for (int64_t i = 0; i < memory_.size(); ++i) {
      if (i % step >= row && !IsPoison(memory_.data()[i])) return false;
    }
    return true;
  }

 private:
  int64_t Count() const { return rows_ * (cols_ == 0 ? 1 : cols_); }
  uint8_t* Place(int64_t i) const {
    const int64_t at = cols_ == 0 ? i : i / cols_ * stride_ + i % cols_;
    return memory_.data() + at * static_cast<int64_t>(size_);
  }

  DType dtype_;
  size_t size_;
  int64_t rows_, cols_, stride_;
  mutable GuardBuffer<uint8_t> memory_;  // a view may write
};

// Other numbers in the memory of `view`, a vector or a matrix. They may end
// behind it, so they serve where CheckArgs refuses views that overlap.
inline AnyTensorView Alias(const AnyTensorView& view, DType dtype, int64_t rows,
                           int64_t cols = 0) {
  return AnyTensorView(dtype, view.mutable_data(), cols == 0 ? 1 : 2,
                       {rows, cols}, {cols == 0 ? 1 : cols, 1});
}

// Makes the plan, checks the arguments and runs it, which must not allocate.
template <class Plan, class Spec, class Args>
void RunPlan(const Spec& spec, const Args& args) {
  const auto plan = Plan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
  InlineExecutor executor;
  EXPECT_NO_ALLOCATION(plan->Execute(args, executor));
}

// What CheckArgs says, or Create.
template <class Plan, class Spec, class Args>
absl::Status StatusOf(const Spec& spec, const Args& args) {
  const auto plan = Plan::Create(spec);
  return plan.ok() ? plan->CheckArgs(args) : plan.status();
}

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_NUMBERS_TESTUTIL_H_
