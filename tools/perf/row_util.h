#ifndef QUERN_TOOLS_PERF_ROW_UTIL_H_
#define QUERN_TOOLS_PERF_ROW_UTIL_H_

// What the operators on rows share: dense matrices, and their verdict.

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/op_util.h"

namespace quern {

inline AnyTensorView Matrix(DType dtype, void* data, int64_t rows,
                            int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

// `count` elements of dtype as doubles.
inline std::vector<double> Doubles(DType dtype, SetBuffer& buffer, int64_t from,
                                   int64_t count) {
  return WithType(dtype, [&](auto type) {
    const auto* data = buffer.at<decltype(type)>(0) + from;
    std::vector<double> doubles;
    doubles.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) doubles.push_back(ToDouble(data[i]));
    return doubles;
  });
}

// Compares out[rows, cols] row by row with reference(row), within
// relative * |want| + absolute; by default, below which a value may have lost
// bits to the denormals.
template <typename Reference>
absl::StatusOr<double> JudgeRows(absl::string_view op, DType dtype,
                                 SetBuffer& out, int64_t rows, int64_t cols,
                                 double relative, Executor& executor,
                                 const Reference& reference,
                                 double absolute = 0x1p-120) {
  Verdict all;
  executor.ParallelFor(rows, [&](int64_t row, int) {
    const std::vector<double> want = reference(row);
    const std::vector<double> got = Doubles(dtype, out, row * cols, cols);
    Verdict mine;
    for (size_t i = 0; i < want.size(); ++i) {
      mine.Add(row * cols + static_cast<int64_t>(i), got[i], want[i],
               relative * std::abs(want[i]) + absolute);
    }
    all.Merge(mine);
  });
  return all.Result(op);
}

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROW_UTIL_H_
