#include "quern/tools/perf/linear/linear_cases.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/gemm/epilogue.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

using ::testing::ElementsAre;

absl::StatusOr<std::vector<OpCase>> Cases(
    std::vector<absl::string_view> words) {
  const auto args =
      Args::Parse("linear", LinearKeys({{"dtype", "bf16", "type"}}), {}, words);
  EXPECT_TRUE(args.ok()) << args.status();
  return LinearCases(*args);
}

// "m n k layer" of each.
std::vector<std::string> Shapes(std::vector<absl::string_view> words) {
  const auto cases = Cases(words);
  EXPECT_TRUE(cases.ok()) << cases.status();
  std::vector<std::string> shapes;
  for (const OpCase& c : *cases) {
    shapes.push_back(absl::StrCat(c.args.Text("m"), " ", c.args.Text("n"), " ",
                                  c.args.Text("k"), " ", c.layer));
    EXPECT_EQ(c.args.Text("dtype"), "bf16");
  }
  return shapes;
}

TEST(LinearCasesTest, AShapeIsItself) {
  EXPECT_THAT(Shapes({}), ElementsAre("1 14336 4096 "));
  EXPECT_THAT(Shapes({"--m=7", "--n=3", "--k=5"}), ElementsAre("7 3 5 "));
}

TEST(LinearCasesTest, AListOfRowsIsAShapeEach) {
  EXPECT_THAT(Shapes({"--m=7,1", "--n=3", "--k=5"}),
              ElementsAre("7 3 5 ", "1 3 5 "));
}

TEST(LinearCasesTest, AModelIsEachLayerWithEachRowCount) {
  EXPECT_THAT(Shapes({"--model=llama3_8b", "--m=1,8"}),
              ElementsAre("1 6144 4096 llama3_8b qkv",          //
                          "8 6144 4096 llama3_8b qkv",          //
                          "1 4096 4096 llama3_8b attn_out",     //
                          "8 4096 4096 llama3_8b attn_out",     //
                          "1 28672 4096 llama3_8b gate_up",     //
                          "8 28672 4096 llama3_8b gate_up",     //
                          "1 4096 14336 llama3_8b down",        //
                          "8 4096 14336 llama3_8b down",        //
                          "1 128256 4096 llama3_8b lm_head",    //
                          "8 128256 4096 llama3_8b lm_head"));  //
  EXPECT_EQ(Shapes({"--model=deepseek_v2_lite"}).size(), 12u * 6u);
  EXPECT_THAT(Shapes({"--model=gemma2_9b", "--layer=attn_out"}),
              ElementsAre("1 3584 4096 gemma2_9b attn_out",
                          "4 3584 4096 gemma2_9b attn_out",
                          "16 3584 4096 gemma2_9b attn_out",
                          "64 3584 4096 gemma2_9b attn_out",
                          "256 3584 4096 gemma2_9b attn_out",
                          "1024 3584 4096 gemma2_9b attn_out"));
}

// Every name of gemm/epilogue.h is one of the key.
TEST(LinearCasesTest, AnActivationHasItsName) {
  for (int i = 0; i <= static_cast<int>(LinearActivation::kGeluTanhAndMul);
       ++i) {
    const auto activation = static_cast<LinearActivation>(i);
    const std::string word =
        absl::StrCat("--activation=", LinearActivationName(activation));
    const auto args = Args::Parse("linear", LinearKeys({}), {}, {word});
    ASSERT_TRUE(args.ok()) << args.status();
    const auto got = LinearActivationOf(*args);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, activation);
  }
}

TEST(LinearCasesTest, RefusesWhatContradicts) {
  struct Refusal {
    std::vector<absl::string_view> words;
    const char* message;
  };
  for (const Refusal& r : std::vector<Refusal>{
           {{"--model=llama3"},
            "linear: --model=\"llama3\"; need one of none, llama3_8b, "
            "qwen3_8b, gemma2_9b, deepseek_v2_lite"},
           {{"--model=llama3_8b", "--layer=q"},
            "linear: --layer=\"q\"; need one of all, qkv, attn_out, gate_up, "
            "down, lm_head"},
           {{"--model=llama3_8b", "--n=14336"},
            "linear: --n beside --model, whose layers say it"},
           {{"--model=llama3_8b", "--k=4096"},
            "linear: --k beside --model, whose layers say it"},
           {{"--layer=all"}, "linear: --layer needs --model"},
           {{"--m="},
            "linear: --m=\"\" is not an integer; need 1 <= m <= 1048576"},
           {{"--model=llama3_8b", "--m=1,x"},
            "linear: --m=\"x\" is not an integer; need 1 <= m <= 1048576"}}) {
    const auto cases = Cases(r.words);
    ASSERT_FALSE(cases.ok()) << r.message;
    EXPECT_EQ(cases.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(cases.status().message(), r.message);
  }
}

}  // namespace
}  // namespace quern
