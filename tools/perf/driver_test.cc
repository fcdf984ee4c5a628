#include "quern/tools/perf/driver.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/executor.h"
#include "quern/core/isa.h"
#include "quern/core/status_macros.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/driver_testutil.h"
#include "quern/tools/perf/json_testutil.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

// Does nothing, and says that it was much: no machine reaches an exaflop a
// second, however disturbed.
class Boaster final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = std::make_unique<Boaster>();
    QUERN_ASSIGN_OR_RETURN(op->flops_, args.Int("flops", 0, kMost));
    QUERN_ASSIGN_OR_RETURN(op->own_isa_, args.Flag("own_isa"));
    return op;
  }
  static absl::StatusOr<std::vector<OpCase>> Cases(const Args& args) {
    return std::vector<OpCase>{{args, "first"}, {args, "second"}};
  }
  static OpEntry Entry() {
    return {"boaster",
            "does nothing, and counts it",
            {{"flops", "0", "of a call"}, {"own_isa", "0", "1: no target's"}},
            &Create,
            &Cases};
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = "all";
    info.dtype = "f32";
    const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
    info.isa = own_isa_ ? "own" : hwy::TargetName(targets & -targets);
    info.flops = static_cast<double>(flops_);
    // One byte, because the caches of some machines hold less than the most
    // working sets that a run may have: DRAM would bound the run there.
    info.SetTraffic(1, 0);
    return info;
  }
  int64_t set_bytes() const override { return 64; }
  absl::Status Setup(int64_t, Executor&) override { return absl::OkStatus(); }
  void Run(int64_t, Executor&) override {}
  absl::StatusOr<double> Check(Executor&) override { return 0; }

 private:
  static constexpr int64_t kMost = int64_t{1} << 60;
  int64_t flops_ = 0;
  bool own_isa_ = false;
};

TEST(DriverTest, FailsALineThatExceedsItsLimit) {
  const auto perf = [](const std::vector<absl::string_view>& words) {
    std::ostringstream out, progress;
    const int exit_code = RunPerf({Boaster::Entry()}, words, SmallMachine(),
                                  false, out, progress);
    return Outcome{exit_code, out.str(), progress.str()};
  };
  const Outcome honest = perf({"boaster", "--runs=1", "--threads=1"});
  EXPECT_EQ(honest.exit_code, 0) << honest.progress;

  const Outcome boast = perf(
      {"boaster", "--runs=1", "--threads=1", "--flops=1000000000000000000"});
  EXPECT_EQ(boast.exit_code, 1) << boast.out;
  EXPECT_NE(boast.progress.find("\nboaster: of_peak="), std::string::npos)
      << boast.progress;
  EXPECT_NE(boast.progress.find(" at all; need at most "), std::string::npos)
      << boast.progress;
  // The other shapes are measured all the same.
  EXPECT_NE(boast.out.find("\"layer\": \"first\""), std::string::npos);
  EXPECT_NE(boast.out.find("\"layer\": \"second\""), std::string::npos);

  const Outcome other = perf({"boaster", "--runs=1", "--threads=1",
                              "--flops=1000000000000000000", "--own_isa=1"});
  EXPECT_EQ(other.exit_code, 0) << other.progress;
}

TEST(DriverTest, RefusesNonsenseInOneSentenceWithCode2) {
  struct Refusal {
    const char* line;
    const char* begin;
  };
  for (const Refusal& r : std::vector<Refusal>{
           {"", "perf: no operator; need one of limits, "},
           {"nonsense", "perf: no operator \"nonsense\"; need one of limits, "},
           {"--threads=1", "perf: no operator \"--threads=1\"; need one of "},
           {"limits --m=1", "limits: no key --m; need one of --threads "},
           {"limits --check=1", "limits: no key --check; "},
           {"limits --runs", "limits: cannot read \"--runs\"; "},
           {"limits --runs=0", "limits: runs=0; need 1 <= runs <= 100000"},
           {"limits --runs=many", "limits: --runs=\"many\" is not an integer"},
           {"limits --threads=-1", "limits: threads=-1; need 0 <= threads <="},
           {"limits --threads=1000000", "limits: threads=1000000; need "},
           {"limits --isa=MMX", "limits: --isa=\"MMX\" is not on this CPU; "},
           {"limits --format=xml", "limits: --format=\"xml\"; need one of "},
           {"limits --runs=1 --runs=2", "limits: --runs is given twice"},
           {"convert --elements=0", "convert: elements=0; need 1 <= "},
           {"convert --from=i8", "convert: --from=\"i8\"; need one of f32, "},
           {"convert --elements=68719476736", "convert: needs "},
           {"pack --n=0", "pack: n=0; need 1 <= n <= "},
           {"pack --dtype=f64", "pack: --dtype=\"f64\"; need one of "},
           {"pack --warm=2", "pack: --warm=\"2\"; need one of 0, 1"},
           {"pack --n=16777216 --k=16777216", "pack: needs "},
           {"quantize --k=0", "quantize: k=0; need 1 <= k <= "},
           {"router --groups=3", "router: groups=3; need a divisor of "},
           {"mixer --kind=mamba3", "mixer: --kind=\"mamba3\"; need one of "},
           {"mixer --heads=6 --groups=4",
            "mixer: groups=4; need a divisor of heads=6"},
           {"mixer --kind=mamba --heads=2", "mixer: heads=2; need 1 of kind "},
           {"mixer --d_state=1025", "mixer: d_state=1025; need 1024 or less"},
           {"rms_norm --hidden=-4", "rms_norm: hidden=-4; need "},
           {"attention --q_len=5 --kv_len=4", "attention: q_len=5; need 1 <= "},
           {"attention --tree=2 --q_len=65", "attention: q_len=65; need 1 <= "},
           {"attention --page_size=1000000 --batch=4096", "attention: needs "},
           {"linear --m=1,0", "linear: m=0; need 1 <= m <= "},
           {"linear --m=1,,2", "linear: --m=\"\" is not an integer; need "},
           {"linear --m=1,2 --dtype=i8", "linear: --dtype=\"i8\"; need one "},
           {"linear --model=gpt5",
            "linear: --model=\"gpt5\"; need one of none, llama3_8b, qwen3_8b, "
            "gemma2_9b, deepseek_v2_lite"},
           {"scaled_linear --model=", "scaled_linear: --model=\"\"; need one "},
           {"scaled_linear --model=qwen3_8b --layer=up",
            "scaled_linear: --layer=\"up\"; need one of all, qkv, attn_out, "
            "gate_up, down, lm_head"},
           {"linear --model=qwen3_8b --n=16", "linear: --n beside --model, "},
           {"linear --layer=down", "linear: --layer needs --model"},
           {"linear --activation=relu",
            "linear: --activation=\"relu\"; need one of none, silu, gelu, "
            "gelu_tanh, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul"},
           {"int4_linear --n=5 --activation=silu_and_mul",
            "int4_linear: n=5 with --activation=silu_and_mul; need an even n"},
           {"scaled_linear --residual=2",
            "scaled_linear: --residual=\"2\"; need one of 0, 1"},
           {"int8_group_linear --k=33",
            "int8_group_linear: k=33; need a multiple of 32"},
           {"all_reduce --ranks=65",
            "all_reduce: ranks=65; need 1 <= ranks <="},
           {"silu_and_mul --rows=x", "silu_and_mul: --rows=\"x\" is not "}}) {
    const Outcome outcome = Perf(r.line);
    EXPECT_EQ(outcome.exit_code, 2) << r.line;
    EXPECT_EQ(outcome.out, "") << r.line;
    EXPECT_EQ(outcome.progress.rfind(r.begin, 0), 0u) << outcome.progress;
    // One line.
    EXPECT_EQ(outcome.progress.find('\n'), outcome.progress.size() - 1)
        << outcome.progress;
  }
}

TEST(DriverTest, HelpNamesEveryOperatorAndKey) {
  const Outcome outcome = Perf("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const OpEntry& entry : AllOps()) {
    EXPECT_NE(outcome.out.find(std::string(entry.name) + ": "),
              std::string::npos)
        << entry.name;
    for (const Key& key : entry.keys) {
      EXPECT_NE(outcome.out.find("--" + std::string(key.name) + "="),
                std::string::npos)
          << key.name;
    }
  }
}

TEST(DriverTest, HelpOfOneOperatorNamesNoOther) {
  const struct {
    const char* line;
    const char* has;
    const char* has_not;
  } cases[] = {
      {"pack --help", "\npack: ", "\nlinear: "},
      {"pack --n=3 -h", "--source=nk", "\nlimits: "},
      {"pack --help", "--check=0", "--elements="},
      {"limits --help", "--isa=best", "--check=0"},
      {"nosuch --help", "\npack: ", "perf nosuch"},
  };
  for (const auto& c : cases) {
    const Outcome outcome = Perf(c.line);
    EXPECT_EQ(outcome.exit_code, 0) << c.line;
    EXPECT_NE(outcome.out.find(c.has), std::string::npos) << outcome.out;
    EXPECT_EQ(outcome.out.find(c.has_not), std::string::npos) << outcome.out;
  }
}

TEST(DriverTest, PrintsTheLimitsOfOneThread) {
  const Outcome outcome = Perf("limits --threads=1 --runs=1");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.progress;
  EXPECT_EQ(outcome.out.rfind("{\"op\": \"limits\"", 0), 0u) << outcome.out;
  for (const char* name :
       {"dram_read", "dram_write", "dram_copy", "dram_update", "l2_read",
        "f32_fma", "bf16_dot", "i8_dot", "i6_dot"}) {
    EXPECT_NE(outcome.out.find("\"" + std::string(name) + "\""),
              std::string::npos)
        << name;
  }
  EXPECT_NE(outcome.out.find("\"pages\": \"4K\""), std::string::npos);
  for (const std::string& line : std::vector<std::string>(
           absl::StrSplit(outcome.out, '\n', absl::SkipEmpty()))) {
    const auto fields = FlatJson::Parse(line);
    ASSERT_TRUE(fields.has_value()) << line;
    for (const char* name : {"ghz", "per_cycle", "variant", "note"}) {
      EXPECT_NE(fields->at(name), "null") << line;
    }
  }
}

TEST(DriverTest, PrintsATableOnATerminal) {
  const std::string line = "pack --n=16 --k=8 --threads=1 --runs=1 --warm=1";
  EXPECT_EQ(Perf(line, true).out.rfind("op ", 0), 0u);
  EXPECT_EQ(Perf(line, false).out.rfind("{", 0), 0u);
  EXPECT_EQ(Perf(line + " --format=json", true).out.rfind("{", 0), 0u);
  EXPECT_EQ(Perf(line + " --format=table", false).out.rfind("op ", 0), 0u);
}

// Twelve bytes would fit into eight times the caches millions of times, and
// each has a plan.
TEST(DriverTest, MakesNoMillionsOfPlans) {
  const Outcome outcome = Perf("linear --m=1 --n=1 --k=1 --threads=1 --runs=1");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.progress;
  ExpectJsonLines(outcome.out, "linear", 1);
  EXPECT_NE(outcome.progress.find(", 4096 working sets of "), std::string::npos)
      << outcome.progress;
  EXPECT_NE(outcome.progress.find("not a figure of DRAM"), std::string::npos)
      << outcome.progress;
}

TEST(DriverTest, RunsEveryRowCountOfALayerOfAModel) {
  for (const char* op : {"linear", "scaled_linear"}) {
    const Outcome outcome =
        Perf(std::string(op) +
             " --model=deepseek_v2_lite --layer=router --m=1,5 --threads=1 "
             "--runs=1 --warm=1 --check=1");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.progress;
    ExpectJsonLines(outcome.out, op, 2);
    std::istringstream lines(outcome.out);
    for (const char* shape : {"m=1 n=64 k=2048", "m=5 n=64 k=2048"}) {
      std::string line;
      ASSERT_TRUE(std::getline(lines, line));
      const auto fields = FlatJson::Parse(line);
      ASSERT_TRUE(fields.has_value()) << line;
      EXPECT_EQ(fields->at("shape").rfind(shape, 0), 0u) << line;
      EXPECT_EQ(fields->at("layer"), "deepseek_v2_lite router");
    }
    EXPECT_NE(outcome.progress.find("2 of 2: deepseek_v2_lite router"),
              std::string::npos)
        << outcome.progress;
  }
}

TEST(DriverTest, RunsAListOfRowCountsOfOneShape) {
  const Outcome outcome =
      Perf("linear --m=3,1 --n=5 --k=7 --threads=1 --runs=1 --warm=1");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.progress;
  ExpectJsonLines(outcome.out, "linear", 2);
  EXPECT_LT(outcome.out.find("m=3 n=5 k=7"), outcome.out.find("m=1 n=5 k=7"));
  EXPECT_NE(outcome.out.find("\"layer\": null"), std::string::npos);
}

TEST(DriverTest, RunsOnTheInstructionSetThatWasAskedFor) {
  for (const int64_t bit : hwy::SupportedAndGeneratedTargets()) {
    const std::string isa = hwy::TargetName(bit);
    for (const char* op :
         {"rms_norm --rows=2 --hidden=33", "linear --m=2 --n=17 --k=9"}) {
      const Outcome outcome =
          Perf(std::string(op) +
               " --threads=1 --runs=1 --warm=1 --check=1 --isa=" + isa);
      EXPECT_EQ(outcome.exit_code, 0) << isa << "\n" << outcome.progress;
      const auto fields =
          FlatJson::Parse(outcome.out.substr(0, outcome.out.find('\n')));
      ASSERT_TRUE(fields.has_value()) << outcome.out;
      EXPECT_TRUE(StandsFor(fields->at("isa"), isa)) << outcome.out;
    }
  }
}

// A product of int8 runs on AVX-VNNI if that is asked for, and not on AVX2.
// Whatever else is asked for runs on AVX2.
TEST(DriverTest, RunsOnAvxVnniWhereTheCpuHasIt) {
  const auto targets = hwy::SupportedAndGeneratedTargets();
  if (std::count(targets.begin(), targets.end(), HWY_AVX2) == 0) {
    GTEST_SKIP() << "no AVX2";
  }
  const auto expect = [](const std::string& op, const std::string& isa,
                         const std::string& ran) {
    const Outcome outcome =
        Perf(op + " --threads=1 --runs=1 --warm=1 --check=1 --isa=" + isa);
    EXPECT_EQ(outcome.exit_code, 0) << op << "\n" << outcome.progress;
    EXPECT_NE(outcome.out.find("\"isa\": \"" + ran + "\""), std::string::npos)
        << outcome.out;
  };
  const std::string blocks = "linear --weights=q8_0 --m=2 --n=17 --k=64";
  expect(blocks, "AVX2", "AVX2");
  if (HasAvxVnni()) {
    for (const std::string& op :
         {blocks, std::string("linear --weights=q4_k --m=2 --n=17 --k=256"),
          std::string("int4_linear --activations=int8 --m=2 --n=17 --k=64 "
                      "--group=32"),
          std::string("scaled_linear --m=2 --n=17 --k=64")}) {
      expect(op, "AVX2_VNNI", "AVX2_VNNI");
    }
    expect("rms_norm --rows=2 --hidden=33", "AVX2_VNNI", "AVX2");
  } else {
    EXPECT_EQ(Perf(blocks + " --isa=AVX2_VNNI").exit_code, 2);
  }
  const std::string w8a8 = "scaled_linear --m=2 --n=17 --k=64";
  if (HasAvxVnniInt8()) {
    expect(w8a8, "AVX2_VNNI_INT8", "AVX2_VNNI_INT8");
    expect(blocks, "AVX2_VNNI_INT8", "AVX2_VNNI");
    expect("rms_norm --rows=2 --hidden=33", "AVX2_VNNI_INT8", "AVX2");
  } else {
    EXPECT_EQ(Perf(w8a8 + " --isa=AVX2_VNNI_INT8").exit_code, 2);
  }
}

}  // namespace
}  // namespace quern
