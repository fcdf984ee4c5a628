#include "quern/ops/norm/layer_norm.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "quern/core/check_args.h"
#include "quern/core/prefetch.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "layer_norm";

// Rows whose squares / hidden + eps is below this are computed in double. In
// f32 a square below 2^-126 rounds to a multiple of 2^-149, which is an error
// of at most 2^-150. The mean of the squares has no larger error from that, and
// it is at most 2^-50 of a variance from this bound on.
constexpr double kMinVariance = 0x1p-100;

double At(DType dtype, const char* row, size_t i) {
  if (dtype == DType::kF32) {
    return double{reinterpret_cast<const float*>(row)[i]};
  }
  if (dtype == DType::kBF16) {
    return double{ToF32(reinterpret_cast<const BFloat16*>(row)[i])};
  }
  return double{ToF32(reinterpret_cast<const Float16*>(row)[i])};
}

void Set(DType dtype, char* row, size_t i, float v) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(row)[i] = v;
  } else if (dtype == DType::kBF16) {
    reinterpret_cast<BFloat16*>(row)[i] = FromF32<BFloat16>(v);
  } else {
    reinterpret_cast<Float16*>(row)[i] = FromF32<Float16>(v);
  }
}

}  // namespace

absl::StatusOr<LayerNormPlan> LayerNormPlan::Create(const LayerNormSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "eps", spec.eps, "finite eps"));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kFloatDTypes));
  return LayerNormPlan(spec);
}

LayerNormPlan::LayerNormPlan(const LayerNormSpec& spec)
    : spec_(spec),
      kernels_(GetLayerNormKernels(DType::kF32)),
      whole_(GetLayerNormKernels(spec.dtype)),
      x_blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)),
      parameter_blocks_(GetRowBlockKernels(spec.weight_dtype, spec.out_dtype)),
      stream_from_bytes_(StreamFrom(Stores::kAuto, /*auto_streams=*/true)) {}

absl::Status LayerNormPlan::CheckArgs(const LayerNormArgs& args) const {
  const AnyTensorView &x = args.x, &out = args.out;
  if (x.rank() == 3 && !spec_.residual) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "x", x, spec_.dtype,
                                     {kAnyExtent, kAnyExtent, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out", out, spec_.out_dtype,
                    {x.extent(0), x.extent(1), spec_.hidden}));
  } else {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "x", x, spec_.dtype, {kAnyExtent, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.out_dtype,
                                      {x.extent(0), spec_.hidden}));
  }
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  const auto check = [&](bool given, const char* name,
                         const AnyTensorView& v) -> absl::Status {
    if (!given) return absl::OkStatus();
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, name, v, spec_.weight_dtype, {spec_.hidden}));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, v, "out", out));
    if (!spec_.residual) return absl::OkStatus();
    return CheckApart(kOp, name, v, "residual_out", args.residual_out);
  };
  if (spec_.residual) {
    const int64_t rows = x.extent(0);
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "residual", args.residual,
                                     spec_.dtype, {rows, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "residual_out", args.residual_out,
                                      spec_.dtype, {rows, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "residual_out", args.residual_out, "out", out));
    QUERN_RETURN_IF_ERROR(
        CheckInPlaceOrApart(kOp, "x", x, "residual_out", args.residual_out));
    QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(
        kOp, "residual", args.residual, "residual_out", args.residual_out));
    QUERN_RETURN_IF_ERROR(
        CheckInPlaceOrApart(kOp, "residual", args.residual, "out", out));
  }
  QUERN_RETURN_IF_ERROR(check(spec_.weight, "weight", args.weight));
  return check(spec_.bias, "bias", args.bias);
}

void LayerNormPlan::Execute(const LayerNormArgs& args,
                            Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  if (IsEmpty(args.x)) return;
  const bool by_head = args.x.rank() == 3;
  const int64_t heads = by_head ? args.x.extent(1) : 1;
  const bool stream = Streams(args);
  ParallelRows(executor, args.x.extent(0), 4 * heads * spec_.hidden,
               [&](int64_t begin, int64_t end) {
                 if (!by_head) {
                   return NormaliseRows(args.x, args.out, args, begin, end,
                                        stream);
                 }
                 for (int64_t t = begin; t < end; ++t) {
                   NormaliseRows(HeadsOf(args.x, t), HeadsOf(args.out, t), args,
                                 0, heads, stream);
                 }
               });
}

// Whether one kernel reads x, the parameters and writes out.
bool LayerNormPlan::OneDType() const {
  const bool parameters = spec_.weight || spec_.bias;
  return spec_.out_dtype == spec_.dtype &&
         (!parameters || spec_.weight_dtype == spec_.dtype);
}

// Whether out is stored past the caches. In place, reading x has put out into
// them; with a residual there are two results.
// Neither that nor several dtypes were measured.
bool LayerNormPlan::Streams(const LayerNormArgs& args) const {
  const auto row_bytes = [this](DType dtype) {
    return spec_.hidden * static_cast<int64_t>(SizeOf(dtype));
  };
  const int64_t out_bytes = row_bytes(spec_.out_dtype);
  const int64_t rows =
      args.x.extent(0) * (args.x.rank() == 3 ? args.x.extent(1) : 1);
  return !spec_.residual && OneDType() && args.x.data() != args.out.data() &&
         out_bytes >= kMinStreamRowBytes &&
         rows * (row_bytes(spec_.dtype) + out_bytes) >= stream_from_bytes_;
}

// Normalises the rows [begin, end) of x into out.
void LayerNormPlan::NormaliseRows(const AnyTensorView& x,
                                  const AnyTensorView& out,
                                  const LayerNormArgs& args, int64_t begin,
                                  int64_t end, bool stream) const {
  const bool add = spec_.residual;
  const RowsOf xs(x), outs(out);
  const RowsOf residual(add ? args.residual : x);
  const RowsOf residual_out(add ? args.residual_out : x);
  for (int64_t t = begin; t < end; ++t) {
    Normalise(
        {xs[t], add ? residual[t] : nullptr, add ? residual_out[t] : nullptr,
         outs[t], t + 1 < end ? xs[t + 1] : nullptr, stream},
        args);
  }
  if (stream) parameter_blocks_.flush();
}

void LayerNormPlan::Normalise(const Row& row, const LayerNormArgs& args) const {
  const auto n = static_cast<size_t>(spec_.hidden);
  const size_t size = SizeOf(spec_.dtype);
  const size_t parameter = SizeOf(spec_.weight_dtype);
  alignas(64) float v[kRowBlock];
  alignas(64) float other[kRowBlock];
  const auto load = [&](size_t i, size_t count) {
    x_blocks_.load(row.x + i * size, count, v);
    if (row.residual == nullptr) return;
    x_blocks_.load(row.residual + i * size, count, other);
    kernels_.add(other, count, v);
  };
  // Blocks have means of their own, and what they are off the first one's is
  // added in double.
  double first = 0, off = 0, off_squares = 0, squares = 0;
  for (size_t i = 0; i < n; i += kRowBlock) {
    const size_t count = std::min(kRowBlock, n - i);
    LayerNormMoments block = {};
    if (row.residual == nullptr) {
      block = whole_.moments(row.x + i * size, count);
    } else {
      load(i, count);
      block = kernels_.moments(v, count);
    }
    const auto numbers = static_cast<double>(count);
    // The block's mean has the error of an f32 sum. What the deviations from it
    // add up to corrects it.
    const double rest = double{block.rest} / numbers;
    const double mean = double{block.mean} + rest;
    if (i == 0) first = mean;
    const double beside = mean - first;
    off += numbers * beside;
    off_squares += numbers * beside * beside;
    squares += std::max(double{block.squares} - rest * double{block.rest}, 0.0);
  }
  const auto hidden = static_cast<double>(spec_.hidden);
  off /= hidden;
  squares += std::max(off_squares - off * off * hidden, 0.0);
  if (!std::isfinite(squares) ||
      squares / hidden + double{spec_.eps} < kMinVariance) {
    return NormaliseInDouble(row, args);
  }
  const double mean = first + off;
  LayerNormScale scale;
  scale.mean = static_cast<float>(mean);
  scale.rest = static_cast<float>(mean - double{scale.mean});
  scale.scale =
      static_cast<float>(1.0 / std::sqrt(squares / hidden + double{spec_.eps}));
  const auto* const weight = static_cast<const char*>(args.weight.data());
  const auto* const bias = static_cast<const char*>(args.bias.data());
  const size_t out_size = SizeOf(spec_.out_dtype);
  const void* const no_weight = nullptr;
  if (row.residual == nullptr && OneDType()) {
    return ForEachBlock(n, row.out, out_size, row.stream,
                        [&](size_t i, size_t count, bool stream) {
                          if (row.next != nullptr) {
                            PrefetchL2(row.next + i * size, count * size);
                          }
                          whole_.scale(
                              scale, row.x + i * size,
                              spec_.weight ? weight + i * parameter : no_weight,
                              spec_.bias ? bias + i * parameter : no_weight,
                              count, stream, row.out + i * out_size);
                        });
  }
  alignas(64) float more[kRowBlock];
  for (size_t i = 0; i < n; i += kRowBlock) {
    const size_t count = std::min(kRowBlock, n - i);
    load(i, count);
    // residual_out may be x or residual, which are read no more.
    if (row.residual_out != nullptr) {
      x_blocks_.store(v, count, /*stream=*/false, row.residual_out + i * size);
    }
    if (spec_.weight) {
      parameter_blocks_.load(weight + i * parameter, count, other);
    }
    if (spec_.bias) {
      parameter_blocks_.load(bias + i * parameter, count, more);
    }
    kernels_.scale(scale, v, spec_.weight ? other : nullptr,
                   spec_.bias ? more : nullptr, count, /*stream=*/false, v);
    parameter_blocks_.store(v, count, /*stream=*/false, row.out + i * out_size);
  }
}

// Normalises a row whose sums leave the range of f32 at either end, or one with
// NaN or infinity, which becomes NaN.
void LayerNormPlan::NormaliseInDouble(const Row& row,
                                      const LayerNormArgs& args) const {
  const auto n = static_cast<size_t>(spec_.hidden);
  const auto h = [&](size_t i) {
    const double v = At(spec_.dtype, row.x, i);
    return row.residual == nullptr ? v : v + At(spec_.dtype, row.residual, i);
  };
  double sum = 0, squares = 0;
  for (size_t i = 0; i < n; ++i) sum += h(i);
  const double mean = sum / static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) squares += (h(i) - mean) * (h(i) - mean);
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) +
                                       static_cast<double>(spec_.eps));
  const auto* const weight = static_cast<const char*>(args.weight.data());
  const auto* const bias = static_cast<const char*>(args.bias.data());
  for (size_t i = 0; i < n; ++i) {
    const double v = h(i);
    double y = (v - mean) * scale;
    if (spec_.weight) y *= At(spec_.weight_dtype, weight, i);
    if (spec_.bias) y += At(spec_.weight_dtype, bias, i);
    if (row.residual_out != nullptr) {
      Set(spec_.dtype, row.residual_out, i, static_cast<float>(v));
    }
    Set(spec_.out_dtype, row.out, i, static_cast<float>(y));
  }
}

}  // namespace quern
