#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/gemm/kernels/codes_kernels.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/codes_product.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

constexpr int64_t kChunkK = CodePieces::kChunkK;

class PackedCodesLayer final : public PackedLayer {
 public:
  PackedCodesLayer(const LinearSpec& spec, const LinearWeights& weights,
                   const PackedForm& form, const VnniLayout& pairs,
                   const CodeLayout& codes)
      : PackedLayer(weights),
        form_(form),
        a_(spec.a),
        pairs_(pairs),
        codes_(codes),
        pieces_{weights.spec().k, weights.spec().group_size},
        piece_count_(pieces_.Count()),
        linear_(GetLinearKernelsBF16(spec.a)),
        kernels_(GetCodesKernels(CodesOf(weights.spec().format), spec.a)),
        finish_(spec, weights) {
    if (kernels_.decoded.max_rows > 0) linear_.table = kernels_.decoded;
  }

  const char* target() const override { return kernels_.target; }
  std::string Explain(int64_t m) const override {
    const bool fused = Fused(std::clamp<int64_t>(m, 1, kBlockRows));
    return absl::StrCat("packed ", kernels_.target, " ", linear_.arithmetic,
                        ", decoded in ", fused ? "registers" : "scratch",
                        ", tiles of ",
                        TilesOf(m, fused ? kernels_.fused : linear_.table));
  }
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    ForEachRowBlock(args.a.extent(0), [&](int64_t first, int64_t rows) {
      const PackedProduct<float> product = ProductOf(rows, TileCount::kEven);
      Workspace memory = workspace;
      const Scratch scratch = LayOut(memory, rows, executor.num_workers());
      const auto pack = [&](int64_t row, uint32_t* to, int worker) {
        Pack(static_cast<const uint8_t*>(args.a.data()) +
                 (first + row) * RowBytes(args.a),
             product.a_chunk(), scratch.terms.RowSums(row),
             scratch.terms.Gathered(worker), to);
      };
      const auto multiply = [&](const uint32_t* a, const TileRange& range,
                                float* sums, int64_t stride,
                                int64_t part_stride, int worker) {
        MultiplyParts(product, a, scratch.terms.row_sums,
                      scratch.terms.Decoded(worker), range, sums, stride,
                      part_stride);
      };
      const auto finish = [&](const SumsBlock<float>& block) {
        finish_(block, first, args);
      };
      product.RunWith(scratch.product, executor, pack, multiply, finish);
    });
  }

  int64_t panels() const override { return pairs_.panels(); }
  int64_t lines() const override {
    return form_.parts * codes_.panel_bytes() / VnniLayout::kLineBytes;
  }
  void CountGroups(WorkspaceLayout& layout, int64_t rows,
                   int64_t workers) const override {
    LayOutGroups(layout, rows, workers);
  }
  void PackRow(const GroupedRows& all, const RowsBlock& block, int64_t row,
               const uint8_t* from, int worker) const override {
    const PackedProduct<float> product =
        ProductOf(block.rows, TileCount::kFewest);
    const GroupScratch scratch = ScratchOf(all);
    Pack(from, product.a_chunk(), scratch.terms.RowSums(block.first + row),
         scratch.terms.Gathered(worker),
         product.PackedRow(scratch.product.RowsOf(block), row));
  }
  void MultiplyBlock(const GroupedRows& all, const RowsBlock& block,
                     int64_t panel, int64_t panel_end, const LinearArgs& args,
                     int worker) const override {
    const PackedProduct<float> product =
        ProductOf(block.rows, TileCount::kFewest);
    const GroupScratch scratch = ScratchOf(all);
    product.MultiplyAllRows(
        panel, panel_end, scratch.product.SumsOf(worker),
        [&](const TileRange& range, float* sums, int64_t stride,
            int64_t part_stride) {
          MultiplyParts(product, scratch.product.RowsOf(block),
                        scratch.terms.RowSums(block.first),
                        scratch.terms.Decoded(worker), range, sums, stride,
                        part_stride);
        },
        [&](const SumsBlock<float>& sums) {
          finish_(sums, block.first, args);
        });
  }

 private:
  // What rows and workers need besides the product; null where not needed.
  struct Terms {
    uint8_t* decoded;   // every worker's weights, where tiles do not decode
    float* row_sums;    // [rows, pieces], where there are zero points
    uint8_t* gathered;  // every worker's row of a, where k has an order
    int64_t piece_count, row_bytes;

    uint8_t* Decoded(int worker) const {
      return decoded == nullptr ? nullptr : decoded + worker * kDecodedBytes;
    }
    float* RowSums(int64_t row) const {
      return row_sums == nullptr ? nullptr : row_sums + row * piece_count;
    }
    uint8_t* Gathered(int worker) const {
      return gathered == nullptr ? nullptr : gathered + worker * row_bytes;
    }
  };
  struct Scratch {
    PackedScratch<float> product;
    Terms terms;
  };
  struct GroupScratch {
    GroupedScratch<float> product;
    Terms terms;
  };

  void CountScratch(WorkspaceLayout& layout, int64_t rows,
                    int64_t workers) const override {
    LayOut(layout, rows, workers);
  }
  int64_t RowBytesOfA() const {
    return pieces_.k * static_cast<int64_t>(SizeOf(a_));
  }
  // Whether tiles decode on their way.
  bool Fused(int64_t rows) const {
    return linear_.elements_per_line == kernels_.fused_elements &&
           rows <= static_cast<int64_t>(kernels_.fused_most_rows);
  }
  PackedProduct<float> ProductOf(int64_t rows, TileCount tile_count) const {
    return {pairs_,
            Fused(rows) ? kernels_.fused : linear_.table,
            static_cast<int64_t>(PackedRowPitch(linear_.elements_per_line)),
            rows,
            form_.parts,
            tile_count};
  }
  CodesPart PartOf(int64_t part, bool fused) const {
    const int64_t scales = part * form_.part_scales;
    return {
        codes_,
        pieces_,
        form_.groups,
        piece_count_,
        kernels_,
        linear_,
        fused,
        weights().panels() + part * form_.part_bytes,
        weights().scales() + scales,
        weights().zeros() == nullptr ? nullptr : weights().zeros() + scales};
  }

  // Does for all parts what MultiplyCodes does for one.
  void MultiplyParts(const PackedProduct<float>& product, const uint32_t* a,
                     const float* row_sums, uint8_t* decoded,
                     const TileRange& range, float* sums, int64_t stride,
                     int64_t part_stride) const {
    const bool fused = Fused(product.tiles().rows);
    for (int64_t part = 0; part < form_.parts; ++part) {
      MultiplyCodes(PartOf(part, fused), product, a, row_sums, decoded, range,
                    sums, stride);
      sums += part_stride;
    }
  }

  template <typename Allocator>
  Terms LayOutTerms(Allocator& allocator, int64_t rows, int64_t workers,
                    bool decodes) const {
    Terms terms = {};
    terms.piece_count = piece_count_;
    terms.row_bytes = RowBytesOfA();
    if (decodes) {
      terms.decoded = allocator.template Allocate<uint8_t>(
          "decoded weights", workers * kDecodedBytes);
    }
    if (weights().zeros() != nullptr) {
      terms.row_sums = allocator.template Allocate<float>("sums of rows",
                                                          rows * piece_count_);
    }
    if (weights().order() != nullptr) {
      terms.gathered = allocator.template Allocate<uint8_t>(
          "permuted rows", workers * terms.row_bytes);
    }
    return terms;
  }
  template <typename Allocator>
  Scratch LayOut(Allocator& allocator, int64_t rows, int64_t workers) const {
    const auto product =
        ProductOf(rows, TileCount::kEven).LayOutWholeK(allocator, workers);
    return {product, LayOutTerms(allocator, rows, workers, !Fused(rows))};
  }
  // Some blocks may have fused tiles and others not.
  template <typename Allocator>
  GroupScratch LayOutGroups(Allocator& allocator, int64_t rows,
                            int64_t workers) const {
    const int64_t most = std::min(rows, kBlockRows);
    const size_t tile_rows =
        std::min(linear_.table.max_rows,
                 Fused(1) ? kernels_.fused.max_rows : linear_.table.max_rows);
    const auto product = GroupedScratch<float>::LayOut(
        allocator, ProductOf(most, TileCount::kFewest), rows, workers,
        static_cast<int64_t>(tile_rows));
    return {product, LayOutTerms(allocator, rows, workers, !Fused(most))};
  }
  GroupScratch ScratchOf(const GroupedRows& all) const {
    Workspace memory = all.workspace;
    return LayOutGroups(memory, all.rows, all.workers);
  }

  // A row of a, in the order of the codes, and its sums.
  void Pack(const uint8_t* from, int64_t a_chunk, float* row_sums,
            uint8_t* gathered, uint32_t* to) const {
    const auto a_size = static_cast<int64_t>(SizeOf(a_));
    const int64_t all_k = pieces_.k;
    if (weights().order() != nullptr) {
      Gather(from, a_size, weights().order(), all_k, gathered);
      from = gathered;
    }
    for (int64_t k = 0; k < all_k; k += kChunkK) {
      const int64_t count = std::min(kChunkK, all_k - k);
      // A line of codes is longer than a pair.
      if (count < kChunkK) {
        const auto per_pair = static_cast<int64_t>(linear_.elements_per_line);
        std::fill(to + count / 2 * per_pair,
                  to + RoundUp(count, int64_t{8}) / 2 * per_pair, 0u);
      }
      linear_.pack_row(from + k * a_size, static_cast<size_t>(count), to);
      to += a_chunk;
    }
    if (weights().zeros() == nullptr) return;
    for (int64_t k = 0; k < all_k;) {
      const int64_t end = pieces_.End(k);
      *row_sums++ =
          kernels_.sum(from + k * a_size, static_cast<size_t>(end - k));
      k = end;
    }
  }

  PackedForm form_;
  DType a_;
  VnniLayout pairs_;  // what the codes of one part become
  CodeLayout codes_;
  CodePieces pieces_;
  int64_t piece_count_;
  LinearKernels linear_;
  CodesKernels kernels_;
  FinishFloats finish_;
};

}  // namespace

PackedLayerOr CreatePackedCodes(const LinearSpec& spec,
                                const LinearWeights& weights) {
  const LinearWeightsSpec& w = weights.spec();
  const uint32_t flags = weights.zeros() == nullptr ? 0 : PackedHeader::kZeros;
  QUERN_ASSIGN_OR_RETURN(const PackedForm form, PackedForm::Of(w, flags));
  QUERN_ASSIGN_OR_RETURN(const VnniLayout pairs,
                         VnniLayout::Create(DType::kBF16, w.k, form.part_n));
  QUERN_ASSIGN_OR_RETURN(
      const CodeLayout codes,
      CodeLayout::Create(BitsOf(CodesOf(w.format)), w.k, form.part_n));
  return std::make_unique<const PackedCodesLayer>(spec, weights, form, pairs,
                                                  codes);
}

}  // namespace quern
