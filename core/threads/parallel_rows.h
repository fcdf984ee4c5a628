#ifndef QUERN_CORE_THREADS_PARALLEL_ROWS_H_
#define QUERN_CORE_THREADS_PARALLEL_ROWS_H_

// Divides independent rows among workers. Rows never share a result, so the
// division decides who computes a row and never what is computed.

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"

namespace quern {

// A fork-join costs about a microsecond; a core streams this many elements in
// one to two. Less work than two grains stays on the calling thread.
inline constexpr int64_t kParallelRowsGrain = 16384;

// fn(begin, end) for ranges that cover [0, rows) once, at most `most` for each
// worker: several level out slow ones. row_elements: work of a row, in elements
// touched.
inline void ParallelRowRanges(Executor& executor, int64_t rows,
                              int64_t row_elements, int64_t most,
                              absl::FunctionRef<void(int64_t, int64_t)> fn) {
  if (rows <= 0) return;
  const int64_t min_rows =
      DivCeil(kParallelRowsGrain, std::max<int64_t>(row_elements, 1));
  const int64_t rows_per_task =
      std::max(min_rows, DivCeil(rows, most * executor.num_workers()));
  const int64_t tasks = DivCeil(rows, rows_per_task);
  if (tasks == 1 || executor.num_workers() == 1) {
    fn(0, rows);
    return;
  }
  executor.ParallelFor(tasks, [&](int64_t task, int /*worker*/) {
    const int64_t begin = task * rows_per_task;
    fn(begin, std::min(begin + rows_per_task, rows));
  });
}

}  // namespace quern

#endif  // QUERN_CORE_THREADS_PARALLEL_ROWS_H_
