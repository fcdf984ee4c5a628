#ifndef QUERN_MODELS_DECODER_FIXTURE_TESTUTIL_H_
#define QUERN_MODELS_DECODER_FIXTURE_TESTUTIL_H_

// Fixture of tests of the forward pass: loads and runs small models, once for
// each instruction set.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/decoder.h"
#include "quern/models/decoder_testutil.h"
#include "quern/models/gguf.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {

constexpr const char* kTestArchitectures[] = {
    "llama",  "qwen2", "qwen3",         "qwen3moe",
    "gemma2", "lfm2",  "granitehybrid", "qwen3next"};
// Those whose logits have the same bits however a text is cut into steps.
constexpr const char* kExactArchitectures[] = {"llama",    "qwen2",  "qwen3",
                                               "qwen3moe", "gemma2", "lfm2"};
// Those that can be divided over ranks.
constexpr const char* kRankArchitectures[] = {"llama", "qwen2", "qwen3",
                                              "qwen3moe", "gemma2"};

inline std::vector<int32_t> RandomTokens(Rng& rng, int64_t count,
                                         int64_t vocab) {
  std::vector<int32_t> tokens;
  while (count-- > 0) {
    tokens.push_back(static_cast<int32_t>(rng.Integer(0, vocab - 1)));
  }
  return tokens;
}

using Rows = std::vector<std::vector<float>>;

inline Rows Copy(MatrixView<const float> m) {
  Rows rows;
  for (int64_t i = 0; i < m.extent(0); ++i) {
    rows.emplace_back(m.Row(i), m.Row(i) + m.extent(1));
  }
  return rows;
}

class DecoderFixture : public IsaTest {
 protected:
  Decoder Load(const std::string& bytes, DecoderWeights weights) {
    DecoderOptions options;
    options.weights = weights;
    auto model = Decoder::Create(ParseOrDie(bytes), options, inline_);
    EXPECT_TRUE(model.ok()) << model.status();
    EXPECT_RAN_ON(*model);
    return *std::move(model);
  }

  DecoderState State(const Decoder& model, int64_t page_size = 8,
                     DType cache = DType::kF32) {
    DecoderStateSpec spec;
    spec.max_sequences = 5;
    spec.max_step_tokens = 300;
    spec.page_size = page_size;
    spec.cache_dtype = cache;
    auto state = DecoderState::Create(model, spec);
    EXPECT_TRUE(state.ok()) << state.status();
    return *std::move(state);
  }

  Rows Forward(DecoderState& state, const std::vector<DecoderBatchItem>& items,
               Executor& executor) {
    const auto logits = state.Forward(items, LogitsOf::kAllTokens, executor);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.ok() ? Copy(*logits) : Rows();
  }

  InlineExecutor inline_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_FIXTURE_TESTUTIL_H_
