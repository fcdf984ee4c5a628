#include "gemm/packed_scaled_linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/aligned_buffer.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/epilogue_kernels.h"
#include "gemm/packed_product.h"
#include "gemm/scaled_linear_kernels.h"
#include "gemm/tile_loop.h"
#include "packing/vnni_layout.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "quant/s8s8_compensation.h"

namespace quern {
namespace {

constexpr char kOp[] = "packed_scaled_linear";

PackedProduct<int32_t> ProductOf(const PackedScaledLinearSpec& spec,
                                 const VnniLayout& layout,
                                 const ScaledLinearKernels& kernels,
                                 int64_t rows) {
  return {layout, kernels.table, 1, rows, PartsOf(spec.activation)};
}

// What every block of rows needs besides the product.
struct RowTerms {
  float* scale;
  int32_t* offset;
  uint8_t* row;  // of each worker: one quantised row
};

int64_t RowStride(int64_t k) { return RoundUp(k, 64); }

template <typename Allocator>
RowTerms LayOutTerms(Allocator& allocator, int64_t rows, int64_t k,
                     int64_t workers) {
  return {
      allocator.template Allocate<float>("scales of rows", rows),
      allocator.template Allocate<int32_t>("offsets of rows", rows),
      allocator.template Allocate<uint8_t>("quantised row",
                                           workers * RowStride(k)),
  };
}

// f32[n] from f32[n] or f32[1].
absl::StatusOr<AlignedBuffer> PerColumn(const AnyTensorView& values,
                                        int64_t n) {
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Create(n * 4));
  const auto* from = static_cast<const float*>(values.data());
  for (int64_t i = 0; i < n; ++i) {
    buffer.data<float>()[i] = from[values.extent(0) == 1 ? 0 : i];
  }
  return buffer;
}

}  // namespace

Int8QuantizeSpec PackedScaledLinearPlan::QuantizeSpecOf(
    const PackedScaledLinearSpec& spec) {
  Int8QuantizeSpec quantize;
  if (spec.a != DType::kI8) quantize.dtype = spec.a;
  quantize.granularity = spec.granularity;
  quantize.zero_points = spec.zero_points;
  quantize.scale = spec.a_scale;
  quantize.zero_point = spec.a_zero_point;
  quantize.stores = Int8QuantizeStores::kCached;
  return quantize;
}

absl::Status PackedScaledLinearPlan::CheckSpec(
    const PackedScaledLinearSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMaxN));
  const bool zero_points = spec.zero_points == Int8ZeroPoint::kUsed;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "k", spec.k, 1, zero_points ? kMaxKZeroPoint : kMaxK));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(
      kOp, "a", spec.a, {DType::kF32, DType::kBF16, DType::kF16, DType::kI8}));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "c", spec.c, {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckActivation(kOp, spec.activation, spec.n));
  // Proves scale and zero point, also of a given as i8.
  return Int8QuantizePlan::Create(QuantizeSpecOf(spec)).status();
}

absl::StatusOr<PackedScaledLinearPlan> PackedScaledLinearPlan::Create(
    const PackedScaledLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& weight_scales, const AnyTensorView& bias,
    Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec));
  const bool nk = spec.order == WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weights", weights, DType::kI8,
                 {nk ? spec.n : spec.k, nk ? spec.k : spec.n}));
  const bool one_scale =
      weight_scales.rank() == 1 && weight_scales.extent(0) == 1;
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight_scales", weight_scales,
                                   DType::kF32, {one_scale ? 1 : spec.n}));
  if (bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "bias", bias, DType::kF32, {spec.n}));
  }
  const int64_t parts = PartsOf(spec.activation);
  QUERN_ASSIGN_OR_RETURN(
      const VnniLayout layout,
      VnniLayout::Create(DType::kI8, spec.k, spec.n / parts));
  PackedScaledLinearPlan plan(spec, layout);
  if (spec.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(plan.quantize_,
                           Int8QuantizePlan::Create(QuantizeSpecOf(spec)));
  }
  QUERN_ASSIGN_OR_RETURN(plan.packed_,
                         AlignedBuffer::Create(parts * layout.bytes()));
  VnniPackSpec pack_spec;
  pack_spec.layout = layout;
  pack_spec.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack,
                         VnniPackPlan::Create(pack_spec));
  QUERN_ASSIGN_OR_RETURN(plan.col_sums_, AlignedBuffer::Create(spec.n * 4));
  S8S8CompensationSpec compensation_spec;
  compensation_spec.k = spec.k;
  compensation_spec.n = layout.n();
  QUERN_ASSIGN_OR_RETURN(const S8S8CompensationPlan compensation,
                         S8S8CompensationPlan::Create(compensation_spec));
  auto* col_sums = plan.col_sums_.data<int32_t>();
  for (int64_t part = 0; part < parts; ++part) {
    uint8_t* packed = plan.packed_.data() + part * layout.bytes();
    pack.Pack(PartOf(weights, nk ? 0 : 1, part, layout.n()), packed, executor);
    compensation.FromPanels(
        {reinterpret_cast<const int8_t*>(packed), VnniLayout::kPanelCols,
         layout.panel_bytes()},
        DenseVector(col_sums + part * layout.n(), layout.n()), executor);
  }
  for (int64_t i = 0; i < spec.n; ++i) col_sums[i] /= 128;  // exact

  QUERN_ASSIGN_OR_RETURN(plan.b_scale_, PerColumn(weight_scales, spec.n));
  if (bias.rank() != 0) {
    QUERN_ASSIGN_OR_RETURN(plan.bias_, AlignedBuffer::Create(spec.n * 4));
    std::memcpy(plan.bias_.data(), bias.data(), plan.bias_.bytes());
  }
  return plan;
}

std::string PackedScaledLinearPlan::Explain(int64_t m) const {
  const RowTiles tiles(std::max<int64_t>(1, std::min(m, kBlockRows)),
                       kernels_.table);
  const int64_t rows = tiles.max_size();
  return absl::StrCat("packed ", kernels_.target, " u8 x s8 dot, tiles of ",
                      rows, " x ",
                      kernels_.table.panels[static_cast<size_t>(rows)] *
                          VnniLayout::kPanelCols);
}

int64_t PackedScaledLinearPlan::WorkspaceBytes(int64_t max_m,
                                               int max_workers) const {
  return MostWorkspaceBytes(
      max_m, max_workers, [&](int64_t rows, int64_t workers) {
        WorkspaceLayout layout;
        LayOutTerms(layout, rows, spec_.k, workers);
        ProductOf(spec_, layout_, kernels_, rows).LayOut(layout, workers);
        return layout.bytes();
      });
}

absl::Status PackedScaledLinearPlan::CheckArgs(
    const PackedScaledLinearSpec& spec, const AnyTensorView& a,
    const AnyTensorView& a_scales, const AnyTensorView& a_zero_points,
    const AnyTensorView& c, const AnyTensorView& residual) {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a", a, spec.a, {kAnyExtent, spec.k}));
  QUERN_RETURN_IF_ERROR(CheckOutput(
      kOp, "c", c, spec.c, {a.extent(0), ColumnsOfC(spec.activation, spec.n)}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "a", a, "c", c));
  QUERN_RETURN_IF_ERROR(CheckResidual(kOp, residual, c));
  const bool scales =
      spec.a == DType::kI8 && spec.granularity == Int8Granularity::kPerToken;
  const bool zero_points = scales && spec.zero_points == Int8ZeroPoint::kUsed;
  if (scales) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "a_scales", a_scales, DType::kF32, {a.extent(0)}));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "a_scales", a_scales, "c", c));
  } else if (!IsEmpty(a_scales)) {
    return InvalidArgument(kOp,
                           "a_scales is given; need none, as a is quantised "
                           "here or by the scale of the spec");
  }
  if (zero_points) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a_zero_points", a_zero_points,
                                     DType::kI32, {a.extent(0)}));
    return CheckApart(kOp, "a_zero_points", a_zero_points, "c", c);
  }
  if (!IsEmpty(a_zero_points)) {
    return InvalidArgument(kOp,
                           "a_zero_points is given; need none, as the spec has "
                           "none for each row of an i8 a");
  }
  return absl::OkStatus();
}

void PackedScaledLinearPlan::Execute(const AnyTensorView& a,
                                     const AnyTensorView& a_scales,
                                     const AnyTensorView& a_zero_points,
                                     const AnyTensorView& c,
                                     const AnyTensorView& residual,
                                     Workspace workspace,
                                     Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(a, a_scales, a_zero_points, c, residual));
  const int64_t a_row_bytes = RowBytes(a);
  const bool per_token = spec_.granularity == Int8Granularity::kPerToken;
  const auto* scales =
      IsEmpty(a_scales) ? nullptr : static_cast<const float*>(a_scales.data());
  const auto* zero_points =
      IsEmpty(a_zero_points)
          ? nullptr
          : static_cast<const int32_t*>(a_zero_points.data());
  ForEachRowBlock(a.extent(0), [&](int64_t first, int64_t rows) {
    const auto* a_data =
        static_cast<const uint8_t*>(a.data()) + first * a_row_bytes;
    const PackedProduct<int32_t> product =
        ProductOf(spec_, layout_, kernels_, rows);
    Workspace memory = workspace;
    const RowTerms terms =
        LayOutTerms(memory, rows, spec_.k, executor.num_workers());
    const auto scratch = product.LayOut(memory, executor.num_workers());

    const auto pack = [&](int64_t row, uint32_t* to, int worker) {
      uint8_t* q = terms.row + worker * RowStride(spec_.k);
      const uint8_t* from = a_data + row * a_row_bytes;
      int32_t zero_point = 0;
      if (quantize_.has_value()) {
        quantize_->QuantizeRowU8(from, spec_.k, q, &terms.scale[row],
                                 &zero_point);
      } else {
        for (int64_t k = 0; k < spec_.k; ++k) q[k] = from[k] ^ 0x80;
        terms.scale[row] = per_token ? scales[first + row] : spec_.a_scale;
        zero_point = zero_points != nullptr ? zero_points[first + row]
                                            : spec_.a_zero_point;
      }
      // Unsigned: a caller's zero point may be anything.
      terms.offset[row] =
          static_cast<int32_t>(128u + static_cast<uint32_t>(zero_point));
      for (int64_t k = 0; k < spec_.k; k += product.chunk_k()) {
        const int64_t n = std::min(product.chunk_k(), spec_.k - k);
        // What follows the last k meets zeros of b, and may be anything, but
        // not memory that nobody has written.
        to[(n - 1) / 4] = 0;
        std::memcpy(to, q + k, static_cast<size_t>(n));
        to += product.a_chunk();
      }
    };
    const auto finish = [&](const SumsBlock<int32_t>& block) {
      // The terms of `part` for the rows and columns of the block from here on.
      const auto terms_from = [&](int64_t part, int64_t row, int64_t col) {
        ScaledFinishArgs args = {};
        args.sums =
            block.sums + part * block.part_stride + row * block.stride + col;
        args.sums_stride = static_cast<size_t>(block.stride);
        const int64_t n = part * layout_.n() + block.col + col;
        args.col_sums = col_sums_.data<int32_t>() + n;
        args.b_scale = b_scale_.data<float>() + n;
        if (!bias_.empty()) args.bias = bias_.data<float>() + n;
        args.a_scale = terms.scale + block.row + row;
        args.a_offset = terms.offset + block.row + row;
        return args;
      };
      const EpilogueRows to = RowsOfC(block.rows, block.cols, first + block.row,
                                      block.col, c, residual);
      if (spec_.activation == LinearActivation::kNone &&
          to.residual == nullptr) {
        ScaledFinishArgs args = terms_from(0, 0, 0);
        args.rows = static_cast<size_t>(block.rows);
        args.cols = static_cast<size_t>(block.cols);
        args.c = to.c;
        args.c_row_bytes = static_cast<ptrdiff_t>(to.c_row_bytes);
        kernels_.finish(args);
        return;
      }
      ApplyEpilogue(
          epilogue_, PartsOf(spec_.activation), to,
          [&](int64_t part, int64_t row, int64_t col, int64_t cols, float* v) {
            ScaledFinishArgs args = terms_from(part, row, col);
            args.rows = 1;
            args.cols = static_cast<size_t>(cols);
            args.c = v;
            kernels_.finish_f32(args);
          });
    };
    product.Run(packed_.data(), scratch, executor, pack, finish);
  });
}

}  // namespace quern
