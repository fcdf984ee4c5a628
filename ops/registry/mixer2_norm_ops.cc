#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/norm/mixer2_gated_rms_norm.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/gated_norm_ops.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "mixer2_gated_rms_norm";

NamedArgs Example(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"gate", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}},
          {"n_groups", int64_t{2}}};
}

absl::StatusOr<std::vector<TensorMeta>> Shapes(const TensorMeta& x,
                                               const TensorMeta& gate,
                                               const MaybeMeta& weight,
                                               Communicator*, int64_t n_groups,
                                               double) {
  QUERN_ASSIGN_OR_RETURN(const int64_t columns, LastExtent(kOp, "x", x));
  QUERN_RETURN_IF_ERROR(CheckMeta(kOp, "gate", gate, x, ", as x is"));
  if (weight.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckExtents(kOp, "weight", *weight, {columns}));
  }
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "n_groups", n_groups, 1));
  return std::vector<TensorMeta>{x};
}

// The tensors of mixer2_gated_rms_norm are x, gate, weight, out.
class BoundMixer2 final : public BoundOp {
 public:
  BoundMixer2(Mixer2GatedRmsNormPlan plan, Communicator* ranks, bool native)
      : plan_(std::move(plan)), ranks_(ranks), native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 4));
    return plan_.CheckArgs(ArgsOf(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (!native_) return plan_.WorkspaceBytes(max_rows, max_workers);
    WorkspaceLayout layout;
    SumsOf(layout, max_rows);
    if (!layout.overflow()) return layout.bytes();
    return InvalidArgument(kOp, "max_rows=", max_rows,
                           "; need fewer than 2^63 bytes of sums");
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_) return Native(t, workspace);
    plan_.Execute(ArgsOf(t), workspace, ranks(), executor);
  }

 private:
  Communicator& ranks() const {
    if (ranks_ != nullptr) return *ranks_;
    return self_;
  }

  static Mixer2GatedRmsNormArgs ArgsOf(Tensors t) {
    return {AsRows(t[0]), AsRows(t[1]), AsRows(t[3]), t[2]};
  }

  // Lays out one sum of squares for each row and group.
  template <typename Allocator>
  float* SumsOf(Allocator& allocator, int64_t rows) const {
    int64_t count = 0;
    if (!CheckedMul(rows, plan_.spec().groups, &count)) count = -1;
    return allocator.template Allocate<float>("sums", count);
  }

  // Rounds as a framework's operators do: the normalised row to its dtype, and
  // then its product with the weight.
  void Native(Tensors t, Workspace workspace) const {
    const AnyTensorView x = AsRows(t[0]), z = AsRows(t[1]), out = AsRows(t[3]);
    const Mixer2GatedRmsNormSpec& spec = plan_.spec();
    const int64_t rows = x.extent(0), group = spec.hidden / spec.groups;
    const int64_t first = ranks().rank() * plan_.columns();
    const auto count = static_cast<float>(group);
    const auto h = [&](int64_t row, int64_t i) {
      const float g = ScalarRow(z, row)[i];
      return ScalarRow(x, row)[i] * (g / (1.0f + std::exp(-g)));
    };
    const auto own_sum = [&](int64_t row, int64_t g) {
      double sum = 0.0;
      for (int64_t i = 0; i < plan_.columns(); ++i) {
        if ((first + i) / group != g) continue;
        sum += double{h(row, i)} * double{h(row, i)};
      }
      return sum;
    };
    // No rank has the elements of all others to sum them again.
    const auto inverse_of_huge = [&](int64_t row, int64_t g) {
      if (plan_.columns() % group != 0) return std::nanf("");
      return static_cast<float>(
          1.0 / std::sqrt(own_sum(row, g) / double{count} + spec.eps));
    };
    float* const sums = SumsOf(workspace, rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t g = 0; g < spec.groups; ++g) {
        sums[row * spec.groups + g] = static_cast<float>(own_sum(row, g));
      }
    }
    ranks().AllReduceSum(DenseMatrix(sums, rows, spec.groups));
    const ScalarRow weight(t[2], 0);
    for (int64_t row = 0; row < rows; ++row) {
      const ScalarRow to(out, row);
      for (int64_t i = 0; i < plan_.columns(); ++i) {
        const int64_t g = (first + i) / group;
        const float sum = sums[row * spec.groups + g];
        to.Set(i, h(row, i) * (std::isinf(sum)
                                   ? inverse_of_huge(row, g)
                                   : 1.0f / std::sqrt(sum / count + spec.eps)));
        to.Set(i, to[i] * weight[i]);
      }
    }
  }

  const Mixer2GatedRmsNormPlan plan_;
  Communicator* const ranks_;
  const bool native_;
  mutable SelfCommunicator self_;
};

// Without a weight there is no norm either, only the gate.
template <bool kNative>
Bound MakeGate(const TensorMeta& x) {
  ActAndMulSpec spec;
  spec.d = x.extents.back();
  spec.x_dtype = spec.out_dtype = x.dtype;
  QUERN_ASSIGN_OR_RETURN(const ActAndMulPlan plan, ActAndMulPlan::Create(spec));
  auto fast = std::make_unique<BoundCalls>(
      plan.target(),
      [plan](Tensors t) -> absl::Status {
        QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 4));
        return plan.CheckSplitArgs(AsRows(t[1]), AsRows(t[0]), AsRows(t[3]));
      },
      [plan](Tensors t, Executor& e) {
        plan.ExecuteSplit(AsRows(t[1]), AsRows(t[0]), AsRows(t[3]), e);
      });
  if (!kNative) return std::unique_ptr<BoundOp>(std::move(fast));
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast),
      {RowOf::kMatrix, RowOf::kMatrix, RowOf::kNothing, RowOf::kMatrix},
      [n = spec.d](absl::Span<const ScalarRow> row) {
        for (int64_t i = 0; i < n; ++i) {
          const float z = row[1][i];
          row[3].Set(i, row[0][i] * (z / (1.0f + std::exp(-z))));
        }
      }));
}

template <bool kNative>
Bound Make(const TensorMeta& x, const TensorMeta& gate, const MaybeMeta& weight,
           Communicator* ranks, int64_t n_groups, double eps) {
  QUERN_RETURN_IF_ERROR(Shapes(x, gate, weight, ranks, n_groups, eps).status());
  if (!weight.has_value()) return MakeGate<kNative>(x);
  SelfCommunicator self;
  const Communicator& all = ranks == nullptr ? self : *ranks;
  Mixer2GatedRmsNormSpec spec;
  if (!CheckedMul(x.extents.back(), int64_t{all.size()}, &spec.hidden)) {
    return InvalidArgument(kOp, "x has 2^63 columns or more");
  }
  spec.groups = n_groups;
  spec.eps = static_cast<float>(eps);
  spec.dtype = x.dtype;
  spec.weight_dtype = weight->dtype;
  QUERN_ASSIGN_OR_RETURN(Mixer2GatedRmsNormPlan plan,
                         Mixer2GatedRmsNormPlan::Create(spec, all));
  return std::unique_ptr<BoundOp>(
      new BoundMixer2(std::move(plan), ranks, kNative));
}

}  // namespace

absl::Status RegisterMixer2NormOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "mixer2_gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, "
      "Communicator? ranks, int n_groups=1, float eps=1e-06) -> Tensor",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{{"x", "out"}, {"gate", "out"}},
                                        OpRows::kLeading,
                                        "",
                                        {{"z", "gate"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<false>>(kOp, "simd"));
  return r.Add<&Make<true>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
