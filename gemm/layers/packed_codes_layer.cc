#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/kernels/codes_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/finish_sums.h"
#include "quern/gemm/layers/packed_layer_of.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/codes_product.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

// Rows of floats, weights that are codes with scales of groups: f32 sums.
class CodesArithmetic : public PackedArithmetic {
 public:
  using Sum = float;
  static constexpr bool kDecodes = true;

  // Each is null where it is not needed.
  struct Terms {
    Terms From(int64_t row) const {
      Terms terms = *this;
      terms.row_sums = RowSums(row);
      return terms;
    }
    uint8_t* Decoded(int worker) const {
      return decoded == nullptr ? nullptr : decoded + worker * kDecodedBytes;
    }
    float* RowSums(int64_t row) const {
      return row_sums == nullptr ? nullptr : row_sums + row * piece_count;
    }
    uint8_t* Gathered(int worker) const {
      return gathered == nullptr ? nullptr : gathered + worker * row_bytes;
    }

    uint8_t* decoded;   // every worker's weights, where tiles do not decode
    float* row_sums;    // [rows, pieces], where there are zero points
    uint8_t* gathered;  // every worker's row of a, where k has an order
    int64_t piece_count, row_bytes;
  };
  // Some blocks of many rows may have fused tiles and others not.
  template <typename Allocator>
  Terms LayOutTerms(Allocator& allocator, int64_t rows, int64_t workers) const {
    Terms terms = {};
    terms.piece_count = piece_count_;
    terms.row_bytes = pieces_.k * a_size();
    if (!Fused(std::min(rows, kBlockRows))) {
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

  // `pairs` is what the codes of one part become.
  CodesArithmetic(const LinearSpec& spec, const LinearWeights& weights,
                  const PackedForm& form, const VnniLayout& pairs,
                  const CodeLayout& codes)
      : PackedArithmetic(weights, spec.a, pairs, form.parts),
        form_(form),
        codes_(codes),
        pieces_{weights.spec().k, weights.spec().group_size},
        piece_count_(pieces_.Count()),
        linear_(GetLinearKernelsBF16(spec.a)),
        kernels_(GetCodesKernels(CodesOf(weights.spec().format), spec.a)),
        finish_(spec, weights) {
    if (kernels_.decoded.max_rows > 0) linear_.table = kernels_.decoded;
  }

  const char* target() const { return kernels_.target; }
  const char* name() const { return linear_.arithmetic; }
  bool Fused(int64_t rows) const {
    return linear_.elements_per_line == kernels_.fused_elements &&
           rows <= static_cast<int64_t>(kernels_.fused_most_rows);
  }
  const TileTable& TableFor(int64_t rows) const {
    return Fused(rows) ? kernels_.fused : linear_.table;
  }
  int64_t row_pitch() const {
    return static_cast<int64_t>(PackedRowPitch(linear_.elements_per_line));
  }
  int64_t panel_lines() const {
    return codes_.panel_bytes() / VnniLayout::kLineBytes;
  }
  size_t max_tile_rows() const {
    return std::min(linear_.table.max_rows, TableFor(1).max_rows);
  }

  // A row of a, in the order of the codes, and its sums.
  void PackRow(const PackedProduct<float>& product, const RowToPack& row,
               const Terms& terms) const {
    const uint8_t* from = row.a;
    if (weights().order() != nullptr) {
      uint8_t* gathered = terms.Gathered(row.worker);
      Gather(from, 0, pieces_.k, gathered);
      from = gathered;
    }
    ForEachChunk(product, row.to, [&](int64_t k, int64_t count, uint32_t* to) {
      // A line of codes is longer than a pair.
      if (count < CodePieces::kChunkK) {
        const auto per_pair = static_cast<int64_t>(linear_.elements_per_line);
        std::fill(to + count / 2 * per_pair,
                  to + RoundUp(count, int64_t{8}) / 2 * per_pair, 0u);
      }
      linear_.pack_row(from + k * a_size(), static_cast<size_t>(count), to);
    });
    if (weights().zeros() == nullptr) return;
    float* row_sums = terms.RowSums(row.row);
    for (int64_t k = 0; k < pieces_.k;) {
      const int64_t end = pieces_.End(k);
      *row_sums++ =
          kernels_.sum(from + k * a_size(), static_cast<size_t>(end - k));
      k = end;
    }
  }

  void MultiplyPart(int64_t part, const PackedProduct<float>& product,
                    const uint32_t* a, const Terms& terms, int worker,
                    const TileRange& range, float* sums, int64_t stride) const {
    const int64_t scales = part * form_.part_scales;
    const float* zeros = weights().zeros();
    const CodesPart codes = {codes_,
                             pieces_,
                             form_.groups,
                             piece_count_,
                             kernels_,
                             linear_,
                             Fused(product.tiles().rows),
                             weights().panels() + part * form_.part_bytes,
                             weights().scales() + scales,
                             zeros == nullptr ? nullptr : zeros + scales};
    MultiplyCodes(codes, product, a, terms.row_sums, terms.Decoded(worker),
                  range, sums, stride);
  }
  void Finish(const SumsBlock<float>& block, int64_t first,
              const LinearArgs& args, const Terms& /*terms*/) const {
    finish_(block, first, args);
  }

 private:
  PackedForm form_;
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
  return std::make_unique<const PackedLayerOf<CodesArithmetic>>(
      CodesArithmetic(spec, weights, form, pairs, codes));
}

}  // namespace quern
