#ifndef QUERN_GEMM_ONEDNN_PARTITION_H_
#define QUERN_GEMM_ONEDNN_PARTITION_H_

// How a product is cut into oneDNN primitives. The bits are the same for any
// number of threads: k is cut by the shape alone, and rows are cut by the
// number of workers only where the bits of a row do not depend on the rows
// beside it.

#include <algorithm>
#include <cstdint>

#include "quern/core/math_util.h"

namespace quern {

// Rows and columns of one primitive.
constexpr int64_t kMaxMatmulRows = 256;
constexpr int64_t kMinMatmulRows = 32;  // a product may have fewer
constexpr int64_t kMaxMatmulCols = 512;

// Rows that a primitive runs for `rows` in [1, kMaxMatmulRows]: at least 4, the
// same up to 16, at most an eighth more beyond. All counts share 45 kernels.
//
// Why (Zen 4, one thread, oneDNN 3.7.2, n = 512, k = 4096, 2026): to generate a
// kernel takes 0.2 ms (bf16) or 0.25 ms (i8), once for all plans of a shape.
// Above 4, time grows with each row: 21 sizes a quarter apart would cost 8 % on
// average and 38 % (bf16) or 76 % (i8) at 5 rows, for ever; these cost 3 % on
// average and 13 % at 129. Below 4 oneDNN does worse than at 4: 253, 220 and
// 148 microseconds for 2, 3 and 4 rows (bf16), 65, 54 and 47 (i8). A run-time
// row count is no way out: oneDNN has kernels for it on AMX alone, and gives
// packed weights to its reference code elsewhere.
//
// The result is never 1: oneDNN takes a single row for a column, too, and then
// divides k otherwise; the row would get other bits than in a batch.
constexpr int64_t RowBucket(int64_t rows) {
  const int64_t step = rows <= 4     ? 4
                       : rows <= 16  ? 1
                       : rows <= 32  ? 2
                       : rows <= 64  ? 4
                       : rows <= 128 ? 8
                                     : 16;
  return RoundUp(rows, step);
}

// Rows of each primitive but the last, for m rows and `column_tasks` tasks:
// kMaxMatmulRows, or half of that, and so on down to min_rows, until all
// workers have the same number of tasks, or four and more each. All are row
// buckets.
constexpr int64_t RowsPerTask(int64_t m, int64_t column_tasks, int64_t workers,
                              int64_t min_rows = kMinMatmulRows) {
  int64_t rows = kMaxMatmulRows;
  while (rows > min_rows) {
    const int64_t tasks = DivCeil(m, rows) * column_tasks;
    if (tasks % workers == 0 || tasks >= 4 * workers) break;
    rows /= 2;
  }
  return rows;
}

// Rows of each primitive but the last where the bits of a row depend on the
// rows beside it: a function of the shape alone, as if there were 32 workers,
// and never fewer than 128. The tasks of 256 rows are then twice as many as
// those of one row, unless one row alone has a multiple of 32 or 128 and more.
constexpr int64_t RowsPerTaskOfAnyWorkers(int64_t m, int64_t column_tasks) {
  return RowsPerTask(m, column_tasks, /*workers=*/32, kMaxMatmulRows / 2);
}

// Wide enough that a primitive's overhead (a microsecond) does not show, narrow
// enough for 16 threads to share one row. More workers share rows too, see
// RowsPerTask.
constexpr int64_t ColsPerTask(int64_t n) {
  return std::min(
      n, std::clamp<int64_t>(RoundUp(DivCeil(n, 16), 64), 64, kMaxMatmulCols));
}

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_PARTITION_H_
