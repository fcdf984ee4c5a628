#include "quern/ops/speculation/recovered_tokens.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
constexpr DType kI64 = DType::kI64;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// Probabilities of `tokens` drafts of requests with these ends, before guard
// pages; rows are `gap` elements apart.
struct Case {
  Case(int64_t vocab, const Values& ends, const Values& drafts, int64_t gap = 0,
       DType dtype = kI64)
      : vocab(vocab),
        tokens(static_cast<int64_t>(drafts.size())),
        stride(vocab + gap),
        cu(kI64, ends),
        ids(kI64, drafts),
        out(dtype, Values(drafts.size(), -5)),
        target(Elements(tokens)),
        draft(Elements(tokens)),
        inv_q(Elements(static_cast<int64_t>(ends.size()))) {}

  int64_t Elements(int64_t rows) const { return (rows - 1) * stride + vocab; }
  MatrixView<float> Rows(GuardBuffer<float>& of, int64_t rows) const {
    return {of.data(), {rows, vocab}, {stride, 1}};
  }
  RecoveredTokensArgs Args(bool draft_probs) const {
    RecoveredTokensArgs args;
    args.output_token_ids = out.view();
    args.cu_num_draft_tokens = cu.view();
    args.draft_token_ids = ids.view();
    args.target_probs = Rows(target, tokens);
    if (draft_probs) args.draft_probs = Rows(draft, tokens);
    args.inv_q = Rows(inv_q, static_cast<int64_t>(cu.Read().size()));
    return args;
  }
  void Fill(Rng& rng) const {
    for (auto* buffer : {&target, &draft, &inv_q}) {
      for (int64_t i = 0; i < buffer->size(); ++i) {
        buffer->data()[i] = static_cast<float>(rng.Uniform(0, 1));
      }
    }
  }

  int64_t vocab, tokens, stride;
  Numbers cu, ids, out;
  mutable GuardBuffer<float> target, draft, inv_q;
};

// By the header's equations in double, with one rounding of each difference and
// of each product, which double holds or rounds innocuously.
Values Want(const Case& c, bool draft_probs) {
  Values want(static_cast<size_t>(c.tokens), -5);
  const Values ends = c.cu.Read(), ids = c.ids.Read();
  int64_t t = 0;
  for (size_t r = 0; r < ends.size(); ++r) {
    for (; t < ends[r]; ++t) {
      double most = -1;
      int64_t token = 0;
      for (int64_t v = 0; v < c.vocab; ++v) {
        const double p = c.target.data()[t * c.stride + v];
        const double q = c.draft.data()[t * c.stride + v];
        double w = v == ids[static_cast<size_t>(t)] ? 0.0 : p;
        if (draft_probs) w = p - q > 0 ? static_cast<float>(p - q) : 0.0f;
        const double inv =
            c.inv_q.data()[static_cast<int64_t>(r) * c.stride + v];
        const double product = static_cast<float>(w * inv);
        if (product > most) {
          most = product;
          token = v;
        }
      }
      want[static_cast<size_t>(t)] = token;
    }
  }
  return want;
}

class RecoveredTokensTest : public IsaTest {
 protected:
  Values Run(const Case& c, bool draft_probs) {
    RecoveredTokensSpec spec;
    spec.vocab = c.vocab;
    spec.draft_probs = draft_probs;
    const auto plan = RecoveredTokensPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    RunPlan<RecoveredTokensPlan>(spec, c.Args(draft_probs));
    return c.out.Read();
  }
};
QUERN_INSTANTIATE_ISA_TEST(RecoveredTokensTest);

TEST_P(RecoveredTokensTest, IsTheLargestProduct) {
  TestRng rng;
  for (const int64_t vocab : {1, 2, 7, 8, 15, 16, 17, 33, 101, 1009}) {
    for (const bool draft_probs : {false, true}) {
      for (const DType dtype : {DType::kI32, kI64}) {
        SCOPED_TRACE(vocab);
        const Case c(vocab, {0, 3, 3, 4},
                     {rng.Integer(0, vocab - 1), 0, vocab - 1, vocab / 2, 0},
                     /*gap=*/3, dtype);
        c.Fill(rng);
        EXPECT_EQ(Run(c, draft_probs), Want(c, draft_probs));
      }
    }
  }
}

// The largest product at each place in turn, and equal ones behind it.
TEST_P(RecoveredTokensTest, TheLowestOfEqualOnesWins) {
  for (const int64_t vocab : {5, 16, 37, 70}) {
    const Case c(vocab, {1}, {0});
    for (const bool draft_probs : {false, true}) {
      for (int64_t first = 0; first < vocab; ++first) {
        for (int64_t v = 0; v < vocab; ++v) {
          c.draft.data()[v] = 0.25f;
          c.target.data()[v] = v < first ? 0.375f : 0.75f;
          c.inv_q.data()[v] = 2.0f;
        }
        EXPECT_EQ(Run(c, draft_probs), Want(c, draft_probs)) << first;
        // Draft 0 has the weight 0 where its probability is not known.
        const int64_t want = first == 0 && !draft_probs ? 1 : first;
        EXPECT_EQ(c.out.Read()[0], want);
      }
    }
  }
}

TEST_P(RecoveredTokensTest, NanNeverWins) {
  constexpr int64_t kVocab = 37;
  TestRng rng;
  const Case c(kVocab, {1}, {20});
  for (int64_t bad = 0; bad < kVocab; ++bad) {
    for (auto* buffer : {&c.target, &c.draft, &c.inv_q}) {
      for (const bool draft_probs : {false, true}) {
        c.Fill(rng);
        buffer->data()[bad] = kNan;
        const Values got = Run(c, draft_probs);
        EXPECT_EQ(got, Want(c, draft_probs));
        // Without draft probabilities, those are not read.
        if (draft_probs || buffer != &c.draft) {
          EXPECT_NE(got[0], bad);
        }
      }
    }
  }
  // Nothing wins, and infinity wins over all.
  for (const bool draft_probs : {false, true}) {
    c.Fill(rng);
    for (int64_t v = 0; v < kVocab; ++v) c.inv_q.data()[v] = kNan;
    EXPECT_EQ(Run(c, draft_probs), (Values{0}));
    c.Fill(rng);
    c.target.data()[30] = 2.0f;
    c.inv_q.data()[30] = kInf;
    EXPECT_EQ(Run(c, draft_probs), (Values{30}));
  }
}

TEST_P(RecoveredTokensTest, NoWeightAtAllGivesTheFirst) {
  const Case c(19, {1}, {0});
  for (int64_t v = 0; v < 19; ++v) {
    c.target.data()[v] = c.draft.data()[v] = v == 0 ? 1.0f : 0.0f;
    c.inv_q.data()[v] = 3.0f;
  }
  EXPECT_EQ(Run(c, true), (Values{0}));
  EXPECT_EQ(Run(c, false), (Values{0}));
}

TEST_P(RecoveredTokensTest, ManyWorkersHaveTheSameTokens) {
  TestRng rng;
  const int64_t vocab = 9001;
  Values ends, drafts;
  for (int64_t r = 0; r < 9; ++r) ends.push_back(5 * r - (r % 3) + 2);
  for (int64_t t = 0; t < ends.back(); ++t) {
    drafts.push_back(rng.Integer(0, vocab - 1));
  }
  const Case c(vocab, ends, drafts);
  c.Fill(rng);
  const Values alone = Run(c, true);
  EXPECT_EQ(alone, Want(c, true));
  const Case again(vocab, ends, drafts);
  RecoveredTokensArgs args = c.Args(true);
  args.output_token_ids = again.out.view();
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok()) << pool.status();
  RecoveredTokensSpec spec;
  spec.vocab = vocab;
  RecoveredTokensPlan::Create(spec)->Execute(args, **pool);
  EXPECT_EQ(again.out.Read(), alone);
}

TEST(RecoveredTokensRefusalTest, SaysWhatLeavesATensor) {
  RecoveredTokensSpec spec;
  spec.vocab = 16;
  spec.draft_probs = false;
  const auto refuse = [&](const char* words, const Values& ends,
                          const Values& drafts) {
    const Case c(16, ends, drafts);
    ExpectRefusal(StatusOf<RecoveredTokensPlan>(spec, c.Args(false)), words);
  };
  refuse("draft_token_ids[1]=16; need 0 <= draft_token_ids[i] <= 15", {2},
         {0, 16});
  refuse("draft_token_ids[0]=-1; need", {2}, {-1, 1});
  refuse("cu_num_draft_tokens[0]=3; need 0 <=", {3}, {0, 1});
  refuse("cu_num_draft_tokens[1]=1; need 2 <=", {2, 1}, {0, 1});
  const Case c(16, {2}, {0, 99});
  // The last token belongs to no request; with probabilities no draft is read.
  const Case padded(16, {1}, {0, 99});
  EXPECT_EQ(StatusOf<RecoveredTokensPlan>(spec, padded.Args(false)),
            absl::OkStatus());
  spec.draft_probs = true;
  EXPECT_EQ(StatusOf<RecoveredTokensPlan>(spec, c.Args(true)),
            absl::OkStatus());
  ExpectRefusal(StatusOf<RecoveredTokensPlan>(spec, c.Args(false)),
                "draft_probs is []; need");
  spec.vocab = 17;
  ExpectRefusal(StatusOf<RecoveredTokensPlan>(spec, c.Args(true)),
                "target_probs is [2, 16]; need [2, 17]");
  spec.wider = true;
  ExpectRefusal(StatusOf<RecoveredTokensPlan>(spec, c.Args(true)),
                "target_probs has 16 columns; need at least vocab=17");
  for (const int64_t vocab : {int64_t{0}, int64_t{1} << 31}) {
    spec.vocab = vocab;
    ExpectRefusal(RecoveredTokensPlan::Create(spec).status(), "need 1 <=");
  }
}

TEST(RecoveredTokensRefusalTest, ProbabilitiesLieApartFromTheTokens) {
  const Case c(16, {2}, {0, 9});
  RecoveredTokensSpec spec;
  spec.vocab = 16;
  const RecoveredTokensArgs good = c.Args(true);
  const auto refuse = [&](const char* words,
                          AnyTensorView RecoveredTokensArgs::*field,
                          int64_t rows) {
    RecoveredTokensArgs args = good;
    args.*field = Alias(good.output_token_ids, DType::kF32, rows, 16);
    ExpectRefusal(StatusOf<RecoveredTokensPlan>(spec, args), words);
  };
  refuse("output_token_ids overlaps target_probs",
         &RecoveredTokensArgs::target_probs, 2);
  refuse("output_token_ids overlaps draft_probs",
         &RecoveredTokensArgs::draft_probs, 2);
  refuse("output_token_ids overlaps inv_q", &RecoveredTokensArgs::inv_q, 1);
}

}  // namespace
}  // namespace quern
