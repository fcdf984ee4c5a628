#ifndef QUERN_TOOLS_PERF_DRIVER_H_
#define QUERN_TOOLS_PERF_DRIVER_H_

// The driver without its process: what main.cc calls and the tests call.

#include <ostream>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/tools/perf/op.h"

namespace quern {

// Runs `OP --key=value...`, where OP is one of ops or `limits`, or
// `--table[=SUBSTRING] --key=value...` (table.h). Results go to `out`, one line
// each; progress and refusals to `progress`. `terminal`:
// whether `out` is one, for the default of --format. `cpu`: the machine, whose
// caches buffers must exceed. Returns the exit code: 0; 1: failed; 2: refused.
int RunPerf(absl::Span<const OpEntry> ops,
            absl::Span<const absl::string_view> words, const CpuInfo& cpu,
            bool terminal, std::ostream& out, std::ostream& progress);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_DRIVER_H_
