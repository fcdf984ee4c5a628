#ifndef QUERN_MODELS_TESTING_DECODER_FIXTURE_TESTUTIL_H_
#define QUERN_MODELS_TESTING_DECODER_FIXTURE_TESTUTIL_H_

// Fixture of tests of the forward pass: loads and runs small models, once for
// each instruction set.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {

// The architectures that ReferenceDecoder computes.
inline std::vector<std::string> TestArchitectures() {
  return ArchitecturesWithout(ModelPart::kLatent);
}
// Architectures whose logits have the same bits however a text is cut into
// steps.
inline std::vector<std::string> ExactArchitectures() {
  return ArchitecturesWithout(ModelPart::kLatent | ModelPart::kStates);
}
// Architectures that can be divided over ranks.
inline std::vector<std::string> RankArchitectures() {
  return ArchitecturesWithout(DecoderConfig::kRecurrentParts |
                              ModelPart::kLatent | ModelPart::kWholeNorms);
}

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
  Decoder Load(const std::string& bytes, DecoderWeights weights,
               DecoderActivations activations = DecoderActivations::kExact) {
    DecoderOptions options;
    options.weights = weights;
    options.activations = activations;
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

  // Two steps of four sequences at once, on `threads`, have the bits of each
  // sequence alone: long pieces and single tokens, in either order.
  void ExpectBatchAndThreadsChangeNothing(const SmallDecoder& shape,
                                          int64_t page_size,
                                          int64_t page_size_alone,
                                          Executor& threads) {
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    for (const DecoderWeights weights :
         {DecoderWeights::kF32, DecoderWeights::kBF16, DecoderWeights::kInt8}) {
      ExpectBatchAndThreadsChangeNothing(rng, Load(bytes, weights), page_size,
                                         page_size_alone, threads);
    }
  }
  void ExpectBatchAndThreadsChangeNothing(Rng& rng, const Decoder& model,
                                          int64_t page_size,
                                          int64_t page_size_alone,
                                          Executor& threads) {
    const int64_t vocab = model.config().vocab;
    DecoderState batched = State(model, page_size);
    std::vector<std::vector<int32_t>> firsts, seconds;
    std::vector<DecoderBatchItem> first_step, second_step;
    std::vector<Rows> alone;
    for (const auto& [first, second] :
         {std::pair{17, 1}, {1, 40}, {40, 16}, {3, 1}}) {
      firsts.push_back(RandomTokens(rng, first, vocab));
      seconds.push_back(RandomTokens(rng, second, vocab));
      DecoderState state = State(model, page_size_alone);
      const int32_t sequence = *state.NewSequence();
      Forward(state, {{sequence, firsts.back()}}, inline_);
      alone.push_back(Forward(state, {{sequence, seconds.back()}}, inline_));
    }
    for (size_t s = 0; s < firsts.size(); ++s) {
      first_step.push_back({*batched.NewSequence(), firsts[s]});
      second_step.push_back({first_step.back().sequence, seconds[s]});
    }
    Forward(batched, first_step, threads);
    // In another order than before.
    std::reverse(second_step.begin(), second_step.end());
    const Rows rows = Forward(batched, second_step, threads);
    size_t at = 0;
    for (size_t s = firsts.size(); s-- > 0;) {
      for (const std::vector<float>& want : alone[s]) {
        ASSERT_EQ(rows[at++], want) << "sequence " << s;
      }
    }
  }

  InlineExecutor inline_;
};

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_DECODER_FIXTURE_TESTUTIL_H_
