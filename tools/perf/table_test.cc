#include "quern/tools/perf/table.h"

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/isa.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/driver.h"
#include "quern/tools/perf/driver_testutil.h"
#include "quern/tools/perf/json_testutil.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/report.h"
#include "quern/tools/perf/run_case.h"

namespace quern {
namespace {

TEST(TableTest, EveryCommandIsOneCaseOfAnOperator) {
  const std::vector<OpEntry> ops = AllOps();
  std::set<std::string> seen;
  for (const std::string& command : TableCommands()) {
    SCOPED_TRACE(command);
    EXPECT_TRUE(seen.insert(command).second);
    const std::vector<absl::string_view> words = absl::StrSplit(command, ' ');
    const OpEntry* entry = FindOp(ops, words[0]);
    ASSERT_NE(entry, nullptr);
    const absl::StatusOr<Args> args =
        ParseOpArgs(*entry, absl::MakeConstSpan(words).subspan(1));
    ASSERT_TRUE(args.ok()) << args.status();
    std::vector<OpCase> cases = {{*args, ""}};
    if (entry->cases != nullptr) {
      absl::StatusOr<std::vector<OpCase>> some = entry->cases(*args);
      ASSERT_TRUE(some.ok()) << some.status();
      cases = *some;
    }
    ASSERT_EQ(cases.size(), 1u);
    const auto op = entry->create(cases[0].args);
    EXPECT_TRUE(op.ok()) << op.status();
  }
  EXPECT_GE(seen.size(), 100u);
}

TEST(TableTest, GivesAKeyEachOfItsValuesInTurn) {
  EXPECT_EQ(TableCommands("--weights=q4_k"),
            (std::vector<std::string>{
                "linear --n=4096 --k=4096 --weights=q4_k --m=1",
                "linear --n=4096 --k=4096 --weights=q4_k --m=4",
                "linear --n=4096 --k=4096 --weights=q4_k --m=16",
                "linear --n=4096 --k=4096 --weights=q4_k --m=64",
                "linear --n=4096 --k=4096 --weights=q4_k --m=256",
                "pack --weights=q4_k"}));
  EXPECT_EQ(TableCommands("router"),
            (std::vector<std::string>{"router --tokens=256"}));
  EXPECT_TRUE(TableCommands("no such case").empty());
}

TEST(TableTest, KnowsItsCommandLine) {
  const auto asks = [](absl::string_view line) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, ' ', absl::SkipEmpty());
    return AsksForTable(words);
  };
  EXPECT_TRUE(asks("--table"));
  EXPECT_TRUE(asks("--table=linear --runs=3"));
  EXPECT_TRUE(asks("--isa=AVX2 --table"));
  EXPECT_FALSE(asks(""));
  EXPECT_FALSE(asks("--tables"));
  EXPECT_FALSE(asks("linear --table"));
}

// 200 MB in 4 ms where memory gives 80 GB/s; 1 GFLOP where 500 are possible.
Row Example() {
  Row row;
  row.median_us = 4000;
  row.bytes = 200e6;
  row.flops = 1e9;
  row.dram_kind = "copy";
  row.dram_gbps = 80;
  row.peak_kind = "i8";
  row.peak_gflops = 500;
  row.dram_steady = row.peak_steady = true;
  row.command = "pack --n=3";
  return row;
}

TEST(TableTest, ALineNamesTheNearerLimit) {
  Row row = Example();
  EXPECT_EQ(TableCaseLine(row),
            "      4000.0    62.5 %  DRAM copy 80.0 GB/s"
            "                    pack --n=3");
  row.flops = 1.8e9;
  row.dram_steady = false;  // the other limit
  EXPECT_EQ(TableCaseLine(row),
            "      4000.0    90.0 %  i8 500.0 GOP/s"
            "                         pack --n=3");
  row.peak_steady = false;
  row.preempted = true;
  EXPECT_EQ(TableCaseLine(row),
            "      4000.0    90.0 %  i8 500.0 GOP/s"
            "             limit+time  pack --n=3");
  row.flops = 0;
  row.peak_gflops = kAbsent;
  row.preempted = false;
  EXPECT_EQ(TableCaseLine(row),
            "      4000.0    62.5 %  DRAM copy 80.0 GB/s"
            "        limit       pack --n=3");
  EXPECT_EQ(TableCaseHeader().find("command"),
            TableCaseLine(row).find("pack --n=3"));
}

TEST(TableTest, PrintsAHeaderAndALineForEachCase) {
  const Outcome outcome = Perf("--table=router --threads=1 --runs=1 --check=1");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.progress;
  const std::vector<std::string> lines =
      absl::StrSplit(outcome.out, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 5u) << outcome.out;
  EXPECT_TRUE(absl::StrContains(lines[0], "; 1 thread; ")) << lines[0];
  for (const char* name :
       {"dram_read", "dram_copy", "f32_fma", "bf16_dot", "i8_dot"}) {
    EXPECT_TRUE(absl::StrContains(lines[1], name)) << lines[1];
  }
  EXPECT_EQ(lines[2],
            "# repeat a line by: perf COMMAND --threads=1 --runs=1 --check=1");
  EXPECT_EQ(lines[3], TableCaseHeader());
  EXPECT_TRUE(absl::EndsWith(lines[4], "  router --tokens=256")) << lines[4];
}

TEST(TableTest, RunsOnTheInstructionSetThatWasAskedFor) {
  const std::string isa = NextBestIsa();
  const Outcome outcome = Perf("--isa=" + isa +
                               " --table=router --threads=1 --runs=1"
                               " --format=json");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.progress;
  const std::vector<std::string> lines =
      absl::StrSplit(outcome.out, '\n', absl::SkipEmpty());
  ASSERT_GE(lines.size(), 2u);
  for (const std::string& line : lines) {
    const auto fields = FlatJson::Parse(line);
    ASSERT_TRUE(fields.has_value()) << line;
    EXPECT_TRUE(StandsFor(fields->at("isa"), isa)) << line;
  }
  const auto last = FlatJson::Parse(lines.back());
  EXPECT_EQ(last->at("command"), "router --tokens=256");
  EXPECT_EQ(last->at("peak_kind"), "f32");
}

TEST(TableTest, RefusesNonsenseInOneSentenceWithCode2) {
  struct Refusal {
    const char* line;
    const char* begin;
  };
  for (const Refusal& r : std::vector<Refusal>{
           {"--table=nosuch", "table: no case has \"nosuch\"; "},
           {"--table --warm=1", "table: --warm=1; need 0, "},
           {"--table --m=3", "table: no key --m; need one of --table "},
           {"--table --isa=MMX", "table: --isa=\"MMX\" is not on this CPU; "},
           {"--table --runs=0", "table: runs=0; need 1 <= runs <= 100000"},
           {"--table --table=a", "table: --table is given twice"}}) {
    const Outcome outcome = Perf(r.line);
    EXPECT_EQ(outcome.exit_code, 2) << r.line;
    EXPECT_EQ(outcome.out, "") << r.line;
    EXPECT_EQ(outcome.progress.rfind(r.begin, 0), 0u) << outcome.progress;
  }
}

// An operator that is not there is refused, and does not stop the run.
TEST(TableTest, GoesOnAfterACaseThatFails) {
  std::ostringstream out, progress;
  const int exit_code =
      RunPerf({}, {"--table=--weights=q8_0 --m=", "--threads=1", "--runs=1"},
              SmallMachine(), true, out, progress);
  EXPECT_EQ(exit_code, 1) << progress.str();
  EXPECT_EQ(
      std::vector<std::string>(absl::StrSplit(out.str(), "  failed ")).size(),
      6u)
      << out.str();
  EXPECT_TRUE(
      absl::StrContains(progress.str(), "table: no operator \"linear\""));
}

}  // namespace
}  // namespace quern
