#ifndef QUERN_TOOLS_PERF_REPORT_H_
#define QUERN_TOOLS_PERF_REPORT_H_

// One measured case, as a line of JSON or a row of a table.

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"

namespace quern {

// NaN: does not apply, or was not measured; null in JSON, "-" in the table.
constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

struct Row {
  std::string op;
  std::string shape;
  std::string layer;    // name of a model's layer; empty: does not apply
  std::string command;  // the line of --table; empty: does not apply
  std::string dtype;
  std::string isa;
  int threads = 0;
  int64_t runs = 0;
  double median_us = kAbsent;
  double min_us = kAbsent;
  double bytes = kAbsent;
  double flops = kAbsent;
  std::string dram_kind;       // empty: does not apply
  double dram_gbps = kAbsent;  // 1e9 bytes per second
  std::string peak_kind;       // "f32", "bf16", "i8", "i6"; empty: absent
  double peak_gflops = kAbsent;
  double max_err = kAbsent;

  // Beyond the fields that are always there: how much to trust them.
  double dram_min_gbps = kAbsent;  // over the samples of this case
  double dram_max_gbps = kAbsent;
  std::string pages;      // of the limits' buffer: "2M", "4K", "mixed"
  std::string variant;    // the loop behind dram_gbps, or behind a limit
  int64_t sets = 0;       // working sets that the runs rotate over
  int64_t disturbed = 0;  // samples during which another process had our CPUs
  double ghz = kAbsent;   // clock of the calling thread
  std::string note;       // for a reader, e.g. what the hardware can do

  // Whether dram_gbps and peak_gflops bound this run: its working sets came
  // from DRAM, and it ran on the instruction set of the limit.
  bool dram_bounds = false;
  bool peak_bounds = false;
  // Whether each limit was the same before, during and after the run.
  bool dram_steady = false;
  bool peak_steady = false;
  bool steady() const { return dram_steady && peak_steady; }
  // Whether other processes had our CPUs so often that the time is not to be
  // quoted.
  bool preempted = false;

  double gbps() const { return bytes / median_us * 1e-3; }
  double gflops() const { return flops / median_us * 1e-3; }
  // Fractions of a limit: the time at that limit over the median time.
  double of_dram() const { return bytes / (dram_gbps * 1e3) / median_us; }
  double of_peak() const { return flops / (peak_gflops * 1e3) / median_us; }
  // Operations, or bytes where there are none, of one thread in one cycle.
  double per_cycle() const;
  // The larger of the two; the other one where one is absent.
  double of_roof() const;
};

// A limit is an upper bound. Internal if of_dram or of_peak of a run that it
// bounds exceeds kMostOfLimit, which names the operator, the field, the value
// and the bound: then the limit or the operator's count is wrong. The fraction
// of a limit that was not steady may be up to kMostOfUnsteady, because that
// limit may have been higher while the operator ran.
constexpr double kMostOfLimit = 1.03;
constexpr double kMostOfUnsteady = 2;
absl::Status CheckOfLimits(const Row& row);

// {"op": ..., ...} without a line break. Numbers to six digits; what is not
// finite is null.
std::string JsonLine(const Row& row);

// Fixed columns, so that rows can be printed as they come.
std::string TableHeader();
std::string TableLine(const Row& row);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_REPORT_H_
