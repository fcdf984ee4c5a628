#ifndef QUERN_TOOLS_PERF_MEASURE_H_
#define QUERN_TOOLS_PERF_MEASURE_H_

// Times a case between samples of its limits, in one loop:
//
//   dram  peak  case  dram  peak  case  dram  peak ...
//
// so that a drift of the machine meets both. Medians over the samples; those
// during which another process took our CPUs are left out, and others are
// taken for them, within limits.

#include <cstdint>

#include "quern/core/executor.h"
#include "quern/core/limits/limits.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"

namespace quern {

// Working sets to rotate over: `cold_bytes` of them in all, but at least one
// and at most max_sets; one if warm.
int64_t SetsFor(int64_t set_bytes, int64_t cold_bytes, int64_t max_sets,
                bool warm);

// Working sets of a cold run hold so many times the last-level cache.
constexpr int64_t kColdPasses = 8;

// What Measure needs to know besides the operator.
struct MeasureSpec {
  int64_t sets = 1;  // working sets that the operator is set up with
  int64_t runs = 1;
  // The last-level cache. 0: the working set is meant to be in it (--warm=1).
  int64_t cache_bytes = 0;
};

// Times op. The limits are calibrated for its kind. Fills every field of the
// row but op, threads and max_err.
//
// What the caches hold of an operator's results at the end of a sample is not
// yet in DRAM, and a sample that starts with clean caches would not have paid
// for it: up to the size of the last-level cache. So calls of a cold operator
// that writes are preceded by untimed ones, which fill the caches as the timed
// ones leave them; but for calls above 50 ms, where the difference is small.
// DRAM bounds a run whose working sets touch kColdPasses - 1 times the cache.
Row Measure(Op& op, const MeasureSpec& spec, Limits& limits,
            Executor& executor);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_MEASURE_H_
