// Models through the C interface: their logits have the bits of the C++ model,
// from a path and from bytes, on any executor.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <ios>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/model/model_testutil.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

std::vector<int32_t> Text(int64_t count, int32_t first) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = (first + static_cast<int32_t>(i) * 11) % 37;
  }
  return tokens;
}

std::string FileOf(const char* architecture) {
  TestRng rng;
  SmallDecoder shape;
  shape.architecture = architecture;
  return SmallDecoderFile(rng, shape);
}

// A model and a state of C++, with the spec that ModelsInC::StateOptions has.
class InCpp {
 public:
  explicit InCpp(const std::string& bytes, const DecoderOptions& options = {}) {
    auto model = Decoder::Create(ParseOrDie(bytes), options, executor_);
    EXPECT_TRUE(model.ok()) << model.status();
    model_.emplace(*std::move(model));
    DecoderStateSpec spec;
    spec.max_sequences = 3;
    spec.max_step_tokens = 50;
    spec.page_size = 16;
    auto state = DecoderState::Create(*model_, spec);
    EXPECT_TRUE(state.ok()) << state.status();
    state_.emplace(*std::move(state));
  }

  const Decoder& model() const { return *model_; }
  DecoderState& state() { return *state_; }
  LogitRows Logits(const std::vector<Tokens>& tokens, LogitsOf logits_of) {
    std::vector<DecoderBatchItem> items;
    for (const Tokens& t : tokens) items.push_back({t.sequence, t.ids});
    const auto logits = state_->Forward(items, logits_of, executor_);
    EXPECT_TRUE(logits.ok()) << logits.status();
    LogitRows rows;
    for (int64_t i = 0; logits.ok() && i < logits->extent(0); ++i) {
      rows.emplace_back(logits->Row(i), logits->Row(i) + logits->extent(1));
    }
    return rows;
  }

 private:
  InlineExecutor executor_;
  std::optional<Decoder> model_;
  std::optional<DecoderState> state_;
};

class ModelInCTest : public IsaTest, protected ModelsInC {};

QUERN_INSTANTIATE_ISA_TEST(ModelInCTest);

TEST_P(ModelInCTest, HasTheBitsOfCpp) {
  quern_executor* pool = nullptr;
  ASSERT_C_OK(quern_executor_create_pool(library.get(), 2, &pool),
              library.get());
  for (const char* architecture : {"llama", "qwen3moe", "gemma2", "lfm2"}) {
    SCOPED_TRACE(architecture);
    const std::string bytes = FileOf(architecture);
    InCpp cpp(bytes);
    EXPECT_RAN_ON(cpp.model());
    quern_model_state* const state = State(Load(bytes));
    const auto expect_equal = [&](const std::vector<Tokens>& tokens, bool all) {
      const LogitRows rows = Logits(state, tokens, all ? 1 : 0, pool);
      const LogitRows want = cpp.Logits(
          tokens, all ? LogitsOf::kAllTokens : LogitsOf::kLastTokens);
      EXPECT_FALSE(rows.empty());
      EXPECT_EQ(rows, want);
    };
    const int32_t a = Begin(state), b = Begin(state);
    ASSERT_EQ(a, *cpp.state().NewSequence());
    ASSERT_EQ(b, *cpp.state().NewSequence());
    expect_equal({{a, Text(17, 3)}, {b, Text(5, 8)}}, true);
    expect_equal({{b, Text(1, 30)}, {a, Text(20, 1)}}, false);
    int32_t branch = -1;
    ASSERT_C_OK(quern_model_state_fork(state, a, &branch), state);
    ASSERT_EQ(branch, *cpp.state().Fork(a));
    EXPECT_EQ(Length(state, branch), 37);
    expect_equal({{a, {7}}, {branch, {9}}, {b, {11}}}, false);
    ASSERT_C_OK(quern_model_state_end(state, b), state);
    ASSERT_TRUE(cpp.state().EndSequence(b).ok());
    expect_equal({{branch, {2}}}, true);
    EXPECT_EQ(Length(state, a), 38);
    EXPECT_EQ(Length(state, branch), 39);
  }
}

// What C sets in options reaches the model.
TEST(ModelOptionsInCTest, AreThoseOfCpp) {
  const ModelsInC in_c;
  TestRng rng;
  SmallDecoder shape;
  shape.hidden = 64;
  shape.head_dim = 32;
  shape.type = GgufTensorType::kQ4_0;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const struct {
    const char* weights;
    const char* activations;
    DecoderWeights weights_in_cpp;
    DecoderActivations activations_in_cpp;
  } cases[] = {
      {nullptr, nullptr, DecoderWeights::kAsInFile, DecoderActivations::kInt8},
      {"file", "exact", DecoderWeights::kAsInFile, DecoderActivations::kExact},
      {"file", "int8", DecoderWeights::kAsInFile, DecoderActivations::kInt8},
      // The name that "file" had in 0.2.
      {"as_in_file", nullptr, DecoderWeights::kAsInFile,
       DecoderActivations::kInt8},
      {"bf16", "exact", DecoderWeights::kBF16, DecoderActivations::kExact},
      {"f32", nullptr, DecoderWeights::kF32, DecoderActivations::kExact},
      {"int8", nullptr, DecoderWeights::kInt8, DecoderActivations::kExact},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.weights == nullptr ? "default" : c.weights);
    DecoderOptions options_in_cpp;
    options_in_cpp.weights = c.weights_in_cpp;
    options_in_cpp.activations = c.activations_in_cpp;
    options_in_cpp.max_context = 40;
    InCpp cpp(bytes, options_in_cpp);
    quern_model_options options = ModelsInC::OptionsOf(bytes);
    options.weights = c.weights;
    options.activations = c.activations;
    options.max_context = 40;
    quern_model* model = nullptr;
    ASSERT_C_OK(
        quern_model_create(in_c.library.get(), &options, nullptr, &model),
        in_c.library.get());
    quern_model_info info = {};
    info.size = sizeof(info);
    ASSERT_C_OK(quern_model_get_info(model, &info), model);
    EXPECT_EQ(info.context, 40);
    EXPECT_EQ(info.vocab, shape.vocab);
    EXPECT_EQ(info.hidden, shape.hidden);
    EXPECT_EQ(info.layers, shape.layers);
    EXPECT_EQ(info.weight_bytes, cpp.model().weight_bytes());
    EXPECT_EQ(info.step_tokens, cpp.model().step_tokens());
    EXPECT_NE(ExplanationOf(model).find(cpp.model().weights()),
              std::string::npos)
        << ExplanationOf(model);
    quern_model_state* const state = in_c.State(model);
    const std::vector<Tokens> tokens = {{ModelsInC::Begin(state), Text(17, 3)}};
    cpp.state().NewSequence().IgnoreError();
    EXPECT_EQ(ModelsInC::Logits(state, tokens),
              cpp.Logits(tokens, LogitsOf::kLastTokens));
  }
}

class FileInCTest : public testing::Test, protected ModelsInC {
 protected:
  FileInCTest() { std::ofstream(path_, std::ios::binary) << bytes_; }
  ~FileInCTest() override { std::remove(path_.c_str()); }

  quern_model_options OfPath() const {
    quern_model_options options = {};
    options.size = sizeof(options);
    options.path = path_.c_str();
    return options;
  }

  const std::string bytes_ = FileOf("llama");
  const std::string path_ = testing::TempDir() + "/model_in_c.gguf";
};

TEST_F(FileInCTest, IsReadFromAPath) {
  struct Seen {
    int calls = 0;
    int64_t done = 0, total = -1;
  } seen;
  quern_model_options options = OfPath();
  options.progress_context = &seen;
  options.progress = [](void* context, int64_t done, int64_t total) {
    Seen& s = *static_cast<Seen*>(context);
    ++s.calls;
    EXPECT_GE(done, s.done);
    s.done = done;
    s.total = total;
  };
  quern_model* model = nullptr;
  ASSERT_C_OK(quern_model_create(library.get(), &options, nullptr, &model),
              library.get());
  EXPECT_GT(seen.calls, 1);
  EXPECT_EQ(seen.done, seen.total);
  quern_model_state* const state = State(model);
  quern_model_state* const want = State(Load(bytes_));
  const std::vector<Tokens> tokens = {{Begin(state), Text(9, 2)}};
  Begin(want);
  EXPECT_EQ(Logits(state, tokens, 1), Logits(want, tokens, 1));
}

// The caller may give up while the file is read.
TEST_F(FileInCTest, MayBeCancelled) {
  for (const int give_up : {0, 1, 5}) {
    struct Asked {
      int give_up, times = 0;
    } asked{give_up};
    quern_model_options options = OfPath();
    options.cancelled_context = &asked;
    options.cancelled = [](void* context) {
      Asked& a = *static_cast<Asked*>(context);
      return static_cast<int32_t>(++a.times > a.give_up ? 7 : 0);
    };
    quern_model* model = nullptr;
    ExpectRefused(quern_model_create(library.get(), &options, nullptr, &model),
                  library.get(), QUERN_CANCELLED, "the caller has cancelled");
    EXPECT_EQ(model, nullptr);
    EXPECT_EQ(asked.times, give_up + 1);
  }
}

// A file that becomes shorter while it is read is lost data, not a signal.
TEST_F(FileInCTest, MayBecomeShorter) {
  quern_model_options options = OfPath();
  options.progress_context = const_cast<char*>(path_.c_str());
  options.progress = [](void* path, int64_t, int64_t) {
    std::ofstream(static_cast<const char*>(path), std::ios::trunc);
  };
  quern_model* model = nullptr;
  ExpectRefused(quern_model_create(library.get(), &options, nullptr, &model),
                library.get(), QUERN_DATA_LOSS, "gguf");
  EXPECT_EQ(model, nullptr);
}

class ModelLifeTest : public testing::Test, protected ModelsInC {
 protected:
  quern_model* const model_ = Load(FileOf("qwen3moe"));
  quern_model_state* const state_ = State(model_);
};

TEST_F(ModelLifeTest, AStateKeepsADestroyedModel) {
  quern_model_state* const other = State(model_);
  const std::vector<Tokens> tokens = {{Begin(state_), Text(9, 2)}};
  Begin(other);
  const LogitRows want = Logits(state_, tokens);
  ASSERT_C_OK(quern_destroy(model_), model_);
  EXPECT_EQ(Logits(other, tokens), want);
  EXPECT_EQ(ExplanationOf(other).rfind("state of a model, ", 0), 0u);
  quern_model_state* late = nullptr;
  ExpectRefused(quern_model_state_create(library.get(), model_, nullptr, &late),
                library.get(), QUERN_FAILED_PRECONDITION,
                "the model was destroyed");
  ASSERT_C_OK(quern_destroy(other), other);
  quern_tensor logits = {};
  ExpectRefused(Forward(other, tokens, 0, nullptr, &logits), other,
                QUERN_FAILED_PRECONDITION, "state of a model was destroyed");
}

TEST_F(ModelLifeTest, TellsItsMemory) {
  quern_model_state_info info = {};
  info.size = sizeof(info);
  ASSERT_C_OK(quern_model_state_get_info(state_, &info), state_);
  EXPECT_GT(info.cache_bytes_per_token, 0);
  EXPECT_GE(info.cache_bytes, info.free_tokens * info.cache_bytes_per_token);
  EXPECT_GT(info.scratch_bytes, 0);
  const int64_t before = info.free_tokens;
  Logits(state_, {{Begin(state_), {1}}});
  ASSERT_C_OK(quern_model_state_get_info(state_, &info), state_);
  EXPECT_EQ(info.free_tokens, before - 16);
}

// Threads that call one state: each call is done or refused, and the sequence
// has the tokens of those that were done.
TEST_F(ModelLifeTest, SurvivesThreadsThatCallAtOnce) {
  const int32_t sequence = Begin(state_);
  std::atomic<int> done{0}, refused{0}, other{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      const std::vector<Tokens> tokens = {{sequence, {5}}};
      for (int i = 0; i < 20; ++i) {
        quern_tensor logits = {};
        const quern_status status =
            Forward(state_, tokens, 0, nullptr, &logits);
        (status == QUERN_OK                    ? done
         : status == QUERN_FAILED_PRECONDITION ? refused
                                               : other)
            .fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(other.load(), 0) << MessageOf(state_);
  EXPECT_EQ(done.load() + refused.load(), 60);
  EXPECT_GT(done.load(), 0);
  EXPECT_EQ(Length(state_, sequence), done.load());
}

// A library is not destroyed while an object of it, whose owner let go, is
// being freed.
TEST(ModelLifeInCTest, EndsWithItsLibrary) {
  const std::string bytes = FileOf("llama");
  for (int i = 0; i < 20; ++i) {
    quern_library* library = nullptr;
    ASSERT_EQ(quern_library_create(nullptr, &library, nullptr, 0), QUERN_OK);
    const quern_model_options options = ModelsInC::OptionsOf(bytes);
    quern_model* model = nullptr;
    ASSERT_C_OK(quern_model_create(library, &options, nullptr, &model),
                library);
    quern_model_state* state = nullptr;
    // Large enough that freeing it takes a while.
    quern_model_state_options state_options = ModelsInC::StateOptions();
    state_options.max_sequences = 256;
    ASSERT_C_OK(
        quern_model_state_create(library, model, &state_options, &state),
        library);
    ASSERT_C_OK(quern_destroy(model), model);
    std::atomic<bool> begun{false};
    std::thread other([&] {
      begun = true;
      EXPECT_EQ(quern_destroy(state), QUERN_OK);
    });
    while (!begun) std::this_thread::yield();
    // The other thread may not have let go yet: its library would be gone.
    while (quern_explain(state, nullptr, 0) != 0) std::this_thread::yield();
    quern_status status = QUERN_FAILED_PRECONDITION;
    while (status == QUERN_FAILED_PRECONDITION) status = quern_destroy(library);
    EXPECT_EQ(status, QUERN_OK);
    other.join();
  }
}

}  // namespace
}  // namespace quern
