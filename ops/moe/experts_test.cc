#include "quern/ops/moe/experts.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/ops/moe/reference_experts_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

// A mixture whose weights tests know in double.
struct Mixture {
  ExpertsSpec spec;
  int64_t hidden = 0;
  ExpertWeights weights;
  std::vector<ReferenceExpert> known;
};

struct MixtureShape {
  WeightCase format;
  int64_t experts, hidden, inter;
  bool bias = false;
  bool exact = false;  // small integers
};

struct Batch {
  std::vector<int32_t> ids;    // [tokens, top_k]
  std::vector<float> weights;  // [tokens, top_k]
  std::vector<int32_t> map;    // or empty
};

class ExpertsTest : public IsaTest {
 protected:
  Mixture Make(const MixtureShape& shape, const ExpertsSpec& spec) {
    Mixture m;
    m.spec = spec;
    m.hidden = shape.hidden;
    for (int64_t e = 0; e < shape.experts; ++e) {
      Shape up{0, shape.inter * (IsGated(spec.activation) ? 2 : 1),
               shape.hidden};
      up.act = spec.activation;
      up.bias = shape.bias;
      Shape down{0, shape.hidden, shape.inter};
      down.bias = shape.bias;
      const auto known = [&](const Shape& s) {
        return shape.exact ? ExactWeights(rng_, shape.format, s, 2)
                           : RealWeights(rng_, shape.format, s);
      };
      const KnownWeights known_up = known(up), known_down = known(down);
      m.weights.gate_up.push_back(known_up.Pack(inline_));
      m.weights.down.push_back(known_down.Pack(inline_));
      m.known.push_back({known_up.Values(), ToDoubles(known_up.bias),
                         known_down.Values(), ToDoubles(known_down.bias),
                         shape.format.format == WeightFormat::kI8Channel});
    }
    return m;
  }

  ExpertsPlan Plan(const Mixture& m) {
    auto plan = ExpertsPlan::Create(m.spec, m.weights);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  // Ids of experts, of which a token may have one twice.
  Batch Route(int64_t tokens, int64_t top_k, int64_t experts) {
    Batch batch;
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      batch.ids.push_back(static_cast<int32_t>(rng_.Integer(0, experts - 1)));
      batch.weights.push_back(static_cast<float>(rng_.Uniform(-1, 1)));
    }
    return batch;
  }

  // Runs with exactly the workspace that the plan asks for. All memory is
  // guarded and poisoned.
  template <typename X, typename C>
  std::vector<C> Run(const ExpertsPlan& plan, const std::vector<X>& x,
                     const Batch& batch, Executor& executor,
                     const std::vector<C>& add = {}, bool in_place = false) {
    const int64_t hidden = plan.hidden(), top_k = plan.spec().top_k;
    const int64_t tokens = static_cast<int64_t>(x.size()) / hidden;
    const StridedMatrix<X> in(x, tokens, hidden, hidden + 3);
    const StridedMatrix<int32_t> ids(batch.ids, tokens, top_k, top_k + 1);
    const StridedMatrix<float> weights(batch.weights, tokens, top_k, top_k + 2);
    const GuardBuffer<int32_t> map(batch.map);
    const StridedMatrix<C> apart(add, add.empty() ? 0 : tokens, hidden,
                                 hidden + 1);
    StridedMatrix<C> out(tokens, hidden, hidden + 5);
    ExpertsArgs args;
    args.x = in.view();
    args.ids = ids.view();
    args.weights = weights.view();
    if (!batch.map.empty()) args.map = map.view();
    args.out = out.view();
    if (!add.empty()) args.add = apart.view();
    if (in_place) {
      for (int64_t t = 0; t < tokens; ++t) {
        std::copy_n(add.data() + t * hidden, hidden, out.view().Row(t));
      }
      args.add = out.view();
    }
    EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
    const auto bytes = plan.WorkspaceBytes(tokens, executor.num_workers());
    EXPECT_EQ(bytes.status(), absl::OkStatus());
    GuardBuffer<float> memory(RoundUp(*bytes, AlignedBuffer::kAlignment) / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
    return out.ToDense();
  }

  // out of all tokens in double, with bounds.
  template <typename X, typename C>
  ReferenceTerms Want(const Mixture& m, const std::vector<X>& x,
                      const Batch& batch, const std::vector<C>& add = {}) {
    const auto hidden = static_cast<size_t>(m.hidden);
    const auto top_k = static_cast<size_t>(m.spec.top_k);
    ReferenceTerms want;
    for (size_t t = 0; t < x.size() / hidden; ++t) {
      const auto row = [&](const auto& from, size_t n) {
        return std::vector<double>(ToDoubles(std::decay_t<decltype(from)>(
            from.begin() + static_cast<int64_t>(t * n),
            from.begin() + static_cast<int64_t>((t + 1) * n))));
      };
      std::vector<int32_t> experts;
      for (size_t j = 0; j < top_k; ++j) {
        const int32_t id = batch.ids[t * top_k + j];
        experts.push_back(batch.map.empty() || id < 0
                              ? id
                              : batch.map[static_cast<size_t>(id)]);
      }
      const ReferenceTerms token = ReferenceToken(
          m.spec, m.known, row(x, hidden), experts, row(batch.weights, top_k),
          add.empty() ? std::vector<double>() : row(add, hidden));
      want.value.insert(want.value.end(), token.value.begin(),
                        token.value.end());
      want.error.insert(want.error.end(), token.error.begin(),
                        token.error.end());
    }
    return want;
  }

  template <typename C>
  static testing::AssertionResult IsWithin(const std::vector<C>& got,
                                           const ReferenceTerms& want) {
    return AllWithin(got, want.value, [&](double, int64_t flat) {
      return want.error[static_cast<size_t>(flat)];
    });
  }

  template <typename X, typename C>
  void Compare(const MixtureShape& shape, Act act, int64_t top_k,
               int64_t tokens, bool weight_on_input = false) {
    SCOPED_TRACE(testing::Message()
                 << shape.format << " " << LinearActivationName(act)
                 << " top_k=" << top_k << " tokens=" << tokens);
    ExpertsSpec spec;
    spec.top_k = top_k;
    spec.x = DTypeOf<X>;
    spec.out = DTypeOf<C>;
    spec.activation = act;
    spec.weight_on_input = weight_on_input;
    const Mixture m = Make(shape, spec);
    const auto x = UniformReals<X>(rng_, tokens * shape.hidden);
    const Batch batch = Route(tokens, top_k, shape.experts);
    EXPECT_TRUE(IsWithin(Run<X, C>(Plan(m), x, batch, inline_),
                         Want<X, C>(m, x, batch)));
  }

  TestRng rng_;
  InlineExecutor inline_;
};
QUERN_INSTANTIATE_ISA_TEST(ExpertsTest);

TEST_P(ExpertsTest, IsExactOnSmallIntegers) {
  ExpertsSpec spec;
  spec.top_k = 3;
  spec.out = DType::kF32;
  spec.activation = Act::kNone;
  for (const WeightCase& format : kEveryFormat) {
    if (format.format == WeightFormat::kI8Channel) continue;  // rounds x
    SCOPED_TRACE(testing::Message() << format);
    const Mixture m = Make({format, 4, 32, 32, true, true}, spec);
    const ExpertsPlan plan = Plan(m);
    for (const int64_t tokens : {1, 2, 17}) {
      // h is bf16: sums must stay below 2^8.
      const auto x = SmallIntegers<BF>(rng_, tokens * 32, 0, 1);
      Batch batch = Route(tokens, 3, 4);
      for (float& w : batch.weights) {
        w = static_cast<float>(rng_.Integer(-4, 4)) / 2;
      }
      batch.ids[1] = -1;
      const auto add = SmallIntegers<float>(rng_, tokens * 32, -9, 9);
      const auto want = Want(m, x, batch, add).value;
      EXPECT_TRUE(AllEqual(Run<BF>(plan, x, batch, inline_, add), want));
      EXPECT_TRUE(AllEqual(Run<BF>(plan, x, batch, inline_, add, true), want));
    }
  }
}

TEST_P(ExpertsTest, IsWithinItsBound) {
  const MixtureShape bf16 = {{WeightFormat::kBF16}, 5, 72, 40, true};
  const MixtureShape f32 = {{WeightFormat::kF32}, 3, 33, 50};
  for (const int64_t tokens : {1, 3, 40}) {
    Compare<BF, BF>(bf16, Act::kSiluAndMul, 2, tokens);
    Compare<BF, float>(bf16, Act::kSilu, 3, tokens);
    Compare<BF, float>(bf16, Act::kSwigluOaiAndMul, 3, tokens);
    Compare<float, float>(f32, Act::kSiluAndMul, 3, tokens);
    Compare<float, BF>(f32, Act::kSilu, 1, tokens);
    Compare<Float16, Float16>({{WeightFormat::kF16}, 4, 48, 56},
                              Act::kSiluAndMul, 4, tokens);
  }
}

TEST_P(ExpertsTest, EveryFormatIsWithinItsBound) {
  for (const WeightCase& format : kEveryFormat) {
    if (format.zeros) continue;  // whose bound grows with the zero points
    Compare<BF, float>({format, 4, 64, 96, true}, Act::kSiluAndMul, 2, 5);
  }
}

TEST_P(ExpertsTest, WeighsTheInputInstead) {
  const MixtureShape bf16 = {{WeightFormat::kBF16}, 5, 71, 40};
  Compare<BF, BF>(bf16, Act::kSiluAndMul, 1, 9, true);
  Compare<float, float>(bf16, Act::kSiluAndMul, 1, 9, true);
}

// y of a token is down of gate_up, in every format.
TEST_P(ExpertsTest, EveryFormatGivesTheValuesOfItsLinears) {
  for (const WeightCase& format : kEveryFormat) {
    for (const Act act : {Act::kGeluTanhAndMul, Act::kGelu}) {
      SCOPED_TRACE(testing::Message() << format << LinearActivationName(act));
      ExpertsSpec spec;
      spec.top_k = 1;
      spec.out = DType::kF32;
      spec.activation = act;
      const Mixture m = Make({format, 3, 64, 96, true}, spec);
      Batch batch = Route(20, 1, 3);
      std::fill(batch.weights.begin(), batch.weights.end(), 1.0f);
      const auto x = UniformReals<BF>(rng_, 20 * 64);
      const auto got = Run<BF, float>(Plan(m), x, batch, inline_);
      for (int64_t t = 0; t < 20; ++t) {
        const auto e = static_cast<size_t>(batch.ids[static_cast<size_t>(t)]);
        const auto plan_of = [&](const LinearWeights& w, DType c, Act a) {
          LinearSpec linear;
          linear.c = c;
          linear.activation = a;
          linear.kernels = "packed";
          return *LinearPlan::Create(linear, w, inline_);
        };
        Shape s{1, 0, 64};
        const std::vector<BF> row(x.begin() + t * 64, x.begin() + t * 64 + 64);
        const auto h = RunLinear<BF, BF>(
            plan_of(m.weights.gate_up[e], DType::kBF16, act), s, row, inline_);
        const auto y = RunLinear<BF, float>(
            plan_of(m.weights.down[e], DType::kF32, Act::kNone), s, h, inline_);
        EXPECT_TRUE(AllEqual(
            std::vector<float>(got.begin() + t * 64, got.begin() + t * 64 + 64),
            y));
      }
    }
  }
}

// Ranks that have some of the experts give parts of the sum.
TEST_P(ExpertsTest, MapsExpertsAndLeavesOutThoseOfOtherRanks) {
  ExpertsSpec spec;
  spec.top_k = 2;
  const Mixture m = Make({{WeightFormat::kBF16}, 3, 48, 32}, spec);
  const ExpertsPlan plan = Plan(m);
  const auto x = UniformReals<BF>(rng_, 10 * 48);
  Batch batch = Route(10, 2, 6);
  batch.map = {-1, 2, -1, 0, 1, -1};
  batch.ids[0] = -1;
  batch.ids[4] = 0, batch.ids[5] = 2;  // a token without experts
  const auto got = Run<BF, BF>(plan, x, batch, inline_);
  EXPECT_TRUE(IsWithin(got, Want<BF, BF>(m, x, batch)));
  for (size_t i = 2 * 48; i < 3 * 48; ++i) EXPECT_EQ(ToDouble(got[i]), 0);
}

TEST_P(ExpertsTest, NeitherTheBatchNorWorkersChangeABit) {
  ExpertsSpec spec;
  spec.top_k = 4;
  for (const WeightCase& format : kEveryFormat) {
    SCOPED_TRACE(testing::Message() << format);
    const Mixture m = Make({format, 7, 64, 96}, spec);
    const ExpertsPlan plan = Plan(m);
    const auto x = UniformReals<BF>(rng_, 30 * 64);
    const Batch batch = Route(30, 4, 7);
    const auto want = Run<BF, BF>(plan, x, batch, inline_);
    for (const int workers : {2, 3, 64}) {
      ManyWorkers many(workers);
      EXPECT_TRUE(AllBitsEqual(Run<BF, BF>(plan, x, batch, many), want));
    }
    for (const int64_t t : {0, 7, 29}) {
      const auto part = [t](const auto& all, int64_t n) {
        return std::decay_t<decltype(all)>(all.begin() + t * n,
                                           all.begin() + (t + 1) * n);
      };
      const Batch alone = {part(batch.ids, 4), part(batch.weights, 4), {}};
      EXPECT_TRUE(AllBitsEqual(Run<BF, BF>(plan, part(x, 64), alone, inline_),
                               part(want, 64)))
          << "token " << t;
    }
  }
}

TEST_P(ExpertsTest, ThreadsChangeNoBit) {
  ExpertsSpec spec;
  spec.top_k = 4;
  const Mixture m = Make({{WeightFormat::kBF16}, 7, 256, 128}, spec);
  const ExpertsPlan plan = Plan(m);
  const auto x = UniformReals<BF>(rng_, 64 * 256);
  const Batch batch = Route(64, 4, 7);
  const auto want = Run<BF, BF>(plan, x, batch, inline_);
  const auto executor = Workers(3);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(AllBitsEqual(Run<BF, BF>(plan, x, batch, *executor), want));
  }
}

TEST_P(ExpertsTest, ManyTokensGoBlockByBlock) {
  ExpertsSpec spec;
  spec.top_k = 3;
  const Mixture m = Make({{WeightFormat::kBF16}, 3, 16, 16}, spec);
  const ExpertsPlan plan = Plan(m);
  // Three blocks; top_k does not divide the routes of a block.
  const int64_t tokens = 2 * (ExpertsPlan::kBlockRoutes / 3) + 5;
  const auto x = UniformReals<BF>(rng_, tokens * 16);
  Batch batch = Route(tokens, 3, 3);
  // The last block has no routes to the first expert.
  const auto last = static_cast<size_t>(tokens * 2 / 3 * 3);
  for (size_t i = last; i < batch.ids.size(); ++i) {
    if (batch.ids[i] == 0) batch.ids[i] = 2;
  }
  const auto add = UniformReals<BF>(rng_, tokens * 16);
  const ReferenceTerms want = Want<BF, BF>(m, x, batch, add);
  EXPECT_TRUE(IsWithin(Run<BF, BF>(plan, x, batch, inline_, add), want));
  EXPECT_TRUE(IsWithin(Run<BF, BF>(plan, x, batch, inline_, add, true), want));
  const int64_t most = *plan.WorkspaceBytes(ExpertsPlan::kBlockRoutes / 3, 2);
  EXPECT_EQ(*plan.WorkspaceBytes(tokens, 2), most);
  EXPECT_LT(*plan.WorkspaceBytes(tokens / 4, 2), most);
}

TEST_P(ExpertsTest, ANaNStaysInItsToken) {
  ExpertsSpec spec;
  spec.top_k = 2;
  spec.out = DType::kF32;
  const Mixture m = Make({{WeightFormat::kBF16}, 3, 32, 32}, spec);
  const ExpertsPlan plan = Plan(m);
  auto x = UniformReals<BF>(rng_, 4 * 32);
  Batch batch = Route(4, 2, 3);
  const auto want = Run<BF, float>(plan, x, batch, inline_);
  batch.weights[3] = std::numeric_limits<float>::quiet_NaN();
  x[2 * 32 + 5] = FromDouble<BF>(std::nan(""));
  const auto got = Run<BF, float>(plan, x, batch, inline_);
  for (size_t i = 0; i < got.size(); ++i) {
    if (i / 32 == 1 || i / 32 == 2) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
    } else {
      EXPECT_EQ(got[i], want[i]) << i;
    }
  }
}

TEST_P(ExpertsTest, NoTokensAreNoWork) {
  ExpertsSpec spec;
  spec.top_k = 2;
  const ExpertsPlan plan = Plan(Make({{WeightFormat::kBF16}, 3, 32, 32}, spec));
  EXPECT_TRUE((Run<BF, BF>(plan, {}, {}, inline_).empty()));
}

}  // namespace
}  // namespace quern
