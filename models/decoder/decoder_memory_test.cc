// Sharing of pages between sequences, and pages that a window has left. Neither
// may change a bit of the results.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

template <typename T>
std::vector<T> Join(std::vector<T> a, const std::vector<T>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class DecoderMemoryTest : public DecoderFixture {
 protected:
  static SmallDecoder Shape(const char* architecture, int64_t context) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.context = context;
    return shape;
  }

  // Logits of the last `wanted` tokens of a sequence that runs alone and in one
  // piece.
  Rows Alone(const Decoder& model, const std::vector<int32_t>& tokens,
             size_t wanted) {
    DecoderStateSpec spec;
    spec.max_step_tokens = static_cast<int64_t>(tokens.size());
    spec.cache_dtype = DType::kF32;
    auto state = DecoderState::Create(model, spec);
    EXPECT_TRUE(state.ok()) << state.status();
    const Rows rows =
        Forward(*state, {{*state->NewSequence(), tokens}}, inline_);
    return Rows(rows.end() - static_cast<ptrdiff_t>(wanted), rows.end());
  }
};

TEST_P(DecoderMemoryTest, ForksContinueAsTheWhole) {
  TestRng rng;
  for (const char* architecture : {"llama", "gemma2", "lfm2"}) {
    const SmallDecoder shape = Shape(architecture, 64);
    const Decoder model =
        Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
    for (const int64_t page_size : {1, 8, 16}) {
      SCOPED_TRACE(page_size);
      DecoderState state = State(model, page_size);
      const int64_t all_free = state.free_tokens();
      const auto prompt = RandomTokens(rng, 21, shape.vocab);
      const int32_t root = *state.NewSequence();
      Forward(state, {{root, prompt}}, inline_);
      const auto left = state.Fork(root), right = state.Fork(root);
      ASSERT_TRUE(left.ok() && right.ok()) << left.status();
      EXPECT_EQ(state.length(*left), 21);
      // The branches continue differently, the second one after the root has
      // ended.
      const auto tail_l = RandomTokens(rng, 3, shape.vocab);
      const auto tail_r = RandomTokens(rng, 5, shape.vocab);
      EXPECT_EQ(Forward(state, {{*left, tail_l}}, inline_),
                Alone(model, Join(prompt, tail_l), 3));
      EXPECT_EQ(Forward(state, {{root, tail_r}}, inline_),
                Alone(model, Join(prompt, tail_r), 5));
      ASSERT_TRUE(state.EndSequence(root).ok());
      EXPECT_EQ(Forward(state, {{*right, tail_r}, {*left, tail_r}}, inline_),
                Join(Alone(model, Join(prompt, tail_r), 5),
                     Alone(model, Join(Join(prompt, tail_l), tail_r), 5)));
      ASSERT_TRUE(state.EndSequence(*left).ok());
      ASSERT_TRUE(state.EndSequence(*right).ok());
      EXPECT_EQ(state.free_tokens(), all_free);
    }
  }
}

// A refused step may already have replaced shared pages by copies, whose
// contents must be complete.
TEST_P(DecoderMemoryTest, ARefusedStepKeepsWhatForksShare) {
  TestRng rng;
  const SmallDecoder shape = Shape("llama", 64);
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  DecoderStateSpec spec;
  spec.max_sequences = 3;
  spec.page_size = 16;
  spec.cache_tokens = 64;
  spec.cache_dtype = DType::kF32;
  auto state = DecoderState::Create(model, spec);
  ASSERT_TRUE(state.ok()) << state.status();
  const auto prompt = RandomTokens(rng, 21, shape.vocab);
  const auto tail = RandomTokens(rng, 1, shape.vocab);
  const auto many = RandomTokens(rng, 40, shape.vocab);
  const int32_t root = *state->NewSequence();
  Forward(*state, {{root, prompt}}, inline_);
  const int32_t branch = *state->Fork(root);
  // The branch gets its own second page; after that there are too few pages for
  // the root.
  EXPECT_EQ(state
                ->Forward({{branch, tail}, {root, many}}, LogitsOf::kLastTokens,
                          inline_)
                .status()
                .code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(state->length(branch), 21);
  const Rows want = Alone(model, Join(prompt, tail), 1);
  EXPECT_EQ(Forward(*state, {{branch, tail}}, inline_), want);
  EXPECT_EQ(Forward(*state, {{root, tail}}, inline_), want);
}

TEST_P(DecoderMemoryTest, ForksReadTheirCommonKeysOnce) {
  TestRng rng;
  const SmallDecoder shape = Shape("llama", 1024);
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  DecoderState state = State(model);
  auto prompt = RandomTokens(rng, 600, shape.vocab);
  const int32_t root = *state.NewSequence();
  for (const size_t begin : {0, 300}) {
    Forward(state, {{root, absl::MakeConstSpan(prompt).subspan(begin, 300)}},
            inline_);
  }
  EXPECT_EQ(state.shared_tokens(), 0);
  std::vector<std::vector<int32_t>> tails;
  std::vector<DecoderBatchItem> items;
  for (int i = 0; i < 3; ++i)
    tails.push_back(RandomTokens(rng, 1, shape.vocab));
  for (int i = 0; i < 3; ++i) {
    items.push_back(
        {i == 0 ? root : *state.Fork(root), tails[static_cast<size_t>(i)]});
  }
  const Rows rows = Forward(state, items, inline_);
  EXPECT_EQ(state.shared_tokens(), 2 * 512);  // two chunks of 256
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(rows[i], Alone(model, Join(prompt, tails[i]), 1)[0]);
  }
}

// Local layers keep only a window of a long text. How the text is divided into
// steps, and so when pages are given back, changes no bit.
TEST_P(DecoderMemoryTest, LocalLayersGiveBackWhatTheirWindowHasLeft) {
  TestRng rng;
  SmallDecoder shape = Shape("gemma2", 8192);
  shape.window = 70;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  const auto tokens = RandomTokens(rng, 4000, shape.vocab);
  std::vector<Rows> ends;
  for (const size_t step : {4000, 300, 1024, 77}) {
    for (const int64_t page_size : {16, 48}) {
      DecoderStateSpec spec;
      spec.max_step_tokens = static_cast<int64_t>(step);
      spec.page_size = page_size;
      spec.cache_dtype = DType::kF32;
      spec.cache_tokens = 4096;
      auto state = DecoderState::Create(model, spec);
      ASSERT_TRUE(state.ok()) << state.status();
      const int32_t sequence = *state->NewSequence();
      Rows rows;
      for (size_t done = 0; done < tokens.size(); done += step) {
        const auto piece = absl::MakeConstSpan(tokens).subspan(done, step);
        rows = Forward(*state, {{sequence, piece}}, inline_);
        ASSERT_FALSE(rows.empty());
      }
      ends.push_back({rows.back()});
      EXPECT_EQ(ends.back(), ends.front()) << step << ' ' << page_size;
      if (step == 77 && page_size == 16) {
        // One of the two layers keeps a span of 1024 tokens and its window.
        EXPECT_LT(state->cache_bytes(),
                  state->cache_bytes_per_token() / 2 * (4096 + 1400));
      }
    }
  }
}

// A branch of a text whose first pages have been given back has the same
// window.
TEST_P(DecoderMemoryTest, ForksOfALongTextKeepTheirWindow) {
  TestRng rng;
  SmallDecoder shape = Shape("gemma2", 4096);
  shape.window = 70;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  const auto prompt = RandomTokens(rng, 1500, shape.vocab);
  DecoderStateSpec spec;
  spec.max_sequences = 2;
  spec.cache_dtype = DType::kF32;
  spec.cache_tokens = 4096;
  auto state = DecoderState::Create(model, spec);
  ASSERT_TRUE(state.ok()) << state.status();
  const int32_t root = *state->NewSequence();
  for (size_t done = 0; done < prompt.size(); done += 500) {
    Forward(*state, {{root, absl::MakeConstSpan(prompt).subspan(done, 500)}},
            inline_);
  }
  const auto branch = state->Fork(root);
  ASSERT_TRUE(branch.ok()) << branch.status();
  const auto tail = RandomTokens(rng, 3, shape.vocab);
  const Rows want = Alone(model, Join(prompt, tail), 3);
  EXPECT_EQ(Forward(*state, {{*branch, tail}}, inline_), want);
  EXPECT_EQ(Forward(*state, {{root, tail}}, inline_), want);
}

// Layers that remember windows, and layers that remember states too.
constexpr const char* kRecurrent[] = {"lfm2", "granitehybrid", "qwen3next"};

// A slot that a sequence has given back still holds what that sequence
// remembered. The next sequence there must not see it, and neither must a
// branch of an empty sequence.
TEST_P(DecoderMemoryTest, ANewSequenceRemembersNothing) {
  TestRng rng;
  for (const char* architecture : kRecurrent) {
    SCOPED_TRACE(architecture);
    const SmallDecoder shape = Shape(architecture, 64);
    const Decoder model =
        Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
    DecoderState state = State(model);
    const auto before = RandomTokens(rng, 9, shape.vocab);
    const auto text = RandomTokens(rng, 2, shape.vocab);
    const Rows want = Alone(model, text, 2);
    std::vector<int32_t> old;
    for (int i = 0; i < 5; ++i) {
      old.push_back(*state.NewSequence());
      Forward(state, {{old.back(), before}}, inline_);
    }
    for (const int32_t sequence : old) {
      ASSERT_TRUE(state.EndSequence(sequence).ok());
    }
    const int32_t fresh = *state.NewSequence();
    const int32_t branch = *state.Fork(fresh);
    EXPECT_EQ(Forward(state, {{branch, text}, {fresh, text}}, inline_),
              Join(want, want));
  }
}

// A refused step writes nothing that a recurrent layer remembers.
TEST_P(DecoderMemoryTest, ARefusedStepKeepsWhatRecurrentLayersRemember) {
  TestRng rng;
  for (const char* architecture : kRecurrent) {
    SCOPED_TRACE(architecture);
    const SmallDecoder shape = Shape(architecture, 64);
    const Decoder model =
        Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
    DecoderStateSpec spec;
    spec.max_sequences = 2;
    spec.page_size = 8;
    spec.cache_tokens = 32;
    spec.cache_dtype = DType::kF32;
    auto state = DecoderState::Create(model, spec);
    ASSERT_TRUE(state.ok()) << state.status();
    const auto text = RandomTokens(rng, 10, shape.vocab);
    const auto more = RandomTokens(rng, 3, shape.vocab);
    const auto many = RandomTokens(rng, 40, shape.vocab);
    const int32_t a = *state->NewSequence(), b = *state->NewSequence();
    Forward(*state, {{a, text}}, inline_);
    EXPECT_EQ(
        state->Forward({{a, more}, {b, many}}, LogitsOf::kLastTokens, inline_)
            .status()
            .code(),
        absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(Forward(*state, {{a, more}}, inline_),
              Alone(model, Join(text, more), 3));
  }
}

TEST_P(DecoderMemoryTest, RecurrentLayersCountInTheLimit) {
  TestRng rng;
  SmallDecoder shape = Shape("lfm2", 64);
  shape.kinds = "rrra";
  shape.layers = 4;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  DecoderStateSpec spec;
  spec.max_step_tokens = 1;
  spec.cache_tokens = 32;
  const auto one = DecoderState::Create(model, spec);
  ASSERT_TRUE(one.ok()) << one.status();
  spec.max_sequences = 1000;
  const auto many = DecoderState::Create(model, spec);
  ASSERT_TRUE(many.ok()) << many.status();
  // Three layers of 2 rows of 32 channels in f32 for each sequence.
  EXPECT_EQ(many->cache_bytes() - one->cache_bytes(), 999 * 3 * 2 * 32 * 4);
  EXPECT_EQ(many->cache_bytes_per_token(), one->cache_bytes_per_token());
  spec.max_bytes = many->cache_bytes();
  const absl::Status refused = DecoderState::Create(model, spec).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(" bytes in 1 layers, the recurrent layers of "
                        "max_sequences=1000 take 768000, activations of "
                        "max_step_tokens=1 take "));
}

TEST_P(DecoderMemoryTest, RefusesToForkWhatIsNotThere) {
  TestRng rng;
  const Decoder model =
      Load(SmallDecoderFile(rng, Shape("llama", 64)), DecoderWeights::kF32);
  DecoderState state = State(model);
  EXPECT_EQ(state.Fork(0).status().message(),
            "decoder: sequence=0 is not a sequence");
  const int32_t sequence = *state.NewSequence();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(state.Fork(sequence).ok());
  EXPECT_EQ(state.Fork(sequence).status().code(),
            absl::StatusCode::kResourceExhausted);
}

QUERN_INSTANTIATE_ISA_TEST(DecoderMemoryTest);

}  // namespace
}  // namespace quern
