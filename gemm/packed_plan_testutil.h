#ifndef QUERN_GEMM_PACKED_PLAN_TESTUTIL_H_
#define QUERN_GEMM_PACKED_PLAN_TESTUTIL_H_

// What the tests of the packed plans share: a shape, plans made of guarded
// weights, and Execute in guarded and poisoned memory.

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/packed_linear.h"
#include "gemm/packed_scaled_linear.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/no_alloc.h"
#include "testing/reference_gemm.h"

namespace quern {

enum class Residual { kNone, kApart, kInPlace };

struct Shape {
  int64_t m = 0, n = 0, k = 0;
  int64_t padding = 0;  // after each row of a, b and c
  int64_t shift = 0;    // of a and c, from the guarded page
  bool bias = false;
  WeightOrder order = WeightOrder::kNK;
  LinearActivation act = LinearActivation::kNone;
  Residual residual = Residual::kNone;

  int64_t cols() const { return ColumnsOfC(act, n); }
  Shape In(WeightOrder other) const {
    Shape s = *this;
    s.order = other;
    return s;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "m=" << s.m << " n=" << s.n << " k=" << s.k
             << " padding=" << s.padding << " shift=" << s.shift
             << " bias=" << s.bias
             << (s.order == WeightOrder::kNK ? " [N, K] " : " [K, N] ")
             << LinearActivationName(s.act) << " residual "
             << static_cast<int>(s.residual);
}

// a * w in double, w in the order of s.
inline std::vector<double> ReferenceProduct(const Shape& s,
                                            const std::vector<double>& a,
                                            const std::vector<double>& w) {
  return s.order == WeightOrder::kNK ? ReferenceLinear(s.m, s.n, s.k, a, w)
                                     : ReferenceGemm(s.m, s.n, s.k, a, w);
}

// What belongs to the rows of an a that is i8.
struct RowTerms {
  std::vector<float> scales;
  std::vector<int32_t> zero_points;
};

class PackedPlanTest : public IsaTest {
 protected:
  // w is dense, in the order of s; an empty bias is none.
  template <typename A, typename B, typename C>
  PackedLinearPlan Plan(const Shape& s, const std::vector<B>& w,
                        const std::vector<float>& bias) {
    PackedLinearSpec spec;
    spec.n = s.n;
    spec.k = s.k;
    spec.a = DTypeOf<A>;
    spec.b = DTypeOf<B>;
    spec.c = DTypeOf<C>;
    spec.order = s.order;
    spec.activation = s.act;
    const GuardBuffer<float> guarded(bias);
    const auto weights = Weights(w, s.n, s.k, s.order, s.padding);
    return Checked(PackedLinearPlan::Create(spec, weights.view(),
                                            BiasView(guarded), inline_));
  }

  PackedScaledLinearPlan ScaledPlan(const PackedScaledLinearSpec& spec,
                                    const std::vector<int8_t>& w,
                                    const std::vector<float>& w_scales,
                                    const std::vector<float>& bias,
                                    int64_t padding = 0) {
    const GuardBuffer<float> scales(w_scales), guarded(bias);
    const auto weights = Weights(w, spec.n, spec.k, spec.order, padding);
    return Checked(PackedScaledLinearPlan::Create(
        spec, weights.view(), scales.view(), BiasView(guarded), inline_));
  }

  // c for the s.m rows of a, which lie as s says; residual is dense, and goes
  // where s.residual says.
  template <typename A, typename C, typename AnyPlan>
  std::vector<C> Run(const AnyPlan& plan, const Shape& s,
                     const std::vector<A>& a, Executor& executor,
                     const RowTerms& terms = {},
                     const std::vector<C>& residual = {}) {
    const auto& spec = plan.spec();
    const int64_t cols = ColumnsOfC(spec.activation, spec.n);
    const Edge edge = s.m % 2 == 0 ? Edge::kBegin : Edge::kEnd;
    const StridedMatrix<A> in(a, s.m, spec.k, spec.k + s.padding, edge,
                              s.shift);
    StridedMatrix<C> out(s.m, cols, cols + s.padding, edge, s.shift);
    const bool any = !residual.empty();
    const StridedMatrix<C> apart(residual, any ? s.m : 0, cols,
                                 cols + 2 * s.padding, edge);
    AnyTensorView added;
    if (any && s.residual == Residual::kApart) added = apart.view();
    if (any && s.residual == Residual::kInPlace) {
      for (int64_t r = 0; r < s.m; ++r) {
        std::copy_n(residual.data() + r * cols, cols, out.view().Row(r));
      }
      added = out.view();
    }
    // Poisoned, and not a byte more than was asked for.
    const int64_t bytes = plan.WorkspaceBytes(s.m, executor.num_workers());
    GuardBuffer<float> memory(bytes / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
    const GuardBuffer<float> scales(terms.scales);
    const GuardBuffer<int32_t> zero_points(terms.zero_points);
    const AnyTensorView x = in.view(), c = out.view();
    const AnyTensorView f = scales.view(), z = zero_points.view();
    if constexpr (std::is_same_v<AnyPlan, PackedLinearPlan>) {
      EXPECT_EQ(plan.CheckArgs(x, c, added), absl::OkStatus());
      EXPECT_NO_ALLOCATION(plan.Execute(x, c, added, workspace, executor));
    } else {
      EXPECT_EQ(plan.CheckArgs(x, f, z, c, added), absl::OkStatus());
      EXPECT_NO_ALLOCATION(
          plan.Execute(x, f, z, c, added, workspace, executor));
    }
    return out.ToDense();
  }

  InlineExecutor inline_;

 private:
  template <typename B>
  static StridedMatrix<B> Weights(const std::vector<B>& w, int64_t n, int64_t k,
                                  WeightOrder order, int64_t padding) {
    const bool nk = order == WeightOrder::kNK;
    const int64_t cols = nk ? k : n;
    return StridedMatrix<B>(w, nk ? n : k, cols, cols + padding);
  }
  static AnyTensorView BiasView(const GuardBuffer<float>& bias) {
    return bias.size() == 0 ? AnyTensorView() : AnyTensorView(bias.view());
  }
  template <typename AnyPlan>
  AnyPlan Checked(absl::StatusOr<AnyPlan> plan) {
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
};

}  // namespace quern

#endif  // QUERN_GEMM_PACKED_PLAN_TESTUTIL_H_
