// What must not change a bit of the logits: batch, chunks, pages and threads.
// Also narrow caches, and what steps and states refuse.

#include "quern/models/decoder/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

class DecoderTest : public DecoderFixture {
 protected:
  // Runs four sequences divided in different ways: one sequence per step or all
  // in one step, whole or in pieces, in different pages, with different numbers
  // of threads.
  void ExpectDivisionChangesNothing(const SmallDecoder& shape,
                                    DecoderWeights weights) {
    TestRng rng;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const auto two = HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
    ASSERT_TRUE(two.ok()) << two.status();
    const Decoder model = Load(bytes, weights);
    std::vector<std::vector<int32_t>> prompts;
    std::vector<Rows> alone;
    for (const int64_t length : {1, 17, 40, 64}) {
      prompts.push_back(RandomTokens(rng, length, shape.vocab));
      DecoderState state = State(model);
      alone.push_back(
          Forward(state, {{*state.NewSequence(), prompts.back()}}, inline_));
    }

    // All sequences in one step, with another page size and two threads.
    DecoderState batched = State(model, /*page_size=*/3);
    std::vector<DecoderBatchItem> items;
    for (const auto& prompt : prompts) {
      items.push_back({*batched.NewSequence(), prompt});
    }
    const Rows together = Forward(batched, items, **two);
    size_t row = 0;
    for (size_t s = 0; s < prompts.size(); ++s) {
      for (const std::vector<float>& want : alone[s]) {
        ASSERT_EQ(together[row++], want) << "sequence " << s;
      }
    }

    // The sequences in random pieces, interleaved, while another sequence comes
    // and goes.
    DecoderState chunked = State(model, /*page_size=*/5);
    std::vector<int32_t> ids;
    for (size_t s = 0; s < prompts.size(); ++s) {
      ids.push_back(*chunked.NewSequence());
    }
    std::vector<size_t> done(prompts.size());
    for (bool more = true; more;) {
      more = false;
      const int32_t visitor = *chunked.NewSequence();
      const std::vector<int32_t> visit = RandomTokens(rng, 6, shape.vocab);
      std::vector<DecoderBatchItem> step = {{visitor, visit}};
      std::vector<size_t> who;
      for (size_t s = 0; s < prompts.size(); ++s) {
        const size_t left = prompts[s].size() - done[s];
        if (left == 0) continue;
        const auto now = std::min(left, static_cast<size_t>(rng.Integer(1, 9)));
        step.push_back(
            {ids[s], absl::MakeConstSpan(prompts[s]).subspan(done[s], now)});
        who.push_back(s);
        more = true;
      }
      const Rows rows = Forward(chunked, step, inline_);
      size_t at = visit.size();
      for (size_t i = 0; i < who.size(); ++i) {
        for (size_t t = 0; t < step[i + 1].tokens.size(); ++t) {
          ASSERT_EQ(rows[at++], alone[who[i]][done[who[i]]++])
              << "sequence " << who[i];
        }
      }
      ASSERT_TRUE(chunked.EndSequence(visitor).ok());
    }
  }
};

TEST_P(DecoderTest, KeepsTheTypeOfTheFile) {
  TestRng rng;
  SmallDecoder shape;
  const auto load = [&] {
    return Load(SmallDecoderFile(rng, shape), DecoderWeights::kAsInFile);
  };
  const int64_t f32_bytes = load().weight_bytes();
  for (const auto& [type, name, bytes_of_element] :
       {std::tuple{GgufTensorType::kF32, "f32", 4.0},
        std::tuple{GgufTensorType::kF16, "f16", 2.0},
        std::tuple{GgufTensorType::kBF16, "bf16", 2.0},
        // 0.625 in the blocks; rows of the embedding have 2.
        std::tuple{GgufTensorType::kQ4_0, "q4_0", 0.66},
        // 0.6875 in the blocks; a record has scales for 256 k, and k are fewer.
        std::tuple{GgufTensorType::kQ5_0, "q5_0", 0.77},
        std::tuple{GgufTensorType::kQ8_0, "q8_0", 1.125}}) {
    shape.type = type;
    const Decoder model = load();
    EXPECT_EQ(model.weights(), name);
    // The tolerance covers vectors, which stay f32 and are few.
    EXPECT_LE(static_cast<double>(model.weight_bytes()),
              static_cast<double>(f32_bytes) * 1.1 * bytes_of_element / 4)
        << name;
  }
  shape.ffn_type = GgufTensorType::kF16;
  EXPECT_EQ(load().weights(), "q8_0 and f16");
  shape.k_type = GgufTensorType::kBF16;
  EXPECT_EQ(load().weights(), "q8_0 and bf16 and f16");
}

// The size of the pieces in which large tensors are read must not change a
// weight.
TEST_P(DecoderTest, ReadsTensorsInPiecesOfAnySize) {
  const std::vector<int32_t> tokens = {1, 36, 7, 20};
  for (const GgufTensorType type :
       {GgufTensorType::kF32, GgufTensorType::kQ8_0}) {
    TestRng rng;
    SmallDecoder shape;
    shape.type = type;
    const std::string bytes = SmallDecoderFile(rng, shape);
    std::vector<Rows> logits;
    for (const int64_t elements : {int64_t{1} << 30, int64_t{1}, int64_t{70}}) {
      DecoderOptions options;
      options.progress_elements = elements;
      int64_t calls = 0, last = 0;
      options.progress = [&](int64_t done, int64_t total) {
        EXPECT_GT(done, last);
        EXPECT_LE(done, total);
        last = done;
        ++calls;
      };
      auto model = Decoder::Create(ParseOrDie(bytes), options, inline_);
      ASSERT_TRUE(model.ok()) << model.status();
      EXPECT_RAN_ON(*model);
      EXPECT_GT(calls, elements == 1 ? 1000 : 0);
      DecoderState state = State(*model);
      logits.push_back(
          Forward(state, {{*state.NewSequence(), tokens}}, inline_));
    }
    EXPECT_EQ(logits[1], logits[0]);
    EXPECT_EQ(logits[2], logits[0]);
  }
}

// For each architecture and type, bit for bit.
TEST_P(DecoderTest, BatchChunksPagesAndThreadsChangeNothing) {
  for (const std::string& architecture : ExactArchitectures()) {
    for (const DecoderWeights weights :
         {DecoderWeights::kF32, DecoderWeights::kBF16, DecoderWeights::kInt8}) {
      SCOPED_TRACE(architecture);
      SmallDecoder shape;
      shape.architecture = architecture;
      ExpectDivisionChangesNothing(shape, weights);
    }
  }
}

TEST_P(DecoderTest, DivisionChangesNothingInTheFormsOfTheFile) {
  for (const std::string& architecture : ExactArchitectures()) {
    SmallDecoder shape;
    shape.architecture = architecture;
    shape.type = GgufTensorType::kQ8_0;
    for (const GgufTensorType ffn :
         {GgufTensorType::kQ8_0, GgufTensorType::kF16}) {
      SCOPED_TRACE(absl::StrCat(architecture, " ", GgufTensorTypeName(ffn)));
      shape.ffn_type = ffn;
      ExpectDivisionChangesNothing(shape, DecoderWeights::kAsInFile);
    }
  }
}

TEST_P(DecoderTest, LastTokensAreTheLastOfAll) {
  TestRng rng;
  const SmallDecoder shape;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kAsInFile);
  const std::vector<int32_t> a = RandomTokens(rng, 5, shape.vocab);
  const std::vector<int32_t> b = RandomTokens(rng, 9, shape.vocab);
  DecoderState all = State(model), last = State(model);
  const Rows rows =
      Forward(all, {{*all.NewSequence(), a}, {*all.NewSequence(), b}}, inline_);
  const auto two =
      last.Forward({{*last.NewSequence(), a}, {*last.NewSequence(), b}},
                   LogitsOf::kLastTokens, inline_);
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(Copy(*two), Rows({rows[4], rows[13]}));
  EXPECT_EQ(last.length(0), 5);
  EXPECT_EQ(last.length(1), 9);
  EXPECT_EQ(last.Forward({}, LogitsOf::kAllTokens, inline_)->extent(0), 0);
}

// Root-mean-square error of logits around 1, with plain pages and with paired
// ones. The bounds are about twice the largest measured error. With scales of
// 1, int8 would be off by 0.33 to 0.67; e4m3 by 0.03 to 0.05, where its own
// scales hardly help.
TEST_P(DecoderTest, NarrowCachesStayClose) {
  TestRng rng;
  const SmallDecoder shape;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kF32);
  const std::vector<int32_t> tokens = RandomTokens(rng, 30, shape.vocab);
  const auto rows = [&](DType cache, int64_t page_size) {
    DecoderState state = State(model, page_size, cache);
    return Forward(state, {{*state.NewSequence(), tokens}}, inline_);
  };
  const Rows want = rows(DType::kF32, 8);
  constexpr struct {
    DType cache;
    double bound;
  } kCases[] = {{DType::kF16, 0.001},
                {DType::kBF16, 0.008},
                {DType::kI8, 0.02},
                {DType::kF8E4M3, 0.1},
                {DType::kF8E5M2, 0.2}};
  for (const auto& [cache, bound] : kCases) {
    for (const int64_t page_size : {8, 16}) {
      const Rows got = rows(cache, page_size);
      double squares = 0, count = 0;
      for (size_t t = 0; t < want.size(); ++t) {
        for (size_t i = 0; i < want[t].size(); ++i) {
          const double d =
              static_cast<double>(got[t][i]) - static_cast<double>(want[t][i]);
          squares += d * d;
          ++count;
        }
      }
      const double rms = std::sqrt(squares / count);
      EXPECT_TRUE(rms <= bound)  // false for NaN
          << rms << " > " << bound << ": " << DTypeName(cache)
          << " in pages of " << page_size;
    }
  }
}

// With bf16 rows, queries are rounded for caches of bf16 and of one byte. How a
// text is divided into steps, and which sequences share them, must still not
// matter.
TEST_P(DecoderTest, NarrowCachesDoNotSeeHowTheTextIsCut) {
  TestRng rng;
  const SmallDecoder shape;
  const Decoder model =
      Load(SmallDecoderFile(rng, shape), DecoderWeights::kBF16);
  const std::vector<int32_t> tokens = RandomTokens(rng, 30, shape.vocab);
  const auto all = absl::MakeConstSpan(tokens);
  for (const DType cache : {DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    DecoderState whole = State(model, 16, cache), cut = State(model, 16, cache);
    const Rows want = Forward(whole, {{*whole.NewSequence(), tokens}}, inline_);
    const int32_t a = *cut.NewSequence(), b = *cut.NewSequence();
    Rows got = Forward(cut, {{b, all.first(5)}, {a, all.first(19)}}, inline_);
    got.erase(got.begin(), got.begin() + 5);
    for (const auto& rest : {all.subspan(19, 1), all.subspan(20)}) {
      for (std::vector<float>& row : Forward(cut, {{a, rest}}, inline_)) {
        got.push_back(std::move(row));
      }
    }
    EXPECT_EQ(got, want) << DTypeName(cache);
  }
}

QUERN_INSTANTIATE_ISA_TEST(DecoderTest);

}  // namespace
}  // namespace quern
