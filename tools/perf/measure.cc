#include "tools/perf/measure.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "tools/perf/limits.h"
#include "tools/perf/op.h"
#include "tools/perf/report.h"
#include "tools/perf/timer.h"

namespace quern {
namespace {

// The clock and the fork-join must not matter: a shorter call is repeated.
constexpr double kSampleSeconds = 200e-6;
constexpr int64_t kMaxCallsPerSample = 1 << 20;

}  // namespace

void Samples::Add(double value, double delay) {
  samples_.push_back({value, delay});
  if (delay <= kMaxDelay) ++clean_;
}

std::vector<double> Samples::Used() const {
  std::vector<Sample> sorted = samples_;
  std::stable_sort(
      sorted.begin(), sorted.end(),
      [](const Sample& a, const Sample& b) { return a.delay < b.delay; });
  size_t used = static_cast<size_t>(clean_);
  if (clean_ < 3) {
    used = std::min(sorted.size(), std::max<size_t>(3, sorted.size() / 4));
  }
  std::vector<double> values;
  for (size_t i = 0; i < used; ++i) values.push_back(sorted[i].value);
  return values;
}

bool TakeMore(const Samples& samples, int64_t runs, double seconds) {
  if (samples.clean() >= runs) return false;
  return samples.taken() < 3 * runs || (samples.clean() < 3 && seconds < 3);
}

Samples Collect(int64_t runs, absl::FunctionRef<double()> take) {
  Samples samples;
  for (const Stopwatch total; TakeMore(samples, runs, total.seconds());) {
    const PreemptionWatch watch;
    double value = 0;
    const double seconds = Seconds([&] { value = take(); });
    samples.Add(value, watch.Delay(seconds));
  }
  return samples;
}

int64_t SetsFor(int64_t set_bytes, int64_t cold_bytes, int64_t max_sets,
                bool warm) {
  if (warm) return 1;
  return std::clamp<int64_t>(
      DivCeil(cold_bytes, std::max<int64_t>(set_bytes, 1)), 1, max_sets);
}

Row Measure(Op& op, int64_t sets, int64_t runs, Limits& limits,
            Executor& executor) {
  const OpInfo info = op.Info();
  int64_t set = 0;
  const auto call = [&] {
    op.Run(set, executor);
    set = set + 1 < sets ? set + 1 : 0;
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

  Samples dram, peak;
  const auto sample_dram = [&] {
    const PreemptionWatch watch;
    const LimitSample sample = limits.Dram(info.dram_kind, executor);
    dram.Add(sample.amount / sample.seconds * 1e-9,
             watch.Delay(sample.seconds));
  };
  sample_dram();
  Samples microseconds;
  for (const Stopwatch total; TakeMore(microseconds, runs, total.seconds());) {
    op.BeginTimed();
    {
      const PreemptionWatch watch;
      const double seconds = Seconds([&] {
        for (int64_t c = 0; c < calls; ++c) call();
      });
      microseconds.Add(seconds / static_cast<double>(calls) * 1e6,
                       watch.Delay(seconds));
    }
    op.EndTimed(executor);
    {
      const PreemptionWatch watch;
      const LimitSample sample = limits.Peak(info.peak_kind, executor);
      peak.Add(sample.amount / sample.seconds * 1e-9,
               watch.Delay(sample.seconds));
    }
    sample_dram();
  }

  Row row;
  row.shape = info.shape;
  row.dtype = info.dtype;
  row.isa = info.isa;
  row.bytes = info.bytes;
  row.flops = info.flops;
  row.dram_kind = std::string(DramKindName(info.dram_kind));
  const std::vector<double> used = microseconds.Used();
  row.runs = static_cast<int64_t>(used.size());
  row.median_us = Median(used);
  row.min_us = Smallest(used);
  row.disturbed = microseconds.disturbed();
  row.dram_gbps = Median(dram.Used());
  row.dram_min_gbps = Smallest(dram.Used());
  row.dram_max_gbps = Largest(dram.Used());
  row.peak_gflops = Median(peak.Used());
  row.pages = std::string(limits.pages());
  row.variant = limits.Variant(info.dram_kind);
  row.sets = sets;
  return row;
}

}  // namespace quern
