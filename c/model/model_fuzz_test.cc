// Fuzzing of models in C: good and hostile files, sizes and fields at their
// edges, and handles that live, were destroyed, are of another kind, of another
// library, or null.
//
// QUERN_TEST_SEED=n gives other calls; QUERN_FUZZ_CASES=n sets how many cases
// there are, each of 150 calls.

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/model/handles_testutil.h"
#include "quern/c/model/model_caller_testutil.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/sanitized.h"

namespace quern {
namespace {

constexpr int kCallsOfCase = 150;

// Small models of several architectures, each with a vocabulary.
std::vector<std::string> Corpus(Rng& rng) {
  std::vector<std::string> corpus;
  for (const char* architecture :
       {"llama", "qwen3moe", "gemma2", "gemma3", "olmo2", "phi3", "lfm2",
        "granitehybrid", "qwen3next", "deepseek2"}) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.vocab = kFuzzVocab;
    GgufWriter writer = SmallDecoderKeys(shape);
    std::vector<std::string> pieces = {"<unk>", "<s>", "</s>"};
    std::vector<int32_t> types = {2, 3, 3};  // unknown and control
    while (pieces.size() < static_cast<size_t>(kFuzzVocab)) {
      pieces.emplace_back(1, static_cast<char>('a' + pieces.size() % 26));
      pieces.back() += pieces.size() < 30 ? "" : "b";
      types.push_back(1);
    }
    writer.Key("tokenizer.ggml.model", "llama")
        .Key("tokenizer.ggml.tokens", pieces)
        .Key("tokenizer.ggml.scores",
             std::vector<float>(static_cast<size_t>(kFuzzVocab), -1.0f))
        .Key("tokenizer.ggml.token_type", types);
    AddSmallDecoderTensors(rng, shape, writer);
    corpus.push_back(writer.Finish());
  }
  return corpus;
}

TEST(ModelFuzzTest, CallsAreDoneOrRefused) {
  TestRng rng;
  const std::vector<std::string> corpus = Corpus(rng);
  const int64_t cases = Cases(20, kSanitized ? 30 : 150);
  int64_t done = 0, refused = 0, steps = 0;
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    const LibraryInC library, other;
    Handles handles;
    Caller caller(corpus, library.get(), other.get(), handles, rng,
                  Caller::Threads::kOne);
    for (int call = 0; call < kCallsOfCase; ++call) caller.CallAny();
    done += caller.done;
    refused += caller.refused;
    steps += caller.steps;
    if (HasFailure()) ADD_FAILURE() << "case " << i;
  }
  EXPECT_GT(done, cases * kCallsOfCase / 10);
  EXPECT_GT(refused, cases * kCallsOfCase / 10);
  EXPECT_GT(steps, cases);
}

// Two threads call and destroy the same objects.
TEST(ModelFuzzTest, ThreadsCallAtOnce) {
  TestRng rng;
  const std::vector<std::string> corpus = Corpus(rng);
  const int64_t cases = Cases(5, kSanitized ? 8 : 30);
  int64_t steps = 0;
  for (int64_t i = 0; i < cases && !HasFailure(); ++i) {
    const LibraryInC library, other;
    Handles handles;
    Rng rngs[] = {Rng(rng.Next()), Rng(rng.Next())};
    int64_t steps_of[2] = {};
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        Caller caller(corpus, library.get(), other.get(), handles, rngs[t],
                      Caller::Threads::kSeveral);
        for (int call = 0; call < kCallsOfCase; ++call) caller.CallAny();
        steps_of[t] = caller.steps;
      });
    }
    for (std::thread& thread : threads) thread.join();
    steps += steps_of[0] + steps_of[1];
    if (HasFailure()) ADD_FAILURE() << "case " << i;
  }
  EXPECT_GT(steps, cases);
}

}  // namespace
}  // namespace quern
