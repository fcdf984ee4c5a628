#include "quern/tools/perf/limit_rows.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits.h"
#include "quern/core/limits/samples.h"
#include "quern/core/limits/timer.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/tools/perf/hardware_bounds.h"
#include "quern/tools/perf/measure.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/settings.h"

namespace quern {
namespace {

// One row of `limits`. take returns one sample; ops: it counts operations.
Row LimitRow(absl::string_view name, absl::string_view dtype, int threads,
             int64_t runs, const Limits& limits, bool ops,
             absl::FunctionRef<LimitSample()> take) {
  LimitSample last;
  double ghz = 0;
  const Samples samples = Collect(runs, [&] {
    ghz = std::max(ghz, Limits::Clock().rate() * 1e-9);
    last = take();
    return last.rate();
  });
  const std::vector<double> rates = samples.Used();
  Row row;
  row.op = std::string(kLimits);
  row.shape = std::string(name);
  row.dtype = std::string(dtype);
  row.isa = limits.target();
  row.threads = threads;
  row.runs = static_cast<int64_t>(rates.size());
  row.median_us = 1e6 * last.amount / Median(rates);
  row.min_us = 1e6 * last.amount / Largest(rates);
  (ops ? row.flops : row.bytes) = last.amount;
  row.disturbed = samples.disturbed();
  row.ghz = ghz;
  row.dram_steady = row.peak_steady = BoundOf(samples).steady;
  return row;
}

}  // namespace

int64_t CalibrationRounds(int64_t runs) { return std::min<int64_t>(runs, 4); }

void MeasureDramLimits(int64_t runs, Limits& limits, Executor& executor,
                       absl::FunctionRef<void(const Row&)> print) {
  for (const DramKind kind : {DramKind::kRead, DramKind::kWrite,
                              DramKind::kCopy, DramKind::kUpdate}) {
    limits.Calibrate(kind, CalibrationRounds(runs), executor);
    Row row = LimitRow(absl::StrCat("dram_", DramKindName(kind)), "u8",
                       executor.num_workers(), runs, limits, false,
                       [&] { return limits.Dram(kind, executor); });
    row.pages = std::string(limits.pages());
    row.variant = limits.Variant(kind);
    row.note = absl::StrCat(row.pages, " pages, ", row.variant);
    print(row);
  }
}

void MeasureCoreLimits(int64_t runs, int sharers, Limits& limits,
                       Executor& executor,
                       absl::FunctionRef<void(const Row&)> print) {
  const int threads = executor.num_workers();
  struct CacheCase {
    absl::string_view name;
    int64_t bytes;
  };
  for (const CacheCase& c : {CacheCase{"l3_read", limits.l3_set_bytes(sharers)},
                             CacheCase{"l2_read", limits.l2_set_bytes()}}) {
    if (c.bytes == 0) continue;
    Row row = LimitRow(c.name, "u8", threads, runs, limits, false,
                       [&] { return limits.CacheRead(c.bytes, executor); });
    row.pages = std::string(limits.pages());
    row.variant = absl::StrCat(c.bytes >> 10, " KiB/thread");
    row.note = row.variant;
    print(row);
  }
  struct PeakCase {
    absl::string_view name;
    absl::string_view dtype;
    PeakKind kind;
  };
  const CpuId cpu = ThisCpuId();
  for (const PeakCase& c : {PeakCase{"f32_fma", "f32", PeakKind::kF32},
                            PeakCase{"bf16_dot", "bf16", PeakKind::kBF16},
                            PeakCase{"i8_dot", "i8", PeakKind::kI8},
                            PeakCase{"i6_dot", "i6", PeakKind::kI6}}) {
    Row row = LimitRow(c.name, c.dtype, threads, runs, limits, true,
                       [&] { return limits.Peak(c.kind, executor); });
    row.variant = limits.Sequence(c.kind);
    row.note = absl::StrCat(row.variant, "; ",
                            HardwareNote(cpu, limits.target(), c.kind));
    print(row);
  }
}

}  // namespace quern
