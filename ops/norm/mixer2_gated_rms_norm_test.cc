#include "quern/ops/norm/mixer2_gated_rms_norm.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/parallel/dense_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Spec = Mixer2GatedRmsNormSpec;

// The equation of the header in double, over the columns of all ranks.
Doubles Reference(const Spec& spec, const Doubles& x, const Doubles& z,
                  const Doubles& weight) {
  const auto hidden = static_cast<size_t>(spec.hidden);
  const auto group = static_cast<size_t>(spec.hidden / spec.groups);
  Doubles out;
  for (size_t i = 0; i < x.size(); ++i) {
    out.push_back(x[i] * z[i] / (1 + std::exp(-z[i])));
  }
  for (size_t g = 0; g < out.size(); g += group) {
    double sum = 0;
    for (size_t i = g; i < g + group; ++i) sum += out[i] * out[i];
    const double rms =
        std::sqrt(sum / static_cast<double>(group) + double{spec.eps});
    for (size_t i = g; i < g + group; ++i) out[i] *= weight[i % hidden] / rms;
  }
  return out;
}

class Mixer2GatedRmsNormTest : public IsaTest {
 protected:
  void Run(const Mixer2GatedRmsNormPlan& plan, const AnyMatrix& x,
           const AnyMatrix& z, const AnyTensorView& weight,
           const AnyTensorView& out, Communicator& c, Executor& executor) {
    const auto bytes =
        plan.WorkspaceBytes(x.view().extent(0), executor.num_workers());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_TRUE(memory.ok());
    const Mixer2GatedRmsNormArgs args = {x.view(), z.view(), out, weight};
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    plan.Execute(args, Workspace(*memory), c, executor);
  }
};
QUERN_INSTANTIATE_ISA_TEST(Mixer2GatedRmsNormTest);

// Covers groups that lie within a rank, that span ranks, and that are cut by
// rank boundaries in two places.
TEST_P(Mixer2GatedRmsNormTest, AgreesWithTheReferenceOnAnyNumberOfRanks) {
  TestRng rng;
  constexpr int64_t kRows = 3;
  for (const int64_t hidden : {12, 516, 1200}) {
    const auto reals = [&](int64_t count) {
      return ToDoubles(UniformReals(rng, count, -3, 3));
    };
    for (const int64_t groups : {1, 2, 3, 4, 6, 12}) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        Spec spec;
        spec.hidden = hidden;
        spec.groups = groups;
        spec.eps = groups == 2 ? 0.5f : 1e-6f;
        spec.dtype = dtype;
        spec.weight_dtype = DType::kBF16;
        const AnyMatrix x(dtype, reals(kRows * hidden), kRows, hidden, hidden);
        const AnyMatrix z(dtype, reals(kRows * hidden), kRows, hidden, hidden);
        const AnyMatrix w(DType::kBF16, reals(hidden), 1, hidden, hidden);
        const Doubles want =
            Reference(spec, x.doubles(), z.doubles(), w.doubles());
        // Relative error of rms_norm_gated, and of a sum over 4 ranks in 12
        // pieces.
        const double relative =
            ((64 + 4 + 1 + static_cast<double>(hidden) / 256 + 2 * 12 + 16) /
                 2 +
             12 + 6) *
            0x1p-24;
        for (const int ranks : {1, 2, 3, 4}) {
          RunRanks(ranks, [&](ThreadCommunicator& c) {
            const auto plan = Mixer2GatedRmsNormPlan::Create(spec, c);
            ASSERT_TRUE(plan.ok()) << plan.status();
            if (c.rank() == 0) {
              EXPECT_RAN_ON(*plan);
            }
            const int64_t n = hidden / ranks, begin = c.rank() * n;
            ASSERT_EQ(plan->columns(), n);
            const auto part = [&](const AnyMatrix& from, int64_t rows,
                                  int64_t more) {
              return AnyMatrix(from.view().dtype(),
                               Columns(from.doubles(), hidden, begin, n), rows,
                               n, n + more);
            };
            const AnyMatrix own_x = part(x, kRows, 1),
                            own_z = part(z, kRows, 2);
            const AnyMatrix own_w = part(w, 1, 0);
            const AnyMatrix out(dtype, kRows, n, n + 3);
            InlineExecutor executor;
            Run(*plan, own_x, own_z, own_w.vector(), out.view(), c, executor);
            EXPECT_TRUE(AllWithin(out.doubles(),
                                  Columns(want, hidden, begin, n),
                                  [&](double value, int64_t) {
                                    return ResultBound(dtype, value, relative);
                                  }))
                << hidden << " " << groups << " " << c.rank() << "/" << ranks;

            // Several workers, and execution in place, must give the same bits.
            ManyWorkers many(3);
            const AnyMatrix& in_place = groups == 1 ? own_x : own_z;
            Run(*plan, own_x, own_z, own_w.vector(), in_place.view(), c, many);
            EXPECT_EQ(in_place.bits(), out.bits());
          });
        }
      }
    }
  }
}

TEST_P(Mixer2GatedRmsNormTest, OfOneRankIsRmsNormGated) {
  TestRng rng;
  const auto reals = [&](int64_t count) {
    return ToDoubles(UniformReals(rng, count, -3, 3));
  };
  const AnyMatrix x(DType::kBF16, reals(3 * 96), 3, 96, 96);
  const AnyMatrix z(DType::kBF16, reals(3 * 96), 3, 96, 96);
  const AnyMatrix w(DType::kF32, reals(96), 1, 96, 96);
  const AnyMatrix out(DType::kBF16, 3, 96, 96), other(DType::kBF16, 3, 96, 96);
  Spec spec;
  spec.hidden = 96;
  spec.groups = 3;
  spec.dtype = DType::kBF16;
  SelfCommunicator self;
  const auto plan = Mixer2GatedRmsNormPlan::Create(spec, self);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_RAN_ON(*plan);
  InlineExecutor executor;
  Run(*plan, x, z, w.vector(), out.view(), self, executor);
  RmsNormGatedSpec gated;
  gated.hidden = 96;
  gated.group = 32;
  gated.eps = 1e-6f;
  gated.dtype = DType::kBF16;
  const auto same = RmsNormGatedPlan::Create(gated);
  ASSERT_TRUE(same.ok());
  same->Execute(x.view(), z.view(), w.vector(), other.view(), executor);
  EXPECT_EQ(out.bits(), other.bits());
}

// A NaN on one rank reaches its group on all ranks, and no other row; so does a
// number whose square no f32 holds.
TEST_P(Mixer2GatedRmsNormTest, KeepsNaNInItsRow) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), 3e19}) {
    RunRanks(2, [&](ThreadCommunicator& c) {
      Spec spec;
      spec.hidden = 8;
      const auto plan = Mixer2GatedRmsNormPlan::Create(spec, c);
      ASSERT_TRUE(plan.ok()) << plan.status();
      if (c.rank() == 0) {
        EXPECT_RAN_ON(*plan);
      }
      Doubles values(8, 1.0);
      if (c.rank() == 1) values[6] = bad;
      const AnyMatrix x(DType::kF32, values, 2, 4, 4);
      const AnyMatrix z(DType::kF32, Doubles(8, 1.0), 2, 4, 4);
      const AnyMatrix w(DType::kF32, Doubles(4, 1.0), 1, 4, 4);
      const AnyMatrix out(DType::kF32, 2, 4, 4);
      InlineExecutor executor;
      Run(*plan, x, z, w.vector(), out.view(), c, executor);
      const Doubles y = out.doubles();
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(std::isfinite(y[i]));
        EXPECT_TRUE(std::isnan(y[4 + i]));
      }
    });
  }
}

TEST(Mixer2GatedRmsNormPlanTest, AllocatesNothing) {
  RunRanks(2, [&](ThreadCommunicator& c) {
    Spec spec;
    spec.hidden = 40;
    const auto plan = Mixer2GatedRmsNormPlan::Create(spec, c);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const AnyMatrix x(DType::kF32, Doubles(60, 1.0), 3, 20, 20);
    const AnyMatrix w(DType::kF32, Doubles(20, 1.0), 1, 20, 20);
    const AnyMatrix out(DType::kF32, 3, 20, 20);
    auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(3, 1));
    ASSERT_TRUE(memory.ok());
    InlineExecutor executor;
    ExpectNoAllocation(c, [&] {
      plan->Execute({x.view(), x.view(), out.view(), w.vector()},
                    Workspace(*memory), c, executor);
    });
    EXPECT_EQ(out.doubles().size(), 60u);
  });
}

TEST(Mixer2GatedRmsNormPlanTest, RefusesWhatItCannotDo) {
  RunRanks(2, [&](ThreadCommunicator& c) {
    const auto refusal = [&](const Spec& spec) {
      return Mixer2GatedRmsNormPlan::Create(spec, c).status();
    };
    Spec good;
    good.hidden = 12;
    good.groups = 3;
    Spec spec = good;
    spec.hidden = 0;
    ExpectRefusal(refusal(spec), "hidden=0");
    spec = good;
    spec.hidden = 15;
    ExpectRefusal(refusal(spec), "hidden=15; need a multiple of the 2 ranks");
    spec = good;
    spec.groups = 5;
    ExpectRefusal(refusal(spec), "groups=5; need a divisor of hidden=12");
    spec.groups = 0;
    ExpectRefusal(refusal(spec), "groups=0");
    spec = good;
    spec.eps = -1.0f;
    ExpectRefusal(refusal(spec), "eps=-1");
    spec = good;
    spec.dtype = DType::kI8;
    ExpectRefusal(refusal(spec), absl::StatusCode::kUnimplemented, "dtype");
    spec = good;
    spec.weight_dtype = DType::kI8;
    ExpectRefusal(refusal(spec), absl::StatusCode::kUnimplemented,
                  "weight_dtype");

    const auto plan = Mixer2GatedRmsNormPlan::Create(good, c);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const AnyMatrix x(DType::kF32, 2, 6, 6), out(DType::kF32, 2, 6, 6);
    const AnyMatrix w(DType::kF32, 1, 6, 6), narrow(DType::kF32, 2, 5, 5);
    const AnyMatrix three(DType::kF32, 3, 6, 6);
    const auto check = [&](const AnyMatrix& a, const AnyMatrix& z,
                           const AnyTensorView& weight, const AnyMatrix& y) {
      return plan->CheckArgs({a.view(), z.view(), y.view(), weight});
    };
    EXPECT_EQ(check(x, x, w.vector(), out), absl::OkStatus());
    ExpectRefusal(check(narrow, x, w.vector(), out), "x");
    ExpectRefusal(check(x, three, w.vector(), out), "z");
    ExpectRefusal(check(x, x, AnyTensorView(), out), "weight");
    ExpectRefusal(check(x, x, w.vector(), three), "out");
    ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_rows=-1");
    ExpectRefusal(plan->WorkspaceBytes(INT64_MAX, 1).status(),
                  absl::StatusCode::kResourceExhausted, "2^63 bytes or more");
  });
}

}  // namespace
}  // namespace quern
