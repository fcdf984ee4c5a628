#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/cpu_core.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/int8_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/prefetch_policy.h"
#include "quern/packing/vnni_layout.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

int64_t RowStride(int64_t k) { return RoundUp(k, 64); }

class PackedInt8Layer final : public PackedLayer {
 public:
  PackedInt8Layer(const LinearSpec& spec, const LinearWeights& weights,
                  const VnniLayout& layout,
                  std::optional<Int8QuantizePlan> quantize)
      : PackedLayer(weights),
        spec_(spec),
        parts_(PartsOf(spec.activation)),
        layout_(layout),
        kernels_(GetInt8Kernels(spec.c)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)),
        quantize_(std::move(quantize)) {
    const size_t rows = LineIsAVector(kernels_.target) ? 2 : 1;
    ReadInOneStream(ThisCpuCore(), packed_bytes(), rows, kernels_.table);
  }

  const char* target() const override { return kernels_.target; }
  std::string Explain(int64_t m) const override {
    return absl::StrCat("packed ", kernels_.target, " ", kernels_.arithmetic,
                        ", tiles of ", TilesOf(m, kernels_.table));
  }
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    ForEachRowBlock(args.a.extent(0), [&](int64_t first, int64_t rows) {
      const PackedProduct<int32_t> product = ProductOf(rows, TileCount::kEven);
      Workspace memory = workspace;
      const RowTerms terms = LayOutTerms(memory, rows, executor.num_workers());
      const auto scratch = product.LayOut(memory, executor.num_workers());
      const auto pack = [&](int64_t row, uint32_t* to, int worker) {
        const uint8_t* from = static_cast<const uint8_t*>(args.a.data()) +
                              (first + row) * RowBytes(args.a);
        uint8_t* q = terms.row + worker * RowStride(layout_.k());
        if (quantize_.has_value()) {
          Quantize(from, terms, row, q);
        } else {
          Take(args, first + row, from, terms, row, q);
        }
        Store(q, product, to);
      };
      const auto finish = [&](const SumsBlock<int32_t>& block) {
        Finish(block, first, args, terms);
      };
      product.Run(weights().panels(), scratch, executor, pack, finish);
    });
  }

  int64_t panels() const override { return layout_.panels(); }
  int64_t lines() const override { return parts_ * layout_.lines(); }
  void CountGroups(WorkspaceLayout& layout, int64_t rows,
                   int64_t workers) const override {
    LayOutGroups(layout, rows, workers);
  }
  void PackRow(const GroupedRows& all, const RowsBlock& block, int64_t row,
               const uint8_t* from, int worker) const override {
    const PackedProduct<int32_t> product =
        ProductOf(block.rows, TileCount::kFewest);
    const GroupScratch scratch = ScratchOf(all);
    uint8_t* q = scratch.terms.row + worker * RowStride(layout_.k());
    Quantize(from, scratch.terms, block.first + row, q);
    Store(q, product, product.PackedRow(scratch.product.RowsOf(block), row));
  }
  void MultiplyBlock(const GroupedRows& all, const RowsBlock& block,
                     int64_t panel, int64_t panel_end, const LinearArgs& args,
                     int worker) const override {
    const PackedProduct<int32_t> product =
        ProductOf(block.rows, TileCount::kFewest);
    GroupScratch scratch = ScratchOf(all);
    scratch.terms.scale += block.first;
    scratch.terms.offset += block.first;
    product.MultiplyAllRows(
        panel, panel_end, scratch.product.SumsOf(worker),
        [&](const TileRange& range, int32_t* sums, int64_t stride,
            int64_t part_stride) {
          product.MultiplyRange(weights().panels(),
                                scratch.product.RowsOf(block), range, sums,
                                stride, part_stride);
        },
        [&](const SumsBlock<int32_t>& sums) {
          Finish(sums, block.first, args, scratch.terms);
        });
  }

 private:
  // What rows need besides the product.
  struct RowTerms {
    float* scale;
    int32_t* offset;
    uint8_t* row;  // of each worker: one quantised row
  };

  template <typename Allocator>
  RowTerms LayOutTerms(Allocator& allocator, int64_t rows,
                       int64_t workers) const {
    return {
        allocator.template Allocate<float>("scales of rows", rows),
        allocator.template Allocate<int32_t>("offsets of rows", rows),
        allocator.template Allocate<uint8_t>("quantised row",
                                             workers * RowStride(layout_.k())),
    };
  }

  PackedProduct<int32_t> ProductOf(int64_t rows, TileCount tile_count) const {
    return {layout_,
            kernels_.table,
            static_cast<int64_t>(PackedRowPitch(kernels_.row_words)),
            rows,
            parts_,
            tile_count};
  }

  // Quantize and Take write a row of a as u8 to q, and its terms. Where a is
  // given as i8, so are the terms, or the spec has them.
  void Quantize(const uint8_t* from, const RowTerms& terms, int64_t row,
                uint8_t* q) const {
    int32_t zero_point = 0;
    quantize_->QuantizeRowU8(from, layout_.k(), q, &terms.scale[row],
                             &zero_point);
    terms.offset[row] = OffsetOf(zero_point);
  }
  void Take(const LinearArgs& args, int64_t row_of_a, const uint8_t* from,
            const RowTerms& terms, int64_t row, uint8_t* q) const {
    for (int64_t k = 0; k < layout_.k(); ++k) q[k] = from[k] ^ 0x80;
    terms.scale[row] =
        spec_.granularity == Int8Granularity::kPerToken
            ? static_cast<const float*>(args.a_scales.data())[row_of_a]
            : spec_.a_scale;
    terms.offset[row] = OffsetOf(
        IsEmpty(args.a_zero_points)
            ? spec_.a_zero_point
            : static_cast<const int32_t*>(args.a_zero_points.data())[row_of_a]);
  }
  // Unsigned: a caller's zero point may be anything.
  static int32_t OffsetOf(int32_t zero_point) {
    return static_cast<int32_t>(128u + static_cast<uint32_t>(zero_point));
  }

  void Store(const uint8_t* q, const PackedProduct<int32_t>& product,
             uint32_t* to) const {
    const int64_t all_k = layout_.k();
    for (int64_t k = 0; k < all_k; k += product.chunk_k()) {
      const int64_t n = std::min(product.chunk_k(), all_k - k);
      kernels_.store_row(q + k, static_cast<size_t>(n), to);
      to += product.a_chunk();
    }
  }

  void CountScratch(WorkspaceLayout& layout, int64_t rows,
                    int64_t workers) const override {
    LayOutTerms(layout, rows, workers);
    ProductOf(rows, TileCount::kEven).LayOut(layout, workers);
  }

  struct GroupScratch {
    RowTerms terms;
    GroupedScratch<int32_t> product;
  };
  template <typename Allocator>
  GroupScratch LayOutGroups(Allocator& allocator, int64_t rows,
                            int64_t workers) const {
    const RowTerms terms = LayOutTerms(allocator, rows, workers);
    return {terms,
            GroupedScratch<int32_t>::LayOut(
                allocator,
                ProductOf(std::min(rows, kBlockRows), TileCount::kFewest), rows,
                workers, static_cast<int64_t>(kernels_.table.max_rows))};
  }
  GroupScratch ScratchOf(const GroupedRows& all) const {
    Workspace memory = all.workspace;
    return LayOutGroups(memory, all.rows, all.workers);
  }

  void Finish(const SumsBlock<int32_t>& block, int64_t first,
              const LinearArgs& args, const RowTerms& terms) const {
    FinishBlock(
        spec_.activation, epilogue_, block, first, args,
        [&](int64_t part, int64_t row, int64_t col, const FinishTo& to) {
          Int8FinishArgs finish = {};
          finish.sums =
              block.sums + part * block.part_stride + row * block.stride + col;
          finish.sums_stride = static_cast<size_t>(block.stride);
          const int64_t n = part * layout_.n() + block.col + col;
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

  LinearSpec spec_;
  int64_t parts_;
  VnniLayout layout_;  // of all columns, or of gate's and of up's
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
  return std::make_unique<const PackedInt8Layer>(spec, weights, layout,
                                                 std::move(quantize));
}

}  // namespace quern
