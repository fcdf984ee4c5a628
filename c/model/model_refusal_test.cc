// What models and their states refuse through the C interface, by tables, and
// that a refused step changes nothing.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/model/model_testutil.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

std::string SmallFile() {
  TestRng rng;
  return SmallDecoderFile(rng, SmallDecoder());
}

class ModelRefusalTest : public testing::Test, protected ModelsInC {
 protected:
  const std::string bytes_ = SmallFile();
  quern_model* const model_ = Load(bytes_);
};

TEST_F(ModelRefusalTest, RefusesModels) {
  struct Case {
    const char* words;
    std::function<void(quern_model_options&)> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  const auto path = [](const char* name) {
    return [name](quern_model_options& o) {
      o.path = name;
      o.bytes = nullptr;
      o.num_bytes = 0;
    };
  };
  const Case cases[] = {
      {"quern_model_options: size=0", [](auto& o) { o.size = 0; }},
      {"path and bytes are null; need one", [](auto& o) { o.bytes = nullptr; }},
      {"path and bytes are both given; need one",
       [](auto& o) { o.path = "model.gguf"; }},
      {"num_bytes=3; need 0, as the file has a path",
       [&](auto& o) {
         path("model.gguf")(o);
         o.num_bytes = 3;
       }},
      {"need less than 2^63",
       [](auto& o) { o.num_bytes = std::numeric_limits<size_t>::max(); }},
      {"gguf: cannot open 'no/such.gguf'", path("no/such.gguf"),
       QUERN_NOT_FOUND},
      {"is not a regular file", path(".")},
      {"gguf", [](auto& o) { o.num_bytes = 0; }},
      {"gguf", [](auto& o) { o.num_bytes = 10; }},
      {"gguf", [](auto& o) { --o.num_bytes; }},
      {"weights=\"int3\"; need one of file, bf16, f32, int8",
       [](auto& o) { o.weights = "int3"; }},
      {"activations=\"fp8\"; need one of exact, int8",
       [](auto& o) { o.activations = "fp8"; }},
      {"activations=int8 with weights=bf16",
       [](auto& o) {
         o.weights = "bf16";
         o.activations = "int8";
       }},
      {"max_context=-1; need max_context >= 1",
       [](auto& o) { o.max_context = -1; }},
      {"max_bytes=-1; need max_bytes >= 0", [](auto& o) { o.max_bytes = -1; }},
      {"need at most max_bytes=1000", [](auto& o) { o.max_bytes = 1000; },
       QUERN_RESOURCE_EXHAUSTED},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_model_options options = OptionsOf(bytes_);
    c.spoil(options);
    quern_model* model = model_;
    ExpectRefused(quern_model_create(library.get(), &options, nullptr, &model),
                  library.get(), c.code, c.words);
    EXPECT_EQ(model, nullptr);
  }
  const quern_model_options options = OptionsOf(bytes_);
  quern_model* model = nullptr;
  ExpectRefused(quern_model_create(library.get(), nullptr, nullptr, &model),
                library.get(), QUERN_INVALID_ARGUMENT, "options is null");
  ExpectRefused(quern_model_create(library.get(), &options, nullptr, nullptr),
                library.get(), QUERN_INVALID_ARGUMENT, "the result is null");
  ExpectRefused(
      quern_model_create(library.get(), &options,
                         reinterpret_cast<quern_executor*>(model_), &model),
      library.get(), QUERN_INVALID_ARGUMENT, "of kind model; need executor");
  EXPECT_EQ(quern_model_create(nullptr, &options, nullptr, &model),
            QUERN_INVALID_ARGUMENT);
}

// A file of a model that this library does not have.
TEST_F(ModelRefusalTest, NamesTheArchitecture) {
  std::string bytes = bytes_;
  const size_t at = bytes.find("llama");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 5, "lemur");
  const quern_model_options options = OptionsOf(bytes);
  quern_model* model = nullptr;
  EXPECT_NE(quern_model_create(library.get(), &options, nullptr, &model),
            QUERN_OK);
  EXPECT_EQ(model, nullptr);
  EXPECT_NE(MessageOf(library.get()).find("lemur"), std::string::npos)
      << MessageOf(library.get());
}

TEST_F(ModelRefusalTest, RefusesStates) {
  struct Case {
    const char* words;
    std::function<void(quern_model_state_options&)> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  const Case cases[] = {
      {"quern_model_state_options: size=8", [](auto& o) { o.size = 8; }},
      {"max_sequences=-1; need 1 <= ", [](auto& o) { o.max_sequences = -1; }},
      {"max_step_tokens=-1; need 1 <= ",
       [](auto& o) { o.max_step_tokens = -1; }},
      {"cache_tokens=-1; need cache_tokens >= 0",
       [](auto& o) { o.cache_tokens = -1; }},
      {"a cache of 9223372036854775808 tokens takes",
       [](auto& o) { o.cache_tokens = std::numeric_limits<int64_t>::max(); },
       QUERN_RESOURCE_EXHAUSTED},
      {"page_size=-1", [](auto& o) { o.page_size = -1; }},
      {"quern_model_state_create: cache_dtype=\"int3\"; need one of f32, "
       "bf16, ",
       [](auto& o) { o.cache_dtype = "int3"; }},
      {"cache_dtype=\"i32\"; need one of ",
       [](auto& o) { o.cache_dtype = "i32"; }},
      {"need at most max_bytes=1000", [](auto& o) { o.max_bytes = 1000; },
       QUERN_RESOURCE_EXHAUSTED},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_model_state_options options = StateOptions();
    c.spoil(options);
    quern_model_state* state = nullptr;
    ExpectRefused(
        quern_model_state_create(library.get(), model_, &options, &state),
        library.get(), c.code, c.words);
    EXPECT_EQ(state, nullptr);
  }
  quern_model_state* state = nullptr;
  ExpectRefused(
      quern_model_state_create(library.get(), nullptr, nullptr, &state),
      library.get(), QUERN_INVALID_ARGUMENT, "the object is null");
  const ModelsInC other;
  ExpectRefused(
      quern_model_state_create(other.library.get(), model_, nullptr, &state),
      other.library.get(), QUERN_INVALID_ARGUMENT,
      "model is of another library");
  // The defaults of all options.
  ASSERT_C_OK(quern_model_state_create(library.get(), model_, nullptr, &state),
              library.get());
  EXPECT_EQ(Begin(state), 0);
  int32_t sequence = 5;
  ExpectRefused(quern_model_state_begin(state, &sequence), state,
                QUERN_RESOURCE_EXHAUSTED, "all of max_sequences=1 are in use");
  EXPECT_EQ(sequence, -1);
}

TEST_F(ModelRefusalTest, RefusesSequences) {
  quern_model_state* const state = State(model_);
  const int32_t sequence = Begin(state);
  int32_t forked = 5;
  int64_t length = 5;
  for (const int32_t no_sequence : {-1, 1, 3, 1 << 30}) {
    ExpectRefused(quern_model_state_fork(state, no_sequence, &forked), state,
                  QUERN_INVALID_ARGUMENT, "is not a sequence");
    ExpectRefused(quern_model_state_end(state, no_sequence), state,
                  QUERN_INVALID_ARGUMENT, "is not a sequence");
    ExpectRefused(quern_model_state_length(state, no_sequence, &length), state,
                  QUERN_INVALID_ARGUMENT, "is not a sequence");
  }
  ExpectRefused(quern_model_state_begin(state, nullptr), state,
                QUERN_INVALID_ARGUMENT, "sequence is null");
  ExpectRefused(quern_model_state_fork(state, sequence, nullptr), state,
                QUERN_INVALID_ARGUMENT, "sequence is null");
  ExpectRefused(quern_model_state_length(state, sequence, nullptr), state,
                QUERN_INVALID_ARGUMENT, "length is null");
  EXPECT_EQ(Length(state, sequence), 0);
}

TEST_F(ModelRefusalTest, RefusesSteps) {
  struct Step {
    std::vector<quern_model_item> items;
    quern_model_step step;
  };
  struct Case {
    const char* words;
    std::function<void(Step&)> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  static const std::vector<int32_t> good(5, 1), low = {-1}, high = {37},
                                                many(51, 1), more(60, 1);
  const auto tokens = [](const std::vector<int32_t>& ids) {
    return [&ids](Step& s) {
      s.items[1].tokens = ids.data();
      s.items[1].num_tokens = static_cast<int64_t>(ids.size());
    };
  };
  const Case cases[] = {
      {"quern_model_step: size=0", [](Step& s) { s.step.size = 0; }},
      {"all_logits=2; need 0 <= all_logits <= 1",
       [](Step& s) { s.step.all_logits = 2; }},
      {"reserved=1", [](Step& s) { s.step.reserved = 1; }},
      {"items is null", [](Step& s) { s.step.items = nullptr; }},
      {"need 1048576 or fewer",
       [](Step& s) { s.step.num_items = std::numeric_limits<size_t>::max(); }},
      {"items[1].reserved=2", [](Step& s) { s.items[1].reserved = 2; }},
      {"items[1].num_tokens=0; need",
       [](Step& s) { s.items[1].num_tokens = 0; }},
      {"items[0].num_tokens=-1; need",
       [](Step& s) { s.items[0].num_tokens = -1; }},
      {"items[0].tokens is null", [](Step& s) { s.items[0].tokens = nullptr; }},
      {"items[1].sequence=2 is not a sequence",
       [](Step& s) { s.items[1].sequence = 2; }},
      {"items[1].sequence=0 occurs twice",
       [](Step& s) { s.items[1].sequence = 0; }},
      {"items[1] has token -1; need 0 <= token < 37", tokens(low)},
      {"items[1] has token 37; need", tokens(high)},
      {"the step has 56 tokens; need <= 50", tokens(many)},
      {"items[1] has 60 tokens after 10; the context is 64", tokens(more)},
      {"after 10; the context is 64",
       [](Step& s) {
         s.items[1].num_tokens = std::numeric_limits<int64_t>::max();
       }},
  };
  quern_model_state* const state = State(model_);
  const int32_t a = Begin(state), b = Begin(state);
  Logits(state, {{a, good}, {b, std::vector<int32_t>(10, 1)}});
  quern_tensor logits = {};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    Step s;
    s.items = {{a, 0, good.data(), 5}, {b, 0, good.data(), 5}};
    s.step = {sizeof(s.step), s.items.data(), 2, 0, 0};
    c.spoil(s);
    ExpectRefused(quern_model_state_forward(state, &s.step, nullptr, &logits),
                  state, c.code, c.words);
    EXPECT_EQ(logits.data, nullptr);
    EXPECT_EQ(RowsInC(logits), LogitRows());
    EXPECT_EQ(Length(state, a), 5);
    EXPECT_EQ(Length(state, b), 10);
  }
  const quern_model_item item = {a, 0, good.data(), 5};
  const quern_model_step step = {sizeof(step), &item, 1, 0, 0};
  ExpectRefused(quern_model_state_forward(state, nullptr, nullptr, &logits),
                state, QUERN_INVALID_ARGUMENT, "step is null");
  ExpectRefused(quern_model_state_forward(state, &step, nullptr, nullptr),
                state, QUERN_INVALID_ARGUMENT, "logits is null");
  ExpectRefused(
      quern_model_state_forward(
          state, &step, reinterpret_cast<quern_executor*>(model_), &logits),
      state, QUERN_INVALID_ARGUMENT, "of kind model; need executor");
  ExpectRefused(
      quern_model_state_forward(reinterpret_cast<quern_model_state*>(model_),
                                &step, nullptr, &logits),
      model_, QUERN_INVALID_ARGUMENT, "of kind model; need state of a model");
  // A step without items is no error.
  EXPECT_EQ(Logits(state, {}), LogitRows());
  EXPECT_EQ(Logits(state, {{a, good}}).size(), 1u);
}

TEST_F(ModelRefusalTest, RefusesAFullCache) {
  quern_model_state_options options = StateOptions();
  options.max_sequences = 2;
  options.cache_tokens = 64;
  quern_model_state* state = nullptr;
  ASSERT_C_OK(quern_model_state_create(library.get(), model_, &options, &state),
              library.get());
  const int32_t a = Begin(state), b = Begin(state);
  Logits(state, {{a, std::vector<int32_t>(40, 1)}});
  quern_tensor logits = {};
  ExpectRefused(
      Forward(state, {{b, std::vector<int32_t>(17, 1)}}, 0, nullptr, &logits),
      state, QUERN_RESOURCE_EXHAUSTED, "the cache of 64 tokens is full");
  EXPECT_EQ(Length(state, b), 0);
  ASSERT_C_OK(quern_model_state_end(state, a), state);
  EXPECT_EQ(Logits(state, {{b, std::vector<int32_t>(17, 1)}}).size(), 1u);
}

TEST_F(ModelRefusalTest, RefusesInfos) {
  quern_model_state* const state = State(model_);
  quern_model_info of_model = {};
  quern_model_state_info of_state = {};
  ExpectRefused(quern_model_get_info(model_, nullptr), model_,
                QUERN_INVALID_ARGUMENT, "info is null");
  ExpectRefused(quern_model_get_info(model_, &of_model), model_,
                QUERN_INVALID_ARGUMENT, "quern_model_info: size=0");
  ExpectRefused(quern_model_state_get_info(state, nullptr), state,
                QUERN_INVALID_ARGUMENT, "info is null");
  ExpectRefused(quern_model_state_get_info(state, &of_state), state,
                QUERN_INVALID_ARGUMENT, "quern_model_state_info: size=0");
}

}  // namespace
}  // namespace quern
