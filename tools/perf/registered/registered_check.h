#ifndef QUERN_TOOLS_PERF_REGISTERED_REGISTERED_CHECK_H_
#define QUERN_TOOLS_PERF_REGISTERED_REGISTERED_CHECK_H_

// What one call of a registered operator must have written: //testing's
// references in double, row by row, and how far from them rounding may be.
//
//   |got - want| <= e + half(|want| + e)
//
// half(x) is half a unit in the last place of x in the dtype that was written,
// half a step for int8 codes. e bounds the error of the f32 arithmetic before
// that rounding, in units of 2^-24; it is derived beside each operator. What is
// copied, and sums that the headers of ops/ promise to the bit, have to be
// equal.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"

namespace quern {

// Arguments with which the driver calls the operators, and which the references
// need.
constexpr int64_t kRegisteredHeadDim = 128;
constexpr int64_t kRegisteredMaxPosition = 4096;
constexpr int64_t kRegisteredSections[] = {16, 24, 24};  // mrope's
constexpr int64_t kRegisteredChunk = 1024, kRegisteredLocal = 256;
constexpr double kRegisteredScale = 0.02;  // of static quantisation of norms
constexpr double kRegisteredSoftCap = 30.0;

// A dense tensor of the call. CheckRegistered takes the schema's tensors in its
// order, then those that the operator returns.
struct CheckedTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> extents;
  const void* before = nullptr;  // its elements when the call began
  const void* after = nullptr;   // and when it had ended
};

// The largest difference; Internal names an element that is wrong, or an
// operator that has no reference here. `rows` is the number of tokens.
absl::StatusOr<double> CheckRegistered(absl::string_view op, int64_t rows,
                                       absl::Span<const CheckedTensor> tensors,
                                       Executor& executor);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_REGISTERED_REGISTERED_CHECK_H_
