#ifndef QUERN_TOOLS_PERF_TABLE_H_
#define QUERN_TOOLS_PERF_TABLE_H_

// perf --table: the cases that other libraries are compared on, in one run,
// each with its time, the limit that binds it and the fraction of that limit.
//
//   perf --table --isa=AVX2              every case, on one instruction set
//   perf --table=q4_k --runs=5           the cases whose command has "q4_k"
//   perf --table=kv_write --format=json  one JSON object a case
//
// The list is in table.cc. Each of its cases is a command line of the driver,
// which the table prints behind the results.

#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"

namespace quern {

// The command of every case, without `perf`: "linear --n=4096 --m=1". With
// `substring`, the commands that contain it.
std::vector<std::string> TableCommands(absl::string_view substring = "");

// Whether the command line is one of the table, not of an operator.
bool AsksForTable(absl::Span<const absl::string_view> words);

// Prints the header, which names CPU, instruction set, threads and limits, and
// then a line for each case as soon as it is measured. A case that is refused
// or fails its check or a limit does not stop the run; its status is returned
// in the end, the first if there are several.
//
// InvalidArgument, before anything is measured: a key that is not one of
// kCommonKeys and kOpKeys or has no value; --warm=1, because DRAM bounds no
// warm run; a substring that no command has. FailedPrecondition: a case was
// refused.
absl::Status RunTable(absl::Span<const OpEntry> ops,
                      absl::Span<const absl::string_view> words,
                      const CpuInfo& cpu, std::ostream& out,
                      std::ostream& progress);

// One line of the table: the median time, the nearer limit, the fraction of it,
// what disturbed the measurement, and the command.
std::string TableCaseHeader();
std::string TableCaseLine(const Row& row);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_TABLE_H_
