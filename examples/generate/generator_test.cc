// Ranks with different options, as processes on different machines may have. A
// failure on any of them must end all of them.

#include "examples/generate/generator.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "examples/generate/model_testutil.h"
#include "examples/generate/options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/testing/golden_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/files.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Options for a short, greedy text, with one thread for each rank.
std::vector<GenerateOptions> Options(int ranks, const GoldenPrompt& prompt) {
  GenerateOptions options;
  options.prompt = prompt.text;
  options.max_tokens = static_cast<int64_t>(prompt.greedy_ids.size());
  options.temperature = 0;
  options.threads = 1;
  return std::vector<GenerateOptions>(static_cast<size_t>(ranks), options);
}

struct Outcome {
  std::vector<absl::Status> statuses;  // by rank
  std::string out;
};

Outcome GenerateOnRanks(absl::Span<const GenerateOptions> options,
                        int leader = 0) {
  Outcome outcome;
  outcome.statuses.resize(options.size());
  ::testing::internal::CaptureStdout();
  RunRanks(static_cast<int>(options.size()), [&](ThreadCommunicator& c) {
    const auto rank = static_cast<size_t>(c.rank());
    outcome.statuses[rank] = Generate(options[rank], &c, leader);
  });
  outcome.out = ::testing::internal::GetCapturedStdout();
  return outcome;
}

void ExpectAllFail(const Outcome& outcome, const std::string& begin,
                   const std::string& words) {
  EXPECT_EQ(outcome.out, "");
  for (const absl::Status& status : outcome.statuses) {
    EXPECT_EQ(status, outcome.statuses[0]);
    EXPECT_THAT(std::string(status.message()), StartsWith(begin));
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
}

TEST(GeneratorTest, AnyRankMayLeadAndItsWordHolds) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  const std::string text = prompt.text + prompt.greedy_text + "\n";
  for (const int leader : {0, 1}) {
    std::vector<GenerateOptions> options = Options(2, prompt);
    EXPECT_EQ(GenerateOnRanks(options, leader).out, text);
    GenerateOptions& other = options[static_cast<size_t>(1 - leader)];
    other.prompt = "something else";
    other.max_tokens = 3;
    other.temperature = 2;
    other.seed = 12345;
    other.kv = DType::kF32;
    other.weights = DecoderWeights::kInt8;
    other.activations = DecoderActivations::kExact;
    other.stats = true;
    other.specials = true;
    const Outcome outcome = GenerateOnRanks(options, leader);
    EXPECT_EQ(outcome.out, text);
    for (const absl::Status& status : outcome.statuses) {
      EXPECT_TRUE(status.ok()) << status;
    }
    other.perplexity = true;
    EXPECT_EQ(GenerateOnRanks(options, leader).out, text);
  }
  // A rank that kept its own activations would refuse the leader's weights.
  std::vector<GenerateOptions> options = Options(2, prompt);
  options[0].weights = DecoderWeights::kBF16;
  options[1].activations = DecoderActivations::kInt8;
  EXPECT_EQ(GenerateOnRanks(options).out, text);
}

// The leader says what type every rank's cache has.
TEST(GeneratorTest, EveryRanksCacheHasTheLeadersType) {
  std::vector<GenerateOptions> options = Options(2, ReadGolden().prompts[0]);
  options[0].stats = true;
  options[1].kv = DType::kF32;
  ::testing::internal::CaptureStderr();
  GenerateOnRanks(options);
  const std::string stats = ::testing::internal::GetCapturedStderr();
  // Each rank has one of the two heads: half of 3072 bytes.
  for (const char* rank : {"\nrank 0: ", "\nrank 1: "}) {
    const size_t begin = stats.find(rank);
    ASSERT_NE(begin, std::string::npos) << stats;
    EXPECT_THAT(stats.substr(begin + 1, stats.find('\n', begin + 1) - begin),
                HasSubstr("(1536 bytes a token)"));
  }
}

// Each sample draws by a seed of its own, and no bit depends on the others.
TEST(GeneratorTest, SamplesAreTheTextsOfTheirSeeds) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    std::vector<GenerateOptions> options =
        Options(ranks, ReadGolden().prompts[0]);
    const auto text = [&options](uint64_t seed, int64_t samples) {
      for (GenerateOptions& o : options) {
        o.temperature = 0.8f;
        o.seed = seed;
        o.samples = samples;
      }
      options.back().samples = 1;  // the leader's word holds
      options.front().samples = samples;
      return GenerateOnRanks(options).out;
    };
    const std::string own[] = {text(7, 1), text(8, 1), text(9, 1)};
    EXPECT_NE(own[0], own[1]);
    EXPECT_EQ(text(7, 3),
              absl::StrCat(own[0], "---\n", own[1], "---\n", own[2]));
  }
}

// Samples that end are left out of the steps of the others.
TEST(GeneratorTest, SamplesEndByThemselves) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  // A text ends at a token of the greedy one, or at max_tokens.
  const std::vector<int32_t>& ids = prompt.greedy_ids;
  std::vector<GenerateOptions> options = Options(1, prompt);
  options[0].model = ModelThatEndsAt(ids.at(ids.size() / 4));
  options[0].temperature = 1.2f;
  options[0].max_tokens = 40;
  std::string want;
  std::set<size_t> lengths;
  for (uint64_t seed = 30; seed < 38; ++seed) {
    options[0].seed = seed;
    const std::string text = GenerateOnRanks(options).out;
    lengths.insert(text.size());
    absl::StrAppend(&want, want.empty() ? "" : "---\n", text);
  }
  EXPECT_GT(lengths.size(), 3u);
  options[0].seed = 30;
  options[0].samples = 8;
  EXPECT_EQ(GenerateOnRanks(options).out, want);
}

// All texts reach the end of the context, or have a single token.
TEST(GeneratorTest, SamplesFillTheContext) {
  for (const int64_t max_tokens : {int64_t{1000}, int64_t{1}}) {
    std::vector<GenerateOptions> options = Options(1, ReadGolden().prompts[0]);
    options[0].max_tokens = max_tokens;
    const std::string one = GenerateOnRanks(options).out;
    options[0].samples = 5;
    const Outcome outcome = GenerateOnRanks(options);
    EXPECT_EQ(outcome.statuses[0], absl::OkStatus());
    EXPECT_EQ(outcome.out, absl::StrCat(one, "---\n", one, "---\n", one,
                                        "---\n", one, "---\n", one));
  }
}

TEST(GeneratorTest, ReferencesGiveTheGoldenTextOnTwoRanks) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  std::vector<GenerateOptions> options = Options(2, prompt);
  for (GenerateOptions& o : options) {
    o.custom_ops = "-vocab_parallel_embedding,-logits_processor,-write_kv";
  }
  EXPECT_EQ(GenerateOnRanks(options).out,
            prompt.text + prompt.greedy_text + "\n");
}

// Two ranks sum f32 values in another order than one rank does, so that a row
// rounded to bf16 may differ by half a unit in the last place, 2^-9 of its
// value.
TEST(GeneratorTest, PerplexityIsThatOfOneRank) {
  GoldenPrompt prompt = ReadGolden().prompts[0];
  for (int i = 0; i < 60; ++i) prompt.text += " And there was light.";
  const auto perplexity = [&](int ranks) {
    std::vector<GenerateOptions> options = Options(ranks, prompt);
    for (GenerateOptions& o : options) o.perplexity = true;
    const std::string out = GenerateOnRanks(options).out;
    EXPECT_THAT(out, StartsWith("perplexity: "));
    return std::strtod(out.c_str() + out.find(' '), nullptr);
  };
  const double one = perplexity(1);
  EXPECT_GT(one, 1);
  EXPECT_NEAR(perplexity(2), one, one / 512);
}

TEST(GeneratorTest, WhatFailsOnOneRankEndsAll) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  const std::string cut = ::testing::TempDir() + "/cut.gguf";
  std::ofstream(cut, std::ios::binary)
      << FileBytes(ModelFile("quern-kjv-4m.bf16.gguf")).substr(0, 1 << 20);
  const std::string other_context = ModelWith("llama.context_length", char{64});
  const struct {
    std::string model, packed;
    const char* words;
  } cases[] = {
      {"no/such.gguf", "", "cannot open 'no/such.gguf'"},
      {cut, "", "the file has"},
      {other_context, "", "than the one of rank 0"},
      {"", "no/such/folder/packed", "no/such/folder"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    for (const size_t bad : {size_t{0}, size_t{1}, size_t{3}}) {
      std::vector<GenerateOptions> options = Options(4, prompt);
      options[bad].model = c.model;
      options[bad].packed = c.packed;
      const Outcome outcome = GenerateOnRanks(options);
      // If the leader's file differs, all others differ from it.
      const bool odd = bad == 0 && c.model == other_context;
      const size_t named = odd ? 1 : bad;
      ExpectAllFail(outcome,
                    named == 0 ? "" : absl::StrCat("rank ", named, " of 4: "),
                    c.words);
    }
  }
}

// bazel run, which changes the directory, says where the user called it.
TEST(GeneratorTest, RelativePathsStartWhereTheUserIs) {
  std::vector<GenerateOptions> options = Options(1, ReadGolden().prompts[0]);
  options[0].packed = "relative.packed";
  const std::string folder = ::testing::TempDir();
  ASSERT_EQ(setenv("BUILD_WORKING_DIRECTORY", folder.c_str(), 1), 0);
  const Outcome outcome = GenerateOnRanks(options);
  ASSERT_EQ(unsetenv("BUILD_WORKING_DIRECTORY"), 0);
  EXPECT_EQ(outcome.statuses[0], absl::OkStatus());
  EXPECT_TRUE(std::ifstream(folder + "/relative.packed").good());
}

TEST(GeneratorTest, WhatTheLeaderRefusesEndsAll) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  std::vector<GenerateOptions> options = Options(4, prompt);
  options[0].prompt = std::string(2000, '#');
  ExpectAllFail(GenerateOnRanks(options), "the prompt has ",
                "this model's context holds 256");
  options[0].prompt = "";
  options[0].perplexity = true;
  ExpectAllFail(GenerateOnRanks(options), "the text has 0 tokens",
                "--perplexity needs one");
}

TEST(GeneratorTest, TheExitCodeIsEveryRanks) {
  const auto codes = [](const std::vector<absl::StatusOr<GenerateOptions>>& o) {
    std::vector<int> results(o.size());
    RunRanks(static_cast<int>(o.size()), [&](ThreadCommunicator& c) {
      const auto rank = static_cast<size_t>(c.rank());
      results[rank] = GenerateMain("generate", o[rank], &c);
    });
    return results;
  };
  const GenerateOptions good = Options(1, ReadGolden().prompts[0])[0];
  GenerateOptions missing = good, help = good;
  missing.model = "no/such.gguf";
  help.help = true;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(codes({good, absl::InvalidArgumentError("no flag")}),
            (std::vector<int>{2, 2}));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "generate: rank 1 of 2: no flag\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(codes({good, missing}), (std::vector<int>{1, 1}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              StartsWith("generate: rank 1 of 2: gguf: cannot open "));
  // Only the leader's request for help counts.
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(codes({help, missing}), (std::vector<int>{0, 0}));
  EXPECT_EQ(codes({good, help}), (std::vector<int>{0, 0}));
  const std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(out, StartsWith(HelpText()));
  EXPECT_THAT(out.substr(HelpText().size()), StartsWith(*good.prompt));
}

}  // namespace
}  // namespace quern
