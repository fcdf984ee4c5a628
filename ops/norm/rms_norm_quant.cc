#include "quern/ops/norm/rms_norm_quant.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/norm/inverse_rms.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"

namespace quern {
namespace {

constexpr char kOp[] = "rms_norm_quant";

// Number of elements of a row that are normalised at a time.
constexpr int64_t kPart = 512;
// Rows of up to this many elements are normalised once: their 16 KiB of results
// are kept while the scale is found. Longer rows are normalised a second time.
constexpr int64_t kKept = 4096;

}  // namespace

absl::StatusOr<RmsNormQuantPlan> RmsNormQuantPlan::Create(
    const RmsNormQuantSpec& spec) {
  RmsNormQuantSpec wanted = spec;
  wanted.norm.out_dtype = DType::kF32;
  QUERN_RETURN_IF_ERROR(RmsNormPlan::Create(wanted.norm).status());
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "q_dtype", spec.q_dtype, {DType::kI8, DType::kF8E4M3}));
  const bool fixed = spec.scale_of == NormScale::kStatic;
  if (!fixed && (!(spec.scale == 1.0f) || spec.zero_point != 0)) {
    return InvalidArgument(kOp, "scale=", spec.scale,
                           ", zero_point=", spec.zero_point,
                           "; need scale=1 and zero_point=0 with kPerToken");
  }
  if (spec.q_dtype == DType::kI8) {
    if (spec.max_abs != 0.0f) {
      return InvalidArgument(kOp, "max_abs=", spec.max_abs,
                             "; need 0 unless fp8 per token");
    }
    Int8QuantizeSpec int8;
    int8.dtype = DType::kF32;
    int8.granularity =
        fixed ? Int8Granularity::kPerTensor : Int8Granularity::kPerToken;
    int8.zero_points =
        spec.zero_point != 0 ? Int8ZeroPoint::kUsed : Int8ZeroPoint::kNone;
    int8.scale = spec.scale;
    int8.zero_point = spec.zero_point;
    QUERN_ASSIGN_OR_RETURN(Int8QuantizePlan plan,
                           Int8QuantizePlan::Create(int8));
    return RmsNormQuantPlan(wanted, std::move(plan), std::nullopt);
  }
  if (spec.zero_point != 0) {
    return InvalidArgument(kOp, "zero_point=", spec.zero_point,
                           "; need 0 unless i8");
  }
  if (!(Int8QuantizePlan::kMinScale <= spec.scale &&
        spec.scale <= Int8QuantizePlan::kMaxScale)) {
    return InvalidArgument(kOp, "scale=", spec.scale,
                           "; need 2^-125 <= scale <= 2^118");
  }
  Fp8QuantizeSpec fp8;
  fp8.dtype = DType::kF32;
  fp8.granularity = fixed ? Fp8Granularity::kStatic : Fp8Granularity::kToken;
  fp8.max_abs = spec.max_abs;
  QUERN_ASSIGN_OR_RETURN(Fp8QuantizePlan plan, Fp8QuantizePlan::Create(fp8));
  return RmsNormQuantPlan(wanted, std::nullopt, std::move(plan));
}

RmsNormQuantPlan::RmsNormQuantPlan(const RmsNormQuantSpec& spec,
                                   std::optional<Int8QuantizePlan> int8,
                                   std::optional<Fp8QuantizePlan> fp8)
    : spec_(spec),
      kernels_(GetRmsNormKernels(spec.norm.x_dtype, spec.norm.weight_dtype,
                                 DType::kF32, spec.norm.residual_dtype)),
      int8_(std::move(int8)),
      fp8_(std::move(fp8)) {}

absl::Status RmsNormQuantPlan::CheckArgs(const RmsNormQuantArgs& args) const {
  const RmsNormSpec& norm = spec_.norm;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", args.x, norm.x_dtype, {kAnyExtent, norm.hidden}));
  const int64_t rows = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "q", args.q, spec_.q_dtype, {rows, norm.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "x", args.x, "q", args.q));
  const bool weighted = norm.weight != NormWeight::kNone;
  if (weighted) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", args.weight,
                                     norm.weight_dtype, {norm.hidden}));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", args.weight, "q", args.q));
  }
  if (spec_.scale_of == NormScale::kStatic) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "scales", args.scales, DType::kF32, {rows}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "x", args.x, "scales", args.scales));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "q", args.q, "scales", args.scales));
  if (!weighted) return absl::OkStatus();
  return CheckApart(kOp, "weight", args.weight, "scales", args.scales);
}

absl::Status RmsNormQuantPlan::CheckAddArgs(
    const RmsNormQuantArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckArgs(args));
  const RmsNormSpec& norm = spec_.norm;
  const int64_t rows = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "residual", args.residual,
                                   norm.residual_dtype, {rows, norm.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "residual_out", args.residual_out,
                                    norm.residual_dtype, {rows, norm.hidden}));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "residual_out", args.residual_out, "q", args.q));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "residual", args.residual, "q", args.q));
  if (norm.weight != NormWeight::kNone) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", args.weight, "residual_out",
                                     args.residual_out));
  }
  if (spec_.scale_of == NormScale::kPerToken) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "residual_out", args.residual_out,
                                     "scales", args.scales));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "residual", args.residual, "scales", args.scales));
  }
  QUERN_RETURN_IF_ERROR(
      CheckInPlaceOrApart(kOp, "x", args.x, "residual_out", args.residual_out));
  return CheckInPlaceOrApart(kOp, "residual", args.residual, "residual_out",
                             args.residual_out);
}

// Quantises one row and returns its scale. From `scale` it takes the weight and
// the rows to prefetch.
float RmsNormQuantPlan::QuantizeRow(const char* h, ScaleRow normalise,
                                    DType h_dtype, RmsNormScale scale,
                                    float sum_squares, char* q) const {
  const RmsNormSpec& norm = spec_.norm;
  const int64_t n = norm.hidden;
  scale.offset = norm.weight == NormWeight::kOnePlus ? norm.shift : 0.0f;
  scale.scale =
      InverseRms(sum_squares, norm.SpanColumns(), norm.eps, h_dtype, h);
  const char* const next = static_cast<const char*>(scale.next);
  const char* const next2 = static_cast<const char*>(scale.next2);
  const char* const weight = static_cast<const char*>(scale.weight);
  const int64_t weight_size = static_cast<int64_t>(SizeOf(norm.weight_dtype));
  const bool keep = n <= kKept;
  alignas(64) float row[kKept];
  // Calls fn(i, count, part) for each part of the row, where part[0, count) is
  // y[i, i + count).
  const auto for_parts = [&](bool normed, const auto& fn) {
    for (int64_t i = 0; i < n; i += kPart) {
      const int64_t count = std::min(kPart, n - i);
      float* const part = row + (keep ? i : 0);
      if (!normed) {
        if (weight != nullptr) scale.weight = weight + i * weight_size;
        const int64_t at = i * static_cast<int64_t>(SizeOf(h_dtype));
        scale.next = next + at;
        if (next2 != nullptr) scale.next2 = next2 + at;
        normalise(h + at, scale, part, static_cast<size_t>(count));
      }
      fn(i, count, part);
    }
  };
  const bool per_token = spec_.scale_of == NormScale::kPerToken;
  uint32_t max_code = 0;
  if (per_token) {
    for_parts(false, [&](int64_t, int64_t count, const float* part) {
      max_code =
          std::max(max_code, int8_.has_value() ? int8_->MaxCode(part, count)
                                               : fp8_->MaxCode(part, count));
    });
  }
  const bool normed = per_token && keep;
  if (int8_.has_value()) {
    const Int8QuantizePlan::Terms terms = int8_->TermsOf(max_code);
    for_parts(normed, [&](int64_t i, int64_t count, const float* part) {
      int8_->QuantizePart(part, count, terms, reinterpret_cast<int8_t*>(q) + i);
    });
    return terms.scale;
  }
  const float fp8_scale = per_token ? fp8_->ScaleOf(max_code) : spec_.scale;
  for_parts(normed, [&](int64_t i, int64_t count, const float* part) {
    fp8_->QuantizePart(part, count, fp8_scale,
                       reinterpret_cast<Float8E4M3*>(q) + i);
  });
  return fp8_scale;
}

void RmsNormQuantPlan::Execute(const RmsNormQuantArgs& args,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const RowsOf x(args.x), q(args.q);
  const bool per_token = spec_.scale_of == NormScale::kPerToken;
  float* const scales =
      per_token ? static_cast<float*>(args.scales.mutable_data()) : nullptr;
  RmsNormScale every = {};
  if (spec_.norm.weight != NormWeight::kNone) every.weight = args.weight.data();
  const size_t span = static_cast<size_t>(spec_.norm.SpanColumns());
  ParallelRows(executor, args.x.extent(0), 4 * spec_.norm.hidden,
               [&](int64_t begin, int64_t end) {
                 RmsNormScale scale = every;
                 for (int64_t i = begin; i < end; ++i) {
                   scale.next = x[std::min(i + 1, end - 1)];
                   const float s = QuantizeRow(
                       x[i], kernels_.scale_x, spec_.norm.x_dtype, scale,
                       kernels_.sum_squares(x[i], span), q[i]);
                   if (per_token) scales[i] = s;
                 }
               });
}

void RmsNormQuantPlan::ExecuteAdd(const RmsNormQuantArgs& args,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckAddArgs(args));
  const RowsOf x(args.x), q(args.q);
  const RowsOf residual(args.residual), residual_out(args.residual_out);
  const bool per_token = spec_.scale_of == NormScale::kPerToken;
  float* const scales =
      per_token ? static_cast<float*>(args.scales.mutable_data()) : nullptr;
  RmsNormScale every = {};
  if (spec_.norm.weight != NormWeight::kNone) every.weight = args.weight.data();
  const size_t n = static_cast<size_t>(spec_.norm.hidden);
  const size_t span = static_cast<size_t>(spec_.norm.SpanColumns());
  const size_t x_size = SizeOf(spec_.norm.x_dtype);
  const size_t r_size = SizeOf(spec_.norm.residual_dtype);
  ParallelRows(executor, args.x.extent(0), 6 * spec_.norm.hidden,
               [&](int64_t begin, int64_t end) {
                 RmsNormScale scale = every;
                 for (int64_t i = begin; i < end; ++i) {
                   const float sum_squares = kernels_.add_sum_squares(
                       x[i], residual[i], residual_out[i], span);
                   if (span < n) {
                     kernels_.add_sum_squares(
                         x[i] + span * x_size, residual[i] + span * r_size,
                         residual_out[i] + span * r_size, n - span);
                   }
                   const int64_t next = std::min(i + 1, end - 1);
                   scale.next = residual[next];
                   scale.next2 = x_size == r_size ? x[next] : nullptr;
                   const float s = QuantizeRow(
                       residual_out[i], kernels_.scale_residual,
                       spec_.norm.residual_dtype, scale, sum_squares, q[i]);
                   if (per_token) scales[i] = s;
                 }
               });
}

}  // namespace quern
