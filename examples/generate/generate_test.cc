// Runs the program as a user would, and checks exit codes, output and errors.

#include <sys/wait.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "examples/generate/model_testutil.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/golden_testutil.h"
#include "quern/testing/files.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int code;
  std::string out, err;
};

std::string Quote(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

// Removes lines of progress, which depend on the machine: they appear when work
// takes over a second.
std::string WithoutProgress(absl::string_view err) {
  const std::vector<absl::string_view> kept =
      absl::StrSplit(err, '\n', [](absl::string_view line) {
        return !absl::StrContains(line, " [") || !absl::EndsWith(line, " %");
      });
  return absl::StrJoin(kept, "\n");
}

// `prefix` comes before the program, such as "printf x |".
Outcome RunGenerate(const std::vector<std::string>& arguments,
                    absl::string_view prefix = "") {
  const std::string err_file = ::testing::TempDir() + "/stderr";
  std::string command = absl::StrCat(prefix, " examples/generate/generate");
  for (const std::string& argument : arguments) {
    absl::StrAppend(&command, " ", Quote(argument));
  }
  if (prefix.empty()) absl::StrAppend(&command, " </dev/null");
  absl::StrAppend(&command, " 2>", Quote(err_file));
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  char piece[4096];
  size_t got;
  while ((got = std::fread(piece, 1, sizeof(piece), pipe)) > 0) {
    outcome.out.append(piece, got);
  }
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.err = WithoutProgress(FileBytes(err_file));
  return outcome;
}

// Expects one sentence on standard error and nothing on standard output.
void ExpectRefused(const Outcome& outcome, int code, absl::string_view words) {
  EXPECT_EQ(outcome.code, code);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, ::testing::StartsWith("generate: "));
  EXPECT_THAT(outcome.err, HasSubstr(std::string(words)));
  EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
}

TEST(GenerateTest, GreedyTextIsTheGoldenOne) {
  const Golden golden = ReadGolden();
  ASSERT_EQ(golden.prompts.size(), 3u);
  for (const GoldenPrompt& prompt : golden.prompts) {
    const Outcome outcome =
        RunGenerate({"--prompt=" + prompt.text, "--temperature=0",
                     absl::StrCat("--max_tokens=", prompt.greedy_ids.size())});
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.out, prompt.text + prompt.greedy_text + "\n");
    EXPECT_EQ(outcome.err, "");
  }
}

// The policy must reach the model, whose operators --stats counts.
TEST(GenerateTest, CustomOpsGiveTheGoldenText) {
  struct Case {
    const char* policy;
    const char* counts;
  };
  for (const Case& c :
       {Case{"all",
             "operators: gather_rows 1, linear 25, logits_processor 1, "
             "paged_attention 1, rms_norm 1, rotary_embedding 1, sample 1, "
             "vocab_parallel_embedding 1, write_kv 1\n"},
        Case{"none",
             "operators: gather_rows 1 by reference, linear 25, "
             "logits_processor 1, paged_attention 1, rms_norm 1 by reference, "
             "rotary_embedding 1 by reference, sample 1, "},
        Case{
            "none,+rms_norm",
            "paged_attention 1, rms_norm 1, rotary_embedding 1 by reference, "},
        Case{"-paged_attention,-write_kv",
             "paged_attention 1 by reference, rms_norm 1, rotary_embedding 1, "
             "sample 1, vocab_parallel_embedding 1, write_kv 1 by reference\n"},
        Case{"-rms_norm,-no_such_op", "no_such_op"}}) {
    for (const GoldenPrompt& prompt : ReadGolden().prompts) {
      const Outcome outcome = RunGenerate(
          {"--prompt=" + prompt.text, "--temperature=0", "--stats",
           absl::StrCat("--custom_ops=", c.policy),
           absl::StrCat("--max_tokens=", prompt.greedy_ids.size())});
      EXPECT_EQ(outcome.code, 0);
      EXPECT_EQ(outcome.out, prompt.text + prompt.greedy_text + "\n")
          << c.policy;
      EXPECT_THAT(outcome.err, HasSubstr(c.counts));
    }
  }
}

// Whoever misspells an operator must be told, whatever else is printed.
TEST(GenerateTest, CustomOpsWithoutAnEffectAreTold) {
  const struct {
    const char* policy;
    const char* told;
  } kCases[] = {
      {"none,+nope", "op policy: \"+nope\": no operator has this name\n"},
      {"-mamba_mixer2",
       "op policy: \"-mamba_mixer2\": the operator is not used\n"},
      {"none,+rms_norm", ""}};
  for (const auto& c : kCases) {
    const Outcome outcome =
        RunGenerate({"--prompt=Emma was", "--max_tokens=1", "--temperature=0",
                     absl::StrCat("--custom_ops=", c.policy)});
    EXPECT_EQ(outcome.code, 0) << c.policy;
    EXPECT_EQ(outcome.err, c.told);
    const Outcome ranks =
        RunGenerate({"--prompt=Emma was", "--max_tokens=1", "--temperature=0",
                     "--ranks=2", absl::StrCat("--custom_ops=", c.policy)});
    EXPECT_EQ(ranks.err, c.told);  // by one rank
  }
}

TEST(GenerateTest, RanksGiveTheGoldenText) {
  for (const GoldenPrompt& prompt : ReadGolden().prompts) {
    for (const char* ranks : {"--ranks=2", "--ranks=4"}) {
      const Outcome outcome = RunGenerate(
          {"--prompt=" + prompt.text, "--temperature=0", ranks,
           absl::StrCat("--max_tokens=", prompt.greedy_ids.size())});
      EXPECT_EQ(outcome.code, 0);
      EXPECT_EQ(outcome.out, prompt.text + prompt.greedy_text + "\n") << ranks;
      EXPECT_EQ(outcome.err, "");
    }
  }
}

TEST(GenerateTest, RanksTakeThePromptOfStandardInput) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  const Outcome outcome = RunGenerate(
      {"--temperature=0", "--max_tokens=64", "--threads=3", "--ranks=2"},
      absl::StrCat("printf '%s\\n' ", Quote(prompt.text), " |"));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out, prompt.text + prompt.greedy_text + "\n");
}

TEST(GenerateTest, ReadsThePromptFromStandardInput) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  const Outcome outcome = RunGenerate(
      {"--temperature", "0", "--max_tokens", "64", "--threads", "1"},
      absl::StrCat("printf '%s\\n' ", Quote(prompt.text), " |"));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out, prompt.text + prompt.greedy_text + "\n");
}

TEST(GenerateTest, TheSameSeedGivesTheSameTextOnAnyNumberOfThreads) {
  const auto text = [](absl::string_view seed, absl::string_view threads) {
    const Outcome outcome = RunGenerate(
        {"--prompt=In the beginning", "--max_tokens=24",
         absl::StrCat("--seed=", seed), absl::StrCat("--threads=", threads)});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string one = text("7", "1");
  EXPECT_THAT(one, ::testing::StartsWith("In the beginning"));
  EXPECT_EQ(text("7", "2"), one);
  EXPECT_NE(text("8", "1"), one);
}

TEST(GenerateTest, StatsTellSpeedMemoryAndKernels) {
  const Outcome outcome = RunGenerate(
      {"--prompt=Emma was", "--max_tokens=8", "--stats", "--threads=2"});
  EXPECT_EQ(outcome.code, 0);
  for (const char* words :
       {"model: quern-kjv-4m, 6 layers, width 256, bf16 weights\n",
        "prompt: 3 tokens, ", "generation: 8 tokens, ", " tokens/s, ",
        " GB/s, ", " GFLOP/s\n", "stopped by: --max_tokens=8\n",
        " MiB weights, ", " MiB bf16 cache (3072 bytes a token), ",
        "threads: 2\n", "kernels: operators: Highway "}) {
    EXPECT_THAT(outcome.err, HasSubstr(words));
  }
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("limits: ")));
  EXPECT_THAT(outcome.out, ::testing::Not(HasSubstr("tokens/s")));
}

TEST(GenerateTest, TheInstructionSetCanBeCapped) {
  const std::vector<std::string> command = {
      "--prompt=Emma was", "--max_tokens=2", "--stats", "--isa=AVX2"};
  const Outcome outcome = RunGenerate(command);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("kernels: operators: Highway AVX2"));
  // The flag is stronger than the variable.
  ASSERT_EQ(setenv("QUERN_MAX_ISA", "AVX9", 1), 0);
  EXPECT_EQ(RunGenerate(command).code, 0);
  ExpectRefused(RunGenerate({"--prompt=Emma was"}), 2,
                "QUERN_MAX_ISA: max_isa: isa=\"AVX9\" is no instruction set");
  unsetenv("QUERN_MAX_ISA");
}

TEST(GenerateTest, LimitsAreToldWithTheSpeed) {
  const Outcome outcome = RunGenerate({"--prompt=Emma was", "--max_tokens=8",
                                       "--stats", "--limits", "--threads=2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const std::string what : {"prompt: 3", "generation: 8"}) {
    EXPECT_THAT(outcome.err,
                ::testing::ContainsRegex(
                    what + " tokens, [^\n]* GFLOP/s, [0-9.]+ of the "
                           "(DRAM|arithmetic) limit\n"));
  }
  EXPECT_THAT(outcome.err, HasSubstr("\nlimits: DRAM read "));
  EXPECT_THAT(outcome.out, ::testing::StartsWith("Emma was"));
}

TEST(GenerateTest, StatsTellTheMemoryOfEachRank) {
  const Outcome outcome = RunGenerate({"--prompt=Emma was", "--max_tokens=8",
                                       "--stats", "--threads=5", "--ranks=2"});
  EXPECT_EQ(outcome.code, 0);
  for (const char* words :
       {"\nrank 0: ", "\nrank 1: ", "\nranks: 2; each gives ",
        " bytes a token to sums and logits\n", "\nthreads: 4\n"}) {
    EXPECT_THAT(outcome.err, HasSubstr(words));
  }
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("memory: ")));
}

// All types of cache must predict a text about equally well, and text of the
// model's kind must be far likelier than noise.
TEST(GenerateTest, TellsThePerplexityOfAText) {
  const auto perplexity = [](const std::string& text, const char* kv) {
    const Outcome outcome = RunGenerate(
        {"--prompt=" + text, "--perplexity", absl::StrCat("--kv=", kv)});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    double value = 0;
    EXPECT_EQ(std::sscanf(outcome.out.c_str(), "perplexity: %lf over ", &value),
              1)
        << outcome.out;
    return value;
  };
  std::string verse;
  for (int i = 0; i < 30; ++i) verse += " And God said, Let there be light.";
  const double exact = perplexity(verse, "f32");
  EXPECT_GT(exact, 1);
  EXPECT_LT(exact, 20);
  EXPECT_NEAR(perplexity(verse, "f16"), exact, 0.01 * exact);
  EXPECT_NEAR(perplexity(verse, "bf16"), exact, 0.03 * exact);
  const double i8 = perplexity(verse, "i8");
  const double e4m3 = perplexity(verse, "f8e4m3");
  const double e5m2 = perplexity(verse, "f8e5m2");
  EXPECT_NEAR(i8, exact, 0.03 * exact);
  EXPECT_NEAR(e4m3, exact, 0.05 * exact);
  EXPECT_NEAR(e5m2, exact, 0.1 * exact);
  // The names that these types had in 0.2.
  EXPECT_EQ(perplexity(verse, "int8"), i8);
  EXPECT_EQ(perplexity(verse, "fp8"), e4m3);
  EXPECT_EQ(perplexity(verse, "fp8e5m2"), e5m2);
  EXPECT_GT(perplexity("zq xj vvk qqp wwx kkz jjq", "f16"), 20 * exact);
  ExpectRefused(RunGenerate({"--prompt=", "--perplexity"}), 1,
                "the text has 0 tokens; --perplexity needs ");
  const Outcome stats =
      RunGenerate({"--prompt=And God said", "--perplexity", "--stats"});
  EXPECT_THAT(stats.err, HasSubstr("\ntext: "));
  EXPECT_THAT(stats.err, ::testing::Not(HasSubstr("generation: ")));
  EXPECT_THAT(stats.err, ::testing::Not(HasSubstr("stopped by: ")));
}

// A model whose last norm is NaN has no probabilities, and says so.
TEST(GenerateTest, DamagedWeightsHaveNoPerplexity) {
  std::string model = FileBytes(ModelFile("quern-kjv-4m.bf16.gguf"));
  const std::string path = ::testing::TempDir() + "/nan.gguf";
  const auto file = GgufFile::Open(ModelFile("quern-kjv-4m.bf16.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  const GgufTensor& norm = **file->FindTensor("output_norm.weight");
  ASSERT_EQ(norm.type, GgufTensorType::kF32);
  std::fill_n(&model[static_cast<size_t>(norm.offset)], norm.bytes, '\xff');
  std::ofstream(path, std::ios::binary) << model;
  ExpectRefused(
      RunGenerate({"--model=" + path, "--prompt=And God", "--perplexity"}), 1,
      "the perplexity is nan: the model gave no usable probabilities; its "
      "weights are damaged");
}

TEST(GenerateTest, StopsAtTheEndOfTheContext) {
  std::string prompt = "a";
  for (int i = 0; i < 253; ++i) prompt += " a";  // 255 tokens with <s>
  // No text contains the byte 0, so this text does not end earlier.
  const std::string model = ModelThatEndsAt(3);
  const Outcome outcome =
      RunGenerate({"--prompt=" + prompt, "--max_tokens=1000", "--temperature=0",
                   "--stats", "--model=" + model});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("prompt: 255 tokens"));
  EXPECT_THAT(outcome.err,
              HasSubstr("stopped by: the end of the context, 256 tokens"));
  EXPECT_THAT(outcome.err, HasSubstr("generation: 2 tokens"));
}

TEST(GenerateTest, StopsAtTheEndOfTheText) {
  const GoldenPrompt prompt = ReadGolden().prompts[0];
  // The first token after the eighth that does not occur before.
  size_t last = 8;
  const std::vector<int32_t>& ids = prompt.greedy_ids;
  while (std::count(ids.begin(), ids.begin() + static_cast<int64_t>(last),
                    ids.at(last)) > 0) {
    ++last;
  }
  const std::string model = ModelThatEndsAt(ids[last]);
  const Outcome outcome =
      RunGenerate({"--prompt=" + prompt.text, "--max_tokens=64",
                   "--temperature=0", "--stats", "--model=" + model});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("stopped by: the model: end of text"));
  EXPECT_THAT(outcome.err,
              HasSubstr(absl::StrCat("generation: ", last + 1, " tokens")));
  // The printed text must end before this token.
  const std::string whole = prompt.text + prompt.greedy_text;
  ASSERT_GT(outcome.out.size(), prompt.text.size() + last);
  ASSERT_LT(outcome.out.size(), whole.size());
  EXPECT_EQ(outcome.out, whole.substr(0, outcome.out.size() - 1) + "\n");
}

TEST(GenerateTest, AnEmptyPromptStartsAText) {
  const Outcome outcome = RunGenerate({"--prompt=", "--max_tokens=4"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_GT(outcome.out.size(), 1u);
}

TEST(GenerateTest, HelpIsReadable) {
  const Outcome outcome = RunGenerate({"--help"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  for (const char* words :
       {"--prompt\n", "--specials (false)\n", "--model\n",
        "--max_tokens (128)\n", "--threads (0)\n", "--ranks (1)\n",
        "--temperature (0.8)\n", "--top_k (40)\n", "--top_p (1)\n",
        "--min_p (0)\n", "--top_n_sigma (0)\n", "--typical_p (1)\n", "--seed (",
        "--activations (int8)\n", "--kv (bf16)\n", "--perplexity (false)\n",
        "--stats (false)\n", "--limits (false)\n", "Exit code"}) {
    EXPECT_THAT(outcome.out, HasSubstr(words));
  }
}

TEST(GenerateTest, RefusesBadCommandLinesWithCode2) {
  const struct {
    std::vector<std::string> arguments;
    const char* words;
  } cases[] = {
      {{"--promt=x"}, "there is no flag --promt; --help lists them"},
      {{"In", "the"}, "'In' is not a flag"},
      {{"--prompt"}, "--prompt needs a value"},
      {{"--max_tokens=x"}, "--max_tokens=x is not a value of that flag"},
      {{"--max_tokens=0"}, "--max_tokens=0; need at least 1"},
      {{"--threads=128"}, "--threads=128; need 0 to 127"},
      {{"--threads=-1"}, "--threads=-1; need 0 to 127"},
      {{"--ranks=0"}, "--ranks=0; need at least 1"},
      {{"--samples=0"}, "--samples=0; need 1 to 4096"},
      {{"--samples=4097"}, "--samples=4097; need 1 to 4096"},
      {{"--samples=2", "--perplexity"}, "--samples=2 with --perplexity"},
      {{"--custom_ops=some"}, "--custom_ops=some is not a value of that flag"},
      {{"--ranks=65"}, "--ranks=65; need 1 to 64 in one process"},
      {{"--ranks=two"}, "--ranks=two is not a value of that flag: need a "},
      {{"--temperature=-1"}, "--temperature=-1; need 0 or more"},
      {{"--temperature=nan"}, "--temperature=nan; need 0 or more"},
      {{"--temperature=hot"}, "need a number"},
      {{"--top_k=-1"}, "--top_k=-1; need 0 or more"},
      {{"--top_p=0"}, "--top_p=0; need more than 0 and at most 1"},
      {{"--top_p=1.5"}, "--top_p=1.5; need more than 0"},
      {{"--min_p=-0.1"}, "--min_p=-0.1; need 0 to 1"},
      {{"--min_p=nan"}, "--min_p=nan; need 0 to 1"},
      {{"--top_n_sigma=-1"}, "--top_n_sigma=-1; need 0 or more"},
      {{"--top_n_sigma=inf"}, "--top_n_sigma=inf; need 0 or more"},
      {{"--typical_p=0"}, "--typical_p=0; need more than 0 and at most 1"},
      {{"--seed=-1"}, "--seed=-1 is not a value of that flag: need a whole "},
      {{"--stats=maybe"}, "need true or false"},
      {{"--limits=maybe"}, "need true or false"},
      {{"--limits"}, "--limits without --stats, which tells them; need both"},
      {{"--limits", "--stats", "--ranks=2"}, "--limits with --ranks=2; need "},
      {{"--perplexity=maybe"}, "need true or false"},
      {{"--activations=fp8"}, "--activations=fp8 is not a value of that flag"},
      {{"--activations=int8", "--weights=bf16"},
       "--activations=int8 with other --weights than file; need "
       "--weights=file"},
      {{"--isa=AVX9"},
       "--isa=AVX9 is not a value of that flag: need the name of an "
       "instruction set"},
      {{"--kv=f64"}, "--kv=f64 is not a value of that flag: need f32, "},
      {{"--kv=i32"}, "need f32, bf16, f16, i8, f8e4m3 or f8e5m2"},
      {{"--weights=as"}, "need file, bf16, f32 or int8"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    ExpectRefused(RunGenerate(c.arguments), 2, c.words);
  }
}

TEST(GenerateTest, RefusesBadFilesAndPromptsWithCode1) {
  ExpectRefused(RunGenerate({"--prompt=x", "--model=no/such.gguf"}), 1,
                "cannot open 'no/such.gguf'");
  const std::string broken = ::testing::TempDir() + "/broken.gguf";
  std::ofstream(broken) << "not a model at all";
  ExpectRefused(RunGenerate({"--prompt=x", "--model=" + broken}), 1,
                "not a GGUF file");
  const std::string cut = ::testing::TempDir() + "/cut.gguf";
  std::ofstream(cut, std::ios::binary)
      << FileBytes(ModelFile("quern-kjv-4m.bf16.gguf")).substr(0, 1 << 20);
  ExpectRefused(RunGenerate({"--prompt=x", "--model=" + cut}), 1,
                "the file has");
  ExpectRefused(RunGenerate({"--prompt=" + std::string(2000, '#')}), 1,
                "tokens; this model's context holds 256");
  for (const char* argument : {"--prompt=x", "--help"}) {
    const Outcome full = RunGenerate({argument}, "exec >/dev/full;");
    EXPECT_EQ(full.code, 1) << argument;
    EXPECT_THAT(full.err, HasSubstr("cannot write to standard output"));
  }
}

TEST(GenerateTest, RefusesRanksThatCannotShareTheHeads) {
  ExpectRefused(RunGenerate({"--prompt=x", "--ranks=3"}), 1, "heads");
}

// One rank prints the sentence, and all of them end.
TEST(GenerateTest, RanksRefuseWithOneSentence) {
  for (const char* ranks : {"--ranks=2", "--ranks=4"}) {
    ExpectRefused(RunGenerate({"--prompt=x", "--model=no/such.gguf", ranks}), 1,
                  "generate: gguf: cannot open 'no/such.gguf'");
    ExpectRefused(RunGenerate({"--prompt=" + std::string(2000, '#'), ranks}), 1,
                  "generate: the prompt has ");
    ExpectRefused(RunGenerate({"--prompt=x", "--packed=no/such/file", ranks}),
                  1, "no/such/file");
    const Outcome full = RunGenerate({"--prompt=x", ranks}, "exec >/dev/full;");
    EXPECT_EQ(full.code, 1);
    EXPECT_EQ(full.err, "generate: cannot write to standard output\n");
  }
}

// The bytes of the key's value are changed in place, from true to false.
TEST(GenerateTest, StartsWithBosOnlyIfTheModelWantsIt) {
  std::string model = FileBytes(ModelFile("quern-kjv-4m.bf16.gguf"));
  const std::string key = "tokenizer.ggml.add_bos_token";
  const size_t at = model.find(key);
  ASSERT_NE(at, std::string::npos);
  ASSERT_EQ(model[at + key.size() + 4], 1);
  model[at + key.size() + 4] = 0;
  const std::string path = ::testing::TempDir() + "/no_bos.gguf";
  std::ofstream(path, std::ios::binary) << model;
  const Outcome outcome = RunGenerate(
      {"--prompt=Emma was", "--max_tokens=1", "--stats", "--model=" + path});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("prompt: 2 tokens, "));
  ExpectRefused(RunGenerate({"--prompt=", "--model=" + path}), 1,
                "the prompt is empty");
}

}  // namespace
}  // namespace quern
