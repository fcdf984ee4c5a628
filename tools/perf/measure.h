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
#include <vector>

#include "absl/functional/function_ref.h"
#include "quern/core/executor.h"
#include "quern/tools/perf/limits.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"

namespace quern {

// Samples of one quantity, each with the share of it that was waited for a
// CPU.
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

  // The samples [begin, end), in the order in which they were taken.
  Samples Slice(int64_t begin, int64_t end) const;

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

// An upper bound, from samples of its rate.
struct Bound {
  // The larger of two medians: of the first half of the samples, which were
  // taken before most of the case's, and of the second half.
  double value = 0;
  // Whether the machine stayed the same: the two medians within 5 %, and no
  // sample more than 10 % above `value`.
  bool steady = false;
};
Bound BoundOf(const Samples& samples);

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
