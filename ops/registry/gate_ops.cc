#include "quern/ops/registry/gate_ops.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/sigmoid_mul.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;

constexpr char kOp[] = "sigmoid_mul";

NamedArgs GateExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"gate", TensorMeta{dtype, {4, 64}}}};
}

Metas GateShapes(const TensorMeta& x, const TensorMeta& gate,
                 const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const int64_t d, LastExtent(kOp, "x", x));
  std::vector<int64_t> one = x.extents;
  one.back() = 1;
  if (gate.extents != x.extents && gate.extents != one) {
    return InvalidArgument(kOp, "gate is ", PrintMeta(gate), " and x is ",
                           PrintMeta(x), "; need the shape of x, or 1 in ",
                           "place of its last extent, ", d);
  }
  TensorMeta out = x;
  QUERN_ASSIGN_OR_RETURN(out.dtype,
                         DTypeOr(kOp, "out_dtype", out_dtype, x.dtype));
  return std::vector<TensorMeta>{out};
}

template <bool kNative>
Bound Gate(const TensorMeta& x, const TensorMeta& gate,
           const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> out,
                         GateShapes(x, gate, out_dtype));
  SigmoidMulSpec spec;
  spec.d = x.extents.back();
  spec.gate_cols = gate.extents.back();
  spec.x_dtype = x.dtype;
  spec.gate_dtype = gate.dtype;
  spec.out_dtype = out[0].dtype;
  QUERN_ASSIGN_OR_RETURN(const SigmoidMulPlan plan,
                         SigmoidMulPlan::Create(spec));
  using Tensors = BoundCalls::Tensors;
  std::unique_ptr<BoundOp> fast(new BoundCalls(
      plan.target(),
      [plan](Tensors t) {
        QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 3));
        return plan.CheckArgs(AsRows(t[0]), AsRows(t[1]), AsRows(t[2]));
      },
      [plan](Tensors t, Executor& executor) {
        plan.Execute(AsRows(t[0]), AsRows(t[1]), AsRows(t[2]), executor);
      }));
  if (!kNative) return fast;
  return std::unique_ptr<BoundOp>(new BoundRowLoop(
      std::move(fast), {RowOf::kMatrix, RowOf::kMatrix, RowOf::kMatrix},
      [spec](absl::Span<const ScalarRow> row) {
        for (int64_t i = 0; i < spec.d; ++i) {
          const double g = double{row[1][spec.gate_cols == 1 ? 0 : i]};
          row[2].Set(
              i, static_cast<float>(double{row[0][i]} / (1.0 + std::exp(-g))));
        }
      }));
}

}  // namespace

absl::Status RegisterGateOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&GateShapes>(
      "sigmoid_mul(Tensor x, Tensor gate, str out_dtype=\"\") -> Tensor",
      &GateExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kOp, {{{"x", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Gate<false>>(kOp, "simd"));
  return r.Add<&Gate<true>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
