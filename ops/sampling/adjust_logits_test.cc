#include "quern/ops/sampling/adjust_logits.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
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

// What is done to one row, in maps and sets.
struct RowRules {
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
  std::set<int64_t> prompt, forbidden;
  std::map<int64_t, int64_t> output;  // id to count
  std::map<int64_t, float> bias;
  std::vector<int32_t> mask;  // empty: none
};

struct Want {
  double value;
  double bound;  // of the roundings of each step
};
Want ReferenceAdjust(float logit, int64_t id, const RowRules& row) {
  double l = static_cast<double>(logit), bound = 0.0;
  const auto step = [&](double result) {
    l = result;
    if (std::isfinite(l)) bound += 1.01 * 0x1p-24 * std::abs(l) + 0x1p-149;
  };
  const auto word = static_cast<size_t>(id / 32);
  if (!row.mask.empty() &&
      (static_cast<uint32_t>(row.mask[word]) >> (id % 32)) % 2 == 0) {
    l = -std::numeric_limits<double>::infinity();
  }
  if (row.forbidden.count(id) > 0) {
    l = -std::numeric_limits<double>::infinity();
  }
  if (row.bias.count(id) > 0) step(l + static_cast<double>(row.bias.at(id)));
  const auto at = row.output.find(id);
  const int64_t count = at == row.output.end() ? 0 : at->second;
  if (row.prompt.count(id) > 0 || count > 0) {
    const auto repetition = static_cast<double>(row.repetition);
    // The error of the bias grows as the logit does.
    bound *= std::max(repetition, 1 / repetition);
    step(l > 0 ? l / repetition : l * repetition);
  }
  if (count > 0) {
    const double all =
        static_cast<double>(row.frequency) * static_cast<double>(count);
    bound += 1.01 * 0x1p-24 * std::abs(all);
    step(l - all);
    step(l - static_cast<double>(row.presence));
  }
  return {l, bound};
}

// The rules of several rows as arguments.
struct Arguments {
  explicit Arguments(const std::vector<RowRules>& rows) {
    for (const RowRules& row : rows) {
      repetition.push_back(row.repetition);
      frequency.push_back(row.frequency);
      presence.push_back(row.presence);
      prompt.insert(prompt.end(), row.prompt.begin(), row.prompt.end());
      prompt_starts.push_back(static_cast<int64_t>(prompt.size()));
      forbidden.insert(forbidden.end(), row.forbidden.rbegin(),
                       row.forbidden.rend());
      forbidden_starts.push_back(static_cast<int32_t>(forbidden.size()));
      for (const auto& [id, count] : row.output) {
        output.push_back(id);
        counts.push_back(static_cast<int32_t>(count));
      }
      output_starts.push_back(static_cast<int32_t>(output.size()));
      for (const auto& [id, value] : row.bias) {
        biased.push_back(static_cast<int32_t>(id));
        bias.push_back(value);
      }
      bias_starts.push_back(static_cast<int32_t>(biased.size()));
      mask_rows.push_back(row.mask.empty() ? -1 : num_masks++);
      words = std::max(words, static_cast<int64_t>(row.mask.size()));
      masks.insert(masks.end(), row.mask.begin(), row.mask.end());
    }
  }
  template <typename T>
  static VectorView<const T> View(const std::vector<T>& v) {
    return DenseVector<const T>(v.data(), static_cast<int64_t>(v.size()));
  }
  AdjustLogitsArgs Of(MatrixView<float> logits) const {
    AdjustLogitsArgs args;
    args.logits = logits;
    args.masks = DenseMatrix<const int32_t>(masks.data(), num_masks, words);
    args.mask_rows = View(mask_rows);
    args.forbidden = {View(forbidden), View(forbidden_starts)};
    args.biased = {View(biased), View(bias_starts)};
    args.bias = bias;
    args.prompt = {View(prompt), View(prompt_starts)};
    args.output = {View(output), View(output_starts)};
    args.output_counts = View(counts);
    args.repetition = repetition;
    args.frequency = frequency;
    args.presence = presence;
    return args;
  }

  std::vector<float> repetition, frequency, presence, bias;
  std::vector<int64_t> prompt, prompt_starts = {0}, output;
  std::vector<int32_t> counts, output_starts = {0};
  std::vector<int32_t> forbidden, forbidden_starts = {0};
  std::vector<int32_t> biased, bias_starts = {0};
  std::vector<int32_t> masks, mask_rows;
  int32_t num_masks = 0;
  int64_t words = 0;
};

class AdjustLogitsTest : public IsaTest {
 protected:
  // Adjusts rows and compares each element with the reference.
  void Compare(const std::vector<float>& values,
               const std::vector<RowRules>& rules, int64_t padding = 0) {
    const auto rows = static_cast<int64_t>(rules.size());
    const int64_t vocab = static_cast<int64_t>(values.size()) / rows;
    const auto plan = AdjustLogitsPlan::Create({vocab});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    StridedMatrix<float> logits(values, rows, vocab, vocab + padding);
    const Arguments all(rules);
    const AdjustLogitsArgs args = all.Of(logits.view());
    ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
    InlineExecutor executor;
    EXPECT_NO_ALLOCATION(plan->Execute(args, executor));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < vocab; ++i) {
        const float before = values[static_cast<size_t>(r * vocab + i)];
        const Want want =
            ReferenceAdjust(before, i, rules[static_cast<size_t>(r)]);
        const auto got = static_cast<double>(logits.view().Row(r)[i]);
        if (std::isnan(want.value)) {
          ASSERT_TRUE(std::isnan(got)) << "row " << r << " id " << i;
        } else if (std::isinf(want.value)) {
          ASSERT_EQ(got, want.value) << "row " << r << " id " << i;
        } else {
          ASSERT_LE(std::abs(got - want.value), want.bound)
              << got << " is not " << want.value << ", row " << r << " id "
              << i;
        }
      }
    }
    // More workers, the same bits.
    StridedMatrix<float> again(values, rows, vocab, vocab + padding);
    ManyWorkers workers(3);
    plan->Execute(all.Of(again.view()), workers);
    const auto a = logits.ToDense(), b = again.ToDense();
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_TRUE(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])));
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(AdjustLogitsTest);

TEST_P(AdjustLogitsTest, IsExactOnPowersOfTwo) {
  RowRules row;
  row.repetition = 2.0f;
  row.frequency = 0.5f;
  row.presence = 0.25f;
  row.prompt = {0, 1, 2};
  row.output = {{1, 3}, {3, 1}, {4, 0}};
  row.bias = {{3, 8.0f}, {5, -1.0f}};
  row.forbidden = {6};
  const auto plan = AdjustLogitsPlan::Create({8});
  EXPECT_RAN_ON(*plan);
  std::vector<float> logits = {4, 4, -4, -4, 7, 7, 7, 0};
  const Arguments all({row});
  InlineExecutor executor;
  plan->Execute(all.Of(DenseMatrix(logits.data(), 1, 8)), executor);
  EXPECT_EQ(logits, (std::vector<float>{2, 0.25f, -8, 1.25f, 7, 6, -kInf, 0}));
}

TEST_P(AdjustLogitsTest, AgreesWithTheReference) {
  TestRng rng;
  for (const int64_t vocab : {1, 3, 31, 32, 33, 64, 65, 101, 259}) {
    std::vector<RowRules> rules(7);
    for (RowRules& row : rules) {
      row.repetition = static_cast<float>(rng.Uniform(0.5, 2));
      row.frequency = static_cast<float>(rng.Uniform(-2, 2));
      row.presence = static_cast<float>(rng.Uniform(-2, 2));
      const auto id = [&] { return rng.Integer(0, vocab - 1); };
      for (int64_t i = rng.Integer(0, vocab); i > 0; --i) {
        row.prompt.insert(id());
        row.output[id()] = rng.Integer(0, 5);
        row.bias[id()] = static_cast<float>(rng.Uniform(-9, 9));
        if (i % 3 == 0) row.forbidden.insert(id());
      }
      if (rng.Integer(0, 2) == 0) continue;
      for (int64_t w = 0; w < (vocab + 31) / 32; ++w) {
        const int64_t kind = rng.Integer(0, 3);
        row.mask.push_back(kind == 0   ? -1
                           : kind == 1 ? 0
                                       : static_cast<int32_t>(rng.Next()));
      }
    }
    auto values = UniformReals(rng, 7 * vocab, -20, 20);
    if (vocab > 3) {
      values[0] = kNaN;
      values[1] = kInf;
      values[2] = -kInf;
      values[3] = -0.0f;
    }
    Compare(values, rules);
    Compare(values, rules, 3);
  }
}

TEST_P(AdjustLogitsTest, LeavesARowOfForbiddenTokensWithoutAny) {
  RowRules masked, listed, none;
  masked.mask = {0, 0};
  masked.bias = {{3, 1e9f}};
  masked.prompt = {4};
  masked.repetition = 0.5f;
  for (int64_t i = 0; i < 40; ++i) listed.forbidden.insert(i);
  std::vector<float> logits(3 * 40, 1.0f);
  logits[7] = kNaN;
  const Arguments all({masked, listed, none});
  const auto plan = AdjustLogitsPlan::Create({40});
  EXPECT_RAN_ON(*plan);
  InlineExecutor executor;
  plan->Execute(all.Of(DenseMatrix(logits.data(), 3, 40)), executor);
  for (int64_t i = 0; i < 120; ++i) {
    EXPECT_EQ(logits[static_cast<size_t>(i)], i < 80 ? -kInf : 1.0f) << i;
  }
}

// The largest penalties and the largest count: a product of 2^95, which f32
// has.
TEST_P(AdjustLogitsTest, TheLargestPenaltiesReviveNoToken) {
  constexpr float kMost = AdjustLogitsPlan::kMaxPenalty;
  constexpr int64_t kCount = std::numeric_limits<int32_t>::max() - 1;
  for (const float penalty : {kMost, -kMost}) {
    SCOPED_TRACE(penalty);
    RowRules row;
    row.frequency = row.presence = penalty;
    row.forbidden = {0, 2};
    row.output = {{0, kCount}, {1, kCount}, {2, 1}};
    Compare({1, 2, kInf, 4}, {row});
    row.mask = {2};
    Compare({kNaN, 2, 3, 4}, {row});
    row.forbidden = {0, 1, 2, 3};
    std::vector<float> logits = {1, 2, 3, 4};
    const Arguments all({row});
    const auto plan = AdjustLogitsPlan::Create({4});
    const AdjustLogitsArgs args = all.Of(DenseMatrix(logits.data(), 1, 4));
    ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
    InlineExecutor executor;
    plan->Execute(args, executor);
    EXPECT_EQ(logits, std::vector<float>(4, -kInf));
  }
}

TEST_P(AdjustLogitsTest, TakesAMaskPerRowAndLongerMasks) {
  const auto plan = AdjustLogitsPlan::Create({33});
  EXPECT_RAN_ON(*plan);
  const std::vector<int32_t> masks = {1, 0, -1, -1, 0, -1};
  InlineExecutor executor;
  AdjustLogitsArgs args;
  args.masks = DenseMatrix<const int32_t>(masks.data(), 2, 3);
  GuardBuffer<float> logits(std::vector<float>(66, 2.0f));
  args.logits = DenseMatrix(logits.data(), 2, 33);
  ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
  plan->Execute(args, executor);
  for (int64_t i = 0; i < 66; ++i) {
    EXPECT_EQ(logits[i], i == 0 || (33 <= i && i < 65) ? 2.0f : -kInf) << i;
  }
  args.logits = DenseMatrix<float>(nullptr, 0, 33);
  args.masks = {};
  EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
  plan->Execute(args, executor);
}

TEST(AdjustLogitsPlanTest, Refuses) {
  for (const int64_t vocab : {int64_t{0}, int64_t{-1}, int64_t{1} << 31}) {
    ExpectRefusal(AdjustLogitsPlan::Create({vocab}).status(),
                  "adjust_logits: vocab=" + std::to_string(vocab));
  }
  constexpr int64_t kVocab = 40;
  const auto plan = AdjustLogitsPlan::Create({kVocab});
  std::vector<float> memory(2 * kVocab + 2);
  const auto logits = DenseMatrix(memory.data(), 2, kVocab);
  RowRules row;
  row.prompt = {3, 5};
  row.output = {{2, 1}, {39, 7}};
  row.bias = {{1, 2.0f}, {7, 3.0f}};
  row.forbidden = {9};
  row.mask = {1, 2};
  const Arguments good({row, row});
  EXPECT_EQ(plan->CheckArgs(good.Of(logits)), absl::OkStatus());
  using Change = std::function<void(Arguments&)>;
  const struct {
    const char* words;
    Change change;
  } cases[] = {
      {"prompt_ids[1]=40; need 0 <= id < 40",
       [](Arguments& a) { a.prompt[1] = 40; }},
      {"prompt_ids[0]=-1; need 0 <= id",
       [](Arguments& a) { a.prompt[0] = -1; }},
      {"prompt_ids[3]=3; need more than 3",
       [](Arguments& a) { a.prompt[3] = 3; }},
      {"output_ids[1]=1; need more than 2",
       [](Arguments& a) { a.output[1] = 1; }},
      {"bias_ids[1]=1; need more than 1",
       [](Arguments& a) { a.biased[1] = 1; }},
      {"forbidden_ids[0]=77", [](Arguments& a) { a.forbidden[0] = 77; }},
      {"output_counts[2]=-1; need 0 <= count",
       [](Arguments& a) { a.counts[2] = -1; }},
      {"output_counts.size=3; need 4",
       [](Arguments& a) { a.counts.pop_back(); }},
      {"bias.size=3; need 4", [](Arguments& a) { a.bias.pop_back(); }},
      {"bias[3]=", [](Arguments& a) { a.bias[3] = -kInf; }},
      {"prompt_starts.size=2; need 3",
       [](Arguments& a) { a.prompt_starts.pop_back(); }},
      {"prompt_starts is from 1 to 4; need from 0 to 4",
       [](Arguments& a) { a.prompt_starts[0] = 1; }},
      {"output_starts is from 0 to 3; need from 0 to 4",
       [](Arguments& a) { a.output_starts[2] = 3; }},
      {"bias_starts[1]=9; need 0 <= start < 5",
       [](Arguments& a) { a.bias_starts[1] = 9; }},
      {"repetition[1]=0; need a finite number > 0",
       [](Arguments& a) { a.repetition[1] = 0; }},
      {"repetition.size=1; need 2",
       [](Arguments& a) { a.repetition.pop_back(); }},
      {"frequency[0]=", [](Arguments& a) { a.frequency[0] = kNaN; }},
      {"frequency[1]=-3e+38; need -2^64 <= penalty <= 2^64",
       [](Arguments& a) { a.frequency[1] = -3e38f; }},
      {"frequency[1]=1.84467e+19; need -2^64",
       [](Arguments& a) { a.frequency[1] = std::nextafter(0x1p64f, kInf); }},
      {"presence[0]=", [](Arguments& a) { a.presence[0] = kInf; }},
      {"presence[1]=-1.84467e+19; need -2^64",
       [](Arguments& a) { a.presence[1] = std::nextafter(-0x1p64f, -kInf); }},
      {"bitmask is [-1, 2]",
       [](Arguments& a) {
         a.mask_rows.clear();
         a.num_masks = -1;
       }},
      {"mask_rows[1]=2; need 0 <= mask < 2",
       [](Arguments& a) { a.mask_rows[1] = 2; }},
      {"mask_rows.size=1; need 2",
       [](Arguments& a) { a.mask_rows.pop_back(); }},
      {"bitmask.extent(1)=1; need 2 or more",
       [](Arguments& a) { a.words = 1; }},
      {"bitmask.extent(0)=1; need 2, as rows of logits without mask_rows",
       [](Arguments& a) {
         a.mask_rows.clear();
         a.num_masks = 1;
       }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    Arguments changed = good;
    c.change(changed);
    ExpectRefusal(plan->CheckArgs(changed.Of(logits)), c.words);
  }
  std::vector<float> more(3 * kVocab);
  Arguments falls({row, row, row});
  falls.prompt_starts = {0, 4, 2, 6};
  ExpectRefusal(plan->CheckArgs(falls.Of(DenseMatrix(more.data(), 3, kVocab))),
                "prompt_ids[2]=3; need more than 5, the id before it in row 0");
  falls.prompt_starts = {0, 2, 1, 6};
  ExpectRefusal(plan->CheckArgs(falls.Of(DenseMatrix(more.data(), 3, kVocab))),
                "prompt_starts[2]=1; need 2 or more, prompt_starts[1]");
  AdjustLogitsArgs overlaps = good.Of(logits);
  overlaps.presence = {memory.data() + 1, 2};
  ExpectRefusal(plan->CheckArgs(overlaps), "presence");
  ExpectRefusal(
      plan->CheckArgs(good.Of(DenseMatrix(memory.data(), 2, kVocab + 1))),
      "logits");
  ExpectRefusal(
      plan->CheckArgs(good.Of(DenseMatrix<float>(nullptr, 2, kVocab))),
      "logits");
}

}  // namespace
}  // namespace quern
