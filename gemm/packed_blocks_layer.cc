#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/gemm/block_kernels.h"
#include "quern/gemm/block_product.h"
#include "quern/gemm/block_traits.h"
#include "quern/gemm/epilogue_kernels.h"
#include "quern/gemm/exact_block_kernels.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_layer.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/packed_form.h"
#include "quern/gemm/packed_layers.h"
#include "quern/gemm/packed_product.h"
#include "quern/gemm/tile.h"
#include "quern/gemm/tile_loop.h"
#include "quern/packing/block_panels.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

// Packs k elements of a row, a record at most.
void PackRecord(const BlockKernels& kernels, const uint8_t* from, size_t k,
                uint32_t* to) {
  kernels.pack_row(from, k, kernels.terms, to);
}
void PackRecord(const ExactBlockKernels& kernels, const uint8_t* from, size_t k,
                uint32_t* to) {
  kernels.pack_row(from, k, to);
}

// Weights in blocks by rows that become int8 in blocks (BlockKernels), or f32
// (ExactBlockKernels).
template <class Kernels>
class PackedBlocksLayer final : public PackedLayer {
 public:
  PackedBlocksLayer(const LinearSpec& spec, const LinearWeights& weights,
                    const PackedForm& form, const VnniLayout& lines,
                    const BlockPanels& blocks, const Kernels& kernels)
      : PackedLayer(weights),
        form_(form),
        a_(spec.a),
        lines_(lines),
        blocks_(blocks),
        kernels_(kernels),
        finish_(spec, weights) {}

  const char* target() const override { return kernels_.target; }
  std::string Explain(int64_t m) const override {
    const int64_t rows = std::clamp<int64_t>(m, 1, kBlockRows);
    return absl::StrCat("packed ", kernels_.target, " ", kernels_.arithmetic,
                        ", decoded in ", Fused(rows) ? "registers" : "scratch",
                        ", tiles of ", TilesOf(m, TableFor(rows)));
  }
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(args));
    ForEachRowBlock(args.a.extent(0), [&](int64_t first, int64_t rows) {
      const PackedProduct<float> product = ProductOf(rows, TileCount::kEven);
      Workspace memory = workspace;
      const auto scratch = product.LayOutWholeK(memory, executor.num_workers());
      const auto pack = [&](int64_t row, uint32_t* to, int /*worker*/) {
        Pack(static_cast<const uint8_t*>(args.a.data()) +
                 (first + row) * RowBytes(args.a),
             product, to);
      };
      const auto multiply = [&](const TileRange& range, float* sums,
                                int64_t stride, int64_t part_stride,
                                int /*worker*/) {
        MultiplyParts(product, scratch.a, range, sums, stride, part_stride);
      };
      const auto finish = [&](const SumsBlock<float>& block) {
        finish_(block, first, args);
      };
      product.RunWith(scratch, executor, pack, multiply, finish);
    });
  }

  int64_t panels() const override { return lines_.panels(); }
  int64_t lines() const override {
    return form_.parts * blocks_.panel_bytes() / BlockPanels::kLineBytes;
  }
  void CountGroups(WorkspaceLayout& layout, int64_t rows,
                   int64_t workers) const override {
    LayOutGroups(layout, rows, workers);
  }
  void PackRow(const GroupedRows& all, const RowsBlock& block, int64_t row,
               const uint8_t* from, int /*worker*/) const override {
    const PackedProduct<float> product =
        ProductOf(block.rows, TileCount::kFewest);
    Pack(from, product, product.PackedRow(ScratchOf(all).RowsOf(block), row));
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
          MultiplyParts(product, scratch.RowsOf(block), range, sums, stride,
                        part_stride);
        },
        [&](const SumsBlock<float>& sums) {
          finish_(sums, block.first, args);
        });
  }

 private:
  void CountScratch(WorkspaceLayout& layout, int64_t rows,
                    int64_t workers) const override {
    ProductOf(rows, TileCount::kEven).LayOutWholeK(layout, workers);
  }
  bool Fused(int64_t rows) const {
    const auto most = static_cast<int64_t>(kernels_.fused.max_rows);
    return most > 0 && rows <= most;
  }
  const TileTable& TableFor(int64_t rows) const {
    return Fused(rows) ? kernels_.fused : kernels_.decoded;
  }
  PackedProduct<float> ProductOf(int64_t rows, TileCount tile_count) const {
    return {lines_, TableFor(rows), BlockKind<Kernels>::kRowPitch,
            rows,   form_.parts,    tile_count};
  }

  // Does for all parts what MultiplyBlocks does for one.
  void MultiplyParts(const PackedProduct<float>& product, const uint32_t* a,
                     const TileRange& range, float* sums, int64_t stride,
                     int64_t part_stride) const {
    for (int64_t part = 0; part < form_.parts; ++part) {
      const BlockPart<Kernels> blocks = {
          blocks_, kernels_, Fused(product.tiles().rows),
          weights().panels() + part * form_.part_bytes};
      MultiplyBlocks(blocks, product, a, range, sums, stride);
      sums += part_stride;
    }
  }

  // A block of few rows is one tile that decodes in registers and needs no
  // spare row, so only the other tiles count.
  template <typename Allocator>
  GroupedScratch<float> LayOutGroups(Allocator& allocator, int64_t rows,
                                     int64_t workers) const {
    return GroupedScratch<float>::LayOut(
        allocator, ProductOf(std::min(rows, kBlockRows), TileCount::kFewest),
        rows, workers, static_cast<int64_t>(kernels_.decoded.max_rows));
  }
  GroupedScratch<float> ScratchOf(const GroupedRows& all) const {
    Workspace memory = all.workspace;
    return LayOutGroups(memory, all.rows, all.workers);
  }

  void Pack(const uint8_t* from, const PackedProduct<float>& product,
            uint32_t* to) const {
    const auto a_size = static_cast<int64_t>(SizeOf(a_));
    const int64_t chunk_k = product.chunk_k();
    for (int64_t k = 0; k < blocks_.k(); k += chunk_k) {
      PackRecord(kernels_, from + k * a_size,
                 static_cast<size_t>(std::min(chunk_k, blocks_.k() - k)), to);
      to += product.a_chunk();
    }
  }

  PackedForm form_;
  DType a_;
  // One part as lines of one k each: PackedProduct takes rows in chunks of 256
  // lines, which are records of blocks.
  VnniLayout lines_;
  BlockPanels blocks_;
  Kernels kernels_;
  FinishFloats finish_;
};

}  // namespace

PackedLayerOr CreatePackedBlocks(const LinearSpec& spec,
                                 const LinearWeights& weights) {
  static_assert(static_cast<int64_t>(kChunkLines) == BlockPanels::kRecordK,
                "a chunk of lines of one k is a record");
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(
      const PackedForm form,
      PackedForm::Of(w, weights.has_bias() ? PackedHeader::kBias : 0));
  QUERN_ASSIGN_OR_RETURN(const VnniLayout lines,
                         VnniLayout::Create(DType::kF32, w.k, form.part_n));
  QUERN_ASSIGN_OR_RETURN(
      const BlockPanels blocks,
      BlockPanels::Create(BlockTraitsOf(w.block_format).codes, w.k,
                          form.part_n));
  const auto layer = [&](const auto& kernels) -> PackedLayerOr {
    return std::make_unique<
        const PackedBlocksLayer<std::decay_t<decltype(kernels)>>>(
        spec, weights, form, lines, blocks, kernels);
  };
  if (spec.activations == LinearActivations::kExact) {
    return layer(GetExactBlockKernels(w.block_format, spec.a));
  }
  return layer(GetBlockKernels(w.block_format, spec.a));
}

}  // namespace quern
