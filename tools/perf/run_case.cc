#include "quern/tools/perf/run_case.h"

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
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/isa.h"
#include "quern/core/limits/limits.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/max_isa.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/limit_rows.h"
#include "quern/tools/perf/measure.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/settings.h"

namespace quern {
namespace {

// "1.5 MiB", "8.8 KiB".
std::string Size(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  return bytes < 1 << 20 ? absl::StrFormat("%.1f KiB", value / (1 << 10))
                         : absl::StrFormat("%.1f MiB", value / (1 << 20));
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

}  // namespace

ScopedIsa::ScopedIsa(const std::string& isa) {
  if (isa.empty()) return;
  Isa asked = {IsaBit(isa)};
  for (const Isa& leaf : kIsasWithLeaf) {
    if (isa == leaf.name()) asked = leaf;
  }
  UseIsaForTest(&asked);
}
ScopedIsa::~ScopedIsa() { UseIsaForTest(nullptr); }

absl::Status ProveIsa(absl::string_view op, const Settings& settings,
                      absl::string_view ran) {
  if (settings.isa.empty() || IsaHas(settings.isa, ran) || ran == kNoIsa) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      op, ": asked for ", settings.isa, ", but the kernels are for ", ran));
}

const OpEntry* FindOp(absl::Span<const OpEntry> ops, absl::string_view name) {
  for (const OpEntry& entry : ops) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

absl::StatusOr<Args> ParseOpArgs(const OpEntry& entry,
                                 absl::Span<const absl::string_view> words) {
  std::vector<Key> keys = entry.keys;
  keys.insert(keys.end(), std::begin(kOpKeys), std::end(kOpKeys));
  return Args::Parse(entry.name, keys, kCommonKeys, words);
}

absl::StatusOr<std::vector<ReadyCase>> PrepareCases(const OpEntry& entry,
                                                    const Args& args,
                                                    const Settings& settings,
                                                    const CpuInfo& cpu) {
  const int64_t cold_bytes = kColdPasses * cpu.last_level_bytes();
  std::vector<OpCase> cases = {{args, ""}};
  if (entry.cases != nullptr) {
    QUERN_ASSIGN_OR_RETURN(cases, entry.cases(args));
  }
  std::vector<ReadyCase> all;
  for (OpCase& c : cases) {
    ReadyCase ready;
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

CaseRunner::CaseRunner(const Settings& settings, int64_t cache_bytes,
                       std::unique_ptr<HwyExecutor> executor, Limits limits,
                       std::ostream& progress)
    : settings_(settings),
      cache_bytes_(cache_bytes),
      executor_(std::move(executor)),
      limits_(std::move(limits)),
      progress_(&progress) {}

absl::StatusOr<CaseRunner> CaseRunner::Create(absl::string_view name,
                                              const Settings& settings,
                                              const CpuInfo& cpu,
                                              std::ostream& progress) {
  QUERN_ASSIGN_OR_RETURN(auto executor, HwyExecutor::Create(settings.threads));
  QUERN_ASSIGN_OR_RETURN(Limits limits, Limits::Create(cpu));
  QUERN_RETURN_IF_ERROR(ProveIsa(name, settings, limits.target()));
  return CaseRunner(settings, cpu.last_level_bytes(), std::move(executor),
                    std::move(limits), progress);
}

absl::StatusOr<Row> CaseRunner::Run(const OpEntry& entry,
                                    const ReadyCase& ready) {
  std::ostream& progress = *progress_;
  Op& op = *ready.op;
  const int64_t sets = ready.sets;
  progress << entry.name << ": " << op.Info().shape << ", " << sets
           << (sets == 1 ? " working set of " : " working sets of ")
           << Size(op.set_bytes()) << std::endl;
  if (!settings_.warm && sets * op.set_bytes() < kColdPasses * cache_bytes_) {
    progress << entry.name << ": no more can be made; the caches may hold "
             << Size(sets * op.set_bytes()) << ": not a figure of DRAM"
             << std::endl;
  }
  QUERN_RETURN_IF_ERROR(op.Setup(sets, *executor_));
  // The linear operators make their plans in Setup.
  QUERN_RETURN_IF_ERROR(ProveIsa(entry.name, settings_, op.Info().isa));

  double max_err = kAbsent;
  if (settings_.check) {
    progress << entry.name << ": comparing with the reference" << std::endl;
    QUERN_ASSIGN_OR_RETURN(max_err, op.Check(*executor_));
  }
  if (!settings_.warm) {  // DRAM does not bound a warm run
    limits_.Calibrate(op.Info().dram_kind, CalibrationRounds(settings_.runs),
                      *executor_);
  }
  progress << entry.name << ": " << settings_.runs << " runs on "
           << settings_.threads
           << (settings_.threads == 1 ? " thread" : " threads") << std::endl;
  Row row =
      Measure(op, {sets, settings_.runs, settings_.warm ? 0 : cache_bytes_},
              limits_, *executor_);
  row.op = std::string(entry.name);
  row.layer = ready.layer;
  row.threads = settings_.threads;
  row.max_err = max_err;
  row.preempted = row.disturbed >= 2 * settings_.runs;
  if (row.preempted) {
    progress << entry.name
             << ": other processes had our CPUs; do not quote this"
             << std::endl;
  }
  return row;
}

}  // namespace quern
