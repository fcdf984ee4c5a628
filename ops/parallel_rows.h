#ifndef QUERN_OPS_PARALLEL_ROWS_H_
#define QUERN_OPS_PARALLEL_ROWS_H_

// core/parallel_rows.h as every operator on rows divides them.

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "quern/core/executor.h"
#include "quern/core/parallel_rows.h"

namespace quern {

// Plans refuse rows of more columns. Bytes and costs of a row, up to 15 for
// each column, then fit in an int64, even where there are no rows and no
// memory.
inline constexpr int64_t kMaxRowElements = (int64_t{1} << 59) - 1;

// fn(begin, end) for ranges that cover [0, rows) once. row_elements: work of a
// row, in elements touched.
inline void ParallelRows(Executor& executor, int64_t rows, int64_t row_elements,
                         absl::FunctionRef<void(int64_t, int64_t)> fn) {
  ParallelRowRanges(executor, rows, row_elements, 4, fn);
}

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_ROWS_H_
