#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/cpu_core.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/prefetch_policy.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

LinearKernels KernelsOf(WeightFormat b, DType a) {
  if (b == WeightFormat::kBF16) return GetLinearKernelsBF16(a);
  if (b == WeightFormat::kF16) return GetLinearKernelsF16(a);
  return GetLinearKernelsF32(a);
}

class PackedFloatLayer final : public PackedLayer {
 public:
  PackedFloatLayer(const LinearSpec& spec, const LinearWeights& weights,
                   const VnniLayout& layout)
      : PackedLayer(weights),
        a_(spec.a),
        parts_(PartsOf(spec.activation)),
        layout_(layout),
        kernels_(KernelsOf(weights.spec().format, spec.a)),
        finish_(spec, weights) {
    // Where a line is two vectors, one panel has too few sums to hide the
    // latency of its multiply-adds.
    const size_t rows = LineIsAVector(kernels_.target) ? 2 : 0;
    ReadInOneStream(ThisCpuCore(), packed_bytes(), rows, kernels_.table);
  }

  const char* target() const override { return kernels_.target; }
  std::string Explain(int64_t m) const override {
    return absl::StrCat("packed ", kernels_.target, " ", kernels_.arithmetic,
                        ", tiles of ", TilesOf(m, kernels_.table));
  }
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    const int64_t a_row_bytes = RowBytes(args.a);
    ForEachRowBlock(args.a.extent(0), [&](int64_t first, int64_t rows) {
      const auto* a_data =
          static_cast<const uint8_t*>(args.a.data()) + first * a_row_bytes;
      const PackedProduct<float> product = ProductOf(rows, TileCount::kEven);
      Workspace memory = workspace;
      const auto scratch = product.LayOut(memory, executor.num_workers());
      const auto pack = [&](int64_t row, uint32_t* to, int /*worker*/) {
        Pack(product, a_data + row * a_row_bytes, to);
      };
      const auto finish = [&](const SumsBlock<float>& block) {
        finish_(block, first, args);
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
               const uint8_t* from, int /*worker*/) const override {
    const PackedProduct<float> product =
        ProductOf(block.rows, TileCount::kFewest);
    Pack(product, from, product.PackedRow(ScratchOf(all).RowsOf(block), row));
  }
  void MultiplyBlock(const GroupedRows& all, const RowsBlock& block,
                     int64_t panel, int64_t panel_end, const LinearArgs& args,
                     int worker) const override {
    const PackedProduct<float> product =
        ProductOf(block.rows, TileCount::kFewest);
    const GroupedScratch<float> scratch = ScratchOf(all);
    product.MultiplyAllRows(
        panel, panel_end, scratch.SumsOf(worker),
        [&](const TileRange& range, float* sums, int64_t stride,
            int64_t part_stride) {
          product.MultiplyRange(weights().panels(), scratch.RowsOf(block),
                                range, sums, stride, part_stride);
        },
        [&](const SumsBlock<float>& sums) {
          finish_(sums, block.first, args);
        });
  }

 private:
  void CountScratch(WorkspaceLayout& layout, int64_t rows,
                    int64_t workers) const override {
    ProductOf(rows, TileCount::kEven).LayOut(layout, workers);
  }
  PackedProduct<float> ProductOf(int64_t rows, TileCount tile_count) const {
    return {layout_,
            kernels_.table,
            static_cast<int64_t>(PackedRowPitch(kernels_.elements_per_line)),
            rows,
            parts_,
            tile_count};
  }
  void Pack(const PackedProduct<float>& product, const uint8_t* from,
            uint32_t* to) const {
    const auto a_size = static_cast<int64_t>(SizeOf(a_));
    const int64_t all_k = layout_.k();
    for (int64_t k = 0; k < all_k; k += product.chunk_k()) {
      kernels_.pack_row(
          from + k * a_size,
          static_cast<size_t>(std::min(product.chunk_k(), all_k - k)), to);
      to += product.a_chunk();
    }
  }

  template <typename Allocator>
  GroupedScratch<float> LayOutGroups(Allocator& allocator, int64_t rows,
                                     int64_t workers) const {
    return GroupedScratch<float>::LayOut(
        allocator, ProductOf(std::min(rows, kBlockRows), TileCount::kFewest),
        rows, workers, static_cast<int64_t>(kernels_.table.max_rows));
  }
  GroupedScratch<float> ScratchOf(const GroupedRows& all) const {
    Workspace memory = all.workspace;
    return LayOutGroups(memory, all.rows, all.workers);
  }

  DType a_;
  int64_t parts_;
  VnniLayout layout_;  // of all columns, or of gate's and of up's
  LinearKernels kernels_;
  FinishFloats finish_;
};

}  // namespace

void FinishFloats::operator()(const SumsBlock<float>& block, int64_t first,
                              const LinearArgs& args) const {
  FinishBlock(activation_, epilogue_, block, first, args,
              [&](int64_t part, int64_t row, int64_t col, const FinishTo& to) {
                FinishArgs finish = {};
                finish.sums = block.sums + part * block.part_stride +
                              row * block.stride + col;
                finish.sums_stride = static_cast<size_t>(block.stride);
                if (bias_ != nullptr)
                  finish.bias = bias_ + part * part_n_ + block.col + col;
                finish.rows = static_cast<size_t>(to.rows);
                finish.cols = static_cast<size_t>(to.cols);
                finish.c = to.c;
                finish.c_row_bytes = to.c_row_bytes;
                (to.before_epilogue ? finish_f32_ : finish_)(finish);
              });
}

PackedLayerOr CreatePackedFloat(const LinearSpec& spec,
                                const LinearWeights& weights) {
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(FloatOrI8(w.format), w.k,
                                            w.n / PartsOf(spec.activation)));
  return std::make_unique<const PackedFloatLayer>(spec, weights, layout);
}

}  // namespace quern
