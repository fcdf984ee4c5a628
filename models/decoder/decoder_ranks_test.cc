// A model over ranks: every rank has the same logits, close to those of one
// rank, and holds and reads only its part.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/models/testing/reference_decoder_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/largest_difference.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

// State of one rank after it has run a prompt in two steps.
struct RankResult {
  Rows logits;
  int64_t weight_bytes = 0, read_bytes = 0, bytes_per_token = 0;
  int64_t cache_bytes = 0;
  int rank = -1;
};

class DecoderRanksTest : public DecoderFixture {
 protected:
  RankResult RunRank(const std::string& bytes, DecoderWeights weights,
                     const std::vector<int32_t>& tokens,
                     Communicator* communicator,
                     const std::string& packed_path = "",
                     DecoderActivations rows = DecoderActivations::kExact) {
    InlineExecutor executor;
    RankResult result;
    DecoderOptions options;
    options.weights = weights;
    options.activations = rows;
    options.communicator = communicator;
    options.packed_path = packed_path;
    options.progress = [&](int64_t, int64_t total) {
      result.read_bytes = total;
    };
    auto model = Decoder::Create(ParseOrDie(bytes), options, executor);
    EXPECT_TRUE(model.ok()) << model.status();
    if (!model.ok()) return result;
    if (communicator == nullptr) {
      EXPECT_RAN_ON(*model);
    }
    DecoderStateSpec spec;
    spec.cache_dtype = DType::kF32;
    spec.page_size = 8;
    auto state = DecoderState::Create(*model, spec);
    EXPECT_TRUE(state.ok()) << state.status();
    if (!state.ok()) return result;
    const int32_t sequence = *state->NewSequence();
    const auto cut = tokens.begin() + static_cast<ptrdiff_t>(tokens.size() / 2);
    for (const std::vector<int32_t>& step :
         {std::vector<int32_t>(tokens.begin(), cut),
          std::vector<int32_t>(cut, tokens.end())}) {
      const auto logits =
          state->Forward({{sequence, step}}, LogitsOf::kAllTokens, executor);
      EXPECT_TRUE(logits.ok()) << logits.status();
      for (std::vector<float>& row : Copy(*logits)) {
        result.logits.push_back(std::move(row));
      }
    }
    result.weight_bytes = model->weight_bytes();
    result.bytes_per_token = model->rank_bytes_per_token();
    result.cache_bytes = state->cache_bytes();
    result.rank = model->rank();
    EXPECT_EQ(model->ranks(),
              communicator == nullptr ? 1 : communicator->size());
    return result;
  }

  // `bound` limits the distance from the oracle, and thereby from one rank.
  void ExpectRanksAgree(const SmallDecoder& shape, DecoderWeights weights,
                        int ranks, double bound,
                        DecoderActivations rows = DecoderActivations::kExact) {
    SCOPED_TRACE(absl::StrCat(shape.architecture, " ",
                              GgufTensorTypeName(shape.type), ", ", ranks,
                              " ranks"));
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto config = DecoderConfig::Create(file);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto tokens = RandomTokens(rng, 33, shape.vocab);
    std::vector<RankResult> results(static_cast<size_t>(ranks));
    RunRanks(ranks, [&](ThreadCommunicator& c) {
      results[static_cast<size_t>(c.rank())] =
          RunRank(bytes, weights, tokens, &c, "", rows);
    });
    EXPECT_LE(
        LargestDifferenceOf(results[0].logits,
                            ReferenceDecoder(file, *config).Logits(tokens)),
        bound);
    const RankResult one = RunRank(bytes, weights, tokens, nullptr, "", rows);
    EXPECT_EQ(one.bytes_per_token, 0);
    for (int r = 0; r < ranks; ++r) {
      const RankResult& result = results[static_cast<size_t>(r)];
      EXPECT_EQ(result.rank, r);
      EXPECT_EQ(result.logits, results[0].logits) << r;
      EXPECT_EQ(result.cache_bytes, results[0].cache_bytes);
    }
    if (ranks == 1) {
      EXPECT_EQ(results[0].logits, one.logits);
      return;
    }
    // Per token: two f32 sums in each layer and the embedding's, and 1 / ranks
    // of the logits.
    const int64_t vocab_width = (shape.vocab + ranks - 1) / ranks;
    EXPECT_EQ(results[0].bytes_per_token, 4 * (5 * shape.hidden + vocab_width));
    // The matrices are divided, and they are nearly all of the weights.
    EXPECT_LT(results[0].weight_bytes, one.weight_bytes * 2 / 3);
    EXPECT_LT(results[0].read_bytes, one.read_bytes * 2 / 3);
  }
};

// The bounds of decoder_oracle_test.cc.
constexpr double kF32Bound = 2e-4;
constexpr double kBF16Bound = 0.125;
constexpr double kInt8Bound = 0.4;

TEST_P(DecoderRanksTest, EveryArchitecture) {
  SmallDecoder shape;
  shape.vocab = 101;
  for (const std::string& architecture : RankArchitectures()) {
    shape.architecture = architecture;
    // With six ranks, three ranks share a key/value head.
    for (const int ranks : {1, 2, 6}) {
      ExpectRanksAgree(shape, DecoderWeights::kF32, ranks, kF32Bound);
    }
  }
}

TEST_P(DecoderRanksTest, EveryTypeOfTheFile) {
  SmallDecoder shape;
  shape.vocab = 128;
  for (const GgufTensorType type :
       {GgufTensorType::kF16, GgufTensorType::kBF16, GgufTensorType::kQ8_0,
        GgufTensorType::kQ4_0, GgufTensorType::kQ5_1}) {
    shape.type = type;
    // Matrices in blocks are divided between blocks: 64 and 32 of 96 columns.
    const bool f32 =
        type == GgufTensorType::kF16 || type == GgufTensorType::kQ5_1;
    ExpectRanksAgree(shape, DecoderWeights::kAsInFile, 2,
                     f32 ? kF32Bound : kBF16Bound);
    ExpectRanksAgree(shape, DecoderWeights::kF32, 2, kF32Bound);
    ExpectRanksAgree(shape, DecoderWeights::kAsInFile, 2, kInt8Bound,
                     DecoderActivations::kInt8);
  }
  // Experts are divided likewise.
  shape.architecture = "qwen3moe";
  shape.expert_ffn = 96;
  for (const GgufTensorType type :
       {GgufTensorType::kBF16, GgufTensorType::kQ8_0}) {
    shape.type = type;
    ExpectRanksAgree(shape, DecoderWeights::kAsInFile, 2, kBF16Bound);
    ExpectRanksAgree(shape, DecoderWeights::kF32, 2, kF32Bound);
  }
}

// Each rank packs to its own file and does not use another's.
TEST_P(DecoderRanksTest, EachRankHasItsPackedFile) {
  TestRng rng;
  SmallDecoder shape;
  shape.vocab = 38;  // so that the ranks' parts have the same shape
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto tokens = RandomTokens(rng, 9, shape.vocab);
  const std::string path =
      absl::StrCat(::testing::TempDir(), "/ranks_", isa(), ".packed");
  const auto run = [&](const std::string& to) {
    std::vector<RankResult> results(2);
    RunRanks(2, [&](ThreadCommunicator& c) {
      results[static_cast<size_t>(c.rank())] =
          RunRank(bytes, DecoderWeights::kF32, tokens, &c, to);
    });
    EXPECT_EQ(results[0].logits, results[1].logits);
    return results[0].logits;
  };
  const Rows from_memory = run("");
  EXPECT_EQ(run(path), from_memory);
  for (const char* rank : {".0-of-2", ".1-of-2"}) {
    EXPECT_TRUE(std::ifstream(path + rank).good()) << rank;
  }
  EXPECT_FALSE(std::ifstream(path).good());
  EXPECT_EQ(run(path), from_memory);
  // A rank refuses the packed file of another rank.
  ASSERT_EQ(std::rename((path + ".0-of-2").c_str(), (path + ".1-of-2").c_str()),
            0);
  RunRanks(2, [&](ThreadCommunicator& c) {
    if (c.rank() == 0) return;
    InlineExecutor executor;
    DecoderOptions options;
    options.weights = DecoderWeights::kF32;
    options.communicator = &c;
    options.packed_path = path;
    const absl::Status status =
        Decoder::Create(ParseOrDie(bytes), options, executor).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr(path + ".1-of-2"));
  });
  RunRank(bytes, DecoderWeights::kF32, tokens, nullptr);
}

// One rank has a smaller cache and refuses the step. The others must fail too,
// rather than wait for it, and all must be able to continue.
TEST_P(DecoderRanksTest, AStepThatOneRankCannotDoFailsOnAll) {
  TestRng rng;
  const SmallDecoder shape;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto tokens = RandomTokens(rng, 40, shape.vocab);
  Load(bytes, DecoderWeights::kF32);
  RunRanks(2, [&](ThreadCommunicator& c) {
    InlineExecutor executor;
    DecoderOptions options;
    options.communicator = &c;
    const auto model = Decoder::Create(ParseOrDie(bytes), options, executor);
    ASSERT_TRUE(model.ok()) << model.status();
    DecoderStateSpec spec;
    spec.page_size = 16;
    spec.cache_tokens = c.rank() == 0 ? 64 : 32;
    auto state = DecoderState::Create(*model, spec);
    ASSERT_TRUE(state.ok()) << state.status();
    const int32_t sequence = *state->NewSequence();
    const absl::Status refused =
        state->Forward({{sequence, tokens}}, LogitsOf::kLastTokens, executor)
            .status();
    EXPECT_EQ(refused.code(), c.rank() == 0
                                  ? absl::StatusCode::kUnavailable
                                  : absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(state->length(sequence), 0);
    EXPECT_TRUE(
        state->Forward({{sequence, {1, 2, 3}}}, LogitsOf::kLastTokens, executor)
            .ok());
  });
}

TEST_P(DecoderRanksTest, RefusesWhatCannotBeDivided) {
  TestRng rng;
  Load(SmallDecoderFile(rng, SmallDecoder()), DecoderWeights::kF32);
  const auto refusal = [&](const SmallDecoder& shape, int ranks,
                           absl::StatusCode code =
                               absl::StatusCode::kInvalidArgument) {
    const std::string bytes = SmallDecoderFile(rng, shape);
    std::vector<std::string> messages(static_cast<size_t>(ranks));
    RunRanks(ranks, [&](ThreadCommunicator& c) {
      DecoderOptions options;
      options.communicator = &c;
      InlineExecutor executor;
      const auto model = Decoder::Create(ParseOrDie(bytes), options, executor);
      EXPECT_EQ(model.status().code(), code);
      messages[static_cast<size_t>(c.rank())] =
          std::string(model.status().message());
    });
    // Every rank must refuse with the same message, so that none waits for
    // another.
    for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
    return messages[0];
  };
  SmallDecoder shape;
  EXPECT_EQ(
      refusal(shape, 4),
      "decoder: the query heads=6 cannot be divided over 4 ranks in parts "
      "of 1");
  EXPECT_EQ(refusal(shape, 3),
            "decoder: the key/value heads=2 cannot be divided over 3 ranks in "
            "parts of 1");
  shape.type = GgufTensorType::kQ8_0;
  EXPECT_EQ(refusal(shape, 6),
            "decoder: feed_forward_length=96 cannot be divided over 6 ranks in "
            "parts of 32");
  shape.type = GgufTensorType::kQ4_K;
  shape.ffn = shape.hidden = 256;
  shape.q_heads = 16;
  EXPECT_EQ(refusal(shape, 2),
            "decoder: feed_forward_length=256 cannot be divided over 2 ranks "
            "in parts of 256");
  shape = {};
  shape.head_dim = 20;
  shape.rope_dim = 20;
  shape.type = GgufTensorType::kF32;
  shape.ffn_type = GgufTensorType::kQ8_0;
  EXPECT_THAT(refusal(shape, 2), HasSubstr("the query heads=6"));
  shape = {};
  shape.architecture = "lfm2";
  EXPECT_EQ(refusal(shape, 2, absl::StatusCode::kUnimplemented),
            "decoder: ranks=2; need 1, because lfm2 has recurrent layers, "
            "which are not divided");
  shape.architecture = "qwen3next";
  EXPECT_EQ(refusal(shape, 2, absl::StatusCode::kUnimplemented),
            "decoder: ranks=2; need 1, because qwen3next has recurrent layers, "
            "which are not divided");
  shape.architecture = "olmo2";
  EXPECT_EQ(refusal(shape, 2, absl::StatusCode::kUnimplemented),
            "decoder: ranks=2; need 1, because olmo2 normalises all heads of q "
            "together, and of k");
  shape = {};
  shape.vocab = 5;
  EXPECT_EQ(refusal(shape, 6),
            "decoder: the vocabulary=5 cannot be divided over 6 ranks in parts "
            "of 1");
}

QUERN_INSTANTIATE_ISA_TEST(DecoderRanksTest);

}  // namespace
}  // namespace quern
