// Models with Mamba-2 layers or gated delta nets, whose long calls round
// differently than short ones: what must still not change a bit, and how close
// the rest is.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/models/testing/reference_decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/largest_difference.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

// The bound of decoder_oracle_test.cc.
constexpr double kF32Bound = 2e-4;

constexpr const char* kArchitectures[] = {"granitehybrid", "qwen3next"};

class RecurrentDecoderTest : public DecoderFixture {
 protected:
  static SmallDecoder Shape(const char* architecture) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.kinds = "rrar";
    shape.layers = 4;
    shape.attention_interval = 3;  // rrar again
    if (shape.architecture == "qwen3next") shape.shared_ffn = 32;
    return shape;
  }
  void ExpectCloseAndEqual(const SmallDecoder& shape);
  void ExpectForksContinue(const SmallDecoder& shape);

  // The logits of all tokens of a sequence that is cut into pieces of `step`
  // tokens.
  Rows InPieces(const Decoder& model, const std::vector<int32_t>& tokens,
                size_t step) {
    DecoderState state = State(model);
    const int32_t sequence = *state.NewSequence();
    Rows all;
    for (size_t done = 0; done < tokens.size(); done += step) {
      const auto piece = absl::MakeConstSpan(tokens).subspan(done, step);
      for (std::vector<float>& row :
           Forward(state, {{sequence, piece}}, inline_)) {
        all.push_back(std::move(row));
      }
    }
    return all;
  }
};

// Calls of fewer than 16 tokens go token by token, with the same bits. Longer
// ones go by chunks, which are as close to the oracle.
TEST_P(RecurrentDecoderTest, EveryDivisionIsCloseAndShortOnesAreEqual) {
  for (const char* architecture : kArchitectures) {
    SCOPED_TRACE(architecture);
    ExpectCloseAndEqual(Shape(architecture));
  }
}
void RecurrentDecoderTest::ExpectCloseAndEqual(const SmallDecoder& shape) {
  TestRng rng;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const GgufFile file = ParseOrDie(bytes);
  const auto config = DecoderConfig::Create(file);
  ASSERT_TRUE(config.ok()) << config.status();
  const Decoder model = Load(bytes, DecoderWeights::kF32);
  const auto tokens = RandomTokens(rng, 64, shape.vocab);
  const DoubleRows want = ReferenceDecoder(file, *config).Logits(tokens);
  const Rows one = InPieces(model, tokens, 1);
  for (const size_t step : {1, 2, 7, 15, 16, 33, 64}) {
    const Rows got = InPieces(model, tokens, step);
    EXPECT_LE(LargestDifferenceOf(got, want), kF32Bound) << step;
    if (step < 16) {
      EXPECT_EQ(got, one) << step;
    }
  }
}

// Prompts and single tokens in one step, on two threads.
TEST_P(RecurrentDecoderTest, BatchAndThreadsChangeNothing) {
  const auto two = HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(two.ok()) << two.status();
  for (const char* architecture : kArchitectures) {
    SCOPED_TRACE(architecture);
    ExpectBatchAndThreadsChangeNothing(Shape(architecture), /*page_size=*/3,
                                       /*page_size_alone=*/8, **two);
  }
}

// All calls are short, so that the bits must agree.
TEST_P(RecurrentDecoderTest, ForksContinueAsTheWhole) {
  for (const char* architecture : kArchitectures) {
    SCOPED_TRACE(architecture);
    ExpectForksContinue(Shape(architecture));
  }
}
void RecurrentDecoderTest::ExpectForksContinue(const SmallDecoder& shape) {
  TestRng rng;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  DecoderState state = State(model);
  const auto text = RandomTokens(rng, 14, shape.vocab);
  const auto all = absl::MakeConstSpan(text);
  const Rows want = InPieces(model, text, 14);
  const int32_t root = *state.NewSequence();
  Forward(state, {{root, all.first(9)}}, inline_);
  const auto branch = state.Fork(root);
  ASSERT_TRUE(branch.ok()) << branch.status();
  // The root goes another way, and its branch as the text does.
  const auto other = RandomTokens(rng, 4, shape.vocab);
  Forward(state, {{root, other}}, inline_);
  const Rows tail(want.begin() + 9, want.end());
  EXPECT_EQ(Forward(state, {{*branch, all.subspan(9)}}, inline_), tail);
}

// Heads and groups of every kind, one channel, and states of odd sizes.
TEST_P(RecurrentDecoderTest, EveryShapeOfState) {
  SmallDecoder shape = Shape("granitehybrid");
  shape.conv_width = 4;
  for (const auto& [inner, heads, groups, states] :
       {std::array<int64_t, 4>{1, 1, 1, 1},
        {6, 3, 1, 5},
        {6, 3, 3, 17},
        {64, 2, 1, 128},
        {40, 8, 4, 16}}) {
    SCOPED_TRACE(absl::StrCat(inner, " ", heads, " ", groups, " ", states));
    TestRng rng;
    shape.ssm_inner = inner;
    shape.ssm_heads = heads;
    shape.ssm_groups = groups;
    shape.ssm_state = states;
    shape.rope = heads == 3;
    shape.drops_ones = heads != 2;
    // Large enough to show that the stream's norms divide it by the square of
    // residual_scale, and the layers' own norms do not.
    shape.norm_eps = heads == 2 ? 0.3f : 1e-5f;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto config = DecoderConfig::Create(file);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto tokens = RandomTokens(rng, 41, shape.vocab);
    const DoubleRows want = ReferenceDecoder(file, *config).Logits(tokens);
    const Decoder model = Load(bytes, DecoderWeights::kF32);
    for (const size_t step : {3, 41}) {
      EXPECT_LE(LargestDifferenceOf(InPieces(model, tokens, step), want),
                kF32Bound)
          << step;
    }
    DecoderState state = State(model);
    // Three layers, five slots: the window and the state, in f32.
    const int64_t slot = 3 * (inner + 2 * groups * states) + inner * states;
    EXPECT_GE(state.cache_bytes(), 3 * 5 * 4 * slot);
    EXPECT_EQ(state.cache_bytes_per_token(), 2 * 4 * shape.kv_heads * 32);
  }
}

// A file with `value` in the place of the second decay of layer 0.
std::string FileWithDecay(Rng& rng, float value) {
  SmallDecoder shape;
  shape.architecture = "qwen3next";
  std::string bytes = SmallDecoderFile(rng, shape);
  std::vector<float> decays(4);
  {
    const GgufFile file = ParseOrDie(bytes);
    const auto tensor = file.FindTensor("blk.0.ssm_a");
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_TRUE(file.ReadRows(**tensor, 0, absl::MakeSpan(decays)).ok());
  }
  const std::string from = BytesOf(decays);
  decays[1] = value;
  const size_t at = bytes.find(from);
  EXPECT_NE(at, std::string::npos);
  bytes.replace(at, from.size(), BytesOf(decays));
  return bytes;
}

// exp(0 * softplus(x)) = 1: such a head forgets nothing.
TEST_P(RecurrentDecoderTest, ADecayOfZeroIsComputed) {
  TestRng rng;
  const std::string bytes = FileWithDecay(rng, 0);
  const GgufFile file = ParseOrDie(bytes);
  const auto config = DecoderConfig::Create(file);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto tokens = RandomTokens(rng, 41, config->vocab);
  const DoubleRows want = ReferenceDecoder(file, *config).Logits(tokens);
  const Decoder model = Load(bytes, DecoderWeights::kF32);
  for (const size_t step : {1, 3, 41}) {
    EXPECT_LE(LargestDifferenceOf(InPieces(model, tokens, step), want),
              kF32Bound)
        << step;
  }
}

QUERN_INSTANTIATE_ISA_TEST(RecurrentDecoderTest);

absl::Status StatusWithDecay(float value) {
  TestRng rng;
  InlineExecutor executor;
  return Decoder::Create(ParseOrDie(FileWithDecay(rng, value)), {}, executor)
      .status();
}

TEST(RecurrentDecoderRefusalTest, DecaysThatGrow) {
  EXPECT_EQ(StatusWithDecay(0), absl::OkStatus());
  EXPECT_EQ(StatusWithDecay(-30), absl::OkStatus());
  for (const float value : {0.5f, HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
    const absl::Status status = StatusWithDecay(value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(status.message(), absl::StrCat("decoder: blk.0.ssm_a[1]=", value,
                                             "; need a finite number <= 0"));
  }
}

}  // namespace
}  // namespace quern
