#ifndef QUERN_C_MODEL_MODEL_TESTUTIL_H_
#define QUERN_C_MODEL_MODEL_TESTUTIL_H_

// Test utility: models of the C interface from small random files, and logits
// as rows.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/testing/c_testutil.h"

namespace quern {

using LogitRows = std::vector<std::vector<float>>;

inline LogitRows RowsInC(const quern_tensor& logits) {
  LogitRows rows;
  EXPECT_EQ(logits.ndim, 2);
  const auto* const data = static_cast<const float*>(logits.data);
  for (int64_t i = 0; i < logits.shape[0]; ++i) {
    const float* const row = data + i * logits.shape[1];
    rows.emplace_back(row, row + logits.shape[1]);
  }
  return rows;
}

// New tokens of one sequence.
struct Tokens {
  int32_t sequence;
  std::vector<int32_t> ids;
};

// A library, and what tests of models call on it.
struct ModelsInC {
  static quern_model_options OptionsOf(const std::string& bytes) {
    quern_model_options options = {};
    options.size = sizeof(options);
    options.bytes = bytes.data();
    options.num_bytes = bytes.size();
    return options;
  }
  static quern_model_state_options StateOptions() {
    quern_model_state_options options = {};
    options.size = sizeof(options);
    options.max_sequences = 3;
    options.max_step_tokens = 50;
    options.page_size = 16;
    return options;
  }

  quern_model* Load(const std::string& bytes) const {
    const quern_model_options options = OptionsOf(bytes);
    quern_model* model = nullptr;
    EXPECT_C_OK(quern_model_create(library.get(), &options, nullptr, &model),
                library.get());
    return model;
  }
  quern_model_state* State(quern_model* model) const {
    const quern_model_state_options options = StateOptions();
    quern_model_state* state = nullptr;
    EXPECT_C_OK(
        quern_model_state_create(library.get(), model, &options, &state),
        library.get());
    return state;
  }

  static int32_t Begin(quern_model_state* state) {
    int32_t sequence = -1;
    EXPECT_C_OK(quern_model_state_begin(state, &sequence), state);
    return sequence;
  }
  static int64_t Length(quern_model_state* state, int32_t sequence) {
    int64_t length = -1;
    EXPECT_C_OK(quern_model_state_length(state, sequence, &length), state);
    return length;
  }
  static std::vector<quern_model_item> ItemsOf(
      const std::vector<Tokens>& tokens) {
    std::vector<quern_model_item> items;
    for (const Tokens& t : tokens) {
      items.push_back(
          {t.sequence, 0, t.ids.data(), static_cast<int64_t>(t.ids.size())});
    }
    return items;
  }
  static quern_status Forward(quern_model_state* state,
                              const std::vector<Tokens>& tokens,
                              int32_t all_logits, quern_executor* executor,
                              quern_tensor* logits) {
    const std::vector<quern_model_item> items = ItemsOf(tokens);
    const quern_model_step step = {sizeof(step), items.data(), items.size(),
                                   all_logits, 0};
    return quern_model_state_forward(state, &step, executor, logits);
  }
  static LogitRows Logits(quern_model_state* state,
                          const std::vector<Tokens>& tokens,
                          int32_t all_logits = 0,
                          quern_executor* executor = nullptr) {
    quern_tensor logits = {};
    const quern_status status =
        Forward(state, tokens, all_logits, executor, &logits);
    EXPECT_C_OK(status, state);
    return status == QUERN_OK ? RowsInC(logits) : LogitRows();
  }

  LibraryInC library;
};

}  // namespace quern

#endif  // QUERN_C_MODEL_MODEL_TESTUTIL_H_
