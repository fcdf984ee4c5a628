#include "quern/tools/perf/args.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

constexpr Key kKeys[] = {{"n", "16", "columns"}, {"dtype", "bf16", "type"}};
constexpr Key kCommon[] = {{"check", "0", "compare"}};

absl::StatusOr<Args> Parse(std::vector<absl::string_view> words) {
  return Args::Parse("pack", kKeys, kCommon, words);
}

TEST(ArgsTest, TakesDefaultsWhereNothingIsGiven) {
  const auto args = Parse({});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(args->op(), "pack");
  EXPECT_EQ(*args->Int("n", 1, 100), 16);
  EXPECT_EQ(*args->Type("dtype", {DType::kF32, DType::kBF16}), DType::kBF16);
  EXPECT_FALSE(*args->Flag("check"));
}

TEST(ArgsTest, ReadsWhatIsGiven) {
  const auto args = Parse({"--n=-3", "--check=1", "--dtype=a=b"});
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(*args->Int("n", -3, 100), -3);
  EXPECT_TRUE(*args->Flag("check"));
  EXPECT_EQ(args->Text("dtype"), "a=b");
}

TEST(ArgsTest, KnowsWhatIsGiven) {
  auto args = Parse({"--n=16"});  // the default, and given
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_TRUE(args->given("n"));
  EXPECT_FALSE(args->given("dtype"));
  args->Set("dtype", "f32");
  EXPECT_TRUE(args->given("dtype"));
  EXPECT_EQ(*args->Type("dtype", {DType::kF32}), DType::kF32);
}

TEST(ArgsTest, ReadsListsOfIntegers) {
  EXPECT_EQ(*Parse({})->Ints("n", 1, 99), (std::vector<int64_t>{16}));
  EXPECT_EQ(*Parse({"--n=4,1,99"})->Ints("n", 1, 99),
            (std::vector<int64_t>{4, 1, 99}));
  for (const char* word : {"--n=", "--n=1,", "--n=,1", "--n=1,,2", "--n=1;2",
                           "--n=1,100", "--n=0,1"}) {
    const auto values = Parse({word})->Ints("n", 1, 99);
    EXPECT_EQ(values.status().code(), absl::StatusCode::kInvalidArgument)
        << word;
  }
  EXPECT_EQ(Parse({"--n=1,100"})->Ints("n", 1, 99).status().message(),
            "pack: n=100; need 1 <= n <= 99");
}

struct Refusal {
  std::vector<absl::string_view> words;
  const char* message;
};

TEST(ArgsTest, RefusesWordsThatAreNotKeysInOneSentence) {
  for (const Refusal& r : std::vector<Refusal>{
           {{"n=3"}, "pack: cannot read \"n=3\"; write --key=value"},
           {{"--n"}, "pack: cannot read \"--n\"; write --key=value"},
           {{"--n", "3"}, "pack: cannot read \"--n\"; write --key=value"},
           {{"--=3"}, "pack: cannot read \"--=3\"; write --key=value"},
           {{"-n=3"}, "pack: cannot read \"-n=3\"; write --key=value"},
           {{""}, "pack: cannot read \"\"; write --key=value"},
           {{"--m=3"}, "pack: no key --m; need one of --n --dtype --check"},
           {{"--n=3", "--n=3"}, "pack: --n is given twice"}}) {
    const auto args = Parse(r.words);
    ASSERT_FALSE(args.ok()) << r.message;
    EXPECT_EQ(args.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(args.status().message(), r.message);
  }
}

TEST(ArgsTest, RefusesValuesInOneSentence) {
  struct Value {
    absl::string_view word;
    const char* message;
  };
  for (const Value& v : std::vector<Value>{
           {"--n=", "pack: --n=\"\" is not an integer; need 1 <= n <= 99"},
           {"--n=1x", "pack: --n=\"1x\" is not an integer; need 1 <= n <= 99"},
           {"--n=1.5",
            "pack: --n=\"1.5\" is not an integer; need 1 <= n <= 99"},
           {"--n=99999999999999999999",
            "pack: --n=\"99999999999999999999\" is not an integer; need 1 <= n "
            "<= 99"},
           {"--n=0", "pack: n=0; need 1 <= n <= 99"},
           {"--n=-1", "pack: n=-1; need 1 <= n <= 99"},
           {"--n=100", "pack: n=100; need 1 <= n <= 99"},
           {"--dtype=int4", "pack: --dtype=\"int4\"; need one of f32, bf16"},
           {"--dtype=i8", "pack: --dtype=\"i8\"; need one of f32, bf16"},
           {"--check=yes", "pack: --check=\"yes\"; need one of 0, 1"}}) {
    const auto args = Parse({v.word});
    ASSERT_TRUE(args.ok()) << args.status();
    absl::Status status = args->Int("n", 1, 99).status();
    if (status.ok()) {
      status = args->Type("dtype", {DType::kF32, DType::kBF16}).status();
    }
    if (status.ok()) status = args->Flag("check").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << v.word;
    EXPECT_EQ(status.message(), v.message);
  }
}

}  // namespace
}  // namespace quern
