#include "quern/tools/perf/measure.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "quern/core/executor.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits.h"
#include "quern/core/limits/samples.h"
#include "quern/core/limits/timer.h"
#include "quern/core/math_util.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"

namespace quern {
namespace {

// The clock and the fork-join must not matter: a shorter call is repeated.
constexpr double kSampleSeconds = 200e-6;
constexpr int64_t kMaxCallsPerSample = 1 << 20;
// What the caches hold of such a call is a few percent of its time.
constexpr double kLongCallSeconds = 50e-3;

}  // namespace

int64_t SetsFor(int64_t set_bytes, int64_t cold_bytes, int64_t max_sets,
                bool warm) {
  if (warm) return 1;
  return std::clamp<int64_t>(
      DivCeil(cold_bytes, std::max<int64_t>(set_bytes, 1)), 1, max_sets);
}

namespace {

// Returns the row that is reported. `cold`: operands came from memory.
Row RowOf(const OpInfo& info, const MeasureSpec& spec,
          const Samples& microseconds, const Samples& dram, const Samples& peak,
          const Samples& clock, bool cold, const Limits& limits) {
  Row row;
  row.shape = info.shape;
  row.dtype = info.dtype;
  row.isa = info.isa;
  row.bytes = info.bytes;
  row.flops = info.flops;
  row.dram_kind = DramKindName(info.dram_kind);
  const std::vector<double> used = microseconds.Used();
  row.runs = static_cast<int64_t>(used.size());
  row.median_us = Median(used);
  row.min_us = Smallest(used);
  row.disturbed = microseconds.disturbed();
  const Bound dram_bound = BoundOf(dram);
  const Bound peak_bound = BoundOf(peak);
  row.dram_gbps = dram_bound.value;
  row.dram_min_gbps = Smallest(dram.Used());
  row.dram_max_gbps = Largest(dram.Used());
  row.peak_kind = PeakKindName(info.peak_kind);
  row.peak_gflops = peak_bound.value;
  row.ghz = Largest(clock.Used());
  row.dram_bounds = cold;
  // oneDNN may have instructions that no target of ours has.
  row.peak_bounds = IsaHas(limits.target(), info.isa);
  row.dram_steady = dram_bound.steady;
  row.peak_steady = peak_bound.steady;
  row.pages = std::string(limits.pages());
  row.variant = limits.Variant(info.dram_kind);
  row.sets = spec.sets;
  return row;
}

}  // namespace

Row Measure(Op& op, const MeasureSpec& spec, Limits& limits,
            Executor& executor) {
  const OpInfo info = op.Info();
  const DramKind kind = info.dram_kind;
  const double touched =
      info.bytes * kind.touched() / static_cast<double>(kind.moved());
  const auto cache = static_cast<double>(spec.cache_bytes);
  const bool cold = cache > 0 && static_cast<double>(spec.sets) * touched >=
                                     (kColdPasses - 1) * cache;
  int64_t set = 0;
  const auto call = [&] {
    op.Run(set, executor);
    set = set + 1 < spec.sets ? set + 1 : 0;
  };
  op.BeginTimed();
  double once = Seconds(call);  // the first one pays for what is set up lazily
  for (int i = 0; i < 3 && (i == 0 || once < 0.1); ++i) {
    once = std::min(once, Seconds(call));
  }
  op.EndTimed(executor);
  const int64_t calls = std::clamp<int64_t>(
      static_cast<int64_t>(std::ceil(kSampleSeconds / std::max(once, 1e-9))), 1,
      kMaxCallsPerSample);
  const bool writes = kind.writes + kind.updates > 0;
  const int64_t untimed_calls =
      cold && writes && once < kLongCallSeconds
          ? static_cast<int64_t>(std::ceil(cache / touched))
          : 0;

  Samples dram, peak, clock;
  const auto sample_limits = [&] {
    const auto take = [](Samples& samples, double unit, const auto& limit) {
      const PreemptionWatch watch;
      const LimitSample sample = limit();
      samples.Add(sample.rate() * unit, watch.Delay(sample.seconds));
    };
    take(dram, 1e-9, [&] { return limits.Dram(kind, executor); });
    take(peak, 1e-9, [&] { return limits.Peak(info.peak_kind, executor); });
    take(clock, 1e-9, [] { return Limits::Clock(); });
  };
  sample_limits();
  Samples microseconds;
  for (const Stopwatch total;
       TakeMore(microseconds, spec.runs, total.seconds());) {
    op.BeginTimed();
    for (int64_t c = 0; c < untimed_calls; ++c) call();
    {
      const PreemptionWatch watch;
      const double seconds = Seconds([&] {
        for (int64_t c = 0; c < calls; ++c) call();
      });
      microseconds.Add(seconds / static_cast<double>(calls) * 1e6,
                       watch.Delay(seconds));
    }
    op.EndTimed(executor);
    sample_limits();
  }

  return RowOf(info, spec, microseconds, dram, peak, clock, cold, limits);
}

}  // namespace quern
