#ifndef QUERN_TOOLS_PERF_LIMIT_ROWS_H_
#define QUERN_TOOLS_PERF_LIMIT_ROWS_H_

// The lines of `perf limits`.

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limits.h"
#include "quern/tools/perf/report.h"

namespace quern {

// Rounds of Limits::Calibrate for so many runs.
int64_t CalibrationRounds(int64_t runs);

// DRAM with all workers of the executor: read, written, copied and updated in
// place, each in the best way. Prints a row as soon as it is measured.
void MeasureDramLimits(int64_t runs, Limits& limits, Executor& executor,
                       absl::FunctionRef<void(const Row&)> print);

// The caches, of whose last level a worker has a part of `sharers`, and the
// peak of each dot product beside what the hardware is known to be able to do.
void MeasureCoreLimits(int64_t runs, int sharers, Limits& limits,
                       Executor& executor,
                       absl::FunctionRef<void(const Row&)> print);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LIMIT_ROWS_H_
