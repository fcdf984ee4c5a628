#ifndef QUERN_TOOLS_PERF_MEASURE_H_
#define QUERN_TOOLS_PERF_MEASURE_H_

// Times a case between samples of its limits, in one loop:
//
//   dram  case  peak  dram  case  peak  dram ...
//
// so that a drift of the machine meets both. Medians over the samples; those
// during which another process took our cores are left out, and others are
// taken for them, within limits.

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "core/executor.h"
#include "tools/perf/limits.h"
#include "tools/perf/op.h"
#include "tools/perf/report.h"

namespace quern {

// Samples of one quantity, each with the share of it that was waited for a
// core.
class Samples {
 public:
  // Below it, a sample counts as clean.
  static constexpr double kMaxDelay = 0.02;

  void Add(double value, double delay);

  // The clean samples; if there are fewer than three, the least delayed
  // quarter, three at least.
  std::vector<double> Used() const;
  int64_t clean() const { return clean_; }
  int64_t disturbed() const { return taken() - clean_; }
  int64_t taken() const { return static_cast<int64_t>(samples_.size()); }

 private:
  struct Sample {
    double value;
    double delay;
  };
  std::vector<Sample> samples_;
  int64_t clean_ = 0;
};

// Whether to take one more: until `runs` are clean, or 3 * runs were taken; but
// on a busy machine up to three seconds for three clean ones.
bool TakeMore(const Samples& samples, int64_t runs, double seconds);

// Adds samples of `take`, which returns one value, while TakeMore.
Samples Collect(int64_t runs, absl::FunctionRef<double()> take);

// Working sets to rotate over: `cold_bytes` of them in all, but at least one
// and at most max_sets; one if warm.
int64_t SetsFor(int64_t set_bytes, int64_t cold_bytes, int64_t max_sets,
                bool warm);

// Times op, which is set up with `sets` working sets. The limits are
// calibrated. Fills every field of the row but op, threads and max_err.
Row Measure(Op& op, int64_t sets, int64_t runs, Limits& limits,
            Executor& executor);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_MEASURE_H_
