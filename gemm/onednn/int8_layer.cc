// Linear layers on int8 weights with a scale for each column, by oneDNN.
//
// Sums are exact, extremes included, on every CPU, so that a row has the same
// bits for any number of threads, alone and in a batch.
//
// A layer whose scale and zero point are per tensor runs wholly inside oneDNN's
// primitive. With terms per token oneDNN computes i32 sums of one tile after
// the other in scratch, which the packed kernels' epilogue turns into c while
// they are in cache: there is no m x n temporary. Without a dot product of
// bytes (AVX512-VNNI or AVX-VNNI) oneDNN's int8 kernels saturate sums of two
// products: there, both run as f32 products of at most 1024 terms, which are
// exact, over weights widened to f32 (four times the memory), and meet in i32.

#include <cstddef>
#include <cstdint>
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
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/kernels/int8_kernels.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers.h"
#include "quern/gemm/onednn/packed_matmul.h"
#include "quern/gemm/onednn/partition.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

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

MatmulConfig ConfigOf(const LinearSpec& spec, const LinearWeights& weights) {
  MatmulConfig config;
  config.n = weights.spec().n;
  config.k = weights.spec().k;
  config.a = config.b = DType::kI8;
  config.c = spec.c;
  return config;
}

// Sums in i32 for the epilogue.
//
// i8 by i8 is not asked for: oneDNN 3.7.2 then rounds i32 results to f32 on the
// way, where it corrects for adding 128 to a itself (avx512_core_vnni, 2026).
// u8 by i8 is exact modulo 2^32, and the epilogue takes 128 * column sum away.
absl::StatusOr<std::unique_ptr<PackedMatmul>> CreateSums(MatmulConfig config) {
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
absl::StatusOr<std::unique_ptr<PackedMatmul>> CreateScaled(MatmulConfig config,
                                                           bool bias,
                                                           bool zero_point) {
  if (!HasByteDotProduct()) return absl::UnimplementedError("saturates");
  config.inner_a = config.inner_b = DType::kI8;
  config.bias = bias;
  config.scaled = true;
  config.zero_point = zero_point;
  absl::Status status;
  for (const DType c : {config.c, DType::kF32}) {
    config.inner_c = c;
    auto matmul = PackedMatmul::Create(config);
    if (matmul.ok() || !absl::IsUnimplemented(matmul.status())) return matmul;
    status = matmul.status();
  }
  return status;
}

// The parts of the weights, besides their codes, that Execute reads.
struct Columns {
  AlignedBuffer scales;  // f32[n]
  AlignedBuffer sums;    // i32[n]
};

class OneDnnInt8Layer final : public OneDnnLayer {
 public:
  OneDnnInt8Layer(const LinearSpec& spec,
                  std::unique_ptr<const PackedMatmul> matmul,
                  AlignedBuffer bias, Columns columns,
                  std::optional<Int8QuantizePlan> quantize)
      : OneDnnLayer(std::move(matmul), std::move(bias)),
        spec_(spec),
        columns_(std::move(columns)),
        quantize_(std::move(quantize)) {}

  std::string Explain(int64_t m) const override {
    const std::string text = OneDnnLayer::Explain(m);
    if (matmul().config().scaled) return absl::StrCat(text, ", scaled inside");
    return absl::StrCat(text, ", epilogue ", kernels_.target);
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int max_workers) const override {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           OneDnnLayer::WorkspaceBytes(max_m, max_workers));
    if (!quantize_.has_value()) return bytes;
    int64_t codes = 0, all = 0;
    WorkspaceLayout layout;
    const bool fits = CheckedMul(max_m, matmul().config().k, &codes);
    if (fits) LayOut(layout, max_m);
    if (!fits || layout.overflow() ||
        !CheckedAdd(layout.bytes(), bytes, &all)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("linear: the codes of max_m=", max_m,
                       " rows do not fit in 2^63 bytes"));
    }
    return all;
  }

  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(args));
    const int64_t m = args.a.extent(0);
    if (m == 0) return;
    LinearArgs rows = args;
    Workspace memory = workspace;
    if (quantize_.has_value()) {
      const Quantised q = LayOut(memory, m);
      const auto codes = DenseMatrix(q.codes, m, matmul().config().k);
      const auto scales = DenseVector(q.scales, per_token() ? m : 0);
      const auto zero_points =
          DenseVector(q.zero_points, per_token() && zeros() ? m : 0);
      quantize_->Execute(args.a, codes, scales, zero_points, executor);
      rows.a = codes;
      rows.a_scales = scales;
      rows.a_zero_points = zero_points;
    }
    MatmulCall call;
    call.a = rows.a;
    call.c = rows.c;
    if (matmul().config().scaled) {
      call.bias = bias();
      call.weight_scales = columns_.scales.data<float>();
      call.a_scale = &spec_.a_scale;
      call.a_zero_point = &spec_.a_zero_point;
      matmul().Execute(call, memory, executor);
      return;
    }
    const auto finish = [&](const MatmulTile& tile) { Finish(rows, tile); };
    const absl::FunctionRef<void(const MatmulTile&)> finish_ref = finish;
    call.finish = &finish_ref;
    matmul().Execute(call, memory, executor);
  }

 private:
  // Rows of a as oneDNN takes them, where the caller's are not i8.
  struct Quantised {
    int8_t* codes;
    float* scales;
    int32_t* zero_points;
  };

  bool per_token() const {
    return spec_.granularity == Int8Granularity::kPerToken;
  }
  bool zeros() const { return spec_.zero_points == Int8ZeroPoint::kUsed; }

  template <typename Allocator>
  Quantised LayOut(Allocator& allocator, int64_t m) const {
    const int64_t k = matmul().config().k;
    return {allocator.template Allocate<int8_t>("codes", m * k),
            allocator.template Allocate<float>("scales", m),
            allocator.template Allocate<int32_t>("zero points", m)};
  }

  // Turns sums into rows of c.
  void Finish(const LinearArgs& rows, const MatmulTile& tile) const {
    const auto* scales = static_cast<const float*>(rows.a_scales.data());
    const auto* zero_points =
        static_cast<const int32_t*>(rows.a_zero_points.data());
    const uint32_t shift = matmul().config().inner_a == DType::kU8 ? 128 : 0;
    float a_scale[kMaxMatmulRows];
    int32_t a_offset[kMaxMatmulRows];
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t token = tile.row + r;
      a_scale[r] = per_token() ? scales[token] : spec_.a_scale;
      const int32_t zero = !zeros()      ? 0
                           : per_token() ? zero_points[token]
                                         : spec_.a_zero_point;
      // Unsigned, because a caller's zero point may be any number.
      a_offset[r] = static_cast<int32_t>(shift + static_cast<uint32_t>(zero));
    }
    Int8FinishArgs finish = {};
    finish.sums = static_cast<const int32_t*>(tile.data);
    finish.sums_stride = static_cast<size_t>(tile.cols);
    finish.col_sums = columns_.sums.data<int32_t>() + tile.col;
    finish.b_scale = columns_.scales.data<float>() + tile.col;
    if (bias() != nullptr) finish.bias = bias() + tile.col;
    finish.a_scale = a_scale;
    finish.a_offset = a_offset;
    finish.rows = static_cast<size_t>(tile.rows);
    finish.cols = static_cast<size_t>(tile.cols);
    const int64_t stride = rows.c.RowStride();
    const auto size = static_cast<int64_t>(SizeOf(spec_.c));
    finish.c = static_cast<uint8_t*>(rows.c.mutable_data()) +
               (tile.row * stride + tile.col) * size;
    finish.c_row_bytes = static_cast<ptrdiff_t>(stride * size);
    kernels_.finish(finish);
  }

  LinearSpec spec_;
  Columns columns_;
  std::optional<Int8QuantizePlan> quantize_;  // where a is not i8
  Int8Kernels kernels_ = GetInt8Kernels(spec_.c);
};

}  // namespace

OneDnnLayerOr CreateOneDnnInt8(const LinearSpec& spec,
                               const LinearWeights& weights,
                               const uint8_t* plain, Executor& executor) {
  const int64_t n = weights.spec().n;
  Columns columns;
  QUERN_ASSIGN_OR_RETURN(columns.scales, CopyOfColumns(weights.scales(), n));
  QUERN_ASSIGN_OR_RETURN(columns.sums, CopyOfColumns(weights.column_sums(), n));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer bias, CopyOfColumns(weights.bias(), n));
  std::optional<Int8QuantizePlan> quantize;
  if (spec.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(quantize,
                           Int8QuantizePlan::Create(QuantizeSpecOf(spec)));
  }
  const MatmulConfig config = ConfigOf(spec, weights);
  absl::StatusOr<std::unique_ptr<PackedMatmul>> matmul =
      absl::UnimplementedError("scaled by the epilogue");
  if (spec.granularity == Int8Granularity::kPerTensor) {
    matmul = CreateScaled(config, weights.has_bias(),
                          spec.zero_points == Int8ZeroPoint::kUsed);
  }
  if (absl::IsUnimplemented(matmul.status())) matmul = CreateSums(config);
  QUERN_RETURN_IF_ERROR(matmul.status());
  QUERN_RETURN_IF_ERROR((*matmul)->Pack(plain, executor));
  return std::make_unique<const OneDnnInt8Layer>(
      spec, *std::move(matmul), std::move(bias), std::move(columns),
      std::move(quantize));
}

}  // namespace quern
