// What Execute of a packed plan takes is never more than WorkspaceBytes said:
// every plan of this folder in a workspace of exactly that size, between guard
// pages, for up to 256 workers. gemm/packed_product_test.cc asks the same of
// many more shapes, without products.

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/fp8_block_linear.h"
#include "gemm/int4_linear.h"
#include "gemm/packed_linear.h"
#include "gemm/packed_plan_testutil.h"
#include "gemm/packed_scaled_linear.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"

namespace quern {
namespace {

using BF = BFloat16;

constexpr int64_t kRows[] = {1, 7, 15, 16, 17, 40};
constexpr int kWorkers[] = {1, 2, 3, 6, 7, 15, 31, 96, 127, 256};

class PackedWorkspaceTest : public PackedPlanTest {
 protected:
  // The bytes never fall as rows or workers grow, so that a workspace for the
  // most serves all.
  template <typename Plan>
  void ExpectBytesGrow(const Plan& plan) {
    int64_t fewer_rows[257] = {};
    for (const int64_t m : {1, 6, 15, 16, 17, 256, 257, 1000}) {
      int64_t bytes = 0;
      for (int workers = 1; workers <= 256; workers += 5) {
        const int64_t more = plan.WorkspaceBytes(m, workers);
        int64_t& above = fewer_rows[workers];
        ASSERT_GE(more, bytes) << m << " rows, " << workers << " workers";
        ASSERT_GE(more, above) << m << " rows, " << workers << " workers";
        bytes = above = more;
      }
    }
  }

  template <typename Plan>
  void ExpectScaledStays(const Plan& plan, const Shape& s, int workers,
                         const std::vector<int8_t>& a) {
    RowTerms terms;
    terms.scales.assign(static_cast<size_t>(s.m), 0.5f);
    const auto want = Run<int8_t, float>(plan, s, a, inline_, terms);
    ManyWorkers executor(workers);
    EXPECT_TRUE(
        AllBitsEqual(Run<int8_t, float>(plan, s, a, executor, terms), want))
        << s << " " << workers << " workers";
  }

  static PackedScaledLinearSpec ScaledSpec(int64_t n, int64_t k) {
    PackedScaledLinearSpec spec;
    spec.n = n;
    spec.k = k;
    spec.a = DType::kI8;
    spec.c = DType::kF32;
    return spec;
  }

  // Execute of a plan on weights that are codes.
  template <typename Plan>
  void ExpectBlocksStay(const Plan& plan, Rng& rng) {
    EXPECT_RAN_ON(plan);
    const int64_t n = plan.spec().n, k = plan.spec().k;
    for (const int64_t m : kRows) {
      const auto a = UniformReals<BF>(rng, m * k);
      std::vector<float> want;
      for (const int workers : kWorkers) {
        ManyWorkers executor(workers);
        const int64_t bytes = plan.WorkspaceBytes(m, workers);
        GuardBuffer<float> memory(bytes / 4);
        StridedMatrix<float> c(m, n, n);
        plan.Execute(DenseMatrix(a.data(), m, k), c.view(),
                     Workspace(memory.data(), static_cast<size_t>(bytes)),
                     executor);
        if (want.empty()) want = c.ToDense();
        ASSERT_TRUE(AllBitsEqual(c.ToDense(), want))
            << m << " rows, " << workers << " workers";
      }
    }
    ExpectBytesGrow(plan);
  }
};
QUERN_INSTANTIATE_ISA_TEST(PackedWorkspaceTest);

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

TEST_P(PackedWorkspaceTest, ADividedKStaysInTheWorkspace) {
  TestRng rng;
  for (const Divided& d : kOverflows) {
    const Shape s{d.m, d.n, d.k};
    const std::vector<BF> w(static_cast<size_t>(s.n * s.k),
                            FromDouble<BF>(0.75));
    const auto plan = Plan<BF, BF, float>(s, w, {});
    const auto a = UniformReals<BF>(rng, s.m * s.k);
    const auto want = Run<BF, float>(plan, s, a, inline_);
    ManyWorkers executor(d.workers);
    EXPECT_TRUE(AllBitsEqual(Run<BF, float>(plan, s, a, executor), want))
        << s << " " << d.workers << " workers";
  }
}

TEST_P(PackedWorkspaceTest, ADividedKOfInt8StaysInTheWorkspace) {
  TestRng rng;
  for (const Divided& d : kOverflows) {
    const Shape s{d.m, d.n, d.k};
    const auto a = SmallIntegers<int8_t>(rng, s.m * s.k, -128, 127);
    const std::vector<int8_t> w(static_cast<size_t>(s.n * s.k), -77);
    const auto plan = ScaledPlan(ScaledSpec(s.n, s.k), w, {0.25f}, {});
    ExpectScaledStays(plan, s, d.workers, a);
  }
}

// The sums of 16 chunks, enough for all workers to add them.
TEST_P(PackedWorkspaceTest, ADividedKHasTheSameBitsForAnyNumberOfWorkers) {
  TestRng rng;
  for (const auto act :
       {LinearActivation::kNone, LinearActivation::kSiluAndMul}) {
    Shape s{16, 232, 4099};
    s.act = act;
    s.padding = 3;
    const auto w = UniformReals<float>(rng, s.n * s.k);
    const auto a = UniformReals<float>(rng, s.m * s.k);
    const auto bias = UniformReals<float>(rng, s.n);
    const auto plan = Plan<float, float, float>(s, w, bias);
    const auto want = Run<float, float>(plan, s, a, inline_);
    for (int workers = 2; workers <= 64; ++workers) {
      ManyWorkers executor(workers);
      ASSERT_TRUE(AllBitsEqual(Run<float, float>(plan, s, a, executor), want))
          << s << " " << workers << " workers";
    }
  }
}

TEST_P(PackedWorkspaceTest, PackedLinearTakesWhatItSaid) {
  TestRng rng;
  for (const int64_t n : {16, 100}) {
    Shape s{1, n, 1100};
    const auto w = UniformReals<BF>(rng, s.n * s.k);
    const auto plan = Plan<BF, BF, float>(s, w, {});
    for (const int64_t m : kRows) {
      s.m = m;
      const auto a = UniformReals<BF>(rng, s.m * s.k);
      const auto want = Run<BF, float>(plan, s, a, inline_);
      for (const int workers : kWorkers) {
        ManyWorkers executor(workers);
        ASSERT_TRUE(AllBitsEqual(Run<BF, float>(plan, s, a, executor), want))
            << s << " " << workers << " workers";
      }
    }
    ExpectBytesGrow(plan);
  }
}

TEST_P(PackedWorkspaceTest, PackedScaledLinearTakesWhatItSaid) {
  TestRng rng;
  for (const int64_t n : {16, 100}) {
    Shape s{1, n, 2100};
    const auto w = SmallIntegers<int8_t>(rng, s.n * s.k, -128, 127);
    const auto plan = ScaledPlan(ScaledSpec(s.n, s.k), w, {0.25f}, {});
    for (const int64_t m : kRows) {
      s.m = m;
      const auto a = SmallIntegers<int8_t>(rng, s.m * s.k, -128, 127);
      for (const int workers : kWorkers) ExpectScaledStays(plan, s, workers, a);
    }
    ExpectBytesGrow(plan);
  }
}

TEST_P(PackedWorkspaceTest, Int4LinearTakesWhatItSaid) {
  TestRng rng;
  Int4LinearSpec spec;
  spec.format = Int4Format::kPlain;
  spec.n = 40;
  spec.k = 600;
  spec.group_size = 64;
  spec.c = DType::kF32;
  const int64_t groups = 10;
  std::vector<uint8_t> codes(static_cast<size_t>(spec.n * spec.k));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng.Integer(0, 15));
  const std::vector<uint8_t> zeros(static_cast<size_t>(groups * spec.n), 7);
  const auto scales = UniformReals<float>(rng, groups * spec.n);
  std::vector<int32_t> g_idx;
  for (int64_t k = 0; k < spec.k; ++k) {
    g_idx.push_back(static_cast<int32_t>(k / spec.group_size));
  }
  std::swap(g_idx.front(), g_idx.back());
  Int4Weights weights;
  weights.codes = DenseMatrix(codes.data(), spec.n, spec.k);
  weights.scales = DenseMatrix(scales.data(), groups, spec.n);
  weights.zeros = DenseMatrix(zeros.data(), groups, spec.n);
  weights.g_idx = DenseVector(g_idx.data(), static_cast<int64_t>(g_idx.size()));
  const auto plan = Int4LinearPlan::Create(spec, weights, {}, inline_);
  ASSERT_EQ(plan.status(), absl::OkStatus());
  ExpectBlocksStay(*plan, rng);
}

TEST_P(PackedWorkspaceTest, Fp8BlockLinearTakesWhatItSaid) {
  TestRng rng;
  Fp8BlockLinearSpec spec;
  spec.n = 40;
  spec.k = 600;
  spec.c = DType::kF32;
  std::vector<uint8_t> codes(static_cast<size_t>(spec.n * spec.k));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(rng.Integer(0, 126));
  const std::vector<float> scales(5, 0.5f);
  const auto plan =
      Fp8BlockLinearPlan::Create(spec,
                                 AnyTensorView(DType::kF8E4M3, codes.data(), 2,
                                               {spec.n, spec.k}, {spec.k, 1}),
                                 DenseMatrix(scales.data(), 1, 5), {}, inline_);
  ASSERT_EQ(plan.status(), absl::OkStatus());
  ExpectBlocksStay(*plan, rng);
}

}  // namespace
}  // namespace quern
