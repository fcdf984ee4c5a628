// Random calls on a state of a model, good and bad: each is done or refused,
// sequences have the tokens of the calls that were done, and their logits are
// those of the whole text in a fresh state.

#include <cstddef>
#include <cstdint>
#include <map>
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

constexpr int32_t kVocab = 37;
constexpr size_t kMaxSequences = 3;

class ModelWalkTest : public testing::Test, protected ModelsInC {
 protected:
  ModelWalkTest() {
    TestRng rng;
    model_ = Load(SmallDecoderFile(rng, SmallDecoder()));
    quern_model_state_options options = StateOptions();
    options.max_sequences = kMaxSequences;
    options.cache_tokens = 96;  // less than the three contexts of 64
    EXPECT_C_OK(
        quern_model_state_create(library.get(), model_, &options, &state_),
        library.get());
  }

  // From one that does not exist to one that does not exist.
  int32_t AnySequence() {
    return static_cast<int32_t>(rng_.Integer(-1, kMaxSequences));
  }
  std::vector<int32_t> AnyTokens() {
    std::vector<int32_t> tokens(static_cast<size_t>(rng_.Integer(1, 20)));
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(rng_.Integer(0, kVocab - 1));
    }
    if (rng_.Integer(0, 9) == 0) tokens.back() = kVocab;
    return tokens;
  }
  // A refusal has a code that says whose fault it is, and a sentence.
  void ExpectRefusal(quern_status status) {
    EXPECT_TRUE(status == QUERN_INVALID_ARGUMENT ||
                status == QUERN_RESOURCE_EXHAUSTED)
        << status;
    EXPECT_FALSE(MessageOf(state_).empty());
    ++refused_;
  }

  void StartOne() {
    int32_t sequence = -2;
    const quern_status status = quern_model_state_begin(state_, &sequence);
    if (texts_.size() == kMaxSequences) return ExpectRefusal(status);
    ASSERT_C_OK(status, state_);
    EXPECT_TRUE(texts_.emplace(sequence, std::vector<int32_t>()).second);
  }
  void ForkOne() {
    int32_t forked = -2;
    const int32_t sequence = AnySequence();
    const quern_status status =
        quern_model_state_fork(state_, sequence, &forked);
    if (texts_.count(sequence) == 0 || texts_.size() == kMaxSequences) {
      return ExpectRefusal(status);
    }
    ASSERT_C_OK(status, state_);
    EXPECT_TRUE(texts_.emplace(forked, texts_[sequence]).second);
  }
  void EndOne() {
    const int32_t sequence = AnySequence();
    const quern_status status = quern_model_state_end(state_, sequence);
    if (texts_.erase(sequence) == 0) return ExpectRefusal(status);
    ASSERT_C_OK(status, state_);
  }
  void StepSome() {
    std::vector<Tokens> step;
    for (int64_t i = rng_.Integer(1, 3); i > 0; --i) {
      step.push_back({AnySequence(), AnyTokens()});
    }
    quern_tensor logits = {};
    const quern_status status = Forward(state_, step, 0, nullptr, &logits);
    if (status != QUERN_OK) {
      EXPECT_EQ(RowsInC(logits), LogitRows());
      return ExpectRefusal(status);
    }
    const LogitRows rows = RowsInC(logits);
    ASSERT_EQ(rows.size(), step.size());
    ++done_;
    for (size_t i = 0; i < step.size(); ++i) {
      ASSERT_EQ(texts_.count(step[i].sequence), 1u);
      std::vector<int32_t>& text = texts_[step[i].sequence];
      text.insert(text.end(), step[i].ids.begin(), step[i].ids.end());
      EXPECT_EQ(rows[i], WholeText(text));
    }
  }
  std::vector<float> WholeText(const std::vector<int32_t>& text) {
    quern_model_state_options options = StateOptions();
    options.max_sequences = 1;
    options.max_step_tokens = 64;
    quern_model_state* fresh = nullptr;
    EXPECT_C_OK(
        quern_model_state_create(library.get(), model_, &options, &fresh),
        library.get());
    const LogitRows rows = Logits(fresh, {{Begin(fresh), text}});
    EXPECT_C_OK(quern_destroy(fresh), fresh);
    return rows.empty() ? std::vector<float>() : rows[0];
  }
  void ExpectLengths() {
    for (int32_t s = -1; s <= static_cast<int32_t>(kMaxSequences); ++s) {
      const auto text = texts_.find(s);
      int64_t length = -2;
      const quern_status status = quern_model_state_length(state_, s, &length);
      if (text == texts_.end()) {
        EXPECT_EQ(status, QUERN_INVALID_ARGUMENT) << s;
      } else {
        EXPECT_EQ(length, static_cast<int64_t>(text->second.size())) << s;
      }
    }
  }

  TestRng rng_{1};
  quern_model* model_ = nullptr;
  quern_model_state* state_ = nullptr;
  std::map<int32_t, std::vector<int32_t>> texts_;
  int done_ = 0, refused_ = 0;
};

TEST_F(ModelWalkTest, RefusalsChangeNothingAndStepsAddUp) {
  for (int i = 0; i < 400 && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    switch (rng_.Integer(0, 7)) {
      case 0:
        StartOne();
        break;
      case 1:
        ForkOne();
        break;
      case 2:
        EndOne();
        break;
      default:
        StepSome();
    }
    ExpectLengths();
  }
  EXPECT_GT(done_, 20);
  EXPECT_GT(refused_, 50);
}

}  // namespace
}  // namespace quern
