#include "quern/gemm/onednn/scaled_linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/cache_stats.h"
#include "quern/gemm/onednn/check_args.h"
#include "quern/gemm/onednn/packed_matmul.h"
#include "quern/gemm/onednn/scaled_epilogue_kernels.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/packing/vnni_pack.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

using Spec = OneDnnScaledLinearSpec;

constexpr char kOp[] = "onednn_scaled_linear";
// 1024 * 128 * 128 = 2^24: f32 sums of so many products of bytes are exact.
constexpr int64_t kMaxExactF32 = 1024;

// Whether oneDNN multiplies bytes without saturating sums of two products.
bool HasByteDotProduct() {
  const auto has = [](dnnl::cpu_isa isa) {
    const auto bits = static_cast<unsigned>(isa);
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & bits) ==
           bits;
  };
  return has(dnnl::cpu_isa::avx2_vnni) || has(dnnl::cpu_isa::avx512_core_vnni);
}

// A copy of the f32[1] or f32[n] `from`, repeated to n.
absl::StatusOr<AlignedBuffer> Repeated(const AnyTensorView& from, int64_t n) {
  QUERN_ASSIGN_OR_RETURN(
      AlignedBuffer buffer,
      AlignedBuffer::Create(n * static_cast<int64_t>(sizeof(float))));
  const auto* values = static_cast<const float*>(from.data());
  if (from.extent(0) == n) {
    std::memcpy(buffer.data(), values, buffer.bytes());
  } else {
    std::fill_n(buffer.data<float>(), n, values[0]);
  }
  return buffer;
}

// sums[n] = sum over k of w[k, n]; at most 2^24 in size.
absl::StatusOr<AlignedBuffer> ColumnSums(const AnyTensorView& weights,
                                         const Spec& spec, Executor& executor) {
  constexpr int64_t kCols = 256;
  QUERN_ASSIGN_OR_RETURN(
      AlignedBuffer buffer,
      AlignedBuffer::Create(spec.n * static_cast<int64_t>(sizeof(int32_t))));
  const auto* w = static_cast<const int8_t*>(weights.data());
  const bool by_rows = spec.order == WeightOrder::kNK;
  const int64_t stride = weights.stride(0);
  auto* const sums = buffer.data<int32_t>();
  executor.ParallelFor(DivCeil(spec.n, kCols), [&](int64_t block, int) {
    const int64_t begin = block * kCols;
    const int64_t end = std::min(begin + kCols, spec.n);
    std::fill(sums + begin, sums + end, 0);
    if (by_rows) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t k = 0; k < spec.k; ++k) sums[n] += w[n * stride + k];
      }
    } else {
      for (int64_t k = 0; k < spec.k; ++k) {
        for (int64_t n = begin; n < end; ++n) sums[n] += w[k * stride + n];
      }
    }
  });
  return buffer;
}

MatmulConfig ConfigOf(const Spec& spec) {
  MatmulConfig config;
  config.op = kOp;
  config.n = spec.n;
  config.k = spec.k;
  config.a = DType::kI8;
  config.c = spec.c;
  return config;
}

// Sums in i32 for the epilogue.
//
// Not i8 by i8: oneDNN 3.7.2 then rounds i32 results to f32 on the way, where
// it corrects for adding 128 to `a` itself (avx512_core_vnni, 2026). u8 by i8
// is exact modulo 2^32, and the epilogue takes 128 * column sum away.
absl::StatusOr<std::unique_ptr<PackedMatmul>> CreateSums(const Spec& spec) {
  MatmulConfig config = ConfigOf(spec);
  if (HasByteDotProduct()) {
    config.inner_a = DType::kU8;
    config.inner_b = DType::kI8;
    config.inner_c = DType::kI32;
    auto matmul = PackedMatmul::Create(config);
    if (matmul.ok() || !absl::IsUnimplemented(matmul.status())) return matmul;
  }
  config.inner_a = config.inner_b = config.inner_c = DType::kF32;
  config.max_k = kMaxExactF32;
  config.reference_kernel = true;
  return PackedMatmul::Create(config);
}

// Everything inside the primitive; Unimplemented where that cannot be exact.
absl::StatusOr<std::unique_ptr<PackedMatmul>> CreateScaled(const Spec& spec,
                                                           bool bias) {
  absl::Status status =
      Unimplemented(kOp, "oneDNN's int8 kernels saturate on this CPU");
  if (!HasByteDotProduct()) return status;
  MatmulConfig config = ConfigOf(spec);
  config.inner_a = config.inner_b = DType::kI8;
  config.bias = bias;
  config.scaled = true;
  config.zero_point = spec.zero_points;
  for (const DType c : {spec.c, DType::kF32}) {
    config.inner_c = c;
    auto matmul = PackedMatmul::Create(config);
    if (matmul.ok() || !absl::IsUnimplemented(matmul.status())) return matmul;
    status = matmul.status();
  }
  return status;
}

}  // namespace

struct OneDnnScaledLinearPlan::State {
  Spec spec;
  bool scaled_inside = false;
  std::unique_ptr<PackedMatmul> matmul;
  AlignedBuffer weight_scales;
  AlignedBuffer bias;
  AlignedBuffer col_sums;  // if the epilogue needs them
  AlignedBuffer offsets;   // 128 * col_sums, if oneDNN gets a + 128
  ScaledEpilogueKernels kernels = GetScaledEpilogueKernels();
  std::optional<ConvertPlan> narrow;

  bool per_tensor() const {
    return spec.activation == Spec::Activation::kPerTensor;
  }
  void Finish(const OneDnnScaledLinearArgs& args, const MatmulTile& tile) const;
};

absl::StatusOr<OneDnnScaledLinearPlan> OneDnnScaledLinearPlan::Create(
    const OneDnnScaledLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& weight_scales, const AnyTensorView& bias,
    Executor& executor) {
  auto state = std::make_unique<State>();
  state->spec = spec;
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "k", spec.k, 1,
      state->per_tensor() && spec.zero_points ? kMaxKZeroPoint : kMaxK));
  if (spec.c != DType::kF32 && spec.c != DType::kBF16 &&
      spec.c != DType::kF16) {
    return InvalidArgument(kOp, "c is ", DTypeName(spec.c),
                           "; need f32, bf16 or f16");
  }
  QUERN_RETURN_IF_ERROR(
      CheckDType(kOp, "weights", weights.dtype(), DType::kI8));
  const bool by_rows = spec.order == WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(CheckWeights(kOp, weights, spec.n, spec.k, by_rows));
  if (weight_scales.rank() == 1 && weight_scales.extent(0) != 1 &&
      weight_scales.extent(0) != spec.n) {
    return InvalidArgument(kOp,
                           "weight_scales.extent(0)=", weight_scales.extent(0),
                           "; need 1 or ", spec.n, ", as the spec has n");
  }
  QUERN_RETURN_IF_ERROR(CheckVector(kOp, "weight_scales", weight_scales,
                                    DType::kF32, weight_scales.extent(0), ""));
  QUERN_RETURN_IF_ERROR(CheckBias(kOp, bias, spec.n));

  QUERN_ASSIGN_OR_RETURN(state->weight_scales, Repeated(weight_scales, spec.n));
  const bool has_bias = bias.rank() != 0;
  if (has_bias) {
    QUERN_ASSIGN_OR_RETURN(state->bias, Repeated(bias, spec.n));
  }
  if (state->per_tensor()) {
    auto matmul = CreateScaled(spec, has_bias);
    if (!matmul.ok() && !absl::IsUnimplemented(matmul.status())) {
      return matmul.status();
    }
    state->scaled_inside = matmul.ok();
    if (matmul.ok()) state->matmul = *std::move(matmul);
  }
  if (!state->scaled_inside) {
    QUERN_ASSIGN_OR_RETURN(state->matmul, CreateSums(spec));
    const bool shifts = state->matmul->config().inner_a == DType::kU8;
    if (spec.zero_points || shifts) {
      QUERN_ASSIGN_OR_RETURN(state->col_sums,
                             ColumnSums(weights, spec, executor));
    }
    if (shifts) {
      QUERN_ASSIGN_OR_RETURN(
          state->offsets,
          AlignedBuffer::Create(static_cast<int64_t>(state->col_sums.bytes())));
      for (int64_t n = 0; n < spec.n; ++n) {
        // Below 2^31 in size: |col_sum| <= 128 * kMaxK.
        state->offsets.data<int32_t>()[n] =
            128 * state->col_sums.data<int32_t>()[n];
      }
    }
    if (spec.c != DType::kF32) {
      ConvertSpec convert;
      convert.from = DType::kF32;
      convert.to = spec.c;
      convert.stores = Stores::kCached;
      QUERN_ASSIGN_OR_RETURN(state->narrow, ConvertPlan::Create(convert));
    }
  }
  QUERN_RETURN_IF_ERROR(state->matmul->Pack(weights, by_rows, executor));
  return OneDnnScaledLinearPlan(std::move(state));
}

absl::Status OneDnnScaledLinearPlan::CheckArgs(
    const OneDnnScaledLinearArgs& args) const {
  const Spec& spec = state_->spec;
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "a", args.a.dtype(), DType::kI8));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "c", args.c.dtype(), spec.c));
  QUERN_RETURN_IF_ERROR(CheckMatrix(kOp, "a", args.a, spec.k));
  const int64_t m = args.a.extent(0);
  QUERN_RETURN_IF_ERROR(CheckResult(kOp, args.a, args.c, spec.n));
  const int64_t count = state_->per_tensor() ? 1 : m;
  const char* const wanted_by =
      state_->per_tensor() ? "activations are per tensor" : "a has rows";
  QUERN_RETURN_IF_ERROR(
      CheckVector(kOp, "scales", args.scales, DType::kF32, count, wanted_by));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "c", args.c, "scales", args.scales));
  if (!spec.zero_points) {
    if (args.zero_points.rank() == 0) return absl::OkStatus();
    return InvalidArgument(kOp, "zero_points has rank ",
                           args.zero_points.rank(),
                           "; need 0 for none, as the spec has none");
  }
  QUERN_RETURN_IF_ERROR(CheckVector(kOp, "zero_points", args.zero_points,
                                    DType::kI32, count, wanted_by));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "c", args.c, "zero_points", args.zero_points));
  if (!state_->per_tensor()) return absl::OkStatus();
  return CheckRange(kOp, "zero_points[0]",
                    *static_cast<const int32_t*>(args.zero_points.data()), -128,
                    127);
}

// Turns sums into rows of c.
void OneDnnScaledLinearPlan::State::Finish(const OneDnnScaledLinearArgs& args,
                                           const MatmulTile& tile) const {
  const auto* scales = static_cast<const float*>(args.scales.data());
  const auto* zero_points =
      static_cast<const int32_t*>(args.zero_points.data());
  const auto cols = static_cast<size_t>(tile.cols);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t token = tile.row + r;
    const int64_t at = per_tensor() ? 0 : token;
    ScaledEpilogueRow row;
    row.sums = static_cast<const int32_t*>(tile.data) + r * tile.cols;
    row.offsets =
        offsets.empty() ? nullptr : offsets.data<int32_t>() + tile.col;
    row.col_sums =
        spec.zero_points ? col_sums.data<int32_t>() + tile.col : nullptr;
    row.w_scales = weight_scales.data<float>() + tile.col;
    row.bias = bias.empty() ? nullptr : bias.data<float>() + tile.col;
    row.zero_point = spec.zero_points ? zero_points[at] : 0;
    row.a_scale = scales[at];
    uint8_t* const c = static_cast<uint8_t*>(args.c.mutable_data()) +
                       (token * args.c.stride(0) + tile.col) *
                           static_cast<int64_t>(SizeOf(spec.c));
    if (!narrow) {
      kernels.row(row, cols, reinterpret_cast<float*>(c));
      continue;
    }
    float* const wide = static_cast<float*>(tile.data) + r * tile.cols;
    kernels.row(row, cols, wide);
    InlineExecutor inline_executor;
    narrow->Execute(DenseVector<const float>(wide, tile.cols),
                    AnyTensorView(spec.c, c, 1, {tile.cols}, {1}),
                    inline_executor);
  }
}

absl::StatusOr<int64_t> OneDnnScaledLinearPlan::WorkspaceBytes(
    int64_t max_m, int workers) const {
  return state_->matmul->WorkspaceBytes(max_m, workers);
}

void OneDnnScaledLinearPlan::Execute(const OneDnnScaledLinearArgs& args,
                                     OneDnnScratch& scratch,
                                     Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const State& state = *state_;
  MatmulCall call;
  call.a = args.a;
  call.c = args.c;
  if (state.scaled_inside) {
    call.bias = state.bias.data<float>();
    call.weight_scales = state.weight_scales.data<float>();
    call.a_scale = static_cast<const float*>(args.scales.data());
    call.a_zero_point = static_cast<const int32_t*>(args.zero_points.data());
    state.matmul->Execute(call, scratch, executor);
    return;
  }
  const auto finish = [&](const MatmulTile& tile) { state.Finish(args, tile); };
  const absl::FunctionRef<void(const MatmulTile&)> finish_ref = finish;
  call.finish = &finish_ref;
  state.matmul->Execute(call, scratch, executor);
}

const OneDnnScaledLinearSpec& OneDnnScaledLinearPlan::spec() const {
  return state_->spec;
}

size_t OneDnnScaledLinearPlan::packed_bytes() const {
  return state_->matmul->packed_bytes();
}

OneDnnCacheStats OneDnnScaledLinearPlan::cache_stats() const {
  return state_->matmul->cache_stats();
}

std::string OneDnnScaledLinearPlan::Explain(int64_t m) const {
  const std::string text = state_->matmul->Explain(m);
  if (state_->scaled_inside) return absl::StrCat(text, ", scaled inside");
  return absl::StrCat(text, ", epilogue ", target());
}

const char* OneDnnScaledLinearPlan::target() const {
  return state_->kernels.target;
}

OneDnnScaledLinearPlan::OneDnnScaledLinearPlan(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
OneDnnScaledLinearPlan::OneDnnScaledLinearPlan(
    OneDnnScaledLinearPlan&&) noexcept = default;
OneDnnScaledLinearPlan& OneDnnScaledLinearPlan::operator=(
    OneDnnScaledLinearPlan&&) noexcept = default;
OneDnnScaledLinearPlan::~OneDnnScaledLinearPlan() = default;

}  // namespace quern
