#ifndef QUERN_OPS_PARALLEL_ROWS_H_
#define QUERN_OPS_PARALLEL_ROWS_H_

// core/threads/parallel_rows.h with the thresholds that all operators on rows
// share.

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "quern/core/executor.h"
#include "quern/core/threads/parallel_rows.h"

namespace quern {

// Largest number of columns that a plan accepts. It keeps the bytes and the
// cost of a row, up to 15 per column, within an int64.
inline constexpr int64_t kMaxRowElements = (int64_t{1} << 59) - 1;

// Calls fn(begin, end) for ranges that cover [0, rows) once. row_elements is
// the work of one row, in elements touched.
inline void ParallelRows(Executor& executor, int64_t rows, int64_t row_elements,
                         absl::FunctionRef<void(int64_t, int64_t)> fn) {
  ParallelRowRanges(executor, rows, row_elements, 4, fn);
}

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_ROWS_H_
