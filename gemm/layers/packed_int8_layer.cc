#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/int8_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/finish_sums.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layer_of.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/packing/vnni_layout.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

int64_t RowStride(int64_t k) { return RoundUp(k, 64); }

// Rows and weights of int8: i32 sums, exact.
class Int8Arithmetic : public PackedArithmetic {
 public:
  using Sum = int32_t;

  struct Terms {
    Terms From(int64_t row) const {
      return {scale + row, offset + row, quantised};
    }

    float* scale;
    int32_t* offset;
    uint8_t* quantised;  // one row of each worker
  };
  template <typename Allocator>
  Terms LayOutTerms(Allocator& allocator, int64_t rows, int64_t workers) const {
    return {
        allocator.template Allocate<float>("scales of rows", rows),
        allocator.template Allocate<int32_t>("offsets of rows", rows),
        allocator.template Allocate<uint8_t>("quantised row",
                                             workers * RowStride(layout().k())),
    };
  }

  Int8Arithmetic(const LinearSpec& spec, const LinearWeights& weights,
                 const VnniLayout& layout,
                 std::optional<Int8QuantizePlan> quantize)
      : PackedArithmetic(weights, spec.a, layout, PartsOf(spec.activation)),
        spec_(spec),
        kernels_(InOneStream(GetInt8Kernels(spec.c), weights)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)),
        quantize_(std::move(quantize)) {}

  const char* target() const { return kernels_.target; }
  const char* name() const { return kernels_.arithmetic; }
  const TileTable& TableFor(int64_t /*rows*/) const { return kernels_.table; }
  int64_t row_pitch() const {
    return static_cast<int64_t>(PackedRowPitch(kernels_.row_words));
  }
  size_t max_tile_rows() const { return kernels_.table.max_rows; }

  void PackRow(const PackedProduct<int32_t>& product, const RowToPack& row,
               const Terms& terms) const {
    const uint8_t* from = row.a;
    const int64_t all_k = layout().k();
    uint8_t* q = terms.quantised + row.worker * RowStride(all_k);
    float* scale = &terms.scale[row.row];
    const uint8_t* codes = q;
    int32_t zero_point = 0;
    if (!quantize_.has_value()) {
      if (kernels_.row_shift == 0) {
        codes = from;
      } else {
        for (int64_t k = 0; k < all_k; ++k) q[k] = from[k] ^ 0x80;
      }
      *scale = ScaleOf(*row.args, row.row_of_a);
      zero_point = ZeroPointOf(*row.args, row.row_of_a);
    } else if (kernels_.row_shift == 0) {
      quantize_->QuantizeRow(from, all_k, reinterpret_cast<int8_t*>(q), scale,
                             &zero_point);
    } else {
      quantize_->QuantizeRowU8(from, all_k, q, scale, &zero_point);
    }
    // Unsigned: a caller's zero point may be anything.
    terms.offset[row.row] =
        static_cast<int32_t>(static_cast<uint32_t>(kernels_.row_shift) +
                             static_cast<uint32_t>(zero_point));
    ForEachChunk(product, row.to, [&](int64_t k, int64_t count, uint32_t* to) {
      kernels_.store_row(codes + k, static_cast<size_t>(count), to);
    });
  }

  void Finish(const SumsBlock<int32_t>& block, int64_t first,
              const LinearArgs& args, const Terms& terms) const {
    FinishBlock(
        spec_.activation, epilogue_, block, first, args,
        [&](int64_t part, int64_t row, int64_t col, const FinishTo& to) {
          Int8FinishArgs finish = {};
          finish.sums =
              block.sums + part * block.part_stride + row * block.stride + col;
          finish.sums_stride = static_cast<size_t>(block.stride);
          const int64_t n = part * layout().n() + block.col + col;
          finish.col_sums = weights().column_sums() + n;
          finish.b_scale = weights().scales() + n;
          if (weights().has_bias()) finish.bias = weights().bias() + n;
          finish.a_scale = terms.scale + block.row + row;
          finish.a_offset = terms.offset + block.row + row;
          finish.rows = static_cast<size_t>(to.rows);
          finish.cols = static_cast<size_t>(to.cols);
          finish.c = to.c;
          finish.c_row_bytes = to.c_row_bytes;
          (to.before_epilogue ? kernels_.finish_f32 : kernels_.finish)(finish);
        });
  }

 private:
  // Where a is given as i8, so are a row's scale and zero point, or the spec
  // has them.
  float ScaleOf(const LinearArgs& args, int64_t row) const {
    return spec_.granularity == Int8Granularity::kPerToken
               ? static_cast<const float*>(args.a_scales.data())[row]
               : spec_.a_scale;
  }
  int32_t ZeroPointOf(const LinearArgs& args, int64_t row) const {
    return IsEmpty(args.a_zero_points)
               ? spec_.a_zero_point
               : static_cast<const int32_t*>(args.a_zero_points.data())[row];
  }

  LinearSpec spec_;
  Int8Kernels kernels_;
  EpilogueKernels epilogue_;
  std::optional<Int8QuantizePlan> quantize_;  // where a is not i8
};

}  // namespace

PackedLayerOr CreatePackedInt8(const LinearSpec& spec,
                               const LinearWeights& weights) {
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(
      const VnniLayout layout,
      VnniLayout::Create(DType::kI8, w.k, w.n / PartsOf(spec.activation)));
  std::optional<Int8QuantizePlan> quantize;
  if (spec.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(quantize,
                           Int8QuantizePlan::Create(QuantizeSpecOf(spec)));
  }
  return std::make_unique<const PackedLayerOf<Int8Arithmetic>>(
      Int8Arithmetic(spec, weights, layout, std::move(quantize)));
}

}  // namespace quern
