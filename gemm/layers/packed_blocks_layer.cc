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
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/gemm/kernels/i4_block_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/block_product.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/prefetch_policy.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/block_panels.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

// Packs k elements of a row, a record at most.
template <class Kernels>
void PackRecord(const Kernels& kernels, const uint8_t* from, size_t k,
                uint32_t* to) {
  kernels.pack_row(from, k, kernels.terms, to);
}
void PackRecord(const ExactBlockKernels& kernels, const uint8_t* from, size_t k,
                uint32_t* to) {
  kernels.pack_row(from, k, to);
}

// Weights in blocks by rows that become int8 in blocks (BlockKernels), or f32
// (ExactBlockKernels); weights of kI4Group by the former (I4BlockKernels).
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
    ForEachRowBlock(args.a.extent(0), [&](int64_t first, int64_t rows) {
      const PackedProduct<float> product = ProductOf(rows, TileCount::kEven);
      Workspace memory = workspace;
      const auto scratch =
          product.LayOutWholeK(memory, executor.num_workers(), kOneRow);
      const auto pack = [&](int64_t row, uint32_t* to, int /*worker*/) {
        Pack(static_cast<const uint8_t*>(args.a.data()) +
                 (first + row) * RowBytes(args.a),
             product, to);
      };
      const auto multiply = [&](const uint32_t* a, const TileRange& range,
                                float* sums, int64_t stride,
                                int64_t part_stride, int /*worker*/) {
        MultiplyParts(product, a, range, sums, stride, part_stride);
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
  static constexpr auto kOneRow = OneRowIsPacked::kByEachWorker;

  void CountScratch(WorkspaceLayout& layout, int64_t rows,
                    int64_t workers) const override {
    ProductOf(rows, TileCount::kEven).LayOutWholeK(layout, workers, kOneRow);
  }
  bool Fused(int64_t rows) const {
    const auto most = static_cast<int64_t>(kernels_.fused.max_rows);
    return most > 0 && rows <= most;
  }
  const TileTable& TableFor(int64_t rows) const {
    return Fused(rows) ? kernels_.fused : kernels_.decoded;
  }
  PackedProduct<float> ProductOf(int64_t rows, TileCount tile_count) const {
    return {lines_, TableFor(rows), BlockKind<Kernels>::RowPitch(kernels_),
            rows,   form_.parts,    tile_count};
  }

  // Does for all parts what MultiplyBlocks does for one.
  void MultiplyParts(const PackedProduct<float>& product, const uint32_t* a,
                     const TileRange& range, float* sums, int64_t stride,
                     int64_t part_stride) const {
    for (int64_t part = 0; part < form_.parts; ++part) {
      const BlockPart<Kernels> blocks = {
          blocks_,
          kernels_,
          Fused(product.tiles().rows),
          weights().panels() + part * form_.part_bytes,
          GroupsOf(part),
          FusedAheadBytes(core_, product.tiles().rows)};
      MultiplyBlocks(blocks, product, a, range, sums, stride);
      sums += part_stride;
    }
  }

  PanelGroups GroupsOf(int64_t part) const {
    if (form_.groups == 0) return {};
    const int64_t scales = part * form_.part_scales;
    const float* zeros = weights().zeros();
    return {weights().scales() + scales,
            zeros == nullptr ? nullptr : zeros + scales, form_.groups,
            weights().spec().group_size / BlockPanels::kBlockK};
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
    const int32_t* order = weights().order();
    alignas(64) uint8_t gathered[BlockPanels::kRecordK * sizeof(float)];
    for (int64_t k = 0; k < blocks_.k(); k += BlockPanels::kRecordK) {
      const int64_t count = std::min(BlockPanels::kRecordK, blocks_.k() - k);
      const uint8_t* record = from + k * a_size;
      if (order != nullptr) {
        Gather(from, a_size, order + k, count, gathered);
        record = gathered;
      }
      PackRecord(kernels_, record, static_cast<size_t>(count), to);
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
  CpuCore core_ = ThisCpuCore();
  FinishFloats finish_;
};

// `codes` are what the panels of the weights hold.
template <class Kernels>
PackedLayerOr CreateLayer(const LinearSpec& spec, const LinearWeights& weights,
                          const BlockCodes& codes, const Kernels& kernels) {
  static_assert(static_cast<int64_t>(kChunkLines) == BlockPanels::kRecordK,
                "a chunk of lines of one k is a record");
  const LinearWeightsSpec& w = weights.spec();
  const uint32_t flags = weights.zeros() == nullptr ? 0 : PackedHeader::kZeros;
  QUERN_ASSIGN_OR_RETURN(const PackedForm form, PackedForm::Of(w, flags));
  QUERN_ASSIGN_OR_RETURN(const VnniLayout lines,
                         VnniLayout::Create(DType::kF32, w.k, form.part_n));
  QUERN_ASSIGN_OR_RETURN(const BlockPanels blocks,
                         BlockPanels::Create(codes, w.k, form.part_n));
  return std::make_unique<const PackedBlocksLayer<Kernels>>(
      spec, weights, form, lines, blocks, kernels);
}

}  // namespace

PackedLayerOr CreatePackedBlocks(const LinearSpec& spec,
                                 const LinearWeights& weights) {
  const auto format = weights.spec().block_format;
  const BlockCodes codes = BlockTraitsOf(format).codes;
  if (spec.activations == LinearActivations::kExact) {
    return CreateLayer(spec, weights, codes,
                       GetExactBlockKernels(format, spec.a));
  }
  return CreateLayer(spec, weights, codes, GetBlockKernels(format, spec.a));
}

PackedLayerOr CreatePackedI4Blocks(const LinearSpec& spec,
                                   const LinearWeights& weights) {
  const bool zero_points = weights.zeros() != nullptr;
  return CreateLayer(spec, weights, {4, 0, 32, BlockScales::kNone},
                     GetI4BlockKernels(zero_points, spec.a));
}

}  // namespace quern
