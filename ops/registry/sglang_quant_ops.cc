#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/sglang_ops.h"
#include "quern/quant/convert.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;

constexpr char kCopy[] = "copy_stub";
constexpr char kQuantise[] = "per_token_quant_int8_cpu";
constexpr auto kFloats = {DType::kF32, DType::kBF16, DType::kF16};

// The tensors are out, input.
Metas CopyShapes(const MutatedMeta& out, const TensorMeta& input) {
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kCopy, "input", input.dtype, kFloats));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kCopy, "out", out.dtype, kFloats));
  QUERN_RETURN_IF_ERROR(LastExtent(kCopy, "input", input).status());
  if (out.extents == input.extents) return std::vector<TensorMeta>();
  return InvalidArgument(kCopy, "out has another shape than input");
}
template <bool kNative>
Bound MakeCopy(const MutatedMeta& out, const TensorMeta& input) {
  QUERN_RETURN_IF_ERROR(CopyShapes(out, input).status());
  ConvertSpec spec;
  spec.from = input.dtype;
  spec.to = out.dtype;
  const auto plan = ConvertPlan::Create(spec);
  if (!plan.ok()) return OfOp(kCopy, plan.status());
  return std::unique_ptr<BoundOp>(new BoundCalls(
      kNative ? "scalar" : plan->target(),
      [plan = *plan](Tensors t) -> absl::Status {
        QUERN_RETURN_IF_ERROR(CheckTensorCount(kCopy, t, 2));
        return OfOp(kCopy, plan.CheckArgs(AsRows(t[1]), AsRows(t[0])));
      },
      [plan = *plan](Tensors t, Executor& executor) {
        const AnyTensorView in = AsRows(t[1]), to = AsRows(t[0]);
        if (!kNative) return plan.Execute(in, to, executor);
        const int64_t rows = in.rank() == 1 ? 1 : in.extent(0);
        for (int64_t r = 0; r < rows; ++r) {
          const ScalarRow from(in, r), row(to, r);
          for (int64_t i = 0; i < in.extent(in.rank() - 1); ++i) {
            row.Set(i, from[i]);
          }
        }
      }));
}

// The tensors are mat1, q, scales.
Metas QuantiseShapes(const TensorMeta& mat1) {
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kQuantise, "mat1", mat1.dtype, kFloats));
  if (mat1.extents.size() < 2) {
    return InvalidArgument(kQuantise, "mat1 has rank ", mat1.extents.size(),
                           "; need 2 or more");
  }
  QUERN_ASSIGN_OR_RETURN(const int64_t rows,
                         LeadingRows(kQuantise, "mat1", mat1));
  return std::vector<TensorMeta>{{DType::kU8, mat1.extents},
                                 {DType::kF32, {rows}}};
}
absl::Status CheckQuantise(DType dtype, Tensors t) {
  QUERN_RETURN_IF_ERROR(CheckTensorCount(kQuantise, t, 3));
  const AnyTensorView x = AsRows(t[0]), q = AsRows(t[1]);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kQuantise, "mat1", x, dtype, {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kQuantise, "out0", q, DType::kU8,
                                    {x.extent(0), x.extent(1)}));
  return CheckOutput(kQuantise, "out1", t[2], DType::kF32, {x.extent(0)});
}
// One row in double, as the reference of quant/int8_quantize.h has it.
void QuantiseRow(const ScalarRow& x, int64_t k, uint8_t* q, float* scale) {
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < k; ++i) {
    finite = finite && std::isfinite(x[i]);
    most = std::max(most, std::abs(x[i]));
  }
  *scale = std::max(most / 127.0f, Int8QuantizePlan::kMinScale);
  if (most < std::numeric_limits<float>::min()) *scale = 1;
  if (!finite) *scale = std::numeric_limits<float>::quiet_NaN();
  const double inverse = finite ? double{1.0f / *scale} : 0.0;
  for (int64_t i = 0; i < k; ++i) {
    const double code = finite ? std::nearbyint(double{x[i]} * inverse) : 0.0;
    q[i] = static_cast<uint8_t>(
        128 + static_cast<int>(std::min(127.0, std::max(-127.0, code))));
  }
}
template <bool kNative>
Bound MakeQuantise(const TensorMeta& mat1) {
  QUERN_RETURN_IF_ERROR(QuantiseShapes(mat1).status());
  Int8QuantizeSpec spec;
  spec.dtype = mat1.dtype;
  const auto plan = Int8QuantizePlan::Create(spec);
  if (!plan.ok()) return OfOp(kQuantise, plan.status());
  return std::unique_ptr<BoundOp>(new BoundCalls(
      kNative ? "scalar" : plan->target(),
      [dtype = mat1.dtype](Tensors t) { return CheckQuantise(dtype, t); },
      [plan = *plan](Tensors t, Executor& executor) {
        const AnyTensorView x = AsRows(t[0]), q = AsRows(t[1]);
        const int64_t rows = x.extent(0), k = x.extent(1);
        // The stride of a single row is meaningless and is not used.
        const int64_t x_bytes = (rows > 1 ? x.stride(0) : 0) *
                                static_cast<int64_t>(SizeOf(x.dtype()));
        const int64_t q_stride = rows > 1 ? q.stride(0) : 0;
        const auto* const from = static_cast<const uint8_t*>(x.data());
        auto* const to = static_cast<uint8_t*>(q.mutable_data());
        auto* const scales = static_cast<float*>(t[2].mutable_data());
        const auto row = [&](int64_t m, int /*worker*/) {
          if (kNative) {
            QuantiseRow(ScalarRow(x, m), k, to + m * q_stride, scales + m);
          } else {
            plan.QuantizeRowU8(from + m * x_bytes, k, to + m * q_stride,
                               scales + m, nullptr);
          }
        };
        executor.ParallelFor(rows, row);
      }));
}

NamedArgs CopyExample(DType dtype) {
  return {{"out", TensorMeta{dtype == DType::kF32 ? DType::kBF16 : DType::kF32,
                             {4, 64}}},
          {"input", TensorMeta{dtype, {4, 64}}}};
}
NamedArgs QuantiseExample(DType dtype) {
  return {{"mat1", TensorMeta{dtype, {4, 64}}}};
}

}  // namespace

absl::Status RegisterSglangQuantOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&CopyShapes>(
      "copy_stub(Tensor(a0!) out, Tensor input) -> ()", &CopyExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kCopy, {{{"input", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeCopy<false>>(kCopy, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeCopy<true>>(kCopy, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&QuantiseShapes>(
      "per_token_quant_int8_cpu(Tensor mat1) -> (Tensor, Tensor)",
      &QuantiseExample));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeQuantise<false>>(kQuantise, kSimd));
  return r.Add<&MakeQuantise<true>>(kQuantise, kReference);
}

}  // namespace quern
