#include "quern/tools/perf/table.h"

#include <cmath>
#include <cstddef>
#include <iterator>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/limit_rows.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/run_case.h"
#include "quern/tools/perf/settings.h"

namespace quern {
namespace {

constexpr absl::string_view kTable = "table";
constexpr absl::string_view kFlag = "--table";

// One case, or one for each value of a key.
struct Cases {
  absl::string_view command;      // an operator and its keys
  absl::string_view key = "";     // a key that has each of `values` in turn
  absl::string_view values = "";  // between spaces
};

constexpr absl::string_view kRows = "1 4 16 64 256";
constexpr absl::string_view kCaches = "bf16 i8 f8e4m3";

constexpr Cases kCases[] = {
    // Linear layers, by the format of the weights.
    {"linear --n=4096 --k=4096 --dtype=f32 --out=f32", "m", kRows},
    {"linear --n=4096 --k=4096 --dtype=bf16", "m", kRows},
    {"linear --n=4096 --k=4096 --dtype=f16 --out=f16", "m", kRows},
    {"scaled_linear --n=4096 --k=4096", "m", kRows},
    {"fp8_block_linear --n=4096 --k=4096", "m", kRows},
    {"int4_linear --n=4096 --k=4096 --group=128", "m", kRows},
    {"int4_linear --n=4096 --k=4096 --group=128 --activations=int8", "m",
     kRows},
    {"int8_group_linear --n=4096 --k=4096", "m", kRows},
    {"linear --n=4096 --k=4096 --weights=q8_0", "m", kRows},
    {"linear --n=4096 --k=4096 --weights=q4_0", "m", kRows},
    {"linear --n=4096 --k=4096 --weights=q4_k", "m", kRows},
    {"linear --n=4096 --k=4096 --weights=q6_k", "m", kRows},
    {"moe --weights=float", "tokens", "1 16 64 256"},
    {"moe --weights=q8_0", "tokens", "1 16 64 256"},
    // Attention: decode of one and of eight sequences, and prompts.
    {"attention --batch=1 --kv_len=4096", "kv", kCaches},
    {"attention --batch=8 --kv_len=4096", "kv", kCaches},
    {"attention --batch=1 --kv_len=32768", "kv", kCaches},
    {"attention --q_len=512 --kv_len=512", "kv", kCaches},
    {"attention --q_len=2048 --kv_len=2048", "kv", kCaches},
    // What moves rows.
    {"rms_norm", "dtype", "f32 bf16"},
    {"fused_add_rms_norm", "dtype", "f32 bf16"},
    {"silu_and_mul --d=4096", "dtype", "f32 bf16"},
    {"silu_and_mul --d=14336 --dtype=bf16"},
    {"gelu_and_mul --d=14336 --dtype=bf16"},
    {"rotary_embedding", "dtype", "f32 bf16"},
    {"logits_processor --rows=64 --hidden=128256"},
    {"sample", "filter", "none top_k top_p"},
    {"adjust_logits"},
    {"token_logprobs"},
    {"router --tokens=256"},
    // Numbers that change type, and weights that change place.
    {"quantize", "act", "token tensor"},
    {"quant_fp8 --dtype=bf16"},
    {"rms_norm_quant --dtype=bf16"},
    {"convert --from=f32", "to", "bf16 f16 f8e4m3"},
    {"kv_write --tokens=4096", "kv", kCaches},
    {"pack", "dtype", "bf16 f16 int8"},
    {"pack", "weights", "q8_0 q4_k q6_k"},
    // Recurrent layers, with the states of Mamba-2 2.7B.
    {"state_update --dtype=f32", "batch", "1 64"},
    {"state_update --dtype=f32 --len=512"},
    {"causal_conv1d --channels=5376 --dtype=f32", "batch", "1 64"},
    {"causal_conv1d --channels=5376 --dtype=f32 --len=512"},
    {"delta_rule --dtype=bf16", "batch", "1 64"},
    // Drafts that write the last state, or all.
    {"delta_rule --dtype=bf16 --len=4", "drafts", "1 2"},
};

const char* OpsUnit(absl::string_view dtype) {
  return dtype == "i8" || dtype == "i6" ? "GOP/s" : "GFLOP/s";
}

// "DRAM read 30.4 GB/s" or "f32 196.0 GFLOP/s": the limit that the row's time
// is nearer to.
std::string LimitText(const Row& row) {
  const double of_dram = row.of_dram(), of_peak = row.of_peak();
  if (std::isnan(of_peak) || of_dram >= of_peak) {
    return absl::StrFormat("DRAM %s %.1f GB/s", row.dram_kind, row.dram_gbps);
  }
  return absl::StrFormat("%s %.1f %s", row.peak_kind, row.peak_gflops,
                         OpsUnit(row.peak_kind));
}

// What the limit of LimitText or the time suffered from; empty for nothing.
std::string Disturbance(const Row& row) {
  const bool dram = std::isnan(row.of_peak()) || row.of_dram() >= row.of_peak();
  std::vector<absl::string_view> parts;
  if (!(dram ? row.dram_steady : row.peak_steady)) parts.push_back("limit");
  if (row.preempted) parts.push_back("time");
  return absl::StrJoin(parts, "+");
}

// The keys that were given, as a command line repeats them.
std::string GivenKeys(const Args& args) {
  std::string text;
  for (const Key& key : kCommonKeys) {
    if (key.name == "format" || !args.given(key.name)) continue;
    absl::StrAppend(&text, " --", key.name, "=", args.Text(key.name));
  }
  for (const Key& key : kOpKeys) {
    if (!args.given(key.name)) continue;
    absl::StrAppend(&text, " --", key.name, "=", args.Text(key.name));
  }
  return text;
}

// Prints what does not change from case to case.
void PrintHeader(const Args& args, const Settings& settings, const CpuInfo& cpu,
                 CaseRunner& runner, std::ostream& out) {
  std::vector<std::string> texts;
  const auto keep = [&](const Row& row) {
    if (!settings.table) {
      out << JsonLine(row) << std::endl;
      return;
    }
    const bool ops = row.flops > 0;
    texts.push_back(absl::StrFormat(
        "%s %.1f %s%s", row.shape, ops ? row.gflops() : row.gbps(),
        ops ? OpsUnit(row.dtype) : "GB/s", row.steady() ? "" : " (disturbed)"));
  };
  MeasureDramLimits(settings.runs, runner.limits(), runner.executor(), keep);
  MeasureCoreLimits(settings.runs, settings.threads, runner.limits(),
                    runner.executor(), keep);
  if (!settings.table) return;
  out << "# " << (cpu.model.empty() ? "unknown CPU" : cpu.model) << "; "
      << runner.limits().target() << "; " << settings.threads
      << (settings.threads == 1 ? " thread; " : " threads; ")
      << runner.limits().pages() << " pages; " << settings.runs
      << " runs a line\n# limits: " << absl::StrJoin(texts, ", ")
      << "\n# repeat a line by: perf COMMAND" << GivenKeys(args) << "\n"
      << TableCaseHeader() << std::endl;
}

// Measures one command and prints its line. `exceeded` becomes the first line
// that exceeds a limit.
absl::Status RunCommand(absl::Span<const OpEntry> ops,
                        const std::string& command, const Settings& settings,
                        const CpuInfo& cpu, CaseRunner& runner,
                        std::ostream& out, absl::Status& exceeded) {
  const std::vector<absl::string_view> words = absl::StrSplit(command, ' ');
  const OpEntry* const entry = FindOp(ops, words[0]);
  if (entry == nullptr) {
    return InvalidArgument(kTable, "no operator \"", words[0], "\"");
  }
  QUERN_ASSIGN_OR_RETURN(
      const Args args,
      ParseOpArgs(*entry, absl::MakeConstSpan(words).subspan(1)));
  QUERN_ASSIGN_OR_RETURN(std::vector<ReadyCase> cases,
                         PrepareCases(*entry, args, settings, cpu));
  for (ReadyCase& ready : cases) {
    QUERN_ASSIGN_OR_RETURN(Row row, runner.Run(*entry, ready));
    ready.op.reset();
    row.command = command;
    out << (settings.table ? TableCaseLine(row) : JsonLine(row)) << std::endl;
    exceeded.Update(CheckOfLimits(row));
  }
  return absl::OkStatus();
}

// A refusal of one case is a failure of the run, not of its command line.
absl::Status AsFailure(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status)
             ? absl::FailedPreconditionError(status.message())
             : status;
}

}  // namespace

std::vector<std::string> TableCommands(absl::string_view substring) {
  std::vector<std::string> commands;
  for (const Cases& cases : kCases) {
    std::vector<std::string> some;
    if (cases.key.empty()) some.emplace_back(cases.command);
    for (const absl::string_view value :
         absl::StrSplit(cases.values, ' ', absl::SkipEmpty())) {
      some.push_back(absl::StrCat(cases.command, " --", cases.key, "=", value));
    }
    for (std::string& command : some) {
      if (absl::StrContains(command, substring)) {
        commands.push_back(std::move(command));
      }
    }
  }
  return commands;
}

bool AsksForTable(absl::Span<const absl::string_view> words) {
  if (words.empty() || !absl::StartsWith(words[0], "--")) return false;
  for (absl::string_view word : words) {
    if (absl::ConsumePrefix(&word, kFlag) && (word.empty() || word[0] == '=')) {
      return true;
    }
  }
  return false;
}

absl::Status RunTable(absl::Span<const OpEntry> ops,
                      absl::Span<const absl::string_view> words,
                      const CpuInfo& cpu, std::ostream& out,
                      std::ostream& progress) {
  // --table is a key like the others, but may stand alone.
  std::vector<Key> own = {{kTable, "", "part of a command"}};
  own.insert(own.end(), std::begin(kOpKeys), std::end(kOpKeys));
  std::vector<absl::string_view> keys(words.begin(), words.end());
  for (absl::string_view& word : keys) {
    if (word == kFlag) word = "--table=";
  }
  QUERN_ASSIGN_OR_RETURN(const Args args,
                         Args::Parse(kTable, own, kCommonKeys, keys));
  QUERN_ASSIGN_OR_RETURN(const Settings settings,
                         ReadSettings(args, cpu, /*terminal=*/true));
  if (settings.warm) {
    return InvalidArgument(kTable,
                           "--warm=1; need 0, because the limit of "
                           "memory is the one of DRAM");
  }
  const std::vector<std::string> commands = TableCommands(args.Text(kTable));
  if (commands.empty()) {
    return InvalidArgument(kTable, "no case has \"", args.Text(kTable),
                           "\"; --table without a value has all of them");
  }
  const ScopedIsa scoped_isa(settings.isa);
  QUERN_ASSIGN_OR_RETURN(CaseRunner runner,
                         CaseRunner::Create(kTable, settings, cpu, progress));
  PrintHeader(args, settings, cpu, runner, out);
  absl::Status first, exceeded;
  for (size_t i = 0; i < commands.size(); ++i) {
    progress << kTable << ": " << i + 1 << " of " << commands.size() << ": "
             << commands[i] << std::endl;
    const absl::Status status =
        RunCommand(ops, commands[i], settings, cpu, runner, out, exceeded);
    if (status.ok()) continue;
    progress << status.message() << std::endl;
    if (settings.table) {
      out << absl::StrFormat("%12s %9s  %-26s %-10s  %s", "-", "-", "failed",
                             "", commands[i])
          << std::endl;
    }
    first.Update(AsFailure(status));
  }
  first.Update(exceeded);
  return first;
}

std::string TableCaseHeader() {
  return absl::StrFormat("%12s %9s  %-26s %-10s  %s", "median us", "of limit",
                         "limit", "disturbed", "command");
}

std::string TableCaseLine(const Row& row) {
  return absl::StrFormat("%12.1f %7.1f %%  %-26s %-10s  %s", row.median_us,
                         100 * row.of_roof(), LimitText(row), Disturbance(row),
                         row.command);
}

}  // namespace quern
