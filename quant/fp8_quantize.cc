#include "quern/quant/fp8_quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <limits>

#include "hwy/base.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/quant/float_format.h"
#include "quern/quant/int8_quantize_kernels.h"
#include "quern/quant/quantize_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "fp8_quantize";

using quant_internal::kTasksPerWorker;
using quant_internal::RowsAhead;

// The smallest power of two >= s, a normal number: the exponent goes up where
// the mantissa is not 0.
float PowerOfTwo(float s) {
  const uint32_t bits = hwy::BitCastScalar<uint32_t>(s);
  return hwy::BitCastScalar<float>((bits + 0x7FFFFFu) & 0x7F800000u);
}

// Where row i begins. Rows of no elements need no memory.
const char* RowOf(const AnyTensorView& x, int64_t i) {
  return static_cast<const char*>(x.data()) +
         i * x.RowStride() * static_cast<int64_t>(SizeOf(x.dtype()));
}
template <typename T>
T* RowOf(const MatrixView<T>& v, int64_t i) {
  return v.data() + i * v.RowStride();
}

}  // namespace

Fp8QuantizePlan::Fp8QuantizePlan(const Fp8QuantizeSpec& spec)
    : spec_(spec),
      kernels_(GetFp8QuantizeKernels(spec.dtype)),
      max_code_(GetInt8QuantizeKernels(spec.dtype).max_abs),
      last_level_bytes_(spec.stores == Stores::kAuto ? LastLevelBytes() : 0) {}

absl::StatusOr<Fp8QuantizePlan> Fp8QuantizePlan::Create(
    const Fp8QuantizeSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  if (spec.granularity == Fp8Granularity::kGroup) {
    QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "group", spec.group, 1));
  }
  if (spec.granularity == Fp8Granularity::kStatic) {
    QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "block_rows", spec.block_rows, 0));
    QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "block_cols", spec.block_cols, 0));
  }
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "max_abs", spec.max_abs));
  if (spec.max_abs > 0.0f && spec.granularity != Fp8Granularity::kToken) {
    return InvalidArgument(kOp, "max_abs=", spec.max_abs,
                           "; need 0 unless per token");
  }
  return Fp8QuantizePlan(spec);
}

absl::Status Fp8QuantizePlan::CheckMatrices(const AnyTensorView& x,
                                            MatrixView<Float8E4M3> q) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", x, spec_.dtype, {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "q", q, DType::kF8E4M3, {x.extent(0), x.extent(1)}));
  return CheckApart(kOp, "x", x, "q", q);
}

absl::Status Fp8QuantizePlan::CheckArgs(const AnyTensorView& x,
                                        MatrixView<Float8E4M3> q,
                                        MatrixView<float> scales) const {
  if (spec_.granularity == Fp8Granularity::kStatic) {
    return InvalidArgument(kOp, "scales are static; need ExecuteStatic");
  }
  QUERN_RETURN_IF_ERROR(CheckMatrices(x, q));
  const bool tensor = spec_.granularity == Fp8Granularity::kTensor;
  const bool group = spec_.granularity == Fp8Granularity::kGroup;
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "scales", scales, DType::kF32,
                  {tensor ? 1 : x.extent(0),
                   group ? DivCeil(x.extent(1), spec_.group) : 1}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "x", x, "scales", scales));
  return CheckApart(kOp, "q", q, "scales", scales);
}

absl::Status Fp8QuantizePlan::CheckStaticArgs(const AnyTensorView& x,
                                              MatrixView<const float> scales,
                                              MatrixView<Float8E4M3> q) const {
  if (spec_.granularity != Fp8Granularity::kStatic) {
    return InvalidArgument(kOp, "scales are dynamic; need Execute");
  }
  QUERN_RETURN_IF_ERROR(CheckMatrices(x, q));
  const auto blocks = [](int64_t extent, int64_t block) {
    return block == 0 ? int64_t{1} : DivCeil(extent, block);
  };
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "scales", scales, DType::kF32,
                                   {blocks(x.extent(0), spec_.block_rows),
                                    blocks(x.extent(1), spec_.block_cols)}));
  for (int64_t i = 0; i < scales.extent(0); ++i) {
    for (int64_t j = 0; j < scales.extent(1); ++j) {
      const float s = RowOf(scales, i)[j];
      if (!(0x1p-125f <= s && s <= 0x1p125f)) {
        return InvalidArgument(kOp, "scales[", i, ", ", j, "]=", s,
                               "; need 2^-125 <= scale <= 2^125");
      }
    }
  }
  return CheckApart(kOp, "scales", scales, "q", q);
}

uint32_t Fp8QuantizePlan::MaxCode(const void* x, int64_t k) const noexcept {
  return max_code_(x, static_cast<size_t>(k));
}

// NaN of a NaN or an infinity.
float Fp8QuantizePlan::ScaleOf(uint32_t max_code) const noexcept {
  const uint32_t bits = quant_internal::F32BitsOf(spec_.dtype, max_code);
  if (bits >= quant_internal::kF32Infinity) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  float max_abs = hwy::BitCastScalar<float>(bits);
  if (spec_.max_abs > 0.0f) max_abs = std::min(max_abs, spec_.max_abs);
  const float scale = std::max(max_abs / kMax, kMinScale);
  return spec_.format == Fp8ScaleFormat::kF32 ? scale : PowerOfTwo(scale);
}

void Fp8QuantizePlan::QuantizePart(const void* x, int64_t k, float scale,
                                   Float8E4M3* q) const noexcept {
  Quantize(x, k, scale, x, false, q);
}

void Fp8QuantizePlan::Quantize(const void* x, int64_t n, float scale,
                               const void* next, bool stream,
                               Float8E4M3* q) const {
  const bool fits = spec_.granularity != Fp8Granularity::kStatic &&
                    spec_.max_abs == 0.0f && !std::isnan(scale);
  (fits ? kernels_.quantize : kernels_.quantize_any)(
      x, static_cast<size_t>(n), 1.0f / scale, next, stream, q);
}

float Fp8QuantizePlan::Dynamic(const void* x, int64_t n, const void* next,
                               bool stream, Float8E4M3* q) const {
  const float scale = ScaleOf(MaxCode(x, n));
  Quantize(x, n, scale, next, stream, q);
  return scale;
}

float Fp8QuantizePlan::QuantizeRow(const void* x, int64_t k,
                                   Float8E4M3* q) const noexcept {
  QUERN_DCHECK(spec_.granularity == Fp8Granularity::kToken);
  return Dynamic(x, k, x, false, q);
}

bool Fp8QuantizePlan::Streams(int64_t m, int64_t k) const {
  return quant_internal::StreamsCodes(spec_.stores, spec_.dtype, m, k,
                                      last_level_bytes_);
}

void Fp8QuantizePlan::Execute(const AnyTensorView& x, MatrixView<Float8E4M3> q,
                              MatrixView<float> scales,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, q, scales));
  const int64_t k = x.extent(1);
  // Rows of nothing have a scale per token alone.
  const int64_t m =
      k > 0 || spec_.granularity == Fp8Granularity::kToken ? x.extent(0) : 0;
  float tensor_scale = 0.0f;
  if (spec_.granularity == Fp8Granularity::kTensor) {
    // Magnitudes are ordered as their codes are, NaN above all.
    std::atomic<uint32_t> max_code{0};
    ParallelRowRanges(
        executor, m, k, kTasksPerWorker, [&](int64_t begin, int64_t end) {
          uint32_t mine = 0;
          for (int64_t i = begin; i < end; ++i) {
            mine = std::max(mine, MaxCode(RowOf(x, i), k));
          }
          uint32_t old = max_code.load(std::memory_order_relaxed);
          while (old < mine && !max_code.compare_exchange_weak(
                                   old, mine, std::memory_order_relaxed)) {
          }
        });
    tensor_scale = ScaleOf(max_code.load());
    scales.data()[0] = tensor_scale;
  }
  if (m == 0) return;
  const int64_t size = static_cast<int64_t>(SizeOf(spec_.dtype));
  const int64_t rows_ahead = RowsAhead(k * size);
  const bool stream = Streams(m, k);
  ParallelRowRanges(
      executor, m, k, kTasksPerWorker, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const char* const row = RowOf(x, i);
          const char* const next = RowOf(x, std::min(i + rows_ahead, end - 1));
          Float8E4M3* const to = RowOf(q, i);
          switch (spec_.granularity) {
            case Fp8Granularity::kTensor:
              Quantize(row, k, tensor_scale, next, stream, to);
              break;
            case Fp8Granularity::kGroup:
              for (int64_t g = 0; g * spec_.group < k; ++g) {
                const int64_t at = g * spec_.group;
                RowOf(scales, i)[g] =
                    Dynamic(row + at * size, std::min(spec_.group, k - at),
                            next + at * size, false, to + at);
              }
              break;
            default:
              RowOf(scales, i)[0] = Dynamic(row, k, next, stream, to);
          }
        }
        if (stream) kernels_.flush();
      });
}

void Fp8QuantizePlan::ExecuteStatic(const AnyTensorView& x,
                                    MatrixView<const float> scales,
                                    MatrixView<Float8E4M3> q,
                                    Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckStaticArgs(x, scales, q));
  const int64_t m = x.extent(0), k = x.extent(1);
  if (m == 0 || k == 0) return;
  const int64_t size = static_cast<int64_t>(SizeOf(spec_.dtype));
  const int64_t rows_ahead = RowsAhead(k * size);
  const int64_t cols = spec_.block_cols == 0 ? k : spec_.block_cols;
  const bool stream = Streams(m, k) && cols == k;
  ParallelRowRanges(
      executor, m, k, kTasksPerWorker, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const float* const scale_row =
              RowOf(scales,
                    spec_.block_rows == 0 ? int64_t{0} : i / spec_.block_rows);
          const char* const next = RowOf(x, std::min(i + rows_ahead, end - 1));
          for (int64_t at = 0; at < k; at += cols) {
            Quantize(RowOf(x, i) + at * size, std::min(cols, k - at),
                     scale_row[at / cols], next + at * size, stream,
                     RowOf(q, i) + at);
          }
        }
        if (stream) kernels_.flush();
      });
}

}  // namespace quern
