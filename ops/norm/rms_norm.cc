#include "ops/norm/rms_norm.h"

#include <cmath>
#include <cstddef>

#include "core/check_args.h"
#include "core/status_macros.h"
#include "ops/parallel_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "rms_norm";

// The matrix behind a view: where row i begins.
struct Rows {
  explicit Rows(const AnyTensorView& v)
      : data(static_cast<char*>(const_cast<void*>(v.data()))),
        // The stride of a lone row may be any number.
        row_bytes(v.extent(0) > 1
                      ? v.stride(0) * static_cast<int64_t>(SizeOf(v.dtype()))
                      : 0) {}
  void* operator[](int64_t i) const { return data + i * row_bytes; }

  char* data;
  int64_t row_bytes;
};

// rms^-1 from the sum of squares.
float Scale(float sum_squares, const RmsNormSpec& spec) {
  return 1.0f /
         std::sqrt(sum_squares / static_cast<float>(spec.hidden) + spec.eps);
}

}  // namespace

absl::StatusOr<RmsNormPlan> RmsNormPlan::Create(const RmsNormSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "hidden", spec.hidden, 1));
  if (!(spec.eps >= 0.0f && std::isfinite(spec.eps))) {
    return InvalidArgument(kOp, "eps=", spec.eps, "; need finite eps >= 0");
  }
  constexpr DType kChoices[] = {DType::kF32, DType::kBF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "x_dtype", spec.x_dtype, kChoices));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype, kChoices));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kChoices));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "residual_dtype", spec.residual_dtype, kChoices));
  return RmsNormPlan(
      spec, GetRmsNormKernels(spec.x_dtype, spec.weight_dtype, spec.out_dtype,
                              spec.residual_dtype));
}

absl::Status RmsNormPlan::CheckArgs(const AnyTensorView& x,
                                    const AnyTensorView& weight,
                                    const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", x, spec_.x_dtype, {kAnyExtent, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weight", weight, spec_.weight_dtype, {spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.out_dtype,
                                    {x.extent(0), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", weight, "out", out));
  return CheckInPlaceOrApart(kOp, "x", x, "out", out);
}

absl::Status RmsNormPlan::CheckAddArgs(const RmsNormArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckArgs(args.x, args.weight, args.out));
  const int64_t rows = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "residual", args.residual,
                                   spec_.residual_dtype, {rows, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "residual_out", args.residual_out,
                                    spec_.residual_dtype,
                                    {rows, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", args.weight, "residual_out",
                                   args.residual_out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "residual_out", args.residual_out, "out", args.out));
  QUERN_RETURN_IF_ERROR(
      CheckInPlaceOrApart(kOp, "x", args.x, "residual_out", args.residual_out));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "residual", args.residual,
                                            "residual_out", args.residual_out));
  return CheckInPlaceOrApart(kOp, "residual", args.residual, "out", args.out);
}

void RmsNormPlan::Execute(const AnyTensorView& x, const AnyTensorView& weight,
                          const AnyTensorView& out,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, weight, out));
  const Rows x_rows(x), out_rows(out);
  const size_t n = static_cast<size_t>(spec_.hidden);
  ParallelRows(
      executor, x.extent(0), 2 * spec_.hidden, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const float scale = Scale(kernels_.sum_squares(x_rows[i], n), spec_);
          kernels_.scale_x(x_rows[i], weight.data(), scale, out_rows[i], n);
        }
      });
}

void RmsNormPlan::ExecuteAdd(const RmsNormArgs& args,
                             Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckAddArgs(args));
  const Rows x(args.x), residual(args.residual);
  const Rows residual_out(args.residual_out), out(args.out);
  const size_t n = static_cast<size_t>(spec_.hidden);
  ParallelRows(
      executor, args.x.extent(0), 4 * spec_.hidden,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const float scale = Scale(
              kernels_.add_sum_squares(x[i], residual[i], residual_out[i], n),
              spec_);
          kernels_.scale_residual(residual_out[i], args.weight.data(), scale,
                                  out[i], n);
        }
      });
}

}  // namespace quern
