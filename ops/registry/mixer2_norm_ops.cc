#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/communicator.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "ops/activation/act_and_mul.h"
#include "ops/norm/rms_norm_gated.h"
#include "ops/registry/bound_rows.h"
#include "ops/registry/native_activation.h"
#include "ops/registry/norm_ops.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "mixer2_gated_rms_norm";

NamedArgs Example(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"gate", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {64}}},
          {"n_groups", int64_t{4}}};
}

// Columns of a group.
absl::StatusOr<int64_t> GroupOf(const TensorMeta& x, const Communicator* ranks,
                                int64_t n_groups) {
  QUERN_ASSIGN_OR_RETURN(const int64_t n, LastExtent(kOp, "x", x));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "n_groups", n_groups, 1));
  const int64_t size = ranks == nullptr ? 1 : ranks->size();
  if (n_groups % size != 0) {
    return Unimplemented(kOp, "n_groups=", n_groups,
                         "; need a multiple of the ", size,
                         " ranks: a group lies on one of them");
  }
  const int64_t own = n_groups / size;
  if (n % own != 0) {
    return InvalidArgument(kOp, "x has ", n, " columns; need a multiple of ",
                           own, ", the rank's groups");
  }
  return n / own;
}

Metas Shapes(const TensorMeta& x, const TensorMeta& gate,
             const MaybeMeta& weight, Communicator* ranks, int64_t n_groups,
             bool use_rms_norm, double) {
  QUERN_RETURN_IF_ERROR(GroupOf(x, ranks, n_groups).status());
  if (!(gate == x)) {
    return InvalidArgument(kOp, "gate has another shape than x");
  }
  if (weight.has_value() != use_rms_norm) {
    return InvalidArgument(kOp, "weight is ",
                           weight.has_value() ? "given" : "left out",
                           "; need one exactly where use_rms_norm");
  }
  if (weight.has_value() &&
      weight->extents != std::vector<int64_t>{x.extents.back()}) {
    return InvalidArgument(kOp, "weight is not [", x.extents.back(), "]");
  }
  return std::vector<TensorMeta>{x};
}

Bound Normed(const TensorMeta& x, const TensorMeta& weight, int64_t group,
             double eps) {
  RmsNormGatedSpec spec;
  spec.hidden = x.extents.back();
  spec.group = group;
  spec.eps = static_cast<float>(eps);
  spec.dtype = x.dtype;
  spec.weight_dtype = weight.dtype;
  QUERN_ASSIGN_OR_RETURN(const RmsNormGatedPlan plan,
                         RmsNormGatedPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new BoundCalls(
      plan.target(),
      [plan](Tensors t) -> absl::Status {
        QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 4));
        return plan.CheckArgs(AsRows(t[0]), AsRows(t[1]), t[2], AsRows(t[3]));
      },
      [plan](Tensors t, Executor& e) {
        plan.Execute(AsRows(t[0]), AsRows(t[1]), t[2], AsRows(t[3]), e);
      }));
}

Bound Gated(const TensorMeta& x) {
  ActAndMulSpec spec;
  spec.d = x.extents.back();
  spec.x_dtype = spec.out_dtype = x.dtype;
  QUERN_ASSIGN_OR_RETURN(const ActAndMulPlan plan, ActAndMulPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new BoundCalls(
      plan.target(),
      [plan](Tensors t) -> absl::Status {
        QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 4));
        return plan.CheckSplitArgs(AsRows(t[1]), AsRows(t[0]), AsRows(t[3]));
      },
      [plan](Tensors t, Executor& e) {
        plan.ExecuteSplit(AsRows(t[1]), AsRows(t[0]), AsRows(t[3]), e);
      }));
}

// In f32 up to the norm, which is rounded before it meets the weight.
struct NativeMixer {
  int64_t n;
  int64_t group;  // 0: no norm
  float eps;
  NativeRound rd;

  void operator()(absl::Span<const ScalarRow> row) const {
    const auto h = [&](int64_t i) {
      const float z = row[1][i];
      return row[0][i] * (z / (1.0f + std::exp(-z)));
    };
    if (group == 0) {
      for (int64_t i = 0; i < n; ++i) row[3].Set(i, h(i));
      return;
    }
    for (int64_t g = 0; g < n; g += group) {
      double squares = 0;
      for (int64_t i = g; i < g + group; ++i) {
        squares += double{h(i)} * double{h(i)};
      }
      const double mean = squares / static_cast<double>(group);
      const float inverse = 1.0f / std::sqrt(static_cast<float>(mean) + eps);
      for (int64_t i = g; i < g + group; ++i) {
        row[3].Set(i, rd(h(i) * inverse) * row[2][i]);
      }
    }
  }
};

template <bool kNative>
Bound Make(const TensorMeta& x, const TensorMeta& gate, const MaybeMeta& weight,
           Communicator* ranks, int64_t n_groups, bool use_rms_norm,
           double eps) {
  QUERN_RETURN_IF_ERROR(
      Shapes(x, gate, weight, ranks, n_groups, use_rms_norm, eps).status());
  QUERN_ASSIGN_OR_RETURN(const int64_t group, GroupOf(x, ranks, n_groups));
  Bound fast = use_rms_norm ? Normed(x, *weight, group, eps) : Gated(x);
  if (!kNative || !fast.ok()) return fast;
  const NativeMixer native = {x.extents.back(), use_rms_norm ? group : 0,
                              static_cast<float>(eps), NativeRound(x.dtype)};
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      *std::move(fast),
      {RowOf::kMatrix, RowOf::kMatrix,
       use_rms_norm ? RowOf::kVector : RowOf::kNothing, RowOf::kMatrix},
      native));
}

}  // namespace

absl::Status RegisterMixer2NormOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "mixer2_gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, "
      "Communicator? ranks, int n_groups=1, bool use_rms_norm=True, "
      "float eps=1e-06) -> Tensor",
      &Example));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<false>>(kOp, "simd"));
  return r.Add<&Make<true>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
