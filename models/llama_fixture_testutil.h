#ifndef QUERN_MODELS_LLAMA_FIXTURE_TESTUTIL_H_
#define QUERN_MODELS_LLAMA_FIXTURE_TESTUTIL_H_

// What tests of the forward pass share: small models loaded and run, once for
// each instruction set.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/gguf.h"
#include "quern/models/llama.h"
#include "quern/models/llama_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {

constexpr const char* kLlamaArchitectures[] = {"llama", "qwen2", "qwen3",
                                               "gemma2"};

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

class LlamaFixture : public IsaTest {
 protected:
  LlamaModel Load(const std::string& bytes, LlamaWeights weights) {
    LlamaOptions options;
    options.weights = weights;
    auto model = LlamaModel::Create(ParseOrDie(bytes), options, inline_);
    EXPECT_TRUE(model.ok()) << model.status();
    EXPECT_RAN_ON(*model);
    return *std::move(model);
  }

  LlamaState State(const LlamaModel& model, int64_t page_size = 8,
                   DType cache = DType::kF32) {
    LlamaStateSpec spec;
    spec.max_sequences = 5;
    spec.max_step_tokens = 300;
    spec.page_size = page_size;
    spec.cache_dtype = cache;
    auto state = LlamaState::Create(model, spec);
    EXPECT_TRUE(state.ok()) << state.status();
    return *std::move(state);
  }

  Rows Forward(LlamaState& state, const std::vector<LlamaBatchItem>& items,
               Executor& executor) {
    const auto logits = state.Forward(items, LogitsOf::kAllTokens, executor);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.ok() ? Copy(*logits) : Rows();
  }

  InlineExecutor inline_;
};

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_FIXTURE_TESTUTIL_H_
