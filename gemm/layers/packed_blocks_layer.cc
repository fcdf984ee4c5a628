#include <cstddef>
#include <cstdint>
#include <memory>

#include "quern/core/dtype.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/gemm/kernels/i4_block_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/finish_sums.h"
#include "quern/gemm/layers/packed_layer_of.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/block_product.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/prefetch_policy.h"
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
class BlocksArithmetic : public PackedArithmetic {
 public:
  using Sum = float;
  static constexpr bool kDecodes = true;
  static constexpr auto kOneRow = OneRowIsPacked::kByEachWorker;

  // `lines` is one part as lines of one k each: PackedProduct takes rows in
  // chunks of 256 lines, which are records of blocks.
  BlocksArithmetic(const LinearSpec& spec, const LinearWeights& weights,
                   const PackedForm& form, const VnniLayout& lines,
                   const BlockPanels& blocks, const Kernels& kernels)
      : PackedArithmetic(weights, spec.a, lines, form.parts),
        form_(form),
        blocks_(blocks),
        kernels_(kernels),
        finish_(spec, weights) {}

  const char* target() const { return kernels_.target; }
  const char* name() const { return kernels_.arithmetic; }
  bool Fused(int64_t rows) const {
    const auto most = static_cast<int64_t>(kernels_.fused.max_rows);
    return most > 0 && rows <= most;
  }
  const TileTable& TableFor(int64_t rows) const {
    return Fused(rows) ? kernels_.fused : kernels_.decoded;
  }
  int64_t row_pitch() const { return BlockKind<Kernels>::RowPitch(kernels_); }
  int64_t panel_lines() const {
    return blocks_.panel_bytes() / BlockPanels::kLineBytes;
  }
  // A block of few rows is one tile that decodes in registers and needs no
  // spare row, so only the other tiles count.
  size_t max_tile_rows() const { return kernels_.decoded.max_rows; }

  void PackRow(const PackedProduct<float>& product, const RowToPack& row,
               const Terms& /*terms*/) const {
    const bool ordered = weights().order() != nullptr;
    alignas(64) uint8_t gathered[BlockPanels::kRecordK * sizeof(float)];
    ForEachChunk(product, row.to, [&](int64_t k, int64_t count, uint32_t* to) {
      if (ordered) Gather(row.a, k, count, gathered);
      PackRecord(kernels_, ordered ? gathered : row.a + k * a_size(),
                 static_cast<size_t>(count), to);
    });
  }
  void MultiplyPart(int64_t part, const PackedProduct<float>& product,
                    const uint32_t* a, const Terms& /*terms*/, int /*worker*/,
                    const TileRange& range, float* sums, int64_t stride) const {
    const int64_t rows = product.tiles().rows;
    const BlockPart<Kernels> blocks = {
        blocks_,        kernels_,
        Fused(rows),    weights().panels() + part * form_.part_bytes,
        GroupsOf(part), FusedAheadBytes(core_, rows)};
    MultiplyBlocks(blocks, product, a, range, sums, stride);
  }
  void Finish(const SumsBlock<float>& block, int64_t first,
              const LinearArgs& args, const Terms& /*terms*/) const {
    finish_(block, first, args);
  }

 private:
  PanelGroups GroupsOf(int64_t part) const {
    if (form_.groups == 0) return {};
    const int64_t scales = part * form_.part_scales;
    const float* zeros = weights().zeros();
    return {weights().scales() + scales,
            zeros == nullptr ? nullptr : zeros + scales, form_.groups,
            weights().spec().group_size / BlockPanels::kBlockK};
  }

  PackedForm form_;
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
  return std::make_unique<const PackedLayerOf<BlocksArithmetic<Kernels>>>(
      BlocksArithmetic<Kernels>(spec, weights, form, lines, blocks, kernels));
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
