#ifndef QUERN_TOOLS_PERF_HARDWARE_BOUNDS_H_
#define QUERN_TOOLS_PERF_HARDWARE_BOUNDS_H_

// What a core can do in one cycle, as its maker documents it. Beside a measured
// peak it shows whether the peak is one: the two differ by a few percent.

#include <string>

#include "absl/strings/string_view.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/tools/perf/op.h"

namespace quern {

// The name of the core, or "" for one that is not in the table.
absl::string_view CoreName(const CpuId& cpu);

// The most operations of one core in one cycle on Highway's target of that
// name, a multiply-add being two. 0: unknown.
int HardwareBound(const CpuId& cpu, absl::string_view target, PeakKind kind);

// "Zen 3: at most 32 a cycle", or "hardware bound unknown".
std::string HardwareNote(const CpuId& cpu, absl::string_view target,
                         PeakKind kind);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_HARDWARE_BOUNDS_H_
