#include "quern/tools/perf/driver.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "hwy/targets.h"
#include "quern/core/cpu_info.h"
#include "quern/core/executor.h"
#include "quern/core/hwy_executor.h"
#include "quern/core/status_macros.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/limit_rows.h"
#include "quern/tools/perf/limits.h"
#include "quern/tools/perf/measure.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/settings.h"

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
  if (all) absl::StrAppend(&text, "  perf OP --help\n");
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

// "1.5 MiB", "8.8 KiB".
std::string Size(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  return bytes < 1 << 20 ? absl::StrFormat("%.1f KiB", value / (1 << 10))
                         : absl::StrFormat("%.1f MiB", value / (1 << 20));
}

// Restricts Highway's choice for the life of this object.
class ScopedIsa {
 public:
  explicit ScopedIsa(const std::string& isa) {
    if (!isa.empty()) hwy::SetSupportedTargetsForTest(TargetsUpTo(isa));
  }
  ~ScopedIsa() { hwy::SetSupportedTargetsForTest(0); }
  ScopedIsa(const ScopedIsa&) = delete;
  ScopedIsa& operator=(const ScopedIsa&) = delete;
};

// What --isa asked for is what ran.
absl::Status ProveIsa(absl::string_view op, const Settings& settings,
                      absl::string_view ran) {
  if (settings.isa.empty() || ran == settings.isa) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      op, ": asked for ", settings.isa, ", but the kernels are for ", ran));
}

// Bytes that may still be allocated; 0: the kernel does not tell.
int64_t AvailableMemory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    int64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib << 10;
  }
  return 0;
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

// A case that was not refused.
struct Ready {
  std::string layer;
  std::unique_ptr<Op> op;
  int64_t sets = 0;  // working sets that its calls rotate over
};

// Every case, before the first is run: a refusal comes at once.
absl::StatusOr<std::vector<Ready>> Prepare(const OpEntry& entry,
                                           const Args& args,
                                           const Settings& settings,
                                           int64_t cold_bytes) {
  std::vector<OpCase> cases = {{args, ""}};
  if (entry.cases != nullptr) {
    QUERN_ASSIGN_OR_RETURN(cases, entry.cases(args));
  }
  std::vector<Ready> all;
  for (OpCase& c : cases) {
    Ready ready;
    QUERN_ASSIGN_OR_RETURN(ready.op, entry.create(c.args));
    ready.layer = std::move(c.layer);
    const Op& op = *ready.op;
    ready.sets =
        SetsFor(op.set_bytes(), cold_bytes, op.max_sets(), settings.warm);
    // Beside the limits' buffer, and a tenth for everyone else.
    const double need =
        static_cast<double>(ready.sets) * static_cast<double>(op.set_bytes()) +
        static_cast<double>(cold_bytes);
    const auto have = static_cast<double>(AvailableMemory());
    if (have > 0 && need > 0.9 * have) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: needs %.1f GiB of memory; %.1f GiB are free",
                          entry.name, need / (1 << 30), have / (1 << 30)));
    }
    all.push_back(std::move(ready));
  }
  return all;
}

absl::Status RunCase(const OpEntry& entry, const Ready& ready,
                     const Settings& settings, int64_t cache_bytes,
                     Limits& limits, Executor& executor, Printer& printer,
                     std::ostream& progress, absl::Status& exceeded) {
  Op& op = *ready.op;
  const int64_t sets = ready.sets;
  progress << entry.name << ": " << op.Info().shape << ", " << sets
           << (sets == 1 ? " working set of " : " working sets of ")
           << Size(op.set_bytes()) << std::endl;
  if (!settings.warm && sets * op.set_bytes() < kColdPasses * cache_bytes) {
    progress << entry.name << ": no more can be made; the caches may hold "
             << Size(sets * op.set_bytes()) << ": not a figure of DRAM"
             << std::endl;
  }
  QUERN_RETURN_IF_ERROR(op.Setup(sets, executor));
  // The linear operators make their plans in Setup.
  QUERN_RETURN_IF_ERROR(ProveIsa(entry.name, settings, op.Info().isa));

  double max_err = kAbsent;
  if (settings.check) {
    progress << entry.name << ": comparing with the reference" << std::endl;
    QUERN_ASSIGN_OR_RETURN(max_err, op.Check(executor));
  }
  if (!settings.warm) {  // DRAM does not bound a warm run
    limits.Calibrate(op.Info().dram_kind, CalibrationRounds(settings.runs),
                     executor);
  }
  progress << entry.name << ": " << settings.runs << " runs on "
           << settings.threads
           << (settings.threads == 1 ? " thread" : " threads") << std::endl;
  Row row = Measure(op, {sets, settings.runs, settings.warm ? 0 : cache_bytes},
                    limits, executor);
  row.op = std::string(entry.name);
  row.layer = ready.layer;
  row.threads = settings.threads;
  row.max_err = max_err;
  if (row.disturbed >= 2 * settings.runs) {
    progress << entry.name
             << ": other processes had our CPUs; do not quote this"
             << std::endl;
  }
  printer.Print(row);
  exceeded.Update(CheckOfLimits(row));
  return absl::OkStatus();
}

absl::Status RunOp(const OpEntry& entry, const Args& args,
                   const Settings& settings, const CpuInfo& cpu,
                   std::ostream& out, std::ostream& progress) {
  const ScopedIsa scoped_isa(settings.isa);
  const int64_t cache_bytes = cpu.last_level_bytes();
  QUERN_ASSIGN_OR_RETURN(
      std::vector<Ready> cases,
      Prepare(entry, args, settings, kColdPasses * cache_bytes));
  QUERN_ASSIGN_OR_RETURN(const auto executor,
                         HwyExecutor::Create(settings.threads));
  QUERN_ASSIGN_OR_RETURN(Limits limits, Limits::Create(cpu));
  QUERN_RETURN_IF_ERROR(ProveIsa(entry.name, settings, limits.target()));
  Printer printer(settings.table, out);
  absl::Status
      exceeded;  // the first; the other cases are measured all the same
  for (size_t i = 0; i < cases.size(); ++i) {
    if (cases.size() > 1) {
      progress << entry.name << ": " << i + 1 << " of " << cases.size()
               << (cases[i].layer.empty() ? "" : ": ") << cases[i].layer
               << std::endl;
    }
    QUERN_RETURN_IF_ERROR(RunCase(entry, cases[i], settings, cache_bytes,
                                  limits, *executor, printer, progress,
                                  exceeded));
    cases[i].op.reset();  // its memory is the next one's
  }
  return exceeded;
}

absl::Status Run(absl::Span<const OpEntry> ops,
                 absl::Span<const absl::string_view> words, bool terminal,
                 std::ostream& out, std::ostream& progress) {
  const auto named = [&](absl::string_view name) {
    return std::find_if(ops.begin(), ops.end(), [name](const OpEntry& entry) {
      return entry.name == name;
    });
  };
  const absl::string_view name = words.empty() ? "" : words[0];
  const auto entry = named(name);
  const bool is_limits = name == kLimits;
  if (!is_limits && entry == ops.end()) {
    std::vector<absl::string_view> names = {kLimits};
    for (const OpEntry& op : ops) names.push_back(op.name);
    return InvalidArgument(
        "perf",
        name.empty() ? std::string("no operator")
                     : absl::StrCat("no operator \"", name, "\""),
        "; need one of ", absl::StrJoin(names, ", "), "; see --help");
  }
  std::vector<Key> keys;
  if (!is_limits) {
    keys = entry->keys;
    keys.insert(keys.end(), std::begin(kOpKeys), std::end(kOpKeys));
  }
  QUERN_ASSIGN_OR_RETURN(
      const Args args, Args::Parse(name, keys, kCommonKeys, words.subspan(1)));
  const CpuInfo cpu = GetCpuInfo();
  QUERN_ASSIGN_OR_RETURN(const Settings settings,
                         ReadSettings(args, cpu, terminal));
  return is_limits ? RunLimits(settings, cpu, out, progress)
                   : RunOp(*entry, args, settings, cpu, out, progress);
}

}  // namespace

int RunPerf(absl::Span<const OpEntry> ops,
            absl::Span<const absl::string_view> words, bool terminal,
            std::ostream& out, std::ostream& progress) {
  for (const absl::string_view word : words) {
    if (word == "--help" || word == "-h") {
      out << Help(ops, words[0]);
      return 0;
    }
  }
  const absl::Status status = Run(ops, words, terminal, out, progress);
  if (status.ok()) return 0;
  progress << status.message() << std::endl;
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ? 2
                                                                          : 1;
}

}  // namespace quern
