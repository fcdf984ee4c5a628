#include "quern/ops/sampling/token_logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kNoToken = TokenLogprobsPlan::kNoToken;

// Everything about one row in double, with a full sort.
struct Reference {
  explicit Reference(const float* row, int64_t vocab) {
    for (int64_t i = 0; i < vocab; ++i) {
      if (row[i] > -kInf) order.push_back(static_cast<int32_t>(i));
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return row[a] > row[b]; });
    logprobs.assign(static_cast<size_t>(vocab),
                    -std::numeric_limits<double>::infinity());
    ranks.assign(static_cast<size_t>(vocab),
                 static_cast<int32_t>(order.size()) + 1);
    if (order.empty()) return;
    const double most = static_cast<double>(row[order[0]]);
    const auto below = [&](int32_t i) {
      const auto l = static_cast<double>(row[i]);
      return l == most ? 0.0 : l - most;
    };
    double sum = 0.0;
    for (const int32_t i : order) sum += std::exp(below(i));
    for (size_t r = 0; r < order.size(); ++r) {
      const auto id = static_cast<size_t>(order[r]);
      logprobs[id] = below(order[r]) - std::log(sum);
      ranks[id] = static_cast<int32_t>(r) + 1;
    }
  }
  std::vector<int32_t> order;
  std::vector<double> logprobs;
  std::vector<int32_t> ranks;
};

// Results of `rows` rows, between guard pages.
struct Results {
  Results(int64_t rows, int64_t top_n, int64_t given)
      : top_ids(rows, top_n, top_n + 1),
        top_logprobs(rows, top_n, top_n + 2),
        logprobs(rows, given, given),
        ranks(rows, given, given + 3) {}
  TokenLogprobsArgs Args(MatrixView<const float> logits,
                         MatrixView<const int32_t> ids) {
    return {logits,          ids,         top_ids.view(), top_logprobs.view(),
            logprobs.view(), ranks.view()};
  }
  StridedMatrix<int32_t> top_ids;
  StridedMatrix<float> top_logprobs, logprobs;
  StridedMatrix<int32_t> ranks;
};

class TokenLogprobsTest : public IsaTest {
 protected:
  void Compare(const std::vector<float>& values, int64_t vocab, int64_t top_n,
               const std::vector<int32_t>& given, int64_t padding = 0) {
    const int64_t rows = static_cast<int64_t>(values.size()) / vocab;
    const auto per_row = static_cast<int64_t>(given.size()) / rows;
    const auto make = [&] {
      return *TokenLogprobsPlan::Create({vocab, top_n, per_row});
    };
    const TokenLogprobsPlan plan = make();
    EXPECT_RAN_ON(plan);
    const StridedMatrix<float> logits(values, rows, vocab, vocab + padding);
    const StridedMatrix<int32_t> ids(given, rows, per_row, per_row + padding);
    Results got(rows, top_n, per_row);
    Execute(plan, got.Args(logits.view(), ids.view()));
    const double slack = (std::log(static_cast<double>(vocab)) + 7) * 0x1p-24;
    const auto expect = [&](float is, double want) {
      // What f32 cannot hold is infinite.
      if (want < -static_cast<double>(std::numeric_limits<float>::max())) {
        ASSERT_EQ(is, -kInf);
      } else {
        ASSERT_LE(std::abs(static_cast<double>(is) - want),
                  slack + 0x1p-24 * std::abs(want))
            << is << " is not " << want;
      }
    };
    for (int64_t r = 0; r < rows; ++r) {
      SCOPED_TRACE(r);
      const Reference want(values.data() + r * vocab, vocab);
      for (int64_t i = 0; i < top_n; ++i) {
        const bool there = i < static_cast<int64_t>(want.order.size());
        const int32_t id = there ? want.order[static_cast<size_t>(i)] : -1;
        ASSERT_EQ(got.top_ids.view().Row(r)[i], id) << "place " << i;
        expect(got.top_logprobs.view().Row(r)[i],
               there ? want.logprobs[static_cast<size_t>(id)]
                     : -std::numeric_limits<double>::infinity());
      }
      for (int64_t i = 0; i < per_row; ++i) {
        const int32_t id = given[static_cast<size_t>(r * per_row + i)];
        const auto at = static_cast<size_t>(id);
        ASSERT_EQ(got.ranks.view().Row(r)[i],
                  id == kNoToken ? 0 : want.ranks[at])
            << "id " << id;
        expect(got.logprobs.view().Row(r)[i],
               id == kNoToken ? -std::numeric_limits<double>::infinity()
                              : want.logprobs[at]);
      }
    }
    // The bits of the best instruction set, whatever the workers.
    const TokenLogprobsPlan best = OnTheBestIsa(make);
    Results same(rows, top_n, per_row);
    Execute(best, same.Args(logits.view(), ids.view()), 3);
    EXPECT_EQ(got.top_ids.ToDense(), same.top_ids.ToDense());
    EXPECT_EQ(got.top_logprobs.ToDense(), same.top_logprobs.ToDense());
    EXPECT_EQ(got.logprobs.ToDense(), same.logprobs.ToDense());
    EXPECT_EQ(got.ranks.ToDense(), same.ranks.ToDense());
  }

  static void Execute(const TokenLogprobsPlan& plan,
                      const TokenLogprobsArgs& args, int workers = 1) {
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    const int64_t bytes = *plan.WorkspaceBytes(1, workers);
    GuardBuffer<uint8_t> memory(bytes);
    const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
    if (workers > 1) {
      ManyWorkers executor(workers);
      plan.Execute(args, workspace, executor);
      return;
    }
    InlineExecutor executor;
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
  }
};
QUERN_INSTANTIATE_ISA_TEST(TokenLogprobsTest);

TEST_P(TokenLogprobsTest, AreThoseOfEqualLogits) {
  Compare({7, 7, 7, 7}, 4, 3, {0, 3, 2});
  Compare({5}, 1, 1, {0});
  Compare(std::vector<float>(600, -3.0f), 600, 7, {0, 255, 256, 599, -1});
}

TEST_P(TokenLogprobsTest, AgreeWithTheReference) {
  TestRng rng;
  for (const int64_t vocab : {1, 2, 17, 255, 256, 257, 1031, 5003}) {
    for (int i = 0; i < 6; ++i) {
      const int64_t rows = rng.Integer(1, 3);
      auto values = i % 2 == 0 ? UniformReals(rng, rows * vocab, -20, 20)
                               : SmallIntegers<float>(rng, rows * vocab, -3, 3);
      if (i == 4) {
        values[0] = kNaN;
        values.back() = -kInf;
        values[values.size() / 2] = -kInf;
      }
      std::vector<int32_t> ids;
      for (int64_t j = 0; j < 4 * rows; ++j) {
        ids.push_back(static_cast<int32_t>(rng.Integer(-1, vocab - 1)));
      }
      if (i == 4) {
        ids[0] = 0;
        ids.back() = static_cast<int32_t>(vocab - 1);
      }
      const int64_t top_n =
          std::min<int64_t>(vocab, i == 0 ? 1 : rng.Integer(1, 40));
      Compare(values, vocab, i == 5 ? vocab : top_n, ids, i % 3);
    }
  }
}

TEST_P(TokenLogprobsTest, HaveStatedResultsWithoutNumbers) {
  Compare({kNaN, -kInf, kNaN}, 3, 2, {0, 1, -1});
  Compare({kNaN, 1, -kInf, 1}, 4, 3, {0, 1, 2, 3});
  Compare({kInf, 1, kInf, -kInf}, 4, 4, {0, 1, 2, 3});
  Compare({3e38f, -3e38f}, 2, 2, {0, 1});
}

TEST_P(TokenLogprobsTest, DoNothingWithoutRows) {
  const auto plan = TokenLogprobsPlan::Create({3, 1, 1});
  EXPECT_RAN_ON(*plan);
  TokenLogprobsArgs args;
  args.logits = DenseMatrix<const float>(nullptr, 0, 3);
  args.ids = DenseMatrix<const int32_t>(nullptr, 0, 1);
  args.top_ids = DenseMatrix<int32_t>(nullptr, 0, 1);
  args.top_logprobs = DenseMatrix<float>(nullptr, 0, 1);
  args.logprobs = DenseMatrix<float>(nullptr, 0, 1);
  args.ranks = DenseMatrix<int32_t>(nullptr, 0, 1);
  Execute(*plan, args);
}

TEST(TokenLogprobsPlanTest, Refuses) {
  const auto create = [](int64_t vocab, int64_t top_n, int64_t given) {
    return TokenLogprobsPlan::Create({vocab, top_n, given}).status();
  };
  ExpectRefusal(create(0, 1, 1), "token_logprobs: vocab=0; need 1 <= vocab");
  ExpectRefusal(create(int64_t{1} << 31, 1, 1), "vocab=2147483648");
  ExpectRefusal(create(5, 0, 1), "top_n=0; need 1 <= top_n <= 5");
  ExpectRefusal(create(5, 6, 1), "top_n=6; need 1 <= top_n <= 5");
  ExpectRefusal(create(5, 1, 0), "given=0; need given >= 1");
  const auto plan = TokenLogprobsPlan::Create({5, 2, 1});
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_rows=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  constexpr int kMost = std::numeric_limits<int32_t>::max();
  ExpectRefusal(TokenLogprobsPlan::Create({kMost, 1, 1})
                    ->WorkspaceBytes(1, kMost)
                    .status(),
                absl::StatusCode::kResourceExhausted,
                "their workspace has 2^63 bytes or more");
  std::vector<float> logits(10), top(4), of_given(2);
  std::vector<int32_t> ids = {0, 4}, top_ids(4), ranks(2);
  TokenLogprobsArgs good;
  good.logits = DenseMatrix<const float>(logits.data(), 2, 5);
  good.ids = DenseMatrix<const int32_t>(ids.data(), 2, 1);
  good.top_ids = DenseMatrix(top_ids.data(), 2, 2);
  good.top_logprobs = DenseMatrix(top.data(), 2, 2);
  good.logprobs = DenseMatrix(of_given.data(), 2, 1);
  good.ranks = DenseMatrix(ranks.data(), 2, 1);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  using Change = std::function<void(TokenLogprobsArgs&)>;
  const struct {
    const char* words;
    Change change;
  } cases[] = {
      {"logits",
       [&](auto& a) {
         a.logits = DenseMatrix<const float>(logits.data(), 2, 4);
       }},
      {"logits",
       [](auto& a) { a.logits = DenseMatrix<const float>(nullptr, 2, 5); }},
      {"ids",
       [&](auto& a) { a.ids = DenseMatrix<const int32_t>(ids.data(), 1, 1); }},
      {"top_ids",
       [&](auto& a) { a.top_ids = DenseMatrix(top_ids.data(), 2, 1); }},
      {"top_logprobs",
       [&](auto& a) { a.top_logprobs = DenseMatrix(top.data(), 1, 2); }},
      {"logprobs",
       [&](auto& a) { a.logprobs = DenseMatrix<float>(nullptr, 2, 1); }},
      {"ranks", [&](auto& a) { a.ranks = DenseMatrix(ranks.data(), 1, 2); }},
      {"logits",
       [&](auto& a) { a.logprobs = DenseMatrix(logits.data() + 9, 2, 1); }},
      {"ids", [&](auto& a) { a.ranks = DenseMatrix(ids.data(), 2, 1); }},
      {"top_ids",
       [&](auto& a) { a.ranks = DenseMatrix(top_ids.data() + 1, 2, 1); }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    TokenLogprobsArgs changed = good;
    c.change(changed);
    ExpectRefusal(plan->CheckArgs(changed), c.words);
  }
  for (const int32_t bad : {5, -2}) {
    ids[1] = bad;
    ExpectRefusal(plan->CheckArgs(good), "ids[1, 0]=" + std::to_string(bad) +
                                             "; need 0 <= id < 5, or -1");
  }
}

}  // namespace
}  // namespace quern
