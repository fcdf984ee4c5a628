#include "quern/ops/parallel/parallel_lm_head.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/dense_testutil.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/quant/scalar_convert.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
// Over four ranks: full shards, cut shards, a rank without ids, and added ids.
constexpr VocabSpec kVocabs[] = {
    {128, 0, 64}, {100, 0, 64}, {70, 20, 64}, {65, 0, 64}};

// The reference: cap and scale of one logit, rounded to T at each step.
template <typename T>
double Step(double logit, float cap, float scale) {
  const auto round = [](float x) { return ToF32(FromF32<T>(x)); };
  float l = static_cast<float>(logit);
  if (cap > 0) l = round(round(std::tanh(round(l / cap))) * cap);
  if (scale != 1) l = round(l * scale);
  return static_cast<double>(l);
}

struct Model {
  ParallelLmHeadSpec spec;
  Doubles weight, bias;
};

// The plan of one rank, from all weights or from the rank's shard.
absl::StatusOr<ParallelLmHeadPlan> Make(const Model& model, WeightPart part,
                                        const ThreadCommunicator& c) {
  InlineExecutor executor;
  ParallelLmHeadSpec spec = model.spec;
  spec.part = part;
  Doubles weight = model.weight, bias = model.bias;
  if (part == WeightPart::kShard) {
    const auto shard = VocabShard::Create(spec.vocab, c.rank(), c.size());
    if (!shard.ok()) return shard.status();
    // Rows without an original id hold poison, which must not be read.
    weight.assign(static_cast<size_t>(shard->rows() * spec.hidden), NAN);
    bias.assign(static_cast<size_t>(shard->rows()), NAN);
    for (int64_t id = shard->original_begin; id < shard->original_end; ++id) {
      const int64_t row = shard->RowOf(id);
      std::copy_n(model.weight.begin() + id * spec.hidden, spec.hidden,
                  weight.begin() + row * spec.hidden);
      bias[static_cast<size_t>(row)] = model.bias[static_cast<size_t>(id)];
    }
  }
  const auto rows = static_cast<int64_t>(bias.size());
  return ParallelLmHeadPlan::Create(
      spec,
      AnyMatrix(spec.weight_dtype, weight, rows, spec.hidden, spec.hidden + 1)
          .const_view(),
      AnyMatrix(DType::kF32, bias, 1, rows, rows).vector(), c, executor);
}

TEST(ParallelLmHead, GathersTheLogitsOfAllRanks) {
  TestRng rng;
  const int64_t hidden = 60;
  for (const VocabSpec& vocab : kVocabs) {
    for (const DType dtype : kDTypes) {
      for (const float cap : {0.0f, 30.0f}) {
        for (const int64_t n : {0, 1, 3}) {
          Model model;
          model.spec.vocab = vocab;
          model.spec.hidden = hidden;
          model.spec.hidden_dtype = model.spec.weight_dtype = dtype;
          model.spec.logits_dtype = dtype;
          model.spec.soft_cap = cap;
          model.spec.scale = cap > 0 ? 0.5f : 1.0f;
          model.weight = Integers(rng, vocab.original * hidden);
          model.bias = Integers(rng, vocab.original);
          const Doubles x = Integers(rng, n * hidden);
          Doubles want = ReferenceLinear(n, vocab.original, hidden, x,
                                         model.weight, model.bias);
          // Logits are exact before the cap, and in 16 bits after it too.
          for (double& logit : want) {
            logit = WithType(dtype, [&](auto type) {
              return Step<decltype(type)>(logit, cap, model.spec.scale);
            });
          }
          std::vector<uint32_t> first;  // logits of a single rank
          for (const int ranks : {1, 2, 4}) {
            for (const WeightPart part :
                 {WeightPart::kFull, WeightPart::kShard}) {
              RunRanks(ranks, [&](ThreadCommunicator& c) {
                const auto plan = Make(model, part, c);
                ASSERT_TRUE(plan.ok()) << plan.status();
                InlineExecutor executor;
                AlignedBuffer memory = ScratchOf(*plan, n, executor);
                const Workspace scratch(memory);
                const AnyMatrix in(dtype, x, n, hidden, hidden + 1);
                const AnyMatrix out(dtype, n, vocab.original,
                                    vocab.original + 3);
                ASSERT_EQ(plan->CheckArgs(in.const_view(), out.view()),
                          absl::OkStatus());
                plan->Execute(in.const_view(), out.view(), scratch, c,
                              executor);
                if (ranks == 1) first = out.bits();
                EXPECT_EQ(out.bits(), first);
                // tanh of f32 logits is within 12 units of 2^-24 and the
                // library's within 2; two products round as well.
                EXPECT_TRUE(
                    AllWithin(out.doubles(), want, [&](double value, int64_t) {
                      return dtype == DType::kF32 && cap > 0
                                 ? 18 * 0x1p-24 * std::abs(value)
                                 : 0.0;
                    }));
                const AnyMatrix root(dtype, n, vocab.original, vocab.original);
                plan->ExecuteToRoot(
                    in.const_view(),
                    c.rank() == 0 ? root.view() : AnyTensorView(), scratch, c,
                    executor);
                if (c.rank() == 0) {
                  EXPECT_EQ(root.bits(), first);
                }
              });
            }
          }
        }
      }
    }
  }
}

int64_t ArgMax(const Doubles& logits, size_t begin, size_t count) {
  size_t best = 0;
  for (size_t j = 1; j < count; ++j) {
    const double here = logits[begin + j], old = logits[begin + best];
    if (!std::isnan(old) && (here > old || std::isnan(here))) best = j;
  }
  return static_cast<int64_t>(best);
}

// Small integers make many ties, within and between ranks.
TEST(ParallelLmHead, FindsTheFirstLargest) {
  TestRng rng;
  const int64_t hidden = 5, n = 40;
  for (const VocabSpec& vocab : kVocabs) {
    for (const DType dtype : kDTypes) {
      Model model;
      model.spec.vocab = vocab;
      model.spec.hidden = hidden;
      model.spec.hidden_dtype = model.spec.weight_dtype = dtype;
      model.spec.logits_dtype = dtype;
      model.weight = Integers(rng, vocab.original * hidden);
      model.bias = Integers(rng, vocab.original);
      Doubles x = Integers(rng, n * hidden);
      x[hidden] = NAN;                                   // row 1: all NaN
      std::fill_n(x.begin() + 2 * hidden, hidden, 0.0);  // row 2: the bias
      // Variants: a NaN near the end, no NaN, and only -infinity.
      model.bias[static_cast<size_t>(vocab.original) - 2] = NAN;
      for (int variant = 0; variant < 3; ++variant) {
        if (variant == 1) {
          model.bias[static_cast<size_t>(vocab.original) - 2] = 2;
        } else if (variant == 2) {
          model.bias.assign(model.bias.size(), -INFINITY);
        }
        const Doubles logits = ReferenceLinear(n, vocab.original, hidden, x,
                                               model.weight, model.bias);
        for (const int ranks : {1, 2, 4}) {
          RunRanks(ranks, [&](ThreadCommunicator& c) {
            const auto plan = Make(model, WeightPart::kFull, c);
            ASSERT_TRUE(plan.ok()) << plan.status();
            InlineExecutor executor;
            AlignedBuffer memory = ScratchOf(*plan, n, executor);
            const Workspace scratch(memory);
            const AnyMatrix in(dtype, x, n, hidden, hidden);
            GuardBuffer<int64_t> tokens(n);
            ASSERT_EQ(plan->CheckArgMaxArgs(in.const_view(), tokens.view()),
                      absl::OkStatus());
            plan->ArgMax(in.const_view(), tokens.view(), scratch, c, executor);
            for (int64_t i = 0; i < n; ++i) {
              EXPECT_EQ(tokens[i],
                        ArgMax(logits, static_cast<size_t>(i * vocab.original),
                               static_cast<size_t>(vocab.original)))
                  << "row " << i << ", variant " << variant << ", rank "
                  << c.rank() << " of " << ranks;
            }
          });
        }
      }
    }
  }
}

TEST(ParallelLmHead, AllocatesNothing) {
  RunRanks(2, [](ThreadCommunicator& c) {
    Model model;
    model.spec.vocab.original = 128;
    model.spec.hidden = 8;
    model.spec.logits_dtype = DType::kBF16;
    model.spec.soft_cap = 2.0f;
    model.weight.assign(128 * 8, 1.0);
    model.bias.assign(128, 0.0);
    const auto plan = Make(model, WeightPart::kFull, c);
    ASSERT_TRUE(plan.ok()) << plan.status();
    InlineExecutor executor;
    AlignedBuffer memory = ScratchOf(*plan, 3, executor);
    const Workspace scratch(memory);
    const AnyMatrix in(DType::kBF16, Doubles(24, 1.0), 3, 8, 8);
    const AnyMatrix out(DType::kBF16, 3, 128, 128);
    GuardBuffer<int64_t> tokens(3);
    const auto run = [&] {
      plan->Execute(in.const_view(), out.view(), scratch, c, executor);
      plan->ExecuteToRoot(in.const_view(), out.view(), scratch, c, executor);
      plan->ArgMax(in.const_view(), tokens.view(), scratch, c, executor);
    };
    ExpectNoAllocation(c, run);
  });
}

TEST(ParallelLmHead, Refuses) {
  auto group = ThreadCommunicator::CreateGroup(2);
  ASSERT_TRUE(group.ok());
  const ThreadCommunicator& c = *(*group)[0];
  Model good;
  good.spec.vocab.original = 100;
  good.spec.hidden = 3;
  good.weight.assign(300, 1.0);
  good.bias.assign(100, 1.0);
  const auto refuses = [&](const auto& change, absl::StatusCode code,
                           const std::string& words) {
    Model model = good;
    change(model);
    ExpectRefusal(Make(model, WeightPart::kFull, c).status(), code, words);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  refuses([](Model& m) { m.spec.vocab.padding = 101; }, kInvalid,
          "vocab_shard: 101 padded original ids");
  refuses([](Model& m) { m.spec.vocab.original = 99; }, kInvalid,
          "parallel_lm_head: weight");
  refuses([](Model& m) { m.spec.soft_cap = -1; }, kInvalid, "soft_cap=-1");
  refuses([](Model& m) { m.spec.scale = NAN; }, kInvalid, "scale=nan");
  refuses([](Model& m) { m.spec.logits_dtype = DType::kI32; },
          absl::StatusCode::kUnimplemented, "logits_dtype is i32");
  refuses([](Model& m) { m.bias.resize(99), m.weight.resize(297); }, kInvalid,
          "parallel_lm_head: weight");

  good.spec.scale = -1;
  const auto plan = Make(good, WeightPart::kFull, c);
  ASSERT_TRUE(plan.ok());
  const AnyMatrix x(DType::kBF16, 2, 3, 3), y(DType::kF32, 2, 100, 100);
  const AnyMatrix narrow(DType::kF32, 2, 99, 99);
  EXPECT_EQ(plan->CheckArgs(x.const_view(), y.view()), absl::OkStatus());
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(),
                "parallel_lm_head: max_m=-1; need max_m >= 0");
  // A row of workspace is 50 logits of f32 and three candidates.
  ExpectRefusal(plan->WorkspaceBytes(int64_t{1} << 56, 1).status(),
                absl::StatusCode::kResourceExhausted,
                "parallel_lm_head: max_m=72057594037927936");
  ExpectRefusal(plan->CheckArgs(y.const_view(), y.view()),
                "parallel_lm_head: hidden");
  ExpectRefusal(plan->CheckArgs(x.const_view(), narrow.view()),
                "parallel_lm_head: logits");
  ExpectRefusal(plan->CheckArgs(x.const_view(), y.const_view()),
                "parallel_lm_head: logits");
  std::vector<int64_t> tokens(3);
  ExpectRefusal(
      plan->CheckArgMaxArgs(x.const_view(), DenseVector(tokens.data(), 2)),
      "parallel_lm_head: scale=-1; need scale > 0");
  good.spec.scale = 2;
  const auto positive = Make(good, WeightPart::kFull, c);
  ASSERT_TRUE(positive.ok());
  ExpectRefusal(
      positive->CheckArgMaxArgs(x.const_view(), DenseVector(tokens.data(), 3)),
      "parallel_lm_head: tokens=3; need 2, as rows of hidden");
}

}  // namespace
}  // namespace quern
