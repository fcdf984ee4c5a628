#include "quern/quant/int8_quantize.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/string_view.h"
#include "hwy/base.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/quant/float_format.h"
#include "quern/quant/quantize_rows.h"

namespace quern {
namespace {

constexpr absl::string_view kOp = "int8_quantize";

using quant_internal::F32BitsOf;

constexpr uint32_t kInfinity = quant_internal::kF32Infinity;

bool IsFinite(uint32_t bits) { return (bits & kInfinity) != kInfinity; }

// A denormal is 0, so that no arithmetic meets one.
float Value(uint32_t bits) {
  return hwy::BitCastScalar<float>((bits & kInfinity) == 0 ? 0u : bits);
}

}  // namespace

absl::StatusOr<Int8QuantizePlan> Int8QuantizePlan::Create(
    const Int8QuantizeSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  if (spec.granularity == Int8Granularity::kPerToken) {
    if (!(spec.scale == 1.0f) || spec.zero_point != 0) {
      return InvalidArgument(kOp, "scale=", spec.scale,
                             ", zero_point=", spec.zero_point,
                             "; need 1 and 0 per token, where each row has "
                             "its own");
    }
  } else {
    if (!(kMinScale <= spec.scale && spec.scale <= kMaxScale)) {
      return InvalidArgument(kOp, "scale=", spec.scale,
                             "; need 2^-125 <= scale <= 2^118");
    }
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, "zero_point", spec.zero_point, -128, 127));
    if (spec.zero_points == Int8ZeroPoint::kNone && spec.zero_point != 0) {
      return InvalidArgument(kOp, "zero_point=", spec.zero_point,
                             "; need 0 without zero points");
    }
  }
  return Int8QuantizePlan(spec, GetInt8QuantizeKernels(spec.dtype));
}

Int8QuantizePlan::Int8QuantizePlan(const Int8QuantizeSpec& spec,
                                   const Int8QuantizeKernels& kernels)
    : spec_(spec),
      kernels_(kernels),
      last_level_bytes_(spec.stores == Stores::kAuto ? LastLevelBytes() : 0) {}

absl::Status Int8QuantizePlan::CheckArgs(
    const AnyTensorView& x, MatrixView<int8_t> q, VectorView<float> scales,
    VectorView<int32_t> zero_points) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", x, spec_.dtype, {kAnyExtent, kAnyExtent}));
  const int64_t m = x.extent(0), k = x.extent(1);
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "q", q, DType::kI8, {m, k}));
  const bool per_token = spec_.granularity == Int8Granularity::kPerToken;
  const int64_t count = per_token ? m : 0;
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "size of scales", scales.extent(0), count,
                 per_token ? "x has rows" : "the spec has the scale"));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "scales", scales, DType::kF32, {count}));
  const bool zeros = per_token && spec_.zero_points == Int8ZeroPoint::kUsed;
  const int64_t zero_count = zeros ? m : 0;
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "size of zero_points",
                                   zero_points.extent(0), zero_count,
                                   zeros ? "x has rows" : "there are none"));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "zero_points", zero_points, DType::kI32, {zero_count}));
  const std::pair<absl::string_view, AnyTensorView> views[] = {
      {"x", x}, {"q", q}, {"scales", scales}, {"zero_points", zero_points}};
  for (size_t a = 0; a < std::size(views); ++a) {
    for (size_t b = a + 1; b < std::size(views); ++b) {
      QUERN_RETURN_IF_ERROR(CheckApart(kOp, views[a].first, views[a].second,
                                       views[b].first, views[b].second));
    }
  }
  return absl::OkStatus();
}

uint32_t Int8QuantizePlan::MaxCode(const void* x, int64_t k) const noexcept {
  return kernels_.max_abs(x, static_cast<size_t>(k));
}

Int8QuantizePlan::Terms Int8QuantizePlan::TermsOf(
    uint32_t max_code) const noexcept {
  if (spec_.granularity == Int8Granularity::kPerTensor) {
    return {spec_.scale, 1.0f / spec_.scale, spec_.zero_point};
  }
  QUERN_DCHECK(spec_.zero_points == Int8ZeroPoint::kNone);
  const uint32_t bits = F32BitsOf(spec_.dtype, max_code);
  if (!IsFinite(bits)) {
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f, 0};
  }
  const float max = Value(bits);
  if (max == 0.0f) return {1.0f, 1.0f, 0};
  const float scale = std::max(max / 127.0f, kMinScale);
  return {scale, 1.0f / scale, 0};
}

Int8QuantizePlan::Terms Int8QuantizePlan::AsymmetricTerms(const void* x,
                                                          int64_t k) const {
  uint32_t min_code = 0;
  uint32_t max_code = 0;
  kernels_.min_max(x, static_cast<size_t>(k), &min_code, &max_code);
  const uint32_t min_bits = F32BitsOf(spec_.dtype, min_code);
  const uint32_t max_bits = F32BitsOf(spec_.dtype, max_code);
  if (!IsFinite(min_bits) || !IsFinite(max_bits)) {
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f, 0};
  }
  const float min = Value(min_bits);
  const float max = Value(max_bits);
  if (min == 0.0f && max == 0.0f) return {1.0f, 1.0f, 0};

  Terms terms = {};
  // In double, where max - min cannot overflow.
  terms.scale = std::max(
      static_cast<float>((static_cast<double>(max) - static_cast<double>(min)) /
                         255.0),
      kMinScale);
  terms.inverse = 1.0f / terms.scale;
  // In [-255, 0]; exact in double before it is rounded, as in the kernels.
  const double steps = static_cast<double>(min) * terms.inverse;
  terms.zero_point = -128 - static_cast<int32_t>(std::nearbyint(steps));
  return terms;
}

void Int8QuantizePlan::Part(const void* x, int64_t k, const Terms& terms,
                            const Target& target) const {
  const size_t n = static_cast<size_t>(k);
  if (spec_.granularity == Int8Granularity::kPerTensor) {
    kernels_.quantize_any(x, n, terms.inverse, terms.zero_point, target.flip,
                          target.next_x, target.stream, target.q);
  } else if (terms.inverse == 0.0f) {  // not finite
    std::memset(target.q, target.flip, n);
  } else {
    kernels_.quantize(x, n, terms.inverse, terms.zero_point, target.flip,
                      target.next_x, target.stream, target.q);
  }
}

void Int8QuantizePlan::QuantizePart(const void* x, int64_t k,
                                    const Terms& terms,
                                    int8_t* q) const noexcept {
  Part(x, k, terms, {q, x, 0, false});
}

// All of one row but where its scale and zero point go.
Int8QuantizePlan::Terms Int8QuantizePlan::Row(const void* x, int64_t k,
                                              const Target& target) const {
  const bool per_token = spec_.granularity == Int8Granularity::kPerToken;
  const Terms terms = per_token && spec_.zero_points == Int8ZeroPoint::kUsed
                          ? AsymmetricTerms(x, k)
                          : TermsOf(per_token ? MaxCode(x, k) : 0);
  Part(x, k, terms, target);
  return terms;
}

void Int8QuantizePlan::QuantizeRow(const void* x, int64_t k, int8_t* q,
                                   float* scale,
                                   int32_t* zero_point) const noexcept {
  QUERN_DCHECK(zero_point != nullptr ||
               spec_.zero_points == Int8ZeroPoint::kNone);
  const Terms terms = Row(x, k, {q, x, 0, false});
  *scale = terms.scale;
  if (zero_point != nullptr) *zero_point = terms.zero_point;
}

void Int8QuantizePlan::QuantizeRowU8(const void* x, int64_t k,
                                     uint8_t* q_plus_128, float* scale,
                                     int32_t* zero_point) const noexcept {
  QUERN_DCHECK(zero_point != nullptr ||
               spec_.zero_points == Int8ZeroPoint::kNone);
  const Terms terms = Row(x, k, {q_plus_128, x, 0x80, false});
  *scale = terms.scale;
  if (zero_point != nullptr) *zero_point = terms.zero_point;
}

void Int8QuantizePlan::Execute(const AnyTensorView& x, MatrixView<int8_t> q,
                               VectorView<float> scales,
                               VectorView<int32_t> zero_points,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, q, scales, zero_points));
  const int64_t m = x.extent(0), k = x.extent(1);
  // Rows of nothing have terms per token alone.
  if (m == 0 || (k == 0 && scales.extent(0) == 0)) return;
  const uint8_t* const data = static_cast<const uint8_t*>(x.data());
  const int64_t x_stride_bytes =
      x.RowStride() * static_cast<int64_t>(SizeOf(spec_.dtype));
  const int64_t q_stride = q.RowStride();
  const bool stream = quant_internal::StreamsCodes(spec_.stores, spec_.dtype, m,
                                                   k, last_level_bytes_);
  const int64_t rows_ahead =
      quant_internal::RowsAhead(k * static_cast<int64_t>(SizeOf(spec_.dtype)));

  const auto rows = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* row = data + i * x_stride_bytes;
      const uint8_t* next =
          data + std::min(i + rows_ahead, end - 1) * x_stride_bytes;
      const Terms terms =
          Row(row, k, {q.data() + i * q_stride, next, 0, stream});
      if (scales.extent(0) != 0) scales.data()[i] = terms.scale;
      if (zero_points.extent(0) != 0) {
        zero_points.data()[i] = terms.zero_point;
      }
    }
    if (stream) kernels_.flush();
  };
  ParallelRowRanges(executor, m, k, quant_internal::kTasksPerWorker, rows);
}

}  // namespace quern
