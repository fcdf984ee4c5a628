// What Execute takes is never more than WorkspaceBytes said: weights of every
// format in a workspace of exactly that size, between guard pages, for up to
// 256 workers. gemm/schedule/packed_product_test.cc asks the same of many more
// shapes, without products.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/block_format.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;

constexpr int64_t kRows[] = {1, 7, 15, 16, 17, 40};
constexpr int kWorkers[] = {1, 2, 3, 6, 7, 15, 31, 96, 127, 256};

class LinearWorkspaceTest : public IsaTest {
 protected:
  // Expects that the bytes never fall as rows or workers grow, so that a
  // workspace for the most rows and workers serves all.
  void ExpectBytesGrow(const LinearPlan& plan) {
    int64_t fewer_rows[257] = {};
    for (const int64_t m : {0, 1, 6, 15, 16, 17, 256, 257, 1000}) {
      int64_t bytes = 0;
      for (int workers = 1; workers <= 256; workers += 5) {
        const auto more = plan.WorkspaceBytes(m, workers);
        ASSERT_TRUE(more.ok()) << more.status();
        int64_t& above = fewer_rows[workers];
        ASSERT_GE(*more, bytes) << m << " rows, " << workers << " workers";
        ASSERT_GE(*more, above) << m << " rows, " << workers << " workers";
        bytes = above = *more;
      }
    }
  }

  // Expects the same bits from each of these numbers of workers as from one.
  template <typename A>
  void ExpectStays(const LinearPlan& plan, int64_t m, const int* workers,
                   size_t count, Rng& rng, int64_t padding = 0) {
    EXPECT_RAN_ON(plan);
    const auto a = Rows<A>(rng, m * plan.k());
    RowTerms terms;
    if (plan.spec().a == DType::kI8) {
      terms.scales.assign(static_cast<size_t>(m), 0.5f);
    }
    Shape s{m};
    s.padding = padding;
    s.shift = padding % 3;
    InlineExecutor inline_executor;
    const auto want = RunLinear<A, float>(plan, s, a, inline_executor, terms);
    for (size_t i = 0; i < count; ++i) {
      ManyWorkers executor(workers[i]);
      ASSERT_TRUE(
          AllBitsEqual(RunLinear<A, float>(plan, s, a, executor, terms), want))
          << m << " rows, n=" << plan.n() << ", k=" << plan.k() << ", "
          << workers[i] << " workers";
    }
  }

  template <typename A>
  static std::vector<A> Rows(Rng& rng, int64_t count) {
    if constexpr (DTypeOf<A> == DType::kI8) {
      return SmallIntegers<A>(rng, count, -128, 127);
    } else {
      return UniformReals<A>(rng, count);
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearWorkspaceTest);

struct Divided {
  int workers;
  int64_t m, n, k;
};

// In 2026 Execute wrote past the end of the workspace with these: k was divided
// between the workers, and the workspace had no room for the sums of its parts
// because there were as many panels as workers. The first three are shapes of
// AVX-512, the others of AVX2.
constexpr Divided kOverflows[] = {{3, 16, 64, 4096},
                                  {7, 16, 128, 4096},
                                  {15, 16, 256, 4096},
                                  {6, 15, 128, 8192},
                                  {127, 15, 2048, 4096}};

// A plan on n times k weights of one value.
LinearPlan PlanOfOne(WeightFormat format, int64_t n, int64_t k, double value,
                     const LinearSpec& spec) {
  KnownWeights w = EmptyWeights({format}, {0, n, k});
  w.codes.assign(static_cast<size_t>(n * k), value);
  if (format == WeightFormat::kI8Channel) w.scales = {0.25};
  InlineExecutor executor;
  return PackedPlan(w.Pack(executor), spec);
}

TEST_P(LinearWorkspaceTest, ADividedKStaysInTheWorkspace) {
  TestRng rng;
  for (const Divided& d : kOverflows) {
    const auto plan =
        PlanOfOne(WeightFormat::kBF16, d.n, d.k, 0.75, SpecOf<BF, float>());
    ExpectStays<BF>(plan, d.m, &d.workers, 1, rng);
  }
}

// k is divided for few rows alone, which then need more than many rows do. A
// workspace for many rows must serve them.
TEST_P(LinearWorkspaceTest, MoreRowsThanThoseOfADividedKNeedNoLess) {
  int divided = 0;
  for (const Divided& d : kOverflows) {
    const auto plan =
        PlanOfOne(WeightFormat::kBF16, d.n, d.k, 0.75, SpecOf<BF, float>());
    EXPECT_RAN_ON(plan);
    for (const int workers : {2, d.workers, d.workers + 1}) {
      int64_t most = 0;
      for (int64_t m = 1; m <= 40; ++m) {
        const int64_t bytes = plan.WorkspaceBytes(m, workers).value();
        ASSERT_GE(bytes, most) << m << " rows, n=" << d.n << ", k=" << d.k
                               << ", " << workers << " workers";
        divided += bytes == most ? 1 : 0;
        most = bytes;
      }
    }
  }
  EXPECT_GT(divided, 0);  // fewer rows decide the size
}

TEST_P(LinearWorkspaceTest, ADividedKOfInt8StaysInTheWorkspace) {
  TestRng rng;
  for (const Divided& d : kOverflows) {
    const auto plan = PlanOfOne(WeightFormat::kI8Channel, d.n, d.k, -77,
                                SpecOf<int8_t, float>());
    ExpectStays<int8_t>(plan, d.m, &d.workers, 1, rng);
  }
}

// The sums of 16 chunks, enough for all workers to add them.
TEST_P(LinearWorkspaceTest, ADividedKHasTheSameBitsForAnyNumberOfWorkers) {
  TestRng rng;
  std::vector<int> workers;
  for (int i = 2; i <= 64; ++i) workers.push_back(i);
  const WeightSources random =
      RealSources(rng, {WeightFormat::kF32, WeightLayout::kNK}, 232, 4099);
  for (const auto act :
       {LinearActivation::kNone, LinearActivation::kSiluAndMul}) {
    LinearSpec spec = SpecOf<float, float>();
    spec.activation = act;
    const auto plan = PackedPlan(random.Pack(IsGated(act)), spec);
    ExpectStays<float>(plan, 16, workers.data(), workers.size(), rng, 3);
  }
}

// Runs every format of weights for all of kRows and kWorkers.
class LinearWorkspaceSweepTest : public LinearWorkspaceTest {
 protected:
  void Sweep(LinearActivation activation) {
    TestRng rng;
    for (const WeightCase& c : kFormatCases) {
      const bool int8 = c.format == WeightFormat::kI8Channel;
      const bool groups = c.format >= WeightFormat::kE4M3Block;
      for (const int64_t n : {16, 104}) {
        // One n is enough where it takes long: 256 workers have 16 MiB of
        // decoded weights, which every run fills with poison.
        if (n == 16 && (groups || IsGated(activation))) continue;
        SCOPED_TRACE(testing::Message() << c << " n=" << n);
        // A chunk is 256 k of f32, 1024 of int8, else 512. There is more than
        // one, and more than two where k may be divided.
        const int64_t k = int8 ? 2112 : groups ? 608 : 1120;
        const WeightSources random = RealSources(rng, c, n, k, 64);
        LinearSpec spec = SpecOf<BF, float>();
        spec.activation = activation;
        const LinearWeights weights = random.Pack(IsGated(activation));
        const auto plan = PackedPlan(weights, spec);
        for (const int64_t m : kRows) {
          ExpectStays<BF>(plan, m, kWorkers, std::size(kWorkers), rng);
        }
        ExpectBytesGrow(plan);
        if (!int8) continue;
        spec.a = DType::kI8;
        const auto given = PackedPlan(weights, spec);
        for (const int64_t m : kRows) {
          ExpectStays<int8_t>(given, m, kWorkers, std::size(kWorkers), rng);
        }
        ExpectBytesGrow(given);
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearWorkspaceSweepTest);

TEST_P(LinearWorkspaceSweepTest, EveryFormatTakesWhatItSaid) {
  Sweep(LinearActivation::kNone);
}

TEST_P(LinearWorkspaceSweepTest, EveryGatedFormatTakesWhatItSaid) {
  Sweep(LinearActivation::kGeluTanhAndMul);
}

// Weights in blocks, for both kinds of activations.
TEST_P(LinearWorkspaceTest, BlocksTakeWhatTheySaid) {
  TestRng rng;
  for (const auto activations :
       {LinearActivations::kExact, LinearActivations::kInt8Blocks}) {
    for (const auto act :
         {LinearActivation::kNone, LinearActivation::kGeluTanhAndMul}) {
      LinearSpec spec = SpecOf<BF, float>();
      spec.activation = act;
      spec.activations = activations;
      const auto plan = PackedPlan(
          WeightSources(BlockWeights(rng, BlockFormat::kQ4_K, 104, 768, 1.0))
              .Pack(IsGated(act)),
          spec);
      for (const int64_t m : kRows) {
        ExpectStays<BF>(plan, m, kWorkers, std::size(kWorkers), rng);
      }
      ExpectBytesGrow(plan);
    }
  }
}

// By rows of int8, in act-order and with zero points.
TEST_P(LinearWorkspaceTest, Int4InBlocksTakesWhatItSaid) {
  TestRng rng;
  const WeightCase c = {WeightFormat::kI4Group, WeightLayout::kNK, true, true};
  for (const auto act :
       {LinearActivation::kNone, LinearActivation::kGeluTanhAndMul}) {
    LinearSpec spec = SpecOf<BF, float>();
    spec.activation = act;
    spec.activations = LinearActivations::kInt8Blocks;
    const WeightSources random = RealSources(rng, c, 104, 608, 64);
    const auto plan = PackedPlan(random.Pack(IsGated(act)), spec);
    for (const int64_t m : kRows) {
      ExpectStays<BF>(plan, m, kWorkers, std::size(kWorkers), rng);
    }
    ExpectBytesGrow(plan);
  }
}

TEST(LinearWorkspaceRefusalTest, RefusesRowsAndWorkersThatThereAreNot) {
  TestRng rng;
  for (const WeightCase& c : kFormatCases) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng, c, 16, 32);
    const auto plan = PackedPlan(random.Pack());
    ExpectRefusal(plan.WorkspaceBytes(-1, 1).status(), "max_m=-1");
    ExpectRefusal(plan.WorkspaceBytes(1, 0).status(), "max_workers=0");
  }
}

}  // namespace
}  // namespace quern
