// Executors of the caller's under models: one that breaks its promise, and one
// that calls the state that runs on it.

#include <cstdint>
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

// Experts are computed by tasks that read what other tasks have written.
std::string FileWithExperts() {
  TestRng rng;
  SmallDecoder shape;
  shape.architecture = "qwen3moe";
  return SmallDecoderFile(rng, shape);
}

class ModelExecutorTest : public testing::Test, protected ModelsInC {
 protected:
  quern_executor* Make(void (*parallel_for)(void*, int64_t, quern_task, void*),
                       void* context) const {
    quern_executor_functions functions = {};
    functions.size = sizeof(functions);
    functions.context = context;
    functions.num_workers = [](void*) -> int32_t { return 2; };
    functions.parallel_for = parallel_for;
    quern_executor* executor = nullptr;
    EXPECT_C_OK(
        quern_executor_create_from(library.get(), &functions, &executor),
        library.get());
    return executor;
  }

  const std::string bytes_ = FileWithExperts();
  quern_model* const model_ = Load(bytes_);
  quern_model_state* const state_ = State(model_);
  const std::vector<int32_t> text_ = {3, 14, 25, 36, 10, 21, 32, 6, 17};
};

// Executors that leave tasks out and repeat others, or do nothing.
TEST_F(ModelExecutorTest, ABrokenOneIsReportedAndEachTaskDoneOnce) {
  const auto half = [](void*, int64_t n, quern_task run, void* context) {
    for (int64_t t = 0; t < n; t += 2) {
      run(context, t, 0);
      run(context, t, 1);
    }
  };
  const auto idle = [](void*, int64_t, quern_task, void*) {};
  for (quern_executor* const broken :
       {Make(half, nullptr), Make(idle, nullptr)}) {
    quern_model_state* const state = State(model_);
    const int32_t sequence = Begin(state);
    quern_tensor logits = {};
    ExpectRefused(Forward(state, {{sequence, text_}}, 0, broken, &logits),
                  state, QUERN_INTERNAL, "the executor's parallel_for ran ");
    EXPECT_EQ(logits.data, nullptr);
    EXPECT_EQ(RowsInC(logits), LogitRows());
    EXPECT_EQ(Length(state, sequence), static_cast<int64_t>(text_.size()));
    quern_model* model = nullptr;
    const quern_model_options options = OptionsOf(bytes_);
    ExpectRefused(quern_model_create(library.get(), &options, broken, &model),
                  library.get(), QUERN_INTERNAL, "the executor's parallel_for");
    EXPECT_EQ(model, nullptr);

    // The tasks that were left out have written to the cache, too.
    quern_model_state* const fresh = State(model_);
    Logits(fresh, {{Begin(fresh), text_}});
    EXPECT_EQ(Logits(state, {{sequence, {5}}}), Logits(fresh, {{0, {5}}}));
    // Another sequence of the state is not touched by it.
    EXPECT_EQ(Logits(state, {{Begin(state), text_}}, 1),
              Logits(fresh, {{Begin(fresh), text_}}, 1));
  }
}

// What a step does while it runs belongs to it alone.
TEST_F(ModelExecutorTest, CallsWithinAStepAreRefused) {
  struct Context {
    quern_library* library;
    quern_model_state* state;
    std::vector<quern_status> refused;
  } context = {library.get(), state_, {}};
  quern_executor* const executor = Make(
      [](void* pointer, int64_t n, quern_task run, void* task_context) {
        auto& c = *static_cast<Context*>(pointer);
        if (c.refused.empty()) {
          int32_t sequence = 0;
          int64_t length = 0;
          quern_tensor logits = {};
          quern_model_state_info info = {};
          info.size = sizeof(info);
          c.refused = {quern_model_state_begin(c.state, &sequence),
                       quern_model_state_fork(c.state, 0, &sequence),
                       quern_model_state_end(c.state, 0),
                       quern_model_state_length(c.state, 0, &length),
                       quern_model_state_get_info(c.state, &info),
                       Forward(c.state, {{0, {1}}}, 0, nullptr, &logits),
                       quern_destroy(c.library)};
        }
        for (int64_t t = 0; t < n; ++t) run(task_context, t, 0);
      },
      &context);
  const int32_t sequence = Begin(state_);
  const LogitRows rows = Logits(state_, {{sequence, text_}}, 0, executor);
  EXPECT_EQ(context.refused,
            std::vector<quern_status>(7, QUERN_FAILED_PRECONDITION));
  quern_model_state* const fresh = State(model_);
  EXPECT_EQ(rows, Logits(fresh, {{Begin(fresh), text_}}));
}

// A state that is destroyed within its step lives until the step is done.
TEST_F(ModelExecutorTest, AStateOutlivesItsOwnDestruction) {
  struct Context {
    quern_model_state* state;
    quern_model* model;
    std::vector<quern_status> destroyed;
  } context = {state_, model_, {}};
  quern_executor* const executor = Make(
      [](void* pointer, int64_t n, quern_task run, void* task_context) {
        auto& c = *static_cast<Context*>(pointer);
        if (c.destroyed.empty()) {
          c.destroyed = {quern_destroy(c.model), quern_destroy(c.state)};
        }
        for (int64_t t = 0; t < n; ++t) run(task_context, t, 0);
      },
      &context);
  const int32_t sequence = Begin(state_);
  quern_tensor logits = {};
  ASSERT_C_OK(Forward(state_, {{sequence, text_}}, 0, executor, &logits),
              state_);
  EXPECT_EQ(context.destroyed, std::vector<quern_status>(2, QUERN_OK));
  ExpectRefused(Forward(state_, {{sequence, text_}}, 0, nullptr, &logits),
                state_, QUERN_FAILED_PRECONDITION, "was destroyed");
}

}  // namespace
}  // namespace quern
