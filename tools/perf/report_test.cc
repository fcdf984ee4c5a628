#include "quern/tools/perf/report.h"

#include <limits>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/tools/perf/json_testutil.h"

namespace quern {
namespace {

// 200 MB in 4 ms where memory gives 80 GB/s; 1 GFLOP where 500 are possible.
Row Example() {
  Row row;
  row.op = "pack";
  row.shape = "n=16 k=8";
  row.dtype = "bf16";
  row.isa = "AVX2";
  row.threads = 2;
  row.runs = 21;
  row.median_us = 4000;
  row.min_us = 3900;
  row.bytes = 200e6;
  row.flops = 1e9;
  row.dram_kind = "copy";
  row.dram_gbps = 80;
  row.peak_gflops = 500;
  row.max_err = 0.25;
  row.ghz = 2.5;
  row.dram_bounds = row.peak_bounds = true;
  row.dram_steady = row.peak_steady = true;
  return row;
}

TEST(RowTest, DerivesRatesAndFractions) {
  const Row row = Example();
  EXPECT_DOUBLE_EQ(row.gbps(), 50);
  EXPECT_DOUBLE_EQ(row.gflops(), 250);
  EXPECT_DOUBLE_EQ(row.of_dram(), 0.625);  // 2.5 ms of 4
  EXPECT_DOUBLE_EQ(row.of_peak(), 0.5);    // 2 ms of 4
}

TEST(RowTest, RoofIsTheLargerLimit) {
  Row row = Example();
  EXPECT_DOUBLE_EQ(row.of_roof(), 0.625);
  row.flops = 1.5e9;
  EXPECT_DOUBLE_EQ(row.of_roof(), 0.75);
  row.flops = 0;
  EXPECT_DOUBLE_EQ(row.of_roof(), 0.625);
  row.dram_gbps = kAbsent;
  row.flops = 1e9;
  EXPECT_DOUBLE_EQ(row.of_roof(), 0.5);
}

TEST(RowTest, CountsOperationsOrElseBytesOfAThreadInACycle) {
  Row row = Example();
  EXPECT_DOUBLE_EQ(row.per_cycle(), 50);  // 250 GFLOP/s of 2 * 2.5 GHz
  row.flops = kAbsent;
  EXPECT_DOUBLE_EQ(row.per_cycle(), 10);  // 50 GB/s
}

TEST(CheckOfLimitsTest, RefusesWhatExceedsAnUndisturbedLimit) {
  Row row = Example();
  EXPECT_TRUE(CheckOfLimits(row).ok());
  row.peak_gflops = 250 / 1.2;
  absl::Status status = CheckOfLimits(row);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(),
            "pack: of_peak=1.20 at n=16 k=8; need at most 1.03 of an "
            "undisturbed limit, 208.3 GFLOP/s");
  row = Example();
  row.dram_gbps = 50 / 1.2;
  status = CheckOfLimits(row);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(),
            "pack: of_dram=1.20 at n=16 k=8; need at most 1.03 of an "
            "undisturbed limit, 41.7 GB/s");
}

TEST(CheckOfLimitsTest, AllowsThreePercentOfTheClock) {
  Row row = Example();
  row.peak_gflops = 250 / 1.029;
  row.dram_gbps = 50 / 1.029;
  EXPECT_TRUE(CheckOfLimits(row).ok()) << CheckOfLimits(row);
  row.peak_gflops = 250 / 1.031;
  EXPECT_FALSE(CheckOfLimits(row).ok());
}

// Data in caches is not bound by DRAM, nor an operator by the limit of another
// instruction set.
TEST(CheckOfLimitsTest, AppliesWhereTheLimitIsABound) {
  Row row = Example();
  row.dram_gbps = 5;
  row.dram_bounds = false;
  EXPECT_TRUE(CheckOfLimits(row).ok()) << CheckOfLimits(row);
  row.peak_gflops = 5;
  EXPECT_FALSE(CheckOfLimits(row).ok());
  row.peak_bounds = false;
  EXPECT_TRUE(CheckOfLimits(row).ok()) << CheckOfLimits(row);
  row.dram_gbps = row.peak_gflops = kAbsent;
  row.dram_bounds = row.peak_bounds = true;
  EXPECT_TRUE(CheckOfLimits(row).ok()) << CheckOfLimits(row);
}

TEST(CheckOfLimitsTest, ADisturbanceExcusesTwiceAtMost) {
  Row row = Example();
  row.dram_steady = row.peak_steady = false;
  row.peak_gflops = 250 / 1.9;
  EXPECT_TRUE(CheckOfLimits(row).ok()) << CheckOfLimits(row);
  row.peak_gflops = 250 / 2.1;
  EXPECT_EQ(CheckOfLimits(row).message(),
            "pack: of_peak=2.10 at n=16 k=8; need at most 2.00 of a disturbed "
            "limit, 119.0 GFLOP/s");
}

// A warm run is bound by the peak alone, and its limit of DRAM, which was not
// calibrated, is the least steady of all.
TEST(CheckOfLimitsTest, ADisturbanceOfOneLimitDoesNotExcuseTheOther) {
  Row row = Example();
  row.dram_steady = false;
  EXPECT_FALSE(row.steady());
  row.peak_gflops = 250 / 1.2;
  EXPECT_EQ(CheckOfLimits(row).message(),
            "pack: of_peak=1.20 at n=16 k=8; need at most 1.03 of an "
            "undisturbed limit, 208.3 GFLOP/s");
  row = Example();
  row.peak_steady = false;
  EXPECT_FALSE(row.steady());
  row.dram_gbps = 50 / 1.2;
  EXPECT_EQ(CheckOfLimits(row).message(),
            "pack: of_dram=1.20 at n=16 k=8; need at most 1.03 of an "
            "undisturbed limit, 41.7 GB/s");
}

TEST(ReportTest, JsonHasEveryFieldOnce) {
  const std::string line = JsonLine(Example());
  const auto fields = FlatJson::Parse(line);
  ASSERT_TRUE(fields.has_value()) << line;
  for (const char* name :
       {"op",        "shape",     "dtype",     "isa",       "threads",
        "runs",      "median_us", "min_us",    "bytes",     "flops",
        "gbps",      "gflops",    "dram_kind", "dram_gbps", "peak_gflops",
        "of_dram",   "of_peak",   "of_roof",   "max_err",   "ghz",
        "per_cycle", "limits",    "note"}) {
    EXPECT_EQ(fields->count(name), 1u) << name;
  }
  EXPECT_EQ(fields->at("limits"), "steady");
  EXPECT_EQ(fields->at("note"), "null");
  EXPECT_EQ(fields->at("op"), "pack");
  EXPECT_EQ(fields->at("bytes"), "200000000");
  EXPECT_EQ(fields->at("of_roof"), "0.625");
  EXPECT_EQ(fields->at("max_err"), "0.25");
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

TEST(ReportTest, WhatIsNotANumberIsNull) {
  Row row = Example();
  row.max_err = kAbsent;
  row.dram_gbps = std::numeric_limits<double>::infinity();
  row.median_us = 0;  // every rate divides by it
  row.dram_kind.clear();
  const std::string line = JsonLine(row);
  const auto fields = FlatJson::Parse(line);
  ASSERT_TRUE(fields.has_value()) << line;
  for (const char* name : {"max_err", "dram_gbps", "gbps", "gflops", "of_dram",
                           "of_peak", "of_roof", "dram_kind"}) {
    EXPECT_EQ(fields->at(name), "null") << name;
  }
}

TEST(ReportTest, EscapesText) {
  Row row = Example();
  row.shape = "a \"b\" \\ \n";
  const auto fields = FlatJson::Parse(JsonLine(row));
  ASSERT_TRUE(fields.has_value()) << JsonLine(row);
  EXPECT_EQ(JsonLine(row).find('\n'), std::string::npos);
}

TEST(ReportTest, PrintsSmallAndLargeNumbersAsJson) {
  Row row = Example();
  for (const double value :
       {0.0, 1e-12, 3.25e-5, 0.1, 123456789.0, 1e15, 1.5e300}) {
    row.max_err = value;
    const auto fields = FlatJson::Parse(JsonLine(row));
    ASSERT_TRUE(fields.has_value()) << JsonLine(row);
    EXPECT_NEAR(std::stod(fields->at("max_err")), value, 1e-5 * value);
  }
}

TEST(ReportTest, TableRowsHaveTheWidthOfTheirHeader) {
  Row row = Example();
  EXPECT_EQ(TableLine(row).size(), TableHeader().size());
  row.max_err = row.peak_gflops = kAbsent;
  EXPECT_EQ(TableLine(row).size(), TableHeader().size());
  row.median_us = 1e9;
  EXPECT_EQ(TableLine(row).size(), TableHeader().size());
  EXPECT_NE(TableLine(Example()).find("62.5 %"), std::string::npos);
}

TEST(FlatJsonTest, RejectsWhatIsNotJson) {
  for (const char* text :
       {"", "{", "{}x", "{\"a\": nan}", "{\"a\": inf}", "{\"a\": -}",
        "{\"a\": 1,}", "{\"a\": 1 \"b\": 2}", "{\"a\": 1, \"a\": 1}",
        "{\"a\": \"x}", "{\"a\": 1.}", "{\"a\": 1e}"}) {
    EXPECT_FALSE(FlatJson::Parse(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace quern
