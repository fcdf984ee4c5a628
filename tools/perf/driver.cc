#include "quern/tools/perf/driver.h"

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/limits/limits.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/limit_rows.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/run_case.h"
#include "quern/tools/perf/settings.h"
#include "quern/tools/perf/table.h"

namespace quern {
namespace {

// The help of the operator `name`, or of `limits`; any other name gives the
// help of all operators.
std::string Help(absl::Span<const OpEntry> ops, absl::string_view name) {
  const bool is_limits = name == kLimits;
  const bool all = !is_limits && std::none_of(ops.begin(), ops.end(),
                                              [name](const OpEntry& entry) {
                                                return entry.name == name;
                                              });
  std::string text = absl::StrCat(
      "Times an operator next to the limits of this machine.\n\n  perf ",
      all ? "OP" : name, " --key=value...\n");
  if (all) {
    absl::StrAppend(&text,
                    "  perf OP --help\n"
                    "  perf --table[=SUBSTRING] --key=value...\n");
  }
  const auto add_keys = [&text](absl::Span<const Key> keys) {
    for (const Key& key : keys) {
      absl::StrAppendFormat(&text, "    --%-28s %s\n",
                            absl::StrCat(key.name, "=", key.default_value),
                            key.help);
    }
  };
  if (all || is_limits) {
    absl::StrAppend(
        &text,
        "\nlimits: DRAM in both sizes of pages, L3, L2, and the peak "
        "of each dot product, on 1 and on N threads\n");
  }
  if (all) {
    absl::StrAppend(
        &text,
        "\n--table: a fixed list of cases, one line each with its limit and "
        "the fraction of it; with SUBSTRING those whose line has it\n");
  }
  for (const OpEntry& entry : ops) {
    if (!all && entry.name != name) continue;
    absl::StrAppend(&text, "\n", entry.name, ": ", entry.summary, "\n");
    add_keys(entry.keys);
  }
  if (!is_limits) {
    absl::StrAppend(&text, "\nEvery operator, with its defaults:\n");
    add_keys(kOpKeys);
  }
  absl::StrAppend(&text, "\nEvery operator and limits:\n");
  add_keys(kCommonKeys);
  absl::StrAppend(
      &text,
      "\nExit code 0; 1: the run failed, the check did not pass, or a limit "
      "was exceeded; 2: refused.\n"
      "What the columns mean and how to quote them: docs/benchmarking.md\n");
  return text;
}

// Prints rows as they come.
class Printer {
 public:
  Printer(bool table, std::ostream& out) : table_(table), out_(out) {
    if (table_) out_ << TableHeader() << std::endl;
  }
  void Print(const Row& row) {
    out_ << (table_ ? TableLine(row) : JsonLine(row)) << std::endl;
  }

 private:
  bool table_;
  std::ostream& out_;
};

absl::Status RunLimits(const Settings& settings, const CpuInfo& cpu,
                       std::ostream& out, std::ostream& progress) {
  const ScopedIsa scoped_isa(settings.isa);
  std::vector<int> threads = {1};
  if (settings.threads > 1) threads.push_back(settings.threads);
  Printer printer(settings.table, out);
  const auto print = [&](const Row& row) { printer.Print(row); };
  for (const LimitPages pages : {LimitPages::kHuge, LimitPages::kSmall}) {
    QUERN_ASSIGN_OR_RETURN(Limits limits, Limits::Create(cpu, pages));
    QUERN_RETURN_IF_ERROR(ProveIsa(kLimits, settings, limits.target()));
    for (const int workers : threads) {
      progress << "limits: " << workers
               << (workers == 1 ? " thread, " : " threads, ") << limits.pages()
               << " pages, " << settings.runs << " runs each" << std::endl;
      QUERN_ASSIGN_OR_RETURN(const auto executor, HwyExecutor::Create(workers));
      MeasureDramLimits(settings.runs, limits, *executor, print);
      if (pages == LimitPages::kHuge) {
        MeasureCoreLimits(settings.runs, settings.threads, limits, *executor,
                          print);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status RunOp(const OpEntry& entry, const Args& args,
                   const Settings& settings, const CpuInfo& cpu,
                   std::ostream& out, std::ostream& progress) {
  const ScopedIsa scoped_isa(settings.isa);
  QUERN_ASSIGN_OR_RETURN(std::vector<ReadyCase> cases,
                         PrepareCases(entry, args, settings, cpu));
  QUERN_ASSIGN_OR_RETURN(
      CaseRunner runner,
      CaseRunner::Create(entry.name, settings, cpu, progress));
  Printer printer(settings.table, out);
  absl::Status
      exceeded;  // the first; the other cases are measured all the same
  for (size_t i = 0; i < cases.size(); ++i) {
    if (cases.size() > 1) {
      progress << entry.name << ": " << i + 1 << " of " << cases.size()
               << (cases[i].layer.empty() ? "" : ": ") << cases[i].layer
               << std::endl;
    }
    QUERN_ASSIGN_OR_RETURN(const Row row, runner.Run(entry, cases[i]));
    printer.Print(row);
    exceeded.Update(CheckOfLimits(row));
    cases[i].op.reset();  // its memory is the next one's
  }
  return exceeded;
}

absl::Status Run(absl::Span<const OpEntry> ops,
                 absl::Span<const absl::string_view> words, const CpuInfo& cpu,
                 bool terminal, std::ostream& out, std::ostream& progress) {
  if (AsksForTable(words)) return RunTable(ops, words, cpu, out, progress);
  const absl::string_view name = words.empty() ? "" : words[0];
  const OpEntry* const entry = FindOp(ops, name);
  const bool is_limits = name == kLimits;
  if (!is_limits && entry == nullptr) {
    std::vector<absl::string_view> names = {kLimits};
    for (const OpEntry& op : ops) names.push_back(op.name);
    return InvalidArgument(
        "perf",
        name.empty() ? std::string("no operator")
                     : absl::StrCat("no operator \"", name, "\""),
        "; need one of ", absl::StrJoin(names, ", "), "; see --help");
  }
  QUERN_ASSIGN_OR_RETURN(
      const Args args,
      is_limits ? Args::Parse(name, {}, kCommonKeys, words.subspan(1))
                : ParseOpArgs(*entry, words.subspan(1)));
  QUERN_ASSIGN_OR_RETURN(const Settings settings,
                         ReadSettings(args, cpu, terminal));
  return is_limits ? RunLimits(settings, cpu, out, progress)
                   : RunOp(*entry, args, settings, cpu, out, progress);
}

}  // namespace

int RunPerf(absl::Span<const OpEntry> ops,
            absl::Span<const absl::string_view> words, const CpuInfo& cpu,
            bool terminal, std::ostream& out, std::ostream& progress) {
  for (const absl::string_view word : words) {
    if (word == "--help" || word == "-h") {
      out << Help(ops, words[0]);
      return 0;
    }
  }
  const absl::Status status = Run(ops, words, cpu, terminal, out, progress);
  if (status.ok()) return 0;
  progress << status.message() << std::endl;
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ? 2
                                                                          : 1;
}

}  // namespace quern
